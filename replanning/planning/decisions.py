"""The words of planning mode: its phases, the kinds of replans, and what belongs together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from itertools import islice
from types import MappingProxyType
from typing import Annotated, ClassVar, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from replanning.errors import LLMResponseInvalid
from replanning.llm.extraction import extract_json
from replanning.plan.messages import validation_problems
from replanning.plan.types import JsonValue


class Phase(StrEnum):
    """A phase of planning mode, in the order in which a run passes through them."""

    GOAL_UNDERSTANDING = "goal_understanding"
    TASK_DECOMPOSITION = "task_decomposition"
    ACTION_SEQUENCE = "action_sequence"
    EXECUTION = "execution"
    REFLECTION = "reflection"


class ReplanType(StrEnum):
    """What a model may want to be done again."""

    CLARIFICATION_REQUEST = "clarification_request"
    GOAL_REVISION = "goal_revision"
    TASK_REDECOMPOSITION = "task_redecomposition"
    ACTION_REGENERATION = "action_regeneration"
    PARTIAL_REPLAN = "partial_replan"
    FULL_REPLAN = "full_replan"
    RETRY = "retry"
    PLAN_REVISION = "plan_revision"
    NONE = "none"


ALLOWED_REPLANS: Final[Mapping[Phase, tuple[ReplanType, ...]]] = MappingProxyType(
    {
        Phase.GOAL_UNDERSTANDING: (ReplanType.CLARIFICATION_REQUEST, ReplanType.GOAL_REVISION, ReplanType.NONE),
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
)
"""What each phase may decide."""

_FULL_REPLAN_TARGETS: Final = MappingProxyType(
    {4: Phase.TASK_DECOMPOSITION, 3: Phase.ACTION_SEQUENCE, 5: Phase.GOAL_UNDERSTANDING}
)

REPLAN_TARGETS: Final[Mapping[ReplanType, Mapping[int, Phase]]] = MappingProxyType(
    {
        ReplanType.CLARIFICATION_REQUEST: MappingProxyType({5: Phase.GOAL_UNDERSTANDING}),
        ReplanType.GOAL_REVISION: MappingProxyType({5: Phase.GOAL_UNDERSTANDING}),
        ReplanType.TASK_REDECOMPOSITION: MappingProxyType({4: Phase.TASK_DECOMPOSITION}),
        ReplanType.ACTION_REGENERATION: MappingProxyType({3: Phase.ACTION_SEQUENCE}),
        ReplanType.PARTIAL_REPLAN: MappingProxyType({2: Phase.EXECUTION}),
        ReplanType.FULL_REPLAN: _FULL_REPLAN_TARGETS,
        ReplanType.RETRY: MappingProxyType({1: Phase.EXECUTION}),
        ReplanType.PLAN_REVISION: MappingProxyType({2: Phase.EXECUTION}),
        ReplanType.NONE: MappingProxyType({}),
    }
)
"""The levels a kind of replan may have, the usual one first, and the phase that each returns to."""

LEVEL_DESCRIPTIONS: Final[Mapping[int, str]] = MappingProxyType(
    {
        1: "retry the action",
        2: "replan what follows the failure",
        3: "regenerate the action plan",
        4: "decompose the goal again",
        5: "understand the goal again",
    }
)
"""What each level of a replan means."""


def keeps_finished(target: Phase) -> bool:
    """Whether a replan that returns to a phase keeps what is finished; else the new plan starts clean."""
    return target not in (Phase.GOAL_UNDERSTANDING, Phase.TASK_DECOMPOSITION)


def carried_over_tasks(
    target: Phase, planned: Iterable[str], done: Iterable[str], failed: Iterable[str]
) -> tuple[str, ...]:
    """The tasks of a new plan that count as finished from the start, in its order.

    Args:
        target: the phase that the replan returns to.
        planned: ids of the new plan's tasks.
        done: ids of tasks that were finished before.
        failed: ids of tasks that failed; they are never carried over, also where they were finished once.
    """
    if not keeps_finished(target):
        return ()
    kept = frozenset(done) - frozenset(failed)
    return tuple(task for task in planned if task in kept)


_WRAPPER: Final = "replan_decision"

_MAX_JSON_CANDIDATES: Final = 50
"""How many JSON values of one reply are held against what was asked for."""

_MAX_PROBLEMS: Final = 20

_NO_JSON_OBJECT: Final = (
    "the reply holds no JSON object; one that is cut off, has a field twice, or holds NaN or Infinity is none"
)

_Text = Annotated[str, Field(max_length=20_000)]

_Texts = Annotated[tuple[_Text, ...], Field(max_length=100)]


class ReplanDecision(BaseModel):
    """Whether a phase was good enough, and what to do again if not; strict, so that "false" is not true.

    Each phase has a subclass with fields of its own; `decision_model` finds it. Fields that nobody asked for are kept.

    Attributes:
        phase: after which it was decided.
        replan_needed: whether anything is to be done again.
        confidence: how sure the model is, from 0 to 1.
        reasoning: why.
        replan_type: what is to be done again; one that the phase allows.
        target_phase: where to go on.
        replan_level: from 1, the action, to 5, the goal.
        issues_found: what is wrong.
        recommended_actions: what to do about it.
        clarification_needed: whether the user must be asked, also where nothing is to be done again.
        clarification_questions: what to ask.
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
        if kind not in ALLOWED_REPLANS[cls.phase]:
            raise PydanticCustomError("replan_type", f"{cls.phase} allows {', '.join(ALLOWED_REPLANS[cls.phase])}")
        return kind


