"""Takes journal records in on a plan, one function for each kind of record.

Each either does all that its record says, or raises and has changed nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from replanning.errors import ExpressionError, IllegalTransition, PlanError
from replanning.journal.observations import (
    AttemptFailed,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    ConditionEvaluated,
    ContextUpdated,
    FactsObserved,
    Failure,
    GoalChanged,
    ResourceUpdated,
)
from replanning.journal.records import DecisionMade, PlanRevised, QuestionAnswered, QuestionAsked, RecordBody, RunEnded
from replanning.live.entries import CONDITION_NOT_MET, TaskEntry
from replanning.live.states import TaskEvent, transition
from replanning.plan.references import resolve_references
from replanning.plan.tasks import Task, ToolSpec
from replanning.plan.types import TaskId

if TYPE_CHECKING:
    from replanning.live.plan import LivePlan


_START, _SUCCEED = TaskEvent.START, TaskEvent.SUCCEED

MAX_OUTCOMES_PER_TOOL: Final = 50
"""How many outcomes of a tool are kept as evidence of past success."""


def _on_attempt_started(live: LivePlan, body: AttemptStarted, at: float) -> None:
    entry = live._entries.get(body.task) or live.entry(body.task)
    task, name = entry.task, entry.fields["tool"]
    tool = live.tools.get(name) if name is not None else None
    effects = None
    if tool is not None and (tool.adds or tool.removes or tool.produces):
        effects = _ground_effects(live, task, tool)
    live._transition(entry, _START)
    entry.effects = effects
    live.dispatcher.start(entry, tool)
    entry.attempt = body.attempt
    entry.attempts = body.number
    entry.attempts_in_round += 1
    entry.started_at = at
    entry.not_before = None
    entry.deadline = body.deadline
    if body.deadline is not None:
        live._deadlines.add(body.deadline, entry, body.attempt)


def _on_attempt_succeeded(live: LivePlan, body: AttemptSucceeded, at: float) -> None:
    entry = live._entries.get(body.task) or live.entry(body.task)
    if entry.attempt != body.attempt:
        raise IllegalTransition(entry.state, _SUCCEED, _stale_attempt_subject(body))
    live._transition(entry, _SUCCEED)
    live._end_attempt(entry)
    if body.recoverable:
        entry.output = body.output
    entry.recoverable = body.recoverable
    entry.failure, entry.failures = None, 0
    entry.duration = at - entry.started_at
    live.ended_attempts += 1
    count, total = live.success_durations
    live.success_durations = (count + 1, total + entry.duration)
    tool = entry.fields["tool"]
    if tool is not None:
        _add_outcome(live, tool, succeeded=True)
    if entry.effects is not None:
        added, removed = entry.effects
        entry.effects = None
        for fact in removed:
            live.facts.pop(fact, None)
        live.facts.update(dict.fromkeys(added))
    live._satisfy_dependents(entry)


def _on_attempt_failed(live: LivePlan, body: AttemptFailed | AttemptTimedOut | AttemptInterrupted, at: float) -> None:
    entry = live.entry(body.task)
    failure = failure_of(body)
    again = TaskEvent.CONTINUE if failure.kind == "unfinished" else TaskEvent.BACK_OFF
    event = TaskEvent.FAIL if body.retry_at is None else again
    if entry.attempt != body.attempt:
        raise IllegalTransition(entry.state, event, _stale_attempt_subject(body))
    live._transition(entry, event)
    live._end_attempt(entry)
    entry.failure = failure
    entry.duration = at - entry.started_at
    live.ended_attempts += 1
    entry.effects = None
    if entry.task.tool is not None:
        _add_outcome(live, entry.task.tool, succeeded=False)
    if isinstance(body, AttemptInterrupted) and body.retry_at is not None:
        entry.attempts_in_round -= 1  # it says nothing about the task
    if body.retry_at is None or (isinstance(body, AttemptFailed) and body.exhausted):
        entry.failures += 1
        entry.attempts_in_round = 0
    if event is TaskEvent.CONTINUE:
        entry.continuations, entry.feedback, entry.attempts_in_round = entry.continuations + 1, failure.message, 0
    elif failure.kind == "blocked":
        live._transition(entry, TaskEvent.BLOCK)
        entry.reason = failure.message
    if body.retry_at is not None:
        live._wait_until(entry, body.retry_at)


def _on_condition_evaluated(live: LivePlan, body: ConditionEvaluated, _at: float) -> None:
    entry = live.entry(body.task)
    if body.value:
        entry.condition_revision = live.revision
        return
    live._transition(entry, TaskEvent.CONDITION_ERROR if body.value is None else TaskEvent.SKIP)
    live.dispatcher.end_claim(entry)
    if body.value is None:
        entry.failure = Failure("ConditionError", body.error, kind="condition")
        entry.failures += 1
    else:
        entry.condition_revision = CONDITION_NOT_MET
        entry.reason = f"its condition {entry.task.when!r} does not hold"
        live._satisfy_dependents(entry)


def _on_context_updated(live: LivePlan, body: ContextUpdated, _at: float) -> None:
    live.context.update(body.changes)
    for name in body.removed:
        live.context.pop(name, None)
    live.dispatcher.unpark()


def _on_resource_updated(live: LivePlan, body: ResourceUpdated, _at: float) -> None:
    if body.available is not None and body.name in live.tools:
        live.tools[body.name] = live.tools[body.name].model_copy(update={"available": body.available})
    if body.capacity is not None:
        live.pool.capacity[body.name] = body.capacity
        live.dispatcher.has_resources = True
    live.dispatcher.unpark()


def _on_facts_observed(live: LivePlan, body: FactsObserved, _at: float) -> None:
    for fact in body.ceased:
        live.facts.pop(fact, None)
    live.facts.update(dict.fromkeys(body.holds))
    live.dispatcher.unpark()


def _on_goal_changed(live: LivePlan, body: GoalChanged, _at: float) -> None:
    live.goal = body.goal


def _on_revised(live: LivePlan, body: PlanRevised, at: float) -> None:
    live.apply(body.changes, body.parent, at=at)


def _on_decided(live: LivePlan, body: DecisionMade, _at: float) -> None:
    for entry in _transition_all(live, body.blocks, TaskEvent.BLOCK):
        live.dispatcher.end_claim(entry)
        entry.reason = body.reason


def _on_question_asked(live: LivePlan, body: QuestionAsked, _at: float) -> None:
    held = [live.entry(task_id) for task_id in body.holds]
    live._holds_by_question[body.question] = body.holds
    live.dispatcher.hold(held)


def _on_question_answered(live: LivePlan, body: QuestionAnswered, _at: float) -> None:
    live.dispatcher.release([live._entries[task_id] for task_id in live._holds_by_question.pop(body.question, ())])


def _on_run_ended(live: LivePlan, body: RunEnded, _at: float) -> None:
    for entry in _transition_all(live, body.cancelled, TaskEvent.CANCEL):
        live._end_attempt(entry)
        live.dispatcher.end_claim(entry)
        entry.reason = body.reason


def _ground_effects(live: LivePlan, task: Task, tool: ToolSpec) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The facts that a use of a tool with the arguments of now adds and removes; None where they are not known."""
    try:
        stored = partial(live.results.output_of, stored_only=True)
        arguments = resolve_references(task.arguments, context=live.context, result_of=stored)
        return tool.additions(arguments), tool.deletions(arguments)
    except (ExpressionError, PlanError):
        return None


