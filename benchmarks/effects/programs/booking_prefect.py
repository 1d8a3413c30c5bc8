"""A trip as a transaction of three tasks, each with a hook that cancels its booking.

https://docs.prefect.io/v3/advanced/transactions
"""

from prefect import flow, task
from prefect.runtime import flow_run
from prefect.transactions import Transaction, get_transaction, transaction

from benchmarks.effects.client import VARIANT, SoldOut, book, cancel, find


@task(retries=2, persist_result=True)
def book_one(what: str) -> str:
    """Book a car, a hotel or a flight."""
    key = f"{flow_run.get_id()}/{what}"
    if VARIANT == "keys":
        booking = book(what, key=key)
    elif VARIANT == "lookup":
        booking = find(key) or book(what, reference=key)
    else:
        booking = book(what)
    get_transaction().set("booking", booking)
    return booking


@book_one.on_rollback
def cancel_one(transaction: Transaction) -> None:
    """Cancel the booking of a task that is rolled back."""
    cancel(transaction.get("booking"))


@flow(persist_result=True)
def book_trip() -> str:
    """Book all three or none."""
    try:
        with transaction():
            book_one("car")
            book_one("hotel")
            book_one("flight")
    except SoldOut:
        return "not booked"
    return "booked"


if __name__ == "__main__":
    print(book_trip())
