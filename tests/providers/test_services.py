"""Our clients and the scripted server of language models, over real connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest

from replanning import Environment
from replanning.errors import LLMResponseInvalid, LLMTimeout
from replanning.llm import LLMProvider
from replanning.plugins import load_plugin
from replanning.testing import hangs, returns
from tests.support.llm import Total
from tests.support.llm_server import LLMRequest, LLMServerReply, ScriptedLLMServer

NAMES = ("openai", "anthropic", "github-copilot", "ollama")
KEYS = {"openai": "authorization", "anthropic": "x-api-key", "github-copilot": "authorization"}


@asynccontextmanager
async def asked(
    name: str, script: Sequence[LLMServerReply] | Callable[[LLMRequest], LLMServerReply], timeout: float = 10.0
) -> AsyncIterator[tuple[LLMProvider, ScriptedLLMServer]]:
    """A client, and the server in place of its service; it comes back at once where it tries again."""
    with ScriptedLLMServer(script) as server:
        hasty = Environment(chance=lambda: -0.49)
        made: LLMProvider = load_plugin("providers", name)(environ=server.environ(), timeout=timeout, environment=hasty)
        async with made:
            yield made, server
        await server.until(lambda server: not server.connections)


@pytest.mark.parametrize("name", NAMES)
async def test_text_and_shapes(name: str) -> None:
    """Text, shapes and vectors arrive, on one connection, with the key where the service looks for it."""
    async with asked(name, ["five", {"sum": 5}, 'So: {"sum": 6}!', "never", "{]"]) as (model, server):
        completion = await model.complete_detailed("2 + 3?")
        assert (completion.text, completion.provider, completion.model) == ("five", name, model.model)
        assert [await model.complete_json("2 + 3?", Total) for _ in range(2)] == [Total(sum=5), Total(sum=6)]
        with pytest.raises(LLMResponseInvalid):
            await model.complete_json("2 + 3?", Total)
        if name != "anthropic":
            assert await model.embed("build a wheel") == await model.embed("a wheel: build!")
        assert {request.connection for request in server.requests} == {1}
        assert await model.is_available()
        if name in KEYS:
            assert all(request.headers[KEYS[name]].endswith("scripted-key") for request in server.requests)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("silence", [hangs(), returns("late", after=60)])
async def test_abandoned_calls_close_their_requests(name: str, silence: LLMServerReply) -> None:
    """A call that passes its deadline or is cancelled has ended, and the server sees that nobody waits for it."""
    async with asked(name, [silence, silence, "five"], timeout=0.2) as (model, server):
        with pytest.raises(LLMTimeout):
            await model.complete("2 + 3?")
        async with anyio.create_task_group() as group:
            group.start_soon(model.complete, "2 + 3?")
            await server.until(lambda server: len(server.requests) == 2)
            group.cancel_scope.cancel()
        await server.until(lambda server: all(request.abandoned for request in server.requests))
        assert await model.complete("2 + 3?") == "five"
