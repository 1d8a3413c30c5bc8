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


_MARKER: Final = re.compile(r"<!-- replanning notice=([a-z]+) run=(\S*) about=(\S*) -->\s*\Z")


def marker_of(body: str) -> Marker | None:
    """The mark at the end of a comment; None where there is none. It counts in comments of our own alone."""
    found = _MARKER.search(body[-4_000:])
    return Marker(found[1], unquote(found[2]), unquote(found[3])) if found is not None else None


def _quoted(text: str) -> str:
    return quote(text, safe="").replace("--", "-%2D")
