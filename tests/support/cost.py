"""Cost of an action in calls, or in time by the measure of other work, neither of which depends on the machine."""

import sys
import time
from collections.abc import Callable


def calls(act: Callable[[], object]) -> int:
    """Count the function calls of an action, built-in ones included, as a measure of its cost."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def ordinary_seconds(act: Callable[[], object]) -> float:
    """Return the processor time of an action as if on an ordinary machine: in units of fixed work, done before and after it."""
    pace = _fixed_work()
    began = time.process_time()
    act()
    took = time.process_time() - began
    return took / (pace + _fixed_work()) / 5


def _fixed_work() -> float:
    """Do what takes an ordinary machine a tenth of a second, and return the processor time that it took."""
    began = time.process_time()
    for number in range(110_000):
        sorted(f"{number} {number + 1} word".title().encode().split())
    return time.process_time() - began
