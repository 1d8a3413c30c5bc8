"""Plan repair over facts: states the problems of a request, and puts solutions into the plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread

from replanning import Alternative, PlanView, ReplanRequest, Task, ToolSpec
from replanning.changes import AddTask, ModifyTask, PlanChange, RemoveTask, ReplaceTask, SkipTask
from replanning.errors import ExpressionError
from replanning.journal import ContextChanged
from replanning.live import (
    DraftView,
    Feasibility,
    GroundAction,
    StripsProblem,
    StripsStep,
    TaskState,
)
from replanning.live.states import FINISHED, STUCK
from replanning.live.strips import ground_action
from replanning.plan.checks import result_references, topological_order
from replanning.plan.json_values import as_text
from replanning.plan.messages import join_names
from replanning.plan.references import FactPattern, placeholders
from replanning.plan.types import JsonValue, TaskId
from replanning.providers._planner.domain import Domain, action_key
from replanning.providers._planner.search import (
    MAX_INLINE_NODES,
    PlanRemainder,
    Repair,
    RepairProblem,
    Solution,
    find_shortcuts,
    joint_action,
    ordered,
    solve,
    step_ids,
    without,
)

AnyPlanView: TypeAlias = PlanView | DraftView
"""The plan as it is, or as changes would leave it."""

ArgumentSources: TypeAlias = dict[str, list[tuple[Task, bool]]]
"""By parameter, the tasks with an argument for it.

