"""Tools for plans that describe theirs: shell commands, HTTP requests, Python functions, and tools of MCP servers.

`ToolExecutor` is the work of an orchestrator. `check_tools` and `check_machine` look at a plan
before it runs.

`shell`: `command` is a script for `/bin/sh`, which stops at the first command that fails. `{name}`
is an argument as one word, a list several words; they reach the shell as variables and are never
parsed by it. A command works in a process group of its own. When it ends, fails, prints too much or
is cancelled, nothing of that group is left.

`http`: `{name}` is an argument, encoded in `url`, as text in `headers`, with its type in `body`
where it is the whole string. Requests that change something carry the idempotency key of the
attempt.

`python`: `callable` is `package.module:function`; the arguments are keywords.

`mcp`: `server` is one of the section `mcp` of the plan, `tool` what the server calls it.
`ToolExecutor.discover` asks the servers what they have; what is found is called `SERVER.TOOL`.
Servers are started when they are needed, shared by all tasks, and started again when they end;
meanwhile their tools are unavailable, which `ToolExecutor.watch` tells.

What a tool `produces` is a part of its output, so that `${build.output.wheel}` finds it: the key
`wheel` of the JSON object that the tool prints or answers; else its argument `wheel`; else the file
that the command made or changed, named by an argument or directly in a directory named by one, and
called `wheel`, or the only one that ends in `.wheel`, or the only one.

`{env:NAME}` in `env`, `url`, `headers` and `body` is a variable of the environment. It is looked up
when the tool is run, and its value is hidden in whatever comes back. A command gets a few variables
of the environment (PATH, HOME, the user, the terminal, the language, the folder for temporary
files), and those that its `env` names; no others.
"""

from __future__ import annotations

from replanning.tools.call import Secrets, ToolCall, ToolRunner
from replanning.tools.check import check_machine, check_tools
from replanning.tools.errors import (
    CommandFailed,
    HttpConnectionLost,
    HttpStatusFailed,
    HttpUnreachable,
    InvalidArguments,
    InvalidTool,
    McpNotInstalled,
    McpServerLost,
    McpToolFailed,
    ToolOutputTooLarge,
    ToolTimedOut,
    ToolUnavailable,
    TransientCommandFailed,
    TransientHttpStatusFailed,
    UnknownTool,
)
from replanning.tools.executor import ToolExecutor

__all__ = [
    "CommandFailed",
    "HttpConnectionLost",
    "HttpStatusFailed",
    "HttpUnreachable",
    "InvalidArguments",
    "InvalidTool",
    "McpNotInstalled",
    "McpServerLost",
    "McpToolFailed",
    "Secrets",
    "ToolCall",
    "ToolExecutor",
    "ToolOutputTooLarge",
    "ToolRunner",
    "ToolTimedOut",
    "ToolUnavailable",
    "TransientCommandFailed",
    "TransientHttpStatusFailed",
    "UnknownTool",
    "check_machine",
    "check_tools",
]
