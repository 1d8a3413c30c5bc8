"""Stored form of an output: JSON, with tags for values of the standard library that JSON lacks.

A tagged value is an object such as `{"$replanning": "date", "value": "2026-01-31"}`. The table of
tags is closed: what is read from a store never names a class. An output with any other value cannot
be stored.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, Final, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

from pydantic import BaseModel
from pydantic_core import TzInfo, to_json

from replanning.journal.records import AttemptSucceeded, Record
from replanning.plan.types import JsonObject, JsonValue
from replanning.secrets import Redactor, secret_predicate

TAG: Final = "$replanning"
"""Key of a tagged value; its value is the name of the tag."""

_MAX_DEPTH: Final = 199
"""Maximum nesting of an output: a record may have 200 levels in every store."""

CONTAINERS: Final = frozenset({dict, list, tuple, set})
"""Types of containers that are copied when an output enters or leaves the run."""

_SHORT_CHARS: Final = 256
_SHORT_BYTES: Final = 6 * _SHORT_CHARS + 4
"""Maximum size of a short text as JSON in bytes, fully escaped, with its separator."""

MIN_INTEGER: Final = -(2**63)
MAX_INTEGER: Final = 2**63
"""Every reader of JSON understands the integers between them; others are tagged."""

_CONSTANTS: Final = frozenset({bool, type(None)})


class NotStorable(ValueError):
    """A value cannot be stored; the message says why, as the beginning or end of a sentence.

    Args:
        message: the reason.
        part: the part of the value without a stored form, if there is a single one.
    """

    def __init__(self, message: str, part: object = None) -> None:
        super().__init__(message)
        self.part = part


class AnnotatedJson(NamedTuple):
    """JSON of an output that only its function's return annotation can turn into a value."""

    value: JsonValue


class StoredOutput(NamedTuple):
    """An output as a store keeps it.

    Attributes:
        value: the JSON, without secrets.
        size: upper bound of the size of the JSON in bytes.
        is_plain: whether the JSON is an equal copy of the output: nothing was tagged or masked.
        is_masked: whether a secret was masked in it.
        enums: number of members of an Enum that became their text or number.
    """

    value: JsonValue
    size: int
    is_plain: bool
    is_masked: bool
    enums: int = 0


def encode(value: object, redactor: Redactor | None) -> StoredOutput:
    """Return the stored form of an output.

    Args:
        value: the output.
        redactor: masks secrets; if None, they stay.

    Raises:
        NotStorable: it holds a value that is not in the table of tags, or is nested too deeply.
    """
    encoder = _Encoder(redactor)
    try:
        stored = encoder.encode(value, _MAX_DEPTH)
    except RecursionError:
        raise NotStorable("it is nested too deeply") from None
    except RuntimeError as error:  # another thread changes it
        raise NotStorable(f"it changed while it was read ({error})") from None
    return StoredOutput(stored, encoder.size, encoder.is_plain, encoder.is_masked, encoder.enums)


def encode_annotated(document: JsonValue, redactor: Redactor) -> StoredOutput:
    """Return the stored form of the JSON that a return annotation made of an output."""
    encoded = encode(document, redactor)
    stored = {TAG: "annotated", "value": encoded.value}
    return StoredOutput(stored, encoded.size, False, encoded.is_masked)


def measure(value: JsonValue) -> int:
    """Return the size of a stored value as JSON, in bytes."""
    return len(to_json(value))


def decode(stored: JsonValue) -> Any:
    """Return the value that `encode` stored.

    It is an `AnnotatedJson` if the annotation of its function is needed. JSON of an unknown tag
    is returned as it is: a journal of an older version has no tags.
    """
    if type(stored) is list:
        return [decode(item) for item in stored]
    if type(stored) is not dict:
        return stored
    tag = stored.get(TAG)
    if isinstance(tag, str) and len(stored) <= 3 and "value" in stored:
        decoder = _DECODERS.get(tag)
        if decoder is not None:
            return decoder(stored["value"], stored)
    return {key: decode(item) for key, item in stored.items()}


def copy_containers(value: object) -> object:
    """Return a copy of the containers of a value; other objects are shared."""
    try:
        return _copied(value)
    except (RecursionError, RuntimeError):
        return value


def storage_problem(value: object) -> str:
    """Return why a value of this kind is not stored, with a remedy."""
    name = type(value).__name__
    if isinstance(value, (BaseModel, Enum)) or is_dataclass(value):
        condition = (
            "the return annotation of the tool's function names it and reads its JSON form as an "
            "equal value"
        )
        return f"it holds a {name}, which comes back only if {condition}"
    return f"it holds a {name}, which has no stored form"


