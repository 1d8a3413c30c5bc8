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
from replanning.facts import Feasibility, StripsProblem, StripsStep, as_text
from replanning.interfaces import DraftView, TaskState
from replanning.providers._domain import ArgumentSources, argument_sources, build_domain
from replanning.providers._solve import MAX_INLINE_NODES, PlanRemainder, Repair, RepairProblem, Solution, solve
from replanning.providers._splice import AnyPlanView, merge_changes, splice

VERIFIED_CONFIDENCE: Final = 0.95
"""How sure a repair is that was checked against the facts."""

LARGE_PLAN_TASKS: Final = 1_000
"""A plan that began with more tasks than that is looked at in several turns of the event loop."""

_MAX_LISTED_ITEMS: Final = 5


class CompletedProposal(NamedTuple):
    """A proposal that was completed, and whether all that it brings in is kept."""

    alternative: Alternative
    keeps_all_tasks: bool


class _RepairContext(NamedTuple):
    """The plan of which problems are made: itself, on facts, how far it goes, and what its tasks give."""

    view: AnyPlanView
    world: StripsProblem
    feasibility: Feasibility
    argument_sources: ArgumentSources


async def find_repairs(request: ReplanRequest, *, threads: bool = True) -> list[Alternative]:
    """Repairs over facts, the one that changes least first; without any, the verdict.

    Long searches go to a thread, unless `threads` is false.
    """
    posed = [problem async for problem in repair_problems(request, whole_plan=False)]
    solved = await _solve_all(posed, threads=threads)
    if any(map(_affects_other_steps, posed, solved)):
        posed = [problem async for problem in repair_problems(request)]
        solved = await _solve_all(posed, threads=threads)
    found: list[Alternative] = []
    async for alternative in _alternatives(posed, solved, request.view):
        found.append(alternative)
        # One that leaves out much of a large plan takes long to be put together. Whom a clock wakes in the first of two
        # turns runs in the second.
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
    return found


async def complete_proposal(
    request: ReplanRequest, proposed: Alternative, *, threads: bool = True
) -> CompletedProposal | None:
    """What another proposes, with a bridge where it cannot be carried out.

    None where there is none, or more of it would be new than is left of what is proposed.
    """
    draft = request.view.with_changes(proposed.changes)
    posed = [problem async for problem in _draft_problems(request, draft)]
    solved = await _solve_all(posed, threads=threads)
    if not posed or not all(solution.repairs for solution in solved):
        return None
    ways = [solution.repairs[0] for solution in solved]
    gone = {step.id for way in ways for step in way.removed_steps}
    kept = [task_id for task_id in draft.new_task_ids if task_id not in gone]
    taken: set[str] = set()
    more = [change for way in ways for change in splice(way, draft, taken)]
    if len(kept) < sum(len(way.actions) for way in ways) or not kept or not more or draft.check(more):
        return None
    told = "; ".join(map(_describe_repair, ways))
    changes = tuple(merge_changes(proposed.changes, more, request.view))
    reason = f"{proposed.reason}; completed by a {told}"
    return CompletedProposal(
        Alternative(changes=changes, reason=reason, confidence=VERIFIED_CONFIDENCE),
        len(kept) == len(draft.new_task_ids),
    )


async def _checkpoint_if_large(view: AnyPlanView) -> None:
    """Let others on the event loop have a turn between what takes long in a large plan, which may be changed by them."""
    if len(view.original_plan.tasks) > LARGE_PLAN_TASKS:
        await anyio.lowlevel.checkpoint()


async def _solve_all(posed: Sequence[RepairProblem], *, threads: bool) -> list[Solution]:
    solved: list[Solution] = []
    for problem in posed:
        solution = solve(problem, MAX_INLINE_NODES)
        if not solution.repairs and solution.unreachable is None:
            patient = partial(solve, problem, check_cancelled=anyio.from_thread.check_cancelled)
            solution = await anyio.to_thread.run_sync(patient) if threads else solve(problem)
        solved.append(solution)
    return solved


