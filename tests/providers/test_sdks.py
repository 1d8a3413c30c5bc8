"""The services' own clients, which know nothing of this library, take the scripted server for the real thing."""

from __future__ import annotations

from functools import partial

import pytest

from replanning.testing import hangs
from tests.support.llm import Total
from tests.support.llm_server import LLMServerReply, ScriptedLLMServer, ServerReply

pytestmark = [pytest.mark.integration, pytest.mark.deep]

HELLO = [{"role": "user", "content": "2 + 3?"}]


TOOL = {"name": "total", "description": "Say the sum.", "input_schema": Total.model_json_schema()}


def sdk(name: str):
    """The client library of a service, or else the line that says it is missing."""
    return pytest.importorskip(name, reason=f"the package {name!r} is not installed")


def test_openai_reads_answers() -> None:
    """OpenAI's client finds text, shaped answers, refusals, tool calls, usage, request ids, vectors and models."""
    openai = sdk("openai")
    declined = ServerReply.answer("I won't.", finish="refusal")
    five = ServerReply.answer("five", input_tokens=4, output_tokens=1)
    with (
        ScriptedLLMServer([five, {"sum": 5}, declined, {"sum": 5}], models=("a", "b")) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client,
    ):
        plain = client.chat.completions.create(model="m", messages=HELLO)
        assert (plain.choices[0].message.content, plain.choices[0].finish_reason) == ("five", "stop")
        assert (plain.usage.prompt_tokens, plain.usage.completion_tokens, plain._request_id) == (4, 1, "req_000001")
        shaped = client.chat.completions.parse(model="m", messages=HELLO, response_format=Total)
        assert shaped.choices[0].message.parsed == Total(sum=5)
        refused = client.chat.completions.parse(model="m", messages=HELLO, response_format=Total)
        assert refused.choices[0].message.refusal == "I won't."
        tool = openai.pydantic_function_tool(Total, name="total")
        choice = {"type": "function", "function": {"name": "total"}}
        called = client.chat.completions.parse(model="m", messages=HELLO, tools=[tool], tool_choice=choice)
        (call,) = called.choices[0].message.tool_calls
        assert call.function.parsed_arguments == Total(sum=5)
        first, second = client.embeddings.create(model="m", input=["a wheel", "a wheel"]).data
        assert first.embedding == second.embedding
        assert [model.id for model in client.models.list()] == ["a", "b"]


@pytest.mark.parametrize(
    ("reply", "error", "status"),
    [
        (ServerReply.error(400), "BadRequestError", 400),
        (ServerReply.error(401), "AuthenticationError", 401),
        (ServerReply.error(429, retry_after=1), "RateLimitError", 429),
        (ServerReply.error(503), "InternalServerError", 503),
        (ServerReply.cut(), "APIConnectionError", None),
        (ServerReply.cut(keep=30), "APIConnectionError", None),
        (hangs(), "APITimeoutError", None),
    ],
)
@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_clients_read_failures(name: str, reply: LLMServerReply, error: str, status: int | None) -> None:
    """OpenAI's and Anthropic's clients tell the failures apart, and find the message and the request's id."""
    package = sdk(name)
    settings = {"api_key": "k", "max_retries": 0, "timeout": 0.2 if error == "APITimeoutError" else 10}
    with ScriptedLLMServer([reply]) as server:
        if name == "openai":
            client = package.OpenAI(base_url=f"{server.url}/v1", **settings)
            ask = client.chat.completions.create
        else:
            client = package.Anthropic(base_url=server.url, **settings)
            ask = partial(client.messages.create, max_tokens=9)
        with client, pytest.raises(getattr(package, error)) as caught:
            ask(model="m", messages=HELLO)
    if status is not None:
        assert (caught.value.status_code, caught.value.request_id) == (status, "req_000001")
        assert f"made to fail with {status}" in str(caught.value)


def test_anthropic_reads_answers() -> None:
    """Anthropic's client finds text, tool use, why an answer ended, usage and request ids."""
    anthropic = sdk("anthropic")
    cut = ServerReply.answer("fi", finish="length", input_tokens=4, output_tokens=1)
    with (
        ScriptedLLMServer([cut, {"sum": 5}, ServerReply.answer("no", finish="refusal")]) as server,
        anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as client,
    ):
        plain = client.messages.create(model="m", max_tokens=9, system="Be brief.", messages=HELLO)
        assert (plain.content[0].text, plain.stop_reason, plain._request_id) == ("fi", "max_tokens", "req_000001")
        assert (plain.usage.input_tokens, plain.usage.output_tokens) == (4, 1)
        choice = {"type": "tool", "name": "total"}
        used = client.messages.create(model="m", max_tokens=9, messages=HELLO, tools=[TOOL], tool_choice=choice)
        assert (used.content[0].name, used.content[0].input, used.stop_reason) == ("total", {"sum": 5}, "tool_use")
        assert client.messages.create(model="m", max_tokens=9, messages=HELLO).stop_reason == "refusal"
    assert (server.requests[0].system, server.requests[1].tool) == ("Be brief.", "total")


def test_ollama_reads_answers() -> None:
    """Ollama's client finds text, shaped answers, streamed ones, vectors, models and errors."""
    ollama = sdk("ollama")
    with ScriptedLLMServer(["five", {"sum": 5}, "streamed", ServerReply.error(404, "no such model")]) as server:
        client = ollama.Client(host=server.url)
        plain = client.chat(model="m", messages=HELLO)
        assert (plain.message.content, plain.done_reason, plain.eval_count) == ("five", "stop", 1)
        shaped = client.chat(model="m", messages=HELLO, format=Total.model_json_schema())
        assert Total.model_validate_json(shaped.message.content) == Total(sum=5)
        parts = list(client.chat(model="m", messages=HELLO, stream=True))
        assert [(part.message.content, part.done) for part in parts] == [("streamed", True)]
        with pytest.raises(ollama.ResponseError, match="no such model") as caught:
            client.chat(model="m", messages=HELLO)
        assert caught.value.status_code == 404
        vectors = client.embed(model="m", input=["a wheel", "a wheel"]).embeddings
        assert vectors[0] == vectors[1]
        assert [model.model for model in client.list().models] == ["scripted-1"]
        client._client.close()
