"""How much a run costs beside the work itself, as ratios to floors measured in the same round."""

from __future__ import annotations

import asyncio
import gc
import platform
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio
import anyio.lowlevel

from replanning import (
    Alternative,
    Goal,
    Plan,
    PlanView,
    ReplanningEngine,
    ReplanRequest,
    Settings,
    Task,
    TaskContext,
)
from replanning.changes import ReplaceTask
from replanning.history import MemoryStore, SqliteStore
from replanning.interfaces import RunStore
from replanning.orchestrators import SequentialOrchestrator, SwarmOrchestrator

JsonObject = dict[str, object]


@dataclass(frozen=True)
class Figure:
    """One measured figure: medians over rounds, and the spread of the ratio."""

    name: str
    value: float
    unit: str
    floor: float | None
    ratio: float | None
    lowest: float
    highest: float
    bar: str
    met: bool


@dataclass(frozen=True)
class Report:
    """Figures with the machine on which they were measured."""

    machine: str
    rounds: int
    figures: tuple[Figure, ...]

    def table(self) -> str:
        """The figures as a Markdown table."""
        lines = [
            f"{self.machine}; medians of {self.rounds} rounds, floor and figure measured in turn in each.",
            "",
            "| figure | measured | floor | ratio (lowest–highest) | bar | met |",
            "|---|---|---|---|---|---|",
        ]
        for figure in self.figures:
            floor = "" if figure.floor is None else f"{figure.floor:.1f} {figure.unit}"
            spread = f"({figure.lowest:.2f}–{figure.highest:.2f})"
            ratio = "" if figure.ratio is None else f"{figure.ratio:.2f} {spread}"
            met = "yes" if figure.met else "no"
            lines.append(f"| {figure.name} | {figure.value:.1f} {figure.unit} | {floor} | {ratio} | {figure.bar} | {met} |")
        return "\n".join(lines)

    def to_json(self) -> JsonObject:
        """The same for programs."""
        return asdict(self)


