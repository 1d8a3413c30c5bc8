"""Typed edits of a live plan, and alternatives made of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from replanning.errors import ChangeRejected, Problem
from replanning.plan.checks import nested_bodies
from replanning.plan.elements import Elements, element_ids
from replanning.plan.messages import (
    brief_repr,
    did_you_mean,
    first_problems,
    format_path,
    join_parts,
    validation_problems,
)
from replanning.plan.tasks import Items, Name, StrictModel, Task, to_seconds
from replanning.plan.types import JsonObject, JsonValue, TaskId

__all__ = [
    "AbortRun",
    "AddTask",
    "Alternative",
    "CancelTask",
    "ExpandTask",
    "IncludePlan",
    "ModifyTask",
    "PlanChange",
    "RemoveTask",
    "ReorderTasks",
    "ReplaceTask",
    "RetryTask",
    "SkipTask",
    "dump_change",
    "parse_changes",
]


class _Change(StrictModel):
    @classmethod
    def _construction_error(cls, error: ValidationError) -> ChangeRejected:
        return ChangeRejected(validation_problems(error, cls, root=cls.__name__))


class AddTask(_Change):
    """Add a task; the tasks in `before` will wait for it."""

    kind: Literal["add"] = "add"
    task: Task
    before: Items[TaskId] = ()


class RemoveTask(_Change):
    """Remove a task that has not started and has no dependents that stay."""

    kind: Literal["remove"] = "remove"
    task_id: TaskId


class ReplaceTask(_Change):
    """Replace a task by one task or a sub-plan.

    The roots of the sub-plan inherit the dependencies of the original. Dependents of the original
    wait for the sinks of the sub-plan and find their results under the original's id.
    """

    kind: Literal["replace"] = "replace"
    task_id: TaskId
    tasks: Annotated[Items[Task], Field(min_length=1)]


class ExpandTask(_Change):
    """Carry a task out for each element of a list: by one task each, in the order of the list.

    Its result is the list of their results. `keys` name the tasks; without keys they are numbered
    from 0. A task with `for_each` is expanded automatically once its list is known.
    """

    kind: Literal["expand"] = "expand"
    task_id: TaskId
    items: Items[JsonValue]
    keys: Items[Name] | None = None

    @property
    def elements(self) -> Elements:
        """The elements with their keys."""
        keys = None
        if self.keys is not None:
            keys = tuple(self.keys)
        return Elements(tuple(self.items), keys)


class IncludePlan(_Change):
    """Execute the plan that a task includes in its place; automatic once the task may start.

    `values` are the values of the parameters of the included plan.
    """

    kind: Literal["include"] = "include"
    task_id: TaskId
    values: JsonObject = Field(default_factory=dict)


class ModifyTask(_Change):
    """Change fields of a task.

    A finished task allows only `name`, `goal`, `metadata` and `undo_on_replace`. Changes of an
    expanded task apply to its waiting elements.
    """

    kind: Literal["modify"] = "modify"
    task_id: TaskId
    fields: Annotated[JsonObject, Field(min_length=1)]


class ReorderTasks(_Change):
    """Start these waiting tasks in this order, in the positions that they have together."""

    kind: Literal["reorder"] = "reorder"
    order: Annotated[Items[TaskId], Field(min_length=1)]


class RetryTask(_Change):
    """Run a task again, after `delay` seconds.

    This also revives a task that was removed, skipped, cancelled or replaced.
    """

    kind: Literal["retry"] = "retry"
    task_id: TaskId
    delay: Annotated[float, Field(ge=0), BeforeValidator(to_seconds)] = 0.0


class SkipTask(_Change):
    """Skip a task: its dependents may run, without an output from it.

    With `done`, a person states that its call took effect, or has done it by hand.
    """

    kind: Literal["skip"] = "skip"
    task_id: TaskId
    reason: str = ""
    done: bool = False


class CancelTask(_Change):
    """Stop a task, even a running one; its dependents cannot run."""

    kind: Literal["cancel"] = "cancel"
    task_id: TaskId
    reason: str = ""


class AbortRun(_Change):
    """Stop the whole run; with `undo`, only after its effects are taken back.

    Undoing works like `PlanRun.undo`. It is rejected if no task can take an effect back, or if
    everything is being taken back already.
    """

    kind: Literal["abort"] = "abort"
    reason: str = ""
    undo: bool = False


PlanChange = Annotated[
    AddTask
    | RemoveTask
    | ReplaceTask
    | ExpandTask
    | IncludePlan
    | ModifyTask
    | ReorderTasks
    | RetryTask
    | SkipTask
    | CancelTask
    | AbortRun,
    Field(discriminator="kind"),
]
"""One change of a plan, identified by its `kind`."""


class Alternative(_Change):
    """Changes proposed by a source, with its reason and its confidence (0 to 1).

    `expected_cost` and `expected_duration` (seconds) are estimates of the source. A source that
    finds the goal unreachable proposes no changes and sets `unreachable`. `ask` is a reason why a
    person must agree at any confidence.
    """

    changes: Items[PlanChange]
    reason: str
    confidence: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    source: str = ""
    expected_cost: float | None = Field(default=None, ge=0)
    expected_duration: Annotated[float, Field(ge=0), BeforeValidator(to_seconds)] | None = None
    unreachable: Literal["proven-unreachable", "not-found-within-bound"] | None = None
    ask: str = ""

    def fingerprint(self) -> str:
        """Return a hash of the changes that ignores the ids of new tasks; equal for duplicates."""
        return changes_hash(self.changes)


def target_task_ids(changes: Sequence[PlanChange]) -> tuple[TaskId, ...]:
    """Return the existing tasks that changes affect, in order, each once."""
    ids: dict[TaskId, None] = {}
    for change in changes:
        if change.kind == "add":
            ids.update(dict.fromkeys(change.before))
        elif change.kind == "reorder":
            ids.update(dict.fromkeys(change.order))
        elif change.kind != "abort":
            ids[change.task_id] = None
    return tuple(ids)


def new_task_ids(changes: Sequence[PlanChange]) -> tuple[TaskId, ...]:
    """Return the tasks that changes add, in order."""
    ids: list[TaskId] = []
    for change in changes:
        if change.kind == "add":
            ids.append(change.task.id)
        elif change.kind == "replace":
            for task in change.tasks:
                ids.append(task.id)
        elif change.kind == "expand":
            ids += element_ids(change.task_id, change.elements)
    return tuple(ids)


TaskArguments = tuple[TaskId, JsonValue]
"""The arguments of a task, of one of its fallbacks or of its undo, with the id of the task."""


def change_arguments(changes: Sequence[PlanChange]) -> Iterator[TaskArguments]:
    """Yield the arguments in changes, each with the id of its task."""
    for change in changes:
        tasks: Sequence[Task] = ()
        match change.kind:
            case "replace":
                tasks = change.tasks
            case "add":
                tasks = (change.task,)
            case "modify":
                for arguments in _field_arguments(change.fields):
                    yield change.task_id, arguments
        for task in tasks:
            for _, body in nested_bodies(task):
                if body.arguments:
                    yield task.id, body.arguments


def _field_arguments(fields: JsonValue) -> Iterator[JsonValue]:
    """Yield the arguments in fields of a task that have not been validated yet."""
    if not isinstance(fields, dict):
        return
    yield fields.get("arguments")
    fallbacks = fields.get("fallbacks")
    if isinstance(fallbacks, list):
        for fallback in fallbacks:
            yield from _field_arguments(fallback)
    yield from _field_arguments(fields.get("undo"))


_ID_KEYS: Final = frozenset({"id", "task_id"})
_ID_LIST_KEYS: Final = frozenset({"depends_on", "before", "order"})
_PART_KEYS: Final = frozenset({"task", "tasks", "fields"})
"""Keys in a change or task: those of an id, of a list of ids, and of parts with ids."""

to_canonical_json: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
"""Function that returns JSON with sorted keys and without spaces, for hashes."""


def changes_hash(
    changes: Sequence[PlanChange], originals: Mapping[TaskId, TaskId] = MappingProxyType({})
) -> str:
    """Return the SHA-256 of changes in canonical JSON, which names new tasks by their positions.

    Args:
        changes: the changes.
        originals: the original of each task that replaces another, so that changes of either have
            the same hash.
    """
    positions: dict[TaskId, TaskId] = {}
    for number, task_id in enumerate(new_task_ids(changes)):
        positions[task_id] = TaskId(f"\n{number}")
    document = [dump_change(change) for change in changes]
    for part in document:
        _rename_tasks(part, positions, originals)
    text = to_canonical_json(document)
    if "${" in text:
        for name, other in {**originals, **positions}.items():
            reference = f"${{{json.dumps(name)[1:-1]}.output"
            text = text.replace(reference, f"${{{json.dumps(other)[1:-1]}.output")
    return hashlib.sha256(text.encode()).hexdigest()


def _rename_tasks(
    part: JsonObject, positions: Mapping[TaskId, TaskId], originals: Mapping[TaskId, TaskId]
) -> None:
    """Rename tasks wherever a change, or a task in it, has an id; values of wrong types stay.

    Args:
        part: the JSON of a change or a task.
        positions: the names of the new tasks.
        originals: the names of other tasks.
    """

    def rename(name: JsonValue) -> JsonValue:
        if not isinstance(name, str):
            return name
        task_id = TaskId(name)
        return positions.get(task_id) or originals.get(task_id, name)

    for key, value in part.items():
        if key in _ID_KEYS:
            part[key] = rename(value)
        elif key in _ID_LIST_KEYS and isinstance(value, list):
            part[key] = [rename(name) for name in value]
        elif key in _PART_KEYS:
            inner = value if isinstance(value, list) else [value]
            for item in inner:
                if isinstance(item, dict):
                    _rename_tasks(item, positions, originals)


def with_reason(changes: Sequence[PlanChange], reason: str) -> tuple[PlanChange, ...]:
    """Return changes with this reason for skips, cancellations and aborts that state none."""
    stated: list[PlanChange] = []
    for change in changes:
        if isinstance(change, SkipTask | CancelTask | AbortRun) and not change.reason:
            stated.append(change.model_copy(update={"reason": reason}))
        else:
            stated.append(change)
    return tuple(stated)


def stated_reasons(changes: Sequence[PlanChange]) -> tuple[str, ...]:
    """Return the reasons that skips, cancellations and aborts state, each once."""
    reasons: dict[str, None] = {}
    for change in changes:
        if isinstance(change, SkipTask | CancelTask | AbortRun) and change.reason:
            reasons[change.reason] = None
    return tuple(reasons)


def dump_change(change: PlanChange) -> JsonObject:
    """Return a change as JSON for `parse_changes`."""
    return {"kind": change.kind, **change.model_dump(mode="json", exclude_defaults=True)}


def parse_changes(data: object) -> tuple[PlanChange, ...]:
    """Return changes from JSON, such as a person's or a model's.

    Raises:
        ChangeRejected: items are not changes; the error lists each with its place.
    """
    # A change is iterable, too.
    if isinstance(data, _Change):
        raise ChangeRejected([Problem("changes", f"expected a list, got {brief_repr(data)}")])
    try:
        return _CHANGES_ADAPTER.validate_python(data)
    except ValidationError as error:
        problems: list[Problem] = []
        for item in error.errors(include_url=False):
            place = format_path(("changes", *item["loc"]))
            problems.append(Problem(place, _error_message(item)))
        raise ChangeRejected(first_problems(problems)) from None


def _error_message(details: ErrorDetails) -> str:
    match details["type"]:
        case "missing":
            return f"{details['loc'][-1]!r} is missing"
        case "union_tag_invalid":
            given = details["ctx"]["tag"]
            hint = did_you_mean(given, _CHANGE_KINDS)
            text = f"there is no kind of change {brief_repr(given)}"
            return join_parts(text, f"known kinds are {', '.join(_CHANGE_KINDS)}", hint)
        case "union_tag_not_found":
            return f"its `kind` is missing; known kinds are {', '.join(_CHANGE_KINDS)}"
        case "too_short":
            return "must not be empty"
        case "extra_forbidden":
            return f"there is no field {brief_repr(details['loc'][-1])} here"
        case "tuple_type":
            return f"expected a list, got {brief_repr(details['input'])}"
        case "model_attributes_type":
            return f"expected a change, got {brief_repr(details['input'])}"
    return details["msg"]


_CHANGE_KINDS: Final = (
    "add",
    "remove",
    "replace",
    "expand",
    "include",
    "modify",
    "reorder",
    "retry",
    "skip",
    "cancel",
    "abort",
)
_CHANGES_ADAPTER: TypeAdapter[tuple[PlanChange, ...]] = TypeAdapter(tuple[PlanChange, ...])
