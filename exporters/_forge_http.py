"""Asks the API of a forge over HTTP: one deadline a call, tries again what may pass, never writes anything twice."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeVar

import anyio
import httpx

from replanning import Environment
from replanning.exporters._forge import ForgeError
from replanning.exporters._forge_answers import (
    MAX_EXCERPT_CHARS,
    ApiEndpoint,
    ApiResponse,
    Page,
    objects_in,
    rate_limit_end,
    response_error,
)
from replanning.http import RequestFailed, RetryPolicy, create_client, read_body
from replanning.interfaces import JsonObject, JsonValue

T = TypeVar("T")

PAGE_SIZE: Final = 100
"""Entries of a page; the most that either forge gives."""

_MAX_RATE_LIMIT_WAIT: Final = 3_600.0
"""Seconds after which limits have passed at the latest, whatever time it is where the forge is."""

_MASK: Final = "[redacted]"
_REDIRECT_STATUSES: Final = (301, 302, 307, 308)
_MAX_REDIRECTS: Final = 3


class ForgeClient:
    """The API of a forge, asked by one call at a time, as forges want it.

    Args:
        endpoint: where it is.
        timeout: seconds that a call may take in total, retries included.
        environment: time and chance.
        transport: what connects, for tests; by default the network.
        redact: takes secrets out of what is shown of answers.
    """

    def __init__(
        self,
        access: ApiEndpoint,
        *,
        timeout: float = 30.0,
        environment: Environment | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        redact: Callable[[str], str] | None = None,
    ) -> None:
        self.endpoint = access
        self.timeout = timeout
        self.environment = environment or Environment()
        self.rate_limited_until = 0.0
        self.page_cache: dict[str, Page] = {}
        self._transport = transport
        self._redact = redact
        self._client: httpx.AsyncClient | None = None
        self._lock = anyio.Lock()

    def __repr__(self) -> str:
        return repr(self.endpoint)

    async def run(self, work: Callable[[ForgeSession], Awaitable[T]]) -> T:
        """What comes of requests that belong together, before their one deadline.

        Raises:
            ForgeError: there is no answer, or it is a refusal.
        """
        clock = self.environment.clock
        deadline = clock.now() + self.timeout
        results: list[T] = []
        failure: Exception | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(self._cancel_at, deadline, group.cancel_scope)
            try:
                async with self._lock:
                    results.append(await work(ForgeSession(self, await self._get_client(), deadline)))
            except Exception as error:  # noqa: BLE001 - raised below: the group would wrap it
                failure = error
            group.cancel_scope.cancel()
        if results:
            return results[0]
        if failure is not None:
            raise failure
        raise ForgeError(f"{self.endpoint.name}: no answer came within {self.timeout:g} s")

    async def aclose(self) -> None:
        """Close the connections; they are made anew when it is asked again, also by another event loop."""
        client, self._client, self._lock = self._client, None, anyio.Lock()
        if client is not None:
            await client.aclose()

    def excerpt(self, text: str) -> str:
        """The beginning of a text, without secrets."""
        text = text[: 4 * MAX_EXCERPT_CHARS]
        if self.endpoint.token:
            text = text.replace(self.endpoint.token, _MASK)
        return (self._redact(text) if self._redact is not None else text)[:MAX_EXCERPT_CHARS]

    def redact_token(self, text: str) -> str:
        """A text that is written where everybody can read it."""
        return text.replace(self.endpoint.token, _MASK) if self.endpoint.token else text

    async def _cancel_at(self, deadline: float, scope: anyio.CancelScope) -> None:
        clock = self.environment.clock
        await clock.sleep(max(0.0, deadline - clock.now()))
        scope.cancel()

    async def _get_client(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = await create_client(self._transport, self.endpoint.headers)
        return self._client


class ForgeSession:
    """Requests that belong together.

    Args:
        api: who is asked.
        client: the connections.
        deadline: by which an answer is of use.
    """

    def __init__(self, api: ForgeClient, client: httpx.AsyncClient, deadline: float) -> None:
        self._api, self._client, self._deadline = api, client, deadline

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> JsonValue:
        """What stands at a path.

        Raises:
            ForgeError: it cannot be had.
        """
        url = str(httpx.URL(self._api.endpoint.url + path, params=params))
        return _parse_json(await self._with_retries(lambda: self._send("GET", url)), self._api)

    async def get_text(self, path: str, accept: str = "*/*") -> str:
        """The text that stands at a path.

        Raises:
            ForgeError: it cannot be had.
        """
        url = self._api.endpoint.url + path
        answer = await self._with_retries(lambda: self._send("GET", url, headers={"accept": accept}))
        data: bytes = answer.data
        return data.decode(errors="replace")

    async def list_entries(self, path: str, params: Mapping[str, str] | None = None, *, limit: int) -> list[JsonObject]:
        """A list of several pages; those that have not changed since they were last read cost nothing.

        Args:
            path: where it stands.
            params: how it is wanted.
            most: how many entries are read at most; what comes after them is left out.

        Raises:
            ForgeError: it cannot be had.
        """
        found: list[JsonObject] = []
        url = self.first_page_url(path, params)
        while url and len(found) < limit:
            page = await self.get_page(url)
            found += page.entries
            url = page.next_url
        return found[:limit]

    def first_page_url(self, path: str, params: Mapping[str, str] | None = None) -> str:
        """The address of the first page of a list."""
        return str(httpx.URL(self._api.endpoint.url + path, params={**(params or {}), "per_page": str(PAGE_SIZE)}))

    async def get_page(self, url: str, *, once: bool = False) -> Page:
        """One page, as it is kept where it has not changed.

        Raises:
            ForgeError: it cannot be had.
            FailedTry: likewise, where it may be had later, and only one try was wanted.
        """
        kept = self._api.page_cache.get(url)
        headers = {"if-none-match": kept.etag} if kept is not None and kept.etag else {}

        async def ask() -> ApiResponse:
            return await self._send("GET", url, headers=headers)

        answer = await (ask() if once else self._with_retries(ask))
        if answer.status == 304 and kept is not None:
            # A page that has become full does not change when another begins: then only asking tells.
            page = (
                kept
                if kept.next_url or len(kept.entries) < PAGE_SIZE
                else kept._replace(next_url=_following_page_url(url))
            )
        else:
            said = _parse_json(answer, self._api)
            page = Page(objects_in(said), self._next_page_url(url, answer.headers), answer.headers.get("etag", ""))
        self._api.page_cache[url] = page
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
        """Write something.

        Args:
            method: PATCH and PUT may be repeated; POST may not.
            path: where.
            body: what.
            done: finds what was written where it is not known whether it was; None where writing twice does no harm.
            unsure: whether it may have been written before.

        Raises:
            ForgeError: it was not written, or nobody knows whether it was.
        """
        access = self._api.endpoint
        if not access.token:
            problem = f"to write there, {access.token_variable} must be set to a token that may"
            raise ForgeError(f"{access.name}: {problem}", final=True)

        async def ask() -> ApiResponse | JsonObject:
            nonlocal maybe_written
            if maybe_written and find_existing is not None and (found := await find_existing()) is not None:
                return found
            try:
                return await self._send(method, access.url + path, body=body)
            except RequestFailed as failed:
                maybe_written = maybe_written or failed.maybe_executed
                raise

        answer = await self._with_retries(ask)
        if isinstance(answer, dict):
            return answer
        said = _parse_json(answer, self._api)
        return said if isinstance(said, dict) else {}

    def _next_page_url(self, url: str, headers: Mapping[str, str]) -> str:
        """The address of the page after this one, which must be of the same forge; empty where there is none."""
        if number := headers.get("x-next-page", ""):
            return str(httpx.URL(url).copy_merge_params({"page": number}))
        if link := headers.get("link"):
            response = httpx.Response(200, headers={"link": link})
            return _same_origin_url(url, response.links.get("next", {}).get("url", "") or "")
        return ""

    # One request

    async def _with_retries(self, once: Callable[[], Awaitable[T]]) -> T:
        """What one try comes to; those that fail are followed by others, as long as there is time."""
        return await RetryPolicy(self._api.environment, self._deadline, self._retry_error).call(once)

    def _retry_error(self, failed: RequestFailed, why: str) -> ForgeError:
        return ForgeError(
            f"{self._api.endpoint.name}: {failed.message}; {why}",
            status=failed.status,
            retry_after=failed.retry_after or None,
            request_id=failed.request_id,
            excerpt=failed.excerpt,
        )

    async def _send(
        self, method: str, url: str, *, body: JsonObject | None = None, headers: Mapping[str, str] | None = None
    ) -> ApiResponse:
        now = self._api.environment.clock.now()
        if self._api.rate_limited_until > now:
            raise RequestFailed(
                "it was asked as often as it lets itself be asked",
                retry_after=self._api.rate_limited_until - now,
                status=429,
            )
        hops = 0
        answer = await self._send_once(method, url, body, headers or {})
        while answer.status in _REDIRECT_STATUSES and hops < _MAX_REDIRECTS:
            there = _same_origin_url(url, answer.headers.get("location", ""))
            if not there:  # the token stays with whom it was meant for
                break
            url, hops = there, hops + 1
            answer = await self._send_once(method, url, body, headers or {})
        self._update_rate_limit(answer)
        if answer.status == 304 or 200 <= answer.status < 300:
            return answer
        raise response_error(answer, self._api.endpoint, self._api.excerpt, self._api.rate_limited_until - now)

    async def _send_once(
        self, method: str, url: str, body: JsonObject | None, headers: Mapping[str, str]
    ) -> ApiResponse:
        try:
            async with self._client.stream(method, url, json=body, headers=dict(headers)) as response:
                data, problem = await read_body(response)
        except (httpx.RequestError, UnicodeError) as error:  # the latter where it sends us to what is no host
            excerpt = self._api.excerpt(f"{type(error).__name__}: {error}".rstrip(": "))
            unsure = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
            what = "the connection was lost" if unsure else "it cannot be reached"
            raise RequestFailed(f"{httpx.URL(url).host}: {what}", excerpt=excerpt, maybe_executed=unsure) from error
        if problem:
            raise ForgeError(f"{self._api.endpoint.name}: {problem}", status=response.status_code)
        return ApiResponse(response.status_code, response.headers, data)

    def _update_rate_limit(self, answer: ApiResponse) -> None:
        """Ask no more where the forge has said that it was asked often enough."""
        now = self._api.environment.clock.now()
        until = min(rate_limit_end(answer, now), now + _MAX_RATE_LIMIT_WAIT)
        self._api.rate_limited_until = max(self._api.rate_limited_until, until)


def _parse_json(answer: ApiResponse, api: ForgeClient) -> JsonValue:
    try:
        said: JsonValue = json.loads(answer.data)
    except (ValueError, RecursionError):
        excerpt = api.excerpt(answer.data[: 4 * MAX_EXCERPT_CHARS].decode(errors="replace"))
        problem = f"{api.endpoint.name}: its answer is no JSON; is {api.endpoint.url} the address of its API?"
        raise ForgeError(problem, status=answer.status, final=True, excerpt=excerpt) from None
    return said


def _following_page_url(url: str) -> str:
    """The address of the page after a page."""
    address = httpx.URL(url)
    number = address.params.get("page", "1")
    return str(address.copy_merge_params({"page": str(int(number) + 1)})) if number.isdecimal() else ""


def _same_origin_url(url: str, place: str) -> str:
    """The address of a place, as an answer names it; empty where it names none, the same, or one of somebody else."""
    try:
        there = str(httpx.URL(url).join(place))
        is_ours = _origin(there) == _origin(url)
    except (httpx.InvalidURL, ValueError):  # the latter for names of hosts that there cannot be
        return ""
    return there if is_ours and there != url else ""


def _origin(url: str) -> tuple[str, str, int | None]:
    address = httpx.URL(url)
    return address.scheme, address.host, address.port
