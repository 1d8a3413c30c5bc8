"""Where in a text the parts of a document stand.

Used only once something is wrong: reading keeps no positions, which would cost more than the plan itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Final, Literal, NamedTuple

import yaml

from replanning._wording import JsonPath
from replanning._yaml import parse_events

_OPENING_BRACKETS: Final = ("[", "{")
_JSON_TOKEN: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}\n]|[^\s,:\[\]{}"]+')


class Token(NamedTuple):
    """A part of a text: the beginning or end of an array or object, or a scalar."""

    kind: Literal["[", "{", "end", "scalar"]
    text: str
    line: int
    column: int


class _Frame:
    __slots__ = ("index", "key", "path")

    def __init__(self, path: JsonPath, index: int | None) -> None:
        self.path = path
        self.index = index  # of the next item; None in an object
        self.key: str | None = None

    def next_path(self, token: Token) -> tuple[JsonPath, bool]:
        """The path of what a token stands for or begins, and whether it is a key."""
        if self.index is not None:
            self.index += 1
            return (*self.path, self.index - 1), False
        is_key = self.key is None
        key = token.text if self.key is None else self.key
        self.key = key if is_key else None
        return (*self.path, key), is_key


def yaml_tokens(text: str) -> Iterator[Token]:
    """The tokens of a YAML text that was read before without a problem."""
    for event in parse_events(text):
        mark = event.start_mark
        line, column = mark.line + 1, mark.column + 1  # type: ignore[union-attr] # parsed text has marks
        match event:
            case yaml.ScalarEvent():
                yield Token("scalar", event.value, line, column)
            case yaml.AliasEvent():
                yield Token("scalar", "", line, column)
            case yaml.MappingStartEvent():
                yield Token("{", "", line, column)
            case yaml.SequenceStartEvent():
                yield Token("[", "", line, column)
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                yield Token("end", "", line, column)


def json_tokens(source: str) -> Iterator[Token]:
    """The tokens of a JSON text."""
    line, start = 1, 0
    for match in _JSON_TOKEN.finditer(source):
        raw = match[0]
        column = match.start() - start + 1
        match raw[0]:
            case "\n":
                line, start = line + 1, match.end()
            case "[" | "{":
                yield Token("[" if raw == "[" else "{", "", line, column)
            case "]" | "}":
                yield Token("end", "", line, column)
            case '"':
                text = json.loads(raw, strict=False) if "\\" in raw else raw[1:-1]
                yield Token("scalar", text, line, column)
            case _:
                yield Token("scalar", raw, line, column)


def find_positions(tokens: Iterable[Token], wanted: Collection[JsonPath]) -> dict[JsonPath, tuple[int, int]]:
    """Line and column of those of the wanted parts that the document has; of a field, where its key stands.

    Parts inside a part that is not wanted itself are not looked for.
    """
    found: dict[JsonPath, tuple[int, int]] = {}
    for path, token in _iter_paths(tokens, wanted):
        if path in wanted:
            found.setdefault(path, (token.line, token.column))
    return found


def duplicate_keys(tokens: Iterable[Token]) -> Iterator[tuple[JsonPath, Token]]:
    """The keys that an object has had before."""
    seen: set[JsonPath] = set()
    for path, token in _iter_paths(tokens):
        if path in seen:
            yield path, token
        seen.add(path)


def _iter_paths(
    tokens: Iterable[Token], within: Collection[JsonPath] | None = None
) -> Iterator[tuple[JsonPath, Token]]:
    """Every field and item with its path: a field at its key, an item at its beginning.

    With `within`, what is inside of other parts than these is passed over.
    """
    stack: list[_Frame] = []
    passed = 0  # open arrays and objects that are passed over
    for token in tokens:
        if passed:
            passed += (token.kind in _OPENING_BRACKETS) - (token.kind == "end")
            continue
        if token.kind == "end":
            stack.pop()
            continue
        path: JsonPath = ()
        if stack:
            path, is_key = stack[-1].next_path(token)
            if is_key or stack[-1].index is not None:
                yield path, token
            if is_key:
                continue
        if token.kind in _OPENING_BRACKETS:
            if within is None or not path or path in within:
                stack.append(_Frame(path, 0 if token.kind == "[" else None))
            else:
                passed = 1
