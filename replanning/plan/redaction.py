"""Redactor of secrets in texts, JSON values and plans, used before a record is made of them."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import count
from operator import is_not
from types import NoneType, UnionType
from typing import Annotated, Any, Final, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel

from replanning.errors import RecordNotSerializable
from replanning.plan.checks import nested_bodies
from replanning.plan.document import Plan
from replanning.plan.messages import join_names
from replanning.plan.secrets import (
    FORMAT_RULES,
    MASK,
    NAME_RULES,
    is_plain_word,
    is_secret,
    literal_rule,
    secret_predicate,
    secret_spans,
)
from replanning.plan.tasks import COMMAND_PREFIX
from replanning.plan.types import JsonValue

_MIN_SECRET_CHARS: Final = 6
"""Shorter known secrets are passed over, because they would match everywhere."""

_CLEAN_CACHE_SIZE: Final = 1024
_MAX_CACHED_CHARS: Final = 256
"""Longest text in the cache of texts without secrets; names, goals and reasons recur with every change."""

_PATTERN_ITEM: Final = re.compile(
    r"""
      \\.
    | \[\^?\]?(?:\\.|[^\]\\])*\]
    | \(\?\#[^)]*\)
    | (?P<quantifier>(?:[*+?]|\{(?!\})(?P<least>\d*)(?P<comma>,?)(?P<most>\d*)\})[?+]?)
    | \(\??
    | .
    """,
    re.VERBOSE | re.DOTALL,
)
"""Item of a regular expression: an escape, a set, a comment, a quantifier, a bracket, or a character."""

_VERBOSE_FLAG: Final = re.compile(r"\(\?[a-zA-Z]*x")
_MAX_PATTERN_CHARS: Final = 1000
_compilations: Final = count()
_MAX_LISTED_PLACES: Final = 8
"""Most places in one message."""

_MAX_BOUNDED_REPEAT: Final = 16
"""Most repetitions of a part that may contain a repetition."""

_IDENTIFIER_FIELDS: Final = frozenset(
    {"id", "task_id", "depends_on", "before", "order", "run", "tool", "kind", "capability", "source", "when"}
    | {"parameters", "objects", "resources"}
)
"""Fields with names and conditions, which stay as they are."""

PartT = TypeVar("PartT")


class Redactor:
    """Replacement of secrets by `[redacted]`.

    Args:
        values: secrets known by value, such as those of configured environment variables; ones shorter than 6
            characters are passed over, because they would be found everywhere.
        patterns: further regular expressions whose matches are secrets.
    """

    def __init__(self, values: Iterable[str] = (), patterns: Iterable[str] = ()) -> None:
        known = sorted({value for value in values if len(value) >= _MIN_SECRET_CHARS})
        exact = (*(literal_rule(value) for value in known), *FORMAT_RULES)
        self._case_sensitive_rules = tuple((rule.hint, rule) for rule in exact)
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._clean_texts: set[str] = set()

    def text(self, text: str) -> str:
        """Return the text without secrets and without lone surrogates."""
        if text in self._clean_texts:
            return text
        if not text.isascii():  # UTF-8 cannot encode lone surrogates
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if len(text) < _MIN_SECRET_CHARS:
            return text
        low = text.lower()
        if len(low) != len(text):  # a few capitals are two letters when they are small
            low = "".join(c.lower() if c.isascii() else c for c in text)
        spans = [
            span for hint, rule in self._case_sensitive_rules if hint in text for span in secret_spans(text, text, rule)
        ]
        for hint, rules in NAME_RULES:
            if hint in low:
                spans += [span for rule in rules for span in secret_spans(text, low, rule)]
        for pattern in self._patterns:
            spans += [match.span() for match in pattern.finditer(text) if match[0]]
        if not spans:
            if len(text) <= _MAX_CACHED_CHARS:
                if len(self._clean_texts) >= _CLEAN_CACHE_SIZE:
                    self._clean_texts.clear()
                self._clean_texts.add(text)
            return text
        spans.sort()
        parts, end = [], 0
        for start, stop in spans:
            if start >= end:
                parts += [text[end:start], MASK]
            end = max(end, stop)
        return "".join([*parts, text[end:]])

    def value(self, value: JsonValue) -> JsonValue:
        """Return a JSON value without secrets, in texts and in members with the name of a secret.

        Raises:
            RecordNotSerializable: it is nested too deeply for JSON.
        """
        try:
            return self._redact_value(value)
        except RecursionError:
            raise RecordNotSerializable("a value is nested too deeply to be kept as JSON") from None

    def document(self, document: PartT) -> PartT:
        """Return a plan, or any part of one, without secrets; the same object if it has none.

        Ids, other names and conditions stay, because other parts refer to them.
        """
        part: Any = document
        clean: Any = part
        if isinstance(part, str):
            text = self.text(part)
            clean = part if text == part else text  # text that is not ASCII is copied
        elif isinstance(part, tuple):
            items = tuple(map(self.document, part))
            clean = items if any(map(is_not, items, part)) else part
        elif isinstance(part, BaseModel):
            changed: dict[str, object] = {}
            for name in _text_fields(type(part)) & part.__pydantic_fields_set__:
                value = part.__dict__[name]
                if value and (new := self.document(value)) is not value:
                    changed[name] = new
            if extra := part.__pydantic_extra__:
                clean_extra: Any = self.value(dict(extra))
                changed |= clean_extra if clean_extra != extra else {}
            clean = part.model_copy(update=changed) if changed else part
        else:
            value = self.value(dict(part) if isinstance(part, Mapping) else part)
            clean = part if value == part else value
        return cast("PartT", clean)

    def _redact_value(self, value: JsonValue) -> JsonValue:
        if isinstance(value, str):
            return value if value in self._clean_texts else self.text(value)
        if isinstance(value, list):
            return [self._redact_value(item) for item in value]
        if not isinstance(value, dict):
            return value
        found: dict[str, JsonValue] = {}
        for key, item in value.items():
            name = clean = key if key in self._clean_texts else self.text(key)
            number = 1
            while name in found:  # what differed in a secret alone
                number += 1
                name = f"{clean} {number}"
            accepts = secret_predicate(key)
            found[name] = self._redact_value(item if accepts is None else _mask_member(key, item, accepts))
        return found


@cache
def _text_fields(kind: type[BaseModel]) -> frozenset[str]:
    """Return the fields of a model that may contain text other than names."""
    fields = kind.model_fields.items()
    return frozenset(
        name for name, field in fields if name not in _IDENTIFIER_FIELDS and not _is_textless(field.annotation)
    )


def _is_textless(annotation: object) -> bool:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return all(map(_is_textless, parts))
    return _is_textless(parts[0]) if origin is Annotated else annotation in (int, float, bool, NoneType)


def redaction_warning(clean: Plan, plan: Plan) -> str:
    """Return a warning about the secrets that were redacted from a plan and so will not reach its tools; "" if none."""
    tools = [f"tool {new.name!r}" for new, old in zip(clean.tools, plan.tools, strict=True) if new is not old]
    servers = [f"MCP server {name!r}" for name, server in clean.mcp.items() if server != plan.mcp.get(name)]
    context = [f"the context {name!r}" for name, value in clean.context.items() if value != plan.context.get(name)]
    tasks = []
    for new, old in zip(clean.tasks, plan.tasks, strict=True):
        parts = []
        for (_, part), (_, before) in (
            zip(nested_bodies(new), nested_bodies(old), strict=True) if new is not old else ()
        ):
            parts += ["arguments"] if part.arguments is not before.arguments else []
            checks = [text for text in part.acceptance if text.startswith(COMMAND_PREFIX)]
            parts += ["checks"] if set(checks) - set(before.acceptance) else []
        tasks += [f"the {part} of task {new.id!r}" for part in dict.fromkeys(parts)]
    places = servers + tools + tasks + context
    if not places:
        return ""
    where = join_names(places, _MAX_LISTED_PLACES)
    return (
        f"what looks like a secret was taken out of {where}, and will be missing there; "
        "let a tool refer to it instead, as {env:NAME}"
    )


def pattern_problem(pattern: str) -> str:
    """Return why a regular expression cannot be used to find secrets; "" if it can.

    A pattern is tried at every place of every text. One that repeats a repetition can take exponential time, and is
    refused. (Python's own parser would show the repetitions, but has no public name.)
    """
    if len(pattern) > _MAX_PATTERN_CHARS:
        return f"has {len(pattern)} characters; at most {_MAX_PATTERN_CHARS} are allowed"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            re.compile(pattern)
            re.compile(f"{pattern}(?#{next(_compilations)})")  # not in the cache of `re`, which would hide warnings
        except (re.error, RecursionError, OverflowError) as error:
            return f"is no regular expression: {error}"
    if _VERBOSE_FLAG.search(pattern):
        return "uses the flag x; write it without, and without blanks and comments"
    varying = [False]  # for each open group: whether it contains a repetition of varying length
    repeated = False  # the same for the last item, to which a quantifier applies
    for match in _PATTERN_ITEM.finditer(pattern):
        item = match[0]
        if item in ("(", "(?"):
            varying.append(False)
        elif item == ")":
            repeated = varying.pop()
            varying[-1] |= repeated
        elif match["quantifier"]:
            least, most = {"*": (0, math.inf), "+": (1, math.inf), "?": (0, 1)}.get(item[0], (0, 0))
            if item[0] == "{":
                least = int(match["least"] or 0)
                most = int(match["most"]) if match["most"] else math.inf if match["comma"] else least
            if repeated and most > _MAX_BOUNDED_REPEAT:
                return "repeats a repetition, which can take forever on some texts; write it without one of the two"
            varying[-1] |= least != most and most > 1
        else:
            repeated = False
    if caught:  # such as [[:alpha:]], which finds no secret but looks as if it did
        doubt = str(caught[0].message).lower()
        return f"does not mean what it seems to ({doubt}); write a backslash before literal characters"
    return ""


def _mask_member(key: str, item: JsonValue, accepts: Callable[[str], bool]) -> JsonValue:
    """Return the value of a member whose name is that of a secret, masked unless it cannot be one."""
    if isinstance(item, list):
        return [_mask_member(key, part, accepts) for part in item]
    if isinstance(item, str):
        word = key.lower() == "token" and is_plain_word(item)  # of a language model
        return MASK if accepts(item) and not word else item
    number = isinstance(item, int) and not isinstance(item, bool)
    return MASK if number and accepts is is_secret else item
