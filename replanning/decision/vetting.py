"""Checks of an alternative before it is scored: secrets, limits, earlier answers of people, and facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from replanning.changes import AbortRun, Alternative, PlanChange, target_task_ids
from replanning.decision.ledger import Ledger
from replanning.errors import ChangeRejected, Problem
from replanning.journal.triggers import ContextChanged, GoalUnreachable, Trigger
from replanning.live.draft import Draft
from replanning.live.facts import strips_problem
from replanning.live.plan import LivePlan
from replanning.llm.quoting import is_truncated
from replanning.plan.json_values import iter_strings
from replanning.plan.redaction import Redactor
from replanning.plan.secrets import MASK
from replanning.plan.tasks import TaskBody
from replanning.plan.types import JsonValue, TaskId
from replanning.settings import LimitSettings

INFEASIBLE = "the plan could not be carried out"
"""Beginning of the reason for which an alternative is rejected on the facts."""


def redact_changes(changes: Sequence[PlanChange], redactor: Redactor) -> tuple[PlanChange, ...]:
    """Return changes without secrets, as a record holds them.

    Raises:
        ChangeRejected: an argument that a task needs would be missing.
    """
    clean = tuple(map(redactor.document, changes))
    if lost := check_secrets(clean, changes):
        raise ChangeRejected([Problem("", lost)])
    return clean


def check_secrets(clean: Sequence[PlanChange], proposed: Sequence[PlanChange]) -> str:
    """Return why redacted changes cannot be executed as they were proposed; empty if nothing was redacted."""
    uses = zip(_change_arguments(clean), _change_arguments(proposed), strict=True)
    names = dict.fromkeys(name for (name, kept), (_, stated) in uses if kept != stated)
    if not names:
        return ""
    return (
        f"what looks like a secret cannot be kept: do without it in the arguments of {', '.join(map(repr, names))}, "
        "or let a tool refer to it, as {env:NAME}"
    )


def check_masked(changes: Sequence[PlanChange], live: LivePlan) -> str:
    """Return why changes would pass marks of masked or truncated text to tools; else empty.

    A replacement may repeat a text with such a mark if the original task already had it.
    """
    masked = [(name, texts) for name, stated in _change_arguments(changes) if (texts := _masked_texts(stated))]
    if not masked:
        return ""
    old = (live.entry(task_id).task for task_id in target_task_ids(tuple(changes)) if task_id in live)
    original = {text for task in old for arguments in _task_arguments(task) for text in _masked_texts(arguments)}
    names = dict.fromkeys(name for name, texts in masked if not original.issuperset(texts))
    if not names:
        return ""
    listed = ", ".join(map(repr, names))
    return f"{MASK} and [cut: …] stand for text that is not shown: do without them in the arguments of {listed}"


def _masked_texts(arguments: JsonValue) -> list[str]:
    return [text for text in iter_strings(arguments) if MASK in text or is_truncated(text)]


def _change_arguments(changes: Sequence[PlanChange]) -> Iterator[tuple[TaskId, JsonValue]]:
    """Yield the arguments in changes, each with the id of its task."""
    for change in changes:
        if change.kind == "modify":
            yield from ((change.task_id, arguments) for arguments in _field_arguments(change.fields))
        for task in change.tasks if change.kind == "replace" else (change.task,) if change.kind == "add" else ():
            if task.arguments or task.fallbacks or task.undo is not None:
                yield from ((task.id, arguments) for arguments in _task_arguments(task))


def _task_arguments(body: TaskBody) -> Iterator[JsonValue]:
    """Yield the arguments of a task, of its fallbacks and of its undo."""
    yield body.arguments
    for other in (*body.fallbacks, *([body.undo] if body.undo is not None else [])):
        yield from _task_arguments(other)


def _field_arguments(fields: JsonValue) -> Iterator[JsonValue]:
    """Yield the same arguments from fields that are not validated yet."""
    if isinstance(fields, dict):
        yield fields.get("arguments")
        others = fields.get("fallbacks")
        for other in (*(others if isinstance(others, list) else ()), fields.get("undo")):
            yield from _field_arguments(other)


def check_feasible(draft: Draft, triggers: Sequence[Trigger], live: LivePlan) -> str:
    """Return why a plan with stated facts could not be executed after changes, or not reach its goal; else empty.

    Faults elsewhere, which have nothing to do with the triggers, are not held against the changes.
    """
    if live.plan.facts is None or any(isinstance(change, AbortRun) for change in draft.changes):
        return ""
    named = {task_id for trigger in triggers for task_id in trigger.tasks}
    lost = {fact for trigger in triggers for fact in _trigger_facts(trigger)}
    world = strips_problem(live, draft, tasks=named, facts=lost)
    after = world.feasibility()
    if after.valid:
        return ""
    before = strips_problem(live, tasks=[*named, *(step.id for step in world.steps)], facts=lost).feasibility()
    apart = bool(named) or any(isinstance(trigger, ContextChanged) and trigger.goal for trigger in triggers)
    elsewhere = {step.id for step in before.stuck} - named if apart else set()
    left = after.excluding(elsewhere, frozenset(before.missing_goal_facts) - lost)
    return "" if left.valid else f"{INFEASIBLE}: {left.explain()}"


def _trigger_facts(trigger: Trigger) -> tuple[str, ...]:
    if isinstance(trigger, ContextChanged):
        return trigger.facts
    return trigger.missing_facts if isinstance(trigger, GoalUnreachable) else ()


def was_declined(alternative: Alternative, triggers: Sequence[Trigger], live: LivePlan, ledger: Ledger) -> bool:
    """Return whether a person kept the plan rather than do this; a plan that is stuck for that reason is nothing new."""
    at = ledger.declined_at.get(alternative.fingerprint())
    if at is None or any(trigger.kind != "goal-unreachable" for trigger in triggers):
        return False
    return all(live.entry(t).started_at <= at for t in target_task_ids(alternative.changes) if t in live)


def exceeded_limit(alternative: Alternative, live: LivePlan, ledger: Ledger, limits: LimitSettings) -> str:
    """Return in words the limit that an alternative would exceed; empty when none."""
    per_run, per_lineage = limits.replans_per_run, limits.replans_per_lineage
    # Since the providers were asked, a person may have approved one.
    if per_run is not None and ledger.applied_count >= per_run:
        return f"the limit of {per_run} replans per run is reached"
    for task_id in target_task_ids(alternative.changes):
        root = live.entries[task_id].root if task_id in live.entries else task_id
        if ledger.replans_by_root.get(root, 0) >= per_lineage:
            return f"the limit of {per_lineage} replans per lineage is reached for {root!r}"
    return ""
