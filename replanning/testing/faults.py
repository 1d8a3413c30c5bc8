"""Faults of simulated runs, drawn for each run from a schedule; and a store that fails."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from random import Random
from typing import Any, Final, Literal, TypeVar

import anyio

from replanning import (
    Alternative,
    Answer,
    Plan,
    PlanRun,
    Question,
    ReplanRequest,
    Task,
    TransientError,
)
from replanning.decision import AlternativeProvider, HumanGate
from replanning.environment import Clock
from replanning.errors import PlanError, Problem, StoreError
from replanning.journal import MemoryStore, RunStore, Usage
from replanning.plan import JsonObject, JsonValue
from replanning.plan.messages import NameSuggester
from replanning.testing.scripted import (
    ExecutorCall,
    ScriptedGate,
    ScriptStep,
    hangs,
    raises,
    returns,
)


def _flaky(operation: str) -> Any:
    """Return a method that forwards to the other store, unless the call is to fail."""

    @wraps(getattr(RunStore, operation), updated=())  # else it would be abstract as well
    def call(self: FlakyStore, *args: Any, **kwargs: Any) -> Any:
        self._calls[operation] += 1
        number = self._calls[operation]
        forward = getattr(self._store, operation)
        fails = self._fails(operation, number)
        if not fails:
            return forward(*args, **kwargs)
        self.failures += 1
        if fails == "after":
            forward(*args, **kwargs)
        raise StoreError(f"call {number} of {operation!r} was scheduled to fail")

    return call


class FlakyStore(RunStore):
    """Store that wraps another one and fails on schedule, before or after a call to it.

    ::

        def fails(operation: str, number: int) -> bool:
            return operation == "append" and 10 <= number < 15

        store = FlakyStore(fails=fails)

    Args:
        store: the other store; a `MemoryStore` by default.
        fails: called with the name of a method and the number of the call to it, from 1; returns
            whether it fails: true to fail before the call to the other store, or `"after"` to fail
            after it.
        durable: value of the attribute `durable`; that of the other store by default.

    Attributes:
        failures: number of calls that failed.
    """

    durable = False

    def __init__(
        self,
        store: RunStore | None = None,
        fails: Callable[[str, int], bool | Literal["after"]] = lambda operation, number: False,
        *,
        durable: bool | None = None,
    ) -> None:
        self._store = store or MemoryStore()
        self._fails = fails
        self._calls: Counter[str] = Counter()
        self.failures = 0
        self.durable = self._store.durable if durable is None else durable  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"<FlakyStore before {self._store!r} failures={self.failures}>"

    create = _flaky("create")
    acquire = _flaky("acquire")
    renew = _flaky("renew")
    release = _flaky("release")
    append = _flaky("append")
    read = _flaky("read")
    runs = _flaky("runs")
    post = _flaky("post")
    inbox = _flaky("inbox")
    discard = _flaky("discard")
    add_outcomes = _flaky("add_outcomes")
    outcomes = _flaky("outcomes")

    def close(self) -> None:
        """Close the other store."""
        self._store.close()


Duration = float | tuple[float, float]
"""Seconds, or a range of seconds."""

ScheduledEvent = tuple[float, Callable[[PlanRun], object]]
"""Seconds after the start of a run, and a function of the run to call then."""

ANY_TASK: Final = "*"
"""Key for every task that is not named by its id or its tool."""

_OUTPUT_REFERENCE: Final = re.compile(r"\$\{([^{}]+?)\.output((?:\.[^.\[\]{}]+)*)\}")
_ITEM_REFERENCE: Final = re.compile(r"\$\{item\.([^.\[\]{}]+)")

_SYNTHETIC_ELEMENTS: Final = 3
"""Number of made-up elements of a list whose length only a real run knows."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultSchedule:
    """Faults and their probabilities. Every run draws from them with a seed of its own.

    ::

        FaultSchedule(
            fail={"build": 1.0},  # never works
            flaky={"*": 0.05},  # everything fails now and then
            durations={"build": (60, 90), "*": 5},
            events=[(120, lambda run: run.change_context({"region": "eu"}))],
            answers=[returns(Answer("approve", by="ada"), after=600)],
        )

    Tasks are named by id, else by tool, else by `*`; probabilities are from 0 to 1.

    Attributes:
        fail: probability that every attempt at a task fails in a run.
        flaky: probability of each attempt to fail with a transient error.
        hang: probability of each attempt to hang until the timeout of the task.
        durations: duration of attempts in seconds; 1 by default.
        outputs: outputs of tasks; made up to match the references to them by default.
        provider_fail: probability of each request to a provider to fail.
        provider_hang: probability of each request to a provider to hang.
        store_fail: probability of each record to begin an outage of the store.
        store_outage: duration of an outage in seconds.
        events: functions to call on every run, each with its time.
        answers: script of a `ScriptedGate`; without one there is no gate.
    """

    fail: Mapping[str, float] = field(default_factory=dict)
    flaky: Mapping[str, float] = field(default_factory=dict)
    hang: Mapping[str, float] = field(default_factory=dict)
    durations: Mapping[str, Duration] = field(default_factory=dict)
    outputs: JsonObject = field(default_factory=dict)
    provider_fail: float = 0.0
    provider_hang: float = 0.0
    store_fail: float = 0.0
    store_outage: Duration = 2.0
    events: Sequence[ScheduledEvent] = ()
    answers: Sequence[ScriptStep | Answer] | Callable[[Question], ScriptStep | Answer] | None = None

    def check(self, plan: Plan) -> None:
        """Check the schedule against a plan.

        Raises:
            PlanError: it names tasks or tools that the plan lacks.
        """
        known: set[str] = {ANY_TASK}
        for task in plan.tasks:
            known.add(task.id)
            if task.tool:
                known.add(task.tool)
        for tool in plan.tools:
            known.add(tool.name)
        suggest = NameSuggester()
        problems: list[Problem] = []
        for name in ("fail", "flaky", "hang", "durations", "outputs"):
            for key in getattr(self, name):
                if key in known:
                    continue
                hint = suggest(key, known) or f"; name one, or {ANY_TASK!r} for all"
                message = f"the plan has no task or tool {key!r}{hint}"
                problems.append(Problem(f"faults.{name}", message))
        if problems:
            raise PlanError(problems)

    def draw(
        self, plan: Plan, seed: int, clock: Clock, *, root_of: Callable[[str], str] = str
    ) -> RunFaults:
        """Draw the faults of one run.

        Args:
            plan: the plan.
            seed: equal seeds draw equal faults.
            clock: the clock of the run.
            root_of: returns the lineage root of a task, whose output a replacement must provide.
        """
        return RunFaults(self, seed, clock, root_of, synthetic_outputs(plan))


