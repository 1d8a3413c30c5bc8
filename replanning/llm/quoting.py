"""Untrusted data in prompts: JSON that cannot close a tag or hide anything, truncated visibly.

Data are written as JSON, one value per line, between tags. Within them `<`, `>`, `&` and all
invisible characters are written as JSON escapes, so no text can close a tag, open one or hide.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from replanning.plan.json_values import iter_strings
from replanning.plan.messages import cut
from replanning.plan.types import JsonValue

_UNSAFE_CHARS: Final = re.compile(r"[<>&]|[^\x20-\x7e\w]")
"""Characters that may need an escape; letters and digits of any language do not."""

_UNESCAPED: Final = re.compile(r"[ !#-%'-;=?-\[\]-~]*")
"""Text that needs no escape in JSON."""

_TRUNCATION_MARK: Final = re.compile(r"\[cut: (?:\d+ (?:characters in all|more)|nested deeper)\]")

_MAX_DEPTH: Final = 20

_JSON_ENCODER: Final = json.JSONEncoder(ensure_ascii=False)


def encode_data(value: JsonValue) -> str:
    """Return a value as JSON on one line, without tags or invisible characters."""
    return escape_markup(_JSON_ENCODER.encode(value))


def encode_excerpt(value: JsonValue, room: int, redact: Callable[[JsonValue], JsonValue]) -> str:
    """Return a value as a line of data without secrets, truncated to about `room` characters.

    Secrets are redacted before the final truncation, because part of a secret would not be
    recognised. A rough truncation beforehand saves searching huge values.
    """
    return encode_data(truncate_value(redact(truncate_value(value, 8 * room)), room))


def escape_markup(text: str) -> str:
    """Return JSON on one line, with escapes for invisible characters and those that form tags."""
    return _UNSAFE_CHARS.sub(_escape_char, text)


def _escape_char(match: re.Match[str]) -> str:
    char = match[0]
    if char.isprintable() and char not in "<>&":
        return char
    if ord(char) > 0xFFFF:
        return json.dumps(char).strip('"')
    return f"\\u{ord(char):04x}"


def truncate_value(value: JsonValue, max_chars: int) -> JsonValue:
    """Return a value truncated to about `max_chars` characters of JSON, with marks at the cuts."""
    return _truncate_value(value, max_chars, 0)[0]


def _truncate_value(value: JsonValue, room: int, depth: int) -> tuple[JsonValue, int]:
    """Return the truncated value and its size.

    No item takes all the room of those that follow it.
    """
    if isinstance(value, str):
        return _truncate_string(value, room)
    if not isinstance(value, Sequence | Mapping):
        if isinstance(value, int) and value.bit_length() > 64:
            value = math.inf if value > 0 else -math.inf
        if value is None or math.isfinite(value):
            return value, len(str(value))
        return f"[cut: a number that is {value}]", 30
    if depth >= _MAX_DEPTH:
        return "… [cut: nested deeper]", 20
    left = room
    last = len(value) - 1
    if isinstance(value, Mapping):
        members: dict[str, JsonValue] = {}
        for index, (key, item) in enumerate(value.items()):
            if left <= 0:
                return {**members, "…": f"[cut: {len(value) - index} more]"}, room + 20
            name, size = _truncate_string(key, left // 2)
            left -= size + 4
            share = left if index == last else left * 2 // 3
            members[name], size = _truncate_value(item, share, depth + 1)
            left -= size
        return members, room - left
    items: list[JsonValue] = []
    for index, item in enumerate(value):
        if left <= 0:
            return [*items, f"… [cut: {len(value) - index} more]"], room + 20
        share = left if index == last else left * 2 // 3
        part, size = _truncate_value(item, share, depth + 1)
        left -= size + 2
        items.append(part)
    return items, room - left


def _truncate_string(text: str, room: int) -> tuple[str, int]:
    if len(text) + 2 <= room and _UNESCAPED.fullmatch(text):
        return text, len(text) + 2
    shown = text[: max(0, room)]
    size = len(encode_data(shown))
    if size <= room and len(shown) == len(text):
        return text, size
    # Escapes are longer than their characters, so fewer of these fit.
    end = len(shown) * max(0, room - 2) // size
    return truncate_text(text, end), max(room, 40)


def truncate_text(text: str, max_chars: int) -> str:
    """Return the beginning of a text, with a mark if it was cut."""
    if len(text) <= max_chars:
        return text
    return f"{cut(text, max_chars)}… [cut: {len(text)} characters in all]"


def is_truncated(value: JsonValue) -> bool:
    """Return whether a value contains a truncation mark, as copies of truncated data do."""
    for text in iter_strings(value):
        if "[cut: " in text and _TRUNCATION_MARK.search(text):
            return True
    return False


@dataclass
class DataSection:
    """Data of one kind in a prompt, the most important first.

    Attributes:
        name: name of its tags; never a word from the data.
        lines: the values, each encoded by `encode_data`.
        omitted: number of lines that were cut.
    """

    name: str
    lines: list[str]
    omitted: int = 0

    def render(self) -> str:
        """Return the text with tags, and with a mark if lines were cut."""
        lines = [f"<{self.name}>", *self.lines]
        if self.omitted:
            lines.append(encode_data({"cut": f"{self.omitted} more of these"}))
        lines.append(f"</{self.name}>\n")
        return "\n".join(lines)


def fit_sections(sections: Sequence[DataSection], room: int, cut_first: Iterable[str]) -> str:
    """Return the text of sections, cut by whole values until it fits.

    Args:
        sections: the sections in order; those that are cut change.
        room: maximum number of characters of the text.
        cut_first: names of the sections that may be cut, in the order of cutting.
    """
    over = sum(len(section.render()) for section in sections) - room
    for name in cut_first:
        for section in sections:
            if over <= 0 or section.name != name:
                continue
            size = len(section.render())
            removed = 0
            kept = len(section.lines)
            while kept and removed < over + 40:  # the mark takes some room itself
                kept -= 1
                removed += len(section.lines[kept]) + 1
            section.omitted += len(section.lines) - kept
            section.lines = section.lines[:kept]
            over -= size - len(section.render())
    return "".join(section.render() for section in sections)
