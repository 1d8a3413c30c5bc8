"""MCP server without an SDK, which starts quickly: its tools report failures, refuse calls, or end it."""

import json
import sys

QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
TOOLS = [
    {"name": "news", "inputSchema": QUERY},
    {"name": "refused", "inputSchema": QUERY},
    {"name": "archive", "inputSchema": QUERY},
    {"name": "charge", "inputSchema": QUERY},
    {"name": "read", "inputSchema": QUERY, "annotations": {"readOnlyHint": True}},
]


def say(**message: object) -> None:
    """Write a message."""
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def text(said: str, **fields: object) -> dict[str, object]:
    """A result that is a text."""
    return {"content": [{"type": "text", "text": said}], **fields}


for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    method, params = asked["method"], asked.get("params", {})
    tool = params.get("name")
    if method == "initialize":
        about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "reporting", "version": "1"}}
        say(id=asked["id"], result={"protocolVersion": "2025-06-18", **about})
    elif method == "tools/list":
        say(id=asked["id"], result={"tools": TOOLS})
    elif tool == "news":
        say(id=asked["id"], result=text("no news: the service is down", isError=True))
    elif tool == "archive":
        say(id=asked["id"], result=text("Errors: 0 failed, in the archive"))
    elif tool == "refused" or method != "tools/call":
        say(id=asked["id"], error={"code": -32601, "message": "not today"})
    else:  # after it took effect
        sys.exit(3)
