"""CrewAI: `with replanned(crew, capabilities={"search": "web", …}): crew.kickoff()`.

Tested with crewai 1.15.30. See docs/integrations/crewai.md for failing tools and agents, and for
limitations.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 # CrewAI executes the coroutines of its tools in loops of asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any, Final, TypeVar

import anyio.to_thread
from pydantic import PrivateAttr, SerializationInfo, model_serializer

from replanning.engine.engine import ReplanningEngine
from replanning.engine.session import Execute
from replanning.errors import (
    CallSkipped,
    NotRunning,
    StoreError,
    TransientError,
)
from replanning.integrations.agent_plans import agent_fields
from replanning.integrations.kit import (
    ONE_ATTEMPT,
    Arguments,
    Capabilities,
    ReportedFailure,
    call_tool,
    describe_tools,
    missing_framework,
    thread_run,
    tool_fields,
    unknown_names,
)
from replanning.integrations.session_thread import SessionThread
from replanning.plan.types import MAX_NAME_CHARS

try:
    from crewai import Crew
    from crewai import Task as CrewTask
    from crewai.events.event_bus import crewai_event_bus
    from crewai.events.types.observation_events import (
        PlanRefinementEvent,
        PlanReplanTriggeredEvent,
        PlanStepCompletedEvent,
    )
    from crewai.flow.async_feedback import HumanFeedbackPending
    from crewai.hooks.dispatch import HookAborted
    from crewai.tasks.conditional_task import ConditionalTask
    from crewai.tools import BaseTool
    from crewai.tools.tool_failure import ToolFailure, ToolFailureReason
    from crewai.utilities.string_utils import sanitize_tool_name

    from replanning.integrations.crewai_tasks import CrewPlan, CrewWork
except ImportError as error:
    raise missing_framework(__name__, "CrewAI (tested with crewai 1.15.30)", error) from error

CrewT = TypeVar("CrewT")

_PASSES: Final = (HookAborted, HumanFeedbackPending)

_FOR_THE_MODEL: Final = (ToolFailureReason.USAGE_LIMIT, ToolFailureReason.INVALID_INPUT)
"""Failure reasons that are reported to the model, because another tool would not help."""

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

_ORIGINAL: Final = "__original__"
"""Attribute of a proxy that holds the original tool."""

_current: ContextVar[_Attachment | None] = ContextVar("replanning_crewai", default=None)
"""The attachment of the block that a crew runs in; CrewAI copies the context to its threads,
including those of its event handlers.
"""


@contextmanager
def replanned(
    crew: CrewT,
    engine: ReplanningEngine | None = None,
    *,
    capabilities: Capabilities | None = None,
    objective: str = "",
    thread: str | None = None,
    optional: Collection[str] = (),
    approvals: bool = True,
) -> Iterator[CrewT]:
    """Attach a crew or an agent: within the block, the engine retries or replaces what fails.

    This covers calls of tools, and tasks of the crew whose agents fail for good. All runs of the
    crew in the block, including those in other threads and of its copies, are one session. It is
    `paused` if an exception leaves the block, and fails if a task of the crew was not done.

    Args:
        crew: the crew or agent; after the block it has its own tools again.
        engine: the engine; by default one with its defaults.
        capabilities: by the name of a tool, or the role of an agent, its capability, or the fields
            that `replanning.tool` takes. Tools, and agents, of the same capability can stand in for
            one another.
        objective: what the crew is for; by default its name.
        thread: an id for the work of the crew; its last session is resumed unless it has ended, and
            finished tasks are not repeated.
        optional: the names of tasks that the crew can do without.
        approvals: whether a question to a person goes to the gate of the engine, or, about a task
            of a crew with a `thread`, ends the kickoff. Otherwise the crew sees the exception of
            its tool or agent.

    Raises:
        RunOwned: another process owns the session of this thread.
        StoreError: the session of this thread has another objective, or the store fails.
        ValueError: capabilities or `optional` name what does not exist, a field is not valid for a
            tool, or the crew is attached already.
    """
    engine = ReplanningEngine() if engine is None else engine
    lists = _lists_of_tools(crew)
    attachment = _Attachment(engine)
    wrapped = [attachment.wrap(each) for each in lists]
    names = attachment.describe_agents(crew)
    _require_tasks(crew, optional)
    stated = attachment.stated(capabilities or {})
    described = describe_tools(attachment.described, stated, noun="tool or agent")
    named = (
        f"Run of the crew {crew.name}"
        if isinstance(crew, Crew)
        else f"Run of the agent {crew.role}"  # type: ignore[attr-defined]
    )
    run_id = None if thread is None else thread_run(engine, thread)
    asks = approvals and thread is not None
    _patch_framework()
    with SessionThread.open(
        engine.session(
            objective or named,
            tools=described,
            run_id=run_id,
            passes=_PASSES,
            asks=asks,
            gate=approvals,
        )
    ) as attachment.session:
        attachment.plan = CrewPlan(
            engine,
            attachment.session,
            names,
            optional,
            asks=asks,
            passes=_PASSES,
        )
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


@cache
def _patch_framework() -> None:
    """Patch CrewAI to look for an attachment before it runs a crew or a task.

    Its classes are patched once, for good: copies of crews, crews within flows and the tasks of
    planners are attached as well, and nothing has to be undone in the right order.
    """
    run = Crew._execute_tasks
    arun = Crew._aexecute_tasks
    execute = CrewTask._execute_core
    aexecute = CrewTask._aexecute_core
    skipped = ConditionalTask.get_skipped_task_output

    @wraps(run)
    def run_tasks(
        crew: Any, tasks: Any, start_index: int | None = 0, *args: Any, **kwargs: Any
    ) -> Any:
        with _kickoff(crew, tasks, start_index):
            return run(crew, tasks, start_index, *args, **kwargs)

    @wraps(arun)
    async def arun_tasks(
        crew: Any, tasks: Any, start_index: int | None = 0, *args: Any, **kwargs: Any
    ) -> Any:
        with _kickoff(crew, tasks, start_index):
            return await arun(crew, tasks, start_index, *args, **kwargs)

    @wraps(execute)
    def execute_task(*given: Any) -> Any:
        work = _work_of(*given)
        plan = _current_plan()
        if plan is None or work.agent is None:  # CrewAI reports that an agent is missing
            return execute(*work)
        return plan.perform(work, execute)

    @wraps(aexecute)
    async def aexecute_task(*given: Any) -> Any:
        work = _work_of(*given)
        plan = _current_plan()
        if plan is None or work.agent is None:
            return await aexecute(*work)
        return await plan.aperform(work, aexecute)

    @wraps(skipped)
    def skip_task(task: Any) -> Any:
        plan = _current_plan()
        if plan is not None:
            plan.leave_out(task)
        return skipped(task)

    Crew._execute_tasks = run_tasks
    Crew._aexecute_tasks = arun_tasks
    CrewTask._execute_core = execute_task
    CrewTask._aexecute_core = aexecute_task
    ConditionalTask.get_skipped_task_output = skip_task


def _work_of(task: Any, agent: Any, context: str | None, tools: Any) -> CrewWork:
    """Return the work that CrewAI executes, with the agent that it would choose."""
    return CrewWork(task, agent or task.agent, context, tools)


@contextmanager
def _kickoff(crew: Any, tasks: Any, start_index: int | None) -> Iterator[None]:
    """Plan the tasks of a crew while it runs, if it runs in a block."""
    plan = _current_plan()
    if plan is None:
        yield
        return
    first: int | None = crew._get_execution_start_index(tasks)
    if first is None:
        first = start_index or 0
    with plan.kickoff(crew, tasks, first):
        yield


def _current_plan() -> CrewPlan | None:
    """Return the plan of the current block; None outside of blocks."""
    attachment = _current.get()
    return None if attachment is None else attachment.plan


def _require_tasks(crew: Any, names: Collection[str]) -> None:
    """Check that tasks of a crew have these names.

    Raises:
        ValueError: the crew has no such task.
    """
    known = [task.name for task in crew.tasks if task.name] if isinstance(crew, Crew) else []
    problems = unknown_names(names, known, "task")
    if problems:
        raise ValueError(f"optional: {'; '.join(problems)}")


def _agents_of(crew: Any) -> list[Any]:
    """Return the agents of a crew, or the single agent; one in several places appears repeatedly."""
    if not isinstance(crew, Crew):
        return [crew]
    agents = [*crew.agents, *(task.agent for task in crew.tasks), crew.manager_agent]
    return [agent for agent in agents if agent is not None]


def _lists_of_tools(crew: Any) -> list[_Tools]:
    """Return the lists of tools of a crew and its agents; several may be the same list."""
    holders: list[tuple[Any, Any]] = [(agent, agent) for agent in _agents_of(crew)]
    if isinstance(crew, Crew):
        holders += [(task, task.agent) for task in crew.tasks]
    lists: dict[int, _Tools] = {}
    for holder, agent in holders:
        if holder.tools:
            found = lists.setdefault(id(holder.tools), _Tools(holder.tools))
            if _writes_calls(agent):
                found.repeats = True
    return list(lists.values())


@dataclass
class _Tools:
    """A list of tools that the program gave to an agent or a task.

    Attributes:
        tools: the list.
        repeats: whether CrewAI repeats a call of these tools that fails, as it does if the model
            writes calls as text.
    """

    tools: list[Any]
    repeats: bool = False


def _writes_calls(agent: Any) -> bool:
    """Return whether the model of an agent writes its calls as text, as in ReAct."""
    supports = getattr(getattr(agent, "llm", None), "supports_function_calling", None)
    return callable(supports) and not supports()


class _RetryableFailure(ReportedFailure, TransientError):
    """Failure that a tool returned as retryable."""


class _Attachment:
    """The session of one block, its plan, and the descriptions of its tools and agents."""

    def __init__(self, engine: ReplanningEngine) -> None:
        self._engine = engine
        self.described: dict[str, dict[str, object]] = {}
        self._tools: dict[str, _Tool] = {}
        self._agents: dict[str, str] = {}
        self.session: SessionThread | None = None
        self.plan: CrewPlan | None = None

    def wrap(self, given: _Tools) -> list[_Tool]:
        """Return proxies of the tools of one agent or task, whose calls go through the session."""
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

    def describe_agents(self, crew: Any) -> dict[str, str]:
        """Describe the agents of a crew; return their names by their keys, which copies share."""
        names: dict[str, str] = {}
        for agent in _agents_of(crew):
            role = " ".join(agent.role.split())[:MAX_NAME_CHARS] or "agent"
            name = role
            while name in self._tools:
                name += " (agent)"
            names[agent.key] = name
            self._agents[sanitize_tool_name(role)] = name
            # An agent has effects only through its tools, whose calls are tasks of their own. So
            # another agent may take over when its model does not answer.
            self.described.setdefault(name, {**agent_fields(agent.goal), "effect": "none"})
        return names

    def stated(self, capabilities: Capabilities) -> Capabilities:
        """Return capabilities by the names that describe tools and agents in the plan."""
        stated = {}
        for name, fields in capabilities.items():
            called = sanitize_tool_name(str(name))
            if called not in self._tools:
                called = self._agents.get(called, called)
            stated[called] = fields
        return stated

    def listen(self) -> None:
        """Listen to agents that plan their work in steps."""
        for kind in _NOTED:
            crewai_event_bus.register_handler(kind, self._on_step)

    def close(self) -> None:
        """Leave further calls of tools and tasks to CrewAI."""
        crewai_event_bus.flush()  # its handlers run in threads
        for kind in _NOTED:
            crewai_event_bus.off(kind, self._on_step)
        self.session = None
        self.plan = None

    def call(self, tool: _Tool, own_function: Callable[..., Any], arguments: Arguments) -> Any:
        """Call a tool, or what replaces it, from any thread but that of the session."""
        session = self.session
        called = tool._called
        # The tool itself reports wrong arguments to the model.
        if session is None or not _fits(tool, arguments):
            return own_function(**arguments)

        def execute(name: str, values: Arguments) -> object:
            function = (
                own_function
                if name == called
                else (tool._own.get(name) or self._tools[name])._original.run
            )
            result = function(**values)
            if asyncio.iscoroutine(result):
                result = asyncio.run(result)
            if not isinstance(result, ToolFailure):
                return result
            # The failure is reported to the model, if it called this tool.
            if name == called and result.reason in _FOR_THE_MODEL:
                return result
            failure = _RetryableFailure if result.retryable else ReportedFailure
            raise failure(result.as_agent_message(), result)

        async def call(hand_over: Execute) -> Any:
            assert session is not None
            return await call_tool(self._engine, session.session, called, arguments, hand_over)

        try:
            return session.call(call, execute)
        except CallSkipped as skipped:
            reason = str(skipped)
            # A failure is never the final answer.
            return ToolFailure(message=reason) if tool.result_as_answer else reason

    def _on_step(self, _: Any, event: Any) -> None:
        session = self.session
        if _current.get() is not self or session is None:
            return
        data = event.model_dump(mode="json", include=_NOTED_FIELDS, exclude_none=True)
        with suppress(NotRunning, StoreError):
            session.session.run.note(event.type, data)


class _Tool(BaseTool):  # type: ignore[misc] # its types may not be installed
    """Proxy of a tool whose calls go through a session."""

    _original: Any = PrivateAttr()
    _attachment: Any = PrivateAttr()
    _own: Any = PrivateAttr()
    _called: str = PrivateAttr()

    @classmethod
    def wrapping(cls, original: Any, attachment: _Attachment, own: Mapping[str, _Tool]) -> _Tool:
        """Return the proxy of a tool.

        Args:
            original: the tool.
            attachment: handles the calls.
            own: the tools of the same agent, which take precedence over those of others.
        """
        made: _Tool = cls.model_construct(
            **{name: getattr(original, name) for name in BaseTool.model_fields}
        )
        made.__dict__[_ORIGINAL] = original
        made._original = original
        made._attachment = attachment
        made._own = own
        made._called = sanitize_tool_name(original.name)
        return made

    @property  # type: ignore[misc] # what it says of itself
    def __class__(self) -> type[Any]:
        # Hooks check the class of a tool. Pydantic does so before the original is set.
        return type(self.__dict__.get(_ORIGINAL, self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattr__(name)
        return getattr(self._original, name)  # what only the class of the original has

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
        """Execute the tool, or what replaces it, for a model with function calling."""
        if args:
            return self._original.run(*args, **kwargs)
        return self._attachment.call(self, self._original.run, kwargs)

    async def arun(self, *args: Any, **kwargs: Any) -> Any:
        """Execute the tool, or what replaces it."""
        return await anyio.to_thread.run_sync(partial(self.run, *args, **kwargs))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def to_structured_tool(self) -> Any:
        """Return the tool for a model that writes its calls as text; CrewAI counts them itself."""
        made = self._original.to_structured_tool()
        function = made.func
        fields = self.args_schema.model_fields

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


# Assigned after the class body, because pydantic would take the property there for a field. CrewAI
# and the original share one count.
_Tool.current_usage_count = property(
    lambda tool: tool._original.current_usage_count,
    lambda tool, count: setattr(tool._original, "current_usage_count", count),
)


def _fits(tool: Any, arguments: Arguments) -> bool:
    try:
        tool.args_schema.model_validate(arguments)
    except ValueError:
        return False
    return True
