"""Agents of the Microsoft Agent Framework with a scripted model: with an engine and without one."""

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import anyio
import pytest

pytest.importorskip("agent_framework", reason="agent-framework-core is not installed")

from agent_framework import (
    SKIP_PARSING,
    Agent,
    AgentSession,
    BaseChatClient,
    ChatMiddlewareLayer,
    ChatResponse,
    ChatResponseUpdate,
    Content,
    ContextProvider,
    FunctionInvocationContext,
    FunctionInvocationLayer,
    FunctionMiddleware,
    FunctionTool,
    MCPStdioTool,
    Message,
    MiddlewareFailure,
    MiddlewareTermination,
    ResponseStream,
    UserInputRequiredException,
    WorkflowBuilder,
    chat_middleware,
    function_middleware,
    tool,
)
from opentelemetry import trace

from replanning import ReplanningEngine
from replanning.changes import AbortRun
from replanning.errors import NotRunning, RunOwned
from replanning.integrations.agent_framework import Replanned
from replanning.journal import SqliteStore
from replanning.testing import VirtualClock
from tests.support.asyncio_only import anyio_backend  # noqa: F401 - a fixture
from tests.support.runs import alternative, make_engine, skipping
from tests.support.tracing import Spans

WEB = {"search": "web", "search_archive": "web"}
SERVER = Path(__file__).parents[1] / "support" / "mcp_plain_server.py"


class Model(FunctionInvocationLayer, ChatMiddlewareLayer, BaseChatClient):  # type: ignore[misc]
    """A chat client whose answers are given: texts, exceptions, or calls of tools; it says what it was shown."""

    def __init__(self, *steps: Any) -> None:
        super().__init__(function_invocation_configuration={"include_detailed_errors": True})
        self.steps = [*steps, "done"]
        self.shown: list[Sequence[Any]] = []

    def _inner_get_response(
        self, *, messages: Any, stream: bool, options: Any, **kwargs: Any
    ) -> Any:
        self.shown.append(messages)
        step = self.steps.pop(0)
        contents = [Content.from_text(step)] if isinstance(step, str) else step

        async def updates() -> Any:
            if isinstance(step, Exception):
                raise step
            for content in contents:
                yield ChatResponseUpdate(role="assistant", contents=[content])

        async def response() -> Any:
            if isinstance(step, Exception):
                raise step
            return ChatResponse(messages=[Message(role="assistant", contents=contents)])

        return (
            ResponseStream(updates(), finalizer=ChatResponse.from_updates) if stream else response()
        )


def call(name: str, number: int = 0, **arguments: object) -> Any:
    """A call of a tool by the model."""
    return Content.from_function_call(
        f"call-{number}", name, arguments=json.dumps(arguments or {"query": "x"})
    )


def calls(*names: str) -> Model:
    """A model that calls these tools at once, then is done."""
    return Model([call(name, number) for number, name in enumerate(names)])


@tool
async def search(query: str) -> str:
    """Search."""
    raise ConnectionError(f"no answer about {query}")


@tool
def search_archive(query: str) -> str:
    """Search the archive."""
    return f"{query}, from the archive"


@tool(approval_mode="always_require")
def delete(query: str) -> str:
    """Delete."""
    return f"{query} is deleted"


def repairing(clock: VirtualClock, **options: Any) -> ReplanningEngine:
    """An engine with the embedded provider."""
    return make_engine("repair", clock=clock, **options)


def statuses(engine: ReplanningEngine) -> list[str]:
    """How the runs of an engine stand."""
    return [info.status for info in engine.store.runs()]


def tracing(spans: Spans) -> Any:
    """A function that gives the framework a tracer."""
    return lambda *_, **__: spans.provider.get_tracer("app")


def shape(contents: Any) -> list[tuple[object, ...]]:
    """What contents say, without ids."""
    return [
        (
            each.type,
            each.name,
            str(each.arguments),
            each.text or str(each.result),
            str(each.exception),
        )
        for each in contents
    ]


def outputs(response: Any) -> list[str]:
    """What the model was told by tools."""
    return [str(each.result) for each in contents_of(response) if each.type == "function_result"]


def contents_of(response: Any) -> list[Any]:
    """The contents of a response."""
    return [content for message in response.messages for content in message.contents]


