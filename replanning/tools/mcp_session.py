"""Session with an MCP server: started on demand, shared by all tasks, restarted when it ends."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio
import httpx2
from anyio.abc import ObjectReceiveStream
from mcp import Client, ClientSession, MCPError
from mcp.client._transport import ReadStream, TransportStreams
from mcp.client.stdio import DEFAULT_INHERITED_ENV_VARS, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost
from mcp.shared.dispatcher import ProgressFnT
from mcp.shared.message import SessionMessage
from mcp.types import (
    INVALID_REQUEST,
    CallToolResult,
    RequestParamsMeta,
    Tool,
    ToolListChangedNotification,
    jsonrpc_message_adapter,
)
from pydantic import ValidationError

from replanning.environment import Clock
from replanning.live.plan import MASK_CURE
from replanning.plan.json_values import is_redacted
from replanning.plan.messages import error_lines, format_duration
from replanning.plan.tasks import McpServer
from replanning.run.processes import MARK_VARIABLE, ProcessTree, process_mark
from replanning.run.retries import is_lost_mcp_connection
from replanning.secrets import MASK, Redactor
from replanning.tools.call import Secrets, unset_variables
from replanning.tools.errors import McpServerLost, ToolUnavailable

# Keep log messages of the SDK off stderr.
for _name in ("mcp", "client"):
    logging.getLogger(_name).addHandler(logging.NullHandler())

_LAUNCH_ARGV: Final = ("/bin/sh", "-c", 'echo "group $$" >&2; exec "$0" "$@"')
"""Launcher that prints its process group before it becomes the program."""

_GROUP_LINE: Final = re.compile(rb"^group (\d+)\n", re.MULTILINE)
_STDERR_PAUSE: Final = 0.1
"""Seconds of silence after which the lines on stderr are logged."""

_MAX_UNLOGGED_BYTES: Final = 100_000

_PARTIAL_WORD: Final = re.compile(rb"\A\S+")
_MAX_STDERR_BYTES: Final = 2_000
_STDERR_DRAIN_TIMEOUT: Final = 1.0
"""Seconds to wait for the last error output of a program after its end."""

_SURROGATE_ESCAPE: Final = "\\ud"

_CONNECT_TIMEOUT: Final = 30.0
"""Seconds to connect to an address; the task limits the time for an answer."""


class ServerStartError(Exception):
    """A server cannot be started or reached."""


@dataclass(slots=True, eq=False)
class _Connection:
    """Process of a server, or connection to its address, until that ends.

    Attributes:
        stderr_tail: the last output on stderr.
        client: the client; None until the server answers.
        calls: the scopes of calls that wait for an answer, or lost the server.
        reason: why the server is gone; set before `closed`.
        ended: set as soon as the process or connection has ended.
        tools_changed: set when the server reports changed tools.
        closed: set when the server is gone.
        settled: set when the server answers, or is gone.
    """

    name: str
    secrets: Secrets
    stderr_tail: bytes = b""
    client: Client | None = None
    calls: set[anyio.CancelScope] = field(default_factory=set)
    reason: str = ""
    ended: anyio.Event = field(default_factory=anyio.Event)
    tools_changed: anyio.Event = field(default_factory=anyio.Event)
    closed: anyio.Event = field(default_factory=anyio.Event)
    settled: anyio.Event = field(default_factory=anyio.Event)
    _group_known: anyio.Event = field(default_factory=anyio.Event)
    _stderr_closed: anyio.Event = field(default_factory=anyio.Event)
    _process_group: int = 0
    _abandoned: bool = False

    async def handle_message(self, message: object) -> None:
        """Handle a notification; no further message is read until this returns."""
        if isinstance(message, ToolListChangedNotification):
            self.tools_changed.set()

    async def read_stderr(self, end: int) -> None:
        """Read stderr, for the log and for the error when the program ends."""
        os.set_blocking(end, False)
        # Lines without a pause between them are logged together, because a part of a secret is not
        # recognised.
        unlogged = bytearray()
        try:
            while True:
                pause = _STDERR_PAUSE if b"\n" in unlogged else None
                with anyio.move_on_after(pause) as silence:
                    await anyio.wait_readable(end)
                lines = unlogged.rfind(b"\n") + 1
                if lines and (silence.cancelled_caught or lines > _MAX_UNLOGGED_BYTES):
                    self._log_stderr(unlogged[:lines])
                    del unlogged[:lines]
                    continue
                chunk = os.read(end, 65_536)
                if not chunk:
                    return
                self.stderr_tail += chunk
                if self._process_group:
                    unlogged += chunk
                else:
                    self._find_process_group()
                if len(self.stderr_tail) > _MAX_STDERR_BYTES:
                    # A word that was cut is dropped: half a secret is not recognised.
                    tail = self.stderr_tail[-_MAX_STDERR_BYTES:]
                    self.stderr_tail = _PARTIAL_WORD.sub(b"", tail, count=1)
        finally:
            os.close(end)
            self._log_stderr(unlogged)
            self._stderr_closed.set()

    def _find_process_group(self) -> None:
        """Remove the line of the launcher from the output, once it was read."""
        found = _GROUP_LINE.search(self.stderr_tail)
        if found is None:
            return
        self._process_group = int(found[1])
        self.stderr_tail = self.stderr_tail[found.end() :]
        self._group_known.set()
        if self._abandoned:
            self._kill()

    def _log_stderr(self, said: bytearray) -> None:
        if said and _log.isEnabledFor(logging.DEBUG):
            text = self._without_secrets(said.decode(errors="replace"))
            _log.debug("%s: %s", self.name, text.rstrip())

    def _without_secrets(self, text: str) -> str:
        return _REDACTOR.text(self.secrets.redact(text))

    async def watch_exit(self) -> None:
        """Set `ended` when the program ends, even if a child process holds its output open."""
        await self._group_known.wait()
        try:
            end = os.pidfd_open(self._process_group)
        except (AttributeError, OSError):
            # The system has no such call, or the program is gone already, which closes its output.
            return
        try:
            await anyio.wait_readable(end)
            self.ended.set()
        finally:
            os.close(end)

    async def terminate(self, processes: ProcessTree) -> None:
        """Kill the program and everything that it started, and read the rest of stderr."""
        with anyio.CancelScope(shield=True):
            # Before the program is gone: its children are also recognised by their parent.
            await anyio.to_thread.run_sync(processes.find)
            self._kill()
            left = await anyio.to_thread.run_sync(processes.end)
        if left:
            names = self._without_secrets(", ".join(left))
            _log.warning("%s: cannot be ended, and still running: %s", self.name, names)
        with anyio.move_on_after(_STDERR_DRAIN_TIMEOUT):
            await self._stderr_closed.wait()

    def abandon(self) -> None:
        """Kill a program that is being started; cancelling its start would leave it running."""
        self._abandoned = True
        self._kill()

    def _kill(self) -> None:
        if self._process_group > 1:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process_group, signal.SIGKILL)


def parse_message(line: str) -> SessionMessage:
    """Return the message of the protocol in a line.

    Half of a surrogate pair, which is left where a program cuts an emoji, becomes a question mark.
    Without a message, a call would wait for its answer until its time is up.

    Raises:
        ValueError: the line is not such a message.
    """
    try:
        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        if _SURROGATE_ESCAPE not in line.lower():
            raise
        encoded = json.dumps(json.loads(line), ensure_ascii=False).encode(errors="replace")
        message = jsonrpc_message_adapter.validate_json(encoded, by_name=False)
    return SessionMessage(message)


def _unparsed_line(error: Exception) -> str:
    """Return the line that the SDK could not parse; empty if the error is another one."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return str(first["input"])
    return ""


