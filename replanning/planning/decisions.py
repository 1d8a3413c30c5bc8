"""Decisions of planning mode: phases, replan types, limits on replans, and rulings. Pure.

Limits are checked before a model is asked, and again after it has decided. Counts never go down: a
failed replan has used its share. The only reset is that of an action's retries, when it succeeds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import islice, pairwise
from typing import Annotated, ClassVar, Final, Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from replanning.errors import LLMResponseInvalid, Problem, SettingsError
from replanning.journal.records import normalised_cause
from replanning.llm.provider import extract_json
from replanning.plan.messages import pluralise, validation_problems
from replanning.plan.types import JsonObject, JsonValue
from replanning.settings import PlanningSettings


class Phase(StrEnum):
    """A phase of planning mode, in the order in which a run passes through them."""

    GOAL_UNDERSTANDING = "goal_understanding"
    TASK_DECOMPOSITION = "task_decomposition"
    ACTION_SEQUENCE = "action_sequence"
    EXECUTION = "execution"
    REFLECTION = "reflection"


class ReplanType(StrEnum):
    """Kind of replan that a model may ask for after a phase."""

    CLARIFICATION_REQUEST = "clarification_request"
    GOAL_REVISION = "goal_revision"
    TASK_REDECOMPOSITION = "task_redecomposition"
    ACTION_REGENERATION = "action_regeneration"
    PARTIAL_REPLAN = "partial_replan"
    FULL_REPLAN = "full_replan"
    RETRY = "retry"
    PLAN_REVISION = "plan_revision"
    NONE = "none"


ALLOWED_REPLANS: Final[Mapping[Phase, tuple[ReplanType, ...]]] = {
    Phase.GOAL_UNDERSTANDING: (
        ReplanType.CLARIFICATION_REQUEST,
        ReplanType.GOAL_REVISION,
        ReplanType.NONE,
    ),
    Phase.TASK_DECOMPOSITION: (ReplanType.TASK_REDECOMPOSITION, ReplanType.NONE),
    Phase.ACTION_SEQUENCE: (ReplanType.ACTION_REGENERATION, ReplanType.NONE),
    Phase.EXECUTION: (
        ReplanType.RETRY,
        ReplanType.PARTIAL_REPLAN,
        ReplanType.FULL_REPLAN,
        ReplanType.ACTION_REGENERATION,
        ReplanType.TASK_REDECOMPOSITION,
        ReplanType.GOAL_REVISION,
        ReplanType.NONE,
    ),
    Phase.REFLECTION: (ReplanType.PLAN_REVISION, ReplanType.NONE),
}
"""Replan types that each phase allows."""

REPLAN_TARGETS: Final[Mapping[ReplanType, Mapping[int, Phase]]] = {
    ReplanType.CLARIFICATION_REQUEST: {5: Phase.GOAL_UNDERSTANDING},
    ReplanType.GOAL_REVISION: {5: Phase.GOAL_UNDERSTANDING},
    ReplanType.TASK_REDECOMPOSITION: {4: Phase.TASK_DECOMPOSITION},
    ReplanType.ACTION_REGENERATION: {3: Phase.ACTION_SEQUENCE},
    ReplanType.PARTIAL_REPLAN: {2: Phase.EXECUTION},
    ReplanType.FULL_REPLAN: {
        4: Phase.TASK_DECOMPOSITION,
        3: Phase.ACTION_SEQUENCE,
        5: Phase.GOAL_UNDERSTANDING,
    },
    ReplanType.RETRY: {1: Phase.EXECUTION},
    ReplanType.PLAN_REVISION: {2: Phase.EXECUTION},
    ReplanType.NONE: {},
}
"""Levels of each replan type, default first, with the phase that each level returns to."""

LEVEL_DESCRIPTIONS: Final[Mapping[int, str]] = {
    1: "retry the action",
    2: "replan what follows the failure",
    3: "regenerate the action plan",
    4: "decompose the goal again",
    5: "understand the goal again",
}
"""Meaning of each replan level."""


def keeps_finished(target: Phase) -> bool:
    """Return whether a replan to `target` keeps finished tasks; otherwise the plan starts clean."""
    return target not in (Phase.GOAL_UNDERSTANDING, Phase.TASK_DECOMPOSITION)


_WRAPPER: Final = "replan_decision"

_Text = Annotated[str, Field(max_length=20_000)]

_Texts = Annotated[tuple[_Text, ...], Field(max_length=100)]


class ReplanDecision(BaseModel):
    """Decision of a model after a phase: continue, or replan.

    Validation is strict: the text "false" is not a boolean.

    Each phase has a subclass with further fields: `GoalDecision`, `DecompositionDecision`,
    `ActionsDecision`, `ExecutionDecision` and `ReflectionDecision`. Create one of those;
    `ReplanDecision` is their base. Unknown fields are kept.

    Attributes:
        phase: the phase it was made after.
        replan_needed: whether to replan.
        confidence: the model's confidence, from 0 to 1.
        reasoning: the model's reason.
        replan_type: kind of replan; one that the phase allows.
        target_phase: the phase to return to.
        replan_level: from 1 (the action) to 5 (the goal).
        issues_found: problems that the model found.
        recommended_actions: remedies that it recommends.
        clarification_needed: whether to ask the user, with or without a replan.
        clarification_questions: the questions for the user.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="allow", allow_inf_nan=False)

    phase: ClassVar[Phase]

    replan_needed: bool
    confidence: float = Field(ge=0, le=1)
    reasoning: _Text
    replan_type: ReplanType
    target_phase: Phase | None = None
    replan_level: int | None = Field(default=None, ge=1, le=5)
    issues_found: _Texts = ()
    recommended_actions: _Texts = ()
    clarification_needed: bool = False
    clarification_questions: _Texts = ()

    @field_validator("replan_type", mode="before")
    @classmethod
    def _check_replan_type(cls, kind: object) -> object:
        if cls is ReplanDecision:
            classes = ", ".join(model.__name__ for model in _MODELS.values())
            raise TypeError(f"a decision is made after a phase: create one of {classes}")
        if kind not in ALLOWED_REPLANS[cls.phase]:
            raise PydanticCustomError(
                "replan_type", f"{cls.phase} allows {', '.join(ALLOWED_REPLANS[cls.phase])}"
            )
        return kind


