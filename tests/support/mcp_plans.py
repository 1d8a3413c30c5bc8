"""What the tests of MCP servers share: real servers, plans for them, and what is told of their tools."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
from pydantic import JsonValue

from replanning import Plan, Task
from replanning.tools import ToolExecutor
from tests.support.tools import Pulse

PATIENCE = 60
"""Seconds after which a test gives up waiting; a server takes a while to start on a machine with much to do."""

SERVER = Path(__file__).with_name("mcp_server.py")
PLAIN = Path(__file__).with_name("mcp_plain_server.py")


def command(*arguments: object) -> list[str]:
    """How the server is started."""
    return [sys.executable, str(SERVER), *map(str, arguments)]


def plan(*arguments: object, described: Sequence[object] = (), tasks: Sequence[object] = (), **server: Any) -> Plan:
    """A plan with the server `web`, tools that it describes itself, and tasks."""
    fields = server if "url" in server else {"command": command(*arguments), **server}
    parts: dict[str, object] = {"goal": {"objective": "test"}, "mcp": {"web": fields}}
    return Plan.model_validate({**parts, "tools": [*described], "tasks": [*tasks]})


def use(name: str, /, **arguments: JsonValue) -> Task:
    """A task for a tool."""
    return Task(id="a", tool=name, arguments=arguments)


class Reports:
    """What a run is told of its tools."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool, str]] = []
        self._changed = anyio.Event()

    def __call__(self, name: str, /, *, available: bool, reason: str) -> None:
        self.seen.append((name, available, reason))
        self._changed.set()
        self._changed = anyio.Event()

    async def until(self, name: str, *, available: bool) -> str:
        """Wait until a tool has become available, or ceased to be; why."""
        with anyio.fail_after(PATIENCE):
            while True:
                for seen in self.seen:
                    if seen[:2] == (name, available):
                        return seen[2]
                await self._changed.wait()


class Pauses:
    """A clock that notes how long somebody wants to sleep, and lets them go on at once, or when it is told to."""

    def __init__(self, go: anyio.Event | None = None) -> None:
        self.slept: list[float] = []
        self._go = go

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if self._go is not None:
            await self._go.wait()
        await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def open_executor(wanted: Plan, **options: Any) -> AsyncIterator[tuple[ToolExecutor, Plan]]:
    """An executor for a plan, with its tools discovered."""
    with anyio.fail_after(PATIENCE):
        async with ToolExecutor(wanted, **options) as executor:
            yield executor, await executor.discover(wanted)


@contextmanager
def serving(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that serves over HTTP, and its address."""
    with subprocess.Popen(command("--http", *arguments), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, f"http://127.0.0.1:{process.stdout.readline().strip()}/mcp"
        finally:
            process.kill()


async def until(pulse: Pulse, text: bytes) -> bytes:
    """What a server shows until it has shown a text, or is gone."""
    seen = b""
    while text not in seen and (more := await pulse.beat()):
        seen += more
    return seen


async def hanging(pulse: Pulse) -> int:
    """Wait until the server hangs at a call; its process."""
    return int((await until(pulse, b"\n")).split()[1])
