"""Crews of CrewAI with a scripted model: with an engine and without one. `make test-frameworks` runs these tests."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest

os.environ |= {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_DISABLE_VERSION_CHECK": "true",
    "CREWAI_TRACING_ENABLED": "false",
}
pytest.importorskip(
    "crewai", reason="CrewAI is not installed here; make test-frameworks runs these tests"
)

from crewai import Agent, BaseLLM, Crew, Process, Task
from crewai.agent.planning_config import PlanningConfig
from crewai.events.event_bus import crewai_event_bus
from crewai.events.types.crew_events import CrewKickoffCompletedEvent, CrewKickoffStartedEvent
from crewai.events.types.task_events import TaskCompletedEvent, TaskFailedEvent, TaskStartedEvent
from crewai.events.types.tool_usage_events import (
    ToolFailureDetectedEvent,
    ToolUsageErrorEvent,
    ToolUsageFinishedEvent,
    ToolUsageStartedEvent,
)
from crewai.hooks import (
    HookAborted,
    register_before_tool_call_hook,
    unregister_before_tool_call_hook,
)
from crewai.tools import BaseTool, tool
from crewai.tools.tool_failure import (
    ToolExecutionFailedError,
    ToolFailure,
    ToolFailurePolicy,
    ToolFailureReason,
)
from pydantic import Field

from replanning import ReplanningEngine
from replanning.integrations.crewai import replanned
from replanning.journal import NoteAdded
from replanning.journal.sqlite import SqliteStore
from tests.support.effects import (
    ENDINGS,
    Ending,
    Tool,
    compare,
    count,
    count_cancelled,
    count_exceeded,
)
from tests.support.runs import make_engine, skipping
from tests.support.tracing import Spans

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*deprecated:DeprecationWarning"
)  # of the framework, by itself


@pytest.fixture(scope="module", params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The one event loop that the framework knows."""
    return str(request.param)


