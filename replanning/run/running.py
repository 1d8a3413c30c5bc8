"""Running attempts: their start, their reports, their cancellation and their time limits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol

from replanning.errors import (
    ExpressionError,
    NotRunning,
    OutputError,
    StoreError,
    UnexpectedOutput,
    UnknownAttempt,
    UnverifiedOutput,
)
from replanning.journal.records import (
    AttemptFailed,
    AttemptFenced,
    AttemptInterrupted,
    AttemptStarted,
    AttemptTimedOut,
    Failure,
    RunEnded,
)
from replanning.live.entries import Doubt, TaskEntry
from replanning.live.facts import context_keys
from replanning.live.plan import LivePlan
from replanning.live.stale import may_be_stale
from replanning.plan.messages import brief_repr, format_duration
from replanning.plan.tasks import Confirmation, Task, has_no_effect
from replanning.plan.types import AttemptId, TaskId
from replanning.run.dispatch import Claim, Dispatcher
from replanning.run.event_loop import Timer
from replanning.run.journal import RunJournal
from replanning.run.outputs import Confirmed, OutputKeeper
from replanning.run.retries import FailureKeeper
from replanning.secrets import Redactor
from replanning.telemetry.tracer import RunTracer

_log: Final = logging.getLogger("replanning.run")

_LATE_SECONDS: Final = 0.1
"""Seconds of delay of the timer that only a blocked event loop explains."""


class NextStep(NamedTuple):
    """Next steps after an attempt that has not succeeded.

    Attributes:
        retry_at: when its task runs again, in seconds since the epoch; None if it does not.
        exhausted: whether the retries are used up, so that this begins a new round.
        confirm_at: when a confirmation asks whether it was done anyway; None if none does.
    """

    retry_at: float | None = None
    exhausted: bool = False
    confirm_at: float | None = None


@dataclass(frozen=True, slots=True)
class AttemptOptions:
    """Options of the attempts that one worker or caller executes.

    Attributes:
        passes: exceptions that are control flow rather than failures; they propagate.
        must_store: whether an output that is too large for the journal is a failure; otherwise it
            is left out.
        value_of: extracts the value that expectations check; by default the output itself.
        in_own_task: whether the body runs in a task of the library, so that a cancellation that the
            library did not cause is a failure.
        in_scope_of_worker: whether the cancel scope belongs to a worker, which executes one attempt
            after another in it, until one of them is cancelled.
    """

    passes: tuple[type[BaseException], ...] = ()
    must_store: bool = True
    value_of: Callable[[object], object] | None = None
    in_own_task: bool = False
    in_scope_of_worker: bool = False


class AttemptHandle(Protocol):
    """Handle of an attempt for the code that executes it.

    Attributes:
        id: the id of the attempt.
        task: its task.
        output: the output of its work, once it exists.
        options: the options of the worker or caller.
        asking: the second tool that is verifying the output now; empty if none is.
        verified: whether the other tools that must agree have done so.
        error: the cause of its failure, for its caller.
    """

    id: AttemptId
    task: Task
    output: object
    options: AttemptOptions
    asking: str
    verified: bool
    error: Exception | None

    @property
    def checked(self) -> bool:
        """Whether the commands that must succeed after the work have succeeded."""

    def cancel(self) -> None:
        """Stop the work; later reports of it are ignored."""
        ...


class AttemptHost(Protocol):
    """The part of a run that its attempts use."""

    @property
    def end(self) -> RunEnded | None:
        """The end of the run, once it has ended."""

    def obstacle_to(self, entry: TaskEntry) -> str:
        """Return why no attempt at a task may start, even if it was handed out."""

    def key_of(self, entry: TaskEntry) -> str:
        """Return the idempotency key of the task's current call."""

    async def wait_for_store(self) -> None:
        """Wait until the store works again."""

    def follow_up(self, *, must_check: bool = False) -> None:
        """Follow up on an observation; `must_check` for the end even while tasks are ready."""

    def record_error(self, where: str, error: BaseException | str) -> None:
        """Record an error that was contained, and warn of it."""

    def record_stale_results(self) -> bool:
        """Record which finished tasks have stale results."""


