"""Real web server that answers as a test wants, and keeps what it was asked."""

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple, Self


class Request(NamedTuple):
    """A request as it reached the server; the names of headers are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Answer = tuple[int, Mapping[str, str], bytes | Iterable[bytes]]
"""Status, headers, and the body: whole, or in parts of which there may be no end; None cuts the connection."""


class HttpServer(ThreadingHTTPServer):
    """A server on a free port of this machine, which serves until its block is left; nothing listens there afterwards."""

    def __init__(
        self, answer: Callable[[Request], Answer | None] = lambda request: (200, {}, b"")
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[Request] = []
        self.answer = answer
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})

    def answer_json(self, value: object = None, status: int = 200, **headers: str) -> None:
        """Answer every request with this JSON."""
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        body = json.dumps(value).encode()
        self.answer = lambda request: (status, {"content-type": "application/json", **named}, body)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: HttpServer

    def handle_any(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, self.path, headers, content)
        self.server.requests.append(request)
        answer = self.server.answer(request)
        if answer is None:
            return
        status, named, body = answer
        length = {"content-length": str(len(body))} if isinstance(body, bytes) else {}
        self.send_response_only(status)
        for name, value in {**length, **named}.items():
            self.send_header(name, value)
        with suppress(ConnectionError):  # the client may have had enough
            self.end_headers()
            for part in [body] if isinstance(body, bytes) else body:
                self.wfile.write(part)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any  # noqa: N815 - the names are those of http.server

    def log_message(self, *_: object) -> None:
        pass
