"""Plan repair over facts: poses the planning problems of a request, and puts their solutions into the plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import is_
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
    solve,
)

AnyPlanView: TypeAlias = PlanView | DraftView
"""The plan as it is, or as changes would leave it."""

ArgumentSources: TypeAlias = dict[str, list[tuple[Task, bool]]]
"""By parameter, the tasks that have an argument for it, each with whether it may be used beside
those of steps.
"""

VERIFIED_CONFIDENCE: Final = 0.95
"""Confidence of a repair verified against the facts."""

LARGE_PLAN_TASKS: Final = 1_000
"""Initial tasks of a plan above which the event loop gets checkpoints."""

_MAX_SHORTCUT_SEARCHES: Final = 3
"""Most searches for a cheaper path; all but the first look at the whole plan."""

_MAX_SHORTCUT_PARTS: Final = 10
"""Most independent parts of a plan in which a cheaper path is searched each time."""

_MAX_LISTED_ITEMS: Final = 5


async def find_repairs(request: ReplanRequest, *, threads: bool = True) -> list[Alternative]:
    """Return repairs over facts, the one with the fewest changes first; without any, the verdict.

    Long searches run in a thread, unless `threads` is false.
    """
    view = request.view
    problems = await repair_problems(request, whole_plan=False)
    if not problems:
        return []
    solutions = await _solve_all(problems, threads=threads)
    for problem, solution in zip(problems, solutions, strict=True):
        steps = (*problem.remainders[-1].prefix, *problem.remainders[-1].suffix)
        changed = {fact for step in steps for fact in (*step.action.adds, *step.action.removes)}
        actions = (action for repair in solution.repairs for action in repair.actions)
        if not all(
            changed.issuperset(action.removes) for action in actions
        ):  # steps elsewhere could need these facts
            problems = await repair_problems(request)
            solutions = await _solve_all(problems, threads=threads)
            break
    # The repairs of all parts together: the nearest, the cheapest, those from scratch; then the
    # verdicts.
    alternatives = await _combine(solutions, ("repair", "cheaper", "scratch"), view)
    verdicts: list[Alternative] = []
    for problem, solution in zip(problems, solutions, strict=True):
        if solution.unreachable is not None:
            stuck = (
                ", ".join(repr(step.id) for step in problem.stuck[:_MAX_LISTED_ITEMS]) or "the goal"
            )
            reason = f"no sequence of available tools leads from the current facts past {stuck} to the goal of the plan"
            verdicts.append(
                Alternative(changes=(), reason=reason, unreachable=solution.unreachable)
            )
    return [*alternatives, *verdicts]


async def find_cheaper_paths(request: ReplanRequest, *, threads: bool = True) -> list[Alternative]:
    """Return cheaper paths to the goal through the parts of a plan with tasks that triggers name; none without stated facts.

    They achieve the goal and the effects of the steps that no other step requires. Steps whose
    results are read, or about which a person is asked, are kept. Long searches run in a thread,
    unless `threads` is false.
    """
    view = request.view
    for searched in range(_MAX_SHORTCUT_SEARCHES):
        named = {task_id for trigger in request.triggers for task_id in trigger.tasks}
        world = _planning_problem(request, tasks=() if searched else named)
        await _checkpoint_if_large(view)
        whole = world.feasibility(strict=True)
        if not world.closed_world:
            return []
        required = {fact for step in world.steps for fact in step.action.requires}
        ends = [step.action for step in world.steps if required.isdisjoint(step.action.adds)]
        wanted = [fact for use in ends for fact in use.facts if fact in use.adds]
        goal = [fact for fact in dict.fromkeys([*world.goal, *wanted]) if fact in whole.final_facts]
        tasks = {step.id: view.task(step.id) for step in world.steps}
        known = {name for task in tasks.values() for name in (task.id, task.root)}
        fixed = {
            name for task in tasks.values() for _, name, _ in result_references(task.task, known)
        }
        fixed.update(task.id for task in tasks.values() if task.is_held or task.root in fixed)
        solutions: list[Solution] = []
        stuck = {step.id for step in whole.stuck}
        groups = [{step.id for step in group} for group in whole.components()]
        groups = [ids for ids in groups if stuck.isdisjoint(ids) and not ids.isdisjoint(named)]
        for group in groups[:_MAX_SHORTCUT_PARTS]:
            part = StripsProblem(
                world.facts, tuple(s for s in world.steps if s.id in group), world.goal, True
            )
            feasibility = part.feasibility()
            (problem,) = await _group_problems(
                view, part, feasibility, [feasibility.executable], stated=bool(request.goal.facts)
            )
            rest = problem.remainders[-1]
            rest = rest._replace(
                removable=tuple(step for step in rest.removable if step.id not in fixed)
            )
            own_goal = tuple(fact for fact in goal if fact in feasibility.final_facts)
            problem = replace(problem, goal=own_goal, remainders=(rest,))
            solutions += await _solve_all([problem], find_shortcuts, threads=threads)
            await anyio.lowlevel.checkpoint()
        alternatives = []
        for alternative in await _combine(solutions, ("shortcut", "superfluous"), view):
            after = view.strips_problem(alternative.changes, tasks=named).feasibility()
            if after.final_facts.issuperset(goal) and stuck.issuperset(
                step.id for step in after.stuck
            ):
                alternatives.append(alternative)
        if alternatives or not any(solution.repairs for solution in solutions):
            return alternatives
    return []  # during each search tasks began, or the path would disturb other parts of the plan


async def _combine(
    solutions: Sequence[Solution], kinds: Sequence[str], view: PlanView
) -> list[Alternative]:
    """Return one alternative for each kind of repair, of the repairs of all parts together."""
    alternatives: dict[str, Alternative] = {}
    options = [solution.repairs for solution in solutions if solution.repairs]
    tried: list[list[Repair]] = []
    for kind in kinds if options else ():
        repairs = [
            next((repair for repair in each if repair.kind == kind), each[0]) for each in options
        ]
        if any(all(map(is_, repairs, others)) for others in tried):
            continue
        tried.append(repairs)
        reserved_ids: set[str] = set()
        costs = [action.cost for repair in repairs for action in repair.actions]
        alternative = Alternative(
            changes=tuple(
                change for repair in repairs for change in splice(repair, view, reserved_ids)
            ),
            reason="; ".join(map(_describe_repair, repairs)),
            confidence=VERIFIED_CONFIDENCE,
            expected_cost=sum(costs) if any(costs) else None,
        )
        await _checkpoint_if_large(view)
        if alternative.changes and not view.check(alternative.changes):
            alternatives.setdefault(alternative.fingerprint(), alternative)
        # An alternative that removes much of a large plan takes long to assemble. Tasks that a
        # clock wakes at the first of two checkpoints run at the second.
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
    return list(alternatives.values())


async def complete_proposal(
    request: ReplanRequest, proposed: Alternative, *, threads: bool = True
) -> tuple[Alternative, bool] | None:
    """Return another provider's alternative with a bridge that makes it executable, and whether all its tasks are kept.

    None if there is no bridge, or if it has more actions than tasks of the proposal remain.
    """
    draft = request.view.with_changes(proposed.changes)
    # Problems that the plan had elsewhere before are not its concern.
    named = {task_id for trigger in request.triggers for task_id in trigger.tasks}
    present = _planning_problem(request)
    before = _with_assumed_facts(present).feasibility(strict=True)
    await _checkpoint_if_large(draft)
    elsewhere = {step.id for step in before.stuck} - named
    world = _with_assumed_facts(replace(draft.strips_problem(), goal=present.goal))
    await _checkpoint_if_large(draft)
    feasibility = world.feasibility(strict=True)
    await _checkpoint_if_large(draft)
    stuck = {step.id for step in feasibility.stuck} - elsewhere
    groups = [
        group for group in feasibility.components() if any(step.id in stuck for step in group)
    ]
    if not groups and not feasibility.missing_goal_facts:
        return None
    stated = bool(request.goal.facts)
    problems = await _group_problems(draft, world, feasibility, groups, stated=stated)
    solutions = await _solve_all(problems, threads=threads)
    if not problems or not all(solution.repairs for solution in solutions):
        return None
    repairs = [solution.repairs[0] for solution in solutions]
    removed = {step.id for repair in repairs for step in repair.removed_steps}
    kept = [task_id for task_id in draft.new_task_ids if task_id not in removed]
    reserved_ids: set[str] = set()
    more = [change for repair in repairs for change in splice(repair, draft, reserved_ids)]
    if (
        len(kept) < sum(len(repair.actions) for repair in repairs)
        or not kept
        or not more
        or draft.check(more)
    ):
        return None
    # Tasks that would be added and then removed or rewired are left out, or added as they end up.
    dropped = {change.task_id for change in more if isinstance(change, RemoveTask)}
    new = {change.task.id for change in proposed.changes if isinstance(change, AddTask)}
    rewired = {
        c.task_id: c.fields["depends_on"]
        for c in more
        if isinstance(c, ModifyTask) and c.task_id in new
    }
    merged: list[PlanChange] = []
    for change in proposed.changes:
        if isinstance(change, AddTask) and change.task.id in rewired.keys() - dropped:
            names = rewired[change.task.id]
            depends_on = tuple(map(str, names)) if isinstance(names, list) else ()
            task = change.task.model_copy(update={"depends_on": depends_on})
            merged.append(change.model_copy(update={"task": task}))
        elif not (isinstance(change, AddTask) and change.task.id in dropped):
            merged.append(change)
    merged += [c for c in more if not (isinstance(c, RemoveTask | ModifyTask) and c.task_id in new)]
    alternative = Alternative(
        changes=(*proposed.changes, *more) if request.view.check(merged) else tuple(merged),
        reason=f"{proposed.reason}; completed by a {'; '.join(map(_describe_repair, repairs))}",
        confidence=VERIFIED_CONFIDENCE,
    )
    return alternative, len(kept) == len(draft.new_task_ids)


async def _checkpoint_if_large(view: AnyPlanView) -> None:
    """Let other tasks of the event loop run between long steps in a large plan; they may change the plan."""
    if len(view.original_plan.tasks) > LARGE_PLAN_TASKS:
        await anyio.lowlevel.checkpoint()


async def _solve_all(
    problems: Sequence[RepairProblem], search: Callable[..., Solution] = solve, *, threads: bool
) -> list[Solution]:
    solutions: list[Solution] = []
    for problem in problems:
        solution = search(problem, MAX_INLINE_NODES)
        if not solution.repairs and solution.unreachable is None:
            in_thread = partial(search, problem, check_cancelled=anyio.from_thread.check_cancelled)
            solution = await anyio.to_thread.run_sync(in_thread) if threads else search(problem)
        solutions.append(solution)
    return solutions


def _describe_repair(repair: Repair) -> str:
    kinds = {
        "repair": "repair with the fewest changes",
        "cheaper": "repair at the least cost",
        "scratch": "plan anew",
        "shortcut": "cheaper path to the goal",
        "superfluous": "the same path without what is superfluous",
    }
    actions = [
        " ".join([action.tool, *map(as_text, action.arguments.values())])
        for action in repair.actions
    ]
    removed = [repr(step.id) for step in repair.removed_steps]
    more = (
        f" and {len(actions) - _MAX_LISTED_ITEMS} more" if len(actions) > _MAX_LISTED_ITEMS else ""
    )
    parts = [
        f"do {', '.join(actions[:_MAX_LISTED_ITEMS])}{more}" if actions else "",
        f"leave out {join_names(removed, _MAX_LISTED_ITEMS)}" if removed else "",
    ]
    return f"{kinds[repair.kind]}: {' and '.join(filter(None, parts))}"


# Posing the problems


async def repair_problems(
    request: ReplanRequest, *, whole_plan: bool = True
) -> list[RepairProblem]:
    """Return one problem for each part of the plan that is stuck and related to a trigger.

    Unless `whole_plan` is true, steps that are not related to the triggers may be left out.
    """
    view = request.view
    goal_changes = [
        trigger
        for trigger in request.triggers
        if isinstance(trigger, ContextChanged) and trigger.goal
    ]
    concerns_all = any(
        trigger.kind == "goal-unreachable" or not (trigger.tasks or trigger in goal_changes)
        for trigger in request.triggers
    )
    named = {task_id for trigger in request.triggers for task_id in trigger.tasks}
    whole_plan = bool(whole_plan or goal_changes or concerns_all)
    if whole_plan:
        world = _planning_problem(request)
    else:
        facts = {
            fact for t in request.triggers if isinstance(t, ContextChanged) for fact in t.facts
        }
        world = _planning_problem(request, tasks=named, facts=facts)
    world = _with_assumed_facts(world)
    await _checkpoint_if_large(view)
    feasibility = world.feasibility(strict=True)
    await _checkpoint_if_large(view)
    requested = any(trigger.kind == "human-request" for trigger in request.triggers)
    stuck = [view.task(step.id) for step in feasibility.stuck if concerns_all or step.id in named]
    concerned = {
        task.id
        for task in stuck
        if (requested or task.state is not TaskState.BLOCKED)
        and not (concerns_all and task.is_held)  # by a question
    }
    groups = [
        group for group in feasibility.components() if any(step.id in concerned for step in group)
    ]
    if not (groups or whole_plan) and feasibility.missing_goal_facts:
        return await repair_problems(request)  # effects of the other steps may be useful
    if groups or (feasibility.missing_goal_facts and (goal_changes or not feasibility.stuck)):
        stated = bool(request.goal.facts)
        return await _group_problems(view, world, feasibility, groups, stated=stated)
    return []


def _planning_problem(
    request: ReplanRequest,
    *,
    tasks: Collection[TaskId] = (),
    facts: Collection[str] = (),
) -> StripsProblem:
    """Return the problem of a plan, or of a part of it as for `PlanView.strips_problem`, with the goal of the request."""
    view = request.view
    goal = tuple(request.goal.facts)
    if goal == tuple(view.goal.facts):
        return view.strips_problem(tasks=tasks, facts=facts)
    # Which part of the plan matters for another goal is not known.
    return replace(view.strips_problem(), goal=goal)


def _with_assumed_facts(world: StripsProblem) -> StripsProblem:
    """Return the problem with, if the plan states no facts, those that steps need and no step adds."""
    if world.closed_world:
        return world
    added = {fact for step in world.steps for fact in step.action.adds}
    assumed = (
        fact
        for step in world.steps
        for fact in step.action.facts
        if fact in step.action.requires - added
    )
    facts = tuple(dict.fromkeys([*world.facts, *assumed]))
    return StripsProblem(facts, world.steps, world.goal, world.closed_world)


async def _group_problems(
    view: AnyPlanView,
    world: StripsProblem,
    feasibility: Feasibility,
    groups: Sequence[Sequence[StripsStep]],
    *,
    stated: bool,
) -> list[RepairProblem]:
    """Return a problem for each group; if there is no group, the problem of reaching the goal, whose facts may be stated."""
    await _checkpoint_if_large(view)
    # The tasks that have arguments for unbound parameters of tools, read once for all problems. If
    # the plan states its facts, arguments of all tasks that have not ended may be used.
    closed = world.closed_world
    sources: ArgumentSources = {
        name: []
        for tool in _usable_tools(view)
        for name in _unbound_parameters(tool, view, closed=closed)
    }
    for task, state in view.task_states() if sources else ():
        for name in sources.keys() & task.arguments.keys():
            sources[name].append((task, closed and state not in FINISHED))
    running = tuple(step for step in feasibility.executable if step.running)
    problems: list[RepairProblem] = []
    for group in groups or [feasibility.executable]:
        own_ids = {step.id for step in group}
        stuck = [step for step in feasibility.stuck if step.id in own_ids] if groups else []
        if not all(_is_removable(step) or step.startable for step in stuck):
            continue
        await _checkpoint_if_large(view)
        own = tuple(
            step for step in feasibility.executable if step.id in own_ids and not step.running
        )
        others = tuple(
            step for step in feasibility.executable if step.id not in own_ids and not step.running
        )
        placed = {step.id for step in (*running, *own, *stuck, *others)}
        rest = tuple(_topological_order(step for step in world.steps if step.id not in placed))
        following = _dependent_steps((*own, *stuck), rest)
        # Facts that other stuck parts lack are left to the problems of those parts.
        stuck_elsewhere = [step.action for step in feasibility.stuck if step.id not in own_ids]
        granted = [
            f
            for use in stuck_elsewhere
            for f in use.facts
            if f in use.requires - feasibility.final_facts
        ]
        steps = (*running, *own, *stuck, *others, *rest)
        await _checkpoint_if_large(view)
        domain = build_domain(view, world, (*stuck, *own, *following), sources)
        await _checkpoint_if_large(view)
        stuck_ids = {step.id for step in stuck}
        remainders: list[PlanRemainder] = []
        for before, behind in (
            (((*running, *own), ()), (running, own)) if own else ((running, own),)
        ):
            removable = tuple(step for step in (*behind, *stuck, *following) if _is_removable(step))
            unusable = [
                i
                for i, step in enumerate(removable, 1)
                if step.id in stuck_ids and not step.startable
            ]
            suffix = (*behind, *stuck, *others, *rest)
            remainders.append(
                PlanRemainder(before, suffix, removable, unusable[-1] if unusable else 0)
            )
        tools = {step.id: view.tool(step.tool) for step in steps}
        problem = RepairProblem(
            facts=tuple(dict.fromkeys([*world.facts, *granted])),
            goal=_repair_goal(world, steps, stated=stated),
            domain=domain,
            remainders=tuple(remainders),
            costs={
                step_id: (tool.cost or 0.0) if tool is not None else 0.0
                for step_id, tool in tools.items()
            },
            stuck=tuple(stuck),
        )
        problems.append(problem)
    return problems


def _is_removable(step: StripsStep) -> bool:
    """Return whether all effects of a step are known, so that other actions can replace it."""
    return bool(step.action.adds) and not step.action.unresolved and not step.running


def _topological_order(steps: Iterable[StripsStep]) -> list[StripsStep]:
    """Return steps, each after its dependencies among them, otherwise in their order."""
    remaining = list(steps)
    place = {step.id: index for index, step in enumerate(remaining)}
    dependencies = [[place[dep] for dep in step.depends_on if dep in place] for step in remaining]
    return [remaining[index] for index in topological_order(dependencies)]


def _dependent_steps(
    first: Sequence[StripsStep], following: Iterable[StripsStep]
) -> list[StripsStep]:
    """Return the following steps that depend on the first ones, or need or change the facts that these change."""
    related = {step.id for step in first}
    changed = {fact for step in first for fact in (*step.action.adds, *step.action.removes)}
    touched = changed.union(*(step.action.requires for step in first))
    dependents: list[StripsStep] = []
    for step in following:
        changes = step.action.adds | step.action.removes
        interferes = not (changed.isdisjoint(step.action.requires) and touched.isdisjoint(changes))
        if interferes or not related.isdisjoint(step.depends_on):
            dependents.append(step)
            related.add(step.id)
            changed |= changes
            touched |= step.action.requires | changes
    return dependents


def _repair_goal(
    world: StripsProblem, steps: Sequence[StripsStep], *, stated: bool
) -> tuple[str, ...]:
    """Return the facts that must hold at the end: the stated goal, or all effects of the plan, and never less.

    If the plan states no facts, effects of a step that are only for steps that depend on it are
    left out.
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


