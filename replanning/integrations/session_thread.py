"""Session on an event loop in a thread of its own, for frameworks that execute tools in threads."""

from __future__ import annotations

import asyncio  # noqa: TID251 - other threads wake its loop without waiting for it
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from queue import SimpleQueue
from threading import Lock, get_ident
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import sniffio
from anyio.from_thread import BlockingPortal, start_blocking_portal
from opentelemetry import context as otel

from replanning.engine.session import Execute, Session
from replanning.errors import NotRunning
from replanning.integrations.kit import Arguments, has_deadline
from replanning.run.attempt import as_current_attempt, current_attempt, run_in_thread

__all__ = ["ExecuteInThread", "SessionThread"]

ResultT = TypeVar("ResultT")

ExecuteInThread = Callable[[str, Arguments], object]
"""Executes a tool, given its name and its arguments, in the calling thread."""

_Work = Callable[[], Coroutine[Any, Any, None]]
"""Executes a tool in the caller's thread or task, and wakes the call."""


class SessionThread:
    """Session on an event loop in its own thread; its tools run in the threads that call them.

    Attributes:
        session: the session.
        calls: the active calls; only the thread of the session changes it.
    """

    session: Session

    def __init__(self, portal: BlockingPortal) -> None:
        self.calls = set[_Call]()
        self._portal = portal
        self._thread = portal.call(get_ident)
        self._loop = portal.call(asyncio.get_running_loop)
        self._lock = Lock()  # held while work is sent to the loop, which must not end before it
        self._is_closed = False

    @classmethod
    @contextmanager
    def open(cls, opened: AbstractAsyncContextManager[Session]) -> Iterator[SessionThread]:
        """Start the thread, and end it after the block; unfinished calls raise `NotRunning`.

        Args:
            opened: the session that `ReplanningEngine.session` returns.
        """
        with (
            cls.begin() as thread,
            thread._portal.wrap_async_context_manager(opened) as thread.session,
        ):
            yield thread

    @classmethod
    @contextmanager
    def begin(cls) -> Iterator[SessionThread]:
        """Start the thread without a session; a function called in it opens and sets one."""
        with start_blocking_portal(name="replanning") as portal:
            thread = cls(portal)
            try:
                yield thread
            finally:
                with thread._lock:
                    thread._is_closed = True
                portal.call(thread._cancel_calls)
            # After an exception the portal stops by itself.
            portal.call(portal.stop, True)

    async def _cancel_calls(self) -> None:
        for call in tuple(self.calls):
            await call.cancel()

    def call(
        self,
        function: Callable[[Execute], Coroutine[Any, Any, ResultT]],
        execute: ExecuteInThread | None = None,
    ) -> ResultT:
        """Await an async function in the session's thread; execute its tools in this thread.

        A tool with a timeout is executed in a third thread, where it can be abandoned. A
        KeyboardInterrupt in this thread, like any exception that ends the program, cancels the
        function.

        Args:
            function: receives the `execute` that `Session.invoke` takes.
            execute: executes a tool; None if the function does not need it.

        Raises:
            Exception: raised by the function.
            NotRunning: the block was left.
            RuntimeError: this is the thread of the session, which cannot wait for itself.
        """
        call = _ThreadCall(self, function, execute)
        try:
            self.post(call.begin)
            while (work := call.inbox.get()) is not None:
                _run_without_loop(work())
        except BaseException:
            # Wait until the cancelled call has ended, so that it can be repeated.
            with suppress(NotRunning, RuntimeError, CancelledError):
                self.start(call.cancel).result()
            raise
        result: ResultT = call.result()
        return result

    async def acall(
        self, function: Callable[[Execute], Coroutine[Any, Any, ResultT]], execute: Execute
    ) -> ResultT:
        """Like `call`, from an async task of another event loop; its tools run in that task.

        Args:
            function: as `call` takes it.
            execute: executes a tool in the caller's async task.

        Raises:
            Exception: as `call`.
        """
        call = _AsyncCall(self, function, execute)
        try:
            self.post(call.begin)
            while (work := await call.inbox.get()) is not None:
                with anyio.CancelScope() as call.scope:
                    await work()
        except BaseException:
            with anyio.CancelScope(shield=True), suppress(NotRunning, RuntimeError, CancelledError):
                await asyncio.wrap_future(self.start(call.cancel))
            raise
        result: ResultT = call.result()
        return result

    def start(self, function: Callable[[], Any]) -> Future[Any]:
        """Start a function in the thread of the session, and return its future.

        Raises:
            NotRunning: the block was left.
            RuntimeError: this is the thread of the session.
        """
        with self._lock:
            self._require_open()
            return self._portal.start_task_soon(function)

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Schedule a synchronous function in the thread of the session, without waiting for it.

        Raises:
            NotRunning: the block was left.
            RuntimeError: this is the thread of the session.
        """
        with self._lock:
            self._require_open()
            self._loop.call_soon_threadsafe(function, *args)

    def _require_open(self) -> None:
        if get_ident() == self._thread:
            raise RuntimeError(
                "called from the thread of the session, which cannot wait for itself"
            )
        if self._is_closed:
            raise NotRunning("the session has ended")


def _run_without_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never waits, in a thread that need not have an event loop."""
    with suppress(StopIteration):
        work.send(None)


