"""Takes journal records in on a plan, one function for each kind of record.

Each either does all that its record says, or raises and has changed nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from replanning._entries import NOT_MET, Entry
from replanning._errors import ExpressionError, IllegalTransition, PlanError
from replanning._ids import TaskId
from replanning._observations import (
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
from replanning._plan import Task, ToolSpec
from replanning._records import Body, Decided, QuestionAnswered, QuestionAsked, Revised, RunEnded
from replanning._references import resolve
from replanning._states import TaskEvent, transition

if TYPE_CHECKING:
    from replanning._live import LivePlan

_START, _SUCCEED = TaskEvent.START, TaskEvent.SUCCEED

OUTCOMES: Final = 50
"""How many outcomes of a tool are kept as evidence of past success."""


def _started(live: LivePlan, body: AttemptStarted, at: float) -> None:
    entry = live._entries.get(body.task) or live.entry(body.task)
    task, name = entry.task, entry.fields["tool"]
    tool = live.tools.get(name) if name is not None else None
    effects = None
    if tool is not None and (tool.adds or tool.removes or tool.produces):
        effects = _effects(live, task, tool)
    live._move(entry, _START)
    entry.effects = effects
    live.claims.start(entry, tool)
    entry.attempt = body.attempt
    entry.attempts = body.number
    entry.round += 1
    entry.started = at
    entry.due = None
    entry.deadline = body.deadline
    if body.deadline is not None:
        live._deadlines.add(body.deadline, entry, body.attempt)


def _succeeded(live: LivePlan, body: AttemptSucceeded, at: float) -> None:
    entry = live._entries.get(body.task) or live.entry(body.task)
    if entry.attempt != body.attempt:
        raise IllegalTransition(entry.state, _SUCCEED, _stale(body))
    live._move(entry, _SUCCEED)
    live._end_attempt(entry)
    if body.recoverable:
        entry.output = body.output
    entry.recoverable = body.recoverable
    entry.failure, entry.failures = None, 0
    entry.duration = at - entry.started
    live.ended_attempts += 1
    count, total = live.durations
    live.durations = (count + 1, total + entry.duration)
    tool = entry.fields["tool"]
    if tool is not None:
        _count(live, tool, succeeded=True)
    if entry.effects is not None:
        added, removed = entry.effects
        entry.effects = None
        for fact in removed:
            live.facts.pop(fact, None)
        live.facts.update(dict.fromkeys(added))
    live._release(entry)


def _failed(live: LivePlan, body: AttemptFailed | AttemptTimedOut | AttemptInterrupted, at: float) -> None:
    entry = live.entry(body.task)
    failure = failure_of(body)
    again = TaskEvent.CONTINUE if failure.kind == "unfinished" else TaskEvent.BACK_OFF
    event = TaskEvent.FAIL if body.retry_at is None else again
    if entry.attempt != body.attempt:
        raise IllegalTransition(entry.state, event, _stale(body))
    live._move(entry, event)
    live._end_attempt(entry)
    entry.failure = failure
    entry.duration = at - entry.started
    live.ended_attempts += 1
    entry.effects = None
    if entry.task.tool is not None:
        _count(live, entry.task.tool, succeeded=False)
    if isinstance(body, AttemptInterrupted) and body.retry_at is not None:
        entry.round -= 1  # it says nothing about the task
    if body.retry_at is None or (isinstance(body, AttemptFailed) and body.exhausted):
        entry.failures += 1
        entry.round = 0
    if event is TaskEvent.CONTINUE:
        entry.continued, entry.feedback, entry.round = entry.continued + 1, failure.message, 0
    elif failure.kind == "blocked":
        live._move(entry, TaskEvent.BLOCK)
        entry.reason = failure.message
    if body.retry_at is not None:
        live._wait_until(entry, body.retry_at)


def _condition(live: LivePlan, body: ConditionEvaluated, _at: float) -> None:
    entry = live.entry(body.task)
    if body.value:
        entry.condition = live.revision
        return
    live._move(entry, TaskEvent.CONDITION_ERROR if body.value is None else TaskEvent.SKIP)
    live.claims.drop(entry)
    if body.value is None:
        entry.failure = Failure("ConditionError", body.error, kind="condition")
        entry.failures += 1
    else:
        entry.condition = NOT_MET
        entry.reason = f"its condition {entry.task.when!r} does not hold"
        live._release(entry)


def _context(live: LivePlan, body: ContextUpdated, _at: float) -> None:
    live.context.update(body.changes)
    for name in body.removed:
        live.context.pop(name, None)
    live.claims.unpark()


def _resource(live: LivePlan, body: ResourceUpdated, _at: float) -> None:
    if body.available is not None and body.name in live.tools:
        live.tools[body.name] = live.tools[body.name].model_copy(update={"available": body.available})
    if body.capacity is not None:
        live.pool.capacity[body.name] = body.capacity
        live.claims.pooled = True
    live.claims.unpark()


def _facts(live: LivePlan, body: FactsObserved, _at: float) -> None:
    for fact in body.ceased:
        live.facts.pop(fact, None)
    live.facts.update(dict.fromkeys(body.holds))
    live.claims.unpark()


def _goal(live: LivePlan, body: GoalChanged, _at: float) -> None:
    live.goal = body.goal


def _revised(live: LivePlan, body: Revised, at: float) -> None:
    live.apply(body.changes, body.parent, at=at)


def _decided(live: LivePlan, body: Decided, _at: float) -> None:
    for entry in _moved(live, body.blocks, TaskEvent.BLOCK):
        live.claims.drop(entry)
        entry.reason = body.reason


def _asked(live: LivePlan, body: QuestionAsked, _at: float) -> None:
    held = [live.entry(task_id) for task_id in body.holds]
    live._holds[body.question] = body.holds
    live.claims.hold(held)


def _answered(live: LivePlan, body: QuestionAnswered, _at: float) -> None:
    live.claims.release([live._entries[task_id] for task_id in live._holds.pop(body.question, ())])


def _ended(live: LivePlan, body: RunEnded, _at: float) -> None:
    for entry in _moved(live, body.cancelled, TaskEvent.CANCEL):
        live._end_attempt(entry)
        live.claims.drop(entry)
        entry.reason = body.reason


def _effects(live: LivePlan, task: Task, tool: ToolSpec) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The facts that a use of a tool with the arguments of now adds and removes; None where they are not known."""
    try:
        stored = partial(live.results.of, stored=True)
        arguments = resolve(task.arguments, context=live.context, result=stored)
        return tool.additions(arguments), tool.deletions(arguments)
    except (ExpressionError, PlanError):
        return None


