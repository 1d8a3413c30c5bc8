"""OpenAI Agents SDK: `async with replanned(agent, capabilities={…}) as agent:`.

Tested with openai-agents 0.24. See docs/integrations/openai_agents.md.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any, Final, TypeVar

from pydantic_core import from_json, to_jsonable_python

from replanning.engine.engine import ReplanningEngine
from replanning.engine.session import Session
from replanning.errors import CallFailed, CallSkipped, NotRunning, StoreError
from replanning.integrations.kit import (
    Arguments,
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
        FunctionTool,
        ModelBehaviorError,
        RunContextWrapper,
        RunResultStreaming,
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
    )
    from agents._public_agent import get_public_agent, set_public_agent
    from agents.run import AgentRunner
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
        __name__, "the OpenAI Agents SDK (tested with openai-agents 0.24)", error
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
    """Attach an agent: within the block, the engine retries or replaces tools that fail.

    Every agent that runs in the block's async task, or in tasks created there, is attached, except
    within a tool. The block is one session. It succeeds if the last run in the block had a final
    output. It is `paused` if that run was interrupted, or an exception leaves the block.

    Args:
        agent: the agent; the block gets it unchanged.
        engine: the engine; by default one with its defaults.
        capabilities: by the name of a tool, its capability, or the fields that `replanning.tool`
            takes. Tools of the same capability can stand in for one another.
        agents: agents that are reached through `handoff(…)`, so that their tools are known from the
            start.
        objective: what the agent is for; by default its name.
        thread: the id of a conversation; its last session is resumed unless it has ended. Approved
            calls that any of its sessions has finished return their recorded output.
        context: the context of the run, for the tool filters of MCP servers.
        approvals: whether a question to a person goes to the gate of the engine. Otherwise the
            agent sees the exception of its tool.

    Raises:
        RunOwned: another process owns the session of this thread.
        StoreError: the session of this thread has another objective, or the store fails.
        ValueError: capabilities name tools that do not exist or are not attached, or a field is not
            valid for a tool.
    """
    engine = engine or ReplanningEngine()
    block = _Block(engine, keyed=thread is not None)
    _patch_framework()
    token = _BLOCK.set(block)
    try:
        await block.describe([agent, *agents], RunContextWrapper(context))
        tools = describe_tools(block.described, capabilities, noun="attached function tool")
        objective = objective or f"Run of the agent {agent.name}"  # type: ignore[attr-defined]
        run_id = None if thread is None else thread_run(engine, thread)
        async with engine.session(
            objective, tools=tools, run_id=run_id, passes=_PASSES, gate=approvals
        ) as session:
            block.session = session
            try:
                yield agent
            finally:
                block.session = None
            if not block.has_final_output():
                session.run.pause("the agent has no final output yet")
    finally:
        with suppress(ValueError):  # a generator may be closed in another context
            _BLOCK.reset(token)


@cache
def _patch_framework() -> None:
    """Patch the framework to look for a block when it runs an agent, and when it lists tools.

    Its classes are patched once, for good: the user's agents stay unchanged, and their clones and
    handoff targets are attached as well.
    """
    list_tools = Agent.get_all_tools
    list_mcp_tools = Agent.get_mcp_tools
    run = AgentRunner.run
    run_streamed = AgentRunner.run_streamed

    @wraps(list_tools)
    async def list_attached_tools(agent: Any, context: Any) -> list[Any]:
        tools: list[Any] = await list_tools(agent, context)
        block = _open_block()
        if block is None:
            return tools
        owned = block.tools_of(agent)
        return [block.attach(tool, owned) for tool in tools]

    @wraps(list_mcp_tools)
    async def list_noting_mcp_tools(agent: Any, context: Any) -> list[Any]:
        block = _BLOCK.get()
        if block is None or not agent.mcp_servers:
            found: list[Any] = await list_mcp_tools(agent, context)
            return found
        listing = copy.copy(agent)
        listing.mcp_servers = [_Server(each) for each in agent.mcp_servers]
        set_public_agent(listing, get_public_agent(agent))  # the servers' tool filters see it
        owned = block.tools_of(agent)
        try:
            owned.listed = await list_mcp_tools(listing, context)
        except Exception:
            # After a server has ended, the model must still get the output of the stand-in.
            if not owned.listed or block.session is None:
                raise
        return owned.listed

    @wraps(run)
    async def run_noted(*args: Any, **kwargs: Any) -> Any:
        with _outermost_run() as results:
            results.append(await run(*args, **kwargs))
        return results[0]

    @wraps(run_streamed)
    def run_streamed_noted(*args: Any, **kwargs: Any) -> Any:
        with _outermost_run() as results:
            results.append(run_streamed(*args, **kwargs))
        return results[0]

    Agent.get_all_tools = list_attached_tools
    Agent.get_mcp_tools = list_noting_mcp_tools
    AgentRunner.run = run_noted
    AgentRunner.run_streamed = run_streamed_noted


@contextmanager
def _outermost_run() -> Iterator[list[Any]]:
    """Yield a list for the result of a run; the block keeps it unless another run encloses it."""
    results: list[Any] = []
    block = _open_block()
    if block is None or block is _RUNNING.get():
        yield results
        return
    block.results = results
    token = _RUNNING.set(block)
    try:
        yield results
    finally:
        _RUNNING.reset(token)


def _open_block() -> _Block | None:
    """Return the block in whose context this runs, if its session is open."""
    block = _BLOCK.get()
    if block is None or block.session is None:
        return None
    return block


class _Halted(Exception):
    """A tool guardrail halts the run of the agent; the cause is the exception to raise."""


_PASSES: Final = (_Halted, ModelBehaviorError)


_CONTENTS: Final = (ToolOutputText, ToolOutputImage, ToolOutputFileContent)

_OUTPUT: Final = "$openai"
"""Key that marks a recorded output that is not JSON; its value is the kind of output."""

_BLOCK: Final[ContextVar[_Block | None]] = ContextVar("replanning_openai_agents", default=None)
"""The block that attaches agents in this context; None within a tool."""

_RUNNING: Final[ContextVar[_Block | None]] = ContextVar("replanning_running", default=None)
"""The block of the outermost run; results of runs within it, as of guardrails, are not kept."""

_REPORTED: Final[ContextVar[list[Any] | None]] = ContextVar("replanning_reported", default=None)
"""Error results of MCP servers for the tool that is being executed."""


class _Server:
    """MCP server whose error results are noted before the framework turns them into outputs."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    async def call_tool(self, *args: Any, **options: Any) -> Any:
        """Call a tool of the server, and note an error result."""
        result = await self._server.call_tool(*args, **options)
        noted = _REPORTED.get()
        # Version 1 of the SDK uses `isError`; version 2 warns about that name.
        named = "is_error" if hasattr(result, "is_error") else "isError"
        if noted is not None and getattr(result, named, None) is True:
            noted.append(result)
        return result


