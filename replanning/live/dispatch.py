"""Dispatch of ready tasks to workers, in order, as their tools, resources and facts allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from replanning.live.entries import MAX_LOOKAHEAD, ReadyQueue, ResourcePool, TaskEntry
from replanning.live.index import DependencyIndex
from replanning.live.states import TaskState
from replanning.live.strips import GroundAction
from replanning.plan.tasks import ToolSpec
from replanning.plan.types import TaskId

_READY = TaskState.READY


class Dispatcher:
    """Hands each ready task to one worker, with the resources that it takes.

    A task that lacks a tool, a resource or a fact is parked and not considered again before that may have changed.

    Args:
        tools: the tools by name.
        pool: the resources.
        facts: the facts that hold now.
        index: grounds the actions of tasks.
        closed_world: whether the plan states its facts.

    Attributes:
        queue: the ready tasks.
        claimed_count: number of tasks that are handed out and not started.
        last_claim: number of the last claim.
        parked: the ready tasks that lack something.
        running_actions: the actions of the running tasks, if the plan states facts.
    """

    __slots__ = (
        "_facts",
        "_index",
        "_pool",
        "_tools",
        "claimed_count",
        "closed_world",
        "last_claim",
        "parked",
        "queue",
        "running_actions",
    )

    def __init__(
        self,
        tools: Mapping[str, ToolSpec],
        pool: ResourcePool,
        facts: Mapping[str, None],
        index: DependencyIndex,
        *,
        closed_world: bool,
    ) -> None:
        self.closed_world = closed_world
        self.queue = ReadyQueue()
        self.claimed_count = 0
        self.last_claim = 0
        self.parked: dict[TaskId, TaskEntry] = {}
        self.running_actions: dict[TaskId, GroundAction] = {}
        self._tools = tools
        self._pool = pool
        self._facts: AbstractSet[str] = facts.keys()
        self._index = index

    def __repr__(self) -> str:
        return f"<Dispatcher claimed={self.claimed_count} parked={list(self.parked)}>"

    def claim_next(self) -> TaskEntry | None:
        """Claim the next ready task whose tool, resources and facts are there; `return_claim` returns it."""
        pool, queue = self._pool, self.queue
        passed_over: list[TaskEntry] = []
        while (entry := queue.pop()) is not None:
            if entry.fields["tool"] is None and not pool.limited:
                break
            if self._lacks_something(entry):
                self.parked[entry.id] = entry
                continue
            if not pool.limited:
                break
            demand = pool.demand(entry.task)
            if pool.fits_now(demand):
                pool.acquire(demand)
                entry.reserved = demand
                break
            passed_over.append(entry)
            if entry.pass_over_count >= MAX_LOOKAHEAD or len(passed_over) >= MAX_LOOKAHEAD:
                entry = None
                break
        for other in passed_over:
            other.pass_over_count += entry is not None
            queue.push(other)
        if entry is not None:
            self.last_claim += 1
            entry.claim = self.last_claim
            self.claimed_count += 1
        return entry

    def _lacks_something(self, entry: TaskEntry) -> bool:
        """Return whether a task cannot be started before a tool, a capacity or a fact changes or an action ends."""
        name = entry.task.tool
        tool = self._tools.get(name) if name else None
        if tool is not None and not tool.available:
            return True
        if self._pool.limited and not self._pool.can_ever_fit(self._pool.demand(entry.task)):
            return True
        if not self.closed_world or tool is None:
            return False
        action, _ = self._index.ground(entry.task)
        return not action.requires <= self._facts or any(map(action.interferes_with, self.running_actions.values()))

    def return_claim(self, entry: TaskEntry, claim: int) -> None:
        """Return a task that was claimed and not started; does nothing if that claim is over."""
        if claim and entry.claim == claim:
            self.end_claim(entry)
            self.queue.push(entry)

    def end_claim(self, entry: TaskEntry) -> None:
        """End the claim of a task that is not going to be started, if it has one."""
        if entry.claim:
            entry.claim = 0
            self.claimed_count -= 1
            if entry.reserved is not None:
                self._pool.release(entry.reserved)
                entry.reserved, entry.pass_over_count = None, 0

    def start(self, entry: TaskEntry) -> None:
        """End the claim of a task that starts; one that was not claimed takes its resources now."""
        if self.closed_world and entry.task.tool in self._tools:
            self.running_actions[entry.id] = self._index.ground(entry.task)[0]
        if entry.claim:
            entry.claim = 0
            self.claimed_count -= 1
        elif self._pool.limited:
            entry.reserved = self._pool.demand(entry.task)
            self._pool.acquire(entry.reserved)

    def release_resources(self, entry: TaskEntry) -> None:
        """Return the resources of a task that has stopped running."""
        if entry.reserved is not None:
            self._pool.release(entry.reserved)
            entry.reserved, entry.pass_over_count = None, 0
        if self.closed_world:
            self.running_actions.pop(entry.id, None)
            self.unpark()

    def unpark(self) -> None:
        """Return all parked tasks to the queue."""
        parked, self.parked = self.parked, {}
        for entry in parked.values():
            self.queue.push(entry)

    def requeue(self, entry: TaskEntry) -> None:
        """Queue a task anew after its position, tool or resources have changed."""
        self.parked.pop(entry.id, None)
        if entry.state is _READY:
            self.queue.push(entry)

    def hold(self, entries: Sequence[TaskEntry]) -> None:
        """Keep tasks from being handed out until they are released."""
        for entry in entries:
            entry.hold_count += 1

    def release(self, entries: Sequence[TaskEntry]) -> None:
        """Release tasks that were held."""
        for entry in entries:
            entry.hold_count -= 1
            if not entry.hold_count and entry.state is _READY:
                self.queue.push(entry)
