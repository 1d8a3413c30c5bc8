"""Placeholders `{name}` in patterns, and references `${build.output.path}` or `${context.region}` in arguments."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Final, cast

from pydantic import JsonValue

from replanning.errors import ExpressionError
from replanning.plan.json_values import (
    as_text,
    copy_json,
    get_item,
    iter_strings,
    map_strings,
    measure_json,
)
from replanning.plan.messages import truncate
from replanning.plan.secrets import MASK
from replanning.plan.types import MAX_NAME_CHARS, JsonPath, TaskId

_PLACEHOLDER: Final = re.compile(
    r"(?<![${])\{([A-Za-z_][A-Za-z0-9_-]*)\}|\{\{([A-Za-z_][A-Za-z0-9_-]*)\}\}"
)
_PARENTHESIS: Final = re.compile(r"[()]")
_MAX_MATCH_STEPS: Final = 1_000
"""Most steps of the search for the values of a pattern's placeholders, so that matching a fact takes bounded time."""


IDEMPOTENCY_KEY: Final = "idempotency_key"
"""Placeholder that stands for the idempotency key of the attempt, where a task has no argument of that name."""


def placeholders(text: str) -> tuple[str, ...]:
    """Return the names of the placeholders in a text, each once, in order."""
    if "{" not in text:
        return ()
    return tuple(dict.fromkeys(match[1] for match in _PLACEHOLDER.finditer(text) if match[1]))


def fill_placeholders(text: str, values: Mapping[str, str]) -> str:
    """Return a text with its placeholders replaced by values.

    Raises:
        KeyError: `values` lacks a name; compare with `placeholders` first.
    """
    if "{" not in text:
        return text
    return _PLACEHOLDER.sub(lambda match: values[match[1]] if match[1] else f"{{{match[2]}}}", text)


class FactPattern:
    """Pattern of facts, such as `on({x},{y})`: finds the values of its placeholders in a fact.

    A placeholder takes the shortest text with which the rest of the pattern fits.

    Args:
        pattern: the pattern.
        choices: the values of each placeholder that is limited.
    """

    def __init__(
        self, pattern: str, choices: Mapping[str, Collection[str]] = MappingProxyType({})
    ) -> None:
        self._pattern = pattern
        self._names: list[str] = []
        texts: list[list[str]] = [[]]
        end = 0
        for match in _PLACEHOLDER.finditer(pattern):
            texts[-1] += pattern[end : match.start()], "" if match[1] else f"{{{match[2]}}}"
            end = match.end()
            if match[1]:
                self._names.append(match[1])
                texts.append([])
        texts[-1].append(pattern[end:])
        self._start, *self._texts = map("".join, texts)
        self._choices = {
            name: (sorted({*map(len, words)}), frozenset(words)) for name, words in choices.items()
        }
        counts = Counter(self._names)
        limited = (
            place for place, name in enumerate(self._names) if name in choices or counts[name] > 1
        )
        self._last_limited = max(limited, default=-1)

    def match(self, fact: str) -> dict[str, str] | None:
        """Return the values of the placeholders in a fact; None if it does not fit.

        Raises:
            ExpressionError: no match is found in 1,000 steps, because the pattern is too ambiguous.
        """
        if not self._names:
            return {} if fact == self._start else None
        if not fact.startswith(self._start):
            return None
        values: dict[str, str] = {}
        stack = [self._value_ends(fact, 0, len(self._start), values)]
        for _ in range(_MAX_MATCH_STEPS):
            if (end := next(stack[-1], None)) is not None:
                if len(stack) == len(self._names):
                    return values
                stack.append(self._value_ends(fact, len(stack), end, values))
            elif len(stack) == 1:
                return None
            else:
                stack.pop()
        raise ExpressionError(f"{truncate(self._pattern, 81)!r} might fit a fact in too many ways")

    def _value_ends(
        self, fact: str, place: int, start: int, values: dict[str, str]
    ) -> Iterator[int]:
        """Set the value of a placeholder to each text that fits, and yield the end of the text of the pattern after it."""
        name, text = self._names[place], self._texts[place]
        is_last, is_new = place == len(self._names) - 1, name not in values
        ends: Iterable[int]
        if not is_new:
            ends = (start + len(values[name]),) if fact.startswith(values[name], start) else ()
        elif name in self._choices:
            lengths, words = self._choices[name]
            ends = (start + length for length in lengths if fact[start : start + length] in words)
        elif is_last:
            ends = (len(fact) - len(text),) if start + len(text) < len(fact) else ()
        else:  # after the last limited placeholder, no place is better than the first
            ends = islice(
                _occurrences(text, fact, start + 1), 1 if place > self._last_limited else None
            )
        for end in ends:
            if fact.startswith(text, end) and not (is_last and end + len(text) < len(fact)):
                values[name] = fact[start:end]
                yield end + len(text)
        if is_new:
            values.pop(name, None)


