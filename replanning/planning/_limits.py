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

from replanning._errors import Problem, SettingsError
from replanning._planning_settings import PlanningSettings
from replanning._triggers import normalised_cause
from replanning.planning._decision import ReplanDecision
from replanning.planning._phases import ALLOWED, TARGETS, Phase, ReplanType

Override = Literal["limit", "confidence", "loop"]
"""Why what a model wanted is not done (D8–10)."""

RulingKind = Literal["continue", "execute", "execute_with_warning", "ask", "skip"]

_Key = TypeVar("_Key", bound=str)
_Counted = Literal["clarifications", "redecompositions", "regenerations", "partial_replans", "plan_revisions"]

_BY_TYPE: Final[Mapping[ReplanType, _Counted]] = MappingProxyType(
    {
        ReplanType.CLARIFICATION_REQUEST: "clarifications",
        ReplanType.TASK_REDECOMPOSITION: "redecompositions",
        ReplanType.ACTION_REGENERATION: "regenerations",
        ReplanType.PARTIAL_REPLAN: "partial_replans",
        ReplanType.PLAN_REVISION: "plan_revisions",
    }
)
_BY_TARGET: Final[Mapping[Phase, _Counted]] = MappingProxyType(
    {Phase.TASK_DECOMPOSITION: "redecompositions", Phase.ACTION_SEQUENCE: "regenerations"}
)
"""A full replan counts as what it does: a limit is not escaped under another name."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How often may be replanned in a run, and how sure a model must be.

    Attributes:
        enabled: whether is replanned at all; without it, only a plan that was carried out may be revised.
        clarifications: how often the user is asked (D1).
        redecompositions: how often the goal is decomposed again (D2).
        regenerations: how often the action plan is made again (D3).
        action_retries: how often each action is retried on a model's word, until it succeeds (D4).
        partial_replans: how often what follows a failure is replaced (D5).
        plan_revisions: how often a reflection revises the plan (D6).
        total: how often all of that may happen together, retries included (D7).
        replans_per_lineage: how often a task and what replaced it may be replanned (D14).
        loop_detection: whether the same replan for the same cause is noticed (D13).
        same_trigger: how often the same replan for the same cause runs.
        immediate: from which confidence on a decision is executed.
        minimum: from which on with a warning.
        user: from which on after the user has agreed; below, it is not executed.
        ask_user: whether the user may be asked so; else it is not executed either.

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
    immediate: float = 0.8
    minimum: float = 0.5
    user: float = 0.3
    ask_user: bool = True

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in _COUNTS}
        problems = [Problem(name, f"must be at least 0, got {count}") for name, count in counts.items() if count < 0]
        if not 0 <= self.user <= self.minimum <= self.immediate <= 1:
            bands = f"user {self.user:g}, minimum {self.minimum:g}, immediate {self.immediate:g}"
            problems.append(Problem("confidence", f"expected 0 ≤ user ≤ minimum ≤ immediate ≤ 1, got {bands}"))
        if problems:
            raise SettingsError(problems)

    @classmethod
    def of(cls, settings: PlanningSettings, *, replans_per_lineage: int = 3) -> Self:
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
            immediate=decisions.immediate_execution_threshold,
            minimum=decisions.min_confidence_threshold,
            user=decisions.user_confirmation_threshold,
            ask_user=decisions.require_user_confirmation_on_low_confidence,
        )

    def band(self, confidence: float) -> RulingKind:
        """What a confidence allows; each lower edge belongs to its band (D11)."""
        if confidence >= self.immediate:
            return "execute"
        if confidence >= self.minimum:
            return "execute_with_warning"
        return "ask" if confidence >= self.user and self.ask_user else "skip"


_COUNTS: Final = (
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
class Cause:
    """What a decision is about.

    Attributes:
        error: what went wrong, in words; where it is empty, the issues that the model found count as the cause.
        action: id of the action that was executed, if the decision is about one.
        lineage: id of the task that it is, or that it replaced first.
    """

    error: str = ""
    action: str | None = None
    lineage: str | None = None


def fingerprint(decision: ReplanDecision, cause: Cause) -> str:
    """The same for two replans of the same type, after the same phase, for the same cause (D13).

    Numbers, addresses, case and space do not tell causes apart, and neither does the order of issues.
    """
    issues = decision.issues_found or (decision.reasoning,)
    said = (cause.lineage or cause.action or "", cause.error) if cause.error else issues
    texts = sorted(normalised_cause(" ".join(text.casefold().split())) for text in said)
    digest = hashlib.sha256("\n".join(texts).encode(errors="surrogatepass")).hexdigest()
    return f"{decision.phase}:{decision.replan_type}:{digest[:16]}"


class Counts(BaseModel):
    """What a run has spent; immutable, and JSON as it stands.

    Attributes:
        considered: decisions of all kinds.
        total: all replans, retries included, also those that failed.
        clarifications: times the user was asked.
        redecompositions: likewise, as in `Limits`.
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

    def consider(self) -> Counts:
        """The counts when another decision is considered."""
        return self.model_copy(update={"considered": self.considered + 1})

    def spend(self, decision: ReplanDecision, cause: Cause) -> Counts:
        """The counts when a normalised replan is about to be executed, however it ends."""
        changed: dict[str, object] = {"total": self.total + 1, "phases": _plus(self.phases, decision.phase)}
        counted = _counted(decision.replan_type, decision.target_phase)
        if counted is not None:
            changed[counted] = getattr(self, counted) + 1
        if decision.replan_type is ReplanType.RETRY:
            changed["retries"] = _plus(self.retries, cause.action or "")
        else:
            changed["causes"] = _plus(self.causes, fingerprint(decision, cause))
            if cause.lineage is not None:
                changed["lineages"] = _plus(self.lineages, cause.lineage)
        return self.model_copy(update=changed)

    def ask(self) -> Counts:
        """The counts when the user is asked without a clarification request, which `spend` counts itself."""
        return self.model_copy(update={"clarifications": self.clarifications + 1})

    def tell(self, repeated: str) -> Counts:
        """The counts when the model is told that a fingerprint repeats itself."""
        return self.model_copy(update={"told": (*self.told, repeated)})

    def succeeded(self, action: str) -> Counts:
        """The counts when an action succeeded: its retries begin anew, and nothing else."""
        return self.model_copy(update={"retries": {a: n for a, n in self.retries.items() if a != action}})


