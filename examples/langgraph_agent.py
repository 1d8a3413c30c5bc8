"""An agent of LangChain on LangGraph, attached by two lines. Needs `pip install langchain`; run it as it is."""

import anyio
from langchain.agents import create_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import tool

from replanning import ReplanningEngine
from replanning.integrations.langgraph import ReplanningMiddleware, replanned


@tool
async def search(query: str) -> str:
    """Search the web."""
    raise PermissionError("the key has expired")


@tool
async def search_archive(query: str) -> str:
    """Search the archive."""
    return f"{query}, from the archive"


class Model(GenericFakeChatModel):
    """A scripted stand-in for a model: it searches, then says what it found."""

    def bind_tools(self, tools, **options):
        return self


call = {"name": "search", "args": {"query": "changelog"}, "id": "1"}
model = Model(messages=iter([AIMessage("", tool_calls=[call]), AIMessage("found")]))
agent = create_agent(model, [search, search_archive], middleware=[ReplanningMiddleware()])
agent = replanned(
    agent, ReplanningEngine(), capabilities={"search": "web", "search_archive": "web"}
)


async def main():
    """The tool that fails is replaced, and the model sees the result of the other one."""
    result = await agent.ainvoke({"messages": [("user", "What changed?")]})
    print([message.text for message in result["messages"]])


if __name__ == "__main__":
    anyio.run(main)
