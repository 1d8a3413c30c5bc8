"""Plan repair over facts: a bridge from what holds now to the longest useful rest of the plan, else to the goal.

The steps that the trouble concerns stand in the order in which they would be taken. Each of their suffixes needs
certain facts (regression); the search looks for the way to any of them with the fewest actions added and removed,
the distance between plans of Fox, Gerevini, Long and Serina (2006). Steps that have nothing to do with it stay as
they are, and parallel.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from functools import partial
from operator import is_
from typing import Final, NamedTuple

import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread

from replanning import Alternative, PlanView, ReplanRequest, ToolSpec
from replanning.events import ContextChanged, Trigger
from replanning.facts import Standing, Step, World, as_text
from replanning.interfaces import DraftView, TaskState
from replanning.providers._domain import Given, domain_of, given_for
from replanning.providers._solve import AT_ONCE, Problem, Rest, Solution, Way, solve
from replanning.providers._splice import Seen, merged, splice

CHECKED: Final = 0.95
"""How sure a repair is that was checked against the facts."""

LARGE: Final = 1_000
"""A plan that began with more tasks than that is looked at in several turns of the event loop."""

_SHOWN: Final = 5


class Completed(NamedTuple):
    """A proposal that was completed, and whether all that it brings in is kept."""

    alternative: Alternative
    whole: bool


class _Scene(NamedTuple):
    """The plan of which problems are made: itself, on facts, how far it goes, and what its tasks give."""

    view: Seen
    world: World
    standing: Standing
    given: Given


async def bridged(request: ReplanRequest, *, threads: bool = True) -> list[Alternative]:
    """Repairs over facts, the one that changes least first; without any, the verdict.

    Long searches go to a thread, unless `threads` is false.
    """
    posed = [problem async for problem in problems(request, whole=False)]
    solved = await _solved(posed, threads=threads)
    if any(map(_reaches_out, posed, solved)):
        posed = [problem async for problem in problems(request)]
        solved = await _solved(posed, threads=threads)
    found: list[Alternative] = []
    async for alternative in _alternatives(posed, solved, request.view):
        found.append(alternative)
        # One that leaves out much of a large plan takes long to be put together. Whom a clock wakes in the first of two
        # turns runs in the second.
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
    return found


async def completed(request: ReplanRequest, proposed: Alternative, *, threads: bool = True) -> Completed | None:
    """What another proposes, with a bridge where it cannot be carried out.

    None where there is none, or more of it would be new than is left of what is proposed.
    """
    draft = request.view.with_changes(proposed.changes)
    posed = [problem async for problem in _flaws(request, draft)]
    solved = await _solved(posed, threads=threads)
    if not posed or not all(solution.ways for solution in solved):
        return None
    ways = [solution.ways[0] for solution in solved]
    gone = {step.id for way in ways for step in way.gone}
    kept = [task_id for task_id in draft.new if task_id not in gone]
    taken: set[str] = set()
    more = [change for way in ways for change in splice(way, draft, taken)]
    if len(kept) < sum(len(way.actions) for way in ways) or not kept or not more or draft.check(more):
        return None
    told = "; ".join(map(_told, ways))
    changes = tuple(merged(proposed.changes, more, request.view))
    reason = f"{proposed.reason}; completed by a {told}"
    return Completed(Alternative(changes=changes, reason=reason, confidence=CHECKED), len(kept) == len(draft.new))


async def _turn(view: Seen) -> None:
    """Let others on the event loop have a turn between what takes long in a large plan, which may be changed by them."""
    if len(view.original.tasks) > LARGE:
        await anyio.lowlevel.checkpoint()


async def _solved(posed: Sequence[Problem], *, threads: bool) -> list[Solution]:
    solved: list[Solution] = []
    for problem in posed:
        solution = solve(problem, AT_ONCE)
        if not solution.ways and solution.verdict is None:
            patient = partial(solve, problem, look=anyio.from_thread.check_cancelled)
            solution = await anyio.to_thread.run_sync(patient) if threads else solve(problem)
        solved.append(solution)
    return solved


async def problems(request: ReplanRequest, *, whole: bool = True) -> AsyncIterator[Problem]:
    """What there is to solve: one problem for each part of the plan that is stuck and has to do with a trigger.

    Unless the `whole` plan is to be looked at, what has nothing to do with the triggers may be left out.
    """
    if any(trigger.kind == "better-path-found" for trigger in request.triggers):
        return
    view = request.view
    if not any(tool.adds or tool.produces for tool in view.tools.values()):
        return
    tasks = {task_id for trigger in request.triggers for task_id in trigger.tasks}
    facts = {fact for t in request.triggers if isinstance(t, ContextChanged) for fact in t.facts}
    whole = whole or _about_all(request) or any(map(_for_goal, request.triggers))
    world = _assuming(view.world() if whole else view.world(tasks=tasks, facts=facts))
    await _turn(view)
    standing = world.standing(strict=True)
    await _turn(view)
    groups = _groups(request, standing)
    if not (groups or whole) and standing.missing:
        async for problem in problems(request):  # what the rest of the plan brings about may be of use
            yield problem
        return
    if groups or (standing.missing and (not standing.stuck or any(map(_for_goal, request.triggers)))):
        async for problem in _all_posed(view, world, standing, groups):
            yield problem


async def _flaws(request: ReplanRequest, draft: DraftView) -> AsyncIterator[Problem]:
    """The same for a plan with changes: all that is wrong with it and was not wrong elsewhere before."""
    named = {task_id for trigger in request.triggers for task_id in trigger.tasks}
    before = _assuming(request.view.world()).standing(strict=True)
    await _turn(draft)
    elsewhere = {step.id for step in before.stuck} - named
    world = _assuming(draft.world())
    await _turn(draft)
    standing = world.standing(strict=True)
    await _turn(draft)
    wanted = {step.id for step in standing.stuck} - elsewhere
    groups = [group for group in standing.groups() if any(step.id in wanted for step in group)]
    if groups or standing.missing:
        async for problem in _all_posed(draft, world, standing, groups):
            yield problem


async def _all_posed(
    view: Seen, world: World, standing: Standing, groups: Sequence[Sequence[Step]]
) -> AsyncIterator[Problem]:
    """A problem for each group; where none is stuck, the one of reaching the goal."""
    await _turn(view)
    scene = _Scene(view, world, standing, given_for(view, closed=world.closed))
    if not groups:
        yield await _posed(scene, [], list(standing.order))
    for group in groups:
        own = {step.id for step in group}
        stuck = [step for step in standing.stuck if step.id in own]
        if all(_removable(step) or step.usable for step in stuck):
            yield await _posed(scene, stuck, group)


def _assuming(world: World) -> World:
    """The world in which, where the plan does not state its facts, what steps need and none brings about holds."""
    if world.closed:
        return world
    made = {fact for step in world.steps for fact in step.use.adds}
    assumed = (fact for step in world.steps for fact in step.use.stated if fact in step.use.needs - made)
    return world._replace(facts=tuple(dict.fromkeys([*world.facts, *assumed])))


def _reaches_out(problem: Problem, solution: Solution) -> bool:
    """Whether a way takes away what steps could need that are not among those of the problem."""
    rest = problem.rests[-1]
    changed = {fact for step in (*rest.before, *rest.after) for fact in (*step.use.adds, *step.use.removes)}
    return any(not changed.issuperset(action.removes) for way in solution.ways for action in way.actions)


def _about_all(request: ReplanRequest) -> bool:
    """Whether a trigger is about the plan as a whole."""
    return any(
        trigger.kind == "goal-unreachable" or not (trigger.tasks or _for_goal(trigger)) for trigger in request.triggers
    )


def _for_goal(trigger: Trigger) -> bool:
    return isinstance(trigger, ContextChanged) and trigger.goal


def _groups(request: ReplanRequest, standing: Standing) -> list[list[Step]]:
    """The parts of the plan in which something is stuck for which a way on is asked."""
    view = request.view
    named = {task_id for trigger in request.triggers for task_id in trigger.tasks}
    asked = any(trigger.kind == "human-request" for trigger in request.triggers)
    whole = _about_all(request)
    wanted = set()
    for step in standing.stuck:
        task = view.task(step.id)
        waits = whole and task.held  # a person was asked about it
        if (whole or step.id in named) and not waits and (asked or task.state is not TaskState.BLOCKED):
            wanted.add(step.id)
    groups = standing.groups()
    return [group for group in groups if any(step.id in wanted for step in group)]


async def _posed(scene: _Scene, stuck: Sequence[Step], group: Sequence[Step]) -> Problem:
    view, world, standing, given = scene
    await _turn(view)
    running = tuple(step for step in standing.order if step.running)
    own = {step.id for step in group}
    ours = tuple(step for step in standing.order if step.id in own and not step.running)
    others = tuple(step for step in standing.order if step.id not in own and not step.running)
    first = {step.id for step in (*running, *ours, *stuck, *others)}
    left = tuple(_in_order(step for step in world.steps if step.id not in first))
    following = _concerned((*ours, *stuck), left)
    elsewhere = [step for step in standing.stuck if step.id not in own]
    seen_to = [f for step in elsewhere for f in step.use.stated if f in step.use.needs - standing.facts]
    everything = (*running, *ours, *stuck, *others, *left)
    await _turn(view)
    domain = domain_of(view, world, (*stuck, *ours, *following), given)
    await _turn(view)
    after = (*stuck, *others, *left)
    late = _rest((*running, *ours), (), after, stuck, following)
    early = _rest(running, ours, after, stuck, following)
    rests = (late, early) if ours else (early,)
    return Problem(
        facts=tuple(dict.fromkeys([*world.facts, *seen_to])),
        goal=_goal(world, everything, stated=bool(view.goal.facts)),
        domain=domain,
        rests=rests,
        costs={step.id: _cost(view.tool(step.tool)) for step in everything},
        stuck=tuple(stuck),
    )


def _rest(
    before: Sequence[Step],
    ours: Sequence[Step],
    after: Sequence[Step],
    stuck: Sequence[Step],
    following: Sequence[Step],
) -> Rest:
    loose = tuple(step for step in (*ours, *stuck, *following) if _removable(step))
    lacking = {step.id for step in stuck}
    unusable = [index for index, step in enumerate(loose) if not step.usable and step.id in lacking]
    return Rest(tuple(before), (*ours, *after), loose, unusable[-1] + 1 if unusable else 0)


def _removable(step: Step) -> bool:
    """Whether all that a step is for is known, so that it can go where something else brings that about."""
    return bool(step.use.adds) and not step.use.open and not step.running


def _in_order(steps: Iterable[Step]) -> Iterator[Step]:
    """Steps, each after those of them that it waits for, otherwise as they are."""
    left = list(steps)
    place = {step.id: index for index, step in enumerate(left)}
    missing = [sum(dep in place for dep in step.after) for step in left]
    dependents: dict[str, list[int]] = {}
    for index, step in enumerate(left):
        for dep in step.after:
            dependents.setdefault(dep, []).append(index)
    turn = [index for index, count in enumerate(missing) if not count]
    while turn:
        index = heapq.heappop(turn)
        yield left[index]
        for after in dependents.get(left[index].id, ()):
            missing[after] -= 1
            if not missing[after]:
                heapq.heappush(turn, after)


def _concerned(first: Iterable[Step], following: Iterable[Step]) -> list[Step]:
    """The steps that come after others and wait for them, or need or change what they change."""
    behind: set[str] = set()
    changed: set[str] = set()
    touched: set[str] = set()
    found: list[Step] = []
    for step in first:
        behind.add(step.id)
        changed |= step.use.adds | step.use.removes
        touched |= step.use.needs | step.use.adds | step.use.removes
    for step in following:
        changes = step.use.adds | step.use.removes
        bears = not (changed.isdisjoint(step.use.needs) and touched.isdisjoint(changes))
        if bears or not behind.isdisjoint(step.after):
            behind.add(step.id)
            changed |= changes
            touched |= step.use.needs | changes
            found.append(step)
    return found


def _goal(world: World, steps: Sequence[Step], *, stated: bool) -> tuple[str, ...]:
    """What must hold at the end: what the plan says, or all that it would bring about, and never less.

    Where the plan does not state its facts, what one step adds only for another that needs it is left out.
    """
    if world.closed and stated:
        return world.goal
    adds = {step.id: step.use.adds for step in steps}
    for_itself = {
        dep for step in steps for dep in step.after if adds.get(dep, step.use.needs).isdisjoint(step.use.needs)
    }
    for_others = {dep for step in steps for dep in step.after} - for_itself
    holds: dict[str, None] = {}
    for step in steps:
        for fact in step.use.removes:
            holds.pop(fact, None)
        if world.closed or step.id not in for_others:
            holds.update((fact, None) for fact in step.use.stated if fact in step.use.adds)
    return tuple(dict.fromkeys([*world.goal, *holds]))


def _cost(tool: ToolSpec | None) -> float:
    return tool.cost or 0.0 if tool is not None else 0.0


async def _alternatives(
    posed: Sequence[Problem], solved: Sequence[Solution], view: PlanView
) -> AsyncIterator[Alternative]:
    """Alternatives for all parts together: the nearest ways, the cheapest, those from scratch; then the verdict."""
    seen: set[str] = set()
    ways = [solution.ways for solution in solved if solution.ways]
    tried: list[list[Way]] = []
    for kind in ("repair", "cheaper", "scratch") if ways else ():
        chosen = [next((way for way in found if way.kind == kind), found[0]) for found in ways]
        if any(all(map(is_, chosen, others)) for others in tried):
            continue
        tried.append(chosen)
        alternative = _alternative(chosen, view)
        await _turn(view)
        if not alternative.changes or view.check(alternative.changes):
            continue
        if alternative.fingerprint() not in seen:
            seen.add(alternative.fingerprint())
            yield alternative
    for problem, solution in zip(posed, solved, strict=True):
        if solution.verdict is not None:
            yield Alternative(changes=(), reason=_helpless(problem), unreachable=solution.verdict)


def _alternative(ways: Sequence[Way], view: PlanView) -> Alternative:
    """The ways as one alternative."""
    taken: set[str] = set()
    changes = tuple(change for way in ways for change in splice(way, view, taken))
    costs = [action.cost for way in ways for action in way.actions]
    return Alternative(
        changes=changes,
        reason="; ".join(map(_told, ways)),
        confidence=CHECKED,
        expected_cost=sum(costs) if any(costs) else None,
    )


def _told(way: Way) -> str:
    """A way in words."""
    kind = {"repair": "repair with the fewest changes", "cheaper": "repair at the least cost", "scratch": "plan anew"}
    new = ", ".join(" ".join([a.tool, *(as_text(v) for v in a.arguments.values())]) for a in way.actions[:_SHOWN])
    more = f" and {len(way.actions) - _SHOWN} more" if len(way.actions) > _SHOWN else ""
    gone = ", ".join(repr(step.id) for step in way.gone[:_SHOWN]) + (", …" if len(way.gone) > _SHOWN else "")
    parts = [f"do {new}{more}" if new else "", f"leave out {gone}" if gone else ""]
    return f"{kind[way.kind]}: {' and '.join(filter(None, parts))}"


def _helpless(problem: Problem) -> str:
    who = ", ".join(repr(step.id) for step in problem.stuck[:_SHOWN]) or "the goal"
    return f"no tool that is there leads from what holds now past {who} to what the plan is for"
