"""Differences between two revisions of a plan."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from replanning.changes import (
    AbortRun,
    CancelTask,
    PlanChange,
    ReorderTasks,
    RetryTask,
    SkipTask,
    dump_change,
)
from replanning.history.wording import change_line, printable_line
from replanning.live.draft import display_fields
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.plan.document import Plan
from replanning.plan.elements import in_place_of_element
from replanning.plan.messages import pluralise
from replanning.plan.parameters import shown_values
from replanning.plan.tasks import Goal, Task, ToolSpec
from replanning.plan.types import JsonObject, JsonValue

_ACTS: Final = (RetryTask, SkipTask, CancelTask, ReorderTasks, AbortRun)
"""Changes whose effect on the states of tasks the document does not show, or only in part."""

_CONSEQUENCES: Final = ("depends_on", "fallbacks")
"""Fields whose differences between a task and its replacement are not reported."""


class FieldChange(NamedTuple):
    """A field with its values before and after; None if it is absent."""

    name: str
    before: JsonValue
    after: JsonValue

    def __str__(self) -> str:
        before = _value_text(self.before)
        after = _value_text(self.after)
        return f"{self.name}: {before} → {after}"


class TaskChange(NamedTuple):
    """A task in both revisions with the fields that differ."""

    id: str
    fields: tuple[FieldChange, ...]


class Replacement(NamedTuple):
    """A task and the tasks in its place, with the fields that differ if that is a single one."""

    id: str
    by: tuple[str, ...]
    fields: tuple[FieldChange, ...]

    def __str__(self) -> str:
        line = f"{self.id} → {', '.join(self.by)}"
        changes = []
        for name, old, new in self.fields:
            before = _plain_text(old)
            after = _plain_text(new)
            changes.append(f"{name} {before} → {after}")
        if changes:
            line += f": {', '.join(changes)}"
        return printable_line(line)


def describe_replacement(old: Task, new: Sequence[Task], live: LivePlan) -> Replacement:
    """Return a replaced task of a live plan with its replacements.

    Fields that follow from the replacement itself do not count as differences.
    """
    fields: tuple[FieldChange, ...] = ()
    # Several tasks share the work, so no single one can be compared with the old task.
    if len(new) == 1:
        ignored = dict.fromkeys(_CONSEQUENCES)
        before = display_fields(old) | ignored
        in_place = in_place_of_element(new[0], old, live.list_limits(old))
        after = display_fields(in_place) | ignored
        fields = _field_changes(before, after)
    by = tuple(task.id for task in new)
    return Replacement(old.id, by, fields)


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """Differences between two revisions; its text has a line for each.

    Attributes:
        before: the number of the first revision.
        after: the number of the second.
        removed: tasks in the first only.
        added: tasks in the second only.
        changed: tasks in both, with the fields that differ.
        tools: tools that differ, with their fields.
        context: values of the context that differ.
        parameters: values of parameters that differ.
        goal: fields of the goal that differ.
        acts: changes in between to the state of tasks, such as run again, skipped or reordered.
        replaced: tasks of the lower revision, and elements of lists, that were replaced, with those
            of the higher one in their place.
        lists: tasks of the lower revision that were expanded, with the tasks of the higher one that
            stand for their elements.
    """

    before: int
    after: int
    removed: tuple[Task, ...] = ()
    added: tuple[Task, ...] = ()
    changed: tuple[TaskChange, ...] = ()
    tools: tuple[TaskChange, ...] = ()
    context: tuple[FieldChange, ...] = ()
    parameters: tuple[FieldChange, ...] = ()
    acts: tuple[PlanChange, ...] = ()
    goal: tuple[FieldChange, ...] = ()
    replaced: tuple[Replacement, ...] = ()
    lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        parts = (self.removed, self.added, self.changed, self.tools, self.context, self.goal)
        return any(parts) or bool(self.parameters) or bool(self.acts)

    def __str__(self) -> str:
        undone = ""
        if self.after < self.before:
            undone = "undone: "
        lines: list[str] = []
        shown: set[str] = set()
        for task_id, elements in self.lists.items():
            number = pluralise(len(elements), "element")
            lines.append(f"~ {undone}{printable_line(task_id)}: {number}")
            shown.update([task_id, *elements])
        lines += [f"~ {undone}{pair}" for pair in self.replaced]
        # The line of a replacement already shows the new task if there is a single one.
        for pair in self.replaced:
            shown.add(pair.id)
            if len(pair.by) == 1:
                shown.update(pair.by)
        for sign, tasks in (("-", self.removed), ("+", self.added)):
            for task in tasks:
                if task.id not in shown:
                    line = _task_line(task)
                    lines.append(f"{sign} {line}")
        # Values are other people's text, so each line is made printable as a whole.
        changes = []
        for noun, items in (("", self.changed), ("tool ", self.tools)):
            for item in items:
                changes += [f"{noun}{item.id}: {change}" for change in item.fields]
        changes += [f"context.{change}" for change in self.context]
        changes += [f"parameters.{change}" for change in self.parameters]
        changes += [f"goal.{change}" for change in self.goal]
        lines += [f"~ {printable_line(change)}" for change in changes]
        lines += [f"* {undone}{change_line(act)}" for act in self.acts]
        return "\n".join(lines)

    def to_json(self) -> JsonObject:
        """Return the differences as JSON values."""
        return {
            "before": self.before,
            "after": self.after,
            "removed": list(map(_json_document, self.removed)),
            "added": list(map(_json_document, self.added)),
            "changed": list(map(_item_change_json, self.changed)),
            "tools": list(map(_item_change_json, self.tools)),
            "context": _fields_json(self.context),
            "parameters": _fields_json(self.parameters),
            "goal": _fields_json(self.goal),
            "acts": list(map(dump_change, self.acts)),
            "replaced": list(map(_item_change_json, self.replaced)),
            "lists": {task_id: list(elements) for task_id, elements in self.lists.items()},
        }


def diff_plans(
    before: Plan,
    after: Plan,
    *,
    numbers: tuple[int, int],
    between: Sequence[PlanChange],
    live: LivePlan,
) -> PlanDiff:
    """Return the differences between two plans.

    Args:
        before: the plan at the first revision.
        after: the plan at the second.
        numbers: the numbers of the revisions.
        between: the changes from the lower to the higher revision, in order.
        live: the live plan at the higher revision.
    """
    first, second = numbers
    old = {task.id: task for task in before.tasks}
    new = {task.id: task for task in after.tasks}
    # Only tasks of the lower revision can have been replaced on the way to the higher one.
    lower = old
    if second < first:
        lower = new
    replaced: list[Replacement] = []
    lists: dict[str, tuple[str, ...]] = {}
    entries = [live.entry(task_id) for task_id in lower]
    for entry in entries:
        in_place = []
        for other in _in_place_of(entry, live):
            if other.is_expanded:
                elements = other.replacement.sinks
                # Elements may themselves be replaced or expanded.
                entries += elements
                lists[other.id] = tuple(leaf.id for leaf in live.leaves(other))
            if other is not entry and not other.removed:
                in_place.append(other.task)
        if in_place:
            replaced.append(describe_replacement(entry.task, in_place, live))

    list_of: dict[str, str] = {}
    for task_id, leaves in lists.items():
        list_of.update(dict.fromkeys(leaves, task_id))
    old_goal = _json_document(before.goal)
    new_goal = _json_document(after.goal)
    old_tools = {tool.name: tool for tool in before.tools}
    new_tools = {tool.name: tool for tool in after.tools}
    return PlanDiff(
        first,
        second,
        removed=_tasks_without(before, new),
        added=_tasks_without(after, old),
        changed=_changed_items(_with_lists(old, list_of), _with_lists(new, list_of)),
        tools=_changed_items(old_tools, new_tools),
        context=_field_changes(before.context, after.context),
        parameters=_field_changes(shown_values(before.parameters), shown_values(after.parameters)),
        goal=_field_changes(old_goal, new_goal),
        acts=tuple(change for change in between if isinstance(change, _ACTS)),
        replaced=tuple(replaced),
        lists=lists,
    )


def _with_lists(tasks: Mapping[str, Task], list_of: Mapping[str, str]) -> dict[str, Task]:
    """Return tasks with dependencies on lists instead of on their elements."""
    if not list_of:
        return dict(tasks)
    named: dict[str, Task] = {}
    for task_id, task in tasks.items():
        needed: dict[str, None] = {}
        for dependency in task.depends_on:
            needed[list_of.get(dependency, dependency)] = None
        named[task_id] = task.model_copy(update={"depends_on": tuple(needed)})
    return named


def _in_place_of(entry: TaskEntry, live: LivePlan) -> list[TaskEntry]:
    """Return the current tasks for a task: itself, or its replacements.

    An expanded task stands for its elements.
    """
    found: list[TaskEntry] = []
    stack = [entry]
    while stack:
        one = stack.pop()
        if one.replacement.tasks and not one.is_expanded:
            stack += [live.entry(task_id) for task_id in reversed(one.replacement.tasks)]
        else:
            found.append(one)
    return found


def _tasks_without(plan: Plan, ids: Collection[str]) -> tuple[Task, ...]:
    return tuple(task for task in plan.tasks if task.id not in ids)


def _task_line(task: Task) -> str:
    fields = []
    for name, value in display_fields(task).items():
        text = _value_text(value)
        fields.append(f"{name}: {text}")
    if not fields:
        return printable_line(task.id)
    return printable_line(f"{task.id}: {', '.join(fields)}")


def _changed_items(
    old: Mapping[str, Task | ToolSpec], new: Mapping[str, Task | ToolSpec]
) -> tuple[TaskChange, ...]:
    changes = []
    for name, before in old.items():
        after = new.get(name)
        # Dumping to JSON is slow, and most items are equal.
        if after is not None and after != before:
            old_fields = _json_document(before)
            new_fields = _json_document(after)
            fields = _field_changes(old_fields, new_fields)
            changes.append(TaskChange(name, fields))
    return tuple(changes)


def _json_document(thing: Task | ToolSpec | Goal) -> JsonObject:
    # Without defaults, because a field that was never set is not worth a line.
    document: JsonObject = thing.model_dump(mode="json", exclude_defaults=True)
    return document


def _field_changes(
    old: Mapping[str, JsonValue], new: Mapping[str, JsonValue]
) -> tuple[FieldChange, ...]:
    changes = []
    # Each name once, and new ones last, so that two diffs of one change read alike.
    names = dict.fromkeys([*old, *new])
    for name in names:
        before = old.get(name)
        after = new.get(name)
        if before != after:
            changes.append(FieldChange(name, before, after))
    return tuple(changes)


def _item_change_json(thing: TaskChange | Replacement) -> JsonObject:
    return {**thing._asdict(), "fields": _fields_json(thing.fields)}


def _fields_json(fields: Sequence[FieldChange]) -> list[JsonValue]:
    return [change._asdict() for change in fields]


def _value_text(value: JsonValue) -> str:
    if value is None:
        return "none"
    return json.dumps(value, ensure_ascii=False)


def _plain_text(value: JsonValue) -> str:
    if isinstance(value, str):
        return value
    return _value_text(value)
