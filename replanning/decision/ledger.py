"""Ledger of a run's replanning, folded from its journal, and its budget, reserved before use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple

from replanning.changes import PlanChange, changes_hash, new_task_ids, target_task_ids
from replanning.errors import BudgetExceeded
from replanning.journal.records import (
    AUTOMATIC,
    AlternativesConsidered,
    AttemptFailed,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    CallMade,
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
from replanning.plan.tasks import Budget
from replanning.plan.types import QuestionId, ReplanId, TaskId, TriggerId

Fingerprint = tuple[str, str, str]
"""Kind, lineage root and normalised cause of a trigger."""


_NO_LIMITS: Final = (None, None, None)
"""Calls, tokens and money of a budget that limits none of them."""


@dataclass(repr=False, eq=False)
class BudgetTracker:
    """Usage of a run, spent and reserved, against its budget.

    Args:
        budget: the limits; None means unlimited.

    Attributes:
        spent: the usage on record.
        unrecorded: usage that the store did not accept; it counts as spent.
        exceeded: which limits are exceeded, in words; empty if none is.
    """

    budget: Budget
    spent: Usage = field(default_factory=Usage)
    reservations: list[Usage] = field(default_factory=list)
    unrecorded: list[Usage] = field(default_factory=list)
    exceeded: str = ""

    def __repr__(self) -> str:
        return f"<BudgetTracker spent={self.spent} reserved={self.reserved} of {self.budget!r}>"

    @property
    def has_limits(self) -> bool:
        """Whether the budget limits calls, tokens or money."""
        limits = (self.budget.calls, self.budget.tokens, self.budget.money)
        return limits != _NO_LIMITS

    @property
    def reserved(self) -> Usage:
        """Total of the reservations that are not settled yet."""
        return sum(self.reservations, Usage())

    def reserve(self, estimate: Usage) -> Callable[[], None]:
        """Reserve an upper bound of the usage to come; return a function that releases it.

        Raises:
            BudgetExceeded: it exceeds the rest of the budget; nothing was reserved.
        """
        if self.has_limits:
            reason = self.exceeded_reason(estimate)
            if reason:
                raise BudgetExceeded(f"it {reason}")
        self.reservations.append(estimate)
        return partial(self.reservations.remove, estimate)

    def limit(self, budget: Budget) -> None:
        """Set new limits, which also apply to past usage."""
        self.budget = budget
        self.exceeded = self.exceeded_reason()

    def spend(self, usage: Usage) -> None:
        """Count recorded usage."""
        self.spent += usage
        # Recorded at last, so it must not count twice.
        if usage in self.unrecorded:
            self.unrecorded.remove(usage)
        if self.has_limits:
            self.exceeded = self.exceeded_reason()

    def spend_unrecorded(self, usage: Usage) -> None:
        """Count usage that the store did not accept."""
        self.unrecorded.append(usage)
        if self.has_limits:
            self.exceeded = self.exceeded_reason()

    def exceeded_reason(self, planned: Usage | None = None) -> str:
        """Describe the limits that the usage exceeds; empty if none.

        With `planned`, the limits that it would exceed together with `planned` and the
        reservations.
        """
        total = sum(self.unrecorded, self.spent)
        verb = "has exceeded"
        if planned is not None:
            total = total + self.reserved + planned
            verb = "would exceed"
        over = []
        for name in ("calls", "tokens", "money"):
            limit = getattr(self.budget, name)
            used = getattr(total, name)
            if limit is not None and used > limit:
                over.append(f"{used:g} of {limit:g} {name}")
        if total.unpriced and self.budget.money is not None:
            # Without a price the limit could be exceeded unnoticed.
            over.append(
                "an unknown price, of limited money; state a price for the model under llm.prices, "
                "or install the published prices: pip install 'replanning[prices]'"
            )
        if not over:
            return ""
        return f"{verb} the budget: {', '.join(over)}"


MAX_RECENT_RECORDS = 30
"""Number of records of the last replans that are kept for providers."""


class PendingOutcome(NamedTuple):
    """Applied alternative whose outcome is not known yet."""

    replan: ReplanId
    roots: tuple[TaskId, ...]
    applied_at: float


@dataclass(repr=False, eq=False)
class QuestionLedger:
    """Questions of a run to people, their answers, and the time spent waiting for people or a process.

    Only the ledger of the run changes it, through `fold`, `close` and the methods that count time.

    Args:
        running: returns the number of running attempts after the current record.

    Attributes:
        open: the questions without an answer.
        closed: the answers of the others.
        answers_by_replan: the questions and answers that have not been applied yet.
        triggers: the triggers that each open question is about, with those attached to it later.
        asked_at: when each open question was asked.
        reminded: the questions that people were reminded of.
        count: the number of all questions.
        declined_at: when a person declined an alternative, by the hash of its changes.
        given_up_at: when a person last declined all alternatives for a task.
    """

    _running: Callable[[], int]
    open: dict[QuestionId, QuestionAsked] = field(default_factory=dict)
    closed: dict[QuestionId, QuestionAnswered] = field(default_factory=dict)
    answers_by_replan: dict[ReplanId, tuple[QuestionAsked, QuestionAnswered]] = field(
        default_factory=dict
    )
    triggers: dict[QuestionId, list[TriggerId]] = field(default_factory=dict)
    asked_at: dict[QuestionId, float] = field(default_factory=dict)
    reminded: set[QuestionId] = field(default_factory=set)
    count: int = 0
    declined_at: dict[str, float] = field(default_factory=dict)
    given_up_at: dict[TaskId, float] = field(default_factory=dict)
    _waited_seconds: float = 0.0
    _waiting_since: float | None = None

    def fold(self, at: float, body: QuestionAsked | TriggerAttached | QuestionReminded) -> None:
        """Apply a record about a question that stays open."""
        match body:
            case QuestionAsked():
                self.count += 1
                self.open[body.question] = body
                self.triggers[body.question] = list(body.triggers)
                self.asked_at[body.question] = at
            case TriggerAttached():
                self.triggers[body.question].append(body.trigger)
            case _:
                self.reminded.add(body.question)

    def close(self, at: float, answer: QuestionAnswered) -> QuestionAsked | None:
        """Apply an answer; return the question that it closes."""
        asked = self.open.pop(answer.question, None)
        self.triggers.pop(answer.question, None)
        self.closed[answer.question] = answer
        self.asked_at.pop(answer.question, None)
        # A withdrawn question has no answer.
        if asked is None or answer.verdict == "withdrawn":
            return asked
        self.answers_by_replan[asked.replan] = (asked, answer)
        if answer.verdict in ("reject", "continue"):
            self.given_up_at.update(dict.fromkeys(asked.holds, at))
            for candidate in asked.candidates:
                declined = changes_hash(candidate.alternative.changes)
                self.declined_at[declined] = at
        return asked

    def was_given_up(self, task: TaskId, since: float) -> bool:
        """Return whether a person has declined all alternatives for a task since this time."""
        given_up_at = self.given_up_at.get(task)
        return given_up_at is not None and given_up_at >= since

    def add_absence(self, seconds: float) -> None:
        """Count the time before a resume; while a question is open, its answer counts that."""
        if self._waiting_since is None:
            self._waited_seconds += seconds

    def update_waiting(self, at: float) -> None:
        """Start or stop the time in which the run only waits for people.

        It does so while a question is open and no attempt runs.
        """
        since = self._waiting_since
        if self.open and not self._running():
            if since is None:
                self._waiting_since = at
        elif since is not None:
            # Clocks of two processes may differ, so a time may lie before the one before it.
            self._waited_seconds += max(0.0, at - since)
            self._waiting_since = None

    def elapsed_seconds(self, started_at: float, now: float) -> float:
        """Return how long the run has been under way, in seconds.

        The time in which it only waited for a person or a resume does not count: a person who takes
        a day to answer must not use up the time of the run.
        """
        waited = self._waited_seconds
        if self._waiting_since is not None:
            waited += max(0.0, now - self._waiting_since)
        return max(0.0, now - started_at - waited)


def source_key(source: str) -> str:
    """Return the key of the outcomes of a source's alternatives."""
    # No tool has a space in its name, so tools and sources share one mapping.
    return f" {source}"


