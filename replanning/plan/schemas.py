"""Validation of values by JSON Schema, with bounded work for any schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache
from itertools import islice
from types import NoneType
from typing import Any, Final

from replanning.plan.messages import truncate
from replanning.plan.types import JsonObject, JsonValue

_MAX_SCHEMA_WORK: Final = 5_000_000
"""Maximum work of a validation, in characters of the value times keywords of the schema.

Above it, only the server validates.
"""

_NAMED_REFERENCE_COST: Final = 1_000
"""Cost of resolving a reference by name instead of by path, in keywords."""

_UNCHECKED_KEYWORDS: Final = (
    "pattern",
    "patternProperties",
    "uniqueItems",
    "unevaluatedItems",
    "unevaluatedProperties",
)
"""Keywords left to the server, because their work has no bound."""

_MAX_SCHEMA_ERRORS: Final = 5

_MAX_MESSAGE_CHARS: Final = 300
"""Longest message of jsonschema that a problem quotes, in characters."""

_MAX_VALIDATORS: Final = 256
"""Number of cached validators; making one takes longer than most validations."""


def invalid_schema(schema: JsonObject) -> str:
    """Return why a schema cannot be used; empty if it can."""
    try:
        from jsonschema import SchemaError, validators
    except ImportError as error:
        return f'a schema needs jsonschema: pip install "replanning[schema]" ({error})'
    try:
        validators.validator_for(schema).check_schema(schema)
    except SchemaError as error:
        where = "".join(f"[{part!r}]" for part in error.absolute_path)
        message = truncate(error.message, _MAX_MESSAGE_CHARS)
        problem = ": ".join(filter(None, [where, message]))
        return f"this is not a valid JSON Schema: {problem}"
    return ""


_JSON_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "null": (NoneType,),
    "boolean": (),
}


def _is_plainly_valid(schema: object, value: JsonValue) -> bool:
    """Return whether a value certainly fits a schema; False means unknown.

    Most values fit, and most schemas have only the keywords below. This test is much faster than a
    validator (benchmark `tools_that_fail`, "suggested"), which handles all other cases.
    """
    if not isinstance(schema, dict):
        return False
    for keyword in schema:
        if keyword not in ("title", "description") and not _is_plainly_met(schema, keyword, value):
            return False
    return True


def _is_plainly_met(schema: JsonObject, keyword: str, value: JsonValue) -> bool:
    """Return whether a value certainly satisfies one keyword of a schema."""
    stated: Any = schema[keyword]
    if keyword == "type":
        # A boolean is an integer in Python, but not a number in JSON.
        if isinstance(value, bool):
            return bool(stated == "boolean")
        return isinstance(value, _JSON_TYPES[stated])
    # The other keywords apply to one type each.
    if isinstance(value, dict):
        known: Any = schema.get("properties", {})
        if keyword == "required":
            return all(name in value for name in stated)
        if keyword == "properties":
            present = [name for name in known if name in value]
            return all(_is_plainly_valid(known[name], value[name]) for name in present)
        if keyword == "additionalProperties":
            others = [item for name, item in value.items() if name not in known]
            return all(_is_plainly_valid(stated, item) for item in others)
    if isinstance(value, list):
        if keyword == "items":
            return all(_is_plainly_valid(stated, item) for item in value)
        if keyword == "minItems":
            return bool(len(value) >= stated)
    if isinstance(value, str) and keyword == "minLength":
        return bool(len(value) >= stated)
    if isinstance(value, int | float) and keyword == "minimum":
        return bool(value >= stated)
    return False


def schema_problems(schema: JsonObject | None, value: JsonValue) -> list[str]:
    """Return the problems that a schema finds in a value; none if the schema itself is invalid."""
    if schema is None:
        return []
    # A malformed schema may raise anything.
    with suppress(Exception):
        if _is_plainly_valid(schema, value):
            return []
    token = _work.set(_Work(100 + len(json.dumps(value))))
    try:
        validator = _validator_of(json.dumps(schema))
        if validator is None:
            return []
        found = list(islice(validator.iter_errors(value), _MAX_SCHEMA_ERRORS))
    except Exception:  # noqa: BLE001 - the schema may be anything; the server validates, too
        return []
    finally:
        _work.reset(token)
    problems = []
    for error in found:
        place = ".".join(map(str, error.absolute_path))
        if place:
            place += ": "
        problems.append(f"{place}{truncate(error.message, _MAX_MESSAGE_CHARS)}")
    return problems


class _Work:
    """Remaining work of one validation.

    Args:
        cost: the cost of one keyword.
    """

    def __init__(self, cost: int) -> None:
        self._cost = cost
        self._left = _MAX_SCHEMA_WORK

    def spend(self, keyword: str, stated: object) -> None:
        """Subtract the cost of a keyword with the value that the schema states.

        Raises:
            TimeoutError: the validation exceeds its limit.
        """
        is_by_name = keyword in ("$ref", "$dynamicRef") and not str(stated).startswith("#/")
        times = 1
        if is_by_name:
            times = _NAMED_REFERENCE_COST
        self._left -= self._cost * times
        if self._left < 0:
            raise TimeoutError


_work: ContextVar[_Work] = ContextVar("work")
"""Work of the current validation; the validators themselves are shared."""


@lru_cache(_MAX_VALIDATORS)
def _validator_of(text: str) -> Any:
    """Return the validator of a schema, given as JSON; None if its work would have no bound."""
    from jsonschema import validators  # slow to import, and few plans need it
    from referencing import Registry

    schema = json.loads(text)
    described = {key: value for key, value in schema.items() if key != "$schema"}
    inner = json.dumps(described)
    # A nested dialect would bring unbounded keywords back, and `additionalProperties` also searches
    # for patterns.
    if '"$schema"' in inner or '"patternProperties"' in inner:
        return None
    kind = _bounded_class(validators.validator_for(schema))
    # An empty registry, so that no reference is fetched.
    return kind(described, registry=Registry())


@lru_cache
def _bounded_class(base: Any) -> Any:
    """Return a validator class with bounded work; cached, because making it is slow."""
    from jsonschema import validators

    def bounded(keyword: str, check: Callable[..., object]) -> Callable[..., object]:
        def check_with_bound(validator: object, value: object, *details: object) -> object:
            _work.get().spend(keyword, value)
            return check(validator, value, *details)

        return check_with_bound

    checks = {keyword: bounded(keyword, check) for keyword, check in base.VALIDATORS.items()}
    for keyword in _UNCHECKED_KEYWORDS:
        checks[keyword] = lambda *_: None
    return validators.extend(base, checks)  # type: ignore[no-untyped-call]  # so its stubs have it
