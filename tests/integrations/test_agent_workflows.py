"""Workflows of the Microsoft Agent Framework whose agents are the plan, beside the framework alone."""

import asyncio  # noqa: TID251 # the framework's own event loop
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

pytest.importorskip("agent_framework_orchestrations", reason="the orchestrations are not installed")

from agent_framework import (
    Agent,
    AgentResponse,
    AgentResponseUpdate,
    AgentSession,
    BaseChatClient,
    ChatResponse,
    ChatResponseUpdate,
    Content,
    FunctionInvocationLayer,
    InMemoryCheckpointStorage,
    ResponseStream,
    WorkflowBuilder,
    tool,
)
from agent_framework_orchestrations import (
    AgentRequestInfoResponse,
    ConcurrentBuilder,
    SequentialBuilder,
)

from replanning import Alternative, Answer, ReplanningEngine, ReplanRequest, Task
from replanning.changes import AddTask, ModifyTask, ReplaceTask, SkipTask
from replanning.errors import StoreError
from replanning.integrations.agent_framework import replanned
from replanning.journal import SqliteStore
from replanning.testing import FlakyStore, ScriptedGate, VirtualClock
from tests.support.asyncio_only import anyio_backend  # noqa: F401 - a fixture
from tests.support.runs import alternative, make_engine, skipping

WRITING = {"writer": "write", "editor": "write"}


class Client(FunctionInvocationLayer, BaseChatClient):  # type: ignore[misc]
    """A chat client that says its name, or one answer after another, or raises one."""

    def __init__(self, name: str, *answers: Any) -> None:
        super().__init__()
        self.name = name
        self.answers = list(answers)
        self.seen: list[list[str]] = []

    def _inner_get_response(self, *, messages: Any, stream: bool, **_: Any) -> Any:
        self.seen.append([message.text for message in messages])
        answer = self.answers.pop(0) if self.answers else f"{self.name} spoke"

        async def updates() -> Any:
            if isinstance(answer, Exception):
                raise answer
            contents = [Content.from_text(answer)] if isinstance(answer, str) else answer
            for content in contents:
                yield ChatResponseUpdate(role="assistant", contents=[content])

        async def response() -> Any:
            return ChatResponse.from_updates([update async for update in updates()])

        return (
            ResponseStream(updates(), finalizer=ChatResponse.from_updates) if stream else response()
        )


def saying(name: str, *answers: Any, **fields: Any) -> Any:
    """An agent that says its name, or these answers."""
    return Agent(Client(name, *answers), name=name, **fields)


def failing(name: str = "writer", times: int = 9) -> Any:
    """An agent whose model raises."""
    return saying(name, *[KeyError("no model")] * times)


def asked(*agents: Any) -> list[int]:
    """How often the models of agents were asked."""
    return [len(agent.client.seen) for agent in agents]


def built(kind: str, agents: Any, **options: Any) -> Any:
    """A workflow of agents."""
    match kind:
        case "sequential":
            return SequentialBuilder(participants=agents, **options).build()
        case "concurrent":
            return ConcurrentBuilder(participants=agents, **options).build()
        case "reviewed":
            return SequentialBuilder(participants=agents, **options).with_request_info().build()
        case _:
            first, second, third = agents
            builder = WorkflowBuilder(start_executor=first, **options)
            return builder.add_edge(first, second).add_edge(second, third).build()


KINDS = ["sequential", "concurrent", "own"]


async def play(workflow: Any, message: Any = "go", stream: bool = False, **options: Any) -> Any:
    """Run a workflow; return its events, and its result."""
    if not stream:
        result = await workflow.run(message, **options)
        return list(result), result
    events = workflow.run(message, stream=True, **options)
    return [event async for event in events], await events.get_final_response()


def shape(events: Any) -> list[object]:
    """What events say, without ids and times."""
    said: list[object] = []
    for event in events:
        data = event.data
        said.append((event.type, event.executor_id, getattr(data, "text", type(data).__name__)))
    return said


def outputs(result: Any) -> list[str]:
    """The outputs of a workflow."""
    return [str(each) for each in result.get_outputs()]


