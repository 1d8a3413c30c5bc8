"""Elements of the list under `for_each`, and the tasks made from them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pydantic import JsonValue

from replanning.errors import ExpressionError
from replanning.plan.conditions import Condition
from replanning.plan.json_values import as_text, json_type_name, map_strings
from replanning.plan.messages import brief_repr, join_names, pluralise
from replanning.plan.references import (
    escape_reference,
    find_references,
    has_references,
    resolve_root_references,
)
from replanning.plan.tasks import Task, with_fields
from replanning.plan.types import MAX_NAME_CHARS, JsonObject, TaskId

FOR_EACH: Final = "for_each"
"""Author of the revisions that expand a task, or skip elements that failed."""

INCLUDE: Final = "include"
"""Author of the revisions that replace a task with the tasks of its included plan."""

FORESEEN: Final = (FOR_EACH, INCLUDE)
"""Authors of revisions that the plan itself calls for, unlike edits and replans."""

LIST_FIELDS: Final = ("key", "max_items", "max_parallel", "on_item_failure")
"""Fields of a task that control how the list under its `for_each` is executed."""

_MAX_SHOWN: Final = 5
"""Number of offending elements that a message names."""

_NOT_IN_TEXT: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""Characters that are not allowed in the name and the goal of a task."""


class Elements(NamedTuple):
    """Elements of a list or mapping.

    Attributes:
        items: the elements in order; for a mapping, its values.
        keys: their keys; None if they are numbered from 0.
    """

    items: tuple[JsonValue, ...]
    keys: tuple[str, ...] | None


def read_elements(task: Task, value: JsonValue) -> Elements:
    """Return the elements of the list of a task.

    Args:
        task: the task with `for_each`.
        value: the resolved value of `for_each`.

    Raises:
        ExpressionError: the value is neither a list nor a mapping, has too many elements, or has
            keys that cannot name tasks.
    """
    if isinstance(value, dict):
        elements = Elements(tuple(value.values()), tuple(value))
    elif isinstance(value, list):
        elements = Elements(tuple(value), None)
    else:
        got = f"{json_type_name(value)}: {brief_repr(value)}"
        raise ExpressionError(f"`for_each` needs a list or a mapping, got {got}")
    # Before the keys, which take longer.
    too_many = _number_problem(task, elements.items)
    if too_many:
        raise ExpressionError(too_many)
    if task.key is not None:
        elements = Elements(elements.items, _stated_keys(task.key, elements.items))
    problem = elements_problem(task, elements)
    if problem:
        raise ExpressionError(problem)
    return elements


def elements_problem(task: Task, elements: Elements) -> str:
    """Return why a task cannot be expanded into these elements; empty if it can."""
    items, keys = elements
    problem = _number_problem(task, items)
    if problem or keys is None:
        return problem
    if len(keys) != len(items):
        return f"the list has {pluralise(len(items), 'element')} but {pluralise(len(keys), 'key')}"
    seen: set[str] = set()
    twice: dict[str, None] = {}
    unusable: list[str] = []
    for key in keys:
        if key in seen:
            twice[key] = None
        seen.add(key)
        if not _is_usable(key, len(element_id(task.id, key))):
            unusable.append(key)
    reasons: list[str] = []
    if twice:
        reasons.append(f"several elements have the key {_sample(twice)}")
    if unusable:
        limit = f"a key needs 1 to {MAX_NAME_CHARS - len(task.id) - 2} printable characters"
        reasons.append(f"{limit}, without a blank at either end, unlike {_sample(unusable)}")
    return "; ".join(reasons)


def _is_usable(key: str, length: int) -> bool:
    """Return whether a key can name a task whose id has this length."""
    if key == "" or length > MAX_NAME_CHARS:
        return False
    return key.isprintable() and key == key.strip()


def _number_problem(task: Task, items: Sequence[JsonValue]) -> str:
    if len(items) <= task.max_items:
        return ""
    text = f"the list has {len(items)} elements, and `max_items` allows {task.max_items}"
    return f"{text}; it begins with {brief_repr(items[0])}"


def _sample(names: Iterable[str]) -> str:
    return join_names([brief_repr(name) for name in names], _MAX_SHOWN)


def _stated_keys(key: str, items: Sequence[JsonValue]) -> tuple[str, ...]:
    """Return the values of a task's `key`, such as `${item.id}`, for its elements.

    Raises:
        ExpressionError: a key is missing, or is neither a text nor a number.
    """
    keys: list[str] = []
    problems: list[str] = []
    for index, item in enumerate(items):
        try:
            value = resolve_root_references(key, {"item": item, "index": index})
        except ExpressionError as error:
            problems.append(f"element {index}: {error}")
            continue
        if isinstance(value, dict | list | bool | None):
            problems.append(f"element {index}: {key} is {brief_repr(value)}")
        keys.append(as_text(value))
    if problems:
        text = f"the key of an element is a text or a number: {'; '.join(problems[:_MAX_SHOWN])}"
        more = len(problems) - _MAX_SHOWN
        if more > 0:
            text += f"; and {more} more"
        raise ExpressionError(text)
    return tuple(keys)