class _Encoder:
    """Traversal of one output, with what it has found."""

    __slots__ = ("_text", "enums", "is_masked", "is_plain", "redactor", "size")

    def __init__(self, redactor: Redactor | None) -> None:
        self.redactor = redactor
        self._text = _without_surrogates if redactor is None else redactor.text
        self.size = _SHORT_BYTES
        self.is_plain = True
        self.is_masked = False
        self.enums = 0

    def encode(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind is str:
            return self.text(value)
        if kind is int:
            if MIN_INTEGER < value < MAX_INTEGER:
                return value
            return self.tagged("int", f"{value:x}")
        if kind is float:
            if value - value == 0:
                return value
            return self.tagged("float", repr(value))
        if kind in _CONSTANTS:
            return value
        if depth <= 0:
            raise NotStorable("it is nested too deeply")
        if kind is dict:
            return self.mapping(value, depth - 1)
        if kind is list:
            self.size += _SHORT_BYTES * len(value)
            return [self.encode(item, depth - 1) for item in value]
        encoder = _ENCODERS.get(kind)
        if encoder is None:
            encoded: JsonValue = self.other(value, depth)
        else:
            encoded = encoder(self, value, depth)
        return encoded

    def text(self, text: str) -> JsonValue:
        if len(text) > _SHORT_CHARS:
            self.size += 6 * len(text)
        clean = self._text(text)
        if clean is text or clean == text:
            return text
        if clean == _without_surrogates(text):  # it has a lone surrogate, which UTF-8 cannot encode
            return self.tagged("text", json.dumps(text))
        self.is_masked = True
        self.is_plain = False
        return clean

    def mapping(self, mapping: dict[Any, Any], depth: int) -> JsonObject:
        self.size += 2 * _SHORT_BYTES * len(mapping)
        stored: JsonObject = {}
        for key, item in mapping.items():
            if type(key) is not str or key == TAG:
                return self.pairs(mapping, depth)
            name = key
            if len(key) >= 6 or not key.isascii():
                found = self.text(key)
                if not isinstance(found, str):
                    return self.pairs(mapping, depth)
                name = found
                number = 1
                while name in stored:  # names that differed only in a secret
                    number += 1
                    name = f"{found} {number}"
            encoded = self.encode(item, depth)
            if self.redactor is not None and secret_predicate(key) is not None:
                encoded = self.member(self.redactor, key, encoded)
            stored[name] = encoded
        return stored

    def member(self, redactor: Redactor, key: str, encoded: JsonValue) -> JsonValue:
        """Mask the value of a member with the name of a secret."""
        clean = redactor.value({key: encoded})
        assert isinstance(clean, dict)
        (masked,) = clean.values()
        if masked != encoded:
            self.is_masked = True
            self.is_plain = False
        return masked

    def pairs(self, mapping: dict[Any, Any], depth: int) -> JsonObject:
        """Encode a mapping with keys other than texts, or one that looks like a tagged value."""
        pairs = []
        for key, item in mapping.items():
            pairs.append([self.encode(key, depth - 2), self.encode(item, depth - 2)])
        return self.tagged("dict", pairs)

    def items(self, tag: str, items: Any, depth: int) -> JsonObject:
        self.size += _SHORT_BYTES * len(items)
        return self.tagged(tag, [self.encode(item, depth - 2) for item in items])

    def unordered(self, tag: str, items: Any, depth: int) -> JsonObject:
        stored = self.items(tag, items, depth)
        stored["value"] = sorted(stored["value"], key=to_json)  # type: ignore[arg-type]
        return stored

    def moment(self, value: datetime | time, depth: int) -> JsonObject:
        """Encode a datetime or a time with its zone."""
        zone = value.tzinfo
        tag = type(value).__name__
        if isinstance(zone, ZoneInfo) and zone.key is not None:
            local = value.replace(tzinfo=None).isoformat()
            return {**self.tagged(tag, local), "zone": f"{zone.key} {value.fold}"}
        if zone is None or isinstance(zone, (timezone, TzInfo)):
            local = value.isoformat()
            if value.fold:
                return {**self.tagged(tag, local), "zone": f" {value.fold}"}
            return self.tagged(tag, local)
        raise NotStorable(storage_problem(zone))

    def binary(self, value: bytes, depth: int) -> JsonObject:
        self.size += 2 * len(value)
        text = value.decode("latin-1")
        if self._text(text) != text:
            self.is_masked = True
            return self.tagged("bytes", b64encode(self._text(text).encode()).decode())
        return self.tagged("bytes", b64encode(value).decode())

    def path(self, value: PurePath, depth: int) -> JsonObject:
        if isinstance(value, Path):
            tag = "path"
        elif isinstance(value, PureWindowsPath):
            tag = "windows-path"
        else:
            tag = "posix-path"
        return self.tagged(tag, self.text(str(value)))

    def other(self, value: Any, depth: int) -> JsonValue:
        """Encode a value of a subclass of a JSON type, which comes back as that type, or a path."""
        if isinstance(value, PurePath):
            return self.path(value, depth)
        if isinstance(value, Enum):
            if not isinstance(value, (str, int, float)):
                raise NotStorable(storage_problem(value))
            self.enums += 1
        self.is_plain = False
        for base in (str, int, float, dict, list):
            if isinstance(value, base):
                plain: JsonValue = self.encode(_base_value(base, value), depth)
                return plain
        if isinstance(value, tuple):
            return self.items("tuple", value, depth)
        raise NotStorable(storage_problem(value), value)

    def tagged(self, tag: str, value: Any) -> JsonObject:
        self.is_plain = False
        self.size += 2 * _SHORT_BYTES
        return {TAG: tag, "value": value}


def _without_surrogates(text: str) -> str:
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _base_value(base: type, value: Any) -> Any:
    """Return a value of a subclass as one of its JSON type, without calling overridden methods."""
    if base is str:
        return str.__str__(value)
    if base is int:
        return int.__int__(value)
    if base is float:
        return float.__float__(value)
    try:
        return base(value)
    except Exception as error:
        raise NotStorable(f"its {type(value).__name__} cannot be read ({error})") from error


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()}
    if kind is list:
        return [_copied(item) for item in value]
    if kind is tuple:
        return tuple([_copied(item) for item in value])
    if kind is set:
        return set(value)
    return value


