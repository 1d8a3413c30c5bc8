"""Whether ready tasks were started in their order, as a journal tells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from replanning import Plan
from replanning.changes import AddTask, ModifyTask, PlanChange, ReorderTasks, ReplaceTask
from replanning.journal import AttemptStarted, PlanRevised, Record, RunOpened, RunResumed, TriggerFired
from tests.support.run_model import RunModel


class Places:
    """The places of tasks in the queue: priority, then insertion, unless they were reordered."""

    def __init__(self, plan: Plan) -> None:
        self._places = {task.id: (task.priority, number) for number, task in enumerate(plan.tasks)}

    def __getitem__(self, task_id: str) -> tuple[int, int]:
        return self._places[task_id]

    def follow(self, changes: Sequence[PlanChange]) -> None:
        """What changes do to the places."""
        for change in changes:
            new = (
                change.tasks
                if isinstance(change, ReplaceTask)
                else [change.task]
                if isinstance(change, AddTask)
                else []
            )
            for task in new:
                self._places[task.id] = (task.priority, len(self._places))
            if isinstance(change, ModifyTask) and isinstance(priority := change.fields.get("priority"), int):
                self._places[change.task_id] = (priority, self._places[change.task_id][1])
            if isinstance(change, ReorderTasks):
                places = sorted(self._places[task_id] for task_id in change.order)
                self._places |= dict(zip(change.order, places, strict=True))


def out_of_order(records: Sequence[Record]) -> Iterator[str]:
    """Tasks that were started although another that could start had its place before them.

    Left aside are tasks that a trigger is about, which may be held while it is considered, and at the moment of a
    resume those whose wait for another attempt is over, which the timer makes ready.
    """
    opened = records[0].body
    assert isinstance(opened, RunOpened)
    model, places = RunModel(opened.plan), Places(opened.plan)
    concerned: set[str] = set()
    resumed = 0.0
    for record in records[1:]:
        body = record.body
        if isinstance(body, TriggerFired):
            concerned.update(body.trigger.tasks)
        elif isinstance(body, RunResumed):
            resumed = record.at
        elif isinstance(body, AttemptStarted):
            able = [i for i in _could_start(model, record.at) if record.at > resumed or not model.tasks[i].due]
            first = min(able, key=places.__getitem__, default=body.task)
            if places[first] < places[body.task] and first not in concerned:
                yield f"record {record.seq}: {body.task!r} starts before {first!r}, which could start and comes first"
        model.apply(record)
        if isinstance(body, PlanRevised):
            places.follow(body.changes)


def _could_start(model: RunModel, at: float) -> Iterator[str]:
    used: dict[str, float] = {}
    for task_id in model.running():
        for name, amount in model.demand(task_id).items():
            used[name] = used.get(name, 0.0) + amount
    for task_id, task in model.tasks.items():
        if (
            task.state != "waiting"
            or task.due >= at
            or model.open_questions(task_id)
            or model.unmet_dependencies(task_id)
        ):
            continue
        demand = model.demand(task_id).items()
        fits = all(used.get(name, 0.0) + amount <= model.capacity.get(name, 0.0) for name, amount in demand)
        if fits and model.available.get(task.task.tool or "", True):
            yield task_id
