"""Agents of Google ADK with a scripted model: with an engine and without one. `make test-frameworks` runs these tests."""

import asyncio  # noqa: TID251 # the framework's own event loop
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

pytest.importorskip(
    "google.adk", reason="Google ADK is not installed here; make test-frameworks runs these tests"
)

from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent, RunConfig, SequentialAgent
from google.adk.agents.run_config import StreamingMode
from google.adk.apps import App, ResumabilityConfig
from google.adk.models import BaseLlm, LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import InMemoryRunner
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from google.adk.tools import AgentTool, FunctionTool, LongRunningFunctionTool, ToolContext
from google.adk.workflow import JoinNode, Workflow
from google.genai import types

from replanning import Alternative, Answer, ReplanningEngine, ReplanRequest, Retry, Task
from replanning.changes import AddTask, ModifyTask, ReplaceTask, SkipTask
from replanning.integrations.google_adk import Replanned
from replanning.journal import SqliteStore
from replanning.testing import ScriptedGate, VirtualClock
from tests.support.questions import archive_instead
from tests.support.runs import alternative, make_engine, skipping
from tests.support.tracing import Spans

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:The `plugins` argument is deprecated"
    ),  # by its own AgentTool
    pytest.mark.filterwarnings("ignore:.*Agent is deprecated in favor of Workflow"),
    pytest.mark.filterwarnings("ignore:.*ResumabilityConfig:UserWarning"),
]

REJECTED = "This tool call is rejected."

WEB = {"search": "web", "search_archive": "web"}


