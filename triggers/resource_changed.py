"""Detects that a tool or resource is no longer available to tasks that still have to run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

from replanning.journal import Observation, RecordBody, ResourceChanged, ResourceUpdated
from replanning.live import PlanView
from replanning.live.states import WAITING
from replanning.plan.messages import join_names


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
        gone = observation.available is False
        capacity = view.capacity.get(name, math.inf)
        lacking = [
            task
            for task in view.resource_users(name)
            if task.state in WAITING
            and (
                (gone and task.task.tool == name)
                or view.demand(task.task).get(name, 0.0) > capacity
            )
        ]
        if not lacking:
            return
        why = f" ({observation.reason})" if observation.reason else ""
        lost = "is unavailable" if gone else f"is down to {view.capacity.get(name, 0.0):g}"
        need = "1 waiting task needs" if len(lacking) == 1 else f"{len(lacking)} waiting tasks need"
        yield ResourceChanged(
            tasks=tuple(task.id for task in lacking),
            cause=f"{name}:{'unavailable' if gone else 'capacity'}",
            reason=f"{name!r} {lost}{why}, and {need} it: {join_names([repr(task.id) for task in lacking], 5)}",
            name=name,
            capacity=observation.capacity,
            available=observation.available,
        )
