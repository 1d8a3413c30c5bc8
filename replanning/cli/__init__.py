"""The command line: parses arguments and calls the library."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command that the arguments name, and end the process with its exit code."""
    from replanning.cli._app import app
    from replanning.cli._output import prepare_streams

    prepare_streams()
    app()
