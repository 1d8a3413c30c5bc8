"""Which uses of tools can ever become possible: patterns are joined with the facts that can be reached.

Facts are reached as if nothing were ever removed (the delete relaxation of Bonet and Geffner 2001), so that what
is not reached even so is out of reach for certain, and uses of tools that can never become possible are not made.
Everything goes by the order in which tools and facts are stated, never by how they are called.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from replanning import ToolSpec
from replanning.live import artifact_fact
from replanning.plan import JsonObject, compile_fact_pattern, placeholders
from replanning.plan.types import JsonValue

MAX_ACTIONS: Final = 20_000
"""How many uses of tools are considered."""

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
    """A use of a tool with arguments; facts in the order in which the tool states them."""

    tool: str
    arguments: JsonObject
    needs: Sequence[str]
    adds: Sequence[str]
    removes: tuple[str, ...]
    cost: float

    @property
    def key(self) -> str:
        """By which equal uses are recognised."""
        return action_key(self.tool, self.arguments)


class Grounding(NamedTuple):
    """The uses of tools that can become possible, whether these are all, and whether there were too many."""

    actions: tuple[ToolAction, ...]
    complete: bool
    truncated: bool


def action_key(tool: str | None, arguments: Mapping[str, JsonValue]) -> str:
    """By which equal uses of a tool are recognised."""
    return _KEY_ENCODER.encode([tool, arguments])


@dataclass(frozen=True)
class Domain:
    """What actions are made of.

    Attributes:
        tools: the tools that can be used.
        objects: the things that facts speak of: name to type.
        parameter_values: by tool and parameter, what tasks give for it, where no fact and no type says more.
        assumed_patterns: patterns of facts that are taken to hold.
        forbidden_actions: uses of tools that are out of the question.
    """

    tools: Sequence[ToolSpec]
    objects: Mapping[str, str]
    parameter_values: Mapping[tuple[str, str], tuple[JsonValue, ...]]
    assumed_patterns: frozenset[str] = frozenset()
    forbidden_actions: frozenset[str] = frozenset()


def reachable_actions(facts: Sequence[str], domain: Domain, most: int = MAX_ACTIONS) -> Grounding:
    """All that can be reached from facts, with no more than so many uses of tools."""
    return _ReachabilityAnalysis(facts, [_ActionSchema.of(tool, domain) for tool in domain.tools], domain, most).run()


@dataclass
class _ActionSchema:
    """A tool with its patterns ready to be matched."""

    tool: ToolSpec
    needs: Sequence[str]
    adds: Sequence[str]
    parameters: tuple[str, ...]
    choices: Mapping[str, tuple[str, ...]]
    matchers: list[_PatternMatcher] = field(default_factory=list)

    @classmethod
    def of(cls, tool: ToolSpec, domain: Domain) -> _ActionSchema:
        needs = tuple(n for n in (*tool.requires, *map(artifact_fact, tool.needs)) if n not in domain.assumed_patterns)
        adds = (*tool.adds, *map(artifact_fact, tool.produces))
        named = (name for text in (*needs, *adds, *tool.removes) for name in placeholders(text))
        parameters = tuple(dict.fromkeys([*tool.parameters, *named]))
        types = set(domain.objects.values())
        choices = {
            name: tuple(thing for thing, kind in domain.objects.items() if kind == tool.parameters[name])
            for name in parameters
            if tool.parameters.get(name) in types
        }
        made = cls(tool, needs, adds, parameters, choices)
        made.matchers = [_PatternMatcher(pattern, choices) for pattern in needs]
        return made


class _PatternMatcher:
    """The facts found so far that a pattern stands for."""

    def __init__(self, pattern: str, choices: Mapping[str, tuple[str, ...]]) -> None:
        self.pattern = pattern
        self.names = placeholders(pattern)
        self.bindings: list[Binding] = []
        self._fullmatch = compile_fact_pattern(pattern, choices).fullmatch
        self._by_value: dict[tuple[str, str], list[Binding]] = {}

    def match(self, fact: str) -> Binding | None:
        """What the holes stand for, if the pattern stands for this fact."""
        match = self._fullmatch(fact)
        if match is None:
            return None
        binding = dict(zip(self.names, match.groups(), strict=True))
        self._add(binding)
        return binding

    def _add(self, binding: Binding) -> None:
        self.bindings.append(binding)
        for item in binding.items():
            self._by_value.setdefault(item, []).append(binding)

    def join_cost(self, bound: AbstractSet[str]) -> tuple[bool, int]:
        """How much is left open where these names are bound: whether everything, then how many names."""
        left = sum(name not in bound for name in self.names)
        return 0 < left == len(self.names), left

    def consistent_bindings(self, bound: Binding) -> Iterator[Binding]:
        """The bindings that agree with another."""
        known = [name for name in self.names if name in bound]
        options = self._by_value.get((known[0], bound[known[0]]), []) if known else self.bindings
        for binding in list(options):
            if all(binding[name] == bound[name] for name in known):
                yield {**bound, **binding}


class _ReachabilityAnalysis:
    """Takes facts one after another, and makes every action that each completes."""

    def __init__(self, facts: Sequence[str], schemas: Sequence[_ActionSchema], domain: Domain, most: int) -> None:
        self._schemas = schemas
        self._domain = domain
        self._facts: dict[str, None] = dict.fromkeys(facts)
        self._queue = list(self._facts)
        self._actions: dict[str, ToolAction] = {}
        self._complete = True
        self._max_actions = most

    def run(self) -> Grounding:
        for schema in self._schemas:
            if not schema.needs:
                self._add_actions(schema, {})
        for fact in self._queue:  # grows while it is walked
            for schema in self._schemas:
                for index, found in enumerate(schema.matchers):
                    binding = found.match(fact)
                    if binding is not None:
                        self._join(schema, binding, index)
            if len(self._actions) > self._max_actions:
                return Grounding(tuple(self._actions.values()), complete=False, truncated=True)
        return Grounding(tuple(self._actions.values()), self._complete, truncated=False)

    def _join(self, schema: _ActionSchema, binding: Binding, taken: int) -> None:
        """Complete a binding in every way that the facts found so far allow."""
        partial = [binding]
        rest = [found for index, found in enumerate(schema.matchers) if index != taken]
        while rest and partial:
            bound = partial[0].keys()
            rest.sort(key=lambda found: found.join_cost(bound))
            found = rest.pop(0)
            partial = [more for one in partial for more in found.consistent_bindings(one)]
        for one in partial:
            self._add_actions(schema, one)

    def _add_actions(self, schema: _ActionSchema, binding: Binding) -> None:
        tool = schema.tool
        for arguments in self._arguments(schema, binding):
            key = action_key(tool.name, arguments)
            if key in self._actions or key in self._domain.forbidden_actions:
                continue
            needed = [need for need in tool.preconditions(arguments) if need in self._facts]
            added = tool.additions(arguments)
            removed = tuple(fact for fact in tool.deletions(arguments) if fact not in added)
            self._actions[key] = ToolAction(tool.name, arguments, tuple(needed), added, removed, tool.cost or 0.0)
            for fact in added:
                if fact not in self._facts:
                    self._facts[fact] = None
                    self._queue.append(fact)

    def _arguments(self, schema: _ActionSchema, binding: Binding) -> Iterator[JsonObject]:
        """The arguments that a binding leaves open, in every way; none where nobody knows what to give."""
        made: list[JsonObject] = [{}]
        for name in schema.parameters:
            values: Sequence[JsonValue]
            if name in binding:
                values = [_parse_value(binding[name], schema.tool.parameters.get(name, "any"))]
            elif name in schema.choices:
                values = schema.choices[name]
            else:
                values = self._domain.parameter_values.get((schema.tool.name, name), ())
                if not values:
                    self._complete = False
            made = [{**one, name: value} for one in made for value in values]
            if len(made) > MAX_ACTIONS:
                self._complete = False
                made = made[:MAX_ACTIONS]
        yield from made


def _parse_value(text: str, kind: str) -> JsonValue:
    """What a hole stands for, as a value of a parameter's type."""
    if kind in _PYTHON_TYPES:
        try:
            value: JsonValue = json.loads(text)
        except ValueError:
            return text
        return value if isinstance(value, _PYTHON_TYPES[kind]) else text
    return text
