"""Staleness of triggers: whether the cause of a trigger still holds on the live plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from replanning.changes import PlanChange, target_task_ids
from replanning.journal.records import ContextChanged, ResourceChanged, Trigger
from replanning.live.plan import LivePlan
from replanning.live.states import FINISHED, STUCK, TaskState
from replanning.live.view import strips_problem

PERSISTENT_KINDS: Final = ("task-failed", "timeout", "resource-changed")
"""Kinds of trigger whose cause lasts until the plan is changed at the tasks concerned."""


def relevant_triggers(triggers: Sequence[Trigger], proposed: Iterable[Sequence[PlanChange]]) -> Sequence[Trigger]:
    """Return the triggers that proposed changes concern; all of them if they concern none.

    A decision about the changes leaves the other triggers undecided, because their cause lasts.
    """
    subjects = {task_id for changes in proposed for task_id in target_task_ids(changes)}
    return [t for t in triggers if t.kind not in PERSISTENT_KINDS or not subjects.isdisjoint(t.tasks)] or triggers


def stale_reason(trigger: Trigger, live: LivePlan) -> str:
    """Return why a trigger no longer holds; empty if it does."""
    entries = [live.entries[task_id] for task_id in trigger.tasks if task_id in live.entries]
    if trigger.kind in ("task-failed", "timeout"):
        return "" if any(entry.state in STUCK for entry in entries) else "the task is no longer failed"
    if trigger.kind in ("goal-unreachable", "better-path-found") and trigger.revision != live.revision:
        return "the plan has changed since"
    if trigger.kind == "goal-unreachable":
        return "" if live.quiescent else "something can run again"
    if isinstance(trigger, ResourceChanged):
        tool = live.tools.get(trigger.name)
        if tool.available if tool else all(live.pool.can_ever_fit(live.pool.demand(entry.task)) for entry in entries):
            return "the resource is there again"
    if isinstance(trigger, ContextChanged) and trigger.goal:
        missing = strips_problem(live).feasibility().missing_goal_facts if live.closed_world else live.missing_facts
        return "" if missing or not trigger.facts else "the remaining tasks reach the goal"
    if trigger.kind in ("context-changed", "resource-changed") and entries:
        skipped = [entry for entry in entries if entry.state is TaskState.SKIPPED]
        if not skipped and all(entry.state in FINISHED for entry in entries):
            return "no remaining task depends on it"
    if isinstance(trigger, ContextChanged) and trigger.facts and live.closed_world:
        feasible = strips_problem(live, tasks=trigger.tasks, facts=trigger.facts).feasibility().valid
        return "the remaining tasks can be executed and reach the goal again" if feasible else ""
    return ""
