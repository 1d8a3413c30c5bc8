# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""Runs as workflows of Temporal, against a real server: faults, people, lost workers, long histories and replays."""

import asyncio  # noqa: TID251 # the SDK needs it
import base64
import gc
import json
import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

import pytest

from replanning import (
    Alternative,
    Plan,
    ReplanningEngine,
    Retry,
    Settings,
    TaskContext,
    ToolSpec,
    current_attempt,
    tool,
)
from replanning.changes import AbortRun, ModifyTask, RetryTask
from replanning.errors import BudgetExceeded, PlanError
from replanning.journal.memory import MemoryStore
from replanning.journal.records import (
    AlternativesConsidered,
    AttemptFailed,
    AttemptSucceeded,
    ContextUpdated,
    QuestionAsked,
    Record,
    RecordBody,
    RunEnded,
    RunOpened,
    RunPaused,
    RunResumed,
    Usage,
    UsageCharged,
)
from replanning.live.plan import LivePlan
from replanning.llm.completions import Completion, LLMCall
from replanning.tools import ToolExecutor
from tests.support.asyncio_only import anyio_backend  # noqa: F401 - a fixture
from tests.support.effects import ENDINGS, compare
from tests.support.http_server import HttpServer

pytest.importorskip("temporalio", reason="the Temporal SDK is not installed")

from temporalio.api.common.v1 import Payload
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowFailureError, WorkflowUpdateFailedError
from temporalio.converter import DataConverter, PayloadCodec
from temporalio.worker import Replayer, Worker

