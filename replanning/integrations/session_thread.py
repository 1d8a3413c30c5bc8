"""Session in a thread of its own, for frameworks that execute tools in threads: these record their calls themselves.

The event loop of the session holds a lock, except while it waits. A thread that makes a call takes this lock to begin the call
and to end it. Only what has to be awaited, such as what follows a failure, is done by the thread of the session.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # `signal` makes numbers members of an enumeration, which takes ten times as long
import asyncio  # noqa: TID251 # some frameworks run on asyncio alone
import gc
import selectors
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from contextvars import Context
from functools import partial
from queue import SimpleQueue
from threading import Lock, RLock, current_thread, get_ident, main_thread
from types import FrameType
from typing import Any, Final, TypeVar, TypeVarTuple, cast

import anyio
import anyio.from_thread
import anyio.to_thread
import sniffio
from opentelemetry import context as otel

from replanning.engine.session import Call, Execute, Session
from replanning.errors import NotRunning

ResultT = TypeVar("ResultT")

ArgumentsT = TypeVarTuple("ArgumentsT")

_LEFT: Final = "the session has ended"

_LIBRARY: Final = "asyncio"

_SIGNALS: Final = sorted(map(int, signal.valid_signals()))


class _UnlockedSelector(selectors.DefaultSelector):
    """Selector that lets go of a lock while it waits."""

    def __init__(self, lock: Lock) -> None:
        super().__init__()
        self._held = lock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait until a file is ready, or the timeout is over."""
        self._held.release()
        try:
            return super().select(timeout)
        finally:
            self._held.acquire()


