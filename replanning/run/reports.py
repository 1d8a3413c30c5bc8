"""Reports of attempts as records hold them: outputs as JSON, exceptions as failures, and the time of a retry."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from pydantic_core import from_json

from replanning.errors import NotAccepted, OutputError, RecordNotSerializable, StoreError, TransientError
from replanning.journal.records import Failure
from replanning.live.entries import TaskEntry
from replanning.plan.redaction import Redactor
from replanning.plan.types import JsonValue
from replanning.run.isolation import error_message
from replanning.settings import Settings

Codec = Callable[[object], JsonValue]
"""Turns an output that is not JSON into JSON."""

_MAX_MESSAGE_CHARS: Final = 8_000

_MAX_DELAY_SECONDS: Final = 3600.0

_MAX_DOUBLINGS: Final = 62
"""By then every delay has reached the maximum, and a float still holds it."""

_TRANSPORT_ERRORS: Final = frozenset({"NetworkError", "ConnectTimeout", "PoolTimeout", "RemoteProtocolError"})


def serialise_output(output: object, codec: Codec | None, redactor: Redactor, max_bytes: int) -> tuple[JsonValue, bool]:
    """Return an output as JSON without secrets, and whether a resumed run will find it.

    Raises:
        OutputError: the codec failed, or the JSON is larger than `max_bytes`.
    """
    if output is None or isinstance(output, bool) or (isinstance(output, int) and output.bit_length() < 64):
        return output, True
    if codec is not None:
        try:
            output = codec(output)
        except Exception as error:  # every error of a codec is a failure of the attempt
            raise OutputError(f"the codec failed for {type(output).__name__}: {error!r}") from error
    try:
        text = json.dumps(output, allow_nan=False, ensure_ascii=False)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError):
        return None, False
    if size > max_bytes:
        raise OutputError(
            f"the output has {size} bytes as JSON, the limit is {max_bytes};"
            " store it elsewhere and return a reference to it"
        )
    try:
        if isinstance(output, list | dict | tuple):
            output = from_json(f'{{"output":{text}}}')["output"]  # as a resumed run will read it
        return redactor.value(output), True  # type: ignore[arg-type]  # parsed JSON, or a scalar of it
    except (ValueError, RecordNotSerializable):
        return None, False  # a reader does not take so deep a nesting, or so long a number


def failure_from(error: BaseException | str) -> Failure:
    """Return the record of an exception; a group of exceptions is one failure, transient if all its parts are."""
    if isinstance(error, str):
        return Failure("Error", _truncate_middle(error))
    message = error_message(error)
    if isinstance(error, NotAccepted):
        return Failure("NotAccepted", _truncate_middle(message), kind=error.kind)
    if isinstance(error, BaseExceptionGroup):
        parts = [failure_from(part) for part in error.exceptions]
        message = f"{message}: " + "; ".join(f"{part.type}: {part.message}" for part in parts)
        return Failure(type(error).__name__, _truncate_middle(message), all(part.transient for part in parts))
    return Failure(type(error).__name__, _truncate_middle(message), is_transient(error))


def is_transient(error: BaseException) -> bool:
    """Return whether an error may pass: TransientError, connection errors, HTTP 429 and 5xx, a failing store.

    Errors of other libraries are recognised by their attributes (`status_code`, also of their `response`) and by
    their class, never by the words in them.
    """
    if isinstance(error, TransientError | ConnectionError | StoreError):
        return True
    status = getattr(error, "status_code", None)
    if status is None:
        status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status == 429 or 500 <= status <= 599
    return any(
        base.__name__ in _TRANSPORT_ERRORS and base.__module__.startswith(("httpx", "httpcore"))
        for base in type(error).__mro__
    )


def _truncate_middle(message: str) -> str:
    if len(message) <= _MAX_MESSAGE_CHARS:
        return message
    half = _MAX_MESSAGE_CHARS // 2
    return f"{message[:half]}\n[... {len(message) - 2 * half} characters left out ...]\n{message[-half:]}"


def schedule_retry(
    entry: TaskEntry, failure: Failure, settings: Settings, *, now: float, chance: float
) -> tuple[float | None, bool]:
    """Decide when a task is run again after a failed attempt.

    Args:
        entry: the task, whose attempt has failed.
        failure: the failure.
        settings: the retries of tasks that declare none, and the number of failures in a row at which one is given up.
        now: seconds since the epoch.
        chance: a number in [0, 1) that spreads the delay.

    Returns:
        The time of the next attempt or None, and whether the task's retries are used up.
    """
    if failure.kind == "unfinished":
        return now, False
    if failure.kind in ("rejected", "blocked"):  # a judge's verdict, which says that the task is not run again
        return None, True
    if failure.kind == "interrupted":
        return (now, False) if entry.task.idempotent else (None, True)
    policy = entry.task.retry or settings.retry
    repeatable = failure.transient or (failure.kind == "timeout" and entry.task.idempotent)
    delay = policy.delay * (2 ** min(entry.attempts_in_round - 1, _MAX_DOUBLINGS) if policy.exponential else 1)
    if policy.jitter:
        delay *= 0.5 + chance
    due = now + min(delay, _MAX_DELAY_SECONDS)
    if repeatable and entry.attempts_in_round < policy.max_attempts:
        return due, False
    if entry.failures + 1 < settings.failure_threshold and failure.kind != "timeout":
        return due, True
    return None, True
