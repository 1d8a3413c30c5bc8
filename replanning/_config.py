"""Settings from a file, the environment and arguments, checked as a whole and each with its source."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args, get_origin

from pydantic import BaseModel, ValidationError

from replanning._errors import PlanError, Problem, SettingsError
from replanning._loading import read_document
from replanning._plan import JsonObject, JsonValue
from replanning._positions import positions, yaml_tokens
from replanning._redaction import Redactor
from replanning._settings import Settings
from replanning._wording import did_you_mean, place, shown

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

FILES: Final = ("replanning.yaml", ".replanning.yaml")
"""Looked for where the program runs, when no file is named."""

SECTION: Final = "replanning"
PLANNING: Final = "planning"
"""The section of planning mode, beside the other."""

MAX_SIZE: Final = 1024 * 1024
"""Largest settings file, in bytes."""

# In the file and to people on the left; the field that a plan has, too, on the right.
_RENAMED: Final[Mapping[str, str]] = {"retry.exponential_backoff": "retry.exponential"}
_CREDENTIAL: Final = re.compile(r"(?i)(?:^|[._-])(?:api[_-]?)?(?:key|token|secret|password|credentials?)s?$")
_FLAGS: Final[Mapping[str, bool]] = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings, and where each that is not a default comes from.

    Attributes:
        settings: what holds.
        sources: by key, such as `alternatives.min_confidence`: file with line, variable, or argument.
    """

    settings: Settings
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Given:
    value: JsonValue
    source: str


def load_settings(
    path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, JsonValue] | None = None,
) -> LoadedSettings:
    """The settings: arguments go before the environment, that before the file, that before the defaults.

    Lists replace one another, they are not merged. Keys of API services are read from the environment by those
    who need them; in the file they are an error.

    Args:
        path: a YAML file with a section `replanning`; by default `replanning.yaml` or `.replanning.yaml` where
            the program runs, if there is one.
        environ: the environment; by default that of the program.
        overrides: arguments by key, such as `{"alternatives.min_confidence": 0.6}`.

    Raises:
        SettingsError: with every problem; each names its key, its source and what is allowed.
    """
    problems: list[Problem] = []
    given = _from_file(_find(path), problems)
    given |= _from_environment(os.environ if environ is None else environ)
    given |= {key: _Given(value, "argument") for key, value in (overrides or {}).items()}
    known = _keys(Settings)
    usable = {key: one for key, one in given.items() if _is_known(key, one, known, problems)}
    settings = _validated(usable, problems)
    if problems or settings is None:
        raise SettingsError(problems)
    return LoadedSettings(settings, {key: one.source for key, one in usable.items()})


# The file


def _find(path: str | os.PathLike[str] | None) -> Path | None:
    if path is not None:
        return Path(path)
    found = [Path(name) for name in FILES if Path(name).is_file()]
    if len(found) > 1:
        raise SettingsError([Problem(str(found[1]), f"there is {str(found[0])!r}, too; keep one of them")])
    return found[0] if found else None


def _from_file(path: Path | None, problems: list[Problem]) -> dict[str, _Given]:
    if path is None:
        return {}
    text = _read(path)
    try:
        document = read_document(text, format="yaml", source=str(path))
    except PlanError as error:
        raise SettingsError(error.problems) from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise SettingsError(
            [Problem(str(path), f"expected a mapping with the section {SECTION!r}, got {shown(document)}")]
        )
    unknown = f"there is no section of this name; known are {SECTION!r} and {PLANNING!r}"
    problems += [Problem(f"{path} {name}", unknown) for name in document if name not in (SECTION, PLANNING)]
    inner = document.get(SECTION)
    if isinstance(inner, dict) and PLANNING in inner:
        problems.append(Problem(f"{path} {SECTION}.{PLANNING}", f"{PLANNING!r} is a section of its own; move it out"))
        document[SECTION] = {key: value for key, value in inner.items() if key != PLANNING}
    # Where each stands in the file, by the steps of its key.
    flat = {steps: ((SECTION, *steps), value) for steps, value in _flat(document.get(SECTION), (), _tables())}
    if PLANNING in document:
        flat |= {s: (s, value) for s, value in _flat(document[PLANNING], (PLANNING,), _tables())}
    wanted = {stands[:length] for stands, _ in flat.values() for length in range(1, len(stands) + 1)}
    lines = positions(yaml_tokens(text), wanted)
    return {place(steps): _Given(value, _at(path, lines.get(stands))) for steps, (stands, value) in flat.items()}


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SIZE + 1)
        if len(content) > MAX_SIZE:
            raise SettingsError([Problem(str(path), f"the settings are larger than {MAX_SIZE} bytes")])
        return content.decode("utf-8-sig")
    except OSError as error:
        raise SettingsError([Problem(str(path), f"the settings cannot be read: {error.strerror or error}")]) from error
    except UnicodeDecodeError as error:
        raise SettingsError([Problem(str(path), f"byte {error.start + 1} of the file is not UTF-8")]) from error


