"""Overhead per tool call: one agent with the engine and without, in turn, in one process.

Each answer of a scripted model calls one tool, which notes when it is called; a step lasts from
there to the next one. How many calls of the session a step has is counted in the journal, which is
in memory. The time is that of the processor, and of each step that of the fastest run, since others
use the machine, too, and can only add to it. What a framework does as soon as anything is attached
is measured with a hook that does nothing.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from copy import copy
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any, TypedDict

import anyio
import anyio.to_thread

from benchmarks.figures import machine, quiet
from replanning import Plan, ReplanningEngine, tool
from replanning.journal import AttemptStarted
from replanning.plan import JsonObject

BAR = 500.0
"""Microseconds that the engine may add to a call of the session, beside those of a hook that does
nothing.
"""

CALLS = 24
WARM = 8
"""Calls of a run, and how many of them warm up; frameworks stop agents that make many more."""

SERVER = Path(__file__).parent.parent / "tests" / "support" / "mcp_plain_server.py"

_called: list[float] = []
"""Times of the tool calls."""


def count_now(value: int) -> int:
    """Return the number."""
    _called.append(time.process_time())
    return value


def find_now(query: str, language: str) -> list[dict[str, object]]:
    """Find pages."""
    _called.append(time.process_time())
    return [
        {"title": f"page {n}", "url": f"https://example.org/{n}", "score": 0.5} for n in range(3)
    ]


async def count(value: int) -> int:
    """Return the number."""
    return count_now(value)


async def find(query: str, language: str) -> list[dict[str, object]]:
    """Find pages."""
    return find_now(query, language)


@dataclass(frozen=True)
class Work:
    """A tool that does nothing, as a function and as one that is not async, and the arguments of each call."""

    name: str
    title: str
    function: Callable[..., Awaitable[object]]
    plain: Callable[..., object]
    arguments: Callable[[int], dict[str, object]]


WORKS = (
    Work("count", "a number", count, count_now, lambda n: {"value": n}),
    Work(
        "find",
        "two texts",
        find,
        find_now,
        lambda n: {"query": f"what has changed in release {n}?", "language": "en"},
    ),
)

Run = Callable[[], Awaitable[object]]
Subject = Callable[[Work, int, ReplanningEngine | None], Run]
"""Makes an agent that calls the tool a number of times, attached to the engine if there is one, and
returns its run.
"""


def session(work: Work, calls: int, engine: ReplanningEngine | None) -> Run:
    """Own loop of a program."""
    function: Any = tool(work.function)

    async def run_alone() -> None:
        for n in range(calls):
            await function(**work.arguments(n))

    if engine is None:
        return run_alone

    async def run() -> None:
        async with engine.session("measure", tools=[function]) as opened:
            for n in range(calls):
                await opened.call(function, **work.arguments(n))

    return run


class _State(TypedDict):
    done: int
    found: object


def langgraph(
    work: Work, calls: int, engine: ReplanningEngine | None, *, sync: bool = False
) -> Run:
    """A graph with one node, which leads to itself; a synchronous run is one in the thread of its caller."""
    from langchain_core.runnables import RunnableLambda
    from langgraph.graph import END, START, StateGraph

    from replanning.integrations.langgraph import replanned

    async def node(state: _State) -> dict[str, object]:
        return {
            "done": state["done"] + 1,
            "found": await work.function(**work.arguments(state["done"])),
        }

    def node_now(state: _State) -> dict[str, object]:
        return {"done": state["done"] + 1, "found": work.plain(**work.arguments(state["done"]))}

    builder = StateGraph(_State)
    builder.add_node("work", RunnableLambda(node_now, node))
    builder.add_edge(START, "work")
    builder.add_conditional_edges("work", lambda state: "work" if state["done"] < calls else END)
    graph = builder.compile()
    if engine is not None:
        graph = replanned(graph, engine)
    given = {"done": 0}
    config = {"recursion_limit": calls + 5}

    async def run() -> None:
        if sync:
            graph.invoke(given, config)
        else:
            await graph.ainvoke(given, config)

    return run


def langchain(
    work: Work, calls: int, engine: ReplanningEngine | None, *, hook: bool = False
) -> Run:
    """Tools of an agent; the model is a node of its graph. The framework executes each hook around a tool in a span."""
    from langchain.agents import create_agent
    from langchain.agents.middleware import AgentMiddleware
    from langchain_core.messages import AIMessage
    from langchain_core.tools import tool as described

    from replanning.integrations.langgraph import ReplanningMiddleware, replanned
    from tests.integrations.test_langgraph import FakeModel

    class Hook(AgentMiddleware[Any, Any]):  # type: ignore[misc]  # its types are not followed
        async def awrap_tool_call(
            self, request: Any, handler: Callable[[Any], Awaitable[Any]]
        ) -> Any:
            return await handler(request)

    messages = []
    for n in range(calls):
        asked = {"name": work.name, "args": work.arguments(n), "id": str(n)}
        messages.append(AIMessage("", tool_calls=[asked]))
    messages.append(AIMessage("done"))
    model = FakeModel(messages=iter(messages))
    attached: list[Any] = []
    if engine is not None:
        attached.append(ReplanningMiddleware())
    elif hook:
        attached.append(Hook())
    agent = create_agent(model, [described(work.function)], middleware=attached)
    if engine is not None:
        agent = replanned(agent, engine)
    return lambda: agent.ainvoke({"messages": [("user", "go")]}, {"recursion_limit": 3 * calls + 5})


def pydantic_ai(
    work: Work, calls: int, engine: ReplanningEngine | None, *, hook: bool = False
) -> Run:
    """Tools of an agent; the hook wraps them, and the run, as every capability that executes tools has to."""
    from pydantic_ai import Agent
    from pydantic_ai.capabilities import AbstractCapability, CapabilityOrdering
    from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
    from pydantic_ai.models.function import FunctionModel
    from pydantic_ai.toolsets import WrapperToolset

    from replanning.integrations.pydantic_ai import Replanned

    class Hook(AbstractCapability[Any]):  # type: ignore[misc]  # its types are not followed
        def get_ordering(self) -> Any:
            return CapabilityOrdering(position="innermost")

        async def for_run(self, ctx: Any) -> Any:
            return copy(self)

        def get_wrapper_toolset(self, toolset: Any) -> Any:
            return WrapperToolset(toolset)

        async def wrap_run(self, ctx: Any, *, handler: Callable[[], Awaitable[Any]]) -> Any:
            return await handler()

    parts: list[Any] = [ToolCallPart(work.name, work.arguments(n)) for n in range(calls)]
    answers = iter([*parts, TextPart("done")])
    model = FunctionModel(lambda messages, info: ModelResponse([next(answers)]))
    attached: list[Any] = []
    if engine is not None:
        attached.append(Replanned(engine=engine))
    elif hook:
        attached.append(Hook())
    agent = Agent(model, tools=[work.function], capabilities=attached)
    return lambda: agent.run("go")


def openai_agents(work: Work, calls: int, engine: ReplanningEngine | None) -> Run:
    """Tools of an agent."""
    from agents import Agent, Runner, function_tool, set_tracing_disabled
    from agents.testing import ScriptedModel, assistant_message, function_call

    from replanning.integrations.openai_agents import replanned

    set_tracing_disabled(True)
    answers = [[function_call(work.name, work.arguments(n), call_id=str(n))] for n in range(calls)]
    model = ScriptedModel([*answers, [assistant_message("done")]])
    agent = Agent("agent", model=model, tools=[function_tool(work.function)])

    async def run() -> None:
        opened: Any = nullcontext(agent)
        if engine is not None:
            opened = replanned(agent, engine)
        async with opened as attached:
            await Runner.run(attached, "go", max_turns=calls + 5)

    return run


def agent_framework(work: Work, calls: int, engine: ReplanningEngine | None) -> Run:
    """Tools of an agent."""
    from agent_framework import Agent, Content
    from agent_framework import tool as described

    from replanning.integrations.agent_framework import Replanned
    from tests.integrations.test_agent_framework import Model

    asked = []
    for n in range(calls):
        call = Content.from_function_call(str(n), work.name, arguments=work.arguments(n))
        asked.append([call])
    attached: list[Any] = []
    if engine is not None:
        attached.append(Replanned(engine=engine))
    model = Model(*asked)
    agent = Agent(model, tools=[described(work.function)], middleware=attached)
    return lambda: agent.run("go")


def google_adk(
    work: Work, calls: int, engine: ReplanningEngine | None, *, hook: bool = False
) -> Run:
    """Tools of an agent; the hook is a plugin without callbacks of its own."""
    from google.adk.plugins import BasePlugin

    from tests.integrations.test_google_adk import Chat, agent, attached, call, text

    # It warns at each step that the model counts no tokens.
    logging.getLogger("google_adk").setLevel(logging.ERROR)
    answers = [[call(work.name, **work.arguments(n))] for n in range(calls)]
    root = agent(*answers, [text("done")], tools=[work.function])
    plugins: list[Any] = []
    if engine is not None:
        plugins.append(attached(engine, {}))
    elif hook:
        plugins.append(BasePlugin("hook"))
    chat = Chat(root, *plugins)
    return lambda: chat.send(text("go"))


def crewai(work: Work, calls: int, engine: ReplanningEngine | None) -> Run:
    """Tools of a crew, which runs in a thread."""
    from crewai.tools import tool as described

    from replanning.integrations.crewai import replanned
    from tests.integrations.test_crewai import ScriptedModel, call_of, crew_of

    answers = [[call_of(work.name, n, **work.arguments(n))] for n in range(calls)]
    crew = crew_of(
        ScriptedModel(model="scripted", answers=[*answers, "done"]),
        described(work.name)(work.plain),
    )

    async def run() -> None:
        opened: Any = nullcontext()
        if engine is not None:
            opened = replanned(crew, engine)
        with opened:
            await anyio.to_thread.run_sync(crew.kickoff)

    return run


def mcp(work: Work, calls: int, engine: ReplanningEngine | None) -> Run:
    """Tools of a server in a process of its own, through a server in between; without the engine, that only forwards."""
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client
    from mcp.server.lowlevel import Server

    from replanning.integrations.mcp import open_proxy

    command = [sys.executable, str(SERVER)]
    plan = Plan.model_validate(
        {"goal": {"objective": "measure"}, "mcp": {"server": {"command": command}}}
    )

    @asynccontextmanager
    async def open_server() -> AsyncIterator[Server[Any]]:
        if engine is not None:
            async with open_proxy(engine, plan) as proxy:
                yield proxy.server
            return
        async with Client(
            stdio_client(StdioServerParameters(command=command[0], args=command[1:]))
        ) as behind:

            async def on_list_tools(context: Any, _: object) -> Any:
                return await behind.list_tools()

            async def on_call_tool(context: Any, asked: Any) -> Any:
                report = context.session.report_progress
                return await behind.call_tool(asked.name, asked.arguments, progress_callback=report)

            yield Server("forwards", on_list_tools=on_list_tools, on_call_tool=on_call_tool)

    async def run() -> None:
        async with open_server() as server, Client(server) as client:
            for n in range(calls):
                await client.call_tool("search", work.arguments(n))
                _called.append(time.process_time())

    return run


SUBJECTS: dict[str, tuple[str, Subject]] = {
    "a session": ("replanning", session),
    "LangGraph": ("langgraph", langgraph),
    "LangGraph, synchronous": ("langgraph", partial(langgraph, sync=True)),
    "LangChain": ("langchain", langchain),
    "pydantic-ai": ("pydantic-ai-slim", pydantic_ai),
    "OpenAI Agents SDK": ("openai-agents", openai_agents),
    "Agent Framework": ("agent-framework-core", agent_framework),
    "Google ADK": ("google-adk", google_adk),
    "CrewAI": ("crewai", crewai),
    "MCP proxy, beside one that only forwards": ("mcp", mcp),
}
"""Required package and measured function, by name."""

HOOKED: dict[str, Subject] = {
    "LangChain": partial(langchain, hook=True),
    "pydantic-ai": partial(pydantic_ai, hook=True),
    "Google ADK": partial(google_adk, hook=True),
}
"""By name, the same without the engine, but with a hook that does nothing; for frameworks where
that takes time by itself.
"""


@dataclass(frozen=True)
class Row:
    """Microseconds of one framework: of a step without the engine, and what the engine adds to it, and to a run.

    Attributes:
        more_median: what it adds to a step by the medians of the runs, instead of the fastest ones.
        hook: what a hook that does nothing adds to a step.
        calls: how many calls of the session a step has.
        each: what the engine adds to each of them, beside the hook.
    """

    name: str
    version: str
    arguments: str
    without: float
    more: float
    more_median: float
    hook: float
    calls: int
    each: float
    opening: float


@dataclass(frozen=True)
class Report:
    """The figures, with the machine on which they were measured."""

    machine: str
    rounds: int
    rows: tuple[Row, ...]
    skipped: tuple[str, ...]

    def table(self) -> str:
        """The figures as a Markdown table."""
        lines = [
            f"{self.machine}; processor time, medians of {CALLS - WARM} steps, of each the fastest in {self.rounds} runs, in turn.",
            f"The engine may add {BAR:.0f} µs to a call of the session; what adds more is bold.\n",
            "| framework | arguments | a step without | more with the engine (by the medians of the runs) | of it the hook | calls | for each | for a run |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            mark = ""
            if row.each > BAR:
                mark = "**"
            hook = ""
            if row.hook:
                hook = f"{row.hook:.0f} µs"
            lines.append(
                f"| {row.name} {row.version} | {row.arguments} | {row.without:.0f} µs "
                f"| {row.more:.0f} µs ({row.more_median:.0f}) | {hook} | {row.calls} "
                f"| {mark}{row.each:.0f} µs{mark} | {row.opening / 1000:.1f} ms |"
            )
        return "\n".join([*lines, *(f"\n{line}" for line in self.skipped)])

    def to_json(self) -> JsonObject:
        """Figures as JSON."""
        return asdict(self)


def measure(
    *,
    short: bool = False,
    rounds: int | None = None,
    subjects: Mapping[str, tuple[str, Subject]] = SUBJECTS,
    report: Callable[[str], None] = lambda line: None,
) -> Report:
    """Measure every framework that is installed."""
    rounds = rounds or (10 if short else 50)
    where = machine()
    rows = list[Row]()
    skipped = list[str]()
    for name, (package, subject) in subjects.items():
        try:
            number = version(package)
        except PackageNotFoundError:
            skipped.append(f"{name} is left out: {package} is not installed")
            continue
        for work in WORKS:
            row = _measure(name, number, work, subject, rounds)
            report(f"{name}, {work.title}: {row.each:.0f} µs more for each call")
            rows.append(row)
    return Report(where, rounds, tuple(rows), tuple(skipped))


def _measure(name: str, number: str, work: Work, subject: Subject, rounds: int) -> Row:
    steps: dict[str, list[list[float]]] = {"alone": [], "hooked": [], "attached": []}
    rest: dict[str, list[float]] = {"alone": [], "hooked": [], "attached": []}
    counted = 0
    for turn in range(rounds + 2):  # the first ones warm up
        for kind, kept in steps.items():
            engine: ReplanningEngine | None = None
            chosen = subject
            if kind == "attached":
                engine = ReplanningEngine()
            elif kind == "hooked":
                if name not in HOOKED:
                    continue
                chosen = HOOKED[name]
            run = chosen(work, CALLS, engine)
            _called.clear()
            with quiet():
                start = time.process_time()
                anyio.run(run)
                elapsed = time.process_time() - start
            if turn > 1:
                kept.append([1e6 * (end - begin) for begin, end in pairwise(_called[WARM:])])
                rest[kind].append(1e6 * (elapsed - (_called[-1] - _called[0])))
            if engine is not None:
                counted = _count_attempts(engine)
    # The history of a run grows: the first step is compared with the first one, the second one with
    # the second one.
    alone, hooked, attached = (list(zip(*each, strict=True)) for each in steps.values())

    def added(columns: list[tuple[float, ...]], pick: Callable[[Sequence[float]], float]) -> float:
        pairs = zip(alone, columns, strict=True)
        return statistics.median(pick(more) - pick(less) for less, more in pairs)

    more = added(attached, min)
    more_median = added(attached, statistics.median)
    hook = 0.0
    if hooked:
        hook = added(hooked, min)
    without = statistics.median(map(min, alone))
    opening = statistics.median(rest["attached"]) - statistics.median(rest["alone"]) - more
    calls = round(counted / CALLS)  # an agent's last answer calls no tool
    return Row(
        name,
        number,
        work.title,
        without,
        more,
        more_median,
        hook,
        calls,
        (more - hook) / calls,
        opening,
    )


def _count_attempts(engine: ReplanningEngine) -> int:
    count = 0
    for info in engine.store.runs():
        for record in engine.store.read(info.run):
            count += isinstance(record.body, AttemptStarted)
    return count
