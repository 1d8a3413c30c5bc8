"""Microsoft Agent Framework: tools of an agent, and workflows of agents.

Tools: `Agent(…, middleware=[Replanned({"search": "web", "search_archive": "web"})])`.

Workflows of agents: `replanned(workflow, engine, capabilities={"writer": "write", "editor":
"write"})`.

Tested with agent-framework-core 1.23 and agent-framework-orchestrations 1.4. See
docs/integrations/agent_framework.md.

Limitations: a tool that appears only in a later step of a run is not replaced. Function middleware
that a context provider adds does not see a tool that stands in for another one. For Magentic, see
`replanning.integrations.magentic`.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from contextvars import ContextVar
from functools import partial, update_wrapper
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary, ref

from pydantic_core import to_jsonable_python

from replanning.engine.engine import ReplanningEngine
from replanning.engine.session import Execute, Session
from replanning.environment import new_run_id
from replanning.errors import (
    CallFailed,
    CallSkipped,
    NeedsHuman,
    NoResult,
    NotRunning,
    StoreError,
)
from replanning.integrations.agent_plans import (
    EARLIER,
    TASK,
    AgentStep,
    AgentSteps,
    WorkflowEdge,
    agent_plan,
    agent_session,
    forward,
    visit_certain_nodes,
)
from replanning.integrations.kit import (
    METADATA,
    Arguments,
    Capabilities,
    ControlFlow,
    SessionTask,
    answer_questions,
    call_tool,
    describe_tools,
    find_run,
    is_unfinished,
    missing_framework,
    named_questions,
    output_in_run,
    shown_questions,
    thread_run,
    tool_fields,
    withdraw_questions,
)
from replanning.plan.types import TaskId

try:
    from agent_framework import (
        AgentExecutor,
        AgentMiddleware,
        AgentResponse,
        AgentResponseUpdate,
        ChatMiddleware,
        Content,
        FanInEdgeGroup,
        FanOutEdgeGroup,
        FunctionInvocationContext,
        FunctionMiddleware,
        FunctionTool,
        Message,
        MiddlewareFailure,
        MiddlewareTermination,
        MiddlewareType,
        ResponseStream,
        UserInputRequiredException,
        WorkflowExecutor,
        function_middleware,
    )
    from agent_framework.exceptions import ToolException

    if "tools" not in inspect.signature(FunctionInvocationContext).parameters:
        raise ImportError("a function middleware does not see the tools of the agent")
    if (
        function_middleware(lambda context, call_next: None)._middleware_type
        is not MiddlewareType.FUNCTION
    ):
        raise ImportError("decorated function middleware cannot be recognized")
except (ImportError, AttributeError) as error:
    raise missing_framework(
        __name__, "the Microsoft Agent Framework (tested with agent-framework-core 1.23)", error
    ) from error

_PASSES: Final = (MiddlewareTermination, MiddlewareFailure, UserInputRequiredException)


class Replanned(AgentMiddleware):  # type: ignore[misc] # its types may not be installed
    """Middleware of an agent: the engine retries, replaces or skips a failing tool, or asks.

    Each run of the agent that calls a tool is a session of the engine. A run that ends with a
    request to the user, or with an exception, leaves its session paused; the next run with the same
    `AgentSession` resumes it.

    Args:
        capabilities: by the name of a tool, its capability, or the fields that `replanning.tool`
            takes. Tools of the same capability can stand in for one another. The
            `additional_properties` of a tool may state fields, too, under `replanning`.
        engine: the engine; by default one with its defaults.
        objective: what the agent is for; by default its name.
        approvals: whether a question to a person becomes a request for the approval of the call; by
            default if one of the tools requires approval. Without an `AgentSession`, and otherwise,
            the agent sees the exception of its tool. With False nobody is asked, not even through
            the gate of the engine.
    """

    def __init__(
        self,
        capabilities: Capabilities | None = None,
        *,
        engine: ReplanningEngine | None = None,
        objective: str = "",
        approvals: bool | None = None,
    ) -> None:
        self.engine = ReplanningEngine() if engine is None else engine
        self.capabilities = capabilities
        self.objective = objective
        self.approvals = approvals

    async def process(self, context: Any, call_next: Callable[[], Awaitable[None]]) -> None:
        """Run the agent; its calls of tools are calls of a session."""
        run = _AgentRun(self, context)
        try:
            await call_next()
        except BaseException as error:
            await run.fail(error)
            raise
        if isinstance(context.result, ResponseStream):
            context.result = run.follow(context.result)
        else:
            await run.end(context.result)


class _AgentRun(FunctionMiddleware):  # type: ignore[misc]
    """One run of an agent, with a session from its first call of a tool until its end."""

    def __init__(self, attachment: Replanned, context: Any) -> None:
        self._attachment = attachment
        self._engine = attachment.engine
        name = context.agent.name or ""
        self._objective = attachment.objective
        if not self._objective:
            self._objective = f"Run of the agent {name}" if name else "Run of an agent"
        # An `AgentSession` remembers the run that it continues.
        self._agent_session = context.session
        self._state_key = f"{METADATA} {name}".rstrip()
        left: str | None = None
        if context.session is not None:
            left = context.session.state.get(self._state_key)
        # The approvals of a run that has ended may arrive a second time.
        self._ended: str | None = None
        if left is not None and not is_unfinished(self._engine, left):
            self._ended = left
            left = None
        self._resumed = left is not None
        self._run_id = left
        self._task: SessionTask | None = None
        self._asks = False
        given: list[Any] = []
        for each in context.client_kwargs.get("middleware", ()):
            if not isinstance(each, _AgentRun):  # of an earlier turn of the same loop
                given.append(each)
        client = getattr(context.agent, "client", None)
        self._others = [
            *getattr(client, "function_middleware", ()),
            *filter(_is_function_middleware, given),
        ]
        context.client_kwargs["middleware"] = [*given, self]

    async def _open(self, tools: Sequence[Any]) -> Session:
        if self._task is None:
            fields: dict[str, dict[str, object]] = {}
            # Without tools, the session is only opened to end it.
            asks = not tools
            for each in tools:
                if isinstance(each, FunctionTool) and not each.declaration_only:
                    fields[each.name] = _fields(each)
                    if _requires_approval(each):
                        asks = True
            described = describe_tools(fields, self._attachment.capabilities if tools else None)
            if self._attachment.approvals is not None:
                asks = self._attachment.approvals
            self._asks = asks and self._agent_session is not None
            opened = self._engine.session(
                self._objective,
                tools=described,
                run_id=self._run_id,
                passes=_PASSES,
                asks=self._asks,
                gate=self._attachment.approvals is not False,
            )
            self._task = SessionTask(opened)
        session = await self._task.session()
        self._run_id = session.run.id
        return session

    def follow(self, stream: Any) -> Any:
        """Return a stream with the same updates and response that ends the session at its end."""
        return _followed(stream, self.end, self.fail)

    async def end(self, response: Any) -> None:
        """End the session, or leave it paused if the agent waits for its user."""
        if getattr(response, "user_input_requests", ()):
            # The answers belong to this run, even if they arrive twice, or before any tool call.
            if self._run_id is None:
                self._run_id = new_run_id()
            await self._leave("the agent waits for its user")
            return
        # Opened only to be ended: this run may not have called a tool.
        if self._resumed:
            await self._open(())
        if self._asks and self._run_id is not None:
            withdraw_questions(self._engine, self._run_id)
        await self._leave()

    async def fail(self, error: BaseException) -> None:
        """Leave the session paused after an exception of the agent, without raising another."""
        with suppress(Exception):
            await self._leave(f"the agent raised {type(error).__name__}")

    async def _leave(self, pause_reason: str = "") -> None:
        if pause_reason and self._run_id is not None and self._agent_session is not None:
            self._agent_session.state[self._state_key] = self._run_id
        if self._task is not None:
            await self._task.end(pause_reason)

    async def process(self, context: Any, call_next: Callable[[], Awaitable[None]]) -> None:
        """Call a tool, or what replaces it."""
        if self._ended is not None and "approval_response" in context.metadata:
            occurrence = context.metadata.get("function_call_occurrence_id", "")
            earlier = output_in_run(self._engine, self._ended, occurrence)
            if earlier is not None:
                context.result = _restored(earlier[0])
                return
        try:
            session = await self._open(context.tools or (context.function,))
        except Exception as error:
            raise MiddlewareFailure(
                f"the session of the agent cannot be opened: {error}"
            ) from error
        try:
            await self._call(session, context, call_next)
        except (NotRunning, StoreError) as error:
            raise MiddlewareFailure(f"the session of the agent has stopped: {error}") from error

    async def _call(
        self, session: Session, context: Any, call_next: Callable[[], Awaitable[None]]
    ) -> None:
        name = context.function.name
        arguments = context.arguments
        response = context.metadata.get("approval_response")
        approved = response is not None
        properties = getattr(response, "additional_properties", {})
        # Only a call that a person is asked about is repeated, by the next run, with the same id.
        key = ""
        if self._asks or _requires_approval(context.function):
            key = context.metadata.get("function_call_occurrence_id", "")

        async def execute(other: str, values: Arguments) -> object:
            if other == name and values == arguments:
                return await _execute(context, arguments, call_next)
            return await self._stand_in(context, other, values)

        try:
            result = await call_tool(
                self._engine,
                session,
                name,
                arguments,
                execute,
                key=key,
                once=approved,
                asks=self._asks,
                approved=approved,
                approved_questions=named_questions(properties.get(METADATA)),
                encode=_journaled,
                decode=_restored,
            )
        except NeedsHuman as error:
            context.result = self._request(session, context, arguments, error.questions)
            return
        except CallSkipped as skipped:
            result = FunctionTool.parse_result(str(skipped))
        context.arguments = arguments
        context.result = result

    def _request(
        self, session: Session, context: Any, arguments: Any, questions: Sequence[str]
    ) -> Any:
        """Return a request for the approval of a call, with the questions that the engine asks."""
        shown = shown_questions(self._engine, session.run.id, questions)
        call_id = context.metadata["call_id"]
        occurrence = context.metadata.get("function_call_occurrence_id", call_id)
        plain = to_jsonable_python(arguments, serialize_unknown=True)
        call = Content.from_function_call(
            call_id, context.function.name, arguments=plain, id=occurrence
        )
        return Content.from_function_approval_request(
            occurrence, call, additional_properties={METADATA: shown}
        )

    async def _stand_in(self, context: Any, name: str, arguments: Arguments) -> Any:
        """Execute a tool that stands in, with the function middleware of the agent."""
        tools = context.tools or (context.function,)
        tool = next(each for each in tools if getattr(each, "name", None) == name)
        own = FunctionInvocationContext(
            tool,
            dict(arguments),
            session=context.session,
            metadata={"call_id": context.metadata.get("call_id")},
            kwargs=context.kwargs,
            tools=context.tools,
            parent_service_session_state_keys=context.parent_service_session_state_keys,
        )

        async def run_from(index: int) -> None:
            if index == len(self._others):
                own.result = await tool.invoke(
                    arguments=own.arguments,
                    context=own,
                    tool_call_id=context.metadata.get("call_id"),
                )
                return
            middleware = self._others[index]
            await getattr(middleware, "process", middleware)(own, partial(run_from, index + 1))

        try:
            await run_from(0)
        except MiddlewareTermination as error:
            raise ToolException(f"middleware stopped the call of {name!r}: {error}") from error
        if _is_request(own.result):
            raise ToolException(f"middleware put the call of {name!r} to a person")
        return own.result


def _followed(
    stream: Any,
    end: Callable[[Any], Awaitable[None]],
    fail: Callable[[BaseException], Awaitable[None]],
    begin: Callable[[], Awaitable[None]] | None = None,
) -> Any:
    """Return a stream with the same items and response, with callbacks at its beginning and end.

    Args:
        stream: the stream.
        end: called with the response.
        fail: called with an exception, also if the stream is not read to its end.
        begin: called before the first item.
    """
    # To the framework, a workflow runs as long as its stream exists. If the returned stream is
    # dropped, the generator is closed only later, and must not keep the original until then.
    kept: Callable[[], Any] = ref(stream)

    async def items() -> AsyncIterator[Any]:
        if begin is not None:
            await begin()
        try:
            while True:
                try:
                    item = await anext(kept())
                except StopAsyncIteration:
                    break
                yield item
            response = await kept().get_final_response()
        except BaseException as error:
            await fail(error)
            raise
        finally:
            unfinished = kept()
            if unfinished is not None:
                await unfinished.close()
        await end(response)

    return ResponseStream(items(), finalizer=lambda _: stream.get_final_response())


async def _execute(context: Any, arguments: Any, call_next: Callable[[], Awaitable[None]]) -> Any:
    """Execute a tool as the model called it."""
    context.arguments = arguments
    try:
        await call_next()
    except Exception as error:
        if type(error).__module__ != FunctionTool.__module__:
            raise
        raise ControlFlow("the tool does not take these arguments") from error
    if _is_request(context.result):
        raise ControlFlow("middleware put the call to a person", context.result)
    return context.result


def _is_request(result: object) -> bool:
    return isinstance(result, Content) and result.type == "function_approval_request"


def _is_function_middleware(middleware: Any) -> bool:
    if isinstance(middleware, FunctionMiddleware | ChatMiddleware):
        return isinstance(middleware, FunctionMiddleware)
    # The decorators of the framework set it.
    if getattr(middleware, "_middleware_type", None) is MiddlewareType.FUNCTION:
        return True
    first = next(iter(inspect.signature(middleware).parameters.values())).annotation
    return FunctionInvocationContext.__name__ in str(first)


def _journaled(result: object) -> object:
    """Return the recorded form of a tool's result: the text, or JSON of its contents."""
    if not isinstance(result, list):
        return result
    contents: list[object] = []
    for each in result:
        if not isinstance(each, Content):
            return result
        contents.append(each.to_dict())
    if len(result) == 1 and result[0].type == "text":
        return result[0].text
    return contents


