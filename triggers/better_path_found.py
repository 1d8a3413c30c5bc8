"""Looks now and then whether what is left of the plan could be done by cheaper tools."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import ClassVar

from replanning import Settings, ToolSpec
from replanning.journal import AttemptSucceeded, BetterPathFound, Observation, RecordBody
from replanning.live import PlanView, TaskState, TaskView

MAX_TASKS_PER_TOOL = 1_000
"""How many tasks of one tool are looked at."""

_WAITING_STATES = (TaskState.PENDING, TaskState.READY, TaskState.BACKOFF, TaskState.NEEDS_CONTINUATION)


class BetterPathDetector:
    """`better-path-found`: a tool of equal capability makes the remaining path cheaper by at least the minimum gain.

    Only tools that state their cost are compared.

    Args:
        every: looks after this many successes.
        min_gain: smallest gain worth a change, as a share of what the remaining path costs.
    """

    name = "better-path-found"
    observes: ClassVar[tuple[type[RecordBody], ...]] = (AttemptSucceeded,)

    def __init__(self, *, every: int = 3, min_gain: float = 0.15) -> None:
        self.every = every
        self.min_gain = min_gain

    @classmethod
    def for_settings(cls, settings: Settings) -> BetterPathDetector:
        """A detector that looks as often as the settings say."""
        return cls(every=settings.better_path.every, min_gain=settings.better_path.min_gain)

    def detect(self, observation: Observation, view: PlanView) -> Iterable[BetterPathFound]:
        """One trigger for each tool whose waiting tasks a cheaper one could take over."""
        if not isinstance(observation, AttemptSucceeded) or view.succeeded_attempts % self.every:
            return
        cheapest = _cheapest_tools(view)
        if not any(_cost_saving(tool, cheapest) for tool in view.tools.values()):
            return
        waiting = {name: _waiting_tasks(name, view) for name in view.tools}
        left = sum((view.tools[name].cost or 0.0) * len(tasks) for name, tasks in waiting.items())
        for name, tool in view.tools.items():
            other = cheapest.get(tool.capability or "")
            if other is not None and (saving := _cost_saving(tool, cheapest)):
                tasks = [task for task in waiting[name] if other.parameters.keys() <= task.task.arguments.keys()]
                if tasks and saving * len(tasks) / left >= self.min_gain:
                    yield _trigger(name, other, tasks, saving * len(tasks) / left)


def _trigger(name: str, other: ToolSpec, tasks: list[TaskView], gain: float) -> BetterPathFound:
    count = f"{len(tasks)} waiting task{'s' * (len(tasks) != 1)}"
    return BetterPathFound(
        tasks=tuple(task.id for task in tasks),
        cause=f"{name}>{other.name}",
        reason=f"{other.name!r} can take over {count} from {name!r} and makes what is left {gain:.0%} cheaper",
        gain=gain,
        tool=other.name,
    )


def _cheapest_tools(view: PlanView) -> dict[str, ToolSpec]:
    """For each capability the available tool that costs least."""
    found: dict[str, ToolSpec] = {}
    for tool in view.tools.values():
        if tool.capability and tool.available and tool.cost is not None:
            best = found.get(tool.capability)
            if best is None or tool.cost < (best.cost or 0.0):
                found[tool.capability] = tool
    return found


def _cost_saving(tool: ToolSpec, cheapest: dict[str, ToolSpec]) -> float:
    """How much cheaper one use of the cheapest equal tool is."""
    other = cheapest.get(tool.capability or "")
    return 0.0 if other is None or tool.cost is None else max(0.0, tool.cost - (other.cost or 0.0))


def _waiting_tasks(name: str, view: PlanView) -> list[TaskView]:
    return [
        task
        for task in islice(view.resource_users(name), MAX_TASKS_PER_TOOL)
        if task.task.tool == name and task.state in _WAITING_STATES
    ]
