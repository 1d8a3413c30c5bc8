"""Entries of a history, metrics of its replans, and calibration of confidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from replanning.changes import PlanChange, SkipTask
from replanning.journal.records import (
    Candidate,
    DecisionKind,
    TaskFailed,
    Trigger,
    Usage,
    normalised_cause,
)
from replanning.plan.elements import FOR_EACH, template_of
from replanning.plan.messages import spoken_id
from replanning.plan.tasks import Goal
from replanning.plan.types import JsonObject, QuestionId, ReplanId, TaskId

ReplanOutcome = Literal["success", "failure", "unknown"]


@dataclass(frozen=True, slots=True)
class QuestionEntry:
    """A question to a person, and the answer.

    Attributes:
        text: the question.
        rule: the rule that required a person.
        verdict: `approve`, `reject` or `modify`; `withdrawn` if the plan moved on; `abort`, `skip`,
            `continue` or `pause` at the deadline; empty while the question is open.
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

    It has many attributes because a replan is one row of a history: each later record fills in a
    few of them, and reports show them together.

    Attributes:
        at: the time when alternatives were considered, in seconds since the epoch.
        triggers: its triggers; several if they concern the same tasks.
        all_candidates: every proposed alternative in the order of rank; `candidates` and
            `rejected` are its two parts.
        notes: notes of providers and refused answers.
        decision: the final decision; None if the process died before one was made.
        rule: the rule behind the decision.
        by: the decider: `policy`, `observe`, `timeout`, `person:NAME`.
        chosen: the alternative that the decision is about, if any.
        changes: the applied changes.
        before: the revision to which they were applied; None if nothing was applied.
        after: the revision that they made; None if nothing was applied.
        outcome: `success` or `failure` of the applied changes; `unknown` until recorded.
        duration: seconds from taking up the triggers to the decision, without waiting for a person.
        decided_at: the time of the last decision; None if the process died before one was made.
        question: the question to a person about it.
        spent: usage of providers for it, such as calls of language models.
        outputs: for each failed task, the beginning of its unexpected output, as JSON.
    """

    replan: ReplanId
    at: float
    # Later records fill in the following, so it has a value that means "not yet".
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
    outputs: Mapping[TaskId, str] = field(default_factory=dict)

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
        if asked is None or asked.answered_at is None:
            return 0.0
        return asked.answered_at - asked.at

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
class ProgramNote:
    """A note that a program recorded with `run.note`."""

    at: float
    type: str
    data: JsonObject


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
"""Key in `by_decision` for replans whose process died before a decision."""


@dataclass(frozen=True, slots=True)
class ReplanMetrics:
    """Counts, times and usage of replans.

    Attributes:
        replans: number of replans.
        executed: number of replans that changed the plan.
        succeeded: number of executed replans that worked.
        failed: number of executed replans that did not work.
        asked: number of replans with a question to a person.
        by_trigger: replans by kind of trigger; one with triggers of two kinds counts under both.
        by_decision: replans by final decision.
        deciding: seconds spent on decisions.
        waiting: seconds in which at least one question to a person was open.
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
        # A share of nothing is unknown: 0 would say that all replans failed.
        if not known:
            return None
        return self.succeeded / known

    def __add__(self, other: ReplanMetrics) -> ReplanMetrics:
        sums = {}
        for name in self.__dataclass_fields__:
            mine = getattr(self, name)
            others = getattr(other, name)
            if not isinstance(mine, Mapping):
                sums[name] = mine + others
                continue
            # A `Counter` would drop the negative numbers by which evicted replans are recounted.
            counts = dict(mine)
            for key, number in others.items():
                counts[key] = counts.get(key, 0) + number
            sums[name] = {key: number for key, number in counts.items() if number}
        return ReplanMetrics(**sums)


def compute_metrics(events: Iterable[ReplanEvent]) -> ReplanMetrics:
    """Return the metrics of some replans, without edits and dropped triggers."""
    replans = executed = asked = 0
    outcomes: Counter[ReplanOutcome] = Counter()
    by_trigger: Counter[str] = Counter()
    by_decision: Counter[str] = Counter()
    durations = []
    spent = Usage()
    answered = []
    for event in events:
        replans += 1
        executed += event.executed
        outcomes[event.outcome] += 1
        by_trigger.update(event.trigger_kinds)
        decision = event.decision or UNDECIDED
        by_decision[decision] += 1
        durations.append(event.duration)
        spent += event.spent
        question = event.question
        if question is not None:
            asked += 1
            if question.answered_at is not None:
                answered.append((question.at, question.answered_at))

    # Overlapping waits count once, so only the time after `end` is added.
    waiting = end = 0.0
    for start, stop in sorted(answered):
        waiting += max(0.0, stop - max(start, end))
        end = max(stop, end)
    return ReplanMetrics(
        replans=replans,
        executed=executed,
        succeeded=outcomes["success"],
        failed=outcomes["failure"],
        asked=asked,
        by_trigger=dict(by_trigger),
        by_decision=dict(by_decision),
        deciding=sum(durations),
        waiting=waiting,
        spent=spent,
    )


class Bin(NamedTuple):
    """Predictions from `low` up to `high`: their number, mean, and the share that came true."""

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
        brier: mean squared distance of prediction and outcome: 0 is perfect, 0.25 results from
            always predicting 0.5 (Brier, *Verification of forecasts expressed in terms of
            probability*, 1950); None without data.
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
"""Value used as the prediction: the score, the self-assessment in it, or the source's own claim."""


