"""Text of models, tools and people as Markdown that is that text and nothing else. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from replanning.exporters._forge import MAX_COMMENT_CHARS
from replanning.interfaces import Redactor

_ZERO_WIDTH_SPACE: Final = "\u200b"
"""Stands, unseen, where forges would otherwise make something else of what is before and behind it: a link, a picture, a
call of somebody."""

_REFERENCES: Final = re.compile(
    r"@|(?<=:)(?=//)"  # somebody; an address
    r"|[#!%~&$^](?=[\w\"{])"  # issues, merge requests, milestones, labels, epics, snippets, alerts
    r"|\b(?:GH-(?=\d)|www(?=\.))"
    r"|:(?=[a-z+-][\w+-]*:)",  # pictures that stand for words
    re.IGNORECASE,
)
_EMPHASIS: Final = re.compile(r"(?<![^\W_])_|_(?![^\W_])")
_BLOCK_START: Final = re.compile(r"(\d{1,9}(?=[.)])|(?=[-+=#/]))")
"""What is a list, a heading or a command to the forge, where a line begins with it."""

_ESCAPES: Final = str.maketrans({**{mark: f"\\{mark}" for mark in "\\`*[]|~$"}, "<": "&lt;", ">": "&gt;", "&": "&amp;"})
_ZERO_WIDTH_JOINERS: Final = "\u200c\u200d"
"""Invisible, and part of how some scripts are written."""

_MAX_LIST_ITEMS: Final = 20
"""Points of one list that are shown."""

_TEXT_LIMITS: Final = (2_000, 400, 100, 20)
"""How much of each text is shown, until everything fits."""

_redactor: Final = Redactor()


def plain_line(text: str, limit: int) -> str:
    """A text on one line, without secrets and without what is not seen, cut where it is long."""
    words = " ".join(_redactor.text(text[: 20 * limit]).split())
    seen = "".join(c for c in words if c.isprintable() or c in _ZERO_WIDTH_JOINERS)
    return seen if len(seen) <= limit and len(text) <= 20 * limit else f"{seen[: limit - 1]}…"


@lru_cache(1024)
def markdown_line(text: str, limit: int) -> str:
    """Markdown that shows this text on one line; it links to nothing, and calls nobody."""
    apart = _REFERENCES.sub(lambda match: f"{match[0]}{_ZERO_WIDTH_SPACE}", plain_line(text, limit))
    marked = _EMPHASIS.sub(r"\\_", apart.translate(_ESCAPES))
    return _BLOCK_START.sub(lambda match: f"{match[0]}\\", marked, count=1) if _BLOCK_START.match(marked) else marked


def markdown_field(name: str, text: str, limit: int) -> str:
    """A name with what it is; what is not known is a dash."""
    return f"**{name}**: {markdown_line(text, limit) or '—'}"


def markdown_list(name: str, texts: Iterable[str], limit: int, *, after: str = "", numbered: bool = False) -> str:
    """A name with several points; `none` where there are none.

    Args:
        name: what they are.
        texts: the points.
        limit: characters of each.
        after: stands, as it is, between the name and the points.
        numbered: whether they are counted.
    """
    lines = [shown for text in texts if (shown := markdown_line(text, limit))]
    if not lines:
        return f"**{name}**{after}: none"
    more = [f"… and {len(lines) - _MAX_LIST_ITEMS} more"] if len(lines) > _MAX_LIST_ITEMS else []
    listed = (
        f"{f'{number}.' if numbered else '-'} {one}" for number, one in enumerate(lines[:_MAX_LIST_ITEMS] + more, 1)
    )
    return "\n".join([f"**{name}**{after}:", *listed])


def fit_text(build: Callable[[int], str], room: int = MAX_COMMENT_CHARS) -> str:
    """What is built with the longest texts that still fit.

    Args:
        build: makes the whole of texts of at most so many characters.
        room: characters that there are.
    """
    text = ""
    for limit in _TEXT_LIMITS:
        text = build(limit)
        if len(text) <= room:
            break
    return text[:room]


def format_time(at: float) -> str:
    """A point in time, in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
