"""A trip as a graph whose error handler goes to a node that cancels what was booked, with a checkpointer.

https://docs.langchain.com/oss/python/langgraph/fault-tolerance (error handlers, *Saga /
compensation patterns*) and https://docs.langchain.com/oss/python/langgraph/durable-execution
(resuming, idempotency keys, existing results).
"""

import operator
import sqlite3
from functools import partial
from typing import Annotated, TypedDict

from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.errors import NodeError
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import Command, RetryPolicy

from benchmarks.effects.client import VARIANT, book, cancel, find


class State(TypedDict):
    """What was booked, and what the caller is told."""

    bookings: Annotated[list[str], operator.add]
    told: str


def book_one(what: str, state: State, runtime: Runtime) -> State:
    """Book a car, a hotel or a flight."""
    key = f"{runtime.execution_info.thread_id}/{what}"
    if VARIANT == "keys":
        booking = book(what, key=key)
    elif VARIANT == "lookup":
        booking = find(key) or book(what, reference=key)
    else:
        booking = book(what)
    return {"bookings": [booking]}


def compensate(state: State, error: NodeError) -> Command:
    """Go to the compensations once a node has failed."""
    return Command(update={"told": "not booked"}, goto="cancel")


def cancel_all(state: State) -> State:
    """Cancel what was booked, the last one first."""
    for booking in reversed(state["bookings"]):
        cancel(booking)
    return {}


def confirm(state: State) -> State:
    """Say that everything is booked."""
    return {"told": "booked"}


def main() -> None:
    """Start the thread, or continue it where it was killed."""
    builder = StateGraph(State)
    builder.set_node_defaults(retry_policy=RetryPolicy(max_attempts=3))
    for what in ("car", "hotel", "flight"):
        builder.add_node(what, partial(book_one, what), error_handler=compensate)
    builder.add_node("confirm", confirm)
    builder.add_node("cancel", cancel_all)
    builder.add_edge(START, "car")
    builder.add_edge("car", "hotel")
    builder.add_edge("hotel", "flight")
    builder.add_edge("flight", "confirm")
    builder.add_edge("confirm", END)
    builder.add_edge("cancel", END)
    saver = SqliteSaver(sqlite3.connect("threads.db", check_same_thread=False))
    graph = builder.compile(checkpointer=saver)
    config = {"configurable": {"thread_id": "trip-7"}}
    begin = {"bookings": []}
    if graph.get_state(config).next:
        begin = None  # continues from the last checkpoint
    print(graph.invoke(begin, config, durability="sync")["told"])


if __name__ == "__main__":
    main()
