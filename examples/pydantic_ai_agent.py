"""An agent of pydantic-ai, attached by two lines. Needs `pip install pydantic-ai-slim`; run it as it is."""

import anyio
from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import FunctionModel

from replanning.integrations.pydantic_ai import Replanned


def model(messages, info):
    """A scripted stand-in for a model: it searches, then says what it found."""
    asked = messages[-1].parts[-1]
    if asked.part_kind == "tool-return":
        return ModelResponse([TextPart(f"found {asked.content}")])
    return ModelResponse([ToolCallPart("search", {"query": asked.content})])


async def search(query: str) -> str:
    """Search the web."""
    raise PermissionError("the key has expired")


async def search_archive(query: str) -> str:
    """Search the archive."""
    return f"{query}, from the archive"


assistant = Agent(
    FunctionModel(model),
    tools=[search, search_archive],
    capabilities=[Replanned(capabilities={"search": "web", "search_archive": "web"})],
)


async def main():
    """The tool that fails is replaced, and the model sees the result of the other one."""
    result = await assistant.run("changelog")
    print(result.output)


if __name__ == "__main__":
    anyio.run(main)
