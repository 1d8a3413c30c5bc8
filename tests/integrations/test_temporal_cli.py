"""The command line on Temporal: real commands, on a real server, with workers that are started and killed."""

import asyncio  # noqa: TID251 # the SDK needs it
import json
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Never

import pytest

from replanning import Plan
from replanning.cli import lookup
from replanning.journal import QuestionAsked
from tests.support.cli import PATIENCE, Started, Terminal, cli, write_plan
from tests.support.temporal import Server, missing_part

TOOLS = {
    "scan": "exit 3 ## capability: read",
    "photo": 'echo region=eu >> "$REPLANNING_CONTEXT"; echo page ## capability: read, dangerous: true',
    "count": "echo {text} has one word",
}
TASKS = """
    id: read, tool: scan
    id: words, tool: count, arguments: {text: "${read.output.stdout}"}, depends_on: [read]
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a real server."""
    if problem := missing_part():
        pytest.skip(problem)
    with Server.running() as server:
        yield server.address


@pytest.fixture
def on(address: str) -> str:
    """The place of runs, with a task queue that no other test serves."""
    return f"--on=temporal={address}/{uuid.uuid4().hex}"


def worker(folder: Path, on: str, *files: str) -> Started:
    """A worker that serves the queue."""
    started = Started(folder, "worker", *(files or ["plan.yaml"]), on)
    started.until("serving task queue")
    return started


def test_two_terminals(tmp_path, on):
    """One terminal runs a plan whose tool fails, a second one agrees to the other tool; every command that reads a run works."""
    write_plan(tmp_path, TOOLS, TASKS)
    run = f"run-{uuid.uuid4().hex}"
    with (
        worker(tmp_path, on),
        Started(tmp_path, "run", "plan.yaml", on, "--run-id", run, "--json") as first,
    ):
        first.until("'photo' needs a person's agreement")
        (asked,) = json.loads(cli(tmp_path, "pending", run, on, "--json").stdout)
        assert asked["candidates"][0]["diff"][1] == "+ read~2: tool: photo [PENDING]"
        assert "is running" in cli(tmp_path, "status", run, on).stdout
        taken = cli(tmp_path, "approve", run, "1", on, "--comment", "go ahead").stdout
        assert taken.startswith(
            f"Run {run}: the plan was changed.\n  replanning why {run} --on temporal="
        )
        result: Any = json.loads(first.end())
        told = cli(tmp_path, "why", run, "1", on).stdout
        assert "person-approve: go ahead" in told
        assert "read → read~2" in cli(tmp_path, "show", run, on).stdout
        again = cli(tmp_path, "approve", run, "1", on, code=1).stderr
        assert "question 1" in again
        assert "there is nothing to resume" in cli(tmp_path, "resume", run, on).stderr
    assert (result["status"], result["outputs"]["words"]["stdout"]) == (
        "succeeded",
        "page has one word",
    )
    assert [revision["source"] for revision in result["revisions"]] == ["repair"]


def test_the_folder_of_a_worker(tmp_path, on):
    """Tools work in the folder that their worker was started in or given, wherever the run was started."""
    folder = tmp_path / "work"
    folder.mkdir()
    write_plan(tmp_path, {"place": "pwd"}, "id: place, tool: place")
    with worker(tmp_path, on, "plan.yaml", "--directory", "work"):
        result: Any = json.loads(cli(tmp_path, "run", "plan.yaml", on, "--json").stdout)
    assert result["outputs"]["place"]["stdout"] == str(folder)


def test_a_worker_that_is_killed(tmp_path, on):
    """Without a worker a run waits and says so; one that is killed is followed by another, and Ctrl-C stops only the display."""
    write_plan(tmp_path, TOOLS, TASKS)
    run = f"run-{uuid.uuid4().hex}"
    with Started(tmp_path, "run", "plan.yaml", on, "--run-id", run) as first:
        first.until(f"run {run} waits: no worker serves task queue")
        first.until("start one with: replanning worker FILE --on temporal=")
        with worker(tmp_path, on) as killed:
            first.until("'photo' needs a person's agreement")
            killed.process.kill()
        first.process.send_signal(signal.SIGINT)
        assert first.end(130) == ""
    assert f"Follow it, or pause it:\n  replanning resume {run} --on temporal=" in first.seen
    with worker(tmp_path, on), Started(tmp_path, "resume", run, on) as second:
        second.until("'photo' needs a person's agreement")
        cli(tmp_path, "approve", run, on)
        assert "✓ succeeded" in second.end()


