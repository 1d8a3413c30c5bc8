"""Tracing and metrics of runs: their interface, and where they go; OpenTelemetry is loaded where a provider is configured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from replanning.changes import PlanChange
from replanning.decision.ledger import Ledger
from replanning.environment import Clock
from replanning.errors import Problem, SettingsError
from replanning.journal.records import Record, RecordBody, RunEnded, Trigger
from replanning.live.plan import LivePlan
from replanning.llm.completions import Completion, LLMCall
from replanning.plan.redaction import Redactor
from replanning.plan.types import AttemptId, ReplanId, RunId
from replanning.telemetry.exporter import Exporter
from replanning.telemetry.names import INSTRUMENTATION_SCOPE
from replanning.version import __version__

if TYPE_CHECKING:
    from contextvars import Token

    from opentelemetry.context import Context


ReportProposals = Callable[[int, bool], None]
"""Called with the number of alternatives a provider proposed, and with True if the provider was cut off."""

ReportCompletion = Callable[[Completion], None]
"""Called with the completion of a language model."""


class WatchedRun(Protocol):
    """The parts of a run that tracing and metrics read.

    Attributes:
        live: the plan as it runs.
        ledger: the triggers, open questions and budget of the run.
        observers: called with each record of a kind after it took effect.
        end: the last record of the run, once it has ended.
    """

    live: LivePlan
    ledger: Ledger
    observers: dict[type[RecordBody], list[Callable[[Record], None]]]
    end: RunEnded | None

    @property
    def store_available(self) -> bool:
        """True while the journal takes records."""
        ...

    def commit_or_defer(self, body: RecordBody) -> None:
        """Commit a record, or keep it until the store works again."""
        ...


class RunTracer:
    """Tracing hooks of a run. These do nothing; `OTelRunTracer` in `replanning.telemetry.spans` writes spans."""

    @property
    def traceparent(self) -> str | None:
        """The trace context as a W3C `traceparent` header; None without a trace."""
        return None

    def watch(self, run: WatchedRun) -> None:
        """Follow the records of a run from now on."""

    def attach_attempt(self, attempt: AttemptId) -> Token[Context] | None:
        """Make the span of an attempt current, so that spans of its body become children; None without a span."""
        return None

    def detach(self, token: Token[Context]) -> None:
        """Restore the span that was current before `attach_attempt`."""

    def replan_span(self, replan: ReplanId, triggers: Sequence[Trigger]) -> AbstractContextManager[None]:
        """Trace a replan; an open question keeps its span open beyond the block."""
        return nullcontext()

    def provider_span(self, name: str) -> AbstractContextManager[ReportProposals]:
        """Trace a request to a provider; spans that it opens itself become children."""
        return nullcontext(lambda proposed, late: None)

    def chat_span(self, call: LLMCall) -> AbstractContextManager[ReportCompletion]:
        """Trace a call of a language model as a child of the current span."""
        return nullcontext(lambda completion: None)

    def scoring_span(self) -> AbstractContextManager[None]:
        """Trace the checks, scores and ranking of the proposals."""
        return nullcontext()

    def apply_span(self, changes: Sequence[PlanChange], by: str, replan: str | None) -> AbstractContextManager[None]:
        """Trace the application of changes, as part of a replan or, without one, of the run."""
        return nullcontext()

    def close(self, failure: BaseException | None) -> None:
        """End the span of the run and all spans that are still open."""


NOOP_TRACER: Final = RunTracer()
"""The tracer of every run without tracing."""


if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from replanning.telemetry.metrics import Instruments


ProviderT = TypeVar("ProviderT")


class Telemetry:
    """Tracer and instruments for runs, from the given providers or else from the global ones.

    The global providers are looked up when a run is opened, so they may be configured after the engine is made.

    Args:
        tracer_provider: supplies the tracer.
        meter_provider: supplies the meter.
    """

    def __init__(
        self, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        self._tracer_provider = tracer_provider
        self._meter_provider = meter_provider
        self._instruments: tuple[MeterProvider, Instruments] | None = None

    def run_tracer(
        self, run: RunId, clock: Clock, redactor: Redactor, *, capture_content: bool, trace: str | None, resumed: bool
    ) -> RunTracer:
        """Return the tracer of a run, or `NOOP_TRACER` if no provider is configured."""
        from opentelemetry import trace as api

        provider = self._tracer_provider or api.get_tracer_provider()
        # Until the SDK is configured, the API supplies a provider whose spans are discarded.
        if type(provider).__module__.startswith("opentelemetry.trace"):
            return NOOP_TRACER
        tracer = provider.get_tracer(INSTRUMENTATION_SCOPE, __version__)
        if isinstance(tracer, api.NoOpTracer):
            return NOOP_TRACER
        from replanning.telemetry.spans import OTelRunTracer, SpanWriter

        writer = SpanWriter(tracer, clock, redactor, capture_content=capture_content)
        return OTelRunTracer(writer, run, trace=trace, resumed=resumed)

    def watch_metrics(self, run: WatchedRun) -> None:
        """Measure a run from now on, if a meter provider is configured."""
        from opentelemetry import metrics

        provider = self._meter_provider or metrics.get_meter_provider()
        if type(provider).__module__.startswith("opentelemetry.metrics"):
            return
        if self._instruments is None or self._instruments[0] is not provider:
            from replanning.telemetry.metrics import Instruments

            self._instruments = provider, Instruments(provider.get_meter(INSTRUMENTATION_SCOPE, __version__))
        self._instruments[1].watch(run)


def build_telemetry(
    exporters: Sequence[Exporter], tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None
) -> Telemetry:
    """Return the telemetry of an engine, from its arguments and its exporters.

    Raises:
        SettingsError: more than one provider is given for spans, or for metrics.
    """
    tracers = [("the argument tracer_provider", tracer_provider)]
    tracers += [(f"the exporter {exporter.name!r}", exporter.tracer_provider()) for exporter in exporters]
    meters = [("the argument meter_provider", meter_provider)]
    meters += [(f"the exporter {exporter.name!r}", exporter.meter_provider()) for exporter in exporters]
    problems: list[Problem] = []
    telemetry = Telemetry(
        _single_provider("spans", tracers, "a span processor", problems),
        _single_provider("metrics", meters, "a metric reader", problems),
    )
    if problems:
        raise SettingsError(problems)
    return telemetry


def _single_provider(
    signal: str, sources: Sequence[tuple[str, ProviderT | None]], part: str, problems: list[Problem]
) -> ProviderT | None:
    """Return the only provider among the sources; add a problem if there are several different ones."""
    providers = [(source, provider) for source, provider in sources if provider is not None]
    if any(provider is not providers[0][1] for _, provider in providers):
        places = " and ".join(source for source, _ in providers)
        advice = f"pass only one of them, and add {part} to it for each further destination"
        problems.append(Problem("exporters", f"{signal} would be sent by {places}; {advice}"))
    return providers[0][1] if providers else None
