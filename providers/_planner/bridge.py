"""Puts a bridge into a plan: which tasks are added, replaced and removed, and who waits for whom then."""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import is_
from typing import Final, NamedTuple, TypeAlias

import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread

from replanning import Alternative, PlanView, ReplanRequest, Task, ToolSpec
from replanning.changes import AddTask, ModifyTask, PlanChange, RemoveTask, ReplaceTask, SkipTask
from replanning.journal import ContextChanged, Trigger
from replanning.live import (
    DraftView,
    Feasibility,
    GroundAction,
    StripsProblem,
    StripsStep,
    TaskState,
    TaskView,
    artifact_fact,
)
from replanning.plan import as_text, compile_fact_pattern, placeholders
from replanning.plan.types import JsonValue
from replanning.providers._planner.domain import Domain, ToolAction, action_key
from replanning.providers._planner.search import MAX_INLINE_NODES, PlanRemainder, Repair, RepairProblem, Solution, solve

AnyPlanView: TypeAlias = PlanView | DraftView
"""The plan as it stands, or as changes would leave it."""


def splice(way: Repair, view: AnyPlanView, taken: set[str]) -> tuple[PlanChange, ...]:
    """The changes that carry a way out.

    Args:
        way: what is to be done.
        view: the plan.
        taken: ids that have been given out, to which those of new tasks are added.
    """
    gone = {step.id: step for step in way.removed_steps}
    kept = [step for step in way.remainder.suffix if step.id not in gone]
    new = _combined_effects(way.actions)
    before = _latest_steps(step for step in way.remainder.prefix if _interferes(step.action, new))
    external = [dep for step in gone.values() for dep in view.task(step.id).task.depends_on if dep not in gone]
    inherited = tuple(dict.fromkeys([*external, *(step.id for step in before)]))
    waiting = _earliest_steps(
        (step for step in kept if _interferes(step.action, new) or not gone.keys().isdisjoint(step.depends_on)), kept
    )
    if not gone:
        return tuple(_add_changes(_task_chain(way.actions, None, way, view, taken), inherited, waiting))
    if not way.actions:
        return (*_rewire_dependencies(kept, gone, inherited, (), view), *_remove_changes(gone.values(), view))
    if isinstance(view, DraftView) and all(view.task(i).root == i and i in view.new_task_ids for i in gone):
        added = tuple(_add_changes(_task_chain(way.actions, None, way, view, taken), inherited, waiting))
        last = (added[-1].task.id,)
        return (*added, *_rewire_dependencies(kept, gone, last, (), view), *_remove_changes(gone.values(), view))
    target = _replaced_step(way)
    chain = _task_chain(way.actions, target, way, view, taken)
    own = view.task(target.id).task.depends_on
    lead = () if own == inherited else (ModifyTask(task_id=target.id, fields={"depends_on": list(inherited)}),)
    return (
        *lead,
        ReplaceTask(task_id=target.id, tasks=chain),
        *_rewire_dependencies(kept, {i: s for i, s in gone.items() if i != target.id}, (target.id,), waiting, view),
        *_remove_changes((step for step in gone.values() if step.id != target.id), view),
    )


def merge_changes(first: Sequence[PlanChange], more: Sequence[PlanChange], view: PlanView) -> Iterator[PlanChange]:
    """Changes and more that follow them, without tasks that would be added to be removed again."""
    removed = {change.task_id for change in more if isinstance(change, RemoveTask)}
    new = {change.task.id for change in first if isinstance(change, AddTask)}
    waits = {c.task_id: _names(c.fields["depends_on"]) for c in more if isinstance(c, ModifyTask) and c.task_id in new}
    short: list[PlanChange] = []
    for change in first:
        if isinstance(change, AddTask) and change.task.id in waits.keys() - removed:
            task = change.task.model_copy(update={"depends_on": waits[change.task.id]})
            short.append(change.model_copy(update={"task": task}))
        elif not (isinstance(change, AddTask) and change.task.id in removed):
            short.append(change)
    short += [c for c in more if not (isinstance(c, RemoveTask | ModifyTask) and c.task_id in new)]
    yield from (*first, *more) if view.check(short) else short


def _names(names: JsonValue) -> tuple[str, ...]:
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _replaced_step(way: Repair) -> StripsStep:
    """The task for which the bridge stands: the one that failed, else the last one that it makes superfluous."""
    return next((step for step in way.removed_steps if not step.startable), way.removed_steps[-1])


