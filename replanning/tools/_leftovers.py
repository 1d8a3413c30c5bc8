"""What a process that was killed left running, to be ended before its run is resumed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

IDEMPOTENCY_VARIABLE = "REPLANNING_IDEMPOTENCY_KEY"
"""The variable by which a process learns the idempotency key of its attempt, and by which we know it again."""

_PROCESSES = Path("/proc")


def kill_leftovers(group: int, idempotency_key: str) -> bool:
    """Kill a process group that an earlier process of the run noted, if it is still that group.

    Numbers of processes are used again, so a group is killed only where a process in it carries the
    idempotency key of the attempt in its environment. That can be seen on Linux alone; elsewhere nothing is
    killed.

    Args:
        group: what `note_process` was given.
        idempotency_key: the key of the attempt that the group worked for.

    Returns:
        Whether there was something to kill.
    """
    mark = f"{IDEMPOTENCY_VARIABLE}={idempotency_key}".encode()
    if not any(mark in _environment(pid) for pid in _members(group)):
        return False
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    return True


def _members(group: int) -> Iterator[int]:
    """The processes of a group."""
    if not _PROCESSES.is_dir():
        return
    for entry in _PROCESSES.iterdir():
        if entry.name.isdecimal():
            with suppress(ProcessLookupError, PermissionError):
                if os.getpgid(int(entry.name)) == group:
                    yield int(entry.name)


def _environment(pid: int) -> list[bytes]:
    """The variables that a process was started with; none where it is gone or belongs to someone else."""
    try:
        return (_PROCESSES / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
