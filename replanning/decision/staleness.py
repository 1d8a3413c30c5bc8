"""Whether the plan has moved past a trigger, which is then dropped, and which triggers changes are about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from replanning.changes import PlanChange, target_task_ids
from replanning.journal.triggers import ContextChanged, ResourceChanged, Trigger
from replanning.live.facts import strips_problem
from replanning.live.plan import LivePlan
from replanning.live.states import FINISHED, STUCK

PERSISTENT_KINDS: Final = ("task-failed", "timeout", "resource-changed")
"""Kinds of trigger whose cause stays until the plan is changed where it lies."""


def relevant_triggers(triggers: Sequence[Trigger], proposed: Iterable[Sequence[PlanChange]]) -> Sequence[Trigger]:
    """The triggers that something proposed is about; all of them, where it is about none.

    What is decided about it decides nothing about the others, whose cause stays where it is.
    """
    subjects = {task_id for changes in proposed for task_id in target_task_ids(changes)}
    return [t for t in triggers if t.kind not in PERSISTENT_KINDS or not subjects.isdisjoint(t.tasks)] or triggers


def stale_reason(trigger: Trigger, live: LivePlan) -> str:
    """Why a trigger no longer holds; empty when it does."""
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
        skipped = [entry for entry in entries if entry.state == "SKIPPED"]
        if not skipped and all(entry.state in FINISHED for entry in entries):
            return "nothing that still has to run depends on it"
    if isinstance(trigger, ContextChanged) and trigger.facts and live.plan.facts is not None:
        return "what is left can be done and reaches the goal again" if _is_feasible(trigger, live) else ""
    return ""


def _is_feasible(trigger: ContextChanged, live: LivePlan) -> bool:
    return strips_problem(live, tasks=trigger.tasks, facts=trigger.facts).feasibility().valid


def _goal_reached_reason(trigger: ContextChanged, live: LivePlan) -> str:
    """Why what another goal lacked is no matter any more; empty where it is."""
    lacking = live.missing_facts if live.plan.facts is None else strips_problem(live).feasibility().missing_goal_facts
    return "" if lacking or not trigger.facts else "what is left reaches the goal"


def _is_still_missing(trigger: ResourceChanged, live: LivePlan) -> bool:
    tool = live.tools.get(trigger.name)
    if tool is not None:
        return not tool.available
    return any(not live.pool.can_ever_fit(live.pool.demand(live.entry(t).task)) for t in trigger.tasks if t in live)
