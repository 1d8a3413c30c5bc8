"""Agents of the OpenAI Agents SDK with a scripted model: with an engine and without one."""

import sys
from importlib import import_module
from typing import Any

import anyio
import pytest

pytest.importorskip("agents")

from agents import (
    Agent,
    AgentHooks,
    GuardrailFunctionOutput,
    Runner,
    RunState,
    ToolGuardrailFunctionOutput,
    ToolOutputGuardrailTripwireTriggered,
    UserError,
    function_tool,
    handoff,
    input_guardrail,
    set_trace_processors,
    tool_output_guardrail,
)
from agents.mcp import MCPServer
from agents.testing import ScriptedModel, assistant_message, function_call
from agents.tool import FunctionTool, ToolOutputImage, ToolOutputText
from agents.tool_context import ToolContext
from agents.tracing import TracingProcessor
from mcp.types import CallToolResult, TextContent, Tool
from pydantic import BaseModel

from replanning import ReplanningEngine
from replanning.changes import AbortRun
from replanning.errors import NotRunning
from replanning.integrations.openai_agents import replanned
from replanning.journal import AttemptFailed, AttemptSucceeded, SqliteStore
from replanning.testing import VirtualClock
from tests.support.asyncio_only import anyio_backend  # noqa: F401 - a fixture
from tests.support.runs import alternative, make_engine, skipping
from tests.support.tracing import Spans


class Recorder(TracingProcessor):  # type: ignore[misc] # its types may not be installed
    """Spans of the framework, in the order of their ends."""

    def __init__(self) -> None:
        self.ended: list[dict[str, Any]] = []

    def on_span_end(self, span: Any) -> None:
        self.ended.append(span.export())

    def on_trace_start(self, trace: Any) -> None: ...
    def on_trace_end(self, trace: Any) -> None: ...
    def on_span_start(self, span: Any) -> None: ...
    def shutdown(self) -> None: ...
    def force_flush(self) -> None: ...

    @property
    def shape(self) -> list[tuple[object, ...]]:
        """Types, names and errors of the spans, with those of their parents."""
        by_id = {span["id"]: span for span in self.ended}

        def named(span: Any) -> tuple[object, object]:
            return span["span_data"]["type"], span["span_data"].get("name")

        return [
            (
                *named(span),
                span["error"],
                named(by_id[span["parent_id"]]) if span["parent_id"] in by_id else None,
            )
            for span in self.ended
        ]


@pytest.fixture(autouse=True)
def recorder() -> Recorder:
    """What the framework traces; nothing is sent anywhere."""
    made = Recorder()
    set_trace_processors([made])
    return made


def call_of(name: str, text: str = '{"query": "x"}', number: int = 0) -> Any:
    """A call of a tool by the model."""
    return function_call(name, text, call_id=f"call-{number}")


def calls(
    *names: str, text: str = '{"query": "x"}', done: str = "done", **options: Any
) -> ScriptedModel:
    """A model that calls these tools at once, then is done."""
    made = [call_of(name, text, index) for index, name in enumerate(names)]
    return ScriptedModel([made, [assistant_message(done)]], **options)


@function_tool
async def search(query: str) -> str:
    """Search."""
    raise ConnectionError(f"no answer about {query}")


@function_tool
def search_archive(query: str) -> str:
    """Search the archive."""
    return f"{query}, from the archive"


WEB = {"search": "web", "search_archive": "web"}


def agent_of(model: ScriptedModel, *tools: Any, **fields: Any) -> Agent[Any]:
    """An agent with these tools."""
    return Agent("helper", model=model, tools=list(tools), **fields)


def outputs(result: Any) -> list[Any]:
    """The outputs of tools, as the model sees them."""
    return [
        item["output"]
        for item in result.to_input_list()
        if item.get("type") == "function_call_output"
    ]


def repairing(clock: VirtualClock, **options: Any) -> ReplanningEngine:
    """An engine with the embedded provider."""
    return make_engine("repair", clock=clock, **options)


def statuses(engine: ReplanningEngine) -> list[str]:
    """How the runs of an engine stand."""
    return [info.status for info in engine.store.runs()]


