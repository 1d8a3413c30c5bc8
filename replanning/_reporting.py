"""What a run is told of the execution of its tasks: attempts that start, end, are cut off or come too late."""

from __future__ import annotations

import json
from collections.abc import Callable

from pydantic_core import from_json

from replanning._attempt import Attempt, Worker, failure_from
from replanning._entries import TaskEntry
from replanning._errors import NotRunning, OutputError, RecordNotSerializable, StoreError, UnknownAttempt
from replanning._ids import AttemptId, TaskId
from replanning._leftovers import host_id, process_start_time
from replanning._lifecycle import Lifecycle
from replanning._meter import RunMeter
from replanning._observations import (
    AttemptFailed,
    AttemptFenced,
    AttemptInterrupted,
    AttemptTimedOut,
    Failure,
    ProcessStarted,
    Usage,
    UsageCharged,
    new_attempt_started,
    new_attempt_succeeded,
)
from replanning._plan import JsonValue
from replanning._redaction import Redactor
from replanning._retry import schedule_retry
from replanning._spans import RunTracer
from replanning._states import TaskState

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
