"""MCP server without an SDK, whose tools print what an SDK would not.

With `--broken`, it describes them in a form that the protocol does not allow.
"""

from __future__ import annotations

import json
import sys
from typing import Any

TEXTS = {"bytes": "said", "half": "\ud83d and more", "odd": 7}
"""Texts of the answers by tool: `bytes` prints a line that is not UTF-8 before it, `half` was cut within an emoji."""

SCHEMA = "text" if "--broken" in sys.argv else {"type": "object"}


def result_of(method: str, parameters: Any) -> object:
    """Return the result of a request; None for a method that the server does not know."""
    if method == "initialize":
        return {
            "protocolVersion": parameters["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "raw", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": [{"name": name, "inputSchema": SCHEMA} for name in TEXTS]}
    if method == "tools/call":
        name = parameters["name"]
        if name == "bytes":
            sys.stdout.buffer.write(b"\xff\xfe: not UTF-8\n")
        return {"content": [{"type": "text", "text": TEXTS[name]}]}
    return None


for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        answer: dict[str, object] = {"jsonrpc": "2.0", "id": request["id"]}
        result = result_of(request["method"], request.get("params"))
        if result is None:
            answer["error"] = {"code": -32601, "message": "there is no such method"}
        else:
            answer["result"] = result
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