@dataclass(eq=False)
class _AgentTools:
    """The attached tools of an agent.

    Attributes:
        agent: the agent; keeping it alive keeps its id unique.
        own: the tools by name.
        listed: the last list of tools of its MCP servers.
    """

    agent: Any
    own: dict[str, _Tool] = field(default_factory=dict)
    listed: list[Any] = field(default_factory=list)


class _Block:
    """The session of one block, the tools of the agents in it, and the result of its last run."""

    def __init__(self, engine: ReplanningEngine, *, keyed: bool) -> None:
        self.engine = engine
        self.keyed = keyed
        self.session: Session | None = None
        self.described: dict[str, dict[str, object]] = {}
        self.tools: dict[str, _Tool] = {}
        self.results: list[Any] | None = None
        self._agents: dict[int, _AgentTools] = {}

    async def describe(self, agents: Sequence[Any], context: Any) -> None:
        """Describe the tools of agents and of their handoff targets."""
        family = list(agents)
        for agent in family:  # grows while it is iterated
            owned = self.tools_of(agent)
            for tool in (*agent.tools, *await agent.get_mcp_tools(context)):
                self.attach(tool, owned)
            for each in agent.handoffs:
                if isinstance(each, Agent) and all(each is not other for other in family):
                    family.append(each)

    def tools_of(self, agent: Any) -> _AgentTools:
        """Return the attached tools of an agent."""
        agent = get_public_agent(agent)
        return self._agents.setdefault(id(agent), _AgentTools(agent))

    def attach(self, original: Any, owned: _AgentTools) -> Any:
        """Return a copy of a tool whose calls go through the session.

        Hosted tools, and those whose approval a function decides, are returned unchanged.
        """
        if not isinstance(original, FunctionTool) or callable(original.needs_approval):
            return original
        name = original.qualified_name
        known = owned.own.get(name)
        if known is not None and known.original is original:
            return known.attached
        tool = _Tool(self, original, owned.own)
        owned.own[name] = tool
        self.tools.setdefault(name, tool)
        if original.is_enabled is not False and name not in self.described:
            # A tool that needs approval stands in for another only if a person agrees.
            dangerous = bool(original.needs_approval)
            self.described[name] = tool_fields(
                original.description,
                original.params_json_schema,
                kind="function",
                dangerous=dangerous,
                **hinted_fields(getattr(original, "mcp_annotations", None)),
            )
        return tool.attached

    def has_final_output(self) -> bool:
        """Return whether the last run had a final output; a resumed conversation has none yet."""
        if self.results is None:
            return not self.keyed
        if not self.results or self.results[0].interruptions:
            return False
        [result] = self.results
        return not isinstance(result, RunResultStreaming) or result.final_output is not None