async def play(agent: Any, stream: bool = False, text: Any = "x?", **options: Any) -> Any:
    """Run an agent, and return its response."""
    if not stream:
        return await agent.run(text, **options)
    updates = agent.run(text, stream=True, **options)
    assert [update async for update in updates]
    return await updates.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
async def test_substitute(stream, clock):
    """A tool that fails is replaced by another of its capability, and the model sees the result of that one."""
    engine = repairing(clock)
    agent = Agent(
        calls("search"), tools=[search, search_archive], middleware=[Replanned(WEB, engine=engine)]
    )
    response = await play(agent, stream)
    assert outputs(response) == ["x, from the archive"]
    assert response.text == "done"
    assert statuses(engine) == ["succeeded"]


async def test_skipped(clock):
    """About a call that is skipped, the model is told why."""
    attached = Replanned(engine=make_engine(skipping, clock=clock))
    response = await play(Agent(calls("search"), tools=[search], middleware=[attached]))
    assert outputs(response) == ["task 'search-1' was skipped: nobody needs it"]


async def test_timeout(clock):
    """The model is told of a tool that exceeds its timeout, where nothing replaces it."""

    @tool
    async def endless(query: str) -> None:
        await anyio.sleep_forever()

    attached = Replanned({"endless": {"timeout": 5}}, engine=make_engine(clock=clock))
    agent = Agent(calls("endless"), tools=[endless], middleware=[attached])
    [output] = outputs(await agent.run("x?"))
    assert "deadline after 5 s" in output


@tool
def picture(query: str) -> list[Any]:
    """Return a picture and its title."""
    return [
        Content.from_text(query),
        Content.from_uri("https://example.org/x.png", media_type="image/png"),
    ]


@tool
def nothing(query: str, unit: int = 1) -> None:
    """Return nothing."""


raw = FunctionTool(name="raw", func=lambda query: {"about": query}, result_parser=SKIP_PARSING)


@tool
def broken(query: str) -> None:
    """Fail in a way that does not pass."""
    raise LookupError(f"nothing about {query}")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "model",
    [
        lambda: calls("search_archive", "picture", "nothing", "raw"),
        lambda: calls("broken"),
        lambda: calls("unknown"),
        lambda: Model([call("nothing", unit="y")], [call("nothing", query="x", unit=[])]),
        lambda: Model(ConnectionError("no model")),
        lambda: Model([call("broken")], ConnectionError("no model")),
    ],
    ids=[
        "success",
        "failure",
        "unknown tool",
        "wrong arguments",
        "no model",
        "no model after a failure",
    ],
)
async def test_as_before(model, stream, clock, monkeypatch):
    """Where there is no way on, updates, messages, exceptions and spans are those of the framework alone."""
    seen: list[list[object]] = []
    for attached in ([], [Replanned(engine=repairing(clock))]):
        spans = Spans()
        monkeypatch.setattr(trace, "get_tracer", tracing(spans))
        made = model()
        agent = Agent(
            made,
            name="a",
            tools=[broken, search_archive, picture, nothing, raw],
            middleware=attached,
        )
        said: list[object] = []
        try:
            if stream:
                updates = agent.run("x?", stream=True)
                said += [shape(update.contents) async for update in updates]
                said.append((await updates.get_final_response()).text)
            else:
                said += [shape(message.contents) for message in (await agent.run("x?")).messages]
        except Exception as error:  # noqa: BLE001 - compared
            said += [type(error), str(error)]
        shown = [shape(message.contents) for messages in made.shown for message in messages]
        # Tools of one answer are executed at once, in threads, and end in any order.
        seen.append([*said, shown, sorted(span.name for span in spans.finished)])
    assert seen[0] == seen[1]


