"""Scripted web server that speaks the APIs of OpenAI, Anthropic, GitHub Copilot and Ollama."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic
from typing import Any, Final, Literal, Self

import anyio.to_thread
from pydantic import BaseModel

from replanning.llm import FinishReason
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from replanning.testing.llm import estimate_tokens, fake_embedding, reply_text
from replanning.testing.scripted import ScriptStep

LLMApi = Literal["openai", "anthropic", "ollama"]
LLMRequestKind = Literal["chat", "embeddings", "models"]

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

_KEY_HEADERS: Final = {
    "openai": ("authorization",),
    "anthropic": ("x-api-key", "authorization"),
    "ollama": (),
}
_REQUIRED_FIELDS: Final[Mapping[tuple[str, str], Mapping[str, type | tuple[type, ...]]]] = {
    ("openai", "chat"): {"model": str, "messages": list},
    ("anthropic", "chat"): {"model": str, "messages": list, "max_tokens": int},
    ("ollama", "chat"): {"model": str, "messages": list},
    ("openai", "embeddings"): {"model": str, "input": (str, list)},
    ("ollama", "embeddings"): {"model": str, "input": (str, list)},
}
_FINISH_REASONS: Final[Mapping[LLMApi, Mapping[str, str]]] = {
    "openai": {"stop": "stop", "length": "length", "refusal": "stop", "tool": "tool_calls"},
    "anthropic": {
        "stop": "end_turn",
        "length": "max_tokens",
        "refusal": "refusal",
        "tool": "tool_use",
    },
    "ollama": {"stop": "stop", "length": "length", "refusal": "stop", "tool": "stop"},
}
_OPENAI_ERRORS: Final = {
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("invalid_request_error", "model_not_found"),
    429: ("requests", "rate_limit_exceeded"),
}
_ANTHROPIC_ERRORS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    529: "overloaded_error",
}
_CREATED: Final = 1_700_000_000
_CREATED_TEXT: Final = "2023-11-14T22:13:20Z"
_POLL_SECONDS: Final = 0.02


@dataclass(slots=True, eq=False, repr=False)
class LLMRequest:
    """Request as it reached a `ScriptedLLMServer`; `abandoned` if the client closed the connection before the reply."""

    number: int
    connection: int
    api: LLMApi
    kind: LLMRequestKind
    path: str
    headers: Mapping[str, str]
    body: JsonObject
    abandoned: bool = False

    def __repr__(self) -> str:
        return f"<LLMRequest {self.number} {self.api} {self.kind} {self.model!r}>"

    @property
    def model(self) -> str:
        return str(self.body.get("model", ""))

    @property
    def system(self) -> str:
        return _content_text(self.body.get("system")) or "\n".join(
            self._texts("system", "developer")
        )

    @property
    def prompt(self) -> str:
        return next(reversed(self._texts("user")), "")

    @property
    def tool(self) -> str:
        choice: Any = self.body.get("tool_choice")
        return (
            str(choice.get("function", choice).get("name", "")) if isinstance(choice, dict) else ""
        )

    def _texts(self, *roles: str) -> list[str]:
        messages: Any = self.body.get("messages", ())
        return [
            _content_text(message["content"]) for message in messages if message["role"] in roles
        ]


def _content_text(content: Any) -> str:
    """Return the text of a message, which may be split into parts."""
    return (
        "".join(part.get("text", "") for part in content)
        if isinstance(content, list)
        else content or ""
    )


@dataclass(frozen=True, slots=True)
class ServerReply:
    """Reply beyond text and JSON; `body` replaces the whole body, of which the first `keep` bytes are sent."""

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
    def error(cls, status: int, message: str = "", *, retry_after: float | None = None) -> Self:
        headers = {} if retry_after is None else {"retry-after": str(retry_after)}
        return cls(status=status, message=message or f"made to fail with {status}", headers=headers)

    @classmethod
    def cut(cls, *, keep: int = 0) -> Self:
        return cls(content="This is never read.", keep=keep, closes_connection=True)


LLMServerReply = ScriptStep | ServerReply | BaseModel | JsonValue
"""Reply of a server: text; JSON or a model, sent as text; a `ServerReply`; a step that returns one of these, in real time;
or None for the default reply to requests for embeddings and models."""


def response_body(request: LLMRequest, reply: ServerReply) -> bytes:
    """Return a reply in the form of the API that was asked."""
    if reply.body is not None:
        return reply.body
    if reply.status >= 400:
        document = _error(request, reply.status, reply.message)
    elif request.kind == "chat":
        document = _chat(request, reply)
    elif reply.content is not None:
        document = reply.content
    else:
        document = _embeddings(request) if request.kind == "embeddings" else _models(request.api)
    return json.dumps(document, ensure_ascii=False).encode()


def _error(request: LLMRequest, status: int, message: str) -> object:
    fallback = "server_error" if status >= 500 else "invalid_request_error"
    if request.api == "ollama":
        return {"error": message}
    if request.api == "anthropic":
        error = {
            "type": _ANTHROPIC_ERRORS.get(status, fallback.replace("server", "api")),
            "message": message,
        }
        return {"type": "error", "error": error, "request_id": _request_id(request)}
    kind, code = _OPENAI_ERRORS.get(status, (fallback, None))
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _chat(request: LLMRequest, reply: ServerReply) -> object:
    text = reply_text(reply.content)
    sent = (
        estimate_tokens(request.system + request.prompt)
        if reply.input_tokens is None
        else reply.input_tokens
    )
    received = estimate_tokens(text) if reply.output_tokens is None else reply.output_tokens
    tool_input: object = None
    if request.tool and reply.finish == "stop":
        with suppress(ValueError):  # prose
            tool_input = json.loads(text)
    uses_tool = isinstance(tool_input, dict)
    finish = _FINISH_REASONS[request.api]["tool" if uses_tool else reply.finish]
    if request.api == "anthropic":
        tool_use = {"type": "tool_use", "id": "toolu_1", "name": request.tool}
        return {
            "id": f"msg_{request.number}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": [
                {**tool_use, "input": tool_input} if uses_tool else {"type": "text", "text": text}
            ],
            "stop_reason": finish,
            "stop_sequence": None,
            "usage": {"input_tokens": sent, "output_tokens": received},
        }
    if request.api == "ollama":  # a streamed reply is a single part
        durations = dict.fromkeys(
            ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration"), 1_000
        )
        counts = {"prompt_eval_count": sent, "eval_count": received}
        message = {"role": "assistant", "content": text}
        ending = {
            "created_at": _CREATED_TEXT,
            "message": message,
            "done": True,
            "done_reason": finish,
        }
        return {"model": request.model, **ending, **durations, **counts}
    said: JsonObject = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
    if reply.finish == "refusal":
        said |= {"content": None, "refusal": text}
    elif uses_tool:
        call: JsonObject = {"name": request.tool, "arguments": text}
        said |= {
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        }
    return {
        "id": f"chatcmpl-{request.number}",
        "object": "chat.completion",
        "created": _CREATED,
        "model": request.model,
        "choices": [{"index": 0, "message": said, "logprobs": None, "finish_reason": finish}],
        "usage": {
            "prompt_tokens": sent,
            "completion_tokens": received,
            "total_tokens": sent + received,
        },
    }


def _embeddings(request: LLMRequest) -> object:
    given: Any = request.body["input"]
    texts = given if isinstance(given, list) else [given]
    vectors: list[Any] = [fake_embedding(text) for text in texts]
    count = sum(map(estimate_tokens, texts))
    if request.api == "ollama":
        return {"model": request.model, "embeddings": vectors, "prompt_eval_count": count}
    data = [
        {"object": "embedding", "index": index, "embedding": vector}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "model": request.model, "data": data, "usage": usage}


def _models(api: LLMApi) -> object:
    if api == "ollama":
        return {
            "models": [{"name": "scripted-1", "model": "scripted-1", "modified_at": _CREATED_TEXT}]
        }
    model = {"id": "scripted-1", "object": "model", "created": _CREATED, "owned_by": "replanning"}
    return {"object": "list", "data": [model]}


def _request_id(request: LLMRequest) -> str:
    return f"req_{request.number:06d}"


def _refusal(request: LLMRequest) -> ServerReply | None:
    """Return the error with which a service refuses a request before any model sees it."""
    keys = _KEY_HEADERS[request.api]
    if keys and not any(request.headers.get(name) for name in keys):
        return ServerReply.error(
            401, f"there is no key in the header {' or '.join(map(repr, keys))}"
        )
    if request.api == "anthropic" and "anthropic-version" not in request.headers:
        return ServerReply.error(400, "anthropic-version: header is required")
    required = _REQUIRED_FIELDS.get((request.api, request.kind), {})
    if wrong := [
        name for name, kind in required.items() if not isinstance(request.body.get(name), kind)
    ]:
        return ServerReply.error(
            400, f"the body lacks {', '.join(wrong)}, or has it in another form"
        )
    if request.body.get("stream") and request.api != "ollama":
        return ServerReply.error(400, "this server does not stream; ask with stream=false")
    return None


def services_environ(url: str) -> dict[str, str]:
    """Return an environment in which all services are at one address."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "ANTHROPIC_BASE_URL": url,
        "GITHUB_COPILOT_BASE_URL": url,
        "OLLAMA_HOST": url,
        **dict.fromkeys(
            ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GITHUB_COPILOT_TOKEN"), "scripted-key"
        ),
    }


