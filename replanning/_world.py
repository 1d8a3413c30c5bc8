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

from replanning._bearing import Part, part_of
from replanning._errors import ExpressionError
from replanning._ids import TaskId
from replanning._patterns import as_text, fill, holes, normalise_fact
from replanning._plan import JsonObject, JsonValue, Task, ToolSpec
from replanning._references import resolve
from replanning._staging import Staging
from replanning._states import FINISHED, SATISFIED, STUCK, TaskState

if TYPE_CHECKING:
    from replanning._live import LivePlan
    from replanning._taskgraph import TaskGraph

NONE: Final[frozenset[str]] = frozenset()


class Use(NamedTuple):
    """A use of a tool: what must hold before it, and what holds or does not hold any more after it.

    `open` says that some of this depends on results that do not exist yet and is left out. `stated` has all these
    facts in the order in which the tool states them.
    """

    needs: frozenset[str] = NONE
    adds: frozenset[str] = NONE
    removes: frozenset[str] = NONE
    open: bool = False
    stated: tuple[str, ...] = ()

    def follows(self, facts: frozenset[str]) -> frozenset[str]:
        """What holds after it."""
        return (facts - self.removes) | self.adds

    def disturbs(self, other: Use) -> bool:
        """Whether one of the two removes what the other needs or adds, so that they must not overlap."""
        return not (
            self.removes.isdisjoint(other.needs)
            and other.removes.isdisjoint(self.needs)
            and self.removes.isdisjoint(other.adds - self.adds)
            and other.removes.isdisjoint(self.adds - other.adds)
        )


class Step(NamedTuple):
    """A task that is not finished, on facts.

    Attributes:
        id: the task.
        tool: the tool it uses.
        arguments: its arguments, resolved as far as they are known.
        use: what it needs, adds and removes.
        after: the unfinished tasks that must be done before it.
        running: whether it runs; then it is taken to succeed.
        usable: whether it could be started: it has not failed, and its tool is available.
    """

    id: TaskId
    tool: str | None
    arguments: JsonObject
    use: Use
    after: tuple[TaskId, ...]
    running: bool
    usable: bool


class Standing(NamedTuple):
    """How far the rest of a plan can be carried out.

    Attributes:
        order: the steps that can be taken, in the order in which they would be.
        stuck: the steps whose turn comes and that cannot be taken then.
        missing: the facts of the goal that do not hold at the end, and that no step left over would add.
        facts: what holds when nothing more can be done.
    """

    order: tuple[Step, ...]
    stuck: tuple[Step, ...]
    missing: tuple[str, ...]
    facts: frozenset[str]

    @property
    def valid(self) -> bool:
        """Whether everything can be carried out and reaches the goal."""
        return not self.stuck and not self.missing

    def without(self, steps: Collection[TaskId], facts: Collection[str]) -> Standing:
        """The same, passing over what is wrong with some steps and facts of the goal."""
        return self._replace(
            stuck=tuple(step for step in self.stuck if step.id not in steps),
            missing=tuple(fact for fact in self.missing if fact not in facts),
        )

    def groups(self) -> list[list[Step]]:
        """The steps whose turn comes, in groups that have nothing to do with one another."""
        return related((*self.order, *self.stuck), frozenset(self.lacking()))

    def lacking(self) -> tuple[str, ...]:
        """The facts for want of which it is not valid."""
        needed = [fact for step in self.stuck for fact in sorted(step.use.needs - self.facts)]
        return tuple(dict.fromkeys([*needed, *self.missing]))

    def why(self) -> str:
        """What is wrong, for people; empty when nothing is."""
        if self.stuck:
            step = self.stuck[0]
            needed = sorted(step.use.needs - self.facts)
            more = f" (and {len(self.stuck) - 1} more)" if len(self.stuck) > 1 else ""
            return f"task {step.id!r} needs {', '.join(needed[:5])}, which would not hold{more}"
        if self.missing:
            return f"the goal would lack {', '.join(self.missing[:5])}"
        return ""


class _Stated(NamedTuple):
    facts: tuple[str, ...]
    steps: tuple[Step, ...]
    goal: tuple[str, ...]
    closed: bool


