"""A trip as a workflow that keeps a list of compensations, with its worker in the same program.

https://learn.temporal.io/tutorials/python/trip-booking-app/ and
https://docs.temporal.io/activity-definition#idempotency

The tutorial puts a compensation on the list before its activity, which takes an id that the caller
has chosen. Here the shop chooses the ids, so a compensation is put there once the booking is known.
"""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.common import RetryPolicy, WorkflowIDConflictPolicy
from temporalio.exceptions import ActivityError
from temporalio.worker import Worker

with workflow.unsafe.imports_passed_through():
    from benchmarks.effects.client import VARIANT, book, cancel, find

LIMIT = timedelta(seconds=10)


@activity.defn
def book_one(what: str) -> str:
    """Book a car, a hotel or a flight."""
    info = activity.info()
    key = f"{info.workflow_run_id}/{info.activity_id}"
    if VARIANT == "keys":
        return book(what, key=key)
    if VARIANT == "lookup":
        return find(key) or book(what, reference=key)
    return book(what)


@activity.defn
def cancel_one(booking: str) -> None:
    """Cancel a booking."""
    cancel(booking)


@workflow.defn
class BookTrip:
    """Books all three or none."""

    @workflow.run
    async def run(self) -> str:
        """Book one after the other; cancel what was booked if one cannot be."""
        compensations: list[str] = []
        policy = RetryPolicy(non_retryable_error_types=["SoldOut"])
        try:
            for what in ("car", "hotel", "flight"):
                booking = await workflow.execute_activity(
                    book_one, what, start_to_close_timeout=LIMIT, retry_policy=policy
                )
                compensations.append(booking)
        except ActivityError:
            for booking in reversed(compensations):
                await workflow.execute_activity(cancel_one, booking, start_to_close_timeout=LIMIT)
            return "not booked"
        return "booked"


async def main() -> None:
    """Run a worker, and the workflow; one that was started before goes on."""
    client = await Client.connect(os.environ["TEMPORAL"])
    worker = Worker(
        client,
        task_queue="trips",
        workflows=[BookTrip],
        activities=[book_one, cancel_one],
        activity_executor=ThreadPoolExecutor(5),
    )
    async with worker:
        result = await client.execute_workflow(
            BookTrip.run,
            id="trip-7",
            task_queue="trips",
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        )
        print(result, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
