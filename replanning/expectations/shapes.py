"""Shapes of values, to derive a JSON Schema that many values have in common."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from replanning.plan.types import JsonObject, JsonValue

MIN_OUTPUTS: Final = 5
"""Minimum outputs for rules about whole outputs: type, fields, and repeated arguments."""

MIN_RULES: Final = 10
"""Minimum outputs for a rule that may hold by chance, such as that a list is never empty."""

MIN_VALUES: Final = 20
"""Minimum outputs for rules about inner values: a field may rarely be null or missing."""

MIN_VARIETY: Final = 3
"""Minimum number of different values; with fewer, a rule may be a coincidence."""

MAX_DEPTH: Final = 5
"""Maximum depth in an output from which to learn."""

MAX_MEMBERS: Final = 200
"""Maximum number of items of an array, or keys of an object, to examine."""

_FIELD_NAME: Final = re.compile(r"[A-Za-z_$@][A-Za-z_-]*[0-9]?")
"""Key that looks like a field name, not an id."""

_COUNT_WORDS: Final = frozenset(
    (
        *("age", "capacity", "count", "distance", "duration", "guests", "height", "length"),
        *("limit", "nights", "pages", "passengers", "price", "qty", "quantity", "rooms", "seats"),
        *("size", "stock", "weight", "width"),
    )
)
"""Words in the names of numbers that are never negative."""

_SIGNED_WORDS: Final = frozenset(("adjustment", "change", "delta", "diff", "difference", "offset"))


def schema_of(values: Sequence[JsonValue]) -> JsonObject:
    """Return a JSON Schema that all values fit; empty if they have nothing in common."""
    shape = _Shape()
    different = set()
    for value in values:
        shape.add(value)
        different.add(json.dumps(value, sort_keys=True))
    return _root_schema(shape, values, len(different))


def optional_fields(schema: JsonObject) -> Iterator[str]:
    """Yield the fields that a schema describes but does not require."""
    inner: list[JsonValue] = [schema.get("items"), schema.get("additionalProperties")]
    alternatives = schema.get("anyOf")
    if isinstance(alternatives, list):
        inner += alternatives
    properties = schema.get("properties")
    if isinstance(properties, dict):
        required = schema.get("required")
        for name, part in properties.items():
            if isinstance(required, list) and name not in required:
                yield name
            inner.append(part)
    for part in inner:
        if isinstance(part, dict):
            yield from optional_fields(part)


@dataclass(slots=True)
class _Shape:
    """Common shape of the values at one place of the outputs.

    Attributes:
        outputs: number of outputs with a value there.
        kinds: number of values by their JSON type.
        fields: the shapes of the members of objects.
        present: number of objects that have each field.
        items: the shape of the items of arrays.
        shortest: length of the shortest text, array or object.
        least: the smallest number.
    """

    outputs: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    fields: dict[str, _Shape] = field(default_factory=dict)
    present: Counter[str] = field(default_factory=Counter)
    items: _Shape | None = None
    shortest: int | None = None
    least: float | None = None

    def add(self, value: JsonValue) -> None:
        """Add the value of a new output."""
        for shape in self._add(value, MAX_DEPTH):
            shape.outputs += 1

    def _add(self, value: JsonValue, depth: int) -> list[_Shape]:
        """Add a value, and return the changed shapes, each once."""
        touched: dict[int, _Shape] = {id(self): self}
        kind = kind_of(value)
        self.kinds[kind] += 1
        if isinstance(value, str | list | dict):
            if self.shortest is None or len(value) < self.shortest:
                self.shortest = len(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            if self.least is None or value < self.least:
                self.least = value
        if depth == 0:
            return [self]
        if isinstance(value, dict):
            for key in list(value)[:MAX_MEMBERS]:
                self.present[key] += 1
                member = self.fields.setdefault(key, _Shape())
                for shape in member._add(value[key], depth - 1):
                    touched[id(shape)] = shape
        if isinstance(value, list):
            if self.items is None:
                self.items = _Shape()
            for item in value[:MAX_MEMBERS]:
                for shape in self.items._add(item, depth - 1):
                    touched[id(shape)] = shape
        return list(touched.values())

    @property
    def always(self) -> list[str]:
        """The fields that all objects have."""
        return [key for key, count in self.present.items() if count == self.kinds["object"]]

    @property
    def is_map(self) -> bool:
        """Whether the keys of the objects are data, such as ids, instead of field names."""
        keys = self.present
        if not keys:
            return False
        ids = [key for key in keys if not _FIELD_NAME.fullmatch(key)]
        if len(ids) * 2 >= len(keys):
            return True
        # Several records with the same fields are entries of a table.
        kinds = {frozenset(shape.always) for shape in self.fields.values()}
        if len(keys) >= MIN_VARIETY and len(kinds) == 1 and kinds != {frozenset()}:
            return True
        return len(keys) > 1 and not self.always

    def merged_members(self) -> _Shape:
        """Return the common shape of a map's values."""
        merged = _Shape()
        for shape in self.fields.values():
            merged.absorb(shape)
        merged.outputs = self.outputs
        return merged

    def absorb(self, other: _Shape) -> None:
        """Add the values of another place in the same outputs."""
        self.outputs = max(self.outputs, other.outputs)
        self.kinds.update(other.kinds)
        self.present.update(other.present)
        for key, shape in other.fields.items():
            self.fields.setdefault(key, _Shape()).absorb(shape)
        if other.items is not None:
            if self.items is None:
                self.items = _Shape()
            self.items.absorb(other.items)
        for name in ("shortest", "least"):
            mine = getattr(self, name)
            theirs = getattr(other, name)
            if theirs is not None and (mine is None or theirs < mine):
                setattr(self, name, theirs)


