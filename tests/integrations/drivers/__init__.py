"""One small driver for each framework: it runs an agent with fake tools and a scripted model, alone or attached.

The drivers of frameworks are modules of this package; `INTEGRATIONS` names them without importing any.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 # the frameworks run on it alone
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib import import_module
from inspect import isawaitable
from types import MappingProxyType
from typing import Any, Final, Self

import pytest

from replanning import ReplanningEngine

Stated = Mapping[str, Any]
"""What a user states of tools, by their names: a capability, or fields."""

Messages = Sequence[Sequence["Call"]]
"""What the model says, one after the other: the calls of each of its messages. Then it is done."""

DONE: Final = "done"

OWN_WARNINGS: Final = [
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*ResumabilityConfig:UserWarning"),
]
"""Marks of tests: what frameworks warn about in their own code."""


class Reported(Exception):
    """Raised by the body of a tool to report a failure in the way of the framework, instead of raising it."""


class Paused(Exception):
    """Raised by the body of a tool to stop the agent in the way of the framework, which is no failure."""


@dataclass(frozen=True)
class Call:
    """A call of a tool by the model."""

    tool: str
    query: str = "x"
    id: str | None = None


class Fake:
    """A tool that remembers what it was executed with.

    Args:
        name: of the tool.
        body: returns or raises what the tool does; may be async, unless it is executed in a thread.
        needs_approval: whether a person must approve its calls, in the way of the framework.
        reports: whether its body raises `Reported`, as only some tools of some frameworks can.
        in_thread: whether it is no coroutine function, so that the framework executes it in a thread.
    """

    def __init__(
        self,
        name: str,
        body: Callable[[str], Any],
        *,
        needs_approval: bool = False,
        reports: bool = False,
        in_thread: bool = False,
    ) -> None:
        self.name = name
        self.needs_approval = needs_approval
        self.reports = reports
        self.in_thread = in_thread
        self.executed: list[str] = []
        self._body = body

    def execute(self, query: str) -> Any:
        """Execute the body, and return what it returns."""
        self.executed.append(query)
        return self._body(query)


@dataclass
class Outcome:
    """How a run of an agent ended.

    Attributes:
        end: the final text, or the type and text of the exception that ended the run.
        told: what tools told the model, in the order of its calls.
        events: what streams, hooks and spans of the framework showed.
        waiting: for a person, and with what the driver goes on then; None if nobody is asked.
    """

    end: str
    told: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    waiting: Any = None


def _as_fields(stated: Any) -> dict[str, Any]:
    if isinstance(stated, str):
        return {"capability": stated}
    return dict(stated)


def failed(error: BaseException) -> str:
    """Return the end of a run with an exception."""
    return f"{type(error).__name__}: {error}"


class Driver(ABC):
    """Agent of a framework, alone or attached; used as an async context manager.

    Attributes:
        has_approvals: whether a tool of the framework can need an approval. Otherwise the user states
            for the engine that it is dangerous.

    Args:
        tools: of the agent.
        engine: to which the agent is attached; None for the framework alone.
        stated: about the tools.
        asks: whether a person can be asked in the way of the framework.
        approvals: whether the engine asks a person.
        after: the driver of a process that was killed, whose conversation this one has.
    """

    has_approvals = True

    def __init__(
        self,
        tools: Sequence[Fake],
        engine: ReplanningEngine | None = None,
        stated: Stated = MappingProxyType({}),
        *,
        asks: bool = False,
        approvals: bool = True,
        after: Any = None,
    ) -> None:
        self.tools = tools
        self.engine = engine
        self.stated = {name: _as_fields(each) for name, each in stated.items()}
        self.asks = asks
        self.options: dict[str, Any] = {} if approvals else {"approvals": False}
        self.after = after
        self.stack = AsyncExitStack()
        if not self.has_approvals:
            for each in tools:
                if each.needs_approval:
                    self.stated.setdefault(each.name, {})["dangerous"] = True

    async def __aenter__(self) -> Self:
        await self.stack.__aenter__()
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stack.__aexit__(*error)  # type: ignore[arg-type]

    async def open(self) -> None:
        """Make the agent."""
        return

    def function(self, fake: Fake) -> Callable[[str], Any]:
        """Return a tool as a function for the framework."""

        async def execute(query: str) -> Any:
            try:
                output = fake.execute(query)
                return await output if isawaitable(output) else output
            except (Reported, Paused) as error:
                return self.translate(error)

        def execute_in_thread(query: str) -> Any:
            try:
                return fake.execute(query)
            except (Reported, Paused) as error:
                return self.translate(error)

        function: Any = execute_in_thread if fake.in_thread else execute
        function.__name__ = fake.name
        function.__doc__ = f"Do what {fake.name} does."
        return function

    def translate(self, error: Reported | Paused) -> Any:
        """Return or raise what says the same in the framework."""
        raise error

    @abstractmethod
    async def run(self, *messages: Sequence[Call], stream: bool = False) -> Outcome:
        """Run the agent with a model that says these messages.

        Args:
            messages: the calls of each.
            stream: whether what the framework streams is noted, with its hooks and spans.
        """

    async def approve(self, outcome: Outcome) -> Outcome:
        """Approve what a run waits for, in the way of the framework, and go on."""
        raise NotImplementedError

    async def go_on(self) -> Outcome:
        """Go on with a run that was cut off, in the way of the framework."""
        raise NotImplementedError

    async def break_off(self, *messages: Sequence[Call]) -> None:
        """Begin to read the stream of a run, and stop after a tool was executed."""
        raise NotImplementedError


@dataclass(frozen=True)
class Integration:
    """Framework that can be attached, as the table shows it.

    Attributes:
        name: of the module of its driver in this package.
        title: of its column.
        page: that describes it, relative to the page with the table.
        cannot: why it cannot do what a situation needs, by the name of that situation.
        needs: module that has to be installed.
    """

    name: str
    title: str
    page: str
    cannot: Mapping[str, str]
    needs: str | None = None

    def driver(self) -> type[Driver]:
        """Return the driver; skip the test if the framework is not installed here."""
        if self.needs is not None:
            pytest.importorskip(self.needs, reason=f"{self.title} is not installed here")
        module = import_module(f"{__name__}.{self.name}")
        return module.driver


async def cut_off(
    driver: Driver,
    began: asyncio.Event,
    *messages: Sequence[Call],
    before: Callable[[], None] = lambda: None,
) -> Outcome:
    """Cancel a run once a tool has begun, after what has to be done before."""
    run = asyncio.ensure_future(driver.run(*messages))
    await asyncio.wait_for(began.wait(), 20)
    before()
    run.cancel()
    try:
        return await run
    except asyncio.CancelledError as error:
        return Outcome(failed(error))


_LATE_MESSAGES: Final = (
    "The framework keeps messages only when a run ends, so a run that was cut off starts over."
)
_NO_STATE: Final = "A run that was cut off leaves no state to resume from."
_NO_IDS: Final = "A crew keeps no ids of calls, so a task that was cut off starts over."
_NO_KEYS: Final = "The protocol gives a call no id that survives a restart."

INTEGRATIONS: Final = (
    Integration(
        "session",
        "a session alone",
        "../how-to/agents.md",
        {
            "events": "A program has no streams and no hooks.",
            "broken_stream": "A program has no streams.",
            "approval": "Asking before a call is up to the program.",
            "reported_failure": "A function can fail only by raising.",
        },
    ),
    Integration(
        "agent_framework",
        "Agent Framework",
        "agent_framework.md",
        {
            "reported_failure": "A function can fail only by raising; the framework also raises an "
            "`isError` of an MCP server.",
            "resumed": _LATE_MESSAGES,
            "killed": _LATE_MESSAGES,
        },
        "agent_framework",
    ),
    Integration("google_adk", "Google ADK", "google_adk.md", {}, "google.adk"),
    Integration(
        "openai_agents",
        "OpenAI Agents",
        "openai_agents.md",
        {
            "answered_question": "A tool that has begun cannot interrupt the run: questions go to a "
            "gate, and the call waits.",
            "resumed": _NO_STATE,
            "killed": _NO_STATE,
            "control_flow": "A tool can stop a run only by raising, and that is a failure.",
        },
        "agents",
    ),
    Integration(
        "crewai",
        "CrewAI",
        "crewai.md",
        {
            "answered_question": "Questions go to a gate, and the call waits: a crew cannot be "
            "interrupted.",
            "approval": "A crew has no approvals of calls.",
            "cancellation": "Tools run in threads, which nothing can stop; the crew ends "
            "without them.",
            "resumed": _NO_IDS,
            "killed": _NO_IDS,
            "broken_stream": "A crew has no conversation to continue.",
        },
        "crewai",
    ),
    Integration("langchain", "LangChain agent", "langgraph.md", {}, "langchain"),
    Integration(
        "langgraph",
        "LangGraph `ToolNode`",
        "langgraph.md",
        {"approval": "A `ToolNode` has no approvals of calls."},
        "langgraph",
    ),
    Integration(
        "mcp",
        "MCP proxy",
        "mcp.md",
        {
            "transient": "A server does not say whether its error may pass: only tools with "
            "`--retries` are retried.",
            "answered_question": "The call of the client waits for the answer, so nothing is resumed.",
            "approval": "Asking before a call is up to the client.",
            "resumed": _NO_KEYS,
            "killed": _NO_KEYS,
            "broken_stream": "The protocol has no conversations to stream.",
            "control_flow": "A tool can stop only its own call.",
        },
        "mcp.server.mcpserver",
    ),
    Integration("pydantic_ai", "pydantic-ai", "pydantic_ai.md", {}, "pydantic_ai"),
)
