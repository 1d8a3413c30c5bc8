"""Where in a text the parts of a document stand.

Used only once something is wrong: reading keeps no positions, which would cost more than the plan itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Final, Literal, NamedTuple

import yaml

from replanning._wording import Path
from replanning._yaml import events

_TOKEN: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}\n]|[^\s,:\[\]{}"]+')


class Token(NamedTuple):
    """A part of a text: the beginning or end of an array or object, or a scalar."""

    kind: Literal["[", "{", "end", "scalar"]
    text: str
    line: int
    column: int


class _Frame:
    __slots__ = ("index", "key", "path")

    def __init__(self, path: Path, index: int | None) -> None:
        self.path = path
        self.index = index  # of the next item; None in an object
        self.key: str | None = None


def yaml_tokens(text: str) -> Iterator[Token]:
    """The tokens of a YAML text that was read before without a problem."""
    for event in events(text):
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


def json_tokens(text: str) -> Iterator[Token]:
    """The tokens of a JSON text."""
    line, start = 1, 0
    for match in _TOKEN.finditer(text):
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
                yield Token("scalar", json.loads(raw, strict=False), line, column)
            case _:
                yield Token("scalar", raw, line, column)


def positions(tokens: Iterable[Token], wanted: Collection[Path]) -> dict[Path, tuple[int, int]]:
    """Line and column of those of the wanted parts that the document has; of a field, where its key stands."""
    found: dict[Path, tuple[int, int]] = {}
    for path, token in _walk(tokens):
        if path in wanted:
            found.setdefault(path, (token.line, token.column))
    return found


def repeated_keys(tokens: Iterable[Token]) -> Iterator[tuple[Path, Token]]:
    """The keys that an object has had before."""
    seen: set[Path] = set()
    for path, token in _walk(tokens):
        if path in seen:
            yield path, token
        seen.add(path)


def _walk(tokens: Iterable[Token]) -> Iterator[tuple[Path, Token]]:
    """Every field and item with its path: a field at its key, an item at its beginning."""
    stack: list[_Frame] = []
    for token in tokens:
        if token.kind == "end":
            stack.pop()
            continue
        frame = stack[-1] if stack else _Frame((), None)
        if frame.index is not None:
            path: Path = (*frame.path, frame.index)
            frame.index += 1
            yield path, token
        elif frame.key is not None:
            path, frame.key = (*frame.path, frame.key), None
        elif stack:
            frame.key = token.text
            yield (*frame.path, token.text), token
            continue
        else:
            path = ()
        if token.kind != "scalar":
            stack.append(_Frame(path, 0 if token.kind == "[" else None))
