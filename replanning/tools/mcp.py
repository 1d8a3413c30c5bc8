"""Tools of MCP servers: their specs, discovery, calls and outputs, checked and bounded."""

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
"""Characters of a schema that are kept; of a larger one, the types of its parameters."""

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
    text = hide(json.dumps(tool.input_schema))
    schema = parse_json(text) if len(text) <= MAX_SCHEMA_CHARS else None
    properties = tool.input_schema.get("properties")
    required = tool.input_schema.get("required")
    parameters: dict[str, str] = {}
    for each, described in islice(
        properties.items() if isinstance(properties, dict) else (), _MAX_PARAMETERS
    ):
        kind = described.get("type") if isinstance(described, dict) else None
        parameters[str(each)] = kind if isinstance(kind, str) and kind in JSON_TYPES else "any"
    needed = required if isinstance(required, list) else []
    hints = tool.annotations
    harmless = hints is not None and (hints.read_only_hint or hints.destructive_hint is False)
    fields: dict[str, object] = {
        "name": f"{name}.{tool.name}",
        "kind": "mcp",
        "server": name,
        "tool": tool.name,
        "description": head(_CONTROL_CHARS.sub(" ", hide(tool.description or tool.title or ""))),
        "parameters": parameters,
        "input_schema": schema if isinstance(schema, dict) else None,
        "dangerous": tool.name not in server.safe and not harmless,
    }
    if hints is not None and hints.read_only_hint:
        fields["effect"] = "none"
    if hints is not None and hints.idempotent_hint:
        fields["idempotent"] = True
    fields |= (
        {key: getattr(stated, key) for key in stated.model_fields_set} if stated is not None else {}
    )
    known = fields["parameters"] if isinstance(fields["parameters"], Mapping) else {}
    fields.setdefault(
        "optional", [each for each in parameters if each not in needed and each in known]
    )
    try:
        return ToolSpec.model_validate(fields)
    except PlanError:
        return None


CLOSE_TIMEOUT: Final = 10.0
"""Seconds that servers have to end in order; then they are killed."""


class AvailabilityListener(Protocol):
    """Receiver of changes in availability, such as `run.change_resource`."""

    def __call__(self, name: str, /, *, available: bool, reason: str) -> object:
        """Receive the new availability of the tool `name`, with the reason."""
        ...


