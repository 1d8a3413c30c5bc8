"""Agent-shaped plans with unavailable tools: finds another chain where one exists, and proves that none does elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import anyio
import yaml

from replanning import Goal, Plan, ReplanningEngine, Settings, Task, TaskContext, ToolSpec
from replanning.journal import AlternativesConsidered
from replanning.orchestrators import SequentialOrchestrator
from replanning.plan import JsonObject

FAMILIES = Path(__file__).parent / "domains" / "agents.yaml"


@dataclass(frozen=True)
class Family:
    """Tools by name with what they need, produce and cost, and a plan of some of them."""

    name: str
    given: tuple[str, ...]
    goal: tuple[str, ...]
    tools: dict[str, tuple[tuple[str, ...], tuple[str, ...], float]]
    plan: tuple[str, ...]

    def reachable(self, down: Sequence[str]) -> bool:
        """Whether the tools that are left can make the goal: a fixpoint, shared with nothing."""
        have = set(self.given)
        grown = True
        while grown:
            grown = False
            for name, (needs, makes, _) in self.tools.items():
                if name not in down and have.issuperset(needs) and not have.issuperset(makes):
                    have.update(makes)
                    grown = True
        return have.issuperset(self.goal)

    def document(self, down: Sequence[str]) -> Plan:
        """The plan with some tools unavailable; a task depends on those that make what it needs."""
        makers: dict[str, str] = {}
        tasks = []
        for name in self.plan:
            needs, makes, _ = self.tools[name]
            before: dict[str, None] = {}
            for need in needs:
                if need in makers:
                    before[makers[need]] = None
            tasks.append(Task(id=name, tool=name, depends_on=tuple(before)))
            makers.update(dict.fromkeys(makes, name))
        tools = []
        for name, (needs, makes, cost) in self.tools.items():
            up = name not in down
            tools.append(ToolSpec(name=name, needs=needs, produces=makes, cost=cost, available=up))
        artifact = "artifact({})".format
        goal = Goal(objective=f"finish the {self.name}", facts=tuple(map(artifact, self.goal)))
        return Plan(
            goal=goal,
            facts=tuple(map(artifact, self.given)),
            tools=tuple(tools),
            tasks=tuple(tasks),
        )


@dataclass(frozen=True)
class Row:
    """One family with one set of outages."""

    family: str
    down: tuple[str, ...]
    harmless: bool
    recoverable: bool
    succeeded: bool
    proven: bool
    revisions: int
    valid: bool
    milliseconds: float


def load(path: Path = FAMILIES) -> list[Family]:
    """The families of a file."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    families = []
    for name, stated in data.items():
        tools = {}
        for tool, (needs, makes, cost) in stated["tools"].items():
            tools[tool] = (tuple(needs), tuple(makes), cost)
        given = tuple(stated["given"])
        goal = tuple(stated["goal"])
        families.append(Family(name, given, goal, tools, tuple(stated["plan"])))
    return families


def outages(family: Family) -> Iterator[tuple[str, ...]]:
    """Every single and every double outage."""
    yield from combinations(family.tools, 1)
    yield from combinations(family.tools, 2)


async def play(family: Family, down: tuple[str, ...]) -> Row:
    """Run the family's plan with these tools down."""
    have = set(family.given)
    valid = True

    async def work(task: Task, context: TaskContext) -> None:
        nonlocal valid
        needs, makes, _ = family.tools[str(task.tool)]
        valid = valid and task.tool not in down and have.issuperset(needs)
        have.update(makes)

    settings = Settings.model_validate(
        {"approval": {"always_for": []}, "alternatives": {"human_approval_threshold": 0.5}}
    )
    engine = ReplanningEngine(settings=settings)
    start = time.perf_counter()
    result = await engine.attach(SequentialOrchestrator(work)).run(family.document(down))
    elapsed = time.perf_counter() - start
    verdicts = set()
    for record in engine.store.read(result.run):
        if isinstance(record.body, AlternativesConsidered):
            for candidate in record.body.candidates:
                verdicts.add(candidate.alternative.unreachable)
    return Row(
        family.name,
        down,
        not set(down) & set(family.plan),
        family.reachable(down),
        result.status == "succeeded" and have.issuperset(family.goal),
        "proven-unreachable" in verdicts,
        len(result.revisions),
        valid,
        1000 * elapsed,
    )


def measure(*, report: Callable[[str], None] = lambda line: None) -> list[Row]:
    """Every family with every outage."""
    rows = []
    for family in load():
        downs = list(outages(family))
        for down in downs:
            rows.append(anyio.run(play, family, down))
        report(f"{family.name}: {len(downs)} outages")
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows added up, by family."""
    lines = [
        "Every single and double outage of the tools of four plans. Recoverable is what a fixpoint over the tools that are",
        "left says; harmless are outages of tools that the plan does not use.",
        "",
        "| family | outages | recovered of recoverable | proven of unrecoverable | changed of harmless | invalid steps | p50 / max |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in [*dict.fromkeys(row.family for row in rows), "all"]:
        lines.append(_line(name, [row for row in rows if name in ("all", row.family)]))
    return "\n".join(lines)


def recovered_and_proven(rows: Sequence[Row]) -> tuple[str, str]:
    """Count the recovered outages of the recoverable ones, and the others proven unrecoverable."""
    recoverable = 0
    recovered = 0
    proven = 0
    for row in rows:
        if row.recoverable:
            recoverable += 1
            recovered += row.succeeded
        else:
            proven += row.proven
    return f"{recovered}/{recoverable}", f"{proven}/{len(rows) - recoverable}"


def _line(name: str, rows: Sequence[Row]) -> str:
    """The rows of a family, added up in a line of the table."""
    recovered, proven = recovered_and_proven(rows)
    harmless = 0
    changed = 0
    invalid = 0
    times: list[float] = []
    for row in rows:
        if row.harmless:
            harmless += 1
            changed += row.revisions > 0
        invalid += not row.valid
        times.append(row.milliseconds)
    return (
        f"| {name} | {len(rows)} | {recovered} | {proven} | {changed}/{harmless} | {invalid}"
        f" | {statistics.median(times):.1f} / {max(times):.1f} ms |"
    )


def to_json(rows: Sequence[Row]) -> list[JsonObject]:
    """The rows for programs."""
    return [asdict(row) for row in rows]
