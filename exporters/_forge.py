"""Comments on a forge: hidden markers, the forge protocol, and an index for writing each once."""

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
"""Hidden line at the end of every comment that this tool writes.

It distinguishes notices from comments that people write with the same account. Forges add it on
writing and remove it on reading.
"""


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
        run = _quote_value(self.run)
        subject = _quote_value(self.subject)
        return f"<!-- replanning notice={self.kind} run={run} about={subject} -->"


_MARKER_PATTERN: Final = re.compile(
    r"^<!-- replanning notice=([a-z]+) run=(\S*) about=(\S*) -->\s*$", re.MULTILINE
)

_AUTHORSHIP_PATTERN: Final = re.compile(
    rf"(?<!\s)\s*^{re.escape(AUTHORSHIP_MARKER.strip())}[ \t]*$", re.MULTILINE
)


def find_marker(body: str) -> Marker | None:
    """Return the last marker in a comment, if any.

    It is valid only in comments of the tool's own account. Quoted texts never contain one, but
    people may edit a comment and write something after it.
    """
    markers = _MARKER_PATTERN.findall(body)
    if not markers:
        return None
    kind, run, subject = markers[-1]
    return Marker(kind, unquote(run), unquote(subject))


def strip_authorship(body: str) -> tuple[str, bool]:
    """Return a comment without its authorship marker, and whether it had one outside of quotes."""
    text = _AUTHORSHIP_PATTERN.sub("", body)
    if text == body:
        return body, False
    return text.rstrip(), True


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
        if not self.notice:
            return ""
        marker = find_marker(self.body)
        return "" if marker is None else marker.question


class ForgeError(ReplanningError):
    """A request to a forge failed.

    Attributes:
        status: HTTP status of the response, if any.
        retry_after: seconds to wait before the next attempt, if known.
        final: true if retrying is useless: no such issue, or no permission.
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
        facts: list[str] = []
        if status is not None:
            facts.append(f"HTTP {status}")
        if request_id:
            facts.append(f"request {request_id}")
        text = message
        if facts:
            text += f" ({', '.join(facts)})"
        if excerpt:
            text += f": {excerpt}"
        super().__init__(text)
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
    """Return whether two texts differ at most in line ends and outer space, which forges change."""
    return one.replace("\r\n", "\n").strip() == other.replace("\r\n", "\n").strip()


def parse_time(text: str) -> datetime:
    """Return an ISO time in UTC; the epoch if it is invalid."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        at = datetime.fromtimestamp(0, UTC)
    return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)


class CommentIndex:
    """Index of the comments on a forge by marker; writes each comment once.

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
                return await self._write(marker, body, edits=edits)
            except BaseException:
                self._posted = None  # the request may have had an effect
                raise

    async def _write(self, marker: Marker, body: str, *, edits: bool) -> bool:
        """Write a comment that is new, edit one, or write it again if it was deleted."""
        if self._posted is None:
            self._posted = await self._read_posted()
        comment_id, old = self._posted.get(marker, ("", ""))
        if comment_id:
            if not edits or is_same_text(old, body):
                return False
            if await self._edit(comment_id, body):
                self._posted[marker] = (comment_id, body)
                return True
        self._posted[marker] = (await self.forge.post(body), body)
        return True

    async def _read_posted(self) -> dict[Marker, tuple[str, str]]:
        """Return the first comment with each marker."""
        posted: dict[Marker, tuple[str, str]] = {}
        for comment in await self.forge.comments():
            marker = find_marker(comment.body)
            if comment.own and marker is not None:
                posted.setdefault(marker, (comment.id, comment.body))
        return posted

    async def _edit(self, comment_id: str, body: str) -> bool:
        """Replace the text of a comment; return false if somebody has deleted it."""
        try:
            await self.forge.edit(comment_id, body)
        except ForgeError as error:
            if error.status not in (404, 410):
                raise
            for comment in await self.forge.comments():
                if comment.id == comment_id:
                    raise
            return False
        return True
