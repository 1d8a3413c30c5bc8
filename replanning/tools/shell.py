"""Tools of kind `shell`: commands, run by `/bin/sh` in a process group of which nothing outlives the command."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Final

import anyio
import anyio.to_thread
from anyio.abc import ByteReceiveStream, Process
from pydantic import JsonValue

from replanning.plan.tasks import ToolSpec
from replanning.plan.types import JsonObject
from replanning.run.processes import IDEMPOTENCY_KEY_VARIABLE
from replanning.tools.artifacts import FileSnapshot, artifact_names, find_artifacts, take_snapshot
from replanning.tools.call import HOLE_DELIMITER, ToolCall, parse_json
from replanning.tools.danger import Script, command_problems, compile_command
from replanning.tools.errors import (
    CommandFailed,
    InvalidArguments,
    InvalidTool,
    ToolOutputTooLarge,
    ToolUnavailable,
    TransientCommandFailed,
)

FEEDBACK_VARIABLE: Final = "REPLANNING_FEEDBACK"
"""Variable with the feedback of a judge on the previous attempt."""

_SHELL: Final = "/bin/sh"
_EXIT_NOT_FOUND: Final = 127


async def run_shell(call: ToolCall) -> JsonValue:
    """Run the command of a tool; the shell stops at the first command that fails (`sh -e`).

    Returns:
        `exit_code`, `stdout` and `stderr` (text, without the line ends at their end); `json`, where stdout
        is a JSON object or array or its last line an object; what the tool produces, by name; `undecodable`, the
        streams in which bytes that are no UTF-8 were replaced, if any.

    Raises:
        InvalidTool: the command cannot be run.
        InvalidArguments: an argument cannot be a word of the command.
        ToolUnavailable: the program or the working directory is not there.
        CommandFailed: the exit code is not 0.
        ToolOutputTooLarge: it printed too much.
    """
    script = _compile_script(call)
    names = artifact_names(call.tool, call.arguments)
    look = partial(anyio.to_thread.run_sync, take_snapshot, call.arguments, call.cwd)
    before: FileSnapshot = await look() if names else {}
    finished = await _run_script(call, script)
    output = _tool_output(finished)
    after: FileSnapshot = await look() if names else {}
    artifacts = find_artifacts(names, call.arguments, json_output=output.get("json"), before=before, after=after)
    return {**artifacts, **output}


def shell_problems(tool: ToolSpec) -> list[str]:
    """Return the problems of the description of a command."""
    problems = ["its kind is 'shell', so it needs a `command`"] if tool.command is None else []
    problems += command_problems(tool.command) if tool.command is not None else []
    problems += [
        f"{name!r} cannot be the name of a variable"
        for name in tool.env
        if not name or set(name) & {"=", HOLE_DELIMITER}
    ]
    problems += [
        f"{value!r} cannot be the value of a variable" for value in tool.env.values() if HOLE_DELIMITER in value
    ]
    return problems


def _compile_script(call: ToolCall) -> Script:
    if problems := shell_problems(call.tool):
        raise InvalidTool(call.tool.name, problems)
    try:
        return compile_command(call.tool.command or "", call.arguments)
    except ValueError as error:
        raise InvalidArguments(call.tool.name, [str(error)]) from None


def _process_spec(call: ToolCall, script: Script) -> _ProcessSpec:
    own = {name: call.secrets.resolve(value) for name, value in call.tool.env.items()}
    feedback = str(getattr(call.context, "feedback", "")).replace(
        HOLE_DELIMITER, " "
    )  # others' contexts need have none
    told = {FEEDBACK_VARIABLE: feedback} if feedback else {}
    return _ProcessSpec(
        argv=(_SHELL, "-ec", _START_BARRIER + script.text, call.tool.name, *script.words),
        cwd=call.cwd,
        environ={**call.environ, **own, IDEMPOTENCY_KEY_VARIABLE: call.context.idempotency_key, **told},
        output_limit=call.output_limit,
        grace=call.grace,
        on_start=call.context.record_process,
    )


async def _run_script(call: ToolCall, script: Script) -> _CompletedProcess:
    tool = call.tool
    if not call.cwd.is_dir():
        raise ToolUnavailable(tool.name, f"the working directory {str(call.cwd)!r}", "create it, or change `cwd`")
    try:
        finished = await _run_process(_process_spec(call, script))
    except _OutputLimitExceeded:
        raise ToolOutputTooLarge(tool.name, call.output_limit, "what it printed") from None
    except OSError as error:
        reason = f"it cannot be started: {error.strerror or error}"
        raise ToolUnavailable(tool.name, f"{_SHELL} with its command and arguments", reason) from error
    if finished.exit_code != 0:
        raise _exit_error(call, finished)
    return finished


def _exit_error(call: ToolCall, finished: _CompletedProcess) -> Exception:
    tool, code = call.tool, finished.exit_code
    stderr = call.secrets.redact(finished.stderr.decode(errors="replace"))
    if code in tool.transient:
        return TransientCommandFailed(tool.name, tool.command or "", code, stderr)
    if code == _EXIT_NOT_FOUND and (program := _missing_program(tool.name, stderr)):
        need = f"the program {program!r}, which is not on the PATH"
        return ToolUnavailable(tool.name, need, "install it, or use another tool")
    return CommandFailed(tool.name, tool.command or "", code, stderr)


def _missing_program(tool: str, stderr: str) -> str | None:
    said = re.findall(rf"^{re.escape(tool)}: (?:line )?\d+: (.+?): (?:command )?not found$", stderr, re.MULTILINE)
    return said[-1] if said else None


def _tool_output(finished: _CompletedProcess) -> JsonObject:
    streams = {"stdout": finished.stdout, "stderr": finished.stderr}
    output: JsonObject = {"exit_code": finished.exit_code}
    output |= {name: data.decode(errors="replace").rstrip("\r\n") for name, data in streams.items()}
    said = _json_in_stdout(str(output["stdout"]))
    if said is not None:
        output["json"] = said
    if undecodable := [name for name, data in streams.items() if not _is_utf8(data)]:
        output["undecodable"] = list[JsonValue](undecodable)
    return output


def _json_in_stdout(stdout: str) -> JsonValue:
    """Return the output as a JSON object or array, or its last line as an object."""
    whole = parse_json(stdout) if stdout.lstrip()[:1] in {"{", "["} else None
    if isinstance(whole, dict | list):
        return whole
    last = stdout.rpartition("\n")[2]
    said = parse_json(last) if last.lstrip()[:1] == "{" else None
    return said if isinstance(said, dict) else None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


_START_BARRIER = "read -r _ || exit 125; exec </dev/null; "
"""Beginning of every script: it waits until its process group is recorded; then its input is empty.

