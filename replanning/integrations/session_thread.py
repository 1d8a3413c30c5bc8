"""Session on an event loop in a thread of its own, for frameworks that execute tools in threads."""

from __future__ import annotations

import asyncio  # noqa: TID251 - anyio sets an event of another thread only in a task that it waits for
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from queue import SimpleQueue
from threading import Lock, get_ident
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from anyio.from_thread import BlockingPortal, start_blocking_portal
from opentelemetry import context as otel

from replanning.engine.session import Execute, Session
from replanning.errors import NotRunning
from replanning.integrations.kit import has_deadline
from replanning.run.attempt import as_current_attempt, current_attempt

__all__ = ["ExecuteInThread", "SessionThread"]

ResultT = TypeVar("ResultT")

ExecuteInThread = Callable[[str, Mapping[str, object]], object]
"""Executes a tool, given its name and its arguments, in the thread of the call."""


class SessionThread:
    """Session on an event loop in a thread of its own, whose tools are executed in the threads that call them.

    Attributes:
        session: the session.
    """

    session: Session

    def __init__(self, portal: BlockingPortal) -> None:
        self._portal = portal
        self._thread = portal.call(get_ident)
        self._loop = portal.call(asyncio.get_running_loop)
        self._lock = Lock()  # held while the loop is given something, so that it ends after that
        self._is_closed = False

    @classmethod
    @contextmanager
    def open(cls, opened: AbstractAsyncContextManager[Session]) -> Iterator[SessionThread]:
        """Start the thread, and end it after the block; calls that are not done by then raise `NotRunning`.

        Args:
            opened: the session that `ReplanningEngine.session` returns.
        """
        with start_blocking_portal(name="replanning") as portal:
            thread = cls(portal)
            try:
                with portal.wrap_async_context_manager(opened) as thread.session:
                    yield thread
            finally:
                with thread._lock:
                    thread._is_closed = True
            # After an exception the portal does so by itself.
            portal.call(portal.stop, True)

    def call(
        self,
        function: Callable[[Execute], Coroutine[Any, Any, ResultT]],
        execute: ExecuteInThread | None = None,
    ) -> ResultT:
        """Await an async function in the thread of the session, and meanwhile execute its tools in this thread.

        A tool with a timeout is executed in a third thread, in which it can be left behind. KeyboardInterrupt, and any
        other exception of this thread that ends the program, cancels the function.

        Args:
            function: is given what `Session.invoke` takes as `execute`.
            execute: executes a tool; None if the function does not need it.

        Raises:
            Exception: of the function.
            NotRunning: the block was left.
            RuntimeError: this is the thread of the session, which cannot wait for itself.
        """
        call = _ThreadCall(self, function, execute)
        try:
            future: Future[ResultT] = self.start(call.run)
            future.add_done_callback(lambda _: call.inbox.put(None))
            while (work := call.inbox.get()) is not None:
                work()
        except BaseException:
            # Waits until the call has ended, which its cancellation brings about at once, so that it can be made again.
            with suppress(NotRunning, RuntimeError, CancelledError):
                self.start(call.cancel).result()
            raise
        return _result_of(future)

    async def acall(
        self, function: Callable[[Execute], Coroutine[Any, Any, ResultT]], execute: Execute
    ) -> ResultT:
        """Do what `call` does for an async task of another event loop, in which tools are executed.

        Args:
            function: as `call` takes it.
            execute: executes a tool in the async task of the caller.

        Raises:
            Exception: as `call`.
        """
        call = _AsyncCall(self, function, execute)
        try:
            future: Future[ResultT] = self.start(call.run)
            future.add_done_callback(lambda _: call.post(None))
            while (work := await call.inbox.get()) is not None:
                await work()
        except BaseException:
            with anyio.CancelScope(shield=True), suppress(NotRunning, RuntimeError, CancelledError):
                await asyncio.wrap_future(self.start(call.cancel))
            raise
        return _result_of(future)

    def start(self, function: Callable[[], Any]) -> Future[Any]:
        """Have a function called in the thread of the session, and awaited if it is async, without waiting for its result.

        Raises:
            NotRunning: the block was left.
            RuntimeError: this is the thread of the session.
        """
        if get_ident() == self._thread:
            raise RuntimeError(
                "this is called from the thread of the session, which cannot wait for itself"
            )
        with self._lock:
            if self._is_closed:
                raise NotRunning("the session has ended")
            return self._portal.start_task_soon(function)

    def wake(self, event: anyio.Event) -> None:
        """Set an event of the event loop from another thread; does nothing once the block was left."""
        with self._lock:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(event.set)


def _result_of(future: Future[ResultT]) -> ResultT:
    """Return the result of a call whose thread has executed all that it was handed.

    Raises:
        Exception: of the call.
        NotRunning: the block was left.
    """
    if future.cancelled():
        raise NotRunning("the session was left before the call was done")
    return future.result()


