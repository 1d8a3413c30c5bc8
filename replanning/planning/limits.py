"""Limits on replans in planning mode, the counts that they are compared with, and rulings on a model's decisions. Pure.

Limits are checked before a model is asked, and again after it has decided. Counts never go down: a failed replan has
used its budget. Only the success of an action resets anything, namely the retries of that action.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from replanning.errors import Problem, SettingsError
from replanning.journal.triggers import normalised_cause
from replanning.planning.decisions import ALLOWED_REPLANS, REPLAN_TARGETS, Phase, ReplanDecision, ReplanType
from replanning.settings import PlanningSettings

OverrideReason = Literal["limit", "confidence", "loop"]
"""Reason for not executing a replan that the model wanted."""

RulingKind = Literal["continue", "execute", "execute_with_warning", "ask", "skip"]

_Key = TypeVar("_Key", bound=str)

_CountName = Literal["clarifications", "redecompositions", "regenerations", "partial_replans", "plan_revisions"]

_COUNT_BY_TYPE: Final[Mapping[ReplanType, _CountName]] = MappingProxyType(
    {
        ReplanType.CLARIFICATION_REQUEST: "clarifications",
        ReplanType.TASK_REDECOMPOSITION: "redecompositions",
        ReplanType.ACTION_REGENERATION: "regenerations",
        ReplanType.PARTIAL_REPLAN: "partial_replans",
        ReplanType.PLAN_REVISION: "plan_revisions",
    }
)

_COUNT_BY_TARGET: Final[Mapping[Phase, _CountName]] = MappingProxyType(
    {Phase.TASK_DECOMPOSITION: "redecompositions", Phase.ACTION_SEQUENCE: "regenerations"}
)
"""Counters of full replans, by target: a limit cannot be escaped under another name."""


@dataclass(frozen=True, slots=True)
class ReplanLimits:
    """Maximum numbers of replans in a run, and the confidence that a decision needs.

    Attributes:
        enabled: allow replans at all; if false, only a finished plan may be revised.
        clarifications: questions to the user.
        redecompositions: new decompositions of the goal.
        regenerations: new action plans.
        action_retries: retries of each action that a model decides on, until the action succeeds.
        partial_replans: replacements of the actions after a failure.
        plan_revisions: revisions after a reflection.
        total: all replans together, retries included.
        replans_per_lineage: replans of a task and its replacements.
        loop_detection: stop repetitions of the same replan for the same cause.
        same_trigger: executions of the same replan for the same cause.
        immediate_threshold: confidence from which a decision is executed.
        min_threshold: confidence from which it is executed with a warning.
        confirmation_threshold: confidence from which it is executed once the user agrees; below, it is skipped.
        confirm_low_confidence: ask the user in that band; if false, it is skipped there, too.

    Raises:
        SettingsError: a limit is negative, or the thresholds are not ordered 0 ≤ user ≤ minimum ≤ immediate ≤ 1.
    """

    enabled: bool = True
    clarifications: int = 2
    redecompositions: int = 3
    regenerations: int = 3
    action_retries: int = 3
    partial_replans: int = 2
    plan_revisions: int = 2
    total: int = 10
    replans_per_lineage: int = 3
    loop_detection: bool = True
    same_trigger: int = 2
    immediate_threshold: float = 0.8
    min_threshold: float = 0.5
    confirmation_threshold: float = 0.3
    confirm_low_confidence: bool = True

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in _COUNT_LIMITS}
        problems = [Problem(name, f"must be at least 0, got {count}") for name, count in counts.items() if count < 0]
        if not 0 <= self.confirmation_threshold <= self.min_threshold <= self.immediate_threshold <= 1:
            bands = (
                f"user {self.confirmation_threshold:g}, minimum {self.min_threshold:g},"
                f" immediate {self.immediate_threshold:g}"
            )
            problems.append(Problem("confidence", f"expected 0 ≤ user ≤ minimum ≤ immediate ≤ 1, got {bands}"))
        if problems:
            raise SettingsError(problems)

    @classmethod
    def from_settings(cls, settings: PlanningSettings, *, replans_per_lineage: int = 3) -> Self:
        """Return the limits in the settings of planning mode.

        Args:
            settings: settings of planning mode.
            replans_per_lineage: the limit in the general replanning settings.
        """
        replanning = settings.replanning
        revisions, decisions = settings.revision.max_revisions, replanning.llm_decision
        if replanning.enabled:
            revisions = min(revisions, replanning.reflection.max_plan_revisions)
        return cls(
            enabled=replanning.enabled,
            clarifications=replanning.goal_understanding.max_clarification_requests,
            redecompositions=replanning.task_decomposition.max_redecomposition_attempts,
            regenerations=replanning.action_sequence.max_regeneration_attempts,
            action_retries=replanning.execution.max_action_retries,
            partial_replans=replanning.execution.max_partial_replans,
            plan_revisions=revisions,
            total=replanning.overall.max_total_replans,
            replans_per_lineage=replans_per_lineage,
            loop_detection=replanning.overall.infinite_loop_detection,
            same_trigger=replanning.overall.same_trigger_max_count,
            immediate_threshold=decisions.immediate_execution_threshold,
            min_threshold=decisions.min_confidence_threshold,
            confirmation_threshold=decisions.user_confirmation_threshold,
            confirm_low_confidence=decisions.require_user_confirmation_on_low_confidence,
        )

    def confidence_band(self, confidence: float) -> RulingKind:
        """Return the ruling for a confidence; each lower edge belongs to its band."""
        if confidence >= self.immediate_threshold:
            return "execute"
        if confidence >= self.min_threshold:
            return "execute_with_warning"
        return "ask" if confidence >= self.confirmation_threshold and self.confirm_low_confidence else "skip"


_COUNT_LIMITS: Final = (
    "clarifications",
    "redecompositions",
    "regenerations",
    "action_retries",
    "partial_replans",
    "plan_revisions",
    "total",
    "replans_per_lineage",
    "same_trigger",
)


@dataclass(frozen=True, slots=True)
class ReplanCause:
    """Cause of a decision.

    Attributes:
        error: error message; if empty, the issues that the model found count as the cause.
        action: id of the executed action, if the decision is about one.
        lineage: id of the first task in the lineage of that action.
    """

    error: str = ""
    action: str | None = None
    lineage: str | None = None


def fingerprint(decision: ReplanDecision, cause: ReplanCause) -> str:
    """Return a key that is equal for replans of the same type, after the same phase, for the same cause.

    Causes are compared without numbers, addresses, case, white space and the order of issues.
    """
    issues = decision.issues_found or (decision.reasoning,)
    causes = (cause.lineage or cause.action or "", cause.error) if cause.error else issues
    texts = sorted(normalised_cause(" ".join(text.casefold().split())) for text in causes)
    digest = hashlib.sha256("\n".join(texts).encode(errors="surrogatepass")).hexdigest()
    return f"{decision.phase}:{decision.replan_type}:{digest[:16]}"


class ReplanCounts(BaseModel):
    """Replans that a run has spent; immutable and JSON-serialisable.

    Attributes:
        considered: decisions of all kinds.
        total: all replans, retries and failed ones included.
        clarifications: questions to the user.
        redecompositions: as in `ReplanLimits`.
        regenerations: as in `ReplanLimits`.
        partial_replans: as in `ReplanLimits`.
        plan_revisions: as in `ReplanLimits`.
        phases: all replans, by the phase they were decided after.
        retries: retries of each action since its last success.
        lineages: replans of each lineage.
        causes: executions of each fingerprint.
        warned: fingerprints whose repetition the model was warned about.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    considered: NonNegativeInt = 0
    total: NonNegativeInt = 0
    clarifications: NonNegativeInt = 0
    redecompositions: NonNegativeInt = 0
    regenerations: NonNegativeInt = 0
    partial_replans: NonNegativeInt = 0
    plan_revisions: NonNegativeInt = 0
    phases: dict[Phase, NonNegativeInt] = {}
    retries: dict[str, NonNegativeInt] = {}
    lineages: dict[str, NonNegativeInt] = {}
    causes: dict[str, NonNegativeInt] = {}
    warned: tuple[str, ...] = ()

    def add_considered(self) -> ReplanCounts:
        """Count another decision."""
        return self.model_copy(update={"considered": self.considered + 1})

    def add_replan(self, decision: ReplanDecision, cause: ReplanCause) -> ReplanCounts:
        """Count a normalised replan that is about to be executed, whether or not it succeeds."""
        changed: dict[str, object] = {"total": self.total + 1, "phases": _increment(self.phases, decision.phase)}
        counted = _count_name(decision.replan_type, decision.target_phase)
        if counted is not None:
            changed[counted] = getattr(self, counted) + 1
        if decision.replan_type is ReplanType.RETRY:
            changed["retries"] = _increment(self.retries, cause.action or "")
        else:
            changed["causes"] = _increment(self.causes, fingerprint(decision, cause))
            if cause.lineage is not None:
                changed["lineages"] = _increment(self.lineages, cause.lineage)
        return self.model_copy(update=changed)

    def add_clarification(self) -> ReplanCounts:
        """Count a question to the user that accompanies another decision; `add_replan` counts clarification requests."""
        return self.model_copy(update={"clarifications": self.clarifications + 1})

    def add_loop_warning(self, repeated: str) -> ReplanCounts:
        """Remember that the model was warned about a repetition."""
        return self.model_copy(update={"warned": (*self.warned, repeated)})

    def reset_retries(self, action: str) -> ReplanCounts:
        """Reset the retries of an action that succeeded, and nothing else."""
        return self.model_copy(update={"retries": {a: n for a, n in self.retries.items() if a != action}})


