"""HTTP API of a forge: requests retried within a deadline, and paged lists."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import anyio
import httpx

from replanning import Environment
from replanning.environment import move_on_after
from replanning.exporters._forge import ForgeError
from replanning.http import (
    RequestFailed,
    call_with_retries,
    create_client,
    error_message,
    read_body,
    retry_after_seconds,
    same_origin_url,
)
from replanning.plan import JsonObject
from replanning.plan.json_values import as_object
from replanning.plan.messages import format_duration, truncate
from replanning.plan.types import JsonValue

T = TypeVar("T")

MAX_COMMENTS: Final = 5_000
"""Maximum number of comments read from an issue: GitLab's limit, and twice that of GitHub."""

MAX_EXCERPT_CHARS: Final = 300
"""Characters of a response kept in error messages."""

PAGE_SIZE: Final = 100
"""Entries of a page, the maximum of both forges."""

_MAX_REDIRECTS: Final = 3

_REDIRECT_STATUSES: Final = (301, 302, 307, 308)

_DEFAULT_RATE_LIMIT_WAIT: Final = 60.0
"""Seconds to wait after a rate limit that names no time."""

_MAX_RATE_LIMIT_WAIT: Final = 3_600.0
"""Longest wait for a rate limit in seconds, in case the clocks differ."""

_MAX_HEADER_DIGITS: Final = 15
"""Maximum digits of a number in a header."""

_RATE_LIMIT_PHRASES: Final = ("rate limit", "abuse detection", "too many requests")

_STATUS_REASONS: Final[Mapping[int, str]] = {
    400: "the request is malformed",
    401: "the token is not accepted",
    403: "the token lacks the permission",
    404: "not found, or the token may not see it",
    405: "the method is not allowed",
    408: "the request took too long",
    409: "the request conflicts with another operation",
    410: "it was deleted",
    422: "the text is rejected",
    429: "rate limit reached",
}