def _plus(counts: Mapping[_Key, int], key: _Key) -> dict[_Key, int]:
    return {**counts, key: counts.get(key, 0) + 1}


def _counted(kind: ReplanType, target: Phase | None) -> _Counted | None:
    if kind is ReplanType.FULL_REPLAN:
        return None if target is None else _BY_TARGET.get(target)
    return _BY_TYPE.get(kind)


def _used_up(kind: ReplanType, target: Phase | None, limits: Limits, counts: Counts, cause: Cause) -> str:
    """Which limit stands in the way of a replan, in words; empty where none does."""
    if not limits.enabled and kind is not ReplanType.PLAN_REVISION:
        return "replanning is switched off"
    if counts.total >= limits.total:
        return f"the limit of {limits.total} replans in total is reached"
    counted = _counted(kind, target)
    if counted is not None and getattr(counts, counted) >= getattr(limits, counted):
        return f"the limit of {getattr(limits, counted)} {counted.replace('_', ' ')} is reached"
    if kind is ReplanType.RETRY:
        retried = counts.retries.get(cause.action or "", 0) >= limits.action_retries
        return f"the limit of {limits.action_retries} retries of action {cause.action!r} is reached" if retried else ""
    return _lineage_used_up(limits, counts, cause)


def _lineage_used_up(limits: Limits, counts: Counts, cause: Cause) -> str:
    if cause.lineage is None or counts.lineages.get(cause.lineage, 0) < limits.replans_per_lineage:
        return ""
    return f"the limit of {limits.replans_per_lineage} replans of {cause.lineage!r} and what replaced it is reached"


def is_open(kind: ReplanType, target: Phase, limits: Limits, counts: Counts, cause: Cause) -> bool:
    """Whether limits leave a replan that returns to a phase."""
    return not _used_up(kind, target, limits, counts, cause)


