"""Time, chance and ids that come out the same every time."""

from __future__ import annotations

from itertools import count
from random import Random

from replanning import Environment
from replanning.interfaces import Clock
from replanning.testing._clock import VirtualClock


def virtual_environment(seed: int = 0, *, clock: Clock | None = None) -> Environment:
    """An environment in which a program runs in the same way every time.

    Args:
        seed: where chance begins, which spreads the delays of retries.
        clock: time; a new `VirtualClock` when left out, to be entered by its user (`environment.clock`).

    Returns:
        An environment that calls its runs `run-1`, `run-2` and so on.
    """
    numbers = count(1)
    return Environment(
        clock=VirtualClock() if clock is None else clock,
        chance=Random(seed).random,
        new_id=lambda: f"run-{next(numbers)}",
    )
