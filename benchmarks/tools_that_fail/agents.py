"""Agents in a conversation with the shop, each with its own handling of failing tools.

They all follow the script of the conversation. An exception that reaches an agent ends its
conversation, as it ends the run of the frameworks; an error that it is told as the answer to its
call does not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from benchmarks.tools_that_fail.faults import TIMEOUT_SECONDS, Play, playing
from benchmarks.tools_that_fail.shop import MIRROR, Shop
from replanning import Environment, ReplanningEngine, Settings, ToolSpec
from replanning import Session as EngineSession
from replanning.journal import AttemptFailed, AttemptTimedOut, Lease, MemoryStore, Record
from replanning.testing import VirtualClock

ATTEMPTS = 3
"""Number of attempts of every agent that retries, the first included."""

Fields = Mapping[str, Mapping[str, object]]
"""By the name of a tool, the fields of its description for the engine."""

Execute = Callable[[str, Mapping[str, object]], Awaitable[str]]


class Agent(Protocol):
    """Has conversations with the shop, one after another."""

    async def play(self, play: Play) -> None:
        """Have one conversation."""


async def execute(name: str, arguments: Mapping[str, object]) -> str:
    """Execute a tool in the conversation that is going on."""
    return await playing.get().execute(name, arguments)


async def follow(play: Play, call: Execute) -> None:
    """Follow the script with a loop of one's own, until its end or an exception."""
    while (wanted := play.next_call()) is not None:
        try:
            answer = await call(*wanted)
        except Exception:  # noqa: BLE001 - whatever a tool raises, the agent has noticed
            play.notice()
            return
        play.hear(answer)


class Bare:
    """Loop that calls the tools without error handling."""

    async def play(self, play: Play) -> None:
        """Have one conversation."""
        await follow(play, play.execute)


class Tenacity:
    """A loop whose calls are decorated with `tenacity.retry`.

    https://tenacity.readthedocs.io: an attempt that raises is followed by another one, up to
    `stop_after_attempt`, and `reraise=True` shows the exception of the last one. Without a delay.
    """

    async def play(self, play: Play) -> None:
        """Have one conversation."""
        from tenacity import retry, stop_after_attempt

        await follow(play, retry(stop=stop_after_attempt(ATTEMPTS), reraise=True)(play.execute))


class LangGraph:
    """An agent of LangChain, which is a LangGraph graph.

    Args:
        shop: the shop, for the descriptions of the tools.
        names: the tools that the agent has.
        middleware: what stands around the calls.
        attach: makes of the agent the one that is run.
    """

    def __init__(
        self,
        shop: Shop,
        names: Iterable[str],
        middleware: Sequence[Any],
        attach: Callable[[Any], Any] = lambda agent: agent,
    ) -> None:
        from langchain.agents import create_agent
        from langchain_core.tools import StructuredTool

        from benchmarks.tools_that_fail.models import LangChainModel

        tools = []
        for name in names:
            about = shop.descriptions[name.removesuffix(MIRROR)]
            tools.append(
                StructuredTool(
                    name=name,
                    description=about["description"],
                    args_schema=about["parameters"],
                    coroutine=_named(name),
                )
            )
        self._agent = attach(create_agent(LangChainModel(), tools, middleware=list(middleware)))

    async def play(self, play: Play) -> None:
        """Have one conversation."""
        playing.set(play)
        try:
            await self._agent.ainvoke({"messages": [("user", "go")]}, {"recursion_limit": 200})
        except Exception:  # noqa: BLE001 - whatever a tool raises, the agent has noticed
            play.notice()


class PydanticAI:
    """An agent of pydantic-ai.

    Args:
        shop: the shop, for the descriptions of the tools.
        names: the tools that the agent has.
        capabilities: what stands around the calls.
        asks_again: whether a tool that fails raises `ModelRetry`, and the model calls it again.
    """

    def __init__(
        self,
        shop: Shop,
        names: Iterable[str],
        capabilities: Sequence[Any] = (),
        *,
        asks_again: bool = False,
    ) -> None:
        from pydantic_ai import Agent as PydanticAgent
        from pydantic_ai import ModelRetry, Tool

        from benchmarks.tools_that_fail.models import pydantic_ai_model

        def asking_again(call: Callable[..., Awaitable[str]]) -> Callable[..., Awaitable[str]]:
            async def called(**arguments: object) -> str:
                try:
                    return await call(**arguments)
                except Exception as error:
                    raise ModelRetry(str(error)) from error

            return called

        tools = []
        for name in names:
            about = shop.descriptions[name.removesuffix(MIRROR)]
            function = _named(name)
            if asks_again:
                function = asking_again(function)
            tools.append(
                Tool.from_schema(function, name, about["description"], about["parameters"])
            )
        self._agent = PydanticAgent(
            pydantic_ai_model(), tools=tools, capabilities=list(capabilities), retries=ATTEMPTS - 1
        )

    async def play(self, play: Play) -> None:
        """Have one conversation."""
        playing.set(play)
        try:
            await self._agent.run("go")
        except Exception:  # noqa: BLE001 - whatever a tool raises, the agent has noticed
            play.notice()


