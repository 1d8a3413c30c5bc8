"""Agents of pydantic-ai whose tools the engine keeps alive, with the models that it has for tests."""

import importlib
import json
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import anyio
import pytest
from anyio import from_thread
from pydantic import BaseModel

pytest.importorskip("pydantic_ai")

from pydantic_ai import (
    Agent,
    ApprovalRequired,
    CallDeferred,
    DeferredToolRequests,
    DeferredToolResults,
    FunctionToolResultEvent,
    ModelRetry,
    RunContext,
    Tool,
    ToolApproved,
    ToolDenied,
    capture_run_messages,
)
from pydantic_ai.capabilities import HandleDeferredToolCalls, Instrumentation
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.messages import (
    BinaryContent,
    ModelMessage,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturn,
    ToolReturnPart,
    tool_return_content_ta,
)
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel
from pydantic_ai.models.instrumented import InstrumentationSettings
from pydantic_ai.usage import UsageLimits

from replanning import ReplanningEngine, Retry
from replanning.errors import CallFailed
from replanning.integrations.pydantic_ai import Replanned
from replanning.journal import AttemptSucceeded, RunEnded, SqliteStore
from replanning.plan.types import RunId
from tests.support.asyncio_only import anyio_backend  # noqa: F401 - a fixture
from tests.support.questions import archive_instead, asking
from tests.support.runs import make_engine, skipping
from tests.support.tracing import Spans

WEB = {"search": "web", "search_archive": "web"}


class Down(Exception):
    """A failure that does not pass."""


def search(query: str) -> str:
    """Search the web."""
    raise Down(query)


def search_archive(query: str) -> str:
    """Search the archive."""
    return f"{query}, from the archive"


def calling(*calls: tuple[str, dict[str, Any]], after: str = "done") -> FunctionModel:
    """A model that makes these calls at once, and then says what they returned."""

    def returned(messages: list[ModelMessage]) -> list[Any]:
        return [
            part.content for m in messages for part in m.parts if isinstance(part, ToolReturnPart)
        ]

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        if isinstance(messages[-1].parts[-1], ToolReturnPart):
            return ModelResponse([TextPart(f"{after}: {returned(messages)}")])
        return ModelResponse(
            [ToolCallPart(name, args, f"id{n}") for n, (name, args) in enumerate(calls)]
        )

    async def stream(messages: list[ModelMessage], info: AgentInfo) -> Any:
        if isinstance(messages[-1].parts[-1], ToolReturnPart):
            yield f"{after}: "
            yield str(returned(messages))
        else:
            for number, (name, args) in enumerate(calls):
                yield {number: DeltaToolCall(name, json.dumps(args), tool_call_id=f"id{number}")}

    return FunctionModel(answer, stream_function=stream)


ONE_SEARCH = ("search", {"query": "x"})
FOUND = "done: ['x, from the archive']"


def agent_of(
    model: FunctionModel,
    tools: Sequence[Any],
    engine: ReplanningEngine | None,
    *others: Any,
    **options: Any,
) -> Agent[Any, Any]:
    """An agent, attached to an engine if there is one."""
    names = {getattr(each, "name", "") or getattr(each, "__name__", "") for each in tools}
    stated = {name: capability for name, capability in WEB.items() if name in names}
    attached = [] if engine is None else [Replanned(stated, engine=engine)]
    return Agent(model, tools=tools, capabilities=[*others, *attached], **options)


def only_run(engine: ReplanningEngine) -> str:
    """The id of the only run in the store."""
    [run] = engine.store.runs()
    return str(run.run)


async def test_substitute(clock):
    """A call whose tool fails returns what another tool of its capability returns."""
    engine = make_engine("repair", clock=clock)
    result = await agent_of(calling(ONE_SEARCH), [search, search_archive], engine).run("find x")
    assert result.output == FOUND
    history = engine.history(result.run_id)
    assert history.status == "succeeded"
    assert len(history.events) == 1
    [opened, *_] = engine.store.read(result.run_id)
    assert opened.body.plan.goal.objective == "find x"