def asks(context: Any) -> Any:
    """A request of middleware for the approval of a call."""
    call_id = context.metadata["call_id"]
    asked = Content.from_function_call(
        call_id, context.function.name, arguments=dict(context.arguments)
    )
    return Content.from_function_approval_request(call_id, asked)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "raised",
    [None, MiddlewareTermination(), MiddlewareFailure("unsafe"), UserInputRequiredException([])],
)
async def test_control_flow(raised, stream, clock):
    """Requests for approvals by middleware, and exceptions that are control flow, do what they do without an engine."""

    @function_middleware
    async def controlling(context: Any, call_next: Any) -> None:
        context.result = "enough" if raised else asks(context)
        if raised is not None:
            raise raised

    class Providing(ContextProvider):  # type: ignore[misc]
        async def before_run(self, *, context: Any, **_: Any) -> None:
            context.extend_middleware("test", [controlling])

    seen = []
    for attached in ([], [Replanned(WEB, engine=repairing(clock))]):
        agent = Agent(
            calls("search"),
            tools=[search, search_archive],
            middleware=attached,
            context_providers=[Providing("test")],
        )
        try:
            response = await play(agent, stream)
            seen.append(
                [
                    outputs(response),
                    response.text,
                    [each.type for each in response.user_input_requests],
                ]
            )
        except MiddlewareFailure as error:
            seen.append([error])
    assert seen[0] == seen[1]


@pytest.mark.parametrize(("stream", "fails"), [(False, False), (True, False), (False, True)])
async def test_approval(stream, fails, tmp_path):
    """A run that requests an approval pauses its session; those that resume it execute the call until it is done."""
    executed: list[str] = []

    @tool(approval_mode="always_require")
    def pay(query: str) -> list[Any]:
        executed.append(query)
        if fails and len(executed) == 1:
            raise LookupError("no such account")
        return [
            Content.from_text("paid"),
            Content.from_uri("https://example.org/x.pdf", media_type="application/pdf"),
        ]

    def engine() -> ReplanningEngine:
        return ReplanningEngine(["repair"], store=SqliteStore(tmp_path / "runs.db"))

    def agent(*steps: Any) -> Any:
        return Agent(
            Model(*steps), tools=[pay, search_archive], middleware=[Replanned(engine=engine())]
        )

    session = AgentSession()
    stopped = await play(agent([call("search_archive")], [call("pay", 1)]), stream, session=session)
    assert statuses(engine()) == ["paused"]
    answer = stopped.user_input_requests[0].to_function_approval_response(True)
    saved = json.dumps(session.to_dict())
    with pytest.raises(ConnectionError):  # after the payment
        await play(
            agent(ConnectionError("no model")),
            stream,
            answer,
            session=AgentSession.from_dict(json.loads(saved)),
        )
    assert statuses(engine()) == ["paused"]
    session = AgentSession.from_dict(json.loads(saved))
    response = await play(agent(), stream, answer, session=session)
    [*_, result] = [each for each in contents_of(response) if each.type == "function_result"]
    assert [item.text or item.uri for item in result.items] == ["paid", "https://example.org/x.pdf"]
    assert executed == ["x"] * (2 if fails else 1)
    assert statuses(engine()) == ["succeeded"]
    for old in (session, AgentSession.from_dict(json.loads(saved))):  # which continue nothing
        await play(agent([call("search_archive", 2)]), stream, session=old)
    assert statuses(engine()) == ["succeeded"] * 3


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("restored", [False, True])
async def test_approval_that_is_given_twice(restored, lost, clock):
    """An approval that comes twice executes its call once; it answers no question about a call in doubt."""
    executed: list[str] = []

    @tool(approval_mode="always_require")
    def pay(query: str) -> str:
        executed.append(query)
        if lost:
            raise ConnectionResetError
        return "paid"

    attached = Replanned({"pay": "web", "search_archive": "web"}, engine=repairing(clock))
    agent = Agent(Model([call("pay")]), tools=[pay, search_archive], middleware=[attached])
    session = agent.create_session()
    stopped = await agent.run("go", session=session)
    saved = session.to_dict()
    for _ in range(2):
        agent.client.steps = ["done"]
        session = AgentSession.from_dict(saved) if restored else session
        answer = stopped.user_input_requests[0].to_function_approval_response(True)
        response = await agent.run(answer, session=session)
        assert not any("archive" in output for output in outputs(response))
    assert executed == ["x"]


@pytest.mark.parametrize("approved", [True, False])
async def test_question(approved, clock):
    """A question of the engine is a request for an approval of the call, which is carried out, or withdrawn."""
    engine = repairing(clock)
    tools, capabilities = [search, delete], {"search": "web", "delete": "web"}
    agent = Agent(calls("search"), tools=tools, middleware=[Replanned(capabilities, engine=engine)])
    session = agent.create_session()
    [request] = (await agent.run("x?", session=session)).user_input_requests
    [question] = request.additional_properties["replanning"]
    assert (question["question"], statuses(engine)) == (engine.pending()[0].id, ["paused"])
    agent.client.steps = ["done"]
    response = await agent.run(request.to_function_approval_response(approved), session=session)
    assert outputs(response) == (["x is deleted"] if approved else outputs(response))
    assert (response.text, engine.pending(), statuses(engine)) == ("done", [], ["succeeded"])


