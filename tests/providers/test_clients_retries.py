"""Failures of services: retries and their waits, deadlines, broken answers, errors without secrets."""

from __future__ import annotations

import logging
from email.utils import formatdate
from functools import partial

import anyio
import httpx
import pytest

from replanning import Environment
from replanning.errors import (
    LLMError,
    LLMRequestRejected,
    LLMResponseInvalid,
    LLMTimeout,
    LLMUnavailable,
)
from replanning.llm import LLMOptions
from replanning.providers.openai import OpenAIProvider
from replanning.testing import VirtualClock
from replanning.testing.clock import EPOCH
from tests.support.llm_clients import CLIENTS, KEY, Network, client, fails, said
from tests.support.llm_server import ScriptedLLMServer

FOUR = said(OpenAIProvider)


def openai(network: Network, **kwargs):
    """OpenAI's client on this network."""
    return client(OpenAIProvider, network, **kwargs)


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
async def test_what_may_pass_is_tried_again(kind, status, clock):
    """A failure of the service that may pass does not show, after a wait."""
    network = Network(fails(status), said(kind), clock=clock)
    assert await client(kind, network).complete("2 + 2?") == "four"
    assert network.moments == [0, 0.5]


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("status", [301, 307, 308, 400, 401, 402, 403, 404, 405, 413, 422])
async def test_what_does_not_pass_is_not_tried_again(kind, status):
    """A request that the service rejects is an error at once, and no redirect is followed."""
    network = Network(fails(status, "that is wrong", location="https://elsewhere.example/"))
    with pytest.raises(
        LLMRequestRejected, match=rf"{kind.name}: .*HTTP {status}.*: that is wrong"
    ) as caught:
        await client(kind, network).complete("2 + 2?")
    assert (caught.value.status, len(network.requests)) == (status, 1)


@pytest.mark.parametrize(
    "error",
    [
        httpx.ConnectError("All connection attempts failed"),
        httpx.ConnectTimeout(""),
        httpx.ReadError(""),
        httpx.WriteError("Broken pipe"),
        httpx.RemoteProtocolError("Server disconnected without sending a response."),
    ],
)
async def test_lost_connections(error, clock):
    """A connection that is not made or is lost is made anew, and in the end the error says what it was."""
    network = Network(error, clock=clock)
    with pytest.raises(LLMUnavailable) as caught:
        await openai(network).complete("2 + 2?")
    assert network.moments == [0, 0.5, 1.5, 3.5, 7.5]
    lines = str(caught.value)
    assert lines.startswith("openai: api.openai.com cannot be reached; gave up after 5 attempts: ")
    assert lines.endswith(f"{type(error).__name__}: {error}".removesuffix(": "))
    assert caught.value.__cause__ is error


async def test_waits_are_spread_by_chance():
    """The wait doubles each time, and chance makes it half as long or half as long again."""
    for factor, moments in (
        (0.5, [0, 0.25, 0.75, 1.75, 3.75]),
        (1.5, [0, 0.75, 2.25, 5.25, 11.25]),
    ):
        async with VirtualClock() as clock:
            network = Network(fails(500), clock=clock)
            environment = Environment(clock=clock, chance=partial(float, factor - 0.5))
            model = OpenAIProvider(KEY, transport=network, environ={}, environment=environment)
            with pytest.raises(LLMUnavailable):
                await model.complete("2 + 2?")
            assert network.moments == moments


@pytest.mark.parametrize(
    ("headers", "wait"),
    [
        ({"retry_after": "7"}, 7),
        ({"retry_after": "1.5"}, 1.5),
        ({"retry_after_ms": "2500"}, 2.5),
        ({"retry_after": formatdate(EPOCH + 20, usegmt=True)}, 20),
        ({"retry_after": formatdate(EPOCH + 20)}, 20),
        *(
            ({"retry_after": wrong}, 0.5)
            for wrong in ("0", "-5", "nan", "soon", "", "Mon, 99 Foo 2023 99:99:99 GMT")
        ),
        ({"retry_after": formatdate(EPOCH - 20, usegmt=True)}, 0.5),
    ],
)
async def test_the_service_says_when(headers, wait, clock):
    """A service that wants to be left alone for so long, or until then, is; what it says wrongly does not count."""
    network = Network(fails(429, **headers), FOUR, clock=clock)
    assert await openai(network).complete("2 + 2?") == "four"
    assert network.moments == [0, wait]


