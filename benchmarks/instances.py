"""Reads replanning instances in any vocabulary, and executes them in a simulated world."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

import yaml

from replanning import Goal, Plan, Task, ToolSpec
from replanning.plan import JsonObject

SHARED = Path("../shared/data")
SOURCE = "PlanBench task 6, https://github.com/karthikv792/LLMs-Planning at b008bc4, MIT"


@dataclass(frozen=True)
class Action:
    """A ground action, such as `stack a b`: a name and its arguments in order."""

    name: str
    arguments: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Action:
        """From `name argument …`, with or without brackets."""
        name, *arguments = text.strip("() ").split()
        return cls(name, tuple(arguments))

    def __str__(self) -> str:
        return " ".join((self.name, *self.arguments))


@dataclass(frozen=True)
class Schema:
    """Preconditions and effects of an action, as patterns over its parameters."""

    name: str
    parameters: tuple[str, ...]
    requires: tuple[str, ...]
    adds: tuple[str, ...]
    removes: tuple[str, ...]
    kinds: tuple[str, ...]

    def ground(self, patterns: Sequence[str], arguments: Sequence[str]) -> frozenset[str]:
        """The facts that patterns stand for."""
        text = dict(zip(self.parameters, arguments, strict=True))
        return frozenset(
            re.sub(r"\{(\w+)\}", lambda m: text[m[1]], pattern) for pattern in patterns
        )


class Domain:
    """The actions of a world; an oracle that shares no code with the library."""

    def __init__(self, schemas: Sequence[Schema]) -> None:
        self.schemas = {schema.name: schema for schema in schemas}

    @classmethod
    def load(cls, path: Path) -> Domain:
        """From a YAML list of tools."""
        schemas = []
        for tool in yaml.safe_load(path.read_text(encoding="utf-8")):
            schemas.append(
                Schema(
                    tool["name"],
                    tuple(tool["parameters"]),
                    tuple(tool.get("requires", ())),
                    tuple(tool.get("adds", ())),
                    tuple(tool.get("removes", ())),
                    tuple(tool["parameters"].values()),
                )
            )
        return cls(schemas)

    def tools(self, *, stated: bool = True) -> tuple[ToolSpec, ...]:
        """The actions as tools of a plan; with their preconditions and effects if `stated`."""
        tools = []
        for schema in self.schemas.values():
            parameters = dict(zip(schema.parameters, schema.kinds, strict=True))
            tool = ToolSpec(name=schema.name, parameters=parameters)
            if stated:
                tool = ToolSpec(
                    name=schema.name,
                    parameters=parameters,
                    requires=schema.requires,
                    adds=schema.adds,
                    removes=schema.removes,
                )
            tools.append(tool)
        return tuple(tools)

    def apply(self, facts: frozenset[str], action: Action) -> frozenset[str] | None:
        """The facts after an action; None when it cannot be done."""
        schema = self.schemas.get(action.name)
        if schema is None or len(schema.parameters) != len(action.arguments):
            return None
        if not schema.ground(schema.requires, action.arguments) <= facts:
            return None
        removed = schema.ground(schema.removes, action.arguments)
        return (facts - removed) | schema.ground(schema.adds, action.arguments)

    def play(self, facts: frozenset[str], actions: Sequence[Action]) -> frozenset[str] | None:
        """The facts after actions in order; None when one of them cannot be done."""
        for action in actions:
            after = self.apply(facts, action)
            if after is None:
                return None
            facts = after
        return facts

    def applicable(
        self, facts: frozenset[str], objects: Sequence[str]
    ) -> Iterator[tuple[Action, frozenset[str]]]:
        """Every applicable action, with the facts after it, in a fixed order."""
        for schema in self.schemas.values():
            for arguments in product(objects, repeat=len(schema.parameters)):
                if len(set(arguments)) < len(arguments):
                    continue
                action = Action(schema.name, arguments)
                after = self.apply(facts, action)
                if after is not None:
                    yield action, after

    def search(
        self, facts: frozenset[str], goal: frozenset[str], objects: Sequence[str]
    ) -> list[Action] | None:
        """A shortest plan, found breadth first: the baseline of planning from scratch."""
        queue: list[tuple[frozenset[str], int, Action | None]] = [(facts, -1, None)]
        seen = {facts}
        at = 0
        while at < len(queue):
            now, _, _ = queue[at]
            if goal <= now:
                steps: list[Action] = []
                _, before, step = queue[at]
                while step is not None:
                    steps.append(step)
                    _, before, step = queue[before]
                steps.reverse()
                return steps
            for action, after in self.applicable(now, objects):
                if after not in seen:
                    seen.add(after)
                    queue.append((after, at, action))
            at += 1
        return None


@dataclass(frozen=True)
class Instance:
    """A plan, an unexpected event after its k-th step, and what GPT-4 answered."""

    name: str
    init: frozenset[str]
    goal: frozenset[str]
    plan: tuple[Action, ...]
    after: int
    holds: frozenset[str]
    ceased: frozenset[str]
    trivial: bool
    answer: str
    answer_correct: bool

    @property
    def objects(self) -> tuple[str, ...]:
        """All objects in facts and actions."""
        named: set[str] = set()
        for fact in self.init | self.goal:
            named.update(re.findall(r"[(,]([^(),]+)", fact))
        for action in self.plan:
            named.update(action.arguments)
        return tuple(sorted(named))

    @property
    def rest(self) -> tuple[Action, ...]:
        """Return the remaining actions of the plan when the event happens."""
        return self.plan[self.after :]

    def at_event(self, domain: Domain) -> frozenset[str]:
        """The facts right after the event."""
        before = domain.play(self.init, self.plan[: self.after])
        if before is None:
            raise ValueError(f"{self.name}: the plan cannot be executed up to its event")
        return (before - self.ceased) | self.holds

    def document(self, domain: Domain, *, stop: bool, stated: bool = True) -> Plan:
        """The instance as a plan; with its facts if `stated`."""
        tasks = []
        for number, action in enumerate(self.plan, 1):
            parameters = domain.schemas[action.name].parameters
            arguments: JsonObject = dict(zip(parameters, action.arguments, strict=True))
            tasks.append(Task(id=f"s{number}", tool=action.name, arguments=arguments))
        kind = next(kind for schema in domain.schemas.values() for kind in schema.kinds)
        goal = Goal(objective="reach the goal")
        facts: tuple[str, ...] | None = None
        if stated:
            wanted = tuple(sorted(self.goal))
            goal = Goal(objective=goal.objective, facts=wanted, stop_when_reached=stop)
            facts = tuple(sorted(self.init))
        return Plan(
            name=self.name,
            goal=goal,
            tools=domain.tools(stated=stated),
            facts=facts,
            objects=dict.fromkeys(self.objects, kind),
            tasks=tuple(tasks),
            sequential=True,
        )


class World:
    """Simulated blocks world in which the event happens after a number of actions."""

    def __init__(self, instance: Instance, domain: Domain) -> None:
        self.facts = instance.init
        self.done: list[Action] = []
        self.vain = False
        self._instance = instance
        self._domain = domain
        self._happened = False

    def do(self, action: Action) -> None:
        """Do an action.

        Raises:
            RuntimeError: it cannot be done.
        """
        after = self._domain.apply(self.facts, action)
        if after is None:
            self.vain = True
            raise RuntimeError(f"{action} cannot be done")
        self.facts = after
        self.done.append(action)

    def at_event(self) -> bool:
        """Whether it is time; then the event happens."""
        if self._happened or len(self.done) != self._instance.after:
            return False
        self._happened = True
        self.facts = (self.facts - self._instance.ceased) | self._instance.holds
        return True

    def distance(self) -> int:
        """The actions added to and removed from what was left of the plan."""
        return _difference(_steps(self._new()), _steps(self._instance.rest))

    def edges(self) -> int:
        """The same for what comes right after what."""
        return _difference(self._pairs(self._new()), self._pairs(self._instance.rest))

    def untouched(self) -> float:
        """The share of what was left of the plan that was done."""
        old = _steps(self._instance.rest)
        if not old:
            return 1.0
        return (_steps(self._new()) & old).total() / old.total()

    def _new(self) -> Sequence[Action]:
        return self.done[self._instance.after :]

    def _pairs(self, steps: Sequence[Action]) -> Counter[str]:
        last = self._instance.plan[self._instance.after - 1]
        return Counter(f"{a} > {b}" for a, b in pairwise([last, *steps]))


def _steps(actions: Sequence[Action]) -> Counter[str]:
    return Counter(map(str, actions))


def _difference(new: Counter[str], old: Counter[str]) -> int:
    """How many are added and removed."""
    return (new - old).total() + (old - new).total()


def fact(text: str) -> str:
    """`on a b` as `on(a,b)`."""
    name, *arguments = text.split()
    if not arguments:
        return name
    return f"{name}({','.join(arguments)})"


def load(path: Path) -> list[Instance]:
    """The instances of a file, one JSON object a line."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        found.append(
            Instance(
                name=f"{path.stem}-{data['id']}",
                init=_fact_set(data["init"]),
                goal=_fact_set(data["goal"]),
                plan=tuple(map(Action.parse, data["plan"])),
                after=data["event_after_step"],
                holds=_fact_set(data["became_true"]),
                ceased=_fact_set(data["became_false"]),
                trivial=bool(data["goal_already_met"]),
                answer=str(data.get("gpt4_raw") or ""),
                answer_correct=bool(data.get("gpt4_correct")),
            )
        )
    return found


def _fact_set(texts: Sequence[str]) -> frozenset[str]:
    return frozenset(map(fact, texts))
