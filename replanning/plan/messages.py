"""Formatting of messages: paths, shortened values and lists, near names, pydantic's errors."""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from typing import Any, Final, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from replanning.errors import Problem
from replanning.plan.types import JsonPath
from replanning.secrets import mask_secrets

MAX_PROBLEMS: Final = 1_000
"""Maximum number of problems that an error lists; nobody reads more."""

FURTHER_PROBLEMS: Final = Problem("", "there are further problems")
"""Last problem of an error that does not list them all."""

_MAX_CANDIDATES: Final = 20_000
_MAX_NAME_CHARS: Final = 200
_COUNTED_ID: Final = re.compile(r"(?:.*\.)?([qr])([0-9]+)", re.DOTALL)
_QUOTED: Final = re.compile("'([^']*)'")
_BARE_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_PATH_STEP: Final = re.compile(r'\.?([A-Za-z_][A-Za-z0-9_-]*)|\[(\d+)\]|\[("(?:[^"\\]|\\.)*")\]')
_CUT_MARGIN: Final = 2_000
_MAX_SPLIT_WORD_CHARS: Final = 30
"""Number of characters read beyond a cut, for a secret that lies across it."""


class _SafeRepr(reprlib.Repr):
    """Shortened repr that masks secrets before it cuts, because half a secret is not recognised."""

    def repr_str(self, x: str, level: int) -> str:
        """Return the repr of a text; a long text loses its middle."""
        # Only the ends are shown, so a huge text is not searched as a whole.
        if len(x) > 2 * _CUT_MARGIN:
            x = x[:_CUT_MARGIN] + x[-_CUT_MARGIN:]
        return super().repr_str(mask_secrets(x), level)


_BRIEF_REPR: Final = _SafeRepr()
_BRIEF_REPR.maxstring = _BRIEF_REPR.maxlong = _BRIEF_REPR.maxother = 80
_BRIEF_REPR.maxlist = 12


def spoken_id(counted: str) -> str:
    """Return the id of a question or replan as words: `question 1`, `replan 2`."""
    match = _COUNTED_ID.fullmatch(counted)
    return f"{'question' if match[1] == 'q' else 'replan'} {match[2]}" if match else counted


def format_duration(seconds: float) -> str:
    """Return a duration as people write it: `490 µs`, `84 ms`, `3 s`, `1.7 s`, `5 min 20 s`, `2 h`."""
    if not isfinite(seconds):
        return f"{seconds} s"
    if 0.000001 <= seconds < 0.0005:
        return f"{seconds * 1_000_000:.0f} µs"
    if 0.0005 <= seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 1:
        return f"{seconds:.2g} s"
    if seconds < 120:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    # Two units are enough: seconds do not matter in days.
    number, rest = divmod(round(seconds), 60)
    larger = "min"
    smaller = "s"
    if number >= 120:
        number, rest = divmod(number, 60)
        larger = "h"
        smaller = "min"
        if number >= 48:
            number, rest = divmod(number, 24)
            larger = "d"
            smaller = "h"
    text = f"{number} {larger}"
    if rest:
        text += f" {rest} {smaller}"
    return text