class GoalDecision(ReplanDecision):
    """The decision about how a goal was understood."""

    phase: ClassVar[Phase] = Phase.GOAL_UNDERSTANDING
    assumptions_to_make: _Texts = ()


class DecompositionDecision(ReplanDecision):
    """The decision about how a goal was decomposed."""

    phase: ClassVar[Phase] = Phase.TASK_DECOMPOSITION
    missing_steps: _Texts = ()
    recommended_granularity: _Text = ""
    scope_adjustment: _Text = ""


class ActionsDecision(ReplanDecision):
    """The decision about an action plan."""

    phase: ClassVar[Phase] = Phase.ACTION_SEQUENCE
    unavailable_tools: _Texts = ()
    alternative_tools: _Texts = ()
    dependency_issues: _Texts = ()
    plan_adjustments: _Texts = ()


class ExecutionDecision(ReplanDecision):
    """The decision about an executed action."""

    phase: ClassVar[Phase] = Phase.EXECUTION
    error_classification: Literal["transient", "persistent", "fatal"] | None = None
    recovery_strategy: _Text = ""
    affected_actions: _Texts = ()


class ReflectionDecision(ReplanDecision):
    """The decision about what was achieved."""

    phase: ClassVar[Phase] = Phase.REFLECTION
    evaluation_result: Literal["success", "partial_success", "failure"] | None = None
    achievement_rate: float | None = Field(default=None, ge=0, le=100)
    issues_identified: _Texts = ()
    additional_actions: _Texts = ()
    revision_scope: Literal["minor", "moderate", "major"] | None = None


_MODELS: Final[Mapping[Phase, type[ReplanDecision]]] = MappingProxyType(
    {
        model.phase: model
        for model in (GoalDecision, DecompositionDecision, ActionsDecision, ExecutionDecision, ReflectionDecision)
    }
)


def decision_model(phase: Phase) -> type[ReplanDecision]:
    """The class of the decisions of a phase."""
    return _MODELS[phase]


def parse_decision(text: str, phase: Phase) -> ReplanDecision:
    """The decision in a model's reply: one JSON object, by itself or as `replan_decision` in another.

    It may stand in prose, in a fenced block or beside thoughts; of several, the likeliest that fits is taken.

    Raises:
        LLMReplyInvalid: there is none; says everything that is wrong with the likeliest.
    """
    wrong: list[str] = []
    looked_right = False
    for value in islice(extract_json(text), _MAX_JSON_CANDIDATES):
        decision, problems = _parse_candidate(value, phase)
        if decision is not None:
            return decision
        looks_right = isinstance(value, dict) and (_WRAPPER in value or "replan_needed" in value)
        if not wrong or (looks_right and not looked_right):
            wrong, looked_right = problems, looks_right
    more = [f"and {len(wrong) - _MAX_PROBLEMS} more"] if len(wrong) > _MAX_PROBLEMS else []
    raise LLMResponseInvalid("; ".join([*(wrong or [_NO_JSON_OBJECT])[:_MAX_PROBLEMS], *more]))


