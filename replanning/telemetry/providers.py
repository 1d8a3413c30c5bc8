"""Tracers and instruments of runs; OpenTelemetry is loaded when the first run is opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from replanning import journal
from replanning.environment import Clock
from replanning.plan.types import RunId
from replanning.secrets import Redactor
from replanning.telemetry import names
from replanning.telemetry.tracer import NOOP_TRACER, RunTracer, WatchedRun
from replanning.version import __version__

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, MeterProvider
    from opentelemetry.trace import TracerProvider

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
                source = {names.PROVIDER_NAME: candidate.alternative.source}
                self._confidence.record(candidate.score.total, source)

    def _on_decided(self, record: journal.Record, run: WatchedRun) -> None:
        body = record.body
        assert isinstance(body, journal.DecisionMade)
        # Without the person's name: each name would be a series of its own.
        by = body.by.partition(":")[0]
        self._decisions.add(1, {names.DECISION: body.decision, names.DECISION_BY: by})
        # A person's answer belongs to the replan that asked.
        if by not in ("policy", "observe"):
            return
        kind = "none"
        if body.triggers and body.triggers[0] in run.ledger.triggers:
            kind = run.ledger.triggers[body.triggers[0]].kind
        self._replans.add(1, {names.TRIGGER_KINDS: kind})
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
        """Return the tracer of a run, resumed if it has records.

        It is `NOOP_TRACER` if no provider is configured.
        """
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
            meter = provider.get_meter(names.INSTRUMENTATION_SCOPE, __version__)
            self._instruments = (provider, Instruments(meter))
        self._instruments[1].watch(run)
