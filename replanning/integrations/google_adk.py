"""Google ADK: `App(name=…, root_agent=agent, plugins=[Replanned({"search": "web", …})])`.

It replaces calls of tools, and the agents of a `SequentialAgent`, a `ParallelAgent` or a
`Workflow`.

Tested with google-adk 2.13. See docs/integrations/google_adk.md for approvals, resumed invocations,
and limitations.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 # ADK runs on asyncio alone, and a session needs a task of its own
import contextvars
from collections import ChainMap
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from copy import copy
from functools import partial
from typing import Any, Final

from replanning.changes import AddTask
from replanning.engine.engine import ReplanningEngine
from replanning.engine.functions import FunctionTool as DescribedTool
from replanning.engine.session import Execute, Session
from replanning.errors import CallSkipped, NeedsHuman
from replanning.integrations.agent_plans import (
    TASK,
    AgentSteps,
    Performing,
    WorkflowEdge,
    agent_fields,
    forward,
    retry_failed,
    visit_certain_nodes,
)
from replanning.integrations.kit import (
    METADATA,
    Arguments,
    Capabilities,
    ControlFlow,
    ReportedFailure,
    SessionTask,
    answer_questions,
    call_tool,
    describe_tools,
    find_run,
    is_unfinished,
    missing_framework,
    named_questions,
    shown_questions,
    tool_fields,
)
from replanning.plan.document import Plan
from replanning.plan.messages import truncate
from replanning.plan.tasks import Goal, Task
from replanning.plan.types import TaskId
from replanning.run.attempt import current_attempt

try:
    from google.adk.agents import BaseAgent, LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
    from google.adk.agents.invocation_context import LlmCallsLimitExceededError
    from google.adk.agents.readonly_context import ReadonlyContext
    from google.adk.events.event import Event
    from google.adk.events.event_actions import EventActions
    from google.adk.events.request_input import RequestInput
    from google.adk.models import LlmRequest
    from google.adk.plugins.base_plugin import BasePlugin
    from google.adk.tools import AgentTool, BaseTool, FunctionTool, ToolContext
    from google.adk.tools.base_toolset import BaseToolset
    from google.adk.tools.tool_confirmation import ToolConfirmation
    from google.adk.tools.transfer_to_agent_tool import TransferToAgentTool
    from google.adk.workflow import START, BaseNode, JoinNode, Workflow
    from google.genai import types

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
    raise missing_framework(__name__, "Google ADK (tested with google-adk 2.13)", error) from error

_DELTAS: Final = frozenset({"state_delta", "artifact_delta"})
"""Fields of the actions of a call that hold its changes rather than its requests."""

_MAX_OBJECTIVE_CHARS: Final = 500


def _reported_failure(result: object) -> str:
    """Return the failure that the result of a tool reports, or an empty string.

    Tools of ADK report one as `{"status": "error"}`, `{"error": …}` or MCP's `isError`. Complaints
    about arguments, which ADK itself returns to the model, are not failures.
    """
    if not isinstance(result, Mapping):
        return ""
    message = result.get("error")
    is_failure = bool(message) and not str(message).startswith("Invoking `")
    if result.get("status") == "error":
        is_failure = True
    if result.get("isError") is True or result.get("is_error") is True:
        is_failure = True
    if not is_failure:
        return ""
    return str(result.get("error_message") or message or result)


class Replanned(BasePlugin):  # type: ignore[misc] # its types may not be installed
    """Plugin of a runner: the engine retries, replaces or skips a failing tool or agent, or asks.

    Each invocation that calls a tool is a session of the engine with the same id. The run that
    resumes the invocation resumes its session. The agents of a `SequentialAgent`, a
    `ParallelAgent` or a `Workflow` are tasks of its plan from the start.

    Args:
        capabilities: by the name of a tool, its capability, or the fields that `replanning.tool`
            takes. Tools of the same capability can stand in for one another, and so can agents. The
            `custom_metadata` of a tool may state fields, too, under `replanning`.
        engine: the engine; by default one with its defaults.
        agents: agents that are not below the root agent: those that only stand in for others, and a
            `Workflow`, or the agents in it, which plugins do not see.
        approvals: whether a question to a person becomes a request to confirm the call. Otherwise
            nobody is asked, not even through the gate of the engine, and the agent sees the
            exception of its tool.
        name: the name of the plugin, for a runner with several of them.
    """

    def __init__(
        self,
        capabilities: Capabilities | None = None,
        *,
        engine: ReplanningEngine | None = None,
        agents: Sequence[BaseNode] = (),
        approvals: bool = True,
        name: str = "replanning",
    ) -> None:
        super().__init__(name)
        self.engine = ReplanningEngine() if engine is None else engine
        self.capabilities = dict(capabilities or {})
        self.agents = tuple(agents)
        self.approvals = approvals
        self._runs: dict[str, _Run] = {}

    async def before_run_callback(self, *, invocation_context: Any) -> None:
        """Collect the agents of an invocation, and their tools.

        Raises:
            ValueError: capabilities name a tool that does not exist, or a field is not valid.
        """
        await self._end(invocation_context, "a run with the same id begins")
        run = _Run(self, invocation_context)
        await run.describe(invocation_context, known=not run.nested)
        self._runs[invocation_context.invocation_id] = run

    async def before_agent_callback(self, *, agent: Any, callback_context: Any) -> None:
        """Collect the tools of an agent of a workflow, and watch for its cancellation."""
        run = self._runs.get(callback_context.invocation_id)
        if run is None:
            return
        run.watch(asyncio.current_task())
        if agent.name not in run.tools:
            await run.describe(callback_context.get_invocation_context(), known=False)

    async def before_tool_callback(self, *, tool: Any, tool_args: Any, tool_context: Any) -> None:
        """Attach the tool, so that the session executes it when the framework does."""
        run = self._runs.get(tool_context.invocation_id)
        if run is not None and not isinstance(tool, TransferToAgentTool):
            _CALL.set((run, tool))
            attached = vars(tool).get("run_async")
            if not isinstance(attached, _Attached) or attached.tool is not tool:
                tool.run_async = _Attached(tool)

    async def on_event_callback(self, *, invocation_context: Any, event: Any) -> None:
        """Note whether the invocation waits for an answer, and its last event."""
        run = self._runs.get(invocation_context.invocation_id)
        if run is None:
            return
        if event.long_running_tool_ids:
            run.waits = True
        run.last_event = event

    async def after_run_callback(self, *, invocation_context: Any) -> None:
        """End the session; it is left `paused` if the invocation waits for an answer."""
        await self._end(invocation_context, "")

    async def on_run_error_callback(self, *, invocation_context: Any, error: Exception) -> None:
        """Leave the session `paused`, so that the invocation can be resumed."""
        await self._end(invocation_context, f"it failed: {type(error).__name__}")

    async def close(self) -> None:
        """Leave all sessions `paused`."""
        for run in list(self._runs.values()):
            await self._end(run.context, "the runner was closed")

    def run_of(self, context: Any) -> _Run | None:
        """Return the run of an invocation."""
        return self._runs.get(context.invocation_id)

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
"""The run, and the tool that the framework is about to execute; None as the tool while the session
executes it.
"""


class _Attached:
    """The `run_async` of a tool object: a call of the session if ADK calls it, or the original."""

    def __init__(self, tool: Any) -> None:
        own = vars(tool).get("run_async")
        self.tool = tool
        # A copy of an attached tool has the attribute of the original.
        self._execute = (
            type(tool).run_async.__get__(tool) if isinstance(own, _Attached) else tool.run_async
        )

    async def __call__(self, *, args: Any, tool_context: Any) -> Any:
        run, tool = _CALL.get() or (None, None)
        if run is None or tool is not self.tool:
            return await self._execute(args=args, tool_context=tool_context)
        _CALL.set((run, None))
        return await run.call(tool, args, tool_context)


class _Interrupted(ControlFlow):
    """A tool waits for a confirmation or for credentials."""

    def __init__(self, response: Any) -> None:
        super().__init__("the tool waits for a person", response)


class _Run:
    """One invocation, and its session."""

    def __init__(self, owner: Replanned, context: Any) -> None:
        self.context = context
        self._owner = owner
        self._watched: asyncio.Task[Any] | None = None
        self._around: contextvars.Context | None = None
        self.waits = False
        self.last_event: Any = None
        self.nested = _CALL.get() is not None
        self.tools: dict[str, dict[str, Any]] = {}
        self.pipeline = _Pipeline(self, owner)
        self._fields: dict[str, dict[str, object]] = {}
        self._described: list[DescribedTool[..., Any]] = []
        self._task: SessionTask | None = None
        self.id = ""

    async def describe(self, context: Any, *, known: bool) -> None:
        """Describe the tools of the running agent, and those of its tree other than toolsets.

        Args:
            context: the context of the invocation.
            known: whether capabilities must name tools of this tree; false if some of its tools are
                not known.

        Raises:
            ValueError: capabilities name a tool that does not exist, or a field is not valid.
        """
        family = self._root_agents(context)
        if context.agent is None:
            known = False
        # The list grows while it is iterated.
        for agent in family:
            own = self.tools.setdefault(agent.name, {})
            below = [*agent.sub_agents]
            for tool in await _tools_of(agent, context):
                own[tool.name] = tool
                if isinstance(tool, AgentTool):
                    below.append(tool.agent)
                fields = None
                if tool.name not in self._fields:
                    fields = _fields(tool)
                if fields is not None:
                    self._fields[tool.name] = fields
            if _may_have_others(agent, below):
                known = False
            for each in below:
                if all(each is not other for other in family):
                    family.append(each)
        self.pipeline.learn(family, has_workflow=context.agent is None)
        for each in self.pipeline.agents.values():
            self._fields.setdefault(each.name, agent_fields(each.description))
        capabilities = self._owner.capabilities
        absent = () if known else capabilities
        self._described = describe_tools(self._fields, capabilities, absent=absent)

    def _root_agents(self, context: Any) -> list[Any]:
        """Return the root agent of an invocation, and the further agents of the plugin."""
        roots: list[Any] = []
        if context.agent is not None:
            roots.append(context.agent.root_agent)
        for node in self._owner.agents:
            if isinstance(node, Workflow):
                roots += _agents_in(node)
            else:
                roots.append(node.root_agent)
        return roots

    async def open(self) -> Session:
        """Open the session at the first call, or again if that failed."""
        task = self._task
        if task is None:
            run_id, objective = self._identity()
            self.id = run_id
            plan = Plan(goal=Goal(objective=objective), tasks=self.pipeline.tasks)
            opened = self._owner.engine.session(
                plan,
                tools=self._described,
                run_id=run_id,
                passes=_PASSES,
                asks=self._owner.approvals,
                gate=self._owner.approvals,
            )
            around = self._around or contextvars.copy_context()
            task = around.run(SessionTask, opened)
            self._task = task
        try:
            return await task.session()
        except Exception:
            # Another call may have opened it again meanwhile.
            if self._task is task:
                self._task = None
            raise

    def watch(self, task: asyncio.Task[Any] | None) -> None:
        """Leave the session if the task of the first agent is cancelled."""
        if self._watched is None and task is not None:
            self._watched = task
            # In this context, the span of the agent encloses that of the session.
            self._around = contextvars.copy_context()
            task.add_done_callback(self._follow)

    def _follow(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            is_final = self.last_event is not None and self.last_event.is_final_response()
            reason = self._pause_reason("" if is_final else "it was cancelled")
            ended = task if self._task is None else self._task.leave(reason)
            ended.add_done_callback(lambda _: self._owner.forget(self))

    async def end(self, pause_reason: str) -> None:
        """End the session, or leave it paused for this reason, or because the invocation waits."""
        if self._watched is not None:
            self._watched.remove_done_callback(self._follow)
        if self._task is not None:
            reason = self._pause_reason(pause_reason)
            if not reason:
                self.pipeline.end()
            await self._task.end(reason)

    def _pause_reason(self, stated: str) -> str:
        if stated:
            return stated
        if self.waits:
            return "it waits for an answer"
        if self.pipeline.was_cut_short:
            return "it was cut short"
        return ""

    def _identity(self) -> tuple[str, str]:
        """Return the id of the run and its objective.

        The id is that of the invocation, with a number if an earlier run of it has ended.
        """
        first = str(self.context.invocation_id)
        events = self.context.session.events
        run_id = first
        engine = self._owner.engine
        if any(each.invocation_id == first and each.author != "user" for each in events):
            number = 2
            while not is_unfinished(engine, run_id):
                run_id = f"{first}.{number}"
                number += 1
            known = find_run(engine, run_id)
            if known is not None:
                return run_id, known.objective
        parts = getattr(self.context.user_content, "parts", None) or ()
        words = " ".join(part.text for part in parts if part.text).strip()
        if not words:
            return run_id, f"run {getattr(self.context.agent, 'name', 'a workflow')}"
        return run_id, truncate(words, _MAX_OBJECTIVE_CHARS)

    async def call(self, tool: Any, arguments: dict[str, Any], context: Any) -> Any:
        """Call a tool, or what replaces it, in the context of the call.

        Raises:
            Exception: the tool's own; no alternative is left.
        """
        session = await self.open()
        call_id = context.function_call_id or ""
        answer = context.tool_confirmation
        asked = _asked(context) if answer is not None else {}
        if asked:
            answer_questions(
                self._owner.engine,
                named_questions(asked.get("questions")),
                approved=answer.confirmed,
                by="the confirmation of the call",
            )
            if not answer.confirmed:
                return {"error": "This tool call is rejected."}
        before = _requests(context)
        executed = 0

        async def execute(name: str, values: Arguments) -> object:
            nonlocal executed
            executed += 1
            # Requests to the framework by a tool that then failed do not count.
            if executed > 1:
                for field, value in before.items():
                    setattr(context.actions, field, copy(value))
            other = tool
            if name != tool.name:
                other = ChainMap(self.tools.get(context.agent_name, {}), *self.tools.values())[name]
            # The framework compares the arguments of its own call by identity.
            given = arguments
            if values != arguments:
                given = dict(values)
            if given is not arguments or other is not tool:
                await self._confirm(other, given, context, asked, tool)
            output = await other.run_async(args=given, tool_context=context)
            if _requests_answer(context.actions, call_id):
                self.waits = True
                raise _Interrupted(output)
            failure = _reported_failure(output)
            # A rejected call is answered with an error as well.
            if failure and (answer is None or answer.confirmed):
                raise ReportedFailure(f"{name} says: {failure}", output)
            return output

        try:
            return await call_tool(
                self._owner.engine,
                session,
                tool.name,
                arguments,
                execute,
                key=call_id,
                once=bool(asked),
                asks=self._can_ask(context),
            )
        except CallSkipped as skipped:
            return {"result": str(skipped)}
        except NeedsHuman as error:
            shown = shown_questions(self._owner.engine, session.run.id, error.questions)
            text = " ".join(str(each["text"]) for each in shown)
            return self._ask(context, text, {"questions": shown})

    async def _confirm(
        self, tool: Any, values: dict[str, Any], context: Any, asked: Mapping[str, Any], called: Any
    ) -> None:
        """Request a confirmation that a tool may stand in; the call's own does not apply."""
        if asked.get("tool") == tool.name:
            return
        if await tool.check_require_confirmation(values, context) is not True:
            return
        if not self._can_ask(context):
            raise PermissionError(
                f"{tool.name} requires a confirmation, which cannot be requested here"
            )
        stand_in = f"{tool.name}() stands in for {called.name}(), which failed"
        text = f"Please approve or reject that {stand_in}."
        raise _Interrupted(self._ask(context, text, {"tool": tool.name, "arguments": values}))

    def _can_ask(self, context: Any) -> bool:
        """Return whether ADK passes on a request for confirmation: once for each call of an agent."""
        if self.nested or not self._owner.approvals:
            return False
        if context.node is not None or context.tool_confirmation is not None:
            return False
        return bool(context.function_call_id)

    def _ask(self, context: Any, text: str, payload: dict[str, Any]) -> dict[str, str]:
        context.request_confirmation(hint=text, payload={METADATA: payload})
        # The model is not called before the answer.
        context.actions.skip_summarization = True
        self.waits = True
        return {"error": "This tool call requires confirmation, please approve or reject."}