def _restored(output: object) -> Any:
    """Restore a tool's result from its recorded form."""
    if not isinstance(output, list):
        return FunctionTool.parse_result(output)
    contents: list[Any] = []
    for each in output:
        if not isinstance(each, dict) or "type" not in each:
            return FunctionTool.parse_result(output)
        contents.append(Content.from_dict(each))
    return contents


def _requires_approval(tool: Any) -> bool:
    return bool(tool.approval_mode == "always_require")


def _fields(tool: Any) -> dict[str, object]:
    """Return the fields that describe a tool, including those that it states itself."""
    stated = (tool.additional_properties or {}).get(METADATA)
    return tool_fields(
        tool.description,
        tool.parameters(),
        stated=stated,
        kind="function",
        # It stands in for another one only if a person agrees.
        dangerous=_requires_approval(tool),
    )


WorkflowT = TypeVar("WorkflowT")


def replanned(
    workflow: WorkflowT,
    engine: ReplanningEngine | None = None,
    *,
    capabilities: Capabilities | None = None,
    agents: Sequence[Any] = (),
    approvals: bool = True,
    thread: str | None = None,
) -> WorkflowT:
    """Attach a workflow: the engine replaces or skips agents that fail, or asks a person.

    Each run executes a plan with one task for each agent, including those that have not begun.

    Args:
        workflow: as `SequentialBuilder`, `ConcurrentBuilder` or `WorkflowBuilder` builds it.
        engine: the engine; by default one with its defaults.
        capabilities: by the name of an agent, its capability, or the fields that `replanning.tool`
            takes. Agents of the same capability can stand in for one another.
        agents: further agents that can stand in.
        approvals: whether a question to a person becomes a request of the workflow. Otherwise
            nobody is asked, not even through the gate of the engine, and the agent's own exception
            is raised.
        thread: an id for the work; its last run is resumed unless it has ended, and agents that
            have finished are not run again.

    Returns:
        The same workflow.

    Raises:
        ValueError: capabilities name agents that do not exist, or a field is not valid for an
            agent.
    """
    attachment = _Attachment(
        workflow,
        ReplanningEngine() if engine is None else engine,
        capabilities=capabilities,
        stand_ins=agents,
        approvals=approvals,
        thread=thread,
    )
    attachment.attach()
    return workflow


