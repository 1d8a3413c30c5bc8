"""Outcomes: the progress of the plan, and how well tools and applied alternatives worked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from typing import Final

from replanning.decision.evaluation import PlanEvaluation, PlanEvaluator
from replanning.decision.ledger import Ledger, PendingOutcome, source_key
from replanning.environment import Clock
from replanning.journal.records import (
    AttemptFailed,
    AttemptInterrupted,
    AttemptSucceeded,
    AttemptTimedOut,
    OutcomeRecorded,
    PlanRevised,
    Record,
)
from replanning.journal.store import RunStore, ToolOutcome, mean_durations
from replanning.live.entries import TaskEntry
from replanning.live.graph import MAX_OUTCOMES_PER_TOOL
from replanning.live.plan import LivePlan
from replanning.live.states import STUCK
from replanning.live.view import PlanView
from replanning.plan.messages import brief_repr, format_duration
from replanning.plan.tasks import Task
from replanning.run.journal import RunJournal

MAX_EVALUATION_SECONDS: Final = 0.1
"""Time limit for an evaluator in seconds, after which it is dropped; the run blocks on it."""

_MAX_STORED_OUTCOMES: Final = 10_000
"""Number of outcomes of tools that a run keeps for later runs; far fewer count for each tool.
"""

ATTEMPT_ENDS: Final = (AttemptSucceeded, AttemptFailed, AttemptTimedOut, AttemptInterrupted)
"""Records that end an attempt."""


@dataclass(slots=True, eq=False)
class Evaluation:
    """Evaluates the plan of a run, compares paths, and finds past outcomes of its tools.

    Args:
        live: the plan.
        ledger: the memory of replanning.
        store: has the outcomes of earlier runs.
        clock: the clock of the run.
        record_error: records an error of the evaluator.

    Attributes:
        evaluator: evaluates the plan after every task, and compares better paths with it.
    """

    _live: LivePlan
    _ledger: Ledger
    _store: RunStore
    _clock: Clock
    _record_error: Callable[[str, BaseException], None]
    evaluator: PlanEvaluator = field(default_factory=PlanEvaluator)
    _mean_durations: dict[str, float] | None = None

    def evaluate(self) -> PlanEvaluation:
        """Return the progress and health of the plan now.

        An evaluator that fails or is slow is not asked again.
        """
        if self._mean_durations is None:
            self._mean_durations = {}
            with suppress(Exception):  # a third party's store may raise anything
                self._mean_durations = mean_durations(self._store)
        view = PlanView(self._live)
        past = dict(self._mean_durations)
        if type(self.evaluator) is not PlanEvaluator:
            try:
                evaluation = self._ask(self.evaluator.evaluate, view, past)
                if not isinstance(evaluation, PlanEvaluation):
                    given = brief_repr(evaluation)
                    raise TypeError(f"it returned {given} instead of a PlanEvaluation")
                return evaluation
            except Exception as error:  # noqa: BLE001 - an evaluator must not harm the run
                self._give_up_evaluator(error)
        return self.evaluator.evaluate(view, past)

    def compare(
        self, one: Sequence[Task], other: Sequence[Task], view: PlanView, total: float
    ) -> float:
        """Return the share of `total` that the tasks in `other` save, compared with those in `one`.

        An evaluator that fails or is slow is not asked again.
        """
        if type(self.evaluator) is not PlanEvaluator:
            try:
                saving = self._ask(self.evaluator.compare, one, other, view, total)
                if not isinstance(saving, int | float) or not isfinite(saving):
                    given = brief_repr(saving)
                    raise TypeError(f"it returned {given} instead of a share of the cost")
                return saving
            except Exception as error:  # noqa: BLE001 - an evaluator must not harm the run
                self._give_up_evaluator(error)
        return self.evaluator.compare(one, other, view, total)

    def _ask(self, method: Callable[..., object], *args: object) -> object:
        """Call a method of a third party's evaluator.

        Raises:
            TimeoutError: it took too long; the run waits for it.
        """
        began = self._clock.now()
        answer = method(*args)
        took = self._clock.now() - began
        if took > MAX_EVALUATION_SECONDS:
            raise TimeoutError(
                f"it took {format_duration(took)}, and "
                f"{format_duration(MAX_EVALUATION_SECONDS)} are allowed"
            )
        return answer

    def _give_up_evaluator(self, error: Exception) -> None:
        self.evaluator = PlanEvaluator()
        self._record_error("evaluator", error)

    def past_outcomes(self, tool: str) -> Sequence[bool]:
        """Return outcomes as evidence of success: those of earlier runs first, then of this run.

        If the tool has none, the outcomes of the other tools of its capability. For a `source_key`,
        the outcomes of the alternatives of that source.
        """
        live = self._live
        own = list(live.statistics.outcomes.get(tool, ()))
        if not own:
            own = list(self._ledger.lineages.by_source.get(tool, ()))
        if len(own) < MAX_OUTCOMES_PER_TOOL:
            newest_first = self._store.outcomes(tool=tool, capability=None)
            earlier = [outcome.succeeded for outcome in reversed(newest_first)]
            own = [*earlier, *own][-MAX_OUTCOMES_PER_TOOL:]
        spec = live.tools.get(tool)
        if own or spec is None or spec.capability is None:
            return own
        # The failures of the replaced tool say nothing about its replacement.
        failing = {live.entry(task_id).task.tool for task_id in live.stuck}
        newest_first = self._store.outcomes(tool=None, capability=spec.capability)
        outcomes = [outcome.succeeded for outcome in reversed(newest_first)]
        for other in live.tools.values():
            if other.capability == spec.capability and other.name not in failing:
                outcomes += live.statistics.outcomes.get(other.name, ())
        return outcomes[-MAX_OUTCOMES_PER_TOOL:]


class OutcomeCollector:
    """Records how applied alternatives worked out, and keeps tools' outcomes for later runs.

    Args:
        live: the plan.
        ledger: the memory of replanning.
        journal: has the records, and gets the outcomes.
    """

    def __init__(self, live: LivePlan, ledger: Ledger, journal: RunJournal) -> None:
        self._live = live
        self._ledger = ledger
        self._journal = journal
        self._outcomes = deque[ToolOutcome](maxlen=_MAX_STORED_OUTCOMES)
        journal.subscribe(self._on_end, ATTEMPT_ENDS)
        journal.subscribe(self._on_revision, [PlanRevised])
        journal.subscribe(self._on_outcome, [OutcomeRecorded])

    def recheck(self, record: Record) -> None:
        """Process the last record of a resumed run; its earlier process may have died before that.

        The outcome of a tool is not collected again: that process may have stored it.
        """
        body = record.body
        if isinstance(body, ATTEMPT_ENDS):
            self._record_lineage_outcome(self._live.entry(body.task), record.at)
        elif isinstance(body, PlanRevised):
            self._on_revision(record)
        elif isinstance(body, OutcomeRecorded):
            self._on_outcome(record)

    def _on_end(self, record: Record) -> None:
        """Collect the outcome of a tool; the end may also satisfy a lineage or leave it stuck."""
        body = record.body
        assert isinstance(body, ATTEMPT_ENDS)
        entry = self._live.entries[body.task]
        if entry.task.tool is not None:
            self._collect_outcome(entry.task.tool, entry, record)
        if self._ledger.lineages.pending:
            self._record_lineage_outcome(entry, record.at)

    def _collect_outcome(self, name: str, entry: TaskEntry, record: Record) -> None:
        """Collect the outcome of the tool of an attempt that has ended, if it says anything."""
        body = record.body
        if isinstance(body, AttemptInterrupted):
            return
        if isinstance(body, AttemptFailed) and self._live.shared_failure(entry, body.failure):
            return  # many fail alike
        tool = self._live.tools.get(name)
        capability = tool.capability if tool else None
        succeeded = isinstance(body, AttemptSucceeded)
        self._outcomes.append(
            ToolOutcome(name, capability, succeeded, record.at, entry.log.duration)
        )

    def _on_revision(self, record: Record) -> None:
        """Settle a revision that skips tasks: it worked at once, because no attempt will follow."""
        body = record.body
        assert isinstance(body, PlanRevised)
        if body.replan is None:
            return
        applied = self._ledger.lineages.awaited.get(body.replan)
        if applied is not None:
            self._record_outcome(applied, record.at)

    def _on_outcome(self, record: Record) -> None:
        """Collect the outcome of an alternative for its source."""
        body = record.body
        assert isinstance(body, OutcomeRecorded)
        source = self._ledger.lineages.source_by_replan.get(body.replan)
        if source is not None:
            key = source_key(source)
            self._outcomes.append(ToolOutcome(key, None, body.succeeded, record.at))

    def _record_lineage_outcome(self, entry: TaskEntry, at: float) -> None:
        applied = self._ledger.lineages.pending.get(entry.root)
        if applied is not None:
            self._record_outcome(applied, at, is_stuck=entry.state in STUCK)

    def _record_outcome(
        self, applied: PendingOutcome, at: float, *, is_stuck: bool = False
    ) -> None:
        """Record the outcome of an alternative, if it is known now."""
        done = all(self._live.entry(root).satisfied for root in applied.roots)
        if done or is_stuck:
            seconds = at - applied.applied_at
            self._journal.append_soon(OutcomeRecorded(applied.replan, done, seconds))

    def save(self) -> None:
        """Store the outcomes."""
        if self._outcomes:
            self._journal.store.add_outcomes(tuple(self._outcomes))
