"""What goes wrong in simulated runs: said once, drawn anew for every run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, TypeVar

import anyio

from replanning import Alternative, Answer, Plan, PlanRun, Question, ReplanRequest, TransientError
from replanning.decision import AlternativeProvider, HumanGate
from replanning.environment import Clock
from replanning.errors import PlanError, Problem, StoreError
from replanning.journal import InboxMessage, Lease, MemoryStore, Record, RunInfo, RunStore, ToolOutcome, Usage
from replanning.plan import JsonObject, RunId
from replanning.testing.scripted import ExecutorCall, ScriptedGate, ScriptStep, hangs, raises, returns


class FlakyStore(RunStore):
    """Stands before another store and fails on schedule; nothing is written by a call that fails.

    ::

        store = FlakyStore(fails=lambda operation, number: operation == "append" and 10 <= number < 15)

    Args:
        store: keeps what gets through; in memory when left out.
        fails: says whether a call fails, from the name of the method and the number of its calls so far, from 1.
        durable: what to claim about outliving the process; as the other store does when left out.

    Attributes:
        failures: how many calls have failed.
    """

    durable = False

    def __init__(
        self,
        store: RunStore | None = None,
        fails: Callable[[str, int], bool] = lambda operation, number: False,
        *,
        durable: bool | None = None,
    ) -> None:
        self._store = store or MemoryStore()
        self._fails = fails
        self._calls: Counter[str] = Counter()
        self.failures = 0
        self.durable = self._store.durable if durable is None else durable  # type: ignore[misc]  # as what stands behind it

    def __repr__(self) -> str:
        return f"<FlakyStore before {self._store!r} failures={self.failures}>"

    def _forward(self, operation: str) -> RunStore:
        self._calls[operation] += 1
        number = self._calls[operation]
        if self._fails(operation, number):
            self.failures += 1
            raise StoreError(f"the store was told to fail at call {number} of {operation!r}")
        return self._store

    def create(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Make an empty journal, unless it is time to fail."""
        return self._forward("create").create(run, owner, at, ttl)

    def acquire(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Own an existing run, unless it is time to fail."""
        return self._forward("acquire").acquire(run, owner, at, ttl)

    def renew(self, lease: Lease, at: float, ttl: float) -> None:
        """Own the run for longer, unless it is time to fail."""
        self._forward("renew").renew(lease, at, ttl)

    def release(self, lease: Lease) -> None:
        """Give the run up, unless it is time to fail."""
        self._forward("release").release(lease)

    def append(self, lease: Lease, record: Record) -> None:
        """Add a record, unless it is time to fail."""
        self._forward("append").append(lease, record)

    def read(self, run: RunId, after: int = 0) -> Iterator[Record]:
        """The records of a run, unless it is time to fail."""
        return self._forward("read").read(run, after)

    def runs(self) -> Sequence[RunInfo]:
        """All runs, unless it is time to fail."""
        return self._forward("runs").runs()

    def post(self, run: RunId, message: InboxMessage) -> None:
        """Leave a message, unless it is time to fail."""
        self._forward("post").post(run, message)

    def inbox(self, run: RunId) -> Sequence[InboxMessage]:
        """The messages, unless it is time to fail."""
        return self._forward("inbox").inbox(run)

    def discard(self, lease: Lease, messages: Sequence[int]) -> None:
        """Forget messages, unless it is time to fail."""
        self._forward("discard").discard(lease, messages)

    def add_outcomes(self, outcomes: Sequence[ToolOutcome]) -> None:
        """Remember outcomes, unless it is time to fail."""
        self._forward("add_outcomes").add_outcomes(outcomes)

    def outcomes(
        self, *, tool: str | None = None, capability: str | None = None, limit: int = 50
    ) -> Sequence[ToolOutcome]:
        """The last outcomes, unless it is time to fail."""
        return self._forward("outcomes").outcomes(tool=tool, capability=capability, limit=limit)

    def close(self) -> None:
        """Close the other store."""
        self._store.close()


Duration = float | tuple[float, float]
"""Seconds, or the least and the most of them."""

ScheduledEvent = tuple[float, Callable[[PlanRun], object]]
"""Something that happens to a run from outside, so many seconds after its start."""

ANY_TASK: Final = "*"
"""Stands for every task that is not named by its id or its tool."""

_OUTPUT_REFERENCE: Final = re.compile(r"\$\{([^{}]+?)\.output((?:\.[^.\[\]{}]+)*)\}")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultSchedule:
    """What goes wrong, and how likely it is. Every run draws from it with a seed of its own.

    ::

        FaultSchedule(
            fail={"build": 1.0},  # the first tool never works
            flaky={"*": 0.05},  # and everything fails now and then
            durations={"build": (60, 90), "*": 5},
            happenings=[(120, lambda run: run.change_context({"region": "eu"}))],
            answers=[returns(Answer("approve", by="ada"), after=600)],
        )

    Tasks are named by id, else by tool, else by `*`; chances go from 0 to 1.

    Attributes:
        fail: the chance that, in a run, every attempt at a task fails.
        flaky: the chance of each attempt to fail with an error that may pass.
        hang: the chance of each attempt never to come back; only a timeout of the task ends it.
        durations: how long attempts take, in seconds; 1 where nothing is said.
        outputs: what tasks return; made up to suit the references to them where nothing is said.
        provider_fail: the chance of each request to a provider to fail.
        provider_hang: the chance of each request to a provider never to be answered.
        store_fail: the chance of each record to find the store out of order, for as long as `store_outage`.
        store_outage: how long the store then fails, in seconds.
        events: what happens to every run, and when.
        answers: what people answer, as `ScriptedGate` takes it; nobody is asked when left out.
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
        """See that the schedule suits a plan.

        Raises:
            PlanError: it names what the plan does not have, or a chance or duration is out of range.
        """
        known = {ANY_TASK, *(task.id for task in plan.tasks), *(task.tool for task in plan.tasks if task.tool)}
        known |= {tool.name for tool in plan.tools}
        problems = [
            Problem(f"faults.{name}", f"there is no task or tool {key!r}; name one, or {ANY_TASK!r} for all")
            for name in ("fail", "flaky", "hang", "durations", "outputs")
            for key in getattr(self, name)
            if key not in known
        ]
        problems += [
            Problem(place, f"a chance goes from 0 to 1, got {chance!r}")
            for place, chance in self._chances()
            if not 0 <= chance <= 1
        ]
        problems += [
            Problem(place, f"expected seconds, or the least and the most of them, got {duration!r}")
            for place, duration in self._durations()
            if not 0 <= _bounds(duration)[0] <= _bounds(duration)[1]
        ]
        if problems:
            raise PlanError(problems)

    def _chances(self) -> Iterator[tuple[str, float]]:
        for name in ("fail", "flaky", "hang"):
            for key, chance in getattr(self, name).items():
                yield f"faults.{name}.{key}", chance
        for name in ("provider_fail", "provider_hang", "store_fail"):
            yield f"faults.{name}", getattr(self, name)

    def _durations(self) -> Iterator[tuple[str, Duration]]:
        for key, duration in self.durations.items():
            yield f"faults.durations.{key}", duration
        yield "faults.store_outage", self.store_outage

    def draw(self, plan: Plan, seed: int, clock: Clock, *, root_of: Callable[[str], str] = str) -> RunFaults:
        """What goes wrong in one run.

        Args:
            plan: what is run.
            seed: equal seeds draw equal faults.
            clock: the time of the run.
            root_of: finds the original of a task that replaces another, whose output it must be able to give.
        """
        return RunFaults(self, plan, seed, clock, root_of)


class RunFaults:
    """What goes wrong in one run, drawn from a `FaultSchedule`.

    What is drawn for an attempt depends on the seed, the task and the number of the attempt, not on what else
    happens or in which order.
    """

    def __init__(
        self, schedule: FaultSchedule, plan: Plan, seed: int, clock: Clock, root_of: Callable[[str], str]
    ) -> None:
        self.schedule = schedule
        self.seed = seed
        self._clock = clock
        self._root_of = root_of
        self._synthetic_outputs = synthetic_outputs(plan)

    def __repr__(self) -> str:
        return f"<Faults drawn with seed {self.seed}>"

    def attempt_step(self, call: ExecutorCall) -> ScriptStep:
        """What an attempt does: the script of a `ScriptedExecutor`."""
        schedule, task = self.schedule, call.task
        keys = (task.id, task.tool, ANY_TASK)
        if self._chance("fail", task.id) < _first_match(schedule.fail, keys, 0.0):
            return raises(RuntimeError(f"task {task.id!r} was made to fail"), after=self._duration(call))
        if self._chance("hang", task.id, call.number) < _first_match(schedule.hang, keys, 0.0):
            return hangs()
        if self._chance("flaky", task.id, call.number) < _first_match(schedule.flaky, keys, 0.0):
            return raises(TransientError(f"attempt {call.number} was made to fail"), after=self._duration(call))
        root = self._root_of(task.id)
        output = _first_match(schedule.outputs, (task.id, root, task.tool, ANY_TASK), self._synthetic_outputs.get(root))
        return returns(output, after=self._duration(call))

    def wrap_provider(self, provider: AlternativeProvider) -> AlternativeProvider:
        """A provider that now and then fails or hangs."""
        return _FaultyProvider(provider, self)

    def provider_step(self, name: str, number: int) -> ScriptStep | None:
        """What goes wrong with a request to a provider, if anything does."""
        if self._chance("provider hang", name, number) < self.schedule.provider_hang:
            return hangs()
        if self._chance("provider fail", name, number) < self.schedule.provider_fail:
            return raises(RuntimeError(f"request {number} to {name!r} was made to fail"))
        return None

    def wrap_store(self, store: RunStore) -> RunStore:
        """A store that now and then does not work for a while, after the first record of a run."""
        if not self.schedule.store_fail:
            return store
        until = -1.0

        def fails(operation: str, number: int) -> bool:
            """Whether the store is out of order now."""
            nonlocal until
            if operation != "append" or number == 1:
                return False
            if self._clock.now() >= until and self._chance("store", number) < self.schedule.store_fail:
                until = self._clock.now() + self._sample(self.schedule.store_outage, "outage", number)
            return self._clock.now() < until

        return FlakyStore(store, fails)

    def gate(self) -> HumanGate | None:
        """Whoever answers questions, if anybody does."""
        if self.schedule.answers is None:
            return None
        return ScriptedGate(self.schedule.answers, clock=self._clock)

    def _duration(self, call: ExecutorCall) -> float:
        duration = _first_match(self.schedule.durations, (call.task.id, call.task.tool, ANY_TASK), 1.0)
        return self._sample(duration, "duration", call.task.id, call.number)

    def _sample(self, duration: Duration, *what: object) -> float:
        least, most = _bounds(duration)
        return least if least == most else round(least + (most - least) * self._chance(*what), 3)

    def _chance(self, *what: object) -> float:
        # Seeded by words, so that one draw never shifts another.
        return Random("/".join(map(str, (self.seed, *what)))).random()


class _FaultyProvider:
    """Stands before a provider."""

    def __init__(self, provider: AlternativeProvider, faults: RunFaults) -> None:
        self.name = provider.name
        self._provider = provider
        self._faults = faults
        self._requests = 0

    def estimate(self, request: ReplanRequest) -> Usage:
        """What the provider estimates, if it does."""
        estimate = getattr(self._provider, "estimate", None)
        return Usage() if estimate is None else estimate(request)

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """What the provider proposes, unless something goes wrong."""
        self._requests += 1
        step = self._faults.provider_step(self.name, self._requests)
        if step is not None and step.error is not None:
            raise step.error
        if step is not None:
            await anyio.sleep_forever()
        return await self._provider.propose(request)


def synthetic_outputs(plan: Plan) -> JsonObject:
    """Outputs that have what the arguments of other tasks look for in them; the values are made up.

    Where `${build.output.path}` stands in an argument, the output of `build` is `{"path": "build.path"}`.
    """
    outputs: JsonObject = {}
    for task in plan.tasks:
        for task_id, path in _OUTPUT_REFERENCE.findall(str(task.arguments)):
            steps = path.split(".")[1:]
            if not steps:
                continue
            inner = outputs.setdefault(task_id, {})
            for step in steps[:-1]:
                inner = inner.setdefault(step, {}) if isinstance(inner, dict) else None
            if isinstance(inner, dict):
                inner.setdefault(steps[-1], f"{task_id}{path}")
    return outputs


def _first_match(mapping: Mapping[str, T], keys: Sequence[str | None], default: T) -> T:
    """What a mapping has under the first of some keys that it has."""
    for key in keys:
        if key is not None and key in mapping:
            return mapping[key]
    return default


def _bounds(duration: Duration) -> tuple[float, float]:
    return duration if isinstance(duration, tuple) else (duration, duration)
