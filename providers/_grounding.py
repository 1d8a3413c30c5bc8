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
from replanning.facts import artifact, finder, holes
from replanning.interfaces import JsonObject, JsonValue

MOST: Final = 20_000
"""How many uses of tools are considered."""

_JSON: Final[Mapping[str, tuple[type, ...]]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}

_SORTED: Final = json.JSONEncoder(sort_keys=True)

Binding = dict[str, str]


class Action(NamedTuple):
    """A use of a tool with arguments; facts in the order in which the tool states them."""

    tool: str
    arguments: JsonObject
    needs: tuple[str, ...]
    adds: tuple[str, ...]
    removes: tuple[str, ...]
    cost: float

    @property
    def key(self) -> str:
        """By which equal uses are recognised."""
        return use_key(self.tool, self.arguments)


class Grounded(NamedTuple):
    """The uses of tools that can become possible, whether these are all, and whether there were too many."""

    actions: tuple[Action, ...]
    complete: bool
    cut: bool


def use_key(tool: str | None, arguments: Mapping[str, JsonValue]) -> str:
    """By which equal uses of a tool are recognised."""
    return _SORTED.encode([tool, arguments])


@dataclass(frozen=True)
class Domain:
    """What actions are made of.

    Attributes:
        tools: the tools that can be used.
        objects: the things that facts speak of: name to type.
        values: by tool and parameter, what tasks give for it, where no fact and no type says more.
        assumed: patterns of facts that are taken to hold.
        forbidden: uses of tools that are out of the question.
    """

    tools: tuple[ToolSpec, ...]
    objects: Mapping[str, str]
    values: Mapping[tuple[str, str], tuple[JsonValue, ...]]
    assumed: frozenset[str] = frozenset()
    forbidden: frozenset[str] = frozenset()


def reachable(facts: Sequence[str], domain: Domain, most: int = MOST) -> Grounded:
    """All that can be reached from facts, with no more than so many uses of tools."""
    return _Reach(facts, [_Schema.of(tool, domain) for tool in domain.tools], domain, most).go()


@dataclass
class _Schema:
    """A tool with its patterns ready to be matched."""

    tool: ToolSpec
    needs: tuple[str, ...]
    adds: tuple[str, ...]
    parameters: tuple[str, ...]
    choices: Mapping[str, tuple[str, ...]]
    finders: list[_Finder] = field(default_factory=list)

    @classmethod
    def of(cls, tool: ToolSpec, domain: Domain) -> _Schema:
        needs = tuple(n for n in (*tool.requires, *map(artifact, tool.needs)) if n not in domain.assumed)
        adds = (*tool.adds, *map(artifact, tool.produces))
        named = (name for text in (*needs, *adds, *tool.removes) for name in holes(text))
        parameters = tuple(dict.fromkeys([*tool.parameters, *named]))
        types = set(domain.objects.values())
        choices = {
            name: tuple(thing for thing, kind in domain.objects.items() if kind == tool.parameters[name])
            for name in parameters
            if tool.parameters.get(name) in types
        }
        made = cls(tool, needs, adds, parameters, choices)
        made.finders = [_Finder(pattern, choices) for pattern in needs]
        return made


class _Finder:
    """The facts found so far that a pattern stands for."""

    def __init__(self, pattern: str, choices: Mapping[str, tuple[str, ...]]) -> None:
        self.pattern = pattern
        self.names = holes(pattern)
        self.found: list[Binding] = []
        self._matches = finder(pattern, choices).fullmatch
        self._by_value: dict[tuple[str, str], list[Binding]] = {}

    def take(self, fact: str) -> Binding | None:
        """What the holes stand for, if the pattern stands for this fact."""
        match = self._matches(fact)
        if match is None:
            return None
        binding = dict(zip(self.names, match.groups(), strict=True))
        self._add(binding)
        return binding

    def _add(self, binding: Binding) -> None:
        self.found.append(binding)
        for item in binding.items():
            self._by_value.setdefault(item, []).append(binding)

    def freedom(self, bound: AbstractSet[str]) -> tuple[bool, int]:
        """How much is left open where these names are bound: whether everything, then how many names."""
        left = sum(name not in bound for name in self.names)
        return 0 < left == len(self.names), left

    def agreeing(self, bound: Binding) -> Iterator[Binding]:
        """The bindings that agree with another."""
        known = [name for name in self.names if name in bound]
        options = self._by_value.get((known[0], bound[known[0]]), []) if known else self.found
        for binding in list(options):
            if all(binding[name] == bound[name] for name in known):
                yield {**bound, **binding}


class _Reach:
    """Takes facts one after another, and makes every action that each completes."""

    def __init__(self, facts: Sequence[str], schemas: Sequence[_Schema], domain: Domain, most: int) -> None:
        self._schemas = schemas
        self._domain = domain
        self._facts: dict[str, None] = dict.fromkeys(facts)
        self._queue = list(self._facts)
        self._actions: dict[str, Action] = {}
        self._complete = True
        self._most = most

    def go(self) -> Grounded:
        for schema in self._schemas:
            if not schema.needs:
                self._make(schema, {})
        for fact in self._queue:  # grows while it is walked
            for schema in self._schemas:
                for index, found in enumerate(schema.finders):
                    binding = found.take(fact)
                    if binding is not None:
                        self._join(schema, binding, index)
            if len(self._actions) > self._most:
                return Grounded(tuple(self._actions.values()), complete=False, cut=True)
        return Grounded(tuple(self._actions.values()), self._complete, cut=False)

    def _join(self, schema: _Schema, binding: Binding, taken: int) -> None:
        """Complete a binding in every way that the facts found so far allow."""
        partial = [binding]
        rest = [found for index, found in enumerate(schema.finders) if index != taken]
        while rest and partial:
            bound = partial[0].keys()
            rest.sort(key=lambda found: found.freedom(bound))
            found = rest.pop(0)
            partial = [more for one in partial for more in found.agreeing(one)]
        for one in partial:
            self._make(schema, one)

    def _make(self, schema: _Schema, binding: Binding) -> None:
        tool = schema.tool
        for arguments in self._arguments(schema, binding):
            key = use_key(tool.name, arguments)
            if key in self._actions or key in self._domain.forbidden:
                continue
            needed = [need for need in tool.preconditions(arguments) if need in self._facts]
            added = tool.additions(arguments)
            removed = tuple(fact for fact in tool.deletions(arguments) if fact not in added)
            self._actions[key] = Action(tool.name, arguments, tuple(needed), added, removed, tool.cost or 0.0)
            for fact in added:
                if fact not in self._facts:
                    self._facts[fact] = None
                    self._queue.append(fact)

    def _arguments(self, schema: _Schema, binding: Binding) -> Iterator[JsonObject]:
        """The arguments that a binding leaves open, in every way; none where nobody knows what to give."""
        made: list[JsonObject] = [{}]
        for name in schema.parameters:
            values: Sequence[JsonValue]
            if name in binding:
                values = [_typed(binding[name], schema.tool.parameters.get(name, "any"))]
            elif name in schema.choices:
                values = schema.choices[name]
            else:
                values = self._domain.values.get((schema.tool.name, name), ())
                if not values:
                    self._complete = False
            made = [{**one, name: value} for one in made for value in values]
            if len(made) > MOST:
                self._complete = False
                made = made[:MOST]
        yield from made


def _typed(text: str, kind: str) -> JsonValue:
    """What a hole stands for, as a value of a parameter's type."""
    if kind in _JSON:
        try:
            value: JsonValue = json.loads(text)
        except ValueError:
            return text
        return value if isinstance(value, _JSON[kind]) else text
    return text
