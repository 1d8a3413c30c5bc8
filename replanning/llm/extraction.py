"""JSON in the prose of language models: found as it was written, never completed or repaired.

No part of JSON that is cut off or wrong is taken for an answer. The work is linear in the length of the text.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from pydantic import ValidationError

from replanning.plan.types import JsonValue

_MAX_DEPTH: Final = 100

_MAX_TEXT_CHARS: Final = 400_000
"""Most characters of a text in which JSON is searched for."""

_FENCE: Final = "```"

_FENCE_LANGUAGE: Final = re.compile(r"\s*[\w+-]*\s")

_THINKING_TAG: Final = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>", re.IGNORECASE)

_STRING_PATTERN: Final = r'"(?:[^"\\]++|\\.)*+"'

_OBJECT_START: Final = re.compile(rf"\{{\s*+(?:\}}|{_STRING_PATTERN}\s*+:)", re.DOTALL)
"""Beginning of an object; prose has braces, too."""

_TOKEN: Final = re.compile(rf'{_STRING_PATTERN}|[][{{}}"]', re.DOTALL)
"""A string, a bracket, or the beginning of a string without an end."""


class _JsonSpan(NamedTuple):
    start: int
    end: int
    value: JsonValue
    fenced: bool


def extract_json(text: str) -> Iterator[JsonValue]:
    """Yield every JSON value that a text may mean, the likeliest first; one may come twice.

    That is the whole text if it is JSON. Else these are its fenced blocks and then the objects in its prose, the last
    one first, because models conclude at the end. Values within think tags follow all others.

    An object that is cut off, has a duplicate name or a number that is not finite is passed over as a whole.
    A text of more than 400,000 characters is JSON as a whole, or has none.
    """
    try:
        yield _parse_strict_json(text)
        return
    except ValueError:
        pass
    if len(text) > _MAX_TEXT_CHARS:
        return
    spoken, thoughts = _split_thinking(text)
    for part in (*reversed(spoken), *reversed(thoughts)):
        yield from _json_values(part)
    if thoughts:  # an apparent tag may have been part of a string
        yield from _json_values(text)


def _split_thinking(text: str) -> tuple[list[str], list[str]]:
    """Return the parts of a text outside of think tags, and those within."""
    spoken: list[str] = []
    thoughts: list[str] = []
    thinking, start = False, 0
    for tag in _THINKING_TAG.finditer(text):
        closes = bool(tag[1])
        if closes and not thinking:  # the opening tag was part of the prompt
            thoughts += spoken
            spoken.clear()
        (thoughts if thinking or closes else spoken).append(text[start : tag.start()])
        thinking, start = not closes, tag.end()
    (thoughts if thinking else spoken).append(text[start:])
    return spoken, thoughts


def _json_values(text: str) -> Iterator[JsonValue]:
    spans: list[_JsonSpan] = []
    end = 0
    for span in sorted([*_fenced_blocks(text), *_bare_objects(text)], key=lambda span: (span.start, -span.end)):
        if span.start >= end:  # else it is a part of the span before
            spans.append(span)
            end = span.end
    for fenced in (True, False):
        yield from (span.value for span in reversed(spans) if span.fenced is fenced)


def _fenced_blocks(text: str) -> Iterator[_JsonSpan]:
    """Yield the fenced blocks that are JSON and nothing else."""
    start = 0
    for number, block in enumerate(text.split(_FENCE)):
        end = start + len(block)
        language = _FENCE_LANGUAGE.match(block)
        content = block[language.end() if language else 0 :].strip()
        if number % 2 and content[:1] in ("{", "["):
            with contextlib.suppress(ValueError):
                yield _JsonSpan(start, end, _parse_strict_json(content), True)
        start = end + len(_FENCE)


def _bare_objects(text: str) -> Iterator[_JsonSpan]:
    start = _OBJECT_START.search(text)
    while start is not None:
        end = _closing_end(text, start.start())
        if end is None:
            return
        with contextlib.suppress(ValueError):
            yield _JsonSpan(start.start(), end, _parse_strict_json(text[start.start() : end]), False)
        start = _OBJECT_START.search(text, end)


def _closing_end(text: str, start: int) -> int | None:
    """Return the end of the bracketed text that begins at `start`; None if the bracket is not closed."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        depth += 1 if token[0] in "{[" else -1 if token[0] in "}]" else 0
        if depth <= 0 or token[0] == '"':
            return token.end() if depth <= 0 else None
    return None


def _parse_strict_json(text: str) -> JsonValue:
    """Parse JSON; raise a ValueError for duplicate names, numbers that are not finite and too deep nesting as well."""
    try:
        # Not strict, because models write line breaks into strings as they are.
        value: JsonValue = json.loads(text, strict=False, object_pairs_hook=_unique_members)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
    level = [value]
    for _ in range(_MAX_DEPTH + 1):
        if not level:
            return value
        if any(isinstance(item, float) and not math.isfinite(item) for item in level):
            raise ValueError("JSON has a number that is not finite")
        holders = [item for item in level if isinstance(item, dict | list)]
        level = [item for holder in holders for item in (holder.values() if isinstance(holder, dict) else holder)]
    raise ValueError("JSON is nested too deeply")


def _unique_members(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("JSON object has a duplicate name")
    return members


def validation_message(error: ValidationError, subject: str, *, most: int = 10) -> str:
    """Return the errors of a validation on one line, each with its place; `subject` is the name of the whole value."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [f"{'.'.join(map(str, detail['loc'])) or subject}: {detail['msg']}" for detail in details[:most]]
    return "; ".join(lines) + (f"; and {len(details) - most} more" if len(details) > most else "")
