"""Placeholders `{name}` in patterns, and references such as `${build.output.path}` in arguments."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Final

from pydantic import JsonValue

from replanning.errors import ExpressionError
from replanning.plan.json_form import get_item, json_form
from replanning.plan.json_values import (
    as_text,
    copy_json,
    iter_strings,
    map_strings,
    measure_json,
)
from replanning.plan.messages import join_alternatives, truncate
from replanning.plan.types import MAX_NAME_CHARS, JsonPath, TaskId

_PLACEHOLDER: Final = re.compile(
    r"(?<![${])\{([A-Za-z_][A-Za-z0-9_-]*)\}|\{\{([A-Za-z_][A-Za-z0-9_-]*)\}\}"
)
_PARENTHESIS: Final = re.compile(r"[()]")
_MAX_MATCH_STEPS: Final = 1_000
"""Maximum number of search steps for one match of a pattern, which bounds its time."""


IDEMPOTENCY_KEY: Final = "idempotency_key"
"""Placeholder of the attempt's idempotency key, unless an argument has that name."""


def placeholders(text: str) -> tuple[str, ...]:
    """Return the names of the placeholders in a text, each once, in order."""
    if "{" not in text:
        return ()
    names: dict[str, None] = {}
    for match in _PLACEHOLDER.finditer(text):
        # Doubled braces match as well, but without a name.
        if match[1]:
            names[match[1]] = None
    return tuple(names)


def fill_placeholders(text: str, values: Mapping[str, str]) -> str:
    """Return a text with its placeholders replaced by values.

    Raises:
        KeyError: `values` lacks a name; compare with `placeholders` first.
    """
    if "{" not in text:
        return text

    def filled(match: re.Match[str]) -> str:
        if match[1]:
            return values[match[1]]
        return f"{{{match[2]}}}"

    return _PLACEHOLDER.sub(filled, text)


class FactPattern:
    """Pattern of facts, such as `on({x},{y})`, which extracts placeholder values from a fact.

    A placeholder takes the shortest text that lets the rest of the pattern match.

    Args:
        pattern: the pattern.
        choices: the possible values of each restricted placeholder.
    """

    def __init__(
        self, pattern: str, choices: Mapping[str, Collection[str]] = MappingProxyType({})
    ) -> None:
        self._pattern = pattern
        self._names: list[str] = []
        texts = [""]
        end = 0
        for match in _PLACEHOLDER.finditer(pattern):
            texts[-1] += pattern[end : match.start()]
            end = match.end()
            if match[1]:
                self._names.append(match[1])
                texts.append("")
            else:
                # Doubled braces stand for themselves.
                texts[-1] += f"{{{match[2]}}}"
        texts[-1] += pattern[end:]
        self._start, *self._texts = texts
        self._choices: dict[str, tuple[list[int], frozenset[str]]] = {}
        for name, words in choices.items():
            lengths = sorted({*map(len, words)})
            self._choices[name] = (lengths, frozenset(words))
        counts = Counter(self._names)
        self._last_limited = -1
        for place, name in enumerate(self._names):
            if name in choices or counts[name] > 1:
                self._last_limited = place

    def match(self, fact: str) -> dict[str, str] | None:
        """Return the values of the placeholders in a fact; None if it does not fit.

        Raises:
            ExpressionError: no match is found in 1,000 steps, because the pattern is too ambiguous.
        """
        if not self._names:
            if fact != self._start:
                return None
            return {}
        if not fact.startswith(self._start):
            return None
        # A search with backtracking: the stack has the remaining ends of each placeholder so far,
        # and `values` has the current values.
        values: dict[str, str] = {}
        stack = [self._value_ends(fact, 0, len(self._start), values)]
        for _ in range(_MAX_MATCH_STEPS):
            end = next(stack[-1], None)
            if end is None:
                stack.pop()
                if not stack:
                    return None
            elif len(stack) == len(self._names):
                return values
            else:
                stack.append(self._value_ends(fact, len(stack), end, values))
        raise ExpressionError(f"{truncate(self._pattern, 81)!r} might fit a fact in too many ways")

    def _value_ends(
        self, fact: str, place: int, start: int, values: dict[str, str]
    ) -> Iterator[int]:
        """Set a placeholder to each value that fits; yield the end of the text that follows it.

        The value begins at `start`, and is followed by the text of the pattern up to the next
        placeholder. Cases: a placeholder that already has a value; one with listed values; the last
        one, which takes the rest; and any other, which may end wherever the text after it occurs.
        """
        name = self._names[place]
        text = self._texts[place]
        is_last = place == len(self._names) - 1
        is_new = name not in values
        ends: Iterable[int] = ()
        if not is_new:
            if fact.startswith(values[name], start):
                ends = (start + len(values[name]),)
        elif name in self._choices:
            lengths, words = self._choices[name]
            ends = [start + length for length in lengths if fact[start : start + length] in words]
        elif is_last:
            if start + len(text) < len(fact):
                ends = (len(fact) - len(text),)
        else:
            ends = _occurrences(text, fact, start + 1)
            # After the last restricted placeholder, the first occurrence is always best.
            if place > self._last_limited:
                ends = islice(ends, 1)
        for end in ends:
            after = end + len(text)
            # The match must reach the end of the fact.
            if is_last and after < len(fact):
                continue
            if fact.startswith(text, end):
                values[name] = fact[start:end]
                yield after
        # Backtracking to an earlier placeholder starts without a value here.
        if is_new:
            values.pop(name, None)


