"""Two kinds of plots as SVG, without a library for them."""

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
        ends = [left + wide * share / 100 for share in (value, low, high)]
        lines += [
            _text(left - 8, top + 14, name, 'text-anchor="end"'),
            f'<rect x="{left}" y="{top}" width="{ends[0] - left:.1f}" height="18" fill="{COLOURS[0]}"/>',
            f'<line x1="{ends[1]:.1f}" y1="{top + 9}" x2="{ends[2]:.1f}" y2="{top + 9}" stroke="black" stroke-width="2"/>',
            _text(left + wide + 12, top + 14, f"{value:.1f} %"),
        ]
    return "\n".join([*lines, "</svg>\n"])


def curves(title: str, across: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Lines through points, both axes logarithmic."""
    points = [point for line in series.values() for point in line]
    ranges = [_decades([point[axis] for point in points]) for axis in (0, 1)]
    width = 480
    height = 260
    left = 60
    top = 40

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x, y = ((math.log10(v) - lo) / (hi - lo) for v, (lo, hi) in zip(point, ranges, strict=True))
        return left + x * width, top + (1 - y) * height

    lines = [
        _HEAD.format(left + width + 210, top + height + 50),
        _BACK,
        _text(10, 22, title, 'font-weight="bold"'),
    ]
    for power in range(ranges[0][0], ranges[0][1] + 1):
        x, y = place((10.0**power, 10.0 ** ranges[1][0]))
        lines += [_text(x, y + 18, f"{10**power:,}", 'text-anchor="middle"'), _rule(x, y, x, top)]
    for power in range(ranges[1][0], ranges[1][1] + 1):
        x, y = place((10.0 ** ranges[0][0], 10.0**power))
        lines += [
            _text(x - 6, y + 4, f"{10.0**power:g}", 'text-anchor="end"'),
            _rule(x, y, left + width, y),
        ]
    lines.append(_text(left + width / 2, top + height + 40, across, 'text-anchor="middle"'))
    for (name, line), colour in zip(series.items(), COLOURS, strict=False):
        at = [place(point) for point in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in at]
        lines.append(_text(at[-1][0] + 8, at[-1][1] + 4, name, f'fill="{colour}"'))
    return "\n".join([*lines, "</svg>\n"])


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low = math.floor(math.log10(min(values)))
    high = math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'


def _rule(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="#ddd"/>'
