"""Requests to the services, their answers as recorded and as published, and over real connections."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import anyio
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field, NonNegativeInt, create_model

from replanning import Environment
from replanning.errors import (
    LLMError,
    LLMRefusal,
    LLMRequestRejected,
    LLMResponseInvalid,
    LLMTimeout,
)
from replanning.llm import LLMOptions, LLMProvider, Price, PriceTable
from replanning.plugins import load_plugin
from replanning.providers._client import strict_schema
from replanning.providers.anthropic import AnthropicProvider
from replanning.providers.github_copilot import GitHubCopilotProvider
from replanning.providers.local import LocalProvider
from replanning.providers.ollama import OllamaProvider
from replanning.providers.openai import OpenAIProvider
from replanning.testing import hangs, returns
from tests.support.llm import Total
from tests.support.llm_clients import CLIENTS, KEY, City, Network, client, fails, said
from tests.support.llm_server import LLMRequest, LLMServerReply, ScriptedLLMServer

DATA = Path(__file__).parents[3] / "shared" / "data"
EXCHANGES = DATA / "provider_exchanges_open.jsonl.gz"
DESCRIPTION = DATA / "specs" / "openai-openapi.json.gz"

recorded = pytest.mark.skipif(
    not EXCHANGES.is_file(), reason=f"there are no recorded exchanges: {EXCHANGES}"
)
described = pytest.mark.skipif(
    not DESCRIPTION.is_file(), reason=f"there is no description of the API: {DESCRIPTION}"
)


def exchanges(api: str, *, status: int = 200) -> Iterator[dict[str, Any]]:
    """Recorded exchanges of an API."""
    with gzip.open(EXCHANGES, "rt") as lines:
        for exchange in map(json.loads, lines):
            if (exchange["api"], exchange["status"], exchange["stream"]) == (api, status, False):
                yield exchange


def replayed(exchange: dict[str, Any]) -> Network:
    """A network that answers what was recorded."""
    return Network(
        httpx.Response(
            exchange["status"], json=exchange["response"], headers={"x-request-id": "req_1"}
        )
    )


@pytest.mark.integration
@recorded
@pytest.mark.parametrize(("api", "count"), [("openai.chat", 445), ("ollama.openai", 2)])
async def test_recorded_chats(api, count):
    """Every recorded chat is read: what was said or given to tools, by which model, how it ended, what it used."""
    found = list(exchanges(api))
    assert len(found) == count
    for exchange in found:
        raw = exchange["response"]
        answer = await client(OpenAIProvider, replayed(exchange)).complete_detailed("well?")
        choice, used = raw["choices"][0], raw["usage"]
        calls = [
            call["function"]["arguments"] for call in choice["message"].get("tool_calls") or []
        ]
        assert answer.text == ("\n".join(calls) if calls else choice["message"]["content"])
        assert (answer.model, answer.request_id) == (raw["model"], "req_1")
        assert (answer.input_tokens, answer.output_tokens) == (
            used["prompt_tokens"],
            used["completion_tokens"],
        )
        assert answer.usage.tokens == used["total_tokens"]
        assert answer.finish == ("length" if choice["finish_reason"] == "length" else "stop")


@pytest.mark.integration
@recorded
async def test_recorded_messages():
    """Every recorded message of Anthropic is read likewise; what it remembered counts as sent."""
    found = list(exchanges("anthropic.messages"))
    assert len(found) == 90
    for exchange in found:
        raw = exchange["response"]
        answer = await client(AnthropicProvider, replayed(exchange)).complete_detailed("well?")
        blocks, used = raw["content"], raw["usage"]
        tools = [
            json.dumps(block["input"], ensure_ascii=False)
            for block in blocks
            if block["type"] == "tool_use"
        ]
        words = "".join(block["text"] for block in blocks if block["type"] == "text")
        assert (answer.text, answer.model) == ("\n".join(tools) or words, raw["model"])
        sent = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert (answer.input_tokens, answer.output_tokens) == (
            sum(used[name] for name in sent),
            used["output_tokens"],
        )
        assert answer.finish == ("length" if raw["stop_reason"] == "max_tokens" else "stop")


@pytest.mark.integration
@recorded
async def test_recorded_errors():
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
async def test_recorded_embeddings():
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
        (
            OpenAIProvider,
            {
                "choices": [
                    {"message": {"content": None, "refusal": "I won't."}, "finish_reason": "stop"}
                ]
            },
        ),
        (
            OpenAIProvider,
            {"choices": [{"message": {"content": "I won't."}, "finish_reason": "content_filter"}]},
        ),
        (
            AnthropicProvider,
            {"content": [{"type": "text", "text": "I won't."}], "stop_reason": "refusal"},
        ),
    ],
)
async def test_refusals(kind, answer):
    """A model that declines is told from one that answers, in each of the ways in which services say so."""
    network = Network(said(kind, **answer))
    with pytest.raises(LLMRefusal, match=f"{kind.name}: the model declined: I won't.") as caught:
        await client(kind, network).complete_json("well?", City)
    assert len(network.requests) == 1
    assert caught.value.provider == kind.name


@pytest.mark.parametrize(
    ("kind", "answer", "finish"),
    [
        (
            OpenAIProvider,
            {"choices": [{"message": {"content": "x"}, "finish_reason": "length"}]},
            "length",
        ),
        (
            OpenAIProvider,
            {"choices": [{"message": {"content": "x"}, "finish_reason": "new"}]},
            "other",
        ),
        (
            OpenAIProvider,
            {"choices": [{"message": {"content": "x"}}], "usage": None, "model": None},
            "other",
        ),
        (AnthropicProvider, {"stop_reason": "max_tokens"}, "length"),
        (AnthropicProvider, {"stop_reason": "model_context_window_exceeded"}, "length"),
        (AnthropicProvider, {"stop_reason": "pause_turn", "usage": None}, "other"),
        (OllamaProvider, {"done_reason": "length"}, "length"),
        (
            OllamaProvider,
            {"done_reason": "load", "eval_count": None, "prompt_eval_count": None},
            "other",
        ),
    ],
)
async def test_how_answers_end(kind, answer, finish):
    """An answer says how it ended; where nothing is counted, what it used is estimated from above."""
    completion = await client(kind, Network(said(kind, "x", **answer))).complete_detailed("well?")
    assert (completion.text, completion.finish) == ("x", finish)
    assert completion.output_tokens >= 1
    assert completion.input_tokens >= len("well?")


async def test_content_in_parts():
    """A message in parts says what its parts of text say, and not what the model thought."""
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "text", "text": "fo"},
        {"type": "text", "text": "ur"},
    ]
    answer: dict[str, Any] = {"choices": [{"message": {"content": parts}, "finish_reason": "stop"}]}
    assert (
        await client(OpenAIProvider, Network(said(OpenAIProvider, **answer))).complete("2 + 2?")
        == "four"
    )


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
async def test_requests_fit_the_published_description(kind):
    """Every request that is sent to OpenAI or those like it is one by OpenAI's own description of its API."""
    odd = fails(400, "'temperature', 'max_tokens' and 'messages[0].role' are not supported")
    vector = httpx.Response(200, json={"data": [{"embedding": [0.5]}]})
    network = Network(odd, odd, odd, odd, said(kind, '{"name": "Ulm"}'), said(kind), vector)
    model = client(kind, network)
    assert await model.complete_json("Which?", City, LLMOptions(system="be brief")) == City(
        name="Ulm"
    )
    assert await model.complete("2 + 2?", LLMOptions(temperature=0, max_tokens=1)) == "four"
    assert await model.embed("a wheel") == [0.5]
    *chats, embedding = network.bodies
    assert len(chats) == 6
    assert [
        found for chat in chats for found in objections("CreateChatCompletionRequest", chat)
    ] == []
    assert objections("CreateEmbeddingRequest", embedding) == []
    wrong = chats[0] | {"temperature": "warm", "messages": []}
    assert len(objections("CreateChatCompletionRequest", wrong)) >= 2


