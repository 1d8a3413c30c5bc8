"""Decisions of planning mode: phases, replan types and their levels, and the decision that a model returns.

The tables state the replans that each phase allows and the phase that each replan returns to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from itertools import islice
from types import MappingProxyType
from typing import Annotated, ClassVar, Final, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from replanning.errors import LLMResponseInvalid
from replanning.llm.extraction import extract_json
from replanning.plan.messages import validation_problems
from replanning.plan.types import JsonObject, JsonValue


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
"""Replan types that each phase allows."""

REPLAN_TARGETS: Final[Mapping[ReplanType, Mapping[int, Phase]]] = MappingProxyType(
    {
        ReplanType.CLARIFICATION_REQUEST: MappingProxyType({5: Phase.GOAL_UNDERSTANDING}),
        ReplanType.GOAL_REVISION: MappingProxyType({5: Phase.GOAL_UNDERSTANDING}),
        ReplanType.TASK_REDECOMPOSITION: MappingProxyType({4: Phase.TASK_DECOMPOSITION}),
        ReplanType.ACTION_REGENERATION: MappingProxyType({3: Phase.ACTION_SEQUENCE}),
        ReplanType.PARTIAL_REPLAN: MappingProxyType({2: Phase.EXECUTION}),
        ReplanType.FULL_REPLAN: MappingProxyType(
            {4: Phase.TASK_DECOMPOSITION, 3: Phase.ACTION_SEQUENCE, 5: Phase.GOAL_UNDERSTANDING}
        ),
        ReplanType.RETRY: MappingProxyType({1: Phase.EXECUTION}),
        ReplanType.PLAN_REVISION: MappingProxyType({2: Phase.EXECUTION}),
        ReplanType.NONE: MappingProxyType({}),
    }
)
"""Levels of each replan type, default first, with the phase that each level returns to."""

LEVEL_DESCRIPTIONS: Final[Mapping[int, str]] = MappingProxyType(
    {
        1: "retry the action",
        2: "replan what follows the failure",
        3: "regenerate the action plan",
        4: "decompose the goal again",
        5: "understand the goal again",
    }
)
"""Meaning of each replan level."""


def keeps_finished(target: Phase) -> bool:
    """Return whether a replan that returns to `target` keeps finished tasks; otherwise the new plan starts clean."""
    return target not in (Phase.GOAL_UNDERSTANDING, Phase.TASK_DECOMPOSITION)


def carried_over_tasks(
    target: Phase, planned: Iterable[str], done: Iterable[str], failed: Iterable[str]
) -> tuple[str, ...]:
    """Return the tasks of a new plan that count as finished from the start, in the order of the plan.

    Args:
        target: the phase that the replan returns to.
        planned: ids of the new plan's tasks.
        done: ids of the tasks finished before.
        failed: ids of failed tasks; these are never carried over, even if they had finished before.
    """
    if not keeps_finished(target):
        return ()
    kept = frozenset(done) - frozenset(failed)
    return tuple(task for task in planned if task in kept)


_WRAPPER: Final = "replan_decision"

_Text = Annotated[str, Field(max_length=20_000)]

_Texts = Annotated[tuple[_Text, ...], Field(max_length=100)]


class ReplanDecision(BaseModel):
    """A model's decision after a phase: continue, or replan; validated strictly, so that "false" is not true.

    Each phase has a subclass with further fields, returned by `decision_model`. Unknown fields are kept.

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
        if kind not in ALLOWED_REPLANS[cls.phase]:
            raise PydanticCustomError("replan_type", f"{cls.phase} allows {', '.join(ALLOWED_REPLANS[cls.phase])}")
        return kind


class GoalDecision(ReplanDecision):
    """Decision after the goal was understood."""

    phase: ClassVar[Phase] = Phase.GOAL_UNDERSTANDING
    assumptions_to_make: _Texts = ()


class DecompositionDecision(ReplanDecision):
    """Decision after the goal was decomposed."""

    phase: ClassVar[Phase] = Phase.TASK_DECOMPOSITION
    missing_steps: _Texts = ()
    recommended_granularity: _Text = ""
    scope_adjustment: _Text = ""


class ActionsDecision(ReplanDecision):
    """Decision after the actions were planned."""

    phase: ClassVar[Phase] = Phase.ACTION_SEQUENCE
    unavailable_tools: _Texts = ()
    alternative_tools: _Texts = ()
    dependency_issues: _Texts = ()
    plan_adjustments: _Texts = ()


class ExecutionDecision(ReplanDecision):
    """Decision after an action was executed."""

    phase: ClassVar[Phase] = Phase.EXECUTION
    error_classification: Literal["transient", "persistent", "fatal"] | None = None
    recovery_strategy: _Text = ""
    affected_actions: _Texts = ()


class ReflectionDecision(ReplanDecision):
    """Decision after the result was reflected on."""

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
    """Return the decision class of a phase."""
    return _MODELS[phase]


_MAX_JSON_CANDIDATES: Final = 50
"""JSON values of one reply that are tried."""

_MAX_PROBLEMS: Final = 20

_NO_JSON_OBJECT: Final = (
    "the reply holds no JSON object; objects that are truncated, repeat a field, or hold NaN or Infinity do not count"
)

_Value = TypeVar("_Value")


