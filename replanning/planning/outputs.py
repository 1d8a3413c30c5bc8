"""Outputs of a model in planning mode: one strict model for each phase's reply, and their parsers.

Sizes are bounded and control characters refused. A reply that does not fit is refused with all its
problems, so that the model can correct it. Unknown fields are refused, too: one may be a known
field under another name, such as `depends_on` for `dependencies`, and would be lost silently.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Annotated, Final, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from replanning.errors import ExpressionError, LLMResponseInvalid
from replanning.plan.elements import LIST_FIELDS, template_of
from replanning.plan.json_values import as_object
from replanning.plan.messages import cut
from replanning.plan.references import rename_references
from replanning.plan.tasks import (
    ElementKey,
    ForEach,
    MaxItems,
    MaxParallel,
    Name,
    OnItemFailure,
    Text,
)
from replanning.plan.types import JsonObject, JsonValue, TaskId
from replanning.planning.decisions import Phase, parse_json_reply

MAX_REPLY_CHARS: Final = 200_000
"""Longest reply that is parsed."""

_MAX_TEXT_CHARS: Final = 20_000

_MAX_ELEMENTS: Final = 1_000
"""Maximum length of a list that an action is repeated for."""

_CONTROL_CHARACTERS: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")

LimitedText = Annotated[Text, Field(max_length=_MAX_TEXT_CHARS)]

LimitedTexts = Annotated[tuple[LimitedText, ...], Field(max_length=100)]

_MAX_ID_CHARS: Final = 60

_VALID_ID: Final = re.compile(rf"(?!_)\w[\w.-]{{0,{_MAX_ID_CHARS - 1}}}")

_INVALID_ID_PART: Final = re.compile(r"[^\w.-]+|\s+")


def normalise_id(text: str) -> str:
    """Return a text as the id of a subtask: `step 1` becomes `step-1`.

    A text without letters or digits stays as it is.
    """
    if _VALID_ID.fullmatch(text):
        return text
    plain = _INVALID_ID_PART.sub("-", unicodedata.normalize("NFKC", text)).strip("-_.")
    return plain[:_MAX_ID_CHARS].rstrip("-_.") or text


def rename_subtask(task_id: TaskId, rename: Callable[[str], str]) -> str:
    """Return the new name of a subtask in a reference; `convert[0]` is an element of `convert`."""
    subtask = template_of(task_id)
    return rename(subtask) + task_id.removeprefix(subtask)


def _check_id(text: str) -> str:
    if not _VALID_ID.fullmatch(text):
        letters = f"1 to {_MAX_ID_CHARS} letters, digits, '-', '_' and '.'"
        rule = f"{letters}, beginning with a letter or a digit"
        raise PydanticCustomError("id", f"an id consists of {rule}")
    return text


_Id = Annotated[str, AfterValidator(_check_id)]

_Ids = Annotated[tuple[_Id, ...], Field(max_length=1000)]


class _ReplyModel(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class GoalUnderstanding(_ReplyModel):
    """Goal as the model understands it."""

    main_objective: Annotated[LimitedText, Field(min_length=1)]
    success_criteria: LimitedTexts = ()
    constraints: LimitedTexts = ()
    context: LimitedText = ""


class Subtask(_ReplyModel):
    """Part of a goal, with the parts that must be done before it."""

    id: _Id
    description: LimitedText
    dependencies: _Ids = ()
    estimated_complexity: Literal["low", "medium", "high"] = "medium"
    required_tools: Annotated[tuple[Name, ...], Field(max_length=100)] = ()


Renamed = SkipJsonSchema[dict[str, str]]


class TaskDecomposition(_ReplyModel):
    """Goal decomposed into subtasks.

    Attributes:
        renamed: normalised ids, by the ids that the model wrote.
    """

    reasoning: LimitedText = ""
    subtasks: Annotated[tuple[Subtask, ...], Field(min_length=1, max_length=1000)]
    renamed: Renamed = {}

    def remaining(self, finished: Container[str]) -> list[Subtask]:
        """Return the subtasks that are not finished."""
        return [subtask for subtask in self.subtasks if subtask.id not in finished]

    def ids_by_label(self) -> JsonObject:
        """Return the ids of the subtasks, by labels that do not repeat the ids."""
        labelled: JsonObject = {}
        for number, subtask in enumerate(self.subtasks, 1):
            labelled[f"the id of subtask {number}"] = subtask.id
        return labelled


class Action(_ReplyModel):
    """One use of a tool for a subtask, or one use for each element of a list.

    Attributes:
        task_id: the subtask; several actions may serve one, in list order.
        action_type: kind of step, in the model's own word.
        tool: name of the tool.
        arguments: the arguments known so far; the model is asked for the others when the action is
            executed.
        purpose: its purpose.
        expected_outcome: the sign of success.
        fallback_strategy: the name of another tool, or advice in words.
        may_fail: whether a failure of the tool is a result to continue with, such as that of a test
            before the fix.
        for_each: a list, or a reference to one: the tool is used once for each element, which is
            `${item}` in the arguments and the purpose, and the output is the list of the outputs.
        key: the name of an element, such as `${item.id}`; elements are numbered otherwise.
        max_items: maximum number of elements; with more, the action fails.
        max_parallel: maximum number of elements processed at once.
        on_item_failure: `skip` to continue without a failed element; its output is then null.
    """

    task_id: _Id
    action_type: LimitedText = ""
    tool: Name
    arguments: JsonObject = Field(default_factory=dict)
    purpose: LimitedText = ""
    expected_outcome: LimitedText = ""
    fallback_strategy: LimitedText | None = None
    may_fail: bool = False
    for_each: ForEach = None
    key: ElementKey = None
    max_items: Annotated[MaxItems, Field(le=_MAX_ELEMENTS)] = _MAX_ELEMENTS
    max_parallel: MaxParallel = None
    on_item_failure: OnItemFailure = "fail"

    @model_serializer(mode="wrap")
    def _without_list(self, serialise: SerializerFunctionWrapHandler) -> JsonObject:
        """Leave out fields about a missing list: prompts and journals repeat every plan."""
        fields: JsonObject = serialise(self)
        if self.for_each is None:
            for name in ("for_each", *LIST_FIELDS):
                fields.pop(name, None)
        return fields


class ActionPlan(_ReplyModel):
    """Planned actions and their order; `renamed` as in the decomposition."""

    execution_order: _Ids = ()
    actions: Annotated[tuple[Action, ...], Field(min_length=1, max_length=1000)]
    renamed: Renamed = {}

    @property
    def subtask_order(self) -> tuple[str, ...]:
        """Subtasks in the order in which they run: the stated one, then that of the actions."""
        order = dict.fromkeys(self.execution_order)
        for action in self.actions:
            order[action.task_id] = None
        return tuple(order)

    def without(self, finished: Container[str]) -> ActionPlan:
        """Return the plan without the actions of finished subtasks."""
        actions: list[Action] = []
        for action in self.actions:
            if action.task_id not in finished:
                actions.append(action)
        order = [name for name in self.execution_order if name not in finished]
        left = {"actions": tuple(actions), "execution_order": tuple(order)}
        return self.model_copy(update=left)


class UnclearGoal(_ReplyModel):
    """Error reply: the goal cannot be understood without an answer from the user."""

    type: Literal["unclear_goal"] = "unclear_goal"
    message: LimitedText
    clarification_needed: LimitedTexts = ()


class CannotDecompose(_ReplyModel):
    """Error reply: the goal cannot be decomposed as stated."""

    type: Literal["cannot_decompose"] = "cannot_decompose"
    message: LimitedText
    possible: LimitedTexts = ()
    not_possible: LimitedTexts = ()
    other_approach: LimitedText = ""


class PlanningReply(_ReplyModel):
    """Reply in one of the first three phases; an error reply may include partial output."""

    phase: Literal["planning"] = "planning"
    comment: LimitedText = ""
    goal_understanding: GoalUnderstanding | None = None
    task_decomposition: TaskDecomposition | None = None
    action_plan: ActionPlan | None = None
    error: Annotated[UnclearGoal | CannotDecompose, Field(discriminator="type")] | None = None


class FunctionCall(_ReplyModel):
    """Call of a tool."""

    name: Name
    arguments: JsonObject = Field(default_factory=dict)


class ExecutionReply(_ReplyModel):
    """Reply in execution: the tool call for the current task."""

    phase: Literal["execution"] = "execution"
    comment: LimitedText = ""
    current_task: LimitedText = ""
    function_call: FunctionCall


class Reflection(_ReplyModel):
    """Evaluation of an executed action."""

    # The docstring, which models see in the schema, leaves out the alias: they should not use it.
    action_id: Annotated[
        LimitedText, Field(validation_alias=AliasChoices("action_id", "action_evaluated"))
    ]
    status: Literal["success", "failure", "partial"]
    evaluation: LimitedText = ""
    alignment_with_plan: LimitedText = ""
    issues_identified: LimitedTexts = ()
    plan_revision_needed: bool = False


def _change_in_words(change: object) -> object:
    """Return a change that a model states as `{"type": "add_action", "details": "…"}` in words.

    Other changes are returned as they are.
    """
    if isinstance(change, dict) and change.keys() == {"type", "details"}:
        return f"{change['type']}: {change['details']}"
    return change


_Change = Annotated[LimitedText, BeforeValidator(_change_in_words)]


class PlanRevision(_ReplyModel):
    """Revision of a plan: the reason, the changes in words, and the whole plan from here on."""

    reason: LimitedText
    changes: Annotated[tuple[_Change, ...], Field(max_length=100)] = ()
    updated_action_plan: ActionPlan


class ReflectionReply(_ReplyModel):
    """Reply in reflection: an evaluation, a plan revision, or both."""

    phase: Literal["reflection"] = "reflection"
    comment: LimitedText = ""
    reflection: Reflection | None = None
    plan_revision: PlanRevision | None = None

    @model_validator(mode="after")
    def _check_not_empty(self) -> Self:
        if self.reflection is None and self.plan_revision is None:
            raise PydanticCustomError("empty", "expected 'reflection', 'plan_revision' or both")
        return self


class RevisionReply(ReflectionReply):
    """Reply to a request for a revision of the plan; an evaluation may come with it."""

    plan_revision: PlanRevision


class Summary(_ReplyModel):
    """Summary of a run; `criteria_met` judges each success criterion, in its order, or none."""

    goal_achieved: bool
    criteria_met: Annotated[tuple[bool, ...], Field(max_length=100)] = ()
    tasks_completed: int = Field(ge=0)
    tasks_failed: int | None = Field(default=None, ge=0)
    """The model's count, if it states one; a recorded completion has the journal's counts."""
    key_outcomes: LimitedTexts = ()

    @model_validator(mode="after")
    def _check_criteria(self) -> Self:
        if self.goal_achieved and not all(self.criteria_met):
            raise PydanticCustomError(
                "criteria", "'goal_achieved' is true, but not every one of 'criteria_met'"
            )
        return self


class CompletionReply(_ReplyModel):
    """Reply at the end of a run."""

    phase: Literal["completion"] = "completion"
    comment: LimitedText = ""
    summary: Summary
    done: Literal[True] = True


class StepReply(_ReplyModel):
    """Reply in a tool loop without a plan: the next tool call, or the summary."""

    phase: Literal["execution", "completion"] = "execution"
    comment: LimitedText = ""
    current_task: LimitedText = ""
    function_call: FunctionCall | None = None
    summary: Summary | None = None
    done: bool = False

    @model_validator(mode="after")
    def _check_single_step(self) -> Self:
        if (self.function_call is None) == (self.summary is None) or self.done != (
            self.summary is not None
        ):
            raise PydanticCustomError(
                "step", "expected either 'function_call', or 'summary' with 'done': true"
            )
        return self


class InterventionSummary(Summary):
    """Summary of a run that only a person can continue, with the reason."""

    revision_attempts: int = Field(ge=0)
    reason: LimitedText
    current_state: LimitedText = ""
    recommendations: LimitedTexts = ()


class RequiresHumanIntervention(_ReplyModel):
    """Completion of a run that only a person can continue."""

    phase: Literal["completion"] = "completion"
    status: Literal["requires_human_intervention"] = "requires_human_intervention"
    comment: LimitedText = ""
    summary: InterventionSummary


def clean_text(text: str) -> str:
    """Return a text without control characters, cut to the size allowed in replies."""
    return cut(_CONTROL_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", text), _MAX_TEXT_CHARS)


PHASE_OUTPUT_FIELDS: Final = {
    Phase.GOAL_UNDERSTANDING: "goal_understanding",
    Phase.TASK_DECOMPOSITION: "task_decomposition",
    Phase.ACTION_SEQUENCE: "action_plan",
}
"""Field of a planning reply that holds the output of each phase."""

_BARE_FIELDS: Final[Mapping[type[BaseModel], str]] = {
    ExecutionReply: "function_call",
    ReflectionReply: "reflection",
    RevisionReply: "plan_revision",
    CompletionReply: "summary",
    RequiresHumanIntervention: "summary",
}
"""Field of each reply that may be given alone, without the reply around it."""

_Reply = TypeVar("_Reply", bound=BaseModel)


def _normalise_references(value: JsonValue) -> JsonValue:
    """Return arguments, or a list, whose references name subtasks by their normalised ids."""

    def rename(task_id: TaskId) -> str:
        return rename_subtask(task_id, normalise_id)

    try:
        return rename_references({"value": value}, rename)["value"]
    except ExpressionError:  # reported by the check of the references
        return value


def _normalise_ids(value: JsonValue) -> JsonValue:
    """Return a reply with normalised ids of subtasks, also in references; `renamed` maps them."""
    if isinstance(value, list):
        return [_normalise_ids(item) for item in value]
    if not isinstance(value, dict):
        return value
    normalised: JsonObject = {}
    for key, member in value.items():
        if key in ("id", "task_id") and isinstance(member, str):
            normalised[key] = normalise_id(member)
        elif key in ("dependencies", "execution_order") and isinstance(member, list):
            normalised[key] = list(map(_normalise_name, member))
        elif key == "arguments" and isinstance(member, dict):
            normalised[key] = member
            if "task_id" in value:
                normalised[key] = _normalise_references(member)
        elif key == "for_each" and "task_id" in value:
            # An `id` in an element is data, not the id of a subtask.
            normalised[key] = _normalise_references(member)
        else:
            normalised[key] = _normalise_ids(member)
        if key in ("subtasks", "actions") and isinstance(member, list):
            normalised["renamed"] = _renamed_ids(member)
    return normalised


def _normalise_name(name: JsonValue) -> JsonValue:
    """Return the normalised id of a subtask; validation reports names that are not texts."""
    if not isinstance(name, str):
        return name
    return normalise_id(name)


def _renamed_ids(parts: Sequence[JsonValue]) -> JsonObject:
    """Return the new ids of subtasks or actions, by the ids that normalisation changes."""
    ids: set[str] = set()
    for part in parts:
        if isinstance(part, dict):
            ids.add(str(part.get("id", part.get("task_id"))))
    renamed: JsonObject = {}
    for name in sorted(ids):
        new = normalise_id(name)
        if new != name:
            renamed[name] = new
    return renamed


def parse_planning(text: str, phase: Phase) -> PlanningReply:
    """Return the reply of one of the first three phases.

    The output may stand alone, without the reply around it. The reply may state an error instead.
    LLMResponseInvalid lists all problems of the likeliest object.
    """
    expected = PHASE_OUTPUT_FIELDS[phase]

    def missing(reply: PlanningReply) -> str:
        if getattr(reply, expected) or reply.error:
            return ""
        return f"expected {expected!r} or 'error'"

    return parse_reply(text, PlanningReply, expected, missing)


def parse_reply(
    text: str,
    model: type[_Reply],
    bare_field: str | None = None,
    missing: Callable[[_Reply], str] = lambda _: "",
) -> _Reply:
    """Return the reply of a later phase, such as an `ExecutionReply` or a `CompletionReply`.

    LLMResponseInvalid lists all problems of the likeliest object.
    """
    bare = bare_field or _BARE_FIELDS.get(model)
    if len(text) > MAX_REPLY_CHARS:
        raise LLMResponseInvalid(
            f"the reply has {len(text)} characters; at most {MAX_REPLY_CHARS} are read"
        )

    def fields_in(value: JsonObject) -> int:
        return sum(name in model.model_fields for name in value)

    def unwrap(value: JsonObject) -> JsonObject:
        reply = value
        if bare is not None and not fields_in(value):
            reply = {bare: value}
        return as_object(_normalise_ids(reply))

    return parse_json_reply(text, model, unwrap, fields_in, missing)