async def test_function_middleware(clock):
    """Function middleware sees a call once, and a tool that stands in for another one as a call of its own, which it may stop."""
    seen: list[tuple[str, object]] = []

    class Watching(FunctionMiddleware):  # type: ignore[misc]
        async def process(self, context: Any, call_next: Any) -> None:
            seen.append((context.function.name, dict(context.arguments)))
            await call_next()

    @function_middleware
    async def guarding(context: Any, call_next: Any) -> None:
        if context.function.name == "delete":
            raise MiddlewareTermination("forbidden")
        await call_next()
        if context.function.name == "picture":
            context.result = asks(context)

    async def shouting(context: FunctionInvocationContext, call_next: Any) -> None:
        await call_next()
        context.result = [Content.from_text(context.result[0].text.upper())]

    @chat_middleware
    async def chatting(context: Any, call_next: Any) -> None:
        await call_next()

    failed = "no answer about x"
    for other, expected in (
        (delete, failed),
        (picture, failed),
        (search_archive, "X, FROM THE ARCHIVE"),
    ):
        seen.clear()
        tools = [search, other]
        stated: Any = {"search": "web", other.name: {"capability": "web", "dangerous": False}}
        attached = Replanned(stated, engine=repairing(clock))
        rest = [guarding, shouting, chatting]
        agent = Agent(calls("search"), tools=tools, middleware=[attached, Watching(), *rest])
        assert expected in outputs(await agent.run("x?"))[0]
        assert {name for name, _ in seen} == {each.name for each in tools}
        assert [name for name, _ in seen].count("search") == 1


@pytest.mark.parametrize("how", ["cancel", "close", "leave"])
async def test_cancellation(how, clock):
    """A run that is cancelled, or whose stream is closed, leaves its session paused."""
    started = anyio.Event()

    @tool
    async def endless(query: str) -> str:
        started.set()
        await anyio.sleep_forever()
        return query

    engine = repairing(clock)
    model = (
        Model([call("search_archive")], [call("endless")])
        if how == "cancel"
        else calls("search_archive")
    )
    agent = Agent(model, tools=[endless, search_archive], middleware=[Replanned(engine=engine)])
    if how == "cancel":
        async with anyio.create_task_group() as group:
            group.start_soon(agent.run, "x?")
            await started.wait()
            group.cancel_scope.cancel()
    else:
        stream = agent.run("x?", stream=True)
        async for update in stream:
            if update.contents[0].type == "function_result":
                break
        await (stream.close() if how == "close" else stream.__aiter__().close())
    assert statuses(engine) == ["paused"]


async def test_mcp_tools(clock):
    """A tool of an MCP server takes the place of a function."""
    pytest.importorskip("mcp")
    server = MCPStdioTool("server", sys.executable, args=[str(SERVER)])
    function, stated = FunctionTool(name="find", func=search.func), {"find": "web", "search": "web"}
    attached = Replanned(stated, engine=repairing(clock))
    async with Agent(calls("find"), tools=[server, function], middleware=[attached]) as agent:
        assert outputs(await agent.run("x?")) == ["done"]


@pytest.mark.parametrize("inner", [False, True])
async def test_agents_as_tools(inner, clock):
    """An agent that is a tool is replaced like any other; its own tools are, too, if it is attached itself."""
    engine = repairing(clock)
    attached = [Replanned(WEB, engine=engine)]
    child = Agent(calls("search") if inner else Model(PermissionError("no key")), name="child",
                  tools=[search, search_archive], middleware=attached if inner else [])  # fmt: skip
    backup = FunctionTool(
        name="backup",
        func=lambda task: f"{task}, by hand",
        input_model=child.as_tool().parameters(),
    )
    stated = {"child": "expert", "backup": "expert"}
    parent = Agent(
        Model([call("child", task="x")]),
        name="parent",
        tools=[child.as_tool(propagate_session=True), backup],
        middleware=[Replanned(stated, engine=engine)],
    )
    session = parent.create_session()
    assert outputs(await parent.run("x?", session=session)) == ["done" if inner else "x, by hand"]
    assert statuses(engine) == ["succeeded"] * (2 if inner else 1)
    assert not [key for key in session.state if key.startswith("replanning")]


