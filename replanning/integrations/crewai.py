"""CrewAI: `with replanned(crew, capabilities={"search": "web", "search_archive": "web"}): crew.kickoff()`.

Tested with crewai 1.15.30. See docs/integrations/crewai.md for what happens with a tool that fails, and for what is lost.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 # CrewAI executes the coroutines of its tools in loops of asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import anyio.to_thread
from pydantic import PrivateAttr, SerializationInfo, model_serializer

from replanning.engine.engine import ReplanningEngine
from replanning.errors import CallSkipped, NeedsHuman, NotRunning, StoreError, TransientError
from replanning.integrations.kit import (
    ONE_ATTEMPT,
    Capabilities,
    ReportedFailure,
    describe_tools,
    missing_framework,
    reported_result,
    thread_run,
    tool_fields,
)
from replanning.integrations.session_thread import SessionThread
from replanning.live.states import TaskState
from replanning.plan.tasks import Task
from replanning.plan.types import MAX_NAME_CHARS, AttemptId, TaskId
from replanning.run.run import PlanRun

try:
    from crewai import Crew
    from crewai.events.event_bus import crewai_event_bus
    from crewai.events.types.observation_events import (
        PlanRefinementEvent,
        PlanReplanTriggeredEvent,
        PlanStepCompletedEvent,
    )
    from crewai.events.types.task_events import TaskCompletedEvent, TaskStartedEvent
    from crewai.flow.async_feedback import HumanFeedbackPending
    from crewai.hooks.dispatch import HookAborted
    from crewai.tools import BaseTool
    from crewai.tools.tool_failure import ToolFailure, ToolFailureReason
    from crewai.utilities.string_utils import sanitize_tool_name
except ImportError as error:
    raise missing_framework(
        __name__, "CrewAI, and was tested with its version 1.15.30", error
    ) from error

CrewT = TypeVar("CrewT")

_PASSES: Final = (HookAborted, HumanFeedbackPending)

_FOR_THE_MODEL: Final = (ToolFailureReason.USAGE_LIMIT, ToolFailureReason.INVALID_INPUT)
"""Reasons of a failure that the model is told, because another tool would not help."""

_NOTED: Final = (PlanStepCompletedEvent, PlanRefinementEvent, PlanReplanTriggeredEvent)
"""Events of agents that plan their work in steps."""

_NOTED_FIELDS: Final = {
    "agent_role",
    "step_number",
    "step_description",
    "success",
    "error",
    "replan_reason",
}

_MAX_ID_CHARS: Final = 60

_current: ContextVar[_Attachment | None] = ContextVar("replanning_crewai", default=None)
"""The attachment in whose block a crew runs; CrewAI copies the context to its threads, also to those of its handlers."""


@contextmanager
def replanned(
    crew: CrewT,
    engine: ReplanningEngine | None = None,
    *,
    capabilities: Capabilities | None = None,
    objective: str = "",
    thread: str | None = None,
) -> Iterator[CrewT]:
    """Attach a crew, or a single agent: within the block, an engine retries or replaces calls of its tools that fail.

    All runs of the crew in the block, also in other threads and of copies of the crew, are one session. The tasks of the
    crew are recorded as tasks of that session, but CrewAI alone decides about them. The session is `paused` if an
    exception leaves the block, and has failed if a task of the crew was begun but not done.

    Args:
        crew: the crew or agent; after the block it has its own tools again.
        engine: the engine; by default one with its defaults.
        capabilities: by the name of a tool, its capability, or the fields that `replanning.tool` takes. Tools of the same
            capability can stand in for one another.
        objective: what the crew is for; by default its name.
        thread: an id of the work that the crew does; its last session is resumed unless it has ended.

    Raises:
        RunOwned: another process owns the session of this thread.
        StoreError: the session of this thread has another objective, or the store fails.
        TypeError: this is neither a crew nor an agent.
        ValueError: capabilities name tools that do not exist, a field is not valid for a tool, or the crew is attached
            already.
    """
    lists, attachment = _lists_of_tools(crew), _Attachment()
    wrapped = [attachment.wrap(each) for each in lists]
    stated = {
        sanitize_tool_name(str(name)): fields for name, fields in (capabilities or {}).items()
    }
    described = describe_tools(attachment.described, stated)
    engine = ReplanningEngine() if engine is None else engine
    named = (
        f"Run of the crew {crew.name}"
        if isinstance(crew, Crew)
        else f"Run of the agent {crew.role}"  # type: ignore[attr-defined]
    )
    run_id = None if thread is None else thread_run(engine, thread)
    with SessionThread.open(
        engine.session(objective or named, tools=described, run_id=run_id, passes=_PASSES)
    ) as attachment.session:
        token = _current.set(attachment)
        attachment.listen()
        try:
            for each, own in zip(lists, wrapped, strict=True):
                each.tools[:] = own
            yield crew
        finally:
            for each in (*lists, *_lists_of_tools(crew)):  # which the program may have replaced
                each.tools[:] = [
                    tool._original if isinstance(tool, _Tool) else tool for tool in each.tools
                ]
            attachment.close()
            _current.reset(token)


def _lists_of_tools(crew: Any) -> list[_Tools]:
    """Return the lists of tools of a crew and its agents; several may be the same list."""
    holders: list[tuple[Any, Any]] = []
    if isinstance(crew, Crew):
        agents = [*crew.agents, *(task.agent for task in crew.tasks), crew.manager_agent]
        holders += [(agent, agent) for agent in agents if agent is not None]
        holders += [(task, task.agent) for task in crew.tasks]
    else:
        holders.append((crew, crew))
    lists: dict[int, _Tools] = {}
    for holder, agent in holders:
        if holder.tools:
            found = lists.setdefault(id(holder.tools), _Tools(holder.tools))
            found.repeats = found.repeats or _writes_calls(agent)
    return list(lists.values())


@dataclass
class _Tools:
    """A list of tools that the program gave to an agent or a task.

    Attributes:
        tools: the list.
        repeats: whether CrewAI repeats a call of these tools that fails, as it does if the model writes calls as text.
    """

    tools: list[Any]
    repeats: bool = False


def _writes_calls(agent: Any) -> bool:
    """Return whether the model of an agent writes its calls as text, instead of calling functions."""
    supports = getattr(getattr(agent, "llm", None), "supports_function_calling", None)
    return callable(supports) and not supports()


class _MayPass(ReportedFailure, TransientError):
    """Failure that a tool returned as one that may pass."""


class _Attachment:
    """The session of one block, the descriptions of its tools, and the tasks of the crew that were begun."""

    def __init__(self) -> None:
        self.described: dict[str, dict[str, object]] = {}
        self._tools: dict[str, _Tool] = {}
        self.session: SessionThread | None = None
        self._attempts: dict[str, AttemptId] = {}
        self._early: dict[str, str] = {}
        self._handlers = {
            TaskStartedEvent: self._on_started,
            TaskCompletedEvent: self._on_completed,
        }
        self._handlers |= dict.fromkeys(_NOTED, self._on_step)

    def wrap(self, given: _Tools) -> list[_Tool]:
        """Return the tools of one agent or task as tools whose calls are calls of the session."""
        own: dict[str, _Tool] = {}
        wrapped = []
        fields = {"retry": ONE_ATTEMPT} if given.repeats else {}
        for original in given.tools:
            if isinstance(original, _Tool):
                raise ValueError(
                    "the crew is attached already; attach it once, for as long as it is used"
                )
            made = _Tool.wrapping(original, self, own)
            name = made._called
            wrapped.append(made)
            own.setdefault(name, made)
            self._tools.setdefault(name, made)
            if name not in self.described:
                schema = original.args_schema.model_json_schema()
                self.described[name] = tool_fields(
                    original.description, schema, kind="function", **fields
                )
        return wrapped

    def listen(self) -> None:
        """Listen to the events of crews."""
        for kind, handler in self._handlers.items():
            crewai_event_bus.register_handler(kind, handler)

    def close(self) -> None:
        """Leave the calls of tools to CrewAI."""
        crewai_event_bus.flush()  # its handlers run in threads
        for kind, handler in self._handlers.items():
            crewai_event_bus.off(kind, handler)
        self.session = None

    def call(
        self, tool: _Tool, own_function: Callable[..., Any], arguments: Mapping[str, object]
    ) -> Any:
        """Call a tool, or what replaces it, from any thread but that of the session."""
        session, called = self.session, tool._called
        if session is None or not _fits(tool, arguments):  # the tool itself tells the model
            return own_function(**arguments)

        def execute(name: str, values: Mapping[str, object]) -> object:
            function = (
                own_function
                if name == called
                else (tool._own.get(name) or self._tools[name])._original.run
            )
            result = function(**values)
            if asyncio.iscoroutine(result):
                result = asyncio.run(result)
            if isinstance(result, ToolFailure) and not (
                name == called and result.reason in _FOR_THE_MODEL
            ):
                raise (_MayPass if result.retryable else ReportedFailure)(
                    result.as_agent_message(), result
                )
            return result

        try:
            return session.invoke(called, arguments, execute)
        except CallSkipped as skipped:
            told = str(skipped)
            return (
                ToolFailure(message=told) if tool.result_as_answer else told
            )  # a failure is never the final answer
        except (NeedsHuman, ReportedFailure) as error:
            return reported_result(error)

    def _on_started(self, source: Any, event: Any) -> None:
        self._record(self._begin, str((event.task or source).id), event.task or source)

    def _on_completed(self, source: Any, event: Any) -> None:
        self._record(self._finish, str((event.task or source).id), event.output.raw)

    def _on_step(self, _: Any, event: Any) -> None:
        data = event.model_dump(mode="json", include=_NOTED_FIELDS, exclude_none=True)
        self._record(lambda run: run.note(event.type, data))

    def _record(self, function: Callable[..., object], *args: object) -> None:
        """Record an event of a crew that runs in this block, in the thread of the session; other handlers do not wait."""
        session = self.session
        if _current.get() is self and session is not None:

            def record() -> None:
                with suppress(NotRunning, StoreError):
                    function(session.session.run, *args)

            session.start(record)

    def _begin(self, run: PlanRun, key: str, task: Any) -> None:
        if key in self._attempts:  # it failed, and the crew runs it again
            return
        described = task.name or task.description
        stem = re.sub(r"[^\w.-]+", "-", described)[:_MAX_ID_CHARS].strip("-.") or "task"
        task_id, number = stem, 1
        while task_id in run.live and run.live.entry(TaskId(task_id)).state is not TaskState.READY:
            task_id = f"{stem}-{(number := number + 1)}"
        if task_id not in run.live:
            name = " ".join(described.split())[:MAX_NAME_CHARS]
            run.add_task(Task(id=task_id, name=name, idempotent=True), reason="the crew began it")
        self._attempts[key] = run.started(task_id)
        if key in self._early:
            self._finish(run, key, self._early.pop(key))

    def _finish(self, run: PlanRun, key: str, output: str) -> None:
        if key in self._attempts:
            run.succeeded(self._attempts.pop(key), output)
        else:  # threads may hand over the two events in any order
            self._early[key] = output


class _Tool(BaseTool):  # type: ignore[misc] # its types may not be installed
    """Tool whose calls are calls of a session; all else is that of the original."""

    _original: Any = PrivateAttr()
    _attachment: Any = PrivateAttr()
    _own: Any = PrivateAttr()
    _called: str = PrivateAttr()

    @classmethod
    def wrapping(cls, original: Any, attachment: _Attachment, own: Mapping[str, _Tool]) -> _Tool:
        """Return a tool in the place of another.

        Args:
            original: the other.
            attachment: takes the calls.
            own: the tools of the same agent, which take precedence over those of others.
        """
        made: _Tool = cls.model_construct(
            **{name: getattr(original, name) for name in BaseTool.model_fields}
        )
        made._original, made._attachment, made._own = original, attachment, own
        made._called = sanitize_tool_name(original.name)
        return made

    def __str__(self) -> str:
        return str(self._original)  # a crew with `planning=True` shows it to the model

    def __repr__(self) -> str:
        return repr(self._original)

    @property
    def formatted_description(self) -> str:
        """The description for the model."""
        return str(self._original.formatted_description)

    @model_serializer
    def _serialize(self, info: SerializationInfo) -> Any:
        return self._original.model_dump(mode=info.mode)

    def format_output_for_agent(self, raw_result: Any) -> str:
        """Return a result as the model sees it."""
        return str(self._original.format_output_for_agent(raw_result))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Execute the tool, or what replaces it, as a model that calls functions calls it."""
        if args:
            return self._original.run(*args, **kwargs)
        return self._attachment.call(self, self._original.run, kwargs)

    async def arun(self, *args: Any, **kwargs: Any) -> Any:
        """Execute the tool, or what replaces it."""
        return await anyio.to_thread.run_sync(partial(self.run, *args, **kwargs))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def to_structured_tool(self) -> Any:
        """Return the tool as a model that writes its calls as text uses it; CrewAI counts these calls itself."""
        made = self._original.to_structured_tool()
        function, fields = made.func, self.args_schema.model_fields

        def call(**arguments: Any) -> Any:
            chosen = {
                name: value
                for name, value in arguments.items()
                if name not in fields or fields[name].default != value
            }
            return self._attachment.call(
                self, lambda **values: function(**{**arguments, **values}), chosen
            )

        made.func = call
        return made


# A field of the base class is overridden only by what the class gets later. CrewAI and the original count together.
_Tool.current_usage_count = property(
    lambda tool: tool._original.current_usage_count,
    lambda tool, count: setattr(tool._original, "current_usage_count", count),
)


def _fits(tool: Any, arguments: Mapping[str, object]) -> bool:
    try:
        tool.args_schema.model_validate(arguments)
    except ValueError:
        return False
    return True