def _occurrences(text: str, within: str, start: int) -> Iterator[int]:
    place = within.find(text, start)
    while place >= 0:
        yield place
        place = within.find(text, place + 1)


def normalise_fact(text: str) -> str:
    """Return a fact without whitespace around it and around its commas."""
    return ",".join(map(str.strip, text.split(",")))


def fact_problem(text: str) -> str:
    """Return why a text is not a fact; empty if it is one."""
    if not text.strip():
        return "it is blank"
    opened = 0
    for parenthesis in _PARENTHESIS.findall(text):
        if parenthesis == "(":
            opened += 1
        else:
            opened -= 1
        # A later one cannot close it: `)(` is as wrong as `)`.
        if opened < 0:
            break
    if opened:
        return "its parentheses do not match"
    return ""


MAX_FILLED_CHARS: Final = 10_000_000
"""Maximum number of characters that references may add to the arguments of a task."""

_REFERENCE: Final = re.compile(r"\$\$\{|\$\{([^{}]*)\}|\$\{")
_PATH_STEP: Final = re.compile(r"""\.([^.\[\]]+)|\[(-?\d{1,9})\]|\["([^"]+)"\]|\['([^']+)'\]""")
_OUTPUT: Final = re.compile(r"\.output(?=$|[.\[])")
_OTHER_ROOT: Final = re.compile(r"parameters(?=[.\[])|(?:item|index|key)(?=$|[.\[])")
_NO_FORM_ADVICE: Final = "read it in the work, from context.results, or return a value that has one"


ELEMENT_ROOTS: Final = ("item", "index", "key")
"""Additional roots in the task of an element: the element, its index from 0, and its key."""

KEY_ROOTS: Final = ("item", "index")
"""Roots for the `key` of a task with `for_each`."""

CONFIRMATION_ROOTS: Final = (
    "arguments",
    "results",
    "context",
    "parameters",
    IDEMPOTENCY_KEY,
    *ELEMENT_ROOTS,
)
"""Roots for the arguments of a confirmation."""

CONFIRMED_ROOTS: Final = ("output", "text", *CONFIRMATION_ROOTS)
"""Roots for the output of a confirmed call."""

UNDO_ROOTS: Final = (
    "output",
    "arguments",
    "context",
    "parameters",
    "results",
    *ELEMENT_ROOTS,
)
"""Roots for the arguments of a tool's `undo`."""

_SINGLE_VALUES: Final = ("output", "text", IDEMPOTENCY_KEY, *ELEMENT_ROOTS)
"""Roots that are values themselves; the others need a name."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Reference `${...}` to a part of an output, the context, a parameter or an element."""

    text: str
    """The text between the braces."""
    task: TaskId | None
    """The task with the output; None for another root."""
    path: JsonPath
    """The steps into the output or the other root."""
    root: str = ""
    """Its root if that is not a task: `context`, `parameters`, or one of `ELEMENT_ROOTS`."""

    def __str__(self) -> str:
        return f"${{{self.text}}}"


def has_references(value: object) -> bool:
    """Return whether arguments may have references; a quick test, as most have none."""
    parts = [value]
    for part in parts:  # grows while it is iterated
        if isinstance(part, str):
            if "${" in part:
                return True
        elif isinstance(part, dict):
            parts += part.values()
        elif isinstance(part, (list, tuple)):
            parts += part
    return False


