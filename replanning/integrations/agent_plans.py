"""Plans of agents: workflows of frameworks whose steps are agents, as plans whose pending steps are known from the start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, NamedTuple

from replanning.changes import RetryTask
from replanning.engine.engine import ReplanningEngine
from replanning.engine.session import Execute, Session
from replanning.errors import NeedsHuman, StaleAnswer, UnknownQuestion
from replanning.integrations.frameworks import (
    ONE_ATTEMPT,
    Capabilities,
    describe_tools,
    thread_run,
    tool_fields,
)
from replanning.live.entries import TaskEntry
from replanning.live.states import TaskState
from replanning.plan.document import Plan
from replanning.plan.tasks import Goal, Task
from replanning.plan.types import TaskId
from replanning.run.attempt import TaskContext
from replanning.run.run import PlanRun

TASK_ARGUMENT: Final = "task"
"""The one argument of an agent: its instruction. A step has none, because the framework says what the agent is asked."""

_STARTABLE: Final = (TaskState.READY, TaskState.BACKOFF, TaskState.NEEDS_CONTINUATION)

_SCHEMA: Final = {"properties": {TASK_ARGUMENT: {"type": "string", "default": ""}}}

_MAX_OBJECTIVE_CHARS: Final = 500


class AgentStep(NamedTuple):
    """One step of a workflow: an agent that is asked once.

    Attributes:
        id: unique in the workflow, and the same whenever the workflow is run.
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

    An agent gets one attempt, because frameworks let agents repeat what may pass by themselves. It may be asked again after
    the process died while it worked, as the framework would. The capabilities can say otherwise.

    Args:
        objective: what the workflow is asked for.
        steps: the steps.
        agents: by name, what each agent is for; those that no step names can stand in.
        capabilities: by the name of an agent, its capability, or the fields that `replanning.tool` takes.
        always: whether the framework goes on after a step that failed.

    Raises:
        ValueError: capabilities name agents that do not exist, or a field is not valid for an agent; names every one.
    """
    fields = {}
    for name, description in agents.items():
        fields[name] = tool_fields(
            description, _SCHEMA, kind="agent", idempotent=True, retry=ONE_ATTEMPT
        )
    described = describe_tools(fields, capabilities, noun="agent")
    tasks = []
    for step in steps:
        task = Task(id=TaskId(step.id), tool=step.agent, depends_on=step.depends_on)
        if always:
            task = task.model_copy(update={"run_if": "always"})
        tasks.append(task)
    return Plan(
        goal=Goal(objective=objective[:_MAX_OBJECTIVE_CHARS] or "Run of a workflow"),
        tools=[each.spec for each in described],
        tasks=tasks,
    )


@asynccontextmanager
async def agent_session(
    engine: ReplanningEngine, plan: Plan, *, thread: str | None = None
) -> AsyncIterator[Session]:
    """Open the run of a plan of agents, whose steps the body performs.

    Steps of a resumed run that had failed for good are tried again.

    Args:
        engine: the engine.
        plan: the plan, see `agent_plan`.
        thread: an id of the work; its last run is resumed unless it has ended.

    Raises:
        RunOwned: another process is at the run of this thread.
        StoreError: the run of this thread has another plan, or the store fails.
    """
    run_id = None if thread is None else thread_run(engine, thread)
    async with engine.session(plan, run_id=run_id, asks=thread is not None) as session:
        failed = [RetryTask(task_id=task_id) for task_id in session.run.live.stuck]
        if failed:
            session.run.apply(failed, reason="the workflow was run again")
        yield session


async def perform_step(
    engine: ReplanningEngine,
    session: Session,
    step: str,
    execute: Execute,
    *,
    asks: bool,
    passes: tuple[type[BaseException], ...] = (),
) -> object:
    """Have the agent of a step asked, or the one that replaces it, and return the output.

    Args:
        engine: the engine of the session.
        session: from `agent_session`.
        step: the id of the step, or of a task that a provider has added.
        execute: asks an agent, given its name and, if what replaces the step states it, `TASK_ARGUMENT`.
        passes: as `PlanRun.perform` takes it.

    Raises:
        CallSkipped: the step is left out.
        Exception: as `PlanRun.perform`; the agent's own where a person would have to answer and nobody can.
    """

    async def work(task: Task, context: TaskContext) -> object:
        return await execute(task.tool or task.id, context.arguments)

    try:
        return await session.run.perform(step, work, passes=passes)
    except NeedsHuman as error:
        if asks:
            raise
        for question in error.questions:
            with suppress(StaleAnswer, UnknownQuestion):
                engine.answer(question, "reject", comment="nobody can be asked")
        raise error.own_error from None


def next_step(run: PlanRun) -> TaskId | None:
    """Return the next step of the plan that can be performed, or else None.

    For frameworks whose steps this library calls one by one: this follows whatever providers have inserted, skipped or
    moved.
    """
    live = run.live
    for entry in sorted(live, key=_order):
        if entry.parent is None:
            for leaf in live.leaves(entry):
                if leaf.state in _STARTABLE:
                    return entry.id
    return None


def _order(entry: TaskEntry) -> int:
    return entry.order


def added_before(run: PlanRun, step: str, steps: Collection[str]) -> list[TaskId]:
    """Return what providers have put directly before a step, in the order in which it can be performed.

    For frameworks that call the steps themselves: nobody performs these tasks unless the step's caller does, before it.

    Args:
        run: the run.
        step: the id of the step.
        steps: the ids of all steps of the framework.
    """
    added: dict[TaskId, None] = {}

    def visit(entry: TaskEntry) -> None:
        for leaf in run.live.leaves(entry):
            for task_id in leaf.task.depends_on:
                before = run.live.entry(task_id)
                root = run.live.entry(before.root)
                if root.id not in steps and root.id not in added and root.id != entry.root:
                    visit(root)
                    added[root.id] = None

    visit(run.live.entry(TaskId(step)))
    return list(added)