def _occurrences(text: str, within: str, start: int) -> Iterator[int]:
    while (start := within.find(text, start)) >= 0:
        yield start
        start += 1


def normalise_fact(text: str) -> str:
    """Return a fact without whitespace around it and around its commas."""
    return ",".join(map(str.strip, text.split(",")))


def fact_problem(text: str) -> str:
    """Return why a text is no fact; empty if it is one."""
    opened = 0
    for parenthesis in _PARENTHESIS.findall(text):
        opened += 1 if parenthesis == "(" else -1
        if opened < 0:
            break
    return "it is blank" if not text.strip() else "its parentheses do not match" if opened else ""


MAX_FILLED_CHARS: Final = 10_000_000
"""Most characters that references may add to the arguments of a task."""

_REFERENCE: Final = re.compile(r"\$\$\{|\$\{([^{}]*)\}|\$\{")
_PATH_STEP: Final = re.compile(r"""\.([^.\[\]]+)|\[(-?\d{1,9})\]|\["([^"]+)"\]|\['([^']+)'\]""")
_OUTPUT: Final = re.compile(r"\.output(?=$|[.\[])")
_REDACTED_MESSAGE: Final = "there was what looks like a secret, and no record keeps one; let the tool take it itself, as {env:NAME}"


@dataclass(frozen=True, slots=True)
class Reference:
    """Reference `${...}` to a value of the context, or to a part of the output of a task."""

    text: str
    """The text between the braces."""
    task: TaskId | None
    """The task whose output it is; None for the context."""
    path: JsonPath
    """The steps into the output or the context."""

    def __str__(self) -> str:
        return f"${{{self.text}}}"


