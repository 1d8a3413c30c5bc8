"""HTTP clients of services: bounded responses, and requests that are retried within a deadline."""

from __future__ import annotations

import json
import ssl
import zlib
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

import httpx
import tenacity
from anyio import to_thread

from replanning.environment import Environment
from replanning.plan.messages import format_duration
from replanning.version import __version__

Result = TypeVar("Result")

MAX_RESPONSE_BYTES: Final = 8_000_000
"""Most bytes of a response that are read."""

MAX_ATTEMPTS: Final = 5
"""Most attempts at a request, if its deadline allows them."""

_CONNECT_TIMEOUT: Final = 10.0
_INITIAL_BACKOFF: Final = 0.5
_MAX_BACKOFF: Final = 8.0
_ANY_ZLIB_HEADER: Final = zlib.MAX_WBITS | 32
_MAX_PORT: Final = 65_535
_RETRY_AFTER_HEADERS: Final = (("retry-after-ms", 1000), ("retry-after", 1))


@dataclass(eq=False)
class RequestFailed(Exception):
    """A request failed in a way that may be transient.

    Attributes:
        message: the failure in words.
        status: of the response, if there was one.
        request_id: id under which the service finds the request.
        excerpt: of the response.
        retry_after: seconds that the service asks to wait.
        permanent: whether the service says that another attempt will not help.
        maybe_executed: whether the request may have been executed all the same.
    """

    message: str
    status: int | None = None
    request_id: str = ""
    excerpt: str = ""
    retry_after: float = 0.0
    permanent: bool = False
    maybe_executed: bool = False


async def call_with_retries(
    attempt: Callable[[], Coroutine[Any, Any, Result]],
    environment: Environment,
    deadline: float,
    error_factory: Callable[[RequestFailed, str], Exception],
    *,
    max_attempts: int = MAX_ATTEMPTS,
) -> Result:
    """Call `attempt` until it succeeds; retry when it raises `RequestFailed`.

    The delay between two attempts doubles, with jitter, unless the service asks for a longer one.

    Args:
        attempt: a coroutine function that makes the request once.
        environment: source of time and chance.
        deadline: latest time at which an answer is of use, in seconds since the epoch.
        error_factory: makes the final error of the last failure and the reason why there is no
            further attempt.
        max_attempts: most attempts at the request.

    Raises:
        Exception: that of `error_factory`, when there is no use or no time for another attempt.
    """

    def failure_of(state: tenacity.RetryCallState) -> RequestFailed:
        failure = state.outcome.exception() if state.outcome is not None else None
        assert isinstance(failure, RequestFailed)
        return failure

    def backoff(state: tenacity.RetryCallState) -> float:
        wait = min(_MAX_BACKOFF, _INITIAL_BACKOFF * 2.0 ** (state.attempt_number - 1))
        return max(wait * (0.5 + environment.chance()), failure_of(state).retry_after)

    def check_use(state: tenacity.RetryCallState) -> None:
        failure = failure_of(state)
        left = deadline - environment.clock.now()
        if failure.permanent:
            why = "the service says that another attempt will not help"
        elif state.attempt_number >= max_attempts:
            why = f"gave up after {max_attempts} attempt{'s' * (max_attempts > 1)}"
        elif state.upcoming_sleep >= left:
            why = f"another attempt in {format_duration(state.upcoming_sleep)} is too late, only {format_duration(left)} are left"
        else:
            return
        raise error_factory(failure, why) from failure.__cause__

    retrying = tenacity.AsyncRetrying(
        sleep=environment.clock.sleep,
        retry=tenacity.retry_if_exception_type(RequestFailed),
        wait=backoff,
        before_sleep=check_use,
    )
    return await retrying(attempt)


async def create_client(
    transport: httpx.AsyncBaseTransport | None, headers: Mapping[str, str] | None = None
) -> httpx.AsyncClient:
    """Create a client that sends our user agent and has no timeout beyond the caller's, except for connecting.

    Args:
        transport: for tests; by default the network.
        headers: sent with every request.
    """
    return httpx.AsyncClient(
        transport=transport,
        verify=True if transport is not None else await to_thread.run_sync(_ssl_context),
        timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT),
        headers={
            "user-agent": f"replanning/{__version__}",
            "accept-encoding": "gzip",
            **(headers or {}),
        },
    )


