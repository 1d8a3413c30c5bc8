"""PlanRun, one execution of one plan: what workers pull, execute and report, and what people observe and edit."""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, Final, Never, Self

import anyio
from opentelemetry.context import Context

from replanning.changes import (
    AddTask,
    CancelTask,
    ModifyTask,
    PlanChange,
    RemoveTask,
    ReorderTasks,
    ReplaceTask,
    parse_changes,
)
from replanning.decision.confidence import PlanEvaluation
from replanning.decision.policy import DOUBT_ADVICE, accept_changes
from replanning.errors import (
    CallFailed,
    CallSkipped,
    ChangeRejected,
    NeedsHuman,
    NoResult,
    NotRunning,
    Problem,
    RunFailed,
    StoreError,
)
from replanning.history.history import ReplanHistory
from replanning.journal.records import (
    ContextUpdated,
    FactsObserved,
    Failure,
    GoalChanged,
    PlanningNoted,
    PlanRevised,
    ProcessStarted,
    Record,
    ReplanRequested,
    ResourceUpdated,
    RunPaused,
    RunProblem,
    RunStatus,
    Usage,
)
from replanning.journal.store import FINISHED_STATUSES, to_plain_json
from replanning.journal.values import copy_containers
from replanning.live.entries import TaskEntry
from replanning.live.graph import CopyOnRead
from replanning.live.plan import LivePlan
from replanning.live.stale import stale_results
from replanning.live.states import TaskState
from replanning.live.view import PlanView, ReplanningInfo
from replanning.plan.document import Plan
from replanning.plan.json_values import detached
from replanning.plan.messages import (
    NameSuggester,
    brief_repr,
    join_names,
)
from replanning.plan.references import fact_problem, normalise_fact
from replanning.plan.tasks import Goal, Task, ToolSpec
from replanning.plan.types import AttemptId, JsonObject, JsonValue, RunId, TaskId
from replanning.run.event_loop import CancelledWithin, Parameters, ResultT, is_cancelled
from replanning.run.lifecycle import GIVEN_UP, Lifecycle, RunMeter, TaskOffer
from replanning.run.processes import host_id, process_start_time


