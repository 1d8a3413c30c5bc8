"""Ledger of a run's replanning as a fold over its journal, and its budget, reserved before it is spent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Final

from replanning.changes import PlanChange, changes_hash, new_task_ids, target_task_ids
from replanning.decision.confidence import source_key
from replanning.errors import BudgetExceeded
from replanning.journal.records import (
    AlternativesConsidered,
    AttemptSucceeded,
    ContextUpdated,
    DecisionMade,
    ErrorContained,
    FactsObserved,
    GoalChanged,
    OutcomeRecorded,
    PlanRevised,
    QuestionAnswered,
    QuestionAsked,
    QuestionReminded,
    Record,
    RecordBody,
    ReplanRequested,
    ResourceUpdated,
    RunEnded,
    RunPaused,
    RunProblem,
    RunQuiescent,
    RunResumed,
    Trigger,
    TriggerAttached,
    TriggerDropped,
    TriggerFired,
    Usage,
    UsageCharged,
)
from replanning.live.graph import MAX_OUTCOMES_PER_TOOL
from replanning.plan.json_values import detached
from replanning.plan.tasks import Budget
from replanning.plan.types import QuestionId, ReplanId, TaskId, TriggerId

Fingerprint = tuple[str, str, str]
"""Kind, lineage root and normalised cause of a trigger."""


class BudgetTracker:
    """Usage of a run, spent and reserved, against its budget.

    Args:
        budget: the limits; None means unlimited.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._has_limits = any(
            limit is not None for limit in (budget.calls, budget.tokens, budget.money)
        )
        self.spent = Usage()
        self.reservations: list[Usage] = []
        self.unrecorded: list[Usage] = []  # spent while the store fails

    def __repr__(self) -> str:
        return f"<BudgetTracker spent={self.spent} reserved={self.reserved} of {self.budget!r}>"

    @property
    def reserved(self) -> Usage:
        """Total of the reservations that are not settled yet."""
        return sum(self.reservations, Usage())

    def reserve(self, estimate: Usage) -> Callable[[], None]:
        """Reserve an upper bound of the usage to come, and return a function that releases the reservation.

        Raises:
            BudgetExceeded: it exceeds the rest of the budget; nothing was reserved.
        """
        if self._has_limits and (reason := self.exceeded_reason(estimate)):
            raise BudgetExceeded(f"it {reason}")
        self.reservations.append(estimate)
        return partial(self.reservations.remove, estimate)

    def exceeded_reason(self, planned: Usage | None = None) -> str:
        """Return in words the limits that the usage has exceeded, or would exceed with what is planned; empty if none."""
        spent = sum(self.unrecorded, self.spent)
        total = spent if planned is None else spent + self.reserved + planned
        limits = (
            ("calls", self.budget.calls),
            ("tokens", self.budget.tokens),
            ("money", self.budget.money),
        )
        over = [
            f"{getattr(total, name):g} of {limit:g} {name}"
            for name, limit in limits
            if limit is not None and getattr(total, name) > limit
        ]
        if total.unpriced and self.budget.money is not None:
            over.append("an unknown price, of limited money; state a price for the model")
        verb = "has exceeded" if planned is None else "would exceed"
        return f"{verb} the budget: {', '.join(over)}" if over else ""


MAX_RECENT_RECORDS = 30
"""Number of records of the last replans that are kept for providers."""


@dataclass(frozen=True, slots=True)
class PendingOutcome:
    """Applied alternative whose outcome is not known yet."""

    replan: ReplanId
    roots: tuple[TaskId, ...]
    applied_at: float


