"""Puts a bridge into a plan: which tasks are added, replaced and removed, and who waits for whom then."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from replanning import PlanView, Task
from replanning.changes import AddTask, ModifyTask, PlanChange, RemoveTask, ReplaceTask, SkipTask
from replanning.facts import Step, Use
from replanning.interfaces import DraftView, JsonValue
from replanning.providers._grounding import Action, use_key
from replanning.providers._solve import Way

Seen: TypeAlias = PlanView | DraftView
"""The plan as it stands, or as changes would leave it."""


def splice(way: Way, view: Seen, taken: set[str]) -> tuple[PlanChange, ...]:
    """The changes that carry a way out.

    Args:
        way: what is to be done.
        view: the plan.
        taken: ids that have been given out, to which those of new tasks are added.
    """
    gone = {step.id: step for step in way.gone}
    kept = [step for step in way.rest.after if step.id not in gone]
    new = _together(way.actions)
    before = _last(step for step in way.rest.before if _bears_on(step.use, new))
    external = [dep for step in gone.values() for dep in view.task(step.id).task.depends_on if dep not in gone]
    inherited = tuple(dict.fromkeys([*external, *(step.id for step in before)]))
    waiting = _first(
        (step for step in kept if _bears_on(step.use, new) or not gone.keys().isdisjoint(step.after)), kept
    )
    if not gone:
        return tuple(_added(_chain(way.actions, None, way, view, taken), inherited, waiting))
    if not way.actions:
        return (*_rewired(kept, gone, inherited, (), view), *_removed(gone.values(), view))
    if isinstance(view, DraftView) and all(view.task(i).root == i and i in view.new for i in gone):
        added = tuple(_added(_chain(way.actions, None, way, view, taken), inherited, waiting))
        last = (added[-1].task.id,)
        return (*added, *_rewired(kept, gone, last, (), view), *_removed(gone.values(), view))
    target = _target(way)
    chain = _chain(way.actions, target, way, view, taken)
    own = view.task(target.id).task.depends_on
    lead = () if own == inherited else (ModifyTask(task_id=target.id, fields={"depends_on": list(inherited)}),)
    return (
        *lead,
        ReplaceTask(task_id=target.id, tasks=chain),
        *_rewired(kept, {i: s for i, s in gone.items() if i != target.id}, (target.id,), waiting, view),
        *_removed((step for step in gone.values() if step.id != target.id), view),
    )


def merged(first: Sequence[PlanChange], more: Sequence[PlanChange], view: PlanView) -> Iterator[PlanChange]:
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


def _target(way: Way) -> Step:
    """The task for which the bridge stands: the one that failed, else the last one that it makes superfluous."""
    return next((step for step in way.gone if not step.usable), way.gone[-1])


def _chain(actions: Sequence[Action], target: Step | None, way: Way, view: Seen, taken: set[str]) -> tuple[Task, ...]:
    """New tasks for actions, each after the one before; like the task of which one is a repetition."""
    used = {action.tool for action in actions}
    steps = (step for step in (*way.rest.after, *way.rest.before) if step.tool in used)
    like = {use_key(step.tool, step.arguments): step for step in steps}
    tasks: list[Task] = []
    for action in actions:
        base = view.task(target.id).root if target is not None else action.tool
        new = view.fresh_id(base, taken)
        taken.add(new)
        after = (tasks[-1].id,) if tasks else ()
        same = like.get(action.key)
        if same is not None:
            tasks.append(view.task(same.id).task.model_copy(update={"id": new, "depends_on": after}))
        else:
            tasks.append(Task(id=new, tool=action.tool, arguments=action.arguments, depends_on=after))
    return tuple(tasks)


def _added(chain: Sequence[Task], inherited: tuple[str, ...], waiting: Sequence[Step]) -> Iterator[AddTask]:
    for index, task in enumerate(chain):
        last = index == len(chain) - 1
        new = task if index else task.model_copy(update={"depends_on": inherited})
        yield AddTask(task=new, before=tuple(step.id for step in waiting) if last else ())


def _rewired(
    kept: Iterable[Step], gone: dict[str, Step], instead: tuple[str, ...], waiting: Sequence[Step], view: Seen
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


def _removed(gone: Iterable[Step], view: Seen) -> Iterator[PlanChange]:
    for step in gone:
        if view.task(step.id).root == step.id:
            yield RemoveTask(task_id=step.id)
        else:  # what it stands for must be satisfied
            yield SkipTask(task_id=step.id, reason="the repair makes it superfluous")


def _together(actions: Sequence[Action]) -> Use:
    """What actions need, add and remove, any of them."""
    needs = frozenset(fact for action in actions for fact in action.needs)
    adds = frozenset(fact for action in actions for fact in action.adds)
    return Use(needs, adds, frozenset(fact for action in actions for fact in action.removes))


def _bears_on(one: Use, other: Use) -> bool:
    """Whether the order of two uses matters: one changes what the other needs or changes."""
    changed, touched = one.adds | one.removes, other.adds | other.removes
    return not (
        changed.isdisjoint(other.needs)
        and touched.isdisjoint(one.needs)
        and one.adds.isdisjoint(other.removes)
        and one.removes.isdisjoint(other.adds)
    )


def _first(chosen: Iterable[Step], steps: Sequence[Step]) -> list[Step]:
    """Those of the chosen steps that wait for no other of them."""
    wanted = {step.id for step in chosen if not step.running}
    behind: set[str] = set()
    first = []
    for step in steps:
        after = any(dep in wanted or dep in behind for dep in step.after)
        if after:
            behind.add(step.id)
        if step.id in wanted and not after:
            first.append(step)
    return first


def _last(chosen: Iterable[Step]) -> list[Step]:
    """Those of the chosen steps for which no other of them waits."""
    steps = list(chosen)
    needed = {dep for step in steps for dep in step.after}
    return [step for step in steps if step.id not in needed]
