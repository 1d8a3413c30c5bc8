"""The command line: parses arguments and calls the library."""

from __future__ import annotations

import logging
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final, Never

__all__ = ["main"]

_WORKER_THREAD_NAME: Final = "AnyIO worker thread"

_IDLE_THREAD_SECONDS: Final = 0.2
"""Maximum time that an idle thread needs to end, in seconds."""


class _EscapingFormatter(logging.Formatter):
    """Escapes control characters: messages quote answers of services and errors of plugins."""

    def format(self, record: logging.LogRecord) -> str:
        from replanning.cli.app import escape_control  # slow to load

        return escape_control(super().format(record))


def main() -> None:
    """Run the command that the arguments name, and exit with its code."""
    # Printing never fails: closed streams become the null device, and characters that the terminal
    # cannot show are escaped.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - the process closes it
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115 - the process closes it
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if logging.lastResort is not None:
        # Warnings go to standard error.
        warnings = logging.StreamHandler()
        warnings.setLevel(logging.lastResort.level)
        warnings.setFormatter(_EscapingFormatter())
        logging.getLogger("replanning").addHandler(warnings)
    # The display reports the events of a run, including lost connections of its store.
    for name in ("replanning.run", "replanning.planning", "psycopg.pool"):
        in_runs = logging.getLogger(name)
        in_runs.addHandler(logging.NullHandler())
        in_runs.propagate = False
    try:
        from replanning.cli.app import app

        app()
    except KeyboardInterrupt:
        # It came before a command started, while the program was still being imported.
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
    except SystemExit as end:
        if isinstance(end.code, int) and ("temporalio" in sys.modules or _has_abandoned_threads()):
            _end_at_once(end.code)
        raise


def _has_abandoned_threads() -> bool:
    """Return whether threads still execute abandoned functions, for example after a timeout.

    The interpreter would wait for them forever.
    """
    for thread in threading.enumerate():
        if thread.name == _WORKER_THREAD_NAME and not thread.daemon:
            thread.join(_IDLE_THREAD_SECONDS)
            if thread.is_alive():
                return True
    return False


def _end_at_once(code: int) -> Never:
    """End the process without shutting down the interpreter, which waits for threads.

    Threads of Temporal's SDK run until the process ends. One that calls into Python during the
    shutdown aborts the process.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the reader is gone
            stream.flush()
    os._exit(code)
