"""Effects happen no more often with an engine than without: executions are counted beside each framework alone."""

import asyncio  # noqa: TID251 # the frameworks run on it alone
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest

from replanning import Goal, Plan, ReplanningEngine, Task, ToolSpec, tool
from replanning.testing import VirtualClock
from replanning.tools import ToolExecutor
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

Tools = Sequence[Tool]
Stated = Mapping[str, Mapping[str, Any]]


async def execute(charge: Tool) -> object:
    """Execute a tool, in a thread if it is no coroutine."""
    if inspect.iscoroutinefunction(charge):
        return await charge("x")
    return await asyncio.to_thread(charge, "x")


async def in_session(tools: Tools, engine: ReplanningEngine | None, stated: Stated) -> object:
    """Call the tool in a session."""
    charge, *_ = tools
    if engine is None:
        return await execute(charge)
    described = [tool(**stated[each.__name__])(each) for each in tools]
    async with engine.session("pay", tools=described) as session:
        return await session.call(charge, "x")


async def in_plan(tools: Tools, engine: ReplanningEngine | None, stated: Stated) -> object:
    """Call the tool as a task of a plan."""
    if engine is None:
        return await execute(tools[0])
    document = Plan.parse(
        "{goal: {objective: pay}, tasks: [{id: pay, tool: charge, arguments: {q: x}}]}"
    )
    described = [tool(**stated[each.__name__])(each) for each in tools]
    return await engine.execute(document, tools=described)


async def in_pydantic_ai(tools: Tools, engine: ReplanningEngine | None, stated: Stated) -> object:
    """Run an agent of pydantic-ai."""
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
    from pydantic_ai.models.function import FunctionModel

    from replanning.integrations.pydantic_ai import Replanned

    def model(messages: list[Any], info: object) -> Any:
        if len(messages) == 1:
            return ModelResponse([ToolCallPart("charge", {"q": "x"}, tool_call_id="c1")])
        return ModelResponse([TextPart("done")])

    attached = [] if engine is None else [Replanned(stated, engine=engine)]
    agent = Agent(FunctionModel(model), tools=tools, capabilities=attached)
    return await agent.run("go")


async def in_openai_agents(tools: Tools, engine: ReplanningEngine | None, stated: Stated) -> object:
    """Run an agent of the OpenAI Agents SDK."""
    pytest.importorskip("agents")
    from agents import Agent, Runner, function_tool
    from agents.testing import ScriptedModel, assistant_message, function_call

    from replanning.integrations.openai_agents import replanned

    calls = [function_call("charge", {"q": "x"}, call_id="c1")]
    model = ScriptedModel([calls, [assistant_message("done")]])
    agent = Agent("payer", model=model, tools=[function_tool(each) for each in tools])
    if engine is None:
        return await Runner.run(agent, "go")
    async with replanned(agent, engine, capabilities=stated) as attached:
        return await Runner.run(attached, "go")


def langchain_agent(tools: Tools, engine: ReplanningEngine | None, stated: Stated) -> Any:
    """Return an agent of LangChain that calls the first tool."""
    pytest.importorskip("langchain")
    from langchain.agents import create_agent
    from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
    from langchain_core.messages import AIMessage
    from langchain_core.tools import tool as langchain_tool

    from replanning.integrations.langgraph import ReplanningMiddleware, replanned

    class Model(GenericFakeChatModel):  # type: ignore[misc]
        def bind_tools(self, tools: object, **options: object) -> object:
            return self

    call = AIMessage("", tool_calls=[{"name": "charge", "args": {"q": "x"}, "id": "1"}])
    attached = [] if engine is None else [ReplanningMiddleware()]
    model = Model(messages=iter([call, AIMessage("done")]))
    graph = create_agent(model, [langchain_tool(each) for each in tools], middleware=attached)
    return graph if engine is None else replanned(graph, engine, capabilities=stated)


