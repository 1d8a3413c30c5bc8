"""Tools of kind `shell`: commands, each run by `/bin/sh` in a process group of its own.

When a command ends, its process group is killed. Processes in a session of their own survive that,
so that a task can start a service. If a command is cut off, by a time limit or because the run
stops, everything that it started is ended with it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from subprocess import PIPE
from typing import Final

import anyio
import anyio.to_thread
from anyio.abc import ByteReceiveStream, Process
from pydantic import JsonValue

from replanning.plan.commands import HOLE_DELIMITER, Script, command_problems, compile_command
from replanning.plan.messages import one_line
from replanning.plan.tasks import ToolSpec
from replanning.plan.types import JsonObject, JsonPath
from replanning.run.processes import (
    IDEMPOTENCY_KEY_VARIABLE,
    MARK_VARIABLE,
    ProcessTree,
    process_mark,
)
from replanning.run.retries import TRANSIENT_ERRNOS
from replanning.secrets import Redactor
from replanning.tools.call import FileSnapshot, ToolCall, find_artifacts, parse_json, take_snapshot
from replanning.tools.errors import (
    CommandFailed,
    InvalidArguments,
    InvalidTool,
    ToolOutputTooLarge,
    ToolUnavailable,
    TransientCommandFailed,
)

FEEDBACK_VARIABLE: Final = "REPLANNING_FEEDBACK"
"""Environment variable with the feedback of a judge on the previous attempt."""

_SHELL: Final = "/bin/sh"
_EXIT_NOT_FOUND: Final = 127


async def run_shell(call: ToolCall) -> JsonValue:
    """Run the command of a tool; the shell stops at the first command that fails (`sh -e`).

    Returns:
        `exit_code`; `stdout` and `stderr` as text, without trailing line ends; `json`, where stdout
        or its last line is JSON; the artifacts, by name; `undecodable`, the streams that held bytes
        other than UTF-8, which are replaced.

    Raises:
        InvalidTool: the definition of the command is wrong.
        InvalidArguments: an argument cannot be a word of the command.
        ToolUnavailable: the program or the working directory does not exist.
        CommandFailed: the exit code is neither 0 nor one that the tool accepts.
        ToolOutputTooLarge: it printed too much.
        OSError: it cannot be started now, but perhaps later.
    """
    tool = call.tool
    problems = [message for _, message in shell_problems(tool)]
    if problems:
        raise InvalidTool(tool.name, problems)
    try:
        script = compile_command(tool.command or "", call.arguments, tool.parameters)
    except ValueError as error:
        raise InvalidArguments(tool.name, [str(error)]) from None
    if not call.cwd.is_dir():
        missing = f"the working directory {str(call.cwd)!r}"
        raise ToolUnavailable(tool.name, missing, "create it, or change `cwd`")

    before: FileSnapshot = {}
    after: FileSnapshot = {}
    look = partial(anyio.to_thread.run_sync, take_snapshot, call.arguments, call.cwd)
    if tool.produces:
        before = await look()
    try:
        exit_code, *streams = await _run_process(call, script)
    except OSError as error:
        # File descriptors or processes have run out; other tasks will release some.
        if error.errno in TRANSIENT_ERRNOS:
            raise
        missing = f"{_SHELL} with its command and arguments"
        reason = f"it cannot be started: {error.strerror or error}"
        raise ToolUnavailable(tool.name, missing, reason) from error
    stdout, stderr = (stream.decode(errors="replace") for stream in streams)
    if exit_code != 0 and exit_code not in tool.accepted:
        raise _command_error(call, exit_code, stdout, stderr)

    output: JsonObject = {
        "exit_code": exit_code,
        "stdout": stdout.rstrip("\r\n"),
        "stderr": stderr.rstrip("\r\n"),
    }
    value = _printed_json(stdout)
    if value is not None:
        output["json"] = value
    undecodable: list[JsonValue] = []
    if stdout.encode() != streams[0]:
        undecodable.append("stdout")
    if stderr.encode() != streams[1]:
        undecodable.append("stderr")
    if undecodable:
        output["undecodable"] = undecodable
    if tool.produces:
        after = await look()
    return {**find_artifacts(tool, call.arguments, value, before=before, after=after), **output}


def _command_error(
    call: ToolCall, exit_code: int, stdout: str, stderr: str
) -> CommandFailed | ToolUnavailable:
    """Return the error of a command with an exit code that its tool does not accept."""
    tool = call.tool
    command = tool.command or ""
    stdout = call.secrets.redact(stdout)
    stderr = call.secrets.redact(stderr)
    if exit_code in tool.transient:
        return TransientCommandFailed(tool.name, command, exit_code, stderr, stdout)
    if exit_code == _EXIT_NOT_FOUND:
        # The shell reports a missing program; the command itself may also end with this exit code.
        not_found = rf"^{re.escape(tool.name)}: (?:line )?\d+: (.+?): (?:command )?not found$"
        missing = re.findall(not_found, stderr, re.MULTILINE)
        if missing:
            need = f"the program {missing[-1]!r}, which is not on the PATH"
            return ToolUnavailable(tool.name, need, "install it, or use another tool")
    return CommandFailed(tool.name, command, exit_code, stderr, stdout)


def _printed_json(stdout: str) -> JsonValue:
    """Return the object or array that a command printed, or the object on its last line."""
    whole = stdout.strip()
    value: JsonValue = None
    if whole.startswith(("{", "[")):
        value = parse_json(whole)
    if value is None:
        last = stdout.rstrip("\r\n").rpartition("\n")[2].strip()
        if last.startswith("{"):
            value = parse_json(last)
    return value


def shell_problems(tool: ToolSpec) -> Iterator[tuple[JsonPath, str]]:
    """Yield the problems of the definition of a command, each with the path of its field."""
    if tool.command is None:
        yield (), "its kind is 'shell', so it needs a `command`"
    else:
        for problem in command_problems(tool.command):
            yield ("command",), problem
    for name, value in tool.env.items():
        if not name or set(name) & {"=", HOLE_DELIMITER}:
            yield ("env", name), f"{name!r} cannot be the name of a variable"
        if HOLE_DELIMITER in value:
            yield ("env", name), f"{value!r} cannot be the value of a variable"


_log: Final = logging.getLogger("replanning.tools")
_REDACTOR: Final = Redactor()

SANDBOX_PROGRAM: Final = "bwrap"
"""Program (Bubblewrap) that confines a command to its workspace."""

_working_sandboxes: dict[str, bool] = {}
"""Whether each sandbox program works; it needs user namespaces, which many containers lack."""


async def _sandbox_words(call: ToolCall) -> list[str]:
    """Return the words that confine a command to its workspace; none without a sandbox program.

    The command can write only in the workspace, in `call.writable` and in an empty /tmp, and sees
    no other processes. Reading and the network are not confined.
    """
    program = shutil.which(SANDBOX_PROGRAM, path=call.environ.get("PATH", os.defpath))
    if call.workspace is None or program is None:
        return []
    words = [
        program,
        "--ro-bind",
        "/",
        "/",
        "--dev",
        "/dev",
        "--unshare-pid",
        "--proc",
        "/proc",
        "--tmpfs",
        "/tmp",  # noqa: S108
    ]
    if program not in _working_sandboxes:
        trial = [*words, "--", _SHELL, "-c", ":"]
        tried = await anyio.run_process(trial, check=False, env=dict(call.environ))
        _working_sandboxes[program] = tried.returncode == 0
        if tried.returncode:
            _log.warning(
                "%s does not work here, so commands are not confined to their workspace: %s",
                program,
                one_line(tried.stderr.decode(errors="replace"), 200),
            )
    if not _working_sandboxes[program]:
        return []
    for place in map(str, (call.workspace, *call.writable)):
        words += ["--bind", place, place]
    return [*words, "--chdir", str(call.cwd.resolve()), "--"]


_START_BARRIER = "read -r _ || exit 125; exec </dev/null; "
"""Beginning of every script: waits until its process group is recorded, then empties its input.

