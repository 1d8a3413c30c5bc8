"""One issue of a forge: its name, its request, its comments, and who may steer a run there."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

import httpx

from replanning import Environment, Goal
from replanning.errors import SettingsError
from replanning.exporters._forge import (
    AUTHORSHIP_MARKER,
    ForgeComment,
    ForgeError,
    parse_time,
    strip_authorship,
)
from replanning.exporters._forge_api import (
    ForgeApi,
    PagedLists,
    result_or,
    text_at,
    truncated_list,
)
from replanning.http import is_valid_token, url_problem
from replanning.llm.quoting import truncate_text
from replanning.plan import JsonObject
from replanning.plan.json_values import as_object
from replanning.plan.types import JsonValue
from replanning.planning import IssueComment, TaskRequest

MAX_FILES: Final = 300
"""Maximum number of files read from a project, or from a pull or merge request."""

_MAX_FILE_NAMES: Final = 200

_MAX_README_CHARS: Final = 4_000

_CONTROL_CHARS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class ForgeSite:
    """Names of a forge and its issues, and the settings for it.

    Attributes:
        name: name of the forge in settings and spans.
        title: name of the forge, for people.
        id_prefix: prefix of the ids of issues.
        short_pattern: pattern of the short name of an issue, with the groups `project`, `number`
            and, if the forge numbers several kinds separately, `kind`.
        page_pattern: pattern of the path of an issue's page, with the same groups.
        example: short name of an issue, for messages.
        page_kinds: the kinds of pages, for people.
        page_example: URL of a page, for messages.
        default_url: URL of the API of the public forge.
        api_path: path of the API on a self-hosted server.
        takes_site_url: accept the URL of a server for that of its API.
        url_variables: environment variables with the URL of the API.
        token_variable: environment variable with the token.
        trusted_variable: environment variable with the logins of people who may steer.
    """

    name: str
    title: str
    id_prefix: str
    short_pattern: re.Pattern[str]
    page_pattern: re.Pattern[str]
    example: str
    page_kinds: str
    page_example: str
    default_url: str
    api_path: str
    takes_site_url: bool
    url_variables: tuple[str, ...]
    token_variable: str
    trusted_variable: str


class IssueName(NamedTuple):
    """Short name of an issue, such as `owner/repo#12`; `!` instead of `#` for a merge request."""

    project: str
    sign: str
    number: str

    def __str__(self) -> str:
        return f"{self.project}{self.sign}{self.number}"


class IssueClient(ABC):
    """Client for one issue; each forge has a subclass.

    Its state is the known accounts, such as the login of the token's owner.
    All requests are made within `ForgeApi.call`.

    Args:
        api: API of the forge.
        name: name of the issue.
    """

    author_path: ClassVar[tuple[str, str]]
    """Path of the author's login in an issue or comment."""
    text_field: ClassVar[str]
    """Field with the text of an issue."""
    readme_type: ClassVar[str]
    """Media type of the text of a README."""
    path: str
    """Path of the issue in the API."""
    comments_path: str
    project_path: str
    files_path: str
    """Path of the list of the project's files."""

    def __init__(self, api: ForgeApi, name: IssueName) -> None:
        self.api = api
        self.project = name.project
        self.lists = PagedLists(api)
        self._own_login: str | None = None  # None until requested, empty if unknown

    @staticmethod
    @abstractmethod
    def auth_headers(token: str) -> dict[str, str]:
        """Return the headers of every request, with the token."""

    @abstractmethod
    async def fetch_comments(self) -> list[ForgeComment]:
        """Return the comments, oldest first."""

    @abstractmethod
    async def is_member(self, comment: ForgeComment) -> bool:
        """Return whether the author of a comment is a member of the project; makes its own call."""

    @abstractmethod
    async def describe_change(self, entry: JsonObject) -> JsonObject:
        """Return the branches and files of a pull or merge request; empty for an issue."""

    @abstractmethod
    def is_bot(self, entry: JsonObject, author: str) -> bool:
        """Return whether a program wrote a comment."""

    @abstractmethod
    def readme_path(self, project: JsonObject) -> str:
        """Return the path of the text of a project's README."""

    @abstractmethod
    def edit_request(self, comment_id: str) -> tuple[str, str]:
        """Return the method and the path for editing a comment."""

    def escape_commands(self, text: str) -> str:
        """Return a text in which the forge finds no commands of its own."""
        return text

    def unescape_commands(self, text: str) -> str:
        """Return the text that was escaped."""
        return text

    async def fetch_app_login(self) -> str:
        """Return the login for a token that does not belong to a user."""
        return ""

    async def fetch_issue(self) -> JsonObject:
        """Return the JSON object of the issue."""
        return as_object(await self.api.get_json(self.path))

    async def login(self) -> str:
        """Return the login of the token's owner; empty if unknown."""
        if self._own_login is None:
            self._own_login = await self._fetch_login()
        return self._own_login

    async def _fetch_login(self) -> str:
        if not self.api.has_token:
            return ""
        try:
            user = await self.api.get_json("/user")
        except ForgeError as error:
            if not error.final or error.status == 401:
                raise
            return await self.fetch_app_login()
        return text_at(user, self.author_path[-1])

    async def post(self, body: str) -> str:
        """Write a new comment and return its id."""
        await self.login()
        published: JsonObject = {"body": self._published_text(body)}
        entry = await self.api.write("POST", self.comments_path, published)
        if not self._own_login:
            self._own_login = text_at(entry, *self.author_path)
        return text_at(entry, "id")

    async def edit(self, comment_id: str, body: str) -> None:
        """Replace the text of a comment."""
        method, path = self.edit_request(comment_id)
        await self.api.write(method, path, {"body": self._published_text(body)})

    def _published_text(self, body: str) -> str:
        """Return a comment without the token and without commands to the forge, marked as ours."""
        return self.escape_commands(self.api.redact_token(body)) + AUTHORSHIP_MARKER

    def parse_comment(
        self, entry: JsonObject, login: str, *, kind: str = "", where: str = ""
    ) -> ForgeComment:
        """Return a comment of the forge.

        Args:
            entry: its JSON object.
            login: login of the token's owner.
            kind: prefix of its id, if the forge numbers several kinds of comments separately.
            where: prefix of its text.
        """
        author = text_at(entry, *self.author_path)
        text = text_at(entry, "body").replace("\r\n", "\n")
        body, is_marked = strip_authorship(self.unescape_commands(text))
        is_own = bool(login) and author == login
        # A marker in somebody else's comment was copied, or another account of ours wrote it.
        is_foreign = is_marked and not is_own
        return ForgeComment(
            id=f"{kind}{text_at(entry, 'id')}",
            author=author or "somebody",
            body=f"{where}{body}",
            at=parse_time(text_at(entry, "created_at") or text_at(entry, "submitted_at")),
            own=is_own,
            notice=is_marked and (is_own or not login),
            bot=is_foreign or self.is_bot(entry, author),
            role=text_at(entry, "author_association"),
        )

    async def describe_project(self, entry: JsonObject) -> JsonObject:
        """Return data about the project and the issue, as far as it can be read."""
        project = as_object(await result_or(self.api.get_json(self.project_path), None))
        files = await result_or(self.lists.read(self.files_path, limit=MAX_FILES), [])
        names: list[JsonValue] = []
        for file in files:
            name = text_at(file, "name")
            is_folder = text_at(file, "type") in ("dir", "tree")
            names.append(f"{name}/" if is_folder else name)
        about: JsonObject = {
            "url": text_at(entry, "html_url") or text_at(entry, "web_url"),
            "name": self.project,
            "state": text_at(entry, "state"),
            "author": text_at(entry, *self.author_path),
            "labels": _label_names(entry),
        }
        for field in ("description", "default_branch", "language", "topics"):
            about[field] = project.get(field)
        about["files"] = truncated_list(names, _MAX_FILE_NAMES)
        about["readme"] = await result_or(self._fetch_readme(project), "")
        about.update(await self.describe_change(entry))
        return about

    async def _fetch_readme(self, project: JsonObject) -> str:
        url = self.api.url + self.readme_path(project)
        answer = await self.api.get(url, {"accept": self.readme_type})
        return truncate_text(answer.data.decode(errors="replace").strip(), _MAX_README_CHARS)