from replanning.integrations import temporal
from replanning.integrations.temporal import (
    ReplanningPlugin,
    TemporalOrchestrator,
    TemporalRun,
)
from tests.support.temporal import Server, missing_part

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


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a real server."""
    if problem := missing_part():
        pytest.skip(problem)
    with Server.running() as server:
        yield server.address


async def work(task, context):
    """Fails with the main tool at `b`."""
    if (task.id, task.tool) == ("b", "main"):
        raise ValueError("the file is broken")
    return f"{task.id} by {task.tool}, given {context.arguments}"


@asynccontextmanager
async def runs(
    address: str, plugin: ReplanningPlugin, **options: Any
) -> AsyncIterator[Callable[..., Any]]:
    """A worker with a plugin, and a function that starts a run of a plan on it."""
    client = await Client.connect(address)
    async with Worker(client, task_queue=QUEUE, plugins=[plugin], **options):

        async def start(plan: Plan) -> TemporalRun:
            return await TemporalOrchestrator(client, task_queue=QUEUE).start(
                plan, run_id=f"run-{uuid.uuid4().hex}"
            )

        yield start


async def recorded(
    run: TemporalRun, kind: type[RecordBody] | tuple[type[RecordBody], ...]
) -> list[Any]:
    """The records of a kind, or of several, once there are any; between two questions the server has time for its work."""
    while True:
        found = [each.body for each in await run.records() if isinstance(each.body, kind)]
        if found:
            return found
        await asyncio.sleep(0.05)


def records_of(records: Sequence[Record], kind: type[RecordBody]) -> list[Any]:
    """The records of a kind."""
    return [record for record in records if isinstance(record.body, kind)]


async def replay(run: TemporalRun, plugin: ReplanningPlugin) -> None:
    """Replay the history of a run, which must lead to the same commands."""
    await Replayer(workflows=[], plugins=[plugin]).replay_workflow(await run.handle.fetch_history())


@pytest.mark.parametrize("cached", [1000, 0], ids=["cached", "evicted"])
async def test_the_same_as_here(address, cached, caplog):
    """A run on Temporal has the outputs, the revisions and the journal that the same run has in this process.

    So has one that is replayed from its history at each step; that it leaves the worker each time is no failure of its tasks,
    and leaves nothing of it in memory.
    """
    gc.collect()
    before = sum(isinstance(each, LivePlan) for each in gc.get_objects())
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
    assert "cancelled" not in caplog.text
    gc.collect()
    assert (
        sum(isinstance(each, LivePlan) for each in gc.get_objects()) - before <= 2
    )  # this one, and what is replayed last


LISTS = Plan.parse(
    """
    goal: {objective: load whatever there is}
    tools:
      - {name: main, capability: load}
      - {name: spare, capability: load}
    tasks:
      - {id: list, tool: main}
      - id: each
        depends_on: [list]
        for_each: "${list.output}"
        key: "${item.name}"
        include:
          parameters: {name: string}
          tasks:
            - {id: load, tool: main, arguments: {of: "${parameters.name}"}}
            - {id: sum, tool: main, depends_on: [load], arguments: {of: "${load.output}"}}
        with: {name: "${item.name}"}
      - {id: all, tool: main, depends_on: [each], arguments: {of: "${each.output}"}}
    """
)


async def load(task, context):
    """Lists two names; fails with the main tool at one task of the second."""
    if task.id == "list":
        return [{"name": "a"}, {"name": "b"}]
    if (task.id, task.tool) == ("each[b]/load", "main"):
        raise ValueError("the file is broken")
    return f"{task.tool} of {context.arguments}"


@pytest.mark.parametrize("cached", [1000, 0], ids=["cached", "evicted"])
async def test_lists_that_only_the_run_knows(address, cached):
    """A list of included plans is carried out on Temporal as it is here, and is replayed alike."""
    here = await ReplanningEngine().execute(LISTS, load)
    assert here.status == "succeeded"
    plugin = ReplanningPlugin(load)
    async with runs(address, plugin, max_cached_workflows=cached) as start:
        run = await start(LISTS)
        result = await run.result()
        await replay(run, plugin)
    assert (result["status"], result["outputs"]) == (here.status, dict(here.outputs))


async def test_functions(address):
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


async def test_expectations(address):
    """A second tool is another activity; an output that it does not confirm, or that a function refuses, is unexpected."""
    calls: list[str] = []

    @tool(capability="price", effect="none", expect={"agrees_with": "mirror"})
    def shop(item: str) -> int:
        calls.append("shop")
        return 10

    @tool(capability="price", effect="none")
    def mirror(item: str) -> int:
        calls.append("mirror")
        return 10 if item == "x" else 12

    @tool(expect=lambda output: output == 10)
    def buy(price: int) -> int:
        return price

    plan = Plan.parse("""
        goal: {objective: buy}
        sequential: true
        tasks:
          - {id: a, tool: shop, arguments: {item: x}}
          - {id: b, tool: shop, arguments: {item: y}}
          - {id: c, tool: buy, arguments: {price: "${b.output}"}}
    """)
    plugin = ReplanningPlugin(tools=[shop, mirror, buy])
    async with runs(address, plugin) as start:
        run = await start(plan)
        (asked,) = await recorded(run, QuestionAsked)
        failed = await recorded(run, AttemptFailed)
        succeeded = await recorded(run, AttemptSucceeded)
        await run.handle.terminate()
        await replay(run, plugin)
    assert calls == ["shop", "mirror", "shop", "mirror", "mirror"]
    assert [each.output for each in succeeded] == [10, 12]
    assert [(each.failure.kind, each.failure.in_doubt) for each in failed] == [
        ("unexpected", False),
        ("unexpected", True),
    ]
    assert "the output of 'buy' is not as expected" in str(asked)


@pytest.mark.parametrize("name", ["reset", "500", "connection", "error"])
async def test_no_more_effects_than_without(address, name):
    """A tool is executed once on Temporal, too, unless it had no effect or its repetition is harmless; so is its stand-in."""
    plan = Plan.parse("goal: {objective: pay}\ntasks: [{id: a, tool: charge, arguments: {q: x}}]")

    async def attach(tools, engine, stated):
        if engine is None:
            return await tools[0]("x")
        described = [tool(**stated[each.__name__])(each) for each in tools]
        settings = Settings.model_validate({"retry": {"delay": 0.01}})
        async with runs(address, ReplanningPlugin(tools=described, settings=settings)) as start:
            return await recorded(await start(plan), (RunEnded, QuestionAsked))

    counted, promised = await compare(attach, ENDINGS[name], ReplanningEngine)
    assert counted == promised


class OtherSum:
    """A provider that proposes to pay another sum."""

    name = "other-sum"

    async def propose(self, request):
        changes = (
            ModifyTask(task_id="pay", fields={"arguments": {"n": 2}}),
            RetryTask(task_id="pay"),
        )
        return [Alternative(changes=changes, reason="pay another sum", confidence=1.0)]


async def scheduled_activities(run: TemporalRun) -> list[str]:
    """The ids of the activities in the history of a run."""
    history = await run.handle.fetch_history()
    return [
        event.activity_task_scheduled_event_attributes.activity_id
        for event in history.events
        if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED
    ]


async def test_idempotency_keys(address):
    """Code that a function calls has the key of its attempt: one for a repetition, another for a changed call.

    The id of each activity is the key with the number of the attempt.
    """
    seen: list[tuple[int, str, str, str]] = []

    def pay_at_the_shop(n: int) -> None:
        attempt = current_attempt()
        if attempt is not None:
            seen.append((n, attempt.run_id, attempt.task_id, attempt.idempotency_key))

    @tool(retry=Retry(max_attempts=2, delay=0.01))
    def pay(n: int, context: TaskContext) -> str:
        pay_at_the_shop(n)
        if n == 1:
            raise ConnectionRefusedError("the shop is closed")
        return context.idempotency_key

    plan = Plan.parse("goal: {objective: pay}\ntasks: [{id: pay, tool: pay, arguments: {n: 1}}]")
    plugin = ReplanningPlugin(tools=[pay], providers=[OtherSum()])
    assert current_attempt() is None
    async with runs(address, plugin) as start:
        run = await start(plan)
        result = await run.result()
        activities = await scheduled_activities(run)
        await replay(run, plugin)
    run_id = run.handle.id
    key = f"{run_id}/pay"
    assert seen == [
        (1, run_id, "pay", key),
        (1, run_id, "pay", key),
        (2, run_id, "pay", f"{key}#changed-1"),
    ]
    assert result["outputs"] == {"pay": f"{key}#changed-1"}
    attempts = [each for each in activities if each.startswith(key)]
    assert attempts == [f"{key}@1", f"{key}@2", f"{key}#changed-1@3"]


async def test_idempotency_keys_of_tools(address):
    """HTTP tools and commands that are executed on Temporal send and see the keys of their calls."""
    with HttpServer() as server:
        plan = Plan.model_validate(
            {
                "goal": {"objective": "pay"},
                "tools": [
                    {
                        "name": "charge",
                        "kind": "http",
                        "method": "POST",
                        "url": f"{server.url}/charge",
                        "idempotency_header": "X-Request-Key",
                    },
                    {
                        "name": "print",
                        "kind": "shell",
                        "command": 'echo "$REPLANNING_IDEMPOTENCY_KEY"',
                    },
                ],
                "tasks": [{"id": "pay", "tool": "charge"}, {"id": "log", "tool": "print"}],
            }
        )
        async with (
            ToolExecutor(plan) as executor,
            runs(address, ReplanningPlugin(cast("Any", executor))) as start,
        ):
            run = await start(plan)
            result = await run.result()
        (request,) = server.requests
    assert unquote(request.headers["x-request-key"]) == f"{run.handle.id}/pay"
    assert result["outputs"]["log"]["stdout"] == f"{run.handle.id}/log"


@pytest.mark.parametrize("was_done", [True, False], ids=["done", "not done"])
async def test_a_lost_acknowledgement_is_confirmed(address, was_done):
    """Another tool, in an activity of its own, tells whether a call without an answer was done, which is repeated only if it was not."""
    payments: list[str] = []

    @tool
    def pay(context: TaskContext) -> str:
        first = context.attempt_id == "pay#1"
        if was_done or not first:
            payments.append(context.idempotency_key)
        if first:
            raise ConnectionResetError("the acknowledgement was lost")
        return "paid"

    @tool(effect="none")
    def find(key: str) -> str:
        return "paid" if key in payments else "unknown"

    plan = Plan.parse("""
        goal: {objective: pay}
        tasks:
          - id: pay
            tool: pay
            confirm: {tool: find, arguments: {key: "${idempotency_key}"}, when: "output == 'paid'"}
    """)
    plugin = ReplanningPlugin(tools=[pay, find], settings={"retry": {"delay": 0.01}})
    async with runs(address, plugin) as start:
        run = await start(plan)
        result = await run.result()
        activities = await scheduled_activities(run)
        await replay(run, plugin)
    assert (result["status"], result["outputs"]) == ("succeeded", {"pay": "paid"})
    assert payments == [f"{run.handle.id}/pay"]
    assert len([each for each in activities if each.startswith(run.handle.id)]) == 3 - was_done


BOOKINGS = Plan.parse("""
goal: {objective: book}
tools:
  - {name: reserve, undo: {tool: cancel, arguments: {id: "${output.id}"}}}
  - {name: cancel, idempotent: true}
  - {name: fly, effect: none}
