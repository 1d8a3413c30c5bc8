"""Clock, randomness, ids and folder of a run, and the identity of the process that owns it.

A process is identified by its machine, its PID and its start time.
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
        """Seconds since the epoch, UTC; never goes backwards."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after this many seconds."""
        ...


class SystemClock:
    """Clock of this machine: the time of day at the start, monotonic from then on.

    Args:
        not_before: a time that has passed on another machine; if this machine is behind it, the
            clock continues from there.
    """

    def __init__(self, not_before: float = 0.0) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()  # noqa: TID251 - the injected clock

    def __repr__(self) -> str:
        return "<SystemClock>"

    def now(self) -> float:
        """Seconds since the epoch, UTC."""
        return self._offset + time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Sleep for real."""
        await anyio.sleep(seconds)  # noqa: TID251 - the injected clock


def lease_time(clock: Clock) -> float:
    """Return the time that processes compare leases with.

    It is the time of day instead of that of `SystemClock`, which stops while the machine sleeps, so
    that the clocks of two processes may differ. Other clocks are trusted.
    """
    if isinstance(clock, SystemClock):
        return time.time()  # noqa: TID251 - see above
    return clock.now()


@asynccontextmanager
async def move_on_after(seconds: float, clock: Clock) -> AsyncIterator[anyio.CancelScope]:
    """Cancel a block that takes longer than `seconds` on a clock; yield its cancel scope."""

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
        clock: source of time.
        chance: returns numbers in [0, 1), for the jitter of retries.
        new_id: returns ids of runs.
        directory: the absolute path of the folder for tools. Without one, a new run works in the
            folder of this process, and a resumed run where it worked before. Empty if another
            program decides it.
    """

    clock: Clock = field(default_factory=SystemClock)
    chance: Callable[[], float] = random.random
    new_id: Callable[[], str] = new_run_id
    directory: str | None = None


# The process that owns a run

_OWNER_PATTERN: Final = re.compile(r"process (\d+) on (.*) \((\w+)\.(\w+)\)", re.DOTALL)

_UNKNOWN_START_TIME: Final = "unknown"

DEAD_STATES: Final = ("Z", "X")
"""States in `/proc/PID/stat` of a process that has ended, even if it was not reaped."""

STOPPED_STATES: Final = (["T"], ["t"])
"""States in `/proc/PID/stat` of a process that a signal or a debugger has suspended."""

STAT_START_TIME: Final = 19
"""Index in `process_stat` of the start time of a process, in clock ticks since boot."""


def owner_id() -> str:
    """Return the name of this process as the owner of a run; no other process ever has it."""
    # By PID, because a forked child is another owner.
    return _owner_id(os.getpid())


def is_lease_free(owner: str | None, until: float, at: float) -> bool:
    """Return whether a lease can be taken: it was released, has ended, or its process is gone.

    Another running process on this machine keeps its runs even if its lease seems to have ended,
    because its clock may be behind. A suspended process does not: it cannot renew its leases.
    """
    if owner is None:
        return True
    has_ended = at > until
    match = _OWNER_PATTERN.fullmatch(owner)
    if match is None:
        return has_ended
    number, host, born, namespace = match.groups()
    # Nothing is known about the processes of other machines.
    if (host, namespace) != (socket.gethostname(), pid_namespace_id()):
        return has_ended
    pid = int(number)
    if _process_start_time(pid) != born:
        return True
    if pid != os.getpid() and process_stat(pid)[:1] not in STOPPED_STATES:
        return False
    return has_ended


@cache
def _owner_id(pid: int) -> str:
    identity = f"{_process_start_time(pid)}.{pid_namespace_id()}"
    return f"process {pid} on {socket.gethostname()} ({identity})"


@cache
def pid_namespace_id() -> str:
    """Return an id of the scope of PIDs: a boot of the machine, or a container in it.

    Containers and machines may share a host name; after a boot, PIDs start again.
    """
    marks = [socket.gethostname()]
    with suppress(OSError):
        marks.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
    with suppress(OSError):
        marks.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.sha256("\n".join(marks).encode(errors="surrogateescape")).hexdigest()[:12]


def _process_start_time(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot, or None if it is gone.

    If the system does not show start times, the result is a constant word, and only the PID
    identifies the process.
    """
    stat = process_stat(pid)
    if stat:
        if stat[0] in DEAD_STATES:
            return None
        return stat[STAT_START_TIME]
    # A living process may lack the file, too: a system may hide those of other users, or have no
    # /proc.
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        pass
    return _UNKNOWN_START_TIME


def process_stat(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` from the process state on; empty without the file."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