class _SharedLoop(asyncio.SelectorEventLoop):
    """Event loop that runs nothing while another thread is in the block `with loop:`, which may use what belongs to it.

    To have the loop do the same, that thread would have to wake it up and to wait, which takes longer than most of it.
    """

    def __init__(self) -> None:
        self._held = Lock()  # by the thread that uses what belongs to the loop
        self._has_guest = False
        self._outer: tuple[asyncio.AbstractEventLoop | None, str | None] = None, None
        super().__init__(_UnlockedSelector(self._held))

    def run_forever(self) -> None:
        """Run until the loop is stopped."""
        sniffio.thread_local.name = (
            _LIBRARY  # whatever the context of a task says, which may come from a program on Trio
        )
        with self._held:
            super().run_forever()

    def call_soon(
        self,
        callback: Callable[[*ArgumentsT], object],
        *args: *ArgumentsT,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """Call back in the next turn, for which the loop wakes up where another thread uses it."""
        call_soon = super().call_soon_threadsafe if self._has_guest else super().call_soon
        return call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*ArgumentsT], object],
        *args: *ArgumentsT,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call back at a time, for which the loop wakes up where another thread uses it."""
        timer = super().call_at(when, callback, *args, context=context)
        if self._has_guest:
            super().call_soon_threadsafe(lambda: None)
        return timer

    def __enter__(self) -> None:
        self._held.acquire()
        self._outer = asyncio._get_running_loop(), sniffio.thread_local.name
        asyncio._set_running_loop(self)
        sniffio.thread_local.name = _LIBRARY
        self._has_guest = True

    def __exit__(self, *_: object) -> None:
        self._has_guest = False
        loop, sniffio.thread_local.name = self._outer
        asyncio._set_running_loop(loop)
        self._held.release()


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Collect no garbage in this block, where a finalizer that reports to the run would wait for ever."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _SignalsDeferred:
    """Block in the main thread, for whose end the handlers of signals wait: one that raises would cut the block off."""

    def __init__(self) -> None:
        self._came = list[int]()
        self._handlers = dict[int, Any]()

    def _note(self, number: int, _: FrameType | None) -> None:
        self._came.append(number)

    def __enter__(self) -> None:
        try:
            for number in _SIGNALS:
                if callable(handler := _signal.getsignal(number)):
                    self._handlers[number] = handler
                    _signal.signal(number, self._note)
        except BaseException:  # of a handler that was not replaced yet
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            while self._handlers:
                number, handler = self._handlers.popitem()
                if _signal.getsignal(number) == self._note:
                    _signal.signal(number, handler)
            while self._came:
                signal.raise_signal(self._came.pop(0))
        except BaseException:  # of a handler
            self.__exit__()
            raise


Rest = Callable[[Execute, Call | None], Coroutine[Any, Any, ResultT]]
"""Awaits what is left of a call, or makes it if it was not made: given what `Session.invoke` takes as `execute`, and the call."""


class SessionThread:
    """Session whose event loop runs in a thread of its own, for frameworks that execute tools in other threads.

    Attributes:
        session: the session.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._thread = get_ident()
        self._loop = cast("_SharedLoop", asyncio.get_running_loop())
        self._lock = RLock()  # held by one calling thread at a time, which may wait for the loop
        self._posting = (
            RLock()
        )  # held for a moment only, so that the thread of the loop may wait for it
        self._closed = False
        self._user: int | None = None  # another thread that uses the session now

    @classmethod
    @contextmanager
    def open(cls, opened: AbstractAsyncContextManager[Session]) -> Iterator[SessionThread]:
        """Start the thread, and end it after the block.

        Args:
            opened: the session that `ReplanningEngine.session` returns.
        """
        with (
            anyio.from_thread.start_blocking_portal(
                name="replanning", backend_options={"loop_factory": _SharedLoop}
            ) as portal,
            portal.wrap_async_context_manager(opened) as session,
        ):
            thread = portal.call(cls, session)
            try:
                yield thread
            finally:
                with thread._lock, thread._posting:
                    thread._closed = True

    def _is_usable(self) -> bool:
        """Return whether this thread may use the session itself."""
        return get_ident() not in (self._thread, self._user) and not self._loop.get_debug()

    def _use(self, function: Callable[[], ResultT]) -> ResultT:
        """Call a function that uses the session in this thread, while the thread of the session waits.

        Raises:
            BaseException: what the handler of a signal raises, such as KeyboardInterrupt: the signal came meanwhile, and the
                function was called all the same.
            NotRunning: the block was left.
        """
        with (
            _SignalsDeferred() if current_thread() is main_thread() else nullcontext(),
            self._lock,
            _without_garbage_collection(),
        ):
            if self._closed:
                raise NotRunning(_LEFT)
            with self._loop, self.session.entered():
                self._user = get_ident()
                try:
                    return function()
                finally:
                    self._user = None

    def invoke(
        self,
        tool: str,
        arguments: Mapping[str, object],
        execute: Callable[[str, Mapping[str, object]], object],
        *,
        key: str = "",
        passes: tuple[type[BaseException], ...] = (),
        rest: Rest[Any] | None = None,
    ) -> object:
        """Call a tool by its name, and execute it, or what replaces it, in this thread.

        Args:
            tool: the name of the tool.
            arguments: of the tool.
            execute: executes a tool.
            key: as `Session.invoke` takes it.
            passes: as `Session.invoke` takes it.
            rest: what to do in the thread of the session if the tool cannot be executed at once, or has failed; by default
                what `Session.invoke` does.

        Raises:
            Exception: as `Session.invoke`, or `rest`.
            NotRunning: the block was left.
            RuntimeError: this is the thread of the session, which cannot wait for itself.
        """
        call: Call | None = None

        def begin() -> None:
            nonlocal call
            call = self.session.begin(tool, arguments, key=key, passes=passes)

        async def finish(hand_over: Execute, call: Call | None) -> object:
            if call is not None:
                return await call.finish(hand_over)
            return await self.session.invoke(
                tool, arguments, execute=hand_over, key=key, passes=passes
            )

        try:
            if self._is_usable():
                self._use(begin)
            if call is not None and call.is_begun:
                try:
                    output = execute(tool, arguments)
                except BaseException as error:
                    if not self._use(partial(call.fail, error)):
                        raise
                else:
                    if self._use(partial(call.succeed, output)):
                        return output
            return self.call(lambda hand_over: (rest or finish)(hand_over, call), execute)
        except BaseException:
            if call is not None:
                call.detach()
                with suppress(NotRunning):
                    self.post(call.leave)
            raise

    def post(self, function: Callable[[], object]) -> None:
        """Have a function called in the thread of the session, without waiting for it.

        Raises:
            NotRunning: the block was left.
        """
        with self._posting:  # the event loop ends after what it was given
            if self._closed:
                raise NotRunning(_LEFT)
            self._loop.call_soon_threadsafe(function)

    def call(
        self,
        function: Callable[[Execute], Coroutine[Any, Any, ResultT]],
        execute: Callable[[str, Mapping[str, object]], object] | None = None,
    ) -> ResultT:
        """Await an async function in the thread of the session, and meanwhile execute its tools in this thread.

        A call with a timeout is executed in a third thread, in which it can be left behind.

        Args:
            function: is given what `Session.invoke` takes as `execute`.
            execute: executes a tool; None if the function does not need it.

        Raises:
            Exception: of the function.
            NotRunning: the block was left.
            RuntimeError: this is the thread of the session, which cannot wait for itself.
        """
        if get_ident() in (self._thread, self._user):
            raise RuntimeError(
                "this is called from the thread of the session, which cannot wait for itself"
            )
        inbox = SimpleQueue[
            Callable[[], None] | None
        ]()  # what this thread has to execute; None at the end
        loop = self._loop
        task: asyncio.Task[None] | None = None
        outcome: tuple[Exception | None, Any] = (
            NotRunning("the session was left before the call was done"),
            None,
        )

        async def hand_over(name: str, arguments: Mapping[str, object]) -> object:
            assert execute is not None
            executed, spans = loop.create_future(), otel.get_current()

            def attempt() -> tuple[BaseException | None, object]:
                token = otel.attach(spans)
                try:
                    return None, execute(name, arguments)
                except BaseException as error:  # noqa: BLE001 # it is raised in the session, or where it was called
                    return error, None
                finally:
                    otel.detach(token)

            def end(error: BaseException) -> None:
                raise error

            def work() -> None:
                if executed.done():  # it was cancelled before this thread had time for it
                    return
                done = attempt()
                if done[0] is not None and not isinstance(done[0], Exception):
                    end(done[0])

                def settle() -> None:
                    if not executed.done():  # it was cancelled
                        executed.set_result(done)

                with suppress(RuntimeError):  # the event loop has ended, and the call with it
                    loop.call_soon_threadsafe(settle)

            if self.session.is_timed(name):
                error, output = await anyio.to_thread.run_sync(attempt, abandon_on_cancel=True)
                if error is not None and not isinstance(
                    error, Exception
                ):  # it would end the thread of the session
                    inbox.put(partial(end, error))
                    await anyio.sleep_forever()
            else:
                inbox.put(work)
                error, output = await executed
            if error is not None:
                raise error
            return output

        async def run() -> None:
            nonlocal outcome
            try:
                outcome = None, await function(hand_over)
            except Exception as error:  # noqa: BLE001 # it is raised in the thread of the call
                outcome = error, None
            assert task is not None
            task.remove_done_callback(end_call)  # the event loop would have another turn for it
            inbox.put(None)

        def end_call(_: object) -> None:
            inbox.put(None)

        def begin() -> None:
            nonlocal task
            task = loop.create_task(run())
            task.add_done_callback(end_call)  # for when it is cancelled, perhaps before it begins

        try:
            self.post(begin)
            while (work := inbox.get()) is not None:
                work()
        except BaseException:  # it ends the program, but not the thread of the session
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda: task and task.cancel())
            raise
        error, output = outcome
        if error is not None:
            raise error
        return cast(ResultT, output)
