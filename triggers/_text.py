"""Shared by detectors: tasks affected by a fact that ceased to hold, causes of failures, and wording."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from replanning import ToolSpec
from replanning.errors import ExpressionError, PlanError
from replanning.journal.triggers import normalised_cause
from replanning.live import PlanView, TaskState, TaskView
from replanning.plan.types import JsonValue

MAX_TASKS_EXAMINED = 1_000
"""Most tasks of a tool, and most predecessors of a task, that are examined."""

WAITING_STATES = (TaskState.PENDING, TaskState.READY, TaskState.BACKOFF, TaskState.NEEDS_CONTINUATION)

_TERMINAL_STATES = (TaskState.DONE, TaskState.SKIPPED, TaskState.CANCELLED)

_STUCK_STATES = (TaskState.FAILED, TaskState.BLOCKED)

_FactGrounder = Callable[[Mapping[str, JsonValue]], Sequence[str]]


def tasks_missing_fact(fact: str, view: PlanView) -> Iterator[TaskView]:
    """Yield the tasks that have not started, need a fact that ceased, and have no predecessor that adds it."""
    adding = {task.id for task in _tasks_adding(fact, view)}
    for tool in view.tools.values():
        if _may_match(fact, tool.requires, tool.needs):
            for task in _unfinished_tasks(tool, view):
                needed = task.state is not TaskState.RUNNING and fact in _ground_facts(tool.preconditions, task, view)
                if needed and not (adding and _runs_after(task, adding, view)):
                    yield task


def is_lost_for_goal(fact: str, view: PlanView) -> bool:
    """Return whether the goal needs a fact that ceased and no remaining task adds it."""
    return fact in view.goal.facts and next(_tasks_adding(fact, view), None) is None


def _tasks_adding(fact: str, view: PlanView) -> Iterator[TaskView]:
    for tool in view.tools.values():
        if _may_match(fact, tool.adds, tool.produces):
            for task in _unfinished_tasks(tool, view):
                if task.state not in _STUCK_STATES and fact in _ground_facts(tool.additions, task, view):
                    yield task


def _unfinished_tasks(tool: ToolSpec, view: PlanView) -> Iterator[TaskView]:
    return islice((task for task in view.resource_users(tool.name) if task.task.tool == tool.name), MAX_TASKS_EXAMINED)


def _ground_facts(ground: _FactGrounder, task: TaskView, view: PlanView) -> Sequence[str]:
    try:
        return ground(view.arguments(task.id))
    except (ExpressionError, PlanError):
        return ()  # its arguments come from results that do not exist yet


def _runs_after(task: TaskView, adding: set[str], view: PlanView) -> bool:
    """Return whether one of the adding tasks certainly runs before a task."""
    seen = {task.id}
    stack = [task]
    while stack and len(seen) <= MAX_TASKS_EXAMINED:
        for dependency in stack.pop().task.depends_on:
            if dependency in adding:
                return True
            if dependency not in seen:
                seen.add(dependency)
                before = view.task(dependency)
                if before.state is TaskState.REPLACED_BY_REPLAN:
                    stack.extend(view.task(new) for new in before.replaced_by)
                    if not adding.isdisjoint(before.replaced_by):
                        return True
                elif before.state not in _TERMINAL_STATES:
                    stack.append(before)
    return False


def _may_match(fact: str, patterns: Sequence[str], artifacts: Sequence[str]) -> bool:
    """Return whether one of the patterns could match a fact, judged by its name before the bracket."""
    head = fact.partition("(")[0]
    heads = (pattern.partition("(")[0] for pattern in patterns)
    return any("{" in name or name == head for name in heads) or (bool(artifacts) and head == "artifact")


def task_cause(task: TaskView, *error: str) -> str:
    """Return the cause of a failure: equal for equal calls that fail in the same way.

    Only the error is normalised: `tool-1` and `tool-2` are different tools, and other arguments make another call.
    """
    call = task.task.tool or task.id
    if task.task.arguments:
        text = json.dumps(task.task.arguments, sort_keys=True)
        call += f"({hashlib.sha256(text.encode()).hexdigest()[:8]})"
    return f"{call}:{normalised_cause(*error)}"


def task_label(task: TaskView) -> str:
    """Return a task as sentences name it: with its tool, and with the task that it replaces."""
    tool = f" with {task.task.tool!r}" if task.task.tool else ""
    replaces = f" in place of {task.root!r}" if task.root != task.id else ""
    return f"task {task.id!r}{tool}{replaces}"


def list_items(items: Sequence[str]) -> str:
    """Return the first five items, separated by commas, with a mark if there are more."""
    return ", ".join(items[:5]) + (", …" if len(items) > 5 else "")


def shorten(text: str, limit: int = 300) -> str:
    """Return a text on one line, truncated to the length of a sentence."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