@dataclass(frozen=True, repr=False, slots=True)
class RunFaults:
    """Faults of one run, drawn from a `FaultSchedule`.

    The faults of an attempt depend on the seed, the task and the number of the attempt only, not on
    the order of events.
    """

    schedule: FaultSchedule
    seed: int
    clock: Clock
    root_of: Callable[[str], str]
    synthetic_outputs: JsonObject

    def __repr__(self) -> str:
        return f"<RunFaults seed={self.seed}>"

    def attempt_step(self, call: ExecutorCall) -> ScriptStep:
        """Return the step of an attempt; the script of a `ScriptedExecutor`."""
        schedule = self.schedule
        task = call.task
        call.context.record_checked()  # the commands of `expect` succeed: they are not run either
        of_list = _list_of(task)
        keys = (task.id, of_list, task.tool, ANY_TASK)
        duration = _first_match(schedule.durations, keys, 1.0)
        after = self._sample(duration, "duration", task.id, call.number)
        if self.chance("fail", task.id) < _first_match(schedule.fail, keys, 0.0):
            return raises(RuntimeError(f"task {task.id!r} was made to fail"), after=after)
        if self.chance("hang", task.id, call.number) < _first_match(schedule.hang, keys, 0.0):
            return hangs()
        if self.chance("flaky", task.id, call.number) < _first_match(schedule.flaky, keys, 0.0):
            return raises(TransientError(f"attempt {call.number} was made to fail"), after=after)
        root = self.root_of(task.id)
        output_keys = (task.id, root, of_list, task.tool, ANY_TASK)
        made_up = self.synthetic_outputs.get(root)
        output = _first_match(schedule.outputs, output_keys, made_up)
        return returns(output, after=after)

    def wrap_provider(self, provider: AlternativeProvider) -> AlternativeProvider:
        """Return the provider with its faults."""
        return _FaultyProvider(provider, self)

    def wrap_store(self, store: RunStore) -> RunStore:
        """Return the store with its outages, which begin after the first record of a run."""
        if not self.schedule.store_fail:
            return store
        until = -1.0

        def fails(operation: str, number: int) -> bool:
            nonlocal until
            if operation != "append" or number == 1:
                return False
            now = self.clock.now()
            if now >= until and self.chance("store", number) < self.schedule.store_fail:
                until = now + self._sample(self.schedule.store_outage, "outage", number)
            return now < until

        return FlakyStore(store, fails)

    def gate(self) -> HumanGate | None:
        """Return the gate that answers questions, if any."""
        answers = self.schedule.answers
        return None if answers is None else ScriptedGate(answers, clock=self.clock)

    def _sample(self, duration: Duration, *what: object) -> float:
        least, most = _bounds(duration)
        if least == most:
            return least
        return round(least + (most - least) * self.chance(*what), 3)

    def chance(self, *what: object) -> float:
        """Return a number from 0 to 1, seeded by its subject: one draw never shifts another."""
        return Random("/".join(map(str, (self.seed, *what)))).random()


