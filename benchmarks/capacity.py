"""Capacity of one host and one database, for the sizing page."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import count
from pathlib import Path
from threading import Barrier
from typing import Any

import anyio
import anyio.lowlevel

from benchmarks.figures import machine, quiet
from benchmarks.footprint import flat, seconds_to_resume
from benchmarks.sizing import (
    DISK,
    IDLE_LOOP,
    MEMORY,
    RECORD,
    RENEWAL,
    TASKS,
    Capacity,
    Row,
    rounded,
)
from benchmarks.speed import failures
from replanning import Goal, Plan, ReplanningEngine, Settings, Task, TaskContext, ToolSpec
from replanning.environment import owner_id
from replanning.journal import InboxMessage, MemoryStore, RunStore, SqliteStore
from replanning.plan import RunId
from replanning.testing.stores import sample_message, sample_record


def measure(
    *,
    short: bool = False,
    postgres: str | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Capacity:
    """Measure everything, on the PostgreSQL server of an address or on a temporary one; without a server, only the rest."""
    where = machine()
    rows = list[Row]()
    runs = 20 if short else 200
    rounds = 1 if short else 3
    held = 50 if short else 1_000
    cores = os.cpu_count() or 1
    with _places(postgres) as (place, server):
        kinds = ["memory", "sqlite"]
        if server:
            kinds.append("postgres")

        def add(
            names: dict[str, str], figure: Callable[..., Sequence[float | None]], *arguments: object
        ) -> None:
            found = [figure(kind, place(kind), *arguments) for kind in kinds]
            for (name, unit), values in zip(names.items(), zip(*found, strict=True), strict=True):
                rows.append(Row(name, unit, values))
                shown = ["-" if value is None else rounded(value) for value in values]
                report(f"{name}: {', '.join(shown)} {unit}")

        for words, number in {"1 run": 1, "10 runs": 10, "50 runs": 50, "200 runs": 200}.items():
            name = RECORD.format(words)
            add({name: "µs"}, _record, runs, number, rounds)
        for number, words in {
            1: "one process",
            cores: f"{cores} processes, one for each core",
        }.items():
            add({f"tasks a second of {words}": ""}, _tasks, number, runs)
        for size in (100, 1_000):
            add({f"one replan in a plan of {size:,} tasks": "ms"}, _replan, size)
        waits = {"an open run that waits: processor time, each second": "µs", IDLE_LOOP: "µs"}
        add(
            {MEMORY.format(TASKS): "KB", **waits},
            _alone,
            _open_runs,
            held,
            TASKS,
            1 if short else 12,
        )
        add({MEMORY.format(100): "KB"}, _alone, _open_runs, held // 2, 100, 0)
        add({RENEWAL: "ms"}, _renew, held)
        add({DISK: "KB", "written for 1,000 records, with the log": "KB"}, _alone, _on_disk, runs)
        add({"resuming a run of 10,000 records": "s"}, _resume, 100 if short else 5_000)
        clients = []
        if server:
            rows += _message_rows(place("postgres"), 20 if short else 200)
            for number in (1, 2) if short else (1, 2, 4, 8, 16):
                clients.append(_clients(number, place("postgres"), 5 * runs))
                report(f"{number} processes append {rounded(clients[-1][1])} records a second")
    return Capacity(where, server or "without PostgreSQL", tuple(rows), tuple(clients))


def _message_rows(place: str, times: int) -> list[Row]:
    """Measure the delay until a message of another process is seen."""
    waited = _notified(place, times)
    name = "a message of another process is seen:"
    half = waited[len(waited) // 2]
    late = waited[int(len(waited) * 0.99)]
    return [
        Row(f"{name} half within", "ms", (None, None, half)),
        Row(f"{name} 99 in 100 within", "ms", (None, None, late)),
    ]


@contextmanager
def _places(address: str | None) -> Iterator[tuple[Callable[[str], str], str]]:
    """A function that makes an empty place for a kind of store, and the description of the PostgreSQL server."""
    from tests.support.postgres import Server, missing_part

    numbers = count()
    server = ""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if address is None and not missing_part():
            address = stack.enter_context(Server.running(fsync=True)).base
            server = " on the same host"
        if address is not None:
            number = str(_sql(address, "SHOW server_version")).partition(" ")[0]
            fsync = _sql(address, "SHOW fsync")
            server = f"PostgreSQL {number}{server}, fsync {fsync}"

        def place(kind: str) -> str:
            if kind != "postgres":
                return str(folder / f"{next(numbers)}.db")
            from psycopg.conninfo import make_conninfo

            schema = f"replanning_capacity_{os.getpid()}_{next(numbers)}"
            _sql(str(address), f"CREATE SCHEMA {schema}")
            stack.callback(_sql, str(address), f"DROP SCHEMA {schema} CASCADE")
            return make_conninfo(str(address), options=f"-csearch_path={schema}")

        yield place, server


def _sql(address: str, statement: str) -> Any:
    import psycopg

    with psycopg.connect(address, autocommit=True) as database:
        cursor = database.execute(statement.encode())
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


def _store(kind: str, place: str) -> RunStore:
    if kind == "postgres":
        from replanning.journal.postgres import PostgresStore

        return PostgresStore(place)
    if kind == "sqlite":
        return SqliteStore(place)
    return MemoryStore()


async def _execute(store: RunStore, runs: int, at_once: int) -> None:
    """Execute runs with sequential tasks, several of them at once."""
    engine = ReplanningEngine(store=store)
    plans = iter([flat(TASKS) for _ in range(runs)])

    async def work(task: Task, context: TaskContext) -> None:
        await anyio.lowlevel.checkpoint()  # other runs have their turns

    async def worker() -> None:
        for plan in plans:
            await engine.execute(plan, work, max_concurrency=1)

    async with anyio.create_task_group() as group:
        for _ in range(at_once):
            group.start_soon(worker)


def _record(kind: str, place: str, runs: int, at_once: int, rounds: int) -> tuple[float]:
    """Microseconds of a record, with its share of the execution of the runs."""
    found = []
    with closing(_store(kind, place)) as store:
        for _ in range(rounds):
            with quiet():
                start = time.perf_counter()
                anyio.run(_execute, store, runs, at_once)
                found.append(time.perf_counter() - start)
        records = sum(info.records for info in store.runs()) / rounds
    return (statistics.median(found) / records * 1e6,)


def _replan(kind: str, place: str, tasks: int) -> tuple[float]:
    """Milliseconds from a failed task to its substitute, by `repair`."""
    # Each task has tools of its own, so that the failure of one says nothing about the others.
    tools: list[ToolSpec] = []
    own: list[Task] = []
    for i in range(tasks):
        tools.append(ToolSpec(name=f"usual{i}", capability=f"c{i}"))
        tools.append(ToolSpec(name=f"spare{i}", capability=f"c{i}"))
        own.append(Task(id=f"t{i}", tool=f"usual{i}"))
    plan = Plan(goal=Goal(objective="measure"), tools=tuple(tools), tasks=tuple(own))
    settings = Settings.model_validate({"cooldown": 0, "limits": {"replans_per_run": 1_000}})
    with closing(_store(kind, place)) as store, quiet():
        engine = ReplanningEngine(["repair"], settings=settings, store=store)
        return (statistics.median(anyio.run(failures, engine, plan, 90)) * 1000,)


def _resume(kind: str, place: str, tasks: int) -> tuple[float]:
    with closing(_store(kind, place)) as store:
        return (seconds_to_resume(store, tasks) * 5_000 / tasks,)


def _renew(kind: str, place: str, runs: int) -> tuple[float]:
    """Milliseconds to renew 1,000 leases at once."""
    with closing(_store(kind, place)) as store:
        leases = [
            store.create(RunId(f"run-{number}"), owner_id(), 0.0, 60.0) for number in range(runs)
        ]
        found = []
        for at in range(5):
            start = time.perf_counter()
            store.renew_all(leases, float(at), 60.0)
            found.append(time.perf_counter() - start)
    return (statistics.median(found) / runs * 1e6,)


# What is measured in processes of its own

_barrier: Barrier | None = None


def _start_with(barrier: Barrier) -> None:
    global _barrier  # noqa: PLW0603 - what a process of the pool is given at its start
    _barrier = barrier


def _wait_for_others() -> None:
    assert _barrier is not None
    _barrier.wait()


def _together(number: int, function: Callable[..., Any], *arguments: object) -> list[Any]:
    """Call a function in several new processes, which start together."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(number, timeout=120)
    with ProcessPoolExecutor(number, context, _start_with, (barrier,)) as pool:
        futures = [pool.submit(function, *arguments) for _ in range(number)]
        return [future.result() for future in futures]


