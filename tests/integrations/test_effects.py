"""Effects happen no more often with an engine than without: executions are counted beside each framework alone."""

import asyncio  # noqa: TID251 # the frameworks run on it alone
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from replanning import Goal, Plan, ReplanningEngine, Task, ToolSpec, tool
from replanning.testing import VirtualClock
from replanning.tools import ToolExecutor
from tests.integrations.drivers import INTEGRATIONS, OWN_WARNINGS, Call, Driver, Fake
from tests.support.asyncio_only import anyio_backend  # noqa: F401 - a fixture
from tests.support.effects import (
    ATTEMPTS,
    ENDINGS,
    Attach,
    Ending,
    Tool,
    compare,
    count_cancelled,
    count_exceeded,
)
from tests.support.http_server import HttpServer
from tests.support.runs import make_engine

pytestmark = OWN_WARNINGS

Tools = Sequence[Tool]
Stated = Mapping[str, Mapping[str, Any]]


def attach_of(driver: type[Driver]) -> Attach:
    """Return what runs an agent of a driver, whose model calls the first tool once."""

    async def attach(tools: Tools, engine: ReplanningEngine | None, stated: Stated) -> object:
        fakes = []
        for each in tools:
            in_thread = not inspect.iscoroutinefunction(each)
            fakes.append(Fake(each.__name__, each, in_thread=in_thread))
        async with driver(fakes, engine, stated) as agent:
            return await agent.run([Call("charge")])

    return attach


async def in_plan(tools: Tools, engine: ReplanningEngine | None, stated: Stated) -> object:
    """Call the tool as a task of a plan."""
    if engine is None:
        if inspect.iscoroutinefunction(tools[0]):
            return await tools[0]("x")
        return await asyncio.to_thread(tools[0], "x")
    document = Plan.parse(
        "{goal: {objective: pay}, tasks: [{id: pay, tool: charge, arguments: {q: x}}]}"
    )
    described = [tool(**stated[each.__name__])(each) for each in tools]
    return await engine.execute(document, tools=described)


async def in_node(tools: Tools, engine: ReplanningEngine | None, stated: Stated) -> object:
    """Run a graph of LangGraph whose node is the tool."""
    from langgraph.graph import StateGraph

    from replanning.integrations.langgraph import replanned

    graph = StateGraph(dict)
    for each in tools:
        graph.add_node(each.__name__, each)
    graph.set_entry_point("charge")
    compiled = graph.compile()
    if engine is not None:
        compiled = replanned(compiled, engine, capabilities=stated)
    return await compiled.ainvoke({"q": "x"})


def without_event_loop() -> type[Driver]:
    """Return a driver of agents of LangChain that are invoked in a thread."""
    langchain: Any = next(each for each in INTEGRATIONS if each.name == "langchain").driver()

    class InThread(langchain):  # type: ignore[misc]
        async def invoke(self, given: Any) -> Any:
            return await asyncio.to_thread(self.agent.invoke, given)

    return InThread


# A server of MCP tells its errors apart in other ways, which its own tests are about.
# A `ToolNode` is attached as an agent of LangChain is.
LEFT_OUT = {"mcp", "langgraph"}
ATTACHED = [*(each.name for each in INTEGRATIONS if each.name not in LEFT_OUT), "plan", "node"]

# A crew executes all tools in threads, Google ADK none.
AWAITED = [name for name in ATTACHED if name != "crewai"]
IN_THREADS = [name for name in ATTACHED if name != "google_adk"]


def attachment(name: str) -> Attach:
    """Return what runs an agent; skip the test if its framework is not installed here."""
    if name == "plan":
        return in_plan
    if name == "node":
        pytest.importorskip("langgraph")
        return in_node
    if name == "without event loop":
        return attach_of(without_event_loop())
    [integration] = [each for each in INTEGRATIONS if each.name == name]
    return attach_of(integration.driver())


