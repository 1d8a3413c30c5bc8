"""How uses of tools end and applied alternatives work out: noted, collected for later runs, and found again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

from replanning.changes import target_task_ids
from replanning.decision.confidence import source_key
from replanning.errors import StoreError
from replanning.journal.observations import AttemptFailed, AttemptInterrupted, AttemptSucceeded, AttemptTimedOut
from replanning.journal.records import OutcomeRecorded, PlanRevised, Record
from replanning.journal.store import ToolOutcome
from replanning.live.states import STUCK
from replanning.run.lifecycle import Lifecycle

_ATTEMPT_ENDS: Final = (AttemptSucceeded, AttemptFailed, AttemptTimedOut, AttemptInterrupted)


class AlternativeOutcomeTracker:
    """Notes how applied alternatives work out, in the run that they were applied to.

    Args:
        life: of the run.
    """

    def __init__(self, life: Lifecycle) -> None:
        self._lifecycle = life
        self._subscribed = False
        life.observers[PlanRevised].append(self._on_revised)
        self._subscribe()

    def recheck(self, record: Record) -> None:
        """Look at the last record of a run that is taken up again, from which its process may have concluded nothing."""
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
            # After a skip nothing more will end that could tell: it has worked out at once.
            self._lifecycle.commit_or_defer(OutcomeRecorded(applied.replan, True, 0.0))

    def _subscribe(self) -> None:
        """Look at the ends of attempts, from the first alternative on whose outcome is wanted."""
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


class OutcomeLookup(Protocol):
    """Finds outcomes of earlier runs, oldest first."""

    def __call__(self, *, tool: str | None, capability: str | None) -> Sequence[bool]:
        """The outcomes of a tool, or of a capability."""
        ...


class PastOutcomes:
    """Evidence of past success: this run's outcomes of a tool, then those of earlier runs, then its capability's.

    By `source_key` it finds those of a source's alternatives.

    Args:
        life: of the run whose outcomes come first.
        earlier: finds outcomes of earlier runs by tool or capability.
    """

    def __init__(self, life: Lifecycle, earlier: OutcomeLookup) -> None:
        self._lifecycle = life
        self._lookup = earlier

    def __call__(self, tool: str) -> Sequence[bool]:
        """The last outcomes of a tool."""
        live, ledger = self._lifecycle.live, self._lifecycle.ledger
        own = list(live.outcomes.get(tool, ()) or ledger.outcomes_by_source.get(tool, ()))
        if len(own) < 50:
            own = [*self._lookup(tool=tool, capability=None), *own][-50:]
        if own:
            return own
        spec = live.tools.get(tool)
        if spec is None or spec.capability is None:
            return ()
        # The failures of a tool that is to be replaced say nothing about what replaces it.
        failing = {live.entry(task_id).task.tool for task_id in live.stuck}
        same = [t.name for t in live.tools.values() if t.capability == spec.capability and t.name not in failing]
        found = [outcome for name in same for outcome in live.outcomes.get(name, ())]
        return [*self._lookup(tool=None, capability=spec.capability), *found][-50:]


class OutcomeCollector:
    """Collects how uses of tools end, and how alternatives work out, for later runs; written when the run is left.

    Args:
        life: of the run.
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
        """Hand over what was collected; without it, later scores know less."""
        if self._outcomes:
            with suppress(StoreError):
                self._lifecycle.journal.add_outcomes(self._outcomes)
