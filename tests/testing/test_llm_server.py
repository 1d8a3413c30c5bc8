"""The scripted server in tests/support/llm_server.py answers in the form of each API and leaves nothing behind."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import httpx
import pytest
from pydantic import BaseModel

from replanning.testing import hangs, raises, returns
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


@pytest.mark.parametrize("api", CHATS)
def test_end_of_the_script(api: str) -> None:
    """A request beyond the script is refused with a status that clients do not retry."""
    with ScriptedLLMServer() as server:
        response = ask(server, api)
    assert response.status_code == 400
    assert "it has 0 answers, and this is request 1" in response.text


def test_mistakes_in_a_script() -> None:
    """A script that raises, returns nothing or returns no JSON is reported in the response."""
    script = {"set": returns({1}), "raises": raises(ValueError("no"))}
    with ScriptedLLMServer(lambda request: {**script, "none": None}[request.prompt]) as server:
        answers = [ask(server, prompt=prompt) for prompt in ("none", "set", "raises", "unforeseen")]
    assert {answer.status_code for answer in answers} == {400}
    none, unsendable, raising, unforeseen = (answer.json()["error"]["message"] for answer in answers)
    assert "no answer to <LLMRequest 1 openai chat 'm'>" in none
    assert "not JSON serializable" in unsendable
    assert (raising, unforeseen) == tuple(
        f"the script failed: {e}" for e in ("ValueError('no')", "KeyError('unforeseen')")
    )


@pytest.mark.parametrize(
    ("api", "error"),
    [
        ("openai", {"message": "slow down", "type": "requests", "param": None, "code": "rate_limit_exceeded"}),
        ("copilot", {"message": "slow down", "type": "requests", "param": None, "code": "rate_limit_exceeded"}),
        ("anthropic", {"message": "slow down", "type": "rate_limit_error"}),
        ("ollama", "slow down"),
    ],
)
def test_errors_in_the_form_of_each_api(api: str, error: object) -> None:
    """An error has its status, its headers, and the body that the API has for it."""
    with ScriptedLLMServer([ServerReply.error(429, "slow down", retry_after=2)]) as server:
        response = ask(server, api)
    assert (response.status_code, response.headers["retry-after"], response.json()["error"]) == (429, "2", error)


@pytest.mark.parametrize("api", CHATS)
def test_finish_reasons(api: str) -> None:
    """An answer may be cut at the limit or decline, and use as many tokens as the script says."""
    script = [ServerReply.answer("fi", finish="length", input_tokens=7, output_tokens=2)]
    with ScriptedLLMServer([*script, ServerReply.answer("I won't.", finish="refusal")]) as server:
        cut, declined = ask(server, api).json(), ask(server, api).json()
    if api == "anthropic":
        assert (cut["stop_reason"], cut["usage"]) == ("max_tokens", {"input_tokens": 7, "output_tokens": 2})
        assert declined["stop_reason"] == "refusal"
    elif api == "ollama":
        assert (cut["done_reason"], cut["prompt_eval_count"], cut["eval_count"]) == ("length", 7, 2)
    else:
        usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
        assert (cut["choices"][0]["finish_reason"], cut["usage"]) == ("length", usage)
        assert declined["choices"][0]["message"]["refusal"] == "I won't."


def test_required_tool() -> None:
    """JSON is sent as a call of the required tool, prose as text."""
    schema = Total.model_json_schema()
    with ScriptedLLMServer([{"sum": 5}, "It is five.", Total(sum=5), [5]]) as server:
        tools = [{"name": "total", "input_schema": schema}]
        used = ask(server, "anthropic", tools=tools, tool_choice={"type": "tool", "name": "total"}).json()
        prose = ask(server, "anthropic", tools=tools, tool_choice={"type": "tool", "name": "total"}).json()
        function = {"type": "function", "function": {"name": "total", "parameters": schema}}
        choice = {"type": "function", "function": {"name": "total"}}
        called = ask(server, "openai", tools=[function], tool_choice=choice).json()
        listed = ask(server, "openai", tools=[function], tool_choice=choice).json()
    assert used["content"] == [{"type": "tool_use", "id": "toolu_1", "name": "total", "input": {"sum": 5}}]
    assert (used["stop_reason"], prose["content"]) == ("tool_use", [{"type": "text", "text": "It is five."}])
    (call,) = called["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "total", "arguments": '{"sum":5}'}
    assert listed["choices"][0]["message"]["content"] == "[5]"


def test_broken_answers() -> None:
    """Bodies can be raw or truncated, and connections closed before or during a response."""
    html = ServerReply.raw("<html>Bad gateway</html>", status=502, content_type="text/html")
    script = [html, ServerReply.raw(b"\xff\xfe"), ServerReply.truncated(keep=30), ServerReply.cut()]
    with ScriptedLLMServer([*script, ServerReply.cut(keep=30), "still here"]) as server:
        page, noise, half = (ask(server) for _ in range(3))
        with pytest.raises(httpx.RemoteProtocolError, match="without sending a response"):
            ask(server)
        with pytest.raises(httpx.RemoteProtocolError, match="received 30 bytes"):
            ask(server)
        assert said(ask(server), "openai") == "still here"
    assert (page.status_code, page.headers["content-type"], page.text) == (502, "text/html", "<html>Bad gateway</html>")
    assert (noise.status_code, noise.content, len(half.content)) == (200, b"\xff\xfe", 30)
    with pytest.raises(json.JSONDecodeError):
        half.json()


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


async def test_closing_leaves_nothing() -> None:
    """Closing a server with waiting and idle clients ends all of its threads and connections within seconds."""

    async def wait_in_vain(client: httpx.AsyncClient) -> None:
        with pytest.raises(httpx.RemoteProtocolError):
            await ask_async(client, server)

    async with httpx.AsyncClient() as idle, httpx.AsyncClient() as client, anyio.create_task_group() as group:
        with ScriptedLLMServer([hangs()]) as server:
            await idle.get(f"{server.url}/api/tags")
            group.start_soon(wait_in_vain, client)
            await server.until(asked(2))
            closing = time.monotonic()
        assert time.monotonic() - closing < 2
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if "scripted-llm" in name or "process_request" in name]
    assert (server.connections, server.requests[1].abandoned) == ({}, False)


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


def test_vectors_and_lists() -> None:
    """Without a script, vectors are made of words, and the list of models holds the given names."""
    headers = {"authorization": "Bearer k"}
    with ScriptedLLMServer(models=("a", "b")) as server:
        tags = httpx.get(f"{server.url}/api/tags").json()
        listed = httpx.get(f"{server.url}/models?limit=2", headers=headers).json()
        texts = {"model": "m", "input": ["a wheel", "a wheel!", "other"]}
        ours = httpx.post(f"{server.url}/v1/embeddings", headers=headers, json=texts).json()
        theirs = httpx.post(f"{server.url}/api/embed", json=texts).json()
    assert [model["name"] for model in tags["models"]] == [model["id"] for model in listed["data"]] == ["a", "b"]
    vectors = [item["embedding"] for item in ours["data"]]
    assert vectors == theirs["embeddings"]
    assert vectors[0] == vectors[1] != vectors[2]
    scripted = ServerReply.answer({"models": []})
    with ScriptedLLMServer(lambda request: scripted) as server:
        assert httpx.get(f"{server.url}/api/tags").json() == {"models": []}


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