class Ledger:
    """Triggers, decisions, questions, outcomes and limits of a run's replanning.

    Args:
        budget: the budget of the run.
        root_of: finds the root of the lineage of a task.
        running: returns the number of attempts that run after the record that is folded.

    Attributes:
        open_triggers: the triggers that are not decided yet.
        last_decided: for each fingerprint of a trigger, when it was last decided, and for which lineages.
        sought_in_vain: what was considered for tasks without an alternative, while nothing has happened that offers one.
        replan_ids: the replans that were considered or decided.
        applied_count: number of applied replans.
        replans_by_root: number of applied replans per lineage.
        tried_by_root: the hashes of the changes that were applied per lineage.
        declined_at: for each fingerprint of an alternative, when a person kept the plan instead.
        pending_outcomes: the applied alternatives whose outcome is open, by the roots of their lineages.
        undecided_revisions: the applied revisions whose decision is not recorded yet.
        quiescent_at: the revision at which the plan was last reported as quiescent.
        problems: the errors that were contained, by what failed and the text of the error.
    """

    def __init__(
        self, budget: Budget, root_of: Callable[[TaskId], TaskId], running: Callable[[], int]
    ) -> None:
        self.budget_tracker = BudgetTracker(budget)
        self.triggers: dict[TriggerId, Trigger] = {}
        self.open_triggers: dict[TriggerId, Trigger] = {}
        self._open_by_fingerprint: dict[Fingerprint, dict[TriggerId, Trigger]] = {}
        self.last_decided: dict[Fingerprint, tuple[float, frozenset[TaskId]]] = {}
        self.sought_in_vain: dict[TaskId, AlternativesConsidered] = {}
        self.replan_ids: dict[ReplanId, None] = {}
        self.applied_count = 0
        self.replans_by_root: dict[TaskId, int] = {}
        self.tried_by_root: dict[TaskId, dict[str, None]] = {}
        self.revisions: list[tuple[float, PlanRevised]] = []
        self.open_questions: dict[QuestionId, QuestionAsked] = {}
        self.closed_questions: dict[QuestionId, QuestionAnswered] = {}
        self.answers_by_replan: dict[ReplanId, tuple[QuestionAsked, QuestionAnswered]] = {}
        self._originals: dict[TaskId, TaskId] = {}
        self.declined_at: dict[str, float] = {}
        self.triggers_by_question: dict[QuestionId, list[TriggerId]] = {}
        self.asked_at: dict[QuestionId, float] = {}
        self.reminded_questions: set[QuestionId] = set()
        self.question_count = 0
        self._waited_seconds = 0.0
        self._waiting_since: float | None = None
        self.pending_outcomes: dict[TaskId, PendingOutcome] = {}
        self._roots_by_replan: dict[ReplanId, tuple[TaskId, ...]] = {}
        self._considered: dict[ReplanId, AlternativesConsidered] = {}
        self.source_by_replan: dict[ReplanId, str] = {}
        self.outcomes_by_source: dict[str, deque[bool]] = {}
        self.quiescent_at: int | None = None
        self.undecided_revisions: dict[ReplanId, PlanRevised] = {}
        self.last_message_id = 0
        self.problems: dict[tuple[str, str], RunProblem] = {}
        self.recent_records: deque[RecordBody] = deque(maxlen=MAX_RECENT_RECORDS)
        self.pause: RunPaused | None = None
        self.run_end: RunEnded | None = None
        self._root_of = root_of
        self._running = running

    def __repr__(self) -> str:
        return f"<Ledger triggers={len(self.triggers)} replans={len(self.replan_ids)} questions={len(self.open_questions)}>"

    def find_open_trigger(self, fingerprint: Fingerprint) -> Trigger | None:
        """Return the oldest undecided trigger of a fingerprint, if there is one."""
        return next(iter(self._open_by_fingerprint.get(fingerprint, {}).values()), None)

    def was_decided(self, trigger: Trigger, *, since: float) -> bool:
        """Return whether the same was decided after a point in time, for all lineages that a trigger concerns."""
        at, roots = self.last_decided.get(trigger.fingerprint, (-inf, frozenset()))
        return at > since and roots.issuperset(map(self._root_of, trigger.tasks))

    def _open(self, trigger: Trigger) -> None:
        self.open_triggers[trigger.id] = trigger
        self._open_by_fingerprint.setdefault(trigger.fingerprint, {})[trigger.id] = trigger

    def _close(self, trigger_id: TriggerId) -> None:
        if trigger := self.open_triggers.pop(trigger_id, None):
            del self._open_by_fingerprint[trigger.fingerprint][trigger_id]

    def hash_of(self, changes: tuple[PlanChange, ...]) -> str:
        """Return the hash of changes that is equal for the same changes to a task and to what replaced it."""
        originals = self._originals
        return changes_hash(
            changes, {i: originals[i] for i in target_task_ids(changes) if i in originals}
        )

    def fold(self, record: Record) -> None:
        """Apply a journal record; records that do not concern replanning are ignored."""
        _, at, body = record
        kind = type(body)
        if kind is AttemptSucceeded:  # the most frequent
            self.sought_in_vain.clear()
        if kind is AttemptSucceeded or kind not in LEDGER_RECORDS:
            if self.open_questions:
                self._update_waiting(at)
            return
        match body:
            case ContextUpdated() | FactsObserved() | ResourceUpdated():
                self.sought_in_vain.clear()
            case TriggerFired():
                self.triggers[body.trigger.id] = body.trigger
                self._open(body.trigger)
            case TriggerDropped():
                self._close(body.trigger)
            case AlternativesConsidered():
                self.replan_ids[body.replan] = None
                self._considered[body.replan] = body
            case DecisionMade():
                self.replan_ids[body.replan] = (
                    None  # limits decide without considering alternatives
                )
                for trigger_id in body.triggers:
                    trigger = self.triggers.get(trigger_id)
                    if trigger is not None:
                        self.last_decided[trigger.fingerprint] = (
                            at,
                            frozenset(map(self._root_of, trigger.tasks)),
                        )
                        failed = trigger.kind in (
                            "task-failed",
                            "timeout",
                        )  # for others, what is missing may come back
                        if (
                            failed
                            and body.rule == "no-alternative"
                            and body.replan in self._considered
                        ):
                            self.sought_in_vain |= dict.fromkeys(
                                trigger.tasks, self._considered[body.replan]
                            )
                    if body.decision != "ask" or body.by == "observe":
                        self._close(trigger_id)
                if body.decision != "ask":
                    if body.replan in self.answers_by_replan:
                        asked, _ = self.answers_by_replan.pop(body.replan)
                        self._reopen(
                            trigger_id
                            for trigger_id in asked.triggers
                            if trigger_id not in body.triggers
                        )
                    self.undecided_revisions.pop(body.replan, None)
                    self._considered.pop(body.replan, None)
            case PlanRevised():
                self.sought_in_vain.clear()
                self.revisions.append((at, body))
                if body.replan is not None:
                    self.undecided_revisions[body.replan] = body
                    self.applied_count += 1
                    proposed = (
                        considered.candidates
                        if (considered := self._considered.get(body.replan))
                        else ()
                    )
                    if body.chosen is not None and body.chosen < len(
                        proposed
                    ):  # otherwise a person wrote the changes
                        self.source_by_replan[body.replan] = proposed[
                            body.chosen
                        ].alternative.source
                    new = set(new_task_ids(body.changes))
                    lineages = dict.fromkeys(map(self._root_of, target_task_ids(body.changes)))
                    roots = self._roots_by_replan[body.replan] = tuple(
                        root for root in lineages if root not in new
                    )
                    fingerprint = self.hash_of(body.changes)
                    for change in body.changes:
                        if change.kind == "replace" and len(change.tasks) == 1:
                            self._originals[change.tasks[0].id] = self._originals.get(
                                change.task_id, change.task_id
                            )
                    for root in roots:
                        self.replans_by_root[root] = self.replans_by_root.get(root, 0) + 1
                        self.tried_by_root.setdefault(root, {})[fingerprint] = None
                        self.pending_outcomes[root] = PendingOutcome(body.replan, roots, at)
            case OutcomeRecorded():
                if source := self.source_by_replan.get(body.replan):
                    outcomes = self.outcomes_by_source.setdefault(
                        source_key(source), deque(maxlen=MAX_OUTCOMES_PER_TOOL)
                    )
                    outcomes.append(body.succeeded)
                for root in self._roots_by_replan.pop(body.replan, ()):
                    pending = self.pending_outcomes.get(root)
                    if (
                        pending is not None and pending.replan == body.replan
                    ):  # otherwise a later replan counts
                        del self.pending_outcomes[root]
            case QuestionAsked():
                self.question_count += 1
                self.open_questions[body.question] = body
                self.triggers_by_question[body.question] = list(body.triggers)
                self.asked_at[body.question] = at
            case TriggerAttached():
                self.triggers_by_question[body.question].append(body.trigger)
            case QuestionReminded():
                self.reminded_questions.add(body.question)
            case QuestionAnswered():
                closed = self.open_questions.pop(body.question, None)
                self.triggers_by_question.pop(body.question, None)
                if closed is not None and body.verdict == "withdrawn":
                    self._reopen(closed.triggers)
                elif closed is not None:
                    # Triggers that were attached later are considered again.
                    for trigger_id in closed.triggers:
                        self._close(trigger_id)
                    self.answers_by_replan[closed.replan] = (closed, body)
                    if body.verdict in ("reject", "continue"):
                        self.declined_at.update(
                            (c.alternative.fingerprint(), at) for c in closed.candidates
                        )
                self.closed_questions[body.question] = body
                self.asked_at.pop(body.question, None)
            case GoalChanged():
                self.last_message_id = max(self.last_message_id, body.message)
                self.quiescent_at = None  # it was reported for another goal
                self.sought_in_vain.clear()
            case ReplanRequested():
                self.last_message_id = max(self.last_message_id, body.message)
            case UsageCharged():
                self.budget_tracker.spent += body.usage
                if body.usage in self.budget_tracker.unrecorded:
                    self.budget_tracker.unrecorded.remove(body.usage)
            case ErrorContained():
                self._add_problem(body, at)
            case RunQuiescent():
                self.quiescent_at = body.revision
            case RunPaused():
                self.pause = body
            case RunResumed():
                self.pause = None
                if self._waiting_since is None:
                    self._waited_seconds += body.waited
                self.run_end = None
                self.quiescent_at = None  # the process may have ended before it had any effect
            case _:
                assert isinstance(body, RunEnded)
                self.run_end = body
        if kind in _REPLAN_RECORDS:
            self.recent_records.append(detached(body))
        self._update_waiting(at)

    def _add_problem(self, body: ErrorContained, at: float) -> None:
        key = (body.where, body.error)
        known = self.problems.get(key)
        if known is None:
            self.problems[key] = RunProblem(body.where, body.error, at)
        else:
            self.problems[key] = replace(known, count=known.count + 1)

    def _update_waiting(self, at: float) -> None:
        """Begin or end the time in which the run only waits for people: a question is open, and no attempt runs."""
        waiting = bool(self.open_questions) and not self._running()
        if waiting and self._waiting_since is None:
            self._waiting_since = at
        elif not waiting and self._waiting_since is not None:
            self._waited_seconds += max(0.0, at - self._waiting_since)
            self._waiting_since = None

    def _reopen(self, triggers: Iterable[TriggerId]) -> None:
        """Have undecided triggers considered again, without a cooldown."""
        for trigger_id in triggers:
            self._open(self.triggers[trigger_id])
            self.last_decided.pop(self.triggers[trigger_id].fingerprint, None)

    def waiting_seconds(self, now: float) -> float:
        """Return the seconds in which the run has only waited for a person, or to be resumed."""
        since = now if self._waiting_since is None else self._waiting_since
        return self._waited_seconds + max(0.0, now - since)


_REPLAN_RECORDS = {
    AlternativesConsidered,
    DecisionMade,
    PlanRevised,
    OutcomeRecorded,
    QuestionAnswered,
}

LEDGER_RECORDS: Final[frozenset[type[RecordBody]]] = frozenset(
    (
        TriggerFired,
        TriggerDropped,
        AlternativesConsidered,
        DecisionMade,
        PlanRevised,
        OutcomeRecorded,
        QuestionAsked,
        TriggerAttached,
        QuestionReminded,
        QuestionAnswered,
        GoalChanged,
        ReplanRequested,
        UsageCharged,
        RunQuiescent,
        RunPaused,
        RunResumed,
        RunEnded,
        AttemptSucceeded,
        ContextUpdated,
        FactsObserved,
        ResourceUpdated,
        ErrorContained,
    )
)
"""The kinds of record that the ledger folds; while a question is open, any other may start or end an attempt."""