def states(engine: ReplanningEngine) -> Mapping[str, str]:
    """The states of the tasks of the newest run."""
    live = engine.history(engine.store.runs()[0].run).replay()
    return {entry.id: str(entry.state) for entry in live}


def status(engine: ReplanningEngine) -> str:
    """How the newest run stands."""
    return str(engine.store.runs()[0].status)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "reviewed"])
async def test_without_failures(clock: VirtualClock, kind: str, stream: bool) -> None:
    """Agents that do not fail give the same events and outputs with an engine, and are its plan."""
    engine, told = make_engine("repair", clock=clock), []
    for attaches in (False, True):
        workflow = built(kind, [saying("finder"), saying("writer"), saying("critic")])
        if attaches:
            assert replanned(workflow, engine) is workflow
        events, result = await play(workflow, stream=stream)
        rounds = [shape(events)]
        while requests := result.get_request_info_events():
            answers = {each.request_id: AgentRequestInfoResponse.approve() for each in requests}
            events, result = await play(workflow, None, stream, responses=answers)
            rounds.append(shape(events))
        if (
            kind == "concurrent"
        ):  # the order of what runs at once depends on the turns of the event loop
            rounds = [sorted(each, key=str) for each in rounds]
        told.append((rounds, outputs(result)))
    assert told[0] == told[1]
    assert states(engine) == {"finder": "DONE", "writer": "DONE", "critic": "DONE"}
    live = engine.history(engine.store.runs()[0].run).replay()
    assert live.entry("critic").task.depends_on == (() if kind == "concurrent" else ("writer",))
    assert (len(engine.store.runs()), status(engine)) == (1, "succeeded")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_replaced(clock: VirtualClock, kind: str, stream: bool) -> None:
    """An agent that fails is replaced by one of its capability, whose response is in the conversation."""
    engine, editor = make_engine("repair", clock=clock), saying("editor")
    agents = [saying("finder"), failing(), saying("critic")]
    workflow = replanned(built(kind, agents), engine, capabilities=WRITING, agents=[editor])
    _, result = await play(workflow, stream=stream)
    if kind == "concurrent":
        assert outputs(result) == ["finder spokeeditor spokecritic spoke"]
    else:
        assert agents[-1].client.seen == [["go", "finder spoke", "editor spoke"]]
    assert asked(*agents, editor) == [1, 1, 1, 1]
    assert status(engine) == "succeeded"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_without_alternative(clock: VirtualClock, kind: str, stream: bool) -> None:
    """Without an alternative the workflow raises the exception of the agent, as without an engine."""
    told = []
    for engine in (None, make_engine("repair", clock=clock)):
        agents = [saying("finder"), failing(), saying("critic")]
        workflow = built(kind, agents)
        if engine is not None:
            replanned(workflow, engine)
        with pytest.raises(KeyError, match="no model") as raised:
            await play(workflow, stream=stream)
        told.append((asked(*agents), str(raised.value)))
    assert told[0] == told[1]
    assert engine is not None
    assert status(engine) == "paused"


async def test_skipped(clock: VirtualClock) -> None:
    """An agent that is skipped leaves the conversation as it was."""
    agents = [saying("finder"), failing(), saying("critic")]
    engine = make_engine(skipping, clock=clock)
    await play(replanned(built("sequential", agents), engine))
    assert agents[-1].client.seen == [["go", "finder spoke"]]
    assert states(engine)["writer"] == "SKIPPED"


async def test_timeout(clock: VirtualClock) -> None:
    """An agent that exceeds the timeout stated for it is cancelled and replaced."""
    ends = []

    @tool
    async def endless() -> None:
        """Wait."""
        try:
            await anyio.sleep_forever()
        finally:
            ends.append("endless")

    call = Content.from_function_call("1", "endless", arguments={})
    for stream in (False, True):
        writer = saying("writer", [call], tools=[endless])
        stated: dict[str, Any] = {
            "writer": {"capability": "write", "timeout": 5, "effect": "none"},
            "editor": "write",
        }
        engine = make_engine("repair", clock=clock)
        workflow = built("sequential", [writer, saying("critic")])
        replanned(workflow, engine, capabilities=stated, agents=[saying("editor")])
        _, result = await play(workflow, stream=stream)
        assert outputs(result)[0].startswith("critic")
        assert states(engine)["writer~2"] == "DONE"
    assert ends == ["endless"] * 2


