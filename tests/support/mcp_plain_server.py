"""MCP server of the protocol of 2025 without an SDK, whose tool `exchange` makes `find` of `search` and says so."""

import json
import sys

TOOL = {"inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}}


def say(**message: object) -> None:
    """Write a message."""
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


names = ["search", "exchange"]
for line in sys.stdin:
    asked = json.loads(line)
    if asked["method"] == "tools/call" and asked["params"]["name"] == "exchange":
        names = ["find", "exchange"]
        say(method="notifications/tools/list_changed")
    about = {
        "capabilities": {"tools": {"listChanged": True}},
        "serverInfo": {"name": "plain", "version": "1"},
    }
    answers: dict[str, object] = {
        "initialize": {"protocolVersion": "2025-06-18", **about},
        "tools/list": {"tools": [{"name": name, **TOOL} for name in names]},
        "tools/call": {"content": [{"type": "text", "text": "done"}]},
    }
    if asked["method"] in answers:
        say(id=asked["id"], result=answers[asked["method"]])
    elif "id" in asked:
        say(id=asked["id"], error={"code": -32601, "message": "Method not found"})
