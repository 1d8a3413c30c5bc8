"""Reading of YAML and JSON under limits, with the line and column of every problem.

The text is untrusted: its size, depth, aliases and kinds of values are bounded before anything is built.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from os import PathLike
from typing import Any, Final, Literal, NamedTuple, NoReturn

import yaml
from pydantic import JsonValue
from yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, Event, ScalarEvent

from replanning.errors import PlanError, Problem
from replanning.plan.messages import format_path, parse_path
from replanning.plan.types import JsonObject, JsonPath

Format = Literal["yaml", "json"]

MAX_PLAN_SIZE: Final = 64 * 1024 * 1024
"""Largest plan file, in bytes."""

MAX_PLAN_DEPTH: Final = 100
"""Deepest nesting of a plan file."""

MAX_ALIASED_NODES: Final = 100_000
"""Number of values that all YAML aliases together may stand for."""

_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_SURROGATE_MESSAGE: Final = "half of a surrogate pair is no character"


def read_text_file(path: str | PathLike[str], *, noun: str = "plan", max_size: int = MAX_PLAN_SIZE) -> str:
    """Return the text of a file.

    Args:
        path: the file.
        noun: the name of its content in messages.
        max_size: the largest size in bytes.

    Raises:
        PlanError: it cannot be read, is too large, or is not UTF-8.
    """
    try:
        with pathlib.Path(path).open("rb") as file:
            content = file.read(max_size + 1)
    except OSError as error:
        raise PlanError([Problem(str(path), f"the {noun} cannot be read: {error.strerror or error}")]) from error
    if len(content) > max_size:
        raise PlanError([Problem(str(path), f"the {noun} is larger than {max_size} bytes")])
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise PlanError([Problem(f"{path}:{line}", f"byte {error.start + 1} of the file is not UTF-8")]) from error


def format_of(path: str | PathLike[str]) -> Format:
    """Return the format of a file by its name: JSON if it ends in `.json`, otherwise YAML."""
    return "json" if str(path).lower().endswith(".json") else "yaml"


def read_document(text: str, *, format: Format, source: str = "<text>", max_size: int = MAX_PLAN_SIZE) -> JsonValue:  # noqa: A002 # the plain word
    """Return the JSON value of a YAML or JSON text; None if the text is empty.

    Args:
        text: the text.
        format: its format.
        source: its name in problems.
        max_size: the largest number of characters.

    Raises:
        PlanError: the text is malformed, too large, nested too deep, or ambiguous; places are `source:line:column`.
    """
    if len(text) > max_size:
        raise PlanError([Problem(source, f"the text has more than {max_size} characters")])
    if not text.isascii() and (half := _SURROGATE.search(text)):
        raise PlanError([Problem(f"{source}:{_line_and_column(text, half.start())}", _SURROGATE_MESSAGE)])
    try:
        return _read_yaml(text) if format == "yaml" else _read_json(text)
    except PlanError as error:
        problems = [Problem(f"{source}:{problem.place}".rstrip(":"), problem.message) for problem in error.problems]
        raise PlanError(problems) from None


def locate_problems(problems: Sequence[Problem], path: str | PathLike[str]) -> list[Problem]:
    """Return problems of a loaded plan with their lines and columns; unchanged if the file cannot be read any more."""
    try:
        text = read_text_file(path)
        read_document(text, format=format_of(path))
    except PlanError:
        return list(problems)
    return with_positions(problems, text, format_of(path), str(path))


def with_positions(problems: Sequence[Problem], text: str, format: Format, source: str) -> list[Problem]:  # noqa: A002 # likewise
    """Return problems of a valid text with line and column before the path; a missing field has those of its parent."""
    paths = [parse_path(problem.place) for problem in problems]
    positions = find_positions(text, format, {path[:length] for path in paths for length in range(1, len(path) + 1)})
    located = []
    for problem, path in zip(problems, paths, strict=True):
        nearest = next((path[:length] for length in range(len(path), 0, -1) if path[:length] in positions), None)
        where = source if nearest is None else "{}:{}:{}".format(source, *positions[nearest])
        located.append(Problem(f"{where} {problem.place}".rstrip(), problem.message))
    return located


def find_positions(text: str, format: Format, paths: Collection[JsonPath]) -> dict[JsonPath, tuple[int, int]]:  # noqa: A002 # likewise
    """Return line and column of the given paths in a valid text: of the key of a field, of the start of an item.

    A path is found only if its parents are given, too.
    """
    positions: dict[JsonPath, tuple[int, int]] = {}
    for path, token in _iter_paths(_yaml_tokens(text) if format == "yaml" else _json_tokens(text), paths):
        if path in paths:
            positions.setdefault(path, (token.line, token.column))
    return positions


def write_yaml(document: JsonValue) -> str:
    """Return a document as YAML with its fields in their order."""
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False)
    return text


def _line_and_column(text: str, position: int) -> str:
    return f"{text.count(chr(10), 0, position) + 1}:{position - text.rfind(chr(10), 0, position)}"


_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SafeDumper: Final = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_PLAIN_CONSTANTS: Final[dict[str, bool | None]] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
}
_INTEGER: Final = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT: Final = re.compile(r"[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)")
_NUMBER_START: Final = frozenset("0123456789-+.")
_MAX_PATH_STEPS: Final = 10
_TAG_PREFIX: Final = "tag:yaml.org,2002:"


class _Dumper(_SafeDumper):  # type: ignore[misc, valid-type] # the base depends on whether libyaml is there
    def ignore_aliases(self, data: object) -> bool:
        return True


# Text that this reader would take for a number must be quoted.
_Dumper.add_implicit_resolver(f"{_TAG_PREFIX}float", re.compile(rf"(?:{_FLOAT.pattern})$"), sorted(_NUMBER_START))


def _read_yaml(text: str) -> JsonValue:
    builder = _YamlBuilder()
    try:
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, ScalarEvent):
                builder.add_scalar(event)
            elif isinstance(event, CollectionStartEvent):
                builder.start_collection(event)
            elif isinstance(event, CollectionEndEvent):
                builder.end_collection(event)
            elif isinstance(event, AliasEvent):
                builder.add_alias(event)
            elif isinstance(event, yaml.DocumentStartEvent) and builder.root:
                builder.fail(event, "a second document begins here; a plan file holds one")
    except yaml.MarkedYAMLError as error:
        why = ", ".join(filter(None, (error.context, error.problem)))
        builder.problems.append(Problem(_mark_position(error.problem_mark), f"this is not YAML: {why}"))
    except yaml.reader.ReaderError as error:
        where = _line_and_column(text, error.position)
        builder.problems.append(Problem(where, f"the character {chr(error.character)!r} is not allowed"))
    if builder.problems:
        raise PlanError(builder.problems)
    return next(iter(builder.root), None)


@dataclass(slots=True)
class _Frame:
    """Array or object that is being read."""

    value: list[JsonValue] | dict[str, JsonValue]
    anchor: str | None = None
    first_node: int = 0
    key: str | None = None
    height: int = 0


class _YamlBuilder:
    """Builder of a document from the events of the YAML parser."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.root: list[JsonValue] = []
        self._stack = [_Frame(self.root)]
        self._anchors: dict[str, tuple[JsonValue, int, int]] = {}
        self._nodes = 0
        self._aliased_nodes = 0

    def add_scalar(self, event: ScalarEvent) -> None:
        self._nodes += 1
        value: JsonValue = event.value
        text: str = event.value
        if event.implicit[0]:
            if text in _PLAIN_CONSTANTS:
                value = _PLAIN_CONSTANTS[text]
            elif text[0] in _NUMBER_START:
                try:
                    value = int(text) if _INTEGER.fullmatch(text) else float(text) if _FLOAT.fullmatch(text) else text
                except ValueError:
                    self.fail(event, "the number has too many digits")
        elif event.tag is not None:
            self._check_tag(event, "str")
        if event.anchor is not None:
            self._anchors[event.anchor] = (value, 1, 0)
        self._add_value(value, event)

    def start_collection(self, event: CollectionStartEvent) -> None:
        is_object = isinstance(event, yaml.MappingStartEvent)
        if event.tag is not None:
            self._check_tag(event, "map" if is_object else "seq")
        if len(self._stack) > MAX_PLAN_DEPTH:
            self.fail(event, f"nested more than {MAX_PLAN_DEPTH} deep")
        frame = self._stack[-1]
        if frame.key is None and isinstance(frame.value, dict):
            self.fail(event, "a key is text; this one is an array or an object")
        if event.anchor is not None:
            self._anchors.pop(event.anchor, None)
        self._stack.append(_Frame({} if is_object else [], event.anchor, self._nodes))
        self._nodes += 1

    def end_collection(self, event: Event) -> None:
        frame = self._stack.pop()
        if frame.anchor is not None:
            self._anchors[frame.anchor] = (frame.value, self._nodes - frame.first_node, frame.height + 1)
        self._stack[-1].height = max(self._stack[-1].height, frame.height + 1)
        self._add_value(frame.value, event)

    def add_alias(self, event: AliasEvent) -> None:
        name = str(event.anchor)
        if name not in self._anchors:
            self.fail(event, f"the alias *{name} stands for nothing, or for what it is part of")
        value, nodes, height = self._anchors[name]
        self._nodes += nodes
        self._aliased_nodes += nodes
        if self._aliased_nodes > MAX_ALIASED_NODES:
            self.fail(event, f"aliases stand for more than {MAX_ALIASED_NODES} values; write them out")
        if len(self._stack) - 1 + height > MAX_PLAN_DEPTH:
            self.fail(event, f"nested more than {MAX_PLAN_DEPTH} deep through the alias *{name}")
        self._stack[-1].height = max(self._stack[-1].height, height)
        self._add_value(value, event)

    def fail(self, event: Event, message: str) -> NoReturn:
        """Raise this problem alone: later ones would only repeat it."""
        self.problems.clear()
        self._add_problem(event, message)
        raise PlanError(self.problems)

    def _add_value(self, value: JsonValue, event: Event) -> None:
        frame = self._stack[-1]
        container = frame.value
        if isinstance(container, list):
            container.append(value)
        elif frame.key is not None:
            container[frame.key] = value
            frame.key = None
        elif not isinstance(value, str):
            written = getattr(event, "value", "") or "null"
            self._add_problem(event, f"the key {written} is not text; put it in quotes")
            frame.key = written
        else:
            if value == "<<" and getattr(event, "implicit", (False,))[0]:
                self._add_problem(event, "merging with << is not supported; write the fields out")
            elif value in container:
                self._add_problem(event, f"the key {value!r} is there twice")
            frame.key = value

    def _check_tag(self, event: ScalarEvent | CollectionStartEvent, kind: str) -> None:
        if event.tag not in ("!", f"{_TAG_PREFIX}{kind}"):
            self.fail(event, f"the tag {event.tag} is not supported; a plan holds plain values")

    def _add_problem(self, event: Event, message: str) -> None:
        path = [frame.key if isinstance(frame.value, dict) else len(frame.value) for frame in self._stack[1:]]
        where = format_path([step for step in path[:_MAX_PATH_STEPS] if step is not None])
        where += "…" if len(path) > _MAX_PATH_STEPS else ""
        self.problems.append(Problem(f"{_mark_position(event.start_mark)} {where}".rstrip(), message))


