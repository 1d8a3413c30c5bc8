"""A plan as a durable workflow of Temporal: a server, a worker, and a run with a task that fails and is replaced.

Needs `pip install "replanning[temporal,temporal-server]"`. It starts its own server.
"""

import shutil
import sys
from pathlib import Path

import anyio
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from replanning import Plan, tool
from replanning.integrations.temporal import ReplanningPlugin, TemporalOrchestrator

PLAN = Plan.parse("""
goal: {objective: Read a page and count its words}
tasks:
  - {id: read,  tool: scan}
  - {id: words, tool: count, arguments: {text: "${read.output}"}, depends_on: [read]}
""")


@tool(capability="read-page")
def scan():
    """Read a page; fails, as scanners do."""
    raise OSError("the scanner does not answer")


@tool(capability="read-page")
def photograph():
    """Read a page in another way."""
    return "to be or not to be"


def count(text: str):
    """Count words."""
    return len(text.split())


async def main():
    """Start a server and a worker, and run the plan."""
    program = shutil.which("temporal", path=str(Path(sys.executable).parent)) or shutil.which(
        "temporal"
    )
    async with await WorkflowEnvironment.start_local(
        dev_server_existing_path=program, dev_server_log_level="error"
    ) as server:
        plugin = ReplanningPlugin(tools=[scan, photograph, count])
        async with Worker(server.client, task_queue="plans", plugins=[plugin]):
            run = await TemporalOrchestrator(server.client, task_queue="plans").start(
                PLAN, run_id="page-1"
            )
            result = await run.result()
    print(result["status"], result["outputs"])
    print(*result["revisions"], sep="\n")


anyio.run(main)
