"""What clients of services over HTTP share: answers that are read within bounds, and requests that are made again in time."""

from __future__ import annotations

import ssl
import zlib
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Final, NoReturn, TypeVar

import httpx
import tenacity
from anyio import to_thread

from replanning.environment import Environment
from replanning.version import __version__

__all__ = [
    "MAX_ATTEMPTS",
    "MAX_RESPONSE_BYTES",
    "RequestFailed",
    "RetryPolicy",
    "create_client",
    "read_body",
    "retry_after_seconds",
    "url_problem",
]

Result = TypeVar("Result")

MAX_RESPONSE_BYTES: Final = 8_000_000
"""Bytes of an answer that are read."""

MAX_ATTEMPTS: Final = 5
"""How often a request is made at most, if its deadline allows it."""

_TOO_LARGE_MESSAGE: Final = f"its answer is larger than {MAX_RESPONSE_BYTES:,} bytes"
_CONNECT_TIMEOUT: Final = 10.0
"""Seconds after which a connection that is not made is tried anew."""
_INITIAL_BACKOFF: Final = 0.5
_MAX_BACKOFF: Final = 8.0
_GZIP_OR_ZLIB_WBITS: Final = 47
"""For zlib: gzip as well as its own form."""
_CONTENT_ENCODINGS: Final = ("gzip", "x-gzip", "deflate")
_MAX_PORT: Final = 65_535
_RETRY_AFTER_HEADERS: Final = (("retry-after-ms", 1000), ("retry-after", 1))


