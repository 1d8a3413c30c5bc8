"""Agent-shaped plans in which tools are down: is another chain found where one exists, and its absence proven where not?"""

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
            tasks.append(
                Task(
                    id=name,
                    tool=name,
                    depends_on=tuple(dict.fromkeys(makers[n] for n in needs if n in makers)),
                )
            )
            makers.update(dict.fromkeys(makes, name))
        tools = [
            ToolSpec(name=name, needs=needs, produces=makes, cost=cost, available=name not in down)
            for name, (needs, makes, cost) in self.tools.items()
        ]
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
    return [
        Family(
            name,
            tuple(d["given"]),
            tuple(d["goal"]),
            {
                tool: (tuple(needs), tuple(makes), cost)
                for tool, (needs, makes, cost) in d["tools"].items()
            },
            tuple(d["plan"]),
        )
        for name, d in data.items()
    ]


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
    bodies = [record.body for record in engine.store.read(result.run)]
    verdicts = {
        c.alternative.unreachable
        for b in bodies
        if isinstance(b, AlternativesConsidered)
        for c in b.candidates
    }
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
        rows += [anyio.run(play, family, down) for down in outages(family)]
        report(f"{family.name}: {sum(row.family == family.name for row in rows)} outages")
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
        some = [row for row in rows if name in ("all", row.family)]
        can, cannot = (
            [row for row in some if row.recoverable is wanted] for wanted in (True, False)
        )
        harmless = [row for row in some if row.harmless]
        times = [row.milliseconds for row in some]
        lines.append(
            f"| {name} | {len(some)} | {sum(r.succeeded for r in can)}/{len(can)} | {sum(r.proven for r in cannot)}/{len(cannot)}"
            f" | {sum(r.revisions > 0 for r in harmless)}/{len(harmless)} | {sum(not r.valid for r in some)}"
            f" | {statistics.median(times):.1f} / {max(times):.1f} ms |"
        )
    return "\n".join(lines)


def to_json(rows: Sequence[Row]) -> list[JsonObject]:
    """The rows for programs."""
    return [asdict(row) for row in rows]