# The domain of a problem


def build_domain(
    view: AnyPlanView,
    world: StripsProblem,
    concerned: Sequence[StripsStep],
    sources: ArgumentSources,
) -> Domain:
    """Return the domain: the available tools, and the values that tasks have for their parameters."""
    tools = _usable_tools(view)
    failed: set[str] = set()
    for step in concerned:
        for part in view.lineage(step.id):
            if part.failure is None and part.state not in STUCK:
                continue
            # A call may be used again where something that it needs has ceased to hold, or was made
            # true anew.
            tool = view.tool(part.task.tool)
            arguments = step.arguments if part.id == step.id else part.task.arguments
            needs = (
                ground_action(tool, arguments).requires
                if tool is not None and part.attempts
                else ()
            )
            if not any(view.made_true_since(need, part.id) for need in needs):
                failed |= {
                    action_key(part.task.tool, each) for each in (part.task.arguments, arguments)
                }
    near = [view.task(step.id).task for step in concerned]
    steps_of: dict[str | None, list[StripsStep]] = {}
    for step in world.steps:
        steps_of.setdefault(step.tool, []).append(step)
    values = {
        (tool.name, name): tuple(
            _candidate_values(
                tool, name, near, (*concerned, *steps_of.get(tool.name, ()), *world.steps), sources
            )
        )
        for tool in tools
        for name in _unbound_parameters(tool, view, closed=world.closed_world)
    }
    assumed = frozenset() if world.closed_world else frozenset(_assumed_patterns(view, tools))
    return Domain(tools, view.original_plan.objects, values, assumed, frozenset(failed))


