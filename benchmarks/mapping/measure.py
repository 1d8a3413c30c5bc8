"""Runs each program on one list, kills it halfway, and counts the repeated calls."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.effects.measure import (
    FRAMEWORKS,
    ROOT,
    lines_of_code,
    missing,
    run_program,
    server_of,
    told,
)
from benchmarks.figures import machine
from benchmarks.mapping.client import AT_ONCE, DOCUMENTS
from replanning.plan import JsonObject

PROGRAMS = Path(__file__).parent / "programs"
COLUMNS = {
    "LangGraph, `invoke`": ("LangGraph", "list_langgraph.py"),
    "LangGraph, `ainvoke`": ("LangGraph", "list_langgraph_async.py"),
    "Prefect": ("Prefect", "list_prefect.py"),
    "replanning": ("replanning", "list_replanning.py"),
}
"""The columns: the framework, as the benchmark `effects` calls it, and the program."""

_KILL_AT = 100
_HOPELESS = "67 147"


@dataclass(frozen=True)
class Situation:
    """Situation for a program.

    Attributes:
        name: as in the table.
        variables: environment variables of the program.
    """

    name: str
    variables: dict[str, str]

    @property
    def kills(self) -> bool:
        """Return whether the program is killed."""
        return "KILL_AT" in self.variables


UNDISTURBED = Situation("10 fail, and the other converter takes over", {})
SITUATIONS = (
    UNDISTURBED,
    Situation("the other converter fails at 2 of them, too", {"HOPELESS": _HOPELESS}),
    Situation(f"killed at call {_KILL_AT}, of 5 ms each, and resumed", {"KILL_AT": str(_KILL_AT)}),
    Situation(
        f"killed at call {_KILL_AT}, of 100 ms each, and resumed",
        {"KILL_AT": str(_KILL_AT), "SECONDS": "0.1"},
    ),
)


@dataclass(frozen=True)
class Row:
    """Result of one program in one situation.

    Attributes:
        column: the framework, a key of `COLUMNS`.
        situation: its name.
        result: what the program printed in the end, or the error that ended it.
        again: how many calls were made a second time, in each round.
        seconds: from the start of the program to its end, in each round; with the resumed one.
    """

    column: str
    situation: str
    result: str
    again: tuple[int, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Report:
    """All rows, with the measured versions.

    Attributes:
        machine: where.
        versions: by column; `not run` without it.
        lines: lines of code of each program.
        rows: what was measured.
    """

    machine: str
    versions: dict[str, str]
    lines: dict[str, int]
    rows: tuple[Row, ...]

    @classmethod
    def from_json(cls, data: object) -> Report:
        """Read the output of `to_json`."""
        return TypeAdapter(cls).validate_python(data)

    def to_json(self) -> JsonObject:
        """Figures as JSON."""
        return asdict(self)

    def table(self) -> str:
        """The rows as a Markdown table."""
        heads = [f"{name} {number}" for name, number in self.versions.items()]
        lines = [
            f"{self.machine}.\n",
            f"| {DOCUMENTS} documents, {AT_ONCE} at once | {' | '.join(heads)} |",
            "|---|" + "---|" * len(heads),
        ]
        for situation in SITUATIONS:
            results = self._cells(situation, lambda row: row.result)
            lines.append(f"| {situation.name}: the result | {' | '.join(results)} |")
            if situation.kills:
                again = self._cells(situation, lambda row: _spread(row.again, "{:.0f}"))
                lines.append(f"| … calls made a second time | {' | '.join(again)} |")
        times = self._cells(UNDISTURBED, lambda row: _spread(row.seconds, "{:.1f}") + " s")
        lines.append(f"| time of the program, the first situation | {' | '.join(times)} |")
        counts = [str(self.lines[column]) for column in self.versions]
        lines.append(f"| lines of code | {' | '.join(counts)} |")
        return "\n".join(lines)

    def _cells(self, situation: Situation, cell: Callable[[Row], str]) -> list[str]:
        cells = []
        for column in self.versions:
            text = "not run"
            for row in self.rows:
                if (row.situation, row.column) == (situation.name, column):
                    text = cell(row)
            cells.append(text)
        return cells


def _spread(values: tuple[float, ...], form: str) -> str:
    """The median with the lowest and the highest of the rounds."""
    middle, lowest, highest = (
        form.format(value) for value in (statistics.median(values), min(values), max(values))
    )
    if lowest == highest:
        return middle
    return f"{middle} ({lowest}–{highest})"


def measure(
    *, ours: bool = False, rounds: int = 3, report: Callable[[str], None] = lambda line: None
) -> Report:
    """Run the programs of all installed frameworks in turn, or only our own."""
    where = machine()
    versions: dict[str, str] = {}
    lines: dict[str, int] = {}
    rows = []
    with ExitStack() as stack:
        variables: dict[str, dict[str, str]] = {}
        for column, (framework, program) in COLUMNS.items():
            _, needed = FRAMEWORKS[framework]
            lines[column] = lines_of_code(PROGRAMS / program)
            versions[column] = "not run"
            if not missing(framework) and not (ours and needed):
                versions[column] = version(next(iter(needed), "replanning"))
                variables[column] = stack.enter_context(server_of(framework))
        for situation in SITUATIONS:
            played: dict[str, list[Row]] = {column: [] for column in variables}
            for _ in range(rounds):
                for column, own in variables.items():
                    row = play(column, situation, own)
                    report(f"{column}, {row.situation}: {row.result}, {row.again} again")
                    played[column].append(row)
            rows += [_together(each) for each in played.values()]
    return Report(where, versions, lines, tuple(rows))


def _together(rows: list[Row]) -> Row:
    """One row of those of several rounds."""
    results = dict.fromkeys(row.result for row in rows)
    again = tuple(number for row in rows for number in row.again)
    seconds = tuple(number for row in rows for number in row.seconds)
    return Row(rows[0].column, rows[0].situation, " or ".join(results), again, seconds)


def play(column: str, situation: Situation, variables: dict[str, str] | None = None) -> Row:
    """Run one program in one situation; again, as its framework resumes, if it was killed.

    Args:
        column: the program, a key of `COLUMNS`.
        situation: what happens to it.
        variables: environment variables that say where the server of the framework is.
    """
    framework, name = COLUMNS[column]
    program = str(PROGRAMS / name)
    resume = [program]
    if framework == "Prefect":
        retry = ROOT / "benchmarks" / "effects" / "prefect_retry.py"
        resume = [str(retry), f"{program}:convert_all"]
    with tempfile.TemporaryDirectory() as folder:
        calls = Path(folder) / "calls"
        environment = {**os.environ, **(variables or {}), "PYTHONPATH": str(ROOT)}
        environment["CALLS"] = str(calls)
        start = time.perf_counter()
        done = run_program([program], folder, {**environment, **situation.variables})
        if done.returncode == -signal.SIGKILL:
            going_on = {**situation.variables, **environment}
            going_on.pop("KILL_AT")
            done = run_program(resume, folder, going_on)
        seconds = time.perf_counter() - start
        made = calls.read_text(encoding="ascii").splitlines()
    again = len(made) - len(set(made))
    return Row(column, situation.name, _result(done), (again,), (seconds,))


def _result(done: subprocess.CompletedProcess[str]) -> str:
    """What the list that a program has printed holds, or how the program ended without one."""
    text = told(done)
    if not text.startswith("["):
        return text
    results = json.loads(text)
    there = [result for result in results if result is not None]
    in_place = 0
    for index, result in enumerate(results):
        if result is not None and result["n"] == index:
            in_place += 1
    if in_place < len(there):
        return f"{len(there)} of {len(results)}, not in order"
    if in_place < len(results):
        return f"{in_place} in order, {len(results) - in_place} null in their places"
    return f"{in_place} in order"
