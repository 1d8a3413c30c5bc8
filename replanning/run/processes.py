"""What a process that was killed left running: found again by what its run has noted, and ended."""

from __future__ import annotations

import os
import platform
import re
import select
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from replanning.journal.observations import AttemptFailed, AttemptSucceeded, ProcessStarted
from replanning.journal.owner import DEAD_STATES, STAT_START_TIME, pid_namespace_id, process_stat
from replanning.journal.records import Record
from replanning.plan.types import RunId

IDEMPOTENCY_KEY_VARIABLE: Final = "REPLANNING_IDEMPOTENCY_KEY"
"""The variable by which a process learns the idempotency key of its attempt, and by which we know it again."""

KILL_TIMEOUT_SECONDS: Final = 5.0
"""Seconds that killed processes have to be gone; only the system itself can hold one up for longer."""

_MAX_KILL_ROUNDS: Final = 20
"""How often processes are looked for that others start while they are being killed."""

_EMPTY_SCANS_REQUIRED: Final = 3
"""After how many looks in vain none is left: one that ends during a look may have started another behind it."""

_PROC_DIR: Final = Path("/proc")


def host_id() -> str:
    """Where numbers of processes mean the same, as a record of a process names it."""
    return f"{platform.node()} ({pid_namespace_id()})"


def process_start_time(pid: int) -> float:
    """When a process started, in clock ticks since boot; 0 where that cannot be told."""
    stat = process_stat(pid)
    return float(stat[STAT_START_TIME]) if stat else 0.0


def kill_orphaned_processes(run: RunId, records: Iterable[Record]) -> list[int]:
    """Kill the process groups that attempts of a run started on this machine and left behind.

    Returns when they are gone. Must be called by the owner of the run, before anything is run again. Where the
    system does not tell of processes in /proc, none is recognised, and none is killed.

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
        elif isinstance(body, AttemptSucceeded | AttemptFailed):
            # Work that reported its end has ended its processes. One that was timed out or cancelled may have
            # been at that when its process was killed.
            noted.pop(body.attempt, None)
    started = [process for groups in noted.values() for process in groups.values()]
    return [process.group for process in started if process.host == host_id() and _kill_group(run, process)]


def _kill_group(run: RunId, process: ProcessStarted) -> bool:
    """Kill a process group, if it still is the one that was noted: numbers of processes are used again."""
    group = process.group
    if group <= 1 or group == os.getpgrp() or not _belongs_to_attempt(run, process):
        return False
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    for pid in _group_members(group):
        _wait_for_exit(pid)
    return True


def _belongs_to_attempt(run: RunId, process: ProcessStarted) -> bool:
    """Whether the leader of the group is the one that was noted, or else somebody in it works for that attempt."""
    if not _group_exists(process.group):
        return False
    if process.born and process_start_time(process.group) == process.born:
        return True
    key = f"{run}/{process.attempt.rpartition('#')[0]}"
    mark = f"{IDEMPOTENCY_KEY_VARIABLE}={key}".encode()
    of_ours = re.compile(re.escape(mark) + rb"(#continued-\d+)?")
    return any(of_ours.fullmatch(said) for pid in _group_members(process.group) for said in _process_environ(pid))


def kill_processes_with_variable(mark: bytes) -> None:
    """Kill all processes whose environment holds a variable, also those that left the group of who started them.

    Returns when they are gone. Where the system does not tell of processes in /proc, none is found.

    Args:
        mark: the variable, as `NAME=value`; nobody else may have that value.
    """
    in_vain = 0
    for _ in range(_MAX_KILL_ROUNDS):
        newest_first = sorted(_all_pids(), reverse=True)  # so that the youngest have the least time to start another
        killed = [pid for pid in newest_first if mark in _process_environ(pid) and _kill_process(pid, mark)]
        in_vain = 0 if killed else in_vain + 1
        if in_vain == _EMPTY_SCANS_REQUIRED:
            return


def _kill_process(pid: int, mark: bytes) -> bool:
    """Kill a process that holds a mark, and nobody who got its number meanwhile; whether one is gone by that."""
    try:
        end = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return False
    try:
        if mark not in _process_environ(pid):
            return False
        signal.pidfd_send_signal(end, signal.SIGKILL)
        waiting = select.poll()
        waiting.register(end, select.POLLIN)
        return bool(waiting.poll(KILL_TIMEOUT_SECONDS * 1000))
    except OSError:
        return False
    finally:
        os.close(end)


def _all_pids() -> Iterator[int]:
    """All processes of which the system tells."""
    if _PROC_DIR.is_dir():
        yield from (int(entry.name) for entry in _PROC_DIR.iterdir() if entry.name.isdecimal())


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _group_members(group: int) -> Iterator[int]:
    """The living processes of a group; none where the system does not tell."""
    for pid in _all_pids():
        stat = process_stat(pid)
        if stat and int(stat[2]) == group and stat[0] not in DEAD_STATES:
            yield pid


def _process_environ(pid: int) -> list[bytes]:
    """The variables that a process was started with; none where it is gone or belongs to someone else."""
    try:
        return (_PROC_DIR / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _wait_for_exit(pid: int) -> None:
    """Wait until a killed process is gone."""
    with suppress(OSError):  # it is gone already, or the system has no way to wait for it
        end = os.pidfd_open(pid)
        try:
            waiting = select.poll()  # unlike `select`, for any number of open files
            waiting.register(end, select.POLLIN)
            waiting.poll(KILL_TIMEOUT_SECONDS * 1000)
        finally:
            os.close(end)