async def test_typed_arguments_and_dependencies(clock):
    """A substitute is validated and executed by the framework, with its own context and the dependencies of the run."""

    class Point(BaseModel):
        x: int

    def fly(to: Point, steps: int = 1) -> str:
        raise Down

    def walk(ctx: RunContext[str], to: Point, steps: int = 3) -> str:
        return f"{ctx.deps} {ctx.tool_name} {to.x} {type(to).__name__} {steps}"

    tools = [Tool(fly, metadata={"replanning": {"capability": "move"}}), walk]
    model = calling(("fly", {"to": {"x": 1}}))
    attached = Replanned({"walk": "move"}, engine=make_engine("repair", clock=clock))
    result = await Agent(model, tools=tools, deps_type=str, capabilities=[attached]).run(
        "go", deps="ada"
    )
    assert result.output == "done: ['ada walk 1 Point 1']"
    assert result.usage.tool_calls == 2


async def test_skipped(clock):
    """About a call that is skipped, the model is told why."""
    result = await agent_of(calling(ONE_SEARCH), [search], make_engine(skipping, clock=clock)).run(
        "find x"
    )
    assert "task 'search-1' was skipped: nobody needs it" in result.output


async def test_give_up(clock):
    """Where there is no way on, the agent ends with the exception of its tool, and its session is paused."""
    engine = make_engine("repair", clock=clock)
    with pytest.raises(Down) as raised:
        await agent_of(calling(ONE_SEARCH), [search], engine).run("find x")
    assert raised.value.args == ("x",)
    assert engine.history(only_run(engine)).status == "paused"


async def test_model_retry(clock):
    """A tool that asks the model to try again is heard; at its last attempt another tool takes its place."""
    asked = []

    def search(query: str) -> str:
        raise ModelRetry("say more")

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        asked.append(str(messages[-1].parts[-1].content))
        done = "archive" in asked[-1]
        return ModelResponse(
            [TextPart(asked[-1]) if done else ToolCallPart("search", {"query": "x"})]
        )

    engine = make_engine("repair", clock=clock)
    result = await agent_of(FunctionModel(answer), [search, search_archive], engine).run("find x")
    assert result.output == "x, from the archive"
    assert [said.split("\n")[0] for said in asked] == ["find x", "say more", "x, from the archive"]
    assert len(engine.history(result.run_id).events) == 1
    with pytest.raises(Exception, match="exceeded max retries"):
        await agent_of(FunctionModel(answer), [search], engine).run("find x")


async def test_time_limit_of_the_framework(clock):
    """A tool that exceeded the time limit of the framework may have taken effect: no other tool is executed, unless it only reads."""

    async def hang(query: str) -> str:
        await anyio.sleep_forever()
        return query

    archive = {"search_archive": "web"}
    for stated, found in (({}, False), ({"effect": "none"}, True)):
        tools = [Tool(hang, name="search", timeout=0.01, max_retries=int(found)), search_archive]
        fields: dict[str, Any] = {"search": {"capability": "web", **stated}, **archive}
        attached = Replanned(fields, engine=make_engine("repair", clock=clock))
        agent = Agent(calling(ONE_SEARCH), tools=tools, capabilities=[attached])
        if found:
            assert (await agent.run("find x")).output == FOUND
        else:
            with pytest.raises(Exception, match="exceeded max retries"):
                await agent.run("find x")


async def test_deferred_calls(clock):
    """Approvals and calls that are executed elsewhere stop the agent; the run that has the results resumes the session."""
    executed = []

    def remove(ctx: RunContext[None], path: str) -> str:
        if not ctx.tool_call_approved:
            raise ApprovalRequired(metadata={"path": path})
        executed.append(path)
        return f"{path} is gone"

    def compute(n: int) -> int:
        raise CallDeferred

    def drop(path: str) -> str:
        executed.append(path)
        return path

    tools = [remove, compute, Tool(drop, requires_approval=True), search, search_archive]
    model = calling(
        ("remove", {"path": "a"}), ("compute", {"n": 1}), ("drop", {"path": "b"}), ONE_SEARCH
    )
    engine = make_engine("repair", clock=clock)
    agent = agent_of(model, tools, engine, output_type=[str, DeferredToolRequests])
    stopped = await agent.run("clean")
    assert [each.tool_name for each in stopped.output.approvals] == ["remove", "drop"]
    assert stopped.output.metadata == {"id0": {"path": "a"}}
    run = only_run(engine)
    *_, left = engine.store.read(RunId(run))
    assert isinstance(left.body, RunEnded)
    assert left.body.status == "paused"
    expected = "the agent waits for the approval of 'remove', 'drop' and the results of 'compute'"
    assert left.body.reason == expected
    results = DeferredToolResults(approvals={"id0": True, "id2": True}, calls={"id1": 7})
    result = await agent.run(message_history=stopped.all_messages(), deferred_tool_results=results)
    assert sorted(executed) == ["a", "b"]
    assert "a is gone" in result.output
    assert "7" in result.output
    assert only_run(engine) == run
    assert engine.history(run).status == "succeeded"


