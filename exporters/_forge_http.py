"""What answers of a forge mean: their text, what is wrong, and when to ask again."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import anyio
import httpx

from replanning import Environment
from replanning.errors import Problem, SettingsError
from replanning.exporters._forge import ForgeError
from replanning.http import RequestFailed, RetryPolicy, create_client, read_body, retry_after_seconds, url_problem
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue

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


class IssueNaming(NamedTuple):
    """How the issues of a forge are named.

    Attributes:
        forge: its name, as people write it.
        short_pattern: matches a short name; has a group `project`.
        page_pattern: matches the path of a page, likewise.
        expected_format: what such names look like, in words.
        page_description: what has pages, in words.
        page_example: the address of one.
        variable: says where its API is.
        api_example: the address of an API.
        api_path: of an API on a server of one's own.
    """

    forge: str
    short_pattern: re.Pattern[str]
    page_pattern: re.Pattern[str]
    expected_format: str
    page_description: str
    page_example: str
    variable: str
    api_example: str
    api_path: str

    def parse(self, issue: str, url: str) -> re.Match[str]:
        """What an issue is called, taken apart.

        Args:
            issue: as somebody gave it.
            url: of the API that is asked.

        Raises:
            SettingsError: it is no issue of this API, or that is no address of one.
        """
        if problem := url_problem(url):
            raise SettingsError([Problem(self.variable, f"{problem}; expected something like {self.api_example}")])
        text = issue.strip()
        short = self.short_pattern.fullmatch(text)
        if short is not None and _is_project_path(short["project"]):
            return short
        if url_problem(text.partition("#")[0].partition("?")[0]):
            expected = f"{self.expected_format}, or the address of the page of {self.page_description}"
            raise SettingsError([Problem("issue", f"{issue!r} names no issue of {self.forge}; expected {expected}")])
        return self._parse_page(issue, text, url)

    def _parse_page(self, issue: str, text: str, url: str) -> re.Match[str]:
        page = httpx.URL(text)
        found = self.page_pattern.fullmatch(page.path)
        if found is None or not _is_project_path(found["project"]):
            problem = f"{issue!r} is no page of {self.page_description}, such as {self.page_example}"
            raise SettingsError([Problem("issue", problem)])
        if not is_api_of(url, text):
            problem = (
                f"{page.host} is not served by {httpx.URL(url).host}, and no token goes elsewhere; set {self.variable} to"
                f" its API, such as https://{page.host}{self.api_path}"
            )
            raise SettingsError([Problem("issue", problem)])
        return found


def _is_project_path(path: str) -> bool:
    """Whether a path names a project, and does not lead elsewhere."""
    return all(part.strip(".") for part in path.split("/"))


MAX_FILES: Final = 300

_MAX_FILE_NAMES: Final = 200

_TRUNCATION_NOTE: Final = "… [cut: there are more]"

_MAX_README_CHARS: Final = 4_000


async def result_or_none(asked: Awaitable[T]) -> T | None:
    """What is known of a repository; None where the forge does not give it, which is no reason to do without the rest."""
    try:
        return await asked
    except ForgeError:
        return None


async def list_or_empty(asked: Awaitable[list[JsonObject]]) -> list[JsonObject]:
    """The same for a list."""
    return await result_or_none(asked) or []


def parse_logins(names: str | Iterable[str]) -> frozenset[str]:
    """Accounts by their names, in small letters; also of a text with commas between them."""
    listed = names.split(",") if isinstance(names, str) else names
    return frozenset(name.strip().removeprefix("@").lower() for name in listed if name.strip())


def validated_token(token: str, variable: str) -> str:
    """A token as it is sent.

    Raises:
        SettingsError: no token looks like that.
    """
    token = token.strip()
    if not (token.isascii() and token.isprintable()) or " " in token:
        problem = "it has characters that no token has; was it copied whole, and nothing else?"
        raise SettingsError([Problem(variable, problem)])
    return token


def as_object(value: JsonValue) -> JsonObject:
    """An object; an empty one where it is none."""
    return value if isinstance(value, dict) else {}


def file_names(entries: JsonValue) -> list[JsonValue]:
    """The names of files; those of folders end in a slash."""
    folders = ("dir", "tree")
    found = [f"{text_at(one, 'name')}{'/' if text_at(one, 'type') in folders else ''}" for one in objects_in(entries)]
    return truncated_list(found, _MAX_FILE_NAMES)


def truncated_list(entries: Sequence[JsonValue], most: int = MAX_FILES) -> list[JsonValue]:
    """The first entries of a list, which says where it was cut."""
    return [*entries[:most], *([_TRUNCATION_NOTE] if len(entries) > most else [])]


def readme_excerpt(text: str | None) -> str:
    """The beginning of a file that introduces a project."""
    said = (text or "").strip()
    return (
        said if len(said) <= _MAX_README_CHARS else f"{said[:_MAX_README_CHARS]}… [cut: {len(said)} characters in all]"
    )


def without_empty(about: JsonObject) -> JsonObject:
    """What is known, without what is not."""
    return {name: value for name, value in about.items() if value not in ("", None, [], {})}