def editor_instead(request: ReplanRequest) -> list[Alternative]:
    """The editor instead of the agent concerned, which a person must approve."""
    task_id = request.triggers[0].tasks[0]
    new = {"id": request.view.unused_id(task_id), "tool": "editor", "depends_on": ()}
    other = request.view.task(task_id).task.model_copy(update=new)
    changes = ReplaceTask(task_id=task_id, tasks=(other,))
    return [alternative(changes, confidence=0.4, reason="the editor can write")]


@pytest.mark.parametrize("approved", [True, False])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_question(clock: VirtualClock, kind: str, stream: bool, approved: bool) -> None:
    """A question about an agent is a request of the workflow; the answer resumes the run."""
    engine, editor = make_engine(editor_instead, clock=clock), saying("editor")
    agents = [saying("finder"), failing(), saying("critic")]
    workflow = replanned(built(kind, agents), engine, agents=[editor])
    _, result = await play(workflow, stream=stream)
    [request] = result.get_request_info_events()
    [shown] = request.data.additional_properties["replanning"]
    assert shown["choices"] == ["the editor can write"]
    assert status(engine) == "paused"
    answer = {request.request_id: request.data.to_function_approval_response(approved)}
    if not approved:
        with pytest.raises(KeyError, match="no model"):
            await play(workflow, None, stream, responses=answer)
        assert asked(editor) == [0]
        return
    _, result = await play(workflow, None, stream, responses=answer)
    assert editor.client.seen == [["go"] if kind == "concurrent" else ["go", "finder spoke"]]
    assert asked(*agents) == [1, 1, 1]
    if kind != "concurrent":
        assert agents[-1].client.seen == [["go", "finder spoke", "editor spoke"]]
    assert status(engine) == "succeeded"


