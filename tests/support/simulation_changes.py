"""Random changes of a running plan: sensible ones, and all the nonsense that a model or a person may propose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from replanning import Alternative, PlanView, Task, TaskState
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
from replanning.live import TaskView
from replanning.plan import JsonObject
from tests.support.simulation_plans import random_body

Make = Callable[["Maker", TaskView], list[PlanChange]]
WAITING = (TaskState.PENDING, TaskState.READY, TaskState.BACKOFF)


class Maker:
    """Makes changes for a plan as it stands."""

    def __init__(self, rng: Random, view: PlanView) -> None:
        self.rng = rng
        self.view = view
        self.tasks = list(view.tasks())
        self._new = 0

    def changes(self, focus: Sequence[str], kinds: dict[Make, int]) -> tuple[PlanChange, ...]:
        """Changes about a task: of the focus if there is one, else any."""
        rng = self.rng
        tasks = [task for task in self.tasks if task.id in focus] or self.tasks
        if not tasks:
            return ()
        made = rng.choices(list(kinds), list(kinds.values()))[0](self, rng.choice(tasks))
        if rng.random() < 0.15:
            made += rng.choices(list(kinds), list(kinds.values()))[0](self, rng.choice(self.tasks))
        return tuple(made)

    def task(self, base: str, *needed: str) -> Task:
        """A new task."""
        self._new += 1
        tools: list[dict[str, object]] = [{"name": name} for name in self.view.tools]
        capacity = self.view.original_plan.resources
        body = random_body(self.rng, [], tools, dict(capacity) if capacity else {})
        fresh = f"{self.view.unused_id(base)}{'x' * (self._new - 1)}"
        return Task.model_validate({**body, "id": fresh, "depends_on": needed})


def _retry(make: Maker, task: TaskView) -> list[PlanChange]:
    return [RetryTask(task_id=task.id, delay=make.rng.choice([0.0, 0.0, 2.5]))]


def _replace(make: Maker, task: TaskView) -> list[PlanChange]:
    return [ReplaceTask(task_id=task.id, tasks=(make.task(task.id),))]


def _replace_by_plan(make: Maker, task: TaskView) -> list[PlanChange]:
    first = make.task(task.id)
    second = make.task(task.id, *([first.id] if make.rng.random() < 0.6 else []))
    third = make.task(task.id, first.id)
    return [ReplaceTask(task_id=task.id, tasks=(first, second, third)[: make.rng.choice([2, 3])])]


def _fall_back(make: Maker, task: TaskView) -> list[PlanChange]:
    if not task.task.fallbacks:
        return _skip(make, task)
    body = make.rng.choice(task.task.fallbacks).model_dump(exclude_unset=True)
    return [ReplaceTask(task_id=task.id, tasks=(Task(id=make.view.unused_id(task.id), **body),))]


def _skip(make: Maker, task: TaskView) -> list[PlanChange]:
    return [SkipTask(task_id=task.id, reason="not needed")]


def _modify(make: Maker, task: TaskView) -> list[PlanChange]:
    others = [other.id for other in make.tasks if other.id != task.id]
    sample = make.rng.sample(others, min(len(others), make.rng.randint(0, 2)))
    choices: list[JsonObject] = [
        {"priority": make.rng.randint(-3, 3)},
        {"timeout": make.rng.choice([None, 4.0, 30.0])},
        {"name": "noted", "metadata": {"seen": True}},
        {"optional": make.rng.random() < 0.5},
        {"idempotent": make.rng.random() < 0.5},
        {"when": make.rng.choice([None, "context.flag"])},
        {"retry": {"max_attempts": 2, "delay": 0.5}},
        {"depends_on": list(sample)},
        {"arguments": {}},
    ]
    fields = make.rng.choice(choices)
    changes: list[PlanChange] = [ModifyTask(task_id=task.id, fields=fields)]
    return changes + (_retry(make, task) if task.state is TaskState.FAILED and make.rng.random() < 0.7 else [])


def _add(make: Maker, task: TaskView) -> list[PlanChange]:
    needed = make.rng.sample([t.id for t in make.tasks], make.rng.choice([0, 0, min(1, len(make.tasks))]))
    return [AddTask(task=make.task(task.id, *needed), before=(task.id,) if make.rng.random() < 0.6 else ())]


def _cancel(make: Maker, task: TaskView) -> list[PlanChange]:
    return [CancelTask(task_id=task.id, reason="not wanted")]


def _remove(make: Maker, task: TaskView) -> list[PlanChange]:
    return [RemoveTask(task_id=task.id)]


def _remove_with_dependents(make: Maker, task: TaskView) -> list[PlanChange]:
    return [*(RemoveTask(task_id=waiting) for waiting in make.view.dependents(task.id)), RemoveTask(task_id=task.id)]


def _reorder(make: Maker, task: TaskView) -> list[PlanChange]:
    waiting = [other.id for other in make.tasks if other.state in WAITING]
    return [ReorderTasks(order=tuple(make.rng.sample(waiting, min(len(waiting), 4))))]


def _abort(make: Maker, task: TaskView) -> list[PlanChange]:
    return [AbortRun(reason="no use")]


def _unknown(make: Maker, task: TaskView) -> list[PlanChange]:
    return [make.rng.choice([RetryTask, SkipTask, RemoveTask, CancelTask])(task_id="nobody")]


def _cycle(make: Maker, task: TaskView) -> list[PlanChange]:
    one, two = make.task(task.id), make.task(task.id)
    ring = (one.model_copy(update={"depends_on": (two.id,)}), two.model_copy(update={"depends_on": (one.id,)}))
    return [ReplaceTask(task_id=task.id, tasks=ring)]


def _wait_for_itself(make: Maker, task: TaskView) -> list[PlanChange]:
    waiting = make.view.dependents(task.id) or (task.id,)
    return [ModifyTask(task_id=task.id, fields={"depends_on": [make.rng.choice(waiting)]})]


def _twice(make: Maker, task: TaskView) -> list[PlanChange]:
    new = make.task(task.id)
    return [AddTask(task=new), AddTask(task=new)]


def _taken_id(make: Maker, task: TaskView) -> list[PlanChange]:
    return [ReplaceTask(task_id=task.id, tasks=(task.task,))]


def _nothing(make: Maker, task: TaskView) -> list[PlanChange]:
    return []


REPAIRS: dict[Make, int] = {
    _retry: 12,
    _replace: 14,
    _replace_by_plan: 10,
    _fall_back: 4,
    _skip: 5,
    _modify: 5,
    _add: 4,
    _cancel: 1,
    _remove: 1,
    _remove_with_dependents: 1,
    _abort: 1,
    _unknown: 1,
    _cycle: 1,
    _wait_for_itself: 1,
    _twice: 1,
    _taken_id: 1,
    _nothing: 1,
}
"""What providers and people propose, and how often."""

EDITS: dict[Make, int] = {
    _add: 5,
    _modify: 5,
    _replace: 3,
    _replace_by_plan: 2,
    _remove: 3,
    _remove_with_dependents: 2,
    _cancel: 3,
    _reorder: 3,
    _skip: 2,
    _retry: 3,
    _cycle: 1,
    _unknown: 1,
}
"""What somebody does to a running plan by hand, and how often."""


def random_alternatives(rng: Random, view: PlanView, focus: Sequence[str]) -> list[Alternative]:
    """Up to three alternatives for some tasks."""
    maker = Maker(rng, view)
    return [
        Alternative(
            changes=maker.changes(focus, REPAIRS),
            reason="it may help",
            confidence=rng.choice([None, 0.0, 0.25, 0.6, 0.8, 0.9, 0.95, 1.0]),
            expected_duration=rng.choice([None, 5.0]),
            unreachable=rng.choice(["proven-unreachable", *[None] * 20]),
        )
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3]))
    ]
