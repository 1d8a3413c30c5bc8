"""Figures of speed: medians over rounds, compared with a floor measured in these rounds where one exists."""

from __future__ import annotations

import gc
import hashlib
import os
import platform
import statistics
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio
from pydantic import TypeAdapter

from replanning.plan import JsonObject

CODE = Path(__file__).parent.parent / "replanning"

Coroutine = Callable[[int], Awaitable[float]]


@dataclass(frozen=True)
class Figure:
    """One measured figure: medians over rounds, and the spread of the ratio, or of the value where there is no floor.

    A figure without a bar has an empty `bar` and counts as met.
    """

    name: str
    value: float
    unit: str
    floor: float | None
    ratio: float | None
    lowest: float
    highest: float
    bar: str
    met: bool
    size: int | None = None


@dataclass(frozen=True)
class Peer:
    """Time of the same work with another library, in microseconds per task.

    Attributes:
        times: how many times as long as ours.
        bar: the least that `times` should be; None for ours and for libraries without a bar.
    """

    name: str
    version: str
    value: float
    lowest: float
    highest: float
    times: float
    bar: float | None = None


@dataclass(frozen=True)
class Report:
    """Figures with the machine on which they were measured."""

    machine: str
    rounds: int
    figures: tuple[Figure, ...]
    peers: tuple[Peer, ...] = ()
    skipped: tuple[str, ...] = ()
    work: str = ""

    def table(self) -> str:
        """Figures, growth and peers as Markdown tables."""
        lines = [
            f"{self.machine}; medians of {self.rounds} rounds, floor and figure measured in turn in each."
        ]
        lines += [
            "",
            "| figure | measured | floor | ratio (lowest–highest) | bar | met |",
            "|---|---|---|---|---|---|",
        ]
        growth: list[str] = []
        for figure in self.figures:
            if figure.size is None:
                lines.append(_line(figure))
            else:
                growth.append(_grown(figure))
        if growth:
            lines += [
                "",
                "| for each task, at plans of | measured | floor | ratio (lowest–highest) |",
                "|---|---|---|---|",
            ]
            lines += growth
        if self.peers:
            lines += [
                "",
                f"{self.work}",
                "",
                "| library | for each task (lowest–highest) | times ours | bar | met |",
                "|---|---|---|---|---|",
            ]
            lines += map(_peer, self.peers)
        return "\n".join([*lines, *(f"\n{line}" for line in self.skipped)])

    def to_json(self) -> JsonObject:
        """Figures as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Report:
        """Read figures that `to_json` wrote."""
        return TypeAdapter(cls).validate_python(data)


def _line(figure: Figure) -> str:
    floor = ""
    if figure.floor is not None:
        floor = f"{figure.floor:.1f} {figure.unit}"
    ratio = ""
    if figure.ratio is not None:
        ratio = f"{figure.ratio:.2f} ({figure.lowest:.2f}–{figure.highest:.2f})"
    met = ""
    if figure.bar:
        met = _met(figure.met)
    return f"| {figure.name} | {figure.value:.1f} {figure.unit} | {floor} | {ratio} | {figure.bar} | {met} |"


def _met(met: bool) -> str:
    return "yes" if met else "**no**"


def _grown(figure: Figure) -> str:
    return (
        f"| {figure.name}, {figure.size:,} | {figure.value:.1f} {figure.unit} | {figure.floor or 0:.1f} {figure.unit}"
        f" | {figure.ratio or 0:.2f} ({figure.lowest:.2f}–{figure.highest:.2f}) |"
    )


def _peer(peer: Peer) -> str:
    name = f"{peer.name} {peer.version}".strip()
    time = f"{peer.value:.0f} µs ({peer.lowest:.0f}–{peer.highest:.0f})"
    bar = ""
    met = ""
    if peer.bar is not None:
        bar = f"≥ {peer.bar:g} ×"
        met = _met(peer.times >= peer.bar)
    return f"| {name} | {time} | {peer.times:.1f} | {bar} | {met} |"


def single(name: str, values: Sequence[float], unit: str, bar: float | None = None) -> Figure:
    """A figure without a floor, from its values in the rounds."""
    value = statistics.median(values)
    text = ""
    met = True
    if bar is not None:
        text = f"≤ {bar:g} {unit}"
        met = value <= bar
    return Figure(name, value, unit, None, None, min(values), max(values), text, met)


def paired(
    name: str,
    ours: Sequence[float],
    floors: Sequence[float],
    bar: float | None,
    *,
    unit: str = "µs",
    size: int | None = None,
) -> Figure:
    """A figure as a ratio to its floor, from pairs measured in turn."""
    ratios = [a / b for a, b in zip(ours, floors, strict=True)]
    ratio = statistics.median(ratios)
    text = ""
    met = True
    if bar is not None:
        text = f"≤ {bar:g} ×"
        met = ratio <= bar
    return Figure(
        name,
        statistics.median(ours),
        unit,
        statistics.median(floors),
        ratio,
        min(ratios),
        max(ratios),
        text,
        met,
        size,
    )


def each(coroutine: Coroutine, tasks: int) -> float:
    """Run what returns its seconds for a number of tasks: the microseconds of one."""
    with quiet():
        return anyio.run(coroutine, tasks) / tasks * 1e6


@contextmanager
def quiet() -> Iterator[None]:
    """Collect garbage before a measurement, and not during it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def code_hash(root: Path = CODE) -> str:
    """Return a hash of the library's code, to detect outdated results."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def machine() -> str:
    """Describe the machine and its load at the start."""
    kind = f"{platform.machine()} {_processor()}".strip()
    load = ""
    if hasattr(os, "getloadavg"):
        load = f", load average {os.getloadavg()[0]:.1f}"
    return f"{kind}, {os.cpu_count()} cores{load}, Python {platform.python_version()}, asyncio"


def _processor() -> str:
    """Return the name of the processor; empty if unknown."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return ""
    for line in info.read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return ""