def _mark_position(mark: Any) -> str:  # yaml.Mark or its twin from libyaml, which share no base
    return f"{mark.line + 1}:{mark.column + 1}"


_JSON_STRING: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')
_JSON_TOKEN: Final = re.compile(rf'{_JSON_STRING.pattern}|[\[\]{{}}\n]|[^\s,:\[\]{{}}"]+')
_NON_BRACKETS: Final = re.compile(r"[^\[\]{}]+")
_ESCAPED_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_DEPTH_CHANGE: Final = {"[": 1, "{": 1, "]": -1, "}": -1}


def _read_json(text: str) -> JsonValue:
    if not text.strip():
        return None
    _check_depth(text)
    repeated = False

    def build(pairs: list[tuple[str, JsonValue]]) -> JsonObject:
        nonlocal repeated
        built = dict(pairs)
        repeated = repeated or len(built) < len(pairs)
        return built

    try:
        document: JsonValue = json.loads(text, object_pairs_hook=build)
    except json.JSONDecodeError as error:
        why = f"this is not JSON: {error.msg[:1].lower()}{error.msg[1:]}"
        raise PlanError([Problem(f"{error.lineno}:{error.colno}", why)]) from None
    except ValueError:
        raise PlanError([Problem("", "a number has too many digits")]) from None
    if repeated:
        seen: set[JsonPath] = set()
        found = []
        for path, token in _iter_paths(_json_tokens(text)):
            if path in seen:
                where = f"{token.line}:{token.column} {format_path(path[:-1])}".rstrip()
                found.append(Problem(where, f"the key {path[-1]!r} is there twice"))
            seen.add(path)
        raise PlanError(found)
    for token in _json_tokens(text) if _ESCAPED_SURROGATE.search(text) else ():
        if _SURROGATE.search(token.text):
            raise PlanError([Problem(f"{token.line}:{token.column}", _SURROGATE_MESSAGE)])
    return document