@pytest.mark.parametrize(
    "verdict", [True, False, ToolDenied("no")], ids=["approved", "denied", "with words"]
)
async def test_question_as_an_approval(clock, tmp_path, verdict):
    """A question to a person is a request for an approval, which is carried out, or withdrawn, by the next run."""
    place = tmp_path / "history.db"
    tools = [search, search_archive]
    ways = [asking(clock, archive_instead, store=SqliteStore(place)) for _ in range(2)]
    options: dict[str, Any] = {"output_type": [str, DeferredToolRequests]}
    stopped = await agent_of(calling(ONE_SEARCH), tools, ways[0], **options).run("find x")
    [call] = stopped.output.approvals
    [question] = stopped.output.metadata[call.tool_call_id]["replanning"]["questions"]
    assert question["question"] == ways[1].pending()[0].id
    results = DeferredToolResults(approvals={call.tool_call_id: verdict})
    again = agent_of(calling(ONE_SEARCH), tools, ways[1], **options)
    result = await again.run(message_history=stopped.all_messages(), deferred_tool_results=results)
    assert ("archive" in result.output) is (verdict is True)
    assert not ways[1].pending()
    assert ways[1].history(only_run(ways[1])).status == "succeeded"


async def test_approval_at_once(clock):
    """A handler of deferred calls approves a question within the same run; approving the call alone answers none."""
    asked = []

    def approve(ctx: RunContext[None], requests: DeferredToolRequests) -> DeferredToolResults:
        asked.append([call.tool_name for call in requests.approvals])
        return requests.build_results(approve_all=True)

    engine = asking(clock, archive_instead)
    tools = [Tool(search, requires_approval=True), search_archive]
    attached = Replanned(engine=engine, approvals=True)
    handler = HandleDeferredToolCalls(approve)
    agent = Agent(
        calling(ONE_SEARCH),
        tools=tools,
        capabilities=[handler, attached],
        output_type=[str, DeferredToolRequests],
    )
    stopped = await agent.run("find x")
    assert asked == [["search"]]
    assert stopped.output.metadata["id0"]["replanning"]["questions"][0]["choices"] == [
        "the archive has it"
    ]
    asked.clear()
    result = await agent_of(
        calling(ONE_SEARCH),
        [search, search_archive],
        engine,
        handler,
        output_type=[str, DeferredToolRequests],
    ).run("find x")
    assert asked == [["search"]]
    assert result.output == FOUND


async def test_streams(clock):
    """Text is streamed as it comes, and each call has one result event, that of what replaced its tool."""
    agent = agent_of(
        calling(ONE_SEARCH), [search, search_archive], make_engine("repair", clock=clock)
    )
    async with agent.run_stream("find x") as stream:
        said = [text async for text in stream.stream_text(delta=True, debounce_by=None)]
    assert said == ["done: ", "['x, from the archive']"]
    async with agent.run_stream_events("find x") as events:
        results = [
            event.part.content
            async for event in events
            if isinstance(event, FunctionToolResultEvent)
        ]
    assert results == ["x, from the archive"]
    async with agent.iter("find x") as run:
        nodes = [type(node).__name__ async for node in run]
    assert nodes == [
        "UserPromptNode",
        "ModelRequestNode",
        "CallToolsNode",
        "ModelRequestNode",
        "CallToolsNode",
        "End",
    ]
    assert run.result is not None
    assert run.result.output == FOUND