def _usable_tools(view: AnyPlanView) -> tuple[ToolSpec, ...]:
    """Return the tools that are available, have effects, and take no more of any resource than there is."""
    tools = (tool for tool in view.tools.values() if tool.available and tool.addition_patterns)
    return tuple(
        t
        for t in tools
        if all(view.capacity.get(n, 0.0) >= amount for n, amount in t.resources.items())
    )


def _unbound_parameters(tool: ToolSpec, view: AnyPlanView, *, closed: bool) -> Iterator[str]:
    """Yield the parameters whose values come from tasks; those of the others come from facts and objects."""
    bound = (
        {name for need in tool.precondition_patterns for name in placeholders(need)}
        if closed
        else set()
    )
    types = set(view.original_plan.objects.values())
    texts = (*tool.fact_patterns, tool.command or "", tool.url or "")
    for name in tool.parameters or dict.fromkeys(
        name for text in texts for name in placeholders(text)
    ):
        if name not in bound and tool.parameters.get(name) not in types:
            yield name


def _candidate_values(
    tool: ToolSpec,
    name: str,
    near: Sequence[Task],
    steps: Sequence[StripsStep],
    sources: ArgumentSources,
) -> Iterator[JsonValue]:
    """Yield the values of tasks for a parameter: of those concerned, then those of the same tool, then the others.

    A parameter that occurs in no fact gets the first value, with its references.
    """
    if not any(name in placeholders(text) for text in tool.fact_patterns):
        others = sorted(
            (task for task, _ in sources.get(name, ())), key=lambda task: task.tool != tool.name
        )
        yield from islice(
            (task.arguments[name] for task in (*near, *others) if name in task.arguments), 1
        )
        return
    values = [step.arguments[name] for step in steps if name in step.arguments]
    for task, may_be_used in sources.get(name, ()):  # the steps may be only a part of the plan
        if may_be_used and "${" not in str(task.arguments[name]):
            values.append(task.arguments[name])
    distinct: dict[object, JsonValue] = {}
    for value in values:  # most of them are text, which needs no encoding
        distinct.setdefault(
            value if isinstance(value, str) else (action_key(None, {"": value}),), value
        )
    yield from distinct.values()


