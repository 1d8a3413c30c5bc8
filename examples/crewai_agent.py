"""A crew of CrewAI with replacement tools and agents. Needs `pip install crewai`; run it as it is."""

import os
from tempfile import mkdtemp

os.environ["CREWAI_DISABLE_TELEMETRY"] = "true"  # stay off the network
os.environ["CREWAI_DISABLE_VERSION_CHECK"] = "true"
os.environ["CREWAI_TRACING_ENABLED"] = "false"
os.environ["CREWAI_STORAGE_DIR"] = mkdtemp()

from crewai import Agent, BaseLLM, Crew, Task
from crewai.tools import tool

from replanning import ReplanningEngine
from replanning.errors import NeedsHuman
from replanning.integrations.crewai import replanned


@tool
def search(query: str) -> str:
    """Search the web."""
    raise PermissionError("the key of the search has expired")


@tool
def search_archive(query: str) -> str:
    """Search the archive."""
    return f"{query}, from the archive"


class ScriptedModel(BaseLLM):
    """A scripted stand-in for a model: it searches if it has a tool for that, then says what it found."""

    answer: str | None = None

    def call(self, messages, tools=None, *args, **options):
        """Answer a request."""
        if messages[-1]["role"] == "tool":
            return f"found {messages[-1]['content']}"
        print(f"  {self.model} is asked")
        if tools:
            arguments = '{"query": "the changelog"}'
            return [{"id": "1", "function": {"name": "search", "arguments": arguments}}]
        if self.answer is None:
            raise ConnectionError("the model does not answer")
        return self.answer

    def supports_function_calling(self):
        """Return whether the model calls tools as functions."""
        return True


def agent(role, answer=None, tools=()):
    """Return an agent with a scripted model."""
    return Agent(
        role=role,
        goal="a release that people understand",
        backstory="You have done this before.",
        llm=ScriptedModel(model=role, answer=answer),
        tools=list(tools),
        max_retry_limit=0,
    )


researcher = agent("researcher", tools=[search, search_archive])
writer = agent("writer")  # fails
editor = agent("editor", "Version 2 is faster.")
critic = agent("critic", "Well said.")


def crew():
    """Return a crew with three tasks, one after another, and an editor who could write as well."""
    steps = {"research": researcher, "write": writer, "judge": critic}
    tasks = [
        Task(name=name, description=f"{name} it", expected_output="A sentence.", agent=each)
        for name, each in steps.items()
    ]
    return Crew(name="release notes", agents=[researcher, writer, editor, critic], tasks=tasks)


CAPABILITIES = {"search": "web", "search_archive": "web", "writer": "write", "editor": "write"}


def show(output):
    """Print the output and the agent of each task."""
    for each in output.tasks_output:
        print(f"  {each.name}: {each.raw} ({each.agent})")


def main():
    """Run the crew three times: alone, with replacements, and with a person who decides first."""
    print("alone")
    try:
        crew().kickoff()
    except ConnectionError as error:
        print(f"  {error}")

    print("with stand-ins")
    with replanned(crew(), capabilities=CAPABILITIES) as attached:
        show(attached.kickoff())

    print("with a person who decides")
    engine = ReplanningEngine(store=f"{mkdtemp()}/runs.db")
    asking = {**CAPABILITIES, "editor": {"capability": "write", "dangerous": True}}
    options = {"capabilities": asking, "thread": "release-2"}
    try:
        with replanned(crew(), engine, **options) as attached:
            attached.kickoff()
    except NeedsHuman:
        for question in engine.pending():
            print(f"  asked: {question.text}")
            engine.answer(question.id, "approve", by="you")
    print("resumed")
    with replanned(crew(), engine, **options) as attached:
        show(attached.kickoff())


if __name__ == "__main__":
    main()