class _Attachment:
    """A workflow whose agents are the steps of a plan, and the session of its current run.

    A turn of an agent is the handling of one message by its executor. The first turn performs the
    step; further ones, such as after the feedback of a person, go to the agent that performed it.
    The class has many attributes because a workflow keeps no state of its own that survives its
    runs.

    Attributes:
        engine: the engine.
        members: the agents of the workflow, by the ids of their executors.
        agents: all agents, by name.
        session: the session of the current run.
        performers: by executor, the agent that stood in for its own, with its session.
        failures: by executor, the exception of its agent that a person was asked about.
    """

    def __init__(
        self,
        workflow: Any,
        engine: ReplanningEngine,
        *,
        capabilities: Capabilities | None,
        stand_ins: Sequence[Any],
        approvals: bool,
        thread: str | None,
    ) -> None:
        self._workflow = workflow
        self.engine = engine
        self._approvals = approvals
        self._stated_thread = thread
        self._thread = ""
        executors = workflow.get_executors_list()
        self.members: dict[str, Any] = {}
        for executor in executors:
            member = _member_of(executor)
            if member is not None:
                self.members[executor.id] = member
        self.agents = {_name_of(agent): agent for agent in (*self.members.values(), *stand_ins)}
        self._steps_of_plan = self._make_steps()
        self._described = {name: agent.description for name, agent in self.agents.items()}
        self._capabilities = capabilities
        # This checks the capabilities.
        agent_plan("", self._steps_of_plan, self._described, capabilities)
        self._task: SessionTask | None = None
        self._steps: AgentSteps | None = None
        self._turns = set[str]()  # executors whose turn has come
        self._restored = set[str]()  # those whose steps were done before the workflow was restored
        self._sessions: dict[tuple[str, str], Any] = {}  # by executor and agent: those of stand-ins
        self.session: Session | None = None
        self.performers: dict[str, tuple[str, Any]] = {}
        self.failures: dict[str, BaseException] = {}

    def attach(self) -> None:
        """Route the runs of the workflow, its executors and its agents through this object."""
        for executor in self._workflow.get_executors_list():
            if executor.id in self.members:
                executor.execute = partial(self._execute, executor.id, executor.execute)
        for agent in self.members.values():
            if not isinstance(vars(agent).get("run"), _AttachedAgent):
                agent.run = _AttachedAgent(agent)
        self._original_run = self._workflow.run
        self._workflow.run = self._run

    def _make_steps(self) -> list[AgentStep]:
        """Return a step for each agent that the workflow always runs."""
        steps: list[AgentStep] = []

        def visit(executor_id: str, before: Sequence[str]) -> Sequence[str]:
            if executor_id not in self.members:
                return before
            name = _name_of(self.members[executor_id])
            steps.append(AgentStep(executor_id, name, tuple(before)))
            return (executor_id,)

        start = self._workflow.get_start_executor().id
        visit_certain_nodes(start, _edges_of(self._workflow), visit)
        return steps

    def _run(self, message: Any = None, *, stream: bool = False, **options: Any) -> Any:
        """Run the workflow, and its session around it if it has a plan."""
        if not self._steps_of_plan:
            return self._original_run(message, stream=stream, **options)
        ran = self._original_run(message, stream=stream, **options)
        is_new = message is not None
        if not stream:
            return self._await(ran, message, is_new)
        return _followed(ran, self._end, self._fail, partial(self._begin, message, is_new))

    async def _await(self, ran: Coroutine[Any, Any, Any], message: Any, is_new: bool) -> Any:
        try:
            await self._begin(message, is_new)
        except BaseException:
            ran.close()  # otherwise the framework considers the workflow running
            raise
        try:
            result = await ran
        except BaseException as error:
            await self._fail(error)
            raise
        await self._end(result)
        return result

    async def _begin(self, message: Any, is_new: bool) -> None:
        """Open the session of a run: a new one, or the one left by a request or a checkpoint."""
        if self._task is not None and self._task.is_of_this_loop():
            # The stream of the last run was dropped, and the event loop is about to close it.
            await self._task.ended()
        if is_new:
            self._turns.clear()
            self._sessions.clear()
            self.performers.clear()
            self.failures.clear()
        if is_new or not self._thread:
            self._thread = self._stated_thread or new_run_id()
        run_id = thread_run(self.engine, self._thread)
        earlier = _OPEN.get(run_id)
        if earlier is not None:
            await earlier.make_way()
        objective = ""
        if is_new:
            objective = " ".join(_texts(message))
        else:
            known = find_run(self.engine, run_id)
            if known is not None:
                objective = known.objective
        plan = agent_plan(objective, self._steps_of_plan, self._described, self._capabilities)
        opened = agent_session(self.engine, plan, thread=self._thread, approvals=self._approvals)
        self._task = SessionTask(opened)
        try:
            self.session = await self._task.session()
        except BaseException:
            await self._leave("the workflow was cut off before it began")
            raise
        _OPEN[self.session.run.id] = self
        self._restored.clear()
        if not is_new:
            live = self.session.run.live
            for step in self._steps_of_plan:
                if live.entry(TaskId(step.id)).satisfied:
                    self._restored.add(step.id)
        self._steps = AgentSteps(self.engine, self.session, asks=self._approvals)

    async def make_way(self) -> None:
        """Leave the session to another workflow of the thread, as soon as no agent is active.

        The stream of this one may never be read to its end.
        """
        if self._task is not None and self._task.is_of_this_loop():
            await self._task.until_idle()
            await self._leave("another workflow continues the thread")

    async def _fail(self, error: BaseException) -> None:
        await self._leave(f"the workflow raised {type(error).__name__}")

    async def _end(self, result: Any) -> None:
        if result.get_request_info_events():
            await self._leave("the workflow waits for its user")
            return
        if self._steps is not None:
            self._steps.skip_rest()
        await self._leave()

    async def _leave(self, pause_reason: str = "") -> None:
        task = self._task
        self._task = None
        self._steps = None
        if task is None:
            return
        try:
            await task.end(pause_reason)
        except Exception:
            # With a reason, the exception of the workflow is the one to raise.
            if not pause_reason:
                raise

    async def _execute(self, executor_id: str, original: Any, *args: Any, **kwargs: Any) -> None:
        """Have an executor handle a message, as a turn of its agent."""
        token = _TURN.set((self, executor_id))
        try:
            await original(*args, **kwargs)
        finally:
            _TURN.reset(token)

    def ask(self, executor_id: str, agent: Any, messages: Any, options: dict[str, Any]) -> Any:
        """Run the agent of an executor, or what replaces it, with the result of its own `run`."""
        original = _original_run(agent)
        if self._steps is None or all(step.id != executor_id for step in self._steps_of_plan):
            return original(messages, **options)
        given = self._without_answers(messages or ())
        if self._is_further_turn(executor_id, given):
            if executor_id in self.performers:
                name, session = self.performers[executor_id]
                options = options | {"session": session}
                original = _original_run(self.agents[name])
            return original(given, **options)
        self._turns.add(executor_id)
        turn = _Turn(self, executor_id, given, options)
        return turn.stream() if options.get("stream") else turn.respond()

    def _is_further_turn(self, executor_id: str, messages: Sequence[Any]) -> bool:
        """Return whether the step of an executor is done, and the messages ask something else."""
        assert self.session is not None
        live = self.session.run.live
        if not live.entry(TaskId(executor_id)).satisfied:
            return False
        if executor_id in self._turns:
            return True
        # A restored workflow may repeat its messages, or ask something else.
        output: object = None
        if executor_id in self._restored:
            with suppress(NoResult):
                output = live.results.output_of(TaskId(executor_id))
        return isinstance(output, Mapping) and output.get(_ASKED) != _digest(messages)

    def _without_answers(self, messages: Sequence[Any]) -> list[Any]:
        """Pass on the user's answers; return the messages, with the original ones in their place."""
        given: list[Any] = []
        for message in messages:
            answer = _answer_in(message)
            if answer is None:
                given.append(message)
                continue
            answer_questions(
                self.engine,
                named_questions(answer.additional_properties[METADATA]),
                approved=answer.approved,
                by="the user of the workflow",
            )
            given += [Message.from_dict(each) for each in answer.additional_properties[_ASKED]]
        return given

    async def perform(self, step: str, execute: Execute) -> object:
        """Perform a step."""
        # Another workflow may have continued the thread.
        if self._task is None or self._steps is None:
            return await execute(_name_of(self.members[step]), {})
        known = self._turns | self._restored
        with self._task.busy():
            return await self._steps.perform(step, execute, known=known, passes=(_Waiting,))

    def session_for(self, executor_id: str, name: str) -> Any:
        """Return the session of a stand-in, kept while the workflow waits for a person."""
        key = (executor_id, name)
        if key not in self._sessions:
            self._sessions[key] = self.agents[name].create_session()
        return self._sessions[key]


