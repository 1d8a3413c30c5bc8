"""MCP server whose tools fail in several ways; `count` says how often each was executed."""

from __future__ import annotations

import os

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.shared.exceptions import MCPError
from mcp.types import ToolAnnotations

server = MCPServer("failing", instructions="Ask for news first.", version="3.1")
read_only = ToolAnnotations(read_only_hint=True)
executed: dict[str, int] = {}


def note(tool: str) -> int:
    """Count an execution of a tool."""
    executed[tool] = executed.get(tool, 0) + 1
    return executed[tool]


@server.tool(annotations=read_only)
def news(query: str) -> dict[str, str]:
    """What is new."""
    note("news")
    raise ToolError(f"no news of {query}: the service is down")


@server.tool(annotations=read_only)
def archive(query: str) -> dict[str, str]:
    """What was new."""
    note("archive")
    if query == "nothing":
        raise ToolError("the archive has nothing")
    return {"found": f"{query}, from the archive"}


@server.tool(annotations=read_only)
def flaky() -> str:
    """Work at the third time."""
    if (times := note("flaky")) < 3:
        raise ToolError("not yet")
    return f"worked at time {times}"


@server.tool(annotations=ToolAnnotations(read_only_hint=False))
def order() -> str:
    """Fail, after it may have done something."""
    note("order")
    raise ToolError("no connection")


@server.tool(annotations=read_only)
def refused() -> str:
    """Answer with an error of the protocol."""
    raise MCPError(code=-32050, message="not today", data={"until": "monday"})


@server.tool(annotations=read_only)
def full() -> str:
    """Answer with an error whose code also stands for a lost connection."""
    raise MCPError(code=-32000, message=f"the disk is full, {note('full')}")


@server.tool(annotations=read_only)
async def steps(context: Context) -> str:
    """Say how far it is."""
    for number in (1, 2):
        await context.report_progress(number, 2, f"step {number}")
    return "done"


@server.tool(annotations=read_only)
def trace(context: Context) -> str:
    """The span that the caller names as its own."""
    return str((context.request_context.meta or {}).get("traceparent"))


@server.tool(annotations=read_only)
def crash(marker: str) -> str:
    """End the process, unless the file is there."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "survived"
    os._exit(3)


async def take_effect(effects: str, end: str, context: Context) -> str:
    """Take effect, which a file notes, tell that, and end in this way."""
    async with await anyio.open_file(effects, "a") as file:
        await file.write("x")
    await context.report_progress(1)
    if end == "error":
        raise ToolError("no connection")
    if end == "refused":
        raise MCPError(code=-32050, message="not today")
    if end == "gone":
        os._exit(3)
    if end in ("hanging", "cancelled"):
        await anyio.sleep_forever()
    return "Error: no connection"


server.tool(name="charge")(take_effect)
server.tool(name="read", annotations=read_only)(take_effect)
server.tool(name="put", annotations=ToolAnnotations(idempotent_hint=True))(take_effect)


async def stand_in(effects: str, end: str) -> str:
    """Take effect in the place of another tool, which the file notes."""
    async with await anyio.open_file(effects, "a") as file:
        await file.write("s")
    return "charged"


for name in ("charge", "read", "put"):
    server.tool(name=f"{name}_elsewhere")(stand_in)


@server.tool(annotations=read_only)
def count(tool: str) -> int:
    """How often a tool was executed."""
    return executed.get(tool, 0)


if __name__ == "__main__":
    server.run()
