"""OpenAI Agents SDK: `async with replanned(agent, capabilities={…}) as agent:`.

Tested with openai-agents 0.24. See docs/integrations/openai_agents.md.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import inspect
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from pydantic_core import to_jsonable_python

from replanning.engine.engine import ReplanningEngine
from replanning.engine.session import Session
from replanning.errors import CallFailed, CallSkipped, NotRunning, StoreError
from replanning.integrations.kit import (
    Capabilities,
    ReportedFailure,
    TimedOut,
    call_tool,
    describe_tools,
    earlier_output,
    hinted_fields,
    joined_texts,
    missing_framework,
    thread_run,
    tool_fields,
)
from replanning.journal import values

try:
    from agents import (
        Agent,
        AgentHooks,
        FunctionTool,
        Handoff,
        ModelBehaviorError,
        RunContextWrapper,
        ToolInputGuardrailData,
        ToolInputGuardrailTripwireTriggered,
        ToolOriginType,
        ToolOutputFileContent,
        ToolOutputGuardrailData,
        ToolOutputGuardrailTripwireTriggered,
        ToolOutputImage,
        ToolOutputText,
        ToolTimeoutError,
        UserError,
        default_tool_error_function,
        function_tool,
        get_current_span,
        handoff,
    )
    from agents._public_agent import set_public_agent
    from agents.tool import (
        ValidToolOutputPydanticModelsTypeAdapter,
        default_tool_timeout_error_message,
        get_function_tool_origin,
        invoke_function_tool,
        maybe_invoke_function_tool_failure_error_function,
        resolve_function_tool_failure_error_function,
        set_function_tool_failure_error_function,
    )
    from agents.tool_context import ToolContext

    _probe = function_tool(lambda: None, name_override="probe")
    if copy.copy(_probe).on_invoke_tool is _probe.on_invoke_tool:
        raise ImportError("a copy of a function tool does not handle failures by itself")
except ImportError as error:
    raise missing_framework(
        __name__, "the OpenAI Agents SDK, and was tested with its version 0.24", error
    ) from error

AgentT = TypeVar("AgentT")


@asynccontextmanager
async def replanned(
    agent: AgentT,
    engine: ReplanningEngine | None = None,
    *,
    capabilities: Capabilities | None = None,
    agents: Sequence[Agent] = (),
    objective: str = "",
    thread: str | None = None,
    context: object = None,
    approvals: bool = True,
) -> AsyncIterator[AgentT]:
    """Copy of an agent whose tools an engine retries or replaces, in a session for the block.

    The agents that it hands over to are copied, too; after the block the copies act like the
    original agents. The session succeeds if the last run in the block had a final output. It is
    `paused` if that run was interrupted, or an exception leaves the block.

    Args:
        agent: the agent; it is not changed.
        engine: the engine; by default one with its defaults.
        capabilities: by the name of a tool, its capability, or the fields that `replanning.tool`
            takes. Tools of the same capability can stand in for one another.
        agents: agents that are reached through `handoff(…)`, so that their tools are known from the
            start.
        objective: what the agent is for; by default its name.
        thread: the id of a conversation; its last session is resumed unless it has ended. Calls
            that a person approved and that were done in any of its sessions return their recorded
            output.
        context: the context of the run, for the filters of MCP servers.
        approvals: whether a question to a person goes to the gate of the engine. Otherwise the
            agent sees the exception of its tool.

    Raises:
        RunOwned: another process owns the session of this thread.
        StoreError: the session of this thread has another objective, or the store fails.
        TypeError: this is not an agent.
        ValueError: capabilities name tools that do not exist or are not attached, or a field is not
            valid for a tool.
    """
    engine = engine or ReplanningEngine()
    copies = _Agents(engine, context, agents, keyed=thread is not None)
    wrapped = copies.wrap(agent)
    for each in agents:
        copies.wrap(each)
    await copies.describe()
    tools = describe_tools(copies.described, capabilities, noun="attached function tool")
    objective = objective or f"Run of the agent {wrapped.name}"
    run_id = None if thread is None else thread_run(engine, thread)
    async with engine.session(
        objective, tools=tools, run_id=run_id, passes=_PASSES, gate=approvals
    ) as session:
        copies.session = session
        try:
            yield wrapped
        finally:
            copies.session = None
        if not copies.finished:
            session.run.pause("the agent has no final output yet")


class _Halted(Exception):
    """A guardrail of a tool halts the run of the agent; the cause is the exception to raise."""


_PASSES: Final = (_Halted, ModelBehaviorError)


_CONTENTS: Final = (ToolOutputText, ToolOutputImage, ToolOutputFileContent)

_OUTPUT: Final = "$openai"
"""Key of a recorded output that is no JSON; its value says what it was."""

_REPORTED: Final[ContextVar[list[Any] | None]] = ContextVar("replanning_reported", default=None)
"""Where the tool that is being executed notes results of MCP servers that say that they are
errors.
"""


class _Server:
    """MCP server whose error results are noted before the framework turns them into outputs."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    async def call_tool(self, *args: Any, **options: Any) -> Any:
        """Call a tool of the server, and note a result that says that it is an error."""
        result = await self._server.call_tool(*args, **options)
        noted = _REPORTED.get()
        # Version 1 of the SDK has the other name, which a client for version 2 warns of.
        named = "is_error" if hasattr(result, "is_error") else "isError"
        if noted is not None and getattr(result, named, None) is True:
            noted.append(result)
        return result


