"""Detects that cheaper tools could execute the remaining tasks, and that a shorter path over facts may have appeared."""

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
from replanning.plan.messages import join_names, one_line

MAX_TASKS_PER_TOOL = 1_000
"""Most tasks of one tool that are examined."""

MAX_FOLLOWED_FACTS = 100
"""Most facts that are derived from a change, by tools that the facts so far make possible."""

MAX_REASON_CHARS = 300


class BetterPathDetector:
    """`better-path-found`: a tool of equal capability makes the remaining path cheaper by at least the minimum gain.

    Only tools that state their cost are compared. In a plan that states its facts, it also fires
    when facts begin to hold, or a tool or resource becomes available, with which effects of waiting
    tasks could be achieved in another way, or hold already. What that saves is measured when the
    proposals are vetted.

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
        """Yield a trigger for each tool whose waiting tasks a cheaper one could take over, or one for a shortcut."""
        due = isinstance(observation, AttemptSucceeded) and not view.succeeded_attempts % self.every
        shortcut = (
            isinstance(observation, FactsObserved | ResourceUpdated)
            and view.original_plan.facts is not None
        )
        if due or shortcut:
            usable = [
                tool
                for tool in view.tools.values()
                if tool.available
                and all(view.capacity.get(n, 0.0) >= need for n, need in tool.resources.items())
            ]
            yield from (
                self._cheaper_tools(usable, view)
                if due
                else _possible_shortcuts(observation, usable, view)
            )

    def why_not(self, observation: Observation, view: PlanView) -> str:
        """Return why no better path was found."""
        count = view.succeeded_attempts
        if isinstance(observation, AttemptSucceeded) and count % self.every:
            return f"it compares after every {self.every} successes, and this is number {count}"
        return "no other way is known to save enough"

    def _cheaper_tools(
        self, usable: Sequence[ToolSpec], view: PlanView
    ) -> Iterator[BetterPathFound]:
        priced = sorted(
            ((tool.cost, tool) for tool in usable if tool.cost is not None),
            key=lambda each: each[0],
        )
        cheapest = {
            tool.capability: (cost, tool) for cost, tool in reversed(priced) if tool.capability
        }
        for name, tool in view.tools.items():
            cost, other = cheapest.get(tool.capability or "", (inf, tool))
            saving = (tool.cost or 0.0) - cost
            if saving > 0:
                waiting = _waiting_tasks(name, view)
                tasks = [
                    task
                    for task in waiting
                    if other.parameters.keys() <= task.task.arguments.keys()
                ]
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


def _possible_shortcuts(
    observation: Observation, usable: Sequence[ToolSpec], view: PlanView
) -> Iterator[BetterPathFound]:
    """Yield a trigger if waiting tasks add facts that hold now, or that tools may achieve from the new facts."""
    effects = {tool.name: tool.addition_patterns for tool in view.tools.values()}
    if isinstance(observation, FactsObserved):
        news = sorted(observation.holds)
        reached = list(observation.holds)
    else:
        assert isinstance(observation, ResourceUpdated)
        name = observation.name
        able = (tool for tool in usable if name in (tool.name, *tool.resources))
        news = [name]
        reached = [fact for tool in able for fact in effects[tool.name]]
    for fact in reached:  # grows during the loop
        able = (
            t for t in usable if any(_may_equal(fact, need) for need in t.precondition_patterns)
        )
        reached += [new for tool in able for new in effects[tool.name] if new not in reached]
        if len(reached) > MAX_FOLLOWED_FACTS:
            break
    replaced = [
        name
        for name, adds in effects.items()
        if any(_may_equal(f, new) for f in adds for new in reached)
    ]
    tasks = [task.id for name in replaced for task in _waiting_tasks(name, view)][
        :MAX_TASKS_PER_TOOL
    ]
    if tasks:
        count = f"{len(tasks)} waiting task{'s' * (len(tasks) != 1)}"
        reason = f"there may be a cheaper way than {count}, as {join_names(news, 5)} changed"
        yield BetterPathFound(
            tasks=tuple(tasks), cause=",".join(news), reason=one_line(reason, MAX_REASON_CHARS)
        )


def _may_equal(one: str, other: str) -> bool:
    """Return whether two patterns may stand for the same fact, judged by the text before their placeholders."""
    if "{" not in one and "{" not in other:
        return one == other
    start = one.partition("{")[0]
    other_start = other.partition("{")[0]
    return start.startswith(other_start) or other_start.startswith(start)


def _waiting_tasks(name: str, view: PlanView) -> list[TaskView]:
    return [
        task
        for task in islice(view.resource_users(name), MAX_TASKS_PER_TOOL)
        if task.task.tool == name and task.state in WAITING
    ]