def _check_depth(text: str) -> None:
    # Counting first is enough for most files; stripping the strings is the expensive part.
    if text.count("[") + text.count("{") <= MAX_PLAN_DEPTH:
        return
    brackets = _NON_BRACKETS.sub("", _JSON_STRING.sub("", text))
    if max(accumulate(map(_DEPTH_CHANGE.__getitem__, brackets)), default=0) <= MAX_PLAN_DEPTH:
        return
    plain = _JSON_STRING.sub(lambda string: " " * len(string[0]), text)
    depths = accumulate(_DEPTH_CHANGE.get(character, 0) for character in plain)
    at = next(index for index, depth in enumerate(depths) if depth > MAX_PLAN_DEPTH)
    raise PlanError([Problem(_line_and_column(text, at), f"nested more than {MAX_PLAN_DEPTH} deep")])


class _Token(NamedTuple):
    """Token of a text: the beginning or end of an array or object, or a scalar."""

    kind: str
    text: str
    line: int
    column: int


_YAML_TOKENS: Final[Mapping[type[Event], str]] = {
    yaml.ScalarEvent: "scalar",
    yaml.AliasEvent: "scalar",
    yaml.MappingStartEvent: "{",
    yaml.SequenceStartEvent: "[",
    yaml.MappingEndEvent: "end",
    yaml.SequenceEndEvent: "end",
}
_JSON_BRACKETS: Final = {"[": "[", "{": "{", "]": "end", "}": "end"}


