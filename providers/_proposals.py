"""Answers of language models: their schemas as services take them, and proposed changes as alternatives."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from typing import Annotated, Final, Literal, NamedTuple, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from replanning import Alternative, PlanView, Task
from replanning.changes import (
    AbortRun,
    AddTask,
    CancelTask,
    ModifyTask,
    PlanChange,
    RemoveTask,
    ReorderTasks,
    ReplaceTask,
    RetryTask,
    SkipTask,
)
from replanning.errors import UnknownTask
from replanning.live import TaskState, TaskView
from replanning.llm import LLMOptions
from replanning.llm.provider import validation_message
from replanning.plan import JsonObject
from replanning.plan.json_values import exceeds_depth
from replanning.plan.messages import truncate
from replanning.plan.types import JsonValue

_SCHEMA_MAPS: Final = ("properties", "$defs")

_UNSUPPORTED_KEYWORDS: Final = frozenset(
    {"default", "examples", "title", "discriminator", "minLength", "maxLength", "uniqueItems"}
)
"""Keywords that a strict schema may not have; answers are validated against them afterwards."""

_NON_STRICT_KEYWORDS: Final = ("prefixItems", "patternProperties", "propertyNames", "allOf", "not", "if", "contains")

_TYPE_KEYWORDS: Final = ("type", "enum", "const", "anyOf", "oneOf")


def schema_name(schema: type[BaseModel]) -> str:
    """Return the name of a shape in characters that services accept."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", schema.__name__)[:64]


@lru_cache(maxsize=64)
def json_schema(shape: type[BaseModel]) -> JsonObject:
    """Return a shape as JSON Schema, which must not be changed: it is cached, because it is slow to make."""
    return shape.model_json_schema()


def system_prompt(options: LLMOptions, *, schema_in_prompt: bool) -> str:
    """Return the system prompt, with the schema of the answer if the service takes none."""
    parts = [options.system or ""]
    if options.schema is not None and schema_in_prompt:
        schema = json.dumps(json_schema(options.schema), ensure_ascii=False)
        parts.append(f"Answer with one JSON object and nothing else. It must fit this JSON Schema:\n{schema}")
    return "\n\n".join(filter(None, parts))


@lru_cache(maxsize=64)
def strict_schema(schema: type[BaseModel]) -> JsonObject | None:
    """Return a shape in the subset of JSON Schema that services can enforce; None if it has no such form.

    In that subset, an object has exactly the members that are listed, all of them.
    """
    try:
        return _strict_object(json_schema(schema))
    except ValueError:
        return None


def _strict_node(node: JsonValue) -> JsonValue:
    if isinstance(node, list):
        return [_strict_node(item) for item in node]
    return _strict_object(node) if isinstance(node, dict) else node


def _strict_object(node: JsonObject) -> JsonObject:
    if "$ref" in node:
        return {
            name: _strict_map(node[name]) if name in _SCHEMA_MAPS else node[name]
            for name in ("$ref", "$defs")
            if name in node
        }
    if any(name in node for name in _NON_STRICT_KEYWORDS) or not any(name in node for name in _TYPE_KEYWORDS):
        raise ValueError("the schema accepts any value")
    strict: JsonObject = {}
    for name, value in node.items():
        if name in _SCHEMA_MAPS:
            strict[name] = _strict_map(value)
        elif name not in _UNSUPPORTED_KEYWORDS:
            strict["anyOf" if name == "oneOf" else name] = _strict_node(value)
    if node.get("type") == "object":
        members = node.get("properties")
        if node.get("additionalProperties") or not isinstance(members, dict):
            raise ValueError("the schema accepts any member")
        strict |= {"additionalProperties": False, "required": list(members)}
    if node.get("type") == "array" and not isinstance(node.get("items"), dict):
        raise ValueError("the schema accepts any item")
    return strict


def _strict_map(nodes: JsonValue) -> JsonValue:
    assert isinstance(nodes, dict)
    return {name: _strict_node(node) for name, node in nodes.items()}


MAX_CANDIDATES: Final = 20

MAX_CHANGES: Final = 200
"""Most changes and new tasks of a candidate."""

_MAX_JSON_DEPTH: Final = 30