async def test_skipped(clock):
    """About a call that is skipped, the model is told why."""
    async with replanned(
        agent_of(calls("search"), search), make_engine(skipping, clock=clock)
    ) as agent:
        assert outputs(await Runner.run(agent, "x?")) == [
            "task 'search-1' was skipped: nobody needs it"
        ]


@function_tool(failure_error_function=lambda context, error: f"{context.tool_name}: {error}")
async def explained(query: str) -> str:
    """Fail, and explain it to the model."""
    raise LookupError(f"nothing about {query}")


@function_tool(failure_error_function=None)
async def severe(query: str) -> str:
    """Fail, and end the run."""
    raise LookupError(f"nothing about {query}")


async def _plain(context: Any, text: str) -> str:
    raise LookupError(f"nothing in {text}")


plain = FunctionTool(
    "plain",
    "Fail as it is.",
    {"type": "object", "properties": {}},
    _plain,
    strict_json_schema=False,
)


@pytest.mark.parametrize("text", ['{"query": "x"}', "{", "[]", "{}", '{"query": 1}'])
@pytest.mark.parametrize(
    "tool", [search, search_archive, explained, severe, plain], ids=lambda tool: tool.name
)
async def test_same_as_without(tool, text, clock, recorder):
    """Where there is no way on, outputs, exceptions, events and spans are those of the framework alone."""

    async def play(agent: Agent[Any]) -> list[object]:
        seen: list[object] = []
        recorder.ended.clear()
        try:
            stream = Runner.run_streamed(agent, "x?")
            seen += [
                (event.type, getattr(event, "name", "")) async for event in stream.stream_events()
            ]
            seen += [stream.to_input_list(), stream.final_output]
        except Exception as error:  # noqa: BLE001 - compared
            seen += [type(error), str(error), type(error.__cause__)]
        return [*seen, recorder.shape]

    alone = await play(agent_of(calls(tool.name, text=text), tool))
    engine = repairing(clock)
    async with replanned(agent_of(calls(tool.name, text=text), tool), engine) as agent:
        assert await play(agent) == alone


async def test_changes_of_the_agent(clock):
    """What changes in an agent during the block is heeded, tools too; its own tools are given the agent."""
    seen = []

    @function_tool
    async def grow(context: ToolContext[Any], query: str) -> str:
        seen.append(context.agent is agent)
        agent.tools.append(search_archive)
        agent.tools.remove(grow)
        agent.instructions = "Be brief."
        return query

    model = ScriptedModel(
        [[call_of("grow")], [call_of("search_archive", number=1)], [assistant_message("done")]]
    )
    agent = agent_of(model, grow)
    engine = repairing(clock)
    async with replanned(agent, engine):
        result = await Runner.run(agent, "x?")
    assert outputs(result) == ["x", "x, from the archive"]
    assert model.calls[-1].system_instructions == "Be brief."
    assert (result.last_agent is agent, seen) == (True, [True])
    [run] = engine.store.runs()
    tools = [entry.task.tool or entry.task.name for entry in engine.history(run.run).replay()]
    assert tools == ["grow", "search_archive"]


async def test_clone(clock):
    """A clone of an attached agent is attached."""
    agent = agent_of(calls("search"), search, search_archive)
    async with replanned(agent, repairing(clock), capabilities=WEB) as attached:
        clone = attached.clone(name="other")
        assert outputs(await Runner.run(clone, "x?")) == ["x, from the archive"]
    assert (clone.name, clone == agent) == ("other", False)


async def test_blocks_at_once(clock):
    """Blocks of one agent that are open at once have a session each, and a run outside of them has none."""
    agent = Agent(
        "helper",
        model=ScriptedModel(
            [step for _ in range(3) for step in ([call_of("search")], [assistant_message("done")])]
        ),
        tools=[search, search_archive],
    )
    engines = [repairing(clock), repairing(clock)]
    opened = [anyio.Event(), anyio.Event()]
    turns = [anyio.Event(), anyio.Event()]
    told: list[object] = []

    async def work(number: int) -> None:
        async with replanned(agent, engines[number], capabilities=WEB):
            opened[number].set()
            await turns[number].wait()
            told.append(outputs(await Runner.run(agent, "x?")))
        turns[-1].set()

    async with anyio.create_task_group() as group:
        group.start_soon(work, 0)
        group.start_soon(work, 1)
        await opened[0].wait()
        await opened[1].wait()
        told.append(outputs(await Runner.run(agent, "x?")))
        turns[0].set()
    apology = ["An error occurred while running the tool. Please try again."]
    archived = ["x, from the archive"]
    assert told == [apology, archived, archived]
    assert [len(list(engine.store.runs())) for engine in engines] == [1, 1]


