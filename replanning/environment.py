"""Clock, randomness and ids of a run, with the real ones as defaults, and timeouts on any clock."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import anyio

__all__ = ["Clock", "Environment", "SystemClock"]


class Clock(Protocol):
    """Source of time."""

    def now(self) -> float:
        """Seconds since the epoch, UTC; never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return when this much time has passed."""
        ...


class SystemClock:
    """Clock of this machine: the time of day at the start, monotonic from then on.

    Args:
        not_before: a time that has passed, though on another machine, from which a clock that is
            behind it continues.
    """

    def __init__(self, not_before: float = 0.0) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()  # noqa: TID251 - this is the clock that is injected

    def __repr__(self) -> str:
        return "<SystemClock>"

    def now(self) -> float:
        """Seconds since the epoch, UTC."""
        return self._offset + time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Sleep for real."""
        await anyio.sleep(seconds)  # noqa: TID251 - likewise


def lease_time(clock: Clock) -> float:
    """Return the time by which processes compare leases: the time of day, or for other clocks than `SystemClock`, their time.

    `SystemClock` stands still while the machine sleeps, so the clocks of two processes may differ.
    """
    return time.time() if isinstance(clock, SystemClock) else clock.now()  # noqa: TID251 - see above


@asynccontextmanager
async def move_on_after(seconds: float, clock: Clock) -> AsyncIterator[anyio.CancelScope]:
    """Cancel a block that takes longer than `seconds` on a clock; yields its cancel scope."""

    async def expire() -> None:
        await clock.sleep(seconds)
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(expire)
        yield group.cancel_scope
        group.cancel_scope.cancel()


def new_run_id() -> str:
    """Return a unique id that sorts by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(6)}"


@dataclass(frozen=True, slots=True)
class Environment:
    """Sources of time, randomness and ids of a run; pass others to make it deterministic.

    Attributes:
        clock: time.
        chance: numbers in [0, 1), for the jitter of retries.
        new_id: ids of runs.
    """

    clock: Clock = field(default_factory=SystemClock)
    chance: Callable[[], float] = random.random
    new_id: Callable[[], str] = new_run_id
