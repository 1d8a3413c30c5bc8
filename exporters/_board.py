"""The comments of one forge, each of ours there once, whichever process wrote it."""

from __future__ import annotations

from typing import NamedTuple

import anyio

from replanning.exporters._forge import Forge, ForgeError, is_same_text
from replanning.exporters._marks import Marker, find_marker


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
