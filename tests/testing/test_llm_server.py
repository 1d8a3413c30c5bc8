"""The scripted server in tests/support/llm_server.py answers in the form of each API and leaves nothing behind."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import anyio
import httpx
import pytest
from pydantic import BaseModel

from replanning.testing import hangs, returns
from tests.support.llm_server import LLMServerReply, ScriptedLLMServer, ServerReply

SPECIFICATION = Path(__file__).parents[3] / "shared/data/specs/openai-openapi.json.gz"
CHATS = {
    "openai": ("/v1/chat/completions", {"authorization": "Bearer k"}, {}),
    "copilot": ("/chat/completions", {"authorization": "Bearer k"}, {}),
    "anthropic": ("/v1/messages", {"x-api-key": "k", "anthropic-version": "2023-06-01"}, {"max_tokens": 9}),
    "ollama": ("/api/chat", {}, {"stream": False}),
}


class Total(BaseModel):
    """An answer."""

    sum: int


def ask(server: ScriptedLLMServer, api: str = "openai", prompt: str = "2 + 3?", **fields: object) -> httpx.Response:
    """One request for an answer."""
    path, headers, more = CHATS[api]
    body = {"model": "m", "messages": [{"role": "user", "content": prompt}], **more, **fields}
    return httpx.post(server.url + path, headers=headers, json=body, timeout=10)


def said(response: httpx.Response, api: str) -> object:
    """The text of an answer."""
    body = response.json()
    if api == "anthropic":
        return body["content"][0]["text"]
    return (body if api == "ollama" else body["choices"][0])["message"]["content"]


@pytest.mark.parametrize("api", CHATS)
def test_answers_in_the_form_of_each_api(api: str) -> None:
    """Text, JSON and models come in order, in the form of the API that was asked."""
    with ScriptedLLMServer(["five", {"sum": 5}, Total(sum=6), returns("late", after=0.01)]) as server:
        assert [said(ask(server, api), api) for _ in range(4)] == ["five", '{"sum": 5}', '{"sum":6}', "late"]
        assert [request.prompt for request in server.requests] == ["2 + 3?"] * 4
        assert {(request.kind, request.model, request.path) for request in server.requests} == {
            ("chat", "m", CHATS[api][0])
        }


async def test_abandoned_requests() -> None:
    """A client that is cancelled while it waits closes its connection, and the server sees it."""
    with ScriptedLLMServer([hangs(), returns("late", after=60)]) as server:
        for number in (1, 2):
            async with httpx.AsyncClient() as client, anyio.create_task_group() as group:
                group.start_soon(ask_async, client, server)
                await server.until(asked(number))
                group.cancel_scope.cancel()
            await server.until(lambda server: server.requests[-1].abandoned)
        await server.until(lambda server: not server.connections)
        with pytest.raises(TimeoutError, match=r"after 0.01 s this was not seen; requests: \[<LLMRequest 1"):
            await server.until(lambda server: False, timeout=0.01)


def asked(number: int) -> Callable[[ScriptedLLMServer], bool]:
    """Return a condition that holds after this number of requests."""
    return lambda server: len(server.requests) == number


async def ask_async(client: httpx.AsyncClient, server: ScriptedLLMServer) -> httpx.Response:
    """One request for an answer."""
    path, headers, _ = CHATS["openai"]
    body = {"model": "m", "messages": [{"role": "user", "content": "2 + 3?"}]}
    return await client.post(server.url + path, headers=headers, json=body)


@pytest.mark.parametrize(
    ("api", "body", "headers", "status", "why"),
    [
        ("openai", {"model": "m"}, None, 400, "the body lacks messages"),
        ("anthropic", {"model": "m", "messages": []}, None, 400, "the body lacks max_tokens"),
        ("ollama", {}, None, 400, "the body lacks model, messages"),
        ("openai", None, {}, 401, "no key in the header 'authorization'"),
        ("anthropic", None, {"anthropic-version": "1"}, 401, "no key in the header 'x-api-key' or 'authorization'"),
        ("anthropic", None, {"x-api-key": "k"}, 400, "anthropic-version: header is required"),
        ("openai", {"model": "m", "messages": [], "stream": True}, None, 400, "does not stream"),
    ],
)
def test_required_fields_and_keys(
    api: str, body: dict[str, object] | None, headers: dict[str, str] | None, status: int, why: str
) -> None:
    """A request without a key or a required field is refused without using up a reply."""
    path, usual, more = CHATS[api]
    sent = {"model": "m", "messages": [], **more} if body is None else body
    with ScriptedLLMServer(["five"]) as server:
        response = httpx.post(server.url + path, headers=usual if headers is None else headers, json=sent)
        assert (response.status_code, why in response.text) == (status, True)
        assert said(ask(server, api), api) == "five"


@pytest.mark.integration
def test_published_description() -> None:
    """Replies in the form of OpenAI satisfy the description that OpenAI publishes."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    if not SPECIFICATION.exists():
        pytest.skip(f"OpenAI's description is not there: {SPECIFICATION}")
    described = json.loads(gzip.decompress(SPECIFICATION.read_bytes()))

    def check(name: str, response: httpx.Response) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": described["components"]}
        jsonschema.Draft202012Validator(schema).validate(response.json())

    headers = {"authorization": "Bearer k"}
    declined, cut = (ServerReply.answer("no", finish=finish) for finish in ("refusal", "length"))
    choice = {"type": "function", "function": {"name": "total"}}
    script: list[LLMServerReply] = ["five", declined, cut, {"sum": 5}]
    with ScriptedLLMServer([*script, *map(ServerReply.error, (400, 401, 404, 429, 500))]) as server:
        for wanted in ("auto", "auto", "auto", choice):
            check("CreateChatCompletionResponse", ask(server, tool_choice=wanted))
        for status in (400, 401, 404, 429, 500):
            response = ask(server)
            assert response.status_code == status
            check("ErrorResponse", response)
        check("ListModelsResponse", httpx.get(f"{server.url}/v1/models", headers=headers))
        texts = {"model": "m", "input": ["a"]}
        check("CreateEmbeddingResponse", httpx.post(f"{server.url}/v1/embeddings", headers=headers, json=texts))
