"""One issue of a forge: its name, its request, its comments, and comments that are written exactly once."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from typing import ClassVar, Final, TypeVar

import httpx

from replanning import Environment, Goal
from replanning.errors import Problem, SettingsError
from replanning.exporters._forge import (
    AUTHORSHIP_MARKER,
    ForgeComment,
    ForgeError,
    is_same_text,
    parse_time,
    strip_authorship,
)
from replanning.exporters._forge_http import (
    PAGE_SIZE,
    ForgeClient,
    as_object,
    objects_in,
    text_at,
)
from replanning.http import is_valid_token, url_problem
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from replanning.planning import IssueComment, TaskRequest

MAX_COMMENTS: Final = 5_000
"""Comments of an issue that are read; GitLab allows no more, and GitHub half as many."""

_SLASH_COMMAND: Final = re.compile(r"^(\s*)/", re.MULTILINE)

_ESCAPED_COMMAND: Final = re.compile(r"^(\s*)&#47;", re.MULTILINE)

_CONTROL_CHARS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class ForgeIssue(ABC):
    """One issue of a forge: its request, its comments, and the comments that this tool writes.

    Public issues can be read without a token; writing needs one. A comment that may have arrived although its request
    failed is searched for before it is sent again.

    Args:
        issue: its short name, or the URL of its page.
        token: access token; by default from the forge's environment variable.
        base_url: URL of the API; by default from the environment, or that of the public forge.
        trusted: logins of further people who may steer; by default from the environment, separated by commas.
        timeout: seconds for a call, retries included.
        environment: source of time and randomness.
        transport: HTTP transport, for tests; by default the network.
        environ: environment variables; by default those of this process.

    Attributes:
        name: name of the forge.
        id: id of the issue, accepted as `issue`.
        command: the character that commands in comments begin with.

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
    _short_example: ClassVar[str]
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
    _has_slash_commands: ClassVar[bool] = False
    """True if the forge interprets lines that begin with a slash as commands."""
    _path: str
    """Path of the issue in the API."""
    _comments_path: str

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
        url = self._api_url(next(url for url in urls if url).strip().rstrip("/"))
        self.id = self._locate(self._parse_name(issue, url))
        name = self._token_variable
        secret = _validated_token(variables.get(name, "") if token is None else token, name)
        self._trusted = _parse_logins(variables.get(self._trusted_variable, "") if trusted is None else trusted)
        self._api = ForgeClient(
            f"{self.name} {self.id.removeprefix('gitlab:')}",
            url,
            token=secret,
            token_variable=name,
            headers=self._headers(secret),
            timeout=timeout,
            environment=environment,
            transport=transport,
        )
        self._own_login: str | None = None  # None until it was asked for, empty if unknown
        self._posted_ids: set[str] = set()
        self._unconfirmed: dict[str, frozenset[str]] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self._api!r}>"

    @classmethod
    def _api_url(cls, given: str) -> str:
        """Return the base URL of the API for the URL that the user gives."""
        return given

    def _parse_name(self, issue: str, url: str) -> re.Match[str]:
        """Return the match of an issue's short name or page URL.

        Args:
            issue: the issue, as the user names it.
            url: URL of the API.

        Raises:
            SettingsError: it is not an issue of this API, or the URL is invalid.
        """
        variable = self._url_variables[0]
        if problem := url_problem(url):
            raise SettingsError([Problem(variable, f"{problem}; expected something like {self.default_url}")])
        text = issue.strip()
        short = self._short_pattern.fullmatch(text)
        if short is not None and _is_project_path(short["project"]):
            return short
        if url_problem(text.partition("#")[0].partition("?")[0]):
            expected = f"{self._short_example}, or the URL of the page of {self._page_kinds}"
            raise SettingsError([Problem("issue", f"{issue!r} is not an issue of {self._title}; expected {expected}")])
        page = httpx.URL(text)
        match = self._page_pattern.fullmatch(page.path)
        if match is None or not _is_project_path(match["project"]):
            problem = f"{issue!r} is not the page of {self._page_kinds}, such as {self._page_example}"
            raise SettingsError([Problem("issue", problem)])
        api_host = httpx.URL(url).host
        if api_host not in (page.host, f"api.{page.host}"):  # the token is sent to no other host
            problem = f"{page.host} is not served by the API at {api_host}; set {variable} to the URL of its API"
            raise SettingsError([Problem("issue", f"{problem}, such as https://{page.host}{self._api_path}")])
        return match

    @abstractmethod
    def _locate(self, match: re.Match[str]) -> str:
        """Set the paths of an issue and of its comments, and return its id."""

    @abstractmethod
    def _headers(self, token: str) -> dict[str, str]:
        """Return the headers of requests, with the token."""

    @abstractmethod
    async def may_steer(self, comment: ForgeComment) -> bool:
        """Return whether the author of a comment may steer the run: a member of the project, and not a program.

        Raises:
            ForgeError: the author's role cannot be read.
        """

    @abstractmethod
    def _is_bot(self, entry: JsonObject, author: str) -> bool:
        """Return whether a program wrote a comment."""

    @abstractmethod
    async def _fetch_comments(self) -> list[ForgeComment]:
        """Return the comments, oldest first."""

    @abstractmethod
    async def _repository_info(self, entry: JsonObject) -> JsonObject:
        """Return data about the repository and the issue."""

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
        return await self._api.run(self._task_request)

    async def comments(self) -> Sequence[ForgeComment]:
        """Return all comments, oldest first; cheap when nothing has changed.

        Raises:
            ForgeError: the comments cannot be read.
        """
        return await self._api.run(self._fetch_comments)

    async def _task_request(self) -> TaskRequest:
        entry = await self._fetch_issue()
        comments = [comment for comment in await self._fetch_comments() if not comment.notice]
        title = _CONTROL_CHARS.sub(" ", text_at(entry, "title"))
        return TaskRequest(
            goal=Goal(objective=f"Resolve {self.id.removeprefix('gitlab:')}: {title}"),
            issue_id=self.id,
            title=title,
            text=text_at(entry, self._text_field),
            comments=tuple(IssueComment(author=c.author, text=c.body, at=c.at) for c in comments),
            repository=await self._repository_info(entry),
        ).truncated()

    async def _fetch_issue(self) -> JsonObject:
        return as_object(await self._api.get(self._path))

    async def _login(self) -> str:
        """Return the login of the token's owner; empty if unknown."""
        if self._own_login is None:
            self._own_login = await self._fetch_login() if self._api.token else ""
        return self._own_login

    async def _fetch_login(self) -> str:
        try:
            return text_at(await self._api.get("/user"), self._author_path[-1])
        except ForgeError as error:
            if not error.final or error.status == 401:
                raise
            return await self._fetch_app_login()

    def _parse_comment(self, entry: JsonObject, login: str, *, kind: str = "", where: str = "") -> ForgeComment:
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
        return "" if self._api.token else f"writing to {self.id} needs a token: set {self._api.token_variable}"

    async def post(self, body: str) -> str:
        """Write a new comment and return its id.

        A comment that may have arrived without a response, now or when the same text was last tried, is searched for
        among the comments that are new since then, and sent again only if it is missing.

        Raises:
            ForgeError: the comment was not written, or its effect is unknown.
        """
        return await self._api.run(lambda: self._post(body))

    async def edit(self, comment_id: str, body: str) -> None:
        """Replace the text of a comment.

        Raises:
            ForgeError: the comment was not changed.
        """
        method, path = self._edit_request(comment_id)
        await self._api.run(lambda: self._api.write(method, path, {"body": self._prepared(body)}))

    async def aclose(self) -> None:
        """Close the connections; the next call opens new ones."""
        await self._api.aclose()

    async def _post(self, body: str) -> str:
        await self._login()
        text = self._prepared(body)
        maybe_written = text in self._unconfirmed
        if not maybe_written:
            self._unconfirmed[text] = await self._existing_ids()
        earlier = self._unconfirmed[text]

        async def find_existing() -> JsonObject | None:
            for entry in await self._own_comments():
                is_new = text_at(entry, "id") not in earlier | self._posted_ids
                if is_new and is_same_text(text_at(entry, "body"), text):
                    return entry
            return None

        try:
            entry = await self._api.write(
                "POST", self._comments_path, {"body": text}, find_existing=find_existing, maybe_written=maybe_written
            )
        except ForgeError as error:
            if error.final:
                del self._unconfirmed[text]
            raise
        del self._unconfirmed[text]
        comment = text_at(entry, "id")
        self._posted_ids.add(comment)
        self._own_login = self._own_login or text_at(entry, *self._author_path)
        return comment

    def _prepared(self, body: str) -> str:
        """Return a text to publish: without the token and without commands to the forge, marked as our own."""
        text = self._api.redact_token(body)
        return (_SLASH_COMMAND.sub(r"\1&#47;", text) if self._has_slash_commands else text) + AUTHORSHIP_MARKER

    async def _existing_ids(self) -> frozenset[str]:
        """Return the ids of the comments as last read."""
        path = httpx.URL(self._api.first_page_url(self._comments_path)).path
        cached = [page.entries for url, page in self._api.page_cache.items() if httpx.URL(url).path == path]
        pages = cached or [await self._api.list_entries(self._comments_path, limit=MAX_COMMENTS)]
        return frozenset(text_at(entry, "id") for page in pages for entry in page)

    async def _own_comments(self) -> list[JsonObject]:
        """Return the comments of the token's owner, with one try for each page."""
        entries: list[JsonObject] = []
        url = self._api.first_page_url(self._comments_path)
        for _ in range(MAX_COMMENTS // PAGE_SIZE):
            page = await self._api.get_page(url, once=True)
            entries += page.entries
            url = page.next_url
            if not url:
                break
        login = self._own_login
        return [entry for entry in entries if not login or text_at(entry, *self._author_path) == login]


def _is_project_path(path: str) -> bool:
    """Return whether a path names a project, without `.` and `..`."""
    return all(part.strip(".") for part in path.split("/"))


def _parse_logins(names: str | Iterable[str]) -> frozenset[str]:
    """Return logins in lower case; a text may hold several, separated by commas."""
    logins = names.split(",") if isinstance(names, str) else names
    return frozenset(login.strip().removeprefix("@").lower() for login in logins if login.strip())


def _validated_token(token: str, variable: str) -> str:
    token = token.strip()
    if not is_valid_token(token):
        problem = "the token has characters that are not allowed in tokens; copy exactly the token"
        raise SettingsError([Problem(variable, problem)])
    return token


# Data about a repository

MAX_FILES: Final = 300

_MAX_FILE_NAMES: Final = 200

_MAX_README_CHARS: Final = 4_000

_Result = TypeVar("_Result")


async def result_or_none(request: Awaitable[_Result]) -> _Result | None:
    """Return the result of a request for optional data; None if it fails."""
    try:
        return await request
    except ForgeError:
        return None


async def list_or_empty(request: Awaitable[list[JsonObject]]) -> list[JsonObject]:
    """Return the result of a request for an optional list; empty if it fails."""
    return await result_or_none(request) or []


def file_names(entries: JsonValue) -> list[JsonValue]:
    """Return the names of files and folders; those of folders end in a slash."""
    folders = ("dir", "tree")
    names = [f"{text_at(e, 'name')}{'/' if text_at(e, 'type') in folders else ''}" for e in objects_in(entries)]
    return truncated_list(names, _MAX_FILE_NAMES)


def truncated_list(entries: Sequence[JsonValue], most: int = MAX_FILES) -> list[JsonValue]:
    """Return the first entries of a list, with a note if there are more."""
    return [*entries[:most], *(["… [cut: there are more]"] if len(entries) > most else [])]


def readme_excerpt(text: str | None) -> str:
    """Return the beginning of a README."""
    text = (text or "").strip()
    if len(text) <= _MAX_README_CHARS:
        return text
    return f"{text[:_MAX_README_CHARS]}… [cut: {len(text)} characters in all]"


def without_empty(info: JsonObject) -> JsonObject:
    """Return an object without its empty fields."""
    return {name: value for name, value in info.items() if value not in ("", None, [], {})}
