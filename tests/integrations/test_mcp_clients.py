"""Tools of MCP servers in the clients of each framework: what fails there is a failure, beside each framework alone."""

import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from replanning import ReplanningEngine
from replanning.integrations.kit import Capabilities
from replanning.journal import AttemptFailed
from tests.support.asyncio_only import anyio_backend  # noqa: F401 - a fixture
from tests.support.runs import make_engine

pytest.importorskip("mcp")

pytestmark = pytest.mark.deep  # it starts servers

SERVER = [str(Path(__file__).parents[1] / "support" / "mcp_reporting_server.py")]
ARGUMENTS: dict[str, Any] = {"query": "x"}
FOUND = "Errors: 0 failed, in the archive"

Attach = Callable[[str, ReplanningEngine | None, Capabilities], Awaitable[str]]


def by_hand(query: str) -> str:
    """Do it by hand."""
    return f"{query}, by hand"


async def in_openai_agents(
    tool: str, engine: ReplanningEngine | None, capabilities: Capabilities
) -> str:
    """Run an agent of the OpenAI Agents SDK, and return what the model was told."""
    pytest.importorskip("agents")
    from agents import Agent, Runner, function_tool
    from agents.mcp import MCPServerStdio
    from agents.testing import ScriptedModel, assistant_message, function_call

    from replanning.integrations.openai_agents import replanned

    model = ScriptedModel(
        [[function_call(tool, ARGUMENTS, call_id="c1")], [assistant_message("done")]]
    )
    params: Any = {"command": sys.executable, "args": SERVER}
    async with MCPServerStdio(params) as server:
        agent = Agent("a", model=model, mcp_servers=[server], tools=[function_tool(by_hand)])
        if engine is None:
            result = await Runner.run(agent, "go")
        else:
            async with replanned(agent, engine, capabilities=capabilities) as attached:
                result = await Runner.run(attached, "go")
    return "".join(
        str(item.output) for item in result.new_items if item.type == "tool_call_output_item"
    )


async def in_pydantic_ai(
    tool: str, engine: ReplanningEngine | None, capabilities: Capabilities
) -> str:
    """Run an agent of pydantic-ai, and return what the model was told."""
    pytest.importorskip("pydantic_ai")
    transports = pytest.importorskip(
        "fastmcp.client.transports", reason="needs pydantic-ai-slim[mcp]"
    )
    from pydantic_ai import Agent
    from pydantic_ai.mcp import MCPToolset
    from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
    from pydantic_ai.models.function import FunctionModel

    from replanning.integrations.pydantic_ai import Replanned

    def model(messages: list[Any], info: object) -> Any:
        if len(messages) == 1:
            return ModelResponse([ToolCallPart(tool, ARGUMENTS)])
        return ModelResponse([TextPart(str(messages[-1].parts[-1].content))])

    toolset = MCPToolset(transports.StdioTransport(sys.executable, SERVER))
    attached = [] if engine is None else [Replanned(capabilities, engine=engine)]
    agent = Agent(FunctionModel(model), tools=[by_hand], toolsets=[toolset], capabilities=attached)
    return str((await agent.run("go")).output)


async def in_agent_framework(
    tool: str, engine: ReplanningEngine | None, capabilities: Capabilities
) -> str:
    """Run an agent of the Microsoft Agent Framework, and return what the model was told."""
    pytest.importorskip("agent_framework")
    from agent_framework import Agent, FunctionTool, MCPStdioTool

    from replanning.integrations.agent_framework import Replanned
    from tests.integrations.test_agent_framework import Model, call

    model = Model([call(tool, **ARGUMENTS)])
    server = MCPStdioTool("server", sys.executable, args=SERVER)
    attached = [] if engine is None else [Replanned(capabilities, engine=engine)]
    async with Agent(
        model, tools=[server, FunctionTool(name="by_hand", func=by_hand)], middleware=attached
    ) as agent:
        response = await agent.run("go")
    return "".join(
        str(content.result) + str(content.exception)
        for message in response.messages
        for content in message.contents
        if content.type == "function_result"
    )


CLIENTS = [in_openai_agents, in_pydantic_ai, in_agent_framework]


@pytest.mark.parametrize("attach", CLIENTS)
async def test_failures_that_a_server_reports(attach: Attach) -> None:
    """A result with `isError` or an error of the protocol is a failure; without a way on the model reads it as without an engine."""
    for tool, said in (("news", "no news: the service is down"), ("refused", "not today")):
        alone = await attach(tool, None, {})
        assert await attach(tool, make_engine("repair"), {}) == alone
        engine = make_engine("repair")
        assert FOUND in await attach(tool, engine, {tool: "web", "archive": "web"})
        [failure] = failures(engine)
        assert said in failure


@pytest.mark.parametrize("attach", CLIENTS)
async def test_words_are_no_failures(attach: Attach) -> None:
    """A result that speaks of errors is a success."""
    engine = make_engine("repair")
    told = await attach("archive", engine, {"archive": "web", "by_hand": "web"})
    assert (FOUND in told, failures(engine)) == (True, [])


@pytest.mark.parametrize("attach", CLIENTS)
async def test_a_server_that_ends_during_a_call(attach: Attach) -> None:
    """A call may have taken effect before its server ended: no other tool is executed, unless it only reads."""
    cases: list[tuple[str, dict[str, str], bool]] = [
        ("charge", {}, False),
        ("charge", {"effect": "none"}, True),
        ("read", {}, attach is not in_agent_framework),  # which does not pass the annotations on
    ]
    for tool, stated, is_replaced in cases:
        engine = make_engine("repair", retry={"delay": 0})
        fields: Mapping[str, Any] = {"capability": "pay", **stated}
        told = ""
        with suppress(Exception):  # which ends the run of the agent, as without an engine
            told = await attach(tool, engine, {tool: fields, "by_hand": "pay"})
        assert ("x, by hand" in told) is is_replaced


def failures(engine: ReplanningEngine) -> list[str]:
    """The messages of the attempts that failed."""
    return [
        record.body.failure.message
        for run in engine.store.runs()
        for record in engine.store.read(run.run)
        if isinstance(record.body, AttemptFailed)
    ]
