"""STRIPS model of a plan: actions on facts, simulation of the remaining steps, and regression.

The semantics are those of Fikes and Nilsson (1971): a step can be executed if all its preconditions
hold; it removes facts, then adds facts; a fact that is not known to hold does not hold. Everything
here is pure.
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
        unresolved: whether facts are missing because they depend on results that do not exist yet.
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
        """Return whether the two actions must not overlap.

        Either one removes a fact that the other requires, or that the other alone adds.
        """
        for one, another in ((self, other), (other, self)):
            # A fact that both add holds afterwards in any order.
            needed = another.requires | (another.adds - one.adds)
            if not one.removes.isdisjoint(needed):
                return True
        return False


class StripsStep(NamedTuple):
    """Unfinished task as a planning step.

    Attributes:
        id: the task.
        tool: the tool it uses.
        arguments: its arguments, resolved as far as they are known.
        action: its preconditions and effects.
        depends_on: the unfinished tasks that must be done before it.
        running: whether it is running; it is assumed to succeed.
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
        missing_goal_facts: the facts of the goal that do not hold at the end and that no remaining
            step would add.
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
        stuck = tuple(step for step in self.stuck if step.id not in steps)
        missing = tuple(fact for fact in self.missing_goal_facts if fact not in facts)
        return self._replace(stuck=stuck, missing_goal_facts=missing)

    def components(self) -> list[list[StripsStep]]:
        """Return the executable and stuck steps in independent groups."""
        steps = (*self.executable, *self.stuck)
        return connected_components(steps, frozenset(self.unmet_facts()))

    def tasks_related_to(self, facts: Collection[str]) -> tuple[TaskId, ...]:
        """Return the unstarted tasks in every group of steps that uses one of the facts."""
        changed = frozenset(facts)
        return self._unstarted_tasks(lambda step: not changed.isdisjoint(step.action.facts))

    def tasks_related_to_stuck(self) -> tuple[TaskId, ...]:
        """Return the unstarted tasks in every group of steps with a stuck one."""
        stuck = {step.id for step in self.stuck}
        return self._unstarted_tasks(lambda step: step.id in stuck)

    def _unstarted_tasks(self, concerns: Callable[[StripsStep], bool]) -> tuple[TaskId, ...]:
        tasks = []
        for group in self.components():
            if any(map(concerns, group)):
                tasks += [step.id for step in group if not step.running]
        return tuple(tasks)

    def unmet_facts(self) -> tuple[str, ...]:
        """Return the missing preconditions of stuck steps and the missing facts of the goal."""
        unmet = {}
        for step in self.stuck:
            # Sorted, because the order of a set differs from one process to the next.
            lacking = sorted(step.action.requires - self.final_facts)
            unmet.update(dict.fromkeys(lacking))
        unmet.update(dict.fromkeys(self.missing_goal_facts))
        return tuple(unmet)

    def explain(self) -> str:
        """Return the first problem in words; empty if the result is valid."""
        if self.stuck:
            step = self.stuck[0]
            needed = sorted(step.action.requires - self.final_facts)
            more = ""
            if len(self.stuck) > 1:
                more = f" (and {len(self.stuck) - 1} more)"
            facts = ", ".join(needed[:5])
            return f"task {step.id!r} needs {facts}, which would not hold{more}"
        if self.missing_goal_facts:
            facts = ", ".join(self.missing_goal_facts[:5])
            return f"the goal would lack {facts}"
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
        """Simulate the steps one after another.

        Each is executed as soon as its dependencies are done and its preconditions hold.

        Args:
            strict: treat steps that cannot be started now as stuck, instead of assuming that they
                will be fixed.
        """
        if strict:
            # If all steps can be started, the result is the same in both modes.
            strict = not all(step.startable or step.running for step in self.steps)
        if strict not in self._computed:
            self._computed[strict] = _simulate(self, strict=strict)
        return self._computed[strict]