def test_a_person_at_the_terminal(tmp_path, on):
    """A question ends a command that may not ask; on a terminal it is asked there, until somebody has answered it anywhere."""
    write_plan(tmp_path, TOOLS, "id: read, tool: scan\nid: again, tool: scan, depends_on: [read]")
    run = f"run-{uuid.uuid4().hex}"
    with worker(tmp_path, on):
        asked = cli(
            tmp_path, "run", "plan.yaml", on, "--run-id", run, "--ask", "never", "--json", code=4
        )
        assert json.loads(asked.stdout)["questions"] == [f"{run}.q1"]
        with Terminal(tmp_path, "resume", run, on) as here:
            here.until("y approves")
            here.type("1 it is mine")
            here.until("y approves")
            assert "the plan was changed" in cli(tmp_path, "approve", run, on).stdout
            assert "✓ succeeded" in here.end()
        assert "it is mine" in cli(tmp_path, "why", run, "1", on).stdout


def test_a_run_that_is_called_off(tmp_path, on):
    """A person who refuses a change has the worker take back what the run has changed."""
    tools = {
        "book": "echo booked >> trips ## undo: {tool: cancel}, effect: reversible",
        "cancel": "echo cancelled >> trips ## idempotent: true",
        "fly": "exit 3 ## capability: fly",
        "charter": "echo flown >> trips ## capability: fly, dangerous: true",
    }
    write_plan(tmp_path, tools, "id: hotel, tool: book\nid: flight, tool: fly, depends_on: [hotel]")
    run = f"run-{uuid.uuid4().hex}"
    with (
        worker(tmp_path, on),
        Started(tmp_path, "run", "plan.yaml", on, "--run-id", run) as shown,
    ):
        shown.until("'charter' needs a person's agreement")
        cli(tmp_path, "reject", run, "--undo", "--comment", "the trip is off", on)
        assert "the trip is off" in shown.end(1)
    assert (tmp_path / "trips").read_text() == "booked\ncancelled\n"


def test_other_changes(tmp_path, on):
    """A person answers with changes of their own, and asks for another plan and another goal, while the run goes on."""
    tools = {**TOOLS, "wait": "echo waits >> log; while ! test -f go; do sleep 0.05; done"}
    write_plan(tmp_path, tools, "id: read, tool: scan\nid: last, tool: wait")
    (tmp_path / "changes.yaml").write_text("- {kind: skip, task_id: read}\n")
    run = f"run-{uuid.uuid4().hex}"
    with (
        worker(tmp_path, on),
        Started(tmp_path, "run", "plan.yaml", on, "--run-id", run, "--json") as first,
    ):
        first.until("'photo' needs a person's agreement")
        wrong = cli(tmp_path, "request", run, "it is late", "--task", "lost", on, code=1).stderr
        assert "there is no task 'lost'" in wrong
        taken = cli(
            tmp_path, "modify", run, "1", "--changes", "changes.yaml", "--by", "eve", on
        ).stdout
        assert taken.startswith(f"Run {run}: ")
        first.until("revision 1: changes by eve")  # the last task may have begun long before
        for asked in (["it is late", "--task", "last"], ["another aim", "--goal", "Be on time"]):
            assert f"Run {run}: " in cli(tmp_path, "request", run, *asked, on).stdout
        assert (
            json.loads(cli(tmp_path, "status", run, on, "--json").stdout)["objective"]
            == "Be on time"
        )
        (tmp_path / "go").touch()
        result: Any = json.loads(first.end())
    assert result["status"] == "succeeded"
    assert [change["kind"] for each in result["revisions"] for change in each["changes"]] == [
        "skip"
    ]


