"""Execution of tasks: pulling them, the context that work gets, and attempts that report how it ended."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Final, Never, Protocol, Self

import anyio

from replanning.errors import NotRunning, StoreError
from replanning.journal.records import Usage
from replanning.live.entries import TaskEntry
from replanning.live.graph import CopyOnRead
from replanning.live.plan import LivePlan
from replanning.plan.tasks import Task, ToolSpec
from replanning.plan.types import AttemptId, JsonObject, JsonValue, RunId
from replanning.run.isolation import CancelledWithin, is_cancelled
from replanning.run.lifecycle import Lifecycle

CONTINUATION_SUFFIX: Final = "#continued-"
"""Precedes, in an idempotency key, the number of times that a judge has had the task run again."""

_NOT_STARTED: Final = AttemptId("")


class ObservedRun(Protocol):
    """The part of a run that work in one of its attempts uses."""

    id: RunId
    _lifecycle: Lifecycle

    @property
    def live(self) -> LivePlan:
        """The live plan."""
        ...

    def observe(self, holds: Sequence[str] = (), ceased: Sequence[str] = ()) -> None:
        """Report facts."""
        ...

    def change_context(self, changes: Mapping[str, JsonValue], *, removed: Sequence[str] = ()) -> None:
        """Report values of the context."""
        ...

    def change_resource(
        self, name: str, *, capacity: float | None = None, available: bool | None = None, reason: str = ""
    ) -> None:
        """Report the capacity or availability of a resource or tool."""
        ...


class TaskContext:
    """The context of an attempt, which work gets beside its task.

    Attributes:
        attempt_id: the id of the attempt.
        arguments: the task's arguments with every `${...}` reference replaced by its value.
    """

    __slots__ = ("_context", "_results", "_run", "_task", "arguments", "attempt_id")

    def __init__(self, run: ObservedRun, task: Task, attempt_id: AttemptId) -> None:
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
        """Outputs of finished tasks by id; the output of a replacement is found under the id of the original task.

        Arrays and objects are this attempt's own copies.
        """
        if self._results is None:
            self._results = CopyOnRead(self._run.live.results)
        return self._results

    @property
    def context(self) -> Mapping[str, JsonValue]:
        """The context of the run now; arrays and objects are copies, see `change_context`."""
        if self._context is None:
            self._context = CopyOnRead(self._run.live.context)
        return self._context

    @property
    def tool(self) -> ToolSpec | None:
        """The tool of the task, if the plan describes it."""
        return self._run.live.tools.get(self._entry.task.tool or "")

    @property
    def feedback(self) -> str:
        """The feedback of a judge on the previous attempt, if the task is run again because of it; else empty."""
        return self._entry.feedback

    @property
    def continuations(self) -> int:
        """The number of times that a judge has had the task run again."""
        return self._entry.continuations

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt at the task in this run, so that a service can recognise a repetition.

        It changes after each feedback of a judge: unfinished work is to be done anew.
        """
        continued = self.continuations
        return f"{self._run.id}/{self._task.id}{f'{CONTINUATION_SUFFIX}{continued}' if continued else ''}"

    @property
    def _entry(self) -> TaskEntry:
        return self._run.live.entry(self._task.id)

    def charge(self, *, calls: int = 0, tokens: int = 0, money: float = 0.0) -> None:
        """Count usage against the budget."""
        self._run._lifecycle.charge(Usage(calls, tokens, money), attempt_id=self.attempt_id)

    def change_context(self, changes: Mapping[str, JsonValue], *, removed: Sequence[str] = ()) -> None:
        """Report values of the context that have changed or are gone."""
        self._run.change_context(changes, removed=removed)

    def observe(self, holds: Sequence[str] = (), ceased: Sequence[str] = ()) -> None:
        """Report facts that hold, or hold no longer."""
        self._run.observe(holds, ceased)

    def change_resource(
        self, name: str, *, capacity: float | None = None, available: bool | None = None, reason: str = ""
    ) -> None:
        """Report that a resource has another capacity, or that a tool is (un)available, and why."""
        self._run.change_resource(name, capacity=capacity, available=available, reason=reason)

    def record_process(self, group: int) -> None:
        """Journal a process group that the work started, to be killed if this process dies."""
        self._run._lifecycle.record_process(self.attempt_id, group)


Work = Callable[[Task, TaskContext], Awaitable[object]]
"""Executes one task: returns its output, raises when it fails."""