@pytest.fixture(scope="module", params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The one event loop that the framework knows."""
    return str(request.param)


class ScriptedModel(BaseLlm):  # type: ignore[misc] # its types may not be installed
    """Model that gives these answers, one for each request, and notes the results of tools that it sees."""

    model: str = "scripted"
    answers: list[Any]
    seen: list[Any]

    async def generate_content_async(
        self, llm_request: Any, stream: bool = False
    ) -> AsyncIterator[Any]:
        last = llm_request.contents[-1].parts
        self.seen.append(
            [part.function_response.response for part in last if part.function_response]
            or last[0].text
        )
        answer = self.answers.pop(0)
        if stream:
            for part in answer:
                if part.text:
                    yield LlmResponse(
                        content=types.Content(role="model", parts=[part]), partial=True
                    )
        yield LlmResponse(content=types.Content(role="model", parts=answer))


def call(name: str, **arguments: object) -> Any:
    """A call of a tool, as a part of an answer."""
    return types.Part(function_call=types.FunctionCall(name=name, args=arguments))


def text(words: str) -> Any:
    """Words, as a part of an answer."""
    return types.Part(text=words)


def search(query: str) -> str:
    """Search the web."""
    raise ConnectionError("the service is down")


def search_archive(query: str) -> str:
    """Search the archive."""
    return f"{query}, from the archive"


def agent(*answers: list[Any], name: str = "assistant", **fields: Any) -> Any:
    """An agent whose model gives these answers."""
    return LlmAgent(name=name, model=ScriptedModel(answers=list(answers), seen=[]), **fields)


def attached(engine: ReplanningEngine, capabilities: Any = None, **options: Any) -> Replanned:
    """The plugin, for the two tools that search by default."""
    return Replanned(WEB if capabilities is None else capabilities, engine=engine, **options)


class Chat:
    """One session of the framework with an agent."""

    def __init__(self, root: Any, *plugins: Any, resumable: bool = False) -> None:
        app = App(
            name="app",
            root_agent=root,
            plugins=list(plugins),
            resumability_config=ResumabilityConfig(is_resumable=True) if resumable else None,
        )
        self.runner = InMemoryRunner(app=app)
        self.root = root
        self.session: Any = None

    async def send(self, *parts: Any, **options: Any) -> list[Any]:
        """Send a message; return the events."""
        if self.session is None:
            self.session = await self.runner.session_service.create_session(
                app_name="app", user_id="u"
            )
        message = types.Content(role="user", parts=list(parts)) if parts else None
        stream = self.runner.run_async(
            user_id="u", session_id=self.session.id, new_message=message, **options
        )
        return [event async for event in stream]

    @property
    def seen(self) -> list[Any]:
        """What the model saw, request by request."""
        seen: list[Any] = self.root.model.seen
        return seen


def searching(tools: list[Any], *plugins: Any, **options: Any) -> Chat:
    """A chat with an agent that searches once."""
    return Chat(
        agent([call("search", query="a")], [text("done")], tools=tools), *plugins, **options
    )


def shape(events: list[Any]) -> list[Any]:
    """What events say, without ids and times."""
    return [
        (
            event.author,
            event.partial,
            [
                part.text
                or (part.function_call and (part.function_call.name, part.function_call.args))
                or (
                    part.function_response
                    and (part.function_response.name, part.function_response.response)
                )
                for part in (event.content.parts if event.content else ())
            ],
            event.actions.model_dump(
                exclude_defaults=True, exclude={"requested_tool_confirmations"}
            ),
        )
        for event in events
    ]


def status(engine: ReplanningEngine, number: int = 0) -> str:
    """The status of a run in the store, the newest of them first."""
    return str(engine.store.runs()[number].status)


def confirmation(events: list[Any], **response: Any) -> Any:
    """The answer to the request for a confirmation among events, as a part of a message."""
    [request] = [
        c
        for event in events
        for c in event.get_function_calls()
        if c.name == "adk_request_confirmation"
    ]
    return types.Part(
        function_response=types.FunctionResponse(
            id=request.id, name=request.name, response=response
        )
    )


async def test_same_without_failures(clock: VirtualClock) -> None:
    """An agent whose tools do not fail has the same events with an engine: calls at once, state, transfers, streaming."""

    async def look(query: str, tool_context: ToolContext) -> dict[str, str]:
        tool_context.state[f"seen {query}"] = True
        return {"found": query}

    def leave(tool_context: ToolContext) -> None:
        tool_context.actions.transfer_to_agent = "helper"

    told = []
    for engine in (None, make_engine("repair", clock=clock)):
        helper = agent(
            [call("look", query="c")], [text("it is"), text(" done")], name="helper", tools=[look]
        )
        calls = [call("look", query="a"), call("look", query="b"), call("missing")]
        root = agent(calls, [call("leave")], tools=[look, leave], sub_agents=[helper])
        chat = Chat(root, *([] if engine is None else [Replanned({"look": "web"}, engine=engine)]))
        told.append(
            shape(
                await chat.send(text("go"), run_config=RunConfig(streaming_mode=StreamingMode.SSE))
            )
        )
    assert told[0] == told[1]
    assert len(told[0]) == 9
    assert {"seen a": True, "seen b": True} in [actions["state_delta"] for *_, actions in told[0]]


async def test_substitute(clock: VirtualClock) -> None:
    """A tool that fails is replaced, and the model sees the result of the other one as that of the tool it called."""
    engine = make_engine("repair", clock=clock)
    chat = searching([search, search_archive], attached(engine))
    events = await chat.send(text("find a"))
    assert chat.seen == ["find a", [{"result": "a, from the archive"}]]
    assert events[1].content.parts[0].function_response.name == "search"
    [run] = engine.store.runs()
    assert (run.run, run.objective, run.status) == (events[0].invocation_id, "find a", "succeeded")
    assert len(engine.history(run.run).events) == 1


async def test_retry(clock: VirtualClock) -> None:
    """An error that may pass is tried again after a while; fields of a tool may stand in its metadata."""
    attempts = []

    def search(query: str) -> str:
        attempts.append(query)
        if len(attempts) < 4:
            raise ConnectionError("reset")
        return query

    tool = FunctionTool(search)
    tool.custom_metadata = {"replanning": {"idempotent": True, "retry": Retry(max_attempts=4)}}
    chat = searching([tool], attached(make_engine(clock=clock), {}))
    await chat.send(text("find a"))
    assert chat.seen[1:] == [[{"result": "a"}]]
    assert attempts == ["a"] * 4


async def test_timeout(clock: VirtualClock) -> None:
    """A tool that exceeds the timeout stated for it is cancelled and replaced."""
    ends = []

    async def search(query: str) -> str:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ends.append(query)
        raise AssertionError

    stated = {
        "search": {"capability": "web", "timeout": 5, "effect": "none"},
        "search_archive": "web",
    }
    chat = searching([search, search_archive], attached(make_engine("repair", clock=clock), stated))
    await chat.send(text("find a"))
    assert chat.seen[1:] == [[{"result": "a, from the archive"}]]
    assert set(ends) == {"a"}


class Asked(BasePlugin):  # type: ignore[misc] # its types may not be installed
    """Plugin that notes what it is asked about tools."""

    def __init__(self) -> None:
        super().__init__("asked")
        self.told: list[object] = []

    async def before_tool_callback(self, *, tool: Any, **_: Any) -> None:
        self.told.append(("before", tool.name))

    async def after_tool_callback(self, *, tool: Any, result: Any, **_: Any) -> None:
        self.told.append(("after", tool.name, result))

    async def on_tool_error_callback(self, *, tool: Any, error: Any, **_: Any) -> None:
        self.told.append(("error", tool.name, error))


async def test_give_up(clock: VirtualClock) -> None:
    """Without an alternative the framework handles the exception of the tool as always: by callbacks, or by the end."""
    failure = KeyError("no such page")

    def search(query: str) -> str:
        raise failure

    engine, asked = make_engine("repair", clock=clock), Asked()
    chat = Chat(agent([call("search", query="a")], tools=[search]), attached(engine, {}), asked)
    with pytest.raises(KeyError) as raised:
        await chat.send(text("find a"))
    assert raised.value is failure
    assert asked.told == [("before", "search"), ("error", "search", failure)]
    assert status(engine) == "paused"

    def told(tool: Any, args: Any, tool_context: Any, error: Any) -> dict[str, str]:
        return {"sorry": str(error)}

    chat = Chat(
        agent(
            [call("search", query="a")], [text("done")], tools=[search], on_tool_error_callback=told
        ),
        attached(engine, {}),
    )
    await chat.send(text("find a"))
    assert chat.seen[1:] == [[{"sorry": "'no such page'"}]]
    assert status(engine) == "succeeded"


@pytest.mark.parametrize(
    ("result", "fails"),
    [
        ({"status": "error", "error_message": "no page"}, True),
        ({"error": "no page"}, True),
        ({"content": [], "isError": True}, True),
        ({"status": "success"}, False),
        ({"error": None, "found": 1}, False),
    ],
)
async def test_reported_failures(clock: VirtualClock, result: dict[str, Any], fails: bool) -> None:
    """A result that tells of a failure, as tools of ADK do, is one; the model sees it if there is no alternative."""
    asked = Asked()

    def search(query: str) -> dict[str, Any]:
        return result

    for tools, seen in (
        ([search], result),
        ([search, search_archive], {"result": "a, from the archive"}),
    ):
        engine = make_engine("repair", clock=clock)
        named = {each: WEB[each] for each in WEB if each in [tool.__name__ for tool in tools]}
        chat = searching(tools, attached(engine, named), asked)
        await chat.send(text("find a"))
        assert chat.seen[1:] == [[seen if fails else result]]
    assert not [each for each in asked.told if each[0] == "error"]


@pytest.mark.parametrize(
    "expect",
    [lambda result: result["pages"] > 0 or "an empty page", {"where": ["output.pages > 0"]}],
)
async def test_results_that_are_failures_of_ones_own(clock: VirtualClock, expect: Any) -> None:
    """What else is a failure of a tool is said by what is expected of its result."""

    def search(query: str) -> dict[str, int]:
        return {"pages": 0}

    engine = make_engine("repair", clock=clock)
    named: dict[str, Any] = {
        "search": {"capability": "web", "effect": "none", "expect": expect},
        "search_archive": "web",
    }
    chat = searching([search, search_archive], attached(engine, named), Asked())
    await chat.send(text("find a"))
    assert chat.seen[1:] == [[{"result": "a, from the archive"}]]


async def test_wrong_arguments(clock: VirtualClock) -> None:
    """Arguments that the framework refuses are told to the model, and are no failure of the tool."""
    engine = make_engine("repair", clock=clock)
    chat = Chat(
        agent([call("search", words="a")], [text("done")], tools=[search, search_archive]),
        attached(engine),
    )
    await chat.send(text("find a"))
    [[told]] = chat.seen[1:]
    assert told["error"].startswith(
        "Invoking `search()` failed as the following mandatory input parameters"
    )
    assert engine.history(engine.store.runs()[0].run).events == ()


async def test_what_a_failed_tool_asked_for(clock: VirtualClock) -> None:
    """A transfer or an end that a tool asks for before it fails is dropped; what its substitute asks for is done."""

    def search(query: str, tool_context: ToolContext) -> str:
        tool_context.actions.transfer_to_agent = "nobody"
        tool_context.actions.escalate = True
        tool_context.request_confirmation(hint="?")
        raise KeyError(query)

    def search_archive(query: str, tool_context: ToolContext) -> str:
        tool_context.state["from"] = "archive"
        tool_context.actions.skip_summarization = True
        return query

    chat = Chat(
        agent([call("search", query="a")], tools=[search, search_archive]),
        attached(make_engine("repair", clock=clock)),
    )
    events = await chat.send(text("find a"))
    assert len(events) == 2
    asked = events[1].actions.model_dump(exclude_defaults=True, exclude_none=True)
    assert asked == {"skip_summarization": True, "state_delta": {"from": "archive"}}


async def test_agents_as_tools(clock: VirtualClock) -> None:
    """An agent that is a tool stands in for another tool, and its own tools are replaced in a session of their own."""
    researcher = agent(
        [call("search", query="b")],
        [text("b is found")],
        name="researcher",
        tools=[search, search_archive],
    )

    def ask(request: str) -> str:
        raise KeyError("nobody there")

    engine = make_engine("repair", clock=clock)
    stated = {"ask": "research", "researcher": "research"}
    chat = Chat(
        agent(
            [call("ask", request="what is b?")], [text("done")], tools=[ask, AgentTool(researcher)]
        ),
        Replanned(
            stated | {"search": {"capability": "web"}, "search_archive": "web"}, engine=engine
        ),
    )
    await chat.send(text("go"))
    assert chat.seen[1:] == [[{"result": "b is found"}]]
    assert researcher.model.seen[1:] == [[{"result": "b, from the archive"}]]
    assert sorted(run.objective for run in engine.store.runs()) == ["go", "what is b?"]


async def test_sub_agents(clock: VirtualClock) -> None:
    """A tool of a sub-agent is replaced by one of another agent; a sub-agent that answers once is itself a tool."""
    engine = make_engine("repair", clock=clock)
    found = [[call("search", query="b")], [text("found")]]
    once = agent(*found, name="once", mode="single_turn", tools=[search])
    chat = Chat(
        agent(
            [call("once", request="b?")], [text("done")], tools=[search_archive], sub_agents=[once]
        ),
        attached(engine),
    )
    await chat.send(text("go"))
    assert once.model.seen[-1] == [{"result": "b, from the archive"}]
    assert chat.seen[1:] == [[{"result": "found"}]]
    assert [run.status for run in engine.store.runs()] == ["succeeded"]


async def test_workflow(clock: VirtualClock) -> None:
    """Tools of the agents and nodes of a workflow are calls of one session; capabilities may name those of a later agent."""

    def read(query: str) -> str:
        raise KeyError(query)

    def begin(node_input: Any) -> dict[str, str]:
        return {"query": "a"}

    found = [[call("search", query="a")], [text("found")]]
    finder = agent(*found, name="finder", tools=[search, search_archive])
    answers = [[call("read", query="b")]]
    reader = agent(*answers, name="reader", tools=[read])
    engine = make_engine("repair", clock=clock)
    flow = Workflow(
        name="flow", edges=[("START", begin, FunctionTool(search_archive), finder, reader)]
    )
    with pytest.raises(KeyError):
        await Chat(flow, attached(engine, WEB | {"read": "book"}, agents=[finder])).send(text("go"))
    assert finder.model.seen[-1] == [{"result": "a, from the archive"}]
    [run] = engine.store.runs()
    assert (run.objective, run.status) == ("go", "paused")
    assert len(engine.history(run.run).replay()) == 4


def deleting(ran: list[str], *, fails: bool = False) -> Any:
    """A tool that a person must confirm."""

    def delete(query: str) -> str:
        ran.append(query)
        if fails:
            raise KeyError(query)
        return f"{query} is deleted"

    return FunctionTool(delete, require_confirmation=True)


@pytest.mark.parametrize("confirmed", [True, False])
async def test_confirmations_of_the_framework(clock: VirtualClock, confirmed: bool) -> None:
    """A tool that requires a confirmation gets it as before, and its call is recorded after it."""
    told, runs, asked = [], [], []
    for engine in (None, make_engine("repair", clock=clock)):
        ran: list[str] = []
        root = agent([call("delete", query="a")], [text("done")], tools=[deleting(ran)])
        chat = Chat(root, *([] if engine is None else [attached(engine, {})]))
        asked = await chat.send(text("go"))
        events = await chat.send(confirmation(asked, confirmed=confirmed))
        told.append((shape(asked)[0], shape(asked)[2:], shape(events), chat.seen))
        runs.append(ran)
    assert told[0] == told[1]
    assert runs == [["a"] * confirmed] * 2
    assert engine is not None
    if confirmed:
        [run] = engine.store.runs()
        assert (run.run, run.status) == (asked[0].invocation_id, "succeeded")


async def test_confirmed_and_failed(clock: VirtualClock) -> None:
    """A tool that was confirmed and fails is replaced; one that itself needs a confirmation cannot stand in then."""
    for tools, seen in (
        ([search_archive], [{"result": "a, from the archive"}]),
        ([FunctionTool(search_archive, require_confirmation=True)], None),
    ):
        ran: list[str] = []
        stated = {"delete": "web", "search_archive": "web"}
        root = agent(
            [call("delete", query="a")], [text("done")], tools=[deleting(ran, fails=True), *tools]
        )
        chat = Chat(root, attached(make_engine("repair", clock=clock), stated))
        answer = confirmation(await chat.send(text("go")), confirmed=True)
        if seen is None:
            with pytest.raises(KeyError):
                await chat.send(answer)
        else:
            await chat.send(answer)
            assert chat.seen[1:] == [seen]
        assert ran == ["a"]


@pytest.mark.parametrize(
    ("confirmed", "seen"), [(True, {"result": "a is deleted"}), (False, {"error": REJECTED})]
)
async def test_stand_in_that_needs_a_confirmation(
    clock: VirtualClock, confirmed: bool, seen: Any
) -> None:
    """A tool that requires a confirmation stands in only after a person has confirmed that."""
    ran: list[str] = []
    engine = make_engine("repair", clock=clock)
    chat = searching([search, deleting(ran)], attached(engine, {"search": "web", "delete": "web"}))
    asked = await chat.send(text("go"))
    [hint] = [
        each.hint for event in asked for each in event.actions.requested_tool_confirmations.values()
    ]
    assert hint == "Please approve or reject that delete() stands in for search(), which failed."
    assert (ran, status(engine)) == ([], "paused")
    await chat.send(confirmation(asked, confirmed=confirmed))
    assert (ran, chat.seen[1:]) == (["a"] * confirmed, [[seen]])
    assert status(engine) == "succeeded"


async def test_dynamic_confirmation(clock: VirtualClock) -> None:
    """A tool that requests a confirmation itself is called again with the answer, and is recorded once."""

    def delete(query: str, tool_context: ToolContext) -> Any:
        if tool_context.tool_confirmation is None:
            tool_context.request_confirmation(hint="sure?")
            return {"status": "pending"}
        return {"sure": tool_context.tool_confirmation.payload}

    engine = make_engine("repair", clock=clock)
    chat = Chat(
        agent([call("delete", query="a")], [text("so")], [text("done")], tools=[delete]),
        attached(engine, {}),
    )
    asked = await chat.send(text("go"))
    assert status(engine) == "paused"
    await chat.send(confirmation(asked, confirmed=True, payload="very"))
    assert chat.seen[-1] == [{"sure": "very"}]
    [run] = engine.store.runs()
    assert (run.status, len(engine.history(run.run).replay())) == ("succeeded", 1)


@pytest.mark.parametrize(
    ("confirmed", "seen"), [(True, {"result": "a, from the archive"}), (False, {"error": REJECTED})]
)
async def test_question(clock: VirtualClock, tmp_path: Path, confirmed: bool, seen: Any) -> None:
    """A question of the engine is a request to confirm the call; another process may carry out the answer."""
    ran: list[str] = []

    def search(query: str) -> str:
        ran.append(query)
        raise KeyError(query)

    root = agent([call("search", query="a")], [text("done")], tools=[search, search_archive])
    first = make_engine(archive_instead, clock=clock, store=SqliteStore(tmp_path / "runs.db"))
    chat = Chat(root, attached(first))
    asked = await chat.send(text("go"))
    assert (first.store.runs()[0].status, len(first.pending())) == ("paused", 1)

    second = make_engine(archive_instead, clock=clock, store=SqliteStore(tmp_path / "runs.db"))
    later = Chat(root, attached(second))
    later.runner.session_service, later.session = chat.runner.session_service, chat.session
    await later.send(confirmation(asked, confirmed=confirmed))
    assert chat.seen[1:] == [[seen]]
    assert ran == ["a"]
    assert (second.store.runs()[0].status, second.pending()) == ("succeeded", [])


async def test_question_that_is_not_put_to_the_user(clock: VirtualClock) -> None:
    """With a gate the call waits; without approvals, and within an agent that is a tool, its own exception is seen."""

    def search(query: str) -> str:
        raise KeyError(query)

    gate = ScriptedGate([Answer("approve", by="ada")], clock=clock)
    tools = [search, search_archive]
    chat = searching(tools, attached(make_engine(archive_instead, clock=clock, gate=gate)))
    await chat.send(text("go"))
    assert chat.seen[1:] == [[{"result": "a, from the archive"}]]

    engine = make_engine(archive_instead, clock=clock)
    with pytest.raises(KeyError):
        await Chat(
            agent([call("search", query="a")], tools=tools), attached(engine, approvals=False)
        ).send(text("go"))
    assert (status(engine), engine.pending()) == ("paused", [])

    def reporting(query: str) -> dict[str, str]:
        return {"error": query}

    reporting.__name__ = "search"
    chat = searching(
        [reporting, search_archive],
        attached(make_engine(archive_instead, clock=clock), approvals=False),
    )
    await chat.send(text("go"))
    assert chat.seen[1:] == [[{"error": "a"}]]

    inner = agent([call("search", query="a")], name="inner", tools=tools)
    engine = make_engine(archive_instead, clock=clock)
    with pytest.raises(KeyError):
        await Chat(
            agent([call("inner", request="a")], tools=[AgentTool(inner)]), attached(engine)
        ).send(text("go"))
    assert engine.pending() == []


async def test_long_running_tools(clock: VirtualClock) -> None:
    """A tool that ends later leaves the session paused; its result resumes it, and what comes after its end is a new one."""

    def ask_boss(query: str) -> dict[str, str]:
        return {"status": "pending"}

    engine = make_engine("repair", clock=clock)
    answers = [
        [call("ask_boss", query="a")],
        [text("wait")],
        [call("search", query="b")],
        [text("done")],
        [text("more")],
    ]
    chat = Chat(
        agent(*answers, tools=[LongRunningFunctionTool(ask_boss), search, search_archive]),
        attached(engine),
    )
    [calls, *_] = await chat.send(text("go"))
    assert status(engine) == "paused"
    [asked] = calls.get_function_calls()
    later = types.FunctionResponse(id=asked.id, name=asked.name, response={"status": "approved"})
    await chat.send(types.Part(function_response=later))
    assert chat.seen[-1] == [{"result": "b, from the archive"}]
    assert [(run.run, run.status) for run in engine.store.runs()] == [
        (calls.invocation_id, "succeeded")
    ]
    chat.root.model.answers.insert(0, [call("search", query="c")])
    await chat.send(types.Part(function_response=later))
    assert [run.run for run in engine.store.runs()] == [
        f"{calls.invocation_id}.2",
        calls.invocation_id,
    ]


async def test_resumed_invocation(clock: VirtualClock) -> None:
    """An invocation that was cancelled is resumed in its session, which continues a call without effect."""
    ran: list[str] = []

    async def search(query: str) -> str:
        ran.append(query)
        if len(ran) == 1:
            running.cancel()
            await asyncio.get_running_loop().create_future()
        raise KeyError(query)

    engine = make_engine("repair", clock=clock)
    stated = {**WEB, "search": {"capability": "web", "effect": "none"}}
    chat = searching([search, search_archive], attached(engine, stated), resumable=True)
    running = asyncio.create_task(chat.send(text("go")))
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.wait_for(chat.runner.close(), 1)
    [run] = engine.store.runs()
    assert run.status == "paused"
    await chat.send(invocation_id=run.run)
    assert chat.seen[1:] == [[{"result": "a, from the archive"}]]
    assert ran == ["a", "a"]
    assert [(each.run, each.status) for each in engine.store.runs()] == [(run.run, "succeeded")]
    assert [str(entry.id) for entry in engine.history(run.run).replay()] == [
        "search-1",
        "search-1~2",
    ]


async def test_cancellation(clock: VirtualClock) -> None:
    """A cancelled run leaves its session paused, also while the model is asked, of which plugins are not told."""
    waiting = asyncio.Event()

    async def wait(query: str) -> str:
        waiting.set()
        return await asyncio.get_running_loop().create_future()

    class Hanging(ScriptedModel):
        async def generate_content_async(
            self, llm_request: Any, stream: bool = False
        ) -> AsyncIterator[Any]:
            if not self.answers:
                await wait("")
            async for each in super().generate_content_async(llm_request, stream):
                yield each

    for tool in (wait, search_archive):
        waiting.clear()
        engine = make_engine("repair", clock=clock)
        model = Hanging(answers=[[call(tool.__name__, query="a")]], seen=[])
        chat = Chat(LlmAgent(name="assistant", model=model, tools=[tool]), attached(engine, {}))
        running = asyncio.create_task(chat.send(text("go")))
        await waiting.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await chat.runner.close()
        assert status(engine) == "paused"


async def test_spans(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of a tool are below that of the attempt, which is below that of the session, below that of the invocation."""
    spans = Spans()
    provider = spans.provider
    monkeypatch.setattr("google.adk.telemetry.tracing.tracer", provider.get_tracer("adk"))
    monkeypatch.setattr(
        "google.adk.telemetry._instrumentation.tracing.tracer", provider.get_tracer("adk")
    )

    def search_archive(query: str) -> str:
        with provider.get_tracer("tool").start_as_current_span("reading"):
            return query

    engine = make_engine("repair", clock=clock, tracer_provider=provider)
    chat = searching([search, search_archive], attached(engine))
    await chat.send(text("go"))
    above = ["replanning.attempt", "replanning.run", "invoke_agent assistant"]
    assert spans.path("reading") == above


WRITING = {"writer": "write", "editor": "write"}


class Answering(BaseLlm):  # type: ignore[misc] # its types may not be installed
    """Model that says this whenever it is asked, or raises it, and notes what it was instructed."""

    model: str = "answering"
    answer: Any
    instructed: list[str]

    async def generate_content_async(
        self, llm_request: Any, stream: bool = False
    ) -> AsyncIterator[Any]:
        self.instructed.append(str(llm_request.config.system_instruction))
        if isinstance(self.answer, Exception):
            raise self.answer
        if isinstance(self.answer, str):
            yield LlmResponse(content=types.Content(role="model", parts=[text(self.answer)]))
        else:
            yield self.answer


def saying(name: str, answer: Any = None, **fields: Any) -> Any:
    """An agent that says its name, or something else, and saves it under a key."""
    model = Answering(answer=name if answer is None else answer, instructed=[])
    return LlmAgent(name=name, model=model, output_key=f"{name}_said", **fields)


def asked(*agents: Any) -> list[int]:
    """How often the models of agents were asked."""
    return [len(each.model.instructed) for each in agents]


def pipeline(kind: str, finder: Any, writer: Any, critic: Any) -> Any:
    """The three agents, of which the last one waits for the others."""
    match kind:
        case "sequential":
            return SequentialAgent(name="team", sub_agents=[finder, writer, critic])
        case "parallel":
            both = ParallelAgent(name="both", sub_agents=[finder, writer])
            return SequentialAgent(name="team", sub_agents=[both, critic])
        case "workflow":
            return Workflow(name="team", edges=[("START", finder, writer, critic)])
        case _:
            join = JoinNode(name="join")
            return Workflow(name="team", edges=[("START", (finder, writer), join, critic)])


KINDS = ["sequential", "parallel", "workflow", "joined"]


def team(kind: str, writer: Any, *plugins: Any, resumable: bool = False) -> tuple[Chat, list[Any]]:
    """A chat with a finder, a writer and a critic, who is told what was written; and these agents."""
    agents = [saying("finder"), writer, saying("critic", instruction="Judge {writer_said}.")]
    root = pipeline(kind, *agents)
    for plugin in plugins:
        plugin.agents = (*([root] if isinstance(root, Workflow) else []), *plugin.agents)
    return Chat(root, *plugins, resumable=resumable), agents


def replanning_agents(engine: ReplanningEngine, *agents: Any, **options: Any) -> Replanned:
    """The plugin, for a writer and these agents."""
    names = ["writer", *(each.name for each in agents)]
    stated = {name: WRITING[name] for name in names if name in WRITING}
    return Replanned(stated, engine=engine, agents=agents, **options)


def states(engine: ReplanningEngine) -> dict[str, str]:
    """The states of the tasks of the newest run."""
    live = engine.history(engine.store.runs()[0].run).replay()
    return {entry.id: str(entry.state) for entry in live}


@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_agents_without_failures(clock: VirtualClock, kind: str, resumable: bool) -> None:
    """The agents of a pipeline that do not fail have the same events with an engine, whose plan they are."""
    engine, told = make_engine("repair", clock=clock), []
    for plugins in ([], [replanning_agents(engine, saying("editor"))]):
        chat, _ = team(kind, saying("writer"), *plugins, resumable=resumable)
        events = await chat.send(text("go"))
        shown = [*zip(shape(events), [event.branch for event in events], strict=True)]
        if (
            kind == "joined"
        ):  # the order of what runs at once depends on the turns of the event loop
            shown = sorted((each for each in shown if each[0][2]), key=str)
        told.append(shown)
    assert told[0] == told[1]
    assert states(engine) == {"finder": "DONE", "writer": "DONE", "critic": "DONE"}
    live = engine.history(engine.store.runs()[0].run).replay()
    first = ("finder",) if kind in ("sequential", "workflow") else ()
    assert live.entry("writer").task.depends_on == first
    assert status(engine) == "succeeded"


@pytest.mark.parametrize("kind", KINDS)
async def test_agent_that_is_replaced(clock: VirtualClock, kind: str) -> None:
    """An agent that fails is replaced by one of its capability, whose output the next agent finds in its place."""
    engine, editor = make_engine("repair", clock=clock), saying("editor")
    chat, agents = team(
        kind, saying("writer", KeyError("no model")), replanning_agents(engine, editor)
    )
    events = await chat.send(text("go"))
    assert [event.author for event in events if event.content][-2:] == ["editor", "critic"]
    assert "Judge editor." in agents[-1].model.instructed[0]
    assert asked(*agents, editor) == [1, 1, 1, 1]
    assert status(engine) == "succeeded"


@pytest.mark.parametrize("kind", KINDS)
async def test_agent_without_alternative(clock: VirtualClock, kind: str) -> None:
    """Without an alternative the exception of an agent ends the invocation, as it does without an engine."""
    told = []
    for engine in (None, make_engine("repair", clock=clock)):
        failure = KeyError("no model")
        plugins = [] if engine is None else [replanning_agents(engine)]
        chat, agents = team(kind, saying("writer", failure), *plugins)
        with pytest.raises(KeyError) as raised:
            await chat.send(text("go"))
        assert raised.value is failure
        told.append(asked(*agents))
    assert told[0] == told[1]
    assert told[1][1:] == [1, 0]


async def test_agent_that_is_skipped(clock: VirtualClock) -> None:
    """An agent may be skipped, and so may one whose model reports an error, after which the framework goes on."""
    engine = make_engine(skipping, clock=clock)
    writer = saying("writer", KeyError("no model"))
    root = SequentialAgent(name="team", sub_agents=[writer, saying("critic")])
    events = await Chat(root, Replanned(engine=engine)).send(text("go"))
    assert [event.author for event in events] == ["critic"]
    assert states(engine) == {"writer": "SKIPPED", "critic": "DONE"}

    refused = LlmResponse(error_code="SAFETY", error_message="refused")
    for stand_ins, authors in (([], ["writer"]), ([saying("editor")], ["writer", "editor"])):
        engine = make_engine("repair", clock=clock)
        root = SequentialAgent(
            name="team", sub_agents=[saying("writer", refused), saying("critic")]
        )
        events = await Chat(root, replanning_agents(engine, *stand_ins)).send(text("go"))
        assert [event.author for event in events] == [*authors, "critic"]
        assert status(engine) == "succeeded"


def editor_instead(request: ReplanRequest) -> list[Alternative]:
    """The editor instead of the agent concerned, which a person must approve."""
    task_id = request.triggers[0].tasks[0]
    new = {"id": request.view.unused_id(task_id), "tool": "editor", "depends_on": ()}
    other = request.view.task(task_id).task.model_copy(update=new)
    changes = ReplaceTask(task_id=task_id, tasks=(other,))
    return [alternative(changes, confidence=0.4, reason="the editor can write")]


@pytest.mark.parametrize("confirmed", [True, False])
@pytest.mark.parametrize("kind", KINDS)
async def test_agent_that_a_person_is_asked_about(
    clock: VirtualClock, kind: str, confirmed: bool
) -> None:
    """In a resumable app a question about an agent is a request for input; the answer resumes the invocation."""
    engine, editor = make_engine(editor_instead, clock=clock), saying("editor")
    failure = KeyError("no model")
    chat, agents = team(
        kind, saying("writer", failure), replanning_agents(engine, editor), resumable=True
    )
    events = await chat.send(text("go"))
    [call] = [each for event in events for each in event.get_function_calls()]
    assert call.name == "adk_request_input"
    assert "editor" in call.args["message"]
    assert status(engine) == "paused"
    answer = types.FunctionResponse(id=call.id, name=call.name, response={"confirmed": confirmed})
    if confirmed:
        await chat.send(types.Part(function_response=answer))
        assert "Judge editor." in agents[-1].model.instructed[0]
        assert asked(*agents, editor) == [1, 1, 1, 1]
        assert status(engine) == "succeeded"
    else:
        with pytest.raises(Exception, match="no model"):
            await chat.send(types.Part(function_response=answer))
        assert asked(*agents, editor) == [1, 1, 0, 0]


@pytest.mark.parametrize("options", [{"approvals": False}, {}])
async def test_agent_about_which_nobody_can_be_asked(
    clock: VirtualClock, options: dict[str, Any]
) -> None:
    """Without approvals, or in an app that cannot be resumed, the exception of the agent ends the invocation."""
    engine, failure = make_engine(editor_instead, clock=clock), KeyError("no model")
    plugin = replanning_agents(engine, saying("editor"), **options)
    chat, _ = team("sequential", saying("writer", failure), plugin, resumable=bool(options))
    with pytest.raises(KeyError) as raised:
        await chat.send(text("go"))
    assert raised.value is failure


async def test_agent_that_a_gate_is_asked_about(clock: VirtualClock) -> None:
    """With a gate, a question about an agent goes there, and the invocation waits for the answer."""
    engine = make_engine(editor_instead, clock=clock, gate=ScriptedGate([Answer("approve")]))
    plugin = replanning_agents(engine, saying("editor"))
    chat, agents = team("sequential", saying("writer", KeyError("no model")), plugin)
    await chat.send(text("go"))
    assert "Judge editor." in agents[-1].model.instructed[0]


@pytest.mark.parametrize("kind", KINDS)
async def test_agents_of_an_invocation_that_is_resumed(tmp_path: Path, kind: str) -> None:
    """An invocation that failed is resumed in another process: what has finished is not asked again."""

    def engine() -> ReplanningEngine:
        return ReplanningEngine(["repair"], store=SqliteStore(tmp_path / "runs.db"))

    chat, agents = team(
        kind, saying("writer", KeyError("no model")), replanning_agents(engine()), resumable=True
    )
    with pytest.raises(KeyError):
        await chat.send(text("go"))
    agents[1].model.answer = "a text"
    others = [saying(each.name, each.model.answer) for each in agents[:2]]
    again, _ = team(kind, others[1], replanning_agents(engine()), resumable=True)
    again.runner.session_service = chat.runner.session_service
    again.session = chat.session
    session = await chat.runner.session_service.get_session(
        app_name="app", user_id="u", session_id=chat.session.id
    )
    events = await again.send(invocation_id=session.events[0].invocation_id)
    assert "critic" in [event.author for event in events]
    assert asked(others[1]) == [1]
    if kind in ("sequential", "workflow"):  # the others have cut the finder off
        assert asked(others[0]) == [0]
    assert states(engine()) == {"finder": "DONE", "writer": "DONE", "critic": "DONE"}


async def test_agent_that_was_cut_off(clock: VirtualClock) -> None:
    """An agent that was cut off is asked again when its invocation is resumed, and the one before it is not."""
    asking = asyncio.Event()

    class Hanging(Answering):
        async def generate_content_async(
            self, llm_request: Any, stream: bool = False
        ) -> AsyncIterator[Any]:
            asking.set()
            await asyncio.get_running_loop().create_future()
            yield None

    engine = make_engine("repair", clock=clock)
    chat, agents = team("sequential", saying("writer"), replanning_agents(engine), resumable=True)
    patient, agents[1].model = agents[1].model, Hanging(answer="", instructed=[])
    running = asyncio.create_task(chat.send(text("go")))
    await asking.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    agents[1].model = patient
    session = await chat.runner.session_service.get_session(
        app_name="app", user_id="u", session_id=chat.session.id
    )
    await chat.send(invocation_id=session.events[0].invocation_id)
    assert asked(*agents) == [1, 1, 1]
    assert states(engine) == {"finder": "DONE", "writer": "DONE", "critic": "DONE"}


class Killing(Answering):
    """A model whose process is killed while it is asked."""

    async def generate_content_async(
        self, llm_request: Any, stream: bool = False
    ) -> AsyncIterator[Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield None


async def begin(folder: Path, killed: str) -> None:
    """Begin an invocation in the process that is killed while this agent is asked; the writer fails before the critic is."""
    writer = saying("writer", KeyError("no model") if killed == "critic" else None)
    chat, agents = on_disk(folder, writer)
    for each in agents:
        if each.name == killed:
            each.model = Killing(answer="", instructed=[])
    await chat.send(text("go"))


def on_disk(folder: Path, writer: Any) -> tuple[Chat, list[Any]]:
    """The team, an editor who can stand in for its writer, and their session, with everything in files of a folder."""
    editor = saying("editor")
    engine = ReplanningEngine(["repair"], store=SqliteStore(folder / "runs.db"))
    chat, agents = team("sequential", writer, replanning_agents(engine, editor), resumable=True)
    chat.runner.session_service = SqliteSessionService(str(folder / "sessions.db"))
    return chat, [*agents, editor]


BEGINNING = """
import asyncio, sys
from pathlib import Path
from tests.integrations.test_google_adk import begin

asyncio.run(begin(Path(sys.argv[1]), sys.argv[2]))
"""


@pytest.mark.parametrize(("killed", "left"), [("writer", [0, 1, 1, 0]), ("critic", [0, 0, 1, 0])])
async def test_killed(tmp_path: Path, killed: str, left: list[int]) -> None:
    """After a process was killed, another one goes on: who had finished is not asked again, and their outputs are used."""
    beginning = [sys.executable, "-c", BEGINNING, str(tmp_path), killed]
    died = await anyio.run_process(beginning, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    chat, agents = on_disk(tmp_path, saying("writer"))
    sessions = await chat.runner.session_service.list_sessions(app_name="app", user_id="u")
    [chat.session] = sessions.sessions
    [run] = SqliteStore(tmp_path / "runs.db").runs()
    events = await chat.send(invocation_id=run.run)
    assert asked(*agents) == left
    wrote = "editor" if killed == "critic" else "writer"
    assert f"Judge {wrote}." in agents[2].model.instructed[0]
    [answer] = [
        event.content.parts[0].text
        for event in events
        if event.author == "critic" and event.content
    ]
    assert answer == "critic"
    engine = ReplanningEngine(store=SqliteStore(tmp_path / "runs.db"))
    assert (status(engine), len(engine.store.runs())) == ("succeeded", 1)


class Interrupting(Answering):
    """A model that is interrupted by the user of the program."""

    async def generate_content_async(
        self, llm_request: Any, stream: bool = False
    ) -> AsyncIterator[Any]:
        raise KeyboardInterrupt
        yield None


def test_resumed_in_another_event_loop() -> None:
    """After a KeyboardInterrupt has ended an event loop, the same runner resumes the invocation in the next one."""
    engine = make_engine("repair")
    chat, agents = team("sequential", saying("writer"), replanning_agents(engine), resumable=True)
    patient, agents[1].model = agents[1].model, Interrupting(answer="", instructed=[])
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(chat.send(text("go")))
    agents[1].model = patient
    [run] = engine.store.runs()
    asyncio.run(chat.send(invocation_id=run.run))
    assert asked(*agents) == [1, 1, 1]
    assert states(engine) == {"finder": "DONE", "writer": "DONE", "critic": "DONE"}


async def test_changes_of_pending_agents(clock: VirtualClock) -> None:
    """What has not begun can be preceded by another agent, reordered, replaced, skipped and followed by one."""
    changes = (
        AddTask(task=Task(id="check", tool="editor", depends_on=("writer",)), before=("critic",)),
        ModifyTask(task_id="critic", fields={"depends_on": ["check", "judge"]}),
        ModifyTask(task_id="judge", fields={"depends_on": ["writer"]}),
        SkipTask(task_id="extra"),
        AddTask(task=Task(id="close", tool="editor", depends_on=("judge",))),
        ReplaceTask(task_id="writer", tasks=(Task(id="draft", tool="editor"),)),
    )
    engine = make_engine(lambda request: [alternative(*changes)], clock=clock)
    names = ["writer", "critic", "extra", "judge"]
    members = [saying(name, KeyError(name) if name == "writer" else None) for name in names]
    root = SequentialAgent(name="team", sub_agents=members)
    events = await Chat(root, replanning_agents(engine, saying("editor"))).send(text("go"))
    authors = [event.author for event in events]
    assert authors == ["editor", "editor", "judge", "critic", "editor"]
    assert status(engine) == "succeeded"


async def test_pipelines_that_an_agent_decides_about(clock: VirtualClock) -> None:
    """A pipeline to which an agent transfers is added to the plan when it begins; agents of a loop are not."""
    engine, editor = make_engine("repair", clock=clock), saying("editor")
    failing = saying("writer", KeyError("no model"))
    looping = LoopAgent(name="loop", sub_agents=[saying("polisher")], max_iterations=2)
    inner = SequentialAgent(name="inner", sub_agents=[failing, looping])
    leave = [call("transfer_to_agent", agent_name="inner")]
    chat = Chat(agent(leave, sub_agents=[inner]), replanning_agents(engine, editor))
    events = await chat.send(text("go"))
    assert [event.author for event in events][-3:] == ["editor", "polisher", "polisher"]
    assert states(engine) == {"writer": "REPLACED_BY_REPLAN", "loop": "DONE", "writer~2": "DONE"}


async def test_agent_that_exceeds_its_timeout(clock: VirtualClock) -> None:
    """An agent that exceeds the timeout stated for it is cancelled and replaced."""
    ends = []

    class Hanging(Answering):
        async def generate_content_async(
            self, llm_request: Any, stream: bool = False
        ) -> AsyncIterator[Any]:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                ends.append(self.model)
            yield None

    writer = saying("writer")
    writer.model = Hanging(answer="", instructed=[])
    stated: dict[str, Any] = {
        "writer": {"capability": "write", "timeout": 5, "effect": "none"},
        "editor": "write",
    }
    engine, editor = make_engine("repair", clock=clock), saying("editor")
    chat, agents = team("sequential", writer, Replanned(stated, engine=engine, agents=[editor]))
    await chat.send(text("go"))
    assert "Judge editor." in agents[-1].model.instructed[0]
    assert ends == ["answering"]


async def test_agents_that_are_cut_short(clock: VirtualClock) -> None:
    """A stream that is closed early, and a task that is cancelled, stop the agents as without an engine."""
    for engine in (None, make_engine("repair", clock=clock)):
        plugins = [] if engine is None else [replanning_agents(engine)]
        chat, agents = team("sequential", saying("writer"), *plugins)
        session = await chat.runner.session_service.create_session(app_name="app", user_id="u")
        message = types.Content(role="user", parts=[text("go")])
        stream = chat.runner.run_async(user_id="u", session_id=session.id, new_message=message)
        async for _ in stream:
            break
        await stream.aclose()
        assert asked(*agents) == [1, 0, 0]
        if engine is not None:
            assert status(engine) == "paused"


def test_example() -> None:
    """The example runs as it is; its tool and its agent that fail are replaced, after the user has answered."""
    example = Path(__file__).parents[2] / "examples" / "google_adk_agent.py"
    done = subprocess.run(
        [sys.executable, "-W", "error", example], capture_output=True, text=True, timeout=60
    )
    assert "asked: Please approve" in done.stdout, done.stderr
    assert "report: a report of changelog, from the archive" in done.stdout, done.stderr
