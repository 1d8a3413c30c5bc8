"""Agents of Google ADK."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from google.adk.agents import LlmAgent, RunConfig
from google.adk.agents.run_config import StreamingMode
from google.adk.apps import App, ResumabilityConfig
from google.adk.models import BaseLlm, LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import InMemoryRunner
from google.adk.tools import FunctionTool, ToolContext
from google.genai import types

from replanning.integrations.google_adk import Replanned
from tests.integrations.drivers import DONE, Call, Driver, Fake, Outcome, Paused, Reported, failed


class Model(BaseLlm):  # type: ignore[misc] # its types may not be installed
    """A model that says what the script holds, and notes what it is told."""

    model: str = "scripted"
    script: Any
    told: Any

    async def generate_content_async(
        self, llm_request: Any, stream: bool = False
    ) -> AsyncIterator[Any]:
        for part in llm_request.contents[-1].parts:
            if part.function_response:
                self.told.append(_text(part.function_response.response))
        parts = [types.Part(text=DONE)]
        if self.script:
            parts = []
            for call in self.script.pop(0):
                function = types.FunctionCall(
                    name=call.tool, args={"query": call.query}, id=call.id
                )
                parts.append(types.Part(function_call=function))
        yield LlmResponse(content=types.Content(role="model", parts=parts))


class Hooks(BasePlugin):  # type: ignore[misc] # its types may not be installed
    """Notes what plugins are told about tools."""

    def __init__(self) -> None:
        super().__init__("hooks")
        self.seen: list[str] = []

    async def before_tool_callback(self, *, tool: Any, **_: Any) -> None:
        self.seen.append(f"hook start {tool.name}")

    async def after_tool_callback(self, *, tool: Any, result: Any, **_: Any) -> None:
        self.seen.append(f"hook end {tool.name} {result}")

    async def on_tool_error_callback(self, *, tool: Any, error: Any, **_: Any) -> None:
        self.seen.append(f"hook error {tool.name} {error}")


class GoogleADK(Driver):
    """A session of an app."""

    async def open(self) -> None:
        """Make the app."""
        self._model = Model(script=[], told=[])
        self._hooks = Hooks()
        self._invocation = ""
        plugins: list[Any] = []
        if self.engine is not None:
            # A session alone can be asked, so what nobody answers has to be switched off.
            options = self.options if self.asks else {"approvals": False}
            plugins.append(Replanned(self.stated, engine=self.engine, **options))
        root = LlmAgent(
            name="assistant",
            model=self._model,
            tools=[self._tool(each) for each in self.tools],
        )
        resumable = ResumabilityConfig(is_resumable=True)
        app = App(
            name="app",
            root_agent=root,
            plugins=[*plugins, self._hooks],
            resumability_config=resumable if self.asks else None,
        )
        self._runner = InMemoryRunner(app=app)
        self.stack.push_async_callback(self._runner.close)
        if self.after is not None:
            self._runner.session_service = self.after._runner.session_service
            self._session = self.after._session
            self._invocation = self.after._invocation
            return
        sessions = self._runner.session_service
        self._session = await sessions.create_session(app_name="app", user_id="u")

    async def run(self, *messages: Sequence[Call], stream: bool = False) -> Outcome:
        """Send a message of the user."""
        self._model.script = [*messages]
        return await self._run(types.Part(text="go"), stream=stream)

    async def approve(self, outcome: Outcome) -> Outcome:
        """Confirm all calls."""
        parts = []
        for each in outcome.waiting:
            response = types.FunctionResponse(
                id=each.id, name=each.name, response={"confirmed": True}
            )
            parts.append(types.Part(function_response=response))
        return await self._run(*parts)

    async def go_on(self) -> Outcome:
        """Resume the invocation."""
        return await self._run(invocation_id=self._invocation)

    async def break_off(self, *messages: Sequence[Call]) -> None:
        """Stop reading the events, whose generator stays referenced."""
        self._model.script = [*messages]
        self._stream = self._send(types.Part(text="go"))
        async for event in self._stream:
            if event.get_function_responses():
                break
        self._model.script = []

    def _send(self, *parts: Any, **options: Any) -> Any:
        message = types.Content(role="user", parts=list(parts)) if parts else None
        return self._runner.run_async(
            user_id="u", session_id=self._session.id, new_message=message, **options
        )

    async def _run(self, *parts: Any, stream: bool = False, **options: Any) -> Outcome:
        self._model.told.clear()
        self._hooks.seen.clear()
        outcome = Outcome("")
        waiting = []
        if stream:
            options["run_config"] = RunConfig(streaming_mode=StreamingMode.SSE)
        try:
            async for event in self._send(*parts, **options):
                self._invocation = event.invocation_id
                if event.content and event.content.parts and event.content.parts[0].text:
                    outcome.end = event.content.parts[0].text
                for call in event.get_function_calls():
                    if call.name == "adk_request_confirmation":
                        waiting.append(call)
                if stream:
                    names = [each.name for each in event.get_function_responses()]
                    outcome.events.append(f"{event.author} {event.partial} {names}")
        except Exception as error:  # noqa: BLE001 - compared
            outcome.end = failed(error)
        if stream:
            outcome.events += self._hooks.seen
        outcome.waiting = waiting or None
        outcome.told = [*self._model.told]
        return outcome

    def _tool(self, fake: Fake) -> Any:
        execute = self.function(fake)

        async def function(query: str, tool_context: ToolContext) -> Any:
            try:
                return await execute(query)
            except Paused as error:
                tool_context.request_confirmation(hint=str(error))
                return {"status": "pending"}

        function.__name__ = fake.name
        function.__doc__ = execute.__doc__
        if fake.in_thread:
            return FunctionTool(execute)
        return FunctionTool(function, require_confirmation=fake.needs_approval)

    def translate(self, error: Reported | Paused) -> Any:
        """Return the form in which tools report failures."""
        if isinstance(error, Reported):
            return {"status": "error", "error_message": str(error)}
        raise error


def _text(response: Any) -> str:
    if isinstance(response, dict) and set(response) == {"result"}:
        return str(response["result"])
    if isinstance(response, dict) and "error_message" in response:
        return str(response["error_message"])
    return str(response)


driver = GoogleADK
