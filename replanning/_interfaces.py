"""What can be plugged in: clock, providers, detectors, gates, stores, exporters."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from replanning._changes import Alternative, PlanChange
from replanning._completions import UNMETERED, Meter
from replanning._ids import QuestionId, RunId, TaskId
from replanning._observations import Observation, Usage
from replanning._plan import JsonObject
from replanning._records import Candidate, QuestionVerdict, Record, RecordBody, RunStatus
from replanning._triggers import Trigger
from replanning._view import PlanView

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider


class Clock(Protocol):
    """Where time comes from."""

    def now(self) -> float:
        """Seconds since the epoch, UTC; never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return when this much time has passed."""
        ...


# Providers


@dataclass(frozen=True, slots=True, eq=False)
class ReplanRequest:
    """What a provider is asked.

    Attributes:
        triggers: why replanning is considered; several when their footprints overlap.
        view: the plan as it stands, pinned to a revision; copies nothing.
        max_alternatives: how many alternatives are wanted.
        tried_fingerprints: fingerprints of alternatives that were applied before for these lineages.
        deadline: when the answer comes too late, in seconds since the epoch.
        charge: tells the budget what was used beyond the estimate given by `estimate`.
        meter: accounts for the calls of language models, for `LLMOptions.meter`.
        history: what was considered, decided, answered and done in this run's last replans, oldest first.
        rejection_reason: why the engine would not consider an alternative as the plan stands; empty where it would.
        add_note: has something recorded beside the alternatives, such as what was left out and why.
    """

    triggers: tuple[Trigger, ...]
    view: PlanView
    max_alternatives: int
    deadline: float
    tried_fingerprints: frozenset[str] = frozenset()
    charge: Callable[[Usage], None] = field(default=lambda usage: None)
    meter: Meter = field(default=UNMETERED)
    history: tuple[RecordBody, ...] = ()
    rejection_reason: Callable[[Alternative], str] = field(default=lambda alternative: "")
    add_note: Callable[[str], None] = field(default=lambda text: None)


@runtime_checkable
class AlternativeProvider(Protocol):
    """Proposes ways on.

    A provider whose requests cost something may also have `estimate(request) -> Usage`, an upper bound that is
    reserved from the budget before it is asked. One that can make something of what others propose may have
    `async complete(request, alternative, reason) -> Alternative | None`: it is given what fits the plan but could not
    be carried out on the facts, with the reason, and gives it back with what was wrong put right; then it is one more
    alternative.
    """

    name: str

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """Alternatives for a request, best first; none when there is nothing to propose.

        Whatever it raises is contained and recorded; the other providers' answers are used.
        """
        ...


# Detectors


class TriggerDetector(Protocol):
    """Finds out whether an observation means that replanning should be considered.

    Detectors are plain synchronous functions of the observation and the plan as it stands after it; they keep
    nothing, so that replaying a journal gives the same triggers. A detector named in the settings is made
    without arguments, or by its class method `for_settings(settings)` where it has one.
    """

    name: str
    observes: tuple[type[RecordBody], ...]

    def detect(self, observation: Observation, view: PlanView) -> Iterable[Trigger]:
        """The triggers that follow from an observation; `id`, `at` and `revision` are filled in later."""
        ...


# People


@dataclass(frozen=True, slots=True)
class Question:
    """What a person is asked to decide.

    Attributes:
        id: by which the answer finds it, also from another process.
        text: why a decision is needed.
        candidates: what they may choose from, best first.
        diffs: for each candidate, the plan before and after as a unified diff.
        deadline: when it is decided without them, in seconds since the epoch.
        rejection_reason: why their last answer was not taken, where they are asked again.
    """

    id: QuestionId
    run: RunId
    text: str
    triggers: tuple[Trigger, ...]
    candidates: tuple[Candidate, ...]
    diffs: tuple[str, ...] = ()
    holds: tuple[TaskId, ...] = ()
    asked_at: float = 0.0
    deadline: float | None = None
    rejection_reason: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A person's decision: approve a candidate, reject all, or give changes of their own (`modify`)."""

    verdict: QuestionVerdict
    by: str = ""
    choice: int = 0
    changes: tuple[PlanChange, ...] = ()
    comment: str = ""


@runtime_checkable
class HumanGate(Protocol):
    """Asks a person."""

    async def ask(self, question: Question) -> Answer:
        """Put the question and wait for the answer; cancelled when it is no longer wanted.

        Whatever it raises is contained: the question stays open and can be answered from elsewhere.
        """
        ...

    async def remind(self, question: Question) -> None:
        """Say again that the question is open; called once, before its deadline."""
        ...


# Stores


