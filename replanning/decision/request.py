"""What can be plugged in: clock, providers, detectors, gates, stores, exporters."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from replanning.changes import Alternative, PlanChange
from replanning.environment import Clock
from replanning.journal.observations import Observation, Usage
from replanning.journal.records import Candidate, QuestionVerdict, Record, RecordBody
from replanning.journal.store import RunStore
from replanning.journal.triggers import Trigger
from replanning.live.view import PlanView
from replanning.llm.completions import UNMETERED, Meter
from replanning.plan.types import QuestionId, RunId, TaskId

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider


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
