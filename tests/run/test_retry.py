"""When a failed task is run again by itself."""

import asyncio  # noqa: TID251 # its cancellations are told apart from those of the library
import concurrent.futures
import errno
import smtplib
import socket
import sqlite3
import ssl
import subprocess
from collections import Counter
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError, URLError

import anyio
import httpx
import pytest

from replanning import Plan, ReplanningEngine, Retry, Settings, Task
from replanning.environment import Environment
from replanning.errors import PlanError, TransientError
from replanning.journal import AttemptFailed, Failure
from replanning.plan import TaskId
from replanning.plan.document import plan_schema
from replanning.plan.tasks import ToolSpec
from replanning.run.retries import FailureKeeper, failure_from, may_repeat
from replanning.secrets import Redactor
from replanning.testing import VirtualClock
from replanning.tools import (
    CommandFailed,
    HttpConnectionLost,
    HttpStatusFailed,
    HttpUnreachable,
    McpServerLost,
    ToolOutputTooLarge,
    ToolTimedOut,
    TransientCommandFailed,
    TransientHttpStatusFailed,
)
from tests.support.live import journaled
from tests.support.runs import bodies, plan

PASSING = Failure("OSError", "reset", transient=True)
LASTING = Failure("ValueError", "wrong")
LATE = Failure("TimedOut", "late", kind="timeout")
LOST = Failure("ConnectionResetError", "reset", in_doubt=True)
CUT_OFF = Failure("Interrupted", "killed", kind="interrupted")


def after(
    failure: Failure,
    round_: int = 1,
    failures: int = 0,
    *,
    threshold: int = 1,
    chance: float = 0.5,
    **task: object,
) -> tuple[float | None, bool]:
    """Return the retry at time 100 after a number of failed attempts in a row; the delay is half a second."""
    entry = journaled(Task.model_validate({"id": "t", **task})).live.entry(TaskId("t"))
    entry.log.in_round, entry.log.failures = round_, failures
    settings = Settings(retry=Retry(delay=0.5, jitter=False), failure_threshold=threshold)
    keeper = FailureKeeper(settings, Redactor(), lambda: chance, None, print)
    return keeper.schedule_retry(entry, None, failure, now=100.0)


def test_what_may_pass_is_tried_again() -> None:
    """An error that may pass is tried up to the maximum, ever later; any other uses up a task's retries at once."""
    assert [after(PASSING, n) for n in (1, 2, 3)] == [(100.5, False), (101.0, False), (None, False)]
    assert after(LASTING) == (None, False)


def error(path: str, *bases: str, **attributes: object) -> Exception:
    """Return an error of a class that is made like those of a client, which need not be installed."""
    kinds: tuple[type, ...] = (Exception,)
    for name in (*reversed(bases), path):
        module, _, last = name.rpartition(".")
        kinds = (type(last, kinds, {"__module__": module}),)
    made: Exception = kinds[0]("it went wrong")
    made.__dict__.update(attributes)
    return made


def sqlite_busy() -> Exception:
    """Return the error of a real database that another connection writes to."""
    place = "file:busy?mode=memory&cache=shared"
    with (
        closing(sqlite3.connect(place, uri=True)) as first,
        closing(sqlite3.connect(place, uri=True)) as second,
    ):
        first.execute("create table t (x)")
        first.execute("insert into t values (1)")
        try:
            second.execute("select * from t")
        except sqlite3.OperationalError as busy:
            return busy
    raise AssertionError("the table is not locked")


