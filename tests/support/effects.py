"""What a tool may do after its effect, what that says, and how often an integration may execute it then."""

import asyncio  # noqa: TID251 # the frameworks run on it alone
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, Literal

import httpx

from replanning import ReplanningEngine
from replanning.errors import TransientError

Tool = Callable[[str], Any]

Attach = Callable[
    [Sequence[Tool], ReplanningEngine | None, Mapping[str, Mapping[str, Any]]], Awaitable[object]
]
"""Runs an agent with these tools, which calls the first once; the fields are stated of each, for an engine if there is one."""

PATIENCE = 20
"""Seconds after which a test gives up."""

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

    def executions(self, alone: int, stated: Mapping[str, Any], repeats: bool) -> dict[str, int]:
        """Return how often a tool and its stand-in are executed with an engine, if the framework alone executes it as often as given.

        Args:
            alone: executions by the framework alone.
            stated: about the tool.
            repeats: whether the framework repeats calls by itself.
        """
        has_no_effect = stated.get("effect") == "none"
        is_harmless = has_no_effect or stated.get("idempotent") is True
        is_in_doubt = self.says == "doubtful"
        is_replaced = self.says in ("passing", "definite") or (is_in_doubt and has_no_effect)
        executions = alone
        if repeats and is_replaced:
            executions = 1
        elif not repeats and (self.says == "passing" or (is_in_doubt and is_harmless)):
            executions = ATTEMPTS
        return {"charge": executions, "stand_in": int(is_replaced)}


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
    attach: Attach,
    end: Callable[[], Any],
    engine: ReplanningEngine | None,
    stated: Mapping[str, Any],
    *,
    in_thread: bool = False,
    interrupt: Callable[[asyncio.Future[object]], Awaitable[None]] | None = None,
) -> dict[str, int]:
    """Return how often a tool that takes effect, and then ends in this way, and its stand-in are executed.

    Args:
        attach: runs the agent.
        end: ends the tool.
        engine: the engine, if there is one.
        stated: about the tool.
        in_thread: whether the tools are no coroutines, so that frameworks execute them in threads.
        interrupt: is given the run of the agent, to cancel it.
    """
    executions = {"charge": 0, "stand_in": 0}

    def charge(q: str) -> Any:
        """Charge."""
        executions["charge"] += 1
        return end()

    def stand_in(q: str) -> Any:
        """Charge elsewhere."""
        executions["stand_in"] += 1
        return "charged"

    tools: list[Tool] = [charge, stand_in]
    if not in_thread:
        tools = [_as_coroutine(each) for each in tools]
    fields = {"charge": {**stated, "capability": "pay"}, "stand_in": {"capability": "pay"}}
    run = asyncio.ensure_future(attach(tools, engine, fields))
    if interrupt is not None:
        await interrupt(run)
    with suppress(Exception, asyncio.CancelledError):  # which the frameworks wrap in different ways
        await run
    return executions


def _as_coroutine(tool: Tool) -> Tool:
    async def execute(q: str) -> Any:
        output = tool(q)
        return await output if isawaitable(output) else output

    execute.__name__ = tool.__name__
    execute.__doc__ = tool.__doc__
    return execute


async def compare(
    attach: Attach,
    ending: Ending,
    make_engine: Callable[[], ReplanningEngine],
    *,
    repeats: bool = False,
    in_thread: bool = False,
) -> tuple[object, object]:
    """Return the executions with an engine and those that are promised, by what is stated about the tool.

    Args:
        attach: runs the agent.
        ending: of the tool.
        make_engine: returns an engine for each run.
        repeats: whether the framework repeats calls by itself, so that the engine does not.
        in_thread: as `count` takes it.
    """
    alone = (await count(attach, ending.end, None, {}, in_thread=in_thread))["charge"]
    counted: dict[str, object] = {}
    promised: dict[str, object] = {}
    for name, stated in STATED.items():
        counted[name] = await count(attach, ending.end, make_engine(), stated, in_thread=in_thread)
        promised[name] = ending.executions(alone, stated, repeats)
    return counted, promised


class _Hanging:
    """A tool that does not end by itself.

    Args:
        in_thread: whether it blocks a thread; it is then released by what leaves it behind.
    """

    def __init__(self, in_thread: bool) -> None:
        self._in_thread = in_thread
        self._loop = asyncio.get_running_loop()
        self._began = asyncio.Event()
        self.released = threading.Event()

    def end(self) -> object:
        self._loop.call_soon_threadsafe(self._began.set)
        if not self._in_thread:
            return self._loop.create_future()
        self.released.wait(PATIENCE)
        return "too late"

    async def cancel(self, run: asyncio.Future[object]) -> None:
        """Cancel a run during the tool."""
        await asyncio.wait_for(self._began.wait(), PATIENCE)
        run.cancel()
        self.released.set()


async def count_cancelled(
    attach: Attach, engine: ReplanningEngine | None, *, in_thread: bool = False
) -> dict[str, int]:
    """Return how often a tool during which its agent is cancelled, and its stand-in, are executed."""
    hanging = _Hanging(in_thread)
    return await count(
        attach, hanging.end, engine, {}, in_thread=in_thread, interrupt=hanging.cancel
    )


async def count_exceeded(
    attach: Attach, engine: ReplanningEngine, *, in_thread: bool = False, **stated: Any
) -> dict[str, int]:
    """Return how often a tool that exceeds the time limit stated for it, and its stand-in, are executed."""
    hanging = _Hanging(in_thread)
    try:
        return await count(attach, hanging.end, engine, stated, in_thread=in_thread)
    finally:
        hanging.released.set()
