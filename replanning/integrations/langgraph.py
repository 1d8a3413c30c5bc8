"""LangGraph and LangChain: nodes of a compiled graph, and tools of an agent, as calls of a session.

Tested with langgraph 1.2.22 and langchain 1.4.7. `replanned` attaches a compiled graph, such as an agent of
`create_agent`; `ReplanningMiddleware` attaches the tools of the agent. See docs/integrations/langgraph.md.
"""

from __future__ import annotations

import hashlib
from collections import Counter
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
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final

import anyio

from replanning.engine.engine import ReplanningEngine
from replanning.engine.functions import FunctionTool
from replanning.engine.session import Execute, Session
from replanning.errors import (
    CallSkipped,
    ChangeRejected,
    NeedsHuman,
    ReplanningError,
    StaleAnswer,
    UnknownQuestion,
)
from replanning.integrations.kit import (
    ONE_ATTEMPT,
    Capabilities,
    ReportedFailure,
    SessionTask,
    describe_tools,
    missing_framework,
    reported_result,
    shown_questions,
    thread_run,
    tool_fields,
)
from replanning.integrations.session_thread import SessionThread
from replanning.run.retries import failure_from

try:
    from langchain_core.callbacks import BaseCallbackManager
    from langchain_core.messages import ToolMessage
    from langchain_core.runnables import Runnable
    from langchain_core.runnables.config import ensure_config, merge_configs
    from langchain_core.utils.function_calling import convert_to_openai_tool
    from langgraph.callbacks import GraphCallbackHandler
    from langgraph.errors import GraphBubbleUp, GraphInterrupt
    from langgraph.graph import START
    from langgraph.graph.state import CompiledStateGraph
    from langgraph.prebuilt import ToolNode
    from langgraph.runtime import get_runtime
    from langgraph.types import Command, interrupt
except ImportError as error:
    raise missing_framework(__name__, "langgraph 1.2 or later", "langgraph", error) from error
try:
    from langchain.agents.middleware import AgentMiddleware, ToolRetryMiddleware
except ImportError:  # a ToolNode can be given the methods of the middleware without langchain
    AgentMiddleware, ToolRetryMiddleware = object, ()

_PASSES: Final = (GraphBubbleUp,)

_KEY: Final = "__pregel_replanning"
"""Key in the configuration for the run of the graph; keys that begin like this are neither stored nor shown in streams."""

_CHECKPOINTER: Final = "__pregel_checkpointer"
"""Key in the configuration for the checkpointer that a graph passes on to the graphs within it."""

