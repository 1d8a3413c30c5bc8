"""Answers of the services, as recorded and as published, and how they end."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from replanning.errors import LLMRefusal, LLMRequestRejected
from replanning.llm import LLMOptions
from replanning.providers.anthropic import AnthropicProvider
from replanning.providers.github_copilot import GitHubCopilotProvider
from replanning.providers.ollama import OllamaProvider
from replanning.providers.openai import OpenAIProvider
from tests.support.llm_clients import City, Network, client, fails, said

DATA = Path(__file__).parents[3] / "shared" / "data"
EXCHANGES = DATA / "provider_exchanges_open.jsonl.gz"
DESCRIPTION = DATA / "specs" / "openai-openapi.json.gz"

recorded = pytest.mark.skipif(not EXCHANGES.is_file(), reason=f"there are no recorded exchanges: {EXCHANGES}")
described = pytest.mark.skipif(not DESCRIPTION.is_file(), reason=f"there is no description of the API: {DESCRIPTION}")


def exchanges(api: str, *, status: int = 200) -> Iterator[dict[str, Any]]:
    """Recorded exchanges of an API."""
    with gzip.open(EXCHANGES, "rt") as lines:
        for exchange in map(json.loads, lines):
            if (exchange["api"], exchange["status"], exchange["stream"]) == (api, status, False):
                yield exchange


def replayed(exchange: dict[str, Any]) -> Network:
    """A network that answers what was recorded."""
    return Network(httpx.Response(exchange["status"], json=exchange["response"], headers={"x-request-id": "req_1"}))


@pytest.mark.integration
@recorded
@pytest.mark.parametrize(("api", "count"), [("openai.chat", 445), ("ollama.openai", 2)])
async def test_recorded_chats(api, count) -> None:
    """Every recorded chat is read: what was said or given to tools, by which model, how it ended, what it used."""
    found = list(exchanges(api))
    assert len(found) == count
    for exchange in found:
        raw = exchange["response"]
        answer = await client(OpenAIProvider, replayed(exchange)).complete_detailed("well?")
        choice, used = raw["choices"][0], raw["usage"]
        calls = [call["function"]["arguments"] for call in choice["message"].get("tool_calls") or []]
        assert answer.text == ("\n".join(calls) if calls else choice["message"]["content"])
        assert (answer.model, answer.request_id) == (raw["model"], "req_1")
        assert (answer.input_tokens, answer.output_tokens) == (used["prompt_tokens"], used["completion_tokens"])
        assert answer.usage.tokens == used["total_tokens"]
        assert answer.finish == ("length" if choice["finish_reason"] == "length" else "stop")


@pytest.mark.integration
@recorded
async def test_recorded_messages() -> None:
    """Every recorded message of Anthropic is read likewise; what it remembered counts as sent."""
    found = list(exchanges("anthropic.messages"))
    assert len(found) == 90
    for exchange in found:
        raw = exchange["response"]
        answer = await client(AnthropicProvider, replayed(exchange)).complete_detailed("well?")
        blocks, used = raw["content"], raw["usage"]
        tools = [json.dumps(block["input"], ensure_ascii=False) for block in blocks if block["type"] == "tool_use"]
        words = "".join(block["text"] for block in blocks if block["type"] == "text")
        assert (answer.text, answer.model) == ("\n".join(tools) or words, raw["model"])
        sent = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert (answer.input_tokens, answer.output_tokens) == (sum(used[name] for name in sent), used["output_tokens"])
        assert answer.finish == ("length" if raw["stop_reason"] == "max_tokens" else "stop")


@pytest.mark.integration
@recorded
async def test_recorded_errors() -> None:
    """Every recorded error is one of a request that is not taken, and says what the service said; none is repeated."""
    found = [*exchanges("openai.chat", status=400), *exchanges("openai.chat", status=404)]
    assert len(found) == 5
    for exchange in found:
        network = replayed(exchange)
        with pytest.raises(LLMRequestRejected) as caught:
            await client(OpenAIProvider, network).complete("well?")
        error = caught.value
        assert (error.status, error.request_id) == (exchange["status"], "req_1")
        assert error.excerpt == exchange["response"]["error"]["message"]
        assert len(network.requests) == 1


@pytest.mark.integration
@recorded
async def test_recorded_embeddings() -> None:
    """Every recorded embedding is read, packed as they are, and its numbers are those of a direction."""
    found = list(exchanges("openai.embeddings"))
    assert len(found) == 19
    for exchange in found:
        vector = await client(OpenAIProvider, replayed(exchange)).embed("well?")
        assert len(vector) == 1536
        assert sum(number * number for number in vector) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        (OpenAIProvider, {"choices": [{"message": {"content": None, "refusal": "I won't."}, "finish_reason": "stop"}]}),
        (OpenAIProvider, {"choices": [{"message": {"content": "I won't."}, "finish_reason": "content_filter"}]}),
        (AnthropicProvider, {"content": [{"type": "text", "text": "I won't."}], "stop_reason": "refusal"}),
    ],
)
async def test_refusals(kind, answer) -> None:
    """A model that declines is told from one that answers, in each of the ways in which services say so."""
    network = Network(said(kind, **answer))
    with pytest.raises(LLMRefusal, match=f"{kind.name}: the model declined: I won't.") as caught:
        await client(kind, network).complete_json("well?", City)
    assert len(network.requests) == 1
    assert caught.value.provider == kind.name


@pytest.mark.parametrize(
    ("kind", "answer", "finish"),
    [
        (OpenAIProvider, {"choices": [{"message": {"content": "x"}, "finish_reason": "length"}]}, "length"),
        (OpenAIProvider, {"choices": [{"message": {"content": "x"}, "finish_reason": "new"}]}, "other"),
        (OpenAIProvider, {"choices": [{"message": {"content": "x"}}], "usage": None, "model": None}, "other"),
        (AnthropicProvider, {"stop_reason": "max_tokens"}, "length"),
        (AnthropicProvider, {"stop_reason": "model_context_window_exceeded"}, "length"),
        (AnthropicProvider, {"stop_reason": "pause_turn", "usage": None}, "other"),
        (OllamaProvider, {"done_reason": "length"}, "length"),
        (OllamaProvider, {"done_reason": "load", "eval_count": None, "prompt_eval_count": None}, "other"),
    ],
)
async def test_how_answers_end(kind, answer, finish) -> None:
    """An answer says how it ended; where nothing is counted, what it used is estimated from above."""
    completion = await client(kind, Network(said(kind, "x", **answer))).complete_detailed("well?")
    assert (completion.text, completion.finish) == ("x", finish)
    assert completion.output_tokens >= 1
    assert completion.input_tokens >= len("well?")


async def test_content_in_parts() -> None:
    """A message in parts says what its parts of text say, and not what the model thought."""
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "text", "text": "fo"},
        {"type": "text", "text": "ur"},
    ]
    answer: dict[str, Any] = {"choices": [{"message": {"content": parts}, "finish_reason": "stop"}]}
    assert await client(OpenAIProvider, Network(said(OpenAIProvider, **answer))).complete("2 + 2?") == "four"


@cache
def description() -> dict[str, Any]:
    """OpenAI's own description of its API."""
    with gzip.open(DESCRIPTION, "rt") as file:
        return json.load(file)