def _flat(
    value: JsonValue, steps: tuple[str, ...], whole: Collection[str]
) -> Iterator[tuple[tuple[str, ...], JsonValue]]:
    """The leaves of a mapping; an empty section has none, and what is to stay whole is a leaf."""
    if isinstance(value, dict) and ".".join(steps) not in whole:
        for key, item in value.items():
            yield from _flat(item, (*steps, key), whole)
    elif steps or value is not None:
        yield steps, value


def _at(path: Path, position: tuple[int, int] | None) -> str:
    return str(path) if position is None else "{}:{}:{}".format(path, *position)


# The environment


def _flag(text: str) -> JsonValue:
    return _FLAGS.get(text.lower(), text)


def _number(text: str) -> JsonValue:
    try:
        return float(text)
    except ValueError:
        return text


def _whole(text: str) -> JsonValue:
    try:
        return int(text)
    except ValueError:
        return text


def _text(text: str) -> JsonValue:
    return text


def _names(text: str) -> JsonValue:
    return [name for part in text.split(",") if (name := part.strip())]


_VARIABLES: Final[tuple[tuple[str, str, Callable[[str], JsonValue]], ...]] = (
    # An alias stands before the name that goes before it.
    ("MUSUBI_REPLAN_ENABLED", "enabled", _flag),
    ("REPLANNING_ENABLED", "enabled", _flag),
    ("REPLANNING_MIN_CONFIDENCE", "alternatives.min_confidence", _number),
    ("MUSUBI_REPLAN_MIN_CONFIDENCE", "alternatives.human_approval_threshold", _number),
    ("REPLANNING_APPROVAL_THRESHOLD", "alternatives.human_approval_threshold", _number),
    ("MUSUBI_LLM_PROVIDER", "provider", _names),
    ("REPLANNING_PROVIDER", "provider", _names),
    ("REPLANNING_LLM_MODEL", "llm.model", _text),
    ("REPLANNING_LLM_TEMPERATURE", "llm.temperature", _number),
    ("REPLANNING_LLM_MAX_TOKENS", "llm.max_tokens", _whole),
    ("REPLANNING_LLM_BASE_URL", "llm.base_url", _text),
    ("REPLANNING_LLM_FALLBACK", "llm.fallback", _names),
    ("REPLANNING_LLM_OLLAMA", "llm.ollama", _flag),
    ("PLANNING_ENABLED", "planning.enabled", _flag),
    ("PLANNING_STRATEGY", "planning.strategy", _text),
    ("PLANNING_MAX_SUBTASKS", "planning.max_subtasks", _whole),
    ("REFLECTION_ENABLED", "planning.reflection.enabled", _flag),
    ("REFLECTION_INTERVAL", "planning.reflection.trigger_interval", _whole),
    ("MAX_PLAN_REVISIONS", "planning.revision.max_revisions", _whole),
    ("MAX_TOTAL_REPLANS", "planning.replanning.global.max_total_replans", _whole),
)


def _from_environment(environ: Mapping[str, str]) -> dict[str, _Given]:
    """What variables say; an empty one says nothing."""
    return {
        key: _Given(read(text), f"environment {name}")
        for name, key, read in _VARIABLES
        if (text := environ.get(name, "").strip())
    }


