"""Processes of tools: marked, ended with all their children, found again after a crash.

A process can leave its group and lose its parent, but not the variable that it was started with. So
the processes of an attempt, or of an MCP server, carry a mark in their environment
(`process_mark`), and `ProcessTree` finds them by it wherever they are. Processes left behind by an
earlier, killed process of this library are found by the records of its run
(`kill_orphaned_processes`).
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import select
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Final

from replanning.environment import (
    DEAD_STATES,
    STAT_START_TIME,
    owner_id,
    pid_namespace_id,
    process_stat,
)
from replanning.journal.records import AttemptFailed, AttemptSucceeded, ProcessStarted, Record
from replanning.plan.types import RunId

IDEMPOTENCY_KEY_VARIABLE: Final = "REPLANNING_IDEMPOTENCY_KEY"
"""Environment variable with an attempt's idempotency key, which marks its processes."""

MARK_VARIABLE: Final = "REPLANNING_PROCESS_MARKS"
"""Environment variable with the marks of a process, separated by colons.

The last one is its own; the others belong to the runs whose tasks started this one.
"""

KILL_TIMEOUT_SECONDS: Final = 5.0
"""Seconds to wait for killed processes to exit.

Only the system can delay one for longer.
"""

_MAX_SCANS: Final = 200
"""Limit of scans for processes to kill, on a machine where others keep coming and going."""

_EMPTY_SCANS_REQUIRED: Final = 3
"""Number of empty scans in a row before giving up: a process may start another during a scan."""

_STAT_FLAGS: Final = 6
"""Position of the flags of a process in what `process_stat` returns."""

_KERNEL_THREAD: Final = 0x00200000
"""Flag of threads of the kernel, which have no environment."""

_PROC_DIR: Final = Path("/proc")


def host_id() -> str:
    """Return a name for the machine and process namespace; process ids are unique in it."""
    return f"{platform.node()} ({pid_namespace_id()})"


def process_start_time(pid: int) -> float:
    """Return the start time of a process in clock ticks since boot.

    It is 0 where the system does not tell.
    """
    stat = process_stat(pid)
    return float(stat[STAT_START_TIME]) if stat else 0.0


def kill_orphaned_processes(run: RunId, records: Iterable[Record]) -> list[int]:
    """Kill the process groups that attempts of a run started on this machine and left behind.

    Returns when they are gone. The owner of the run must call it before any task runs again. On
    systems without /proc no process is recognised, and none is killed.

    Args:
        run: the run.
        records: its journal.

    Returns:
        The groups that were killed.
    """
    noted: dict[str, dict[int, ProcessStarted]] = {}
    for record in records:
        body = record.body
        if isinstance(body, ProcessStarted):
            noted.setdefault(body.attempt, {})[body.group] = body
        elif noted and isinstance(body, AttemptSucceeded | AttemptFailed):
            # Work that reported its end has ended its processes. Work that timed out or was
            # cancelled may have been about to do so when its process was killed.
            noted.pop(body.attempt, None)
    started = [process for groups in noted.values() for process in groups.values()]
    return [
        process.group
        for process in started
        if process.host == host_id() and _kill_group(run, process)
    ]


def _kill_group(run: RunId, process: ProcessStarted) -> bool:
    """Kill a process group if it is still the recorded one; process ids are reused.

    It is if its leader has the recorded start time, or if a member works for that attempt.
    """
    group = process.group
    # Signalling group 0 or 1, or our own, would hit this process or the whole system.
    if group <= 1 or group == os.getpgrp():
        return False
    with suppress(PermissionError):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
    if not (process.born and process_start_time(group) == process.born):
        key = f"{run}/{process.attempt.rpartition('#')[0]}"
        mark = f"{IDEMPOTENCY_KEY_VARIABLE}={key}".encode()
        pattern = re.compile(re.escape(mark) + rb"(#changed-\d+)?(#continued-\d+)?")
        members = _group_members(group)
        if not any(
            pattern.fullmatch(variable)
            for pid in members
            for variable in _process_environ(pid).split(b"\0")
        ):
            return False
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    for pid in _group_members(group):
        with (
            suppress(AttributeError, OSError),
            _descriptor(pid) as end,
        ):  # otherwise it is gone already
            _wait_for_exit(end, KILL_TIMEOUT_SECONDS)
    return True