def measure(*, short: bool = False) -> Report:
    """Measure everything, one figure after another."""
    rounds = 3 if short else 7
    tasks = 2_000 if short else 10_000
    large = 20_000 if short else 100_000
    figures = [
        _ratio("sequential, per task", rounds, tasks, _sequential, _bare_tasks, 2.0),
        _ratio("swarm of 100, per task", rounds, tasks, _swarm, _task_group, 0.7),
        *_replans(rounds, 200 if short else 1_000, large),
        _store(rounds, tasks),
        _memory(large),
        _resume(large // 2),
    ]
    machine = f"{platform.machine()}, Python {platform.python_version()}, asyncio"
    return Report(machine, rounds, tuple(figures))


Coroutine = Callable[[int], Awaitable[float]]


def _ratio(name: str, rounds: int, tasks: int, subject: Coroutine, floor: Coroutine, bar: float) -> Figure:
    """Time subject and floor in turn; both return seconds for the given number of tasks."""
    pairs = []
    for _ in range(rounds + 1):
        with _quiet():
            pairs.append((anyio.run(subject, tasks), anyio.run(floor, tasks)))
    ours, theirs = ([pair[i] / tasks * 1e6 for pair in pairs[1:]] for i in (0, 1))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    ratio = statistics.median(ratios)
    return Figure(
        name, statistics.median(ours), "µs", statistics.median(theirs), ratio, min(ratios), max(ratios), f"≤ {bar} ×", ratio <= bar
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Collect garbage before and not while measuring the same way for everybody."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def _nothing() -> None:
    """The work: none."""


async def _work(task: Task, context: TaskContext) -> None:
    """The work of a task: none."""


def _plan(tasks: int) -> Plan:
    goal = Goal(objective="measure")
    return Plan(goal=goal, tasks=tuple(Task(id=f"t{i}", timeout=60.0) for i in range(tasks)))


async def _bare_tasks(tasks: int) -> float:
    start = time.perf_counter()
    for _ in range(tasks):
        await asyncio.create_task(_nothing())
    return time.perf_counter() - start


async def _task_group(tasks: int) -> float:
    start = time.perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(tasks):
            group.start_soon(_nothing)
    return time.perf_counter() - start


async def _sequential(tasks: int) -> float:
    plan = _plan(tasks)
    orchestrator = ReplanningEngine().attach(SequentialOrchestrator(_work))
    start = time.perf_counter()
    await orchestrator.run(plan)
    return time.perf_counter() - start


async def _swarm(tasks: int) -> float:
    plan = _plan(tasks)
    orchestrator = ReplanningEngine().attach(SwarmOrchestrator(_work, max_concurrency=100))
    start = time.perf_counter()
    await orchestrator.run(plan)
    return time.perf_counter() - start


class _Instant:
    """A provider that answers at once: the same task again under another id."""

    name = "instant"

    async def propose(self, request: ReplanRequest) -> list[Alternative]:
        view: PlanView = request.view
        task_id = request.triggers[0].tasks[0]
        task = view.task(task_id).task.model_copy(update={"id": view.fresh_id(task_id)})
        change = ReplaceTask(task_id=task_id, tasks=(task,))
        return [Alternative(changes=(change,), reason="again under another id", confidence=0.9)]


async def _failures(tasks: int, count: int) -> list[float]:
    """Seconds from the report of a failure to the applied revision, for `count` tasks of a plan."""
    settings = Settings.model_validate({"cooldown": 0})
    engine = ReplanningEngine([_Instant()], settings=settings)
    latencies = []
    async with engine.open(_plan(tasks)) as run:
        ready = run.ready()
        for _ in range(count):
            task = await anext(ready)
            attempt = run.started(task.id)
            revision = run.live.revision
            start = time.perf_counter()
            run.failed(attempt, ValueError("broken"))
            while run.live.revision == revision:
                await anyio.lowlevel.checkpoint()
            latencies.append(time.perf_counter() - start)
        run.pause()
    return latencies


def _replans(rounds: int, count: int, large: int) -> list[Figure]:
    """Latency from trigger to revision at 1,000 tasks, and how it grows with the plan."""
    small_p50, small_p99, growth = [], [], []
    for _ in range(rounds):
        with _quiet():
            small = sorted(anyio.run(_failures, 1_000, min(count, 900)))
            big = sorted(anyio.run(_failures, large, min(count, 900)))
        small_p50.append(statistics.median(small) * 1e6)
        small_p99.append(small[int(len(small) * 0.99)] * 1e6)
        growth.append(statistics.median(big) / statistics.median(small))
    p50, p99, grown = (statistics.median(values) for values in (small_p50, small_p99, growth))
    return [
        Figure("trigger to revision, 1,000 tasks, p50", p50, "µs", None, None, 0, 0, "≤ 250 µs", p50 <= 250),
        Figure("trigger to revision, 1,000 tasks, p99", p99, "µs", None, None, 0, 0, "≤ 1000 µs", p99 <= 1000),
        Figure(
            f"the same at {large:,} tasks, p50",
            p50 * grown,
            "µs",
            p50,
            grown,
            min(growth),
            max(growth),
            "≤ 1.5 ×",
            grown <= 1.5,
        ),
    ]


async def _with_store(tasks: int, store: RunStore) -> float:
    orchestrator = ReplanningEngine(store=store).attach(SequentialOrchestrator(_work))
    plan = _plan(tasks)
    start = time.perf_counter()
    await orchestrator.run(plan)
    return time.perf_counter() - start


def _store(rounds: int, tasks: int) -> Figure:
    """What the SQLite journal adds to each observation, against memory."""
    extra = []
    for _ in range(rounds):
        with _quiet(), tempfile.TemporaryDirectory() as folder:
            memory = anyio.run(_with_store, tasks, MemoryStore())
            store = SqliteStore(Path(folder) / "history.db")
            durable = anyio.run(_with_store, tasks, store)
            store.close()
        extra.append((durable - memory) / (2 * tasks) * 1e6)
    value = statistics.median(extra)
    return Figure("SQLite journal, more per observation", value, "µs", None, None, 0, 0, "≤ 40 µs", value <= 40)


def _memory(tasks: int) -> Figure:
    """Memory of a run beyond its plan document, when every task is done."""
    plan = _plan(tasks)

    async def run() -> int:
        gc.collect()
        tracemalloc.start()
        engine = ReplanningEngine()
        async with engine.open(plan) as opened:
            async for task in opened.ready():
                async with opened.attempt(task):
                    pass
            gc.collect()
            used = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return used

    value = anyio.run(run) / tasks
    return Figure(f"memory at {tasks:,} tasks, per task", value, "B", None, None, 0, 0, "≤ 1024 B", value <= 1024)


def _resume(tasks: int) -> Figure:
    """Seconds to take up a run whose journal holds two records for each of its tasks."""
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "history.db")

        async def first() -> str:
            engine = ReplanningEngine(store=store)
            async with engine.open(_plan(tasks + 1)) as run:
                ready = run.ready()
                for _ in range(tasks):
                    run.succeeded(run.started((await anext(ready)).id))
                run.pause()
            return run.id

        async def again(run_id: str) -> float:
            start = time.perf_counter()
            async with ReplanningEngine(store=store).resume(run_id) as run:
                elapsed = time.perf_counter() - start
                run.pause()
            return elapsed

        value = anyio.run(again, anyio.run(first))
        store.close()
    return Figure(f"resume from {2 * tasks:,} records", value, "s", None, None, 0, 0, "≤ 2 s", value <= 2)


