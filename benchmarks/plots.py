"""Two kinds of plots as SVG, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")
_HEAD = '<svg xmlns="http://www.w3.org/2000/svg" width="{0}" height="{1}" viewBox="0 0 {0} {1}" font-family="sans-serif" font-size="13">'
_BACK = '<rect width="100%" height="100%" fill="white"/>'


def bars(title: str, rows: Sequence[tuple[str, float, float, float]]) -> str:
    """Horizontal bars in percent: a name, the value, and its interval."""
    left = 330
    wide = 400
    step = 26
    lines = [
        _HEAD.format(left + wide + 90, 50 + step * len(rows)),
        _BACK,
        _text(10, 22, title, 'font-weight="bold"'),
    ]
    for number, (name, value, low, high) in enumerate(rows):
        top = 40 + step * number
        middle = top + 9
        scale = wide / 100
        width = f"{value * scale:.1f}"
        begin = f"{left + low * scale:.1f}"
        end = f"{left + high * scale:.1f}"
        lines.append(_text(left - 8, top + 14, name, 'text-anchor="end"'))
        lines.append(
            f'<rect x="{left}" y="{top}" width="{width}" height="18" fill="{COLOURS[0]}"/>'
        )
        lines.append(
            f'<line x1="{begin}" y1="{middle}" x2="{end}" y2="{middle}" stroke="black" stroke-width="2"/>'
        )
        lines.append(_text(left + wide + 12, top + 14, f"{value:.1f} %"))
    return "\n".join([*lines, "</svg>\n"])


def curves(title: str, across: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Lines through points, both axes logarithmic."""
    points: list[tuple[float, float]] = []
    for line in series.values():
        points += line
    all_x, all_y = zip(*points, strict=True)
    first_x, last_x = _decades(all_x)
    first_y, last_y = _decades(all_y)
    width = 480
    height = 260
    left = 60
    top = 40

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = (math.log10(point[0]) - first_x) / (last_x - first_x)
        y = (math.log10(point[1]) - first_y) / (last_y - first_y)
        return left + x * width, top + (1 - y) * height

    lines = [
        _HEAD.format(left + width + 210, top + height + 50),
        _BACK,
        _text(10, 22, title, 'font-weight="bold"'),
    ]
    for power in range(first_x, last_x + 1):
        x, y = place((10.0**power, 10.0**first_y))
        lines.append(_text(x, y + 18, f"{10**power:,}", 'text-anchor="middle"'))
        lines.append(_rule(x, y, x, top))
    for power in range(first_y, last_y + 1):
        x, y = place((10.0**first_x, 10.0**power))
        lines.append(_text(x - 6, y + 4, f"{10.0**power:g}", 'text-anchor="end"'))
        lines.append(_rule(x, y, left + width, y))
    lines.append(_text(left + width / 2, top + height + 40, across, 'text-anchor="middle"'))
    for (name, line), colour in zip(series.items(), COLOURS, strict=False):
        path: list[str] = []
        dots: list[str] = []
        x = 0.0
        y = 0.0
        for point in line:
            x, y = place(point)
            path.append(f"{x:.1f},{y:.1f}")
            dots.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        shape = " ".join(path)
        lines.append(f'<polyline points="{shape}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines += dots
        lines.append(_text(x + 8, y + 4, name, f'fill="{colour}"'))
    return "\n".join([*lines, "</svg>\n"])


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low = math.floor(math.log10(min(values)))
    high = math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'


def _rule(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="#ddd"/>'