def _increment(counts: Mapping[_Key, int], key: _Key) -> dict[_Key, int]:
    return {**counts, key: counts.get(key, 0) + 1}


def _count_name(kind: ReplanType, target: Phase | None) -> _CountName | None:
    if kind is ReplanType.FULL_REPLAN:
        return None if target is None else _COUNT_BY_TARGET.get(target)
    return _COUNT_BY_TYPE.get(kind)


def _exhausted_limit(
    kind: ReplanType, target: Phase | None, limits: ReplanLimits, counts: ReplanCounts, cause: ReplanCause
) -> str:
    """Return the limit that forbids a replan, in words; empty if none does."""
    if not limits.enabled and kind is not ReplanType.PLAN_REVISION:
        return "replanning is switched off"
    if counts.total >= limits.total:
        return f"the limit of {limits.total} replans in total is reached"
    counted = _count_name(kind, target)
    if counted is not None and getattr(counts, counted) >= getattr(limits, counted):
        return f"the limit of {getattr(limits, counted)} {counted.replace('_', ' ')} is reached"
    if kind is ReplanType.RETRY:
        retried = counts.retries.get(cause.action or "", 0) >= limits.action_retries
        return f"the limit of {limits.action_retries} retries of action {cause.action!r} is reached" if retried else ""
    lineage = exhausted_lineage(limits, counts, cause)
    if lineage is not None:
        return f"the limit of {limits.replans_per_lineage} replans of {lineage!r} and its replacements is reached"
    return ""


