"""Google ADK: `App(name=…, root_agent=agent, plugins=[Replanned({"search": "web", "search_archive": "web"})])`.

Tested with google-adk 2.13. See docs/integrations/google_adk.md for approvals, resumed invocations, and what is lost.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 # ADK runs on asyncio alone, and a session needs a task of its own
import contextvars
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from itertools import count
from typing import Any, Final

from replanning.engine.engine import ReplanningEngine
from replanning.engine.functions import FunctionTool as DescribedTool
from replanning.engine.session import Session
from replanning.errors import CallSkipped, NeedsHuman, StaleAnswer, UnknownQuestion
from replanning.integrations.kit import (
    UNFINISHED,
    Capabilities,
    ReportedFailure,
    SessionTask,
    describe_tools,
    missing_framework,
    reported_result,
    shown_questions,
    tool_fields,
)
from replanning.journal.records import QuestionVerdict
from replanning.plan.types import RunId

try:
    from google.adk.agents import BaseAgent
    from google.adk.agents.invocation_context import LlmCallsLimitExceededError
    from google.adk.agents.readonly_context import ReadonlyContext
    from google.adk.models import LlmRequest
    from google.adk.plugins.base_plugin import BasePlugin
    from google.adk.tools import AgentTool, BaseTool, FunctionTool, ToolContext
    from google.adk.tools.base_toolset import BaseToolset
    from google.adk.tools.transfer_to_agent_tool import TransferToAgentTool
    from google.adk.workflow import BaseNode

    _USED: Final = (
        *(
            BasePlugin.before_run_callback,
            BasePlugin.before_tool_callback,
            BasePlugin.on_event_callback,
        ),
        *(BaseTool.run_async, BaseTool.check_require_confirmation, LlmRequest.append_tools),
        *(ToolContext.tool_confirmation, ToolContext.request_confirmation, ToolContext.node),
    )
except (ImportError, AttributeError) as error:
    raise missing_framework(
        "replanning.integrations.google_adk",
        "Google ADK (tested with google-adk 2.13)",
        "google-adk",
        error,
    ) from error

METADATA: Final = "replanning"
"""Key in the `custom_metadata` of a tool, for fields of its description, and in the payload of a request to confirm."""

_DELTAS: Final = frozenset({"state_delta", "artifact_delta"})
"""The fields of the actions of a call that say what it has changed, rather than what it asks for."""

_MAX_OBJECTIVE_CHARS: Final = 500


def reports_failure(result: object) -> bool:
    """Return whether a result says that the tool failed, in one of the forms that tools of ADK use.

    These are `{"status": "error"}`, `{"error": …}`, and `isError` of MCP; not the complaints about arguments with which
    ADK answers the model.
    """
    if not isinstance(result, Mapping):
        return False
    said = result.get("error")
    own = bool(said) and not str(said).startswith("Invoking `")
    return (
        own
        or result.get("status") == "error"
        or any(result.get(key) is True for key in ("isError", "is_error"))
    )


class Replanned(BasePlugin):  # type: ignore[misc] # its types may not be installed
    """Plugin of a runner: a tool that fails is replaced, tried again, skipped or put to a person by the engine.

    Each invocation in which a tool is called is a session of the engine with the same id. The run that resumes the
    invocation resumes its session.

    Args:
        capabilities: by the name of a tool, its capability, or the fields that `replanning.tool` takes. Tools of the same
            capability can stand in for one another. The `custom_metadata` of a tool may state fields, too, under
            `replanning`.
        engine: the engine; by default one with its defaults.
        agents: agents in a `Workflow`, which plugins do not see, so that their tools are known from the start.
        approvals: whether a question to a person becomes a request to confirm the call. Otherwise the agent sees the
            exception of its tool.
        is_failure: whether a result of a tool says that the tool failed.
        name: of the plugin, for a runner with several of them.

    Raises:
        TypeError: an argument has another type.
    """

    def __init__(
        self,
        capabilities: Capabilities | None = None,
        *,
        engine: ReplanningEngine | None = None,
        agents: Sequence[BaseAgent] = (),
        approvals: bool = True,
        is_failure: Callable[[object], bool] = reports_failure,
        name: str = "replanning",
    ) -> None:
        super().__init__(name)
        self.engine = ReplanningEngine() if engine is None else engine
        self.capabilities = dict(capabilities or {})
        self.agents = tuple(agents)
        self.approvals = approvals
        self.is_failure = is_failure
        self._runs: dict[str, _Run] = {}

    async def before_run_callback(self, *, invocation_context: Any) -> None:
        """Learn which tools the agents of an invocation have.

        Raises:
            ValueError: capabilities name a tool that does not exist, or a field is not valid.
        """
        await self._end(invocation_context, "a run with the same id begins")
        run = _Run(self, invocation_context)
        await run.describe(invocation_context, known=not run.nested)
        self._runs[invocation_context.invocation_id] = run

    async def before_agent_callback(self, *, agent: Any, callback_context: Any) -> None:
        """Learn which tools an agent of a workflow has, and watch for cancellation, of which plugins are not told."""
        if run := self._runs.get(callback_context.invocation_id):
            run.watch(asyncio.current_task())
            if agent.name not in run.tools:
                await run.describe(callback_context.get_invocation_context(), known=False)

    async def before_tool_callback(self, *, tool: Any, tool_args: Any, tool_context: Any) -> None:
        """Let the session execute the tool when the framework does."""
        run = self._runs.get(tool_context.invocation_id)
        if run is not None and not isinstance(tool, TransferToAgentTool):
            _CALL.set((run, tool))
            attached = vars(tool).get("run_async")
            if not isinstance(attached, _Attached) or attached.tool is not tool:
                tool.run_async = _Attached(tool)

    async def on_event_callback(self, *, invocation_context: Any, event: Any) -> None:
        """Note whether the invocation waits for an answer, and its last event."""
        if run := self._runs.get(invocation_context.invocation_id):
            run.waits = run.waits or bool(event.long_running_tool_ids)
            run.last_event = event

    async def after_run_callback(self, *, invocation_context: Any) -> None:
        """End the session; it is left `paused` if the invocation waits for an answer."""
        await self._end(invocation_context, "")

    async def on_run_error_callback(self, *, invocation_context: Any, error: Exception) -> None:
        """Leave the session `paused`, so that the invocation can be resumed."""
        await self._end(invocation_context, f"it failed: {type(error).__name__}")

    async def close(self) -> None:
        """Leave all sessions."""
        for run in list(self._runs.values()):
            await self._end(run.context, "the runner was closed")

    def forget(self, run: _Run) -> None:
        """Forget a run whose session has ended."""
        if self._runs.get(run.context.invocation_id) is run:
            del self._runs[run.context.invocation_id]

    async def _end(self, context: Any, pause_reason: str) -> None:
        if run := self._runs.pop(context.invocation_id, None):
            await run.end(pause_reason)


_CALL: Final[contextvars.ContextVar[tuple[_Run, Any] | None]] = contextvars.ContextVar(
    "replanning_call", default=None
)
"""The run, and the tool that the framework is about to execute; None as the tool while the session executes it."""


class _Attached:
    """The `run_async` of a tool object: a call of the session if the framework makes it, or else the original."""

    def __init__(self, tool: Any) -> None:
        own = vars(tool).get("run_async")
        self.tool = tool
        # A copy of a tool that was attached has the attribute of the first one.
        self._execute = (
            type(tool).run_async.__get__(tool) if isinstance(own, _Attached) else tool.run_async
        )

    async def __call__(self, *, args: Any, tool_context: Any) -> Any:
        run, tool = _CALL.get() or (None, None)
        if run is None or tool is not self.tool:
            return await self._execute(args=args, tool_context=tool_context)
        _CALL.set((run, None))
        return await run.call(tool, args, tool_context)


class _Interrupted(Exception):
    """A tool waits for a confirmation or for credentials."""

    def __init__(self, response: Any) -> None:
        super().__init__("the tool waits for a person")
        self.response = response


class _Run:
    """One invocation, and its session."""

    def __init__(self, owner: Replanned, context: Any) -> None:
        self.context, self._owner = context, owner
        self._watched: asyncio.Task[Any] | None = None
        self._around: contextvars.Context | None = None
        self.waits = False
        self.last_event: Any = None
        self.nested = _CALL.get() is not None
        self.tools: dict[str, dict[str, Any]] = {}
        self._fields: dict[str, dict[str, object]] = {}
        self._described: list[DescribedTool[..., Any]] = []
        self._task: SessionTask | None = None

    async def describe(self, context: Any, *, known: bool) -> None:
        """Describe the tools of the agent that runs, and of the others of its tree, but no toolsets of those.

        Args:
            context: of the invocation.
            known: whether capabilities must name tools of this tree; false if some of its tools are not known.

        Raises:
            ValueError: capabilities name a tool that does not exist, or a field is not valid.
        """
        family = [
            each.root_agent for each in (context.agent, *self._owner.agents) if each is not None
        ]
        known = known and context.agent is not None
        for agent in family:  # which grows
            own = self.tools.setdefault(agent.name, {})
            tools: list[Any] = []
            for item in getattr(agent, "tools", ()):
                if isinstance(item, BaseToolset) and agent.name == getattr(
                    context.agent, "name", None
                ):
                    with suppress(
                        Exception
                    ):  # the framework reports it, and goes on without these tools
                        tools += await item.get_tools_with_prefix(ReadonlyContext(context))
                elif isinstance(item, BaseTool):
                    tools.append(item)
                elif callable(item) and not isinstance(item, BaseNode):
                    tools.append(FunctionTool(item))
                known = known and not isinstance(item, (BaseNode, BaseToolset))
            for tool in tools:
                own[tool.name] = tool
                if tool.name not in self._fields and (fields := _fields(tool)) is not None:
                    self._fields[tool.name] = fields
            below = [
                *agent.sub_agents,
                *(tool.agent for tool in tools if isinstance(tool, AgentTool)),
            ]
            family += [each for each in below if all(each is not other for other in family)]
            known = known and (
                hasattr(agent, "tools") or bool(below)
            )  # others may run agents that nobody sees
        capabilities = self._owner.capabilities
        if not known:
            capabilities = {
                name: stated for name, stated in capabilities.items() if name in self._fields
            }
        self._described = describe_tools(self._fields, capabilities)

    async def _open(self) -> Session:
        """Open the session at the first call, or again if that failed."""
        if (task := self._task) is None:
            run_id, objective = self._identity()
            opened = self._owner.engine.session(
                objective,
                tools=self._described,
                run_id=run_id,
                passes=_PASSES,
                asks=self._owner.approvals,
            )
            task = self._task = (self._around or contextvars.copy_context()).run(
                SessionTask, opened
            )
        try:
            return await task.session()
        except Exception:
            self._task = None if self._task is task else self._task
            raise

    def watch(self, task: asyncio.Task[Any] | None) -> None:
        """Leave the session if this task, in which the first agent runs, is cancelled; its span is around the session."""
        if self._watched is None and task is not None:
            self._watched, self._around = task, contextvars.copy_context()
            task.add_done_callback(self._follow)

    def _follow(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            is_final = self.last_event is not None and self.last_event.is_final_response()
            reason = self._why("" if is_final else "it was cancelled")
            ended = task if self._task is None else self._task.leave(reason)
            ended.add_done_callback(lambda _: self._owner.forget(self))

    async def end(self, pause_reason: str) -> None:
        """End the session, or leave it paused for this reason, or because the invocation waits."""
        if self._watched is not None:
            self._watched.remove_done_callback(self._follow)
        if self._task is not None:
            await self._task.end(self._why(pause_reason))

    def _why(self, pause_reason: str) -> str:
        return pause_reason or ("it waits for an answer" if self.waits else "")

    def _identity(self) -> tuple[str, str]:
        """Return the id of the run, that of the invocation, with a number if an earlier run of it has ended; its objective."""
        first, events = str(self.context.invocation_id), self.context.session.events
        resumed = any(each.invocation_id == first and each.author != "user" for each in events)
        known = {each.run: each for each in self._owner.engine.store.runs()} if resumed else {}
        ids = (RunId(f"{first}.{number}" if number > 1 else first) for number in count(1))
        run_id = next(each for each in ids if each not in known or known[each].status in UNFINISHED)
        if run_id in known:
            return run_id, known[run_id].objective
        parts = getattr(self.context.user_content, "parts", None) or ()
        words = " ".join(part.text for part in parts if part.text).strip()
        return run_id, words[
            :_MAX_OBJECTIVE_CHARS
        ] or f"run {getattr(self.context.agent, 'name', 'a workflow')}"

    async def call(self, tool: Any, arguments: dict[str, Any], context: Any) -> Any:
        """Call a tool, or what replaces it, in the context of the call.

        Raises:
            Exception: of the tool; no alternative is left.
        """
        session = await self._open()
        call_id, answer = context.function_call_id or "", context.tool_confirmation
        asked = _asked(context) if answer is not None else {}
        for question in asked.get("questions", ()):
            with suppress(StaleAnswer, UnknownQuestion):  # it was answered elsewhere
                verdict: QuestionVerdict = "approve" if answer.confirmed else "reject"
                self._owner.engine.answer(
                    question["question"], verdict, by="the confirmation of the call"
                )
        if asked and not answer.confirmed:
            return {"error": "This tool call is rejected."}
        before = _requests(context)
        executed = 0

        async def execute(name: str, values: Mapping[str, object]) -> object:
            nonlocal executed
            executed += 1
            if executed > 1:  # what the tool that failed has asked of the framework does not count
                for field, value in before.items():
                    setattr(context.actions, field, copy(value))
            other = tool
            if name != tool.name:
                other = ChainMap(self.tools.get(context.agent_name, {}), *self.tools.values())[name]
            if values is not arguments or other is not tool:
                await self._confirm(other, dict(values), context, asked, tool)
            output = await other.run_async(
                args=arguments if values is arguments else dict(values), tool_context=context
            )
            actions = context.actions
            if (
                call_id in actions.requested_tool_confirmations
                or call_id in actions.requested_auth_configs
            ):
                raise _Interrupted(output)
            if (answer is None or answer.confirmed) and self._owner.is_failure(output):
                said = (
                    (output.get("error_message") or output.get("error"))
                    if isinstance(output, Mapping)
                    else None
                )
                raise ReportedFailure(f"{name} says: {said or output}", output)
            return output

        try:
            return await session.invoke(
                tool.name, arguments, execute=execute, key=call_id, once=bool(asked)
            )
        except _Interrupted as interrupted:
            self.waits = True
            return interrupted.response
        except CallSkipped as skipped:
            return {"result": str(skipped)}
        except NeedsHuman as error:
            if self._can_ask(context):
                shown = shown_questions(self._owner.engine, session.run.id, error.questions)
                return self._ask(
                    context, " ".join(str(each["text"]) for each in shown), {"questions": shown}
                )
            return reported_result(error)
        except ReportedFailure as error:
            return reported_result(error)

    async def _confirm(
        self, tool: Any, values: dict[str, Any], context: Any, asked: Mapping[str, Any], called: Any
    ) -> None:
        """Request a confirmation for a tool that stands in, if it needs one; that of the call does not apply to it."""
        if (
            asked.get("tool") == tool.name
            or await tool.check_require_confirmation(values, context) is not True
        ):
            return
        if not self._can_ask(context):
            raise PermissionError(
                f"{tool.name} requires a confirmation, which cannot be requested here"
            )
        text = f"Please approve or reject that {tool.name}() stands in for {called.name}(), which failed."
        raise _Interrupted(self._ask(context, text, {"tool": tool.name, "arguments": values}))

    def _can_ask(self, context: Any) -> bool:
        """Return whether the framework passes on a request to confirm: once for each call of an agent."""
        asks = self._owner.approvals and not self.nested
        return (
            asks
            and bool(context.function_call_id)
            and context.tool_confirmation is None
            and context.node is None
        )

    def _ask(self, context: Any, text: str, payload: dict[str, Any]) -> dict[str, str]:
        context.request_confirmation(hint=text, payload={METADATA: payload})
        context.actions.skip_summarization = True  # the model is not called before the answer
        self.waits = True
        return {"error": "This tool call requires confirmation, please approve or reject."}


_PASSES: Final = (_Interrupted, LlmCallsLimitExceededError)


def _requests(context: Any) -> dict[str, Any]:
    """Return what a call has asked of the framework so far, such as a transfer."""
    fields = vars(context.actions).items()
    return {
        name: value.copy() if type(value) is dict else value
        for name, value in fields
        if name not in _DELTAS
    }


def _asked(context: Any) -> Mapping[str, Any]:
    """Return what was asked about a call, from the event that requested its confirmation."""
    for event in reversed(context.session.events):
        request = event.actions.requested_tool_confirmations.get(context.function_call_id)
        if request is not None:
            return request.payload.get(METADATA, {}) if isinstance(request.payload, Mapping) else {}
    return {}


def _fields(tool: Any) -> dict[str, object] | None:
    """Return the fields of the description of a tool; None if the framework does not execute it."""
    request = LlmRequest()
    request.append_tools([tool])
    if not request.config.tools:
        return None
    declaration = request.config.tools[0].function_declarations[0]
    schema = declaration.parameters_json_schema
    if schema is None and declaration.parameters is not None:
        schema = declaration.parameters.json_schema.model_dump(mode="json", exclude_none=True)
    return tool_fields(
        tool.description, schema or {}, stated=(tool.custom_metadata or {}).get(METADATA)
    )