_MESSAGE: Final = "message"
"""Key of a message in the recorded output of a tool."""

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
    """Return a compiled graph whose nodes, and whose tools under a `ReplanningMiddleware`, are calls of a session.

    Each run of the graph is a run of the engine; a thread that is resumed after an interrupt or a failure resumes it. A node
    that fails is retried, or a node of the same capability is executed in its place with its input, or a person is asked.

    Args:
        graph: as `StateGraph.compile` or `create_agent` returns it; it is not changed.
        engine: decides what follows a failure; by default one with its defaults.
        capabilities: by the name of a node or a tool, its capability, or the fields that `replanning.tool` takes. Those of
            the same capability can stand in for one another. By default `capability` in the metadata of a node or a tool.
        objective: the aim of a run; by default the name of the graph, if it was compiled with one.
        approvals: whether a question to a person interrupts a graph that has a checkpointer. Otherwise the graph sees the
            exception of the node or tool.

    Raises:
        TypeError: the graph is attached already.
        ValueError: a node and a tool have the same name, a capability names neither, a field is not valid for a tool, or
            capabilities are stated of tools that are executed without a `ReplanningMiddleware`.
    """
    if isinstance(graph, ReplannedGraph):
        raise TypeError("graph: it is attached already")
    described: list[tuple[str, dict[str, object]]] = []
    bodies: dict[str, Any] = {}
    detached: list[str] = []
    approved = _tools_behind_approval(graph)
    for name, node in graph.nodes.items():
        # A person looks at a node before it is executed, which a stand-in would pass by.
        is_stopped = graph.interrupt_before_nodes == "*" or name in graph.interrupt_before_nodes
        repeats = bool(node.retry_policy or graph.retry_policy)
        if isinstance(node.bound, ToolNode):
            for tool in node.bound.tools_by_name.values():
                fields = _described(tool, dangerous=is_stopped or tool.name in approved)
                if repeats or _is_repeated(tool.name, node.bound):
                    fields.setdefault("retry", ONE_ATTEMPT)
                described.append((tool.name, fields))
            if not _has_middleware(node.bound):
                detached += [
                    each for each in node.bound.tools_by_name if each in (capabilities or {})
                ]
        elif name != START:
            capability = (node.metadata or {}).get("capability")
            fields = tool_fields("", {}, kind="langgraph", dangerous=is_stopped, stated=capability)
            if repeats:
                fields.setdefault("retry", ONE_ATTEMPT)
            described.append((name, fields))
            bodies[name] = node.bound
    if twice := [
        name for name, times in Counter(name for name, _ in described).items() if times > 1
    ]:
        raise ValueError(
            f"two nodes or tools are called {', '.join(map(repr, twice))}; give one of them another name"
        )
    if detached:
        raise ValueError(
            f"capabilities: the calls of {', '.join(map(repr, detached))} would not be replanned; create the agent with "
            "`middleware=[ReplanningMiddleware()]`, or give `ReplanningMiddleware().awrap_tool_call` to the `ToolNode`"
        )
    tools = describe_tools(dict(described), capabilities, noun="node or tool")
    nodes = {
        name: node.copy({"bound": _Node(name, bodies), "subgraphs": node.subgraphs})
        if name in bodies
        else node
        for name, node in graph.nodes.items()
    }
    # Without the names of nodes, so that a thread can be resumed after a node was added.
    name = "a graph" if graph.get_name() == _DEFAULT_NAME else f"the graph {graph.get_name()}"
    engine = engine or ReplanningEngine()
    attachment = _Attachment(engine, objective or f"Run {name}", tools, graph, approvals)
    return ReplannedGraph(attachment=attachment, **vars(graph.copy({"nodes": nodes})))


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
    )


def _has_middleware(node: Any) -> bool:
    """Return whether calls of a `ToolNode` go through a `ReplanningMiddleware`; a wrapper of a user may call one, too."""
    owners = _owners(node)
    others = [each for each in owners if each is not None]
    return any(isinstance(each, ReplanningMiddleware) for each in others) or bool(
        owners and not others
    )


def _owners(node: Any) -> list[Any]:
    """Return the objects whose methods wrap the calls of a `ToolNode`; None for a function."""
    wrappers, seen = [node._wrap_tool_call, node._awrap_tool_call], set[int]()
    owners: list[Any] = []
    while (
        wrappers
    ):  # the factory of agents puts the methods of the middleware into functions within functions
        wrapper = wrappers.pop()
        if not callable(wrapper) or id(wrapper) in seen:
            continue
        seen.add(id(wrapper))
        owners.append(getattr(wrapper, "__self__", None))
        cells = getattr(wrapper, "__closure__", None) or ()
        wrappers += [getattr(wrapper, "__wrapped__", None), *(cell.cell_contents for cell in cells)]
    return owners


def _is_repeated(tool: str, node: Any) -> bool:
    """Return whether another middleware of an agent repeats calls of a tool that fail."""
    for owner in _owners(node):
        if isinstance(owner, ToolRetryMiddleware):
            names = getattr(owner, "_tool_filter", None)
            if names is None or tool in names:
                return True
    return False


