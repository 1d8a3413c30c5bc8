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
from pydantic_core import from_json

from replanning.environment import Environment
from replanning.plan.messages import format_duration, pluralise
from replanning.version import __version__

Result = TypeVar("Result")

MAX_RESPONSE_BYTES: Final = 8_000_000
"""Size limit of a response, in bytes."""

MAX_ATTEMPTS: Final = 5
"""Maximum number of attempts at a request, if its deadline allows them."""

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
        status: the status of the response, if there was one.
        request_id: the id that the service gave the request.
        excerpt: the beginning of the response.
        retry_after: the seconds that the service asks to wait.
        permanent: whether the service says that another attempt will not help.
        maybe_executed: whether the request may have been executed anyway.
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
        environment: the source of time and randomness.
        deadline: the latest useful time of an answer, in seconds since the epoch.
        error_factory: makes the final error from the last failure and the reason not to try again.
        max_attempts: the maximum number of attempts.

    Raises:
        Exception: the result of `error_factory`, if another attempt is useless or too late.
    """

    def failure_of(state: tenacity.RetryCallState) -> RequestFailed:
        assert state.outcome is not None
        failure = state.outcome.exception()
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
            why = f"gave up after {pluralise(max_attempts, 'attempt')}"
        elif state.upcoming_sleep >= left:
            late = f"another attempt in {format_duration(state.upcoming_sleep)} is too late"
            why = f"{late}, only {format_duration(left)} are left"
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
    """Create a client with the user agent of this library, and a timeout only for connecting.

    Args:
        transport: the transport of a test; by default the network.
        headers: further headers of every request.
    """
    verify: ssl.SSLContext | bool = True
    if transport is None:
        verify = await to_thread.run_sync(_ssl_context)
    own = {"user-agent": f"replanning/{__version__}", "accept-encoding": "gzip"}
    return httpx.AsyncClient(
        transport=transport,
        verify=verify,
        timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT),
        headers={**own, **(headers or {})},
    )


@cache
def _ssl_context() -> ssl.SSLContext:
    """Load the trusted certificates, which takes too long for an event loop."""
    return httpx.create_ssl_context()


class ResponseBody(NamedTuple):
    """Body of a response.

    Attributes:
        data: the bytes; empty if they cannot be read.
        problem: why they cannot be read; empty if they can.
        is_too_large: whether the size is the reason.
    """

    data: bytes
    problem: str = ""
    is_too_large: bool = False


async def read_body(response: httpx.Response, *, limit: int = MAX_RESPONSE_BYTES) -> ResponseBody:
    """Read a response of at most `limit` bytes, compressed or not.

    Args:
        response: the unread response, as `stream` of a client yields it.
        limit: the maximum number of bytes, before and after decompression.

    Raises:
        httpx.TransportError: the connection was lost.
    """
    too_large = ResponseBody(b"", f"its answer is larger than {limit:,} bytes", is_too_large=True)
    # The transport of a test may have read it already.
    if response.is_stream_consumed:
        if len(response.content) > limit:
            return too_large
        return ResponseBody(response.content)
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
    """Return the error message in the body of a response, with its details.

    Services write it as `{"error": {"message": …}}`, `{"error": …}`, `{"message": …}` or
    `{"detail": …}`.
    """
    try:
        content = from_json(body)
    except ValueError:
        return body.decode(errors="replace")
    if not isinstance(content, dict):
        return str(content)
    error = content.get("error")
    part = content
    if isinstance(error, dict):
        part = error
        error = None
    message = part.get("message") or part.get("detail") or error or content
    details = part.get("errors")
    if details:
        return f"{message} {json.dumps(details)}"
    return str(message)


def parse_http_date(text: str) -> float | None:
    """Return the time in a header, in seconds since the epoch; None if it is not a date."""
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp()


def retry_after_seconds(headers: Mapping[str, str], now: float | None) -> float | None:
    """Return the seconds that a service asks to wait, as a number or until a date; else None.

    Args:
        headers: the headers of its response.
        now: the current time, for dates; without it, dates are ignored.
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
        # False for NaN, too.
        if wait >= 0:
            return wait
    return None


def same_origin_url(url: str, place: str) -> str:
    """Return the absolute URL of a link or redirect.

    Empty if it is missing, invalid, equal to `url`, or on another host.
    """
    try:
        start = httpx.URL(url)
        there = httpx.URL(url).join(place)
        is_ours = (there.scheme, there.host, there.port) == (start.scheme, start.host, start.port)
    except (httpx.InvalidURL, ValueError):
        # ValueError: an impossible host name.
        return ""
    if is_ours and str(there) != url:
        return str(there)
    return ""


def is_valid_token(token: str) -> bool:
    """Return whether a key or token has only characters that are valid in one."""
    return token.isascii() and token.isprintable() and " " not in token


def url_problem(address: str) -> str:
    """Return the problem with the address of a service; empty if it is valid."""
    try:
        url = httpx.URL(address)
        host = url.host
        port = url.port or 0
    except (httpx.InvalidURL, ValueError):
        # ValueError: an impossible host name.
        return "is not a URL"
    if url.scheme not in ("http", "https") or not host:
        return "does not begin with http:// or https:// and a host"
    if port > _MAX_PORT:
        return f"has a port above {_MAX_PORT}"
    if url.userinfo:
        return "holds a login, which would end up in logs"
    if "?" in address or "#" in address:
        return "has parameters, so no path can be added to it"
    return ""
