"""LangGraph and LangChain: nodes of a compiled graph, and tools of an agent, as calls of a session.

Tested with langgraph 1.2.22 and langchain 1.4.7. `replanned` attaches a compiled graph, such as an
agent of `create_agent`; `ReplanningMiddleware` attaches the tools of the agent. See
docs/integrations/langgraph.md.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from types import NoneType
from typing import Any, Final
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread

from replanning.engine.engine import ReplanningEngine
from replanning.engine.functions import FunctionTool
from replanning.engine.session import Execute, Session
from replanning.errors import (
    CallSkipped,
    ChangeRejected,
    NeedsHuman,
    NoResult,
    ReplanningError,
    StaleAnswer,
    UnknownQuestion,
)
from replanning.integrations.kit import (
    ONE_ATTEMPT,
    Arguments,
    Capabilities,
    ReportedFailure,
    SessionTask,
    call_tool,
    describe_tools,
    hand_back,
    hinted_fields,
    missing_framework,
    shown_questions,
    thread_run,
    tool_fields,
)
from replanning.integrations.langgraph_values import decode, encode, executed_again
from replanning.integrations.session_thread import SessionThread
from replanning.journal.records import QuestionAnswered, QuestionAsked, RunEnded
from replanning.live.entries import TaskEntry
from replanning.live.states import TaskState
from replanning.plan.messages import join_names
from replanning.run.attempt import current_attempt
from replanning.run.retries import failure_from

try:
    from langchain_core.callbacks import BaseCallbackManager
    from langchain_core.messages import ToolMessage
    from langchain_core.runnables import Runnable
    from langchain_core.runnables.config import CONFIG_KEYS, ensure_config
    from langchain_core.utils.function_calling import convert_to_openai_tool
    from langgraph.callbacks import GraphCallbackHandler, GraphInterruptEvent
    from langgraph.errors import GraphBubbleUp, GraphInterrupt
    from langgraph.graph import START
    from langgraph.graph.state import CompiledStateGraph
    from langgraph.prebuilt import ToolNode
    from langgraph.runtime import get_runtime
    from langgraph.types import Command, Interrupt, interrupt
except ImportError as error:
    raise missing_framework(__name__, "langgraph 1.2 or later", error) from error
try:
    from langchain.agents.middleware import AgentMiddleware, ToolRetryMiddleware
except ImportError:  # a ToolNode can be given the methods of the middleware without langchain
    AgentMiddleware = object
    ToolRetryMiddleware = ()

_PASSES: Final = (GraphBubbleUp,)

_CHECKPOINTER: Final = "__pregel_checkpointer"
"""Key in the configuration for the checkpointer that a graph passes to its subgraphs."""

_PLAIN_TYPES: Final = (str, int, float, dict, NoneType)
"""Types of outputs of confirmations. Tools, as they are executed here, return messages instead."""

_INTERRUPTED: Final = "the graph was interrupted"
"""Reason to pause the run of a graph that asks a person, or that stopped at a breakpoint."""

_UNREAD: Final = "the stream of the graph was not read to its end"
"""Reason to pause the run of a graph whose stream was closed, or makes way for another one."""

_RAISED: Final = "the graph raised"
"""Beginning of the reason to pause the run of a graph that has failed."""

_DEFAULT_NAME: Final = "LangGraph"
"""Name of a graph that was compiled without one."""


def replanned(
    graph: CompiledStateGraph,
    engine: ReplanningEngine | None = None,
    *,
    capabilities: Capabilities | None = None,
    objective: str = "",
    approvals: bool = True,
) -> ReplannedGraph:
    """Return a compiled graph whose nodes and tools are calls of a session.

    Tools are included if their calls go through a `ReplanningMiddleware`.

    Each run of the graph is a run of the engine; a thread that is resumed after an interrupt or a
    failure resumes it. A node that fails is retried, or a node of the same capability is executed
    in its place with its input, or a person is asked.

    Args:
        graph: as `StateGraph.compile` or `create_agent` returns it; it is not changed.
        engine: decides what follows a failure; by default one with its defaults.
        capabilities: by the name of a node or a tool, its capability, or the fields that
            `replanning.tool` takes. Those of the same capability can stand in for one another. By
            default `capability` in the metadata of a node or a tool.
        objective: the aim of a run; by default the name of the graph, if it was compiled with one.
        approvals: whether a question to a person interrupts a graph that has a checkpointer.
            Otherwise the graph sees the exception of the node or tool. With False nobody is asked,
            not even through the gate of the engine.

    Raises:
        TypeError: the graph is attached already.
        ValueError: a node and a tool have the same name, a capability names neither, a field is not
            valid for a tool, or capabilities are stated for tools that are executed without a
            `ReplanningMiddleware`.
    """
    if isinstance(graph, ReplannedGraph):
        raise TypeError("graph: it is attached already")
    described = _described_calls(graph)
    times = Counter(name for name, _ in described)
    twice = [repr(name) for name, count in times.items() if count > 1]
    if twice:
        names = ", ".join(twice)
        raise ValueError(f"two nodes or tools are called {names}; give one of them another name")
    detached = [repr(name) for name in _detached_tools(graph) if name in (capabilities or {})]
    if detached:
        raise ValueError(
            f"capabilities: the calls of {', '.join(detached)} would not be replanned; create the"
            " agent with `middleware=[ReplanningMiddleware()]`, or give `wrap_tool_call` and"
            " `awrap_tool_call` of a `ReplanningMiddleware()` to the `ToolNode`"
        )
    tools = describe_tools(dict(described), capabilities, noun="node or tool")
    bodies: dict[str, Any] = {}
    nodes: dict[str, Any] = {}
    for name, node in graph.nodes.items():
        nodes[name] = node
        if _is_call(name, node):
            bodies[name] = node.bound
            nodes[name] = node.copy({"bound": _Node(name, bodies), "subgraphs": node.subgraphs})
    if not objective:
        # Without the names of nodes, so that a thread can be resumed after a node was added.
        objective = "Run a graph"
        if graph.get_name() != _DEFAULT_NAME:
            objective = f"Run the graph {graph.get_name()}"
    attachment = _Attachment(engine or ReplanningEngine(), objective, tools, graph, approvals)
    return ReplannedGraph(attachment=attachment, **vars(graph.copy({"nodes": nodes})))


def _is_call(name: str, node: Any) -> bool:
    """Return whether a node is a call itself, rather than its tools or the start."""
    return name != START and not isinstance(node.bound, ToolNode)


def _described_calls(graph: Any) -> list[tuple[str, dict[str, object]]]:
    """Return the names and descriptions of the nodes and tools of a graph."""
    described: list[tuple[str, dict[str, object]]] = []
    approved = _tools_behind_approval(graph)
    for name, node in graph.nodes.items():
        # A person reviews such a node before it is executed; a stand-in would bypass that.
        is_stopped = graph.interrupt_before_nodes == "*" or name in graph.interrupt_before_nodes
        repeats = bool(node.retry_policy or graph.retry_policy)
        if _is_call(name, node):
            capability = (node.metadata or {}).get("capability")
            fields = tool_fields("", {}, kind="langgraph", dangerous=is_stopped, stated=capability)
            if repeats:
                fields.setdefault("retry", ONE_ATTEMPT)
            described.append((name, fields))
        elif name != START:
            for tool in node.bound.tools_by_name.values():
                fields = _described(tool, dangerous=is_stopped or tool.name in approved)
                if repeats or _is_repeated(tool.name, node.bound):
                    fields.setdefault("retry", ONE_ATTEMPT)
                described.append((tool.name, fields))
    return described


def _detached_tools(graph: Any) -> Iterator[str]:
    """Yield the tools whose calls do not go through a `ReplanningMiddleware`."""
    for node in graph.nodes.values():
        if isinstance(node.bound, ToolNode) and not _has_middleware(node.bound):
            yield from node.bound.tools_by_name


def _tools_behind_approval(graph: Any) -> set[str]:
    """Return the names of the tools whose calls a middleware of the agent puts to a person."""
    owners: list[Any] = []
    for node in graph.nodes.values():
        if isinstance(node.bound, ToolNode):
            owners += _owners(node.bound)
        else:
            functions = (getattr(node.bound, name, None) for name in ("func", "afunc"))
            owners += [getattr(function, "__self__", None) for function in functions]
    names: set[str] = set()
    for owner in owners:
        stated = getattr(owner, "interrupt_on", None)  # of `HumanInTheLoopMiddleware`
        if isinstance(stated, Mapping):
            names.update(str(name) for name, condition in stated.items() if condition)
    return names


def _described(tool: Any, *, dangerous: bool) -> dict[str, Any]:
    """Return the fields of the description of a tool.

    Args:
        tool: the tool.
        dangerous: whether it stands in for another one only if a person agrees.
    """
    function = convert_to_openai_tool(tool)["function"]
    capability = (tool.metadata or {}).get("capability")
    return tool_fields(
        function.get("description"),
        function.get("parameters", {}),
        kind="langchain",
        dangerous=dangerous,
        stated=capability,
        **hinted_fields(tool.metadata),  # the adapters for MCP servers put the annotations there
    )


def _tools_to_approve(interrupts: Sequence[Interrupt]) -> list[str]:
    """Return the names of the tools whose calls `HumanInTheLoopMiddleware` asks about, each once."""
    names: dict[str, None] = {}
    for each in interrupts:
        if not isinstance(each.value, dict):
            continue
        for request in each.value.get("action_requests", ()):
            names[request["name"]] = None
    return list(names)


def _has_middleware(node: Any) -> bool:
    """Return whether the calls of a `ToolNode` go through a `ReplanningMiddleware`.

    A user's own function as the wrapper counts, because it may call one.
    """
    owners = _owners(node)
    others = [each for each in owners if each is not None]
    if owners and not others:
        return True
    return any(isinstance(each, ReplanningMiddleware) for each in others)


def _owners(node: Any) -> list[Any]:
    """Return the objects whose methods wrap the calls of a `ToolNode`; None for a function."""
    wrappers = [node._wrap_tool_call, node._awrap_tool_call]
    seen = set[int]()
    owners: list[Any] = []
    # `create_agent` puts the methods of the middleware into nested functions.
    while wrappers:
        wrapper = wrappers.pop()
        if not callable(wrapper) or id(wrapper) in seen:
            continue
        seen.add(id(wrapper))
        owners.append(getattr(wrapper, "__self__", None))
        cells = getattr(wrapper, "__closure__", None) or ()
        wrappers += [getattr(wrapper, "__wrapped__", None), *(cell.cell_contents for cell in cells)]
    return owners


def _is_repeated(tool: str, node: Any) -> bool:
    """Return whether another middleware of an agent retries failed calls of a tool."""
    for owner in _owners(node):
        if isinstance(owner, ToolRetryMiddleware):
            names = getattr(owner, "_tool_filter", None)
            if names is None or tool in names:
                return True
    return False


class _Calls:
    """Active calls of one node."""

    def __init__(self) -> None:
        self.count = 0
        self.idle = anyio.Event()


class _Run(GraphCallbackHandler):  # type: ignore[misc]  # its types are not followed
    """Run of a graph, with the session of its calls; a callback handler for interrupts.

    Its state is the progress of its own calls. It leaves the session when its graph ends, or when
    another run resumes the thread.

    Args:
        engine: the engine.
        session: the session, which is open.
        asks: whether a question interrupts the graph.
        task: keeps the session open.
        thread: has the session, if the graph runs without an event loop.
    """

    run_inline = True
    ignore_agent = ignore_chain = ignore_chat_model = ignore_custom_event = ignore_llm = (
        ignore_retriever
    ) = True
    ignore_retry = True

    def __init__(
        self,
        engine: ReplanningEngine,
        session: Session,
        *,
        asks: bool,
        task: SessionTask,
        thread: SessionThread | None,
    ) -> None:
        self.engine = engine
        self.session = session
        self.task = task
        self.thread = thread
        self.is_left = False
        self._asks = asks
        self._pause_reason = ""  # empty unless the run will be resumed
        self._made: set[str] = set()  # keys of calls that are active or have succeeded
        self._failed: set[str] = set()  # keys of calls that have failed here
        self._nodes: dict[str, _Calls] = {}
        self._answers: dict[str, Mapping[str, Any]] = {}

    def added_to(self, config: Any) -> Any:
        """Return the configuration of a graph, with this handler in it."""
        config = config or {}
        callbacks = config.get("callbacks")
        if isinstance(callbacks, BaseCallbackManager):
            manager = callbacks.copy()
        else:
            manager = BaseCallbackManager([])
            for each in callbacks or ():
                manager.add_handler(each)
        # The nodes do not inherit the handler: it would be called at the beginning and the end of
        # everything within them.
        manager.add_handler(self, inherit=False)
        return {**config, "callbacks": manager}

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Make this the current run within the block, in the context that LangGraph copies."""
        before = _RUN.get()
        _RUN.set(self)
        try:
            yield
        finally:
            # Set, not reset: a reset fails where the block is left in another context.
            _RUN.set(before)

    def on_interrupt(self, event: GraphInterruptEvent) -> None:
        """Note that this run will be resumed, and what it waits for."""
        self._pause_reason = _INTERRUPTED
        names = _tools_to_approve(event.interrupts)
        if names:
            shown = join_names([repr(name) for name in names], 5)
            self._pause_reason = f"the graph waits for the approval of {shown}"

    async def end(self, error: BaseException | None = None) -> None:
        """Leave the session, which pauses if the graph was interrupted or raised an error."""
        if self.is_left:
            return
        self.is_left = True
        _OPEN.pop(self.session.run.id, None)
        if isinstance(error, Exception):
            self._pause_reason = f"{_RAISED} {type(error).__name__}"
        elif isinstance(error, GeneratorExit):
            self._pause_reason = _UNREAD
        elif error is not None:
            self._pause_reason = f"the graph was cut off by {type(error).__name__}"
        await self.task.end(self._pause_reason)

    async def make_way(self) -> None:
        """Leave the session to another run of the thread, as soon as no call is active.

        The session of another event loop cannot be left from here.
        """
        if self.thread is not None:
            await anyio.to_thread.run_sync(self.thread.call, lambda _: self._leave_unread())
        elif self.task.is_of_this_loop():
            await self._leave_unread()

    async def _leave_unread(self) -> None:
        while self._nodes:
            await next(iter(self._nodes.values())).idle.wait()
        await self.end(GeneratorExit())

    async def call(
        self,
        name: str,
        arguments: Arguments,
        execute: Execute,
        call_id: str | None = None,
    ) -> object:
        """Call a node or a tool, and ask a person through an interrupt.

        A skipped node returns None, and a skipped tool a message with the reason.

        Args:
            name: the name of the node or tool.
            arguments: the arguments of the tool.
            execute: executes a node or tool.
            call_id: the model's id of the call of a tool, which may be empty; None for a node.

        Raises:
            GraphBubbleUp: control flow of the graph.
            Exception: the node's or tool's own; no alternative is left.
        """
        if self.is_left:
            try:
                return await execute(name, arguments)
            except ReportedFailure as error:
                return error.result
        key = self._new_key(name, arguments, call_id)
        within = current_attempt()
        if within is not None and within.run_id == self.session.run.id:
            # Made by a node or tool of this run, which waits for it.
            return await self._call(key, name, arguments, execute, call_id)
        node = get_runtime().execution_info.task_id
        calls = self._nodes.setdefault(node, _Calls())
        calls.count += 1
        try:
            output = await self._call(key, name, arguments, execute, call_id)
        except Exception:
            self._end_call(node, calls, failed=key)
            # At the first exception the graph cuts off the other calls of this node, and would
            # execute them again when it is resumed. And LangGraph identifies the interrupts of a
            # node by their order. So the exceptions wait for all calls, and keep their order.
            await calls.idle.wait()
            raise
        except BaseException:
            self._end_call(node, calls, failed=key)
            raise
        self._end_call(node, calls)
        return output

    def _end_call(self, node: str, calls: _Calls, *, failed: str = "") -> None:
        # A call that another middleware repeats has the same key again.
        self._made.discard(failed)
        calls.count -= 1
        if not calls.count:
            del self._nodes[node]
            calls.idle.set()

    async def _call(
        self,
        key: str,
        name: str,
        arguments: Arguments,
        execute: Execute,
        call_id: str | None,
    ) -> object:
        is_tool = call_id is not None
        earlier = self.session.last_call(key)
        interrupted = False
        given_up = False
        # The checkpointer keeps the outputs of nodes, but not that of one of several calls of a
        # node.
        if earlier is not None and is_tool:
            recorded = self._recorded_output(earlier)
            if recorded is not None:
                return recorded[0]
            interrupted = self._has_interrupted(earlier)
        if earlier is not None:
            given_up = key not in self._failed and self._was_given_up(earlier)

        def encoded(output: object) -> object:
            stored = encode(output)
            return executed_again(stored) if interrupted else stored

        answered = False
        while True:
            once = answered or given_up
            try:
                result = await call_tool(
                    self.engine,
                    self.session,
                    name,
                    arguments,
                    execute,
                    key=key,
                    once=once,
                    passes=_PASSES,
                    asks=True,
                    encode=encoded,
                    decode=decode,
                    value=_value,
                )
                return _as_message(result, name, call_id)
            except CallSkipped as skipped:
                if not is_tool:
                    return None
                return ToolMessage(str(skipped), name=name, tool_call_id=call_id)
            except NeedsHuman as error:
                if self._asks:
                    self._ask(error.questions[0])
                    answered = True
                    continue
                # The question stays open: a thread that is resumed makes the call again.
                own = error.own_error
            except GraphInterrupt as error:
                # On resume, this interrupt would take the answer to the question for its own.
                if answered:
                    asked = f"a person was already asked about {name!r}"
                    text = f"{asked}, so it cannot interrupt the graph after that"
                    raise RuntimeError(text) from error
                raise
            except Exception:
                if not once:
                    self._failed.add(key)
                raise
            if not once:
                self._failed.add(key)
            return hand_back(own)

    def _recorded_output(self, call: TaskEntry) -> tuple[object] | None:
        """Return the output of a call that had finished before the graph was resumed, or None.

        A call that a person has skipped has no output; `call_tool` raises `CallSkipped` for it.
        """
        if not call.satisfied:
            return None
        try:
            return (decode(self.session.run.live.results.output_of(call.id)),)
        except (NoResult, LookupError, TypeError, ValueError):
            return None

    def _has_interrupted(self, call: TaskEntry) -> bool:
        """Return whether a call waits for the answer to an interrupt of its own."""
        for leaf in self.session.run.live.leaves(call):
            failure = leaf.log.failure
            if failure is not None and failure.kind == "interrupted" and not leaf.log.in_doubt:
                return True
        return False

    def _was_given_up(self, call: TaskEntry) -> bool:
        """Return whether a person's answer has ended a call, which the graph has not seen yet.

        Such a call returns its outcome. If it were executed again, the question would follow again.
        """
        leaves = self.session.run.live.leaves(call)
        if call.satisfied:
            return any(leaf.state is TaskState.SKIPPED for leaf in leaves)
        parts = {call.id, *(leaf.id for leaf in leaves)}
        asked: set[str] = set()
        given_up = False
        for record in self.engine.store.read(self.session.run.id):
            body = record.body
            if isinstance(body, QuestionAsked) and not parts.isdisjoint(body.holds):
                asked.add(body.question)
            elif isinstance(body, QuestionAnswered) and body.question in asked:
                given_up = body.verdict != "withdrawn"
            elif isinstance(body, RunEnded) and body.reason.startswith(_RAISED):
                given_up = False
        return given_up

    def _new_key(self, name: str, arguments: Arguments, call_id: str | None) -> str:
        """Return the key of a call of the node that is being executed, or of a tool that it calls.

        Some models give all calls of a message one id, or an empty one. The key tells those apart
        by what they call, and identical ones by their number.
        """
        info = get_runtime().execution_info
        called = json.dumps(arguments, sort_keys=True, default=repr)
        key = f"{info.task_id}/{info.node_attempt}/{call_id or ''}/{name}/{called}"
        while key in self._made:
            key += "+"
        self._made.add(key)
        return key

    def _ask(self, question_id: str) -> None:
        """Interrupt the graph with a question; pass on the answer when it is resumed."""
        shown = shown_questions(self.engine, self.session.run.id, [question_id])
        # It may have been answered elsewhere.
        if not shown:
            return
        payload = shown[0]
        while True:
            # The first answers may belong to interrupts of the node itself or of its other calls,
            # or were refused.
            answer = self._answers.pop(question_id, None) or interrupt(payload)
            if not isinstance(answer, Mapping):
                continue
            if answer.get("question") != question_id:
                self._answers[str(answer.get("question"))] = answer
                continue
            fields = {str(name): value for name, value in answer.items()}
            del fields["question"]
            verdict = fields.pop("verdict", "")
            try:
                self.engine.answer(question_id, verdict, **fields)
            except (StaleAnswer, UnknownQuestion):
                # It was answered elsewhere.
                return
            except (ChangeRejected, TypeError, ValueError) as error:
                payload["refused"] = str(error)
            else:
                return

    def call_from_thread(
        self,
        name: str,
        arguments: Arguments,
        execute: Callable[..., Any],
        call_id: str | None = None,
    ) -> Any:
        """Like `call`, from the thread of a graph that runs without an event loop."""
        if self.thread is None:
            where = "synchronously in a graph that runs asynchronously"
            raise RuntimeError(f"{name!r} is executed {where}, which would block its event loop")
        if self.is_left:
            try:
                return execute(name, arguments)
            except ReportedFailure as error:
                return error.result
        return self.thread.call(
            lambda hand_over: self.call(name, arguments, hand_over, call_id), execute
        )

    def in_event_loop(
        self, function: Callable[..., Coroutine[Any, Any, Any]]
    ) -> Callable[..., Any]:
        """Return a function that executes an async function in the thread of the session."""

        @wraps(function)
        def execute(*args: Any, **kwargs: Any) -> Any:
            assert self.thread is not None
            return self.thread.call(lambda _: function(*args, **kwargs))

        return execute


