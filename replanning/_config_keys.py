"""The keys of settings: which there are, what each takes, and what is wrong with what was given for them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final, get_args, get_origin

from pydantic import BaseModel, ValidationError

from replanning._errors import Problem
from replanning._plan import JsonObject, JsonValue
from replanning._redaction import Redactor
from replanning._settings import Settings
from replanning._wording import brief_repr, did_you_mean, format_path

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# In the file and to people on the left; the field that a plan has, too, on the right.
_RENAMED: Final[Mapping[str, str]] = {"retry.exponential_backoff": "retry.exponential"}
_SHOWN: Final[Mapping[str, str]] = {field: key for key, field in _RENAMED.items()}
_DEEPEST: Final = 20
"""Levels of a value; no setting has so many."""
_CREDENTIAL: Final = re.compile(r"(?i)(?:^|[._-])(?:api[_-]?)?(?:key|token|secret|password|credentials?)s?$")


@dataclass(frozen=True, slots=True)
class Given:
    """What was given for a key, and where."""

    value: JsonValue
    source: str


def _fields(model: type[BaseModel] = Settings, lead: str = "") -> Iterator[tuple[str, object, bool]]:
    """Every key, what it holds, and whether it is a section."""
    for field_name, field in model.model_fields.items():
        name = f"{lead}{field.alias or field_name}"
        key = _SHOWN.get(name, name)
        section = _section(field.annotation)
        yield key, field.annotation, section is not None
        if section is not None:
            yield from _fields(section, f"{key}.")


@cache
def keys() -> Mapping[str, bool]:
    """Every key, and whether it is a section."""
    return {key: is_section for key, _, is_section in _fields()}


@cache
def types() -> Mapping[str, Any]:
    """The type of what each key holds."""
    return {key: annotation for key, annotation, _ in _fields()}


@cache
def tables() -> frozenset[str]:
    """The keys that stand for mappings whose names are anybody's, such as those of models, with dots in them."""
    return frozenset(key for key, annotation, _ in _fields() if get_origin(annotation) is dict)


def _section(annotation: object) -> type[BaseModel] | None:
    options = (annotation, *(() if get_origin(annotation) is dict else get_args(annotation)))
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)


def flat(value: JsonValue, steps: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], JsonValue]]:
    """The leaves of a mapping; an empty section has none, and what is to stay whole is a leaf."""
    if isinstance(value, dict) and ".".join(steps) not in tables():
        for key, item in value.items():
            yield from flat(item, (*steps, key))
    elif steps or value is not None:
        yield steps, value


def values(settings: Settings) -> dict[str, JsonValue]:
    """Every key with what it holds, in the order of the sections."""
    found = {format_path(steps): value for steps, value in flat(settings.model_dump(mode="json", by_alias=True))}
    return {_SHOWN.get(key, key): value for key, value in found.items()}


# Checking


def is_known(key: str, given: Given, problems: list[Problem]) -> bool:
    """Whether a key can hold what was given; what is wrong with the key itself is added to the problems."""
    known = keys()
    is_section = known.get(key)
    if given.value is None and (is_section or key in tables()):
        return False  # a section with nothing in it
    if is_section is not None and (problem := _unwritable(given.value)):
        problems.append(_problem(key, given, problem))
    elif is_section is False:
        return True
    elif is_section:
        inner = ", ".join(k.removeprefix(f"{key}.") for k in known if k.startswith(f"{key}."))
        problems.append(_problem(key, given, f"expected a section with {inner}; got {_got(given.value)}"))
    elif _CREDENTIAL.search(key):
        advice = (
            "keys of API services are taken from the environment alone; remove it here, and consider it known to others"
        )
        problems.append(_problem(key, given, advice))
    else:
        problems.append(_problem(key, given, f"there is no such setting; {_hint(key, known)}"))
    return False


def _unwritable(value: JsonValue) -> str:
    """Why a value cannot be written down; empty where it can."""
    if is_too_deep(value):
        return f"nested more than {_DEEPEST} deep"
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # what the system gives may be no text, and stands as half characters
        return "it holds what is no text in UTF-8"
    return ""


