"""Failures of attempts: their record, whether they are transient, and when to try again."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from linecache import getline
from pathlib import Path
from subprocess import CalledProcessError
from textwrap import indent
from traceback import walk_tb
from typing import Final, Literal, NamedTuple

import anyio

from replanning.errors import (
    NotAccepted,
    OutputError,
    ReplanningError,
    StoreError,
    ToolError,
    TransientError,
    UnexpectedOutput,
)
from replanning.journal.records import Failure
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.plan.messages import pluralise, truncate
from replanning.plan.tasks import (
    READING_METHODS,
    TIMEOUT,
    TaskBody,
    ToolSpec,
    allows_repetition,
    confirmation_of,
    has_no_effect,
    is_repeatable,
    stated_retry,
)
from replanning.plan.types import TaskId
from replanning.run.event_loop import describe_error
from replanning.secrets import Redactor
from replanning.settings import Settings

IsTransient = Callable[[Exception], bool]
"""Decides whether an unrecognised exception is transient."""

MAX_MESSAGE_CHARS: Final = 8_000

MAX_TRACEBACK_CHARS: Final = 4_000

_REDACTION_MARGIN: Final = 1_000

_MAX_ERROR_CHARS: Final = 2_000

_plugin_log: Final = logging.getLogger("replanning")

_MAX_FRAMES: Final = 30

_HIDDEN_FRAMES: Final = (f"{Path(__file__).parents[1]}{os.sep}", anyio.__path__[0] + os.sep)

_CAUSE_LINK: Final = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT_LINK: Final = "\nDuring handling of the above exception, another exception occurred:\n\n"

_MAX_WRAPPED_ERRORS: Final = 5

_STATUS_FIELDS: Final = ("status_code", "status", "code", "http_status")

_EXIT_CODE_FIELDS: Final = ("exit_code", "returncode", "exit_status")

_TIMEOUT_CLASS: Final = re.compile("Timeout|TimedOut")
"""Class names of timeout errors in the standard library and in most clients."""

TRANSIENT_ERRNOS: Final = (
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS),
)
"""Transient errors of the system: of the network, or a lack of resources."""

Verdict = Literal["may-pass", "definite", "in-doubt"]
"""Verdict of an exception about the work that raised it.

