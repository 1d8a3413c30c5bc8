"""Alternatives proposed by an untrusted language model: its reply is read as changes, and objections are sent back once.

Only what a model may state becomes a change: the parser allows no tools but the available ones, and
some changes only with the approval of a person. The engine checks the alternatives against the
plan.
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
from replanning.plan.messages import truncate
from replanning.plan.tasks import for_another_tool, is_same_call
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
"""Most changes and new tasks of a candidate."""

MAX_ELEMENTS: Final = 1_000
"""Most elements of a list that a new task may be done for."""

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
    """Provider that asks a language model for alternatives, several in one call, each with a reason and a confidence.

    The model sees the goal, the triggers, the tasks concerned and those around them with their
    results, the tools, the facts, and earlier decisions. The engine takes those of its proposals
    that fit the plan; if none does, the model gets the reasons and is asked once more, if deadline
    and budget allow it. An invalid candidate is dropped with a note. Only available tools are used;
    a model cannot change goal, tools, settings or answers to questions, and a person must agree
    before anything that is dangerous, ends the run, does without something that the plan requires,
    or takes more time than was allowed.

    Untrusted text (output of tools, errors, texts of tasks) is marked as data in the prompt,
    without secrets. A prompt longer than `size` loses, in this order and in each kind from the end:
    earlier decisions (the oldest first), the context, parameters, results (of the farthest tasks
    first), facts (unrelated ones first), tasks around (the farthest first), tools (those least
    related to the tasks concerned first), limits, and only then the tasks concerned, the triggers,
    and the goal. A line says how much was left out; long values are cut at their end, which is
    marked.

    Args:
        client: the language model.
        name: in histories and settings; by default that of the model's provider.
        size: most characters of a prompt.

    Raises:
        ValueError: the size is too small to describe a plan.
    """

    def __init__(
        self, client: LLMProvider, *, name: str | None = None, size: int = DEFAULT_PROMPT_CHARS
    ) -> None:
        if size < MIN_PROMPT_CHARS:
            raise ValueError(
                f"a prompt of {size} characters cannot describe a plan: give at least {MIN_PROMPT_CHARS}"
            )
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
            try:
                reply = await self.client.complete_json(
                    prompts.render(rejected), ProposalReply, options
                )
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
    """A part of an answer, validated strictly, without additional members."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: object) -> object:
        """Drop members that are null, as many models write it for omitted ones."""
        return (
            {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
        )


class NewTask(ReplyModel):
    """A task that the plan does not have yet."""

    id: str = Field(description="One that no task has or had.")
    tool: str | None = Field(default=None, description="A tool of the library, by its name.")
    arguments: JsonObject = Field(
        default={},
        description="By parameter; may hold ${task.output}, ${context.name} and ${parameters.name}.",
    )
    depends_on: list[str] = Field(
        default=[], description="The ids of the tasks that must be done before."
    )
    goal: str | None = Field(default=None, description="What it is for.")
    timeout: float | None = Field(
        default=None, gt=0, description="Seconds; left out, as is usual here."
    )
    for_each: list[JsonValue] | JsonObject | str | None = Field(
        default=None,
        description="A list, or a reference to one: the task is done for each element, ${item}.",
    )
    key: str | None = Field(
        default=None, description="What names the elements, such as ${item.id}."
    )
    max_items: int | None = Field(
        default=None, ge=1, le=MAX_ELEMENTS, description="With more elements, the task fails."
    )
    max_parallel: int | None = Field(
        default=None, ge=1, description="How many elements are done at the same time."
    )
    on_item_failure: Literal["fail", "skip"] | None = Field(
        default=None, description="skip: go on without elements that fail."
    )


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
        ge=0, le=1, description="How likely it is that the goal is reached this way."
    )
    _problem: str = PrivateAttr("")


