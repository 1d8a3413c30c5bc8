"""Live plan: a plan while it runs, with states, ready queue, facts and revision number; no I/O.

A live plan is a fold over journal records: replaying a journal gives the same live plan. It also
knows the parts of a resumed plan that the journal lacks because it has a mask in their place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import JsonValue

from replanning.changes import PlanChange, SkipTask, dump_change, to_canonical_json
from replanning.errors import (
    ChangeRejected,
    ExpressionError,
    IllegalTransition,
    PlanError,
    Problem,
    RevisionConflict,
    UnknownTask,
)
from replanning.journal.records import (
    AUTOMATIC,
    AttemptFailed,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    CallMade,
    ConditionEvaluated,
    ContextUpdated,
    DecisionMade,
    DependenciesEnded,
    FactsObserved,
    Failure,
    FailureKind,
    GoalChanged,
    PlanRevised,
    QuestionAnswered,
    QuestionAsked,
    Record,
    RecordBody,
    ResourceUpdated,
    ResultsStale,
    RunEnded,
)
from replanning.live.draft import Draft
from replanning.live.entries import (
    CONDITION_NOT_MET,
    CONDITION_NOT_MET_ALONE,
    Doubt,
    Effects,
    TaskEntry,
    TaskOutput,
    unconfirmed,
)
from replanning.live.facts import context_keys
from replanning.live.graph import TaskGraph
from replanning.live.scheduler import ToolBreaker
from replanning.live.states import (
    PENDING,
    REPLACED_BY_REPLAN,
    RUNNING,
    TaskEvent,
    transition,
)
from replanning.plan.checks import nested_bodies, parameters_of_work
from replanning.plan.document import Plan
from replanning.plan.elements import stated_elements
from replanning.plan.inclusion import NewIds, renamed_fields
from replanning.plan.json_values import is_redacted
from replanning.plan.messages import did_you_mean, join_names
from replanning.plan.parameters import current_values
from replanning.plan.references import (
    IDEMPOTENCY_KEY,
    resolve_root_references,
    sole_argument,
)
from replanning.plan.tasks import (
    CALL_FIELDS,
    Confirmation,
    Goal,
    Task,
    ToolSpec,
    asking_problem,
    confirmation_of,
)
from replanning.plan.types import JsonObject, TaskId
from replanning.secrets import MASK

_START: Final = TaskEvent.START
_SUCCEED: Final = TaskEvent.SUCCEED

_SENT_FIELDS: Final[dict[str, Any]] = {
    **dict.fromkeys(CALL_FIELDS, True),
    "expect": {"commands"},
}
"""Fields of a tool that define what is sent or executed, and where."""

_REFUSED_AFTERWARDS: Final[tuple[FailureKind, ...]] = ("unfinished", "rejected", "blocked")
"""Failures of calls that took effect: a judge did not accept the result."""

_YIELD_AFTER_CHARS: Final = 4_000
"""Characters of a plan that are hashed between two pauses."""

MASK_CURE: Final = (
    "pass the plan again: `replanning resume RUN --plan FILE`, or `run_or_resume` in Python"
)
"""Remedy if a journal has a mask instead of a secret."""

ELEMENT_CURE: Final = "expand its list again: `replanning rerun RUN TASK`"
"""Remedy if the secret is in an element of a list, or was passed to an included plan."""

PARAMETER_CURE: Final = (
    "set it again: `replanning resume RUN --set NAME=…`, or `engine.resume(run, parameters={…})` "
    "in Python"
)
"""Remedy if a journal lacks the value of a parameter."""

CHANGE_CURE: Final = (
    "the plan that was passed does not contain it: modify the task, or set the value of the "
    "context again"
)
"""Remedy if the secret came with a change, so that no plan file contains it."""


@dataclass(slots=True, eq=False, repr=False)
class MaskedParts:
    """Parts of a resumed plan with a mask instead of a secret; none in a new run.

    A mask must never reach a tool: a task that would use one fails before its work.

    Attributes:
        tasks: the tasks with masked arguments or checks, also in a fallback or an undo.
        tools: the tools with masked templates.
        context: the keys of the context with masked values.
        parameters: the parameters with masked values, and the secret ones without a value.
        cure: the remedy for all parts except parameters.
    """

    tasks: set[TaskId] = field(default_factory=set)
    tools: set[str] = field(default_factory=set)
    context: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    cure: str = MASK_CURE

    def __repr__(self) -> str:
        parts = f"tasks={self.tasks} tools={self.tools} context={self.context}"
        return f"<MaskedParts {parts} parameters={self.parameters}>"

    def __bool__(self) -> bool:
        return bool(self.tasks or self.tools or self.context or self.parameters)

    def problem_of(self, task: Task, lineage: Iterable[TaskEntry]) -> str:
        """Return why a task cannot run with masked parts; empty if it uses none.

        Args:
            task: the task.
            lineage: the tasks that its arguments may come from, itself included.
        """
        if self.parameters:
            lost = [name for name in parameters_of_work(task, None) if name in self.parameters]
            if lost:
                names = join_names([repr(name) for name in lost], 5)
                return f"the journal does not have the parameter {names}; {PARAMETER_CURE}"
        places = []
        is_masked = any(ancestor.id in self.tasks for ancestor in lineage)
        if is_masked and is_redacted(task.arguments):
            places.append("its arguments")
        if is_masked and is_redacted(list(task.commands)):
            places.append("its commands")
        if is_masked and is_redacted([task.with_, task.for_each]):
            places.append("its `with` or `for_each`")
        if is_masked and is_redacted(task.scope):
            # It came from the output of another task: no plan file contains it.
            return f"the journal has {MASK} for a secret in its element; {ELEMENT_CURE}"
        if task.tool in self.tools:
            places.append(f"its tool {task.tool!r}")
        if self.context:
            for key in context_keys(task):
                if key in self.context:
                    places.append(f"the context {key!r}")
        if not places:
            return ""
        where = join_names(places, 5)
        return f"the journal has {MASK} for a secret in {where}; {self.cure}"


class LivePlan(TaskGraph):
    """Running plan; synchronous and without I/O.

    `apply` and `fold` change it; `advance` also ends backoffs, without a record.

    Args:
        plan: the plan document to start from.
        empty: leave its tasks to `load_tasks`.

    Attributes:
        goal: the current goal.
        masked: the parts of a resumed plan that its journal lacks.
        taken_back: the reason for undoing the whole run; it ends after its compensations.
    """

    __slots__ = ("_holds_by_question", "goal", "masked", "taken_back")

    def __init__(self, plan: Plan, *, empty: bool = False) -> None:
        super().__init__(plan, empty=empty)
        self.goal = plan.goal
        self.masked = MaskedParts()
        self.taken_back: str | None = None
        self._holds_by_question: dict[str, tuple[TaskId, ...]] = {}

    def __repr__(self) -> str:
        states: list[str] = []
        for state, number in self.counts.items():
            if number:
                states.append(f"{state.lower()} {number}")
        shown = ", ".join(states) or "empty"
        name = self.plan.name or self.plan.id
        return f"<LivePlan {name!r} revision={self.revision} {shown}>"

    # Reading

    @property
    def hash(self) -> str:
        """Hash of the plan document and of every revision since; computed on first access."""
        for _ in self.compute_hash():
            pass
        return self.revision_hash

    def compute_hash(self) -> Iterator[None]:
        """Compute the hash ahead of its first use, with pauses for other work."""
        if self.revision_hash:
            return
        digest = hashlib.sha256()
        for piece in self.plan.canonical_chunks():
            digest.update(piece.encode())
            if len(piece) > _YIELD_AFTER_CHARS:
                yield
        # A revision during a pause has already computed the hash.
        if not self.revision:
            self.revision_hash = digest.hexdigest()

    @property
    def missing_facts(self) -> tuple[str, ...]:
        """Facts of the goal that do not hold now."""
        return tuple(fact for fact in self.goal.facts if fact not in self.world.facts)

    @property
    def complete(self) -> bool:
        """True if every required lineage ended in DONE or SKIPPED and the goal's facts hold."""
        return not self.unsatisfied_count and not self.missing_facts

    def document(self) -> Plan:
        """Return the current plan, as a file could state it.

        Replacements are in the place of the tasks that they replaced, and other tasks depend on
        them and refer to them. A list or an included plan is one task, without the changes to its
        parts: it is expanded again when the document is run.
        """
        tasks: list[Task] = []
        renamed: dict[TaskId, TaskId] = {}
        for entry in self:
            if entry.state is REPLACED_BY_REPLAN and not entry.is_expanded:
                names = self._names_in_document(entry.id)
                if len(names) == 1:
                    renamed[entry.id] = names[0]
        for entry in self._in_document_order():
            if self._names_in_document(entry.id) == [entry.id]:
                tasks.append(self._stated_task(entry, renamed))
        return self._document_of(tuple(tasks))

    def expanded_document(self) -> Plan:
        """Return the current plan with the elements of lists and the tasks of included plans."""
        staged = Draft(self)
        tasks: list[Task] = []
        for entry in self._in_document_order():
            if entry.replacement.tasks:
                continue
            task = entry.task
            if any(self.entries[dep].replacement.tasks for dep in task.depends_on):
                needed = dict.fromkeys(staged.follow_replacements(task.depends_on))
                task = task.model_copy(update={"depends_on": tuple(needed)})
            tasks.append(task)
        return self._document_of(tuple(tasks))

    def _document_of(self, tasks: tuple[Task, ...]) -> Plan:
        capacity = self.scheduler.pool.capacity
        current: dict[str, object] = {
            "goal": self.goal,
            "tasks": tasks,
            "tools": tuple(self.tools.values()),
            "context": dict(self.context),
            # Without the internal ones that limit how many elements of a list run.
            "resources": {name: capacity[name] for name in self.plan.resources},
            # All dependencies are explicit; a changed plan read as sequential would get more.
            "sequential": self.plan.sequential and tasks == self.plan.tasks,
        }
        return self.plan.model_copy(update=current)

    def _in_document_order(self) -> list[TaskEntry]:
        """Return the tasks that are not removed, each replacement in its original's place."""
        places: dict[TaskId, list[int]] = {}
        for entry in self:
            if not entry.removed:
                places[entry.id] = [ancestor.order for ancestor in entry.lineage()]
        return [self.entries[task_id] for task_id in sorted(places, key=places.__getitem__)]

    def _names_in_document(self, task_id: TaskId) -> list[TaskId]:
        """Return the tasks that represent a task in `document`."""
        names: list[TaskId] = []
        stack = [self.entries[task_id]]
        while stack:
            entry = stack.pop()
            outermost = entry
            ancestor = entry.parent
            while ancestor is not None:
                if ancestor.is_expanded:
                    outermost = ancestor
                ancestor = ancestor.parent
            sinks = outermost.replacement.sinks
            if outermost.is_expanded:
                sinks = ()
            if sinks:
                stack.extend(reversed(sinks))
            else:
                names.append(outermost.id)
        return list(dict.fromkeys(names))

    def _stated_task(self, entry: TaskEntry, renamed: NewIds) -> Task:
        """Return a task as a file could state it, with the new ids of replaced tasks."""
        task = entry.task
        needed: dict[TaskId, None] = {}
        for dep in task.depends_on:
            needed.update(dict.fromkeys(self._names_in_document(dep)))
        fields: dict[str, Any] = {}
        if tuple(needed) != tuple(task.depends_on):
            fields["depends_on"] = tuple(needed)
        if renamed:
            fields.update(renamed_fields(task, renamed))
        if entry.replacement.expanded == "elements" and task.for_each is None:
            # A program supplied the list.
            elements = [element.task for element in entry.replacement.sinks]
            fields["for_each"] = stated_elements(task, elements)
        if not fields:
            return task
        return task.model_copy(update=fields)

    def sent_arguments(self, entry: TaskEntry) -> JsonObject:
        """Return the arguments of the last attempt at a task.

        Raises:
            ExpressionError: a reference has no value.
        """
        if entry.reads.arguments is not None:
            return entry.reads.arguments
        return self.arguments(entry)

    def asking_task(self, entry: TaskEntry, confirm: Confirmation, key: str) -> Task:
        """Return the task that confirms whether the last attempt at a task was done.

        An argument that only refers to an argument omitted from the call is omitted as well.

        Args:
            entry: the task.
            confirm: the confirmation.
            key: the idempotency key of the attempt.

        Raises:
            ExpressionError: a reference has no value, a part is masked, or the tool must not be
                called; the message becomes the failure of the confirmation.
        """
        tool = self.tools.get(confirm.tool)
        if tool is not None:
            problem = asking_problem(tool)
            if not tool.available:
                problem = f"{tool.name!r} is unavailable"
            if problem:
                raise ExpressionError(problem)
        given = self.sent_arguments(entry)
        roots: dict[str, object] = {
            "arguments": given,
            "context": self.context,
            "parameters": self.parameters,
            "results": self.inputs_of(entry.task),
            IDEMPOTENCY_KEY: key,
            **(entry.task.scope or {}),
        }
        arguments: JsonObject = {}
        for name, value in confirm.arguments.items():
            referred = sole_argument(value)
            if referred and referred not in given:
                continue
            arguments[name] = resolve_root_references(value, roots)
        # A mask must never reach a tool.
        if confirm.tool in self.masked.tools or is_redacted(arguments):
            raise ExpressionError(
                f"the journal has {MASK} for a secret that {confirm.tool!r} needs"
            )
        return Task(id=entry.id, tool=confirm.tool, arguments=arguments, effect="none")

    def find_masked_parts(self, given: Plan | None) -> None:
        """Find the parts with a mask instead of a secret, after a replay.

        Args:
            given: the plan that the caller passed again; its parts are complete.
        """
        complete: dict[TaskId, Task] = {}
        if given is not None:
            self.masked.cure = CHANGE_CURE
            complete = {task.id: task for task in given.tasks}
        for entry in self:
            if complete.get(entry.id) is entry.task:
                continue
            for _, body in nested_bodies(entry.task):
                if is_redacted(body.arguments) or is_redacted(list(body.commands)):
                    self.masked.tasks.add(entry.id)
            if is_redacted([entry.task.scope, entry.task.with_, entry.task.for_each]):
                self.masked.tasks.add(entry.id)
        self._find_masked_tools(given)
        for key, value in self.context.items():
            is_given = given is not None and given.context.get(key) == value
            if is_redacted(value) and not is_given:
                self.masked.context.add(key)
        self._find_masked_parameters(given)

    def complete_masked_parts(
        self, given: Plan, tasks: Sequence[Task], tools: Sequence[ToolSpec], context: JsonObject
    ) -> None:
        """Replace masks with true values; nothing visible in a journal changes.

        Args:
            given: the plan that the values come from.
            tasks: current tasks, with true values.
            tools: current tools, with true values.
            context: true values of the context, by key.
        """
        self.version += 1
        for task in tasks:
            self.entries[task.id].task = task
        for tool in tools:
            self.tools[tool.name] = tool
        self.context.update(context)
        self.masked = MaskedParts()
        self.find_masked_parts(given)

    def _find_masked_parameters(self, given: Plan | None) -> None:
        for name, parameter in self.plan.parameters.items():
            is_masked = is_redacted(parameter.current)
            if is_masked and given is not None:
                is_masked = given.parameters.get(name) != parameter
            if is_masked or parameter.current is None:
                self.masked.parameters.add(name)

    def _find_masked_tools(self, given: Plan | None) -> None:
        servers: set[str] = set()
        for name, server in self.plan.mcp.items():
            is_given = given is not None and given.mcp.get(name) == server
            if is_redacted(server.model_dump(mode="json")) and not is_given:
                servers.add(name)
        for tool in self.tools.values():
            templates = tool.model_dump(mode="json", include=_SENT_FIELDS)
            is_masked = is_redacted(templates)
            if is_masked and given is not None:
                complete = given.tool(tool.name)
                if complete is not None:
                    known = complete.model_dump(mode="json", include=_SENT_FIELDS)
                    is_masked = known != templates
            if is_masked or tool.server in servers:
                self.masked.tools.add(tool.name)

    # Revising

    def check(self, changes: Sequence[PlanChange]) -> tuple[Problem, ...]:
        """Return the reasons why changes cannot be applied; empty if they can."""
        return tuple(Draft(self, changes).problems)

    def diff(self, changes: Sequence[PlanChange]) -> str:
        """Return the effect of changes in readable lines, or why they cannot be applied."""
        draft = Draft(self, changes)
        if draft.problems:
            return "\n".join(map(str, draft.problems))
        return draft.diff()

    def prepare(
        self,
        changes: Sequence[PlanChange],
        expected_revision: int | None = None,
        *,
        draft: Draft | None = None,
        adopted: Plan | None = None,
    ) -> Draft:
        """Stage changes and check them; they take effect when their record is folded.

        Args:
            changes: the changes, in order; later ones see the effect of earlier ones.
            expected_revision: the revision they were made for, if that matters.
            draft: the same changes, staged earlier; staged again if the plan has changed since.
            adopted: the corrected plan that the changes lead to.

        Raises:
            RevisionConflict: the plan is at another revision.
            ChangeRejected: with every problem.
        """
        if expected_revision is not None and expected_revision != self.revision:
            message = (
                f"the changes were made for revision {expected_revision}, "
                f"the plan is at revision {self.revision}"
            )
            raise RevisionConflict(
                [Problem("", message)], expected=expected_revision, actual=self.revision
            )
        if draft is None or draft.version != self.version:
            draft = Draft(self, changes, adopted)
        if draft.problems:
            raise ChangeRejected(draft.problems)
        document = to_canonical_json([dump_change(change) for change in draft.changes])
        if adopted is not None:
            document += adopted.content_hash()
        before = self.revision_hash or self.hash
        draft.plan_hash = hashlib.sha256(f"{before}:{document}".encode()).hexdigest()
        return draft

    def apply(
        self,
        changes: Sequence[PlanChange],
        expected_revision: int | None = None,
        *,
        at: float = 0.0,
    ) -> int:
        """Apply all of the changes, or none.

        Args:
            changes: the changes, in order; later ones see the effect of earlier ones.
            expected_revision: the revision they were made for, if that matters.
            at: now, in seconds since the epoch; the delay of a retry counts from it.

        Returns:
            The number of the new revision.

        Raises:
            RevisionConflict: the plan is at another revision.
            ChangeRejected: with every problem.
        """
        self.prepare(changes, expected_revision).commit(at)
        return self.revision

    # Folding records

    def fold(self, record: Record, draft: Draft | None = None) -> None:
        """Apply a journal record; records that do not concern the state of the plan are ignored.

        Args:
            record: the record.
            draft: for a revision that was prepared just now, its staged changes.

        Raises:
            IllegalTransition: the record does not fit the state of its task; nothing has changed.
            UnknownTask: the record names a task that does not exist.
        """
        _, at, body = record
        handler = PLAN_RECORD_HANDLERS.get(type(body))
        if handler is None:
            if isinstance(body, DecisionMade) and body.blocks:
                self.version += 1
                self.world.problems.clear()
                self._end_tasks(body.blocks, TaskEvent.BLOCK, body.reason)
            if isinstance(body, PlanRevised):
                # If the record comes from a journal, its changes are staged again.
                if draft is None:
                    draft = self.prepare(body.changes, body.parent, adopted=body.adopted)
                if body.adopted is not None:
                    self._adopt_values(body.adopted)
                    # Before the tasks, which may use its tools and resources.
                    self.change_document(body.adopted)
                draft.commit(at)
                if body.adopted is not None:
                    # A person who corrects the plan or runs tasks again wants the goal reached.
                    self.taken_back = None
                if body.takes_back:
                    self.taken_back = body.reason
                    # An aborted run continues until its compensations are done.
                    self.aborted = None
                if body.replan is not None:
                    self.statistics.recent_ends.append(False)
                if body.by not in AUTOMATIC and body.chosen is None:
                    self._settle_calls(body.changes)
            return
        # Even a record that changes nothing makes drafts outdated, which is safe and rare.
        self.version += 1
        if self.world.problems:
            self.world.problems.clear()
        handler(self, body, at)

    def _settle_calls(self, changes: Sequence[PlanChange]) -> None:
        """Note that calls in doubt took effect, as a person says of the tasks that they skip.

        The earlier attempts at such a task stay in doubt: two calls may have had two effects. A
        person who approves a candidate does not say so: a model wrote it, and `done` is not shown.
        """
        calls = self.statistics.past_calls
        for change in changes:
            if not isinstance(change, SkipTask) or not change.done:
                continue
            for attempt, call in reversed(calls.items()):
                if call.task == change.task_id and call.in_doubt:
                    calls[attempt] = call._replace(in_doubt=False)
                    break

    def _adopt_values(self, adopted: Plan) -> None:
        """Apply the changes of a corrected plan to the context and the goal."""
        changes, removed = self.changed_context(adopted)
        if changes or removed:
            history = self.staleness.history
            history.change(self.context, changes, removed, self.scheduler.last_claim)
            self.masked.context.difference_update(changes)
        self.masked.tools.difference_update(self.changed_tools(adopted))
        self.masked.parameters.intersection_update(adopted.parameters)
        self.masked.parameters.difference_update(current_values(adopted.parameters))
        self.goal = self.goal_after(adopted)

    def changed_context(self, adopted: Plan) -> tuple[JsonObject, tuple[str, ...]]:
        """Return the context values that a corrected plan adds or changes, and the dropped keys."""
        before = self.plan.context
        changes: JsonObject = {}
        for key, value in adopted.context.items():
            is_changed = key not in before or before[key] != value
            if is_changed and not (key in self.context and self.context[key] == value):
                changes[key] = value
        removed = [key for key in before if key not in adopted.context and key in self.context]
        return changes, tuple(removed)

    def goal_after(self, adopted: Plan) -> Goal:
        """Return the goal with the fields that a corrected plan changes."""
        changed: dict[str, object] = {}
        for name in Goal.model_fields:
            value = getattr(adopted.goal, name)
            if value != getattr(self.plan.goal, name):
                changed[name] = value
        if not changed:
            return self.goal
        return self.goal.model_copy(update=changed)

    def _on_call_made(self, body: CallMade, at: float) -> None:
        entry = self._insert_call(body.call)
        self.counts[PENDING] += 1
        self.make_ready(entry)

    def _insert_call(self, task: Task) -> TaskEntry:
        if task.id in self.entries or task.depends_on:
            message = f"{task.id!r} cannot be a call: its id is taken, or it depends on other tasks"
            raise ChangeRejected([Problem("task", message)])
        return self.insert(task, None)

    def _on_attempt_started(self, body: AttemptStarted, at: float) -> None:
        if body.confirms is not None:
            self._on_confirmation_started(body, at)
            return
        if body.call is None:
            entry = self.entry(body.task)
            self.transition(entry, _START)
        else:
            entry = self._insert_call(body.call)
            entry.state = RUNNING
            self.counts[RUNNING] += 1
        if self.counts[RUNNING] == 1:
            self.statistics.busy_since = at
        task = entry.task
        tool = self.tool_of(task)
        if tool is not None:
            if tool.addition_patterns or tool.removes:
                entry.log.effects = self._effects_of(task, tool)
            if self.world.closed:
                self.world.running[entry.id] = self.dependency_index.ground(task)[0]
        entry.reads.arguments = None
        if task.expect or task.confirm or (tool is not None and (tool.expect or tool.confirm)):
            with suppress(ExpressionError):  # in a resumed run, an output may not be stored
                entry.reads.arguments = self.arguments(entry)
        self.scheduler.begin(entry)
        log = entry.log
        log.current = body.attempt
        log.count = body.number
        log.in_round += 1
        log.started_at = at
        log.deadline = body.deadline
        entry.reads.started = self.statistics.ended_attempts
        entry.reads.context_version = self.staleness.history.version
        if body.deadline is not None:
            self.scheduler.deadlines.add(body.deadline, entry, body.attempt)

    def _effects_of(self, task: Task, tool: ToolSpec) -> Effects | None:
        """Return the effects of a starting attempt; None if they are unknown."""
        arguments: dict[str, JsonValue] = {}
        for name, value in task.arguments.items():
            # One by one: in a resumed run, an output that was not stored cannot be read, and the
            # effects may not need the argument that refers to it.
            with suppress(ExpressionError):
                arguments |= self.resolve(task, {name: value})
        with suppress(PlanError):  # an argument is missing
            return tool.additions(arguments), tool.deletions(arguments)
        return None

    def _on_confirmation_started(self, body: AttemptStarted, at: float) -> None:
        entry = self.entry(body.task)
        doubt = entry.log.doubt
        if doubt is None or not entry.awaits_confirmation:
            raise IllegalTransition(entry.state, TaskEvent.START, f"{entry.id!r}, not in doubt,")
        self.scheduler.begin(entry)
        doubt.asked += 1
        doubt.asked_at = at
        entry.log.current = body.attempt
        entry.log.deadline = body.deadline
        if body.deadline is not None:
            self.scheduler.deadlines.add(body.deadline, entry, body.attempt)

    def _on_attempt_succeeded(self, body: AttemptSucceeded, at: float) -> None:
        entry = self.entry(body.task)
        log = entry.log
        if log.current != body.attempt:
            raise IllegalTransition(entry.state, TaskEvent.SUCCEED, _stale_attempt_subject(body))
        self.transition(entry, _SUCCEED)
        effects = log.effects
        if log.doubt is not None:
            # A confirmation says that the attempt has made the task done.
            self.statistics.past_calls.pop(log.doubt.attempt, None)
        self.end_attempt(entry, succeeded=True)
        value = body.output if body.recoverable else None
        entry.output = TaskOutput(value, body.recoverable, body.unstored)
        log.failure = None
        log.failures = 0
        log.duration = at - log.started_at
        tool = entry.task.tool
        self.statistics.count_end(tool, at, log.duration, succeeded=True, by_itself=True)
        entry.reads.ended = self.statistics.ended_attempts
        entry.reads.keys = body.reads
        if body.reads:
            for key in body.reads:
                self.staleness.history.readers.setdefault(key, {})[entry.id] = None
        breakers = self.scheduler.breakers
        # Only a recorded change of availability closes an open breaker.
        if tool in breakers and not breakers[tool].openings:
            del breakers[tool]
        if effects is not None:
            self.world.change(*effects, self.statistics.ended_attempts)
        self.satisfy_dependents(entry)

    def shared_failure(self, entry: TaskEntry, failure: Failure) -> TaskEntry | None:
        """Return the replaced task at which another tool failed with the same message, or None.

        If the outputs of two tools are unexpected with one message, such as an order that neither
        finds, the tools are right or the expectation is wrong. Breakers must not count that: a few
        such calls would make both tools unavailable.

        Args:
            entry: the task that failed.
            failure: its failure.
        """
        if failure.kind != "unexpected":
            return None
        replaced = entry.parent
        while replaced is not None:
            earlier = replaced.log.failure
            if earlier is not None and earlier.message == failure.message:
                if replaced.task.tool != entry.task.tool:
                    return replaced
            replaced = replaced.parent
        return None

    def _on_attempt_failed(
        self, body: AttemptFailed | AttemptTimedOut | AttemptInterrupted, at: float
    ) -> None:
        entry = self.entry(body.task)
        log = entry.log
        failure = body.failure
        event = TaskEvent.FAIL
        if body.retry_at is not None:
            event = TaskEvent.BACK_OFF
            if failure.kind == "unfinished":
                event = TaskEvent.CONTINUE
        if log.current != body.attempt:
            raise IllegalTransition(entry.state, event, _stale_attempt_subject(body))
        if body.confirm_at is not None:
            self._await_confirmation(entry, body, at)
            return
        interrupted = isinstance(body, AttemptInterrupted)
        # First, because an illegal event must leave everything unchanged.
        self.transition(entry, event)
        doubt = log.doubt
        if doubt is not None:
            if failure.not_done:
                self.statistics.past_calls.pop(doubt.attempt, None)
            else:
                log.unconfirmed = unconfirmed(failure)
            failure = doubt.settled(failure)
            interrupted = failure.kind == "interrupted"
            log.in_doubt = doubt.is_further
        else:
            self._keep_failed_call(entry, body)
        tool = entry.task.tool
        shared = self.shared_failure(entry, failure)
        if shared is None:
            self.scheduler.count_failure(entry, failure)
        else:
            self.scheduler.forget_failure(shared)
            tool = None
        self.end_attempt(entry)
        log.failure = failure
        ended_by_itself = isinstance(body, AttemptInterrupted) and not body.in_doubt
        if failure.in_doubt and not ended_by_itself:
            log.in_doubt = True
            self.doubtful[entry.id] = None
        log.duration = at - log.started_at
        self.statistics.count_end(
            tool, at, log.duration, succeeded=False, by_itself=not interrupted
        )
        entry.reads.ended = self.statistics.ended_attempts
        log.keep_round_start()
        # An interruption is not the fault of the task: it uses up no retry.
        if interrupted and body.retry_at is not None:
            log.in_round -= 1
        exhausted = not isinstance(body, AttemptInterrupted) and body.exhausted
        if body.retry_at is None or exhausted:
            log.failures += 1
            log.in_round = 0
        if event is TaskEvent.CONTINUE:
            log.continuations += 1
            log.feedback = failure.message
            log.in_round = 0
        elif failure.kind == "blocked":
            self.transition(entry, TaskEvent.BLOCK)
            entry.reason = failure.message
        if body.retry_at is not None:
            self.scheduler.wait_until(entry, body.retry_at)
            # It may have to wait for a dependency that is done again.
            self.update_readiness(entry)

    def _keep_failed_call(
        self, entry: TaskEntry, body: AttemptFailed | AttemptTimedOut | AttemptInterrupted
    ) -> None:
        """Keep an attempt that failed, but took effect, or may have, among the past calls."""
        in_doubt = body.failure.in_doubt
        if isinstance(body, AttemptInterrupted):
            in_doubt = body.in_doubt
        if body.failure.kind in _REFUSED_AFTERWARDS:
            self.keep_call(entry, body.attempt, in_doubt=False)
        elif in_doubt:
            self.keep_call(entry, body.attempt, in_doubt=True)

    def _await_confirmation(
        self,
        entry: TaskEntry,
        body: AttemptFailed | AttemptTimedOut | AttemptInterrupted,
        at: float,
    ) -> None:
        """Keep a task running after an attempt without an answer, until it is confirmed.

        It keeps its resources and the effects of a success. Either the attempt itself has failed,
        or an earlier confirmation, which is repeated.
        """
        log = entry.log
        if log.doubt is None:
            confirm = confirmation_of(entry.task, self.tool_of(entry.task))
            assert confirm is not None, "the plan declared it when the attempt ended"
            log.doubt = Doubt(body.attempt, body.failure, confirm, log.in_doubt)
            log.failure = body.failure
            log.in_doubt = True
            self.doubtful[entry.id] = None
            self.keep_call(entry, body.attempt, in_doubt=True)
            self.scheduler.unconfirmed[entry.id] = entry
        elif not isinstance(body, AttemptInterrupted):
            log.doubt.failed += 1
        log.current = None
        log.deadline = None
        assert body.confirm_at is not None
        if body.confirm_at > at:
            self.scheduler.wait_until(entry, body.confirm_at)
        else:
            self.scheduler.queue.push_in_doubt(entry)

    def _on_condition(self, body: ConditionEvaluated, at: float) -> None:
        """Record whether a condition held, did not hold, or could not be evaluated."""
        entry = self.entry(body.task)
        if body.value:
            entry.condition_revision = self.revision
        elif body.value is None:
            self.transition(entry, TaskEvent.CONDITION_ERROR)
            entry.log.failure = Failure("ConditionError", body.error, kind="condition")
            entry.log.failures += 1
        else:
            self.transition(entry, TaskEvent.SKIP)
            entry.condition_revision = CONDITION_NOT_MET_ALONE
            if body.leaves_out_branch:
                entry.condition_revision = CONDITION_NOT_MET
            entry.log.started_at = at
            entry.reads.started = self.statistics.ended_attempts
            entry.reads.context_version = self.staleness.history.version
            entry.reason = f"its condition {entry.task.when!r} does not hold"
            self.satisfy_dependents(entry)
            self.leave_out_dependents(entry, at)

    def _on_dependencies_ended(self, body: DependenciesEnded, at: float) -> None:
        self.run_without_dependencies(self.entry(body.task))

    def _on_context(self, body: ContextUpdated, at: float) -> None:
        history = self.staleness.history
        history.change(self.context, body.changes, body.removed, self.scheduler.last_claim)
        if body.attempt is not None:
            # An attempt's own changes do not make its result stale.
            entry = self.entry(TaskId(body.attempt.rpartition("#")[0]))
            entry.reads.changed_context = True
            if entry.reads.keys is None:
                entry.reads.keys = {}
            for key in (*body.changes, *body.removed):
                refers = entry.id in self.dependency_index.context_references.get(key, ())
                if refers or key in entry.reads.keys:
                    entry.reads.keys[key] = history.version
        self.scheduler.unpark()

    def _on_results_stale(self, body: ResultsStale, at: float) -> None:
        self.staleness.recorded = body.tasks

    def _on_resource(self, body: ResourceUpdated, at: float) -> None:
        scheduler = self.scheduler
        if body.available is not None and body.name in self.tools:
            tool = self.tools[body.name]
            self.tools[body.name] = tool.model_copy(update={"available": body.available})
            if body.retry_at is None:
                scheduler.breakers.pop(body.name, None)
            elif not body.available:
                breaker = scheduler.breakers.setdefault(body.name, ToolBreaker())
                breaker.openings += 1
                breaker.retry_at = body.retry_at
        if body.capacity is not None:
            self.set_capacity(body.name, body.capacity)
        scheduler.unpark()

    def _on_facts(self, body: FactsObserved, at: float) -> None:
        self.world.change(body.holds, body.ceased, self.statistics.ended_attempts)
        self.scheduler.unpark()

    def _on_goal(self, body: GoalChanged, at: float) -> None:
        self.goal = body.goal

    def _on_question(self, body: QuestionAsked, at: float) -> None:
        held = [self.entry(task_id) for task_id in body.holds]
        # An answer names only its question, so the tasks that it releases are remembered here.
        self._holds_by_question[body.question] = body.holds
        self.scheduler.hold(held)

    def _on_answer(self, body: QuestionAnswered, at: float) -> None:
        held = self._holds_by_question.pop(body.question, ())
        self.scheduler.release([self.entries[task_id] for task_id in held])

    def _on_run_ended(self, body: RunEnded, at: float) -> None:
        self._end_tasks(body.cancelled, TaskEvent.CANCEL, body.reason)

    def _end_tasks(self, task_ids: Sequence[TaskId], event: TaskEvent, reason: str) -> None:
        """Block or cancel tasks, all or none."""
        entries = [self.entry(task_id) for task_id in dict.fromkeys(task_ids)]
        for entry in entries:
            transition(entry.state, event, entry.id)
        for entry in entries:
            self.transition(entry, event)
            self.end_attempt(entry)
            entry.reason = reason
        self.early.standstill = None


