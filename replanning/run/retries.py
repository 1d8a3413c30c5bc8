"""Failures of attempts: the record of an exception, whether it may pass, and when its task is run again."""

from __future__ import annotations

import errno
import os
import re
from collections import deque
from collections.abc import Callable, Collection
from functools import lru_cache
from pathlib import Path
from traceback import FrameSummary, TracebackException, walk_tb
from typing import Final

import anyio

from replanning.errors import NotAccepted, ReplanningError, StoreError, TransientError
from replanning.journal.records import Failure
from replanning.live.entries import TaskEntry
from replanning.run.event_loop import describe_error
from replanning.secrets import Redactor
from replanning.settings import Settings

IsTransient = Callable[[Exception], bool]
"""Says whether an exception that is not recognised may pass."""

_MAX_DELAY_SECONDS: Final = 3600.0

_MAX_DOUBLINGS: Final = 62
"""By then every delay has reached the maximum, and a float still holds it."""

MAX_MESSAGE_CHARS: Final = 8_000

MAX_TRACEBACK_CHARS: Final = 4_000

_REDACTION_MARGIN: Final = 1_000

_MAX_FRAMES: Final = 30

_HIDDEN_FRAMES: Final = (f"{Path(__file__).parents[1]}{os.sep}", anyio.__path__[0] + os.sep)

_MAX_WRAPPED_ERRORS: Final = 5

_STATUS_FIELDS: Final = ("status_code", "status", "code", "http_status")

TRANSIENT_ERRNOS: Final = (
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT),
    *(errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS),
)
"""Errors of the operating system that may pass: of the network, and a lack of descriptors, processes or memory."""

_VERDICTS: Final[dict[str, str]] = {
    f"{package}.{name}": verdict
    for verdict, packages, names in (
        ("transient", "builtins requests botocore redis", "ConnectionError ConnectionClosedError"),
        ("transient", "http requests", "IncompleteRead ChunkedEncodingError RetryError"),
        (
            "transient",
            "urllib3",
            "NewConnectionError ConnectTimeoutError EmptyPoolError ProtocolError ResponseError",
        ),
        (
            "transient",
            "httpx httpx2 httpcore httpcore2",
            "NetworkError ConnectTimeout PoolTimeout RemoteProtocolError",
        ),
        ("transient", "aiohttp", "ClientConnectionError ClientPayloadError ConnectionTimeoutError"),
        (
            "transient",
            "socket psycopg psycopg2 openai anthropic",
            "gaierror OperationalError APIConnectionError",
        ),
        (
            "timeout",
            "builtins requests urllib3 botocore redis",
            "TimeoutError Timeout ReadTimeoutError",
        ),
        (
            "timeout",
            "httpx httpx2 httpcore httpcore2 aiohttp",
            "TimeoutException ServerTimeoutError",
        ),
        (
            "permanent",
            "aiohttp requests urllib3 botocore",
            "ClientSSLError SSLError ServerFingerprintMismatch",
        ),
        ("permanent", "psycopg psycopg2 redis", "InvalidPassword AuthenticationError"),
    )
    for package in packages.split()
    for name in names.split()
}
"""What the classes of common clients say, by top-level package and name; the nearest base class decides.

After a timeout the request may have been carried out, so only an idempotent task is run again. A request to a language
model may be repeated."""

_AWS_TRANSIENT: Final = re.compile(
    "Throttl|TooManyRequests|ThroughputExceeded|(?:Request|Bandwidth)LimitExceeded|LimitExceededException|SlowDown"
    "|PriorRequestNotComplete|TransactionInProgress|RequestTimeout"
)
"""Codes of botocore that may pass; most of them come with HTTP 400."""

_SQLITE_BUSY: Final = (
    "SQLITE_BUSY",
    "SQLITE_LOCKED",
    "database is locked",
    "database table is locked",
)
"""Beginnings of the name, or without one of the message, of an error of SQLite that may pass."""