class _Call:
    """Call from another thread: the session's loop awaits the function, the caller runs the tools.

    Args:
        thread: the thread of the session.
        function: receives `_hand_over` to execute tools.
        execute: executes a tool in the caller.
        put: sends work to the caller; None at the end.
    """

    def __init__(
        self,
        thread: SessionThread,
        function: Callable[[Execute], Coroutine[Any, Any, Any]],
        execute: Execute,
        put: Callable[[_Work | None], object],
    ) -> None:
        self._thread = thread
        self._function = function
        self._execute = execute
        self._put = put
        self._task: asyncio.Task[None] | None = None
        self._output: Any = None
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Start the async task of the call in the session's thread, in the caller's context."""
        # The caller may run another kind of event loop.
        sniffio.current_async_library_cvar.set("asyncio")
        self._task = asyncio.create_task(self._run())
        self._thread.calls.add(self)

    async def _run(self) -> None:
        try:
            self._output = await self._function(self._hand_over)
        except BaseException as error:  # noqa: BLE001 # it is raised in the caller
            self._error = error
        self._thread.calls.discard(self)
        self._put(None)

    async def cancel(self) -> None:
        """Cancel the function and wait for its end, unless it was never started."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def result(self) -> Any:
        """Return the result of the finished function.

        Raises:
            Exception: raised by the function.
            NotRunning: the block was left.
        """
        if isinstance(self._error, asyncio.CancelledError):
            raise NotRunning("the session ended before the call did")
        if self._error is not None:
            raise self._error
        return self._output

    async def _hand_over(self, name: str, arguments: Arguments) -> object:
        """Have the caller execute a tool, and wait for its output."""
        attempt = current_attempt()
        spans = otel.get_current()
        executed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        output: object = None
        failure: Exception | None = None

        def wake() -> None:
            if not executed.done():
                executed.set_result(None)

        async def work() -> None:
            nonlocal output, failure
            if executed.done():
                return  # it was cancelled before the caller got to it
            token = otel.attach(spans)
            try:
                with as_current_attempt(attempt):
                    output = await self._execute(name, arguments)
            except Exception as error:  # noqa: BLE001 # it is raised in the session
                failure = error
            finally:
                otel.detach(token)
            with suppress(NotRunning):
                self._thread.post(wake)

        self._put(work)
        await executed
        if failure is not None:
            raise failure
        return output


class _ThreadCall(_Call):
    """Call from a thread that executes the tools; one with a deadline runs in a third thread.

    Attributes:
        inbox: work for the calling thread; None at the end.
    """

    def __init__(
        self,
        thread: SessionThread,
        function: Callable[[Execute], Coroutine[Any, Any, Any]],
        execute: ExecuteInThread | None,
    ) -> None:
        async def execute_in_coroutine(name: str, arguments: Arguments) -> object:
            return self._execute_now(name, arguments)

        self.inbox = SimpleQueue[_Work | None]()
        self._execute_in_thread = execute
        super().__init__(thread, function, execute_in_coroutine, self.inbox.put)

    def _execute_now(self, name: str, arguments: Arguments) -> object:
        assert self._execute_in_thread is not None
        return self._execute_in_thread(name, arguments)

    async def _hand_over(self, name: str, arguments: Arguments) -> object:
        if not has_deadline(self._thread.session):
            return await super()._hand_over(name, arguments)
        exits = list[BaseException]()

        def work() -> object:
            try:
                return self._execute_now(name, arguments)
            except Exception:
                raise
            except BaseException as error:  # noqa: BLE001 # it would end the thread of the session
                exits.append(error)
                return None

        async def leave() -> None:
            raise exits[0]

        output = await run_in_thread(work)
        if exits:
            self._put(leave)
            await anyio.sleep_forever()
        return output


class _AsyncCall(_Call):
    """Call from an async task of another event loop, which executes the tools.

    Attributes:
        inbox: work for the calling task; None at the end.
        scope: the cancel scope of the running tool, cancelled at its deadline.
    """

    def __init__(
        self,
        thread: SessionThread,
        function: Callable[[Execute], Coroutine[Any, Any, Any]],
        execute: Execute,
    ) -> None:
        def put(work: _Work | None) -> None:
            self._loop.call_soon_threadsafe(self.inbox.put_nowait, work)

        self._loop = asyncio.get_running_loop()
        self.inbox = asyncio.Queue[_Work | None]()
        self.scope = anyio.CancelScope()
        super().__init__(thread, function, execute, put)

    async def _hand_over(self, name: str, arguments: Arguments) -> object:
        try:
            return await super()._hand_over(name, arguments)
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(self.scope.cancel)
            raise