def validate_work(work: object) -> None:
    """Refuse work that is not an async function before anything runs; otherwise every task would fail of it.

    A lambda, and a function annotated as returning an awaitable, are accepted.

    Raises:
        TypeError: it cannot be called, or is a function that is not async.
    """
    function = inspect.unwrap(work) if callable(work) else None
    while isinstance(function, partial):
        function = inspect.unwrap(function.func)
    if function is None:
        raise TypeError(f"work is {work!r}; expected an async function of a task and its context")
    if not inspect.isroutine(function):
        function = getattr(type(function), "__call__", function)  # noqa: B004 # a call would use it
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not inspect.isfunction(function) or inspect.iscoroutinefunction(function) or function.__name__ == "<lambda>":
        return
    returned = str(getattr(function, "__annotations__", {}).get("return", ""))
    if not any(word in returned for word in ("Awaitable", "Coroutine", "Future")):
        raise TypeError(
            f"work is {function.__qualname__!r}, which is not async; write `async def`, and run what blocks with"
            " `await anyio.to_thread.run_sync(…)`"
        )


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

    def __init__(self, run: ObservedRun, task: Task) -> None:
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
            raise NotRunning(f"no attempt at {self.task.id!r} was started, because it may not run any more; do nothing")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

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
        self._scope.cancel()

    async def __aenter__(self) -> Self:
        life = self._lifecycle
        started = life.try_start(self) or await life.start_when_store_recovers(self)
        self._scope.__enter__()
        if started:
            self.context = TaskContext(self._run, self.task, self.id)
        else:
            self._not_started = True
            self.cancel()
        self._token = life.spans.attach_attempt(self.id)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        life = self._lifecycle
        if self._token is not None:
            life.spans.detach(self._token)
        swallowed = self._scope.__exit__(kind, error, trace)
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

    A task that was handed out and not attempted returns to the queue on the next pull, or when this
    object is dropped.
    """

    __slots__ = ("_claim", "_entry", "_lifecycle")

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._entry: TaskEntry | None = None
        self._claim = 0

    def __repr__(self) -> str:
        return f"<ReadyTasks of {self._lifecycle.run_id!r}>"

    def __aiter__(self) -> ReadyTasks:
        return self

    async def __anext__(self) -> Task:
        self._requeue()
        claimed = self._lifecycle.next_task_nowait() or await self._lifecycle.next_task()
        if claimed is None:
            raise StopAsyncIteration
        self._entry, task = claimed
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
        in_own_task: whether the worker runs in a task of the library, so that a cancellation that the library did not
            cause is a failure of the work.
    """

    __slots__ = ("_cancelled", "_in_own_task", "_lifecycle", "_run", "_scope", "_work", "id", "task")

    def __init__(self, run: ObservedRun, work: Work, *, in_own_task: bool = False) -> None:
        self._run = run
        self._lifecycle = run._lifecycle
        self._in_own_task = in_own_task
        self._work = work
        self._scope = self._lifecycle.scope_type()
        self._cancelled = False
        self.id = _NOT_STARTED
        self.task: Task

    def __repr__(self) -> str:
        return f"<Worker of {self._run!r} at {self.id or 'nothing'}>"

    def cancel(self) -> None:
        """Stop the work; nothing that it still reports is accepted."""
        self._cancelled = True
        self._scope.cancel()

    async def run(self) -> None:
        """Work until the run ends."""
        more = True
        while more:
            self._cancelled = False
            self._scope = self._lifecycle.scope_type()
            with self._scope:
                more = await self._run_attempts()

    async def _run_attempts(self) -> bool:
        """Execute until an attempt was cancelled; false when the run has ended."""
        run, life, spans, work = self._run, self._lifecycle, self._lifecycle.spans, self._work
        while (claimed := life.next_task_nowait() or await life.next_task()) is not None:
            entry, self.task = claimed
            try:
                self.id = life.start(entry, self)
            except StoreError:
                claim, self.id = entry.claim, _NOT_STARTED
                try:
                    if not await life.start_when_store_recovers(self):
                        continue
                finally:
                    life.requeue(entry, claim)  # unless it was started
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
                    life.succeeded(self.id, output)
            if self._cancelled:
                return True
        return False

    def _report_failure(self, error: BaseException) -> bool:
        """Report an exception of work; false where it is not a failure of the work but a cancellation from outside."""
        if isinstance(error, Exception):
            self._lifecycle.failed(self.id, error)
            return True
        if self._in_own_task and isinstance(error, anyio.get_cancelled_exc_class()) and not is_cancelled():
            self._lifecycle.failed(self.id, CancelledWithin(CancelledWithin.MESSAGE))
            return True
        if not self._cancelled:
            self._lifecycle.interrupted(self.id, f"{type(error).__name__} in the worker")
        return False
