"""Plans of many tasks on Temporal: a development server, and a separate worker process for each plan."""

from __future__ import annotations

import multiprocessing
import resource
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio

from benchmarks.figures import machine
from replanning import Plan, Task, TaskContext
from replanning.plan import JsonObject

LAYER = 100
"""Tasks per layer, which may run at once: each task depends on the one this many places before it."""


@dataclass(frozen=True)
class Row:
    """Figures of one plan.

    Attributes:
        tasks: its size.
        layer: how many of them do not depend on each other.
        status: of the run.
        seconds: from the start of the run to its result.
        processor: processor time of the worker, in seconds.
        memory: the most that the process of the worker held, in MB.
        continued: how often the workflow was continued as a new one.
    """

    tasks: int
    layer: int
    status: str
    seconds: float
    processor: float
    memory: float
    continued: int


@dataclass(frozen=True)
class Report:
    """The figures, with the machine on which they were measured."""

    machine: str
    rows: tuple[Row, ...]

    def table(self) -> str:
        """The figures as a Markdown table."""
        lines = [
            f"{self.machine}; worker and development server on it, activities that return at once.\n",
            "| tasks | time | processor time of the worker | memory of the worker | continued as new |",
            "|---|---|---|---|---|",
        ]
        for row in self.rows:
            form = f"in layers of {row.layer}"
            if row.layer == row.tasks:
                form = "independent"
            time = f"{row.seconds:.0f} s"
            if row.status != "succeeded":
                time = f"{time}, {row.status}"
            lines.append(
                f"| {row.tasks:,}, {form} | {time} | {row.processor:.0f} s "
                f"| {row.memory / 1000:.1f} GB | {row.continued} |"
            )
        return "\n".join(lines)

    def to_json(self) -> JsonObject:
        """Figures as JSON."""
        return asdict(self)


def measure(*, short: bool = False, report: Callable[[str], None] = lambda line: None) -> Report:
    """Measure plans in layers, and one whose tasks do not depend on each other."""
    rows = []
    sizes = [(10_000, LAYER), (50_000, LAYER), (50_000, 50_000)]
    if short:
        sizes = [(200, LAYER), (200, 200)]
    for tasks, layer in sizes:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            rows.append(process.submit(_measure, tasks, layer).result())
        report(f"{tasks} tasks, {layer} at once: {rows[-1].seconds:.0f} s")
    return Report(machine(), tuple(rows))


def _measure(tasks: int, layer: int) -> Row:
    return anyio.run(_carry_out, tasks, layer)


async def _work(task: Task, context: TaskContext) -> str:
    return task.id


async def _carry_out(tasks: int, layer: int) -> Row:
    from temporalio.testing import WorkflowEnvironment
    from temporalio.worker import Worker

    from replanning.integrations.temporal import ReplanningPlugin, TemporalOrchestrator

    stated = []
    for number in range(tasks):
        depends_on = []
        if number >= layer:
            depends_on.append(f"t{number - layer}")
        stated.append({"id": f"t{number}", "depends_on": depends_on})
    plan = Plan.model_validate({"goal": {"objective": "measure"}, "tasks": stated})
    own = str(Path(sys.executable).parent)
    program = shutil.which("temporal", path=own) or shutil.which("temporal")
    async with (
        await WorkflowEnvironment.start_local(
            dev_server_existing_path=program, dev_server_log_level="error"
        ) as server,
        Worker(server.client, task_queue="plans", plugins=[ReplanningPlugin(_work)]),
    ):
        began = time.perf_counter()
        processor = time.process_time()
        run = await TemporalOrchestrator(server.client, task_queue="plans").start(
            plan, run_id="measure"
        )
        result = await run.result()
        seconds = time.perf_counter() - began
        processor = time.process_time() - processor
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
        records = await run.records()
    continued = sum(record.body.kind == "run-resumed" for record in records)
    return Row(tasks, layer, str(result["status"]), seconds, processor, memory, continued)
