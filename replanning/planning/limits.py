"""How often planning mode may replan, and what becomes of what a model decided. Pure: counts go in, a ruling comes out.

Limits are looked at before a model is asked, and again when it has decided. What was spent is never given back: a
replan that fails has used its budget, and only a success of an action resets anything, namely its retries.
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
"""Why what a model wanted is not done (D8–10)."""

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
"""A full replan counts as what it does: a limit is not escaped under another name."""


@dataclass(frozen=True, slots=True)
class ReplanLimits:
    """How often may be replanned in a run, and how sure a model must be.

    Attributes:
        enabled: whether is replanned at all; without it, only a plan that was carried out may be revised.
        clarifications: how often the user is asked.
        redecompositions: how often the goal is decomposed again.
        regenerations: how often the action plan is made again.
        action_retries: how often each action is retried on a model's word, until it succeeds.
        partial_replans: how often what follows a failure is replaced.
        plan_revisions: how often a reflection revises the plan.
        total: how often all of that may happen together, retries included.
        replans_per_lineage: how often a task and what replaced it may be replanned.
        loop_detection: whether the same replan for the same cause is noticed.
        same_trigger: how often the same replan for the same cause runs.
        immediate_threshold: from which confidence on a decision is executed.
        min_threshold: from which on with a warning.
        confirmation_threshold: from which on after the user has agreed; below, it is not executed.
        confirm_low_confidence: whether the user may be asked so; else it is not executed either.

    Raises:
        SettingsError: a limit is negative, or not 0 ≤ user ≤ minimum ≤ immediate ≤ 1.
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
            bands = f"user {self.confirmation_threshold:g}, minimum {self.min_threshold:g}, immediate {self.immediate_threshold:g}"
            problems.append(Problem("confidence", f"expected 0 ≤ user ≤ minimum ≤ immediate ≤ 1, got {bands}"))
        if problems:
            raise SettingsError(problems)

    @classmethod
    def from_settings(cls, settings: PlanningSettings, *, replans_per_lineage: int = 3) -> Self:
        """The limits that settings state.

        Args:
            settings: of planning mode.
            replans_per_lineage: as the settings of replanning state it for all runs.
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
        """What a confidence allows; each lower edge belongs to its band."""
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
    """What a decision is about.

    Attributes:
        error: what went wrong, in words; where it is empty, the issues that the model found count as the cause.
        action: id of the action that was executed, if the decision is about one.
        lineage: id of the task that it is, or that it replaced first.
    """

    error: str = ""
    action: str | None = None
    lineage: str | None = None


def fingerprint(decision: ReplanDecision, cause: ReplanCause) -> str:
    """The same for two replans of the same type, after the same phase, for the same cause.

    Numbers, addresses, case and space do not tell causes apart, and neither does the order of issues.
    """
    issues = decision.issues_found or (decision.reasoning,)
    said = (cause.lineage or cause.action or "", cause.error) if cause.error else issues
    texts = sorted(normalised_cause(" ".join(text.casefold().split())) for text in said)
    digest = hashlib.sha256("\n".join(texts).encode(errors="surrogatepass")).hexdigest()
    return f"{decision.phase}:{decision.replan_type}:{digest[:16]}"


class ReplanCounts(BaseModel):
    """What a run has spent; immutable, and JSON as it stands.

    Attributes:
        considered: decisions of all kinds.
        total: all replans, retries included, also those that failed.
        clarifications: times the user was asked.
        redecompositions: likewise, as in `ReplanLimits`.
        regenerations: likewise.
        partial_replans: likewise.
        plan_revisions: likewise.
        phases: all replans, by the phase after which they were decided.
        retries: retries of each action since it last succeeded.
        lineages: replans of each lineage.
        causes: times each fingerprint ran.
        told: fingerprints about which the model was told that they repeat themselves.
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
    told: tuple[str, ...] = ()

    def add_considered(self) -> ReplanCounts:
        """The counts when another decision is considered."""
        return self.model_copy(update={"considered": self.considered + 1})

    def add_replan(self, decision: ReplanDecision, cause: ReplanCause) -> ReplanCounts:
        """The counts when a normalised replan is about to be executed, however it ends."""
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
        """The counts when the user is asked without a clarification request, which `add_replan` counts itself."""
        return self.model_copy(update={"clarifications": self.clarifications + 1})

    def add_loop_warning(self, repeated: str) -> ReplanCounts:
        """The counts when the model is told that a fingerprint repeats itself."""
        return self.model_copy(update={"told": (*self.told, repeated)})

    def reset_retries(self, action: str) -> ReplanCounts:
        """The counts when an action succeeded: its retries begin anew, and nothing else."""
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
    """Which limit stands in the way of a replan, in words; empty where none does."""
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
    return _exhausted_lineage_limit(limits, counts, cause)


def _exhausted_lineage_limit(limits: ReplanLimits, counts: ReplanCounts, cause: ReplanCause) -> str:
    if cause.lineage is None or counts.lineages.get(cause.lineage, 0) < limits.replans_per_lineage:
        return ""
    return f"the limit of {limits.replans_per_lineage} replans of {cause.lineage!r} and what replaced it is reached"


