"""Tasks of crews as tasks of a session: planned at the kickoff, performed when CrewAI reaches them.

CrewAI keeps its own loop over the tasks, with its order, contexts, conditions, callbacks and
events. Only the execution of a single task is a task of the plan: another agent may do it, it may
be skipped, and tasks that providers insert before it are done first.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from crewai import Task as CrewTask
from crewai.tasks.conditional_task import ConditionalTask
from crewai.tasks.task_output import TaskOutput
from crewai.utilities.formatter import DIVIDERS
from pydantic_core import to_jsonable_python

from replanning.changes import AddTask, PlanChange, RetryTask, SkipTask
from replanning.engine.engine import ReplanningEngine
from replanning.engine.session import Execute
from replanning.errors import CallSkipped
from replanning.integrations.agent_plans import TASK, AgentSteps, retry_failed
from replanning.integrations.kit import Arguments
from replanning.integrations.session_thread import SessionThread
from replanning.live.entries import TaskEntry
from replanning.live.plan import LivePlan
from replanning.live.states import TaskState
from replanning.plan.messages import one_line
from replanning.plan.tasks import Task
from replanning.plan.types import MAX_NAME_CHARS, JsonValue, TaskId
from replanning.run.attempt import current_attempt
from replanning.run.run import PlanRun

_KEY: Final = "crewai"
"""Key in the metadata of a task of a crew: the number of its kickoff, and a digest of what it asks
for.
"""

_MAX_ID_CHARS: Final = 60

_CONTROL_CHARACTERS: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")

_PLANNED: Final = "planned"

_EXPECTED_OUTPUT: Final = "The result of this task."
"""Expected output of a task that a provider has added without a criterion."""


class AfterTheAgent(Exception):
    """CrewAI failed after the agent was done, as in a callback; another agent would not help.

    Attributes:
        error: the exception.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def _failing_after_the_agent(task: Any) -> Iterator[None]:
    """Raise `AfterTheAgent` for a failure after the task has its output."""
    before = task.output
    try:
        yield
    except Exception as error:
        if task.output is before:
            raise
        raise AfterTheAgent(error) from error


@dataclass(eq=False)
class _Step:
    """A task of a crew, and its task in the plan.

    Attributes:
        id: the id of the task in the plan.
        task: the task of the crew.
        crew: the crew; None for a task that is executed by itself.
        agents: by their names in the plan, the agents that may do it.
    """

    id: TaskId
    task: Any
    crew: Any
    agents: Mapping[str, Any]


@dataclass(eq=False)
class _Kickoff:
    """The tasks of one run of a crew in the plan.

    Attributes:
        digests: the digest of each task, see `_digest`.
        ids: the ids of the tasks in the plan.
        is_over: whether CrewAI has finished it.
    """

    digests: list[str]
    ids: list[TaskId]
    is_over: bool = True


class CrewWork(NamedTuple):
    """Execution of a task by CrewAI: its arguments."""

    task: Any
    agent: Any
    context: str | None
    tools: Any


class _Planned(NamedTuple):
    """A task of the plan that is due.

    Attributes:
        id: the id of the task.
        root: the first task of its lineage.
        agent: the name of the agent for it.
        instruction: the instruction for the agent; may be empty.
        inputs: the outputs that it depends on and that CrewAI does not pass to it.
        task: the task.
    """

    id: TaskId
    root: TaskId
    agent: str
    instruction: str
    inputs: Sequence[str]
    task: Task


