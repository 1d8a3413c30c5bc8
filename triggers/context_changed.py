"""Notices changes of the context, or of the facts, on which something that still has to run depends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from replanning.errors import ExpressionError
from replanning.events import Body, ContextChanged, ContextUpdated, FactsObserved, Observation
from replanning.interfaces import PlanView, TaskState, TaskView
from replanning.triggers._facts import left_without, lost_for_goal

_OPEN = (
    TaskState.PENDING,
    TaskState.READY,
    TaskState.BACKOFF,
    TaskState.NEEDS_CONTINUATION,
    TaskState.FAILED,
    TaskState.BLOCKED,
)
"""States of tasks that still have to run. What runs now has its values already."""


class ContextChangedDetector:
    """`context-changed`: the context or the facts changed, and something that still has to run depends on it."""

    name = "context-changed"
    observes: ClassVar[tuple[type[Body], ...]] = (ContextUpdated, FactsObserved)

    def detect(self, observation: Observation, view: PlanView) -> Iterable[ContextChanged]:
        """At most one trigger, which names the tasks that depend on what changed."""
        if isinstance(observation, ContextUpdated):
            return _from_context((*observation.changes, *observation.removed), view)
        if isinstance(observation, FactsObserved):
            return (_from_facts if view.original.facts is None else _from_world)(observation.ceased, view)
        return ()


def _from_context(keys: tuple[str, ...], view: PlanView) -> Iterator[ContextChanged]:
    read = {key: [task for task in view.readers(key) if _concerned(task, view)] for key in keys}
    tasks = {task.id: None for readers in read.values() for task in readers}
    if not tasks:
        return
    named = tuple(key for key in keys if read[key])
    words = ", ".join(f"context.{key}" for key in named)
    yield ContextChanged(
        tasks=tuple(tasks),
        cause=",".join(sorted(named)),
        reason=f"{words} changed, and {_listed(tuple(tasks))}",
        keys=named,
    )


def _from_facts(ceased: tuple[str, ...], view: PlanView) -> Iterator[ContextChanged]:
    """What a fact that ceased means where the plan does not state its facts: little is known, so it is looked at alone."""
    needed = {fact: [task.id for task in left_without(fact, view)] for fact in ceased}
    lost = tuple(fact for fact in ceased if needed[fact] or lost_for_goal(fact, view))
    if not lost:
        return
    tasks = tuple(dict.fromkeys(task for fact in lost for task in needed[fact]))
    yield _lost(lost, tasks, tasks)


def _from_world(ceased: tuple[str, ...], view: PlanView) -> Iterator[ContextChanged]:
    """What facts that ceased mean for the plan as a whole: nothing, where the rest can be done and reaches the goal."""
    if not ceased:
        return  # what holds besides harms nothing
    world = view.world()
    if view.goal.stop_when_reached and frozenset(world.facts).issuperset(world.goal):
        return  # the run ends
    standing = world.standing()
    lacking = frozenset(standing.lacking())
    if lost := tuple(fact for fact in ceased if fact in lacking):
        yield _lost(lost, world.named(standing), tuple(step.id for step in standing.stuck))


def _lost(lost: tuple[str, ...], tasks: tuple[str, ...], lacking: tuple[str, ...]) -> ContextChanged:
    who = _listed(lacking) if lacking else "the goal needs it"
    return ContextChanged(
        tasks=tasks,
        cause=",".join(sorted(lost)),
        reason=f"{', '.join(lost[:5])} {'does' if len(lost) == 1 else 'do'} not hold any more, and {who}",
        facts=lost,
    )


def _concerned(task: TaskView, view: PlanView) -> bool:
    """Whether a reader still has to run, or was skipped and now would not be."""
    if task.state in _OPEN:
        return True
    if not task.unmet or task.task.when is None:
        return False
    try:
        return view.holds(task.task.when)
    except ExpressionError:
        return False


def _listed(tasks: tuple[str, ...]) -> str:
    names = ", ".join(repr(task) for task in tasks[:5]) + (", …" if len(tasks) > 5 else "")
    return f"{len(tasks)} task{'s' * (len(tasks) != 1)} depend{'s' * (len(tasks) == 1)} on it: {names}"
