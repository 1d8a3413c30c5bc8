"""How services are told the shape of an answer."""

from __future__ import annotations

import json
import math
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
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue

_SCHEMA_MAPS: Final = ("properties", "$defs")

_UNSUPPORTED_KEYWORDS: Final = (
    "default",
    "examples",
    "title",
    "discriminator",
    "minLength",
    "maxLength",
    "uniqueItems",
)
"""What a strict schema may not say; the answer is held to it afterwards."""

_NON_STRICT_KEYWORDS: Final = ("prefixItems", "patternProperties", "propertyNames", "allOf", "not", "if", "contains")

_TYPE_KEYWORDS: Final = ("type", "enum", "const", "anyOf", "oneOf")


def schema_name(schema: type[BaseModel]) -> str:
    """A name for a shape, as services take it."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", schema.__name__)[:64]


@lru_cache(maxsize=64)
def json_schema(shape: type[BaseModel]) -> JsonObject:
    """A shape as JSON Schema, not to be changed: it is made once, which takes longer than all else about a request."""
    return shape.model_json_schema()


def system_prompt(options: LLMOptions, *, schema_in_prompt: bool) -> str:
    """What the model is told about its role, and where its service takes no schema, about the shape of its answer."""
    parts = [options.system or ""]
    if options.schema is not None and schema_in_prompt:
        schema = json.dumps(json_schema(options.schema), ensure_ascii=False)
        parts.append(f"Answer with one JSON object and nothing else. It must fit this JSON Schema:\n{schema}")
    return "\n\n".join(filter(None, parts))


@lru_cache(maxsize=64)
def strict_schema(schema: type[BaseModel]) -> JsonObject | None:
    """The shape in the part of JSON Schema to which services can hold a model; None where it cannot be said there.

    There an object has exactly the members that are listed, all of them.
    """
    whole = json_schema(schema)
    try:
        return _strict_object(whole)
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
        raise ValueError("anything goes here")
    strict: JsonObject = {}
    for name, value in node.items():
        if name in _SCHEMA_MAPS:
            strict[name] = _strict_map(value)
        elif name not in _UNSUPPORTED_KEYWORDS:
            strict["anyOf" if name == "oneOf" else name] = _strict_node(value)
    if node.get("type") == "object":
        members = node.get("properties")
        if node.get("additionalProperties") or not isinstance(members, dict):
            raise ValueError("any member may stand here")
        strict |= {"additionalProperties": False, "required": list(members)}
    if node.get("type") == "array" and not isinstance(node.get("items"), dict):
        raise ValueError("any item may stand here")
    return strict


def _strict_map(nodes: JsonValue) -> JsonValue:
    assert isinstance(nodes, dict)
    return {name: _strict_node(node) for name, node in nodes.items()}


MAX_CANDIDATES: Final = 20

MAX_CHANGES: Final = 200
"""More changes and new tasks than this make no candidate."""

_MAX_JSON_DEPTH: Final = 30

_MAX_REASON_CHARS: Final = 1000

_SATISFIED_STATES: Final = (TaskState.DONE, TaskState.SKIPPED)

_INHERITED_FIELDS: Final = (
    "goal",
    "priority",
    "timeout",
    "retry",
    "optional",
    "when",
    "resources",
    "acceptance",
    "metadata",
)


class ReplyModel(BaseModel):
    """A part of an answer: taken strictly as it is, with nothing that was not asked for."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: object) -> object:
        """Many models write null for what they leave out."""
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
    """Put one or more new tasks in the place of a task, whose dependencies they inherit."""

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
    """One way on."""

    reason: str = Field(description="Why this helps, in a sentence.")
    changes: list[ProposedChange] = Field(description="Applied together, in this order.")
    confidence: float = Field(ge=0, le=1, description="How likely it is that the goal is reached this way.")
    _problem: str = PrivateAttr("")

    @classmethod
    def invalid(cls, why: str) -> Self:
        """Stands for a candidate that is none, so that the others are not lost with it."""
        found = cls(reason="", changes=[], confidence=0.0)
        found._problem = why
        return found


def _validate_or_invalid(value: object, read: ValidatorFunctionWrapHandler) -> object:
    try:
        return read(value)
    except ValidationError as error:
        return ProposedAlternative.invalid(_validation_message(error))


class ProposalReply(ReplyModel):
    """What is asked of the model: ways on, the best first; none where there is none."""

    candidates: list[Annotated[ProposedAlternative, WrapValidator(_validate_or_invalid)]]