def is_within_limits(
    kind: ReplanType, target: Phase, limits: ReplanLimits, counts: ReplanCounts, cause: ReplanCause
) -> bool:
    """Return whether the limits allow a replan that returns to `target`."""
    return not _exhausted_limit(kind, target, limits, counts, cause)


def available_replan_types(
    phase: Phase, limits: ReplanLimits, counts: ReplanCounts, cause: ReplanCause
) -> tuple[ReplanType, ...]:
    """Return the replan types that both the phase and the limits allow; if there are none, no model is asked."""
    return tuple(
        kind
        for kind in ALLOWED_REPLANS[phase]
        if any(is_within_limits(kind, target, limits, counts, cause) for target in REPLAN_TARGETS[kind].values())
        and (kind is not ReplanType.RETRY or cause.action is not None)
    )


def exhausted_limits(phase: Phase, limits: ReplanLimits, counts: ReplanCounts, cause: ReplanCause) -> str:
    """Return the limits that forbid every replan of a phase, in words; empty if any replan is allowed."""
    if available_replan_types(phase, limits, counts, cause):
        return ""
    pairs = [(kind, target) for kind in ALLOWED_REPLANS[phase] for target in REPLAN_TARGETS[kind].values()]
    reasons = dict.fromkeys(_exhausted_limit(kind, target, limits, counts, cause) for kind, target in pairs)
    return "; ".join(filter(None, reasons))