@cache
def _ssl_context() -> ssl.SSLContext:
    """Load the trusted certificates, which takes too long for an event loop."""
    return httpx.create_ssl_context()


class ResponseBody(NamedTuple):
    """Body of a response.

    Attributes:
        data: its bytes; none if they cannot be read.
        problem: the reason why they cannot be read; empty if they can.
        is_too_large: whether the reason is the size.
    """

    data: bytes
    problem: str = ""
    is_too_large: bool = False


async def read_body(response: httpx.Response, *, limit: int = MAX_RESPONSE_BYTES) -> ResponseBody:
    """Read a response of at most `limit` bytes, compressed or not.

    Args:
        response: not read yet, as `stream` of a client yields it.
        limit: most bytes, before and after decompression.

    Raises:
        httpx.TransportError: the connection was lost.
    """
    too_large = ResponseBody(b"", f"its answer is larger than {limit:,} bytes", is_too_large=True)
    if response.is_stream_consumed:  # by a transport for tests
        return ResponseBody(response.content) if len(response.content) <= limit else too_large
    data = bytearray()
    try:
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > limit:
                # Ends the loop; `break` would leave the underlying generator open.
                await response.aclose()
    except (httpx.StreamError, httpx.TransportError):
        if len(data) <= limit:
            raise
    if len(data) > limit:
        return too_large
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if not data or encoding in ("", "identity"):
        return ResponseBody(bytes(data))
    decompressor = zlib.decompressobj(_ANY_ZLIB_HEADER)
    content = b""
    if encoding in ("gzip", "x-gzip", "deflate"):
        with suppress(zlib.error):
            content = decompressor.decompress(data, limit + 1)
    if len(content) > limit:
        return too_large
    if not decompressor.eof:
        problem = f"its answer is compressed with {encoding!r} and cannot be decompressed"
        return ResponseBody(b"", problem)
    return ResponseBody(content)


def error_message(body: bytes) -> str:
    """Return the error message in the body of a response, in any of the usual forms, with its details."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return body.decode(errors="replace")
    if not isinstance(content, dict):
        return str(content)
    error = content.get("error")
    part = error if isinstance(error, dict) else content
    message = (
        part.get("message") or part.get("detail") or (error if part is content else None) or content
    )
    details = part.get("errors")
    return f"{message} {json.dumps(details)}" if details else str(message)


def parse_http_date(text: str) -> float | None:
    """Return the moment that a header names, in seconds since the epoch; None if it names none."""
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp()


def retry_after_seconds(headers: Mapping[str, str], now: float | None) -> float | None:
    """Return the seconds that a service asks to wait, as a number or until a date; None if it does not.

    Args:
        headers: headers of its response.
        now: time from which a date counts; without it dates are ignored.
    """
    for name, scale in _RETRY_AFTER_HEADERS:
        value = headers.get(name, "")
        try:
            wait = float(value) / scale
        except ValueError:
            moment = parse_http_date(value)
            if moment is None or now is None:
                continue
            wait = max(0.0, moment - now)
        if wait >= 0:  # false for not-a-number
            return wait
    return None


def same_origin_url(url: str, place: str) -> str:
    """Return the absolute URL of a link or redirect; empty if it is missing, invalid, the same, or on another host."""
    try:
        start = httpx.URL(url)
        there = httpx.URL(url).join(place)
        is_ours = (there.scheme, there.host, there.port) == (start.scheme, start.host, start.port)
    except (httpx.InvalidURL, ValueError):  # ValueError: an impossible host name
        return ""
    return str(there) if is_ours and str(there) != url else ""


def is_valid_token(token: str) -> bool:
    """Return whether a key or token has only characters that such a thing can have."""
    return token.isascii() and token.isprintable() and " " not in token


def url_problem(address: str) -> str:
    """Return the problem with the address of a service; an empty text if there is none."""
    try:
        url = httpx.URL(address)
        host = url.host
        port = url.port or 0
    except (httpx.InvalidURL, ValueError):  # the latter for impossible host names
        return "is not a URL"
    if url.scheme not in ("http", "https") or not host:
        return "does not begin with http:// or https:// and a host"
    if port > _MAX_PORT:
        return f"has a port above {_MAX_PORT}"
    if url.userinfo:
        return "holds a login, which would end up in logs"
    return (
        "has parameters, to which no path can be added" if "?" in address or "#" in address else ""
    )
