"""What pydantic finds wrong with a document, in plain words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from replanning._errors import Problem
from replanning._wording import Hints, Path, did_you_mean, path_of, place, shown

_JSON_FIELDS: Final = frozenset({"arguments", "body", "context", "input_schema", "metadata"})
_JSON_KINDS: Final = frozenset({"dict", "list", "str", "int", "float", "bool"})

_EXPECTED: Final[Mapping[str, str]] = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping of names to values",
    "mapping_type": "a mapping of names to values",
    "model_type": "a mapping of fields to values",
    "model_attributes_type": "a mapping of fields to values",
    "finite_number": "a finite number",
    "invalid-json-value": "a JSON value",
}

# Where one of these is wrong, other checks would find fault only because of it.
_BEARING_OF_TASK: Final = frozenset({"id", "depends_on", "arguments"})
_BEARING_OF_TOOL: Final = frozenset({"name", "parameters"})
_BEARING_OF_PLAN: Final = frozenset({"tasks", "tools", "resources", "objects", "sequential", "mcp"})


def plain_problems(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """What pydantic found, in plain words and with the place of each.

    Args:
        error: as pydantic raised it.
        model: what was validated against.
    """
    hints = Hints()
    return [_plain(details, model, hints) for details in error.errors(include_url=False)]


def _plain(details: ErrorDetails, model: type[BaseModel], hints: Hints) -> Problem:
    path = _without_kinds(details["loc"])
    kind = details["type"]
    if kind == "missing":
        return Problem(place(path), f"{path[-1]!r} is missing")
    if kind == "extra_forbidden":
        fields = list(getattr(_model_at(model, path[:-1]), "model_fields", ()))
        return Problem(place(path), f"there is no field {shown(path[-1])} here{hints(str(path[-1]), fields)}")
    return Problem(place(path), _message(details))


def _message(details: ErrorDetails) -> str:
    kind, value, limits = details["type"], details["input"], details.get("ctx", {})
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, got {shown(value)}{_advice(kind, value)}"
    match kind:
        case "string_too_short":
            return "must not be empty"
        case "string_too_long":
            return f"has {len(value)} characters, at most {limits['max_length']} are allowed"
        case "string_pattern_mismatch" if not value.strip():
            return "must be more than whitespace"
        case "string_pattern_mismatch" if value != value.strip():
            return f"{shown(value)} must not begin or end with whitespace"
        case "string_pattern_mismatch":
            return f"{shown(value)} must not contain control characters"
        case "greater_than_equal":
            return f"must be at least {limits['ge']:g}, got {shown(value)}"
        case "greater_than":
            return f"must be more than {limits['gt']:g}, got {shown(value)}"
        case "value_error":
            return f"{limits['error']}, got {shown(value)}"
    return f"{details['msg']}, got {shown(value)}"


def _advice(kind: str, value: object) -> str:
    if kind == "string_type" and isinstance(value, bool | int | float):
        return "; put it in quotes"
    if kind == "bool_type" and isinstance(value, str) and value.lower() in ("yes", "no", "on", "off"):
        return "; yes, no, on and off are text here"
    return ""


def _without_kinds(location: tuple[int | str, ...]) -> Path:
    """The path in the document: pydantic puts `dict`, `list` … before each step into a JSON value."""
    start = next((i for i, step in enumerate(location) if step in _JSON_FIELDS), None)
    if start is None:
        return tuple(step for step in location if step != "[key]")
    first = start + (1 if location[start] == "body" else 2)
    inner = location[first:]
    return location[:first] + tuple(step for i, step in enumerate(inner) if i % 2 or step not in _JSON_KINDS)


def _model_at(model: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """The model that describes the part of a document at `path`."""
    found: type[BaseModel] | None = model
    for step in path:
        if isinstance(step, str) and found is not None:
            field = found.model_fields.get(step)
            found = _model_in(field.annotation) if field is not None else None
    return found


def _model_in(annotation: Any) -> type[BaseModel] | None:  # any kind of type expression
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def remainder(problems: list[Problem], data: object, model: type[BaseModel]) -> dict[str, object] | None:
    """A plan document without the fields that are wrong, so that what else is wrong with it can be found.

    A misspelt field that bears on the rest is taken for the one that was meant. None where such a field itself is
    wrong, so that checking on would blame what is right.
    """
    if not isinstance(data, dict):
        return None
    rest = {key: list(value) if isinstance(value, list | tuple) else value for key, value in data.items()}
    return rest if all(_drop(rest, path_of(problem.place), model) for problem in problems) else None


def _drop(rest: dict[str, object], path: Path, model: type[BaseModel]) -> bool:
    """Take a wrong field out; False where that would not do."""
    match path:
        case ("tasks" | "tools" as group, int(index), str(name), *_):
            parts = cast("list[object]", rest[group])  # a path with an index leads through a list
            part, bearing = parts[index], _BEARING_OF_TASK if group == "tasks" else _BEARING_OF_TOOL
            if not isinstance(part, dict) or name not in part or name in bearing:
                return False
            known = getattr(_model_at(model, path[:2]), "model_fields", {})
            parts[index] = _without(part, name, meant="" if name in known else _nearest(name, bearing))
        case ("goal", *_):
            rest["goal"] = {"objective": ""}
        case (str(name), *_) if name in rest and not _bears(name, _BEARING_OF_PLAN):
            del rest[name]
        case _:
            return False
    return True


def _without(part: dict[str, object], name: str, *, meant: str) -> dict[str, object]:
    """The part without a field, whose value goes to the one that was meant unless that is there."""
    left = {key: value for key, value in part.items() if key != name}
    return {meant: part[name], **left} if meant else left


def _nearest(name: str, names: frozenset[str]) -> str:
    return next((one for one in sorted(names) if did_you_mean(name, [one])), "")


def _bears(name: str, bearing: frozenset[str]) -> bool:
    return name in bearing or bool(did_you_mean(name, sorted(bearing)))
