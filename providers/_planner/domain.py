"""Grounding: the actions that can become possible, found by matching tools with reachable facts.

Facts count as reached as if none were ever removed (the delete relaxation of Bonet and Geffner
2001). Facts that are not reached even then are certainly unreachable, and actions that can never
become possible are not created. The results depend on the order of the tools and facts in the
plan, never on their names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, NamedTuple

from replanning import ToolSpec
from replanning.errors import ExpressionError
from replanning.plan import JsonObject
from replanning.plan.references import FactPattern, placeholders
from replanning.plan.types import JsonValue

MAX_ACTIONS: Final = 20_000
"""Maximum number of actions that are considered."""

_JOINS_PER_ACTION: Final = 50
"""Maximum number of combinations of matching facts, per action of the maximum."""

_PYTHON_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}

_KEY_ENCODER: Final = json.JSONEncoder(sort_keys=True)

Binding = dict[str, str]


class ToolAction(NamedTuple):
    """Use of a tool with arguments; its facts are in the order of the tool."""

    tool: str
    arguments: JsonObject
    needs: Sequence[str]
    adds: Sequence[str]
    removes: tuple[str, ...]
    cost: float

    @property
    def key(self) -> str:
        """Key that equal actions share."""
        return action_key(self.tool, self.arguments)


class Grounding(NamedTuple):
    """Result of grounding.

    Attributes:
        actions: the actions that can become possible.
        complete: whether there are no others.
        truncated: whether the limit was reached.
    """

    actions: tuple[ToolAction, ...]
    complete: bool
    truncated: bool


def action_key(tool: str | None, arguments: Mapping[str, JsonValue]) -> str:
    """Return the key that equal uses of a tool share."""
    return _KEY_ENCODER.encode([tool, arguments])


@dataclass(frozen=True)
class Domain:
    """Tools and values that actions are made of.

    Attributes:
        tools: the tools that can be used.
        objects: the type of each object of the facts, by name.
        parameter_values: by tool and parameter, values of tasks for parameters that no fact and no
            type determines.
        assumed_patterns: patterns of facts that are assumed to hold.
        failed_actions: keys of actions that have failed. They can be used again only after one of
            their preconditions was removed and made true again.
    """

    tools: Sequence[ToolSpec]
    objects: Mapping[str, str]
    parameter_values: Mapping[tuple[str, str], tuple[JsonValue, ...]]
    assumed_patterns: frozenset[str] = frozenset()
    failed_actions: frozenset[str] = frozenset()


def reachable_actions(facts: Sequence[str], domain: Domain, most: int = MAX_ACTIONS) -> Grounding:
    """Return the actions that are reachable from facts, about `most` at most.

    It takes one fact after another, and creates every action that the fact completes.
    """
    schemas = [_ActionSchema(tool, domain) for tool in domain.tools]
    relaxation = _Relaxation(facts, domain, most)
    truncated = False
    for schema in schemas:
        if not schema.matchers:
            relaxation.add_actions(schema, {})
    for fact in relaxation.queue:  # it grows
        for schema in schemas:
            for matched in schema.matchers:
                binding = matched.match(fact)
                if binding is not None:
                    for one in relaxation.complete_bindings(schema, matched, binding):
                        relaxation.add_actions(schema, one)
        if len(relaxation.actions) > most or relaxation.joins_left < 0:
            truncated = True
            break
    complete = relaxation.complete and not truncated
    for schema in schemas:
        for matcher in schema.matchers:
            complete = complete and matcher.complete
    return Grounding(tuple(relaxation.usable_actions()), complete, truncated)


class _Relaxation:
    """Facts and actions that are reached if no fact is ever removed.

    Attributes:
        reached: the facts.
        queue: the facts in the order of processing.
        actions: the actions by key.
        complete: whether every action could be created so far.
        joins_left: number of combinations of facts that may still be examined.
    """

    def __init__(self, facts: Sequence[str], domain: Domain, most: int) -> None:
        self._domain = domain
        self.reached: dict[str, None] = dict.fromkeys(facts)
        self.queue = list(self.reached)
        self.actions: dict[str, ToolAction] = {}
        self.complete = True
        self.joins_left = most * _JOINS_PER_ACTION

    def complete_bindings(
        self, schema: _ActionSchema, matched: _PatternMatcher, binding: Binding
    ) -> list[Binding]:
        """Complete the binding of one matcher in every way that the facts so far allow."""
        bindings = [binding]
        rest = list(schema.matchers)
        rest.remove(matched)
        while rest and bindings:
            bound = bindings[0].keys()
            rest.sort(key=lambda matcher: matcher.join_cost(bound))
            matcher = rest.pop(0)
            joined: list[Binding] = []
            for one in bindings:
                options = matcher.candidates(one)
                self.joins_left -= len(options)
                if self.joins_left < 0:
                    break
                for more in options:
                    if _agree(one, more):
                        joined.append({**one, **more})
            bindings = joined
        return bindings

    def add_actions(self, schema: _ActionSchema, binding: Binding) -> None:
        """Add the actions with all arguments that fit a binding.

        None are added if a parameter has no values.
        """
        tool = schema.tool
        combinations: list[JsonObject] = [{}]
        for name in schema.parameters:
            values = self._values(schema, name, binding)
            combinations = [{**one, name: value} for one in combinations for value in values]
            if len(combinations) > MAX_ACTIONS:
                self.complete = False
                combinations = combinations[:MAX_ACTIONS]
        for arguments in combinations:
            key = action_key(tool.name, arguments)
            if key in self.actions:
                continue
            needs = tuple(need for need in tool.preconditions(arguments) if need in self.reached)
            adds = tool.additions(arguments)
            removes = tuple(fact for fact in tool.deletions(arguments) if fact not in adds)
            cost = tool.cost or 0.0
            self.actions[key] = ToolAction(
                tool.name,
                arguments,
                needs,
                adds,
                removes,
                cost,
            )
            for fact in adds:
                if fact not in self.reached:
                    self.reached[fact] = None
                    self.queue.append(fact)

    def _values(self, schema: _ActionSchema, name: str, binding: Binding) -> Sequence[JsonValue]:
        """Return the values that a parameter may have."""
        if name in binding:
            return [_parse_value(binding[name], schema.tool.parameters.get(name, "any"))]
        if name in schema.choices:
            return schema.choices[name]
        values = self._domain.parameter_values.get((schema.tool.name, name), ())
        if not values:
            self.complete = False
        return values

    def usable_actions(self) -> list[ToolAction]:
        """Return the actions; a failed one is usable only after a change of its preconditions.

        Each failed action needs an additional fact, which only those actions add that remove one of
        its preconditions.
        """
        actions = list(self.actions.values())
        for key, failed in self.actions.items():
            if key not in self._domain.failed_actions:
                continue
            again = f"{key} can be used again"
            for index, action in enumerate(actions):
                if action.key == key:
                    actions[index] = action._replace(needs=(*action.needs, again))
                elif not frozenset(action.removes).isdisjoint(failed.needs):
                    actions[index] = action._replace(adds=(*action.adds, again))
        return actions


def _agree(one: Binding, other: Binding) -> bool:
    """Return whether two bindings have the same values for the names that they share."""
    for name, value in other.items():
        if one.get(name, value) != value:
            return False
    return True


class _ActionSchema:
    """A tool with the matchers of its preconditions."""

    def __init__(self, tool: ToolSpec, domain: Domain) -> None:
        needs = [n for n in tool.precondition_patterns if n not in domain.assumed_patterns]
        names = dict.fromkeys(tool.parameters)
        for pattern in (*needs, *tool.addition_patterns, *tool.removes):
            names |= dict.fromkeys(placeholders(pattern))
        objects: dict[str, list[str]] = {}
        for thing, kind in domain.objects.items():
            objects.setdefault(kind, []).append(thing)
        self.tool = tool
        self.parameters = tuple(names)
        self.choices: dict[str, tuple[str, ...]] = {}
        for name, kind in tool.parameters.items():
            if kind in objects:
                self.choices[name] = tuple(objects[kind])
        self.matchers = [_PatternMatcher(pattern, self.choices) for pattern in needs]


class _PatternMatcher:
    """Pattern of facts, with the bindings of its placeholders from the facts matched so far.

    `complete` is false if a fact was skipped because the pattern is too ambiguous for it.
    """

    def __init__(self, pattern: str, choices: Mapping[str, tuple[str, ...]]) -> None:
        self.pattern = pattern
        self.names = placeholders(pattern)
        self.bindings: list[Binding] = []
        self.complete = True
        self._pattern = FactPattern(pattern, choices)
        self._by_value: dict[tuple[str, str], list[Binding]] = {}

    def match(self, fact: str) -> Binding | None:
        """Return the binding of the placeholders by a fact; None if the fact does not match."""
        try:
            binding = self._pattern.match(fact)
        except ExpressionError:
            self.complete = False
            return None
        if binding is None:
            return None
        self.bindings.append(binding)
        for item in binding.items():
            self._by_value.setdefault(item, []).append(binding)
        return binding

    def join_cost(self, bound: AbstractSet[str]) -> tuple[bool, int]:
        """Return the cost of a join with these bound names.

        It consists of whether no name is shared, and the number of names that remain unbound.
        """
        unbound = sum(name not in bound for name in self.names)
        return 0 < unbound == len(self.names), unbound

    def candidates(self, bound: Binding) -> Sequence[Binding]:
        """Return the bindings that may agree with `bound`.

        They share the value of the first name that both bind.
        """
        for name in self.names:
            if name in bound:
                return self._by_value.get((name, bound[name]), ())
        return self.bindings


def _parse_value(text: str, kind: str) -> JsonValue:
    """Return the text of a placeholder as a value of a parameter's type."""
    if kind not in _PYTHON_TYPES:
        return text
    try:
        value: JsonValue = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, _PYTHON_TYPES[kind]):
        return value
    return text
