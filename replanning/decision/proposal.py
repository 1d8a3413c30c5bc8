"""Proposals: alternatives, analysed once for all the checks that they must pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from replanning.changes import (
    Alternative,
    ModifyTask,
    PlanChange,
    ReplaceTask,
    target_task_ids,
)
from replanning.decision.confidence import tasks_to_run
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
    if any(is_redacted(value) for _, value in arguments):
        # Providers see masks in place of secrets, and repeat them.
        changes = restore_masks(alternative.changes, live, redactor)
        alternative = alternative.model_copy(update={"changes": changes})
        arguments = tuple(change_arguments(changes))

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
        ChangeRejected: a mask stands where none was shown, or a name looks like a secret.
    """
    problems = redactor.name_problems(changes)
    if problems:
        raise ChangeRejected(problems)
    restored = restore_masks(changes, live, redactor)
    masked: dict[str, None] = {}
    for task_id, arguments in change_arguments(restored):
        if is_redacted(arguments):
            masked[repr(task_id)] = None
    if masked:
        advice = "leave it where it was, or let a tool refer to the value as {env:NAME}"
        why = f"{MASK} stands for a value that is not shown: {advice}"
        raise ChangeRejected([Problem("", f"{why}, in the arguments of {', '.join(masked)}")])
    return restored


def restore_masks(
    changes: Sequence[PlanChange], live: LivePlan, redactor: Redactor
) -> tuple[PlanChange, ...]:
    """Return changes with masks replaced by the values that they hide, where these are known.

    Providers and people see the plan with masks, and repeat them. A mask is restored if the task,
    or one that it replaced, has a value at the same path of its arguments that is shown like this.
    """
    restored: list[PlanChange] = []
    for change in changes:
        if isinstance(change, ReplaceTask):
            restored.append(_restore_replacement(change, live, redactor))
        elif isinstance(change, ModifyTask):
            restored.append(_restore_modification(change, live, redactor))
        else:
            restored.append(change)
    return tuple(restored)


def _restore_replacement(change: ReplaceTask, live: LivePlan, redactor: Redactor) -> ReplaceTask:
    known = _known_arguments(change.task_id, live)
    tasks = []
    for task in change.tasks:
        if is_redacted(task.arguments):
            arguments = _restore_value(task.arguments, known, redactor)
            tasks.append(task.model_copy(update={"arguments": arguments}))
        else:
            tasks.append(task)
    return change.model_copy(update={"tasks": tuple(tasks)})


def _restore_modification(change: ModifyTask, live: LivePlan, redactor: Redactor) -> ModifyTask:
    stated = change.fields.get("arguments")
    if not is_redacted(stated):
        return change
    known = _known_arguments(change.task_id, live)
    arguments = _restore_value(stated, known, redactor)
    return change.model_copy(update={"fields": {**change.fields, "arguments": arguments}})


def _known_arguments(task_id: TaskId, live: LivePlan) -> list[JsonValue]:
    """Return the arguments of a task, and of those that it replaced, the latest first."""
    entry = live.entries.get(task_id)
    if entry is None:
        return []
    return [earlier.task.arguments for earlier in reversed(entry.lineage())]


def _restore_value(shown: JsonValue, known: Sequence[JsonValue], redactor: Redactor) -> JsonValue:
    """Return a value with masked parts replaced by parts of known values that are shown alike."""
    if not is_redacted(shown):
        return shown
    for original in known:
        if redactor.value(original) == shown:
            return original
    # The value as a whole is new, but its parts may be known.
    if isinstance(shown, dict):
        members: dict[str, JsonValue] = {}
        for key, item in shown.items():
            members[key] = _restore_member(key, item, known, redactor)
        return members
    if isinstance(shown, list):
        items: list[JsonValue] = []
        for index, item in enumerate(shown):
            originals = []
            for value in known:
                if isinstance(value, list) and index < len(value):
                    originals.append(value[index])
            items.append(_restore_value(item, originals, redactor))
        return items
    return shown


def _restore_member(
    key: str, shown: JsonValue, known: Sequence[JsonValue], redactor: Redactor
) -> JsonValue:
    originals = []
    for value in known:
        if isinstance(value, dict) and key in value:
            originals.append(value[key])
    for original in originals:
        # With the key, because its name may be why the value is masked.
        if redactor.value({key: original}) == {key: shown}:
            return original
    return _restore_value(shown, originals, redactor)
