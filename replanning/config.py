"""Settings from arguments, the environment, a person's own and a file, checked as a whole and each with its source.

The sources are put on top of one another by pydantic-settings, key by key, and what comes of it is checked at last: so
what is wrong, and what holds, is told with the line or variable that it comes from.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from replanning.errors import PlanError, Problem, SettingsError
from replanning.plan.messages import brief_repr, did_you_mean, format_path
from replanning.plan.reading import find_positions, read_document
from replanning.plan.redaction import Redactor
from replanning.plan.types import JsonObject, JsonValue
from replanning.settings import OverrideSettings, Settings

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


FILES: Final = ("replanning.yaml", ".replanning.yaml")
"""Looked for where the program runs, when no file is named."""

SECTION: Final = "replanning"

PLANNING: Final = "planning"
"""The section of planning mode, beside the other."""

MAX_SIZE: Final = 1024 * 1024
"""Largest settings file, in bytes."""


def find(path: str | os.PathLike[str] | None) -> Path | None:
    """The file that is named, or that is there; None where there is none.

    Raises:
        SettingsError: there are two.
    """
    if path is not None:
        return Path(path)
    found = [Path(name) for name in FILES if Path(name).is_file()]
    if len(found) > 1:
        raise SettingsError([Problem(str(found[1]), f"there is {str(found[0])!r}, too; keep one of them")])
    return found[0] if found else None


def from_file(path: Path | None, problems: list[Problem]) -> dict[str, Given]:
    """What a file says, by key; what is wrong with its sections is added to the problems.

    Raises:
        SettingsError: it cannot be read, or is no YAML.
    """
    if path is None:
        return {}
    text = _read(path)
    document = _sections(text, path, problems)
    # Where each stands in the file, by the steps of its key.
    stands = {steps: ((SECTION, *steps), value) for steps, value in flat(document.get(SECTION))}
    if PLANNING in document:
        stands |= {steps: (steps, value) for steps, value in flat(document[PLANNING], (PLANNING,))}
    wanted = {steps[:length] for steps, _ in stands.values() for length in range(1, len(steps) + 1)}
    lines = find_positions(text, "yaml", wanted)
    return {format_path(steps): Given(value, _at(path, lines.get(at))) for steps, (at, value) in stands.items()}


def _sections(text: str, path: Path, problems: list[Problem]) -> JsonObject:
    """The sections that a file may have."""
    try:
        document = read_document(text, format="yaml", source=str(path))
    except PlanError as error:
        raise SettingsError(error.problems) from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise SettingsError(
            [Problem(str(path), f"expected a mapping with the section {SECTION!r}, got {brief_repr(document)}")]
        )
    unknown = f"there is no section of this name; known are {SECTION!r} and {PLANNING!r}"
    problems += [Problem(f"{path} {name}", unknown) for name in document if name not in (SECTION, PLANNING)]
    inner = document.get(SECTION)
    if isinstance(inner, dict) and PLANNING in inner:
        problems.append(Problem(f"{path} {SECTION}.{PLANNING}", f"{PLANNING!r} is a section of its own; move it out"))
        document[SECTION] = {key: value for key, value in inner.items() if key != PLANNING}
    return document


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


def _at(path: Path, position: tuple[int, int] | None) -> str:
    return str(path) if position is None else "{}:{}:{}".format(path, *position)


_PREFIX: Final = "REPLANNING_"

_DELIMITER: Final = "__"

_LONGEST: Final = 200
"""Characters of a name; no setting has so many."""

_WITH_COMMAS: Final = ("patterns",)
"""Lists of what may hold commas itself: a pattern in two halves would find none of the secrets that it is for."""

VARIABLES: Final[tuple[tuple[str, str], ...]] = (
    # An alias stands before the name that goes before it.
    ("MUSUBI_REPLAN_ENABLED", "enabled"),
    ("REPLANNING_ENABLED", "enabled"),
    ("REPLANNING_MIN_CONFIDENCE", "alternatives.min_confidence"),
    ("MUSUBI_REPLAN_MIN_CONFIDENCE", "alternatives.human_approval_threshold"),
    ("REPLANNING_APPROVAL_THRESHOLD", "alternatives.human_approval_threshold"),
    ("MUSUBI_LLM_PROVIDER", "provider"),
    ("REPLANNING_PROVIDER", "provider"),
    ("REPLANNING_LLM_MODEL", "llm.model"),
    ("REPLANNING_LLM_TEMPERATURE", "llm.temperature"),
    ("REPLANNING_LLM_MAX_TOKENS", "llm.max_tokens"),
    ("REPLANNING_LLM_BASE_URL", "llm.base_url"),
    ("REPLANNING_LLM_FALLBACK", "llm.fallback"),
    ("REPLANNING_LLM_OLLAMA", "llm.ollama"),
    ("REPLANNING_OVERRIDE_URL", "override.url"),
    ("PLANNING_ENABLED", "planning.enabled"),
    ("PLANNING_STRATEGY", "planning.strategy"),
    ("PLANNING_MAX_SUBTASKS", "planning.max_subtasks"),
    ("REFLECTION_ENABLED", "planning.reflection.enabled"),
    ("REFLECTION_INTERVAL", "planning.reflection.trigger_interval"),
    ("MAX_PLAN_REVISIONS", "planning.revision.max_revisions"),
    ("MAX_TOTAL_REPLANS", "planning.replanning.global.max_total_replans"),
)
"""Short names of variables, and the settings they are read for; these go before the long names that every key has."""

OTHERS: Final = (
    "REPLANNING_CONTEXT",
    "REPLANNING_FEEDBACK",
    "REPLANNING_IDEMPOTENCY_KEY",
    "REPLANNING_MCP_SERVER",
    "REPLANNING_STORE",
)
"""Variables that are no settings: an option of the command line, and what tools and servers are given."""

_FAMILIES: Final = ("REPLANNING_", "PLANNING_", "MUSUBI_")

_NEAR: Final = 0.8

_VERY_NEAR: Final = 0.92
"""How alike two names must be: less where the family tells that one of ours is meant."""


def variable(steps: Sequence[str]) -> str:
    """The long name of the variable that a setting or section is read from, by the steps of its key."""
    return f"{_PREFIX}{_DELIMITER.join(steps).upper()}"


class _Variables(EnvSettingsSource):
    """Reads variables by their long names, a section as JSON or each of its settings by itself.

    Args:
        variables: those that are set, by their long names.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        super().__init__(Settings, env_prefix=_PREFIX, env_nested_delimiter=_DELIMITER)  # type: ignore[arg-type] # only its fields are looked at
        self.env_vars = {name.lower(): text for name, text in variables.items()}

    def decode_complex_value(self, field_name: str, field: FieldInfo | None, value: str) -> JsonValue:
        """What a list or section is: JSON, or names with commas between them.

        What is neither is left as it is, to be told with everything else that is wrong.
        """
        decoded = _decoded(value)
        if isinstance(decoded, (list, dict)) or decoded is None:
            return decoded
        if field is None or "tuple[" not in str(field.annotation):
            return value
        return [value] if field_name in _WITH_COMMAS else [name for part in value.split(",") if (name := part.strip())]


