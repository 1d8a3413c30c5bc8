"""Isolation of users' code, which may raise a cancellation of its own or an error that cannot be shown; and yielding."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar, Final, TypeVar

import anyio
import anyio.lowlevel

from replanning.errors import ReplanningError

ResultT = TypeVar("ResultT")


class CancelledWithin(Exception):
    """Users' code was cut off by a cancellation from within: of something that it waited for."""

    MESSAGE: ClassVar[str] = "something that it waited for was cancelled"


async def isolate(answer: Awaitable[ResultT]) -> ResultT:
    """Await users' code, in a task that only the library cancels.

    Raises:
        CancelledWithin: it raised a cancellation although this task is not being cancelled. Let through, that would
            end everything beside it as well.
    """
    try:
        return await answer
    except anyio.get_cancelled_exc_class() as error:
        if is_cancelled():
            raise
        raise CancelledWithin(CancelledWithin.MESSAGE) from error


def is_cancelled() -> bool:
    """Return whether the current task is being cancelled."""
    return anyio.get_current_task().has_pending_cancellation()


def describe_error(error: BaseException) -> str:
    """Return the message of an error of the library, and the `repr` of any other, even one whose `repr` fails."""
    try:
        return str(error) if isinstance(error, ReplanningError) else repr(error)
    except Exception:  # noqa: BLE001 - it is users' code
        return f"{type(error).__name__}, which cannot be shown"


def error_message(error: BaseException) -> str:
    """Return the message of an error, or its description where the message is empty or fails."""
    try:
        return str(error) or describe_error(error)
    except Exception:  # noqa: BLE001 - it is users' code
        return describe_error(error)


StepWrapper = Callable[[Iterator[None]], Iterator[None]]
"""Collects garbage at the pauses of work."""

_GC_THRESHOLD: Final = 6_000
"""New objects after which garbage is collected: about as many as the collector waits for by itself."""


async def yielding(work: Iterator[None]) -> None:
    """Do work that pauses now and then, with a turn for the event loop at each pause."""
    for _ in work:
        await anyio.lowlevel.checkpoint()


@contextmanager
def gc_paused() -> Iterator[StepWrapper]:
    """Pause garbage collection, except at the pauses of work that is wrapped by the function that this yields.

    The objects of a large plan or a long journal stay alive, and going through them again and again takes as long as
    making them. Without any collection, all of them would be new to the collector, which would go through them at once.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield _collecting_between_steps if enabled else iter
    finally:
        if enabled:
            gc.enable()


def _collecting_between_steps(work: Iterator[None]) -> Iterator[None]:
    """Collect garbage among new objects at the pauses of work; after that they count as old."""
    for _ in work:
        if gc.get_count()[0] > _GC_THRESHOLD:
            gc.collect(1)
        yield
