"""Redactor: masks secrets in texts, JSON values and documents, where they leave a run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from types import NoneType, UnionType
from typing import Annotated, Any, Final, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, JsonValue

from replanning.errors import Problem, RecordNotSerializable
from replanning.secrets.masking import MASK, find_known, known_texts, mask
from replanning.secrets.rules import (
    REFERENCE,
    Span,
    find_literals,
    find_secrets,
    is_plain_word,
    is_secret,
    is_simple,
    secret_predicate,
)

_MIN_SECRET_CHARS: Final = 6
"""Shorter known secrets are passed over, because they would match everywhere."""

_MIN_ADDED_CHARS: Final = 4
"""Shorter values of variables are flags rather than secrets."""

_MAX_NAME_PROBLEMS: Final = 1000

_IDENTIFIER_FIELDS: Final = frozenset((
    "id", "task_id", "depends_on", "before", "order", "run", "tool", "kind", "capability",
    "when", "server", "parameters", "optional", "objects", "resources", "callable",
))  # fmt: skip
"""Fields with names and conditions, which stay as they are: other parts refer to them."""

_PARTS_WITH_NAMES: Final = _IDENTIFIER_FIELDS | {
    "tasks",
    "tools",
    "mcp",
    "fallbacks",
    "undo",
    "changes",
    "task",
    "fields",
}
_ASSIGNMENT: Final = re.compile("[=\"'|>`]")
"""What an ordinary name does not have, but a text that assigns a value to a name."""

_COMPARISON: Final = re.compile("[=<>!]+")
_BARE_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_TEXTLESS_TYPES: Final = frozenset({int, float, bool, NoneType})

_Path = tuple[str | int, ...]
PartT = TypeVar("PartT")


class Redactor:
    """Replacement of secrets by `[redacted]`: known values, values under names of secrets, and formats of tokens.

    Args:
        values: secrets known by value, such as those of configured environment variables, and their lines; ones shorter
            than 6 characters are passed over, because they would be found everywhere.
        patterns: further regular expressions of Python whose matches are secrets. They are trusted: one that takes long
            makes everything wait.
    """

    def __init__(self, values: Iterable[str] = (), patterns: Iterable[str] = ()) -> None:
        self._known = known_texts(values, _MIN_SECRET_CHARS)
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._added: set[str] = set()

    def add(self, value: str) -> None:
        """Mask a value from now on; one of fewer than 4 characters is passed over."""
        if value in self._added or len(value.strip()) < _MIN_ADDED_CHARS:
            return
        self._added.add(value)
        self._known = tuple({*self._known, *known_texts([value], _MIN_ADDED_CHARS)})

    def text(self, text: str) -> str:
        """Return the text without secrets and without lone surrogates."""
        if not text.isascii():  # UTF-8 cannot encode lone surrogates
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if len(text) < _MIN_SECRET_CHARS and not self._added:
            return text
        if not self._known and not self._patterns and is_simple(text):
            return text
        return mask(text, self._find)

    def is_secret_name(self, name: str) -> bool:
        """Return whether an id or another name holds a secret that has a format of its own, is assigned, or is known."""
        by_name = _ASSIGNMENT.search(name) is not None
        return mask(name, lambda text: self._find(text, by_name=by_name)) is not name

    def name_problems(self, part: BaseModel | Sequence[BaseModel]) -> list[Problem]:
        """Return the names in a plan or in changes that hold secrets, by their places; they are not masked elsewhere."""
        names = dict.fromkeys(name for _, name in _iter_names(part, ()))
        if not self.is_secret_name("\n\n".join(names)):  # all at once
            return []
        why = "what looks like a secret cannot be a name, because names are kept; choose another"
        problems = (
            Problem(self._place(path), why)
            for path, name in _iter_names(part, ())
            if self.is_secret_name(name)
        )
        return list(islice(problems, _MAX_NAME_PROBLEMS))

    def value(self, value: JsonValue) -> JsonValue:
        """Return a JSON value without secrets, in texts and in members with the name of a secret.

        Raises:
            RecordNotSerializable: it is nested too deeply for JSON.
        """
        try:
            clean: JsonValue = self._clean_value(value)
        except RecursionError:
            raise RecordNotSerializable("a value is nested too deeply to be kept as JSON") from None
        return clean

    def document(self, document: PartT) -> PartT:
        """Return a plan, or any part of one, without secrets; the same object if it has none.

        Ids, other names and conditions stay, because other parts refer to them.
        """
        part: Any = document
        clean: Any = part
        if isinstance(part, str):
            clean = self.text(part)
        elif isinstance(part, tuple):
            clean = tuple(map(self.document, part))
        elif isinstance(part, BaseModel):
            return cast("PartT", self._clean_model(part))
        elif isinstance(part, Mapping):
            if any(isinstance(value, BaseModel) for value in part.values()):
                clean = {name: self.document(value) for name, value in part.items()}
            else:
                clean = self.value(dict(part))
        else:
            clean = self.value(part)
        return document if clean == part else cast("PartT", clean)

    def _clean_model(self, part: BaseModel) -> BaseModel:
        changed: dict[str, object] = {}
        for name in _text_fields(type(part)) & part.__pydantic_fields_set__:
            value = part.__dict__[name]
            if not value:
                continue
            clean = self.document(value)
            if clean is not value:
                changed[name] = clean
        if part.__pydantic_extra__:
            extra: Any = self.value(dict(part.__pydantic_extra__))
            if extra != part.__pydantic_extra__:
                changed |= extra
        return part.model_copy(update=changed) if changed else part

    def _clean_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return self._clean_object(value)
        if isinstance(value, list | tuple):
            return [self._clean_value(item) for item in value]
        return value

    def _clean_object(self, value: dict[str, Any]) -> dict[str, Any]:
        clean: dict[str, Any] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise RecordNotSerializable(
                    f"{key!r} cannot name a member of a JSON object, which a text does"
                )
            name = masked = self.text(key)
            number = 1
            while name in clean:  # what differed in a secret alone
                number += 1
                name = f"{masked} {number}"
            accepts = secret_predicate(key)
            if accepts is not None:
                item = self._mask_member(key, item, accepts)  # noqa: PLW2901 - as it may be recorded
            clean[name] = self._clean_value(item)
        return clean

    def _mask_member(self, key: str, item: Any, accepts: Callable[[str], bool]) -> Any:
        """Return the value of a member whose name is that of a secret, masked unless it cannot be one."""
        if isinstance(item, list | tuple):
            return [self._mask_member(key, part, accepts) for part in item]
        if isinstance(item, str):
            if REFERENCE.search(item):  # its literal parts are judged as after `name=`
                return mask(item, find_literals)
            is_word = key.lower() == "token" and is_plain_word(item)  # of a language model
            return MASK if accepts(item) and not is_word else item
        is_number = isinstance(item, int) and not isinstance(item, bool)
        return MASK if is_number and accepts is is_secret else item

    def _place(self, path: _Path) -> str:
        """Return a path into a document, as `tasks[3].id`, without the secrets in its names."""
        place = ""
        for step in path:
            if isinstance(step, int):
                place += f"[{step}]"
                continue
            name = MASK if self.is_secret_name(step) else step
            if not _BARE_KEY.fullmatch(name):
                place += f"[{json.dumps(name)}]"
            elif place:
                place += f".{name}"
            else:
                place = name
        return place

    def _find(self, text: str, *, by_name: bool = True) -> list[Span]:
        spans = find_secrets(text, by_name=by_name)
        if self._known:
            spans += find_known(text, self._known)
        for pattern in self._patterns:
            spans += [match.span() for match in pattern.finditer(text) if match[0]]
        return spans


def pattern_problem(pattern: str) -> str:
    """Return why a regular expression cannot be used to find secrets; "" if it can."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is no regular expression: {error}"
    return ""