`may-pass`: no effect, and the cause is transient. `definite`: no effect, and another try would not
help. `in-doubt`: it is unknown whether it took effect.
"""

_MAY_PASS_CLASSES: Final = {
    "builtins": ("ConnectionError", "ConnectionRefusedError"),
    "socket": ("gaierror",),
    "httpx": ("ConnectError", "ConnectTimeout", "PoolTimeout"),
    "httpx2": ("ConnectError", "ConnectTimeout", "PoolTimeout"),
    "httpcore": ("ConnectError", "ConnectTimeout", "PoolTimeout"),
    "httpcore2": ("ConnectError", "ConnectTimeout", "PoolTimeout"),
    "requests": ("ConnectTimeout",),
    "urllib3": ("NewConnectionError", "ConnectTimeoutError", "EmptyPoolError"),
    "aiohttp": ("ClientConnectorError", "ConnectionTimeoutError"),
    "botocore": ("EndpointConnectionError", "ConnectTimeoutError"),
    "psycopg": (
        *("ConnectionTimeout", "CannotConnectNow"),
        *("SerializationFailure", "DeadlockDetected", "TransactionRollback"),
    ),
    "psycopg2": ("TransactionRollbackError", "CannotConnectNow", "SerializationFailure"),
    # A request to a language model has no effects.
    "openai": ("APIConnectionError",),
    "anthropic": ("APIConnectionError",),
}
"""Classes of errors that were raised before anything was sent, by top-level package."""

_IN_DOUBT_CLASSES: Final = {
    "builtins": (
        *("TimeoutError", "ConnectionResetError", "ConnectionAbortedError", "BrokenPipeError"),
    ),
    # The work waited for something that was cancelled: its own, a client's, or in a thread.
    "replanning": ("CancelledWithin",),
    "asyncio": ("CancelledError", "IncompleteReadError"),
    # A killed process of a pool breaks the pool.
    "concurrent": ("CancelledError", "BrokenExecutor"),
    "trio": ("Cancelled", "BrokenResourceError", "TooSlowError"),
    "anyio": ("BrokenResourceError", "BrokenWorkerProcess", "EndOfStream", "IncompleteRead"),
    "subprocess": ("TimeoutExpired",),
    "ssl": ("SSLEOFError", "SSLZeroReturnError"),
    "http": ("IncompleteRead", "RemoteDisconnected"),
    "smtplib": ("SMTPServerDisconnected",),
    "httpx": ("NetworkError", "RemoteProtocolError", "TimeoutException"),
    "httpx2": ("NetworkError", "RemoteProtocolError", "TimeoutException"),
    "httpcore": ("NetworkError", "RemoteProtocolError", "TimeoutException"),
    "httpcore2": ("NetworkError", "RemoteProtocolError", "TimeoutException"),
    "requests": ("ConnectionError", "Timeout", "ChunkedEncodingError", "RetryError"),
    "urllib3": ("ProtocolError", "ResponseError", "ReadTimeoutError", "TimeoutError"),
    "aiohttp": ("ClientConnectionError", "ClientPayloadError", "ServerTimeoutError"),
    "botocore": ("ConnectionError", "ConnectionClosedError", "ReadTimeoutError"),
    "redis": ("ConnectionError", "TimeoutError"),
    "psycopg": ("OperationalError",),
    "psycopg2": ("OperationalError",),
    "stripe": ("APIConnectionError",),
    "pymongo": ("AutoReconnect",),
    "websockets": ("ConnectionClosed",),
}
"""Classes of errors raised after a request was sent, or by clients that cannot tell."""

_DEFINITE_CLASSES: Final = {
    "aiohttp": ("ClientSSLError", "ServerFingerprintMismatch"),
    "requests": ("SSLError",),
    "urllib3": ("SSLError",),
    "botocore": ("SSLError",),
    "psycopg": ("InvalidPassword",),
    "psycopg2": ("InvalidPassword",),
    "redis": ("AuthenticationError",),
}
"""Classes derived from one of the above whose errors are permanent."""


def _verdicts_by_class() -> dict[str, Verdict]:
    tables: tuple[tuple[Verdict, Mapping[str, Sequence[str]]], ...] = (
        ("may-pass", _MAY_PASS_CLASSES),
        ("in-doubt", _IN_DOUBT_CLASSES),
        ("definite", _DEFINITE_CLASSES),
    )
    verdicts: dict[str, Verdict] = {}
    for verdict, table in tables:
        for package, names in table.items():
            for name in names:
                verdicts[f"{package}.{name}"] = verdict
    return verdicts


_VERDICTS: Final = _verdicts_by_class()
"""Verdicts of classes by top-level package and name; the nearest base class decides."""

_UNCLEAR_CLASSES: Final = (
    *("requests.ConnectionError", "requests.RetryError"),
    "builtins.ConnectionError",
)
"""Classes whose wrapped error says more."""

_AWS_TRANSIENT: Final = re.compile(
    "Throttl|TooManyRequests|ThroughputExceeded|(?:Request|Bandwidth)LimitExceeded|LimitExceededException|SlowDown"
    "|PriorRequestNotComplete|TransactionInProgress|RequestTimeout"
)
"""Transient error codes of botocore; most of them come with HTTP 400."""

_MCP_TIMED_OUT: Final = (408, -32001)
"""Error codes of the MCP SDK, by version, for a request that timed out."""

_MCP_LOST: Final = -32000
"""Error code of the MCP SDK for a lost connection; servers use it for errors of their own, too."""

_MCP_LOST_MESSAGES: Final = ("Connection closed", "SSE stream ")
"""Beginnings of the SDK's messages about a lost connection."""

