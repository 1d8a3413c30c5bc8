"""Drawing of a run's plan as an SVG: a layered graph of its tasks, with its revisions below."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

from replanning.history.overview import RunOverview, TaskRow, without_plain_elements
from replanning.history.wording import (
    STATE_LOOKS,
    StateLook,
    evaluation_line,
    labelled,
    printable_line,
    progress_text,
)
from replanning.journal.store import FINISHED_STATUSES
from replanning.live.states import TaskState
from replanning.plan.elements import FORESEEN
from replanning.plan.messages import format_duration, pluralise
from replanning.plan.types import TaskId

MAX_TASKS_DRAWN: Final = 200
"""Maximum number of tasks drawn one by one; larger plans are grouped by stage and state."""

MAX_TASKS_UNFOLDED: Final = 40
"""Maximum number of tasks of a plan whose lists are drawn as their elements."""

MAX_STAGES: Final = 8
"""Maximum number of stages of a grouped plan; neighbouring ones are joined."""

MAX_REVISIONS: Final = 20
"""Number of revisions listed below the graph, the newest."""

# Sizes in pixels: of a box, of the gaps between boxes and between stages, and of the page.
_WIDTH: Final = 220
_HEIGHT: Final = 42
_GAP: Final = 14
_STEP: Final = 50
_MARGIN: Final = 20
_HEAD: Final = 56
_LINE: Final = 18
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
.edge.replaced { stroke: #7b3fa0; stroke-dasharray: 5 3 }
</style>
<rect width="100%" height="100%" fill="#ffffff"/>"""

_TIP: Final = """\
<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" \
markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0L8 4L0 8z" fill="#80868b"/></marker></defs>"""


@dataclass(slots=True)
class _Box:
    """One or several tasks drawn as a box; replaced tasks stand before their replacement."""

    stage: int
    look: StateLook
    title: str
    detail: str
    hint: str
    replaced: Sequence[TaskRow] = ()


_Edge = tuple[Hashable, Hashable]
"""The keys of two boxes or points; the second depends on the first."""


class _Place(NamedTuple):
    x: float
    y: float


def draw_graph(overview: RunOverview) -> str:
    """Return the plan of a run as an SVG, without scripts and with all text escaped."""
    drawing, body = _draw_tasks(overview, None)
    legend = ", ".join(_legend(drawing.boxes.values()))
    lines = [legend, *_revision_lines(overview)]
    y = drawing.height + 16
    for line in lines:
        body.append(_text(_MARGIN, y, printable_line(line, 200), "small"))
        y += _LINE
    # About 7 pixels for a character: a line that is cut would hide its end.
    longest = min(200, max(map(len, lines)))
    needed = 7 * longest + 2 * _MARGIN
    width = max(drawing.width, 640, needed)

    report = overview.status
    title = printable_line(f"{report.run}: {report.objective}", 120)
    if report.status in FINISHED_STATUSES:
        progress = progress_text(report.evaluation)  # advice would come too late
    else:
        progress = evaluation_line(report.evaluation, report.obstacle)
    subtitle = printable_line(f"{report.status}, {progress}", 140)
    view = f'viewBox="0 0 {width:.0f} {y:.0f}"'
    size = f'width="{width:.0f}" height="{y:.0f}" {view}'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            _STYLE,
            _TIP,
            _text(_MARGIN, 26, title, "title"),
            _text(_MARGIN, 44, subtitle, "small"),
            *body,
            "</svg>\n",
        ]
    )


def draw_graph_in_page(overview: RunOverview, link: Callable[[str], str]) -> str:
    """Return the tasks of a plan as an SVG for a page that supplies the style.

    Args:
        overview: the run.
        link: returns the address of the page of a task.
    """
    drawing, body = _draw_tasks(overview, link)
    width = drawing.width
    height = drawing.height - _HEAD
    view = f'viewBox="0 {_HEAD} {width:.0f} {height:.0f}"'
    size = f'width="{width:.0f}" height="{height:.0f}" {view}'
    return f'<svg class="plan" {size} role="group" aria-label="Plan">{_TIP}{"".join(body)}</svg>'


def _draw_tasks(
    overview: RunOverview, link: Callable[[str], str] | None
) -> tuple[_Drawing, list[str]]:
    """Return the positions of the tasks of a plan, and their shapes."""
    boxes, edges = _boxes(overview)
    layers, links = _layers(boxes, edges)
    # A long chain grows downwards, where a page can be scrolled.
    widest = max(map(len, layers))
    upright = len(layers) > 10 and widest * 4 <= len(layers)
    drawing = _layout(layers, boxes, upright=upright)
    body = [drawing.edge(*edge) for edge in links]
    for key, box in boxes.items():
        body += drawing.lineage(key, box, link)
    return drawing, body