@pytest.fixture(autouse=True)
def storage(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CrewAI keeps the outputs of tasks in a folder."""
    monkeypatch.setenv("CREWAI_STORAGE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)


class ScriptedModel(BaseLLM):  # type: ignore[misc] # its types may not be installed
    """Model that gives these answers, one for each request; calls are functions or text."""

    answers: list[Any]
    functions: bool = True
    seen: list[Any] = Field(default_factory=list)

    def call(self, messages: Any, tools: Any = None, *args: Any, **options: Any) -> Any:
        self.seen.append(json.loads(json.dumps(messages)))
        return self.answers.pop(0)

    async def acall(self, *args: Any, **options: Any) -> Any:
        return self.call(*args, **options)

    def supports_function_calling(self) -> bool:
        return self.functions


def call_of(name: str, number: int = 0, /, **arguments: Any) -> Any:
    """A call of a function by the model."""
    text = json.dumps(arguments or {"query": "x"})
    return {
        "id": f"call-{number}",
        "type": "function",
        "function": {"name": name, "arguments": text},
    }


def calls(
    *names: str, functions: bool = True, done: str = "done", **arguments: Any
) -> ScriptedModel:
    """A model that calls these tools, one after the other, then is done."""
    answers: list[Any] = [[call_of(name, **arguments)] for name in names]
    if not functions:
        text = json.dumps(arguments or {"query": "x"})
        answers = [f"Thought: try\nAction: {name}\nAction Input: {text}" for name in names]
    answer = done if functions else f"Thought: enough\nFinal Answer: {done}"
    return ScriptedModel(model="scripted", answers=[*answers, answer], functions=functions)


@tool
def search(query: str) -> str:
    """Search."""
    raise PermissionError(f"no key to ask about {query}")


@tool
def search_archive(query: str) -> str:
    """Search the archive."""
    return f"{query}, from the archive"


@tool
def echo(query: str) -> str:
    """Say it again."""
    return query * 2


WEB = {"search": "web", "search_archive": "web"}


def agent_of(model: Any, *tools: Any, **fields: Any) -> Any:
    """An agent with these tools."""
    stated = {"role": "helper", "goal": "help", "backstory": "-", **fields}
    return Agent(llm=model, tools=list(tools), **stated)


def crew_of(model: Any, *tools: Any, **fields: Any) -> Any:
    """A crew of one agent with these tools, and one task."""
    agent = agent_of(model, *tools)
    return Crew(
        agents=[agent],
        tasks=[Task(description="find it", expected_output="it", agent=agent)],
        **fields,
    )


def results(model: Any) -> list[str]:
    """The results of tools, as the model sees them last."""
    last = model.seen[-1]
    told = [message["content"] for message in last if message["role"] == "tool"]
    said = [
        message["content"]
        for message in last
        if message["role"] == "assistant" and message["content"]
    ]
    return told + [text.partition("Observation: ")[2] for text in said if "Observation: " in text]


def repairing(**options: Any) -> ReplanningEngine:
    """An engine with the embedded provider."""
    return make_engine("repair", **options)


def statuses(engine: ReplanningEngine) -> list[str]:
    """How the runs of an engine stand."""
    return [info.status for info in engine.store.runs()]


FUNCTIONS = pytest.mark.parametrize("functions", [True, False], ids=["functions", "text"])

EVENTS = (
    CrewKickoffStartedEvent,
    CrewKickoffCompletedEvent,
    TaskStartedEvent,
    TaskCompletedEvent,
    TaskFailedEvent,
    ToolUsageStartedEvent,
    ToolUsageFinishedEvent,
    ToolUsageErrorEvent,
    ToolFailureDetectedEvent,
)


@contextmanager
def recorded() -> Iterator[list[Any]]:
    """What the events say, in the order in which they were emitted."""
    seen, shown = list[Any](), list[Any]()
    with crewai_event_bus.scoped_handlers():
        for kind in EVENTS:
            crewai_event_bus.register_handler(kind, lambda _, event: seen.append(event))
        yield shown
        crewai_event_bus.flush()
    names = ("type", "tool_name", "tool_args", "error", "from_cache", "failure", "run_attempts")
    for event in sorted(seen, key=lambda each: each.emission_sequence):
        output = getattr(event, "output", "")
        shown.append(
            [
                *(str(getattr(event, name, None)) for name in names),
                str(getattr(output, "raw", output)),
            ]
        )


WAYS: dict[str, Callable[[Any], Any]] = {
    "kickoff": lambda crew: anyio.to_thread.run_sync(crew.kickoff),
    "kickoff_async": lambda crew: crew.kickoff_async(),
    "akickoff": lambda crew: crew.akickoff(),
}


@FUNCTIONS
@pytest.mark.parametrize("way", WAYS)
async def test_substitute(way: str, functions: bool) -> None:
    """A tool that fails is replaced by another of its capability, however the crew is run."""
    model, engine = calls("search", functions=functions), repairing()
    with replanned(crew_of(model, search, search_archive), engine, capabilities=WEB) as crew:
        output = await WAYS[way](crew)
    assert (results(model), output.raw) == (["x, from the archive"], "done")
    assert output.tasks_output[0].tool_failures == []
    assert statuses(engine) == ["succeeded"]
    assert crew.agents[0].tools == crew.tasks[0].tools == [search, search_archive]


async def pay(
    tools: Sequence[Tool], engine: ReplanningEngine | None, stated: Mapping[str, Mapping[str, Any]]
) -> object:
    """Run a crew whose model writes its calls as text, which CrewAI repeats by itself."""
    own = [tool(each.__name__)(each) for each in tools]
    crew = crew_of(calls("charge", functions=False, q="x"), *own)
    if engine is None:
        return await crew.akickoff()
    with replanned(crew, engine, capabilities=stated):
        return await crew.akickoff()


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
async def test_no_more_effects_than_without(ending: Ending) -> None:
    """A call that is written as text is executed as often as by the framework alone: the engine leaves its repetition to it."""
    counted, promised = await compare(
        pay, ending, lambda: repairing(retry={"delay": 0}), repeats=True
    )
    assert counted == promised


async def test_a_call_that_is_cut_off_is_executed_once() -> None:
    """A call that is written as text, and is cancelled or exceeds its time, is executed as often as by the framework alone."""
    alone = await count_cancelled(pay, None, in_thread=True)
    assert await count_cancelled(pay, repairing(), in_thread=True) == alone
    assert alone == {"charge": 1, "stand_in": 0}
    repeated = (await count(pay, ENDINGS["timeout"].end, None, {}))["charge"]
    for stated in ({}, {"idempotent": True}):
        counted = await count_exceeded(pay, repairing(), in_thread=True, timeout=0.3, **stated)
        assert counted == {"charge": repeated, "stand_in": 0}


@tool(result_as_answer=True)
def answer(query: str) -> str:
    """Answer."""
    return f"{query} is the answer"


@tool(max_usage_count=1)
def once(query: str) -> str:
    """Do it once."""
    return f"{query} once"


class Shout(BaseTool):  # type: ignore[misc] # its types may not be installed
    """A tool that is a class, and async."""

    name: str = "Shout it out"
    description: str = "Shout."

    async def _run(self, query: str, times: int = 1) -> str:
        return query.upper() * times


@tool
def refuse(query: str) -> Any:
    """Report a failure."""
    return ToolFailure(message=f"no {query}", code="E1")


@tool
def strict(query: str) -> str:
    """Fail, and end the crew."""
    raise LookupError(f"nothing about {query}")


strict.tool_failure_policy = ToolFailurePolicy.RAISE

PLAYS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "twice": (["echo", "echo"], {}),
    "answer": (["answer"], {}),
    "once": (["once", "once"], {"query": "a"}),
    "class": (["shout_it_out"], {"query": "a"}),
    "unknown": (["nothing"], {}),
    "missing": (["echo"], {"other": 1}),
    "wrong": (["echo"], {"query": [1]}),
    "failing": (["search"], {}),
    "reported": (["refuse"], {}),
    "strict": (["strict"], {}),
}


@FUNCTIONS
@pytest.mark.parametrize("play", PLAYS)
def test_same_as_without(play: str, functions: bool) -> None:
    """Without a failure, or a way on, all is that of the framework alone: outputs, messages, events, counts and cache."""
    names, arguments = PLAYS[play]
    tools = [echo, answer, once, Shout(), search, refuse, strict]

    def run(attached: bool) -> list[object]:
        model = calls(*names, functions=functions, **arguments)
        crew = crew_of(model, *tools, cache=True)
        crew.agents[0].cache = True
        seen: list[object] = []
        with recorded() as events:
            try:
                if attached:
                    with replanned(crew, repairing()):
                        output = crew.kickoff()
                else:
                    output = crew.kickoff()
                seen += [output.raw, [str(each) for each in output.tasks_output[0].tool_failures]]
            except Exception as error:  # noqa: BLE001 - compared
                seen += [type(error), str(error)]
        task_id = str(crew.tasks[0].id)
        counts = [each.current_usage_count for each in tools]
        text = json.dumps([*map(str, seen), model.seen]).replace(task_id, "TASK")
        return [text, events, counts, crew.tasks[0].used_tools, crew.tasks[0].tools_errors]

    assert run(attached=True) == run(attached=False)


def test_tool_that_hooks_see() -> None:
    """Hooks see the class of a tool and what only this class has."""
    seen: list[Any] = []

    class Fetch(BaseTool):  # type: ignore[misc] # its types may not be installed
        name: str = "fetch"
        description: str = "Fetch."
        host: str = "example.org"

        def _run(self, query: str) -> str:
            return query

    def look(context: Any) -> None:
        instance = context.tool if isinstance(context.tool, BaseTool) else context.agent.tools[0]
        seen.append((isinstance(instance, Fetch), instance.host))

    register_before_tool_call_hook(look)
    try:
        with replanned(crew_of(calls("fetch"), Fetch()), repairing()) as crew:
            crew.kickoff()
    finally:
        unregister_before_tool_call_hook(look)
    assert seen == [(True, "example.org")]


def bodies(engine: ReplanningEngine) -> list[Any]:
    """What is on record of the last run."""
    return [record.body for record in engine.store.read(engine.store.runs()[0].run)]


def done(engine: ReplanningEngine) -> dict[str, object]:
    """The outputs of the tasks and calls that were done; of structured ones their text."""
    outputs = {}
    for body in bodies(engine):
        if body.kind == "attempt-succeeded":
            structured = isinstance(body.output, dict) and "raw" in body.output
            outputs[body.task] = body.output["raw"] if structured else body.output
    return outputs


def test_tasks_of_the_crew() -> None:
    """The tasks of the crew are tasks of the session, which has failed if one was begun but not done."""
    model, engine = calls("strict", "echo"), repairing()
    crew = crew_of(model, echo, strict)
    with replanned(crew, engine), pytest.raises(ToolExecutionFailedError):
        crew.kickoff()
    assert (statuses(engine), done(engine)) == (["failed"], {})
    with replanned(crew, engine):
        crew.kickoff()
        model.answers.append("again")
        crew.kickoff()
    assert (statuses(engine), done(engine)) == (
        ["succeeded", "failed"],
        {"find-it": "done", "echo-2": "xx", "find-it-2": "again"},
    )


def test_exception_and_resumed_session() -> None:
    """An exception that leaves the block pauses the session, which the next block may resume; the task is begun anew."""
    model, engine = calls("strict", "echo"), repairing()
    crew = crew_of(model, echo, strict)
    with pytest.raises(ToolExecutionFailedError), replanned(crew, engine, thread="r"):
        crew.kickoff()
    assert (statuses(engine), crew.agents[0].tools) == (["paused"], [echo, strict])
    with replanned(crew, engine, thread="r"):
        crew.kickoff()
    assert (statuses(engine), done(engine)) == (["succeeded"], {"echo-3": "xx", "find-it": "done"})


def test_planning() -> None:
    """A crew that plans before its tasks shows its planner the same tools, and the planning is a task like others."""
    plan = json.dumps(
        {"list_of_plans_per_task": [{"task_number": 1, "task": "find it", "plan": " by search"}]}
    )

    def run(engine: ReplanningEngine | None) -> list[Any]:
        model = calls("search_archive")
        planner = ScriptedModel(model="scripted", answers=[plan])
        crew = crew_of(model, search, search_archive, planning=True, planning_llm=planner)
        with replanned(crew, engine) if engine else nullcontext():
            crew.kickoff()
        return [planner.seen, model.seen]

    engine = repairing()
    assert run(engine) == run(None)
    planned, *others = done(engine).items()
    assert planned[1] == plan
    assert others == [("search_archive-3", "x, from the archive"), ("find-it-by-search", "done")]


def test_agent_that_plans() -> None:
    """The steps of an agent that plans its work are on record, and the tools that they call are replaced."""
    steps = {
        "plan": "1",
        "steps": [{"step_number": 1, "description": "look", "tool_to_use": "search"}],
        "ready": True,
    }
    answers = [json.dumps(steps), [call_of("search")], "found", "enough"]
    model, engine = ScriptedModel(model="scripted", answers=answers), repairing()
    crew = crew_of(model, search, search_archive)
    crew.agents[0].planning_config = PlanningConfig(reasoning_effort="low", max_attempts=1)
    with replanned(crew, engine, capabilities=WEB):
        assert crew.kickoff().raw == "enough"
    (note,) = [body for body in bodies(engine) if isinstance(body, NoteAdded)]
    assert (note.type, note.data["step_description"], note.data["success"]) == (
        "plan_step_completed",
        "look",
        True,
    )
    assert done(engine)["search-2~2"] == "x, from the archive"


def test_hierarchical_process() -> None:
    """The tools of a coworker to whom the manager delegates are replaced."""
    model = calls("search", done="found")
    delegated: Any = {"task": "look", "context": "-", "coworker": "helper"}
    manager, engine = calls("delegate_work_to_coworker", **delegated), repairing()
    agent = agent_of(model, search, search_archive)
    task = Task(description="find it", expected_output="it")
    crew = Crew(agents=[agent], tasks=[task], process=Process.hierarchical, manager_llm=manager)
    with replanned(crew, engine, capabilities=WEB):
        assert crew.kickoff().raw == "done"
    assert (results(model), results(manager)) == (["x, from the archive"], ["found"])
    assert (statuses(engine), done(engine)["find-it"]) == (["succeeded"], "done")


def test_copies_of_a_crew() -> None:
    """The runs of `kickoff_for_each` are one session, in which each has its tasks."""
    model, engine = calls("search", "search"), repairing()
    model.answers.insert(1, "first")
    crew = crew_of(model, search, search_archive)
    with replanned(crew, engine, capabilities=WEB):
        assert [output.raw for output in crew.kickoff_for_each([{}, {}])] == ["first", "done"]
    assert statuses(engine) == ["succeeded"]
    assert {"find-it", "find-it-2"} < done(engine).keys()


def test_tasks_at_once() -> None:
    """Tasks with `async_execution` run in threads, with their tools attached."""
    engine = repairing()
    models = [calls("search", done=each) for each in "ab"]
    agents = [
        agent_of(model, search, search_archive, role=f"helper {n}")
        for n, model in enumerate(models)
    ]
    tasks = [
        Task(description=f"find {n}", expected_output="it", agent=agent, async_execution=not n)
        for n, agent in enumerate(agents)
    ]
    with replanned(Crew(agents=agents, tasks=tasks), engine, capabilities=WEB) as crew:
        assert [each.raw for each in crew.kickoff().tasks_output] == ["a", "b"]
    assert [results(model) for model in models] == [["x, from the archive"]] * 2
    assert {"find-0": "a", "find-1": "b"}.items() <= done(engine).items()


def test_streaming() -> None:
    """A crew that streams is used within the block like any other."""
    model, engine = calls("search"), repairing()
    with replanned(
        crew_of(model, search, search_archive, stream=True), engine, capabilities=WEB
    ) as crew:
        streaming = crew.kickoff()
        for _ in streaming:
            pass
        assert streaming.result.raw == "done"
    assert (results(model), statuses(engine)) == (["x, from the archive"], ["succeeded"])


def test_own_tools_come_first() -> None:
    """Where two agents have tools of one name, each uses its own, also as a substitute."""
    models, agents = [], []
    for number in range(2):

        @tool("Find")
        def find(query: str, number: int = number) -> str:
            """Find."""
            raise PermissionError(str(number))

        @tool("Look up")
        def look_up(query: str, own: int = number) -> str:
            """Look it up."""
            return f"{query} by {own}"

        models.append(calls("find"))
        agents.append(agent_of(models[-1], find, look_up, role=f"helper {number}"))
    tasks = [
        Task(description=f"find {each.role}", expected_output="it", agent=each) for each in agents
    ]
    web = {"Find": "web", "look_up": "web"}
    with replanned(Crew(agents=agents, tasks=tasks), repairing(), capabilities=web) as crew:
        crew.kickoff()
    assert [results(model) for model in models] == [["x by 0"], ["x by 1"]]


def test_limits_of_use() -> None:
    """Each execution counts against the limit of its tool; a tool whose limit is spent is no substitute."""

    @tool(max_usage_count=1)
    def limited(query: str) -> str:
        """Do it once."""
        return f"{query} once"

    model = calls("search", "search")
    with replanned(
        crew_of(model, search, limited),
        repairing(),
        capabilities={"search": "web", "limited": "web"},
    ) as crew:
        output = crew.kickoff()
    assert results(model)[0] == "x once"
    assert results(model)[1] == "Error executing tool: no key to ask about x"
    assert (search.current_usage_count, limited.current_usage_count) == (2, 1)
    assert len(output.tasks_output[0].tool_failures) == 1


def test_what_only_the_model_can_mend() -> None:
    """Arguments that do not fit a tool, and a limit that is spent, are told to the model; the engine does not act."""
    engine, web = repairing(), {"echo": "web", "once": "web", "search_archive": "web"}
    with replanned(
        crew_of(calls("echo", other=1), echo, once, search_archive), engine, capabilities=web
    ) as crew:
        output = crew.kickoff()
        assert "arguments validation failed" in output.tasks_output[0].tool_failures[0].message
        limited = crew.agents[0].tools[1]
        told = [limited.run(query="x"), limited.run(query="x")]
    assert (told[0], told[1].reason) == ("x once", ToolFailureReason.USAGE_LIMIT)
    assert not [body for body in bodies(engine) if body.kind == "alternatives-considered"]


def test_timeout() -> None:
    """A tool that hangs is replaced after its timeout."""
    woken = threading.Event()

    @tool("search")
    def hang(query: str) -> str:
        """Hang."""
        woken.wait(20)
        return "too late"

    model = calls("search")
    stated: Any = {**WEB, "search": {"capability": "web", "timeout": 0.05, "effect": "none"}}
    with replanned(crew_of(model, hang, search_archive), repairing(), capabilities=stated) as crew:
        crew.kickoff()
        woken.set()
    assert results(model) == ["x, from the archive"]


@pytest.mark.parametrize("thread", [None, "t"])
def test_question_without_a_gate(thread: str | None) -> None:
    """The model sees the failure of the tool, and nobody is asked about a call that CrewAI does not make again."""
    stated: Any = {**WEB, "search_archive": {"capability": "web", "dangerous": True}}
    model, engine = calls("search"), repairing(store=SqliteStore("runs.db"))
    crew = crew_of(model, search, search_archive)
    with replanned(crew, engine, capabilities=stated, thread=thread):
        crew.kickoff()
        assert engine.pending() == []
    assert results(model) == ["Error executing tool: no key to ask about x"]
    assert statuses(engine) == ["succeeded"]


def test_skipped_call() -> None:
    """About a call that is skipped, the model is told why; that is not the answer of the crew."""

    @tool("search", result_as_answer=True)
    def final(query: str) -> str:
        """Search."""
        raise PermissionError("no key")

    for each in (search, final):
        model = calls("search")
        with replanned(crew_of(model, each), make_engine(skipping)) as crew:
            assert crew.kickoff().raw == "done"
        [told] = results(model)
        assert "was skipped: nobody needs it" in told


def test_hooks() -> None:
    """A call that a hook blocks is no call of the session, and a tool that stops the crew on purpose is not replaced."""

    @tool("stop")
    def stop(query: str) -> str:
        """Stop."""
        raise HookAborted("enough")

    def block(context: Any) -> bool | None:
        return False if context.tool_name == "search" else None

    model, engine = calls("search", "stop"), repairing()
    register_before_tool_call_hook(block)
    try:
        with replanned(
            crew_of(model, search, stop, search_archive),
            engine,
            capabilities={**WEB, "stop": "web"},
        ) as crew:
            crew.kickoff()
    finally:
        unregister_before_tool_call_hook(block)
    assert results(model) == [
        "Tool execution blocked by hook. Tool: search",
        "Error executing tool: enough",
    ]
    assert done(engine) == {"find-it": "done"}


async def test_cancellation() -> None:
    """A crew that is cancelled ends, although its tool hangs, and leaves the session paused."""
    begun, woken = anyio.Event(), threading.Event()

    @tool("search")
    def hang(query: str) -> str:
        """Hang."""
        anyio.from_thread.run_sync(begun.set, token=token)
        woken.wait(20)
        return query

    token = anyio.lowlevel.current_token()
    model, engine = calls("search"), repairing()
    crew = crew_of(model, hang)
    async with anyio.create_task_group() as group:

        async def run() -> None:
            with replanned(crew, engine):
                await crew.akickoff()

        group.start_soon(run)
        await begun.wait()
        group.cancel_scope.cancel()
    woken.set()
    assert (statuses(engine), crew.agents[0].tools) == (["paused"], [hang])


def test_one_trace() -> None:
    """Spans of a tool are below those of its attempt, and the session is below the span of the program."""
    spans = Spans()
    tracer = spans.provider.get_tracer("app")

    @tool("search_archive")
    def traced(query: str) -> str:
        """Search the archive."""
        with tracer.start_as_current_span("within"):
            return query

    engine = repairing(tracer_provider=spans.provider)
    crew = crew_of(calls("search"), search, traced)
    with tracer.start_as_current_span("request"), replanned(crew, engine, capabilities=WEB):
        crew.kickoff()
    assert spans.path("within") == ["replanning.attempt", "replanning.run", "request"]


async def test_single_agent() -> None:
    """An agent without a crew is attached in the same way."""
    for way in (
        lambda agent: anyio.to_thread.run_sync(agent.kickoff, "x?"),
        lambda agent: agent.kickoff_async("x?"),
    ):
        model, engine = calls("search"), repairing()
        with replanned(agent_of(model, search, search_archive), engine, capabilities=WEB) as agent:
            assert (await way(agent)).raw == "done"
        assert (results(model), statuses(engine)) == (["x, from the archive"], ["succeeded"])


def test_example() -> None:
    """The example runs as it is: alone, with stand-ins, and with a person before it goes on where it was."""
    example = Path(__file__).parents[2] / "examples" / "crewai_agent.py"
    ran = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=120)
    lines = ran.stdout.splitlines()
    found = "  research: found the changelog, from the archive (researcher)"
    outputs = [found, "  write: Version 2 is faster. (editor)", "  judge: Well said. (critic)"]
    assert lines[: lines.index("with stand-ins")][-1] == "  the model does not answer", ran.stderr
    assert lines[: lines.index("with a person who decides")][-3:] == outputs
    resumed = lines[lines.index("resumed") + 1 :]
    assert resumed == ["  editor is asked", "  critic is asked", *outputs]
