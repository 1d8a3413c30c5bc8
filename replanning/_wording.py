"""Words for what is wrong: places, near names, and pydantic's errors said plainly."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from replanning._errors import Problem

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for the nearest of the known names, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def plain_problems(error: ValidationError, data: object, model: type[BaseModel]) -> list[Problem]:
    """What pydantic found, in plain words and with the place of each."""
    return [Problem(".".join(str(x) for x in e["loc"]), e["msg"]) for e in error.errors(include_url=False)]