async def in_langchain(tools: Tools, engine: ReplanningEngine | None, stated: Stated) -> object:
    """Run an agent of LangChain."""
    graph = langchain_agent(tools, engine, stated)
    return await graph.ainvoke({"messages": [("user", "go")]})


async def in_langchain_threads(
    tools: Tools, engine: ReplanningEngine | None, stated: Stated
) -> object:
    """Run an agent of LangChain without an event loop."""
    graph = langchain_agent(tools, engine, stated)
    return await asyncio.to_thread(graph.invoke, {"messages": [("user", "go")]})


async def in_langgraph(tools: Tools, engine: ReplanningEngine | None, stated: Stated) -> object:
    """Run a graph whose node is the tool."""
    pytest.importorskip("langgraph")
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


async def in_agent_framework(
    tools: Tools, engine: ReplanningEngine | None, stated: Stated
) -> object:
    """Run an agent of the Microsoft Agent Framework."""
    pytest.importorskip("agent_framework")
    from agent_framework import Agent
    from agent_framework import tool as framework_tool

    from replanning.integrations.agent_framework import Replanned
    from tests.integrations.test_agent_framework import Model, call

    model = Model([call("charge", q="x")])
    attached = [] if engine is None else [Replanned(stated, engine=engine)]
    agent = Agent(model, tools=[framework_tool(each) for each in tools], middleware=attached)
    return await agent.run("go")


INTEGRATIONS = [
    in_session,
    in_plan,
    in_pydantic_ai,
    in_openai_agents,
    in_langchain,
    in_langgraph,
    in_agent_framework,
]

ONCE = {"charge": 1, "stand_in": 0}


def engine_for(attach: Attach, clock: VirtualClock) -> ReplanningEngine:
    """Return an engine; a graph that runs without an event loop cannot share the virtual clock of this one."""
    if attach is in_langchain_threads:
        return make_engine("repair", retry={"delay": 0})
    return make_engine("repair", clock=clock)


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
@pytest.mark.parametrize("attach", INTEGRATIONS)
async def test_no_more_effects_than_without(
    attach: Attach, ending: Ending, clock: VirtualClock
) -> None:
    """A call is executed as often as by the framework alone, unless it had no effect or its repetition is harmless.

    Another tool of its capability is executed only after a call that had no effect.
    """
    counted, promised = await compare(attach, ending, lambda: engine_for(attach, clock))
    assert counted == promised


@pytest.mark.parametrize("attach", [*INTEGRATIONS, in_langchain_threads])
async def test_no_more_effects_in_threads(attach: Attach, clock: VirtualClock) -> None:
    """The same holds for tools that are executed in threads."""
    for name in ("reset", "connection", "error", "status"):
        counted, promised = await compare(
            attach, ENDINGS[name], lambda: engine_for(attach, clock), in_thread=True
        )
        assert counted == promised


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("attach", INTEGRATIONS)
async def test_a_cancelled_call_is_executed_once(
    attach: Attach, in_thread: bool, clock: VirtualClock
) -> None:
    """A tool during which its agent is cancelled is executed no more often than by the framework alone."""
    alone = await count_cancelled(attach, None, in_thread=in_thread)
    engine = engine_for(attach, clock)
    assert await count_cancelled(attach, engine, in_thread=in_thread) == alone == ONCE


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("attach", INTEGRATIONS)
async def test_a_call_that_exceeds_its_time_is_executed_once(
    attach: Attach, in_thread: bool, clock: VirtualClock
) -> None:
    """A tool that ran into its time limit, or is left behind in a thread, is executed again only where that is harmless."""

    async def exceed(**stated: Any) -> dict[str, int]:
        if in_thread:  # a virtual clock waits for threads
            engine = make_engine("repair", retry={"delay": 0})
            return await count_exceeded(attach, engine, in_thread=True, timeout=0.05, **stated)
        engine = make_engine("repair", clock=clock)
        return await count_exceeded(attach, engine, timeout=5, **stated)

    assert await exceed() == ONCE
    assert await exceed(idempotent=True) == {"charge": ATTEMPTS, "stand_in": 0}


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
