"""Masking of secrets in texts, JSON values, and parts of plans and records, where they leave a run.

Secrets in a text are found behind terminal colours and the escapes of JSON and of `repr` as well.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from itertools import accumulate
from operator import is_
from types import NoneType, UnionType
from typing import Annotated, Any, Final, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, JsonValue

from replanning.errors import RecordNotSerializable
from replanning.secrets.rules import (
    Span,
    fill_references,
    find_literals,
    find_secrets,
    is_secret,
    is_simple,
    secret_predicate,
)

MASK: Final = "[redacted]"
"""Replacement of a secret."""

_MAX_LAYERS: Final = 3
"""Most layers of escapes that are looked behind, such as a coloured line within JSON within JSON."""

MIN_KNOWN_CHARS: Final = 4
"""Shorter known values are flags rather than secrets, and would be found everywhere."""

_MAX_REMEMBERED_TEXTS: Final = 200
_MAX_REMEMBERED_CHARS: Final = 4_000

_MIN_LINE_CHARS: Final = 8
"""Shorter lines of a known secret, such as a single bracket, occur in many texts and are not masked."""

_ESCAPE: Final = re.compile(
    r"""
    (
        \x1b (?: \[[0-?]*[ -/]*[@-~] | \][^\x07\x1b]*(?:\x07|\x1b\\)? | [ -/]*[0-~] )
      | \\ (?: u[dD][89abAB][0-9A-Fa-f]{2}\\u[dD][c-fC-F][0-9A-Fa-f]{2} | u[0-9A-Fa-f]{4}
            | x[0-9A-Fa-f]{2} | ["'/\\bfnrt] )
    )
    """,
    re.VERBOSE,
)
_LETTERS: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}

_NAMES: Final = frozenset((
    "id", "task_id", "depends_on", "before", "order", "run", "tool", "kind", "capability",
    "when", "server", "parameters", "optional", "objects", "resources", "callable",
))  # fmt: skip
"""Fields with names and conditions, which stay as they are: other parts refer to them."""

_ASSIGNMENT: Final = re.compile("[=\"'|>`]")
"""What an ordinary name does not have, but a text that assigns a value to a name."""

_TEXTLESS_TYPES: Final = frozenset({int, float, bool, NoneType})

PartT = TypeVar("PartT")


def mask(text: str, find: Callable[[str], list[Span]]) -> str:
    """Return a text with its secrets masked; the same object if it has none.

    Args:
        text: the text.
        find: returns the spans of secrets in a text without looking behind its escapes.
    """
    spans = find(text)
    if "\x1b" in text or "\\" in text:
        spans += _look_behind(text, find, _MAX_LAYERS)
    if not spans:
        return text
    spans.sort()
    pieces = []
    end = 0
    for start, stop in spans:
        if start >= end:
            pieces += [text[end:start], MASK]
        end = max(end, stop)
    pieces.append(text[end:])
    return "".join(pieces)


def mask_secrets(text: str) -> str:
    """Return a text without the secrets that can be recognised by themselves: by their format, or the name before them."""
    return mask(text, find_secrets)


def known_texts(values: Iterable[str]) -> tuple[str, ...]:
    """Return the texts to search for secrets known by value: each stripped, and each of its longer lines."""
    known = set()
    for value in values:
        whole = value.strip()
        if len(whole) >= MIN_KNOWN_CHARS:
            known.add(whole)
        for line in whole.splitlines():
            if len(line.strip()) >= _MIN_LINE_CHARS:
                known.add(line.strip())
    return tuple(sorted(known))


def find_known(text: str, known: Iterable[str]) -> list[Span]:
    """Return the spans of known texts."""
    spans = []
    for value in known:
        start = text.find(value)
        while start >= 0:
            end = start + len(value)
            spans.append((start, end))
            start = text.find(value, end)
    return spans


def _look_behind(text: str, find: Callable[[str], list[Span]], layers: int) -> list[Span]:
    """Return the spans of secrets behind the escapes of a text, up to so many layers of them."""
    parts = _ESCAPE.split(text)  # every second one is an escape
    if len(parts) == 1:
        return []
    decoded = parts.copy()
    decoded[1::2] = [_unescape(escape) for escape in parts[1::2]]
    behind = "".join(decoded)
    hidden = find(behind)
    if layers > 1:
        hidden += _look_behind(behind, find, layers - 1)
    if not hidden:
        return []
    starts = [0, *accumulate(map(len, decoded))]
    origins = [0, *accumulate(map(len, parts))]
    return [_origin(span, starts, origins) for span in hidden]


def _origin(span: Span, starts: list[int], origins: list[int]) -> Span:
    """Return the span of the original text from which a span was decoded; every second part was an escape."""
    first = bisect_right(starts, span[0]) - 1
    last = bisect_right(starts, span[1] - 1) - 1
    start = origins[first]
    if first % 2 == 0:
        start += span[0] - starts[first]
    end = origins[last + 1]
    if last % 2 == 0:
        end = origins[last] + span[1] - starts[last]
    return start, end


def _unescape(escape: str) -> str:
    """Return the text that an escape stands for; "" for colours."""
    if escape[0] == "\x1b":
        return ""
    rest = escape[1:]
    if rest[0] in "ux":
        pair = bytes.fromhex("".join(rest[1:].split("\\u")).zfill(4))
        return pair.decode("utf-16-be", "replace")
    return _LETTERS.get(rest, rest)


class Redactor:
    """Replacement of secrets by `[redacted]`: known values, values under names of secrets, and formats of tokens.

    Args:
        values: secrets known by value, such as those of configured environment variables, and their lines.
        patterns: further regular expressions of Python whose matches are secrets. They are trusted: one that takes long
            makes everything wait.
    """

    def __init__(self, values: Iterable[str] = (), patterns: Iterable[str] = ()) -> None:
        self._known = known_texts(values)
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._added: set[str] = set()
        # Texts without secrets: records repeat those of earlier ones, as a trigger its failure.
        self._clean: set[str] = set()

    def add(self, value: str) -> None:
        """Mask a value from now on; one of fewer than 4 characters is passed over."""
        if value not in self._added:
            self._added.add(value)
            self._known = tuple({*self._known, *known_texts([value])})
            # Another thread may be about to remember a text, and has not looked for this value.
            self._clean = set()

    def text(self, text: str) -> str:
        """Return the text without secrets and lone surrogates; the same object if it has none."""
        # Most texts are simple, and then nothing is looked for but the known values.
        if not self._patterns and is_simple(text):
            for known in self._known:
                if known in text:
                    return mask(text, self._find)
            return text
        clean = self._clean
        if text in clean:
            return text
        if not text.isascii():  # UTF-8 cannot encode lone surrogates
            encodable = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            if encodable != text:
                text = encodable
        if len(text) < MIN_KNOWN_CHARS:
            return text
        masked = mask(text, self._find)
        if masked is text and len(text) <= _MAX_REMEMBERED_CHARS:
            if len(clean) >= _MAX_REMEMBERED_TEXTS:
                clean.clear()
            clean.add(text)
        return masked

    def is_secret_name(self, name: str) -> bool:
        """Return whether an id or another name holds a secret that has a format of its own, is assigned, or is known."""
        if not self._known and not self._patterns and is_simple(name):
            return False
        by_name = _ASSIGNMENT.search(name) is not None
        return mask(name, lambda text: self._find(text, by_name=by_name)) is not name

    def value(self, value: JsonValue) -> JsonValue:
        """Return a JSON value without secrets, in texts and in members with the name of a secret.

        Raises:
            RecordNotSerializable: it is nested too deeply for JSON, or a key is no text.
        """
        if isinstance(value, str):
            return self.text(value)
        try:
            if isinstance(value, list | tuple):
                return [
                    item if type(item) in _TEXTLESS_TYPES else self.value(item) for item in value
                ]
            if not isinstance(value, dict):
                return value
            clean: dict[str, JsonValue] = {}
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
                if accepts is None:
                    clean[name] = item if type(item) in _TEXTLESS_TYPES else self.value(item)
                else:
                    clean[name] = self.value(_mask_member(item, accepts))
        except RecursionError:
            raise RecordNotSerializable("a value is nested too deeply to be kept as JSON") from None
        return clean

    def document(self, document: PartT) -> PartT:
        """Return a part of a plan or of a record without secrets; the same object if it has none.

        Ids, other names and conditions of plans stay, because other parts refer to them.

        Args:
            document: a text, JSON, a model, a dataclass, or a tuple or mapping of them.
        """
        part: Any = document
        kind: Any = type(part)
        clean: Any
        names = _model_fields(kind)
        if names is not None:
            changed: dict[str, Any] = {}
            stated = names & part.__pydantic_fields_set__
            if stated:
                changed = self.changed_fields(part, stated)
            extra: Any = part.__pydantic_extra__
            if extra:
                clean = self.value(extra)
                if clean != extra:
                    changed |= clean
            return cast("PartT", part.model_copy(update=changed)) if changed else document
        if kind is str:
            return cast("PartT", self.text(part))
        if isinstance(part, tuple):
            clean = tuple([self.document(item) for item in part])
            return document if all(map(is_, clean, part)) else cast("PartT", clean)
        names = _init_fields(kind)
        if names:
            changed = self.changed_fields(part, names)
            return cast("PartT", replace(part, **changed)) if changed else document
        if isinstance(part, Mapping):
            if _holds_models(part):
                clean = {name: self.document(item) for name, item in part.items()}
            else:
                clean = self.value(dict(part))
        else:
            clean = self.value(part)
        return document if clean == part else cast("PartT", clean)

    def changed_fields(self, part: object, names: Iterable[str]) -> dict[str, Any]:
        """Return the fields that have secrets, without them."""
        changed: dict[str, Any] = {}
        for name in names:
            value = getattr(part, name)
            kind = type(value)
            if not value or kind in _TEXTLESS_TYPES:
                continue
            clean = self.text(value) if kind is str else self.document(value)
            if clean is not value:
                changed[name] = clean
        return changed

    def _find(self, text: str, *, by_name: bool = True) -> list[Span]:
        spans = find_secrets(text, by_name=by_name)
        if self._known:
            spans += find_known(text, self._known)
        for pattern in self._patterns:
            spans += [match.span() for match in pattern.finditer(text) if match[0]]
        return spans


def _mask_member(item: JsonValue, accepts: Callable[[str], bool]) -> JsonValue:
    """Return the value of a member whose name is that of a secret, masked unless it cannot be one."""
    if isinstance(item, list | tuple):
        return [_mask_member(part, accepts) for part in item]
    if isinstance(item, str):
        if fill_references(item) != item:  # its literal parts are judged as after `name=`
            return mask(item, lambda text: find_literals(fill_references(text), 0, len(text)))
        return MASK if accepts(item) else item
    is_number = isinstance(item, int) and not isinstance(item, bool)
    return MASK if is_number and accepts is is_secret else item


def _holds_models(part: Mapping[str, object]) -> bool:
    for item in part.values():
        kind: Any = type(item)
        if _model_fields(kind) is not None:
            return True
    return False


def name_fields(kind: type[BaseModel]) -> frozenset[str]:
    """Return the fields that are names. A `name` is one where it is required, as of a tool; others are for people."""
    name = kind.model_fields.get("name")
    if name is not None and name.is_required():
        return _NAMES | {"name"}
    return _NAMES


@cache
def _init_fields(kind: type) -> frozenset[str]:
    """Return the fields that a dataclass is made with; none for another type."""
    if not is_dataclass(kind):
        return frozenset()
    return frozenset(field.name for field in fields(kind) if field.init)


@cache
def _model_fields(kind: type) -> frozenset[str] | None:
    """Return the fields of a model that may contain text other than names; None for another type."""
    if not issubclass(kind, BaseModel):
        return None
    names = set()
    for name, field in kind.model_fields.items():
        if _may_hold_text(field.annotation):
            names.add(name)
    return frozenset(names) - name_fields(kind)


def _may_hold_text(annotation: object) -> bool:
    """Return whether a type may hold text: it is neither a number nor a union of numbers."""
    if get_origin(annotation) is Annotated:
        return _may_hold_text(get_args(annotation)[0])
    if isinstance(annotation, UnionType) or get_origin(annotation) is Union:
        return any(map(_may_hold_text, get_args(annotation)))
    return annotation not in _TEXTLESS_TYPES


def pattern_problem(pattern: str) -> str:
    """Return why a regular expression cannot be used to find secrets; "" if it can."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is no regular expression: {error}"
    return ""
