"""A Markdown file as a forge: for everybody who follows runs without one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from replanning import Environment
from replanning.exporters._forge import ForgeComment, ForgeError, when
from replanning.interfaces import Clock

_LINE: Final = re.compile(r"^<!-- comment (\d{1,9}) at (\S{1,40}) -->$", re.MULTILINE)
_LOOKS_LIKE_ONE: Final = re.compile(r"^<!-- comment ", re.MULTILINE)


class _Part(NamedTuple):
    number: int
    at: str
    body: str


class FileForge:
    """The comments of one file, one below the other; a line that Markdown does not show stands before each.

    The file is read anew each time, and put into its place as a whole, so that a crash leaves it as it was. One process
    at a time may write to it.

    Args:
        path: of the file; it is made, with its folders, when the first comment is written.
        clock: time.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Clock | None = None) -> None:
        self.path = Path(path)
        self.name = str(path)
        self._clock = clock if clock is not None else Environment().clock

    def __repr__(self) -> str:
        return f"<FileForge {str(self.path)!r}>"

    async def comments(self) -> Sequence[ForgeComment]:
        """All comments, oldest first; all of them are our own.

        Raises:
            ForgeError: the file cannot be read.
        """
        with self._reported("read"):
            parts = self._read()[1]
        return [
            ForgeComment(str(one.number), "replanning", one.body, when(one.at), own=True, notice=True) for one in parts
        ]

    async def post(self, body: str) -> str:
        """Write a comment below the others.

        Raises:
            ForgeError: the file cannot be written.
        """
        with self._reported("written"):
            before, parts = self._read()
            number = 1 + max((one.number for one in parts), default=0)
            at = datetime.fromtimestamp(self._clock.now(), UTC).isoformat(timespec="seconds")
            self._write(before, [*parts, _Part(number, at, body)])
        return str(number)

    async def edit(self, comment_id: str, body: str) -> None:
        """Put another text in the place of a comment's.

        Raises:
            ForgeError: there is no such comment, or the file cannot be written.
        """
        with self._reported("written"):
            before, parts = self._read()
            if all(str(one.number) != comment_id for one in parts):
                raise ForgeError(f"{self.path} has no comment {comment_id}", status=404)
            edited = [one._replace(body=body) if str(one.number) == comment_id else one for one in parts]
            self._write(before, edited)

    async def aclose(self) -> None:
        """Nothing is held open."""

    def _read(self) -> tuple[str, list[_Part]]:
        """What stands before the first comment, and the comments."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return "", []
        lines = list(_LINE.finditer(text))
        ends = [*(line.start() for line in lines[1:]), len(text)]
        parts = (
            [
                _Part(int(line[1]), line[2], text[line.end() : end].strip("\n"))
                for line, end in zip(lines, ends, strict=True)
            ]
            if lines
            else []
        )
        return text[: lines[0].start()] if lines else text, parts

    def _write(self, before: str, parts: Sequence[_Part]) -> None:
        texts = (f"<!-- comment {one.number} at {one.at} -->\n\n{_other(one.body)}\n" for one in parts)
        whole = "\n".join([*([before.rstrip("\n") + "\n"] if before.strip() else []), *texts])
        path = self.path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        new.write_text(whole, encoding="utf-8")
        new.replace(path)

    @contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, UnicodeError) as error:
            raise ForgeError(f"{self.path} cannot be {what}: {getattr(error, 'strerror', None) or error}") from error


def _other(body: str) -> str:
    """A text none of whose lines is taken for the beginning of a comment."""
    return _LOOKS_LIKE_ONE.sub("<!--comment ", body)
