"""An agent of the OpenAI Agents SDK, attached by two lines. Needs `pip install openai-agents`; run it as it is.

The search fails, and the archive replaces it. Publishing needs the user's approval, which goes to a second agent, as if in another
process: the journal of the runs is on disk.
"""

import tempfile
from pathlib import Path

import anyio
from agents import Agent, Runner, RunState, function_tool, set_tracing_disabled
from agents.testing import ScriptedModel, assistant_message, function_call

from replanning import ReplanningEngine
from replanning.integrations.openai_agents import replanned
from replanning.journal import SqliteStore

set_tracing_disabled(True)

WEB = {"search": "web", "search_archive": "web"}


@function_tool
async def search(query: str) -> str:
    """Search the web."""
    raise PermissionError("the key has expired")


@function_tool
async def search_archive(query: str) -> str:
    """Search the archive."""
    return f"{query}, from the archive"


@function_tool(needs_approval=True)
async def publish(text: str) -> str:
    """Publish a text."""
    print("published:", text)
    return "published"


def make_assistant(*steps):
    """Return the agent, with a scripted stand-in for a model, as each process creates it."""
    tools = [search, search_archive, publish]
    return Agent("assistant", model=ScriptedModel(steps), tools=tools)


async def main():
    """Ask, approve the call that needs it, and print the outputs of tools and agent."""
    searching = [function_call("search", {"query": "changelog"}, call_id="1")]
    publishing = [function_call("publish", {"text": "what has changed"}, call_id="2")]
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "runs.db"
        engine = ReplanningEngine(store=SqliteStore(store))
        assistant = make_assistant(searching, publishing)
        async with replanned(assistant, engine, capabilities=WEB, thread="talk") as agent:
            result = await Runner.run(agent, "What changed?")
            print("asked:", [each.name for each in result.interruptions])
            saved = result.to_state().to_string()

        engine = ReplanningEngine(store=SqliteStore(store))
        assistant = make_assistant([assistant_message("done")])
        async with replanned(assistant, engine, capabilities=WEB, thread="talk") as agent:
            state = await RunState.from_string(agent, saved)
            state.approve(state.get_interruptions()[0])
            result = await Runner.run(agent, state)
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    print(outputs, result.final_output)


if __name__ == "__main__":
    anyio.run(main)
