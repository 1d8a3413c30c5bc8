"""The command line: parses arguments and calls the library."""

from __future__ import annotations

import sys
from typing import Final

__all__ = ["main"]

_INTERRUPTED: Final = 130


def main() -> None:
    """Run the command that the arguments name, and end the process with its exit code."""
    try:
        from replanning.cli.app import app
        from replanning.cli.options import prepare_streams

        prepare_streams()
        app()
    except KeyboardInterrupt:
        # Ctrl-C before a command has begun, while the program is still being imported.
        if sys.stderr is not None:
            sys.stderr.write("error: interrupted\n")
        raise SystemExit(_INTERRUPTED) from None