class CrewPlan:
    """The tasks of the crews that run in a block.

    Its state maps tasks of crews to tasks of the plan, and those to their outputs. Only the thread
    of the session changes the first mapping.

    Args:
        engine: the engine of the session.
        session: the session.
        names: by the key of an agent, its name in the plan.
        optional: the names of tasks that a crew can do without.
        asks: whether the crew is kicked off again after a person has answered a question.
        passes: exceptions that are control flow of CrewAI.
    """

    def __init__(
        self,
        engine: ReplanningEngine,
        session: SessionThread,
        names: Mapping[str, str],
        optional: Collection[str],
        *,
        asks: bool,
        passes: tuple[type[BaseException], ...],
    ) -> None:
        self._session = session
        self._agent_steps = AgentSteps(engine, session.session, asks=asks)
        self._names = names
        self._optional = optional
        self._passes = (*passes, AfterTheAgent)
        self._steps: dict[Any, _Step] = {}
        self._roots: dict[TaskId, _Step] = {}
        self._outputs: dict[TaskId, TaskOutput] = {}
        self._kickoffs: list[_Kickoff] = []
        self._recorded = _recorded_kickoffs(session.session.run)
        session.start(partial(retry_failed, session.session)).result()

    # Kickoffs

    @contextmanager
    def kickoff(self, crew: Any, tasks: Sequence[Any], first: int) -> Iterator[None]:
        """Plan the tasks of a crew, for as long as CrewAI executes them.

        Args:
            crew: the crew.
            tasks: all its tasks.
            first: the index of the first that CrewAI executes.

        Raises:
            NotRunning: the session was aborted, or is about to pause.
            StoreError: the store fails.
        """
        agents: dict[str, Any] = {}
        for agent in (*crew.agents, *(task.agent for task in tasks), crew.manager_agent):
            if agent is not None and agent.key in self._names:
                agents.setdefault(self._names[agent.key], agent)
        kickoff = self._session.start(lambda: self._plan(crew, tasks, first, agents)).result()
        try:
            yield
        finally:
            kickoff.is_over = True

    def _plan(
        self, crew: Any, tasks: Sequence[Any], first: int, agents: Mapping[str, Any]
    ) -> _Kickoff:
        """Add the tasks of a crew to the plan, unless an interrupted run of it is continued."""
        run = self._session.session.run
        digests = [_digest(task) for task in tasks]
        changes: list[PlanChange] = []
        for earlier in self._kickoffs:
            if earlier.is_over and earlier.digests == digests:
                changes += _left_out(run, earlier.ids, "the crew was kicked off again")
        kickoff = self._continued(digests)
        if kickoff is not None:
            first = len(tasks) - len(kickoff.ids)
            for task_id in kickoff.ids:
                changes += _repeated(run, task_id)
            reason = "the crew continues"
        else:
            planned = self._planned(crew, tasks[first:], digests[first:])
            changes += [AddTask(task=task) for task in planned]
            kickoff = _Kickoff(digests[first:], [task.id for task in planned])
            reason = "the crew was kicked off"
        if changes:
            run.apply(changes, reason=reason, by=_KEY)
        kickoff.is_over = False
        self._kickoffs.append(kickoff)
        for task, task_id in zip(tasks[first:], kickoff.ids, strict=True):
            step = _Step(task_id, task, crew, agents)
            self._steps[task.id] = step
            self._roots[task_id] = step
        return kickoff

    def _continued(self, digests: Sequence[str]) -> _Kickoff | None:
        """Return the recorded kickoff of these tasks, or of the last of them, if any."""
        for recorded in self._recorded:
            if digests[-len(recorded.digests) :] == recorded.digests:
                self._recorded.remove(recorded)
                return recorded
        return None

    def _planned(self, crew: Any, tasks: Sequence[Any], digests: Sequence[str]) -> list[Task]:
        """Return the plan's tasks for a kickoff.

        CrewAI begins a task once all before it are done. Tasks with `async_execution` do not wait
        for one another, and only the next task without it waits for them.
        """
        live = self._session.session.run.live
        number = len(self._kickoffs) + len(self._recorded) + 1
        planned: list[Task] = []
        ids: dict[Any, TaskId] = {}
        last: TaskId | None = None
        pending: list[TaskId] = []
        for task, digest in zip(tasks, digests, strict=True):
            described = _plain(task.name or task.description)
            depends_on = [] if last is None else [last]
            if isinstance(task.context, list):
                depends_on += [ids[other.id] for other in task.context if other.id in ids]
            if not task.async_execution:
                depends_on += pending
            made = Task(
                id=_free_id(described, live, ids.values()),
                name=one_line(described, MAX_NAME_CHARS),
                goal=_plain(task.description),
                tool=self._tool_of(crew, task),
                depends_on=list(dict.fromkeys(depends_on)),
                optional=task.name in self._optional,
                metadata={_KEY: {"kickoff": number, "task": digest}},
            )
            planned.append(made)
            ids[task.id] = made.id
            if task.async_execution:
                pending.append(made.id)
            else:
                last = made.id
                pending = []
        return planned

    def _tool_of(self, crew: Any, task: Any) -> str | None:
        """Return the name of the agent that CrewAI chooses for a task; None if it makes one."""
        agent = task.agent if crew is None else crew._get_agent_to_use(task)
        return None if agent is None else self._names.get(agent.key)

    # Tasks

    def perform(self, work: CrewWork, execute: Callable[..., TaskOutput]) -> TaskOutput:
        """Perform a task that CrewAI has reached, in the thread of the caller.

        Args:
            work: what CrewAI would execute.
            execute: executes it.

        Raises:
            Exception: the agent's own; no alternative is left.
            NeedsHuman: a person must answer before the crew is kicked off again.
            NotRunning: the session was aborted, or is about to pause.
        """
        step = self._step(work.task)

        def execute_planned(_: str, values: Mapping[str, Any]) -> object:
            planned: _Planned = values[_PLANNED]
            chosen = self._chosen(step, work, planned)
            with _failing_after_the_agent(chosen.task):
                output = execute(*chosen)
            return self._keep(planned, output)

        try:
            output = self._session.call(partial(self._perform, step), execute_planned)
        finally:
            # CrewAI assigns the agent to the task, and the next run would begin with the stand-in.
            work.task.agent = work.agent
        return self._handed_on(step, output)

    async def aperform(
        self, work: CrewWork, execute: Callable[..., Awaitable[TaskOutput]]
    ) -> TaskOutput:
        """Perform a task that CrewAI has reached, in the caller's async task; see `perform`."""
        step = self._step(work.task)

        async def execute_planned(_: str, values: Mapping[str, Any]) -> object:
            planned: _Planned = values[_PLANNED]
            chosen = self._chosen(step, work, planned)
            with _failing_after_the_agent(chosen.task):
                output = await execute(*chosen)
            return self._keep(planned, output)

        try:
            output = await self._session.acall(partial(self._perform, step), execute_planned)
        finally:
            work.task.agent = work.agent
        return self._handed_on(step, output)

    def leave_out(self, task: Any) -> None:
        """Skip the task of the plan for a conditional task whose condition does not hold."""
        step = self._steps.get(task.id)
        if step is not None:
            run = self._session.session.run
            reason = "its condition does not hold"

            def skip() -> None:
                changes = _left_out(run, [step.id], reason)
                if changes:
                    run.apply(changes, reason=reason, by=_KEY)

            self._session.start(skip).result()

    def _step(self, task: Any) -> _Step:
        """Return the step of a task; plan it now if no crew has."""
        if task.id not in self._steps:
            agents = {}
            if task.agent is not None and task.agent.key in self._names:
                agents[self._names[task.agent.key]] = task.agent
            self._session.start(lambda: self._plan(None, [task], 0, agents)).result()
        return self._steps[task.id]

    async def _perform(self, step: _Step, hand_over: Execute) -> TaskOutput | None:
        """Perform the task of a step, and the tasks added before it, in the thread of the session.

        Returns:
            Its output; None if it was skipped.
        """
        live = self._session.session.run.live

        async def execute(name: str, arguments: Arguments) -> object:
            attempt = current_attempt()
            assert attempt is not None
            entry = live.entry(attempt.task_id)
            instruction = str(arguments.get(TASK) or entry.task.goal or "")
            inputs = self._inputs(entry, step)
            planned = _Planned(
                entry.id,
                entry.root,
                name,
                instruction,
                inputs,
                entry.task,
            )
            return await hand_over(name, {_PLANNED: planned})

        try:
            recorded = await self._agent_steps.perform(
                step.id, execute, known=self._roots, passes=self._passes
            )
        except CallSkipped:
            return None
        except AfterTheAgent as after:
            failure = after.error
        else:
            return self._output(step, recorded)
        # Outside the `except` clause, so that `AfterTheAgent` does not become its context.
        raise failure

    def _output(self, step: _Step, recorded: object) -> TaskOutput:
        """Return the output of a step as its agent returned it, or else as it was recorded."""
        live = self._session.session.run.live
        leaf = live.entry(step.id)
        while len(leaf.replacement.sinks) == 1:
            leaf = leaf.replacement.sinks[0]
        if leaf.id in self._outputs:
            return self._outputs[leaf.id]
        return _restored(step, recorded, step.agents.get(leaf.task.tool or ""))

    def _inputs(self, entry: TaskEntry, step: _Step) -> list[str]:
        """Return the outputs that a task depends on and that CrewAI does not pass to it."""
        live = self._session.session.run.live
        inputs: list[str] = []
        for task_id in entry.task.depends_on:
            needed = live.entry(task_id)
            # CrewAI itself passes on the output of another of its tasks.
            is_passed_on = entry.root == step.id and needed.root in self._roots
            if needed.root == step.id or not is_passed_on:
                text = _raw_text(live.results.output_of(task_id))
                if text:
                    inputs.append(text)
        return inputs

    def _chosen(self, step: _Step, work: CrewWork, planned: _Planned) -> CrewWork:
        """Return the work that CrewAI executes for a task of the plan.

        The task is the one that CrewAI has reached, or its replacement, or one that a provider has
        added before it.

        Raises:
            LookupError: the crew has no such agent.
        """
        is_added = planned.root != step.id
        task, agent, context, tools = work
        if is_added or planned.agent != self._names.get(agent.key, planned.agent):
            agent = step.agents.get(planned.agent)
            tools = None
        if agent is None:
            raise LookupError(f"the crew has no agent {planned.agent!r}")
        if is_added:
            context = ""
            task = CrewTask(
                description=planned.instruction or planned.task.name or planned.id,
                expected_output="\n".join(planned.task.acceptance) or _EXPECTED_OUTPUT,
                agent=agent,
            )
        elif planned.instruction not in ("", _plain(task.description)):
            task = task.model_copy(update={"description": planned.instruction})
        if tools is None:
            tools = task.tools or agent.tools or []
            if step.crew is not None:
                tools = step.crew._prepare_tools(agent, task, tools)
        if planned.inputs:
            context = DIVIDERS.join(filter(None, [context, *planned.inputs]))
        return CrewWork(task, agent, context, tools)

    def _keep(self, planned: _Planned, output: TaskOutput) -> JsonValue:
        """Keep an output for this process, and return its recorded form."""
        self._outputs[planned.id] = output
        recorded: dict[str, JsonValue] = {}
        if output.pydantic is not None:
            recorded["pydantic"] = output.pydantic.model_dump(mode="json", fallback=str)
        if output.json_dict is not None:
            recorded["json_dict"] = to_jsonable_python(output.json_dict, fallback=str)
        if output.tool_failures:
            recorded["tool_failures"] = to_jsonable_python(output.tool_failures, fallback=str)
        if not recorded:
            return str(output.raw)
        return {"raw": output.raw, **recorded}

    def _handed_on(self, step: _Step, output: TaskOutput | None) -> TaskOutput:
        """Set the output of the task that CrewAI has reached, and return it."""
        if output is None:
            return ConditionalTask.get_skipped_task_output(step.task)
        step.task.output = output
        return output


