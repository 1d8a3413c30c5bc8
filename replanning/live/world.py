"""What a plan needs and brings about: its steps on facts, whether they can still be carried out, and what must hold.

The semantics are those of STRIPS (Fikes and Nilsson 1971): a step can be taken where all it needs holds; it
removes facts, then adds facts; what is not known to hold does not hold. Everything here is computed, nothing is
changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final, NamedTuple

from replanning.errors import ExpressionError
from replanning.live.facts import RelevantSubgraph, relevant_subgraph
from replanning.live.staging import PlanOverlay
from replanning.live.states import FINISHED, SATISFIED, STUCK, TaskState
from replanning.plan.references import as_text, fill_placeholders, normalise_fact, placeholders, resolve_references
from replanning.plan.tasks import Task, ToolSpec
from replanning.plan.types import JsonObject, JsonValue, TaskId

if TYPE_CHECKING:
    from replanning.live.graph import TaskGraph
    from replanning.live.plan import LivePlan


NO_FACTS: Final[frozenset[str]] = frozenset()


class GroundAction(NamedTuple):
    """A use of a tool: what must hold before it, and what holds or does not hold any more after it.

    `unresolved` says that some of this depends on results that do not exist yet and is left out. `final_facts` has all these
    facts in the order in which the tool states them.
    """

    requires: frozenset[str] = NO_FACTS
    adds: frozenset[str] = NO_FACTS
    removes: frozenset[str] = NO_FACTS
    unresolved: bool = False
    facts: tuple[str, ...] = ()

    def apply(self, facts: frozenset[str]) -> frozenset[str]:
        """What holds after it."""
        return (facts - self.removes) | self.adds

    def interferes_with(self, other: GroundAction) -> bool:
        """Whether one of the two removes what the other needs or adds, so that they must not overlap."""
        return not (
            self.removes.isdisjoint(other.requires)
            and other.removes.isdisjoint(self.requires)
            and self.removes.isdisjoint(other.adds - self.adds)
            and other.removes.isdisjoint(self.adds - other.adds)
        )


class StripsStep(NamedTuple):
    """A task that is not finished, on facts.

    Attributes:
        id: the task.
        tool: the tool it uses.
        arguments: its arguments, resolved as far as they are known.
        action: what it needs, adds and removes.
        depends_on: the unfinished tasks that must be done before it.
        running: whether it runs; then it is taken to succeed.
        startable: whether it could be started: it has not failed, and its tool is available.
    """

    id: TaskId
    tool: str | None
    arguments: JsonObject
    action: GroundAction
    depends_on: tuple[TaskId, ...]
    running: bool
    startable: bool


class Feasibility(NamedTuple):
    """How far the rest of a plan can be carried out.

    Attributes:
        executable: the steps that can be taken, in the order in which they would be.
        stuck: the steps whose turn comes and that cannot be taken then.
        missing_goal_facts: the facts of the goal that do not hold at the end, and that no step left over would add.
        final_facts: what holds when nothing more can be done.
    """

    executable: tuple[StripsStep, ...]
    stuck: tuple[StripsStep, ...]
    missing_goal_facts: tuple[str, ...]
    final_facts: frozenset[str]

    @property
    def valid(self) -> bool:
        """Whether everything can be carried out and reaches the goal."""
        return not self.stuck and not self.missing_goal_facts

    def excluding(self, steps: Collection[TaskId], facts: Collection[str]) -> Feasibility:
        """The same, passing over what is wrong with some steps and facts of the goal."""
        return self._replace(
            stuck=tuple(step for step in self.stuck if step.id not in steps),
            missing_goal_facts=tuple(fact for fact in self.missing_goal_facts if fact not in facts),
        )

    def components(self) -> list[list[StripsStep]]:
        """The steps whose turn comes, in groups that have nothing to do with one another."""
        return connected_components((*self.executable, *self.stuck), frozenset(self.unmet_facts()))

    def unmet_facts(self) -> tuple[str, ...]:
        """The facts for want of which it is not valid."""
        needed = [fact for step in self.stuck for fact in sorted(step.action.requires - self.final_facts)]
        return tuple(dict.fromkeys([*needed, *self.missing_goal_facts]))

    def explain(self) -> str:
        """What is wrong, for people; empty when nothing is."""
        if self.stuck:
            step = self.stuck[0]
            needed = sorted(step.action.requires - self.final_facts)
            more = f" (and {len(self.stuck) - 1} more)" if len(self.stuck) > 1 else ""
            return f"task {step.id!r} needs {', '.join(needed[:5])}, which would not hold{more}"
        if self.missing_goal_facts:
            return f"the goal would lack {', '.join(self.missing_goal_facts[:5])}"
        return ""


class _StripsFields(NamedTuple):
    facts: tuple[str, ...]
    steps: tuple[StripsStep, ...]
    goal: tuple[str, ...]
    closed_world: bool


class StripsProblem(_StripsFields):
    """The facts that hold now, the steps that are left, in the order of the plan, and what must hold at the end.

    `closed_world` says that the plan states its facts: what is not among them does not hold.
    """

    def feasibility(self, *, strict: bool = False) -> Feasibility:
        """How far the steps can be carried out, each as soon as it can be; worked out once.

        Args:
            strict: whether steps that are not usable are stuck; otherwise they are taken to be seen to.
        """
        if strict and not all(step.startable or step.running for step in self.steps):
            return self._strict
        return self._lenient

    @cached_property
    def _lenient(self) -> Feasibility:
        return _ForwardSimulation(self, strict=False).run()

    @cached_property
    def _strict(self) -> Feasibility:
        return _ForwardSimulation(self, strict=True).run()

    def tasks_related_to(self, facts: Collection[str], standing: Feasibility) -> tuple[TaskId, ...]:
        """The tasks that change facts, with those that bear on the same as these."""
        wanted = frozenset(facts)
        groups = [group for group in standing.components() if any(not wanted.isdisjoint(s.action.facts) for s in group)]
        return tuple(step.id for group in groups for step in group if not step.running)

    def tasks_related_to_stuck(self, standing: Feasibility) -> tuple[TaskId, ...]:
        """The tasks that what is stuck concerns: those before it that bear on the same facts, and itself."""
        stuck = {step.id for step in standing.stuck}
        groups = standing.components()
        concerned = [group for group in groups if any(step.id in stuck for step in group)]
        return tuple(step.id for group in concerned for step in group if not step.running)


def strips_problem(
    live: LivePlan,
    staging: PlanOverlay | None = None,
    *,
    tasks: Collection[TaskId] = (),
    facts: Collection[str] = (),
) -> StripsProblem:
    """The world of a plan as it stands, kept until something happens to the plan; or as changes would leave it.

    Args:
        live: the plan.
        staging: the changes.
        tasks: with `final_facts`, about which the world is to be: of a plan that states its facts, what has nothing to do
            with them or the changes is left out, where that is most of it.
        facts: see `tasks`.
    """
    if staging is not None:
        return _build_problem(live, staging, relevant_subgraph(live, staging, tasks, facts))
    about = frozenset(tasks), frozenset(facts)
    if about not in live.strips_problems:
        over = PlanOverlay(live)
        part = relevant_subgraph(live, over, *about)
        live.strips_problems[about] = (
            strips_problem(live) if part is None and any(about) else _build_problem(live, over, part)
        )
    return live.strips_problems[about]


def _build_problem(live: LivePlan, over: PlanOverlay, part: RelevantSubgraph | None) -> StripsProblem:
    entries = [*(entry.id for entry in live), *over.new_tasks] if part is None else [i for i in part.tasks if i in over]
    states = {i: state for i in entries if (state := over.state(i)) not in FINISHED and over.exists(i)}
    left = sorted(states, key=lambda i: (states[i] is not TaskState.RUNNING, *over.position(i)))
    steps = tuple([_build_step(task_id, states[task_id], live, over) for task_id in left])
    goal = live.goal.facts if part is None else tuple(fact for fact in live.goal.facts if fact in part.facts)
    return StripsProblem(tuple(live.facts), steps, goal, live.plan.facts is not None)


def _build_step(task_id: TaskId, state: TaskState, live: LivePlan, over: PlanOverlay) -> StripsStep:
    task = over.task(task_id)
    tool = live.tools.get(task.tool) if task.tool else None
    use, arguments = ground_task(task, tool, live)
    if state is TaskState.RUNNING:
        use = use._replace(requires=NO_FACTS)
    after = [dep for dep in over.follow_replacements(task.depends_on) if over.state(dep) not in SATISFIED]
    usable = state not in STUCK and (tool is None or tool.available)
    return StripsStep(task_id, task.tool, arguments, use, tuple(after), state is TaskState.RUNNING, usable)


def uses_facts(tool: ToolSpec) -> bool:
    """Whether a tool needs facts, or changes some."""
    return bool(tool.requires or tool.adds or tool.removes or tool.needs or tool.produces)


def ground_task(task: Task, tool: ToolSpec | None, live: TaskGraph) -> tuple[GroundAction, JsonObject]:
    """What a task needs and brings about, and its arguments as far as they are known."""
    kept = live.dependency_index.action_cache.get(task.id)
    if kept is not None and kept[0] is task and tool is not None and kept[1].name == tool.name:
        return kept[2], task.arguments
    if tool is None or not uses_facts(tool):
        return _NO_ACTION, task.arguments
    arguments, unknown = _resolve_known(task.arguments, live)
    use = ground_action(tool, arguments)
    if not unknown and arguments == task.arguments:
        live.dependency_index.action_cache[task.id] = (task, tool, use)
    return use, arguments


def _resolve_known(arguments: JsonObject, live: TaskGraph) -> tuple[JsonObject, bool]:
    """The arguments with their references resolved, without those that refer to what does not exist yet."""
    known: JsonObject = {}
    stored = partial(live.results.output_of, stored_only=True)  # the others are no JSON, of which no fact could speak
    for name, value in arguments.items():
        try:
            known[name] = resolve_references({name: value}, context=live.context, result_of=stored)[name]
        except ExpressionError:
            continue
    return known, len(known) < len(arguments)


def ground_action(tool: ToolSpec, arguments: Mapping[str, JsonValue]) -> GroundAction:
    """A use of a tool with these arguments; patterns that name others are left out."""
    values = {name: as_text(value) for name, value in arguments.items()}
    needs, first = _instantiate((*tool.requires, *map(artifact_fact, tool.needs)), values)
    adds, second = _instantiate((*tool.adds, *map(artifact_fact, tool.produces)), values)
    removes, third = _instantiate(tool.removes, values)
    stated = tuple(dict.fromkeys([*needs, *adds, *removes]))
    return GroundAction(frozenset(needs), frozenset(adds), frozenset(removes), first or second or third, stated)


def artifact_fact(name: str) -> str:
    """The fact, or pattern of facts, that `requires` and `produces` are short for."""
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
                normalise_fact(fill_placeholders(pattern, values)) if names else fill_placeholders(pattern, values)
            )
    return facts, left_out


def connected_components(steps: Sequence[StripsStep], lacking: Collection[str] = ()) -> list[list[StripsStep]]:
    """Steps in groups that have nothing to do with one another: no dependency, and no fact that one changes or lacks."""
    group = list(range(len(steps)))

    def find(index: int) -> int:
        while group[index] != index:
            group[index] = index = group[group[index]]
        return index

    place = {step.id: index for index, step in enumerate(steps)}
    changed = {fact for step in steps for fact in (*step.action.adds, *step.action.removes)}.union(lacking)
    first: dict[str, int] = {}
    for index, step in enumerate(steps):
        linked = [place[dep] for dep in step.depends_on if dep in place]
        linked += [first.setdefault(fact, index) for fact in step.action.facts if fact in changed]
        for other in linked:
            group[find(index)] = find(other)
    found: dict[int, list[StripsStep]] = {}
    for index, step in enumerate(steps):
        found.setdefault(find(index), []).append(step)
    return list(found.values())


def regress(goal: Iterable[str], steps: Sequence[GroundAction]) -> Iterator[frozenset[str] | None]:
    """What must hold before each suffix of steps so that it can be taken and reaches the goal, the shortest first.

    None where it cannot: a step removes what is needed after it. Longer suffixes cannot then either.
    """
    return iter(regress_at(goal, steps, range(len(steps) + 1)).values())


def regress_at(
    goal: Iterable[str], steps: Sequence[GroundAction], places: Collection[int] = (0,)
) -> dict[int, frozenset[str] | None]:
    """The same for the suffixes that begin at some places alone, by place: all of a long plan take much memory."""
    needed = set(goal)
    possible = True
    found: dict[int, frozenset[str] | None] = {}
    for place in range(len(steps), -1, -1):
        if place < len(steps):
            use = steps[place]
            possible = possible and not any(fact in needed and fact not in use.adds for fact in use.removes)
            needed -= use.adds
            needed |= use.requires
        if place in places:
            found[place] = frozenset(needed) if possible else None
    return found


class _ForwardSimulation:
    """Takes steps one after another, each as soon as its turn has come and what it needs holds."""

    def __init__(self, world: StripsProblem, strict: bool) -> None:
        self._world = world
        self._strict = strict
        self._facts = set(world.facts)
        self._ready: list[int] = []
        self._waiting_for_fact: dict[str, list[int]] = {}
        self._stuck: dict[int, StripsStep] = {}
        self._open_dependencies = [len(step.depends_on) for step in world.steps]
        self._dependents: dict[TaskId, list[int]] = {}
        for index, step in enumerate(world.steps):
            for dep in step.depends_on:
                self._dependents.setdefault(dep, []).append(index)
            if not step.depends_on:
                heapq.heappush(self._ready, index)

    def run(self) -> Feasibility:
        """Take all steps that can be taken."""
        steps, order = self._world.steps, []
        while self._ready:
            index = heapq.heappop(self._ready)
            step = steps[index]
            lacking = next(iter(step.action.requires - self._facts), None)
            if lacking is not None or (self._strict and not step.startable and not step.running):
                self._stuck[index] = step
                if lacking is not None:
                    self._waiting_for_fact.setdefault(lacking, []).append(index)
                continue
            order.append(step)
            self._execute(step)
        return self._feasibility(order)

    def _execute(self, step: StripsStep) -> None:
        self._facts -= step.action.removes
        self._facts |= step.action.adds
        for fact in step.action.adds:
            for index in self._waiting_for_fact.pop(fact, ()):
                del self._stuck[index]
                heapq.heappush(self._ready, index)
        for index in self._dependents.get(step.id, ()):
            self._open_dependencies[index] -= 1
            if not self._open_dependencies[index]:
                heapq.heappush(self._ready, index)

    def _feasibility(self, order: Sequence[StripsStep]) -> Feasibility:
        taken = {step.id for step in order}
        left: Collection[StripsStep] = [step for step in self._world.steps if step.id not in taken]
        to_come = {fact for step in left for fact in step.action.adds}
        lost = [fact for fact in self._world.goal if fact not in self._facts and fact not in to_come]
        stuck = tuple(self._stuck[index] for index in sorted(self._stuck))
        return Feasibility(tuple(order), stuck, tuple(lost), frozenset(self._facts))


_NO_ACTION: Final = GroundAction()
