"""Loading of settings from arguments, environment, a person's override and a file.

Each source gives values by key, such as `alternatives.min_confidence`; the highest source with a
key wins. The result keeps the source of every value and is validated as a whole, so every problem
names the line, variable or argument that it comes from.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, from_json
from pydantic_settings import EnvSettingsSource

from replanning.errors import PlanError, Problem, SettingsError
from replanning.plan.json_values import exceeds_depth
from replanning.plan.messages import brief_repr, did_you_mean, format_duration, format_path
from replanning.plan.reading import find_positions, read_document, read_text_file
from replanning.plan.types import JsonObject, JsonPath, JsonValue
from replanning.secrets import Redactor
from replanning.settings import DEFAULT_TRIGGERS, OverrideSettings, Settings

__all__ = ["LoadedSettings", "load_settings"]

FILES: Final = ("replanning.yaml", ".replanning.yaml")
"""Names of the settings file in the working directory."""

SECTION: Final = "replanning"

PLANNING: Final = "planning"
"""Section of planning mode, next to the section `replanning`."""

MAX_SIZE: Final = 1024 * 1024
"""Size limit of a settings file and of an answer of a server, in bytes."""

_MAX_VALUE_DEPTH: Final = 20
_FIELD_BY_KEY: Final[Mapping[str, str]] = {"retry.exponential_backoff": "retry.exponential"}
"""Keys that differ from the path of their field, because plans use the name of the field, too."""

_KEY_BY_FIELD: Final[Mapping[str, str]] = {field: key for key, field in _FIELD_BY_KEY.items()}
_CREDENTIAL: Final = re.compile(
    r"(?i)(?:^|[._-])(?:api[_-]?)?(?:key|token|secret|password|credentials?)s?$"
)

_CAMEL_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

_FOREIGN_KEYS: Final[Mapping[str, str]] = {
    "max_iterations": "did you mean 'limits.replans_per_lineage', the replans of a task, or "
    "'judge.max_iterations', the attempts at it?",
}
"""Hints for names from other programs, if the most similar key means something else."""

Kind = Literal["default", "file", "override", "environment", "argument"]
"""Kind of source, from the lowest to the highest precedence."""

_KINDS: Final[Mapping[str, Kind]] = {
    "argument": "argument",
    "environment": "environment",
    "override": "override",
}
"""Kinds by the first word of a source; a source of the kind `file` begins with a file name."""

Override = Callable[[], object]
"""Function that returns a person's settings: `{"status": "success", "data": {"planning": …}}`."""


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings with the source of every value that is not a default.

    Attributes:
        settings: the settings.
        sources: the source of each value by key: file with line, variable, override, or argument.
        warnings: an override that did not answer, and variables that look misspelt.
        file: the file that was read, if any.
    """

    settings: Settings
    sources: Mapping[str, str]
    warnings: tuple[Problem, ...] = ()
    file: Path | None = None

    def kind(self, key: str) -> Kind:
        """Return the kind of source of a setting."""
        if key not in self.sources:
            return "default"
        first_word = self.sources[key].partition(" ")[0]
        return _KINDS.get(first_word, "file")


class _Value(NamedTuple):
    """Value of a key, with its source."""

    value: JsonValue
    source: str


def load_settings(
    path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    arguments: Mapping[str, JsonValue] | None = None,
    override: Override | None = None,
) -> LoadedSettings:
    """Load the settings from all sources.

    Arguments take precedence over the environment, then come the person's override, the file and
    the defaults. Lists replace one another and are not merged. The clients of API services read
    their keys from the environment; in the file, such a key is an error.

    Args:
        path: a YAML file with a section `replanning`; by default `replanning.yaml` or
            `.replanning.yaml` in the working directory, if one exists. In a file that is found
            there, settings that name services, plugins, folders or patterns must have been trusted
            (`trust_file`).
        environ: the environment; by default that of the process.
        arguments: settings by key, such as `{"alternatives.min_confidence": 0.6}`.
        override: returns a person's settings for planning mode, as
            `{"status": "success", "data": {"planning": {…}}}`; by default the server of the setting
            `override.url` is asked for them, which takes up to `override.timeout` seconds. An
            override that raises or does not answer is left out with a warning.

    Raises:
        SettingsError: lists every problem, each with its key, its source and the allowed values.
    """
    if environ is None:
        environ = os.environ
    problems: list[Problem] = []
    untrusted: list[Problem] = []
    warnings = list(misspelt(environ))
    in_file: dict[str, _Value] = {}
    file = find_file() if path is None else Path(path)
    if file is not None:
        in_file = _file_values(file, problems)
    # A file that was merely found may belong to somebody else.
    if file is not None and path is None:
        untrusted = _untrusted_problems(file, in_file, environ)
    in_environment = _environment_values(environ)
    in_arguments = _argument_values(arguments or {}, problems)

    asked: Override | OverrideSettings | None = override
    if asked is None and not untrusted:
        asked = _override_server(ChainMap(in_arguments, in_environment, in_file))
    in_override: dict[str, _Value] = {}
    if asked is not None:
        in_override = _override_values(asked, problems, warnings)

    merged = ChainMap(in_arguments, in_environment, in_override, in_file)
    settings = _validate(merged, problems)
    if problems or untrusted or settings is None:
        raise SettingsError(problems or untrusted)
    sources = {key: value.source for key, value in merged.items() if key in _key_index()}
    return LoadedSettings(settings, sources, tuple(warnings), file)


def _untrusted_problems(
    file: Path, in_file: Mapping[str, _Value], environ: Mapping[str, str]
) -> list[Problem]:
    """Return a problem for each guarded value of a file, unless these values are trusted."""
    guarded = _guarded_values(in_file)
    if not guarded:
        return []
    trusted = _read_trusted(_trust_path(environ))
    if trusted.get(str(file.resolve())) == _digest(guarded):
        return []
    hint = "it has no effect until the file is trusted: read it, then run `replanning config trust`"
    return [Problem(f"{value.source} {key}", hint) for key, value in guarded.items()]


def _environment_values(environ: Mapping[str, str]) -> dict[str, _Value]:
    texts: dict[str, str] = {}
    for name, text in environ.items():
        if name.isupper() and text.strip():
            texts[name] = text.strip()
    # Long names, each with the variable that sets it.
    names: dict[str, str] = {}
    for name in texts:
        if name.startswith(_PREFIX) and len(name) <= _MAX_NAME_CHARS:
            names[name] = name
    for name, key in VARIABLES:
        if name in texts:
            names[_long_names()[key]] = name
    # The source reads only variables of fields of the model.
    variables = _Variables(Settings, env_prefix=_PREFIX, env_nested_delimiter=_DELIMITER)  # type: ignore[arg-type]
    variables.env_vars = {long.lower(): texts[name] for long, name in names.items()}
    values: dict[str, _Value] = {}
    for steps, value in _leaves(variables()):
        key = format_path(steps)
        values[key] = _Value(_typed(key, value), f"environment {_variable_of(steps, names)}")
    return values


def _argument_values(
    arguments: Mapping[str, JsonValue], problems: list[Problem]
) -> dict[str, _Value]:
    """Return the values of arguments; add those that JSON cannot express to `problems`."""
    values: dict[str, _Value] = {}
    for key, value in arguments.items():
        try:
            leaves = _leaves(_as_json(value), (key,))
        except PlanError as error:
            problems += [Problem(f"argument {key}", problem.message) for problem in error.problems]
        else:
            for steps, leaf in leaves:
                values[".".join(steps)] = _Value(leaf, "argument")
    return values


def _override_server(given: Mapping[str, _Value]) -> OverrideSettings | None:
    """Return the server of a person's settings, if a valid one is set."""
    named: dict[str, _Value] = {}
    for key in ("override.url", "override.timeout"):
        if key in given:
            named[key] = given[key]
    settings = _validate(named, [])
    if settings is None or settings.override.url is None:
        return None
    return settings.override