async def repair_problems(request: ReplanRequest, *, whole_plan: bool = True) -> AsyncIterator[RepairProblem]:
    """What there is to solve: one problem for each part of the plan that is stuck and has to do with a trigger.

    Unless the `keeps_all_tasks` plan is to be looked at, what has nothing to do with the triggers may be left out.
    """
    if any(trigger.kind == "better-path-found" for trigger in request.triggers):
        return
    view = request.view
    if not any(tool.adds or tool.produces for tool in view.tools.values()):
        return
    tasks = {task_id for trigger in request.triggers for task_id in trigger.tasks}
    facts = {fact for t in request.triggers if isinstance(t, ContextChanged) for fact in t.facts}
    whole_plan = whole_plan or _concerns_whole_plan(request) or any(map(_is_goal_change, request.triggers))
    world = _with_assumed_facts(view.strips_problem() if whole_plan else view.strips_problem(tasks=tasks, facts=facts))
    await _checkpoint_if_large(view)
    standing = world.feasibility(strict=True)
    await _checkpoint_if_large(view)
    groups = _affected_groups(request, standing)
    if not (groups or whole_plan) and standing.missing_goal_facts:
        async for problem in repair_problems(request):  # what the rest of the plan brings about may be of use
            yield problem
        return
    if groups or (standing.missing_goal_facts and (not standing.stuck or any(map(_is_goal_change, request.triggers)))):
        async for problem in _group_problems(view, world, standing, groups):
            yield problem


async def _draft_problems(request: ReplanRequest, draft: DraftView) -> AsyncIterator[RepairProblem]:
    """The same for a plan with changes: all that is wrong with it and was not wrong elsewhere before."""
    named = {task_id for trigger in request.triggers for task_id in trigger.tasks}
    before = _with_assumed_facts(request.view.strips_problem()).feasibility(strict=True)
    await _checkpoint_if_large(draft)
    elsewhere = {step.id for step in before.stuck} - named
    world = _with_assumed_facts(draft.strips_problem())
    await _checkpoint_if_large(draft)
    standing = world.feasibility(strict=True)
    await _checkpoint_if_large(draft)
    wanted = {step.id for step in standing.stuck} - elsewhere
    groups = [group for group in standing.components() if any(step.id in wanted for step in group)]
    if groups or standing.missing_goal_facts:
        async for problem in _group_problems(draft, world, standing, groups):
            yield problem


async def _group_problems(
    view: AnyPlanView, world: StripsProblem, standing: Feasibility, groups: Sequence[Sequence[StripsStep]]
) -> AsyncIterator[RepairProblem]:
    """A problem for each group; where none is stuck, the one of reaching the goal."""
    await _checkpoint_if_large(view)
    scene = _RepairContext(view, world, standing, argument_sources(view, closed=world.closed_world))
    if not groups:
        yield await _build_problem(scene, [], list(standing.executable))
    for group in groups:
        own = {step.id for step in group}
        stuck = [step for step in standing.stuck if step.id in own]
        if all(_is_removable(step) or step.startable for step in stuck):
            yield await _build_problem(scene, stuck, group)


def _with_assumed_facts(world: StripsProblem) -> StripsProblem:
    """The world in which, where the plan does not state its facts, what steps need and none brings about holds."""
    if world.closed_world:
        return world
    made = {fact for step in world.steps for fact in step.action.adds}
    assumed = (fact for step in world.steps for fact in step.action.facts if fact in step.action.requires - made)
    return world._replace(facts=tuple(dict.fromkeys([*world.facts, *assumed])))


def _affects_other_steps(problem: RepairProblem, solution: Solution) -> bool:
    """Whether a way takes away what steps could need that are not among those of the problem."""
    rest = problem.remainders[-1]
    changed = {fact for step in (*rest.prefix, *rest.suffix) for fact in (*step.action.adds, *step.action.removes)}
    return any(not changed.issuperset(action.removes) for way in solution.repairs for action in way.actions)


def _concerns_whole_plan(request: ReplanRequest) -> bool:
    """Whether a trigger is about the plan as a whole."""
    return any(
        trigger.kind == "goal-unreachable" or not (trigger.tasks or _is_goal_change(trigger))
        for trigger in request.triggers
    )


def _is_goal_change(trigger: Trigger) -> bool:
    return isinstance(trigger, ContextChanged) and trigger.goal