ULM = '{"name": "Ulm", "people": 126000}'
USER = {"role": "user", "content": "Which?"}


class Place(City):
    """Another shape."""


async def sent(provider: Any, network: Network, **options) -> httpx.Request:
    """The request for an answer."""
    await provider.complete("Which?", LLMOptions(**options))
    return network.requests[-1]


GPT = {"model": "gpt-4.1-mini", "temperature": 0.3}
CLAUDE = {"model": "claude-sonnet-4-5", "max_tokens": 2000, "messages": [USER], "temperature": 0.3}
LLAMA = {"model": "llama3.2", "stream": False, "messages": [USER]}
BRIEF = {"role": "system", "content": "be brief"}
COPILOT = "https://api.githubcopilot.com/v1/chat/completions"


@pytest.mark.parametrize(
    ("kind", "configured", "options", "url", "body"),
    [
        (OpenAIProvider, {"model": "gpt-4o", "temperature": 0.9, "max_tokens": 70}, {},
         "https://api.openai.com/v1/chat/completions",
         {"model": "gpt-4o", "temperature": 0.9, "max_completion_tokens": 70, "messages": [USER]}),
        (OpenAIProvider, {}, {"system": "be brief", "temperature": 0.0, "model": "m", "max_tokens": 3},
         "https://api.openai.com/v1/chat/completions",
         {"model": "m", "temperature": 0.0, "max_completion_tokens": 3, "messages": [BRIEF, USER]}),
        (OpenAIProvider, {"base_url": "http://localhost:8000/v1/"}, {}, "http://localhost:8000/v1/chat/completions",
         GPT | {"max_tokens": 2000, "messages": [USER]}),
        (GitHubCopilotProvider, {}, {}, COPILOT, {**GPT, "model": "gpt-4.1", "max_tokens": 2000, "messages": [USER]}),
        (AnthropicProvider, {}, {"system": "be brief"}, "https://api.anthropic.com/v1/messages",
         CLAUDE | {"system": "be brief"}),
        (AnthropicProvider, {"temperature": 1.8}, {}, "https://api.anthropic.com/v1/messages",
         CLAUDE | {"temperature": 1.0}),
        (OllamaProvider, {}, {"system": "be brief"}, "http://127.0.0.1:11434/api/chat",
         LLAMA | {"options": {"temperature": 0.3, "num_predict": 2000}, "messages": [BRIEF, USER]}),
    ],
    ids=["openai", "options", "compatible", "copilot", "anthropic", "hot", "ollama"],
)  # fmt: skip
async def test_requests(kind, configured, options, url, body):
    """Each service is asked in its own form, with the key where it looks for it, and as it was configured."""
    network = Network(said(kind))
    request = await sent(client(kind, network, **configured), network, **options)
    assert (str(request.url), network.bodies) == (url, [body])
    if kind is AnthropicProvider:
        assert (request.headers["x-api-key"], request.headers["anthropic-version"]) == (
            KEY,
            "2023-06-01",
        )
        assert "authorization" not in request.headers
    else:
        assert request.headers["authorization"] == f"Bearer {KEY}"
    editor = [
        request.headers.get(name, "") for name in ("editor-version", "copilot-integration-id")
    ]
    assert all(editor) == any(editor) == (kind is GitHubCopilotProvider)