@pytest.mark.parametrize("wait", ["31", "inf", "1e308", formatdate(EPOCH + 3600, usegmt=True)])
async def test_no_wait_beyond_the_deadline(wait, clock):
    """If the next attempt would be too late, the error comes at once and says so."""
    network = Network(fails(503, "overloaded", retry_after=wait), clock=clock)
    with pytest.raises(
        LLMUnavailable, match=r"is too late, only 30 s are left \(HTTP 503\): overloaded"
    ):
        await openai(network).complete("2 + 2?")
    assert (clock.elapsed, len(network.requests)) == (0, 1)
    with pytest.raises(LLMUnavailable, match=r"only 0\.4 s are left"):
        await openai(Network(fails(503), clock=clock)).complete(
            "?", LLMOptions(deadline=clock.now() + 0.4)
        )


async def test_an_account_without_credit():
    """OpenAI reports an account without credit like a rate limit; it is asked once, and the error says what to do."""
    answer = {"error": {"message": "check your plan", "code": "insufficient_quota"}}
    network = Network(httpx.Response(429, json=answer))
    with pytest.raises(
        LLMRequestRejected, match=r"the account has no credit \(HTTP 429\): check your plan"
    ):
        await openai(network).complete("2 + 2?")
    assert len(network.requests) == 1


async def test_a_service_that_says_it_is_no_use():
    """A service that says that asking again does not help, such as without money, is not asked again."""
    network = Network(fails(429, "You exceeded your current quota", x_should_retry="false"))
    with pytest.raises(
        LLMUnavailable, match=r"another attempt will not help .*exceeded your current quota"
    ):
        await openai(network).complete("2 + 2?")
    assert len(network.requests) == 1


@pytest.mark.parametrize(
    "script", [(None,), (fails(500), None), (fails(429, retry_after="29.9"), None)]
)
async def test_one_deadline_for_all_tries(script, clock):
    """However many tries there are, they end at the one deadline, and the request that is under way is given up."""
    network = Network(*script, clock=clock)
    with pytest.raises(LLMTimeout, match="openai: no answer came within 30 s"):
        await openai(network).complete("2 + 2?")
    assert clock.elapsed == pytest.approx(30, abs=1e-6)
    assert network.abandoned == 1


class Endless(httpx.AsyncByteStream):
    """An answer that never ends, and remembers that nobody wants more of it."""

    sent, closed = 0, False

    async def __aiter__(self):
        while not self.closed:
            self.sent += 1_000_000
            yield b" " * 1_000_000

    async def aclose(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("status", "error"), [(200, LLMResponseInvalid), (400, LLMRequestRejected)]
)
async def test_endless_answers(status, error):
    """An answer that does not end is left where it is too large for any, and its connection is closed."""
    endless = Endless()
    with pytest.raises(error):
        await openai(Network(httpx.Response(status, stream=endless))).complete("2 + 2?")
    assert (endless.closed, endless.sent) == (True, 9_000_000)


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, text="<html>log in first</html>"),
        httpx.Response(200, content=b'{"choices": [{"mess'),
        httpx.Response(200, content=b"[" * 100_000),
        httpx.Response(200, json=[1]),
        httpx.Response(200, json={}),
        httpx.Response(200, json={"choices": [], "content": None, "message": None}),
        httpx.Response(200, json={"choices": [1], "content": [1], "message": 1}),
        httpx.Response(
            200,
            json={
                "choices": [{"message": {"content": 1}}],
                "content": "",
                "message": {"content": 1},
            },
        ),
        httpx.Response(204),
        httpx.Response(200, content=b"\xff\xfe", headers={"content-type": "application/json"}),
        httpx.Response(
            200, text='data: {"x": 1}\n\n', headers={"content-type": "text/event-stream"}
        ),
    ],
    ids=range(11),
)
async def test_broken_answers(kind, answer):
    """A malformed response of any kind is an error that says so, and is not requested again."""
    network = Network(answer)
    streamed = answer.headers.get("content-type") == "text/event-stream"
    words = "an event stream, which was not requested" if streamed else ""
    with pytest.raises(LLMResponseInvalid, match=f"{kind.name}: its answer is {words}"):
        await client(kind, network).complete("2 + 2?")
    assert len(network.requests) == 1