class FailedElsewhere(ReplanningError):
    """Work failed in another process; raised by work that hands tasks on, it stands for that failure.

    Args:
        failure: the record of the failure.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def is_transient_status(status: int) -> bool:
    """Return whether the cause of an HTTP status may pass: 408, 409, 425, 429 and 5xx."""
    return status in (408, 409, 425, 429) or status >= 500


def failure_from(
    error: BaseException | str,
    retry_on: Collection[int | str] = (),
    idempotent: bool = False,
    is_transient: IsTransient | None = None,
) -> Failure:
    """Return the record of an exception; a group of exceptions is one failure, transient if all its parts are.

    Transient are TransientError, connection errors, HTTP 408, 409, 425, 429 and 5xx, a failing store, and the errors of
    common clients that say the same. They are recognised by class and attributes, without an import of the client.

    Args:
        error: the exception, or a message.
        retry_on: further classes of exceptions by name, and HTTP statuses, that may pass.
        idempotent: whether the task may be run again after a timeout.
        is_transient: decides about the rest.
    """
    if isinstance(error, str):
        return Failure("Error", error)
    if isinstance(error, FailedElsewhere):
        return error.failure
    message = str(error) or describe_error(error)
    if isinstance(error, NotAccepted):
        return Failure("NotAccepted", message, kind=error.kind)
    if isinstance(error, BaseExceptionGroup):
        message = f"{message}: " + "; ".join(str(failure_from(part)) for part in error.exceptions)
    try:
        if len(error.args) == 1 and message == repr(
            error.args[0]
        ):  # a key says little without its KeyError
            message = f"{type(error).__name__}: {message}"
        transient = _may_pass(error, retry_on, idempotent, is_transient)
    except Exception as problem:  # noqa: BLE001 - the predicate is the user's code
        told = describe_error(problem)
        transient, message = False, f"{message} (whether it may pass cannot be told: {told})"
    return Failure(type(error).__name__, message, transient, traceback=format_traceback(error))


def format_traceback(error: BaseException) -> str:
    """Return the traceback of an exception and of its causes, without the frames of this library and of anyio.

    Values of variables are not in it. Where no frame remains, there is none.
    """
    parts = [(TracebackException.from_exception(error, limit=0), error)]
    for part, raised in parts:
        # Python would look for the marks under each line, which takes longer than everything else that a failure costs.
        frames = deque(walk_tb(raised.__traceback__), _MAX_FRAMES)
        part.stack[:] = [
            FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name, lookup_line=False)
            for frame, line in frames
            if not frame.f_code.co_filename.startswith(_HIDDEN_FRAMES)
        ]
        related = (part.__cause__, raised.__cause__), (part.__context__, raised.__context__)
        inner = zip(part.exceptions or (), getattr(raised, "exceptions", ()), strict=False)
        parts += [(shown, other) for shown, other in (*related, *inner) if shown is not None]
    return "".join(parts[0][0].format()) if any(part.stack for part, _ in parts) else ""


def redact_bounded(text: str, most: int, redactor: Redactor) -> str:
    """Return a text without secrets; of a long one the beginning and the end."""
    half, margin = most // 2, _REDACTION_MARGIN
    if len(text) <= most + 2 * margin and len(clean := redactor.text(text)) <= most:
        return clean
    # A part may be cut within a secret, which is not recognised then.
    head, tail = (
        redactor.text(text[: half + margin])[:-margin],
        redactor.text(text[-half - margin :])[margin:],
    )
    return f"{head[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{tail[-half:]}"


@lru_cache(256)
def _class_names(kind: type) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the names of an exception's classes: with their top-level packages, and in every form that users may write."""
    classes = [(base.__module__, base.__name__) for base in kind.__mro__]
    names = tuple(f"{module.partition('.')[0]}.{name}" for module, name in classes)
    return names, frozenset((*names, *map(".".join, classes), *(name for _, name in classes)))


def _may_pass(
    error: BaseException,
    retry_on: Collection[int | str],
    idempotent: bool,
    is_transient: IsTransient | None,
) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_may_pass(part, retry_on, idempotent, is_transient) for part in error.exceptions)
    verdict: str | None = None
    wrapped: object = error
    chain: list[BaseException] = []
    while isinstance(wrapped, BaseException) and len(chain) < _MAX_WRAPPED_ERRORS:
        chain.append(wrapped)
        wrapped = getattr(wrapped, "orig", None) or getattr(
            wrapped, "reason", None
        )  # of SQLAlchemy; urllib, urllib3
    for part in chain:
        names, every_name = _class_names(type(part))  # type: ignore[arg-type]  # a class can be hashed
        response = getattr(part, "response", None)
        if isinstance(response, dict):  # of botocore
            statuses = [response.get("ResponseMetadata", {}).get("HTTPStatusCode")]
        else:
            statuses = [
                getattr(owner, field, None)
                for owner in (part, response)
                for field in _STATUS_FIELDS
            ]
        status = next(
            (status for status in statuses if isinstance(status, int) and 400 <= status <= 599),
            None,
        )
        if retry_on and (status in retry_on or not every_name.isdisjoint(retry_on)):
            return True
        if verdict is not None:
            pass  # an error says more than the one that it wraps
        elif (
            isinstance(part, TransientError | StoreError)
            or getattr(part, "errno", None) in TRANSIENT_ERRNOS
            or (
                isinstance(response, dict)
                and _AWS_TRANSIENT.search(str(response.get("Error", {}).get("Code")))
            )
        ):
            verdict = "transient"
        elif status is not None:
            verdict = "transient" if is_transient_status(status) else "permanent"
        elif "sqlite3.OperationalError" in names:
            text = getattr(part, "sqlite_errorname", None) or str(part)
            verdict = "transient" if text.startswith(_SQLITE_BUSY) else "permanent"
        else:
            verdict = next((_VERDICTS[name] for name in names if name in _VERDICTS), None)
    if verdict == "transient" or (verdict == "timeout" and idempotent):
        return True
    return is_transient is not None and isinstance(error, Exception) and is_transient(error)


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
    if failure.kind in (
        "rejected",
        "blocked",
    ):  # a judge's verdict, which says that the task is not run again
        return None, True
    if failure.kind == "interrupted":
        return (now, False) if entry.task.idempotent else (None, True)
    policy = entry.task.retry or settings.retry
    repeatable = failure.transient or (failure.kind == "timeout" and entry.task.idempotent)
    delay = policy.delay * (
        2 ** min(entry.log.in_round - 1, _MAX_DOUBLINGS) if policy.exponential else 1
    )
    if policy.jitter:
        delay *= 0.5 + chance
    due = now + min(delay, _MAX_DELAY_SECONDS)
    if repeatable and entry.log.in_round < policy.max_attempts:
        return due, False
    if entry.log.failures + 1 < settings.failure_threshold and failure.kind != "timeout":
        return due, True
    return None, True