@dataclass(eq=False, repr=False)
class McpToolRunner:
    """Runner of the tools of MCP servers, which it starts and keeps.

    Attributes:
        servers: as the plan describes them.
        environ: where `{env:NAME}` is looked up.
        cwd: the folder that `cwd` of a server is relative to.
        clock: time between one start of a server and the next.
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
        """Servers that were asked and are unavailable, with the reasons."""
        return {
            name: session.unavailable_reason
            for name, session in self._sessions.items()
            if session.unavailable_reason
        }

    async def open(self) -> None:
        """Begin; `aclose` must be called by the same task."""
        self._group = anyio.create_task_group()
        await self._group.__aenter__()

    async def aclose(self) -> None:
        """End the servers that were started."""
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
        """Report which tools are available, now and whenever that changes; None stops the reports."""
        self._listener = report
        self._reported = {}
        for session in self._sessions.values():
            self._report_availability(session)

    async def discover(self, plan: Plan) -> Plan:
        """Start the servers of a plan and return the plan with their tools.

        Descriptions in the plan take precedence over those of the servers. A tool that a task names
        and whose server is missing is described as unavailable.

        Raises:
            PlanError: the tasks do not fit the tools.
            McpNotInstalled: the SDK is not there.
        """
        sessions = {name: self._get_session(name) for name in plan.mcp}
        async with anyio.create_task_group() as group:
            for session in sessions.values():
                group.start_soon(session.start)
        tools = [_merged_spec(tool, sessions.get(tool.server or "")) for tool in plan.tools]
        known = {(tool.server, tool.tool or tool.name) for tool in tools if tool.kind == "mcp"}
        for name, session in sessions.items():
            for tool in session.tools.values():
                allowed = session.server.tools is None or tool.name in session.server.tools
                if allowed and (name, tool.name) not in known:
                    found = mcp_tool_spec(name, session.server, tool, None, session.secrets.redact)
                    tools += [found] if found is not None else []
        names = {tool.name for tool in tools}
        for name in dict.fromkeys(name for _, name in _referenced_tools(plan) if name not in names):
            for server, session in sessions.items():
                if name.startswith(f"{server}.") and not session.available:
                    fields = {
                        "name": name,
                        "kind": "mcp",
                        "server": server,
                        "tool": name[len(server) + 1 :],
                    }
                    tools.append(
                        ToolSpec.model_validate({**fields, "available": False, "dangerous": True})
                    )
                    break
        self._tools |= {tool.name: tool for tool in tools if tool.kind == "mcp"}
        specs = {tool.name: tool for tool in tools}
        hints = NameSuggester()
        problems = [
            Problem(
                format_path(("tasks", *path, "tool")),
                f"task {plan.tasks[path[0]].id!r}: there is no tool {name!r}{hint}",
            )
            for path, name in _referenced_tools(plan)
            if specs
            and name not in specs
            and (hint := hints(name, specs) or "; its server does not have it")
        ]
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
            Its `text`, its `json` or the text parsed as JSON, what it produces, and other
            `content`.

        Raises:
            InvalidArguments: they do not fit the schema of the tool.
            ToolUnavailable: the server is not there.
            McpServerLost: it went away while it was at work.
            McpToolFailed: the tool, or the server, reports an error.
            ToolOutputTooLarge: it answers more than may be kept.
            McpNotInstalled: the SDK is not there.
        """
        tool = call.tool
        name = call.tool.server or ""
        report: AvailabilityListener | None = getattr(
            call.context, "change_resource", None
        )  # others' need have none
        if report is not None and self._listener is None:
            self.watch(report)
        session = self._get_session(name, tool.name)
        self._tools.setdefault(tool.name, tool)
        if problems := schema_problems(tool.input_schema, call.arguments):
            raise InvalidArguments(
                tool.name, [call.secrets.redact(problem) for problem in problems]
            )
        try:
            result = await session.call(tool.tool or tool.name, call.arguments, named=tool.name)
        except ToolError:
            raise
        except (
            Exception
        ) as error:  # whatever a server makes the SDK raise is a failure of this task alone
            reason = session.secrets.redact(str(error)) or type(error).__name__
            raise McpToolFailed(tool.name, name, reason) from error
        text = "\n".join(block.text for block in result.content if block.type == "text")
        if result.is_error:
            raise McpToolFailed(
                tool.name, name, session.secrets.redact(text) or "it does not say why"
            )
        others: list[JsonValue] = [
            block.model_dump(mode="json", by_alias=True, exclude_none=True)
            for block in result.content
            if block.type != "text"
        ]
        whole = json.dumps([text, result.structured_content, others], ensure_ascii=False)
        if len(whole.encode(errors="replace")) > call.output_limit:
            raise ToolOutputTooLarge(tool.name, call.output_limit, "what the server answered")
        said: JsonValue = None
        if result.structured_content is not None:
            said = parse_json(json.dumps(result.structured_content))
        elif text.lstrip()[:1] in {"{", "["}:
            said = parse_json(text)
        output = {**find_artifacts(tool, call.arguments, said), "text": text}
        output |= {"json": said} if said is not None else {}
        output |= {"content": others} if others else {}
        session.secrets.report_to(getattr(call.context, "add_secret", None))
        return output

    def _get_session(self, name: str, tool: str = "") -> McpSession:
        if name not in self._sessions:
            if name not in self.servers:
                raise ToolUnavailable(
                    tool, f"the MCP server {name!r}", "which the plan does not describe under `mcp`"
                )
            if self._group is None:
                raise ToolUnavailable(
                    tool,
                    f"the MCP server {name!r}",
                    "which is only there within `async with ToolExecutor(…)`",
                )
            if find_spec("mcp") is None:
                raise McpNotInstalled(self.servers)
            from replanning.tools.mcp_session import (
                McpSession,
            )  # the SDK takes its time, and most plans need none

            self._sessions[name] = session = McpSession(
                name,
                self.servers[name],
                environ=self.environ,
                cwd=self.cwd,
                clock=self.clock,
                on_change=self._report_availability,
            )
            self._group.start_soon(session.run)
        return self._sessions[name]

    def _report_availability(self, session: McpSession) -> None:
        if self._listener is None:
            return
        for tool in [tool for tool in self._tools.values() if tool.server == session.name]:
            lacking = (tool.tool or tool.name) not in session.tools
            reason = session.unavailable_reason or (
                "the server does not have it any more" if lacking else ""
            )
            if self._reported.get(tool.name) is not (available := not reason):
                self._reported[tool.name] = available
                why = f"MCP server {session.name!r}: {reason}" if reason else ""
                with suppress(ValueError):  # the plan of this run does not have the tool
                    self._listener(tool.name, available=available, reason=why)


def _merged_spec(tool: ToolSpec, session: McpSession | None) -> ToolSpec:
    """Return the spec of a tool in the plan, completed by that of its server."""
    if tool.kind != "mcp" or session is None:
        return tool
    found = session.tools.get(tool.tool or tool.name)
    if found is None:  # without any description the worst is assumed
        safe = (
            "dangerous" in tool.model_fields_set or (tool.tool or tool.name) in session.server.safe
        )
        return tool.model_copy(update={"available": False, "dangerous": tool.dangerous or not safe})
    return mcp_tool_spec(session.name, session.server, found, tool, session.secrets.redact) or tool


def _referenced_tools(plan: Plan) -> Iterator[tuple[tuple[int, *tuple[str | int, ...]], str]]:
    for index, task in enumerate(plan.tasks):
        if task.tool is not None:
            yield (index,), task.tool
        for number, fallback in enumerate(task.fallbacks):
            if fallback.tool is not None:
                yield (index, "fallbacks", number), fallback.tool
