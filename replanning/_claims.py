"""Which tasks are handed out: those that are ready, in their order, while what they take is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from replanning._entries import SKIP_AHEAD, Entry, ReadyQueue
from replanning._ids import TaskId
from replanning._plan import Task, ToolSpec
from replanning._states import TaskState
from replanning._world import Use, use_of

if TYPE_CHECKING:
    from replanning._taskgraph import TaskGraph

_READY = TaskState.READY


class Claims:
    """Hands out the ready tasks of a plan, each to one worker, with the resources that it takes.

    What lacks a tool, a resource or a fact is parked, and not looked at again before that may have changed.

    Args:
        graph: the plan.

    Attributes:
        closed: whether the plan states its facts.
        queue: the tasks that are ready; whoever makes one ready puts it in.
        count: how many are handed out and not started.
        number: of the last claim.
        parked: the ready tasks that lack something.
        underway: what the running tasks need and bring about, where the plan states facts.
        pooled: whether anything takes resources.
    """

    __slots__ = ("_graph", "closed", "count", "number", "parked", "pooled", "queue", "underway")

    def __init__(self, graph: TaskGraph) -> None:
        self._graph = graph
        self.closed = graph.plan.facts is not None
        self.queue = ReadyQueue()
        self.count = 0
        self.number = 0
        self.parked: dict[TaskId, Entry] = {}
        self.underway: dict[TaskId, Use] = {}
        self.pooled = bool(graph.plan.resources) or any(tool.resources for tool in graph.plan.tools)

    def __repr__(self) -> str:
        return f"<Claims count={self.count} parked={list(self.parked)}>"

    def demand(self, task: Task) -> Mapping[str, float]:
        """What a task takes of the resources: its own word, else its tool's."""
        tool = self._graph.tools.get(task.tool) if task.tool else None
        return {**tool.resources, **task.resources} if tool and tool.resources else task.resources

    # Handing out

    def take(self) -> Entry | None:
        """Take the next ready task for which tool and resources are there; `give_back` returns it."""
        if self.pooled:
            found = self._fitting()
        else:
            found = self.queue.pop()
            while found is not None and found.fields["tool"] is not None and self._unavailable(found):
                self.parked[found.id] = found
                found = self.queue.pop()
        if found is not None:
            self.number += 1
            found.claimed = self.number
            self.count += 1
        return found

    def _fitting(self) -> Entry | None:
        """Take the next ready task whose tool and resources are there out of the queue, and the resources."""
        pool = self._graph.pool
        passed: list[Entry] = []
        found = None
        while found is None and (entry := self.queue.pop()) is not None:
            if self._unavailable(entry):
                self.parked[entry.id] = entry
            elif pool.fits(demand := self.demand(entry.task)):
                pool.take(demand)
                entry.taken = demand
                found = entry
            else:
                passed.append(entry)
                if entry.passed >= SKIP_AHEAD or len(passed) >= SKIP_AHEAD:
                    break
        for entry in passed:
            entry.passed += found is not None
            self.queue.push(entry)
        return found

    def give_back(self, entry: Entry, claim: int) -> None:
        """Return a task that was claimed and not started; nothing happens when that claim is over."""
        if claim and entry.claimed == claim:
            self.drop(entry)
            self.queue.push(entry)

    def drop(self, entry: Entry) -> None:
        """Let a claim be over, if there is one: the task is not to be started."""
        if entry.claimed:
            entry.claimed = 0
            self.count -= 1
            self._free(entry)

    def start(self, entry: Entry, tool: ToolSpec | None) -> None:
        """Let a claim be over with the start of the task; one that was not claimed takes its resources now."""
        if self.closed and tool is not None:
            self.underway[entry.id] = use_of(entry.task, tool, self._graph)[0]
        if entry.claimed:
            entry.claimed = 0
            self.count -= 1
        elif self.pooled:
            entry.taken = self.demand(entry.task)
            self._graph.pool.take(entry.taken)

    def end(self, entry: Entry) -> None:
        """Return what a task took while it ran."""
        if entry.taken is not None:
            self._free(entry)
        if self.closed:
            self.underway.pop(entry.id, None)
            self.unpark()

    def _free(self, entry: Entry) -> None:
        if entry.taken is not None:
            self._graph.pool.give_back(entry.taken)
            entry.taken = None
            entry.passed = 0

    # What cannot be handed out

    def _unavailable(self, entry: Entry) -> bool:
        graph, name = self._graph, entry.task.tool
        tool = graph.tools.get(name) if name else None
        if tool is not None and not tool.available:
            return True
        if self.pooled and not graph.pool.possible(self.demand(entry.task)):
            return True
        return self.closed and tool is not None and not self._applicable(entry, tool)

    def _applicable(self, entry: Entry, tool: ToolSpec) -> bool:
        """Whether what a task needs holds, and neither it nor what runs takes from the other what that needs."""
        use = use_of(entry.task, tool, self._graph)[0]
        facts = self._graph.facts
        return use.needs <= facts.keys() and not any(use.disturbs(other) for other in self.underway.values())

    def unpark(self) -> None:
        """Have all that lacked a tool, a resource or a fact looked at again."""
        parked, self.parked = self.parked, {}
        for entry in parked.values():
            self.queue.push(entry)

    def reconsider(self, entry: Entry) -> None:
        """Have a task looked at anew: its place, its tool or what it takes may be another."""
        self.parked.pop(entry.id, None)
        if entry.state is _READY:
            self.queue.push(entry)

    def hold(self, entries: Sequence[Entry]) -> None:
        """Hand these out no more, until they are released."""
        for entry in entries:
            entry.held += 1

    def release(self, entries: Sequence[Entry]) -> None:
        """Hand these out again."""
        for entry in entries:
            entry.held -= 1
            if not entry.held and entry.state is _READY:
                self.queue.push(entry)