def _task_chain(
    actions: Sequence[ToolAction], target: StripsStep | None, way: Repair, view: AnyPlanView, taken: set[str]
) -> tuple[Task, ...]:
    """New tasks for actions, each after the one before; like the task of which one is a repetition."""
    used = {action.tool for action in actions}
    steps = (step for step in (*way.remainder.suffix, *way.remainder.prefix) if step.tool in used)
    like = {action_key(step.tool, step.arguments): step for step in steps}
    tasks: list[Task] = []
    for action in actions:
        base = view.task(target.id).root if target is not None else action.tool
        new = view.unused_id(base, taken)
        taken.add(new)
        after = (tasks[-1].id,) if tasks else ()
        same = like.get(action.key)
        if same is not None:
            tasks.append(view.task(same.id).task.model_copy(update={"id": new, "depends_on": after}))
        else:
            tasks.append(Task(id=new, tool=action.tool, arguments=action.arguments, depends_on=after))
    return tuple(tasks)


def _add_changes(chain: Sequence[Task], inherited: tuple[str, ...], waiting: Sequence[StripsStep]) -> Iterator[AddTask]:
    for index, task in enumerate(chain):
        last = index == len(chain) - 1
        new = task if index else task.model_copy(update={"depends_on": inherited})
        yield AddTask(task=new, before=tuple(step.id for step in waiting) if last else ())


def _rewire_dependencies(
    kept: Iterable[StripsStep],
    gone: dict[str, StripsStep],
    instead: tuple[str, ...],
    waiting: Sequence[StripsStep],
    view: AnyPlanView,
) -> Iterator[PlanChange]:
    """Make tasks that stay wait for others instead of those that go."""
    late = {step.id for step in waiting}
    for step in kept:
        deps = view.task(step.id).task.depends_on
        new = [dep for dep in deps if dep not in gone]
        if len(new) < len(deps) or step.id in late:
            new = list(dict.fromkeys([*new, *instead]))
        if new != list(deps) and not step.running:
            yield ModifyTask(task_id=step.id, fields={"depends_on": list(new)})


def _remove_changes(gone: Iterable[StripsStep], view: AnyPlanView) -> Iterator[PlanChange]:
    for step in gone:
        if view.task(step.id).root == step.id:
            yield RemoveTask(task_id=step.id)
        else:  # what it stands for must be satisfied
            yield SkipTask(task_id=step.id, reason="the repair makes it superfluous")


def _combined_effects(actions: Sequence[ToolAction]) -> GroundAction:
    """What actions need, add and remove, any of them."""
    needs = frozenset(fact for action in actions for fact in action.needs)
    adds = frozenset(fact for action in actions for fact in action.adds)
    return GroundAction(needs, adds, frozenset(fact for action in actions for fact in action.removes))


def _interferes(one: GroundAction, other: GroundAction) -> bool:
    """Whether the order of two uses matters: one changes what the other needs or changes."""
    changed, touched = one.adds | one.removes, other.adds | other.removes
    return not (
        changed.isdisjoint(other.requires)
        and touched.isdisjoint(one.requires)
        and one.adds.isdisjoint(other.removes)
        and one.removes.isdisjoint(other.adds)
    )


def _earliest_steps(chosen: Iterable[StripsStep], steps: Sequence[StripsStep]) -> list[StripsStep]:
    """Those of the chosen steps that wait for no other of them."""
    wanted = {step.id for step in chosen if not step.running}
    behind: set[str] = set()
    first = []
    for step in steps:
        after = any(dep in wanted or dep in behind for dep in step.depends_on)
        if after:
            behind.add(step.id)
        if step.id in wanted and not after:
            first.append(step)
    return first


def _latest_steps(chosen: Iterable[StripsStep]) -> list[StripsStep]:
    """Those of the chosen steps for which no other of them waits."""
    steps = list(chosen)
    needed = {dep for step in steps for dep in step.depends_on}
    return [step for step in steps if step.id not in needed]


ArgumentSources: TypeAlias = dict[str, list[tuple[Task, bool]]]
"""By parameter, the tasks that give something for it, each with whether that is of use as well as what steps give."""

_STUCK_STATES = (TaskState.FAILED, TaskState.BLOCKED)

_TERMINAL_STATES = (TaskState.DONE, TaskState.SKIPPED, TaskState.CANCELLED, TaskState.REPLACED_BY_REPLAN)


