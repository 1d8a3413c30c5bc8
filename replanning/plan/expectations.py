"""Expectations of outputs, by which a failure is noticed that looks like a success."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final

from replanning.errors import ExpressionError, UnexpectedOutput
from replanning.plan.conditions import OUTPUT_ROOTS, Condition, matches_wildcards
from replanning.plan.json_form import json_form
from replanning.plan.messages import brief_repr
from replanning.plan.schemas import schema_problems
from replanning.plan.tasks import Expectation
from replanning.plan.types import JsonValue

_MAX_FOUND: Final = 5
"""Values that a message shows beside a condition that does not hold."""


def broken_expectation(
    expectations: Iterable[Expectation], output: object, roots: Mapping[str, object]
) -> UnexpectedOutput | None:
    """Return why an output is not as expected; None if it is.

    An output that is a text with a JSON object or array counts as that value.

    Args:
        expectations: what it must satisfy.
        output: the output.
        roots: what conditions see beside `output` and `text`.
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
    """Return an output as conditions and schemas see it (`output`), and as text (`text`).

    Raises:
        ValueError: it has no JSON form.
    """
    value = json_form(output)
    text = _text_of(value)
    if isinstance(value, str):
        value = _parsed(value)
    return value, text


def _text_of(value: JsonValue) -> str:
    """Return an output as text: of a command, an HTTP answer and an MCP result what they say."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        said = value.get("stdout", value.get("text"))
        if isinstance(said, str):
            return said
        content = value.get("content")
        if isinstance(content, list):
            texts = [part.get("text") for part in content if isinstance(part, dict)]
            return "\n".join([text for text in texts if isinstance(text, str)])
    return json.dumps(value, ensure_ascii=False)


def _parsed(text: str) -> JsonValue:
    """Return the object or array that a text is as JSON, or else the text."""
    if text.lstrip()[:1] not in ("{", "["):
        return text
    try:
        value: JsonValue = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value


def says_error(text: str, pattern: str) -> bool:
    """Return whether a text fits one of the texts under `errors`."""
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
