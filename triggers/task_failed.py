"""Detects tasks that failed for good: their own retries are used up, or they could not even be started."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from replanning.journal import (
    AttemptFailed,
    AttemptInterrupted,
    ConditionEvaluated,
    Failure,
    Observation,
    RecordBody,
    TaskFailed,
)
from replanning.live import PlanView, TaskState, TaskView
from replanning.triggers._text import shorten, task_cause, task_label


class TaskFailedDetector:
    """`task-failed`: an attempt failed or was interrupted and is not retried, or a condition cannot be evaluated."""

    name = "task-failed"
    observes: ClassVar[tuple[type[RecordBody], ...]] = (AttemptFailed, AttemptInterrupted, ConditionEvaluated)

    def detect(self, observation: Observation, view: PlanView) -> Iterable[TaskFailed]:
        """Yield one trigger if the task has failed now."""
        if not isinstance(observation, AttemptFailed | AttemptInterrupted | ConditionEvaluated):
            return
        task = view.task(observation.task)
        if task.state is not TaskState.FAILED or task.failure is None:
            return
        failure = task.failure
        yield TaskFailed(
            tasks=(task.id,),
            root=task.root,
            cause=task_cause(task, failure.type, failure.message),
            reason=shorten(_failure_reason(task, failure)),
            error_type=failure.type,
            message=failure.message,
            attempts=task.attempts,
            transient=failure.transient,
            interrupted=failure.kind == "interrupted",
        )


def _failure_reason(task: TaskView, failure: Failure) -> str:
    if failure.kind == "interrupted":
        return f"{task_label(task)} was cut off: {failure.message}"
    if failure.kind == "condition":
        return f"the condition of {task_label(task)} cannot be evaluated: {failure.message}"
    if failure.kind == "arguments":
        return f"{task_label(task)} cannot be given its arguments: {failure.message}"
    times = f" after {task.attempts} attempts" if task.attempts > 1 else ""
    return f"{task_label(task)} failed{times}: {failure.type}: {failure.message}"
