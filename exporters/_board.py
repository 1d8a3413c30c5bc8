"""The comments of one forge, each of ours there once, whichever process wrote it."""

from __future__ import annotations

from typing import NamedTuple

import anyio

from replanning.exporters._forge import Forge, ForgeError, is_same
from replanning.exporters._marks import Marker, marker_of


class _Written(NamedTuple):
    id: str
    body: str


class Board:
    """Writes comments, and knows by their marks which are there.

    They are read before the first is written, and again after anything went wrong: whether a request that failed had an
    effect is not known otherwise. Marks count in comments of our own alone.

    Args:
        forge: where they are.
    """

    def __init__(self, forge: Forge) -> None:
        self.forge = forge
        self._written: dict[Marker, _Written] | None = None
        self._lock = anyio.Lock()

    def __repr__(self) -> str:
        known = "not read" if self._written is None else f"{len(self._written)} comments"
        return f"<Board on {self.forge.name!r} {known}>"

    async def post(self, marker: Marker, body: str) -> None:
        """Write a comment, unless it is there."""
        await self._write(marker, body, edits=False)

    async def keep(self, marker: Marker, body: str) -> bool:
        """Write a comment, or edit it in place; whether there was anything to do."""
        return await self._write(marker, body, edits=True)

    async def _write(self, marker: Marker, body: str, *, edits: bool) -> bool:
        async with self._lock:
            try:
                return await self._written_anew(marker, body, edits=edits)
            except BaseException:
                self._written = None  # what has become of it is to be seen on the forge
                raise

    async def _written_anew(self, marker: Marker, body: str, *, edits: bool) -> bool:
        written = self._written if self._written is not None else await self._read()
        self._written, old = written, written.get(marker)
        if old is not None and (not edits or is_same(old.body, body)):
            return False
        if old is None or not await self._edited(old.id, body):
            old = _Written(await self.forge.post(body), body)
        written[marker] = _Written(old.id, body)
        return True

    async def _edited(self, comment: str, body: str) -> bool:
        """Edit a comment; false where somebody has deleted it."""
        try:
            await self.forge.edit(comment, body)
        except ForgeError as error:
            gone = error.status in (404, 410) and all(one.id != comment for one in await self.forge.comments())
            if not gone:
                raise
            return False
        return True

    async def _read(self) -> dict[Marker, _Written]:
        found: dict[Marker, _Written] = {}
        for one in await self.forge.comments():
            marker = marker_of(one.body) if one.own else None
            if marker is not None:
                found.setdefault(marker, _Written(one.id, one.body))
        return found