@function_tool(needs_approval=True)
async def risky(query: str) -> str:
    """Do something that a person must approve."""
    return query


async def test_stream_that_waits_while_a_guardrail_runs(clock):
    """A stream that waits for an approval leaves its session paused, whichever other agents have ended meanwhile."""

    @input_guardrail
    async def check(context: Any, agent: Any, given: Any) -> GuardrailFunctionOutput:
        judge = agent_of(ScriptedModel([[assistant_message("fine")]]))
        await Runner.run(judge, "is it fine?")
        return GuardrailFunctionOutput(None, tripwire_triggered=False)

    engine = repairing(clock)
    agent = agent_of(calls("risky"), risky, input_guardrails=[check])
    async with replanned(agent, engine, thread="talk"):
        stream = Runner.run_streamed(agent, "x?")
        async for _ in stream.stream_events():
            pass
        assert len(stream.interruptions) == 1
    assert statuses(engine) == ["paused"]


async def test_block_within_a_tool(clock):
    """A block that a tool opens has a session of its own, which ends with the run in it."""
    engine = repairing(clock)
    inner = agent_of(calls("search"), search, search_archive)

    @function_tool
    async def ask(query: str) -> str:
        async with replanned(inner, engine, capabilities=WEB, thread="inner"):
            return str(outputs(await Runner.run(inner, query)))

    async with replanned(agent_of(calls("ask"), ask), engine, thread="outer") as agent:
        assert outputs(await Runner.run(agent, "x?")) == ["['x, from the archive']"]
    assert statuses(engine) == ["succeeded", "succeeded"]


async def test_streaming(clock):
    """A stream has the events of a run in which nothing failed, with the result of the substitute."""
    original = agent_of(calls("search"), search, search_archive)
    async with replanned(original, repairing(clock), capabilities=WEB) as agent:
        seen = [
            (event.name, getattr(event.item, "output", ""))
            async for event in Runner.run_streamed(agent, "x?").stream_events()
            if event.type == "run_item_stream_event"
        ]
    assert seen == [
        ("tool_called", ""),
        ("tool_output", "x, from the archive"),
        ("message_output_created", ""),
    ]


async def test_cancellation(clock):
    """A run that is cancelled leaves its session paused, and its call interrupted."""
    started = anyio.Event()

    @function_tool
    async def endless(query: str) -> str:
        started.set()
        await anyio.sleep_forever()
        return query

    engine = repairing(clock)

    async def work() -> None:
        async with replanned(agent_of(calls("endless"), endless), engine) as agent:
            await Runner.run(agent, "x?")

    async with anyio.create_task_group() as group:
        group.start_soon(work)
        await started.wait()
        group.cancel_scope.cancel()
    assert statuses(engine) == ["paused"]


async def test_timeout(clock):
    """A tool without effect that exceeds its own timeout is replaced; otherwise the framework sees the timeout."""

    @function_tool(name_override="search", timeout=0.001)
    async def slow(query: str) -> str:
        await anyio.sleep_forever()
        return query

    @function_tool(name_override="search", timeout=0.001, timeout_behavior="raise_exception")
    async def slow_and_severe(query: str) -> str:
        await anyio.sleep_forever()
        return query

    @function_tool(
        name_override="search",
        timeout=0.001,
        timeout_error_function=lambda context, error: "too slow",
    )
    async def slow_and_explained(query: str) -> str:
        await anyio.sleep_forever()
        return query

    reading: dict[str, Any] = {**WEB, "search": {"capability": "web", "effect": "none"}}
    timed_out = "Tool 'search' timed out after 0.001 seconds."
    for capabilities, told in ((reading, "x, from the archive"), (WEB, timed_out)):
        agent = agent_of(calls("search"), slow, search_archive)
        async with replanned(agent, repairing(clock), capabilities=capabilities) as attached:
            assert outputs(await Runner.run(attached, "x?")) == [told]
    for tool in (slow, slow_and_severe, slow_and_explained):
        seen = []
        async with replanned(agent_of(calls("search"), tool), repairing(clock)) as agent:
            for each in (agent_of(calls("search"), tool), agent):
                try:
                    seen.append(outputs(await Runner.run(each, "x?")))
                except Exception as error:  # noqa: BLE001 - compared
                    seen.append([str(error)])
        assert seen[0] == seen[1]


