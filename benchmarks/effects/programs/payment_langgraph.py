"""A payment as a graph of one node, with a checkpointer.

https://docs.langchain.com/oss/python/langgraph/fault-tolerance (retries) and
https://docs.langchain.com/oss/python/langgraph/durable-execution (resuming, idempotency keys,
existing results).
"""

import sqlite3
from typing import TypedDict

from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import RetryPolicy

from benchmarks.effects.client import VARIANT, charge, find

ATTEMPTS = 3
if VARIANT == "once":
    ATTEMPTS = 1


class State(TypedDict):
    """What the node adds to."""

    paid: str


def pay(state: State, runtime: Runtime) -> State:
    """Charge the customer."""
    key = f"{runtime.execution_info.thread_id}/pay"
    if VARIANT == "keys":
        return {"paid": charge(key=key)}
    if VARIANT == "lookup":
        return {"paid": find(key) or charge(reference=key)}
    return {"paid": charge()}


def main() -> None:
    """Start the thread, or continue it where it was killed."""
    policy = None
    if VARIANT != "nothing":
        policy = RetryPolicy(max_attempts=ATTEMPTS)
    builder = StateGraph(State)
    builder.add_node("pay", pay, retry_policy=policy)
    builder.add_edge(START, "pay")
    builder.add_edge("pay", END)
    saver = SqliteSaver(sqlite3.connect("threads.db", check_same_thread=False))
    graph = builder.compile(checkpointer=saver)
    config = {"configurable": {"thread_id": "invoice-7"}}
    begin = {"paid": ""}
    if graph.get_state(config).next:
        begin = None  # continues from the last checkpoint
    graph.invoke(begin, config, durability="sync")
    print("paid")


if __name__ == "__main__":
    main()
