"""What others' code does is contained: also what raises a cancellation of its own, or an error that cannot be shown."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import ClassVar, TypeVar

import anyio

from replanning._errors import ReplanningError

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
