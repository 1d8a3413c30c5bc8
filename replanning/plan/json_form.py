"""JSON form of values, as references `${…}` and conditions see an output."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from itertools import islice
from pathlib import PurePath
from typing import Final
from uuid import UUID

from pydantic import BaseModel

from replanning.plan.json_values import as_text, json_type_name, members
from replanning.plan.messages import join_names, pluralise
from replanning.plan.types import JsonValue

_MAX_LISTED_KEYS = 10

_PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})


class _NoOutput:
    """Output of a task without one; it and all of its parts are null in expressions."""

    __slots__ = ()


NO_OUTPUT: Final = _NoOutput()


def json_form(value: object) -> JsonValue:
    """Return the JSON form of a value; containers are copied.

    Dates and times become ISO text, a timedelta its seconds, a Decimal, UUID or path its text,
    bytes their base64 text, a tuple or set an array (a set in the order of its items' texts), an
    Enum its value, a dataclass or pydantic model an object. A float that is not finite becomes the
    text `NaN`, `Infinity` or `-Infinity`.

    Raises:
        ValueError: it has no JSON form, or cannot be read; the message names its type.
    """
    try:
        return _json_form(value)
    except RecursionError:
        raise ValueError(f"a value of type {type(value).__name__} is nested too deeply") from None
    except ValueError:
        raise
    except Exception as error:
        # Raised by the value's own code, such as a database row whose connection is closed.
        reason = f"{type(error).__name__}: {error}"
        name = type(value).__name__
        raise ValueError(f"a value of type {name} cannot be read: {reason}") from error


def shown_form(value: object) -> JsonValue:
    """Return a value as JSON for people and models; without a JSON form, a note with its type."""
    try:
        return json_form(value)
    except ValueError as error:
        return f"({error})"


def get_item(value: object, key: str | int) -> object:
    """Return the member or item that the JSON form of a value has under a key or index.

    Raises:
        LookupError: it does not exist; the message continues a sentence about the key.
    """
    if value is NO_OUTPUT:
        return NO_OUTPUT
    if isinstance(value, BaseModel) or (is_dataclass(value) and not isinstance(value, type)):
        value = members(value)
    elif isinstance(value, set | frozenset):
        value = json_form(value)
    if isinstance(value, Mapping) and isinstance(key, str):
        if key in value:
            return value[key]
        for other, item in value.items():
            if _is_key(other, key):
                return item
        names = join_names(
            [repr(name) for name in islice(value, _MAX_LISTED_KEYS + 1)], _MAX_LISTED_KEYS
        )
        raise LookupError(
            f"does not exist; there is {names}" if names else "does not exist; there is nothing yet"
        )
    # Python can index the characters of a text, but JSON has no such items.
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and isinstance(key, int):
        if -len(value) <= key < len(value):
            return value[key]
        raise LookupError(f"does not exist; the array has {pluralise(len(value), 'item')}")
    raise LookupError(f"does not exist: its parent is {json_type_name(value)}")


def _json_form(value: object) -> JsonValue:
    # Most values are plain; this skips the search through the cases.
    if type(value) in _PLAIN_TYPES:
        return _number_form(value) if type(value) is float else value  # type: ignore[return-value]
    match value:
        # Before text and numbers, because a member of an `IntEnum` is also an int.
        case Enum():
            return _json_form(value.value)
        case bool() | int() | str():
            return value
        case float():
            return _number_form(value)
        case Mapping():
            return {_key_text(key): _json_form(item) for key, item in value.items()}
        case list() | tuple():
            return [_json_form(item) for item in value]
        case set() | frozenset():
            # A set has no order, but equal outputs must give equal arguments.
            return sorted(map(_json_form, value), key=_sort_key)
        case datetime() | date() | time():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Decimal() | UUID() | PurePath():
            return str(value)
        case bytes():
            return b64encode(value).decode()
    if value is NO_OUTPUT:
        return None
    if isinstance(value, BaseModel) or (is_dataclass(value) and not isinstance(value, type)):
        return {name: _json_form(item) for name, item in members(value).items()}
    raise ValueError(f"a value of type {type(value).__name__} has no JSON form")


def _number_form(number: float) -> JsonValue:
    # JSON has only finite numbers; another one must not make the whole output unreadable.
    if math.isfinite(number):
        return number
    if math.isnan(number):
        return "NaN"
    return "Infinity" if number > 0 else "-Infinity"


def _key_text(key: object) -> str:
    # Outputs may have numbers or dates as keys, but JSON has only strings.
    form = _json_form(key)
    return as_text(form)


def _is_key(other: object, key: str) -> bool:
    """Return whether a key other than a string has this text in the JSON form."""
    if isinstance(other, str):
        return False
    try:
        return _key_text(other) == key
    except ValueError:
        return False


def _sort_key(item: JsonValue) -> tuple[str, str]:
    return type(item).__name__, as_text(item)
