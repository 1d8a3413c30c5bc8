"""Provider for OpenAI and compatible services."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

from pydantic import BaseModel, BeforeValidator, Field, FiniteFloat, NonNegativeInt

from replanning.llm import Completion, FinishReason, LLMOptions
from replanning.llm.provider import json_schema
from replanning.plan import JsonObject
from replanning.providers._client import (
    HTTPLLMProvider,
    chat_messages,
    strict_schema,
    system_prompt,
)

_FINISH_REASONS: Final[Mapping[str | None, FinishReason]] = {
    "stop": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
    "length": "length",
    "content_filter": "refusal",
}


def _decode_vector(value: object) -> object:
    if not isinstance(value, str):
        return value
    data = base64.b64decode(value, validate=True)  # 32-bit floats
    if len(data) % 4:
        raise ValueError("the last number is incomplete")
    return struct.unpack(f"<{len(data) // 4}f", data)


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
        """Return the arguments of tool calls, or else the text."""
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
    """Provider for OpenAI's chat completions and compatible servers.

    `base_url` or `OPENAI_BASE_URL` names a compatible server, which may need no key. Some models
    have a fixed temperature, another name for the token limit, no system messages or no schemas. A
    feature that a model rejects is left out or expressed differently (a schema in the prompt), also
    in later calls.
    """

    name: ClassVar[str] = "openai"
    default_model: ClassVar[str] = "gpt-4.1-mini"
    embedding_model: ClassVar[str] = "text-embedding-3-small"
    key_variable: ClassVar[str] = "OPENAI_API_KEY"
    url_variable: ClassVar[str] = "OPENAI_BASE_URL"
    default_url: ClassVar[str] = "https://api.openai.com/v1"

    def needs_key(self) -> bool:
        """Return whether the service is OpenAI itself."""
        return self.base_url == self.default_url

    async def request(self, prompt: str, options: LLMOptions) -> Completion:
        """Request a chat completion."""
        optional = {"temperature": "temperature", "limit": "max_"}
        if options.system is not None:
            optional["system"] = ".role"
        if options.schema is not None:
            optional["schema"] = ""

        def make_body(left_out: frozenset[str]) -> JsonObject:
            # OpenAI renamed the token limit; few other services know the new name.
            limit = "max_tokens"
            is_openai = self.base_url == OpenAIProvider.default_url
            if is_openai is ("limit" not in left_out):
                limit = "max_completion_tokens"
            body: JsonObject = {"model": options.model, limit: options.max_tokens}
            if options.schema is not None and "schema" not in left_out:
                strict = strict_schema(options.schema)
                schema: JsonObject = {
                    # With the characters that services accept.
                    "name": re.sub(r"[^A-Za-z0-9_-]", "_", options.schema.__name__)[:64],
                    "schema": strict or json_schema(options.schema),
                    "strict": strict is not None,
                }
                body["response_format"] = {"type": "json_schema", "json_schema": schema}
            if "temperature" not in left_out:
                body["temperature"] = options.temperature
            system = system_prompt(options, schema_in_prompt="schema" in left_out)
            body["messages"] = chat_messages(system, prompt)
            if system and "system" in left_out:
                body["messages"] = chat_messages("", f"{system}\n\n{prompt}")
            return body

        response = await self.post_with_downgrade("/chat/completions", make_body, optional, options)
        chat = self.parse(response, _ChatCompletion)
        choice = chat.choices[0]
        finish = _FINISH_REASONS.get(choice.finish_reason, "other")
        if choice.message.refusal:
            finish = "refusal"
        usage = chat.usage or _TokenUsage()
        return self.completion(
            prompt,
            choice.message.refusal or choice.message.text(),
            options,
            model=chat.model or "",
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            finish=finish,
            request_id=response.request_id,
        )

    async def request_embedding(
        self, text: str, options: LLMOptions
    ) -> tuple[list[float], Completion]:
        """Request the embedding of a text."""
        response = await self.post("/embeddings", {"model": options.model, "input": text}, options)
        result = self.parse(response, _EmbeddingResponse)
        usage = result.usage or _TokenUsage()
        completion = self.completion(
            text,
            "",
            options,
            model=result.model or "",
            input_tokens=usage.prompt_tokens,
            request_id=response.request_id,
        )
        return result.data[0].embedding, completion