@pytest.mark.parametrize(
    ("kind", "configured"),
    [(OpenAIProvider, {"base_url": "http://localhost:8000/v1"}), (OllamaProvider, {})],
)
async def test_servers_without_a_key(kind, configured):
    """A compatible server and Ollama need no key."""
    network = Network(said(kind))
    model = kind(transport=network, environ={}, **configured)
    assert model.unavailable_reason() == ""
    assert "authorization" not in (await sent(model, network)).headers


async def test_context_of_ollama():
    """Ollama is told to read as much as there is to read."""
    network = Network(said(OllamaProvider))
    await client(OllamaProvider, network).complete("word " * 3000)
    assert network.bodies[0]["options"] == {
        "temperature": 0.3,
        "num_predict": 2000,
        "num_ctx": 16384,
    }


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("0.0.0.0", "http://127.0.0.1:11434"),
        ("0.0.0.0:8080", "http://127.0.0.1:8080"),
        (":8080", "http://127.0.0.1:8080"),
        ("gpu.example", "http://gpu.example:11434"),
        ("gpu.example:80/ollama/", "http://gpu.example/ollama"),
        ("https://gpu.example", "https://gpu.example"),
        ("http://[::1]:9000/", "http://[::1]:9000"),
        ("", "http://127.0.0.1:11434"),
    ],
)
def test_ollama_host(given, address):
    """Ollama's address may have each of the forms that Ollama itself accepts."""
    assert OllamaProvider(environ={"OLLAMA_HOST": given}).base_url == address
    assert OllamaProvider(base_url=given, environ={}).base_url == address


