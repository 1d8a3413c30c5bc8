"""What answers of a forge mean: their text, what is wrong, and when to ask again."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final, NamedTuple

import httpx

from replanning.exporters._forge import ForgeError
from replanning.interfaces import JsonObject, JsonValue

EXCERPT: Final = 300
"""Characters of an answer that are shown."""

LARGEST: Final = 8_000_000
"""Bytes of an answer that are read."""

_TOO_LARGE: Final = f"its answer is larger than {LARGEST:,} bytes"

_GZIP: Final = 47
"""For zlib: gzip as well as its own form."""

_LIMIT_WAIT: Final = 60.0
"""Seconds for which a forge is left alone that is asked too often and does not say until when."""

_LIMITED: Final = ("rate limit", "abuse detection", "too many requests")
_REASONS: Final[Mapping[int, str]] = {
    400: "it does not understand the request",
    401: "it does not accept the token",
    403: "it does not let this token do that",
    404: "there is no such thing there, or this token may not see it",
    405: "it does not let that be done there",
    408: "it waited too long for the request",
    409: "it is busy with something that is in the way",
    410: "it is gone",
    422: "it does not take this text",
    429: "it is asked too often",
}


class Access(NamedTuple):
    """Where a forge is, and as whom it is asked.

    Attributes:
        name: of the forge, in messages.
        url: to which paths are added.
        token: of whoever asks; empty for nobody.
        token_variable: where the token is looked for, for messages.
        headers: sent along.
    """

    name: str
    url: str
    token: str
    token_variable: str
    headers: Mapping[str, str]

    def __repr__(self) -> str:
        return f"<{self.name} at {self.url} {'with' if self.token else 'without'} a token>"


class FailedTry(Exception):
    """A request failed in a way that may pass.

    Attributes:
        what: has happened.
        status: of the answer, where there was one.
        request_id: by which the forge finds the request.
        excerpt: of the answer.
        after: seconds that the forge wants to be left alone.
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
        unsure: bool = False,
    ) -> None:
        super().__init__(what)
        self.what, self.status, self.request_id, self.excerpt = what, status, request_id, excerpt
        self.after, self.unsure = after, unsure


class Page(NamedTuple):
    """One page of a list, with the address of the next."""

    entries: list[JsonObject]
    next: str
    etag: str


class Answer(NamedTuple):
    """What a request came to."""

    status: int
    headers: httpx.Headers
    data: bytes


def quiet_until(answer: Answer, now: float) -> float:
    """When a forge may be asked again, by what an answer says; 0 where that is at once."""
    headers, until = answer.headers, 0.0
    if _whole(headers, "x-ratelimit-remaining", "ratelimit-remaining") == 0:
        until = float(_whole(headers, "x-ratelimit-reset", "ratelimit-reset") or 0)
    wait = _retry_after(headers, now) if answer.status in (403, 429) or answer.status >= 500 else 0.0
    until = max(until, now + wait if wait else 0.0)
    return now + _LIMIT_WAIT if _is_limited(answer) and until <= now else until


def refusal(answer: Answer, access: Access, excerpt: Callable[[str], str], quiet: float) -> Exception:
    """What a refusal means.

    Args:
        answer: the refusal.
        access: who was asked.
        excerpt: shortens texts and takes secrets out of them.
        quiet: seconds for which the forge wants to be left alone.
    """
    status, headers = answer.status, answer.headers
    request_id = excerpt(headers.get("x-github-request-id") or headers.get("x-request-id") or "")
    limited, said = _is_limited(answer), excerpt(_complaint(answer.data))
    what = _reason(429 if limited else status)
    if limited or status >= 500 or status in (408, 409):
        return FailedTry(
            what,
            status=status,
            request_id=request_id,
            excerpt=said,
            after=max(quiet, 0.0),
            unsure=status >= 500 or status == 408,
        )
    if status in (401, 403, 404):
        what += f"; look at {access.token_variable}" if access.token else f"; {access.token_variable} is not set"
    return ForgeError(f"{access.name}: {what}", status=status, final=True, request_id=request_id, excerpt=said)


def wrong_address(given: str) -> str:
    """What is wrong with the address of an API; empty where nothing is."""
    try:
        url = httpx.URL(given)
    except httpx.InvalidURL:
        return "is no URL"
    if url.scheme not in ("http", "https") or not url.host:
        return "does not begin with http:// or https:// and a host"
    if url.userinfo:
        return "holds a login, which would end in logs"
    return "has parameters, to which no path can be added" if url.query or url.fragment else ""


def serves(api: str, page: str) -> bool:
    """Whether an API belongs to the web site of a page; no token goes to another."""
    host, site = httpx.URL(api).host, httpx.URL(page).host
    return host in (site, f"api.{site}")


def texts(value: JsonValue, *path: str) -> str:
    """The text at a path into objects; empty where there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    text = "" if value is None or isinstance(value, dict | list) else str(value)
    return text if text.isascii() else text.encode(errors="replace").decode()  # half a character is none


def objects(value: JsonValue) -> list[JsonObject]:
    """The objects in a list; none where it is no list."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


async def content(response: httpx.Response) -> tuple[bytes, str]:
    """The bytes of an answer, and why they cannot be read, if that is so."""
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
    if packing == "identity":
        return data, ""
    unpacking = zlib.decompressobj(_GZIP)
    try:
        whole = unpacking.decompress(data, LARGEST)
    except zlib.error:
        return b"", f"its answer is packed with {packing!r} and cannot be unpacked"
    return (b"", _TOO_LARGE) if unpacking.unconsumed_tail else (whole, "")


def _reason(status: int) -> str:
    if 300 <= status < 400:
        return "it is elsewhere now, and the token is not sent on"
    return _REASONS.get(status) or ("it fails" if status >= 500 else "it does not take this request")


def _is_limited(answer: Answer) -> bool:
    """Whether a refusal is about how often it is asked, and not about what."""
    if answer.status != 403:
        return answer.status == 429
    spent = _whole(answer.headers, "x-ratelimit-remaining") == 0
    said = _complaint(answer.data).lower()
    return spent or "retry-after" in answer.headers or any(words in said for words in _LIMITED)


def _complaint(body: bytes) -> str:
    """What an answer says is wrong, in the form of either forge."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return body[: 4 * EXCERPT].decode(errors="replace")
    found = (said.get("message") or said.get("error") or said) if isinstance(said, dict) else said
    more = said.get("errors") if isinstance(said, dict) else None
    return f"{found} {json.dumps(more)}" if more else str(found)


def _whole(headers: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        value = headers.get(name, "")
        if value.isdecimal():
            return int(value)
    return None


def _retry_after(headers: Mapping[str, str], now: float) -> float:
    """Seconds for which a forge wants to be left alone: given as a number, or as the date when they end."""
    value = headers.get("retry-after", "")
    try:
        wait = float(value)
    except ValueError:
        wait = _until(value, now)
    return wait if 0 < wait < float("inf") else 0.0  # which not-a-number is not


def _until(date: str, now: float) -> float:
    try:
        moment = parsedate_to_datetime(date)
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - now
