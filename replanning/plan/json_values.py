"""Operations on JSON values: walking, copying, looking up, measuring depth, and naming types."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from pydantic import BaseModel, JsonValue

from replanning.secrets import MASK

_ValueT = TypeVar("_ValueT")

_CHARS_PER_ITEM = 10
"""Minimum number of characters for any item, so that many small items count."""


def iter_strings(value: JsonValue, *, keys: bool = True) -> Iterator[str]:
    """Yield the strings in a value, in order, with keys of objects if `keys` is true."""
    # An explicit stack, because outputs may be nested deeper than Python's recursion limit.
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
    # Most tasks have no arguments.
    if not value:
        return False
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
    """Return roughly how many characters a value takes as JSON; stops above `limit`."""
    # Encoding a huge value would fill the memory that the limit protects.
    size = 0
    stack = [value]
    while stack and size <= limit:
        item = stack.pop()
        size += _CHARS_PER_ITEM
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, list):
            stack += item
        elif isinstance(item, dict):
            # Outputs of functions may have other keys than strings.
            size += sum(len(str(key)) for key in item)
            stack += item.values()
    return size


def as_object(value: JsonValue) -> dict[str, JsonValue]:
    """Return the value if it is an object, otherwise an empty object."""
    return value if isinstance(value, dict) else {}


def copy_json(value: _ValueT) -> _ValueT:
    """Return a deep copy of a JSON value; one nested too deep to record is returned itself."""
    try:
        copy: _ValueT = _copy(value)
    except RecursionError:
        return value
    return copy


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


def members(value: object) -> dict[str, object]:
    """Return the fields of a dataclass or pydantic model by name."""
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
        # Before numbers, because a boolean is an integer in Python.
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case Mapping():
            return "an object"
    return "an array"
