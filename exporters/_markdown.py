"""Text of models, tools and people as Markdown that is that text and nothing else. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from replanning.exporters._forge import MAX_BODY
from replanning.interfaces import Redactor

_APART: Final = "\u200b"
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
_BEGINS: Final = re.compile(r"(\d{1,9}(?=[.)])|(?=[-+=#/]))")
"""What is a list, a heading or a command to the forge, where a line begins with it."""

_ESCAPED: Final = str.maketrans({**{mark: f"\\{mark}" for mark in "\\`*[]|~$"}, "<": "&lt;", ">": "&gt;", "&": "&amp;"})
_JOINERS: Final = "\u200c\u200d"
"""Invisible, and part of how some scripts are written."""

_MOST: Final = 20
"""Points of one list that are shown."""

_LIMITS: Final = (2_000, 400, 100, 20)
"""How much of each text is shown, until everything fits."""

_redactor: Final = Redactor()


def clean(text: str, limit: int) -> str:
    """A text on one line, without secrets and without what is not seen, cut where it is long."""
    words = " ".join(_redactor.text(text[: 20 * limit]).split())
    seen = "".join(c for c in words if c.isprintable() or c in _JOINERS)
    return seen if len(seen) <= limit and len(text) <= 20 * limit else f"{seen[: limit - 1]}…"


@lru_cache(1024)
def line(text: str, limit: int) -> str:
    """Markdown that shows this text on one line; it links to nothing, and calls nobody."""
    apart = _REFERENCES.sub(lambda match: f"{match[0]}{_APART}", clean(text, limit))
    marked = _EMPHASIS.sub(r"\\_", apart.translate(_ESCAPED))
    return _BEGINS.sub(lambda match: f"{match[0]}\\", marked, count=1) if _BEGINS.match(marked) else marked


def field(name: str, text: str, limit: int) -> str:
    """A name with what it is; what is not known is a dash."""
    return f"**{name}**: {line(text, limit) or '—'}"


def points(name: str, texts: Iterable[str], limit: int, *, after: str = "", numbered: bool = False) -> str:
    """A name with several points; `none` where there are none.

    Args:
        name: what they are.
        texts: the points.
        limit: characters of each.
        after: stands, as it is, between the name and the points.
        numbered: whether they are counted.
    """
    lines = [shown for text in texts if (shown := line(text, limit))]
    if not lines:
        return f"**{name}**{after}: none"
    more = [f"… and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
    listed = (f"{f'{number}.' if numbered else '-'} {one}" for number, one in enumerate(lines[:_MOST] + more, 1))
    return "\n".join([f"**{name}**{after}:", *listed])


def fitting(build: Callable[[int], str], room: int = MAX_BODY) -> str:
    """What is built with the longest texts that still fit.

    Args:
        build: makes the whole of texts of at most so many characters.
        room: characters that there are.
    """
    text = ""
    for limit in _LIMITS:
        text = build(limit)
        if len(text) <= room:
            break
    return text[:room]


def moment(at: float) -> str:
    """A point in time, in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
