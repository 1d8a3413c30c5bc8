"""What others' code does is contained: also what raises a cancellation of its own, or an error that cannot be shown."""

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
    """Others' code was cut off by a cancellation that did not come from us: of something that it waited for itself."""

    MESSAGE: ClassVar[str] = "something that it waited for was cancelled"


async def isolate(answer: Awaitable[ResultT]) -> ResultT:
    """What others' code answers, in a task that only we cancel.

    Raises:
        CancelledWithin: it raised a cancellation, and nobody has cancelled this task. Let through, it would end
            everything beside it as well.
    """
    try:
        return await answer
    except anyio.get_cancelled_exc_class() as error:
        if is_cancelled():
            raise
        raise CancelledWithin(CancelledWithin.MESSAGE) from error


def is_cancelled() -> bool:
    """Whether the task that asks is being cancelled."""
    return anyio.get_current_task().has_pending_cancellation()


def describe_error(error: BaseException) -> str:
    """The sentence of an error of ours, and what `repr` says of others, also of one that fails to say it."""
    try:
        return str(error) if isinstance(error, ReplanningError) else repr(error)
    except Exception:  # noqa: BLE001 - it is others' code
        return f"{type(error).__name__}, which cannot be shown"


def error_message(error: BaseException) -> str:
    """What an error says, or how it is described where it says nothing or fails to say it."""
    try:
        return str(error) or describe_error(error)
    except Exception:  # noqa: BLE001 - it is others' code
        return describe_error(error)


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
