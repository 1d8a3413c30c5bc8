"""Errors of tools.

    ToolError
    ├── UnknownTool                    the plan does not describe the tool of the task
    ├── InvalidTool                    the definition of the tool cannot be run
    ├── InvalidArguments               the arguments do not fit the tool
    ├── ToolUnavailable                a program, module or variable is missing
    ├── CommandFailed                  a command ended with a failing exit code
    │   └── TransientCommandFailed     ... with one listed under `transient`
    ├── HttpStatusFailed               a server answered with an error status
    │   └── TransientHttpStatusFailed  ... that may pass
    ├── McpToolFailed                  an MCP server or one of its tools reports an error
    ├── McpServerLost                  an MCP server was lost during a call; in doubt
    ├── McpNotInstalled                the plan has MCP servers, but the SDK is missing
    ├── HttpUnreachable                a server could not be reached; may pass
    ├── HttpConnectionLost             the connection was lost before the answer; in doubt
    ├── ToolTimedOut                   a tool took longer than the executor allows; in doubt
    └── ToolOutputTooLarge             the output exceeds its limit (also an OutputError)

Errors that may pass are `TransientError`s as well, so the call is retried. `in_doubt` is set on
errors after which the tool may have had its effect.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress

from replanning.errors import OutputError, ToolError, TransientError
from replanning.plan.messages import cut, did_you_mean, format_duration, join_parts, pluralise

MAX_EXCERPT_CHARS = 2_000
"""Maximum number of characters of a server's answer that an error message quotes."""

MAX_STREAM_CHARS = 1_200
"""Maximum number of characters of each output stream in an error message: both fit a prompt."""


def head(text: str) -> str:
    """Return the start of a text, with a note if its end was cut off."""
    text = text.strip()
    left = len(text) - MAX_EXCERPT_CHARS
    if left <= 0:
        return text
    return f"{cut(text, MAX_EXCERPT_CHARS)} [… {pluralise(left, 'character')} more]"


def tail(text: str) -> str:
    """Return the end of a text, with a note if its start was cut off."""
    text = text.strip()
    left = len(text) - MAX_STREAM_CHARS
    if left <= 0:
        return text
    before = pluralise(left, "character")
    return f"[… {before} before] {cut(text, MAX_STREAM_CHARS, from_end=True)}"


class UnknownTool(ToolError):
    """A task names a tool that the plan does not describe, or no tool at all."""

    def __init__(self, task: str, tool: str | None, known: Iterable[str]) -> None:
        self.task = task
        self.tool = tool
        self.known_tools = tuple(known)
        hint = ""
        if tool is None:
            problem = f"task {task!r} names no tool"
        else:
            hint = did_you_mean(tool, self.known_tools)
            problem = f"task {task!r} names the tool {tool!r}, which the plan does not describe"
        super().__init__(join_parts(problem, f"its tools are {list(self.known_tools)}", hint))


class InvalidTool(ToolError):
    """The definition of a tool cannot be run; `problems` lists everything wrong with it."""

    def __init__(self, tool: str, problems: Sequence[str]) -> None:
        self.tool = tool
        self.problems = tuple(problems)
        super().__init__(f"tool {tool!r} cannot be run: {'; '.join(problems)}")


class InvalidArguments(ToolError):
    """The arguments of a task do not fit its tool; `problems` lists everything wrong with them."""

    def __init__(self, tool: str, problems: Sequence[str]) -> None:
        self.tool = tool
        self.problems = tuple(problems)
        super().__init__(f"the arguments do not fit tool {tool!r}: {'; '.join(problems)}")


class ToolUnavailable(ToolError):
    """Something that a tool needs is missing on this machine."""

    def __init__(self, tool: str, missing: str, advice: str) -> None:
        self.tool = tool
        self.missing = missing
        super().__init__(f"tool {tool!r} needs {missing}; {advice}")


class CommandFailed(ToolError):
    """A command ended with a failing exit code.

    Attributes:
        exit_code: the exit code; 128 plus the number of the signal if one ended the command.
        stderr: the end of its error output.
        stdout: the end of its output; many checkers and test runners write their findings there.
    """

    def __init__(
        self, tool: str, command: str, exit_code: int, stderr: str, stdout: str = ""
    ) -> None:
        self.tool = tool
        self.command = command
        self.exit_code = exit_code
        self.stderr = tail(stderr)
        self.stdout = tail(stdout)
        ended = f"exit code {exit_code}"
        # Other exit codes do not stand for a signal.
        with suppress(ValueError):
            ended += f" ({signal.Signals(exit_code - 128).name})"
            self.in_doubt = True
        if self.stderr:
            ended += f": {self.stderr}"
        elif not self.stdout:
            ended += ", without any output"
        message = f"tool {tool!r} ended with {ended} (command: {command})"
        if self.stdout:
            message += f"; it printed: {self.stdout}"
        super().__init__(message)


