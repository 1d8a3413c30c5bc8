"""swarms: `workflow = replanned(SequentialWorkflow(agents=[…]), capabilities={"writer": "x"})`.

Tested with swarms 16.0.3. See docs/integrations/swarms.md for failing agents and limitations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from replanning.engine.engine import ReplanningEngine
from replanning.engine.session import Execute
from replanning.errors import CallSkipped, NeedsHuman, NotRunning, StoreError
from replanning.integrations.agent_plans import (
    EARLIER,
    TASK,
    AgentStep,
    AgentSteps,
    agent_plan,
    agent_session,
    step_ids,
)
from replanning.integrations.kit import Capabilities, missing_framework
from replanning.integrations.session_thread import SessionThread
from replanning.plan.document import Plan
from replanning.plan.types import TaskId

try:
    from swarms.structs.concurrent_workflow import ConcurrentWorkflow
    from swarms.structs.context_utils import agent_answer
    from swarms.structs.conversation import Conversation
    from swarms.structs.graph_workflow import GraphWorkflow
    from swarms.structs.sequential_workflow import SequentialWorkflow
    from swarms.utils.history_output_formatter import history_output_formatter
except ImportError as error:
    raise missing_framework(__name__, "swarms (tested with 16.0.3)", error) from error

WorkflowT = TypeVar("WorkflowT")

_Ask = Callable[[Sequence[Any], Mapping[str, Any]], Any]
"""Runs the agent of a step, given the arguments of `run`."""

_SKIPPED: Final = "(skipped)"
"""Output of a skipped agent, recognised by its identity; it never reaches the conversation."""


def replanned(
    workflow: WorkflowT,
    engine: ReplanningEngine | None = None,
    *,
    capabilities: Capabilities | None = None,
    agents: Sequence[Any] = (),
    thread: str | None = None,
    approvals: bool = True,
) -> WorkflowT:
    """Return a copy of a workflow that replaces or skips agents that fail, or asks a person.

    Each run executes a plan with one task for each agent, including those that have not begun.

    Args:
        workflow: a `SequentialWorkflow`, `ConcurrentWorkflow` or `GraphWorkflow`; it is not
            changed.
        engine: the engine; by default one with its defaults.
        capabilities: by the name of an agent, or of the node of a graph, its capability, or the
            fields that `replanning.tool` takes. Agents of the same capability can stand in for one
            another.
        agents: further agents that can stand in.
        thread: an id for the work; its last run is resumed unless it has ended, and agents that
            have finished are not run again.
        approvals: whether a question to a person goes to the gate of the engine or, with a
            `thread`, is raised as `NeedsHuman`. Otherwise the workflow sees the exception of the
            agent.

    Raises:
        TypeError: this is another kind of workflow.
        ValueError: capabilities name agents that do not exist, a field is not valid for an agent,
            or a further agent has the name of one in the workflow.
    """
    attachment = _Attachment(
        engine=ReplanningEngine() if engine is None else engine,
        capabilities=capabilities,
        stand_ins={agent.agent_name: agent for agent in agents},
        thread=thread,
        approvals=approvals,
    )
    made: Any
    if isinstance(workflow, SequentialWorkflow):
        made = copy(workflow)
        made.agent_rearrange = _attached(workflow.agent_rearrange, _Sequence, attachment)
    elif isinstance(workflow, ConcurrentWorkflow):
        made = _attached(workflow, _Concurrent, attachment)
    elif isinstance(workflow, GraphWorkflow):
        made = _attached(workflow, _Graph, attachment)
    else:
        raise TypeError(
            "expected a SequentialWorkflow, a ConcurrentWorkflow or a GraphWorkflow, got "
            f"{type(workflow).__name__}"
        )
    attached: WorkflowT = made
    return attached


def _attached(workflow: Any, behaviour: type, attachment: _Attachment) -> Any:
    """Return a copy of a workflow, in a subclass of its own class that has the behaviour."""
    kind = type(workflow)
    made = copy(workflow)
    made.__class__ = type(kind.__name__, (behaviour, kind), {"__module__": kind.__module__})
    made._replanning = attachment
    own = made._agents_by_name()
    for name, agent in attachment.stand_ins.items():
        if own.get(name, agent) is not agent:
            raise ValueError(f"agents: the workflow has another agent called {name!r}")
    attachment.plan("", [], own)  # reports wrong capabilities at once
    return made


@dataclass(frozen=True)
class _Attachment:
    """Settings of an attached workflow, which open its runs.

    Attributes:
        engine: the engine.
        capabilities: the capabilities of agents by name.
        stand_ins: agents outside the workflow by name.
        thread: the id of the work, if runs are resumed.
        approvals: whether a person is asked.
    """

    engine: ReplanningEngine
    capabilities: Capabilities | None
    stand_ins: Mapping[str, Any]
    thread: str | None
    approvals: bool

    def plan(
        self,
        objective: str,
        steps: Sequence[AgentStep],
        agents: Mapping[str, Any],
        *,
        always: bool = False,
    ) -> Plan:
        """Return the plan of a run."""
        everyone = {**agents, **self.stand_ins}
        described = {
            name: getattr(agent, "agent_description", None) for name, agent in everyone.items()
        }
        return agent_plan(objective, steps, described, self.capabilities, always=always)

    @contextmanager
    def run(
        self,
        objective: object,
        steps: Sequence[AgentStep],
        agents: Mapping[str, Any],
        *,
        always: bool = False,
    ) -> Iterator[_Run]:
        """Open the run of a workflow, see `AgentSteps`."""
        plan = self.plan(str(objective), steps, agents, always=always)
        opened = agent_session(self.engine, plan, thread=self.thread, approvals=self.approvals)
        asks = self.approvals and self.thread is not None
        try:
            with SessionThread.open(opened) as thread:
                performed = AgentSteps(self.engine, thread.session, asks=asks)
                yield _Run(thread, performed, {**self.stand_ins, **agents})
        except _Stopped as stopped:
            raise stopped.error from stopped.error.__cause__


class _Run:
    """One run of a workflow, whose agents run in the threads of the workflow."""

    def __init__(self, thread: SessionThread, steps: AgentSteps, agents: Mapping[str, Any]) -> None:
        self._thread = thread
        self._steps = steps
        self._agents = agents

    def next_step(self, performed: Collection[str]) -> tuple[TaskId, str] | None:
        """Return the next step and the name of its agent, see `AgentSteps.next_step`."""

        async def find(_: Execute) -> tuple[TaskId, str] | None:
            step = self._steps.next_step(performed)
            if step is None:
                return None
            return step, self._thread.session.run.live.entry(step).task.tool or step

        return self._thread.call(find)

    def member(
        self, step: str, agent: Any, known: Collection[str], *, transcript: bool = False
    ) -> _Member:
        """Return a proxy that runs the agent of a step, or what replaces it.

        Args:
            step: the id of the step.
            agent: its agent.
            known: as `AgentSteps.perform` takes it.
            transcript: whether the output is all that `run` returns, instead of the answer in it.
        """

        def ask(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            def execute(name: str, arguments: Mapping[str, Any]) -> object:
                asked = self._agents[name]
                values, options = _with_arguments(args, kwargs, arguments)
                output = asked.run(*values, **options)
                if transcript:
                    return output
                return agent_answer(asked, fallback=output)

            return self._thread.call(
                lambda hand_over: self._steps.perform(step, hand_over, known=known), execute
            )

        return _Member(agent, ask)


def _with_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of an agent: those of the framework, updated from the plan."""
    options = dict(kwargs)
    if task := arguments.get(TASK):
        if args:
            args = (task, *args[1:])
        else:
            options["task"] = task
    if earlier := arguments.get(EARLIER):
        turns = [{"role": "user", "content": f"{name}: {output}"} for name, output in earlier]
        options["messages"] = [*(options.get("messages") or ()), *turns]
    return args, options