def _plain(text: str) -> str:
    """Return a text without the control characters that a plan rejects."""
    return _CONTROL_CHARACTERS.sub(" ", text)


def _digest(task: Any) -> str:
    """Return a digest of what a task asks for, which identifies it in another process."""
    text = f"{task.description}\n{task.expected_output}"
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def _free_id(described: str, live: LivePlan, new: Collection[TaskId]) -> TaskId:
    """Return an unused id made from a name or description."""
    stem = re.sub(r"[^\w.-]+", "-", described)[:_MAX_ID_CHARS].strip("-.") or "task"
    task_id = TaskId(stem)
    number = 1
    while task_id in new or live.is_taken(task_id):
        number += 1
        task_id = TaskId(f"{stem}-{number}")
    return task_id


def _recorded_kickoffs(run: PlanRun) -> list[_Kickoff]:
    """Return the recorded kickoffs of a resumed session, in order."""
    kickoffs: dict[object, _Kickoff] = {}
    for entry in run.live:
        note = entry.task.metadata.get(_KEY)
        if entry.parent is None and isinstance(note, dict):
            kickoff = kickoffs.setdefault(note["kickoff"], _Kickoff([], []))
            kickoff.digests.append(str(note["task"]))
            kickoff.ids.append(entry.id)
    return list(kickoffs.values())


