"""Settings from variables of the environment, and variables that are probably misspelt."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from replanning._config_keys import Given, keys
from replanning._errors import Problem
from replanning._plan import JsonValue

_FLAGS: Final[Mapping[str, bool]] = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


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


VARIABLES: Final[tuple[tuple[str, str, Callable[[str], JsonValue]], ...]] = (
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
    ("REPLANNING_OVERRIDE_URL", "override.url", _text),
    ("PLANNING_ENABLED", "planning.enabled", _flag),
    ("PLANNING_STRATEGY", "planning.strategy", _text),
    ("PLANNING_MAX_SUBTASKS", "planning.max_subtasks", _whole),
    ("REFLECTION_ENABLED", "planning.reflection.enabled", _flag),
    ("REFLECTION_INTERVAL", "planning.reflection.trigger_interval", _whole),
    ("MAX_PLAN_REVISIONS", "planning.revision.max_revisions", _whole),
    ("MAX_TOTAL_REPLANS", "planning.replanning.global.max_total_replans", _whole),
)
"""Names of variables, the settings they are read for, and how."""

OTHERS: Final = ("REPLANNING_CONTEXT", "REPLANNING_FEEDBACK", "REPLANNING_IDEMPOTENCY_KEY", "REPLANNING_STORE")
"""Variables that are no settings: an option of the command line, and what tools are given."""

_FAMILIES: Final = ("REPLANNING_", "PLANNING_", "MUSUBI_")
_NEAR: Final = 0.8
_VERY_NEAR: Final = 0.92
"""How alike two names must be: less where the family tells that one of ours is meant."""


def from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """What variables say, by key; an empty one says nothing."""
    return {
        key: Given(read(text), f"environment {name}")
        for name, key, read in VARIABLES
        if (text := environ.get(name, "").strip())
    }


def misspelt(environ: Mapping[str, str]) -> Iterator[Problem]:
    """Variables that nobody reads, and that look as if they were meant to be; what they hold is not told."""
    known = [*(name for name, _, _ in VARIABLES), *OTHERS]
    unread = {_variable(key): key for key, is_section in keys().items() if not is_section}
    for name in sorted(environ):
        if name in known or not environ[name].strip():
            continue
        near, key = _nearest(name, known), unread.get(name.upper())
        if key is not None and near != name.upper():
            what = f"no setting is read from it; set {key!r} in the file"
        elif near:
            what = f"nothing is read from it; did you mean {near!r}?"
        else:
            continue
        yield Problem(f"environment {name}", what)


def _nearest(name: str, known: list[str]) -> str:
    cutoff = _NEAR if name.upper().startswith(_FAMILIES) else _VERY_NEAR
    return next(iter(difflib.get_close_matches(name.upper(), known, n=1, cutoff=cutoff)), "")


def _variable(key: str) -> str:
    """The variable that one would expect for a key."""
    name = key if key.startswith("planning.") else f"replanning.{key}"
    return name.replace(".", "_").upper()
