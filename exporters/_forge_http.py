"""HTTP API of a forge: requests with retries, pages and rate limits, and the meaning of its errors."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple, TypeVar

import anyio
import httpx

from replanning import Environment
from replanning.exporters._forge import ForgeError
from replanning.http import RequestFailed, RetryPolicy, create_client, read_body, retry_after_seconds
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue

MAX_EXCERPT_CHARS: Final = 300
"""Characters of a response in error messages."""

_DEFAULT_RATE_LIMIT_WAIT: Final = 60.0
"""Seconds to wait after a rate limit that names no time."""

_MAX_HEADER_DIGITS: Final = 15
"""Longest number accepted in a header."""

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


class Page(NamedTuple):
    """One page of a list, with the URL of the next."""

    entries: list[JsonObject]
    next_url: str
    etag: str


class ApiResponse(NamedTuple):
    """Response to a request."""

    status: int
    headers: httpx.Headers
    data: bytes


def rate_limit_end(answer: ApiResponse, now: float) -> float:
    """Return the time before which a response allows no further request; 0 if it names none."""
    headers, until = answer.headers, 0.0
    if _integer_header(headers, "x-ratelimit-remaining", "ratelimit-remaining") == 0:
        until = float(_integer_header(headers, "x-ratelimit-reset", "ratelimit-reset") or 0)
    wait = retry_after_seconds(headers, now) if answer.status in (403, 429) or answer.status >= 500 else 0.0
    until = max(until, now + wait if wait else 0.0)
    return now + _DEFAULT_RATE_LIMIT_WAIT if _is_rate_limited(answer) and until <= now else until


def text_at(value: JsonValue, *path: str) -> str:
    """Return the text at a path into nested objects; empty if there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    text = "" if value is None or isinstance(value, dict | list) else str(value)
    return text if text.isascii() else text.encode(errors="replace").decode()  # replaces lone surrogates


def as_object(value: JsonValue) -> JsonObject:
    """Return a JSON value that is an object; else an empty object."""
    return value if isinstance(value, dict) else {}


def objects_in(value: JsonValue) -> list[JsonObject]:
    """Return the objects in a list; empty if it is not a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _is_rate_limited(answer: ApiResponse) -> bool:
    """Return whether an error response is a rate limit."""
    if answer.status != 403:
        return answer.status == 429
    spent = _integer_header(answer.headers, "x-ratelimit-remaining") == 0
    message = _error_message(answer.data).lower()
    return spent or "retry-after" in answer.headers or any(phrase in message for phrase in _RATE_LIMIT_PHRASES)


def _error_message(body: bytes) -> str:
    """Return the message of an error response of GitHub or GitLab."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return body[: 4 * MAX_EXCERPT_CHARS].decode(errors="replace")
    if not isinstance(content, dict):
        return str(content)
    message, details = content.get("message") or content.get("error") or content, content.get("errors")
    return f"{message} {json.dumps(details)}" if details else str(message)


