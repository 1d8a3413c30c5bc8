"""Microsoft Agent Framework: `Agent(…, middleware=[Replanned({"search": "web", "search_archive": "web"})])`.

Tested with agent-framework-core 1.23 and agent-framework-orchestrations 1.4. See docs/integrations/agent_framework.md.

What is lost: a tool that appears only in a later step of a run is not replaced. Function middleware that a context provider
adds does not see a tool that stands in for another one. The plan of Magentic is text: see `planned`.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from pydantic_core import to_jsonable_python

from replanning.engine.engine import ReplanningEngine
from replanning.engine.session import Session
from replanning.environment import new_run_id
from replanning.errors import (
    CallSkipped,
    NeedsHuman,
    NotRunning,
    StoreError,
)
from replanning.integrations.kit import (
    UNFINISHED,
    Capabilities,
    ControlFlow,
    SessionTask,
    call_tool,
    describe_tools,
    missing_framework,
    output_in_run,
    shown_questions,
    tool_fields,
    withdraw_questions,
)

try:
    from agent_framework import (
        AgentMiddleware,
        ChatMiddleware,
        Content,
        FunctionInvocationContext,
        FunctionMiddleware,
        FunctionTool,
        MiddlewareFailure,
        MiddlewareTermination,
        MiddlewareType,
        ResponseStream,
        UserInputRequiredException,
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
        __name__,
        "the Microsoft Agent Framework (tested with agent-framework-core 1.23)",
        "agent-framework",
        error,
    ) from error

METADATA: Final = "replanning"
"""Key in the additional properties of a tool, for fields of its description, and of a request for an approval, for the
questions; and the beginning of the key in the state of an `AgentSession` for the run that it continues."""


_PASSES: Final = (MiddlewareTermination, MiddlewareFailure, UserInputRequiredException)


class Replanned(AgentMiddleware):  # type: ignore[misc] # its types may not be installed
    """Middleware of an agent: a tool that fails is replaced, tried again, skipped or put to a person by the engine.

    Each run of the agent that calls a tool is a session of the engine. A run that ends with a request to the user, or with an
    exception, leaves its session paused; the next run with the same `AgentSession` resumes it.

    Args:
        capabilities: by the name of a tool, its capability, or the fields that `replanning.tool` takes. Tools of the same
            capability can stand in for one another. The `additional_properties` of a tool may state fields, too, under
            `replanning`.
        engine: the engine; by default one with its defaults.
        objective: what the agent is for; by default its name.
        approvals: whether a question to a person becomes a request for the approval of the call; by default if one of the
            tools requires approval. Without an `AgentSession`, and otherwise, the agent sees the exception of its tool.

    Raises:
        TypeError: an argument has another type.
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
        self.capabilities = dict(capabilities or {})
        self.objective = objective
        self.approvals = approvals

    async def process(self, context: Any, call_next: Callable[[], Awaitable[None]]) -> None:
        """Run the agent, with its calls of tools as those of a session."""
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
    """One run of an agent, and its session, which is open from the first call of a tool until the run ends."""

    def __init__(self, attachment: Replanned, context: Any) -> None:
        self._attachment, self._engine = attachment, attachment.engine
        name = context.agent.name or ""
        self._objective = attachment.objective or (
            f"Run of the agent {name}" if name else "Run of an agent"
        )
        self._agent_session, self._state_key = context.session, f"{METADATA} {name}".rstrip()
        self._resumed: str | None = None
        self._ended = ""  # the run whose approvals may come a second time
        if context.session is not None and (left := context.session.state.get(self._state_key)):
            known = next((each for each in self._engine.store.runs() if each.run == left), None)
            if known is None or known.status in UNFINISHED:
                self._resumed = str(left)
            else:
                self._ended = str(left)
        self._run_id = self._resumed
        self._task: SessionTask | None = None
        self._asks = False
        given = context.client_kwargs.get("middleware", ())
        given = [
            each for each in given if not isinstance(each, _AgentRun)
        ]  # of an earlier turn of the same loop
        client = getattr(context.agent, "client", None)
        self._others = [
            *getattr(client, "function_middleware", ()),
            *filter(_is_function_middleware, given),
        ]
        context.client_kwargs["middleware"] = [*given, self]

    async def _open(self, tools: Sequence[Any]) -> Session:
        if self._task is None:
            functions = [
                each
                for each in tools
                if isinstance(each, FunctionTool) and not each.declaration_only
            ]
            described = describe_tools(
                {each.name: _fields(each) for each in functions},
                self._attachment.capabilities if tools else None,
            )
            asks = self._attachment.approvals
            if asks is None:
                asks = not tools or any(
                    each.approval_mode == "always_require" for each in functions
                )
            self._asks = asks and self._agent_session is not None
            opened = self._engine.session(
                self._objective,
                tools=described,
                run_id=self._run_id,
                passes=_PASSES,
                asks=self._asks,
            )
            self._task = SessionTask(opened)
        session = await self._task.session()
        self._run_id = session.run.id
        return session

    def follow(self, stream: Any) -> Any:
        """Return a stream with the same updates and response, which ends the session when it ends or is closed."""

        async def updates() -> AsyncIterator[Any]:
            try:
                async for update in stream:
                    yield update
                response = await stream.get_final_response()
            except BaseException as error:
                await self.fail(error)
                raise
            finally:
                await stream.close()
            await self.end(response)

        return ResponseStream(updates(), finalizer=lambda _: stream.get_final_response())

    async def end(self, response: Any) -> None:
        """End the session, or leave it paused if the agent waits for its user."""
        if getattr(response, "user_input_requests", ()):
            # The answers name this run, also if they come twice, and no tool was called before them.
            self._run_id = self._run_id or new_run_id()
            await self._leave("the agent waits for its user")
            return
        if self._resumed:
            await self._open(())  # to end it, although no tool may have been called
        if self._asks and self._run_id is not None:
            withdraw_questions(self._engine, self._run_id)
        await self._leave()

    async def fail(self, error: BaseException) -> None:
        """Leave the session paused after an exception of the agent, which is the one to raise."""
        with suppress(Exception):
            await self._leave(f"the agent raised {type(error).__name__}")

    async def _leave(self, pause_reason: str = "") -> None:
        if pause_reason and self._run_id is not None and self._agent_session is not None:
            self._agent_session.state[self._state_key] = self._run_id
        if self._task is not None:
            await self._task.end(pause_reason)

    async def process(self, context: Any, call_next: Callable[[], Awaitable[None]]) -> None:
        """Call a tool, or what replaces it."""
        if self._ended and "approval_response" in context.metadata:
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
        # Only a call that a person is asked about is made again, by the next run, under the same id.
        is_keyed = self._asks or context.function.approval_mode == "always_require"
        key = context.metadata.get("function_call_occurrence_id", "") if is_keyed else ""

        async def execute(other: str, values: Mapping[str, object]) -> object:
            if other == name and values is arguments:
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
                approved_questions=_named_questions(response),
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

    async def _stand_in(self, context: Any, name: str, arguments: Mapping[str, object]) -> Any:
        """Execute a tool with arguments that the model did not choose, with the function middleware of the agent."""
        tool = next(
            each
            for each in context.tools or (context.function,)
            if getattr(each, "name", None) == name
        )
        own = FunctionInvocationContext(
            tool,
            dict(arguments),
            session=context.session,
            metadata={"call_id": context.metadata.get("call_id")},
            kwargs=context.kwargs,
            tools=context.tools,
            parent_service_session_state_keys=context.parent_service_session_state_keys,
        )

        async def go_on(index: int) -> None:
            if index == len(self._others):
                own.result = await tool.invoke(
                    arguments=own.arguments,
                    context=own,
                    tool_call_id=context.metadata.get("call_id"),
                )
                return
            middleware = self._others[index]
            await getattr(middleware, "process", middleware)(own, partial(go_on, index + 1))

        try:
            await go_on(0)
        except MiddlewareTermination as error:
            raise ToolException(f"middleware stopped the call of {name!r}: {error}") from error
        if _is_request(own.result):
            raise ToolException(f"middleware put the call of {name!r} to a person")
        return own.result


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


