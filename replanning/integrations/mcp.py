"""Proxy that serves the tools of MCP servers to a client; each call is a task of a session.

Tested with the package `mcp` 2.3. See `docs/integrations/mcp.md`.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
from anyio.abc import ObjectReceiveStream, ObjectSendStream, TaskGroup

from replanning.engine.engine import ReplanningEngine
from replanning.engine.functions import FunctionTool
from replanning.engine.session import Session
from replanning.environment import SystemClock
from replanning.errors import (
    CallFailed,
    CallSkipped,
    NotRunning,
    PlanError,
    Problem,
    StoreError,
    ToolError,
)
from replanning.integrations.kit import (
    Arguments,
    call_tool,
    joined_texts,
    missing_framework,
    unknown_names,
)
from replanning.plan.document import Plan
from replanning.plan.json_values import as_object
from replanning.plan.messages import format_path
from replanning.plan.schemas import schema_problems
from replanning.plan.tasks import (
    Expectation,
    Goal,
    McpServer,
    Retry,
    ToolSpec,
    confirmation_problem,
)
from replanning.tools.call import inherited_variables
from replanning.tools.errors import (
    McpToolFailed,
    ToolTimedOut,
    ToolUnavailable,
)
from replanning.tools.mcp import CLOSE_TIMEOUT, mcp_tool_spec

try:
    from mcp import MCPError
    from mcp.server.lowlevel import NotificationOptions, Server
    from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged
    from mcp.shared.message import SessionMessage
    from mcp.types import (
        INVALID_PARAMS,
        CallToolResult,
        ListToolsResult,
        TextContent,
        Tool,
    )
    from mcp.types.version import MODERN_PROTOCOL_VERSIONS

    from replanning.tools.mcp_session import McpSession, parse_message
except ImportError as error:
    raise missing_framework(__name__, "the package mcp 2.3 or newer", error) from error

__all__ = ["McpProxy", "open_proxy", "serve_stdio", "server_of_command"]

_log = logging.getLogger("replanning.mcp")

SERVER_NAME: Final = "server"
"""Name, in a plan, of the server that a command line starts."""

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SHELL_VARIABLES: Final = frozenset({"PWD", "OLDPWD", "SHLVL", "_"})
"""Variables of the shell that started this process.