class _Tool:
    """Invoker of the copy of a tool: makes a call of the session, which executes the original.

    Args:
        block: the block.
        original: the tool.
        own: the tools of the same agent, which take precedence over those of others.

    Attributes:
        attached: the copy.
    """

    # The framework inspects the signature and the annotations before each call.
    __signature__ = inspect.signature(lambda context, text: None)

    def __init__(self, block: _Block, original: Any, own: Mapping[str, _Tool]) -> None:
        self._block = block
        self.original = original
        self._own = own
        self.attached = copy.copy(original)
        self.attached.on_invoke_tool = self
        self.attached.timeout_seconds = None  # `_bare` has it, so it limits each attempt
        self._bare = set_function_tool_failure_error_function(copy.copy(original), None)
        self._bare.timeout_behavior = "raise_exception"
        # The wrapper that reports failures to the model is bound to each copy of a tool; a function
        # of the user is not.
        invoker = original.on_invoke_tool
        is_wrapped = self._bare.on_invoke_tool is not invoker
        self._reports_failures = is_wrapped and not inspect.ismethod(invoker)
        origin = get_function_tool_origin(original)
        is_agent = origin is not None and origin.type is ToolOriginType.AGENT_AS_TOOL
        # Only an approved call is repeated with the same id, when a saved state is resumed.
        self._keyed = block.keyed and original.needs_approval and not is_agent

    async def __call__(self, context: Any, text: str) -> Any:
        """Execute the tool, or what replaces it, as the model calls it."""
        block = self._block
        session = block.session
        name = self.original.qualified_name
        arguments = None
        with suppress(ValueError):
            arguments = from_json(text or "{}")
        # The tool itself reports malformed arguments to the model.
        if session is None or not isinstance(arguments, dict):
            return await invoke_function_tool(
                function_tool=self.original, context=context, arguments=text
            )

        async def execute(called: str, values: Arguments) -> object:
            if called == name and values == arguments:
                return await self._execute(context, text)
            stand_in = self._own.get(called) or block.tools[called]
            return await stand_in._stand_in(context, values, called == name)

        key = ""
        if self._keyed:
            item = getattr(context.tool_call, "id", None) or ""
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            key = f"{context.tool_call_id} {item} {digest}"
        try:
            if key and not session.is_recorded(key):
                earlier = earlier_output(block.engine, session.run.id, key)
                if earlier is not None:
                    return _restored(earlier[0])
            return await call_tool(
                block.engine,
                session,
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
        block = _BLOCK.set(None)
        try:
            if self._reports_failures and self._bare.timeout_seconds is None:
                output = await self._bare.on_invoke_tool(context, text)
            else:
                output = await invoke_function_tool(
                    function_tool=self._bare, context=context, arguments=text
                )
        except ToolTimeoutError as error:
            raise TimedOut(str(error)) from error
        finally:
            _BLOCK.reset(block)
            _REPORTED.reset(token)
        if noted:
            message = joined_texts(noted[-1].content) or "the tool gave no reason"
            raise ReportedFailure(message, output)
        return output

    async def _stand_in(self, context: Any, arguments: Arguments, again: bool) -> Any:
        """Execute the tool in place of another one, with the guardrails of a call.

        Args:
            context: the context of the model's call.
            arguments: the arguments of this tool.
            again: whether the model called this tool; the framework then guards its output.
        """
        tool = self.original
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
        """Handle an exception as the framework would handle one of this tool."""
        tool = self.original
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
        if self._reports_failures:
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
    """Return the recorded form of an output: JSON, or the text for the model and the content."""
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
    """Return the output of a tool, without the object around a text."""
    return output.text if isinstance(output, ToolOutputText) else output


def _restored(recorded: Any) -> Any:
    """Restore an output from its recorded form; some objects become the text for the model."""
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
