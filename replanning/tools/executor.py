"""Executor of tasks with the tools of their plan."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import anyio
import anyio.to_thread
from pydantic import JsonValue, TypeAdapter

from replanning.environment import Clock, SystemClock
from replanning.errors import NotAccepted, ToolError, UnexpectedOutput, UnverifiedOutput
from replanning.plan.checks import nested_bodies
from replanning.plan.document import Plan
from replanning.plan.references import IDEMPOTENCY_KEY
from replanning.plan.tasks import McpServer, Task, ToolSpec, to_seconds
from replanning.run.outputs import return_type_of
from replanning.tools.call import (
    Secrets,
    ToolCall,
    ToolRunner,
    WorkContext,
    inherited_variables,
    missing_arguments,
    unset_variables,
    workspace_problems,
)
from replanning.tools.errors import (
    CommandFailed,
    InvalidArguments,
    InvalidTool,
    ToolTimedOut,
    ToolUnavailable,
    UnknownTool,
)
from replanning.tools.http import HttpToolRunner
from replanning.tools.mcp import AvailabilityListener, McpToolRunner
from replanning.tools.python import PythonToolRunner, callable_problems, load_callable
from replanning.tools.shell import run_shell

_JSON_TYPE_NAMES: Final[Mapping[type, str]] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


class ToolExecutor:
    """Executor of tasks with the tools that their plan describes, for an orchestrator.

    ```python
    async with ToolExecutor(plan) as work:
        result = await engine.attach(SwarmOrchestrator(work)).run(plan)
    ```

    It knows the kinds `shell`, `http`, `python` and `mcp`. Variables `{env:NAME}` in the definition
    of a tool are looked up when it runs. Their values are hidden in errors, and the run masks them
    in whatever leaves it.

    Args:
        tools: the plan, or the tools themselves. A tool of the live plan takes precedence over one
            of the same name.
        default_timeout: time limit, in seconds or as timedelta, of a call whose task and tool state
            no timeout; None for no limit.
        output_limit: number of bytes that one task may print or receive; more is an error, output
            is never truncated.
        cwd: the working directory of commands, relative to the folder of the run; `cwd` of a tool
            is relative to it. MCP servers start before a run is open, so for them it is relative to
            the folder of this process.
        environ: the environment of commands and of `{env:NAME}`; by default that of the process.
        grace: seconds or timedelta from asking a process to end until it is killed.
        kinds: runners of further kinds by name, or replacements of the built-in ones.
        servers: the MCP servers; by default those of the plan.
        clock: the clock for delays between restarts of an MCP server; by default that of this
            machine.
        commands: commands that tasks may have under `expect`, besides those in the plan.
    """

    def __init__(
        self,
        tools: Plan | Iterable[ToolSpec],
        *,
        default_timeout: float | timedelta | None = 60.0,
        output_limit: int = 1024 * 1024,
        cwd: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
        grace: float | timedelta = 2.0,
        kinds: Mapping[str, ToolRunner] | None = None,
        servers: Mapping[str, McpServer] | None = None,
        clock: Clock | None = None,
        commands: Iterable[str] = (),
    ) -> None:
        self._commands = set(commands)
        if isinstance(tools, Plan):
            for task in tools.tasks:
                for _, body in nested_bodies(task):
                    self._commands.update(body.commands)
            if servers is None:
                servers = tools.mcp
            tools = tools.tools
        self._tools = {tool.name: tool for tool in tools}
        self._default_timeout: float | None = None
        if default_timeout is not None:
            self._default_timeout = to_seconds(default_timeout)
        self._output_limit = output_limit
        self._cwd = Path(cwd or "")
        self._environ = os.environ if environ is None else environ
        self._grace = to_seconds(grace)
        self._running: dict[str, anyio.Event] = {}
        self._http_runner = HttpToolRunner()
        self._mcp_runner = McpToolRunner(
            servers or {}, self._environ, self._cwd, clock or SystemClock()
        )
        self._runners: dict[str, ToolRunner] = {
            "shell": run_shell,
            "http": self._http_runner,
            "python": PythonToolRunner(),
            "mcp": self._mcp_runner,
        }
        if kinds is not None:
            self._runners |= kinds

    def __repr__(self) -> str:
        return f"<ToolExecutor {len(self._tools)} tools, kinds {', '.join(sorted(self._runners))}>"

    async def __aenter__(self) -> Self:
        if self._mcp_runner.servers:
            await self._mcp_runner.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections of HTTP tools and end the MCP servers.

        Connections are opened again when an HTTP tool is called afterwards.
        """
        try:
            await self._http_runner.aclose()
        finally:
            await self._mcp_runner.aclose()

    async def discover(self, plan: Plan) -> Plan:
        """Start the MCP servers of a plan and return the plan with their tools, as `SERVER.TOOL`.

        Descriptions in the plan take precedence over those of the servers. If the server of a tool
        that a task names does not answer, the tool is described as unavailable.

        Raises:
            PlanError: the tasks do not fit the tools.
            McpNotInstalled: the extra `mcp` is not installed.
        """
        if not plan.mcp:
            return plan
        found = await self._mcp_runner.discover(plan)
        for tool in found.tools:
            self._tools[tool.name] = tool
        return found

    def watch(self, report: AvailabilityListener | None) -> None:
        """Report which tools of MCP servers are available, now and whenever that changes.

        Args:
            report: `run.change_resource` or a function with its parameters; None stops the reports.
                Without this call, reports begin with the first task that uses such a tool.
        """
        if self._mcp_runner.servers:
            self._mcp_runner.watch(report)

    @property
    def unavailable_servers(self) -> Mapping[str, str]:
        """MCP servers that were started and are unavailable, with the reasons."""
        return self._mcp_runner.unavailable

    async def return_types(self, tools: Iterable[ToolSpec]) -> Mapping[str, TypeAdapter[Any]]:
        """Return the return annotations of the functions of tools, by the names of the tools.

        A function that cannot be imported is left out: calling it raises the reason.
        """
        found: dict[str, TypeAdapter[Any]] = {}
        for tool in tools:
            if tool.kind != "python" or callable_problems(tool.callable):
                continue
            load = partial(load_callable, tool.name, tool.callable or "")
            with suppress(ToolUnavailable):
                function = await anyio.to_thread.run_sync(load, abandon_on_cancel=True)
                return_type = return_type_of(function)
                if return_type is not None:
                    found[tool.name] = return_type
        return found

    async def __call__(self, task: Task, context: WorkContext) -> JsonValue:
        """Execute one task.

        Args:
            task: the task, with resolved references.
            context: the attempt that the task is executed for.

        Returns:
            The output, as the kind of the tool defines it.

        Raises:
            ToolError: the tool cannot be run, or failed; errors that may pass are `TransientError`s
                too.
            UnexpectedOutput: a command under `expect` has failed.
            NotAccepted: a command under `expect` of the task is not in the plan.
            Exception: whatever a function of kind `python` raises.
        """
        tool = context.tool
        if tool is None:
            tool = self._tools.get(task.tool or "")
        if tool is None:
            raise UnknownTool(task.id, task.tool, self._tools)
        runner = self._runners.get(tool.kind or "")
        if runner is None:
            problem = "it states no `kind`"
            if tool.kind is not None:
                problem = f"its kind {tool.kind!r} is unknown"
            raise InvalidTool(tool.name, [f"{problem}; known kinds are {sorted(self._runners)}"])
        # A model may have written the task, and must not have its commands run.
        for command in task.commands:
            if command not in self._commands:
                why = "is not in the plan that this executor was made with; it is not run"
                raise NotAccepted(f"the command {command!r} {why}", "blocked")
        limit = None
        if task.timeout is None and tool.timeout is None:
            limit = self._default_timeout
        output = await self._run(runner, tool, task, context, limit)
        commands = [*task.commands]
        if tool.expect is not None:
            commands = [*tool.expect.commands, *commands]
        if commands:
            await self._check(commands, tool, task, context, output)
        return output

    async def _check(
        self,
        commands: Iterable[str],
        own: ToolSpec,
        task: Task,
        context: WorkContext,
        output: JsonValue,
    ) -> None:
        """Run the commands under `expect` in the directory and with the arguments of the tool.

        Raises:
            UnexpectedOutput: a command failed, so the task is not done.
            UnverifiedOutput: a command cannot be started, or does not finish.
        """
        fields: dict[str, object] = {"name": "expect", "kind": "shell"}
        fields |= {"cwd": own.cwd, "workspace": own.workspace, "env": own.env}
        for command in commands:
            tool = ToolSpec.model_validate({**fields, "command": command})
            try:
                await self._run(run_shell, tool, task, context, self._default_timeout)
            except ToolError as error:
                expected = f"expected {command!r} to succeed"
                if isinstance(error, CommandFailed) and not error.in_doubt:
                    raise UnexpectedOutput(f"{expected}: {error}", output, missed=True) from None
                unknown = f"{expected}, but it gave no verdict: {error}"
                raise UnverifiedOutput(unknown, output) from None
        context.record_checked()

    async def _run(
        self,
        runner: ToolRunner,
        tool: ToolSpec,
        task: Task,
        context: WorkContext,
        limit: float | None,
    ) -> JsonValue:
        """Run a tool for at most `limit` seconds, after a check of its arguments and variables."""
        arguments = task.arguments
        missing = missing_arguments(tool.filled_texts, arguments)
        if IDEMPOTENCY_KEY in missing:
            arguments = {**arguments, IDEMPOTENCY_KEY: context.idempotency_key}
            missing.remove(IDEMPOTENCY_KEY)
        problems: list[str] = []
        if missing:
            given = list(task.arguments)
            problems.append(f"it needs the arguments {missing}, the task gives {given}")
        problems += _type_problems(tool, task)
        # Only contexts of a run are certain to have a directory.
        directory = Path(getattr(context, "directory", ""), self._cwd)
        cwd = directory
        workspace = None
        if tool.workspace is not None:
            workspace = (directory / tool.workspace).resolve()
            cwd = workspace
        if tool.cwd is not None:
            cwd = directory / tool.cwd
        if workspace is not None:
            problems += workspace_problems(tool, task.arguments, cwd, workspace)
        if problems:
            raise InvalidArguments(tool.name, problems)
        unset = unset_variables(tool, self._environ)
        if unset:
            needed = f"the environment variables {', '.join(unset)}"
            raise ToolUnavailable(tool.name, needed, "which are not set")
        call = ToolCall(
            tool=tool,
            task=task,
            arguments=arguments,
            context=context,
            secrets=Secrets(self._environ, getattr(context, "add_secret", None)),
            environ=inherited_variables(self._environ),
            cwd=cwd,
            output_limit=self._output_limit,
            grace=self._grace,
            workspace=workspace,
        )
        key = context.idempotency_key
        # The process of an earlier attempt may take a while to end.
        while key in self._running:
            await self._running[key].wait()
        over = anyio.Event()
        self._running[key] = over
        try:
            with anyio.move_on_after(limit):
                return await runner(call)
        finally:
            del self._running[key]
            over.set()
        assert limit is not None
        raise ToolTimedOut(tool.name, limit)


def _type_problems(tool: ToolSpec, task: Task) -> list[str]:
    """Return the arguments of a task whose types differ from those that its tool states."""
    problems: list[str] = []
    for name, expected in tool.parameters.items():
        if name not in task.arguments or expected not in _JSON_TYPE_NAMES.values():
            continue
        actual = _JSON_TYPE_NAMES[type(task.arguments[name])]
        # An integer is a number as well.
        if actual != expected and (expected, actual) != ("number", "integer"):
            problems.append(f"{name!r} must be of type {expected}, not {actual}")
    return problems
