"""Conditions that the outputs of a tool repeat its arguments."""

from __future__ import annotations

import json
import keyword
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Final, Literal, NamedTuple

from replanning.errors import ExpressionError
from replanning.expectations.outputs import Path, Sample, at_base
from replanning.expectations.shapes import (
    MAX_DEPTH,
    MAX_MEMBERS,
    MIN_OUTPUTS,
    MIN_RULES,
    MIN_VARIETY,
    kind_of,
)
from replanning.plan.conditions import OUTPUT_ROOTS, Condition
from replanning.plan.types import JsonValue

_MAX_PATHS: Final = 100
"""Maximum number of places to consider for one argument."""

_MIN_SHARE: Final = 0.5
"""Minimum share of the outputs in which a place must exist."""

_NEAR: Final = 0.9
"""Minimum share of the outputs that satisfy a condition worth reporting although some break it."""

_ELEMENT: Final = 0
"""Step of a path to every item of an array. A condition reads the first one."""

_RESERVED: Final = frozenset((*keyword.kwlist, "matches"))
"""Words that cannot be field names after a dot in conditions."""

_Rank = tuple[bool, bool, int, bool, int, str]
"""Rank of a place for a condition; the lowest is the best."""


class _Place(NamedTuple):
    """Place where an output equals an argument (`==`) or contains it (`in`)."""

    path: Path
    relation: Literal["==", "in"]


class Repetition(NamedTuple):
    """Condition that outputs repeat an argument.

    Attributes:
        condition: the condition; it also holds if the output or the call lacks the value.
        holding: the outputs that repeat the argument.
        breaking: the outputs for which the condition does not hold.
    """

    condition: str
    holding: list[Sample]
    breaking: list[Sample]


def repeated_arguments(samples: Sequence[Sample], base: Path) -> Iterator[Repetition]:
    """Yield conditions for each argument that the outputs repeat, the best places first.

    A place is better if it equals the argument, has a similar name, occurs more often, and is less
    nested. Of the conditions that always hold, only the best is yielded. Conditions that nearly
    always hold are yielded as well, because the outputs that break them may be wrong, unless all
    these outputs break a better condition.

    Args:
        samples: the outputs.
        base: the path of the payload in them.
    """
    names: dict[str, None] = {}
    for sample in samples:
        names.update(dict.fromkeys(sample.arguments))
    for name in names:
        given = [sample for sample in samples if _is_telling(sample.arguments.get(name))]
        always: list[tuple[_Rank, Repetition]] = []
        nearly: list[tuple[_Rank, Repetition]] = []
        for place in _common_places(name, given, base):
            found = _repetition_at(place, name, given, samples, base)
            if found is None:
                continue
            rank = (
                place.relation != "==",
                not _is_called(place, name),
                -len(found.holding),
                _ELEMENT in place.path,
                len(place.path),
                found.condition,
            )
            group = nearly if found.breaking else always
            group.append((rank, found))
        if always:
            yield min(always, key=itemgetter(0))[1]
        named: set[int] = set()
        for _, found in sorted(nearly, key=itemgetter(0)):
            broken_by = set(map(id, found.breaking))
            if not broken_by <= named:
                named |= broken_by
                yield found


def _common_places(name: str, given: Sequence[Sample], base: Path) -> list[_Place]:
    """Return the places where outputs repeat an argument, the most common ones first."""
    counted: Counter[_Place] = Counter()
    for sample in given:
        answer = at_base(sample, base)
        counted.update(set(_places_of(sample.arguments[name], answer, (), MAX_DEPTH)))
    return [place for place, _ in counted.most_common(_MAX_PATHS)]


def _is_telling(value: JsonValue) -> bool:
    """Return whether an output is unlikely to contain a value by chance."""
    match value:
        case None | bool():
            return False
        case int() | float():
            return True
        case _:
            return len(value) > 0


def _places_of(value: JsonValue, part: JsonValue, path: Path, depth: int) -> Iterator[_Place]:
    """Yield the places of a part of an output that repeat an argument."""
    if part == value and kind_of(part) == kind_of(value):
        yield _Place(path, "==")
        return
    if depth == 0:
        return
    if isinstance(part, dict):
        if isinstance(value, str) and value in part:
            yield _Place(path, "in")
        for key in list(part)[:MAX_MEMBERS]:
            yield from _places_of(value, part[key], (*path, key), depth - 1)
    elif isinstance(part, list):
        if value in part:
            yield _Place(path, "in")
        for item in part[:MAX_MEMBERS]:
            yield from _places_of(value, item, (*path, _ELEMENT), depth - 1)
    elif isinstance(part, str) and isinstance(value, str):
        if len(value) >= MIN_VARIETY and value in part:
            yield _Place(path, "in")


def _repetition_at(
    place: _Place, name: str, given: Sequence[Sample], samples: Sequence[Sample], base: Path
) -> Repetition | None:
    """Return the condition for an argument at a place; None without enough support."""
    holding: list[Sample] = []
    present = 0
    for sample in given:
        holds = _holds_at(place, sample.arguments[name], at_base(sample, base), 0)
        if holds is not None:
            present += 1
        if holds:
            holding.append(sample)
    if present < max(len(given) * _MIN_SHARE, _needed_outputs(place, name)):
        return None
    if not _is_varied(place, name, [sample.arguments[name] for sample in holding]):
        return None
    condition = _condition_at(place, name, samples, base)
    if not condition:
        return None
    breaking = [sample for sample in samples if not _holds(condition, sample)]
    if breaking:
        if place.relation != "==" or present < MIN_RULES:
            return None
        if len(samples) - len(breaking) < len(samples) * _NEAR:
            return None
    return Repetition(condition, holding, breaking)