tasks:
  - {id: car, tool: reserve}
  - {id: hotel, tool: reserve, depends_on: [car]}
  - {id: flight, tool: fly, depends_on: [hotel]}
""")


class Desk:
    """Work that reserves and cancels, and finds no flight."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure or ValueError("sold out")
        self.cancelled: list[str] = []

    async def __call__(self, task, context):
        if task.tool == "fly":
            raise self.failure
        if task.tool == "cancel":
            self.cancelled.append(context.arguments["id"])
        return {"id": f"{task.id}-1"}


class CallOff:
    """A provider that proposes to end the run, and to take back what it has changed."""

    name = "call-off"

    async def propose(self, request):
        changes = (AbortRun(reason="sold out", undo=True),)
        return [Alternative(changes=changes, reason="sold out", confidence=0.9)]


@pytest.mark.parametrize("by_person", [False, True], ids=["provider", "person"])
async def test_a_run_that_is_called_off_is_taken_back(address, by_person):
    """An abort with `undo`, of a provider or a person, is carried out by activities, the last effect first."""
    desk = Desk()
    settings = Settings.model_validate({"alternatives": {"require_approval": by_person}})
    plugin = ReplanningPlugin(desk, providers=[CallOff()], settings=settings)
    async with runs(address, plugin) as start:
        run = await start(BOOKINGS)
        if by_person:
            asked = await recorded(run, QuestionAsked)
            abort = {"kind": "abort", "undo": True, "reason": "sold out"}
            await run.answer(asked[0].question, "modify", by="ada", changes=[abort])
        result = await run.result()
        await replay(run, plugin)
    assert (result["status"], result["reason"]) == ("aborted", "sold out")
    assert desk.cancelled == ["hotel-1", "car-1"]


async def test_a_run_is_undone_from_outside(address):
    """A program has a run taken back that waits for a person; what no task can take back is refused with the reason."""
    tools = (*BOOKINGS.tools[:-1], ToolSpec(name="fly", effect="irreversible"))
    doubtful = BOOKINGS.model_copy(update={"tools": tools})
    desk = Desk(TimeoutError("no answer"))
    plugin = ReplanningPlugin(desk)
    async with runs(address, plugin) as start:
        run = await start(doubtful)
        await recorded(run, QuestionAsked)
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await run.undo()
        assert "'flight' cannot be taken back by a task" in str(refused.value.cause)
        assert desk.cancelled == []
        await run.undo(leave=["flight"], reason="no flight", by="ada")
        result = await run.result()
        await replay(run, plugin)
    assert result["status"] == "aborted"
    assert result["reason"] == "no flight: it is unknown whether 'flight' took effect"
    assert desk.cancelled == ["hotel-1", "car-1"]