class GoalDecision(ReplanDecision):
    """Decision after the goal was understood."""

    phase: ClassVar[Phase] = Phase.GOAL_UNDERSTANDING
    assumptions_to_make: _Texts = ()
    """Assumptions to make if the user does not answer."""


class DecompositionDecision(ReplanDecision):
    """Decision after the goal was decomposed."""

    phase: ClassVar[Phase] = Phase.TASK_DECOMPOSITION
    missing_steps: _Texts = ()
    """Steps that no subtask covers."""
    recommended_granularity: _Text = ""
    """How finely the goal should be split."""
    scope_adjustment: _Text = ""
    """Parts to leave out or add."""


class ActionsDecision(ReplanDecision):
    """Decision after the actions were planned."""

    phase: ClassVar[Phase] = Phase.ACTION_SEQUENCE
    unavailable_tools: _Texts = ()
    """Planned tools that cannot be used."""
    alternative_tools: _Texts = ()
    """Tools that could be used instead."""
    dependency_issues: _Texts = ()
    """Problems with the order of the actions."""
    plan_adjustments: _Texts = ()
    """Changes that would fix the plan."""


class ExecutionDecision(ReplanDecision):
    """Decision after an action was executed."""

    phase: ClassVar[Phase] = Phase.EXECUTION
    error_classification: Literal["transient", "persistent", "fatal"] | None = None
    """Whether the error may pass by itself, persists, or rules out recovery."""
    recovery_strategy: _Text = ""
    """How to recover from the error."""
    affected_actions: _Texts = ()
    """Actions that the error keeps from being executed as planned."""


class ReflectionDecision(ReplanDecision):
    """Decision after the result was reflected on."""

    phase: ClassVar[Phase] = Phase.REFLECTION
    evaluation_result: Literal["success", "partial_success", "failure"] | None = None
    """Whether the goal was achieved; with `failure`, a person must accept the result."""
    achievement_rate: float | None = Field(default=None, ge=0, le=100)
    """How much of the goal was achieved, in percent."""
    issues_identified: _Texts = ()
    """Problems with the result."""
    additional_actions: _Texts = ()
    """Actions that would complete the goal."""
    revision_scope: Literal["minor", "moderate", "major"] | None = None
    """How much of the plan must change."""


_MODELS: Final[Mapping[Phase, type[ReplanDecision]]] = {
    model.phase: model
    for model in (
        GoalDecision,
        DecompositionDecision,
        ActionsDecision,
        ExecutionDecision,
        ReflectionDecision,
    )
}


def decision_model(phase: Phase) -> type[ReplanDecision]:
    """Return the decision class of a phase."""
    return _MODELS[phase]


