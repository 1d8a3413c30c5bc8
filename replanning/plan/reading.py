"""Reader of YAML and JSON with limits, which reports the line and column of every problem.

The text is untrusted: its size, depth, aliases and types are checked before anything is built.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from os import PathLike
from typing import Any, Final, Literal, NamedTuple

import yaml
from pydantic import JsonValue
from yaml.events import (
    AliasEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from replanning.errors import PlanError, Problem
from replanning.plan.json_values import exceeds_depth
from replanning.plan.messages import (
    MAX_PROBLEMS,
    did_you_mean,
    first_problems,
    format_path,
    join_parts,
    parse_path,
)
from replanning.plan.types import JsonObject, JsonPath

Format = Literal["yaml", "json"]

MAX_PLAN_SIZE: Final = 64 * 1024 * 1024
"""Largest plan file, in bytes."""

MAX_PLAN_DEPTH: Final = 100
"""Deepest nesting of a plan file."""

MAX_PLAN_TASKS: Final = 100_000
"""Maximum number of tasks in a plan file, fallbacks and undo tasks included."""

MAX_ALIASED_NODES: Final = 100_000
"""Maximum number of values that all YAML aliases of a file stand for."""

_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_SURROGATE_MESSAGE: Final = "half of a surrogate pair is not a character"


def read_text_file(
    path: str | PathLike[str], *, noun: str = "plan", max_size: int = MAX_PLAN_SIZE
) -> str:
    """Return the text of a file.

    Args:
        path: the file.
        noun: the word for its content in messages.
        max_size: the largest size in bytes.

    Raises:
        PlanError: it cannot be read, is too large, or is not UTF-8.
    """
    place = str(path)
    try:
        kind = ""
        file_path = pathlib.Path(path)
        # Reading any of these may never end.
        if file_path.is_fifo():
            # The shell's <(…) and /dev/stdin are pipes, too, but have a writer.
            if not str(file_path.absolute()).startswith(("/dev/", "/proc/")):
                kind = "a named pipe"
        elif file_path.is_char_device() or file_path.is_block_device():
            if str(file_path) != "/dev/null":
                kind = "a device"
        elif file_path.is_socket():
            kind = "a socket"
        if kind:
            raise ValueError(f"it is {kind}; give a file")
        # A pipe has no size to check, so the read itself is limited.
        with file_path.open("rb") as file:
            content = file.read(max_size + 1)
    except (OSError, TypeError, ValueError) as error:  # the last two are raised for non-paths
        reason = getattr(error, "strerror", None) or error
        problem = f"the {noun} cannot be read: {reason}"
        if isinstance(error, FileNotFoundError):
            problem = join_parts(problem, _similar_file(pathlib.Path(path)))
        raise PlanError.at(place, problem) from error
    if len(content) > max_size:
        raise PlanError.at(place, f"the {noun} is larger than {max_size} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        text = f"byte {error.start + 1} of the file is not UTF-8"
        raise PlanError.at(f"{place}:{line}", text) from error


def _similar_file(path: pathlib.Path) -> str:
    """Return a question whether another file of the same folder was meant; "" without one."""
    try:
        names = [each.name for each in path.parent.iterdir()]
    except OSError:  # the folder does not exist, or cannot be read
        return ""
    return did_you_mean(path.name, names)


def format_of(path: str | PathLike[str]) -> Format:
    """Return the format of a file by its name: JSON if it ends in `.json`, otherwise YAML."""
    if str(path).lower().endswith(".json"):
        return "json"
    return "yaml"


def read_document(
    text: str,
    *,
    format: Format,  # noqa: A002
    source: str = "<text>",
    max_size: int = MAX_PLAN_SIZE,
) -> JsonValue:
    """Return the JSON value of a YAML or JSON text; None if the text is empty.

    Args:
        text: the text.
        format: its format.
        source: its name in problems.
        max_size: the largest number of characters.

    Raises:
        PlanError: the text is malformed, too large, nested too deep, or ambiguous; places are
            `source:line:column`.
    """
    if len(text) > max_size:
        raise PlanError.at(source, f"the text has more than {max_size} characters")
    if not text.isascii():
        half = _SURROGATE.search(text)
        if half is not None:
            place = f"{source}:{_line_and_column(text, half.start())}"
            raise PlanError.at(place, _SURROGATE_MESSAGE)
    try:
        if format == "yaml":
            return _YamlBuilder().read(text)
        return _read_json(text)
    except PlanError as error:
        problems = []
        for problem in error.problems:
            place = f"{source}:{problem.place}".rstrip(":")
            problems.append(Problem(place, problem.message))
        raise PlanError(problems) from None


def with_positions(
    problems: Sequence[Problem],
    text: str,
    format: Format,  # noqa: A002
    source: str,
) -> list[Problem]:
    """Return problems of a valid text with line and column before the path.

    A missing field gets the position of its parent.
    """
    paths = [parse_path(problem.place) for problem in problems]
    wanted: set[JsonPath] = set()
    for path in paths:
        wanted.update(path[:length] for length in range(1, len(path) + 1))
    positions = find_positions(text, format, wanted)
    located = []
    for problem, path in zip(problems, paths, strict=True):
        where = source
        for length in range(len(path), 0, -1):
            if path[:length] in positions:
                line, column = positions[path[:length]]
                where = f"{source}:{line}:{column}"
                break
        # A problem of the document as a whole has no path.
        place = f"{where} {problem.place}".rstrip()
        located.append(Problem(place, problem.message))
    return located


def find_positions(
    text: str,
    format: Format,  # noqa: A002
    paths: Collection[JsonPath],
) -> dict[JsonPath, tuple[int, int]]:
    """Return line and column of the given paths in a valid text.

    The position of a field is that of its key; that of an item is its start. A path is found only
    if its parents are given, too.
    """
    if format == "yaml":
        tokens = _yaml_tokens(text)
    else:
        tokens = _json_tokens(text)
    positions: dict[JsonPath, tuple[int, int]] = {}
    for path, token in _iter_paths(tokens, paths):
        if path in paths:
            positions.setdefault(path, token[2:])
            # The rest of a large file need not be read.
            if len(positions) == len(paths):
                break
    return positions


def write_yaml(document: JsonValue) -> str:
    """Return a document as YAML, with its fields in order."""
    text: str = yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False
    )
    return text


def _line_and_column(text: str, position: int) -> str:
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    return f"{line}:{column}"


_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SafeDumper: Final = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_PLAIN_CONSTANTS: Final[dict[str, bool | None]] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
}
_INTEGER: Final = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT: Final = re.compile(
    r"[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)"
)
_NUMBER_START: Final = frozenset("0123456789-+.")
_MAX_PATH_STEPS: Final = 10
_TAG_MESSAGE: Final = "the tag {} is not supported; a plan holds plain values"
_TAG_PREFIX: Final = "tag:yaml.org,2002:"
_PLAIN_TAGS: Final = {
    ScalarEvent: ("!", f"{_TAG_PREFIX}str"),
    SequenceStartEvent: ("!", f"{_TAG_PREFIX}seq"),
    MappingStartEvent: ("!", f"{_TAG_PREFIX}map"),
}


class _Dumper(_SafeDumper):  # type: ignore[misc, valid-type] # the base depends on libyaml
    def ignore_aliases(self, data: object) -> bool:
        return True


# Text that this reader would read as a number must be quoted.
_Dumper.add_implicit_resolver(
    f"{_TAG_PREFIX}float", re.compile(rf"(?:{_FLOAT.pattern})$"), sorted(_NUMBER_START)
)


def _plain_value(word: str) -> JsonValue:
    """Return the value of an unquoted scalar.

    Raises:
        ValueError: it is a number with too many digits.
    """
    if word in _PLAIN_CONSTANTS:
        return _PLAIN_CONSTANTS[word]
    # Most words are text; this skips the two patterns.
    if word[0] not in _NUMBER_START:
        return word
    if _INTEGER.fullmatch(word):
        return int(word)
    if _FLOAT.fullmatch(word):
        return float(word)
    return word


@dataclass(slots=True)
class _OpenNode:
    """Array or object that is being read.

    `key` belongs to its next value, `first_node` is the number of values before it, and `height`
    the height of its tallest value so far.
    """

    value: list[JsonValue] | dict[str, JsonValue]
    key: str | None = None
    anchor: str | None = None
    first_node: int = 0
    height: int = 0


class _Anchored(NamedTuple):
    """Finished value of an anchor, with its number of values and its height."""

    value: JsonValue
    nodes: int
    height: int


@dataclass(slots=True)
class _YamlBuilder:
    """Document built from the events of a YAML parser.

    Only `read` changes it: `_open` is the stack of arrays and objects from the root to the one
    being read, `_anchors` has the finished values by name. An alias is the value itself, not a
    copy, so a few lines could stand for billions of values: each alias counts all values in it, and
    its height adds to the depth of its place.
    """

    _open: list[_OpenNode] = field(default_factory=lambda: [_OpenNode([])])
    _anchors: dict[str, _Anchored] = field(default_factory=dict)
    _problems: list[Problem] = field(default_factory=list)
    _nodes: int = 0
    _aliased_nodes: int = 0

    def read(self, text: str) -> JsonValue:
        """Return the value of a text; None if it is empty.

        Raises:
            PlanError: it is not YAML, or not a plain document.
        """
        try:
            for event in iter(_Loader(text).get_event, None):
                match event:
                    case ScalarEvent():
                        self._read_scalar(event)
                    case MappingStartEvent():
                        self._begin(event, {})
                    case SequenceStartEvent():
                        self._begin(event, [])
                    case MappingEndEvent() | SequenceEndEvent():
                        self._end(event)
                    case AliasEvent():
                        self._read_alias(event)
                    case yaml.DocumentStartEvent() if self._open[0].value:
                        second = "a second document begins here; a plan file holds one"
                        raise self._fatal(event, second)
        except yaml.MarkedYAMLError as error:
            why = ", ".join(filter(None, (error.context, error.problem)))
            message = f"this is not YAML: {why}"
            # The parser reads ahead, and newer versions of libyaml have their own limit.
            if "maximum nesting depth" in why:
                message = f"nested more than {MAX_PLAN_DEPTH} deep"
            self._problems.append(Problem(_mark_position(error.problem_mark), message))
        except yaml.reader.ReaderError as error:
            where = _line_and_column(text, error.position)
            message = f"the character {chr(error.character)!r} is not allowed"
            self._problems.append(Problem(where, message))
        if self._problems:
            raise PlanError(self._problems)
        return next(iter(self._open[0].value), None)

    def _read_scalar(self, event: ScalarEvent) -> None:
        if event.tag is not None:
            self._check_tag(event)
        value: JsonValue = event.value
        # Quoted text is always text.
        if event.implicit[0]:
            try:
                value = _plain_value(event.value)
            except ValueError:
                raise self._fatal(event, "the number has too many digits") from None
        self._nodes += 1
        if event.anchor is not None:
            self._anchors[event.anchor] = _Anchored(value, 1, 0)
        self._add(event, value)

    def _begin(
        self,
        event: MappingStartEvent | SequenceStartEvent,
        value: list[JsonValue] | dict[str, JsonValue],
    ) -> None:
        if event.tag is not None:
            self._check_tag(event)
        if len(self._open) > MAX_PLAN_DEPTH:
            raise self._fatal(event, f"nested more than {MAX_PLAN_DEPTH} deep")
        parent = self._open[-1]
        if parent.key is None and isinstance(parent.value, dict):
            raise self._fatal(event, "a key is text; this one is an array or an object")
        # Until it is finished, its anchor is undefined: a value must not contain itself.
        if event.anchor is not None:
            self._anchors.pop(event.anchor, None)
        self._open.append(_OpenNode(value, None, event.anchor, self._nodes))
        self._nodes += 1

    def _end(self, event: MappingEndEvent | SequenceEndEvent) -> None:
        node = self._open.pop()
        height = node.height + 1
        if node.anchor is not None:
            count = self._nodes - node.first_node
            self._anchors[node.anchor] = _Anchored(node.value, count, height)
        parent = self._open[-1]
        parent.height = max(parent.height, height)
        self._add(event, node.value)

    def _read_alias(self, event: AliasEvent) -> None:
        name = str(event.anchor)
        if name not in self._anchors:
            text = f"the alias *{name} is undefined, or refers to a value that contains it"
            raise self._fatal(event, text)
        anchored = self._anchors[name]
        self._nodes += anchored.nodes
        self._aliased_nodes += anchored.nodes
        if self._aliased_nodes > MAX_ALIASED_NODES:
            text = f"aliases stand for more than {MAX_ALIASED_NODES} values; write them out"
            raise self._fatal(event, text)
        if len(self._open) - 1 + anchored.height > MAX_PLAN_DEPTH:
            text = f"nested more than {MAX_PLAN_DEPTH} deep through the alias *{name}"
            raise self._fatal(event, text)
        parent = self._open[-1]
        parent.height = max(parent.height, anchored.height)
        self._add(event, anchored.value)

    def _add(self, event: Event, value: JsonValue) -> None:
        """Add a finished value to the enclosing array or object, or make it the next key."""
        parent = self._open[-1]
        if isinstance(parent.value, list):
            if len(parent.value) == MAX_PLAN_TASKS and self._reads_tasks():
                # Checked here, because reading the rest first would take long.
                raise self._fatal(event, f"more than {MAX_PLAN_TASKS} tasks; divide the plan")
            parent.value.append(value)
        elif parent.key is not None:
            parent.value[parent.key] = value
            parent.key = None
        elif not isinstance(value, str):
            written = getattr(event, "value", "") or "null"
            self._report(event, f"the key {written} is not text; put it in quotes")
            parent.key = written
        else:
            if value == "<<" and getattr(event, "implicit", (False,))[0]:
                self._report(event, "merging with << is not supported; write the fields out")
            elif value in parent.value:
                self._report(event, f"duplicate key {value!r}")
            parent.key = value

    def _reads_tasks(self) -> bool:
        """Return whether the current array is the field `tasks` of the document."""
        return len(self._open) == 3 and self._open[1].key == "tasks"

    def _check_tag(self, event: ScalarEvent | MappingStartEvent | SequenceStartEvent) -> None:
        if event.tag not in _PLAIN_TAGS[type(event)]:
            raise self._fatal(event, _TAG_MESSAGE.format(event.tag))

    def _problem_at(self, event: Event, message: str) -> Problem:
        steps: list[str | int] = []
        path = self._open[1:]
        for node in path[:_MAX_PATH_STEPS]:
            if isinstance(node.value, list):
                steps.append(len(node.value))
            elif node.key is not None:
                steps.append(node.key)
        where = format_path(steps)
        if len(path) > _MAX_PATH_STEPS:
            where += "…"
        return Problem(f"{_mark_position(event.start_mark)} {where}".rstrip(), message)

    def _report(self, event: Event, message: str) -> None:
        self._problems.append(self._problem_at(event, message))
        if len(self._problems) > MAX_PROBLEMS:
            raise PlanError(first_problems(self._problems))

    def _fatal(self, event: Event, message: str) -> PlanError:
        """Return an error with this problem alone: later ones would only follow from it."""
        return PlanError([self._problem_at(event, message)])


def _mark_position(mark: Any) -> str:  # yaml.Mark or its twin from libyaml, which share no base
    return f"{mark.line + 1}:{mark.column + 1}"


_JSON_STRING: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')
_JSON_TOKEN: Final = re.compile(rf'{_JSON_STRING.pattern}|[\[\]{{}}\n]|[^\s,:\[\]{{}}"]+')
_ESCAPED_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")


def _read_json(text: str) -> JsonValue:
    if not text.strip():
        return None
    document: JsonValue = None
    repeated = False

    def build(pairs: list[tuple[str, JsonValue]]) -> JsonObject:
        nonlocal repeated
        built = dict(pairs)
        if len(built) < len(pairs):
            repeated = True
        return built

    # The parser gives no positions, so the text is scanned again if something is wrong.
    try:
        document = json.loads(text, object_pairs_hook=build)
        too_deep = exceeds_depth(document, MAX_PLAN_DEPTH)
    except json.JSONDecodeError as error:
        place = f"{error.lineno}:{error.colno}"
        reason = error.msg[:1].lower() + error.msg[1:]
        raise PlanError.at(place, f"this is not JSON: {reason}") from None
    except ValueError:
        raise PlanError.at("", "a number has too many digits") from None
    except RecursionError:
        too_deep = True
    if too_deep:
        raise PlanError([_depth_problem(text)])
    if repeated:
        raise PlanError(first_problems(_duplicate_keys(text)))
    if _ESCAPED_SURROGATE.search(text):
        # The parser has already joined valid pairs of surrogates.
        for _, scalar, line, column in _json_tokens(text):
            if _SURROGATE.search(scalar):
                raise PlanError.at(f"{line}:{column}", _SURROGATE_MESSAGE)
    return document


def _depth_problem(text: str) -> Problem:
    depths = accumulate(_DEPTH_CHANGE.get(kind, 0) for kind, *_ in _json_tokens(text))
    tokens = zip(_json_tokens(text), depths, strict=False)
    line, column = next(token[2:] for token, depth in tokens if depth > MAX_PLAN_DEPTH)
    return Problem(f"{line}:{column}", f"nested more than {MAX_PLAN_DEPTH} deep")


def _duplicate_keys(text: str) -> Iterator[Problem]:
    seen = set()
    for path, (_, _, line, column) in _iter_paths(_json_tokens(text)):
        if path in seen:
            parent = format_path(path[:-1])
            where = f"{line}:{column} {parent}".rstrip()
            yield Problem(where, f"duplicate key {path[-1]!r}")
        seen.add(path)


_Token = tuple[str, str, int, int]
"""Kind ("[", "{", "end" or "scalar"), text, line and column."""

_YAML_TOKENS: Final[Mapping[type[Event], str]] = {
    ScalarEvent: "scalar",
    AliasEvent: "scalar",
    MappingStartEvent: "{",
    SequenceStartEvent: "[",
    MappingEndEvent: "end",
    SequenceEndEvent: "end",
}
_JSON_BRACKETS: Final = {"[": "[", "{": "{", "]": "end", "}": "end"}
_DEPTH_CHANGE: Final = {"[": 1, "{": 1, "end": -1}


def _yaml_tokens(text: str) -> Iterator[_Token]:
    for event in iter(_Loader(text).get_event, None):
        kind = _YAML_TOKENS.get(type(event))
        if kind is not None:
            mark: Any = event.start_mark  # parsed text has marks
            text = getattr(event, "value", "")
            yield kind, text, mark.line + 1, mark.column + 1


def _json_tokens(source: str) -> Iterator[_Token]:
    line = 1
    start = 0
    for match in _JSON_TOKEN.finditer(source):
        text = match[0]
        if text == "\n":
            line += 1
            start = match.end()
            continue
        kind = _JSON_BRACKETS.get(text, "scalar")
        if text[0] == '"':
            # Most strings have no escapes, and stripping the quotes is much faster.
            if "\\" in text:
                text = json.loads(text, strict=False)
            else:
                text = text[1:-1]
        yield kind, text, line, match.start() - start + 1


def _iter_paths(
    tokens: Iterator[_Token],
    within: Collection[JsonPath] | None = None,
    path: JsonPath = (),
    opening: str = "",
) -> Iterator[tuple[JsonPath, _Token]]:
    """Yield every field (at its key) and item (at its start) with its path.

    Args:
        tokens: the tokens of a whole document, or those after the `opening` of the part at `path`.
        within: the parts to descend into; all by default.
        path: the path of the part with these tokens.
        opening: the opening bracket of that part.
    """
    if not opening:
        opening = next((kind for kind, *_ in tokens), "")
    for number, token in enumerate(tokens):
        kind, text, *_ = token
        if kind == "end":
            return
        step: str | int = number
        if opening == "{":
            step = text
        inner = (*path, step)
        yield inner, token
        if opening == "{":
            # The value of the field is the next token.
            kind, *_ = next(tokens)
        if kind == "scalar":
            continue
        if within is None or inner in within:
            yield from _iter_paths(tokens, within, inner, kind)
        else:
            depth = 1
            while depth:
                depth += _DEPTH_CHANGE.get(next(tokens)[0], 0)
