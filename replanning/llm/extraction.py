"""Finds JSON in what a language model wrote around it.

What is found was said as it stands: nothing is completed, and nothing is taken out of JSON that is cut off or wrong.
No character is looked at more than a few times, whatever stands there.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from typing import Final, NamedTuple, NoReturn

from replanning.plan.types import JsonValue

_MAX_DEPTH: Final = 100
"""What is nested more deeply is no answer to anything."""

_MAX_TEXT_CHARS: Final = 400_000
"""Characters in which JSON is searched for."""

_FENCE: Final = "```"

_FENCE_LANGUAGE: Final = re.compile(r"\s*[\w+-]*\s")

_THINKING_TAG: Final = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>", re.IGNORECASE)

_STRING_PATTERN: Final = r'"(?:[^"\\]++|\\.)*+"'

_OBJECT_START: Final = re.compile(rf"\{{\s*+(?:\}}|{_STRING_PATTERN}\s*+:)", re.DOTALL)
"""How an object begins; prose has braces, too."""

_TOKEN: Final = re.compile(rf'{_STRING_PATTERN}|[][{{}}"]', re.DOTALL)
"""A string, a bracket, or the beginning of a string without an end."""


class _JsonSpan(NamedTuple):
    start: int
    end: int
    value: JsonValue
    fenced: bool


def extract_json(text: str) -> Iterator[JsonValue]:
    """Every JSON value that a text may mean, the likeliest first; one may come twice.

    That is the whole text. Else it is its fenced blocks and then the objects in its prose, the last one first, because
    models conclude at the end; and what stands in think tags comes after all that stands outside of them.

    An object that is cut off, that has a name twice, or a number that is none is passed over with all that it holds.
    A text of more than 400,000 characters is JSON as a whole, or none.
    """
    try:
        yield _parse_strict_json(text)
        return
    except ValueError:
        pass
    if len(text) > _MAX_TEXT_CHARS:
        return
    said, thought = _split_thinking(text)
    for part in (*reversed(said), *reversed(thought)):
        yield from _json_values(part)
    if thought:  # what looked like a tag may have stood in a string
        yield from _json_values(text)


def _split_thinking(text: str) -> tuple[list[str], list[str]]:
    """What a text says, and what its author only thought."""
    said: list[str] = []
    thought: list[str] = []
    thinking, start = False, 0
    for tag in _THINKING_TAG.finditer(text):
        closes = bool(tag[1])
        if closes and not thinking:  # the tag that opened it was part of the prompt
            thought += said
            said.clear()
        (thought if thinking or closes else said).append(text[start : tag.start()])
        thinking, start = not closes, tag.end()
    (thought if thinking else said).append(text[start:])
    return said, thought


def _json_values(text: str) -> Iterator[JsonValue]:
    found: list[_JsonSpan] = []
    end = 0
    for each in sorted([*_fenced_blocks(text), *_bare_objects(text)], key=lambda each: (each.start, -each.end)):
        if each.start >= end:  # else it is a part of what was found before
            found.append(each)
            end = each.end
    for fenced in (True, False):
        yield from (each.value for each in reversed(found) if each.fenced is fenced)


def _fenced_blocks(text: str) -> Iterator[_JsonSpan]:
    """Fenced blocks that are JSON and nothing else."""
    start = 0
    for number, block in enumerate(text.split(_FENCE)):
        end = start + len(block)
        language = _FENCE_LANGUAGE.match(block)  # at its start: further on, it would take words out of strings
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
    """Where the bracket that opens at a place is closed; None where the text ends before."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        depth += 1 if token[0] in "{[" else -1 if token[0] in "}]" else 0
        if depth <= 0 or token[0] == '"':
            return token.end() if depth <= 0 else None
    return None


def _parse_strict_json(text: str) -> JsonValue:
    """The JSON that a text is.

    Raises:
        ValueError: it is none, or none that anybody should act on.
    """
    try:
        value: JsonValue = json.loads(
            text,
            strict=False,  # models write line breaks into strings as they are
            parse_constant=_reject_constant,
            parse_float=_finite_float,
            object_pairs_hook=_unique_members,
        )
        _check_depth(value)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def _check_depth(value: JsonValue) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        holders = [each for each in level if isinstance(each, dict | list)]
        level = [item for each in holders for item in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _unique_members(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a name stands there twice")
    return members


def _finite_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError("a number is too large")
    return number


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")
