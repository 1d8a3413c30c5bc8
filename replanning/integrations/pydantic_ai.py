"""pydantic-ai: `Agent(…, capabilities=[Replanned({"search": "web", "search_archive": "web"})])`.

Tested with pydantic-ai 2.68. See docs/integrations/pydantic_ai.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import copy
from dataclasses import dataclass, field
from itertools import count
from traceback import walk_tb
from typing import Any, Final
from uuid import NAMESPACE_URL, uuid5
from zlib import crc32

from pydantic import TypeAdapter
from pydantic_core import to_json

from replanning.engine.engine import ReplanningEngine
from replanning.errors import CallFailed, CallSkipped, NeedsHuman, NotRunning, UnknownRun
from replanning.integrations.kit import (
    METADATA,
    Arguments,
    Capabilities,
    ReportedFailure,
    SessionTask,
    TimedOut,
    call_tool,
    describe_tools,
    has_deadline,
    hinted_fields,
    missing_framework,
    named_questions,
    shown_questions,
    tool_fields,
    withdraw_questions,
)
from replanning.journal import values
from replanning.journal.records import RunOpened
from replanning.journal.store import is_valid_run_id
from replanning.plan.messages import join_names, truncate
from replanning.plan.types import RunId

try:
    from pydantic_ai._utils import abandon_threads_on_cancel
    from pydantic_ai.capabilities import AbstractCapability, CapabilityOrdering
    from pydantic_ai.exceptions import (
        ApprovalRequired,
        CallDeferred,
        ModelRetry,
        RunCancelled,
        SkipToolExecution,
        ToolFailed,
        ToolRetryError,
        UsageLimitExceeded,
    )
    from pydantic_ai.messages import (
        ModelResponse,
        ToolCallPart,
        ToolReturn,
        tool_return_content_ta,
    )
    from pydantic_ai.tools import DeferredToolRequests, RunContext, ToolDenied
    from pydantic_ai.toolsets import FunctionToolset, WrapperToolset

    _USED: Final = [
        getattr(AbstractCapability, name) for name in ("for_run", "wrap_run", "get_wrapper_toolset")
    ]
    _MANAGER: Final = RunContext.__dataclass_fields__["tool_manager"]
except (ImportError, AttributeError, KeyError) as error:
    raise missing_framework(__name__, "pydantic-ai (tested with 2.68)", error) from error

_PASSES: Final = (
    CallDeferred,
    ApprovalRequired,
    SkipToolExecution,
    ToolRetryError,
    RunCancelled,
    UsageLimitExceeded,
)

_MCP: Final = "pydantic_ai.mcp"
"""The framework's module of MCP clients, which are installed separately."""

_RESULT: Final = "$pydantic-ai"
"""Key that marks a recorded result that is not JSON; its value is the kind of result."""

_TOOL_RETURN: Final[TypeAdapter[Any]] = TypeAdapter(ToolReturn)

_MAX_OBJECTIVE_CHARS: Final = 500