def _assumed_patterns(view: AnyPlanView, tools: Sequence[ToolSpec]) -> Iterator[str]:
    """Yield the preconditions that no tool adds; if the plan states no facts, they are assumed to hold."""
    effects = [pattern for tool in view.tools.values() for pattern in tool.addition_patterns]
    patterns = [FactPattern(effect) for effect in effects]
    for need in (fact for tool in tools for fact in tool.precondition_patterns):
        if placeholders(need):
            start = need.partition("{")[0]
            others = (effect.partition("{")[0] for effect in effects)
            is_added = any(start.startswith(other) or other.startswith(start) for other in others)
        else:
            is_added = any(_may_add(pattern, need) for pattern in patterns)
        if not is_added:
            yield need


def _may_add(effect: FactPattern, fact: str) -> bool:
    try:
        return effect.match(fact) is not None
    except ExpressionError:
        return True


# Changes of the plan


def splice(repair: Repair, view: AnyPlanView, reserved_ids: set[str]) -> tuple[PlanChange, ...]:
    """Return the changes that put a repair into the plan.

    Args:
        repair: the repair.
        view: the plan.
        reserved_ids: ids that are not free; those of new tasks are added.
    """
    removed = {step.id: step for step in repair.removed_steps}
    kept = [step for step in repair.remainder.suffix if step.id not in removed]
    bridge = GroundAction(
        frozenset(fact for action in repair.actions for fact in action.needs),
        frozenset(fact for action in repair.actions for fact in action.adds),
        frozenset(fact for action in repair.actions for fact in action.removes),
    )
    before = [step for step in repair.remainder.prefix if _must_be_ordered(step.action, bridge)]
    needed = {dep for step in before for dep in step.depends_on}
    external = [
        dep
        for step in removed.values()
        for dep in view.task(step.id).task.depends_on
        if dep not in removed
    ]
    inherited = tuple(
        dict.fromkeys([*external, *(step.id for step in before if step.id not in needed)])
    )
    affected = [
        s
        for s in kept
        if _must_be_ordered(s.action, bridge) or not removed.keys().isdisjoint(s.depends_on)
    ]
    affected_ids = {step.id for step in affected if not step.running}
    behind: set[str] = set()
    dependents: list[str] = []  # those of them that depend on no other
    for step in kept:
        if any(dep in affected_ids or dep in behind for dep in step.depends_on):
            behind.add(step.id)
        elif step.id in affected_ids:
            dependents.append(step.id)
    is_new = isinstance(view, DraftView) and all(
        view.task(i).root == i and i in view.new_task_ids for i in removed
    )
    # The bridge replaces the step that failed, else the last one that it makes superfluous; or it
    # is added.
    target: StripsStep | None = None
    if repair.actions and removed and not is_new:
        target = next(
            (step for step in removed.values() if not step.startable), repair.removed_steps[-1]
        )
    # New tasks, each after the previous one; repetitions of a step are copies of its task.
    used = {action.tool for action in repair.actions}
    steps = (
        step for step in (*repair.remainder.suffix, *repair.remainder.prefix) if step.tool in used
    )
    repeated = {action_key(step.tool, step.arguments): step for step in steps}
    chain: list[Task] = []
    for action in repair.actions:
        new_id = view.unused_id(
            view.task(target.id).root if target is not None else action.tool, reserved_ids
        )
        reserved_ids.add(new_id)
        depends_on = (chain[-1].id,) if chain else ()
        same = repeated.get(action.key)
        if same is not None:
            chain.append(
                view.task(same.id).task.model_copy(update={"id": new_id, "depends_on": depends_on})
            )
        else:
            chain.append(
                Task(id=new_id, tool=action.tool, arguments=action.arguments, depends_on=depends_on)
            )
    changes: list[PlanChange] = []
    instead = tuple[str, ...]()
    late = set[str]()
    if target is not None:
        if view.task(target.id).task.depends_on != inherited:
            changes.append(ModifyTask(task_id=target.id, fields={"depends_on": list(inherited)}))
        changes.append(ReplaceTask(task_id=target.id, tasks=tuple(chain)))
        del removed[target.id]
        instead = (target.id,)
        late = set(dependents)
    elif chain:
        chain[0] = chain[0].model_copy(update={"depends_on": inherited})
        changes += [AddTask(task=task) for task in chain[:-1]]
        changes.append(AddTask(task=chain[-1], before=tuple(dependents)))
        instead = (chain[-1].id,)
    # The kept steps on which each removed step depended, also through other removed steps.
    behind_removed: dict[str, dict[str, None]] = {}
    for step in repair.remainder.suffix:
        old = view.task(step.id).task.depends_on
        new = [dep for dep in old if dep not in removed]
        if len(new) < len(old) or step.id in late:
            left = instead or (other for dep in old for other in behind_removed.get(dep, ()))
            new = list(dict.fromkeys([*new, *left]))
        if step.id in removed:
            behind_removed[step.id] = dict.fromkeys(new)
        elif new != list(old) and not step.running and step is not target:
            changes.append(ModifyTask(task_id=step.id, fields={"depends_on": list(new)}))
    for step in removed.values():
        if view.task(step.id).root == step.id:
            changes.append(RemoveTask(task_id=step.id))
        else:  # its lineage must be satisfied
            changes.append(SkipTask(task_id=step.id, reason="the repair makes it superfluous"))
    return tuple(changes)


def _must_be_ordered(one: GroundAction, other: GroundAction) -> bool:
    """Return whether the order of two actions matters: one changes facts that the other needs or changes."""
    changed = one.adds | one.removes
    touched = other.adds | other.removes
    return not (
        changed.isdisjoint(other.requires)
        and touched.isdisjoint(one.requires)
        and one.adds.isdisjoint(other.removes)
        and one.removes.isdisjoint(other.adds)
    )
