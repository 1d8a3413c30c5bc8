"""A plan as a durable workflow of Temporal: a server, a worker and a run, of which one task fails and is replaced.

`pip install "replanning[temporal,temporal-server]"`. It needs no other server: it starts one for itself.
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
    """Fails, as scanners do."""
    raise OSError("the scanner does not answer")


@tool(capability="read-page")
def photograph():
    """Does the same another way."""
    return "to be or not to be"


def count(text: str):
    """Counts words."""
    return len(text.split())


async def main():
    """Starts a server and a worker, and runs the plan."""
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
