"""Provider for Ollama, through its own API."""

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
from replanning.providers._client import HTTPLLMProvider, chat_messages, system_prompt

_DEFAULT_PORT: Final = 11434
_EXPLICIT_PORT: Final = re.compile(r"^[^/]*:\d+(?:/|$)")
_FINISH_REASONS: Final[Mapping[str | None, FinishReason]] = {"stop": "stop", "length": "length"}
_PROBE_TIMEOUT: Final = 2.0
"""Time limit for the answer of a running server, in seconds."""
_DEFAULT_CONTEXT_TOKENS: Final = 4096
"""Default size of the context; Ollama silently drops the tokens beyond it."""


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
    """Provider for Ollama, which needs no key.

    `base_url` or `OLLAMA_HOST` is its address, in the forms that Ollama accepts.
    """

    name: ClassVar[str] = "ollama"
    default_model: ClassVar[str] = "llama3.2"
    embedding_model: ClassVar[str] = "nomic-embed-text"
    key_variable: ClassVar[str] = "OLLAMA_API_KEY"
    url_variable: ClassVar[str] = "OLLAMA_HOST"
    default_url: ClassVar[str] = "http://127.0.0.1:11434"
    free: ClassVar[bool] = True

    @classmethod
    def normalise_url(cls, address: str) -> str:
        """Return the address with scheme and port.

        A server that listens on all interfaces is reached on this machine.
        """
        plain = super().normalise_url(address)
        whole = plain
        if "://" not in plain:
            whole = f"http://{plain}"
        try:
            url = httpx.URL(whole)
            host = url.host
            if host in ("", "0.0.0.0"):  # noqa: S104 - nothing listens here
                host = "127.0.0.1"
            port: int | None = _DEFAULT_PORT
            if whole == plain or _EXPLICIT_PORT.search(plain):
                port = url.port
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
        url = self.base_url + path
        async with client.stream("GET", url, headers=dict(self.headers())) as response:
            return response.is_success

    async def request(self, prompt: str, options: LLMOptions) -> Completion:
        """Request an answer."""
        optional: dict[str, str] = {}
        if options.schema is not None:
            optional["schema"] = "format"

        def make_body(left_out: frozenset[str]) -> JsonObject:
            body: JsonObject = {"model": options.model, "stream": False}
            if options.schema is not None and "schema" not in left_out:
                body["format"] = json_schema(options.schema)
            settings: JsonObject = {
                "temperature": options.temperature,
                "num_predict": options.max_tokens,
            }
            answer_tokens = options.max_tokens
            assert answer_tokens is not None
            # The estimate counts one token per byte of the prompt, which is too high.
            prompt_tokens = (self.estimate(prompt, options).tokens - answer_tokens) // 2
            needed = prompt_tokens + answer_tokens
            if needed > _DEFAULT_CONTEXT_TOKENS:
                settings["num_ctx"] = 2 ** (needed - 1).bit_length()
            system = system_prompt(options, schema_in_prompt="schema" in left_out)
            body["options"] = settings
            body["messages"] = chat_messages(system, prompt)
            return body

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
