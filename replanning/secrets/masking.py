"""Masking of secrets in a text, also of those behind terminal colours and the escapes of JSON and of `repr`."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Final

from replanning.secrets.rules import Span, find_secrets

MASK: Final = "[redacted]"
"""Replacement of a secret."""

_MAX_LAYERS: Final = 3
"""Most layers of escapes that are looked behind, such as a coloured line within JSON within JSON."""

MIN_KNOWN_CHARS: Final = 4
"""Shorter known values are flags rather than secrets, and would be found everywhere."""

_MIN_LINE_CHARS: Final = 8
"""Shorter lines of a known secret, such as a single bracket, occur in many texts and are not masked."""

_ESCAPE: Final = re.compile(
    r"""
    (
        \x1b (?: \[[0-?]*[ -/]*[@-~] | \][^\x07\x1b]*(?:\x07|\x1b\\)? | [ -/]*[0-~] )
      | \\ (?: u[dD][89abAB][0-9A-Fa-f]{2}\\u[dD][c-fC-F][0-9A-Fa-f]{2} | u[0-9A-Fa-f]{4}
            | x[0-9A-Fa-f]{2} | ["'/\\bfnrt] )
    )
    """,
    re.VERBOSE,
)
_LETTERS: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def mask(text: str, find: Callable[[str], list[Span]]) -> str:
    """Return a text with its secrets masked; the same object if it has none.

    Args:
        text: the text.
        find: returns the spans of secrets in a text without looking behind its escapes.
    """
    spans = _look_behind(text, find, _MAX_LAYERS)
    if not spans:
        return text
    spans.sort()
    pieces = []
    end = 0
    for start, stop in spans:
        if start >= end:
            pieces += [text[end:start], MASK]
        end = max(end, stop)
    pieces.append(text[end:])
    return "".join(pieces)


def mask_secrets(text: str) -> str:
    """Return a text without the secrets that can be recognised by themselves: by their format, or the name before them."""
    return mask(text, find_secrets)


def known_texts(values: Iterable[str]) -> tuple[str, ...]:
    """Return the texts to search for secrets known by value: each stripped, and each of its longer lines."""
    known = set()
    for value in values:
        whole = value.strip()
        if len(whole) >= MIN_KNOWN_CHARS:
            known.add(whole)
        for line in whole.splitlines():
            if len(line.strip()) >= _MIN_LINE_CHARS:
                known.add(line.strip())
    return tuple(sorted(known))


def find_known(text: str, known: Iterable[str]) -> list[Span]:
    """Return the spans of known texts."""
    spans = []
    for value in known:
        start = text.find(value)
        while start >= 0:
            end = start + len(value)
            spans.append((start, end))
            start = text.find(value, end)
    return spans


def _look_behind(text: str, find: Callable[[str], list[Span]], layers: int) -> list[Span]:
    """Return the spans of secrets in a text and behind its escapes."""
    spans = find(text)
    if not layers or ("\x1b" not in text and "\\" not in text):
        return spans
    parts = _ESCAPE.split(text)  # every second one is an escape
    if len(parts) == 1:
        return spans
    decoded = parts.copy()
    decoded[1::2] = [_unescape(escape) for escape in parts[1::2]]
    hidden = _look_behind("".join(decoded), find, layers - 1)
    if hidden:
        starts = [0, *accumulate(map(len, decoded))]
        origins = [0, *accumulate(map(len, parts))]
        spans += [_origin(span, starts, origins) for span in hidden]
    return spans


def _origin(span: Span, starts: list[int], origins: list[int]) -> Span:
    """Return the span of the original text from which a span was decoded; every second part was an escape."""
    first = bisect_right(starts, span[0]) - 1
    last = bisect_right(starts, span[1] - 1) - 1
    start = origins[first]
    if first % 2 == 0:
        start += span[0] - starts[first]
    end = origins[last + 1]
    if last % 2 == 0:
        end = origins[last] + span[1] - starts[last]
    return start, end


def _unescape(escape: str) -> str:
    """Return the text that an escape stands for; "" for colours."""
    if escape[0] == "\x1b":
        return ""
    rest = escape[1:]
    if rest[0] in "ux":
        pair = bytes.fromhex("".join(rest[1:].split("\\u")).zfill(4))
        return pair.decode("utf-16-be", "replace")
    return _LETTERS.get(rest, rest)
