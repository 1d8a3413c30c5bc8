"""A payment as a plan of one task."""

import anyio

from benchmarks.effects.client import VARIANT, charge, find
from replanning import Plan, ReplanningEngine, current_attempt, tool

PLAN = Plan.parse("""
goal: {objective: Pay the invoice}
tasks:
  - {id: pay, tool: pay}
""")


def find_payment(idempotency_key: str) -> str | None:
    """Look for the charge of a call."""
    return find(idempotency_key)


STATED = {
    "nothing": {},
    "once": {"retry": {"max_attempts": 1}},
    "retries": {"retry": {"max_attempts": 3}},
    "lookup": {"confirm": find_payment},
    "keys": {"idempotent": True},
}


@tool(effect="irreversible", **STATED[VARIANT])
def pay() -> str:
    """Charge the customer."""
    key = current_attempt().idempotency_key
    if VARIANT == "keys":
        return charge(key=key)
    return charge(reference=key)


async def main() -> None:
    """Start the run, or continue it where it was killed."""
    engine = ReplanningEngine(store="runs.db")
    result = await engine.execute(PLAN, tools=[pay], run_id="invoice-7")
    if result.status == "succeeded":
        print("paid")
    elif result.status == "needs_human":
        print("a person is asked")
    else:
        print("not paid")


if __name__ == "__main__":
    anyio.run(main)
