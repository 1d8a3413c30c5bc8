"""Effects happen no more often with an engine than without: executions are counted beside each framework alone."""

from collections.abc import Mapping
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
    Charge,
    Ending,
    compare,
    count_cancelled,
    count_exceeded,
)
from tests.support.http_server import HttpServer
from tests.support.runs import make_engine

Stated = Mapping[str, Any]


async def in_session(charge: Charge, engine: ReplanningEngine | None, stated: Stated) -> object:
    """Call the tool in a session."""
    if engine is None:
        return await charge("x")
    async with engine.session("pay", tools=[tool(name="charge", **stated)(charge)]) as session:
        return await session.call(charge, "x")


async def in_plan(charge: Charge, engine: ReplanningEngine | None, stated: Stated) -> object:
    """Call the tool as a task of a plan."""
    if engine is None:
        return await charge("x")
    document = Plan.parse(
        "{goal: {objective: pay}, tasks: [{id: pay, tool: charge, arguments: {q: x}}]}"
    )
    return await engine.execute(document, tools=[tool(name="charge", **stated)(charge)])


async def in_pydantic_ai(charge: Charge, engine: ReplanningEngine | None, stated: Stated) -> object:
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

    capabilities = {"charge": stated}
    attached = [] if engine is None else [Replanned(capabilities, engine=engine)]
    agent = Agent(FunctionModel(model), tools=[charge], capabilities=attached)
    return await agent.run("go")


async def in_openai_agents(
    charge: Charge, engine: ReplanningEngine | None, stated: Stated
) -> object:
    """Run an agent of the OpenAI Agents SDK."""
    pytest.importorskip("agents")
    from agents import Agent, Runner, function_tool
    from agents.testing import ScriptedModel, assistant_message, function_call

    from replanning.integrations.openai_agents import replanned

    calls = [function_call("charge", {"q": "x"}, call_id="c1")]
    model = ScriptedModel([calls, [assistant_message("done")]])
    agent = Agent("payer", model=model, tools=[function_tool(charge)])
    if engine is None:
        return await Runner.run(agent, "go")
    async with replanned(agent, engine, capabilities={"charge": stated}) as attached:
        return await Runner.run(attached, "go")


async def in_langchain(charge: Charge, engine: ReplanningEngine | None, stated: Stated) -> object:
    """Run an agent of LangChain."""
    pytest.importorskip("langchain")
    from langchain.agents import create_agent
    from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
    from langchain_core.messages import AIMessage
    from langchain_core.tools import StructuredTool

    from replanning.integrations.langgraph import ReplanningMiddleware, replanned

    class Model(GenericFakeChatModel):  # type: ignore[misc]
        def bind_tools(self, tools: object, **options: object) -> object:
            return self

    call = AIMessage("", tool_calls=[{"name": "charge", "args": {"q": "x"}, "id": "1"}])
    made = StructuredTool.from_function(coroutine=charge, name="charge", description="Charge.")
    attached = [] if engine is None else [ReplanningMiddleware()]
    model = Model(messages=iter([call, AIMessage("done")]))
    graph = create_agent(model, [made], middleware=attached)
    if engine is not None:
        graph = replanned(graph, engine, capabilities={"charge": stated})
    return await graph.ainvoke({"messages": [("user", "go")]})


async def in_agent_framework(
    charge: Charge, engine: ReplanningEngine | None, stated: Stated
) -> object:
    """Run an agent of the Microsoft Agent Framework."""
    pytest.importorskip("agent_framework")
    from agent_framework import Agent
    from agent_framework import tool as framework_tool

    from replanning.integrations.agent_framework import Replanned
    from tests.integrations.test_agent_framework import Model, call

    model = Model([call("charge", q="x")])
    capabilities = {"charge": stated}
    attached = [] if engine is None else [Replanned(capabilities, engine=engine)]
    agent = Agent(model, tools=[framework_tool(charge)], middleware=attached)
    return await agent.run("go")


INTEGRATIONS = [
    in_session,
    in_plan,
    in_pydantic_ai,
    in_openai_agents,
    in_langchain,
    in_agent_framework,
]


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
@pytest.mark.parametrize("attach", INTEGRATIONS)
async def test_no_more_effects_than_without(
    attach: Attach, ending: Ending, clock: VirtualClock
) -> None:
    """A call is executed as often as by the framework alone, unless it had no effect or its repetition is harmless."""
    counted, promised = await compare(attach, ending, lambda: make_engine("repair", clock=clock))
    assert counted == promised


@pytest.mark.parametrize("attach", INTEGRATIONS)
async def test_a_cancelled_call_is_executed_once(attach: Attach, clock: VirtualClock) -> None:
    """A tool during which its agent is cancelled is executed no more often than by the framework alone."""
    engine = make_engine("repair", clock=clock)
    assert await count_cancelled(attach, engine) == await count_cancelled(attach, None) == 1


@pytest.mark.parametrize("attach", INTEGRATIONS)
async def test_a_call_that_exceeds_its_time_is_executed_once(
    attach: Attach, clock: VirtualClock
) -> None:
    """A tool that ran into its time limit is executed again only where that is harmless."""
    engine = make_engine("repair", clock=clock)
    assert await count_exceeded(attach, engine) == 1
    engine = make_engine("repair", clock=clock)
    assert await count_exceeded(attach, engine, idempotent=True) == ATTEMPTS


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
