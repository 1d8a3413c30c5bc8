"""Attempt, one execution of a task: for own loops, for workers, and for calls of sessions."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar, runtime_checkable

import anyio
import anyio.to_thread
from opentelemetry.context import Context
from pydantic import TypeAdapter

from replanning.errors import NotRunning, StoreError, UnverifiedOutput
from replanning.journal.records import Usage
from replanning.live.entries import TaskEntry
from replanning.live.graph import CopyOnRead
from replanning.plan.json_values import copy_json
from replanning.plan.messages import format_duration
from replanning.plan.tasks import Task, ToolSpec, confirmation_problem
from replanning.plan.types import AttemptId, JsonObject, JsonValue, TaskId
from replanning.run.event_loop import Alarm, CancelledWithin, is_cancelled, isolate
from replanning.run.observations import ObservedRun
from replanning.run.retries import failure_from
from replanning.run.running import AttemptOptions

_NOT_STARTED: Final = AttemptId("")
_DEFAULT_OPTIONS: Final = AttemptOptions()


class TaskContext:
    """Context of an attempt, passed to the work together with its task.

    Attributes:
        attempt_id: the id of the attempt.
        arguments: the task's arguments with every `${...}` reference replaced by its value.
        checked: whether the commands that the task expects to succeed have done so.
    """

    __slots__ = ("_context", "_results", "_run", "_task", "arguments", "attempt_id", "checked")

    def __init__(self, run: ObservedRun, task: Task, attempt_id: AttemptId) -> None:
        self._run = run
        self._task = task
        self.attempt_id = attempt_id
        self.arguments: JsonObject = task.arguments
        self.checked = False
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
    def directory(self) -> str:
        """The absolute path of the folder in which tools work; empty if it is not known."""
        return self._run._lifecycle.opening.directory

    @property
    def results(self) -> Mapping[str, Any]:
        """Outputs of finished tasks by id.

        The output of a replacement is found under the id of the original task.

        Containers are this attempt's own copies, other objects are shared. A `KeyError` says why
        there is no output.
        """
        # Made on first use: most work reads neither results nor the context.
        if self._results is None:
            self._results = CopyOnRead(self._run.live.results)
        return self._results

    @property
    def context(self) -> Mapping[str, JsonValue]:
        """Context of the run as it is now; arrays and objects are copies, see `change_context`.

        Each key that the work reads is recorded with the result, which is stale once one of them
        changes.
        """
        if self._context is None:
            live = self._run.live
            entry = live.entry(self._task.id)
            reads: dict[str, int] = {}
            # What an attempt reads after it was given up is not recorded.
            if entry.log.current == self.attempt_id:
                if entry.reads.keys is None:
                    entry.reads.keys = reads
                reads = entry.reads.keys
            self._context = CopyOnRead(
                live.context,
                lambda key: reads.setdefault(str(key), live.staleness.history.version),
                live.masked.context,
            )
        return self._context

    @property
    def tool(self) -> ToolSpec | None:
        """The tool of the task, if the plan describes it."""
        return self._run.live.tool_of(self._task)

    @property
    def confirms(self) -> bool:
        """Whether this attempt only confirms what the task's own tool said or did.

        Its task then names another tool, see `agrees_with` and `confirm`.
        """
        return self._task.tool != self._run.live.entry(self._task.id).task.tool

    @property
    def feedback(self) -> str:
        """Feedback of a judge that caused this attempt.

        Empty if the task runs for another reason.
        """
        return self._run.live.entry(self._task.id).log.feedback

    @property
    def continuations(self) -> int:
        """Number of times that a judge had the task run again."""
        return self._run.live.entry(self._task.id).log.continuations

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt at the same call, so a service can recognise a repetition.

        It changes with the tool, with the arguments, and with the goal if the tool gets one. It
        also changes after each feedback of a judge, because the work is done again.
        """
        return self._run.live.entry(self._task.id).call_key(self._run.id)

    def add_secret(self, value: str) -> None:
        """Mask a value, such as a token that was received, in everything that leaves the run."""
        self._run.add_secret(value)

    def charge(self, *, calls: int = 0, tokens: int = 0, money: float = 0.0) -> None:
        """Count usage against the budget."""
        self._run.charge(Usage(calls, tokens, money), attempt_id=self.attempt_id)

    def change_context(
        self, changes: Mapping[str, JsonValue], *, removed: Sequence[str] = ()
    ) -> None:
        """Report changed or removed values of the context.

        They do not make the result of this attempt stale.
        """
        self._run._change_context(changes, removed, self.attempt_id)

    def observe(self, holds: Sequence[str] = (), ceased: Sequence[str] = ()) -> None:
        """Report facts that hold, and facts that no longer hold."""
        self._run.observe(holds, ceased)

    def change_resource(
        self,
        name: str,
        *,
        capacity: float | None = None,
        available: bool | None = None,
        reason: str = "",
    ) -> None:
        """Report the new capacity of a resource, or whether a tool is available, and why."""
        self._run.change_resource(name, capacity=capacity, available=available, reason=reason)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        at_work = self._run._lifecycle.attempts.at_work
        thread = object()
        at_work[thread] = self.attempt_id
        try:
            yield
        finally:
            del at_work[thread]

    def record_checked(self) -> None:
        """Report that the work has run the commands of `expect`, and that they succeeded."""
        self.checked = True

    def record_process(self, group: int) -> None:
        """Journal a process group that the work started; it is killed if this process dies."""
        self._run._record_process(self.attempt_id, group)