_RUN: Final = ContextVar[_Run | None]("replanning_langgraph_run", default=None)
"""The run whose nodes are executed; LangGraph copies the context into its tasks and threads."""

_OPEN: Final = WeakValueDictionary[str, _Run]()
"""The open runs of graphs in this process, by id: an abandoned stream leaves its run open."""


@dataclass(frozen=True)
class _Attachment:
    """Opens a session of the engine for each run of a graph."""

    engine: ReplanningEngine
    objective: str
    tools: Sequence[FunctionTool[..., Any]]
    original: CompiledStateGraph
    approvals: bool

    def _run_id(self, graph: Any, given: Any, config: Any) -> str | None:
        """Return the id of the thread's unfinished run if the graph is resumed, else a new one."""
        configurable = self._configurable(graph, config)
        thread = configurable.get("thread_id")
        if not thread:
            return None
        # Set in a subgraph: it names the task of the outer graph, which passes its input again.
        inner = configurable.get("checkpoint_ns")
        part = hashlib.blake2s(inner.encode(), digest_size=4).hexdigest() if inner else ""
        is_answer = isinstance(given, Command) and given.resume is not None
        resumes = bool(inner) or given is None or is_answer
        return thread_run(self.engine, str(thread), part=part, resumes=resumes)

    def _configurable(self, graph: Any, config: Any) -> Mapping[str, Any]:
        stated: dict[str, Any] = {}
        for each in (graph.config, config):
            for key, value in (each or {}).items():
                if key == "configurable":
                    stated.update(value or {})
                elif key not in CONFIG_KEYS:
                    stated[key] = value
        if "thread_id" in stated:
            return stated
        # In a node of another graph, whose configuration has the thread.
        return {**ensure_config()["configurable"], **stated}

    def _asks(self, graph: Any, config: Any) -> bool:
        """Return whether a question interrupts the graph, which needs a checkpointer."""
        return self.approvals and self._has_checkpointer(graph, config)

    def _has_checkpointer(self, graph: Any, config: Any) -> bool:
        if graph.checkpointer is False:
            return False
        return bool(graph.checkpointer or self._configurable(graph, config).get(_CHECKPOINTER))

    def _lacks_thread(self, graph: Any, config: Any) -> bool:
        """Return whether the graph refuses to run: it has a checkpointer, but no thread."""
        return self._has_checkpointer(graph, config) and not self._configurable(graph, config)

    async def open(
        self, graph: Any, given: Any, config: Any, thread: SessionThread | None = None
    ) -> _Run | None:
        """Open a session in a task of its own, because any task may close a stream.

        Args:
            graph: the graph.
            given: its input.
            config: its configuration.
            thread: the session's thread that calls this, if the graph runs without an event loop.

        Returns:
            The run; None if the graph refuses to run.
        """
        if self._lacks_thread(graph, config):
            return None
        run_id = self._run_id(graph, given, config)
        earlier = _OPEN.get(run_id or "")
        if earlier is not None:
            await earlier.make_way()
        asks = self._asks(graph, config)
        opened = self.engine.session(
            self.objective, tools=self.tools, run_id=run_id, asks=asks, gate=self.approvals
        )
        task = SessionTask(opened)
        try:
            session = await task.session()
        except BaseException:
            task.leave(_UNREAD)
            raise
        if thread is not None:
            thread.session = session
        run = _Run(self.engine, session, asks=asks, task=task, thread=thread)
        _OPEN[run.session.run.id] = run
        return run