class RequestFailed(Exception):
    """A request failed in a way that may pass.

    Attributes:
        message: has happened.
        status: of the answer, where there was one.
        request_id: by which the service finds the request.
        excerpt: of the answer.
        retry_after: seconds that the service wants to be left alone.
        permanent: whether the service says that asking again does not help.
        maybe_executed: whether what was asked for may have been done all the same.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        request_id: str = "",
        excerpt: str = "",
        retry_after: float = 0.0,
        permanent: bool = False,
        maybe_executed: bool = False,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.request_id, self.excerpt = message, status, request_id, excerpt
        self.retry_after, self.permanent, self.maybe_executed = retry_after, permanent, maybe_executed


class RetryPolicy:
    """When a request is made again: after a time that doubles, spread by chance, or that the service asks for.

    Args:
        environment: time and chance.
        deadline: by which an answer is of use.
        given_up: makes the error of the last failure and of why there is no further try.
        most: how often the request is made at most.
    """

    def __init__(
        self,
        environment: Environment,
        deadline: float,
        error_factory: Callable[[RequestFailed, str], Exception],
        *,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> None:
        self._environment = environment
        self._deadline = deadline
        self._error_factory = error_factory
        self._max_attempts = max_attempts

    async def call(self, once: Callable[[], Awaitable[Result]]) -> Result:
        """What one try comes to; those that fail with a `RequestFailed` are followed by others.

        Raises:
            Exception: there was no answer, and there is no use or no time to try again; it is that of `given_up`.
        """
        retrying = tenacity.AsyncRetrying(
            sleep=self._environment.clock.sleep,
            retry=tenacity.retry_if_exception_type(RequestFailed),
            wait=self._backoff,
            stop=self._should_stop,
            retry_error_callback=self._give_up,
        )

        async def made() -> Result:  # what is no coroutine function itself would not be awaited
            return await once()

        return await retrying(made)

    def _backoff(self, state: tenacity.RetryCallState) -> float:
        wait = min(_MAX_BACKOFF, _INITIAL_BACKOFF * 2.0 ** (state.attempt_number - 1))
        return max(wait * (0.5 + self._environment.chance()), _failure(state).retry_after)

    def _time_left(self) -> float:
        return self._deadline - self._environment.clock.now()

    def _should_stop(self, state: tenacity.RetryCallState) -> bool:
        return (
            _failure(state).permanent
            or state.attempt_number >= self._max_attempts
            or state.upcoming_sleep >= self._time_left()
        )

    def _give_up(self, state: tenacity.RetryCallState) -> NoReturn:
        failed = _failure(state)
        if failed.permanent:
            why = "asking again does not help, it says"
        elif state.attempt_number >= self._max_attempts:
            why = f"gave up after {self._max_attempts} tries" if self._max_attempts > 1 else "it was asked once"
        else:
            why = f"trying again in {state.upcoming_sleep:.3g} s is too late, only {self._time_left():.3g} s are left"
        raise self._error_factory(failed, why) from failed.__cause__


def _failure(state: tenacity.RetryCallState) -> RequestFailed:
    assert state.outcome is not None
    failure = state.outcome.exception()
    assert isinstance(failure, RequestFailed)
    return failure


async def create_client(
    transport: httpx.AsyncBaseTransport | None, headers: Mapping[str, str] | None = None
) -> httpx.AsyncClient:
    """Connections to services, which are asked under our name and have no time limit but that of whoever asks.

    Args:
        transport: what connects, for tests; by default the network.
        headers: sent with every request.
    """
    return httpx.AsyncClient(
        transport=transport,
        verify=True if transport is not None else await to_thread.run_sync(_ssl_context),
        timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT),
        headers={"user-agent": f"replanning/{__version__}", "accept-encoding": "gzip", **(headers or {})},
    )


@cache
def _ssl_context() -> ssl.SSLContext:
    """Whose certificates are trusted; to read them takes a moment, in which an event loop should do something else."""
    return httpx.create_ssl_context()


async def read_body(response: httpx.Response) -> tuple[bytes, str]:
    """Read an answer, as far as it is bounded: no more than `MAX_RESPONSE_BYTES` bytes, packed or not.

    Args:
        response: which is still to be read, as `stream` of a client gives it.

    Returns:
        Its bytes, and why they cannot be had; one of both is empty.

    Raises:
        httpx.TransportError: the connection was lost.
    """
    if response.is_stream_consumed:  # a transport for tests made it whole
        return (response.content, "") if len(response.content) <= MAX_RESPONSE_BYTES else (b"", _TOO_LARGE_MESSAGE)
    read, too_many = bytearray(), False
    try:
        async for chunk in response.aiter_raw():
            read += b"" if too_many else chunk
            if len(read) > MAX_RESPONSE_BYTES and not too_many:
                too_many = True
                await response.aclose()  # so that the loop ends: to leave it would leave open what it reads from
    except (httpx.StreamError, httpx.TransportError):
        if not too_many:
            raise
    if too_many:
        return b"", _TOO_LARGE_MESSAGE
    return _decompress(bytes(read), response.headers.get("content-encoding", "identity"))


def _decompress(data: bytes, packing: str) -> tuple[bytes, str]:
    packing = packing.strip().lower()
    if not data or packing in ("", "identity"):
        return data, ""
    unpacking = zlib.decompressobj(_GZIP_OR_ZLIB_WBITS)
    try:
        whole = unpacking.decompress(data, MAX_RESPONSE_BYTES + 1) if packing in _CONTENT_ENCODINGS else b""
    except zlib.error:
        whole = b""
    if len(whole) > MAX_RESPONSE_BYTES:
        return b"", _TOO_LARGE_MESSAGE
    if not unpacking.eof or unpacking.unused_data:  # half of it, or something behind it, is not what was meant
        return b"", f"its answer is packed with {packing!r} and cannot be unpacked"
    return whole, ""


def retry_after_seconds(headers: Mapping[str, str], now: float) -> float:
    """Seconds for which a service wants to be left alone: given as a number, or as the date when they end."""
    for name, scale in _RETRY_AFTER_HEADERS:
        value = headers.get(name, "")
        try:
            wait = float(value) / scale
        except ValueError:
            wait = _seconds_until(value, now)
        if wait > 0:  # which not-a-number is not
            return wait
    return 0.0


def _seconds_until(date: str, now: float) -> float:
    try:
        moment = parsedate_to_datetime(date)
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - now


def url_problem(given: str) -> str:
    """What is wrong with the address of a service; empty where nothing is."""
    try:
        url = httpx.URL(given)
        host, port = url.host, url.port or 0
    except (httpx.InvalidURL, ValueError):  # the latter for names of hosts that there cannot be
        return "is no URL"
    if url.scheme not in ("http", "https") or not host:
        return "does not begin with http:// or https:// and a host"
    if port > _MAX_PORT:
        return f"has a port above {_MAX_PORT}"
    if url.userinfo:
        return "holds a login, which would end in logs"
    return "has parameters, to which no path can be added" if "?" in given or "#" in given else ""
