"""Plans for workflows of frameworks whose steps are agents."""

from __future__ import annotations

import asyncio  # noqa: TID251 # some frameworks run on asyncio alone
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from threading import get_ident
from typing import Any, Final, NamedTuple, TypeVar

import anyio

from replanning.changes import RetryTask, SkipTask
from replanning.engine.engine import ReplanningEngine
from replanning.engine.session import CALL_KEY, Execute, Session
from replanning.errors import CallSkipped, NeedsHuman, NotRunning
from replanning.integrations.kit import (
    ONE_ATTEMPT,
    Arguments,
    Capabilities,
    answer_questions,
    describe_tools,
    thread_run,
    tool_fields,
)
from replanning.journal.records import DecisionMade, PlanRevised, RunResumed, TriggerFired
from replanning.live.entries import TaskEntry
from replanning.live.states import FINISHED, STUCK, TaskState
from replanning.plan.document import Plan
from replanning.plan.tasks import Goal, Task
from replanning.plan.types import JsonValue, TaskId
from replanning.run.attempt import TaskContext
from replanning.run.run import PlanRun

TASK: Final = "task"
"""Argument of an agent: its instruction.

Steps have none, because the framework instructs their agents. A provider may state one for a
replacement.
"""

EARLIER: Final = "earlier"
"""Argument of an agent that follows agents unknown to the framework: their names and outputs."""

IdT = TypeVar("IdT", bound=str)

_PERFORMABLE: Final = {TaskState.READY, TaskState.BACKOFF, TaskState.NEEDS_CONTINUATION, *STUCK}

_SCHEMA: Final = {"properties": {TASK: {"type": "string", "default": ""}}}


class AgentStep(NamedTuple):
    """One step of a workflow: an agent that runs once.

    Attributes:
        id: unique in the workflow, and the same in every run of it.
        agent: the name of the agent.
        depends_on: the ids of the steps before it.
    """

    id: str
    agent: str
    depends_on: tuple[str, ...] = ()


def step_ids(agents: Sequence[str]) -> list[str]:
    """Return ids for steps, given their agents in order: `writer`, `editor`, `writer-2`."""
    ids: list[str] = []
    for agent in agents:
        step_id = agent
        number = 1
        while step_id in ids:
            number += 1
            step_id = f"{agent}-{number}"
        ids.append(step_id)
    return ids


def agent_plan(
    objective: str,
    steps: Sequence[AgentStep],
    agents: Mapping[str, str | None],
    capabilities: Capabilities | None,
    *,
    always: bool = False,
) -> Plan:
    """Return the plan of a workflow: its tools are the agents, its tasks the steps.

    An agent gets one attempt, because agents retry transient failures themselves. It may run again
    after the process died while it worked, as in the framework. The capabilities can override both.

    Args:
        objective: the request to the workflow.
        steps: the steps.
        agents: by name, the purpose of each agent; those without a step can stand in.
        capabilities: by the name of an agent, its capability, or the fields that `replanning.tool`
            takes.
        always: whether the framework continues after a step that failed.

    Raises:
        ValueError: capabilities name agents that do not exist, or a field is not valid for an
            agent; lists all problems.
    """
    fields = {name: agent_fields(description) for name, description in agents.items()}
    described = describe_tools(fields, capabilities, noun="agent")
    tasks = []
    for step in steps:
        task = Task(id=TaskId(step.id), tool=step.agent, depends_on=step.depends_on)
        if always:
            task = task.model_copy(update={"run_if": "always"})
        tasks.append(task)
    # A run of a thread is resumed only for the same objective, so nothing is cut off.
    printable = [char if char.isprintable() or char in "\n\t" else " " for char in objective]
    return Plan(
        goal=Goal(objective="".join(printable) or "Run of a workflow"),
        tools=[each.spec for each in described],
        tasks=tasks,
    )


def agent_fields(description: str | None) -> dict[str, object]:
    """Return the fields that describe an agent as a tool, see `agent_plan`."""
    return tool_fields(description, _SCHEMA, kind="agent", idempotent=True, retry=ONE_ATTEMPT)


@asynccontextmanager
async def agent_session(
    engine: ReplanningEngine, plan: Plan, *, thread: str | None = None, approvals: bool = True
) -> AsyncIterator[Session]:
    """Open the run of a plan of agents, whose steps the body performs through `AgentSteps`.

    Steps of a resumed run that had failed for good are retried.

    Args:
        engine: the engine.
        plan: the plan, see `agent_plan`.
        thread: an id for the work; its last run is resumed unless it has ended.
        approvals: whether a person is asked, by the gate of the engine or, with a thread, by
            `NeedsHuman`.

    Raises:
        RunOwned: another process owns the run of this thread.
        StoreError: the run of this thread has another plan, or the store fails.
    """
    run_id = None if thread is None else thread_run(engine, thread)
    asks = approvals and thread is not None
    async with engine.session(plan, run_id=run_id, asks=asks, gate=approvals) as session:
        retry_failed(session)
        yield session