class _Hooks(AgentHooks):  # type: ignore[misc] # its types may not be installed
    """Hooks of an agent that also record whether the last event was a final output."""

    def __init__(self, agents: _Agents, agent: Any) -> None:
        def noting(name: str) -> Any:
            async def call(*args: Any, **kwargs: Any) -> None:
                agents.finished = name == "on_end"
                if agent.hooks is not None:
                    await getattr(agent.hooks, name)(*args, **kwargs)

            return call

        for name in filter(lambda each: each.startswith("on_"), dir(AgentHooks)):
            setattr(self, name, noting(name))


class _AttachedAgent:
    """Base of the copies of agents; the class of a copy derives from this and that of the agent.

    A copy reads all other fields of the agent as they are now, and equals it, so that
    `result.last_agent == agent`.
    """

    def __eq__(self, other: object) -> bool:
        mine = vars(self)["_original"]
        theirs = getattr(other, "_original", other)
        return mine is theirs or bool(mine == theirs)

    __hash__ = None  # type: ignore[assignment] # as agents

    def __getattr__(self, name: str) -> Any:
        if "_original" not in vars(self):  # while it is copied
            raise AttributeError(name)
        return getattr(vars(self)["_original"], name)

    def clone(self, **changes: Any) -> Any:
        """Return an attached copy of a changed agent."""
        return self._agents.wrap(self._original.clone(**changes))

    async def get_mcp_tools(self, context: Any) -> list[Any]:
        """Return the attached tools of the MCP servers, or the last ones if a server fails."""
        listing = copy.copy(self._original)
        listing.mcp_servers = [_Server(each) for each in self._original.mcp_servers]
        set_public_agent(listing, self._original)  # which the filters of the servers see
        try:
            tools = await listing.get_mcp_tools(context)
        except Exception:
            # After a server has ended, the model still has to read what stood in for its tool.
            if not self._listed or self._agents.session is None:
                raise
        else:
            self._listed[:] = [self._agents.wrap_tool(each, self._own) for each in tools]
        return list(self._listed)

    async def get_all_tools(self, context: Any) -> list[Any]:
        """Return the tools for a turn, as they are now."""
        self.follow()
        return await super().get_all_tools(context)  # type: ignore[misc,no-any-return]

    def follow(self) -> None:
        """Attach the tools added since the last turn, and drop those that were removed."""
        given = {id(each): each for each in self._original.tools}
        for key, (_, made) in list(self._attached.items()):
            if key not in given:
                del self._attached[key]
                self.tools[:] = [each for each in self.tools if each is not made]
        for key, tool in given.items():
            if key not in self._attached:
                made = self._agents.wrap_tool(tool, self._own)
                self._attached[key] = tool, made  # both are kept, so that an id names one tool
                self.tools.append(made)


def _live_field(name: str) -> property:
    """Return a field of a copy that has the value of the original, until it is set."""

    def read(copied: Any) -> Any:
        values = vars(copied)
        return values[name] if name in values else getattr(values["_original"], name)

    def write(copied: Any, value: Any) -> None:
        vars(copied)[name] = value

    return property(read, write)


