"""Do the arguments of a task fit its tool?"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import anyio
from pydantic import JsonValue

from replanning.environment import Clock, SystemClock
from replanning.plan.document import Plan
from replanning.plan.tasks import McpServer, Task, ToolSpec
from replanning.tools.call import (
    Secrets,
    ToolCall,
    ToolRunner,
    WorkContext,
    missing_arguments,
    tool_templates,
    unset_variables,
)
from replanning.tools.errors import (
    CommandFailed,
    InvalidArguments,
    InvalidTool,
    ToolTimedOut,
    ToolUnavailable,
    UnknownTool,
)
from replanning.tools.mcp import AvailabilityListener, McpToolRunner
from replanning.tools.python import PythonToolRunner
from replanning.tools.shell import run_shell

if TYPE_CHECKING:
    from replanning.tools.http import HttpToolRunner


_JSON_TYPE_NAMES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}

_CHECKED_TYPES = frozenset({"string", "integer", "number", "boolean", "array", "object"})


def argument_problems(tool: ToolSpec, arguments: Mapping[str, JsonValue]) -> list[str]:
    """Everything that is wrong with the arguments for a tool."""
    return [*_missing_problems(tool, arguments), *_type_problems(tool, arguments)]


def _missing_problems(tool: ToolSpec, arguments: Mapping[str, JsonValue]) -> Iterator[str]:
    if missing := missing_arguments(tool_templates(tool), arguments):
        yield f"it needs the arguments {missing}, given are {list(arguments)}"


def _type_problems(tool: ToolSpec, arguments: Mapping[str, JsonValue]) -> Iterator[str]:
    for name, wanted in tool.parameters.items():
        if name not in arguments or wanted not in _CHECKED_TYPES:
            continue
        given = _type_name(arguments[name])
        if given != wanted and not (wanted == "number" and given == "integer"):
            yield f"{name!r} must be of type {wanted}, it is {given}"


def _type_name(value: JsonValue) -> str:
    return _JSON_TYPE_NAMES[type(value)]


DEFAULT_OUTPUT_LIMIT: Final = 1024 * 1024


class ToolExecutor:
    """Executes tasks by the tools that their plan describes; give it to an orchestrator as its work.

    ```python
    async with ToolExecutor(plan) as work:
        result = await engine.attach(SwarmOrchestrator(work)).run(plan)
    ```

    It knows the kinds `shell`, `http`, `python` and `mcp`. Variables `{env:NAME}` in the description of a tool are
    looked up when it is run, and their values are hidden in what comes back.

    Args:
        tools: the plan, or the tools themselves. A tool of the live plan goes before one of the same name.
        default_timeout: seconds for a task where neither it nor its tool states a timeout; None for no limit.
        output_limit: bytes that one task may print or receive; more is an error, nothing is ever cut.
        cwd: where commands run and what `cwd` of a tool is relative to; by default where the program runs.
        environ: the environment of commands and of `{env:NAME}`; by default that of the program.
        grace: seconds that a process has to end by itself when it is stopped, before it is killed.
        kinds: further kinds by name, or others in the place of ours.
        servers: the MCP servers; by default those of the plan.
        clock: time between one start of an MCP server and the next; by default that of this machine.
    """

    def __init__(
        self,
        tools: Plan | Iterable[ToolSpec],
        *,
        default_timeout: float | None = 60.0,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
        cwd: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
        grace: float = 2.0,
        kinds: Mapping[str, ToolRunner] | None = None,
        servers: Mapping[str, McpServer] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._tools = {tool.name: tool for tool in (tools.tools if isinstance(tools, Plan) else tools)}
        self._default_timeout = default_timeout
        self._output_limit = output_limit
        self._cwd = Path(cwd) if cwd is not None else Path()
        self._environ = os.environ if environ is None else environ
        self._grace = grace
        self._running: dict[str, anyio.Event] = {}
        self._http_runner: HttpToolRunner | None = None
        found = tools.mcp if isinstance(tools, Plan) and servers is None else servers or {}
        self._mcp_runner = McpToolRunner(found, environ=self._environ, cwd=self._cwd, clock=clock or SystemClock())
        self._runners: dict[str, ToolRunner] = {
            "shell": run_shell,
            "http": self._run_http,
            "python": PythonToolRunner(),
            "mcp": self._run_mcp,
            **(kinds or {}),
        }

    def __repr__(self) -> str:
        return f"<ToolExecutor {len(self._tools)} tools, kinds {', '.join(sorted(self._runners))}>"

    async def __aenter__(self) -> Self:
        await self._mcp_runner.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections of HTTP tools; using one afterwards opens them again. End the MCP servers."""
        try:
            if self._http_runner is not None:
                await self._http_runner.aclose()
        finally:
            await self._mcp_runner.aclose()

    async def discover(self, plan: Plan) -> Plan:
        """The plan with the tools that its MCP servers have, as `SERVER.TOOL`; the servers are started to ask them.

        Where the plan describes a tool, what it says counts, and what it leaves out is asked of the server. A tool that
        a task names and whose server is not there is described as unavailable.

        Raises:
            PlanError: the tasks do not fit the tools.
            McpNotInstalled: the package that speaks with servers is not there.
        """
        if not plan.mcp:
            return plan
        found = await self._mcp_runner.discover(plan)
        self._tools.update((tool.name, tool) for tool in found.tools)
        return found

    def watch(self, report: AvailabilityListener | None) -> None:
        """Tell a run which tools of MCP servers are available, now and whenever that changes.

        Args:
            report: `run.change_resource`, or what takes the same; None for nobody any more. Where it is not said, the
                run learns it from the first task that uses such a tool.
        """
        self._mcp_runner.watch(report)

    @property
    def unavailable_servers(self) -> Mapping[str, str]:
        """The MCP servers that were asked and are not there, and why."""
        return self._mcp_runner.unavailable

    async def __call__(self, task: Task, context: WorkContext) -> JsonValue:
        """Execute one task.

        Args:
            task: its references must be resolved.
            context: the attempt that it is executed for.

        Returns:
            The output, as its kind defines it.

        Raises:
            ToolError: the tool cannot be run, or failed; those that may pass are `TransientError`s too.
            Exception: whatever a function of kind `python` raises.
        """
        tool = self._resolve_tool(task, context)
        kind = self._runner_for(tool)
        if problems := argument_problems(tool, task.arguments):
            raise InvalidArguments(tool.name, problems)
        if unset := unset_variables(tool, self._environ):
            raise ToolUnavailable(tool.name, f"the environment variables {', '.join(unset)}", "which are not set")
        call = self._tool_call(tool, task, context)
        limit = self._default_timeout if task.timeout is None and tool.timeout is None else None
        async with self._exclusive(context.idempotency_key):
            with anyio.move_on_after(limit):
                return call.secrets.redact_json(await kind(call))
        assert limit is not None
        raise ToolTimedOut(tool.name, limit)

    async def check(self, command: str, task: Task, context: WorkContext) -> str:
        """Run a command that checks whether a task was done well, where its tool works and with the same arguments.

        Args:
            command: as the command of a tool; `{name}` is an argument of the task.
            task: its references must be resolved.
            context: the attempt that is checked.

        Returns:
            Nothing if the command ends with 0, else what it says.

        Raises:
            ToolError: the command cannot be run, or not to its end.
        """
        own = context.tool or self._tools.get(task.tool or "") or ToolSpec(name="acceptance")
        tool = ToolSpec(name="acceptance", kind="shell", command=command, cwd=own.cwd, env=own.env)
        if unset := unset_variables(tool, self._environ):
            raise ToolUnavailable(tool.name, f"the environment variables {', '.join(unset)}", "which are not set")
        if missing := missing_arguments([command], task.arguments):
            raise InvalidArguments(tool.name, [f"{name!r} is missing" for name in missing])
        call = self._tool_call(tool, task, context)
        with anyio.move_on_after(self._default_timeout):
            try:
                await run_shell(call)
            except CommandFailed as error:
                return str(error)
            return ""
        raise ToolTimedOut(tool.name, self._default_timeout or 0.0)

    @asynccontextmanager
    async def _exclusive(self, key: str) -> AsyncIterator[None]:
        """Wait until what was begun before under a key is over: a process that is stopped takes its time."""
        while (before := self._running.get(key)) is not None:
            await before.wait()
        self._running[key] = over = anyio.Event()
        try:
            yield
        finally:
            del self._running[key]
            over.set()

    def _resolve_tool(self, task: Task, context: WorkContext) -> ToolSpec:
        tool = context.tool
        if tool is None and task.tool is not None:
            tool = self._tools.get(task.tool)
        if tool is None:
            raise UnknownTool(task.id, task.tool, self._tools)
        return tool

    def _runner_for(self, tool: ToolSpec) -> ToolRunner:
        known = sorted(self._runners)
        if tool.kind is None:
            raise InvalidTool(tool.name, [f"it states no `kind`; known are {known}"])
        if tool.kind not in self._runners:
            raise InvalidTool(tool.name, [f"nothing executes its kind {tool.kind!r}; known are {known}"])
        return self._runners[tool.kind]

    def _tool_call(self, tool: ToolSpec, task: Task, context: WorkContext) -> ToolCall:
        return ToolCall(
            tool=tool,
            task=task,
            context=context,
            secrets=Secrets(self._environ),
            environ=self._environ,
            cwd=self._cwd / tool.cwd if tool.cwd is not None else self._cwd,
            output_limit=self._output_limit,
            grace=self._grace,
        )

    async def _run_mcp(self, call: ToolCall) -> JsonValue:
        report: AvailabilityListener | None = getattr(
            call.context, "change_resource", None
        )  # others' contexts need have none
        if report is not None and not self._mcp_runner.has_listener:
            self._mcp_runner.watch(report)
        return await self._mcp_runner(call)

    async def _run_http(self, call: ToolCall) -> JsonValue:
        if self._http_runner is None:
            from replanning.tools.http import HttpToolRunner  # httpx takes its time, and many plans need none

            self._http_runner = HttpToolRunner()
        return await self._http_runner(call)
