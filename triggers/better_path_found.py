"""Detects that cheaper tools could execute the remaining tasks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import ClassVar

from replanning import Settings, ToolSpec
from replanning.journal import AttemptSucceeded, BetterPathFound, Observation, RecordBody
from replanning.live import PlanView, TaskView
from replanning.live.states import WAITING

MAX_TASKS_PER_TOOL = 1_000
"""Most tasks of one tool that are examined."""


class BetterPathDetector:
    """`better-path-found`: a tool of equal capability makes the remaining path cheaper by at least the minimum gain.

    Only tools that state their cost are compared.

    Args:
        every: number of successful attempts between two comparisons.
        min_gain: smallest gain worth a change, as a share of the cost of the remaining path.
    """

    name = "better-path-found"
    observes: ClassVar[tuple[type[RecordBody], ...]] = (AttemptSucceeded,)

    def __init__(self, *, every: int = 3, min_gain: float = 0.15) -> None:
        self.every = every
        self.min_gain = min_gain

    @classmethod
    def for_settings(cls, settings: Settings) -> BetterPathDetector:
        """Return a detector configured by the settings."""
        return cls(every=settings.better_path.every, min_gain=settings.better_path.min_gain)

    def detect(self, observation: Observation, view: PlanView) -> Iterable[BetterPathFound]:
        """Yield one trigger for each tool whose waiting tasks a cheaper one could take over."""
        if not isinstance(observation, AttemptSucceeded) or view.succeeded_attempts % self.every:
            return
        cheapest = _cheapest_tools(view)
        if not any(_cost_saving(tool, cheapest) for tool in view.tools.values()):
            return
        for name, tool in view.tools.items():
            other = cheapest.get(tool.capability or "")
            if other is not None and (saving := _cost_saving(tool, cheapest)):
                waiting = _waiting_tasks(name, view)
                tasks = [task for task in waiting if other.parameters.keys() <= task.task.arguments.keys()]
                gain = saving * len(tasks) / view.remaining_cost if tasks else 0.0
                if tasks and gain >= self.min_gain:
                    count = f"{len(tasks)} waiting task{'s' * (len(tasks) != 1)}"
                    yield BetterPathFound(
                        tasks=tuple(task.id for task in tasks),
                        cause=f"{name}>{other.name}",
                        reason=f"{other.name!r} can take over {count} from {name!r} and makes the remaining plan"
                        f" {gain:.0%} cheaper",
                        gain=gain,
                        tool=other.name,
                    )


def _cheapest_tools(view: PlanView) -> dict[str, ToolSpec]:
    """Return the cheapest available tool of each capability."""
    cheapest: dict[str, ToolSpec] = {}
    for tool in view.tools.values():
        if tool.capability and tool.available and tool.cost is not None:
            best = cheapest.get(tool.capability)
            if best is None or tool.cost < (best.cost or 0.0):
                cheapest[tool.capability] = tool
    return cheapest


def _cost_saving(tool: ToolSpec, cheapest: dict[str, ToolSpec]) -> float:
    """Return the saving of one use of the cheapest tool of the same capability."""
    other = cheapest.get(tool.capability or "")
    return 0.0 if other is None or tool.cost is None else max(0.0, tool.cost - (other.cost or 0.0))


def _waiting_tasks(name: str, view: PlanView) -> list[TaskView]:
    return [
        task
        for task in islice(view.resource_users(name), MAX_TASKS_PER_TOOL)
        if task.task.tool == name and task.state in WAITING
    ]
