"""Ollama, through its own API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

import httpx
from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt

from replanning.errors import LLMError
from replanning.llm import Completion, FinishReason, LLMOptions
from replanning.llm.provider import json_schema
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from replanning.providers._client import HTTPLLMProvider, system_prompt

_DEFAULT_PORT: Final = 11434
_EXPLICIT_PORT: Final = re.compile(r"^[^/]*:\d+(?:/|$)")
_FINISH_REASONS: Final[Mapping[str | None, FinishReason]] = {"stop": "stop", "length": "length"}
_PROBE_TIMEOUT: Final = 2.0
"""Seconds within which a running server answers."""
_DEFAULT_CONTEXT_TOKENS: Final = 4096
"""Tokens of the context unless a larger one is requested; Ollama drops the rest silently."""


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
    """Ollama; `base_url` or `OLLAMA_HOST` is its address, in the forms that Ollama accepts. It needs no key."""

    name: ClassVar[str] = "ollama"
    default_model: ClassVar[str] = "llama3.2"
    embedding_model: ClassVar[str] = "nomic-embed-text"
    key_variable: ClassVar[str] = "OLLAMA_API_KEY"
    url_variable: ClassVar[str] = "OLLAMA_HOST"
    default_url: ClassVar[str] = "http://127.0.0.1:11434"
    free: ClassVar[bool] = True

    @classmethod
    def normalise_url(cls, address: str) -> str:
        """Return the address with scheme and port; a server that listens on all interfaces is on this machine."""
        plain = super().normalise_url(address)
        whole = plain if "://" in plain else f"http://{plain}"
        try:
            url = httpx.URL(whole)
            host = "127.0.0.1" if url.host in ("", "0.0.0.0") else url.host  # noqa: S104 - nothing listens here
            port = url.port if whole == plain or _EXPLICIT_PORT.search(plain) else _DEFAULT_PORT
            return str(url.copy_with(host=host, port=port)).rstrip("/")
        except (httpx.InvalidURL, ValueError):
            return plain

    def needs_key(self) -> bool:
        """Return False: only a proxy in front of the server may want a key."""
        return False

    async def is_available(self) -> bool:
        """Return whether the server answers."""
        if self.unavailable_reason():
            return False
        options = LLMOptions(deadline=self.environment.clock.now() + _PROBE_TIMEOUT)
        try:
            return await self._with_deadline(self._probe, "/api/tags", options)
        except LLMError:
            return False

    async def _probe(self, path: str, options: LLMOptions) -> bool:
        client = await self._http_client()
        async with client.stream(
            "GET", self.base_url + path, headers=dict(self.headers())
        ) as response:
            return response.is_success

    async def request(self, prompt: str, options: LLMOptions) -> Completion:
        """Request an answer."""
        optional = {} if options.schema is None else {"schema": "format"}

        def make_body(left_out: frozenset[str]) -> JsonObject:
            body: JsonObject = {"model": options.model, "stream": False}
            if options.schema is not None and "schema" not in left_out:
                body["format"] = json_schema(options.schema)
            settings: JsonObject = {
                "temperature": options.temperature,
                "num_predict": options.max_tokens,
            }
            answer_tokens = options.max_tokens or 0
            prompt_tokens = (
                self.estimate(prompt, options).tokens - answer_tokens
            ) // 2  # estimated as one for each byte
            needed = prompt_tokens + answer_tokens
            if needed > _DEFAULT_CONTEXT_TOKENS:
                settings["num_ctx"] = 2 ** (needed - 1).bit_length()
            system = system_prompt(options, schema_in_prompt="schema" in left_out)
            messages: list[JsonValue] = [{"role": "system", "content": system}] if system else []
            return body | {
                "options": settings,
                "messages": [*messages, {"role": "user", "content": prompt}],
            }

        response = await self.post_with_downgrade("/api/chat", make_body, optional, options)
        chat = self.parse(response, _ChatResponse)
        return self.completion(
            prompt,
            chat.message.content,
            options,
            model=chat.model,
            input_tokens=chat.prompt_eval_count,
            output_tokens=chat.eval_count,
            finish=_FINISH_REASONS.get(chat.done_reason, "other"),
            request_id=response.request_id,
        )

    async def request_embedding(
        self, text: str, options: LLMOptions
    ) -> tuple[list[float], Completion]:
        """Request the embedding of a text."""
        response = await self.post("/api/embed", {"model": options.model, "input": text}, options)
        result = self.parse(response, _EmbeddingResponse)
        completion = self.completion(
            text, "", options, model=result.model, input_tokens=result.prompt_eval_count
        )
        return result.embeddings[0], completion