def _left_out(run: PlanRun, ids: Sequence[TaskId], reason: str) -> list[PlanChange]:
    """Return the changes that skip the unfinished parts of these tasks."""
    changes: list[PlanChange] = []
    for task_id in ids:
        for leaf in run.live.leaves(run.live.entry(task_id)):
            if not leaf.satisfied:
                changes.append(SkipTask(task_id=leaf.id, reason=reason))
    return changes


def _repeated(run: PlanRun, task_id: TaskId) -> list[PlanChange]:
    """Return the changes that rerun a task whose output was lost with its process."""
    changes: list[PlanChange] = []
    for leaf in run.live.leaves(run.live.entry(task_id)):
        if leaf.state is TaskState.DONE and not leaf.output.recoverable:
            changes.append(RetryTask(task_id=leaf.id))
    return changes


def _raw_text(recorded: object) -> str:
    """Return the text of a recorded output, or the joined texts of several."""
    if isinstance(recorded, str):
        return recorded
    if not isinstance(recorded, Mapping):
        return ""
    if isinstance(recorded.get("raw"), str):
        return str(recorded["raw"])
    texts = [_raw_text(each) for each in recorded.values()]
    return str(DIVIDERS.join(text for text in texts if text))


def _restored(step: _Step, recorded: object, agent: Any) -> TaskOutput:
    """Restore a recorded output, possibly of another process, without its messages."""
    task = step.task
    fields: dict[str, Any] = {}
    if isinstance(recorded, Mapping) and isinstance(recorded.get("raw"), str):
        fields = dict(recorded)
    if "pydantic" in fields and task.output_pydantic is not None:
        fields["pydantic"] = task.output_pydantic.model_validate(fields["pydantic"])
    else:
        fields.pop("pydantic", None)
    fields["raw"] = _raw_text(recorded)
    agent = agent or task.agent
    return TaskOutput(
        name=task.name or task.description,
        description=task.description,
        expected_output=task.expected_output,
        agent="" if agent is None else agent.role,
        output_format=task._get_output_format(),
        **fields,
    )