async def test_tool_use_behavior(clock):
    """The result of a substitute is the final output where that of the first tool is."""
    agent = agent_of(
        calls("search"), search, search_archive, tool_use_behavior="stop_on_first_tool"
    )
    engine = repairing(clock)
    async with replanned(agent, engine, capabilities=WEB) as wrapped:
        assert (await Runner.run(wrapped, "x?")).final_output == "x, from the archive"
    assert statuses(engine) == ["succeeded"]


def triage_of(specialist: Any) -> Agent[Any]:
    """An agent that hands over to another one."""
    model = ScriptedModel([[function_call("transfer_to_helper", "{}", call_id="over")]])
    return Agent("triage", model=model, handoffs=[specialist])


@pytest.mark.parametrize("explicit", [False, True])
async def test_handoffs(explicit, clock):
    """The tools of an agent that is handed over to are replaced as well, also if agents hand over in a circle."""
    helper = agent_of(calls("search"), search, search_archive)
    triage = triage_of(handoff(helper) if explicit else helper)
    helper.handoffs = [triage]
    async with replanned(
        triage, repairing(clock), capabilities=WEB, agents=[helper] if explicit else []
    ) as agent:
        result = await Runner.run(agent, "x?")
        assert outputs(result)[-1] == "x, from the archive"
        assert result.last_agent is helper
        assert agent is triage


async def test_handoff_to_others(clock):
    """An agent that was not named and is reached through `handoff(…)` has tools that are tried again."""
    attempts = 0

    @function_tool
    async def flaky(query: str) -> str:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise ConnectionError("the service is slow")
        return query

    async with replanned(
        triage_of(handoff(agent_of(calls("flaky"), flaky))), repairing(clock)
    ) as agent:
        assert outputs(await Runner.run(agent, "x?"))[-1] == "x"


@function_tool(needs_approval=True)
async def delete(query: str) -> str:
    """Delete."""
    return f"{query} is deleted"


async def test_approval(clock, tmp_path):
    """A run that waits for an approval pauses its session; resumed, even twice, it executes the call once."""
    executed = 0

    @function_tool(needs_approval=True)
    async def pay(query: str) -> str:
        nonlocal executed
        executed += 1
        return f"{query} is paid"

    def engine() -> ReplanningEngine:
        return repairing(clock, store=SqliteStore(tmp_path / "runs.db"))

    async with replanned(agent_of(calls("pay"), pay), engine(), thread="a/b") as agent:
        result = await Runner.run(agent, "x?")
        saved = result.to_state().to_string()
    assert statuses(engine()) == ["paused"]

    async def resume(*steps: Any) -> list[object]:
        async with replanned(agent_of(ScriptedModel(steps), pay), engine(), thread="a/b") as agent:
            state = await RunState.from_string(agent, saved)
            state.approve(state.get_interruptions()[0])
            return outputs(await Runner.run(agent, state))

    with pytest.raises(RuntimeError, match="no connection"):
        await resume(RuntimeError("no connection"))
    assert statuses(engine()) == ["paused"]
    assert await resume([assistant_message("done")]) == ["x is paid"]
    assert statuses(engine()) == ["succeeded"]
    assert executed == 1


