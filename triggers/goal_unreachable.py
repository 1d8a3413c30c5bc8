"""Detects that no task can run any more although the goal has not been reached."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import ClassVar

from replanning.journal import Failure, GoalUnreachable, Observation, RecordBody, RunQuiescent
from replanning.journal.records import normalised_cause
from replanning.live import PlanView, TaskState, TaskView
from replanning.plan.messages import join_names, one_line, pluralise
from replanning.plan.types import TaskId

MAX_NAMED_TASKS = 100
"""Maximum number of blocking tasks that a trigger names."""

MAX_VISITED_TASKS = 10_000
"""Maximum number of tasks visited in the search for blocking ones."""


class GoalUnreachableDetector:
    """`goal-unreachable`: nothing can run or waits for a decision, but the goal is not reached."""

    name = "goal-unreachable"
    observes: ClassVar[tuple[type[RecordBody], ...]] = (RunQuiescent,)

    def detect(self, observation: Observation, view: PlanView) -> Iterable[GoalUnreachable]:
        """Yield one trigger.

        Its cause is a hash of the blocking tasks, so that a later revision can recognise it.
        """
        if not isinstance(observation, RunQuiescent):
            return
        blocking = tuple(islice(_blocking_tasks(observation, view), MAX_NAMED_TASKS))
        missing = observation.missing_facts
        count = len(observation.unsatisfied)
        causes: list[str] = []
        failures: list[Failure] = []
        for task in blocking:
            error = task.reason
            if task.failure is not None:
                error = normalised_cause(task.failure.type, task.failure.message)
                failures.append(task.failure)
            causes.append(f"{task.id}:{task.state}:{error}")
        lacks: list[str] = []
        if count:
            lacks.append(f"{pluralise(count, 'required task')} cannot be done")
        if missing:
            lacks.append(f"the goal lacks {join_names(missing, 5)}")
        reason = f"nothing can run any more: {' and '.join(lacks)}"
        why = ", ".join(_state_words(view, blocking)[:5])
        if why:
            reason += f" ({why})"
        traceback = ""
        if failures:
            traceback = failures[0].traceback
        yield GoalUnreachable(
            tasks=tuple(task.id for task in blocking),
            cause=hashlib.sha256("\n".join([*causes, *missing]).encode()).hexdigest()[:16],
            reason=one_line(reason, 300),
            missing_facts=missing,
            traceback=traceback,
        )


def _state_words(view: PlanView, blocking: Sequence[TaskView]) -> list[str]:
    """Return phrases for the states of tasks, one for all elements of a list in one state."""
    by_state: dict[TaskState, list[TaskId]] = {}
    for task in [*view.stuck(), *blocking]:
        by_state.setdefault(task.state, []).append(task.id)
    words: list[str] = []
    for state, task_ids in by_state.items():
        for group in view.group_elements(task_ids):
            words.append(f"{group.name} {group.verb} {state}")
    return words


def _blocking_tasks(observation: RunQuiescent, view: PlanView) -> Iterator[TaskView]:
    """Yield the tasks that block others: stuck, cancelled and ready ones.

    A ready task that has not started lacks a tool or a resource.
    """
    yield from view.stuck()
    stack = list(reversed(observation.unsatisfied))
    seen = set(stack)
    while stack and len(seen) <= MAX_VISITED_TASKS:
        task = view.task(stack.pop())
        behind: Sequence[TaskId] = ()
        if task.state in (TaskState.READY, TaskState.CANCELLED):
            yield task
        elif task.state is TaskState.REPLACED_BY_REPLAN:
            behind = task.replaced_by
        elif task.state is TaskState.PENDING:
            behind = task.task.depends_on
        for new in behind:
            if new not in seen:
                seen.add(new)
                stack.append(new)
