# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""Runs as workflows of Temporal, against a real server: faults, people, lost workers, long histories and replays."""

import asyncio  # noqa: TID251 # the SDK needs it
import base64
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from replanning import Alternative, Plan, ReplanningEngine, Retry, Task, tool
from replanning.changes import RetryTask
from replanning.decision.request import ReplanRequest

pytest.importorskip("temporalio", reason="Temporal is not installed here; make test-frameworks runs these tests")

from temporalio.client import Client, WorkflowUpdateFailedError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Replayer, Worker

from replanning.integrations.temporal import ActivityContext, ReplanningPlugin, TemporalOrchestrator, TemporalRun

PROGRAM = shutil.which("temporal", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
QUEUE = "plans"
PLAN = Plan.parse(
    """
    goal: {objective: load three times}
    tools:
      - {name: main, capability: load}
      - {name: spare, capability: load}
    tasks:
      - {id: a, tool: main}
      - {id: b, tool: main, depends_on: [a], arguments: {path: "${a.output}"}}
      - {id: c, tool: main, depends_on: [b]}
    """
)


@pytest.fixture
def anyio_backend() -> str:
    """The SDK needs asyncio."""
    return "asyncio"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a real server."""
    loop = asyncio.new_event_loop()
    environment = loop.run_until_complete(
        WorkflowEnvironment.start_local(dev_server_existing_path=PROGRAM, dev_server_log_level="error")
    )
    yield environment.client.service_client.config.target_host
    loop.run_until_complete(environment.shutdown())
    loop.close()


async def work(task: Task, context: ActivityContext) -> object:
    """Fails with the main tool at `b`."""
    if (task.id, task.tool) == ("b", "main"):
        raise ValueError("the file is broken")
    return f"{task.id} by {task.tool}, given {context.arguments}"


@asynccontextmanager
async def runs(address: str, plugin: ReplanningPlugin, **options: Any) -> AsyncIterator[Callable[..., Any]]:
    """A worker with a plugin, and a function that starts a run of a plan on it."""
    client = await Client.connect(address)
    async with Worker(client, task_queue=QUEUE, plugins=[plugin], **options):

        async def start(plan: Plan) -> TemporalRun:
            return await TemporalOrchestrator(client, task_queue=QUEUE).start(plan, run_id=f"run-{uuid.uuid4().hex}")

        yield start


async def replay(run: TemporalRun, plugin: ReplanningPlugin) -> None:
    """Replay the history of a run, which must lead to the same commands."""
    await Replayer(workflows=[], plugins=[plugin]).replay_workflow(await run.handle.fetch_history())


@pytest.mark.parametrize("cached", [1000, 0], ids=["cached", "evicted"])
async def test_the_same_as_here(address: str, cached: int) -> None:
    """A run on Temporal has the outputs, the revisions and the journal that the same run has in this process.

    So has one that is replayed from its history at each step.
    """
    here = await ReplanningEngine().execute(PLAN, work)
    plugin = ReplanningPlugin(work)
    async with runs(address, plugin, max_cached_workflows=cached) as start:
        run = await start(PLAN)
        result = await run.result()
        records = await run.records()
        await replay(run, plugin)
    assert (result["status"], result["outputs"]) == (here.status, dict(here.outputs))
    assert result["revisions"] == [revision.reason for revision in here.revisions] != []
    assert [record.seq for record in records] == list(range(1, len(records) + 1))


async def test_functions(address: str) -> None:
    """Functions are the tools of a plan; a failure that may pass is tried again, after the time that the policy states."""
    tries: list[int] = []

    @tool(retry=Retry(max_attempts=3, delay=0.01))
    def flaky(n: int) -> int:
        tries.append(n)
        if len(tries) < 3:
            raise ConnectionError("not yet")
        return n + 1

    plan = Plan.parse("goal: {objective: count}\ntasks: [{id: a, tool: flaky, arguments: {n: 1}}]")
    async with runs(address, ReplanningPlugin(tools=[flaky])) as start:
        result = await (await start(plan)).result()
    assert (result["status"], result["outputs"], tries) == ("succeeded", {"a": 2}, [1, 1, 1])


async def test_a_person_answers(address: str) -> None:
    """A question waits in the workflow; a wrong answer is refused and leaves the run as it is, and a right one is followed."""
    dangerous = PLAN.model_copy(
        update={"tools": tuple(each.model_copy(update={"dangerous": each.name == "spare"}) for each in PLAN.tools)}
    )
    plugin = ReplanningPlugin(work)
    async with runs(address, plugin) as start:
        run = await start(dangerous)
        while not (asked := [each.body for each in await run.records() if each.body.kind == "question-asked"]):
            pass
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await run.answer("no-such-question", "approve")
        assert "no-such-question" in str(refused.value.cause)
        await run.answer(asked[0].question, "approve", by="ada")
        result = await run.result()
        await replay(run, plugin)
    assert (result["status"], result["outputs"]["b"].partition(",")[0]) == ("succeeded", "b~2 by spare")


async def test_secrets(address: str) -> None:
    """What looks like a secret in an output or an error is not in the history of the workflow; what is no JSON is not kept."""
    key = "ghp_" + "a1B2c3D4e5" * 3 + "f6G7h8"

    async def leaky(task: Task, context: ActivityContext) -> object:
        if task.id == "a":
            return {"token": key}
        if task.id == "b" and task.tool == "main":
            raise ValueError(f"refused {key}")
        return object()

    async with runs(address, ReplanningPlugin(leaky)) as start:
        run = await start(
            PLAN.model_copy(update={"tasks": tuple(t.model_copy(update={"arguments": {}}) for t in PLAN.tasks)})
        )
        result = await run.result()
        history = (await run.handle.fetch_history()).to_json()
    assert (result["status"], "c" in result["outputs"]) == ("succeeded", False)
    assert key not in history
    assert key not in json.dumps(result)
    told = [base64.b64decode(data) for data in re.findall(r'"data": ?"([^"]+)"', history)]
    assert len(told) > 5
    assert not any(key.encode() in data for data in told)


class Model:
    """A provider that does I/O, as far as the workflow knows."""

    name = "model"

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[str]]] = []

    async def propose(self, request: ReplanRequest) -> list[Alternative]:
        failed = [task for trigger in request.triggers for task in trigger.tasks]
        self.seen.append((request.view.revision, failed))
        request.add_note("thought about it")
        return [Alternative(changes=(RetryTask(task_id=failed[0]),), reason="once more", confidence=0.9)]


async def test_providers_are_activities(address: str) -> None:
    """A provider that does I/O is asked in an activity, on the plan as it is then; a replay does not ask it again."""
    model, failures = Model(), ["first"]

    async def unlucky(task: Task, context: ActivityContext) -> str:
        if task.id == "b" and failures:
            raise ValueError(failures.pop())
        return task.id

    plugin = ReplanningPlugin(unlucky, providers=[model])
    plan = Plan.parse("goal: {objective: x}\ntasks: [{id: a}, {id: b, depends_on: [a]}]")
    async with runs(address, plugin) as start:
        run = await start(plan)
        result = await run.result()
        await replay(run, plugin)
    assert (result["status"], result["revisions"], model.seen) == ("succeeded", ["once more"], [(0, ["b"])])


async def test_long_histories(address: str) -> None:
    """A workflow whose history grows long is continued as a new one; nothing is lost or done twice."""
    done: list[str] = []

    async def count(task: Task, context: ActivityContext) -> str:
        done.append(task.id)
        return task.id

    tasks = [{"id": f"t{n}", **({"depends_on": [f"t{n - 1}"]} if n else {})} for n in range(60)]
    plan = Plan.model_validate({"goal": {"objective": "count"}, "tasks": tasks})
    async with runs(address, ReplanningPlugin(count, max_history=100)) as start:
        run = await start(plan)
        result = await run.result()
        records = await run.records()
    assert (result["status"], done) == ("succeeded", [f"t{n}" for n in range(60)])
    assert sum(record.body.kind == "run-resumed" for record in records) >= 2


WORKER = """
import asyncio, os, sys
from datetime import timedelta
from temporalio.client import Client
from temporalio.worker import Worker
from replanning.integrations import temporal
temporal._HEARTBEAT_SECONDS = 2.0

async def work(task, context):
    with open(sys.argv[2], "a") as file:
        file.write(f"{task.id} {task.tool}\\n")
    if (task.id, task.tool) == ("b", "main"):
        raise ValueError("the file is broken")
    if os.environ.get("HANG") == task.id:
        await asyncio.sleep(3600)
    return task.id

async def main():
    client = await Client.connect(sys.argv[1])
    soon = timedelta(seconds=1)  # in which a workflow leaves a worker that is gone
    plugins = [temporal.ReplanningPlugin(work)]
    async with Worker(
        client, task_queue="killed", plugins=plugins, sticky_queue_schedule_to_start_timeout=soon
    ):
        print("ready", flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_worker_that_is_killed(address: str, tmp_path: Path, idempotent: bool) -> None:
    """After SIGKILL another worker goes on; the task under way is done again if it is idempotent, else a person is asked."""
    log = tmp_path / "log"
    plan = PLAN.model_copy(
        update={"tasks": tuple(each.model_copy(update={"idempotent": idempotent}) for each in PLAN.tasks)}
    )

    client = await Client.connect(address)
    run = await TemporalOrchestrator(client, task_queue="killed").start(plan, run_id=f"run-{uuid.uuid4().hex}")
    first = worker(address, log, HANG="c")
    try:
        await asyncio.to_thread(wait_for, log, "c main")
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    second = worker(address, log)
    try:
        if not idempotent:
            while not (asked := [each.body for each in await run.records() if each.body.kind == "question-asked"]):
                pass
            await run.answer(asked[0].question, "approve")
        result = await run.result()
    finally:
        second.kill()
        second.wait()
    assert result["status"] == "succeeded"
    done = log.read_text().splitlines()
    assert done[:3] == ["a main", "b main", "b~2 spare"]
    assert [line.startswith("c") for line in done[3:]] == [True, True]


async def test_workers_that_are_killed_again_and_again(address: str, tmp_path: Path) -> None:
    """Killed at random instants, with another worker each time, a run has the result of one that nobody disturbed."""
    log, chance = tmp_path / "log", random.Random(7)
    tasks = [{"id": f"t{n}", "idempotent": True, **({"depends_on": [f"t{n - 3}"]} if n > 2 else {})} for n in range(20)]
    plan = Plan.model_validate({"goal": {"objective": "count"}, "tasks": tasks})
    client = await Client.connect(address)
    run = await TemporalOrchestrator(client, task_queue="killed").start(plan, run_id=f"run-{uuid.uuid4().hex}")
    ended = asyncio.create_task(run.result())
    while not ended.done():
        process = worker(address, log)
        await asyncio.wait([ended], timeout=chance.uniform(0.05, 1.0))
        process.kill()
        process.wait()
    result, records = ended.result(), await query(run, address, log)
    assert (result["status"], result["outputs"]) == ("succeeded", {f"t{n}": f"t{n}" for n in range(20)})
    succeeded = [record.body.task for record in records if record.body.kind == "attempt-succeeded"]
    assert sorted(succeeded) == sorted(f"t{n}" for n in range(20)), "each result counts once"


def wait_for(log: Path, text: str) -> None:
    """Wait until a file has a text."""
    while not log.exists() or text not in log.read_text():
        pass


def worker(address: str, log: Path, **variables: str) -> "subprocess.Popen[bytes]":
    """A process with a worker, once it is ready."""
    command = [sys.executable, "-c", WORKER, address, str(log)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **variables})
    assert process.stdout
    with process.stdout as said:
        assert said.readline() == b"ready\n"
    return process


async def query(run: TemporalRun, address: str, log: Path) -> list[Any]:
    """The records of a run that has ended, as a last worker tells them."""
    process = worker(address, log)
    try:
        return await run.records()
    finally:
        process.kill()
        process.wait()