def pluralise(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 replan`, `2 replans`.

    Args:
        number: the number.
        noun: the noun in the singular.
        plural: its plural; by default, with an `s`.
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number} {plural or noun + 's'}"


def format_path(path: Sequence[str | int]) -> str:
    """Return a path into a document as people write it: `tasks[3].retry.max_attempts`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif len(step) <= _MAX_NAME_CHARS and _BARE_KEY.fullmatch(step):
            text += f".{step}" if text else step
        else:
            short = truncate(step, _MAX_NAME_CHARS + 1)
            text += f"[{json.dumps(short, ensure_ascii=not short.isprintable())}]"
    return text


def parse_path(text: str) -> JsonPath:
    """Return the path that `format_path` wrote; a shortened key stays shortened."""
    path: list[str | int] = []
    for match in _PATH_STEP.finditer(text):
        name, index, quoted = match.groups()
        if index:
            path.append(int(index))
        elif name:
            path.append(name)
        else:
            path.append(json.loads(quoted))
    return tuple(path)


def brief_repr(value: object) -> str:
    """Return the repr of a value without secrets, shortened if it is long."""
    try:
        return mask_secrets(_BRIEF_REPR.repr(value))
    except ValueError:  # Python refuses to print numbers with thousands of digits
        return f"<{type(value).__name__}>"


def cut(text: str, limit: int, *, from_end: bool = False) -> str:
    """Return the first or last characters of a text, masked before the cut."""
    if len(text) <= limit:
        return text
    most = limit + _CUT_MARGIN
    step = -1 if from_end else 1
    part = text if len(text) <= most else text[-most:] if from_end else text[:most]
    clean = mask_secrets(part)[::step]
    return (clean if part is text else clean[:-_CUT_MARGIN])[:limit][::step]


def truncate(text: str, limit: int) -> str:
    """Return a text of at most `limit` characters, with `…` at its end if it was longer."""
    return text if len(text) <= limit else f"{whole_words(cut(text, limit - 1))}…"


def whole_words(beginning: str) -> str:
    """Return the beginning of a text without its last word, which the cut may have split.

    A long last word, such as a path, stays: its beginning says something.
    """
    words, _, last = beginning.rpartition(" ")
    if words and len(last) <= _MAX_SPLIT_WORD_CHARS:
        return words
    return beginning


def one_line(text: str, limit: int) -> str:
    """Return a text on one line of at most `limit` characters."""
    line = " ".join(text.split())
    if len(line) > limit:
        return truncate(line, limit)
    return line


def join_names(names: Collection[str], limit: int) -> str:
    """Return the first `limit` names with commas between them, and `, …` if there are more."""
    return ", ".join(islice(names, limit)) + (", …" if len(names) > limit else "")


def join_parts(*parts: str) -> str:
    """Return the non-empty parts of a message, with semicolons between them."""
    return "; ".join(filter(None, parts))


def join_alternatives(texts: Sequence[str]) -> str:
    """Return two or more texts with commas between them, and `or` before the last one."""
    *most, last = texts
    return f"{', '.join(most)}, or {last}"


def error_lines(error: ValidationError, limit: int = 10, *, root: str = "") -> list[str]:
    """Return the first errors of pydantic as `path: message`, or `root: message` for the whole."""
    # The input may contain a secret, and these lines go into logs.
    details = error.errors(include_url=False, include_context=False, include_input=False)[:limit]
    places = [".".join(map(str, item["loc"])) or root for item in details]
    return [
        f"{place}: {item['msg']}" if place else item["msg"]
        for place, item in zip(places, details, strict=True)
    ]


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return `did you mean 'x'?` for the nearest of the known names; "" if none is near."""
    # The time grows with the number of names and with the product of the lengths.
    if len(known) > _MAX_CANDIDATES or len(name) > _MAX_NAME_CHARS:
        return ""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else ""


@dataclass
class NameSuggester:
    """Suggests near names for many unknown ones, within a limit of comparisons for all."""

    _candidates_left: int = _MAX_CANDIDATES

    def __call__(self, name: str, known: Collection[str]) -> str:
        """Return `; did you mean 'x'?`; "" if no name is near."""
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


_MAX_FIELDS_LISTED: Final = 8
"""Maximum number of fields of a part that are all listed after an unknown one."""


def first_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Return the first problems: all, or `MAX_PROBLEMS` and `FURTHER_PROBLEMS`."""
    first = list(islice(problems, MAX_PROBLEMS + 1))
    return [*first[:MAX_PROBLEMS], FURTHER_PROBLEMS] if len(first) > MAX_PROBLEMS else first


def validation_problems(
    error: ValidationError, model: type[BaseModel], *, root: str = ""
) -> list[Problem]:
    """Return the errors of pydantic in plain words, each with its place.

    Args:
        error: the error that pydantic raised.
        model: the model that raised it.
        root: the name of the whole, at the beginning of each place.
    """
    hints = NameSuggester()
    problems = []
    errors = error.errors(include_url=False)[: MAX_PROBLEMS + 1]
    unknown = _unknown_fields(errors, model, hints)
    for details in _without_misspelt(errors, unknown):
        path = _without_union_tags(details["loc"])
        kind = details["type"]
        value = details["input"]
        limits = details.get("ctx", {})
        got = f", got {brief_repr(value)}"
        match kind:
            case "missing":
                message = f"{path[-1]!r} is missing"
            case "extra_forbidden":
                message = f"there is no field {brief_repr(path[-1])} here"
                message += _comma_hint(str(path[-1]), value) or unknown[path]
            case _ if kind in _EXPECTED_BY_ERROR_TYPE:
                message = f"expected {_EXPECTED_BY_ERROR_TYPE[kind]}{got}"
                # YAML reads a version such as 1.10 as a number, which is easy to overlook.
                if kind == "string_type" and isinstance(value, bool | int | float):
                    message += "; put it in quotes"
                # YAML 1.1 reads these words as booleans, and many people expect it.
                elif kind == "bool_type" and str(value).lower() in ("yes", "no", "on", "off"):
                    message += "; yes, no, on and off are text here"
                elif kind in ("tuple_type", "list_type") and isinstance(value, str):
                    message += "; put it in brackets"
                elif kind == "model_type":
                    message += _form_hint(model_at(model, path))
            case "string_too_short" | "too_short":
                message = "must not be empty"
            case "string_too_long":
                message = f"has {len(value)} characters, at most {limits['max_length']} are allowed"
            case "string_pattern_mismatch" if not value.strip():
                message = "must be more than whitespace"
            case "string_pattern_mismatch":
                fault = (
                    "contain control characters"
                    if value == value.strip()
                    else "begin or end with whitespace"
                )
                message = f"{brief_repr(value)} must not {fault}"
            case "greater_than_equal":
                message = f"must be at least {limits['ge']:g}{got}"
            case "literal_error":
                near = hints(str(value), _QUOTED.findall(limits["expected"]))
                message = f"expected {limits['expected']}{got}{near}"
            case "greater_than":
                message = f"must be more than {limits['gt']:g}{got}"
            case "value_error":
                message = _showing(value, str(limits["error"]))
            case _:
                message = f"{details['msg']}{got}"
        place = mask_secrets(format_path((root, *path) if root else path))
        problems.append(Problem(place, message))
    return first_problems(problems)


def _unknown_fields(
    errors: Sequence[ErrorDetails], model: type[BaseModel], hints: NameSuggester
) -> dict[JsonPath, str]:
    """Return the places of unknown fields, each with a suggestion, which may be empty."""
    unknown: dict[JsonPath, str] = {}
    for details in errors:
        if details["type"] == "extra_forbidden":
            path = _without_union_tags(details["loc"])
            *parent, name = path
            names = _field_names(model_at(model, tuple(parent)))
            unknown[path] = hints(str(name), names)
            if not unknown[path] and 0 < len(names) <= _MAX_FIELDS_LISTED:
                unknown[path] = f"; its fields are {', '.join(names)}"
    return unknown


def _form_hint(model: type[BaseModel] | None) -> str:
    """Return how to write a part with one required field; "" for others."""
    fields: Mapping[str, FieldInfo] = getattr(model, "model_fields", {})
    required = [name for name, each in fields.items() if each.is_required()]
    return f"; write {{{required[0]}: …}}" if len(required) == 1 else ""


def _comma_hint(field: str, value: object) -> str:
    """Return a hint for `{a: b, c d}`, where YAML reads `c d` as a field; "" for other fields."""
    if value is None and " " in field:
        return "; put a text with a comma in quotes"
    return ""


def _without_misspelt(
    errors: Sequence[ErrorDetails], unknown: Mapping[JsonPath, str]
) -> Iterator[ErrorDetails]:
    """Yield the errors, without missing fields that are present under misspelt names.

    That is one mistake, reported at the misspelt name.
    """
    misspelt = {(*path[:-1], hint) for path, hint in unknown.items()}
    for details in errors:
        *parent, name = _without_union_tags(details["loc"]) or ("",)
        is_missing = details["type"] == "missing"
        if not is_missing or (*parent, f"; did you mean {name!r}?") not in misspelt:
            yield details


def _field_names(model: type[BaseModel] | None) -> list[str]:
    """Return the fields of a model as a document spells them; none for None."""
    fields: Mapping[str, FieldInfo] = getattr(model, "model_fields", {})
    return [each.alias or name for name, each in fields.items()]


def _showing(value: object, message: str) -> str:
    """Return a message with the wrong value appended, unless the message quotes the value."""
    shown = brief_repr(value)
    if isinstance(value, str) and shown in message:
        return message
    return f"{message}, got {shown}"


_STEPS_OF_PYDANTIC: Final = ("[key]", "[file]", "[plan]")
"""Pydantic's steps into a key and into a form of `include`, which no document has."""


def _without_union_tags(location: tuple[int | str, ...]) -> JsonPath:
    """Return the path in the document, without pydantic's own steps into JSON values."""
    start = next((i for i, step in enumerate(location) if step in _JSON_FIELDS), None)
    if start is None:
        return tuple(step for step in location if step not in _STEPS_OF_PYDANTIC)
    first = start + (1 if location[start] == "body" else 2)
    inner = location[first:]
    return location[:first] + tuple(
        step for i, step in enumerate(inner) if i % 2 or step not in _JSON_UNION_TAGS
    )


def model_at(model: type[BaseModel], path: JsonPath) -> type[BaseModel] | None:
    """Return the model of the part of a document at `path`; None if it has none."""
    part: type[BaseModel] | None = model
    is_key = False
    for step in path:
        if is_key or not isinstance(step, str) or part is None:
            is_key = False
            continue
        field = part.model_fields.get(step)
        annotation = None if field is None else field.annotation
        part = _model_in_annotation(annotation)
        # The next step is a key of the mapping, not a field.
        is_key = get_origin(annotation) is Mapping
    return part


def _model_in_annotation(annotation: Any) -> type[BaseModel] | None:  # any kind of type expression
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in_annotation, get_args(annotation))), None)
