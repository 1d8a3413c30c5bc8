"""Where output goes: results to standard output, everything else to standard error."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from replanning.version import __version__

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from replanning.errors import Problem


NON_TTY_WIDTH: Final = 120
"""Characters to a line of a table in a file or pipe."""

_CONTROL_CHARACTERS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def prepare_streams() -> None:
    """Let no character that the terminal cannot show end a run, nor that there is nowhere to show it."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - the process closes it
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115 - likewise
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def console(*, error: bool = False) -> Console:
    """A console that shows text as it is: no markup, no guesses at what to colour; wide where it is no terminal."""
    from rich.console import Console

    stream = sys.stderr if error else sys.stdout
    width = None if stream.isatty() else NON_TTY_WIDTH
    return Console(stderr=error, width=width, markup=False, highlight=False, emoji=False, soft_wrap=True)


def print_result(renderable: RenderableType) -> None:
    """Print a result on standard output."""
    console().print(renderable)


def print_message(text: str) -> None:
    """Print something about the work on standard error; that it cannot be read there is no reason to stop the work."""
    with suppress(OSError):
        sys.stderr.write(f"{escape_control(text)}\n")
        sys.stderr.flush()


def print_json(value: object) -> None:
    """Print a result as JSON on standard output; in ASCII, which every program reads."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")
    sys.stdout.flush()


def problems_json(problems: Iterable[Problem]) -> list[dict[str, str]]:
    """Problems for `print_json`."""
    return [{"place": problem.place, "message": problem.message} for problem in problems]


def escape_control(text: str) -> str:
    """Text from tools and plans without what would steer the terminal."""
    return _CONTROL_CHARACTERS.sub(lambda found: f"\\x{ord(found[0]):02x}", text.replace("\r\n", "\n"))


def show_version(*, as_json: bool) -> None:
    """Print the version of the library and of what it runs on."""
    if as_json:
        print_json({"replanning": __version__, "python": platform.python_version(), "platform": platform.platform()})
    else:
        print_result(f"replanning {__version__} (Python {platform.python_version()})")