class _FaultyProvider:
    """Provider that wraps another one and fails or hangs as drawn."""

    def __init__(self, provider: AlternativeProvider, faults: RunFaults) -> None:
        self.name = provider.name
        self._provider = provider
        self._faults = faults
        self._requests = 0

    def estimate(self, request: ReplanRequest) -> Usage:
        """Return the estimate of the provider, if it has one."""
        estimate = getattr(self._provider, "estimate", None)
        return Usage() if estimate is None else estimate(request)

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """Return the proposals of the provider, or fail or hang."""
        self._requests += 1
        schedule = self._faults.schedule
        number = self._requests
        if self._faults.chance("provider hang", self.name, number) < schedule.provider_hang:
            await anyio.sleep_forever()
        if self._faults.chance("provider fail", self.name, number) < schedule.provider_fail:
            raise RuntimeError(f"request {number} to {self.name!r} was made to fail")
        return await self._provider.propose(request)


def _list_of(task: Task) -> str | None:
    """Return the `for_each` task if this one does the work of one of its elements."""
    if task.scope is None:
        return None
    element = f"[{task.scope.get('key')}]"
    if not task.id.endswith(element):
        return None  # it replaces an element, so faults of the list do not apply to it
    return task.id.removesuffix(element)


def synthetic_outputs(plan: Plan) -> JsonObject:
    """Return made-up outputs with the fields that other tasks refer to.

    For the argument `${build.output.path}` the output of `build` is `{"path": "build.path"}`, and
    for `for_each: ${build.output}` it is a list of three elements.
    """
    outputs: JsonObject = {}
    for task in plan.tasks:
        for task_id, path in _OUTPUT_REFERENCE.findall(str(task.arguments)):
            _put(outputs, task_id, path, f"{task_id}{path}")
        if isinstance(task.for_each, str):
            for task_id, path in _OUTPUT_REFERENCE.findall(task.for_each):
                _put(outputs, task_id, path, _synthetic_elements(task))
    return outputs


def _put(outputs: JsonObject, task_id: str, path: str, value: JsonValue) -> None:
    """Put a value where a reference to the output of a task finds it."""
    inner: JsonValue = outputs
    steps = [task_id, *path.split(".")[1:]]
    # A reference to a whole output accepts null.
    if len(steps) == 1 and not isinstance(value, list):
        return
    for step in steps[:-1]:
        inner = inner.setdefault(step, {}) if isinstance(inner, dict) else None
    if isinstance(inner, dict):
        inner.setdefault(steps[-1], value)


def _synthetic_elements(task: Task) -> list[JsonValue]:
    """Return elements of the list of a task, with the fields that it refers to."""
    text = f"{task.arguments} {task.key} {task.name} {task.goal}"
    fields = dict.fromkeys(_ITEM_REFERENCE.findall(text))
    elements: list[JsonValue] = []
    for number in range(_SYNTHETIC_ELEMENTS):
        if fields:
            elements.append({name: f"{name}-{number}" for name in fields})
        else:
            elements.append(f"{task.id}-{number}")
    return elements


def _first_match(mapping: Mapping[str, T], keys: Sequence[str | None], default: T) -> T:
    """Return the value of the first key in the mapping, or the default."""
    for key in keys:
        if key is not None and key in mapping:
            return mapping[key]
    return default


def _bounds(duration: Duration) -> tuple[float, float]:
    return duration if isinstance(duration, tuple) else (duration, duration)
