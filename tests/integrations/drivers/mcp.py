"""Clients of a server of MCP, and of the proxy before it."""

from __future__ import annotations

import asyncio  # noqa: TID251 # the server of HTTP runs on it alone
import socket
from collections.abc import Sequence
from typing import Any

import uvicorn
from mcp import Client
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

from replanning import Plan
from replanning.integrations.mcp import open_proxy
from tests.integrations.drivers import DONE, Call, Driver, Fake, Outcome, Paused, Reported, failed


class McpClient(Driver):
    """A client that calls the tools itself."""

    async def open(self) -> None:
        """Start the server, in this process, and connect."""
        server = MCPServer("server")
        for each in self.tools:
            harmless = ToolAnnotations(destructive_hint=each.needs_approval)
            function = self._function(each)
            server.add_tool(function, name=each.name, annotations=harmless, structured_output=False)
        url = await self._serve(server)
        if self.engine is None:
            target: Any = url
        else:
            described = []
            for each in self.tools:
                own = {"name": each.name, "kind": "mcp", "server": "server"}
                described.append({**own, **self.stated.get(each.name, {})})
            plan = Plan.model_validate(
                {"goal": {"objective": ""}, "mcp": {"server": {"url": url}}, "tools": described}
            )
            opened = open_proxy(self.engine, plan, **self.options)
            proxy = await self.stack.enter_async_context(opened)
            target = proxy.server
        self._target = target

    async def run(self, *messages: Sequence[Call], stream: bool = False) -> Outcome:
        """Make the calls, those of one message at once."""
        outcome = Outcome(DONE)

        async def note(progress: float, total: float | None, message: str | None) -> None:
            if stream:
                outcome.events.append(f"progress {progress} of {total}: {message}")

        try:
            # A client ends with its connection.
            async with Client(self._target) as self._client:
                for message in messages:
                    calls = [self._call(each, note) for each in message]
                    outcome.told += await asyncio.gather(*calls)
        except Exception as error:  # noqa: BLE001 - compared
            outcome.end = failed(error)
        return outcome

    async def _call(self, call: Call, note: Any) -> str:
        given = {"query": call.query}
        result = await self._client.call_tool(call.tool, given, progress_callback=note)
        text = result.content[0].text
        return f"isError: {text}" if result.is_error else text

    async def _serve(self, server: MCPServer) -> str:
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(server.streamable_http_app(), log_level="error")
        self._http = uvicorn.Server(config)
        serving = asyncio.ensure_future(self._http.serve([listening]))

        async def stop() -> None:
            self._http.should_exit = True
            self._http.force_exit = True
            await serving

        self.stack.push_async_callback(stop)
        return f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"

    def _function(self, fake: Fake) -> Any:
        execute = self.function(fake)

        async def function(query: str, context: Context) -> str:
            await context.report_progress(1, 2, "begun")
            try:
                output = await execute(query)
                await context.report_progress(2, 2, "done")
                return output
            except ConnectionResetError:
                # What the tool does is lost to the client when the connection ends.
                for connection in [*self._http.server_state.connections]:
                    connection.transport.abort()
                raise

        return function

    def translate(self, error: Reported | Paused) -> Any:
        """Raise what becomes a result with `isError`."""
        raise ToolError(str(error))


driver = McpClient