def _decoded(text: str) -> JsonValue:
    """What a text is as JSON; the text itself where it is none."""
    try:
        value: JsonValue = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if is_too_deep(value) else value


def from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """What variables say, by key; an empty one says nothing."""
    given = {name: text.strip() for name, text in environ.items() if name.isupper() and text.strip()}
    read = {name: name for name in given if name.startswith(_PREFIX) and len(name) <= _LONGEST}
    read |= {variable(key.split(".")): name for name, key in VARIABLES if name in given}
    found = _Variables({long: given[name] for long, name in read.items()})()
    return {
        format_path(steps): Given(_typed(format_path(steps), value), f"environment {_variable_of(steps, read)}")
        for steps, value in flat(found)
    }


def _typed(key: str, value: JsonValue) -> JsonValue:
    """A text as its setting takes it, where it can; else as JSON, or as the text that it is."""
    if value == "null":
        return None
    if key in tables():
        return _read_environment(value)
    if not isinstance(value, str) or key not in types():
        return value
    try:
        typed: JsonValue = TypeAdapter(types()[key]).validate_strings(value)
    except ValueError:
        return _decoded(value)
    return typed


def _read_environment(value: JsonValue) -> JsonValue:
    """A mapping of which a part may be made of variables, with what its texts are."""
    if isinstance(value, dict):
        return {name: _read_environment(item) for name, item in value.items()}
    return _decoded(value) if isinstance(value, str) else value


def _variable_of(steps: Sequence[str], read: Mapping[str, str]) -> str:
    """The variable that says what a setting is: its own, that of a section around it, or the first of those within it."""
    by_long = {long.lower(): name for long, name in read.items()}
    longs = [f"{_PREFIX}{_DELIMITER.join(steps[:length])}".lower() for length in range(len(steps), 0, -1)]
    own = next((long for long in longs if long in by_long), None)
    return by_long[own or next(long for long in by_long if long.startswith(longs[0] + _DELIMITER))]


