"""What takes changes back: for each the opposite one, in the opposite order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from replanning.changes import (
    AbortRun,
    AddTask,
    CancelTask,
    ModifyTask,
    PlanChange,
    RemoveTask,
    ReorderTasks,
    ReplaceTask,
    RetryTask,
    SkipTask,
)
from replanning.errors import ChangeRejected, Problem
from replanning.live.draft import Draft
from replanning.live.states import WAITING, TaskState
from replanning.plan.types import TaskId

if TYPE_CHECKING:
    from replanning.live.graph import TaskGraph


def inverse(graph: TaskGraph, changes: Sequence[PlanChange]) -> tuple[PlanChange, ...]:
    """The changes that take others back, found before those are applied.

    Raises:
        ChangeRefused: the changes do not fit, or one of them cannot be taken back; names every one.
    """
    draft = _UndoDraft(graph, changes)
    if problems := draft.problems or draft.irreversible:
        raise ChangeRejected(problems)
    return tuple(change for undo in reversed(draft.inverses) for change in undo)


class _UndoDraft(Draft):
    """A draft that notes for each change, before it is staged, what takes it back."""

    def __init__(self, graph: TaskGraph, changes: Sequence[PlanChange]) -> None:
        self.inverses: list[list[PlanChange]] = []
        self.irreversible: list[Problem] = []
        super().__init__(graph, changes)

    def stage(self, change: PlanChange) -> None:
        """Lay one more change over the plan."""
        before = len(self.problems)
        undo = _UNDO_HANDLERS[type(change)](self, change) if self._task_exists(change) else []
        super().stage(change)
        if len(self.problems) == before:
            self.inverses.append(undo)

    def _task_exists(self, change: PlanChange) -> bool:
        named = getattr(change, "task_id", None)
        return named is None or named in self.overlay

    def _add_irreversible(self, message: str) -> list[PlanChange]:
        self.irreversible.append(Problem(self.change_path, f"{message}: this cannot be taken back"))
        return []

    def _undo_add(self, change: AddTask) -> list[PlanChange]:
        staging = self.overlay
        waiting = [
            i for i in dict.fromkeys(change.before) if i in staging and change.task.id not in staging.task(i).depends_on
        ]
        before = [ModifyTask(task_id=i, fields={"depends_on": list(staging.task(i).depends_on)}) for i in waiting]
        return [*before, RemoveTask(task_id=change.task.id)]

    def _undo_modify(self, change: ModifyTask) -> list[PlanChange]:
        old = self.overlay.task(change.task_id).model_dump(mode="json")
        return [ModifyTask(task_id=change.task_id, fields={name: old[name] for name in change.fields if name in old})]

    def _undo_reorder(self, change: ReorderTasks) -> list[PlanChange]:
        known = [task_id for task_id in change.order if task_id in self.overlay]
        return [ReorderTasks(order=tuple(sorted(known, key=self.overlay.position)))]

    def _undo_end(self, change: RemoveTask | ReplaceTask | SkipTask | CancelTask) -> list[PlanChange]:
        state = self.overlay.state(change.task_id)
        again = RetryTask(task_id=change.task_id)
        if state in WAITING:
            return [again]
        if state is TaskState.CANCELLED:
            return [again, CancelTask(task_id=change.task_id, reason=self._reason(change.task_id))]
        return self._add_irreversible(f"task {change.task_id!r} is {state}, and would wait to run")

    def _undo_retry(self, change: RetryTask) -> list[PlanChange]:
        state = self.overlay.state(change.task_id)
        if not self.overlay.exists(change.task_id):
            return [RemoveTask(task_id=change.task_id)]
        if state is TaskState.SKIPPED:
            return [SkipTask(task_id=change.task_id, reason=self._reason(change.task_id))]
        if state is TaskState.CANCELLED:
            return [CancelTask(task_id=change.task_id, reason=self._reason(change.task_id))]
        return self._add_irreversible(f"task {change.task_id!r} is {state}, and no change makes a task so")

    def _undo_abort(self, change: AbortRun) -> list[PlanChange]:
        return self._add_irreversible("the run is aborted")

    def _reason(self, task_id: TaskId) -> str:
        return self._graph.entry(task_id).reason if task_id in self._graph else ""


_UNDO_HANDLERS: dict[type, Callable[..., list[PlanChange]]] = {
    AddTask: _UndoDraft._undo_add,
    RemoveTask: _UndoDraft._undo_end,
    ReplaceTask: _UndoDraft._undo_end,
    ModifyTask: _UndoDraft._undo_modify,
    ReorderTasks: _UndoDraft._undo_reorder,
    RetryTask: _UndoDraft._undo_retry,
    SkipTask: _UndoDraft._undo_end,
    CancelTask: _UndoDraft._undo_end,
    AbortRun: _UndoDraft._undo_abort,
}
