"""Notices attempts that ran into their deadline and are not repeated by themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from replanning.journal import AttemptTimedOut, Observation, RecordBody, TaskTimedOut
from replanning.live import PlanView
from replanning.triggers._text import task_cause, task_label


class TimeoutDetector:
    """`timeout`: the deadline of an attempt passed, and the task is not run again by itself."""

    name = "timeout"
    observes: ClassVar[tuple[type[RecordBody], ...]] = (AttemptTimedOut,)

    def detect(self, observation: Observation, view: PlanView) -> Iterable[TaskTimedOut]:
        """One trigger for an attempt after which the task stands as failed."""
        if not isinstance(observation, AttemptTimedOut) or observation.retry_at is not None:
            return
        task = view.task(observation.task)
        yield TaskTimedOut(
            tasks=(task.id,),
            root=task.root,
            cause=task_cause(task, "timeout"),
            reason=f"{task_label(task)} did not finish within {observation.timeout:g} s",
            timeout=observation.timeout,
        )
