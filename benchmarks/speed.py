"""Overhead of a run, as ratios to baselines measured in the same round."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable

import anyio
import anyio.lowlevel
from opentelemetry.sdk.trace import TracerProvider

from benchmarks import footprint, peers
from benchmarks.figures import Coroutine, Figure, Report, each, machine, paired, quiet, single
from benchmarks.footprint import flat, nothing
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
    ToolSpec,
)
from replanning.changes import ReplaceTask
from replanning.orchestrators import SequentialOrchestrator, SwarmOrchestrator

TRACING = "tracing on, per task; floor: one span each, no tracing"

PEER_TASKS = 200
"""Number of tasks in the plan that other libraries also execute."""

EARLIER_RECORDS = 10_000
"""Records in a run's journal before the failures are measured; a task that is done has two."""


def measure(
    *,
    short: bool = False,
    rounds: int | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Report:
    """Measure everything, one figure after another; growth only in the long form."""
    where = machine()
    rounds = rounds or (3 if short else 7)
    tasks = 2_000 if short else 10_000
    large = 20_000 if short else 100_000
    compared, skipped = peers.measure(rounds, PEER_TASKS)
    figures: list[Figure] = []
    parts: tuple[Callable[[], list[Figure]], ...] = (
        lambda: [_ratio("sequential, per task", rounds, tasks, _sequential, _bare_tasks, bar=2.6)],
        lambda: [_ratio("swarm of 100, per task", rounds, tasks, _swarm, _task_group)],
        lambda: [_small(rounds)],
        # Spans on, against a run without tracing whose work makes one span of the SDK for each
        # task.
        lambda: [_ratio(TRACING, rounds, tasks, _traced, _spanned, bar=1.5)],
        lambda: _replans(min(rounds, 3), 200 if short else 400, large),
        lambda: _bursts(min(rounds, 3), 100 if short else 500, 1_000 if short else 10_000),
        lambda: [footprint.store(rounds, tasks)],
        lambda: footprint.stalls(rounds, tasks),
        lambda: [footprint.memory(large)],
        lambda: [footprint.resume(min(rounds, 3), large // 2)],
        lambda: [] if short else _growth(rounds),
    )
    for part in parts:
        for figure in part():
            figures.append(figure)
            name = figure.name
            if figure.size:
                name = f"{name}, {figure.size:,}"
            report(f"{name}: {figure.value:.1f} {figure.unit}")
    work = peers.WORK.format(tasks=PEER_TASKS)
    return Report(where, rounds, tuple(figures), tuple(compared), tuple(skipped), work)


def _ratio(
    name: str,
    rounds: int,
    tasks: int,
    subject: Coroutine,
    floor: Coroutine,
    *,
    bar: float | None = None,
    size: int | None = None,
) -> Figure:
    """Time subject and floor in turn, after a round to warm up."""
    ours: list[float] = []
    floors: list[float] = []
    for _ in range(rounds + 1):
        ours.append(each(subject, tasks))
        floors.append(each(floor, tasks))
    return paired(name, ours[1:], floors[1:], bar, size=size)


def _small(rounds: int) -> Figure:
    """Measure what a plan of 20 tasks in a chain costs from `open` to its result, beyond the bare tasks."""

    async def run() -> float:
        swarm = ReplanningEngine().attach(SwarmOrchestrator(nothing))
        return await _timed(swarm, _chain(20)) - await _bare_tasks(20)

    extra: list[float] = []
    for _ in range(rounds):
        seconds = statistics.median(anyio.run(run) for _ in range(20))
        extra.append(1000 * seconds)
    return single("a plan of 20 tasks, beyond the bare tasks", extra, "ms")


def _growth(rounds: int) -> list[Figure]:
    """Measure the cost per task in plans of several sizes."""
    figures = []
    for size in (100, 1_000, 10_000, 100_000):
        times = rounds if size < 100_000 else 1
        figures.append(_ratio("sequential", times, size, _sequential, _bare_tasks, size=size))
        figures.append(_ratio("swarm of 100", times, size, _swarm, _task_group, size=size))
    return figures


async def _nothing() -> None:
    """The work: none."""


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


async def _timed(orchestrator: SequentialOrchestrator | SwarmOrchestrator, plan: Plan) -> float:
    with quiet():  # what is left to collect of the making of the plan is no part of the run
        start = time.perf_counter()
        await orchestrator.run(plan)
        return time.perf_counter() - start


async def _sequential(tasks: int) -> float:
    plan = flat(tasks)
    orchestrator = ReplanningEngine().attach(SequentialOrchestrator(nothing))
    return await _timed(orchestrator, plan)


async def _swarm(tasks: int) -> float:
    plan = flat(tasks)
    orchestrator = ReplanningEngine().attach(SwarmOrchestrator(nothing, max_concurrency=100))
    return await _timed(orchestrator, plan)


async def _traced(tasks: int) -> float:
    plan = flat(tasks)
    orchestrator = ReplanningEngine(tracer_provider=TracerProvider()).attach(
        SequentialOrchestrator(nothing)
    )
    return await _timed(orchestrator, plan)


async def _spanned(tasks: int) -> float:
    tracer = TracerProvider().get_tracer("floor")

    async def work(task: Task, context: TaskContext) -> None:
        with tracer.start_as_current_span("task"):
            pass

    return await _timed(ReplanningEngine().attach(SequentialOrchestrator(work)), flat(tasks))


class _Instant:
    """A provider that answers at once: the same task again under another id."""

    name = "instant"
    immediate = True

    async def propose(self, request: ReplanRequest) -> list[Alternative]:
        view: PlanView = request.view
        task_id = request.triggers[0].tasks[0]
        task = view.task(task_id).task.model_copy(update={"id": view.unused_id(task_id)})
        change = ReplaceTask(task_id=task_id, tasks=(task,))
        return [Alternative(changes=(change,), reason="again under another id", confidence=0.9)]


def _chain(tasks: int) -> Plan:
    """A plan of tasks one after another, with deadlines."""
    return Plan(goal=Goal(objective="measure"), tasks=_chained(tasks))


def _chained(tasks: int) -> tuple[Task, ...]:
    chained = [Task(id="t0", timeout=60.0)]
    for number in range(1, tasks):
        chained.append(Task(id=f"t{number}", timeout=60.0, depends_on=(f"t{number - 1}",)))
    return tuple(chained)


def _with_tools(tools: int) -> Plan:
    """A chain of 1,000 tasks, and tools that none of them uses."""
    specs = tuple(ToolSpec(name=f"tool{i}", capability=f"c{i}") for i in range(tools))
    return _chain(1_000).model_copy(update={"tools": specs})


def _with_earlier(done: int) -> Plan:
    """A chain of 1,000 tasks behind tasks that depend on nothing."""
    earlier = tuple(Task(id=f"e{i}") for i in range(done))
    return Plan(goal=Goal(objective="measure"), tasks=(*earlier, *_chained(1_000)))


def _layers(tasks: int) -> Plan:
    """A plan of layers of ten tasks, each of which depends on all of the layer before."""
    layered: list[Task] = []
    before: tuple[str, ...] = ()
    for start in range(0, tasks, 10):
        names = [f"t{number}" for number in range(start, min(start + 10, tasks))]
        for name in names:
            layered.append(Task(id=name, timeout=60.0, depends_on=before))
        before = tuple(names)
    return Plan(goal=Goal(objective="measure"), tasks=tuple(layered))


async def _failures(plan: Plan, count: int) -> list[float]:
    settings = Settings.model_validate({"cooldown": 0})
    return await failures(ReplanningEngine([_Instant()], settings=settings), plan, count)


async def failures(engine: ReplanningEngine, plan: Plan, count: int) -> list[float]:
    """Seconds from the report of a failure to the applied revision, for `count` tasks of a plan.

    Tasks whose id begins with `e` are done first, without a failure.
    """
    latencies: list[float] = []
    async with engine.open(plan) as run:
        ready = run.ready()
        while len(latencies) < count:
            task = await anext(ready)
            attempt = run.started(task.id)
            # A replacement, for which the rest of a chain waits, succeeds as well.
            if task.id.startswith("e") or "~" in task.id:
                run.succeeded(attempt)
                continue
            revision = run.live.revision
            start = time.perf_counter()
            run.failed(attempt, ValueError("broken"))
            while run.live.revision == revision:
                await anyio.lowlevel.checkpoint()
            latencies.append(time.perf_counter() - start)
        run.pause()
    return latencies


def _replans(rounds: int, count: int, large: int) -> list[Figure]:
    """Latency from trigger to revision at 1,000 tasks, and what more tasks, tools and records add to it."""
    chain = _chain(1_000)
    p50: list[float] = []
    p99: list[float] = []
    for _ in range(rounds):
        median, late = _latencies(chain, count)
        p50.append(median)
        p99.append(late)
    name = "trigger to revision, chain of 1,000 tasks"
    layers = [_latencies(_layers(1_000), count)[0] for _ in range(rounds)]
    earlier = EARLIER_RECORDS // 2
    return [
        single(f"{name}, p50", p50, "µs"),
        paired(f"{name}, p99; floor: p50", p99, p50, 4),
        single("trigger to revision, layers of 10, 1,000 tasks, p50", layers, "µs"),
        _grown(f"chain of {large:,} tasks", _chain(large), chain, rounds, count),
        _grown(f"layers, {large:,} tasks", _layers(large), _layers(1_000), rounds, count),
        _grown("2,000 tools; floor: 20", _with_tools(2_000), _with_tools(20), rounds, count),
        _grown(
            f"{EARLIER_RECORDS:,} earlier records", _with_earlier(earlier), chain, rounds, count
        ),
    ]


def _grown(name: str, large: Plan, small: Plan, rounds: int, count: int) -> Figure:
    """Measure the latency of a larger plan beside that of a smaller one, in turn."""
    ours: list[float] = []
    floors: list[float] = []
    for _ in range(rounds):
        ours.append(_latencies(large, count)[0])
        floors.append(_latencies(small, count)[0])
    return paired(f"trigger to revision, {name}, p50", ours, floors, 1.2)


def _latencies(plan: Plan, count: int) -> tuple[float, float]:
    """Return the median and the 99th percentile of a run's latencies, in microseconds."""
    with quiet():
        latencies = sorted(anyio.run(_failures, plan, count))
    return statistics.median(latencies) * 1e6, latencies[int(len(latencies) * 0.99)] * 1e6


async def _burst(failures: int, tail: int) -> float:
    """Seconds until tasks that failed at once, all before a chain, are replaced by another tool."""
    tools = (
        ToolSpec(name="usual", capability="work"),
        ToolSpec(name="other", capability="work"),
    )
    first = [Task(id=f"f{i}", tool="usual") for i in range(failures)]
    tasks = list(first)
    before = tuple(task.id for task in first)
    for number in range(tail):
        task = Task(id=f"t{number}", depends_on=before)
        tasks.append(task)
        before = (task.id,)
    plan = Plan(goal=Goal(objective="measure"), tools=tools, tasks=tuple(tasks))
    async with ReplanningEngine(["repair"]).open(plan) as run:
        attempts = [run.started(task.id) for task in first]
        with quiet():
            start = time.perf_counter()
            for attempt in attempts:
                run.failed(attempt, ValueError("broken"))
            while run.live.stuck:
                await anyio.lowlevel.checkpoint()
            elapsed = time.perf_counter() - start
        run.pause()
    return elapsed


class _Slow(_Instant):
    """Slow provider."""

    name = "slow"
    immediate = False

    async def propose(self, request: ReplanRequest) -> list[Alternative]:
        await anyio.sleep(0.2)
        return await super().propose(request)


async def _independent(failures: int) -> float:
    """Seconds until tasks that failed at once of different causes are replaced by a provider that takes 0.2 s."""
    async with ReplanningEngine([_Slow()]).open(flat(failures)) as run:
        attempts = [run.started(f"t{i}") for i in range(failures)]
        start = time.perf_counter()
        for number, attempt in enumerate(attempts):
            run.failed(attempt, type(f"Error{chr(97 + number)}", (Exception,), {})())
        while run.live.stuck:
            await anyio.lowlevel.checkpoint()
        elapsed = time.perf_counter() - start
        run.pause()
    return elapsed


def _bursts(rounds: int, failures: int, tail: int) -> list[Figure]:
    """Cost of many simultaneous failures, with one cause and with different ones."""
    each_failure: list[float] = []
    growth: list[float] = []
    for _ in range(rounds):
        once = anyio.run(_burst, failures, tail)
        twice = anyio.run(_burst, 2 * failures, tail)
        each_failure.append(1000 * once / failures)
        growth.append(twice / once)
    apart = [anyio.run(_independent, 20) for _ in range(rounds)]
    name = f"burst of {failures:,} failures before {tail:,} tasks"
    return [
        single(f"{name}, per failure", each_failure, "ms", 1),
        single(f"{name}, twice as many", growth, "×", 2.2),
        single("20 failures of their own, provider takes 0.2 s", apart, "s", 0.6),
    ]