def retry_failed(session: Session) -> None:
    """Retry the steps of a resumed run that had failed for good.

    Steps with an open question, or one that a person has just answered, are left alone: a retry
    would fail and ask again.
    """
    run = session.run
    answered = _answered_since_resume(run)
    failed = []
    for task_id in run.live.stuck:
        entry = run.live.entry(task_id)
        root = run.live.entry(entry.root)
        if CALL_KEY not in root.task.metadata and not entry.holds and task_id not in answered:
            failed.append(RetryTask(task_id=task_id))
    if failed:
        run.apply(failed, reason="the workflow was run again")


def _answered_since_resume(run: PlanRun) -> set[TaskId]:
    """Return the tasks that a person has decided about since the run was resumed."""
    tasks: dict[str, tuple[TaskId, ...]] = {}
    answered: set[TaskId] = set()
    for record in run.records():
        match record.body:
            case RunResumed():
                answered.clear()
            case TriggerFired(trigger=trigger):
                tasks[trigger.id] = trigger.tasks
            case DecisionMade(by=by, triggers=triggers) if by.partition(":")[0] == "person":
                for trigger_id in triggers:
                    answered.update(tasks[trigger_id])
    return answered


class AgentSteps:
    """The steps of a workflow whose agents the framework runs.

    Args:
        engine: the engine of the session.
        session: from `agent_session`.
        asks: whether the workflow can be run again after a person has answered a question.
    """

    def __init__(self, engine: ReplanningEngine, session: Session, *, asks: bool) -> None:
        self._engine = engine
        self._run = session.run
        self._asks = asks
        self._begun: set[str] = set()
        self._adding = anyio.Lock()

    async def perform(
        self,
        step: str,
        execute: Execute,
        *,
        known: Collection[str],
        passes: tuple[type[BaseException], ...] = (),
    ) -> object:
        """Run the agent of a step, or what replaces it, and return the output.

        Tasks that providers put before the step are performed first, unless they are `known`. If a
        provider has moved a step of the framework before this one, and the framework has not begun
        it, this one does not wait: the framework would begin the other only afterwards.

        Args:
            step: the id of the step, or of a task that a provider has added.
            execute: runs an agent, given its name and, where they apply, the arguments `TASK` and
                `EARLIER`.
            known: the ids of the steps that the framework performs, and whose outputs it passes on
                itself. If steps can be performed ahead of their turn, only those that have begun.
            passes: as `PlanRun.perform` takes it.

        Raises:
            CallSkipped: the step was skipped.
            Exception: as `PlanRun.perform`; the agent's own if a person would have to answer and
                cannot be asked.
        """
        added = self._added_before(step, known)
        for task_id in (*added, step):
            self._begun.add(task_id)
            self._drop_later_steps(task_id, known)
        perform = partial(self._perform, execute=execute, known=known, passes=passes)
        await self._perform_added(added, perform)
        revised = anyio.Event()
        thread = get_ident()

        def wake(_: PlanRevised) -> None:
            # Other runs of the engine may have other event loops.
            if get_ident() == thread:
                revised.set()

        async def follow() -> None:
            """Perform tasks put before the step after it has failed, because it waits for them."""
            nonlocal revised
            while True:
                await revised.wait()
                revised = anyio.Event()
                with suppress(Exception):  # the step itself reports that it waited in vain
                    await self._perform_added(self._added_before(step, known), perform)

        failure: BaseException
        stop = self._engine.monitor.on(PlanRevised, wake)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(follow)
                try:
                    return await perform(step)
                except anyio.get_cancelled_exc_class():
                    raise
                except BaseException as error:  # noqa: BLE001 # the group would wrap it
                    failure = error
                finally:
                    group.cancel_scope.cancel()
        finally:
            stop()
        raise failure

    async def _perform_added(
        self, added: Sequence[TaskId], perform: Callable[[str], Awaitable[object]]
    ) -> None:
        for task_id in added:
            # Two steps may follow the same task, which only one of them can perform.
            async with self._adding:
                with suppress(CallSkipped):
                    await perform(task_id)

    def next_step(self, performed: Collection[str]) -> TaskId | None:
        """Return the next step that can be performed, or that has ended in an earlier process.

        If it failed there, or waits for an answer, performing it raises that.

        For frameworks that run their steps one by one: this follows whatever providers have
        inserted, skipped or moved.

        Args:
            performed: the ids that were returned before.
        """
        live = self._run.live
        for entry in sorted(live, key=_order):
            if entry.parent is not None or entry.id in performed:
                continue
            leaves = live.leaves(entry)
            if not entry.satisfied and _PERFORMABLE.isdisjoint(leaf.state for leaf in leaves):
                continue
            if all(root in performed for root in self._roots_before(entry)):
                return entry.id
        return None

    def added_behind(self, known: Collection[str]) -> list[TaskId]:
        """Return the unperformed tasks that providers have put after the last step.

        Args:
            known: the ids of the steps of the framework, and of what was performed.
        """
        return [entry.id for entry in self._open_steps() if entry.id not in known]

    def skip(self, step: str, reason: str) -> None:
        """Skip a step that has failed, because the framework continues without its output."""
        self._skip(self._unfinished(self._run.live.entry(TaskId(step))), reason)

    def skip_rest(self, reason: str = "the framework has ended without it") -> None:
        """Skip the steps that the framework has not performed by its end."""
        rest: list[TaskEntry] = []
        for step in self._open_steps():
            for leaf in self._unfinished(step):
                if leaf.state not in STUCK:
                    rest.append(leaf)
        with suppress(NotRunning):
            self._skip(rest, reason)

    def _skip(self, leaves: Sequence[TaskEntry], reason: str) -> None:
        changes = [SkipTask(task_id=leaf.id, reason=reason) for leaf in leaves]
        if changes:
            self._run.apply(changes, reason=reason)

    def _unfinished(self, root: TaskEntry) -> list[TaskEntry]:
        leaves = self._run.live.leaves(root)
        return [leaf for leaf in leaves if leaf.state not in FINISHED]

    def _open_steps(self) -> list[TaskEntry]:
        """Return the steps that are not satisfied, without calls of tools."""
        steps: list[TaskEntry] = []
        for entry in self._run.live:
            if entry.parent is not None or entry.satisfied:
                continue
            if CALL_KEY not in entry.task.metadata:
                steps.append(entry)
        return steps

    async def _perform(
        self,
        step: str,
        execute: Execute,
        known: Collection[str],
        passes: tuple[type[BaseException], ...],
    ) -> object:
        async def work(task: Task, context: TaskContext) -> object:
            arguments: dict[str, object] = dict(context.arguments)
            earlier = []
            for task_id in task.depends_on:
                entry = self._run.live.entry(task_id)
                if task_id not in known and entry.state is TaskState.DONE:
                    earlier.append((entry.task.tool, context.results[task_id]))
            if earlier:
                arguments[EARLIER] = earlier
            return await execute(task.tool or task.id, arguments)

        entry = self._run.live.entry(TaskId(step))
        if entry.removed or entry.state is TaskState.CANCELLED:
            raise CallSkipped(f"step {step!r} was removed from the plan")
        try:
            return await self._run.perform(step, work, passes=passes)
        except NeedsHuman as error:
            if self._asks:
                raise
            answer_questions(
                self._engine, error.questions, approved=False, comment="nobody can be asked"
            )
            own_error = error.own_error
        # Outside the `except` clause, so that the NeedsHuman does not become its context.
        raise own_error

    def _added_before(self, step: str, known: Collection[str]) -> list[TaskId]:
        """Return the tasks before a step that the framework does not perform, in order."""
        added: dict[TaskId, None] = {}

        def visit(entry: TaskEntry) -> None:
            for root in self._roots_before(entry):
                before = self._run.live.entry(root)
                if root not in known and root not in added and not before.satisfied:
                    visit(before)
                    added[root] = None

        visit(self._run.live.entry(TaskId(step)))
        return list(added)

    def _drop_later_steps(self, step: str, known: Collection[str]) -> None:
        """Remove dependencies of a step on steps that the framework begins only afterwards."""
        live = self._run.live
        for leaf in live.leaves(live.entry(TaskId(step))):
            if leaf.state is not TaskState.PENDING:
                continue
            kept: list[JsonValue] = []
            for task_id in leaf.task.depends_on:
                before = live.entry(live.entry(task_id).root)
                if before.satisfied or before.id not in known or before.id in self._begun:
                    kept.append(task_id)
            if len(kept) < len(leaf.task.depends_on):
                reason = "the framework performs its steps in its own order"
                self._run.modify_task(leaf.id, depends_on=kept, reason=reason)

    def _roots_before(self, root: TaskEntry) -> list[TaskId]:
        """Return the roots of the lineages that a lineage depends on."""
        live = self._run.live
        roots = []
        for leaf in live.leaves(root):
            for task_id in leaf.task.depends_on:
                before = live.entry(task_id).root
                if before != root.id:
                    roots.append(before)
        return roots