_MAX_PROBLEMS: Final = 20

_Model = TypeVar("_Model", bound=BaseModel)


def parse_json_reply(
    text: str,
    model: type[_Model],
    unwrap: Callable[[JsonObject], JsonValue],
    likelihood: Callable[[JsonObject], int],
    missing: Callable[[_Model], str] = lambda _: "",
) -> _Model:
    """Return the first valid JSON object in a model's reply, skipping prose, fences and thoughts.

    Validation follows JSON: an array may stand for a tuple and a string for a phase, but not a
    string for a number. `unwrap` returns the object to validate, which may be nested; `missing`
    names what a valid one lacks. If none is valid, LLMResponseInvalid lists the problems of the
    first object with the highest likelihood.
    """
    no_object = (
        "the reply holds no JSON object; a truncated one, or one with NaN or Infinity or a"
        " duplicate field, does not count"
    )
    highest = -1
    problems = [no_object]
    for value in islice(extract_json(text), 50):
        inner = unwrap(value) if isinstance(value, dict) else value
        try:
            reply = model.model_validate_json(json.dumps(inner))
            if not (lack := missing(reply)):
                return reply
            latest = [lack]
        except ValidationError as error:
            latest = [str(problem) for problem in validation_problems(error, model)]
            if not isinstance(inner, dict):
                latest = [f"expected a JSON object, got {type(inner).__name__}"]
        rank = 0
        if isinstance(value, dict):
            rank = likelihood(value)
        if rank > highest:
            highest = rank
            problems = latest
    shown = problems[:_MAX_PROBLEMS]
    more = len(problems) - len(shown)
    if more > 0:
        shown.append(f"and {more} more")
    raise LLMResponseInvalid("; ".join(shown))


def parse_decision(text: str, phase: Phase) -> ReplanDecision:
    """Return the decision in a model's reply: a JSON object, or its member `replan_decision`.

    Of several that are valid, the first counts. LLMResponseInvalid lists all problems of the
    likeliest object.
    """
    return parse_json_reply(
        text,
        decision_model(phase),
        unwrap=lambda value: value.get(_WRAPPER, value),
        likelihood=lambda value: _WRAPPER in value or "replan_needed" in value,
    )


class NormalisedDecision(NamedTuple):
    """A consistent decision, with notes about the corrections that made it so."""

    decision: ReplanDecision
    notes: tuple[str, ...]


def normalise(decision: ReplanDecision) -> NormalisedDecision:
    """Return a consistent copy of a decision.

    Its type overrides its level, and its level overrides its target.

    A replan always has a level and a target; a decision without a replan has neither. A decision
    that asks the user always has questions.
    """
    notes: list[str] = []
    requested = decision.replan_needed and decision.replan_type is ReplanType.CLARIFICATION_REQUEST
    if requested or decision.clarification_needed:
        if not decision.clarification_needed:
            notes.append("clarification_needed was false, but a clarification was requested")
        questions = _non_blank(decision.clarification_questions)
        if not questions:
            questions = _non_blank(decision.issues_found)
            source = "the issues found serve as questions"
            if not questions:
                questions = _non_blank((decision.reasoning,))
                source = "its reasoning serves as the question"
            if not questions:
                source = "there is nothing to ask"
            notes.append(f"a clarification without questions: {source}")
        changed: dict[str, object] = {
            "clarification_needed": bool(questions),
            "clarification_questions": questions,
        }
        if requested and not questions:  # it would spend a request and do nothing
            changed |= {"replan_needed": False, "replan_type": ReplanType.NONE}
        decision = decision.model_copy(update=changed)
    kind = decision.replan_type
    names_replan = kind is not ReplanType.NONE
    if decision.replan_needed != names_replan:
        contradiction = "replan_needed was true, but replan_type none"
        if names_replan:
            contradiction = f"replan_type was {kind}, but replan_needed false"
        notes.append(f"{contradiction}: the run continues")
        unchanged = {"replan_needed": False, "replan_type": ReplanType.NONE}
        decision = decision.model_copy(update=unchanged)
    kind = decision.replan_type
    level = decision.replan_level
    target = decision.target_phase
    targets = REPLAN_TARGETS[kind]
    if not targets:
        decision = decision.model_copy(update={"replan_level": None, "target_phase": None})
        return NormalisedDecision(decision, tuple(notes))
    # The level that returns to the named phase, else the default.
    fitting = next(
        (number for number, phase in targets.items() if phase is target), next(iter(targets))
    )
    right = fitting
    if level is not None and level in targets:
        right = level
    if level not in (None, right):
        notes.append(f"replan_level was {level}, but {kind} has level {right}")
    if target not in (None, targets[right]):
        notes.append(
            f"target_phase was {target}, but {kind} at level {right} returns to {targets[right]}"
        )
    decision = decision.model_copy(update={"replan_level": right, "target_phase": targets[right]})
    return NormalisedDecision(decision, tuple(notes))