async def test_an_effect_is_taken_back_before_it_is_had_again(address):
    """What is done again because its result is stale is taken back before, by an activity."""
    plan = Plan.parse("""
        goal: {objective: book}
        context: {room: 7}
        on_stale: redo
        tools:
          - name: book
            undo: {tool: cancel, arguments: {id: "${output.id}"}}
            undo_on_replace: true
            idempotent: true
          - {name: cancel, idempotent: true}
          - {name: move, effect: none}
        tasks:
          - {id: hotel, tool: book, arguments: {room: "${context.room}"}}
          - {id: move, tool: move, depends_on: [hotel]}
    """)
    order: list[object] = []

    async def execute(task, context):
        if task.tool == "move":
            context.change_context({"room": 8})
            return None
        order.append((task.id, *context.arguments.values()))
        return {"id": f"{task.id}-1"}

    plugin = ReplanningPlugin(execute)
    async with runs(address, plugin) as start:
        run = await start(plan)
        result = await run.result()
        await replay(run, plugin)
    assert result["status"] == "succeeded"
    assert order == [("hotel", 7), ("undo-hotel", "hotel-1"), ("hotel~2", 8)]


async def test_a_task_that_takes_too_long(address, monkeypatch):
    """A task that does not end in time is cancelled where it is executed, and replaced."""
    monkeypatch.setattr(
        temporal, "_HEARTBEAT_SECONDS", 1.0
    )  # a worker hears with it that it is to stop
    cancelled = asyncio.Event()

    async def slow(task, context):
        if (task.id, task.tool) == ("b", "main"):
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
        return task.id

    plan = Plan.parse(
        """
        goal: {objective: load}
        tasks: [{id: b, tool: main, timeout: 0.1, fallbacks: [{tool: spare}]}]
        """
    )
    plugin = ReplanningPlugin(slow)
    async with runs(address, plugin) as start:
        run = await start(plan)
        result, records = await run.result(), await run.records()
        await cancelled.wait()
        await replay(run, plugin)
    assert (result["status"], result["outputs"]) == ("succeeded", {"b": "b~2"})
    assert [
        record.body.trigger.kind for record in records if record.body.kind == "trigger-fired"
    ] == ["timeout"]


async def test_a_person_answers(address):
    """A question waits in the workflow; a wrong answer is refused and leaves the run as it is, and a right one is followed."""
    dangerous = PLAN.model_copy(
        update={
            "tools": tuple(
                each.model_copy(update={"dangerous": each.name == "spare"}) for each in PLAN.tools
            )
        }
    )
    plugin = ReplanningPlugin(work)
    async with runs(address, plugin) as start:
        run = await start(dangerous)
        asked = await recorded(run, QuestionAsked)
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await run.answer("no-such-question", "approve")
        assert "no-such-question" in str(refused.value.cause)
        await run.answer(asked[0].question, "approve", by="ada")
        result = await run.result()
        await replay(run, plugin)
    assert (result["status"], result["outputs"]["b"].partition(",")[0]) == (
        "succeeded",
        "b~2 by spare",
    )


async def test_secrets(address):
    """What looks like a secret in an output or an error is not in the history of the workflow; what is no JSON is not kept."""
    key = "ghp_" + "a1B2c3D4e5" * 3 + "f6G7h8"

    async def leaky(task, context):
        if task.id == "a":
            context.change_context({"seen": f"at {key}"})
            return {"token": key}
        if task.id == "b" and task.tool == "main":
            raise ValueError(f"refused {key}")
        return object()

    async with runs(address, ReplanningPlugin(leaky)) as start:
        run = await start(
            PLAN.model_copy(
                update={"tasks": tuple(t.model_copy(update={"arguments": {}}) for t in PLAN.tasks)}
            )
        )
        result = await run.result()
        history = (await run.handle.fetch_history()).to_json()
    assert (result["status"], "c" in result["outputs"]) == ("succeeded", False)
    assert key not in history
    assert key not in json.dumps(result)
    told = [base64.b64decode(data) for data in re.findall(r'"data": ?"([^"]+)"', history)]
    assert len(told) > 5
    assert not any(key.encode() in data for data in told)


async def test_parameters(address):
    """Parameters go with the plan; a plan with a secret one is refused before the history of a workflow could hold it."""
    stated = """
        goal: {objective: ship}
        parameters: {region: string, copies: {type: integer, default: 2}, %s}
        tasks:
          - {id: a, arguments: {to: "${parameters.region}"}, when: parameters.copies == 2}
    """

    async def work(task, context):
        return task.arguments

    async with runs(address, ReplanningPlugin(work)) as start:
        run = await start(Plan.parse(stated % "", parameters={"region": "eu"}))
        assert (await run.result())["outputs"] == {"a": {"to": "eu"}}
        secret = "token: {secret: true}"
        given = Plan.parse(stated % secret, parameters={"token": "correct horse"})
        with pytest.raises(PlanError) as refused:
            await start(given)
    assert [problem.place for problem in refused.value.problems] == [
        "parameters.region",
        "parameters.token",
    ]
    assert "refer to it as {env:NAME}" in str(refused.value)


