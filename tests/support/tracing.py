"""Spans as a tree that can be compared: names, kinds, status, attributes and links, without random ids."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Flat(NamedTuple):
    """One span, wherever it was read from; `parent` is None for the first of a trace."""

    id: str
    parent: str | None
    name: str
    kind: str
    attributes: dict[str, object]
    links: tuple[tuple[str, object], ...]
    error: str | None
    start: int
    end: int


class Node(NamedTuple):
    """One span with its children in the order of their beginnings; attributes of this project have short names."""

    name: str
    attributes: dict[str, object]
    children: tuple[Node, ...] = ()
    links: tuple[tuple[str, object], ...] = ()
    error: str | None = None
    seconds: float = 0.0


class Spans:
    """Spans in memory, of a provider."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._memory = InMemorySpanExporter()
        self.provider = provider or TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._memory))

    @property
    def finished(self) -> Sequence[ReadableSpan]:
        return self._memory.get_finished_spans()

    @property
    def traces(self) -> set[int]:
        return {span.context.trace_id for span in self.finished}

    @property
    def flat(self) -> list[Flat]:
        return [recorded(span) for span in self.finished]

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.finished if span.name == name]

    def path(self, name: str) -> list[str]:
        """The names of the spans above the only span of a name, up to the first of its trace."""
        by_id = {span.id: span for span in self.flat}
        [span] = [each for each in by_id.values() if each.name == name]
        above = []
        while span.parent:
            span = by_id[span.parent]
            above.append(span.name)
        return above

    def tree(self) -> tuple[Node, ...]:
        return tree(self.flat)

    def text(self) -> str:
        return "".join(span.to_json() for span in self.finished)


def recorded(span: ReadableSpan) -> Flat:
    """A span of the SDK."""
    return Flat(
        f"{span.context.span_id:016x}",
        f"{span.parent.span_id:016x}" if span.parent else None,
        span.name,
        span.kind.name,
        dict(span.attributes or {}),
        tuple(
            (f"{link.context.span_id:016x}", link.attributes.get("replanning.link"))
            for link in span.links
        ),
        None if span.status.is_ok else span.status.description or "",
        span.start_time or 0,
        span.end_time or 0,
    )


def tree(spans: Iterable[Flat]) -> tuple[Node, ...]:
    """Spans as trees; those that began at the same time are in the order in which they ended."""
    ordered = sorted(spans, key=lambda span: span.start)
    labels = {
        span.id: str(span.attributes.get("replanning.attempt.id", span.name)) for span in ordered
    }

    def below(parent: str | None) -> tuple[Node, ...]:
        return tuple(node(span) for span in ordered if span.parent == parent)

    def node(span: Flat) -> Node:
        assert span.kind == (
            "CLIENT" if span.attributes.get("gen_ai.operation.name") == "chat" else "INTERNAL"
        )
        links = tuple((labels[to], how) for to, how in span.links)
        attributes = {
            key.removeprefix("replanning."): value for key, value in span.attributes.items()
        }
        return Node(
            span.name, attributes, below(span.id), links, span.error, (span.end - span.start) / 1e9
        )

    return below(None)


def outline(node: Node) -> object:
    """A span by its name, or that of its attempt, with those below it."""
    name = str(node.attributes.get("attempt.id", node.name))
    return (name, [outline(child) for child in node.children]) if node.children else name


def output_of(program: str, *arguments: str) -> str:
    """Return what a Python program prints; it must end well, without a word about errors."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