def has_references(value: object) -> bool:
    """Return whether arguments may have references: a quick look, as most have none."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            if "${" in item:
                return True
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, (list, tuple)):
            stack += item
    return False


def find_references(value: JsonValue, task_ids: Container[str] = ()) -> tuple[Reference, ...]:
    """Return every reference in arguments, in order.

    Args:
        value: the arguments of a task, or a part of them.
        task_ids: the ids of all tasks, which separate `${a.output.b}` of a task `a` from that of a task `a.output`:
            the longest known id is meant, or the shortest possible one if none is known.

    Raises:
        ExpressionError: a `${` is neither a reference nor escaped as `$${`.
    """
    if not has_references(value):
        return ()
    return tuple(
        _choose_reference(readings, task_ids)
        for text in iter_strings(value, keys=False)
        if "${" in text
        for match in _REFERENCE.finditer(text)
        if (readings := _candidate_references(match, text))
    )


def rename_references(
    arguments: Mapping[str, JsonValue],
    rename: Callable[[TaskId], str],
    task_ids: Container[str] = (),
) -> dict[str, JsonValue]:
    """Return a copy of arguments in which references name other tasks; references to the context stay.

    Args:
        arguments: the arguments of a task; they are not changed.
        rename: returns the new id of a referenced task.
        task_ids: the ids of the tasks, which decide what a reference means as in `find_references`.

    Raises:
        ExpressionError: a `${` is neither a reference nor escaped as `$${`.
    """

    def renamed(match: re.Match[str]) -> str:
        readings = _candidate_references(match, match.string)
        reference = _choose_reference(readings, task_ids) if readings else None
        if reference is None or reference.task is None:
            return match[0]
        return f"${{{rename(reference.task)}{reference.text[len(reference.task) :]}}}"

    return {
        key: map_strings(value, lambda text: _REFERENCE.sub(renamed, text))
        for key, value in arguments.items()
    }


def _choose_reference(readings: Sequence[Reference], task_ids: Container[str]) -> Reference:
    return next((reading for reading in readings if reading.task in task_ids), readings[-1])


def resolve_references(
    arguments: Mapping[str, JsonValue],
    *,
    context: Mapping[str, JsonValue],
    result_of: Callable[[TaskId], JsonValue],
) -> dict[str, JsonValue]:
    """Return the arguments with every reference replaced by a copy of its value.

    A string that is one reference becomes the value itself; inside a longer string, a value is written as text, as
    JSON unless it is a string.

    Args:
        arguments: as the task states them; they are not changed.
        context: the context of the plan.
        result_of: returns the output of a task, or raises LookupError.

    Raises:
        ExpressionError: a reference leads to nothing, or to a value that does not fit its place, or the arguments would
            become larger than `MAX_FILLED_CHARS`.
    """
    if not has_references(arguments):
        return {key: copy_json(value) for key, value in arguments.items()}
    size = 0

    def value_of(match: re.Match[str]) -> JsonValue:
        nonlocal size
        readings = _candidate_references(match, match.string)
        missing = ""
        for reference in readings:
            try:
                value: object = context if reference.task is None else result_of(reference.task)
            except LookupError as error:
                missing = str(error)
                continue
            for step in reference.path:
                try:
                    value = get_item(value, step)
                except LookupError as error:
                    raise ExpressionError(f"{reference}: {step!r} {error.args[0]}") from None
            if isinstance(value, str) and value == MASK:
                raise ExpressionError(f"{reference}: {_REDACTED_MESSAGE}")
            size += measure_json(cast("JsonValue", value), MAX_FILLED_CHARS - size)
            if size > MAX_FILLED_CHARS:
                raise ExpressionError(
                    f"{reference}: the arguments would have more than {MAX_FILLED_CHARS} characters; "
                    "refer to a smaller part, or pass on the name of a file"
                )
            return copy_json(cast("JsonValue", value))
        if readings:
            raise ExpressionError(f"{readings[-1]}: {missing}")
        return "${"

    def text_of(match: re.Match[str]) -> str:
        return as_text(value_of(match))

    def resolved(text: str) -> JsonValue:
        if "${" not in text:
            return text
        whole = _REFERENCE.fullmatch(text)
        return value_of(whole) if whole else _REFERENCE.sub(text_of, text)

    return {key: map_strings(value, resolved) for key, value in arguments.items()}


def _candidate_references(match: re.Match[str], text: str) -> list[Reference]:
    """Return the possible readings of a `${...}`, longest task id first; none for the escape `$${`."""
    inner = match[1]
    if match[0] == "$${":
        return []
    if inner is None:
        raise ExpressionError(
            f"{text!r}: a ${{ is not closed; write $${{ for the characters themselves"
        )
    readings = []
    parsed: dict[int, JsonPath | None] = {}
    if inner.startswith("context.") and (path := _parse_path(inner, len("context"), parsed)):
        readings.append(Reference(inner, None, path))
    outputs = [] if readings else list(_OUTPUT.finditer(inner, 0, MAX_NAME_CHARS + len(".output[")))
    for found in reversed(outputs):
        path = _parse_path(inner, found.end(), parsed)
        if path is not None and found.start():
            readings.append(Reference(inner, TaskId(inner[: found.start()]), path))
    if not readings:
        forms = "${TASK.output}, ${TASK.output.name[0]} or ${context.name}"
        raise ExpressionError(
            f"{match[0]!r} is no reference: write {forms}, or ${match[0]} for the text itself"
        )
    return readings


def _parse_path(text: str, start: int, parsed: dict[int, JsonPath | None]) -> JsonPath | None:
    """Return the steps of a text such as `.files[0].name` from `start`; None if it is no path.

    The result is added to `parsed`, which holds those of later starts: most paths end like one of them.
    """
    steps: list[str | int] = []
    end = start
    while end not in parsed and (match := _PATH_STEP.match(text, end)):
        steps.append(int(match[2]) if match[2] else match[1] or match[3] or match[4])
        end = match.end()
    rest = parsed.get(end, () if end == len(text) else None)
    parsed[start] = None if rest is None else (*steps, *rest)
    return parsed[start]
