"""Tools that plans describe: shell commands, HTTP requests, Python functions, MCP servers.

`ToolExecutor` runs tasks for an orchestrator. `check_tools` and `check_machine` check a plan before
it runs.

`shell`: `command` is a script for `/bin/sh`, which stops at the first command that fails. `{name}`
is an argument as one word, or as several words if it is a list; the shell gets them as variables
and never parses them. Each command runs in its own process group, which is killed when the command
ends, fails, prints too much or is cancelled.

`http`: `{name}` is an argument: encoded in `url`, as text in `headers`, and with its type in `body`
where it is the whole string. Requests that may change something carry the idempotency key of the
attempt.

`python`: `callable` is `package.module:function`, which is called with the arguments as keywords.

`mcp`: `server` is an entry of the section `mcp` of the plan, `tool` the name that the server gives
the tool. `ToolExecutor.discover` adds the tools of the servers to a plan, as `SERVER.TOOL`. Servers
start on demand, are shared by all tasks, and restart when they end; meanwhile their tools are
unavailable, which `ToolExecutor.watch` reports.

The artifacts that a tool `produces` become parts of its output, so that `${build.output.wheel}`
finds one. The value of `wheel` is the first of these that exists:

- the key `wheel` of the JSON object that the tool prints or answers,
- its argument `wheel`,
- a file that the command made or changed, named by an argument or directly in a directory named by
  one: the one called `wheel`, else the only one that ends in `.wheel`, else the only one.

`{env:NAME}` in `env`, `url`, `headers` and `body` is an environment variable. It is looked up when
the tool runs, and its value is masked in errors and in whatever leaves the run. A command inherits
only a few variables (PATH, HOME, the user, the terminal, the language, the folder for temporary
files) besides those that its `env` names.
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