@pytest.fixture
def alone() -> Iterator[str]:
    """The place of runs on a server that has no others: reading those whose worker was killed takes 15 s for each queue."""
    if problem := missing_part():
        pytest.skip(problem)
    with Server.running() as server:
        yield f"--on=temporal={server.address}/mine"


def test_pause_and_resume(tmp_path, alone):
    """A run is paused from outside, resumed with another context, and forked from its beginning."""
    on = alone
    write_plan(
        tmp_path,
        {
            "wait": "echo waits >> log; while ! test -f go; do sleep 0.05; done",
            "say": "echo done >> log",
        },
        "id: first, tool: wait\nid: then, tool: say, depends_on: [first]",
        more="context: {region: us}",
    )
    run = f"run-{uuid.uuid4().hex}"
    with worker(tmp_path, on) as serving:
        with Started(tmp_path, "run", "plan.yaml", on, "--run-id", run) as first:
            first.until("first started")
            cli(tmp_path, "pause", run, on, "--reason", "lunch")
            (tmp_path / "go").touch()
            assert "‖ paused: lunch" in first.end(3)
        assert (
            "has stopped; resume it first"
            in cli(tmp_path, "request", run, "why not", on, code=1).stderr
        )
        result = json.loads(
            cli(tmp_path, "resume", run, on, "--set", "context.region=eu", "--json").stdout
        )
        assert (result["status"], (tmp_path / "log").read_text()) == ("succeeded", "waits\ndone\n")
        fork = json.loads(cli(tmp_path, "resume", run, on, "--from", "0", "--json").stdout)
        assert (fork["status"], fork["run"] != run) == ("succeeded", True)
        assert (
            "already exists"
            in cli(tmp_path, "run", "plan.yaml", on, "--run-id", run, code=2).stderr
        )
        listed = cli(tmp_path, "status", on).stdout
        assert listed.count("succeeded") >= 2
        serving.process.send_signal(signal.SIGINT)
        serving.end()


def test_workers_that_are_gone_are_asked_together(tmp_path, alone, monkeypatch):
    """Commands that read all runs ask the workers of several task queues at once, and say which of them are gone."""
    from temporalio.client import Client, Interceptor, OutboundInterceptor, QueryWorkflowInput
    from temporalio.service import RPCError, RPCStatusCode

    from replanning.integrations.temporal_store import TemporalStore

    queues = [f"queue-{number}" for number in range(4)]

    class Silence(Interceptor):  # type: ignore[misc] # its types may not be installed
        """Workers none of which answers, once all of them have been asked."""

        def intercept_client(self, next: OutboundInterceptor) -> OutboundInterceptor:  # noqa: A002 # its name
            asked = set[str]()
            all_asked = asyncio.Event()

            class Outbound(OutboundInterceptor):  # type: ignore[misc] # likewise
                async def query_workflow(self, input: QueryWorkflowInput) -> Never:  # noqa: A002 # its name
                    asked.add(input.id)
                    if len(asked) == len(queues):
                        all_asked.set()
                    async with asyncio.timeout(PATIENCE):
                        await all_asked.wait()
                    raise RPCError("no answer", RPCStatusCode.DEADLINE_EXCEEDED, b"")

            return Outbound(next)

    def open_silent(place: str) -> TemporalStore:
        store = TemporalStore(place.removeprefix(lookup.ON_TEMPORAL))
        store.client = Client(**{**store.client.config(), "interceptors": [Silence()]})
        return store

    address = alone.removeprefix("--on=temporal=").partition("/")[0]
    asyncio.run(run_and_leave(address, queues))
    monkeypatch.setattr(lookup, "open_temporal", open_silent)
    for command in ("status", "pending"):
        told = cli(tmp_path, command, alone)
        for queue in queues:
            assert f"no worker serves task queue {queue!r}" in told.stderr


