"""Where a task stands among those that replaced one another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from replanning._changes import ReplaceTask
from replanning._ids import TaskId
from replanning._records import PlanRevised
from replanning._view import TaskView


class ReplanningInfo(NamedTuple):
    """How a task came about by replanning, and what became of it.

    Attributes:
        iteration: how many replacements lie between the original task and this one.
        max_iterations: how often a lineage may be replanned.
        original_task_id: the task that the lineage began with.
        replaced_by: what took the place of this task.
        replan_reason: why it was replaced; of one that was not, why it took the place of another.
    """

    iteration: int
    max_iterations: int
    original_task_id: TaskId
    replaced_by: tuple[TaskId, ...]
    replan_reason: str


def replanning_info(task: TaskView, revisions: Iterable[PlanRevised], max_iterations: int) -> ReplanningInfo:
    """What the revisions so far, the newest last, mean for a task."""
    made = replaced = ""
    for revised in revisions:
        for change in revised.changes:
            if isinstance(change, ReplaceTask):
                if change.task_id == task.id:
                    replaced = revised.reason
                elif any(new.id == task.id for new in change.tasks):
                    made = revised.reason
    reason = replaced if task.replaced_by else made
    return ReplanningInfo(task.iteration, max_iterations, task.root, task.replaced_by, reason)
