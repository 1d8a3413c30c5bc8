"""What pydantic finds wrong with a document, in plain words."""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, cast, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from replanning.errors import Problem

JsonPath = tuple[str | int, ...]

_MAX_CANDIDATES: Final = 20_000

_MAX_NAME_CHARS: Final = 200

_BARE_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")

_PATH_STEP: Final = re.compile(r'\.?([A-Za-z_][A-Za-z0-9_-]*)|\[(\d+)\]|\[("(?:[^"\\]|\\.)*")\]')

_BRIEF_REPR: Final = reprlib.Repr()

_BRIEF_REPR.maxstring = _BRIEF_REPR.maxlong = _BRIEF_REPR.maxother = 80

_BRIEF_REPR.maxlist = 12


def format_path(path: Sequence[str | int]) -> str:
    """A path into a document as people write it: `tasks[3].retry.max_attempts`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif len(step) <= _MAX_NAME_CHARS and _BARE_KEY.fullmatch(step):
            text += f".{step}" if text else step
        else:
            short = step if len(step) <= _MAX_NAME_CHARS else f"{step[:_MAX_NAME_CHARS]}…"
            text += f"[{json.dumps(short, ensure_ascii=not short.isprintable())}]"
    return text


def parse_path(text: str) -> JsonPath:
    """The path that `format_path` wrote; a key that was cut stays cut."""
    return tuple(int(m[2]) if m[2] else m[1] or json.loads(m[3]) for m in _PATH_STEP.finditer(text))


def line_and_column(text: str, position: int) -> str:
    """Where a character stands, as people count: `line:column`, both from 1."""
    return f"{text.count(chr(10), 0, position) + 1}:{position - text.rfind(chr(10), 0, position)}"


def brief_repr(value: object) -> str:
    """A value as a message shows it, cut where it is long."""
    return _BRIEF_REPR.repr(value)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """`did you mean 'x'?` for the nearest of the known names, or nothing."""
    if len(known) > _MAX_CANDIDATES or len(name) > _MAX_NAME_CHARS:  # comparing takes the product of the lengths
        return ""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else ""


class NameSuggester:
    """Near names for many unknown ones, given up when looking for them would take long."""

    def __init__(self) -> None:
        self._candidates_left = _MAX_CANDIDATES

    def __call__(self, name: str, known: Collection[str]) -> str:
        """`; did you mean 'x'?`, or nothing."""
        if len(known) > self._candidates_left:
            return ""
        self._candidates_left -= len(known)
        hint = did_you_mean(name, known)
        return f"; {hint}" if hint else ""


_JSON_FIELDS: Final = frozenset({"arguments", "body", "context", "input_schema", "metadata"})

_JSON_UNION_TAGS: Final = frozenset({"dict", "list", "str", "int", "float", "bool"})

_EXPECTED_BY_ERROR_TYPE: Final[Mapping[str, str]] = {
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
_CROSS_CHECKED_TASK_FIELDS: Final = frozenset({"id", "depends_on", "arguments"})

_CROSS_CHECKED_TOOL_FIELDS: Final = frozenset({"name", "parameters"})

_CROSS_CHECKED_PLAN_FIELDS: Final = frozenset({"tasks", "tools", "resources", "objects", "sequential", "mcp"})


def validation_problems(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """What pydantic found, in plain words and with the place of each.

    Args:
        error: as pydantic raised it.
        model: what was validated against.
    """
    hints = NameSuggester()
    return [_to_problem(details, model, hints) for details in error.errors(include_url=False)]


def _to_problem(details: ErrorDetails, model: type[BaseModel], hints: NameSuggester) -> Problem:
    path = _without_union_tags(details["loc"])
    kind = details["type"]
    if kind == "missing":
        return Problem(format_path(path), f"{path[-1]!r} is missing")
    if kind == "extra_forbidden":
        fields = list(getattr(_model_at(model, path[:-1]), "model_fields", ()))
        return Problem(
            format_path(path), f"there is no field {brief_repr(path[-1])} here{hints(str(path[-1]), fields)}"
        )
    return Problem(format_path(path), _error_message(details))


def _error_message(details: ErrorDetails) -> str:
    kind, value, limits = details["type"], details["input"], details.get("ctx", {})
    if kind in _EXPECTED_BY_ERROR_TYPE:
        return f"expected {_EXPECTED_BY_ERROR_TYPE[kind]}, got {brief_repr(value)}{_fix_hint(kind, value)}"
    match kind:
        case "string_too_short":
            return "must not be empty"
        case "string_too_long":
            return f"has {len(value)} characters, at most {limits['max_length']} are allowed"
        case "string_pattern_mismatch" if not value.strip():
            return "must be more than whitespace"
        case "string_pattern_mismatch" if value != value.strip():
            return f"{brief_repr(value)} must not begin or end with whitespace"
        case "string_pattern_mismatch":
            return f"{brief_repr(value)} must not contain control characters"
        case "greater_than_equal":
            return f"must be at least {limits['ge']:g}, got {brief_repr(value)}"
        case "greater_than":
            return f"must be more than {limits['gt']:g}, got {brief_repr(value)}"
        case "value_error":
            return f"{limits['error']}, got {brief_repr(value)}"
    return f"{details['msg']}, got {brief_repr(value)}"


def _fix_hint(kind: str, value: object) -> str:
    if kind == "string_type" and isinstance(value, bool | int | float):
        return "; put it in quotes"
    if kind == "bool_type" and isinstance(value, str) and value.lower() in ("yes", "no", "on", "off"):
        return "; yes, no, on and off are text here"
    return ""


def _without_union_tags(location: tuple[int | str, ...]) -> JsonPath:
    """The path in the document: pydantic puts `dict`, `list` … before each step into a JSON value."""
    start = next((i for i, step in enumerate(location) if step in _JSON_FIELDS), None)
    if start is None:
        return tuple(step for step in location if step != "[key]")
    first = start + (1 if location[start] == "body" else 2)
    inner = location[first:]
    return location[:first] + tuple(step for i, step in enumerate(inner) if i % 2 or step not in _JSON_UNION_TAGS)


def _model_at(model: type[BaseModel], path: JsonPath) -> type[BaseModel] | None:
    """The model that describes the part of a document at `path`."""
    found: type[BaseModel] | None = model
    for step in path:
        if isinstance(step, str) and found is not None:
            field = found.model_fields.get(step)
            found = _model_in_annotation(field.annotation) if field is not None else None
    return found


def _model_in_annotation(annotation: Any) -> type[BaseModel] | None:  # any kind of type expression
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in_annotation, get_args(annotation))), None)


def without_invalid_fields(problems: list[Problem], data: object, model: type[BaseModel]) -> dict[str, object] | None:
    """A plan document without the fields that are wrong, so that what else is wrong with it can be found.

    A misspelt field that bears on the rest is taken for the one that was meant. None where such a field itself is
    wrong, so that checking on would blame what is right.
    """
    if not isinstance(data, dict):
        return None
    rest = {key: list(value) if isinstance(value, list | tuple) else value for key, value in data.items()}
    return rest if all(_drop_field(rest, parse_path(problem.place), model) for problem in problems) else None


def _drop_field(rest: dict[str, object], path: JsonPath, model: type[BaseModel]) -> bool:
    """Take a wrong field out; False where that would not do."""
    match path:
        case ("tasks" | "tools" as group, int(index), str(name), *_):
            parts = cast("list[object]", rest[group])  # a path with an index leads through a list
            part, bearing = parts[index], _CROSS_CHECKED_TASK_FIELDS if group == "tasks" else _CROSS_CHECKED_TOOL_FIELDS
            if not isinstance(part, dict) or name not in part or name in bearing:
                return False
            known = getattr(_model_at(model, path[:2]), "model_fields", {})
            parts[index] = _without_field(part, name, renamed_to="" if name in known else _closest_name(name, bearing))
        case ("goal", *_):
            rest["goal"] = {"objective": ""}
        case (str(name), *_) if name in rest and not _is_cross_checked(name, _CROSS_CHECKED_PLAN_FIELDS):
            del rest[name]
        case _:
            return False
    return True


def _without_field(part: dict[str, object], name: str, *, renamed_to: str) -> dict[str, object]:
    """The part without a field, whose value goes to the one that was meant unless that is there."""
    left = {key: value for key, value in part.items() if key != name}
    return {renamed_to: part[name], **left} if renamed_to else left


def _closest_name(name: str, names: frozenset[str]) -> str:
    return next((one for one in sorted(names) if did_you_mean(name, [one])), "")


def _is_cross_checked(name: str, bearing: frozenset[str]) -> bool:
    return name in bearing or bool(did_you_mean(name, sorted(bearing)))
