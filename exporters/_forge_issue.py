"""What the forges have in common: an issue with its comments, and the account that writes there."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar, Final, NamedTuple

import httpx

from replanning import Environment, Goal
from replanning.exporters._forge import ForgeComment, ForgeError, when
from replanning.exporters._forge_answers import Access, texts
from replanning.exporters._forge_http import Api, Call
from replanning.exporters._forge_parts import as_object, checked_token, logins
from replanning.exporters._posting import Posting
from replanning.interfaces import JsonObject
from replanning.planning import IssueComment, TaskRequest

_CONTROLS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class Variables(NamedTuple):
    """The variables of the environment that a forge is known by.

    Attributes:
        token: as whom it is asked.
        trusted: whose word counts besides.
        urls: where its API is; the first that is set counts.
    """

    token: str
    trusted: str
    urls: tuple[str, ...]


class Place(NamedTuple):
    """Where an issue is.

    Attributes:
        called: how it is called there.
        id: how it is called everywhere.
        path: where the API has it.
        thread: where it has the comments.
    """

    called: str
    id: str
    path: str
    thread: str


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
    _variables: ClassVar[Variables]
    _author: ClassVar[tuple[str, str]]
    """Where a comment names who wrote it."""
    _text: ClassVar[str]
    """What the text of an issue is called."""
    _obeys: ClassVar[bool] = False
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
        addresses = (base_url, *map(known.get, names.urls), self.default_url)
        url = self._address(next(one for one in addresses if one).strip().rstrip("/"))
        place = self._located(issue, url)
        secret = checked_token(known.get(names.token, "") if token is None else token, names.token)
        access = Access(f"{self.name} {place.called}", url, secret, names.token, self._headers(secret))
        self.id, self._path, self._thread = place.id, place.path, place.thread
        self._trusted = logins(known.get(names.trusted, "") if trusted is None else trusted)
        self._api = Api(access, timeout=timeout, environment=environment, transport=transport, redact=redact)
        self._posting = Posting(self._api, obeys=self._obeys)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self._api!r}>"

    @classmethod
    def _address(cls, given: str) -> str:
        """The address of the API, as paths are added to it."""
        return given

    @abstractmethod
    def _located(self, issue: str, url: str) -> Place:
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
        return await self._api.call(self._comments)

    async def post(self, body: str) -> str:
        """Write a new comment, and say its id.

        Raises:
            ForgeError: it was not written, or nobody knows whether it was.
        """

        async def post(call: Call) -> str:
            await self._who(call)
            return await self._posting.post(call, self._thread, body, self._ours)

        return await self._api.call(post)

    async def edit(self, comment_id: str, body: str) -> None:
        """Put another text in the place of a comment's.

        Raises:
            ForgeError: it was not done.
        """

        async def edit(call: Call) -> None:
            await self._posting.edit(call, *self._edited_at(comment_id), body)

        await self._api.call(edit)

    async def issue(self) -> TaskRequest:
        """What is wanted: the issue with its comments and what is known of the repository, all of it bounded.

        Raises:
            ForgeError: the issue cannot be read; what is missing of the rest is left out.
        """
        return await self._api.call(self._request)

    @abstractmethod
    async def may_steer(self, comment: ForgeComment) -> bool:
        """Whether whoever wrote a comment may say how work goes on: the project's own people, and no programs.

        Raises:
            ForgeError: that cannot be found out now.
        """

    def cannot_write(self) -> str:
        """Why nothing can be written there, found without asking; empty where it may be."""
        access = self._api.access
        return "" if access.token else f"to write to {self.id}, {access.token_variable} must be set to a token that may"

    async def aclose(self) -> None:
        """Close the connections; they are made anew when it is asked again."""
        await self._api.aclose()

    async def _entry(self, call: Call) -> JsonObject:
        """The issue as the forge has it."""
        return as_object(await call.get(self._path))

    async def _request(self, call: Call) -> TaskRequest:
        entry = await self._entry(call)
        comments = [c for c in await self._comments(call) if not c.notice]
        title = _CONTROLS.sub(" ", texts(entry, "title"))
        return TaskRequest(
            goal=Goal(objective=f"Resolve {self.id.removeprefix('gitlab:')}: {title}"),
            issue_id=self.id,
            title=title,
            text=texts(entry, self._text),
            comments=tuple(IssueComment(author=c.author, text=c.body, at=c.at) for c in comments),
            repository=await self._about(call, entry),
        ).bounded()

    async def _ours(self, call: Call) -> list[JsonObject]:
        """The comments of the account that writes here, as the forge has them; one try."""
        entries = await self._posting.all_entries(call, self._thread)
        login = self._posting.login
        return [one for one in entries if not login or texts(one, *self._author) == login]

    async def _who(self, call: Call) -> str:
        """The login of whoever the token belongs to; empty where that is not known."""
        if self._posting.login is None:
            self._posting.login = await self._asked_who(call) if self._api.access.token else ""
        return self._posting.login

    async def _asked_who(self, call: Call) -> str:
        """The same, from the forge."""
        try:
            return texts(await call.get("/user"), self._author[-1])
        except ForgeError as error:
            if not error.final or error.status == 401:
                raise
            return await self._asked_otherwise(call)

    async def _asked_otherwise(self, call: Call) -> str:
        """The same of a token that belongs to no user."""
        return ""

    def _comment(self, entry: JsonObject, login: str, *, kind: str = "", where: str = "") -> ForgeComment:
        """A comment as the forge has it.

        Args:
            entry: what the forge says of it.
            login: whose the token is.
            kind: distinguishes ids where the forge counts several kinds of comments apart.
            where: stands before its text.
        """
        author = texts(entry, *self._author)
        body, marked = self._posting.read(texts(entry, "body"))
        own = bool(login) and author == login
        return ForgeComment(
            id=f"{kind}{texts(entry, 'id')}",
            author=author or "somebody",
            body=f"{where}{body}",
            at=when(texts(entry, "created_at") or texts(entry, "submitted_at")),
            own=own,
            notice=marked and (own or not login),
            bot=self._is_program(entry, author) or (marked and not own),
            role=texts(entry, "author_association"),
        )

    @abstractmethod
    def _is_program(self, entry: JsonObject, author: str) -> bool:
        """Whether a program wrote a comment."""

    @abstractmethod
    async def _comments(self, call: Call) -> list[ForgeComment]:
        """The comments, oldest first."""

    @abstractmethod
    async def _about(self, call: Call, entry: JsonObject) -> JsonObject:
        """What is known of the repository and the issue."""

    @abstractmethod
    def _edited_at(self, comment_id: str) -> tuple[str, str]:
        """With which method, and where, a comment is edited."""