def _order(entry: TaskEntry) -> int:
    return entry.order


Performing = Callable[[Execute], Awaitable[object]]
"""Performs steps, given the function that runs their agents."""

StreamAgent = Callable[[str, Arguments, Callable[[object], None]], AsyncGenerator[Any, None]]
"""Streams the items of an agent, given its name and arguments; passes on its output at the end."""


async def forward(performing: Performing, stream: StreamAgent) -> AsyncGenerator[Any, None]:
    """Perform steps in an async task of their own, and run their agents in the consumer's task.

    So an agent is cancelled and closed as by its framework alone, and its items are passed on at
    once.

    Args:
        performing: performs the steps.
        stream: runs an agent.

    Raises:
        Exception: raised by `performing`.
    """
    queue = asyncio.Queue[_StreamedRun | None]()

    async def execute(name: str, arguments: Arguments) -> object:
        run = _StreamedRun(stream, name, arguments)
        queue.put_nowait(run)
        return await run.output()

    performed = asyncio.ensure_future(performing(execute))
    performed.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (run := await queue.get()) is not None:
            async with aclosing(run.items()) as items:
                async for item in items:
                    yield item
    except BaseException:
        performed.cancel()
        with suppress(BaseException):
            await performed
        raise
    await performed


class _StreamedRun:
    """One run of an agent for a step.

    One async task takes its items, and another waits for its output.
    """

    def __init__(self, stream: StreamAgent, name: str, arguments: Arguments) -> None:
        self._outputs: list[object] = []
        self._stream = stream(name, arguments, self._outputs.append)
        self._ended = asyncio.get_running_loop().create_future()
        self._is_expired = False
        self._stepping: asyncio.Task[Any] | None = None

    async def output(self) -> object:
        """Wait for the output of the agent.

        Raises:
            Exception: of the agent.
        """
        try:
            return await self._ended
        except asyncio.CancelledError:
            # After its deadline the agent is cancelled where it runs, as by `asyncio.timeout`.
            self._is_expired = True
            if self._stepping is not None:
                self._stepping.cancel()
            raise

    async def items(self) -> AsyncGenerator[Any, None]:
        """Run the agent and yield its items; its exception is raised by `output`."""
        failure: Exception | None = None
        try:
            async with aclosing(self._stream) as stream:
                while not self._is_expired:
                    try:
                        item = await self._next(stream)
                    except StopAsyncIteration:
                        break
                    yield item
        except Exception as error:  # noqa: BLE001 # it is raised where the step is performed
            failure = error
        if self._ended.done():
            return
        if failure is not None:
            self._ended.set_exception(failure)
        else:
            self._ended.set_result(self._outputs[-1] if self._outputs else None)

    async def _next(self, stream: AsyncGenerator[Any, None]) -> Any:
        self._stepping = task = asyncio.current_task()
        assert task is not None
        cancelled_before = task.cancelling()
        try:
            return await anext(stream)
        except asyncio.CancelledError:
            if self._is_expired and task.uncancel() <= cancelled_before:
                raise StopAsyncIteration from None
            raise
        finally:
            self._stepping = None


