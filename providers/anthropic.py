"""Provider for Anthropic's models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from pydantic import BaseModel, NonNegativeInt

from replanning.llm import Completion, FinishReason, LLMOptions
from replanning.llm.provider import json_schema
from replanning.plan import JsonObject
from replanning.providers._client import HTTPLLMProvider, system_prompt

_API_VERSION: Final = "2023-06-01"
_ANSWER_TOOL: Final = "answer"
_FINISH_REASONS: Final[Mapping[str | None, FinishReason]] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "refusal",
}


class _ContentBlock(BaseModel):
    type: str
    text: str = ""
    input: Any = None


class _TokenUsage(BaseModel):
    input_tokens: NonNegativeInt
    output_tokens: NonNegativeInt
    cache_creation_input_tokens: NonNegativeInt | None = None
    cache_read_input_tokens: NonNegativeInt | None = None

    def total_input_tokens(self) -> int:
        """Return the tokens of the prompt, cached ones included."""
        cached = (self.cache_creation_input_tokens, self.cache_read_input_tokens)
        return self.input_tokens + sum(filter(None, cached))


class _MessageResponse(BaseModel):
    model: str = ""
    content: list[_ContentBlock]
    stop_reason: str | None = None
    usage: _TokenUsage | None = None

    def text(self) -> str:
        """Return the input of the answer tool, or else the text."""
        inputs: list[str] = []
        texts: list[str] = []
        for block in self.content:
            if block.type == "tool_use":
                inputs.append(json.dumps(block.input, ensure_ascii=False))
            elif block.type == "text":
                texts.append(block.text)
        if inputs:
            return "\n".join(inputs)
        return "".join(texts)


class AnthropicProvider(HTTPLLMProvider):
    """Provider for Anthropic's messages API.

    A structured answer is the input of a tool that the model must use. A model that rejects a
    temperature, or a tool that it must use, is asked without it (with the schema in the prompt),
    also in later calls.
    """

    name: ClassVar[str] = "anthropic"
    default_model: ClassVar[str] = "claude-sonnet-4-5"
    key_variable: ClassVar[str] = "ANTHROPIC_API_KEY"
    url_variable: ClassVar[str] = "ANTHROPIC_BASE_URL"
    default_url: ClassVar[str] = "https://api.anthropic.com"

    def headers(self) -> Mapping[str, str]:
        """Return the headers of its requests: the key, and the version of the API."""
        return {"x-api-key": self._key, "anthropic-version": _API_VERSION}

    async def request(self, prompt: str, options: LLMOptions) -> Completion:
        """Request a message."""
        optional = {"temperature": "temperature"}
        if options.schema is not None:
            optional["schema"] = "tool"

        def make_body(left_out: frozenset[str]) -> JsonObject:
            body: JsonObject = {
                "model": options.model,
                "max_tokens": options.max_tokens,
                "messages": [{"role": "user", "content": prompt}],
            }
            if options.schema is not None and "schema" not in left_out:
                tool: JsonObject = {
                    "name": _ANSWER_TOOL,
                    "description": "Give the answer.",
                    "input_schema": json_schema(options.schema),
                }
                body["tools"] = [tool]
                body["tool_choice"] = {"type": "tool", "name": _ANSWER_TOOL}
            if "temperature" not in left_out:
                # The maximum that the service accepts.
                assert options.temperature is not None
                body["temperature"] = min(options.temperature, 1.0)
            system = system_prompt(options, schema_in_prompt="schema" in left_out)
            if system:
                body["system"] = system
            return body

        response = await self.post_with_downgrade("/v1/messages", make_body, optional, options)
        answer = self.parse(response, _MessageResponse)
        input_tokens: int | None = None
        output_tokens: int | None = None
        if answer.usage is not None:
            input_tokens = answer.usage.total_input_tokens()
            output_tokens = answer.usage.output_tokens
        return self.completion(
            prompt,
            answer.text(),
            options,
            model=answer.model,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            finish=_FINISH_REASONS.get(answer.stop_reason, "other"),
            request_id=response.request_id,
        )
