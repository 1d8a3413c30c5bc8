"""Long work on the event loop, in turns with everything else there and with the collector of garbage."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import anyio.lowlevel

StepWrapper = Callable[[Iterator[None]], Iterator[None]]
"""Looks for garbage at the pauses of work."""

_GC_THRESHOLD: Final = 6_000
"""How many objects are looked through for garbage at once: as many as the collector does by itself."""


async def yielding(work: Iterator[None]) -> None:
    """Do work that pauses now and then; at each pause the event loop has a turn."""
    for _ in work:
        await anyio.lowlevel.checkpoint()


@contextmanager
def gc_paused() -> Iterator[StepWrapper]:
    """Look for no garbage meanwhile, but at pauses in work that is given to what this yields.

    What a large plan or a long journal is made into stays, and looking through it again and again takes as long as
    making it. But what is never looked through is new to the garbage collector, which goes through all of it at once.
    """
    looking = gc.isenabled()
    gc.disable()
    try:
        yield _collecting_between_steps if looking else iter
    finally:
        if looking:
            gc.enable()


def _collecting_between_steps(work: Iterator[None]) -> Iterator[None]:
    """Work in which what is new is looked through for garbage whenever there is enough of it, and then counts as old."""
    for _ in work:
        if gc.get_count()[0] > _GC_THRESHOLD:
            gc.collect(1)
        yield
