"""Virtual clock: days pass in milliseconds, and every run is the same."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count
from random import Random
from types import TracebackType
from typing import Final, NamedTuple, Self

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread

from replanning import Environment
from replanning.environment import Clock

EPOCH: Final = 1_700_000_000.0
"""Default start of a virtual clock: November 2023, in seconds since the epoch."""

IDLE_ROUNDS: Final = 12
"""Rounds of the event loop without a read of the clock after which a program counts as idle."""

THREAD_POLL_SECONDS: Final = 0.001
"""Real seconds between checks for working threads."""


class _Sleeper(NamedTuple):
    due: float
    number: int
    woken: anyio.Event
    is_needed: Callable[[], bool]


class VirtualClock:
    """Clock that stands still while the program works, and jumps to the next sleeper when idle.

    Pass it in an `Environment`, and let scripted work and providers sleep on it::

        async with VirtualClock() as clock:
            engine = ReplanningEngine(environment=Environment(clock=clock))
            result = await engine.execute(plan, work)
        assert clock.elapsed < 60

    Outside of `async with`, time moves by `advance` alone.

    The program counts as idle when nothing has read the clock for a dozen rounds of the event loop;
    every journal record reads it. The clock waits for threads started through `anyio.to_thread`,
    but work that waits for anything else outside of the loop (a process, a connection,
    `anyio.sleep`) looks idle, and time jumps past it if a sleeper waits. On asyncio the same
    program runs in the same way each time; trio runs tasks that are ready at the same time in
    random order.

    Args:
        start: the first moment, in seconds since the epoch.
    """

    def __init__(self, start: float = EPOCH) -> None:
        self._start = start
        self._now = start
        self._activity = 0
        self._sleep_count = 0
        self._sleepers: list[_Sleeper] = []
        self._activity_event: anyio.Event | None = None
        self._group: anyio.abc.TaskGroup | None = None

    def __repr__(self) -> str:
        moves = "running" if self._group is not None else "by hand"
        return f"<VirtualClock at +{self.elapsed:g} s, {moves}, sleepers={len(self._sleepers)}>"

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._now - self._start

    def now(self) -> float:
        """Return the virtual time, in seconds since the epoch."""
        self._note_activity()
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Sleep for some seconds of virtual time; infinity sleeps until cancelled."""
        await self.sleep_while(seconds, lambda: True)

    async def sleep_while(self, seconds: float, wanted: Callable[[], bool]) -> None:
        """Sleep for some seconds of virtual time.

        Time does not jump to the end of a sleep that is no longer wanted.

        Args:
            seconds: the duration in virtual seconds.
            wanted: called before a jump; returns whether the end of this sleep still matters.
        """
        self._note_activity()
        if seconds <= 0:
            await anyio.lowlevel.checkpoint()
            return
        if math.isinf(seconds):
            await anyio.sleep_forever()
        self._sleep_count += 1
        sleeper = _Sleeper(self._now + seconds, self._sleep_count, anyio.Event(), wanted)
        heapq.heappush(self._sleepers, sleeper)
        try:
            await sleeper.woken.wait()
        finally:
            self._note_activity()
            if not sleeper.woken.is_set():  # cancelled: time must not wait for it
                self._sleepers.remove(sleeper)
                heapq.heapify(self._sleepers)

    def advance(self, seconds: float) -> None:
        """Let time pass, and wake all sleepers that are due by then, the earliest first.

        Sleepers that are due in between wake at the new time, as on a machine that was suspended.
        """
        self._wake(self._now + seconds)

    async def __aenter__(self) -> Self:
        if self._group is not None:
            problem = "this clock is running already"
            raise RuntimeError(f"{problem}; enter it once, around everything that uses it")
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._group.start_soon(self._advance_when_idle)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        assert self._group is not None
        group = self._group
        self._group = None
        group.cancel_scope.cancel()
        if isinstance(error, anyio.get_cancelled_exc_class()):
            return await group.__aexit__(kind, error, trace)
        # The error is raised without an exception group around it.
        await group.__aexit__(None, None, None)
        return None

    async def _advance_when_idle(self) -> None:
        while True:
            await self._wait_until_idle()
            due = self._next_due()
            if due is not None:
                self._wake(due)
                continue
            self._activity_event = anyio.Event()
            await self._activity_event.wait()
            self._activity_event = None

    def _next_due(self) -> float | None:
        """Return the end of the first sleep that is still wanted."""
        if self._sleepers and self._sleepers[0].is_needed():
            return self._sleepers[0].due
        return min((sleeper.due for sleeper in self._sleepers if sleeper.is_needed()), default=None)

    def _note_activity(self) -> None:
        """Restart the count of idle rounds."""
        self._activity += 1
        if self._activity_event is not None:
            self._activity_event.set()

    async def _wait_until_idle(self) -> None:
        threads = anyio.to_thread.current_default_thread_limiter()
        rounds = 0
        seen = self._activity
        while rounds < IDLE_ROUNDS:
            await anyio.lowlevel.checkpoint()
            rounds += 1
            if rounds == IDLE_ROUNDS and threads.borrowed_tokens:
                await anyio.sleep(THREAD_POLL_SECONDS)  # noqa: TID251 - a thread works in real time
                rounds = 0
            if seen != self._activity:
                rounds = 0
                seen = self._activity

    def _wake(self, until: float) -> None:
        self._note_activity()
        self._now = until
        while self._sleepers and self._sleepers[0].due <= until:
            heapq.heappop(self._sleepers).woken.set()


def virtual_environment(seed: int = 0, *, clock: Clock | None = None) -> Environment:
    """Return an environment in which a program runs the same way every time.

    Args:
        seed: seed of the random numbers, which spread the delays of retries.
        clock: the clock; by default a new `VirtualClock`, which the caller enters as
            `environment.clock`.

    Returns:
        An environment whose runs have the ids `run-1`, `run-2` and so on.
    """
    numbers = count(1)
    return Environment(
        clock=VirtualClock() if clock is None else clock,
        chance=Random(seed).random,
        new_id=lambda: f"run-{next(numbers)}",
    )