ResultT = TypeVar("ResultT")

_current_attempt: Final = ContextVar[TaskContext | None]("replanning.current_attempt", default=None)


def current_attempt() -> TaskContext | None:
    """Return the context of the current attempt; None outside of one.

    The work of a task and the functions that it calls see it, also in threads that anyio or asyncio
    start for them. Its `idempotency_key` lets a service recognise a repeated call.
    """
    return _current_attempt.get()


@contextmanager
def as_current_attempt(context: TaskContext | None) -> Iterator[None]:
    """Make this the current attempt in the block, in a thread that executes it for another."""
    # The threads of a pool execute many attempts in turn, so the earlier one comes back.
    before = _current_attempt.set(context)
    try:
        yield
    finally:
        _current_attempt.reset(before)


async def run_in_thread(
    work: Callable[[], ResultT], limiter: anyio.CapacityLimiter | None = None
) -> ResultT:
    """Run work in a thread and return its result; leave the thread when the attempt is cancelled.

    A thread cannot be stopped. Until it ends, the attempt counts as at work, because it may still
    take effect.

    Args:
        work: is called in the thread.
        limiter: of the threads; by default that of anyio.
    """
    context = _current_attempt.get()

    def noted() -> ResultT:
        if not isinstance(context, TaskContext):  # such as the context in a worker of Temporal
            return work()
        with context._at_work():
            return work()

    return await anyio.to_thread.run_sync(noted, abandon_on_cancel=True, limiter=limiter)


Work = Callable[[Task, TaskContext], Awaitable[object]]
"""Executes one task: returns its output, raises when it fails."""


@runtime_checkable
class TypedWork(Protocol):
    """Work that knows the functions behind tools, and with them the types of their outputs."""

    async def return_types(self, tools: Iterable[ToolSpec]) -> Mapping[str, TypeAdapter[Any]]:
        """Return the useful return annotations of tools, by name."""


def validate_work(work: Callable[..., object], max_concurrency: int = 1) -> None:
    """Refuse work that no worker can run; otherwise every task would fail and be replanned.

    Args:
        work: an async function of a task and its context. A lambda, a callable object and a
            function annotated as returning an awaitable are not checked.
        max_concurrency: the number of workers.

    Raises:
        TypeError: the work is a function that is not async.
        ValueError: there would be no worker.
    """
    if max_concurrency < 1:
        raise ValueError(f"max_concurrency is {max_concurrency}; at least one worker is needed")
    # A partial is no routine: the check below would pass whatever function it holds.
    if isinstance(work, partial):
        work = work.func
    function = inspect.unwrap(work)
    is_plain = inspect.isroutine(function) and not inspect.iscoroutinefunction(function)
    returned = str(getattr(function, "__annotations__", {}).get("return", ""))
    is_trusted = any(word in returned for word in ("Awaitable", "Coroutine", "Future"))
    if is_plain and not is_trusted and function.__name__ != "<lambda>":
        raise TypeError(
            f"work is {function.__qualname__!r}, which is not async; write `async def`, and run "
            "what blocks with `await anyio.to_thread.run_sync(…)`"
        )