_NOT_CONNECTED: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Errors before anything was sent."""


class ApiResponse(NamedTuple):
    """Response to a request."""

    status: int
    headers: httpx.Headers
    data: bytes


class ForgeApi:
    """HTTP API of a forge, as one account uses it.

    A call is a few requests that share one deadline. Calls take turns, because forges require it.
    The state is that of the connection: the open client, the deadline of the call under way, and
    the end of the last rate limit.

    Args:
        url: URL of the API.
        label: the forge and the issue, for error messages.
        token: access token; empty for none.
        token_variable: environment variable of the token, for error messages.
        headers: headers of every request, with the token.
        timeout: seconds for a call, retries included.
        environment: source of time and randomness.
        transport: HTTP transport, for tests; by default the network.
    """

    def __init__(
        self,
        url: str,
        label: str,
        *,
        token: str,
        token_variable: str,
        headers: Mapping[str, str],
        timeout: float,
        environment: Environment,
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        self.url = url
        self.label = label
        self.token_variable = token_variable
        self._token = token
        self._headers = headers
        self._timeout = timeout
        self._environment = environment
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._lock = anyio.Lock()
        self._deadline = 0.0
        self._rate_limited_until = 0.0

    def __repr__(self) -> str:
        return f"<ForgeApi {self.url} for {self.label}>"

    @property
    def has_token(self) -> bool:
        """Whether requests carry a token."""
        return bool(self._token)

    def redact_token(self, text: str) -> str:
        """Return a text without the token."""
        return text.replace(self._token, "[redacted]") if self._token else text

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Run the requests of a block under one deadline; other calls wait until it ends.

        Raises:
            ForgeError: the deadline has passed.
        """
        clock = self._environment.clock
        deadline = clock.now() + self._timeout
        failure: Exception | None = None
        is_done = False
        async with move_on_after(self._timeout, clock):
            try:
                async with self._lock:
                    if self._client is None:
                        self._client = await create_client(self._transport, self._headers)
                    self._deadline = deadline
                    yield
                    is_done = True
            except Exception as error:  # noqa: BLE001 - raised below: the group would wrap it
                failure = error
        if failure is not None:
            raise failure
        if not is_done:
            raise ForgeError(f"{self.label}: no response within {format_duration(self._timeout)}")

    async def aclose(self) -> None:
        """Close the connections; the next call opens new ones, also in another event loop."""
        client = self._client
        self._client = None
        self._lock = anyio.Lock()
        if client is not None:
            await client.aclose()

    async def get(self, url: str, headers: Mapping[str, str] | None = None) -> ApiResponse:
        """Return the response to a GET request.

        Raises:
            ForgeError: the request fails.
        """
        return await self._with_retries(partial(self._send, "GET", url, headers=headers))

    async def get_json(self, path: str) -> JsonValue:
        """Return the JSON value at a path.

        Raises:
            ForgeError: the request fails.
        """
        return self.parse_json(await self.get(self.url + path))

    async def write(self, method: str, path: str, body: JsonObject) -> JsonObject:
        """Send a request that writes, and return the JSON object in its response.

        Args:
            method: HTTP method; PATCH and PUT may be repeated, POST may not.
            path: path of the resource.
            body: JSON body.

        Raises:
            ForgeError: the request failed, or its effect is unknown.
        """
        if not self._token:
            problem = f"{self.label}: writing needs a token: set {self.token_variable}"
            raise ForgeError(problem, final=True)

        async def send_once() -> ApiResponse:
            try:
                return await self._send(method, self.url + path, body=body)
            except RequestFailed as failed:
                if method == "POST" and failed.maybe_executed:
                    raise self._error(failed, "it may have taken effect") from failed
                raise

        return as_object(self.parse_json(await self._with_retries(send_once)))

    def parse_json(self, answer: ApiResponse) -> JsonValue:
        """Return the JSON value in a response.

        Raises:
            ForgeError: the response is not JSON.
        """
        try:
            value: JsonValue = json.loads(answer.data)
        except (ValueError, RecursionError):
            problem = f"{self.label}: the response is not JSON; is {self.url} the URL of its API?"
            excerpt = self._excerpt(answer.data[: 4 * MAX_EXCERPT_CHARS].decode(errors="replace"))
            raise ForgeError(problem, status=answer.status, final=True, excerpt=excerpt) from None
        return value

    async def _with_retries(self, once: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of a request; repeat it after temporary failures until the deadline."""
        return await call_with_retries(once, self._environment, self._deadline, self._error)

    def _error(self, failed: RequestFailed, why: str) -> ForgeError:
        return ForgeError(
            f"{self.label}: {failed.message}; {why}",
            status=failed.status,
            retry_after=failed.retry_after or None,
            request_id=failed.request_id,
            excerpt=failed.excerpt,
        )

    async def _send(
        self,
        method: str,
        url: str,
        *,
        body: JsonObject | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> ApiResponse:
        """Return the response to a request, after redirects on the same host.

        Raises:
            ForgeError: the request is refused.
            RequestFailed: the request fails, but a retry may help.
        """
        left = self._rate_limited_until - self._environment.clock.now()
        if left > 0:
            raise RequestFailed("rate limit reached", retry_after=left, status=429)
        answer = await self._exchange(method, url, body, headers)
        for _ in range(_MAX_REDIRECTS):
            if answer.status not in _REDIRECT_STATUSES:
                break
            # The token is not sent to another host.
            target = same_origin_url(url, answer.headers.get("location", ""))
            if not target:
                break
            url = target
            answer = await self._exchange(method, url, body, headers)
        now = self._environment.clock.now()
        limit_end = min(_rate_limit_end(answer, now), now + _MAX_RATE_LIMIT_WAIT)
        self._rate_limited_until = max(self._rate_limited_until, limit_end)
        if answer.status == 304 or 200 <= answer.status < 300:
            return answer
        raise self._refusal(answer, retry_after=max(0.0, self._rate_limited_until - now))

    async def _exchange(
        self, method: str, url: str, body: JsonObject | None, headers: Mapping[str, str] | None
    ) -> ApiResponse:
        """Send one request, and read its response.

        Raises:
            ForgeError: the response is too large or cannot be decompressed.
            RequestFailed: there is no response.
        """
        assert self._client is not None  # `call` opens it
        try:
            async with self._client.stream(method, url, json=body, headers=headers) as response:
                data, problem, _ = await read_body(response)
        # A redirect to an invalid host raises UnicodeError.
        except (httpx.RequestError, UnicodeError) as error:
            what = "the connection was lost"
            is_sent = not isinstance(error, _NOT_CONNECTED)
            if not is_sent:
                what = "cannot connect"
            raise RequestFailed(
                f"{httpx.URL(url).host}: {what}",
                excerpt=self._excerpt(f"{type(error).__name__}: {error}".rstrip(": ")),
                maybe_executed=is_sent,
            ) from error
        if problem:
            raise ForgeError(f"{self.label}: {problem}", status=response.status_code)
        return ApiResponse(response.status_code, response.headers, data)

    def _refusal(self, answer: ApiResponse, retry_after: float) -> RequestFailed | ForgeError:
        """Return the error for a response without success.

        After a rate limit, a server error or a conflict, a retry may help.
        """
        status = answer.status
        is_rate_limited = _is_rate_limited(answer)
        is_server_error = status >= 500
        reason = _STATUS_REASONS.get(status, "the request is refused")
        if is_rate_limited:
            reason = _STATUS_REASONS[429]
        elif is_server_error:
            reason = "server error"
        elif 300 <= status < 400:
            reason = "redirected to another host, where the token is not sent"
        request_id = answer.headers.get("x-github-request-id", "")
        request_id = self._excerpt(request_id or answer.headers.get("x-request-id", ""))
        excerpt = self._excerpt(error_message(answer.data))
        if is_rate_limited or is_server_error or status in (408, 409):
            return RequestFailed(
                reason,
                status=status,
                request_id=request_id,
                excerpt=excerpt,
                retry_after=retry_after,
                maybe_executed=is_server_error or status == 408,
            )
        if status in (401, 403, 404):
            advice = f"{self.token_variable} is not set"
            if self._token:
                advice = f"check {self.token_variable}"
            reason = f"{reason}; {advice}"
        return ForgeError(
            f"{self.label}: {reason}",
            status=status,
            final=True,
            request_id=request_id,
            excerpt=excerpt,
        )

    def _excerpt(self, text: str) -> str:
        """Return the beginning of a text, without the token."""
        return truncate(self.redact_token(text[: 4 * MAX_EXCERPT_CHARS]), MAX_EXCERPT_CHARS)


class _Page(NamedTuple):
    """One page of a list, with the URL of the next."""

    entries: list[JsonObject]
    next_url: str
    etag: str


class PagedLists:
    """Paged lists of an API; unchanged pages come from a cache, its only state.

    Args:
        api: the API.
    """

    def __init__(self, api: ForgeApi) -> None:
        self._api = api
        self._pages: dict[str, _Page] = {}

    def __repr__(self) -> str:
        return f"<PagedLists of {self._api!r} pages={len(self._pages)}>"

    async def read(
        self, path: str, params: Mapping[str, str] | None = None, *, limit: int = MAX_COMMENTS
    ) -> list[JsonObject]:
        """Return the entries of a list.

        Args:
            path: path of the list.
            params: query parameters.
            limit: maximum number of entries.

        Raises:
            ForgeError: a request fails.
        """
        entries: list[JsonObject] = []
        query = {**(params or {}), "per_page": str(PAGE_SIZE)}
        url = str(httpx.URL(self._api.url + path, params=query))
        while url and len(entries) < limit:
            page = await self._read_page(url)
            self._pages[url] = page
            entries += page.entries
            url = page.next_url
        return entries[:limit]

    async def _read_page(self, url: str) -> _Page:
        """Return one page, from the cache if it has not changed.

        Raises:
            ForgeError: the request fails.
        """
        kept = self._pages.get(url)
        headers: dict[str, str] = {}
        if kept is not None and kept.etag:
            headers["if-none-match"] = kept.etag
        answer = await self._api.get(url, headers)
        if answer.status == 304 and kept is not None:
            return _with_next_page(kept, url)
        objects: list[JsonObject] = []
        entries = self._api.parse_json(answer)
        if isinstance(entries, list):
            objects = [entry for entry in entries if isinstance(entry, dict)]
        next_url = _next_page_url(url, answer.headers)
        return _Page(objects, next_url, answer.headers.get("etag", ""))


def _with_next_page(page: _Page, url: str) -> _Page:
    """Return an unchanged page with the URL of the next page, if it is full.

    A full last page does not change when the next one begins.
    """
    number = httpx.URL(url).params.get("page", "1")
    if page.next_url or len(page.entries) < PAGE_SIZE or not number.isdecimal():
        return page
    next_url = httpx.URL(url).copy_merge_params({"page": str(int(number) + 1)})
    return page._replace(next_url=str(next_url))


def _next_page_url(url: str, headers: Mapping[str, str]) -> str:
    """Return the URL of the next page, which must be on the same host; empty if there is none."""
    number = headers.get("x-next-page", "")
    if number:
        return str(httpx.URL(url).copy_merge_params({"page": number}))
    link = headers.get("link", "")
    if not link:
        return ""
    links = httpx.Response(200, headers={"link": link}).links
    return same_origin_url(url, links.get("next", {}).get("url", "") or "")


def _rate_limit_end(answer: ApiResponse, now: float) -> float:
    """Return the time until which a response forbids requests; 0 if it does not limit them."""
    headers = answer.headers
    until = 0.0
    if _integer_header(headers, "x-ratelimit-remaining", "ratelimit-remaining") == 0:
        until = float(_integer_header(headers, "x-ratelimit-reset", "ratelimit-reset") or 0)
    if answer.status in (403, 429) or answer.status >= 500:
        wait = retry_after_seconds(headers, now)
        if wait:
            until = max(until, now + wait)
    if until <= now and _is_rate_limited(answer):
        return now + _DEFAULT_RATE_LIMIT_WAIT
    return until


def _is_rate_limited(answer: ApiResponse) -> bool:
    """Return whether an error response is a rate limit."""
    if answer.status != 403:
        return answer.status == 429
    if _integer_header(answer.headers, "x-ratelimit-remaining") == 0:
        return True
    if "retry-after" in answer.headers:
        return True
    message = error_message(answer.data).lower()
    return any(phrase in message for phrase in _RATE_LIMIT_PHRASES)


def _integer_header(headers: Mapping[str, str], *names: str) -> int | None:
    """Return the number in the first of these headers that has one."""
    for name in names:
        value = headers.get(name, "")
        if value.isdecimal() and len(value) <= _MAX_HEADER_DIGITS:
            return int(value)
    return None


async def result_or(request: Awaitable[T], default: T) -> T:
    """Return the result of a request for optional data; the default if it fails."""
    try:
        return await request
    except ForgeError:
        return default


def truncated_list(entries: Sequence[JsonValue], most: int) -> list[JsonValue]:
    """Return the first entries of a list, with a note if there are more."""
    shown = list(entries[:most])
    if len(entries) > most:
        shown.append("… [cut: there are more]")
    return shown


def text_at(value: JsonValue, *path: str) -> str:
    """Return the text at a path into nested objects; empty if there is none."""
    for name in path:
        if not isinstance(value, dict):
            return ""
        value = value.get(name)
    if value is None or isinstance(value, dict | list):
        return ""
    text = str(value)
    if text.isascii():
        return text
    return text.encode(errors="replace").decode()  # replaces lone surrogates