async def test_workflow(clock):
    """An agent in a workflow has its sessions as elsewhere."""
    engine = repairing(clock)
    agent = Agent(
        calls("search"),
        name="a",
        tools=[search, search_archive],
        middleware=[Replanned(WEB, engine=engine)],
    )
    workflow = WorkflowBuilder(start_executor=agent, output_from=[agent]).build()
    [response] = (await workflow.run("x?")).get_outputs()
    assert outputs(response) == ["x, from the archive"]
    assert statuses(engine) == ["succeeded"]


@pytest.mark.parametrize("stream", [False, True])
async def test_trace(stream, clock, monkeypatch):
    """Spans of tools are below those of attempts, which are below the run and the agent: one trace."""
    spans = Spans()
    monkeypatch.setattr(trace, "get_tracer", tracing(spans))
    engine = repairing(clock, tracer_provider=spans.provider)
    agent = Agent(
        calls("search"),
        name="a",
        tools=[search, search_archive],
        middleware=[Replanned(WEB, engine=engine)],
    )
    agent.client.steps = [[call("search")], "done"]
    await play(agent, stream)
    above = ["replanning.attempt", "replanning.run", "invoke_agent a"]
    assert spans.path("execute_tool search_archive") == above


@pytest.mark.parametrize("stream", [False, True])
async def test_session_that_cannot_go_on(stream, clock):
    """A session that was aborted, that another process owns, or whose tools do not exist ends the run of the agent."""
    engine = make_engine(lambda request: [alternative(AbortRun(reason="enough"))], clock=clock)
    agent = Agent(
        Model([call("search")], [call("search", 1)]),
        tools=[search],
        middleware=[Replanned(engine=engine)],
    )
    with pytest.raises(MiddlewareFailure) as raised:
        await play(agent, stream)
    assert isinstance(raised.value.__cause__, NotRunning)
    assert statuses(engine) == ["aborted"]

    agent = Agent(
        calls("search"), tools=[search], middleware=[Replanned({"serch": "web", "find": "web"})]
    )
    with pytest.raises(
        MiddlewareFailure, match=r"no tool called 'serch'.*search.*no tool called 'find'"
    ) as raised:
        await play(agent, stream)
    assert isinstance(raised.value.__cause__, ValueError)

    engine = repairing(clock)
    agent = Agent(
        calls("search"), tools=[search], middleware=[Replanned(engine=engine, objective="busy")]
    )
    session = agent.create_session()
    async with engine.session("busy") as busy:
        session.state["replanning"] = busy.run.id
        with pytest.raises(MiddlewareFailure) as raised:
            await play(agent, stream, session=session)
        assert isinstance(raised.value.__cause__, RunOwned)


@pytest.mark.filterwarnings("ignore:.*add_tools is experimental")
async def test_tools_of_a_later_step(clock):
    """A tool that another one adds to the agent is tried again, but not replaced."""

    @tool
    async def load(query: str, ctx: FunctionInvocationContext) -> str:
        ctx.add_tools([search])
        return "loaded"

    agent = Agent(
        Model([call("load")], [call("search", 1)]),
        tools=[load, search_archive],
        middleware=[Replanned(engine=repairing(clock))],
    )
    [_, output] = outputs(await agent.run("x?"))
    assert "no answer about x" in output


def test_other_framework(monkeypatch):
    """Without the framework, or with one that works in another way, the module names the extra that installs it."""
    monkeypatch.delitem(sys.modules, "replanning.integrations.agent_framework")
    older = {
        "FunctionInvocationContext": type("Older", (), {}),
        "function_middleware": lambda function: function,
    }
    for name, value in older.items():
        with monkeypatch.context() as patch:
            patch.setattr(f"agent_framework.{name}", value)
            with pytest.raises(ImportError, match=r"replanning\[agent-framework\].*middleware"):
                import_module("replanning.integrations.agent_framework")
    monkeypatch.setitem(sys.modules, "agent_framework", None)
    with pytest.raises(ImportError, match=r"replanning\[agent-framework\]"):
        import_module("replanning.integrations.agent_framework")
