"""Program with a worker of Temporal, to be killed at any moment: ADDRESS QUEUE MAX_HISTORY EFFECTS TICKS.

It tells on the pipe TICKS of each record before and after it is written, unless it is written anew in a replay, and of each task
before and after it takes effect, which is a line in the file EFFECTS. The variable HANGING names an attempt that does not end.
"""

import asyncio  # noqa: TID251 # the SDK needs it
import os
import sys
from datetime import timedelta
from typing import Any, Final

from temporalio import workflow
from temporalio.client import Client
from temporalio.worker import Worker

from replanning import Plan, Task, TransientError
from replanning.integrations import temporal
from replanning.journal import Lease, Record

SETTINGS: Final[dict[str, Any]] = {
    "cooldown": 0,
    "limits": {"replans_per_lineage": 50, "replans_per_run": 500},
}


def plan(*, dangerous: bool = False) -> Plan:
    """Return blocks of tasks, one after another: some that run at once, and those about which something is decided."""
    tools = [
        {"name": name, "capability": "write", "dangerous": dangerous}
        for name in ("absent", "present")
    ]
    tasks: list[dict[str, Any]] = []
    for number in range(3):
        before = [f"once-{number - 1}"] if number else []
        plain = [f"{name}-{number}" for name in ("a", "b", "c")]
        tasks += [{"id": each, "depends_on": before, "idempotent": True} for each in plain]
        tasks += [
            {
                "id": f"flaky-{number}",
                "depends_on": plain,
                "idempotent": True,
                "retry": {"delay": 0.01},
            },
            {
                "id": f"equal-{number}",
                "depends_on": [f"flaky-{number}"],
                "idempotent": True,
                "tool": "absent",
            },
            {"id": f"once-{number}", "depends_on": [f"equal-{number}"]},
        ]
    return Plan.model_validate({"goal": {"objective": "survive"}, "tools": tools, "tasks": tasks})


async def work(task: Task, context: Any) -> str:
    """What tasks do, where they have no effect."""
    if task.tool == "absent":
        raise FileNotFoundError("there is no such tool")
    if task.id.startswith("flaky") and context.attempt_id.endswith("#1"):
        raise TransientError("the first time it never works")
    return f"{task.id} with {task.tool}"


async def main() -> None:
    """Do as the arguments say, until the process is killed."""
    address, queue, max_history, effects, ticks = sys.argv[1:]

    def tell(what: str) -> None:
        os.write(int(ticks), f"{what}\n".encode())

    def append(self: temporal._Store, lease: Lease, record: Record) -> None:
        body: Any = record.body
        what = f"{body.kind} {getattr(body, 'question', None) or getattr(body, 'task', '')}"
        again = workflow.unsafe.is_replaying()
        if not again:
            tell(f"<{what}")
        write(self, lease, record)
        if not again:
            tell(f">{what}")

    async def take_effect(task: Task, context: Any) -> str:
        tell(f"<effect {task.id}")
        file = os.open(effects, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, f"{context.attempt_id}\n".encode())
        os.close(file)
        tell(f">effect {task.id}")
        if context.attempt_id == os.environ["HANGING"]:
            await asyncio.Event().wait()
        return await work(task, context)

    write, temporal._Store.append = temporal._Store.append, append  # type: ignore[method-assign]
    temporal._HEARTBEAT_SECONDS = 1.0  # type: ignore[misc]
    plugin = temporal.ReplanningPlugin(take_effect, settings=SETTINGS, max_history=int(max_history))
    soon = timedelta(seconds=1)  # in which a workflow leaves a worker that is gone
    async with Worker(
        await Client.connect(address),
        task_queue=queue,
        plugins=[plugin],
        sticky_queue_schedule_to_start_timeout=soon,
    ):
        tell("ready")
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