async def test_availability():
    """Ollama is available when it answers; the others are when they have a key."""
    with ScriptedLLMServer() as server:
        environ = server.environ()
        async with OllamaProvider(environ=environ) as model:
            assert await model.is_available()
    async with OllamaProvider(environ=environ) as model:
        assert (model.unavailable_reason(), await model.is_available()) == ("", False)
    assert not await OllamaProvider(base_url="ftp://somewhere", environ={}).is_available()
    assert await OpenAIProvider(environ=environ).is_available()
    assert not await OpenAIProvider(environ={}).is_available()


@pytest.mark.parametrize("kind", [OllamaProvider, LocalProvider])
def test_price_of_own_models(kind):
    """A model of one's own costs nothing, unless it is said what it costs."""
    free = kind().estimate("?", LLMOptions())
    assert (free.calls, free.money, free.unpriced) == (1, 0.0, False)
    assert (
        kind(model="m", prices=PriceTable({"m": Price(1, 1)})).estimate("?", LLMOptions()).money > 0
    )


@pytest.mark.parametrize(
    ("kind", "variable"),
    [
        (OpenAIProvider, "OPENAI_API_KEY"),
        (AnthropicProvider, "ANTHROPIC_API_KEY"),
        (GitHubCopilotProvider, "GITHUB_COPILOT_TOKEN"),
    ],
)
async def test_keys(kind, variable):
    """A key comes as an argument or by its variable; without one the client says which, and asks nothing."""
    network = Network(said(kind))
    assert (
        kind(environ={variable: KEY}).unavailable_reason()
        == kind(KEY, environ={}).unavailable_reason()
        == ""
    )
    assert kind(environ={variable: f" {KEY}\n"}).unavailable_reason() == ""
    model = kind(transport=network, environ={})
    assert model.unavailable_reason() == f"{variable} is not set"
    with pytest.raises(LLMRequestRejected, match=f"{kind.name}: {variable} is not set"):
        await model.complete("Which?")
    for wrong in (f"{KEY} # mine", f"{KEY}\n{KEY}", "schlüssel"):
        model = kind(wrong, transport=network, environ={})
        with pytest.raises(LLMRequestRejected, match="has characters that no key has") as caught:
            await model.complete("Which?")
        assert wrong not in str(caught.value)
    assert network.requests == []


NO_ADDRESSES = "api.openai.com:x http:// http://h:x http://h:65536 http://xn--/ file:///etc/passwd http://u:secret@h/"


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("url", [*NO_ADDRESSES.split(), "http://h/?x=1", "http://h/?"])
async def test_wrong_addresses(kind, url):
    """An address that cannot be asked is told before anything is sent, without the login that it may hold."""
    network = Network(said(kind))
    model = kind(KEY, base_url=url, transport=network, environ={})
    if model.unavailable_reason() == "" and kind is OllamaProvider:
        return  # it takes more forms
    with pytest.raises(
        LLMRequestRejected, match=rf"its address .*; set {kind.url_variable} or base_url to"
    ) as caught:
        await model.complete("Which?")
    assert "secret" not in str(caught.value)
    assert network.requests == []


async def test_shapes():
    """An answer of a shape is asked for by each service's own means."""
    for kind in CLIENTS:
        answer: dict[str, Any] = {}
        if kind is AnthropicProvider:
            answer = {
                "content": [
                    {"type": "tool_use", "id": "t", "name": "answer", "input": json.loads(ULM)}
                ]
            }
        network = Network(said(kind, ULM, **answer))
        assert await client(kind, network).complete_json("Which?", City) == City(
            name="Ulm", people=126000
        )
        body = network.bodies[0]
        schema = City.model_json_schema()
        if kind is AnthropicProvider:
            assert body["tools"] == [
                {"name": "answer", "description": "Give the answer.", "input_schema": schema}
            ]
            assert body["tool_choice"] == {"type": "tool", "name": "answer"}
        elif kind is OllamaProvider:
            assert body["format"] == schema
        else:
            form = {"name": "City", "schema": strict_schema(City), "strict": True}
            assert body["response_format"] == {"type": "json_schema", "json_schema": form}


