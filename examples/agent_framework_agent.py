"""A workflow of the Microsoft Agent Framework, attached by two lines. Run it as it is.

Needs `pip install agent-framework-core agent-framework-orchestrations`. The finder's tool fails, and another tool replaces it.
The writer's model fails, and the editor replaces the writer after the user has approved it. The answer goes to a second workflow,
as if in another process: the journal is on disk, and finished agents do not run again.
"""

import tempfile
from pathlib import Path

import anyio
from agent_framework import (
    Agent,
    BaseChatClient,
    ChatResponse,
    Content,
    FunctionInvocationLayer,
    InMemoryCheckpointStorage,
    Message,
    tool,
)
from agent_framework_orchestrations import SequentialBuilder

from replanning import ReplanningEngine, Settings
from replanning.integrations.agent_framework import Replanned, replanned
from replanning.journal import SqliteStore


class ScriptedClient(FunctionInvocationLayer, BaseChatClient):
    """Scripted stand-in for a model: it searches, repeats what it found or was told, or is overloaded."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    async def _inner_get_response(self, *, messages, stream, options, **kwargs):
        if self.model == "overloaded":
            raise RuntimeError("the model is overloaded")
        found = [each.result for each in messages[-1].contents if each.type == "function_result"]
        reply = found[0] if found else f"a report of {messages[-1].text}"
        if self.model == "searching" and not found:
            reply = Content.from_function_call("1", "search", arguments={"query": "changelog"})
        return ChatResponse(messages=[Message("assistant", [reply])])


@tool
async def search(query: str) -> str:
    """Search the web."""
    raise PermissionError("the key has expired")


@tool
def search_archive(query: str) -> str:
    """Search the archive."""
    return f"{query}, from the archive"


def make_workflow(checkpoints, store):
    """Return the workflow, as each process creates it."""
    finder = Agent(
        ScriptedClient("searching"),
        name="finder",
        tools=[search, search_archive],
        middleware=[Replanned({"search": "web", "search_archive": "web"})],
    )
    writer = Agent(ScriptedClient("overloaded"), name="writer")
    editor = Agent(ScriptedClient("writing"), name="editor")
    settings = Settings.model_validate({"alternatives": {"require_approval": True}})
    engine = ReplanningEngine(store=SqliteStore(store), settings=settings)
    workflow = SequentialBuilder(
        participants=[finder, writer], checkpoint_storage=checkpoints
    ).build()
    capabilities = {"writer": "write", "editor": "write"}
    return replanned(
        workflow, engine, capabilities=capabilities, agents=[editor], thread="report-1"
    )


async def main():
    """Ask for a report, approve what the engine proposes, and print the report."""
    checkpoints = InMemoryCheckpointStorage()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "runs.db"
        first = make_workflow(checkpoints, store)
        result = await first.run("Report on the changelog.")
        [request] = result.get_request_info_events()
        [question] = request.data.additional_properties["replanning"]
        print("asked:", question["text"])

        second = make_workflow(checkpoints, store)
        last = await checkpoints.get_latest(workflow_name=second.name)
        answer = request.data.to_function_approval_response(approved=True)
        result = await second.run(
            checkpoint_id=last.checkpoint_id, responses={request.request_id: answer}
        )
    print("report:", *result.get_outputs())


if __name__ == "__main__":
    anyio.run(main)
