"""A web server that speaks as the services of language models do, and answers as a script says."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic
from types import TracebackType
from typing import Final, Self

import anyio.to_thread

from replanning.interfaces import JsonObject
from replanning.testing._llm_apis import APIS, ROUTES, ServiceError, chat_reply, request_error, request_id
from replanning.testing._llm_requests import Headers, LLMRequest, LLMServerReply, ServerReply
from replanning.testing._steps import ScriptStep

API_KEY: Final = "scripted-key"
"""The key in `environ()`; the server takes any."""

_POLL_SECONDS: Final = 0.02
_JSON: Final = "application/json"


class ScriptedLLMServer:
    """A real web server in place of OpenAI, Anthropic, GitHub Copilot and Ollama, that answers as a script says.

    ::

        script = [ServerReply.error(429, retry_after=1), "four", hangs()]
        with ScriptedLLMServer(script) as server:
            subprocess.run(["my-program"], env={**os.environ, **server.environ()}, check=True)
        assert [request.prompt for request in server.requests] == ["What is 2 + 2?"] * 2

    It serves whoever can reach this machine's loopback: programs on asyncio, on trio or on nothing, and other
    processes. It listens on a free port while its `with` lasts, and runs in threads of its own. Its time is real: a
    step that takes a second takes a second. As the services do, it refuses a request that has no key or lacks what
    its API requires.

    Where a request has a tool that must be used, which is how Anthropic is asked for JSON, an answer that is a JSON
    object comes as the use of this tool.

    Args:
        script: what chats are answered in the order in which they come; or a function of every request, also of those
            for vectors and for the list of models, called in a thread of the server.
        models: which models it lists.

    Attributes:
        requests: every request that was understood, in order.
    """

    def __init__(
        self,
        script: Sequence[LLMServerReply] | Callable[[LLMRequest], LLMServerReply] = (),
        *,
        models: Sequence[str] = ("scripted-1",),
    ) -> None:
        self.requests: list[LLMRequest] = []
        self.models = tuple(models)
        self._script = script
        self._chat_count = 0
        self._connection_count = 0
        self._closing = False
        self._changed = threading.Condition()
        self._connections: dict[socket.socket, int] = {}
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._url = ""

    def __repr__(self) -> str:
        stands = self._url if self._server is not None else "closed"
        return f"<ScriptedLLMServer {stands} requests={len(self.requests)} connections={self.connections}>"

    @property
    def url(self) -> str:
        """Where it listens, without a path.

        Raises:
            RuntimeError: it does not listen yet.
        """
        if not self._url:
            raise RuntimeError("the server does not listen yet; use it in a `with` block")
        return self._url

    @property
    def connections(self) -> int:
        """How many connections are open."""
        with self._changed:
            return len(self._connections)

    def environ(self) -> dict[str, str]:
        """The environment of a program that is to ask this server, whichever service it knows."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": API_KEY,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": API_KEY,
            "GITHUB_COPILOT_BASE_URL": self.url,
            "GITHUB_COPILOT_TOKEN": API_KEY,
            "OLLAMA_HOST": self.url,
        }

    async def until(self, condition: Callable[[ScriptedLLMServer], object], *, timeout: float = 10.0) -> None:
        """Wait for something to be seen at the server, such as `lambda server: server.requests[-1].abandoned`.

        Raises:
            TimeoutError: it did not come within these (real) seconds.
        """
        await anyio.to_thread.run_sync(self._wait, condition, timeout)

    def __enter__(self) -> Self:
        if self._server is not None:
            raise RuntimeError("this server listens already")
        self._closing = False
        self._server = _Server(self)
        self._url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="scripted-llm-server"
        )
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        assert self._thread is not None
        self._server.shutdown()
        self._thread.join()
        with self._changed:
            self._closing = True
            for connection in self._connections:
                _shut_down_socket(connection)
        self._server.server_close()
        self._server = None

    def _wait(self, condition: Callable[[ScriptedLLMServer], object], timeout: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self), timeout):
                raise TimeoutError(f"after {timeout:g} s this was not seen; requests: {self.requests}")

    # What its connections report

    def _connection_opened(self, connection: socket.socket) -> None:
        with self._changed:
            self._connection_count += 1
            self._connections[connection] = self._connection_count
            self._changed.notify_all()

    def _connection_closed(self, connection: socket.socket) -> None:
        with self._changed:
            self._connections.pop(connection, None)
            self._changed.notify_all()

    def _mark_abandoned(self, request: LLMRequest) -> None:
        with self._changed:
            request.abandoned = not self._closing
            self._changed.notify_all()

    def _record_request(
        self, connection: socket.socket, method: str, path: str, headers: Headers, body: JsonObject
    ) -> LLMRequest | None:
        """A request as one of an API that is spoken here; None where it is none."""
        route = ROUTES.get((method, path.partition("?")[0]))
        if route is None:
            return None
        with self._changed:
            request = LLMRequest(len(self.requests) + 1, self._connections[connection], *route, path, headers, body)
            self.requests.append(request)
            self._changed.notify_all()
        return request

    def _scripted_reply(self, request: LLMRequest) -> LLMServerReply:
        """What the script says to a request."""
        wrong = request_error(request)
        if wrong is not None:
            return wrong
        if callable(self._script):
            try:
                said = self._script(request)
            except Exception as error:  # noqa: BLE001 - the script is a test's code; the answer says what is wrong
                return ServerReply.error(400, f"the script failed: {error!r}")
            if said is None and request.kind == "chat":
                return ServerReply.error(400, f"the script has no answer to {request}")
            return said
        if request.kind != "chat":
            return None
        with self._changed:
            self._chat_count += 1
            number = self._chat_count
        if number <= len(self._script):
            return self._script[number - 1]
        return ServerReply.error(
            400,
            f"the script has {len(self._script)} answers, and this is request {number}; add one, or give a function",
        )