_MAX_REASON_CHARS: Final = 1000

_SATISFIED_STATES: Final = (TaskState.DONE, TaskState.SKIPPED)

_INHERITED = ("goal", "priority", "timeout", "retry", "optional", "when", "resources", "acceptance", "metadata")


class ReplyModel(BaseModel):
    """A part of an answer, validated strictly, without additional members."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: object) -> object:
        """Drop members that are null, as many models write it for omitted ones."""
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class NewTask(ReplyModel):
    """A task that the plan does not have yet."""

    id: str = Field(description="One that no task has or had.")
    tool: str | None = Field(default=None, description="A tool of the library, by its name.")
    arguments: JsonObject = Field(default={}, description="By parameter; may hold ${task.output} and ${context.name}.")
    depends_on: list[str] = Field(default=[], description="The ids of the tasks that must be done before.")
    goal: str | None = Field(default=None, description="What it is for.")
    timeout: float | None = Field(default=None, gt=0, description="Seconds; left out, as is usual here.")


class Add(ReplyModel):
    """Add a task; the tasks in `before` will wait for it."""

    kind: Literal["add"]
    task: NewTask
    before: list[str] = []


class Remove(ReplyModel):
    """Take out a task that has not started and on which nothing that stays depends."""

    kind: Literal["remove"]
    task_id: str


class Replace(ReplyModel):
    """Replace a task by one or more new tasks, which inherit its dependencies."""

    kind: Literal["replace"]
    task_id: str
    tasks: list[NewTask]


class Modify(ReplyModel):
    """Change a task that has not started; what is left out or null stays as it is."""

    kind: Literal["modify"]
    task_id: str
    tool: str | None = None
    arguments: JsonObject | None = None
    depends_on: list[str] | None = None
    goal: str | None = None
    timeout: float | None = Field(default=None, gt=0)


class Reorder(ReplyModel):
    """Run these waiting tasks in this order."""

    kind: Literal["reorder"]
    order: list[str]


class Retry(ReplyModel):
    """Run a task again, after `delay` seconds."""

    kind: Literal["retry"]
    task_id: str
    delay: float = Field(default=0.0, ge=0, le=86_400)


class Skip(ReplyModel):
    """Go on without a task; what depends on it runs without its output."""

    kind: Literal["skip"]
    task_id: str
    reason: str = ""


class Cancel(ReplyModel):
    """Stop a task; what depends on it cannot run."""

    kind: Literal["cancel"]
    task_id: str
    reason: str = ""


class Abort(ReplyModel):
    """Stop the whole run."""

    kind: Literal["abort"]
    reason: str = ""


ProposedChange = Annotated[
    Add | Remove | Replace | Modify | Reorder | Retry | Skip | Cancel | Abort, Field(discriminator="kind")
]


class ProposedAlternative(ReplyModel):
    """One proposal of the model."""

    reason: str = Field(description="Why this helps, in a sentence.")
    changes: list[ProposedChange] = Field(description="Applied together, in this order.")
    confidence: float = Field(ge=0, le=1, description="How likely it is that the goal is reached this way.")
    _problem: str = PrivateAttr("")

    @classmethod
    def invalid(cls, problem: str) -> Self:
        """Return a placeholder for an invalid candidate, so that the others are not lost with it."""
        candidate = cls(reason="", changes=[], confidence=0.0)
        candidate._problem = problem
        return candidate


def _validate_or_invalid(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    try:
        return validate(value)
    except ValidationError as error:
        return ProposedAlternative.invalid(_problem_text(error, "the candidate"))


class ProposalReply(ReplyModel):
    """Answer of the model: alternatives, the best first; none if there is none."""

    candidates: list[Annotated[ProposedAlternative, WrapValidator(_validate_or_invalid)]]


class ParsedCandidate(NamedTuple):
    """Result of a candidate: an alternative, or the reason why it is dropped."""

    reason: str
    alternative: Alternative | None = None
    problem: str = ""


class ProposalParser:
    """Converts candidates into alternatives.

    The engine checks them against the plan. The parser enforces the limits of a model: it may use only available
    tools, and needs the approval of a person for some changes.

    Args:
        view: the plan.
        used_tools: the tools of the tasks that the model was shown, with None if some have none.
        redact: takes secrets out of a value.
    """

    def __init__(
        self, view: PlanView, used_tools: Collection[str | None], redact: Callable[[JsonValue], JsonValue]
    ) -> None:
        self._view = view
        self._used_tools = used_tools
        self._redact = redact

    def parse(self, reply: ProposalReply) -> Iterator[ParsedCandidate]:
        """Yield the result of each candidate."""
        for proposed in reply.candidates[:MAX_CANDIDATES]:
            yield self._parse_candidate(proposed)
        if (more := len(reply.candidates) - MAX_CANDIDATES) > 0:
            yield ParsedCandidate("", problem=f"{more} candidates beyond the first {MAX_CANDIDATES} were ignored")

    def _parse_candidate(self, proposed: ProposedAlternative) -> ParsedCandidate:
        reason = self._single_line(proposed.reason)
        if proposed._problem:
            return ParsedCandidate(reason, problem=proposed._problem)
        try:
            size = sum(len(change.tasks) if isinstance(change, Replace) else 1 for change in proposed.changes)
            if size > MAX_CHANGES:
                raise _InvalidCandidate(f"it has more than {MAX_CHANGES} changes")
            changes = tuple(map(self._convert_change, proposed.changes))
        except _InvalidCandidate as error:
            return ParsedCandidate(reason, problem=str(error))
        ask = next(self._approval_reasons(changes), "")
        alternative = Alternative(changes=changes, reason=reason, confidence=proposed.confidence, ask=ask)
        return ParsedCandidate(reason, alternative)

    def _convert_change(self, change: ProposedChange) -> PlanChange:
        match change:
            case Add():
                return AddTask(task=self._convert_task(change.task), before=tuple(change.before))
            case Replace():
                return self._convert_replacement(change)
            case Modify():
                return self._convert_modification(change)
            case Remove():
                return RemoveTask(task_id=change.task_id)
            case Reorder():
                return ReorderTasks(order=tuple(change.order))
            case Retry():
                return RetryTask(task_id=change.task_id, delay=change.delay)
            case Skip():
                return SkipTask(task_id=change.task_id, reason=self._single_line(change.reason))
            case Cancel():
                return CancelTask(task_id=change.task_id, reason=self._single_line(change.reason))
            case Abort():
                return AbortRun(reason=self._single_line(change.reason))

    def _convert_replacement(self, change: Replace) -> ReplaceTask:
        if not change.tasks:
            raise _InvalidCandidate(f"{change.task_id!r} has no replacement tasks; use skip or remove")
        replaced = self._find_task(change.task_id)
        old = replaced.task if replaced is not None else None
        parts = [self._convert_task(new, old) for new in change.tasks]
        needed = {dep for part in parts for dep in part.depends_on}
        # Tasks that only prepare others cannot meet the acceptance of the old task.
        parts = [p.model_copy(update={"acceptance": ()}) if p.id in needed else p for p in parts]
        if old is not None and len(parts) == 1:
            new = parts[0]
            for before in self._view.lineage(change.task_id):
                is_permanent = before.failure is not None and not before.failure.transient
                task = before.task
                if is_permanent and (task.tool, task.arguments, task.goal) == (new.tool, new.arguments, new.goal):
                    raise _InvalidCandidate(f"the same was tried before as {before.id!r} and failed")
            left = [f for f in old.fallbacks if (f.tool, f.arguments) != (new.tool, new.arguments)]
            parts = [new.model_copy(update={"fallbacks": tuple(left)})]
        return ReplaceTask(task_id=change.task_id, tasks=tuple(parts))

    def _convert_modification(self, change: Modify) -> ModifyTask:
        fields: JsonObject = change.model_dump(exclude={"kind", "task_id"}, exclude_none=True)
        if not fields:
            raise _InvalidCandidate(f"the modification of {change.task_id!r} changes no field")
        if "tool" in fields:
            self._check_tool(change.tool, change.task_id)
        _check_depth(fields, change.task_id)
        return ModifyTask(task_id=change.task_id, fields=fields)

    def _convert_task(self, new: NewTask, old: Task | None = None) -> Task:
        self._check_tool(new.tool, new.id)
        fields: JsonObject = new.model_dump(exclude_none=True)
        _check_depth(fields, new.id)
        names = [name for name in _INHERITED if old is not None and name in old.model_fields_set]
        try:
            return Task.model_validate({**{name: getattr(old, name) for name in names}, **fields})
        except ValidationError as error:
            raise _InvalidCandidate(f"task {_quoted(new.id)}: {_problem_text(error, 'the task')}") from None

    def _check_tool(self, tool: str | None, task_id: str) -> None:
        """Reject unknown tools, which the engine accepts if a plan describes no tools, and tasks without a tool."""
        if tool in self._used_tools or (tool is not None and self._view.tools):
            return
        if tool is None:
            raise _InvalidCandidate(f"task {_quoted(task_id)} names no tool of the library")
        known = ", ".join(sorted(repr(name) for name in self._used_tools if name is not None)) or "none"
        problem = f"there is no tool {_quoted(tool)}; the tools of the plan are: {known}"
        raise _InvalidCandidate(f"task {_quoted(task_id)}: {problem}")

    def _find_task(self, task_id: str) -> TaskView | None:
        try:
            return self._view.task(task_id)
        except UnknownTask:
            return None

    # Changes that need the approval of a person

    def _approval_reasons(self, changes: Sequence[PlanChange]) -> Iterator[str]:
        view = self._view
        # With stated facts, the engine itself checks that the goal is still reached.
        stated = view.original_plan.facts is not None and bool(view.goal.facts)
        for change in changes:
            if isinstance(change, AbortRun):
                yield "a model proposes to end the run"
            elif isinstance(change, AddTask):
                yield from self._timeout_increases([change.task], None)
            elif isinstance(change, ReorderTasks) or (task := self._find_task(change.task_id)) is None:
                continue
            elif isinstance(change, ReplaceTask):
                yield from self._timeout_increases(change.tasks, task.task)
            elif isinstance(change, ModifyTask):
                fields = {name: value for name, value in change.fields.items() if name in ("tool", "timeout")}
                yield from self._timeout_increases([task.task.model_copy(update=fields)], task.task)
                kept = change.fields.get("depends_on")
                dropped = [d for d in task.task.depends_on if d not in kept] if isinstance(kept, list) else []
                for before in map(self._find_task, dropped):
                    if not stated and before is not None and self._is_required(before):
                        yield f"a model proposes to let {task.id!r} run without waiting for {before.id!r}"
            elif isinstance(change, RemoveTask | SkipTask | CancelTask) and not stated and self._is_required(task):
                yield f"a model proposes to do without {task.id!r}, which the plan requires"

    def _is_required(self, task: TaskView) -> bool:
        return not (task.task.optional or self._view.task(task.root).task.optional or task.state in _SATISFIED_STATES)

    def _timeout_increases(self, tasks: Sequence[Task], old: Task | None) -> Iterator[str]:
        """Yield a reason for each task that would have more time than the task or tool that it derives from."""
        for new in tasks:
            tool = self._view.tool(new.tool)
            limit = (old.timeout if old is not None else None) or (tool.timeout if tool is not None else None)
            if limit is not None and new.timeout is not None and new.timeout > limit:
                yield f"a model proposes to give {new.id!r} {new.timeout:g} s instead of {limit:g} s"

    def _single_line(self, text: str) -> str:
        """Return a text for people on one line, without control characters."""
        clean = str(self._redact(text[: 4 * _MAX_REASON_CHARS]))
        return "".join(c if c.isprintable() else " " for c in clean).strip()[:_MAX_REASON_CHARS]


class _InvalidCandidate(Exception):
    """A candidate is invalid for every plan."""


def _check_depth(value: JsonValue, task_id: str) -> None:
    if exceeds_depth(value, _MAX_JSON_DEPTH):
        raise _InvalidCandidate(f"the arguments of task {_quoted(task_id)} are nested too deeply")


def _quoted(text: str) -> str:
    return repr(truncate(text, 81))


def _problem_text(error: ValidationError, subject: str) -> str:
    return validation_message(error, subject, most=5)[:_MAX_REASON_CHARS]