class _Turn:
    """The turn of an agent in which its step is performed."""

    def __init__(
        self, attachment: _Attachment, step: str, messages: Sequence[Any], options: dict[str, Any]
    ) -> None:
        self._attachment = attachment
        self._step = step
        self._messages = messages
        self._options = options
        self._responses: list[tuple[object, Any]] = []

    async def respond(self) -> Any:
        """Return the response of the agent, or of what replaces it."""
        try:
            output = await self._attachment.perform(self._step, self._execute)
        except (_Waiting, CallFailed) as error:
            return self._response_instead(error)
        return self._response_of(output)

    def stream(self) -> Any:
        """Return a stream of the updates of the agent, or of what replaces it."""
        outputs: list[object] = []
        final: list[Any] = []

        async def performing(execute: Execute) -> None:
            outputs.append(await self._attachment.perform(self._step, execute))

        async def updates() -> AsyncIterator[Any]:
            try:
                async with aclosing(forward(performing, self._stream_agent)) as stream:
                    async for update in stream:
                        yield update
            except (_Waiting, CallFailed) as error:
                final.append(self._response_instead(error))
                return
            final.append(self._response_of(outputs[0]))
            if not self._responses:  # it was done before
                for message in final[0].messages:
                    yield AgentResponseUpdate(
                        contents=message.contents,
                        role=message.role,
                        author_name=message.author_name,
                        message_id=message.message_id,
                    )

        return ResponseStream(updates(), finalizer=lambda _: final[0])

    async def _execute(self, name: str, arguments: Arguments) -> object:
        run, messages, options = self._call(name, arguments)
        return self._journaled(name, await run(messages, **options))

    async def _stream_agent(
        self, name: str, arguments: Arguments, end: Callable[[object], None]
    ) -> AsyncGenerator[Any, None]:
        run, messages, options = self._call(name, arguments)
        stream = run(messages, **options)
        updates = []
        if not isinstance(stream, ResponseStream):  # of an agent that is not the framework's own
            async for update in stream:
                updates.append(update)
                yield update
            end(self._journaled(name, AgentResponse.from_updates(updates)))
            return
        try:
            async for update in stream:
                yield update
            response = await stream.get_final_response()
        finally:
            await stream.close()
        end(self._journaled(name, response))

    def _call(self, name: str, arguments: Arguments) -> tuple[Any, list[Any], dict[str, Any]]:
        """Return the `run` of an agent, and the messages and options for it."""
        agent = self._attachment.agents.get(name)
        if agent is None:
            raise LookupError(f"there is no agent called {name!r}")
        messages = list(self._messages)
        earlier: Any = arguments.get(EARLIER, ())
        for _, output in earlier:
            messages += _restored_response(output).messages
        if arguments.get(TASK):
            messages.append(Message("user", [str(arguments[TASK])]))
        options = self._options
        if agent is not self._attachment.members[self._step]:
            options = options | {"session": self._attachment.session_for(self._step, name)}
        return _original_run(agent), messages, options

    def _journaled(self, name: str, response: Any) -> object:
        """Return the recorded form of a response.

        Raises:
            _Waiting: the agent waits for the user.
        """
        if response.user_input_requests:
            raise _Waiting(response)
        if name != _name_of(self._attachment.members[self._step]):
            session = self._attachment.session_for(self._step, name)
            self._attachment.performers[self._step] = (name, session)
        plain = to_jsonable_python(response.to_dict(), serialize_unknown=True)
        output = {**plain, _ASKED: _digest(self._messages)}
        self._responses.append((output, response))
        return output

    def _response_of(self, output: object) -> Any:
        for recorded, response in self._responses:
            if recorded is output:
                return response
        return _restored_response(output)

    def _response_instead(self, error: Exception) -> Any:
        """Return the response for a step that was not done: it waits for a person, or was skipped.

        Raises:
            Exception: no alternative is left.
        """
        failures = self._attachment.failures
        if isinstance(error, _Waiting):
            return error.response
        if isinstance(error, CallSkipped):
            return AgentResponse(messages=[])
        if not isinstance(error, NeedsHuman):
            raise failures.get(self._step, error)
        failures[self._step] = error.own_error
        assert self._attachment.session is not None
        run_id = self._attachment.session.run.id
        shown = shown_questions(self._attachment.engine, run_id, error.questions)
        name = _name_of(self._attachment.members[self._step])
        request = Content.from_function_approval_request(
            error.questions[0],
            Content.from_function_call(error.questions[0], name, arguments={}),
            additional_properties={
                METADATA: shown,
                _ASKED: [message.to_dict() for message in self._messages],
            },
        )
        return AgentResponse(messages=[Message("assistant", [request])])


