"""Puts a bridge into a plan: which tasks are added, replaced and removed, and who waits for whom then."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from replanning import PlanView, Task
from replanning.changes import AddTask, ModifyTask, PlanChange, RemoveTask, ReplaceTask, SkipTask
from replanning.facts import GroundAction, StripsStep
from replanning.interfaces import DraftView, JsonValue
from replanning.providers._grounding import ToolAction, action_key
from replanning.providers._solve import Repair

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
