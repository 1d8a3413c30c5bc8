"""Runs that the tests of the pages look at."""

from pathlib import Path
from typing import Any

from replanning import Goal, Plan, ReplanningEngine, RunResult, Settings, Task
from replanning.journal import RunStore

HOSTILE = "<script>alert(1)</script>"
"""Text that would be executed if a page did not escape it."""

PLAN = Plan.parse(f"""
goal: {{objective: "Read a page {HOSTILE}"}}
tools:
  - {{name: scan, capability: read}}
  - {{name: photograph, capability: read}}
tasks:
  - {{id: read, tool: scan}}
  - {{id: words, depends_on: [read]}}
""")

ASKING = Settings.model_validate({"alternatives": {"require_approval": True}})
"""Settings with which a person must agree to every change."""


async def large_run(store: RunStore | str | Path) -> None:
    """Carry out the next hundred tasks of a plan of 10,000, and pause it."""
    engine = ReplanningEngine([], store=store)
    if "large" in [info.run for info in engine.store.runs()]:
        opened = engine.resume("large")
    else:
        tasks = [Task(id=f"task-{number}", tool="any") for number in range(10_000)]
        plan = Plan(goal=Goal(objective="Do ten thousand things"), tasks=tasks)
        opened = engine.open(plan, run_id="large")
    async with opened as run:
        count = 0
        async for task in run.ready():
            async with run.attempt(task):
                count += 1
            if count == 100:
                run.pause("that is enough")


async def work(task: Task, context: object) -> object:
    """Fail with the scanner, and do everything else."""
    if task.tool == "scan":
        raise OSError(f"the scanner is broken {HOSTILE}")
    return {"text": HOSTILE}


async def repaired_run(
    store: RunStore | str | Path, run_id: str = "repaired", **options: Any
) -> RunResult:
    """Carry out a plan whose scanner fails, and which is repaired; options are those of the engine."""
    engine = ReplanningEngine(["repair"], store=store, **options)
    return await engine.execute(PLAN, work, run_id=run_id)


async def asking_run(store: RunStore | str | Path, run_id: str = "asking") -> RunResult:
    """Carry out the same plan until it waits for a person, or go on with it after the answer."""
    engine = ReplanningEngine(["repair"], store=store, settings=ASKING)
    return await engine.execute(PLAN, work, run_id=run_id)