async def test_cancellation(clock):
    """Cancelling the agent cancels its tools, and leaves the session paused; so does leaving its iteration."""
    engine, started, cancelled = make_engine("repair", clock=clock), anyio.Event(), []

    async def search(query: str) -> None:
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.append(query)

    agent = agent_of(calling(ONE_SEARCH), [search], engine)
    async with anyio.create_task_group() as group:
        group.start_soon(agent.run, "find x")
        await started.wait()
        group.cancel_scope.cancel()
    assert cancelled == ["x"]
    assert engine.history(only_run(engine)).status == "paused"
    async with agent_of(calling(ONE_SEARCH), [search_archive], engine).iter("find y") as run:
        async for _ in run:
            break
    assert {each.status for each in engine.store.runs()} <= {"paused"}


async def test_resume(clock, tmp_path):
    """A run that goes on with the messages of one that failed does not execute again what was done."""
    place, sent, broken = tmp_path / "history.db", [], [True]

    def mail(to: str) -> str:
        sent.append(to)
        return f"sent to {to}"

    def check(to: str) -> str:
        if broken[0]:
            raise Down
        return "checked"

    def attached() -> Agent[Any, Any]:
        engine = make_engine("repair", clock=clock, store=SqliteStore(place))
        return agent_of(
            calling(("mail", {"to": "ada"}), ("check", {"to": "ada"})),
            [Tool(mail, sequential=True), check],
            engine,
        )

    with capture_run_messages() as messages, pytest.raises(Down):
        await attached().run("write to ada")
    broken.clear()
    broken.append(False)
    [at] = [number for number, each in enumerate(messages) if isinstance(each, ModelResponse)]
    result = await attached().run(message_history=messages[: at + 1])
    assert result.output == "done: ['sent to ada', 'checked']"
    assert sent == ["ada"]
    [run] = SqliteStore(place).runs()
    assert (run.status, run.objective) == ("succeeded", "write to ada")


async def test_history_of_messages(clock):
    """Runs of one conversation are sessions of their own, also where the model gives its calls the same ids."""
    engine = make_engine("repair", clock=clock)
    agent = agent_of(calling(ONE_SEARCH), [search, search_archive], engine)
    first = await agent.run("find x")
    second = await agent.run("find x again", message_history=first.all_messages())
    assert second.output == "done: ['x, from the archive', 'x, from the archive']"
    assert {each.run for each in engine.store.runs()} == {first.run_id, second.run_id}


async def test_trace_in_one_piece(clock):
    """Spans of a session are below that of the run, and spans of tools, also of substitutes, below that of the call."""
    spans = Spans()
    provider = spans.provider
    engine = make_engine("repair", clock=clock, tracer_provider=provider)
    tracer = provider.get_tracer("test")

    def search_archive(query: str) -> str:
        with tracer.start_as_current_span("looking"):
            return query

    instrumented = Instrumentation(InstrumentationSettings(tracer_provider=provider))
    await agent_of(calling(ONE_SEARCH), [search, search_archive], engine, instrumented).run(
        "find x"
    )
    run = ["replanning.run", "invoke_agent agent"]
    assert spans.path("execute_tool search") == run[1:]
    looking = ["execute_tool search_archive", "replanning.attempt", *run]
    assert spans.path("looking") == looking
    [above] = spans.named("replanning.run")
    parents = [span.parent for span in spans.named("replanning.attempt")]
    assert parents == [above.context] * 2


async def test_stated_fields(clock):
    """What is stated of a tool, in the argument or in its metadata, counts: here attempts, and that another one costs less."""
    attempts = []

    def search(query: str) -> str:
        attempts.append(query)
        raise ConnectionError("reset")

    stated: dict[str, Any] = {
        "search": {"capability": "web", "retry": Retry(max_attempts=5)},
        "search_archive": "web",
    }
    attached = Replanned(stated, engine=make_engine("repair", clock=clock))
    dear = Tool(
        search_archive, name="dear", metadata={"replanning": {"capability": "web", "cost": 9}}
    )
    agent = Agent(
        calling(ONE_SEARCH), tools=[search, dear, search_archive], capabilities=[attached]
    )
    assert (await agent.run("find x")).output == FOUND
    assert len(attempts) == 5
    for wrong, message in (
        ({"search": {"speed": 1}}, "speed"),
        ({"serach": "web"}, "'serach'; did you mean 'search'"),
    ):
        with pytest.raises(ValueError, match=message):
            await Agent(calling(ONE_SEARCH), tools=[search], capabilities=[Replanned(wrong)]).run(
                "x"
            )