def _add_outcome(live: LivePlan, tool: str, *, succeeded: bool) -> None:
    """Count an outcome of a tool."""
    past = live.outcomes.get(tool)
    if past is None:
        past = live.outcomes[tool] = deque(maxlen=MAX_OUTCOMES_PER_TOOL)
    past.append(succeeded)


def _transition_all(live: LivePlan, task_ids: Sequence[TaskId], event: TaskEvent) -> list[TaskEntry]:
    """Move tasks, all or none."""
    entries = [live.entry(task_id) for task_id in dict.fromkeys(task_ids)]
    for entry in entries:
        transition(entry.state, event, entry.id)
    for entry in entries:
        live._transition(entry, event)
    return entries


def _stale_attempt_subject(body: AttemptSucceeded | AttemptFailed | AttemptTimedOut | AttemptInterrupted) -> str:
    return f"task {body.task!r}, of which {body.attempt!r} is not the current attempt,"


def failure_of(body: AttemptFailed | AttemptTimedOut | AttemptInterrupted) -> Failure:
    """The failure that an ended attempt leaves behind."""
    if isinstance(body, AttemptFailed):
        return body.failure
    if isinstance(body, AttemptTimedOut):
        return Failure("TimedOut", f"ran into its deadline after {body.timeout:g} s", kind="timeout")
    return Failure("Interrupted", body.reason, kind="interrupted")


PLAN_RECORD_HANDLERS: dict[type[RecordBody], Callable[..., None]] = {
    AttemptStarted: _on_attempt_started,
    AttemptSucceeded: _on_attempt_succeeded,
    AttemptFailed: _on_attempt_failed,
    AttemptTimedOut: _on_attempt_failed,
    AttemptInterrupted: _on_attempt_failed,
    ConditionEvaluated: _on_condition_evaluated,
    ContextUpdated: _on_context_updated,
    ResourceUpdated: _on_resource_updated,
    FactsObserved: _on_facts_observed,
    GoalChanged: _on_goal_changed,
    PlanRevised: _on_revised,
    DecisionMade: _on_decided,
    QuestionAsked: _on_question_asked,
    QuestionAnswered: _on_question_answered,
    RunEnded: _on_run_ended,
}
"""The kinds of record that concern the state of a plan."""