async def test_approvals_one_after_another(clock, tmp_path):
    """A session stays paused until a run has its final output, however often it is resumed, by agents as tools as well."""
    saved, done = "", []
    steps = [
        [call_of("delete", number=1)],
        [call_of("delete", number=2)],
        [assistant_message("done")],
    ]
    for nested in (False, True):
        for step in steps:
            inner = agent_of(ScriptedModel([step]), delete)
            tool, model = (
                inner.as_tool("assistant", "Delete."),
                ScriptedModel([[assistant_message("nested")]]),
            )
            if not saved:
                model = calls("assistant", text='{"input": "x"}')
            engine = repairing(clock, store=SqliteStore(tmp_path / f"{nested}.db"))
            async with replanned(
                agent_of(model, tool) if nested else inner, engine, thread="a/b"
            ) as agent:
                state: Any = "x?"
                if saved:
                    state = await RunState.from_string(agent, saved)
                    assert (
                        await Runner.run(agent, state)
                    ).interruptions  # nothing was approved yet
                    state.approve(state.get_interruptions()[0])
                result = await Runner.run(agent, state)
                saved = result.to_state().to_string() if result.interruptions else ""
            done.append((statuses(engine), result.final_output))
    assert done == [
        (["paused"], None),
        (["paused"], None),
        (["succeeded"], "done"),
        (["paused"], None),
        (["paused"], None),
        (["succeeded"], "nested"),
    ]


async def test_approval_by_a_function(clock):
    """A tool whose approval depends on its arguments stays as it is, and says so if it has a capability."""

    async def is_risky(context: Any, arguments: Any, call_id: str) -> bool:
        return bool(arguments["query"] == "x")

    @function_tool(needs_approval=is_risky)
    async def act(query: str) -> str:
        return query

    async with replanned(agent_of(calls("act"), act), repairing(clock)) as agent:
        assert agent.tools == [act]
        assert len((await Runner.run(agent, "x?")).interruptions) == 1
    with pytest.raises(ValueError, match="act"):
        async with replanned(agent, repairing(clock), capabilities={"act": "web"}):
            pass


@pytest.mark.parametrize("verdict", ["allow", "reject_content", "raise_exception"])
async def test_guardrails_of_a_substitute(verdict, clock):
    """A substitute is guarded as if the model had called it."""

    @tool_output_guardrail
    def guard(data: Any) -> ToolGuardrailFunctionOutput:
        if verdict == "reject_content":
            return ToolGuardrailFunctionOutput.reject_content("secret")
        return getattr(ToolGuardrailFunctionOutput, verdict)()

    @function_tool(tool_output_guardrails=[guard], name_override="search_archive")
    def guarded(query: str) -> str:
        return f"{query}, guarded"

    seen: object
    try:
        async with replanned(
            agent_of(calls("search"), search, guarded), repairing(clock), capabilities=WEB
        ) as agent:
            [seen] = outputs(await Runner.run(agent, "x?"))
    except ToolOutputGuardrailTripwireTriggered as error:
        seen = error.guardrail
    expected = {"allow": "x, guarded", "raise_exception": guard}
    assert seen == expected.get(
        verdict, "An error occurred while running the tool. Please try again."
    )


async def test_disabled_substitute(clock):
    """A tool that is not enabled does not stand in for another one."""
    for is_enabled in (False, lambda context, agent: False):

        @function_tool(name_override="search_archive", is_enabled=is_enabled)
        def hidden(query: str) -> str:
            return query

        capabilities = WEB if callable(is_enabled) else {"search": "web"}
        async with replanned(
            agent_of(calls("search"), search, hidden), repairing(clock), capabilities=capabilities
        ) as agent:
            assert outputs(await Runner.run(agent, "x?"))[0].startswith("An error occurred")


async def test_agents_as_tools(clock):
    """An agent that is a tool is replaced when it fails, and asks for approvals within as before."""
    broken = agent_of(ScriptedModel([RuntimeError("no model")] * 3)).as_tool("search", "Search.")
    async with replanned(
        agent_of(calls("search", text='{"input": "x", "query": "x"}'), broken, search_archive),
        repairing(clock),
        capabilities=WEB,
    ) as agent:
        assert len(outputs(await Runner.run(agent, "x?"))) == 1
    inner = agent_of(calls("delete"), delete).as_tool("assistant", "Delete.")
    engine = repairing(clock)
    async with replanned(
        agent_of(calls("assistant", text='{"input": "x"}'), inner), engine, thread="r"
    ) as agent:
        result = await Runner.run(agent, "x?")
        state = result.to_state()
        state.approve(result.interruptions[0])
        assert outputs(await Runner.run(agent, state)) == ["done"]


