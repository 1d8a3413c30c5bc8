"""Settings from variables of the environment, and variables that are probably misspelt."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource

from replanning._config_keys import Given, flat, is_too_deep, keys, tables, types
from replanning._errors import Problem
from replanning._plan import JsonValue
from replanning._settings import Settings
from replanning._wording import format_path

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
        return _read(value)
    if not isinstance(value, str) or key not in types():
        return value
    try:
        typed: JsonValue = TypeAdapter(types()[key]).validate_strings(value)
    except ValueError:
        return _decoded(value)
    return typed


def _read(value: JsonValue) -> JsonValue:
    """A mapping of which a part may be made of variables, with what its texts are."""
    if isinstance(value, dict):
        return {name: _read(item) for name, item in value.items()}
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