MAY_PASS = [
    TransientError("busy"),
    ConnectionError("no route"),
    ConnectionRefusedError(),
    httpx.ReadTimeout("late", request=httpx.Request("GET", "http://x")),
    httpx.HTTPStatusError(
        "", request=httpx.Request("GET", "http://x"), response=httpx.Response(500)
    ),
    TransientCommandFailed("t", "work", 137, ""),
    HttpUnreachable("t", "POST http://x", "refused"),
    TransientHttpStatusFailed("t", "POST http://x", 500, ""),
    OSError(errno.ENETUNREACH, "no route"),
    OSError(errno.EMFILE, "too many open files"),
    BlockingIOError(errno.EAGAIN, "no more processes"),
    socket.gaierror(-3, "try again"),
    URLError(ConnectionRefusedError()),
    HTTPError("http://x", 503, "", None, None),  # type: ignore[arg-type]
    httpx.ConnectError("refused"),
    httpx.ConnectTimeout("late"),
    httpx.HTTPStatusError(
        "", request=httpx.Request("GET", "http://x"), response=httpx.Response(429)
    ),
    sqlite_busy(),
    sqlite3.OperationalError("database is locked"),
    error("sqlalchemy.exc.OperationalError", orig=sqlite3.OperationalError("database is locked")),
    error(
        "aiohttp.client_exceptions.ClientConnectorError",
        "aiohttp.client_exceptions.ClientConnectionError",
    ),
    error("requests.exceptions.ConnectTimeout", "requests.exceptions.ConnectionError"),
    error(
        "urllib3.exceptions.MaxRetryError", reason=error("urllib3.exceptions.NewConnectionError")
    ),
    error("psycopg.errors.SerializationFailure", "psycopg.OperationalError"),
    error("botocore.exceptions.EndpointConnectionError", "botocore.exceptions.ConnectionError"),
    error("botocore.exceptions.ClientError", response={"Error": {"Code": "ThrottlingException"}}),
    error("openai.APITimeoutError", "openai.APIConnectionError"),
    error("anthropic.APIConnectionError"),
    error("openai.RateLimitError", "openai.APIStatusError", status_code=429),
    error("google.api_core.exceptions.ServiceUnavailable", code=503),
]

IN_DOUBT = [
    concurrent.futures.CancelledError(),
    ConnectionResetError(),
    TimeoutError(errno.ETIMEDOUT, "no connection"),
    error("aiohttp.client_exceptions.ClientResponseError", status=502),
    error("requests.exceptions.HTTPError", response=SimpleNamespace(status_code=500)),
    error("psycopg2.OperationalError"),
    error(
        "botocore.exceptions.ClientError", response={"ResponseMetadata": {"HTTPStatusCode": 500}}
    ),
    ConnectionAbortedError(),
    BrokenPipeError(),
    HTTPError("http://x", 500, "", None, None),  # type: ignore[arg-type]
    URLError(ConnectionResetError()),
    httpx.ReadError("reset"),
    httpx.WriteError("reset"),
    httpx.RemoteProtocolError("Server disconnected without sending a response"),
    httpx.ReadError("reset", request=httpx.Request("POST", "http://x")),
    httpx.HTTPStatusError(
        "", request=httpx.Request("PUT", "http://x"), response=httpx.Response(504)
    ),
    error("requests.exceptions.ConnectionError"),
    error("urllib3.exceptions.ProtocolError"),
    error("aiohttp.ServerDisconnectedError", "aiohttp.ClientConnectionError"),
    error("redis.exceptions.ConnectionError"),
    CommandFailed("t", "sleep 9", 137, ""),
    McpServerLost("t", "s", "it ended"),
    ToolTimedOut("t", 60),
    ToolOutputTooLarge("t", 1_000, "its output"),
    HttpConnectionLost("t", "POST http://x", "reset"),
    HttpStatusFailed("t", "POST http://x", 500, ""),
    TimeoutError(),
    httpx.ReadTimeout("late"),
    error("aiohttp.ServerTimeoutError", "aiohttp.ClientConnectionError"),
    error("requests.exceptions.ReadTimeout", "requests.exceptions.Timeout"),
    error("botocore.exceptions.ReadTimeoutError"),
    type("ServerDisconnected", (ConnectionError,), {})(),
    subprocess.TimeoutExpired("pay", 3),
    subprocess.CalledProcessError(-9, "pay"),
    smtplib.SMTPServerDisconnected("Connection unexpectedly closed"),
    ssl.SSLEOFError(8, "EOF occurred in violation of protocol"),
    asyncio.IncompleteReadError(b"", 3),
    concurrent.futures.BrokenExecutor(),
    anyio.EndOfStream(),
    error("trio.TooSlowError"),
    error("stripe.APIConnectionError"),
    error("mcp.shared.exceptions.MCPError", error=SimpleNamespace(code=-32001), code=-32001),
    error("mcp.shared.exceptions.McpError", error=SimpleNamespace(code=408)),
    error(
        "mcp.shared.exceptions.MCPError",
        error=SimpleNamespace(code=-32000, message="Connection closed"),
    ),
]

