"""MCP server whose tool answers with text alone, or with nothing, although it declares an output schema."""

from __future__ import annotations

from typing import Any

import anyio
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.types import (
    CallToolRequestParams,
    CallToolResult,
    ContentBlock,
    ListToolsResult,
    TextContent,
    Tool,
    ToolAnnotations,
)


async def list_tools(context: Any, parameters: Any) -> ListToolsResult:
    """List the tool, which promises a text under `found`."""
    schema = {
        "type": "object",
        "properties": {"found": {"type": "string"}},
        "required": ["found"],
    }
    search = Tool(
        name="search",
        input_schema={"type": "object", "properties": {"said": {"type": "string"}}},
        output_schema=schema,
        annotations=ToolAnnotations(read_only_hint=True),
    )
    return ListToolsResult(tools=[search])


async def call_tool(context: Any, parameters: CallToolRequestParams) -> CallToolResult:
    """Answer with the text that the caller gives, and nothing structured."""
    said = str((parameters.arguments or {}).get("said", ""))
    content: list[ContentBlock] = []
    if said:
        content.append(TextContent(type="text", text=said))
    return CallToolResult(content=content)


async def serve() -> None:
    """Serve on standard input and output."""
    server = Server("shapeless", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


if __name__ == "__main__":
    anyio.run(serve)
