"""Graphs of LangGraph and agents of LangChain, whose nodes and tools the engine keeps alive."""

import json
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypedDict

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from opentelemetry import trace

pytest.importorskip("langgraph")
pytest.importorskip("langchain")

from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    AgentState,
    HumanInTheLoopMiddleware,
    ToolRetryMiddleware,
)
from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import (
    BaseTool,
    InjectedToolCallId,
    StructuredTool,
    ToolException,
    tool,
)
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_stream_writer
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, RetryPolicy, Send, interrupt

from replanning import Alternative, ReplanningEngine, ReplanRequest
from replanning.changes import ReplaceTask, SkipTask
from replanning.errors import CallFailed
from replanning.integrations.langgraph import ReplannedGraph, ReplanningMiddleware, replanned
from replanning.journal import AttemptStarted, AttemptSucceeded, SqliteStore
from replanning.testing import VirtualClock
from tests.support.asyncio_only import anyio_backend  # noqa: F401 - a fixture
from tests.support.questions import DOUBT, asking
from tests.support.runs import alternative, bodies, make_engine, skipping
from tests.support.tracing import Spans

WEB = {"search": "web", "archive": "web"}


class State(TypedDict, total=False):
    """The state of the graphs here."""

    query: str
    log: Annotated[list[str], operator.add]


def raising(error: Exception) -> Callable[[State], Any]:
    """A node that fails."""

    async def node(state: State) -> State:
        raise error

    return node


async def archive(state: State) -> State:
    """Find something elsewhere."""
    get_stream_writer()({"looked": "in the archive"})
    return {"log": [f"{state['query']} from the archive"]}


async def report(state: State) -> State:
    """Say how much was found."""
    return {"log": [f"{len(state['log'])} found"]}


def graph_of(search: Any, *, saver: Any = None, **options: Any) -> Any:
    """A graph that searches and reports, with a node that nothing leads to."""
    builder = StateGraph(State)
    builder.add_node("search", search, **options)
    builder.add_node("archive", archive)
    builder.add_node("report", report)
    builder.add_edge(START, "search")
    builder.add_edge("search", "report")
    builder.add_edge("archive", END)
    builder.add_edge("report", END)
    return builder.compile(checkpointer=saver)


def statuses(engine: ReplanningEngine) -> list[str]:
    """The statuses of the runs, newest first."""
    return [info.status for info in engine.store.runs()]


def on_thread(name: str = "1") -> Any:
    """The configuration of a thread."""
    return {"configurable": {"thread_id": name}}


async def test_substitute(clock: VirtualClock) -> None:
    """A node that fails is replaced by one of its capability, whose output is written as its own and whose edges are its own."""
    engine = make_engine("repair", clock=clock)
    graph = replanned(graph_of(raising(ValueError("down"))), engine, capabilities=WEB)
    assert (await graph.ainvoke({"query": "a"}))["log"] == ["a from the archive", "1 found"]
    assert statuses(engine) == ["succeeded"]
    [run] = engine.store.runs()
    [event] = engine.history(run.run).events
    assert event.outcome == "success"


async def test_retry(clock: VirtualClock) -> None:
    """A node that fails in a way that may pass is executed again, with no time lost on a virtual clock."""
    failures = [ConnectionError("1"), ConnectionError("2")]

    async def search(state: State) -> State:
        if failures:
            raise failures.pop()
        return {"log": ["found"]}

    engine = make_engine("repair", clock=clock)
    assert (await replanned(graph_of(search), engine).ainvoke({"query": "a"}))["log"] == [
        "found",
        "1 found",
    ]
    [run] = engine.store.runs()
    assert len(bodies(engine.store, run.run, AttemptStarted)) == 4
    assert clock.elapsed > 1


async def test_no_way_on(clock: VirtualClock) -> None:
    """Where there is no way on, the graph sees the exception of the node, and its own policy repeats the node."""
    engine = make_engine("repair", clock=clock)
    with pytest.raises(ValueError, match="down"):
        await replanned(graph_of(raising(ValueError("down"))), engine).ainvoke({"query": "a"})
    assert statuses(engine) == ["paused"]

    failures: list[Exception] = [ValueError("down")]

    async def search(state: State) -> State:
        if failures:
            raise failures.pop()
        return {"log": ["found"]}

    policy = RetryPolicy(initial_interval=0, jitter=False, retry_on=ValueError)
    graph = replanned(graph_of(search, retry_policy=policy), engine)
    assert (await graph.ainvoke({"query": "a"}))["log"] == ["found", "1 found"]
    assert statuses(engine)[0] == "succeeded"


def parallel(saver: Any = None) -> Any:
    """A graph with branches that run at once, a conditional edge, a Command, a Send and a subgraph."""

    async def plan(state: State) -> Command[Any]:
        return Command(
            update={"log": ["planned"]}, goto=[Send("look", {"query": each}) for each in "abc"]
        )

    async def look(state: State) -> State:
        get_stream_writer()(f"looking for {state['query']}")
        return {"log": [f"saw {state['query']}"]}

    inner = StateGraph(State)
    inner.add_node("sum_up", report)
    inner.add_edge(START, "sum_up")

    builder = StateGraph(State)
    builder.add_node("plan", plan, destinations=("look",))
    builder.add_node("look", look)
    builder.add_node("other", lambda state: {"log": ["other"]})
    builder.add_node("inner", inner.compile())
    builder.add_edge(START, "plan")
    builder.add_conditional_edges(
        "look", lambda state: "inner" if len(state["log"]) > 1 else "other", ["inner", "other"]
    )
    builder.add_edge("inner", END)
    return builder.compile(checkpointer=saver)


async def test_same_events_and_state(clock: VirtualClock) -> None:
    """Without failures a graph emits the same events with us as without us, and has the same states in its checkpoints."""
    seen = []
    for attach in (False, True):
        graph = parallel(InMemorySaver())
        if attach:
            graph = replanned(graph, make_engine(clock=clock))
        events = [
            (event["event"], event["name"], event["tags"], len(event["parent_ids"]))
            async for event in graph.astream_events({"log": []}, on_thread(), version="v2")
        ]
        states = [
            (each.values, each.next, each.metadata)
            async for each in graph.aget_state_history(on_thread())
        ]
        seen.append((sorted(events), [(values, following) for values, following, _ in states]))
        assert not any("replanning" in str(metadata) for *_, metadata in states)
    assert seen[0] == seen[1]


async def test_parallel_failures(clock: VirtualClock) -> None:
    """Branches that fail at once are each repaired, and the reducer merges what they return."""
    builder = StateGraph(State)
    builder.add_node("search", raising(ValueError("down")))
    builder.add_node("archive", archive)
    builder.add_conditional_edges(
        START, lambda state: [Send("search", {"query": each}) for each in "abcdef"], ["search"]
    )
    graph = replanned(builder.compile(), make_engine("repair", clock=clock), capabilities=WEB)
    parts = [part async for part in graph.astream({"log": []}, stream_mode=["custom", "values"])]
    assert parts.count(("custom", {"looked": "in the archive"})) == 6
    assert parts[-1] == ("values", {"log": [f"{each} from the archive" for each in "abcdef"]})


