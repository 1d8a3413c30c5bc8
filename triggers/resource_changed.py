"""Detects that a tool or resource is no longer available to tasks that still have to run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

from replanning.journal import (
    AttemptFailed,
    Observation,
    RecordBody,
    ResourceChanged,
    ResourceUpdated,
)
from replanning.live import PlanView
from replanning.live.states import WAITING
from replanning.plan.messages import join_names
from replanning.plan.types import TaskId


class ResourceChangedDetector:
    """`resource-changed`: tasks that still have to run lack a tool or enough of a resource.

    Running tasks continue. A tool that comes back or a resource that grows needs no replanning.
    """

    name = "resource-changed"
    observes: ClassVar[tuple[type[RecordBody], ...]] = (ResourceUpdated, AttemptFailed)

    def detect(self, observation: Observation, view: PlanView) -> Iterable[ResourceChanged]:
        """Yield one trigger that names every waiting task that lacks the tool or the capacity."""
        if isinstance(observation, ResourceUpdated):
            gone = observation.available is False
            yield from _lacking(
                view, observation.name, gone, observation.reason, observation.capacity
            )
        elif isinstance(observation, AttemptFailed) and observation.retry_at is not None:
            # If a server dies during a task, its tool becomes unavailable while the task runs. Only
            # now, after the failure, does the task wait for the tool.
            tool = view.tool(view.task(observation.task).task.tool)
            if tool is not None and not tool.available:
                yield from _lacking(view, tool.name, gone=True)

    def why_not(self, observation: Observation, view: PlanView) -> str:
        """Return why no task lacks anything."""
        if isinstance(observation, ResourceUpdated):
            return f"no waiting task lacks {observation.name!r}"
        return "the failed task does not wait for an unavailable tool"


def _lacking(
    view: PlanView, name: str, gone: bool, reason: str = "", new_capacity: float | None = None
) -> Iterable[ResourceChanged]:
    """Yield the trigger for waiting tasks that lack a resource, or a tool if it is gone."""
    capacity = view.capacity.get(name, math.inf)
    lacking: list[TaskId] = []
    for task in view.resource_users(name):
        if task.state not in WAITING:
            continue
        lacks_tool = gone and task.task.tool == name
        lacks_capacity = view.demand(task.task).get(name, 0.0) > capacity
        if lacks_tool or lacks_capacity:
            lacking.append(task.id)
    if not lacking:
        return

    why = f" ({reason})" if reason else ""
    lost = f"is down to {view.capacity.get(name, 0.0):g}"
    cause = f"{name}:capacity"
    available = None
    if gone:
        lost = "is unavailable"
        cause = f"{name}:unavailable"
        available = False
    need = f"{len(lacking)} waiting tasks need"
    if len(lacking) == 1:
        need = "1 waiting task needs"
    names = join_names([group.name for group in view.group_elements(lacking)], 5)
    yield ResourceChanged(
        tasks=tuple(lacking),
        cause=cause,
        reason=f"{name!r} {lost}{why}, and {need} it: {names}",
        name=name,
        capacity=new_capacity,
        available=available,
    )