Values that a server is given count as secrets. The working directory stands in many results, which
would be masked in the journal.
"""

_RESERVED: Final = ("io.modelcontextprotocol/", "progress")
_SERVER_FIELDS: Final = frozenset({"kind", "server", "tool"})
"""Fields of a tool that identify its server. The run omits them, because the variables of a server
may change.
"""

_CHUNK_BYTES: Final = 4_096
"""Bytes that a writable pipe takes without blocking."""


@dataclass(frozen=True, slots=True)
class _ServedTool:
    """A tool as clients see it.

    Attributes:
        session: the connection to its server.
        tool: its description by the server, with the name that clients use.
        own_name: the name that the server uses.
        function: the tool for the engine; None if its name is not valid in a plan.
    """

    session: McpSession
    tool: Tool
    own_name: str
    function: FunctionTool[..., Any] | None


class McpProxy:
    """Server that offers the tools of other servers to one client; created by `open_proxy`.

    An engine handles calls that fail.

    Attributes:
        server: the server of the SDK, for transports other than `serve_stdio`.
        session: the session of the engine.
    """

    def __init__(
        self,
        engine: ReplanningEngine,
        plan: Plan,
        capabilities: Mapping[str, str],
        *,
        expect: Mapping[str, Expectation],
        retry: Retry | None,
        timeout: float | None,
        environ: Mapping[str, str],
        cwd: Path,
    ) -> None:
        self.server: Server[Any] = Server("replanning")
        self.session: Session  # set once the servers have answered, or failed
        self._engine = engine
        self._plan = plan
        self._capabilities = capabilities
        self._retry = retry
        self._expect = expect
        self._timeout = timeout
        self._environ = environ
        self._cwd = cwd
        self._sessions: list[McpSession] = []
        self._tools: dict[str, _ServedTool] = {}
        self._group: TaskGroup
        # Notifies a client of the older protocol that the tools have changed.
        self._client: Any = None
        self._changes = InMemorySubscriptionBus()

    def __repr__(self) -> str:
        return f"<McpProxy {len(self._tools)} tools of {', '.join(self._plan.mcp)}>"

    @property
    def tools(self) -> Mapping[str, Tool]:
        """The tools by the names that the client knows."""
        return {name: served.tool for name, served in self._tools.items()}

    @property
    def unavailable(self) -> Mapping[str, str]:
        """Servers that are unavailable, with the reasons."""
        return {each.name: each.unavailable_reason for each in self._sessions if not each.available}

    async def start(self, group: TaskGroup) -> None:
        """Start the servers, and wait until each answers or has failed.

        Raises:
            PlanError: a capability or an expectation names a tool that no server has, or an
                expectation conflicts with that of the plan.
        """
        self._group = group
        for name, server in self._plan.mcp.items():
            session = McpSession(
                name,
                server,
                environ=self._environ,
                cwd=self._cwd,
                clock=SystemClock(),
                on_change=self._on_change,
            )
            self._sessions.append(session)
            group.start_soon(session.run)
        async with anyio.create_task_group() as starting:
            for session in self._sessions:
                starting.start_soon(session.start)
        self._tools = self._list_tools()
        problems = list(self._problems())
        if problems:
            raise PlanError(problems)
        client = self._sessions[0].client if len(self._sessions) == 1 else None
        about = client.server_info if client is not None else None
        self.server = Server(
            about.name if about is not None else "replanning",
            version=about.version if about is not None else "",
            instructions=client.instructions if client is not None else None,
            on_list_tools=self._on_list_tools,
            on_call_tool=self._on_call_tool,
            on_subscriptions_listen=ListenHandler(self._changes),
        )

    def _problems(self) -> Iterator[Problem]:
        """Yield a problem for each option that matches no tool of the available servers."""
        described = {
            name: each.function.spec
            for name, each in self._tools.items()
            if each.function is not None
        }
        if not self.unavailable:
            for text in unknown_names(self._capabilities, self._tools):
                yield Problem("capabilities", text)
        for name, further in self._expect.items():
            place = format_path(("expect", name))
            if name in described:
                for field, text in _misfits(self._stated_expectation(name), further):
                    yield Problem(f"{place}.{field}", text)
                problem = None
                if further.second_tool:
                    problem = confirmation_problem(further.second_tool, name, described)
                if problem:
                    yield Problem(f"{place}.agrees_with", problem)
            elif name in self._tools:
                text = "the name of this tool is not valid in a plan, so its output is not checked"
                yield Problem(place, f"{text}; give it another name in the file of servers")
            elif not self.unavailable:
                [text] = unknown_names([name], self._tools)
                yield Problem(place, text)

    def _stated_expectation(self, name: str) -> Expectation | None:
        stated = (
            each.expect for each in self._plan.tools if (each.kind, each.name) == ("mcp", name)
        )
        return next(stated, None)

    def attach(self, session: Session) -> None:
        """Set the session that calls belong to, and report to it which tools are available."""
        self.session = session
        self._report_availability()

    def close(self) -> None:
        """Stop the servers."""
        for session in self._sessions:
            session.close()

    def _list_tools(self) -> dict[str, _ServedTool]:
        stated = {
            (each.server, each.tool or each.name): each
            for each in self._plan.tools
            if each.kind == "mcp"
        }
        found: dict[str, _ServedTool] = {}
        for session in self._sessions:
            for tool in session.tools.values():
                if session.server.tools is not None and tool.name not in session.server.tools:
                    continue
                own = stated.get((session.name, tool.name))
                joined = tool.name if len(self._sessions) == 1 else f"{session.name}_{tool.name}"
                name = own.name if own is not None else joined
                if name not in found:
                    served = tool if name == tool.name else tool.model_copy(update={"name": name})
                    found[name] = _ServedTool(
                        session, served, tool.name, self._as_function(name, session, tool, own)
                    )
        return found

    def _as_function(
        self, name: str, session: McpSession, tool: Tool, own: ToolSpec | None
    ) -> FunctionTool[..., Any] | None:
        fields: dict[str, object] = {
            "name": name,
            "kind": "mcp",
            "server": session.name,
            "tool": tool.name,
        }
        fields |= (
            {key: getattr(own, key) for key in own.model_fields_set} if own is not None else {}
        )
        fields |= {"capability": self._capabilities[name]} if name in self._capabilities else {}
        if name in self._expect:
            fields["expect"] = _joined(self._stated_expectation(name), self._expect[name])
        with suppress(PlanError, ValueError):  # its name is not valid in a plan
            given = ToolSpec.model_validate(fields)
            spec = mcp_tool_spec(session.name, session.server, tool, given, session.secrets.redact)
            if spec is not None:

                async def call(**arguments: object) -> object:
                    return await session.call(tool.name, arguments, named=name)

                described = {
                    key: getattr(spec, key) for key in spec.model_fields_set - _SERVER_FIELDS
                }
                if spec.timeout is None and self._timeout is not None:
                    described["timeout"] = self._timeout
                is_harmless = spec.effect == "none" or spec.idempotent is True
                if self._retry is not None and is_harmless:
                    # Set explicitly, because a default number does not apply to every failure.
                    stated = {"max_attempts": self._retry.max_attempts}
                    described.setdefault("retry", self._retry.model_copy(update=stated))
                return FunctionTool(call, **described)
        return None

    def _on_change(self, session: McpSession) -> None:
        """Tell the run and the client what has changed; called by the session of a server."""
        if not hasattr(self, "session"):
            return
        before = self.tools
        self._tools = self._list_tools()
        if self.tools != before:
            self._group.start_soon(self._announce_change)
        self._report_availability()

    def _report_availability(self) -> None:
        for name, tool in [*self.session.run.live.tools.items()]:
            served = self._tools.get(name)
            if served is None:
                reason = "no server offers it any more"
            elif served.session.starts_again:
                reason = ""  # calls wait for it
            else:
                reason = served.session.unavailable_reason
            if tool.available == bool(reason):
                with suppress(ValueError, NotRunning):
                    self.session.run.change_resource(name, available=not reason, reason=reason)

    async def _announce_change(self) -> None:
        await self._changes.publish(ToolsListChanged())
        if self._client is not None:
            await self._client.send_tool_list_changed()

    def _remember_client(self, context: Any) -> None:
        if context.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            self._client = context.session

    async def _on_list_tools(self, context: Any, _: object) -> ListToolsResult:
        self._remember_client(context)
        return ListToolsResult(tools=[served.tool for served in self._tools.values()])

    async def _on_call_tool(self, context: Any, parameters: Any) -> CallToolResult:
        self._remember_client(context)
        name = parameters.name
        arguments = parameters.arguments or {}
        if name not in self._tools:
            raise MCPError(code=INVALID_PARAMS, message=f"Unknown tool: {name}")
        failures: dict[str, CallToolResult | MCPError] = {}

        async def execute(tool: str, given: Arguments) -> CallToolResult:
            failures.pop(tool, None)
            try:
                result = await self._execute(tool, given, context)
            except ToolError:
                raise
            except Exception as error:
                # Whatever the SDK raises because of a server fails this call alone.
                if isinstance(error, MCPError):
                    failures[tool] = error
                raise self._failure(tool, str(error) or type(error).__name__) from error
            if result.is_error:
                failures[tool] = result
                raise self._failure(tool, joined_texts(result.content))
            served = self._tools[tool]
            schema = self._tools[name].tool.output_schema if tool != name else None
            if schema is not None:  # the client checks it
                content = result.structured_content
                problems = (
                    ["it has no structured content"]
                    if content is None
                    else schema_problems(schema, content)
                )
                if problems:
                    found = "; ".join(problems)
                    raise self._failure(
                        tool, f"its answer does not match the output schema of {name!r}: {found}"
                    )
            served.session.secrets.report_to(self.session.run.add_secret)
            return result

        try:
            result: CallToolResult = await call_tool(
                self._engine,
                self.session,
                name,
                arguments,
                execute,
                encode=_recorded,
                decode=_outputs_of_several,
                value=_value,
            )
        except CallSkipped as skipped:
            # Unless it is an error, a result must match the output schema of the tool.
            return _text_result(
                str(skipped), is_error=self._tools[name].tool.output_schema is not None
            )
        except (ToolError, CallFailed, NotRunning) as given_up:
            # The client gets the failure of the tool that it called, whatever was tried instead.
            failure = failures.get(name)
            if isinstance(failure, MCPError):
                raise failure from None
            return failure or _text_result(str(given_up), is_error=True)
        return result

    def _failure(self, tool: str, text: str) -> McpToolFailed:
        session = self._tools[tool].session
        return McpToolFailed(tool, session.name, session.secrets.redact(text) or "no reason given")

    async def _execute(self, name: str, arguments: Arguments, context: Any) -> CallToolResult:
        """Execute a tool, and return the answer of its server.

        Raises:
            MCPError: the server refuses the call.
            ToolError: the server is unavailable, ended, or its answer is not a result.
        """
        served = self._tools.get(name)
        if served is None:
            raise ToolUnavailable(name, "a server that has it", "no server offers it any more")
        session = served.session
        meta = _without_reserved(context.meta)
        limit = self._timeout
        if name in self.session.run.live.tools:
            limit = None  # the run has a deadline for each attempt of a tool that it knows
        result: CallToolResult | None = None
        with anyio.move_on_after(limit):
            result = await session.call(
                served.own_name,
                arguments,
                named=name,
                on_progress=context.session.report_progress,
                meta=meta,
            )
        if result is None:
            assert limit is not None
            raise ToolTimedOut(name, limit)
        kept = _without_reserved(result.meta)
        return result if kept == result.meta else result.model_copy(update={"meta": kept})


def _without_reserved(meta: Mapping[str, Any] | None) -> Any:
    """Return the metadata of a message without that of its connection; None if nothing is left."""
    if meta is None:
        return None
    kept = {key: value for key, value in meta.items() if not key.startswith(_RESERVED)}
    return kept or None


def _misfits(stated: Expectation | None, further: Expectation) -> Iterator[tuple[str, str]]:
    """Yield the fields of an expectation that cannot be added to another one, and why."""
    if stated is None:
        return
    fields: list[str] = []
    if stated.json_schema is not None and further.json_schema is not None:
        fields.append("schema")
    if stated.second_tool and further.second_tool:
        fields.append("agrees_with")
    if stated.errors and further.errors and stated.means != further.means:
        fields.append("errors")
    for field in fields:
        text = f"the file of servers states `{field}` as well, and the two cannot be joined"
        yield field, f"{text}; state it in one of the files"


def _joined(stated: Expectation | None, further: Expectation) -> Expectation:
    """Combine two expectations that do not conflict."""
    if stated is None:
        return further
    joined: dict[str, object] = {
        "where": (*stated.where, *further.where),
        "errors": (*stated.errors, *further.errors),
    }
    for field in ("json_schema", "means", "agrees_with"):
        if getattr(further, field) is not None:
            joined[field] = getattr(further, field)
    return stated.model_copy(update=joined)


def _recorded(result: CallToolResult) -> object:
    return as_object(result.model_dump(mode="json", by_alias=True, exclude_none=True))


def _value(result: CallToolResult) -> object:
    """Return the structured content of a result, or else its text."""
    if result.structured_content is not None:
        return result.structured_content
    return joined_texts(result.content)


def _outputs_of_several(outputs: object) -> CallToolResult:
    return _text_result(f"several tools stood in: {json.dumps(outputs)}", is_error=True)


def _text_result(text: str, *, is_error: bool) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=is_error)


@asynccontextmanager
async def open_proxy(
    engine: ReplanningEngine,
    plan: Plan,
    *,
    capabilities: Mapping[str, str] | None = None,
    expect: Mapping[str, Expectation] | None = None,
    retry: Retry | None = None,
    timeout: float | None = None,
    run_id: str | None = None,
    approvals: bool = True,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> AsyncIterator[McpProxy]:
    """Start servers and open a run for calls of their tools; yield the proxy.

    Servers and run end with the body.

    Args:
        engine: decides what follows a call that fails.
        plan: its section `mcp` has the servers; its section `tools` may describe some of their
            tools. The client sees those by the names in that section, and others by their own
            names, or by `SERVER_TOOL` if there are several servers.
        capabilities: by the name of a tool, its capability; tools of the same capability stand in
            for one another.
        expect: by the name of a tool, what its output must satisfy, in addition to what the plan
            states.
        retry: retries, after any failure, of tools that are declared read-only or idempotent.
        timeout: time limit for each attempt at a call, in seconds, where the plan states none for
            the tool; None for no limit. Waiting for a server that is being started counts.
        run_id: the id of the run, which is resumed if it exists; at the end it is `paused`, so that
            it can be resumed.
        approvals: whether a question to a person goes to the gate of the engine. Otherwise the
            client gets the failure of its tool.
        environ: the variables for `{env:NAME}`; by default those of this process.
        cwd: the base folder for the `cwd` of a server; by default that of this process.

    Raises:
        PlanError: the plan has no server, a capability or an expectation names a tool that no
            server has, or an expectation conflicts with that of the plan.
        ToolError: none of the servers can be started.
        RunOwned: another process owns this run.
        StoreError: the run was opened for other servers, or has ended, or the store fails.
    """
    if not plan.mcp:
        raise PlanError.at("mcp", "expected at least one server")
    proxy = McpProxy(
        engine,
        plan,
        capabilities or {},
        expect=expect or {},
        retry=retry,
        timeout=timeout,
        environ=os.environ if environ is None else environ,
        cwd=cwd or Path.cwd(),
    )
    group = anyio.create_task_group()
    await group.__aenter__()  # not `async with`, which would wrap errors of the body in groups
    try:
        await proxy.start(group)
        if len(proxy.unavailable) == len(plan.mcp):
            reasons = "; ".join(f"{name!r}: {reason}" for name, reason in proxy.unavailable.items())
            raise ToolError(f"no MCP server could be started: {reasons}")
        goal = Plan(goal=Goal(objective=f"Answer calls of tools of {', '.join(plan.mcp)}"))
        async with engine.session(
            goal,
            tools=[each.function for each in proxy._tools.values() if each.function is not None],
            run_id=run_id,
            gate=approvals,
        ) as session:
            if session.run.ended:
                raise StoreError(
                    f"run {run_id!r} has ended ({session.run.result.status}); choose another id"
                )
            proxy.attach(session)
            yield proxy
            if run_id is not None:
                session.run.pause("the client has left; the next one continues the run")
    finally:
        proxy.close()
        group.cancel_scope.deadline = anyio.current_time() + CLOSE_TIMEOUT
        await group.__aexit__(None, None, None)


def server_of_command(
    command: list[str], *, environ: Mapping[str, str], safe: tuple[str, ...] = ()
) -> McpServer:
    """Return the server that a command line starts, with the environment variables of this process.

    Those of a shell, such as `PWD`, are left out: the shell that starts the server sets its own.

    Args:
        command: the program and its arguments.
        environ: the variables of this process.
        safe: tools that are not dangerous, whatever the server declares.
    """
    omitted = {*inherited_variables(environ), *_SHELL_VARIABLES}
    own = {
        name: f"{{env:{name}}}"
        for name in environ
        if name not in omitted and _VARIABLE.fullmatch(name)
    }
    return McpServer(command=tuple(command), env=own, safe=safe)


async def serve_stdio(server: Server[Any]) -> None:
    """Serve a client on standard input and output until it closes them.

    Meanwhile other code reads an empty standard input, and what it prints goes to standard error.
    """
    with _private_streams() as (input_end, output_end):
        write, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outgoing, waiting = anyio.create_memory_object_stream[SessionMessage](0)
        async with anyio.create_task_group() as group:
            group.start_soon(_read_messages, input_end, write)
            group.start_soon(_write_messages, output_end, waiting, group)
            options = server.create_initialization_options(NotificationOptions(tools_changed=True))
            await server.run(read, outgoing, options)
            outgoing.close()  # the last answers are still written


@contextmanager
def _private_streams() -> Iterator[tuple[int, int]]:
    """Yield private descriptors of standard input and output."""
    input_end = os.dup(0)
    output_end = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(nothing, 0)
        try:
            os.dup2(2, 1)
        except OSError:  # standard error is closed
            os.dup2(nothing, 1)
        yield input_end, output_end
    finally:
        os.dup2(input_end, 0)
        os.dup2(output_end, 1)
        for end in (input_end, output_end, nothing):
            os.close(end)


async def _read_messages(end: int, messages: ObjectSendStream[SessionMessage | Exception]) -> None:
    unfinished = b""
    async with messages:
        while True:
            with suppress(PermissionError):  # a file is always ready
                await anyio.wait_readable(end)
            chunk = os.read(end, 65_536)
            if not chunk:
                return
            *lines, unfinished = (unfinished + chunk).split(b"\n")
            for line in filter(bytes.strip, lines):
                message: SessionMessage | Exception
                try:
                    message = parse_message(line.decode(errors="replace"))
                except (ValueError, RecursionError) as error:
                    message = error
                await messages.send(message)


async def _write_messages(
    end: int, messages: ObjectReceiveStream[SessionMessage], group: TaskGroup
) -> None:
    async with messages:
        async for each in messages:
            text = each.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
            try:
                while text:
                    with suppress(PermissionError):
                        await anyio.wait_writable(end)
                    text = text[os.write(end, text[:_CHUNK_BYTES]) :]
            except (BrokenPipeError, ConnectionError):  # the client is gone
                group.cancel_scope.cancel()
                return