async def test_interrupt_and_resume(tmp_path: Path, clock: VirtualClock) -> None:
    """An interrupt of a node pauses the run and is no failure; a resumed thread continues the run, also in another process."""
    saver, place = InMemorySaver(), tmp_path / "history.db"
    executed: list[str] = []

    async def search(state: State) -> State:
        executed.append("search")
        return {"log": [interrupt("which?"), interrupt("and?")]}

    def attached() -> ReplannedGraph:
        engine = make_engine("repair", clock=clock, store=SqliteStore(place))
        return replanned(graph_of(search, saver=saver), engine)

    result = await attached().ainvoke({"query": "a"}, on_thread("a/b"))
    assert result["__interrupt__"][0].value == "which?"
    store = SqliteStore(place)
    [run] = store.runs()
    assert run.status == "paused"
    assert ReplanningEngine(store=store).history(run.run).reason == "the graph was interrupted"
    await attached().ainvoke(Command(resume="this"), on_thread("a/b"))
    result = await attached().ainvoke(Command(resume="that"), on_thread("a/b"))
    assert result["log"] == ["this", "that", "2 found"]
    [run] = store.runs()
    assert run.status == "succeeded"
    assert [body.task for body in bodies(store, run.run, AttemptStarted)] == ["search-1"] * 3 + [
        "report-2"
    ]
    assert not ReplanningEngine(store=store).history(run.run).events

    await attached().ainvoke({"query": "b"}, on_thread("a/b"))  # what is begun anew is another run
    assert [info.status for info in store.runs()] == ["paused", "succeeded"]
    past = [
        each
        async for each in attached().aget_state_history(on_thread("a/b"))
        if each.next == ("report",)
    ]
    executed.clear()
    again = await attached().ainvoke(
        None, past[0].config
    )  # travelling in time executes nodes again
    assert again["log"] == ["this", "that", "2 found"]
    assert not executed


async def test_static_breakpoint(clock: VirtualClock) -> None:
    """A breakpoint before a node pauses the run as an interrupt does."""
    engine = make_engine(clock=clock)
    graph = replanned(parallel(InMemorySaver()), engine)
    await graph.ainvoke({"log": []}, on_thread(), interrupt_before=["inner"])
    assert statuses(engine) == ["paused"]
    await graph.ainvoke(None, on_thread())
    assert statuses(engine) == ["succeeded"]


def other(name: str) -> Callable[[ReplanRequest], list[Alternative]]:
    """Doubtful proposals to use another node or tool, or none."""

    def propose(request: ReplanRequest) -> list[Alternative]:
        task_id = request.triggers[0].tasks[0]
        new = {"id": request.view.unused_id(task_id), "tool": name}
        task = request.view.task(task_id).task.model_copy(update=new)
        change = ReplaceTask(task_id=task_id, tasks=(task,))
        return [
            alternative(change, confidence=DOUBT, reason=f"use {name}"),
            alternative(SkipTask(task_id=task_id), confidence=DOUBT - 0.05, reason="go on"),
        ]

    return propose


@pytest.mark.parametrize("choice", [0, 1, None])
async def test_question(clock: VirtualClock, choice: int | None) -> None:
    """A question to a person is an interrupt of the graph, and the value with which it is resumed answers it."""
    engine = asking(clock, other("archive"))
    graph = replanned(graph_of(raising(OSError("disk full")), saver=InMemorySaver()), engine)
    result = await graph.ainvoke({"query": "a", "log": []}, on_thread())
    question = result["__interrupt__"][0].value
    assert question["choices"] == ["use archive", "go on"]
    assert statuses(engine) == ["paused"]
    result = await graph.ainvoke(
        Command(resume="yes"), on_thread()
    )  # it does not say what it answers
    assert result["__interrupt__"][0].value == question
    for wrong in (
        {"verdict": "aprove"},
        {"verdict": "approve", "choice": 9},
        {"verdict": "approve", "chioce": 1},
        {},
    ):
        result = await graph.ainvoke(
            Command(resume={"question": question["question"], **wrong}), on_thread()
        )
        assert result["__interrupt__"][0].value.pop("refused")
        assert result["__interrupt__"][0].value == question
    verdict = {"verdict": "reject"} if choice is None else {"verdict": "approve", "choice": choice}
    answer = Command(resume={"question": question["question"], "by": "ada", **verdict})
    if choice is None:
        with pytest.raises(Exception, match="disk full"):
            await graph.ainvoke(answer, on_thread())
        assert statuses(engine) == ["paused"]
    else:
        result = await graph.ainvoke(answer, on_thread())
        assert result["log"] == (["0 found"] if choice else ["a from the archive", "1 found"])
        assert statuses(engine) == ["succeeded"]


async def test_question_without_checkpointer(clock: VirtualClock) -> None:
    """Without a checkpointer nobody could answer, and the graph sees the exception of the node."""
    graph = replanned(graph_of(raising(OSError("disk full"))), asking(clock, other("archive")))
    with pytest.raises(OSError, match="disk full"):
        await graph.ainvoke({"query": "a"})


async def test_question_without_approvals(clock: VirtualClock) -> None:
    """With `approvals=False` a graph with a checkpointer ends as it does alone, and interrupts nothing but its own."""
    engine = make_engine(other("archive"), clock=clock)
    executed: list[str] = []

    def lose(state: State) -> State:
        executed.append(state["query"])
        raise ConnectionResetError("lost")

    alone = graph_of(lose, saver=InMemorySaver())
    attached = replanned(graph_of(lose, saver=InMemorySaver()), engine, approvals=False)
    for graph in (alone, attached):
        executed.clear()
        with pytest.raises(ConnectionResetError, match="lost"):
            await graph.ainvoke({"query": "a"}, on_thread())
        assert (await graph.aget_state(on_thread())).next == ("search",)
        with pytest.raises(ConnectionResetError, match="lost"):
            await graph.ainvoke(None, on_thread())
        with pytest.raises(ConnectionResetError, match="lost"):
            await anyio.to_thread.run_sync(graph.invoke, {"query": "b"}, on_thread("2"))
        assert executed == ["a", "a", "b"]
        with pytest.raises(ValueError, match="thread_id"):
            await graph.ainvoke({"query": "a"})

    async def ask(state: State) -> State:
        return {"log": [interrupt("may I?")]}

    graph = replanned(graph_of(ask, saver=InMemorySaver()), engine, approvals=False)
    result = await graph.ainvoke({"query": "a"}, on_thread())
    assert result["__interrupt__"][0].value == "may I?"
    result = await graph.ainvoke(Command(resume="yes"), on_thread())
    assert result["log"] == ["yes", "1 found"]


async def test_question_that_stays_without_approvals(tmp_path: Path, clock: VirtualClock) -> None:
    """With `approvals=False` and a durable store, a node in doubt is not executed again until its question is answered."""
    executed: list[str] = []

    async def lose(state: State) -> State:
        executed.append(state["query"])
        if len(executed) == 1:
            raise ConnectionResetError("lost")
        return {"log": ["found"]}

    engine = make_engine("repair", clock=clock, store=SqliteStore(tmp_path / "runs.db"))
    graph = replanned(graph_of(lose, saver=InMemorySaver()), engine, approvals=False)
    with pytest.raises(ConnectionResetError, match="lost"):
        await graph.ainvoke({"query": "a"}, on_thread())
    with pytest.raises(CallFailed, match="ConnectionResetError: lost"):
        await graph.ainvoke(None, on_thread())
    assert executed == ["a"]
    [question] = engine.pending()
    engine.answer(question.id, "approve")
    assert (await graph.ainvoke(None, on_thread()))["log"] == ["found", "1 found"]
    assert executed == ["a", "a"]


async def test_answer_elsewhere(clock: VirtualClock) -> None:
    """A question that is answered through the engine is not asked again when the graph is resumed."""
    engine = asking(clock, other("archive"))
    graph = replanned(graph_of(raising(OSError("disk full")), saver=InMemorySaver()), engine)
    await graph.ainvoke({"query": "a"}, on_thread())
    [question] = engine.pending()
    engine.answer(question.id, "approve")
    assert (await graph.ainvoke(None, on_thread()))["log"] == ["a from the archive", "1 found"]