class Replanned(AbstractCapability[Any]):  # type: ignore[misc]
    """Capability of an agent: the engine retries, replaces or skips a tool that fails, or asks.

    Each run of the agent is a session of the engine with the same id. A run that continues one
    stopped by a request for approval, or by an error, resumes its session: finished calls are not
    executed again.

    Args:
        capabilities: by the name of a tool, its capability, or the fields that `replanning.tool`
            takes. Tools of the same capability can stand in for one another. The metadata of a tool
            may state fields, too, under `replanning`.
        engine: the engine; by default one with its defaults.
        approvals: whether a question to a person becomes a request for the approval of the call; by
            default if `DeferredToolRequests` is among the output types of the agent. Otherwise the
            agent sees the exception of its tool. With False nobody is asked, not even through the
            gate of the engine.
    """

    def __init__(
        self,
        capabilities: Capabilities | None = None,
        *,
        engine: ReplanningEngine | None = None,
        approvals: bool | None = None,
    ) -> None:
        self.engine = ReplanningEngine() if engine is None else engine
        self.capabilities = capabilities
        self.approvals = approvals
        self._run: _AgentRun | None = None

    def get_ordering(self) -> Any:
        """Place this capability next to the tools, inside all others."""
        return CapabilityOrdering(position="innermost")

    async def for_run(self, ctx: Any) -> Replanned:
        """Return the capability of one run."""
        made = copy(self)
        made._run = _AgentRun(made)
        return made

    def get_wrapper_toolset(self, toolset: Any) -> Any:
        """Wrap the tools of the agent."""
        return toolset if self._run is None else _ReplannedToolset(toolset, run=self._run)

    async def wrap_run(self, ctx: Any, *, handler: Any) -> Any:
        """Keep a session open while the agent runs."""
        if self._run is None:
            return await handler()
        try:
            result = await handler()
        except BaseException as error:
            with suppress(Exception):  # the exception of the agent is the one to raise
                await self._run.end(f"the agent raised {type(error).__name__}")
            raise
        output = getattr(result, "output", None)
        await self._run.end(_awaited(output) if isinstance(output, DeferredToolRequests) else "")
        return result


