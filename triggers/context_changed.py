"""Detects changes of context, facts or goal that invalidate remaining tasks or finished results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import ClassVar

from replanning import ToolSpec
from replanning.errors import ExpressionError, PlanError
from replanning.journal import (
    ContextChanged,
    ContextUpdated,
    FactsObserved,
    GoalChanged,
    Observation,
    RecordBody,
    ResultsStale,
)
from replanning.live import PlanView, TaskState, TaskView
from replanning.live.states import FINISHED, STUCK, WAITING
from replanning.plan import JsonValue
from replanning.plan.messages import join_names, one_line
from replanning.plan.types import TaskId

_MAX_TASKS_EXAMINED = 1_000
"""Maximum number of tasks examined per tool, and of predecessors examined per task."""

_MAX_LISTED_ITEMS = 5
_MAX_REASON_CHARS = 300
_UNFINISHED_STATES = WAITING | STUCK
"""States of tasks that still have to run. Running tasks have already read their values."""

_TEXT_FIELDS = frozenset({"objective", "success_criteria"})


class ContextChangedDetector:
    """`context-changed`: remaining tasks depend on a change of the context or the facts.

    It also fires if the remaining plan does not reach a changed goal, and if finished tasks with
    `on_stale: redo` have stale results.
    """

    name = "context-changed"
    observes: ClassVar[tuple[type[RecordBody], ...]] = (
        ContextUpdated,
        ResultsStale,
        FactsObserved,
        GoalChanged,
    )

    def detect(self, observation: Observation, view: PlanView) -> Iterable[ContextChanged]:
        """Return at most one trigger, which names the tasks that depend on the change."""
        if isinstance(observation, ContextUpdated):
            return _context_triggers((*observation.changes, *observation.removed), view)
        if isinstance(observation, ResultsStale):
            return _stale_triggers(view)
        if isinstance(observation, GoalChanged):
            return _goal_triggers(observation, view)
        if not isinstance(observation, FactsObserved):
            return ()
        if view.original_plan.facts is None:
            return _open_world_triggers(observation.ceased, view)
        return _closed_world_triggers(observation.ceased, view)

    def why_not(self, observation: Observation, view: PlanView) -> str:
        """Return why this change needs no replanning."""
        if isinstance(observation, GoalChanged):
            return "the remaining plan reaches the goal"
        if isinstance(observation, ResultsStale):
            return "no stale result needs to be redone"
        if isinstance(observation, FactsObserved) and not observation.ceased:
            return "facts that begin to hold harm no task"
        return "no remaining task depends on the change"


def _goal_triggers(observation: GoalChanged, view: PlanView) -> Iterator[ContextChanged]:
    """Yield a trigger unless the facts of the new goal show that the remaining plan reaches it."""
    goal = view.goal
    missing: Sequence[str] = ()
    tasks: Sequence[str] = ()
    if goal.facts:
        world = view.strips_problem()
        if goal.stop_when_reached and frozenset(world.facts).issuperset(world.goal):
            return  # the run ends
        if world.closed_world:
            feasibility = world.feasibility()
            missing = feasibility.missing_goal_facts
            tasks = feasibility.tasks_related_to(missing)
        else:
            lacking = (fact for fact in goal.facts if fact not in view.facts)
            missing = [fact for fact in lacking if _is_lost_for_goal(fact, view)]
        if not missing:
            return
        why = f"the remaining plan does not achieve {join_names(missing, _MAX_LISTED_ITEMS)}"
        cause = ",".join(sorted(missing))
    elif _TEXT_FIELDS.isdisjoint(observation.changed):
        return
    else:
        why = "no facts say whether the plan still reaches it"
        cause = goal.objective
    yield ContextChanged(
        tasks=tuple(tasks),
        cause=f"goal:{cause}",
        reason=one_line(f"the goal changed, and {why}", _MAX_REASON_CHARS),
        facts=tuple(missing),
        goal=True,
    )


def _context_triggers(keys: Sequence[str], view: PlanView) -> Iterator[ContextChanged]:
    tasks: dict[TaskId, None] = {}
    read_keys: list[str] = []
    for key in keys:
        affected = [task.id for task in view.context_readers(key) if _is_affected(task, view)]
        if affected:
            read_keys.append(key)
            tasks |= dict.fromkeys(affected)
    if tasks:
        names = ", ".join(f"context.{key}" for key in read_keys)
        yield ContextChanged(
            tasks=tuple(tasks),
            cause=",".join(sorted(read_keys)),
            reason=f"{names} changed, and {_dependents_phrase(tuple(tasks))}",
            keys=tuple(read_keys),
        )


def _stale_triggers(view: PlanView) -> Iterator[ContextChanged]:
    """Yield a trigger for the stale tasks to redo, and the tasks that wait for them."""
    stale: list[TaskId] = []
    causes: dict[str, None] = {}
    for task_id, result in view.stale_results().items():
        if result.redo:
            stale.append(task_id)
            causes |= {cause: None for cause in result.causes if cause.startswith("context.")}
    if not stale:
        return
    why = "tasks before them are redone"
    if causes:
        why = f"{join_names(causes, _MAX_LISTED_ITEMS)} changed"
    results = f"{len(stale)} results are stale"
    if len(stale) == 1:
        results = "1 result is stale"
    names = join_names(list(map(repr, stale)), _MAX_LISTED_ITEMS)
    yield ContextChanged(
        tasks=tuple(dict.fromkeys([*stale, *view.followers(stale)])),
        cause=f"stale:{','.join(sorted(stale))}",
        reason=one_line(f"{why}, and {results}: {names}", _MAX_REASON_CHARS),
        keys=tuple(cause.removeprefix("context.") for cause in causes),
        stale=tuple(stale),
    )


def _is_affected(task: TaskView, view: PlanView) -> bool:
    """Return whether a reader still has to run, or was skipped but would run now."""
    if task.state in _UNFINISHED_STATES:
        return True
    if not task.condition_not_met or task.task.when is None:
        return False
    try:
        return view.evaluate(task.task.when)
    except ExpressionError:
        return False


def _open_world_triggers(ceased: Sequence[str], view: PlanView) -> Iterator[ContextChanged]:
    """Yield a trigger for facts that tasks or the goal need.

    Each fact is examined alone, because the plan states no facts.
    """
    lost: list[str] = []
    tasks: dict[TaskId, None] = {}
    for fact in ceased:
        dependents = [task.id for task in _tasks_missing_fact(fact, view)]
        tasks |= dict.fromkeys(dependents)
        if dependents or _is_lost_for_goal(fact, view):
            lost.append(fact)
    if lost:
        yield _lost_facts_trigger(tuple(lost), tuple(tasks), tuple(tasks))


def _closed_world_triggers(ceased: Sequence[str], view: PlanView) -> Iterator[ContextChanged]:
    """Yield a trigger unless the remaining plan is still executable and reaches the goal."""
    if not ceased:
        return  # facts that begin to hold harm no task
    if view.goal.stop_when_reached and view.facts >= frozenset(view.goal.facts):
        return  # the run ends
    world = view.strips_problem(facts=ceased)
    feasibility = world.feasibility()
    unmet = frozenset(feasibility.unmet_facts())
    lost = tuple(fact for fact in ceased if fact in unmet)
    if lost:
        stuck = tuple(step.id for step in feasibility.stuck)
        yield _lost_facts_trigger(lost, feasibility.tasks_related_to_stuck(), stuck)


def _lost_facts_trigger(
    lost: tuple[str, ...], tasks: Sequence[str], dependents: Sequence[str]
) -> ContextChanged:
    why = "the goal needs it"
    if dependents:
        why = _dependents_phrase(dependents)
    verb = "holds" if len(lost) == 1 else "hold"
    names = join_names(lost, _MAX_LISTED_ITEMS)
    return ContextChanged(
        tasks=tuple(tasks),
        cause=",".join(sorted(lost)),
        reason=f"{names} no longer {verb}, and {why}",
        facts=lost,
    )


def _dependents_phrase(tasks: Sequence[str]) -> str:
    verb = "task depends" if len(tasks) == 1 else "tasks depend"
    names = join_names(list(map(repr, tasks)), _MAX_LISTED_ITEMS)
    return f"{len(tasks)} {verb} on it: {names}"


def _tasks_missing_fact(fact: str, view: PlanView) -> Iterator[TaskView]:
    """Yield the tasks that need a fact that ceased to hold, and have no predecessor that adds it.

    Running tasks no longer need it.
    """
    adding = {task.id for task in _tasks_adding(fact, view)}
    for tool in view.tools.values():
        if not _may_match(fact, tool.precondition_patterns):
            continue
        for task in _unfinished_tasks(tool, view):
            if task.state is TaskState.RUNNING:
                continue
            if fact not in _ground_facts(tool.preconditions, task, view):
                continue
            if not _runs_after(task, adding, view):
                yield task


def _is_lost_for_goal(fact: str, view: PlanView) -> bool:
    """Return whether the goal needs a fact and no remaining task adds it."""
    return fact in view.goal.facts and next(_tasks_adding(fact, view), None) is None


def _tasks_adding(fact: str, view: PlanView) -> Iterator[TaskView]:
    for tool in view.tools.values():
        if not _may_match(fact, tool.addition_patterns):
            continue
        for task in _unfinished_tasks(tool, view):
            if task.state in STUCK:
                continue
            if fact in _ground_facts(tool.additions, task, view):
                yield task


def _unfinished_tasks(tool: ToolSpec, view: PlanView) -> Iterator[TaskView]:
    users = (task for task in view.resource_users(tool.name) if task.task.tool == tool.name)
    return islice(users, _MAX_TASKS_EXAMINED)


def _ground_facts(
    ground: Callable[[Mapping[str, JsonValue]], Sequence[str]], task: TaskView, view: PlanView
) -> Sequence[str]:
    try:
        return ground(view.arguments(task.id))
    except (ExpressionError, PlanError):
        return ()  # its arguments come from results that do not exist yet


def _runs_after(task: TaskView, adding: set[str], view: PlanView) -> bool:
    """Return whether one of the adding tasks certainly runs before a task."""
    if not adding:
        return False
    seen = {task.id}
    stack = [task]
    while stack and len(seen) <= _MAX_TASKS_EXAMINED:
        for dependency in stack.pop().task.depends_on:
            if dependency in adding:
                return True
            if dependency in seen:
                continue
            seen.add(dependency)
            before = view.task(dependency)
            if before.state is TaskState.REPLACED_BY_REPLAN:
                stack.extend(map(view.task, before.replaced_by))
                if not adding.isdisjoint(before.replaced_by):
                    return True
            elif before.state not in FINISHED:
                stack.append(before)
    return False


def _may_match(fact: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern could match a fact; only names before the parenthesis count."""
    head = fact.partition("(")[0]
    for pattern in patterns:
        name = pattern.partition("(")[0]
        if "{" in name or name == head:
            return True
    return False