def _non_blank(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(text.strip() for text in texts if text.strip())


def replan_reason(decision: ReplanDecision) -> str:
    """Return the reason for a replan as one text: reasoning, issues and recommended actions."""
    parts = (
        decision.reasoning,
        "; ".join(decision.issues_found),
        "; ".join(decision.recommended_actions),
    )
    reason = " | ".join(filter(None, parts))
    if not reason:
        return str(decision.replan_type)
    return reason


# Limits and rulings

OverrideReason = Literal["limit", "confidence", "loop"]
"""Reason for not executing a replan that the model wanted."""

RulingKind = Literal["continue", "execute", "execute_with_warning", "ask", "skip"]

_Key = TypeVar("_Key", bound=str)

CountName = Literal[
    "clarifications", "redecompositions", "regenerations", "partial_replans", "plan_revisions"
]

_COUNT_NAMES: Final[Mapping[ReplanType | Phase | None, CountName]] = {
    ReplanType.CLARIFICATION_REQUEST: "clarifications",
    ReplanType.TASK_REDECOMPOSITION: "redecompositions",
    ReplanType.ACTION_REGENERATION: "regenerations",
    ReplanType.PARTIAL_REPLAN: "partial_replans",
    ReplanType.PLAN_REVISION: "plan_revisions",
    Phase.TASK_DECOMPOSITION: "redecompositions",
    Phase.ACTION_SEQUENCE: "regenerations",
}
"""Counters of replans by type; full replans count by target, so that no limit can be evaded under
another name.
"""


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
        confirmation_threshold: confidence from which it is executed once the user agrees; below, it
            is skipped.
        confirm_low_confidence: ask the user in that band; if false, it is skipped there, too.

    Raises:
        SettingsError: a limit is negative, or the thresholds are not ordered 0 ≤ user ≤ minimum ≤
            immediate ≤ 1.
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
        problems: list[Problem] = []
        for name, limit in asdict(self).items():
            if limit < 0 and not name.endswith("threshold"):
                problems.append(Problem(name, f"must be at least 0, got {limit}"))
        bands = (
            0,
            self.confirmation_threshold,
            self.min_threshold,
            self.immediate_threshold,
            1,
        )
        is_ordered = all(low <= high for low, high in pairwise(bands))
        if not is_ordered:
            stated = (
                f"user {self.confirmation_threshold:g}, minimum {self.min_threshold:g},"
                f" immediate {self.immediate_threshold:g}"
            )
            problem = f"expected 0 ≤ user ≤ minimum ≤ immediate ≤ 1, got {stated}"
            problems.append(Problem("confidence", problem))
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
        revisions = settings.revision.max_revisions
        decisions = replanning.llm_decision
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


@dataclass(frozen=True, slots=True)
class ReplanCause:
    """Cause of a decision.

    Attributes:
        error: error message; if empty, the issues that the model found count as the cause.
        action: the name in the plan of the executed action, if the decision is about one.
        lineage: id of the first task in the lineage of that action.
    """

    error: str = ""
    action: str | None = None
    lineage: str | None = None


def fingerprint(decision: ReplanDecision, cause: ReplanCause) -> str:
    """Return a key shared by replans of the same type, after the same phase, for the same cause.

    Numbers, addresses, case, white space and the order of issues do not distinguish causes.
    """
    causes = decision.issues_found or (decision.reasoning,)
    if cause.error:
        causes = (cause.lineage or cause.action or "", cause.error)
    texts = sorted(normalised_cause(" ".join(text.casefold().split())) for text in causes)
    digest = hashlib.sha256("\n".join(texts).encode(errors="surrogatepass")).hexdigest()
    return f"{decision.phase}:{decision.replan_type}:{digest[:16]}"


class ReplanCounts(BaseModel):
    """Replans that a run has spent; immutable and JSON-serialisable.

    Counts not listed here are as in `ReplanLimits`.

    Attributes:
        considered: decisions of all kinds.
        total: all replans, retries and failed ones included.
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

    def add_replan(self, decision: ReplanDecision, cause: ReplanCause) -> ReplanCounts:
        """Count a normalised replan that is about to be executed, whether or not it succeeds."""
        changed: dict[str, object] = {
            "total": self.total + 1,
            "phases": _increment(self.phases, decision.phase),
        }
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
        """Count a question to the user beside a decision.

        Clarification requests are counted by `add_replan`.
        """
        return self.model_copy(update={"clarifications": self.clarifications + 1})

    def reset_retries(self, action: str) -> ReplanCounts:
        """Reset the retries of an action that succeeded, and nothing else."""
        retries = dict(self.retries)
        retries.pop(action, None)
        return self.model_copy(update={"retries": retries})


def _increment(counts: Mapping[_Key, int], key: _Key) -> dict[_Key, int]:
    return {**counts, key: counts.get(key, 0) + 1}


def _count_name(kind: ReplanType, target: Phase | None) -> CountName | None:
    return _COUNT_NAMES.get(target if kind is ReplanType.FULL_REPLAN else kind)


def exhausted_limit(
    kind: ReplanType,
    target: Phase | None,
    limits: ReplanLimits,
    counts: ReplanCounts,
    cause: ReplanCause,
) -> str:
    """Return the limit that forbids a replan, in words; empty if none does."""
    if not limits.enabled and kind is not ReplanType.PLAN_REVISION:
        return "replanning is switched off"
    if counts.total >= limits.total:
        return f"the limit of {pluralise(limits.total, 'replan')} in total is reached"
    counted = _count_name(kind, target)
    if counted is not None:
        limit = getattr(limits, counted)
        if getattr(counts, counted) >= limit:
            noun = counted.removesuffix("s").replace("_", " ")
            return f"the limit of {pluralise(limit, noun)} is reached"
    if kind is ReplanType.RETRY:
        limit = limits.action_retries
        if counts.retries.get(cause.action or "", 0) < limit:
            return ""
        retries = pluralise(limit, "retry", "retries")
        return f"the limit of {retries} of action {cause.action!r} is reached"
    lineage = exhausted_lineage(limits, counts, cause)
    if lineage is not None:
        most = pluralise(limits.replans_per_lineage, "replan")
        return f"the limit of {most} of {lineage!r} and its replacements is reached"
    return ""


def available_replan_types(
    phase: Phase, limits: ReplanLimits, counts: ReplanCounts, cause: ReplanCause
) -> tuple[ReplanType, ...]:
    """Return the replan types that phase and limits allow; if there are none, no model is asked."""
    available: list[ReplanType] = []
    for kind in ALLOWED_REPLANS[phase]:
        if kind is ReplanType.RETRY and cause.action is None:
            continue
        for target in REPLAN_TARGETS[kind].values():
            if not exhausted_limit(kind, target, limits, counts, cause):
                available.append(kind)
                break
    return tuple(available)


def exhausted_lineage(limits: ReplanLimits, counts: ReplanCounts, cause: ReplanCause) -> str | None:
    """Return the lineage of a cause if it has used up its replans."""
    if cause.lineage is None:
        return None
    if counts.lineages.get(cause.lineage, 0) < limits.replans_per_lineage:
        return None
    return cause.lineage


@dataclass(frozen=True, slots=True)
class Ruling:
    """Ruling on a decision: continue, execute it, ask the user for approval, or skip it.

    Attributes:
        kind: `continue`, `execute`, `execute_with_warning`, `ask` or `skip`.
        reason: the rule that applied, in words.
        override: reason for skipping a replan that the model wanted, or for not asking the model.
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
    def is_followed(self) -> bool:
        """True if the replan is executed, now or once the user agrees."""
        return self.is_executable or self.kind == "ask"

    @property
    def asks_person(self) -> bool:
        """True if a person is asked questions, or for approval."""
        return self.kind == "ask" or bool(self.questions)

    @property
    def needs_escalation(self) -> bool:
        """True if a limit or a loop forbids the replan, so that the model is asked again."""
        return self.kind == "skip" and self.override in ("limit", "loop")


def make_ruling(
    decision: ReplanDecision, limits: ReplanLimits, counts: ReplanCounts, cause: ReplanCause
) -> Ruling:
    """Return the ruling on a normalised decision: limits first, then confidence, then loops."""
    questions: tuple[str, ...] = ()
    if decision.clarification_needed and counts.clarifications < limits.clarifications:
        questions = decision.clarification_questions
    kind = decision.replan_type
    if kind is ReplanType.NONE:
        return Ruling("continue", "the model sees no need to replan", questions=questions)
    if kind is ReplanType.RETRY and cause.action is None:
        return Ruling("continue", "there is no action to retry", questions=questions)

    key = fingerprint(decision, cause)
    asks = kind is ReplanType.CLARIFICATION_REQUEST
    kept_questions = () if asks else questions
    reason = exhausted_limit(kind, decision.target_phase, limits, counts, cause)
    if reason:
        blocks = exhausted_lineage(limits, counts, cause)
        return Ruling(
            "skip",
            reason,
            "limit",
            kept_questions,
            blocks,
            key,
        )
    confidence = decision.confidence
    reason = f"its confidence is {confidence:g}"
    minimum = limits.min_threshold
    if limits.confirm_low_confidence:
        minimum = limits.confirmation_threshold
    if confidence < minimum:
        reason = f"{reason}, and {minimum:g} is needed"
        return Ruling("skip", reason, "confidence", kept_questions, fingerprint=key)
    repetitions = counts.causes.get(key, 0)
    if limits.loop_detection and repetitions >= limits.same_trigger:
        if kind is not ReplanType.RETRY:  # retries have a limit of their own
            times = pluralise(repetitions, "time")
            looped = f"the same {kind} has run {times} for the same cause"
            return Ruling("skip", looped, "loop", kept_questions, fingerprint=key)

    band: RulingKind = "execute"
    if confidence < limits.min_threshold:
        # A clarification request asks the user anyway, so it needs no approval.
        band = "execute_with_warning" if asks else "ask"
        reason = f"{reason}, below {limits.min_threshold:g}"
    elif confidence < limits.immediate_threshold:
        band = "execute_with_warning"
        reason = f"{reason}, below {limits.immediate_threshold:g}"
    return Ruling(band, reason, questions=questions, fingerprint=key)


# Records


class RecordModel(BaseModel):
    """Base of journaled models: immutable, and without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PlanningNote(RecordModel):
    """Base of the notes of planning mode in the journal of a run.

    Unknown fields are ignored, because another version may have written the journal.
    """

    model_config = ConfigDict(extra="ignore")

    note_type: ClassVar[str]

    def to_json(self) -> JsonObject:
        """Return the stored form."""
        return self.model_dump(mode="json")


class DecisionRecord(RecordModel):
    """Outcome of a decision.

    Attributes:
        replan_id: its id: `p1`, `p2`, … in each run.
        phase: the phase that was completed.
        llm_decision: the decision as the model wrote it; None if there is none.
        confidence: the model's confidence; None without a decision.
        executed: true if the replan was executed.
        override_reason: reason for skipping a replan that the model wanted, or for not asking the
            model.
        timestamp: start of deciding, in UTC.
        result: outcome; replans that were not executed are skipped.
        duration: seconds spent deciding and executing, without waiting for a person.
        reason: the rule that applied, in words.
        notes: corrections that were made to normalise the decision.
        replan_type: its type after that.
        cause: the action and error that it is about.
        error: reason for the failure, or for the missing decision.
        instead_of: id of the replan that could not be executed and that this one substitutes.
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

    @property
    def problem(self) -> str:
        """The reason why the replan was not executed, or failed; empty if it succeeded."""
        if self.result == "success":
            return ""
        return self.error or self.reason


@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """Input of a decision prompt.

    Attributes:
        phase: the phase that was completed.
        prompt_data: the output of the phase, with the data for judging it.
        cause: the action and error to decide about, if any.
        counts: replans spent so far.
        limits: maximum numbers of replans.
        earlier_decisions: outcomes of the decisions so far, oldest first.
        refusal: why the replan that the model wanted is impossible, to ask for another one; else
            empty.
        rejected_reply: the model's last reply, cut, if it was unusable; else empty.
        problem: why that reply was unusable.
    """

    phase: Phase
    prompt_data: JsonObject
    cause: ReplanCause = ReplanCause()
    counts: ReplanCounts = field(default_factory=ReplanCounts)
    limits: ReplanLimits = ReplanLimits()
    earlier_decisions: tuple[DecisionRecord, ...] = ()
    refusal: str = ""
    rejected_reply: str = ""
    problem: str = ""

    @property
    def replan_types(self) -> tuple[ReplanType, ...]:
        """Replan types that both the phase and the limits allow."""
        return available_replan_types(self.phase, self.limits, self.counts, self.cause)