class TransientCommandFailed(CommandFailed, TransientError):
    """A command ended with an exit code that its tool lists under `transient`."""

    def __init__(
        self, tool: str, command: str, exit_code: int, stderr: str, stdout: str = ""
    ) -> None:
        super().__init__(tool, command, exit_code, stderr, stdout)
        # The tool states that it had no effect.
        self.in_doubt = False


class HttpStatusFailed(ToolError):
    """A server answered with an error status.

    The message states `retry_after`, but the delay before a retry does not depend on it.
    """

    def __init__(
        self,
        tool: str,
        request: str,
        status: int,
        answer: str,
        *,
        request_id: str | None = None,
        retry_after: float | None = None,
        advice: str = "",
    ) -> None:
        self.tool = tool
        self.request = request
        self.status = status
        self.response_text = head(answer)
        self.request_id = request_id
        self.retry_after = retry_after
        """Seconds that the server asks to wait; None if it does not say."""
        message = join_parts(f"tool {tool!r}: {request} answered {status}", advice)
        if request_id:
            message += f"; request id {request_id}"
        if retry_after is not None:
            message += f"; it asks to wait {format_duration(retry_after)}"
        if self.response_text:
            message += f": {self.response_text}"
        super().__init__(message)


class TransientHttpStatusFailed(HttpStatusFailed, TransientError):
    """A server answered with a transient status: 408, 425, 429, 503 or one under `transient`."""


class HttpUnreachable(ToolError, TransientError):
    """A server could not be reached, so it has not received the request."""

    def __init__(self, tool: str, request: str, cause: str) -> None:
        self.tool = tool
        self.request = request
        super().__init__(f"tool {tool!r}: {request} got no answer: {cause}")


class HttpConnectionLost(ToolError):
    """The connection was lost before the answer; the server may have served the request."""

    in_doubt = True

    def __init__(self, tool: str, request: str, cause: str) -> None:
        self.tool = tool
        self.request = request
        super().__init__(f"tool {tool!r}: {request} got no answer: {cause}")


class McpToolFailed(ToolError):
    """A tool of an MCP server, or the server itself, reports an error."""

    def __init__(self, tool: str, server: str, said: str) -> None:
        self.tool = tool
        self.server = server
        self.message = said
        super().__init__(f"tool {tool!r}: the MCP server {server!r} reports an error: {head(said)}")


class McpServerLost(ToolError):
    """An MCP server was lost during a call, which it may have completed."""

    in_doubt = True

    def __init__(self, tool: str, server: str, reason: str) -> None:
        self.tool = tool
        self.server = server
        self.reason = reason
        lost = f"the MCP server {server!r} was lost during the call"
        super().__init__(f"tool {tool!r}: {lost}: {head(reason)}")


class McpNotInstalled(ToolError):
    """A plan has MCP servers, but the package `mcp` is not installed."""

    def __init__(self, servers: Iterable[str]) -> None:
        self.servers = tuple(servers)
        needed = "the package mcp: pip install 'replanning[mcp]'"
        super().__init__(f"the MCP servers {list(self.servers)} need {needed}")


class ToolTimedOut(ToolError):
    """A tool took longer than the executor's limit for calls without a timeout of their own."""

    in_doubt = True

    def __init__(self, tool: str, limit: float) -> None:
        self.tool = tool
        self.timeout = limit
        super().__init__(
            f"tool {tool!r} was stopped after {format_duration(limit)}, the default limit; give the"
            " task or the tool a `timeout` if it needs longer"
        )


class ToolOutputTooLarge(ToolError, OutputError):
    """A tool printed or answered more than the executor keeps, so it was stopped."""

    in_doubt = True

    def __init__(self, tool: str, limit: int, source: str) -> None:
        self.tool = tool
        self.limit = limit
        super().__init__(
            f"tool {tool!r} was stopped because {source} exceeded {limit} bytes; let it write to a"
            " file and return its name, or raise the output limit (`max_output` in the settings)"
        )
