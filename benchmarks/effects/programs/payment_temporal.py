"""A payment as a workflow of one activity, with its worker in the same program.

https://docs.temporal.io/encyclopedia/retry-policies and
https://docs.temporal.io/activity-definition#idempotency
"""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.common import RetryPolicy, WorkflowIDConflictPolicy
from temporalio.worker import Worker

with workflow.unsafe.imports_passed_through():
    from benchmarks.effects.client import VARIANT, charge, find

ATTEMPTS = 3
if VARIANT == "once":
    ATTEMPTS = 1


@activity.defn
def pay() -> str:
    """Charge the customer."""
    info = activity.info()
    key = f"{info.workflow_run_id}/{info.activity_id}"
    if VARIANT == "keys":
        return charge(key=key)
    if VARIANT == "lookup":
        return find(key) or charge(reference=key)
    return charge()


@workflow.defn
class PayInvoice:
    """Pays."""

    @workflow.run
    async def run(self) -> str:
        """Pay, and say so."""
        policy = None  # Temporal's own: again and again, without a limit
        if VARIANT != "nothing":
            policy = RetryPolicy(maximum_attempts=ATTEMPTS)
        await workflow.execute_activity(
            pay, start_to_close_timeout=timedelta(seconds=10), retry_policy=policy
        )
        return "paid"


async def main() -> None:
    """Run a worker, and the workflow; one that was started before goes on."""
    client = await Client.connect(os.environ["TEMPORAL"])
    worker = Worker(
        client,
        task_queue="invoices",
        workflows=[PayInvoice],
        activities=[pay],
        activity_executor=ThreadPoolExecutor(5),
    )
    async with worker:
        result = await client.execute_workflow(
            PayInvoice.run,
            id="invoice-7",
            task_queue="invoices",
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        )
        print(result, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