If we are killed between starting a process and recording it, the read fails and the process ends by itself.
"""


@dataclass(frozen=True, slots=True)
class _ProcessSpec:
    """Process to start; its program waits for a line on its input, see `_START_BARRIER`."""

    argv: Sequence[str]
    cwd: Path
    environ: Mapping[str, str]
    output_limit: int
    grace: float
    on_start: Callable[[int], object]


@dataclass(frozen=True, slots=True)
class _CompletedProcess:
    """Exit code of a process (128 and the number of the signal that ended it) and its output."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class _OutputLimitExceeded(Exception):
    """A process printed more than may be kept, and was stopped."""


@dataclass(slots=True)
class _OutputBuffer:
    """Output of a process so far, bounded over both streams together."""

    remaining: int
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)

    def append(self, kept: bytearray, chunk: bytes) -> None:
        self.remaining -= len(chunk)
        if self.remaining >= 0:
            kept += chunk


async def _run_process(launch: _ProcessSpec) -> _CompletedProcess:
    """Run a process in a group of its own until it ends, and kill its background processes.

    If the surrounding scope is cancelled, the whole group is terminated, and killed after the grace period, before
    this returns.

    Raises:
        _OutputLimitExceeded: it printed more than allowed; it was stopped.
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
        raise _OutputLimitExceeded
    return _CompletedProcess(
        128 - exit_code if exit_code < 0 else exit_code, bytes(output.stdout), bytes(output.stderr)
    )


async def _release_barrier(process: Process) -> None:
    assert process.stdin is not None
    with suppress(anyio.BrokenResourceError, ConnectionError):  # it has ended already: its exit code says why
        await process.stdin.send(b"\n")
        await process.stdin.aclose()


async def _collect_output(process: Process, output: _OutputBuffer, grace: float) -> int | None:
    """Collect the output until the process ends; return None if it was too much."""
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
    """Send a signal to a process group, unless it is gone or belongs to another user."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
