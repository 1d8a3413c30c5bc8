"""What answers over HTTP mean: their text, what is wrong, and when to ask again."""

from __future__ import annotations

import json
import zlib
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final, NoReturn, TypeVar

import httpx
import tenacity

from replanning import Environment
from replanning.errors import LLMUnavailable

Result = TypeVar("Result")

LARGEST: Final = 8_000_000
"""Bytes of an answer that are read."""
_TOO_LARGE: Final = f"its answer is larger than {LARGEST:,} bytes"

TRIES: Final = 5
"""How often a request is made at most, if its deadline allows it."""

_FIRST_WAIT: Final = 0.5
_LONGEST_WAIT: Final = 8.0

_GZIP: Final = 47
"""For zlib: gzip as well as its own form."""
_SCALES: Final = (("retry-after-ms", 1000), ("retry-after", 1))
_REASONS: Final[Mapping[int, str]] = {
    401: "it does not accept the key",
    402: "it wants to be paid",
    403: "it does not let this key do that",
    404: "it has no such model, or its address is wrong",
    408: "it waited too long for the request",
    409: "it is busy with something that is in the way",
    413: "the request is too large for it",
    429: "it is asked too often",
}


class FailedTry(Exception):
    """A request failed in a way that may pass.

    Attributes:
        what: has happened.
        status: of the answer, where there was one.
        request_id: by which the service finds the request.
        excerpt: of the answer.
        after: seconds that the service wants to be left alone.
        last: whether the service says that asking again does not help.
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
    ) -> None:
        super().__init__(what)
        self.what, self.status, self.request_id, self.excerpt = what, status, request_id, excerpt
        self.after, self.last = after, last


class Tries:
    """When a request is made again.

    Args:
        provider: who asks.
        environment: time and chance.
        deadline: by which an answer is of use.
    """

    def __init__(self, provider: str, environment: Environment, deadline: float) -> None:
        self._provider = provider
        self._environment = environment
        self._deadline = deadline

    def made_by(self, once: Callable[[], Awaitable[Result]]) -> Awaitable[Result]:
        """What one try comes to; those that fail are followed by others.

        Raises:
            LLMUnavailable: there was no answer, and there is no use or no time to try again.
        """
        retrying = tenacity.AsyncRetrying(
            sleep=self._environment.clock.sleep,
            retry=tenacity.retry_if_exception_type(FailedTry),
            wait=self._wait,
            stop=self._are_over,
            retry_error_callback=self._give_up,
        )
        return retrying(once)

    def _wait(self, state: tenacity.RetryCallState) -> float:
        wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** (state.attempt_number - 1))
        return max(wait * (0.5 + self._environment.chance()), _failure(state).after)

    def _left(self) -> float:
        return self._deadline - self._environment.clock.now()

    def _are_over(self, state: tenacity.RetryCallState) -> bool:
        return _failure(state).last or state.attempt_number >= TRIES or state.upcoming_sleep >= self._left()

    def _give_up(self, state: tenacity.RetryCallState) -> NoReturn:
        failed = _failure(state)
        if failed.last:
            why = "asking again does not help, it says"
        elif state.attempt_number >= TRIES:
            why = f"gave up after {TRIES} tries"
        else:
            why = f"trying again in {state.upcoming_sleep:.3g} s is too late, only {self._left():.3g} s are left"
        raise LLMUnavailable(
            f"{failed.what}; {why}",
            provider=self._provider,
            status=failed.status,
            request_id=failed.request_id,
            excerpt=failed.excerpt,
        ) from failed.__cause__


def _failure(state: tenacity.RetryCallState) -> FailedTry:
    assert state.outcome is not None
    failure = state.outcome.exception()
    assert isinstance(failure, FailedTry)
    return failure


def reason(status: int) -> str:
    """What a status means, in words."""
    if 300 <= status < 400:
        return "it is elsewhere now, and the key is not sent on"
    return _REASONS.get(status) or ("it fails" if status >= 500 else "it does not take this request")


async def content(response: httpx.Response) -> tuple[bytes, str]:
    """The bytes of an answer, and why they cannot be read, if that is so."""
    if response.is_stream_consumed:  # a transport for tests made it whole
        return response.content, ""
    read = bytearray()
    too_many = False
    try:
        async for chunk in response.aiter_raw():
            read += b"" if too_many else chunk
            if len(read) > LARGEST and not too_many:
                too_many = True
                await response.aclose()  # so that the loop ends: to leave it would leave what it reads from open
    except (httpx.StreamError, httpx.TransportError):
        if not too_many:
            raise
    if too_many:
        return b"", _TOO_LARGE
    return _unpacked(bytes(read), response.headers.get("content-encoding", "identity"))


def _unpacked(data: bytes, packing: str) -> tuple[bytes, str]:
    if packing == "identity":
        return data, ""
    unpacking = zlib.decompressobj(_GZIP)
    try:
        whole = unpacking.decompress(data, LARGEST)
    except zlib.error:
        return b"", f"its answer is packed with {packing!r} and cannot be unpacked"
    return (b"", _TOO_LARGE) if unpacking.unconsumed_tail else (whole, "")


def complaint(body: bytes) -> str:
    """What an answer says is wrong, in whichever of the usual forms."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return body.decode(errors="replace")
    error = said.get("error", said) if isinstance(said, dict) else said
    message = (error.get("message") or error.get("detail")) if isinstance(error, dict) else error
    return str(message or said)


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
    except httpx.InvalidURL:
        return "is no URL"
    if url.scheme not in ("http", "https") or not url.host:
        return "does not begin with http:// or https:// and a host"
    if url.userinfo:
        return "holds a login, which would end in logs"
    return "has parameters, to which no path can be added" if url.query or url.fragment else ""
