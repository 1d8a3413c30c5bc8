"""Drawing of attempts over time: a bar for each, with the pauses between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final
from xml.sax.saxutils import escape

from replanning.history.events import ReplanEvent
from replanning.history.wording import printable_line
from replanning.plan.messages import format_duration
from replanning.plan.types import TaskId
from replanning.view.reader import AttemptSpan

MAX_TASKS: Final = 40
"""Tasks that are drawn: those that did not end well, then those tried again, then the longest."""

_LABEL: Final = 190
_WIDTH: Final = 700
_ROW: Final = 22
_BAR: Final = 12
_MIN_BAR: Final = 2.0

_KINDS: Final = {
    "": "running",
    "done": "done",
    "failed": "failed",
    "timed out": "failed",
    "cut off": "failed",
}
"""Class of a bar by the outcome of its attempt."""


def draw_timeline(
    attempts: Iterable[AttemptSpan], events: Iterable[ReplanEvent], now: float
) -> tuple[str, int]:
    """Return an SVG of attempts over time, and how many tasks it leaves out.

    Args:
        attempts: in the order in which they began.
        events: the replans of the run, whose questions are drawn as times of waiting for people.
        now: the end of what still runs, in seconds since the epoch.
    """
    by_task: dict[TaskId, list[AttemptSpan]] = {}
    for span in attempts:
        by_task.setdefault(span.task, []).append(span)
    if not by_task:
        return "", 0
    drawn = _most_telling(by_task, now)
    begin = min(spans[0].started for spans in by_task.values())
    waits = list(_waits(events, now))
    # The narrowest is a millisecond wide: a run may have just begun.
    end = begin + 0.001
    for spans in by_task.values():
        end = max(end, _end_of(spans[-1], now))
    for _, _, until in waits:
        end = max(end, until)
    scale = _WIDTH / (end - begin)

    height = _ROW * (len(drawn) + 1) + 8
    body: list[str] = []
    for title, since, until in waits:
        x = _LABEL + (since - begin) * scale
        width = max(_MIN_BAR, (until - since) * scale)
        body.append(
            f'<rect class="wait" x="{x:.1f}" y="{_ROW}" width="{width:.1f}" '
            f'height="{height - _ROW - 8}"><title>{_safe(title)}</title></rect>'
        )
    for row, task in enumerate(drawn):
        y = _ROW * (row + 1)
        body.append(f'<text x="0" y="{y + _BAR}">{_safe(task, 26)}</text>')
        body += _bars(by_task[task], y, begin, scale, now)
    last = _LABEL + _WIDTH
    body.append(f'<text class="axis" x="{_LABEL}" y="14">0</text>')
    total = format_duration(end - begin)
    body.append(f'<text class="axis" x="{last}" y="14" text-anchor="end">{total}</text>')
    view = f'viewBox="0 0 {last + 4} {height}"'
    name = "Attempts over time"
    svg = f'<svg class="timeline" {view} role="img" aria-label="{name}">{"".join(body)}</svg>'
    return svg, len(by_task) - len(drawn)


def _most_telling(by_task: dict[TaskId, list[AttemptSpan]], now: float) -> Sequence[TaskId]:
    """Return the tasks that are drawn, in the order in which they began."""

    def rank(task: TaskId) -> tuple[bool, bool, float]:
        spans = by_task[task]
        is_done = spans[-1].outcome == "done"
        return is_done, len(spans) == 1, spans[0].started - _end_of(spans[-1], now)

    kept = set(sorted(by_task, key=rank)[:MAX_TASKS])
    return [task for task in by_task if task in kept]


def _end_of(span: AttemptSpan, now: float) -> float:
    if span.ended is None:
        return now
    return span.ended


def _waits(events: Iterable[ReplanEvent], now: float) -> Iterator[tuple[str, float, float]]:
    """Yield the times in which a person was asked: what for, from when, until when."""
    for event in events:
        question = event.question
        if question is None:
            continue
        until = question.answered_at
        if until is None:
            until = now
        took = format_duration(max(0.0, until - question.at))
        yield f"waited {took} for a person: {question.text}", question.at, until


def _bars(
    spans: Sequence[AttemptSpan], y: int, begin: float, scale: float, now: float
) -> Iterator[str]:
    """Yield the bars of one task, and a thin line where it waited for its next attempt."""
    previous: float | None = None
    for span in spans:
        x = _LABEL + (span.started - begin) * scale
        end = _end_of(span, now)
        width = max(_MIN_BAR, (end - span.started) * scale)
        if previous is not None and x > previous:
            middle = y + _BAR / 2
            yield f'<path class="pause" d="M{previous:.1f} {middle}H{x:.1f}"/>'
        kind = _KINDS[span.outcome]
        took = format_duration(max(0.0, end - span.started))
        what = f"attempt {span.number}"
        if not span.number:
            kind = "asks"
            what = "asked whether it was done"
        text = f"{span.task}, {what}: {span.outcome or 'running'}, {took}"
        if span.error:
            text += f": {span.error}"
        place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="2"'
        yield f'<rect class="bar {kind}" {place}><title>{_safe(text)}</title></rect>'
        previous = x + width


def _safe(text: str, limit: int = 300) -> str:
    # Names and errors are other people's text: unescaped, they could be scripts.
    return escape(printable_line(text, limit))
