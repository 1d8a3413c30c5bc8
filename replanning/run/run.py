"""Edits of a running plan by hand; they count as revisions, not as replans."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import anyio
from pydantic_core import from_json

from replanning.changes import AddTask, CancelTask, ModifyTask, PlanChange, RemoveTask, ReorderTasks, ReplaceTask
from replanning.decision.vetting import redact_changes
from replanning.errors import NotRunning, OutputError, RecordNotSerializable, StoreError, UnknownAttempt
from replanning.history.history import ReplanHistory
from replanning.journal.observations import (
    AttemptFailed,
    AttemptFenced,
    AttemptInterrupted,
    AttemptTimedOut,
    ContextUpdated,
    FactsObserved,
    Failure,
    GoalChanged,
    ProcessStarted,
    ReplanRequested,
    ResourceUpdated,
    Usage,
    UsageCharged,
    new_attempt_started,
    new_attempt_succeeded,
)
from replanning.journal.records import PlanningNoted, PlanRevised, Record, RunPaused, RunStatus
from replanning.live.draft import Draft
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.states import TaskState
from replanning.live.view import PlanView, ReplanningInfo, replanning_info
from replanning.plan.document import Plan
from replanning.plan.messages import brief_repr
from replanning.plan.redaction import Redactor
from replanning.plan.references import normalise_fact
from replanning.plan.tasks import Goal, Retry, Task
from replanning.plan.types import AttemptId, JsonObject, JsonValue, ReplanId, RunId, TaskId, TriggerId
from replanning.run.attempts import Attempt, ReadyTasks, Worker, failure_from
from replanning.run.lifecycle import Lifecycle
from replanning.run.meter import RunMeter
from replanning.run.processes import host_id, process_start_time
from replanning.telemetry.tracer import NOOP_TRACER, RunTracer


class PlanEdits:
    """The editing methods of a run. Each is one revision, recorded, and raises `ChangeRefused` if it does not fit."""

    __slots__ = ()

    @abstractmethod
    def apply(self, changes: Sequence[PlanChange], *, reason: str = "", expected_revision: int | None = None) -> int:
        """Apply changes by hand: all or none."""

    def add_task(self, task: Task, *, before: Sequence[str] = (), reason: str = "") -> int:
        """Add a task; the tasks in `before` will wait for it."""
        return self.apply([AddTask(task=task, before=tuple(map(TaskId, before)))], reason=reason)

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
        return self.apply([ReorderTasks(order=tuple(map(TaskId, order)))], reason=reason)

    def cancel_task(self, task_id: str, *, reason: str = "") -> int:
        """Stop a task, also a running one."""
        return self.apply([CancelTask(task_id=TaskId(task_id), reason=reason)], reason=reason)


class PlanObservations:
    """The methods of a run that report what has changed. What is unchanged is passed over."""

    id: RunId
    _lifecycle: Lifecycle
    _redactor: Redactor

    @property
    def live(self) -> LivePlan:
        """The live plan; read it, and change it only through this run."""
        return self._lifecycle.live

    def records(self, after: int = 0) -> Iterable[Record]:
        """What the journal has of the run, from behind the record of this number on.

        Raises:
            StoreError: the journal cannot be read.
        """
        return self._lifecycle.journal.store.read(self.id, after)

    def observe(self, holds: Sequence[str] = (), ceased: Sequence[str] = ()) -> None:
        """Report facts that were seen to hold, or to hold no longer.

        Raises:
            TypeError: these are no facts.
        """
        _check_texts("observe", holds=holds, ceased=ceased)
        redact, known = self._redactor.text, self.live.facts
        new = tuple(fact for fact in (normalise_fact(redact(f)) for f in holds) if fact not in known)
        gone = tuple(fact for fact in (normalise_fact(redact(f)) for f in ceased) if fact in known)
        if new or gone:
            self._lifecycle.commit_or_defer(FactsObserved(new, gone))
            self._lifecycle.after_observation()

    def change_context(self, changes: Mapping[str, JsonValue], *, removed: Sequence[str] = ()) -> None:
        """Report values of the context that have changed or are gone; unchanged ones are passed over.

        Raises:
            TypeError: this is no mapping of names to values.
        """
        if not isinstance(changes, Mapping):
            raise TypeError(f"change_context: expected a mapping of names to values, got {brief_repr(changes)}")
        _check_texts("change_context", changes=list(changes), removed=removed)
        clean = self._redactor.value(dict(changes))
        assert isinstance(clean, dict)
        old = self.live.context
        new: JsonObject = {key: value for key, value in clean.items() if key not in old or old[key] != value}
        gone = tuple(key for key in removed if key in old)
        if new or gone:
            self._lifecycle.commit_or_defer(ContextUpdated(new, gone))
            self._lifecycle.after_observation()

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
        """Say that the plan is for something else from now on; what is left out stays as it was.

        The plan is repaired where what is left of it does not reach the new goal.

        Args:
            objective: what is to be achieved, in words.
            success_criteria: how a person sees that it was, instead of those so far.
            facts: what must hold at the end, instead of the facts so far.
            stop_when_reached: whether the run ends as soon as these facts hold.
            reason: why, for the history.
            by: who wants it, for the history.

        Raises:
            NotRunning: the run has ended.
            PlanError: this is no goal; with everything that is wrong with it.
        """
        if self._lifecycle.end is not None:
            raise NotRunning(f"the run is {self._lifecycle.end.status}; its goal cannot be changed")
        given: JsonObject = {}
        for name, value in (("objective", objective), ("stop_when_reached", stop_when_reached)):
            given |= {} if value is None else {name: value}
        for name, texts in (("success_criteria", success_criteria), ("facts", facts)):
            given |= {} if texts is None else {name: texts if isinstance(texts, str) else list(texts)}
        self._change_goal(given, reason, by)

    def _change_goal(self, given: JsonObject, reason: str, by: str, message: int = 0) -> None:
        redact, old, clean = self._redactor.text, self.live.goal, self._redactor.value(given)
        assert isinstance(clean, dict)
        goal = old.with_fields(clean)
        changed = tuple(name for name in Goal.model_fields if getattr(goal, name) != getattr(old, name))
        if changed or message:
            self._lifecycle.commit_or_defer(GoalChanged(goal, changed, redact(reason), redact(by), message))
            self._lifecycle.after_observation()

    def change_resource(
        self, name: str, *, capacity: float | None = None, available: bool | None = None, reason: str = ""
    ) -> None:
        """Report that a resource has another capacity, or that a tool is (un)available, and why."""
        tool = self.live.tools.get(name)
        if capacity is None and tool is not None and tool.available == available and not reason:
            return
        self._lifecycle.commit_or_defer(ResourceUpdated(name, capacity, available, self._redactor.text(reason)))
        self._lifecycle.after_observation()

    def redact_value(self, value: JsonValue) -> JsonValue:
        """A value as the run puts it on record: without secrets."""
        return self._redactor.value(value)

    def note(self, type: str, data: Mapping[str, JsonValue]) -> None:  # noqa: A002 # the word of the record
        """Put something of planning mode on record, without secrets; the plan stays as it is.

        Raises:
            NotRunning: the run has ended.
        """
        if self._lifecycle.end is not None:
            raise NotRunning(f"the run is {self._lifecycle.end.status}; nothing more is noted")
        clean = self._redactor.value(dict(data))
        assert isinstance(clean, dict)
        self._lifecycle.commit_or_defer(PlanningNoted(type, clean))

    def request_replan(self, reason: str, *, by: str = "", tasks: Sequence[str] = ()) -> None:
        """Ask for replanning.

        Raises:
            NotRunning: the run has ended.
        """
        if self._lifecycle.end is not None:
            raise NotRunning(f"the run is {self._lifecycle.end.status}; there is nothing to replan")
        self._observe_replan_request(reason, by, tasks)

    def _observe_replan_request(self, reason: str, by: str, tasks: Sequence[str], message: int = 0) -> None:
        ids = tuple(self.live.entry(TaskId(task_id)).id for task_id in tasks)
        redact = self._redactor.text
        self._lifecycle.commit_or_defer(ReplanRequested(redact(reason), redact(by), ids, message))
        self._lifecycle.after_observation()


def _check_texts(method: str, **given: Collection[object]) -> None:
    """Refuse what is no list of texts, a single text included, whose letters would count."""
    for name, texts in given.items():
        if isinstance(texts, str) or not isinstance(texts, Collection):
            raise TypeError(f"{method}: expected a list of texts for {name!r}, got {brief_repr(texts)}")
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise TypeError(f"{method}: expected texts in {name!r}, got {', '.join(map(brief_repr, wrong))}")


_MAX_DELAY_SECONDS = 3600.0

_MAX_DOUBLINGS = 62
"""By then every delay has reached the maximum, and a float still holds it."""

_JUDGE_FAILURE_KINDS = ("unfinished", "rejected", "blocked")
"""Kinds of failures that a judge has found; it says itself whether the task is run again."""


def schedule_retry(
    entry: TaskEntry, failure: Failure, default: Retry, *, threshold: int, now: float, chance: float
) -> tuple[float | None, bool]:
    """When to run a task again after a failed attempt, and whether its own retries are used up.

    Args:
        entry: the task, whose attempt has failed.
        failure: why.
        default: how tasks that declare nothing are retried.
        threshold: the number of consecutive used-up failures at which the task is given up.
        now: seconds since the epoch.
        chance: a number in [0, 1) that spreads the delay.

    Returns:
        The time of the next attempt or None, and whether the task's retries are used up.
    """
    policy = entry.task.retry or default
    if failure.kind in _JUDGE_FAILURE_KINDS:
        return (now, False) if failure.kind == "unfinished" else (None, True)
    if failure.kind == "interrupted":
        return (now, False) if entry.task.idempotent else (None, True)
    repeatable = failure.transient or (failure.kind == "timeout" and entry.task.idempotent)
    delay = policy.delay * (2 ** min(entry.attempts_in_round - 1, _MAX_DOUBLINGS) if policy.exponential else 1)
    if policy.jitter:
        delay *= 0.5 + chance
    due = now + min(delay, _MAX_DELAY_SECONDS)
    if repeatable and entry.attempts_in_round < policy.max_attempts:
        return due, False
    if entry.failures + 1 < threshold and failure.kind != "timeout":
        return due, True
    return None, True


_READY = TaskState.READY

Codec = Callable[[object], JsonValue]
"""Turns an output that is not JSON into JSON."""


class PlanReports:
    """The methods of a run by which the execution of its tasks is reported."""

    _lifecycle: Lifecycle
    _redactor: Redactor
    _spans: RunTracer
    _codec: Codec | None
    _chance: Callable[[], float]
    _max_output_bytes: int
    _attempts: dict[AttemptId, tuple[TaskEntry, Attempt | Worker | None]]

    def started(self, task_id: str) -> AttemptId:
        """Report that a ready task is being executed.

        Returns:
            The id of the attempt, to report its end with.

        Raises:
            NotRunning: the task is not ready, a question holds it, or the run has ended or is about to.
            StoreError: the journal does not take it; the task must not be executed.
        """
        entry = self._lifecycle.live.entry(TaskId(task_id))
        if entry.state is not _READY:
            raise NotRunning(f"task {task_id!r} is {entry.state}, so no attempt at it can start")
        if entry.hold_count:
            raise NotRunning(f"task {task_id!r} is held until a person has answered what they were asked about it")
        if self._lifecycle.end is not None:
            raise NotRunning(f"the run is {self._lifecycle.end.status}")
        if self._lifecycle.stop_reason:
            raise NotRunning(f"{self._lifecycle.stop_reason}: nothing more begins")
        return self._start(entry)

    def succeeded(self, attempt_id: AttemptId, output: object = None) -> None:
        """Report the output of an attempt: JSON, or what the codec turns into JSON.

        An attempt that is not current any more is recorded and otherwise passed over.

        Raises:
            UnknownAttempt: there was no such attempt.
        """
        entry = self._end_attempt(attempt_id, "succeeded")
        if entry is None:
            return
        life = self._lifecycle
        try:
            value, recoverable = (None, True) if output is None else self._serialise_output(output)
        except OutputError as error:
            self._fail(entry, attempt_id, Failure("OutputError", str(error), kind="output"))
            return
        if not recoverable:
            entry.output = output  # type: ignore[assignment]  # kept for this process only; the journal has none
        life.commit_or_defer(new_attempt_succeeded(attempt_id, entry.id, value, recoverable))
        life.after_observation()

    def failed(self, attempt_id: AttemptId, error: BaseException | str | Failure) -> None:
        """Report that an attempt failed; the task is run again, or a trigger follows.

        Raises:
            UnknownAttempt: there was no such attempt.
        """
        entry = self._end_attempt(attempt_id, "failed")
        if entry is not None:
            self._fail(entry, attempt_id, error if isinstance(error, Failure) else failure_from(error))

    def charge(self, usage: Usage, *, attempt_id: AttemptId | None = None, provider: str | None = None) -> None:
        """Report what work or a provider used."""
        self._lifecycle.commit_or_defer(UsageCharged(usage, attempt_id, provider))
        self._lifecycle.check_budget()

    def meter(self, provider: str) -> RunMeter:
        """What accounts for the calls of a language model: against the budget of the run, and on its trace."""
        return RunMeter(provider, self._lifecycle.ledger.budget_tracker, self.charge, self._spans)

    def _try_start(self, attempt: Attempt | Worker) -> bool:
        """Start an attempt that was pulled; false when the store does not take it, or it may run no longer."""
        life = self._lifecycle
        entry = life.live.entry(attempt.task.id)
        if entry.state is not _READY or entry.hold_count or life.end is not None or life.stop_reason:
            self._fence(attempt, entry)
            return False
        try:
            attempt.id = self._start(entry, attempt)
        except StoreError:
            return False
        return True

    async def _start_when_store_recovers(self, attempt: Attempt | Worker) -> bool:
        """Wait for the store, then start; false when the attempt may not run any more."""
        while not attempt.id:
            try:
                await self._lifecycle.wait_for_store()
            except NotRunning:
                self._fence(attempt, self._lifecycle.live.entry(attempt.task.id))
                break
            if self._try_start(attempt):
                return True
        return False

    def _fence(self, attempt: Attempt | Worker, entry: TaskEntry) -> None:
        attempt.id = AttemptId(f"{entry.id}#fenced")
        if self._lifecycle.end is None:
            state = "the task is held by a question" if entry.hold_count else f"the task is {entry.state}"
            self._lifecycle.commit_or_defer(
                AttemptFenced(attempt.id, entry.id, f"not started: {self._lifecycle.stop_reason or state}")
            )

    def _start(self, entry: TaskEntry, body: Attempt | Worker | None = None) -> AttemptId:
        life = self._lifecycle
        number = entry.attempts + 1
        # A first attempt, as most are, without making text of a number, and no call of a type that does nothing.
        attempt_id: AttemptId = entry.id + "#1" if number == 1 else f"{entry.id}#{number}"  # type: ignore[assignment]
        timeout, name = entry.fields["timeout"], entry.fields["tool"]
        if timeout is None and name is not None:
            tool = life.live.tools.get(name)
            timeout = tool.timeout if tool is not None else None
        deadline = None if timeout is None else life.clock.now() + timeout
        life.commit(new_attempt_started(attempt_id, entry.id, number, deadline))
        self._attempts[attempt_id] = entry, body
        if deadline is not None and deadline < life.timer.next_wakeup:
            life.timer.notify_deadline(deadline)
        return attempt_id

    def _end_attempt(self, attempt_id: AttemptId, report: str) -> TaskEntry | None:
        """The task of an attempt that ends now; None when the attempt is not current, which is recorded."""
        found = self._attempts.pop(attempt_id, None)
        if found is not None:
            return found[0]
        task_id = TaskId(attempt_id.rpartition("#")[0])
        if task_id not in self._lifecycle.live:
            raise UnknownAttempt(attempt_id)
        if self._lifecycle.end is None:
            self._lifecycle.commit_or_defer(AttemptFenced(attempt_id, task_id, report))
        return None

    def _fail(self, entry: TaskEntry, attempt_id: AttemptId, failure: Failure) -> None:
        life = self._lifecycle
        message, kind = failure.message, failure.kind
        if kind == "unfinished" and entry.continuations + 1 >= (most := life.settings.judge.max_iterations):
            message, kind = f"still unfinished after {most} attempts (judge.max_iterations): {message}", "blocked"
        failure = Failure(failure.type, self._redactor.text(message), failure.transient, kind)
        retry_at, exhausted = self._schedule_retry(entry, failure)
        life.commit_or_defer(AttemptFailed(attempt_id, entry.id, failure, retry_at, exhausted and retry_at is not None))
        self._after_failure(retry_at)

    def _schedule_retry(self, entry: TaskEntry, failure: Failure) -> tuple[float | None, bool]:
        settings = self._lifecycle.settings
        now = self._lifecycle.clock.now()
        return schedule_retry(
            entry, failure, settings.retry, threshold=settings.failure_threshold, now=now, chance=self._chance()
        )

    def _after_failure(self, retry_at: float | None) -> None:
        if retry_at is not None:
            self._lifecycle.timer.notify_deadline(retry_at)
        self._lifecycle.after_observation()

    def _time_out(self, entry: TaskEntry, attempt_id: AttemptId) -> None:
        if attempt_id not in self._attempts:
            return  # it has ended; while the store fails, the plan does not know yet
        timeout = round((entry.deadline or 0.0) - entry.started_at, 3)
        retry_at, _ = self._schedule_retry(entry, Failure("TimedOut", "", kind="timeout"))
        self._cancel_attempt(attempt_id)
        self._lifecycle.commit_or_defer(AttemptTimedOut(attempt_id, entry.id, timeout, retry_at))
        self._after_failure(retry_at)

    def _report_interrupted(self, attempt_id: AttemptId, reason: str) -> None:
        entry = self._end_attempt(attempt_id, "interrupted")
        if entry is not None and self._lifecycle.end is None:
            retry_at, _ = self._schedule_retry(entry, Failure("Interrupted", reason, kind="interrupted"))
            self._lifecycle.commit_or_defer(AttemptInterrupted(attempt_id, entry.id, reason, retry_at))
            # Whoever interrupts may be leaving the run: whether it is at its end is looked at a little later.
            self._lifecycle.timer.call_at(retry_at or self._lifecycle.clock.now(), self._lifecycle.after_observation)

    def _fail_arguments(self, entry: TaskEntry, failure: Failure) -> None:
        attempt_id = self._start(entry)
        self._fail(self._attempts.pop(attempt_id)[0], attempt_id, failure)

    def _cancel_attempt(self, attempt_id: AttemptId | None) -> None:
        """Stop the body of an attempt that is not wanted any more."""
        if attempt_id is not None:
            _, body = self._attempts.pop(attempt_id, (None, None))
            if body is not None:
                body.cancel()

    def _cancel_attempts(self) -> None:
        for attempt_id in list(self._attempts):
            self._cancel_attempt(attempt_id)

    def _record_process(self, attempt_id: AttemptId, group: int) -> None:
        if attempt_id in self._attempts:
            self._lifecycle.commit(ProcessStarted(attempt_id, host_id(), group, process_start_time(group)))

    def _serialise_output(self, output: object) -> tuple[JsonValue, bool]:
        """The output as JSON without secrets, and whether a resumed run will find it."""
        if output is None or isinstance(output, bool) or (isinstance(output, int) and output.bit_length() < 64):
            return output, True
        if self._codec is not None:
            try:
                output = self._codec(output)
            except Exception as error:  # whatever a codec raises is a failure of the attempt
                raise OutputError(f"the codec failed for {type(output).__name__}: {error!r}") from error
        try:
            text = json.dumps(output, allow_nan=False, ensure_ascii=False)
            size = len(text.encode())
        except (TypeError, ValueError, RecursionError):
            return None, False
        if size > self._max_output_bytes:
            raise OutputError(
                f"the output has {size} bytes as JSON, the limit is {self._max_output_bytes};"
                " store it elsewhere and return a reference to it"
            )
        try:
            if isinstance(output, list | dict | tuple):
                output = from_json(f'{{"output":{text}}}')["output"]  # as whoever resumes the run will read it
            return self._redactor.value(output), True  # type: ignore[arg-type]  # parsed JSON, or a scalar of it
        except (ValueError, RecordNotSerializable):
            return None, False  # a reader does not take so deep a nesting, or so long a number


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run came out.

    Attributes:
        status: `succeeded`, `failed`, `aborted`, `paused` or `needs_human`.
        reason: in one sentence, why.
        outputs: results by the ids of the original tasks.
        revisions: what changed in the plan, and why, in order.
        questions: the ids of the questions that a person must answer.
        spent: what budgets counted.
        unjournaled: whether the store failed and the run went on without it.
    """

    run: RunId
    status: RunStatus
    reason: str
    outputs: Mapping[str, JsonValue]
    revisions: tuple[PlanRevised, ...]
    questions: tuple[str, ...] = ()
    spent: Usage = field(default_factory=Usage)
    unjournaled: bool = False