def _needed_outputs(place: _Place, name: str) -> int:
    """Return the minimum number of outputs that must have a place."""
    if _ELEMENT in place.path:
        return MIN_RULES
    return MIN_OUTPUTS if _is_called(place, name) else MIN_RULES


def _is_varied(place: _Place, name: str, values: Sequence[JsonValue]) -> bool:
    """Return whether outputs are unlikely to have repeated these values by chance."""
    different: set[str] = set()
    has_numbers = False
    for value in values:
        different.add(json.dumps(value, sort_keys=True))
        has_numbers |= isinstance(value, int | float)
    if len(different) < MIN_VARIETY:
        return False
    # A number in a field with another name may be equal by chance.
    if has_numbers and not _is_called(place, name):
        return False
    return _keeps_order(values)


def _keeps_order(values: Sequence[JsonValue]) -> bool:
    """Return whether some array is unsorted, which shows that the tool does not sort them."""
    arrays = [list(map(str, value)) for value in values if isinstance(value, list)]
    if not arrays:
        return True
    return any(array != sorted(array) for array in arrays)


def _is_called(place: _Place, name: str) -> bool:
    """Return whether the last field of a place shares a word with the argument's name."""
    for step in reversed(place.path):
        if isinstance(step, str):
            return not _words(step).isdisjoint(_words(name))
    return False


def _words(name: str) -> set[str]:
    """Return the words of a name, plurals also in the singular."""
    words: set[str] = set()
    for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+", name):
        words.add(word.lower())
        words.add(word.lower().removesuffix("s"))
    return words


def _holds_at(place: _Place, value: JsonValue, part: JsonValue, step: int) -> bool | None:
    """Return whether a part of an output repeats an argument at a place; None if absent."""
    if part is None:
        return None
    if step == len(place.path):
        if place.relation == "==":
            return part == value
        if isinstance(part, list):
            return value in part
        if not isinstance(value, str):
            return False
        return isinstance(part, str | dict) and value in part
    key = place.path[step]
    if isinstance(key, str):
        if not isinstance(part, dict) or key not in part:
            return None
        return _holds_at(place, value, part[key], step + 1)
    if not isinstance(part, list):
        return None
    items = [_holds_at(place, value, item, step + 1) for item in part]
    # A condition reads only the first item, so the argument must be in all of them.
    return all(items) if items else None


def _condition_at(place: _Place, name: str, samples: Sequence[Sample], base: Path) -> str:
    """Return a condition that also holds for outputs without the place, or without the argument.

    Empty if a name cannot be written in a condition.
    """
    argument = _lookup("arguments", name)
    guards = _argument_guards(name, samples)
    lookup = "output"
    for step in base:
        lookup = _lookup(lookup, step)
    parts = [at_base(sample, base) for sample in samples]
    for step in place.path:
        inner = _members(parts, step)
        if len(inner) < len(parts):
            is_field = isinstance(step, str)
            guards.append(
                f"{json.dumps(step)} not in {lookup}" if is_field else f"len({lookup}) == 0"
            )
        parts = inner
        lookup = _lookup(lookup, step)
    if None in parts:
        guards.append(f"{lookup} == null")
    if lookup == "output" and all(isinstance(sample.output, str) for sample in samples):
        lookup = "text"
    repeated = f"{lookup} == {argument}"
    if place.relation == "in":
        repeated = f"{argument} in {lookup}"
    condition = " or ".join([*guards, repeated])
    try:
        Condition.parse(condition, OUTPUT_ROOTS)
    except ExpressionError:
        return ""
    return condition


def _argument_guards(name: str, samples: Sequence[Sample]) -> list[str]:
    """Return the conditions that hold for calls without an argument, or with null for it."""
    is_null = False
    for sample in samples:
        if name not in sample.arguments:
            return [f"{json.dumps(name)} not in arguments"]
        is_null |= sample.arguments[name] is None
    return [f"{_lookup('arguments', name)} == null"] if is_null else []


def _members(parts: Sequence[JsonValue], step: str | int) -> list[JsonValue]:
    """Return the members of parts under a key, or their first items; parts without are skipped."""
    members: list[JsonValue] = []
    for part in parts:
        if isinstance(step, int):
            if isinstance(part, list):
                members += part[:1]
        elif isinstance(part, dict) and step in part:
            members.append(part[step])
    return members


def _lookup(container: str, step: str | int) -> str:
    """Return the expression for a member of an object or an item of an array."""
    if isinstance(step, int):
        return f"{container}[{step}]"
    if step not in _RESERVED and step.isascii() and step.isidentifier():
        return f"{container}.{step}"
    return f"{container}[{json.dumps(step, ensure_ascii=False)}]"


def _holds(condition: str, sample: Sample) -> bool:
    try:
        return Condition.parse(condition, OUTPUT_ROOTS).holds(sample.roots())
    except ExpressionError:
        return False