def _value(result: Any) -> Any:
    """Return the output of a tool, without the message around it."""
    if isinstance(result, ToolMessage):
        return result.content
    return result


def _as_message(result: Any, name: str, call_id: str | None) -> Any:
    """Return the result of a call; the output of a confirmation becomes a message of its tool."""
    if call_id is None or not isinstance(result, _PLAIN_TYPES):
        return result
    text = result
    if not isinstance(result, str):
        text = json.dumps(result)
    return ToolMessage(text, name=name, tool_call_id=call_id)


class ReplannedGraph(CompiledStateGraph):  # type: ignore[misc]  # its types are not followed
    """Compiled graph whose runs have sessions, see `replanned`; used like the original graph."""

    def __init__(self, *, attachment: _Attachment, **fields: Any) -> None:
        super().__init__(**fields)
        self.attachment = attachment

    def get_graph(self, config: Any = None, **options: Any) -> Any:
        """Return a drawing of the graph, with the functions of the user."""
        return self.attachment.original.get_graph(config, **options)

    async def aget_graph(self, config: Any = None, **options: Any) -> Any:
        """Return a drawing of the graph, with the functions of the user."""
        return await self.attachment.original.aget_graph(config, **options)

    def stream(self, input: Any, config: Any = None, **options: Any) -> Iterator[Any]:  # noqa: A002
        """Run the graph in this thread; `invoke` does so too."""
        with SessionThread.begin() as thread:
            run = thread.call(lambda _: self.attachment.open(self, input, config, thread))
            if run is None:
                yield from super().stream(input, config, **options)
                return
            parts = super().stream(input, run.added_to(config), **options)
            try:
                while True:
                    # Each part may be read from another context.
                    with run.as_current():
                        try:
                            part = next(parts)
                        except StopIteration:
                            break
                    yield part
            except BaseException as error:
                failure = error
                try:
                    with run.as_current():
                        parts.close()
                finally:
                    # The exception of the graph is the one to raise.
                    with suppress(ReplanningError):
                        thread.call(lambda _: run.end(failure))
                raise
            thread.call(lambda _: run.end())

    async def astream(
        self,
        input: Any,  # noqa: A002
        config: Any = None,
        **options: Any,
    ) -> AsyncGenerator[Any]:
        """Run the graph; `ainvoke` and `astream_events` do so too."""
        run = await self.attachment.open(self, input, config)
        if run is None:
            async for part in super().astream(input, config, **options):
                yield part
            return
        parts = super().astream(input, run.added_to(config), **options)
        try:
            while True:
                with run.as_current():
                    try:
                        part = await anext(parts)
                    except StopAsyncIteration:
                        break
                yield part
        except BaseException as error:
            try:
                with run.as_current():
                    await parts.aclose()
            finally:
                with suppress(ReplanningError):  # the exception of the graph is the one to raise
                    await run.end(error)
            raise
        await run.end()