def find_references(value: JsonValue, task_ids: Container[str] = ()) -> tuple[Reference, ...]:
    """Return every reference in arguments, in order.

    Args:
        value: the arguments of a task, or a part of them.
        task_ids: the ids of all tasks, because `${a.output.output.b}` may belong to a task `a` or
            `a.output`. The longest known id wins, or the shortest possible one if none is known.

    Raises:
        ExpressionError: a `${` is neither a reference nor escaped as `$${`.
    """
    if not has_references(value):
        return ()
    references = []
    for text in iter_strings(value, keys=False):
        if "${" not in text:
            continue
        for match in _REFERENCE.finditer(text):
            readings = _candidate_references(match, text)
            if readings:
                references.append(_choose_reference(readings, task_ids))
    return tuple(references)


def is_one_reference(text: str) -> bool:
    """Return whether a text consists of exactly one reference."""
    if _REFERENCE.fullmatch(text) is None:
        return False
    try:
        return len(find_references(text)) == 1
    except ExpressionError:
        return False


def rename_references(
    arguments: Mapping[str, JsonValue],
    rename: Callable[[TaskId], str],
    task_ids: Container[str] = (),
) -> dict[str, JsonValue]:
    """Return a copy of arguments with task ids in references replaced.

    References to the context and to parameters stay.

    Args:
        arguments: the arguments of a task; they are not changed.
        rename: returns the new id of a referenced task.
        task_ids: the ids of the tasks, as for `find_references`.

    Raises:
        ExpressionError: a `${` is neither a reference nor escaped as `$${`.
    """

    def renamed(match: re.Match[str]) -> str:
        readings = _candidate_references(match, match.string)
        if not readings:
            return match[0]
        reference = _choose_reference(readings, task_ids)
        if reference.task is None:
            return match[0]
        path = reference.text[len(reference.task) :]
        return f"${{{rename(reference.task)}{path}}}"

    return _map_arguments(arguments, lambda text: _REFERENCE.sub(renamed, text))


def rename_results(text: str, ids: Mapping[TaskId, TaskId]) -> str:
    """Return a text of a confirmation with task ids in `${results.task}` replaced.

    Raises:
        ExpressionError: it has a reference that a confirmation cannot have.
    """

    def renamed(match: re.Match[str]) -> str:
        if match[0] == "$${":
            return match[0]
        root, *path = _root_reference(match, CONFIRMED_ROOTS).path
        if root != "results" or path[0] not in ids:
            return match[0]
        first, *rest = path
        steps = ""
        for step in (ids[TaskId(str(first))], *rest):
            steps += f"[{json.dumps(step)}]"
        return f"${{results{steps}}}"

    return _REFERENCE.sub(renamed, text)


def bind_undo(
    arguments: Mapping[str, JsonValue], task_id: TaskId, called_with: Mapping[str, JsonValue]
) -> dict[str, JsonValue]:
    """Return the arguments of a tool's `undo`, bound to one call of the tool.

    `${output.name}` becomes a reference to the output of that call, `${results.task}` a reference
    to the output of another task, and `${arguments.name}` the argument with its own references.

    Args:
        arguments: as the tool states them; they are not changed.
        task_id: the task that called the tool.
        called_with: the arguments of that task.

    Raises:
        ExpressionError: a reference has another root, or names an argument that the call lacks.
    """

    def value_of(match: re.Match[str]) -> JsonValue:
        if match[0] == "$${":
            return match[0]
        root, *path = _root_reference(match, UNDO_ROOTS).path
        if root == "output":
            return f"${{{task_id}.{match[1]}}}"
        if root == "results":
            steps = "".join(f"[{json.dumps(step)}]" for step in path[1:])
            return f"${{{path[0]}.output{steps}}}"
        if root != "arguments":
            return match[0]
        value: object = called_with
        for step in path:
            try:
                value = get_item(value, step)
            except LookupError as error:
                raise ExpressionError(f"{match[0]}: {step!r} {error.args[0]}") from None
        return json_form(value)

    def bound(text: str) -> JsonValue:
        whole = _REFERENCE.fullmatch(text)
        if whole is not None:
            return value_of(whole)
        return _REFERENCE.sub(lambda match: as_text(value_of(match)), text)

    return _map_arguments(arguments, bound)


def _map_arguments(
    arguments: Mapping[str, JsonValue], function: Callable[[str], JsonValue]
) -> dict[str, JsonValue]:
    return {key: map_strings(value, function) for key, value in arguments.items()}


