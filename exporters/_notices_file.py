"""A Markdown file as a forge: for everybody who follows runs without one."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from stat import S_ISREG
from typing import Final, NamedTuple, TypeGuard

from replanning import Environment
from replanning.exporters._forge import ForgeComment, ForgeError, parse_time
from replanning.interfaces import Clock

_COMMENT_PATTERN: Final = re.compile(
    r"^<!-- comment (?P<number>\d{1,9}) at (?P<at>\S{1,40}) -->\n"
    r"(?P<body>.*?)"
    r"(?:^<!-- end of comment (?P=number) -->(?:\n|\Z)|(?=^<!-- comment \d)|\Z)",
    re.MULTILINE | re.DOTALL,
)
_COMMENT_DELIMITER: Final = re.compile(r"^<!-- (?=comment |end of comment )", re.MULTILINE)


class _StoredComment(NamedTuple):
    number: int
    at: str
    body: str

    def __str__(self) -> str:
        return (
            f"<!-- comment {self.number} at {self.at} -->\n\n{_escape_delimiters(self.body)}\n\n"
            f"<!-- end of comment {self.number} -->\n"
        )


class FileForge:
    """The comments of one file, one below the other; lines that Markdown does not show stand around each.

    The file is read anew each time, and put into its place as a whole, so that a crash leaves it as it was. What people
    write around the comments stays. One process at a time may write to the file.

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
        with self._translated_errors("read"):
            found = _stored_comments(self._read())
        return [
            ForgeComment(str(one.number), "replanning", one.body, parse_time(one.at), own=True, notice=True)
            for one in found
        ]

    async def post(self, body: str) -> str:
        """Write a comment below the others.

        Raises:
            ForgeError: the file cannot be written.
        """
        with self._translated_errors("written"):
            pieces = self._read()
            number = 1 + max((one.number for one in _stored_comments(pieces)), default=0)
            at = datetime.fromtimestamp(self._clock.now(), UTC).isoformat(timespec="seconds")
            apart = "" if not pieces or str(pieces[-1]).endswith("\n\n") else "\n"
            self._write([*pieces, apart, _StoredComment(number, at, body)])
        return str(number)

    async def edit(self, comment_id: str, body: str) -> None:
        """Put another text in the place of a comment's.

        Raises:
            ForgeError: there is no such comment, or the file cannot be written.
        """
        with self._translated_errors("written"):
            pieces = self._read()
            if all(str(one.number) != comment_id for one in _stored_comments(pieces)):
                raise ForgeError(f"{self.path} has no comment {comment_id}", status=404)
            self._write([one._replace(body=body) if _has_id(one, comment_id) else one for one in pieces])

    def write_error(self) -> str:
        """Why the file cannot be written, found by trying; empty where it can be."""
        try:
            with self._translated_errors("written"):
                self._read()
                with self._temporary_file():
                    pass
        except ForgeError as error:
            return str(error)
        return ""

    async def aclose(self) -> None:
        """Nothing is held open."""

    def _read(self) -> list[str | _StoredComment]:
        """The comments, and whatever else stands before, between and after them."""
        try:
            if not S_ISREG(self.path.stat().st_mode):  # to read a pipe would take for ever
                raise OSError(errno.EINVAL, "it is no file")
        except FileNotFoundError:
            return []
        text, end, pieces = self.path.read_text(encoding="utf-8-sig"), 0, list[str | _StoredComment]()
        for found in _COMMENT_PATTERN.finditer(text):
            pieces += [text[end : found.start()]] if found.start() > end else []
            pieces.append(_StoredComment(int(found["number"]), found["at"], found["body"].strip("\n")))
            end = found.end()
        return [*pieces, text[end:]] if text[end:] else pieces

    def _write(self, pieces: Sequence[str | _StoredComment]) -> None:
        with self._temporary_file() as new:
            new.write_text("".join(map(str, pieces)), encoding="utf-8")
            new.replace(self.path.resolve())

    @contextmanager
    def _temporary_file(self) -> Iterator[Path]:
        """An empty file beside this one, with its permissions, which may take its place; else it is gone afterwards."""
        path = self.path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        try:
            new.write_text("")
            if path.exists():
                shutil.copymode(path, new)
                new.open("a").close()  # nor is a file written to that may only be read
            yield new
        finally:
            new.unlink(missing_ok=True)

    @contextmanager
    def _translated_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, UnicodeError) as error:
            raise ForgeError(f"{self.path} cannot be {what}: {getattr(error, 'strerror', None) or error}") from error


def _stored_comments(pieces: Sequence[str | _StoredComment]) -> list[_StoredComment]:
    return [one for one in pieces if isinstance(one, _StoredComment)]


def _has_id(piece: str | _StoredComment, comment_id: str) -> TypeGuard[_StoredComment]:
    return isinstance(piece, _StoredComment) and str(piece.number) == comment_id


def _escape_delimiters(body: str) -> str:
    """A text none of whose lines is taken for the beginning or the end of a comment."""
    lines = body.replace("\r\n", "\n").replace("\r", "\n")  # as whoever reads the file gets them
    return _COMMENT_DELIMITER.sub("<!--", lines)