_SQLITE_BUSY: Final = (
    "SQLITE_BUSY",
    "SQLITE_LOCKED",
    "database is locked",
    "database table is locked",
)
"""Prefixes of the name of a transient SQLite error, or of its message if it has no name."""


class FailedElsewhere(ReplanningError):
    """Work failed in another process.

    Work that delegates tasks raises it in place of that failure.

    Args:
        failure: the record of the failure.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def status_verdict(status: int) -> Verdict:
    """Return the verdict of a status: 408, 425, 429, 503 refuse; any other 5xx is in doubt."""
    if status in (408, 425, 429, 503):
        return "may-pass"
    return "in-doubt" if status >= 500 else "definite"


def failure_from(
    error: BaseException | str,
    retry_on: Collection[int | str] | None = None,
    is_transient: IsTransient | None = None,
) -> Failure:
    """Return the record of an exception; a group of exceptions is one failure.

    A group is transient if all its parts are, and in doubt if one of them is. It looks at classes
    and attributes, and does not import the clients that define them.

    Args:
        error: the exception, or a message.
        retry_on: failures to retry: exception classes, HTTP statuses, exit codes, `timeout`.
        is_transient: decides about unrecognised exceptions.
    """
    if isinstance(error, str):
        return Failure("Error", error)
    if isinstance(error, FailedElsewhere):
        return error.failure
    message = _text_of(error) or describe_error(error)
    if isinstance(error, NotAccepted):
        return Failure("NotAccepted", message, kind=error.kind)
    if isinstance(error, BaseExceptionGroup):
        message = f"{message}: " + "; ".join(str(failure_from(part)) for part in error.exceptions)
    try:
        if len(error.args) == 1 and message == repr(
            error.args[0]
        ):  # a key means little without its KeyError
            message = f"{type(error).__name__}: {message}"
        found = _classify(error, retry_on, is_transient)
    except Exception as problem:  # noqa: BLE001 - the predicate is the user's code
        told = describe_error(problem)
        message = f"{message} (could not tell whether the error is transient: {told})"
        found = _Finding(may_pass=False, in_doubt=False)
    failure = Failure(
        type(error).__name__,
        message,
        found.may_pass,
        traceback=format_traceback(error),
        in_doubt=found.in_doubt,
        named=found.named,
    )
    if isinstance(error, OutputError):
        failure = replace(failure, kind="output")
    if isinstance(error, UnexpectedOutput):
        # If the answer makes no sense, it is unknown what the call did.
        is_known = error.not_done or error.missed
        failure = replace(failure, kind="unexpected", in_doubt=not is_known)
    return failure


def _text_of(error: BaseException) -> str:
    """Return the text of an exception; "" if its class, perhaps a user's, fails to return it."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - classes of users may raise anything
        return ""