ONCE = {"charge": 1, "stand_in": 0}


def make() -> ReplanningEngine:
    """Return an engine that loses no time before it tries a call again."""
    return make_engine("repair", retry={"delay": 0})


def ending_of(name: str, attached: str) -> Ending:
    """Return an ending, and what it says to an integration."""
    ending = ENDINGS[name]
    if (name, attached) == ("status", "google_adk"):
        # A result of this form is how tools of the framework report a failure.
        return replace(ending, says="definite")
    return ending


@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.parametrize("attached", ATTACHED)
async def test_no_more_effects_than_without(attached: str, name: str) -> None:
    """A call is executed as often as by the framework alone, unless it had no effect or its repetition is harmless.

    Another tool of its capability is executed only after a call that had no effect.
    """
    counted, promised = await compare(attachment(attached), ending_of(name, attached), make)
    assert counted == promised


@pytest.mark.parametrize("attached", [*IN_THREADS, "without event loop"])
async def test_no_more_effects_in_threads(attached: str) -> None:
    """The same holds for tools that are executed in threads."""
    attach = attachment(attached)
    for name in ("reset", "connection", "error", "status"):
        ending = ending_of(name, attached)
        counted, promised = await compare(attach, ending, make, in_thread=True)
        assert counted == promised


CUT_OFF = [(name, False) for name in AWAITED] + [(name, True) for name in IN_THREADS]


@pytest.mark.parametrize(("attached", "in_thread"), CUT_OFF)
async def test_a_cancelled_call_is_executed_once(attached: str, in_thread: bool) -> None:
    """A tool during which its agent is cancelled is executed no more often than by the framework alone."""
    attach = attachment(attached)
    alone = await count_cancelled(attach, None, in_thread=in_thread)
    assert await count_cancelled(attach, make(), in_thread=in_thread) == alone == ONCE


@pytest.mark.parametrize(("attached", "in_thread"), CUT_OFF)
async def test_a_call_that_exceeds_its_time_is_executed_once(
    attached: str, in_thread: bool
) -> None:
    """A tool that ran into its time limit, or is left behind in a thread, is executed again only where that is harmless."""
    limit: dict[str, Any] = {"in_thread": in_thread, "timeout": 0.05}
    attach = attachment(attached)
    assert await count_exceeded(attach, make(), **limit) == ONCE
    harmless = await count_exceeded(attach, make(), **limit, idempotent=True)
    assert harmless == {"charge": ATTEMPTS, "stand_in": 0}


def paying(spec: ToolSpec, **stated: Any) -> Plan:
    """Return a plan with one task, which uses a tool."""
    task = Task.model_validate({"id": "pay", "tool": spec.name, **stated})
    return Plan(goal=Goal(objective="pay"), tools=[spec], tasks=[task])


@pytest.mark.parametrize(
    ("fields", "status", "times"),
    [
        ({"method": "POST"}, None, 1),
        ({"method": "POST"}, 500, 1),
        ({"method": "POST"}, 409, 1),
        ({"method": "POST"}, 503, 3),
        ({"method": "POST", "idempotent": True}, None, 3),
        ({"method": "PUT"}, 500, 3),
        ({"method": "PUT", "idempotent": False}, 500, 1),
        ({"method": "GET"}, 502, 3),
    ],
)
async def test_requests(
    fields: dict[str, Any], status: int | None, times: int, clock: VirtualClock
) -> None:
    """A server that takes effect and drops the connection, or answers 500, gets a changing request once."""
    with HttpServer(lambda request: None if status is None else (status, {}, b"")) as server:
        spec = ToolSpec.model_validate({"name": "t", "kind": "http", "url": server.url, **fields})
        document = paying(spec)
        async with ToolExecutor(document) as work:
            await make_engine("repair", clock=clock).execute(document, work)
        keys = {request.headers.get("idempotency-key") for request in server.requests}
        assert (len(server.requests), len(keys)) == (times, 1)


