"""Past success of tools and of applied alternatives, which is evidence for later scores."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from replanning.changes import target_task_ids
from replanning.decision.confidence import source_key
from replanning.journal.records import (
    AttemptFailed,
    AttemptInterrupted,
    AttemptSucceeded,
    AttemptTimedOut,
    OutcomeRecorded,
    PlanRevised,
    Record,
)
from replanning.journal.store import ToolOutcome
from replanning.live.graph import MAX_OUTCOMES_PER_TOOL
from replanning.live.states import STUCK
from replanning.run.lifecycle import Lifecycle

_ATTEMPT_ENDS: Final = (AttemptSucceeded, AttemptFailed, AttemptTimedOut, AttemptInterrupted)


class AlternativeOutcomeTracker:
    """Records whether applied alternatives have worked out.

    Args:
        life: the run that they were applied to.
    """

    def __init__(self, life: Lifecycle) -> None:
        self._lifecycle = life
        self._subscribed = False
        life.observers[PlanRevised].append(self._on_revised)
        self._subscribe()

    def recheck(self, record: Record) -> None:
        """Handle the last record of a resumed run, in case its earlier process had no time to."""
        if isinstance(record.body, _ATTEMPT_ENDS):
            self._on_attempt_end(record)
        elif isinstance(record.body, PlanRevised):
            self._on_revised(record)

    def _on_revised(self, record: Record) -> None:
        self._subscribe()
        assert isinstance(record.body, PlanRevised)
        live, watching = self._lifecycle.live, self._lifecycle.ledger.pending_outcomes
        watched = (watching.get(live.entry(task_id).root) for task_id in target_task_ids(record.body.changes))
        applied = next((a for a in watched if a is not None and a.replan == record.body.replan), None)
        if applied is not None and all(live.entry(root).satisfied for root in applied.roots):
            # After a skip no attempt will end: it has worked out at once.
            self._lifecycle.commit_or_defer(OutcomeRecorded(applied.replan, True, 0.0))

    def _subscribe(self) -> None:
        """Observe the ends of attempts, once there is an alternative whose outcome is pending."""
        if self._lifecycle.ledger.pending_outcomes and not self._subscribed:
            self._subscribed = True
            for kind in _ATTEMPT_ENDS:
                self._lifecycle.observers.setdefault(kind, []).append(self._on_attempt_end)

    def _on_attempt_end(self, record: Record) -> None:
        watching = self._lifecycle.ledger.pending_outcomes
        if not watching:
            return
        live = self._lifecycle.live
        entry = live.entry(record.body.task)  # type: ignore[union-attr]
        applied = watching.get(entry.root)
        if applied is None:
            return
        failed = entry.state in STUCK
        done = all(live.entry(root).satisfied for root in applied.roots)
        if failed or done:
            self._lifecycle.commit_or_defer(OutcomeRecorded(applied.replan, done, record.at - applied.applied_at))


class PastOutcomes:
    """Evidence of past success: outcomes of a tool in this run, then in earlier runs, then those of its capability.

    By `source_key` it finds the outcomes of a source's alternatives.

    Args:
        life: the run whose outcomes come first; its store has those of earlier runs.
    """

    def __init__(self, life: Lifecycle) -> None:
        self._lifecycle = life

    def __call__(self, tool: str) -> Sequence[bool]:
        """Return the last outcomes of a tool, oldest first."""
        live, ledger, store = self._lifecycle.live, self._lifecycle.ledger, self._lifecycle.journal.store
        own = list(live.outcomes.get(tool, ()) or ledger.outcomes_by_source.get(tool, ()))
        if len(own) < MAX_OUTCOMES_PER_TOOL:
            earlier = [outcome.succeeded for outcome in reversed(store.outcomes(tool=tool, capability=None))]
            own = [*earlier, *own][-MAX_OUTCOMES_PER_TOOL:]
        if own:
            return own
        spec = live.tools.get(tool)
        if spec is None or spec.capability is None:
            return ()
        # The failures of a tool that is to be replaced say nothing about its replacement.
        failing = {live.entry(task_id).task.tool for task_id in live.stuck}
        same = [t.name for t in live.tools.values() if t.capability == spec.capability and t.name not in failing]
        earlier = [o.succeeded for o in reversed(store.outcomes(tool=None, capability=spec.capability))]
        return [*earlier, *(o for name in same for o in live.outcomes.get(name, ()))][-MAX_OUTCOMES_PER_TOOL:]


class OutcomeCollector:
    """Collects the outcomes of tools and alternatives for later runs; stored when the run is left.

    Args:
        life: the run.
    """

    def __init__(self, life: Lifecycle) -> None:
        self._lifecycle = life
        self._outcomes: list[ToolOutcome] = []
        observers = life.observers
        for kind in (
            (AttemptSucceeded, AttemptFailed, AttemptTimedOut) if life.live.dependency_index.resource_users else ()
        ):
            observers.setdefault(kind, []).append(self._on_attempt_end)
        observers.setdefault(OutcomeRecorded, []).append(self._on_alternative_outcome)

    def _on_alternative_outcome(self, record: Record) -> None:
        body = record.body
        assert isinstance(body, OutcomeRecorded)
        source = self._lifecycle.ledger.source_by_replan.get(body.replan)
        if source is not None:
            self._outcomes.append(ToolOutcome(source_key(source), None, body.succeeded, record.at))

    def _on_attempt_end(self, record: Record) -> None:
        live = self._lifecycle.live
        name = live.entry(record.body.task).task.tool  # type: ignore[union-attr]
        if name is not None:
            spec = live.tools.get(name)
            succeeded = isinstance(record.body, AttemptSucceeded)
            self._outcomes.append(ToolOutcome(name, spec.capability if spec else None, succeeded, record.at))

    def save(self) -> None:
        """Store the outcomes; where that fails, later scores have less evidence."""
        if self._outcomes:
            with suppress(Exception):  # a third party's store may raise anything
                self._lifecycle.journal.store.add_outcomes(self._outcomes)