@pytest.mark.parametrize(
    ("kind", "objection", "hint"),
    [
        (OpenAIProvider, fails(400, "response_format is not known here"), "response_format"),
        (OpenAIProvider, fails(422, "bad grammar"), "response_format"),
        (
            AnthropicProvider,
            fails(400, "tool_choice: this model cannot be forced to use a tool"),
            "tools",
        ),
        (OllamaProvider, fails(400, "invalid format"), "format"),
    ],
)
async def test_services_without_shapes(kind, objection, hint):
    """A schema that a service does not take is told in words, and from then on at once; other schemas are not."""
    network = Network(objection, said(kind, f"Here: {ULM}"))
    model = client(kind, network)
    for _ in range(2):
        assert (await model.complete_json("Which?", City)).name == "Ulm"
    first, second, third = network.bodies
    assert hint in first
    assert hint not in second
    assert second == third
    words = json.dumps(second["messages"]) + str(second.get("system"))
    assert "It must fit this JSON Schema" in words
    await model.complete_json("Which?", City, LLMOptions(model="another"))
    await model.complete_json("Which?", Place)
    assert hint in network.bodies[3]
    assert hint in network.bodies[4]


FIXED = "Unsupported value: 'temperature' does not support 0.3 with this model."
RENAMED = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens'."
SYSTEMLESS = "Unsupported value: 'messages[0].role' does not support 'system' with this model."


@pytest.mark.parametrize(
    ("kind", "configured", "objection", "gone", "new"),
    [
        (OpenAIProvider, {}, FIXED, "temperature", {}),
        (AnthropicProvider, {}, "`temperature` is deprecated for this model.", "temperature", {}),
        (
            OpenAIProvider,
            {"base_url": "http://h/v1"},
            RENAMED,
            "max_tokens",
            {"max_completion_tokens": 2000},
        ),
        (
            OpenAIProvider,
            {},
            SYSTEMLESS,
            "",
            {"messages": [{"role": "user", "content": "be brief\n\nWhich?"}]},
        ),
    ],
    ids=["openai-temperature", "anthropic-temperature", "limit", "system"],
)
async def test_features_that_a_model_lacks(kind, configured, objection, gone, new):
    """A model that objects to a feature is asked without it or in other words, and from then on at once."""
    network = Network(fails(400, objection), said(kind))
    model = client(kind, network, **configured)
    await sent(model, network, system="be brief")
    await sent(model, network, system="be brief")
    first, second, third = network.bodies
    assert (
        second
        == third
        == {name: value for name, value in first.items() if name != gone} | new
        != first
    )


@pytest.mark.parametrize("kind", CLIENTS)
async def test_objections_to_something_else(kind):
    """A request rejected for another reason stays rejected, and later calls keep all features."""
    network = Network(
        fails(400, "the prompt is too long"), fails(400, "the prompt is too long"), said(kind, ULM)
    )
    model = client(kind, network)
    with pytest.raises(LLMRequestRejected, match="the prompt is too long"):
        await model.complete_json("Which?", City)
    tries = len(network.requests)
    assert tries == (
        2 if issubclass(kind, OpenAIProvider) else 1
    )  # where an objection to a schema has many names
    network.script = (said(kind, ULM),)
    await model.complete_json("Which?", City)
    assert network.bodies[tries] == network.bodies[0]


@pytest.mark.parametrize(
    ("kind", "model", "answer", "url", "asked"),
    [
        (OpenAIProvider, None, {"data": [{"embedding": [0.5, 1]}], "usage": {"prompt_tokens": 2}},
         "https://api.openai.com/v1/embeddings", "text-embedding-3-small"),
        (OllamaProvider, "minilm", {"embeddings": [[0.5, 1]], "prompt_eval_count": 2},
         "http://127.0.0.1:11434/api/embed", "minilm"),
    ],
)  # fmt: skip
async def test_embeddings(kind, model, answer, url, asked):
    """Embeddings are asked of the models for them, or of the one that is named."""
    network = Network(httpx.Response(200, json=answer))
    assert await client(kind, network).embed("a wheel", LLMOptions(model=model)) == [0.5, 1.0]
    assert (str(network.requests[0].url), network.bodies) == (
        url,
        [{"model": asked, "input": "a wheel"}],
    )


@pytest.mark.parametrize("vector", ["[]", '""', '"AAAA"', '"~"', '["a"]', "null", "[NaN, 1]"])
async def test_wrong_embeddings(vector):
    """A response without a valid vector is an error."""
    network = Network(httpx.Response(200, content=f'{{"data": [{{"embedding": {vector}}}]}}'))
    with pytest.raises(LLMError, match="its answer is not in the expected form: data"):
        await client(OpenAIProvider, network).embed("a wheel")


