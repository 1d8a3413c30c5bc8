"""One process and all that it starts: bounded in what it prints, and gone when it is stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE

import anyio
from anyio.abc import ByteReceiveStream, Process

START_BARRIER = "read -r _ || exit 125; exec </dev/null; "
"""What a shell script begins with to wait until its process group is noted; then its input is empty.

Without it a process could be at work that nobody knows of: if we are killed between starting it and noting
it, the read fails and it ends by itself.
"""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to be started. Its program waits for a line on its input, see `START_BARRIER`."""

    argv: Sequence[str]
    cwd: Path
    environ: Mapping[str, str]
    output_limit: int
    grace: float
    on_start: Callable[[int], object]


@dataclass(frozen=True, slots=True)
class CompletedProcess:
    """What a process left: its exit code (128 and the number of the signal that ended it) and its output."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class OutputLimitExceeded(Exception):
    """A process printed more than may be kept, and was stopped."""


@dataclass(slots=True)
class _OutputBuffer:
    """What a process has printed so far, on both of its streams together."""

    remaining: int
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)

    def append(self, kept: bytearray, chunk: bytes) -> None:
        self.remaining -= len(chunk)
        if self.remaining >= 0:
            kept += chunk


async def run_process(launch: ProcessSpec) -> CompletedProcess:
    """Run a process in a group of its own until it ends, and end what it left behind in the background.

    When the surrounding scope is cancelled, the whole group is asked to end and then killed, before this
    returns.

    Raises:
        TooMuchOutput: it printed more than allowed; it was stopped.
        OSError: it cannot be started.
    """
    with anyio.CancelScope(shield=True):  # asyncio loses a process while whose start it is cancelled
        process = await anyio.open_process(
            launch.argv,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            cwd=launch.cwd,
            env=launch.environ,
            start_new_session=True,
        )
    output = _OutputBuffer(launch.output_limit)
    try:
        launch.on_start(process.pid)
        await _release_barrier(process)
        exit_code = await _collect_output(process, output, launch.grace)
    finally:
        with anyio.CancelScope(shield=True):
            await _terminate_group(process, launch.grace)
    if exit_code is None:
        raise OutputLimitExceeded
    return CompletedProcess(128 - exit_code if exit_code < 0 else exit_code, bytes(output.stdout), bytes(output.stderr))


async def _release_barrier(process: Process) -> None:
    assert process.stdin is not None
    with suppress(anyio.BrokenResourceError, ConnectionError):  # it has ended already: its exit code says why
        await process.stdin.send(b"\n")
        await process.stdin.aclose()


async def _collect_output(process: Process, output: _OutputBuffer, grace: float) -> int | None:
    """Collect what it prints until it ends; None when it printed too much."""
    exit_code: int | None = None
    async with anyio.create_task_group() as group:

        async def collect(stream: ByteReceiveStream | None, kept: bytearray) -> None:
            assert stream is not None
            with suppress(anyio.BrokenResourceError):
                async for chunk in stream:
                    output.append(kept, chunk)
                    if output.remaining < 0:
                        group.cancel_scope.cancel()

        group.start_soon(collect, process.stdout, output.stdout)
        group.start_soon(collect, process.stderr, output.stderr)
        exit_code = await process.wait()
        # What it printed is in the pipes already. Only a process that left the group can still hold them
        # open after this, and that one is not waited for.
        _signal_group(process.pid, signal.SIGKILL)
        group.cancel_scope.deadline = anyio.current_time() + grace
    return exit_code if output.remaining >= 0 else None


async def _terminate_group(process: Process, grace: float) -> None:
    """End the whole group: ask, wait a little, kill."""
    if process.returncode is None:
        _signal_group(process.pid, signal.SIGTERM)
        with anyio.move_on_after(grace):
            async with anyio.create_task_group() as group:
                # The pipes close when the last process of the group is gone: the first is often a shell
                # that ends at once, while the program it started is still clearing up.
                group.start_soon(_drain, process.stdout)
                group.start_soon(_drain, process.stderr)
                await process.wait()
        _signal_group(process.pid, signal.SIGKILL)
    await process.aclose()


async def _drain(stream: ByteReceiveStream | None) -> None:
    assert stream is not None
    with suppress(anyio.BrokenResourceError):
        async for _ in stream:
            pass


def _signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to a process group; one that is gone, or not ours any more, is left alone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
