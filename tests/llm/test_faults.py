"""Language models fail in every way, by the thousands of calls: no run is lost, late, over its budget, or leaks."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable, Iterable
from random import Random
from typing import Any

import anyio
import httpx
import pytest

from replanning.environment import Clock, move_on_after
from replanning.errors import LLMError
from replanning.llm import (
    Completion,
    LLMOptions,
    LLMProvider,
    Price,
    PriceTable,
)
from replanning.plan import JsonObject
from replanning.plan.types import JsonValue
from replanning.plugins import load_plugin
from replanning.providers.llm import ProposalReply
from replanning.testing import (
    VirtualClock,
    virtual_environment,
)
from tests.support.llm_server import (
    ROUTES,
    LLMRequest,
    ServerReply,
    response_body,
)

# On trio, httpx's own generators complain where an answer is not read to its end; endless ones must not be.
pytestmark = pytest.mark.filterwarnings("ignore:Async generator 'httpx.:ResourceWarning")

NAMES = ("openai", "anthropic", "github-copilot", "ollama")
PRICES = PriceTable({"m": Price(3, 15)})
CALLS = 250
LIMIT = 30.0
SLACK = 1.05
MOST = 32_000_000
ENDS = {"answered", "LLMUnavailable", "LLMTimeout", "LLMRequestRejected", "LLMResponseInvalid"}


Pieces = Iterable[tuple[float, bytes | Exception]]
"""A body: after how many seconds comes what, or which error."""

FAULTS = (
    *(
        "answers",
        "hangs",
        "loses the connection",
        "refuses",
        "refuses",
        "trickles",
        "floods",
        "is cut",
        "is garbled",
    ),
    "crashes",
)
MEGABYTE = 1_000_000
STATUSES = (301, 400, 401, 403, 404, 408, 409, 413, 418, 422, 429, 500, 502, 503, 504, 529)
RETRY_AFTER = (
    None,
    "0",
    "2",
    "20",
    "3600",
    "-5",
    "soon",
    "nan",
    "inf",
    "Wed, 21 Oct 2099 07:28:00 GMT",
)
SHAPES = (
    *(
        "",
        "null",
        "[]",
        "{}",
        "0",
        '"text"',
        "[" * 100_000,
        '{"error": null}',
        '{"error": [1]}',
        '{"message": 3}',
    ),
    *(
        '{"choices": []}',
        '{"choices": [{"message": null}]}',
        '{"content": null}',
        '{"content": [{"type": "text"}]}',
    ),
)
LIES: tuple[object, ...] = (-1, -(10**9), True, None, "12", 1.5, math.inf, [], {})
LOST = (
    *(
        httpx.ConnectError,
        httpx.ConnectTimeout,
        httpx.ReadError,
        httpx.ReadTimeout,
        httpx.RemoteProtocolError,
    ),
    *(
        httpx.PoolTimeout,
        httpx.WriteError,
        httpx.ProxyError,
        httpx.UnsupportedProtocol,
        httpx.DecodingError,
    ),
)
CRASHES = (RuntimeError, ValueError, KeyError, OSError, AttributeError)


class FaultyService(httpx.AsyncBaseTransport):
    """Answers requests of every API, or fails at them in a way that is drawn anew for each; a liar makes up usage."""

    def __init__(
        self,
        seed: object,
        clock: Clock,
        says: Callable[[Random, LLMRequest], str | None],
        *,
        wrong=0.75,
        liar=False,
    ) -> None:
        self.seed, self.clock, self.says, self.wrong, self.liar = seed, clock, says, wrong, liar
        self.drawn: list[str] = []
        self.open = self.longest = 0
        self.closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        random = Random(f"{self.seed}/{len(self.drawn)}")
        fault = random.choice(FAULTS) if random.random() < self.wrong else "answers"
        self.drawn.append(fault)
        api, kind = ROUTES[request.method, request.url.path]
        body = json.loads(request.content) if request.content else {}
        headers = {name.lower(): value for name, value in request.headers.items()}
        read = LLMRequest(len(self.drawn), 1, api, kind, request.url.path, headers, body)
        whole = self.whole(random, read)
        match fault:
            case "answers":
                await self.clock.sleep(random.choice((0, 0.5, 3, 12, 29, 31, 90)))
                return self.sent(whole)
            case "hangs":
                await self.clock.sleep(math.inf)
            case "loses the connection":
                await self.clock.sleep(random.choice((0, 0.1, 4, 40)))
                raise random.choice(LOST)("made to fail")
            case "refuses":
                status, after = random.choice(STATUSES), random.choice(RETRY_AFTER)
                error = response_body(read, ServerReply.error(status))
                told = random.choice((error, b"<html>Bad gateway</html>", b"", b"\xff{"))
                return self.sent(
                    told, status=status, **({} if after is None else {"retry_after": after})
                )
            case "trickles":  # fast enough for every single time-out
                seconds = random.choice((0.3, 0.9))
                return self.sent([(seconds, whole[i : i + 1]) for i in range(len(whole))])
            case "floods":
                seconds, size = random.choice(((0.5, 10), (0.0, MEGABYTE)))
                return self.sent((seconds, b" " * size) for _ in range(100))
            case "is cut":  # noticed or not
                half = whole[: random.randrange(len(whole))]
                lost = httpx.RemoteProtocolError(
                    "peer closed connection without sending complete message body"
                )
                return self.sent([(0.0, half), (1.0, lost)] if random.random() < 0.5 else half)
            case "is garbled":
                garbled: tuple[tuple[bytes, dict[str, Any]], ...] = (
                    (b"no gzip", {"content_encoding": "gzip"}),
                    (random.randbytes(200), {}),
                    (b"<html>Log in</html>", {"content_type": "text/html"}),
                    (random.choice(SHAPES).encode(), {}),
                )
                data, more = random.choice(garbled)
                return self.sent(data, **more)
        raise random.choice(CRASHES)("nobody thought of this")

    async def aclose(self) -> None:
        self.closed = True

    def whole(self, random: Random, request: LLMRequest) -> bytes:
        """The body of an answer, of which the counts of tokens may be nonsense."""
        data = response_body(request, ServerReply(self.says(random, request)))
        if not self.liar or random.random() < 0.5:
            return data
        answer = json.loads(data)
        usage: dict[str, Any] = answer.get("usage", answer)
        for name in [name for name in usage if "token" in name or name.endswith("eval_count")]:
            usage[name] = random.choice(LIES)
        if random.random() < 0.2 and "usage" in answer:
            answer["usage"] = random.choice(LIES)
        return json.dumps(answer).encode()

    def sent(self, data: bytes | Pieces, *, status: int = 200, **headers: Any) -> httpx.Response:
        """An answer on its way."""
        pieces = [(0.0, data)] if isinstance(data, bytes) else data
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.Response(
            status,
            headers={"content-type": "application/json", **named},
            stream=_Stream(self, pieces),
        )


class _Stream(httpx.AsyncByteStream):
    """A body that comes in pieces, in its time, and may break off."""

    def __init__(self, service: FaultyService, pieces: Pieces) -> None:
        self._service, self._pieces, self._closed = service, iter(pieces), False
        self._size = 0
        service.open += 1

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._closed:
            raise httpx.ReadError("this was closed")
        seconds, piece = next(self._pieces, (0.0, None))
        if seconds:
            await self._service.clock.sleep(seconds)
        if piece is None:
            raise StopAsyncIteration
        if isinstance(piece, Exception):
            raise piece
        self._size += len(piece)
        self._service.longest = max(self._service.longest, self._size)
        return piece

    async def aclose(self) -> None:
        self._service.open -= not self._closed
        self._closed = True


def client(name: str, service: FaultyService, clock: Clock, **settings: object) -> LLMProvider:
    """One of our clients, which reaches nothing but a faulty service."""
    made: LLMProvider = load_plugin("providers", name)(
        "key",
        model="m",
        prices=PRICES,
        environment=virtual_environment(clock=clock),
        transport=service,
        **settings,
    )
    return made


def candidate(random: Random) -> JsonObject:
    """A way on: one that helps if the task is the right one, or what a weak model takes for one."""
    task = random.choice("abcd")
    fit = {"a": "fetch-y", "b": "build-z", "c": "build-z", "d": "post-y"}[task]
    new: JsonObject = {"id": f"n{random.randrange(10**6)}", "tool": fit}
    wrong: JsonObject = {"id": "a", "tool": random.choice(("rm -rf", None)), "depends_on": ["d"]}
    changes: list[JsonObject] = [
        {"kind": "replace", "task_id": task, "tasks": [wrong]},
        {"kind": "skip", "task_id": task},
        {"kind": "retry", "task_id": task, "delay": random.choice((0, 5, -1))},
        {"kind": "abort"},
        {"kind": "modify", "task_id": task, "depends_on": ["d"]},
        {"kind": "approve", "task_id": task},
    ]
    changed: list[JsonValue] = [{"kind": "replace", "task_id": task, "tasks": [new]}]
    if random.random() < 0.4:
        changed = [*random.sample(changes, random.choice((1, 1, 2)))]
    return {
        "reason": "because",
        "changes": changed,
        "confidence": random.choice((0.2, 0.6, 0.95, 0.95, 7)),
    }


def says(random: Random, request: LLMRequest) -> str | None:
    """Answer of a model: alternatives, with prose around them, cut short, or useless."""
    if request.kind == "embeddings":
        return None
    reply = json.dumps({"candidates": [candidate(random) for _ in range(random.randrange(4))]})
    fenced = f"<think>hm {{</think>Here:\n```json\n{reply}\n```"
    return random.choice((reply, reply, fenced, reply[: len(reply) // 2], "I do not know."))


async def one_call(model: LLMProvider, random: Random) -> str:
    """Ask for something; how it ended."""
    options = LLMOptions(system="Be brief.")
    try:
        match random.randrange(4):
            case 0:
                assert isinstance(
                    await model.complete_json("What now?", ProposalReply, options), ProposalReply
                )
            case 1:
                assert all(isinstance(value, float) for value in await model.embed("some words"))
            case 2:
                await model.is_available()
            case _:
                assert isinstance(await model.complete_detailed("What now?", options), Completion)
    except LLMError as error:
        named = str(error).startswith(f"{model.name}: ")
        return type(error).__name__ if named else f"an error that does not say whose it is: {error}"
    return "answered"


@pytest.mark.parametrize(
    "name", ["openai", *(pytest.param(name, marks=pytest.mark.deep) for name in NAMES[1:])]
)
async def test_every_call_ends_in_time(name: str) -> None:
    """A call ends with an answer or an error of its kind, before its deadline or when it is cancelled, and leaves nothing."""
    ends, drawn, cancelled = set(), set(), 0
    async with VirtualClock() as clock:
        tasks = len(anyio.get_running_tasks())
        for seed in range(CALLS):
            random = Random(seed)
            service = FaultyService(f"{name}/{seed}", clock, says, liar=True)
            model = client(name, service, clock)
            began, patience = clock.elapsed, random.choice((math.inf, math.inf, 0, 0.7, 5, 20))
            async with move_on_after(patience, clock):
                ends.add(await one_call(model, random))
            cancelled += clock.elapsed - began == pytest.approx(patience)
            assert clock.elapsed - began <= min(patience, LIMIT) * SLACK, (seed, service.drawn)
            assert (service.open, service.longest <= MOST) == (0, True), (seed, service.drawn)
            await model.aclose()
            assert service.closed or not service.drawn
            drawn.update(service.drawn)
        assert repr(clock).endswith("sleepers=0>")
        assert len(anyio.get_running_tasks()) == tasks
    assert drawn == set(FAULTS)
    assert ends >= ENDS
    assert cancelled
