"""An agent of Google ADK, attached by two lines. Needs `pip install google-adk`; run it as it is."""

import anyio
from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.models import BaseLlm, LlmResponse
from google.adk.runners import InMemoryRunner
from google.genai import types

from replanning.integrations.google_adk import Replanned


class Model(BaseLlm):
    """A scripted stand-in for a model: it searches, then says what it found."""

    async def generate_content_async(self, llm_request, stream=False):
        asked = llm_request.contents[-1].parts[-1]
        if asked.function_response:
            part = types.Part(text=f"found {asked.function_response.response['result']}")
        else:
            part = types.Part(
                function_call=types.FunctionCall(name="search", args={"query": asked.text})
            )
        yield LlmResponse(content=types.Content(role="model", parts=[part]))


async def search(query: str) -> str:
    """Search the web."""
    raise PermissionError("the key has expired")


async def search_archive(query: str) -> str:
    """Search the archive."""
    return f"{query}, from the archive"


assistant = LlmAgent(
    name="assistant", model=Model(model="scripted"), tools=[search, search_archive]
)
app = App(
    name="assistant",
    root_agent=assistant,
    plugins=[Replanned({"search": "web", "search_archive": "web"})],
)


async def main():
    """The tool that fails is replaced, and the model sees the result of the other one."""
    runner = InMemoryRunner(app=app)
    events = await runner.run_debug("changelog", quiet=True)
    print(events[-1].content.parts[0].text)


if __name__ == "__main__":
    anyio.run(main)
