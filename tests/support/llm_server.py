"""What a scripted server of language models is asked, and what it is told to answer."""

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
from typing import Final, Literal, NamedTuple, Self

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
"""Words in the names of headers whose values are shown to nobody."""


class Headers(dict[str, str]):
    """Headers by name in small letters; a key or token is there, and not in what is printed."""

    def __repr__(self) -> str:
        shown = {
            name: "***" if any(word in name for word in SECRET_HEADER_WORDS) else value for name, value in self.items()
        }
        return repr(shown)


@dataclass(slots=True, eq=False, repr=False)
class LLMRequest:
    """A request as it reached a `ScriptedLLMServer`.

    Attributes:
        number: which request this is, from 1.
        connection: which connection it came on, from 1; equal where one was used again.
        api: whose way of asking this is; services that are asked as OpenAI is count as `openai`.
        kind: for an answer, for vectors, or for the list of models.
        path: what was asked for on the server.
        headers: by name in small letters; keys are masked where it is printed.
        body: the JSON that was sent.
        abandoned: whether the client closed the connection before it had its answer.
    """

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
        """Which model is asked."""
        return str(self.body.get("model", ""))

    @property
    def system(self) -> str:
        """What the model is told about its role."""
        if "system" in self.body:
            return _content_text(self.body["system"])
        return "\n".join(text for role, text in self._messages() if role in {"system", "developer"})

    @property
    def prompt(self) -> str:
        """The last thing that the user says."""
        return next((text for role, text in reversed(self._messages()) if role == "user"), "")

    @property
    def tool(self) -> str:
        """The tool that the model must use, where a shape is asked for in this way; else empty."""
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
    """The text of a message, which may come in parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReply:
    """What a `ScriptedLLMServer` sends, where text or JSON does not say it all; made by its class methods.

    Attributes:
        content: what the model says.
        finish: why it ends.
        input_tokens: what it says it was sent; counted from the text when left out.
        output_tokens: what it says it wrote; likewise.
        status: of the HTTP answer.
        message: what an error says.
        headers: sent beside the usual ones.
        body: sent as it is, in place of an answer in the API's form.
        keep: how many bytes of the body are sent; all when left out.
        closes_connection: whether the connection is closed after them, or before everything where none are.
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
    def answer(
        cls,
        content: BaseModel | JsonValue,
        *,
        finish: FinishReason = "stop",
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Self:
        """The model answers; `length` is cut at the token limit, `refusal` declines."""
        return cls(
            content=content,
            finish=finish,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            headers=headers or {},
        )

    @classmethod
    def error(cls, status: int, message: str = "", *, retry_after: float | str | None = None) -> Self:
        """The service fails with this status, its error in the form that its API has for it.

        Args:
            retry_after: the header of this name: seconds, or a date as text.
        """
        headers = {} if retry_after is None else {"retry-after": str(retry_after)}
        return cls(status=status, message=message or f"made to fail with {status}", headers=headers)

    @classmethod
    def raw(cls, body: str | bytes, *, status: int = 200, content_type: str = "application/json") -> Self:
        """These bytes, such as the HTML of a proxy or JSON of no known form."""
        data = body.encode() if isinstance(body, str) else body
        return cls(body=data, status=status, headers={"content-type": content_type})

    @classmethod
    def truncated(cls, content: BaseModel | JsonValue = "This is never read.", *, keep: int = 40) -> Self:
        """An answer that ends too early: only so many bytes of its JSON, and no error of the connection."""
        return cls(content=content, keep=keep)

    @classmethod
    def cut(cls, content: BaseModel | JsonValue = "This is never read.", *, keep: int = 0) -> Self:
        """The connection is closed after so many bytes of an answer; with 0, before there is any."""
        return cls(content=content, keep=keep, closes_connection=True)


LLMServerReply = ScriptStep | ServerReply | BaseModel | JsonValue
"""What a server answers: text; JSON or a model, sent as text; a `ServerReply`; or a step that comes to one of these
or to nothing in its time, which is real. None is what it answers without a script."""

CREATED_AT: Final = 1_700_000_000
"""When every answer says that it was made: the same each time."""

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
"""What is asked where. Services that are asked as OpenAI is, such as GitHub Copilot, have no version in their paths."""


class ChatReply(NamedTuple):
    """What a model says to a request."""

    request: LLMRequest
    text: str
    reply: ServerReply

    @property
    def input_tokens(self) -> int:
        """How many tokens it was sent."""
        given = self.reply.input_tokens
        return estimate_tokens(self.request.system + self.request.prompt) if given is None else given

    @property
    def output_tokens(self) -> int:
        """How many tokens it wrote."""
        given = self.reply.output_tokens
        return estimate_tokens(self.text) if given is None else given

    @property
    def arguments(self) -> JsonObject | None:
        """What it calls the tool with that it must use; None where it need not, or says something else."""
        if not self.request.tool or self.reply.finish != "stop":
            return None
        try:
            value = json.loads(self.text)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None


class ServiceError(NamedTuple):
    """How a service fails."""

    status: int
    message: str
    request_id: str


def chat_reply(request: LLMRequest, reply: ServerReply) -> ChatReply:
    """What a reply means as an answer to a request."""
    return ChatReply(request, reply_text(reply.content), reply)


def request_id(request: LLMRequest) -> str:
    """By which the service would find a request."""
    return f"req_{request.number:06d}"


# OpenAI, and whoever is asked in the same way
def openai_chat(said: ChatReply) -> JsonObject:
    """An answer of OpenAI's chat completions."""
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
    """Vectors of texts, as OpenAI sends them."""
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
    """The list of models."""
    return {
        "object": "list",
        "data": [{"id": name, "object": "model", "created": CREATED_AT, "owned_by": "replanning"} for name in names],
    }


def openai_error(failed: ServiceError) -> JsonObject:
    """An error of OpenAI."""
    status = failed.status
    code = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}.get(status)
    kind = "server_error" if status >= 500 else "requests" if status == 429 else "invalid_request_error"
    return {"error": {"message": failed.message, "type": kind, "param": None, "code": code}}


# Anthropic
def anthropic_chat(said: ChatReply) -> JsonObject:
    """An answer of Anthropic's messages."""
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
    """An error of Anthropic."""
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
    """An answer of Ollama's own chat; one that is streamed comes as a single part."""
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
    """Vectors of texts, as Ollama sends them."""
    texts = _input_texts(request)
    vectors: JsonValue = [list(fake_embedding(text)) for text in texts]
    return {"model": request.model, "embeddings": vectors, "prompt_eval_count": sum(map(estimate_tokens, texts))}


def ollama_models(names: Sequence[str]) -> JsonObject:
    """The models that are on the machine."""
    details: JsonObject = {"format": "gguf", "family": "scripted", "parameter_size": "1B", "quantization_level": "Q4"}
    common: JsonObject = {"modified_at": _CREATED_AT_TEXT, "size": 1, "digest": "0" * 64, "details": details}
    return {"models": [{"name": name, "model": name, **common} for name in names]}


def ollama_error(failed: ServiceError) -> JsonObject:
    """An error of Ollama."""
    return {"error": failed.message}


def _input_texts(request: LLMRequest) -> list[str]:
    given = request.body.get("input")
    return [str(text) for text in given] if isinstance(given, list) else [str(given)]


RequiredFields = Mapping[str, tuple[type, ...]]
"""Which fields a request must have, and of which types."""


class ApiFormat(NamedTuple):
    """How one API is spoken; an empty field where it has no such thing."""

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
    """What a service would find wrong with a request before any model sees it."""
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