class World(_Stated):
    """The facts that hold now, the steps that are left, in the order of the plan, and what must hold at the end.

    `closed` says that the plan states its facts: what is not among them does not hold.
    """

    def standing(self, *, strict: bool = False) -> Standing:
        """How far the steps can be carried out, each as soon as it can be; worked out once.

        Args:
            strict: whether steps that are not usable are stuck; otherwise they are taken to be seen to.
        """
        if strict and not all(step.usable or step.running for step in self.steps):
            return self._strict
        return self._lenient

    @cached_property
    def _lenient(self) -> Standing:
        return _Walk(self, strict=False).go()

    @cached_property
    def _strict(self) -> Standing:
        return _Walk(self, strict=True).go()

    def bearing_on(self, facts: Collection[str], standing: Standing) -> tuple[TaskId, ...]:
        """The tasks that change facts, with those that bear on the same as these."""
        wanted = frozenset(facts)
        groups = [group for group in standing.groups() if any(not wanted.isdisjoint(s.use.stated) for s in group)]
        return tuple(step.id for group in groups for step in group if not step.running)

    def named(self, standing: Standing) -> tuple[TaskId, ...]:
        """The tasks that what is stuck concerns: those before it that bear on the same facts, and itself."""
        stuck = {step.id for step in standing.stuck}
        groups = standing.groups()
        concerned = [group for group in groups if any(step.id in stuck for step in group)]
        return tuple(step.id for group in concerned for step in group if not step.running)


def world_of(
    live: LivePlan,
    staging: Staging | None = None,
    *,
    tasks: Collection[TaskId] = (),
    facts: Collection[str] = (),
) -> World:
    """The world of a plan as it stands, kept until something happens to the plan; or as changes would leave it.

    Args:
        live: the plan.
        staging: the changes.
        tasks: with `facts`, about which the world is to be: of a plan that states its facts, what has nothing to do
            with them or the changes is left out, where that is most of it.
        facts: see `tasks`.
    """
    if staging is not None:
        return _world(live, staging, part_of(live, staging, tasks, facts))
    about = frozenset(tasks), frozenset(facts)
    if about not in live.worlds:
        over = Staging(live)
        part = part_of(live, over, *about)
        live.worlds[about] = world_of(live) if part is None and any(about) else _world(live, over, part)
    return live.worlds[about]


def _world(live: LivePlan, over: Staging, part: Part | None) -> World:
    entries = [*(entry.id for entry in live), *over.births] if part is None else [i for i in part.tasks if i in over]
    states = {i: state for i in entries if (state := over.state(i)) not in FINISHED and over.exists(i)}
    left = sorted(states, key=lambda i: (states[i] is not TaskState.RUNNING, *over.position(i)))
    steps = tuple([_step(task_id, states[task_id], live, over) for task_id in left])
    goal = live.goal.facts if part is None else tuple(fact for fact in live.goal.facts if fact in part.facts)
    return World(tuple(live.facts), steps, goal, live.plan.facts is not None)


def _step(task_id: TaskId, state: TaskState, live: LivePlan, over: Staging) -> Step:
    task = over.task(task_id)
    tool = live.tools.get(task.tool) if task.tool else None
    use, arguments = use_of(task, tool, live)
    if state is TaskState.RUNNING:
        use = use._replace(needs=NONE)
    after = [dep for dep in over.standing(task.depends_on) if over.state(dep) not in SATISFIED]
    usable = state not in STUCK and (tool is None or tool.available)
    return Step(task_id, task.tool, arguments, use, tuple(after), state is TaskState.RUNNING, usable)


def speaks_of_facts(tool: ToolSpec) -> bool:
    """Whether a tool needs facts, or changes some."""
    return bool(tool.requires or tool.adds or tool.removes or tool.needs or tool.produces)


def use_of(task: Task, tool: ToolSpec | None, live: TaskGraph) -> tuple[Use, JsonObject]:
    """What a task needs and brings about, and its arguments as far as they are known."""
    kept = live.usage.known.get(task.id)
    if kept is not None and kept[0] is task and tool is not None and kept[1].name == tool.name:
        return kept[2], task.arguments
    if tool is None or not speaks_of_facts(tool):
        return _NO_USE, task.arguments
    arguments, unknown = _resolved(task.arguments, live)
    use = ground(tool, arguments)
    if not unknown and arguments == task.arguments:
        live.usage.known[task.id] = (task, tool, use)
    return use, arguments


def _resolved(arguments: JsonObject, live: TaskGraph) -> tuple[JsonObject, bool]:
    """The arguments with their references resolved, without those that refer to what does not exist yet."""
    known: JsonObject = {}
    stored = partial(live.results.of, stored=True)  # the others are no JSON, of which no fact could speak
    for name, value in arguments.items():
        try:
            known[name] = resolve({name: value}, context=live.context, result=stored)[name]
        except ExpressionError:
            continue
    return known, len(known) < len(arguments)


