"""What a tool may do after its effect, what that says, and how often an integration may execute it then."""

import asyncio  # noqa: TID251 # the frameworks run on it alone
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from replanning import ReplanningEngine
from replanning.errors import TransientError

Charge = Callable[[str], Awaitable[object]]

Attach = Callable[[Charge, ReplanningEngine | None, Mapping[str, Any]], Awaitable[object]]
"""Runs an agent that calls the tool once, with these fields stated for it; without an engine as the framework does."""

ATTEMPTS = 3
"""How often a call is made that had no effect, or whose repetition is harmless."""


@dataclass(frozen=True)
class Ending:
    """How a tool ends, and what that says about its effect.

    Attributes:
        end: raises an exception, or returns what the tool returns.
        says: `passing` if it had no effect and may work later, `definite` if it fails for good, `doubtful` if it may have
            had its effect, and `nothing` if it is no failure that an engine could see.
    """

    end: Callable[[], object]
    says: Literal["passing", "definite", "doubtful", "nothing"]

    def executions(self, alone: int, stated: Mapping[str, Any]) -> int:
        """Return how often a call is executed with an engine that the framework alone executes as often as given."""
        is_harmless = stated.get("idempotent") is True or stated.get("effect") == "none"
        is_repeated = self.says == "passing" or (self.says == "doubtful" and is_harmless)
        return ATTEMPTS * alone if is_repeated else alone


def _raising(make: Callable[[], BaseException]) -> Callable[[], object]:
    def end() -> object:
        raise make()

    return end


def _request(method: str = "POST") -> httpx.Request:
    return httpx.Request(method, "http://shop.example/charge")


def _answered(status: int, method: str = "POST") -> Callable[[], object]:
    request = _request(method)
    response = httpx.Response(status, request=request)
    return _raising(lambda: httpx.HTTPStatusError("", request=request, response=response))


ENDINGS: dict[str, Ending] = {
    "reset": Ending(_raising(lambda: ConnectionResetError("reset")), "doubtful"),
    "broken pipe": Ending(_raising(lambda: BrokenPipeError("broken")), "doubtful"),
    "aborted": Ending(_raising(lambda: ConnectionAbortedError("aborted")), "doubtful"),
    "timeout": Ending(_raising(lambda: TimeoutError("too late")), "doubtful"),
    "read timeout": Ending(_raising(lambda: httpx.ReadTimeout("", request=_request())), "doubtful"),
    "read error": Ending(_raising(lambda: httpx.ReadError("", request=_request())), "doubtful"),
    "write error": Ending(_raising(lambda: httpx.WriteError("", request=_request())), "doubtful"),
    "disconnected": Ending(
        _raising(lambda: httpx.RemoteProtocolError("Server disconnected", request=_request())),
        "doubtful",
    ),
    "500": Ending(_answered(500), "doubtful"),
    "502": Ending(_answered(502), "doubtful"),
    "504": Ending(_answered(504), "doubtful"),
    "500 to GET": Ending(_answered(500, "GET"), "passing"),
    "several": Ending(
        _raising(lambda: ExceptionGroup("", [ConnectionError("refused"), TimeoutError("late")])),
        "doubtful",
    ),
    "connection": Ending(_raising(lambda: ConnectionError("down")), "passing"),
    "refused": Ending(_raising(lambda: ConnectionRefusedError("refused")), "passing"),
    "no such host": Ending(_raising(lambda: socket.gaierror(-2, "unknown")), "passing"),
    "connect timeout": Ending(
        _raising(lambda: httpx.ConnectTimeout("", request=_request())), "passing"
    ),
    "408": Ending(_answered(408), "passing"),
    "425": Ending(_answered(425), "passing"),
    "429": Ending(_answered(429), "passing"),
    "503": Ending(_answered(503), "passing"),
    "transient": Ending(_raising(lambda: TransientError("busy")), "passing"),
    "400": Ending(_answered(400), "definite"),
    "409": Ending(_answered(409), "definite"),
    "error": Ending(_raising(lambda: ValueError("wrong")), "definite"),
    "argument": Ending(_raising(lambda: TypeError("unexpected argument")), "definite"),
    "permission": Ending(_raising(lambda: PermissionError("not allowed")), "definite"),
    "text": Ending(lambda: "Error: upstream 503", "nothing"),
    "status": Ending(lambda: {"status": "error", "reason": "upstream 503"}, "nothing"),
}

STATED: dict[str, dict[str, Any]] = {
    "nothing stated": {},
    "not idempotent": {"idempotent": False},
    "idempotent": {"idempotent": True},
    "no effect": {"effect": "none"},
}
"""What users state about a tool."""


async def count(
    attach: Attach, ending: Ending, engine: ReplanningEngine | None, stated: Mapping[str, Any]
) -> int:
    """Return how often a tool is executed that takes effect and then ends in this way."""
    executions = 0

    async def charge(q: str) -> object:
        """Charge."""
        nonlocal executions
        executions += 1
        return ending.end()

    with suppress(Exception):  # which the frameworks wrap in different ways
        await attach(charge, engine, stated)
    return executions


async def compare(
    attach: Attach,
    ending: Ending,
    make_engine: Callable[[], ReplanningEngine],
    *,
    repeats: bool = False,
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the executions with an engine and those that are promised, by what is stated about the tool.

    Args:
        attach: runs the agent.
        ending: of the tool.
        make_engine: returns an engine for each run.
        repeats: whether the framework repeats calls by itself, so that the engine does not.
    """
    alone = await count(attach, ending, None, {})
    counted: dict[str, int] = {}
    promised: dict[str, int] = {}
    for name, stated in STATED.items():
        counted[name] = await count(attach, ending, make_engine(), stated)
        promised[name] = alone if repeats else ending.executions(alone, stated)
    return counted, promised


async def count_cancelled(attach: Attach, engine: ReplanningEngine | None) -> int:
    """Return how often a tool is executed during which its agent is cancelled."""
    executions = 0
    began = asyncio.Event()

    async def charge(q: str) -> object:
        """Charge."""
        nonlocal executions
        executions += 1
        began.set()
        return await asyncio.get_running_loop().create_future()

    run = asyncio.ensure_future(attach(charge, engine, {}))
    await asyncio.wait_for(began.wait(), 10)
    run.cancel()
    with suppress(BaseException):
        await run
    return executions


async def count_exceeded(attach: Attach, engine: ReplanningEngine, **stated: Any) -> int:
    """Return how often a tool is executed that never ends, with a time limit stated for it."""
    executions = 0

    async def charge(q: str) -> object:
        """Charge."""
        nonlocal executions
        executions += 1
        return await asyncio.get_running_loop().create_future()

    with suppress(Exception):
        await attach(charge, engine, {"timeout": 5, **stated})
    return executions