def format_traceback(error: BaseException, told: set[int] | None = None) -> str:
    """Return the traceback of an exception and its causes, without frames of libraries.

    Values of variables are not in it. If no frame remains, there is none. Python's own formatter
    takes several times as long, mostly for parts that are left out here.

    Args:
        error: the exception.
        told: the ids of exceptions that are already included, for a part of a group.
    """
    related = error.__cause__ or error.__context__ or getattr(error, "exceptions", None)
    if error.__traceback__ is None and not related:
        return ""  # it was never raised
    if told is None:
        told = set()
    # The exception and those before it, last first, each with the line that links it to the next.
    chain: list[tuple[BaseException, str]] = []
    link = ""
    before: BaseException | None = error
    while before is not None and id(before) not in told:
        told.add(id(before))
        chain.append((before, link))
        link = _CAUSE_LINK
        cause = before.__cause__
        if cause is None and not before.__suppress_context__:
            link = _CONTEXT_LINK
            cause = before.__context__
        before = cause

    has_frames = False
    pieces: list[str] = []
    for part, link in reversed(chain):
        frames = _frame_lines(part)
        if frames:
            has_frames = True
            pieces.append("Traceback (most recent call last):\n")
            pieces += frames
        name = f"{type(part).__module__}.{type(part).__qualname__}".removeprefix("builtins.")
        text = _text_of(part)
        if text:
            name = f"{name}: {text}"
        pieces.append(f"{name}\n")
        for note in getattr(part, "__notes__", ()):
            pieces.append(f"{note}\n")
        if isinstance(part, BaseExceptionGroup):
            for place, inner in enumerate(part.exceptions, 1):
                traceback = format_traceback(inner, told)
                if traceback:
                    has_frames = True
                    pieces.append(f"  +---------------- {place} ----------------\n")
                    pieces.append(indent(traceback, "  | "))
        pieces.append(link)
    if not has_frames:
        return ""
    return "".join(pieces)


def _frame_lines(error: BaseException) -> list[str]:
    """Return the lines of a traceback for the last frames of an exception, without libraries."""
    lines = []
    for frame, number in deque(walk_tb(error.__traceback__), _MAX_FRAMES):
        code = frame.f_code
        if code.co_filename.startswith(_HIDDEN_FRAMES):
            continue
        lines.append(f'  File "{code.co_filename}", line {number}, in {code.co_name}\n')
        source = getline(code.co_filename, number, frame.f_globals).strip()
        if source:
            lines.append(f"    {source}\n")
    return lines


def bounded(text: str, most: int) -> str:
    """Return a text, or the beginning and the end of a long one."""
    if len(text) <= most:
        return text
    half = most // 2
    left_out = pluralise(len(text) - 2 * half, "character")
    return f"{text[:half]}\n[... {left_out} left out ...]\n{text[-half:]}"


def redact_bounded(text: str, most: int, redactor: Redactor) -> str:
    """Return a text without secrets, or the beginning and the end of a long one."""
    margin = _REDACTION_MARGIN
    if len(text) <= most + 2 * margin:
        clean = redactor.text(text)
        if len(clean) <= most:
            return clean
    half = most // 2
    # A cut may go through a secret, which is then not recognised.
    head = redactor.text(text[: half + margin])[:-margin]
    tail = redactor.text(text[-half - margin :])[margin:]
    left_out = pluralise(len(text) - 2 * half, "character")
    return f"{head[:half]}\n[... {left_out} left out ...]\n{tail[-half:]}"


class _ErrorClass(NamedTuple):
    """Information from the class of an exception.

    Attributes:
        names: the names of the class and its bases, in every form that users may write.
        verdict: the verdict of the nearest recognised base class.
        is_unclear: whether its wrapped error says more.
    """

    names: frozenset[str]
    verdict: Verdict | None
    is_unclear: bool


@lru_cache(256)
def _error_class(kind: type) -> _ErrorClass:
    classes = [(base.__module__, base.__name__) for base in kind.__mro__]
    names = [f"{module.partition('.')[0]}.{name}" for module, name in classes]
    verdict: Verdict | None = None
    for name in names:
        verdict = _VERDICTS.get(name)
        # A client whose error is derived from Python's may raise it after a request was sent.
        if name == "builtins.ConnectionError" and name != names[0]:
            verdict = "in-doubt"
        if verdict is not None:
            break
    every_name = {*names, *map(".".join, classes), *(name for _, name in classes)}
    if any(_TIMEOUT_CLASS.search(name) for _, name in classes):
        every_name.add(TIMEOUT)
    return _ErrorClass(frozenset(every_name), verdict, names[0] in _UNCLEAR_CLASSES)


class _Finding(NamedTuple):
    """Verdict of an exception, with its causes, about the work.

    Attributes:
        may_pass: whether the work may be retried: the cause is transient, or the error is named.
        in_doubt: whether the work may have taken effect.
        named: whether `on` of its retries names the error.
    """

    may_pass: bool
    in_doubt: bool
    named: bool = False


