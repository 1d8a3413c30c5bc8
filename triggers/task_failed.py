"""Notices tasks that failed for good: their own retries are used up, or they could not even be tried."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from replanning.events import (
    AttemptFailed,
    AttemptInterrupted,
    Body,
    ConditionEvaluated,
    Failure,
    Observation,
    TaskFailed,
)
from replanning.interfaces import PlanView, TaskState, TaskView
from replanning.triggers._wording import cause_of, label, shorten


class TaskFailedDetector:
    """`task-failed`: an attempt failed or was cut off and is not repeated, or a condition could not be evaluated."""

    name = "task-failed"
    observes: ClassVar[tuple[type[Body], ...]] = (AttemptFailed, AttemptInterrupted, ConditionEvaluated)

    def detect(self, observation: Observation, view: PlanView) -> Iterable[TaskFailed]:
        """One trigger when the task now stands as failed."""
        if not isinstance(observation, AttemptFailed | AttemptInterrupted | ConditionEvaluated):
            return
        task = view.task(observation.task)
        if task.state is not TaskState.FAILED or task.failure is None:
            return
        failure = task.failure
        yield TaskFailed(
            tasks=(task.id,),
            root=task.root,
            cause=cause_of(task, failure.type, failure.message),
            reason=shorten(_sentence(task, failure)),
            error_type=failure.type,
            message=failure.message,
            attempts=task.attempts,
            transient=failure.transient,
            interrupted=failure.kind == "interrupted",
        )


def _sentence(task: TaskView, failure: Failure) -> str:
    if failure.kind == "interrupted":
        return f"{label(task)} was cut off: {failure.message}"
    if failure.kind == "condition":
        return f"the condition of {label(task)} cannot be evaluated: {failure.message}"
    if failure.kind == "arguments":
        return f"{label(task)} cannot be given its arguments: {failure.message}"
    times = f" after {task.attempts} attempts" if task.attempts > 1 else ""
    return f"{label(task)} failed{times}: {failure.type}: {failure.message}"
