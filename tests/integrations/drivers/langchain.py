"""Agents of LangChain, and graphs of LangGraph with a `ToolNode` of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.callbacks import AsyncCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import ToolException, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt

from replanning.integrations.langgraph import ReplanningMiddleware, replanned
from tests.integrations.drivers import DONE, Call, Driver, Fake, Outcome, Paused, Reported, failed

THREAD: Any = {"configurable": {"thread_id": "thread"}}


class Model(BaseChatModel):  # type: ignore[misc] # its types are not followed
    """A model that says what the script holds, and notes what it is told."""

    script: Any
    told: Any

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        """Take tools."""
        return self

    def _next(self, messages: Any) -> AIMessage:
        results: list[str] = []
        for message in reversed(messages):
            if not isinstance(message, ToolMessage):
                break
            results.insert(0, message.text)
        self.told += results
        if not self.script:
            return AIMessage(DONE)
        calls: list[Any] = []
        for number, call in enumerate(self.script.pop(0)):
            call_id = f"{len(messages)}-{number}" if call.id is None else call.id
            calls.append({"name": call.tool, "args": {"query": call.query}, "id": call_id})
        return AIMessage("", tool_calls=calls)

    def _generate(self, messages: Any, *_: Any, **options: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self._next(messages))])

    def _stream(self, messages: Any, *_: Any, **options: Any) -> Iterator[ChatGenerationChunk]:
        message = self._next(messages)
        chunks: list[Any] = []
        for index, call in enumerate(message.tool_calls):
            text = json.dumps(call["args"])
            chunks.append({**call, "args": text, "index": index, "type": "tool_call_chunk"})
        yield ChatGenerationChunk(message=AIMessageChunk(message.text, tool_call_chunks=chunks))


class Hooks(AsyncCallbackHandler):  # type: ignore[misc] # its types are not followed
    """Notes what callbacks are told about tools."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def on_tool_start(self, serialized: Any, input_str: str, **_: Any) -> None:
        self.seen.append(f"hook start {serialized['name']} {input_str}")

    async def on_tool_end(self, output: Any, **_: Any) -> None:
        self.seen.append(f"hook end {output.text}")

    async def on_tool_error(self, error: BaseException, **_: Any) -> None:
        self.seen.append(f"hook error {error}")


class LangChain(Driver):
    """A thread of an agent."""

    async def open(self) -> None:
        """Make the graph."""
        self._model = Model(script=[], told=[])
        self.saver = InMemorySaver() if self.asks else None
        if self.after is not None:
            self.saver = self.after.saver
        self._config = THREAD if self.asks else {}
        graph = self.graph([self._tool(each) for each in self.tools])
        if self.engine is not None:
            graph = replanned(graph, self.engine, capabilities=self.stated, **self.options)
        self.agent = graph

    def graph(self, tools: list[Any]) -> Any:
        """Return the compiled graph."""
        middleware: list[Any] = []
        if self.engine is not None:
            middleware.append(ReplanningMiddleware())
        approved = {each.name: True for each in self.tools if each.needs_approval}
        if approved:
            middleware.append(HumanInTheLoopMiddleware(interrupt_on=approved))
        return create_agent(self._model, tools, middleware=middleware, checkpointer=self.saver)

    async def run(self, *messages: Sequence[Call], stream: bool = False) -> Outcome:
        """Send a message of the user."""
        self._model.script = [*messages]
        return await self._run({"messages": [("user", "go")]}, stream)

    async def approve(self, outcome: Outcome) -> Outcome:
        """Resume with an approval, of a question or in the form of the framework."""
        [asked] = outcome.waiting
        if "question" in asked:
            answer = {"question": asked["question"], "verdict": "approve", "by": "ada"}
        else:
            answer = {"decisions": [{"type": "approve"}]}
        return await self._run(Command(resume=answer))

    async def go_on(self) -> Outcome:
        """Resume the thread."""
        return await self._run(None)

    async def break_off(self, *messages: Sequence[Call]) -> None:
        """Stop reading the stream, whose generator stays referenced."""
        self._model.script = [*messages]
        given = {"messages": [("user", "go")]}
        self._stream = self.agent.astream(given, self._config, stream_mode="updates")
        async for part in self._stream:
            if "tools" in part:
                break

    async def _run(self, given: Any, stream: bool = False) -> Outcome:
        self._model.told.clear()
        outcome = Outcome("")
        try:
            if stream:
                result = await self._read_stream(given, outcome)
            else:
                result = await self.invoke(given)
            asked = result.get("__interrupt__")
            if asked:
                outcome.waiting = [each.value for each in asked]
            else:
                outcome.end = result["messages"][-1].text
        except Exception as error:  # noqa: BLE001 - compared
            outcome.end = failed(error)
        outcome.told = [*self._model.told]
        return outcome

    async def invoke(self, given: Any) -> Any:
        """Run the graph, and return its last state."""
        return await self.agent.ainvoke(given, self._config)

    async def _read_stream(self, given: Any, outcome: Outcome) -> Any:
        hooks = Hooks()
        config = {**self._config, "callbacks": [hooks]}
        result: Any = {}
        async for event in self.agent.astream_events(given, config, version="v2"):
            outcome.events.append(f"{event['event']} {event['name']} {event['tags']}")
            if event["event"] == "on_chain_end":
                result = event["data"]["output"]
        outcome.events += hooks.seen
        return result

    def _tool(self, fake: Fake) -> Any:
        made = tool(self.function(fake))
        made.handle_tool_error = True
        return made

    def translate(self, error: Reported | Paused) -> Any:
        """Raise what becomes a message, or interrupt the graph."""
        if isinstance(error, Reported):
            raise ToolException(str(error))
        return f"answered: {interrupt(str(error))}"


driver = LangChain
