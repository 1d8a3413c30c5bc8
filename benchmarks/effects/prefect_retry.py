"""Retries the flow run whose process was killed, as Prefect's pages describe it: `prefect_retry.py PROGRAM:FLOW`.

Prefect's server takes such a run for running until an automation on missing heartbeats marks it as
crashed (https://docs.prefect.io/v3/advanced/detect-zombie-flows). This marks it at once, and then
does what the page about retries of flow runs says
(https://docs.prefect.io/v3/how-to-guides/workflows/retry-flow-runs).
"""

import asyncio
import subprocess
import sys
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Crashed


async def mark_as_crashed() -> UUID:
    """Mark the latest flow run as crashed; its id."""
    async with get_client() as client:
        (run,) = await client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)
        state = Crashed(message="no heartbeats")
        await client.set_flow_run_state(run.id, state, force=True)
        return run.id


async def result_of(flow_run_id: UUID) -> str:
    """What the flow has returned."""
    async with get_client() as client:
        run = await client.read_flow_run(flow_run_id)
        return str(await run.state.aresult())


def main() -> int:
    """Mark, retry, and print what the flow returned."""
    flow_run_id = asyncio.run(mark_as_crashed())
    program = str(Path(sys.executable).parent / "prefect")
    command = [program, "flow-run", "retry", str(flow_run_id), "--entrypoint", sys.argv[1]]
    subprocess.run(command, check=False)  # noqa: S603 - the program that belongs to this interpreter
    print(asyncio.run(result_of(flow_run_id)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
