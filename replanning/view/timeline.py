"""Drawing of attempts over time: a bar for each, with the pauses between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

from replanning.history.events import ReplanEvent
from replanning.history.wording import printable_line
from replanning.plan.messages import format_duration
from replanning.plan.types import TaskId
from replanning.view.reader import AttemptSpan

MAX_TASKS: Final = 40
"""Maximum number of tasks: unsuccessful ones first, then retried ones, then the longest."""

_LABEL: Final = 190
_WIDTH: Final = 700
_ROW: Final = 22
_BAR: Final = 12
_MIN_BAR: Final = 2.0

_WAIT: Final = 130
"""Maximum width of an interval that is cut because the run only waited for a person."""

_KINDS: Final = {
    "": "running",
    "done": "done",
    "failed": "failed",
    "timed out": "failed",
    "cut off": "failed",
}
"""Class of a bar by the outcome of its attempt."""


class _Wait(NamedTuple):
    """An interval with an open question: its title, start and end, in seconds."""

    title: str
    since: float
    until: float
    is_open: bool


class _Cut(NamedTuple):
    """An interval in which the run only waited for a person."""

    since: float
    until: float
    is_open: bool


class _Axis:
    """Maps times to positions; intervals that only wait for a person are cut to one width.

    Otherwise a wait of an hour would leave no room for attempts of seconds.
    """

    def __init__(self, begin: float, end: float, cuts: Sequence[_Cut]) -> None:
        self._begin = begin
        self.cuts = cuts
        self.cut_width = 0.0
        busy = end - begin
        if cuts:
            self.cut_width = min(_WAIT, _WIDTH / 2 / len(cuts))
            busy -= sum(cut.until - cut.since for cut in cuts)
        # A run may have just begun.
        self._scale = (_WIDTH - self.cut_width * len(cuts)) / max(busy, 0.001)

    def x(self, at: float) -> float:
        """Return the position of a time."""
        x = float(_LABEL)
        shown = self._begin
        for since, until, _ in self.cuts:
            if at <= since:
                break
            x += (since - shown) * self._scale
            if at < until:
                return x + self.cut_width * (at - since) / (until - since)
            x += self.cut_width
            shown = until
        return x + (at - shown) * self._scale


def draw_timeline(
    attempts: Iterable[AttemptSpan], events: Iterable[ReplanEvent], now: float
) -> tuple[str, int]:
    """Return an SVG of attempts over time, and the number of tasks that it leaves out.

    Args:
        attempts: in order of their start.
        events: the replans of the run, whose questions are drawn as waits for people.
        now: the end of running attempts, in seconds since the epoch; the time of the last record
            if no process executes the run.
    """
    by_task: dict[TaskId, list[AttemptSpan]] = {}
    for span in attempts:
        by_task.setdefault(span.task, []).append(span)
    if not by_task:
        return "", 0
    drawn = _tasks_to_draw(by_task, now)
    begin = min(spans[0].started for spans in by_task.values())
    waits = list(_waits(events, now))
    end = begin
    for spans in by_task.values():
        end = max(end, _end_of(spans[-1], now))
    for wait in waits:
        end = max(end, wait.until)
    axis = _Axis(begin, end, list(_cuts(waits, by_task.values(), begin, end, now)))

    bottom = _ROW * (len(drawn) + 1)
    height = bottom + 8
    if axis.cuts:
        height += _ROW
    body: list[str] = []
    for wait in waits:
        x = axis.x(wait.since)
        width = max(_MIN_BAR, axis.x(wait.until) - x)
        body.append(
            f'<rect class="wait" x="{x:.1f}" y="{_ROW}" width="{width:.1f}" '
            f'height="{bottom - _ROW}"><title>{_safe(wait.title)}</title></rect>'
        )
    for cut in axis.cuts:
        body += _cut_marks(axis, cut, bottom)
    for row, task in enumerate(drawn):
        y = _ROW * (row + 1)
        body.append(f'<text x="0" y="{y + _BAR}">{_safe(task, 26)}</text>')
        body += _bars(by_task[task], y, axis, now)
    last = _LABEL + _WIDTH
    body.append(f'<text class="axis" x="{_LABEL}" y="14">0</text>')
    total = format_duration(end - begin)
    body.append(f'<text class="axis" x="{last}" y="14" text-anchor="end">{total}</text>')
    view = f'viewBox="0 0 {last + 4} {height}"'
    name = "Attempts over time"
    svg = f'<svg class="timeline" {view} role="img" aria-label="{name}">{"".join(body)}</svg>'
    return svg, len(by_task) - len(drawn)


def _tasks_to_draw(by_task: dict[TaskId, list[AttemptSpan]], now: float) -> Sequence[TaskId]:
    """Return the tasks to draw, in order of their start."""

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


def _waits(events: Iterable[ReplanEvent], now: float) -> Iterator[_Wait]:
    """Yield the intervals with an open question."""
    for event in events:
        question = event.question
        if question is None:
            continue
        if question.answered_at is None:
            # Nothing may have been recorded since.
            until = max(now, question.at + 0.001)
            yield _Wait(f"waits for a person: {question.text}", question.at, until, True)
            continue
        took = format_duration(max(0.0, question.answered_at - question.at))
        title = f"waited {took} for a person: {question.text}"
        yield _Wait(title, question.at, question.answered_at, False)


def _cuts(
    waits: Iterable[_Wait],
    attempts: Iterable[Sequence[AttemptSpan]],
    begin: float,
    end: float,
    now: float,
) -> Iterator[_Cut]:
    """Yield the intervals to cut: waits for a person during which no attempt ran.

    An answered wait that is short compared with the run is drawn in full.
    """
    busy: list[tuple[float, float]] = []
    for spans in attempts:
        for span in spans:
            busy.append((span.started, _end_of(span, now)))
    busy.sort()
    waits = sorted(waits, key=lambda wait: wait.since)
    idle: list[_Cut] = []
    at = begin
    for wait in waits:
        at = max(at, wait.since)
        for started, ended in busy:
            if started >= wait.until:
                break
            if started > at:
                idle.append(_Cut(at, started, wait.is_open))
            at = max(at, ended)
        if at < wait.until:
            idle.append(_Cut(at, wait.until, wait.is_open))
            at = wait.until
    rest = end - begin - sum(cut.until - cut.since for cut in idle)
    for cut in idle:
        if cut.is_open or cut.until - cut.since > rest / 5:
            yield cut


def _cut_marks(axis: _Axis, cut: _Cut, bottom: int) -> Iterator[str]:
    """Yield the edges of a cut interval, and its length below it."""
    begin = axis.x(cut.since)
    end = axis.x(cut.until)
    for x in (begin, end):
        yield f'<path class="cut" d="M{x:.1f} {_ROW}V{bottom}"/>'
    text = f"waited {format_duration(cut.until - cut.since)}"
    if cut.is_open:
        text = "waits for a person"
    if axis.cut_width == _WAIT:
        middle = (begin + end) / 2
        place = f'x="{middle:.1f}" y="{bottom + 15}" text-anchor="middle"'
        yield f'<text class="axis" {place}>{text}</text>'


def _bars(spans: Sequence[AttemptSpan], y: int, axis: _Axis, now: float) -> Iterator[str]:
    """Yield the bars of one task, and a thin line where it waited for its next attempt."""
    previous: float | None = None
    for span in spans:
        x = axis.x(span.started)
        end = _end_of(span, now)
        width = max(_MIN_BAR, axis.x(end) - x)
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
    # Names and errors are untrusted text: unescaped, they could be scripts.
    return escape(printable_line(text, limit))
