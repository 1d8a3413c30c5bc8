"""Staleness: triggers whose cause is gone, and changes that come too late for their tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from replanning.changes import PlanChange, target_task_ids
from replanning.journal.records import ContextChanged, ResourceChanged, Trigger
from replanning.live.entries import CONDITION_NOT_MET, TaskEntry
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
    """Return the triggers that a decision about proposed changes settles.

    Triggers of a persistent kind at tasks that no change names stay open, because their cause
    lasts. If the changes concern no trigger at all, the decision settles all of them: otherwise
    the same triggers would be decided about for ever.
    """
    subjects: set[TaskId] = set()
    for changes in proposed:
        subjects.update(target_task_ids(changes))
    settled = []
    for trigger in triggers:
        if trigger.kind not in PERSISTENT_KINDS or not subjects.isdisjoint(trigger.tasks):
            settled.append(trigger)
    return settled or triggers


def drop_started(
    changes: Sequence[PlanChange], live: LivePlan, since: float
) -> tuple[PlanChange, ...]:
    """Return changes without those of tasks that have started since a time, or were skipped.

    Skipped means: by their conditions. All changes are returned if one of them does more than
    replace, modify, skip or retry one task, because such changes belong together.
    """
    started = set()
    known = live.entries
    targets = target_task_ids(changes)
    for entry in [known[task_id] for task_id in targets if task_id in known]:
        if entry.state is not TaskState.RUNNING and entry.state not in FINISHED:
            continue
        # An attempt from before `since` is the one that the changes were made for.
        has_started = entry.log.count > 0 and entry.log.started_at >= since
        if has_started or entry.condition_revision == CONDITION_NOT_MET:
            started.add(entry.id)
    if not started:
        return tuple(changes)
    kept = []
    for change in changes:
        if change.kind not in ("replace", "modify", "skip", "retry"):
            return tuple(changes)
        if change.task_id not in started:
            kept.append(change)
    return tuple(kept)


def stale_reason(trigger: Trigger, live: LivePlan) -> str:
    """Return why a trigger no longer holds; empty if it does.

    Each kind of trigger states something about the plan when it fires. It is stale once the plan
    contradicts that statement, because a replan would then repair what is no longer broken.
    """
    known = live.entries
    entries = [known[task_id] for task_id in trigger.tasks if task_id in known]
    states = {entry.state for entry in entries}
    match trigger.kind:
        case "task-failed" | "timeout":
            if states.isdisjoint(STUCK):
                return "the task is no longer failed"
            return ""
        case "better-path-found":
            if states.isdisjoint(WAITING):
                return "none of its tasks waits any more"
            return ""
        case "goal-unreachable":
            if trigger.revision != live.revision:
                return "the plan has changed since"
            if not live.quiescent:
                return "something can run again"
            return ""
    # A skipped task is finished too, but the change may be what lets it run after all.
    finished = bool(states) and states <= FINISHED and TaskState.SKIPPED not in states
    if isinstance(trigger, ResourceChanged):
        if _is_available(trigger, entries, live):
            return "the resource is there again"
        if finished:
            return "no remaining task depends on it"
    if isinstance(trigger, ContextChanged):
        return _stale_context_reason(trigger, live, finished)
    return ""


def _stale_context_reason(trigger: ContextChanged, live: LivePlan, finished: bool) -> str:
    if trigger.goal:
        if trigger.facts and not _is_goal_missing(live):
            return "the remaining tasks reach the goal"
        return ""
    if trigger.stale:
        if stale_results(live).keys().isdisjoint(trigger.stale):
            return "the results are not stale any more"
        return ""
    if finished:
        return "no remaining task depends on it"
    # Only a plan that states its facts can prove that a changed fact does no harm.
    if trigger.facts and live.world.closed:
        problem = strips_problem(live, tasks=trigger.tasks, facts=trigger.facts)
        if problem.feasibility().valid:
            return "the remaining tasks can be executed and reach the goal again"
    return ""


def _is_available(trigger: ResourceChanged, entries: list[TaskEntry], live: LivePlan) -> bool:
    tool = live.tools.get(trigger.name)
    if tool is not None:
        return tool.available
    # A pool may be smaller than before and still be large enough for the tasks.
    pool = live.scheduler.pool
    return all(pool.can_ever_fit(pool.demand(entry.task)) for entry in entries)


def _is_goal_missing(live: LivePlan) -> bool:
    if live.world.closed:
        return bool(strips_problem(live).feasibility().missing_goal_facts)
    return bool(live.missing_facts)
