"""A crew of CrewAI, attached by two lines. Needs `pip install crewai`; run it as it is."""

import os

os.environ["CREWAI_DISABLE_TELEMETRY"] = os.environ["CREWAI_DISABLE_VERSION_CHECK"] = (
    "true"  # stay off the network
)
os.environ["CREWAI_TRACING_ENABLED"] = "false"

from crewai import Agent, BaseLLM, Crew, Task
from crewai.tools import tool

from replanning.integrations.crewai import replanned


@tool
def search(query: str) -> str:
    """Search the web."""
    raise PermissionError("the key has expired")


@tool
def search_archive(query: str) -> str:
    """Search the archive."""
    return f"{query}, from the archive"


class ScriptedModel(BaseLLM):
    """A scripted stand-in for a model: it searches, then says what it found."""

    def call(self, messages, *args, **options):
        """Answer a request."""
        if messages[-1]["role"] == "tool":
            return f"found {messages[-1]['content']}"
        return [{"id": "1", "function": {"name": "search", "arguments": '{"query": "changelog"}'}}]

    def supports_function_calling(self):
        """Whether calls of tools are functions."""
        return True


helper = Agent(
    role="researcher",
    goal="find what changed",
    backstory="You know where to look.",
    llm=ScriptedModel(model="scripted"),
    tools=[search, search_archive],
)
crew = Crew(
    agents=[helper],
    tasks=[Task(description="What changed?", expected_output="A sentence.", agent=helper)],
)


if __name__ == "__main__":
    # The tool that fails is replaced, and the model sees the result of the other one.
    with replanned(crew, capabilities={"search": "web", "search_archive": "web"}):
        result = crew.kickoff()
    print(result.raw)
