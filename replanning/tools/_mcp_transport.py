"""How a server of the Model Context Protocol is started or reached, and how it is noticed that it is gone."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import Final, Self

import anyio
import httpx2
from mcp.client._transport import ReadStream, TransportStreams
from mcp.client.stdio import DEFAULT_INHERITED_ENV_VARS, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from replanning._leftovers import kill_processes_with_variable
from replanning._servers import McpServer
from replanning.tools._templates import Secrets, unset_variables

_log = logging.getLogger("replanning.mcp")
for _name in ("mcp", "client"):  # what the SDK says of a server it cannot read is for who asks for it, not for stderr
    logging.getLogger(_name).addHandler(logging.NullHandler())

_LAUNCH_ARGV: Final = ("/bin/sh", "-c", 'echo "group $$" >&2; exec "$0" "$@"')
"""Says which process group the program has, before it becomes the program."""

_GROUP_LINE: Final = re.compile(rb"^group (\d+)\n", re.MULTILINE)

_MARKER_VARIABLE: Final = "REPLANNING_MCP_SERVER"
"""The variable that tells what a server has started from everything else, also once it has left its process group."""

_PARTIAL_WORD: Final = re.compile(rb"\A\S+")

_MAX_STDERR_BYTES: Final = 2_000
_STDERR_DRAIN_TIMEOUT: Final = 1.0
"""Seconds that what a program said last is waited for, once it has ended."""

_CONNECT_TIMEOUT: Final = 30.0
"""Seconds to reach an address; what an answer may take is for the task to say."""


class ServerStartError(Exception):
    """A server cannot be started or reached; says why."""


@dataclass(slots=True)
class ServerHandle:
    """A line to a server.

    Attributes:
        process_token: by which all that its program starts is known, as a variable of the environment.
        ended: set as soon as nothing more can come.
        stderr_tail: what the program said last on stderr.
    """

    name: str
    secrets: Secrets
    ended: anyio.Event = field(default_factory=anyio.Event)
    stderr_tail: bytes = b""
    process_token: str = field(default_factory=lambda: token_hex(16))
    _group_known: anyio.Event = field(default_factory=anyio.Event)
    _stderr_closed: anyio.Event = field(default_factory=anyio.Event)
    _process_group: int = 0
    _abandoned: bool = False

    @property
    def last_stderr_line(self) -> str:
        """The last line that the program said on stderr, without secrets."""
        lines = self.stderr_tail.decode(errors="replace").split("\n")
        found = [line.strip() for line in lines if line.strip()]
        return self.secrets.redact(found[-1])[:_MAX_STDERR_BYTES] if found else ""

    async def read_stderr(self, end: int) -> None:
        """Read what the program says on stderr, for the log and for when it ends."""
        os.set_blocking(end, False)
        try:
            while True:
                await anyio.wait_readable(end)
                chunk = os.read(end, 65_536)
                if not chunk:
                    return
                self._handle_stderr(chunk)
        finally:
            os.close(end)
            self._stderr_closed.set()

    def _handle_stderr(self, chunk: bytes) -> None:
        self.stderr_tail += chunk
        if not self._process_group and (found := _GROUP_LINE.search(self.stderr_tail)):
            self._process_group, self.stderr_tail = int(found[1]), self.stderr_tail[found.end() :]
            self._group_known.set()
            if self._abandoned:
                self._kill()
        elif self._process_group:
            _log.debug("%s: %s", self.name, self.secrets.redact(chunk.decode(errors="replace")).rstrip())
        if len(self.stderr_tail) > _MAX_STDERR_BYTES:  # a word that is cut is left out: half a secret is not recognised
            self.stderr_tail = _PARTIAL_WORD.sub(b"", self.stderr_tail[-_MAX_STDERR_BYTES:], count=1)

    async def watch_exit(self) -> None:
        """Notice when the program ends, also where something that it has started holds its output open."""
        await self._group_known.wait()
        try:
            end = os.pidfd_open(self._process_group)
        except (AttributeError, OSError):  # the system cannot, or it is gone already and its output tells
            return
        try:
            await anyio.wait_readable(end)
            self.ended.set()
        finally:
            os.close(end)

    async def terminate(self) -> None:
        """End what is left of the program and of all that it has started, and hear its last words."""
        self._kill()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(
                kill_processes_with_variable, f"{_MARKER_VARIABLE}={self.process_token}".encode()
            )
        with anyio.move_on_after(_STDERR_DRAIN_TIMEOUT):
            await self._stderr_closed.wait()

    def abandon(self) -> None:
        """End a program that is being started, as soon as it is; whoever cancels that instead leaves it unattended."""
        self._abandoned = True
        self._kill()

    def _kill(self) -> None:
        if self._process_group > 1:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process_group, signal.SIGKILL)


class _MonitoredStream:
    """A stream that says when it has ended."""

    def __init__(self, stream: ReadStream[SessionMessage | Exception], ended: anyio.Event) -> None:
        self._stream = stream
        self._ended = ended

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def receive(self) -> SessionMessage | Exception:
        try:
            return await self._stream.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
            self._ended.set()
            raise

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._stream.__aexit__(kind, error, traceback)


@asynccontextmanager
async def open_transport(
    server: McpServer, line: ServerHandle, environ: Mapping[str, str], cwd: Path
) -> AsyncIterator[TransportStreams]:
    """The streams to a server, which is started where it is a program; gone with all it started afterwards.

    Raises:
        CannotStart: something that it needs is missing.
        OSError: it cannot be started.
    """
    if unset := unset_variables(server, environ):
        raise ServerStartError(f"it needs the environment variables {', '.join(unset)}, which are not set")
    way = _stdio_transport(server, line, environ, cwd) if server.command is not None else _http_transport(server, line)
    async with way as (read, write):
        yield _MonitoredStream(read, line.ended), write


@asynccontextmanager
async def _stdio_transport(
    server: McpServer, line: ServerHandle, environ: Mapping[str, str], cwd: Path
) -> AsyncIterator[TransportStreams]:
    parameters = _stdio_parameters(server, line, environ, cwd / server.cwd if server.cwd is not None else cwd)
    async with anyio.create_task_group() as group, AsyncExitStack() as stack:
        stack.callback(group.cancel_scope.cancel)
        stack.push_async_callback(line.terminate)
        read_end, write_end = os.pipe()
        group.start_soon(line.read_stderr, read_end)
        group.start_soon(line.watch_exit)
        with os.fdopen(write_end, "w") as errors:  # closed here once the program has it
            streams = await stack.enter_async_context(stdio_client(parameters, errors))
        yield streams


def _stdio_parameters(
    server: McpServer, line: ServerHandle, environ: Mapping[str, str], cwd: Path
) -> StdioServerParameters:
    program, *arguments = server.command or ()
    inherited = {name: environ[name] for name in DEFAULT_INHERITED_ENV_VARS if name in environ}
    own = {name: line.secrets.resolve(text) for name, text in server.env.items()}
    if not cwd.is_dir():
        raise ServerStartError(f"its working directory {str(cwd)!r} does not exist")
    path = own.get("PATH", environ.get("PATH", os.defpath))
    if shutil.which(cwd / program if "/" in program else program, path=path) is None:
        place = "" if "/" in program else " on the PATH"
        raise ServerStartError(f"the program {program!r} is not found{place}; install it, or correct `command`")
    return StdioServerParameters(
        command=_LAUNCH_ARGV[0],
        args=[*_LAUNCH_ARGV[1:], program, *arguments],
        env={**inherited, **own, _MARKER_VARIABLE: line.process_token},
        cwd=cwd,
    )


@asynccontextmanager
async def _http_transport(server: McpServer, line: ServerHandle) -> AsyncIterator[TransportStreams]:
    headers = {name: line.secrets.resolve(text) for name, text in server.headers.items()}
    limits = httpx2.Timeout(_CONNECT_TIMEOUT, read=None)
    async with (
        httpx2.AsyncClient(headers=headers, timeout=limits) as client,
        streamable_http_client(server.url or "", http_client=client) as streams,
    ):
        yield streams