def _simulate(problem: StripsProblem, *, strict: bool) -> Feasibility:
    """Execute steps in plan order as far as possible.

    `facts` hold now. A step is `ready` once its dependencies are done. Then it is `executed`, or
    `stuck` until a fact that it lacks is added, which makes it ready again: it may lack another.
    Each step is examined once for each fact that it waits for, so the order of the plan is kept
    without trying all steps again after each one.
    """
    steps = problem.steps
    facts = set(problem.facts)
    open_dependencies = [len(step.depends_on) for step in steps]
    dependents: dict[TaskId, list[int]] = {}
    ready = []  # sorted, hence a heap
    for index, step in enumerate(steps):
        if not step.depends_on:
            ready.append(index)
        for dep in step.depends_on:
            dependents.setdefault(dep, []).append(index)
    executed = {}
    stuck = {}
    waiting_for_fact: dict[str, list[int]] = {}

    while ready:
        index = heapq.heappop(ready)
        step = steps[index]
        lacking = next(iter(step.action.requires - facts), None)
        if lacking is not None:
            stuck[index] = step
            waiting_for_fact.setdefault(lacking, []).append(index)
            continue
        if strict and not step.startable and not step.running:
            # No fact would unblock it, so it waits for none.
            stuck[index] = step
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

    # A fact that a stuck step would add is not missing: that step is the problem.
    to_come: set[str] = set()
    for step in steps:
        if step.id not in executed:
            to_come |= step.action.adds
    reachable = facts | to_come
    missing = tuple(fact for fact in problem.goal if fact not in reachable)
    still_stuck = tuple(stuck[index] for index in sorted(stuck))
    return Feasibility(tuple(executed.values()), still_stuck, missing, frozenset(facts))


def ground_action(tool: ToolSpec, arguments: Mapping[str, JsonValue]) -> GroundAction:
    """Return the action of a tool with these arguments.

    Patterns with unknown arguments are left out.
    """
    values = {name: as_text(value) for name, value in arguments.items()}
    required = _instantiate(tool.precondition_patterns, values)
    added = _instantiate(tool.addition_patterns, values)
    removed = _instantiate(tool.removes, values)
    facts = [*required, *added, *removed]
    # The facts after the action may depend on a pattern that is left out.
    unresolved = len(facts) < len(tool.fact_patterns)
    in_order = tuple(dict.fromkeys(facts))
    return GroundAction(
        frozenset(required), frozenset(added), frozenset(removed), unresolved, in_order
    )


def _instantiate(patterns: Iterable[str], values: Mapping[str, str]) -> list[str]:
    facts = []
    for pattern in patterns:
        names = placeholders(pattern)
        if values.keys() >= set(names):
            fact = fill_placeholders(pattern, values)
            if names:
                # An argument may hold spaces that the fact would not have in a plan file.
                fact = normalise_fact(fact)
            facts.append(fact)
    return facts


def find_root(groups: list[int], index: int) -> int:
    """Return the root of an item's group in a union-find; `groups` has the parent of each item."""
    while groups[index] != index:
        parent = groups[groups[index]]
        # Halving the path keeps the next search short.
        groups[index] = parent
        index = parent
    return index


def join_groups(groups: list[int], one: int, other: int) -> None:
    """Join the groups of two items of a union-find under the root of `other`."""
    root = find_root(groups, other)
    groups[find_root(groups, one)] = root


def connected_components(
    steps: Sequence[StripsStep], lacking: Collection[str] = ()
) -> list[list[StripsStep]]:
    """Return steps in independent groups.

    Steps of one group are linked by dependencies, or by facts that a step changes or lacks. Facts
    that no step changes do not link steps, because most steps of a plan may read them.
    """
    groups = list(range(len(steps)))
    place = {step.id: index for index, step in enumerate(steps)}
    changed = set(lacking)
    for step in steps:
        changed |= step.action.adds
        changed |= step.action.removes
    first: dict[str, int] = {}
    for index, step in enumerate(steps):
        linked = [place[dep] for dep in step.depends_on if dep in place]
        linked += [first.setdefault(fact, index) for fact in step.action.facts if fact in changed]
        for other in linked:
            join_groups(groups, index, other)
    components: dict[int, list[StripsStep]] = {}
    for index, step in enumerate(steps):
        components.setdefault(find_root(groups, index), []).append(step)
    return list(components.values())


def regress_at(
    goal: Iterable[str], steps: Sequence[GroundAction], places: Collection[int] = (0,)
) -> dict[int, frozenset[str] | None]:
    """Return the facts that must hold before suffixes of the steps so that they reach a goal.

    The suffixes begin at `places`. The facts are None if a step removes one that is needed after
    it: the suffix cannot reach the goal, and neither can a longer one.
    """
    needed = set(goal)
    possible = True
    needed_at: dict[int, frozenset[str] | None] = {}
    for place in range(len(steps), -1, -1):
        if place < len(steps):
            step = steps[place]
            # A fact that the step both removes and adds holds after it.
            if not needed.isdisjoint(step.removes - step.adds):
                possible = False
            needed -= step.adds
            needed |= step.requires
        if place in places:
            needed_at[place] = None
            if possible:
                needed_at[place] = frozenset(needed)
    return needed_at
