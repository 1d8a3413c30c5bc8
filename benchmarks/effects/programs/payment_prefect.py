"""A payment as a flow of one task.

https://docs.prefect.io/v3/how-to-guides/workflows/retries
"""

from prefect import flow, task
from prefect.runtime import flow_run

from benchmarks.effects.client import VARIANT, charge, find

RETRIES = 2
if VARIANT in ("nothing", "once"):
    RETRIES = 0


@task(retries=RETRIES, persist_result=True)
def pay() -> str:
    """Charge the customer."""
    key = f"{flow_run.get_id()}/pay"
    if VARIANT == "keys":
        return charge(key=key)
    if VARIANT == "lookup":
        return find(key) or charge(reference=key)
    return charge()


@flow(persist_result=True)
def pay_invoice() -> str:
    """Pay, and say so."""
    pay()
    return "paid"


if __name__ == "__main__":
    print(pay_invoice())
