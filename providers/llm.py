"""Alternatives proposed by a language model: its prompt, its reply as changes, and rejections.

The model is not trusted. The parser turns its reply into changes within strict limits: only known
tools, and some changes only with the approval of a person. The engine checks the alternatives
against the plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from replanning import Alternative, PlanView, ReplanRequest, Task
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
from replanning.errors import BudgetExceeded, LLMError, UnknownTask
from replanning.live import TaskView
from replanning.live.states import SATISFIED
from replanning.llm import LLMOptions, LLMProvider
from replanning.llm.provider import validation_message
from replanning.plan import JsonObject
from replanning.plan.json_values import exceeds_depth
from replanning.plan.messages import format_duration, truncate
from replanning.plan.tasks import Fallback, for_another_tool, is_same_call
from replanning.plan.types import JsonValue
from replanning.providers._prompt import (
    DEFAULT_PROMPT_CHARS,
    MIN_PROMPT_CHARS,
    SYSTEM_PROMPT,
    PromptBuilder,
    change_document,
)
from replanning.secrets import Redactor

MAX_CANDIDATES: Final = 20

MAX_CHANGES: Final = 200
"""Maximum number of changes and new tasks of a candidate."""

MAX_ELEMENTS: Final = 1_000
"""Maximum number of elements for a new task with `for_each`."""

_MAX_JSON_DEPTH: Final = 30
_MAX_REASON_CHARS: Final = 1000
_INHERITED: Final = (
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


class LLMAlternatives:
    """Provider that asks a language model for several alternatives in one call.

    The model sees the goal, the triggers, the tasks concerned and those around them with their
    results, the tools, the facts, and earlier decisions. It states a reason and a confidence for
    each alternative. The engine takes those that fit the plan; if none does, the model gets the
    reasons and is asked once more, if deadline and budget allow it. An invalid candidate is dropped
    with a note. Only available tools are used; a model cannot change goal, tools, settings or
    answers to questions. A person must agree before anything that is dangerous, ends the run, omits
    something that the plan requires, or takes more time than was allowed.

    Untrusted text (output of tools, errors, texts of tasks) is marked as data in the prompt,
    without secrets. A prompt longer than `size` loses, in this order and in each kind from the end:
    earlier decisions (the oldest first), the context, parameters, results (of the farthest tasks
    first), facts (unrelated ones first), tasks around (the farthest first), tools (those least
    related to the tasks concerned first), limits, and only then the tasks concerned, the triggers,
    and the goal. A line says how much was left out; long values are cut at their end, with a mark.

    Args:
        client: the language model.
        name: its name in histories and settings; by default that of the model's provider.
        size: limit on the characters of a prompt.

    Raises:
        ValueError: the size is too small to describe a plan.
    """

    def __init__(
        self, client: LLMProvider, *, name: str | None = None, size: int = DEFAULT_PROMPT_CHARS
    ) -> None:
        if size < MIN_PROMPT_CHARS:
            problem = f"a prompt of {size} characters cannot describe a plan"
            raise ValueError(f"{problem}: give at least {MIN_PROMPT_CHARS}")
        self.name = name or client.name
        self.client = client
        self._size = size

    def __repr__(self) -> str:
        return f"<LLMAlternatives {self.name!r} of {self.client!r}>"

    async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
        """Return alternatives for a request, as the model ranks them.

        Raises:
            LLMError: the model gave no valid answer.
            BudgetExceeded: the call does not fit the remaining budget.
            StaleView: the plan has changed meanwhile.
        """
        redactor = self.client.redactor
        prompts = await PromptBuilder.for_request(request, self._size, redactor.value)
        parser = ProposalParser(request.view, prompts.used_tools, redactor)
        options = LLMOptions(system=SYSTEM_PROMPT, deadline=request.deadline, meter=request.meter)
        alternatives: list[Alternative] = []
        rejected: list[JsonObject] = []
        for attempt in ("first", "second"):
            prompt = prompts.render(rejected)
            try:
                reply = await self.client.complete_json(prompt, ProposalReply, options)
            except (LLMError, BudgetExceeded) as error:
                if attempt == "first":
                    raise
                request.add_note(
                    f"none of its proposals can be used, and it could not be asked again: {error}"
                )
                break
            usable = False
            for candidate in parser.parse(reply):
                changes: Sequence[PlanChange] = ()
                problem = candidate.problem
                if candidate.alternative is None:
                    request.add_note(f"dropped {candidate.reason or 'a candidate'!r}: {problem}")
                else:
                    alternatives.append(candidate.alternative)
                    changes = candidate.alternative.changes
                    problem = request.rejection_reason(candidate.alternative)
                if problem:
                    documents: list[JsonValue] = [change_document(change) for change in changes]
                    rejected.append(
                        {"why_not": problem, "reason": candidate.reason, "changes": documents}
                    )
                else:
                    usable = True
            if usable or not rejected:
                break
        return alternatives


class ReplyModel(BaseModel):
    """Part of an answer, validated strictly, without additional members."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: object) -> object:
        """Drop members that are null: many models write null for members that they omit."""
        if not isinstance(value, dict):
            return value
        return {name: member for name, member in value.items() if member is not None}