DEFINITE = [
    KeyError("url"),
    TypeError("no"),
    HTTPError("http://x", 409, "", None, None),  # type: ignore[arg-type]
    CommandFailed("t", "work", 1, ""),
    CommandFailed("t", "ssh", 255, ""),
    subprocess.CalledProcessError(1, "pay"),
    type("Hostile", (Exception,), {"response": property(lambda self: 1 / 0)})(),
    URLError("unknown url type: x"),
    HTTPError("http://x", 404, "", None, None),  # type: ignore[arg-type]
    sqlite3.OperationalError("no such table: t"),
    error("botocore.exceptions.ClientError", response={"Error": {"Code": "AccessDenied"}}),
    error(
        "aiohttp.ClientConnectorCertificateError",
        "aiohttp.ClientSSLError",
        "aiohttp.ClientConnectionError",
    ),
    error("requests.exceptions.SSLError", "requests.exceptions.ConnectionError"),
    error("psycopg.errors.InvalidPassword", "psycopg.OperationalError"),
    error("openai.BadRequestError", status_code=400),
    error(
        "mcp.shared.exceptions.MCPError",
        error=SimpleNamespace(code=-32000, message="the disk is full"),
    ),
    error("anthropic.AuthenticationError", status_code=401),
    error("app.Odd", status_code="429", code=1),
    error("mcp.shared.exceptions.MCPError", error=SimpleNamespace(code=-32602), code=-32602),
    error("app.ConnectionError"),
    error("app.Gone", status=404, reason=ConnectionError()),
]


def test_unclear_errors_are_told_by_what_they_wrap() -> None:
    """A client's class for every lost connection says what the error within says: nothing was sent, or it is unknown."""
    refused = error("urllib3.exceptions.NewConnectionError")
    unclear = error("requests.exceptions.ConnectionError")
    unclear.args = (error("urllib3.exceptions.MaxRetryError", reason=refused),)
    assert (failure_from(unclear).transient, failure_from(unclear).in_doubt) == (True, False)


def test_an_error_raised_from_another_says_what_that_one_says() -> None:
    """A program's own error for a lost connection is in doubt; its own verdict counts where it has one."""
    own = ValueError("the payment failed")
    own.__cause__ = TimeoutError()
    assert failure_from(own).in_doubt
    own.__cause__ = asyncio.CancelledError()
    assert failure_from(own).in_doubt
    own.__cause__ = ExceptionGroup("", [KeyError("url"), TimeoutError()])
    assert failure_from(own).in_doubt
    unclear = ConnectionError("the payment failed")
    unclear.__cause__ = ConnectionResetError()
    assert failure_from(unclear).in_doubt
    refused = error("app.Refused", status=422)
    refused.__cause__ = TimeoutError()
    assert not failure_from(refused).in_doubt


@pytest.mark.parametrize(
    ("handled", "in_doubt"),
    [
        (TimeoutError(), True),
        (ConnectionRefusedError(), False),
        (KeyError("id"), False),
        (httpx.ReadTimeout("late", request=httpx.Request("POST", "http://a")), True),
        (httpx.ReadTimeout("late", request=httpx.Request("GET", "http://a")), False),
    ],
    ids=repr,
)
def test_an_error_raised_while_another_was_handled(handled: Exception, in_doubt: bool) -> None:
    """A program's error in the place of a lost connection is in doubt, unless it is raised `from None`."""

    def pay(*, is_over: bool) -> None:
        try:
            raise handled
        except Exception:  # noqa: BLE001 - as many programs do
            if is_over:
                raise ValueError("the payment failed") from None
            raise ValueError("the payment failed")  # noqa: B904

    for suppressed in (False, True):
        with pytest.raises(ValueError, match="payment") as caught:
            pay(is_over=suppressed)
        failure = failure_from(caught.value)
        assert (failure.in_doubt, failure.transient) == (in_doubt and not suppressed, False)


@pytest.mark.parametrize(
    "raised", [*MAY_PASS, *IN_DOUBT, *DEFINITE], ids=lambda e: f"{type(e).__module__}-{e!r}"
)
def test_what_an_error_says_about_the_effect(raised: Exception) -> None:
    """Errors of the common clients are told by class, code, status and method: nothing happened, or nobody knows."""
    failure = failure_from(raised)
    assert failure.transient is (raised in MAY_PASS)
    assert failure.in_doubt is (raised in IN_DOUBT)


def test_further_errors_that_may_pass() -> None:
    """A task names classes, by their own names or with their packages, and statuses; a group passes if all of it does."""
    late, missing = (
        httpx.ReadTimeout("late"),
        error("app.web.Missing", "app.web.Problem", status=404),
    )
    for name in ("ReadTimeout", "httpx.ReadTimeout", "TransportError"):
        assert failure_from(late, [name]).transient
        assert not failure_from(missing, [name]).transient
    for one in (404, "Problem", "app.Problem", "app.web.Missing"):
        assert failure_from(missing, [one]).transient
        assert not failure_from(ExceptionGroup("both", [missing, KeyError("url")]), [one]).transient
    assert failure_from(ExceptionGroup("both", [missing, ConnectionError()]), [404]).transient