@dataclass(repr=False, eq=False)
class LineageLedger:
    """Replans of each lineage: their number, their changes and their outcomes.

    Only the ledger of the run changes it.

    Attributes:
        roots: the root of the lineage of each task that replaced another; any other is its own.
        originals: the original of each task that replaced it one to one, so that changes to both
            have the same hash.
        replans: number of applied replans per lineage, since a person has last tried it again.
        applied: the revisions of these replans per lineage.
        pending: the applied alternatives with an open outcome, by the roots of their lineages.
        awaited: the same open outcomes, by their replans.
        source_by_replan: the provider of the alternative that a replan applied.
        by_source: the last outcomes of the alternatives of each provider.
    """

    roots: dict[TaskId, TaskId] = field(default_factory=dict)
    replans: dict[TaskId, int] = field(default_factory=dict)
    applied: dict[TaskId, list[PlanRevised]] = field(default_factory=dict)
    pending: dict[TaskId, PendingOutcome] = field(default_factory=dict)
    source_by_replan: dict[ReplanId, str] = field(default_factory=dict)
    by_source: dict[str, deque[bool]] = field(default_factory=dict)
    awaited: dict[ReplanId, PendingOutcome] = field(default_factory=dict)
    originals: dict[TaskId, TaskId] = field(default_factory=dict)

    def fold_revision(
        self, at: float, revised: PlanRevised, considered: AlternativesConsidered | None
    ) -> None:
        """Follow the replacements of a revision; count a replan, and await its outcome.

        A replan counts for the lineages that it changes. Lineages that it starts do not count: a
        new task must have its own replans left.

        Args:
            at: the time of the revision.
            revised: the revision.
            considered: the candidates of its replan.
        """
        changes = revised.changes
        counts = revised.replan is not None
        for change in changes:
            if change.kind != "replace":
                continue
            replaced = change.task_id
            root = self.roots.get(replaced, replaced)
            for task in change.tasks:
                self.roots[task.id] = root
            if counts and len(change.tasks) == 1:
                self.originals[change.tasks[0].id] = self.originals.get(replaced, replaced)
        if revised.replan is None:
            if revised.by not in AUTOMATIC:
                self._count_anew(changes)
            return
        if considered is not None and revised.chosen is not None:
            # A number beyond the candidates means that a person wrote the changes.
            if revised.chosen < len(considered.candidates):
                chosen = considered.candidates[revised.chosen]
                self.source_by_replan[revised.replan] = chosen.alternative.source

        new = set(new_task_ids(changes))
        lineages: dict[TaskId, None] = {}
        for task_id in target_task_ids(changes):
            root = self.roots.get(task_id, task_id)
            if root not in new:
                lineages[root] = None
        pending = PendingOutcome(revised.replan, tuple(lineages), at)
        if lineages:
            self.awaited[revised.replan] = pending
        for root in lineages:
            count = self.replans.get(root, 0)
            self.replans[root] = count + 1
            self.applied.setdefault(root, []).append(revised)
            self.pending[root] = pending

    def _count_anew(self, changes: Sequence[PlanChange]) -> None:
        """Forget the replans of lineages that a person has tried again.

        They were made under circumstances that the person has changed.
        """
        for change in changes:
            if change.kind == "retry":
                root = self.roots.get(change.task_id, change.task_id)
                self.replans.pop(root, None)
                self.applied.pop(root, None)

    def tried(self, roots: Iterable[TaskId]) -> set[str]:
        """Return the hashes of the changes that were applied for lineages.

        They do not change over time: the original of a task is fixed when the task is new, and new
        tasks in changes count by their positions.
        """
        applied: dict[int, PlanRevised] = {}
        for root in roots:
            for revised in self.applied.get(root, ()):
                applied[revised.number] = revised
        tried: set[str] = set()
        for revised in applied.values():
            tried.add(changes_hash(revised.changes, self.originals))
        return tried

    def fold_outcome(self, body: OutcomeRecorded) -> None:
        """Apply a recorded outcome: whether the lineages that a replan changed succeeded."""
        source = self.source_by_replan.get(body.replan)
        if source:
            key = source_key(source)
            if key not in self.by_source:
                self.by_source[key] = deque(maxlen=MAX_OUTCOMES_PER_TOOL)
            self.by_source[key].append(body.succeeded)
        awaited = self.awaited.pop(body.replan, None)
        if awaited is None:
            return
        for root in awaited.roots:
            # A later replan of the lineage waits for its own outcome.
            if self.pending.get(root) is awaited:
                del self.pending[root]


