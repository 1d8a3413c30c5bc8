"""One issue of a forge: its request, its comments, and comments that are written exactly once, over its HTTP API."""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

import anyio
import httpx

from replanning import Environment, Goal
from replanning.environment import move_on_after
from replanning.errors import SettingsError
from replanning.exporters._forge import (
    AUTHORSHIP_MARKER,
    ForgeComment,
    ForgeError,
    parse_time,
    strip_authorship,
)
from replanning.http import (
    RequestFailed,
    call_with_retries,
    create_client,
    error_message,
    is_valid_token,
    read_body,
    retry_after_seconds,
    same_origin_url,
    url_problem,
)
from replanning.llm.quoting import truncate_text
from replanning.plan import JsonObject
from replanning.plan.json_values import as_object
from replanning.plan.types import JsonValue
from replanning.planning import IssueComment, TaskRequest

T = TypeVar("T")

MAX_COMMENTS: Final = 5_000
"""Comments of an issue that are read; GitLab allows no more, and GitHub half as many."""

MAX_EXCERPT_CHARS: Final = 300
"""Characters of a response in error messages."""

PAGE_SIZE: Final = 100
"""Entries of a page; the maximum of both forges."""

MAX_FILES: Final = 300

_MAX_FILE_NAMES: Final = 200

_MAX_README_CHARS: Final = 4_000

_MAX_REDIRECTS: Final = 3

_REDIRECT_STATUSES: Final = (301, 302, 307, 308)

_DEFAULT_RATE_LIMIT_WAIT: Final = 60.0
"""Seconds to wait after a rate limit that names no time."""

_MAX_RATE_LIMIT_WAIT: Final = 3_600.0
"""Longest wait for a rate limit in seconds, in case the clocks differ."""

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


_SLASH_COMMAND: Final = re.compile(r"^([^\S\n]*)/", re.MULTILINE)

_ESCAPED_COMMAND: Final = re.compile(r"^([^\S\n]*)&#47;", re.MULTILINE)

