"""Our clients and the scripted server of language models, over real connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest
from pydantic import BaseModel

from replanning import Environment
from replanning.errors import LLMError, LLMRefusal, LLMRequestRejected, LLMResponseInvalid, LLMTimeout, LLMUnavailable
from replanning.llm import LLMProvider
from replanning.plugins import load_plugin
from replanning.testing import hangs, returns
from tests.support.llm_server import LLMRequest, LLMServerReply, ScriptedLLMServer, ServerReply

NAMES = ("openai", "anthropic", "github-copilot", "ollama")
KEYS = {"openai": "authorization", "anthropic": "x-api-key", "github-copilot": "authorization"}


class Total(BaseModel):
    """An answer."""

    sum: int


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
        await server.until(lambda server: server.connections == 0)


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
            vectors = [await model.embed(text) for text in ("build a wheel", "a wheel: build!")]
            assert vectors[0] == vectors[1]
        assert {request.connection for request in server.requests} == {1}
        assert await model.is_available()
        if name in KEYS:
            assert all(request.headers[KEYS[name]].endswith("scripted-key") for request in server.requests)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("replies", "error", "says"),
    [
        ([ServerReply.error(401, "no such key")], LLMRequestRejected, "no such key"),
        ([ServerReply.error(429, "slow down", retry_after=60)], LLMUnavailable, "slow down"),
        ([ServerReply.cut()] * 5, LLMUnavailable, "gave up after 5 attempts"),
        ([ServerReply.truncated()], LLMResponseInvalid, "not JSON"),
        ([ServerReply.raw("<html>Log in</html>", content_type="text/html")], LLMResponseInvalid, "Log in"),
    ],
)
async def test_failures(name: str, replies: Sequence[LLMServerReply], error: type[LLMError], says: str) -> None:
    """A failure is an error of its kind that says why, after no more requests than necessary."""
    async with asked(name, replies) as (model, server):
        with pytest.raises(error, match=says):
            await model.complete("2 + 3?")
        assert len(server.requests) == len(replies)


@pytest.mark.parametrize("name", KEYS)
async def test_models_that_decline(name: str) -> None:
    """A model that declines is heard, in its own words, by every service that has a way to say so."""
    async with asked(name, [ServerReply.answer("not me", finish="refusal")]) as (model, _):
        with pytest.raises(LLMRefusal, match=r"the model declined \(request req_000001\): not me"):
            await model.complete("2 + 3?")


@pytest.mark.parametrize("name", NAMES)
async def test_what_passes(name: str) -> None:
    """Failures that pass are seen by nobody but the server."""
    limit, busy = ServerReply.error(429, retry_after=0.01), ServerReply.error(503)
    script: list[LLMServerReply] = [limit, busy, ServerReply.cut(keep=30), "five"]
    async with asked(name, script) as (model, server):
        assert await model.complete("2 + 3?") == "five"
        assert len(server.requests) == 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("silence", [hangs(), returns("late", after=60)])
async def test_deadline_ends_the_request(name: str, silence: LLMServerReply) -> None:
    """A call that passes its deadline has ended, and the server sees that nobody waits for it any more."""
    async with asked(name, [silence], timeout=0.2) as (model, server):
        with pytest.raises(LLMTimeout):
            await model.complete("2 + 3?")
        await server.until(lambda server: server.requests[0].abandoned)


@pytest.mark.parametrize("name", NAMES)
async def test_cancellation_closes_the_request(name: str) -> None:
    """A call that is cancelled closes its request, which the server sees at once."""
    async with asked(name, [hangs(), "five"]) as (model, server):
        async with anyio.create_task_group() as group:
            group.start_soon(model.complete, "2 + 3?")
            await server.until(lambda server: server.requests)
            group.cancel_scope.cancel()
        await server.until(lambda server: server.requests[0].abandoned)
        assert await model.complete("2 + 3?") == "five"
