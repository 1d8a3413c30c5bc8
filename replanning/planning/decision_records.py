"""What is put on record of the decisions of planning mode, and what it comes to in figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

from replanning.plan.types import JsonObject
from replanning.planning.decisions import (
    NormalisedDecision,
    Phase,
    ReplanDecision,
    ReplanType,
    decision_model,
    normalise,
)
from replanning.planning.limits import OverrideReason, ReplanCause, ReplanCounts, Ruling

ReplanStage = Literal["idle", "deciding", "awaiting_user", "generating", "applying", "applied", "failed"]
"""How far a replan has come."""


class _RecordModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Consideration(_RecordModel):
    """A decision and what becomes of it; JSON as it stands, so that it can wait for a person and be resumed.

    Attributes:
        replan_id: names it; counted from `p1` in each run.
        phase: after which it was decided.
        cause: what it is about.
        said: the decision as the model gave it; None where there is none.
        problem: why there is none.
        unasked: whether that is because the model could not be asked at all.
        ruling: what becomes of it.
        timestamp: when deciding began, in UTC.
        seconds: how long deciding took.
        instead_of: the replan that could not be done and in place of which the model decided this.
    """

    replan_id: str
    phase: Phase
    cause: ReplanCause
    said: JsonObject | None
    problem: str = ""
    unasked: bool = False
    ruling: Ruling
    timestamp: str
    seconds: float = 0.0
    instead_of: str | None = None

    @property
    def decision(self) -> ReplanDecision | None:
        """The decision without contradictions."""
        return self._normalised.decision if self._normalised else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What was changed in what the model said, so that it does not contradict itself."""
        return self._normalised.notes if self._normalised else ()

    @property
    def _normalised(self) -> NormalisedDecision | None:
        return (
            None if self.said is None else normalise(decision_model(self.phase).model_validate(self.said, strict=False))
        )


class DecisionRecord(_RecordModel):
    """What became of a decision.

    Attributes:
        replan_id: which one it is.
        phase: after which it was decided.
        llm_decision: as the model gave it, in full; None where there is none.
        confidence: of the model; None likewise.
        executed: whether it was followed.
        override_reason: why it was not although a replan was wanted.
        timestamp: when deciding began, in UTC.
        result: what came of it; what was not executed was skipped.
        duration: seconds of deciding and executing; waiting for a person does not count.
        reason: the rule that decided, in words.
        notes: what was changed so that it does not contradict itself.
        replan_type: what counted in the end.
        cause: what it is about.
        error: why it failed; or why there is no decision.
        instead_of: the replan in place of which it was decided.
    """

    replan_id: str
    phase: Phase
    llm_decision: JsonObject | None
    confidence: float | None
    executed: bool
    override_reason: OverrideReason | None
    timestamp: str
    result: Literal["success", "failure", "skipped"]
    duration: float
    reason: str = ""
    notes: tuple[str, ...] = ()
    replan_type: ReplanType = ReplanType.NONE
    cause: ReplanCause = ReplanCause()
    error: str = ""
    instead_of: str | None = None

    @classmethod
    def from_consideration(cls, considered: Consideration, *, executed: bool, error: str, seconds: float) -> Self:
        """The record of a decision that was followed or not, with why it failed if it did."""
        decision, ruling = considered.decision, considered.ruling
        # What the user was asked about and declined was not sure enough by itself.
        override: OverrideReason | None = "confidence" if ruling.kind == "ask" and not executed else ruling.override
        return cls(
            replan_id=considered.replan_id,
            phase=considered.phase,
            llm_decision=considered.said,
            confidence=decision.confidence if decision else None,
            executed=executed,
            override_reason=override,
            timestamp=considered.timestamp,
            result="skipped" if not executed else "failure" if error else "success",
            duration=considered.seconds + seconds,
            reason=ruling.reason,
            notes=considered.notes,
            replan_type=decision.replan_type if decision else ReplanType.NONE,
            cause=considered.cause,
            error=error or considered.problem,
            instead_of=considered.instead_of,
        )


class ReplanNote(_RecordModel):
    """A step of a replan, to be put on record before it has an effect; the newest says where to go on.

    Attributes:
        stage: how far it has come.
        counts: what is spent from then on.
        considered: which decision it is about.
        record: what became of it, once that is known.
    """

    stage: ReplanStage
    counts: ReplanCounts
    considered: Consideration | None = None
    record: DecisionRecord | None = None


class ReplanStatistics(_RecordModel):
    """The decisions of a run in figures.

    Attributes:
        decisions: how many there are.
        wanted: how many of them wanted a replan.
        executed: how many were followed.
        succeeded: how many of those ended well.
        failed: how many did not.
        success_rate: the share of those followed that ended well; None before the first.
        mean_confidence: of the decisions that wanted a replan; None before the first.
        by_phase: replans that were executed, by the phase after which they were decided.
        by_type: replans that were executed, by their type.
        overridden: replans that were not, by the reason.
        seconds: how long all of it took.
    """

    decisions: int
    wanted: int
    executed: int
    succeeded: int
    failed: int
    success_rate: float | None
    mean_confidence: float | None
    by_phase: dict[Phase, int]
    by_type: dict[ReplanType, int]
    overridden: dict[OverrideReason, int]
    seconds: float


def replan_statistics(records: Iterable[DecisionRecord]) -> ReplanStatistics:
    """What records come to."""
    records = list(records)
    executed = [record for record in records if record.executed]
    succeeded = sum(record.result == "success" for record in executed)
    wanted = [record for record in records if record.replan_type is not ReplanType.NONE]
    sure = [record.confidence for record in wanted if record.confidence is not None]
    return ReplanStatistics(
        decisions=len(records),
        wanted=len(wanted),
        executed=len(executed),
        succeeded=succeeded,
        failed=len(executed) - succeeded,
        success_rate=succeeded / len(executed) if executed else None,
        mean_confidence=sum(sure) / len(sure) if sure else None,
        by_phase=dict(Counter(record.phase for record in executed)),
        by_type=dict(Counter(record.replan_type for record in executed)),
        overridden=dict(Counter(record.override_reason for record in records if record.override_reason)),
        seconds=sum(record.duration for record in records),
    )
