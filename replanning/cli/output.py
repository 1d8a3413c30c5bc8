"""Printed output and exit codes: results go to standard output, everything else to standard error."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from replanning.errors import Problem

NON_TTY_WIDTH: Final = 120
"""Characters on one line of a table in a file or pipe."""

DIFF_STYLES: Final = {"+": "green", "-": "red"}
"""Colours of the lines of a diff, by their first character."""

_CONTROL_CHARACTERS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class ExitCode(IntEnum):
    """Result of a command, for the program that started it."""

    OK = 0
    FAILED = 1
    """The run failed or was aborted."""
    USAGE = 2
    """The command, a file, a setting or the store cannot be used; nothing was run."""
    PAUSED = 3
    """The run is paused and can be resumed."""
    NEEDS_HUMAN = 4
    """The run waits until a person answers a question."""
    INTERRUPTED = 130
    """The run was stopped at once by a second Ctrl-C; it can be resumed."""


def prepare_streams() -> None:
    """Make printing safe: replace characters that the terminal cannot show, and closed streams by the null device."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - the process closes it
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115 - likewise
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def console(*, error: bool = False) -> Console:
    """Return a Rich console that prints text literally, without markup, emoji codes or automatic colours."""
    from rich.console import Console

    stream = sys.stderr if error else sys.stdout
    width = None if stream.isatty() else NON_TTY_WIDTH
    return Console(stderr=error, width=width, markup=False, highlight=False, emoji=False, soft_wrap=True)


def print_result(renderable: RenderableType) -> None:
    """Print a result on standard output."""
    console().print(renderable)


def print_message(text: str) -> None:
    """Print a message on standard error; a closed standard error is ignored, so that the work continues."""
    with suppress(OSError):
        sys.stderr.write(f"{escape_control(text)}\n")
        sys.stderr.flush()


def print_json(value: object) -> None:
    """Print a result as JSON on standard output, in ASCII so that every program can read it."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")
    sys.stdout.flush()


def problems_json(problems: Iterable[Problem]) -> list[dict[str, str]]:
    """Return problems in the form that `--json` prints."""
    return [{"place": problem.place, "message": problem.message} for problem in problems]


def escape_control(text: str) -> str:
    """Return text from tools and plans with control characters, which could steer the terminal, shown as codes."""
    return _CONTROL_CHARACTERS.sub(lambda match: f"\\x{ord(match[0]):02x}", text.replace("\r\n", "\n"))


def fail(message: str, code: ExitCode = ExitCode.USAGE) -> NoReturn:
    """Print an error on standard error and end the command."""
    print_message(f"error: {message}")
    raise typer.Exit(code)


def refuse(message: str) -> NoReturn:
    """End the command because the object it names does not exist, or does not allow the operation."""
    fail(message, ExitCode.FAILED)