def is_too_deep(value: JsonValue, levels: int = _DEEPEST) -> bool:
    """Whether a value is nested deeper than that of any setting."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return any(levels == 0 or is_too_deep(item, levels - 1) for item in inner)


def _hint(key: str, known: Collection[str]) -> str:
    """What may have been meant: a setting of the same section, or one of the same name in another."""
    lead, _, name = key.rpartition(".")
    siblings = [k for k in known if k.rpartition(".")[0] == lead] or [k for k in known if "." not in k]
    elsewhere = [k for k in known if k.rpartition(".")[2] == name]
    if len(elsewhere) == 1:
        return f"did you mean {elsewhere[0]!r}?"
    return did_you_mean(key, siblings) or f"known are {', '.join(siblings)}"


def validated(given: Mapping[str, Given], problems: list[Problem]) -> Settings | None:
    """The settings that known keys make; what is wrong with their values is added to the problems."""
    document: JsonObject = {}
    for key, one in given.items():
        *sections, name = _RENAMED.get(key, key).split(".")
        inner = document
        for section in sections:
            inner = inner.setdefault(section, {})  # type: ignore[assignment] # only known sections come here
        inner[name] = one.value
    try:
        # As JSON, because there a list may stand for a tuple, and yet true is no number and "1" neither.
        return Settings.model_validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        problems += dict.fromkeys(_wrong(item, given) for item in error.errors())
        return None


def _wrong(error: ErrorDetails, given: Mapping[str, Given]) -> Problem:
    """A value that is not allowed, under the name that people know, with what would be."""
    steps = [step for step in error["loc"] if isinstance(step, str)]
    for length in range(len(steps), 0, -1):
        field = ".".join(steps[:length])
        key = _SHOWN.get(field, field)
        if key in given:
            inner = steps[length:] if field in tables() else []
            return _problem(" ".join([key, *inner]), given[key], _expected(error, [*steps[:length], *inner]))
    lead = ".".join(steps)
    concerned = [one for key, one in given.items() if key.startswith(f"{lead}.")]
    sources = ", ".join(dict.fromkeys(one.source for one in concerned))
    return _problem(lead, Given(None, sources), error["msg"].removeprefix("Value error, "))


def _problem(key: str, given: Given, message: str) -> Problem:
    return Problem(f"{given.source} {key}", message)


# What would be right, in words


def _expected(error: ErrorDetails, steps: Sequence[str]) -> str:
    """What is wrong with a value, and what would be right."""
    got = _got(error["input"])
    match error["type"]:
        case "value_error":
            return f"{error['msg'].removeprefix('Value error, ')}; got {got}"
        case "missing":
            return "it is missing"
        case "extra_forbidden":
            return "there is no such setting"
    return f"expected {_allowed(steps)}, got {got}"


def _got(value: JsonValue) -> str:
    """What was given, without secrets; these are found while they are whole, and so before it is cut."""
    redactor = Redactor()
    return redactor.text(brief_repr(redactor.value(value)))


@cache
def _schema() -> JsonObject:
    return Settings.model_json_schema()


def _allowed(steps: Sequence[str]) -> str:
    """What a field takes, in words made from its schema."""
    schema = _schema()
    definitions = _part(schema, "$defs")
    for step in steps:
        fields = _part(schema, "properties")
        schema = _part(fields, step) if fields else _part(schema, "additionalProperties")
        if "$ref" in schema:
            schema = _part(definitions, str(schema["$ref"]).rpartition("/")[2])
    return _in_words(schema)


def _part(schema: JsonObject, name: str) -> JsonObject:
    """A part of a schema that is an object itself; empty where there is none."""
    part = schema.get(name)
    return part if isinstance(part, dict) else {}


def _in_words(schema: JsonObject) -> str:
    match schema:
        case {"anyOf": list(options)}:
            return " or ".join(_in_words(option) for option in options if isinstance(option, dict))
        case {"enum": list(values)}:
            return f"one of {', '.join(map(str, values))}"
        case {"const": value}:
            return str(value)
        case {"type": "array", "items": dict(item)}:
            return f"a list of {_in_words(item)}{', at least one' if schema.get('minItems') else ''}"
        case {"type": "integer" | "number"}:
            return _number_in_words(schema)
        case {"type": "object", "properties": dict(inner)}:
            return f"a section with {', '.join(inner)}"
        case {"type": "object"}:
            return "a mapping by name"
        case {"type": "string", "minLength": int()}:
            return "text that is not empty"
    names = {"boolean": "true or false", "string": "text", "null": "null"}
    return names.get(str(schema.get("type")), "something else")


def _number_in_words(schema: JsonObject) -> str:
    noun = "a whole number" if schema["type"] == "integer" else "a number"
    low, above, high = schema.get("minimum"), schema.get("exclusiveMinimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f"{noun} from {low:g} to {high:g}"
    if low is not None:
        return f"{noun} of at least {low:g}"
    return noun if above is None else f"{noun} above {above:g}"
