"""Cost of an action: in calls, which do not depend on the machine, or in processor time."""

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


def processor_seconds(act: Callable[[str], object], text: str) -> float:
    """Return the processor time of an action on a text."""
    began = time.process_time()
    act(text)
    return time.process_time() - began
