"""One execution of one task, as the code that executes it sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Never, Self

import anyio

from replanning._containment import CancelledWithin, is_cancelled, message_of
from replanning._errors import NotAccepted, NotRunning, StoreError, TransientError
from replanning._ids import AttemptId
from replanning._observations import Failure, Usage
from replanning._plan import JsonObject, JsonValue, Task, ToolSpec
from replanning._results import Own

if TYPE_CHECKING:
    from replanning._entries import Entry
    from replanning._run import PlanRun

_MAX_MESSAGE = 8_000
CONTINUED: Final = "#continued-"
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
            self._results = Own(self._run.live.results)
        return self._results

    @property
    def context(self) -> Mapping[str, JsonValue]:
        """The context of the run now; what is done to an array or object in it changes nothing, see `change_context`."""
        if self._context is None:
            self._context = Own(self._run.live.context)
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
    def continued(self) -> int:
        """How often a judge has had the task run again."""
        return self._run.live.entry(self._task.id).continued

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt at the task in this run, so that a service can recognise a repetition.

        It is another after each feedback of a judge: what is not finished is to be done anew.
        """
        continued = self.continued
        return f"{self._run.id}/{self._task.id}{f'{CONTINUED}{continued}' if continued else ''}"

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

    def note_process(self, group: int) -> None:
        """Journal the process group that the work started, to be killed if this process dies."""
        self._run._note_process(self.attempt_id, group)


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

    __slots__ = ("_refused", "_run", "_scope", "_token", "cancelled", "context", "id", "output", "task")

    def __init__(self, run: PlanRun, task: Task) -> None:
        self._run = run
        self.task = task
        self.id = _NOT_STARTED
        self.output: object = None
        self.cancelled = False
        self.context: TaskContext
        self._refused = False
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
        started = self._run._begin(self) or await self._run._begin_later(self)
        self._scope.__enter__()
        if started:
            self.context = TaskContext(self._run, self.task, self.id)
        else:
            self._refused = True
            self.cancel()
        self._token = self._run._spans.enter(self.id)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._token is not None:
            self._run._spans.leave(self._token)
        swallowed = self._scope.__exit__(kind, error, trace)
        if error is None or (swallowed and self.cancelled):
            if not self.cancelled:
                self._run.succeeded(self.id, self.output)
            return True
        if isinstance(error, Exception):
            if not self._refused:
                self._run.failed(self.id, error)
            return True
        self._run._interrupted(self.id, f"{type(error).__name__} in the worker")
        return False


def failure_from(error: BaseException | str) -> Failure:
    """The record of an exception; a group of exceptions is one failure, transient if all its parts are."""
    if isinstance(error, str):
        return Failure("Error", _bounded(error))
    message = message_of(error)
    if isinstance(error, NotAccepted):
        return Failure("NotAccepted", _bounded(message), kind=error.kind)
    if isinstance(error, BaseExceptionGroup):
        parts = [failure_from(part) for part in error.exceptions]
        message = f"{message}: " + "; ".join(f"{part.type}: {part.message}" for part in parts)
        return Failure(type(error).__name__, _bounded(message), all(part.transient for part in parts))
    return Failure(type(error).__name__, _bounded(message), is_transient(error))


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


def _bounded(message: str) -> str:
    if len(message) <= _MAX_MESSAGE:
        return message
    half = _MAX_MESSAGE // 2
    return f"{message[:half]}\n[... {len(message) - 2 * half} characters left out ...]\n{message[-half:]}"


class ReadyTasks:
    """Hands out tasks the moment they may run; ends when the run does. Each worker takes one of its own.

    A task that was handed out and not attempted goes back into the queue on the next pull, or when this
    object is dropped.
    """

    __slots__ = ("_claim", "_entry", "_life", "_run")

    def __init__(self, run: PlanRun) -> None:
        self._run = run
        self._life = run._life
        self._entry: Entry | None = None
        self._claim = 0

    def __repr__(self) -> str:
        return f"<ReadyTasks of {self._run!r}>"

    def __aiter__(self) -> ReadyTasks:
        return self

    async def __anext__(self) -> Task:
        task = self.now() or await self.later()
        if task is None:
            raise StopAsyncIteration
        return task

    def now(self) -> Task | None:
        """The next task, if there is one and the event loop need not have a turn first."""
        self._give_back()
        return self._hand_out(self._life.next_now())

    async def later(self) -> Task | None:
        """The next task as soon as there is one; None when the run has ended."""
        return self._hand_out(await self._life.next_task())

    def _hand_out(self, found: tuple[Entry, Task] | None) -> Task | None:
        if found is None:
            return None
        self._entry, task = found
        self._claim = self._entry.claimed
        return task

    def _give_back(self) -> None:
        entry = self._entry
        if entry is not None and entry.claimed == self._claim:
            self._life.give_back(entry, self._claim)
        self._entry = None

    def __del__(self) -> None:
        self._give_back()


class Worker:
    """Pulls and executes tasks one after another, as an `async for` over `ready` with an `attempt` for each would.

    One scope serves for all of its attempts until one of them is cancelled, which is cheaper than one for each.

    Args:
        run: where tasks come from.
        work: executes one task: returns its output, raises when it fails.
        apart: whether it runs in a task of ours, so that a cancellation that is not ours is the work's own failure.
    """

    __slots__ = ("_apart", "_cancelled", "_run", "_scope", "_work", "id", "task")

    def __init__(self, run: PlanRun, work: Work, *, apart: bool = False) -> None:
        self._run = run
        self._apart = apart
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
                more = await self._serve()

    async def _serve(self) -> bool:
        """Execute until an attempt was cancelled; false when the run has ended."""
        run, life, spans, work = self._run, self._run._life, self._run._spans, self._work
        while (found := life.next_now() or await life.next_task()) is not None:
            entry, self.task = found
            try:
                self.id = run._start(entry, self)
            except StoreError:
                if not await self._start_later(entry):
                    continue
            token = spans.enter(self.id)
            try:
                try:
                    output = await work(self.task, TaskContext(run, self.task, self.id))
                finally:
                    if token is not None:
                        spans.leave(token)
            except BaseException as error:
                if not self._failed(error):
                    raise
            else:
                if not self._cancelled:
                    run.succeeded(self.id, output)
            if self._cancelled:
                return True
        return False

    def _failed(self, error: BaseException) -> bool:
        """Report what work raised; false where it is no failure of the work, but somebody cuts it off."""
        if isinstance(error, Exception):
            self._run.failed(self.id, error)
            return True
        if self._apart and isinstance(error, anyio.get_cancelled_exc_class()) and not is_cancelled():
            self._run.failed(self.id, CancelledWithin(CancelledWithin.WHAT))
            return True
        if not self._cancelled:
            self._run._interrupted(self.id, f"{type(error).__name__} in the worker")
        return False

    async def _start_later(self, entry: Entry) -> bool:
        """Wait for the store, then start; what may not be executed any more is given back."""
        claim, self.id = entry.claimed, _NOT_STARTED
        try:
            return await self._run._begin_later(self)
        finally:
            self._run._life.give_back(entry, claim)