class _Waiting(ControlFlow):
    """An agent waits for the user, with the requests in its response."""

    def __init__(self, response: Any) -> None:
        super().__init__("the agent waits for its user")
        self.response = response


class _AttachedAgent:
    """The `run` of an agent object: that of the plan in its executor's turn, else the original."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent
        self.original = agent.run
        update_wrapper(self, self.original)

    def __call__(self, messages: Any = None, **options: Any) -> Any:
        turn = _TURN.get()
        if turn is not None:
            attachment, executor_id = turn
            if attachment.members[executor_id] is self.agent:
                return attachment.ask(executor_id, self.agent, messages, options)
        return self.original(messages, **options)


_ASKED: Final = "replanning_asked"
"""Key of an agent's messages in a request about it, and of their digest in a recorded response."""


def _original_run(agent: Any) -> Any:
    attached = vars(agent).get("run")
    if isinstance(attached, _AttachedAgent):
        return attached.original
    return agent.run


def _name_of(agent: Any) -> str:
    return str(agent.name or agent.id)


def _member_of(executor: Any) -> Any:
    """Return the one agent that an executor runs, or None."""
    if isinstance(executor, AgentExecutor):
        return executor.agent
    if not isinstance(executor, WorkflowExecutor):
        return None
    agents: list[Any] = []
    for each in executor.workflow.get_executors_list():
        agent = _member_of(each)
        if agent is not None:
            agents.append(agent)
    if len(agents) == 1:
        return agents[0]
    return None


