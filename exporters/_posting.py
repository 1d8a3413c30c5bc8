"""Comments that are written once, and never as a command to the forge."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Final

import httpx

from replanning.exporters._forge import ForgeError, is_same
from replanning.exporters._forge_answers import texts
from replanning.exporters._forge_http import PER_PAGE, Api, Call
from replanning.exporters._marks import MARK, unmarked
from replanning.interfaces import JsonObject

Ours = Callable[[Call], Awaitable[list[JsonObject]]]
"""Reads the comments of the account that writes, as the forge has them now, with one try."""

MOST_COMMENTS: Final = 5_000
"""Comments of an issue that are read; GitLab takes no more, and GitHub half as many."""

_MOST_PAGES: Final = MOST_COMMENTS // PER_PAGE
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