def kind_of(value: JsonValue) -> str:
    """Return the JSON type of a value; every number is a `number`."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _root_schema(shape: _Shape, values: Sequence[JsonValue], variety: int) -> JsonObject:
    """Return the schema of whole outputs.

    Args:
        shape: their common shape.
        values: the outputs.
        variety: number of different outputs.
    """
    if shape.kinds["object"] >= MIN_OUTPUTS and not shape.always:
        alternatives = _separate_records(values)
        if alternatives:
            return {"anyOf": list(alternatives)}
    kinds = shape.kinds.keys() - {"null"}
    schema: JsonObject = _types(shape)
    if not schema:
        return schema
    is_varied = variety >= MIN_VARIETY
    if is_varied:
        if "object" in kinds:
            schema |= _object_schema(shape, "", depth=0, is_varied=True)
        if "array" in kinds:
            schema |= _array_schema(shape, "", depth=0)
    if not shape.shortest:
        return schema
    if kinds == {"string"}:
        schema["minLength"] = 1
    if shape.outputs >= MIN_RULES:
        if kinds == {"object"} and "required" not in schema:
            schema["minProperties"] = 1
        if kinds == {"array"} and is_varied:
            schema["minItems"] = 1
    return schema


def _separate_records(values: Sequence[JsonValue]) -> list[JsonObject]:
    """Return a schema for each kind of record, if the objects form kinds without a common field.

    Empty if they are of one kind, if other values are among them, or if each kind has too little
    support.
    """
    groups: list[tuple[set[str], list[JsonObject]]] = []
    for value in values:
        if not isinstance(value, dict):
            return []
        if not value:
            return []
        keys = set(value)
        members = [value]
        apart = []
        for group in groups:
            if group[0] & keys:
                keys |= group[0]
                members += group[1]
            else:
                apart.append(group)
        groups = [*apart, (keys, members)]
    if not 2 <= len(groups) <= MIN_VARIETY:
        return []
    if len(groups) * MIN_OUTPUTS > len(values) * 2:
        return []
    schemas: list[JsonObject] = []
    for _, members in sorted(groups, key=lambda group: -len(group[1])):
        shape = _Shape()
        for member in members:
            shape.add(member)
        if shape.is_map:
            return []
        if not shape.always:
            return []
        schema: JsonObject = {"type": "object", "required": list[JsonValue](shape.always)}
        if len(members) >= MIN_OUTPUTS:
            schema |= _object_schema(shape, "", depth=0, is_varied=True)
        schemas.append(schema)
    return schemas


def _types(shape: _Shape) -> JsonObject:
    """Return the schema of the types of values; empty if there are too many types."""
    kinds = sorted(shape.kinds)
    if len(kinds) - ("null" in kinds) not in (1, 2):
        return {}
    if len(kinds) == 1:
        return {"type": kinds[0]}
    return {"type": list[JsonValue](kinds)}


def _value_schema(shape: _Shape, name: str, depth: int) -> JsonObject:
    """Return the schema of a value inside outputs; empty without enough support."""
    kinds = shape.kinds.keys() - {"null"}
    # A field that was always null may get any value, unless it is named as an error.
    if not kinds:
        if name.lower() in ("error", "errors") and shape.outputs >= MIN_RULES:
            return {"type": "null"}
        return {}
    needed = MIN_OUTPUTS if kinds <= {"object", "array"} else MIN_VALUES
    if shape.outputs < needed:
        return {}
    schema = _types(shape)
    if not schema:
        return schema
    if "object" in kinds:
        is_varied = shape.outputs >= MIN_VALUES
        schema |= _object_schema(shape, name, depth=depth, is_varied=is_varied)
    if "array" in kinds:
        schema |= _array_schema(shape, name, depth=depth)
    if kinds == {"number"} and shape.least is not None and shape.least >= 0:
        words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", name)}
        if not words.isdisjoint(_COUNT_WORDS) and words.isdisjoint(_SIGNED_WORDS):
            schema["minimum"] = 0
    return schema


def _object_schema(shape: _Shape, name: str, *, depth: int, is_varied: bool) -> JsonObject:
    """Return the keywords of a schema for objects.

    Args:
        shape: their common shape.
        name: the name of their field.
        depth: their depth in the output.
        is_varied: whether enough different objects are known to require fields.
    """
    if shape.is_map:
        inner = _value_schema(shape.merged_members(), name, depth + 1)
        return {"additionalProperties": inner} if inner else {}
    schema: JsonObject = {}
    if is_varied and shape.always:
        schema["required"] = list[JsonValue](shape.always)
    properties: JsonObject = {}
    for key, member in shape.fields.items():
        inner = _value_schema(member, key, depth + 1)
        if inner:
            properties[key] = inner
    if properties:
        schema["properties"] = properties
    return schema


def _array_schema(shape: _Shape, name: str, *, depth: int) -> JsonObject:
    schema: JsonObject = {}
    if shape.items is not None:
        inner = _value_schema(shape.items, name, depth + 1)
        if inner:
            schema["items"] = inner
    # Deeper arrays belong to single records, which vary more than a few outputs show.
    if depth == 1 and shape.outputs >= MIN_VALUES:
        if shape.shortest and len(shape.kinds) == 1:
            schema["minItems"] = 1
    return schema