class _MonitoredStream(ObjectReceiveStream[SessionMessage | Exception]):
    """Stream that parses again what the SDK could not, and sets an event when it ends."""

    def __init__(self, stream: ReadStream[SessionMessage | Exception], ended: anyio.Event) -> None:
        self._stream = stream
        self._ended = ended

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    async def receive(self) -> SessionMessage | Exception:
        try:
            message = await self._stream.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
            self._ended.set()
            raise
        if isinstance(message, Exception):
            # It stays an error if the line is not a message at all, such as a line of a log.
            with suppress(ValueError, RecursionError):
                return parse_message(_unparsed_line(message))
        return message

    async def aclose(self) -> None:
        await self._stream.aclose()


@asynccontextmanager
async def _open_transport(
    server: McpServer, connection: _Connection, environ: Mapping[str, str], cwd: Path
) -> AsyncIterator[TransportStreams]:
    """Yield the streams to a server; a started program is killed afterwards with its children.

    Raises:
        ServerStartError: something that the server needs is missing.
        OSError: it cannot be started.
    """
    if is_redacted(server.model_dump(mode="json")):
        masked = f"the journal has {MASK} for a secret in its description"
        raise ServerStartError(f"{masked}; {MASK_CURE}")
    unset = unset_variables(server, environ)
    if unset:
        needed = f"it needs the environment variables {', '.join(unset)}"
        raise ServerStartError(f"{needed}, which are not set")
    if server.command is None:
        transport = _open_address(server, connection)
    else:
        transport = _start_program(server.command, server, connection, environ, cwd)
    async with transport as (read, write):
        yield _MonitoredStream(read, connection.ended), write


