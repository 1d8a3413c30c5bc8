"""An agent of LangChain on LangGraph, attached by two lines. Needs `pip install langchain`; run it as it is.

The search fails, and the archive replaces it after the user has approved it, because each call of the archive needs approval.
A second agent resumes the thread, as if in another process: the journal of the runs is on disk.
"""

import tempfile
from pathlib import Path

import anyio
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from replanning import ReplanningEngine
from replanning.integrations.langgraph import ReplanningMiddleware, replanned
from replanning.journal import SqliteStore


@tool
async def search(query: str) -> str:
    """Search the web."""
    raise PermissionError("the key has expired")


@tool
async def search_archive(query: str) -> str:
    """Search the archive."""
    return f"{query}, from the archive"


class Model(GenericFakeChatModel):
    """Scripted stand-in for a model: it searches, then says that it has found something."""

    def bind_tools(self, tools, **options):
        return self


call = {"name": "search", "args": {"query": "changelog"}, "id": "1"}
MODEL = Model(messages=iter([AIMessage("", tool_calls=[call]), AIMessage("found")]))


def make_agent(saver, store):
    """Return the attached agent, as each process creates it."""
    approval = HumanInTheLoopMiddleware(interrupt_on={"search_archive": True})
    agent = create_agent(
        MODEL,
        [search, search_archive],
        middleware=[ReplanningMiddleware(), approval],
        checkpointer=saver,
    )
    engine = ReplanningEngine(store=SqliteStore(store))
    return replanned(agent, engine, capabilities={"search": "web", "search_archive": "web"})


async def main():
    """Ask, approve the engine's proposal, and print the messages."""
    saver = InMemorySaver()
    config = {"configurable": {"thread_id": "1"}}
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "runs.db"
        question = {"messages": [("user", "What changed?")]}
        result = await make_agent(saver, store).ainvoke(question, config)
        asked = result["__interrupt__"][0].value
        print("asked:", asked["choices"])

        answer = {"question": asked["question"], "verdict": "approve", "by": "ada"}
        result = await make_agent(saver, store).ainvoke(Command(resume=answer), config)
    print([message.text for message in result["messages"]])


if __name__ == "__main__":
    anyio.run(main)