async def run_and_leave(address: str, queues: Sequence[str]) -> None:
    """Begin a run in each task queue, which a question keeps open, and end its worker."""
    from temporalio.client import Client
    from temporalio.worker import Worker

    from replanning.integrations.temporal import ReplanningPlugin, TemporalOrchestrator

    async def fail(task, context):
        raise ValueError("it is broken")

    client = await Client.connect(address)
    plan = Plan.parse("goal: {objective: x}\ntasks: [{id: a}]")
    for queue in queues:
        async with Worker(client, task_queue=queue, plugins=[ReplanningPlugin(fail)]):
            run = await TemporalOrchestrator(client, task_queue=queue).start(plan, run_id=queue)
            while not any(isinstance(each.body, QuestionAsked) for each in await run.records()):
                pass


def test_a_worker_that_is_stopped(tmp_path, on):
    """A second Ctrl-C stops the tasks of a worker; another one does them again, and runs their checks, but no others."""
    tools = {
        "wait": "echo waits >> log; while ! test -f go; do sleep 0.05; done",
        "say": "echo done",
    }
    checked = "id: first, tool: wait, idempotent: true, expect: {commands: ['test -f go']}"
    write_plan(
        tmp_path,
        tools,
        f"{checked}\nid: then, tool: say, depends_on: [first], expect: {{commands: ['test -f good']}}",
    )
    write_plan(tmp_path, tools, checked, name="other.yaml")
    run = f"run-{uuid.uuid4().hex}"
    with Started(
        tmp_path, "run", "plan.yaml", on, "--run-id", run, "--ask", "never", "--json"
    ) as following:
        with worker(tmp_path, on, "other.yaml") as stopped:
            following.until("first started")
            stopped.process.send_signal(signal.SIGINT)
            stopped.until("running tasks are finished first")
            stopped.process.send_signal(signal.SIGINT)
            stopped.end(130)
        (tmp_path / "go").touch()
        with worker(tmp_path, on, "other.yaml"):
            result = json.loads(following.end(4))
            asked = cli(tmp_path, "pending", run, on).stdout
    assert (result["tasks"]["first"], (tmp_path / "log").read_text()) == ("DONE", "waits\nwaits\n")
    assert "the command 'test -f good' is not in the plan that this executor was made with" in asked


def test_the_sdk_is_missing(tmp_path, monkeypatch):
    """Without the SDK of Temporal each command says in a line what to install."""
    write_plan(tmp_path, TOOLS, TASKS)
    for name in [
        name for name in sys.modules if name.startswith("replanning.integrations.temporal")
    ]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "temporalio"] or [
        "temporalio"
    ]:
        monkeypatch.setitem(sys.modules, name, None)
    for command in (["run", "plan.yaml"], ["worker", "plan.yaml"], ["status"]):
        told = cli(tmp_path, *command, "--on=temporal=localhost:7233", code=2).stderr
        assert 'Temporal needs its SDK: pip install "replanning[temporal]"' in told


def test_what_is_wrong_is_told(tmp_path, on, address):
    """A server that is not there, a run that is not, no worker, and options of workers: a line each, and code 2 or 1."""
    write_plan(tmp_path, TOOLS, TASKS)

    def told(code: int, *arguments: str, **variables: str) -> str:
        error = cli(tmp_path, *arguments, code=code, **variables).stderr
        assert error.count("\n") == 1
        return error

    nowhere = "--on=temporal=localhost:1"
    assert "cannot connect to Temporal at localhost:1" in told(2, "run", "plan.yaml", nowhere)
    assert "cannot connect to Temporal at localhost:1" in told(2, "worker", "plan.yaml", nowhere)
    assert "set TEMPORAL_ADDRESS" in told(2, "status", "--on=temporal=")
    assert "there is no run 'nope'" in told(
        1, "status", "nope", "--on=temporal=", TEMPORAL_ADDRESS=address
    )
    assert "Namespace other is not found" in told(2, "status", on, TEMPORAL_NAMESPACE="other")
    refused = told(2, "run", "plan.yaml", on, "--no-replan", "--sequential", "--directory", ".")
    assert "--directory: with --on, give it to replanning worker" in refused
    assert "--no-replan: with --on, give it to replanning worker" in refused
    assert "--sequential: with --on, it is not supported" in refused
    assert "`replanning reject --undo`" in told(2, "undo", "nope", on)
    assert "temporal=HOST:PORT" in told(2, "worker", "plan.yaml")
