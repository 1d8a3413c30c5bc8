"""Real workflow executions with injected faults, with the swarm orchestrator on a virtual clock."""

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
    found = []
    for recorded in data:
        _, seconds, parents = zip(*recorded["tasks"], strict=True)
        name = f"{recorded['name']} {recorded['file']}"
        found.append(Workflow(name, tuple(seconds), tuple(map(tuple, parents))))
    return found


def faulty(workflow: Workflow, seed: int) -> tuple[Plan, frozenset[str]]:
    """The workflow as a plan, and the tasks with a failing tool; half have a fallback, half an equivalent tool."""
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
        tool = "usual"  # which has an equal one
        fallbacks: tuple[Fallback, ...] = ()
        if number in broken and chance.random() >= 0.5:
            tool = "lone"
            fallbacks = (Fallback(tool="spare"),)
        depends_on = tuple(f"t{parent}" for parent in parents)
        tasks.append(Task(id=f"t{number}", tool=tool, depends_on=depends_on, fallbacks=fallbacks))
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
    started: Counter[str] = Counter()
    finished: Counter[str] = Counter()
    for record in engine.store.read(result.run):
        if isinstance(record.body, AttemptStarted):
            started[record.body.task] += 1
        elif isinstance(record.body, AttemptSucceeded):
            finished[record.body.task] += 1
    changed: set[str] = set()
    for revision in result.revisions:
        for change in revision.changes:
            if isinstance(change, ReplaceTask):
                changed.add(change.task_id)
    untouched = 1.0
    if len(plan.tasks) > len(broken):
        affected = changed | broken
        clean = 0
        for task in plan.tasks:
            once = (started[task.id], finished[task.id]) == (1, 1)
            clean += once and task.id not in affected
        untouched = clean / (len(plan.tasks) - len(broken))
    history = engine.history(result.run)
    before = _edges(history.plan_at(0))
    after = _edges(history.plan_at(len(result.revisions)))
    return Row(
        workflow.name,
        len(plan.tasks),
        len(broken),
        result.status == "succeeded",
        len(result.revisions),
        sum(count > 1 for count in finished.values()),
        untouched,
        makespan / bare if bare else makespan,
        len(before ^ after),
        tuple(round(1000 * seconds, 3) for seconds in store.waits),
    )


def _edges(plan: Plan) -> set[tuple[str, str]]:
    """Return the dependencies between tasks; a replacement counts under the id that it replaced."""
    edges: set[tuple[str, str]] = set()
    for task in plan.tasks:
        for dependency in task.depends_on:
            edges.add((_replaced_id(dependency), _replaced_id(task.id)))
    return edges


def _replaced_id(task_id: str) -> str:
    return task_id.partition("~")[0]


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
            for trigger in record.body.triggers:
                if trigger in self._fired:
                    self.waits.append(time.perf_counter() - self._fired.pop(trigger))


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
    for kind in [*KINDS, "others"]:
        some = [row for row in rows if _kind(row) == kind]
        if some:
            lines.append(_line(kind, some))
    if rows:
        lines.append(_line("all", rows))
    return "\n".join(lines)


def _line(kind: str, rows: Sequence[Row]) -> str:
    """The rows of one kind, added up in a line of the table."""
    tasks = 0
    faults = 0
    finished = 0
    repeated = 0
    edges = 0
    waits: list[float] = []
    for row in rows:
        tasks += row.tasks
        faults += row.faults
        finished += row.finished
        repeated += row.repeated
        edges += row.edges
        waits += row.waits
    engine = ""
    if waits:
        waits.sort()
        engine = f"{statistics.median(waits):.1f} / {waits[int(0.99 * len(waits))]:.1f} ms"
    untouched = 100 * min(row.untouched for row in rows)
    makespan = statistics.median(row.makespan for row in rows)
    return (
        f"| {kind} ({len(rows)}) | {tasks:,} | {faults:,} | {finished}/{len(rows)} | {repeated}"
        f" | {untouched:.1f} % | {edges} | {makespan:.3f} | {engine} |"
    )


def _kind(row: Row) -> str:
    return next((kind for kind in KINDS if kind in row.workflow), "others")


def to_json(rows: Sequence[Row]) -> list[JsonObject]:
    """The rows for programs."""
    return [asdict(row) for row in rows]