def calibrate(
    events: Iterable[ReplanEvent], *, of: Prediction = "total", bins: int = 10
) -> Calibration:
    """Compare predictions with outcomes.

    Args:
        events: the replans; those without a known outcome are ignored.
        of: the value used as the prediction.
        bins: number of equal bins from 0 to 1.
    """
    pairs = []
    for event in events:
        if event.chosen is None or event.outcome == "unknown":
            continue
        predicted = _prediction(event.chosen, of)
        # A person's own changes have no score, and not every source claims a confidence.
        if predicted is not None:
            pairs.append((predicted, event.outcome == "success"))
    if not pairs:
        return Calibration(0, None, ())

    per_bin: dict[int, list[tuple[float, bool]]] = {}
    squares = []
    for predicted, came_true in pairs:
        # A prediction of 1 belongs to the last bin, which has no bin above it.
        number = min(int(predicted * bins), bins - 1)
        per_bin.setdefault(number, []).append((predicted, came_true))
        squares.append((predicted - came_true) ** 2)
    found = []
    for number, inside in sorted(per_bin.items()):
        low = number / bins
        high = (number + 1) / bins
        predicted, succeeded = _means(inside)
        found.append(Bin(low, high, len(inside), predicted, succeeded))
    count = len(pairs)
    brier = sum(squares) / count
    predicted, succeeded = _means(pairs)
    return Calibration(count, brier, tuple(found), predicted, succeeded)


def _prediction(chosen: Candidate, of: Prediction) -> float | None:
    if of == "claimed":
        return chosen.alternative.confidence
    if chosen.score is None:
        return None
    return float(getattr(chosen.score, of))


def _means(pairs: Sequence[tuple[float, bool]]) -> tuple[float, float]:
    """Return the mean prediction and the share that came true."""
    count = len(pairs)
    predicted = sum(pair[0] for pair in pairs)
    came_true = sum(pair[1] for pair in pairs)
    return predicted / count, came_true / count


def calibrate_sources(events: Iterable[ReplanEvent], *, bins: int = 10) -> dict[str, Calibration]:
    """Return the calibration of the confidence that each source claims.

    Sources without a known outcome are left out.
    """
    sources: dict[str, list[ReplanEvent]] = {}
    for event in events:
        if event.chosen is not None:
            sources.setdefault(event.chosen.alternative.source, []).append(event)
    calibrations = {}
    for source in sorted(sources):
        calibration = calibrate(sources[source], of="claimed", bins=bins)
        if calibration.count:
            calibrations[source] = calibration
    return calibrations


TimelineEntry = ReplanEvent | PlanEdit | GoalEdit


def timeline(entries: Iterable[TimelineEntry]) -> list[TimelineEntry]:
    """Return entries in chronological order, condensed for people.

    Each element of a list that fails for one cause makes a replan that keeps the plan, and a
    revision that skips the element. Such replans in a row become the first of them, with the
    triggers of all, and so do these revisions.
    """
    condensed: list[TimelineEntry] = []
    last_cause: tuple[str, ...] | None = None
    replan_place = 0
    skip_place: int | None = None
    count = 1
    for entry in sorted(entries, key=lambda one: one.at):
        if isinstance(entry, PlanEdit) and last_cause is not None and _skips_elements(entry):
            if skip_place is None:
                skip_place = len(condensed)
                condensed.append(entry)
                continue
            skipped = condensed[skip_place]
            assert isinstance(skipped, PlanEdit), "its place was noted above"
            changes = (*skipped.changes, *entry.changes)
            condensed[skip_place] = replace(skipped, after=entry.after, changes=changes)
            continue
        cause = _cause_in_list(entry)
        if cause is None or cause != last_cause:
            replan_place = len(condensed)
            skip_place = None
            count = 1
            last_cause = cause
            condensed.append(entry)
            continue
        count += 1
        first = condensed[replan_place]
        assert isinstance(first, ReplanEvent), "it has a cause"
        assert isinstance(entry, ReplanEvent), "it has a cause"
        note = f"{count} replans with this cause and decision, up to {spoken_id(entry.replan)}"
        condensed[replan_place] = replace(
            first,
            triggers=(*first.triggers, *entry.triggers),
            duration=first.duration + entry.duration,
            decided_at=entry.decided_at,
            notes=(note,),
        )
    return condensed


def _skips_elements(edit: PlanEdit) -> bool:
    """Return whether a revision only skips elements that failed, as their list asks for."""
    return edit.by == FOR_EACH and all(isinstance(change, SkipTask) for change in edit.changes)


def _cause_in_list(event: TimelineEntry) -> tuple[str, ...] | None:
    """Return why elements of one list failed, if a replan only kept the plan; None otherwise."""
    if not isinstance(event, ReplanEvent):
        return None
    if event.decision != "keep" or event.question is not None:
        return None
    if event.all_candidates or event.notes:
        return None
    causes: set[tuple[str, ...]] = set()
    for trigger in event.triggers:
        if not isinstance(trigger, TaskFailed):
            return None
        root = trigger.root or TaskId("")
        template = template_of(root)
        if template == root:
            return None
        causes.add((template, trigger.error_type, normalised_cause(trigger.message)))
    if len(causes) != 1:
        return None
    return (*causes.pop(), event.rule, event.reason)