class _Server(ThreadingHTTPServer):
    """Listens, with a thread for each connection, all of which have ended when it is closed."""

    daemon_threads = False
    request_queue_size = 128

    def __init__(self, scripted: ScriptedLLMServer) -> None:
        self.scripted = scripted
        super().__init__(("127.0.0.1", 0), _ConnectionHandler)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """Count the connection, before its thread begins."""
        assert isinstance(request, socket.socket)
        self.scripted._connection_opened(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        """Count it no longer."""
        assert isinstance(request, socket.socket)
        self.scripted._connection_closed(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away are expected here."""


class _ConnectionHandler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server
    connection: socket.socket

    @property
    def scripted(self) -> ScriptedLLMServer:
        """Whose connection this is."""
        return self.server.scripted

    def do_POST(self) -> None:
        """Answer a request."""
        self._serve()

    def do_GET(self) -> None:
        """Answer a request for the list of models."""
        self._serve()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - so named by the standard library
        """Say nothing on standard error."""

    def _serve(self) -> None:
        headers = Headers({name.lower(): value for name, value in self.headers.items()})
        body = _parse_object(self.rfile.read(int(headers.get("content-length", 0))))
        request = self.scripted._record_request(self.connection, self.command, self.path, headers, body)
        if request is None:
            known = ", ".join(sorted({path for _, path in ROUTES}))
            self._send(
                404, _json_bytes({"error": {"message": f"there is no {self.command} {self.path}; there are {known}"}})
            )
            return
        try:
            self._respond(request, self.scripted._scripted_reply(request))
        except OSError:  # the client has gone
            self.close_connection = True
            self.scripted._mark_abandoned(request)

    def _respond(self, request: LLMRequest, reply: LLMServerReply) -> None:
        if isinstance(reply, ScriptStep):
            if reply.error is not None:
                reply = ServerReply.error(400, f"a server cannot raise {reply.error!r}; use ServerReply.error(status)")
            else:
                self._delay(reply.after)
                reply = reply.value  # type: ignore[assignment]  # what a script returns is its own business
        if not isinstance(reply, ServerReply):
            reply = ServerReply(content=reply)  # type: ignore[arg-type]  # likewise
        try:
            data = _response_body(request, reply, self.scripted.models)
        except TypeError as error:
            reply = ServerReply.error(400, f"what the script answers is no JSON: {error}")
            data = _response_body(request, reply, self.scripted.models)
        headers = {APIS[request.api].id_header or "x-request-id": request_id(request), **reply.headers}
        if reply.closes_connection and not reply.keep:
            self.close_connection = True
            return
        self._send(reply.status, data, headers, keep=reply.keep, cuts=reply.closes_connection)

    def _send(
        self,
        status: int,
        data: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        keep: int | None = None,
        cuts: bool = False,
    ) -> None:
        sent = data[:keep]
        self.send_response(status)
        for name, value in {"content-type": _JSON, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data) if cuts else len(sent)))
        self.end_headers()
        self.wfile.write(sent)
        self.close_connection = self.close_connection or cuts

    def _delay(self, seconds: float) -> None:
        """Let time pass, unless the client goes away.

        Raises:
            ConnectionError: it has.
        """
        until = monotonic() + seconds
        while (left := until - monotonic()) > 0:
            self.connection.settimeout(None if left == math.inf else left)
            try:
                if not self.connection.recv(1, socket.MSG_PEEK):
                    raise ConnectionAbortedError
            except TimeoutError:
                continue
            finally:
                self.connection.settimeout(None)
            threading.Event().wait(min(left, _POLL_SECONDS))  # it has sent its next request already


def _response_body(request: LLMRequest, reply: ServerReply, models: Sequence[str]) -> bytes:
    """What a reply is on the wire."""
    api = APIS[request.api]
    if reply.body is not None:
        return reply.body
    if reply.status >= 400:
        return _json_bytes(api.error(ServiceError(reply.status, reply.message, request_id(request))))
    if request.kind == "embeddings" and api.embeddings is not None and reply.content is None:
        return _json_bytes(api.embeddings(request))
    if request.kind == "models" and api.models is not None and reply.content is None:
        return _json_bytes(api.models(models))
    if request.kind != "chat":
        return _json_bytes(reply.content)
    return _json_bytes(api.chat(chat_reply(request, reply)))


def _json_bytes(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _parse_object(data: bytes) -> JsonObject:
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _shut_down_socket(connection: socket.socket) -> None:
    with suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)
