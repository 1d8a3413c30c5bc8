"""Tools of MCP servers: specs, discovery, calls and outputs, checked and bounded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import anyio
from anyio.abc import TaskGroup
from pydantic import JsonValue

from replanning.environment import Clock
from replanning.errors import PlanError, Problem, ToolError
from replanning.plan.document import Plan
from replanning.plan.messages import NameSuggester, format_path
from replanning.plan.schemas import schema_problems
from replanning.plan.tasks import McpServer, ToolSpec
from replanning.plan.types import JSON_TYPES
from replanning.tools.call import ToolCall, find_artifacts, parse_json
from replanning.tools.errors import (
    InvalidArguments,
    McpNotInstalled,
    McpToolFailed,
    ToolOutputTooLarge,
    ToolUnavailable,
    head,
)

if TYPE_CHECKING:
    from mcp.types import Tool

    from replanning.tools.mcp_session import McpSession


MAX_SCHEMA_CHARS: Final = 16_000
"""Maximum number of characters of a schema; of a larger one, only the parameter types are kept."""

_MAX_PARAMETERS: Final = 200
_CONTROL_CHARS: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
Redact = Callable[[str], str]


def mcp_tool_spec(
    name: str, server: McpServer, tool: Tool, stated: ToolSpec | None, hide: Redact
) -> ToolSpec | None:
    """Return the spec of a tool of a server; None if its name is not valid in plans.

    Args:
        name: the name of the server in the plan.
        server: the server.
        tool: the tool as the server describes it.
        stated: the tool as the plan describes it, which takes precedence.
        hide: redacts secrets in a text.
    """
    parameters = _parameter_types(tool)
    required = tool.input_schema.get("required")
    needed = required if isinstance(required, list) else []
    fields: dict[str, object] = {
        "name": f"{name}.{tool.name}",
        "kind": "mcp",
        "server": name,
        "tool": tool.name,
        "description": head(_CONTROL_CHARS.sub(" ", hide(tool.description or tool.title or ""))),
        "parameters": parameters,
        "input_schema": None,
        "dangerous": tool.name not in server.safe,
    }
    text = hide(json.dumps(tool.input_schema))
    if len(text) <= MAX_SCHEMA_CHARS:
        schema = parse_json(text)
        if isinstance(schema, dict):
            fields["input_schema"] = schema
    hints = tool.annotations
    if hints is not None:
        if hints.read_only_hint or hints.destructive_hint is False:
            fields["dangerous"] = False
        if hints.read_only_hint:
            fields["effect"] = "none"
        if hints.idempotent_hint:
            fields["idempotent"] = True
    optional = [each for each in parameters if each not in needed]
    if stated is not None:
        for key in stated.model_fields_set:
            fields[key] = getattr(stated, key)
        # Only a parameter that the plan keeps can be optional.
        if "parameters" in stated.model_fields_set:
            optional = [each for each in optional if each in stated.parameters]
    fields.setdefault("optional", optional)
    try:
        return ToolSpec.model_validate(fields)
    except PlanError:
        return None


def _parameter_types(tool: Tool) -> dict[str, str]:
    """Return the types of the first parameters of a tool, as a plan states them."""
    parameters: dict[str, str] = {}
    properties = tool.input_schema.get("properties")
    if not isinstance(properties, dict):
        return parameters
    for name, described in islice(properties.items(), _MAX_PARAMETERS):
        kind = described.get("type") if isinstance(described, dict) else None
        if not isinstance(kind, str) or kind not in JSON_TYPES:
            kind = "any"
        parameters[str(name)] = kind
    return parameters


CLOSE_TIMEOUT: Final = 10.0
"""Seconds that servers have to end by themselves; then they are killed."""


class AvailabilityListener(Protocol):
    """Receiver of changes in the availability of tools, such as `run.change_resource`."""

    def __call__(self, name: str, /, *, available: bool, reason: str) -> object:
        """Receive the new availability of the tool `name`, with the reason."""
        ...


@dataclass(eq=False, repr=False)
class McpToolRunner:
    """Runner of the tools of MCP servers, which it starts and keeps running.

    Attributes:
        servers: the servers, as the plan describes them.
        environ: the variables for `{env:NAME}`.
        cwd: the folder that `cwd` of a server is relative to.
        clock: the clock for delays between restarts.
    """

    servers: Mapping[str, McpServer]
    environ: Mapping[str, str]
    cwd: Path
    clock: Clock
    _sessions: dict[str, McpSession] = field(default_factory=dict, init=False)
    _tools: dict[str, ToolSpec] = field(default_factory=dict, init=False)
    _group: TaskGroup | None = field(default=None, init=False)
    _listener: AvailabilityListener | None = field(default=None, init=False)
    _reported: dict[str, bool] = field(default_factory=dict, init=False)

    def __repr__(self) -> str:
        return f"<McpToolRunner {len(self.servers)} servers, {len(self._sessions)} in use>"

    @property
    def unavailable(self) -> Mapping[str, str]:
        """Servers that were started and are unavailable, with the reasons."""
        reasons: dict[str, str] = {}
        for name, session in self._sessions.items():
            if not session.available:
                reasons[name] = session.unavailable_reason
        return reasons

    async def open(self) -> None:
        """Allow servers to start; the same task must call `aclose`."""
        self._group = anyio.create_task_group()
        await self._group.__aenter__()

    async def aclose(self) -> None:
        """End all servers."""
        group = self._group
        self._group = None
        self._listener = None
        if group is None:
            return
        for session in self._sessions.values():
            session.close()
        self._sessions = {}
        group.cancel_scope.deadline = anyio.current_time() + CLOSE_TIMEOUT
        await group.__aexit__(None, None, None)

    def watch(self, report: AvailabilityListener | None) -> None:
        """Report which tools are available, now and at each change; None stops the reports."""
        self._listener = report
        self._reported = {}
        for session in self._sessions.values():
            self._report_availability(session)

    async def discover(self, plan: Plan) -> Plan:
        """Start the servers of a plan and return the plan with their tools.

        Descriptions in the plan take precedence over those of the servers. If the server of a tool
        that a task names does not answer, the tool is described as unavailable.

        Raises:
            PlanError: the tasks do not fit the tools.
            McpNotInstalled: the SDK is not installed.
        """
        sessions = {name: self._get_session(name) for name in plan.mcp}
        async with anyio.create_task_group() as group:
            for session in sessions.values():
                group.start_soon(session.start)
        tools = _tools_with_found(plan, sessions)
        specs = {tool.name: tool for tool in tools}
        for _, name in _referenced_tools(plan):
            if name not in specs:
                absent = _unavailable_spec(name, sessions)
                if absent is not None:
                    specs[name] = absent
                    tools.append(absent)
        for tool in tools:
            if tool.kind == "mcp":
                self._tools[tool.name] = tool

        problems: list[Problem] = []
        hints = NameSuggester()
        if specs:
            for path, name in _referenced_tools(plan):
                if name not in specs:
                    hint = hints(name, specs) or "; its server does not have it"
                    place = format_path(("tasks", *path, "tool"))
                    text = f"task {plan.tasks[path[0]].id!r}: there is no tool {name!r}{hint}"
                    problems.append(Problem(place, text))
        try:
            fields = {name: getattr(plan, name) for name in plan.model_fields_set}
            found_plan = Plan.model_validate({**fields, "tools": tuple(tools)})
        except PlanError as error:
            raise PlanError([*problems, *error.problems]) from None
        if problems:
            raise PlanError(problems)
        return found_plan

    async def __call__(self, call: ToolCall) -> JsonValue:
        """Call a tool of a server.

        Returns:
            Its `text`; `json`, its structured content or the text parsed as JSON; the artifacts, by
            name; `content`, the blocks other than text.

        Raises:
            InvalidArguments: they do not fit the schema of the tool.
            ToolUnavailable: the server is unavailable.
            McpServerLost: the server was lost during the call.
            McpToolFailed: the tool, or the server, reports an error.
            ToolOutputTooLarge: its answer exceeds the limit.
            McpNotInstalled: the SDK is not installed.
        """
        tool = call.tool
        name = tool.server or ""
        # Only contexts of a run are certain to receive reports.
        report: AvailabilityListener | None = getattr(call.context, "change_resource", None)
        if report is not None and self._listener is None:
            self.watch(report)
        session = self._get_session(name, tool.name)
        self._tools.setdefault(tool.name, tool)
        problems = schema_problems(tool.input_schema, call.arguments)
        if problems:
            redacted = [call.secrets.redact(problem) for problem in problems]
            raise InvalidArguments(tool.name, redacted)
        try:
            result = await session.call(_name_on_server(tool), call.arguments, named=tool.name)
        except ToolError:
            raise
        except Exception as error:  # noqa: BLE001 - raised as an error of the tool
            # Whatever a server makes the SDK raise is a failure of this task alone.
            reason = session.secrets.redact(str(error)) or type(error).__name__
            raise McpToolFailed(tool.name, name, reason) from None

        texts: list[str] = []
        others: list[JsonValue] = []
        for block in result.content:
            if block.type == "text":
                texts.append(block.text)
            else:
                others.append(block.model_dump(mode="json", by_alias=True, exclude_none=True))
        text = "\n".join(texts)
        if result.is_error:
            reason = session.secrets.redact(text) or "no reason given"
            raise McpToolFailed(tool.name, name, reason)
        whole = json.dumps([text, result.structured_content, others], ensure_ascii=False)
        if len(whole.encode(errors="replace")) > call.output_limit:
            raise ToolOutputTooLarge(tool.name, call.output_limit, "the server's answer")
        value: JsonValue = None
        if result.structured_content is not None:
            value = parse_json(json.dumps(result.structured_content))
        elif text.lstrip().startswith(("{", "[")):
            value = parse_json(text)
        output = {**find_artifacts(tool, call.arguments, value), "text": text}
        if value is not None:
            output["json"] = value
        if others:
            output["content"] = others
        session.secrets.report_to(getattr(call.context, "add_secret", None))
        return output

    def _get_session(self, name: str, tool: str = "") -> McpSession:
        if name in self._sessions:
            return self._sessions[name]
        needed = f"the MCP server {name!r}"
        if name not in self.servers:
            raise ToolUnavailable(tool, needed, "which the plan does not describe under `mcp`")
        if self._group is None:
            where = "which runs only within `async with ToolExecutor(…)`"
            raise ToolUnavailable(tool, needed, where)
        if find_spec("mcp") is None:
            raise McpNotInstalled(self.servers)
        # Most plans do not need the SDK, and importing it takes long.
        from replanning.tools.mcp_session import McpSession

        session = McpSession(
            name,
            self.servers[name],
            environ=self.environ,
            cwd=self.cwd,
            clock=self.clock,
            on_change=self._report_availability,
        )
        self._sessions[name] = session
        self._group.start_soon(session.run)
        return session

    def _report_availability(self, session: McpSession) -> None:
        if self._listener is None:
            return
        for tool in list(self._tools.values()):
            if tool.server != session.name:
                continue
            reason = session.unavailable_reason
            if not reason and _name_on_server(tool) not in session.tools:
                reason = "the server no longer has it"
            available = not reason
            if self._reported.get(tool.name) is available:
                continue
            self._reported[tool.name] = available
            why = ""
            if reason:
                why = f"MCP server {session.name!r}: {reason}"
            # The plan of this run may not have the tool.
            with suppress(ValueError):
                self._listener(tool.name, available=available, reason=why)


def _name_on_server(tool: ToolSpec) -> str:
    return tool.tool or tool.name


def _tools_with_found(plan: Plan, sessions: Mapping[str, McpSession]) -> list[ToolSpec]:
    """Return the tools of a plan, completed by their servers, and the other tools of the servers."""
    tools: list[ToolSpec] = []
    known: set[tuple[str, str]] = set()
    for tool in plan.tools:
        spec = tool
        if tool.kind == "mcp":
            server = tool.server or ""
            known.add((server, _name_on_server(tool)))
            if server in sessions:
                spec = _merged_spec(tool, sessions[server])
        tools.append(spec)
    for name, session in sessions.items():
        allowed = session.server.tools
        for found in session.tools.values():
            if allowed is not None and found.name not in allowed:
                continue
            if (name, found.name) in known:
                continue
            added = mcp_tool_spec(name, session.server, found, None, session.secrets.redact)
            if added is not None:
                tools.append(added)
    return tools


def _unavailable_spec(name: str, sessions: Mapping[str, McpSession]) -> ToolSpec | None:
    """Return the spec of a tool whose server does not answer; None if its server does."""
    for server, session in sessions.items():
        if name.startswith(f"{server}.") and not session.available:
            fields: dict[str, object] = {"name": name, "kind": "mcp", "server": server}
            fields["tool"] = name.removeprefix(f"{server}.")
            fields["available"] = False
            fields["dangerous"] = True
            return ToolSpec.model_validate(fields)
    return None


def _merged_spec(tool: ToolSpec, session: McpSession) -> ToolSpec:
    """Return the spec of a tool in the plan, completed by that of its server."""
    name = _name_on_server(tool)
    found = session.tools.get(name)
    if found is None:
        # Without a description, the tool is assumed to be dangerous.
        is_stated = "dangerous" in tool.model_fields_set or name in session.server.safe
        is_dangerous = tool.dangerous or not is_stated
        return tool.model_copy(update={"available": False, "dangerous": is_dangerous})
    return mcp_tool_spec(session.name, session.server, found, tool, session.secrets.redact) or tool


def _referenced_tools(plan: Plan) -> Iterator[tuple[tuple[int, *tuple[str | int, ...]], str]]:
    for index, task in enumerate(plan.tasks):
        if task.tool is not None:
            yield (index,), task.tool
        for number, fallback in enumerate(task.fallbacks):
            if fallback.tool is not None:
                yield (index, "fallbacks", number), fallback.tool