async def test_interrupts_and_questions(clock: VirtualClock) -> None:
    """A node never takes the answer to a question for that to an interrupt of its own, nor the other way round."""
    given: list[object] = []

    async def search(state: State) -> State:
        given.append(interrupt("may I?"))
        raise OSError("disk full")

    builder = graph_of(search).builder.add_node("elsewhere", search)
    graph = replanned(
        builder.compile(checkpointer=InMemorySaver()), asking(clock, other("elsewhere"))
    )
    assert (await graph.ainvoke({"query": "a"}, on_thread()))["__interrupt__"][0].value == "may I?"
    result = await graph.ainvoke(Command(resume="yes"), on_thread())
    answer = {"question": result["__interrupt__"][0].value["question"], "verdict": "approve"}
    with pytest.raises(RuntimeError, match="cannot interrupt the graph after that"):
        await graph.ainvoke(Command(resume=answer), on_thread())
    assert given == ["yes"]


async def test_cancellation(clock: VirtualClock) -> None:
    """A graph that is cancelled, or whose stream nobody reads to its end, leaves a run that is paused."""
    engine, begun = make_engine(clock=clock), anyio.Event()

    async def search(state: State) -> State:
        get_stream_writer()("begun")
        begun.set()
        await anyio.sleep_forever()
        return {}

    graph = replanned(graph_of(search), engine)
    async with anyio.create_task_group() as group:
        group.start_soon(graph.ainvoke, {"query": "a"})
        await begun.wait()
        group.cancel_scope.cancel()
    assert statuses(engine) == ["paused"]
    stream = graph.astream({"query": "a"}, stream_mode="custom")
    assert await anext(stream) == "begun"
    await stream.aclose()
    assert statuses(engine) == ["paused", "paused"]


def test_without_event_loop() -> None:
    """A graph that runs synchronously is repaired as well, also by what is async, and interrupted and resumed."""
    engine = ReplanningEngine()

    async def elsewhere(state: State) -> State:
        return {"log": ["archive"]}

    def search(state: State) -> State:
        raise ValueError("down")

    def ask(state: State) -> State:
        return {"log": [interrupt("which?")]}

    builder = StateGraph(State)
    builder.add_node("search", search)
    builder.add_node("archive", elsewhere)
    builder.add_node("ask", ask)
    builder.add_edge(START, "search")
    builder.add_edge("search", "ask")
    graph = replanned(builder.compile(checkpointer=InMemorySaver()), engine, capabilities=WEB)
    parts = list(graph.stream({"query": "a"}, on_thread(), stream_mode="updates"))
    assert parts[0] == {"search": {"log": ["archive"]}}
    assert statuses(engine) == ["paused"]
    assert graph.invoke(Command(resume="this"), on_thread())["log"] == ["archive", "this"]
    assert statuses(engine) == ["succeeded"]
    with pytest.raises(ValueError, match="down"):
        replanned(builder.compile(), engine).invoke({"query": "a"})


@pytest.mark.parametrize("as_function", [False, True])
async def test_graph_within_a_graph(clock: VirtualClock, as_function: bool) -> None:
    """A graph within a node has a run of its own, which goes on when the thread is resumed with an answer."""
    engine = asking(clock, other("archive"))
    inner = replanned(graph_of(raising(OSError("disk full"))), engine)

    async def search(state: State) -> Any:
        return {"log": (await inner.ainvoke(state))["log"]}

    outer = replanned(graph_of(search if as_function else inner, saver=InMemorySaver()), engine)
    question = (await outer.ainvoke({"query": "a"}, on_thread()))["__interrupt__"][0].value[
        "question"
    ]
    assert statuses(engine) == ["paused", "paused"]
    answer = Command(resume={"question": question, "verdict": "approve"})
    assert (await outer.ainvoke(answer, on_thread()))["log"] == [
        "a from the archive",
        "1 found",
        "2 found",
    ]
    assert statuses(engine) == ["succeeded", "succeeded"]


def test_synchronous_node_that_hangs() -> None:
    """A synchronous node that hangs is replaced after its timeout, although nothing can stop it."""
    woken = threading.Event()

    def search(state: State) -> State:
        woken.wait(20)
        return {"log": ["too late"]}

    builder = StateGraph(State)
    builder.add_node("search", search)
    builder.add_node("archive", lambda state: {"log": ["archive"]})
    builder.add_edge(START, "search")
    stated: Any = {
        "search": {"capability": "web", "timeout": 0.05, "effect": "none"},
        "archive": "web",
    }
    assert replanned(builder.compile(), make_engine("repair"), capabilities=stated).invoke(
        {"query": "a"}
    )["log"] == ["archive"]
    woken.set()


async def test_trace(clock: VirtualClock) -> None:
    """The run is below the span of the caller, and the spans of a node are below that of its attempt."""
    spans = Spans()
    tracer = spans.provider.get_tracer("user")

    async def search(state: State) -> State:
        with tracer.start_as_current_span("query"):
            return {"log": ["found"]}

    engine = make_engine(clock=clock, tracer_provider=spans.provider)
    with tracer.start_as_current_span("request"):
        await replanned(graph_of(search), engine).ainvoke({"query": "a"})
    assert spans.path("query") == ["replanning.attempt", "replanning.run", "request"]
    assert trace.get_current_span() is trace.INVALID_SPAN


# Agents


class FakeModel(BaseChatModel):  # type: ignore[misc]  # its types are not followed
    """A model that says what it was told to say, word by word if that is wanted."""

    messages: Any

    @property
    def _llm_type(self) -> str:
        return "fake"

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        """Take tools."""
        return self

    def _generate(self, *_: Any, **options: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=next(self.messages))])

    def _stream(self, *_: Any, **options: Any) -> Iterator[ChatGenerationChunk]:
        message = next(self.messages)
        for wanted in message.tool_calls:
            call: Any = {**wanted, "args": json.dumps(wanted["args"]), "type": "tool_call_chunk"}
            yield ChatGenerationChunk(
                message=AIMessageChunk("", tool_call_chunks=[call], id=message.id)
            )
        for word in message.text.split():
            yield ChatGenerationChunk(message=AIMessageChunk(word, id=message.id))


def model_of(*calls: str) -> FakeModel:
    """A model that calls these tools at once, and then says that it is done."""
    wanted: list[Any] = [
        {"name": name, "args": {"query": f"q{number}"}, "id": f"call-{number}"}
        for number, name in enumerate(calls)
    ]

    def messages() -> Iterator[AIMessage]:
        while True:
            yield AIMessage("", tool_calls=wanted)
            yield AIMessage("I am done")

    return FakeModel(messages=messages())


@tool("search")
async def search_tool(query: str) -> str:
    """Search."""
    raise ValueError(f"{query}: down")


@tool("archive")
async def archive_tool(query: str) -> str:
    """Search elsewhere."""
    return f"{query} from the archive"


def agent_of(
    model: FakeModel, tools: list[BaseTool], engine: ReplanningEngine | None, **options: Any
) -> Any:
    """An agent, attached if there is an engine."""
    capabilities = options.pop("capabilities", {})
    middleware = options.pop("middleware", [])
    if engine is None:
        return create_agent(model, tools, middleware=middleware, **options)
    agent = create_agent(model, tools, middleware=[ReplanningMiddleware(), *middleware], **options)
    return replanned(agent, engine, capabilities=capabilities)


def told(result: Any) -> list[tuple[str, str, str]]:
    """What the model was told by tools."""
    return [
        (m.name, m.tool_call_id, m.text) for m in result["messages"] if isinstance(m, ToolMessage)
    ]


QUESTION = {"messages": [("user", "hello")]}