@dataclass(repr=False, eq=False)
class RunningAttempts:
    """Records the start and end of attempts, and stops the work of attempts that are over.

    Its state is one table, `running`: an attempt is in it from its start until it reports, times
    out or is cancelled. Later reports of it are fenced off: recorded, without effect.

    Args:
        live: the plan.
        journal: stores the records.
        dispatcher: gets back tasks that were handed out but did not start.
        outputs: takes the outputs of attempts.
        failures: processes their failures, and knows the settings of retries.
        timer: calls back at deadlines and retries.
        spans: traces attempts.
        redactor: masks secrets.
        run: knows its end, and checks for it.

    Attributes:
        running: the attempts that have not ended, each with its task and its handle.
        at_work: attempts that have ended but whose work continues and may still take effect. Each is
            listed under its id until its body has stopped, and under a key for each thread.
    """

    _live: LivePlan
    _journal: RunJournal
    _dispatcher: Dispatcher
    outputs: OutputKeeper
    _failures: FailureKeeper
    _timer: Timer
    _spans: RunTracer
    _redactor: Redactor
    _run: AttemptHost
    running: dict[AttemptId, tuple[TaskEntry, AttemptHandle | None]] = field(default_factory=dict)
    at_work: dict[object, AttemptId] = field(default_factory=dict)
    # Attempts whose work was still going on at their last confirmation.
    _asked_early: set[AttemptId] = field(default_factory=set)

    def __repr__(self) -> str:
        return f"<RunningAttempts {list(self.running)}>"

    # Starting

    def start(self, entry: TaskEntry, handle: AttemptHandle | None = None) -> AttemptId:
        """Record the start of an attempt at a task, or of a confirmation of the last one.

        Raises:
            StoreError: the journal does not take it; the task must not be executed.
        """
        number = entry.log.count + 1
        attempt_id = AttemptId(f"{entry.id}#{number}")
        timeout = entry.task.timeout
        if timeout is None:
            tool = self._live.tool_of(entry.task)
            timeout = None if tool is None else tool.timeout
        history = self._live.staleness.history
        confirms: AttemptId | None = None
        if entry.log.doubt is not None:
            doubt = entry.log.doubt
            confirms = doubt.attempt
            number = doubt.asked + 1
            attempt_id = AttemptId(f"{confirms}-confirm{number}")
            # The confirming tool has its own timeout, or else that of the task.
            asked = self._live.tools.get(doubt.confirm.tool)
            if asked is not None and asked.timeout is not None:
                timeout = asked.timeout
        elif history.version and entry.claim:
            # Its references were replaced at the claim, perhaps by values that have changed since.
            version = history.version_at_claim(entry.claim)
            if version != history.version:
                entry.reads.keys = dict.fromkeys(context_keys(entry.task), version)
        self.record_start(attempt_id, entry.id, number, timeout, confirms=confirms)
        # A subscriber may have cancelled the attempt in reaction to the start.
        if entry.log.current == attempt_id and self._run.end is None:
            self.running[attempt_id] = entry, handle
        elif handle is not None:
            handle.cancel()
        return attempt_id

    def record_start(
        self,
        attempt_id: AttemptId,
        task_id: TaskId,
        number: int,
        timeout: float | None,
        *,
        call: Task | None = None,
        confirms: AttemptId | None = None,
    ) -> None:
        """Record the start of an attempt at a task of the plan, or at a call added with it.

        Raises:
            StoreError: the journal does not take it; nothing has changed.
        """
        deadline = None
        if timeout is not None:
            deadline = self._timer.clock.now() + timeout
        if confirms is not None:
            self._asked_early.discard(confirms)
            if confirms in list(self.at_work.values()):  # a copy, because threads change it
                self._asked_early.add(confirms)
        started = AttemptStarted(
            attempt_id,
            task_id,
            number,
            deadline,
            call,
            confirms,
        )
        # Only the document of a call needs masking.
        masked = started if call is None else None
        self._journal.append(started, masked)
        if deadline is not None and deadline < self._timer.next_wakeup:
            self._timer.notify_deadline(deadline)

    async def start_when_possible(self, handle: AttemptHandle) -> bool:
        """Start the attempt of a task that was handed out, once the store works.

        Returns:
            False if the task may no longer run.
        """
        entry = self._live.entry(handle.task.id)
        claim = Claim(entry, entry.claim, entry.task)
        try:
            while not (obstacle := self._run.obstacle_to(entry)) and self._run.end is None:
                try:
                    handle.id = self.start(entry, handle)
                except StoreError:
                    with suppress(NotRunning):
                        await self._run.wait_for_store()
                else:
                    return True
        finally:
            if claim.is_open:
                self._dispatcher.requeue([claim])
        # Reports under this id are fenced off as well.
        handle.id = AttemptId(f"{entry.id}#fenced")
        if self._run.end is None:
            fenced = AttemptFenced(handle.id, entry.id, f"not started: {obstacle}")
            self._journal.append_soon(fenced)
        return False

    def fail_unstarted(self, entry: TaskEntry, failure: Failure) -> None:
        """Fail a task before its work begins; this counts as an attempt.

        Raises:
            StoreError: the journal does not take it; nothing has changed.
        """
        self.failed(self.start(entry), failure)

    # Reports

    def succeeded(self, attempt_id: AttemptId, output: object = None) -> UnexpectedOutput | None:
        """Record the output of an attempt, see `PlanRun.succeeded`.

        Returns:
            The error of an unexpected output, which fails the attempt; None if the output is as
            expected.
        """
        ended = self._take_out(attempt_id, "succeeded")
        if ended is None:
            return None
        entry, handle = ended
        doubt = entry.log.doubt
        if doubt is not None:
            answer = self._answer(attempt_id, entry, doubt, output, handle)
            if not answer.done:
                return None
            output = answer.output
        # Most tasks expect nothing of their outputs.
        if self.outputs.expectations(entry):
            unexpected = self._unexpected(entry, output, handle)
            if unexpected is not None:
                self._record_failure(attempt_id, entry, unexpected)
                return unexpected
        must_store = handle is None or handle.options.must_store
        try:
            body, stored = self.outputs.take(attempt_id, entry, output, must_store=must_store)
        except OutputError as error:
            failure = Failure("OutputError", str(error), kind="output", in_doubt=error.in_doubt)
            self._record_failure(attempt_id, entry, failure)
            return None
        if body.unstored and not entry.output.unstored:
            consequence = "the tasks of this process get it, and a resumed run lacks it"
            if not body.recoverable:
                consequence = "no other task gets it"
            _log.warning(
                "the output of task %r is not stored: %s; %s",
                entry.id,
                self._redactor.text(body.unstored),
                consequence,
            )
        self._journal.append_soon(body, stored)
        if may_be_stale(self._live, entry):
            self._run.record_stale_results()
        self._run.follow_up()
        return None

    def _unexpected(
        self, entry: TaskEntry, output: object, handle: AttemptHandle | None
    ) -> UnexpectedOutput | None:
        """Return why an output violates expectations; None if it does not."""
        if entry.log.doubt is not None:
            # The tool that confirmed the task has given it.
            return self.outputs.unexpected(entry, output, verified=True, checked=True)
        if handle is None:
            return self.outputs.unexpected(entry, output, verified=False, checked=False)
        return self.outputs.unexpected(
            entry,
            output,
            handle.options.value_of,
            verified=handle.verified,
            checked=handle.checked,
        )

    def _answer(
        self,
        attempt_id: AttemptId,
        entry: TaskEntry,
        doubt: Doubt,
        output: object,
        handle: AttemptHandle | None,
    ) -> Confirmed:
        """Return the result of a confirmation; record it unless the task was done."""
        value_of = None
        if handle is not None:
            value_of = handle.options.value_of
        try:
            key = self._run.key_of(entry)
            answer = self.outputs.confirmed(entry, doubt.confirm, key, output, value_of)
        except (UnexpectedOutput, ExpressionError) as error:
            self._record_failure(attempt_id, entry, error)
            return Confirmed(done=False)
        if not answer.done:
            failure = doubt.not_done()
            if doubt.attempt in self._asked_early:
                message = "it was not done by then, and its work continues"
                failure = Failure("StillAtWork", message, transient=True)
            self._record_failure(attempt_id, entry, failure)
        return answer

    def failed(
        self,
        attempt_id: AttemptId,
        error: BaseException | str | Failure,
        *,
        must_check: bool = False,
    ) -> None:
        """Record a failure, and decide when the task runs again.

        Args:
            attempt_id: the attempt.
            error: why it failed.
            must_check: whether to check for the end of the run even while tasks are ready.
        """
        ended = self._take_out(attempt_id, "failed")
        if ended is not None:
            self._record_failure(attempt_id, ended[0], error, must_check=must_check)

    def _record_failure(
        self,
        attempt_id: AttemptId,
        entry: TaskEntry,
        error: BaseException | str | Failure,
        *,
        must_check: bool = False,
    ) -> None:
        doubt = entry.log.doubt
        if doubt is None:
            tool = self._live.tool_of(entry.task)
            failure = self._failures.take(entry, entry.task, tool, error)
        else:
            failure = self._failure_to_confirm(entry, doubt.confirm, error)
        if _is_heard():
            text = f"attempt {attempt_id} failed: {failure}\n{failure.traceback}"
            _log.warning("%s", text.rstrip())
        now = self._timer.clock.now()
        next_step = self._next_step(entry, failure, now)
        trace = self._spans.attempt_trace(attempt_id)
        output = None
        if isinstance(error, UnexpectedOutput):
            output = self.outputs.recorded_form(error.output)
        self._journal.append_soon(
            AttemptFailed(
                attempt_id,
                entry.id,
                failure,
                next_step.retry_at,
                next_step.exhausted,
                trace,
                output,
                next_step.confirm_at,
            )
        )
        self._run.follow_up(must_check=must_check)

    def _failure_to_confirm(
        self, entry: TaskEntry, confirm: Confirmation, error: BaseException | str | Failure
    ) -> Failure:
        """Return the failure of a confirmation, with its question."""
        tool = self._live.tools.get(confirm.tool)
        failure = self._failures.take(entry, confirm.call, tool, error)
        if failure.not_done:
            return failure
        try:
            task = self._live.asking_task(entry, confirm, self._run.key_of(entry))
        except ExpressionError:
            asked = f"{confirm.tool!r} was not asked"
        else:
            asked = f"asked {confirm.tool!r} with {brief_repr(task.arguments)}"
            asked = self._redactor.text(asked)
        return replace(failure, message=f"{failure.message} ({asked} whether it was done)")

    def _next_step(self, entry: TaskEntry, failure: Failure, now: float) -> NextStep:
        """Decide the next step after a failed attempt: confirm it, run it again, or neither.

        See `schedule_confirmation` and `schedule_retry`. After the last confirmation, the failure
        of the task decides, not the failure of the confirmation.
        """
        confirm_at = self._failures.schedule_confirmation(entry, self._live, failure, now)
        if confirm_at is not None:
            self._timer.notify_deadline(confirm_at)
            return NextStep(confirm_at=confirm_at)
        tool = self._live.tool_of(entry.task)
        if entry.log.doubt is not None:
            failure = entry.log.doubt.settled(failure)
        retry_at, exhausted = self._failures.schedule_retry(entry, tool, failure, now)
        if retry_at is None or self._has_substitute(entry.task):
            return NextStep()
        self._timer.notify_deadline(retry_at)
        return NextStep(retry_at, exhausted)

    def _has_substitute(self, task: Task) -> bool:
        """Return whether replanning beats waiting for a retry with the unavailable tool.

        It does if another available tool has the same capability, and the task has no effects.
        """
        tool = self._live.tool_of(task)
        if tool is None or tool.available or tool.capability is None:
            return False
        if not has_no_effect(task, tool):
            return False
        for other in self._live.tools.values():
            if other.available and other.capability == tool.capability:
                return True
        return False

    def interrupted(self, attempt_id: AttemptId, reason: str, *, again: bool = False) -> None:
        """Record that an attempt was cut off from outside.

        Args:
            attempt_id: the attempt.
            reason: why.
            again: whether the work itself asks to be executed again.
        """
        ended = self._take_out(attempt_id, "interrupted")
        if ended is None or self._run.end is not None:
            return
        entry = ended[0]
        now = self._timer.clock.now()
        failure = Failure("Interrupted", reason, kind="interrupted")
        next_step = NextStep(retry_at=now)
        # Whatever happens to a confirmation, the call that it asks about is in doubt.
        if not again or entry.log.doubt is not None:
            next_step = self._next_step(entry, failure, now)
        trace = self._spans.attempt_trace(attempt_id)
        self._journal.append_soon(
            AttemptInterrupted(
                attempt_id,
                entry.id,
                reason,
                next_step.retry_at,
                trace,
                in_doubt=not again,
                confirm_at=next_step.confirm_at,
            )
        )
        # The caller may be leaving the run, so the check for its end comes a little later.
        self._timer.call_at(now, self._run.follow_up)

    def _take_out(
        self, attempt_id: AttemptId, report: str
    ) -> tuple[TaskEntry, AttemptHandle | None] | None:
        """Return the task and the handle of an attempt that ends now; None if it is not current.

        A report of such an attempt is recorded and has no effect.

        Raises:
            UnknownAttempt: the run has never had it.
        """
        running = self.running.pop(attempt_id, None)
        if running is not None:
            self._report_overrun(running[0])
            return running
        task_id = TaskId(str(attempt_id).rpartition("#")[0])
        if task_id not in self._live:
            raise UnknownAttempt(attempt_id)
        if self._run.end is None:
            self._journal.append_soon(AttemptFenced(attempt_id, task_id, report))
        return None

    def _report_overrun(self, entry: TaskEntry) -> None:
        """Warn about an attempt that ends now, after its deadline.

        Its timeout could not fire, because a blocked event loop blocks the timer. Its outcome still
        counts, because the work is done.
        """
        deadline = entry.log.deadline
        if deadline is None:
            return
        late = self._timer.clock.now() - deadline
        if late < _LATE_SECONDS:
            return
        limit = entry.log.time_limit
        assert limit is not None, "a deadline comes from a limit"
        self._run.record_error(
            f"task {entry.id!r}",
            f"it ran {format_duration(late)} over its timeout of {format_duration(limit)}, which "
            "could not fire in time because something blocked the event loop; run what blocks "
            "with `await anyio.to_thread.run_sync(…)`",
        )

    # Ending attempts

    def cancel(self, attempt_id: AttemptId) -> None:
        """Stop the work of an attempt; later reports of it have no effect."""
        entry, handle = self.running.pop(attempt_id, (None, None))
        if entry is not None and handle is not None:
            self._live.scheduler.keep_resources(entry, attempt_id)
            self.at_work[attempt_id] = attempt_id
            handle.cancel()

    def work_stopped(self, attempt_id: AttemptId) -> None:
        """Release the resources of a cancelled attempt; its work held them until it stopped."""
        self.at_work.pop(attempt_id, None)
        self._live.scheduler.free_resources(attempt_id)
        self._run.follow_up()

    def cut_off(self, reason: str) -> None:
        """Interrupt all attempts, and stop their work."""
        for attempt_id, (_, handle) in list(self.running.items()):
            self.interrupted(attempt_id, reason)
            if handle is not None:
                handle.cancel()

    def cancel_all(self) -> None:
        """Stop the work of all attempts."""
        for attempt_id in list(self.running):
            self.cancel(attempt_id)

    def advance(self, now: float) -> None:
        """Process everything that is due: end delays of tasks, and time out attempts."""
        for entry, attempt_id in self._live.advance(now):
            # While the store fails, an attempt may have ended without the plan knowing it yet.
            if attempt_id not in self.running:
                continue
            timeout = entry.log.time_limit or 0.0
            self._report_overrun(entry)
            handle = self.running[attempt_id][1]
            if handle is not None and handle.asking:
                # The tool of the task has answered, but the second tool has not.
                late = UnverifiedOutput(
                    f"{handle.asking!r} has not verified it within the "
                    f"{format_duration(timeout)} of the task",
                    handle.output,
                )
                handle.error = late
                self.cancel(attempt_id)
                self._record_failure(attempt_id, entry, late)
                continue
            failure = Failure(
                "TimedOut",
                f"ran into its deadline after {format_duration(timeout)}",
                kind="timeout",
            )
            if entry.log.doubt is not None:
                self.cancel(attempt_id)
                self._record_failure(attempt_id, entry, failure)
                continue
            next_step = self._next_step(entry, failure, now)
            self.cancel(attempt_id)
            trace = self._spans.attempt_trace(attempt_id)
            self._journal.append_soon(
                AttemptTimedOut(
                    attempt_id,
                    entry.id,
                    timeout,
                    next_step.retry_at,
                    trace,
                    next_step.exhausted,
                    next_step.confirm_at,
                )
            )


def _is_heard() -> bool:
    """Return whether a real handler receives log records of this logger.

    A program without logging should not pay for log records that nobody reads.
    """
    logger: logging.Logger | None = _log
    while logger is not None:
        for handler in logger.handlers:
            if not isinstance(handler, logging.NullHandler):
                return True
        logger = logger.parent
    return False
