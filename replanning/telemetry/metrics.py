"""Metrics of runs, measured from their records."""

from __future__ import annotations

from typing import Final

from opentelemetry.metrics import Meter

from replanning.journal.records import (
    AlternativesConsidered,
    AttemptFailed,
    AttemptInterrupted,
    AttemptSucceeded,
    AttemptTimedOut,
    DecisionMade,
    Record,
    RecordBody,
)
from replanning.telemetry import names
from replanning.telemetry.tracer import WatchedRun

_DURATION_BUCKETS: Final = (0.0001, 0.001, 0.005, 0.025, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60)
_CONFIDENCE_BUCKETS: Final = tuple(tenth / 10 for tenth in range(1, 10))

_OUTCOME_ATTRIBUTES: Final[dict[type[RecordBody], dict[str, str]]] = {
    AttemptSucceeded: {names.ATTEMPT_OUTCOME: "succeeded"},
    AttemptFailed: {names.ATTEMPT_OUTCOME: "failed"},
    AttemptTimedOut: {names.ATTEMPT_OUTCOME: "timed-out"},
    AttemptInterrupted: {names.ATTEMPT_OUTCOME: "interrupted"},
}


class Instruments:
    """Counters and histograms of replans, decisions, their latency, confidence and attempts.

    Args:
        meter: creates the instruments.
    """

    def __init__(self, meter: Meter) -> None:
        self._replans = meter.create_counter(names.REPLANS_METRIC, "{replan}", "Replans, by kind of the first trigger")
        self._decisions = meter.create_counter(
            names.DECISIONS_METRIC, "{decision}", "Decisions, by kind and by kind of decider"
        )
        self._attempts = meter.create_counter(names.ATTEMPTS_METRIC, "{attempt}", "Attempts at tasks, by outcome")
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
        observers = run.observers
        for kind in _OUTCOME_ATTRIBUTES:
            observers.setdefault(kind, []).append(self._on_attempt)
        observers.setdefault(AlternativesConsidered, []).append(self._on_considered)
        observers.setdefault(DecisionMade, []).append(lambda record: self._on_decided(record, run))

    def _on_attempt(self, record: Record) -> None:
        self._attempts.add(1, _OUTCOME_ATTRIBUTES[type(record.body)])

    def _on_considered(self, record: Record) -> None:
        assert isinstance(record.body, AlternativesConsidered)
        for candidate in record.body.candidates:
            if candidate.score is not None:
                self._confidence.record(candidate.score.total, {names.PROVIDER_NAME: candidate.alternative.source})

    def _on_decided(self, record: Record, run: WatchedRun) -> None:
        body = record.body
        assert isinstance(body, DecisionMade)
        by = body.by.partition(":")[0]  # without the person's name: each name would be a series of its own
        self._decisions.add(1, {names.DECISION: body.decision, names.DECISION_BY: by})
        if by in ("policy", "observe"):  # a person's answer belongs to the replan that asked
            first = run.ledger.triggers.get(body.triggers[0]) if body.triggers else None
            self._replans.add(1, {names.TRIGGER_KINDS: first.kind if first is not None else "none"})
            self._duration.record(body.duration)
