"""Real workflow executions with injected faults, through the swarm on a virtual clock."""

from __future__ import annotations

import gzip
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio

from replanning import (
    Environment,
    Goal,
    Plan,
    ReplanningEngine,
    Settings,
    Task,
    TaskContext,
    ToolSpec,
)
from replanning.changes import ReplaceTask
from replanning.journal import (
    AttemptStarted,
    AttemptSucceeded,
    DecisionMade,
    Lease,
    MemoryStore,
    Record,
    TriggerFired,
)
from replanning.orchestrators import SwarmOrchestrator
from replanning.plan import Fallback, JsonObject
from replanning.testing import VirtualClock

FILE = "wfinstances_open.json.gz"
SOURCE = "WfInstances, https://github.com/wfcommons/WfInstances at f085867, LGPL-3.0"
KINDS = ("1000genome", "blast", "bwa", "cycles", "epigenomics", "seismology")
SHARE = 0.05
WIDTH = 100


@dataclass(frozen=True)
class Workflow:
    """A recorded execution: tasks with their seconds and the numbers of their parents."""

    name: str
    seconds: tuple[float, ...]
    parents: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Row:
    """Result of one workflow."""

    workflow: str
    tasks: int
    faults: int
    finished: bool
    revisions: int
    repeated: int
    untouched: float
    makespan: float
    edges: int = 0
    waits: tuple[float, ...] = ()


def load(folder: Path) -> list[Workflow]:
    """The recorded workflows."""
    with gzip.open(folder / FILE) as file:
        data = json.load(file)
    return [
        Workflow(
            f"{d['name']} {d['file']}",
            tuple(t[1] for t in d["tasks"]),
            tuple(tuple(t[2]) for t in d["tasks"]),
        )
        for d in data
    ]


def faulty(workflow: Workflow, seed: int) -> tuple[Plan, frozenset[str]]:
    """The workflow as a plan, and the tasks whose own tool never works; half have a fallback, half an equal tool."""
    chance = random.Random(f"{workflow.name}:{seed}")
    count = max(1, round(SHARE * len(workflow.seconds)))
    broken = set(chance.sample(range(len(workflow.seconds)), count))
    tools = [
        ToolSpec(name="usual", capability="compute"),
        ToolSpec(name="spare", capability="compute"),
        ToolSpec(name="lone"),
    ]
    tasks = []
    for number, parents in enumerate(workflow.parents):
        spare = number in broken and chance.random() < 0.5
        tasks.append(
            Task(
                id=f"t{number}",
                tool="usual" if spare or number not in broken else "lone",
                depends_on=tuple(f"t{parent}" for parent in parents),
                fallbacks=(Fallback(tool="spare"),) if number in broken and not spare else (),
            )
        )
    plan = Plan(
        name=workflow.name,
        goal=Goal(objective="finish the workflow"),
        tools=tuple(tools),
        tasks=tuple(tasks),
    )
    return plan, frozenset(f"t{number}" for number in broken)


async def play(workflow: Workflow, seed: int) -> Row:
    """Run a workflow with its faults, and once without for its makespan."""
    plan, broken = faulty(workflow, seed)
    bare = await _run(workflow, plan, frozenset())
    return await _run(workflow, plan, broken, bare.makespan)


