"""How uses of tools end and applied alternatives work out: noted, collected for later runs, and found again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

from replanning._changes import touched
from replanning._confidence import source_key
from replanning._errors import StoreError
from replanning._interfaces import Outcome
from replanning._lifecycle import Lifecycle
from replanning._observations import AttemptFailed, AttemptInterrupted, AttemptSucceeded, AttemptTimedOut
from replanning._records import OutcomeKnown, Record, Revised
from replanning._states import STUCK

_ENDS: Final = (AttemptSucceeded, AttemptFailed, AttemptTimedOut, AttemptInterrupted)


class OutcomeWatch:
    """Notes how applied alternatives work out, in the run that they were applied to.

    Args:
        life: of the run.
    """

    def __init__(self, life: Lifecycle) -> None:
        self._life = life
        self._watching = False
        life.observers[Revised].append(self._revised)
        self._begin()

    def look_again(self, record: Record) -> None:
        """Look at the last record of a run that is taken up again, from which its process may have concluded nothing."""
        if isinstance(record.body, _ENDS):
            self._ended(record)
        elif isinstance(record.body, Revised):
            self._revised(record)

    def _revised(self, record: Record) -> None:
        self._begin()
        assert isinstance(record.body, Revised)
        live, watching = self._life.live, self._life.ledger.watching
        watched = (watching.get(live.entry(task_id).root) for task_id in touched(record.body.changes))
        applied = next((a for a in watched if a is not None and a.replan == record.body.replan), None)
        if applied is not None and all(live.entry(root).satisfied for root in applied.roots):
            # After a skip nothing more will end that could tell: it has worked out at once.
            self._life.observe(OutcomeKnown(applied.replan, True, 0.0))

    def _begin(self) -> None:
        """Look at the ends of attempts, from the first alternative on whose outcome is wanted."""
        if self._life.ledger.watching and not self._watching:
            self._watching = True
            for kind in _ENDS:
                self._life.observers.setdefault(kind, []).append(self._ended)

    def _ended(self, record: Record) -> None:
        watching = self._life.ledger.watching
        if not watching:
            return
        live = self._life.live
        entry = live.entry(record.body.task)  # type: ignore[union-attr]
        applied = watching.get(entry.root)
        if applied is None:
            return
        failed = entry.state in STUCK
        done = all(live.entry(root).satisfied for root in applied.roots)
        if failed or done:
            self._life.observe(OutcomeKnown(applied.replan, done, record.at - applied.at))


class EarlierOutcomes(Protocol):
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

    def __init__(self, life: Lifecycle, earlier: EarlierOutcomes) -> None:
        self._life = life
        self._earlier = earlier

    def __call__(self, tool: str) -> Sequence[bool]:
        """The last outcomes of a tool."""
        live, ledger = self._life.live, self._life.ledger
        own = list(live.outcomes.get(tool, ()) or ledger.earned.get(tool, ()))
        if len(own) < 50:
            own = [*self._earlier(tool=tool, capability=None), *own][-50:]
        if own:
            return own
        spec = live.tools.get(tool)
        if spec is None or spec.capability is None:
            return ()
        # The failures of a tool that is to be replaced say nothing about what replaces it.
        failing = {live.entry(task_id).task.tool for task_id in live.stuck}
        same = [t.name for t in live.tools.values() if t.capability == spec.capability and t.name not in failing]
        found = [outcome for name in same for outcome in live.outcomes.get(name, ())]
        return [*self._earlier(tool=None, capability=spec.capability), *found][-50:]


class OutcomeCollector:
    """Collects how uses of tools end, and how alternatives work out, for later runs; written when the run is left.

    Args:
        life: of the run.
    """

    def __init__(self, life: Lifecycle) -> None:
        self._life = life
        self._outcomes: list[Outcome] = []
        observers = life.observers
        for kind in (AttemptSucceeded, AttemptFailed, AttemptTimedOut) if life.live.usage.users else ():
            observers.setdefault(kind, []).append(self._note)
        observers.setdefault(OutcomeKnown, []).append(self._note_alternative)

    def _note_alternative(self, record: Record) -> None:
        body = record.body
        assert isinstance(body, OutcomeKnown)
        source = self._life.ledger.sources.get(body.replan)
        if source is not None:
            self._outcomes.append(Outcome(source_key(source), None, body.succeeded, record.at))

    def _note(self, record: Record) -> None:
        live = self._life.live
        name = live.entry(record.body.task).task.tool  # type: ignore[union-attr]
        if name is not None:
            spec = live.tools.get(name)
            succeeded = isinstance(record.body, AttemptSucceeded)
            self._outcomes.append(Outcome(name, spec.capability if spec else None, succeeded, record.at))

    def save(self) -> None:
        """Hand over what was collected; without it, later scores know less."""
        if self._outcomes:
            with suppress(StoreError):
                self._life.journal.add_outcomes(self._outcomes)
