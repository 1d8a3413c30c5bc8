"""What stands unseen in comments, by which our own are told from those of people, and from one another. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple, Protocol, runtime_checkable
from urllib.parse import quote, unquote

from replanning.errors import ReplanningError

AUTHORSHIP_MARKER: Final = "\n\n<!-- written by replanning -->"
"""What forges put behind everything that they write, where nobody sees it, and take off again when they read: people
may write with the same account, and what we have written ourselves is never taken for their word."""


class Marker(NamedTuple):
    """What a comment of ours is, as a mark says that nobody sees.

    Attributes:
        kind: of notice, or `checklist`.
        run: whose it is.
        subject: what in the run it is about, such as a replan or a question.
    """

    kind: str
    run: str
    subject: str = ""

    @property
    def question(self) -> str:
        """The id of the question that it puts to people; empty where it puts none."""
        return self.subject if self.kind in ("clarification", "question") else ""

    def __str__(self) -> str:
        return f"<!-- replanning notice={self.kind} run={_quote_value(self.run)} about={_quote_value(self.subject)} -->"


_MARKER_PATTERN: Final = re.compile(r"^<!-- replanning notice=([a-z]+) run=(\S*) about=(\S*) -->\s*$", re.MULTILINE)

_AUTHORSHIP_PATTERN: Final = re.compile(rf"\s*^{re.escape(AUTHORSHIP_MARKER.strip())}[ \t]*$", re.MULTILINE)


def find_marker(body: str) -> Marker | None:
    """The last mark in a comment; None where there is none. It counts in comments of our own alone.

    Nothing that we quote can have one. People may write something behind it when they edit the comment.
    """
    found = _MARKER_PATTERN.findall(body)
    return Marker(found[-1][0], unquote(found[-1][1]), unquote(found[-1][2])) if found else None


def strip_authorship(body: str) -> tuple[str, bool]:
    """A comment without the mark of what is written here, and whether it had one, outside of what it quotes."""
    text = _AUTHORSHIP_PATTERN.sub("", body)
    return (text.rstrip(), True) if text != body else (body, False)


def _quote_value(text: str) -> str:
    return quote(text, safe="").replace("--", "-%2D")


MAX_COMMENT_CHARS: Final = 65_536 - len(AUTHORSHIP_MARKER)
"""Characters of one comment beyond which GitHub refuses it; no forge is given more."""


@dataclass(frozen=True, slots=True)
class ForgeComment:
    """A comment as a forge has it.

    Attributes:
        id: by which it is edited.
        author: the login of whoever wrote it.
        body: its text, in Markdown.
        at: when it was written, in UTC.
        own: whether it was written by the account that the forge posts as; what others write proves nothing.
        notice: whether it was written by that account through us, and not by a person with the same account.
        bot: whether a program wrote it; so did whoever bears our mark, and is another account.
        role: what the author is to the project, in the words of the forge, where that stands in the comment.
    """

    id: str
    author: str
    body: str
    at: datetime
    own: bool = False
    notice: bool = False
    bot: bool = False
    role: str = ""

    @property
    def question(self) -> str:
        """The id of the question that this puts to people as a notice of ours; empty where it puts none."""
        mark = find_marker(self.body) if self.notice else None
        return mark.question if mark is not None else ""


class ForgeError(ReplanningError):
    """A forge did not do what was asked; it can be tried again unless that is said to be in vain.

    Attributes:
        status: of the HTTP answer, if there was one.
        retry_after: seconds before which trying again is in vain; None where it is not known.
        final: whether trying again is in vain however long one waits: no such issue, no right to write there.
        request_id: by which the forge finds the request.
        excerpt: of what it answered, without secrets.
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
        said = f"{message} ({', '.join(facts)})" if facts else message
        super().__init__(f"{said}: {excerpt}" if excerpt else said)
        self.status = status
        self.retry_after = retry_after
        self.final = final
        self.request_id = request_id
        self.excerpt = excerpt


@runtime_checkable
class Forge(Protocol):
    """The comments of one issue or merge request; every method raises a `ForgeError` where it fails.

    A call tries again what may pass within its one deadline, and never writes anything twice; after that, whoever
    calls decides whether and when to try again.
    """

    name: str

    async def comments(self) -> Sequence[ForgeComment]:
        """All comments, oldest first; cheap when nothing has changed."""
        ...

    async def post(self, body: str) -> str:
        """Write a new comment, and say its id."""
        ...

    async def edit(self, comment_id: str, body: str) -> None:
        """Put another text in the place of a comment's."""
        ...

    async def aclose(self) -> None:
        """Let go of connections."""
        ...


def is_same_text(one: str, other: str) -> bool:
    """Whether two texts differ in nothing that forges change by themselves."""
    return one.replace("\r\n", "\n").strip() == other.replace("\r\n", "\n").strip()


def parse_time(text: str) -> datetime:
    """The moment that a text names, in UTC; the epoch where it names none."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        at = datetime.fromtimestamp(0, UTC)
    return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)
