"""Proposals: alternatives, analysed once for all the checks that they must pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from replanning.changes import (
    Alternative,
    PlanChange,
    target_task_ids,
)
from replanning.decision.confidence import tasks_to_run
from replanning.decision.masks import MaskRestorer
from replanning.decision.staleness import drop_started
from replanning.errors import ChangeRejected, Problem
from replanning.live.draft import Draft
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.view import PlanView
from replanning.plan.json_values import is_redacted
from replanning.plan.tasks import Task, TaskBody
from replanning.plan.types import JsonValue, TaskId
from replanning.secrets import MASK, Redactor

TaskArguments = tuple[TaskId, JsonValue]
"""The arguments of a task, of one of its fallbacks or of its undo, with the id of the task."""


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """An alternative, analysed for one version of the plan.

    Every check asks which tasks the changes concern, with which arguments, and which tasks would
    run. The answers are computed here once, and are out of date as soon as the plan has another
    version.

    Attributes:
        proposed: the alternative as its provider made it.
        alternative: the part that is considered: without the changes of tasks that have begun
            meanwhile, and with true values where the provider was shown masks.
        changes: the changes of `alternative`.
        name_problems: names in the changes that look like secrets. Names are never masked, and
            alternatives are on record even if they are rejected, so `changes` is empty then.
        mask_problems: why secrets of earlier tasks do not return to the new ones.
        targets: the existing tasks that the changes concern, in order.
        entries: the targets that the plan has.
        arguments: the arguments in the changes.
        fingerprint: hash of the changes, equal for duplicates.
        draft: the changes, staged on the plan.
        tasks_to_run: the tasks that would run because of the changes; empty if they do not fit.
        live: the plan.
        view: the plan, for reading.
        version: the version of the plan for which all of this holds.
    """

    proposed: Alternative
    alternative: Alternative
    changes: tuple[PlanChange, ...]
    name_problems: tuple[Problem, ...]
    mask_problems: tuple[str, ...]
    targets: tuple[TaskId, ...]
    entries: tuple[TaskEntry, ...]
    arguments: tuple[TaskArguments, ...]
    fingerprint: str
    draft: Draft
    tasks_to_run: tuple[Task, ...]
    live: LivePlan
    view: PlanView
    version: int


def analyse(
    proposed: Alternative, live: LivePlan, redactor: Redactor, *, asked_at: float
) -> Proposal:
    """Return a proposal for the plan as it is now.

    Args:
        proposed: the alternative.
        live: the plan.
        redactor: recognises names that look like secrets, and masks.
        asked_at: time of the request in seconds since the epoch; what has begun since is left out.
    """
    alternative = proposed
    rest = drop_started(proposed.changes, live, asked_at)
    if rest and len(rest) < len(proposed.changes):
        # The estimate was made for all of the changes.
        update = {
            "changes": rest,
            "reason": f"{proposed.reason} (without what has begun meanwhile)",
            "expected_cost": None,
        }
        alternative = proposed.model_copy(update=update)
    name_problems = redactor.name_problems(alternative.changes)
    if name_problems:
        alternative = alternative.model_copy(update={"changes": ()})

    arguments = tuple(change_arguments(alternative.changes))
    masks = MaskRestorer(alternative.changes, live, redactor)
    mask_problems = masks.check_moved_tools()
    if any(is_redacted(value) for _, value in arguments):
        # Providers see masks in place of secrets, and repeat them.
        alternative = alternative.model_copy(update={"changes": masks.restore()})
        arguments = tuple(change_arguments(alternative.changes))
        if any(is_redacted(value) for _, value in arguments):
            mask_problems += masks.problems

    changes = tuple(alternative.changes)
    targets = target_task_ids(changes)
    entries = [live.entries[task_id] for task_id in targets if task_id in live.entries]
    draft = Draft(live, changes)
    view = PlanView(live)
    run: list[Task] = []
    # Changes that do not fit may name tasks that do not exist, and leave nothing to look at.
    if not draft.problems:
        run = tasks_to_run(changes, view)

    return Proposal(
        proposed=proposed,
        alternative=alternative,
        changes=changes,
        name_problems=tuple(name_problems),
        mask_problems=tuple(mask_problems),
        targets=targets,
        entries=tuple(entries),
        arguments=arguments,
        fingerprint=alternative.fingerprint(),
        draft=draft,
        tasks_to_run=tuple(run),
        live=live,
        view=view,
        version=live.version,
    )


# Arguments


def change_arguments(changes: Sequence[PlanChange]) -> Iterator[TaskArguments]:
    """Yield the arguments in changes, each with the id of its task."""
    for change in changes:
        tasks: Sequence[Task] = ()
        match change.kind:
            case "modify":
                for arguments in _field_arguments(change.fields):
                    yield change.task_id, arguments
            case "replace":
                tasks = change.tasks
            case "add":
                tasks = (change.task,)
        for task in tasks:
            # Most tasks have none of these, and then there is nothing to look at.
            if task.arguments or task.fallbacks or task.undo is not None:
                for arguments in task_arguments(task):
                    yield task.id, arguments


def task_arguments(body: TaskBody) -> Iterator[JsonValue]:
    """Yield the arguments of a task, of its fallbacks and of its undo."""
    yield body.arguments
    for fallback in body.fallbacks:
        yield from task_arguments(fallback)
    if body.undo is not None:
        yield from task_arguments(body.undo)


def _field_arguments(fields: JsonValue) -> Iterator[JsonValue]:
    """Yield the same arguments from fields that are not validated yet."""
    if not isinstance(fields, dict):
        return
    yield fields.get("arguments")
    fallbacks = fields.get("fallbacks")
    if isinstance(fallbacks, list):
        for fallback in fallbacks:
            yield from _field_arguments(fallback)
    yield from _field_arguments(fields.get("undo"))


# Masks


def accept_changes(
    changes: Sequence[PlanChange], live: LivePlan, redactor: Redactor
) -> tuple[PlanChange, ...]:
    """Return a person's changes, with true values where the person was shown masks.

    Raises:
        ChangeRejected: a mask stands for no secret that may return there, or a name looks like a
            secret.
    """
    problems = redactor.name_problems(changes)
    if problems:
        raise ChangeRejected(problems)
    masks = MaskRestorer(changes, live, redactor)
    restored = masks.restore()
    masked: dict[str, None] = {}
    for task_id, arguments in change_arguments(restored):
        if is_redacted(arguments):
            masked[repr(task_id)] = None
    if masked:
        advice = "leave it where it was, or let a tool refer to the value as {env:NAME}"
        why = f"{MASK} stands for a value that is not shown: {advice}"
        reasons = [f"{why}, in the arguments of {', '.join(masked)}", *masks.problems]
        raise ChangeRejected([Problem("", "; ".join(reasons))])
    return restored
