"""JSON form of values: what references `${…}` and conditions see of an output."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from uuid import UUID

from pydantic import BaseModel

from replanning.plan.json_values import as_text, members
from replanning.plan.types import JsonValue

_PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})


def json_form(value: object) -> JsonValue:
    """Return the JSON form of a value; containers are copied.

    Dates and times become ISO text, a timedelta its seconds, a Decimal, UUID or path its text,
    bytes their base64 text, a tuple or set an array (a set in the order of its items' texts), an
    Enum its value, a dataclass or pydantic model an object. A float that is not finite is `NaN`,
    `Infinity` or `-Infinity`.

    Raises:
        ValueError: it has no JSON form; the message names its type.
    """
    try:
        return _json_form(value)
    except RecursionError:
        raise ValueError(f"a value of type {type(value).__name__} is nested too deeply") from None


def shown_form(value: object) -> JsonValue:
    """Return a value as JSON for people and models; one without JSON names its type."""
    try:
        return json_form(value)
    except ValueError as error:
        return f"({error})"


def _json_form(value: object) -> JsonValue:
    # Most values are plain, and need no search through the cases.
    if type(value) in _PLAIN_TYPES:
        return _number_form(value) if type(value) is float else value  # type: ignore[return-value]
    match value:
        # Before text and numbers, because a member of an `IntEnum` is an int as well.
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
    if isinstance(value, BaseModel) or (is_dataclass(value) and not isinstance(value, type)):
        return {name: _json_form(item) for name, item in members(value).items()}
    raise ValueError(f"a value of type {type(value).__name__} has no JSON form")


def _number_form(number: float) -> JsonValue:
    # JSON has no other numbers, and one of them must not make the whole output unreadable.
    if math.isfinite(number):
        return number
    if math.isnan(number):
        return "NaN"
    return "Infinity" if number > 0 else "-Infinity"


def _key_text(key: object) -> str:
    # Outputs may have numbers or dates as keys, and JSON has only texts.
    form = _json_form(key)
    return as_text(form)


def _sort_key(item: JsonValue) -> tuple[str, str]:
    return type(item).__name__, as_text(item)