def find_file() -> Path | None:
    """Return the settings file in the working directory; None if there is none.

    Raises:
        SettingsError: both file names exist.
    """
    files = [name for name in FILES if os.path.lexists(name)]
    if len(files) > 1:
        raise SettingsError.at(files[1], f"{files[0]!r} exists, too; keep one of them")
    for name in files:
        return Path(name)
    return None


def trust_file(
    path: str | os.PathLike[str], environ: Mapping[str, str] | None = None
) -> dict[str, JsonValue]:
    """Trust the settings of a file that name services, plugins, folders or patterns.

    The trust lasts until one of these settings changes. Somebody else's checkout may contain a
    settings file that sends keys and plans to their server. So trust is stored outside the checkout,
    in the person's own configuration: `$XDG_CONFIG_HOME/replanning` or `~/.config/replanning`.

    Args:
        path: the settings file.
        environ: the environment; by default that of the process.

    Returns:
        The newly trusted settings by key.

    Raises:
        SettingsError: the file cannot be read, or the trust cannot be written.
    """
    problems: list[Problem] = []
    guarded = _guarded_values(_file_values(Path(path), problems))
    if problems:
        raise SettingsError(problems)
    file = _trust_path(os.environ if environ is None else environ)
    trusted = {**_read_trusted(file), str(Path(path).resolve()): _digest(guarded)}
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(trusted, indent=2), encoding="utf-8")
        new.replace(file)
    except OSError as error:
        raise SettingsError.at(str(file), f"it cannot be written: {error.strerror}") from error
    return {key: value.value for key, value in guarded.items()}


