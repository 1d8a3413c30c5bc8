"""Grounding: the actions that can become possible, found by matching tools with reachable facts.

Facts are reached as if no fact were ever removed (the delete relaxation of Bonet and Geffner 2001):
facts that are not reached even so are certainly unreachable, and actions that can never become
possible are not made. The results depend on the order in which tools and facts are stated, never on
their names.
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
"""Most actions that are considered."""

_JOINS_PER_ACTION: Final = 50
"""Combinations of matching facts that are examined, for each of the most actions that may be
found.
"""

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
    """Use of a tool with arguments; its facts are in the order in which the tool states them."""

    tool: str
    arguments: JsonObject
    needs: Sequence[str]
    adds: Sequence[str]
    removes: tuple[str, ...]
    cost: float

    @property
    def key(self) -> str:
        """Key of equal actions."""
        return action_key(self.tool, self.arguments)


class Grounding(NamedTuple):
    """The actions that can become possible, whether these are all, and whether there were too many."""

    actions: tuple[ToolAction, ...]
    complete: bool
    truncated: bool


def action_key(tool: str | None, arguments: Mapping[str, JsonValue]) -> str:
    """Return the key of equal uses of a tool."""
    return _KEY_ENCODER.encode([tool, arguments])


@dataclass(frozen=True)
class Domain:
    """Tools and values that actions are made of.

    Attributes:
        tools: the tools that can be used.
        objects: the objects of the facts: name to type.
        parameter_values: by tool and parameter, values of tasks for parameters that no fact and no
            type determines.
        assumed_patterns: patterns of facts that are assumed to hold.
        failed_actions: keys of actions that have failed, and can be used again only after something
            that they need was removed and made true anew.
    """

    tools: Sequence[ToolSpec]
    objects: Mapping[str, str]
    parameter_values: Mapping[tuple[str, str], tuple[JsonValue, ...]]
    assumed_patterns: frozenset[str] = frozenset()
    failed_actions: frozenset[str] = frozenset()


def reachable_actions(facts: Sequence[str], domain: Domain, most: int = MAX_ACTIONS) -> Grounding:
    """Return the actions that can be reached from facts, at most about so many.

    One fact is taken after another, and every action that it completes is made.
    """
    schemas = [_ActionSchema(tool, domain) for tool in domain.tools]
    reached: dict[str, None] = dict.fromkeys(facts)
    queue = list(reached)
    actions: dict[str, ToolAction] = {}
    complete = True
    truncated = False
    joins_left = most * _JOINS_PER_ACTION

    def add_actions(schema: _ActionSchema, binding: Binding) -> None:
        """Make the actions with all arguments that fit a binding; none if a parameter has no values."""
        nonlocal complete
        tool = schema.tool
        combinations: list[JsonObject] = [{}]
        for name in schema.parameters:
            values: Sequence[JsonValue]
            if name in binding:
                values = [_parse_value(binding[name], tool.parameters.get(name, "any"))]
            elif name in schema.choices:
                values = schema.choices[name]
            else:
                values = domain.parameter_values.get((tool.name, name), ())
                complete = complete and bool(values)
            combinations = [{**one, name: value} for one in combinations for value in values]
            if len(combinations) > MAX_ACTIONS:
                complete = False
                combinations = combinations[:MAX_ACTIONS]
        for arguments in combinations:
            key = action_key(tool.name, arguments)
            if key in actions:
                continue
            needs = tuple(need for need in tool.preconditions(arguments) if need in reached)
            adds = tool.additions(arguments)
            removes = tuple(fact for fact in tool.deletions(arguments) if fact not in adds)
            actions[key] = ToolAction(tool.name, arguments, needs, adds, removes, tool.cost or 0.0)
            for fact in adds:
                if fact not in reached:
                    reached[fact] = None
                    queue.append(fact)

    for schema in schemas:
        if not schema.matchers:
            add_actions(schema, {})
    for fact in queue:  # grows during the loop
        for schema in schemas:
            for matched in schema.matchers:
                binding = matched.match(fact)
                if binding is None:
                    continue
                # Complete the binding in every way that the facts matched so far allow.
                bindings = [binding]
                rest = [matcher for matcher in schema.matchers if matcher is not matched]
                while rest and bindings:
                    bound = bindings[0].keys()
                    rest.sort(key=lambda matcher: matcher.join_cost(bound))
                    matcher = rest.pop(0)
                    joined: list[Binding] = []
                    for one in bindings:
                        options = matcher.candidates(one)
                        joins_left -= len(options)
                        if joins_left < 0:
                            break
                        joined += [
                            {**one, **more}
                            for more in options
                            if all(one.get(name, value) == value for name, value in more.items())
                        ]
                    bindings = joined
                for one in bindings:
                    add_actions(schema, one)
        if len(actions) > most or joins_left < 0:
            complete = False
            truncated = True
            break
    found = list(actions.values())
    for failed in [action for key, action in actions.items() if key in domain.failed_actions]:
        again = f"{failed.key} can be used again"  # a fact that only actions add which remove what it needs
        for index, action in enumerate(found):
            if action.key == failed.key:
                found[index] = action._replace(needs=(*action.needs, again))
            elif not frozenset(action.removes).isdisjoint(failed.needs):
                found[index] = action._replace(adds=(*action.adds, again))
    complete = complete and all(
        matcher.complete for schema in schemas for matcher in schema.matchers
    )
    return Grounding(tuple(found), complete, truncated)


class _ActionSchema:
    """A tool with the matchers of its preconditions."""

    def __init__(self, tool: ToolSpec, domain: Domain) -> None:
        needs = [n for n in tool.precondition_patterns if n not in domain.assumed_patterns]
        patterns = (*needs, *tool.addition_patterns, *tool.removes)
        named = (name for text in patterns for name in placeholders(text))
        types = set(domain.objects.values())
        self.tool = tool
        self.parameters = tuple(dict.fromkeys([*tool.parameters, *named]))
        self.choices = {
            name: tuple(
                thing for thing, kind in domain.objects.items() if kind == tool.parameters[name]
            )
            for name in self.parameters
            if tool.parameters.get(name) in types
        }
        self.matchers = [_PatternMatcher(pattern, self.choices) for pattern in needs]


class _PatternMatcher:
    """Pattern of facts, with the bindings of its placeholders from the facts matched so far.

    `complete` is false if a fact was left out, because the pattern is too ambiguous for it.
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
        """Return the cost of a join with these bound names: whether none is shared, then how many remain unbound."""
        unbound = sum(name not in bound for name in self.names)
        return 0 < unbound == len(self.names), unbound

    def candidates(self, bound: Binding) -> Sequence[Binding]:
        """Return the bindings that may agree with another: those with the same value of the first name in common."""
        shared = next((name for name in self.names if name in bound), None)
        return self.bindings if shared is None else self._by_value.get((shared, bound[shared]), ())


def _parse_value(text: str, kind: str) -> JsonValue:
    """Return the text of a placeholder as a value of a parameter's type."""
    if kind in _PYTHON_TYPES:
        try:
            value: JsonValue = json.loads(text)
        except (ValueError, RecursionError):
            return text
        return value if isinstance(value, _PYTHON_TYPES[kind]) else text
    return text
