"""Staleness of triggers: a trigger whose cause no longer holds is dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from replanning.changes import PlanChange, target_task_ids
from replanning.journal.triggers import ContextChanged, ResourceChanged, Trigger
from replanning.live.facts import strips_problem
from replanning.live.plan import LivePlan
from replanning.live.states import FINISHED, STUCK, TaskState

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
    entries = [live.entry(task_id) for task_id in trigger.tasks if task_id in live]
    if trigger.kind in ("task-failed", "timeout"):
        return "" if any(entry.state in STUCK for entry in entries) else "the task is no longer failed"
    if trigger.kind == "goal-unreachable":
        if trigger.revision != live.revision:
            return "the plan has changed since"
        return "" if live.quiescent else "something can run again"
    if trigger.kind == "better-path-found" and trigger.revision != live.revision:
        return "the plan has changed since"
    if isinstance(trigger, ResourceChanged) and not _is_still_missing(trigger, live):
        return "the resource is there again"
    if isinstance(trigger, ContextChanged) and trigger.goal:
        return _goal_reached_reason(trigger, live)
    if trigger.kind in ("context-changed", "resource-changed") and entries:
        skipped = [entry for entry in entries if entry.state is TaskState.SKIPPED]
        if not skipped and all(entry.state in FINISHED for entry in entries):
            return "no remaining task depends on it"
    if isinstance(trigger, ContextChanged) and trigger.facts and live.plan.facts is not None:
        feasible = strips_problem(live, tasks=trigger.tasks, facts=trigger.facts).feasibility().valid
        return "the remaining tasks can be executed and reach the goal again" if feasible else ""
    return ""


def _goal_reached_reason(trigger: ContextChanged, live: LivePlan) -> str:
    missing = live.missing_facts
    if live.plan.facts is not None:
        missing = strips_problem(live).feasibility().missing_goal_facts
    return "" if missing or not trigger.facts else "the remaining tasks reach the goal"


def _is_still_missing(trigger: ResourceChanged, live: LivePlan) -> bool:
    tool = live.tools.get(trigger.name)
    if tool is not None:
        return not tool.available
    return any(not live.pool.can_ever_fit(live.pool.demand(live.entry(t).task)) for t in trigger.tasks if t in live)