If this process is killed between starting the script and recording it, the read fails and the
script ends by itself.
"""


async def _run_process(call: ToolCall, script: Script) -> tuple[int, bytes, bytes]:
    """Run a script in a process group of its own until it ends, and kill its background processes.

    If the surrounding scope is cancelled, everything that the script started is terminated, and
    killed after the grace period, before this returns.

    Returns:
        The exit code (128 and the number of the signal, if one ended it), stdout and stderr.

    Raises:
        ToolOutputTooLarge: it printed more than allowed; it was stopped.
        OSError: it cannot be started.
    """
    own: dict[str, str] = {}
    for name, value in call.tool.env.items():
        own[name] = call.secrets.resolve(value)
    # Only contexts of a run are certain to have feedback.
    feedback = str(getattr(call.context, "feedback", ""))
    if feedback:
        own[FEEDBACK_VARIABLE] = feedback.replace(HOLE_DELIMITER, " ")
    sandbox = await _sandbox_words(call)
    with process_mark(call.environ) as (mark, marks):
        own[IDEMPOTENCY_KEY_VARIABLE] = call.context.idempotency_key
        own[MARK_VARIABLE] = marks
        words = (*sandbox, _SHELL, "-ec", _START_BARRIER + script.text, call.tool.name)
        # asyncio would lose a process whose start is cancelled.
        with anyio.CancelScope(shield=True):
            process = await anyio.open_process(
                (*words, *script.words),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                cwd=call.cwd,
                env={**call.environ, **own},
                start_new_session=True,
            )
        stdout = bytearray()
        stderr = bytearray()
        is_too_much = False
        is_over = False
        try:
            call.context.record_process(process.pid)
            assert process.stdin is not None
            # If it has ended already, its exit code says why.
            with suppress(anyio.BrokenResourceError, ConnectionError):
                await process.stdin.send(b"\n")
                await process.stdin.aclose()
            async with anyio.create_task_group() as group:

                async def collect(stream: ByteReceiveStream | None, kept: bytearray) -> None:
                    nonlocal is_too_much
                    assert stream is not None
                    with suppress(anyio.BrokenResourceError):
                        async for chunk in stream:
                            if len(stdout) + len(stderr) + len(chunk) > call.output_limit:
                                is_too_much = True
                                group.cancel_scope.cancel()
                            else:
                                kept += chunk

                group.start_soon(collect, process.stdout, stdout)
                group.start_soon(collect, process.stderr, stderr)
                await process.wait()
                # Its output is in the pipes already. Only a process that left the group can still
                # hold them open, and nobody waits for that one.
                _signal_group(process.pid, signal.SIGKILL)
                group.cancel_scope.deadline = anyio.current_time() + call.grace
            is_over = not is_too_much
        finally:
            with anyio.CancelScope(shield=True):
                if not is_over:
                    await _cut_off(process, mark, call)
                await process.aclose()
    if is_too_much:
        raise ToolOutputTooLarge(call.tool.name, call.output_limit, "its output")
    assert process.returncode is not None
    exit_code = process.returncode
    if exit_code < 0:
        exit_code = 128 - exit_code
    return exit_code, bytes(stdout), bytes(stderr)


async def _cut_off(process: Process, mark: str, call: ToolCall) -> None:
    """End the processes of a command: its group, and those that have left it.

    They are terminated first, and killed after the grace period. The log names those that cannot be
    ended.
    """
    deadline = anyio.current_time() + call.grace
    tree = ProcessTree(mark)
    # Before any of them ends, because a process without the mark is known by its parent.
    await anyio.to_thread.run_sync(tree.find)
    _signal_group(process.pid, signal.SIGTERM)
    tree.terminate(except_group=process.pid)
    with anyio.CancelScope(deadline=deadline):
        async with anyio.create_task_group() as group:
            # The pipes close when the last process of the group is gone: the first is often a shell
            # that ends at once, while the program it started is still clearing up.
            group.start_soon(_drain, process.stdout)
            group.start_soon(_drain, process.stderr)
            await process.wait()
    _signal_group(process.pid, signal.SIGKILL)
    left = await anyio.to_thread.run_sync(tree.end, deadline - anyio.current_time())
    if left:
        names = _REDACTOR.text(call.secrets.redact(", ".join(left)))
        _log.warning("%s: cannot be ended, and still running: %s", call.tool.name, names)


async def _drain(stream: ByteReceiveStream | None) -> None:
    assert stream is not None
    with suppress(anyio.BrokenResourceError):
        async for _ in stream:
            pass


def _signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to a process group, unless it is gone or belongs to another user."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