class PlanRun(PlanReports, PlanObservations, PlanEdits):
    """One execution of one plan, from which workers pull and to which they report.

    Made by `ReplanningEngine.open`, and without an engine by `open_run`.
    """

    def __init__(
        self,
        run_id: RunId,
        life: Lifecycle,
        *,
        chance: Callable[[], float],
        redactor: Redactor,
        codec: Codec | None = None,
    ) -> None:
        self.id = run_id
        self._lifecycle = life
        self._chance = chance
        self._redactor = redactor
        self._codec = codec
        self._spans: RunTracer = NOOP_TRACER
        self._opening_record: Record | None = None
        self._attempts = {}
        self._max_output_bytes = life.settings.max_output
        # The scope class of the backend in use: calling it directly is twice as fast as anyio.CancelScope().
        self._scope_type: type[anyio.CancelScope] = type(anyio.CancelScope())
        self._history: ReplanHistory | None = None
        life.on_attempt_timeout = self._time_out
        life.on_argument_error = self._fail_arguments
        life.on_end = self._cancel_attempts

    def __repr__(self) -> str:
        state = self._lifecycle.end.status if self._lifecycle.end else "running"
        return f"<PlanRun {self.id!r} {state} {self.live!r}>"

    @property
    def plan(self) -> Plan:
        """The plan as it stands now, as a document."""
        return self.live.document()

    @property
    def view(self) -> PlanView:
        """A read-only look at the plan at its present revision."""
        return PlanView(self.live)

    def replanning_info(self, task_id: str) -> ReplanningInfo:
        """Where a task stands in its lineage, and why.

        Raises:
            UnknownTask: there never was such a task.
        """
        revisions = (revised for _, revised in self._lifecycle.ledger.revisions)
        limit = self._lifecycle.settings.limits.replans_per_lineage
        return replanning_info(self.view.task(TaskId(task_id)), revisions, limit)

    @property
    def ended(self) -> bool:
        """Whether it has ended, or stands still until it is resumed; `result` then says how."""
        return self._lifecycle.end is not None

    @property
    def result(self) -> RunResult:
        """How the run came out.

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
            self.live.results.outputs(),
            tuple(revised for _, revised in ledger.revisions),
            tuple(ledger.open_questions),
            ledger.budget_tracker.spent,
            self._lifecycle.journal.unjournaled,
        )

    @property
    def spent(self) -> Usage:
        """What budgets have counted until now: above all what language models have cost."""
        return self._lifecycle.ledger.budget_tracker.spent

    @property
    def history(self) -> ReplanHistory:
        """What was replanned so far, and why; it is derived from the journal when it is asked for.

        Raises:
            StoreError: the journal cannot be read.
        """
        if self._history is None:
            self._history = ReplanHistory.of(self._lifecycle.journal.store, self.id)
        return self._history.refresh()

    # Pulling

    def ready(self) -> ReadyTasks:
        """Tasks the moment they may run, across revisions; call it once for each worker.

        The iterator ends when the run does. It holds nothing open between its items.
        """
        return ReadyTasks(self)

    def attempt(self, task: Task) -> Attempt:
        """Execute a task: journal, deadline, cancellation; an exception of the body is a failure."""
        return Attempt(self, task)

    async def wait(self) -> RunResult:
        """Wait for the end of the run, for those who report from elsewhere."""
        self._lifecycle.check_completion()
        await self._lifecycle.ended.wait()
        return self.result

    def pause(self, reason: str = "asked to pause", *, by: str = "") -> None:
        """Hand out nothing more; the run ends as `paused` when what is running has finished."""
        if self._lifecycle.end is None and self._lifecycle.ledger.pause is None:
            self._lifecycle.commit_or_defer(RunPaused(self._redactor.text(reason), self._redactor.text(by)))
            self._lifecycle.check_completion()

    # Editing

    def apply(self, changes: Sequence[PlanChange], *, reason: str = "", expected_revision: int | None = None) -> int:
        """Apply changes by hand: all or none; one revision.

        Returns:
            The number of the revision.

        Raises:
            ChangeRefused: with every problem; nothing has changed.
            NotRunning: the run has ended.
            StoreError: the journal does not take it; nothing has changed.
        """
        clean = redact_changes(changes, self._redactor)
        return self._revise(clean, self._redactor.text(reason), "edit", expected_revision=expected_revision)

    def _revise(
        self,
        changes: tuple[PlanChange, ...],
        reason: str,
        by: str,
        *,
        expected_revision: int | None = None,
        draft: Draft | None = None,
        triggers: tuple[TriggerId, ...] = (),
        replan: ReplanId | None = None,
        chosen: int | None = None,
    ) -> int:
        life, live = self._lifecycle, self.live
        if life.end is not None:
            raise NotRunning(f"the run is {life.end.status}; its plan cannot be changed")
        parent = live.revision
        stopped = [live.entry(c.task_id).attempt for c in changes if c.kind == "cancel" and c.task_id in live]
        with self._spans.apply_span(changes, by, replan):
            draft = live.prepare(changes, expected_revision, draft=draft)
            life.commit(
                PlanRevised(parent + 1, parent, changes, reason, by, triggers, replan, chosen, draft.plan_hash), draft
            )
        for attempt_id in stopped:
            self._cancel_attempt(attempt_id)
        life.after_observation()
        life.check_completion()
        due = live.next_deadline()
        if due is not None:
            life.timer.notify_deadline(due)
        return parent + 1
