"""Lists with a task for each element, compared with equal plans written out: time, memory, stalls, failing elements."""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

from benchmarks.figures import Figure, Report, machine, paired, quiet, single
from benchmarks.footprint import Heartbeat, longest_stall
from replanning import Goal, Plan, ReplanningEngine, Settings, Task, TaskContext, ToolSpec
from replanning.journal import MemoryStore, RunStore, SqliteStore
from replanning.orchestrators import SwarmOrchestrator
from replanning.plan import JsonObject, RunId
from replanning.plan.elements import Elements, element_tasks

WORKERS = 100
"""Number of concurrent tasks."""

STORES = {"memory": "the journal in memory", "sqlite": "the journal in SQLite"}

DEFAULT_MAX = Task.model_fields["max_items"].default
"""Default of `max_items`."""

_TWICE = 2.2
_WRITTEN_OUT = 1.3
_BYTES = 1024
_STALL = 20


@dataclass(frozen=True)
class Times:
    """Seconds of one plan, in processor time: other work on the machine does not count.

    Attributes:
        expansion: from the end of the task that makes the list to the start of the first element.
        run: from opening the run to its result.
        resume: to open a run again of whose elements half are done.
    """

    expansion: float
    run: float
    resume: float


def measure(
    *,
    sizes: tuple[int, ...] = (2_500, 5_000, 10_000),
    rounds: int = 3,
    report: Callable[[str], None] = lambda line: None,
) -> Report:
    """Measure everything, at sizes that double."""
    where = machine()
    figures: list[Figure] = []
    for kind in STORES:
        figures += _times(kind, sizes, rounds, report)
    figures += _stalls(sizes[-1], rounds)
    figures += _memory(sizes[-1])
    figures.append(_failing(sizes[-1], rounds))
    for figure in figures:
        report(f"{figure.name}: {figure.value:.1f} {figure.unit}")
    return Report(where, rounds, tuple(figures))


# Plans


def items(number: int) -> list[JsonObject]:
    """The elements of a list."""
    return [{"n": n} for n in range(number)]


def mapped(number: int) -> Plan:
    """A plan with a list, a task for each of its elements, and one for all of their results."""
    each = Task(
        id="convert",
        depends_on=("list",),
        for_each="${list.output}",
        max_items=number,
        arguments={"n": "${item.n}"},
    )
    tasks = (Task(id="list"), each, Task(id="report", depends_on=("convert",)))
    return Plan(goal=Goal(objective="measure"), tasks=tasks)


def written_out(number: int) -> Plan:
    """An equal plan with a task for each element written out."""
    tasks = [Task(id="list")]
    for index in range(number):
        reference = f"${{list.output[{index}].n}}"
        task_id = f"convert[{index}]"
        tasks.append(Task(id=task_id, depends_on=("list",), arguments={"n": reference}))
    ids = tuple(task.id for task in tasks[1:])
    tasks.append(Task(id="report", depends_on=ids))
    return Plan(goal=Goal(objective="measure"), tasks=tuple(tasks))


FORMS: dict[str, Callable[[int], Plan]] = {"mapped": mapped, "written out": written_out}


class _Work:
    """The work of all tasks, which takes no time; it notes when the list is there.

    Attributes:
        listed: when the task that makes the list returned it.
        first: when the first element started.
    """

    def __init__(self, number: int) -> None:
        self._items = items(number)
        self.listed = 0.0
        self.first = 0.0

    async def __call__(self, task: Task, context: TaskContext) -> Any:
        if task.id == "list":
            self.listed = time.process_time()
            return self._items
        if task.id == "report":
            return None
        if not self.first:
            self.first = time.process_time()
        return task.arguments["n"]


# Time


def _times(
    kind: str, sizes: tuple[int, ...], rounds: int, report: Callable[[str], None]
) -> list[Figure]:
    """Measure a kind of store: the list and the plan written out, in turn, at each size."""
    found: dict[tuple[str, int], list[Times]] = {}
    for number in range(rounds):
        for size in sizes:
            for form in FORMS:
                found.setdefault((form, size), []).append(_play(kind, form, size))
        report(f"{STORES[kind]}: round {number + 1} of {rounds}")
    where = STORES[kind]
    figures = []
    for name, words in (("run", f"run with {WORKERS} workers"), ("resume", "resume in the midst")):
        for size in sizes:
            ours = [getattr(times, name) / size * 1e6 for times in found["mapped", size]]
            others = [getattr(times, name) / size * 1e6 for times in found["written out", size]]
            title = f"{words}, {size:,} elements, {where}, per element; floor: written out"
            figures.append(paired(title, ours, others, _WRITTEN_OUT))
    for size in sizes:
        each = [times.expansion / size * 1e6 for times in found["mapped", size]]
        figures.append(single(f"expansion, {size:,} elements, {where}, per element", each, "µs"))
    for name in ("expansion", "run", "resume"):
        ratios = []
        for smaller, larger in pairwise(sizes):
            pairs = zip(found["mapped", smaller], found["mapped", larger], strict=True)
            growth = [getattr(after, name) / getattr(before, name) for before, after in pairs]
            ratios.append(statistics.median(growth))
        title = f"{name}, {where}: twice as many elements, the larger of two ratios"
        figures.append(single(title, [max(ratios)], "×", _TWICE))
    return figures


def _play(kind: str, form: str, size: int) -> Times:
    plan = FORMS[form](size)
    with _store(kind) as store, quiet():
        work = _Work(size)
        start = time.process_time()
        anyio.run(_run, ReplanningEngine(store=store), plan, work)
        seconds = time.process_time() - start
    with _store(kind) as store, quiet():
        run_id = anyio.run(_half, store, plan, size)
        resume = anyio.run(_resume, store, run_id)
    return Times(work.first - work.listed, seconds, resume)


