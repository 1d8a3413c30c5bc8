"""Agents of pydantic-ai."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic_ai import (
    Agent,
    AgentRunResultEvent,
    CallDeferred,
    DeferredToolRequests,
    ModelRetry,
    Tool,
    capture_run_messages,
)
from pydantic_ai.capabilities import Instrumentation
from pydantic_ai.messages import (
    ModelMessage,
    ModelResponse,
    RetryPromptPart,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
)
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel
from pydantic_ai.models.instrumented import InstrumentationSettings

from replanning.integrations.pydantic_ai import Replanned
from tests.integrations.drivers import DONE, Call, Driver, Fake, Outcome, Paused, Reported, failed
from tests.support.tracing import Spans


class PydanticAI(Driver):
    """A conversation with an agent."""

    async def open(self) -> None:
        """Make the agent."""
        self._script: list[Sequence[Call]] = []
        self._told: list[str] = []
        self._history: list[ModelMessage] = []
        if self.after is not None:
            self._history = self.after._history
        self._spans = Spans()
        settings = InstrumentationSettings(tracer_provider=self._spans.provider)
        capabilities: list[Any] = [Instrumentation(settings)]
        if self.engine is not None:
            capabilities.append(Replanned(self.stated, engine=self.engine, **self.options))
        self._agent: Agent[None, Any] = Agent(
            FunctionModel(self._answer, stream_function=self._stream),
            tools=[self._tool(each) for each in self.tools],
            capabilities=capabilities,
            output_type=[str, DeferredToolRequests] if self.asks else str,
        )

    async def run(self, *messages: Sequence[Call], stream: bool = False) -> Outcome:
        """Run the agent with a prompt."""
        self._script = [*messages]
        return await self._run(stream, user_prompt="go")

    async def approve(self, outcome: Outcome) -> Outcome:
        """Approve all requests."""
        requests, history = outcome.waiting
        results = requests.build_results(approve_all=True, metadata=requests.metadata)
        return await self._run(message_history=history, deferred_tool_results=results)

    async def go_on(self) -> Outcome:
        """Go on from the last message of the model."""
        return await self._run(message_history=self._history)

    async def break_off(self, *messages: Sequence[Call]) -> None:
        """Leave the iteration over the nodes of the graph."""
        self._script = [*messages]
        async with self._agent.iter("go") as run:
            async for node in run:
                if type(node).__name__ == "CallToolsNode":
                    break

    async def _run(self, stream: bool = False, **options: Any) -> Outcome:
        self._told.clear()
        outcome = Outcome("")
        with capture_run_messages() as captured:
            try:
                if stream:
                    output = await self._read_stream(outcome, options)
                else:
                    result = await self._agent.run(**options)
                    output = result.output
                outcome.end = str(output)
                if isinstance(output, DeferredToolRequests):
                    outcome.waiting = (output, [*captured])
            except Exception as error:  # noqa: BLE001 - compared
                outcome.end = failed(error)
            finally:
                last = max(
                    (n for n, each in enumerate(captured) if isinstance(each, ModelResponse)),
                    default=-1,
                )
                self._history = captured[: last + 1]
        outcome.told = [*self._told]
        return outcome

    async def _read_stream(self, outcome: Outcome, options: Any) -> Any:
        output = None
        async with self._agent.run_stream_events(**options) as events:
            async for event in events:
                if isinstance(event, AgentRunResultEvent):
                    output = event.result.output
                    outcome.events.append(str(event.result.usage))
                part = getattr(event, "part", None)
                outcome.events.append(f"{type(event).__name__} {getattr(part, 'content', '')}")
        ours = [span for span in self._spans.finished if not span.name.startswith("replanning")]
        outcome.events += [f"span {span.name}" for span in ours]
        return output

    def _tool(self, fake: Fake) -> Tool[None]:
        # A request to try again is a failure where the framework allows no further attempt.
        return Tool(self.function(fake), max_retries=0, requires_approval=fake.needs_approval)

    def translate(self, error: Reported | Paused) -> Any:
        """Ask the model to try again, or let another program execute the call."""
        if isinstance(error, Reported):
            raise ModelRetry(str(error))
        raise CallDeferred

    def _next(self, messages: list[ModelMessage]) -> Sequence[Call]:
        for part in messages[-1].parts:
            if isinstance(part, ToolReturnPart | RetryPromptPart):
                self._told.append(str(part.content))
        return self._script.pop(0) if self._script else ()

    def _answer(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        parts: list[Any] = []
        for number, call in enumerate(self._next(messages)):
            call_id = f"{len(messages)}-{number}" if call.id is None else call.id
            parts.append(ToolCallPart(call.tool, {"query": call.query}, call_id))
        return ModelResponse(parts or [TextPart(DONE)])

    async def _stream(self, messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        response = self._answer(messages, info)
        for number, part in enumerate(response.parts):
            if isinstance(part, ToolCallPart):
                text = json.dumps(part.args)
                call_id = part.tool_call_id
                yield {number: DeltaToolCall(part.tool_name, text, tool_call_id=call_id)}
            elif isinstance(part, TextPart):
                yield part.content


driver = PydanticAI
