"""A plan under way: pull ready tasks, report what happens, observe, edit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import anyio
from pydantic_core import from_json

from replanning._attempt import Attempt, ReadyTasks, Worker, failure_from
from replanning._changes import CancelTask, PlanChange
from replanning._edits import PlanEdits
from replanning._entries import Entry
from replanning._errors import NotRunning, OutputError, StoreError, UnknownAttempt, Unstorable
from replanning._ids import AttemptId, ReplanId, RunId, TaskId, TriggerId
from replanning._leftovers import machine, process_born
from replanning._lifecycle import Lifecycle
from replanning._lineage import ReplanningInfo, replanning_info
from replanning._observing import PlanObservations
from replanning._plan import JsonValue, Plan, Task
from replanning._records import (
    AttemptFailed,
    AttemptFenced,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    Charged,
    Failure,
    ProcessStarted,
    Record,
    Revised,
    RunPaused,
    RunStatus,
    Usage,
)
from replanning._redaction import Redactor
from replanning._retry import next_attempt
from replanning._spans import UNTRACED, Spans
from replanning._states import TaskState
from replanning._view import PlanView
from replanning.history import ReplanHistory

_READY = TaskState.READY

Codec = Callable[[object], JsonValue]
"""Turns an output that is not JSON into JSON."""


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
    revisions: tuple[Revised, ...]
    questions: tuple[str, ...] = ()
    spent: Usage = field(default_factory=Usage)
    unjournaled: bool = False


class PlanRun(PlanObservations, PlanEdits):
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
        self._life = life
        self._chance = chance
        self._redactor = redactor
        self._codec = codec
        self._spans: Spans = UNTRACED
        self._opening: Record | None = None
        self._attempts: dict[AttemptId, Entry] = {}
        self._bodies: dict[AttemptId, Attempt | Worker] = {}
        self._limit = life.settings.max_output
        # The scope class of the backend in use: calling it directly is twice as fast as anyio.CancelScope().
        self._scope_type: type[anyio.CancelScope] = type(anyio.CancelScope())
        self._history: ReplanHistory | None = None
        life.on_overdue = self._time_out
        life.on_bad_arguments = self._fail_arguments
        life.on_end = self._stop_attempts

    def __repr__(self) -> str:
        state = self._life.end.status if self._life.end else "running"
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
        revisions = (revised for _, revised in self._life.ledger.revisions)
        limit = self._life.settings.limits.replans_per_lineage
        return replanning_info(self.view.task(TaskId(task_id)), revisions, limit)

    @property
    def result(self) -> RunResult:
        """How the run came out.

        Raises:
            NotRunning: it has not ended yet.
        """
        end, ledger = self._life.end, self._life.ledger
        if end is None:
            raise NotRunning(f"run {self.id!r} has not ended yet; its result is known afterwards")
        return RunResult(
            self.id,
            end.status,
            end.reason,
            self.live.outputs(),
            tuple(revised for _, revised in ledger.revisions),
            tuple(ledger.questions),
            ledger.spending.spent,
            self._life.journal.unjournaled,
        )

    @property
    def history(self) -> ReplanHistory:
        """What was replanned so far, and why; it is derived from the journal when it is asked for.

        Raises:
            StoreError: the journal cannot be read.
        """
        if self._history is None:
            self._history = ReplanHistory.of(self._life.journal.store, self.id)
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
        self._life.check()
        await self._life.ended.wait()
        return self.result

    # Reporting

    def started(self, task_id: str) -> AttemptId:
        """Report that a ready task is being executed.

        Returns:
            The id of the attempt, to report its end with.

        Raises:
            NotRunning: the task is not ready, a question holds it, or the run has ended or is about to.
            StoreError: the journal does not take it; the task must not be executed.
        """
        entry = self.live.entry(TaskId(task_id))
        if entry.state is not _READY:
            raise NotRunning(f"task {task_id!r} is {entry.state}, so no attempt at it can start")
        if entry.held:
            raise NotRunning(f"task {task_id!r} is held until a person has answered what they were asked about it")
        if self._life.end is not None:
            raise NotRunning(f"the run is {self._life.end.status}")
        if self._life.stopping:
            raise NotRunning(f"{self._life.stopping}: nothing more begins")
        return self._start(entry)

    def succeeded(self, attempt_id: AttemptId, output: object = None) -> None:
        """Report the output of an attempt: JSON, or what the codec turns into JSON.

        An attempt that is not current any more is recorded and otherwise passed over.

        Raises:
            UnknownAttempt: there was no such attempt.
        """
        entry = self._ending(attempt_id, "succeeded")
        if entry is None:
            return
        try:
            value, recoverable = (None, True) if output is None else self._storable(output)
        except OutputError as error:
            self._fail(entry, attempt_id, Failure("OutputError", str(error), kind="output"))
            return
        if not recoverable:
            entry.output = output  # type: ignore[assignment]  # kept for this process only; the journal has none
        self._life.observe(AttemptSucceeded(attempt_id, entry.id, value, recoverable))
        self._life.after_observation()

    def failed(self, attempt_id: AttemptId, error: BaseException | str | Failure) -> None:
        """Report that an attempt failed; the task is run again, or a trigger follows.

        Raises:
            UnknownAttempt: there was no such attempt.
        """
        entry = self._ending(attempt_id, "failed")
        if entry is not None:
            self._fail(entry, attempt_id, error if isinstance(error, Failure) else failure_from(error))

    def charge(self, usage: Usage, *, attempt_id: AttemptId | None = None, provider: str | None = None) -> None:
        """Report what work or a provider used."""
        self._life.observe(Charged(usage, attempt_id, provider))
        self._life.check_budget()

    def pause(self, reason: str = "asked to pause", *, by: str = "") -> None:
        """Hand out nothing more; the run ends as `paused` when what is running has finished."""
        if self._life.end is None and self._life.ledger.pausing is None:
            self._life.observe(RunPaused(reason, by))
            self._life.check()

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
        return self._revise(tuple(changes), reason, "edit", expected_revision=expected_revision)

    def _revise(
        self,
        changes: tuple[PlanChange, ...],
        reason: str,
        by: str,
        *,
        expected_revision: int | None = None,
        triggers: tuple[TriggerId, ...] = (),
        replan: ReplanId | None = None,
        chosen: int | None = None,
    ) -> int:
        life, live = self._life, self.live
        if life.end is not None:
            raise NotRunning(f"the run is {life.end.status}; its plan cannot be changed")
        parent = live.revision
        stopped = [live.entry(c.task_id).attempt for c in changes if isinstance(c, CancelTask) and c.task_id in live]

        def journal(digest: str) -> None:
            body = Revised(parent + 1, parent, changes, reason, by, triggers, replan, chosen, digest)
            journaled.append(life.journal.append(body))

        journaled: list[Record] = []
        with self._spans.apply(changes, by, replan):
            number = live.apply(changes, expected_revision, at=life.clock.now(), before_commit=journal)
        for attempt_id in stopped:
            self._forget(attempt_id)
        for record in journaled:
            life.publish(record)
        life.after_observation()
        life.check()
        due = live.next_deadline()
        if due is not None:
            life.timer.poke(due)
        return number

    # Attempts

    def _begin(self, attempt: Attempt | Worker) -> bool:
        """Start an attempt that was pulled; false when the store does not take it, or it may run no longer."""
        life = self._life
        entry = life.live.entry(attempt.task.id)
        if entry.state is not _READY or entry.held or life.end is not None or life.stopping:
            self._fence(attempt, entry)
            return False
        try:
            attempt.id = self._start(entry)
        except StoreError:
            return False
        self._bodies[attempt.id] = attempt
        return True

    async def _begin_later(self, attempt: Attempt | Worker) -> bool:
        """Wait for the store, then start; false when the attempt may not run any more."""
        while not attempt.id:
            try:
                await self._life.store_back()
            except NotRunning:
                self._fence(attempt, self.live.entry(attempt.task.id))
                break
            if self._begin(attempt):
                return True
        return False

    def _fence(self, attempt: Attempt | Worker, entry: Entry) -> None:
        attempt.id = AttemptId(f"{entry.id}#fenced")
        if self._life.end is None:
            state = "the task is held by a question" if entry.held else f"the task is {entry.state}"
            self._life.observe(AttemptFenced(attempt.id, entry.id, f"not started: {self._life.stopping or state}"))

    def _start(self, entry: Entry) -> AttemptId:
        life = self._life
        number = entry.attempts + 1
        attempt_id = AttemptId(f"{entry.id}#{number}")
        task = entry.task
        timeout = task.timeout
        if timeout is None and task.tool is not None:
            tool = self.live.tools.get(task.tool)
            timeout = tool.timeout if tool is not None else None
        deadline = None if timeout is None else life.clock.now() + timeout
        life.commit(AttemptStarted(attempt_id, entry.id, number, deadline))
        self._attempts[attempt_id] = entry
        if deadline is not None and deadline < life.timer.soonest:
            life.timer.poke(deadline)
        return attempt_id

    def _ending(self, attempt_id: AttemptId, report: str) -> Entry | None:
        """The task of an attempt that ends now; None when the attempt is not current, which is recorded."""
        entry = self._attempts.pop(attempt_id, None)
        if entry is not None:
            self._bodies.pop(attempt_id, None)
            return entry
        task_id = TaskId(attempt_id.rpartition("#")[0])
        if task_id not in self.live:
            raise UnknownAttempt(attempt_id)
        if self._life.end is None:
            self._life.observe(AttemptFenced(attempt_id, task_id, report))
        return None

    def _fail(self, entry: Entry, attempt_id: AttemptId, failure: Failure) -> None:
        life = self._life
        failure = Failure(failure.type, self._redactor.text(failure.message), failure.transient, failure.kind)
        retry_at, exhausted = self._next(entry, failure)
        life.observe(AttemptFailed(attempt_id, entry.id, failure, retry_at, exhausted and retry_at is not None))
        self._after_failure(retry_at)

    def _next(self, entry: Entry, failure: Failure) -> tuple[float | None, bool]:
        settings = self._life.settings
        now = self._life.clock.now()
        return next_attempt(
            entry, failure, settings.retry, threshold=settings.failure_threshold, now=now, chance=self._chance()
        )

    def _after_failure(self, retry_at: float | None) -> None:
        if retry_at is not None:
            self._life.timer.poke(retry_at)
        self._life.after_observation()

    def _time_out(self, entry: Entry, attempt_id: AttemptId) -> None:
        if attempt_id not in self._attempts:
            return  # it has ended; while the store fails, the plan does not know yet
        timeout = round((entry.deadline or 0.0) - entry.started, 3)
        retry_at, _ = self._next(entry, Failure("TimedOut", "", kind="timeout"))
        self._forget(attempt_id)
        self._life.observe(AttemptTimedOut(attempt_id, entry.id, timeout, retry_at))
        self._after_failure(retry_at)

    def _interrupted(self, attempt_id: AttemptId, reason: str) -> None:
        entry = self._ending(attempt_id, "interrupted")
        if entry is not None and self._life.end is None:
            retry_at, _ = self._next(entry, Failure("Interrupted", reason, kind="interrupted"))
            self._life.observe(AttemptInterrupted(attempt_id, entry.id, reason, retry_at))
            # Whoever interrupts may be leaving the run: whether it is at its end is looked at a little later.
            self._life.timer.at(retry_at or self._life.clock.now(), self._life.after_observation)

    def _fail_arguments(self, entry: Entry, failure: Failure) -> None:
        attempt_id = self._start(entry)
        self._fail(self._attempts.pop(attempt_id), attempt_id, failure)

    def _forget(self, attempt_id: AttemptId | None) -> None:
        """Stop the body of an attempt that is not wanted any more."""
        if attempt_id is not None:
            self._attempts.pop(attempt_id, None)
            body = self._bodies.pop(attempt_id, None)
            if body is not None:
                body.cancel()

    def _stop_attempts(self) -> None:
        for attempt_id in list(self._attempts):
            self._forget(attempt_id)

    def _note_process(self, attempt_id: AttemptId, group: int) -> None:
        if attempt_id in self._attempts:
            self._life.commit(ProcessStarted(attempt_id, machine(), group, process_born(group)))

    def _storable(self, output: object) -> tuple[JsonValue, bool]:
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
        if size > self._limit:
            raise OutputError(
                f"the output has {size} bytes as JSON, the limit is {self._limit};"
                " store it elsewhere and return a reference to it"
            )
        try:
            if isinstance(output, list | dict | tuple):
                output = from_json(f'{{"output":{text}}}')["output"]  # as whoever resumes the run will read it
            return self._redactor.value(output), True  # type: ignore[arg-type]  # parsed JSON, or a scalar of it
        except (ValueError, Unstorable):
            return None, False  # a reader does not take so deep a nesting, or so long a number
