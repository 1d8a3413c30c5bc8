"""What the forges have in common: issues, comments that are written once, and what is kept of an issue and its repository."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import ClassVar, Final, TypeVar

import httpx

from replanning import Goal
from replanning.errors import Problem, SettingsError
from replanning.exporters._forge import ForgeComment, ForgeError, is_same
from replanning.exporters._forge_answers import objects, texts
from replanning.exporters._forge_http import PER_PAGE, Api, Call
from replanning.exporters._marks import MARK, unmarked
from replanning.interfaces import JsonObject, JsonValue
from replanning.planning import IssueComment, TaskRequest

Found = TypeVar("Found")
Ours = Callable[[Call], Awaitable[list[JsonObject]]]
"""Reads the comments of the account that writes, as the forge has them now, with one try."""

MOST_COMMENTS: Final = 3_000
MOST_FILES: Final = 300
_MOST_PAGES: Final = MOST_COMMENTS // PER_PAGE
_MOST_NAMES: Final = 200
_LONGEST_README: Final = 4_000
_CONTROLS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_COMMAND: Final = re.compile(r"^(\s*)/", re.MULTILINE)
_DEFUSED: Final = re.compile(r"^(\s*)&#47;", re.MULTILINE)


class Posting:
    """Writes comments, none of them twice.

    Args:
        api: of the forge.
        obeys: whether the forge takes a line that begins with a slash for a command, which nothing that is written here
            is.

    Attributes:
        login: of the account that writes, empty where nobody knows it; None before it was looked for.
    """

    def __init__(self, api: Api, *, obeys: bool = False) -> None:
        self.login: str | None = None
        self._api, self._obeys = api, obeys
        self._posted: set[str] = set()
        self._unsure: dict[str, frozenset[str]] = {}

    def __repr__(self) -> str:
        return f"<Posting to {self._api!r} as {self.login or 'nobody known'}>"

    async def post(self, call: Call, path: str, body: str, ours: Ours) -> str:
        """Write a comment, and say its id.

        What may have arrived although there was no answer, now or when the same text was last tried, is looked for
        among what is new since before that, and sent again only where it is not there.

        Raises:
            ForgeError: it was not written, or nobody knows whether it was.
        """
        text = self._marked(body)
        unsure = text in self._unsure
        if not unsure:
            self._unsure[text] = await self._before(call, path)
        before = self._unsure[text]

        async def arrived() -> JsonObject | None:
            new = [one for one in await ours(call) if texts(one, "id") not in before | self._posted]
            return next((one for one in new if is_same(texts(one, "body"), text)), None)

        try:
            said = await call.write("POST", path, {"body": text}, done=arrived, unsure=unsure)
        except ForgeError as error:
            if error.final:
                del self._unsure[text]
            raise
        del self._unsure[text]
        comment = texts(said, "id")
        self._posted.add(comment)
        self.login = self.login or texts(said, "user", "login") or texts(said, "author", "username")
        return comment

    async def edit(self, call: Call, method: str, path: str, body: str) -> None:
        """Put another text in the place of a comment's.

        Raises:
            ForgeError: it was not done.
        """
        await call.write(method, path, {"body": self._marked(body)})

    def read(self, body: str) -> tuple[str, bool]:
        """The text of a comment, and whether it bears the mark of what is written here."""
        text = body.replace("\r\n", "\n")
        text = _DEFUSED.sub(r"\1/", text) if self._obeys else text
        return unmarked(text)

    async def all_entries(self, call: Call, path: str) -> list[JsonObject]:
        """All comments, with one try for each page.

        Raises:
            ForgeError: they cannot be had.
            FailedTry: they may be had later.
        """
        found: list[JsonObject] = []
        url = call.first(path)
        for _ in range(_MOST_PAGES):
            page = await call.page(url, once=True)
            found += page.entries
            url = page.next
            if not url:
                break
        return found

    def _marked(self, body: str) -> str:
        text = self._api.without_token(body)
        return (_COMMAND.sub(r"\1&#47;", text) if self._obeys else text) + MARK

    async def _before(self, call: Call, path: str) -> frozenset[str]:
        """The comments that were there before one is written, as they were last read."""
        first = httpx.URL(call.first(path))
        kept = [page.entries for url, page in self._api.pages.items() if httpx.URL(url).path == first.path]
        entries = kept or [await call.entries(path, most=MOST_COMMENTS)]
        return frozenset(texts(one, "id") for page in entries for one in page)


class ForgeIssue(ABC):
    """One issue of a forge: what it wants, what people say below it, and what is told them there.

    Args:
        called: how the issue is called; also what makes this forge again.
        api: of the forge.
        path: where the API has the issue.
        thread: where it has the comments.
        obeys: whether the forge takes a line that begins with a slash for a command.

    Attributes:
        name: of the forge.
        id: of the issue.
        command: how commands begin that people give us there.
    """

    name: str
    command: ClassVar[str]
    _author: ClassVar[tuple[str, str]]
    """Where a comment names who wrote it."""
    _text: ClassVar[str]
    """What the text of an issue is called."""

    def __init__(self, called: str, api: Api, *, path: str, thread: str, obeys: bool = False) -> None:
        self.id, self._api, self._path, self._thread = called, api, path, thread
        self._posting = Posting(api, obeys=obeys)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self._api!r}>"

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

    @abstractmethod
    async def _asked_who(self, call: Call) -> str:
        """The same, from the forge."""

    @abstractmethod
    async def _comments(self, call: Call) -> list[ForgeComment]:
        """The comments, oldest first."""

    @abstractmethod
    async def _about(self, call: Call, entry: JsonObject) -> JsonObject:
        """What is known of the repository and the issue."""

    @abstractmethod
    def _edited_at(self, comment_id: str) -> tuple[str, str]:
        """With which method, and where, a comment is edited."""


async def optional(asked: Awaitable[Found]) -> Found | None:
    """What is known of a repository; None where the forge does not give it, which is no reason to do without the rest."""
    try:
        return await asked
    except ForgeError:
        return None


async def listed(asked: Awaitable[list[JsonObject]]) -> list[JsonObject]:
    """The same for a list."""
    return await optional(asked) or []


def logins(names: str | Iterable[str]) -> frozenset[str]:
    """Accounts by their names, in small letters; also of a text with commas between them."""
    listed = names.split(",") if isinstance(names, str) else names
    return frozenset(name.strip().removeprefix("@").lower() for name in listed if name.strip())


def checked_token(token: str, variable: str) -> str:
    """A token as it is sent.

    Raises:
        SettingsError: no token looks like that.
    """
    token = token.strip()
    if not (token.isascii() and token.isprintable()) or " " in token:
        problem = "it has characters that no token has; was it copied whole, and nothing else?"
        raise SettingsError([Problem(variable, problem)])
    return token


def is_project(path: str) -> bool:
    """Whether a path names a project, and does not lead elsewhere."""
    return all(part.strip(".") for part in path.split("/"))


def as_object(value: JsonValue) -> JsonObject:
    """An object; an empty one where it is none."""
    return value if isinstance(value, dict) else {}


def file_names(entries: JsonValue) -> list[JsonValue]:
    """The names of files; those of folders end in a slash."""
    folders = ("dir", "tree")
    found = [f"{texts(one, 'name')}{'/' if texts(one, 'type') in folders else ''}" for one in objects(entries)]
    return [*found[:_MOST_NAMES]]


def readme(text: str | None) -> str:
    """The beginning of a file that introduces a project."""
    said = (text or "").strip()
    return said if len(said) <= _LONGEST_README else f"{said[:_LONGEST_README]}… [cut: {len(said)} characters in all]"


def known(about: JsonObject) -> JsonObject:
    """What is known, without what is not."""
    return {name: value for name, value in about.items() if value not in ("", None, [], {})}
