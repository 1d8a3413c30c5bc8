"""Services of language models in which, call by call, everything goes wrong that can, drawn from a seed."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable, Iterable
from random import Random
from typing import Any

import httpx

from replanning.environment import Clock
from tests.support.llm_server import ROUTES, LLMRequest, ServerReply, response_body

Pieces = Iterable[tuple[float, bytes | Exception]]
"""A body: after how many seconds comes what, or which error."""

FAULTS = (
    *("answers", "hangs", "loses the connection", "refuses", "refuses", "trickles", "floods", "is cut", "is garbled"),
    "crashes",
)
MEGABYTE = 1_000_000
STATUSES = (301, 400, 401, 403, 404, 408, 409, 413, 418, 422, 429, 500, 502, 503, 504, 529)
RETRY_AFTER = (None, "0", "2", "20", "3600", "-5", "soon", "nan", "inf", "Wed, 21 Oct 2099 07:28:00 GMT")
SHAPES = (
    *("", "null", "[]", "{}", "0", '"text"', "[" * 100_000, '{"error": null}', '{"error": [1]}', '{"message": 3}'),
    *('{"choices": []}', '{"choices": [{"message": null}]}', '{"content": null}', '{"content": [{"type": "text"}]}'),
)
LIES: tuple[object, ...] = (-1, -(10**9), True, None, "12", 1.5, math.inf, [], {})
LOST = (
    *(httpx.ConnectError, httpx.ConnectTimeout, httpx.ReadError, httpx.ReadTimeout, httpx.RemoteProtocolError),
    *(httpx.PoolTimeout, httpx.WriteError, httpx.ProxyError, httpx.UnsupportedProtocol, httpx.DecodingError),
)
CRASHES = (RuntimeError, ValueError, KeyError, OSError, AttributeError)


class FaultyService(httpx.AsyncBaseTransport):
    """Answers requests of every API, or fails at them in a way that is drawn anew for each; a liar makes up usage."""

    def __init__(
        self, seed: object, clock: Clock, says: Callable[[Random, LLMRequest], str | None], *, wrong=0.75, liar=False
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
                return self.sent(told, status=status, **({} if after is None else {"retry_after": after}))
            case "trickles":  # fast enough for every single time-out
                seconds = random.choice((0.3, 0.9))
                return self.sent([(seconds, whole[i : i + 1]) for i in range(len(whole))])
            case "floods":
                seconds, size = random.choice(((0.5, 10), (0.0, MEGABYTE)))
                return self.sent((seconds, b" " * size) for _ in range(100))
            case "is cut":  # noticed or not
                half = whole[: random.randrange(len(whole))]
                lost = httpx.RemoteProtocolError("peer closed connection without sending complete message body")
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
        data = response_body(request, ServerReply.answer(self.says(random, request)))
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
