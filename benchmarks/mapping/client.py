"""The two converters for all programs. Each call takes a few milliseconds and is logged."""

from __future__ import annotations

import os
import signal
import time

DOCUMENTS = 200
AT_ONCE = 10
"""Maximum number of concurrent calls of a program."""

SECONDS = float(os.environ.get("SECONDS", "0.005"))
"""Time of a call."""

LINE = 20
"""Characters of a line in the file of calls."""


def convert(n: int) -> dict[str, object]:
    """Convert a document with the usual converter.

    Raises:
        ValueError: it cannot, and will not later; that is so for 5 % of the documents.
    """
    _call("usual", n)
    if n % 20 == 7:
        raise ValueError(f"document {n} is not readable")
    return {"n": n, "by": "usual"}


def convert_elsewhere(n: int) -> dict[str, object]:
    """Convert a document with the other converter, which can do nearly all.

    Raises:
        ValueError: it cannot, either.
    """
    _call("other", n)
    if str(n) in os.environ.get("HOPELESS", "").split():
        raise ValueError(f"document {n} is empty")
    return {"n": n, "by": "other"}


def _call(converter: str, n: int) -> None:
    """Write a call down, take time, and kill the process if this is the call at which that happens."""
    file = os.open(os.environ["CALLS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, f"{converter} {n}".ljust(LINE - 1).encode() + b"\n")
    number = os.lseek(file, 0, os.SEEK_CUR) // LINE
    os.close(file)
    time.sleep(SECONDS)
    if str(number) == os.environ.get("KILL_AT"):
        os.kill(os.getpid(), signal.SIGKILL)