def _affected_groups(request: ReplanRequest, standing: Feasibility) -> list[list[StripsStep]]:
    """The parts of the plan in which something is stuck for which a way on is asked."""
    view = request.view
    named = {task_id for trigger in request.triggers for task_id in trigger.tasks}
    asked = any(trigger.kind == "human-request" for trigger in request.triggers)
    whole = _concerns_whole_plan(request)
    wanted = set()
    for step in standing.stuck:
        task = view.task(step.id)
        waits = whole and task.is_held  # a person was asked about it
        if (whole or step.id in named) and not waits and (asked or task.state is not TaskState.BLOCKED):
            wanted.add(step.id)
    groups = standing.components()
    return [group for group in groups if any(step.id in wanted for step in group)]


async def _build_problem(
    scene: _RepairContext, stuck: Sequence[StripsStep], group: Sequence[StripsStep]
) -> RepairProblem:
    view, world, standing, given = scene
    await _checkpoint_if_large(view)
    running = tuple(step for step in standing.executable if step.running)
    own = {step.id for step in group}
    ours = tuple(step for step in standing.executable if step.id in own and not step.running)
    others = tuple(step for step in standing.executable if step.id not in own and not step.running)
    first = {step.id for step in (*running, *ours, *stuck, *others)}
    left = tuple(_topological_order(step for step in world.steps if step.id not in first))
    following = _dependent_steps((*ours, *stuck), left)
    elsewhere = [step for step in standing.stuck if step.id not in own]
    seen_to = [f for step in elsewhere for f in step.action.facts if f in step.action.requires - standing.final_facts]
    everything = (*running, *ours, *stuck, *others, *left)
    await _checkpoint_if_large(view)
    domain = build_domain(view, world, (*stuck, *ours, *following), given)
    await _checkpoint_if_large(view)
    after = (*stuck, *others, *left)
    late = _plan_remainder((*running, *ours), (), after, stuck, following)
    early = _plan_remainder(running, ours, after, stuck, following)
    rests = (late, early) if ours else (early,)
    return RepairProblem(
        facts=tuple(dict.fromkeys([*world.facts, *seen_to])),
        goal=_repair_goal(world, everything, stated=bool(view.goal.facts)),
        domain=domain,
        remainders=rests,
        costs={step.id: _tool_cost(view.tool(step.tool)) for step in everything},
        stuck=tuple(stuck),
    )


def _plan_remainder(
    before: Sequence[StripsStep],
    ours: Sequence[StripsStep],
    after: Sequence[StripsStep],
    stuck: Sequence[StripsStep],
    following: Sequence[StripsStep],
) -> PlanRemainder:
    loose = tuple(step for step in (*ours, *stuck, *following) if _is_removable(step))
    lacking = {step.id for step in stuck}
    unusable = [index for index, step in enumerate(loose) if not step.startable and step.id in lacking]
    return PlanRemainder(tuple(before), (*ours, *after), loose, unusable[-1] + 1 if unusable else 0)


def _is_removable(step: StripsStep) -> bool:
    """Whether all that a step is for is known, so that it can go where something else brings that about."""
    return bool(step.action.adds) and not step.action.unresolved and not step.running


def _topological_order(steps: Iterable[StripsStep]) -> Iterator[StripsStep]:
    """Steps, each after those of them that it waits for, otherwise as they are."""
    left = list(steps)
    place = {step.id: index for index, step in enumerate(left)}
    missing = [sum(dep in place for dep in step.depends_on) for step in left]
    dependents: dict[str, list[int]] = {}
    for index, step in enumerate(left):
        for dep in step.depends_on:
            dependents.setdefault(dep, []).append(index)
    turn = [index for index, count in enumerate(missing) if not count]
    while turn:
        index = heapq.heappop(turn)
        yield left[index]
        for after in dependents.get(left[index].id, ()):
            missing[after] -= 1
            if not missing[after]:
                heapq.heappush(turn, after)


def _dependent_steps(first: Iterable[StripsStep], following: Iterable[StripsStep]) -> list[StripsStep]:
    """The steps that come after others and wait for them, or need or change what they change."""
    behind: set[str] = set()
    changed: set[str] = set()
    touched: set[str] = set()
    found: list[StripsStep] = []
    for step in first:
        behind.add(step.id)
        changed |= step.action.adds | step.action.removes
        touched |= step.action.requires | step.action.adds | step.action.removes
    for step in following:
        changes = step.action.adds | step.action.removes
        bears = not (changed.isdisjoint(step.action.requires) and touched.isdisjoint(changes))
        if bears or not behind.isdisjoint(step.depends_on):
            behind.add(step.id)
            changed |= changes
            touched |= step.action.requires | changes
            found.append(step)
    return found


