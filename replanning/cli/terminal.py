"""Text wrapped to the width of a terminal; files and pipes get unwrapped lines."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from replanning.history.wording import wrap_line

_PROGRAM: Final = "replanning"

NON_TTY_WIDTH: Final = 120
"""Width of output to a file or pipe, in characters."""


_UNLIMITED_WIDTH: Final = 10_000
"""Width at which no table is cut or wrapped."""


class TerminalConsole(Console):
    """Console that prints text literally, and on a terminal wraps lines between words.

    Args:
        error: print on standard error.

    Attributes:
        wraps: whether lines are wrapped.
    """

    def __init__(self, *, error: bool = False) -> None:
        stream = sys.stdout
        if error:
            stream = sys.stderr
        self.wraps = stream.isatty()
        width = None
        if not self.wraps:
            width = NON_TTY_WIDTH
        super().__init__(
            stderr=error, width=width, markup=False, highlight=False, emoji=False, soft_wrap=True
        )

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects; on a terminal, texts are wrapped between words."""
        fitting: list[Any] = []
        for value in objects:
            if self.wraps and isinstance(value, str):
                value = wrap_text(value, self.width)  # noqa: PLW2901
            fitting.append(value)
        super().print(*fitting, **options)

    def on_broken_pipe(self) -> None:
        """Raise `BrokenPipeError`; Rich would end the process with a code of its own."""
        raise BrokenPipeError(errno.EPIPE, "nobody reads the output any more")


def plain_table() -> Table:
    """Return an empty table without borders, with two spaces between columns."""
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")


def print_table(out: Console, table: Table) -> None:
    """Print a table: as wide as the terminal, or uncut to a file or pipe.

    Trailing spaces are removed.
    """
    if not out.is_terminal:
        out.width = _UNLIMITED_WIDTH
    with out.capture() as captured:
        out.print(table)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def discard_stdout() -> None:
    """Redirect standard output to the null device, because its reader is gone.

    Buffered text goes there as well when the process ends.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def wrap_text(text: str, width: int) -> str:
    """Wrap the lines of a text between words; commands remain valid for the shell."""
    lines: list[str] = []
    for line in text.split("\n"):
        if line.lstrip().startswith(f"{program_name()} ") and line.startswith(" "):
            lines += _command_lines(line, width)
        else:
            lines += wrap_line(line, width)
    return "\n".join(lines)


def _command_lines(line: str, width: int) -> list[str]:
    """Wrap a command; for the shell, all lines but the last end with a backslash."""
    command = line.lstrip()
    indentation = line.removesuffix(command)
    parts: list[str] = []
    after_option = False
    for word in map(shlex.quote, shlex.split(command)):
        # An option and its value stay together.
        if after_option and not word.startswith("-"):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
        after_option = word.startswith("--")
    lines: list[str] = []
    current = indentation
    for word in parts:
        # The backslash and the space before it need room, too.
        if current.strip() and len(current) + len(word) > width - 2:
            lines.append(f"{current}\\")
            current = f"{indentation}    "
        current += f"{word} "
    return [*lines, current.rstrip()]


def program_name() -> str:
    """Return the name of this program, or its path if the shell does not find the name."""
    name = Path(sys.argv[0]).name
    if name != _PROGRAM or shutil.which(_PROGRAM):
        return _PROGRAM
    return sys.argv[0]
