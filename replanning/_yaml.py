"""YAML, read from parser events into JSON values, and written so that it reads back the same.

Plain scalars follow the JSON-like core of YAML 1.2: `yes`, `no`, `on`, `off`, dates and octal numbers stay
text. Reading is one loop over events, so that neither depth nor aliases can exhaust the machine, and it
is several times faster than building through node objects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NoReturn

import yaml
from pydantic import JsonValue

from replanning._errors import PlanError, Problem
from replanning._wording import format_path, line_and_column

if TYPE_CHECKING:
    from yaml.events import AliasEvent, CollectionStartEvent, Event, ScalarEvent

_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SafeDumper: Final = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

MAX_ALIASED_NODES: Final = 100_000
"""How many values all aliases together may stand for."""

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


def parse_events(text: str) -> Iterator[Event]:
    """The parser events of a text.

    Raises:
        yaml.YAMLError: it is not YAML.
    """
    return yaml.parse(text, Loader=_Loader)


def read_yaml(text: str, max_depth: int) -> JsonValue:
    """The one document of a text; None where there is none.

    Raises:
        PlanError: it is not YAML, or uses what has no place in a plan; places are `line:column`.
    """
    builder = _Builder(max_depth)
    try:
        for event in parse_events(text):
            builder.handle(event)
    except yaml.MarkedYAMLError as error:
        why = ", ".join(filter(None, (error.context, error.problem)))
        builder.problems.append(Problem(_line_and_column(error.problem_mark), f"this is not YAML: {why}"))
    except yaml.reader.ReaderError as error:
        where = line_and_column(text, error.position)
        builder.problems.append(Problem(where, f"the character {chr(error.character)!r} is not allowed"))
    if builder.problems:
        raise PlanError(builder.problems)
    return builder.document


def write_yaml(document: JsonValue) -> str:
    """A document as YAML, in the order in which it stands."""
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False)
    return text


class _Dumper(_SafeDumper):  # type: ignore[misc, valid-type] # the base depends on whether libyaml is there
    def ignore_aliases(self, data: object) -> bool:
        return True


# What this reader takes for a number must be quoted when it is text.
_Dumper.add_implicit_resolver(f"{_TAG_PREFIX}float", re.compile(rf"(?:{_FLOAT.pattern})$"), sorted(_NUMBER_START))


class _Frame:
    """An array or object that is being read."""

    __slots__ = ("anchor", "first_node", "height", "key", "value")

    def __init__(self, value: list[JsonValue] | dict[str, JsonValue], anchor: str | None, first: int) -> None:
        self.value = value
        self.anchor = anchor
        self.first_node = first
        self.key: str | None = None
        self.height = 0


class _Builder:
    """Builds the document from events."""

    def __init__(self, max_depth: int) -> None:
        self.problems: list[Problem] = []
        self._max_depth = max_depth
        self._root: list[JsonValue] = []
        self._stack = [_Frame(self._root, None, 0)]
        self._anchors: dict[str, tuple[JsonValue, int, int]] = {}
        self._nodes = 0
        self._aliased_nodes = 0
        self._documents = 0
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            yaml.ScalarEvent: self._add_scalar,
            yaml.MappingStartEvent: lambda event: self._start_collection(event, {}),
            yaml.SequenceStartEvent: lambda event: self._start_collection(event, []),
            yaml.MappingEndEvent: self._end_collection,
            yaml.SequenceEndEvent: self._end_collection,
            yaml.AliasEvent: self._add_alias,
            yaml.DocumentStartEvent: self._start_document,
        }

    @property
    def document(self) -> JsonValue:
        return self._root[0] if self._root else None

    def handle(self, event: Event) -> None:
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def _start_document(self, event: Event) -> None:
        self._documents += 1
        if self._documents > 1:
            self._fail(event, "a second document begins here; a plan file holds one")

    def _add_scalar(self, event: ScalarEvent) -> None:
        self._nodes += 1
        value: JsonValue = event.value
        if event.implicit[0]:
            value = self._plain_scalar_value(event)
        elif event.tag is not None:
            self._check_tag(event, "str")
        if event.anchor is not None:
            self._anchors[event.anchor] = (value, 1, 0)
        self._add_value(value, event)

    def _plain_scalar_value(self, event: ScalarEvent) -> JsonValue:
        text: str = event.value
        if text in _PLAIN_CONSTANTS:
            return _PLAIN_CONSTANTS[text]
        if text[0] in _NUMBER_START:
            try:
                if _INTEGER.fullmatch(text):
                    return int(text)
                if _FLOAT.fullmatch(text):
                    return float(text)
            except ValueError:
                self._fail(event, "the number has too many digits")
        return text

    def _start_collection(self, event: CollectionStartEvent, value: list[JsonValue] | dict[str, JsonValue]) -> None:
        if event.tag is not None:
            self._check_tag(event, "map" if isinstance(value, dict) else "seq")
        if len(self._stack) > self._max_depth:
            self._fail(event, f"nested more than {self._max_depth} deep")
        frame = self._stack[-1]
        if frame.key is None and isinstance(frame.value, dict):
            self._fail(event, "a key is text; this one is an array or an object")
        if event.anchor is not None:
            self._anchors.pop(event.anchor, None)
        self._stack.append(_Frame(value, event.anchor, self._nodes))
        self._nodes += 1

    def _end_collection(self, event: Event) -> None:
        frame = self._stack.pop()
        if frame.anchor is not None:
            self._anchors[frame.anchor] = (frame.value, self._nodes - frame.first_node, frame.height + 1)
        self._stack[-1].height = max(self._stack[-1].height, frame.height + 1)
        self._add_value(frame.value, event)

    def _add_alias(self, event: AliasEvent) -> None:
        name = str(event.anchor)
        if name not in self._anchors:
            self._fail(event, f"the alias *{name} stands for nothing, or for what it is part of")
        value, nodes, height = self._anchors[name]
        self._nodes += nodes
        self._aliased_nodes += nodes
        if self._aliased_nodes > MAX_ALIASED_NODES:
            self._fail(event, f"aliases stand for more than {MAX_ALIASED_NODES} values; write them out")
        if len(self._stack) - 1 + height > self._max_depth:
            self._fail(event, f"nested more than {self._max_depth} deep through the alias *{name}")
        self._stack[-1].height = max(self._stack[-1].height, height)
        self._add_value(value, event)

    def _add_value(self, value: JsonValue, event: Event) -> None:
        frame = self._stack[-1]
        container = frame.value
        if isinstance(container, list):
            container.append(value)
        elif frame.key is None:
            frame.key = self._checked_key(value, container, event)
        else:
            container[frame.key] = value
            frame.key = None

    def _checked_key(self, value: JsonValue, container: dict[str, JsonValue], event: Event) -> str:
        if not isinstance(value, str):
            written = getattr(event, "value", "") or "null"
            self._add_problem(event, f"the key {written} is not text; put it in quotes")
            return str(written)
        if value == "<<" and getattr(event, "implicit", (False,))[0]:
            self._add_problem(event, "merging with << is not supported; write the fields out")
        elif value in container:
            self._add_problem(event, f"the key {value!r} is there twice")
        return value

    def _check_tag(self, event: ScalarEvent | CollectionStartEvent, kind: str) -> None:
        if event.tag not in ("!", f"{_TAG_PREFIX}{kind}"):
            self._fail(event, f"the tag {event.tag} is not supported; a plan holds plain values")

    def _add_problem(self, event: Event, message: str) -> None:
        path = [frame.key if isinstance(frame.value, dict) else len(frame.value) for frame in self._stack[1:]]
        where = format_path([step for step in path[:_MAX_PATH_STEPS] if step is not None]) + "…" * (
            len(path) > _MAX_PATH_STEPS
        )
        self.problems.append(Problem(f"{_line_and_column(event.start_mark)} {where}".rstrip(), message))

    def _fail(self, event: Event, message: str) -> NoReturn:
        """Give up: what follows would only repeat the problem."""
        self._add_problem(event, message)
        problems, self.problems = self.problems, []
        raise PlanError(problems)


def _line_and_column(mark: Any) -> str:  # yaml.Mark or its twin from libyaml, which have no base in common
    return f"{mark.line + 1}:{mark.column + 1}"