class _Call(ABC):
    """Call from outside of the session's thread: the event loop awaits its function, and hands its tools back.

    Args:
        thread: of the session.
        function: is given `hand_over`.
    """

    def __init__(
        self, thread: SessionThread, function: Callable[[Execute], Coroutine[Any, Any, Any]]
    ) -> None:
        self._thread = thread
        self._function = function
        self._is_cancelled = False
        self._scope: anyio.CancelScope | None = None
        self._ended: anyio.Event

    @abstractmethod
    async def _hand_over(self, name: str, arguments: Mapping[str, object]) -> object:
        """Have a tool executed where the call was made."""

    async def run(self) -> Any:
        """Await the function, unless the thread of the call has gone before."""
        if self._is_cancelled:
            return None
        self._ended = anyio.Event()
        try:
            with anyio.CancelScope() as self._scope:
                return await self._function(self._hand_over)
        finally:
            self._ended.set()
        return None

    async def cancel(self) -> None:
        """Cancel the function, and wait until it has ended."""
        self._is_cancelled = True
        if self._scope is not None:
            self._scope.cancel()
            await self._ended.wait()


class _ThreadCall(_Call):
    """Call that another thread makes, and in which its tools are executed.

    Args:
        thread: of the session.
        function: is given `hand_over`.
        execute: executes a tool.

    Attributes:
        inbox: what the thread of the call has to execute; None at the end.
    """

    def __init__(
        self,
        thread: SessionThread,
        function: Callable[[Execute], Coroutine[Any, Any, Any]],
        execute: ExecuteInThread | None,
    ) -> None:
        super().__init__(thread, function)
        self._execute = execute
        self.inbox = SimpleQueue[Callable[[], None] | None]()

    async def _hand_over(self, name: str, arguments: Mapping[str, object]) -> object:
        """Have a tool executed by the thread of the call, or by a third one if it has a deadline."""
        attempt = current_attempt()
        if has_deadline(self._thread.session):
            return await self._execute_in_third_thread(name, arguments)
        assert self._execute is not None
        execute = self._execute
        spans = otel.get_current()
        executed = Future[object]()
        is_executed = anyio.Event()

        def work() -> None:
            if not executed.set_running_or_notify_cancel():
                return  # it was cancelled before this thread had time for it
            token = otel.attach(spans)
            try:
                with as_current_attempt(attempt):
                    output = execute(name, arguments)
            except Exception as error:  # noqa: BLE001 # it is raised in the session
                executed.set_exception(error)
            else:
                executed.set_result(output)
            finally:
                otel.detach(token)
            self._thread.wake(is_executed)

        self.inbox.put(work)
        try:
            await is_executed.wait()
        finally:
            executed.cancel()
        return executed.result()

    async def _execute_in_third_thread(self, name: str, arguments: Mapping[str, object]) -> object:
        assert self._execute is not None
        execute = self._execute
        exits = list[BaseException]()

        def work() -> object:
            try:
                return execute(name, arguments)
            except Exception:
                raise
            except BaseException as error:  # noqa: BLE001 # it would end the thread of the session
                exits.append(error)
                return None

        def leave() -> None:
            raise exits[0]

        output = await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
        if exits:
            self.inbox.put(leave)
            await anyio.sleep_forever()
        return output


class _AsyncCall(_Call):
    """Call of an async task of another event loop, in which its tools are executed.

    Args:
        thread: of the session.
        function: is given `hand_over`.
        execute: executes a tool.

    Attributes:
        inbox: what the task of the call has to execute; None at the end.
    """

    def __init__(
        self,
        thread: SessionThread,
        function: Callable[[Execute], Coroutine[Any, Any, Any]],
        execute: Execute,
    ) -> None:
        super().__init__(thread, function)
        self._execute = execute
        self._loop = asyncio.get_running_loop()
        self.inbox = asyncio.Queue[Callable[[], Awaitable[None]] | None]()

    def post(self, work: Callable[[], Awaitable[None]] | None) -> None:
        """Put something into the inbox, from any thread."""
        self._loop.call_soon_threadsafe(self.inbox.put_nowait, work)

    async def _hand_over(self, name: str, arguments: Mapping[str, object]) -> object:
        """Have a tool executed in the task of the call; it is cancelled there when its time is up."""
        attempt = current_attempt()
        spans = otel.get_current()
        executed = Future[object]()
        is_executed = anyio.Event()
        scope = anyio.CancelScope()

        async def work() -> None:
            if not executed.set_running_or_notify_cancel():
                return  # it was cancelled before this task had time for it
            token = otel.attach(spans)
            try:
                with scope, as_current_attempt(attempt):
                    executed.set_result(await self._execute(name, arguments))
            except Exception as error:  # noqa: BLE001 # it is raised in the session
                executed.set_exception(error)
            finally:
                otel.detach(token)
            # Nobody waits for what was cancelled.
            if executed.done():
                self._thread.wake(is_executed)

        self.post(work)
        try:
            await is_executed.wait()
        except BaseException:
            executed.cancel()
            self._loop.call_soon_threadsafe(scope.cancel)
            raise
        return executed.result()
