"""Detects that a tool or resource is no longer available to tasks that still have to run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from replanning.journal import Observation, RecordBody, ResourceChanged, ResourceUpdated
from replanning.live import PlanView, TaskView
from replanning.triggers._text import WAITING_STATES, list_items


class ResourceChangedDetector:
    """`resource-changed`: a tool became unavailable, or a resource too small, for tasks that still have to run.

    Running tasks continue; a tool that comes back or a resource that grows needs no replanning.
    """

    name = "resource-changed"
    observes: ClassVar[tuple[type[RecordBody], ...]] = (ResourceUpdated,)

    def detect(self, observation: Observation, view: PlanView) -> Iterable[ResourceChanged]:
        """Yield one trigger that names every waiting task that lacks the tool or the capacity."""
        if not isinstance(observation, ResourceUpdated):
            return
        name = observation.name
        waiting = [task for task in view.resource_users(name) if task.state in WAITING_STATES]
        gone = observation.available is False
        lacking = [task for task in waiting if (gone and task.task.tool == name) or _exceeds_capacity(name, task, view)]
        if not lacking:
            return
        why = f" ({observation.reason})" if observation.reason else ""
        lost = "is unavailable" if gone else f"is down to {view.capacity.get(name, 0.0):g}"
        need = "1 waiting task needs" if len(lacking) == 1 else f"{len(lacking)} waiting tasks need"
        yield ResourceChanged(
            tasks=tuple(task.id for task in lacking),
            cause=f"{name}:{'unavailable' if gone else 'capacity'}",
            reason=f"{name!r} {lost}{why}, and {need} it: {list_items([repr(task.id) for task in lacking])}",
            name=name,
            capacity=observation.capacity,
            available=observation.available,
        )


def _exceeds_capacity(name: str, task: TaskView, view: PlanView) -> bool:
    return name in view.capacity and view.demand(task.task).get(name, 0.0) > view.capacity[name]