def _integer_header(headers: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        value = headers.get(name, "")
        if value.isdecimal() and len(value) <= _MAX_HEADER_DIGITS:
            return int(value)
    return None


T = TypeVar("T")

PAGE_SIZE: Final = 100
"""Entries of a page; the maximum of both forges."""

_MAX_RATE_LIMIT_WAIT: Final = 3_600.0
"""Longest wait for a rate limit in seconds, in case the clocks differ."""

_MASK: Final = "[redacted]"

_REDIRECT_STATUSES: Final = (301, 302, 307, 308)

_MAX_REDIRECTS: Final = 3


class ForgeClient:
    """Client of a forge's API, with one call at a time, as forges require.

    Args:
        name: name in messages.
        url: base URL of the API.
        token: access token; empty for anonymous requests.
        token_variable: environment variable of the token, for messages.
        headers: headers of every request.
        timeout: seconds for a call, retries included.
        environment: source of time and randomness.
        transport: HTTP transport, for tests; by default the network.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        token: str,
        token_variable: str,
        headers: Mapping[str, str],
        timeout: float,
        environment: Environment | None,
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        self.name, self.url, self.token, self.token_variable = name, url, token, token_variable
        self.page_cache: dict[str, Page] = {}
        self._headers = headers
        self._timeout = timeout
        self._environment = environment or Environment()
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._lock = anyio.Lock()
        self._deadline = 0.0
        self._rate_limited_until = 0.0

    def __repr__(self) -> str:
        return f"<{self.name} at {self.url} {'with' if self.token else 'without'} a token>"

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a call: requests that share one deadline.

        Raises:
            ForgeError: a request fails, or the time is up.
        """
        clock = self._environment.clock
        deadline = clock.now() + self._timeout
        results: list[T] = []
        failure: Exception | None = None

        async def cancel_at_deadline() -> None:
            await clock.sleep(max(0.0, deadline - clock.now()))
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(cancel_at_deadline)
            try:
                async with self._lock:
                    if self._client is None:
                        self._client = await create_client(self._transport, self._headers)
                    self._deadline = deadline
                    results.append(await work())
            except Exception as error:  # noqa: BLE001 - raised below: the group would wrap it
                failure = error
            group.cancel_scope.cancel()
        if results:
            return results[0]
        if failure is not None:
            raise failure
        raise ForgeError(f"{self.name}: no response within {self._timeout:g} s")

    async def aclose(self) -> None:
        """Close the connections; the next call opens new ones, also in another event loop."""
        client, self._client, self._lock = self._client, None, anyio.Lock()
        if client is not None:
            await client.aclose()

    def redact_token(self, text: str) -> str:
        """Return a text without the token, to be published."""
        return text.replace(self.token, _MASK) if self.token else text

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> JsonValue:
        """Return the JSON value at a path.

        Raises:
            ForgeError: the request fails.
        """
        url = str(httpx.URL(self.url + path, params=params))
        return self._parse_json(await self._with_retries(lambda: self._send("GET", url)))

    async def get_text(self, path: str, accept: str = "*/*") -> str:
        """Return the text at a path.

        Raises:
            ForgeError: the request fails.
        """
        answer = await self._with_retries(lambda: self._send("GET", self.url + path, headers={"accept": accept}))
        data: bytes = answer.data
        return data.decode(errors="replace")

    async def list_entries(self, path: str, params: Mapping[str, str] | None = None, *, limit: int) -> list[JsonObject]:
        """Return the entries of a list of several pages; unchanged pages come from the cache.

        Args:
            path: path of the list.
            params: query parameters.
            limit: most entries to return.

        Raises:
            ForgeError: a request fails.
        """
        entries: list[JsonObject] = []
        url = self.first_page_url(path, params)
        while url and len(entries) < limit:
            page = await self.get_page(url)
            entries += page.entries
            url = page.next_url
        return entries[:limit]

    def first_page_url(self, path: str, params: Mapping[str, str] | None = None) -> str:
        """Return the URL of the first page of a list."""
        return str(httpx.URL(self.url + path, params={**(params or {}), "per_page": str(PAGE_SIZE)}))

    async def get_page(self, url: str, *, once: bool = False) -> Page:
        """Return one page, from the cache if it has not changed.

        Args:
            url: URL of the page.
            once: do not retry.

        Raises:
            ForgeError: the request fails.
            RequestFailed: the request fails without retries, but a retry may help.
        """
        kept = self.page_cache.get(url)
        headers = {"if-none-match": kept.etag} if kept is not None and kept.etag else {}

        async def ask() -> ApiResponse:
            return await self._send("GET", url, headers=headers)

        answer = await (ask() if once else self._with_retries(ask))
        if answer.status == 304 and kept is not None:
            # A page that was the last stays unchanged when it fills up and a next one begins.
            is_full = not kept.next_url and len(kept.entries) >= PAGE_SIZE
            page = kept._replace(next_url=_following_page_url(url)) if is_full else kept
        else:
            entries, etag = objects_in(self._parse_json(answer)), answer.headers.get("etag", "")
            page = Page(entries, _next_page_url(url, answer.headers), etag)
        self.page_cache[url] = page
        return page

    async def write(
        self,
        method: str,
        path: str,
        body: JsonObject,
        *,
        find_existing: Callable[[], Awaitable[JsonObject | None]] | None = None,
        maybe_written: bool = False,
    ) -> JsonObject:
        """Send a request that writes, and return the JSON object in its response.

        Args:
            method: HTTP method; PATCH and PUT may be repeated, POST may not.
            path: path of the resource.
            body: JSON body.
            find_existing: finds the result of an earlier try that may have succeeded; None if repeating is harmless.
            maybe_written: true if an earlier call may have succeeded.

        Raises:
            ForgeError: the request failed, or its effect is unknown.
        """
        if not self.token:
            raise ForgeError(f"{self.name}: writing needs a token: set {self.token_variable}", final=True)

        async def ask() -> ApiResponse | JsonObject:
            nonlocal maybe_written
            if maybe_written and find_existing is not None and (existing := await find_existing()) is not None:
                return existing
            try:
                return await self._send(method, self.url + path, body=body)
            except RequestFailed as failed:
                maybe_written = maybe_written or failed.maybe_executed
                raise

        answer = await self._with_retries(ask)
        return answer if isinstance(answer, dict) else as_object(self._parse_json(answer))

    async def _with_retries(self, once: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a request; repeat it after temporary failures until the deadline."""

        def give_up(failed: RequestFailed, why: str) -> ForgeError:
            return ForgeError(
                f"{self.name}: {failed.message}; {why}",
                status=failed.status,
                retry_after=failed.retry_after or None,
                request_id=failed.request_id,
                excerpt=failed.excerpt,
            )

        return await RetryPolicy(self._environment, self._deadline, give_up).call(once)

    async def _send(
        self, method: str, url: str, *, body: JsonObject | None = None, headers: Mapping[str, str] | None = None
    ) -> ApiResponse:
        clock = self._environment.clock
        now = clock.now()
        if self._rate_limited_until > now:
            raise RequestFailed("rate limit reached", retry_after=self._rate_limited_until - now, status=429)
        hops = 0
        answer = await self._send_once(method, url, body, headers or {})
        while answer.status in _REDIRECT_STATUSES and hops < _MAX_REDIRECTS:
            there = _same_origin_url(url, answer.headers.get("location", ""))
            if not there:  # the token is not sent to another host
                break
            url, hops = there, hops + 1
            answer = await self._send_once(method, url, body, headers or {})
        limit_end = min(rate_limit_end(answer, clock.now()), clock.now() + _MAX_RATE_LIMIT_WAIT)
        self._rate_limited_until = max(self._rate_limited_until, limit_end)
        if answer.status == 304 or 200 <= answer.status < 300:
            return answer
        raise self._response_error(answer, max(0.0, self._rate_limited_until - now))

    async def _send_once(
        self, method: str, url: str, body: JsonObject | None, headers: Mapping[str, str]
    ) -> ApiResponse:
        try:
            assert self._client is not None  # `run` opens it
            async with self._client.stream(method, url, json=body, headers=dict(headers)) as response:
                data, problem = await read_body(response)
        except (httpx.RequestError, UnicodeError) as error:  # UnicodeError: a redirect to an invalid host
            excerpt = self._excerpt(f"{type(error).__name__}: {error}".rstrip(": "))
            unsure = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
            what = "the connection was lost" if unsure else "cannot connect"
            raise RequestFailed(f"{httpx.URL(url).host}: {what}", excerpt=excerpt, maybe_executed=unsure) from error
        if problem:
            raise ForgeError(f"{self.name}: {problem}", status=response.status_code)
        return ApiResponse(response.status_code, response.headers, data)

    def _response_error(self, answer: ApiResponse, wait: float) -> Exception:
        """Return the exception for an error response: `RequestFailed` if a retry may help, else `ForgeError`.

        Args:
            answer: the response.
            wait: seconds until the rate limit allows another request.
        """
        status, headers = answer.status, answer.headers
        request_id = self._excerpt(headers.get("x-github-request-id") or headers.get("x-request-id") or "")
        limited, message = _is_rate_limited(answer), self._excerpt(_error_message(answer.data))
        reason = _STATUS_REASONS.get(429 if limited else status, "the request is refused")
        if 300 <= status < 400:
            reason = "redirected to another host, where the token is not sent"
        elif status >= 500:
            reason = "server error"
        if limited or status >= 500 or status in (408, 409):
            return RequestFailed(
                reason,
                status=status,
                request_id=request_id,
                excerpt=message,
                retry_after=wait,
                maybe_executed=status >= 500 or status == 408,
            )
        if status in (401, 403, 404):
            reason += f"; check {self.token_variable}" if self.token else f"; {self.token_variable} is not set"
        return ForgeError(f"{self.name}: {reason}", status=status, final=True, request_id=request_id, excerpt=message)

    def _parse_json(self, answer: ApiResponse) -> JsonValue:
        try:
            value: JsonValue = json.loads(answer.data)
        except (ValueError, RecursionError):
            problem = f"{self.name}: the response is not JSON; is {self.url} the URL of its API?"
            excerpt = self._excerpt(answer.data[: 4 * MAX_EXCERPT_CHARS].decode(errors="replace"))
            raise ForgeError(problem, status=answer.status, final=True, excerpt=excerpt) from None
        return value

    def _excerpt(self, text: str) -> str:
        """Return the beginning of a text, without the token."""
        return self.redact_token(text[: 4 * MAX_EXCERPT_CHARS])[:MAX_EXCERPT_CHARS]


def _next_page_url(url: str, headers: Mapping[str, str]) -> str:
    """Return the URL of the next page, which must be on the same host; empty if there is none."""
    if number := headers.get("x-next-page", ""):
        return str(httpx.URL(url).copy_merge_params({"page": number}))
    if link := headers.get("link"):
        response = httpx.Response(200, headers={"link": link})
        return _same_origin_url(url, response.links.get("next", {}).get("url", "") or "")
    return ""


def _following_page_url(url: str) -> str:
    """Return the URL of the page after a page."""
    address = httpx.URL(url)
    number = address.params.get("page", "1")
    return str(address.copy_merge_params({"page": str(int(number) + 1)})) if number.isdecimal() else ""


def _same_origin_url(url: str, place: str) -> str:
    """Return the absolute URL of a link or redirect; empty if it is missing, invalid, the same, or on another host."""
    try:
        there = str(httpx.URL(url).join(place))
        is_ours = _origin(there) == _origin(url)
    except (httpx.InvalidURL, ValueError):  # ValueError: an impossible host name
        return ""
    return there if is_ours and there != url else ""


def _origin(url: str) -> tuple[str, str, int | None]:
    address = httpx.URL(url)
    return address.scheme, address.host, address.port
