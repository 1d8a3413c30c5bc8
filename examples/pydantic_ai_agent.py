"""An agent of pydantic-ai, attached by two lines. Needs `pip install pydantic-ai-slim`; run it as it is.

The search fails, and the archive replaces it after the user has approved it. A second agent continues the run with the approval, as
if in another process: the journal of the runs is on disk.
"""

import tempfile
from pathlib import Path

import anyio
from pydantic_ai import Agent, DeferredToolRequests, Tool
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import FunctionModel

from replanning import ReplanningEngine
from replanning.integrations.pydantic_ai import Replanned
from replanning.journal import SqliteStore


def model(messages, info):
    """Scripted stand-in for a model: it searches, then says what it found."""
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


def make_assistant(store):
    """Return the agent, as each process creates it."""
    engine = ReplanningEngine(store=SqliteStore(store))
    return Agent(
        FunctionModel(model),
        tools=[search, Tool(search_archive, requires_approval=True)],
        output_type=[str, DeferredToolRequests],
        capabilities=[Replanned({"search": "web", "search_archive": "web"}, engine=engine)],
    )


async def main():
    """Ask, approve the engine's proposal, and print the agent's reply."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "runs.db"
        stopped = await make_assistant(store).run("changelog")
        requests = stopped.output
        [asked] = requests.metadata.values()
        print("asked:", asked["replanning"]["questions"][0]["choices"])

        result = await make_assistant(store).run(
            message_history=stopped.all_messages(),
            deferred_tool_results=requests.build_results(
                approve_all=True, metadata=requests.metadata
            ),
        )
        print(result.output)


if __name__ == "__main__":
    anyio.run(main)