def _alone(kind: str, place: str, function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function in a new process, for a clean measure of memory."""
    return _together(1, function, kind, place, *arguments)[0]


def _span(times: Iterable[Sequence[float]]) -> float:
    """Seconds from the first beginning to the last end, by the clock that all processes share."""
    return max(time[1] for time in times) - min(time[0] for time in times)


def _tasks(kind: str, place: str, processes: int, runs: int) -> tuple[float]:
    times = _together(processes, _execute_together, kind, place, runs)
    return (processes * runs * TASKS / _span(times),)


def _execute_together(kind: str, place: str, runs: int) -> tuple[float, float]:
    with closing(_store(kind, place)) as store:
        _wait_for_others()
        start = time.perf_counter()
        anyio.run(_execute, store, runs, 50)
        return start, time.perf_counter()


def _clients(processes: int, place: str, records: int) -> tuple[int, float, int]:
    found = _together(processes, _append, place, records)
    most = max(connections for *_, connections in found)
    return processes, processes * records / _span(found), most


def _append(place: str, records: int) -> tuple[float, float, int]:
    with closing(_store("postgres", place)) as store:
        lease = store.create(RunId(f"run-{os.getpid()}"), owner_id(), 0.0, 60.0)
        _wait_for_others()
        connections = _sql(
            place, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'replanning'"
        )
        start = time.perf_counter()
        for seq in range(1, records + 1):
            store.append(lease, sample_record(seq))
        return start, time.perf_counter(), connections


def _open_runs(kind: str, place: str, runs: int, tasks: int, seconds: float) -> tuple[float, ...]:
    """Kilobytes of an open run, and what it takes while it waits: microseconds of the processor, and of the loop."""
    asked = 0.0

    async def hold() -> tuple[float, ...]:
        used = []
        document = flat(tasks).model_dump_json()
        stop = anyio.Event()

        async def one(*, task_status: anyio.abc.TaskStatus[None]) -> None:
            async with engine.open(Plan.model_validate_json(document)):
                task_status.started()
                await stop.wait()

        async with anyio.create_task_group() as group:
            for number in range(1, runs + 1):
                await group.start(one)
                if number in (runs // 10, runs):
                    gc.collect()
                    used.append(_resident())
            before = asked
            busy = time.process_time()
            await anyio.sleep(seconds)
            busy = time.process_time() - busy
            waited = asked - before
            stop.set()
        memory = (used[1] - used[0]) / (runs - runs // 10)
        if not seconds:
            return (memory,)
        scale = 1e6 / seconds / runs
        return memory, busy * scale, waited * scale

    with closing(_store(kind, place)) as store:
        inbox = store.inbox
        engine = ReplanningEngine(store=store)

        def timed(run: RunId) -> Sequence[InboxMessage]:
            nonlocal asked
            start = time.perf_counter()
            found = inbox(run)
            asked += time.perf_counter() - start
            return found

        vars(store)["inbox"] = timed
        return anyio.run(hold)


def _resident() -> float:
    """Kilobytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 1000


def _on_disk(kind: str, place: str, runs: int) -> tuple[float | None, ...]:
    """Kilobytes of 1,000 records in the store, and those written for them."""
    if kind == "memory":
        return None, None
    before = _written(kind, place)
    with closing(_store(kind, place)) as store:
        anyio.run(_execute, store, runs, 10)
        records = sum(info.records for info in store.runs())
    if kind == "sqlite":
        size = Path(place).stat().st_size
    else:
        size = int(
            _sql(
                place,
                "SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE relkind = 'r' AND "
                "relname LIKE 'replanning%' AND pg_table_is_visible(oid)",
            )
        )
    return size / records, (_written(kind, place) - before) / records


def _written(kind: str, place: str) -> float:
    """Bytes that the server has written to its log, or this process to files."""
    if kind == "postgres":
        return float(_sql(place, "SELECT pg_current_wal_lsn() - '0/0'"))
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    wchar = next(line for line in lines if line.startswith("wchar"))
    return float(wchar.split()[1])


def _notified(place: str, times: int) -> list[float]:
    """Sorted milliseconds from posting a message until its owner sees it."""
    found = []
    run = RunId("run-1")
    with closing(_store("postgres", place)) as owner, closing(_store("postgres", place)) as other:
        lease = owner.create(run, owner_id(), 0.0, 60.0)
        for _ in range(times):
            owner.inbox(run)  # which is empty, and known to be
            start = time.perf_counter()
            other.post(run, sample_message("x"))
            while not (waiting := owner.inbox(run)):
                time.sleep(0.0001)
            found.append((time.perf_counter() - start) * 1000)
            owner.discard(lease, [message.id for message in waiting])
    return sorted(found)