def ground(tool: ToolSpec, arguments: Mapping[str, JsonValue]) -> Use:
    """A use of a tool with these arguments; patterns that name others are left out."""
    values = {name: as_text(value) for name, value in arguments.items()}
    needs, first = _filled((*tool.requires, *map(artifact, tool.needs)), values)
    adds, second = _filled((*tool.adds, *map(artifact, tool.produces)), values)
    removes, third = _filled(tool.removes, values)
    stated = tuple(dict.fromkeys([*needs, *adds, *removes]))
    return Use(frozenset(needs), frozenset(adds), frozenset(removes), first or second or third, stated)


def artifact(name: str) -> str:
    """The fact, or pattern of facts, that `needs` and `produces` are short for."""
    return f"artifact({name})"


def _filled(patterns: Iterable[str], values: Mapping[str, str]) -> tuple[list[str], bool]:
    facts: list[str] = []
    left_out = False
    for pattern in patterns:
        names = holes(pattern)
        if not values.keys() >= set(names):
            left_out = True
        else:
            facts.append(normalise_fact(fill(pattern, values)) if names else fill(pattern, values))
    return facts, left_out


def related(steps: Sequence[Step], lacking: Collection[str] = ()) -> list[list[Step]]:
    """Steps in groups that have nothing to do with one another: no dependency, and no fact that one changes or lacks."""
    group = list(range(len(steps)))

    def find(index: int) -> int:
        while group[index] != index:
            group[index] = index = group[group[index]]
        return index

    place = {step.id: index for index, step in enumerate(steps)}
    changed = {fact for step in steps for fact in (*step.use.adds, *step.use.removes)}.union(lacking)
    first: dict[str, int] = {}
    for index, step in enumerate(steps):
        linked = [place[dep] for dep in step.after if dep in place]
        linked += [first.setdefault(fact, index) for fact in step.use.stated if fact in changed]
        for other in linked:
            group[find(index)] = find(other)
    found: dict[int, list[Step]] = {}
    for index, step in enumerate(steps):
        found.setdefault(find(index), []).append(step)
    return list(found.values())


def regress(goal: Iterable[str], steps: Sequence[Use]) -> Iterator[frozenset[str] | None]:
    """What must hold before each suffix of steps so that it can be taken and reaches the goal, the shortest first.

    None where it cannot: a step removes what is needed after it. Longer suffixes cannot then either.
    """
    return iter(needed_before(goal, steps, range(len(steps) + 1)).values())


def needed_before(
    goal: Iterable[str], steps: Sequence[Use], places: Collection[int] = (0,)
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
            needed |= use.needs
        if place in places:
            found[place] = frozenset(needed) if possible else None
    return found


class _Walk:
    """Takes steps one after another, each as soon as its turn has come and what it needs holds."""

    def __init__(self, world: World, strict: bool) -> None:
        self._world = world
        self._strict = strict
        self._facts = set(world.facts)
        self._turn: list[int] = []
        self._watched: dict[str, list[int]] = {}
        self._waiting: dict[int, Step] = {}
        self._missing = [len(step.after) for step in world.steps]
        self._dependents: dict[TaskId, list[int]] = {}
        for index, step in enumerate(world.steps):
            for dep in step.after:
                self._dependents.setdefault(dep, []).append(index)
            if not step.after:
                heapq.heappush(self._turn, index)

    def go(self) -> Standing:
        """Take all steps that can be taken."""
        steps, order = self._world.steps, []
        while self._turn:
            index = heapq.heappop(self._turn)
            step = steps[index]
            lacking = next(iter(step.use.needs - self._facts), None)
            if lacking is not None or (self._strict and not step.usable and not step.running):
                self._waiting[index] = step
                if lacking is not None:
                    self._watched.setdefault(lacking, []).append(index)
                continue
            order.append(step)
            self._take(step)
        return self._standing(order)

    def _take(self, step: Step) -> None:
        self._facts -= step.use.removes
        self._facts |= step.use.adds
        for fact in step.use.adds:
            for index in self._watched.pop(fact, ()):
                del self._waiting[index]
                heapq.heappush(self._turn, index)
        for index in self._dependents.get(step.id, ()):
            self._missing[index] -= 1
            if not self._missing[index]:
                heapq.heappush(self._turn, index)

    def _standing(self, order: Sequence[Step]) -> Standing:
        taken = {step.id for step in order}
        left: Collection[Step] = [step for step in self._world.steps if step.id not in taken]
        to_come = {fact for step in left for fact in step.use.adds}
        lost = [fact for fact in self._world.goal if fact not in self._facts and fact not in to_come]
        stuck = tuple(self._waiting[index] for index in sorted(self._waiting))
        return Standing(tuple(order), stuck, tuple(lost), frozenset(self._facts))


_NO_USE: Final = Use()