def _label_names(entry: JsonObject) -> list[JsonValue]:
    """Return the labels of an issue, which GitHub describes as objects and GitLab as texts."""
    names: list[JsonValue] = []
    labels = entry.get("labels")
    if isinstance(labels, list):
        for label in labels:
            names.append(text_at(label, "name") or str(label))
    return names


class ForgeIssue:
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

    Raises:
        SettingsError: it is not an issue of this API, or the URL or the token is invalid.
    """

    site: ClassVar[ForgeSite]
    """The forge."""
    client_type: ClassVar[type[IssueClient]]
    """The client for its API."""
    command: ClassVar[str]
    """The character that commands in comments begin with."""

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
        site = self.site
        variables = os.environ if environ is None else environ
        url = _find_api_url(site, base_url, variables)
        self._issue = _find_issue(site, issue, url)
        if token is None:
            token = variables.get(site.token_variable, "")
        token = token.strip()
        if not is_valid_token(token):
            problem = "the token has characters that are not allowed in tokens"
            raise SettingsError.at(site.token_variable, f"{problem}; copy the token exactly")
        if trusted is None:
            trusted = variables.get(site.trusted_variable, "")
        self.name = site.name
        self.id = f"{site.id_prefix}{self._issue}"
        self._trusted = _logins(trusted)
        self._api = ForgeApi(
            url,
            f"{site.name} {self._issue}",
            token=token,
            token_variable=site.token_variable,
            headers=self.client_type.auth_headers(token),
            timeout=timeout,
            environment=environment or Environment(),
            transport=transport,
        )
        self._client = self.client_type(self._api, self._issue)

    def __repr__(self) -> str:
        token = "with a token" if self._api.has_token else "without a token"
        return f"<{type(self).__name__} {self.id} at {self._api.url} {token}>"

    async def issue(self) -> TaskRequest:
        """Return the request: the issue, its comments and data about its repository, all bounded.

        Raises:
            ForgeError: the issue cannot be read; other data is left out if it cannot be read.
        """
        async with self._api.call():
            entry = await self._client.fetch_issue()
            comments: list[IssueComment] = []
            for comment in await self._client.fetch_comments():
                if not comment.notice:
                    shown = IssueComment(author=comment.author, text=comment.body, at=comment.at)
                    comments.append(shown)
            title = _CONTROL_CHARS.sub(" ", text_at(entry, "title"))
            about = await self._client.describe_project(entry)
        repository: JsonObject = {"forge": self.name}
        for name, value in about.items():
            if value not in ("", None, [], {}):
                repository[name] = value
        request = TaskRequest(
            goal=Goal(objective=f"Resolve {self._issue}: {title}"),
            issue_id=self.id,
            title=title,
            text=text_at(entry, self._client.text_field),
            comments=tuple(comments),
            repository=repository,
        )
        return request.truncated()

    async def comments(self) -> Sequence[ForgeComment]:
        """Return all comments, oldest first; cheap when nothing has changed.

        Raises:
            ForgeError: the comments cannot be read.
        """
        async with self._api.call():
            return await self._client.fetch_comments()

    async def may_steer(self, comment: ForgeComment) -> bool:
        """Return whether the author of a comment may steer the run: a member, not a program.

        Raises:
            ForgeError: the author's role cannot be read.
        """
        if comment.bot or comment.notice:
            return False
        if comment.own or comment.author.lower() in self._trusted:
            return True
        return await self._client.is_member(comment)

    def write_error(self) -> str:
        """Return the reason why nothing can be written, without a request; empty if it can."""
        if self._api.has_token:
            return ""
        return f"writing to {self.id} needs a token: set {self._api.token_variable}"

    async def post(self, body: str) -> str:
        """Write a new comment and return its id.

        A request that may have had its effect is not repeated: the caller reads the comments before
        it posts again.

        Raises:
            ForgeError: the comment was not written, or its effect is unknown.
        """
        async with self._api.call():
            return await self._client.post(body)

    async def edit(self, comment_id: str, body: str) -> None:
        """Replace the text of a comment.

        Raises:
            ForgeError: the comment was not changed.
        """
        async with self._api.call():
            await self._client.edit(comment_id, body)

    async def aclose(self) -> None:
        """Close the connections; the next call opens new ones, also in another event loop."""
        await self._api.aclose()


def _find_api_url(site: ForgeSite, base_url: str | None, variables: Mapping[str, str]) -> str:
    """Return the URL of the API: the argument, else the environment, else the public forge.

    Raises:
        SettingsError: it is not a URL.
    """
    url = base_url
    for variable in site.url_variables:
        url = url or variables.get(variable)
    url = (url or site.default_url).strip().rstrip("/")
    problem = url_problem(url)
    if problem:
        expected = f"expected something like {site.default_url}"
        raise SettingsError.at(site.url_variables[0], f"{problem}; {expected}")
    if site.takes_site_url and httpx.URL(url).path in ("", "/"):
        url += site.api_path
    return url


def _find_issue(site: ForgeSite, issue: str, api_url: str) -> IssueName:
    """Parse the short name of an issue or the URL of its page.

    Raises:
        SettingsError: it is neither, or the page is not of the forge with this API.
    """
    text = issue.strip()
    name = _issue_name(site.short_pattern.fullmatch(text))
    if name is not None:
        return name
    if url_problem(text.partition("#")[0].partition("?")[0]):
        expected = f"{site.example}, or the URL of the page of {site.page_kinds}"
        problem = f"{issue!r} is not an issue of {site.title}; expected {expected}"
        raise SettingsError.at("issue", problem)
    page = httpx.URL(text)
    name = _issue_name(site.page_pattern.fullmatch(page.path))
    if name is None:
        problem = f"{issue!r} is not the page of {site.page_kinds}, such as {site.page_example}"
        raise SettingsError.at("issue", problem)
    # The token is sent to no other host.
    api_host = httpx.URL(api_url).host
    if api_host not in (page.host, f"api.{page.host}"):
        problem = f"{page.host} is not served by the API at {api_host}"
        example = f"such as https://{page.host}{site.api_path}"
        advice = f"set {site.url_variables[0]} to the URL of its API, {example}"
        raise SettingsError.at("issue", f"{problem}; {advice}")
    return name


def _issue_name(match: re.Match[str] | None) -> IssueName | None:
    """Return the issue that a pattern matched; None without a match or for an invalid project."""
    if match is None:
        return None
    project = match["project"]
    for part in project.split("/"):
        if not part.strip("."):  # neither `.` nor `..` names a project
            return None
    kind = match.groupdict().get("kind", "#")
    sign = "!" if kind in ("!", "merge_requests") else "#"
    return IssueName(project, sign, match["number"])


def _logins(names: str | Collection[str]) -> set[str]:
    """Return logins, normalised for comparison."""
    if isinstance(names, str):
        names = names.split(",")
    logins = {name.strip().removeprefix("@").lower() for name in names}
    logins.discard("")
    return logins