def build_domain(
    view: AnyPlanView, world: StripsProblem, concerned: Sequence[StripsStep], given: ArgumentSources
) -> Domain:
    """What actions are made of: the tools that there are, and the values that tasks give for their parameters."""
    tools = _usable_tools(view)
    failed = {
        action_key(part.task.tool, part.task.arguments) for step in concerned for part in _failed_tasks(step.id, view)
    }
    failed |= {action_key(step.tool, step.arguments) for step in concerned if view.task(step.id).state in _STUCK_STATES}
    near = [view.task(step.id).task for step in concerned]
    of_tool: dict[str | None, list[StripsStep]] = {}
    for step in world.steps:
        of_tool.setdefault(step.tool, []).append(step)
    values = {
        (tool.name, name): tuple(
            _candidate_values(tool, name, near, (*concerned, *of_tool.get(tool.name, ()), *world.steps), given)
        )
        for tool in tools
        for name in _unbound_parameters(tool, view, closed=world.closed_world)
    }
    assumed = frozenset() if world.closed_world else frozenset(_assumed_patterns(view, tools))
    return Domain(tools, view.original_plan.objects, values, assumed, frozenset(failed))


def argument_sources(view: AnyPlanView, *, closed: bool) -> ArgumentSources:
    """The tasks that give something for what tools leave open, by parameter; read once for all problems.

    Args:
        view: the plan.
        closed: whether it states its facts; then what any task gives that has not ended may be of use.
    """
    found: ArgumentSources = {
        name: [] for tool in _usable_tools(view) for name in _unbound_parameters(tool, view, closed=closed)
    }
    for task, state in view.task_states() if found else ():
        for name in found.keys() & task.arguments.keys():
            found[name].append((task, closed and state not in _TERMINAL_STATES))
    return found


def _usable_tools(view: AnyPlanView) -> tuple[ToolSpec, ...]:
    return tuple(tool for tool in view.tools.values() if tool.available and (tool.adds or tool.produces))


def _unbound_parameters(tool: ToolSpec, view: AnyPlanView, *, closed: bool) -> Iterator[str]:
    """The parameters of a tool for which tasks give the values: the others are found among facts and objects."""
    bound = {name for need in (*tool.requires, *tool.needs) for name in placeholders(need)} if closed else set()
    types = set(view.original_plan.objects.values())
    for name in tool.parameters or _pattern_parameters(tool):
        if name not in bound and tool.parameters.get(name) not in types:
            yield name


def _failed_tasks(task_id: str, view: AnyPlanView) -> Iterator[TaskView]:
    return (part for part in view.lineage(task_id) if part.failure is not None)


def _pattern_parameters(tool: ToolSpec) -> list[str]:
    """The parameters of a tool that states none: those that its patterns name."""
    texts = (*tool.requires, *tool.adds, *tool.removes, *tool.needs, *tool.produces, tool.command or "", tool.url or "")
    return list(dict.fromkeys(name for text in texts for name in placeholders(text)))


def _candidate_values(
    tool: ToolSpec, name: str, near: Sequence[Task], steps: Sequence[StripsStep], given: ArgumentSources
) -> Iterator[JsonValue]:
    """What tasks give for a parameter: those that are concerned, then those of the same tool, then the others.

    A parameter of which no fact speaks gets the first of these, references and all.
    """
    texts = (*tool.requires, *tool.adds, *tool.removes, *tool.needs, *tool.produces)
    matters = any(name in placeholders(text) for text in texts)
    if not matters:
        every = sorted((task for task, _ in given.get(name, ())), key=lambda task: task.tool != tool.name)
        yield from islice((task.arguments[name] for task in (*near, *every) if name in task.arguments), 1)
        return
    seen: dict[object, JsonValue] = {}
    for step in steps:
        if name in step.arguments:
            seen.setdefault(_value_key(step.arguments[name]), step.arguments[name])
    for task, counts in given.get(name, ()):  # the steps may be of a part of the plan
        if counts and "${" not in str(task.arguments[name]):
            seen.setdefault(_value_key(task.arguments[name]), task.arguments[name])
    yield from seen.values()


def _value_key(value: JsonValue) -> object:
    """By which equal values are recognised: text by itself, which is what most of them are."""
    return value if isinstance(value, str) else (action_key(None, {"": value}),)


def _assumed_patterns(view: AnyPlanView, tools: Sequence[ToolSpec]) -> Iterator[str]:
    """What tools need that no tool brings about: where facts are not stated, it is taken to hold."""
    adds = [pattern for tool in view.tools.values() for pattern in (*tool.adds, *map(artifact_fact, tool.produces))]
    for tool in tools:
        for need in (*tool.requires, *map(artifact_fact, tool.needs)):
            if not any(_may_unify(need, added) for added in adds):
                yield need


def _may_unify(need: str, added: str) -> bool:
    """Whether two patterns could stand for the same fact."""
    if not placeholders(need):
        return compile_fact_pattern(added, {}).fullmatch(need) is not None
    one, other = need.partition("{")[0], added.partition("{")[0]
    return one.startswith(other) or other.startswith(one)


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