LOGIN = Plan.parse(
    """
    goal: {objective: log in and use the token}
    tasks:
      - {id: login}
      - {id: refer, depends_on: [login], arguments: {token: "${login.output.token}"}}
      - {id: read, depends_on: [login]}
    """
)
TOKEN = "ghp_" + "Z9y8X7w6V5" * 3 + "u4T3s2"


def contents(history: str) -> str:
    """The text of a history, with that of its payloads."""
    found = [base64.b64decode(data) for data in re.findall(r'"data": ?"([^"]+)"', history)]
    return history + b"".join(found).decode(errors="replace")


async def test_output_with_a_secret_does_not_leave_its_worker(address, caplog):
    """No task gets a mask: one that needs an output with a secret fails with the reason, and the caller is told it too."""
    seen: list[object] = []

    async def work(task, context):
        if task.id == "login":
            return {"token": TOKEN, "user": "ada"}
        seen.append((task.id, context.arguments, dict(context.results)))
        with pytest.raises(KeyError, match="looks like a secret") as lost:
            context.results["login"]
        raise lost.value

    async with runs(address, ReplanningPlugin(work, settings={"enabled": False})) as start:
        run = await start(LOGIN)
        result = await run.result()
        records = await run.records()
        history = contents((await run.handle.fetch_history()).to_json())
    assert seen == [("read", {}, {})]
    failed = {each.body.task: each.body.failure for each in records_of(records, AttemptFailed)}
    assert failed["refer"].kind == "arguments"
    for failure in failed.values():
        assert "a part of it looks like a secret" in failure.message
    assert result["outputs"] == {}
    with pytest.raises(KeyError, match="a part of it looks like a secret"):
        result["outputs"]["login"]
    assert "no other task gets it" in caplog.text
    assert "login" in history
    for text in (history, caplog.text, str(records), json.dumps(result)):
        assert TOKEN not in text
        assert "[redacted]" not in text


class Encryption(PayloadCodec):  # type: ignore[misc] # its types may not be installed
    """A payload codec that makes payloads unreadable."""

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        return [
            Payload(metadata={"encoding": b"binary/secret"}, data=each.SerializeToString()[::-1])
            for each in payloads
        ]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        return [Payload.FromString(each.data[::-1]) for each in payloads]


async def test_secrets_in_an_encrypted_history(address):
    """Where the history may hold secrets, tasks and the caller get true values, and the journal has masks.

    So it is with what looks like a secret, with what a task has added, and with values of the context.
    """
    seen: list[object] = []

    async def work(task, context):
        if task.id == "login":
            context.add_secret("sesame")
            context.change_context({"door": "open sesame"})
            return {"token": TOKEN, "word": "sesame"}
        seen.append([task.id, context.results["login"]["word"], context.context["door"]])
        return context.arguments.get("token", "none")

    converter = replace(DataConverter.default, payload_codec=Encryption())
    client = await Client.connect(address, data_converter=converter)
    plugin = ReplanningPlugin(work, secrets_in_history=True)
    async with Worker(client, task_queue="encrypted", plugins=[plugin]):
        run = await TemporalOrchestrator(client, task_queue="encrypted").start(
            LOGIN, run_id=f"run-{uuid.uuid4().hex}"
        )
        result = await run.result()
        records = str(await run.records())
        unread = await Client.connect(address)
        history = contents(
            (await unread.get_workflow_handle(run.handle.id).fetch_history()).to_json()
        )
    assert sorted(map(str, seen)) == [
        "['read', 'sesame', 'open sesame']",
        "['refer', 'sesame', 'open sesame']",
    ]
    assert result["outputs"] == {
        "login": {"token": TOKEN, "word": "sesame"},
        "refer": TOKEN,
        "read": "none",
    }
    assert "open [redacted]" in records
    for text in (history, records):
        assert TOKEN not in text
        assert "sesame" not in text


async def test_secrets_go_on_with_a_workflow_that_is_continued(address):
    """A workflow that continues as a new one still has the outputs and the arguments with secrets that it had."""
    got: list[object] = []

    async def work(task, context):
        if task.id == "login":
            return {"token": TOKEN}
        if task.id == "last":
            got.append(dict(context.arguments))
            got.append(context.results["login"])
        return None

    chain = [{"id": f"t{n}", **({"depends_on": [f"t{n - 1}"]} if n else {})} for n in range(40)]
    last = {
        "id": "last",
        "depends_on": ["t39", "login"],
        "arguments": {"token": "${login.output.token}", "password": "correct-horse-7-battery"},
    }
    plan = Plan.model_validate(
        {"goal": {"objective": "log in"}, "tasks": [{"id": "login"}, *chain, last]}
    )
    plugin = ReplanningPlugin(work, max_history=60, secrets_in_history=True)
    async with runs(address, plugin) as start:
        run = await start(plan)
        result = await run.result()
        records = await run.records()
        await replay(run, plugin)
    assert got == [
        {"token": TOKEN, "password": "correct-horse-7-battery"},
        {"token": TOKEN},
    ]
    assert result["outputs"]["login"] == {"token": TOKEN}
    assert len(records_of(records, RunResumed)) >= 2
    assert TOKEN not in str(records)
    assert "correct-horse" not in str(records)


