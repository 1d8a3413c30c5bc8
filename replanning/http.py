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

from replanning._clock import Environment
from replanning._version import __version__

__all__ = ["LARGEST", "TRIES", "FailedTry", "Tries", "connections", "content", "wanted_wait", "wrong_address"]

Result = TypeVar("Result")

LARGEST: Final = 8_000_000
"""Bytes of an answer that are read."""

TRIES: Final = 5
"""How often a request is made at most, if its deadline allows it."""

_TOO_LARGE: Final = f"its answer is larger than {LARGEST:,} bytes"
_CONNECT: Final = 10.0
"""Seconds after which a connection that is not made is tried anew."""
_FIRST_WAIT: Final = 0.5
_LONGEST_WAIT: Final = 8.0
_GZIP: Final = 47
"""For zlib: gzip as well as its own form."""
_PACKINGS: Final = ("gzip", "x-gzip", "deflate")
_LAST_PORT: Final = 65_535
_SCALES: Final = (("retry-after-ms", 1000), ("retry-after", 1))


class FailedTry(Exception):
    """A request failed in a way that may pass.

    Attributes:
        what: has happened.
        status: of the answer, where there was one.
        request_id: by which the service finds the request.
        excerpt: of the answer.
        after: seconds that the service wants to be left alone.
        last: whether the service says that asking again does not help.
        unsure: whether what was asked for may have been done all the same.
    """

    def __init__(
        self,
        what: str,
        *,
        status: int | None = None,
        request_id: str = "",
        excerpt: str = "",
        after: float = 0.0,
        last: bool = False,
        unsure: bool = False,
    ) -> None:
        super().__init__(what)
        self.what, self.status, self.request_id, self.excerpt = what, status, request_id, excerpt
        self.after, self.last, self.unsure = after, last, unsure


class Tries:
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
        given_up: Callable[[FailedTry, str], Exception],
        *,
        most: int = TRIES,
    ) -> None:
        self._environment = environment
        self._deadline = deadline
        self._given_up = given_up
        self._most = most

    async def made_by(self, once: Callable[[], Awaitable[Result]]) -> Result:
        """What one try comes to; those that fail with a `FailedTry` are followed by others.

        Raises:
            Exception: there was no answer, and there is no use or no time to try again; it is that of `given_up`.
        """
        retrying = tenacity.AsyncRetrying(
            sleep=self._environment.clock.sleep,
            retry=tenacity.retry_if_exception_type(FailedTry),
            wait=self._wait,
            stop=self._are_over,
            retry_error_callback=self._give_up,
        )

        async def made() -> Result:  # what is no coroutine function itself would not be awaited
            return await once()

        return await retrying(made)

    def _wait(self, state: tenacity.RetryCallState) -> float:
        wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** (state.attempt_number - 1))
        return max(wait * (0.5 + self._environment.chance()), _failure(state).after)

    def _left(self) -> float:
        return self._deadline - self._environment.clock.now()

    def _are_over(self, state: tenacity.RetryCallState) -> bool:
        return _failure(state).last or state.attempt_number >= self._most or state.upcoming_sleep >= self._left()

    def _give_up(self, state: tenacity.RetryCallState) -> NoReturn:
        failed = _failure(state)
        if failed.last:
            why = "asking again does not help, it says"
        elif state.attempt_number >= self._most:
            why = f"gave up after {self._most} tries" if self._most > 1 else "it was asked once"
        else:
            why = f"trying again in {state.upcoming_sleep:.3g} s is too late, only {self._left():.3g} s are left"
        raise self._given_up(failed, why) from failed.__cause__


def _failure(state: tenacity.RetryCallState) -> FailedTry:
    assert state.outcome is not None
    failure = state.outcome.exception()
    assert isinstance(failure, FailedTry)
    return failure


async def connections(
    transport: httpx.AsyncBaseTransport | None, headers: Mapping[str, str] | None = None
) -> httpx.AsyncClient:
    """Connections to services, which are asked under our name and have no time limit but that of whoever asks.

    Args:
        transport: what connects, for tests; by default the network.
        headers: sent with every request.
    """
    return httpx.AsyncClient(
        transport=transport,
        verify=True if transport is not None else await to_thread.run_sync(_trusted),
        timeout=httpx.Timeout(None, connect=_CONNECT),
        headers={"user-agent": f"replanning/{__version__}", "accept-encoding": "gzip", **(headers or {})},
    )


@cache
def _trusted() -> ssl.SSLContext:
    """Whose certificates are trusted; to read them takes a moment, in which an event loop should do something else."""
    return httpx.create_ssl_context()


async def content(response: httpx.Response) -> tuple[bytes, str]:
    """Read an answer, as far as it is bounded: no more than `LARGEST` bytes, packed or not.

    Args:
        response: which is still to be read, as `stream` of a client gives it.

    Returns:
        Its bytes, and why they cannot be had; one of both is empty.

    Raises:
        httpx.TransportError: the connection was lost.
    """
    if response.is_stream_consumed:  # a transport for tests made it whole
        return (response.content, "") if len(response.content) <= LARGEST else (b"", _TOO_LARGE)
    read, too_many = bytearray(), False
    try:
        async for chunk in response.aiter_raw():
            read += b"" if too_many else chunk
            if len(read) > LARGEST and not too_many:
                too_many = True
                await response.aclose()  # so that the loop ends: to leave it would leave open what it reads from
    except (httpx.StreamError, httpx.TransportError):
        if not too_many:
            raise
    if too_many:
        return b"", _TOO_LARGE
    return _unpacked(bytes(read), response.headers.get("content-encoding", "identity"))


def _unpacked(data: bytes, packing: str) -> tuple[bytes, str]:
    packing = packing.strip().lower()
    if not data or packing in ("", "identity"):
        return data, ""
    unpacking = zlib.decompressobj(_GZIP)
    try:
        whole = unpacking.decompress(data, LARGEST + 1) if packing in _PACKINGS else b""
    except zlib.error:
        whole = b""
    if len(whole) > LARGEST:
        return b"", _TOO_LARGE
    if not unpacking.eof or unpacking.unused_data:  # half of it, or something behind it, is not what was meant
        return b"", f"its answer is packed with {packing!r} and cannot be unpacked"
    return whole, ""


def wanted_wait(headers: Mapping[str, str], now: float) -> float:
    """Seconds for which a service wants to be left alone: given as a number, or as the date when they end."""
    for name, scale in _SCALES:
        value = headers.get(name, "")
        try:
            wait = float(value) / scale
        except ValueError:
            wait = _until(value, now)
        if wait > 0:  # which not-a-number is not
            return wait
    return 0.0


def _until(date: str, now: float) -> float:
    try:
        moment = parsedate_to_datetime(date)
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - now


def wrong_address(given: str) -> str:
    """What is wrong with the address of a service; empty where nothing is."""
    try:
        url = httpx.URL(given)
        host, port = url.host, url.port or 0
    except (httpx.InvalidURL, ValueError):  # the latter for names of hosts that there cannot be
        return "is no URL"
    if url.scheme not in ("http", "https") or not host:
        return "does not begin with http:// or https:// and a host"
    if port > _LAST_PORT:
        return f"has a port above {_LAST_PORT}"
    if url.userinfo:
        return "holds a login, which would end in logs"
    return "has parameters, to which no path can be added" if "?" in given or "#" in given else ""