def exhausted_lineage(limits: ReplanLimits, counts: ReplanCounts, cause: ReplanCause) -> str | None:
    """Return the lineage of a cause if it has used up its replans."""
    used_up = cause.lineage is not None and counts.lineages.get(cause.lineage, 0) >= limits.replans_per_lineage
    return cause.lineage if used_up else None


@dataclass(frozen=True, slots=True)
class Ruling:
    """Ruling on a decision.

    Attributes:
        kind: continue without a replan; execute, perhaps with a warning; ask the user for approval; or skip.
        reason: the rule that applied, in words.
        override: reason for skipping a replan that the model wanted.
        questions: questions for the user, with or without a replan.
        blocks: the lineage that has used up its replans, so that its task ends blocked.
        fingerprint: key of the replan and its cause; empty without a replan.
    """

    kind: RulingKind
    reason: str
    override: OverrideReason | None = None
    questions: tuple[str, ...] = ()
    blocks: str | None = None
    fingerprint: str = ""

    @property
    def is_executable(self) -> bool:
        """True if the replan is executed without asking the user."""
        return self.kind in ("execute", "execute_with_warning")

    @property
    def needs_escalation(self) -> bool:
        """True if the model wanted a replan that a limit or a loop forbids, so that it must be asked for another one."""
        return self.override in ("limit", "loop")


def make_ruling(decision: ReplanDecision, limits: ReplanLimits, counts: ReplanCounts, cause: ReplanCause) -> Ruling:
    """Return the ruling on a normalised decision, by limits first, then its confidence, then loops."""
    may_ask = decision.clarification_needed and counts.clarifications < limits.clarifications
    questions = decision.clarification_questions if may_ask else ()
    kind = decision.replan_type
    if kind is ReplanType.NONE:
        return Ruling("continue", "the model sees no need to replan", questions=questions)
    if kind is ReplanType.RETRY and cause.action is None:
        return Ruling("continue", "there is no action that could be retried", questions=questions)
    key = fingerprint(decision, cause)
    asks = kind is ReplanType.CLARIFICATION_REQUEST
    kept_questions = () if asks else questions
    if reason := _exhausted_limit(kind, decision.target_phase, limits, counts, cause):
        return Ruling("skip", reason, "limit", kept_questions, exhausted_lineage(limits, counts, cause), key)
    band, reason = limits.confidence_band(decision.confidence), f"its confidence is {decision.confidence:g}"
    if band == "skip":
        minimum = limits.confirmation_threshold if limits.confirm_low_confidence else limits.min_threshold
        return Ruling("skip", f"{reason}, and {minimum:g} is needed", "confidence", kept_questions, fingerprint=key)
    repetitions = counts.causes.get(key, 0)
    if limits.loop_detection and kind is not ReplanType.RETRY and repetitions >= limits.same_trigger:
        looped = f"the same {kind} has run {repetitions} times for the same cause"
        return Ruling("skip", looped, "loop", kept_questions, fingerprint=key)
    if band != "execute":
        reason += f", below {limits.min_threshold if band == 'ask' else limits.immediate_threshold:g}"
    if band == "ask" and asks:  # executing it is asking the user
        band = "execute_with_warning"
    return Ruling(band, reason, questions=questions, fingerprint=key)