async def test_nobody_to_ask(clock: VirtualClock) -> None:
    """With a gate, a question goes there; without approvals the exception of the agent is raised."""
    answers = ScriptedGate([Answer("approve")])
    for gate, approvals in ((answers, True), (None, False)):
        engine = make_engine(editor_instead, clock=clock, gate=gate)
        workflow = built("sequential", [failing(), saying("critic")])
        replanned(workflow, engine, agents=[saying("editor")], approvals=approvals)
        if gate is None:
            with pytest.raises(KeyError, match="no model"):
                await play(workflow)
            assert engine.pending() == []
        else:
            assert outputs((await play(workflow))[1]) == ["critic spoke"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_resumed(tmp_path: Path, kind: str, stream: bool) -> None:
    """A run that failed is resumed by its thread in another process: what has finished is not asked again."""

    def engine() -> ReplanningEngine:
        return ReplanningEngine(["repair"], store=SqliteStore(tmp_path / "runs.db"))

    def attach(agents: Any) -> Any:
        return replanned(built(kind, agents), engine(), thread="report")

    agents = [saying("finder"), failing(), saying("critic")]
    with pytest.raises(KeyError):
        await play(attach(agents), stream=stream)
    finished = asked(*agents)
    again = [saying("finder"), saying("writer"), saying("critic")]
    _, result = await play(attach(again), stream=stream)
    if kind == "concurrent":
        assert asked(again[1]) == [1]
    else:
        assert asked(*again) == [0, 1, 1]
        assert again[-1].client.seen == [["go", "finder spoke", "writer spoke"]]
        assert finished == [1, 1, 0]
    assert "".join(outputs(result)).endswith("critic spoke")
    assert [info.status for info in engine().store.runs()] == ["succeeded"]


KILLED = """
import os, sys
import anyio
from replanning import ReplanningEngine
from replanning.errors import StoreError
from replanning.integrations.agent_framework import replanned
from replanning.journal import SqliteStore
from tests.integrations.test_agent_workflows import Client, play, saying, built

class Dying(Client):
    def _inner_get_response(self, **_):
        os._exit(7)

writer = saying("writer")
writer.client = Dying("writer")
engine = ReplanningEngine(["repair"], store=SqliteStore(sys.argv[1]))
workflow = replanned(built("sequential", [saying("finder"), writer]), engine, thread="report")
anyio.run(play, workflow)
"""


async def test_killed(tmp_path: Path) -> None:
    """After a process was killed, who had finished is not asked again, and who was cut off is."""
    store = tmp_path / "runs.db"
    died = await anyio.run_process([sys.executable, "-c", KILLED, str(store)], check=False)
    assert died.returncode == 7
    agents = [saying("finder"), saying("writer")]
    engine = ReplanningEngine(["repair"], store=SqliteStore(store))
    workflow = replanned(built("sequential", agents), engine, thread="report")
    _, result = await play(workflow)
    assert (asked(*agents), outputs(result)) == ([0, 1], ["writer spoke"])
    assert agents[1].client.seen == [["go", "finder spoke"]]
    assert status(engine) == "succeeded"


async def test_resumed_from_a_checkpoint(tmp_path: Path) -> None:
    """A question is answered in another process, which restores the workflow from its checkpoint."""

    def engine() -> ReplanningEngine:
        return ReplanningEngine([Editing()], store=SqliteStore(tmp_path / "runs.db"))

    class Editing:
        name = "editing"

        async def propose(self, request: ReplanRequest) -> list[Alternative]:
            return editor_instead(request)

    storage = InMemoryCheckpointStorage()

    def attach(agents: Any, editor: Any) -> Any:
        workflow = built("sequential", agents, checkpoint_storage=storage)
        return replanned(workflow, engine(), agents=[editor], thread="report")

    first = attach([saying("finder"), failing(), saying("critic")], saying("editor"))
    _, result = await play(first)
    [request] = result.get_request_info_events()
    answer = {request.request_id: request.data.to_function_approval_response(True)}
    agents, editor = [saying("finder"), saying("writer"), saying("critic")], saying("editor")
    second = attach(agents, editor)
    last = (await storage.list_checkpoints(workflow_name=second.name))[-1]
    _, result = await play(second, None, checkpoint_id=last.checkpoint_id, responses=answer)
    assert (asked(*agents), asked(editor)) == ([0, 0, 1], [1])
    assert editor.client.seen == [["go", "finder spoke"]]
    assert agents[-1].client.seen == [["go", "finder spoke", "editor spoke"]]
    assert status(engine()) == "succeeded"


async def test_feedback(clock: VirtualClock) -> None:
    """The feedback of a person goes to whoever stood in for the agent."""
    editor = saying("editor", "a text", "a better text")
    workflow = built("reviewed", [failing()])
    replanned(workflow, make_engine("repair", clock=clock), capabilities=WRITING, agents=[editor])
    _, result = await play(workflow)
    for response in (
        AgentRequestInfoResponse.from_strings(["better, please"]),
        AgentRequestInfoResponse.approve(),
    ):
        [request] = result.get_request_info_events()
        _, result = await play(workflow, None, responses={request.request_id: response})
    assert outputs(result) == ["a better text"]
    assert editor.client.seen[1][-1] == "better, please"


@pytest.mark.parametrize("stream", [False, True])
async def test_approvals_of_tools(clock: VirtualClock, stream: bool) -> None:
    """An agent that stands in and waits for the approval of its tool goes on after that."""

    @tool(approval_mode="always_require")
    def publish() -> str:
        """Publish."""
        return "published"

    call = Content.from_function_call("1", "publish", arguments={})
    editor = saying("editor", [call], "it is published", tools=[publish])
    workflow = built("sequential", [failing(), saying("critic")])
    engine = make_engine("repair", clock=clock)
    replanned(workflow, engine, capabilities=WRITING, agents=[editor])
    _, result = await play(workflow, stream=stream)
    [request] = result.get_request_info_events()
    assert (request.data.function_call.name, status(engine)) == ("publish", "paused")
    answer = {request.request_id: request.data.to_function_approval_response(True)}
    await play(workflow, None, stream, responses=answer)
    assert asked(editor) == [2]
    assert states(engine) == {
        "writer": "REPLACED_BY_REPLAN",
        "writer~2": "DONE",
        "critic": "DONE",
    }


async def test_changes_of_pending_agents(clock: VirtualClock) -> None:
    """What has not begun can be preceded by another agent, reordered, replaced and skipped."""
    check = Task(id="check", tool="editor", arguments={"task": "check it"}, depends_on=("writer",))
    changes = (
        AddTask(task=check, before=("critic",)),
        ModifyTask(task_id="critic", fields={"depends_on": ["check", "judge"]}),
        ModifyTask(task_id="judge", fields={"depends_on": ["writer"]}),
        SkipTask(task_id="extra"),
        ReplaceTask(task_id="writer", tasks=(Task(id="draft", tool="editor"),)),
    )
    engine = make_engine(lambda request: [alternative(*changes)], clock=clock)
    agents = [failing(), *(saying(name) for name in ("critic", "extra", "judge"))]
    editor = saying("editor", "a draft", "checked")
    _, result = await play(replanned(built("sequential", agents), engine, agents=[editor]))
    assert editor.client.seen == [["go"], ["go", "a draft", "check it"]]
    assert agents[3].client.seen == [["go", "a draft"]]
    assert agents[1].client.seen == [["go", "a draft", "checked", "judge spoke"]]
    assert asked(*agents) == [1, 1, 0, 1]
    assert outputs(result) == ["judge spoke"]
    assert status(engine) == "succeeded"


async def test_agents_that_may_not_run(clock: VirtualClock) -> None:
    """Agents behind a condition are none of the plan, and act as without an engine."""
    first, second, third = saying("finder"), saying("writer"), saying("critic")
    builder = WorkflowBuilder(start_executor=first)
    builder.add_edge(first, second, condition=lambda _: True).add_edge(first, third)
    engine = make_engine("repair", clock=clock)
    await play(replanned(builder.build(), engine))
    assert asked(first, second, third) == [1, 1, 1]
    assert states(engine) == {"finder": "DONE", "critic": "DONE"}


async def test_agents_in_loops(clock: VirtualClock) -> None:
    """Agents of a team whose first executor decides who comes next are none of the plan."""
    first, second = saying("manager"), saying("writer")
    builder = WorkflowBuilder(start_executor=first)
    builder.add_edge(first, second).add_edge(second, first, condition=lambda _: False)
    engine = make_engine("repair", clock=clock)
    await play(replanned(builder.build(), engine))
    assert asked(first, second) == [1, 1]
    assert engine.store.runs() == []


class Plain:
    """An agent that is not the framework's own, and streams by a plain generator."""

    id = name = "plain"
    description = "Speaks."

    def create_session(self, **_: Any) -> AgentSession:
        """A session."""
        return AgentSession()

    def get_session(self, *_: Any, **__: Any) -> AgentSession:
        """A session."""
        return AgentSession()

    def run(self, messages: Any = None, *, stream: bool = False, **_: Any) -> Any:
        """What it says."""

        async def updates() -> Any:
            yield AgentResponseUpdate(role="assistant", contents=[Content.from_text("plain")])

        async def response() -> Any:
            return AgentResponse.from_updates([each async for each in updates()])

        return updates() if stream else response()


async def test_agents_of_others(clock: VirtualClock) -> None:
    """Agents that are not the framework's own are steps, too."""
    for stream in (False, True):
        engine, critic = make_engine("repair", clock=clock), saying("critic")
        workflow = replanned(built("sequential", [Plain(), critic]), engine)
        await play(workflow, stream=stream)
        assert critic.client.seen == [["go", "plain"]]
        assert states(engine) == {"plain": "DONE", "critic": "DONE"}


async def test_agents_outside_of_the_workflow(clock: VirtualClock) -> None:
    """An attached agent that is run by itself acts as before; capabilities must name agents that exist."""
    writer = failing(times=1)
    workflow = built("sequential", [writer])
    with pytest.raises(ValueError, match="no agent called 'author'"):
        replanned(workflow, capabilities={"author": "write"})
    replanned(workflow, make_engine("repair", clock=clock))
    with pytest.raises(KeyError):
        await writer.run("go")
    assert (await writer.run("go")).text == "writer spoke"


async def test_cut_short(clock: VirtualClock) -> None:
    """A stream that is closed early leaves its run paused."""
    engine = make_engine("repair", clock=clock)
    workflow = replanned(built("sequential", [saying("finder"), saying("writer")]), engine)
    stream = workflow.run("go", stream=True)
    async for event in stream:
        if event.executor_id == "finder":
            break
    await stream.close()
    assert status(engine) == "paused"


async def read_some(workflow: Any) -> Any:
    """Read a stream until the workflow has a checkpoint; return it."""
    stream = workflow.run("go", stream=True)
    async for event in stream:
        if event.type == "superstep_completed":
            break
    return stream


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("thread", [None, "report"])
@pytest.mark.parametrize("is_attached", [False, True])
async def test_dropped_stream(kind: str, thread: str | None, is_attached: bool) -> None:
    """A stream that was dropped half-read does not keep the same process from going on at once, with and without an engine."""
    storage = InMemoryCheckpointStorage()
    agents = [saying("finder"), saying("writer"), saying("critic")]
    workflow = built(kind, agents, checkpoint_storage=storage)
    engine = make_engine("repair")
    if is_attached:
        replanned(workflow, engine, thread=thread)
    await read_some(workflow)
    last = await storage.get_latest(workflow_name=workflow.name)
    result = await workflow.run(checkpoint_id=last.checkpoint_id)
    assert "".join(outputs(result)).endswith("critic spoke")
    assert asked(*agents) == [1, 1, 1]
    assert [info.status for info in engine.store.runs()] == ["succeeded"] * is_attached


@pytest.mark.parametrize("kind", KINDS)
async def test_thread_of_an_unread_stream(kind: str) -> None:
    """Another workflow goes on with a thread whose stream nobody reads any more; if somebody does, it goes on without an engine."""
    agents = [saying("finder"), saying("writer"), saying("critic")]
    engine = make_engine("repair")
    first = replanned(built(kind, agents), engine, thread="report")
    stream = await read_some(first)
    others = [saying("finder"), saying("writer"), saying("critic")]
    _, result = await play(replanned(built(kind, others), engine, thread="report"))
    assert "".join(outputs(result)).endswith("critic spoke")
    assert [info.status for info in engine.store.runs()] == ["succeeded"]
    async for _ in stream:
        pass
    late = outputs(await stream.get_final_response())
    assert "".join(late).endswith("critic spoke")
    assert asked(*agents) == [1, 1, 1]


async def test_store_fails_at_the_beginning() -> None:
    """A run whose session cannot be opened asks nobody, and does not keep the workflow from being run again."""
    fails_once = FlakyStore(fails=lambda operation, number: (operation, number) == ("append", 1))
    agents = [saying("finder"), saying("writer")]
    workflow = replanned(built("sequential", agents), make_engine("repair", store=fails_once))
    with pytest.raises(StoreError):
        await play(workflow)
    assert asked(*agents) == [0, 0]
    _, result = await play(workflow)
    assert outputs(result) == ["writer spoke"]


async def test_cancelled_at_the_beginning() -> None:
    """A run that is cancelled before an agent was asked leaves its thread free."""
    for steps in range(1, 8):
        engine = make_engine("repair")
        attach = partial(replanned, engine=engine, thread="report")
        run = asyncio.ensure_future(attach(built("sequential", [saying("finder")])).run("go"))
        for _ in range(steps):
            await asyncio.sleep(0)
        run.cancel()
        await asyncio.wait([run])
        _, result = await play(attach(built("sequential", [saying("finder")])))
        assert outputs(result) == ["finder spoke"]
        assert status(engine) == "succeeded"