class _Agents:
    """Copies of agents, and the descriptions of their tools."""

    def __init__(
        self, engine: ReplanningEngine, context: object, agents: Sequence[Any], *, keyed: bool
    ) -> None:
        self.engine = engine
        self.session: Session | None = None
        self.finished = not keyed  # a resumed conversation has no final output yet
        self.described: dict[str, dict[str, object]] = {}
        self._context = context
        self.keyed = keyed
        self._named = {each.name: each for each in agents}
        self.tools: dict[str, _Tool] = {}
        self._copies: dict[
            int, tuple[Any, Any]
        ] = {}  # both are kept, so that an id names one agent

    async def describe(self) -> None:
        """Describe the tools of the agents' MCP servers; their own tools are described already."""
        for _, made in list(self._copies.values()):
            if made.mcp_servers:
                await made.get_mcp_tools(RunContextWrapper(self._context))

    def wrap(self, agent: Any) -> Any:
        """Return the copy of an agent."""
        agent = getattr(agent, "_original", agent)  # of a copy, also of another block
        if id(agent) in self._copies:
            return self._copies[id(agent)][1]
        fields = {each.name: _live_field(each.name) for each in dataclasses.fields(agent)}
        kind: Any = type(type(agent).__name__, (_AttachedAgent, type(agent)), fields)
        made = kind.__new__(kind)
        vars(made).update(
            _original=agent, _agents=self, _own={}, _attached={}, _listed=[], tools=[]
        )
        self._copies[id(agent)] = agent, made
        made.hooks = _Hooks(self, agent)
        made.follow()
        made.handoffs = []
        for each in agent.handoffs:
            is_handoff = isinstance(each, Handoff)
            made.handoffs.append(self._wrap_handoff(each) if is_handoff else self.wrap(each))
        return made

    def _wrap_handoff(self, original: Any) -> Any:
        made = copy.copy(original)
        target = self._named.get(original.agent_name)
        if target is not None:  # a saved state finds agents by their handoffs
            made = handoff(self.wrap(target))
            for field in dataclasses.fields(original):
                if field.init:
                    setattr(made, field.name, getattr(original, field.name))

        async def hand_over(context: Any, text: str) -> Any:
            return self.wrap(await original.on_invoke_handoff(context, text))

        made.on_invoke_handoff = hand_over
        return made

    def wrap_tool(self, original: Any, own: dict[str, _Tool]) -> Any:
        """Return the copy of a tool.

        Hosted tools, and those whose approval a function decides, stay as they are.
        """
        if not isinstance(original, FunctionTool) or callable(original.needs_approval):
            return original
        name = original.qualified_name
        own[name] = tool = _Tool(self, original, own)
        self.tools.setdefault(name, tool)
        if original.is_enabled is not False and name not in self.described:
            # One that needs approval stands in for another one only if a person agrees.
            dangerous = bool(original.needs_approval)
            self.described[name] = tool_fields(
                original.description,
                original.params_json_schema,
                kind="function",
                dangerous=dangerous,
                **hinted_fields(getattr(original, "mcp_annotations", None)),
            )
        made = copy.copy(original)
        made.on_invoke_tool = tool
        made.timeout_seconds = None  # which is that of each attempt
        return made


