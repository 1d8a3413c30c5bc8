"""One server of the Model Context Protocol: started when it is wanted, shared by all tasks, started again when it ends."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio
import httpx2
from mcp import Client, MCPError
from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost
from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST, CallToolResult, Tool, ToolListChangedNotification

from replanning._interfaces import Clock
from replanning._plan import JsonObject
from replanning._servers import McpServer
from replanning.tools._mcp_transport import ServerHandle, ServerStartError, open_transport
from replanning.tools._templates import Secrets

_log = logging.getLogger("replanning.mcp")

MAX_RESTARTS: Final = 5
"""How often in a row a server is started again that answers no call in between."""

_MAX_TOOLS: Final = 1_000
_MAX_PAGES: Final = 100
_REFRESH_INTERVAL: Final = 1.0
"""Seconds between one time that a server is asked what it can do and the next, however often it says that this changed."""

_SESSION_TERMINATED: Final = "Session terminated"
"""What the SDK says where a server answers that it has forgotten a session."""


class ServerGone(Exception):
    """A server is not there, or has gone while it was at work.

    Attributes:
        request_sent: whether it may have begun with what was asked.
    """

    def __init__(self, reason: str, *, reached: bool) -> None:
        self.request_sent = reached
        super().__init__(reason)


@dataclass(slots=True, eq=False)
class _Connection:
    """A server as long as it lives.

    Attributes:
        client: it, once it answers.
        tools_changed: set when it says that its tools have changed.
        closed: set when it is gone, with the reason.
    """

    handle: ServerHandle
    client: Client | None = None
    active_calls: int = 0
    reason: str = ""
    settled: anyio.Event = field(default_factory=anyio.Event)
    tools_changed: anyio.Event = field(default_factory=anyio.Event)
    closed: anyio.Event = field(default_factory=anyio.Event)

    async def handle_message(self, message: object) -> None:
        """Take in what the server says of its own accord; called while nothing else can be read from it."""
        if isinstance(message, ToolListChangedNotification):
            self.tools_changed.set()


class McpSession:
    """One server and what it can do.

    Args:
        name: how plans call it.
        server: how it is started or reached.
        environ: where `{env:NAME}` is looked up.
        cwd: what its `cwd` is relative to.
        clock: time between one start and the next.
        on_change: is told whenever it has become available or ceased to be.

    Attributes:
        tools: its tools by name, as it stated them last.
        unavailable_reason: why it is not available; empty where it is.
        secrets: what it was told and nobody else is to see.
    """

    def __init__(
        self,
        name: str,
        server: McpServer,
        *,
        environ: Mapping[str, str],
        cwd: Path,
        clock: Clock,
        on_change: Callable[[McpSession], object],
    ) -> None:
        self.name, self.server = name, server
        self.tools: dict[str, Tool] = {}
        self.unavailable_reason = "it was not started yet"
        self.secrets = Secrets(environ)
        self._environ, self._cwd, self._clock, self._on_change = environ, cwd, clock, on_change
        self._connection = self._new_connection()
        self._start_requested = anyio.Event()
        self._scope = anyio.CancelScope()
        self._starting = self._closing = False
        self._start_count = 0

    def __repr__(self) -> str:
        return f"<McpSession {self.name!r} {'available' if self.available else self.unavailable_reason}>"

    @property
    def available(self) -> bool:
        """Whether it answers."""
        return not self.unavailable_reason

    async def run(self) -> None:
        """Keep the server alive, once somebody wants it, until it is closed or given up. Runs in a task of its own."""
        try:
            with self._scope:
                await self._start_requested.wait()
                while not self._closing and self._start_count <= MAX_RESTARTS:
                    if self._start_count > 1:  # the first time that it ends it is started again at once
                        await self._clock.sleep(2.0 ** (self._start_count - 2))
                    self._start_count += 1
                    await self._run_connection(self._connection)
                self.unavailable_reason += "" if self._closing else f"; it was given up after {MAX_RESTARTS} more tries"
        finally:
            self._connection.settled.set()

    def close(self) -> None:
        """Have it end, in order where it is connected."""
        self._closing = True
        if self._connection.client is not None:
            self._connection.handle.ended.set()
        elif self._starting and self.server.command is not None:
            self._connection.handle.abandon()
        else:
            self._scope.cancel()

    async def start(self) -> None:
        """Have it started, and wait until it answers or cannot be reached."""
        self._start_requested.set()
        await self._connection.settled.wait()

    async def call(self, tool: str, arguments: JsonObject) -> CallToolResult:
        """What a tool of the server answers.

        Raises:
            ServerGone: it is not there, or went away meanwhile.
            Exception: whatever the SDK raises, `MCPError` where the server refuses.
        """
        await self.start()
        connection = self._connection
        if connection.client is None:
            raise ServerGone(self.unavailable_reason, reached=False)
        lost, connection.active_calls = False, connection.active_calls + 1
        try:
            outcome = await _call_tool(connection, tool, arguments)
            lost = connection.closed.is_set() or _is_connection_lost(outcome)
        finally:
            connection.active_calls -= not lost
        if isinstance(outcome, CallToolResult):
            self._start_count = 1
            return outcome
        if outcome is not None and not lost:
            raise outcome
        connection.handle.ended.set()
        await connection.closed.wait()
        # The task runs on until the server is back, or cannot be started: nothing else may be under way, and a run in
        # which nothing can be done is over.
        await self._connection.settled.wait()
        raise ServerGone(connection.reason, reached=not _is_session_expired(outcome))

    def _new_connection(self) -> _Connection:
        return _Connection(ServerHandle(self.name, self.secrets))

    async def _run_connection(self, connection: _Connection) -> None:
        """Start it, and wait until it has ended, however it does."""
        self._starting = True
        try:
            await self._serve_connection(connection)
            reason = "its process has ended" if self.server.command is not None else "the connection to it has ended"
        except Exception as error:  # noqa: BLE001 - a server and its SDK fail in any way, and none may end the run
            reason = _error_text(error, self.server.url)
        self._starting = False
        words = connection.handle.last_stderr_line
        self.unavailable_reason = connection.reason = self.secrets.redact(f"{reason}: {words}" if words else reason)
        if self._start_count <= MAX_RESTARTS and not self._closing:
            self._connection = self._new_connection()
        # That a server ended which nobody was using is worth a word only if it cannot be started again.
        told = not self._closing and (connection.client is None or connection.active_calls > 0)
        connection.client = None
        connection.closed.set()
        if told:
            self._on_change(self)
        connection.settled.set()

    async def _serve_connection(self, connection: _Connection) -> None:
        server, line = self.server, connection.handle
        with anyio.CancelScope(deadline=anyio.current_time() + server.timeout) as scope:
            way = open_transport(server, line, self._environ, self._cwd)
            async with Client(way, cache=None, message_handler=connection.handle_message) as client:
                self.tools = await _list_tools(client)
                scope.deadline = math.inf
                connection.client, self.unavailable_reason = client, ""
                self._on_change(self)
                connection.settled.set()
                async with anyio.create_task_group() as group:
                    group.start_soon(_subscribe_to_changes, client)
                    group.start_soon(self._refresh_tools, connection, client)
                    await line.ended.wait()
                    group.cancel_scope.cancel()
        if scope.cancelled_caught:
            raise ServerStartError(f"it did not say within {server.timeout:g} s what it can do")

    async def _refresh_tools(self, connection: _Connection, client: Client) -> None:
        """Ask the server again what it can do whenever it says that this has changed."""
        while True:
            await connection.tools_changed.wait()
            connection.tools_changed = anyio.Event()
            try:
                with anyio.fail_after(self.server.timeout):
                    self.tools = await _list_tools(client)
            except Exception as error:  # noqa: BLE001 - that the server is gone is noticed elsewhere
                _log.debug("%s: its tools have changed, and are not known: %s", self.name, _error_text(error))
            else:
                self._on_change(self)
            await self._clock.sleep(_REFRESH_INTERVAL)


async def _subscribe_to_changes(client: Client) -> None:
    """Have a server say when its tools have changed, where it does so only if it is asked to."""
    with suppress(ListenNotSupportedError, SubscriptionLost, MCPError, TimeoutError):
        async with client.listen(tools_list_changed=True) as events:
            async for _ in events:
                pass  # it is heard of like what a server says unasked


async def _call_tool(connection: _Connection, tool: str, arguments: JsonObject) -> CallToolResult | Exception | None:
    """What came of a call; None where the server went away."""
    outcome: CallToolResult | Exception | None = None
    assert connection.client is not None
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            await connection.closed.wait()
            group.cancel_scope.cancel()

        group.start_soon(watch)
        try:
            outcome = await connection.client.call_tool(tool, dict(arguments))
        except Exception as error:  # noqa: BLE001 - raised by the caller, not in a group that nobody asked for
            outcome = error
        group.cancel_scope.cancel()
    return outcome


def _is_session_expired(outcome: object) -> bool:
    """Whether a server refuses a session that it does not know any more."""
    return isinstance(outcome, MCPError) and (outcome.code, outcome.message) == (INVALID_REQUEST, _SESSION_TERMINATED)


def _is_connection_lost(outcome: object) -> bool:
    """Whether what came of a call says that the server is gone."""
    return _is_session_expired(outcome) or (isinstance(outcome, MCPError) and outcome.code == CONNECTION_CLOSED)


async def _list_tools(client: Client) -> dict[str, Tool]:
    """The tools that a server states, as many as are looked at."""
    found: dict[str, Tool] = {}
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools[: _MAX_TOOLS - len(found)]:
            found.setdefault(tool.name, tool)
        cursor = page.next_cursor
        if cursor is None or len(found) >= _MAX_TOOLS:
            break
    return found


def _error_text(error: BaseException, url: str | None = None) -> str:
    """Why a server cannot be used, in one line."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    if isinstance(error, MCPError) and error.code == CONNECTION_CLOSED:
        return "it ended before it answered"
    text = " ".join(str(error).split())
    if isinstance(error, httpx2.TransportError):
        return f"{url} cannot be reached: {type(error).__name__}: {text}".rstrip(": ")
    return (
        text
        if isinstance(error, ServerStartError | MCPError) and text
        else f"{type(error).__name__}: {text}".rstrip(": ")
    )
