"""The kind `shell`: commands, run by `/bin/sh`."""

from __future__ import annotations

import re
from functools import partial
from typing import Final

import anyio.to_thread
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
from replanning.tools.process import START_BARRIER, CompletedProcess, OutputLimitExceeded, ProcessSpec, run_process

FEEDBACK_VARIABLE: Final = "REPLANNING_FEEDBACK"
"""The variable by which a process learns what a judge said of the attempt before."""

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
    """Everything that is wrong with the description of a command."""
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


def _process_spec(call: ToolCall, script: Script) -> ProcessSpec:
    own = {name: call.secrets.resolve(value) for name, value in call.tool.env.items()}
    feedback = str(getattr(call.context, "feedback", "")).replace(
        HOLE_DELIMITER, " "
    )  # others' contexts need have none
    told = {FEEDBACK_VARIABLE: feedback} if feedback else {}
    return ProcessSpec(
        argv=(_SHELL, "-ec", START_BARRIER + script.text, call.tool.name, *script.words),
        cwd=call.cwd,
        environ={**call.environ, **own, IDEMPOTENCY_KEY_VARIABLE: call.context.idempotency_key, **told},
        output_limit=call.output_limit,
        grace=call.grace,
        on_start=call.context.record_process,
    )


async def _run_script(call: ToolCall, script: Script) -> CompletedProcess:
    tool = call.tool
    if not call.cwd.is_dir():
        raise ToolUnavailable(tool.name, f"the working directory {str(call.cwd)!r}", "create it, or change `cwd`")
    try:
        finished = await run_process(_process_spec(call, script))
    except OutputLimitExceeded:
        raise ToolOutputTooLarge(tool.name, call.output_limit, "what it printed") from None
    except OSError as error:
        reason = f"it cannot be started: {error.strerror or error}"
        raise ToolUnavailable(tool.name, f"{_SHELL} with its command and arguments", reason) from error
    if finished.exit_code != 0:
        raise _exit_error(call, finished)
    return finished


def _exit_error(call: ToolCall, finished: CompletedProcess) -> Exception:
    """What a command that failed is to its task."""
    tool, code = call.tool, finished.exit_code
    stderr = call.secrets.redact(finished.stderr.decode(errors="replace"))
    if code in tool.transient:
        return TransientCommandFailed(tool.name, tool.command or "", code, stderr)
    if code == _EXIT_NOT_FOUND and (program := _missing_program(tool.name, stderr)):
        need = f"the program {program!r}, which is not on the PATH"
        return ToolUnavailable(tool.name, need, "install it, or use another tool")
    return CommandFailed(tool.name, tool.command or "", code, stderr)


def _missing_program(tool: str, stderr: str) -> str | None:
    """The program that the shell says it did not find."""
    said = re.findall(rf"^{re.escape(tool)}: (?:line )?\d+: (.+?): (?:command )?not found$", stderr, re.MULTILINE)
    return said[-1] if said else None


def _tool_output(finished: CompletedProcess) -> JsonObject:
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
    """The JSON object or array that is all a command printed, or the object that is its last line."""
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
