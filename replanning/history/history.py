"""The history of a run's replanning: a projection of its journal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Self

from replanning.changes import PlanChange
from replanning.errors import JournalCorrupt, ReplanningError, StoreError
from replanning.history.diff import PlanDiff, diff_plans
from replanning.history.events import PlanEdit, ReplanEvent
from replanning.history.fold import MAX_EVENTS, ReplanFold
from replanning.journal.records import DecisionKind, PlanRevised, Record, RunOpened
from replanning.journal.store import RunStore
from replanning.live.plan import LivePlan
from replanning.plan.document import Plan
from replanning.plan.types import RunId

RecordSource = Callable[[int], Iterable[Record]]
"""Gives the records with a number greater than the one it is called with."""


class ReplanHistory(ReplanFold):
    """What was replanned in a run, and why; what the plan was at any revision.

    It is derived from the journal and keeps the newest replans in memory, never a plan: the plan at a revision is
    found by replaying. `run.history`, `engine.history(run_id)` and `ReplanHistory.of(store, run_id)` make one.

    Args:
        records: the journal.
        max_events: how many replans are kept, the newest; figures are over all.

    Raises:
        JournalCorrupt: the journal does not begin with the opening of a run.
    """

    def __init__(self, records: RecordSource, *, max_events: int = MAX_EVENTS) -> None:
        super().__init__(max_events)
        self.records = records
        self.refresh()
        if not hasattr(self, "plan"):
            raise JournalCorrupt("this journal does not begin with the opening of a run, so it has no history")

    def __repr__(self) -> str:
        return f"<ReplanHistory of {self.run!r} replans={self.metrics.replans} revision={self.revision} {self.status}>"

    @classmethod
    def of(cls, store: RunStore, run_id: str, *, max_events: int = MAX_EVENTS) -> Self:
        """The history of a run in a store.

        Raises:
            UnknownRun: the store has no such run.
            JournalCorrupt: its journal cannot be read.
        """
        return cls(lambda after: store.read(RunId(run_id), after), max_events=max_events)

    @classmethod
    def from_json(cls, text: str, *, max_events: int = MAX_EVENTS) -> Self:
        """The history that `to_json` exported, with everything that it had there.

        Raises:
            JournalCorrupt: the text is something else, or was changed so that it no longer fits together.
        """
        from replanning.history.export import import_records

        records = import_records(text)
        history = cls(lambda after: records[after:], max_events=max_events)
        try:
            history.replay()
        except ReplanningError as error:
            raise JournalCorrupt(f"the records of this history do not fit together: {error}") from error
        return history

    def refresh(self) -> Self:
        """Take in what was recorded since; returns itself."""
        for record in self.records(self.seq):
            self.fold(record)
        return self

    def filter(
        self,
        *,
        trigger: str | None = None,
        decision: DecisionKind | None = None,
        success: bool | None = None,
        since: datetime | float | None = None,
        until: datetime | float | None = None,
    ) -> tuple[ReplanEvent, ...]:
        """The kept replans that meet every condition given, oldest first.

        Args:
            trigger: a kind that is among their triggers.
            decision: what became of them.
            success: whether what they applied worked out; those of which that is not known meet neither.
            since: not before this time: aware, or in seconds since the epoch.
            until: before this time.
        """
        wanted = None if success is None else "success" if success else "failure"
        start, end = _epoch_seconds(since), _epoch_seconds(until)
        return tuple(
            event
            for event in self._events.values()
            if (trigger is None or trigger in event.trigger_kinds)
            and (decision is None or event.decision == decision)
            and (wanted is None or event.outcome == wanted)
            and (start is None or event.at >= start)
            and (end is None or event.at < end)
        )

    def entry(self, revision: int) -> ReplanEvent | PlanEdit | None:
        """The replan or edit that made a revision, where it is still kept."""
        return next((entry for entry in self.entries if entry.after == revision), None)

    def replay(self, revision: int | None = None, *, before: bool = False) -> LivePlan:
        """The live plan at the moment a revision had been applied; as it stands now when none is named.

        Args:
            revision: its number; 0 is the plan as it was given.
            before: the moment before it was applied instead.

        Raises:
            StoreError: there is no such revision.
        """
        live: LivePlan | None = None
        for record in self.records(0):
            body = record.body
            if live is None:
                assert isinstance(body, RunOpened)
                live = LivePlan(body.plan)
            else:
                made = isinstance(body, PlanRevised) and body.number == revision
                if made and before:
                    return live
                live.fold(record)
                if made:
                    return live
            if revision == 0:
                return live
        if live is None or revision is not None:
            raise self._unknown_revision(revision)
        return live

    def plan_at(self, revision: int) -> Plan:
        """The plan at a revision, as a document.

        Raises:
            StoreError: there is no such revision.
        """
        return self.replay(revision).document()

    def diff(self, before: int, after: int) -> PlanDiff:
        """What differs between any two revisions.

        Raises:
            StoreError: there is no such revision.
        """
        first, last = sorted((before, after))
        plans: dict[int, Plan] = {}
        between: list[PlanChange] = []
        for live, changes in self._replay_revisions():
            if live.revision > first:
                between += changes
            if live.revision in (first, last):
                plans[live.revision] = live.document()
            if live.revision == last:
                return diff_plans(plans[before], plans[after], numbers=(before, after), between=between)
        raise self._unknown_revision(last)

    def to_json(self) -> str:
        """The whole history as JSON: figures and entries to read, and the journal from which it is imported."""
        from replanning.history.export import history_json

        return json.dumps(history_json(self), indent=1) + "\n"

    def to_markdown(self) -> str:
        """The history as a Markdown document, with the plan before and after as Mermaid diagrams."""
        from replanning.history.markdown import markdown_report

        return markdown_report(self)

    def _replay_revisions(self) -> Iterator[tuple[LivePlan, tuple[PlanChange, ...]]]:
        """The live plan at the moment of each revision, with the changes that led to it."""
        live: LivePlan | None = None
        for record in self.records(0):
            if live is None:
                assert isinstance(record.body, RunOpened)
                live = LivePlan(record.body.plan)
                yield live, ()
            else:
                live.fold(record)
                if isinstance(record.body, PlanRevised):
                    yield live, record.body.changes

    def _unknown_revision(self, revision: int | None) -> StoreError:
        return StoreError(f"run {self.run!r} has no revision {revision}; it has revisions 0 to {self.revision}")


def _epoch_seconds(at: datetime | float | None) -> float | None:
    return at.timestamp() if isinstance(at, datetime) else at