def _repair_goal(world: StripsProblem, steps: Sequence[StripsStep], *, stated: bool) -> tuple[str, ...]:
    """What must hold at the end: what the plan says, or all that it would bring about, and never less.

    Where the plan does not state its facts, what one step adds only for another that needs it is left out.
    """
    if world.closed_world and stated:
        return world.goal
    adds = {step.id: step.action.adds for step in steps}
    for_itself = {
        dep
        for step in steps
        for dep in step.depends_on
        if adds.get(dep, step.action.requires).isdisjoint(step.action.requires)
    }
    for_others = {dep for step in steps for dep in step.depends_on} - for_itself
    holds: dict[str, None] = {}
    for step in steps:
        for fact in step.action.removes:
            holds.pop(fact, None)
        if world.closed_world or step.id not in for_others:
            holds.update((fact, None) for fact in step.action.facts if fact in step.action.adds)
    return tuple(dict.fromkeys([*world.goal, *holds]))


def _tool_cost(tool: ToolSpec | None) -> float:
    return tool.cost or 0.0 if tool is not None else 0.0


async def _alternatives(
    posed: Sequence[RepairProblem], solved: Sequence[Solution], view: PlanView
) -> AsyncIterator[Alternative]:
    """Alternatives for all parts together: the nearest ways, the cheapest, those from scratch; then the verdict."""
    seen: set[str] = set()
    ways = [solution.repairs for solution in solved if solution.repairs]
    tried: list[list[Repair]] = []
    for kind in ("repair", "cheaper", "scratch") if ways else ():
        chosen = [next((way for way in found if way.kind == kind), found[0]) for found in ways]
        if any(all(map(is_, chosen, others)) for others in tried):
            continue
        tried.append(chosen)
        alternative = _combine_repairs(chosen, view)
        await _checkpoint_if_large(view)
        if not alternative.changes or view.check(alternative.changes):
            continue
        if alternative.fingerprint() not in seen:
            seen.add(alternative.fingerprint())
            yield alternative
    for problem, solution in zip(posed, solved, strict=True):
        if solution.unreachable is not None:
            yield Alternative(changes=(), reason=_unreachable_reason(problem), unreachable=solution.unreachable)


def _combine_repairs(ways: Sequence[Repair], view: PlanView) -> Alternative:
    """The ways as one alternative."""
    taken: set[str] = set()
    changes = tuple(change for way in ways for change in splice(way, view, taken))
    costs = [action.cost for way in ways for action in way.actions]
    return Alternative(
        changes=changes,
        reason="; ".join(map(_describe_repair, ways)),
        confidence=VERIFIED_CONFIDENCE,
        expected_cost=sum(costs) if any(costs) else None,
    )


def _describe_repair(way: Repair) -> str:
    """A way in words."""
    kind = {"repair": "repair with the fewest changes", "cheaper": "repair at the least cost", "scratch": "plan anew"}
    new = ", ".join(
        " ".join([a.tool, *(as_text(v) for v in a.arguments.values())]) for a in way.actions[:_MAX_LISTED_ITEMS]
    )
    more = f" and {len(way.actions) - _MAX_LISTED_ITEMS} more" if len(way.actions) > _MAX_LISTED_ITEMS else ""
    gone = ", ".join(repr(step.id) for step in way.removed_steps[:_MAX_LISTED_ITEMS]) + (
        ", …" if len(way.removed_steps) > _MAX_LISTED_ITEMS else ""
    )
    parts = [f"do {new}{more}" if new else "", f"leave out {gone}" if gone else ""]
    return f"{kind[way.kind]}: {' and '.join(filter(None, parts))}"


def _unreachable_reason(problem: RepairProblem) -> str:
    who = ", ".join(repr(step.id) for step in problem.stuck[:_MAX_LISTED_ITEMS]) or "the goal"
    return f"no tool that is there leads from what holds now past {who} to what the plan is for"
