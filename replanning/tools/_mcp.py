"""The kind `mcp`: tools of servers of the Model Context Protocol, found by asking the servers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import anyio
from anyio.abc import TaskGroup
from pydantic import JsonValue

from replanning._errors import PlanError, Problem
from replanning._interfaces import Clock
from replanning._plan import Plan, ToolSpec
from replanning._servers import McpServer
from replanning._wording import NameSuggester, format_path
from replanning.tools._call import ToolCall
from replanning.tools._errors import (
    InvalidArguments,
    McpNotInstalled,
    McpServerLost,
    McpToolFailed,
    ToolUnavailable,
    TransientMcpServerLost,
)
from replanning.tools._mcp_tools import mcp_output, mcp_tool_spec, schema_problems

if TYPE_CHECKING:
    from replanning.tools._mcp_session import McpSession

_CLOSE_TIMEOUT: Final = 10.0
"""Seconds that servers have to end in order; then they are killed."""


class AvailabilityListener(Protocol):
    """Is told that a tool is available or not, such as `run.change_resource`."""

    def __call__(self, name: str, /, *, available: bool, reason: str) -> object: ...


class McpToolRunner:
    """Executes the tools of the servers of a plan, and keeps the servers.

    Args:
        servers: as the plan describes them.
        environ: where `{env:NAME}` is looked up.
        cwd: what `cwd` of a server is relative to.
        clock: time between one start of a server and the next.
    """

    def __init__(
        self, servers: Mapping[str, McpServer], *, environ: Mapping[str, str], cwd: Path, clock: Clock
    ) -> None:
        self._servers, self._environ, self._cwd, self._clock = servers, environ, cwd, clock
        self._sessions: dict[str, McpSession] = {}
        self._tools: dict[str, ToolSpec] = {}
        self._group: TaskGroup | None = None
        self._listener: AvailabilityListener | None = None
        self._reported: dict[str, bool] = {}

    def __repr__(self) -> str:
        return f"<McpKind {len(self._servers)} servers, {len(self._sessions)} in use>"

    @property
    def has_listener(self) -> bool:
        """Whether somebody is told when tools become available or cease to be."""
        return self._listener is not None

    @property
    def unavailable(self) -> Mapping[str, str]:
        """The servers that were asked and are not there, and why."""
        return {
            name: session.unavailable_reason for name, session in self._sessions.items() if session.unavailable_reason
        }

    async def open(self) -> None:
        """Begin; `aclose` must be called by the same task."""
        if self._servers:
            self._group = anyio.create_task_group()
            await self._group.__aenter__()

    async def aclose(self) -> None:
        """End the servers that were started."""
        group, self._group, self._listener = self._group, None, None
        if group is None:
            return
        for session in self._sessions.values():
            session.close()
        self._sessions = {}
        group.cancel_scope.deadline = anyio.current_time() + _CLOSE_TIMEOUT
        await group.__aexit__(None, None, None)

    def watch(self, report: AvailabilityListener | None) -> None:
        """Tell somebody which tools are available, now and whenever that changes; None for nobody any more."""
        self._listener, self._reported = report, {}
        for session in self._sessions.values():
            self._report_availability(session)

    async def discover(self, plan: Plan) -> Plan:
        """The plan with the tools that its servers have; starts them.

        What the plan states of a tool counts; what it leaves out is asked of the server. A tool that a task names and
        whose server is not there is described as unavailable.

        Raises:
            PlanError: the tasks do not fit the tools.
            McpNotInstalled: the SDK is not there.
        """
        sessions = {name: self._get_session(name) for name in plan.mcp}
        async with anyio.create_task_group() as group:
            for session in sessions.values():
                group.start_soon(session.start)
        tools = [self._merged_spec(tool, sessions) for tool in plan.tools]
        known = {(tool.server, tool.tool or tool.name) for tool in tools if tool.kind == "mcp"}
        for name, session in sessions.items():
            for tool in session.tools.values():
                allowed = session.server.tools is None or tool.name in session.server.tools
                if allowed and (name, tool.name) not in known:
                    found = mcp_tool_spec(name, session.server, tool, None, session.secrets.redact)
                    tools += [found] if found is not None else []
        tools += _unavailable_tools(plan, tools, sessions)
        self._tools |= {tool.name: tool for tool in tools if tool.kind == "mcp"}
        return _with_tools(plan, tools)

    async def __call__(self, call: ToolCall) -> JsonValue:
        """Have a server use one of its tools.

        Raises:
            InvalidArguments: they do not fit the schema of the tool.
            ToolUnavailable: the server is not there.
            McpServerLost: it went away while it was at work.
            McpToolFailed: the tool, or the server, reports an error.
            ToolOutputTooLarge: it answers more than may be kept.
            McpNotInstalled: the SDK is not there.
        """
        tool, name = call.tool, call.tool.server or ""
        session = self._get_session(name, tool.name)
        self._tools.setdefault(tool.name, tool)
        if problems := schema_problems(tool.input_schema, call.arguments):
            raise InvalidArguments(tool.name, [call.secrets.redact(problem) for problem in problems])
        from replanning.tools._mcp_session import ServerGone

        try:
            result = await session.call(tool.tool or tool.name, call.arguments)
        except ServerGone as error:
            if not error.request_sent:
                raise ToolUnavailable(tool.name, f"the MCP server {name!r}", f"which is not there: {error}") from None
            lost = TransientMcpServerLost if call.task.idempotent else McpServerLost
            raise lost(tool.name, name, str(error)) from None
        except Exception as error:  # whatever a server makes the SDK raise is a failure of this task alone
            said = session.secrets.redact(str(error)) or type(error).__name__
            raise McpToolFailed(tool.name, name, said) from error
        return session.secrets.redact_json(mcp_output(call, result, session.secrets.redact))

    def _get_session(self, name: str, tool: str = "") -> McpSession:
        if name not in self._sessions:
            if name not in self._servers:
                raise ToolUnavailable(tool, f"the MCP server {name!r}", "which the plan does not describe under `mcp`")
            if self._group is None:
                raise ToolUnavailable(
                    tool, f"the MCP server {name!r}", "which is only there within `async with ToolExecutor(…)`"
                )
            self._sessions[name] = self._start_session(name, self._group)
        return self._sessions[name]

    def _start_session(self, name: str, group: TaskGroup) -> McpSession:
        if find_spec("mcp") is None:
            raise McpNotInstalled(self._servers)
        from replanning.tools._mcp_session import McpSession  # the SDK takes its time, and most plans need none

        session = McpSession(
            name,
            self._servers[name],
            environ=self._environ,
            cwd=self._cwd,
            clock=self._clock,
            on_change=self._report_availability,
        )
        group.start_soon(session.run)
        return session

    def _report_availability(self, session: McpSession) -> None:
        """Say of the tools of a server whether they can be used, where that is new."""
        if self._listener is None:
            return
        for tool in [tool for tool in self._tools.values() if tool.server == session.name]:
            lacking = (tool.tool or tool.name) not in session.tools
            reason = session.unavailable_reason or ("the server does not have it any more" if lacking else "")
            if self._reported.get(tool.name) is not (available := not reason):
                self._reported[tool.name] = available
                why = f"MCP server {session.name!r}: {reason}" if reason else ""
                self._listener(tool.name, available=available, reason=why)

    @staticmethod
    def _merged_spec(tool: ToolSpec, sessions: Mapping[str, McpSession]) -> ToolSpec:
        """What a plan says of a tool, with what it leaves out as its server states it."""
        session = sessions.get(tool.server or "") if tool.kind == "mcp" else None
        if session is None:
            return tool
        found = session.tools.get(tool.tool or tool.name)
        if found is None:  # of what nobody has said anything, the worst is assumed
            safe = "dangerous" in tool.model_fields_set or (tool.tool or tool.name) in session.server.safe
            return tool.model_copy(update={"available": False, "dangerous": tool.dangerous or not safe})
        return mcp_tool_spec(session.name, session.server, found, tool, session.secrets.redact) or tool


def _with_tools(plan: Plan, tools: list[ToolSpec]) -> Plan:
    """The plan with these tools.

    Raises:
        PlanError: its tasks do not fit them.
    """
    known, hints = {tool.name: tool for tool in tools}, NameSuggester()
    problems = [
        Problem(
            format_path(("tasks", *path, "tool")), f"task {plan.tasks[path[0]].id!r}: there is no tool {name!r}{hint}"
        )
        for path, name in _referenced_tools(plan)
        if known and name not in known and (hint := hints(name, known) or "; its server does not have it")
    ]
    try:
        fields = {name: getattr(plan, name) for name in plan.model_fields_set}
        found = Plan.model_validate({**fields, "tools": tuple(tools)})
    except PlanError as error:
        raise PlanError([*problems, *error.problems]) from None
    if problems:
        raise PlanError(problems)
    return found


def _referenced_tools(plan: Plan) -> Iterator[tuple[tuple[int, *tuple[str | int, ...]], str]]:
    """The tools that tasks and their fallbacks name, each with its place."""
    for index, task in enumerate(plan.tasks):
        if task.tool is not None:
            yield (index,), task.tool
        for number, fallback in enumerate(task.fallbacks):
            if fallback.tool is not None:
                yield (index, "fallbacks", number), fallback.tool


def _unavailable_tools(plan: Plan, tools: Iterable[ToolSpec], sessions: Mapping[str, McpSession]) -> list[ToolSpec]:
    """The tools that tasks name of servers that are not there."""
    known, found = {tool.name for tool in tools}, dict[str, ToolSpec]()
    for name in dict.fromkeys(name for _, name in _referenced_tools(plan) if name not in known):
        for server, session in sessions.items():
            if name.startswith(f"{server}.") and not session.available:
                fields = {"name": name, "kind": "mcp", "server": server, "tool": name[len(server) + 1 :]}
                found[name] = ToolSpec.model_validate({**fields, "available": False, "dangerous": True})
    return list(found.values())