def parse_json_reply(
    text: str,
    parse: Callable[[JsonValue], tuple[_Value | None, list[str]]],
    likelihood: Callable[[JsonValue], int],
) -> _Value:
    """Return the first JSON value in a model's reply that can be parsed; prose, fences and thoughts are skipped.

    Args:
        text: the reply.
        parse: returns the parsed value, or None with its problems.
        likelihood: ranks the values that cannot be parsed; the problems of the first with the highest rank are reported.

    Raises:
        LLMResponseInvalid: no value can be parsed; lists all problems of the likeliest.
    """
    highest, problems = -1, [_NO_JSON_OBJECT]
    for value in islice(extract_json(text), _MAX_JSON_CANDIDATES):
        parsed, found = parse(value)
        if parsed is not None:
            return parsed
        if (rank := likelihood(value)) > highest:
            highest, problems = rank, found
    more = [f"and {len(problems) - _MAX_PROBLEMS} more"] if len(problems) > _MAX_PROBLEMS else []
    raise LLMResponseInvalid("; ".join([*problems[:_MAX_PROBLEMS], *more]))


_Model = TypeVar("_Model", bound=BaseModel)


def validate_reply(value: JsonObject, model: type[_Model]) -> tuple[_Model | None, list[str]]:
    """Return a JSON object as an instance of a strict model, or None with the problems.

    It is validated as JSON, where an array may stand for a tuple and a string for a phase, but not for a number.
    """
    try:
        return model.model_validate_json(json.dumps(value)), []
    except ValidationError as error:
        return None, [str(problem) for problem in validation_problems(error, model)]


def parse_decision(text: str, phase: Phase) -> ReplanDecision:
    """Return the decision in a model's reply: a JSON object, or the `replan_decision` member of one.

    The object may be surrounded by prose, a fenced block or thoughts; of several, the likeliest that is valid counts.

    Raises:
        LLMResponseInvalid: the reply holds no valid decision; lists all problems of the likeliest object.
    """
    model = decision_model(phase)

    def parse(value: JsonValue) -> tuple[ReplanDecision | None, list[str]]:
        inner = value.get(_WRAPPER, value) if isinstance(value, dict) else value
        if not isinstance(inner, dict):
            return None, [f"expected the decision as a JSON object, got {type(inner).__name__}"]
        return validate_reply(inner, model)

    return parse_json_reply(
        text, parse, lambda value: isinstance(value, dict) and (_WRAPPER in value or "replan_needed" in value)
    )


class NormalisedDecision(NamedTuple):
    """A consistent decision, with notes about the corrections that made it so."""

    decision: ReplanDecision
    notes: tuple[str, ...]


def normalise(decision: ReplanDecision) -> NormalisedDecision:
    """Return a consistent copy of a decision: its type overrides its level, and its level overrides its target.

    A replan always has a level, a target and, where it asks the user, questions. A decision without a replan has none.
    """
    notes: list[str] = []
    decision = _normalise_questions(decision, notes)
    kind, needed = decision.replan_type, decision.replan_needed
    if needed and kind is ReplanType.NONE:
        notes.append("replan_needed was true, but replan_type none: the run continues")
        decision = decision.model_copy(update={"replan_needed": False})
    elif not needed and kind is not ReplanType.NONE:
        notes.append(f"replan_type was {kind}, but replan_needed false: the run continues")
        decision = decision.model_copy(update={"replan_type": ReplanType.NONE})
    return NormalisedDecision(_normalise_target(decision, notes), tuple(notes))


def _normalise_questions(decision: ReplanDecision, notes: list[str]) -> ReplanDecision:
    """Give a decision that asks the user questions to ask, or drop the request."""
    requested = decision.replan_needed and decision.replan_type is ReplanType.CLARIFICATION_REQUEST
    if not requested and not decision.clarification_needed:
        return decision
    if not decision.clarification_needed:
        notes.append("clarification_needed was false, but a clarification was requested")
    questions = _non_blank(decision.clarification_questions)
    if not questions:
        questions, source = _non_blank(decision.issues_found), "the issues found are asked about"
        if not questions:
            questions, source = _non_blank((decision.reasoning,)), "its reasoning is shown"
        notes.append(f"a clarification without questions: {source if questions else 'there is nothing to ask'}")
    changed: dict[str, object] = {"clarification_needed": bool(questions), "clarification_questions": questions}
    if requested and not questions:  # it would spend a request and do nothing
        changed |= {"replan_needed": False, "replan_type": ReplanType.NONE}
    return decision.model_copy(update=changed)


def _normalise_target(decision: ReplanDecision, notes: list[str]) -> ReplanDecision:
    """Give a decision the level and target of its type."""
    level, target, targets = decision.replan_level, decision.target_phase, REPLAN_TARGETS[decision.replan_type]
    if not targets:
        return decision.model_copy(update={"replan_level": None, "target_phase": None})
    # The level that returns to the named phase, else the default.
    fitting = next((number for number, phase in targets.items() if phase is target), next(iter(targets)))
    right = level if level is not None and level in targets else fitting
    if level not in (None, right):
        notes.append(f"replan_level was {level}, but {decision.replan_type} has level {right}")
    if target not in (None, targets[right]):
        notes.append(
            f"target_phase was {target}, but {decision.replan_type} at level {right} returns to {targets[right]}"
        )
    return decision.model_copy(update={"replan_level": right, "target_phase": targets[right]})


def _non_blank(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(text.strip() for text in texts if text.strip())


def replan_reason(decision: ReplanDecision) -> str:
    """Return the reason for a replan as one text: reasoning, issues and recommended actions."""
    parts = (decision.reasoning, "; ".join(decision.issues_found), "; ".join(decision.recommended_actions))
    return " | ".join(part for part in parts if part) or str(decision.replan_type)