class ParsedCandidate(NamedTuple):
    """What a candidate came to: an alternative, or why it is dropped."""

    reason: str
    alternative: Alternative | None = None
    problem: str = ""


class ProposalParser:
    """Makes alternatives of candidates.

    Whether the plan takes them is for the engine to say; here stands what the engine cannot know of: that this comes
    from a model, which may use nothing but the tools that are there, and needs a person for some things.

    Args:
        view: the plan.
        used: the tools that the tasks use which the model was shown, None where some use none.
        clean: takes secrets out of a value.
    """

    def __init__(self, view: PlanView, used: Collection[str | None], clean: Callable[[JsonValue], JsonValue]) -> None:
        self._view = view
        self._used_tools = used
        self._redact = clean

    def parse(self, reply: ProposalReply) -> Iterator[ParsedCandidate]:
        """What each of the candidates came to."""
        for proposed in reply.candidates[:MAX_CANDIDATES]:
            yield self._parse_candidate(proposed)
        if (more := len(reply.candidates) - MAX_CANDIDATES) > 0:
            yield ParsedCandidate("", problem=f"{more} candidates beyond the first {MAX_CANDIDATES} were not looked at")

    def _parse_candidate(self, proposed: ProposedAlternative) -> ParsedCandidate:
        reason = self._single_line(proposed.reason)
        if proposed._problem:
            return ParsedCandidate(reason, problem=proposed._problem)
        try:
            if (
                sum(len(change.tasks) if isinstance(change, Replace) else 1 for change in proposed.changes)
                > MAX_CHANGES
            ):
                raise _InvalidCandidate(f"it has more than {MAX_CHANGES} changes")
            changes = tuple(map(self._convert_change, proposed.changes))
        except _InvalidCandidate as error:
            return ParsedCandidate(reason, problem=str(error))
        ask = next(self._approval_reasons(changes), "")
        return ParsedCandidate(
            reason, Alternative(changes=changes, reason=reason, confidence=proposed.confidence, ask=ask)
        )

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
            raise _InvalidCandidate(f"{change.task_id!r} is to be replaced by nothing; skip or remove it instead")
        found = self._find_task(change.task_id)
        old = found.task if found is not None else None
        parts = [self._convert_task(new, old) for new in change.tasks]
        needed = {dep for part in parts for dep in part.depends_on}
        # What the old task must meet cannot be met by those that only prepare it.
        parts = [p.model_copy(update={"acceptance": ()}) if p.id in needed else p for p in parts]
        if old is not None and len(parts) == 1:
            self._check_untried(change.task_id, parts[0])
            # What is left of its fallbacks goes on to its heir.
            left = [f for f in old.fallbacks if (f.tool, f.arguments) != (parts[0].tool, parts[0].arguments)]
            parts[0] = parts[0].model_copy(update={"fallbacks": tuple(left)})
        return ReplaceTask(task_id=change.task_id, tasks=tuple(parts))

    def _check_untried(self, task_id: str, new: Task) -> None:
        """Refuse to do once more what has failed in the same lineage, under another id."""
        use = (new.tool, new.arguments, new.goal)
        for part in self._view.lineage(task_id):
            lasting = part.failure is not None and not part.failure.transient
            if lasting and use == (part.task.tool, part.task.arguments, part.task.goal):
                raise _InvalidCandidate(f"the same was tried before as {part.id!r} and failed")

    def _convert_modification(self, change: Modify) -> ModifyTask:
        given: JsonObject = change.model_dump(exclude={"kind", "task_id"}, exclude_none=True)
        if not given:
            raise _InvalidCandidate(f"the change of {change.task_id!r} says nothing that is to be changed")
        if "tool" in given:
            self._check_tool(change.tool, change.task_id)
        _check_size(given, change.task_id)
        return ModifyTask(task_id=change.task_id, fields=given)

    def _convert_task(self, new: NewTask, old: Task | None = None) -> Task:
        self._check_tool(new.tool, new.id)
        given: JsonObject = new.model_dump(exclude_none=True)
        _check_size(given, new.id)
        handed_on = {
            name: getattr(old, name) for name in _INHERITED_FIELDS if old is not None and name in old.model_fields_set
        }
        try:
            return Task.model_validate({**handed_on, **given})
        except ValidationError as error:
            raise _InvalidCandidate(f"task {_quoted(new.id)}: {_validation_message(error)}") from None

    def _check_tool(self, tool: str | None, task_id: str) -> None:
        """Refuse what the engine takes where a plan describes no tools, or a task names none."""
        if tool in self._used_tools or (tool is not None and self._view.tools):
            return
        known = ", ".join(sorted(repr(name) for name in self._used_tools if name is not None)) or "none"
        if tool is None:
            raise _InvalidCandidate(f"task {_quoted(task_id)} names no tool of the library")
        raise _InvalidCandidate(
            f"task {_quoted(task_id)}: there is no tool {_quoted(tool)}; the tools of the plan are: {known}"
        )

    def _find_task(self, task_id: str) -> TaskView | None:
        try:
            return self._view.task(task_id)
        except UnknownTask:
            return None

    # What a model may not do without a person

    def _approval_reasons(self, changes: Sequence[PlanChange]) -> Iterator[str]:
        view = self._view
        # Where facts say what the plan is for, the engine sees by itself whether that is still reached.
        stated = view.original_plan.facts is not None and bool(view.goal.facts)
        for change in changes:
            if isinstance(change, AbortRun):
                yield "a model proposes to end the run"
            elif isinstance(change, AddTask):
                yield from self._timeout_increases(change.task, None)
            else:
                yield from self._task_approval_reasons(change, stated)

    def _task_approval_reasons(self, change: PlanChange, stated: bool) -> Iterator[str]:
        found = self._find_task(change.task_id) if not isinstance(change, AbortRun | AddTask | ReorderTasks) else None
        if found is None:
            return
        if isinstance(change, ReplaceTask):
            for part in change.tasks:
                yield from self._timeout_increases(part, found.task)
        elif isinstance(change, ModifyTask):
            new = found.task.model_copy(update={k: v for k, v in change.fields.items() if k in ("tool", "timeout")})
            yield from self._timeout_increases(new, found.task)
            if not stated:
                yield from self._dropped_dependencies(found, change.fields.get("depends_on"))
        elif isinstance(change, RemoveTask | SkipTask | CancelTask) and not stated and self._is_required(found):
            yield f"a model proposes to do without {found.id!r}, which the plan requires"

    def _is_required(self, task: TaskView) -> bool:
        return not (task.task.optional or self._view.task(task.root).task.optional or task.state in _SATISFIED_STATES)

    def _timeout_increases(self, new: Task, old: Task | None) -> Iterator[str]:
        """Whether a task would have more time than the task or tool that it comes from."""
        tool = self._view.tool(new.tool)
        limit = (old.timeout if old is not None else None) or (tool.timeout if tool is not None else None)
        if limit is not None and new.timeout is not None and new.timeout > limit:
            yield f"a model proposes to give {new.id!r} {new.timeout:g} s instead of {limit:g} s"

    def _dropped_dependencies(self, task: TaskView, depends_on: JsonValue) -> Iterator[str]:
        """Whether a task would no longer wait for something that is still to be done."""
        for dep in task.task.depends_on if isinstance(depends_on, list) else ():
            found = self._find_task(dep)
            if dep not in depends_on and found is not None and self._is_required(found):  # type: ignore[operator]  # a list
                yield f"a model proposes to let {task.id!r} run without waiting for {dep!r}"

    def _single_line(self, text: str) -> str:
        """A text for people, on one line and without what a terminal might obey."""
        clean = str(self._redact(text[: 4 * _MAX_REASON_CHARS]))
        return "".join(c if c.isprintable() else " " for c in clean).strip()[:_MAX_REASON_CHARS]


class _InvalidCandidate(Exception):
    """A candidate is none that a plan could have; says why."""


def _check_size(value: JsonValue, task_id: str) -> None:
    """Refuse what cannot be kept in a journal: too deep, or no number."""
    layer: list[JsonValue] = [value]
    for _ in range(_MAX_JSON_DEPTH):
        if any(isinstance(item, float) and not math.isfinite(item) for item in layer):
            raise _InvalidCandidate(f"task {_quoted(task_id)} has a number that is infinite or none")
        nested = [item.values() if isinstance(item, dict) else item for item in layer if isinstance(item, dict | list)]
        layer = [inner for items in nested for inner in items]
        if not layer:
            return
    raise _InvalidCandidate(f"the arguments of task {_quoted(task_id)} are nested too deeply")


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}…")


def _validation_message(error: ValidationError) -> str:
    """What is wrong, with its place, in one line."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [f"{'.'.join(map(str, d['loc'])) or 'the candidate'}: {d['msg']}" for d in details[:5]]
    more = f"; and {len(details) - 5} more" if len(details) > 5 else ""
    return ("; ".join(lines) + more)[:_MAX_REASON_CHARS]
