"""Words for what is wrong: places in a document, values and near names."""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections.abc import Collection, Sequence
from typing import Final

Path = tuple[str | int, ...]

_MAX_COMPARED: Final = 20_000
_LONGEST: Final = 200
_PLAIN_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_STEP: Final = re.compile(r'\.?([A-Za-z_][A-Za-z0-9_-]*)|\[(\d+)\]|\[("(?:[^"\\]|\\.)*")\]')

_BRIEF: Final = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxlong = _BRIEF.maxother = 80
_BRIEF.maxlist = 12


def place(path: Sequence[str | int]) -> str:
    """A path into a document as people write it: `tasks[3].retry.max_attempts`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif len(step) <= _LONGEST and _PLAIN_KEY.fullmatch(step):
            text += f".{step}" if text else step
        else:
            short = step if len(step) <= _LONGEST else f"{step[:_LONGEST]}…"
            text += f"[{json.dumps(short, ensure_ascii=not short.isprintable())}]"
    return text


def path_of(text: str) -> Path:
    """The path that `place` wrote; a key that was cut stays cut."""
    return tuple(int(m[2]) if m[2] else m[1] or json.loads(m[3]) for m in _STEP.finditer(text))


def line_and_column(text: str, position: int) -> str:
    """Where a character stands, as people count: `line:column`, both from 1."""
    return f"{text.count(chr(10), 0, position) + 1}:{position - text.rfind(chr(10), 0, position)}"


def shown(value: object) -> str:
    """A value as a message shows it, cut where it is long."""
    return _BRIEF.repr(value)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """`did you mean 'x'?` for the nearest of the known names, or nothing."""
    if len(known) > _MAX_COMPARED or len(name) > _LONGEST:  # comparing takes the product of the lengths
        return ""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else ""


class Hints:
    """Near names for many unknown ones, given up when looking for them would take long."""

    def __init__(self) -> None:
        self._left = _MAX_COMPARED

    def __call__(self, name: str, known: Collection[str]) -> str:
        """`; did you mean 'x'?`, or nothing."""
        if len(known) > self._left:
            return ""
        self._left -= len(known)
        hint = did_you_mean(name, known)
        return f"; {hint}" if hint else ""
