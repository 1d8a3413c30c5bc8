"""Services of language models in which, call by call, everything goes wrong that can, drawn from a seed."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable, Iterable
from random import Random
from typing import Any

import httpx

from replanning.environment import Clock
from tests.support.llm_server import ROUTES, Headers, LLMRequest, ServerReply, _response_body

Pieces = Iterable[tuple[float, bytes | Exception]]
"""A body: after how many seconds comes what, or which error."""

MEGABYTE = 1_000_000
STATUSES = (301, 400, 401, 403, 404, 408, 409, 413, 418, 422, 429, 500, 502, 503, 504, 529)
RETRY_AFTER = (None, "0", "2", "20", "3600", "-5", "soon", "nan", "inf", "Wed, 21 Oct 2099 07:28:00 GMT")
SHAPES = (
    *("", "null", "[]", "{}", "0", '"text"', "[" * 100_000, '{"error": null}', '{"error": [1]}', '{"message": 3}'),
    *('{"choices": []}', '{"choices": [{"message": null}]}', '{"content": null}', '{"content": [{"type": "text"}]}'),
)
LIES: tuple[object, ...] = (-1, -(10**9), True, None, "12", 1.5, math.inf, [], {})


class FaultyService(httpx.AsyncBaseTransport):
    """Answers requests of every API, or fails at them in a way that is drawn anew for each.

    Args:
        seed: equal seeds draw equal faults.
        clock: on which it takes its time.
        says: what the model says to a request, when it gets to.
        wrong: how likely it is that something goes wrong.
        liar: whether usage may be made up.

    Attributes:
        drawn: what was drawn for each request, in order.
        open: how many answers are being read.
        longest: how many bytes of one answer were read at most.
        closed: whether it was closed.
    """

    def __init__(
        self, seed: object, clock: Clock, says: Callable[[Random, LLMRequest], str | None], *, wrong=0.75, liar=False
    ) -> None:
        self.seed, self.clock, self.says, self.wrong, self.liar = seed, clock, says, wrong, liar
        self.drawn: list[str] = []
        self.open = self.longest = 0
        self.closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        random = Random(f"{self.seed}/{len(self.drawn)}")
        fault = random.choice(FAULTS) if random.random() < self.wrong else answers
        self.drawn.append(fault.__name__)
        api, kind = ROUTES[request.method, request.url.path]
        body = json.loads(request.content) if request.content else {}
        headers = Headers({name.lower(): value for name, value in request.headers.items()})
        read = LLMRequest(len(self.drawn), 1, api, kind, request.url.path, headers, body)
        return await fault(self, random, read)

    async def aclose(self) -> None:
        self.closed = True

    def whole(self, random: Random, request: LLMRequest, status: int = 200) -> bytes:
        """The body of an answer, or of an error."""
        if status != 200:
            return _response_body(request, ServerReply.error(status), ())
        data = _response_body(request, ServerReply.answer(self.says(random, request)), ())
        if not self.liar or random.random() < 0.5:
            return data
        return lying(random, json.loads(data))

    def sent(self, data: bytes | Pieces, status: int = 200, **headers: str) -> httpx.Response:
        """An answer on its way."""
        pieces = [(0.0, data)] if isinstance(data, bytes) else data
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.Response(
            status, headers={"content-type": "application/json", **named}, stream=_Stream(self, pieces)
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


def lying(random: Random, answer: dict[str, Any]) -> bytes:
    """An answer whose counts of tokens are nonsense."""
    usage = answer.get("usage", answer)
    for name in [name for name in usage if "token" in name or name.endswith("eval_count")]:
        usage[name] = random.choice(LIES)
    if random.random() < 0.2 and "usage" in answer:
        answer["usage"] = random.choice(LIES)
    return json.dumps(answer).encode()


# What may become of a request


async def answers(service: FaultyService, random: Random, request: LLMRequest) -> httpx.Response:
    """It is answered, sooner or later, and sometimes too late."""
    await service.clock.sleep(random.choice((0, 0.5, 3, 12, 29, 31, 90)))
    return service.sent(service.whole(random, request))


async def hangs(service: FaultyService, random: Random, request: LLMRequest) -> httpx.Response:
    """It is never answered."""
    await service.clock.sleep(math.inf)
    raise AssertionError


async def breaks(service: FaultyService, random: Random, request: LLMRequest) -> httpx.Response:
    """There is no connection, or none that lasts."""
    await service.clock.sleep(random.choice((0, 0.1, 4, 40)))
    kinds: list[type[httpx.RequestError]] = [
        httpx.ConnectError,
        httpx.ConnectTimeout,
        httpx.ReadError,
        httpx.ReadTimeout,
        httpx.RemoteProtocolError,
    ]
    kinds += [httpx.PoolTimeout, httpx.WriteError, httpx.ProxyError, httpx.UnsupportedProtocol, httpx.DecodingError]
    raise random.choice(kinds)("made to fail")


async def refuses(service: FaultyService, random: Random, request: LLMRequest) -> httpx.Response:
    """The service says that it fails, and maybe when to come again."""
    status, after = random.choice(STATUSES), random.choice(RETRY_AFTER)
    headers = {} if after is None else {"retry_after": after}
    body = random.choice((service.whole(random, request, status), b"<html>Bad gateway</html>", b"", b"\xff{"))
    return service.sent(body, status, **headers)


async def trickles(service: FaultyService, random: Random, request: LLMRequest) -> httpx.Response:
    """The answer comes byte by byte, fast enough for every single time-out."""
    data, seconds = service.whole(random, request), random.choice((0.3, 0.9))
    return service.sent([(seconds, data[i : i + 1]) for i in range(len(data))])


async def floods(service: FaultyService, random: Random, request: LLMRequest) -> httpx.Response:
    """The answer has no end."""
    seconds, size = random.choice(((0.5, 10), (0.0, MEGABYTE)))
    return service.sent((seconds, b" " * size) for _ in range(100))


async def cut(service: FaultyService, random: Random, request: LLMRequest) -> httpx.Response:
    """The answer breaks off, noticed or not."""
    data = service.whole(random, request)
    half = data[: random.randrange(len(data))]
    error = httpx.RemoteProtocolError("peer closed connection without sending complete message body")
    return service.sent([(0.0, half), (1.0, error)] if random.random() < 0.5 else half)


async def garbled(service: FaultyService, random: Random, request: LLMRequest) -> httpx.Response:
    """The answer has another form than it should, or is not text at all."""
    kind = random.randrange(4)
    if kind == 0:
        return service.sent(b"no gzip", content_encoding="gzip")
    if kind == 1:
        return service.sent(random.randbytes(200))
    if kind == 2:
        return service.sent(b"<html>Log in</html>", content_type="text/html")
    return service.sent(random.choice(SHAPES).encode())


async def crashes(service: FaultyService, random: Random, request: LLMRequest) -> httpx.Response:
    """Something fails that nobody thought of."""
    raise random.choice((RuntimeError, ValueError, KeyError, OSError, AttributeError))("nobody thought of this")


FAULTS = (answers, hangs, breaks, refuses, refuses, trickles, floods, cut, garbled, crashes)