class _Run(GraphCallbackHandler):  # type: ignore[misc]  # its types are not followed
    """Run of a graph, with the session of its calls; as a callback handler it receives only interrupts."""

    run_inline = True
    ignore_agent = ignore_chain = ignore_chat_model = ignore_custom_event = ignore_llm = (
        ignore_retriever
    ) = True
    ignore_retry = True

    def __init__(
        self,
        engine: ReplanningEngine,
        session: Session,
        thread: SessionThread | None = None,
        *,
        asks: bool,
    ) -> None:
        self.engine = engine
        self.session = session
        self.thread = thread
        self._asks = asks
        self.pause_reason = ""  # empty unless the run will be resumed
        self._calls: dict[str, list[tuple[str, Mapping[str, object]]]] = {}  # with the same id
        self._under_way: set[str] = set()  # keys of calls
        self._executing: dict[str, int] = {}
        self._idle: dict[str, anyio.Event] = {}
        self._answers: dict[str, Mapping[str, Any]] = {}

    def added_to(self, config: Any) -> Any:
        """Return the configuration of a graph, with this run in it."""
        # The nodes do not inherit the handler: it would be asked about the beginning and the end of everything within them.
        return merge_configs(
            config, {"configurable": {_KEY: self}, "callbacks": BaseCallbackManager([self])}
        )

    def on_interrupt(self, event: object) -> None:
        """Note that this run will be resumed."""
        self.pause_reason = "the graph was interrupted"

    async def call(
        self,
        name: str,
        arguments: Mapping[str, object],
        execute: Execute,
        call_id: str | None = None,
    ) -> object:
        """Call a node, or a tool, for which the model has an id, and put questions to a person through an interrupt.

        A node that is skipped returns None, and a tool that is skipped a message that says why.

        Args:
            name: of the node or tool.
            arguments: of the tool.
            execute: executes a node or tool.
            call_id: the id that the model has for the call of a tool, which may be empty; None for a node.

        Raises:
            GraphBubbleUp: control flow of the graph.
            Exception: of the node or the tool; no alternative is left.
        """
        node = get_runtime().execution_info.task_id
        try:
            return await self._call(name, arguments, execute, call_id)
        except Exception:
            # The graph cuts off the other calls of this node, and would execute them again when it is resumed.
            while self._executing.get(node):
                event = self._idle.setdefault(node, anyio.Event())
                await event.wait()
            raise

    async def _call(
        self,
        name: str,
        arguments: Mapping[str, object],
        execute: Execute,
        call_id: str | None,
    ) -> object:
        is_tool = call_id is not None
        key = self._key(name, arguments, call_id)
        node = get_runtime().execution_info.task_id
        messages = _Messages()

        async def encoded(tool: str, values: Mapping[str, object]) -> object:
            output = await execute(tool, values)
            return messages.encode(output) if is_tool else output

        answered = False
        while True:
            self._executing[node] = self._executing.get(node, 0) + 1
            self._under_way.add(key)
            try:
                # A node of tools makes all of its calls again; one that is done is answered from the journal.
                once = answered or (is_tool and self.session.is_recorded(key))
                output = await self.session.invoke(
                    name, arguments, execute=encoded, key=key, once=once, passes=_PASSES
                )
                # A node may return what looks like a message: a change of the state.
                return messages.decode(output) if is_tool else output
            except ReportedFailure as error:
                return error.result
            except CallSkipped as skipped:
                if not is_tool:
                    return None
                return ToolMessage(str(skipped), name=name, tool_call_id=call_id)
            except NeedsHuman as error:
                if not self._asks:
                    return reported_result(error)
                question = error.questions[0]
            except GraphInterrupt as error:
                if answered:  # when resumed, it would take the answer to the question for its own
                    text = f"{name!r} was put to a person before, and cannot interrupt the graph after that"
                    raise RuntimeError(text) from error
                raise
            finally:
                self._under_way.discard(key)
                self._executing[node] -= 1
                if not self._executing[node] and (idle := self._idle.pop(node, None)) is not None:
                    idle.set()
            answered = self._ask(question)

    def _key(self, name: str, arguments: Mapping[str, object], call_id: str | None) -> str:
        """Return a key of a call of the node that is being executed, or of a tool that it calls.

        A call that another middleware repeats has the same key again. Some models give the calls of a message the same
        id, or an empty one: those are told apart by what they call, and identical ones by being made at the same time.
        """
        info = get_runtime().execution_info
        key = f"{info.task_id}/{info.node_attempt}/{call_id or ''}"
        calls = self._calls.setdefault(key, [])
        if (name, arguments) not in calls:
            calls.append((name, arguments))
        if number := calls.index((name, arguments)):
            key = f"{key}#{number}"
        while key in self._under_way:
            key = f"{key}+"
        return key

    def _ask(self, question_id: str) -> bool:
        """Interrupt the graph with a question, and carry out the answer once the graph is resumed with it."""
        payload = next(iter(shown_questions(self.engine, self.session.run.id, [question_id])), None)
        if payload is None:  # it was answered elsewhere
            return True
        while True:
            # The first ones may be answers to interrupts of the node itself or about its other calls, or were refused.
            answer = self._answers.pop(question_id, None) or interrupt(payload)
            if not isinstance(answer, Mapping):
                continue
            if answer.get("question") != question_id:
                self._answers[str(answer.get("question"))] = answer
                continue
            fields = {
                str(name): value
                for name, value in answer.items()
                if name not in ("question", "verdict")
            }
            try:
                self.engine.answer(question_id, answer.get("verdict", ""), **fields)
            except (StaleAnswer, UnknownQuestion):  # it was answered elsewhere
                return True
            except (ChangeRejected, TypeError, ValueError) as error:
                payload["refused"] = str(error)
            else:
                return True

    def call_from_thread(
        self,
        name: str,
        arguments: Mapping[str, object],
        execute: Callable[..., Any],
        call_id: str | None = None,
    ) -> Any:
        """Do the same as `call`, from the thread of a graph that runs without an event loop."""
        if self.thread is None:
            raise RuntimeError(
                f"{name!r} is executed synchronously in a graph that runs asynchronously, which cannot be waited for"
            )
        return self.thread.call(
            lambda hand_over: self.call(name, arguments, hand_over, call_id), execute
        )

    def in_event_loop(
        self, function: Callable[..., Coroutine[Any, Any, Any]]
    ) -> Callable[..., Any]:
        """Return a function for the thread of the graph that executes an async function in that of the session."""

        @wraps(function)
        def execute(*args: Any, **kwargs: Any) -> Any:
            assert self.thread is not None
            return self.thread.call(lambda _: function(*args, **kwargs))

        return execute


