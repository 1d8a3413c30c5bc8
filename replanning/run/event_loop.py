"""Event loop: isolated plugins, turns for other tasks, calls from threads, and one timer."""

from __future__ import annotations

import asyncio  # noqa: TID251 - anyio does not tell of cancellations without a scope
import gc
import heapq
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from threading import Lock, Thread, get_ident
from typing import Any, ClassVar, Final, ParamSpec, TypeVar, TypeVarTuple

import anyio
import anyio.from_thread
import anyio.lowlevel

from replanning.environment import Clock
from replanning.errors import NotRunning, ReplanningError

ResultT = TypeVar("ResultT")

Parameters = ParamSpec("Parameters")

ArgumentsT = TypeVarTuple("ArgumentsT")


class CancelledWithin(Exception):
    """Users' code was cancelled from within: something that it awaited was cancelled."""

    MESSAGE: ClassVar[str] = "something that it waited for was cancelled"


async def isolate(
    function: Callable[[*ArgumentsT], Awaitable[ResultT]], *args: *ArgumentsT
) -> ResultT:
    """Call and await users' code, in a task that only the library cancels.

    Raises:
        CancelledWithin: it raised a cancellation although this task is not being cancelled.
            Propagated, that would end its neighbours as well.
    """
    try:
        return await function(*args)
    except anyio.get_cancelled_exc_class() as error:
        # Our own cancellation must propagate, or the scope that asked for it would wait forever.
        if is_cancelled():
            raise
        raise CancelledWithin(CancelledWithin.MESSAGE) from error


def without_group(error: BaseException) -> BaseException:
    """Return the KeyboardInterrupt or SystemExit that ended a task group, or else the error."""
    exits: BaseException | None = error
    while isinstance(exits, BaseExceptionGroup):
        found = exits.subgroup((KeyboardInterrupt, SystemExit))
        exits = None if found is None else found.exceptions[0]
    return exits or error


def is_cancelled() -> bool:
    """Return whether the current task is being cancelled, by a scope or a closing event loop."""
    # A scope of anyio is asked first: it is the only one that trio has.
    if anyio.get_current_task().has_pending_cancellation():
        return True
    if anyio.get_cancelled_exc_class() is not asyncio.CancelledError:
        return False
    # After a KeyboardInterrupt or SystemExit, `asyncio.run` cancels every task that is left,
    # without a scope.
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


_detached: Final[set[asyncio.Task[None]]] = set()
"""Tasks that no task group owns; asyncio itself forgets tasks to which nobody refers."""


def start_detached(function: Callable[[], Coroutine[Any, Any, None]]) -> bool:
    """Start a coroutine function in a detached task of the running event loop.

    It must contain its errors. Return False if no event loop runs in this thread.
    """
    try:
        cancelled = anyio.get_cancelled_exc_class()
    except RuntimeError:
        return False
    if cancelled is asyncio.CancelledError:
        task = asyncio.get_running_loop().create_task(function())
        _detached.add(task)
        task.add_done_callback(_detached.discard)
    else:
        trio = import_module("trio")  # it is optional
        trio.lowlevel.spawn_system_task(function, context=copy_context())
    return True


def describe_error(error: BaseException) -> str:
    """Return the message of an error of this library, and the `repr` of any other."""
    if isinstance(error, ReplanningError):
        return str(error)
    try:
        return repr(error)
    except Exception:  # noqa: BLE001 - classes of users may raise anything
        return f"{type(error).__name__} (its text cannot be read)"


