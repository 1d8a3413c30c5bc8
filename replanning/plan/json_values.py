"""Operations on JSON values: walking, copying, looking up, measuring depth, and naming types."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import islice
from operator import is_not
from types import NoneType
from typing import Any, Final, TypeVar, cast

from pydantic import BaseModel, JsonValue

from replanning.plan.messages import join_names
from replanning.secrets import MASK

_MAX_LISTED_KEYS = 10
_CHARS_PER_ITEM = 10
"""Characters that any item counts for, so that many small ones are not small."""


def iter_strings(value: JsonValue, *, keys: bool = True) -> Iterator[str]:
    """Yield the strings inside a value in document order, the keys of objects included unless `keys` is false."""
    # A stack of its own, because outputs may be nested deeper than Python recurses.
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, list):
            stack.extend(reversed(item))
        elif isinstance(item, dict):
            for key, inner in reversed(item.items()):
                stack.append(inner)
                if keys:
                    stack.append(key)


def is_redacted(value: JsonValue) -> bool:
    """Return whether a value contains the mark of a redacted secret."""
    return any(MASK in text for text in iter_strings(value))


def map_strings(value: JsonValue, change: Callable[[str], JsonValue]) -> JsonValue:
    """Return a copy of a JSON value with `change` applied to every string except keys."""
    match value:
        case str():
            return change(value)
        case list():
            return [map_strings(item, change) for item in value]
        case dict():
            return {key: map_strings(item, change) for key, item in value.items()}
    return value


def exceeds_depth(value: JsonValue, limit: int) -> bool:
    """Return whether arrays and objects are nested more than `limit` levels deep."""
    level = [value]
    for _ in range(limit + 1):
        containers = [item for item in level if isinstance(item, list | dict)]
        if not containers:
            return False
        level = [
            inner
            for item in containers
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return True


def measure_json(value: JsonValue, limit: int) -> int:
    """Return about how many characters a value takes as JSON; measuring ends where that exceeds `limit`."""
    # Not encoded for it: the text of a huge value would fill the memory that the limit protects.
    size, stack = 0, [value]
    while stack and size <= limit:
        item = stack.pop()
        size += _CHARS_PER_ITEM
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, list):
            stack += item
        elif isinstance(item, dict):
            size += sum(
                len(str(key)) for key in item
            )  # outputs of functions may have keys that are no strings
            stack += item.values()
    return size


def as_object(value: JsonValue) -> dict[str, JsonValue]:
    """Return a value that is an object; an empty object for any other."""
    return value if isinstance(value, dict) else {}


def copy_json(value: JsonValue) -> JsonValue:
    """Return a deep copy; a value too deep to be recorded is returned as it is."""
    try:
        return _copy(value) if isinstance(value, list | dict) else value
    except RecursionError:
        return value


def _copy(value: JsonValue) -> JsonValue:
    if type(value) is list:
        return [_copy(item) for item in value]
    if type(value) is dict:
        return {key: _copy(item) for key, item in value.items()}
    return value


_SharedT = TypeVar("_SharedT")

_IMMUTABLE_TYPES: Final = frozenset({str, int, float, bool, NoneType})


def detached(shared: _SharedT) -> _SharedT:
    """Return a copy of a part of a plan or of a record whose objects and arrays readers may change; itself if it has none.

    A value too deep to be recorded is returned as it is.
    """
    try:
        return _detached(shared)
    except RecursionError:
        return shared


def _detached(shared: _SharedT) -> _SharedT:
    value: Any = shared
    copy: Any = value
    if isinstance(value, dict):
        copy = {
            key: item if type(item) in _IMMUTABLE_TYPES else _detached(item)
            for key, item in value.items()
        }
    elif isinstance(value, list):
        copy = [_detached(item) for item in value]
    elif isinstance(value, tuple):
        items = tuple(map(_detached, value))
        if any(map(is_not, items, value)):
            copy = items if type(value) is tuple else value._make(items)  # type: ignore[attr-defined]
    elif isinstance(value, BaseModel):
        state = {**value.__dict__, **(value.__pydantic_extra__ or {})}
        if changed := _detached_members(state):
            copy = value.model_copy(update=changed)
    elif is_dataclass(value) and not isinstance(value, type):
        state = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        if changed := _detached_members(state):
            copy = replace(value, **changed)
    return cast("_SharedT", copy)


def _detached_members(state: Mapping[str, object]) -> dict[str, Any]:
    # Parts that nobody can change stay shared, so that a copy costs only what can be changed.
    members = (
        (name, item, _detached(item))
        for name, item in state.items()
        if type(item) not in _IMMUTABLE_TYPES
    )
    return {name: copy for name, item, copy in members if copy is not item}


def members(value: object) -> dict[str, object]:
    """Return the fields of a dataclass or of a pydantic model by name."""
    if isinstance(value, BaseModel):
        return dict(value)
    return {each.name: getattr(value, each.name) for each in fields(value)}  # type: ignore[arg-type]


def as_text(value: JsonValue) -> str:
    """Return a value as it appears inside text: a string as it is, anything else as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def json_type_name(value: object) -> str:
    """Return the JSON type of a value, with its article."""
    match value:
        case None:
            return "null"
        # Before numbers, because a boolean is one in Python.
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case Mapping():
            return "an object"
    return "an array"


def get_item(value: object, key: str | int) -> object:
    """Return the member of an object or the item of an array.

    Raises:
        LookupError: it does not exist; the message is the end of a sentence.
    """
    if isinstance(value, BaseModel) or (is_dataclass(value) and not isinstance(value, type)):
        value = members(value)
    if isinstance(value, Mapping) and isinstance(key, str):
        if key in value:
            return value[key]
        names = join_names(
            [repr(name) for name in islice(value, _MAX_LISTED_KEYS + 1)], _MAX_LISTED_KEYS
        )
        raise LookupError(
            f"does not exist; there is {names}" if names else "does not exist; there is nothing yet"
        )
    # The characters of a text are no items in JSON, although Python indexes them.
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and isinstance(key, int):
        if -len(value) <= key < len(value):
            return value[key]
        raise LookupError(f"does not exist; the array has {len(value)} items")
    raise LookupError(f"does not exist: it would be in {json_type_name(value)}")
