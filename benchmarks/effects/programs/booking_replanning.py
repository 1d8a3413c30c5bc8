"""A trip as a plan: what takes a booking back is stated on the tool that makes it."""

import anyio

from benchmarks.effects.client import VARIANT, book, cancel, find
from replanning import Plan, ReplanningEngine, current_attempt, tool

PLAN = Plan.parse("""
goal: {objective: Book a trip}
sequential: true
tasks:
  - {id: car, tool: book_one, arguments: {what: car}}
  - {id: hotel, tool: book_one, arguments: {what: hotel}}
  - {id: flight, tool: book_one, arguments: {what: flight}}
""")


def find_booking(idempotency_key: str) -> str | None:
    """Look for the booking of a call."""
    return find(idempotency_key)


STATED = {"nothing": {}, "lookup": {"confirm": find_booking}, "keys": {"idempotent": True}}


@tool(
    effect="reversible",
    undo={"tool": "cancel_one", "arguments": {"booking": "${output}"}},
    **STATED[VARIANT],
)
def book_one(what: str) -> str:
    """Book a car, a hotel or a flight."""
    key = current_attempt().idempotency_key
    if VARIANT == "keys":
        return book(what, key=key)
    return book(what, reference=key)


@tool(idempotent=True)
def cancel_one(booking: str) -> None:
    """Cancel a booking."""
    cancel(booking)


async def main() -> None:
    """Start the run, or continue it where it was killed; take it back if it has failed."""
    engine = ReplanningEngine(store="runs.db")
    tools = [book_one, cancel_one]
    result = await engine.execute(PLAN, tools=tools, run_id="trip-7")
    if result.status == "failed":
        engine.undo("trip-7", reason="not booked")
        result = await engine.execute(PLAN, tools=tools, run_id="trip-7")
    if result.status == "succeeded":
        print("booked")
    elif result.status == "needs_human":
        print("a person is asked")
    else:
        print(result.reason)


if __name__ == "__main__":
    anyio.run(main)
