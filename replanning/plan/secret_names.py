"""Names in plans and changes that hold secrets: they are refused, because names are not masked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Final

from pydantic import BaseModel

from replanning.errors import Problem
from replanning.plan.messages import MAX_PROBLEMS, format_path
from replanning.plan.tasks import Task
from replanning.plan.types import JsonPath
from replanning.secrets import MASK, Redactor, name_fields

_PARTS_WITH_NAMES: Final = frozenset(
    {"tasks", "tools", "mcp", "fallbacks", "undo", "changes", "task", "fields"}
)
_COMPARISON: Final = re.compile("[=<>!]+")


def secret_name_problems(
    part: BaseModel | Sequence[BaseModel], redactor: Redactor
) -> list[Problem]:
    """Return the names in a plan or in changes that hold secrets, by their places."""
    names = dict.fromkeys(name for _, name in _iter_names(part, ()))
    if not redactor.is_secret_name("\n\n".join(names)):  # all at once
        return []
    why = "what looks like a secret cannot be a name, because names are kept; choose another"
    problems: list[Problem] = []
    for path, name in _iter_names(part, ()):
        if len(problems) < MAX_PROBLEMS and redactor.is_secret_name(name):
            problems.append(Problem(_place(path, redactor), why))
    return problems


def _place(path: JsonPath, redactor: Redactor) -> str:
    """Return a path into a document, as `tasks[3].id`, without the secrets in its names."""
    steps: list[str | int] = []
    for step in path:
        is_secret = isinstance(step, str) and redactor.is_secret_name(step)
        steps.append(MASK if is_secret else step)
    return format_path(steps)


def _iter_names(part: object, path: JsonPath) -> Iterator[tuple[JsonPath, str]]:
    """Yield the names in a plan or in changes, with their paths."""
    if isinstance(part, str):
        # A condition compares, which would look as if it assigned a value.
        yield path, _COMPARISON.sub(" ", part) if path[-1] == "when" else part
    elif isinstance(part, BaseModel):
        for field in _fields_with_names(type(part)):
            value = part.__dict__[field]
            if value:
                yield from _iter_names(value, (*path, field))
    elif isinstance(part, Mapping):
        for name, value in part.items():
            # Fields of a change are those of a task, and not all of them are names.
            if path[-1] != "fields" or name in name_fields(Task):
                yield (*path, name), name
                yield from _iter_names(value, (*path, name))
    elif isinstance(part, Sequence):
        for number, item in enumerate(part):
            yield from _iter_names(item, (*path, number))


@cache
def _fields_with_names(kind: type[BaseModel]) -> tuple[str, ...]:
    """Return the fields of a model that are names, or have parts with names."""
    names = name_fields(kind) | _PARTS_WITH_NAMES
    return tuple(name for name in kind.model_fields if name in names)
