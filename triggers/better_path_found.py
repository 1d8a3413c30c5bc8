"""Detects that cheaper tools, or a shorter path over facts, could complete the remaining tasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import inf
from typing import ClassVar

from replanning import Settings, ToolSpec
from replanning.journal import (
    AttemptSucceeded,
    BetterPathFound,
    FactsObserved,
    Observation,
    RecordBody,
    ResourceUpdated,
)
from replanning.live import PlanView, TaskView
from replanning.live.states import WAITING
from replanning.plan.messages import join_names, one_line, pluralise
from replanning.plan.types import TaskId

MAX_TASKS_PER_TOOL = 1_000
"""Maximum number of tasks examined per tool."""

MAX_FOLLOWED_FACTS = 100
"""Maximum number of facts derived from a change through the effects of usable tools."""

MAX_REASON_CHARS = 300


class BetterPathDetector:
    """`better-path-found`: a tool of the same capability makes the remaining path cheaper.

    Only tools that state their cost are compared. In a plan that states its facts, it also fires
    when facts begin to hold, or a tool or resource becomes available, so that effects of waiting
    tasks hold already or could be achieved otherwise. The gain is measured when the proposals are
    vetted.

    Args:
        every: number of successful attempts between two comparisons.
        min_gain: smallest gain worth a change, as a share of the cost of the remaining path.
    """

    name = "better-path-found"
    observes: ClassVar[tuple[type[RecordBody], ...]] = (
        AttemptSucceeded,
        FactsObserved,
        ResourceUpdated,
    )

    def __init__(self, *, every: int = 3, min_gain: float = 0.15) -> None:
        self.every = every
        self.min_gain = min_gain

    @classmethod
    def for_settings(cls, settings: Settings) -> BetterPathDetector:
        """Return a detector configured by the settings."""
        return cls(every=settings.better_path.every, min_gain=settings.better_path.min_gain)

    def detect(self, observation: Observation, view: PlanView) -> Iterable[BetterPathFound]:
        """Yield a trigger for each tool that a cheaper one could replace, or one for a shortcut."""
        if isinstance(observation, AttemptSucceeded):
            if view.succeeded_attempts % self.every == 0:
                yield from self._cheaper_tools(view)
        elif view.original_plan.facts is not None:
            yield from _possible_shortcuts(observation, view)

    def why_not(self, observation: Observation, view: PlanView) -> str:
        """Return why no better path was found."""
        count = view.succeeded_attempts
        if isinstance(observation, AttemptSucceeded) and count % self.every:
            return f"it compares after every {self.every} successes, and this is number {count}"
        return "no known alternative saves enough"

    def _cheaper_tools(self, view: PlanView) -> Iterator[BetterPathFound]:
        cheapest: dict[str, tuple[float, ToolSpec]] = {}
        for tool in _usable_tools(view):
            if tool.cost is None or not tool.capability:
                continue
            cost, _ = cheapest.get(tool.capability, (inf, tool))
            if tool.cost < cost:
                cheapest[tool.capability] = (tool.cost, tool)
        for name, tool in view.tools.items():
            cost, other = cheapest.get(tool.capability or "", (inf, tool))
            saving = (tool.cost or 0.0) - cost
            if saving <= 0:
                continue
            tasks: list[TaskId] = []
            for task in _waiting_tasks(name, view):
                if other.parameters.keys() <= task.task.arguments.keys():
                    tasks.append(task.id)
            if not tasks:
                continue
            gain = saving * len(tasks) / view.remaining_cost
            if gain >= self.min_gain:
                count = pluralise(len(tasks), "waiting task")
                reason = (
                    f"{other.name!r} can take over {count} from {name!r} and makes the remaining"
                    f" plan {gain:.0%} cheaper"
                )
                yield BetterPathFound(
                    tasks=tuple(tasks),
                    cause=f"{name}>{other.name}",
                    reason=reason,
                    gain=gain,
                    tool=other.name,
                )


def _usable_tools(view: PlanView) -> list[ToolSpec]:
    """Return the available tools whose resource demands are within the capacity."""
    usable: list[ToolSpec] = []
    for tool in view.tools.values():
        fits = all(view.capacity.get(n, 0.0) >= need for n, need in tool.resources.items())
        if tool.available and fits:
            usable.append(tool)
    return usable


def _possible_shortcuts(observation: Observation, view: PlanView) -> Iterator[BetterPathFound]:
    """Yield a trigger if the effects of waiting tasks hold now, or could be achieved otherwise.

    Alternatives start from the facts that now hold, or the tools that are now usable.
    """
    usable = _usable_tools(view)
    news: list[str] = []
    reached: list[str] = []
    if isinstance(observation, FactsObserved):
        news = sorted(observation.holds)
        reached = list(observation.holds)
    elif isinstance(observation, ResourceUpdated):
        news = [observation.name]
        for tool in usable:
            if observation.name in (tool.name, *tool.resources):
                reached += tool.addition_patterns
    for fact in reached:  # grows while it is iterated
        for tool in usable:
            if _may_be_among(fact, tool.precondition_patterns):
                reached += [new for new in tool.addition_patterns if new not in reached]
        if len(reached) > MAX_FOLLOWED_FACTS:
            break
    tasks: list[TaskId] = []
    for name, tool in view.tools.items():
        if any(_may_be_among(fact, reached) for fact in tool.addition_patterns):
            tasks += [task.id for task in _waiting_tasks(name, view)]
    tasks = tasks[:MAX_TASKS_PER_TOOL]
    if tasks:
        changed = join_names(news, 5)
        count = pluralise(len(tasks), "waiting task")
        reason = f"there may be a cheaper way than {count}, as {changed} changed"
        yield BetterPathFound(
            tasks=tuple(tasks), cause=",".join(news), reason=one_line(reason, MAX_REASON_CHARS)
        )


def _may_be_among(fact: str, patterns: Sequence[str]) -> bool:
    """Return whether a fact or pattern may equal a fact of the given patterns.

    Only the text before the first placeholder is compared.
    """
    start, ground = _ground_prefix(fact)
    for pattern in patterns:
        other, other_ground = _ground_prefix(pattern)
        if ground and other_ground:
            if start == other:
                return True
        elif start.startswith(other) or other.startswith(start):
            return True
    return False


def _ground_prefix(pattern: str) -> tuple[str, bool]:
    """Return the text before the first placeholder, and whether it is the whole pattern."""
    start, brace, _ = pattern.partition("{")
    return start, not brace


def _waiting_tasks(name: str, view: PlanView) -> list[TaskView]:
    waiting: list[TaskView] = []
    for task in islice(view.resource_users(name), MAX_TASKS_PER_TOOL):
        if task.task.tool == name and task.state in WAITING:
            waiting.append(task)
    return waiting