def test_retryable_errors_are_checked() -> None:
    """What is no name of a class, exit code or status of an error is refused, and the schema of plans says so."""
    with pytest.raises(PlanError) as refused:
        Plan.parse(
            "goal: {objective: g}\ntasks: [{id: a, retry: {on: [503, 1, 0, 399, true, 'two words', httpx.]}}]"
        )
    expected = (
        "expected an exception class such as httpx.ReadTimeout, an exit code from 1 to 255, "
        "an HTTP status from 400 to 599, or timeout"
    )
    problems = [str(problem).partition(" ")[2] for problem in refused.value.problems]
    wrong = enumerate(("0", "399", "True", "'two words'", "'httpx.'"), 2)
    assert problems == [f"tasks[0].retry.on[{i}]: {expected}, got {value}" for i, value in wrong]
    schema: Any = plan_schema()["$defs"]
    named = schema["Retry"]["properties"]["on"]["anyOf"][0]["items"]["anyOf"]
    assert [one["type"] for one in named] == ["integer", "integer", "string"]


def test_everything_wrong_with_a_retry_is_told() -> None:
    """One error names each field of a retry that is wrong, with its place."""
    wrong = "{delay: -1, max_delay: -2, max_seconds: 0, backoff: linear, on: []}"
    with pytest.raises(PlanError) as refused:
        Plan.parse(f"goal: {{objective: g}}\ntasks: [{{id: a, retry: {wrong}}}]")
    assert [
        str(problem).partition(" tasks[0].retry.")[2] for problem in refused.value.problems
    ] == [
        "delay: must be at least 0, got -1",
        "backoff: expected 'exponential' or 'constant', got 'linear'",
        "max_delay: must be at least 0, got -2",
        "max_seconds: must be more than 0, got 0",
        "on: names no failure; leave it out, or state `max_attempts: 1` to try once, got []",
    ]


@pytest.mark.parametrize(("earlier", "now"), [(True, "exponential"), (False, "constant")])
def test_the_earlier_spelling_of_the_backoff_is_read(earlier: bool, now: str) -> None:
    """A plan that an earlier version wrote is the same plan as one that states `backoff`."""
    texts = (f"exponential: {str(earlier).lower()}", f"backoff: {now}")
    first, second = (
        Plan.parse(f"{{goal: {{objective: g}}, tasks: [{{id: a, retry: {{{text}}}}}]}}")
        for text in texts
    )
    assert first == second
    assert first.content_hash() == second.content_hash()
    with pytest.raises(
        PlanError, match=r"retry: `exponential` is an earlier spelling of `backoff`"
    ):
        Plan.parse(f"{{goal: {{objective: g}}, tasks: [{{id: a, retry: {{{', '.join(texts)}}}}}]}}")


async def test_a_run_retries_what_it_is_told() -> None:
    """The plan and the predicate of the engine decide about errors that are not recognised; a failing one says no."""

    def busy(problem: Exception) -> bool:
        return {"busy": True, "full": False}[str(problem)]

    quick = {"delay": 0, "jitter": False}
    tasks = [Task(id=name, retry=Retry(**quick)) for name in ("busy", "full", "odd")]  # type: ignore[arg-type]
    named = Task(id="named", retry=Retry(on=["LookupError"], **quick))  # type: ignore[arg-type]
    engine = ReplanningEngine([], is_transient=busy)
    calls: Counter[str] = Counter()

    async def work(task: Task, context: object) -> None:
        calls[task.id] += 1
        raise KeyError("url") if task.id == "named" else ValueError(task.id)

    result = await engine.execute(plan(*tasks, named), work)
    assert calls == {"busy": 3, "full": 1, "odd": 1, "named": 3}
    failures = {
        body.task: body.failure.message for body in bodies(engine.store, result.run, AttemptFailed)
    }
    assert failures["odd"] == "odd (could not tell whether the error is transient: KeyError('odd'))"