@contextmanager
def _store(kind: str) -> Iterator[RunStore]:
    if kind == "memory":
        yield MemoryStore()
        return
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "history.db")
        yield store
        store.close()


async def _run(engine: ReplanningEngine, plan: Plan, work: Callable[..., Any]) -> Any:
    result = await engine.attach(SwarmOrchestrator(work, max_concurrency=WORKERS)).run(plan)
    if result.status != "succeeded":
        raise RuntimeError(f"the run {result.status}: {result.reason}")
    return result


async def _half(store: RunStore, plan: Plan, size: int) -> RunId:
    """Execute half of the elements, pause the run, and return its id."""
    async with ReplanningEngine(store=store).open(plan) as run:
        ready = run.ready()
        attempt = run.started((await anext(ready)).id)
        run.succeeded(attempt, items(size))
        for n in range(size // 2):
            run.succeeded(run.started((await anext(ready)).id), n)
        run.pause()
    return run.id


async def _resume(store: RunStore, run_id: RunId) -> float:
    start = time.process_time()
    async with ReplanningEngine(store=store).resume(run_id) as run:
        seconds = time.process_time() - start
        run.pause()
    return seconds


# Stalls and memory


def _stalls(size: int, rounds: int) -> list[Figure]:
    """Measure the longest time for which a run keeps the event loop from others."""
    figures = []
    for number in sorted({min(size, DEFAULT_MAX), size}):
        for form, make in FORMS.items():
            plan = make(number)
            found = []
            for _ in range(rounds):
                gc.collect()
                found.append(1000 * anyio.run(longest_stall, partial(_stalling, plan, number)))
            name = f"longest stall of the loop, {number:,} elements, {form}"
            bar = _STALL if form == "mapped" else None
            figures.append(single(name, found, "ms", bar))
    return figures


async def _stalling(plan: Plan, size: int, _: Heartbeat) -> None:
    work = _Work(size)

    async def waiting(task: Task, context: TaskContext) -> Any:
        await anyio.lowlevel.checkpoint()  # work that waits for something, as work does
        return await work(task, context)

    await _run(ReplanningEngine(), plan, waiting)


def _memory(size: int) -> list[Figure]:
    """Measure the memory of a run whose elements are done, beyond that of the list itself.

    The same list is made in a plan of which no task is about its elements, and what that run holds
    is not counted. What `speed` measures leaves out the documents of tasks as well, so the bar is
    about the rest. The documents of a list are those that the run makes of it.
    """
    without = anyio.run(_used, _list_alone, size)
    figures = []
    for form, make in FORMS.items():
        used = (anyio.run(_used, make, size) - without) / size
        documents = _documents(form, size) / size
        name = f"memory at {size:,} elements beyond the list, per element, {form}"
        figures.append(single(name, [used], "B"))
        bar = _BYTES if form == "mapped" else None
        figures.append(single(f"{name}; without the task documents", [used - documents], "B", bar))
    return figures


def _documents(form: str, size: int) -> int:
    """Bytes of the documents of tasks, with the elements that they are about."""
    make = FORMS[form]
    make(2)
    gc.collect()
    tracemalloc.start()
    plan = make(size)
    tasks = list(plan.tasks)
    if form == "mapped":
        tasks = element_tasks(plan.tasks[1], Elements(tuple(items(size)), None))
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - sys.getsizeof(tasks)
    tracemalloc.stop()
    return used


def _list_alone(number: int) -> Plan:
    return Plan(goal=Goal(objective="measure"), tasks=(Task(id="list"),))


async def _used(make: Callable[[int], Plan], size: int) -> int:
    """Bytes that the process holds of a plan and its run, when every task is done."""
    work = _Work(size)
    await _run(ReplanningEngine(), make(2), _Work(2))  # what is loaded once is no part of it
    gc.collect()
    tracemalloc.start()
    plan = make(size)
    async with ReplanningEngine().open(plan) as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = await work(task, attempt.context)
        gc.collect()
        used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used


# Failing elements


def _failing(size: int, rounds: int) -> Figure:
    """Measure a list in which every hundredth element fails and another tool replaces the failed one.

    Raises:
        RuntimeError: a result is not in its place.
    """
    tools = (
        ToolSpec(name="usual", capability="convert"),
        ToolSpec(name="spare", capability="convert"),
    )
    listed, convert, collected = mapped(size).tasks
    tasks = (listed, convert.model_copy(update={"tool": "usual"}), collected)
    plan = Plan(goal=Goal(objective="measure"), tools=tools, tasks=tasks)
    expected = [{"n": n, "by": "usual"} for n in range(size)]
    for n in range(0, size, 100):
        expected[n]["by"] = "spare"
    found = []
    for _ in range(rounds):
        engine = ReplanningEngine(settings=Settings.model_validate({"cooldown": 0}))
        with quiet():
            start = time.process_time()
            result = anyio.run(_run, engine, plan, _Failing(size))
            found.append((time.process_time() - start) / size * 1e6)
        if result.outputs["convert"] != expected:
            raise RuntimeError("a result is not in its place")
    name = f"{size:,} elements, 1 % fail and are replaced, every result in its place, per element"
    return single(name, found, "µs")


class _Failing(_Work):
    """Work; the usual tool fails for every hundredth element."""

    async def __call__(self, task: Task, context: TaskContext) -> Any:
        await anyio.lowlevel.checkpoint()
        found = await super().__call__(task, context)
        if task.tool is None:
            return found
        if task.tool == "usual" and found % 100 == 0:
            raise ValueError("broken")
        return {"n": found, "by": task.tool}