class _Node(Runnable):  # type: ignore[misc]  # its types are not followed
    """Body of a node: makes a call that the original body, or that of another node, executes."""

    def __init__(self, name: str, bodies: Mapping[str, Any]) -> None:
        self.name = name
        self._bodies = bodies

    def invoke(self, input: Any, config: Any = None, **options: Any) -> Any:  # noqa: A002
        """Execute the node in this thread."""

        def execute(name: str, _: Arguments) -> Any:
            body = self._bodies[name]
            # It may have no synchronous function.
            if name != self.name and getattr(body, "func", body) is None:
                return run.in_event_loop(body.ainvoke)(input, config, **options)
            return body.invoke(input, config, **options)

        run = _current_run()
        return run.call_from_thread(self.name, {}, execute)

    async def ainvoke(self, input: Any, config: Any = None, **options: Any) -> Any:  # noqa: A002
        """Execute the node."""

        async def execute(name: str, _: Arguments) -> Any:
            return await self._bodies[name].ainvoke(input, config, **options)

        return await _current_run().call(self.name, {}, execute)


def _current_run() -> _Run:
    run = _RUN.get()
    if run is None:
        raise RuntimeError(
            "the graph is not attached; use the one that `replanned(graph, engine)` returns"
        )
    return run


class ReplanningMiddleware(AgentMiddleware):  # type: ignore[misc]  # its types are not followed
    """Middleware that makes the calls of tools calls of the session.

    Use it in `replanned(create_agent(…, middleware=[ReplanningMiddleware()]), engine)`.

    Its methods can also be given to a `ToolNode` as `wrap_tool_call` and `awrap_tool_call`.
    """

    def wrap_tool_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        """Execute a tool, or what replaces it, in this thread."""
        # The model named an unknown tool, and the handler reports that to it.
        if request.tool is None:
            return handler(request)

        def execute(name: str, arguments: Arguments) -> Any:
            own = _request(request, name, arguments)
            if own is not request and getattr(own.tool, "func", own.tool) is None:
                function = run.in_event_loop(own.tool.coroutine)
                own = own.override(tool=own.tool.model_copy(update={"func": function}))
            noting = _NotingTool(own.tool)
            return _checked(handler(own.override(tool=noting)), request, noting.raised)

        call = request.tool_call
        run = _current_run()
        return run.call_from_thread(call["name"], call["args"], execute, call["id"] or "")

    async def awrap_tool_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """Execute a tool, or what replaces it."""
        if request.tool is None:
            return await handler(request)

        async def execute(name: str, arguments: Arguments) -> Any:
            own = _request(request, name, arguments)
            noting = _NotingTool(own.tool)
            return _checked(await handler(own.override(tool=noting)), request, noting.raised)

        call = request.tool_call
        return await _current_run().call(call["name"], call["args"], execute, call["id"] or "")


