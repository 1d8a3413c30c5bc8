"""What stands unseen in comments, by which our own are told from those of people, and from one another. Pure."""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

MARK: Final = "\n\n<!-- written by replanning -->"
"""What forges put behind everything that they write, where nobody sees it, and take off again when they read: people
may write with the same account, and what we have written ourselves is never taken for their word."""


class Marker(NamedTuple):
    """What a comment of ours is, as a mark says that nobody sees.

    Attributes:
        kind: of notice, or `checklist`.
        run: whose it is.
        about: what in the run it is about, such as a replan or a question.
    """

    kind: str
    run: str
    about: str = ""

    @property
    def question(self) -> str:
        """The id of the question that it puts to people; empty where it puts none."""
        return self.about if self.kind in ("clarification", "question") else ""

    def __str__(self) -> str:
        return f"<!-- replanning notice={self.kind} run={_quoted(self.run)} about={_quoted(self.about)} -->"


_MARKER: Final = re.compile(r"^<!-- replanning notice=([a-z]+) run=(\S*) about=(\S*) -->\s*$", re.MULTILINE)
_WRITTEN: Final = re.compile(rf"\s*^{re.escape(MARK.strip())}[ \t]*$", re.MULTILINE)


def marker_of(body: str) -> Marker | None:
    """The last mark in a comment; None where there is none. It counts in comments of our own alone.

    Nothing that we quote can have one. People may write something behind it when they edit the comment.
    """
    found = _MARKER.findall(body)
    return Marker(found[-1][0], unquote(found[-1][1]), unquote(found[-1][2])) if found else None


def unmarked(body: str) -> tuple[str, bool]:
    """A comment without the mark of what is written here, and whether it had one, outside of what it quotes."""
    text = _WRITTEN.sub("", body)
    return (text.rstrip(), True) if text != body else (body, False)


def _quoted(text: str) -> str:
    return quote(text, safe="").replace("--", "-%2D")
