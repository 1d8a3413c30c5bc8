"""Comments on a forge: their hidden markers, the forge protocol, and an index that writes each comment once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple, Protocol, runtime_checkable
from urllib.parse import quote, unquote

import anyio

from replanning.errors import ReplanningError
from replanning.planning.steering import SteeringComment

AUTHORSHIP_MARKER: Final = "\n\n<!-- written by replanning -->"
"""Hidden line at the end of every comment that this tool writes; forges add it on writing and remove it on reading.

It distinguishes notices from comments that people write with the same account."""


class Marker(NamedTuple):
    """Hidden marker that identifies a comment written by this tool.

    Attributes:
        kind: kind of the notice, or `checklist`.
        run: id of the run.
        subject: id of the replan, question or record that the notice is about.
    """

    kind: str
    run: str
    subject: str = ""

    @property
    def question(self) -> str:
        """Id of the question that the notice asks; empty for other notices."""
        return self.subject if self.kind in ("clarification", "question") else ""

    def __str__(self) -> str:
        return f"<!-- replanning notice={self.kind} run={_quote_value(self.run)} about={_quote_value(self.subject)} -->"


_MARKER_PATTERN: Final = re.compile(
    r"^<!-- replanning notice=([a-z]+) run=(\S*) about=(\S*) -->\s*$", re.MULTILINE
)

_AUTHORSHIP_PATTERN: Final = re.compile(
    rf"(?<!\s)\s*^{re.escape(AUTHORSHIP_MARKER.strip())}[ \t]*$", re.MULTILINE
)


def find_marker(body: str) -> Marker | None:
    """Return the last marker in a comment, if any. It is valid only in comments of the tool's own account.

    Quoted texts never contain one, but people may edit a comment and write something after it.
    """
    markers = _MARKER_PATTERN.findall(body)
    return (
        Marker(markers[-1][0], unquote(markers[-1][1]), unquote(markers[-1][2]))
        if markers
        else None
    )


def strip_authorship(body: str) -> tuple[str, bool]:
    """Return a comment without its authorship marker, and whether it had one outside of quotes."""
    text = _AUTHORSHIP_PATTERN.sub("", body)
    return (text.rstrip(), True) if text != body else (body, False)


def _quote_value(text: str) -> str:
    return quote(text, safe="").replace("--", "-%2D")


MAX_COMMENT_CHARS: Final = 65_536 - len(AUTHORSHIP_MARKER)
"""Longest comment in characters; GitHub refuses longer ones."""


@dataclass(frozen=True, slots=True)
class ForgeComment(SteeringComment):
    """Comment on a forge.

    Attributes:
        own: true if the forge's own account wrote it; only then are markers valid.
        bot: true if a program wrote it, such as this tool with another account.
        role: the author's role in the project, as the forge calls it; empty if the comment does not
            name it.
    """

    own: bool = False
    bot: bool = False
    role: str = ""

    @property
    def question(self) -> str:
        """Id of the question that a notice asks; empty for other comments."""
        marker = find_marker(self.body) if self.notice else None
        return marker.question if marker is not None else ""


class ForgeError(ReplanningError):
    """A request to a forge failed.

    Attributes:
        status: HTTP status of the response, if there was one.
        retry_after: seconds to wait before another try, if known.
        final: true if trying again is useless: no such issue, or no permission.
        request_id: the forge's id of the request.
        excerpt: beginning of the response, without secrets.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        retry_after: float | None = None,
        final: bool = False,
        request_id: str = "",
        excerpt: str = "",
    ) -> None:
        facts = [f"HTTP {status}"] if status is not None else []
        facts += [f"request {request_id}"] if request_id else []
        text = f"{message} ({', '.join(facts)})" if facts else message
        super().__init__(f"{text}: {excerpt}" if excerpt else text)
        self.status = status
        self.retry_after = retry_after
        self.final = final
        self.request_id = request_id
        self.excerpt = excerpt


@runtime_checkable
class Forge(Protocol):
    """The comments of one issue or merge request; every method raises a `ForgeError` if it fails.

    Each call retries temporary failures within its deadline, and never writes anything twice.
    """

    name: str

    async def comments(self) -> Sequence[ForgeComment]:
        """Return all comments, oldest first; cheap when nothing has changed."""
        ...

    async def post(self, body: str) -> str:
        """Write a new comment and return its id."""
        ...

    async def edit(self, comment_id: str, body: str) -> None:
        """Replace the text of a comment."""
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


def is_same_text(one: str, other: str) -> bool:
    """Return whether two texts are equal but for line ends and outer white space, which forges change."""
    return one.replace("\r\n", "\n").strip() == other.replace("\r\n", "\n").strip()


def parse_time(text: str) -> datetime:
    """Return an ISO time in UTC; the epoch if it is invalid."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        at = datetime.fromtimestamp(0, UTC)
    return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)


class CommentIndex:
    """Index of the comments on a forge by marker, which writes each of them once.

    The comments are read before the first is written, and again after any failure, because a failed
    request may have had an effect.

    Args:
        forge: the forge.
    """

    def __init__(self, forge: Forge) -> None:
        self.forge = forge
        self._posted: dict[Marker, tuple[str, str]] | None = None  # id and text of each comment
        self._lock = anyio.Lock()

    def __repr__(self) -> str:
        state = "not read" if self._posted is None else f"{len(self._posted)} comments"
        return f"<CommentIndex of {self.forge.name!r} {state}>"

    async def write(self, marker: Marker, body: str, *, edits: bool = False) -> bool:
        """Write a comment unless it exists; with `edits`, replace the text of an existing one.

        Returns:
            True if anything was written.

        Raises:
            ForgeError: the comments cannot be read or written.
        """
        async with self._lock:
            try:
                if self._posted is None:
                    self._posted = {}
                    for comment in await self.forge.comments():
                        if comment.own and (found := find_marker(comment.body)) is not None:
                            self._posted.setdefault(found, (comment.id, comment.body))
                comment_id, old = self._posted.get(marker, ("", ""))
                if comment_id and (not edits or is_same_text(old, body)):
                    return False
                if comment_id:
                    try:
                        await self.forge.edit(comment_id, body)
                    except ForgeError as error:
                        is_deleted = error.status in (404, 410) and all(
                            comment.id != comment_id for comment in await self.forge.comments()
                        )
                        if not is_deleted:
                            raise
                        comment_id = ""
                self._posted[marker] = (comment_id or await self.forge.post(body), body)
            except BaseException:
                self._posted = None  # the request may have had an effect
                raise
        return True
