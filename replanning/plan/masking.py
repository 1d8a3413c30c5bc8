"""Masking of secrets in a text, also of secrets behind escapes, terminal colours and encodings.

A secret that is found in decoded text is masked in the original. At most three nested encodings are decoded, so that
the time is linear in the length of any text. The rules that find secrets are in `plan/secrets.py`.
"""

from __future__ import annotations

import html
import re
import sys
from binascii import a2b_base64
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Final

from replanning.plan.secrets import MASK, Span

_MAX_NESTING: Final = 3
"""Most nested encodings that are decoded, such as a coloured line within JSON within JSON."""

_MIN_LINE_CHARS: Final = 8
"""Shorter lines of a known secret, such as a single bracket, occur in many texts and are not masked."""

_ESCAPE: Final = re.compile(
    r"""
    (
        [\\%&\x00\x1b\x9b\u00ad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]  # how each of the following begins
        (?:
            (?<=\\) (?:u[dD][89abAB][0-9A-Fa-f]{2}\\u[dD][c-fC-F][0-9A-Fa-f]{2} | u[0-9A-Fa-f]{4}
                | x[0-9A-Fa-f]{2} | 0?33 | ["'/\\bfnrte0] | \r?\n)
          | (?<=%) (?:[0-7][0-9A-Fa-f] | [89A-Fa-f][0-9A-Fa-f](?:%[89A-Fa-f][0-9A-Fa-f])*)
          | (?<=&) (?:amp|lt|gt|quot|apos|nbsp|\#[0-9]{1,7}|\#[xX][0-9A-Fa-f]{1,6});
          | (?<=\x1b) (?:\[[0-?]*[ -/]*[@-~] | \][^\x07\x1b]*(?:\x07|\x1b\\)? | [ -/]*[0-~])
          | (?<=\x9b) [0-?]*[ -/]*[@-~]
          | (?<=[^\\%&\x1b\x9b])  # characters without width
        )
    )
    """,
    re.VERBOSE,
)
_BASE64: Final = re.compile(
    r"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{20,}+(?:(?<=[A-Za-z0-9+/_-]{60})\r?\n[A-Za-z0-9+/_-]++)*+={0,2}"
)
"""A word in base64, or lines of it; without capitals it is a hash or a name, because encoded text has some."""

_LINE_WRAP: Final = re.compile(r"((?:[ \t]+[\w.]+\.py:[0-9]+)?[ \t]*\r?\n(?:[ \t]|[│|](?=[ \t]))*)")
"""Line end within text that was wrapped, with the place that loggers write at the end of the first line, and frames."""

_BETWEEN_WORDS: Final = "\n\a\n"
"""Text between decoded words; it ends lines, names and terminal titles."""

_PRINTABLE: Final = re.compile(rb"[\t\n\r\x1b -~]{8}")
_LETTERS: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "e": "\x1b", "0": "\0"}


def mask(text: str, find: Callable[[str], list[Span]], *, wrapped: bool = False) -> str:
    """Return a text with its secrets masked; the same object if it has none.

    Args:
        text: the text.
        find: returns the spans of secrets in a text, without decoding it.
        wrapped: whether secrets may also be broken by line ends.
    """
    spans = _look_through(text, find, _MAX_NESTING)
    if wrapped and len(parts := _LINE_WRAP.split(text)) > 1:
        for gaps in _unwrapped_gaps(parts):
            spans += _look_through_split(parts, gaps, find, _MAX_NESTING)
    if not spans:
        return text
    spans.sort()
    pieces, end = list[str](), 0
    for start, stop in spans:
        if start >= end:
            pieces += [text[end:start], MASK]
        end = max(end, stop)
    return "".join([*pieces, text[end:]])


def known_texts(values: Iterable[str], least: int) -> tuple[str, ...]:
    """Return the texts to search for secrets known by value: each stripped, and each of its longer lines.

    Each is also searched for with its escapes decoded, as `echo` prints them, and in hexadecimal digits.

    Args:
        values: the secrets.
        least: fewest characters of a secret; shorter ones are left out.
    """
    known = [
        text.strip()
        for value in values
        for text in (value, _ESCAPE.sub(lambda found: _unescape(found[0]), value))
    ]
    lines = {line.strip() for value in known for line in value.splitlines()}
    found = {value for value in known if len(value) >= least} | {
        line for line in lines if len(line) >= _MIN_LINE_CHARS
    }
    digits = [value.encode(errors="surrogateescape").hex() for value in found]
    return tuple(sorted({*found, *digits, *map(str.upper, digits)}))