def open_types(phase: Phase, limits: Limits, counts: Counts, cause: Cause) -> tuple[ReplanType, ...]:
    """The replans that a phase allows and that limits leave; without any, no model need be asked (D1–7)."""
    return tuple(
        kind
        for kind in ALLOWED[phase]
        if any(is_open(kind, target, limits, counts, cause) for target in TARGETS[kind].values())
        and (kind is not ReplanType.RETRY or cause.action is not None)
    )


def why_closed(phase: Phase, limits: Limits, counts: Counts, cause: Cause) -> str:
    """Which limits leave a phase nothing that it could replan, in words; empty where something is open."""
    if open_types(phase, limits, counts, cause):
        return ""
    pairs = [(kind, target) for kind in ALLOWED[phase] for target in TARGETS[kind].values()]
    reasons = dict.fromkeys(_used_up(kind, target, limits, counts, cause) for kind, target in pairs)
    return "; ".join(filter(None, reasons))


def spent_lineage(limits: Limits, counts: Counts, cause: Cause) -> str | None:
    """The lineage that a cause is about, where it has used up its replans."""
    return cause.lineage if _lineage_used_up(limits, counts, cause) else None


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
    override: Override | None = None
    questions: tuple[str, ...] = ()
    blocks: str | None = None
    fingerprint: str = ""

    @property
    def executes(self) -> bool:
        """Whether the replan is to be executed without asking anybody."""
        return self.kind in ("execute", "execute_with_warning")

    @property
    def escalates(self) -> bool:
        """Whether it was wanted and cannot be done, so that another way must be found (E1)."""
        return self.override in ("limit", "loop")


def rule(decision: ReplanDecision, limits: Limits, counts: Counts, cause: Cause) -> Ruling:
    """What becomes of a normalised decision: limits first, then its confidence, then loops (D8–10)."""
    questions = _questions(decision, limits, counts)
    kind = decision.replan_type
    if kind is ReplanType.NONE:
        return Ruling("continue", "the model sees no need to replan", questions=questions)
    if kind is ReplanType.RETRY and cause.action is None:
        return Ruling("continue", "there is no action that could be retried", questions=questions)
    mark = fingerprint(decision, cause)
    asks = kind is ReplanType.CLARIFICATION_REQUEST
    kept = () if asks else questions
    if reason := _used_up(kind, decision.target_phase, limits, counts, cause):
        return Ruling("skip", reason, "limit", kept, spent_lineage(limits, counts, cause), mark)
    band = limits.band(decision.confidence)
    if band == "skip":
        return Ruling("skip", _too_unsure(decision, limits), "confidence", kept, fingerprint=mark)
    if reason := _repeats(mark, kind, limits, counts):
        return Ruling("skip", reason, "loop", kept, fingerprint=mark)
    needed = {"execute": "", "ask": f", below {limits.minimum:g}"}.get(band, f", below {limits.immediate:g}")
    reason = f"its confidence is {decision.confidence:g}{needed}"
    if band == "ask" and asks:  # executing it is asking the user
        band = "execute_with_warning"
    return Ruling(band, reason, questions=questions, fingerprint=mark)


def _questions(decision: ReplanDecision, limits: Limits, counts: Counts) -> tuple[str, ...]:
    """What the user is asked, within the limit and regardless of what is to be done again (E4)."""
    left = counts.clarifications < limits.clarifications
    return decision.clarification_questions if decision.clarification_needed and left else ()


def _too_unsure(decision: ReplanDecision, limits: Limits) -> str:
    needed = limits.user if limits.ask_user else limits.minimum
    return f"its confidence is {decision.confidence:g}, and {needed:g} is needed"


def _repeats(mark: str, kind: ReplanType, limits: Limits, counts: Counts) -> str:
    if not limits.loop_detection or kind is ReplanType.RETRY:
        return ""
    times = counts.causes.get(mark, 0)
    return f"the same {kind} has run {times} times for the same cause" if times >= limits.same_trigger else ""
