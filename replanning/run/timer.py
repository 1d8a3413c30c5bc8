"""One timer for everything in a run that waits for a point in time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from functools import partial
from typing import Final

import anyio
import anyio.lowlevel

from replanning.environment import Clock

_LAZY_CANCEL_SECONDS: Final = 60.0
"""Seconds for which an alarm that was cancelled is slept for all the same: providers have less, people more."""


class Alarm:
    """A callback that is due at a point in time, unless it is cancelled."""

    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Do not call back."""
        self.callback = None


class Timer:
    """Sleeps until the earliest of its alarms and the deadlines of the plan, one task for all of them.

    `next_wakeup` is when it looks next; only an earlier deadline than that need be told by `notify_deadline`.

    Args:
        clock: where time comes from.
        next_deadline: the earliest deadline that is kept elsewhere.
        on_deadline: called with the time when that deadline is due.
    """

    def __init__(
        self, clock: Clock, next_deadline: Callable[[], float | None], on_deadline: Callable[[float], None]
    ) -> None:
        self._clock = clock
        self._next_deadline = next_deadline
        self._on_deadline = on_deadline
        self._alarms: list[tuple[float, int, Alarm]] = []
        self._count = 0
        # A clock that jumps ahead can be told that an alarm was cancelled for which the timer still sleeps.
        sleep_while = getattr(clock, "sleep_while", None)
        self._sleep = clock.sleep if sleep_while is None else partial(sleep_while, wanted=self._has_pending)
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
        """Say that there is a deadline now that may be earlier than what is slept for."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None
        elif when < self.next_wakeup and self._scope is not None:
            self._scope.cancel()
        self.next_wakeup = min(when, self.next_wakeup)

    async def run(self) -> None:
        """Sleep and call back, until cancelled."""
        while True:
            when = self._next_due()
            if when is None and 0 < self.next_wakeup - self._clock.now() <= _LAZY_CANCEL_SECONDS:
                when = self.next_wakeup  # it was cancelled; looking then in vain is less work than being woken for each
            if when is None:
                self.next_wakeup = math.inf
                self._changed = changed = anyio.Event()
                await changed.wait()
            elif (delay := when - self._clock.now()) > 0:
                self.next_wakeup = when
                with anyio.CancelScope() as self._scope:
                    await self._sleep(delay)
                self._scope = None
            else:
                self._fire(self._clock.now())
                await anyio.lowlevel.checkpoint()

    def _next_due(self) -> float | None:
        while self._alarms and self._alarms[0][2].callback is None:
            heapq.heappop(self._alarms)
        alarm = self._alarms[0][0] if self._alarms else None
        deadline = self._next_deadline()
        if alarm is None or deadline is None:
            return deadline if alarm is None else alarm
        return min(alarm, deadline)

    def _has_pending(self) -> bool:
        return self._next_due() is not None

    def _fire(self, now: float) -> None:
        deadline = self._next_deadline()
        if deadline is not None and deadline <= now:
            self._on_deadline(now)
        while self._alarms and self._alarms[0][0] <= now:
            alarm = heapq.heappop(self._alarms)[2]
            callback, alarm.callback = alarm.callback, None
            if callback is not None:
                callback()
