"""Which tasks a fact that has ceased to hold leaves without what they need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from replanning import ToolSpec
from replanning.errors import ExpressionError, PlanError
from replanning.interfaces import JsonValue, PlanView, TaskState, TaskView

BOUND = 1_000
"""How many tasks of a tool, and how many tasks before one, are looked at."""

_ENDED = (TaskState.DONE, TaskState.SKIPPED, TaskState.CANCELLED)
_GIVEN_UP = (TaskState.FAILED, TaskState.BLOCKED)
_Facts = Callable[[Mapping[str, JsonValue]], tuple[str, ...]]


def left_without(fact: str, view: PlanView) -> Iterator[TaskView]:
    """The tasks that still have to start, need a fact that ceased, and have nothing before them that adds it."""
    adding = {task.id for task in _adding(fact, view)}
    for tool in view.tools.values():
        if _may_name(fact, tool.requires, tool.needs):
            for task in _unfinished(tool, view):
                needed = task.state is not TaskState.RUNNING and fact in _grounded(tool.preconditions, task, view)
                if needed and not (adding and _comes_after(task, adding, view)):
                    yield task


def lost_for_goal(fact: str, view: PlanView) -> bool:
    """Whether the goal needs a fact that ceased and no task that is left adds it."""
    return fact in view.goal.facts and next(_adding(fact, view), None) is None


def _adding(fact: str, view: PlanView) -> Iterator[TaskView]:
    for tool in view.tools.values():
        if _may_name(fact, tool.adds, tool.produces):
            for task in _unfinished(tool, view):
                if task.state not in _GIVEN_UP and fact in _grounded(tool.additions, task, view):
                    yield task


def _unfinished(tool: ToolSpec, view: PlanView) -> Iterator[TaskView]:
    return islice((task for task in view.users(tool.name) if task.task.tool == tool.name), BOUND)


def _grounded(facts: _Facts, task: TaskView, view: PlanView) -> tuple[str, ...]:
    try:
        return facts(view.arguments(task.id))
    except (ExpressionError, PlanError):
        return ()  # its arguments come from results that do not exist yet: nothing is known


def _comes_after(task: TaskView, adding: set[str], view: PlanView) -> bool:
    """Whether one of these tasks surely runs before a task."""
    seen = {task.id}
    stack = [task]
    while stack and len(seen) <= BOUND:
        for needed in stack.pop().task.depends_on:
            if needed in adding:
                return True
            if needed not in seen:
                seen.add(needed)
                before = view.task(needed)
                if before.state is TaskState.REPLACED_BY_REPLAN:
                    stack.extend(view.task(new) for new in before.replaced_by)
                    if not adding.isdisjoint(before.replaced_by):
                        return True
                elif before.state not in _ENDED:
                    stack.append(before)
    return False


def _may_name(fact: str, patterns: tuple[str, ...], artifacts: tuple[str, ...]) -> bool:
    """Whether one of the patterns could stand for a fact, by its name before the bracket."""
    head = fact.partition("(")[0]
    heads = (pattern.partition("(")[0] for pattern in patterns)
    return any("{" in name or name == head for name in heads) or (bool(artifacts) and head == "artifact")
