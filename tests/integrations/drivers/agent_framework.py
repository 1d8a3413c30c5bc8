"""Agents of the Microsoft Agent Framework."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agent_framework import (
    Agent,
    BaseChatClient,
    ChatMiddlewareLayer,
    ChatResponse,
    ChatResponseUpdate,
    Content,
    FunctionInvocationLayer,
    FunctionTool,
    Message,
    MiddlewareTermination,
    ResponseStream,
    function_middleware,
)

from replanning.integrations.agent_framework import Replanned
from tests.integrations.drivers import DONE, Call, Driver, Fake, Outcome, Paused, Reported, failed


class Client(FunctionInvocationLayer, ChatMiddlewareLayer, BaseChatClient):  # type: ignore[misc]
    """A model that says what the script holds, and notes what it is told."""

    def __init__(self) -> None:
        super().__init__(function_invocation_configuration={"include_detailed_errors": True})
        self.script: list[Sequence[Call]] = []
        self.told: list[str] = []

    def _inner_get_response(
        self, *, messages: Any, stream: bool, options: Any, **kwargs: Any
    ) -> Any:
        results: list[str] = []
        for message in reversed(messages):
            found = [each for each in message.contents if each.type == "function_result"]
            if not found:
                break
            results[:0] = [str(each.result) for each in found]
        self.told += results
        contents = [Content.from_text(DONE)]
        if self.script:
            contents = []
            for number, call in enumerate(self.script.pop(0)):
                call_id = f"{len(messages)}-{number}" if call.id is None else call.id
                text = json.dumps({"query": call.query})
                contents.append(Content.from_function_call(call_id, call.tool, arguments=text))

        async def updates() -> Any:
            for content in contents:
                yield ChatResponseUpdate(role="assistant", contents=[content])

        async def response() -> Any:
            return ChatResponse(messages=[Message(role="assistant", contents=contents)])

        if stream:
            return ResponseStream(updates(), finalizer=ChatResponse.from_updates)
        return response()


class AgentFramework(Driver):
    """A session of an agent."""

    async def open(self) -> None:
        """Make the agent."""
        self._hooks: list[str] = []
        self._client = Client()

        @function_middleware
        async def watch(context: Any, call_next: Any) -> None:
            self._hooks.append(f"hook start {context.function.name}")
            await call_next()
            self._hooks.append(f"hook end {context.function.name}")

        middleware: list[Any] = []
        if self.engine is not None:
            middleware.append(Replanned(self.stated, engine=self.engine, **self.options))
        self._agent = Agent(
            self._client,
            name="assistant",
            tools=[self._tool(each) for each in self.tools],
            middleware=[*middleware, watch],
        )
        self._session = self._agent.create_session() if self.asks else None

    async def run(self, *messages: Sequence[Call], stream: bool = False) -> Outcome:
        """Run the agent with a message of the user."""
        self._client.script = [*messages]
        return await self._run("go", stream)

    async def approve(self, outcome: Outcome) -> Outcome:
        """Approve all requests."""
        answers = [each.to_function_approval_response(True) for each in outcome.waiting]
        return await self._run(answers)

    async def break_off(self, *messages: Sequence[Call]) -> None:
        """Stop reading the stream."""
        self._client.script = [*messages]
        stream = self._agent.run("go", stream=True, session=self._session)
        async for update in stream:
            if update.contents[0].type == "function_result":
                break
        await stream.close()
        self._client.script = []

    async def _run(self, given: Any, stream: bool = False) -> Outcome:
        self._client.told.clear()
        self._hooks.clear()
        outcome = Outcome("")
        try:
            if stream:
                updates = self._agent.run(given, stream=True, session=self._session)
                async for update in updates:
                    outcome.events += [f"{each.type} {each.result}" for each in update.contents]
                response = await updates.get_final_response()
                outcome.events += self._hooks
            else:
                response = await self._agent.run(given, session=self._session)
            outcome.end = response.text
            outcome.waiting = response.user_input_requests or None
        except Exception as error:  # noqa: BLE001 - compared
            outcome.end = failed(error)
        outcome.told = [*self._client.told]
        return outcome

    def _tool(self, fake: Fake) -> Any:
        mode: Any = "always_require" if fake.needs_approval else "never_require"
        return FunctionTool(name=fake.name, func=self.function(fake), approval_mode=mode)

    def translate(self, error: Reported | Paused) -> Any:
        """Stop the run."""
        raise MiddlewareTermination(str(error))


driver = AgentFramework