class NewTask(ReplyModel):
    """A task that the plan does not have yet."""

    id: str = Field(description="An id that no task has or had.")
    tool: str | None = Field(default=None, description="Name of a tool in the library.")
    arguments: JsonObject = Field(
        default={},
        description="By parameter; may contain ${task.output}, ${context.name} and"
        " ${parameters.name}.",
    )
    depends_on: list[str] = Field(
        default=[], description="Ids of the tasks that must be done first."
    )
    goal: str | None = Field(default=None, description="Purpose of the task.")
    timeout: float | None = Field(
        default=None, gt=0, description="Time limit in seconds; the usual one if omitted."
    )
    for_each: list[JsonValue] | JsonObject | str | None = Field(
        default=None,
        description="List, or reference to one: the task is executed for each element, ${item}.",
    )
    key: str | None = Field(default=None, description="Name of an element, such as ${item.id}.")
    max_items: int | None = Field(
        default=None, ge=1, le=MAX_ELEMENTS, description="With more elements, the task fails."
    )
    max_parallel: int | None = Field(
        default=None, ge=1, description="Maximum number of elements executed in parallel."
    )
    on_item_failure: Literal["fail", "skip"] | None = Field(
        default=None, description="skip: continue without elements that fail."
    )


class Add(ReplyModel):
    """Add a task; the tasks in `before` will wait for it."""

    kind: Literal["add"]
    task: NewTask
    before: list[str] = []


class Remove(ReplyModel):
    """Remove a task that has not started and that no remaining task depends on."""

    kind: Literal["remove"]
    task_id: str


class Replace(ReplyModel):
    """Replace a task with one or more new tasks, which inherit its dependencies."""

    kind: Literal["replace"]
    task_id: str
    tasks: list[NewTask]


class Modify(ReplyModel):
    """Modify a task that has not started; omitted or null fields stay as they are."""

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
    """Continue without a task; its dependents run without its output."""

    kind: Literal["skip"]
    task_id: str
    reason: str = ""


class Cancel(ReplyModel):
    """Stop a task; its dependents cannot run."""

    kind: Literal["cancel"]
    task_id: str
    reason: str = ""


class Abort(ReplyModel):
    """Stop the whole run."""

    kind: Literal["abort"]
    reason: str = ""
    undo: bool = False


ProposedChange = Annotated[
    Add | Remove | Replace | Modify | Reorder | Retry | Skip | Cancel | Abort,
    Field(discriminator="kind"),
]


class ProposedAlternative(ReplyModel):
    """One proposal of the model."""

    reason: str = Field(description="Why this helps, in a sentence.")
    changes: list[ProposedChange] = Field(description="Applied together, in this order.")
    confidence: float = Field(
        ge=0, le=1, description="Probability that the goal is reached this way."
    )
    _problem: str = PrivateAttr("")