def _edges_of(workflow: Any) -> Iterator[WorkflowEdge]:
    """Yield the edges between the executors of a workflow, without those for responses."""
    known = {executor.id for executor in workflow.get_executors_list()}
    for group in workflow.edge_groups:
        is_joined = isinstance(group, FanInEdgeGroup)
        is_selected = isinstance(group, FanOutEdgeGroup) and group.selection_func is not None
        for number, edge in enumerate(group.edges):
            if edge.source_id in known:
                join = group.id if is_joined else (group.id, number)
                is_certain = not is_selected and not edge.has_condition
                yield WorkflowEdge(edge.source_id, edge.target_id, is_certain, join)


def _answer_in(message: Any) -> Any:
    """Return the user's answer to a question about an agent, if a message is one."""
    for content in getattr(message, "contents", ()):
        is_answer = content.type == "function_approval_response"
        if is_answer and _ASKED in (content.additional_properties or {}):
            return content
    return None


def _digest(messages: Sequence[Any]) -> str:
    texts = [(str(message.role), message.text) for message in messages]
    return hashlib.blake2b(repr(texts).encode(errors="replace"), digest_size=8).hexdigest()


def _restored_response(output: Any) -> Any:
    """Restore the response of a step, or join those of the steps that replaced it."""
    if "messages" in output:
        fields = {name: value for name, value in output.items() if name != _ASKED}
        return AgentResponse.from_dict(fields)
    messages = [each for part in output.values() for each in _restored_response(part).messages]
    return AgentResponse(messages=messages)


_OPEN: Final = WeakValueDictionary[str, _Attachment]()
"""The workflows with an open run in this process, by the id of the run."""

_TURN: Final[ContextVar[tuple[_Attachment, str] | None]] = ContextVar(
    "replanning_turn", default=None
)
"""The attachment, and the id of the executor that is handling a message."""


def _texts(message: Any) -> list[str]:
    """Return the texts of the message that starts a workflow."""
    parts = message if isinstance(message, list) else [message]
    return [str(getattr(each, "text", each)) for each in parts]
