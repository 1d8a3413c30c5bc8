"""One execution of one task, as the code that executes it sees it."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, Never, Self

import anyio

from replanning.errors import NotAccepted, NotRunning, StoreError, TransientError
from replanning.journal.observations import Failure, Usage
from replanning.live.graph import CopyOnRead
from replanning.plan.tasks import Task, ToolSpec
from replanning.plan.types import AttemptId, JsonObject, JsonValue
from replanning.run.isolation import CancelledWithin, error_message, is_cancelled

if TYPE_CHECKING:
    from replanning.live.entries import TaskEntry
    from replanning.run.run import PlanRun


def validate_work(work: object) -> None:
    """Refuse what is no work before anything runs: afterwards every task would fail of it.

    A lambda, and a function that says that it returns something to be awaited, are taken at their word.

    Raises:
        TypeError: it cannot be called, or is a function that is not async.
    """
    function = inspect.unwrap(work) if callable(work) else None
    while isinstance(function, partial):
        function = inspect.unwrap(function.func)
    if function is None:
        raise TypeError(f"work is {work!r}; expected an async function of a task and its context")
    if not inspect.isroutine(function):
        function = getattr(type(function), "__call__", function)  # noqa: B004 # what a call would use
    function = inspect.unwrap(getattr(function, "__func__", function))
    returned = str(getattr(function, "__annotations__", {}).get("return", ""))
    told = any(word in returned for word in ("Awaitable", "Coroutine", "Future"))
    if inspect.isfunction(function) and not (inspect.iscoroutinefunction(function) or told or _is_lambda(function)):
        raise TypeError(
            f"work is {function.__qualname__!r}, which is not async; write `async def`, and run what blocks with"
            " `await anyio.to_thread.run_sync(…)`"
        )


def _is_lambda(function: Callable[..., object]) -> bool:
    return function.__name__ == "<lambda>"


_MAX_MESSAGE_CHARS = 8_000

CONTINUATION_SUFFIX: Final = "#continued-"
"""Stands in an idempotency key before how often a judge has had the task run again."""

_NOT_STARTED: Final = AttemptId("")


class TaskContext:
    """What work gets beside its task.

    Attributes:
        attempt_id: the attempt this is.
        arguments: the task's arguments with every `${...}` reference replaced by its value.
    """

    __slots__ = ("_context", "_results", "_run", "_task", "arguments", "attempt_id")

    def __init__(self, run: PlanRun, task: Task, attempt_id: AttemptId) -> None:
        self._run = run
        self._task = task
        self.attempt_id = attempt_id
        self.arguments: JsonObject = task.arguments
        self._results: Mapping[str, JsonValue] | None = None
        self._context: Mapping[str, JsonValue] | None = None

    def __repr__(self) -> str:
        return f"<TaskContext of {self.attempt_id!r}>"

    @property
    def run_id(self) -> str:
        """The run that this attempt belongs to."""
        return self._run.id

    @property
    def results(self) -> Mapping[str, JsonValue]:
        """Outputs of finished tasks by id; what replaced a task is found under the id of what it replaced.

        Arrays and objects are this attempt's own: what it does to them is seen by nobody else.
        """
        if self._results is None:
            self._results = CopyOnRead(self._run.live.results)
        return self._results

    @property
    def context(self) -> Mapping[str, JsonValue]:
        """The context of the run now; what is done to an array or object in it changes nothing, see `change_context`."""
        if self._context is None:
            self._context = CopyOnRead(self._run.live.context)
        return self._context

    @property
    def tool(self) -> ToolSpec | None:
        """The tool of the task, where the plan describes it."""
        return self._run.live.tools.get(self._run.live.entry(self._task.id).task.tool or "")

    @property
    def feedback(self) -> str:
        """What a judge said of the attempt before, where the task is run again for it; else empty."""
        return self._run.live.entry(self._task.id).feedback

    @property
    def continuations(self) -> int:
        """How often a judge has had the task run again."""
        return self._run.live.entry(self._task.id).continuations

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt at the task in this run, so that a service can recognise a repetition.

        It is another after each feedback of a judge: what is not finished is to be done anew.
        """
        continued = self.continuations
        return f"{self._run.id}/{self._task.id}{f'{CONTINUATION_SUFFIX}{continued}' if continued else ''}"

    def charge(self, *, calls: int = 0, tokens: int = 0, money: float = 0.0) -> None:
        """Tell the budget what the work used."""
        self._run.charge(Usage(calls, tokens, money), attempt_id=self.attempt_id)

    def change_context(self, changes: Mapping[str, JsonValue], *, removed: Sequence[str] = ()) -> None:
        """Report values of the context that the work has found to be others, or gone."""
        self._run.change_context(changes, removed=removed)

    def observe(self, holds: Sequence[str] = (), ceased: Sequence[str] = ()) -> None:
        """Report facts that the work has seen to hold, or to hold no longer."""
        self._run.observe(holds, ceased)

    def change_resource(
        self, name: str, *, capacity: float | None = None, available: bool | None = None, reason: str = ""
    ) -> None:
        """Report that a resource has another capacity, or that a tool is (un)available, and why."""
        self._run.change_resource(name, capacity=capacity, available=available, reason=reason)

    def record_process(self, group: int) -> None:
        """Journal the process group that the work started, to be killed if this process dies."""
        self._run._record_process(self.attempt_id, group)


