"""Shop with a login: a real web server that says in which forms a secret has reached it."""

import base64
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.http_server import Answer, HttpServer, Request
from tests.support.secret_examples import JWT

PASSWORD = "correct-horse-7-battery"
KEY = "key-9f8e7d6c5b4a"
"""Key of the shop, which its customers have in their environment."""
TOKEN = JWT
"""Token that a login returns, in a format that is recognised without a name."""

SECRETS = (PASSWORD, KEY, TOKEN)

FORMS: dict[str, Callable[[str], dict[str, Any]]] = {
    "authorization": lambda token: {"headers": {"Authorization": f"Bearer {token}"}},
    "cookie": lambda token: {"headers": {"Cookie": f"theme=dark; session={token}"}},
    "x-api-key": lambda token: {"headers": {"X-Api-Key": token}},
    "query": lambda token: {"params": {"token": token}},
    "body": lambda token: {"json": {"token": token}},
    "user": lambda token: {"auth": ("eve", token)},
}
"""Forms in which a request has a token, as arguments of httpx."""


class Shop(HttpServer):
    """A shop that logs in who knows the password, and serves who sends its key or token.

    Attributes:
        accepted: the paths that were asked for with the right secret, in order.
    """

    def __init__(self) -> None:
        super().__init__(self._serve)
        self.accepted: list[str] = []

    def _serve(self, request: Request) -> Answer:
        place = urlsplit(request.path)
        body = json.loads(request.body) if request.body else {}
        if place.path == "/mcp":
            return self._serve_mcp(request, body)
        if place.path == "/login":
            if body.get("password") != PASSWORD:
                return 403, {}, b""
            self.accepted.append("login")
            return _json({"access_token": TOKEN, "user": "eve"})
        if not _secrets_of(request, body) & {KEY, TOKEN}:
            return 401, {}, b""
        self.accepted.append(place.path.strip("/"))
        return _json({"orders": 3})

    def _serve_mcp(self, request: Request, asked: dict[str, Any]) -> Answer:
        """Answer as an MCP server with one tool, `orders`."""
        if request.method != "POST":
            return 405, {}, b""
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return 401, {}, b""
        answers: dict[str, object] = {
            "initialize": {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "shop", "version": "1"},
            },
            "tools/list": {"tools": [{"name": "orders", "inputSchema": {"type": "object"}}]},
            "tools/call": {"content": [{"type": "text", "text": "3 orders"}]},
        }
        if "id" not in asked:
            return 202, {}, b""
        if asked["method"] == "tools/call":
            self.accepted.append("mcp")
        if asked["method"] not in answers:
            error = {"code": -32601, "message": "Method not found"}
            return _json({"jsonrpc": "2.0", "id": asked["id"], "error": error})
        return _json({"jsonrpc": "2.0", "id": asked["id"], "result": answers[asked["method"]]})


def _secrets_of(request: Request, body: dict[str, Any]) -> set[str]:
    """Return the secrets that a request has, each where its path says."""
    headers = request.headers
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    found = {
        credentials if scheme == "Bearer" else "",
        headers.get("cookie", "").removeprefix("theme=dark; session="),
        headers.get("x-api-key", ""),
        str(body.get("token")),
        *parse_qs(urlsplit(request.path).query).get("token", []),
    }
    if scheme == "Basic":
        user, _, password = base64.b64decode(credentials).decode().partition(":")
        assert user == "eve"
        found.add(password)
    return found


def _json(value: object) -> Answer:
    return 200, {"content-type": "application/json"}, json.dumps(value).encode()
