"""Reader of one run, which replays the journal once and then follows new records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Final

from replanning.history.events import PlanEdit, ReplanEvent
from replanning.history.history import ReplanHistory
from replanning.history.overview import RunOverview, find_repairs, task_rows
from replanning.history.status import ReplayedRun, apply_record, replay_records, status_report
from replanning.journal.records import (
    AttemptFailed,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    PlanRevised,
    Record,
    RunOpened,
)
from replanning.journal.store import RunInfo, RunStore
from replanning.plan.messages import spoken_id
from replanning.plan.types import AttemptId, JsonValue, RunId, TaskId

ENDED_ATTEMPTS: Final = (AttemptSucceeded, AttemptFailed, AttemptTimedOut, AttemptInterrupted)
"""Kinds of record that end an attempt."""


@dataclass(slots=True)
class AttemptSpan:
    """One attempt at a task, as the timeline and the page of the task show it.

    Attributes:
        attempt: id of the attempt.
        task: id of the task.
        number: counts from 1; 0 if it asks whether an earlier attempt was done.
        started: in seconds since the epoch.
        ended: in seconds since the epoch; None while it runs.
        outcome: `done`, `failed`, `timed out`, `cut off`, or empty while it runs.
        error: the reason for the failure.
        traceback: the traceback of its exception, if it raised one.
        output: the recorded output.
        retry_at: when the task is tried again, in seconds since the epoch.
    """

    attempt: AttemptId
    task: TaskId
    number: int
    started: float
    ended: float | None = None
    outcome: str = ""
    error: str = ""
    traceback: str = ""
    output: JsonValue = None
    retry_at: float | None = None


class RunReader:
    """A run as replayed from its journal, kept up to date with new records.

    Its state is the replayed run, its history and its attempts; only `update` changes them, under
    a lock, because several threads serve pages.

    Args:
        store: holds the journal.
        run: the id of the run.

    Raises:
        UnknownRun: the store has no such run.
        JournalCorrupt: the journal cannot be read.
    """

    def __init__(self, store: RunStore, run: RunId) -> None:
        self.store = store
        self.run = run
        self.attempts: dict[AttemptId, AttemptSpan] = {}
        self.lock = Lock()
        records = list(store.read(run))
        self._seq = len(records)
        self._replayed = replay_records(records)
        self.history = ReplanHistory(lambda after: records[after:])
        # From here on, it reads new records, and any that it replays, from the store.
        self.history.records = lambda after: store.read(run, after)
        for record in records:
            self._follow(record)

    @property
    def opened(self) -> RunOpened:
        """The record that opened the run."""
        return self._replayed.opened

    @property
    def seq(self) -> int:
        """The number of the last record that was read."""
        return self._seq

    def update(self) -> None:
        """Read the new records."""
        with self.lock:
            opened, live, ledger, started, updated = self._replayed
            for record in self.store.read(self.run, self._seq):
                apply_record(record, live, ledger, opened.run)
                self.history.fold(record)
                self._follow(record)
                self._seq = record.seq
                updated = record.at
            self._replayed = ReplayedRun(opened, live, ledger, started, updated)

    def _follow(self, record: Record) -> None:
        """Update the attempts from a record."""
        body = record.body
        if isinstance(body, AttemptStarted):
            number = body.number
            if body.confirms is not None:
                number = 0
            self.attempts[body.attempt] = AttemptSpan(body.attempt, body.task, number, record.at)
            return
        if not isinstance(body, ENDED_ATTEMPTS):
            return
        span = self.attempts.get(body.attempt)
        # A late report is about an attempt that has ended already.
        if span is None or span.ended is not None:
            return
        span.ended = record.at
        if isinstance(body, AttemptSucceeded):
            span.outcome = "done"
            span.output = body.output
            return
        span.error = str(body.failure)
        span.traceback = body.failure.traceback or ""
        span.retry_at = body.retry_at
        if isinstance(body, AttemptTimedOut):
            span.outcome = "timed out"
        elif isinstance(body, AttemptInterrupted):
            span.outcome = "cut off"
        else:
            span.outcome = "failed"
            span.output = body.output

    def overview(self, info: RunInfo, now: float) -> RunOverview:
        """Return the current state of the run; the caller holds the lock."""
        return self._overview_of(self._replayed, info, now)

    def overview_at(self, revision: int, info: RunInfo, now: float) -> RunOverview:
        """Return the run as it was at the end of a revision, just before the next one."""
        if revision == self.history.revision:
            return self.overview(info, now)
        records: list[Record] = []
        for record in self.store.read(self.run):
            if isinstance(record.body, PlanRevised) and record.body.number > revision:
                break
            records.append(record)
        return self._overview_of(replay_records(records), info, records[-1].at)

    def _overview_of(self, replayed: ReplayedRun, info: RunInfo, now: float) -> RunOverview:
        status = status_report(replayed, self.store, info, now)
        rows = tuple(task_rows(replayed.live, replayed.ledger, status.until))
        repairs = tuple(find_repairs(self.history, replayed.live))
        return RunOverview(status, rows, repairs, replayed)

    def attempts_of(self, task: TaskId) -> Iterator[AttemptSpan]:
        """Yield the attempts at a task, oldest first."""
        for span in self.attempts.values():
            if span.task == task:
                yield span

    def decision(self, name: str) -> ReplanEvent | PlanEdit | None:
        """Return the replan with a name such as `replan-2`, or the entry that made a revision."""
        for event in self.history.events:
            if spoken_id(event.replan).replace(" ", "-") == name:
                return event
        if name.isdecimal():
            return self.history.entry(int(name))
        return None