def _legend(boxes: Iterable[_Box]) -> dict[str, None]:
    looks = []
    replaced = []
    for box in boxes:
        looks.append(box.look)
        replaced += [row.look for row in box.replaced]
    # The styles of the boxes come first, then those of the tasks beside them.
    all_looks = looks + replaced
    return dict.fromkeys(f"{look.sign} {look.word}" for look in all_looks)


def _revision_lines(overview: RunOverview) -> list[str]:
    revisions = [repair for repair in overview.repairs if repair.revision is not None]
    lines = []
    earlier = len(revisions) - MAX_REVISIONS
    if earlier > 0:
        lines.append(f"… and {pluralise(earlier, 'earlier revision')}")
    for repair in revisions[-MAX_REVISIONS:]:
        if repair.by in FORESEEN:
            lines.append(f"• revision {repair.revision}: {repair.title}")
            continue
        by = labelled(" by ", repair.by)
        applied = [step.text for step in repair.steps if step.word == "applied"]
        text = "; ".join(applied)
        lines.append(f"⟳ revision {repair.revision}{by}: {text}")
    return lines


def _boxes(overview: RunOverview) -> tuple[dict[Hashable, _Box], set[_Edge]]:
    """Return the boxes, and the dependencies among them."""
    live = overview.replayed.live
    rows = {row.id: row for row in overview.tasks}
    needed = _drawn_tasks(overview)
    stages: dict[str, int] = {}
    for task_id in TopologicalSorter(needed).static_order():
        before = [stages[one] for one in needed.get(task_id, ())]
        stages[task_id] = 1 + max(before, default=-1)

    # A replaced task is drawn once, beside the first of the tasks in its place.
    former = defaultdict(list)
    for row in overview.tasks:
        if row.state is not TaskState.REPLACED_BY_REPLAN:
            continue
        for leaf in live.leaves(live.entry(row.id)):
            if leaf.id in needed:
                former[leaf.id].append(row)
                break
    if len(needed) > MAX_TASKS_DRAWN:
        return _grouped_boxes(needed, rows, stages, former)

    boxes: dict[Hashable, _Box] = {}
    edges: set[_Edge] = set()
    for task_id, befores in needed.items():
        row = rows[task_id]
        took = ""
        if row.seconds is not None:
            took = format_duration(row.seconds)
        parts = (row.look.word, took, row.tool)
        detail = " · ".join(filter(None, parts))
        hint = f"{row.title}: {detail}. {row.detail}"
        if row.elements is not None:
            detail = row.detail
        stage = stages[task_id]
        replaced = former[task_id]
        boxes[task_id] = _Box(
            stage,
            row.look,
            row.title,
            detail,
            hint,
            replaced,
        )
        edges.update((one, task_id) for one in befores)
    return boxes, edges


def _drawn_tasks(overview: RunOverview) -> dict[str, Sequence[str]]:
    """Return the tasks to draw, each with its dependencies.

    A list is drawn as its elements. In a larger plan it is drawn as one task, beside the elements
    that failed, run, were replaced or wait for a person.
    """
    shown: Sequence[TaskRow] = overview.tasks
    if len(shown) > MAX_TASKS_UNFOLDED:
        shown = without_plain_elements(shown)
    drawn = {row.id for row in shown}
    lists = {row.id: row.element_of for row in overview.tasks}

    def place(task_id: str) -> str:
        """Return the task whose drawing contains a task."""
        template = lists.get(TaskId(task_id))
        if task_id in drawn or template is None:
            return task_id
        return place(template)

    needed: dict[str, dict[str, None]] = {}
    for task in overview.replayed.live.expanded_document().tasks:
        if task.id in lists:
            befores = needed.setdefault(place(task.id), {})
            for one in map(place, task.depends_on):
                # The parts of one element depend on each other.
                if one != place(task.id):
                    befores[one] = None
    return {task_id: tuple(befores) for task_id, befores in needed.items()}


