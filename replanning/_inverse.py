"""What takes changes back: for each the opposite one, in the opposite order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from replanning._changes import (
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
from replanning._draft import Draft
from replanning._errors import ChangeRefused, Problem
from replanning._ids import TaskId
from replanning._states import WAITING, TaskState

if TYPE_CHECKING:
    from replanning._taskgraph import TaskGraph


def inverse(graph: TaskGraph, changes: Sequence[PlanChange]) -> tuple[PlanChange, ...]:
    """The changes that take others back, found before those are applied.

    Raises:
        ChangeRefused: the changes do not fit, or one of them cannot be taken back; names every one.
    """
    draft = _Undo(graph, changes)
    if problems := draft.problems or draft.final:
        raise ChangeRefused(problems)
    return tuple(change for undo in reversed(draft.undo) for change in undo)


class _Undo(Draft):
    """A draft that notes for each change, before it is staged, what takes it back."""

    def __init__(self, graph: TaskGraph, changes: Sequence[PlanChange]) -> None:
        self.undo: list[list[PlanChange]] = []
        self.final: list[Problem] = []
        super().__init__(graph, changes)

    def stage(self, change: PlanChange) -> None:
        """Lay one more change over the plan."""
        before = len(self.problems)
        undo = _OPPOSITE[type(change)](self, change) if self._names_known(change) else []
        super().stage(change)
        if len(self.problems) == before:
            self.undo.append(undo)

    def _names_known(self, change: PlanChange) -> bool:
        named = getattr(change, "task_id", None)
        return named is None or named in self.staging

    def _no_way_back(self, message: str) -> list[PlanChange]:
        self.final.append(Problem(self.place, f"{message}: this cannot be taken back"))
        return []

    def _added(self, change: AddTask) -> list[PlanChange]:
        staging = self.staging
        waiting = [
            i for i in dict.fromkeys(change.before) if i in staging and change.task.id not in staging.task(i).depends_on
        ]
        before = [ModifyTask(task_id=i, fields={"depends_on": list(staging.task(i).depends_on)}) for i in waiting]
        return [*before, RemoveTask(task_id=change.task.id)]

    def _modified(self, change: ModifyTask) -> list[PlanChange]:
        old = self.staging.task(change.task_id).model_dump(mode="json")
        return [ModifyTask(task_id=change.task_id, fields={name: old[name] for name in change.fields if name in old})]

    def _reordered(self, change: ReorderTasks) -> list[PlanChange]:
        known = [task_id for task_id in change.order if task_id in self.staging]
        return [ReorderTasks(order=tuple(sorted(known, key=self.staging.position)))]

    def _ended(self, change: RemoveTask | ReplaceTask | SkipTask | CancelTask) -> list[PlanChange]:
        state = self.staging.state(change.task_id)
        again = RetryTask(task_id=change.task_id)
        if state in WAITING:
            return [again]
        if state is TaskState.CANCELLED:
            return [again, CancelTask(task_id=change.task_id, reason=self._reason(change.task_id))]
        return self._no_way_back(f"task {change.task_id!r} is {state}, and would wait to run")

    def _retried(self, change: RetryTask) -> list[PlanChange]:
        state = self.staging.state(change.task_id)
        if not self.staging.exists(change.task_id):
            return [RemoveTask(task_id=change.task_id)]
        if state is TaskState.SKIPPED:
            return [SkipTask(task_id=change.task_id, reason=self._reason(change.task_id))]
        if state is TaskState.CANCELLED:
            return [CancelTask(task_id=change.task_id, reason=self._reason(change.task_id))]
        return self._no_way_back(f"task {change.task_id!r} is {state}, and no change makes a task so")

    def _aborted(self, change: AbortRun) -> list[PlanChange]:
        return self._no_way_back("the run is aborted")

    def _reason(self, task_id: TaskId) -> str:
        return self._graph.entry(task_id).reason if task_id in self._graph else ""


_OPPOSITE: dict[type, Callable[..., list[PlanChange]]] = {
    AddTask: _Undo._added,
    RemoveTask: _Undo._ended,
    ReplaceTask: _Undo._ended,
    ModifyTask: _Undo._modified,
    ReorderTasks: _Undo._reordered,
    RetryTask: _Undo._retried,
    SkipTask: _Undo._ended,
    CancelTask: _Undo._ended,
    AbortRun: _Undo._aborted,
}
