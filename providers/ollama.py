"""Models on this machine or another one, through Ollama's own interface."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, ClassVar, Final

import httpx
from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt

from replanning.llm import Completion, FinishReason, LLMOptions
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from replanning.providers._client import HTTPLLMProvider
from replanning.providers._proposals import json_schema, system_prompt

_DEFAULT_PORT: Final = 11434
_EXPLICIT_PORT: Final = re.compile(r"^[^/]*:\d+(?:/|$)")
_FINISH_REASONS: Final[Mapping[str | None, FinishReason]] = {"stop": "stop", "length": "length"}
_PROBE_TIMEOUT: Final = 2.0
"""Seconds in which it must answer to count as there."""
_DEFAULT_CONTEXT_TOKENS: Final = 4096
"""Tokens that are read unless more is asked for: what is beyond them is dropped without a word."""


class _Message(BaseModel):
    content: str = ""


class _ChatResponse(BaseModel):
    model: str = ""
    message: _Message
    done_reason: str | None = None
    prompt_eval_count: NonNegativeInt | None = None
    eval_count: NonNegativeInt | None = None


_Vector = Annotated[list[FiniteFloat], Field(min_length=1)]


class _EmbeddingResponse(BaseModel):
    model: str = ""
    embeddings: Annotated[list[_Vector], Field(min_length=1)]
    prompt_eval_count: NonNegativeInt | None = None


class OllamaProvider(HTTPLLMProvider):
    """Ollama; `base_url` or `OLLAMA_HOST` says where, in the forms that Ollama itself takes. A key is not needed."""

    name: ClassVar[str] = "ollama"
    default_model: ClassVar[str] = "llama3.2"
    embedding_model: ClassVar[str] = "nomic-embed-text"
    key_variable: ClassVar[str] = "OLLAMA_API_KEY"
    url_variable: ClassVar[str] = "OLLAMA_HOST"
    default_url: ClassVar[str] = "http://127.0.0.1:11434"
    free: ClassVar[bool] = True

    @classmethod
    def normalise_url(cls, given: str) -> str:
        """Where it is: a scheme and a port may be missing, and where a server listens everywhere, it is here."""
        plain = super().normalise_url(given)
        whole = plain if "://" in plain else f"http://{plain}"
        try:
            url = httpx.URL(whole)
            host = "127.0.0.1" if url.host in ("", "0.0.0.0") else url.host  # noqa: S104 - nothing listens here
            port = url.port if whole == plain or _EXPLICIT_PORT.search(plain) else _DEFAULT_PORT
            return str(url.copy_with(host=host, port=port)).rstrip("/")
        except (httpx.InvalidURL, ValueError):
            return plain

    def needs_key(self) -> bool:
        """Only a server behind a proxy may want one."""
        return False

    async def is_available(self) -> bool:
        """Whether it answers."""
        return not self.unavailable_reason() and await self.is_reachable("/api/tags", _PROBE_TIMEOUT)

    async def request(self, prompt: str, options: LLMOptions) -> Completion:
        """Ask for an answer."""
        may_lack = {} if options.schema is None else {"schema": "format"}
        reply = await self.post_with_downgrade(
            "/api/chat", partial(self._request_body, prompt, options), may_lack, options
        )
        chat = self.parse(reply, _ChatResponse)
        return self.completion(
            prompt,
            chat.message.content,
            options,
            model=chat.model,
            input_tokens=chat.prompt_eval_count,
            output_tokens=chat.eval_count,
            finish=_FINISH_REASONS.get(chat.done_reason, "other"),
            request_id=reply.request_id,
        )

    async def request_embedding(self, text: str, options: LLMOptions) -> tuple[list[float], Completion]:
        """Ask for the embedding of a text."""
        reply = await self.post("/api/embed", {"model": options.model, "input": text}, options)
        found = self.parse(reply, _EmbeddingResponse)
        used = self.completion(text, "", options, model=found.model, input_tokens=found.prompt_eval_count)
        return found.embeddings[0], used

    def _request_body(self, prompt: str, options: LLMOptions, lacks: frozenset[str]) -> JsonObject:
        body: JsonObject = {"model": options.model, "stream": False}
        if options.schema is not None and "schema" not in lacks:
            body["format"] = json_schema(options.schema)
        how: JsonObject = {"temperature": options.temperature, "num_predict": options.max_tokens}
        most = options.max_tokens or 0
        needed = most + (self.estimate(prompt, options).tokens - most) // 2  # the estimate is one token for each byte
        if needed > _DEFAULT_CONTEXT_TOKENS:
            how["num_ctx"] = 2 ** (needed - 1).bit_length()
        system = system_prompt(options, schema_in_prompt="schema" in lacks)
        messages: list[JsonValue] = [{"role": "system", "content": system}] if system else []
        return body | {"options": how, "messages": [*messages, {"role": "user", "content": prompt}]}