@asynccontextmanager
async def _open_address(
    server: McpServer, connection: _Connection
) -> AsyncIterator[TransportStreams]:
    headers: dict[str, str] = {}
    for name, text in server.headers.items():
        headers[name] = connection.secrets.resolve(text)
    timeout = httpx2.Timeout(_CONNECT_TIMEOUT, read=None)
    async with (
        httpx2.AsyncClient(headers=headers, timeout=timeout) as client,
        streamable_http_client(server.url or "", http_client=client) as streams,
    ):
        yield streams


@asynccontextmanager
async def _start_program(
    command: Sequence[str],
    server: McpServer,
    connection: _Connection,
    environ: Mapping[str, str],
    cwd: Path,
) -> AsyncIterator[TransportStreams]:
    program, *arguments = command
    inherited = {name: environ[name] for name in DEFAULT_INHERITED_ENV_VARS if name in environ}
    own: dict[str, str] = {}
    for name, text in server.env.items():
        own[name] = connection.secrets.resolve(text)
    if server.cwd is not None:
        cwd = cwd / server.cwd
    if not cwd.is_dir():
        raise ServerStartError(f"its working directory {str(cwd)!r} does not exist")
    _require_program(program, cwd, own.get("PATH", environ.get("PATH", os.defpath)))
    async with anyio.create_task_group() as group, AsyncExitStack() as stack:
        mark, marks = stack.enter_context(process_mark(environ))
        parameters = StdioServerParameters(
            command=_LAUNCH_ARGV[0],
            args=[*_LAUNCH_ARGV[1:], program, *arguments],
            env={**inherited, **own, MARK_VARIABLE: marks},
            cwd=cwd,
            # A byte that is not UTF-8 would otherwise end the reader, and every call would hang.
            encoding_error_handler="replace",
        )
        stack.callback(group.cancel_scope.cancel)
        stack.push_async_callback(connection.terminate, ProcessTree(mark))
        read_end, write_end = os.pipe()
        group.start_soon(connection.read_stderr, read_end)
        group.start_soon(connection.watch_exit)
        # Closed here as soon as the program has it.
        with os.fdopen(write_end, "w") as errors:
            streams = await stack.enter_async_context(stdio_client(parameters, errors))
        yield streams


def _require_program(program: str, cwd: Path, path: str) -> None:
    """Raise `ServerStartError` unless a program exists, in a directory or on the PATH."""
    place = " on the PATH"
    searched = program
    if "/" in program:
        place = ""
        searched = str(cwd / program)
    if shutil.which(searched, path=path) is None:
        advice = "install it, or correct `command`"
        raise ServerStartError(f"the program {program!r} is not found{place}; {advice}")


_log = logging.getLogger("replanning.mcp")
_REDACTOR = Redactor()
MAX_RESTARTS: Final = 5
"""Maximum number of restarts in a row without an answered call; then a server is given up."""

_MAX_PROBLEMS: Final = 3
"""Maximum number of problems of an invalid answer that an error names."""

_MAX_TOOLS: Final = 1_000
_MAX_PAGES: Final = 100
_REFRESH_INTERVAL: Final = 1.0
"""Minimum seconds between two requests for the tools of a server."""

_SESSION_EXPIRED: Final = (INVALID_REQUEST, "Session terminated")
"""Error of the SDK when a server has dropped a session."""


