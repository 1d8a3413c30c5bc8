"""Redactor of secrets in texts, JSON values and plans, used before a record is made of them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import count
from operator import is_not
from types import NoneType, UnionType
from typing import Annotated, Any, Final, TypeVar, Union, cast, get_args, get_origin

import re2
from pydantic import BaseModel

from replanning.errors import Problem, RecordNotSerializable
from replanning.plan.checks import nested_bodies
from replanning.plan.commands import ENV_REFERENCE
from replanning.plan.document import Plan
from replanning.plan.masking import find_known, known_texts, mask
from replanning.plan.messages import first_problems, format_path, join_names
from replanning.plan.secrets import (
    MASK,
    Span,
    find_secrets,
    is_plain_word,
    is_secret,
    is_simple,
    secret_predicate,
)
from replanning.plan.tasks import COMMAND_PREFIX, ToolSpec
from replanning.plan.types import JsonPath, JsonValue

_MIN_SECRET_CHARS: Final = 6
"""Shorter known secrets are passed over, because they would match everywhere."""

_MIN_ADDED_CHARS: Final = 4
"""Shorter values of variables are flags rather than secrets."""

_CLEAN_CACHE_SIZE: Final = 1024
_MAX_CACHED_CHARS: Final = 256
"""Longest text in the cache of texts without secrets; names, goals and reasons recur with every change."""

_MAX_PATTERN_CHARS: Final = 1000
_MAX_MATCH_BYTES: Final = 8192
"""Text in which a pattern of users is matched at a time; what it matches has at most half as many bytes."""

_compilations: Final = count()
_MAX_LISTED_PLACES: Final = 8
"""Most places in one message."""

_IDENTIFIER_FIELDS: Final = frozenset(
    {
        "id",
        "task_id",
        "depends_on",
        "before",
        "order",
        "run",
        "tool",
        "kind",
        "capability",
        "when",
        "server",
    }
    | {"parameters", "optional", "objects", "resources", "callable"}
)
"""Fields with names and conditions, which stay as they are, like the names of tools."""

_PARTS_WITH_NAMES: Final = frozenset(
    {"tasks", "tools", "mcp", "fallbacks", "undo", "changes", "task", "fields"} | _IDENTIFIER_FIELDS
)

_ASSIGNMENT: Final = re.compile("[=\"'|>`]")
"""What an ordinary name does not have, but a text that assigns a value to a name."""

_WORD_BESIDE_REFERENCE: Final = re.compile(r"""[^\s=;:,&"'/{}]+""")
_MIN_RANDOM_CHARS: Final = 8

_COMPARISON: Final = re.compile("[=<>!]+")

_TEXTLESS_TYPES: Final = frozenset({int, float, bool, NoneType})

PartT = TypeVar("PartT")


