"""A server of the Model Context Protocol as they were in 2025, without an SDK: it says by itself that its tools change.

It has the tool `exchange`, and `search` until that was used, `find` afterwards.
"""

from __future__ import annotations

import json
import sys
from typing import Any

VERSION = "2025-06-18"


def say(message: dict[str, Any]) -> None:
    """Write a message."""
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def result(method: str, names: list[str]) -> dict[str, Any] | None:
    """What a request is answered; None where it is not known."""
    capabilities = {"tools": {"listChanged": True}}
    hints = {"readOnlyHint": True}
    tools = [{"name": name, "inputSchema": {"type": "object"}, "annotations": hints} for name in names]
    answers: dict[str, dict[str, Any]] = {
        "initialize": {
            "protocolVersion": VERSION,
            "capabilities": capabilities,
            "serverInfo": {"name": "plain", "version": "1"},
        },
        "tools/list": {"tools": tools},
        "tools/call": {"content": [{"type": "text", "text": "done"}]},
    }
    return answers.get(method)


def main() -> None:
    """Serve until the client leaves."""
    names = ["search", "exchange"]
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked:
            continue
        if asked["method"] == "tools/call" and asked["params"]["name"] == "exchange":
            names = ["find", "exchange"]
            say({"method": "notifications/tools/list_changed"})
        answer = result(asked["method"], names)
        error = {"error": {"code": -32601, "message": "Method not found"}}
        say({"id": asked["id"], **(error if answer is None else {"result": answer})})


if __name__ == "__main__":
    main()