class Lease(NamedTuple):
    """The right to write to a run's journal; its epoch is checked in every append."""

    run: RunId
    epoch: int
    owner: str


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run as a store lists it. `status` is `running` until the run has ended or stands still."""

    run: RunId
    name: str
    objective: str
    status: RunStatus | Literal["running"]
    created: float
    updated: float
    records: int
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class InboxMessage:
    """Something for the owner of a run, from elsewhere: an answer, a request to replan, or to pause."""

    kind: Literal["answer", "request", "pause"]
    at: float
    by: str
    payload: JsonObject
    id: int = 0


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """How one use of a tool ended; the evidence for past success.

    The outcome of an alternative is kept as that of its source, with a space before its name, as no tool has one.
    """

    tool: str
    capability: str | None
    succeeded: bool
    at: float


class RunStore(ABC):
    """Keeps journals. All methods are synchronous; `append` is one step with the state change it records.

    Attributes:
        durable: whether what was appended outlives the process.
    """

    durable: ClassVar[bool]

    @abstractmethod
    def create(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Make an empty journal and own it for `ttl` seconds from `at`.

        Raises:
            StoreError: there is such a run already, or the store does not work.
        """

    @abstractmethod
    def acquire(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Own an existing run: one that was released, whose lease has ended, or whose owner's process is gone.

        Raises:
            RunOwned: somebody else owns it.
            UnknownRun: there is no such run.
        """

    @abstractmethod
    def renew(self, lease: Lease, at: float, ttl: float) -> None:
        """Own the run for longer.

        Raises:
            LeaseLost: somebody else has taken it over.
        """

    @abstractmethod
    def release(self, lease: Lease) -> None:
        """Give the run up; nothing happens when it was lost before."""

    @abstractmethod
    def append(self, lease: Lease, record: Record) -> None:
        """Add a record; when this returns, it outlives the process (where the store is durable).

        Raises:
            LeaseLost: somebody else has taken the run over; nothing was written.
            StoreError: it could not be written.
        """

    @abstractmethod
    def read(self, run: RunId, after: int = 0) -> Iterator[Record]:
        """The records of a run in order, those with a number greater than `after`.

        A last record torn by a crash while it was written is left out.

        Raises:
            UnknownRun: there is no such run.
            JournalCorrupt: a record other than the last cannot be read.
        """

    @abstractmethod
    def runs(self) -> Sequence[RunInfo]:
        """All runs, the newest first."""

    @abstractmethod
    def post(self, run: RunId, message: InboxMessage) -> None:
        """Leave a message for whoever owns the run, now or later.

        Raises:
            UnknownRun: there is no such run.
        """

    @abstractmethod
    def inbox(self, run: RunId) -> Sequence[InboxMessage]:
        """The messages that have not been discarded, oldest first, with their ids."""

    @abstractmethod
    def discard(self, lease: Lease, messages: Sequence[int]) -> None:
        """Forget messages that have been dealt with.

        Raises:
            LeaseLost: somebody else has taken the run over.
        """

    @abstractmethod
    def add_outcomes(self, outcomes: Sequence[ToolOutcome]) -> None:
        """Remember how uses of tools ended."""

    @abstractmethod
    def outcomes(
        self, *, tool: str | None = None, capability: str | None = None, limit: int = 50
    ) -> Sequence[ToolOutcome]:
        """The last outcomes of a tool, or of a capability, across runs, the newest first."""

    def close(self) -> None:
        """Let go of files and connections."""


# Exporters


@dataclass(frozen=True, slots=True, eq=False)
class ExporterContext:
    """Where an exporter finds itself.

    Attributes:
        store: keeps the journals of the runs. Of a run that is resumed, an exporter is told what happens from then on;
            what was before, it finds here.
        clock: the time of the runs.
    """

    store: RunStore
    clock: Clock


class Exporter(ABC):
    """Sends elsewhere what happens in runs.

    Attributes:
        name: under which it is registered and named in settings.
    """

    name: ClassVar[str]

    def tracer_provider(self) -> TracerProvider | None:
        """Where spans go, for an exporter of spans."""
        return None

    def meter_provider(self) -> MeterProvider | None:
        """Where metrics go, for an exporter of metrics."""
        return None

    def attach(self, exporter_context: ExporterContext) -> None:
        """Take note of where this is used; called once for each engine, before any run is opened."""

    async def export(self, run: RunId, record: Record) -> None:
        """Send a record, after it was committed. What this raises is contained and recorded."""

    async def aclose(self) -> None:
        """Send what is left and let go of connections."""


def validate_work(work: object) -> None:
    """Refuse what is no work before anything runs: afterwards every task would fail of it.

    A lambda, and a function that says that it returns something to be awaited, are taken at their word.

    Raises:
        TypeError: it cannot be called, or is a function that is not async.
    """
    function = inspect.unwrap(work) if callable(work) else None
    while isinstance(function, partial):
        function = inspect.unwrap(function.func)
    if function is None:
        raise TypeError(f"work is {work!r}; expected an async function of a task and its context")
    if not inspect.isroutine(function):
        function = getattr(type(function), "__call__", function)  # noqa: B004 # what a call would use
    function = inspect.unwrap(getattr(function, "__func__", function))
    returned = str(getattr(function, "__annotations__", {}).get("return", ""))
    told = any(word in returned for word in ("Awaitable", "Coroutine", "Future"))
    if inspect.isfunction(function) and not (inspect.iscoroutinefunction(function) or told or _is_lambda(function)):
        raise TypeError(
            f"work is {function.__qualname__!r}, which is not async; write `async def`, and run what blocks with"
            " `await anyio.to_thread.run_sync(…)`"
        )


def _is_lambda(function: Callable[..., object]) -> bool:
    return function.__name__ == "<lambda>"