The flag says whether the argument may be used besides those of steps.
"""

VERIFIED_CONFIDENCE: Final = 0.95
"""Confidence of a repair verified against the facts."""

LARGE_PLAN_TASKS: Final = 1_000
"""Number of initial tasks of a plan above which the event loop gets checkpoints."""

_MAX_SHORTCUT_SEARCHES: Final = 3
"""Maximum number of searches for a cheaper path; all but the first cover the whole plan."""

_MAX_SHORTCUT_PARTS: Final = 10
"""Maximum number of independent parts of a plan in one search for a cheaper path."""

_MAX_LISTED_ITEMS: Final = 5


async def find_repairs(request: ReplanRequest, *, threads: bool = True) -> list[Alternative]:
    """Return repairs over facts, the one with the fewest changes first, and verdicts.

    Long searches run in a thread, unless `threads` is false.
    """
    problems = await repair_problems(request, whole_plan=False)
    solutions = await _solve_all(problems, threads=threads)
    # Steps elsewhere may need facts that a repair removes; the whole plan is then considered.
    if not all(map(_keeps_other_facts, problems, solutions)):
        problems = await repair_problems(request)
        solutions = await _solve_all(problems, threads=threads)
    # The repairs of all parts together: the nearest, the cheapest, those from scratch.
    alternatives = await _combine(solutions, ("repair", "cheaper", "scratch"), request.view)
    for problem, solution in zip(problems, solutions, strict=True):
        if solution.unreachable is None:
            continue
        stuck = ", ".join(repr(step.id) for step in problem.stuck[:_MAX_LISTED_ITEMS])
        reason = (
            "no sequence of available tools leads from the current facts past"
            f" {stuck or 'the goal'} to the goal of the plan"
        )
        verdict = Alternative(changes=(), reason=reason, unreachable=solution.unreachable)
        alternatives.append(verdict)
    return alternatives


def _keeps_other_facts(problem: RepairProblem, solution: Solution) -> bool:
    """Return whether the repairs remove only facts that steps of the problem change."""
    changed: set[str] = set()
    rest = problem.remainders[-1]
    for step in (*rest.prefix, *rest.suffix):
        changed |= step.action.adds | step.action.removes
    for repair in solution.repairs:
        for action in repair.actions:
            if not changed.issuperset(action.removes):
                return False
    return True


async def find_cheaper_paths(request: ReplanRequest, *, threads: bool = True) -> list[Alternative]:
    """Return cheaper paths to the goal through parts of a plan; none without stated facts.

    The parts are those with tasks that triggers name. The paths achieve the goal and the effects of
    the steps that no other step requires. Steps whose results are read, or that a person is asked
    about, are kept. Long searches run in a thread, unless `threads` is false.
    """
    view = request.view
    named = _named_tasks(request)
    for searched in range(_MAX_SHORTCUT_SEARCHES):
        world = _planning_problem(request, tasks=() if searched else named)
        await _checkpoint_if_large(view)
        whole = world.feasibility(strict=True)
        if not world.closed_world:
            return []
        goal = _shortcut_goal(world, whole)
        fixed = _fixed_tasks(world, view)
        stuck = step_ids(whole.stuck)
        solutions: list[Solution] = []
        parts = 0
        for group in whole.components():
            ids = step_ids(group)
            if parts == _MAX_SHORTCUT_PARTS or not stuck.isdisjoint(ids) or ids.isdisjoint(named):
                continue
            parts += 1
            problem = await _shortcut_problem(request, world, ids, goal, fixed)
            (solution,) = await _solve_all([problem], find_shortcuts, threads=threads)
            if solution.repairs:
                solutions.append(solution)
            await anyio.lowlevel.checkpoint()
        alternatives: list[Alternative] = []
        for alternative in await _combine(solutions, ("shortcut", "superfluous"), view):
            after = view.strips_problem(alternative.changes, tasks=named).feasibility()
            if stuck.issuperset(step_ids(after.stuck)) and after.final_facts.issuperset(goal):
                alternatives.append(alternative)
        if alternatives or not solutions:
            return alternatives
    # Tasks began during each search, or the paths would disturb other parts of the plan.
    return []


def _shortcut_goal(world: StripsProblem, feasibility: Feasibility) -> list[str]:
    """Return the facts achieved by the plan that a cheaper path must achieve, too."""
    required: set[str] = set()
    for step in world.steps:
        required |= step.action.requires
    wanted = dict.fromkeys(world.goal)
    for step in world.steps:
        if required.isdisjoint(step.action.adds):
            wanted |= ordered(step.action, step.action.adds)
    return [fact for fact in wanted if fact in feasibility.final_facts]


def _fixed_tasks(world: StripsProblem, view: PlanView) -> set[TaskId]:
    """Return the tasks whose results are read, or that a person is asked about."""
    tasks = list(map(view.task, step_ids(world.steps)))
    known: set[TaskId] = set()
    for task in tasks:
        known |= {task.id, task.root}
    read: set[str] = set()
    for task in tasks:
        for _, name, _ in result_references(task.task, known):
            read.add(name)
    fixed: set[TaskId] = set()
    for task in tasks:
        if task.is_held or not read.isdisjoint((task.id, task.root)):
            fixed.add(task.id)
    return fixed


async def _shortcut_problem(
    request: ReplanRequest,
    world: StripsProblem,
    part_ids: set[TaskId],
    goal: Sequence[str],
    fixed: set[TaskId],
) -> RepairProblem:
    """Return the problem of one part of a plan, none of whose fixed tasks may be removed."""
    others = step_ids(world.steps) - part_ids
    steps = without(world.steps, others)
    part = StripsProblem(world.facts, steps, world.goal, True)
    feasibility = part.feasibility()
    (problem,) = await _group_problems(
        request.view,
        part,
        feasibility,
        [feasibility.executable],
        stated=bool(request.goal.facts),
    )
    rest = problem.remainders[-1]
    removable = without(rest.removable, fixed)
    own_goal = tuple(fact for fact in goal if fact in feasibility.final_facts)
    return replace(problem, goal=own_goal, remainders=(rest._replace(removable=removable),))


async def _combine(
    solutions: Sequence[Solution], kinds: Sequence[str], view: PlanView
) -> list[Alternative]:
    """Return one alternative for each kind of repair, which repairs all parts together.

    A part without a repair of that kind gets its first one.
    """
    alternatives: dict[str, Alternative] = {}
    tried: set[tuple[int, ...]] = set()
    for kind in kinds:
        repairs: list[Repair] = []
        for solution in solutions:
            if solution.repairs:
                repairs.append(_repair_of_kind(kind, solution.repairs))
        if not repairs:
            break
        identity = tuple(map(id, repairs))
        if identity in tried:
            continue
        tried.add(identity)
        changes: list[PlanChange] = []
        cost = 0.0
        reserved_ids: set[str] = set()
        for repair in repairs:
            changes += splice(repair, view, reserved_ids)
            for action in repair.actions:
                cost += action.cost
        alternative = Alternative(
            changes=tuple(changes),
            reason="; ".join(map(_describe_repair, repairs)),
            confidence=VERIFIED_CONFIDENCE,
            expected_cost=cost or None,
        )
        await _checkpoint_if_large(view)
        if changes and not view.check(changes):
            alternatives.setdefault(alternative.fingerprint(), alternative)
        # An alternative that removes much of a large plan takes long to assemble. Tasks that a
        # clock wakes at the first checkpoint run at the second.
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
    return list(alternatives.values())


def _repair_of_kind(kind: str, options: Sequence[Repair]) -> Repair:
    for repair in options:
        if repair.kind == kind:
            return repair
    return options[0]


async def complete_proposal(
    request: ReplanRequest, proposed: Alternative, *, threads: bool = True
) -> tuple[Alternative, bool] | None:
    """Return another provider's alternative with a bridge that makes it executable.

    The flag says whether all its tasks are kept. None if no bridge exists, or if it has more actions
    than tasks of the proposal remain.
    """
    draft = request.view.with_changes(proposed.changes)
    present = _planning_problem(request)
    before = _with_assumed_facts(present).feasibility(strict=True)
    await _checkpoint_if_large(draft)
    world = _with_assumed_facts(replace(draft.strips_problem(), goal=present.goal))
    await _checkpoint_if_large(draft)
    feasibility = world.feasibility(strict=True)
    await _checkpoint_if_large(draft)
    # Problems that the plan already had elsewhere are not its concern.
    elsewhere = step_ids(before.stuck) - _named_tasks(request)
    groups = _groups_with(feasibility, step_ids(feasibility.stuck) - elsewhere)
    if not groups and not feasibility.missing_goal_facts:
        return None
    stated = bool(request.goal.facts)
    problems = await _group_problems(draft, world, feasibility, groups, stated=stated)
    solutions = await _solve_all(problems, threads=threads)
    removed: set[TaskId] = set()
    added = 0
    bridge: list[PlanChange] = []
    descriptions: list[str] = []
    reserved_ids: set[str] = set()
    for solution in solutions:
        if not solution.repairs:
            return None
        repair = solution.repairs[0]
        descriptions.append(_describe_repair(repair))
        removed |= step_ids(repair.removed_steps)
        added += len(repair.actions)
        bridge += splice(repair, draft, reserved_ids)
    kept = set(draft.new_task_ids) - removed
    # With fewer tasks of its own than actions of the bridge, it is no longer that proposal.
    if not kept or len(kept) < added:
        return None
    if not bridge or draft.check(bridge):
        return None
    changes = _merge(proposed.changes, bridge)
    if request.view.check(changes):
        changes = [*proposed.changes, *bridge]
    alternative = Alternative(
        changes=tuple(changes),
        reason=f"{proposed.reason}; completed by a {'; '.join(descriptions)}",
        confidence=VERIFIED_CONFIDENCE,
    )
    return alternative, len(kept) == len(draft.new_task_ids)


def _merge(first: Sequence[PlanChange], then: Sequence[PlanChange]) -> list[PlanChange]:
    """Return changes as one list, without tasks that are added and then removed.

    A task that is added and then rewired is added in its final form.
    """
    new = {change.task.id for change in first if isinstance(change, AddTask)}
    dropped: set[TaskId] = set()
    rewired: dict[TaskId, JsonValue] = {}
    rest: list[PlanChange] = []
    for change in then:
        if isinstance(change, RemoveTask) and change.task_id in new:
            dropped.add(change.task_id)
        elif isinstance(change, ModifyTask) and change.task_id in new:
            rewired[change.task_id] = change.fields["depends_on"]
        else:
            rest.append(change)
    merged: list[PlanChange] = []
    for change in first:
        if not isinstance(change, AddTask):
            merged.append(change)
            continue
        if change.task.id in dropped:
            continue
        names = rewired.get(change.task.id)
        if isinstance(names, list):
            task = change.task.model_copy(update={"depends_on": tuple(map(str, names))})
            merged.append(change.model_copy(update={"task": task}))
        else:
            merged.append(change)
    return [*merged, *rest]


async def _checkpoint_if_large(view: AnyPlanView) -> None:
    """Let other tasks of the event loop run between long steps in a large plan.

    They may change the plan.
    """
    if len(view.original_plan.tasks) > LARGE_PLAN_TASKS:
        await anyio.lowlevel.checkpoint()


async def _solve_all(
    problems: Sequence[RepairProblem], search: Callable[..., Solution] = solve, *, threads: bool
) -> list[Solution]:
    solutions: list[Solution] = []
    for problem in problems:
        solution = search(problem, MAX_INLINE_NODES)
        if not solution.repairs and solution.unreachable is None:
            if threads:
                patient = partial(
                    search, problem, check_cancelled=anyio.from_thread.check_cancelled
                )
                solution = await anyio.to_thread.run_sync(patient)
            else:
                solution = search(problem)
        solutions.append(solution)
    return solutions


def _named_tasks(request: ReplanRequest) -> set[TaskId]:
    named: set[TaskId] = set()
    for trigger in request.triggers:
        named.update(trigger.tasks)
    return named


def _groups_with(feasibility: Feasibility, ids: Collection[TaskId]) -> list[list[StripsStep]]:
    """Return the independent groups of steps that contain one of some ids."""
    groups: list[list[StripsStep]] = []
    for group in feasibility.components():
        if not step_ids(group).isdisjoint(ids):
            groups.append(group)
    return groups


_REPAIR_KINDS: Final = {
    "repair": "repair with the fewest changes",
    "cheaper": "repair at the least cost",
    "scratch": "plan anew",
    "shortcut": "cheaper path to the goal",
    "superfluous": "the same path without what is superfluous",
}


def _describe_repair(repair: Repair) -> str:
    parts: list[str] = []
    if repair.actions:
        uses: list[str] = []
        for action in repair.actions[:_MAX_LISTED_ITEMS]:
            words = [action.tool, *map(as_text, action.arguments.values())]
            uses.append(" ".join(words))
        part = f"do {', '.join(uses)}"
        more = len(repair.actions) - _MAX_LISTED_ITEMS
        if more > 0:
            part += f" and {more} more"
        parts.append(part)
    removed = [repr(step.id) for step in repair.removed_steps]
    if removed:
        parts.append(f"leave out {join_names(removed, _MAX_LISTED_ITEMS)}")
    return f"{_REPAIR_KINDS[repair.kind]}: {' and '.join(parts)}"


# Stating the problems


async def repair_problems(
    request: ReplanRequest, *, whole_plan: bool = True
) -> list[RepairProblem]:
    """Return one problem for each part of the plan that is stuck and related to a trigger.

    Unless `whole_plan` is true, steps that are not related to the triggers may be left out.
    """
    view = request.view
    goal_changed = False
    concerns_all = False
    requested = False
    facts: set[str] = set()
    for trigger in request.triggers:
        if trigger.kind == "human-request":
            requested = True
        if isinstance(trigger, ContextChanged):
            facts.update(trigger.facts)
            if trigger.goal:
                goal_changed = True
                continue
        if trigger.kind == "goal-unreachable" or not trigger.tasks:
            concerns_all = True
    if goal_changed or concerns_all:
        whole_plan = True
    if whole_plan:
        world = _planning_problem(request)
    else:
        world = _planning_problem(request, tasks=_named_tasks(request), facts=facts)
    world = _with_assumed_facts(world)
    await _checkpoint_if_large(view)
    feasibility = world.feasibility(strict=True)
    await _checkpoint_if_large(view)
    concerned = _concerned_steps(
        request, feasibility, concerns_all=concerns_all, requested=requested
    )
    groups = _groups_with(feasibility, concerned)
    if not groups:
        if not feasibility.missing_goal_facts:
            return []
        # Effects of the other steps may be useful.
        if not whole_plan:
            return await repair_problems(request)
        if feasibility.stuck and not goal_changed:
            return []
    stated = bool(request.goal.facts)
    return await _group_problems(view, world, feasibility, groups, stated=stated)


def _concerned_steps(
    request: ReplanRequest, feasibility: Feasibility, *, concerns_all: bool, requested: bool
) -> set[TaskId]:
    """Return the stuck steps that need a repair: those that triggers name, or all."""
    named = _named_tasks(request)
    concerned: set[TaskId] = set()
    for step in feasibility.stuck:
        if not concerns_all and step.id not in named:
            continue
        task = request.view.task(step.id)
        # Only a person may go beyond the limit that blocked a task.
        if task.state is TaskState.BLOCKED and not requested:
            continue
        # A person has been asked about it.
        if concerns_all and task.is_held:
            continue
        concerned.add(task.id)
    return concerned


def _planning_problem(
    request: ReplanRequest,
    *,
    tasks: Collection[TaskId] = (),
    facts: Collection[str] = (),
) -> StripsProblem:
    """Return the problem of a plan, or of a part of it, with the goal of the request.

    `PlanView.strips_problem` explains the part.
    """
    view = request.view
    goal = tuple(request.goal.facts)
    if goal == tuple(view.goal.facts):
        return view.strips_problem(tasks=tasks, facts=facts)
    # It is unknown which part of the plan matters for another goal.
    return replace(view.strips_problem(), goal=goal)


def _with_assumed_facts(world: StripsProblem) -> StripsProblem:
    """Return the problem with its assumed facts: those that steps need and no step adds.

    Stated facts allow no assumptions.
    """
    if world.closed_world:
        return world
    added: set[str] = set()
    for step in world.steps:
        added |= step.action.adds
    facts = dict.fromkeys(world.facts)
    for step in world.steps:
        facts |= ordered(step.action, step.action.requires - added)
    return StripsProblem(tuple(facts), world.steps, world.goal, world.closed_world)


async def _group_problems(
    view: AnyPlanView,
    world: StripsProblem,
    feasibility: Feasibility,
    groups: Sequence[Sequence[StripsStep]],
    *,
    stated: bool,
) -> list[RepairProblem]:
    """Return a problem for each group of steps.

    Without a group, the problem is to reach the goal, whose facts may be stated.
    """
    await _checkpoint_if_large(view)
    sources = _argument_sources(view, closed=world.closed_world)
    problems: list[RepairProblem] = []
    for group in groups or [feasibility.executable]:
        own_ids = step_ids(group)
        stuck: list[StripsStep] = []
        unusable: list[StripsStep] = []
        facts = dict.fromkeys(world.facts)
        for step in feasibility.stuck:
            if step.id not in own_ids:
                # Facts that other stuck parts lack are left to the problems of those parts.
                facts |= ordered(step.action, step.action.requires - feasibility.final_facts)
                continue
            stuck.append(step)
            if not step.startable:
                unusable.append(step)
        if not all(map(_is_removable, unusable)):
            continue
        await _checkpoint_if_large(view)
        running: list[StripsStep] = []
        own: list[StripsStep] = []
        others: list[StripsStep] = []
        for step in feasibility.executable:
            if step.running:
                running.append(step)
            elif step.id in own_ids:
                own.append(step)
            else:
                others.append(step)
        placed = step_ids((*running, *own, *stuck, *others))
        rest = _topological_order(without(world.steps, placed))
        following = _dependent_steps((*own, *stuck), rest)
        await _checkpoint_if_large(view)
        domain = build_domain(view, world, (*stuck, *own, *following), sources)
        await _checkpoint_if_large(view)
        # The bridge comes after the steps of the group that can be executed, or before them.
        later = (*others, *rest)
        unusable_ids = step_ids(unusable)
        remainders = [_remainder(running, (*own, *stuck), following, later, unusable_ids)]
        if own:
            after = _remainder((*running, *own), stuck, following, later, unusable_ids)
            remainders.insert(0, after)
        steps = (*running, *own, *stuck, *others, *rest)
        problem = RepairProblem(
            facts=tuple(facts),
            goal=_repair_goal(world, steps, stated=stated),
            domain=domain,
            remainders=tuple(remainders),
            costs=_step_costs(steps, view),
            stuck=tuple(stuck),
        )
        problems.append(problem)
    return problems


def _argument_sources(view: AnyPlanView, *, closed: bool) -> ArgumentSources:
    """Return the tasks with arguments for unbound parameters of tools.

    If the plan states its facts, the arguments of all unfinished tasks may be used.
    """
    sources: ArgumentSources = {}
    for tool in _usable_tools(view):
        for name in _unbound_parameters(tool, view, closed=closed):
            sources[name] = []
    if not sources:
        return sources
    for task, state in view.task_states():
        for name in sources.keys() & task.arguments.keys():
            sources[name].append((task, closed and state not in FINISHED))
    return sources


def _remainder(
    prefix: Sequence[StripsStep],
    following: Sequence[StripsStep],
    dependents: Sequence[StripsStep],
    later: Sequence[StripsStep],
    unusable: set[TaskId],
) -> PlanRemainder:
    """Return the steps around a bridge, which must at least replace the unusable ones.

    Args:
        prefix: the steps before the bridge.
        following: the steps of its group after it.
        dependents: the later steps that may also be removed.
        later: all steps after the group.
        unusable: the steps that cannot be executed.
    """
    removable = tuple(filter(_is_removable, (*following, *dependents)))
    min_removed = 0
    for number, step in enumerate(removable, 1):
        if step.id in unusable:
            min_removed = number
    return PlanRemainder(tuple(prefix), (*following, *later), removable, min_removed)


def _step_costs(steps: Iterable[StripsStep], view: AnyPlanView) -> dict[str, float]:
    costs: dict[str, float] = {}
    for step in steps:
        tool = view.tool(step.tool)
        costs[step.id] = 0.0
        if tool is not None and tool.cost is not None:
            costs[step.id] = tool.cost
    return costs


def _is_removable(step: StripsStep) -> bool:
    """Return whether all effects of a step are known, so that other actions can replace it."""
    return bool(step.action.adds) and not step.action.unresolved and not step.running


def _topological_order(steps: Iterable[StripsStep]) -> list[StripsStep]:
    """Return steps in topological order, which otherwise keeps their order."""
    remaining = list(steps)
    place = {step.id: index for index, step in enumerate(remaining)}
    dependencies: list[list[int]] = []
    for step in remaining:
        dependencies.append([place[dep] for dep in step.depends_on if dep in place])
    return [remaining[index] for index in topological_order(dependencies)]


def _dependent_steps(
    first: Sequence[StripsStep], following: Iterable[StripsStep]
) -> list[StripsStep]:
    """Return the following steps that interfere with the first ones or depend on them.

    A step interferes if it needs a fact that an earlier one changes, or changes one that an earlier
    one needs or changes.
    """
    related: set[TaskId] = set()
    changed: set[str] = set()
    touched: set[str] = set()

    def relate(step: StripsStep) -> None:
        changes = step.action.adds | step.action.removes
        related.add(step.id)
        changed.update(changes)
        touched.update(changes, step.action.requires)

    for step in first:
        relate(step)
    dependents: list[StripsStep] = []
    for step in following:
        changes = step.action.adds | step.action.removes
        interferes = not changed.isdisjoint(step.action.requires) or not touched.isdisjoint(changes)
        if interferes or not related.isdisjoint(step.depends_on):
            dependents.append(step)
            relate(step)
    return dependents


def _repair_goal(
    world: StripsProblem, steps: Sequence[StripsStep], *, stated: bool
) -> tuple[str, ...]:
    """Return the facts that must hold at the end: the stated goal, or all effects of the plan.

    If the plan states no facts, effects that only serve the dependents of a step are left out.
    """
    if world.closed_world and stated:
        return world.goal
    adds = {step.id: step.action.adds for step in steps}
    dependencies: set[TaskId] = set()
    for_itself: set[TaskId] = set()
    for step in steps:
        dependencies.update(step.depends_on)
        for dep in step.depends_on:
            if dep in adds and adds[dep].isdisjoint(step.action.requires):
                for_itself.add(dep)
    only_for_others: set[TaskId] = set()
    if not world.closed_world:
        only_for_others = dependencies - for_itself
    holds: dict[str, None] = {}
    for step in steps:
        for fact in step.action.removes:
            holds.pop(fact, None)
        if step.id not in only_for_others:
            holds |= ordered(step.action, step.action.adds)
    return tuple(dict.fromkeys([*world.goal, *holds]))


# The domain of a problem


def build_domain(
    view: AnyPlanView,
    world: StripsProblem,
    concerned: Sequence[StripsStep],
    sources: ArgumentSources,
) -> Domain:
    """Return the available tools, and the values that tasks have for their parameters."""
    tools = _usable_tools(view)
    near: list[Task] = []
    for step in concerned:
        near.append(view.task(step.id).task)
    steps_of: dict[str | None, list[StripsStep]] = {}
    for step in world.steps:
        steps_of.setdefault(step.tool, []).append(step)
    values: dict[tuple[str, str], tuple[JsonValue, ...]] = {}
    for tool in tools:
        steps = (*concerned, *steps_of.get(tool.name, ()), *world.steps)
        for name in _unbound_parameters(tool, view, closed=world.closed_world):
            candidates = _candidate_values(tool, name, near, steps, sources)
            values[tool.name, name] = tuple(candidates)
    assumed: frozenset[str] = frozenset()
    if not world.closed_world:
        assumed = frozenset(_assumed_patterns(view, tools))
    failed = _failed_calls(view, concerned)
    return Domain(tools, view.original_plan.objects, values, assumed, failed)


def _failed_calls(view: AnyPlanView, concerned: Sequence[StripsStep]) -> frozenset[str]:
    """Return the keys of calls that failed for tasks or for the tasks that they replaced.

    A call may be used again if one of its preconditions was made true again since.
    """
    failed: set[str] = set()
    for step in concerned:
        for part in view.lineage(step.id):
            if part.failure is None and part.state not in STUCK:
                continue
            tool = view.tool(part.task.tool)
            arguments = step.arguments if part.id == step.id else part.task.arguments
            needs: frozenset[str] = frozenset()
            if tool is not None and part.attempts:
                needs = ground_action(tool, arguments).requires
            if not any(view.made_true_since(need, part.id) for need in needs):
                failed.add(action_key(part.task.tool, part.task.arguments))
                failed.add(action_key(part.task.tool, arguments))
    return frozenset(failed)


def _usable_tools(view: AnyPlanView) -> tuple[ToolSpec, ...]:
    """Return the tools that are available, have effects, and do not lack resources."""
    usable: list[ToolSpec] = []
    for tool in view.tools.values():
        if not tool.available or not tool.addition_patterns:
            continue
        needed = tool.resources.items()
        if all(view.capacity.get(name, 0.0) >= amount for name, amount in needed):
            usable.append(tool)
    return tuple(usable)


def _unbound_parameters(tool: ToolSpec, view: AnyPlanView, *, closed: bool) -> Iterator[str]:
    """Yield the parameters whose values come from tasks, not from facts or objects."""
    bound: set[str] = set()
    if closed:
        for need in tool.precondition_patterns:
            bound.update(placeholders(need))
    types = set(view.original_plan.objects.values())
    for name in tool.parameter_types:
        if name not in bound and tool.parameters.get(name) not in types:
            yield name


def _candidate_values(
    tool: ToolSpec,
    name: str,
    near: Sequence[Task],
    steps: Sequence[StripsStep],
    sources: ArgumentSources,
) -> Iterator[JsonValue]:
    """Yield the values of tasks for a parameter.

    Values of the tasks concerned come first, then those of the same tool, then the others. A
    parameter that occurs in no fact gets the first value, with its references.
    """
    if not any(name in placeholders(text) for text in tool.fact_patterns):
        others = [task for task, _ in sources.get(name, ())]
        others.sort(key=lambda task: task.tool != tool.name)
        for task in (*near, *others):
            if name in task.arguments:
                yield task.arguments[name]
                return
        return
    values: list[JsonValue] = []
    for step in steps:
        if name in step.arguments:
            values.append(step.arguments[name])
    # The steps may be only a part of the plan.
    for task, may_be_used in sources.get(name, ()):
        if may_be_used and "${" not in str(task.arguments[name]):
            values.append(task.arguments[name])
    distinct: dict[object, JsonValue] = {}
    for value in values:
        # Most values are text, which needs no encoding.
        key: object = value
        if not isinstance(value, str):
            key = (action_key(None, {"": value}),)
        distinct.setdefault(key, value)
    yield from distinct.values()


def _assumed_patterns(view: AnyPlanView, tools: Sequence[ToolSpec]) -> Iterator[str]:
    """Yield the preconditions that no tool adds; without stated facts, they count as true."""
    effects: dict[str, FactPattern] = {}
    for tool in view.tools.values():
        for effect in tool.addition_patterns:
            effects[effect] = FactPattern(effect)
    for tool in tools:
        for need in tool.precondition_patterns:
            if not _may_be_added(need, effects):
                yield need


def _may_be_added(need: str, effects: Mapping[str, FactPattern]) -> bool:
    """Return whether one of some effects may add a fact, or a fact that fits a pattern.

    Two patterns are compared only up to their first placeholders.
    """
    is_pattern = bool(placeholders(need))
    start = need.partition("{")[0]
    for effect, pattern in effects.items():
        if not is_pattern:
            if _may_add(pattern, need):
                return True
            continue
        other = effect.partition("{")[0]
        if start.startswith(other) or other.startswith(start):
            return True
    return False


def _may_add(effect: FactPattern, fact: str) -> bool:
    try:
        return effect.match(fact) is not None
    except ExpressionError:
        return True


# Changes of the plan


def splice(repair: Repair, view: AnyPlanView, reserved_ids: set[str]) -> tuple[PlanChange, ...]:
    """Return the changes that put a repair into the plan.

    The bridge replaces one of the removed steps, or is added. The steps after it wait for it, and
    those that waited for removed steps wait for the dependencies of these.

    Args:
        repair: the repair.
        view: the plan.
        reserved_ids: ids in use; those of new tasks are added.
    """
    removed = step_ids(repair.removed_steps)
    bridge = joint_action(repair.actions)
    inherited = _bridge_dependencies(repair, bridge, view)
    dependents = _bridge_dependents(repair, bridge)
    target = _replaced_step(repair, view)
    chain = _bridge_tasks(repair, target, view, reserved_ids)
    changes: list[PlanChange] = []
    end: tuple[TaskId, ...] = ()
    late: set[TaskId] = set()
    if target is not None:
        if view.task(target.id).task.depends_on != inherited:
            changes.append(ModifyTask(task_id=target.id, fields={"depends_on": list(inherited)}))
        changes.append(ReplaceTask(task_id=target.id, tasks=tuple(chain)))
        removed.remove(target.id)
        end = (target.id,)
        late.update(dependents)
    elif chain:
        chain[0] = chain[0].model_copy(update={"depends_on": inherited})
        for task in chain[:-1]:
            changes.append(AddTask(task=task))
        changes.append(AddTask(task=chain[-1], before=tuple(dependents)))
        end = (chain[-1].id,)
    # The kept steps that each removed step depended on, also through other removed steps.
    behind_removed: dict[TaskId, Sequence[TaskId]] = {}
    for step in repair.remainder.suffix:
        old = view.task(step.id).task.depends_on
        new = dict.fromkeys(dep for dep in old if dep not in removed)
        if len(new) < len(old) or step.id in late:
            new |= dict.fromkeys(end)
            if not end:
                for dep in old:
                    new |= dict.fromkeys(behind_removed.get(dep, ()))
        depends_on = tuple(new)
        if step.id in removed:
            behind_removed[step.id] = depends_on
        elif depends_on != old and not step.running and step is not target:
            changes.append(ModifyTask(task_id=step.id, fields={"depends_on": list(depends_on)}))
    for step in repair.removed_steps:
        if step is target:
            continue
        if view.task(step.id).root == step.id:
            changes.append(RemoveTask(task_id=step.id))
        else:
            # Its lineage must be satisfied.
            reason = "the repair makes it superfluous"
            changes.append(SkipTask(task_id=step.id, reason=reason))
    return tuple(changes)


def _bridge_dependencies(
    repair: Repair, bridge: GroundAction, view: AnyPlanView
) -> tuple[TaskId, ...]:
    """Return the dependencies of a bridge.

    They are those of the removed steps, and the earlier steps that the bridge interferes with,
    unless another of these waits for them.
    """
    removed = step_ids(repair.removed_steps)
    dependencies: dict[TaskId, None] = {}
    for step in repair.removed_steps:
        for dep in view.task(step.id).task.depends_on:
            if dep not in removed:
                dependencies[dep] = None
    before: list[StripsStep] = []
    waited_for: set[TaskId] = set()
    for step in repair.remainder.prefix:
        if _must_be_ordered(step.action, bridge):
            before.append(step)
            waited_for.update(step.depends_on)
    for step in before:
        if step.id not in waited_for:
            dependencies[step.id] = None
    return tuple(dependencies)


def _bridge_dependents(repair: Repair, bridge: GroundAction) -> list[TaskId]:
    """Return the kept steps that must wait for a bridge, unless they wait for another of these.

    Such a step interferes with the bridge, or depends on a removed step.
    """
    removed = step_ids(repair.removed_steps)
    kept = without(repair.remainder.suffix, removed)
    affected: set[TaskId] = set()
    for step in kept:
        if step.running:
            continue
        if not removed.isdisjoint(step.depends_on) or _must_be_ordered(step.action, bridge):
            affected.add(step.id)
    waiting = set(affected)
    first: list[TaskId] = []
    for step in kept:
        if not waiting.isdisjoint(step.depends_on):
            waiting.add(step.id)
        elif step.id in affected:
            first.append(step.id)
    return first


def _replaced_step(repair: Repair, view: AnyPlanView) -> StripsStep | None:
    """Return the step that the bridge replaces; None if it is added, or there is none.

    It is the step that failed, else the last one that the bridge makes superfluous.
    """
    removed = repair.removed_steps
    if not repair.actions or not removed:
        return None
    # Tasks that a draft adds are dropped from it instead of replaced.
    if isinstance(view, DraftView):
        new = set(view.new_task_ids)
        if all(step.id in new and view.task(step.id).root == step.id for step in removed):
            return None
    for step in removed:
        if not step.startable:
            return step
    return removed[-1]


def _bridge_tasks(
    repair: Repair, target: StripsStep | None, view: AnyPlanView, reserved_ids: set[str]
) -> list[Task]:
    """Return the tasks of a bridge, each after the previous one.

    A repetition of a step is a copy of its task.
    """
    used = {action.tool for action in repair.actions}
    repeated: dict[str, TaskId] = {}
    for step in (*repair.remainder.suffix, *repair.remainder.prefix):
        if step.tool in used:
            repeated[action_key(step.tool, step.arguments)] = step.id
    chain: list[Task] = []
    depends_on: tuple[TaskId, ...] = ()
    for action in repair.actions:
        base = action.tool if target is None else view.task(target.id).root
        new_id = view.unused_id(base, reserved_ids)
        reserved_ids.add(new_id)
        if action.key in repeated:
            same = view.task(repeated[action.key]).task
            task = same.model_copy(update={"id": new_id, "depends_on": depends_on})
        else:
            task = Task(
                id=new_id, tool=action.tool, arguments=action.arguments, depends_on=depends_on
            )
        chain.append(task)
        depends_on = (new_id,)
    return chain


def _must_be_ordered(one: GroundAction, other: GroundAction) -> bool:
    """Return whether the order of two actions matters.

    It does if one changes facts that the other needs or changes.
    """
    changed = one.adds | one.removes
    touched = other.adds | other.removes
    if not changed.isdisjoint(other.requires):
        return True
    if not touched.isdisjoint(one.requires):
        return True
    return not one.adds.isdisjoint(other.removes) or not one.removes.isdisjoint(other.adds)
