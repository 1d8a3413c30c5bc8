"""Situations: a plan in need of alternatives, with the known part of its past.

A run is one. So is a plan alone: its past is read from records and from the triggers themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

from replanning.changes import PlanChange
from replanning.decision.evaluation import PlanEvaluator
from replanning.decision.ledger import Ledger
from replanning.environment import SystemClock
from replanning.errors import JournalCorrupt
from replanning.history.history import ReplanHistory
from replanning.history.status import apply_record
from replanning.journal.memory import MemoryStore
from replanning.journal.records import (
    AttemptFailed,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    FactsObserved,
    Failure,
    FailureKind,
    Record,
    ResourceChanged,
    ResourceUpdated,
    TaskFailed,
    TaskTimedOut,
    Trigger,
)
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.states import TRANSITIONS, TaskEvent, TaskState
from replanning.live.view import PlanView
from replanning.plan.checks import topological_order
from replanning.plan.document import Plan
from replanning.plan.messages import brief_repr
from replanning.plan.references import fact_problem, normalise_fact
from replanning.plan.types import AttemptId, RunId, TaskId
from replanning.run.lifecycle import Lifecycle
from replanning.run.opening import redactor_for
from replanning.run.outcomes import Evaluation
from replanning.run.retries import warn_of_error
from replanning.secrets import Redactor
from replanning.settings import Settings

_ASSUMED: Final = "its success is assumed, so its output is unknown"


@dataclass(frozen=True, slots=True, eq=False)
class Situation:
    """Plan in need of alternatives, with the known part of its past; without I/O.

    An engine has one for each run, from `Situation.of_run`. `Situation.of` makes one from a plan
    that is not running, or from a view of a run.

    Attributes:
        live: the plan with its states, facts and context.
        ledger: earlier tries and decisions, and the budget.
        settings: thresholds and limits.
        redactor: recognises secrets in alternatives.
        evaluation: finds past outcomes of tools, and compares the costs of paths.
        is_running: whether tasks may begin while providers are asked.
        elapsed: seconds of the time budget that are used up, if nothing is running.
        undo_problem: returns why the run cannot be undone as changes request; empty if it can.
        question_about_replaced: returns why a person must agree to the loss of effects of replaced
            tasks; empty if no one must.
    """

    live: LivePlan
    ledger: Ledger
    settings: Settings
    redactor: Redactor
    evaluation: Evaluation
    is_running: bool = True
    elapsed: float = 0.0
    undo_problem: Callable[[Sequence[PlanChange]], str] = lambda changes: ""
    question_about_replaced: Callable[[Sequence[PlanChange]], str] = lambda changes: ""

    @classmethod
    def of_run(cls, life: Lifecycle) -> Self:
        """Return the situation of a run; it changes as the run continues."""
        undo = life.undo
        return cls(
            life.live,
            life.ledger,
            life.settings,
            life.redactor,
            life.evaluation,
            undo_problem=undo.problem,
            question_about_replaced=undo.question_about_replaced,
        )

    @classmethod
    def of(
        cls,
        plan: Plan | PlanView,
        triggers: Sequence[Trigger] = (),
        *,
        history: Iterable[Record] | ReplanHistory = (),
        facts: Collection[str] | None = None,
        settings: Settings | None = None,
        redactor: Redactor | None = None,
        evaluator: PlanEvaluator | None = None,
    ) -> Self:
        """Return the situation of a plan without a run, or of a view of a running plan.

        A view is used as it is. A plan is brought to the state that follows, in this order:

        1. from the records;
        2. from the triggers: where a task failed or timed out, its dependencies are done and it has
           failed, unless the records say what became of them; a tool or resource is as a
           `ResourceChanged` says;
        3. from the facts.

        Args:
            plan: the plan as it was when the records began; or a view.
            triggers: why alternatives are sought.
            history: earlier events: records in order, as a store reads them, or the history of a
                run. With a view, they only supply earlier tries and decisions.
            facts: all facts that hold now. A plan without facts is read as if it declared these. By
                default they follow from the plan, the records and the triggers.
            settings: thresholds and limits; by default the standard ones.
            redactor: recognises secrets; by default made from the settings.
            evaluator: compares the costs of paths; by default the built-in one.

        Raises:
            StaleView: the plan has changed since the view was made.
            UnknownTask: a trigger names a task that the plan does not have.
            ValueError: a fact is invalid, facts are passed together with a view, or a record does
                not fit the plan.
        """
        if settings is None:
            settings = Settings()
        if redactor is None:
            redactor = redactor_for(settings)
        if isinstance(history, ReplanHistory):
            records = list(history.records(0))
        else:
            records = list(history)
        if isinstance(plan, PlanView):
            if facts is not None:
                raise ValueError("facts: a view has those of its run; report them to the run")
            live = plan._live
            ledger = _new_ledger(live, settings)
            for record in records:
                ledger.fold(record)
        else:
            live, ledger = _replay(plan, triggers, records, facts, settings)
        elapsed = 0.0
        if records:
            elapsed = ledger.questions.elapsed_seconds(records[0].at, records[-1].at)

        clock = SystemClock()

        def warn(where: str, error: BaseException) -> None:
            warn_of_error(where, error, redactor)

        evaluation = Evaluation(live, ledger, MemoryStore(), clock, warn)
        if evaluator is not None:
            evaluation.evaluator = evaluator
        is_running = isinstance(plan, PlanView)
        return cls(
            live,
            ledger,
            settings,
            redactor,
            evaluation,
            is_running,
            elapsed,
        )

    @property
    def view(self) -> PlanView:
        """View of the current plan."""
        return PlanView(self.live)


def _new_ledger(live: LivePlan, settings: Settings) -> Ledger:
    budget = live.plan.budget
    if budget is None:
        budget = settings.budget
    return Ledger(budget, lambda: live.counts[TaskState.RUNNING])


def _replay(
    plan: Plan,
    triggers: Sequence[Trigger],
    records: Sequence[Record],
    facts: Collection[str] | None,
    settings: Settings,
) -> tuple[LivePlan, Ledger]:
    """Return a plan after records, triggers and facts, and the memory of replanning."""
    known: tuple[str, ...] | None = None
    if facts is not None:
        known = _checked_facts(facts)
        # Only a plan that declares facts is checked against them.
        if plan.facts is None:
            plan = plan.model_copy(update={"facts": known})
    live = LivePlan(plan)
    ledger = _new_ledger(live, settings)
    at = 0.0
    for record in records:
        at = record.at
        try:
            apply_record(record, live, ledger, RunId(""))
        except JournalCorrupt as error:
            which = f"record {record.seq} ({record.body.kind})"
            advice = "pass the plan as it was when the records began"
            message = f"history: {which} does not fit: {error.__cause__}; {advice}"
            raise ValueError(message) from error
    # The records have masks in place of secrets.
    if records:
        live.find_masked_parts(plan)

    for trigger in triggers:
        _assume(trigger, live, at)
    if known is not None:
        live.fold(Record(0, at, _observation(known, live)))
    return live, ledger


def _checked_facts(facts: Collection[str]) -> tuple[str, ...]:
    """Return facts in normal form, in an order independent of their source.

    Raises:
        ValueError: some are not facts; names each of them.
    """
    if isinstance(facts, str):
        raise ValueError(f"facts: expected several facts, got the text {brief_repr(facts)}")
    wrong = []
    for fact in facts:
        problem = fact_problem(fact)
        if problem:
            wrong.append(f"{brief_repr(fact)} is not a fact: {problem}")
    if wrong:
        raise ValueError(f"facts: {'; '.join(wrong)}")
    return tuple(sorted({normalise_fact(fact) for fact in facts}))


def _assume(trigger: Trigger, live: LivePlan, at: float) -> None:
    """Bring a plan to the state in which a trigger fires, unless it is already there."""
    if isinstance(trigger, ResourceChanged):
        changed = ResourceUpdated(trigger.name, trigger.capacity, trigger.available, trigger.reason)
        live.fold(Record(0, at, changed))
    elif isinstance(trigger, TaskFailed | TaskTimedOut):
        for task_id in trigger.tasks:
            failed = live.entry(task_id)
            for entry in _unfinished_dependencies(failed, live):
                if entry.id not in trigger.tasks:
                    _assume_success(entry, live, at)
            _assume_failure(failed, trigger, live, at)


def _assume_success(entry: TaskEntry, live: LivePlan, at: float) -> None:
    """Let a task succeed if it can be started."""
    attempt = _current_attempt(entry, live, at)
    if attempt is None:
        return
    tool = entry.task.tool or ""
    known = live.statistics.outcomes.pop(tool, None)
    ended = AttemptSucceeded(attempt, entry.id, recoverable=False, unstored=_ASSUMED)
    live.fold(Record(0, at, ended))
    # An assumption says nothing about the tool.
    live.statistics.outcomes.pop(tool, None)
    if known is not None:
        live.statistics.outcomes[tool] = known


def _assume_failure(
    entry: TaskEntry, trigger: TaskFailed | TaskTimedOut, live: LivePlan, at: float
) -> None:
    """Let a task fail as a trigger says, if it can be started."""
    number = 1
    if isinstance(trigger, TaskFailed):
        number = trigger.attempts
    attempt = _current_attempt(entry, live, at, number)
    if attempt is None:
        return
    ended: AttemptFailed | AttemptTimedOut
    if isinstance(trigger, TaskTimedOut):
        ended = AttemptTimedOut(attempt, entry.id, trigger.timeout, exhausted=True)
    else:
        kind: FailureKind = "error"
        if trigger.interrupted:
            kind = "interrupted"
        failure = Failure(
            trigger.error_type or "Error",
            trigger.message or trigger.reason,
            transient=trigger.transient,
            kind=kind,
            traceback=trigger.traceback,
        )
        ended = AttemptFailed(attempt, entry.id, failure, exhausted=True)
    live.fold(Record(0, at, ended))


def _current_attempt(
    entry: TaskEntry, live: LivePlan, at: float, number: int = 1
) -> AttemptId | None:
    """Return the running attempt at a task, or a new one; None if the task cannot be started."""
    if (entry.state, TaskEvent.START) in TRANSITIONS:
        number = max(number, entry.log.count + 1)
        attempt = AttemptId(f"{entry.id}#{number}")
        live.fold(Record(0, at, AttemptStarted(attempt, entry.id, number)))
    return entry.log.current


def _unfinished_dependencies(task: TaskEntry, live: LivePlan) -> list[TaskEntry]:
    """Return the dependencies of a task, each after its own dependencies."""
    found: dict[TaskId, TaskEntry] = {}
    stack = [live.entry(task_id) for task_id in task.task.depends_on]
    while stack:
        entry = stack.pop()
        if entry.satisfied or entry.id in found:
            continue
        found[entry.id] = entry
        stack += entry.replacement.sinks
        stack += [live.entry(task_id) for task_id in entry.task.depends_on]

    entries = list(found.values())
    places = {entry.id: place for place, entry in enumerate(entries)}
    dependencies: list[list[int]] = []
    for entry in entries:
        needed = [*entry.task.depends_on]
        needed += [sink.id for sink in entry.replacement.sinks]
        dependencies.append([places[task_id] for task_id in needed if task_id in places])
    return [entries[place] for place in topological_order(dependencies)]


def _observation(facts: Sequence[str], live: LivePlan) -> FactsObserved:
    """Return the observation that makes exactly these facts hold."""
    before = live.world.facts
    holds = tuple(fact for fact in facts if fact not in before)
    ceased = tuple(fact for fact in before if fact not in facts)
    return FactsObserved(holds, ceased)
