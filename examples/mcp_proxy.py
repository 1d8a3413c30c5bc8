"""A client of an MCP server, attached by the line that starts the server. Needs `pip install "replanning[mcp]"`; run it as it is.

The news tool fails, and the archive replaces it after the user has approved it, here in this program, otherwise with
`replanning approve`. The next client continues the run.
"""

import sys
import tempfile
from pathlib import Path

import anyio
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.server.mcpserver import MCPServer

from replanning import ReplanningEngine
from replanning.journal import SqliteStore

server = MCPServer("library")


@server.tool()
def news(topic: str) -> str:
    """What is new about a topic."""
    raise PermissionError("the key has expired")


@server.tool()
def archive(topic: str) -> str:
    """What was new about a topic."""
    return f"{topic}, from the archive"


def connect(store):
    """Return the connection of a client to the proxy, which starts this file as the server."""
    proxy = ["-m", "replanning", "mcp-proxy", "--store", str(store), "--run-id", "talk"]
    options = ["--capability", "web=news,archive", "--ask", "store"]
    command = [*proxy, *options, "--", sys.executable, __file__, "server"]
    return stdio_client(StdioServerParameters(command=sys.executable, args=command))


async def approve(store):
    """Answer the question of the run, as soon as it is asked."""
    engine = ReplanningEngine(store=SqliteStore(store))
    while not engine.pending():  # noqa: ASYNC110
        await anyio.sleep(0.1)  # noqa: TID251 - another process writes the store
    [question] = engine.pending()
    print("asked:", question.text)
    engine.answer(question.id, "approve", by="ada")


async def main():
    """Call a tool that fails, with somebody who answers, and then another one as the next client."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "runs.db"
        async with Client(connect(store)) as client, anyio.create_task_group() as group:
            group.start_soon(approve, store)
            result = await client.call_tool("news", {"topic": "changelog"})
            print(result.content[0].text)
        async with Client(connect(store)) as client:
            await client.call_tool("archive", {"topic": "licence"})
        run = ReplanningEngine(store=SqliteStore(store)).history("talk")
        print(run.status, "after", len(run.replay()), "tasks")


if __name__ == "__main__":
    if sys.argv[1:] == ["server"]:
        server.run()
    else:
        anyio.run(main)
