"""Staleness: triggers whose cause no longer holds on the live plan, and changes that come too late for their tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from replanning.changes import PlanChange, target_task_ids
from replanning.journal.records import ContextChanged, ResourceChanged, Trigger
from replanning.live.entries import CONDITION_NOT_MET
from replanning.live.plan import LivePlan
from replanning.live.stale import stale_results
from replanning.live.states import FINISHED, STUCK, WAITING, TaskState
from replanning.live.view import strips_problem
from replanning.plan.types import TaskId

PERSISTENT_KINDS: Final = ("task-failed", "timeout", "resource-changed")
"""Kinds of trigger whose cause lasts until the plan is changed at the tasks concerned."""


def relevant_triggers(
    triggers: Sequence[Trigger], proposed: Iterable[Sequence[PlanChange]]
) -> Sequence[Trigger]:
    """Return the triggers that a decision about proposed changes settles; all of them if the changes concern none.

    The others are triggers of a persistent kind at tasks that no change names: their cause lasts, so they stay open.
    """
    subjects = {task_id for changes in proposed for task_id in target_task_ids(changes)}
    return [
        t for t in triggers if t.kind not in PERSISTENT_KINDS or not subjects.isdisjoint(t.tasks)
    ] or triggers


def without_begun(
    changes: Sequence[PlanChange], live: LivePlan, since: float
) -> tuple[PlanChange, ...]:
    """Return changes without those of tasks that have begun since a time, or were skipped by their conditions.

    All are returned if one of them does more than replace, modify, skip or retry one task, because such changes belong
    together.
    """
    begun: set[TaskId] = set()
    for entry in (
        live.entries[task_id] for task_id in target_task_ids(changes) if task_id in live.entries
    ):
        if entry.state is TaskState.RUNNING or entry.state in FINISHED:
            began = entry.log.count > 0 and entry.log.started_at >= since
            if began or entry.condition_revision == CONDITION_NOT_MET:
                begun.add(entry.id)
    separable = [
        change for change in changes if change.kind in ("replace", "modify", "skip", "retry")
    ]
    if not begun or len(separable) < len(changes):
        return tuple(changes)
    return tuple(change for change in separable if change.task_id not in begun)


def stale_reason(trigger: Trigger, live: LivePlan) -> str:
    """Return why a trigger no longer holds; empty if it does."""
    entries = [live.entries[task_id] for task_id in trigger.tasks if task_id in live.entries]
    if trigger.kind in ("task-failed", "timeout"):
        return (
            "" if any(entry.state in STUCK for entry in entries) else "the task is no longer failed"
        )
    if trigger.kind == "better-path-found":
        return (
            ""
            if any(entry.state in WAITING for entry in entries)
            else "none of its tasks waits any more"
        )
    if trigger.kind == "goal-unreachable" and trigger.revision != live.revision:
        return "the plan has changed since"
    if trigger.kind == "goal-unreachable":
        return "" if live.quiescent else "something can run again"
    if isinstance(trigger, ResourceChanged):
        tool = live.tools.get(trigger.name)
        if (
            tool.available
            if tool
            else all(
                live.scheduler.pool.can_ever_fit(live.scheduler.pool.demand(entry.task))
                for entry in entries
            )
        ):
            return "the resource is there again"
    if isinstance(trigger, ContextChanged) and trigger.goal:
        missing = (
            strips_problem(live).feasibility().missing_goal_facts
            if live.world.closed
            else live.missing_facts
        )
        return "" if missing or not trigger.facts else "the remaining tasks reach the goal"
    if isinstance(trigger, ContextChanged) and trigger.stale:
        return (
            ""
            if stale_results(live).keys() & set(trigger.stale)
            else "the results are not stale any more"
        )
    if trigger.kind in ("context-changed", "resource-changed") and entries:
        skipped = [entry for entry in entries if entry.state is TaskState.SKIPPED]
        if not skipped and all(entry.state in FINISHED for entry in entries):
            return "no remaining task depends on it"
    if isinstance(trigger, ContextChanged) and trigger.facts and live.world.closed:
        feasible = (
            strips_problem(live, tasks=trigger.tasks, facts=trigger.facts).feasibility().valid
        )
        return "the remaining tasks can be executed and reach the goal again" if feasible else ""
    return ""
