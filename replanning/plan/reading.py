"""Reading of YAML and JSON under limits, with the line and column of every problem.

The text is untrusted: its size, depth, aliases and kinds of values are bounded before anything is built.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from os import PathLike
from typing import Any, Final, Literal

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
from replanning.plan.messages import MAX_PROBLEMS, first_problems, format_path, parse_path
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


def read_text_file(
    path: str | PathLike[str], *, noun: str = "plan", max_size: int = MAX_PLAN_SIZE
) -> str:
    """Return the text of a file.

    Args:
        path: the file.
        noun: the name of its content in messages.
        max_size: the largest size in bytes.

    Raises:
        PlanError: it cannot be read, is too large, or is not UTF-8.
    """
    try:
        if kind := _unreadable_kind(pathlib.Path(path)):
            raise ValueError(f"it is {kind}; give a file")
        with pathlib.Path(path).open("rb") as file:
            content = file.read(max_size + 1)
    except (OSError, TypeError, ValueError) as error:  # the last two say that this is no path
        reason = getattr(error, "strerror", None) or error
        raise PlanError([Problem(str(path), f"the {noun} cannot be read: {reason}")]) from error
    if len(content) > max_size:
        raise PlanError([Problem(str(path), f"the {noun} is larger than {max_size} bytes")])
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise PlanError(
            [Problem(f"{path}:{line}", f"byte {error.start + 1} of the file is not UTF-8")]
        ) from error


def _unreadable_kind(path: pathlib.Path) -> str:
    """Return what a path is if reading it may never end, such as "a named pipe"; "" for anything else."""
    if path.is_fifo() and not str(path.absolute()).startswith(
        ("/dev/", "/proc/")
    ):  # as <(…) and /dev/stdin are
        return "a named pipe"
    if (path.is_char_device() or path.is_block_device()) and str(path) != "/dev/null":
        return "a device"
    return "a socket" if path.is_socket() else ""


def format_of(path: str | PathLike[str]) -> Format:
    """Return the format of a file by its name: JSON if it ends in `.json`, otherwise YAML."""
    return "json" if str(path).lower().endswith(".json") else "yaml"


def read_document(
    text: str,
    *,
    format: Format,  # noqa: A002
    source: str = "<text>",
    max_size: int = MAX_PLAN_SIZE,
) -> JsonValue:  # the plain word
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
        raise PlanError(
            [Problem(f"{source}:{_line_and_column(text, half.start())}", _SURROGATE_MESSAGE)]
        )
    try:
        return _read_yaml(text) if format == "yaml" else _read_json(text)
    except PlanError as error:
        problems = [
            Problem(f"{source}:{problem.place}".rstrip(":"), problem.message)
            for problem in error.problems
        ]
        raise PlanError(problems) from None


def locate_problems(problems: Sequence[Problem], path: str | PathLike[str]) -> list[Problem]:
    """Return problems of a loaded plan with their lines and columns; unchanged if the file cannot be read any more."""
    try:
        text = read_text_file(path)
        read_document(text, format=format_of(path))
    except PlanError:
        return list(problems)
    return with_positions(problems, text, format_of(path), str(path))


def with_positions(
    problems: Sequence[Problem],
    text: str,
    format: Format,  # noqa: A002
    source: str,
) -> list[Problem]:  # likewise
    """Return problems of a valid text with line and column before the path; a missing field has those of its parent."""
    paths = [parse_path(problem.place) for problem in problems]
    positions = find_positions(
        text, format, {path[:length] for path in paths for length in range(1, len(path) + 1)}
    )
    located = []
    for problem, path in zip(problems, paths, strict=True):
        nearest = next(
            (path[:length] for length in range(len(path), 0, -1) if path[:length] in positions),
            None,
        )
        where = source if nearest is None else "{}:{}:{}".format(source, *positions[nearest])
        located.append(Problem(f"{where} {problem.place}".rstrip(), problem.message))
    return located


def find_positions(
    text: str,
    format: Format,  # noqa: A002
    paths: Collection[JsonPath],
) -> dict[JsonPath, tuple[int, int]]:  # likewise
    """Return line and column of the given paths in a valid text: of the key of a field, of the start of an item.

    A path is found only if its parents are given, too.
    """
    positions: dict[JsonPath, tuple[int, int]] = {}
    for path, token in _iter_paths(
        _yaml_tokens(text) if format == "yaml" else _json_tokens(text), paths
    ):
        if path in paths:
            positions.setdefault(path, token[2:])
            if len(positions) == len(paths):
                break
    return positions


def write_yaml(document: JsonValue) -> str:
    """Return a document as YAML with its fields in their order."""
    text: str = yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False
    )
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
_FLOAT: Final = re.compile(
    r"[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)"
)
_NUMBER_START: Final = frozenset("0123456789-+.")
_MAX_PATH_STEPS: Final = 10
_TAG_MESSAGE: Final = "the tag {} is not supported; a plan holds plain values"
_TAG_PREFIX: Final = "tag:yaml.org,2002:"
_PLAIN_TAGS: Final = {
    kind: ("!", f"{_TAG_PREFIX}{name}")
    for kind, name in (
        (ScalarEvent, "str"),
        (SequenceStartEvent, "seq"),
        (MappingStartEvent, "map"),
    )
}


class _Dumper(_SafeDumper):  # type: ignore[misc, valid-type] # the base depends on whether libyaml is there
    def ignore_aliases(self, data: object) -> bool:
        return True


# Text that this reader would take for a number must be quoted.
_Dumper.add_implicit_resolver(
    f"{_TAG_PREFIX}float", re.compile(rf"(?:{_FLOAT.pattern})$"), sorted(_NUMBER_START)
)


def _plain_value(word: str) -> JsonValue:
    """Return the value of a scalar without quotes.

    Raises:
        ValueError: it is a number of too many digits.
    """
    if word in _PLAIN_CONSTANTS:
        return _PLAIN_CONSTANTS[word]
    if word[0] not in _NUMBER_START:
        return word
    return (
        int(word) if _INTEGER.fullmatch(word) else float(word) if _FLOAT.fullmatch(word) else word
    )


def _read_yaml(text: str) -> JsonValue:
    """Build the document from the events of the YAML parser."""
    root: list[JsonValue] = []
    # The array or object that is being read, the key of its next value, its anchor, the number of nodes before it, and
    # its height; and the same of those around it: an object for each would double the time.
    container: list[JsonValue] | dict[str, JsonValue] = root
    key: str | None = None
    anchor: str | None = None
    first_node = height = 0
    around: list[
        tuple[list[JsonValue] | dict[str, JsonValue], str | None, str | None, int, int]
    ] = []
    plain_value = cache(_plain_value)
    anchors: dict[
        str, tuple[JsonValue, int, int]
    ] = {}  # the value with its number of nodes and its height
    nodes = aliased_nodes = 0
    problems: list[Problem] = []

    def problem_at(event: Event, message: str) -> Problem:
        parts = [*((value, step) for value, step, *_ in around), (container, key)]
        path = [step if isinstance(value, dict) else len(value) for value, step in parts[1:]]
        where = format_path([step for step in path[:_MAX_PATH_STEPS] if step is not None])
        where += "…" if len(path) > _MAX_PATH_STEPS else ""
        return Problem(f"{_mark_position(event.start_mark)} {where}".rstrip(), message)

    def report(event: Event, message: str) -> None:
        problems.append(problem_at(event, message))
        if len(problems) > MAX_PROBLEMS:
            raise PlanError(first_problems(problems))

    def fatal(event: Event, message: str) -> PlanError:
        """Return the error of this problem alone: later ones would only repeat it."""
        return PlanError([problem_at(event, message)])

    try:
        for event in iter(_Loader(text).get_event, None):
            kind = type(event)
            value: JsonValue
            if kind is ScalarEvent:
                value = event.value
                if event.tag is not None and event.tag not in _PLAIN_TAGS[kind]:
                    raise fatal(event, _TAG_MESSAGE.format(event.tag))
                if event.implicit[0]:
                    try:
                        value = plain_value(event.value)
                    except ValueError:
                        raise fatal(event, "the number has too many digits") from None
                nodes += 1
                if event.anchor is not None:
                    anchors[event.anchor] = (value, 1, 0)
            elif kind is MappingStartEvent or kind is SequenceStartEvent:
                if event.tag is not None and event.tag not in _PLAIN_TAGS[kind]:
                    raise fatal(event, _TAG_MESSAGE.format(event.tag))
                if len(around) >= MAX_PLAN_DEPTH:
                    raise fatal(event, f"nested more than {MAX_PLAN_DEPTH} deep")
                if key is None and type(container) is dict:
                    raise fatal(event, "a key is text; this one is an array or an object")
                if event.anchor is not None:
                    anchors.pop(event.anchor, None)
                around.append((container, key, anchor, first_node, height))
                container = {} if kind is MappingStartEvent else []
                key, anchor, first_node, height = None, event.anchor, nodes, 0
                nodes += 1
                continue
            elif kind is MappingEndEvent or kind is SequenceEndEvent:
                value, value_height = container, height + 1
                if anchor is not None:
                    anchors[anchor] = (value, nodes - first_node, value_height)
                container, key, anchor, first_node, height = around.pop()
                if value_height > height:  # noqa: PLR1730 - max() takes several times as long, for every value
                    height = value_height
            elif kind is AliasEvent:
                name = str(event.anchor)
                if name not in anchors:
                    raise fatal(
                        event, f"the alias *{name} stands for nothing, or for what it is part of"
                    )
                value, count, value_height = anchors[name]
                nodes += count
                aliased_nodes += count
                if aliased_nodes > MAX_ALIASED_NODES:
                    raise fatal(
                        event,
                        f"aliases stand for more than {MAX_ALIASED_NODES} values; write them out",
                    )
                if len(around) + value_height > MAX_PLAN_DEPTH:
                    raise fatal(
                        event, f"nested more than {MAX_PLAN_DEPTH} deep through the alias *{name}"
                    )
                height = max(height, value_height)
            elif isinstance(event, yaml.DocumentStartEvent) and root:
                raise fatal(event, "a second document begins here; a plan file holds one")
            else:
                continue
            if type(container) is list:
                container.append(value)
            elif key is not None:
                container[key] = value  # type: ignore[call-overload] # an object, as it has a key
                key = None
            elif not isinstance(value, str):
                written = getattr(event, "value", "") or "null"
                report(event, f"the key {written} is not text; put it in quotes")
                key = written
            else:
                if value == "<<" and getattr(event, "implicit", (False,))[0]:
                    report(event, "merging with << is not supported; write the fields out")
                elif value in container:
                    report(event, f"the key {value!r} is there twice")
                key = value
    except yaml.MarkedYAMLError as error:
        why = ", ".join(filter(None, (error.context, error.problem)))
        # The parser reads ahead, and newer versions of libyaml have a limit of their own, of 1,000 levels.
        deep = "maximum nesting depth" in why
        message = f"nested more than {MAX_PLAN_DEPTH} deep" if deep else f"this is not YAML: {why}"
        problems.append(Problem(_mark_position(error.problem_mark), message))
    except yaml.reader.ReaderError as error:
        where = _line_and_column(text, error.position)
        problems.append(Problem(where, f"the character {chr(error.character)!r} is not allowed"))
    if problems:
        raise PlanError(problems)
    return next(iter(root), None)


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
        repeated = repeated or len(built) < len(pairs)
        return built

    try:
        document = json.loads(text, object_pairs_hook=build)
        too_deep = exceeds_depth(document, MAX_PLAN_DEPTH)
    except json.JSONDecodeError as error:
        why = f"this is not JSON: {error.msg[:1].lower()}{error.msg[1:]}"
        raise PlanError([Problem(f"{error.lineno}:{error.colno}", why)]) from None
    except ValueError:
        raise PlanError([Problem("", "a number has too many digits")]) from None
    except RecursionError:
        too_deep = True
    if too_deep:
        depths = accumulate(_DEPTH_CHANGE.get(kind, 0) for kind, *_ in _json_tokens(text))
        tokens = zip(_json_tokens(text), depths, strict=False)
        line, column = next(token[2:] for token, depth in tokens if depth > MAX_PLAN_DEPTH)
        raise PlanError([Problem(f"{line}:{column}", f"nested more than {MAX_PLAN_DEPTH} deep")])
    if repeated:
        seen: set[JsonPath] = set()
        found = []
        for path, (_, _, line, column) in _iter_paths(_json_tokens(text)):
            if path in seen:
                where = f"{line}:{column} {format_path(path[:-1])}".rstrip()
                found.append(Problem(where, f"the key {path[-1]!r} is there twice"))
                if len(found) > MAX_PROBLEMS:
                    break
            seen.add(path)
        raise PlanError(first_problems(found))
    for _, scalar, line, column in _json_tokens(text) if _ESCAPED_SURROGATE.search(text) else ():
        if _SURROGATE.search(scalar):
            raise PlanError([Problem(f"{line}:{column}", _SURROGATE_MESSAGE)])
    return document


_Token = tuple[str, str, int, int]
"""Kind ("[", "{", "end" or "scalar"), text, line and column; making named ones would take twice the time of reading."""

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
        if kind := _YAML_TOKENS.get(type(event)):
            mark: Any = event.start_mark  # parsed text has marks
            yield kind, getattr(event, "value", ""), mark.line + 1, mark.column + 1


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
        yield _JSON_BRACKETS.get(raw, "scalar"), text, line, match.start() - start + 1


def _iter_paths(
    tokens: Iterator[_Token],
    within: Collection[JsonPath] | None = None,
    path: JsonPath = (),
    opening: str = "",
) -> Iterator[tuple[JsonPath, _Token]]:
    """Yield every field (at its key) and item (at its start) with its path, inside the parts `within` if given.

    The tokens are those of a whole document, or those after the `opening` of the part at `path`.
    """
    opening = opening or next((kind for kind, *_ in tokens), "")
    for number, token in enumerate(tokens):
        kind, text, *_ = token
        if kind == "end":
            return
        inner = (*path, text if opening == "{" else number)
        yield inner, token
        if opening == "{":
            kind, *_ = next(tokens)
        if kind != "scalar" and (within is None or inner in within):
            yield from _iter_paths(tokens, within, inner, kind)
        elif kind != "scalar":
            depth = 1
            while depth:
                depth += _DEPTH_CHANGE.get(next(tokens)[0], 0)
