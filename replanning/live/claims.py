"""Which tasks are handed out: those that are ready, in their order, while what they take is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from replanning.live.entries import MAX_LOOKAHEAD, ReadyQueue, TaskEntry
from replanning.live.states import TaskState
from replanning.live.world import GroundAction, ground_task
from replanning.plan.tasks import Task, ToolSpec
from replanning.plan.types import TaskId

if TYPE_CHECKING:
    from replanning.live.graph import TaskGraph


_READY = TaskState.READY


class Dispatcher:
    """Hands out the ready tasks of a plan, each to one worker, with the resources that it takes.

    What lacks a tool, a resource or a fact is parked, and not looked at again before that may have changed.

    Args:
        graph: the plan.

    Attributes:
        closed_world: whether the plan states its facts.
        queue: the tasks that are ready; whoever makes one ready puts it in.
        claimed_count: how many are handed out and not started.
        last_claim: of the last claim.
        parked: the ready tasks that lack something.
        running_actions: what the running tasks need and bring about, where the plan states facts.
        has_resources: whether anything takes resources.
    """

    __slots__ = (
        "_graph",
        "claimed_count",
        "closed_world",
        "has_resources",
        "last_claim",
        "parked",
        "queue",
        "running_actions",
    )

    def __init__(self, graph: TaskGraph) -> None:
        self._graph = graph
        self.closed_world = graph.plan.facts is not None
        self.queue = ReadyQueue()
        self.claimed_count = 0
        self.last_claim = 0
        self.parked: dict[TaskId, TaskEntry] = {}
        self.running_actions: dict[TaskId, GroundAction] = {}
        self.has_resources = bool(graph.plan.resources) or any(tool.resources for tool in graph.plan.tools)

    def __repr__(self) -> str:
        return f"<Claims count={self.claimed_count} parked={list(self.parked)}>"

    def demand(self, task: Task) -> Mapping[str, float]:
        """What a task takes of the resources: its own word, else its tool's."""
        tool = self._graph.tools.get(task.tool) if task.tool else None
        return {**tool.resources, **task.resources} if tool and tool.resources else task.resources

    # Handing out

    def claim_next(self) -> TaskEntry | None:
        """Take the next ready task for which tool and resources are there; `return_claim` returns it."""
        if self.has_resources:
            found = self._claim_fitting()
        else:
            found = self.queue.pop()
            while found is not None and found.fields["tool"] is not None and self._unavailable(found):
                self.parked[found.id] = found
                found = self.queue.pop()
        if found is not None:
            self.last_claim += 1
            found.claim = self.last_claim
            self.claimed_count += 1
        return found

    def _claim_fitting(self) -> TaskEntry | None:
        """Take the next ready task whose tool and resources are there out of the queue, and the resources."""
        pool = self._graph.pool
        passed: list[TaskEntry] = []
        found = None
        while found is None and (entry := self.queue.pop()) is not None:
            if self._unavailable(entry):
                self.parked[entry.id] = entry
            elif pool.fits_now(demand := self.demand(entry.task)):
                pool.acquire(demand)
                entry.reserved = demand
                found = entry
            else:
                passed.append(entry)
                if entry.pass_over_count >= MAX_LOOKAHEAD or len(passed) >= MAX_LOOKAHEAD:
                    break
        for entry in passed:
            entry.pass_over_count += found is not None
            self.queue.push(entry)
        return found

    def return_claim(self, entry: TaskEntry, claim: int) -> None:
        """Return a task that was claimed and not started; nothing happens when that claim is over."""
        if claim and entry.claim == claim:
            self.end_claim(entry)
            self.queue.push(entry)

    def end_claim(self, entry: TaskEntry) -> None:
        """Let a claim be over, if there is one: the task is not to be started."""
        if entry.claim:
            entry.claim = 0
            self.claimed_count -= 1
            self._return_to_pool(entry)

    def start(self, entry: TaskEntry, tool: ToolSpec | None) -> None:
        """Let a claim be over with the start of the task; one that was not claimed takes its resources now."""
        if self.closed_world and tool is not None:
            self.running_actions[entry.id] = ground_task(entry.task, tool, self._graph)[0]
        if entry.claim:
            entry.claim = 0
            self.claimed_count -= 1
        elif self.has_resources:
            entry.reserved = self.demand(entry.task)
            self._graph.pool.acquire(entry.reserved)

    def release_resources(self, entry: TaskEntry) -> None:
        """Return what a task took while it ran."""
        if entry.reserved is not None:
            self._return_to_pool(entry)
        if self.closed_world:
            self.running_actions.pop(entry.id, None)
            self.unpark()

    def _return_to_pool(self, entry: TaskEntry) -> None:
        if entry.reserved is not None:
            self._graph.pool.release(entry.reserved)
            entry.reserved = None
            entry.pass_over_count = 0

    # What cannot be handed out

    def _unavailable(self, entry: TaskEntry) -> bool:
        graph, name = self._graph, entry.task.tool
        tool = graph.tools.get(name) if name else None
        if tool is not None and not tool.available:
            return True
        if self.has_resources and not graph.pool.can_ever_fit(self.demand(entry.task)):
            return True
        return self.closed_world and tool is not None and not self._applicable(entry, tool)

    def _applicable(self, entry: TaskEntry, tool: ToolSpec) -> bool:
        """Whether what a task needs holds, and neither it nor what runs takes from the other what that needs."""
        use = ground_task(entry.task, tool, self._graph)[0]
        facts = self._graph.facts
        return use.requires <= facts.keys() and not any(
            use.interferes_with(other) for other in self.running_actions.values()
        )

    def unpark(self) -> None:
        """Have all that lacked a tool, a resource or a fact looked at again."""
        parked, self.parked = self.parked, {}
        for entry in parked.values():
            self.queue.push(entry)

    def requeue(self, entry: TaskEntry) -> None:
        """Have a task looked at anew: its place, its tool or what it takes may be another."""
        self.parked.pop(entry.id, None)
        if entry.state is _READY:
            self.queue.push(entry)

    def hold(self, entries: Sequence[TaskEntry]) -> None:
        """Hand these out no more, until they are released."""
        for entry in entries:
            entry.hold_count += 1

    def release(self, entries: Sequence[TaskEntry]) -> None:
        """Hand these out again."""
        for entry in entries:
            entry.hold_count -= 1
            if not entry.hold_count and entry.state is _READY:
                self.queue.push(entry)
