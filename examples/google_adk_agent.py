"""A team of Google ADK, attached by one plugin. Needs `pip install google-adk`; run it as it is.

The finder's tool fails, and the archive replaces it after the user has confirmed it. The writer's model fails, and the editor
replaces the writer. The user's answer resumes the invocation with a second runner, as if in another process: the journal of the
runs is on disk.
"""

import tempfile
import warnings
from pathlib import Path

import anyio
from google.adk.agents import LlmAgent, SequentialAgent
from google.adk.apps import App, ResumabilityConfig
from google.adk.models import BaseLlm, LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools import FunctionTool
from google.genai import types

from replanning import ReplanningEngine
from replanning.integrations.google_adk import Replanned
from replanning.journal import SqliteStore

warnings.filterwarnings("ignore", "SequentialAgent is deprecated")
warnings.filterwarnings("ignore", ".*ResumabilityConfig", UserWarning)


class Model(BaseLlm):
    """A scripted stand-in for a model: it searches, writes what was found, or is overloaded."""

    async def generate_content_async(self, llm_request, stream=False):
        if self.model == "overloaded":
            raise RuntimeError("the model is overloaded")
        instruction = llm_request.config.system_instruction.splitlines()[0]
        part = types.Part(text=f"a report of {instruction}")
        if self.model == "searching":
            asked = llm_request.contents[-1].parts[-1]
            call = types.FunctionCall(name="search", args={"query": "changelog"})
            part = types.Part(function_call=call)
            if asked.function_response:
                part = types.Part(text=asked.function_response.response["result"])
        yield LlmResponse(content=types.Content(role="model", parts=[part]))


async def search(query: str) -> str:
    """Search the web."""
    raise PermissionError("the key has expired")


async def search_archive(query: str) -> str:
    """Search the archive."""
    return f"{query}, from the archive"


def make_runner(sessions, store):
    """Return a runner of the team, as each process creates it."""
    archive = FunctionTool(search_archive, require_confirmation=True)
    finder = LlmAgent(
        name="finder",
        model=Model(model="searching"),
        tools=[search, archive],
        output_key="found",
    )
    writer = LlmAgent(
        name="writer", model=Model(model="overloaded"), instruction="{found}", output_key="report"
    )
    editor = LlmAgent(name="editor", model=Model(model="writing"), instruction="{found}")
    capabilities = {"search": "web", "search_archive": "web", "writer": "write", "editor": "write"}
    engine = ReplanningEngine(store=SqliteStore(store))
    app = App(
        name="team",
        root_agent=SequentialAgent(name="team", sub_agents=[finder, writer]),
        plugins=[Replanned(capabilities, engine=engine, agents=[editor])],
        resumability_config=ResumabilityConfig(is_resumable=True),
    )
    return Runner(app=app, session_service=sessions)


async def send(runner, session, part):
    """Send a message, print the agents' replies, and return their function calls."""
    calls = []
    message = types.Content(role="user", parts=[part])
    stream = runner.run_async(user_id="me", session_id=session.id, new_message=message)
    async for event in stream:
        calls += event.get_function_calls()
        for each in event.content.parts if event.content else ():
            if each.text:
                print(f"{event.author}: {each.text}")
    return calls


async def main():
    """Ask for a report, confirm the engine's proposal, and print the saved report."""
    sessions = InMemorySessionService()
    session = await sessions.create_session(app_name="team", user_id="me")
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "runs.db"
        first = make_runner(sessions, store)
        calls = await send(first, session, types.Part(text="Report on the changelog."))
        await first.close()
        request = next(each for each in calls if each.name == "adk_request_confirmation")
        print("asked:", request.args["toolConfirmation"]["hint"])

        answer = types.FunctionResponse(
            id=request.id, name=request.name, response={"confirmed": True}
        )
        second = make_runner(sessions, store)
        await send(second, session, types.Part(function_response=answer))
        await second.close()
    ended = await sessions.get_session(app_name="team", user_id="me", session_id=session.id)
    print("report:", ended.state["report"])


if __name__ == "__main__":
    anyio.run(main)
