"""Takes a picture of each command on a terminal of 80 columns, below `build/pictures/commands`.

`python scripts/look_at_commands.py` runs the demo in a temporary folder, the help of every command,
and the commands that read a run. Each picture is an SVG. Lines wider than the terminal, which it
breaks at any character, are listed.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path
from typing import Final

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from replanning.cli.app import COMMANDS

ROOT: Final = Path(__file__).parents[1]
PICTURES: Final = ROOT / "build" / "pictures" / "commands"
COLUMNS: Final = 80

LOOKS: Final = (
    "status",
    "show latest",
    "why latest",
    "history latest",
    "history latest --calibration",
    "decisions latest",
    "diff latest",
    "effects latest",
    "undo latest --dry-run",
    "pending",
    "validate plan.yaml",
    "validate nothing.yaml",
    "simulate plan.yaml --runs 20",
    "config show",
    "config check",
    "providers",
    "version",
)
"""Commands about the run of the demo, in its folder."""


def main() -> None:
    """Take the pictures."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    helps = [f"{name} --help" for panel in COMMANDS.values() for name in panel]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "replanning-demo"
        draw("demo", screen("demo", place, on_terminal=False))
        for command in ("--help", *helps, *LOOKS):
            draw(command, screen(command, str(folder), on_terminal=True))


def screen(command: str, folder: str, *, on_terminal: bool) -> str:
    """Return the output of a command, with its colours.

    Args:
        command: its words, without the name of the program.
        folder: its working directory.
        on_terminal: false for a command that redraws its progress, which a picture cannot show.
    """
    words = [sys.executable, "-m", "replanning", *command.split()]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    environment.pop("NO_COLOR", None)
    if not on_terminal:
        environment["FORCE_COLOR"] = "1"
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        return done.stderr + done.stdout

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 60, COLUMNS, 0, 0))
    process = subprocess.Popen(
        words, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment
    )
    os.close(theirs)
    printed = b""
    while True:
        select.select([ours], [], [])
        try:
            data = os.read(ours, 65536)
        except OSError:  # the program has ended and closed its terminal
            break
        if not data:
            break
        printed += data
    process.wait()
    os.close(ours)
    return printed.decode(errors="replace").replace("\r\n", "\n")


def draw(command: str, printed: str) -> None:
    """Write the output of a command as a picture, and list the lines that are too wide."""
    text = Text.from_ansi(printed)
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(text)
    name = command.replace(" ", "-").replace("--", "")
    console.save_svg(str(PICTURES / f"{name}.svg"), title=f"replanning {command}")
    for line in text.plain.splitlines():
        if cell_len(line) > COLUMNS:
            sys.stdout.write(f"{command}: {cell_len(line)} columns: {line.strip()[:100]}\n")


if __name__ == "__main__":
    main()
