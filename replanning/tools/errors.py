"""Errors of tools.

    ToolError
    ├── UnknownTool                    the task names a tool that nobody described
    ├── InvalidTool                    the description of the tool cannot be run
    ├── InvalidArguments               the arguments do not fit the tool
    ├── ToolUnavailable                a program, module or variable it needs is not here
    ├── CommandFailed                  a command ended with an exit code that is a failure
    │   └── TransientCommandFailed     ... with one that the tool declares as transient
    ├── HttpStatusFailed               a server answered with an error
    │   └── TransientHttpStatusFailed  ... which may pass
    ├── McpToolFailed                  a tool of an MCP server, or the server itself, reports an error
    ├── McpServerLost                  an MCP server went away while it was at work; in doubt
    ├── McpNotInstalled                there are MCP servers, and no package that speaks with them
    ├── HttpUnreachable                a server could not be reached; may pass
    ├── HttpConnectionLost             the connection was lost before a request was answered; in doubt
    ├── ToolTimedOut                   a tool took longer than the executor allows; in doubt
    └── ToolOutputTooLarge             a tool printed or answered more than may be kept (also an OutputError)

Those that may pass are `TransientError`s as well, so they are tried again. `in_doubt` is set on those whose tool may have
had its effect.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress

from replanning.errors import OutputError, ToolError, TransientError
from replanning.plan.messages import cut, did_you_mean

MAX_EXCERPT_CHARS = 2_000
"""Characters of the answer of a server that an error message quotes."""

MAX_STREAM_CHARS = 1_200
"""Characters of each output stream of a command that an error message quotes: both fit a prompt."""


def head(text: str) -> str:
    """Return the start of a text, with a mark if its end was left out."""
    text = text.strip()
    left = len(text) - MAX_EXCERPT_CHARS
    return text if left <= 0 else f"{cut(text, MAX_EXCERPT_CHARS)} [… {left} characters more]"


def tail(text: str) -> str:
    """Return the end of a text, with a mark if its start was left out."""
    text = text.strip()
    left = len(text) - MAX_STREAM_CHARS
    return (
        text
        if left <= 0
        else f"[… {left} characters before] {cut(text, MAX_STREAM_CHARS, from_end=True)}"
    )


class UnknownTool(ToolError):
    """A task names a tool that the plan does not describe, or no tool at all."""

    def __init__(self, task: str, tool: str | None, known: Iterable[str]) -> None:
        self.task, self.tool, self.known_tools = task, tool, tuple(known)
        if tool is None:
            what = f"task {task!r} names no tool"
        else:
            what = f"task {task!r} names the tool {tool!r}, which the plan does not describe"
        hint = did_you_mean(tool, self.known_tools) if tool else ""
        super().__init__(
            "; ".join(filter(None, [what, f"described are {list(self.known_tools)}", hint]))
        )


class InvalidTool(ToolError):
    """The description of a tool cannot be run; `problems` says everything that is wrong with it."""

    def __init__(self, tool: str, problems: Sequence[str]) -> None:
        self.tool, self.problems = tool, tuple(problems)
        super().__init__(f"tool {tool!r} cannot be run: {'; '.join(problems)}")


class InvalidArguments(ToolError):
    """The arguments of a task do not fit its tool; `problems` says everything that is wrong with them."""

    def __init__(self, tool: str, problems: Sequence[str]) -> None:
        self.tool, self.problems = tool, tuple(problems)
        super().__init__(f"the arguments do not fit tool {tool!r}: {'; '.join(problems)}")


class ToolUnavailable(ToolError):
    """Something that a tool needs is missing on this machine."""

    def __init__(self, tool: str, missing: str, advice: str) -> None:
        self.tool = tool
        self.missing = missing
        super().__init__(f"tool {tool!r} needs {missing}; {advice}")


class CommandFailed(ToolError):
    """A command ended with an exit code that is a failure (128 and the number of the signal that ended it).

    Attributes:
        stderr: the end of what it wrote there.
        stdout: the same; many checkers and test runners write their findings there.
    """

    def __init__(
        self, tool: str, command: str, exit_code: int, stderr: str, stdout: str = ""
    ) -> None:
        self.stderr, self.stdout = tail(stderr), tail(stdout)
        self.tool = tool
        self.command = command
        self.exit_code = exit_code
        ended = f"exit code {exit_code}"
        with suppress(ValueError):  # no signal has this number
            ended += f" ({signal.Signals(exit_code - 128).name})"
            self.in_doubt = True
        if self.stderr:
            ended += f": {self.stderr}"
        elif not self.stdout:
            ended += ", without any output"
        printed = f"; it printed: {self.stdout}" if self.stdout else ""
        super().__init__(f"tool {tool!r} ended with {ended} (command: {command}){printed}")


class TransientCommandFailed(CommandFailed, TransientError):
    """A command ended with an exit code that its tool lists under `transient`."""

    def __init__(
        self, tool: str, command: str, exit_code: int, stderr: str, stdout: str = ""
    ) -> None:
        super().__init__(tool, command, exit_code, stderr, stdout)
        self.in_doubt = False  # the tool says that it had no effect


class HttpStatusFailed(ToolError):
    """A server answered with a status that is no success.

    The message tells `retry_after`; the delay of a retry does not follow it.
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
        self.tool, self.request, self.status, self.response_text = (
            tool,
            request,
            status,
            head(answer),
        )
        self.request_id = request_id
        self.retry_after = retry_after
        """Seconds that the server asks to wait, where it says so."""
        parts = [
            f"tool {tool!r}: {request} answered {status}",
            advice,
            f"request id {request_id}" if request_id else "",
            f"to be tried again after {retry_after:g} s" if retry_after is not None else "",
        ]
        super().__init__(
            "; ".join(filter(None, parts))
            + (f": {self.response_text}" if self.response_text else "")
        )