def misspelt(environ: Mapping[str, str]) -> Iterator[Problem]:
    """Variables that nobody reads, and that look as if they were meant to be; what they hold is not told."""
    short, long = [*(name for name, _ in VARIABLES), *OTHERS], [variable(key.split(".")) for key in keys()]
    # What they are called who do not know that two strokes part a section from what is in it.
    meant = {name.replace(_DELIMITER, "_"): name for name in long}
    for name in sorted(environ):
        upper = name.upper()
        ours = upper.startswith(_FAMILIES)
        is_told = name.isupper() and name.startswith(_INNER)
        if name in (*short, *long) or is_told or not environ[name].strip():
            continue
        near = meant.get(upper) or meant.get(f"{_PREFIX}{upper}") or _nearest(upper, [*short, *long] if ours else short)
        if near:
            yield Problem(f"environment {name}", f"nothing is read from it; did you mean {near!r}?")


def _nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is meant; what stands before all names of a family makes none of them alike."""
    family = next((one for one in _FAMILIES if name.startswith(one)), "")
    rests = {one.removeprefix(family): one for one in known if one.startswith(family)}
    cutoff = _NEAR if family else _VERY_NEAR
    near = difflib.get_close_matches(name.removeprefix(family), rests, n=1, cutoff=cutoff)
    return rests[near[0]] if near else ""


_INNER: Final = tuple(f"{variable(key.split('.'))}{_DELIMITER}" for key, is_section in keys().items() if is_section)
"""How names of settings in sections begin; an unknown one is an error of its own."""

MAX_OVERRIDE_SIZE: Final = 1024 * 1024
"""Largest answer of a server, in bytes."""

_LATE: Final = "the server did not answer within {:g} s"

_MORE: Final = 0.5
"""Seconds in which the client can say by itself why there is no answer."""

EXPECTED: Final = 'expected {"status": "success", "data": {"planning": {…}}}'

Override = Callable[[], object]
"""Answers what the settings of a person are, in the form that `EXPECTED` shows."""


class _Unanswered(Exception):
    """Nobody said what the settings of the person are."""


def from_override(
    override: Override | OverrideSettings, problems: list[Problem], warnings: list[Problem]
) -> dict[str, Given]:
    """What a function or server says, by key.

    Where there is no answer the settings of the person are left out, with a warning: work must not stop because
    somebody else's server does. An answer of another form is a problem, since it would be the same next time.
    """
    source = "override" if callable(override) else f"override {override.url}"
    try:
        answer = _called(override) if callable(override) else _fetched(override)
    except _Unanswered as error:
        warnings.append(Problem(source, f"{error}; the settings of the person are left out"))
        return {}
    except PlanError as error:
        problems += [Problem(source, Redactor().text(f"{EXPECTED}; {one.message}")) for one in error.problems]
        return {}
    match answer:
        case {"status": "success", "data": {"planning": dict(planning)}}:
            return {format_path(steps): Given(value, source) for steps, value in flat(planning, ("planning",))}
        case {"status": "success", "data": {**sections}}:
            got = f"data with {', '.join(map(brief_repr, sections)) or 'nothing'} in it"
        case {"status": status} if status != "success":
            got = f"status {brief_repr(status)}"
        case _:
            got = brief_repr(answer)
    problems.append(Problem(source, f"{EXPECTED}, got {Redactor().text(got)}"))
    return {}


def _called(override: Override) -> JsonValue:
    try:
        answer = override()
    except Exception as error:  # somebody's function may raise anything, and must not stop work
        raise _Unanswered(Redactor().text(f"it failed with {type(error).__name__}: {error}")) from error
    return as_json(answer)


def as_json(value: object) -> JsonValue:
    """A value as JSON has it, with lists for tuples and text for names.

    Raises:
        PlanError: JSON cannot have it.
    """
    try:
        clean: JsonValue = json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        raise PlanError([Problem("", f"got {brief_repr(value)}, which JSON cannot express")]) from None
    return clean


def _fetched(server: OverrideSettings) -> JsonValue:
    """The answer of a server, asked once.

    Raises:
        PlanError: the answer is no JSON.
        _Unanswered: there is none.
    """
    answers: SimpleQueue[bytes | _Unanswered] = SimpleQueue()
    # Headers that trickle keep a request alive, however little each read may take: so somebody else waits for them.
    Thread(target=lambda: answers.put(_content(server)), name="settings of the person", daemon=True).start()
    try:
        content = answers.get(timeout=server.timeout + _MORE)
    except Empty:
        raise _Unanswered(_LATE.format(server.timeout)) from None
    if isinstance(content, _Unanswered):
        raise content
    return read_document(content.decode("utf-8", "replace"), format="json", source="the answer")


def _content(server: OverrideSettings) -> bytes | _Unanswered:
    """What a server sends, or why nothing can be made of it."""
    import httpx

    assert server.url is not None
    until = time.monotonic() + server.timeout
    content = b""
    try:
        with httpx.stream("GET", server.url, timeout=server.timeout, headers={"Accept": "application/json"}) as answer:
            if not answer.is_success:
                return _Unanswered(f"the server answered with {answer.status_code} {answer.reason_phrase}".rstrip())
            for part in answer.iter_bytes():
                content += part
                if len(content) > MAX_OVERRIDE_SIZE:
                    return _Unanswered(f"the answer is larger than {MAX_SIZE} bytes")
                if time.monotonic() > until:
                    raise httpx.ReadTimeout("the answer is not complete")
    except httpx.TimeoutException:
        return _Unanswered(_LATE.format(server.timeout))
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        told = str(error) or type(error).__name__
        return _Unanswered(Redactor().text(f"the server cannot be asked: {told}"))
    except Exception as error:  # noqa: BLE001 - whatever a server makes the client raise, work must not stop
        return _Unanswered(Redactor().text(f"the server cannot be asked: {type(error).__name__}: {error}"))
    return content


Kind = Literal["default", "file", "override", "environment", "argument"]
"""What settings come from; each goes before those left of it."""

_ARGUMENT: Final = "argument"


class _Sources(BaseSettings):
    """What each kind of source gives, by key, and as extra fields what the first of them gives that says something."""

    model_config = SettingsConfigDict(extra="allow")

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: object, **__: object
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The kinds in their order, and nothing that pydantic-settings would read by itself."""
        sources = init_settings()
        return tuple(
            InitSettingsSource(settings_cls, sources[kind]) for kind in reversed(get_args(Kind)) if kind in sources
        )