class WorkflowEdge(NamedTuple):
    """Edge in the graph of a workflow.

    Attributes:
        source: the node that it leaves.
        target: the node that it enters.
        is_certain: whether it is always followed.
        join: identifies a group of edges that run their target once, all together.
    """

    source: str
    target: str
    is_certain: bool
    join: object


def visit_certain_nodes(
    start: str,
    edges: Iterable[WorkflowEdge],
    visit: Callable[[str, Sequence[IdT]], Sequence[IdT]],
) -> None:
    """Visit the nodes of a graph that always run exactly once: behind no condition, in no loop.

    A node is visited after those that it waits for. If the first node is in a loop, as a router is,
    no node is visited.

    Args:
        start: the first node.
        edges: the edges.
        visit: given a node and the steps before it, returns the steps that the next node waits for.
    """
    sources: dict[str, list[str]] = {}
    joins: dict[str, set[object]] = {}
    uncertain: set[str] = set()
    for edge in edges:
        sources.setdefault(edge.target, []).append(edge.source)
        joins.setdefault(edge.target, set()).add(edge.join)
        if not edge.is_certain or len(joins[edge.target]) > 1:
            uncertain.add(edge.target)
    if start in sources:
        return
    last = {start: visit(start, ())}
    left = [node for node in sources if node not in uncertain]
    while ready := [node for node in left if last.keys() >= set(sources[node])]:
        for node in ready:
            left.remove(node)
            before: dict[IdT, None] = {}
            for source in sources[node]:
                before.update(dict.fromkeys(last[source]))
            last[node] = visit(node, tuple(before))
