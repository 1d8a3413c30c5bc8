"""Orphans of a killed process: found again by the records of its run, and killed."""

from __future__ import annotations

import os
import platform
import re
import select
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from replanning.environment import DEAD_STATES, STAT_START_TIME, pid_namespace_id, process_stat
from replanning.journal.records import AttemptFailed, AttemptSucceeded, ProcessStarted, Record
from replanning.plan.types import RunId

IDEMPOTENCY_KEY_VARIABLE: Final = "REPLANNING_IDEMPOTENCY_KEY"
"""Environment variable with an attempt's idempotency key, which marks its processes."""

KILL_TIMEOUT_SECONDS: Final = 5.0
"""Seconds to wait for killed processes to exit.

Only the system itself can hold one up for longer.
"""

_MAX_SCANS: Final = 200
"""Scans for processes to kill, on a machine on which others never stop coming and going."""

_EMPTY_SCANS_REQUIRED: Final = 3
"""Empty scans in a row that mean the end: a process may start another during a scan."""

_PROC_DIR: Final = Path("/proc")


def host_id() -> str:
    """Return a name for the machine and process namespace, in which process ids are unique."""
    return f"{platform.node()} ({pid_namespace_id()})"


def process_start_time(pid: int) -> float:
    """Return the start time of a process in clock ticks since boot.

    It is 0 where the system does not tell.
    """
    stat = process_stat(pid)
    return float(stat[STAT_START_TIME]) if stat else 0.0


def kill_orphaned_processes(run: RunId, records: Iterable[Record]) -> list[int]:
    """Kill the process groups that attempts of a run started on this machine and left behind.

    Returns when they are gone. Must be called by the owner of the run, before anything is run
    again. On systems without /proc no process is recognised, and none is killed.

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
            # Work that reported its end has ended its processes; work that was timed out or
            # cancelled may have been about to when its process was killed.
            noted.pop(body.attempt, None)
    started = [process for groups in noted.values() for process in groups.values()]
    return [
        process.group
        for process in started
        if process.host == host_id() and _kill_group(run, process)
    ]


def _kill_group(run: RunId, process: ProcessStarted) -> bool:
    """Kill a process group, if it still is the one on record, as process ids are used again.

    It is if its leader has the time of birth on record, or if a member of it works for that
    attempt.
    """
    group = process.group
    # To signal group 0 or 1, or our own, would hit this process or the whole system.
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
            pattern.fullmatch(variable) for pid in members for variable in _process_environ(pid)
        ):
            return False
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    for pid in _group_members(group):
        with (
            suppress(AttributeError, OSError),
            _descriptor(pid) as end,
        ):  # otherwise it is gone already
            _wait_for_exit(end)
    return True


def kill_processes_with_variable(mark: bytes) -> None:
    """Kill the processes with a variable in their environment, in whatever group they are.

    Returns when they are gone. On systems without /proc no process is found.

    Args:
        mark: the variable, as `NAME=value`; no other process may have that value.
    """
    others = set[
        int
    ]()  # without the mark, and looked at only once: the rest is looked at before it can flee
    unreadable = set[int]()
    empty_scans = 0
    for _ in range(_MAX_SCANS):
        found = False
        gone: set[int] = set()
        pids = set(_all_pids())
        others &= pids
        for pid in pids - others:
            environ = _process_environ(pid)
            if mark in environ:
                found = True
                _kill_process(pid, mark)
            elif not environ:
                gone.add(pid)
                continue
            others.add(pid)
        # One that was gone before it was looked at may have held the mark, and started another.
        empty_scans = 0 if found or gone - unreadable else empty_scans + 1
        unreadable = gone
        if empty_scans == _EMPTY_SCANS_REQUIRED:
            return


def _kill_process(pid: int, mark: bytes) -> None:
    """Kill a process with a mark, never one that has its id meanwhile, and wait for its end."""
    with suppress(AttributeError, OSError), _descriptor(pid) as end:
        if mark in _process_environ(pid):
            signal.pidfd_send_signal(end, signal.SIGKILL)
            _wait_for_exit(end)


@contextmanager
def _descriptor(pid: int) -> Iterator[int]:
    end = os.pidfd_open(pid)
    try:
        yield end
    finally:
        os.close(end)


def _wait_for_exit(descriptor: int) -> None:
    waiting = select.poll()  # unlike `select`, for any number of open files
    waiting.register(descriptor, select.POLLIN)
    waiting.poll(KILL_TIMEOUT_SECONDS * 1000)


def _all_pids() -> Iterator[int]:
    """Iterate over the ids of all processes."""
    if _PROC_DIR.is_dir():
        yield from (int(entry.name) for entry in _PROC_DIR.iterdir() if entry.name.isdecimal())


def _group_members(group: int) -> Iterator[int]:
    """Iterate over the living processes of a group; none on systems without /proc."""
    for pid in _all_pids():
        stat = process_stat(pid)
        if stat and int(stat[2]) == group and stat[0] not in DEAD_STATES:
            yield pid


def _process_environ(pid: int) -> list[bytes]:
    """Return the environment that a process was started with.

    It is empty where the process is gone or belongs to another user.
    """
    try:
        return (_PROC_DIR / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