class _Tool:
    """Invocation of the copy of a tool: a call of the session, which executes the original.

    Args:
        agents: the copies of agents.
        original: the tool.
        own: the tools of the same agent, which take precedence over those of others.
    """

    # The framework looks at the signature, and at the annotations, before each call.
    __signature__ = inspect.signature(lambda context, text: None)

    def __init__(self, agents: _Agents, original: Any, own: Mapping[str, _Tool]) -> None:
        self._agents = agents
        self._original = original
        self._own = own
        self._bare = set_function_tool_failure_error_function(copy.copy(original), None)
        self._bare.timeout_behavior = "raise_exception"
        # The wrapper that reports failures to the model is bound to each copy of a tool; a function
        # of the user is not.
        invoker = original.on_invoke_tool
        self._tells = self._bare.on_invoke_tool is not invoker and not inspect.ismethod(invoker)
        origin = get_function_tool_origin(original)
        is_agent = origin is not None and origin.type is ToolOriginType.AGENT_AS_TOOL
        # Only an approved call is made again under the same id, when a saved state is run again.
        self._keyed = agents.keyed and original.needs_approval and not is_agent

    async def __call__(self, context: Any, text: str) -> Any:
        """Execute the tool, or what replaces it, as the model calls it."""
        agents = self._agents
        name = self._original.qualified_name
        context.agent = getattr(context.agent, "_original", context.agent)
        arguments = None
        with suppress(ValueError):
            arguments = json.loads(text or "{}")
        # The tool itself tells the model about other arguments.
        if agents.session is None or not isinstance(arguments, dict):
            return await invoke_function_tool(
                function_tool=self._original, context=context, arguments=text
            )

        async def execute(called: str, values: Mapping[str, object]) -> object:
            if called == name and values == arguments:
                return await self._execute(context, text)
            stand_in = self._own.get(called) or agents.tools[called]
            return await stand_in._stand_in(context, values, called == name)

        key = ""
        if self._keyed:
            item = getattr(context.tool_call, "id", None) or ""
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            key = f"{context.tool_call_id} {item} {digest}"
        try:
            if key and not agents.session.is_recorded(key):
                earlier = earlier_output(agents.engine, agents.session.run.id, key)
                if earlier is not None:
                    return _restored(earlier[0])
            return await call_tool(
                agents.engine,
                agents.session,
                name,
                arguments,
                execute,
                key=key,
                encode=_recorded,
                decode=_restored,
                value=_value,
            )
        except CallSkipped as skipped:
            return str(skipped)
        except (NotRunning, StoreError):
            raise
        except _Halted as halted:
            raise halted.__cause__ or halted from None
        except Exception as error:  # noqa: BLE001 - of the tool
            return await self._give_up(context, error)

    async def _execute(self, context: Any, text: str) -> Any:
        """Execute the tool once; raise its own exception, or the failure that a server reports."""
        noted: list[Any] = []
        token = _REPORTED.set(noted)
        try:
            if self._tells and self._bare.timeout_seconds is None:
                output = await self._bare.on_invoke_tool(context, text)
            else:
                output = await invoke_function_tool(
                    function_tool=self._bare, context=context, arguments=text
                )
        except ToolTimeoutError as error:
            raise TimedOut(str(error)) from error
        finally:
            _REPORTED.reset(token)
        if noted:
            message = joined_texts(noted[-1].content) or "the tool says that it failed"
            raise ReportedFailure(message, output)
        return output

    async def _stand_in(self, context: Any, arguments: Mapping[str, object], again: bool) -> Any:
        """Execute the tool in place of another one, with the guardrails of a call.

        Args:
            context: of the call that the model made.
            arguments: of the tool.
            again: whether the model called this tool; the framework then guards its output.
        """
        tool = self._original
        text = json.dumps(arguments)
        own = ToolContext.from_agent_context(
            context,
            context.tool_call_id,
            context.tool_call,
            tool_name=tool.name,
            tool_arguments=text,
        )
        enabled = tool.is_enabled
        if callable(enabled):
            enabled = enabled(own, own.agent)
        if inspect.isawaitable(enabled):
            enabled = await enabled
        if not enabled:
            raise UserError(f"Tool {tool.name} is not enabled.")
        for guardrail in tool.tool_input_guardrails or ():
            verdict = await guardrail.run(ToolInputGuardrailData(own, own.agent))
            _heed(verdict, ToolInputGuardrailTripwireTriggered(guardrail, verdict))
        output = await self._execute(own, text)
        if again:
            return output
        for guardrail in tool.tool_output_guardrails or ():
            verdict = await guardrail.run(ToolOutputGuardrailData(own, own.agent, output))
            _heed(verdict, ToolOutputGuardrailTripwireTriggered(guardrail, verdict))
        return output

    async def _give_up(self, context: Any, error: Any) -> Any:
        """Handle an exception as the framework handles one of this tool."""
        tool = self._original
        text = None
        if isinstance(error, ToolTimeoutError):
            if tool.timeout_behavior == "raise_exception":
                raise error
            if tool.timeout_error_function is None:
                return default_tool_timeout_error_message(
                    tool_name=error.tool_name, timeout_seconds=error.timeout_seconds
                )
            text = tool.timeout_error_function(context, error)
            return await text if inspect.isawaitable(text) else text
        if self._tells:
            text = await maybe_invoke_function_tool_failure_error_function(
                function_tool=tool, context=context, error=error
            )
        if text is None:
            raise error
        function = resolve_function_tool_failure_error_function(tool, context)
        if isinstance(error, CallFailed) and function is default_tool_error_function:
            # It may have had its effect, and the model must not be asked to try again.
            text = str(error)
        config = context.run_config
        detail = "Tool execution failed. Error details are redacted."
        if function is not default_tool_error_function:
            if config is None or config.trace_include_sensitive_data:
                detail = str(error)
        span = get_current_span()
        if span:
            data = {"tool_name": tool.name, "error": detail}
            span.set_error({"message": "Error running tool (non-fatal)", "data": data})
        return text


def _recorded(output: Any) -> Any:
    """Return what the journal records of an output.

    Unless it is JSON, that is the text for the model, with its content.
    """
    try:
        values.encode(output, None)
    except values.NotStorable:
        parts = output if isinstance(output, list | tuple) else [output]
        if all(isinstance(each, _CONTENTS) for each in parts):
            return {_OUTPUT: "content", "value": to_jsonable_python(output)}
        content = to_jsonable_python(output, fallback=repr)
        return {_OUTPUT: "text", "value": str(output), "content": content}
    return output


def _value(output: Any) -> Any:
    """Return what a tool has said, without the content around a text."""
    return output.text if isinstance(output, ToolOutputText) else output


def _restored(recorded: Any) -> Any:
    """Return the output from its record; of an object of another class, the text for the model."""
    if not isinstance(recorded, dict) or _OUTPUT not in recorded:
        return recorded
    value = recorded["value"]
    if recorded[_OUTPUT] == "text":
        return value
    adapter = ValidToolOutputPydanticModelsTypeAdapter
    if isinstance(value, list):
        return [adapter.validate_python(each) for each in value]
    return adapter.validate_python(value)


def _heed(verdict: Any, tripwire: Exception) -> None:
    """Raise what the verdict of a tool guardrail requires, if anything."""
    if verdict.behavior["type"] == "raise_exception":
        raise _Halted from tripwire
    if verdict.behavior["type"] != "allow":
        raise tripwire