class _Pipeline:
    """Agents that form the plan of an invocation: in sequential and parallel agents, and workflows.

    Each of these agents is a task. The framework runs them as usual; `run_async` of each is
    attached and performs the task: by the agent itself, by what replaces it, or not at all if it
    was skipped or is already done.

    Attributes:
        agents: by name, all agents that may run, if some of them form a plan.
        tasks: the plan of the root agent, or of workflows.
    """

    def __init__(self, run: _Run, owner: Replanned) -> None:
        self._run = run
        self._owner = owner
        self.agents: dict[str, Any] = {}
        self.tasks: list[Task] = []
        self._groups: dict[str, list[Task]] = {}  # plans of outermost agents, by name
        self._planned = set[TaskId]()
        self._turns = set[TaskId]()  # tasks of the agents whose turn has come
        self._unfinished = set[str]()  # agents that run, or that were cut short
        self._entered = set[TaskId]()  # tasks that were performed in this process, or are
        self._session: Session | None = None
        self._steps: AgentSteps | None = None

    def learn(self, family: Sequence[Any], *, has_workflow: bool) -> None:
        """Collect the agents, and attach those that form a plan.

        Args:
            family: the agents, the root agent first.
            has_workflow: whether the invocation runs a workflow.
        """
        if self.agents:
            return
        for agent in family:
            is_nested = isinstance(agent.parent_agent, SequentialAgent | ParallelAgent | LoopAgent)
            if _is_group(agent) and not is_nested:
                self._groups[agent.name] = []
                _add_tasks(agent, (), self._groups[agent.name])
                _attach(agent)
        if has_workflow:
            for node in self._owner.agents:
                if isinstance(node, Workflow):
                    _add_workflow(node, self.tasks)
        elif family and family[0].name in self._groups:
            self.tasks = self._groups[family[0].name]
        self._planned.update(task.id for task in self.tasks)
        if self._groups or self.tasks:
            self.agents = {agent.name: agent for agent in reversed(family)}

    def run(self, agent: Any, context: Any) -> AsyncIterator[Any]:
        """Run an agent in place of the framework.

        An agent that is neither the outermost one of a plan nor a task at its first turn, such as
        after a transfer, runs as in the framework alone.
        """
        task_id = TaskId(agent.name)
        if agent.name in self._groups:
            return self._run_group(agent, context)
        if task_id in self._planned - self._turns:
            self._turns.add(task_id)
            return self._run_step(agent, context, task_id)
        events: AsyncIterator[Any] = _original(agent)(context)
        return events

    async def _run_group(self, agent: Any, context: Any) -> AsyncGenerator[Any, None]:
        """Run the outermost agent of a plan, and then the tasks added after its last agent."""
        await self._begin(agent, context)
        self._unfinished.add(agent.name)
        is_paused = False
        async with aclosing(_original(agent)(context)) as events:
            async for event in events:
                if context.should_pause_invocation(event):
                    is_paused = True
                yield event
        if not is_paused and self._added_behind():
            async with aclosing(self._forward(agent, context, self._perform_rest, [])) as events:
                async for event in events:
                    yield event
        # It may have ended some of its agents by itself.
        self._unfinished.clear()

    async def _run_step(
        self, agent: Any, context: Any, task_id: TaskId
    ) -> AsyncGenerator[Any, None]:
        """Perform the task of an agent, unless it was performed ahead of its turn."""
        await self._open(context)
        self._unfinished.add(agent.name)
        self._answer_questions(context)
        executed: list[Any] = []
        is_paused = False
        if task_id not in self._entered:
            performing = partial(self._perform, task_id)
            async with aclosing(self._forward(agent, context, performing, executed)) as events:
                async for event in events:
                    if context.should_pause_invocation(event):
                        is_paused = True
                    yield event
        self._unfinished.discard(agent.name)
        if context.is_resumable and not is_paused and executed[-1:] != [agent]:
            # A stand-in has reported only its own end.
            context.set_agent_state(agent.name, end_of_agent=True)
            yield Event(
                invocation_id=context.invocation_id,
                author=agent.name,
                branch=context.branch,
                actions=EventActions(end_of_agent=True),
            )

    async def _forward(
        self, agent: Any, context: Any, performing: Performing, executed: list[Any]
    ) -> AsyncGenerator[Any, None]:
        """Perform tasks, and yield the events of their agents.

        Args:
            agent: the agent whose turn it is.
            context: the context of its parent.
            performing: performs the tasks.
            executed: receives the agents that were run.

        Raises:
            Exception: an agent's own; no alternative is left.
        """

        def stream(
            name: str, arguments: Arguments, end: Callable[[object], None]
        ) -> AsyncGenerator[Any, None]:
            executed.append(self._agent_for(name, arguments, agent))
            return _events(executed[-1], context, end)

        try:
            async with aclosing(forward(performing, stream)) as events:
                async for event in events:
                    yield event
        except (_Interrupted, CallSkipped):
            pass
        except ReportedFailure:
            self._skip_failed(agent)
        except NeedsHuman as error:
            yield self._request(agent, context, error.questions)

    async def _perform(self, task_id: TaskId, execute: Execute) -> object:
        assert self._steps is not None
        self._entered.add(task_id)
        return await self._steps.perform(task_id, execute, known=self._entered, passes=_PASSES)

    async def _perform_rest(self, execute: Execute) -> None:
        while added := self._added_behind():
            with suppress(CallSkipped):
                await self._perform(added[0], execute)

    def _added_behind(self) -> list[TaskId]:
        assert self._steps is not None
        return self._steps.added_behind(self._planned | self._entered)

    def _skip_failed(self, agent: Any) -> None:
        """Skip an agent that has reported an error, because the framework continues after it."""
        assert self._steps is not None
        self._steps.skip(agent.name, "the framework continues after an error of its model")

    @property
    def was_cut_short(self) -> bool:
        """Whether some of the agents have begun and not ended."""
        return bool(self._unfinished)

    def end(self) -> None:
        """Skip the agents that the framework has not run by its end."""
        if self._steps is not None:
            self._steps.skip_rest()

    async def _open(self, context: Any) -> Session:
        self._session = session = await self._run.open()
        if self._steps is None:
            retry_failed(session)
            asks = self._owner.approvals and context.is_resumable and not self._run.nested
            self._steps = AgentSteps(self._owner.engine, session, asks=asks)
        return session

    async def _begin(self, agent: Any, context: Any) -> None:
        """Add the plan of an outermost agent, unless the session has it already."""
        session = await self._open(context)
        tasks = self._groups[agent.name]
        new = [AddTask(task=task) for task in tasks if task.id not in session.run.live]
        if new:
            session.run.apply(new, reason=f"{agent.name} begins")
        self._planned.update(task.id for task in tasks)

    def _agent_for(self, name: str, arguments: Arguments, agent: Any) -> Any:
        """Return the agent that executes a task in the turn of another agent.

        A stand-in saves its output under the key of the agent that it replaces.

        Raises:
            LookupError: no agent has this name.
        """
        attempt = current_attempt()
        assert attempt is not None
        assert self._session is not None
        root = self._session.run.live.entry(attempt.task_id).root
        self._entered.add(root)
        if name == agent.name:
            return agent  # which may be a copy that the framework has made for this turn
        other = self.agents.get(name)
        if other is None:
            raise LookupError(f"there is no agent called {name!r}")
        replaced = self.agents.get(root)
        if replaced is other or not isinstance(other, LlmAgent):
            return other
        update: dict[str, Any] = {}
        if isinstance(replaced, LlmAgent):
            if replaced.output_key:
                update["output_key"] = replaced.output_key
            if replaced.mode is not None:
                update["mode"] = replaced.mode
        if arguments.get(TASK) and isinstance(other.instruction, str):
            update["instruction"] = f"{other.instruction}\n{arguments[TASK]}"
        return other.model_copy(update=update)

    def _request(self, agent: Any, context: Any, questions: Sequence[str]) -> Any:
        """Return a request for input that puts questions to the user in the turn of an agent."""
        shown: list[Any] = shown_questions(self._owner.engine, self._run.id, questions)
        texts = [f"{each['text']}: {'; or '.join(each['choices'])}" for each in shown]
        request = RequestInput(
            interrupt_id=_QUESTION + questions[0],
            message=" ".join(texts),
            payload={METADATA: {"questions": shown}},
        )
        arguments = request.model_dump(exclude={"response_schema"}, by_alias=True)
        arguments["response_schema"] = ToolConfirmation.model_json_schema()
        call = types.FunctionCall(id=request.interrupt_id, name="adk_request_input", args=arguments)
        return Event(
            invocation_id=context.invocation_id,
            author=agent.name,
            branch=context.branch,
            content=types.Content(role="model", parts=[types.Part(function_call=call)]),
            long_running_tool_ids={request.interrupt_id},
        )

    def _answer_questions(self, context: Any) -> None:
        """Pass on the answers of the user that came since the invocation was paused."""
        for event in context.session.events:
            for response in event.get_function_responses():
                if not (response.id or "").startswith(_QUESTION):
                    continue
                is_confirmed = (response.response or {}).get("confirmed") is True
                question = response.id.removeprefix(_QUESTION)
                answer_questions(
                    self._owner.engine, [question], approved=is_confirmed, by="the user"
                )