def _choose_reference(readings: Sequence[Reference], task_ids: Container[str]) -> Reference:
    for reading in readings:
        if reading.task in task_ids:
            return reading
    return readings[-1]


def escape_reference(text: str) -> str:
    """Return a text with every `${` escaped."""
    return text.replace("${", "$${")


def resolve_references(
    arguments: Mapping[str, JsonValue],
    *,
    context: Mapping[str, JsonValue],
    result_of: Callable[[TaskId], object],
    scope: Mapping[str, JsonValue] | None = None,
    parameters: Mapping[str, JsonValue] = MappingProxyType({}),
) -> dict[str, JsonValue]:
    """Return the arguments with every reference replaced by a copy of its value.

    A string that is one reference becomes the value itself. Inside a longer string, a value becomes
    text: JSON, unless it is a string.

    Args:
        arguments: as the task states them; they are not changed.
        context: the context of the plan.
        result_of: returns the output of a task, or raises LookupError.
        scope: the values of `ELEMENT_ROOTS`, for the task of an element.
        parameters: the values of the parameters of the plan.

    Raises:
        ExpressionError: a reference has no value, or one without a JSON form, or the arguments
            would become larger than `MAX_FILLED_CHARS`.
    """
    if not has_references(arguments):
        return {key: copy_json(value) for key, value in arguments.items()}
    roots: dict[str, object] = {"context": context, "parameters": parameters}
    roots.update(scope or {})
    # A few references to one large value could fill the memory, so their total is limited.
    size = 0

    def value_of(match: re.Match[str]) -> JsonValue:
        nonlocal size
        readings = _candidate_references(match, match.string)
        if not readings:
            return "${"
        reference, root = _referenced_root(readings, roots, result_of)
        value = _value_at(root, reference)
        try:
            form = json_form(value)
        except ValueError as error:
            raise ExpressionError(f"{reference}: {error}; {_NO_FORM_ADVICE}") from None
        size += measure_json(form, MAX_FILLED_CHARS - size)
        if size > MAX_FILLED_CHARS:
            raise ExpressionError(
                f"{reference}: the arguments would have more than {MAX_FILLED_CHARS} characters; "
                "refer to a smaller part, or pass the name of a file"
            )
        return form

    def text_of(match: re.Match[str]) -> str:
        return as_text(value_of(match))

    def resolved(text: str) -> JsonValue:
        if "${" not in text:
            return text
        whole = _REFERENCE.fullmatch(text)
        if whole is not None:
            return value_of(whole)
        return _REFERENCE.sub(text_of, text)

    return _map_arguments(arguments, resolved)


def resolve_root_references(value: JsonValue, roots: Mapping[str, object]) -> JsonValue:
    """Return a value with every reference replaced by its value in one of the roots.

    Args:
        value: as a confirmation states it; it is not changed.
        roots: the values of the roots, by name.

    Raises:
        ExpressionError: a reference has no value, or one without a JSON form.
    """

    def value_of(match: re.Match[str]) -> JsonValue:
        if match[0] == "$${":
            return "${"
        reference = _root_reference(match, tuple(roots))
        found = _value_at(roots, reference)
        try:
            return json_form(found)
        except ValueError as error:
            raise ExpressionError(f"{reference}: {error}; {_NO_FORM_ADVICE}") from None

    def resolved(text: str) -> JsonValue:
        whole = _REFERENCE.fullmatch(text)
        if whole is not None:
            return value_of(whole)
        return _REFERENCE.sub(lambda match: as_text(value_of(match)), text)

    return map_strings(value, resolved)


def root_references(value: JsonValue, roots: tuple[str, ...]) -> list[Reference]:
    """Return every reference in a value, in order; its path begins with the name of its root.

    Args:
        value: as a confirmation or the `undo` of a tool states it.
        roots: the permitted roots.

    Raises:
        ExpressionError: a reference begins with none of the roots.
    """
    references = []
    for text in iter_strings(value, keys=False):
        for match in _REFERENCE.finditer(text):
            if match[0] != "$${":
                references.append(_root_reference(match, roots))
    return references


def root_reference_problem(value: JsonValue, roots: tuple[str, ...]) -> str:
    """Return why a reference in a value has none of the roots; empty if all have one."""
    try:
        root_references(value, roots)
    except ExpressionError as error:
        return str(error)
    return ""