async def test_one_trace(clock):
    """Spans of a tool are below those of its attempt, and the run is below the span of the caller."""
    spans = Spans()
    tracer = spans.provider.get_tracer("app")

    @function_tool(name_override="search_archive")
    async def traced(query: str) -> str:
        with tracer.start_as_current_span("within"):
            return query

    engine = repairing(clock, tracer_provider=spans.provider)
    with tracer.start_as_current_span("request"):
        async with replanned(
            agent_of(calls("search"), search, traced), engine, capabilities=WEB
        ) as agent:
            await Runner.run(agent, "x?")
    assert spans.path("within") == ["replanning.attempt", "replanning.run", "request"]


async def test_capability_of_no_tool(clock):
    """A capability of a tool that there is not is refused with a message."""
    with pytest.raises(
        ValueError, match="no attached function tool called 'serach'; did you mean 'search'"
    ):
        async with replanned(agent_of(calls("search"), search), capabilities={"serach": "web"}):
            pass


class Events(list[str], AgentHooks):  # type: ignore[misc] # its types may not be installed
    """Hooks of an agent that are false as long as they have noted nothing."""

    async def on_start(self, *args: Any) -> None:
        self.append("start")

    async def on_end(self, *args: Any) -> None:
        self.append("end")


async def test_hooks_that_are_false(clock):
    """The hooks of an agent are called, whatever their truth value is."""
    events = Events()
    agent = agent_of(calls("search_archive"), search_archive, hooks=events)
    async with replanned(agent, repairing(clock)) as attached:
        await Runner.run(attached, "x?")
    assert events == ["start", "end"]


class Server(MCPServer):  # type: ignore[misc] # its types may not be installed
    """A server of MCP in this process, whose search is broken."""

    @property
    def name(self) -> str:
        return "server"

    async def connect(self) -> None: ...
    async def cleanup(self) -> None: ...

    async def list_tools(self, run_context: Any = None, agent: Any = None) -> list[Any]:
        schema = {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        }
        return [
            Tool.model_validate({"name": name, "inputSchema": schema})
            for name in ("search", "search_archive")
        ]

    async def call_tool(self, tool_name: str, arguments: Any, meta: Any = None) -> Any:
        if tool_name == "search":
            raise ConnectionError("the service is down")
        return CallToolResult(
            content=[TextContent(type="text", text=f"{arguments['query']}, from the archive")]
        )

    async def list_prompts(self) -> Any: ...
    async def get_prompt(self, name: str, arguments: Any = None) -> Any: ...


async def test_mcp_servers(clock):
    """Tools of MCP servers are replaced as well, and say themselves why they fail where there is no way on."""
    seen = []
    for capabilities in (None, WEB):
        async with replanned(
            agent_of(calls("search"), mcp_servers=[Server()]),
            repairing(clock),
            capabilities=capabilities,
        ) as agent:
            seen += outputs(await Runner.run(agent, "x?"))
    [alone] = outputs(await Runner.run(agent_of(calls("search"), mcp_servers=[Server()]), "x?"))
    assert seen == [alone, [{"type": "input_text", "text": "x, from the archive"}]]


async def test_spans_of_mcp_servers(clock, recorder):
    """The spans of tools of MCP servers, and of their lists, are those of the framework alone."""
    agent = agent_of(calls("search_archive"), mcp_servers=[Server()])
    await Runner.run(agent, "x?")
    alone = recorder.shape
    assert ("mcp_tools", None) in [shape[:2] for shape in alone]
    recorder.ended.clear()
    agent = agent_of(calls("search_archive"), mcp_servers=[Server()])
    async with replanned(agent, repairing(clock)) as attached:
        recorder.ended.clear()
        await Runner.run(attached, "x?")
    assert recorder.shape == alone