async def test_context_with_a_secret_does_not_leave_its_worker(address):
    """A task that needs a value of the context with a secret fails with the reason, until the context has another value."""
    seen: list[object] = []
    plan = Plan.parse(
        """
        goal: {objective: pass values on}
        context: {region: us}
        tasks:
          - {id: change}
          - {id: refer, depends_on: [change], optional: true, arguments: {door: "${context.door}"}}
          - {id: read, depends_on: [change], optional: true}
          - {id: again, depends_on: [change], priority: 9}
          - {id: last, depends_on: [again], arguments: {door: "${context.door}"}}
        """
    )

    async def work(task, context):
        if task.id == "change":
            context.change_context({"door": TOKEN, "region": "eu"})
        elif task.id == "again":
            context.change_context({"door": "open"})
        elif task.id == "read":
            seen.append(context.context["region"])
            seen.append(context.context["door"])
        else:
            seen.append(context.arguments["door"])

    plugin = ReplanningPlugin(work, settings={"enabled": False}, max_concurrency=1)
    async with runs(address, plugin) as start:
        run = await start(plan)
        await run.result()
        records = await run.records()
        history = contents((await run.handle.fetch_history()).to_json())
    failed = {each.body.task: each.body.failure for each in records_of(records, AttemptFailed)}
    assert seen == ["eu", "open"]
    assert "for a secret in the context 'door'" in failed["refer"].message
    assert "'door' holds a secret" in failed["read"].message
    assert failed.keys() == {"refer", "read"}
    assert TOKEN not in history


async def test_values_come_back_as_they_were(address):
    """Dependents and the caller get dates, decimals, sets and paths as they were; what has no stored form is told of."""
    values = {
        "at": datetime(2026, 1, 31, tzinfo=UTC),
        "sum": Decimal("1.10"),
        "names": {"a", "b"},
        "place": Path("x/y"),
        7: b"bytes",
    }
    got: list[object] = []

    async def work(task, context):
        if task.id == "make":
            return values
        if task.id == "open":
            return asyncio.Lock()
        got.append(context.results["make"])
        with pytest.raises(KeyError, match="it holds a Lock"):
            context.results["open"]
        with pytest.raises(KeyError, match="its `depends_on`"):
            context.results["other"]
        return None

    plan = Plan.parse(
        "goal: {objective: x}\ntasks: [{id: make}, {id: open}, {id: use, depends_on: [make, open]}]"
    )
    async with runs(address, ReplanningPlugin(work)) as start:
        result = await (await start(plan)).result()
    assert got == [values]
    assert result["outputs"] == {"make": values, "use": None}
    with pytest.raises(KeyError, match="it holds a Lock"):
        result["outputs"]["open"]


async def test_forgotten_await(address):
    """A coroutine as output fails the task, with the question whether `await` was forgotten."""

    async def work(task, context):
        return asyncio.sleep(0)

    plan = Plan.parse("goal: {objective: x}\ntasks: [{id: a}]")
    async with runs(address, ReplanningPlugin(work, settings={"enabled": False})) as start:
        result = await (await start(plan)).result()
    assert "was `await` forgotten" in result["failures"]["a"]


class Model:
    """A provider that does I/O, as far as the workflow knows."""

    name = "model"

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[str]]] = []

    async def propose(self, request):
        failed = [task for trigger in request.triggers for task in trigger.tasks]
        self.seen.append((request.view.revision, failed))
        request.add_note("thought about it")
        return [
            Alternative(changes=(RetryTask(task_id=failed[0]),), reason="once more", confidence=0.9)
        ]


async def test_providers_are_activities(address):
    """A provider that does I/O is asked in an activity, on the plan as it is then; a replay does not ask it again."""
    model, failures = Model(), ["first"]

    async def unlucky(task, context):
        if task.id == "b" and failures:
            raise ValueError(failures.pop())
        return task.id

    plugin = ReplanningPlugin(unlucky, providers=[model])
    plan = Plan.parse("goal: {objective: x}\ntasks: [{id: a}, {id: b, depends_on: [a]}]")
    async with runs(address, plugin) as start:
        run = await start(plan)
        result = await run.result()
        await replay(run, plugin)
    assert (result["status"], result["revisions"], model.seen) == (
        "succeeded",
        ["once more"],
        [(0, ["b"])],
    )