_marks_in_use: Final = set[str]()
"""Marks of everything that this process has started and not seen end."""


@contextmanager
def process_mark(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield a mark for processes started in this block, and their value of `MARK_VARIABLE`.

    Args:
        environ: the environment in which this process works, which may have marks itself.
    """
    owner = hashlib.sha256(owner_id().encode(errors="surrogateescape")).hexdigest()[:16]
    mark = f"{owner}.{token_hex(8)}"
    value = mark
    outer = environ.get(MARK_VARIABLE)
    if outer:
        value = f"{outer}:{mark}"
    _marks_in_use.add(mark)
    try:
        yield mark, value
    finally:
        _marks_in_use.discard(mark)


def kill_marked_processes() -> list[str]:
    """Kill all processes of this process's tools at once; return those that cannot be ended."""
    left: list[str] = []
    for mark in list(_marks_in_use):
        left += ProcessTree(mark).end()
    return left


class ProcessTree:
    """The processes with a mark and their descendants, in any group or session.

    A process without the mark belongs to them if its parent does: it may run with an empty
    environment, or as another user, whose environment cannot be read. On systems without /proc no
    process is found.

    Its state is its knowledge of processes. Each is examined once, before it can move to another
    parent.

    Args:
        mark: the mark; no other process may have it.
    """

    def __init__(self, mark: str) -> None:
        if not mark:
            raise ValueError(
                "mark: it is empty, so that every process of the machine would have it"
            )
        self._mark = mark.encode()
        self._members: dict[int, str] = {}  # their start times, because process ids are reused
        self._others: set[int] = set()
        self._unreadable: set[int] = set()
        self._kills_at_sight = False

    def __repr__(self) -> str:
        return f"<ProcessTree {sorted(self._members)}>"

    def find(self) -> bool:
        """Examine new processes; return whether there may be more.

        There may be more if one was found, or if one ended before it was examined: both may have
        started another.
        """
        pids = set(_all_pids())
        self._others &= pids
        unreadable: set[int] = set()
        unmarked: dict[int, tuple[int, str]] = {}
        count = len(self._members)
        killed = False
        unknown = pids - self._others - self._members.keys()
        # The newest first: a process that keeps forking is ended only before it forks again.
        for pid in sorted(unknown, reverse=True):
            environ = _process_environ(pid)
            if self._kills_at_sight and self._mark in environ:
                killed = True
                self._kill_marked(pid)
            stat = process_stat(pid)
            if not environ:
                unreadable.add(pid)
            if not stat or stat[0] in DEAD_STATES:
                continue
            # Only scans that are fast enough catch a process that keeps forking.
            if int(stat[_STAT_FLAGS]) & _KERNEL_THREAD:
                self._others.add(pid)
                continue
            if self._mark in environ:
                self._members[pid] = stat[STAT_START_TIME]
            else:
                unmarked[pid] = int(stat[1]), stat[STAT_START_TIME]
                if environ:
                    self._others.add(pid)
        self._adopt_children(unmarked)
        found = killed or len(self._members) > count or bool(unreadable - self._unreadable)
        self._unreadable = unreadable
        return found

    def _kill_marked(self, pid: int) -> None:
        """Kill a process with the mark, never a later one with its id."""
        with suppress(AttributeError, OSError), _descriptor(pid) as end:
            if self._mark in _process_environ(pid):
                signal.pidfd_send_signal(end, signal.SIGKILL)

    def _adopt_children(self, unmarked: Mapping[int, tuple[int, str]]) -> None:
        """Add the processes whose parents belong to the tree, and their children in turn."""
        while True:
            children = [
                pid
                for pid, (parent, _) in unmarked.items()
                if pid not in self._members and self._is_member(parent)
            ]
            if not children:
                return
            for pid in children:
                self._members[pid] = unmarked[pid][1]
                self._others.discard(pid)

    def _is_member(self, pid: int) -> bool:
        born = self._members.get(pid)
        return born is not None and process_stat(pid)[STAT_START_TIME:][:1] == [born]

    def terminate(self, *, except_group: int = 0) -> None:
        """Ask all processes to end, except those in a group that was already asked."""
        for pid in self._members:
            if process_stat(pid)[2:3] == [str(except_group)]:
                continue
            with suppress(AttributeError, OSError), _descriptor(pid) as end:
                if self._is_member(pid):
                    signal.pidfd_send_signal(end, signal.SIGTERM)

    def end(self, grace: float = 0.0) -> list[str]:
        """Kill all processes that do not end in time; return when they are gone.

        Args:
            grace: seconds that they have to end on their own.

        Returns:
            The id and command of each process that cannot be ended, such as one of another user.
        """
        deadline = time.monotonic() + grace
        left: dict[int, str] = {}
        empty_scans = 0
        for scan in range(_MAX_SCANS):
            # A process that is new since the first scan may be gone in a moment, replaced by
            # another.
            self._kills_at_sight = scan > 0 and time.monotonic() >= deadline
            found = self.find()
            for pid, born in list(self._members.items()):
                if pid in left:
                    continue
                if _end_process(pid, born, deadline):
                    del self._members[pid]
                    self._others.add(pid)
                else:
                    left[pid] = f"process {pid} ({_command_line(pid)})"
            empty_scans = 0 if found else empty_scans + 1
            if empty_scans == _EMPTY_SCANS_REQUIRED:
                break
        return list(left.values())


def _end_process(pid: int, born: str, deadline: float) -> bool:
    """Wait for the end of a process, kill it at the deadline, and return whether it is gone."""
    try:
        with _descriptor(pid) as end:
            # The descriptor may belong to another process that has reused the id.
            if process_stat(pid)[STAT_START_TIME:][:1] != [born]:
                return True
            if _wait_for_exit(end, deadline - time.monotonic()):
                return True
            signal.pidfd_send_signal(end, signal.SIGKILL)
            return _wait_for_exit(end, KILL_TIMEOUT_SECONDS)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):  # the system cannot, or it belongs to another user
        return False