class _NotingTool:
    """Tool that notes its exceptions before a `ToolNode` or middleware turns them into messages.

    Attributes:
        raised: the exceptions.
    """

    def __init__(self, tool: Any) -> None:
        self._tool = tool
        self.raised: list[Exception] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tool, name)

    def invoke(self, *args: Any, **options: Any) -> Any:
        """Execute the tool in this thread."""
        try:
            return self._tool.invoke(*args, **options)
        except Exception as error:
            self.raised.append(error)
            raise

    async def ainvoke(self, *args: Any, **options: Any) -> Any:
        """Execute the tool."""
        try:
            return await self._tool.ainvoke(*args, **options)
        except Exception as error:
            self.raised.append(error)
            raise


def _request(request: Any, name: str, arguments: Arguments) -> Any:
    """Return the request for a tool, which may differ from the tool that the model called."""
    call = request.tool_call
    if name == call["name"] and arguments == call["args"]:
        return request
    for tool in request.runtime.tools:
        if tool.name == name:
            own_call = {**call, "name": name, "args": dict(arguments)}
            return request.override(tool=tool, tool_call=own_call)
    raise LookupError(f"the agent has no tool {name!r}")


def _checked(result: Any, request: Any, raised: Sequence[Exception]) -> Any:
    """Return the message to the model, under the name of the tool that it called.

    Args:
        result: the message, or a command that has one.
        request: the request of the model.
        raised: the exceptions of the tool.

    Raises:
        ReportedFailure: the message reports a failure. Its cause is the exception that left the
            call in doubt, if any.
    """
    doubt = next((error for error in raised if failure_from(error).in_doubt), None)
    if isinstance(result, Command):
        messages = None
        if isinstance(result.update, Mapping):
            messages = result.update.get("messages")
        if not isinstance(messages, list | tuple):
            messages = [messages]
        for message in messages:
            if isinstance(message, ToolMessage) and message.status == "error":
                raise ReportedFailure(message.text, result) from doubt
        return result
    if not isinstance(result, ToolMessage):
        return result
    if result.status == "error":
        raise ReportedFailure(result.text, result) from doubt
    name = request.tool_call["name"]
    if result.name == name:
        return result
    return result.model_copy(update={"name": name})