class Ledger:
    """Triggers, decisions and limits of a run's replanning, with its questions and outcomes.

    Only `fold` changes it. It has many attributes because most records change several of them at
    once: a decision closes triggers, remembers fingerprints and settles a revision.

    Args:
        budget: the budget of the run.
        running: returns the number of running attempts after the current record.

    Attributes:
        open_triggers: the triggers that are not decided yet.
        open_by_fingerprint: the same triggers, those of each fingerprint in their order.
        last_decided: when each fingerprint of a trigger was last decided, and for which lineages.
        fruitless_searches: candidates of the last fruitless search per task; cleared when the
            situation changes.
        replan_ids: the replans that were considered or decided.
        applied_count: number of applied replans.
        questions: the questions to people.
        lineages: the replans of each lineage, and their outcomes.
        undecided_revisions: the applied revisions whose decision is not recorded yet.
        quiescent_at: the revision at which the plan was last reported as quiescent.
        problems: the errors that were contained, by what failed and the text of the error.
    """

    def __init__(self, budget: Budget, running: Callable[[], int]) -> None:
        self.budget_tracker = BudgetTracker(budget)
        self.questions = QuestionLedger(running)
        self.lineages = LineageLedger()
        self.triggers: dict[TriggerId, Trigger] = {}
        self.open_triggers: dict[TriggerId, Trigger] = {}
        self.open_by_fingerprint: dict[Fingerprint, dict[TriggerId, Trigger]] = {}
        self.last_decided: dict[Fingerprint, tuple[float, frozenset[TaskId]]] = {}
        self.fruitless_searches: dict[TaskId, AlternativesConsidered] = {}
        self.replan_ids: dict[ReplanId, None] = {}
        self.applied_count = 0
        self.revisions: list[tuple[float, PlanRevised]] = []
        self._considered: dict[ReplanId, AlternativesConsidered] = {}
        self.quiescent_at: int | None = None
        self.undecided_revisions: dict[ReplanId, PlanRevised] = {}
        self.last_message_id = 0
        self.problems: dict[tuple[str, str], RunProblem] = {}
        self.recent_records: deque[RecordBody] = deque(maxlen=MAX_RECENT_RECORDS)
        self.pause: RunPaused | None = None
        self.run_end: RunEnded | None = None

    def __repr__(self) -> str:
        triggers = len(self.triggers)
        replans = len(self.replan_ids)
        questions = len(self.questions.open)
        return f"<Ledger triggers={triggers} replans={replans} questions={questions}>"

    def is_fruitless(self, trigger: Trigger) -> bool:
        """Return whether the search for alternatives was fruitless for all tasks of a trigger."""
        if not trigger.tasks:
            return False
        return self.fruitless_searches.keys() >= set(trigger.tasks)

    def _open(self, trigger: Trigger) -> None:
        self.open_triggers[trigger.id] = trigger
        alike = self.open_by_fingerprint.setdefault(trigger.fingerprint, {})
        alike[trigger.id] = trigger

    def _close(self, trigger_id: TriggerId) -> None:
        trigger = self.open_triggers.pop(trigger_id, None)
        if trigger is not None:
            del self.open_by_fingerprint[trigger.fingerprint][trigger_id]

    @property
    def undecided_tasks(self) -> set[TaskId]:
        """The tasks with an undecided trigger or an open question."""
        undecided: set[TaskId] = set()
        for trigger in self.open_triggers.values():
            undecided.update(trigger.tasks)
        for asked in self.questions.open.values():
            undecided.update(asked.holds)
        return undecided

    @property
    def awaited_questions(self) -> dict[TaskId, QuestionId]:
        """The tasks that wait for a person, each with the question.

        They are the tasks held by the question, and those of triggers that wait for its answer.
        """
        awaited: dict[TaskId, QuestionId] = {}
        for question, triggers in self.questions.triggers.items():
            for trigger_id in filter(self.open_triggers.__contains__, triggers):
                tasks = self.open_triggers[trigger_id].tasks
                awaited.update(dict.fromkeys(tasks, question))
        for asked in self.questions.open.values():
            awaited.update(dict.fromkeys(asked.holds, asked.question))
        return awaited

    def fold(self, record: Record) -> None:
        """Apply a journal record; records that do not concern replanning are ignored.

        The cases are: a trigger opened or closed, a step of a replan, a step of a question, and
        the state of the run as a whole.
        """
        _, at, body = record
        kind = type(body)
        # There may be an alternative after all.
        if self.fruitless_searches and kind in _NEW_CHANCES:
            self.fruitless_searches.clear()
        # Most records are of attempts: they are not compared with every case below.
        if kind in _ATTEMPT_KINDS:
            if self.questions.open:
                self.questions.update_waiting(at)
            return
        match body:
            case TriggerFired():
                self.triggers[body.trigger.id] = body.trigger
                self._open(body.trigger)
            case TriggerDropped():
                self._close(body.trigger)

            case AlternativesConsidered():
                self.replan_ids[body.replan] = None
                self._considered[body.replan] = body
            case PlanRevised():
                self.revisions.append((at, body))
                considered = None
                if body.replan is not None:
                    considered = self._considered.get(body.replan)
                    self.undecided_revisions[body.replan] = body
                    self.applied_count += 1
                self.lineages.fold_revision(at, body, considered)
                if body.adopted is not None and body.adopted.budget is not None:
                    self.budget_tracker.limit(body.adopted.budget)
            case DecisionMade():
                self._fold_decision(at, body)
            case OutcomeRecorded():
                self.lineages.fold_outcome(body)

            case QuestionAsked() | TriggerAttached() | QuestionReminded():
                self.questions.fold(at, body)
            case QuestionAnswered():
                self._fold_answer(at, body)

            case GoalChanged():
                self.last_message_id = max(self.last_message_id, body.message)
                # The plan was reported as quiescent for another goal.
                self.quiescent_at = None
            case ReplanRequested():
                self.last_message_id = max(self.last_message_id, body.message)
            case UsageCharged():
                self.budget_tracker.spend(body.usage)
            case ErrorContained():
                self._add_problem(body, at)
            case RunQuiescent():
                self.quiescent_at = body.revision
            case RunPaused():
                self.pause = body
            case RunResumed():
                self.pause = None
                self.questions.add_absence(body.waited)
                self.run_end = None
                # The process may have ended before the report of quiescence had any effect.
                self.quiescent_at = None
            case RunEnded():
                self.run_end = body
        if kind in _REPLAN_RECORDS:
            self.recent_records.append(body)
        # Any record may start or end an attempt, and with it the time of waiting for people.
        if self.questions.open or kind is QuestionAnswered:
            self.questions.update_waiting(at)

    def _fold_decision(self, at: float, body: DecisionMade) -> None:
        """Close the triggers that a decision settles, and remember it for others like them.

        A question to a person settles nothing yet, so its triggers stay open until it is answered.
        """
        replan = body.replan
        # Limits decide without considering alternatives, so the replan may be new here.
        self.replan_ids[replan] = None
        final = body.decision != "ask"
        for trigger_id in body.triggers:
            trigger = self.triggers.get(trigger_id)
            if trigger is not None:
                roots = self.lineages.roots
                lineages = frozenset([roots.get(task_id, task_id) for task_id in trigger.tasks])
                fingerprint = trigger.fingerprint
                self.last_decided[fingerprint] = (at, lineages)
                # For other kinds of trigger, the missing thing may come back by itself.
                if body.rule == "no-alternative" and trigger.kind in ("task-failed", "timeout"):
                    considered = self._considered.get(replan)
                    if considered is not None:
                        for task_id in trigger.tasks:
                            self.fruitless_searches[task_id] = considered
            if final or body.by == "observe":
                self._close(trigger_id)
        if not final:
            return
        answered = self.questions.answers_by_replan.pop(replan, None)
        if answered is not None:
            # The answer closed them, but the decision about it left them out.
            asked, _ = answered
            left_out = [t for t in asked.triggers if t not in body.triggers]
            self._reopen(left_out)
        self.undecided_revisions.pop(replan, None)
        self._considered.pop(replan, None)

    def _fold_answer(self, at: float, body: QuestionAnswered) -> None:
        closed = self.questions.close(at, body)
        if closed is None:
            return
        if body.verdict == "withdrawn":
            self._reopen(closed.triggers)
            return
        # Only the triggers it was asked about: those attached later are considered again.
        for trigger_id in closed.triggers:
            self._close(trigger_id)

    def _add_problem(self, body: ErrorContained, at: float) -> None:
        key = (body.where, body.error)
        known = self.problems.get(key)
        if known is None:
            self.problems[key] = RunProblem(body.where, body.error, at)
        else:
            self.problems[key] = replace(known, count=known.count + 1)

    def _reopen(self, triggers: Iterable[TriggerId]) -> None:
        """Consider undecided triggers again, without a cooldown."""
        for trigger_id in triggers:
            trigger = self.triggers[trigger_id]
            self._open(trigger)
            self.last_decided.pop(trigger.fingerprint, None)


_REPLAN_RECORDS: Final = frozenset(
    {AlternativesConsidered, DecisionMade, PlanRevised, OutcomeRecorded, QuestionAnswered}
)
"""The kinds of record that providers see of earlier replans."""

_ATTEMPT_KINDS: Final = frozenset(
    {
        CallMade,
        AttemptStarted,
        AttemptSucceeded,
        AttemptFailed,
        AttemptTimedOut,
        AttemptInterrupted,
    }
)
"""Kinds of record that only matter for the number of running attempts."""

_NEW_CHANCES: Final = frozenset(
    {
        AttemptSucceeded,
        ContextUpdated,
        FactsObserved,
        ResourceUpdated,
        PlanRevised,
        GoalChanged,
    }
)
"""The kinds of record after which a search that found nothing may find an alternative."""