class _Messages:
    """Messages of tools as the journal keeps them, and back; what was executed in this process comes back as it was."""

    def __init__(self) -> None:
        self._executed: list[tuple[object, object]] = []

    def encode(self, output: object) -> object:
        """Return an object of JSON for a message; anything else, and one whose artifact is no JSON, stays as it is."""
        if not isinstance(output, ToolMessage):
            return output
        try:
            encoded = {_MESSAGE: output.model_dump(mode="json")}
        except ValueError:  # of pydantic, whose error is one
            return output
        self._executed.append((encoded, output))
        return encoded

    def decode(self, output: object) -> object:
        """Return the message behind the output of a call of a tool."""
        for encoded, message in self._executed:
            if encoded is output:
                return message
        if isinstance(output, Mapping) and output.keys() == {_MESSAGE}:
            return ToolMessage.model_validate(output[_MESSAGE])
        return output


@dataclass(frozen=True)
class _Attachment:
    """Opens a session of the engine for each run of a graph."""

    engine: ReplanningEngine
    objective: str
    tools: Sequence[FunctionTool[..., Any]]
    original: CompiledStateGraph
    approvals: bool

    def _session(self, graph: Any, given: Any, config: Any) -> Any:
        """Return the unfinished session of the thread if the graph is resumed, or else a new session."""
        configurable = self._configurable(graph, config)
        run_id = None
        if thread := configurable.get("thread_id"):
            inner = configurable.get(
                "checkpoint_ns"
            )  # of a task of the other graph, which gives its input again
            part = hashlib.blake2s(inner.encode(), digest_size=4).hexdigest() if inner else ""
            resumes = (
                bool(inner)
                or given is None
                or (isinstance(given, Command) and given.resume is not None)
            )
            run_id = thread_run(self.engine, str(thread), part=part, resumes=resumes)
        return self.engine.session(
            self.objective, tools=self.tools, run_id=run_id, asks=self._asks(graph, config)
        )

    def _configurable(self, graph: Any, config: Any) -> Mapping[str, Any]:
        configurable: dict[str, Any] = merge_configs(graph.config, config).get("configurable", {})
        if "thread_id" not in configurable:  # within a node of another graph, which has the thread
            configurable = {**ensure_config()["configurable"], **configurable}
        return configurable

    def _asks(self, graph: Any, config: Any) -> bool:
        """Return whether a question interrupts the graph; without a checkpointer nobody could answer it."""
        return self.approvals and self._has_checkpointer(graph, config)

    def _has_checkpointer(self, graph: Any, config: Any) -> bool:
        if graph.checkpointer is False:
            return False
        return bool(graph.checkpointer or self._configurable(graph, config).get(_CHECKPOINTER))

    def _lacks_thread(self, graph: Any, config: Any) -> bool:
        """Return whether the graph refuses to run, because it has a checkpointer and nothing says for which thread."""
        return self._has_checkpointer(graph, config) and not self._configurable(graph, config)

    @asynccontextmanager
    async def open(self, graph: Any, given: Any, config: Any) -> AsyncIterator[Any]:
        """Open a session in a task of its own, because any task may close a stream; yield the configuration."""
        if self._lacks_thread(graph, config):
            yield config
            return
        task = SessionTask(self._session(graph, given, config))
        try:
            run = _Run(self.engine, await task.session(), asks=self._asks(graph, config))
            yield run.added_to(config)
        except BaseException as error:
            with suppress(ReplanningError):  # the exception of the graph is the one to raise
                await task.end(f"the graph raised {type(error).__name__}")
            raise
        await task.end(run.pause_reason)

    @contextmanager
    def open_in_thread(self, graph: Any, given: Any, config: Any) -> Iterator[Any]:
        """Open a session in an event loop in a thread of its own."""
        if self._lacks_thread(graph, config):
            yield config
            return
        with SessionThread.open(self._session(graph, given, config)) as thread:
            run = _Run(self.engine, thread.session, thread, asks=self._asks(graph, config))
            yield run.added_to(config)
            if run.pause_reason:
                run.session.run.pause(run.pause_reason)


