"""What a model writes in planning mode, phase by phase, read strictly: nothing is guessed, and nobody's field is lost.

Sizes are bounded, a text holds no control characters, and a reply that does not fit is refused with everything that is
wrong with it, so that the model can be told.
"""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Annotated, Final, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from replanning.errors import LLMResponseInvalid
from replanning.llm.extraction import extract_json
from replanning.plan.messages import validation_problems
from replanning.plan.tasks import Name, Text
from replanning.plan.types import JsonObject, JsonValue
from replanning.planning.decisions import Phase

MAX_REPLY_CHARS: Final = 200_000
"""Characters of a reply that is read at all."""

_MAX_JSON_CANDIDATES: Final = 50

_MAX_PROBLEMS: Final = 20

_NO_JSON_OBJECT: Final = (
    "the reply holds no JSON object; one that is cut off, has a field twice, or holds NaN or Infinity is none"
)

_MAX_TEXT_CHARS: Final = 20_000

_CONTROL_CHARACTERS: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")

_Text = Annotated[Text, Field(max_length=_MAX_TEXT_CHARS)]

_Texts = Annotated[tuple[_Text, ...], Field(max_length=100)]

_Id = Annotated[str, StringConstraints(min_length=1, max_length=60, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]

_Ids = Annotated[tuple[_Id, ...], Field(max_length=1000)]


class _ReplyModel(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class GoalUnderstanding(_ReplyModel):
    """How a goal was understood."""

    main_objective: Annotated[_Text, Field(min_length=1)]
    success_criteria: _Texts = ()
    constraints: _Texts = ()
    context: _Text = ""


class Subtask(_ReplyModel):
    """One part of a goal, with the parts that must be done before it."""

    id: _Id
    description: _Text
    dependencies: _Ids = ()
    estimated_complexity: Literal["low", "medium", "high"] = "medium"
    required_tools: Annotated[tuple[Name, ...], Field(max_length=100)] = ()


class TaskDecomposition(_ReplyModel):
    """A goal taken apart."""

    reasoning: _Text = ""
    subtasks: Annotated[tuple[Subtask, ...], Field(min_length=1, max_length=1000)]


class Action(_ReplyModel):
    """One use of a tool for a subtask.

    Attributes:
        task_id: the subtask; several actions may serve one, in the order in which they stand.
        action_type: what kind of step it is, in the model's word.
        tool: the tool of the library.
        arguments: what is known of its arguments by now; the rest is asked for when it is executed.
        purpose: what it is for.
        expected_outcome: how to see that it worked.
        fallback_strategy: the name of another tool, or what to do in words.
    """

    task_id: _Id
    action_type: _Text = ""
    tool: Name
    arguments: JsonObject = Field(default_factory=dict)
    purpose: _Text = ""
    expected_outcome: _Text = ""
    fallback_strategy: _Text | None = None


class ActionPlan(_ReplyModel):
    """What is to be done with which tools."""

    execution_order: _Ids = ()
    actions: Annotated[tuple[Action, ...], Field(min_length=1, max_length=1000)]


class UnclearGoal(_ReplyModel):
    """The goal cannot be understood without an answer of the user."""

    type: Literal["unclear_goal"] = "unclear_goal"
    message: _Text
    clarification_needed: _Texts = ()


class CannotDecompose(_ReplyModel):
    """The goal cannot be taken apart as it is."""

    type: Literal["cannot_decompose"] = "cannot_decompose"
    message: _Text
    possible: _Texts = ()
    not_possible: _Texts = ()
    other_approach: _Text = ""


class PlanningReply(_ReplyModel):
    """A reply in one of the first three phases; beside an error it may hold what could be inferred."""

    phase: Literal["planning"] = "planning"
    comment: _Text = ""
    goal_understanding: GoalUnderstanding | None = None
    task_decomposition: TaskDecomposition | None = None
    action_plan: ActionPlan | None = None
    error: Annotated[UnclearGoal | CannotDecompose, Field(discriminator="type")] | None = None


class FunctionCall(_ReplyModel):
    """The use of a tool."""

    name: Name
    arguments: JsonObject = Field(default_factory=dict)


class ExecutionReply(_ReplyModel):
    """A reply in execution: which tool is used for the current task, and how."""

    phase: Literal["execution"] = "execution"
    comment: _Text = ""
    current_task: _Text
    function_call: FunctionCall


class Reflection(_ReplyModel):
    """What a model thinks of an executed action."""

    action_id: _Text
    status: Literal["success", "failure", "partial"]
    evaluation: _Text = ""
    alignment_with_plan: _Text = ""
    issues_identified: _Texts = ()
    plan_revision_needed: bool = False


class PlanRevision(_ReplyModel):
    """How a plan is to be changed.

    Attributes:
        reason: why.
        changes: what changes, in words.
        updated_action_plan: the whole plan from here on.
    """

    reason: _Text
    changes: _Texts = ()
    updated_action_plan: ActionPlan


class ReflectionReply(_ReplyModel):
    """A reply in reflection: what the model thinks, how the plan is to be changed, or both."""

    phase: Literal["reflection"] = "reflection"
    comment: _Text = ""
    reflection: Reflection | None = None
    plan_revision: PlanRevision | None = None

    @model_validator(mode="after")
    def _check_not_empty(self) -> Self:
        if self.reflection is None and self.plan_revision is None:
            raise PydanticCustomError("empty", "expected 'reflection', 'plan_revision' or both")
        return self


class Summary(_ReplyModel):
    """What was achieved."""

    goal_achieved: bool
    tasks_completed: int = Field(ge=0)
    tasks_failed: int = Field(ge=0)
    key_outcomes: _Texts = ()


class CompletionReply(_ReplyModel):
    """A reply at the end."""

    phase: Literal["completion"] = "completion"
    comment: _Text = ""
    summary: Summary
    done: Literal[True] = True


class StepReply(_ReplyModel):
    """A reply where there is no plan: the next use of a tool, or that it is done."""

    phase: Literal["execution", "completion"] = "execution"
    comment: _Text = ""
    current_task: _Text = ""
    function_call: FunctionCall | None = None
    summary: Summary | None = None
    done: bool = False

    @model_validator(mode="after")
    def _check_single_step(self) -> Self:
        if (self.function_call is None) == (self.summary is None) or self.done != (self.summary is not None):
            raise PydanticCustomError("step", "expected either 'function_call', or 'summary' with 'done': true")
        return self


class InterventionSummary(Summary):
    """What was achieved, and why it takes a person to go on."""

    revision_attempts: int = Field(ge=0)
    reason: _Text
    current_state: _Text = ""
    recommendations: _Texts = ()


def sanitise_text(text: str) -> str:
    """Text of somebody else's, such as of an error, as it may stand in a summary."""
    return _CONTROL_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", text)[:_MAX_TEXT_CHARS]


class RequiresHumanIntervention(_ReplyModel):
    """The end of a run whose revisions are used up."""

    phase: Literal["completion"] = "completion"
    status: Literal["requires_human_intervention"] = "requires_human_intervention"
    comment: _Text = ""
    summary: InterventionSummary


PHASE_OUTPUT_FIELDS: Final = {
    Phase.GOAL_UNDERSTANDING: "goal_understanding",
    Phase.TASK_DECOMPOSITION: "task_decomposition",
    Phase.ACTION_SEQUENCE: "action_plan",
}
"""The field of a planning reply that holds what a phase is for."""

_Reply = TypeVar("_Reply", bound=BaseModel)

_BARE_FIELDS: Final[dict[type[BaseModel], str]] = {
    ExecutionReply: "function_call",
    ReflectionReply: "reflection",
    CompletionReply: "summary",
    RequiresHumanIntervention: "summary",
}


def parse_planning(text: str, phase: Phase) -> PlanningReply:
    """The reply in one of the first three phases; its output may stand by itself, without the rest of the reply.

    Args:
        text: what the model wrote; the JSON may stand in prose, in a fenced block or beside thoughts.
        phase: whose output is expected, unless the reply states an error.

    Raises:
        LLMReplyInvalid: there is none; says everything that is wrong with the likeliest.
    """
    expected = PHASE_OUTPUT_FIELDS[phase]
    return _parse_reply(text, PlanningReply, expected, needed=(expected, "error"))


def parse_reply(text: str, model: type[_Reply]) -> _Reply:
    """The reply of a later phase: `ExecutionReply`, `ReflectionReply`, `CompletionReply` and so on.

    Raises:
        LLMReplyInvalid: there is none; says everything that is wrong with the likeliest.
    """
    return _parse_reply(text, model, _BARE_FIELDS.get(model), needed=())


def _parse_reply(text: str, model: type[_Reply], inner: str | None, needed: tuple[str, ...]) -> _Reply:
    if len(text) > MAX_REPLY_CHARS:
        raise LLMResponseInvalid(f"the reply has {len(text)} characters, at most {MAX_REPLY_CHARS} are read")
    likeliest: tuple[int, list[str]] = (-1, [_NO_JSON_OBJECT])
    for value in islice(extract_json(text), _MAX_JSON_CANDIDATES):
        reply, problems = _parse_candidate(value, model, inner, needed)
        if reply is not None:
            return reply
        known = sum(name in model.model_fields for name in value) if isinstance(value, dict) else 0
        if known > likeliest[0]:
            likeliest = (known, problems)
    wrong = likeliest[1]
    more = [f"and {len(wrong) - _MAX_PROBLEMS} more"] if len(wrong) > _MAX_PROBLEMS else []
    raise LLMResponseInvalid("; ".join([*wrong[:_MAX_PROBLEMS], *more]))


def _parse_candidate(
    value: JsonValue, model: type[_Reply], inner: str | None, needed: tuple[str, ...]
) -> tuple[_Reply | None, list[str]]:
    if not isinstance(value, dict):
        return None, [f"expected a JSON object, got {type(value).__name__}"]
    bare = inner is not None and not any(name in value for name in model.model_fields)
    try:
        # As JSON: there a list may stand for a tuple, but not text for a number.
        reply = model.model_validate_json(json.dumps({inner: value} if bare else value))
    except ValidationError as error:
        return None, [str(problem) for problem in validation_problems(error, model)]
    if needed and all(getattr(reply, name) is None for name in needed):
        return None, [f"expected {' or '.join(map(repr, needed))}"]
    return reply, []