# Checking


def _keys(model: type[BaseModel], lead: str = "") -> dict[str, bool]:
    """Every key, and whether it is a section."""
    found: dict[str, bool] = {}
    names = {field: key for key, field in _RENAMED.items()}
    for field_name, field in model.model_fields.items():
        name = field.alias or field_name
        key = names.get(f"{lead}{name}", f"{lead}{name}")
        section = _section(field.annotation)
        found[key] = section is not None
        if section is not None:
            found |= _keys(section, f"{key}.")
    return found


@cache
def _tables(model: type[BaseModel] = Settings, lead: str = "") -> frozenset[str]:
    """The keys that stand for mappings whose names are anybody's, such as those of models, with dots in them."""
    found: set[str] = set()
    for field_name, field in model.model_fields.items():
        name = field.alias or field_name
        section = _section(field.annotation)
        if get_origin(field.annotation) is dict:
            found.add(f"{lead}{name}")
        elif section is not None:
            found |= _tables(section, f"{lead}{name}.")
    return frozenset(found)


def _section(annotation: object) -> type[BaseModel] | None:
    options = (annotation, *(() if get_origin(annotation) is dict else get_args(annotation)))
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)


def _is_known(key: str, given: _Given, known: Mapping[str, bool], problems: list[Problem]) -> bool:
    is_section = known.get(key)
    if given.value is None and (is_section or key in _tables()):
        return False  # a section with nothing in it
    if is_section is False:
        return True
    if is_section:
        inner = ", ".join(k.removeprefix(f"{key}.") for k in known if k.startswith(f"{key}."))
        problems.append(_problem(key, given, f"expected a section with {inner}; got {shown(given.value)}"))
    elif _CREDENTIAL.search(key):
        advice = (
            "keys of API services are taken from the environment alone; remove it here, and consider it known to others"
        )
        problems.append(_problem(key, given, advice))
    else:
        lead = key.rpartition(".")[0]
        siblings = [k for k in known if k.rpartition(".")[0] == lead] or [k for k in known if "." not in k]
        hint = did_you_mean(key, siblings) or f"known are {', '.join(siblings)}"
        problems.append(_problem(key, given, f"there is no such setting; {hint}"))
    return False


def _validated(given: Mapping[str, _Given], problems: list[Problem]) -> Settings | None:
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


def _wrong(error: ErrorDetails, given: Mapping[str, _Given]) -> Problem:
    """A value that is not allowed, under the name that people know, with what would be."""
    names = {field: key for key, field in _RENAMED.items()}
    steps = [step for step in error["loc"] if isinstance(step, str)]
    for length in range(len(steps), 0, -1):
        field = ".".join(steps[:length])
        key = names.get(field, field)
        if key in given:
            inner = steps[length:] if field in _tables() else []
            return _problem(" ".join([key, *inner]), given[key], _expected(error, [*steps[:length], *inner]))
    concerned = [one for key, one in given.items() if key.startswith(f"{steps[0]}.")] if steps else []
    sources = ", ".join(dict.fromkeys(one.source for one in concerned))
    return _problem(".".join(steps), _Given(None, sources), error["msg"].removeprefix("Value error, "))


def _expected(error: ErrorDetails, steps: Sequence[str]) -> str:
    """What is wrong with a value, and what would be right."""
    got = Redactor().text(shown(error["input"]))
    match error["type"]:
        case "value_error":
            return f"{error['msg'].removeprefix('Value error, ')}; got {got}"
        case "missing":
            return "it is missing"
        case "extra_forbidden":
            return "there is no such setting"
    return f"expected {_allowed(steps)}, got {got}"


def _problem(key: str, given: _Given, message: str) -> Problem:
    return Problem(f"{given.source} {key}", message)


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
            return f"a list of {_in_words(item)}"
        case {"type": "integer" | "number"}:
            return _number_in_words(schema)
        case {"type": "object", "properties": dict(inner)}:
            return f"a section with {', '.join(inner)}"
        case {"type": "object"}:
            return "a mapping by name"
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