class ReplannedGraph(CompiledStateGraph):  # type: ignore[misc]  # its types are not followed
    """Compiled graph whose runs have sessions, see `replanned`. It is used like the original graph."""

    def __init__(self, *, attachment: _Attachment, **fields: Any) -> None:
        super().__init__(**fields)
        self.attachment = attachment

    def get_graph(self, config: Any = None, **options: Any) -> Any:
        """Return a drawing of the graph, with the functions of the user."""
        return self.attachment.original.get_graph(config, **options)

    async def aget_graph(self, config: Any = None, **options: Any) -> Any:
        """Return a drawing of the graph, with the functions of the user."""
        return await self.attachment.original.aget_graph(config, **options)

    def stream(self, input: Any, config: Any = None, **options: Any) -> Iterator[Any]:  # noqa: A002 # its name there
        """Run the graph in this thread; `invoke` does so too."""
        with self.attachment.open_in_thread(self, input, config) as own:
            yield from super().stream(input, own, **options)

    async def astream(self, input: Any, config: Any = None, **options: Any) -> AsyncGenerator[Any]:  # noqa: A002
        """Run the graph; `ainvoke` and `astream_events` do so too."""
        async with self.attachment.open(self, input, config) as own:
            async for part in super().astream(input, own, **options):
                yield part