class Redactor:
    """Replacement of secrets by `[redacted]`, also of those behind escapes, colours and encodings.

    Args:
        values: secrets known by value, such as those of configured environment variables, and their lines; ones shorter
            than 6 characters are passed over, because they would be found everywhere.
        patterns: further regular expressions whose matches are secrets, in the syntax of RE2.
    """

    def __init__(self, values: Iterable[str] = (), patterns: Iterable[str] = ()) -> None:
        self._values = set[str]()
        self._known = known_texts(values, _MIN_SECRET_CHARS)
        self._patterns = [_compile(pattern) for pattern in patterns]
        self._clean_texts: set[str] = set()

    def add(self, value: str) -> None:
        """Mask a value from now on; one of fewer than 4 characters is passed over."""
        if value in self._values or len(value.strip()) < _MIN_ADDED_CHARS:
            return
        self._values.add(value)
        self._known = tuple(sorted({*self._known, *known_texts([value], _MIN_ADDED_CHARS)}))
        self._clean_texts.clear()

    def text(self, text: str, *, wrapped: bool = False) -> str:
        """Return the text without secrets and without lone surrogates; if `wrapped`, also without those across line ends."""
        if text in self._clean_texts:
            return text
        if not text.isascii():  # UTF-8 cannot encode lone surrogates
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if len(text) < _MIN_SECRET_CHARS and not self._values:
            return text
        simple = not self._known and not self._patterns and is_simple(text)
        clean = text if simple else mask(text, self._find, wrapped=wrapped)
        if clean is text and len(text) <= _MAX_CACHED_CHARS:
            if len(self._clean_texts) >= _CLEAN_CACHE_SIZE:
                self._clean_texts.clear()
            self._clean_texts.add(text)
        return clean

    def is_secret_name(self, name: str) -> bool:
        """Return whether an id or another name holds a secret that has a format of its own, is assigned, or is known."""
        return (
            mask(name, lambda text: self._find(text, by_name=_ASSIGNMENT.search(text) is not None))
            is not name
        )

    def name_problems(self, part: BaseModel | Sequence[BaseModel]) -> list[Problem]:
        """Return the names in a plan or in changes that hold secrets, by their places; they are not masked elsewhere."""
        names, rest = list[str](), part
        if isinstance(
            part, Plan
        ):  # of thousands of tasks, most have two names, and depend on those of others
            names = [task.id for task in part.tasks]
            others = [
                task
                for task in part.tasks
                if task.when or task.resources or task.fallbacks or task.undo
            ]
            rest = part.model_copy(update={"tasks": tuple(others)})
            names += dict.fromkeys([task.tool for task in part.tasks if task.tool])
        names += [name for _, name in _iter_names(rest, ())]
        if not self.is_secret_name("\n\n".join(names)):  # all at once
            return []
        why = "what looks like a secret cannot be a name, because names are kept; choose another"
        found = (
            map(self._clean_step, path)
            for path, name in _iter_names(part, ())
            if self.is_secret_name(name)
        )
        return first_problems(Problem(format_path(list(path)), why) for path in found)

    def _clean_step(self, step: str | int) -> str | int:
        return MASK if isinstance(step, str) and self.is_secret_name(step) else step

    def _find(self, text: str, *, by_name: bool = True) -> list[Span]:
        spans = find_secrets(text, by_name=by_name)
        if self._known:
            spans += find_known(text, self._known)
        for pattern in self._patterns:
            spans += _matches(pattern, text)
        if spans and "{env:" in text:
            return _around_references(spans, text)
        return spans

    def value(self, value: JsonValue) -> JsonValue:
        """Return a JSON value without secrets, in texts and in members with the name of a secret.

        Raises:
            RecordNotSerializable: it is nested too deeply for JSON.
        """
        try:
            clean: JsonValue = self._redact_value(value)
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
            text = self.text(part)
            clean = part if text == part else text  # text that is not ASCII is copied
        elif isinstance(part, tuple):
            items = tuple(map(self.document, part))
            clean = items if any(map(is_not, items, part)) else part
        elif isinstance(part, BaseModel):
            changed: dict[str, object] = {}
            for name in _text_fields(type(part)) & part.__pydantic_fields_set__:
                value = part.__dict__[name]
                known = type(value) is str and value in self._clean_texts
                if value and not known and (new := self.document(value)) is not value:
                    changed[name] = new
            if extra := part.__pydantic_extra__:
                clean_extra: Any = self.value(dict(extra))
                changed |= clean_extra if clean_extra != extra else {}
            clean = part.model_copy(update=changed) if changed else part
        elif isinstance(part, Mapping) and any(
            isinstance(value, BaseModel) for value in part.values()
        ):
            servers = {name: self.document(value) for name, value in part.items()}
            clean = servers if any(map(is_not, servers.values(), part.values())) else part
        else:
            value = self.value(dict(part) if isinstance(part, Mapping) else part)
            clean = part if value == part else value
        return cast("PartT", clean)

    def _redact_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            found: dict[str, JsonValue] = {}
            for key, item in value.items():
                if not isinstance(key, str):
                    raise RecordNotSerializable(
                        f"{key!r} cannot name a member of a JSON object, which a text does"
                    )
                clean = self.text(key)
                name = clean
                number = 1
                while name in found:  # what differed in a secret alone
                    number += 1
                    name = f"{clean} {number}"
                accepts = secret_predicate(key)
                if accepts is not None:
                    item = _mask_member(key, item, accepts)  # noqa: PLW2901 - the item as it may be recorded
                found[name] = self._redact_value(item)
            return found
        if isinstance(value, (list, tuple)):
            return [self._redact_value(item) for item in value]
        return value


@cache
def _text_fields(kind: type[BaseModel]) -> frozenset[str]:
    """Return the fields of a model that may contain text other than names."""
    names = _IDENTIFIER_FIELDS | ({"name"} if kind is ToolSpec else set())
    fields = kind.model_fields.items()
    return frozenset(
        name for name, field in fields if name not in names and not _is_textless(field.annotation)
    )


@cache
def _fields_with_names(kind: type[BaseModel]) -> tuple[str, ...]:
    """Return the fields of a model that are names, or have parts with names."""
    return tuple(
        name
        for name in kind.model_fields
        if name in _PARTS_WITH_NAMES or (kind, name) == (ToolSpec, "name")
    )