class _Member:
    """Proxy of an agent, whose `run` performs a step.

    It has no memory, so that the framework takes the answer from what `run` returns.
    """

    short_memory: Final = None

    def __init__(self, agent: Any, ask: _Ask) -> None:
        self._agent = agent
        self._ask = ask

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the agent, or what replaces it."""
        return self._ask(args, kwargs)


class _Sequence:
    """Sequential workflow that follows its plan, step by step in the caller's thread."""

    _replanning: _Attachment

    def _agents_by_name(self: Any) -> dict[str, Any]:
        agents: dict[str, Any] = {}
        for agent in self.agents:
            agents.setdefault(agent.agent_name, agent)  # the framework runs the first one, too
        return agents

    def _run(self: Any, task: Any = None, img: Any = None, *args: Any, **kwargs: Any) -> Any:
        self._reset_conversation()
        self.conversation.add("User", task)
        agents = self._agents_by_name()
        flow = [name for names in self.steps for name in names]
        ids = step_ids(flow * self.max_loops)
        steps: list[AgentStep] = []
        places: dict[str, tuple[str, int]] = {}
        for number, step_id in enumerate(ids):
            position = number % len(flow)
            steps.append(AgentStep(step_id, flow[position], tuple(ids[number - 1 : number])))
            places[step_id] = (flow[position], position)
        with self._replanning.run(task, steps, agents) as run:
            performed: list[str] = []
            while (following := run.next_step(performed)) is not None:
                step_id, name = following
                place: int | None = None
                flow_of_step: list[list[str]] = []
                if step_id in places:
                    # A step of the framework keeps its name, even with a stand-in: others look it
                    # up.
                    name, place = places[step_id]
                    flow_of_step = self.steps
                agent = agents.get(name) or self._replanning.stand_ins[name]
                single = copy(self)
                single.agents = [run.member(step_id, agent, performed)]
                with suppress(CallSkipped):
                    single._run_sequential_workflow(name, flow_of_step, place, img, *args, **kwargs)
                performed.append(step_id)
        return history_output_formatter(conversation=self.conversation, type=self.output_type)


