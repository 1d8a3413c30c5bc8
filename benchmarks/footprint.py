"""Footprint of a run beyond time per task: journal, memory, resuming, stalls of the event loop."""

from __future__ import annotations

import gc
import json
import sqlite3
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import anyio
import anyio.lowlevel

from benchmarks.figures import Figure, paired, quiet, single
from replanning import Goal, Plan, ReplanningEngine, Settings, Task, TaskContext, ToolSpec
from replanning.journal import MemoryStore, RunStore, SqliteStore
from replanning.orchestrators import SequentialOrchestrator, SwarmOrchestrator


async def nothing(task: Task, context: TaskContext) -> None:
    """The work of a task: none."""


def flat(tasks: int) -> Plan:
    """A plan of independent tasks with deadlines."""
    return Plan(
        goal=Goal(objective="measure"),
        tasks=tuple(Task(id=f"t{i}", timeout=60.0) for i in range(tasks)),
    )


async def _with_store(tasks: int, store: RunStore) -> float:
    orchestrator = ReplanningEngine(store=store).attach(SequentialOrchestrator(nothing))
    plan = flat(tasks)
    start = time.perf_counter()
    await orchestrator.run(plan)
    return time.perf_counter() - start


def store(rounds: int, tasks: int) -> Figure:
    """Measure the overhead of the SQLite journal per observation, compared with bare INSERTs of its rows."""
    extra = []
    floors = []
    for _ in range(rounds):
        with quiet(), tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "history.db"
            memory = anyio.run(_with_store, tasks, MemoryStore())
            journal = SqliteStore(path)
            durable = anyio.run(_with_store, tasks, journal)
            journal.close()
            extra.append((durable - memory) / (2 * tasks) * 1e6)
            floors.append(_bare_inserts(path, Path(folder) / "bare.db") * 1e6)
    name = "SQLite journal, per observation; floor: the bare INSERT, a transaction each"
    return paired(name, extra, floors, 1.2)


def _bare_inserts(source: Path, target: Path) -> float:
    """Return the seconds of one row when the rows of a journal are inserted one by one into another file."""
    with closing(sqlite3.connect(source)) as database:
        (schema,) = database.execute(
            "SELECT sql FROM sqlite_master WHERE name = 'records'"
        ).fetchone()
        rows = database.execute("SELECT * FROM records ORDER BY seq").fetchall()
    places = ", ".join("?" * len(rows[0]))
    with closing(sqlite3.connect(target, isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute(schema)
        statement = f"INSERT INTO records VALUES ({places})"  # noqa: S608 - question marks
        start = time.perf_counter()
        for row in rows:
            database.execute(statement, row)
        return (time.perf_counter() - start) / len(rows)


def memory(tasks: int) -> Figure:
    """Memory of a run beyond its plan document, when every task is done."""
    plan = flat(tasks)

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
    return single(f"memory at {tasks:,} tasks, per task", [value], "B", 1024)


def resume(rounds: int, tasks: int) -> Figure:
    """Seconds to resume a run with two records for each task, compared with reading its rows as JSON."""
    seconds = []
    floors = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "history.db"
            with closing(SqliteStore(path)) as store:
                seconds.append(seconds_to_resume(store, tasks))
            floors.append(_bare_reading(path))
    name = f"resume from {2 * tasks:,} records; floor: reading the rows and json.loads"
    return paired(name, seconds, floors, 3, unit="s")


def _bare_reading(path: Path) -> float:
    """Return the seconds of reading the rows of a journal and decoding each."""
    with closing(sqlite3.connect(path)) as database:
        start = time.perf_counter()
        rows = database.execute("SELECT seq, at, kind, data, crc FROM records ORDER BY seq")
        decoded = [json.loads(data) for _, _, _, data, _ in rows]
        seconds = time.perf_counter() - start
    if len(decoded) < 2:
        raise RuntimeError(f"{path} has {len(decoded)} records: this is not the run to resume")
    return seconds


def seconds_to_resume(store: RunStore, tasks: int) -> float:
    """Make a run with all tasks but one done, and resume it."""

    async def first() -> str:
        engine = ReplanningEngine(store=store)
        async with engine.open(flat(tasks + 1)) as run:
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

    return anyio.run(again, anyio.run(first))


def stalls(rounds: int, tasks: int) -> list[Figure]:
    """The longest time for which the engine keeps a heartbeat beside it from running, opening and running apart."""
    plan = _breaking(tasks)
    opening = []
    running = []
    floor = []
    for _ in range(rounds):
        # Nothing is frozen, as in most programs: what is made while a run opens counts as old then.
        gc.collect()
        opening.append(1000 * anyio.run(longest_stall, lambda beat: _open(plan)))
        running.append(1000 * anyio.run(longest_stall, lambda beat: _run(plan, beat)))
        floor.append(1000 * anyio.run(longest_stall, lambda beat: _bare(tasks)))
    without = statistics.median(floor)
    name = f"longest stall of the loop, {tasks:,} tasks (without the engine {without:.1f} ms)"
    return [
        single(name, running, "ms", 20),
        single(f"longest stall while opening a plan of {tasks:,} tasks", opening, "ms", 20),
    ]


class Heartbeat:
    """Measures how long the loop's thread computes between two of its turns; what other processes take is no stall.

    Attributes:
        longest: seconds of the longest gap since the last `reset`.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset."""
        self.longest = 0.0
        self._last = time.thread_time()

    def tick(self) -> None:
        """Note a turn of the loop."""
        now = time.thread_time()
        self.longest = max(self.longest, now - self._last)
        self._last = now


async def longest_stall(work: Callable[[Heartbeat], Awaitable[None]]) -> float:
    """Return the seconds of the longest time for which work keeps the event loop from others."""
    heart = Heartbeat()

    async def beat() -> None:
        while True:
            heart.tick()
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(beat)
        await anyio.lowlevel.checkpoint()
        heart.reset()
        await work(heart)
        await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    return heart.longest


def _breaking(tasks: int) -> Plan:
    """Every hundredth task fails with its own tool, and another tool of the same capability takes over."""
    tools = (
        ToolSpec(name="usual", capability="compute"),
        ToolSpec(name="spare", capability="compute"),
    )
    return flat(tasks).model_copy(
        update={
            "tools": tools,
            "tasks": tuple(Task(id=f"t{i}", tool="usual", timeout=60.0) for i in range(tasks)),
        }
    )


async def _open(plan: Plan) -> None:
    async with ReplanningEngine().open(plan) as run:
        run.pause()


async def _run(plan: Plan, heart: Heartbeat) -> None:
    opened = False

    async def work(task: Task, context: TaskContext) -> None:
        nonlocal opened
        if not opened:  # opening is a figure of its own
            opened = True
            heart.reset()
        await anyio.lowlevel.checkpoint()  # work that waits for something, as work does
        if task.tool == "usual" and task.id.endswith("00"):
            raise ValueError("broken")

    engine = ReplanningEngine(settings=Settings.model_validate({"cooldown": 0}))
    await engine.attach(SwarmOrchestrator(work, max_concurrency=100)).run(plan)


async def _bare(tasks: int) -> None:
    async with anyio.create_task_group() as group:
        for _ in range(tasks):
            group.start_soon(anyio.lowlevel.checkpoint)
            await anyio.lowlevel.checkpoint()
