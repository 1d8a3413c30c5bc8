"""What the forges have in common: comments that are written once, and what is kept of an issue and its repository."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from typing import Final, TypeVar

import httpx

from replanning.errors import Problem, SettingsError
from replanning.exporters._forge import MARK, ForgeError
from replanning.exporters._forge_answers import objects, texts
from replanning.exporters._forge_http import PER_PAGE, Api, Call
from replanning.interfaces import JsonObject, JsonValue

Found = TypeVar("Found")
Ours = Callable[[Call], Awaitable[list[JsonObject]]]
"""Reads the comments of the account that writes, as the forge has them now, with one try."""

MOST_COMMENTS: Final = 3_000
MOST_FILES: Final = 300
_MOST_PAGES: Final = MOST_COMMENTS // PER_PAGE
_MOST_NAMES: Final = 200
_LONGEST_README: Final = 4_000
_COMMAND: Final = re.compile(r"^(\s*)/", re.MULTILINE)
_DEFUSED: Final = re.compile(r"^(\s*)&#47;", re.MULTILINE)
_EPOCH: Final = datetime.fromtimestamp(0, UTC)


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
            return next((one for one in new if _same(texts(one, "body"), text)), None)

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
        bare = text.rstrip()
        return (bare.removesuffix(MARK.strip()).rstrip(), True) if bare.endswith(MARK.strip()) else (text, False)

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


def known(value: JsonValue) -> JsonObject:
    """An object; an empty one where it is none."""
    return value if isinstance(value, dict) else {}


def moment(text: str) -> datetime:
    """When something was, in UTC."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return _EPOCH
    return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)


def file_names(entries: JsonValue) -> list[JsonValue]:
    """The names of files; those of folders end in a slash."""
    folders = ("dir", "tree")
    found = [f"{texts(one, 'name')}{'/' if texts(one, 'type') in folders else ''}" for one in objects(entries)]
    return [*found[:_MOST_NAMES]]


def readme(text: str | None) -> str:
    """The beginning of a file that introduces a project."""
    said = (text or "").strip()
    return said if len(said) <= _LONGEST_README else f"{said[:_LONGEST_README]}… [cut: {len(said)} characters in all]"


def bounded(about: JsonObject) -> JsonObject:
    """What is known, without what is not."""
    return {name: value for name, value in about.items() if value not in ("", None, [], {})}


def _same(one: str, other: str) -> bool:
    return one.replace("\r\n", "\n").strip() == other.replace("\r\n", "\n").strip()