def _classify(
    error: BaseException, retry_on: Collection[int | str] | None, is_transient: IsTransient | None
) -> _Finding:
    """Return the verdict of an exception, or of a group of them."""
    if isinstance(error, BaseExceptionGroup):
        return _classify_group(error, retry_on, is_transient)
    # The exception and its causes, outermost first. The first clear verdict counts.
    chain: list[BaseException] = []
    verdict: Verdict | None = None
    is_clear = False
    wrapped: object = error
    while isinstance(wrapped, BaseException) and len(chain) < _MAX_WRAPPED_ERRORS:
        chain.append(wrapped)
        is_unclear = _error_class(type(wrapped)).is_unclear  # type: ignore[arg-type]
        if not is_clear:
            found = _verdict(wrapped)
            is_clear = found is not None and not is_unclear
            if is_clear or verdict is None:
                verdict = found
        inner = getattr(wrapped, "orig", None)  # of SQLAlchemy
        if inner is None:
            inner = getattr(wrapped, "reason", None)  # of urllib and urllib3
        if inner is None and is_unclear and wrapped.args:
            inner = wrapped.args[0]
        if not isinstance(inner, BaseException) and (verdict is None or is_unclear):
            # `raise PaymentFailed() from error`: a request lost on the way is in doubt all the
            # same.
            inner = wrapped.__cause__
        wrapped = inner
    if verdict == "in-doubt" and _only_reads(chain):
        verdict = "may-pass"
    if verdict is None and error.__context__ is not None and _hides_doubt(error):
        verdict = "in-doubt"
    in_doubt = verdict == "in-doubt"
    if retry_on and any(_is_named(part, retry_on) for part in (*chain, *_causes(error))):
        return _Finding(may_pass=True, in_doubt=in_doubt, named=True)
    if is_transient is not None and verdict in ("definite", None):
        if isinstance(error, Exception) and is_transient(error):
            return _Finding(may_pass=True, in_doubt=False)
    return _Finding(verdict == "may-pass", in_doubt)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the causes of an exception; its class may wrap them."""
    cause = error.__cause__
    for _ in range(_MAX_WRAPPED_ERRORS):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__


def _hides_doubt(error: BaseException) -> bool:
    """Return whether an exception was raised, without `from`, while one in doubt was handled."""
    for _ in range(_MAX_WRAPPED_ERRORS):
        handled = error.__context__
        # `from None` says that the handled exception does not matter.
        if handled is None or error.__suppress_context__:
            return False
        if _verdict(handled) == "in-doubt":
            return not _only_reads([handled])
        error = handled
    return False


def _classify_group(
    group: BaseExceptionGroup[BaseException],
    retry_on: Collection[int | str] | None,
    is_transient: IsTransient | None,
) -> _Finding:
    """Return the verdict of a group of exceptions."""
    parts = [_classify(part, retry_on, is_transient) for part in group.exceptions]
    # A part in doubt may be retried only if `retry_on` names it.
    return _Finding(
        may_pass=all(part.may_pass for part in parts),
        in_doubt=any(part.in_doubt for part in parts),
        named=all(part.named for part in parts),
    )


def _verdict(part: BaseException) -> Verdict | None:
    """Return the verdict of one exception, without its causes.

    It returns None if the exception is not recognised.
    """
    if isinstance(part, ToolError) and part.in_doubt:
        return "in-doubt"
    if isinstance(part, BaseExceptionGroup):
        return "in-doubt" if _classify_group(part, None, None).in_doubt else None
    if isinstance(part, (TransientError, StoreError)):
        return "may-pass"
    if getattr(part, "errno", None) in TRANSIENT_ERRNOS:
        return "may-pass"
    response = getattr(part, "response", None)
    if isinstance(response, dict):  # of botocore
        code = str(response.get("Error", {}).get("Code"))
        if _AWS_TRANSIENT.search(code):
            return "may-pass"
    kind = _error_class(type(part))  # type: ignore[arg-type]  # a class can be hashed
    if not kind.names.isdisjoint(("mcp.MCPError", "mcp.McpError")):
        told = getattr(part, "error", None)
        if is_lost_mcp_connection(told) or getattr(told, "code", None) in _MCP_TIMED_OUT:
            return "in-doubt"
        return None
    status = _status(part)
    if status is not None:
        return status_verdict(status)
    if "sqlite3.OperationalError" in kind.names:
        text = getattr(part, "sqlite_errorname", None) or str(part)
        return "may-pass" if text.startswith(_SQLITE_BUSY) else "definite"
    if isinstance(part, CalledProcessError) and part.returncode < 0:
        return "in-doubt"  # a signal ended it
    return kind.verdict


def is_lost_mcp_connection(error: object) -> bool:
    """Return whether the error data of the MCP SDK stands for a lost connection.

    Otherwise the server has answered, even if its error has the same code.
    """
    if getattr(error, "code", None) != _MCP_LOST:
        return False
    return str(getattr(error, "message", "")).startswith(_MCP_LOST_MESSAGES)


def _status(part: BaseException) -> int | None:
    """Return the HTTP status of an exception; None if it has none."""
    response = getattr(part, "response", None)
    if isinstance(response, dict):  # of botocore
        return _failure_status(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    for owner in (part, response):
        if owner is None:
            continue
        for name in _STATUS_FIELDS:
            value = getattr(owner, name, None)
            if value is None:
                continue
            status = _failure_status(value)
            if status is not None:
                return status
    return None


def _failure_status(value: object) -> int | None:
    """Return a value that is the HTTP status of a failure; None for any other."""
    if isinstance(value, int) and 400 <= value <= 599:
        return value
    return None


def _only_reads(chain: Sequence[BaseException]) -> bool:
    """Return whether an exception has its request, and that request changes nothing."""
    for part in chain:
        request: object = None
        for name in ("request", "request_info"):
            with suppress(RuntimeError):  # of httpx, if the exception has no request
                request = request or getattr(part, name, None)
        if getattr(request, "method", None) in READING_METHODS:
            return True
    return False


def _exit_code(part: BaseException) -> int | None:
    """Return the exit code of an exception, as a shell counts it; None if it has none."""
    for field_name in _EXIT_CODE_FIELDS:
        code = getattr(part, field_name, None)
        if isinstance(code, int):
            # Python gives the number of the signal that ended a process as a negative one.
            return 128 - code if code < 0 else code
    return None


def _is_named(part: BaseException, retry_on: Collection[int | str]) -> bool:
    names = _error_class(type(part)).names  # type: ignore[arg-type]  # a class can be hashed
    # No number is both: statuses begin above the largest exit code.
    numbers = {_status(part), _exit_code(part)}
    return not names.union(numbers).isdisjoint(retry_on)


def warn_of_error(where: str, error: BaseException | str, redactor: Redactor) -> str:
    """Warn of an error that was contained, on the logger `replanning`, with its traceback.

    An error of this library, such as a forge's refusal, is written for the reader: its text says
    what is wrong and what to do, and a traceback would only hide it.

    Returns:
        The text of the error, without secrets, like the warning.
    """
    if isinstance(error, str):
        text = error
        traceback = ""
    elif isinstance(error, ReplanningError):
        text = describe_error(error)
        traceback = ""
    else:
        text = describe_error(error)
        traceback = redact_bounded(format_traceback(error), MAX_TRACEBACK_CHARS, redactor)
    # Masked before it is cut, because a part of a secret would not be recognised.
    text = truncate(redactor.text(text), _MAX_ERROR_CHARS)
    _plugin_log.warning("%s", f"{where}: {text}\n{traceback}".rstrip())
    return text


@dataclass(slots=True, eq=False, repr=False)
class FailureKeeper:
    """Records the failures of a run's attempts, and keeps the true texts of masked ones.

    Attributes:
        settings: the retries of tasks that declare none, and how often a judge may ask for more.
        redactor: masks secrets.
        chance: returns a random number in [0, 1) that spreads the delay of a retry.
        is_transient: decides whether an unrecognised exception is transient.
        record_error: records an error of `is_transient`.
    """

    settings: Settings
    redactor: Redactor
    chance: Callable[[], float]
    is_transient: IsTransient | None
    record_error: Callable[[str, BaseException], None]
    _masked: dict[TaskId, tuple[Failure, Failure]] = field(default_factory=dict)

    def take(
        self,
        entry: TaskEntry,
        call: TaskBody,
        tool: ToolSpec | None,
        error: BaseException | str | Failure,
    ) -> Failure:
        """Return the failure to record: bounded, and masked before anything is cut off.

        It is masked here and not where the record is stored, because causes and reasons contain
        parts of its text, where a secret would no longer be recognised. The caller gets the true
        text, see `last_failure`.

        Args:
            entry: the task.
            call: the executed call: the task itself, or its confirmation.
            tool: the tool of that, if the plan describes it.
            error: the exception.
        """
        if isinstance(error, Failure):
            failure = error
        else:
            policy = stated_retry(call, tool) or self.settings.retry
            is_transient = None
            if self.is_transient is not None:
                is_transient = self._ask_is_transient
            failure = failure_from(error, policy.on, is_transient)
        if failure.kind == "unexpected":
            if has_no_effect(call, tool):
                failure = replace(failure, in_doubt=False)
            elif isinstance(error, UnexpectedOutput) and error.not_done:
                # As a rule, no other tool makes the change, and a retry does no harm.
                failure = replace(failure, transient=True)
        message = failure.message
        kind = failure.kind
        most = self.settings.judge.max_iterations
        if kind == "unfinished" and entry.log.continuations + 1 >= most:
            # A judge that is never satisfied would keep the task running forever.
            attempts = pluralise(most, "attempt")
            message = f"still unfinished after {attempts} (judge.max_iterations): {message}"
            kind = "blocked"
        name = self.redactor.text(failure.type)
        clean = redact_bounded(message, MAX_MESSAGE_CHARS, self.redactor)
        traceback = redact_bounded(failure.traceback, MAX_TRACEBACK_CHARS, self.redactor)
        if (name, clean, traceback) == (failure.type, failure.message, failure.traceback):
            return failure
        masked = replace(failure, type=name, message=clean, kind=kind, traceback=traceback)
        if clean != message or traceback != failure.traceback:
            true = replace(
                masked,
                message=bounded(message, MAX_MESSAGE_CHARS),
                traceback=bounded(failure.traceback, MAX_TRACEBACK_CHARS),
            )
            self._masked[entry.id] = masked, true
        return masked

    def _ask_is_transient(self, error: Exception) -> bool:
        assert self.is_transient is not None
        try:
            return self.is_transient(error)
        except Exception as problem:
            self.record_error("is_transient", problem)
            raise

    def schedule_retry(
        self, entry: TaskEntry, tool: ToolSpec | None, failure: Failure, now: float
    ) -> tuple[float | None, bool]:
        """Decide when a task runs again after a failed attempt.

        Args:
            entry: the task, whose attempt has failed.
            tool: its tool, if the plan describes it.
            failure: the failure.
            now: seconds since the epoch.

        Returns:
            The time of the next attempt, or None; and whether it begins a new round, because the
            retries are used up and `failure_threshold` allows further failures.
        """
        # A judge asked for more work. That is not a failure and uses up no retry.
        if failure.kind == "unfinished":
            return now, False
        if failure.kind in ("rejected", "blocked"):
            return None, False  # a judge's verdict that the task must not run again
        policy = stated_retry(entry.task, tool) or self.settings.retry
        if failure.kind == "timeout" and policy.names_timeouts:
            failure = replace(failure, transient=True, named=True)
        repeatable = may_repeat(entry.task, tool, failure)
        if failure.kind == "interrupted":  # not the fault of the task, so it runs again at once
            return (now, False) if repeatable else (None, False)
        log = entry.log
        allows_round = log.failures + 1 < self.settings.failure_threshold
        if failure.in_doubt and not repeatable:
            allows_round = False
        begins_round = not repeatable or log.in_round >= policy.max_attempts
        if begins_round and not allows_round:
            return None, False
        chance = 0.5
        if policy.jitter:
            chance = self.chance()
        retry_at = now + policy.delay_after(log.in_round, chance)
        if policy.max_seconds is not None and not begins_round:
            began = log.started_at if log.in_round == 1 else log.round_started_at
            begins_round = retry_at - began > policy.max_seconds
            if begins_round and not allows_round:
                return None, False
        return retry_at, begins_round

    def schedule_confirmation(
        self, entry: TaskEntry, live: LivePlan, failure: Failure, now: float
    ) -> float | None:
        """Decide when a failed attempt is confirmed, or its confirmation is repeated.

        A confirmation that has failed is repeated as the call of its tool would be.

        Args:
            entry: the task, whose attempt, or a confirmation of it, has failed.
            live: the plan.
            failure: the failure.
            now: seconds since the epoch.

        Returns:
            The time of the next confirmation; None if nothing is in doubt, no confirmation is
            declared, or the retries of the confirming tool are used up.
        """
        doubt = entry.log.doubt
        if doubt is None:
            if not failure.in_doubt:
                return None
            can_ask = confirmation_of(entry.task, live.tool_of(entry.task)) is not None
            return now if can_ask else None
        if failure.not_done:
            return None
        if failure.kind == "interrupted":  # not the fault of the confirmation
            return now
        call = doubt.confirm.call
        tool = live.tools.get(doubt.confirm.tool)
        policy = stated_retry(call, tool) or self.settings.retry
        attempts = doubt.failed + 1
        if attempts >= policy.max_attempts or not may_repeat(call, tool, failure):
            return None
        chance = 0.5
        if policy.jitter:
            chance = self.chance()
        return now + policy.delay_after(attempts, chance)

    def last_failure(self, entry: TaskEntry) -> Failure | None:
        """Return the last failure of a task for the caller, with its unmasked text if known.

        A resumed run has only what its journal has.
        """
        recorded = entry.log.failure
        masked, true = self._masked.get(entry.id, (None, None))
        return true if masked is recorded else recorded


def may_repeat(task: TaskBody, tool: ToolSpec | None, failure: Failure) -> bool:
    """Return whether a task may be retried automatically after a failure.

    The first case that fits decides:

    1. Its output cannot be stored: never, because it would be as large again. A call that may have
       changed something returned an unexpected output: only if repeating is harmless.
    2. Its declared retries name failures, but not this one: no.
    3. In doubt: only if repeating is harmless, or if retries are declared for it.
    4. Its declared retries are for every failure, or name this one: yes.
    5. Otherwise: if its cause is transient.
    """
    if failure.kind == "output":
        return False
    if failure.kind == "unexpected" and failure.in_doubt:
        return is_repeatable(task, tool)
    retry = stated_retry(task, tool)
    is_retried = False
    # A failure that was cut off from outside, or never began, cannot be named.
    if retry is not None and failure.kind in ("error", "timeout", "unexpected"):
        is_retried = retry.states_attempts
        if is_retried and retry.on is not None:
            if not failure.named:
                return False
    if failure.in_doubt:
        return allows_repetition(task, tool, is_named=failure.transient)
    return is_retried or failure.transient