def _yaml_tokens(text: str) -> Iterator[_Token]:
    for event in yaml.parse(text, Loader=_Loader):
        if kind := _YAML_TOKENS.get(type(event)):
            mark: Any = event.start_mark  # parsed text has marks
            yield _Token(kind, getattr(event, "value", ""), mark.line + 1, mark.column + 1)


def _json_tokens(source: str) -> Iterator[_Token]:
    line, start = 1, 0
    for match in _JSON_TOKEN.finditer(source):
        raw = match[0]
        if raw == "\n":
            line, start = line + 1, match.end()
            continue
        text = raw
        if raw[0] == '"':
            text = json.loads(raw, strict=False) if "\\" in raw else raw[1:-1]
        yield _Token(_JSON_BRACKETS.get(raw, "scalar"), text, line, match.start() - start + 1)


@dataclass(slots=True)
class _PositionFrame:
    path: JsonPath
    index: int | None
    """Index of the next item; None in an object."""
    key: str | None = None

    def next_path(self, token: _Token) -> tuple[JsonPath, bool]:
        """Return the path of the value that a token begins, and whether the token is a key."""
        if self.index is not None:
            self.index += 1
            return (*self.path, self.index - 1), False
        is_key = self.key is None
        key = token.text if self.key is None else self.key
        self.key = key if is_key else None
        return (*self.path, key), is_key


def _iter_paths(
    tokens: Iterable[_Token], within: Collection[JsonPath] | None = None
) -> Iterator[tuple[JsonPath, _Token]]:
    """Yield every field (at its key) and item (at its start) with its path, inside the parts `within` if given."""
    stack: list[_PositionFrame] = []
    skipped_depth = 0
    for token in tokens:
        if skipped_depth:
            skipped_depth += (token.kind in ("[", "{")) - (token.kind == "end")
            continue
        if token.kind == "end":
            stack.pop()
            continue
        path: JsonPath = ()
        if stack:
            path, is_key = stack[-1].next_path(token)
            if is_key or stack[-1].index is not None:
                yield path, token
            if is_key:
                continue
        if token.kind in ("[", "{"):
            if within is None or not path or path in within:
                stack.append(_PositionFrame(path, 0 if token.kind == "[" else None))
            else:
                skipped_depth = 1
