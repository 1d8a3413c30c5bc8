"""A forge in memory that does what a test says, and a reader of Markdown that knows nothing of what wrote it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.token import Token

from replanning.exporters.notices import ForgeComment, ForgeError

AT: Final = datetime(2026, 1, 1, tzinfo=UTC)


class Issue:
    """The comments of an issue, in memory, as a forge.

    Args:
        errors: what the next calls that write raise, in order; nothing where None stands.
        effective: whether a comment whose writing raises is there nevertheless.

    Attributes:
        kept: the comments.
        posts: how many comments were written.
        edits: how many edits there were.
        reads: how often all comments were read.
        closed: whether it was closed.
    """

    def __init__(self, errors: Sequence[BaseException | None] = (), *, effective: bool = False) -> None:
        self.name = "fake"
        self.kept: list[ForgeComment] = []
        self.errors = list(errors)
        self.posts = self.edits = self.reads = 0
        self.closed = False
        self._effective = effective

    async def comments(self) -> Sequence[ForgeComment]:
        """All comments."""
        self.reads += 1
        return tuple(self.kept)

    async def post(self, body: str) -> str:
        """Write one."""
        error = self.errors.pop(0) if self.errors else None
        if error is None or self._effective:
            self.posts += 1
            self.add(body, own=True)
        if error is not None:
            raise error
        return self.kept[-1].id

    async def edit(self, comment_id: str, body: str) -> None:
        """Edit one."""
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        if all(one.id != comment_id for one in self.kept):
            raise ForgeError("there is no such comment", status=404, final=True)
        self.edits += 1
        self.kept = [replace(one, body=body) if one.id == comment_id else one for one in self.kept]

    async def aclose(self) -> None:
        """Remember that it was closed."""
        self.closed = True

    def add(self, body: str, *, own: bool, author: str = "bot") -> None:
        """What somebody writes."""
        number = 1 + max((int(one.id) for one in self.kept), default=0)
        self.kept.append(ForgeComment(str(number), author, body, AT, own=own))

    def titles(self) -> list[str]:
        """What the first line of each comment says."""
        return [one.body.partition("\n")[0].removeprefix("## ") for one in self.kept]

    def body(self, title: str) -> str:
        """The only comment whose heading begins so."""
        (found,) = [one.body for one in self.kept if one.body.startswith(f"## {title}")]
        return found


@dataclass(frozen=True)
class Read:
    """What a reader of a comment sees.

    Attributes:
        headings: their texts, with their level.
        ticks: for each box, whether it is ticked.
        details: how many blocks can be folded.
        html: tags and HTML comments.
        other: everything else that Markdown can make of text: links, images, code, quotes, rules, tables.
        calls: people who are called, what is referred to, addresses.
        commands: lines that a forge takes for commands.
        text: what is seen.
    """

    headings: tuple[str, ...]
    ticks: tuple[bool, ...]
    details: int
    html: tuple[str, ...]
    other: tuple[str, ...]
    calls: tuple[str, ...]
    commands: tuple[str, ...]
    text: str

    @property
    def shape(self) -> Mapping[str, object]:
        """All of it but the words."""
        return {name: value for name, value in vars(self).items() if name != "text"}


_READER: Final = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
_PLAIN: Final = frozenset(
    {"heading", "paragraph", "list_item", "bullet_list", "ordered_list", "strong", "em", "text", "softbreak", "inline"}
)
_CALLS: Final = re.compile(r"@\w[\w-]*|[#!&%$]\d+|~\w+|\bGH-\d+|\w+://\S+|\bwww\.\w+", re.IGNORECASE)
_HTML: Final = re.compile(r"<!--.*?-->|</?[a-z][^>]*>", re.IGNORECASE | re.DOTALL)


def read(body: str) -> Read:
    """Read a comment as a forge shows it."""
    tokens = list(_flat(_READER.parse(body)))
    html = [tag for token in tokens if token.type.startswith("html") for tag in _HTML.findall(token.content)]
    seen, boxes, headings, depth = list[str](), list[str](), list[str](), 0
    for number, token in enumerate(tokens):
        depth += token.nesting if token.type.startswith("list_item") else 0
        if token.type == "inline":
            words = "".join(one.content if one.type == "text" else "\n" for one in token.children or ())
            seen.append(words.replace("\n", " "))
            boxes += [words] if depth and re.match(r"\[[ xX]\]\s", words) else []
            before = tokens[number - 1]
            headings += [f"{before.markup} {words}"] if before.type == "heading_open" else []
    kinds = [token.type.removesuffix("_open") for token in tokens if not token.type.endswith("_close")]
    text = "\n".join(seen)
    return Read(
        headings=tuple(headings),
        ticks=tuple(one[1] in "xX" for one in boxes),
        details=sum(tag.lower() == "<details>" for tag in html),
        html=tuple(html),
        other=tuple(kind for kind in kinds if kind not in _PLAIN and not kind.startswith("html")),
        calls=tuple(_CALLS.findall(text)),
        commands=tuple(line for line in body.splitlines() if line.startswith("/")),
        text=text,
    )


def _flat(tokens: Sequence[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from _flat(token.children or ())
