"""Entries of a history, metrics of its replans (counts, success rate, times, usage), and calibration of confidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from replanning.changes import PlanChange
from replanning.journal.records import Candidate, DecisionKind, Trigger, Usage
from replanning.plan.tasks import Goal
from replanning.plan.types import QuestionId, ReplanId

ReplanOutcome = Literal["success", "failure", "unknown"]


@dataclass(frozen=True, slots=True)
class QuestionEntry:
    """A question to a person, and the answer.

    Attributes:
        text: the question.
        rule: the rule that required a person.
        verdict: `approve`, `reject` or `modify`; `withdrawn` if the plan moved on; `abort`, `skip`, `continue`
            or `pause` at the deadline; empty while the question is open.
        by: the person who answered.
    """

    id: QuestionId
    text: str
    at: float
    rule: str = ""
    verdict: str = ""
    by: str = ""
    comment: str = ""
    answered_at: float | None = None


@dataclass(frozen=True, slots=True)
class ReplanEvent:
    """A replan: its triggers, alternatives, decision, changes and outcome.

    Attributes:
        at: the time when alternatives were considered, in seconds since the epoch.
        triggers: its triggers; several if they concern the same tasks.
        all_candidates: every proposed alternative in the order of rank; see `candidates` and `rejected`.
        notes: notes of providers and refused answers.
        decision: the final decision; None if the process died before one was made.
        rule: the rule behind the decision.
        by: the decider: `policy`, `observe`, `timeout`, `person:NAME`.
        chosen: the alternative that the decision is about, if any.
        changes: the applied changes.
        before: the revision to which they were applied; None if nothing was applied.
        after: the revision that they made; None if nothing was applied.
        outcome: `success` or `failure` of the applied changes; `unknown` until it shows.
        duration: seconds from taking up the triggers to the decision, without waiting for a person.
        decided_at: the time of the last decision; None if the process died before one was made.
        question: the question to a person about it.
        spent: usage of providers for it, such as calls of language models.
    """

    replan: ReplanId
    at: float
    triggers: tuple[Trigger, ...] = ()
    all_candidates: tuple[Candidate, ...] = ()
    notes: tuple[str, ...] = ()
    decision: DecisionKind | None = None
    rule: str = ""
    reason: str = ""
    by: str = ""
    chosen: Candidate | None = None
    changes: tuple[PlanChange, ...] = ()
    before: int | None = None
    after: int | None = None
    outcome: ReplanOutcome = "unknown"
    duration: float = 0.0
    question: QuestionEntry | None = None
    spent: Usage = field(default_factory=Usage)
    decided_at: float | None = None

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The alternatives that could be chosen, best first, with their scores."""
        return tuple(candidate for candidate in self.all_candidates if not candidate.rejected)

    @property
    def rejected(self) -> tuple[Candidate, ...]:
        """The rejected alternatives, each with the reason."""
        return tuple(candidate for candidate in self.all_candidates if candidate.rejected)

    @property
    def executed(self) -> bool:
        """True if changes were applied to the plan."""
        return self.after is not None

    @property
    def waited(self) -> float:
        """Seconds from the question to a person to its answer; 0 while it is open."""
        asked = self.question
        return 0.0 if asked is None or asked.answered_at is None else asked.answered_at - asked.at

    @property
    def trigger_kinds(self) -> tuple[str, ...]:
        """The distinct kinds of its triggers."""
        return tuple(dict.fromkeys(trigger.kind for trigger in self.triggers))


@dataclass(frozen=True, slots=True)
class PlanEdit:
    """Changes by hand, which make a revision without a replan."""

    at: float
    before: int
    after: int
    changes: tuple[PlanChange, ...]
    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class GoalEdit:
    """A change of the goal; `changed` names the fields that differ."""

    at: float
    goal: Goal
    changed: tuple[str, ...]
    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class DroppedTrigger:
    """A trigger that was dropped, with the reason."""

    at: float
    trigger: Trigger
    reason: str


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
        waiting: seconds in which an answer of a person was open; those in which several were count once.
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
    waiting = end = 0.0
    for start, stop in sorted(
        (q.at, q.answered_at) for e in events if (q := e.question) and q.answered_at is not None
    ):
        waiting += max(0.0, stop - max(start, end))
        end = max(stop, end)
    return ReplanMetrics(
        replans=len(events),
        executed=sum(event.executed for event in events),
        succeeded=sum(event.outcome == "success" for event in events),
        failed=sum(event.outcome == "failure" for event in events),
        asked=sum(event.question is not None for event in events),
        by_trigger=dict(Counter(kind for event in events for kind in event.trigger_kinds)),
        by_decision=dict(Counter(event.decision or UNDECIDED for event in events)),
        deciding=sum(event.duration for event in events),
        waiting=waiting,
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


def calibrate(
    events: Iterable[ReplanEvent], *, of: Prediction = "total", bins: int = 10
) -> Calibration:
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
        predicted = (
            claimed if of == "claimed" else None if score is None else float(getattr(score, of))
        )
        if predicted is not None:
            pairs.append((predicted, event.outcome == "success"))
    if not pairs:
        return Calibration(0, None, ())
    per_bin: dict[int, list[tuple[float, bool]]] = {}
    for predicted, came_true in pairs:
        per_bin.setdefault(min(int(predicted * bins), bins - 1), []).append((predicted, came_true))
    found = tuple(
        Bin(n / bins, (n + 1) / bins, len(inside), *_means(inside))
        for n, inside in sorted(per_bin.items())
    )
    brier = sum((predicted - came_true) ** 2 for predicted, came_true in pairs) / len(pairs)
    return Calibration(len(pairs), brier, found, *_means(pairs))


def _means(pairs: Sequence[tuple[float, bool]]) -> tuple[float, float]:
    """Return the mean prediction and the share that came true."""
    count = len(pairs)
    return sum(predicted for predicted, _ in pairs) / count, sum(
        came_true for _, came_true in pairs
    ) / count


def calibrate_sources(events: Iterable[ReplanEvent], *, bins: int = 10) -> dict[str, Calibration]:
    """Return the calibration of the confidence that each source claims, for sources with known outcomes."""
    sources: dict[str, list[ReplanEvent]] = {}
    for event in events:
        if event.chosen is not None:
            sources.setdefault(event.chosen.alternative.source, []).append(event)
    found = {
        source: calibrate(sources[source], of="claimed", bins=bins) for source in sorted(sources)
    }
    return {source: calibration for source, calibration in found.items() if calibration.count}