class TransientHttpStatusFailed(HttpStatusFailed, TransientError):
    """A server answered with a status that may pass: 408, 425, 429, 503, or one under `transient`."""


class HttpUnreachable(ToolError, TransientError):
    """A server could not be reached, so it has not received the request."""

    def __init__(self, tool: str, request: str, cause: str) -> None:
        self.tool = tool
        self.request = request
        super().__init__(f"tool {tool!r}: {request} got no answer: {cause}")


class HttpConnectionLost(ToolError):
    """The connection was lost before the answer; whether the server has carried out the request is not known."""

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
    """An MCP server went away while it was at work; whether the work was done is not known."""

    in_doubt = True

    def __init__(self, tool: str, server: str, reason: str) -> None:
        self.tool = tool
        self.server = server
        self.reason = reason
        super().__init__(
            f"tool {tool!r}: the MCP server {server!r} went away while it was at work: {head(reason)}"
        )


class McpNotInstalled(ToolError):
    """There are MCP servers, and no package that speaks with them."""

    def __init__(self, servers: Iterable[str]) -> None:
        self.servers = tuple(servers)
        super().__init__(
            f"the MCP servers {list(self.servers)} need the package mcp: pip install 'replanning[mcp]'"
        )


class ToolTimedOut(ToolError):
    """A tool took longer than the executor allows where neither task nor tool states a timeout."""

    in_doubt = True

    def __init__(self, tool: str, limit: float) -> None:
        self.tool = tool
        self.timeout = limit
        super().__init__(
            f"tool {tool!r} was stopped after {limit:g} s, the limit where nothing else is stated; "
            "give the task or the tool a `timeout` if it needs longer"
        )


class ToolOutputTooLarge(ToolError, OutputError):
    """A tool printed or answered more than the executor keeps; it was stopped, and nothing was cut."""

    in_doubt = True

    def __init__(self, tool: str, limit: int, source: str) -> None:
        self.tool = tool
        self.limit = limit
        super().__init__(
            f"tool {tool!r} was stopped because {source} exceeded {limit} bytes; "
            "let it write to a file and name the file, or raise the output limit (`max_output` in the settings)"
        )