async def _run(workflow: Workflow, plan: Plan, broken: frozenset[str], bare: float = 0.0) -> Row:
    async with VirtualClock() as clock:
        settings = Settings.model_validate({"cooldown": 0})
        store = _Timed()
        environment = Environment(clock=clock, chance=lambda: 0.5)
        engine = ReplanningEngine(store=store, settings=settings, environment=environment)

        async def work(task: Task, context: TaskContext) -> str:
            root, _, _ = task.id.partition("~")
            if task.id in broken:
                await clock.sleep(workflow.seconds[int(root[1:])] / 2)
                raise RuntimeError(f"{task.tool} is broken for {task.id}")
            await clock.sleep(workflow.seconds[int(root[1:])])
            return task.id

        result = await engine.attach(SwarmOrchestrator(work, max_concurrency=WIDTH)).run(plan)
        makespan = clock.elapsed
    records = list(engine.store.read(result.run))
    started = Counter(r.body.task for r in records if isinstance(r.body, AttemptStarted))
    finished = Counter(r.body.task for r in records if isinstance(r.body, AttemptSucceeded))
    changed = {
        c.task_id
        for revision in result.revisions
        for c in revision.changes
        if isinstance(c, ReplaceTask)
    }
    rest = [task.id for task in plan.tasks if task.id not in broken]
    clean = sum(
        started[task_id] == 1 and finished[task_id] == 1 and task_id not in changed
        for task_id in rest
    )
    before, after = (
        engine.history(result.run).plan_at(number) for number in (0, len(result.revisions))
    )
    return Row(
        workflow.name,
        len(plan.tasks),
        len(broken),
        result.status == "succeeded",
        len(result.revisions),
        sum(count > 1 for count in finished.values()),
        clean / len(rest) if rest else 1.0,
        makespan / bare if bare else makespan,
        len(_edges(before) ^ _edges(after)),
        tuple(round(1000 * seconds, 3) for seconds in store.waits),
    )


def _edges(plan: Plan) -> set[tuple[str, str]]:
    """Return the dependencies between tasks; a replacement counts under the id that it replaced."""
    return {
        (dep.partition("~")[0], task.id.partition("~")[0])
        for task in plan.tasks
        for dep in task.depends_on
    }


class _Timed(MemoryStore):
    """A store that notes how long it took, by a real clock, from a trigger to its decision."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []
        self._fired: dict[str, float] = {}

    def append(self, lease: Lease, record: Record) -> None:
        """Keep a record."""
        super().append(lease, record)
        if isinstance(record.body, TriggerFired):
            self._fired[record.body.trigger.id] = time.perf_counter()
        elif isinstance(record.body, DecisionMade):
            self.waits += [
                time.perf_counter() - self._fired.pop(t)
                for t in record.body.triggers
                if t in self._fired
            ]


def measure(
    folder: Path, *, limit: int | None = None, report: Callable[[str], None] = lambda line: None
) -> list[Row]:
    """Every workflow once, with seeded faults."""
    workflows = load(folder)[:limit]
    rows = []
    for number, workflow in enumerate(workflows):
        rows.append(anyio.run(play, workflow, number))
        report(f"{workflow.name}: {rows[-1].tasks} tasks")
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows added up, by kind of workflow."""
    lines = [
        f"Source: {SOURCE}. {SHARE:.0%} of the tasks of each workflow fail persistently; half of these have a declared",
        f"fallback, half a tool of equal capability; {WIDTH} workers, runtimes from the data on a virtual clock. Run again: finished",
        "tasks; others untouched: of the tasks without faults; edges: dependencies that changed; makespan: the ratio to that of the",
        "same run without faults; engine: from a trigger to its decision, on a real clock.",
        "",
        "| workflows | tasks | faults | finished | run again | others untouched | edges | makespan | engine, p50 / p99 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    kinds = [kind for kind in KINDS if any(kind in row.workflow for row in rows)]
    for kind in [*kinds, "others", "all"]:
        some = [row for row in rows if kind in ("all", _kind(row))]
        if not some:
            continue
        waits = sorted(wait for row in some for wait in row.waits)
        engine = (
            f"{statistics.median(waits):.1f} / {waits[int(0.99 * len(waits))]:.1f} ms"
            if waits
            else ""
        )
        lines.append(
            f"| {kind} ({len(some)}) | {sum(r.tasks for r in some):,} | {sum(r.faults for r in some):,}"
            f" | {sum(r.finished for r in some)}/{len(some)} | {sum(r.repeated for r in some)}"
            f" | {100 * min(r.untouched for r in some):.1f} % | {sum(r.edges for r in some)}"
            f" | {statistics.median(r.makespan for r in some):.3f} | {engine} |"
        )
    return "\n".join(lines)


def _kind(row: Row) -> str:
    return next((kind for kind in KINDS if kind in row.workflow), "others")


def to_json(rows: Sequence[Row]) -> list[JsonObject]:
    """The rows for programs."""
    return [asdict(row) for row in rows]