class _Node(Runnable):  # type: ignore[misc]  # its types are not followed
    """Body of a node that makes a call, which the original body or that of another node executes."""

    def __init__(self, name: str, bodies: Mapping[str, Any]) -> None:
        self.name = name
        self._bodies = bodies

    def invoke(self, input: Any, config: Any = None, **options: Any) -> Any:  # noqa: A002 # its name there
        """Execute the node in this thread."""

        def execute(name: str, _: Mapping[str, object]) -> Any:
            body = self._bodies[name]
            if (
                name != self.name and getattr(body, "func", body) is None
            ):  # it has no synchronous function
                return run.in_event_loop(body.ainvoke)(input, config, **options)
            return body.invoke(input, config, **options)

        run = _run_of(config)
        return run.call_from_thread(self.name, {}, execute)

    async def ainvoke(self, input: Any, config: Any = None, **options: Any) -> Any:  # noqa: A002
        """Execute the node."""

        async def execute(name: str, _: Mapping[str, object]) -> Any:
            return await self._bodies[name].ainvoke(input, config, **options)

        return await _run_of(config).call(self.name, {}, execute)


def _run_of(config: Any) -> _Run:
    run = config["configurable"].get(_KEY)
    if not isinstance(run, _Run):
        raise RuntimeError(
            "the graph is not attached; use the one that `replanned(graph, engine)` returns"
        )
    return run


class ReplanningMiddleware(AgentMiddleware):  # type: ignore[misc]  # its types are not followed
    """Makes tools calls of the session: `replanned(create_agent(…, middleware=[ReplanningMiddleware()]), engine)`.

    Its methods can also be given to a `ToolNode` as `wrap_tool_call` and `awrap_tool_call`.
    """

    def wrap_tool_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        """Execute a tool, or what replaces it, in this thread."""
        if request.tool is None:  # the model named a tool that does not exist, and is told so
            return handler(request)

        def execute(name: str, arguments: Mapping[str, object]) -> Any:
            own = _request(request, name, arguments)
            if own is not request and getattr(own.tool, "func", own.tool) is None:
                own = own.override(
                    tool=own.tool.model_copy(update={"func": run.in_event_loop(own.tool.coroutine)})
                )
            noting = _NotingTool(own.tool)
            return _checked(handler(own.override(tool=noting)), request, noting.raised)

        call, run = request.tool_call, _run_of(request.runtime.config)
        return run.call_from_thread(call["name"], call["args"], execute, call["id"] or "")

    async def awrap_tool_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """Execute a tool, or what replaces it."""
        if request.tool is None:
            return await handler(request)

        async def execute(name: str, arguments: Mapping[str, object]) -> Any:
            own = _request(request, name, arguments)
            noting = _NotingTool(own.tool)
            return _checked(await handler(own.override(tool=noting)), request, noting.raised)

        call = request.tool_call
        return await _run_of(request.runtime.config).call(
            call["name"], call["args"], execute, call["id"] or ""
        )


class _NotingTool:
    """Tool whose exceptions are noted, before a `ToolNode` or another middleware makes messages of them.

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


def _request(request: Any, name: str, arguments: Mapping[str, object]) -> Any:
    """Return the request for a tool, which may differ from the tool that the model called."""
    call = request.tool_call
    if name == call["name"] and arguments == call["args"]:
        return request
    tool = next((each for each in request.runtime.tools if each.name == name), None)
    if tool is None:
        raise LookupError(f"the agent has no tool {name!r}")
    return request.override(tool=tool, tool_call={**call, "name": name, "args": dict(arguments)})


def _checked(result: Any, request: Any, raised: Sequence[Exception]) -> Any:
    """Return the message to the model, under the name of the tool that it called.

    Args:
        result: the message, or a command that has one.
        request: of the model.
        raised: the exceptions of the tool.

    Raises:
        ReportedFailure: the message tells a failure; from an exception that leaves the call in doubt, if there was one.
    """
    doubt = next((error for error in raised if failure_from(error).in_doubt), None)
    if isinstance(result, Command):
        update = result.update if isinstance(result.update, Mapping) else {}
        messages = update.get("messages")
        for message in messages if isinstance(messages, list | tuple) else (messages,):
            if isinstance(message, ToolMessage) and message.status == "error":
                raise ReportedFailure(message.text, result) from doubt
        return result
    if not isinstance(result, ToolMessage):
        return result
    if result.status == "error":
        raise ReportedFailure(result.text, result) from doubt
    name = request.tool_call["name"]
    return result if result.name == name else result.model_copy(update={"name": name})