def sole_argument(value: JsonValue) -> str:
    """Return the argument name of a value such as `${arguments.name}`; empty for another value.

    A confirmation omits such an argument if the confirmed call omitted it.
    """
    prefix = "${arguments."
    if isinstance(value, str) and value.startswith(prefix):
        name = value[len(prefix) : -1]
        if name.isidentifier():
            return name
    return ""


def _root_reference(match: re.Match[str], roots: tuple[str, ...]) -> Reference:
    """Return the reference of a match; its path begins with the name of its root.

    Raises:
        ExpressionError: it has none of the roots.
    """
    inner = match[1] or ""
    path = _parse_path(f".{inner}", 0, {})
    if path:
        is_whole = len(path) == 1 and path[0] not in _SINGLE_VALUES
        if path[0] in roots and not is_whole:
            return Reference(inner, None, path)
    # Only the tasks of `for_each` have an element.
    common = [root for root in roots if root not in ELEMENT_ROOTS]
    forms = []
    for root in common or roots:
        part = "" if root in _SINGLE_VALUES else ".NAME"
        forms.append(f"${{{root}{part}}}")
    raise ExpressionError(f"{match[0]!r} is not a reference here: write {join_alternatives(forms)}")


def _referenced_root(
    readings: Sequence[Reference],
    roots: Mapping[str, object],
    result_of: Callable[[TaskId], object],
) -> tuple[Reference, object]:
    """Return the first reading with an existing root or output, and that value."""
    missing = ""
    for reference in readings:
        if reference.task is None:
            if reference.root in roots:
                return reference, roots[reference.root]
            missing = missing or f"only the task of an element knows its {reference.root}"
            continue
        try:
            return reference, result_of(reference.task)
        except LookupError as error:
            missing = str(error)
    raise ExpressionError(f"{readings[-1]}: {missing}")


def _value_at(root: object, reference: Reference) -> object:
    value = root
    for step in reference.path:
        try:
            value = get_item(value, step)
        except LookupError as error:
            raise ExpressionError(f"{reference}: {step!r} {error.args[0]}") from None
    return value


def _candidate_references(match: re.Match[str], text: str) -> list[Reference]:
    """Return the possible readings of a `${...}`, longest task id first; none for `$${`.

    A task id may contain dots, and `.output`, so one text may have several readings.
    """
    inner = match[1]
    if match[0] == "$${":
        return []
    if inner is None:
        raise ExpressionError(
            f"{text!r}: a ${{ is not closed; write $${{ for the characters themselves"
        )
    parsed: dict[int, JsonPath | None] = {}
    if inner.startswith("context."):
        path = _parse_path(inner, len("context"), parsed)
        if path:
            return [Reference(inner, None, path, "context")]
    readings = []
    # No id can end beyond this point, however long the text is.
    limit = MAX_NAME_CHARS + len(".output[")
    for output in reversed(list(_OUTPUT.finditer(inner, 0, limit))):
        path = _parse_path(inner, output.end(), parsed)
        if path is not None and output.start():
            task_id = TaskId(inner[: output.start()])
            readings.append(Reference(inner, task_id, path))
    word = _OTHER_ROOT.match(inner)
    if word is not None:
        path = _parse_path(inner, word.end(), parsed)
        if path is not None:
            # Last, because a task may have this name.
            readings.append(Reference(inner, None, path, word[0]))
    if not readings:
        forms = "${TASK.output}, ${TASK.output.name[0]}, ${context.name} or ${parameters.name}"
        raise ExpressionError(
            f"{match[0]!r} is not a reference: write {forms}, or ${match[0]} for the text itself"
        )
    return readings


def _parse_path(text: str, start: int, parsed: dict[int, JsonPath | None]) -> JsonPath | None:
    """Return the steps of a text such as `.files[0].name` from `start`; None if it is not a path.

    The result is added to `parsed`, a cache by start: a text that repeats `.output` would otherwise
    be parsed to its end once for each.
    """
    steps: list[str | int] = []
    end = start
    while end not in parsed:
        match = _PATH_STEP.match(text, end)
        if match is None:
            break
        if match[2]:
            steps.append(int(match[2]))
        else:
            # The last group that matched holds the name.
            steps.append(match[match.lastindex or 0])
        end = match.end()
    rest = None
    if end in parsed:
        rest = parsed[end]
    elif end == len(text):
        rest = ()
    path = None
    if rest is not None:
        path = (*steps, *rest)
    parsed[start] = path
    return path
