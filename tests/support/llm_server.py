"""Scripted web server that speaks the APIs of OpenAI, Anthropic, GitHub Copilot and Ollama."""

from __future__ import annotations

import base64
import json
import math
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self

import anyio.to_thread
from pydantic import BaseModel

from replanning.llm import FinishReason
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from replanning.testing.llm import estimate_tokens, fake_embedding, reply_text
from replanning.testing.scripted import ScriptStep

LLMApi = Literal["openai", "anthropic", "ollama"]

LLMRequestKind = Literal["chat", "embeddings", "models"]

SECRET_HEADER_WORDS: Final = ("authorization", "api-key", "token", "cookie")
"""Words in the names of headers whose values are masked in the repr."""


class Headers(dict[str, str]):
    """Headers by lower-case name; keys and tokens are masked in the repr."""

    def __repr__(self) -> str:
        shown = {
            name: "***" if any(word in name for word in SECRET_HEADER_WORDS) else value for name, value in self.items()
        }
        return repr(shown)


@dataclass(slots=True, eq=False, repr=False)
class LLMRequest:
    """Request as it reached a `ScriptedLLMServer`; `abandoned` if the client closed the connection before the reply."""

    number: int
    connection: int
    api: LLMApi
    kind: LLMRequestKind
    path: str
    headers: Headers
    body: JsonObject
    abandoned: bool = False

    def __repr__(self) -> str:
        left = ", abandoned" if self.abandoned else ""
        return f"<LLMRequest {self.number} {self.api} {self.kind} {self.model!r}{left}>"

    @property
    def model(self) -> str:
        return str(self.body.get("model", ""))

    @property
    def system(self) -> str:
        if "system" in self.body:
            return _content_text(self.body["system"])
        return "\n".join(text for role, text in self._messages() if role in {"system", "developer"})

    @property
    def prompt(self) -> str:
        return next((text for role, text in reversed(self._messages()) if role == "user"), "")

    @property
    def tool(self) -> str:
        choice = self.body.get("tool_choice")
        if not isinstance(choice, dict):
            return ""
        function = choice.get("function")
        return str((function if isinstance(function, dict) else choice).get("name", ""))

    def _messages(self) -> list[tuple[str, str]]:
        messages = self.body.get("messages")
        listed = messages if isinstance(messages, list) else []
        return [(str(m.get("role", "")), _content_text(m.get("content"))) for m in listed if isinstance(m, dict)]