def _command_line(pid: int) -> str:
    """Return the command of a process as text; empty if it is gone."""
    try:
        words = (_PROC_DIR / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    return words.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")


@contextmanager
def _descriptor(pid: int) -> Iterator[int]:
    end = os.pidfd_open(pid)
    try:
        yield end
    finally:
        os.close(end)


def _wait_for_exit(descriptor: int, patience: float) -> bool:
    """Wait a number of seconds for a process to end, and return whether it is gone."""
    waiting = select.poll()  # unlike `select`, for any number of open files
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(max(0.0, patience) * 1000))


def _all_pids() -> Iterator[int]:
    """Iterate over the ids of all processes."""
    if _PROC_DIR.is_dir():
        with os.scandir(_PROC_DIR) as entries:
            yield from (int(entry.name) for entry in entries if entry.name.isdecimal())


def _group_members(group: int) -> Iterator[int]:
    """Iterate over the living processes of a group; none on systems without /proc."""
    for pid in _all_pids():
        stat = process_stat(pid)
        if stat and int(stat[2]) == group and stat[0] not in DEAD_STATES:
            yield pid


def _process_environ(pid: int) -> bytes:
    """Return the environment that a process was started with, as the system keeps it.

    It is empty if the process is gone or belongs to another user.
    """
    try:
        return (_PROC_DIR / str(pid) / "environ").read_bytes()
    except OSError:
        return b""