@dataclass(slots=True, eq=False, repr=False)
class Attempt:
    """One execution of a task: `async with run.attempt(task) as attempt: attempt.output = ...`.

    An exception of the body is a failure and goes no further; KeyboardInterrupt, SystemExit and
    cancellation are recorded as an interruption and propagate.

    If the attempt may not start (the run has ended, its journal takes no records, or the task was
    removed from the plan), the body has no `context` and is cancelled at its first checkpoint.

    Attributes:
        run: the run.
        task: the task.
        claimed: the task in the live plan, if it was just claimed.
        started: the id of this attempt, once it was started.
        options: the options of its worker or caller.
        scope: the cancel scope of the attempt.
        id: the id of this attempt.
        output: assigned by the body.
        cancelled: whether nothing that the body still reports is accepted.
        asking: the second tool that is verifying the output now; empty if none is.
        verified: whether the other tools that must agree have done so.
        error: the exception of a body that failed, or the unexpected output.
    """

    run: ObservedRun
    task: Task
    claimed: TaskEntry | None = None
    started: AttemptId | None = None
    options: AttemptOptions = _DEFAULT_OPTIONS
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    id: AttemptId = field(default=_NOT_STARTED, init=False)
    output: object = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)
    cancelled: bool = field(default=False, init=False)
    asking: str = field(default="", init=False)
    verified: bool = field(default=False, init=False)
    _context: TaskContext | None = field(default=None, init=False)
    _before: TaskContext | None = field(default=None, init=False)
    _token: Token[Context] | None = field(default=None, init=False)

    def __repr__(self) -> str:
        return f"<Attempt {self.id or 'not started'} at {self.task.id!r}>"

    @property
    def context(self) -> TaskContext:
        """The context of this attempt, passed to the work together with the task.

        Raises:
            NotRunning: the attempt could not be started.
        """
        if self._context is None:
            raise NotRunning(
                f"no attempt at {self.task.id!r} was started, because it may not run any more; do "
                "nothing"
            )
        return self._context

    @property
    def idempotency_key(self) -> str:
        """The key of the call, see `TaskContext.idempotency_key`."""
        return self.context.idempotency_key

    def charge(self, *, calls: int = 0, tokens: int = 0, money: float = 0.0) -> None:
        """Count usage against the budget."""
        self.context.charge(calls=calls, tokens=tokens, money=money)

    @property
    def checked(self) -> bool:
        """Whether the commands that the task expects to succeed have done so."""
        return self.context.checked

    async def verify(self, work: Work) -> None:
        """Have the other tools that must agree (`agrees_with`) verify the output.

        They are called with the same arguments within this attempt: its deadline holds for all
        calls, and a cancellation ends them. The journal has one attempt, because the calls only
        read: a resumed run loses nothing if it makes them again. This method repeats none of them;
        the retries of the task repeat all.

        Args:
            work: executes the tools, as it executed the tool of the task.

        Raises:
            UnexpectedOutput: the outputs differ.
            UnverifiedOutput: another tool failed, or did not answer in time.
        """
        if self.cancelled:
            return  # the body continued after its time was up, and its output is not accepted
        attempts = self.run._lifecycle.attempts
        entry = self.run.live.entry(self.task.id)
        if entry.log.doubt is not None:
            return  # what was asked is whether the task was done
        agreements = attempts.outputs.agreements(entry, self.output)
        if agreements:
            # An output that is wrong anyway needs no second opinion; the report says why.
            if attempts.outputs.unexpected(
                entry,
                self.output,
                self.options.value_of,
                verified=True,
                checked=self.checked,
            ):
                return
        for agreement in agreements:
            self.asking = agreement.tool
            try:
                other = await self._ask(agreement.tool, work)
            finally:
                self.asking = ""
            differs = attempts.outputs.disagreement(
                entry, agreement, self.output, other, self.options.value_of
            )
            if differs is not None:
                raise differs
        self.verified = True

    async def _ask(self, name: str, work: Work) -> object:
        """Call another tool with the arguments of the task, and return its output.

        Raises:
            UnverifiedOutput: there is none.
        """
        life = self.run._lifecycle
        live = life.live
        problem = confirmation_problem(name, self.task.tool, live.tools)
        if problem:
            raise UnverifiedOutput(f"it cannot be verified: {problem}", self.output)
        # A copy, because the work may have changed its own arguments.
        arguments = copy_json(live.sent_arguments(live.entry(self.task.id)))
        # The expectations of the task were checked with its own tool.
        update = {"tool": name, "arguments": arguments, "expect": None}
        task = self.task.model_copy(update=update)
        context = TaskContext(self.run, task, self.id)
        life.spans.record_asked(self.id, name)
        other: object = None
        alarm: Alarm | None = None
        timeout = live.tools[name].timeout
        with anyio.CancelScope() as scope, as_current_attempt(context):
            if timeout is not None:
                alarm = life.timer.call_at(life.clock.now() + timeout, scope.cancel)
            try:
                other = await isolate(work, task, context)
            except self.options.passes:
                raise
            except Exception as error:
                raise UnverifiedOutput(
                    f"{name!r} was to verify it, and failed: {failure_from(error)}", self.output
                ) from error
            finally:
                if alarm is not None:
                    alarm.cancel()
        if scope.cancelled_caught:
            assert timeout is not None, "it has cancelled the scope"
            raise UnverifiedOutput(
                f"{name!r} has not verified it within its {format_duration(timeout)}", self.output
            )
        return other

    def cancel(self) -> None:
        """Stop the body; later reports of it are ignored."""
        # Set first: the body may report its end before the loop has cancelled its scope.
        self.cancelled = True
        self.run._lifecycle.loop.call(self.scope.cancel)

    async def __aenter__(self) -> Self:
        life = self.run._lifecycle
        if self.started is not None:
            self.id = self.started
            life.attempts.running[self.id] = life.live.entry(self.task.id), self
        elif self.claimed is not None:
            # While the store fails it starts later, if it still may.
            try:
                self.id = life.attempts.start(self.claimed, self)
                self.started = self.id
            except StoreError:
                pass
        if self.started is None and await life.attempts.start_when_possible(self):
            self.started = self.id
        if not self.options.in_scope_of_worker:
            self.scope.__enter__()
        if self.started is None:
            # An `async with` cannot skip its body, which therefore ends at its first checkpoint.
            self.cancel()
        self._token = life.spans.attach_attempt(self.id)
        self._before = _current_attempt.get()
        if self.started is not None:
            self._context = TaskContext(self.run, self.task, self.id)
            _current_attempt.set(self._context)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Report how the body ended, and return whether its exception is swallowed.

        The cases, in order: its reports are no longer accepted; it returned; it raised control flow
        of a framework, which propagates; it failed, also by a cancellation that the library did not
        cause; it was cancelled, or the program ends.
        """
        life = self.run._lifecycle
        if self._token is not None:
            life.spans.detach(self._token)
        # Set, not reset: a reset fails where the body is left in another context.
        _current_attempt.set(self._before)
        swallowed = False
        if not self.options.in_scope_of_worker:
            try:
                swallowed = bool(self.scope.__exit__(kind, error, trace))
            except Exception as rest:  # noqa: BLE001 - of whatever the body raised
                # The scope has removed its cancellation from a group; this is the rest.
                error = rest
        if self.cancelled:
            life.attempts.work_stopped(self.id)
            if error is None or swallowed:
                return True
            if self.options.in_scope_of_worker:
                if isinstance(error, BaseExceptionGroup):
                    error = error.split(anyio.get_cancelled_exc_class())[1]
                if error is None or isinstance(error, anyio.get_cancelled_exc_class()):
                    return False  # the worker's scope takes it
        elif error is None:
            self.error = life.attempts.succeeded(self.id, self.output)
            return True
        assert error is not None
        # Control flow of a framework, such as a handoff: the call is made again, and not in doubt.
        if isinstance(error, self.options.passes):
            life.attempts.interrupted(self.id, f"{type(error).__name__} in the worker", again=True)
            return False
        is_cancellation = isinstance(error, anyio.get_cancelled_exc_class())
        if is_cancellation and self.options.in_own_task and not is_cancelled():
            error = CancelledWithin(CancelledWithin.MESSAGE)
        if isinstance(error, Exception):
            # Without an attempt nothing can have failed: the body only met its cancellation.
            if self.started is not None:
                life.attempts.failed(self.id, error)
                self.error = error
            return True
        if not self.cancelled:
            # The call is in doubt: a request may still arrive, and a thread left behind keeps running.
            life.attempts.interrupted(self.id, f"{type(error).__name__} in the worker")
        return False
