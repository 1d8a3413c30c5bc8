# Work takes an ActivityContext, which is not declared as a TaskContext.
# mypy: disable-error-code="arg-type"
"""Recorded histories of runs on Temporal, which this version must replay.

A change after which one of them does not replay needs another number in `replanning.integrations.temporal._DECISIONS`, and then new
records: `python -m tests.integrations.test_temporal_histories` makes them.
"""

import asyncio  # noqa: TID251 # the SDK needs it
import json
import re
from pathlib import Path
from socket import gethostname

import pytest

from replanning import Plan, Task
from tests.support.asyncio_only import anyio_backend  # noqa: F401 - a fixture
from tests.support.temporal import Server, missing_part

if missing := missing_part():
    pytest.skip(missing, allow_module_level=True)

from temporalio.client import Client, WorkflowHistory
from temporalio.worker import Replayer, Worker

from replanning.integrations import temporal
from replanning.integrations.temporal import ActivityContext, ReplanningPlugin, TemporalOrchestrator

FOLDER = Path(__file__).parent / "histories"
TOOLS = "tools: [{name: scan, capability: read}, {name: photograph, capability: read%s}]"
READ = "{id: read, tool: scan}, {id: count, tool: photograph, depends_on: [read]}"
PLANS = {
    "replaced": f"goal: {{objective: count words}}\n{TOOLS % ''}\ntasks: [{READ}]",
    "answered": f"goal: {{objective: count words}}\n{TOOLS % ', dangerous: true'}\ntasks: [{READ}]",
    "continued": f"goal: {{objective: count}}\nsequential: true\ntasks: [{', '.join(f'{{id: t{n}}}' for n in range(12))}]",
}


async def work(task: Task, context: ActivityContext) -> str:
    """Fails with a tool, as scanners do."""
    if task.tool == "scan":
        raise OSError("the scanner does not answer")
    return task.id


def plugin() -> ReplanningPlugin:
    """The plugin with which histories are recorded and replayed."""
    return ReplanningPlugin(work, max_history=40)


@pytest.mark.parametrize("name", PLANS)
async def test_histories_replay(name: str) -> None:
    """A history that was recorded before leads to the same commands: with a replaced task, an answer, or a journal to go on with."""
    history = WorkflowHistory.from_json(name, (FOLDER / f"{name}.json").read_text())
    await Replayer(workflows=[], plugins=[plugin()]).replay_workflow(history)


async def test_histories_of_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workflow that another version has begun is refused with a message that says so, instead of being decided differently."""
    monkeypatch.setattr(temporal, "_DECISIONS", "replanning-of-tomorrow")
    history = WorkflowHistory.from_json("replaced", (FOLDER / "replaced.json").read_text())
    with pytest.raises(RuntimeError, match="begun by another version of replanning"):
        await Replayer(workflows=[], plugins=[plugin()]).replay_workflow(history)


async def record(address: str) -> None:
    """Run the plans, and keep their histories, without names of this machine."""
    client = await Client.connect(address)
    orchestrator = TemporalOrchestrator(client, task_queue="histories")
    async with Worker(client, task_queue="histories", plugins=[plugin()]):
        for name, text in PLANS.items():
            run = await orchestrator.start(Plan.parse(text), run_id=name)
            while name == "answered":
                asked = [
                    each.body.question
                    for each in await run.records()
                    if each.body.kind == "question-asked"
                ]
                if asked:
                    await run.answer(asked[0], "approve", by="ada")
                    break
            await run.result()
            history = json.loads((await run.handle.fetch_history()).to_json())
            kept = re.sub(
                r'("(?:identity|lastWorkerIdentity)": )"[^"]*"',
                r'\1"worker"',
                json.dumps(history, indent=1),
            )
            # Stack traces have paths of this machine, and replaying does not read them.
            kept = re.sub(r'("stackTrace": )"(?:[^"\\]|\\.)*"', r'\1""', kept)
            this_worker = rf"\d+@{re.escape(gethostname())}"
            (FOLDER / f"{name}.json").write_text(re.sub(this_worker, "worker", kept) + "\n")


if __name__ == "__main__":
    with Server.running() as server:
        asyncio.run(record(server.address))