def find_known(text: str, known: Iterable[str]) -> list[Span]:
    """Return the spans of known texts."""
    return [
        match.span()
        for value in known
        if value in text
        for match in re.finditer(re.escape(value), text)
    ]


def _unwrapped_gaps(parts: list[str]) -> Iterator[list[str]]:
    """Yield what may have been at each of the line ends between lines: nothing, within a word, or a blank.

    At first the same at each. Then, for secrets with both, nothing at the ends of the longest lines of each block, since
    words are broken where the width ends; and lastly nothing only if such a line is a single word.
    """
    lines, line_ends = parts[::2], parts[1::2]
    yield [""] * len(line_ends)
    yield [" "] * len(line_ends)
    indents = [len(end) - end.rfind("\n") - 1 for end in line_ends]
    edges = [indent + len(line) for indent, line in zip([0, *indents], lines, strict=True)]
    full: list[bool] = []
    for _, block in groupby(indents):  # of the lines after the first
        count = len(list(block))
        around = edges[len(full) : len(full) + count + 1]
        full += [edge == max(around) for edge in around[:-1]]
    yield ["" if is_full else " " for is_full in full]
    yield [
        "" if is_full and " " not in line else " "
        for is_full, line in zip(full, lines, strict=False)
    ]


def _look_through(text: str, find: Callable[[str], list[Span]], nesting: int) -> list[Span]:
    spans = find(text)
    if not nesting:
        return spans
    if len(parts := _ESCAPE.split(text)) > 1:
        spans += _look_through_split(parts, map(_unescape, parts[1::2]), find, nesting - 1)
    decoded, words = [], []
    for match in _BASE64.finditer(text) if text != text.lower() else ():
        for inner in () if match[0].islower() else _decode_base64(match[0]):
            decoded += [inner, _BETWEEN_WORDS]
            words.append(match.span())
    if decoded and (
        hidden := _look_through("".join(decoded), find, nesting - 1)
    ):  # at once: words may be many
        starts = [0, *accumulate(map(len, decoded))][::2]
        for start, end in hidden:
            spans += words[bisect_right(starts, start) - 1 : bisect_right(starts, end - 1)]
    return spans


def _look_through_split(
    parts: list[str], replacements: Iterable[str], find: Callable[[str], list[Span]], nesting: int
) -> list[Span]:
    """Return the spans of secrets in a text whose every second part is replaced."""
    decoded = parts.copy()
    decoded[1::2] = replacements
    hidden = _look_through("".join(decoded), find, nesting)
    starts, origins = (
        ([0, *accumulate(map(len, pieces))] for pieces in (decoded, parts)) if hidden else ([], [])
    )
    return [_origin(span, starts, origins) for span in hidden]


def _origin(span: Span, starts: list[int], origins: list[int]) -> Span:
    """Return the span of the original text from which a span was decoded; every second part was an escape."""
    first, last = bisect_right(starts, span[0]) - 1, bisect_right(starts, span[1] - 1) - 1
    start = origins[first] if first % 2 else origins[first] + span[0] - starts[first]
    end = origins[last + 1] if last % 2 else origins[last] + span[1] - starts[last]
    return start, end


@lru_cache(4096)
def _unescape(escape: str) -> str:
    """Return the text that an escape stands for; "" for colours and for characters without width."""
    kind, rest = escape[0], escape[1:]
    if kind == "%":
        return bytes.fromhex(escape.replace("%", "")).decode(errors="replace")
    if kind == "&":
        return _character(rest[1:-1]) if rest[0] == "#" else html.unescape(escape)
    if kind != "\\" or rest in ("\n", "\r\n"):
        return ""
    if rest in ("33", "033"):
        return "\x1b"
    if len(rest) > 1:
        pair = bytes.fromhex("".join(rest[1:].split("\\u")).zfill(4))
        return pair.decode("utf-16-be", "replace")
    return _LETTERS.get(rest, rest)


def _character(code: str) -> str:
    """Return the character with a code such as `61` or `x3d`."""
    number = int(code[1:], 16) if code[0] in "xX" else int(code)
    return chr(number) if number <= sys.maxunicode and not 0xD800 <= number < 0xE000 else "\ufffd"


def _decode_base64(word: str) -> Iterator[str]:
    """Yield the texts in a base64 word, wherever in it they begin: it may be glued to another word."""
    plain = word.rstrip("=").replace("-", "+").replace("_", "/").replace("\r", "").replace("\n", "")
    for start in range(4):
        part = plain[start:]
        data = a2b_base64(part[: len(part) - (len(part) % 4 == 1)] + "==").replace(
            b"\0", b""
        )  # UTF-16 has them
        if _PRINTABLE.search(data):
            yield data.decode(errors="replace")