def _names_of(kind: type[BaseModel]) -> frozenset[str]:
    """Return the fields that are names. A `name` is one where it is required, as of a tool; others are for people."""
    name = kind.model_fields.get("name")
    if name is not None and name.is_required():
        return _IDENTIFIER_FIELDS | {"name"}
    return _IDENTIFIER_FIELDS


@cache
def _text_fields(kind: type[BaseModel]) -> frozenset[str]:
    """Return the fields of a model that may contain text other than names."""
    names = _names_of(kind)
    return frozenset(
        name
        for name, field in kind.model_fields.items()
        if name not in names and not _is_textless(field.annotation)
    )


@cache
def _fields_with_names(kind: type[BaseModel]) -> tuple[str, ...]:
    """Return the fields of a model that are names, or have parts with names."""
    names = _names_of(kind) | _PARTS_WITH_NAMES
    return tuple(name for name in kind.model_fields if name in names)


def _iter_names(part: object, path: _Path) -> Iterator[tuple[_Path, str]]:
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
            if path[-1] != "fields" or name in _IDENTIFIER_FIELDS:
                yield (*path, name), name
                yield from _iter_names(value, (*path, name))
    elif isinstance(part, Sequence):
        for number, item in enumerate(part):
            yield from _iter_names(item, (*path, number))


def _is_textless(annotation: object) -> bool:
    """Return whether values of a type have no text."""
    origin = get_origin(annotation)
    parts = get_args(annotation)
    if origin in (Union, UnionType):
        return all(map(_is_textless, parts))
    if origin is Annotated:
        return _is_textless(parts[0])
    return annotation in _TEXTLESS_TYPES
