"""Draws the states of a task from the table of transitions: the usual path, and every transition."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from replanning.live.states import (
    FINISHED,
    STUCK,
    TRANSITIONS,
    WAITING,
    TaskEvent,
    TaskState,
)

CSS: Final = """
svg { color-scheme: light dark }
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: #1f2328 }
.label { font: 11.5px system-ui, 'Segoe UI', 'Liberation Sans', 'DejaVu Sans', sans-serif; fill: #4c545d }
.line { fill: none; stroke: #7a828b; stroke-width: 1.4 }
.tip { fill: #7a828b }
.waiting { fill: #e8edff; stroke: #4a63c8 }
.running { fill: #fff1cc; stroke: #a87400 }
.stuck { fill: #fde4e1; stroke: #b3392e }
.finished { fill: #dff3e3; stroke: #2e7d4f }
.band { stroke: none; opacity: 0.55 }
.from { fill: #3a48a0 }
.to { fill: none; stroke: #b3392e; stroke-width: 2.2 }
@media (prefers-color-scheme: dark) {
text { fill: #e6e9ee }
.label { fill: #b4bcc6 }
.line { stroke: #8f98a3 }
.tip { fill: #8f98a3 }
.waiting { fill: #232c4f; stroke: #8ea2f5 }
.running { fill: #46391a; stroke: #e0b453 }
.stuck { fill: #4c2723; stroke: #f0938a }
.finished { fill: #1e3d29; stroke: #74c794 }
.from { fill: #aab8ff }
.to { stroke: #ff9d95 }
}
"""

KINDS: Final = {
    "waiting": WAITING,
    "running": frozenset({TaskState.RUNNING}),
    "stuck": STUCK,
    "finished": FINISHED,
}

BOX_HEIGHT: Final = 34
BOXES: Final = {
    TaskState.PENDING: (8, 116, 104),
    TaskState.READY: (254, 116, 104),
    TaskState.RUNNING: (452, 116, 104),
    TaskState.DONE: (716, 116, 104),
    TaskState.NEEDS_CONTINUATION: (424, 12, 160),
    TaskState.BACKOFF: (452, 220, 104),
    TaskState.FAILED: (716, 220, 104),
    TaskState.REPLACED_BY_REPLAN: (660, 324, 160),
}
"""Boxes of the states on the usual path: left, top, width."""

ARROWS: Final = (
    (TaskState.PENDING, TaskEvent.SATISFY, ((112, 133), (254, 133)), (183, 124, "middle")),
    (TaskState.READY, TaskEvent.START, ((358, 133), (452, 133)), (405, 124, "middle")),
    (TaskState.RUNNING, TaskEvent.SUCCEED, ((556, 133), (716, 133)), (636, 124, "middle")),
    (TaskState.RUNNING, TaskEvent.CONTINUE, ((526, 116), (526, 46)), (534, 86, "start")),
    (
        TaskState.NEEDS_CONTINUATION,
        TaskEvent.START,
        ((482, 46), (482, 116)),
        (474, 86, "end"),
    ),
    (TaskState.RUNNING, TaskEvent.BACK_OFF, ((482, 150), (482, 220)), (474, 190, "end")),
    (TaskState.BACKOFF, TaskEvent.START, ((526, 220), (526, 150)), (534, 206, "start")),
    (TaskState.RUNNING, TaskEvent.FAIL, ((556, 146), (716, 232)), (648, 184, "start")),
    (TaskState.FAILED, TaskEvent.REPLACE, ((768, 254), (768, 324)), (776, 294, "start")),
    (
        TaskState.FAILED,
        TaskEvent.REVIVE,
        ((716, 245), (640, 245), (640, 290), (60, 290), (60, 150)),
        (350, 282, "middle"),
    ),
)
"""Transitions on the usual path, each with its line and the position of its name."""


def diagrams() -> dict[str, str]:
    """Return the two pictures, by their paths below `docs/`."""
    return {
        "images/states.svg": usual_path(),
        "images/transitions.svg": every_transition(),
    }


def usual_path() -> str:
    """Return the picture of the usual path of a task.

    Raises:
        KeyError: the table no longer has one of the transitions.
    """
    parts = []
    for state, event, points, (x, y, anchor) in ARROWS:
        follows = TRANSITIONS[state, event]
        path = "L".join(f"{left} {top}" for left, top in points)
        parts.append(
            f"<g><title>{state}: {event} → {follows}</title>"
            f'<path class="line" d="M{path}" marker-end="url(#tip)"/>'
            f'<text class="label" x="{x}" y="{y}" text-anchor="{anchor}">{event}</text></g>'
        )
    for state, (left, top, width) in BOXES.items():
        parts.append(
            f'<rect class="{kind_of(state)}" x="{left}" y="{top}" width="{width}" '
            f'height="{BOX_HEIGHT}" rx="6"/>'
            f'<text x="{left + width / 2:g}" y="{top + 21}" text-anchor="middle">{state}</text>'
        )
    return picture(828, 370, "The usual path of a task from state to state", parts)


LEFT: Final = 196
TOP: Final = 128
COLUMN: Final = 46
ROW: Final = 26


def every_transition() -> str:
    """Return the picture of the whole table: a column for each state, a row for each event."""
    columns = {}
    parts = []
    left = LEFT
    for kind, states in KINDS.items():
        members = [state for state in TaskState if state in states]
        width = COLUMN * len(members)
        height = ROW * len(TaskEvent)
        parts.append(
            f'<rect class="{kind} band" x="{left + 2}" y="{TOP}" width="{width - 4}" '
            f'height="{height}" rx="6"/>'
            f'<text class="label" x="{left + width / 2:g}" y="{TOP + height + 18}" '
            f'text-anchor="middle">{kind}</text>'
        )
        for state in members:
            columns[state] = left + COLUMN / 2
            left += COLUMN
    for state, x in columns.items():
        parts.append(f'<text transform="translate({x - 4:g} {TOP - 8}) rotate(-40)">{state}</text>')
    for number, event in enumerate(TaskEvent):
        y = TOP + ROW * number + ROW // 2
        parts.append(
            f'<text class="label" x="{LEFT - 12}" y="{y + 4}" text-anchor="end">{event}</text>'
        )
        parts += row(event, columns, y)
    y = TOP + ROW * len(TaskEvent) + 44
    parts.append(
        f'<circle class="from" cx="{LEFT + 6}" cy="{y}" r="4"/>'
        f'<text class="label" x="{LEFT + 18}" y="{y + 4}">may happen in this state</text>'
        f'<circle class="to" cx="{LEFT + 196}" cy="{y}" r="7"/>'
        f'<text class="label" x="{LEFT + 212}" y="{y + 4}">leads to this state</text>'
    )
    return picture(int(left) + 96, y + 16, "Every state transition of a task", parts)


def row(event: TaskEvent, columns: dict[TaskState, float], y: int) -> Iterator[str]:
    """Yield the marks of an event: its source states, and the resulting state."""
    sources = [state for state, happens in TRANSITIONS if happens is event]
    (follows,) = {TRANSITIONS[state, event] for state in sources}
    places = [columns[state] for state in (*sources, follows)]
    names = ", ".join(sources)
    yield f"<g><title>{event}: {names} → {follows}</title>"
    yield f'<path class="line" d="M{min(places):g} {y}H{max(places):g}"/>'
    for state in sources:
        yield f'<circle class="from" cx="{columns[state]:g}" cy="{y}" r="4"/>'
    yield f'<circle class="to" cx="{columns[follows]:g}" cy="{y}" r="7"/></g>'


def kind_of(state: TaskState) -> str:
    """Return the kind of a state."""
    for kind, states in KINDS.items():
        if state in states:
            return kind
    raise KeyError(state)


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Return an SVG in the colours of the page around it."""
    inner = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">\n<title>{title}</title>\n'
        f"<style>{CSS}</style>\n"
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        'markerHeight="8" markerUnits="userSpaceOnUse" orient="auto">'
        '<path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>\n'
        f"{inner}\n</svg>\n"
    )