_ENCODERS: Final[dict[type, Callable[[_Encoder, Any, int], JsonObject]]] = {
    tuple: lambda encoder, value, depth: encoder.items("tuple", value, depth),
    set: lambda encoder, value, depth: encoder.unordered("set", value, depth),
    frozenset: lambda encoder, value, depth: encoder.unordered("frozenset", value, depth),
    datetime: _Encoder.moment,
    time: _Encoder.moment,
    date: lambda encoder, value, depth: encoder.tagged("date", value.isoformat()),
    timedelta: lambda encoder, value, depth: encoder.tagged(
        "timedelta", [value.days, value.seconds, value.microseconds]
    ),
    Decimal: lambda encoder, value, depth: encoder.tagged("decimal", str(value)),
    UUID: lambda encoder, value, depth: encoder.tagged("uuid", str(value)),
    bytes: _Encoder.binary,
}


def _decode_moment(kind: Any, text: str, stored: JsonObject) -> Any:
    value = kind.fromisoformat(text)
    key, _, fold = str(stored.get("zone", " 0")).rpartition(" ")
    zone: tzinfo | None = ZoneInfo(key) if key else value.tzinfo
    return value.replace(tzinfo=zone, fold=int(fold))


_DECODERS: Final[dict[str, Callable[[Any, JsonObject], Any]]] = {
    "int": lambda value, stored: int(value, 16),
    "float": lambda value, stored: float(value),
    "text": lambda value, stored: json.loads(value),
    "dict": lambda value, stored: {decode(key): decode(item) for key, item in value},
    "tuple": lambda value, stored: tuple(map(decode, value)),
    "set": lambda value, stored: set(map(decode, value)),
    "frozenset": lambda value, stored: frozenset(map(decode, value)),
    "datetime": lambda value, stored: _decode_moment(datetime, value, stored),
    "time": lambda value, stored: _decode_moment(time, value, stored),
    "date": lambda value, stored: date.fromisoformat(value),
    "timedelta": lambda value, stored: timedelta(*value),
    "decimal": lambda value, stored: Decimal(value),
    "uuid": lambda value, stored: UUID(value),
    "bytes": lambda value, stored: b64decode(value),
    "path": lambda value, stored: Path(decode(value)),
    "posix-path": lambda value, stored: PurePosixPath(decode(value)),
    "windows-path": lambda value, stored: PureWindowsPath(decode(value)),
    "annotated": lambda value, stored: AnnotatedJson(decode(value)),
}


def with_value(record: Record) -> Record:
    """Return a stored record with the output of its attempt decoded."""
    body = record.body
    if type(body) is AttemptSucceeded and type(body.output) in (dict, list):
        return record._replace(body=replace(body, output=decode(body.output)))
    return record
