"""A list as a node to which each element is sent, with an error handler, and a checkpointer.

https://docs.langchain.com/oss/python/langgraph/graph-api (*Send*),
https://docs.langchain.com/oss/python/langgraph/fault-tolerance (error handlers) and
https://docs.langchain.com/oss/python/langgraph/durable-execution (resuming).
"""

import json
import operator
import sqlite3
from typing import Annotated, TypedDict

from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

from benchmarks.mapping import client


class State(TypedDict):
    """The documents, and their results."""

    documents: list[int]
    results: Annotated[list[dict], operator.add]


class One(TypedDict):
    """Input of a node: one document."""

    n: int


def list_documents(state: State) -> State:
    """List the documents."""
    return {"documents": list(range(client.DOCUMENTS))}


def send_each(state: State) -> list[Send]:
    """Send each document to the converter."""
    return [Send("convert", {"n": n}) for n in state["documents"]]


def convert(state: One) -> State:
    """Convert a document."""
    return {"results": [client.convert(state["n"])]}


def convert_elsewhere(state: One) -> State:
    """Convert a document with the other converter."""
    try:
        return {"results": [client.convert_elsewhere(state["n"])]}
    except ValueError:
        return {"results": [None]}


def main() -> None:
    """Start the thread, or continue it where it was killed."""
    builder = StateGraph(State)
    builder.add_node("list_documents", list_documents)
    builder.add_node("convert", convert, error_handler=convert_elsewhere)
    builder.add_edge(START, "list_documents")
    builder.add_conditional_edges("list_documents", send_each, ["convert"])
    builder.add_edge("convert", END)
    saver = SqliteSaver(sqlite3.connect("threads.db", check_same_thread=False))
    graph = builder.compile(checkpointer=saver)
    config = {"configurable": {"thread_id": "documents-7"}, "max_concurrency": client.AT_ONCE}
    begin = {"results": []}
    if graph.get_state(config).next:
        begin = None  # continues from the last checkpoint
    print(json.dumps(graph.invoke(begin, config, durability="sync")["results"]))


if __name__ == "__main__":
    main()
