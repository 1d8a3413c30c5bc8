"""OpenAI's models, and those of every service that is asked in the same way."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, ClassVar, Final

from pydantic import BaseModel, BeforeValidator, Field, FiniteFloat, NonNegativeInt

from replanning.llm import Completion, FinishReason, LLMOptions
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from replanning.providers._client import HTTPLLMProvider, merge_chat_chunks
from replanning.providers._proposals import json_schema, schema_name, strict_schema, system_prompt

_FINISH_REASONS: Final[Mapping[str | None, FinishReason]] = {
    "stop": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
    "length": "length",
    "content_filter": "refusal",
}


def _decode_vector(value: object) -> object:
    """Numbers that come packed: four bytes each."""
    if not isinstance(value, str):
        return value
    packed = base64.b64decode(value, validate=True)
    if len(packed) % 4:
        raise ValueError("the packed numbers are cut off")
    return struct.unpack(f"<{len(packed) // 4}f", packed)


class _Function(BaseModel):
    arguments: str = ""


class _ToolCall(BaseModel):
    function: _Function = _Function()


class _ContentPart(BaseModel):
    type: str = "text"
    text: str = ""


class _Message(BaseModel):
    content: str | list[_ContentPart] | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None

    def text(self) -> str:
        """What was given to tools, where there was any, or else said."""
        if self.tool_calls:
            return "\n".join(call.function.arguments for call in self.tool_calls)
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content if part.type == "text")
        return self.content or ""


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _TokenUsage(BaseModel):
    prompt_tokens: NonNegativeInt | None = None
    completion_tokens: NonNegativeInt | None = None


class _ChatCompletion(BaseModel):
    model: str | None = None
    choices: Annotated[list[_Choice], Field(min_length=1)]
    usage: _TokenUsage | None = None


class _Embedding(BaseModel):
    embedding: Annotated[list[FiniteFloat], BeforeValidator(_decode_vector), Field(min_length=1)]


class _EmbeddingResponse(BaseModel):
    model: str | None = None
    data: Annotated[list[_Embedding], Field(min_length=1)]
    usage: _TokenUsage | None = None


class OpenAIProvider(HTTPLLMProvider):
    """OpenAI's chat completions; `base_url` or `OPENAI_BASE_URL` names a compatible server, which may need no key.

    Not every model takes everything: some have one temperature, another name for the limit of tokens, no messages of
    a system, or no schema. What a model objects to is then left out or said otherwise (a schema in words), once more
    for the first call and from the beginning for those after it.
    """

    name: ClassVar[str] = "openai"
    default_model: ClassVar[str] = "gpt-4.1-mini"
    embedding_model: ClassVar[str] = "text-embedding-3-small"
    key_variable: ClassVar[str] = "OPENAI_API_KEY"
    url_variable: ClassVar[str] = "OPENAI_BASE_URL"
    default_url: ClassVar[str] = "https://api.openai.com/v1"

    def needs_key(self) -> bool:
        """Whether it is OpenAI itself that is asked."""
        return self.base_url == self.default_url

    def merge_stream(self, events: Iterator[JsonValue]) -> JsonObject:
        """The pieces of an answer as one."""
        return merge_chat_chunks(events)

    async def request(self, prompt: str, options: LLMOptions) -> Completion:
        """Ask for a chat completion."""
        may_lack = {"temperature": "temperature", "limit": "max_", "system": ".role", "schema": ""}
        if options.schema is None:
            del may_lack["schema"]
        if options.system is None:
            del may_lack["system"]
        path, body = "/chat/completions", partial(self._request_body, prompt, options)
        reply = await self.post_with_downgrade(path, body, may_lack, options)
        chat = self.parse(reply, _ChatCompletion)
        message, usage = chat.choices[0].message, chat.usage or _TokenUsage()
        return self.completion(
            prompt,
            message.refusal or message.text(),
            options,
            model=chat.model or "",
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            finish="refusal" if message.refusal else _FINISH_REASONS.get(chat.choices[0].finish_reason, "other"),
            request_id=reply.request_id,
        )

    async def request_embedding(self, text: str, options: LLMOptions) -> tuple[list[float], Completion]:
        """Ask for the embedding of a text."""
        reply = await self.post("/embeddings", {"model": options.model, "input": text}, options)
        found = self.parse(reply, _EmbeddingResponse)
        sent = found.usage.prompt_tokens if found.usage else None
        used = self.completion(
            text, "", options, model=found.model or "", input_tokens=sent, request_id=reply.request_id
        )
        return found.data[0].embedding, used

    def _request_body(self, prompt: str, options: LLMOptions, lacks: frozenset[str]) -> JsonObject:
        body: JsonObject = {"model": options.model, self._max_tokens_field(lacks): options.max_tokens}
        system = system_prompt(options, schema_in_prompt="schema" in lacks)
        if options.schema is not None and "schema" not in lacks:
            body["response_format"] = {"type": "json_schema", "json_schema": _json_schema_format(options.schema)}
        if "temperature" not in lacks:
            body["temperature"] = options.temperature
        if system and "system" in lacks:
            system, prompt = "", f"{system}\n\n{prompt}"
        messages: list[JsonValue] = [{"role": "system", "content": system}] if system else []
        return body | {"messages": [*messages, {"role": "user", "content": prompt}]}

    def _max_tokens_field(self, lacks: frozenset[str]) -> str:
        """How the limit of tokens is called: OpenAI has a new name, which few others know."""
        new = (self.base_url == OpenAIProvider.default_url) is ("limit" not in lacks)
        return "max_completion_tokens" if new else "max_tokens"


def _json_schema_format(schema: type[BaseModel]) -> JsonObject:
    strict = strict_schema(schema)
    return {
        "name": schema_name(schema),
        "schema": strict or json_schema(schema),
        "strict": strict is not None,
    }