class _Conversation(Conversation):  # type: ignore[misc] # its types may not be installed
    """Conversation without entries of agents that were skipped."""

    def add(self, role: Any, content: Any, *args: Any, **kwargs: Any) -> Any:
        """Add an entry."""
        if content is _SKIPPED:
            return None
        return super().add(role, content, *args, **kwargs)


class _Stopped(BaseException):
    """Ends a run that cannot continue.

    Not an Exception, because the framework would take it for the failure of an agent.

    Attributes:
        error: the reason.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error
        super().__init__(str(error))


class _Parallel:
    """Workflow whose agents perform the steps of its plan in the framework's own threads."""

    _replanning: _Attachment

    def _members(
        self, run: _Run, steps: Mapping[str, Any], *, skipped: Any, transcript: bool = False
    ) -> dict[str, _Member]:
        """Return the agents that the framework runs, by the ids of their steps.

        Args:
            run: the run.
            steps: by the id of a step, its agent.
            skipped: the output for a skipped agent.
            transcript: as `_Run.member` takes it.
        """

        def guarded(member: _Member) -> _Member:
            def ask(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
                try:
                    return member.run(*args, **kwargs)
                except CallSkipped:
                    return skipped
                except (NeedsHuman, NotRunning, StoreError) as error:
                    raise _Stopped(error) from None

            return _Member(member, ask)

        members = {}
        for step_id, agent in steps.items():
            members[step_id] = guarded(run.member(step_id, agent, steps, transcript=transcript))
        return members


class _Concurrent(_Parallel):
    """Concurrent workflow that follows its plan."""

    def _agents_by_name(self: Any) -> dict[str, Any]:
        return dict(
            zip(step_ids([agent.agent_name for agent in self.agents]), self.agents, strict=True)
        )

    def run(self: Any, task: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the workflow."""
        agents = self._agents_by_name()
        steps = [AgentStep(name, name) for name in agents]
        inner = copy(self)
        inner.workspace = copy(self.workspace)
        inner.workspace.owner = inner
        try:
            with self._replanning.run(task, steps, agents) as run:
                inner.agents = list(self._members(run, agents, skipped=_SKIPPED).values())
                return super(_Concurrent, inner).run(task, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.conversation = inner.conversation

    def _new_conversation(self) -> Any:
        made = super()._new_conversation()  # type: ignore[misc]
        made.__class__ = _Conversation
        return made


class _Graph(_Parallel):
    """Graph workflow that follows its plan, layer by layer."""

    def _agents_by_name(self: Any) -> dict[str, Any]:
        return {node_id: node.agent for node_id, node in self.nodes.items()}

    def run(self: Any, task: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Run the workflow."""
        if task is not None:
            self.task = task
        if not self._compiled:
            self.compile()
        inner = copy(self)
        if self._replanning.thread is not None:
            # The journal has the finished steps. Checkpoints would leave them out of the plan.
            inner.checkpoint_dir = None
        steps, ids_by_node = inner._steps()
        agents = {step.id: self.nodes[step.agent].agent for step in steps}
        # The framework continues after an agent that failed: the error is its output.
        with self._replanning.run(self.task, steps, self._agents_by_name(), always=True) as run:
            members = self._members(run, agents, skipped=None, transcript=True)
            layers = []
            for layer in self._execution_plan:
                entries = []
                for node, agent, *rest in layer:
                    if node in ids_by_node:
                        loops = [members[step_id] for step_id in ids_by_node[node]]
                        agent = _in_turn(agent, loops)  # noqa: PLW2901
                    entries.append((node, agent, *rest))
                layers.append(entries)
            inner._execution_plan = layers
            return super(_Graph, inner).run(task, *args, **kwargs)  # type: ignore[misc]

    def _steps(self: Any) -> tuple[list[AgentStep], dict[str, list[str]]]:
        """Return the steps of all loops, and by node the ids of its steps."""
        layers = self._execution_plan
        loops = self.max_loops
        if self.checkpoint_dir:
            # The framework takes the outputs of a layer from its checkpoint, also in the next loop.
            key = self._task_key(self.task)
            layers = [
                layer
                for number, layer in enumerate(layers)
                if not self._checkpoint_path(key, number).exists()
            ]
            loops = 1
        nodes = [entry[0] for layer in layers for entry in layer]
        ids_by_node: dict[str, list[str]] = {}
        steps = []
        ids = iter(step_ids(nodes * loops))
        for loop in range(loops):
            ends = [ids_by_node[node][-1] for node in self.end_points if node in ids_by_node]
            for node in nodes:
                before = []
                for each in self._get_predecessors(node):
                    if each in ids_by_node:
                        before.append(ids_by_node[each][-1])
                if loop and not before:
                    before = ends
                step_id = next(ids)
                ids_by_node.setdefault(node, []).append(step_id)
                steps.append(AgentStep(step_id, node, tuple(before)))
        return steps, ids_by_node


def _in_turn(agent: Any, loops: Sequence[_Member]) -> _Member:
    """Return a proxy that runs the next member on each call: one for each loop of a workflow."""
    following = iter(loops)
    return _Member(agent, lambda args, kwargs: next(following).run(*args, **kwargs))
