"""The forms in which the APIs of language models answer, and what they insist on."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from replanning.interfaces import JsonObject, JsonValue
from replanning.testing._llm_fakes import estimate_tokens, fake_embedding, reply_text
from replanning.testing._llm_requests import LLMApi, LLMRequest, LLMRequestKind, ServerReply

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
