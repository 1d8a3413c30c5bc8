"""Figures of the capacity of one host and one database, and the computation of the table of sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from pydantic import TypeAdapter

from replanning.plan import JsonObject

SIZES: Final = (100, 1_000, 10_000, 100_000, 1_000_000)
EXAMPLE: Final = 10_000

TASKS: Final = 10
"""Tasks of a run; each takes two records, and the run two more."""

SECONDS: Final = 30
"""Duration of a task in the table of sizes."""

HEADROOM: Final = 0.5
"""Share of the saturation load that the table of sizes uses."""

SECONDS_OF_RENEWAL: Final = 10
"""Interval of lease renewals of an open run."""

RECORD: Final = "one record, {} at once in one process"
MEMORY: Final = "an open run of {} tasks: memory"
IDLE_LOOP: Final = "an open run that waits: time of its event loop, each second"
RENEWAL: Final = "renewing 1,000 leases"
DISK: Final = "1,000 records in the store"


@dataclass(frozen=True)
class Row:
    """One figure for memory, SQLite and PostgreSQL; None where it does not apply."""

    name: str
    unit: str
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Capacity:
    """All figures, with the machine on which they were measured.

    Attributes:
        clients: numbers of processes that only append records to one PostgreSQL server, with the
            records that the server takes in a second, and its connections.
    """

    machine: str
    server: str
    rows: tuple[Row, ...]
    clients: tuple[tuple[int, float, int], ...]

    def table(self) -> str:
        """Figures as Markdown tables."""
        figures = []
        for row in self.rows:
            cells = [row.name]
            for value in row.values:
                cell = ""
                if value is not None:
                    cell = f"{rounded(value)} {row.unit}".strip()
                cells.append(cell)
            figures.append(cells)
        table = _markdown(("figure", "memory", "SQLite", "PostgreSQL"), figures)
        text = f"{self.machine}; {self.server}.\n\n{table}"
        if not self.clients:
            return text
        heads = (
            "processes that append to one PostgreSQL server",
            "records a second",
            "connections",
        )
        clients = []
        for number, records, links in self.clients:
            clients.append((str(number), rounded(records), str(links)))
        return f"{text}\n\n{_markdown(heads, clients)}"

    def sizes(self) -> str:
        """Needs of each number of open runs, as a Markdown table; the sizing page states the formulas."""
        if not self.clients:
            return "This table needs figures of a PostgreSQL server."
        most = _as_shown(max(records for _, records, _ in self.clients))
        record = self._on_postgres(RECORD.format("50 runs"))
        idle = self._on_postgres(IDLE_LOOP)
        memory = self._on_postgres(MEMORY.format(TASKS))
        renewal = self._on_postgres(RENEWAL)
        disk = self._on_postgres(DISK)
        heads = (
            "open runs",
            "tasks a second",
            "records a second",
            "processes",
            "memory",
            "PostgreSQL servers",
        )
        lines = []
        example = ""
        for runs in SIZES:
            tasks = _as_shown(runs / SECONDS)
            records = _as_shown(tasks * (2 + 2 / TASKS))
            processes = (records * record + runs * idle) / 1e6 / HEADROOM
            servers = (records / most + runs * renewal / 1e6 / SECONDS_OF_RENEWAL) / HEADROOM
            gigabytes = runs * memory / 1e6
            disk_of_a_day = records * disk * 86_400 / 1e9
            memory_of_all = f"{rounded(gigabytes)} GB"
            if gigabytes < 0.1:
                memory_of_all = f"{rounded(1000 * gigabytes)} MB"
            if runs == EXAMPLE:
                example = f"""For {runs:,} runs:

- tasks a second: {runs:,} / {SECONDS} = {rounded(tasks)}
- records a second: {rounded(tasks)} × (2 + 2 / {TASKS}) = {rounded(records)}
- processes: ({rounded(records)} × {rounded(record)} µs + {runs:,} × {rounded(idle)} µs) / {HEADROOM} = {rounded(processes)}
- memory: {runs:,} × {rounded(memory)} KB = {memory_of_all}
- PostgreSQL servers: ({rounded(records)} / {rounded(most)} + {runs:,} / 1,000 × {rounded(renewal)} ms / {SECONDS_OF_RENEWAL} s) / {HEADROOM} = {rounded(servers)}
- disk for a day: {rounded(records)} × 86,400 × {rounded(disk)} KB / 1,000 = {rounded(disk_of_a_day)} GB"""
            rates = (f"{runs:,}", rounded(tasks), rounded(records), f"{math.ceil(processes):,}")
            lines.append(
                (*rates, memory_of_all, f"{math.ceil(servers):,}", f"{rounded(disk_of_a_day)} GB")
            )
        return f"{_markdown((*heads, 'disk for a day'), lines)}\n\n{example}"

    def _on_postgres(self, name: str) -> float:
        """Return a figure of PostgreSQL as it is shown; 0 where it does not apply."""
        row = next(row for row in self.rows if row.name == name)
        return _as_shown(row.values[-1] or 0.0)

    def to_json(self) -> JsonObject:
        """Figures as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Capacity:
        """Read figures that `to_json` wrote."""
        return TypeAdapter(cls).validate_python(data)


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def _as_shown(value: float) -> float:
    """Return a number with three digits that count, so that readers who calculate with what is shown get the same."""
    return float(f"{value:.3g}")


def rounded(value: float) -> str:
    """Return a number with three significant digits."""
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{round(value, digits):,.{max(0, digits)}f}"
