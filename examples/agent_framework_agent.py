"""An agent of the Microsoft Agent Framework, attached by one line. Needs `pip install agent-framework-core`; run it as it is."""

import anyio
from agent_framework import (
    Agent,
    BaseChatClient,
    ChatResponse,
    Content,
    FunctionInvocationLayer,
    Message,
    tool,
)

from replanning.integrations.agent_framework import Replanned


class ScriptedClient(FunctionInvocationLayer, BaseChatClient):
    """A stand-in for a model: it searches, then says what it found."""

    async def _inner_get_response(self, *, messages, stream, options, **kwargs):
        found = [each.result for each in messages[-1].contents if each.type == "function_result"]
        call = Content.from_function_call("1", "search", arguments={"query": "changelog"})
        return ChatResponse(
            messages=[Message("assistant", [f"found {found[0]}" if found else call])]
        )


@tool
async def search(query: str) -> str:
    """Search the web."""
    raise PermissionError("the key has expired")


@tool
def search_archive(query: str) -> str:
    """Search the archive."""
    return f"{query}, from the archive"


assistant = Agent(
    ScriptedClient(),
    name="assistant",
    tools=[search, search_archive],
    middleware=[Replanned({"search": "web", "search_archive": "web"})],
)


async def main():
    """The tool that fails is replaced, and the model sees the result of the other one."""
    print(await assistant.run("What changed?"))


if __name__ == "__main__":
    anyio.run(main)
