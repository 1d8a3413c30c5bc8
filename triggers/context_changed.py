"""Notices changes of the context, of the facts, or of the goal, for which what is left of the plan is not good."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from replanning.errors import ExpressionError
from replanning.journal import ContextChanged, ContextUpdated, FactsObserved, GoalChanged, Observation, RecordBody
from replanning.live import PlanView, TaskState, TaskView
from replanning.triggers._text import is_lost_for_goal, shorten, tasks_missing_fact

_UNFINISHED_STATES = (
    TaskState.PENDING,
    TaskState.READY,
    TaskState.BACKOFF,
    TaskState.NEEDS_CONTINUATION,
    TaskState.FAILED,
    TaskState.BLOCKED,
)
"""States of tasks that still have to run. What runs now has its values already."""

_TEXT_FIELDS = frozenset({"objective", "success_criteria"})


class ContextChangedDetector:
    """`context-changed`: the context or the facts changed, and something that still has to run depends on it.

    Also where the goal changed, and what is left of the plan does not reach it.
    """

    name = "context-changed"
    observes: ClassVar[tuple[type[RecordBody], ...]] = (ContextUpdated, FactsObserved, GoalChanged)

    def detect(self, observation: Observation, view: PlanView) -> Iterable[ContextChanged]:
        """At most one trigger, which names the tasks that depend on what changed."""
        if isinstance(observation, ContextUpdated):
            return _context_triggers((*observation.changes, *observation.removed), view)
        if isinstance(observation, FactsObserved):
            return (_fact_triggers if view.original_plan.facts is None else _world_triggers)(observation.ceased, view)
        return _goal_triggers(observation, view) if isinstance(observation, GoalChanged) else ()


def _goal_triggers(observation: GoalChanged, view: PlanView) -> Iterator[ContextChanged]:
    """What another goal means: nothing, where its facts show that the rest of the plan reaches it."""
    goal = view.goal
    if not goal.facts:
        if not _TEXT_FIELDS.isdisjoint(observation.changed):
            yield _goal_trigger(goal.objective, (), (), "no facts say whether the plan still reaches it")
        return
    world = view.strips_problem()
    if goal.stop_when_reached and frozenset(world.facts).issuperset(world.goal):
        return  # the run ends
    if not world.closed_world:
        lost = [fact for fact in goal.facts if fact not in view.facts and is_lost_for_goal(fact, view)]
        missing, tasks = tuple(lost), tuple[str, ...]()
    else:
        standing = world.feasibility()
        missing, tasks = standing.missing_goal_facts, world.tasks_related_to(standing.missing_goal_facts, standing)
    if missing:
        yield _goal_trigger(
            goal.objective, missing, tasks, f"what is left of the plan does not bring about {_join_facts(missing)}"
        )


def _goal_trigger(objective: str, missing: tuple[str, ...], tasks: tuple[str, ...], why: str) -> ContextChanged:
    return ContextChanged(
        tasks=tasks,
        cause=f"goal:{','.join(sorted(missing)) or objective}",
        reason=shorten(f"the goal changed, and {why}"),
        facts=missing,
        goal=True,
    )


def _context_triggers(keys: tuple[str, ...], view: PlanView) -> Iterator[ContextChanged]:
    read = {key: [task for task in view.context_readers(key) if _is_affected(task, view)] for key in keys}
    tasks = {task.id: None for readers in read.values() for task in readers}
    if not tasks:
        return
    named = tuple(key for key in keys if read[key])
    words = ", ".join(f"context.{key}" for key in named)
    yield ContextChanged(
        tasks=tuple(tasks),
        cause=",".join(sorted(named)),
        reason=f"{words} changed, and {_dependents_phrase(tuple(tasks))}",
        keys=named,
    )


def _fact_triggers(ceased: tuple[str, ...], view: PlanView) -> Iterator[ContextChanged]:
    """What a fact that ceased means where the plan does not state its facts: little is known, so it is looked at alone."""
    needed = {fact: [task.id for task in tasks_missing_fact(fact, view)] for fact in ceased}
    lost = tuple(fact for fact in ceased if needed[fact] or is_lost_for_goal(fact, view))
    if not lost:
        return
    tasks = tuple(dict.fromkeys(task for fact in lost for task in needed[fact]))
    yield _lost_facts_trigger(lost, tasks, tasks)


def _world_triggers(ceased: tuple[str, ...], view: PlanView) -> Iterator[ContextChanged]:
    """What facts that ceased mean for the plan as a whole: nothing, where the rest can be done and reaches the goal."""
    if not ceased:
        return  # what holds besides harms nothing
    if view.goal.stop_when_reached and view.facts >= frozenset(view.goal.facts):
        return  # the run ends
    world = view.strips_problem(facts=ceased)
    standing = world.feasibility()
    lacking = frozenset(standing.unmet_facts())
    if lost := tuple(fact for fact in ceased if fact in lacking):
        yield _lost_facts_trigger(
            lost, world.tasks_related_to_stuck(standing), tuple(step.id for step in standing.stuck)
        )


def _lost_facts_trigger(lost: tuple[str, ...], tasks: tuple[str, ...], lacking: tuple[str, ...]) -> ContextChanged:
    who = _dependents_phrase(lacking) if lacking else "the goal needs it"
    return ContextChanged(
        tasks=tasks,
        cause=",".join(sorted(lost)),
        reason=f"{_join_facts(lost)} {'does' if len(lost) == 1 else 'do'} not hold any more, and {who}",
        facts=lost,
    )


def _is_affected(task: TaskView, view: PlanView) -> bool:
    """Whether a reader still has to run, or was skipped and now would not be."""
    if task.state in _UNFINISHED_STATES:
        return True
    if not task.condition_not_met or task.task.when is None:
        return False
    try:
        return view.evaluate(task.task.when)
    except ExpressionError:
        return False


def _join_facts(facts: tuple[str, ...]) -> str:
    return ", ".join(facts[:5]) + (", …" if len(facts) > 5 else "")


def _dependents_phrase(tasks: tuple[str, ...]) -> str:
    names = ", ".join(repr(task) for task in tasks[:5]) + (", …" if len(tasks) > 5 else "")
    return f"{len(tasks)} task{'s' * (len(tasks) != 1)} depend{'s' * (len(tasks) == 1)} on it: {names}"