async def test_tool_without_a_way_on(clock: VirtualClock) -> None:
    """A tool without a way on fails as it would without us; one whose failures become messages gives its message."""
    engine = make_engine("repair", clock=clock)
    for each in (None, engine):
        with pytest.raises(ValueError, match="q0: down"):
            await agent_of(model_of("search"), [search_tool], each).ainvoke(QUESTION)

    @tool
    async def handled(query: str) -> str:
        """Fail."""
        raise ToolException(f"{query} failed")

    handled.handle_tool_error = True
    retry = ToolRetryMiddleware(max_retries=0)
    calls = ("handled", "search", "unknown")
    plain, ours = [
        told(
            await agent_of(
                model_of(*calls), [handled, search_tool], each, middleware=[retry]
            ).ainvoke(QUESTION)
        )
        for each in (None, engine)
    ]
    assert plain == ours
    assert "q0 failed" in plain[0][2]
    assert "unknown" in plain[2][2]


async def test_skipped(clock: VirtualClock) -> None:
    """A node that is skipped writes nothing, and about a tool that is skipped the model is told why."""
    engine = make_engine(skipping, clock=clock)
    result = await replanned(graph_of(raising(ValueError("down"))), engine).ainvoke(
        {"query": "a", "log": []}
    )
    assert result["log"] == ["0 found"]
    agent = agent_of(model_of("search"), [search_tool], engine)
    assert told(await agent.ainvoke(QUESTION)) == [
        ("search", "call-0", "task 'search-2' was skipped: nobody needs it")
    ]


@pytest.mark.parametrize("lost", [False, True])
async def test_failure_that_became_a_message(lost: bool, clock: VirtualClock) -> None:
    """A message about a failure, which the framework made of an exception, is a failure: another tool takes its place.

    It is in doubt if the exception was, and then no other tool does.
    """
    methods = ReplanningMiddleware()

    @tool("search")
    async def losing(query: str) -> str:
        """Lose the connection."""
        raise ConnectionResetError("lost")

    node = ToolNode(
        [losing if lost else search_tool, archive_tool],
        handle_tool_errors=True,
        wrap_tool_call=methods.wrap_tool_call,
        awrap_tool_call=methods.awrap_tool_call,
    )
    builder = StateGraph(MessagesState)
    builder.add_node("tools", node)
    builder.add_edge(START, "tools")
    engine = make_engine("repair", clock=clock)
    graph = replanned(builder.compile(), engine, capabilities=WEB)
    call: Any = {"name": "search", "args": {"query": "q"}, "id": "1"}
    [(_, _, text)] = told(await graph.ainvoke({"messages": [AIMessage("", tool_calls=[call])]}))
    assert ("lost" in text) if lost else (text == "q from the archive")


async def test_a_tool_of_an_mcp_server_that_only_reads(clock: VirtualClock) -> None:
    """Another tool takes the place of one in doubt whose server has annotated that it only reads."""

    async def lose(query: str) -> str:
        raise ConnectionResetError("lost")

    for annotations, is_replaced in (({}, False), ({"readOnlyHint": True}, True)):
        losing = StructuredTool.from_function(
            coroutine=lose, name="search", description="Search.", metadata=annotations
        )
        engine = make_engine("repair", clock=clock)
        agent = agent_of(model_of("search"), [losing, archive_tool], engine, capabilities=WEB)
        with nullcontext() if is_replaced else pytest.raises(ConnectionResetError):
            result = await agent.ainvoke(QUESTION)
            assert told(result) == [("search", "call-0", "q0 from the archive")]


