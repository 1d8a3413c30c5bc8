"""Agents of the OpenAI Agents SDK."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agents import Agent, RunHooks, Runner, function_tool, set_trace_processors
from agents.mcp import MCPServer
from agents.testing import ScriptedModel, assistant_message, function_call
from agents.tracing import TracingProcessor
from mcp.types import CallToolResult, TextContent
from mcp.types import Tool as McpTool

from replanning.integrations.openai_agents import replanned
from tests.integrations.drivers import DONE, Call, Driver, Fake, Outcome, Reported, failed


class Watcher(RunHooks, TracingProcessor):  # type: ignore[misc] # its types may not be installed
    """Notes the calls of hooks, and the ends of spans."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def on_tool_start(self, context: Any, agent: Any, tool: Any) -> None:
        self.seen.append(f"hook start {tool.name}")

    async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: Any) -> None:
        self.seen.append(f"hook end {tool.name} {result}")

    def on_span_end(self, span: Any) -> None:
        data = span.export()["span_data"]
        self.seen.append(f"span {data['type']} {data.get('name')}")

    def on_trace_start(self, trace: Any) -> None: ...
    def on_trace_end(self, trace: Any) -> None: ...
    def on_span_start(self, span: Any) -> None: ...
    def shutdown(self) -> None: ...
    def force_flush(self) -> None: ...


class Server(MCPServer):  # type: ignore[misc] # its types may not be installed
    """Server of MCP in this process: its tools alone can say that they failed."""

    def __init__(self, tools: Sequence[Fake]) -> None:
        super().__init__()
        self.tools = {each.name: each for each in tools}

    @property
    def name(self) -> str:
        return "server"

    async def connect(self) -> None: ...
    async def cleanup(self) -> None: ...

    async def list_tools(self, run_context: Any = None, agent: Any = None) -> list[Any]:
        schema = {"type": "object", "properties": {"query": {"type": "string"}}}
        fields = [{"name": name, "inputSchema": schema} for name in self.tools]
        return [McpTool.model_validate(each) for each in fields]

    async def call_tool(self, tool_name: str, arguments: Any, meta: Any = None) -> Any:
        is_error = False
        try:
            text = self.tools[tool_name].execute(arguments["query"])
        except Reported as error:
            text = str(error)
            is_error = True
        content = [TextContent(type="text", text=text)]
        return CallToolResult.model_validate({"content": content, "isError": is_error})

    async def list_prompts(self) -> Any: ...
    async def get_prompt(self, name: str, arguments: Any = None) -> Any: ...


class OpenAIAgents(Driver):
    """Runs of one agent, in one block where it is attached."""

    async def open(self) -> None:
        """Make the agent."""
        self._watcher = Watcher()
        set_trace_processors([self._watcher])
        self._model = ScriptedModel()
        functions = [each for each in self.tools if not each.reports]
        reporting = [each for each in self.tools if each.reports]
        agent: Any = Agent(
            "assistant",
            model=self._model,
            tools=[self._tool(each) for each in functions],
            mcp_servers=[Server(reporting)] if reporting else [],
        )
        if self.engine is not None:
            block = replanned(
                agent, self.engine, capabilities=self.stated, thread="thread", **self.options
            )
            agent = await self.stack.enter_async_context(block)
        self._agent = agent

    async def run(self, *messages: Sequence[Call], stream: bool = False) -> Outcome:
        """Run the agent."""
        self._fill(messages)
        return await self._run("go", stream)

    async def approve(self, outcome: Outcome) -> Outcome:
        """Approve all interruptions of a copy of the state."""
        from agents import RunState

        state = await RunState.from_string(self._agent, outcome.waiting)
        for each in state.get_interruptions():
            state.approve(each)
        if self._model.remaining_steps == 0:
            self._fill(())
        return await self._run(state)

    async def break_off(self, *messages: Sequence[Call]) -> None:
        """Stop reading the stream."""
        self._fill(messages)
        stream = Runner.run_streamed(self._agent, "go")
        async for event in stream.stream_events():
            if getattr(event, "name", "") == "tool_output":
                break
        stream.cancel()
        self._fill(())

    def _fill(self, messages: Sequence[Sequence[Call]]) -> None:
        self._model._steps.clear()
        for at, message in enumerate(messages):
            calls = []
            for number, call in enumerate(message):
                call_id = f"{at}-{number}" if call.id is None else call.id
                calls.append(function_call(call.tool, {"query": call.query}, call_id=call_id))
            self._model.enqueue(calls)
        self._model.enqueue([assistant_message(DONE)])

    async def _run(self, given: Any, stream: bool = False) -> Outcome:
        outcome = Outcome("")
        self._watcher.seen.clear()
        try:
            if stream:
                result = Runner.run_streamed(self._agent, given, hooks=self._watcher)
                async for event in result.stream_events():
                    outcome.events.append(f"{event.type} {getattr(event, 'name', '')}")
                outcome.events += self._watcher.seen
            else:
                result = await Runner.run(self._agent, given)
            outcome.end = str(result.final_output)
            if result.interruptions:
                outcome.waiting = result.to_state().to_string()
            shown = result.to_input_list()
        except Exception as error:  # noqa: BLE001 - compared
            outcome.end = failed(error)
            shown = self._model.calls[-1].input
        for item in shown:
            if not isinstance(item, str) and item.get("type") == "function_call_output":
                outcome.told.append(_text(item["output"]))
        return outcome

    def _tool(self, fake: Fake) -> Any:
        return function_tool(self.function(fake), needs_approval=fake.needs_approval)


def _text(output: Any) -> str:
    if isinstance(output, list):
        [part] = output
        return str(part["text"])
    return str(output)


driver = OpenAIAgents