def _content_text(content: JsonValue) -> str:
    """Return the text of a message, which may be split into parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReply:
    """Reply beyond text and JSON, made by the class methods.

    `body` replaces the reply in the form of the API; `keep` is the number of bytes of the body to send.
    """

    content: BaseModel | JsonValue = None
    finish: FinishReason = "stop"
    input_tokens: int | None = None
    output_tokens: int | None = None
    status: int = 200
    message: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    keep: int | None = None
    closes_connection: bool = False

    @classmethod
    def answer(cls, content: BaseModel | JsonValue, **fields: Any) -> Self:
        return cls(content=content, **fields)

    @classmethod
    def error(cls, status: int, message: str = "", *, retry_after: float | str | None = None) -> Self:
        headers = {} if retry_after is None else {"retry-after": str(retry_after)}
        return cls(status=status, message=message or f"made to fail with {status}", headers=headers)

    @classmethod
    def raw(cls, body: str | bytes, *, status: int = 200, content_type: str = "application/json") -> Self:
        data = body.encode() if isinstance(body, str) else body
        return cls(body=data, status=status, headers={"content-type": content_type})

    @classmethod
    def truncated(cls, content: BaseModel | JsonValue = "This is never read.", *, keep: int = 40) -> Self:
        return cls(content=content, keep=keep)

    @classmethod
    def cut(cls, content: BaseModel | JsonValue = "This is never read.", *, keep: int = 0) -> Self:
        return cls(content=content, keep=keep, closes_connection=True)


LLMServerReply = ScriptStep | ServerReply | BaseModel | JsonValue
"""Reply of a server: text; JSON or a model, sent as text; a `ServerReply`; a step that returns one of these, in real time;
or None for the default reply to requests for embeddings and models."""

CREATED_AT: Final = 1_700_000_000
"""Creation time in every reply."""

_CREATED_AT_TEXT: Final = "2023-11-14T22:13:20Z"

ROUTES: Final[Mapping[tuple[str, str], tuple[LLMApi, LLMRequestKind]]] = {
    ("POST", "/v1/chat/completions"): ("openai", "chat"),
    ("POST", "/chat/completions"): ("openai", "chat"),
    ("POST", "/v1/embeddings"): ("openai", "embeddings"),
    ("POST", "/embeddings"): ("openai", "embeddings"),
    ("GET", "/v1/models"): ("openai", "models"),
    ("GET", "/models"): ("openai", "models"),
    ("POST", "/v1/messages"): ("anthropic", "chat"),
    ("POST", "/api/chat"): ("ollama", "chat"),
    ("POST", "/api/embed"): ("ollama", "embeddings"),
    ("GET", "/api/tags"): ("ollama", "models"),
}
"""API and kind of request per path; GitHub Copilot has the paths of OpenAI without a version."""


class ChatReply(NamedTuple):
    """Reply of a model to a request."""

    request: LLMRequest
    text: str
    reply: ServerReply

    @property
    def input_tokens(self) -> int:
        given = self.reply.input_tokens
        return estimate_tokens(self.request.system + self.request.prompt) if given is None else given

    @property
    def output_tokens(self) -> int:
        given = self.reply.output_tokens
        return estimate_tokens(self.text) if given is None else given

    @property
    def arguments(self) -> JsonObject | None:
        if not self.request.tool or self.reply.finish != "stop":
            return None
        try:
            value = json.loads(self.text)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None


class ServiceError(NamedTuple):
    """Error of a service."""

    status: int
    message: str
    request_id: str


def request_id(request: LLMRequest) -> str:
    """Return the id of a request in the logs of the service."""
    return f"req_{request.number:06d}"


# OpenAI and compatible services
def openai_chat(said: ChatReply) -> JsonObject:
    """Return a chat completion of OpenAI."""
    finish: JsonValue = {"stop": "stop", "length": "length", "refusal": "stop"}.get(said.reply.finish, "content_filter")
    message: JsonObject = {"role": "assistant", "content": said.text, "refusal": None, "annotations": []}
    if said.reply.finish == "refusal":
        message |= {"content": None, "refusal": said.text}
    elif said.arguments is not None:
        call: JsonObject = {"name": said.request.tool, "arguments": said.text}
        message |= {"content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": call}]}
        finish = "tool_calls"
    return {
        "id": f"chatcmpl-{said.request.number}",
        "object": "chat.completion",
        "created": CREATED_AT,
        "model": said.request.model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish}],
        "usage": {
            "prompt_tokens": said.input_tokens,
            "completion_tokens": said.output_tokens,
            "total_tokens": said.input_tokens + said.output_tokens,
        },
    }


def openai_embeddings(request: LLMRequest) -> JsonObject:
    """Return embeddings of OpenAI."""
    texts = _input_texts(request)
    vectors: list[JsonValue] = []
    for index, text in enumerate(texts):
        vector = fake_embedding(text)
        packed = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        value: JsonValue = packed if request.body.get("encoding_format") == "base64" else list(vector)
        vectors.append({"object": "embedding", "index": index, "embedding": value})
    count = sum(map(estimate_tokens, texts))
    usage: JsonObject = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "model": request.model, "data": vectors, "usage": usage}


def openai_models(names: Sequence[str]) -> JsonObject:
    """Return the list of models of OpenAI."""
    return {
        "object": "list",
        "data": [{"id": name, "object": "model", "created": CREATED_AT, "owned_by": "replanning"} for name in names],
    }


def openai_error(failed: ServiceError) -> JsonObject:
    """Return an error of OpenAI."""
    status = failed.status
    code = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}.get(status)
    kind = "server_error" if status >= 500 else "requests" if status == 429 else "invalid_request_error"
    return {"error": {"message": failed.message, "type": kind, "param": None, "code": code}}


# Anthropic
def anthropic_chat(said: ChatReply) -> JsonObject:
    """Return a message of Anthropic."""
    stops: Mapping[str, str] = {"stop": "end_turn", "length": "max_tokens", "refusal": "refusal"}
    stop = stops.get(said.reply.finish, "pause_turn")
    content: JsonObject = {"type": "text", "text": said.text}
    if said.arguments is not None:
        content = {"type": "tool_use", "id": "toolu_1", "name": said.request.tool, "input": said.arguments}
        stop = "tool_use"
    return {
        "id": f"msg_{said.request.number}",
        "type": "message",
        "role": "assistant",
        "model": said.request.model,
        "content": [content],
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": {"input_tokens": said.input_tokens, "output_tokens": said.output_tokens},
    }


def anthropic_error(failed: ServiceError) -> JsonObject:
    """Return an error of Anthropic."""
    kinds: Mapping[int, str] = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        504: "timeout_error",
        529: "overloaded_error",
    }
    kind = kinds.get(failed.status, "api_error" if failed.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": failed.message}, "request_id": failed.request_id}


# Ollama
def ollama_chat(said: ChatReply) -> JsonObject:
    """Return a chat reply of Ollama; a streamed reply is a single part."""
    message: JsonObject = {"role": "assistant", "content": said.text}
    return {
        "model": said.request.model,
        "created_at": _CREATED_AT_TEXT,
        "message": message,
        "done": True,
        "done_reason": "length" if said.reply.finish == "length" else "stop",
        "total_duration": 1_000_000,
        "load_duration": 0,
        "prompt_eval_count": said.input_tokens,
        "prompt_eval_duration": 0,
        "eval_count": said.output_tokens,
        "eval_duration": 1_000_000,
    }


def ollama_embeddings(request: LLMRequest) -> JsonObject:
    """Return embeddings of Ollama."""
    texts = _input_texts(request)
    vectors: JsonValue = [list(fake_embedding(text)) for text in texts]
    return {"model": request.model, "embeddings": vectors, "prompt_eval_count": sum(map(estimate_tokens, texts))}


def ollama_models(names: Sequence[str]) -> JsonObject:
    """Return the list of models of Ollama."""
    details: JsonObject = {"format": "gguf", "family": "scripted", "parameter_size": "1B", "quantization_level": "Q4"}
    common: JsonObject = {"modified_at": _CREATED_AT_TEXT, "size": 1, "digest": "0" * 64, "details": details}
    return {"models": [{"name": name, "model": name, **common} for name in names]}


def ollama_error(failed: ServiceError) -> JsonObject:
    """Return an error of Ollama."""
    return {"error": failed.message}


def _input_texts(request: LLMRequest) -> list[str]:
    given = request.body.get("input")
    return [str(text) for text in given] if isinstance(given, list) else [str(given)]


RequiredFields = Mapping[str, tuple[type, ...]]
"""Required fields of a request with their types."""


class ApiFormat(NamedTuple):
    """Replies, headers and required fields of one API; None where the API has no such request."""

    chat: Callable[[ChatReply], JsonObject]
    error: Callable[[ServiceError], JsonObject]
    embeddings: Callable[[LLMRequest], JsonObject] | None
    models: Callable[[Sequence[str]], JsonObject] | None
    id_header: str
    key_headers: tuple[str, ...]
    required: RequiredFields


_CHAT_FIELDS: Final[RequiredFields] = {"model": (str,), "messages": (list,)}
_EMBEDDING_FIELDS: Final[RequiredFields] = {"model": (str,), "input": (str, list)}

APIS: Final[Mapping[LLMApi, ApiFormat]] = {
    "openai": ApiFormat(
        openai_chat, openai_error, openai_embeddings, openai_models, "x-request-id", ("authorization",), _CHAT_FIELDS
    ),
    "anthropic": ApiFormat(
        anthropic_chat,
        anthropic_error,
        None,
        None,
        "request-id",
        ("x-api-key", "authorization"),
        {**_CHAT_FIELDS, "max_tokens": (int,)},
    ),
    "ollama": ApiFormat(ollama_chat, ollama_error, ollama_embeddings, ollama_models, "", (), _CHAT_FIELDS),
}


def request_error(request: LLMRequest) -> ServerReply | None:
    """Return the error with which a service refuses a request before any model sees it."""
    api = APIS[request.api]
    if api.key_headers and not any(request.headers.get(name) for name in api.key_headers):
        return ServerReply.error(401, f"there is no key in the header {' or '.join(map(repr, api.key_headers))}")
    if request.api == "anthropic" and "anthropic-version" not in request.headers:
        return ServerReply.error(400, "anthropic-version: header is required")
    required = {"chat": api.required, "embeddings": _EMBEDDING_FIELDS, "models": {}}[request.kind]
    wrong = [name for name, kind in required.items() if not isinstance(request.body.get(name), kind)]
    if wrong:
        return ServerReply.error(400, f"the body lacks {', '.join(wrong)}, or has it in another form")
    if request.body.get("stream") and request.api != "ollama":
        return ServerReply.error(400, "this server does not stream; ask with stream=false")
    return None


API_KEY: Final = "scripted-key"
"""Key in `environ()`; the server accepts any."""

_POLL_SECONDS: Final = 0.02
_JSON: Final = "application/json"


class ScriptedLLMServer:
    """Web server in place of the services, on a free port of the loopback, in threads of its own and in real time.

    It refuses requests without a key or a required field, as the services do. JSON is sent as a tool call where the
    request demands one.

    Args:
        script: replies to chats in order; or a function of every request, called in a thread of the server.
        models: the models in the list of models.
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
        return self._url

    @property
    def connections(self) -> int:
        with self._changed:
            return len(self._connections)

    def environ(self) -> dict[str, str]:
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
        await anyio.to_thread.run_sync(self._wait, condition, timeout)

    def __enter__(self) -> Self:
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
        route = ROUTES.get((method, path.partition("?")[0]))
        if route is None:
            return None
        with self._changed:
            request = LLMRequest(len(self.requests) + 1, self._connections[connection], *route, path, headers, body)
            self.requests.append(request)
            self._changed.notify_all()
        return request

    def _scripted_reply(self, request: LLMRequest) -> LLMServerReply:
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
    """Server with a thread for each connection; closing it waits for the threads."""

    daemon_threads = False
    request_queue_size = 128

    def __init__(self, scripted: ScriptedLLMServer) -> None:
        self.scripted = scripted
        super().__init__(("127.0.0.1", 0), _ConnectionHandler)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        assert isinstance(request, socket.socket)
        self.scripted._connection_opened(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
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
        return self.server.scripted

    def do_POST(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - so named by the standard library
        """Say nothing on standard error."""

    def _serve(self) -> None:
        headers = Headers({name.lower(): value for name, value in self.headers.items()})
        body = _parse_object(self.rfile.read(int(headers.get("content-length", 0))))
        request = self.scripted._record_request(self.connection, self.command, self.path, headers, body)
        if request is None:
            self._send(404, _json_bytes({"error": {"message": f"unknown path {self.path}"}}))
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
    """Return the bytes of a reply."""
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
    return _json_bytes(api.chat(ChatReply(request, reply_text(reply.content), reply)))


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