Work = Callable[[Task, TaskContext], Awaitable[object]]
"""Executes one task: returns its output, raises when it fails."""


class Attempt:
    """One execution of a task: `async with run.attempt(task) as attempt: attempt.output = ...`.

    An exception of the body is a failure and goes no further; KeyboardInterrupt, SystemExit and cancellation
    are recorded as an interruption and go on.

    Where the attempt may not start (the run has ended, its journal takes nothing, or the task was taken out of
    the plan meanwhile), the body is cancelled at its first checkpoint, and has no `context` until then.

    Attributes:
        task: the task.
        id: the id of this attempt.
        output: what the body assigns.
    """

    __slots__ = ("_not_started", "_run", "_scope", "_token", "cancelled", "context", "id", "output", "task")

    def __init__(self, run: PlanRun, task: Task) -> None:
        self._run = run
        self.task = task
        self.id = _NOT_STARTED
        self.output: object = None
        self.cancelled = False
        self.context: TaskContext
        self._not_started = False
        self._scope = run._scope_type()

    def __repr__(self) -> str:
        return f"<Attempt {self.id or 'not started'} at {self.task.id!r}>"

    def __getattr__(self, name: str) -> Never:
        # Reached only where `context` was not set, because the attempt could not be started.
        if name == "context":
            raise NotRunning(f"no attempt at {self.task.id!r} was started, because it may not run any more; do nothing")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt at the task in this run."""
        return self.context.idempotency_key

    def charge(self, *, calls: int = 0, tokens: int = 0, money: float = 0.0) -> None:
        """Tell the budget what the work used."""
        self.context.charge(calls=calls, tokens=tokens, money=money)

    def cancel(self) -> None:
        """Stop the body; nothing it still reports is taken."""
        self.cancelled = True
        self._scope.cancel()

    async def __aenter__(self) -> Self:
        started = self._run._try_start(self) or await self._run._start_when_store_recovers(self)
        self._scope.__enter__()
        if started:
            self.context = TaskContext(self._run, self.task, self.id)
        else:
            self._not_started = True
            self.cancel()
        self._token = self._run._spans.attach_attempt(self.id)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._token is not None:
            self._run._spans.detach(self._token)
        swallowed = self._scope.__exit__(kind, error, trace)
        if error is None or (swallowed and self.cancelled):
            if not self.cancelled:
                self._run.succeeded(self.id, self.output)
            return True
        if isinstance(error, Exception):
            if not self._not_started:
                self._run.failed(self.id, error)
            return True
        self._run._report_interrupted(self.id, f"{type(error).__name__} in the worker")
        return False


def failure_from(error: BaseException | str) -> Failure:
    """The record of an exception; a group of exceptions is one failure, transient if all its parts are."""
    if isinstance(error, str):
        return Failure("Error", _truncate_middle(error))
    message = error_message(error)
    if isinstance(error, NotAccepted):
        return Failure("NotAccepted", _truncate_middle(message), kind=error.kind)
    if isinstance(error, BaseExceptionGroup):
        parts = [failure_from(part) for part in error.exceptions]
        message = f"{message}: " + "; ".join(f"{part.type}: {part.message}" for part in parts)
        return Failure(type(error).__name__, _truncate_middle(message), all(part.transient for part in parts))
    return Failure(type(error).__name__, _truncate_middle(message), is_transient(error))


def is_transient(error: BaseException) -> bool:
    """Whether an error may pass: TransientError, connection errors, HTTP statuses 429 and 5xx, a failing store.

    Errors of other libraries are recognised by what they carry (`status_code`, also of their `response`, and
    connection errors as their cause), never by the words in them.
    """
    if isinstance(error, TransientError | ConnectionError | StoreError):
        return True
    status = getattr(error, "status_code", None)
    if status is None:
        status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status == 429 or 500 <= status <= 599
    return any(
        base.__name__ in _TRANSPORT_ERRORS and base.__module__.startswith(("httpx", "httpcore"))
        for base in type(error).__mro__
    )


_TRANSPORT_ERRORS = frozenset({"NetworkError", "ConnectTimeout", "PoolTimeout", "RemoteProtocolError"})


def _truncate_middle(message: str) -> str:
    if len(message) <= _MAX_MESSAGE_CHARS:
        return message
    half = _MAX_MESSAGE_CHARS // 2
    return f"{message[:half]}\n[... {len(message) - 2 * half} characters left out ...]\n{message[-half:]}"


class ReadyTasks:
    """Hands out tasks the moment they may run; ends when the run does. Each worker takes one of its own.

    A task that was handed out and not attempted goes back into the queue on the next pull, or when this
    object is dropped.
    """

    __slots__ = ("_claim", "_entry", "_lifecycle", "_run")

    def __init__(self, run: PlanRun) -> None:
        self._run = run
        self._lifecycle = run._lifecycle
        self._entry: TaskEntry | None = None
        self._claim = 0

    def __repr__(self) -> str:
        return f"<ReadyTasks of {self._run!r}>"

    def __aiter__(self) -> ReadyTasks:
        return self

    async def __anext__(self) -> Task:
        task = self.get_nowait() or await self.get()
        if task is None:
            raise StopAsyncIteration
        return task

    def get_nowait(self) -> Task | None:
        """The next task, if there is one and the event loop need not have a turn first."""
        self._requeue()
        return self._dispatch(self._lifecycle.next_task_nowait())

    async def get(self) -> Task | None:
        """The next task as soon as there is one; None when the run has ended."""
        return self._dispatch(await self._lifecycle.next_task())

    def _dispatch(self, found: tuple[TaskEntry, Task] | None) -> Task | None:
        if found is None:
            return None
        self._entry, task = found
        self._claim = self._entry.claim
        return task

    def _requeue(self) -> None:
        entry = self._entry
        if entry is not None and entry.claim == self._claim:
            self._lifecycle.requeue(entry, self._claim)
        self._entry = None

    def __del__(self) -> None:
        self._requeue()


class Worker:
    """Pulls and executes tasks one after another, as an `async for` over `ready` with an `attempt` for each would.

    One scope serves for all of its attempts until one of them is cancelled, which is cheaper than one for each.

    Args:
        run: where tasks come from.
        work: executes one task: returns its output, raises when it fails.
        apart: whether it runs in a task of ours, so that a cancellation that is not ours is the work's own failure.
    """

    __slots__ = ("_cancelled", "_in_own_task", "_run", "_scope", "_work", "id", "task")

    def __init__(self, run: PlanRun, work: Work, *, in_own_task: bool = False) -> None:
        self._run = run
        self._in_own_task = in_own_task
        self._work = work
        self._scope = run._scope_type()
        self._cancelled = False
        self.id = _NOT_STARTED
        self.task: Task

    def __repr__(self) -> str:
        return f"<Worker of {self._run!r} at {self.id or 'nothing'}>"

    def cancel(self) -> None:
        """Stop what is being executed; nothing it still reports is taken."""
        self._cancelled = True
        self._scope.cancel()

    async def run(self) -> None:
        """Work until the run ends."""
        more = True
        while more:
            self._cancelled = False
            self._scope = self._run._scope_type()
            with self._scope:
                more = await self._run_attempts()

    async def _run_attempts(self) -> bool:
        """Execute until an attempt was cancelled; false when the run has ended."""
        run, life, spans, work = self._run, self._run._lifecycle, self._run._spans, self._work
        while (found := life.next_task_nowait() or await life.next_task()) is not None:
            entry, self.task = found
            try:
                self.id = run._start(entry, self)
            except StoreError:
                if not await self._start_when_store_recovers(entry):
                    continue
            token = spans.attach_attempt(self.id)
            try:
                try:
                    output = await work(self.task, TaskContext(run, self.task, self.id))
                finally:
                    if token is not None:
                        spans.detach(token)
            except BaseException as error:
                if not self._report_failure(error):
                    raise
            else:
                if not self._cancelled:
                    run.succeeded(self.id, output)
            if self._cancelled:
                return True
        return False

    def _report_failure(self, error: BaseException) -> bool:
        """Report what work raised; false where it is no failure of the work, but somebody cuts it off."""
        if isinstance(error, Exception):
            self._run.failed(self.id, error)
            return True
        if self._in_own_task and isinstance(error, anyio.get_cancelled_exc_class()) and not is_cancelled():
            self._run.failed(self.id, CancelledWithin(CancelledWithin.MESSAGE))
            return True
        if not self._cancelled:
            self._run._report_interrupted(self.id, f"{type(error).__name__} in the worker")
        return False

    async def _start_when_store_recovers(self, entry: TaskEntry) -> bool:
        """Wait for the store, then start; what may not be executed any more is given back."""
        claim, self.id = entry.claim, _NOT_STARTED
        try:
            return await self._run._start_when_store_recovers(self)
        finally:
            self._run._lifecycle.requeue(entry, claim)
