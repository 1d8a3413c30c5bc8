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
    EXCERPT,
    Access,
    Answer,
    Page,
    objects,
    quiet_until,
    refusal,
)
from replanning.http import FailedTry, Tries, connections, content
from replanning.interfaces import JsonObject, JsonValue

Result = TypeVar("Result")

PER_PAGE: Final = 100
"""Entries of a page; the most that either forge gives."""

_LONGEST_QUIET: Final = 3_600.0
"""Seconds after which limits have passed at the latest, whatever time it is where the forge is."""

_MASK: Final = "[redacted]"
_MOVED: Final = (301, 302, 307, 308)
_HOPS: Final = 3


class Api:
    """The API of a forge, asked by one call at a time, as forges want it.

    Args:
        access: where it is.
        timeout: seconds that a call may take in total, retries included.
        environment: time and chance.
        transport: what connects, for tests; by default the network.
        redact: takes secrets out of what is shown of answers.
    """

    def __init__(
        self,
        access: Access,
        *,
        timeout: float = 30.0,
        environment: Environment | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        redact: Callable[[str], str] | None = None,
    ) -> None:
        self.access = access
        self.timeout = timeout
        self.environment = environment or Environment()
        self.quiet_until = 0.0
        self.pages: dict[str, Page] = {}
        self._transport = transport
        self._redact = redact
        self._client: httpx.AsyncClient | None = None
        self._turn = anyio.Lock()

    def __repr__(self) -> str:
        return repr(self.access)

    async def call(self, work: Callable[[Call], Awaitable[Result]]) -> Result:
        """What comes of requests that belong together, before their one deadline.

        Raises:
            ForgeError: there is no answer, or it is a refusal.
        """
        clock = self.environment.clock
        deadline = clock.now() + self.timeout
        results: list[Result] = []
        failure: Exception | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(self._expire, deadline, group.cancel_scope)
            try:
                async with self._turn:
                    results.append(await work(Call(self, await self._connections(), deadline)))
            except Exception as error:  # noqa: BLE001 - raised below: the group would wrap it
                failure = error
            group.cancel_scope.cancel()
        if results:
            return results[0]
        if failure is not None:
            raise failure
        raise ForgeError(f"{self.access.name}: no answer came within {self.timeout:g} s")

    async def aclose(self) -> None:
        """Close the connections; they are made anew when it is asked again, also by another event loop."""
        client, self._client, self._turn = self._client, None, anyio.Lock()
        if client is not None:
            await client.aclose()

    def excerpt(self, text: str) -> str:
        """The beginning of a text, without secrets."""
        text = text[: 4 * EXCERPT]
        if self.access.token:
            text = text.replace(self.access.token, _MASK)
        return (self._redact(text) if self._redact is not None else text)[:EXCERPT]

    def without_token(self, text: str) -> str:
        """A text that is written where everybody can read it."""
        return text.replace(self.access.token, _MASK) if self.access.token else text

    async def _expire(self, deadline: float, scope: anyio.CancelScope) -> None:
        clock = self.environment.clock
        await clock.sleep(max(0.0, deadline - clock.now()))
        scope.cancel()

    async def _connections(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = await connections(self._transport, self.access.headers)
        return self._client


class Call:
    """Requests that belong together.

    Args:
        api: who is asked.
        client: the connections.
        deadline: by which an answer is of use.
    """

    def __init__(self, api: Api, client: httpx.AsyncClient, deadline: float) -> None:
        self._api, self._client, self._deadline = api, client, deadline

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> JsonValue:
        """What stands at a path.

        Raises:
            ForgeError: it cannot be had.
        """
        url = str(httpx.URL(self._api.access.url + path, params=params))
        return _json(await self._repeated(lambda: self._send("GET", url)), self._api)

    async def text(self, path: str, accept: str = "*/*") -> str:
        """The text that stands at a path.

        Raises:
            ForgeError: it cannot be had.
        """
        url = self._api.access.url + path
        answer = await self._repeated(lambda: self._send("GET", url, headers={"accept": accept}))
        data: bytes = answer.data
        return data.decode(errors="replace")

    async def entries(self, path: str, params: Mapping[str, str] | None = None, *, most: int) -> list[JsonObject]:
        """A list of several pages; those that have not changed since they were last read cost nothing.

        Args:
            path: where it stands.
            params: how it is wanted.
            most: how many entries are read at most; what comes after them is left out.

        Raises:
            ForgeError: it cannot be had.
        """
        found: list[JsonObject] = []
        url = self.first(path, params)
        while url and len(found) < most:
            page = await self.page(url)
            found += page.entries
            url = page.next
        return found[:most]

    def first(self, path: str, params: Mapping[str, str] | None = None) -> str:
        """The address of the first page of a list."""
        return str(httpx.URL(self._api.access.url + path, params={**(params or {}), "per_page": str(PER_PAGE)}))

    async def page(self, url: str, *, once: bool = False) -> Page:
        """One page, as it is kept where it has not changed.

        Raises:
            ForgeError: it cannot be had.
            FailedTry: likewise, where it may be had later, and only one try was wanted.
        """
        kept = self._api.pages.get(url)
        headers = {"if-none-match": kept.etag} if kept is not None and kept.etag else {}

        async def ask() -> Answer:
            return await self._send("GET", url, headers=headers)

        answer = await (ask() if once else self._repeated(ask))
        if answer.status == 304 and kept is not None:
            # A page that has become full does not change when another begins: then only asking tells.
            page = kept if kept.next or len(kept.entries) < PER_PAGE else kept._replace(next=_following(url))
        else:
            said = _json(answer, self._api)
            page = Page(objects(said), self._next(url, answer.headers), answer.headers.get("etag", ""))
        self._api.pages[url] = page
        return page

    async def write(
        self,
        method: str,
        path: str,
        body: JsonObject,
        *,
        done: Callable[[], Awaitable[JsonObject | None]] | None = None,
        unsure: bool = False,
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
        access = self._api.access
        if not access.token:
            problem = f"to write there, {access.token_variable} must be set to a token that may"
            raise ForgeError(f"{access.name}: {problem}", final=True)

        async def ask() -> Answer | JsonObject:
            nonlocal unsure
            if unsure and done is not None and (found := await done()) is not None:
                return found
            try:
                return await self._send(method, access.url + path, body=body)
            except FailedTry as failed:
                unsure = unsure or failed.unsure
                raise

        answer = await self._repeated(ask)
        if isinstance(answer, dict):
            return answer
        said = _json(answer, self._api)
        return said if isinstance(said, dict) else {}

    def _next(self, url: str, headers: Mapping[str, str]) -> str:
        """The address of the page after this one, which must be of the same forge; empty where there is none."""
        if number := headers.get("x-next-page", ""):
            return str(httpx.URL(url).copy_merge_params({"page": number}))
        if link := headers.get("link"):
            response = httpx.Response(200, headers={"link": link})
            return _joined(url, response.links.get("next", {}).get("url", "") or "")
        return ""

    # One request

    async def _repeated(self, once: Callable[[], Awaitable[Result]]) -> Result:
        """What one try comes to; those that fail are followed by others, as long as there is time."""
        return await Tries(self._api.environment, self._deadline, self._given_up).made_by(once)

    def _given_up(self, failed: FailedTry, why: str) -> ForgeError:
        return ForgeError(
            f"{self._api.access.name}: {failed.what}; {why}",
            status=failed.status,
            retry_after=failed.after or None,
            request_id=failed.request_id,
            excerpt=failed.excerpt,
        )

    async def _send(
        self, method: str, url: str, *, body: JsonObject | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        now = self._api.environment.clock.now()
        if self._api.quiet_until > now:
            raise FailedTry(
                "it was asked as often as it lets itself be asked", after=self._api.quiet_until - now, status=429
            )
        hops = 0
        answer = await self._once(method, url, body, headers or {})
        while answer.status in _MOVED and hops < _HOPS:
            there = _joined(url, answer.headers.get("location", ""))
            if not there:  # the token stays with whom it was meant for
                break
            url, hops = there, hops + 1
            answer = await self._once(method, url, body, headers or {})
        self._learn(answer)
        if answer.status == 304 or 200 <= answer.status < 300:
            return answer
        raise refusal(answer, self._api.access, self._api.excerpt, self._api.quiet_until - now)

    async def _once(self, method: str, url: str, body: JsonObject | None, headers: Mapping[str, str]) -> Answer:
        try:
            async with self._client.stream(method, url, json=body, headers=dict(headers)) as response:
                data, problem = await content(response)
        except (httpx.RequestError, UnicodeError) as error:  # the latter where it sends us to what is no host
            excerpt = self._api.excerpt(f"{type(error).__name__}: {error}".rstrip(": "))
            unsure = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
            what = "the connection was lost" if unsure else "it cannot be reached"
            raise FailedTry(f"{httpx.URL(url).host}: {what}", excerpt=excerpt, unsure=unsure) from error
        if problem:
            raise ForgeError(f"{self._api.access.name}: {problem}", status=response.status_code)
        return Answer(response.status_code, response.headers, data)

    def _learn(self, answer: Answer) -> None:
        """Ask no more where the forge has said that it was asked often enough."""
        now = self._api.environment.clock.now()
        until = min(quiet_until(answer, now), now + _LONGEST_QUIET)
        self._api.quiet_until = max(self._api.quiet_until, until)


def _json(answer: Answer, api: Api) -> JsonValue:
    try:
        said: JsonValue = json.loads(answer.data)
    except (ValueError, RecursionError):
        excerpt = api.excerpt(answer.data[: 4 * EXCERPT].decode(errors="replace"))
        problem = f"{api.access.name}: its answer is no JSON; is {api.access.url} the address of its API?"
        raise ForgeError(problem, status=answer.status, final=True, excerpt=excerpt) from None
    return said


def _following(url: str) -> str:
    """The address of the page after a page."""
    address = httpx.URL(url)
    number = address.params.get("page", "1")
    return str(address.copy_merge_params({"page": str(int(number) + 1)})) if number.isdecimal() else ""


def _joined(url: str, place: str) -> str:
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