def _validate_or_invalid(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    """Return the candidate, or a placeholder with its problem, so that the others are kept."""
    try:
        return validate(value)
    except ValidationError as error:
        invalid = ProposedAlternative(reason="", changes=[], confidence=0.0)
        invalid._problem = _problem_text(error, "the candidate")
        return invalid


class ProposalReply(ReplyModel):
    """Answer of the model: alternatives, the best first, or none."""

    candidates: list[Annotated[ProposedAlternative, WrapValidator(_validate_or_invalid)]]


class ParsedCandidate(NamedTuple):
    """Parsed candidate: an alternative, or the problem that drops it."""

    reason: str
    alternative: Alternative | None = None
    problem: str = ""


class ProposalParser:
    """Converts candidates into alternatives, and enforces the limits of a model.

    Args:
        view: the plan.
        used_tools: the tools of the tasks in the prompt, and None if a task has no tool.
        redactor: redacts secrets in reasons.
    """

    def __init__(
        self, view: PlanView, used_tools: Collection[str | None], redactor: Redactor
    ) -> None:
        self._view = view
        self._used_tools = used_tools
        self._redactor = redactor
        self._describes_tools = bool(view.tools)
        # With stated facts, the engine checks that the goal is still reached.
        self._goal_is_checked = view.original_plan.facts is not None and bool(view.goal.facts)

    def parse(self, reply: ProposalReply) -> Iterator[ParsedCandidate]:
        """Yield the result of each candidate."""
        for proposed in reply.candidates[:MAX_CANDIDATES]:
            reason = self._single_line(proposed.reason)
            if proposed._problem:
                yield ParsedCandidate(reason, problem=proposed._problem)
                continue
            approvals: list[str] = []
            try:
                changes = self._convert_changes(proposed.changes, approvals)
            except _InvalidCandidate as error:
                yield ParsedCandidate(reason, problem=str(error))
                continue
            ask = ""
            if approvals:
                ask = approvals[0]
            alternative = Alternative(
                changes=changes, reason=reason, confidence=proposed.confidence, ask=ask
            )
            yield ParsedCandidate(reason, alternative)
        total = len(reply.candidates)
        if total > MAX_CANDIDATES:
            problem = f"only the first {MAX_CANDIDATES} of {total} candidates are read"
            yield ParsedCandidate("", problem=problem)

    def _convert_changes(
        self, proposed: Sequence[ProposedChange], approvals: list[str]
    ) -> tuple[PlanChange, ...]:
        """Return the changes of a candidate, which must not be too many."""
        size = 0
        for change in proposed:
            size += len(change.tasks) if isinstance(change, Replace) else 1
        if size > MAX_CHANGES:
            raise _InvalidCandidate(f"it has more than {MAX_CHANGES} changes")
        return tuple(self._convert_change(change, approvals) for change in proposed)

    def _convert_change(self, change: ProposedChange, approvals: list[str]) -> PlanChange:
        """Return a change; add to `approvals` the reasons why a person must agree to it."""
        match change:
            case Add():
                task = self._convert_task(change.task)
                approvals += self._longer_times([task], None)
                return AddTask(task=task, before=tuple(change.before))
            case Replace():
                return self._convert_replacement(change, approvals)
            case Modify():
                return self._convert_modification(change, approvals)
            case Remove():
                approvals += self._omitted_requirements(change.task_id)
                return RemoveTask(task_id=change.task_id)
            case Reorder():
                return ReorderTasks(order=tuple(change.order))
            case Retry():
                return RetryTask(task_id=change.task_id, delay=change.delay)
            case Skip():
                approvals += self._omitted_requirements(change.task_id)
                return SkipTask(task_id=change.task_id, reason=self._single_line(change.reason))
            case Cancel():
                approvals += self._omitted_requirements(change.task_id)
                return CancelTask(task_id=change.task_id, reason=self._single_line(change.reason))
            case Abort():
                approvals.append("a model proposes to end the run")
                return AbortRun(reason=self._single_line(change.reason), undo=change.undo)

    def _convert_replacement(self, change: Replace, approvals: list[str]) -> ReplaceTask:
        if not change.tasks:
            raise _InvalidCandidate(
                f"{change.task_id!r} has no replacement tasks; use skip or remove"
            )
        old = self._find_task(change.task_id)
        parts = [self._convert_task(new, old) for new in change.tasks]
        needed: set[str] = set()
        for part in parts:
            needed.update(part.depends_on)
        # Tasks that only prepare others cannot meet the acceptance of the old task.
        for index, part in enumerate(parts):
            if part.id in needed:
                parts[index] = part.model_copy(update={"acceptance": (), "expect": None})
        if old is not None:
            if len(parts) == 1:
                parts = [self._with_remaining_fallbacks(parts[0], old)]
            approvals += self._longer_times(parts, old)
        return ReplaceTask(task_id=change.task_id, tasks=tuple(parts))

    def _with_remaining_fallbacks(self, new: Task, old: Task) -> Task:
        """Return a replacement with the fallbacks of the old task; its call must not have failed."""
        tool = self._view.tool(new.tool)
        for before in self._view.lineage(old.id):
            # An error that was transient may not occur again.
            if before.failure is None or before.failure.transient:
                continue
            if is_same_call(new, before.task, tool):
                raise _InvalidCandidate(f"the same call already failed as {before.id!r}")
        left: list[Fallback] = []
        for fallback in old.fallbacks:
            if not is_same_call(new, fallback, tool):
                left.append(fallback)
        return new.model_copy(update={"fallbacks": tuple(left)})

    def _convert_modification(self, change: Modify, approvals: list[str]) -> ModifyTask:
        fields: JsonObject = change.model_dump(exclude={"kind", "task_id"}, exclude_none=True)
        if not fields:
            raise _InvalidCandidate(f"the modification of {change.task_id!r} changes no field")
        self._check(fields, change.task_id)
        old = self._find_task(change.task_id)
        if old is not None:
            if change.depends_on is not None:
                approvals += self._dropped_requirements(old, change.depends_on)
            limits: JsonObject = {
                name: fields[name] for name in ("tool", "timeout") if name in fields
            }
            approvals += self._longer_times([old.model_copy(update=limits)], old)
        return ModifyTask(task_id=change.task_id, fields=fields)

    def _find_task(self, task_id: str) -> Task | None:
        """Return a task of the plan; None if there is no such task, which the engine rejects."""
        try:
            return self._view.task(task_id).task
        except UnknownTask:
            return None

    # Changes that need the approval of a person

    def _omitted_requirements(self, task_id: str) -> Iterator[str]:
        """Yield a reason if the plan would continue without a task that it requires."""
        with suppress(UnknownTask):  # the engine rejects it
            task = self._view.task(task_id)
            if self._is_required(task):
                yield f"a model proposes to do without {task.id!r}, which the plan requires"

    def _dropped_requirements(self, old: Task, kept: Collection[str]) -> Iterator[str]:
        """Yield a reason for each required task that a task would no longer wait for."""
        for task_id in old.depends_on:
            if task_id not in kept and self._is_required(self._view.task(task_id)):
                yield f"a model proposes to let {old.id!r} run without waiting for {task_id!r}"

    def _longer_times(self, tasks: Sequence[Task], old: Task | None) -> Iterator[str]:
        """Yield a reason for each task with more time than the old task, or else its tool, allows."""
        for new in tasks:
            tool = self._view.tool(new.tool)
            limit = None if old is None else old.timeout
            if limit is None and tool is not None:
                limit = tool.timeout
            if limit is None or new.timeout is None:
                continue
            if new.timeout > limit:
                time = f"{format_duration(new.timeout)} instead of {format_duration(limit)}"
                yield f"a model proposes to give {new.id!r} {time}"

    def _is_required(self, task: TaskView) -> bool:
        """Return whether only a person may decide to omit a task."""
        if self._goal_is_checked or task.state in SATISFIED:
            return False
        return not (task.task.optional or self._view.task(task.root).task.optional)

    # New tasks

    def _convert_task(self, new: NewTask, old: Task | None = None) -> Task:
        fields: JsonObject = new.model_dump(exclude_none=True)
        self._check({"tool": None, **fields}, new.id)
        inherited: dict[str, object] = {}
        if old is not None:
            for name in _INHERITED:
                if name in old.model_fields_set:
                    inherited[name] = getattr(old, name)
            if old.commands:
                inherited["expect"] = old.lasting_expectation
            if fields.get("tool") != old.tool:
                inherited.update(for_another_tool(old))
        try:
            return TypeAdapter(Task).validate_python({**inherited, **fields})
        except ValidationError as error:
            problem = _problem_text(error, "the task")
            raise _InvalidCandidate(f"task {_quoted(new.id)}: {problem}") from None

    def _check(self, fields: JsonObject, task_id: str) -> None:
        """Reject values that are nested too deeply, a missing tool, and unknown tools.

        If the plan describes no tools, the engine accepts any, but a model may use only those in
        its prompt.
        """
        task = f"task {_quoted(task_id)}"
        if exceeds_depth(fields, _MAX_JSON_DEPTH):
            raise _InvalidCandidate(f"the arguments of {task} are nested too deeply")
        if "tool" not in fields:
            return
        tool = fields["tool"]
        if tool in self._used_tools:
            return
        if tool is None:
            raise _InvalidCandidate(f"{task} names no tool of the library")
        if self._describes_tools:
            return
        names = sorted(repr(name) for name in self._used_tools if name is not None)
        known = ", ".join(names) or "none"
        problem = f"there is no tool {_quoted(str(tool))}; the tools of the plan are: {known}"
        raise _InvalidCandidate(f"{task}: {problem}")

    def _single_line(self, text: str) -> str:
        """Return a text for people on one line, without control characters."""
        clean = self._redactor.text(text[: 4 * _MAX_REASON_CHARS])
        line = "".join(char if char.isprintable() else " " for char in clean)
        return line.strip()[:_MAX_REASON_CHARS]


class _InvalidCandidate(Exception):
    """A candidate is invalid for every plan."""


def _quoted(text: str) -> str:
    return repr(truncate(text, 81))


def _problem_text(error: ValidationError, subject: str) -> str:
    return validation_message(error, subject, most=5)[:_MAX_REASON_CHARS]
