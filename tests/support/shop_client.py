"""Client of the shop as a command, and as an MCP server on its standard streams: `shop_client.py URL [PATH [TOKEN]]`.

The command sends the token, or the key in `SHOP_KEY`, and prints the answer; `login` sends the password in
`SHOP_PASSWORD` and prints the token. Without a path it is an MCP server with the tools `login` and `use`.
"""

import json
import os
import sys
from urllib.request import Request, urlopen

URL = sys.argv[1]


def send(path: str, token: str = "") -> str:
    """Send a request with the token or key."""
    headers = {"Authorization": f"Bearer {token or os.environ['SHOP_KEY']}"}
    with urlopen(Request(f"{URL}/{path}", headers=headers)) as answer:
        return answer.read().decode()


def login(password: str = "") -> str:
    """Log in; return the token."""
    document = {"password": password or os.environ["SHOP_PASSWORD"]}
    with urlopen(Request(f"{URL}/login", json.dumps(document).encode())) as answer:
        return json.load(answer)["access_token"]


def serve() -> None:
    """Answer the requests of an MCP client."""
    tools = [{"name": name, "inputSchema": {"type": "object"}} for name in ("login", "use")]
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked:
            continue
        answer: dict[str, object] = {"jsonrpc": "2.0", "id": asked["id"]}
        match asked["method"]:
            case "initialize":
                about = {"capabilities": {"tools": {}}, "protocolVersion": "2025-06-18"}
                answer["result"] = {**about, "serverInfo": {"name": "shop", "version": "1"}}
            case "tools/list":
                answer["result"] = {"tools": tools}
            case "tools/call":
                call = login if asked["params"]["name"] == "login" else send
                text = call(**asked["params"].get("arguments", {}))
                answer["result"] = {"content": [{"type": "text", "text": text}]}
            case _:
                answer["error"] = {"code": -32601, "message": "Method not found"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if len(sys.argv) == 2:
    serve()
elif sys.argv[2] == "login":
    sys.stdout.write(login())
else:
    sys.stdout.write(send(*sys.argv[2:]))