_QUESTION: Final = "replanning-"
"""Prefix of the id of a request for input that asks a question of the engine."""


class _AttachedAgent:
    """The `run_async` of an agent object: that of its plan, if there is one, else the original."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent

    def __call__(self, parent_context: Any) -> AsyncIterator[Any]:
        # A workflow runs a copy of the agent, which is the one in the context.
        running = parent_context.agent
        is_copy = running is not None and vars(running).get("run_async") is self
        agent = running if is_copy else self.agent
        for plugin in parent_context.plugin_manager.plugins:
            run = plugin.run_of(parent_context) if isinstance(plugin, Replanned) else None
            if run is not None:
                return run.pipeline.run(agent, parent_context)
        events: AsyncIterator[Any] = _original(agent)(parent_context)
        return events


def _attach(agent: Any) -> None:
    if "run_async" not in vars(agent):
        vars(agent)["run_async"] = _AttachedAgent(agent)


def _original(agent: Any) -> Any:
    return type(agent).run_async.__get__(agent)


async def _tools_of(agent: Any, context: Any) -> list[Any]:
    """Return the tools of an agent; those of toolsets only if it is the agent that runs."""
    running = getattr(context.agent, "name", None)
    tools: list[Any] = []
    for item in getattr(agent, "tools", ()):
        if isinstance(item, BaseToolset) and agent.name == running:
            # The framework reports an exception, and continues without these tools.
            with suppress(Exception):
                tools += await item.get_tools_with_prefix(ReadonlyContext(context))
        elif isinstance(item, BaseTool):
            tools.append(item)
        elif callable(item) and not isinstance(item, BaseNode):
            tools.append(FunctionTool(item))
    return tools


def _may_have_others(agent: Any, below: Sequence[Any]) -> bool:
    """Return whether an agent may have tools, or run agents, that are not known here."""
    if not hasattr(agent, "tools"):
        return not below
    return any(isinstance(item, BaseNode | BaseToolset) for item in agent.tools)


def _requests_answer(actions: Any, call_id: str) -> bool:
    """Return whether a call has requested a confirmation or credentials."""
    if call_id in actions.requested_tool_confirmations:
        return True
    return call_id in actions.requested_auth_configs


async def _events(
    agent: Any, context: Any, end: Callable[[object], None]
) -> AsyncGenerator[Any, None]:
    """Run an agent, and pass the text of each final response to `end`.

    Raises:
        ReportedFailure: its last event reports an error, and nothing else.
        _Interrupted: it waits for a person.
    """
    failure = ""
    is_paused = False
    async with aclosing(_original(agent)(context)) as events:
        async for event in events:
            if context.should_pause_invocation(event):
                is_paused = True
            parts: Sequence[Any] = ()
            if event.content:
                parts = event.content.parts or ()
            if parts and event.is_final_response():
                end("".join(part.text for part in parts if part.text))
            if parts:
                failure = ""
            elif event.error_code:
                failure = event.error_message or event.error_code
            yield event
    if is_paused:
        raise _Interrupted(None)
    if failure:
        raise ReportedFailure(f"{agent.name} says: {failure}", None)


def _is_group(agent: Any) -> bool:
    """Return whether an agent runs those below it, one after another or all at once."""
    run = type(agent)._run_async_impl
    return run in (SequentialAgent._run_async_impl, ParallelAgent._run_async_impl)


def _add_tasks(agent: Any, after: Sequence[TaskId], tasks: list[Task]) -> list[TaskId]:
    """Add the tasks of an agent, after others; return those that the next agent waits for."""
    if _is_group(agent) and isinstance(agent, SequentialAgent):
        for below in agent.sub_agents:
            after = _add_tasks(below, after, tasks)
        return list(after)
    if _is_group(agent):
        last: list[TaskId] = []
        for below in agent.sub_agents:
            last += _add_tasks(below, after, tasks)
        return last or list(after)
    task_id = TaskId(agent.name)
    if all(task.id != task_id for task in tasks):
        tasks.append(Task(id=task_id, tool=agent.name, depends_on=tuple(after)))
        _attach(agent)
    return [task_id]


def _agents_in(workflow: Any) -> list[Any]:
    """Return the agents of a workflow, and of the workflows in it."""
    agents = []
    for node in workflow.graph.nodes if workflow.graph else ():
        if isinstance(node, Workflow):
            agents += _agents_in(node)
        elif isinstance(node, BaseAgent):
            agents.append(node)
    return agents


def _add_workflow(workflow: Any, tasks: list[Task]) -> None:
    """Add the tasks of the agents that a workflow always runs."""
    nodes: dict[str, Any] = {}
    edges: list[WorkflowEdge] = []
    for number, edge in enumerate(workflow.graph.edges if workflow.graph else ()):
        target = edge.to_node
        nodes[target.name] = target
        # An agent runs once for each node before it, unless these are joined.
        join = "" if isinstance(target, JoinNode) else number
        edges.append(WorkflowEdge(edge.from_node.name, target.name, edge.route is None, join))

    def visit(name: str, before: Sequence[TaskId]) -> Sequence[TaskId]:
        node = nodes.get(name)
        if not isinstance(node, BaseAgent):
            return before
        return _add_tasks(node, before, tasks)

    visit_certain_nodes(START.name, edges, visit)


_PASSES: Final = (_Interrupted, LlmCallsLimitExceededError)


def _requests(context: Any) -> dict[str, Any]:
    """Return the requests of a call to the framework so far, such as a transfer."""
    requests: dict[str, Any] = {}
    for name, value in vars(context.actions).items():
        if name not in _DELTAS:
            # A dictionary is changed in place.
            requests[name] = value.copy() if type(value) is dict else value
    return requests


def _asked(context: Any) -> Mapping[str, Any]:
    """Return what was asked about a call, from the event that requested its confirmation."""
    for event in reversed(context.session.events):
        request = event.actions.requested_tool_confirmations.get(context.function_call_id)
        if request is None:
            continue
        if not isinstance(request.payload, Mapping):
            return {}
        asked: Mapping[str, Any] = request.payload.get(METADATA, {})
        return asked
    return {}


def _fields(tool: Any) -> dict[str, object] | None:
    """Return the fields that describe a tool; None if the framework does not execute it."""
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
