"""Secrets reach a real server in every documented form: in files, Python, sessions and frameworks, and are stored nowhere."""

import json
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypedDict

import httpx
import pytest

from replanning import Plan, ReplanningEngine
from replanning.errors import CallFailed
from replanning.journal import SqliteStore
from replanning.tools import ToolExecutor
from tests.support.asyncio_only import anyio_backend  # noqa: F401 - a fixture
from tests.support.cli import Gate, Started, answer
from tests.support.shop import FORMS, KEY, PASSWORD, SECRETS, TOKEN, Shop

CLIENT = Path(__file__).parents[1] / "support" / "shop_client.py"
ENVIRON = {"SHOP_KEY": KEY, "SHOP_PASSWORD": PASSWORD}


def leaks(folder: Path) -> list[str]:
    """The files of a folder that hold one of the secrets."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            if any(secret.encode() in content for secret in SECRETS):
                found.append(path.name)
    return found


# Plans: every form in which the documents refer to a secret


def plan_of(shop: Shop, hold: str = "true") -> dict[str, Any]:
    """A plan that sends a secret in each form; its tasks wait for `hold`, which the test interrupts.

    Args:
        shop: the server.
        hold: the command that is executed first, after the logins.
    """
    host = shop.url.removeprefix("http://")
    client = f"{sys.executable} {CLIENT}"
    key = "{env:SHOP_KEY}"
    environment = {"SHOP_KEY": key}
    web: dict[str, dict[str, Any]] = {
        "authorization": {"headers": {"Authorization": f"Bearer {key}"}},
        "cookie": {"headers": {"Cookie": f"theme=dark; session={key}"}},
        "x-api-key": {"headers": {"X-Api-Key": key}},
        "query": {"url": f"{shop.url}/query?token={key}"},
        "user": {"url": f"http://eve:{key}@{host}/user"},
        "body": {"method": "POST", "body": {"token": key}},
        "header-of-output": {"headers": {"Authorization": "Bearer {token}"}},
        "query-of-output": {"url": shop.url + "/query-of-output?token={token}"},
        "body-of-output": {"method": "POST", "body": {"token": "{token}"}},
    }
    tools: list[dict[str, Any]] = [
        {
            "name": "login",
            "kind": "http",
            "method": "POST",
            "url": f"{shop.url}/login",
            "body": {"password": "{env:SHOP_PASSWORD}"},
            "idempotent": True,
        },
        {
            "name": "shell-login",
            "kind": "shell",
            "command": f"{client} {shop.url} login",
            "env": {"SHOP_PASSWORD": "{env:SHOP_PASSWORD}"},
            "idempotent": True,
        },
        {"name": "hold", "kind": "shell", "command": hold},
        {
            "name": "shell-env",
            "kind": "shell",
            "command": f"{client} {shop.url} shell-env",
            "env": environment,
        },
        {
            "name": "word-of-output",
            "kind": "shell",
            "command": f"{client} {shop.url} word-of-output {{token}}",
        },
    ]
    for name, fields in web.items():
        tools.append({"name": name, "kind": "http", "url": f"{shop.url}/{name}", **fields})
    tasks: list[dict[str, Any]] = [
        {"id": "login", "tool": "login"},
        {"id": "shell-login", "tool": "shell-login"},
        {"id": "hold", "tool": "hold", "depends_on": ["login", "shell-login"]},
        {
            "id": "mcp-env",
            "tool": "command.use",
            "arguments": {"path": "mcp-env"},
            "depends_on": ["hold"],
        },
        {"id": "mcp", "tool": "web.orders", "depends_on": ["hold"]},
    ]
    for described in tools[3:]:
        task = {"id": described["name"], "tool": described["name"], "depends_on": ["hold"]}
        if described["name"] == "word-of-output":
            task["arguments"] = {"token": "${shell-login.output.stdout}"}
        elif described["name"].endswith("-of-output"):
            task["arguments"] = {"token": "${login.output.json.access_token}"}
        tasks.append(task)
    return {
        "goal": {"objective": "look at the orders"},
        "mcp": {
            "command": {"command": [sys.executable, str(CLIENT), shop.url], "env": environment},
            "web": {"url": f"{shop.url}/mcp", "headers": {"Authorization": f"Bearer {key}"}},
        },
        "tools": tools,
        "tasks": tasks,
    }


def expected_of(document: dict[str, Any]) -> list[str]:
    """The paths of the shop that a plan asks for after its logins."""
    return sorted(task["id"] for task in document["tasks"][3:])


def test_plan_file_before_and_after_a_resume(tmp_path):
    """A plan file sends its secrets in every form, at once and after an interruption; nothing is printed or stored."""
    pytest.importorskip("mcp")
    gate = Gate(tmp_path / "gate")
    words = ("--store", "runs.db", "--no-replan")
    with Shop() as shop:
        document = plan_of(shop, gate.command)
        (tmp_path / "plan.json").write_text(json.dumps(document))
        gate.open()
        whole = answer(tmp_path, "run", "plan.json", *words, "--json", **ENVIRON)
        assert whole["status"] == "succeeded", whole
        assert sorted(shop.accepted[2:]) == expected_of(document)

        shop.accepted.clear()
        with Started(tmp_path, "run", "plan.json", "--run-id", "r", *words, **ENVIRON) as started:
            started.until("hold")
            started.process.send_signal(signal.SIGINT)
            started.until("pausing")
            gate.open()
            printed = started.end(3)
        assert sorted(shop.accepted) == ["login", "login"]
        resumed = answer(tmp_path, "resume", "r", "--store", "runs.db", "--json", **ENVIRON)
    assert resumed["status"] == "succeeded", resumed
    # Their outputs are not stored, so the logins are repeated for those that read them.
    assert sorted(shop.accepted) == sorted([*expected_of(document), *["login"] * 4])
    assert leaks(tmp_path) == []
    shown = printed + started.seen + json.dumps([whole, resumed])
    assert not [secret for secret in SECRETS if secret in shown]


async def test_plan_in_python_before_and_after_a_resume(tmp_path):
    """A plan that a program carries out sends its secrets in every form, at once and in a resumed run."""
    pytest.importorskip("mcp")

    async def carry_out(opened: Any, execute: ToolExecutor, last: str) -> Any:
        async with opened as run:
            async for task in run.ready():
                async with run.attempt(task) as attempt:
                    attempt.output = await execute(task, attempt.context)
                if task.id == last:
                    break
        return run

    with Shop() as shop:
        document = plan_of(shop)
        plan = Plan.model_validate(document)
        engine = ReplanningEngine(store=SqliteStore(tmp_path / "runs.db"))
        async with ToolExecutor(plan, environ=ENVIRON) as execute:
            plan = await execute.discover(plan)
            whole = await carry_out(engine.open(plan, run_id="whole"), execute, "")
            assert whole.result.ok, whole.result.reason
            assert sorted(shop.accepted[2:]) == expected_of(document)
            await carry_out(engine.open(plan, run_id="r"), execute, "hold")
        shop.accepted.clear()
        async with ToolExecutor(plan, environ=ENVIRON) as execute:
            resumed = await carry_out(engine.resume("r"), execute, "")
        await engine.aclose()
    assert resumed.result.ok, resumed.result.reason
    assert sorted(shop.accepted) == sorted([*expected_of(document), "login", "login"])
    assert leaks(tmp_path) == []


# Agents: a tool logs in, and the model hands the token to others


class Customer:
    """Tools of an agent, which ask the shop.

    Args:
        shop: the server.
        confirm: called before the checkout, where a framework stops within a tool.
    """

    def __init__(self, shop: Shop, confirm: Callable[[], object] = lambda: None) -> None:
        async def login(password: str) -> dict[str, str]:
            """Log in."""
            async with httpx.AsyncClient() as client:
                done = await client.post(f"{shop.url}/login", json={"password": password})
            done.raise_for_status()
            found: dict[str, str] = done.json()
            return found

        async def use(form: str, token: str) -> str:
            """Look at the orders."""
            method = "POST" if form == "body" else "GET"
            async with httpx.AsyncClient() as client:
                done = await client.request(method, f"{shop.url}/{form}", **FORMS[form](token))
            done.raise_for_status()
            return done.text

        async def checkout(token: str) -> str:
            """Pay."""
            confirm()
            async with httpx.AsyncClient() as client:
                done = await client.get(f"{shop.url}/checkout", **FORMS["authorization"](token))
            done.raise_for_status()
            return "paid"

        self.login = login
        self.use = use
        self.checkout = checkout


Engines = Callable[[], ReplanningEngine]
Attach = Callable[[Shop, Engines], Awaitable[object]]
"""Runs an agent that logs in, uses its token, stops, and checks out after a resume with another engine."""


async def in_session(shop: Shop, engines: Engines) -> object:
    """Call the tools in a session, which is left and continued."""
    customer = Customer(shop)
    tools: list[Callable[..., Any]] = [customer.login, customer.use, customer.checkout]
    engine = engines()
    with pytest.raises(EOFError):  # noqa: PT012 - the session must be left by it
        async with engine.session("buy", tools=tools, run_id="r", passes=(EOFError,)) as session:
            login: Any = await session.invoke("login", {"password": PASSWORD}, key="login")
            for form in FORMS:
                await session.call(customer.use, form, login["access_token"])
            raise EOFError
    await engine.aclose()
    async with engines().session("buy", tools=tools, run_id="r") as session:
        # Its output was not stored, and it is not executed again.
        with pytest.raises(CallFailed, match="was done before"):
            await session.invoke("login", {"password": PASSWORD}, key="login")
        return await session.call(customer.checkout, login["access_token"])


async def in_pydantic_ai(shop: Shop, engines: Engines) -> object:
    """Run an agent of pydantic-ai; the checkout requires an approval."""
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent, DeferredToolRequests, DeferredToolResults, Tool
    from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart, ToolReturnPart
    from pydantic_ai.models.function import FunctionModel

    from replanning.integrations.pydantic_ai import Replanned

    customer = Customer(shop)

    def model(messages: list[Any], info: object) -> Any:
        returned: dict[str, Any] = {}
        for message in messages:
            for part in message.parts:
                if isinstance(part, ToolReturnPart):
                    returned[part.tool_name] = part.content
        if not returned:
            return ModelResponse([ToolCallPart("login", {"password": PASSWORD})])
        token = returned["login"]["access_token"]
        if "use" not in returned:
            uses = [ToolCallPart("use", {"form": form, "token": token}) for form in FORMS]
            return ModelResponse(uses)
        if "checkout" not in returned:
            return ModelResponse([ToolCallPart("checkout", {"token": token})])
        return ModelResponse([TextPart(returned["checkout"])])

    def agent() -> Any:
        return Agent(
            FunctionModel(model),
            tools=[customer.login, customer.use, Tool(customer.checkout, requires_approval=True)],
            capabilities=[Replanned(engine=engines())],
            output_type=[str, DeferredToolRequests],
        )

    stopped = await agent().run("go")
    [call] = stopped.output.approvals
    approved = DeferredToolResults(approvals={call.tool_call_id: True})
    messages = stopped.all_messages()
    result = await agent().run(message_history=messages, deferred_tool_results=approved)
    return result.output


async def in_openai_agents(shop: Shop, engines: Engines) -> object:
    """Run an agent of the OpenAI Agents SDK; the checkout needs an approval."""
    pytest.importorskip("agents")
    from agents import Agent, Runner, RunState, function_tool
    from agents.testing import ScriptedModel, assistant_message, function_call

    from replanning.integrations.openai_agents import replanned

    customer = Customer(shop)
    tools = [
        function_tool(customer.login),
        function_tool(customer.use),
        function_tool(customer.checkout, needs_approval=True),
    ]
    uses = []
    for form in FORMS:
        uses.append(function_call("use", {"form": form, "token": TOKEN}, call_id=form))
    steps = [
        [function_call("login", {"password": PASSWORD}, call_id="login")],
        uses,
        [function_call("checkout", {"token": TOKEN}, call_id="checkout")],
    ]
    agent = Agent("customer", model=ScriptedModel(steps), tools=tools)
    async with replanned(agent, engines(), thread="t") as attached:
        stopped = await Runner.run(attached, "go")
        saved = stopped.to_state().to_string()
    assert TOKEN in str(stopped.to_input_list())
    agent = Agent("customer", model=ScriptedModel([[assistant_message("done")]]), tools=tools)
    async with replanned(agent, engines(), thread="t") as attached:
        state = await RunState.from_string(attached, saved)
        state.approve(state.get_interruptions()[0])
        result = await Runner.run(attached, state)
    outputs = [item["output"] for item in result.to_input_list() if "output" in item]
    return outputs[-1]


async def in_langchain(shop: Shop, engines: Engines) -> object:
    """Run an agent of LangChain; the checkout interrupts it."""
    pytest.importorskip("langchain")
    from langchain.agents import create_agent
    from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
    from langchain_core.messages import AIMessage
    from langchain_core.tools import StructuredTool
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.types import Command, interrupt

    from replanning.integrations.langgraph import ReplanningMiddleware, replanned

    class Model(GenericFakeChatModel):  # type: ignore[misc]
        def bind_tools(self, tools: object, **options: object) -> object:
            return self

    customer = Customer(shop, lambda: interrupt("may I?"))
    tools = []
    for function in (customer.login, customer.use, customer.checkout):
        tools.append(StructuredTool.from_function(coroutine=function))
    uses = []
    for form in FORMS:
        uses.append({"name": "use", "args": {"form": form, "token": TOKEN}, "id": form})
    login = {"name": "login", "args": {"password": PASSWORD}, "id": "login"}
    checkout = {"name": "checkout", "args": {"token": TOKEN}, "id": "checkout"}
    saver = InMemorySaver()

    def attached(*messages: object) -> Any:
        model = Model(messages=iter(messages))
        agent = create_agent(model, tools, middleware=[ReplanningMiddleware()], checkpointer=saver)
        return replanned(agent, engines())

    thread = {"configurable": {"thread_id": "t"}}
    steps = [AIMessage("", tool_calls=calls) for calls in ([login], uses, [checkout])]
    stopped = await attached(*steps).ainvoke({"messages": [("user", "go")]}, thread)
    assert stopped["__interrupt__"][0].value == "may I?"
    assert TOKEN in stopped["messages"][2].text
    result = await attached(AIMessage("done")).ainvoke(Command(resume="yes"), thread)
    return [message.text for message in result["messages"] if message.type == "tool"][-1]


class Purchase(TypedDict, total=False):
    """State of the graph."""

    password: str
    token: str
    told: str


async def in_langgraph(shop: Shop, engines: Engines) -> object:
    """Run a graph whose nodes log in, use the token, and interrupt before the checkout."""
    pytest.importorskip("langgraph")
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.graph import START, StateGraph
    from langgraph.types import Command, interrupt

    from replanning.integrations.langgraph import replanned

    customer = Customer(shop, lambda: interrupt("may I?"))

    async def login(state: Purchase) -> Purchase:
        found = await customer.login(state["password"])
        return {"token": found["access_token"]}

    async def use(state: Purchase) -> Purchase:
        for form in FORMS:
            await customer.use(form, state["token"])
        return {}

    async def checkout(state: Purchase) -> Purchase:
        return {"told": await customer.checkout(state["token"])}

    builder = StateGraph(Purchase)
    for node in (login, use, checkout):
        builder.add_node(node)
    builder.add_edge(START, "login")
    builder.add_edge("login", "use")
    builder.add_edge("use", "checkout")
    saver = InMemorySaver()
    thread: Any = {"configurable": {"thread_id": "t"}}
    graph = replanned(builder.compile(checkpointer=saver), engines())
    await graph.ainvoke({"password": PASSWORD}, thread)
    graph = replanned(builder.compile(checkpointer=saver), engines())
    result = await graph.ainvoke(Command(resume="yes"), thread)
    assert result["token"] == TOKEN
    return result["told"]


async def in_agent_framework(shop: Shop, engines: Engines) -> object:
    """Run an agent of the Microsoft Agent Framework; the checkout requires an approval."""
    pytest.importorskip("agent_framework")
    from agent_framework import Agent, AgentSession
    from agent_framework import tool as framework_tool

    from replanning.integrations.agent_framework import Replanned
    from tests.integrations.test_agent_framework import Model, call

    customer = Customer(shop)
    tools = [
        framework_tool(customer.login),
        framework_tool(customer.use),
        framework_tool(customer.checkout, approval_mode="always_require"),
    ]

    def agent(*steps: Any) -> Any:
        return Agent(Model(*steps), tools=tools, middleware=[Replanned(engine=engines())])

    uses = [call("use", number, form=form, token=TOKEN) for number, form in enumerate(FORMS, 1)]
    steps = [call("login", 0, password=PASSWORD)], uses, [call("checkout", 9, token=TOKEN)]
    session = AgentSession()
    stopped = await agent(*steps).run("go", session=session)
    approval = stopped.user_input_requests[0].to_function_approval_response(True)
    session = AgentSession.from_dict(json.loads(json.dumps(session.to_dict())))
    response = await agent().run(approval, session=session)
    results = []
    for message in response.messages:
        for content in message.contents:
            if content.type == "function_result":
                results.append(content.items[0].text)
    return results[-1]


async def in_mcp_proxy(shop: Shop, engines: Engines) -> object:
    """Call the tools of an MCP server through the proxy, which is left and opened again."""
    pytest.importorskip("mcp")
    from mcp import Client

    from replanning.integrations.mcp import open_proxy

    server = {
        "command": [sys.executable, str(CLIENT), shop.url],
        "env": {"SHOP_PASSWORD": "{env:SHOP_PASSWORD}"},
    }
    plan = Plan.model_validate({"goal": {"objective": ""}, "mcp": {"shop": server}})

    async def call(client: Any, name: str, **arguments: str) -> str:
        result = await client.call_tool(name, arguments)
        assert not result.is_error, result
        return str(result.content[0].text)

    async with (
        open_proxy(engines(), plan, run_id="r") as proxy,
        Client(proxy.server) as client,
    ):
        token = await call(client, "login")
        for form in FORMS:
            await call(client, "use", path=form, token=token)
    async with (
        open_proxy(engines(), plan, run_id="r") as proxy,
        Client(proxy.server) as client,
    ):
        await call(client, "use", path="checkout", token=token)
    return "paid"


AGENTS = [
    in_session,
    in_pydantic_ai,
    in_openai_agents,
    in_langchain,
    in_langgraph,
    in_agent_framework,
    in_mcp_proxy,
]


@pytest.mark.parametrize("attach", AGENTS)
async def test_token_of_a_login_is_used(attach, tmp_path, monkeypatch):
    """A token that a tool of an agent returns is sent by others in every form, before and after a resume."""
    monkeypatch.setenv("SHOP_PASSWORD", PASSWORD)
    made: list[ReplanningEngine] = []

    def engines() -> ReplanningEngine:
        made.append(ReplanningEngine(["repair"], store=SqliteStore(tmp_path / "runs.db")))
        return made[-1]

    with Shop() as shop:
        assert await attach(shop, engines) == "paid"
    for engine in made:
        await engine.aclose()
    assert shop.accepted[0] == "login"
    assert sorted(shop.accepted[1:-1]) == sorted(FORMS)
    assert shop.accepted[-1] == "checkout"
    assert leaks(tmp_path) == []
