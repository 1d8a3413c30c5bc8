"""Tools for plans that describe theirs: shell commands, HTTP requests and Python functions.

`ToolExecutor` is the work of an orchestrator; `check_tools` and `check_machine` look at a plan before it
runs. See `replanning.tools._artifacts` for how an output comes by what its tool `produces`.
"""

from replanning.tools._call import Kind, ToolCall, WorkContext
from replanning.tools._check import check_machine, check_tools
from replanning.tools._errors import (
    CommandFailed,
    HttpStatusFailed,
    HttpUnreachable,
    InvalidArguments,
    InvalidTool,
    ToolOutputTooLarge,
    ToolTimedOut,
    ToolUnavailable,
    TransientCommandFailed,
    TransientHttpStatusFailed,
    UnknownTool,
)
from replanning.tools._executor import ToolExecutor
from replanning.tools._leftovers import kill_leftovers
from replanning.tools._templates import Secrets

__all__ = [
    # executing
    "Kind",
    "Secrets",
    "ToolCall",
    "ToolExecutor",
    "WorkContext",
    # before a run, and before it is resumed
    "check_machine",
    "check_tools",
    "kill_leftovers",
    # what can go wrong
    "CommandFailed",
    "HttpStatusFailed",
    "HttpUnreachable",
    "InvalidArguments",
    "InvalidTool",
    "ToolOutputTooLarge",
    "ToolTimedOut",
    "ToolUnavailable",
    "TransientCommandFailed",
    "TransientHttpStatusFailed",
    "UnknownTool",
]