def _named(name: str) -> Callable[..., Awaitable[str]]:
    async def call(**arguments: object) -> str:
        return await execute(name, arguments)

    return call


class WatchedStore(MemoryStore):
    """Journal that tells the conversation of each failure that is recorded."""

    def append(self, lease: Lease, record: Record) -> None:
        """Keep a record."""
        super().append(lease, record)
        if isinstance(record.body, (AttemptFailed, AttemptTimedOut)):
            playing.get().notice()


class Session:
    """A loop whose calls are those of `engine.session`, on a virtual clock. All conversations have one store.

    Args:
        shop: the shop, for the descriptions of the tools.
        fields: by the name of a tool, what is stated of it.

    Attributes:
        store: the journals.
    """

    def __init__(self, shop: Shop, fields: Fields) -> None:
        self.store = WatchedStore()
        self.specs: list[ToolSpec] = []
        for name, stated in fields.items():
            about = shop.descriptions[name.removesuffix(MIRROR)]
            described = {"name": name, "description": about["description"], **stated}
            self.specs.append(ToolSpec.model_validate({"timeout": TIMEOUT_SECONDS, **described}))

    async def play(self, play: Play) -> None:
        """Have one conversation."""
        playing.set(play)
        async with VirtualClock() as clock:
            play.wait = clock.sleep
            environment = Environment(clock=clock, chance=lambda: 0.5)
            engine = ReplanningEngine(store=self.store, environment=environment)
            async with engine.session("Help a customer", tools=self.specs) as session:
                await follow(play, calls_of(session, play))


def calls_of(session: EngineSession, play: Play) -> Execute:
    """Return what makes calls of a session, whose tools are those of a conversation."""

    async def call(name: str, arguments: Mapping[str, object]) -> str:
        return str(await session.invoke(name, arguments, execute=play.execute))

    return call


def tool_retry_agent(shop: Shop, names: Iterable[str]) -> LangGraph:
    """Return an agent of LangChain that tries failed calls again by its own middleware.

    https://docs.langchain.com/oss/python/langchain/middleware/built-in#tool-retry: two retries,
    after which the model is told of the failure. Without a delay.
    """
    from langchain.agents.middleware import ToolRetryMiddleware

    return LangGraph(
        shop, names, [ToolRetryMiddleware(max_retries=ATTEMPTS - 1, initial_delay=0.0)]
    )


def model_retry_agent(shop: Shop, names: Iterable[str]) -> PydanticAI:
    """Return an agent of pydantic-ai whose tools ask the model to try again.

    https://ai.pydantic.dev/tools-advanced/#tool-retries: a tool that fails raises `ModelRetry`, and
    the model, which is told so, calls it again, up to `retries` times.
    """
    return PydanticAI(shop, names, asks_again=True)


def attached_langgraph(shop: Shop, fields: Fields) -> LangGraph:
    """Return an agent of LangChain that is attached to the engine."""
    from replanning.integrations.langgraph import ReplanningMiddleware, replanned

    return LangGraph(
        shop,
        fields,
        [ReplanningMiddleware()],
        lambda agent: replanned(agent, impatient_engine(), capabilities=fields),
    )


def attached_pydantic_ai(shop: Shop, fields: Fields) -> PydanticAI:
    """Return an agent of pydantic-ai that is attached to the engine."""
    from replanning.integrations.pydantic_ai import Replanned

    return PydanticAI(shop, fields, [Replanned(fields, engine=impatient_engine())])


def impatient_engine() -> ReplanningEngine:
    """Return an engine on the real clock that does not wait before it tries again."""
    settings = Settings.model_validate({"retry": {"delay": 0}})
    return ReplanningEngine(store=WatchedStore(), settings=settings)