_CONTROL_CHARS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class ForgeIssue(ABC):
    """One issue of a forge: its request, its comments, and the comments that this tool writes.

    Public issues can be read without a token; writing needs one.

    Args:
        issue: its short name, or the URL of its page.
        token: access token; by default from the forge's environment variable.
        base_url: URL of the API; by default from the environment, or that of the public forge.
        trusted: logins of further people who may steer; by default from the environment, separated
            by commas.
        timeout: seconds for a call, retries included.
        environment: source of time and randomness.
        transport: HTTP transport, for tests; by default the network.
        environ: environment variables; by default those of this process.

    Attributes:
        name: name of the forge.
        id: id of the issue, accepted as `issue`.
        command: the character that commands in comments begin with.
        example: short name of an issue, for messages.

    Raises:
        SettingsError: it is not an issue of this API, or the URL or the token is invalid.
    """

    name: str
    command: ClassVar[str]
    default_url: ClassVar[str]
    _title: ClassVar[str]
    """Name of the forge, for people."""
    _short_pattern: ClassVar[re.Pattern[str]]
    """Pattern of a short name, with the groups `project` and `number`."""
    _page_pattern: ClassVar[re.Pattern[str]]
    """Pattern of the path of an issue's page, with the same groups."""
    example: ClassVar[str]
    _page_kinds: ClassVar[str]
    """The kinds of pages, for people."""
    _page_example: ClassVar[str]
    _api_path: ClassVar[str]
    """Path of the API on self-hosted servers."""
    _token_variable: ClassVar[str]
    _trusted_variable: ClassVar[str]
    _url_variables: ClassVar[tuple[str, ...]]
    _author_path: ClassVar[tuple[str, str]]
    """Path of the author's login in a comment."""
    _text_field: ClassVar[str]
    """Field with the text of an issue."""
    _readme_type: ClassVar[str] = "*/*"
    """Media type of the text of a README."""
    _has_slash_commands: ClassVar[bool] = False
    """True if the forge interprets lines that begin with a slash as commands."""
    _path: str
    """Path of the issue in the API."""
    _comments_path: str
    _project_path: str
    _files_path: str
    """Path of the list of the project's files."""

    def __init__(
        self,
        issue: str,
        *,
        token: str | None = None,
        base_url: str | None = None,
        trusted: Collection[str] | None = None,
        timeout: float = 30.0,
        environment: Environment | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        variables = os.environ if environ is None else environ
        urls = (base_url, *map(variables.get, self._url_variables), self.default_url)
        self._url = self._api_url(next(url for url in urls if url).strip().rstrip("/"))
        variable = self._url_variables[0]
        if problem := url_problem(self._url):
            raise SettingsError.at(
                variable, f"{problem}; expected something like {self.default_url}"
            )
        text = issue.strip()
        match = self._short_pattern.fullmatch(text)
        if match is None or not _is_project_path(match["project"]):
            if url_problem(text.partition("#")[0].partition("?")[0]):
                expected = f"{self.example}, or the URL of the page of {self._page_kinds}"
                problem = f"{issue!r} is not an issue of {self._title}; expected {expected}"
                raise SettingsError.at("issue", problem)
            page = httpx.URL(text)
            match = self._page_pattern.fullmatch(page.path)
            if match is None or not _is_project_path(match["project"]):
                problem = (
                    f"{issue!r} is not the page of {self._page_kinds}, such as {self._page_example}"
                )
                raise SettingsError.at("issue", problem)
            api_host = httpx.URL(self._url).host
            if api_host not in (
                page.host,
                f"api.{page.host}",
            ):  # the token is sent to no other host
                problem = f"{page.host} is not served by the API at {api_host}; set {variable} to the URL of its API"
                raise SettingsError.at(
                    "issue", f"{problem}, such as https://{page.host}{self._api_path}"
                )
        self.id = self._locate(match)
        self._label = f"{self.name} {self.id.removeprefix('gitlab:')}"
        self._token = (variables.get(self._token_variable, "") if token is None else token).strip()
        if not is_valid_token(self._token):
            problem = (
                "the token has characters that are not allowed in tokens; copy exactly the token"
            )
            raise SettingsError.at(self._token_variable, problem)
        logins = (
            variables.get(self._trusted_variable, "").split(",") if trusted is None else trusted
        )
        logins = logins.split(",") if isinstance(logins, str) else logins
        self._trusted = {
            login.strip().removeprefix("@").lower() for login in logins if login.strip()
        }
        self._timeout = timeout
        self._environment = environment or Environment()
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._lock = anyio.Lock()  # forges require one call at a time
        self._deadline = 0.0
        self._rate_limited_until = 0.0
        self._page_cache: dict[str, Page] = {}
        self._own_login: str | None = None  # None until it was asked for, empty if unknown

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} at {self._url} {'with' if self._token else 'without'} a token>"

    @classmethod
    def _api_url(cls, given: str) -> str:
        """Return the base URL of the API for the URL that the user gives."""
        return given

    @abstractmethod
    def _locate(self, match: re.Match[str]) -> str:
        """Set the paths of an issue, its comments and its project, and return its id."""

    @abstractmethod
    def _headers(self) -> dict[str, str]:
        """Return the headers of requests, with the token."""

    @abstractmethod
    async def _is_member(self, comment: ForgeComment) -> bool:
        """Return whether the author of a comment is a member of the project."""

    @abstractmethod
    def _is_bot(self, entry: JsonObject, author: str) -> bool:
        """Return whether a program wrote a comment."""

    @abstractmethod
    async def _fetch_comments(self) -> list[ForgeComment]:
        """Return the comments, oldest first."""

    @abstractmethod
    def _readme_path(self, project: JsonObject) -> str:
        """Return the path of the text of a project's README."""

    @abstractmethod
    async def _change_info(self, entry: JsonObject) -> JsonObject:
        """Return the branches and files that a pull or merge request changes; empty for an issue."""

    @abstractmethod
    def _edit_request(self, comment_id: str) -> tuple[str, str]:
        """Return the method and the path for editing a comment."""

    async def _fetch_app_login(self) -> str:
        """Return the login for a token that does not belong to a user."""
        return ""

    # Reading

    async def issue(self) -> TaskRequest:
        """Return the request: the issue, its comments and data about its repository, all bounded in size.

        Raises:
            ForgeError: the issue cannot be read; other data is left out if it cannot be read.
        """
        async with self._call():
            entry = await self._fetch_issue()
            comments = [comment for comment in await self._fetch_comments() if not comment.notice]
            title = _CONTROL_CHARS.sub(" ", text_at(entry, "title"))
            return TaskRequest(
                goal=Goal(objective=f"Resolve {self.id.removeprefix('gitlab:')}: {title}"),
                issue_id=self.id,
                title=title,
                text=text_at(entry, self._text_field),
                comments=tuple(
                    IssueComment(author=c.author, text=c.body, at=c.at) for c in comments
                ),
                repository=await self._repository_info(entry),
            ).truncated()

    async def comments(self) -> Sequence[ForgeComment]:
        """Return all comments, oldest first; cheap when nothing has changed.

        Raises:
            ForgeError: the comments cannot be read.
        """
        async with self._call():
            return await self._fetch_comments()

    async def may_steer(self, comment: ForgeComment) -> bool:
        """Return whether the author of a comment may steer the run: a member of the project, and not a program.

        Raises:
            ForgeError: the author's role cannot be read.
        """
        if comment.bot or comment.notice:
            return False
        return (
            comment.own or comment.author.lower() in self._trusted or await self._is_member(comment)
        )

    async def _fetch_issue(self) -> JsonObject:
        return as_object(await self._get(self._path))

    async def _repository_info(self, entry: JsonObject) -> JsonObject:
        """Return data about the project and the issue, as far as it can be read."""
        project = as_object(await result_or_none(self._get(self._project_path)))
        labels = entry.get("labels")
        files = await result_or_none(self._list_entries(self._files_path, limit=MAX_FILES)) or []
        names: list[JsonValue] = [
            f"{text_at(file, 'name')}{'/' if text_at(file, 'type') in ('dir', 'tree') else ''}"
            for file in files
        ]
        readme = ""
        accepted = {"accept": self._readme_type}
        url = self._url + self._readme_path(project)
        if answer := await result_or_none(
            self._with_retries(partial(self._send, "GET", url, headers=accepted))
        ):
            readme = truncate_text(answer.data.decode(errors="replace").strip(), _MAX_README_CHARS)
        info: JsonObject = {
            "forge": self.name,
            "url": text_at(entry, "html_url") or text_at(entry, "web_url"),
            "name": re.split("[#!]", self.id.removeprefix("gitlab:"))[0],
            "state": text_at(entry, "state"),
            "author": text_at(entry, *self._author_path),
            "labels": [text_at(label, "name") or str(label) for label in labels]
            if isinstance(labels, list)
            else [],
            **{
                field: project.get(field)
                for field in ("description", "default_branch", "language", "topics")
            },
            "files": truncated_list(names, _MAX_FILE_NAMES),
            "readme": readme,
            **await self._change_info(entry),
        }
        return {name: value for name, value in info.items() if value not in ("", None, [], {})}

    async def _login(self) -> str:
        """Return the login of the token's owner; empty if unknown."""
        if self._own_login is None:
            try:
                self._own_login = (
                    text_at(await self._get("/user"), self._author_path[-1]) if self._token else ""
                )
            except ForgeError as error:
                if not error.final or error.status == 401:
                    raise
                self._own_login = await self._fetch_app_login()
        return self._own_login

    def _parse_comment(
        self, entry: JsonObject, login: str, *, kind: str = "", where: str = ""
    ) -> ForgeComment:
        """Return a comment of the forge.

        Args:
            entry: its JSON object.
            login: login of the token's owner.
            kind: prefix of its id, if the forge numbers several kinds of comments separately.
            where: prefix of its text.
        """
        author = text_at(entry, *self._author_path)
        text = text_at(entry, "body").replace("\r\n", "\n")
        text = _ESCAPED_COMMAND.sub(r"\1/", text) if self._has_slash_commands else text
        body, marked = strip_authorship(text)
        own = bool(login) and author == login
        return ForgeComment(
            id=f"{kind}{text_at(entry, 'id')}",
            author=author or "somebody",
            body=f"{where}{body}",
            at=parse_time(text_at(entry, "created_at") or text_at(entry, "submitted_at")),
            own=own,
            notice=marked and (own or not login),
            bot=self._is_bot(entry, author) or (marked and not own),
            role=text_at(entry, "author_association"),
        )

    # Writing

    def write_error(self) -> str:
        """Return the reason why nothing can be written, without a request; empty if it can."""
        return (
            "" if self._token else f"writing to {self.id} needs a token: set {self._token_variable}"
        )

    async def post(self, body: str) -> str:
        """Write a new comment and return its id.

        A request that may have had its effect is not repeated: the caller reads the comments before
            it posts again.

        Raises:
            ForgeError: the comment was not written, or its effect is unknown.
        """
        async with self._call():
            await self._login()
            entry = await self._write("POST", self._comments_path, {"body": self._prepared(body)})
            self._own_login = self._own_login or text_at(entry, *self._author_path)
            return text_at(entry, "id")

    async def edit(self, comment_id: str, body: str) -> None:
        """Replace the text of a comment.

        Raises:
            ForgeError: the comment was not changed.
        """
        async with self._call():
            await self._write(*self._edit_request(comment_id), {"body": self._prepared(body)})

    async def aclose(self) -> None:
        """Close the connections; the next call opens new ones, also in another event loop."""
        client, self._client, self._lock = self._client, None, anyio.Lock()
        if client is not None:
            await client.aclose()

    def _prepared(self, body: str) -> str:
        """Return a text to publish: without the token and without commands to the forge, marked as our own."""
        text = self._redact_token(body)
        return (
            _SLASH_COMMAND.sub(r"\1&#47;", text) if self._has_slash_commands else text
        ) + AUTHORSHIP_MARKER

    # Requests

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        """Let the requests of a block share one deadline, and other calls wait for its end.

        Raises:
            ForgeError: the time is up.
        """
        clock = self._environment.clock
        deadline = clock.now() + self._timeout
        failure: Exception | None = None
        is_done = False
        async with move_on_after(self._timeout, clock):
            try:
                async with self._lock:
                    if self._client is None:
                        self._client = await create_client(self._transport, self._headers())
                    self._deadline = deadline
                    yield
                    is_done = True
            except Exception as error:  # noqa: BLE001 - raised below: the group would wrap it
                failure = error
        if failure is not None:
            raise failure
        if not is_done:
            raise ForgeError(f"{self._label}: no response within {self._timeout:g} s")

    def _redact_token(self, text: str) -> str:
        return text.replace(self._token, "[redacted]") if self._token else text

    async def _get(self, path: str) -> JsonValue:
        """Return the JSON value at a path."""
        return self._parse_json(
            await self._with_retries(partial(self._send, "GET", self._url + path))
        )

    async def _list_entries(
        self, path: str, params: Mapping[str, str] | None = None, *, limit: int = MAX_COMMENTS
    ) -> list[JsonObject]:
        """Return the entries of a list of several pages; unchanged pages come from the cache.

        Args:
            path: path of the list.
            params: query parameters.
            limit: most entries to return.

        Raises:
            ForgeError: a request fails.
        """
        entries: list[JsonObject] = []
        query = {**(params or {}), "per_page": str(PAGE_SIZE)}
        url = str(httpx.URL(self._url + path, params=query))
        while url and len(entries) < limit:
            page = await self._get_page(url)
            entries += page.entries
            url = page.next_url
        return entries[:limit]

    async def _get_page(self, url: str) -> Page:
        """Return one page, from the cache if it has not changed.

        Raises:
            ForgeError: the request fails.
        """
        kept = self._page_cache.get(url)
        headers = {"if-none-match": kept.etag} if kept is not None and kept.etag else {}
        answer = await self._with_retries(partial(self._send, "GET", url, headers=headers))
        if answer.status == 304 and kept is not None:
            # A page that was the last stays unchanged when it fills up and a next one begins.
            page = kept
            number = httpx.URL(url).params.get("page", "1")
            if not kept.next_url and len(kept.entries) >= PAGE_SIZE and number.isdecimal():
                page = kept._replace(
                    next_url=str(httpx.URL(url).copy_merge_params({"page": str(int(number) + 1)}))
                )
        else:
            entries = self._parse_json(answer)
            objects = (
                [entry for entry in entries if isinstance(entry, dict)]
                if isinstance(entries, list)
                else []
            )
            page = Page(
                objects, _next_page_url(url, answer.headers), answer.headers.get("etag", "")
            )
        self._page_cache[url] = page
        return page

    async def _write(self, method: str, path: str, body: JsonObject) -> JsonObject:
        """Send a request that writes, and return the JSON object in its response.

        Args:
            method: HTTP method; PATCH and PUT may be repeated, POST may not.
            path: path of the resource.
            body: JSON body.

        Raises:
            ForgeError: the request failed, or its effect is unknown.
        """
        if not self._token:
            raise ForgeError(
                f"{self._label}: writing needs a token: set {self._token_variable}", final=True
            )

        async def ask() -> ApiResponse:
            try:
                return await self._send(method, self._url + path, body=body)
            except RequestFailed as failed:
                if method == "POST" and failed.maybe_executed:
                    raise self._error(failed, "it may have had its effect all the same") from failed
                raise

        return as_object(self._parse_json(await self._with_retries(ask)))

    async def _with_retries(self, once: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of a request; repeat it after temporary failures until the deadline."""
        return await call_with_retries(once, self._environment, self._deadline, self._error)

    def _error(self, failed: RequestFailed, why: str) -> ForgeError:
        return ForgeError(
            f"{self._label}: {failed.message}; {why}",
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
        clock = self._environment.clock
        now = clock.now()
        if self._rate_limited_until > now:
            raise RequestFailed(
                "rate limit reached", retry_after=self._rate_limited_until - now, status=429
            )
        assert self._client is not None  # `_call` opens it
        redirects = 0
        while True:
            try:
                async with self._client.stream(
                    method, url, json=body, headers=dict(headers or {})
                ) as response:
                    data, problem, _ = await read_body(response)
            except (
                httpx.RequestError,
                UnicodeError,
            ) as error:  # UnicodeError: a redirect to an invalid host
                excerpt = self._excerpt(f"{type(error).__name__}: {error}".rstrip(": "))
                unsure = not isinstance(
                    error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout
                )
                what = "the connection was lost" if unsure else "cannot connect"
                raise RequestFailed(
                    f"{httpx.URL(url).host}: {what}", excerpt=excerpt, maybe_executed=unsure
                ) from error
            if problem:
                raise ForgeError(f"{self._label}: {problem}", status=response.status_code)
            answer = ApiResponse(response.status_code, response.headers, data)
            is_redirect = answer.status in _REDIRECT_STATUSES
            target = same_origin_url(url, answer.headers.get("location", "")) if is_redirect else ""
            if not target or redirects == _MAX_REDIRECTS:  # the token is not sent to another host
                break
            url = target
            redirects = redirects + 1
        limit_end = min(_rate_limit_end(answer, clock.now()), clock.now() + _MAX_RATE_LIMIT_WAIT)
        self._rate_limited_until = max(self._rate_limited_until, limit_end)
        if answer.status == 304 or 200 <= answer.status < 300:
            return answer
        status = answer.status
        headers = answer.headers
        request_id = self._excerpt(
            headers.get("x-github-request-id") or headers.get("x-request-id") or ""
        )
        limited = _is_rate_limited(answer)
        message = self._excerpt(error_message(answer.data))
        reason = _STATUS_REASONS.get(429 if limited else status, "the request is refused")
        if 300 <= status < 400:
            reason = "redirected to another host, where the token is not sent"
        elif status >= 500:
            reason = "server error"
        if limited or status >= 500 or status in (408, 409):
            raise RequestFailed(
                reason,
                status=status,
                request_id=request_id,
                excerpt=message,
                retry_after=max(0.0, self._rate_limited_until - now),
                maybe_executed=status >= 500 or status == 408,
            )
        if status in (401, 403, 404):
            reason += (
                f"; check {self._token_variable}"
                if self._token
                else f"; {self._token_variable} is not set"
            )
        raise ForgeError(
            f"{self._label}: {reason}",
            status=status,
            final=True,
            request_id=request_id,
            excerpt=message,
        )

    def _parse_json(self, answer: ApiResponse) -> JsonValue:
        try:
            value: JsonValue = json.loads(answer.data)
        except (ValueError, RecursionError):
            problem = f"{self._label}: the response is not JSON; is {self._url} the URL of its API?"
            excerpt = self._excerpt(answer.data[: 4 * MAX_EXCERPT_CHARS].decode(errors="replace"))
            raise ForgeError(problem, status=answer.status, final=True, excerpt=excerpt) from None
        return value

    def _excerpt(self, text: str) -> str:
        """Return the beginning of a text, without the token."""
        return self._redact_token(text[: 4 * MAX_EXCERPT_CHARS])[:MAX_EXCERPT_CHARS]


def _is_project_path(path: str) -> bool:
    """Return whether a path names a project, without `.` and `..`."""
    return all(part.strip(".") for part in path.split("/"))


async def result_or_none(request: Awaitable[T]) -> T | None:
    """Return the result of a request for optional data; None if it fails."""
    try:
        return await request
    except ForgeError:
        return None


def truncated_list(entries: Sequence[JsonValue], most: int = MAX_FILES) -> list[JsonValue]:
    """Return the first entries of a list, with a note if there are more."""
    return [*entries[:most], *(["… [cut: there are more]"] if len(entries) > most else [])]


def text_at(value: JsonValue, *path: str) -> str:
    """Return the text at a path into nested objects; empty if there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    text = "" if value is None or isinstance(value, dict | list) else str(value)
    return (
        text if text.isascii() else text.encode(errors="replace").decode()
    )  # replaces lone surrogates


def _rate_limit_end(answer: ApiResponse, now: float) -> float:
    """Return the time before which a response allows no further request; 0 if it names none."""
    headers = answer.headers
    until = 0.0
    if _integer_header(headers, "x-ratelimit-remaining", "ratelimit-remaining") == 0:
        until = float(_integer_header(headers, "x-ratelimit-reset", "ratelimit-reset") or 0)
    if answer.status in (403, 429) or answer.status >= 500:
        wait = retry_after_seconds(headers, now)
        if wait:
            until = max(until, now + wait)
    return now + _DEFAULT_RATE_LIMIT_WAIT if _is_rate_limited(answer) and until <= now else until


def _is_rate_limited(answer: ApiResponse) -> bool:
    """Return whether an error response is a rate limit."""
    if answer.status != 403:
        return answer.status == 429
    spent = _integer_header(answer.headers, "x-ratelimit-remaining") == 0
    message = error_message(answer.data).lower()
    return (
        spent
        or "retry-after" in answer.headers
        or any(phrase in message for phrase in _RATE_LIMIT_PHRASES)
    )


def _integer_header(headers: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        value = headers.get(name, "")
        if value.isdecimal() and len(value) <= _MAX_HEADER_DIGITS:
            return int(value)
    return None


def _next_page_url(url: str, headers: Mapping[str, str]) -> str:
    """Return the URL of the next page, which must be on the same host; empty if there is none."""
    if number := headers.get("x-next-page", ""):
        return str(httpx.URL(url).copy_merge_params({"page": number}))
    if link := headers.get("link"):
        response = httpx.Response(200, headers={"link": link})
        return same_origin_url(url, response.links.get("next", {}).get("url", "") or "")
    return ""
