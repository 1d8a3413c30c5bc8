"""A list as a node to which each element is sent, as `list_langgraph.py`, on an event loop.

https://docs.langchain.com/oss/python/langgraph/graph-api (*Send*),
https://docs.langchain.com/oss/python/langgraph/fault-tolerance (error handlers) and
https://docs.langchain.com/oss/python/langgraph/durable-execution (resuming).
"""

import asyncio
import json
import operator
from typing import Annotated, TypedDict

from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

from benchmarks.mapping import client

LIMIT = asyncio.Semaphore(client.AT_ONCE)


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


async def convert(state: One) -> State:
    """Convert a document."""
    async with LIMIT:
        return {"results": [await asyncio.to_thread(client.convert, state["n"])]}


async def convert_elsewhere(state: One) -> State:
    """Convert a document with the other converter."""
    try:
        return {"results": [await asyncio.to_thread(client.convert_elsewhere, state["n"])]}
    except ValueError:
        return {"results": [None]}


async def main() -> None:
    """Start the thread, or continue it where it was killed."""
    builder = StateGraph(State)
    builder.add_node("list_documents", list_documents)
    builder.add_node("convert", convert, error_handler=convert_elsewhere)
    builder.add_edge(START, "list_documents")
    builder.add_conditional_edges("list_documents", send_each, ["convert"])
    builder.add_edge("convert", END)
    config = {"configurable": {"thread_id": "documents-7"}}
    async with AsyncSqliteSaver.from_conn_string("threads.db") as saver:
        graph = builder.compile(checkpointer=saver)
        begin = {"results": []}
        if (await graph.aget_state(config)).next:
            begin = None  # continues from the last checkpoint
        print(json.dumps((await graph.ainvoke(begin, config, durability="sync"))["results"]))


if __name__ == "__main__":
    asyncio.run(main())