def _count(live: LivePlan, tool: str, *, succeeded: bool) -> None:
    """Count an outcome of a tool."""
    past = live.outcomes.get(tool)
    if past is None:
        past = live.outcomes[tool] = deque(maxlen=OUTCOMES)
    past.append(succeeded)


def _moved(live: LivePlan, task_ids: Sequence[TaskId], event: TaskEvent) -> list[Entry]:
    """Move tasks, all or none."""
    entries = [live.entry(task_id) for task_id in dict.fromkeys(task_ids)]
    for entry in entries:
        transition(entry.state, event, entry.id)
    for entry in entries:
        live._move(entry, event)
    return entries


def _stale(body: AttemptSucceeded | AttemptFailed | AttemptTimedOut | AttemptInterrupted) -> str:
    return f"task {body.task!r}, of which {body.attempt!r} is not the current attempt,"


def failure_of(body: AttemptFailed | AttemptTimedOut | AttemptInterrupted) -> Failure:
    """The failure that an ended attempt leaves behind."""
    if isinstance(body, AttemptFailed):
        return body.failure
    if isinstance(body, AttemptTimedOut):
        return Failure("TimedOut", f"ran into its deadline after {body.timeout:g} s", kind="timeout")
    return Failure("Interrupted", body.reason, kind="interrupted")


HANDLERS: dict[type[Body], Callable[..., None]] = {
    AttemptStarted: _started,
    AttemptSucceeded: _succeeded,
    AttemptFailed: _failed,
    AttemptTimedOut: _failed,
    AttemptInterrupted: _failed,
    ConditionEvaluated: _condition,
    ContextUpdated: _context,
    ResourceUpdated: _resource,
    FactsObserved: _facts,
    GoalChanged: _goal,
    Revised: _revised,
    Decided: _decided,
    QuestionAsked: _asked,
    QuestionAnswered: _answered,
    RunEnded: _ended,
}
"""The kinds of record that concern the state of a plan."""