@pytest.mark.parametrize(
    "usage", [{"prompt_tokens": -5}, {"completion_tokens": -1}, {"prompt_tokens": "many"}]
)
async def test_counts_that_cannot_be(usage):
    """Counts of tokens that cannot be are an error that says so."""
    with pytest.raises(LLMResponseInvalid, match=r"usage.*_tokens: Input should be"):
        await openai(Network(said(OpenAIProvider, usage=usage))).complete("2 + 2?")


@pytest.mark.parametrize("kind", CLIENTS)
async def test_keys_are_not_shown(kind, caplog):
    """The key is sent, and stands in no error, no log and no picture of the client, also where a service repeats it."""
    caplog.set_level(logging.DEBUG)
    for status in (401, 500):
        network = Network(
            fails(status, f"Incorrect API key provided: {KEY}. Or is it x-api-key: {KEY}?")
        )
        model = client(kind, network, timeout=0.1)
        with pytest.raises(LLMError, match="Incorrect API key provided") as caught:
            await model.complete("2 + 2?")
        sent = " ".join(network.requests[0].headers.values())
        shown = f"{caught.value!r} {caught.value} {vars(caught.value)} {model!r} {caplog.text}"
        assert KEY in sent
        assert KEY not in shown


@pytest.mark.parametrize("header", ["x-request-id", "request-id"])
async def test_what_errors_keep(header):
    """An error keeps the status, the id of the request and what the service said, without secrets and cut short."""
    body = {
        "type": "error",
        "error": {"type": "invalid", "message": "token=ghp_" + "4f9c" * 9 + " is bad. " * 99},
    }
    network = Network(httpx.Response(400, json=body, headers={header: "req_7"}))
    with pytest.raises(LLMRequestRejected) as caught:
        await openai(network).complete("2 + 2?")
    error = caught.value
    assert (error.provider, error.status, error.request_id) == ("openai", 400, "req_7")
    assert error.excerpt.startswith("token=[redacted] is bad.")
    assert error.excerpt.endswith(" is bad. is bad.…")
    assert len(error.excerpt) <= 300
    assert "(HTTP 400, request req_7)" in str(error)


def test_several_event_loops():
    """One client serves several event loops one after another, and within each of them keeps its connection."""
    with ScriptedLLMServer(["one", "two", "three", "four"]) as server:
        model = OpenAIProvider(environ=server.environ())

        async def twice() -> list[str]:
            async with model:
                return [await model.complete("next?"), await model.complete("next?")]

        assert anyio.run(twice) + anyio.run(twice, backend="trio") == [
            "one",
            "two",
            "three",
            "four",
        ]
        first, second, third, fourth = (request.connection for request in server.requests)
        assert first == second != third == fourth


async def test_calls_at_once():
    """Calls that begin at the same time share their connections, also the first ones."""
    with ScriptedLLMServer(lambda request: request.prompt) as server:
        answers: list[str] = []

        async def ask(number: int) -> None:
            answers.append(await model.complete(str(number)))

        async with (
            OpenAIProvider(environ=server.environ()) as model,
            anyio.create_task_group() as group,
        ):
            for number in range(5):
                group.start_soon(ask, number)
        assert sorted(answers) == ["0", "1", "2", "3", "4"]
        await server.until(lambda server: not server.connections)