class Witness:
    """A provider that keeps what it sees, calls a model, and proposes to try again."""

    name = "witness"

    def __init__(self) -> None:
        self.seen: list[object] = []

    def estimate(self, request):
        return Usage(calls=2)

    async def propose(self, request):
        failed = [task for trigger in request.triggers for task in trigger.tasks]
        unknown = Alternative(
            changes=(RetryTask(task_id="unknown"),), reason="of no use", confidence=0.9
        )
        with (
            pytest.raises(BudgetExceeded) as refused,
            request.meter.call(LLMCall("witness", "m", Usage(calls=19))),
        ):
            pass
        with request.meter.call(LLMCall("witness", "m", Usage(calls=1, tokens=100))) as answered:
            answered(Completion("yes", "witness", "m", 3, 4, Usage(1, 7)))
        self.seen += [
            failed,
            (request.view.revision, request.max_alternatives, request.tried_fingerprints),
            [
                (type(body).__name__, getattr(body, "replan", ""), getattr(body, "reason", ""))
                for body in request.history
            ],
            request.rejection_reason(unknown),
            str(refused.value),
        ]
        return [
            Alternative(changes=(RetryTask(task_id=failed[0]),), reason="once more", confidence=0.9)
        ]


class Mute:
    """A provider that calls a model, and fails."""

    name = "mute"

    async def propose(self, request):
        with request.meter.call(LLMCall("mute", "m", Usage(calls=1, tokens=50))):
            raise ValueError("cannot say")


async def test_providers_see_the_same_as_here(address):
    """A provider that is asked in an activity has the history, the budget and the verdicts that it has in this process.

    What it spends counts, also when it fails, and is reserved before.
    """
    plan = Plan.parse(
        """
        goal: {objective: x}
        budget: {calls: 20}
        tasks: [{id: a}, {id: b, depends_on: [a]}]
        """
    )

    def unlucky() -> Callable[..., Any]:
        tried = Counter[str]()

        async def work(task, context):
            tried[task.id] += 1
            if tried[task.id] == 1:
                raise ValueError(f"{task.id} is broken")
            return task.id

        return work

    witness, witness_there = Witness(), Witness()
    store = MemoryStore()
    here = await ReplanningEngine(["repair", witness, Mute()], store=store).execute(
        plan, unlucky(), run_id="here"
    )
    plugin = ReplanningPlugin(unlucky(), providers=[witness_there, Mute()])
    async with runs(address, plugin) as start:
        run = await start(plan)
        there = await run.result()
        records = await run.records()
        await replay(run, plugin)
    assert witness_there.seen == witness.seen
    assert [task for task in witness.seen if isinstance(task, list)][::2] == [["a"], ["b"]]
    assert (there["status"], there["reason"]) == (here.status, here.reason)
    considered = [
        [record.body.notes for record in journal if isinstance(record.body, AlternativesConsidered)]
        for journal in (records, store.read("here"))
    ]
    assert considered[0] == considered[1]
    assert "mute failed: ValueError('cannot say')" in considered[0][-1]
    charged = [record.body.usage for record in records if isinstance(record.body, UsageCharged)]
    assert sum(charged, Usage()) == here.spent != Usage()


async def test_a_pause_before_it_is_continued(address):
    """A person's pause holds, also when it comes while a workflow waits for its tasks to be continued as a new one."""
    go = asyncio.Event()

    async def slow(task, context):
        if task.id == "long":
            await go.wait()

    chain = [{"id": f"t{n}", **({"depends_on": [f"t{n - 1}"]} if n else {})} for n in range(60)]
    plan = Plan.model_validate({"goal": {"objective": "wait"}, "tasks": [{"id": "long"}, *chain]})
    async with runs(address, ReplanningPlugin(slow, max_history=60)) as start:
        run = await start(plan)
        await recorded(run, RunPaused)
        await run.pause("stop here", by="eve")
        go.set()
        result = await run.result()
    assert (result["status"], result["reason"]) == ("paused", "stop here")


async def test_an_update_that_is_sent_again(address):
    """An update whose sender had no reply before the workflow was continued, and sends it again, is taken once."""
    go = asyncio.Event()

    async def slow(task, context):
        if task.id in ("long", "last"):
            await go.wait()

    chain = [{"id": f"t{n}", **({"depends_on": [f"t{n - 1}"]} if n else {})} for n in range(60)]
    tasks = [{"id": "long"}, *chain, {"id": "last", "depends_on": ["t59"]}]
    plan = Plan.model_validate({"goal": {"objective": "wait"}, "tasks": tasks})
    async with runs(address, ReplanningPlugin(slow, max_history=60)) as start:
        run = await start(plan)
        await recorded(run, RunPaused)
        await run.handle.execute_update(
            "change_context", args=[{"region": "eu"}, []], id="sent twice"
        )
        go.set()
        await recorded(run, RunResumed)
        await run.handle.execute_update(
            "change_context", args=[{"region": "eu"}, []], id="sent twice"
        )
        await run.handle.execute_update(
            "change_context", args=[{"region": "us"}, []], id="sent once"
        )
        assert (await run.result())["status"] == "succeeded"
        changes = [
            record.body.changes
            for record in await run.records()
            if isinstance(record.body, ContextUpdated)
        ]
    assert changes == [{"region": "eu"}, {"region": "us"}]


