"""Comments that are written once, and never as a command to the forge."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import ClassVar, Final, NamedTuple

import anyio
import httpx

from replanning import Environment, Goal
from replanning.exporters._forge import (
    AUTHORSHIP_MARKER,
    Forge,
    ForgeComment,
    ForgeError,
    Marker,
    find_marker,
    is_same_text,
    parse_time,
    strip_authorship,
)
from replanning.exporters._forge_http import (
    PAGE_SIZE,
    ApiEndpoint,
    ForgeClient,
    ForgeSession,
    as_object,
    parse_logins,
    text_at,
    validated_token,
)
from replanning.plan import JsonObject
from replanning.planning import IssueComment, TaskRequest

OwnCommentsReader = Callable[[ForgeSession], Awaitable[list[JsonObject]]]
"""Reads the comments of the account that writes, as the forge has them now, with one try."""

MAX_COMMENTS: Final = 5_000
"""Comments of an issue that are read; GitLab takes no more, and GitHub half as many."""

_MAX_PAGES: Final = MAX_COMMENTS // PAGE_SIZE

_SLASH_COMMAND: Final = re.compile(r"^(\s*)/", re.MULTILINE)

_ESCAPED_COMMAND: Final = re.compile(r"^(\s*)&#47;", re.MULTILINE)


class CommentWriter:
    """Writes comments, none of them twice.

    Args:
        api: of the forge.
        obeys: whether the forge takes a line that begins with a slash for a command, which nothing that is written here
            is.

    Attributes:
        login: of the account that writes, empty where nobody knows it; None before it was looked for.
    """

    def __init__(self, api: ForgeClient, *, slash_commands: bool = False) -> None:
        self.login: str | None = None
        self._api, self._slash_commands = api, slash_commands
        self._posted_ids: set[str] = set()
        self._unconfirmed: dict[str, frozenset[str]] = {}

    def __repr__(self) -> str:
        return f"<Posting to {self._api!r} as {self.login or 'nobody known'}>"

    async def post(self, call: ForgeSession, path: str, body: str, ours: OwnCommentsReader) -> str:
        """Write a comment, and say its id.

        What may have arrived although there was no answer, now or when the same text was last tried, is looked for
        among what is new since before that, and sent again only where it is not there.

        Raises:
            ForgeError: it was not written, or nobody knows whether it was.
        """
        text = self._prepare_body(body)
        unsure = text in self._unconfirmed
        if not unsure:
            self._unconfirmed[text] = await self._existing_ids(call, path)
        before = self._unconfirmed[text]

        async def arrived() -> JsonObject | None:
            new = [one for one in await ours(call) if text_at(one, "id") not in before | self._posted_ids]
            return next((one for one in new if is_same_text(text_at(one, "body"), text)), None)

        try:
            said = await call.write("POST", path, {"body": text}, find_existing=arrived, maybe_written=unsure)
        except ForgeError as error:
            if error.final:
                del self._unconfirmed[text]
            raise
        del self._unconfirmed[text]
        comment = text_at(said, "id")
        self._posted_ids.add(comment)
        self.login = self.login or text_at(said, "user", "login") or text_at(said, "author", "username")
        return comment

    async def edit(self, call: ForgeSession, method: str, path: str, body: str) -> None:
        """Put another text in the place of a comment's.

        Raises:
            ForgeError: it was not done.
        """
        await call.write(method, path, {"body": self._prepare_body(body)})

    def parse_body(self, body: str) -> tuple[str, bool]:
        """The text of a comment, and whether it bears the mark of what is written here."""
        text = body.replace("\r\n", "\n")
        text = _ESCAPED_COMMAND.sub(r"\1/", text) if self._slash_commands else text
        return strip_authorship(text)

    async def list_comments(self, call: ForgeSession, path: str) -> list[JsonObject]:
        """All comments, with one try for each page.

        Raises:
            ForgeError: they cannot be had.
            FailedTry: they may be had later.
        """
        found: list[JsonObject] = []
        url = call.first_page_url(path)
        for _ in range(_MAX_PAGES):
            page = await call.get_page(url, once=True)
            found += page.entries
            url = page.next_url
            if not url:
                break
        return found

    def _prepare_body(self, body: str) -> str:
        text = self._api.redact_token(body)
        return (_SLASH_COMMAND.sub(r"\1&#47;", text) if self._slash_commands else text) + AUTHORSHIP_MARKER

    async def _existing_ids(self, call: ForgeSession, path: str) -> frozenset[str]:
        """The comments that were there before one is written, as they were last read."""
        first = httpx.URL(call.first_page_url(path))
        kept = [page.entries for url, page in self._api.page_cache.items() if httpx.URL(url).path == first.path]
        entries = kept or [await call.list_entries(path, limit=MAX_COMMENTS)]
        return frozenset(text_at(one, "id") for page in entries for one in page)


class _PostedComment(NamedTuple):
    id: str
    body: str


class CommentIndex:
    """Writes comments, and knows by their marks which are there.

    They are read before the first is written, and again after anything went wrong: whether a request that failed had an
    effect is not known otherwise. Marks count in comments of our own alone.

    Args:
        forge: where they are.
    """

    def __init__(self, forge: Forge) -> None:
        self.forge = forge
        self._posted: dict[Marker, _PostedComment] | None = None
        self._lock = anyio.Lock()

    def __repr__(self) -> str:
        known = "not read" if self._posted is None else f"{len(self._posted)} comments"
        return f"<Board on {self.forge.name!r} {known}>"

    async def post(self, marker: Marker, body: str) -> None:
        """Write a comment, unless it is there."""
        await self._write(marker, body, edits=False)

    async def upsert(self, marker: Marker, body: str) -> bool:
        """Write a comment, or edit it in place; whether there was anything to do."""
        return await self._write(marker, body, edits=True)

    async def _write(self, marker: Marker, body: str, *, edits: bool) -> bool:
        async with self._lock:
            try:
                return await self._write_locked(marker, body, edits=edits)
            except BaseException:
                self._posted = None  # what has become of it is to be seen on the forge
                raise

    async def _write_locked(self, marker: Marker, body: str, *, edits: bool) -> bool:
        written = self._posted if self._posted is not None else await self._read_posted()
        self._posted, old = written, written.get(marker)
        if old is not None and (not edits or is_same_text(old.body, body)):
            return False
        if old is None or not await self._try_edit(old.id, body):
            old = _PostedComment(await self.forge.post(body), body)
        written[marker] = _PostedComment(old.id, body)
        return True

    async def _try_edit(self, comment: str, body: str) -> bool:
        """Edit a comment; false where somebody has deleted it."""
        try:
            await self.forge.edit(comment, body)
        except ForgeError as error:
            gone = error.status in (404, 410) and all(one.id != comment for one in await self.forge.comments())
            if not gone:
                raise
            return False
        return True

    async def _read_posted(self) -> dict[Marker, _PostedComment]:
        found: dict[Marker, _PostedComment] = {}
        for one in await self.forge.comments():
            marker = find_marker(one.body) if one.own else None
            if marker is not None:
                found.setdefault(marker, _PostedComment(one.id, one.body))
        return found


_CONTROL_CHARS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class ForgeVariables(NamedTuple):
    """The variables of the environment that a forge is known by.

    Attributes:
        token: as whom it is asked.
        trusted_users: whose word counts besides.
        api_urls: where its API is; the first that is set counts.
    """

    token: str
    trusted_users: str
    api_urls: tuple[str, ...]


class IssueLocation(NamedTuple):
    """Where an issue is.

    Attributes:
        short_name: how it is called there.
        id: how it is called everywhere.
        path: where the API has it.
        comments_path: where it has the comments.
    """

    short_name: str
    id: str
    path: str
    comments_path: str


class ForgeIssue(ABC):
    """One issue of a forge: what it wants, what people say below it, and what is told them there.

    What is public can be read without a token; to write, one is needed that may write comments. A comment of which it
    is not known whether it arrived is looked for before it is sent again.

    Args:
        issue: its short name, or the address of its page.
        token: by default the value of the forge's variable.
        base_url: of the API; by default likewise, or that of the public forge.
        trusted: names of further people whose word counts; by default likewise, with commas between them.
        timeout: seconds that a call may take in total, retries included.
        environment: time and chance.
        transport: what connects, for tests; by default the network.
        environ: variables of the environment; by default those of this process.
        redact: takes secrets out of what errors show of answers.

    Attributes:
        name: of the forge.
        id: of the issue, with which this can be made again.
        command: how commands begin that people give us there.

    Raises:
        SettingsError: there is no such name of an issue, or the address is none of the API's.
    """

    name: str
    command: ClassVar[str]
    default_url: ClassVar[str]
    _variables: ClassVar[ForgeVariables]
    _author_path: ClassVar[tuple[str, str]]
    """Where a comment names who wrote it."""
    _text_field: ClassVar[str]
    """What the text of an issue is called."""
    _has_slash_commands: ClassVar[bool] = False
    """Whether the forge takes a line that begins with a slash for a command."""

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
        redact: Callable[[str], str] | None = None,
    ) -> None:
        known, names = os.environ if environ is None else environ, self._variables
        addresses = (base_url, *map(known.get, names.api_urls), self.default_url)
        url = self._api_url(next(one for one in addresses if one).strip().rstrip("/"))
        place = self._locate(issue, url)
        secret = validated_token(known.get(names.token, "") if token is None else token, names.token)
        access = ApiEndpoint(f"{self.name} {place.short_name}", url, secret, names.token, self._headers(secret))
        self.id, self._path, self._comments_path = place.id, place.path, place.comments_path
        self._trusted = parse_logins(known.get(names.trusted_users, "") if trusted is None else trusted)
        self._api = ForgeClient(access, timeout=timeout, environment=environment, transport=transport, redact=redact)
        self._writer = CommentWriter(self._api, slash_commands=self._has_slash_commands)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self._api!r}>"

    @classmethod
    def _api_url(cls, given: str) -> str:
        """The address of the API, as paths are added to it."""
        return given

    @abstractmethod
    def _locate(self, issue: str, url: str) -> IssueLocation:
        """Where an issue is.

        Raises:
            SettingsError: there is no such name of an issue, or the address is none of the API's.
        """

    @abstractmethod
    def _headers(self, token: str) -> dict[str, str]:
        """What is sent along, the token among it."""

    async def comments(self) -> Sequence[ForgeComment]:
        """All comments of people and programs, oldest first; cheap when nothing has changed.

        Raises:
            ForgeError: they cannot be had.
        """
        return await self._api.run(self._fetch_comments)

    async def post(self, body: str) -> str:
        """Write a new comment, and say its id.

        Raises:
            ForgeError: it was not written, or nobody knows whether it was.
        """

        async def post(call: ForgeSession) -> str:
            await self._login(call)
            return await self._writer.post(call, self._comments_path, body, self._own_comments)

        return await self._api.run(post)

    async def edit(self, comment_id: str, body: str) -> None:
        """Put another text in the place of a comment's.

        Raises:
            ForgeError: it was not done.
        """

        async def edit(call: ForgeSession) -> None:
            await self._writer.edit(call, *self._edit_request(comment_id), body)

        await self._api.run(edit)

    async def issue(self) -> TaskRequest:
        """What is wanted: the issue with its comments and what is known of the repository, all of it bounded.

        Raises:
            ForgeError: the issue cannot be read; what is missing of the rest is left out.
        """
        return await self._api.run(self._task_request)

    @abstractmethod
    async def may_steer(self, comment: ForgeComment) -> bool:
        """Whether whoever wrote a comment may say how work goes on: the project's own people, and no programs.

        Raises:
            ForgeError: that cannot be found out now.
        """

    def write_error(self) -> str:
        """Why nothing can be written there, found without asking; empty where it may be."""
        access = self._api.endpoint
        return "" if access.token else f"to write to {self.id}, {access.token_variable} must be set to a token that may"

    async def aclose(self) -> None:
        """Close the connections; they are made anew when it is asked again."""
        await self._api.aclose()

    async def _fetch_issue(self, call: ForgeSession) -> JsonObject:
        """The issue as the forge has it."""
        return as_object(await call.get(self._path))

    async def _task_request(self, call: ForgeSession) -> TaskRequest:
        entry = await self._fetch_issue(call)
        comments = [c for c in await self._fetch_comments(call) if not c.notice]
        title = _CONTROL_CHARS.sub(" ", text_at(entry, "title"))
        return TaskRequest(
            goal=Goal(objective=f"Resolve {self.id.removeprefix('gitlab:')}: {title}"),
            issue_id=self.id,
            title=title,
            text=text_at(entry, self._text_field),
            comments=tuple(IssueComment(author=c.author, text=c.body, at=c.at) for c in comments),
            repository=await self._repository_info(call, entry),
        ).truncated()

    async def _own_comments(self, call: ForgeSession) -> list[JsonObject]:
        """The comments of the account that writes here, as the forge has them; one try."""
        entries = await self._writer.list_comments(call, self._comments_path)
        login = self._writer.login
        return [one for one in entries if not login or text_at(one, *self._author_path) == login]

    async def _login(self, call: ForgeSession) -> str:
        """The login of whoever the token belongs to; empty where that is not known."""
        if self._writer.login is None:
            self._writer.login = await self._fetch_login(call) if self._api.endpoint.token else ""
        return self._writer.login

    async def _fetch_login(self, call: ForgeSession) -> str:
        """The same, from the forge."""
        try:
            return text_at(await call.get("/user"), self._author_path[-1])
        except ForgeError as error:
            if not error.final or error.status == 401:
                raise
            return await self._fetch_app_login(call)

    async def _fetch_app_login(self, call: ForgeSession) -> str:
        """The same of a token that belongs to no user."""
        return ""

    def _parse_comment(self, entry: JsonObject, login: str, *, kind: str = "", where: str = "") -> ForgeComment:
        """A comment as the forge has it.

        Args:
            entry: what the forge says of it.
            login: whose the token is.
            kind: distinguishes ids where the forge counts several kinds of comments apart.
            where: stands before its text.
        """
        author = text_at(entry, *self._author_path)
        body, marked = self._writer.parse_body(text_at(entry, "body"))
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

    @abstractmethod
    def _is_bot(self, entry: JsonObject, author: str) -> bool:
        """Whether a program wrote a comment."""

    @abstractmethod
    async def _fetch_comments(self, call: ForgeSession) -> list[ForgeComment]:
        """The comments, oldest first."""

    @abstractmethod
    async def _repository_info(self, call: ForgeSession, entry: JsonObject) -> JsonObject:
        """What is known of the repository and the issue."""

    @abstractmethod
    def _edit_request(self, comment_id: str) -> tuple[str, str]:
        """With which method, and where, a comment is edited."""
