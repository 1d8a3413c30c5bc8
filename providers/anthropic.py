"""Anthropic's models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Final

from pydantic import BaseModel, NonNegativeInt

from replanning.llm import Completion, FinishReason, LLMOptions
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from replanning.providers._client import HTTPLLMProvider, merge_message_events
from replanning.providers._proposals import json_schema, system_prompt

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
        """All that was sent, also what the service remembered."""
        return self.input_tokens + (self.cache_creation_input_tokens or 0) + (self.cache_read_input_tokens or 0)


class _MessageResponse(BaseModel):
    model: str = ""
    content: list[_ContentBlock]
    stop_reason: str | None = None
    usage: _TokenUsage | None = None

    def text(self) -> str:
        """What was given to our tool, where there was any, or else said."""
        used = [json.dumps(block.input, ensure_ascii=False) for block in self.content if block.type == "tool_use"]
        return "\n".join(used) or "".join(block.text for block in self.content if block.type == "text")


class AnthropicProvider(HTTPLLMProvider):
    """Anthropic's messages; an answer of a shape comes as the use of a tool that the model must use.

    Models that take no temperature, or may not be made to use a tool, are asked without (the schema in words then):
    once more for the first call, from the beginning for those after it.
    """

    name: ClassVar[str] = "anthropic"
    default_model: ClassVar[str] = "claude-sonnet-4-5"
    key_variable: ClassVar[str] = "ANTHROPIC_API_KEY"
    url_variable: ClassVar[str] = "ANTHROPIC_BASE_URL"
    default_url: ClassVar[str] = "https://api.anthropic.com"

    def headers(self) -> Mapping[str, str]:
        """The key in a header of its own, and the version of the interface."""
        return {"x-api-key": self._key, "anthropic-version": _API_VERSION}

    def merge_stream(self, events: Iterator[JsonValue]) -> JsonObject:
        """The pieces of an answer as one."""
        return merge_message_events(events)

    async def request(self, prompt: str, options: LLMOptions) -> Completion:
        """Ask for a message."""
        may_lack = {"temperature": "temperature"} | ({} if options.schema is None else {"schema": "tool"})
        reply = await self.post_with_downgrade(
            "/v1/messages", partial(_request_body, prompt, options), may_lack, options
        )
        answer = self.parse(reply, _MessageResponse)
        usage = answer.usage
        return self.completion(
            prompt,
            answer.text(),
            options,
            model=answer.model,
            input_tokens=usage.total_input_tokens() if usage else None,
            output_tokens=usage.output_tokens if usage else None,
            finish=_FINISH_REASONS.get(answer.stop_reason, "other"),
            request_id=reply.request_id,
        )


def _request_body(prompt: str, options: LLMOptions, lacks: frozenset[str]) -> JsonObject:
    body: JsonObject = {
        "model": options.model,
        "max_tokens": options.max_tokens,
        "messages": [{"role": "user", "content": prompt}],
    }
    if options.schema is not None and "schema" not in lacks:
        shape = json_schema(options.schema)
        tool: JsonObject = {"name": _ANSWER_TOOL, "description": "Give the answer.", "input_schema": shape}
        body |= {"tools": [tool], "tool_choice": {"type": "tool", "name": _ANSWER_TOOL}}
    if "temperature" not in lacks:
        body["temperature"] = min(options.temperature or 0.0, 1.0)  # the most that it takes
    system = system_prompt(options, schema_in_prompt="schema" in lacks)
    return body | ({"system": system} if system else {})