class Outputs(dict[str, Any]):
    """Results by task; the `KeyError` for a task that has none says why.

    Args:
        values: the results.
        reasons: by task, why it has no result.
    """

    def __init__(self, values: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
        super().__init__(values)
        self._reasons = reasons

    def __missing__(self, key: str) -> Never:
        raise KeyError(self._reasons.get(key) or f"the plan has no task {key!r}")


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run.

    Attributes:
        status: `succeeded`, `failed`, `aborted`, `paused` or `needs_human`.
        reason: the reason, in one sentence.
        outputs: results by the ids of the original tasks; the `KeyError` for a task without one says why.
        revisions: the revisions of the plan with their reasons, in order.
        questions: the ids of the questions that a person must answer.
        spent: the usage that budgets counted.
        unjournaled: whether the store failed and the run continued without it.
        failures: by task, the last failure of each one that ended FAILED or BLOCKED.
        stale: by task, the causes of each stale result: `context.KEY`, which the task has read and which has changed
            since, or the id of a task that it followed.
        problems: the errors of plugins, and others, that the run contained, oldest first: a provider that raised or
            did not answer in time, an exporter that sent nothing. The logger `replanning` warns of each with its
            traceback.
    """

    run: RunId
    status: RunStatus
    reason: str
    outputs: Mapping[str, Any]
    revisions: tuple[PlanRevised, ...]
    questions: tuple[str, ...] = ()
    spent: Usage = field(default_factory=Usage)
    unjournaled: bool = False
    failures: Mapping[TaskId, Failure] = field(default_factory=dict)
    stale: Mapping[TaskId, tuple[str, ...]] = field(default_factory=dict)
    problems: tuple[RunProblem, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the run succeeded."""
        return self.status == "succeeded"

    def raise_for_status(self) -> Self:
        """Return this result of a run that succeeded.

        Raises:
            RunFailed: it did not.
        """
        if not self.ok:
            raise RunFailed(self.run, self.status, self.reason, self.failures)
        return self


def in_loop_thread(
    method: Callable[Concatenate[PlanRun, Parameters], ResultT],
) -> Callable[Concatenate[PlanRun, Parameters], ResultT]:
    """Have calls of a method from other threads executed in the thread of the run's event loop."""

    @wraps(method)
    def call(run: PlanRun, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> ResultT:
        return run._lifecycle.loop.call(method, run, *args, **kwargs)

    return call


def read_in_loop_thread(
    method: Callable[Concatenate[PlanRun, Parameters], ResultT],
) -> Callable[Concatenate[PlanRun, Parameters], ResultT]:
    """Have other threads read in the thread of the run's event loop, between two changes, until the run was left."""

    @wraps(method)
    def read(run: PlanRun, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> ResultT:
        try:
            return run._lifecycle.loop.call(method, run, *args, **kwargs)
        except NotRunning:  # nothing changes any more
            return method(run, *args, **kwargs)

    return read


class PlanRun:
    """One execution of one plan, from which workers pull and to which they report.

    Made by `ReplanningEngine.open`, and without an engine by `open_run`. An edit is one revision, which counts as
    an edit and not as a replan.

    Any thread may report, observe, edit, pause and ask for replanning: a call from another thread waits until the event
    loop of the run has executed it, and raises what it raises there. Once the run was left, it is `NotRunning`. Any thread
    may read `plan`, `result`, `history` and `replanning_info`; `live` and `view` belong to the thread of the event loop.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.id = lifecycle.run_id
        self._lifecycle = lifecycle
        self._redactor = lifecycle.redactor
        self._history: ReplanHistory | None = None

    def __repr__(self) -> str:
        state = self._lifecycle.end.status if self._lifecycle.end else "running"
        return f"<PlanRun {self.id!r} {state} {self.live!r}>"

    # Reading

    @property
    def live(self) -> LivePlan:
        """The live plan; read it, and change it only through this run."""
        return self._lifecycle.live

    @property
    @read_in_loop_thread
    def plan(self) -> Plan:
        """The plan as it is now, as a document."""
        return detached(self.live.document())

    @property
    def view(self) -> PlanView:
        """A read-only view of the plan at its present revision, for the thread of the event loop."""
        return PlanView(self.live)

    @property
    def ended(self) -> bool:
        """Whether it has ended, or is stopped until it is resumed; `result` then has the status."""
        return self._lifecycle.end is not None

    @property
    @read_in_loop_thread
    def result(self) -> RunResult:
        """The result of the run.

        Raises:
            NotRunning: it has not ended yet.
        """
        end, ledger = self._lifecycle.end, self._lifecycle.ledger
        if end is None:
            raise NotRunning(f"run {self.id!r} has not ended yet; its result is known afterwards")
        return RunResult(
            self.id,
            end.status,
            end.reason,
            self._outputs(),
            detached(tuple(revised for _, revised in ledger.revisions)),
            tuple(ledger.open_questions),
            ledger.budget_tracker.spent,
            self._lifecycle.unjournaled,
            {
                e.id: e.log.failure
                for e in map(self.live.entry, self.live.stuck)
                if e.log.failure is not None
            },
            {task_id: result.causes for task_id, result in stale_results(self.live).items()},
            tuple(ledger.problems.values()),
        )

    def _outputs(self) -> Outputs:
        results = self.live.results
        values = {name: copy_containers(value) for name, value in results.outputs().items()}
        return Outputs(values, results.missing(values))

    @property
    def spent(self) -> Usage:
        """The usage that budgets have counted until now: above all that of language models."""
        return self._lifecycle.ledger.budget_tracker.spent

    @property
    def history(self) -> ReplanHistory:
        """The replans so far with their reasons, derived from the journal on request.

        Raises:
            StoreError: the journal cannot be read.
        """
        if self._history is None:
            self._history = ReplanHistory.of(self._lifecycle.store, self.id)
        return self._history.refresh()

    def records(self, after: int = 0) -> Iterable[Record]:
        """Read the run's records from the journal, starting after the record of this number.

        Raises:
            StoreError: the journal cannot be read.
        """
        return self._lifecycle.store.read(self.id, after)

    @read_in_loop_thread
    def replanning_info(self, task_id: str) -> ReplanningInfo:
        """Return the position of a task in its lineage, and the reasons for it.

        Raises:
            UnknownTask: there never was such a task.
        """
        entry = self.live.entry(TaskId(task_id))
        made = replaced = ""
        for _, revised in self._lifecycle.ledger.revisions:
            for change in revised.changes:
                if isinstance(change, ReplaceTask):
                    if change.task_id == entry.id:
                        replaced = revised.reason
                    elif any(new.id == entry.id for new in change.tasks):
                        made = revised.reason
        limit = self._lifecycle.settings.limits.replans_per_lineage
        reason = replaced if entry.replacement.tasks else made
        return ReplanningInfo(entry.iteration, limit, entry.root, entry.replacement.tasks, reason)

    # Pulling and reporting

    def ready(self) -> ReadyTasks:
        """Iterate over tasks the moment they may run, across revisions; call it once for each worker.

        The iterator ends when the run does. It hands out a task again only after an attempt at it, or an edit. So the body
        may execute a task, or have another task do so: `group.start_soon(work, task)`. What it does not start is handed
        out by other iterators, and by any once this one was left.
        """
        return ReadyTasks(self._lifecycle)

    def attempt(self, task: Task) -> Attempt:
        """Execute a task: journal, deadline, cancellation; an exception of the body is a failure."""
        return Attempt(self, task)

    async def perform(
        self, task_id: str, work: Work, *, passes: tuple[type[BaseException], ...] = ()
    ) -> object:
        """Execute a task, and each task that replaces it, until one is done or no alternative is left.

        The work runs in the async task of the caller, with its context variables, cancellation and spans. The caller waits
        while the engine decides what follows a failure. Meanwhile nobody else executes these tasks.

        Args:
            task_id: the task; it may depend on others.
            work: executes the task, and each task that replaces it: returns its output, raises when it fails.
            passes: exceptions that are control flow rather than failures. They are raised at once, and the task may be
                performed again.

        Returns:
            The output as the work returned it, or the recorded output if the task was done before.

        Raises:
            CallFailed: no alternative is left, and the tool of the task raised no exception, as after a timeout; or the task
                was done before, and its output was not recorded.
            CallSkipped: the engine or a person decided to skip the task, or its condition does not hold.
            Exception: no alternative is left; what the tool of the task raised last, not what another one raised that stood
                in for it.
            NeedsHuman: a person must answer first, and the engine has no gate; perform it again after the answer. Its
                cause is the error of the task. A call of a session about which nobody can be asked raises that error.
            NotRunning: the run ended before the task was done or given up, or another process has taken it over; or somebody
                else performs the task.
            UnknownTask: there never was such a task.
        """
        validate_work(work)
        return await LineageExecution(self, TaskId(task_id), passes).perform(work)

    @in_loop_thread
    def started(self, task_id: str) -> AttemptId:
        """Report that a ready task is being executed.

        Returns:
            The id of the attempt, to report its end with.

        Raises:
            NotRunning: the task is not ready, a question holds it, what it needs is not there, or the run has ended or
                is about to.
            StoreError: the journal does not take it; the task must not be executed.
        """
        life = self._lifecycle
        entry = life.live.entry(TaskId(task_id))
        self._require_running("no attempt can start")
        try:
            if obstacle := life.obstacle_to(entry):
                raise NotRunning(f"no attempt at task {task_id!r} can start: {obstacle}")
            return life.start(entry)
        except (NotRunning, StoreError):
            life.requeue(
                TaskOffer(entry, entry.place.claim)
            )  # it is handed out again when it may start
            raise

    @in_loop_thread
    def succeeded(self, attempt_id: AttemptId, output: object = None) -> None:
        """Report the output of an attempt: JSON, or a value that the codec turns into JSON.

        The report of an attempt that is not current any more is recorded and otherwise ignored.

        Raises:
            UnknownAttempt: there was no such attempt.
        """
        self._lifecycle.succeeded(attempt_id, output)
        self._lifecycle.check_completion()  # pulling a task would check it, but callers that only report never pull

    @in_loop_thread
    def failed(self, attempt_id: AttemptId, error: BaseException | str | Failure) -> None:
        """Report that an attempt failed; the task is run again, or a trigger follows.

        Raises:
            UnknownAttempt: there was no such attempt.
        """
        self._lifecycle.failed(attempt_id, error)
        self._lifecycle.check_completion()

    @in_loop_thread
    def charge(
        self, usage: Usage, *, attempt_id: AttemptId | None = None, provider: str | None = None
    ) -> None:
        """Report the usage of work or of a provider, to be counted against the budget."""
        self._lifecycle.charge(usage, attempt_id=attempt_id, provider=provider)

    @in_loop_thread
    def evaluate(self) -> PlanEvaluation:
        """Return progress, expected remaining time, health and advice, as the plan stands now."""
        return self._lifecycle.evaluate()

    async def wait(self) -> RunResult:
        """Wait for the end of the run, for those who report from elsewhere."""
        self._lifecycle.check_completion()
        await self._lifecycle.ended.wait()
        return self.result

    @in_loop_thread
    def pause(self, reason: str = "asked to pause", *, by: str = "") -> None:
        """Hand out nothing more; the run ends as `paused` when all running attempts have finished."""
        if self._lifecycle.end is None and self._lifecycle.ledger.pause is None:
            self._lifecycle.commit_or_defer(
                RunPaused(self._clean("reason", reason), self._clean("by", by))
            )
            self._lifecycle.check_completion()

    # Observations

    @in_loop_thread
    def observe(self, holds: Sequence[str] = (), ceased: Sequence[str] = ()) -> None:
        """Report facts that were seen to hold, or to hold no longer.

        Raises:
            ValueError: some of these texts are no facts, or a text is in the place of a list; names every one.
        """
        _refuse_single_text("observe", holds=holds, ceased=ceased)
        facts = self.live.world.facts
        if wrong := [
            f"{brief_repr(f)} is no fact: {problem}"
            for f in (*holds, *ceased)
            if (problem := fact_problem(f))
        ]:
            raise ValueError(f"observe: {'; '.join(wrong)}")
        new = tuple(fact for fact in map(normalise_fact, holds) if fact not in facts)
        gone = tuple(fact for fact in map(normalise_fact, ceased) if fact in facts)
        if new or gone:
            self._record_observation(FactsObserved(new, gone))

    def change_context(
        self, changes: Mapping[str, JsonValue], *, removed: Sequence[str] = ()
    ) -> None:
        """Report values of the context that have changed or are gone; unchanged ones are ignored.

        Raises:
            RecordNotSerializable: a value is not JSON; a tuple becomes a list.
            ValueError: a text is in the place of the list of removed names.
        """
        self._change_context(changes, removed)

    @in_loop_thread
    def _change_context(
        self,
        changes: Mapping[str, JsonValue],
        removed: Sequence[str],
        attempt_id: AttemptId | None = None,
    ) -> None:
        _refuse_single_text("change_context", removed=removed)
        old = self.live.context
        plain = _plain_object(changes)
        new: JsonObject = {
            key: value for key, value in plain.items() if key not in old or old[key] != value
        }
        gone = tuple(key for key in removed if key in old)
        if new or gone:
            self._lifecycle.masked_context.difference_update(new)
            attempt = attempt_id if attempt_id in self._lifecycle.running else None
            self._record_observation(ContextUpdated(new, gone, attempt))

    @in_loop_thread
    def change_resource(
        self,
        name: str,
        *,
        capacity: float | None = None,
        available: bool | None = None,
        reason: str = "",
    ) -> None:
        """Report that a resource has another capacity, or that a tool is (un)available, and why.

        Raises:
            ValueError: the plan has no such resource or tool, or this cannot be said of it; names everything wrong.
        """
        live, why, wrong, hint = self.live, self._clean("reason", reason), [], NameSuggester()
        if capacity is None and available is None:
            wrong.append("expected the `capacity` of a resource, or whether a tool is `available`")
        if capacity is not None:
            if not 0 <= capacity < math.inf:
                wrong.append(
                    f"expected a number of at least 0 for `capacity`, got {brief_repr(capacity)}"
                )
            capacities = live.scheduler.pool.capacity
            if name not in capacities:
                wrong.append(f"the plan has no resource {name!r}{hint(name, capacities)}")
        is_tool = name in live.tools or any(entry.task.tool == name for entry in live)
        if available is not None and not is_tool:
            wrong.append(f"the plan has no tool {name!r}{hint(name, live.tools)}")
        if wrong:
            raise ValueError(f"change_resource: {'; '.join(wrong)}")
        tool = live.tools.get(name)
        if capacity is None and tool is not None and tool.available == available and not reason:
            return
        self._record_observation(ResourceUpdated(name, capacity, available, why))

    @in_loop_thread
    def change_goal(
        self,
        *,
        objective: str | None = None,
        success_criteria: Sequence[str] | None = None,
        facts: Sequence[str] | None = None,
        stop_when_reached: bool | None = None,
        reason: str = "",
        by: str = "",
    ) -> None:
        """Give the plan another goal; fields that are left out stay as they were.

        The plan is repaired where its remaining tasks do not reach the new goal.

        Args:
            objective: the aim, in words.
            success_criteria: by which a person sees that it is reached, instead of those so far.
            facts: that must hold at the end, instead of the facts so far.
            stop_when_reached: whether the run ends as soon as these facts hold.
            reason: the reason, for the history.
            by: the author, for the history.

        Raises:
            NotRunning: the run has ended.
            PlanError: this is not a goal; names everything that is wrong with it.
        """
        self._require_running("its goal cannot be changed")
        fields: JsonObject = {}
        for name, value in (("objective", objective), ("stop_when_reached", stop_when_reached)):
            fields |= {} if value is None else {name: value}
        for name, texts in (("success_criteria", success_criteria), ("facts", facts)):
            listed: Any = (
                texts if isinstance(texts, str) or not isinstance(texts, Iterable) else list(texts)
            )
            fields |= {} if texts is None else {name: listed}
        self._change_goal(fields, self._clean("reason", reason), self._clean("by", by))

    def _change_goal(self, fields: JsonObject, reason: str, by: str, message: int = 0) -> None:
        old = self.live.goal
        goal = old.with_fields(fields)
        changed = tuple(
            name for name in Goal.model_fields if getattr(goal, name) != getattr(old, name)
        )
        if changed or message:
            self._record_observation(GoalChanged(goal, changed, reason, by, message))

    @in_loop_thread
    def request_replan(self, reason: str, *, by: str = "", tasks: Sequence[str] = ()) -> None:
        """Ask for replanning, of these tasks or of the whole plan.

        Raises:
            NotRunning: the run has ended.
            UnknownTask: there never was such a task.
            ValueError: a text is in the place of the list of tasks.
        """
        self._require_running("there is nothing to replan")
        _refuse_single_text("request_replan", tasks=tasks)
        self._request_replan(self._clean("reason", reason), self._clean("by", by), tasks)

    def _request_replan(self, reason: str, by: str, tasks: Sequence[str], message: int = 0) -> None:
        ids = tuple(self.live.entry(TaskId(task_id)).id for task_id in tasks)
        self._record_observation(ReplanRequested(reason, by, ids, message))

    def _record_observation(
        self, body: FactsObserved | ContextUpdated | ResourceUpdated | GoalChanged | ReplanRequested
    ) -> None:
        if self._lifecycle.loop.closed:
            end = self._lifecycle.end
            if end is not None and end.status in FINISHED_STATUSES:
                raise NotRunning(
                    f"run {self.id!r} has ended as {end.status}, so nothing more is recorded"
                )
            raise NotRunning(
                f"run {self.id!r} was left, so nothing more is recorded; resume it to go on"
            )
        self._lifecycle.commit_or_defer(body)
        if (
            isinstance(body, ContextUpdated)
            and self.live.staleness.redoes
            and self._lifecycle.end is None
        ):
            self._lifecycle.record_stale_results()
        self._lifecycle.after_observation()

    @in_loop_thread
    def _record_process(self, attempt_id: AttemptId, group: int) -> None:
        if attempt_id in self._lifecycle.running:
            self._lifecycle.commit(
                ProcessStarted(attempt_id, host_id(), group, process_start_time(group))
            )

    # Editing

    @in_loop_thread
    def apply(
        self,
        changes: Sequence[PlanChange | JsonObject],
        *,
        reason: str = "",
        expected_revision: int | None = None,
    ) -> int:
        """Apply changes by hand: all or none; one revision. They may be JSON, as `parse_changes` takes it.

        Returns:
            The number of the revision.

        Raises:
            ChangeRejected: with every problem, or because there is nothing to change; nothing has changed.
            NotRunning: the run has ended.
            StoreError: the journal does not take it; nothing has changed.
        """
        why = self._clean("reason", reason)
        stated = accept_changes(parse_changes(changes), self.live, self._redactor)
        if not stated:
            raise ChangeRejected([Problem("changes", "there are none")])
        return self._lifecycle.revise(stated, why, "edit", expected_revision=expected_revision)

    def add_task(self, task: Task, *, before: Sequence[str] = (), reason: str = "") -> int:
        """Add a task; the tasks in `before` will wait for it. Raises as `apply`, like all edits."""
        return self.apply([AddTask(task=task, before=before)], reason=reason)

    def remove_task(self, task_id: str, *, reason: str = "") -> int:
        """Take out a task that has not started and on which nothing depends."""
        return self.apply([RemoveTask(task_id=TaskId(task_id))], reason=reason)

    def replace_task(self, task_id: str, *tasks: Task, reason: str = "") -> int:
        """Put a task or a sub-plan in the place of a task."""
        return self.apply([ReplaceTask(task_id=TaskId(task_id), tasks=tasks)], reason=reason)

    def modify_task(self, task_id: str, *, reason: str = "", **fields: JsonValue) -> int:
        """Change fields of a task; a finished one takes only `name`, `goal` and `metadata`."""
        return self.apply([ModifyTask(task_id=TaskId(task_id), fields=fields)], reason=reason)

    def reorder_tasks(self, *order: str, reason: str = "") -> int:
        """Hand these waiting tasks out in this order."""
        return self.apply([ReorderTasks(order=order)], reason=reason)

    def cancel_task(self, task_id: str, *, reason: str = "") -> int:
        """Stop a task, also a running one."""
        return self.apply([CancelTask(task_id=TaskId(task_id), reason=reason)], reason=reason)

    # Planning mode

    def meter(self, provider: str) -> RunMeter:
        """Return a meter that counts calls of a language model against the budget of the run, and traces them."""
        return RunMeter(self._lifecycle, provider)

    @in_loop_thread
    def note(self, type: str, data: Mapping[str, JsonValue]) -> None:  # noqa: A002 # the word of the record
        """Put a note of planning mode on record; the plan stays as it is.

        Raises:
            NotRunning: the run has ended.
            RecordNotSerializable: the data is not JSON.
            TypeError: the type is no text.
        """
        self._require_running("nothing more is noted")
        self._lifecycle.commit_or_defer(
            PlanningNoted(self._clean("type", type), _plain_object(data))
        )

    def add_secret(self, value: str) -> None:
        """Mask a value in everything that leaves the run from now on, unless it has fewer than four characters."""
        self._redactor.add(value)

    def redact_value(self, value: JsonValue) -> JsonValue:
        """Return a value without secrets, as the run records it."""
        return self._redactor.value(value)

    def _clean(self, name: str, text: str) -> str:
        return text

    def _require_running(self, consequence: str) -> None:
        if self._lifecycle.end is not None:
            raise NotRunning(f"the run is {self._lifecycle.end.status}; {consequence}")


def _plain_object(value: Mapping[str, JsonValue]) -> JsonObject:
    plain = to_plain_json(dict(value))[0]
    assert isinstance(plain, dict)
    return plain


def _refuse_single_text(method: str, **arguments: Collection[str]) -> None:
    """Refuse a text in the place of a list, which would count as a list of its characters."""
    for name, texts in arguments.items():
        if isinstance(texts, str):
            raise ValueError(f"{method}: expected a list of texts for {name!r}, got {texts!r}")


CONTINUATION_SUFFIX: Final = "#continued-"
"""Precedes, in an idempotency key, the number of times that a judge has had the task run again."""

CHANGE_SUFFIX: Final = "#changed-"
"""Precedes, in an idempotency key, the number of times that the task got another tool or other arguments."""

_NOT_STARTED: Final = AttemptId("")


class TaskContext:
    """The context of an attempt, which work gets beside its task.

    Attributes:
        attempt_id: the id of the attempt.
        arguments: the task's arguments with every `${...}` reference replaced by its value.
    """

    __slots__ = ("_context", "_results", "_run", "_task", "arguments", "attempt_id")

    def __init__(self, run: PlanRun, task: Task, attempt_id: AttemptId) -> None:
        self._run = run
        self._task = task
        self.attempt_id = attempt_id
        self.arguments: JsonObject = task.arguments
        self._results: Mapping[str, Any] | None = None
        self._context: Mapping[str, JsonValue] | None = None

    def __repr__(self) -> str:
        return f"<TaskContext of {self.attempt_id!r}>"

    @property
    def run_id(self) -> str:
        """The run that this attempt belongs to."""
        return self._run.id

    @property
    def task_id(self) -> TaskId:
        """The task that is executed."""
        return self._task.id

    @property
    def results(self) -> Mapping[str, Any]:
        """Outputs of finished tasks by id; the output of a replacement is found under the id of the original task.

        Containers are this attempt's own copies, other objects are shared. A `KeyError` says why there is no output.
        """
        if self._results is None:
            self._results = CopyOnRead(self._run.live.results)
        return self._results

    @property
    def context(self) -> Mapping[str, JsonValue]:
        """The context of the run now; arrays and objects are copies, see `change_context`.

        The keys that are read are recorded with the result, which is stale once one of them changes.
        """
        if self._context is None:
            live = self._run.live
            entry = live.entry(self._task.id)
            reads: dict[str, int] = {}
            # Of an attempt that is not current, nothing is kept.
            if entry.log.current == self.attempt_id:
                if entry.reads.keys is None:
                    entry.reads.keys = reads
                reads = entry.reads.keys
            self._context = CopyOnRead(
                live.context,
                lambda key: reads.setdefault(str(key), live.staleness.history.version),
                self._run._lifecycle.masked_context,
            )
        return self._context

    @property
    def tool(self) -> ToolSpec | None:
        """The tool of the task, if the plan describes it."""
        return self._run.live.tools.get(self._task.tool or "")

    @property
    def feedback(self) -> str:
        """The feedback of a judge on the previous attempt, if the task is run again because of it; else empty."""
        return self._run.live.entry(self._task.id).log.feedback

    @property
    def continuations(self) -> int:
        """The number of times that a judge has had the task run again."""
        return self._run.live.entry(self._task.id).log.continuations

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt at the same call in this run, so that a service can recognise a repetition.

        It changes where the task gets another tool or other arguments, and after each feedback of a judge: unfinished work
        is to be done anew.
        """
        entry = self._run.live.entry(self._task.id)
        key = f"{self._run.id}/{self._task.id}"
        if entry.log.call_changes:
            key += f"{CHANGE_SUFFIX}{entry.log.call_changes}"
        if entry.log.continuations:
            key += f"{CONTINUATION_SUFFIX}{entry.log.continuations}"
        return key

    def add_secret(self, value: str) -> None:
        """Mask a value in everything that leaves the run from now on, such as a token that the work has received."""
        self._run.add_secret(value)

    def charge(self, *, calls: int = 0, tokens: int = 0, money: float = 0.0) -> None:
        """Count usage against the budget."""
        self._run.charge(Usage(calls, tokens, money), attempt_id=self.attempt_id)

    def change_context(
        self, changes: Mapping[str, JsonValue], *, removed: Sequence[str] = ()
    ) -> None:
        """Report values of the context that have changed or are gone; the result of this attempt is not stale by that."""
        self._run._change_context(changes, removed, self.attempt_id)

    def observe(self, holds: Sequence[str] = (), ceased: Sequence[str] = ()) -> None:
        """Report facts that hold, or hold no longer."""
        self._run.observe(holds, ceased)

    def change_resource(
        self,
        name: str,
        *,
        capacity: float | None = None,
        available: bool | None = None,
        reason: str = "",
    ) -> None:
        """Report that a resource has another capacity, or that a tool is (un)available, and why."""
        self._run.change_resource(name, capacity=capacity, available=available, reason=reason)

    def record_process(self, group: int) -> None:
        """Journal a process group that the work started, to be killed if this process dies."""
        self._run._record_process(self.attempt_id, group)


_current_attempt: Final = ContextVar[TaskContext | None]("replanning.current_attempt", default=None)


def current_attempt() -> TaskContext | None:
    """Return the context of the attempt that this code is executed for; None outside of one.

    It is known in the work of a task and in the functions that it calls, also in threads that anyio or asyncio start for
    them. Its `idempotency_key` lets a service recognise a repeated call.
    """
    return _current_attempt.get()


@contextmanager
def as_current_attempt(context: TaskContext | None) -> Iterator[None]:
    """Make this the attempt that the code of the block is executed for, in a thread that executes it for another one."""
    before = _current_attempt.set(context)
    try:
        yield
    finally:
        _current_attempt.reset(before)


Work = Callable[[Task, TaskContext], Awaitable[object]]
"""Executes one task: returns its output, raises when it fails."""


def validate_work(work: Callable[..., object], max_concurrency: int = 1) -> None:
    """Refuse work that no worker could run, before anything runs: every task would fail, and be replanned.

    Args:
        work: an async function of a task and its context. A lambda, an object that can be called, and a function that
            is annotated as returning an awaitable are taken on trust.
        max_concurrency: the number of workers.

    Raises:
        TypeError: the work is a function that is not async.
        ValueError: there would be no worker.
    """
    if max_concurrency < 1:
        raise ValueError(f"max_concurrency is {max_concurrency}; at least one worker is needed")
    if isinstance(work, partial):
        work = work.func
    function = inspect.unwrap(work)
    is_plain = inspect.isroutine(function) and not inspect.iscoroutinefunction(function)
    returned = str(getattr(function, "__annotations__", {}).get("return", ""))
    is_trusted = any(word in returned for word in ("Awaitable", "Coroutine", "Future"))
    if is_plain and not is_trusted and function.__name__ != "<lambda>":
        raise TypeError(
            f"work is {function.__qualname__!r}, which is not async; write `async def`, and run what blocks with"
            " `await anyio.to_thread.run_sync(…)`"
        )


class LineageExecution:
    """Attempts at the tasks of one lineage, which whoever calls `PlanRun.perform` executes; they are reserved for it.

    Args:
        run: the run.
        task_id: a task of the lineage.
        passes: exceptions that are control flow rather than failures.

    Attributes:
        root: the first task of the lineage.
        id: the id of the last attempt.
        task: its task.
        outputs: the outputs of tasks that succeeded.
        error: what the tool of the first task raised last, if it failed.
        last: what the last attempt raised, if it failed.

    Raises:
        UnknownTask: there never was such a task.
    """

    __slots__ = (
        "_asked",
        "_cancelled",
        "_lifecycle",
        "_passes",
        "_run",
        "_scope",
        "_token",
        "error",
        "id",
        "last",
        "outputs",
        "root",
        "task",
    )

    def __init__(
        self,
        run: PlanRun,
        task_id: TaskId,
        passes: tuple[type[BaseException], ...],
    ) -> None:
        live = run.live
        self._run = run
        self._lifecycle = run._lifecycle
        self._passes = passes
        self._asked = task_id
        self._scope: anyio.CancelScope | None = None
        self._token: Token[Context] | None = None
        self._cancelled = False
        self.root = live.entry(live.entry(task_id).root)
        self.id = _NOT_STARTED
        self.task: Task
        self.outputs: dict[TaskId, object] = {}
        self.error: Exception | None = None
        self.last: Exception | None = None

    def cancel(self) -> None:
        """Stop the work, unless a thread executes it; nothing that it still reports is accepted."""
        self._cancelled = True
        if self._scope is not None:
            self._scope.cancel()

    async def perform(
        self, work: Work, *, started: AttemptId | None = None, copied: bool = True
    ) -> object:
        """Execute what is left of the lineage, see `PlanRun.perform`.

        Args:
            work: executes a task.
            started: an attempt at the first task that was started, and is executed first.
            copied: whether the work may change the objects and arrays of its task.

        Raises:
            NotRunning: somebody else performs the lineage.
        """
        life, root = self._lifecycle, self.root
        life.reserve(root)
        try:
            if started is not None:
                self._prepare(root.task)
                self.id = started
                life.running[started] = root, self
                await self._execute(root.task, work)
            while not root.satisfied:
                claimed = await life.next_task(root=root, copied=copied)
                if claimed is None:
                    break
                await self._attempt(*claimed, work)
            if root.satisfied:
                return self._output()
            if questions := life.questions_about(root):
                asked = join_names(questions, 5)
                text = f"a person must answer {asked} before task {self._asked!r} can go on; perform it again after that"
                raise NeedsHuman(text, questions, root.id) from self._own_error()
            needed = life.needed_for(root).values()
            is_given_up = any(entry.state in GIVEN_UP for entry in needed)
            end = life.end
            if (
                not is_given_up
                or life.ledger.pause is not None
                or (end is not None and end.status == "paused")
            ):
                stopping = (
                    life.stopping if end is None else f"the run is {end.status} ({end.reason})"
                )
                raise NotRunning(f"task {self._asked!r} cannot be performed: {stopping}") from (
                    self.error or self.last
                )
            raise self._own_error()
        finally:
            life.unreserve(root)

    def _own_error(self) -> Exception:
        """Return the error of a call that goes no further: what its own tool raised last, or else the reasons.

        If the call may have had its effect, the error says so and how to declare that it may be repeated.
        """
        life = self._lifecycle
        needed = life.needed_for(self.root).values()
        doubtful = dict[str, None]()
        for leaf in needed:
            for entry in leaf.lineage():
                if entry.log.in_doubt:
                    doubtful[repr(entry.task.tool or entry.id)] = None
        doubt = ""
        if doubtful:
            names = join_names(doubtful, 5)
            doubt = f"whether {names} took effect is unknown, so it is not executed again; {DOUBT_ADVICE}"
        if self.error is not None:
            notes = getattr(self.error, "__notes__", ())
            if doubt and doubt not in notes:
                self.error.add_note(doubt)
            return self.error
        reasons = [
            f"{entry.id!r} {entry.state.lower()} ({entry.log.failure or entry.reason})"
            for entry in needed
            if entry.state in GIVEN_UP
        ]
        text = f"there is no way on for task {self._asked!r}: {'; '.join(reasons)}"
        if doubt:
            text += f"; {doubt}"
        failed = CallFailed(text)
        failed.__cause__ = self.last
        return failed

    def _output(self) -> object:
        """Return the output of a lineage as the work returned it, or else the recorded output."""
        root, outputs = self.root, self.outputs
        leaf = root
        while leaf.state is TaskState.REPLACED_BY_REPLAN and len(leaf.replacement.sinks) == 1:
            leaf = leaf.replacement.sinks[0]
        if leaf.state is TaskState.DONE and leaf.id in outputs:
            return outputs[leaf.id]
        if leaf.state is TaskState.SKIPPED:
            raise CallSkipped(f"task {root.id!r} was skipped{leaf.reason and f': {leaf.reason}'}")
        try:
            return copy_containers(self._lifecycle.live.results.output_of(root.id))
        except NoResult as error:
            raise CallFailed(
                f"task {root.id!r} was done before, and its output was not kept: {error}"
            ) from error

    async def _attempt(self, entry: TaskEntry, task: Task, work: Work) -> None:
        """Start an attempt at a task that was claimed, and execute it."""
        self._prepare(task)
        if self._lifecycle.start_now(entry, self) or await self._lifecycle.start_pulled(self):
            await self._execute(task, work)

    async def _execute(self, task: Task, work: Work) -> None:
        """Execute the attempt that was started.

        Raises:
            BaseException: the work was interrupted, or raised one of the exceptions that pass.
        """
        life = self._lifecycle
        if self._cancelled:
            return
        self._token, self._scope = life.spans.attach_attempt(self.id), life.scope_type()
        context = TaskContext(self._run, task, self.id)
        before = _current_attempt.set(context)
        try:
            try:
                with self._scope:
                    output = self.outputs[task.id] = await work(task, context)
            finally:
                _current_attempt.reset(before)
                self._stopped()
        except BaseException as error:
            if not self._report_failure(error):
                raise
            return
        if not self._cancelled:
            life.succeeded(self.id, output, keep_if_possible=True)

    def _prepare(self, task: Task) -> None:
        self.task, self._cancelled, self._scope, self.last = task, False, None, None
        if task.tool == self.root.task.tool:
            self.error = None

    def _stopped(self) -> None:
        token, self._token = self._token, None
        if token is not None:
            self._lifecycle.spans.detach(token)
        if self._cancelled:
            self._lifecycle.body_ended(self.id)

    def _report_failure(self, error: BaseException) -> bool:
        """Report an exception of the work; return whether it is a failure."""
        is_control_flow = isinstance(error, self._passes)
        if is_control_flow or not isinstance(error, Exception):
            # A cancelled call is in doubt: what it has sent may arrive, and a thread that it left behind goes on.
            self._lifecycle.interrupted(
                self.id, f"{type(error).__name__} in the worker", again=is_control_flow
            )
            return False
        self._lifecycle.failed(self.id, error)
        self.last = error
        if self.task.tool == self.root.task.tool:
            self.error = self.last
        return True


class Attempt:
    """One execution of a task: `async with run.attempt(task) as attempt: attempt.output = ...`.

    An exception of the body is a failure and goes no further; KeyboardInterrupt, SystemExit and cancellation
    are recorded as an interruption and go on.

    Where the attempt may not start (the run has ended, its journal takes nothing, or the task was taken out of
    the plan meanwhile), the body is cancelled at its first checkpoint, and has no `context` until then.

    Attributes:
        task: the task.
        id: the id of this attempt.
        output: assigned by the body.
    """

    __slots__ = (
        "_lifecycle",
        "_not_started",
        "_run",
        "_scope",
        "_token",
        "cancelled",
        "context",
        "id",
        "output",
        "task",
    )

    def __init__(self, run: PlanRun, task: Task) -> None:
        self._run = run
        self._lifecycle = run._lifecycle
        self.task = task
        self.id = _NOT_STARTED
        self.output: object = None
        self.cancelled = False
        self.context: TaskContext
        self._not_started = False
        self._scope = self._lifecycle.scope_type()

    def __repr__(self) -> str:
        return f"<Attempt {self.id or 'not started'} at {self.task.id!r}>"

    def __getattr__(self, name: str) -> Never:
        # Reached only where `context` was not set, because the attempt could not be started.
        if name == "context":
            raise NotRunning(
                f"no attempt at {self.task.id!r} was started, because it may not run any more; do nothing"
            )
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
        )

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt at the task in this run."""
        return self.context.idempotency_key

    def charge(self, *, calls: int = 0, tokens: int = 0, money: float = 0.0) -> None:
        """Count usage against the budget."""
        self.context.charge(calls=calls, tokens=tokens, money=money)

    def cancel(self) -> None:
        """Stop the body; nothing that it still reports is accepted."""
        self.cancelled = True
        self._lifecycle.loop.call(self._scope.cancel)

    async def __aenter__(self) -> Self:
        life = self._lifecycle
        started = await life.start_pulled(self)
        self._scope.__enter__()
        if started:
            self.context = TaskContext(self._run, self.task, self.id)
        else:
            self._not_started = True
            self.cancel()
        self._token = life.spans.attach_attempt(self.id)
        if started:
            _current_attempt.set(self.context)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        life = self._lifecycle
        if self._token is not None:
            life.spans.detach(self._token)
        _current_attempt.set(None)
        swallowed = self._scope.__exit__(kind, error, trace)
        if self.cancelled:
            life.body_ended(self.id)
        if error is None or (swallowed and self.cancelled):
            if not self.cancelled:
                life.succeeded(self.id, self.output)
            return True
        if isinstance(error, Exception):
            if not self._not_started:
                life.failed(self.id, error)
            return True
        life.interrupted(self.id, f"{type(error).__name__} in the worker")
        return False


class ReadyTasks:
    """Hands out tasks the moment they may run; ends when the run does. Each worker uses one of its own.

    A task is handed out once, and again after its attempt has ended or was refused, or it was edited; so a body may
    start it later, in a task of its own. One that was not started when the next is pulled is also handed out to other
    iterators that have nothing else to do, and returns to the queue when this object is dropped.
    """

    __slots__ = ("__weakref__", "_lifecycle", "left_by_others", "offers")

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self.offers: deque[TaskOffer] = deque()
        self.left_by_others = deque(
            o for other in lifecycle.pullers for o in other.offers if o.was_left
        )
        lifecycle.pullers.add(self)

    def __repr__(self) -> str:
        return f"<ReadyTasks of {self._lifecycle.run_id!r}>"

    def __aiter__(self) -> ReadyTasks:
        return self

    async def __anext__(self) -> Task:
        life, offers = self._lifecycle, self.offers
        while offers and not offers[0].is_open:
            offers.popleft()
        if offers and not (left := offers[-1]).was_left and left.is_open:
            left.was_left = True
            for other in life.pullers:
                if other is not self:
                    other.left_by_others.append(left)
            life.wake_waiters()
        others_left = self.left_by_others
        claimed = await life.next_task(others_left)
        if claimed is None:
            raise StopAsyncIteration
        entry, task = claimed
        taken_over = others_left and others_left[0].entry is entry and others_left[0].is_open
        offers.append(others_left.popleft() if taken_over else TaskOffer(entry, entry.place.claim))
        return task

    def __del__(self) -> None:
        if any(offer.is_open for offer in self.offers):
            self._lifecycle.loop.post(partial(self._lifecycle.requeue, *self.offers))


class Worker:
    """Pulls and executes tasks one after another, as an `async for` over `ready` with an `attempt` for each would.

    One scope serves for all of its attempts until one of them is cancelled, which is cheaper than one for each.

    Args:
        run: where tasks come from.
        work: executes one task: returns its output, raises when it fails.
        in_own_task: whether the worker runs in a task of the library, so that a cancellation that the library did not
            cause is a failure of the work.
    """

    __slots__ = (
        "_cancelled",
        "_in_own_task",
        "_lifecycle",
        "_run",
        "_scope",
        "_work",
        "id",
        "task",
    )

    def __init__(self, run: PlanRun, work: Work, *, in_own_task: bool = False) -> None:
        self._run = run
        self._lifecycle = run._lifecycle
        self._in_own_task = in_own_task
        self._work = work
        self._cancelled = False
        self.id = _NOT_STARTED
        self._scope: anyio.CancelScope
        self.task: Task

    def __repr__(self) -> str:
        return f"<Worker of {self._run!r} at {self.id or 'nothing'}>"

    def cancel(self) -> None:
        """Stop the work; nothing that it still reports is accepted."""
        self._cancelled = True
        self._scope.cancel()

    async def run(self) -> None:
        """Work until the run ends."""
        run, life, spans, work = self._run, self._lifecycle, self._lifecycle.spans, self._work
        while life.end is None:
            self._cancelled = False
            self._scope = life.scope_type()
            with self._scope:
                while not self._cancelled and (claimed := await life.next_task()) is not None:
                    entry, self.task = claimed
                    if (
                        not (life.start_now(entry, self) or await life.start_pulled(self))
                        or self._cancelled
                    ):
                        continue
                    token = spans.attach_attempt(self.id)
                    context = TaskContext(run, self.task, self.id)
                    _current_attempt.set(context)
                    try:
                        try:
                            output = await work(self.task, context)
                        finally:
                            _current_attempt.set(None)
                            if token is not None:
                                spans.detach(token)
                            if self._cancelled:
                                life.body_ended(self.id)
                    except BaseException as error:
                        if not self._report_failure(error):
                            raise
                    else:
                        if not self._cancelled:
                            life.succeeded(self.id, output)

    def _report_failure(self, error: BaseException) -> bool:
        """Report an exception of work; false where it is not a failure of the work but a cancellation from outside."""
        if isinstance(error, Exception):
            self._lifecycle.failed(self.id, error)
            return True
        if (
            self._in_own_task
            and isinstance(error, anyio.get_cancelled_exc_class())
            and not is_cancelled()
        ):
            self._lifecycle.failed(self.id, CancelledWithin(CancelledWithin.MESSAGE))
            return True
        if not self._cancelled:
            self._lifecycle.interrupted(self.id, f"{type(error).__name__} in the worker")
        return False