def _validate_or_invalid(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    """Return the candidate, or a placeholder with its problem, so that the others are not lost with it."""
    try:
        return validate(value)
    except ValidationError as error:
        invalid = ProposedAlternative(reason="", changes=[], confidence=0.0)
        invalid._problem = _problem_text(error, "the candidate")
        return invalid


class ProposalReply(ReplyModel):
    """Answer of the model: alternatives, the best first; none if there is none."""

    candidates: list[Annotated[ProposedAlternative, WrapValidator(_validate_or_invalid)]]


class ParsedCandidate(NamedTuple):
    """Result of a candidate: an alternative, or the reason why it is dropped."""

    reason: str
    alternative: Alternative | None = None
    problem: str = ""


class ProposalParser:
    """Converts candidates into alternatives, and enforces the limits of a model.

    Args:
        view: the plan.
        used_tools: the tools of the tasks that the model was shown, with None if some have none.
        redactor: takes secrets out of reasons.
    """

    def __init__(
        self, view: PlanView, used_tools: Collection[str | None], redactor: Redactor
    ) -> None:
        self._view = view
        self._used_tools = used_tools
        self._redactor = redactor
        self._describes_tools = bool(view.tools)
        # With stated facts, the engine itself checks that the goal is still reached.
        self._goal_is_checked = view.original_plan.facts is not None and bool(view.goal.facts)

    def parse(self, reply: ProposalReply) -> Iterator[ParsedCandidate]:
        """Yield the result of each candidate."""
        for proposed in reply.candidates[:MAX_CANDIDATES]:
            reason = self._single_line(proposed.reason)
            problem = proposed._problem
            changes: tuple[PlanChange, ...] = ()
            approvals: list[str] = []
            try:
                size = sum(
                    len(change.tasks) if isinstance(change, Replace) else 1
                    for change in proposed.changes
                )
                if size > MAX_CHANGES:
                    raise _InvalidCandidate(f"it has more than {MAX_CHANGES} changes")
                changes = tuple(
                    self._convert_change(change, approvals) for change in proposed.changes
                )
            except _InvalidCandidate as error:
                problem = str(error)
            if problem:
                yield ParsedCandidate(reason, problem=problem)
            else:
                ask = approvals[0] if approvals else ""
                alternative = Alternative(
                    changes=changes, reason=reason, confidence=proposed.confidence, ask=ask
                )
                yield ParsedCandidate(reason, alternative)
        if (more := len(reply.candidates) - MAX_CANDIDATES) > 0:
            yield ParsedCandidate(
                "", problem=f"{more} candidates beyond the first {MAX_CANDIDATES} were ignored"
            )

    def _convert_change(self, change: ProposedChange, approvals: list[str]) -> PlanChange:
        """Return a change; add to `approvals` why a person must agree to it."""
        task: TaskView | None = None
        if not isinstance(change, Add | Reorder | Abort):
            with suppress(UnknownTask):  # the engine rejects it
                task = self._view.task(change.task_id)
        old = task.task if task is not None else None
        new_tasks: list[Task] = []
        result: PlanChange
        match change:
            case Add():
                new_tasks = [self._convert_task(change.task)]
                result = AddTask(task=new_tasks[0], before=tuple(change.before))
            case Replace():
                if not change.tasks:
                    raise _InvalidCandidate(
                        f"{change.task_id!r} has no replacement tasks; use skip or remove"
                    )
                parts = [self._convert_task(new, old) for new in change.tasks]
                needed = {dep for part in parts for dep in part.depends_on}
                # Tasks that only prepare others cannot meet what is checked of the old task.
                unchecked = {"acceptance": (), "expect": None}
                parts = [
                    part.model_copy(update=unchecked) if part.id in needed else part
                    for part in parts
                ]
                if old is not None and len(parts) == 1:
                    new = parts[0]
                    tool = self._view.tool(new.tool)
                    for before in self._view.lineage(change.task_id):
                        is_permanent = before.failure is not None and not before.failure.transient
                        if is_permanent and is_same_call(new, before.task, tool):
                            raise _InvalidCandidate(
                                f"the same was tried before as {before.id!r} and failed"
                            )
                    left = [f for f in old.fallbacks if not is_same_call(new, f, tool)]
                    parts = [new.model_copy(update={"fallbacks": tuple(left)})]
                new_tasks = parts if old is not None else []
                result = ReplaceTask(task_id=change.task_id, tasks=tuple(parts))
            case Modify():
                fields: JsonObject = change.model_dump(
                    exclude={"kind", "task_id"}, exclude_none=True
                )
                if not fields:
                    raise _InvalidCandidate(
                        f"the modification of {change.task_id!r} changes no field"
                    )
                self._check(fields, change.task_id)
                if old is not None:
                    new_tasks = [
                        old.model_copy(
                            update={n: fields[n] for n in ("tool", "timeout") if n in fields}
                        )
                    ]
                    kept = change.depends_on
                    dropped = [
                        dep for dep in old.depends_on if kept is not None and dep not in kept
                    ]
                    approvals += [
                        f"a model proposes to let {change.task_id!r} run without waiting for {before.id!r}"
                        for before in map(self._view.task, dropped)
                        if self._is_required(before)
                    ]
                result = ModifyTask(task_id=change.task_id, fields=fields)
            case Remove():
                result = RemoveTask(task_id=change.task_id)
            case Reorder():
                result = ReorderTasks(order=tuple(change.order))
            case Retry():
                result = RetryTask(task_id=change.task_id, delay=change.delay)
            case Skip():
                result = SkipTask(task_id=change.task_id, reason=self._single_line(change.reason))
            case Cancel():
                result = CancelTask(task_id=change.task_id, reason=self._single_line(change.reason))
            case Abort():
                approvals.append("a model proposes to end the run")
                reason = self._single_line(change.reason)
                result = AbortRun(reason=reason, undo=change.undo)
        if (
            isinstance(change, Remove | Skip | Cancel)
            and task is not None
            and self._is_required(task)
        ):
            approvals.append(f"a model proposes to do without {task.id!r}, which the plan requires")
        for new in new_tasks:
            tool = self._view.tool(new.tool)
            limit = (old.timeout if old is not None else None) or (
                tool.timeout if tool is not None else None
            )
            if limit is not None and new.timeout is not None and new.timeout > limit:
                approvals.append(
                    f"a model proposes to give {new.id!r} {new.timeout:g} s instead of {limit:g} s"
                )
        return result

    def _convert_task(self, new: NewTask, old: Task | None = None) -> Task:
        fields: JsonObject = new.model_dump(exclude_none=True)
        self._check({"tool": None, **fields}, new.id)
        inherited: dict[str, object] = {}
        if old is not None:
            inherited = {
                name: getattr(old, name) for name in _INHERITED if name in old.model_fields_set
            }
            if old.commands:
                inherited["expect"] = old.lasting_expectation
            if fields.get("tool") != old.tool:
                inherited.update(for_another_tool(old))
        try:
            return TypeAdapter(Task).validate_python({**inherited, **fields})
        except ValidationError as error:
            raise _InvalidCandidate(
                f"task {_quoted(new.id)}: {_problem_text(error, 'the task')}"
            ) from None

    def _check(self, fields: JsonObject, task_id: str) -> None:
        """Reject deep values, unknown tools, which the engine accepts if a plan describes none, and a lack of a tool."""
        if exceeds_depth(fields, _MAX_JSON_DEPTH):
            raise _InvalidCandidate(
                f"the arguments of task {_quoted(task_id)} are nested too deeply"
            )
        if "tool" not in fields or (tool := fields["tool"]) in self._used_tools:
            return
        if tool is None:
            raise _InvalidCandidate(f"task {_quoted(task_id)} names no tool of the library")
        if not self._describes_tools:
            known = (
                ", ".join(sorted(repr(name) for name in self._used_tools if name is not None))
                or "none"
            )
            problem = f"there is no tool {_quoted(str(tool))}; the tools of the plan are: {known}"
            raise _InvalidCandidate(f"task {_quoted(task_id)}: {problem}")

    def _is_required(self, task: TaskView) -> bool:
        """Return whether only a person may decide to do without a task."""
        if self._goal_is_checked or task.state in SATISFIED:
            return False
        return not (task.task.optional or self._view.task(task.root).task.optional)

    def _single_line(self, text: str) -> str:
        """Return a text for people on one line, without control characters."""
        clean = self._redactor.text(text[: 4 * _MAX_REASON_CHARS])
        return "".join(c if c.isprintable() else " " for c in clean).strip()[:_MAX_REASON_CHARS]


class _InvalidCandidate(Exception):
    """A candidate is invalid for every plan."""


def _quoted(text: str) -> str:
    return repr(truncate(text, 81))


def _problem_text(error: ValidationError, subject: str) -> str:
    return validation_message(error, subject, most=5)[:_MAX_REASON_CHARS]
