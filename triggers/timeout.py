"""Detects attempts that timed out and are not retried."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from replanning.journal import AttemptTimedOut, Observation, RecordBody, TaskTimedOut
from replanning.live import PlanView
from replanning.plan.messages import format_duration
from replanning.triggers.task_failed import task_cause, task_label


class TimeoutDetector:
    """`timeout`: an attempt passed its deadline, and the task is not retried automatically."""

    name = "timeout"
    observes: ClassVar[tuple[type[RecordBody], ...]] = (AttemptTimedOut,)

    def detect(self, observation: Observation, view: PlanView) -> Iterable[TaskTimedOut]:
        """Yield one trigger if the timeout makes the task fail."""
        if not isinstance(observation, AttemptTimedOut) or observation.retry_at is not None:
            return
        if observation.confirm_at is not None:
            return
        task = view.task(observation.task)
        limit = format_duration(observation.timeout)
        yield TaskTimedOut(
            tasks=(task.id,),
            root=task.root,
            cause=task_cause(task, "timeout"),
            reason=f"{task_label(task)} did not finish within {limit}",
            timeout=observation.timeout,
        )

    def why_not(self, observation: Observation, view: PlanView) -> str:
        """Return why this timeout needs no replanning."""
        if isinstance(observation, AttemptTimedOut) and observation.confirm_at is not None:
            return "a confirmation of the task is still pending"
        return "the task is retried automatically"