def element_id(task_id: TaskId, key: str | int) -> TaskId:
    """Return the id of an element's task."""
    return TaskId(f"{task_id}[{key}]")


def template_of(element: TaskId) -> TaskId:
    """Return the task with the list, such as `convert` for `convert[0]`; else the id itself."""
    name, bracket, _ = element.partition("[")
    if bracket and element.endswith("]"):
        return TaskId(name)
    return element


def element_ids(task_id: TaskId, elements: Elements) -> list[TaskId]:
    """Return the ids of the tasks of elements, in order."""
    names: Iterable[str | int] = range(len(elements.items))
    if elements.keys is not None:
        names = elements.keys
    return [element_id(task_id, name) for name in names]


def slot_resource(task_id: TaskId) -> str:
    """Return the resource that enforces `max_parallel`: each element takes 1 of it."""
    return f"{task_id}[]"


def has_condition_of_its_own(task: Task) -> bool:
    """Return whether `when` reads the element, so that it is evaluated for each element."""
    return task.when is not None and Condition.parse(task.when).reads_element()


def element_tasks(template: Task, elements: Elements) -> list[Task]:
    """Return the tasks of elements, in order.

    They are copies of the template, each with its element, so that references to the element are
    resolved when the task starts, like all others.

    Raises:
        ExpressionError: the name or the goal refers to a part that an element lacks.
    """
    common: dict[str, Any] = {
        "for_each": None,
        "key": None,
        "max_items": Task.model_fields["max_items"].default,
        "max_parallel": None,
    }
    if not has_condition_of_its_own(template):
        # It was evaluated once, for the whole list.
        common["when"] = None
    if template.max_parallel is not None:
        common["resources"] = {**template.resources, slot_resource(template.id): 1.0}
    texts: dict[str, str] = {}
    for name in ("name", "goal"):
        text = getattr(template, name)
        if has_references(text):
            texts[name] = text
    # All copies share the equal values, and one set of stated field names.
    stated = {*template.model_fields_set, *common, "id", "scope"}
    tasks: list[Task] = []
    for index, task_id in enumerate(element_ids(template.id, elements)):
        key: str | int = index
        if elements.keys is not None:
            key = elements.keys[index]
        scope: JsonObject = {
            **(template.scope or {}),
            "item": elements.items[index],
            "index": index,
            "key": key,
        }
        fields: dict[str, Any] = {**common, "id": task_id, "scope": scope}
        for name, text in texts.items():
            fields[name] = _filled_text(text, scope)
        tasks.append(with_fields(template, fields, stated))
    return tasks


def stated_elements(template: Task, tasks: Sequence[Task]) -> JsonValue:
    """Return the list or mapping from which a template was expanded, in the form of `for_each`.

    Args:
        template: the template.
        tasks: the tasks of its elements.
    """
    items: list[JsonValue] = []
    by_key: JsonObject = {}
    for task in tasks:
        scope = task.scope or {}
        # In a plan, text that looks like a reference is one.
        item = map_strings(scope["item"], escape_reference)
        items.append(item)
        key = scope["key"]
        if template.key is None and isinstance(key, str):
            by_key[key] = item
    return by_key or items


def _filled_text(text: str, scope: JsonObject) -> str:
    filled = as_text(resolve_root_references(text, scope))
    return _NOT_IN_TEXT.sub(" ", filled)


def in_place_of_element(task: Task, element: Task, limits: Mapping[str, float]) -> Task:
    """Return a task as a replacement of an element's task: with the element and its limits.

    Args:
        task: the new task.
        element: the replaced task; if it has no element, the new task stays as it is.
        limits: the amounts that the replaced task takes of `max_parallel` resources.
    """
    if element.scope is None or task.scope is not None:
        return task
    fields: dict[str, Any] = {
        "scope": element.scope,
        "on_item_failure": element.on_item_failure,
    }
    if limits:
        fields["resources"] = {**task.resources, **limits}
    return task.model_copy(update=fields)


def is_same_element(task: Task, earlier: Task) -> bool:
    """Return whether two tasks ask for the same work on the same element.

    False if they read results of other tasks, which may have changed.
    """
    compared = ("tool", "arguments", "goal", "expect", "acceptance", "include", "with_", "outputs")
    for name in compared:
        if getattr(task, name) != getattr(earlier, name):
            return False
    new = dict(task.scope or {})
    old = dict(earlier.scope or {})
    read: list[JsonValue] = [task.arguments, task.with_]
    reads = find_references(read)
    if any(reference.task is not None for reference in reads):
        return False
    # The position in the list matters only if the task reads it.
    if all(reference.root != "index" for reference in reads):
        new.pop("index", None)
        old.pop("index", None)
    # An integer key is only the position.
    for scope in (new, old):
        if isinstance(scope.get("key"), int):
            scope.pop("key")
    return new == old
