"""Timer of a run: one task sleeps for all alarms and deadlines."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import anyio
import anyio.lowlevel

from replanning.environment import Clock

_LAZY_CANCEL_SECONDS: Final = 60.0
"""Seconds for which the timer still sleeps for an alarm that was cancelled: providers have less, people more."""


@dataclass(slots=True, eq=False)
class Alarm:
    """A callback that is due at a point in time (seconds since the epoch), unless it is cancelled."""

    when: float
    callback: Callable[[], None] | None

    def cancel(self) -> None:
        """Do not call back."""
        self.callback = None


class Timer:
    """Sleeps until the earliest of its alarms and the deadlines of the plan, one task for all of them.

    Args:
        clock: time.
        next_deadline: returns the earliest deadline of the plan.
        on_deadline: called with the time when that deadline is due.

    Attributes:
        next_wakeup: the time of the next wake-up; only deadlines before it need `notify_deadline`.
    """

    def __init__(
        self, clock: Clock, next_deadline: Callable[[], float | None], on_deadline: Callable[[float], None]
    ) -> None:
        self._clock = clock
        self._next_deadline = next_deadline
        self._on_deadline = on_deadline
        self._alarms: list[tuple[float, int, Alarm]] = []
        self._count = 0
        # A virtual clock must not jump ahead to an alarm that was cancelled while the timer sleeps for it.
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
        """Wake up earlier if a new deadline comes before the next wake-up."""
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
                when = self.next_wakeup  # it was cancelled; waking up in vain is less work than being woken for each
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