def _first_of(sources: Mapping[str, Mapping[str, Given]]) -> Mapping[str, Given]:
    """What is given for each key, by the source that goes before all others that say something for it."""
    return _Sources(**sources).model_extra or {}


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings, and where each that is not a default comes from.

    Attributes:
        settings: what holds.
        sources: by key, such as `alternatives.min_confidence`: file with line, variable, override, or argument.
        warnings: what was passed over: an override that nobody answered, and variables that look misspelt.
        file: the file that was read, if there was one.
    """

    settings: Settings
    sources: Mapping[str, str]
    warnings: tuple[Problem, ...] = ()
    file: Path | None = None

    def kind(self, key: str) -> Kind:
        """What kind of source a setting comes from."""
        source = self.sources.get(key)
        if source is None:
            return "default"
        if self.file is not None and (source == str(self.file) or source.startswith(f"{self.file}:")):
            return "file"
        return "argument" if source == _ARGUMENT else "override" if source.startswith("override") else "environment"


def load_settings(
    path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    arguments: Mapping[str, JsonValue] | None = None,
    override: Override | None = None,
) -> LoadedSettings:
    """The settings, with what goes before what.

    Arguments go before the environment, that before a person's own, those before the file, that before the defaults.
    Lists replace one another, they are not merged. Keys of API services are read from the environment by those
    who need them; in the file they are an error.

    Args:
        path: a YAML file with a section `replanning`; by default `replanning.yaml` or `.replanning.yaml` where
            the program runs, if there is one.
        environ: the environment; by default that of the program.
        arguments: settings by key, such as `{"alternatives.min_confidence": 0.6}`.
        override: returns what a person has set for planning mode, as
            `{"status": "success", "data": {"planning": {…}}}`; by default the server that the setting `override.url`
            names is asked for it, which holds the program up for as long as `override.timeout` says. What raises, or
            does not answer, is passed over with a warning.

    Raises:
        SettingsError: with every problem; each names its key, its source and what is allowed.
    """
    problems: list[Problem] = []
    environ = os.environ if environ is None else environ
    warnings = list(misspelt(environ))
    file = find(path)
    sources = {
        "file": from_file(file, problems),
        "environment": from_environment(environ),
        "argument": _from_arguments(arguments or {}, problems),
    }
    asked = override or _server(_first_of(sources))
    sources["override"] = {} if asked is None else from_override(asked, problems, warnings)
    given = {key: one for key, one in _first_of(sources).items() if is_known(key, one, problems)}
    settings = validated(given, problems)
    if problems or settings is None:
        raise SettingsError(problems)
    return LoadedSettings(settings, {key: one.source for key, one in given.items()}, tuple(warnings), file)


def _from_arguments(arguments: Mapping[str, JsonValue], problems: list[Problem]) -> dict[str, Given]:
    found: dict[str, Given] = {}
    for key, value in arguments.items():
        try:
            found[key] = Given(as_json(value), _ARGUMENT)
        except PlanError as error:
            problems += [Problem(f"{_ARGUMENT} {key}", one.message) for one in error.problems]
    return found


def _server(given: Mapping[str, Given]) -> OverrideSettings | None:
    """The server that knows a person's settings, if one is named rightly; what is wrong is told with everything else."""
    own = {key: one for key, one in given.items() if key in ("override.url", "override.timeout")}
    settings = validated(own, [])
    return None if settings is None or settings.override.url is None else settings.override
