"""Exporters, the plugins that send spans, metrics or records of runs to another system; tracer and metrics of an engine.

OpenTelemetry is loaded where a provider for spans or metrics is configured.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final, TypeVar

from replanning import journal
from replanning.environment import Clock
from replanning.errors import Problem, SettingsError
from replanning.plan.types import RunId
from replanning.plugins import plugin_name
from replanning.secrets import Redactor
from replanning.telemetry import names
from replanning.telemetry.tracer import NOOP_TRACER, RunTracer, WatchedRun
from replanning.version import __version__

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, MeterProvider
    from opentelemetry.trace import TracerProvider

ProviderT = TypeVar("ProviderT")


@dataclass(frozen=True, slots=True, eq=False)
class ExporterContext:
    """Store and clock of the engine that an exporter is attached to.

    Attributes:
        store: the journals of the runs; for a resumed run, the records before the resume are found
            only here.
        clock: the clock of the runs.
    """

    store: journal.RunStore
    clock: Clock


class Exporter(ABC):
    """Sends the records of runs to another system.

    Attributes:
        name: its registered name, used in settings.
    """

    name: ClassVar[str]

    def tracer_provider(self) -> TracerProvider | None:
        """Return the tracer provider of an exporter of spans."""
        return None

    def meter_provider(self) -> MeterProvider | None:
        """Return the meter provider of an exporter of metrics."""
        return None

    def attach(self, exporter_context: ExporterContext) -> None:
        """Prepare for use by an engine; called once per engine, before any run is opened."""

    async def export(self, run: RunId, record: journal.Record) -> None:
        """Send a committed record. An `Exception` is contained, and the first is told in `RunResult.problems`."""

    async def aclose(self) -> None:
        """Send pending records and close connections."""


_DURATION_BUCKETS: Final = (0.0001, 0.001, 0.005, 0.025, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60)
_CONFIDENCE_BUCKETS: Final = tuple(tenth / 10 for tenth in range(1, 10))

_OUTCOME_ATTRIBUTES: Final[dict[type[journal.RecordBody], dict[str, str]]] = {
    journal.AttemptSucceeded: {names.ATTEMPT_OUTCOME: "succeeded"},
    journal.AttemptFailed: {names.ATTEMPT_OUTCOME: "failed"},
    journal.AttemptTimedOut: {names.ATTEMPT_OUTCOME: "timed-out"},
    journal.AttemptInterrupted: {names.ATTEMPT_OUTCOME: "interrupted"},
}


class Instruments:
    """Counters and histograms of replans, decisions, their latency, confidence and attempts.

    Args:
        meter: creates the instruments.
    """

    def __init__(self, meter: Meter) -> None:
        self._replans = meter.create_counter(
            names.REPLANS_METRIC, "{replan}", "Replans, by kind of the first trigger"
        )
        self._decisions = meter.create_counter(
            names.DECISIONS_METRIC, "{decision}", "Decisions, by kind and by kind of decider"
        )
        self._attempts = meter.create_counter(
            names.ATTEMPTS_METRIC, "{attempt}", "Attempts at tasks, by outcome"
        )
        self._duration = meter.create_histogram(
            names.DURATION_METRIC,
            "s",
            "Time from taking up triggers to the engine's decision",
            explicit_bucket_boundaries_advisory=_DURATION_BUCKETS,
        )
        self._confidence = meter.create_histogram(
            names.CONFIDENCE_METRIC,
            "1",
            "Confidence in alternatives, by their source",
            explicit_bucket_boundaries_advisory=_CONFIDENCE_BUCKETS,
        )

    def watch(self, run: WatchedRun) -> None:
        """Measure a run from now on."""
        subscribe = run.journal.subscribe
        subscribe(self._on_attempt, list(_OUTCOME_ATTRIBUTES))
        subscribe(self._on_considered, [journal.AlternativesConsidered])
        subscribe(lambda record: self._on_decided(record, run), [journal.DecisionMade])

    def _on_attempt(self, record: journal.Record) -> None:
        self._attempts.add(1, _OUTCOME_ATTRIBUTES[type(record.body)])

    def _on_considered(self, record: journal.Record) -> None:
        assert isinstance(record.body, journal.AlternativesConsidered)
        for candidate in record.body.candidates:
            if candidate.score is not None:
                self._confidence.record(
                    candidate.score.total, {names.PROVIDER_NAME: candidate.alternative.source}
                )

    def _on_decided(self, record: journal.Record, run: WatchedRun) -> None:
        body = record.body
        assert isinstance(body, journal.DecisionMade)
        by = body.by.partition(":")[
            0
        ]  # without the person's name: each name would be a series of its own
        self._decisions.add(1, {names.DECISION: body.decision, names.DECISION_BY: by})
        if by in ("policy", "observe"):  # a person's answer belongs to the replan that asked
            first = run.ledger.triggers.get(body.triggers[0]) if body.triggers else None
            self._replans.add(1, {names.TRIGGER_KINDS: first.kind if first is not None else "none"})
            self._duration.record(body.duration)


@dataclass(slots=True, eq=False)
class Telemetry:
    """Tracer and instruments for runs, from the given providers or else from the global ones.

    The global providers are looked up when a run is opened, so they may be configured after the
    engine is made.

    Args:
        tracer_provider: supplies the tracer.
        meter_provider: supplies the meter.
    """

    tracer_provider: TracerProvider | None = None
    meter_provider: MeterProvider | None = None
    _instruments: tuple[MeterProvider, Instruments] | None = field(
        default=None, init=False, repr=False
    )

    def run_tracer(
        self,
        run: RunId,
        clock: Clock,
        redactor: Redactor,
        *,
        capture_content: bool,
        records: Sequence[journal.Record] = (),
    ) -> RunTracer:
        """Return the tracer of a run, resumed if it has records, or `NOOP_TRACER` if no provider is configured."""
        from opentelemetry import trace as api

        provider = self.tracer_provider or api.get_tracer_provider()
        # Until the SDK is configured, the API supplies a provider whose spans are discarded.
        if type(provider).__module__.startswith("opentelemetry.trace"):
            return NOOP_TRACER
        tracer = provider.get_tracer(names.INSTRUMENTATION_SCOPE, __version__)
        if isinstance(tracer, api.NoOpTracer):
            return NOOP_TRACER
        from replanning.telemetry.spans import OTelRunTracer, SpanWriter

        writer = SpanWriter(tracer, clock, redactor, capture_content=capture_content)
        return OTelRunTracer(writer, run, records)

    def watch_metrics(self, run: WatchedRun) -> None:
        """Measure a run from now on, if a meter provider is configured."""
        from opentelemetry import metrics

        provider = self.meter_provider or metrics.get_meter_provider()
        if type(provider).__module__.startswith("opentelemetry.metrics"):
            return
        if self._instruments is None or self._instruments[0] is not provider:
            self._instruments = (
                provider,
                Instruments(provider.get_meter(names.INSTRUMENTATION_SCOPE, __version__)),
            )
        self._instruments[1].watch(run)


def build_telemetry(
    exporters: Sequence[Exporter],
    tracer_provider: TracerProvider | None,
    meter_provider: MeterProvider | None,
) -> Telemetry:
    """Return the telemetry of an engine, from its arguments and its exporters.

    Raises:
        SettingsError: more than one provider is given for spans, or for metrics.
    """
    tracers = [("the argument tracer_provider", tracer_provider)]
    tracers += [
        (f"the exporter {plugin_name(exporter)!r}", exporter.tracer_provider())
        for exporter in exporters
    ]
    meters = [("the argument meter_provider", meter_provider)]
    meters += [
        (f"the exporter {plugin_name(exporter)!r}", exporter.meter_provider())
        for exporter in exporters
    ]
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