async def test_nested_agents(clock):
    """An agent that is a tool of another one has a session of its own, and what it spends counts for both."""
    engine = make_engine("repair", clock=clock)
    inner = agent_of(calling(ONE_SEARCH), [search, search_archive], engine)

    async def ask(ctx: RunContext[None], question: str) -> str:
        return str((await inner.run(question, usage=ctx.usage)).output)

    outer = agent_of(calling(("ask", {"question": "why"})), [ask], engine)
    result = await outer.run("ask")
    assert result.output == f"done: {[FOUND]}"
    assert result.usage.requests == 4
    assert {each.status for each in engine.store.runs()} == {"succeeded"}
    with pytest.raises(UsageLimitExceeded):
        await outer.run("ask", usage_limits=UsageLimits(request_limit=0))


def test_missing_framework(monkeypatch):
    """Without the framework, or with one that lacks what is relied on, importing says what to install."""
    for name in ("pydantic_ai.toolsets", "pydantic_ai.capabilities"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            patch.delitem(sys.modules, "replanning.integrations.pydantic_ai")
            with pytest.raises(ImportError, match=r"tested with 2\.68.*replanning\[pydantic-ai\]"):
                importlib.import_module("replanning.integrations.pydantic_ai")


async def test_approval_of_another_tool(clock):
    """The approval of a call is none of a tool that takes its place and asks for one itself, which then gets its own."""

    def search_archive(ctx: RunContext[None], query: str) -> str:
        if not ctx.tool_call_approved:
            raise ApprovalRequired(metadata={"asks": ctx.tool_name})
        return query

    engine = make_engine("repair", clock=clock)
    tools = [Tool(search, requires_approval=True), search_archive]
    agent = agent_of(calling(ONE_SEARCH), tools, engine, output_type=[str, DeferredToolRequests])
    result, asked = await agent.run("find x"), []
    while isinstance(result.output, DeferredToolRequests):
        asked.append(result.output.metadata)
        results = result.output.build_results(approve_all=True)
        result = await agent.run(
            message_history=result.all_messages(), deferred_tool_results=results
        )
    assert asked == [{}, {"id0": {"asks": "search_archive"}}]
    assert result.output == "done: ['x']"


async def test_output_that_was_not_kept(clock):
    """A call whose output is no JSON returns it as it is, and is not executed a second time by a run that goes on."""
    made: list[object] = []

    def make() -> object:
        made.append(object())
        return made[-1]

    def check() -> str:
        raise Down

    engine = make_engine("repair", clock=clock)
    agent = agent_of(
        calling(("make", {}), ("check", {})), [Tool(make, sequential=True), check], engine
    )
    with capture_run_messages() as messages, pytest.raises(Down):
        await agent.run("make one")
    with pytest.raises(CallFailed, match="was not kept"):
        await agent.run(message_history=messages[:2])
    assert len(made) == 1


class Receipt(BaseModel):
    """What a tool of a user returns."""

    total: int


PICTURE = BinaryContent(data=b"\x89", media_type="image/png")


@pytest.mark.parametrize(
    ("returned", "kind", "content"),
    [
        (Receipt(total=3), "content", {"total": 3}),
        (ToolReturn(return_value=["paid", PICTURE]), "return", ["paid", PICTURE]),
    ],
)
async def test_recorded_results(returned, kind, content, clock):
    """Results that are no JSON are recorded by their content, and come back as in a history of messages that was stored."""
    made: list[object] = []

    def make() -> object:
        made.append(returned)
        return returned

    def check() -> str:
        checked.append("once")
        if len(checked) == 1:
            raise Down
        return "fine"

    checked: list[str] = []
    engine = make_engine("repair", clock=clock)
    model = calling(("make", {}), ("check", {}))
    agent = agent_of(model, [Tool(make, sequential=True), check], engine)
    with capture_run_messages() as messages, pytest.raises(Down):
        await agent.run("make one")
    result = await agent.run(message_history=messages[:2])
    [part] = [
        part
        for message in result.all_messages()
        for part in message.parts
        if isinstance(part, ToolReturnPart) and part.tool_name == "make"
    ]
    assert (tool_return_content_ta.dump_json(part.content), len(made)) == (
        tool_return_content_ta.dump_json(content),
        1,
    )
    [output] = [
        record.body.output
        for record in engine.store.read(RunId(only_run(engine)))
        if isinstance(record.body, AttemptSucceeded) and record.body.task.startswith("make")
    ]
    assert isinstance(output, dict)
    assert output["$pydantic-ai"] == kind


async def test_approval_of_a_call_in_doubt(clock):
    """An approval executes a call in doubt again only if it names the question, because that of the call may come twice."""
    executed: list[str] = []

    def pay(query: str) -> str:
        executed.append(query)
        if len(executed) == 1:
            raise ConnectionResetError
        return "paid"

    engine = make_engine("repair", clock=clock)
    model = calling(("pay", {"query": "x"}))
    agent = agent_of(model, [pay], engine, output_type=[str, DeferredToolRequests])
    stopped = await agent.run("pay")

    async def approve(**metadata: Any) -> Any:
        results = DeferredToolResults(approvals={"id0": True}, **metadata)
        history = stopped.all_messages()
        return (await agent.run(message_history=history, deferred_tool_results=results)).output

    again = await approve()
    assert isinstance(again, DeferredToolRequests)
    assert executed == ["x"]
    assert await approve(metadata=again.metadata) == "done: ['paid']"
    assert executed == ["x", "x"]


async def test_approved_call_is_executed_once(clock, tmp_path):
    """An approval that is sent twice, also after a failure and by another process, executes the call once."""
    executed: list[str] = []

    def pay(query: str) -> str:
        executed.append(query)
        return f"paid {query}"

    asks = {"output_type": [str, DeferredToolRequests]}
    tools = [Tool(pay, requires_approval=True)]
    model = calling(("pay", {"query": "all"}))

    def agent(store: SqliteStore, answers: FunctionModel = model) -> Agent[Any, Any]:
        return agent_of(answers, tools, make_engine("repair", clock=clock, store=store), **asks)

    with closing(SqliteStore(tmp_path / "runs.db")) as store:
        stopped = (await agent(store).run("pay")).all_messages()

    def failing(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        raise Down("the model is away")

    def approved(query: str) -> Any:
        edited = ToolApproved(override_args={"query": query})
        return {
            "message_history": stopped,
            "deferred_tool_results": DeferredToolResults(approvals={"id0": edited}),
        }

    with closing(SqliteStore(tmp_path / "runs.db")) as store, pytest.raises(Down):
        await agent(store, FunctionModel(failing)).run(**approved("half"))
    for _ in range(2):
        with closing(SqliteStore(tmp_path / "runs.db")) as store:
            result = await agent(store).run(**approved("half"))
            assert result.output == "done: ['paid half']"
    assert executed == ["half"]
    refused = pytest.raises(CallFailed, match="an approval executes its call once")
    with closing(SqliteStore(tmp_path / "runs.db")) as store, refused:
        await agent(store).run(**approved("all"))
    assert executed == ["half"]


async def test_function_that_hangs():
    """A synchronous function that exceeds the time stated for it is left behind in its thread."""
    woken = threading.Event()
    ended = anyio.Event()

    def hang(query: str) -> str:
        woken.wait(20)
        from_thread.run_sync(ended.set)
        return query

    attached = Replanned({"hang": {"timeout": 0.05}}, engine=make_engine("repair"))
    model = calling(("hang", {"query": "x"}))
    agent = Agent(model, tools=[hang], capabilities=[attached])
    with pytest.raises(CallFailed, match="ran into its deadline"):
        await agent.run("go")
    assert not ended.is_set()
    woken.set()
    await ended.wait()
