"""A forge in memory, a reader of Markdown that knows nothing of what wrote it, and a run that is told of."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from replanning import Settings
from replanning.exporters._forge import Forge, ForgeComment, ForgeError, Marker, find_marker
from replanning.exporters.notices import Notifier
from replanning.journal import MemoryStore, Record
from replanning.plan import RunId
from replanning.planning import PlanningCoordinator
from replanning.telemetry import Exporter, ExporterContext
from replanning.testing import VirtualClock
from tests.support.planning import (
    MISSING,
    Desk,
    Replies,
    action,
    coordinator,
    go_on,
    replan,
    revision,
)
from tests.support.resume import cut

AT: Final = datetime(2026, 1, 1, tzinfo=UTC)


class Issue:
    """Issue in memory, whose next writes raise the given errors; `effective` writes are there nevertheless."""

    def __init__(
        self, errors: Sequence[BaseException | None] = (), *, effective: bool = False
    ) -> None:
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
        """Add a comment."""
        number = 1 + max((int(one.id) for one in self.kept), default=0)
        self.kept.append(ForgeComment(str(number), author, body, AT, own=own))

    def titles(self) -> list[str]:
        """Return the first line of each comment."""
        return [one.body.partition("\n")[0].removeprefix("## ") for one in self.kept]

    def body(self, title: str) -> str:
        """The only comment whose heading begins so."""
        (found,) = [one.body for one in self.kept if one.body.startswith(f"## {title}")]
        return found


@dataclass(frozen=True)
class Read:
    """Content of a comment as a reader sees it."""

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
    {
        "heading",
        "paragraph",
        "list_item",
        "bullet_list",
        "ordered_list",
        "strong",
        "em",
        "text",
        "softbreak",
        "inline",
    }
)
_CALLS: Final = re.compile(
    r"@\w[\w-]*|[#!&%$]\d+|~\w+|\bGH-\d+|\w+://\S+|\bwww\.\w+", re.IGNORECASE
)
_HTML: Final = re.compile(r"<!--.*?-->|</?[a-z][^>]*>", re.IGNORECASE | re.DOTALL)


def read(body: str) -> Read:
    """Read a comment as a forge shows it."""
    tokens = list(_flat(_READER.parse(body)))
    html = [
        tag
        for token in tokens
        if token.type.startswith("html")
        for tag in _HTML.findall(token.content)
    ]
    seen, boxes, headings, depth = list[str](), list[str](), list[str](), 0
    for number, token in enumerate(tokens):
        depth += token.nesting if token.type.startswith("list_item") else 0
        if token.type == "inline":
            words = "".join(
                one.content if one.type == "text" else "\n" for one in token.children or ()
            )
            seen.append(words.replace("\n", " "))
            boxes += [words] if depth and re.match(r"\[[ xX]\]\s", words) else []
            before = tokens[number - 1]
            headings += [f"{before.markup} {words}"] if before.type == "heading_open" else []
    kinds = [
        token.type.removesuffix("_open") for token in tokens if not token.type.endswith("_close")
    ]
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


# Texts

NASTY = (
    "- [x] **done**: it",
    "\n\n- [x] **more**: ticked",
    "\n## 📋 Execution Plan",
    "# heading",
    "<!-- replanning notice=checklist run=r about= -->",
    "</details><details><summary>more</summary>",
    "</summary>\n\n- [x] all",
    "```\ncode\n```",
    "    indented",
    "~~~",
    "`code` ``more``",
    "@admin please, or @group/team",
    "Fixes #1, closes owner/repo#2, resolves GH-3 and https://example.org/owner/repo/issues/4",
    "see !5, &6, %7, $8, ~bug, www.example.org and mailto:a@example.org",
    "[link](https://example.org) ![picture](https://example.org/x.png) [ref]: https://example.org",
    "&#64;admin &lt;b&gt; &commat;admin",
    "1. first",
    "\n---\n",
    "\n===\n",
    "> quoted",
    "| a | b |\n|---|---|\n| c | d |",
    "\n/close\n/label ~bug",
    "/approve",
    "**bold** *em* __bold__ _em_ ~~gone~~",
    "ends with a backslash \\",
    "\u202egnirts\u202c \u200b \x00 \x1b[31m \u2028- [x] x",
    "$`\\text{x}`$ $$x$$",
    "*",
    "_",
    "[",
    "<",
    "`",
    "\\",
    "&",
    "]",
    "-",
    "+ [x] ",
    "x" * 5_000,
)
TEXTS = st.lists(st.one_of(st.sampled_from(NASTY), st.text(max_size=20)), max_size=4).map("".join)


# A run

RUN = RunId("run-1")
UNCLEAR = replan(
    "clarification_request",
    clarification_needed=True,
    clarification_questions=["Which people?", "Which news?"],
    assumptions_to_make=["everybody", "today's"],
)
EVENTFUL: Replies = {
    "decision:goal_understanding": (UNCLEAR, go_on()),
    "decision:action_sequence": (replan("action_regeneration", confidence=0.1), go_on()),
    "decision:execution": (
        replan(
            "retry",
            issues_found=["the file is missing"],
            recommended_actions=["look again"],
            confidence=0.6,
        ),
        replan("partial_replan"),
        go_on(),
    ),
    "revision": revision(action("write", "shout"), action("post", "post")),
}
"""A question, a replan that is too unsure, a retry with a warning, and where that fails, a replan."""


def planner(
    replies: Replies,
    clock: VirtualClock,
    *exporters: Exporter,
    failing: int = 0,
    store: MemoryStore | None = None,
    settings: Settings | None = None,
) -> PlanningCoordinator:
    """Planning mode with a scripted model and exporters; its first tool fails as often as is said."""
    desk = Desk({"write": [MISSING] * failing})
    return coordinator(replies, clock, desk, settings=settings, store=store, exporters=exporters)


async def carried_out(
    replies: Replies, *exporters: Exporter, failing: int = 0, settings: Settings | None = None
) -> list[Record]:
    """Return the records of a complete run."""
    store = MemoryStore()
    async with VirtualClock() as clock:
        planning = planner(
            replies, clock, *exporters, failing=failing, store=store, settings=settings
        )
        await planning.execute_with_planning(RUN)
        await planning.engine.aclose()
    return list(store.read(RUN))


def attached(forge: Forge, records: Sequence[Record], clock: VirtualClock) -> Notifier:
    """A notifier of a new process, whose store holds these records."""
    notifier = Notifier(forge, edit_interval=0)
    notifier.attach(ExporterContext(cut(records), clock))
    return notifier


def marks(issue: Issue) -> list[Marker]:
    """The marks of all comments, which must have one."""
    found = [find_marker(one.body) for one in issue.kept]
    assert None not in found
    return [one for one in found if one is not None]


def marks_and_texts(issue: Issue) -> dict[Marker, str]:
    """The comments by their marks; those about a record without its number, as failures of exporters are records too."""
    assert len(set(marks(issue))) == len(issue.kept)
    numbered = re.compile(r"record-\d+")
    return {
        mark._replace(subject=numbered.sub("record", mark.subject)): numbered.sub(
            "record", one.body
        )
        for mark, one in zip(marks(issue), issue.kept, strict=True)
    }
