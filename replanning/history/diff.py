"""Differences between two revisions of a plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from replanning.live.plan import LivePlan
from replanning.plan.document import Plan
from replanning.plan.tasks import Goal, Task, ToolSpec
from replanning.plan.types import JsonObject, JsonValue

_ACTS: Final = (RetryTask, SkipTask, CancelTask, ReorderTasks, AbortRun)
"""Changes that appear in the states of tasks, not or not only in the document."""


_CONSEQUENCES: Final = ("depends_on", "fallbacks")
"""Fields in which a replacement differs from its task without being told."""


class FieldChange(NamedTuple):
    """A field with its values before and after; None if it is absent."""

    name: str
    before: JsonValue
    after: JsonValue

    def __str__(self) -> str:
        return f"{self.name}: {_value_text(self.before)} → {_value_text(self.after)}"


class TaskChange(NamedTuple):
    """A task in both revisions with the fields that differ."""

    id: str
    fields: tuple[FieldChange, ...]


class Replacement(NamedTuple):
    """A task, the tasks that stand in its place, and the fields that differ if that is a single one."""

    id: str
    by: tuple[str, ...]
    fields: tuple[FieldChange, ...]

    def __str__(self) -> str:
        changes = (
            f"{name} {_plain_text(old)} → {_plain_text(new)}" for name, old, new in self.fields
        )
        return printable_line(
            ": ".join(filter(None, (f"{self.id} → {', '.join(self.by)}", ", ".join(changes))))
        )


def describe_replacement(old: Task, new: Sequence[Task]) -> Replacement:
    """Return a replaced task with the tasks in its place; what follows from the replacement is no difference."""
    fields: tuple[FieldChange, ...] = ()
    if len(new) == 1:
        fields = _field_changes(
            *(display_fields(task) | dict.fromkeys(_CONSEQUENCES) for task in (old, *new))
        )
    return Replacement(old.id, tuple(task.id for task in new), fields)


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
        goal: fields of the goal that differ.
        acts: changes in between to the state of tasks: run again, skipped, cancelled, reordered.
        replaced: tasks of the lower revision that were replaced, with those of the higher one in their place.
    """

    before: int
    after: int
    removed: tuple[Task, ...] = ()
    added: tuple[Task, ...] = ()
    changed: tuple[TaskChange, ...] = ()
    tools: tuple[TaskChange, ...] = ()
    context: tuple[FieldChange, ...] = ()
    acts: tuple[PlanChange, ...] = ()
    goal: tuple[FieldChange, ...] = ()
    replaced: tuple[Replacement, ...] = ()

    def __bool__(self) -> bool:
        return any(
            (self.removed, self.added, self.changed, self.tools, self.context, self.goal, self.acts)
        )

    def __str__(self) -> str:
        undone = "undone: " if self.after < self.before else ""
        lines = [f"~ {undone}{pair}" for pair in self.replaced]
        told = {
            one
            for pair in self.replaced
            for one in ((pair.id, *pair.by) if len(pair.by) == 1 else (pair.id,))
        }
        lines += [f"- {_task_line(task)}" for task in self.removed if task.id not in told]
        lines += [f"+ {_task_line(task)}" for task in self.added if task.id not in told]
        lines += [
            f"~ {printable_line(f'{task.id}: {change}')}"
            for task in self.changed
            for change in task.fields
        ]
        lines += [
            f"~ {printable_line(f'tool {tool.id}: {change}')}"
            for tool in self.tools
            for change in tool.fields
        ]
        lines += [f"~ {printable_line(f'context.{change}')}" for change in self.context]
        lines += [f"~ {printable_line(f'goal.{change}')}" for change in self.goal]
        lines += [f"* {undone}{change_line(act)}" for act in self.acts]
        return "\n".join(lines)

    def to_json(self) -> JsonObject:
        """Return the differences as JSON values."""
        return {
            "before": self.before,
            "after": self.after,
            "removed": [_json_document(task) for task in self.removed],
            "added": [_json_document(task) for task in self.added],
            "changed": [_item_change_json(task) for task in self.changed],
            "tools": [_item_change_json(tool) for tool in self.tools],
            "context": [change._asdict() for change in self.context],
            "goal": [change._asdict() for change in self.goal],
            "acts": [dump_change(act) for act in self.acts],
            "replaced": [_item_change_json(pair) for pair in self.replaced],
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
    old = {task.id: task for task in before.tasks}
    new = {task.id: task for task in after.tasks}
    replaced = tuple(
        describe_replacement(entry.task, leaves)
        for entry in map(live.entry, new if numbers[1] < numbers[0] else old)
        if (
            leaves := [
                leaf.task for leaf in live.leaves(entry) if leaf is not entry and not leaf.removed
            ]
        )
    )
    return PlanDiff(
        *numbers,
        removed=tuple(task for task_id, task in old.items() if task_id not in new),
        added=tuple(task for task_id, task in new.items() if task_id not in old),
        changed=_changed_items(old, new),
        tools=_changed_items(
            {tool.name: tool for tool in before.tools}, {tool.name: tool for tool in after.tools}
        ),
        context=_field_changes(before.context, after.context),
        goal=_field_changes(_json_document(before.goal), _json_document(after.goal)),
        acts=tuple(change for change in between if isinstance(change, _ACTS)),
        replaced=replaced,
    )


def _task_line(task: Task) -> str:
    rest = ", ".join(
        f"{name}: {_value_text(value)}" for name, value in display_fields(task).items()
    )
    return printable_line(f"{task.id}: {rest}" if rest else task.id)


def _changed_items(
    old: Mapping[str, Task | ToolSpec], new: Mapping[str, Task | ToolSpec]
) -> tuple[TaskChange, ...]:
    return tuple(
        TaskChange(name, _field_changes(_json_document(before), _json_document(new[name])))
        for name, before in old.items()
        if name in new and before != new[name]
    )


def _json_document(thing: Task | ToolSpec | Goal) -> JsonObject:
    document: JsonObject = thing.model_dump(mode="json", exclude_defaults=True)
    return document


def _field_changes(
    old: Mapping[str, JsonValue], new: Mapping[str, JsonValue]
) -> tuple[FieldChange, ...]:
    names = dict.fromkeys([*old, *new])
    return tuple(
        FieldChange(name, old.get(name), new.get(name))
        for name in names
        if old.get(name) != new.get(name)
    )


def _item_change_json(thing: TaskChange | Replacement) -> JsonObject:
    return {**thing._asdict(), "fields": [change._asdict() for change in thing.fields]}


def _value_text(value: JsonValue) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _plain_text(value: JsonValue) -> str:
    return value if isinstance(value, str) else _value_text(value)
