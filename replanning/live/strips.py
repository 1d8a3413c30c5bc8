"""STRIPS model of a plan: actions on facts, whether the remaining steps can be executed, and regression.

The semantics are those of Fikes and Nilsson (1971): a step can be executed if all its preconditions hold; it
removes facts, then adds facts; a fact that is not known to hold does not hold. Everything here is pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from replanning.plan.json_values import as_text
from replanning.plan.references import fill_placeholders, normalise_fact, placeholders
from replanning.plan.tasks import ToolSpec
from replanning.plan.types import JsonObject, JsonValue, TaskId

NO_FACTS: Final[frozenset[str]] = frozenset()


class GroundAction(NamedTuple):
    """Use of a tool with known arguments: preconditions and effects.

    Attributes:
        requires: facts that must hold before it.
        adds: facts that hold after it.
        removes: facts that do not hold after it, unless they are also added.
        unresolved: whether facts are left out because they depend on results that do not exist yet.
        facts: all of these facts, in the order in which the tool states them.
    """

    requires: frozenset[str] = NO_FACTS
    adds: frozenset[str] = NO_FACTS
    removes: frozenset[str] = NO_FACTS
    unresolved: bool = False
    facts: tuple[str, ...] = ()

    def apply(self, facts: frozenset[str]) -> frozenset[str]:
        """Return the facts that hold after the action."""
        return (facts - self.removes) | self.adds

    def interferes_with(self, other: GroundAction) -> bool:
        """Return whether either action removes a fact that the other requires or adds, so that they must not overlap."""
        return not (
            self.removes.isdisjoint(other.requires)
            and other.removes.isdisjoint(self.requires)
            and self.removes.isdisjoint(other.adds - self.adds)
            and other.removes.isdisjoint(self.adds - other.adds)
        )


class StripsStep(NamedTuple):
    """Unfinished task as a planning step.

    Attributes:
        id: the task.
        tool: the tool it uses.
        arguments: its arguments, resolved as far as they are known.
        action: its preconditions and effects.
        depends_on: the unfinished tasks that must be done before it.
        running: whether it runs; then it is assumed to succeed.
        startable: whether it has not failed and its tool is available.
    """

    id: TaskId
    tool: str | None
    arguments: JsonObject
    action: GroundAction
    depends_on: tuple[TaskId, ...]
    running: bool
    startable: bool


class Feasibility(NamedTuple):
    """Result of simulating the remaining steps of a plan.

    Attributes:
        executable: the steps that can be executed, in order.
        stuck: the steps whose dependencies are done but whose preconditions never hold.
        missing_goal_facts: the facts of the goal that do not hold at the end and that no remaining step would add.
        final_facts: the facts that hold at the end.
    """

    executable: tuple[StripsStep, ...]
    stuck: tuple[StripsStep, ...]
    missing_goal_facts: tuple[str, ...]
    final_facts: frozenset[str]

    @property
    def valid(self) -> bool:
        """True if every step can be executed and the goal is reached."""
        return not self.stuck and not self.missing_goal_facts

    def excluding(self, steps: Collection[TaskId], facts: Collection[str]) -> Feasibility:
        """Return a copy that ignores some stuck steps and some missing facts of the goal."""
        return self._replace(
            stuck=tuple(step for step in self.stuck if step.id not in steps),
            missing_goal_facts=tuple(fact for fact in self.missing_goal_facts if fact not in facts),
        )

    def components(self) -> list[list[StripsStep]]:
        """Return the executable and stuck steps in independent groups."""
        return connected_components((*self.executable, *self.stuck), frozenset(self.unmet_facts()))

    def tasks_related_to(self, facts: Collection[str]) -> tuple[TaskId, ...]:
        """Return the unstarted tasks in every group of steps that uses one of the facts."""
        changed = frozenset(facts)
        return self._unstarted_tasks(lambda step: not changed.isdisjoint(step.action.facts))

    def tasks_related_to_stuck(self) -> tuple[TaskId, ...]:
        """Return the unstarted tasks in every group of steps with a stuck one."""
        stuck = {step.id for step in self.stuck}
        return self._unstarted_tasks(lambda step: step.id in stuck)

    def _unstarted_tasks(self, concerns: Callable[[StripsStep], bool]) -> tuple[TaskId, ...]:
        groups = [group for group in self.components() if any(map(concerns, group))]
        return tuple(step.id for group in groups for step in group if not step.running)

    def unmet_facts(self) -> tuple[str, ...]:
        """Return the missing preconditions of stuck steps and the missing facts of the goal."""
        needed = [
            fact for step in self.stuck for fact in sorted(step.action.requires - self.final_facts)
        ]
        return tuple(dict.fromkeys([*needed, *self.missing_goal_facts]))

    def explain(self) -> str:
        """Return the first problem in words; empty if the result is valid."""
        if self.stuck:
            step = self.stuck[0]
            needed = sorted(step.action.requires - self.final_facts)
            more = f" (and {len(self.stuck) - 1} more)" if len(self.stuck) > 1 else ""
            return f"task {step.id!r} needs {', '.join(needed[:5])}, which would not hold{more}"
        if self.missing_goal_facts:
            return f"the goal would lack {', '.join(self.missing_goal_facts[:5])}"
        return ""


@dataclass(frozen=True)
class StripsProblem:
    """Planning problem: the facts that hold now, the remaining steps in plan order, and the goal.

    `closed_world` is true for a plan that states its facts: any other fact does not hold.
    """

    facts: tuple[str, ...]
    steps: tuple[StripsStep, ...]
    goal: tuple[str, ...]
    closed_world: bool
    _computed: dict[bool, Feasibility] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def feasibility(self, *, strict: bool = False) -> Feasibility:
        """Execute steps one after another, each as soon as its dependencies are done and its preconditions hold.

        Args:
            strict: treat steps that cannot be started now as stuck, instead of assuming that they will be fixed.
        """
        strict = strict and not all(step.startable or step.running for step in self.steps)
        if strict not in self._computed:
            self._computed[strict] = _simulate(self, strict=strict)
        return self._computed[strict]


def _simulate(problem: StripsProblem, *, strict: bool) -> Feasibility:
    steps, facts = problem.steps, set(problem.facts)
    open_dependencies = [len(step.depends_on) for step in steps]
    dependents: dict[TaskId, list[int]] = {}
    for index, step in enumerate(steps):
        for dep in step.depends_on:
            dependents.setdefault(dep, []).append(index)
    ready = [
        index for index, step in enumerate(steps) if not step.depends_on
    ]  # sorted, hence a heap
    executed: dict[TaskId, StripsStep] = {}
    stuck: dict[int, StripsStep] = {}
    waiting_for_fact: dict[str, list[int]] = {}
    while ready:
        index = heapq.heappop(ready)
        step = steps[index]
        lacking = next(iter(step.action.requires - facts), None)
        if lacking is not None or (strict and not step.startable and not step.running):
            stuck[index] = step
            if lacking is not None:
                waiting_for_fact.setdefault(lacking, []).append(index)
            continue
        executed[step.id] = step
        facts -= step.action.removes
        facts |= step.action.adds
        for fact in step.action.adds:
            for waiting in waiting_for_fact.pop(fact, ()):
                del stuck[waiting]
                heapq.heappush(ready, waiting)
        for waiting in dependents.get(step.id, ()):
            open_dependencies[waiting] -= 1
            if not open_dependencies[waiting]:
                heapq.heappush(ready, waiting)
    to_come = {fact for step in steps if step.id not in executed for fact in step.action.adds}
    missing = tuple(fact for fact in problem.goal if fact not in facts and fact not in to_come)
    return Feasibility(
        tuple(executed.values()), tuple(stuck[i] for i in sorted(stuck)), missing, frozenset(facts)
    )


def uses_facts(tool: ToolSpec) -> bool:
    """Return whether a tool requires or changes any fact."""
    return bool(tool.requires or tool.adds or tool.removes or tool.needs or tool.produces)


def ground_action(tool: ToolSpec, arguments: Mapping[str, JsonValue]) -> GroundAction:
    """Return the action of a tool with these arguments; patterns with unknown arguments are left out."""
    values = {name: as_text(value) for name, value in arguments.items()}
    needs, first = _instantiate((*tool.requires, *map(artifact_fact, tool.needs)), values)
    adds, second = _instantiate((*tool.adds, *map(artifact_fact, tool.produces)), values)
    removes, third = _instantiate(tool.removes, values)
    facts = tuple(dict.fromkeys([*needs, *adds, *removes]))
    return GroundAction(
        frozenset(needs), frozenset(adds), frozenset(removes), first or second or third, facts
    )


def artifact_fact(name: str) -> str:
    """Return the fact, or pattern of facts, for which a name in `needs` or `produces` is shorthand."""
    return f"artifact({name})"


def _instantiate(patterns: Iterable[str], values: Mapping[str, str]) -> tuple[list[str], bool]:
    facts: list[str] = []
    left_out = False
    for pattern in patterns:
        names = placeholders(pattern)
        if not values.keys() >= set(names):
            left_out = True
        else:
            facts.append(
                normalise_fact(fill_placeholders(pattern, values))
                if names
                else fill_placeholders(pattern, values)
            )
    return facts, left_out


def connected_components(
    steps: Sequence[StripsStep], lacking: Collection[str] = ()
) -> list[list[StripsStep]]:
    """Return steps in independent groups: linked by no dependency, and by no fact that a step changes or lacks."""
    group = list(range(len(steps)))

    def find(index: int) -> int:
        while group[index] != index:
            group[index] = index = group[group[index]]
        return index

    place = {step.id: index for index, step in enumerate(steps)}
    changed = {fact for step in steps for fact in (*step.action.adds, *step.action.removes)}.union(
        lacking
    )
    first: dict[str, int] = {}
    for index, step in enumerate(steps):
        linked = [place[dep] for dep in step.depends_on if dep in place]
        linked += [first.setdefault(fact, index) for fact in step.action.facts if fact in changed]
        for other in linked:
            group[find(index)] = find(other)
    components: dict[int, list[StripsStep]] = {}
    for index, step in enumerate(steps):
        components.setdefault(find(index), []).append(step)
    return list(components.values())


def regress_at(
    goal: Iterable[str], steps: Sequence[GroundAction], places: Collection[int] = (0,)
) -> dict[int, frozenset[str] | None]:
    """Return the facts that must hold before the suffixes of steps that begin at some places, for them to reach a goal.

    None for a suffix that cannot reach it because a step removes a fact needed after it; longer ones cannot either.
    """
    needed = set(goal)
    possible = True
    needed_at: dict[int, frozenset[str] | None] = {}
    for place in range(len(steps), -1, -1):
        if place < len(steps):
            use = steps[place]
            possible = possible and not any(
                fact in needed and fact not in use.adds for fact in use.removes
            )
            needed -= use.adds
            needed |= use.requires
        if place in places:
            needed_at[place] = frozenset(needed) if possible else None
    return needed_at