def _grouped_boxes(
    needed: Mapping[str, Sequence[str]],
    rows: Mapping[str, TaskRow],
    stages: Mapping[str, int],
    former: Mapping[str, list[TaskRow]],
) -> tuple[dict[Hashable, _Box], set[_Edge]]:
    """Return a box for each stage and state, because a box for each task would be unreadable."""
    count = 1 + max(stages.values())
    joined = min(MAX_STAGES, count)
    groups = defaultdict(list)
    keys = {}
    for task_id in needed:
        stage = stages[task_id] * joined // count
        key = (stage, rows[task_id].look)
        keys[task_id] = key
        groups[key].append(task_id)

    boxes: dict[Hashable, _Box] = {}
    for (stage, look), names in groups.items():
        first = rows[names[0]].name
        title = first
        detail = look.word
        if len(names) > 1:
            title = f"{len(names)} {look.word}"
            last = rows[names[-1]].name
            # Programs make names, too, and may use one twice.
            detail = " … ".join(dict.fromkeys((first, last)))
        # Thousands of replaced tasks cannot be drawn, so they are counted.
        replaced = sum(len(former[name]) for name in names)
        if replaced:
            detail = f"⟳ {replaced} replaced before"
        first_names = ", ".join(names[:50])
        hint = f"stage {stage + 1}, {title}: {first_names}"
        boxes[stage, look] = _Box(stage, look, title, detail, hint)
    edges: set[_Edge] = set()
    for task_id, befores in needed.items():
        after = keys[task_id]
        for one in befores:
            before = keys[one]
            # Stages that were joined depend on one another both ways.
            if before[0] < after[0]:
                edges.add((before, after))
    return boxes, edges


def _layers(
    boxes: Mapping[Hashable, _Box], edges: set[_Edge]
) -> tuple[list[list[Hashable]], list[_Edge]]:
    """Return the boxes by stage, and the links between neighbouring stages.

    A dependency over several stages passes through a point in each stage between them (Sugiyama,
    Tagawa and Toda, *Methods for visual understanding of hierarchical system structures*, 1981).
    Each stage is ordered by the mean positions of its neighbours, which leaves few crossings; the
    sweeps alternate in direction.
    """
    last = max((box.stage for box in boxes.values()), default=0)
    layers: list[list[Hashable]] = [[] for _ in range(last + 1)]
    for key, box in boxes.items():
        layers[box.stage].append(key)
    links: dict[_Edge, None] = {}
    # Sorted, because the order of a set would make two drawings of one plan differ.
    for before, after in sorted(edges, key=str):
        previous = before
        first = boxes[before].stage + 1
        for stage in range(first, boxes[after].stage):
            point = ("point", before, stage)
            if point not in layers[stage]:
                layers[stage].append(point)
            links[previous, point] = None
            previous = point
        links[previous, after] = None

    befores = defaultdict(list)
    afters = defaultdict(list)
    for before, after in links:
        befores[after].append(before)
        afters[before].append(after)
    for sweep in range(_SWEEPS):
        if sweep % 2 == 0:
            ordered = layers
            neighbours = befores
        else:
            ordered = layers[::-1]
            neighbours = afters
        for fixed, moved in pairwise(ordered):
            _order_by_means(moved, fixed, neighbours)
    return layers, list(links)


def _order_by_means(
    moved: list[Hashable], fixed: Sequence[Hashable], neighbours: Mapping[Hashable, list[Hashable]]
) -> None:
    position = _relative_positions(fixed)
    # A box without neighbours stays where it is.
    means = _relative_positions(moved)
    for key in moved:
        near = [position[one] for one in neighbours[key] if one in position]
        if near:
            means[key] = sum(near) / len(near)
    moved.sort(key=means.__getitem__)


def _relative_positions(keys: Sequence[Hashable]) -> dict[Hashable, float]:
    last = max(1, len(keys) - 1)
    return {key: index / last for index, key in enumerate(keys)}


@dataclass(slots=True)
class _Drawing:
    """Places of boxes and points on the page, and the shapes drawn at them.

    `places` are the upper left corners; of a lineage, that of the newest task. Dependencies run
    downwards if it is `upright`, otherwise to the right.
    """

    places: Mapping[Hashable, _Place]
    boxes: Mapping[Hashable, _Box]
    upright: bool
    width: float
    height: float

    def edge(self, before: Hashable, after: Hashable) -> str:
        """Return the line from one box or point to the next."""
        x1, y1 = self.places[before]
        x2, y2 = self.places[after]
        across = _HEIGHT
        if self.upright:
            across = _WIDTH
        # A line begins and ends in the middle of a side.
        from_middle = to_middle = _GAP / 2
        if before in self.boxes:
            from_middle = across / 2
        tip = ""
        if after in self.boxes:
            to_middle = across / 2
            tip = ' marker-end="url(#tip)"'
        # A line that only passes a stage runs straight through it for the length of a box.
        if self.upright:
            x1 += from_middle
            y1 += _HEIGHT
            x2 += to_middle
            middle = (y1 + y2) / 2
            curve = f"C{x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f}"
            through = f"V{y2 + _HEIGHT:.0f}"
        else:
            x1 += _WIDTH
            y1 += from_middle
            y2 += to_middle
            middle = (x1 + x2) / 2
            curve = f"C{middle:.0f} {y1:.0f} {middle:.0f} {y2:.0f}"
            through = f"H{x2 + _WIDTH:.0f}"
        start = f"M{x1:.0f} {y1:.0f}"
        path = f"{start}{curve} {x2:.0f} {y2:.0f}"
        if not tip:
            path += through
        return f'<path class="edge" d="{path}"{tip}/>'

    def lineage(self, key: Hashable, box: _Box, link: Callable[[str], str] | None) -> Iterator[str]:
        """Yield a box, and beside it the tasks that it replaced, each with an arrow to the next."""
        place = self.places[key]
        address = ""
        # The key of a box with several tasks is not the name of a task.
        if link is not None and isinstance(key, str):
            address = link(key)
        shapes = _rectangle(place, box.look, box.title, box.detail, box.hint)
        yield from _linked(shapes, address)
        replaced = STATE_LOOKS[TaskState.REPLACED_BY_REPLAN]
        x, y = place
        for row in reversed(box.replaced):
            # Placed across the direction of the dependencies, so that no arrow is crossed.
            if self.upright:
                x -= _WIDTH + _GAP
                start = f"M{x + _WIDTH} {y + _HEIGHT / 2}h{_GAP}"
            else:
                y -= _HEIGHT + _GAP
                start = f"M{x + 16} {y + _HEIGHT}v{_GAP}"
            detail = replaced.word + labelled(" · ", row.tool)
            hint = f"{row.name}: {detail}. {row.detail}"
            corner = _Place(x, y)
            if link is not None:
                address = link(row.id)
            shapes = _rectangle(corner, replaced, row.name, detail, hint)
            yield from _linked(shapes, address)
            yield f'<path class="edge replaced" d="{start}" marker-end="url(#tip)"/>'


