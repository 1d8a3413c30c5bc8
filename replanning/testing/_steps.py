"""What a fake does when it is called: the small language in which executors, providers and gates are scripted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import anyio

from replanning.interfaces import Clock


@dataclass(frozen=True, slots=True)
class ScriptStep:
    """What a fake does at one call: wait, then return a value or raise an error.

    Made by `returns`, `raises` and `hangs`.

    Attributes:
        value: what is returned.
        error: what is raised instead.
        after: seconds on the clock before that; infinity for never.
    """

    value: object = None
    error: BaseException | type[BaseException] | None = None
    after: float = 0.0

    def __post_init__(self) -> None:
        if not self.after >= 0:
            raise ValueError(f"after is a number of seconds, 0 or more; got {self.after!r}")


def returns(value: object = None, *, after: float = 0.0) -> ScriptStep:
    """Return a value, after so many seconds."""
    return ScriptStep(value, after=after)


def raises(error: BaseException | type[BaseException], *, after: float = 0.0) -> ScriptStep:
    """Raise an error, after so many seconds."""
    return ScriptStep(error=error, after=after)


def hangs() -> ScriptStep:
    """Never come back, until cancelled."""
    return ScriptStep(after=math.inf)


async def perform_step(step: ScriptStep, clock: Clock | None) -> object:
    """Do what a step says.

    Raises:
        ValueError: it waits, and there is no clock to wait on.
    """
    if step.after == math.inf:
        await anyio.sleep_forever()
    if step.after:
        if clock is None:
            raise ValueError(f"{step!r} takes time; give the fake a clock, such as VirtualClock()")
        await clock.sleep(step.after)
    if step.error is not None:
        raise step.error
    return step.value