async def test_an_error_without_a_readable_text_is_a_failure() -> None:
    """An exception of work whose texts cannot be made is a failure that names its class."""

    class Odd(Exception):
        def __str__(self) -> str:
            raise AttributeError("response")

        __repr__ = __str__

    async def work(task: Task, context: object) -> None:
        raise Odd

    result = await ReplanningEngine([]).execute(plan(Task(id="a")), work)
    assert result.status == "failed"
    assert result.failures["a"].message == "Odd (its text cannot be read)"


STATED: dict[str, Any] = {"max_attempts": 3, "delay": 0.5, "jitter": False}


def stated(**retry: Any) -> dict[str, Any]:
    """Return the field `retry` of a task with three attempts."""
    return {"retry": {**STATED, **retry}}


def test_a_stated_retry_is_for_every_failure() -> None:
    """Whoever states `max_attempts` gets them after failures that would not pass by themselves, too."""
    rounds = [after(LASTING, n, **stated()) for n in (1, 2, 3)]
    assert rounds == [(100.5, False), (101.0, False), (None, False)]
    assert after(LASTING, idempotent=False, **stated()) == (100.5, False)
    assert after(LOST, idempotent=False, **stated()) == (None, False)
    # Other fields say how far apart attempts are, not after which failures.
    assert after(LASTING, retry={"delay": 0.5, "jitter": False}) == (None, False)


@pytest.mark.parametrize("kind", ["arguments", "condition", "refused", "secret", "output"])
def test_what_is_no_failure_of_the_work_is_not_retried(kind: Any) -> None:
    """Work that was never begun, or whose output cannot be kept, is not tried again by a stated retry."""
    failure = Failure("Error", "wrong", kind=kind)
    assert after(failure, **stated()) == (None, False)
    assert after(replace(failure, in_doubt=True), **stated()) == (
        (None, False) if kind == "output" else (100.5, False)
    )


def test_named_failures_alone_are_retried() -> None:
    """With `max_attempts`, `on` says which failures are tried again: no others, even harmless ones."""
    named = replace(LASTING, transient=True, named=True)
    assert after(named, **stated(on=["ValueError"])) == (100.5, False)
    for other in (LASTING, PASSING, LOST, LATE):
        assert after(other, idempotent=True, **stated(on=["ValueError"])) == (None, False)
    # What a person or a crash cut off is no failure of the task.
    assert after(CUT_OFF, idempotent=True, **stated(on=["ValueError"])) == (100.0, False)
    assert after(PASSING, retry={"on": ["ValueError"], "delay": 0.5, "jitter": False}) == (
        100.5,
        False,
    )


def test_a_time_limit_is_named_by_timeout() -> None:
    """`timeout` under `on` is for a task that reaches its time limit, unless a repetition is said to do harm."""
    assert after(LATE, **stated(on=["timeout"])) == (100.5, False)
    assert after(LATE, retry={"on": ["timeout"], "delay": 0.5, "jitter": False}) == (100.5, False)
    assert after(LATE, idempotent=False, **stated(on=["timeout"])) == (None, False)
    assert after(LASTING, **stated(on=["timeout"])) == (None, False)


def lost_in(cause: Exception) -> Exception:
    """Return the error of an HTTP tool that was raised from that of its client."""
    lost = HttpConnectionLost("t", "GET http://x", "late")
    lost.__cause__ = cause
    return lost


@pytest.mark.parametrize(
    ("raised", "names", "others"),
    [
        (
            CommandFailed("t", "false", 1, ""),
            [1, "CommandFailed", "ToolError"],
            [2, 401, "timeout"],
        ),
        (CommandFailed("t", "sleep 9", 137, ""), [137], [9]),
        (subprocess.CalledProcessError(3, "x"), [3, "CalledProcessError"], [1]),
        (subprocess.CalledProcessError(-9, "x"), [137], [9]),
        (HttpStatusFailed("t", "GET http://x", 404, ""), [404, "HttpStatusFailed"], [4, "timeout"]),
        (ToolTimedOut("t", 60), ["timeout", "ToolTimedOut"], ["TimeoutError"]),
        (TimeoutError(), ["timeout", "TimeoutError"], [1]),
        (subprocess.TimeoutExpired("x", 3), ["timeout"], [3]),
        (httpx.ReadTimeout("late"), ["timeout", "httpx.ReadTimeout"], ["httpx.ConnectTimeout"]),
        (lost_in(httpx.ReadTimeout("late")), ["timeout", "httpx.ReadTimeout"], ["KeyError"]),
        (ExceptionGroup("", [TimeoutError(), KeyError()]), [], ["timeout", "KeyError"]),
        (ExceptionGroup("", [TimeoutError(), TimeoutError()]), ["timeout"], []),
    ],
    ids=repr,
)
def test_what_names_a_failure(
    raised: Exception, names: list[int | str], others: list[int | str]
) -> None:
    """A failure is named by classes, also those it was raised from, exit codes, statuses, and `timeout`."""
    for name in names:
        assert failure_from(raised, [name]).named
        assert failure_from(raised, [name]).transient
    for name in others:
        assert not failure_from(raised, [name]).named