class McpSession:
    """MCP server with its tools, connected on demand and again whenever the connection ends.

    Args:
        name: the name of the server in plans.
        server: its command or address.
        environ: the variables for `{env:NAME}`.
        cwd: the directory that `cwd` of the server is relative to.
        clock: the clock for delays between restarts.
        on_change: called when the server becomes available or unavailable.

    Attributes:
        tools: the tools of the server by name, as it last listed them.
        unavailable_reason: why the server is unavailable; "" if it is available.
        starts_again: whether the server has answered before and is being restarted; calls wait.
        secrets: the secrets that the server was given.
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
        self.name = name
        self.server = server
        self.tools: dict[str, Tool] = {}
        self.unavailable_reason = "it has not been started yet"
        self.starts_again = False
        self.secrets = Secrets(environ)
        self._cwd = cwd
        self._clock = clock
        self._on_change = on_change
        self._connection = _Connection(name, self.secrets)
        self._start_requested = anyio.Event()
        self._scope = anyio.CancelScope()
        self._starting = False
        self._closing = False
        self._start_count = 0

    def __repr__(self) -> str:
        state = self.unavailable_reason or "available"
        return f"<McpSession {self.name!r} {state}>"

    @property
    def available(self) -> bool:
        """Whether the server answers."""
        return not self.unavailable_reason

    async def run(self) -> None:
        """Keep the server running from the first `start` until it is closed or given up.

        Runs in a task of its own.
        """
        try:
            with self._scope:
                await self._start_requested.wait()
                while not self._closing and self._start_count <= MAX_RESTARTS:
                    # After its first end the server is restarted at once.
                    if self._start_count > 1:
                        await self._clock.sleep(2.0 ** (self._start_count - 2))
                    self._start_count += 1
                    await self._run_connection(self._connection)
                if not self._closing:
                    self.unavailable_reason += f"; it was given up after {MAX_RESTARTS} more tries"
        finally:
            self._connection.settled.set()

    def close(self) -> None:
        """Stop the server; a connected one may first end by itself."""
        self._closing = True
        if self._connection.client is not None:
            self._connection.ended.set()
        elif self._starting and self.server.command is not None:
            self._connection.abandon()
        else:
            self._scope.cancel()

    async def start(self) -> None:
        """Start the server if necessary, and wait until it answers or has failed."""
        self._start_requested.set()
        await self._connection.settled.wait()

    @property
    def client(self) -> Client | None:
        """The client of the server; None while the server is not connected."""
        return self._connection.client

    async def call(
        self,
        tool: str,
        arguments: Mapping[str, object],
        *,
        named: str,
        on_progress: ProgressFnT | None = None,
        meta: RequestParamsMeta | None = None,
    ) -> CallToolResult:
        """Call a tool of the server and return its answer.

        Args:
            tool: the name that the server gives the tool.
            arguments: the arguments of the call.
            named: the name that errors use: that of the plan or of the client.
            on_progress: called with the progress that the server reports.
            meta: metadata of the request.

        Raises:
            ToolUnavailable: the server is unavailable.
            McpServerLost: the server was lost during the call, which it may have begun.
            Exception: any error of the SDK; `MCPError` if the server refuses.
        """
        if self._connection.client is None:
            await self.start()
        connection = self._connection
        if connection.client is None:
            raise self._absent(named, self.unavailable_reason)
        # It stays None if the server is lost.
        outcome: CallToolResult | Exception | None = None
        expired = False
        lost = False
        scope = anyio.CancelScope()
        connection.calls.add(scope)
        try:
            with scope:
                try:
                    outcome = await connection.client.call_tool(
                        tool, dict(arguments), progress_callback=on_progress, meta=meta
                    )
                except Exception as error:  # noqa: BLE001 - raised below, unless the server is lost
                    outcome = error
            lost = connection.closed.is_set()
            if isinstance(outcome, MCPError):
                expired = (outcome.code, outcome.message) == _SESSION_EXPIRED
                if expired or is_lost_mcp_connection(outcome.error):
                    lost = True
        finally:
            if not lost:
                connection.calls.discard(scope)
        if isinstance(outcome, CallToolResult):
            self._start_count = 1
            return outcome
        if isinstance(outcome, ValidationError) and not lost:
            raise RuntimeError(_error_text(outcome)) from outcome
        if outcome is not None and not lost:
            raise outcome
        connection.ended.set()
        await connection.closed.wait()
        # The task keeps running until the server is back, or cannot be started: a run with no task
        # running or available would end.
        await self._connection.settled.wait()
        if expired:
            raise self._absent(named, connection.reason)
        raise McpServerLost(named, self.name, connection.reason)

    def _absent(self, tool: str, reason: str) -> ToolUnavailable:
        where = f"the MCP server {self.name!r}"
        return ToolUnavailable(tool, where, f"which is unavailable: {reason}")

    async def _run_connection(self, connection: _Connection) -> None:
        self._starting = True
        try:
            timeout = self.server.timeout
            with anyio.CancelScope(deadline=anyio.current_time() + timeout) as scope:
                transport = _open_transport(
                    self.server, connection, self.secrets.environ, self._cwd
                )
                async with Client(
                    transport, cache=None, message_handler=connection.handle_message
                ) as client:
                    _keep_rejected_text(client.session)
                    self.tools = await _list_tools(client)
                    scope.deadline = math.inf
                    connection.client = client
                    self.unavailable_reason = ""
                    self.starts_again = False
                    self._on_change(self)
                    connection.settled.set()
                    async with anyio.create_task_group() as group:
                        group.start_soon(_subscribe_to_changes, connection, client)
                        group.start_soon(self._refresh_tools, connection, client)
                        await connection.ended.wait()
                        group.cancel_scope.cancel()
            if scope.cancelled_caught:
                raise ServerStartError(
                    f"it did not list its tools within {format_duration(timeout)}"
                )
            reason = "the connection to it has ended"
            if self.server.command is not None:
                reason = "its process has ended"
        except Exception as error:  # noqa: BLE001 - no failure of a server may end the run
            reason = _error_text(error, self.server.url)
        self._starting = False
        printed = connection.stderr_tail.decode(errors="replace").strip()
        if printed:
            reason += f": {printed.splitlines()[-1].strip()}"
        connection.reason = self.secrets.redact(reason)
        self.unavailable_reason = connection.reason
        self.starts_again = False
        if self._start_count <= MAX_RESTARTS and not self._closing:
            self._connection = _Connection(self.name, self.secrets)
            self.starts_again = connection.client is not None
        # The end of an unused server matters only if the restart fails.
        is_idle = connection.client is not None and not connection.calls
        connection.client = None
        connection.closed.set()
        for scope in connection.calls:
            scope.cancel()
        if not (is_idle or self._closing):
            self._on_change(self)
        connection.settled.set()

    async def _refresh_tools(self, connection: _Connection, client: Client) -> None:
        while True:
            await connection.tools_changed.wait()
            connection.tools_changed = anyio.Event()
            try:
                with anyio.fail_after(self.server.timeout):
                    self.tools = await _list_tools(client)
            except Exception as error:  # noqa: BLE001 - `run` notices that the server is gone
                reason = _error_text(error)
                _log.debug("%s: its changed tools cannot be listed: %s", self.name, reason)
            else:
                self._on_change(self)
            await self._clock.sleep(_REFRESH_INTERVAL)


def _keep_rejected_text(session: ClientSession) -> None:
    """Quote the text of a result in the error of an output schema that rejects it.

    The SDK drops the result, and with it the server's own description of the failure.
    """
    validate = session.validate_tool_result

    async def validate_tool_result(name: str, result: CallToolResult) -> None:
        try:
            await validate(name, result)
        except RuntimeError as error:
            texts = [block.text for block in result.content if block.type == "text"]
            answer = "\n".join(texts).strip()
            if not answer:
                raise
            raise RuntimeError(f"{error}; it answered: {answer}") from error

    session.validate_tool_result = validate_tool_result  # type: ignore[method-assign]


async def _subscribe_to_changes(connection: _Connection, client: Client) -> None:
    """Subscribe to changes of the tools, which some servers require.

    They do not report changes from before the subscription.
    """
    with suppress(ListenNotSupportedError, SubscriptionLost, MCPError, TimeoutError):
        async with client.listen(tools_list_changed=True) as events:
            connection.tools_changed.set()
            async for _ in events:
                # Each notification reaches `_Connection.handle_message`.
                pass


async def _list_tools(client: Client) -> dict[str, Tool]:
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
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    if isinstance(error, MCPError) and is_lost_mcp_connection(error.error):
        return "it ended before it answered"
    if isinstance(error, ValidationError):
        problems = "; ".join(error_lines(error, _MAX_PROBLEMS, root=error.title))
        return f"its answer does not fit the protocol: {problems}"
    text = " ".join(str(error).split())
    named = f"{type(error).__name__}: {text}".rstrip(": ")
    if isinstance(error, httpx2.TransportError):
        return f"{url} cannot be reached: {named}"
    if isinstance(error, ServerStartError | MCPError) and text:
        return text
    return named