class Ending(Server):
    """A server that ends with the first call of a tool."""

    is_over = False

    async def list_tools(self, run_context: Any = None, agent: Any = None) -> list[Any]:
        if self.is_over:
            raise ConnectionError("the server has ended")
        return await super().list_tools(run_context, agent)

    async def call_tool(self, tool_name: str, arguments: Any, meta: Any = None) -> Any:
        self.is_over = True
        return await super().call_tool(tool_name, arguments, meta)


async def test_an_mcp_server_that_ends(clock):
    """What stood in for a tool of a server that has ended reaches the model, although the server lists its tools no more."""

    @function_tool
    def by_hand(query: str) -> str:
        return f"{query}, by hand"

    agent = agent_of(calls("search"), by_hand, mcp_servers=[Ending()])
    stated = {"search": "web", "by_hand": "web"}
    async with replanned(agent, repairing(clock), capabilities=stated) as attached:
        result = await Runner.run(attached, "x?")
    assert (outputs(result), result.final_output) == (["x, by hand"], "done")
    with pytest.raises(ConnectionError):
        async with replanned(agent, repairing(clock)):
            pass


class Refusing(Server):
    """A server whose search answers that it failed."""

    async def call_tool(self, tool_name: str, arguments: Any, meta: Any = None) -> Any:
        if tool_name != "search":
            return await super().call_tool(tool_name, arguments, meta)
        content = [TextContent(type="text", text="upstream 503")]
        return CallToolResult.model_validate({"content": content, "isError": True})


async def test_failure_that_an_mcp_server_reports(clock):
    """A result that says that it is an error is a failure; without a way on the model sees it as without an engine."""
    seen = []
    engine = repairing(clock)
    for capabilities in (None, WEB):
        agent = agent_of(calls("search"), mcp_servers=[Refusing()])
        async with replanned(agent, engine, capabilities=capabilities) as attached:
            seen += outputs(await Runner.run(attached, "x?"))
    [alone] = outputs(await Runner.run(agent_of(calls("search"), mcp_servers=[Refusing()]), "x?"))
    assert seen == [alone, [{"type": "input_text", "text": "x, from the archive"}]]
    assert alone == [{"type": "input_text", "text": "upstream 503"}]
    failures = [
        record.body.failure.message
        for run in engine.store.runs()
        for record in engine.store.read(run.run)
        if isinstance(record.body, AttemptFailed)
    ]
    assert failures == ["upstream 503", "upstream 503"]


async def test_model_is_not_asked_to_repeat_what_is_in_doubt(clock):
    """About a call that ran into its time limit the model is told that it may have taken effect."""

    @function_tool
    async def pay(query: str) -> str:
        await anyio.sleep_forever()
        return query

    agent = agent_of(calls("pay"), pay)
    async with replanned(agent, repairing(clock), capabilities={"pay": {"timeout": 5}}) as attached:
        [told] = outputs(await Runner.run(attached, "x?"))
    assert "ran into its deadline after 5 s" in told
    assert "whether 'pay' took effect is unknown" in told
    assert "try again" not in told


async def test_conversation(clock):
    """Several runs in one block are one session; after the block the agent is as before."""
    model = ScriptedModel(
        [step for _ in range(3) for step in ([call_of("search")], [assistant_message("done")])]
    )
    engine = repairing(clock)
    async with replanned(
        agent_of(model, search, search_archive), engine, capabilities=WEB
    ) as agent:
        first = await Runner.run(agent, "x?")
        second = await Runner.run(
            first.last_agent, [*first.to_input_list(), {"role": "user", "content": "y?"}]
        )
        assert outputs(second) == ["x, from the archive"] * 2
    assert statuses(engine) == ["succeeded"]
    assert outputs(await Runner.run(agent, "x?")) == [
        "An error occurred while running the tool. Please try again."
    ]


async def test_turns_of_a_thread(clock):
    """Each turn of a conversation is a session, and one in which nothing was left open is not resumed."""
    engine = repairing(clock)
    for turn in range(2):
        original = agent_of(calls("search"), search, search_archive)
        async with replanned(original, engine, capabilities=WEB, thread="talk") as agent:
            assert outputs(await Runner.run(agent, "x?")) == ["x, from the archive"]
        assert statuses(engine) == ["succeeded"] * (turn + 1)


