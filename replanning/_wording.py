"""Words for what is wrong: places, near names, and pydantic's errors said plainly."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

from replanning._errors import Problem

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

Path = tuple[str | int, ...]

_MAX_COMPARED: Final = 20_000
_PLAIN_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_STEP: Final = re.compile(r'\.?([A-Za-z_][A-Za-z0-9_-]*)|\[(\d+)\]|\[("(?:[^"\\]|\\.)*")\]')


def place(path: Sequence[str | int]) -> str:
    """A path into a document as people write it: `tasks[3].retry.max_attempts`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif _PLAIN_KEY.fullmatch(step):
            text += f".{step}" if text else step
        else:
            text += f"[{json.dumps(step)}]"
    return text


def path_of(text: str) -> Path:
    """The path that `place` wrote."""
    steps: list[str | int] = []
    for match in _STEP.finditer(text):
        steps.append(int(match[2]) if match[2] else match[1] or json.loads(match[3]))
    return tuple(steps)


def shown(value: object, limit: int = 80) -> str:
    """A value as a message shows it, cut where it is long."""
    text = repr(value[: limit + 1] if isinstance(value, str) else value)
    return text if len(text) <= limit else f"{text[:limit]}…"


def did_you_mean(name: str, known: Collection[str]) -> str:
    """`did you mean 'x'?` for the nearest of the known names, or nothing."""
    if len(known) > _MAX_COMPARED:
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


def plain_problems(error: ValidationError, data: object, model: type[BaseModel]) -> list[Problem]:
    """What pydantic found, in plain words and with the place of each."""
    return [Problem(".".join(str(x) for x in e["loc"]), e["msg"]) for e in error.errors(include_url=False)]