class ScriptedLLMServer(ThreadingHTTPServer):
    """Web server in place of the services; its script replies to chats in order, or is a function called in its threads."""

    daemon_threads = False  # closing waits for the threads
    request_queue_size = 128

    def __init__(
        self, script: Sequence[LLMServerReply] | Callable[[LLMRequest], LLMServerReply] = ()
    ) -> None:
        super().__init__(("127.0.0.1", 0), _ConnectionHandler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.requests: list[LLMRequest] = []
        self.connections: dict[Any, int] = {}
        self.script = script
        self._chat_count = self._connection_count = 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_POLL_SECONDS,), name="scripted-llm-server"
        )

    def environ(self) -> dict[str, str]:
        return services_environ(self.url)

    async def until(
        self, condition: Callable[[ScriptedLLMServer], object], *, timeout: float = 10.0
    ) -> None:
        """Wait until a condition holds."""

        def wait() -> None:
            with self._changed:
                if not self._changed.wait_for(lambda: condition(self), timeout):
                    raise TimeoutError(
                        f"after {timeout:g} s this was not seen; requests: {self.requests}"
                    )

        await anyio.to_thread.run_sync(wait)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self._thread.join()
        with self._changed:
            self._closing = True
            for connection in self.connections:
                with suppress(OSError):  # it is closed already
                    connection.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            self._connection_count += 1
            self.connections[request] = self._connection_count
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._changed:
            self.connections.pop(request, None)
            self._changed.notify_all()
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away are expected here."""

    def record(self, request: LLMRequest) -> None:
        with self._changed:
            request.number = len(self.requests) + 1
            self.requests.append(request)
            self._changed.notify_all()

    def mark_abandoned(self, request: LLMRequest) -> None:
        with self._changed:
            request.abandoned = not self._closing
            self._changed.notify_all()

    def scripted_reply(self, request: LLMRequest) -> LLMServerReply:
        if callable(self.script):
            reply = self.script(request)
            if reply is None and request.kind == "chat":
                raise LookupError(f"no answer to {request}")
            return reply
        if request.kind != "chat":
            return None
        with self._changed:
            self._chat_count += 1
            number = self._chat_count
        if number > len(self.script):
            raise LookupError(
                f"it has {len(self.script)} answers, and this is request {number}; add one"
            )
        return self.script[number - 1]


class _ConnectionHandler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ScriptedLLMServer
    connection: socket.socket

    def do_POST(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = json.loads(self.rfile.read(int(headers.get("content-length", 0))) or b"{}")
        route = ROUTES[self.command, self.path.partition("?")[0]]
        request = LLMRequest(
            0, self.server.connections[self.connection], *route, self.path, headers, body
        )
        self.server.record(request)
        try:
            self._respond(request)
        except OSError:  # the client has gone
            self.close_connection = True
            self.server.mark_abandoned(request)

    do_GET = do_POST  # noqa: N815 - so named by the standard library

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - so named by the standard library
        """Say nothing on standard error."""

    def _respond(self, request: LLMRequest) -> None:
        try:
            reply: object = _refusal(request) or self.server.scripted_reply(request)
            if isinstance(reply, ScriptStep):
                self._delay(reply.after)
                if reply.error is not None:
                    raise reply.error
                reply = reply.value
            sent = reply if isinstance(reply, ServerReply) else ServerReply(content=reply)  # type: ignore[arg-type]  # what a script returns is its own business
            data = response_body(request, sent)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - the script is a test's code; the answer says what is wrong
            sent = ServerReply.error(400, f"the script failed: {error!r}")
            data = response_body(request, sent)
        self.close_connection = self.close_connection or sent.closes_connection
        if sent.closes_connection and not sent.keep:
            return
        kept = data[: sent.keep]
        named = "request-id" if request.api == "anthropic" else "x-request-id"
        headers = {"content-type": "application/json", named: _request_id(request), **sent.headers}
        self.send_response(sent.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data if sent.closes_connection else kept)))
        self.end_headers()
        self.wfile.write(kept)

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
