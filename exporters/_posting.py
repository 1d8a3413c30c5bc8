"""Comments that are written once, and never as a command to the forge."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Final

import httpx

from replanning.exporters._forge import ForgeError, is_same_text
from replanning.exporters._forge_answers import text_at
from replanning.exporters._forge_http import PAGE_SIZE, ForgeClient, ForgeSession
from replanning.exporters._marks import AUTHORSHIP_MARKER, strip_authorship
from replanning.interfaces import JsonObject

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
