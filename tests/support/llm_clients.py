"""Support for tests of HTTP clients of language models: a scripted network, and all clients."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import httpx
from pydantic import BaseModel

from replanning import Environment
from replanning.environment import Clock
from replanning.providers._client import HTTPLLMProvider
from replanning.providers.anthropic import AnthropicProvider
from replanning.providers.github_copilot import GitHubCopilotProvider
from replanning.providers.ollama import OllamaProvider
from replanning.providers.openai import OpenAIProvider
from replanning.testing import VirtualClock

KEY = "sk-proj-4f9c2a7be01d4c5e8b3a6f"
CLIENTS: Sequence[type[HTTPLLMProvider]] = (
    OpenAIProvider,
    AnthropicProvider,
    GitHubCopilotProvider,
    OllamaProvider,
)

Happening = httpx.Response | httpx.TransportError | Callable[[httpx.Request], httpx.Response] | None
"""Result of a request: a response, an error of the connection, or (None) nothing, ever."""


class City(BaseModel):
    """A shape that is asked for."""

    name: str
    people: int = 0


class Network(httpx.AsyncBaseTransport):
    """Answers as a script says, its last line again and again, and keeps the requests and their moments."""

    def __init__(self, *script: Happening, clock: Clock | None = None, takes: float = 0) -> None:
        self.clock = VirtualClock() if clock is None else clock
        self.start = self.clock.now()
        self.script = script
        self.takes = takes
        self.requests: list[httpx.Request] = []
        self.moments: list[float] = []
        self.abandoned = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        self.requests.append(request)
        self.moments.append(self.clock.now() - self.start)
        happens = self.script[min(len(self.requests), len(self.script)) - 1]
        try:
            await self.clock.sleep(float("inf") if happens is None else self.takes)
        except anyio.get_cancelled_exc_class():
            self.abandoned += 1
            raise
        if isinstance(happens, httpx.TransportError):
            raise happens
        if callable(happens):
            return happens(request)
        assert happens is not None
        if not isinstance(happens.stream, httpx.ByteStream):
            return happens
        return httpx.Response(happens.status_code, headers=happens.headers, content=happens.content)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """The JSON of every request."""
        return [json.loads(request.content) for request in self.requests]


def client(kind: type[HTTPLLMProvider], network: Network, **kwargs) -> Any:
    """A client with a key, on a network and its clock, with a chance that is always the middle."""
    environment = Environment(clock=network.clock, chance=lambda: 0.5)
    return kind(KEY, transport=network, environment=environment, environ={}, **kwargs)


def said(kind: type[HTTPLLMProvider], text: str = "four", **changes: Any) -> httpx.Response:
    """An answer with this text, in the form of a service."""
    openai = {
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
    }
    forms: dict[str, dict[str, Any]] = {
        "anthropic": {
            "content": [{"type": "text", "text": text}],
            "stop_reason": "end_turn",
            "usage": {"input_tokens": 5, "output_tokens": 2},
        },
        "ollama": {
            "message": {"role": "assistant", "content": text},
            "done_reason": "stop",
            "prompt_eval_count": 5,
            "eval_count": 2,
        },
    }
    return httpx.Response(200, json={"model": "m"} | forms.get(kind.name, openai) | changes)


def fails(status: int, message: str = "no", **headers: str) -> httpx.Response:
    """An answer that says what is wrong."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, json={"error": {"message": message}}, headers=named)
