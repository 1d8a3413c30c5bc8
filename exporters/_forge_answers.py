"""What answers of a forge mean: their text, what is wrong, and when to ask again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import httpx

from replanning.exporters._forge import ForgeError
from replanning.http import RequestFailed, retry_after_seconds
from replanning.interfaces import JsonObject, JsonValue

MAX_EXCERPT_CHARS: Final = 300
"""Characters of an answer that are shown."""

_DEFAULT_RATE_LIMIT_WAIT: Final = 60.0
"""Seconds for which a forge is left alone that is asked too often and does not say until when."""

_MAX_HEADER_DIGITS: Final = 15
"""Of a number in a header; what is longer is none."""

_RATE_LIMIT_PHRASES: Final = ("rate limit", "abuse detection", "too many requests")
_STATUS_REASONS: Final[Mapping[int, str]] = {
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


class ApiEndpoint(NamedTuple):
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


class Page(NamedTuple):
    """One page of a list, with the address of the next."""

    entries: list[JsonObject]
    next_url: str
    etag: str


class ApiResponse(NamedTuple):
    """What a request came to."""

    status: int
    headers: httpx.Headers
    data: bytes


def rate_limit_end(answer: ApiResponse, now: float) -> float:
    """When a forge may be asked again, by what an answer says; 0 where that is at once."""
    headers, until = answer.headers, 0.0
    if _integer_header(headers, "x-ratelimit-remaining", "ratelimit-remaining") == 0:
        until = float(_integer_header(headers, "x-ratelimit-reset", "ratelimit-reset") or 0)
    wait = retry_after_seconds(headers, now) if answer.status in (403, 429) or answer.status >= 500 else 0.0
    until = max(until, now + wait if wait else 0.0)
    return now + _DEFAULT_RATE_LIMIT_WAIT if _is_rate_limited(answer) and until <= now else until


def response_error(answer: ApiResponse, access: ApiEndpoint, excerpt: Callable[[str], str], quiet: float) -> Exception:
    """What a refusal means.

    Args:
        answer: the refusal.
        access: who was asked.
        excerpt: shortens texts and takes secrets out of them.
        quiet: seconds for which the forge wants to be left alone.
    """
    status, headers = answer.status, answer.headers
    request_id = excerpt(headers.get("x-github-request-id") or headers.get("x-request-id") or "")
    limited, said = _is_rate_limited(answer), excerpt(_error_message(answer.data))
    what = _status_reason(429 if limited else status)
    if limited or status >= 500 or status in (408, 409):
        return RequestFailed(
            what,
            status=status,
            request_id=request_id,
            excerpt=said,
            retry_after=max(quiet, 0.0),
            maybe_executed=status >= 500 or status == 408,
        )
    if status in (401, 403, 404):
        what += f"; look at {access.token_variable}" if access.token else f"; {access.token_variable} is not set"
    return ForgeError(f"{access.name}: {what}", status=status, final=True, request_id=request_id, excerpt=said)


def is_api_of(api: str, page: str) -> bool:
    """Whether an API belongs to the web site of a page; no token goes to another."""
    host, site = httpx.URL(api).host, httpx.URL(page).host
    return host in (site, f"api.{site}")


def text_at(value: JsonValue, *path: str) -> str:
    """The text at a path into objects; empty where there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    text = "" if value is None or isinstance(value, dict | list) else str(value)
    return text if text.isascii() else text.encode(errors="replace").decode()  # half a character is none


def objects_in(value: JsonValue) -> list[JsonObject]:
    """The objects in a list; none where it is no list."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _status_reason(status: int) -> str:
    if 300 <= status < 400:
        return "it is elsewhere now, and the token is not sent on"
    return _STATUS_REASONS.get(status) or ("it fails" if status >= 500 else "it does not take this request")


def _is_rate_limited(answer: ApiResponse) -> bool:
    """Whether a refusal is about how often it is asked, and not about what."""
    if answer.status != 403:
        return answer.status == 429
    spent = _integer_header(answer.headers, "x-ratelimit-remaining") == 0
    said = _error_message(answer.data).lower()
    return spent or "retry-after" in answer.headers or any(words in said for words in _RATE_LIMIT_PHRASES)


def _error_message(body: bytes) -> str:
    """What an answer says is wrong, in the form of either forge."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return body[: 4 * MAX_EXCERPT_CHARS].decode(errors="replace")
    found = (said.get("message") or said.get("error") or said) if isinstance(said, dict) else said
    more = said.get("errors") if isinstance(said, dict) else None
    return f"{found} {json.dumps(more)}" if more else str(found)


def _integer_header(headers: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        value = headers.get(name, "")
        if value.isdecimal() and len(value) <= _MAX_HEADER_DIGITS:
            return int(value)
    return None
