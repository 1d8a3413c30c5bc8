"""Notices that nothing can run any more although the goal has not been reached."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import ClassVar

from replanning.journal import GoalUnreachable, Observation, RecordBody, RunQuiescent, normalised_cause
from replanning.live import PlanView, TaskState, TaskView
from replanning.triggers._text import shorten

MAX_NAMED_TASKS = 100
"""How many stuck tasks a trigger names."""

MAX_VISITED_TASKS = 10_000
"""How many tasks are looked at to find those that hold others up."""


class GoalUnreachableDetector:
    """`goal-unreachable`: nothing is ready, running, backing off or being decided, and work is left."""

    name = "goal-unreachable"
    observes: ClassVar[tuple[type[RecordBody], ...]] = (RunQuiescent,)

    def detect(self, observation: Observation, view: PlanView) -> Iterable[GoalUnreachable]:
        """One trigger; its cause is what holds the plan up, so that the same is recognised in a later revision."""
        if not isinstance(observation, RunQuiescent):
            return
        held_up = tuple(islice(_blocking_tasks(observation, view), MAX_NAMED_TASKS))
        missing = observation.missing_facts
        yield GoalUnreachable(
            tasks=tuple(task.id for task in held_up),
            cause=_digest([*map(_blocker_key, held_up), *missing]),
            reason=_unreachable_reason(held_up, observation),
            missing_facts=missing,
        )


def _blocking_tasks(observation: RunQuiescent, view: PlanView) -> Iterator[TaskView]:
    """The tasks that hold others up: those that failed, then those that were cancelled or lack tool or resource."""
    yield from view.stuck()
    stack = list(reversed(observation.unsatisfied))
    seen = set(stack)
    while stack and len(seen) <= MAX_VISITED_TASKS:
        task = view.task(stack.pop())
        if task.state in (TaskState.READY, TaskState.CANCELLED):
            yield task
            continue
        replaced = task.state is TaskState.REPLACED_BY_REPLAN
        behind = task.replaced_by if replaced else task.task.depends_on if task.state is TaskState.PENDING else ()
        stack.extend(new for new in behind if new not in seen)
        seen.update(behind)


def _blocker_key(task: TaskView) -> str:
    error = normalised_cause(task.failure.type, task.failure.message) if task.failure else task.reason
    return f"{task.id}:{task.state}:{error}"


def _digest(problems: list[str]) -> str:
    return hashlib.sha256("\n".join(problems).encode()).hexdigest()[:16]


def _unreachable_reason(held_up: tuple[TaskView, ...], observation: RunQuiescent) -> str:
    count = len(observation.unsatisfied)
    left = f"{count} required task{'s' * (count != 1)} cannot be done" if count else ""
    facts = f"the goal lacks {', '.join(observation.missing_facts[:5])}" if observation.missing_facts else ""
    why = ", ".join(f"{task.id!r} is {task.state}" for task in held_up[:5])
    text = "nothing can run any more: " + " and ".join(part for part in (left, facts) if part)
    return shorten(f"{text} ({why})" if why else text)