@dataclass(repr=False, eq=False)
class LoopThread:
    """The thread of the running event loop; other threads hand calls to it.

    Attributes:
        closed: true once no more calls are taken from other threads.
    """

    _thread: int = field(default_factory=get_ident)
    _token: anyio.lowlevel.EventLoopToken = field(default_factory=anyio.lowlevel.current_token)
    _lock: Lock = field(default_factory=Lock)
    _handed_over: int = 0
    closed: bool = False

    def __repr__(self) -> str:
        return f"<LoopThread {self._thread}{' closed' if self.closed else ''}>"

    def call(
        self,
        function: Callable[Parameters, ResultT],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> ResultT:
        """Call a function in this thread, and wait for its result in the calling thread.

        Raises:
            NotRunning: this is another thread, and the loop takes no more calls; the function was
                not called.
        """
        if get_ident() == self._thread or self.runs_here():
            return function(*args, **kwargs)
        with self._lock:
            taken = not self.closed
            # Counted under the lock, so that `close` waits for every call that was taken.
            self._handed_over += taken
        if taken:
            try:
                return anyio.from_thread.run_sync(
                    self._execute, partial(function, *args, **kwargs), token=self._token
                )
            except anyio.RunFinishedError:
                self.closed = True
        raise NotRunning(
            "the run was left, and its event loop takes no more calls from other threads"
        )

    @property
    def native(self) -> object:
        """The event loop itself; several runs may share it."""
        return self._token.native_token

    @property
    def has_ended(self) -> bool:
        """Whether the event loop was closed, which asyncio also does while tasks are unfinished."""
        # Trio ends all of its tasks first.
        is_closed: Callable[[], bool] | None = getattr(self.native, "is_closed", None)
        return is_closed is not None and is_closed()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Schedule a function in this thread, from another thread, without waiting."""
        # On trio, this is a token of the loop; its method has another name.
        native: Any = self.native
        schedule = getattr(native, "run_sync_soon", None)
        if schedule is None:
            schedule = native.call_soon_threadsafe
        with suppress(RuntimeError):  # the loop was closed
            schedule(function)

    def runs_here(self) -> bool:
        """Return whether the loop runs in this thread now.

        Several threads may run a loop in turn.
        """
        try:
            return anyio.lowlevel.current_token() == self._token
        except RuntimeError:  # no loop runs here
            return False

    def _execute(self, function: Callable[[], ResultT]) -> ResultT:
        try:
            return function()
        finally:
            with self._lock:
                self._handed_over -= 1

    async def close(self) -> None:
        """Take no more calls from other threads.

        Waiting calls are executed before this returns.
        """
        with self._lock:
            self.closed = True
        # A cancelled loop would leave other threads waiting for results that never come.
        with anyio.CancelScope(shield=True):
            while self._handed_over:
                await anyio.lowlevel.checkpoint()

    def post(self, function: Callable[[], object]) -> None:
        """Schedule a function in this thread without waiting, as a finalizer must."""
        if get_ident() == self._thread or self.closed or self.runs_here():
            function()
        else:
            Thread(target=self.call, args=(function,), daemon=True).start()


async def yielding(work: Iterator[None], clock: Clock) -> None:
    """Do work in portions, with a turn for the event loop after each of them.

    Args:
        work: yields after each portion.
        clock: may supply its own `checkpoint`, for event loops that yield only when every task is
            blocked.
    """
    checkpoint: Callable[[], Awaitable[None]] = getattr(
        clock, "checkpoint", anyio.lowlevel.checkpoint
    )
    for _ in work:
        await checkpoint()


_MANY_OBJECTS: Final = 10_000
"""Number of new objects whose collection would stop the event loop noticeably."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection while long-lived objects are made; then they count as old.

    The objects of a large plan or a long journal stay alive. Collecting repeatedly takes as long as
    making them, and one full collection would stop the event loop.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        # Unfreezing puts objects into the oldest generation. Objects that the program has frozen
        # must stay frozen; counting them takes milliseconds, too long for a small plan.
        if gc.get_count()[0] > _MANY_OBJECTS and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        gc.enable()


_LAZY_CANCEL_SECONDS: Final = 60.0
"""Seconds that the timer may keep sleeping for a cancelled alarm."""


@dataclass(slots=True, eq=False)
class Alarm:
    """A callback due at a time in seconds since the epoch, unless it is cancelled."""

    when: float
    callback: Callable[[], None] | None

    def cancel(self) -> None:
        """Do not call back."""
        self.callback = None


class Timer:
    """Sleeps, in one task, until the earliest of its alarms and of the plan's deadlines.

    Args:
        clock: time.
        next_deadline: returns the earliest deadline of the plan.
        on_deadline: called with the time when that deadline is due.

    Attributes:
        next_wakeup: time of the next wake-up; only earlier deadlines need `notify_deadline`.
    """

    def __init__(
        self,
        clock: Clock,
        next_deadline: Callable[[], float | None],
        on_deadline: Callable[[float], None],
    ) -> None:
        self.clock = clock
        self._next_deadline = next_deadline
        self._on_deadline = on_deadline
        self._alarms: list[tuple[float, int, Alarm]] = []
        self._count = 0
        # A virtual clock must not jump ahead to an alarm that was cancelled while the timer sleeps
        # for it.
        sleep_while = getattr(clock, "sleep_while", None)
        self._sleep = (
            clock.sleep
            if sleep_while is None
            else partial(sleep_while, wanted=lambda: self._next_due() is not None)
        )
        self.next_wakeup = math.inf
        self._scope: anyio.CancelScope | None = None
        self._changed: anyio.Event | None = None

    def call_at(self, when: float, callback: Callable[[], None]) -> Alarm:
        """Call back at a point in time (seconds since the epoch), from the timer's task."""
        alarm = Alarm(when, callback)
        self._count += 1
        heapq.heappush(self._alarms, (when, self._count, alarm))
        self.notify_deadline(when)
        return alarm

    def notify_deadline(self, when: float) -> None:
        """Wake up earlier if a new deadline comes before the next wake-up."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None
        # Only an earlier deadline is worth a wake-up; the others are found anyway.
        elif when < self.next_wakeup and self._scope is not None:
            self._scope.cancel()
        self.next_wakeup = min(when, self.next_wakeup)

    async def run(self) -> None:
        """Sleep and call back, until cancelled."""
        while True:
            when = self._next_due()
            if when is None and 0 < self.next_wakeup - self.clock.now() <= _LAZY_CANCEL_SECONDS:
                # It was cancelled; an idle wake-up is cheaper than a notification for each.
                when = self.next_wakeup
            if when is None:
                self.next_wakeup = math.inf
                self._changed = changed = anyio.Event()
                await changed.wait()
            elif (delay := when - self.clock.now()) > 0:
                self.next_wakeup = when
                with anyio.CancelScope() as self._scope:
                    await self._sleep(delay)
                self._scope = None
            else:
                now = self.clock.now()
                deadline = self._next_deadline()
                if deadline is not None and deadline <= now:
                    self._on_deadline(now)
                # All that are due by one reading of the clock, in the order in which they were due.
                while self._alarms and self._alarms[0][0] <= now:
                    alarm = heapq.heappop(self._alarms)[2]
                    callback = alarm.callback
                    alarm.callback = None
                    if callback is not None:
                        callback()
                await anyio.lowlevel.checkpoint()

    def _next_due(self) -> float | None:
        while self._alarms and self._alarms[0][2].callback is None:
            heapq.heappop(self._alarms)
        alarm = self._alarms[0][0] if self._alarms else None
        deadline = self._next_deadline()
        if alarm is None or deadline is None:
            return deadline if alarm is None else alarm
        return min(alarm, deadline)