def objections(schema: str, instance: object) -> list[str]:
    """Problems of a request by OpenAI's description of its API."""
    validator = Draft202012Validator(description() | {"$ref": f"#/components/schemas/{schema}"})
    return [error.message for error in validator.iter_errors(instance)]


@pytest.mark.integration
@described
@pytest.mark.parametrize("kind", [OpenAIProvider, GitHubCopilotProvider])
async def test_requests_fit_the_published_description(kind) -> None:
    """Every request that is sent to OpenAI or those like it is one by OpenAI's own description of its API."""
    odd = fails(400, "'temperature', 'max_tokens' and 'messages[0].role' are not supported")
    vector = httpx.Response(200, json={"data": [{"embedding": [0.5]}]})
    network = Network(odd, odd, odd, odd, said(kind, '{"name": "Ulm"}'), said(kind), vector)
    model = client(kind, network)
    assert await model.complete_json("Which?", City, LLMOptions(system="be brief")) == City(name="Ulm")
    assert await model.complete("2 + 2?", LLMOptions(temperature=0, max_tokens=1)) == "four"
    assert await model.embed("a wheel") == [0.5]
    *chats, embedding = network.bodies
    assert len(chats) == 6
    assert [found for chat in chats for found in objections("CreateChatCompletionRequest", chat)] == []
    assert objections("CreateEmbeddingRequest", embedding) == []
    wrong = chats[0] | {"temperature": "warm", "messages": []}
    assert len(objections("CreateChatCompletionRequest", wrong)) >= 2