def _iter_names(part: object, path: JsonPath) -> Iterator[tuple[JsonPath, str]]:
    """Yield the names in a plan or in changes, with their paths."""
    if isinstance(part, str):
        # A condition compares, which would look as if it assigned a value.
        yield path, _COMPARISON.sub(" ", part) if path[-1] == "when" else part
    elif isinstance(part, BaseModel):
        for field in _fields_with_names(type(part)):
            if value := part.__dict__[field]:
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
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return all(map(_is_textless, parts))
    return _is_textless(parts[0]) if origin is Annotated else annotation in _TEXTLESS_TYPES


def redaction_warning(clean: Plan, plan: Plan) -> str:
    """Return a warning about the secrets in a plan that its journal does not keep; "" if none."""
    tools = [
        f"tool {new.name!r}"
        for new, old in zip(clean.tools, plan.tools, strict=True)
        if new is not old
    ]
    servers = [
        f"MCP server {name!r}" for name, server in clean.mcp.items() if server != plan.mcp.get(name)
    ]
    context = [
        f"the context {name!r}"
        for name, value in clean.context.items()
        if value != plan.context.get(name)
    ]
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
        f"what looks like a secret stands in {where}; this run uses it, and its journal does not keep it: "
        "after a resume it is missing unless the plan is given again; refer to it as {env:NAME} instead"
    )


def pattern_problem(pattern: str) -> str:
    """Return why a regular expression cannot be used to find secrets; "" if it can.

    It must mean the same to Python and to RE2, which matches it in linear time.
    """
    if len(pattern) > _MAX_PATTERN_CHARS:
        return f"has {len(pattern)} characters; at most {_MAX_PATTERN_CHARS} are allowed"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            re.compile(pattern)
            re.compile(
                f"{pattern}(?#{next(_compilations)})"
            )  # not in the cache of `re`, which would hide warnings
        except (re.error, RecursionError, OverflowError) as error:
            return f"is no regular expression: {error}"
    try:
        _compile(pattern)
    except re2.error as error:
        reason = error.args[0].decode()
        return f"cannot be matched in linear time; write it without lookaround, backreferences and flags ({reason})"
    if caught:  # such as [[:alpha:]], which finds no secret but looks as if it did
        doubt = str(caught[0].message).lower()
        return (
            f"does not mean what it seems to ({doubt}); write a backslash before literal characters"
        )
    return ""


def _compile(pattern: str) -> Any:
    """Return a pattern of users for RE2, which needs linear time to find its next match."""
    options = re2.Options()
    options.log_errors = False
    return re2.compile(pattern.encode(), options)


def _matches(pattern: Any, text: str) -> Iterator[Span]:
    """Yield the spans that a pattern matches; all of them together take linear time, since each search is bounded."""
    encoded = text.encode()
    at = counted = characters = 0
    while at < len(encoded):
        bound = min(at + _MAX_MATCH_BYTES, len(encoded))
        match = pattern.search(encoded, at, bound)
        if match is None:
            at = bound if bound == len(encoded) else bound - _MAX_MATCH_BYTES // 2
            continue
        start, end = match.span()
        at = max(end, at + 1)
        if end > start:
            first = characters + len(encoded[counted:start].decode(errors="ignore"))
            counted, characters = end, first + len(encoded[start:end].decode(errors="ignore"))
            yield first, characters


def _around_references(spans: Sequence[Span], text: str) -> list[Span]:
    """Return spans without the references `{env:NAME}` in them: a reference is no secret.

    Of a span with a reference, such as a header `session={env:SESSION}`, the other words stay unless they look random.
    """
    references = [match.span() for match in ENV_REFERENCE.finditer(text)]
    found: list[Span] = []
    for start, end in spans:
        inside = [each for each in references if each[0] < end and each[1] > start]
        if not inside:
            found.append((start, end))
            continue
        for match in _WORD_BESIDE_REFERENCE.finditer(text, start, end):
            word = match[0]
            in_reference = any(
                first < match.end() and match.start() < last for first, last in inside
            )
            looks_random = len(word) >= _MIN_RANDOM_CHARS and any(map(str.isdigit, word))
            if looks_random and not in_reference:
                found.append(match.span())
    return found


def _mask_member(key: str, item: Any, accepts: Callable[[str], bool]) -> Any:
    """Return the value of a member whose name is that of a secret, masked unless it cannot be one."""
    if isinstance(item, list):
        return [_mask_member(key, part, accepts) for part in item]
    if isinstance(item, str) and ENV_REFERENCE.search(item):
        return item if not _around_references([(0, len(item))], item) else MASK
    if isinstance(item, str):
        word = key.lower() == "token" and is_plain_word(item)  # of a language model
        return MASK if accepts(item) and not word else item
    number = isinstance(item, int) and not isinstance(item, bool)
    return MASK if number and accepts is is_secret else item
