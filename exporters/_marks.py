"""What stands unseen in comments, by which our own are told from those of people, and from one another. Pure."""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

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
