"""An agent of the OpenAI Agents SDK, attached by two lines. Needs `pip install openai-agents`; run it as it is."""

import anyio
from agents import Agent, Runner, function_tool, set_tracing_disabled
from agents.testing import ScriptedModel, assistant_message, function_call

from replanning.integrations.openai_agents import replanned

set_tracing_disabled(True)


@function_tool
async def search(query: str) -> str:
    """Search the web."""
    raise PermissionError("the key has expired")


@function_tool
async def search_archive(query: str) -> str:
    """Search the archive."""
    return f"{query}, from the archive"


# A scripted stand-in for a model: it searches, then says what it found.
model = ScriptedModel(
    [[function_call("search", {"query": "changelog"}, call_id="1")], [assistant_message("found")]]
)
assistant = Agent("assistant", model=model, tools=[search, search_archive])


async def main():
    """The tool that fails is replaced, and the model sees the result of the other one."""
    async with replanned(
        assistant, capabilities={"search": "web", "search_archive": "web"}
    ) as agent:
        result = await Runner.run(agent, "What changed?")
    print(
        [item.output for item in result.new_items if item.type == "tool_call_output_item"],
        result.final_output,
    )


if __name__ == "__main__":
    anyio.run(main)
