"""Who owns a run: a process, told apart from every other by its machine, its number and when it was born."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

_OWNER_PATTERN: Final = re.compile(r"process (\d+) on (.*) \((\w+)\.(\w+)\)", re.DOTALL)

_UNKNOWN_START_TIME: Final = "unknown"

DEAD_STATES: Final = ("Z", "X")
"""Process states in `/proc/PID/stat` of a process that has ended, be it not yet collected by its parent."""

STAT_START_TIME: Final = 19
"""Index in `process_stat` of the start time of a process, in clock ticks since boot."""


def owner_id() -> str:
    """How this process is called as the owner of a run; no process before or after it has the same name."""
    # By number, because a forked child is another owner.
    return _owner_id(os.getpid())


def is_lease_free(owner: str | None, until: float, at: float) -> bool:
    """Whether a lease can be taken: it was released, it has ended, or its owner's process is gone."""
    return owner is None or at > until or _is_dead(owner)


def _is_dead(owner: str) -> bool:
    """Whether an owner is certain to write no more. Of another machine's processes nothing is certain."""
    match = _OWNER_PATTERN.fullmatch(owner)
    if match is None:
        return False
    pid, host, born, where = match.groups()
    if (host, where) != (socket.gethostname(), pid_namespace_id()):
        return False
    return _process_start_time(int(pid)) != born


@cache
def _owner_id(pid: int) -> str:
    return f"process {pid} on {socket.gethostname()} ({_process_start_time(pid)}.{pid_namespace_id()})"


@cache
def pid_namespace_id() -> str:
    """Within what process numbers are unique: a boot of a machine, and a container on it.

    Containers and machines may share a host name; after a boot the numbers begin anew.
    """
    marks = [socket.gethostname()]
    with suppress(OSError):
        marks.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
    with suppress(OSError):
        marks.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.sha256("\n".join(marks).encode(errors="surrogateescape")).hexdigest()[:12]


def _process_start_time(pid: int) -> str | None:
    """When the process with this number started, in clock ticks since boot; None when there is none.

    Where the system does not tell, it is a word: then only the number tells processes apart.
    """
    stat = process_stat(pid)
    if not stat:
        # Not only gone processes lack the file: a system may hide those of other users, or have no /proc.
        return _UNKNOWN_START_TIME if _process_exists(pid) else None
    return None if stat[0] in DEAD_STATES else stat[STAT_START_TIME]


def process_stat(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` from the process state on; empty if the process is gone or hidden."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
