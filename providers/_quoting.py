"""Writes what others wrote as data: JSON in which no tag can stand and nothing is hidden, cut where it is long."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Final

from replanning.interfaces import JsonValue

_HIDDEN: Final = re.compile(r"[<>&]|[^\x20-\x7e]")
_DEEPEST: Final = 20


def encoded(value: JsonValue) -> str:
    """A value as JSON on one line in which no tag can stand and nothing is hidden."""
    return _HIDDEN.sub(_escaped, json.dumps(value, ensure_ascii=False, separators=(", ", ": ")))


def _escaped(match: re.Match[str]) -> str:
    char = match[0]
    if char.isprintable() and char not in "<>&":
        return char
    return f"\\u{ord(char):04x}" if ord(char) <= 0xFFFF else json.dumps(char).strip('"')


def trimmed(value: JsonValue, room: int) -> JsonValue:
    """What of a value fits into about so many characters of JSON; marked where it was cut."""
    return _Trimmer(room).value(value)


class _Trimmer:
    """Takes from a value until there is no more room."""

    def __init__(self, room: int) -> None:
        self._left = room

    def value(self, value: JsonValue, depth: int = 0) -> JsonValue:
        """What of it there is room for."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list | tuple | Mapping) and depth >= _DEEPEST:
            return "… [cut: nested deeper]"
        if isinstance(value, Mapping):
            return self._members(value, depth + 1)
        if isinstance(value, list | tuple):
            return self._items(value, depth + 1)
        return self._number(value)

    def _text(self, text: str) -> str:
        head = text[: max(0, self._left)]
        if len(head) == len(text) and (size := len(encoded(head))) <= self._left:
            self._left -= size
            return text
        end = bisect_right(range(len(head) + 1), self._left - 2, key=lambda n: len(encoded(head[:n])) - 2) - 1
        self._left = 0
        return f"{head[: max(0, end)]}… [cut: {len(text)} characters in all]"

    def _number(self, value: float | None) -> JsonValue:
        if isinstance(value, int) and value.bit_length() > 64:
            value = float("inf")
        self._left -= len(str(value))
        return value if value is None or math.isfinite(value) else f"[cut: a number that is {value}]"

    def _items(self, items: Sequence[JsonValue], depth: int) -> JsonValue:
        found: list[JsonValue] = []
        for index, item in enumerate(items):
            if self._left <= 0:
                return [*found, f"… [cut: {len(items) - index} more]"]
            self._left -= 2
            found.append(self.value(item, depth))
        return found

    def _members(self, members: Mapping[str, JsonValue], depth: int) -> JsonValue:
        found: dict[str, JsonValue] = {}
        for index, (key, item) in enumerate(members.items()):
            if self._left <= 0:
                return {**found, "…": f"[cut: {len(members) - index} more]"}
            self._left -= 4
            found[self._text(key)] = self.value(item, depth)
        return found