async def test_commands(clock: VirtualClock, tmp_path: Any) -> None:
    """A command that is killed after its effect is executed once, and again where a retry is stated for it."""
    retried: dict[str, Any] = {"retry": {"max_attempts": 2}}
    for stated, times in (({}, 1), (retried, 2)):
        path = tmp_path / f"effects{times}"
        command = f"echo {{idempotency_key}} >>{path}; kill -9 $$"
        spec = ToolSpec(name="t", kind="shell", command=command)
        document = paying(spec, **stated)
        async with ToolExecutor(document) as work:
            await make_engine("repair", clock=clock).execute(document, work)
        keys = path.read_text().split()
        assert (len(keys), len(set(keys))) == (times, 1)


@pytest.mark.parametrize(
    ("stated", "times"),
    [
        ({}, 1),
        ({"max_attempts": 3}, 3),
        ({"max_attempts": 3, "on": [1]}, 3),
        ({"max_attempts": 3, "on": [2, "timeout"]}, 1),
        ({"on": [1]}, 3),
        ({"delay": 0.1}, 1),
    ],
)
async def test_commands_with_an_exit_code(
    stated: dict[str, Any], times: int, clock: VirtualClock, tmp_path: Any
) -> None:
    """A command that ends with an exit code is tried again where a retry is stated, or names the code."""
    path = tmp_path / "effects"
    spec = ToolSpec(name="t", kind="shell", command=f"echo x >>{path}; exit 1")
    document = paying(spec, retry=stated)
    async with ToolExecutor(document) as work:
        result = await make_engine("repair", clock=clock).execute(document, work)
    assert (result.status, len(path.read_text().split())) == ("failed", times)


async def test_a_changed_call_has_a_key_of_its_own(clock: VirtualClock) -> None:
    """Another attempt at a call has its key; with other arguments, or by another task, it is another call."""
    keys: list[str] = []

    async def work(task: Task, context: Any) -> None:
        keys.append(context.idempotency_key)
        raise httpx.ConnectError("refused")

    document = Plan.parse(
        "{goal: {objective: pay}, tasks: [{id: other}, {id: pay, arguments: {sum: 1}, retry: {max_attempts: 2}}]}"
    )
    async with make_engine(clock=clock).open(document, run_id="r") as run:
        with pytest.raises(httpx.ConnectError):
            await run.perform("pay", work)
        run.modify_task("pay", arguments={"sum": 2})
        run.apply([{"kind": "retry", "task_id": "pay"}])
        with pytest.raises(httpx.ConnectError):
            await run.perform("pay", work)
    assert keys == ["r/pay", "r/pay", "r/pay#changed-1", "r/pay#changed-1"]


@pytest.mark.parametrize(("kind", "key"), [("agent", "r/pay#changed-1"), ("function", "r/pay")])
async def test_a_changed_goal_has_a_key_of_its_own(
    clock: VirtualClock, kind: str, key: str
) -> None:
    """A task with another goal is another call of a tool that is given the goal, and the same one of every other."""
    keys: list[str] = []

    async def work(task: Task, context: Any) -> None:
        keys.append(context.idempotency_key)
        raise httpx.ConnectError("refused")

    document = Plan.model_validate(
        {
            "goal": {"objective": "pay"},
            "tools": [{"name": "t", "kind": kind}],
            "tasks": [
                {"id": "other"},
                {"id": "pay", "tool": "t", "goal": "pay", "retry": {"max_attempts": 1}},
            ],
        }
    )
    async with make_engine(clock=clock).open(document, run_id="r") as run:
        with pytest.raises(httpx.ConnectError):
            await run.perform("pay", work)
        run.modify_task("pay", goal="pay in parts")
        run.apply([{"kind": "retry", "task_id": "pay"}])
        with pytest.raises(httpx.ConnectError):
            await run.perform("pay", work)
    assert keys == ["r/pay", key]