def _named_questions(response: Any) -> list[str]:
    """Return the questions that a response names, as the request did that it answers; None is no response."""
    shown = getattr(response, "additional_properties", {}).get(METADATA)
    if not isinstance(shown, list):
        return []
    return [str(each.get("question")) for each in shown if isinstance(each, Mapping)]


def _is_request(result: object) -> bool:
    return isinstance(result, Content) and result.type == "function_approval_request"


def _is_function_middleware(middleware: Any) -> bool:
    if isinstance(middleware, FunctionMiddleware | ChatMiddleware):
        return isinstance(middleware, FunctionMiddleware)
    marker = getattr(middleware, "_middleware_type", None)  # of the decorators
    first = next(iter(inspect.signature(middleware).parameters.values())).annotation
    return marker is MiddlewareType.FUNCTION or FunctionInvocationContext.__name__ in str(first)


def _journaled(result: object) -> object:
    """Return a result of a tool as the journal records it: the text, or JSON of its contents."""
    if not isinstance(result, list) or not all(isinstance(each, Content) for each in result):
        return result
    if len(result) == 1 and result[0].type == "text":
        return result[0].text
    return [each.to_dict() for each in result]


def _restored(output: object) -> Any:
    """Return the result of a tool that was recorded."""
    if isinstance(output, list) and all(
        isinstance(each, dict) and "type" in each for each in output
    ):
        return [Content.from_dict(each) for each in output]
    return FunctionTool.parse_result(output)


def _fields(tool: Any) -> dict[str, object]:
    """Return the fields of the description of a tool, which it may state itself."""
    # One that requires approval stands in for another one only if a person agrees.
    dangerous = tool.approval_mode == "always_require"
    stated = (tool.additional_properties or {}).get(METADATA)
    return tool_fields(
        tool.description, tool.parameters(), stated=stated, kind="function", dangerous=dangerous
    )
