"""Detects tasks that failed for good: without retries left, or unable to start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import ClassVar

from replanning.journal import (
    AttemptFailed,
    AttemptInterrupted,
    ConditionEvaluated,
    Observation,
    RecordBody,
    TaskFailed,
)
from replanning.journal.records import normalised_cause
from replanning.live import PlanView, TaskState, TaskView
from replanning.plan.messages import one_line


class TaskFailedDetector:
    """`task-failed`: an attempt failed and is not retried, or a task could not be started."""

    name = "task-failed"
    observes: ClassVar[tuple[type[RecordBody], ...]] = (
        AttemptFailed,
        AttemptInterrupted,
        ConditionEvaluated,
    )

    def detect(self, observation: Observation, view: PlanView) -> Iterable[TaskFailed]:
        """Yield one trigger if the task has failed now."""
        if not isinstance(observation, AttemptFailed | AttemptInterrupted | ConditionEvaluated):
            return
        task = view.task(observation.task)
        if task.state is not TaskState.FAILED or task.failure is None:
            return
        failure = task.failure
        label = task_label(task)
        match failure.kind:
            case "interrupted":
                reason = f"{label} was cut off: {failure.message}"
            case "condition":
                reason = f"the condition of {label} cannot be evaluated: {failure.message}"
            case "arguments":
                reason = f"{label} cannot be given its arguments: {failure.message}"
            case "secret":
                reason = f"{label} cannot run: {failure.message}"
            case _:
                reason = f"{label} failed: {failure}"
                if task.attempts > 1:
                    reason = f"{label} failed after {task.attempts} attempts: {failure}"
        yield TaskFailed(
            tasks=(task.id,),
            root=task.root,
            cause=task_cause(task, failure.type, failure.message),
            reason=one_line(reason, 300),
            error_type=failure.type,
            message=failure.message,
            attempts=task.attempts,
            transient=failure.transient,
            interrupted=failure.kind == "interrupted",
            traceback=failure.traceback,
        )

    def why_not(self, observation: Observation, view: PlanView) -> str:
        """Return why this observation is not a final failure."""
        if isinstance(observation, AttemptFailed | AttemptInterrupted):
            if observation.retry_at is not None:
                return f"task {observation.task!r} is retried automatically"
            if observation.confirm_at is not None:
                return f"a confirmation of task {observation.task!r} is still pending"
        if isinstance(observation, AttemptFailed | AttemptInterrupted | ConditionEvaluated):
            return f"task {observation.task!r} is {view.state(observation.task)}"
        return "it concerns no task"


def task_cause(task: TaskView, *error: str) -> str:
    """Return the cause of a failure: equal for equal calls with equal normalised errors.

    Only the error is normalised: `tool-1` and `tool-2` are different tools, and calls with
    different arguments are different calls.
    """
    call = task.task.tool or task.id
    if task.task.arguments:
        text = json.dumps(task.task.arguments, sort_keys=True)
        call += f"({hashlib.sha256(text.encode()).hexdigest()[:8]})"
    return f"{call}:{normalised_cause(*error)}"


def task_label(task: TaskView) -> str:
    """Return the words for a task in messages, with its tool and the task that it replaces."""
    label = f"task {task.id!r}"
    if task.task.tool:
        label += f" with {task.task.tool!r}"
    if task.root != task.id:
        label += f" in place of {task.root!r}"
    return label