async def test_failure_within_a_command(clock: VirtualClock) -> None:
    """A command whose message tells a failure is one: another tool takes its place, or else the graph gets the command."""

    @tool("search")
    async def refusing(query: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> Any:
        """Refuse."""
        message = ToolMessage("no", tool_call_id=tool_call_id, name="search", status="error")
        return Command(update={"messages": [message]})

    for capabilities, text in ((WEB, "q0 from the archive"), ({}, "no")):
        engine = make_engine("repair", clock=clock)
        tools = [refusing, archive_tool]
        agent = agent_of(model_of("search"), tools, engine, capabilities=capabilities)
        assert told(await agent.ainvoke(QUESTION)) == [("search", "call-0", text)]


class Results(AgentState[Any]):  # type: ignore[misc]  # its types are not followed
    """The state of an agent whose tools write into it."""

    notes: Annotated[list[str], operator.add]


@tool
def note(query: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> Any:
    """Write into the state."""
    message = ToolMessage(f"noted {query}", tool_call_id=tool_call_id, name="note")
    return Command(update={"notes": [query], "messages": [message]})


@tool(response_format="content_and_artifact")
def draw(query: str) -> Any:
    """Return a message with an artifact that is no JSON."""
    return f"drawn {query}", {query, Path(query)}


@tool
def message(query: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> Any:
    """Return a message with parts, and with fields of its own."""
    parts: Any = [{"type": "text", "text": query}, {"type": "image_url", "image_url": "data:,"}]
    fields = {"additional_kwargs": {"cost": 2}, "artifact": {"rows": [1]}}
    return ToolMessage(parts, tool_call_id=tool_call_id, name="message", id="m", **fields)


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
async def test_results_of_all_kinds(is_async: bool) -> None:
    """Commands, messages, their parts and their artifacts reach the state as they do without an engine."""
    seen = []
    for engine in (None, make_engine("repair")):
        model = model_of("note", "draw", "message")
        agent = agent_of(model, [note, draw, message], engine, state_schema=Results)
        if is_async:
            result = await agent.ainvoke(QUESTION)
        else:
            result = await anyio.to_thread.run_sync(agent.invoke, QUESTION)
        results = [each for each in result["messages"] if isinstance(each, ToolMessage)]
        fields = [each.model_dump(exclude={"id"}) for each in results]
        seen.append((result["notes"], fields, results[2].id))
    assert seen[0] == seen[1]
    notes, fields, _ = seen[1]
    assert (notes, fields[1]["artifact"]) == (["q0"], {"q1", Path("q1")})


@pytest.mark.parametrize("verdict", ["approve", "reject"])
async def test_tool_behind_an_approval(verdict: str, clock: VirtualClock) -> None:
    """A tool that the agent puts to a person before it is called stands in for another one only if a person agrees."""
    executed: list[str] = []

    @tool("archive")
    async def guarded(query: str) -> str:
        """Search where a person must agree."""
        executed.append(query)
        return f"{query} from the archive"

    def agent(saver: Any) -> Any:
        approval = HumanInTheLoopMiddleware(interrupt_on={"archive": True, "search": False})
        options: Any = {"middleware": [approval], "capabilities": WEB, "checkpointer": saver}
        engine = make_engine("repair", clock=clock)
        return agent_of(model_of("search"), [search_tool, guarded], engine, **options)

    with pytest.raises(ValueError, match="q0: down"):
        await agent(None).ainvoke(QUESTION)
    assert executed == []

    asking = agent(InMemorySaver())
    result = await asking.ainvoke(QUESTION, on_thread())
    [question] = result["__interrupt__"]
    assert executed == []
    answer = {"question": question.value["question"], "verdict": verdict, "by": "ada"}
    if verdict == "approve":
        result = await asking.ainvoke(Command(resume=answer), on_thread())
        assert told(result) == [("search", "call-0", "q0 from the archive")]
    else:
        with pytest.raises(Exception, match="q0: down"):
            await asking.ainvoke(Command(resume=answer), on_thread())
    assert executed == (["q0"] if verdict == "approve" else [])


async def test_a_paused_run_says_which_approval_it_waits_for(clock: VirtualClock) -> None:
    """A run that waits for the approval of a call names the tool."""
    engine = make_engine("repair", clock=clock)
    approval = HumanInTheLoopMiddleware(interrupt_on={"search": True})
    options: Any = {"middleware": [approval], "checkpointer": InMemorySaver()}
    agent = agent_of(model_of("search"), [search_tool], engine, **options)
    await agent.ainvoke(QUESTION, on_thread())
    [run] = engine.store.runs()
    assert engine.history(run.run).reason == "the graph waits for the approval of 'search'"


@pytest.mark.parametrize("before", [["archive"], "*"], ids=["named", "all"])
async def test_node_behind_a_breakpoint(before: Any, clock: VirtualClock) -> None:
    """A node before which the graph stops stands in for another one only if a person agrees."""
    executed: list[str] = []

    async def guarded(state: State) -> State:
        executed.append(state["query"])
        return {"log": ["found elsewhere"]}

    builder = StateGraph(State)
    builder.add_node("search", raising(ValueError("down")))
    builder.add_node("archive", guarded)
    builder.add_edge(START, "search")

    def attached(**options: Any) -> Any:
        graph = builder.compile(checkpointer=InMemorySaver(), interrupt_before=before)
        return replanned(graph, make_engine("repair", clock=clock), capabilities=WEB, **options)

    async def run(graph: Any) -> Any:
        result = await graph.ainvoke({"query": "a", "log": []}, on_thread())
        if before == "*":  # it stops before the first node, too
            result = await graph.ainvoke(None, on_thread())
        return result

    graph = attached()
    [question] = (await run(graph))["__interrupt__"]
    assert executed == []
    answer = {"question": question.value["question"], "verdict": "approve", "by": "ada"}
    result = await graph.ainvoke(Command(resume=answer), on_thread())
    assert result["log"] == ["found elsewhere"]
    assert executed == ["a"]

    with pytest.raises(ValueError, match="down"):
        await run(attached(approvals=False))
    assert executed == ["a"]


@pytest.mark.parametrize("stated", [None, False], ids=["by default", "stated"])
async def test_tools_behind_a_breakpoint(stated: bool | None, clock: VirtualClock) -> None:
    """Tools of an agent that stops before it calls them stand in only if a person agrees, unless they state otherwise."""
    fields: Any = "web" if stated is None else {"capability": "web", "dangerous": stated}
    options: Any = {"checkpointer": InMemorySaver(), "interrupt_before": ["tools"]}
    agent = agent_of(
        model_of("search"),
        [search_tool, archive_tool],
        make_engine("repair", clock=clock),
        capabilities={"search": "web", "archive": fields},
        **options,
    )
    await agent.ainvoke(QUESTION, on_thread())
    result = await agent.ainvoke(None, on_thread())
    if stated is None:
        [question] = result["__interrupt__"]
        answer = {"question": question.value["question"], "verdict": "approve", "by": "ada"}
        assert told(result) == []
        result = await agent.ainvoke(Command(resume=answer), on_thread())
    assert told(result) == [("search", "call-0", "q0 from the archive")]


class Told(TypedDict, total=False):
    """A state with one field, which is called like the key of a recorded message."""

    message: str


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
async def test_state_that_looks_like_a_message(is_async: bool, clock: VirtualClock) -> None:
    """A node may return a change of a field called `message`."""
    builder = StateGraph(Told)
    builder.add_node("say", lambda state: {"message": "hello"})
    builder.add_edge(START, "say")
    graph = replanned(builder.compile(), make_engine("repair", clock=clock))
    if is_async:
        result = await graph.ainvoke({})
    else:
        result = await anyio.to_thread.run_sync(graph.invoke, {})
    assert result == {"message": "hello"}


async def test_nothing_of_ours_is_seen(clock: VirtualClock) -> None:
    """Drawings, what nodes and callbacks see, and the refusal to run without a thread are those of the graph alone."""
    seen: list[object] = []

    class Callback(BaseCallbackHandler):  # type: ignore[misc]  # its types are not followed
        def on_chain_start(self, *args: Any, **options: Any) -> None:
            seen.append((args, options))

    async def look(state: State, config: RunnableConfig) -> State:
        seen.append(config)
        return {"log": ["a"]}

    def parts_of_ours(value: Any) -> list[str]:
        found = [type(value).__name__] if "replanning" in type(value).__module__ else []
        inner: list[Any] = []
        if isinstance(value, dict):
            inner = [*value, *value.values()]
        elif isinstance(value, list | tuple):
            inner = list(value)
        elif isinstance(value, BaseCallbackManager):
            inner = [*value.handlers, *value.inheritable_handlers]
        return found + [each for item in inner for each in parts_of_ours(item)]

    alone = graph_of(look, saver=InMemorySaver())
    attached = replanned(alone, make_engine("repair", clock=clock))
    assert attached.get_graph().to_json() == alone.get_graph().to_json()
    assert (await attached.aget_graph()).to_json() == alone.get_graph().to_json()
    modes: Any = ["debug", "values", "updates", "checkpoints", "tasks"]
    config: Any = {**on_thread(), "callbacks": [Callback()]}
    parts = [part async for part in attached.astream({"query": "a"}, config, stream_mode=modes)]
    assert "checkpoint_id" in str(parts)
    assert len(seen) > 2
    assert parts_of_ours([parts, seen]) == []
    assert "replanning" not in str(parts)
    for graph in (alone, attached):
        with pytest.raises(ValueError, match="thread_id"):
            await graph.ainvoke({"query": "a"})
        with pytest.raises(ValueError, match="thread_id"):
            await anyio.to_thread.run_sync(graph.invoke, {"query": "a"})


@pytest.mark.parametrize("is_outside", [True, False], ids=["outside", "inside"])
async def test_retries_of_a_middleware_are_not_multiplied(
    is_outside: bool, clock: VirtualClock
) -> None:
    """A tool that another middleware repeats is executed as often as without an engine."""
    executed: list[str] = []

    @tool
    async def down(query: str) -> str:
        """Fail in a way that may pass."""
        executed.append(query)
        raise ConnectionRefusedError("refused")

    retry = ToolRetryMiddleware(max_retries=2, initial_delay=0, on_failure="error")
    both = [retry, ReplanningMiddleware()] if is_outside else [ReplanningMiddleware(), retry]
    alone = create_agent(model_of("down"), [down], middleware=[retry])
    attached = create_agent(model_of("down"), [down], middleware=both)
    attached = replanned(attached, make_engine("repair", clock=clock))
    for agent in (alone, attached):
        executed.clear()
        with pytest.raises(ConnectionRefusedError):
            await agent.ainvoke(QUESTION)
        assert len(executed) == 3


@pytest.mark.parametrize("of_graph", [False, True])
async def test_retries_of_a_node_are_not_multiplied(of_graph: bool, clock: VirtualClock) -> None:
    """A node with a retry policy is executed as often as without an engine, unless retries are stated for it."""
    policy = RetryPolicy(initial_interval=0, jitter=False, max_attempts=3)
    stated: Any = {"search": {"retry": {"max_attempts": 2, "delay": 0}}}
    executed: list[str] = []

    async def search(state: State) -> State:
        executed.append(state["query"])
        raise ConnectionRefusedError("refused")

    graph = graph_of(search, retry_policy=None if of_graph else policy)
    if of_graph:
        graph.retry_policy = [policy]
    engine = make_engine("repair", clock=clock)
    attached = replanned(graph, engine)
    attached_twice = replanned(graph, engine, capabilities=stated)
    for each, times in ((graph, 3), (attached, 3), (attached_twice, 6)):
        executed.clear()
        with pytest.raises(ConnectionRefusedError):
            await each.ainvoke({"query": "a"})
        assert len(executed) == times


async def test_same_agent(clock: VirtualClock) -> None:
    """Without failures an agent gives the same messages, tokens and events with us as without us."""
    seen = []
    for engine in (None, make_engine(clock=clock)):
        agent = agent_of(model_of("archive"), [archive_tool], engine)
        tokens = [
            message.text async for message, _ in agent.astream(QUESTION, stream_mode="messages")
        ]
        agent = agent_of(model_of("archive"), [archive_tool], engine)
        events = [
            (e["event"], e["name"]) async for e in agent.astream_events(QUESTION, version="v2")
        ]
        result = await agent_of(model_of("archive"), [archive_tool], engine).ainvoke(QUESTION)
        seen.append((tokens, events, [(m.type, m.text) for m in result["messages"]]))
    assert seen[0] == seen[1]
    assert "am" in "".join(seen[0][0])


async def test_tool_that_interrupts(clock: VirtualClock) -> None:
    """An interrupt within a tool passes, and the resumed thread of the agent continues its run."""

    @tool
    async def careful(query: str) -> str:
        """Ask first."""
        return f"{query}: {interrupt('may I?')}"

    engine = make_engine("repair", clock=clock)
    agent = agent_of(
        model_of("careful", "archive"),
        [careful, archive_tool],
        engine,
        checkpointer=InMemorySaver(),
    )
    result = await agent.ainvoke(QUESTION, on_thread())
    assert result["__interrupt__"][0].value == "may I?"
    result = await agent.ainvoke(Command(resume="yes"), on_thread())
    assert told(result) == [
        ("careful", "call-0", "q0: yes"),
        ("archive", "call-1", "q1 from the archive"),
    ]
    assert statuses(engine) == ["succeeded"]
    await agent.ainvoke(QUESTION, on_thread())  # the next turn of the conversation
    assert statuses(engine) == ["paused", "succeeded"]


@pytest.mark.parametrize("choice", [0, 1])
async def test_question_about_a_tool(clock: VirtualClock, choice: int) -> None:
    """A question about a tool is an interrupt of the agent, and the model is told where the tool was skipped."""
    engine = asking(clock, other("archive"))
    agent = agent_of(
        model_of("search"), [search_tool, archive_tool], engine, checkpointer=InMemorySaver()
    )
    result = await agent.ainvoke(QUESTION, on_thread())
    question = result["__interrupt__"][0].value["question"]
    answer = Command(resume={"question": question, "verdict": "approve", "choice": choice})
    [(name, call, text)] = told(await agent.ainvoke(answer, on_thread()))
    assert (name, call) == ("search", "call-0")
    assert text == ("task 'search-2' was skipped" if choice else "q0 from the archive")


def test_tool_without_event_loop() -> None:
    """Tools of an agent that is invoked synchronously are replaced as well, or fail as they would without us."""

    @tool("search")
    def search(query: str) -> str:
        """Search."""
        raise ValueError("down")

    @tool("archive")
    def elsewhere(query: str) -> str:
        """Search elsewhere."""
        return f"{query} from the archive"

    for other in (elsewhere, archive_tool):
        agent = agent_of(model_of("search"), [search, other], ReplanningEngine(), capabilities=WEB)
        assert told(agent.invoke(QUESTION)) == [("search", "call-0", "q0 from the archive")]
    retry = ToolRetryMiddleware(max_retries=0)
    plain, ours = [
        told(
            agent_of(model_of("search", "unknown"), [search], each, middleware=[retry]).invoke(
                QUESTION
            )
        )
        for each in (None, ReplanningEngine())
    ]
    assert plain == ours


# Attaching


async def test_what_cannot_be_attached(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be attached is refused at once with what to do."""
    engine = make_engine(clock=clock)
    graph = graph_of(report)
    with pytest.raises(TypeError, match="graph: it is attached already"):
        replanned(replanned(graph, engine), engine)
    with pytest.raises(ValueError, match="there is no node or tool called 'fly'"):
        replanned(graph, engine, capabilities={"fly": "air"})
    builder = StateGraph(MessagesState)
    builder.add_node("archive", ToolNode([archive_tool]))
    builder.add_node("search", lambda state: state)
    builder.add_node("both", ToolNode([search_tool]))
    builder.add_edge(START, "archive")
    with pytest.raises(ValueError, match="'search'"):
        replanned(builder.compile(), engine)
    name = "replanning.integrations.langgraph"
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "langgraph.callbacks", None)
    with pytest.raises(ImportError, match=r"replanning\[langgraph\]"):
        import_module(name)


async def test_agent_without_the_middleware(clock: VirtualClock) -> None:
    """Capabilities of tools whose calls do not go through the middleware are refused; a wrapper of a user may call it."""
    tools, engine = [search_tool, archive_tool], make_engine("repair", clock=clock)
    for middleware in ([], [ToolRetryMiddleware()]):
        agent: Any = create_agent(model_of("search"), tools, middleware=middleware)
        with pytest.raises(
            ValueError,
            match=r"'search', 'archive' would not be .*middleware=\[ReplanningMiddleware\(\)\]",
        ):
            replanned(agent, engine, capabilities=WEB)
        assert replanned(agent, engine, capabilities={"model": "think"}) is not agent

    async def wrapper(request: Any, handler: Any) -> Any:
        return await ReplanningMiddleware().awrap_tool_call(request, handler)

    builder = StateGraph(MessagesState)
    builder.add_node("tools", ToolNode(tools, awrap_tool_call=wrapper))
    builder.add_edge(START, "tools")
    called = {"messages": [next(model_of("search").messages)]}
    result = await replanned(builder.compile(), engine, capabilities=WEB).ainvoke(called)
    assert told(result) == [("search", "call-0", "q0 from the archive")]


async def test_objective(clock: VirtualClock) -> None:
    """The objective of a run is what is stated, or else the name of the graph, if it has one of its own."""
    engine, graph = make_engine("repair", clock=clock), graph_of(report)
    named = graph.copy({"name": "Reporter"})
    for each in (
        replanned(graph, engine),
        replanned(named, engine),
        replanned(graph, engine, objective="Find out"),
    ):
        await each.ainvoke({"query": "a", "log": []})
    objectives = [info.objective for info in engine.store.runs()]
    assert (await replanned(graph).ainvoke({"query": "a", "log": []}))["log"] == [
        "0 found",
        "1 found",
    ]
    assert objectives == ["Find out", "Run the graph Reporter", "Run a graph"]


async def test_fields_of_a_node(clock: VirtualClock) -> None:
    """What is stated of a node counts: a dangerous one does not take the place of another unless a person agrees."""
    engine = make_engine("repair", clock=clock)
    fields: dict[str, Any] = {"search": "web", "archive": {"capability": "web", "dangerous": True}}
    graph = replanned(
        graph_of(raising(ValueError("down")), saver=InMemorySaver()), engine, capabilities=fields
    )
    question = (await graph.ainvoke({"query": "a"}, on_thread()))["__interrupt__"][0].value
    assert len(question["choices"]) == 1
    answer = Command(resume={"question": question["question"], "verdict": "approve"})
    assert (await graph.ainvoke(answer, on_thread()))["log"] == ["a from the archive", "1 found"]


async def test_capabilities_in_metadata(clock: VirtualClock) -> None:
    """A capability, or fields, may stand in the metadata of a node."""
    builder = StateGraph(State)
    builder.add_node("search", raising(ValueError("down")), metadata={"capability": "web"})
    builder.add_node("archive", archive, metadata={"capability": {"capability": "web"}})
    builder.add_edge(START, "search")
    graph = replanned(builder.compile(), make_engine("repair", clock=clock))
    assert (await graph.ainvoke({"query": "a"}))["log"] == ["a from the archive"]


def tool_node(calls: list[str], saver: Any, engine: ReplanningEngine | None) -> Any:
    """A graph of one's own with one node of tools, which are called at once: quick, slow, lost after its effect."""

    @tool
    async def quick(query: str) -> str:
        """Answer at once."""
        calls.append("quick")
        return f"{query}, quickly"

    @tool
    async def slow(query: str) -> str:
        """Answer late."""
        calls.append("slow")
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        return f"{query}, slowly"

    @tool
    async def lost(query: str) -> str:
        """Take effect, and lose the connection the first time."""
        calls.append("lost")
        if calls.count("lost") == 1:
            raise ConnectionResetError("the connection was lost")
        return f"{query}, at last"

    return graph_of_tools([quick, slow, lost], saver, engine)


def graph_of_tools(
    tools: Sequence[BaseTool],
    saver: Any,
    engine: ReplanningEngine | None,
    call_id: str | None = None,
) -> Any:
    """A graph of one's own with one node of tools, which are called at once, each with its name as the id of the call."""
    calls = [
        {"name": each.name, "args": {"query": "a"}, "id": each.name if call_id is None else call_id}
        for each in tools
    ]

    async def model(state: MessagesState) -> Any:
        return {"messages": [AIMessage("", tool_calls=calls)]}

    middleware = ReplanningMiddleware()
    options: Any = {}
    if engine is not None:
        options = {
            "wrap_tool_call": middleware.wrap_tool_call,
            "awrap_tool_call": middleware.awrap_tool_call,
        }
    builder = StateGraph(MessagesState)
    builder.add_node("model", model)
    builder.add_node("tools", ToolNode(tools, **options))
    builder.add_edge(START, "model")
    builder.add_edge("model", "tools")
    graph = builder.compile(checkpointer=saver)
    return graph if engine is None else replanned(graph, engine)


GO: Any = {"messages": [("user", "go")]}


def texts(result: Any) -> list[str]:
    """The texts of the messages of tools."""
    return [message.text for message in result["messages"] if message.type == "tool"]


async def test_finished_calls_are_answered_from_the_journal() -> None:
    """A question about one call of a node of tools executes none of the others again, and leads to no further question."""
    executed: list[str] = []
    engine = make_engine("repair")
    graph = tool_node(executed, InMemorySaver(), engine)
    result = await graph.ainvoke(GO, on_thread())
    [question] = result["__interrupt__"]
    assert "took effect: look first" in question.value["text"]
    answer = {"question": question.value["question"], "verdict": "approve", "by": "ada"}
    result = await graph.ainvoke(Command(resume=answer), on_thread())
    assert texts(result) == ["a, quickly", "a, slowly", "a, at last"]
    assert sorted(executed) == ["lost", "lost", "quick", "slow"]
    assert "__interrupt__" not in result


@tool
def documents(query: str) -> Any:
    """Return documents as an artifact."""
    return "two pages", [Document(query, metadata={"page": 1}), {"seen": {Path(query)}}]


documents.response_format = "content_and_artifact"


@tool
def both(query: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> Any:
    """Return a command and messages that go to other nodes."""
    update = {"messages": [ToolMessage(query, tool_call_id=tool_call_id), HumanMessage("why?")]}
    return [Command(update=update, goto=[Send("model", {"messages": [AIMessage("so")]})])]


@tool
def opened(query: str) -> Any:
    """Return an artifact of which the journal has no more than the content."""
    return query, threading.Lock()


opened.response_format = "content_and_artifact"


async def test_every_result_comes_back_from_the_journal(tmp_path: Path) -> None:
    """Messages, commands and documents of finished tools are recorded by their content, and come back as what they were."""
    executed: list[str] = []
    returned: list[object] = []

    @tool
    async def failing(query: str) -> str:
        """Fail."""
        raise ValueError("no")

    async def noting(request: Any, handler: Any) -> Any:
        executed.append(request.tool_call["name"])
        return await handler(request)

    async def wrapper(request: Any, handler: Any) -> Any:
        async def inner(each: Any) -> Any:
            return await noting(each, handler)

        result = await ReplanningMiddleware().awrap_tool_call(request, inner)
        returned.append(result)
        return result

    asked = [
        {"name": name, "args": {"query": "a"}, "id": name}
        for name in ("archive", "documents", "both", "message", "opened", "failing")
    ]
    tools = [archive_tool, documents, both, message, opened, failing]
    builder = StateGraph(MessagesState)
    builder.add_node("model", lambda state: {"messages": [AIMessage("", tool_calls=asked)]})
    builder.add_node("tools", ToolNode(tools, awrap_tool_call=wrapper))
    builder.add_edge(START, "model")
    builder.add_edge("model", "tools")
    graph = builder.compile(checkpointer=InMemorySaver())
    results = []
    for given in (GO, None):
        executed.clear()
        returned.clear()
        engine = make_engine("repair", store=SqliteStore(tmp_path / "runs.db"))
        with pytest.raises(ValueError, match="no"):
            await replanned(graph, engine).ainvoke(given, on_thread())
        results.append(list(returned))
    assert executed == ["opened", "failing"]
    assert results[0][:4] == results[1][:4]
    store = SqliteStore(tmp_path / "runs.db")
    recorded = json.dumps(
        [
            body.output
            for body in bodies(store, store.runs()[0].run, AttemptSucceeded)
            if isinstance(body, AttemptSucceeded) and body.recoverable
        ]
    )
    for content in ("a from the archive", "two pages", "why?", "so", "data:,", "lock"):
        assert content in recorded


async def test_outputs_of_nodes_are_recorded(clock: VirtualClock) -> None:
    """The journal has the messages and commands of nodes by their content, and that of objects of the user."""

    def decide(state: MessagesState) -> Any:
        calls: Any = [{"name": "look", "args": {}, "id": "1"}]
        return Command(
            update={"messages": AIMessage("I look", tool_calls=calls)},
            goto=[Send("look", {"page": State(query="a")}), Send("look", threading.Lock())],
        )

    builder = StateGraph(MessagesState)
    builder.add_node("decide", decide)
    builder.add_node("look", lambda state: {"messages": [("ai", "seen")]})
    builder.add_edge(START, "decide")
    engine = make_engine("repair", clock=clock)
    graph = replanned(builder.compile(), engine)
    result = await graph.ainvoke(GO)
    assert [each.text for each in result["messages"]] == ["go", "I look", "seen", "seen"]
    first, *_ = bodies(engine.store, engine.store.runs()[0].run, AttemptSucceeded)
    assert isinstance(first, AttemptSucceeded)
    assert first.recoverable
    recorded = json.dumps(first.output)
    for content in ("I look", '"name": "look"', '"query": "a"', "lock"):
        assert content in recorded


async def test_tools_within_a_node(clock: VirtualClock) -> None:
    """A node of the user that calls a tool by itself gets the exception of the tool."""

    @tool
    async def failing(query: str) -> str:
        """Fail."""
        raise ValueError("no")

    node = ToolNode([failing], awrap_tool_call=ReplanningMiddleware().awrap_tool_call)
    calls: Any = [{"name": "failing", "args": {"query": "a"}, "id": "1"}]

    async def work(state: MessagesState, config: RunnableConfig) -> Any:
        return await node.ainvoke({"messages": [AIMessage("", tool_calls=calls)]}, config)

    builder = StateGraph(MessagesState)
    builder.add_node("work", work)
    builder.add_edge(START, "work")
    with pytest.raises(ValueError, match="no"):
        await replanned(builder.compile(), make_engine("repair", clock=clock)).ainvoke(GO)


async def test_interrupts_of_several_tools(clock: VirtualClock) -> None:
    """Tools of one node that interrupt the graph get their own answers, in the order in which LangGraph asks without us."""

    @tool
    async def first(query: str) -> str:
        """Ask."""
        return f"first: {interrupt('first?')}"

    @tool
    async def second(query: str) -> str:
        """Ask, a little later."""
        await anyio.lowlevel.checkpoint()
        return f"second: {interrupt('second?')}"

    seen = []
    for engine in (None, make_engine("repair", clock=clock)):
        graph = graph_of_tools([first, second], InMemorySaver(), engine)
        result = await graph.ainvoke(GO, on_thread())
        asked = []
        while "__interrupt__" in result:
            [question] = result["__interrupt__"]
            asked.append(question.value)
            result = await graph.ainvoke(Command(resume=f"to {question.value}"), on_thread())
        seen.append((asked, texts(result)))
    assert seen[0] == seen[1]
    assert seen[1] == (["first?", "second?"], ["first: to first?", "second: to second?"])


@pytest.mark.parametrize("verdict", ["approve", "reject"])
@pytest.mark.parametrize("is_elsewhere", [True, False], ids=["elsewhere", "resumed"])
@pytest.mark.parametrize("is_read", [True, False], ids=["read", "unread"])
async def test_an_answer_leads_to_no_further_question(
    verdict: Any, is_elsewhere: bool, is_read: bool, clock: VirtualClock
) -> None:
    """Each of two tools in doubt is asked about once, and one whose repetition was rejected is not executed again."""
    executed: list[str] = []

    def losing(name: str) -> BaseTool:
        async def lose(query: str) -> str:
            executed.append(name)
            if executed.count(name) == 1:
                raise ConnectionResetError(f"{name} is lost")
            return f"{name} at last"

        return StructuredTool.from_function(coroutine=lose, name=name, description="Lose.")

    engine = make_engine("repair", clock=clock)
    graph = graph_of_tools([losing("one"), losing("two")], InMemorySaver(), engine)
    graph.nodes["tools"].bound._handle_tool_errors = True
    streams = []

    async def run(given: Any) -> Any:
        if is_read:
            return await graph.ainvoke(given, on_thread())
        stream = graph.astream(given, on_thread(), stream_mode="values")
        streams.append(stream)
        result = None
        async for result in stream:
            if "__interrupt__" in result:
                break
        return result

    result = await run(GO)
    asked = 0
    while "__interrupt__" in result:
        [question] = result["__interrupt__"]
        answer: Any = {"question": question.value["question"], "verdict": verdict, "by": "ada"}
        given = Command(resume=answer)
        if is_elsewhere:
            engine.answer(answer["question"], verdict, by="ada")
            given = None
        result = await run(given)
        asked += 1
    assert asked == 2
    if verdict == "approve":
        assert (executed.count("one"), executed.count("two")) == (2, 2)
        assert texts(result) == ["one at last", "two at last"]
    else:
        assert (executed.count("one"), executed.count("two")) == (1, 1)
        assert all("no alternative is left" in text for text in texts(result))
    assert statuses(engine) == ["succeeded"]


async def test_calls_with_the_same_id_are_answered_from_the_journal() -> None:
    """Finished calls with equal ids are not executed again, in whatever order they are made when the graph is resumed."""
    executed: list[str] = []

    @tool
    async def add(query: str) -> str:
        """Add."""
        executed.append(query)
        return f"added {query}"

    @tool
    async def failing(query: str) -> str:
        """Fail."""
        raise ValueError("no")

    order = [("add", "b"), ("add", "a"), ("add", "a"), ("failing", "c")]
    asked = [{"name": name, "args": {"query": query}, "id": ""} for name, query in order]
    delayed: list[str] = []

    async def wrapper(request: Any, handler: Any) -> Any:
        if request.tool_call["args"]["query"] in delayed:
            await anyio.lowlevel.checkpoint()
        return await ReplanningMiddleware().awrap_tool_call(request, handler)

    builder = StateGraph(MessagesState)
    builder.add_node("model", lambda state: {"messages": [AIMessage("", tool_calls=asked)]})
    builder.add_node("tools", ToolNode([add, failing], awrap_tool_call=wrapper))
    builder.add_edge(START, "model")
    builder.add_edge("model", "tools")
    graph = replanned(builder.compile(checkpointer=InMemorySaver()), make_engine("repair"))
    for given in (GO, None):
        with pytest.raises(ValueError, match="no"):
            await graph.ainvoke(given, on_thread())
        delayed.append("b")
    assert sorted(executed) == ["a", "a", "b"]


async def test_middleware_that_repeats_what_succeeded(clock: VirtualClock) -> None:
    """A wrapper of the user that executes a call twice gets two results, as it does without an engine."""
    executed: list[str] = []

    @tool
    async def roll(query: str) -> str:
        """Return another result each time."""
        executed.append(query)
        return str(len(executed))

    class Twice(AgentMiddleware):  # type: ignore[misc]  # its types are not followed
        async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
            await handler(request)
            return await handler(request)

    agent = create_agent(model_of("roll"), [roll], middleware=[Twice(), ReplanningMiddleware()])
    result = await replanned(agent, make_engine("repair", clock=clock)).ainvoke(QUESTION)
    assert texts(result) == ["2"]


def stepwise(executed: list[str]) -> Any:
    """A graph of three nodes, the last of which interrupts it."""

    def step(name: str) -> Any:
        def node(state: State) -> State:
            executed.append(name)
            return {"log": [interrupt("go on?") if name == "ask" else name]}

        return node

    builder = StateGraph(State)
    for name in ("a", "b", "ask"):
        builder.add_node(name, step(name))
    builder.add_edge(START, "a")
    builder.add_edge("a", "b")
    builder.add_edge("b", "ask")
    return builder.compile(checkpointer=InMemorySaver())


async def test_stream_that_nobody_reads_any_more(clock: VirtualClock) -> None:
    """A thread whose stream was left, and is still referenced, is resumed in the same process, also while it is read."""
    engine = make_engine("repair", clock=clock)
    executed: list[str] = []
    graph = replanned(stepwise(executed), engine)
    stream = graph.astream({"query": "a"}, on_thread(), stream_mode="updates")
    async for _ in stream:
        break
    result = await graph.ainvoke(None, on_thread())
    assert result["__interrupt__"][0].value == "go on?"
    inner = None
    async for part in graph.astream(None, on_thread(), stream_mode="updates"):
        if "__interrupt__" in part:
            inner = await graph.ainvoke(Command(resume="yes"), on_thread())
    assert inner == {"query": "a", "log": ["a", "b", "yes"]}
    assert executed == ["a", "b", "ask", "ask", "ask"]
    assert statuses(engine) == ["succeeded"]
    assert [part async for part in stream] != []  # it goes on as it does without an engine
    assert statuses(engine) == ["succeeded"]


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_stream_that_nobody_reads_any_more_without_event_loop(is_async: bool) -> None:
    """The same holds for the stream of a graph without an event loop, however its thread is resumed."""
    engine = make_engine("repair")
    executed: list[str] = []
    graph = replanned(stepwise(executed), engine)
    stream = graph.stream({"query": "a"}, on_thread(), stream_mode="updates")
    next(stream)
    if is_async:
        result = anyio.run(graph.ainvoke, None, on_thread())
    else:
        result = graph.invoke(None, on_thread())
    assert result["__interrupt__"][0].value == "go on?"
    assert graph.invoke(Command(resume="yes"), on_thread())["log"] == ["a", "b", "yes"]
    assert statuses(engine) == ["succeeded"]
    assert list(stream) != []
    assert statuses(engine) == ["succeeded"]
