"""Edits of a running plan by hand; they count as revisions, not as replans."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from replanning._changes import AddTask, CancelTask, ModifyTask, PlanChange, RemoveTask, ReorderTasks, ReplaceTask
from replanning._ids import TaskId
from replanning._plan import JsonValue, Task


class PlanEdits:
    """The editing methods of a run. Each is one revision, recorded, and raises `ChangeRefused` if it does not fit."""

    __slots__ = ()

    @abstractmethod
    def apply(self, changes: Sequence[PlanChange], *, reason: str = "", expected_revision: int | None = None) -> int:
        """Apply changes by hand: all or none."""

    def add_task(self, task: Task, *, before: Sequence[str] = (), reason: str = "") -> int:
        """Add a task; the tasks in `before` will wait for it."""
        return self.apply([AddTask(task=task, before=tuple(map(TaskId, before)))], reason=reason)

    def remove_task(self, task_id: str, *, reason: str = "") -> int:
        """Take out a task that has not started and on which nothing depends."""
        return self.apply([RemoveTask(task_id=TaskId(task_id))], reason=reason)

    def replace_task(self, task_id: str, *tasks: Task, reason: str = "") -> int:
        """Put a task or a sub-plan in the place of a task."""
        return self.apply([ReplaceTask(task_id=TaskId(task_id), tasks=tasks)], reason=reason)

    def modify_task(self, task_id: str, *, reason: str = "", **fields: JsonValue) -> int:
        """Change fields of a task; a finished one takes only `name`, `goal` and `metadata`."""
        return self.apply([ModifyTask(task_id=TaskId(task_id), fields=fields)], reason=reason)

    def reorder_tasks(self, *order: str, reason: str = "") -> int:
        """Hand these waiting tasks out in this order."""
        return self.apply([ReorderTasks(order=tuple(map(TaskId, order)))], reason=reason)

    def cancel_task(self, task_id: str, *, reason: str = "") -> int:
        """Stop a task, also a running one."""
        return self.apply([CancelTask(task_id=TaskId(task_id), reason=reason)], reason=reason)
