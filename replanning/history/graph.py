"""Drawing of a run's plan as an SVG: a layered graph of tasks with their states, and its revisions below."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

from replanning.history.overview import STATE_LOOKS, RunOverview, StateLook, TaskRow
from replanning.history.wording import evaluation_line, format_duration, pluralise, printable_line
from replanning.live.states import TaskState

MAX_TASKS_DRAWN: Final = 200
"""Tasks that are drawn one by one; those of larger plans are grouped by stage and state."""

MAX_STAGES: Final = 8
"""Stages of a plan whose tasks are grouped; neighbouring ones are joined."""

MAX_REVISIONS: Final = 20
"""Revisions that are told below the graph, the newest."""

_WIDTH, _HEIGHT, _GAP, _STEP = 220, 42, 14, 50
_MARGIN, _HEAD, _LINE = 20, 56, 18
_MAX_CHARS: Final = 25
_SWEEPS: Final = 6

_COLOURS: Final[Mapping[str, tuple[str, str]]] = {
    "done": ("#dff3e3", "#2e7d4f"),
    "running": ("#dceafc", "#1f5fbf"),
    "failed": ("#fbdcdc", "#b3261e"),
    "blocked": ("#fbdcdc", "#b3261e"),
    "replaced": ("#f0e3f7", "#7b3fa0"),
    "ready": ("#e0f4f5", "#1b7f8c"),
    "asks": ("#fdf1cf", "#8a6100"),
    "tried again": ("#fdf1cf", "#8a6100"),
    "unfinished": ("#fdf1cf", "#8a6100"),
}
"""Background and frame by the word for a state."""

_STYLE: Final = """\
<style>
text { font: 13px 'DejaVu Sans', sans-serif; fill: #1b1b1b }
.small { font-size: 11px; fill: #444 }
.title { font-size: 16px; font-weight: bold }
.edge { fill: none; stroke: #9aa0a6; stroke-width: 1.2 }
.replaced { stroke: #7b3fa0; stroke-dasharray: 5 3 }
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0L8 4L0 8z" fill="#80868b"/></marker></defs>
<rect width="100%" height="100%" fill="#ffffff"/>"""


@dataclass(slots=True)
class _Box:
    """One or several tasks that are drawn as a box; several replaced tasks stand before their replacement."""

    stage: int
    look: StateLook
    title: str
    detail: str
    hint: str
    replaced: Sequence[TaskRow] = ()


class _Place(NamedTuple):
    x: float
    y: float


def draw_graph(overview: RunOverview) -> str:
    """Return the plan of a run as an SVG, without scripts and with all text escaped."""
    boxes, edges = _boxes(overview)
    layers, links = _layers(boxes, edges)
    upright = len(layers) > 10 and max(map(len, layers)) * 4 <= len(
        layers
    )  # a long chain grows downwards
    places, (width, height) = _places(layers, boxes, upright=upright)
    body = [_edge(places, link, boxes, upright=upright) for link in links]
    for key, box in boxes.items():
        body += _lineage(places[key], box, upright=upright)
    revisions = [one for one in overview.repairs if one.revision is not None]
    told = [f"… and {pluralise(len(revisions) - MAX_REVISIONS, 'earlier revision')}"] * (
        len(revisions) > MAX_REVISIONS
    )
    for one in revisions[-MAX_REVISIONS:]:
        applied = "; ".join(step.text for step in one.steps if step.word == "applied")
        told.append(f"⟳ revision {one.revision}{f' by {one.by}' if one.by else ''}: {applied}")
    looks = [box.look for box in boxes.values()] + [
        row.look for box in boxes.values() for row in box.replaced
    ]
    legend = ", ".join(dict.fromkeys(f"{look.sign} {look.word}" for look in looks))
    for number, line in enumerate([legend, *told]):
        body.append(
            _text(_MARGIN, height + 16 + number * _LINE, printable_line(line, 200), "small")
        )
    height += 16 + (len(told) + 1) * _LINE
    width = max(width, 640, *(7 * min(200, len(line)) + 2 * _MARGIN for line in (legend, *told)))
    report = overview.status
    head = [_text(_MARGIN, 26, printable_line(f"{report.run}: {report.objective}", 120), "title")]
    head.append(
        _text(
            _MARGIN,
            44,
            printable_line(
                f"{report.status}, {evaluation_line(report.evaluation, report.obstacle)}", 140
            ),
            "small",
        )
    )
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            _STYLE,
            *head,
            *body,
            "</svg>\n",
        ]
    )


def _boxes(overview: RunOverview) -> tuple[dict[Hashable, _Box], set[tuple[Hashable, Hashable]]]:
    """Return what is drawn as a box, and the dependencies among boxes."""
    live = overview.replayed.live
    rows = {row.id: row for row in overview.tasks}
    stages: dict[str, int] = {}
    needed = {task.id: task.depends_on for task in live.document().tasks if task.id in rows}
    for task_id in TopologicalSorter(needed).static_order():
        stages[task_id] = 1 + max(
            (stages[before] for before in needed.get(task_id, ())), default=-1
        )
    former: dict[str, list[TaskRow]] = defaultdict(
        list
    )  # the tasks that each one stands for, once each
    for row in overview.tasks:
        current = next(
            (leaf.id for leaf in live.leaves(live.entry(row.id)) if leaf.id in needed), None
        )
        if row.state is TaskState.REPLACED_BY_REPLAN and current is not None:
            former[current].append(row)
    if len(needed) <= MAX_TASKS_DRAWN:
        drawn: dict[Hashable, _Box] = {}
        for task_id in needed:
            row = rows[task_id]
            took = "" if row.seconds is None else format_duration(row.seconds)
            detail = " · ".join(filter(None, (row.look.word, took, row.tool)))
            hint = f"{row.name}: {detail}. {row.detail}"
            drawn[task_id] = _Box(
                stages[task_id], row.look, row.name, detail, hint, former[task_id]
            )
        return drawn, {
            (before, task_id) for task_id, befores in needed.items() for before in befores
        }
    last = max(stages.values())
    joined = min(MAX_STAGES, last + 1)
    keys = {
        task_id: (stages[task_id] * joined // (last + 1), rows[task_id].look) for task_id in needed
    }
    groups: dict[tuple[int, StateLook], list[str]] = defaultdict(list)
    for task_id, key in keys.items():
        groups[key].append(task_id)
    grouped: dict[Hashable, _Box] = {}
    for (stage, look), names in groups.items():
        ends = " … ".join(dict.fromkeys(rows[name].name for name in (names[0], names[-1])))
        redone = sum(len(former[name]) for name in names)
        detail = f"⟳ {redone} replaced before" if redone else ends if len(names) > 1 else look.word
        title = f"{len(names)} {look.word}" if len(names) > 1 else rows[names[0]].name
        grouped[stage, look] = _Box(
            stage, look, title, detail, f"stage {stage + 1}, {title}: {', '.join(names[:50])}"
        )
    links = {
        (keys[before], keys[task_id]) for task_id, befores in needed.items() for before in befores
    }
    return grouped, {(one, other) for one, other in links if one[0] < other[0]}


def _layers(
    boxes: Mapping[Hashable, _Box], edges: set[tuple[Hashable, Hashable]]
) -> tuple[list[list[Hashable]], list[tuple[Hashable, Hashable]]]:
    """Return the boxes by stage, in an order with few crossings, and the links between neighbouring stages.

    A dependency over several stages passes through a point in each stage between them (Sugiyama, Tagawa and Toda,
    *Methods for visual understanding of hierarchical system structures*, 1981); the order is that of the means of the
    neighbours' positions.
    """
    layers: list[list[Hashable]] = [
        [] for _ in range(1 + max((box.stage for box in boxes.values()), default=0))
    ]
    for key, box in boxes.items():
        layers[box.stage].append(key)
    links: dict[tuple[Hashable, Hashable], None] = {}
    for before, after in sorted(edges, key=str):
        previous = before
        for stage in range(boxes[before].stage + 1, boxes[after].stage):
            point = ("point", before, stage)
            if point not in layers[stage]:
                layers[stage].append(point)
            links[previous, point] = None
            previous = point
        links[previous, after] = None
    sides: tuple[dict[Hashable, list[Hashable]], ...] = (defaultdict(list), defaultdict(list))
    for before, after in links:
        sides[0][after].append(before)
        sides[1][before].append(after)
    for sweep in range(_SWEEPS):
        ordered = layers if sweep % 2 == 0 else layers[::-1]
        for fixed, moved in pairwise(ordered):
            position = {key: index / max(1, len(fixed) - 1) for index, key in enumerate(fixed)}
            means: dict[Hashable, float] = {}
            for index, key in enumerate(moved):
                near = [position[one] for one in sides[sweep % 2][key] if one in position]
                means[key] = sum(near) / len(near) if near else index / max(1, len(moved) - 1)
            moved.sort(key=means.__getitem__)
    return layers, list(links)


def _places(
    layers: Sequence[Sequence[Hashable]], boxes: Mapping[Hashable, _Box], *, upright: bool
) -> tuple[dict[Hashable, _Place], tuple[float, float]]:
    """Return the upper left corner of each box, that of the newest of a lineage, and the size of the whole."""
    unit = (_WIDTH if upright else _HEIGHT) + _GAP  # across the direction of the dependencies

    def size(key: Hashable) -> float:
        return unit * (1 + len(boxes[key].replaced)) if key in boxes else _GAP

    spans = [sum(map(size, layer)) for layer in layers]
    widest, step = max(spans, default=0), (_HEIGHT if upright else _WIDTH) + _STEP
    places: dict[Hashable, _Place] = {}
    for number, (layer, span) in enumerate(zip(layers, spans, strict=True)):
        along, across = _MARGIN + number * step, (widest - span) / 2
        for key in layer:
            at = across + (size(key) - unit if key in boxes else 0)
            places[key] = (
                _Place(_MARGIN + at, _HEAD + along)
                if upright
                else _Place(along, _HEAD + _MARGIN + at)
            )
            across += size(key)
    length = _MARGIN + len(layers) * step
    return places, (widest + 2 * _MARGIN, _HEAD + length) if upright else (
        length,
        _HEAD + widest + 2 * _MARGIN,
    )


def _edge(
    places: Mapping[Hashable, _Place],
    link: tuple[Hashable, Hashable],
    boxes: Mapping[Hashable, _Box],
    *,
    upright: bool,
) -> str:
    """Return the line from one box or point to the next."""
    (x1, y1), (x2, y2) = places[link[0]], places[link[1]]
    across = _WIDTH if upright else _HEIGHT
    before, after = (across / 2 if key in boxes else _GAP / 2 for key in link)
    along = _HEIGHT if upright else _WIDTH
    if upright:
        x1, y1, x2 = x1 + before, y1 + along, x2 + after
        middle = (y1 + y2) / 2
        curve = f"C{x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f}"
    else:
        x1, y1, y2 = x1 + along, y1 + before, y2 + after
        middle = (x1 + x2) / 2
        curve = f"C{middle:.0f} {y1:.0f} {middle:.0f} {y2:.0f}"
    through = (
        "" if link[1] in boxes else (f"V{y2 + along:.0f}" if upright else f"H{x2 + along:.0f}")
    )
    tip = ' marker-end="url(#tip)"' if link[1] in boxes else ""
    return f'<path class="edge" d="M{x1:.0f} {y1:.0f}{curve} {x2:.0f} {y2:.0f}{through}"{tip}/>'


def _lineage(place: _Place, box: _Box, *, upright: bool) -> Iterator[str]:
    """Yield a box, and beside it the tasks that it replaced, each with an arrow to the next."""
    yield from _rectangle(place, box.look, box.title, box.detail, box.hint)
    replaced = STATE_LOOKS[TaskState.REPLACED_BY_REPLAN]
    for number, row in enumerate(reversed(box.replaced), 1):
        back = number * ((_WIDTH if upright else _HEIGHT) + _GAP)
        x, y = (place.x - back, place.y) if upright else (place.x, place.y - back)
        detail = " · ".join(filter(None, (replaced.word, row.tool)))
        yield from _rectangle(
            _Place(x, y), replaced, row.name, detail, f"{row.name}: {detail}. {row.detail}"
        )
        start = (
            f"M{x + _WIDTH} {y + _HEIGHT / 2}h{_GAP}"
            if upright
            else f"M{x + 16} {y + _HEIGHT}v{_GAP}"
        )
        yield f'<path class="edge replaced" d="{start}" marker-end="url(#tip)"/>'


def _rectangle(place: _Place, look: StateLook, title: str, detail: str, hint: str) -> Iterator[str]:
    fill, frame = _COLOURS.get(look.word, ("#f4f5f6", "#80868b"))
    dash = ' stroke-dasharray="5 3"' if look.word == "replaced" else ""
    yield f"<g><title>{escape(printable_line(hint))}</title>"
    yield (
        f'<rect x="{place.x:.0f}" y="{place.y:.0f}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="{fill}" '
        f'stroke="{frame}" stroke-width="1.5"{dash}/>'
    )
    yield _text(place.x + 10, place.y + 18, f"{look.sign} {_cut(title, _MAX_CHARS)}")
    yield _text(place.x + 10, place.y + 34, _cut(detail, _MAX_CHARS + 6), "small")
    yield "</g>"


def _cut(text: str, cells: int) -> str:
    """Return a text cut to a width, in which a Chinese character takes two cells."""
    from rich.text import Text

    shown = Text(printable_line(text))
    shown.truncate(cells, overflow="ellipsis")
    return shown.plain


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.0f}" y="{y:.0f}"{style}>{escape(printable_line(text))}</text>'