def _layout(
    layers: Sequence[Sequence[Hashable]], boxes: Mapping[Hashable, _Box], *, upright: bool
) -> _Drawing:
    """Return a drawing with the stages one after another, each centred."""
    if upright:
        unit = _WIDTH + _GAP
        step = _HEIGHT + _STEP
    else:
        unit = _HEIGHT + _GAP
        step = _WIDTH + _STEP

    def size(key: Hashable) -> float:
        if key not in boxes:
            return _GAP
        return unit * (1 + len(boxes[key].replaced))

    spans = []
    for layer in layers:
        spans.append(sum(map(size, layer)))
    widest = max(spans, default=0)
    places = {}
    along: float = _MARGIN
    for layer, span in zip(layers, spans, strict=True):
        across = (widest - span) / 2
        for key in layer:
            at = across
            if key in boxes:
                # Replaced tasks come first, and the newest of the lineage last.
                at += size(key) - unit
            if upright:
                places[key] = _Place(_MARGIN + at, _HEAD + along)
            else:
                places[key] = _Place(along, _HEAD + _MARGIN + at)
            across += size(key)
        along += step
    if upright:
        return _Drawing(places, boxes, upright, widest + 2 * _MARGIN, _HEAD + along)
    return _Drawing(places, boxes, upright, along, _HEAD + widest + 2 * _MARGIN)


def _linked(shapes: Iterator[str], address: str) -> Iterator[str]:
    """Yield shapes, as a link if there is an address."""
    if not address:
        yield from shapes
        return
    yield f'<a href="{escape(address)}">'
    yield from shapes
    yield "</a>"


def _rectangle(place: _Place, look: StateLook, title: str, detail: str, hint: str) -> Iterator[str]:
    fill, frame = _COLOURS.get(look.word, ("#f4f5f6", "#80868b"))
    border = f'stroke="{frame}" stroke-width="1.5"'
    if look.word == "replaced":
        border += ' stroke-dasharray="5 3"'
    size = f'width="{_WIDTH}" height="{_HEIGHT}" rx="6"'
    x, y = place
    tooltip = escape(printable_line(hint))
    kind = look.word.replace(" ", "-")
    yield f'<g class="task {kind}"><title>{tooltip}</title>'
    corner = f'x="{x:.0f}" y="{y:.0f}"'
    yield f'<rect {corner} {size} fill="{fill}" {border}/>'
    first_line = f"{look.sign} {_cut(title, _MAX_CHARS)}"
    yield _text(x + 10, y + 18, first_line)
    second_line = _cut(detail, _MAX_CHARS + 6)
    yield _text(x + 10, y + 34, second_line, "small")
    yield "</g>"


def _cut(text: str, cells: int) -> str:
    """Return a text cut to a width in cells; a Chinese character takes two."""
    from rich.text import Text

    shown = Text(printable_line(text))
    shown.truncate(cells, overflow="ellipsis")
    return shown.plain


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    style = ""
    if kind:
        style = f' class="{kind}"'
    # Names of tasks are other people's text: unescaped, they could be scripts.
    content = escape(printable_line(text))
    return f'<text x="{x:.0f}" y="{y:.0f}"{style}>{content}</text>'
