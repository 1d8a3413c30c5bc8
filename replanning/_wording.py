"""Words for what is wrong: places in a document, values and near names."""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections.abc import Collection, Sequence
from typing import Final

JsonPath = tuple[str | int, ...]

_MAX_CANDIDATES: Final = 20_000
_MAX_NAME_CHARS: Final = 200
_BARE_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_PATH_STEP: Final = re.compile(r'\.?([A-Za-z_][A-Za-z0-9_-]*)|\[(\d+)\]|\[("(?:[^"\\]|\\.)*")\]')

_BRIEF_REPR: Final = reprlib.Repr()
_BRIEF_REPR.maxstring = _BRIEF_REPR.maxlong = _BRIEF_REPR.maxother = 80
_BRIEF_REPR.maxlist = 12


def format_path(path: Sequence[str | int]) -> str:
    """A path into a document as people write it: `tasks[3].retry.max_attempts`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif len(step) <= _MAX_NAME_CHARS and _BARE_KEY.fullmatch(step):
            text += f".{step}" if text else step
        else:
            short = step if len(step) <= _MAX_NAME_CHARS else f"{step[:_MAX_NAME_CHARS]}…"
            text += f"[{json.dumps(short, ensure_ascii=not short.isprintable())}]"
    return text


def parse_path(text: str) -> JsonPath:
    """The path that `format_path` wrote; a key that was cut stays cut."""
    return tuple(int(m[2]) if m[2] else m[1] or json.loads(m[3]) for m in _PATH_STEP.finditer(text))


def line_and_column(text: str, position: int) -> str:
    """Where a character stands, as people count: `line:column`, both from 1."""
    return f"{text.count(chr(10), 0, position) + 1}:{position - text.rfind(chr(10), 0, position)}"


def brief_repr(value: object) -> str:
    """A value as a message shows it, cut where it is long."""
    return _BRIEF_REPR.repr(value)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """`did you mean 'x'?` for the nearest of the known names, or nothing."""
    if len(known) > _MAX_CANDIDATES or len(name) > _MAX_NAME_CHARS:  # comparing takes the product of the lengths
        return ""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else ""


class NameSuggester:
    """Near names for many unknown ones, given up when looking for them would take long."""

    def __init__(self) -> None:
        self._candidates_left = _MAX_CANDIDATES

    def __call__(self, name: str, known: Collection[str]) -> str:
        """`; did you mean 'x'?`, or nothing."""
        if len(known) > self._candidates_left:
            return ""
        self._candidates_left -= len(known)
        hint = did_you_mean(name, known)
        return f"; {hint}" if hint else ""
