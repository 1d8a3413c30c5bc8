"""Metrics of replans: counts, success rate, times, usage, and calibration of confidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from replanning.history.events import ReplanEvent
from replanning.journal.records import Usage

UNDECIDED = "undecided"
"""Key in `by_decision` of replans without a decision, because the process died."""


@dataclass(frozen=True, slots=True)
class ReplanMetrics:
    """Counts, times and usage of replans.

    Attributes:
        replans: number of replans.
        executed: number of replans that changed the plan.
        succeeded: number of executed replans that worked.
        failed: number of executed replans that did not work.
        asked: number of replans about which a person was asked.
        by_trigger: replans by kind of trigger; a replan with triggers of two kinds counts under both.
        by_decision: replans by final decision.
        deciding: seconds spent on decisions.
        waiting: seconds between questions to people and their answers.
        edits: number of edits by hand, which are not replans.
        dropped: number of dropped triggers.
        spent: usage of providers.
    """

    replans: int = 0
    executed: int = 0
    succeeded: int = 0
    failed: int = 0
    asked: int = 0
    by_trigger: Mapping[str, int] = field(default_factory=dict)
    by_decision: Mapping[str, int] = field(default_factory=dict)
    deciding: float = 0.0
    waiting: float = 0.0
    edits: int = 0
    dropped: int = 0
    spent: Usage = field(default_factory=Usage)

    @property
    def success_rate(self) -> float | None:
        """Share of successes among the executed replans with a known outcome; None without any."""
        known = self.succeeded + self.failed
        return self.succeeded / known if known else None

    def __add__(self, other: ReplanMetrics) -> ReplanMetrics:
        sums: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            mine, others = getattr(self, name), getattr(other, name)
            if isinstance(mine, Mapping):
                both = {key: mine.get(key, 0) + others.get(key, 0) for key in (*mine, *others)}
                sums[name] = {key: number for key, number in both.items() if number}
            else:
                sums[name] = mine + others
        return ReplanMetrics(**sums)


def compute_metrics(events: Iterable[ReplanEvent]) -> ReplanMetrics:
    """Return the metrics of some replans, without edits and dropped triggers."""
    events = tuple(events)
    return ReplanMetrics(
        replans=len(events),
        executed=sum(event.executed for event in events),
        succeeded=sum(event.outcome == "success" for event in events),
        failed=sum(event.outcome == "failure" for event in events),
        asked=sum(event.question is not None for event in events),
        by_trigger=dict(Counter(kind for event in events for kind in event.trigger_kinds)),
        by_decision=dict(Counter(event.decision or UNDECIDED for event in events)),
        deciding=sum(event.duration for event in events),
        waiting=sum(event.waited for event in events),
        spent=sum((event.spent for event in events), Usage()),
    )


class Bin(NamedTuple):
    """Predictions from `low` up to `high`: their number, their mean, and the share that came true."""

    low: float
    high: float
    replans: int
    predicted: float
    succeeded: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Calibration of confidence: predictions compared with outcomes.

    Attributes:
        count: number of executed replans with a score and a known outcome.
        brier: mean squared distance of prediction and outcome: 0 is perfect, 0.25 results from always predicting 0.5
            (Brier, *Verification of forecasts expressed in terms of probability*, 1950); None without data.
        bins: reliability per bin of predictions, without empty bins.
        predicted: the mean prediction; None without data.
        succeeded: the share that came true; None without data.
    """

    count: int
    brier: float | None
    bins: tuple[Bin, ...]
    predicted: float | None = None
    succeeded: float | None = None


Prediction = Literal["total", "self_assessment", "claimed"]
"""Value used as the prediction: the total score, the self-assessment in it, or the confidence the source claimed."""


def calibrate(events: Iterable[ReplanEvent], *, of: Prediction = "total", bins: int = 10) -> Calibration:
    """Compare predictions with outcomes.

    Args:
        events: the replans; those without a known outcome are ignored.
        of: the value used as the prediction.
        bins: number of equal bins from 0 to 1.
    """
    pairs: list[tuple[float, bool]] = []
    for event in events:
        if event.chosen is None or event.outcome == "unknown":
            continue
        score = event.chosen.score
        claimed = event.chosen.alternative.confidence
        predicted = claimed if of == "claimed" else None if score is None else float(getattr(score, of))
        if predicted is not None:
            pairs.append((predicted, event.outcome == "success"))
    if not pairs:
        return Calibration(0, None, ())
    per_bin: dict[int, list[tuple[float, bool]]] = {}
    for predicted, came_true in pairs:
        per_bin.setdefault(min(int(predicted * bins), bins - 1), []).append((predicted, came_true))
    found = tuple(Bin(n / bins, (n + 1) / bins, len(inside), *_means(inside)) for n, inside in sorted(per_bin.items()))
    brier = sum((predicted - came_true) ** 2 for predicted, came_true in pairs) / len(pairs)
    return Calibration(len(pairs), brier, found, *_means(pairs))


def _means(pairs: Sequence[tuple[float, bool]]) -> tuple[float, float]:
    """Return the mean prediction and the share that came true."""
    count = len(pairs)
    return sum(predicted for predicted, _ in pairs) / count, sum(came_true for _, came_true in pairs) / count


def calibrate_sources(events: Iterable[ReplanEvent], *, bins: int = 10) -> dict[str, Calibration]:
    """Return the calibration of the confidence that each source claims, for sources with known outcomes."""
    sources: dict[str, list[ReplanEvent]] = {}
    for event in events:
        if event.chosen is not None:
            sources.setdefault(event.chosen.alternative.source, []).append(event)
    found = {source: calibrate(sources[source], of="claimed", bins=bins) for source in sorted(sources)}
    return {source: calibration for source, calibration in found.items() if calibration.count}