@pytest.mark.parametrize(("threshold", "starts"), [(1, [0, 20, 40]), (2, [0, 20, 40, 60, 80, 100])])
async def test_no_attempt_begins_after_max_seconds(
    threshold: int, starts: list[float], clock: VirtualClock
) -> None:
    """No attempt begins later than `max_seconds` after the first one; each further round has as long."""
    began: list[float] = []

    async def work(task: Task, context: object) -> None:
        began.append(clock.elapsed)
        await clock.sleep(10)
        raise ValueError("wrong")

    retry = Retry(max_attempts=9, delay=10, backoff="constant", jitter=False, max_seconds=45)
    engine = ReplanningEngine(
        [], settings=Settings(failure_threshold=threshold), environment=Environment(clock=clock)
    )
    await engine.execute(plan(Task(id="a", retry=retry)), work)
    assert began == starts


def test_threshold() -> None:
    """Below the failure threshold a task whose retries are used up is run again, and says that they are."""
    assert after(LASTING, threshold=2) == (100.5, True)
    assert after(LASTING, failures=1, threshold=2) == (None, False)
    assert after(PASSING, 3, threshold=2) == (102.0, True)


@pytest.mark.parametrize("failure", [LATE, CUT_OFF, LOST], ids=lambda failure: failure.type)
def test_what_is_in_doubt(failure: Failure) -> None:
    """What may have taken effect is repeated only where that is harmless or a retry is stated; an interruption at once."""
    assert after(failure, threshold=9) == (None, False)
    harmless: list[dict[str, Any]] = [
        {"idempotent": True},
        {"effect": "none"},
        {"retry": {"max_attempts": 3}},
    ]
    for stated in harmless:
        assert after(failure, **stated)[0] is not None
    named = replace(failure, transient=True)
    assert after(named)[0] is not None
    assert after(named, idempotent=False) == (None, False)
    doubtful: list[dict[str, Any]] = [
        {"retry": {"max_attempts": 3}, "idempotent": False},
        {"retry": {"delay": 2}},
        {"retry": {"max_attempts": 3, "on": ["KeyError"]}},
        {"effect": "irreversible"},
    ]
    for stated in doubtful:
        assert after(failure, **stated) == (None, False)
    assert after(CUT_OFF, 99, idempotent=True) == (100.0, False)


@pytest.mark.parametrize(
    ("tool", "task", "repeated"),
    [
        ({"effect": "none"}, {}, True),
        ({"idempotent": True}, {}, True),
        ({"idempotent": True}, {"idempotent": False}, False),
        ({"effect": "none"}, {"effect": "irreversible"}, False),
        ({"idempotent": False}, {"idempotent": True}, True),
        ({"kind": "http", "url": "http://x"}, {}, True),
        ({"kind": "http", "url": "http://x", "method": "put"}, {}, True),
        ({"kind": "http", "url": "http://x", "method": "POST"}, {}, False),
        ({"kind": "http", "url": "http://x", "idempotent": False}, {}, False),
        ({"kind": "http", "url": "http://x", "method": "DELETE", "idempotent": False}, {}, False),
    ],
)
def test_who_says_that_a_repetition_is_harmless(
    tool: dict[str, Any], task: dict[str, Any], repeated: bool
) -> None:
    """A tool says what it changes, an HTTP tool by its method; a task's word beats its tool's."""
    spec = ToolSpec.model_validate({"name": "tool", **tool})
    body = Task.model_validate({"id": "t", "tool": "tool", **task})
    assert may_repeat(body, spec, LOST) is repeated


def test_a_stated_number_of_attempts_survives_the_journal() -> None:
    """A stated `max_attempts` is kept where it is the default, too, because stating it allows repetitions."""
    stated = Task.model_validate({"id": "t", "retry": {"max_attempts": 3}})
    restored = Task.model_validate(stated.model_dump(mode="json", exclude_defaults=True))
    assert restored.retry is not None
    assert restored.retry.states_attempts
