"""A workflow of swarms with a replacement agent. Needs `pip install swarms`; run it as it is."""

import os
from tempfile import mkdtemp

os.environ["SWARMS_TELEMETRY_ON"] = "false"  # stay off the network
os.environ["WORKSPACE_DIR"] = mkdtemp()

from loguru import logger
from swarms import Agent, SequentialWorkflow
from swarms.schemas.agent_errors import AgentLLMError

from replanning import ReplanningEngine
from replanning.errors import NeedsHuman
from replanning.integrations.swarms import replanned

logger.disable("swarms")


class ScriptedModel:
    """Scripted stand-in for a model."""

    def __init__(self, name, answer):
        self.name = name
        self.answer = answer

    def run(self, task, **options):
        """Answer a request."""
        print(f"  {self.name} is asked")
        if self.answer is None:
            raise PermissionError("the key has expired")
        return self.answer


def agent(name, answer):
    """Return an agent with a scripted model."""
    return Agent(
        agent_name=name,
        llm=ScriptedModel(name, answer),
        model_name="gpt-4.1",
        max_loops=1,
        retry_attempts=1,
        print_on=False,
    )


researcher = agent("researcher", "Tea comes from China.")
writer = agent("writer", None)  # fails
editor = agent("editor", "Tea: a story from China.")
critic = agent("critic", "A good story.")


def workflow():
    """Return a workflow of three agents, one after another."""
    return SequentialWorkflow(agents=[researcher, writer, critic], autosave=False)


def main():
    """Run the workflow three times: alone, with a replacement, and with a person who decides."""
    print("alone")
    try:
        workflow().run("Write about tea")
    except AgentLLMError as error:
        print(f"  {error}")

    print("with a stand-in")
    capabilities = {"writer": "write", "editor": "write"}
    attached = replanned(workflow(), capabilities=capabilities, agents=[editor])
    for entry in attached.run("Write about tea"):
        print(f"  {entry['role']}: {entry['content']}")

    print("with a person who decides")
    engine = ReplanningEngine(
        store=f"{mkdtemp()}/runs.db",
        settings={"alternatives": {"human_approval_threshold": 0.99}},
    )
    attached = replanned(
        workflow(), engine, capabilities=capabilities, agents=[editor], thread="tea"
    )
    try:
        attached.run("Write about tea")
    except NeedsHuman as stopped:
        (question,) = stopped.questions
        print(f"  asked: {engine.pending()[0].text}")
        engine.answer(question, "approve", by="Ada")  # perhaps days later, and in another process
    for entry in attached.run("Write about tea"):  # continues where it stopped
        print(f"  {entry['role']}: {entry['content']}")


if __name__ == "__main__":
    main()
