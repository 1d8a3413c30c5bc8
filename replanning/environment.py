"""Clock, randomness, ids and folder of a run, with the real ones as defaults; and the identity of this process.

A run is owned by one process, which is known by its machine, its number and its start time.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final, Protocol

import anyio

__all__ = ["Clock", "Environment", "SystemClock"]


class Clock(Protocol):
    """Source of time."""

    def now(self) -> float:
        """Seconds since the epoch, UTC; never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return when this much time has passed."""
        ...


class SystemClock:
    """Clock of this machine: the time of day at the start, monotonic from then on.

    Args:
        not_before: a time that has passed, though on another machine, from which a clock that is
            behind it continues.
    """

    def __init__(self, not_before: float = 0.0) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()  # noqa: TID251 - this is the clock that is injected

    def __repr__(self) -> str:
        return "<SystemClock>"

    def now(self) -> float:
        """Seconds since the epoch, UTC."""
        return self._offset + time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Sleep for real."""
        await anyio.sleep(seconds)  # noqa: TID251 - likewise


def lease_time(clock: Clock) -> float:
    """Return the time by which processes compare leases: the time of day, or for other clocks than `SystemClock`, their time.

    `SystemClock` stands still while the machine sleeps, so the clocks of two processes may differ.
    """
    return time.time() if isinstance(clock, SystemClock) else clock.now()  # noqa: TID251 - see above


@asynccontextmanager
async def move_on_after(seconds: float, clock: Clock) -> AsyncIterator[anyio.CancelScope]:
    """Cancel a block that takes longer than `seconds` on a clock; yields its cancel scope."""

    async def expire() -> None:
        await clock.sleep(seconds)
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(expire)
        yield group.cancel_scope
        group.cancel_scope.cancel()


def new_run_id() -> str:
    """Return a unique id that sorts by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(6)}"


@dataclass(frozen=True, slots=True)
class Environment:
    """Sources of time, randomness and ids of a run; pass others to make it deterministic.

    Attributes:
        clock: time.
        chance: numbers in [0, 1), for the jitter of retries.
        new_id: ids of runs.
        directory: the absolute path of the folder in which tools work. Without one, a new run works
            in the folder of this process, and a resumed run where it worked before. An empty text
            if that is for others to decide.
    """

    clock: Clock = field(default_factory=SystemClock)
    chance: Callable[[], float] = random.random
    new_id: Callable[[], str] = new_run_id
    directory: str | None = None


# The process that owns a run

_OWNER_PATTERN: Final = re.compile(r"process (\d+) on (.*) \((\w+)\.(\w+)\)", re.DOTALL)

_UNKNOWN_START_TIME: Final = "unknown"

DEAD_STATES: Final = ("Z", "X")
"""Process states in `/proc/PID/stat` of a process that has ended, be it not yet collected by its
parent.
"""

STOPPED_STATES: Final = (["T"], ["t"])
"""Process states in `/proc/PID/stat` of a process that was suspended by a signal or a debugger."""

STAT_START_TIME: Final = 19
"""Index in `process_stat` of the start time of a process, in clock ticks since boot."""


def owner_id() -> str:
    """Return the name of this process as the owner of a run; no earlier or later process has the same name."""
    return _owner_id(os.getpid())  # by number, because a forked child is another owner


def is_lease_free(owner: str | None, until: float, at: float) -> bool:
    """Return whether a lease can be taken: it was released, the process of its owner is gone, or it has ended.

    Another process that runs on this machine keeps its runs even if its lease seems to have ended,
    because its clock may be behind. A suspended process does not keep them: it cannot renew its
    leases.
    """
    if owner is None:
        return True
    match = _OWNER_PATTERN.fullmatch(owner)
    if match is not None:
        pid, host, born, where = int(match[1]), *match.groups()[1:]
        if (host, where) == (
            socket.gethostname(),
            pid_namespace_id(),
        ):  # of other machines nothing is known
            if _process_start_time(pid) != born:
                return True
            if pid != os.getpid() and process_stat(pid)[:1] not in STOPPED_STATES:
                return False
    return at > until


@cache
def _owner_id(pid: int) -> str:
    return (
        f"process {pid} on {socket.gethostname()} ({_process_start_time(pid)}.{pid_namespace_id()})"
    )


@cache
def pid_namespace_id() -> str:
    """Return an id of the scope in which process numbers are unique: one boot of a machine, one container on it.

    Containers and machines may share a host name; after a boot the numbers begin anew.
    """
    marks = [socket.gethostname()]
    with suppress(OSError):
        marks.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
    with suppress(OSError):
        marks.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.sha256("\n".join(marks).encode(errors="surrogateescape")).hexdigest()[:12]


def _process_start_time(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot, or None if it is gone.

    Where the system does not show start times the result is a constant word, and only the number
    identifies processes.
    """
    if stat := process_stat(pid):
        return None if stat[0] in DEAD_STATES else stat[STAT_START_TIME]
    # Not only gone processes lack the file: a system may hide those of other users, or have no
    # /proc.
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        pass
    return _UNKNOWN_START_TIME


def process_stat(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` from the process state on; empty if the process is gone or hidden."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