async def test_run_that_was_aborted(clock):
    """A session that was aborted ends the run of the agent at its next call."""
    engine = make_engine(lambda request: [alternative(AbortRun(reason="enough"))], clock=clock)
    model = ScriptedModel([[call_of("explained", number=number)] for number in range(2)])
    with pytest.raises(UserError) as raised:
        async with replanned(agent_of(model, explained), engine) as agent:
            await Runner.run(agent, "x?")
    assert isinstance(raised.value.__cause__, NotRunning)
    assert statuses(engine) == ["aborted"]


def test_other_framework(monkeypatch):
    """Without the framework, or with one that works in another way, the module names the extra that installs it."""
    monkeypatch.delitem(sys.modules, "replanning.integrations.openai_agents")
    with monkeypatch.context() as patch:
        patch.setattr(FunctionTool, "__copy__", lambda tool: tool)
        with pytest.raises(
            ImportError, match=r"replanning\[openai-agents\].*copy of a function tool"
        ):
            import_module("replanning.integrations.openai_agents")
    monkeypatch.setitem(sys.modules, "agents", None)
    with pytest.raises(ImportError, match=r"replanning\[openai-agents\]"):
        import_module("replanning.integrations.openai_agents")


async def approve_twice(pay: Any, engine: ReplanningEngine, blocks: int) -> list[Any]:
    """The outputs of an approved state that is run twice."""

    def agent(*turns: Any) -> Agent:
        return Agent("payer", model=ScriptedModel(list(turns)), tools=[pay])

    call, done = [function_call("pay", {"query": "x"}, call_id="c1")], [assistant_message("done")]
    async with replanned(agent(call), engine, thread="t") as attached:
        saved = (await Runner.run(attached, "go")).to_state().to_string()

    async def approve(attached: Agent) -> list[Any]:
        state = await RunState.from_string(attached, saved)
        state.approve(state.get_interruptions()[0])
        return outputs(await Runner.run(attached, state))

    told: list[Any] = []
    for _ in range(blocks):
        async with replanned(agent(done, done), engine, thread="t") as attached:
            for _ in range(3 - blocks):
                told += await approve(attached)
    return told


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("blocks", [1, 2])
async def test_state_that_is_approved_twice(blocks, lost, tmp_path):
    """An approved state that is run twice executes its call once, in one block and in two of a thread, also one in doubt."""
    paid: list[str] = []

    @function_tool(needs_approval=True)
    async def pay(query: str) -> str:
        paid.append(query)
        if lost:
            raise ConnectionResetError
        return "paid"

    engine = ReplanningEngine(store=SqliteStore(tmp_path / "runs.db"))
    told = await approve_twice(pay, engine, blocks)
    assert paid == ["x"]
    assert lost or told == ["paid", "paid"]


class Receipt(BaseModel):
    """What a tool of a user returns."""

    total: int


@pytest.mark.parametrize(
    ("returned", "recorded"),
    [
        (ToolOutputText(text="paid"), {"type": "text", "text": "paid"}),
        (
            [ToolOutputText(text="paid"), ToolOutputImage(image_url="http://a/b.png")],
            [
                {"type": "text", "text": "paid"},
                {"type": "image", "image_url": "http://a/b.png", "file_id": None, "detail": None},
            ],
        ),
        (Receipt(total=3), "total=3"),
    ],
)
async def test_recorded_outputs(returned, recorded, tmp_path):
    """Contents of the framework, and objects of users, are recorded by content and text; the model gets the same after a resume."""

    @function_tool(needs_approval=True)
    def pay(query: str) -> Any:
        return returned

    engine = ReplanningEngine(store=SqliteStore(tmp_path / "runs.db"))
    first, again = await approve_twice(pay, engine, 2)
    assert first == again
    [output] = [
        record.body.output
        for run in engine.store.runs()
        for record in engine.store.read(run.run)
        if isinstance(record.body, AttemptSucceeded)
    ]
    assert output["value"] == recorded
    assert output.get("content", {"total": 3}) == {"total": 3}