class _AgentRun:
    """One run of an agent, and its session."""

    def __init__(self, owner: Replanned) -> None:
        self._engine = owner.engine
        self._capabilities = owner.capabilities
        self._approvals = owner.approvals
        self._task: SessionTask | None = None
        # Whether a question became a request for approval, perhaps in an earlier run.
        self._asked = False
        self._resumed = False
        self._numbers = count(1)
        self._dispatched: set[str] = set()

    @property
    def is_open(self) -> bool:
        """Whether the session was opened."""
        return self._task is not None

    def open(self, ctx: Any, tools: Mapping[str, Any], registered: set[str]) -> None:
        """Open the session with the tools of the first step, which may hide registered ones."""
        fields: dict[str, dict[str, object]] = {}
        for name, tool in tools.items():
            definition = tool.tool_def
            if definition.kind not in ("function", "unapproved"):
                continue
            metadata = definition.metadata or {}
            fields[name] = tool_fields(
                definition.description,
                definition.parameters_json_schema,
                kind="function",
                # It stands in for another one only if a person agrees.
                dangerous=definition.kind == "unapproved",
                stated=metadata.get(METADATA),
                **hinted_fields(metadata.get("annotations")),
            )
        absent = registered - set(tools)
        described = describe_tools(fields, self._capabilities, noun="function tool", absent=absent)
        run_id = _first_run(ctx)
        self._resumed = run_id != ctx.run_id
        self._asked = self._resumed
        if not is_valid_run_id(RunId(run_id)):
            run_id = str(uuid5(NAMESPACE_URL, run_id))
        self._task = SessionTask(
            self._engine.session(
                self._objective(ctx, run_id),
                tools=described,
                run_id=run_id,
                asks=self._asks(ctx),
                gate=self._approvals is not False,
            )
        )

    async def end(self, pause_reason: str) -> None:
        """End the session, or leave it paused for this reason."""
        if self._task is not None:
            if self._asked and not pause_reason:
                withdraw_questions(self._engine, (await self._task.session()).run.id)
            await self._task.end(pause_reason)

    def _objective(self, ctx: Any, run_id: str) -> str:
        try:
            opened = next((record.body for record in self._engine.store.read(RunId(run_id))), None)
        except UnknownRun:
            opened = None
        if isinstance(opened, RunOpened):
            return opened.plan.goal.objective
        prompt = ctx.prompt or ()
        if isinstance(prompt, str):
            prompt = [prompt]
        words = " ".join(part for part in prompt if isinstance(part, str)).strip()
        if words:
            return truncate(words, _MAX_OBJECTIVE_CHARS)
        return f"run {getattr(ctx.agent, 'name', None) or 'an agent'}"

    async def call(
        self, toolset: _ReplannedToolset, name: str, arguments: Any, ctx: Any, tool: Any
    ) -> Any:
        """Call a tool, or what replaces it."""
        if ctx.tool_call_id in self._dispatched:
            return await toolset.wrapped.call_tool(name, arguments, ctx, tool)
        assert self._task is not None, "tools are listed before they are called"
        approval = {}
        if isinstance(ctx.tool_call_metadata, Mapping):
            approval = ctx.tool_call_metadata.get(METADATA, {})
        session = await self._task.session()
        executed = False

        async def execute(other: str, values: Arguments) -> object:
            nonlocal executed
            # An approval applies to the first execution: of this tool, or of the stand-in at which
            # the agent stopped.
            approved = ctx.tool_call_approved and not executed
            executed = True
            # At its deadline, a function that hangs in a thread is abandoned there.
            with abandon_threads_on_cancel() if has_deadline(session) else nullcontext():
                try:
                    if other != name or values != arguments:
                        return await self._dispatch(other, values, ctx, approved=approved)
                    return await toolset.wrapped.call_tool(name, arguments, ctx, tool)
                except ModelRetry as retry:
                    failure = _failure_behind(retry)
                    if failure is None:
                        raise
                    raise failure from retry

        try:
            return await call_tool(
                self._engine,
                session,
                name,
                arguments,
                execute,
                key=_call_key(ctx, name, arguments),
                passes=_PASSES if ctx.last_attempt else (*_PASSES, ModelRetry),
                asks=self._asks(ctx),
                approved=ctx.tool_call_approved,
                approved_questions=named_questions(approval.get("questions")),
                resumed=self._resumed,
                encode=_recorded,
                decode=_restored,
                value=_value,
            )
        except NeedsHuman as error:
            self._asked = True
            shown = shown_questions(self._engine, session.run.id, error.questions)
            raise ApprovalRequired(metadata={METADATA: {"questions": shown}}) from error
        except CallSkipped as skipped:
            return str(skipped)
        except NotRunning as error:
            if not (ctx.tool_call_approved and session.run.ended):
                raise
            raise CallFailed(
                f"the run of this approval has ended ({session.run.result.status}): an approval"
                " executes its call once, and the output is returned only for the same arguments;"
                f" let the model call {name!r} again"
            ) from error

    async def _dispatch(
        self, name: str, arguments: Arguments, ctx: Any, *, approved: bool
    ) -> object:
        """Call another tool as the framework does, with its own context, hooks and span."""
        manager = ctx.tool_manager
        definition = next(each for each in manager.tool_defs if each.name == name)
        call_id = f"{ctx.tool_call_id}-{next(self._numbers)}"
        self._dispatched.add(call_id)
        try:
            # Before a tool that needs approval stands in, the engine has asked a person.
            result = await manager.handle_call(
                ToolCallPart(name, dict(arguments), tool_call_id=call_id),
                approved=approved or definition.kind == "unapproved",
                wrap_validation_errors=False,
            )
        finally:
            self._dispatched.discard(call_id)
        if isinstance(result, ToolDenied):
            raise ToolFailed(result.message)
        return result

    def _asks(self, ctx: Any) -> bool:
        if self._approvals is not None:
            return self._approvals
        output = getattr(ctx.agent, "output_type", None)
        return DeferredToolRequests in (output if isinstance(output, Sequence) else (output,))


@dataclass
class _ReplannedToolset(WrapperToolset[Any]):  # type: ignore[misc]
    """Tools of an agent whose calls go through a session."""

    run: _AgentRun = field(kw_only=True)

    async def get_tools(self, ctx: Any) -> Any:
        """Return the tools of a step."""
        tools = await super().get_tools(ctx)
        if not self.run.is_open:
            registered = set[str]()
            self.apply(
                lambda each: (
                    registered.update(each.tools) if isinstance(each, FunctionToolset) else None
                )
            )
            self.run.open(ctx, tools, registered)
        return tools

    async def call_tool(self, name: str, tool_args: Any, ctx: Any, tool: Any) -> Any:
        """Call a tool, or what replaces it."""
        return await self.run.call(self, name, tool_args, ctx, tool)


