"""Checks of outputs against expectations, to detect failures that look like successes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from decimal import Decimal
from itertools import islice
from typing import Final

from pydantic_core import from_json

from replanning.errors import ExpressionError, UnexpectedOutput, UnverifiedOutput
from replanning.plan.conditions import (
    OUTPUT_ROOTS,
    Condition,
    matches_wildcards,
    output_lookup,
)
from replanning.plan.json_form import json_form
from replanning.plan.messages import brief_repr
from replanning.plan.schemas import schema_problems
from replanning.plan.tasks import Agreement, Expectation
from replanning.plan.types import JsonValue

_MAX_FOUND: Final = 5
"""Limit of values that a message about a false condition shows."""


def broken_expectation(
    expectations: Iterable[Expectation], output: object, roots: Mapping[str, object]
) -> UnexpectedOutput | None:
    """Return the first violated expectation as an error; None if the output satisfies all.

    A text output that contains a JSON object or array counts as that value.

    Args:
        expectations: the expectations.
        output: the output.
        roots: the roots of conditions other than `output` and `text`.
    """
    try:
        value, text = readable_output(output)
    except ValueError as error:
        return UnexpectedOutput(f"expected an output that is JSON: {error}", output)
    for expectation in expectations:
        for pattern in expectation.errors:
            if says_error(text, pattern):
                return UnexpectedOutput(
                    f"its output says that it failed (errors: {pattern}): {brief_repr(text)}",
                    output,
                    refused=True,
                    not_done=expectation.means == "not-done",
                )
        problems = schema_problems(expectation.json_schema, value)
        if problems:
            listed = "; ".join(problems)
            return UnexpectedOutput(f"its output does not fit the schema: {listed}", output)
        for condition in expectation.where:
            problem = _problem_of(condition, {**roots, "output": value, "text": text})
            if problem:
                return UnexpectedOutput(problem, output)
    return None


def readable_output(output: object) -> tuple[JsonValue, str]:
    """Return an output in the form for conditions and schemas (`output`), and as text (`text`).

    Raises:
        ValueError: it has no JSON form.
    """
    value = json_form(output)
    return _parsed(value), _text_of(value)


def disagreement(agreement: Agreement, output: object, other: object) -> UnexpectedOutput | None:
    """Return how the output of a second tool differs from an output; None if they agree.

    A value that only the first output lacks is a difference. A value that the second lacks cannot
    be compared, which is an `UnverifiedOutput`.

    Args:
        agreement: the values to compare, and the tolerance.
        output: the output, which is JSON or has a JSON form.
        other: the output of the second tool, which is JSON or has a JSON form.
    """
    own_roots = {"output": readable_output(output)[0]}
    other_roots = {"output": readable_output(other)[0]}
    tolerance = Decimal(repr(agreement.tolerance))
    differences = []
    missing = []
    for path in agreement.fields or ("",):
        lookup = Condition.parse("output", OUTPUT_ROOTS)
        if path:
            lookup = output_lookup(path)
        try:
            theirs = lookup.value(other_roots)
        except ExpressionError as error:
            missing.append(str(error))  # it names the value, and the existing ones
            continue
        try:
            mine = lookup.value(own_roots)
        except ExpressionError as error:
            differences.append(str(error))
            continue
        if not _is_same(mine, theirs, tolerance):
            found = f"{brief_repr(mine)}, and {brief_repr(theirs)} by {agreement.tool!r}"
            differences.append(f"{lookup.text} is {found}")
    if differences:
        listed = "; ".join(differences[:_MAX_FOUND])
        return UnexpectedOutput(
            f"expected the same output from {agreement.tool!r}; {listed}", output
        )
    if missing:
        listed = "; ".join(missing[:_MAX_FOUND])
        return UnverifiedOutput(
            f"the output of {agreement.tool!r} lacks values to compare; {listed}", output
        )
    return None


def _is_same(one: object, other: object, tolerance: Decimal) -> bool:
    """Return whether two JSON values are equal, with numbers within the tolerance."""
    pairs = [(one, other)]
    while pairs:
        mine, theirs = pairs.pop()
        if isinstance(mine, dict) and isinstance(theirs, dict):
            if mine.keys() != theirs.keys():
                return False
            pairs += [(value, theirs[name]) for name, value in mine.items()]
        elif isinstance(mine, list) and isinstance(theirs, list):
            if len(mine) != len(theirs):
                return False
            pairs += zip(mine, theirs, strict=True)
        elif not _is_near(mine, theirs, tolerance):
            return False
    return True


def _is_near(one: object, other: object, tolerance: Decimal) -> bool:
    # A boolean is an integer in Python, but not a number in JSON.
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if not isinstance(one, int | float) or not isinstance(other, int | float):
        return one == other
    # As decimals: 10.01 and 10 differ by 0.01, which binary fractions would miss.
    mine, theirs = _decimal(one), _decimal(other)
    if mine.is_finite() and theirs.is_finite():
        return abs(mine - theirs) <= tolerance
    return str(mine) == str(theirs)  # JSON in a text may contain NaN, which never equals itself


def _decimal(number: float) -> Decimal:
    if isinstance(number, int):
        return Decimal(number)
    return Decimal(repr(number))


def _text_of(value: JsonValue) -> str:
    """Return an output as text: for a command, HTTP response or MCP result, their text part."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        text = value.get("stdout", value.get("text"))
        if isinstance(text, str):
            return text
        content = value.get("content")
        if isinstance(content, list):
            texts = [part.get("text") for part in content if isinstance(part, dict)]
            return "\n".join([part for part in texts if isinstance(part, str)])
    return json.dumps(value, ensure_ascii=False)


def _parsed(value: JsonValue) -> JsonValue:
    """Return the JSON object or array in a text; any other value unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        parsed: JsonValue = from_json(value)
    except ValueError:
        return value
    return parsed


def says_error(text: str, pattern: str) -> bool:
    """Return whether a text matches an entry of `errors`."""
    if "*" not in pattern:
        return text.lstrip().startswith(pattern)
    return matches_wildcards(text, pattern)


def _problem_of(condition: str, roots: Mapping[str, object]) -> str:
    """Return why a condition does not hold, with the values that it reads; empty if it does."""
    parsed = Condition.parse(condition, OUTPUT_ROOTS)
    try:
        if parsed.holds(roots):
            return ""
    except ExpressionError as error:
        return str(error)  # it names the condition
    found: dict[str, None] = {}
    for lookup, value in islice(parsed.operands(roots), _MAX_FOUND):
        found[f"{lookup} is {brief_repr(value)}"] = None
    return f"expected {condition}; {', '.join(found)}"
