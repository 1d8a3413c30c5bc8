"""Runtime state of one task, and the parts of a live plan: resource pool, ready queue, deadlines."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import TypedDict

from replanning.journal.records import Failure
from replanning.live.states import SATISFIED, TaskState
from replanning.plan.tasks import Task, ToolSpec
from replanning.plan.types import AttemptId, JsonObject, JsonValue, TaskId

_READY = TaskState.READY

_BACKING_OFF = (TaskState.BACKOFF, TaskState.NEEDS_CONTINUATION, TaskState.PENDING)

MAX_LOOKAHEAD = 16
"""Limit of ready tasks passed over in one claim, and of how often one task is passed over."""

_CAPACITY_EPSILON = 1e-9
"""Tolerance for sums of fractions: three tenths fit into 0.3."""

_MIN_COMPACTION_SIZE = 256
"""Number of deadlines below which outdated ones are not removed."""

CONDITION_NOT_MET = -1
"""Value of `TaskEntry.condition_revision` of a task that was skipped because its condition did not hold."""


class TaskFields(TypedDict):
    """Fields of a task that are read on every transition."""

    id: TaskId
    tool: str | None
    arguments: JsonObject
    depends_on: tuple[TaskId, ...]
    priority: int
    timeout: float | None
    optional: bool
    when: str | None


@dataclass(slots=True, eq=False, repr=False)
class TaskEntry:
    """Runtime state of one task. Only the live plan updates its links to other entries.

    Attributes:
        fields: the fields of the task; reading them here is many times faster than through the model.
        order: position in the plan; ties of priority are broken by it.
        root: the first task of the lineage, whose id finds the results.
        iteration: number of replacements between the root and this task.
        dependents: the tasks that name this one in their `depends_on`.
        sinks: the tasks that replaced this one and that its dependents wait for.
        sink_of: the replaced task whose dependents wait for this one.
        attempts_in_round: attempts since the last trigger or retry by a change.
        not_before: earliest start in seconds since the epoch.
        condition_revision: revision at which the condition held, or `CONDITION_NOT_MET`.
        claim: number of the claim by which a worker holds the task; 0 without one.
        hold_count: number of questions and triggers that keep the task from being handed out.
        pass_over_count: how often later tasks were handed out before this one for want of resources.
        effects: the facts that the running attempt adds and removes when it succeeds.
        withdrawn: whether it was removed for good because the task it replaced runs again.
        reserved: the resources that it holds.
    """

    task: Task
    order: int
    parent: TaskEntry | None
    fields: TaskFields
    id: TaskId
    priority: int
    root: TaskId
    iteration: int
    state: TaskState = TaskState.PENDING
    unsatisfied_dependencies: int = 0
    dependents: list[TaskEntry] | tuple[()] = ()
    sink_of: TaskEntry | None = None
    sinks: tuple[TaskEntry, ...] = ()
    replaced_by: tuple[TaskId, ...] = ()
    unsatisfied_sinks: int = 0
    attempts: int = 0
    attempts_in_round: int = 0
    failures: int = 0
    continuations: int = 0
    feedback: str = ""
    attempt: AttemptId | None = None
    started_at: float = 0.0
    duration: float = 0.0
    deadline: float | None = None
    not_before: float | None = None
    output: JsonValue = None
    recoverable: bool = True
    failure: Failure | None = None
    reason: str = ""
    condition_revision: int | None = None
    claim: int = 0
    hold_count: int = 0
    pass_over_count: int = 0
    effects: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    removed: bool = False
    withdrawn: bool = False
    counts_as_unsatisfied: bool = False
    reserved: Mapping[str, float] | None = None

    def __repr__(self) -> str:
        return f"<TaskEntry {self.id!r} {self.state} attempts={self.attempts} missing={self.unsatisfied_dependencies}>"

    def set_task(self, task: Task) -> None:
        """Replace the document of the task by a changed one of the same id."""
        self.task = task
        self.fields = task.__dict__  # type: ignore[assignment]
        self.priority = task.priority

    @property
    def satisfied(self) -> bool:
        """True if the dependents of this task may run."""
        return self.state in SATISFIED or (self.state is TaskState.REPLACED_BY_REPLAN and not self.unsatisfied_sinks)

    def dependent_ids(self) -> tuple[TaskId, ...]:
        """Return the tasks that wait for this one, including those that wait for a task it replaced."""
        ids: dict[TaskId, None] = {}
        entry: TaskEntry | None = self
        while entry is not None:
            ids.update(dict.fromkeys(waiting.id for waiting in entry.dependents if not waiting.removed))
            entry = entry.sink_of
        return tuple(ids)

    def started_dependents(self) -> list[TaskId]:
        """Return the tasks that run or are done and could not have started if this one were not satisfied."""
        started: list[TaskId] = []
        entry = self
        while True:
            started += [w.id for w in entry.dependents if w.state in (TaskState.RUNNING, TaskState.DONE)]
            if entry.sink_of is None or entry.sink_of.unsatisfied_sinks:
                return started
            entry = entry.sink_of


class ResourcePool:
    """Named capacities; a task takes all that it needs or nothing.

    Args:
        capacities: the amount of each resource.
        tools: the tools by name, whose own needs count for the tasks that use them.

    Attributes:
        limited: whether anything takes resources at all; set once a capacity is reported.
    """

    def __init__(self, capacities: Mapping[str, float], tools: Mapping[str, ToolSpec] = MappingProxyType({})) -> None:
        self.capacity = dict(capacities)
        self.used = dict.fromkeys(capacities, 0.0)
        self.limited = bool(capacities) or any(tool.resources for tool in tools.values())
        self._tools = tools

    def demand(self, task: Task) -> Mapping[str, float]:
        """Return the resources that a task takes: those of its tool, overridden by its own."""
        tool = self._tools.get(task.tool) if task.tool else None
        return {**tool.resources, **task.resources} if tool and tool.resources else task.resources

    def can_ever_fit(self, demand: Mapping[str, float]) -> bool:
        """Return whether the capacities would meet the demand if nothing were in use."""
        return all(amount <= self.capacity.get(name, 0.0) for name, amount in demand.items())

    def fits_now(self, demand: Mapping[str, float]) -> bool:
        """Return whether the free resources meet the demand."""
        used, capacity = self.used, self.capacity
        return all(
            used.get(name, 0.0) + amount <= capacity.get(name, 0.0) + _CAPACITY_EPSILON
            for name, amount in demand.items()
        )

    def acquire(self, demand: Mapping[str, float]) -> None:
        """Mark the demand as used."""
        for name, amount in demand.items():
            self.used[name] = self.used.get(name, 0.0) + amount

    def release(self, demand: Mapping[str, float]) -> None:
        """Mark the demand as free again; rounding errors never leave anything in use."""
        for name, amount in demand.items():
            left = self.used[name] - amount
            self.used[name] = left if left > _CAPACITY_EPSILON else 0.0


class ReadyQueue:
    """Ready entries by (priority, order). Outdated items are dropped when they reach the front.

    Most entries arrive in the order in which they leave; only the others go through a heap.
    """

    def __init__(self) -> None:
        self._fifo: deque[tuple[int, int, TaskId, TaskEntry]] = deque()
        self._heap: list[tuple[int, int, TaskId, TaskEntry]] = []

    def __iter__(self) -> Iterator[tuple[int, int, TaskId, TaskEntry]]:
        return chain(self._fifo, self._heap)

    def push(self, entry: TaskEntry) -> None:
        """Add an entry."""
        # The id breaks the tie with an entry that had this place before a reordering.
        item = (entry.priority, entry.order, entry.id, entry)
        fifo = self._fifo
        if not fifo or fifo[-1] < item:
            fifo.append(item)
        else:
            heapq.heappush(self._heap, item)

    def pop(self) -> TaskEntry | None:
        """Remove and return the first entry; None if there is none."""
        fifo, heap = self._fifo, self._heap
        while fifo or heap:
            first = fifo.popleft() if fifo and not (heap and heap[0] < fifo[0]) else heapq.heappop(heap)
            priority, order, _, entry = first
            if (
                entry.state is _READY
                and not entry.claim
                and not entry.hold_count
                and priority == entry.priority
                and order == entry.order
            ):
                return entry
        return None


class Deadlines:
    """Times at which an attempt is overdue or a backoff ends, in seconds since the epoch."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, TaskEntry, AttemptId | None]] = []
        self._sequence = 0
        self._compact_at = _MIN_COMPACTION_SIZE

    def add(self, when: float, entry: TaskEntry, attempt: AttemptId | None) -> None:
        """Add the deadline of an attempt, or the end of a backoff if `attempt` is None."""
        heap = self._heap
        if len(heap) >= self._compact_at:
            # Most attempts end long before their deadlines, which would pile up.
            heap[:] = [item for item in heap if self._is_current(item[0], item[2], item[3])]
            heapq.heapify(heap)
            self._compact_at = max(_MIN_COMPACTION_SIZE, 2 * len(heap))
        self._sequence += 1
        heapq.heappush(heap, (when, self._sequence, entry, attempt))

    def next_due(self) -> float | None:
        """Return the earliest time that is still current; None if there is none."""
        heap = self._heap
        while heap:
            when, _, entry, attempt = heap[0]
            if self._is_current(when, entry, attempt):
                return when
            heapq.heappop(heap)
        return None

    def pop_due(self, now: float) -> Iterator[tuple[TaskEntry, AttemptId | None]]:
        """Remove and yield the entries that are due, earliest first."""
        while (when := self.next_due()) is not None and when <= now:
            _, _, entry, attempt = heapq.heappop(self._heap)
            yield entry, attempt

    @staticmethod
    def _is_current(when: float, entry: TaskEntry, attempt: AttemptId | None) -> bool:
        if attempt is not None:
            return entry.attempt == attempt and entry.deadline == when
        return entry.not_before == when and entry.state in _BACKING_OFF