def _awaited(requests: DeferredToolRequests) -> str:
    """Return why an agent waits, with the names of the tools."""
    waits: list[str] = []
    if requests.approvals:
        waits.append(f"the approval of {_tool_names(requests.approvals)}")
    if requests.calls:
        waits.append(f"the results of {_tool_names(requests.calls)}")
    return f"the agent waits for {' and '.join(waits)}"


def _tool_names(calls: Sequence[ToolCallPart]) -> str:
    """Return the names of the tools of calls, each once."""
    names = dict.fromkeys(call.tool_name for call in calls)
    return join_names([repr(name) for name in names], 5)


def _recorded(result: Any) -> Any:
    """Return the recorded form of a result: JSON, or its form in a message history."""
    try:
        values.encode(result, None)
    except values.NotStorable:
        is_return = isinstance(result, ToolReturn)
        adapter = _TOOL_RETURN if is_return else tool_return_content_ta
        try:
            content = adapter.dump_python(result, mode="json")
        except ValueError:
            # pydantic cannot serialise it, so a message history cannot hold it either.
            return result
        return {_RESULT: "return" if is_return else "content", "value": content}
    return result


def _value(result: Any) -> Any:
    """Return the output of a tool, without what it adds for the program."""
    return result.return_value if isinstance(result, ToolReturn) else result


def _restored(recorded: Any) -> Any:
    """Restore a result from its recorded form, as from a stored message history."""
    if not isinstance(recorded, dict) or _RESULT not in recorded:
        return recorded
    adapter = _TOOL_RETURN if recorded[_RESULT] == "return" else tool_return_content_ta
    return adapter.validate_python(recorded["value"])


def _failure_behind(retry: Any) -> Exception | None:
    """Return the failure that the framework turned into a request to the model to try again.

    None if the tool itself made the request.
    """
    raised_in = ""
    for frame, _ in walk_tb(retry.__traceback__):
        raised_in = frame.f_globals.get("__name__", "")
    if raised_in == _MCP:  # a result with `isError`, or an error of the protocol
        return ReportedFailure(retry.message)
    if raised_in == FunctionToolset.__module__ and isinstance(retry.__context__, TimeoutError):
        return TimedOut(retry.message)
    return None


def _first_run(ctx: Any) -> str:
    """Return the id of this run, or of the first run in the chain that it continues.

    Each run in the chain stopped with unanswered calls.
    """
    run_id = str(ctx.run_id)
    messages = [each for each in ctx.messages if each.run_id != ctx.run_id]
    while messages:
        answered: set[str] = set()
        while messages and not isinstance(messages[-1], ModelResponse):
            answered.update(getattr(part, "tool_call_id", "") for part in messages.pop().parts)
        if not messages or not messages[-1].run_id:
            break
        if answered.issuperset(call.tool_call_id for call in messages[-1].tool_calls):
            break
        run_id = messages[-1].run_id
        messages = messages[: next(n for n, each in enumerate(messages) if each.run_id == run_id)]
    return run_id


def _call_key(ctx: Any, name: str, arguments: object) -> str:
    """Return the key of a call, shared by all runs that have its message; ids alone may recur."""
    at = ""
    for message in reversed(ctx.messages):
        if isinstance(message, ModelResponse):
            at = message.timestamp.isoformat()
            break
    called = to_json([name, arguments], fallback=_type_name, inf_nan_mode="strings")
    return f"{at} {ctx.tool_call_id} {crc32(called):08x}"


def _type_name(value: object) -> str:
    return type(value).__name__