async def test_two_namespaces():
    """Workers of one task queue in two namespaces carry runs out in one process, each with its own settings."""
    if problem := missing_part():
        pytest.skip(problem)
    with Server.running("--namespace", "other") as server:
        clients = [
            await Client.connect(server.address, namespace=name) for name in ("default", "other")
        ]
        plugins = [ReplanningPlugin(work), ReplanningPlugin(work, settings={"enabled": False})]
        workers = [
            Worker(client, task_queue=QUEUE, plugins=[plugin])
            for client, plugin in zip(clients, plugins, strict=True)
        ]
        async with workers[0], workers[1]:
            started = [
                await TemporalOrchestrator(client, task_queue=QUEUE).start(PLAN, run_id="run-1")
                for client in clients
            ]
            assert [(await run.result())["status"] for run in started] == ["succeeded", "failed"]


async def test_what_is_too_large(address, monkeypatch):
    """A task whose input is larger than Temporal takes fails; outputs that are, together, are left to the journal."""
    monkeypatch.setattr(temporal, "_MAX_PAYLOAD_BYTES", 2_000)
    tasks = [*({"id": name} for name in "abc"), {"id": "join", "depends_on": ["a", "b", "c"]}]
    plan = Plan.model_validate({"goal": {"objective": "join"}, "tasks": tasks})

    async def write(task, context):
        return 900 * "x"

    async with runs(address, ReplanningPlugin(write)) as start:
        run = await start(plan)
        failed = await recorded(run, AttemptFailed)
        await run.pause("enough")
        result = await run.result()
    assert failed[0].failure.type == "TooLarge"
    assert result["outputs"] == {}
    assert result["reason"] == "enough; the outputs are too large, see the journal"


async def test_what_a_plan_says_of_the_tools_of_a_worker(address):
    """The descriptions of a worker count, not those of a plan for tools of the same name."""
    own = ToolSpec(name="main", description="Wipes the disk.", dangerous=True)
    plan = Plan.parse(
        "goal: {objective: wipe}\ntools: [{name: main}, {name: other}]\ntasks: [{id: a, tool: other}]"
    )
    async with runs(address, ReplanningPlugin(work, tools=[cast("Any", own)])) as start:
        run = await start(plan)
        await run.result()
        opened = (await run.records())[0].body
    assert isinstance(opened, RunOpened)
    assert {spec.name: spec.dangerous for spec in opened.plan.tools} == {
        "main": True,
        "other": False,
    }
    assert own in opened.plan.tools


async def test_what_is_no_plan(address):
    """A workflow that is started with something else fails, says why, and does no harm to its worker."""
    async with runs(address, ReplanningPlugin(work)):
        client = await Client.connect(address)
        run_id = f"run-{uuid.uuid4().hex}"
        for wrong in ({"plan": "?"}, {}, {"plan": base64.b64encode(b"x").decode()}):
            with pytest.raises(WorkflowFailureError):
                await client.execute_workflow(
                    "replanning.Plan", args=[wrong, b""], id=run_id, task_queue=QUEUE
                )
    assert gc.isenabled()


async def test_long_histories(address, monkeypatch):
    """A workflow whose history grows long is continued as a new one, in short steps; nothing is lost or done twice.

    Its journal may be larger than the answer to one query.
    """
    for limit, least in {
        "_PAGE_CHARS": 2_000,
        "_MAX_ANSWER_BYTES": 1_000,
        "_TASKS_PER_STEP": 20,
    }.items():
        monkeypatch.setattr(temporal, limit, least)
    monkeypatch.setattr(temporal, "_CHECKPOINTS_PER_STEP", 1)
    done: list[str] = []

    async def count(task, context):
        done.append(task.id)
        return task.id

    tasks = [{"id": f"t{n}", **({"depends_on": [f"t{n - 1}"]} if n else {})} for n in range(60)]
    plan = Plan.model_validate({"goal": {"objective": "count"}, "tasks": tasks})
    plugin = ReplanningPlugin(count, max_history=150)
    async with runs(address, plugin) as start:
        run = await start(plan)
        result = await run.result()
        records = await run.records()
        history = await run.handle.fetch_history()
        await replay(run, plugin)
    assert (result["status"], done) == ("succeeded", [f"t{n}" for n in range(60)])
    assert [record.seq for record in records] == list(range(1, len(records) + 1))
    assert sum(record.body.kind == "run-resumed" for record in records) >= 2
    steps = [event.event_type for event in history.events].index(
        EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED
    )
    markers = [
        event
        for event in history.events[:steps]
        if event.HasField("marker_recorded_event_attributes")
    ]
    assert len(markers) > 8, "pages of its journal, and groups of its tasks"


@pytest.mark.slow
async def test_large_plans(address):
    """A plan of thousands of tasks is executed completely, and each task once, over several workflows."""
    done = Counter[str]()

    async def count(task, context):
        done[task.id] += 1
        return task.id

    ids = [f"t{n}" for n in range(3_000)]
    tasks = [
        {"id": name, **({"depends_on": [ids[n - 100]]} if n >= 100 else {})}
        for n, name in enumerate(ids)
    ]
    plan = Plan.model_validate({"goal": {"objective": "count"}, "tasks": tasks})
    async with runs(address, ReplanningPlugin(count, max_history=4_000)) as start:
        run = await start(plan)
        result = await run.result()
        records = await run.records()
    assert (result["status"], done) == ("succeeded", Counter(ids))
    assert sum(record.body.kind == "run-resumed" for record in records) >= 2