def _parse_candidate(value: JsonValue, phase: Phase) -> tuple[ReplanDecision | None, list[str]]:
    inner = value.get(_WRAPPER, value) if isinstance(value, dict) else value
    if not isinstance(inner, dict):
        return None, [f"expected the decision as a JSON object, got {type(inner).__name__}"]
    model = decision_model(phase)
    try:
        # As JSON: there a list may stand for a tuple and text for a phase, but not text for a number.
        return model.model_validate_json(json.dumps(inner)), []
    except ValidationError as error:
        return None, [str(problem) for problem in validation_problems(error, model)]


class NormalisedDecision(NamedTuple):
    """A decision that does not contradict itself, and what was changed to that end."""

    decision: ReplanDecision
    notes: tuple[str, ...]


def normalise(decision: ReplanDecision) -> NormalisedDecision:
    """A decision whose parts agree: its type counts before its level, and its level before its target.

    A replan always has a level, a target and something to do. Where nothing is to be done again, it has none of them.
    """
    notes: list[str] = []
    asked = _normalise_questions(decision, notes)
    return NormalisedDecision(_normalise_target(_normalise_type(asked, notes), notes), tuple(notes))


def _normalise_questions(decision: ReplanDecision, notes: list[str]) -> ReplanDecision:
    """One that asks the user something wherever it says so."""
    requests = decision.replan_needed and decision.replan_type is ReplanType.CLARIFICATION_REQUEST
    if not requests and not decision.clarification_needed:
        return decision
    if requests and not decision.clarification_needed:
        notes.append("clarification_needed was false, but a clarification was requested")
    said = _non_blank(decision.clarification_questions)
    questions = said or _non_blank(decision.issues_found) or _non_blank((decision.reasoning,))
    if not said:
        source = "the issues found are asked about" if _non_blank(decision.issues_found) else "its reasoning is shown"
        notes.append(f"a clarification without questions: {source if questions else 'there is nothing to ask'}")
    changed = {"clarification_needed": bool(questions), "clarification_questions": questions}
    if requests and not questions:  # it would spend a request and do nothing
        return decision.model_copy(update={**changed, "replan_needed": False, "replan_type": ReplanType.NONE})
    return decision.model_copy(update=changed)


def _non_blank(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(text.strip() for text in texts if text.strip())


def replan_reason(decision: ReplanDecision) -> str:
    """Why something is done again, for whoever does it."""
    parts = (decision.reasoning, "; ".join(decision.issues_found), "; ".join(decision.recommended_actions))
    return " | ".join(part for part in parts if part) or str(decision.replan_type)


def _normalise_type(decision: ReplanDecision, notes: list[str]) -> ReplanDecision:
    """One that names a type if, and only if, something is to be done again."""
    kind, needed = decision.replan_type, decision.replan_needed
    if needed and kind is ReplanType.NONE:
        notes.append("replan_needed was true, but replan_type none: nothing is done again")
        return decision.model_copy(update={"replan_needed": False})
    if not needed and kind is not ReplanType.NONE:
        notes.append(f"replan_type was {kind}, but replan_needed false: nothing is done again")
        return decision.model_copy(update={"replan_type": ReplanType.NONE})
    return decision


def _normalise_target(decision: ReplanDecision, notes: list[str]) -> ReplanDecision:
    """One whose level and target are those of its type."""
    level, target, targets = decision.replan_level, decision.target_phase, REPLAN_TARGETS[decision.replan_type]
    if not targets:
        return decision.model_copy(update={"replan_level": None, "target_phase": None})
    right = level if level is not None and level in targets else _level_for(target, targets)
    if level not in (None, right):
        notes.append(f"replan_level was {level}, but {decision.replan_type} has level {right}")
    if target not in (None, targets[right]):
        returns = f"{decision.replan_type} at level {right} returns to {targets[right]}"
        notes.append(f"target_phase was {target}, but {returns}")
    return decision.model_copy(update={"replan_level": right, "target_phase": targets[right]})


def _level_for(target: Phase | None, targets: Mapping[int, Phase]) -> int:
    """The level that returns to a phase, else the usual one."""
    return next((level for level, phase in targets.items() if phase is target), next(iter(targets)))