def test_environment_of_the_process(monkeypatch):
    """Arguments precede the environment of the process, which supplies the others."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:1/v1")
    assert OpenAIProvider().base_url == "http://localhost:1/v1"
    assert OpenAIProvider(base_url="http://localhost:2/v1").base_url == "http://localhost:2/v1"
    assert repr(OpenAIProvider()) == "<OpenAIProvider openai gpt-4.1-mini>"


# Strict schemas


class Leaf(BaseModel):
    kind: Literal["leaf"] = "leaf"
    size: NonNegativeInt | None = None


class Tree(BaseModel):
    kind: Literal["tree"] = "tree"
    branches: list[Tree | Leaf] = Field(min_length=1, description="What grows on it.")
    default: str = Field("none", min_length=3, title="Anything")


def test_strict_schemas():
    """A strict schema says the same in less: every member is required, no other may stand there."""
    schema = strict_schema(Tree)
    assert schema == {"$ref": "#/$defs/Tree", "$defs": schema["$defs"]}
    items = {"anyOf": [{"$ref": "#/$defs/Tree"}, {"$ref": "#/$defs/Leaf"}]}
    branches = {"type": "array", "minItems": 1, "items": items, "description": "What grows on it."}
    kind = {"const": "tree", "type": "string"}
    assert schema["$defs"]["Tree"] == {
        "type": "object",
        "properties": {"kind": kind, "branches": branches, "default": {"type": "string"}},
        "required": ["kind", "branches", "default"],
        "additionalProperties": False,
    }


shapes = st.recursive(
    st.sampled_from([int, str, bool, Literal["a"], Leaf]),
    lambda inner: inner.map(list.__class_getitem__) | inner.map(lambda shape: shape | None),
    max_leaves=4,
)


@given(shapes, st.data())
def test_strict_schemas_leave_room_for_all(shape, data):
    """Whatever the shape can be can be said under its strict schema."""
    model = create_model("Answer", value=(shape, ...), other=(shape, Field(title="default")))
    strict = strict_schema(model)
    assert strict is not None
    Draft202012Validator.check_schema(strict)
    answer = model(value=data.draw(st.from_type(shape)), other=data.draw(st.from_type(shape)))
    Draft202012Validator(strict).validate(answer.model_dump(mode="json"))


# Our clients and the scripted server of language models, over real connections


NAMES = ("openai", "anthropic", "github-copilot", "ollama")
KEYS = {"openai": "authorization", "anthropic": "x-api-key", "github-copilot": "authorization"}


@asynccontextmanager
async def asked(
    name: str,
    script: Sequence[LLMServerReply] | Callable[[LLMRequest], LLMServerReply],
    timeout: float = 10.0,
) -> AsyncIterator[tuple[LLMProvider, ScriptedLLMServer]]:
    """A client, and the server in place of its service; it comes back at once where it tries again."""
    with ScriptedLLMServer(script) as server:
        hasty = Environment(chance=lambda: -0.49)
        made: LLMProvider = load_plugin("providers", name)(
            environ=server.environ(), timeout=timeout, environment=hasty
        )
        async with made:
            yield made, server
        await server.until(lambda server: not server.connections)


@pytest.mark.parametrize("name", NAMES)
async def test_text_and_shapes(name):
    """Text, shapes and vectors arrive, on one connection, with the key where the service looks for it."""
    async with asked(name, ["five", {"sum": 5}, 'So: {"sum": 6}!', "never", "{]"]) as (
        model,
        server,
    ):
        completion = await model.complete_detailed("2 + 3?")
        assert (completion.text, completion.provider, completion.model) == (
            "five",
            name,
            model.model,
        )
        assert [await model.complete_json("2 + 3?", Total) for _ in range(2)] == [
            Total(sum=5),
            Total(sum=6),
        ]
        with pytest.raises(LLMResponseInvalid):
            await model.complete_json("2 + 3?", Total)
        if name != "anthropic":
            assert await model.embed("build a wheel") == await model.embed("a wheel: build!")
        assert {request.connection for request in server.requests} == {1}
        assert await model.is_available()
        if name in KEYS:
            assert all(
                request.headers[KEYS[name]].endswith("scripted-key") for request in server.requests
            )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("silence", [hangs(), returns("late", after=60)])
async def test_abandoned_calls_close_their_requests(name, silence):
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