def is_within_limits(
    kind: ReplanType, target: Phase, limits: ReplanLimits, counts: ReplanCounts, cause: ReplanCause
) -> bool:
    """Whether limits leave a replan that returns to a phase."""
    return not _exhausted_limit(kind, target, limits, counts, cause)


def available_replan_types(
    phase: Phase, limits: ReplanLimits, counts: ReplanCounts, cause: ReplanCause
) -> tuple[ReplanType, ...]:
    """The replans that a phase allows and that limits leave; without any, no model need be asked (D1–7)."""
    return tuple(
        kind
        for kind in ALLOWED_REPLANS[phase]
        if any(is_within_limits(kind, target, limits, counts, cause) for target in REPLAN_TARGETS[kind].values())
        and (kind is not ReplanType.RETRY or cause.action is not None)
    )


def exhausted_limits(phase: Phase, limits: ReplanLimits, counts: ReplanCounts, cause: ReplanCause) -> str:
    """Which limits leave a phase nothing that it could replan, in words; empty where something is open."""
    if available_replan_types(phase, limits, counts, cause):
        return ""
    pairs = [(kind, target) for kind in ALLOWED_REPLANS[phase] for target in REPLAN_TARGETS[kind].values()]
    reasons = dict.fromkeys(_exhausted_limit(kind, target, limits, counts, cause) for kind, target in pairs)
    return "; ".join(filter(None, reasons))


def exhausted_lineage(limits: ReplanLimits, counts: ReplanCounts, cause: ReplanCause) -> str | None:
    """The lineage that a cause is about, where it has used up its replans."""
    return cause.lineage if _exhausted_lineage_limit(limits, counts, cause) else None


@dataclass(frozen=True, slots=True)
class Ruling:
    """What becomes of a decision.

    Attributes:
        kind: go on as no replan is wanted; execute, perhaps with a warning; ask the user whether to; or skip it.
        reason: the rule that decided, in words.
        override: why it is not done although it was wanted.
        questions: what the user is asked, also where nothing is to be done again.
        blocks: the lineage that has used up its replans, so that its task ends blocked.
        fingerprint: of the replan and its cause; empty where none is wanted.
    """

    kind: RulingKind
    reason: str
    override: OverrideReason | None = None
    questions: tuple[str, ...] = ()
    blocks: str | None = None
    fingerprint: str = ""

    @property
    def is_executable(self) -> bool:
        """Whether the replan is to be executed without asking anybody."""
        return self.kind in ("execute", "execute_with_warning")

    @property
    def needs_escalation(self) -> bool:
        """Whether it was wanted and cannot be done, so that another way must be found."""
        return self.override in ("limit", "loop")


def make_ruling(decision: ReplanDecision, limits: ReplanLimits, counts: ReplanCounts, cause: ReplanCause) -> Ruling:
    """What becomes of a normalised decision: limits first, then its confidence, then loops (D8–10)."""
    questions = _allowed_questions(decision, limits, counts)
    kind = decision.replan_type
    if kind is ReplanType.NONE:
        return Ruling("continue", "the model sees no need to replan", questions=questions)
    if kind is ReplanType.RETRY and cause.action is None:
        return Ruling("continue", "there is no action that could be retried", questions=questions)
    mark = fingerprint(decision, cause)
    asks = kind is ReplanType.CLARIFICATION_REQUEST
    kept = () if asks else questions
    if reason := _exhausted_limit(kind, decision.target_phase, limits, counts, cause):
        return Ruling("skip", reason, "limit", kept, exhausted_lineage(limits, counts, cause), mark)
    band = limits.confidence_band(decision.confidence)
    if band == "skip":
        return Ruling("skip", _low_confidence_reason(decision, limits), "confidence", kept, fingerprint=mark)
    if reason := _loop_reason(mark, kind, limits, counts):
        return Ruling("skip", reason, "loop", kept, fingerprint=mark)
    needed = {"execute": "", "ask": f", below {limits.min_threshold:g}"}.get(
        band, f", below {limits.immediate_threshold:g}"
    )
    reason = f"its confidence is {decision.confidence:g}{needed}"
    if band == "ask" and asks:  # executing it is asking the user
        band = "execute_with_warning"
    return Ruling(band, reason, questions=questions, fingerprint=mark)


def _allowed_questions(decision: ReplanDecision, limits: ReplanLimits, counts: ReplanCounts) -> tuple[str, ...]:
    """What the user is asked, within the limit and regardless of what is to be done again."""
    left = counts.clarifications < limits.clarifications
    return decision.clarification_questions if decision.clarification_needed and left else ()


def _low_confidence_reason(decision: ReplanDecision, limits: ReplanLimits) -> str:
    needed = limits.confirmation_threshold if limits.confirm_low_confidence else limits.min_threshold
    return f"its confidence is {decision.confidence:g}, and {needed:g} is needed"


def _loop_reason(mark: str, kind: ReplanType, limits: ReplanLimits, counts: ReplanCounts) -> str:
    if not limits.loop_detection or kind is ReplanType.RETRY:
        return ""
    times = counts.causes.get(mark, 0)
    return f"the same {kind} has run {times} times for the same cause" if times >= limits.same_trigger else ""