_OWN_NAMES: Final = frozenset({"repair", *DEFAULT_TRIGGERS, "better-path-found"})
"""Plugins that need no trust, because they reach nothing outside the process."""


def _guarded_values(values: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return the values that need trust.

    They decide where keys, plans and files go, which code runs, and what is masked.
    """
    return {key: value for key, value in values.items() if _is_guarded(key, value.value)}


def _is_guarded(key: str, value: JsonValue) -> bool:
    match key:
        case "llm.base_url" | "override.url" | "redaction.patterns":
            return value is not None
        case "planning.history.directory" | "planning.history.archive_directory":
            return value is not None
        case "provider" | "judge.provider" | "llm.fallback" | "triggers":
            listed = value if isinstance(value, list) else [value]
            names = set(map(str, listed)) - _OWN_NAMES
            # The default provider.
            if key == "provider":
                names -= {"auto"}
            return len(names) > 0
    return False


def _trust_path(environ: Mapping[str, str]) -> Path:
    configuration = Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return configuration / "replanning" / "trusted.json"


def _read_trusted(file: Path) -> dict[str, JsonValue]:
    """Return the digest of the trusted settings of each file; empty if it cannot be read."""
    with suppress(OSError, ValueError):
        trusted: JsonValue = from_json(file.read_text(encoding="utf-8"))
        if isinstance(trusted, dict):
            return trusted
    return {}


def _digest(guarded: Mapping[str, _Value]) -> str:
    content = json.dumps({key: value.value for key, value in guarded.items()}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


@cache
def keys() -> Mapping[str, bool]:
    """Return every key, and whether it is a section."""
    return {key: entry.is_section for key, entry in _key_index().items() if "*" not in key}


def values(settings: Settings) -> dict[str, JsonValue]:
    """Return every key with its value, in the order of the sections."""
    by_key: dict[str, JsonValue] = {}
    for steps, value in _leaves(settings.model_dump(mode="json", by_alias=True)):
        field = format_path(steps)
        by_key[_KEY_BY_FIELD.get(field, field)] = value
    return by_key


class _Key(NamedTuple):
    """Type of the value of a key.

    Attributes:
        type: the type, with the bounds of the field.
        is_section: whether it is a section.
        is_table: whether it is a mapping with names of the user's choice, such as names of models,
            which may contain dots.
    """

    type: Any
    is_section: bool
    is_table: bool


@cache
def _key_index() -> Mapping[str, _Key]:
    return dict(_iter_keys(Settings, ""))


def _iter_keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, _Key]]:
    """Yield every key of a model; keys inside a table have `*` in place of the name."""
    for field_name, field in model.model_fields.items():
        name = f"{prefix}{field.alias or field_name}"
        key = _KEY_BY_FIELD.get(name, name)
        is_table = get_origin(field.annotation) is dict
        section = _section_model(field)
        is_section = section is not None and not is_table
        # `Annotated` needs an argument even for a field without bounds; the key has no effect.
        value_type: Any = Annotated[(field.annotation, key, *field.metadata)]
        if is_section:
            value_type = section
        yield key, _Key(value_type, is_section, is_table)
        inner = f"{key}."
        if is_table:
            yield f"{key}.*", _Key(section, is_section=True, is_table=False)
            inner = f"{key}.*."
        if section is not None:
            yield from _iter_keys(section, inner)


def _section_model(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model in the type of a field; None if it has none."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _leaves(
    value: JsonValue, steps: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], JsonValue]]:
    """Yield the leaves of a mapping with their paths; tables are leaves, empty sections are not."""
    entry = _key_index().get(".".join(steps))
    if isinstance(value, dict):
        # A non-empty unknown section is taken apart, too, so that each of its keys is named.
        is_section = len(value) > 0
        if entry is not None:
            is_section = entry.is_section
        if is_section:
            for key, item in value.items():
                yield from _leaves(item, (*steps, key))
            return
    # Null stands for an empty section or table.
    is_empty = value is None and entry is not None and (entry.is_section or entry.is_table)
    if steps and not is_empty:
        yield steps, value


def _as_json(value: object) -> JsonValue:
    try:
        clean: JsonValue = json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        raise PlanError.at("", f"got {brief_repr(value)}, which JSON cannot express") from None
    return clean


def _file_values(path: Path, problems: list[Problem]) -> dict[str, _Value]:
    """Return the values of a file; add problems of its sections to `problems`."""
    try:
        text = read_text_file(path, noun="settings file", max_size=MAX_SIZE)
        document = read_document(text, format="yaml", source=str(path)) or {}
    except PlanError as error:
        raise SettingsError(error.problems) from None
    if not isinstance(document, dict):
        expected = f"expected a mapping with the section {SECTION!r}, got {brief_repr(document)}"
        raise SettingsError.at(str(path), expected)
    leaves: dict[JsonPath, tuple[str, JsonValue]] = {}
    for name, section in document.items():
        if name == PLANNING:
            for steps, value in _leaves(section, (name,)):
                leaves[steps] = (format_path(steps), value)
        elif name != SECTION:
            sections = f"the sections are {SECTION!r} and {PLANNING!r}"
            unknown = f"there is no section with this name; {sections}"
            problems.append(Problem(f"{path} {name}", unknown))
        elif isinstance(section, dict):
            if PLANNING in section:
                misplaced = f"{path} {SECTION}.{PLANNING}"
                problems.append(Problem(misplaced, "it is a section of its own; move it out"))
            inner = {key: value for key, value in section.items() if key != PLANNING}
            for steps, value in _leaves(inner):
                leaves[name, *steps] = (format_path(steps), value)
        elif section is not None:
            expected = f"expected a mapping of settings, got {brief_repr(section)}"
            problems.append(Problem(f"{path} {name}", expected))
    parents: set[JsonPath] = set()
    for place in leaves:
        parents.update(place[:length] for length in range(1, len(place) + 1))
    positions = find_positions(text, "yaml", parents)
    values: dict[str, _Value] = {}
    for place, (key, value) in leaves.items():
        source = ":".join(map(str, (path, *positions.get(place, ()))))
        values[key] = _Value(value, source)
    return values


_PREFIX: Final = "REPLANNING_"
_DELIMITER: Final = "__"
_MAX_NAME_CHARS: Final = 200

VARIABLES: Final[tuple[tuple[str, str], ...]] = (
    # An alias precedes the name that overrides it.
    ("MUSUBI_REPLAN_ENABLED", "enabled"),
    ("MUSUBI_REPLAN_ENABLED", "planning.replanning.enabled"),
    ("REPLANNING_ENABLED", "enabled"),
    ("REPLANNING_ENABLED", "planning.replanning.enabled"),
    ("REPLANNING_MIN_CONFIDENCE", "alternatives.min_confidence"),
    ("REPLANNING_MIN_CONFIDENCE", "planning.replanning.llm_decision.min_confidence_threshold"),
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
"""Short names of variables with their keys; they take precedence over the long name of a key."""

OTHERS: Final = (
    "REPLANNING_CONTEXT",
    "REPLANNING_FEEDBACK",
    "REPLANNING_IDEMPOTENCY_KEY",
    "REPLANNING_PROCESS_MARKS",
    "REPLANNING_STORE",
    "REPLANNING_VIEW_TOKEN",
)
"""Variables other than settings: options of commands, and those passed to tools."""

_SIMILARITY: Final = 0.9
"""Minimum similarity of a misspelt name."""


@cache
def _long_names() -> Mapping[str, str]:
    """Return the long name of every key."""
    return {key: f"{_PREFIX}{key.replace('.', _DELIMITER).upper()}" for key in keys()}


class _Variables(EnvSettingsSource):
    """Source of variables by long names, for whole sections in JSON and for single settings."""

    def decode_complex_value(
        self, field_name: str, field: FieldInfo | None, value: str
    ) -> JsonValue:
        """Return a list or section from JSON or from names with commas.

        Any other text is returned as it is, for validation to reject.
        """
        decoded = _decoded(value)
        if isinstance(decoded, (list, dict)) or decoded is None:
            return decoded
        if field is None or "tuple[" not in str(field.annotation):
            return value
        # Regular expressions may contain commas.
        if field_name == "patterns":
            return [value]
        return [part.strip() for part in value.split(",") if part.strip()]


def _decoded(text: str) -> JsonValue:
    try:
        value: JsonValue = from_json(text)
    except ValueError:
        return text
    if exceeds_depth(value, _MAX_VALUE_DEPTH):
        return text
    return value


def _typed(key: str, value: JsonValue) -> JsonValue:
    """Return a text as the type of its setting if it fits; otherwise as JSON, or unchanged."""
    if value == "null":
        return None
    if isinstance(value, dict):
        return {name: _typed("", item) for name, item in value.items()}
    if not isinstance(value, str):
        return value
    entry = _key_index().get(key)
    with suppress(ValueError):
        if entry is not None and not entry.is_table:
            typed: JsonValue = TypeAdapter(entry.type).validate_strings(value)
            return typed
    return _decoded(value)


def _variable_of(steps: Sequence[str], names: Mapping[str, str]) -> str:
    """Return the variable that sets a setting.

    It is the variable of the setting, else of an enclosing section, else the first one inside it.
    """
    by_long = {long.lower(): name for long, name in names.items()}
    for length in range(len(steps), 0, -1):
        long = f"{_PREFIX}{_DELIMITER.join(steps[:length])}".lower()
        if long in by_long:
            return by_long[long]
    within = f"{_PREFIX}{_DELIMITER.join(steps)}{_DELIMITER}".lower()
    return next(by_long[long] for long in by_long if long.startswith(within))


def misspelt(environ: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each variable that looks like a misspelt setting, without its value."""
    longs = _long_names()
    every = [*longs.values(), *(name for name, _ in VARIABLES), *OTHERS]
    # Names are compared without the double delimiter, which is easiest to get wrong.
    comparable = {name.replace(_DELIMITER, "_"): name for name in every}
    sections = tuple(
        f"{longs[key]}{_DELIMITER}" for key, is_section in keys().items() if is_section
    )
    for name in sorted(environ):
        is_refused = name.isupper() and name.startswith(sections)
        if name in every or is_refused or not environ[name].strip():
            continue
        plain = name.upper().replace(_DELIMITER, "_")
        meant = None
        if "_" in plain:  # a single word, such as STORE, belongs to another program
            meant = comparable.get(f"{_PREFIX}{plain}")
        if meant is None:
            for near in difflib.get_close_matches(plain, comparable, n=1, cutoff=_SIMILARITY):
                meant = comparable[near]
        if meant is not None:
            hint = f"nothing is read from it; did you mean {meant!r}?"
            yield Problem(f"environment {name}", hint)


_OVERRIDE_FORM: Final = 'expected {"status": "success", "data": {"planning": {…}}}'


class _Unanswered(Exception):
    """The override gave no answer."""


def _override_values(
    override: Override | OverrideSettings, problems: list[Problem], warnings: list[Problem]
) -> dict[str, _Value]:
    """Return the values that a function or server gives.

    A missing answer gives none, with a warning: work must not stop because another server does. A
    person without a section `planning` has none either. An answer of another form is a problem,
    because it would recur.
    """
    redact = Redactor().text
    source = "override"
    try:
        if callable(override):
            answer = _as_json(_call(override))
        else:
            source = f"override {override.url}"
            answer = _fetch(override)
    except _Unanswered as error:
        warnings.append(Problem(source, f"{error}; the person's settings are ignored"))
        return {}
    except PlanError as error:
        for each in error.problems:
            problems.append(Problem(source, redact(f"{_OVERRIDE_FORM}; {each.message}")))
        return {}
    match answer:
        case {"status": "success", "data": {"planning": dict(planning)}}:
            values: dict[str, _Value] = {}
            for steps, value in _leaves(planning, (PLANNING,)):
                values[format_path(steps)] = _Value(value, source)
            return values
        case {"status": "success", "data": {**sections}}:
            # A person may only have settings for other programs; a misspelt section is a problem.
            names = [str(name) for name in sections]
            if "planning" not in names and not did_you_mean("planning", names):
                return {}
            got = f"data with {', '.join(map(brief_repr, sections))} in it"
        case {"status": status} if status != "success":
            got = f"status {brief_repr(status)}"
        case _:
            got = brief_repr(answer)
    problems.append(Problem(source, f"{_OVERRIDE_FORM}, got {redact(got)}"))
    return {}


def _call(override: Override) -> object:
    try:
        return override()
    except Exception as error:
        # A user's function may raise anything; that must not stop work.
        reason = Redactor().text(f"it failed with {type(error).__name__}: {error}")
        raise _Unanswered(reason) from error


def _fetch(server: OverrideSettings) -> JsonValue:
    import httpx

    assert server.url is not None
    headers = {"Accept": "application/json"}
    content = b""
    try:
        with httpx.stream("GET", server.url, timeout=server.timeout, headers=headers) as answer:
            if not answer.is_success:
                status = f"{answer.status_code} {answer.reason_phrase}".rstrip()
                raise _Unanswered(f"the server answered with {status}")
            for part in answer.iter_bytes():
                content += part
                if len(content) > MAX_SIZE:
                    raise _Unanswered(f"the answer is larger than {MAX_SIZE} bytes")
    except httpx.TimeoutException:
        raise _Unanswered(
            f"the server did not answer within {format_duration(server.timeout)}"
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        reason = Redactor().text(str(error) or type(error).__name__)
        raise _Unanswered(f"the server cannot be asked: {reason}") from error
    return read_document(content.decode("utf-8", "replace"), format="json", source="the answer")


def _encoding_problem(value: JsonValue) -> str:
    if exceeds_depth(value, _MAX_VALUE_DEPTH):
        return f"nested more than {_MAX_VALUE_DEPTH} deep"
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        # Bytes of the environment that are not UTF-8 become surrogates.
        return "it is not valid UTF-8"
    return ""


def _unknown_key(key: str) -> str:
    """Return the problem of an unknown key.

    The hint is a setting in the same section, or with the same name in another section.
    """
    if _CREDENTIAL.search(key):
        advice = "remove it here, and consider it known to others"
        return f"keys of API services come from the environment alone; {advice}"
    # Other formats write `maxAttempts` where this one has `max_attempts`.
    key = _CAMEL_HUMP.sub("_", key).lower()
    if key in _FOREIGN_KEYS:
        return f"there is no such setting; {_FOREIGN_KEYS[key]}"
    section, _, name = key.rpartition(".")
    siblings = [known for known in keys() if known.rpartition(".")[0] == section]
    if not siblings:
        siblings = [known for known in keys() if "." not in known]
    elsewhere = [known for known in keys() if known.rpartition(".")[2] == name]
    hint = did_you_mean(key, siblings)
    if len(elsewhere) == 1:
        hint = f"did you mean {elsewhere[0]!r}?"
    elif not hint:
        hint = f"known settings are {', '.join(siblings)}"
    return f"there is no such setting; {hint}"


def _validate(given: Mapping[str, _Value], problems: list[Problem]) -> Settings | None:
    """Return the settings of these values; if some are invalid, None, and add to `problems`."""
    document: JsonObject = {}
    for key, (value, source) in given.items():
        problem = _encoding_problem(value) if key in _key_index() else _unknown_key(key)
        if problem:
            problems.append(Problem(f"{source} {key}", problem))
            continue
        *sections, name = _FIELD_BY_KEY.get(key, key).split(".")
        inner: Any = document
        for section in sections:
            inner = inner.setdefault(section, {}) if isinstance(inner, dict) else None
        # Validation reports a section that is not a mapping.
        if isinstance(inner, dict):
            inner[name] = value
    try:
        # In strict JSON, a list is accepted as a tuple, but true and "1" are not numbers.
        return TypeAdapter(Settings).validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        problems += dict.fromkeys(_value_problem(item, given) for item in error.errors())
        return None


def _value_problem(error: ErrorDetails, given: Mapping[str, _Value]) -> Problem:
    steps = [step for step in error["loc"] if isinstance(step, str)]
    message = error["msg"].removeprefix("Value error, ")
    for length in range(len(steps), 0, -1):
        field = ".".join(steps[:length])
        key = _KEY_BY_FIELD.get(field, field)
        if key not in given:
            continue
        path = key
        inner: list[str] = []
        if _key_index()[key].is_table:
            inner = steps[length:]
        if inner:
            path = ".".join([key, "*", *inner[1:]])
        got = brief_repr(error["input"])
        match error["type"]:
            case "value_error":
                message += f"; got {got}"
            case "missing":
                message = "it is missing"
            case "extra_forbidden":
                message = "there is no such setting"
            case _:
                expected = _schema_text(TypeAdapter(_key_index()[path].type).json_schema())
                message = f"expected {expected}, got {got}"
        return Problem(f"{given[key].source} {' '.join([key, *inner])}", message)
    # The error concerns a section as a whole.
    section = ".".join(steps)
    sources: dict[str, None] = {}
    for key, value in given.items():
        if key.startswith(f"{section}."):
            sources[value.source] = None
    return Problem(f"{', '.join(sources)} {section}", message)


def _schema_text(schema: JsonObject) -> str:
    """Return the values that a JSON Schema allows, in words."""
    match schema:
        case {"anyOf": list(options)}:
            texts = [_schema_text(option) for option in options if isinstance(option, dict)]
            return " or ".join(texts)
        case {"enum": list(values)}:
            return f"one of {', '.join(map(str, values))}"
        case {"const": value}:
            return str(value)
        case {"type": "array", "items": dict(item), "minItems": int()}:
            return f"a list of {_schema_text(item)}, at least one"
        case {"type": "array", "items": dict(item)}:
            return f"a list of {_schema_text(item)}"
        case {"type": "integer"}:
            return f"a whole number{_bounds_text(schema)}"
        case {"type": "number"}:
            return f"a number{_bounds_text(schema)}"
        case {"type": "object", "properties": dict(inner)}:
            return f"a section with {', '.join(inner)}"
        case {"type": "object"}:
            return "a mapping by name"
        case {"type": "string", "minLength": int()}:
            return "text that is not empty"
    names = {"boolean": "true or false", "string": "text", "null": "null"}
    return names.get(str(schema.get("type")), "something else")


def _bounds_text(schema: JsonObject) -> str:
    match schema:
        case {"minimum": low, "maximum": high}:
            return f" from {low:g} to {high:g}"
        case {"minimum": low}:
            return f" of at least {low:g}"
        case {"exclusiveMinimum": above}:
            return f" above {above:g}"
    return ""