def unknown_task(name: str, live: LivePlan) -> UnknownTask:
    """Return the error about a task that never existed, with a similar name or the first names."""
    ids = [entry.id for entry in live]
    hint = did_you_mean(name, ids)
    if not hint and ids:
        hint = f"the plan has {join_names([repr(task_id) for task_id in ids], 5)}"
    return UnknownTask(name, hint)


def _stale_attempt_subject(
    body: AttemptSucceeded | AttemptFailed | AttemptTimedOut | AttemptInterrupted,
) -> str:
    return f"task {body.task!r}, whose current attempt is not {body.attempt!r},"


PLAN_RECORD_HANDLERS: Final[dict[type[RecordBody], Callable[..., None]]] = {
    CallMade: LivePlan._on_call_made,
    AttemptStarted: LivePlan._on_attempt_started,
    AttemptSucceeded: LivePlan._on_attempt_succeeded,
    AttemptFailed: LivePlan._on_attempt_failed,
    AttemptTimedOut: LivePlan._on_attempt_failed,
    AttemptInterrupted: LivePlan._on_attempt_failed,
    ConditionEvaluated: LivePlan._on_condition,
    DependenciesEnded: LivePlan._on_dependencies_ended,
    ContextUpdated: LivePlan._on_context,
    ResultsStale: LivePlan._on_results_stale,
    ResourceUpdated: LivePlan._on_resource,
    FactsObserved: LivePlan._on_facts,
    GoalChanged: LivePlan._on_goal,
    QuestionAsked: LivePlan._on_question,
    QuestionAnswered: LivePlan._on_answer,
    RunEnded: LivePlan._on_run_ended,
}
"""Handlers of the records that change the state of a plan."""
