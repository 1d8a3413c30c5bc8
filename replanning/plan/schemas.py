"""Checks of values by JSON Schema, whose work is bounded whatever the schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from typing import Final

from replanning.plan.types import JsonObject, JsonValue

_MAX_SCHEMA_WORK: Final = 5_000_000
"""Most work of a check: characters of arguments times keywords of the schema; above, only the server checks."""

_NAMED_REFERENCE_COST: Final = 1_000
"""Number of keywords that cost as much as resolving a reference by name instead of by path."""

_UNCHECKED_KEYWORDS: Final = (
    "pattern",
    "patternProperties",
    "uniqueItems",
    "unevaluatedItems",
    "unevaluatedProperties",
)
"""Keywords that only the server checks, because their check has no bound."""

_MAX_SCHEMA_ERRORS: Final = 5


def invalid_schema(schema: JsonObject) -> str:
    """Return why a value cannot be checked by a schema; empty if it can."""
    try:
        from jsonschema import SchemaError, validators
    except ImportError as error:
        return f'a schema needs jsonschema: pip install "replanning[schema]" ({error})'
    try:
        validators.validator_for(schema).check_schema(schema)
    except SchemaError as error:
        where = "".join(f"[{part!r}]" for part in error.absolute_path)
        return f"this is no JSON Schema: {where and where + ': '}{error.message[:300]}"
    return ""


def schema_problems(schema: JsonObject | None, value: JsonValue) -> list[str]:
    """Return the problems that a schema finds in a value; none if the schema itself is invalid."""
    if schema is None:
        return []
    described = {key: value for key, value in schema.items() if key != "$schema"}
    text = json.dumps(described)
    # Names of further dialects lead to checks without bounds, and `additionalProperties` uses patterns, too.
    if '"$schema"' in text or '"patternProperties"' in text:
        return []
    from jsonschema import validators  # takes its time, and few plans need it
    from referencing import Registry

    work_left, cost = _MAX_SCHEMA_WORK, 100 + len(json.dumps(value))

    def bounded(keyword: str, check: Callable[..., object]) -> Callable[..., object]:
        def check_with_bound(validator: object, value: object, *details: object) -> object:
            nonlocal work_left
            by_name = keyword in {"$ref", "$dynamicRef"} and not str(value).startswith("#/")
            work_left -= cost * (_NAMED_REFERENCE_COST if by_name else 1)
            if work_left < 0:
                raise TimeoutError
            return check(validator, value, *details)

        return check_with_bound

    try:
        base = validators.validator_for(schema)
        checks = {keyword: bounded(keyword, check) for keyword, check in base.VALIDATORS.items()}
        kind = validators.extend(base, checks | dict.fromkeys(_UNCHECKED_KEYWORDS, lambda *_: None))  # type: ignore[no-untyped-call] # so its stubs have it
        checker = kind(
            described, registry=Registry()
        )  # a reference may lead anywhere: nothing is fetched
        found = list(islice(checker.iter_errors(value), _MAX_SCHEMA_ERRORS))
    except Exception:  # noqa: BLE001 - the schema is somebody else's and may be anything; the server checks as well
        return []
    return [
        (f"{'.'.join(map(str, error.absolute_path))}: " if error.absolute_path else "")
        + error.message[:300]
        for error in found
    ]
