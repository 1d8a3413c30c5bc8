"""The running state of one task, and the small parts a live plan is made of."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TypedDict

from replanning.journal.observations import Failure
from replanning.live.states import SATISFIED, TaskState
from replanning.plan.tasks import Task
from replanning.plan.types import AttemptId, JsonObject, JsonValue, TaskId

_READY = TaskState.READY

_BACKING_OFF = (TaskState.BACKOFF, TaskState.NEEDS_CONTINUATION, TaskState.PENDING)

MAX_LOOKAHEAD = 16
"""How many ready tasks may be passed over in one claim, and how often one task may be passed over."""

_CAPACITY_EPSILON = 1e-9
"""What adding and subtracting fractions may leave over: three tenths fit into 0.3."""

_MIN_COMPACTION_SIZE = 256
"""How many points in time are kept at least before those that count no more are looked for."""

CONDITION_NOT_MET = -1
"""Stands for the revision at which a condition held, where it did not hold."""


class _TaskFields(TypedDict):
    """Those fields of a task that are looked at whenever it moves."""

    id: TaskId
    tool: str | None
    arguments: JsonObject
    depends_on: tuple[TaskId, ...]
    priority: int
    timeout: float | None
    optional: bool
    when: str | None


class TaskEntry:
    """One task as it runs. Its links to other entries are kept in step by the live plan alone.

    Attributes:
        fields: those of the task, which are found there many times faster than as attributes of a model.
    """

    __slots__ = (
        "attempt",
        "attempts",
        "attempts_in_round",
        "claim",
        "condition_revision",
        "continuations",
        "counts_as_unsatisfied",
        "deadline",
        "dependents",
        "duration",
        "effects",
        "failure",
        "failures",
        "feedback",
        "fields",
        "hold_count",
        "id",
        "not_before",
        "order",
        "output",
        "parent",
        "pass_over_count",
        "priority",
        "reason",
        "recoverable",
        "removed",
        "replaced_by",
        "reserved",
        "root",
        "sink_of",
        "started_at",
        "state",
        "task",
        "unsatisfied_dependencies",
        "unsatisfied_sinks",
        "withdrawn",
    )

    def __init__(self, task: Task, order: int, parent: TaskEntry | None) -> None:
        self.fields = fields = _field_dict(task)
        self.id: TaskId = fields["id"]
        self.task = task
        self.state = TaskState.PENDING
        self.order = order
        self.priority = fields["priority"]
        self.parent = parent
        self.root: TaskId = self.id if parent is None else parent.root
        self.unsatisfied_dependencies = 0
        self.dependents: list[TaskEntry] | tuple[()] = ()
        self.sink_of: TaskEntry | None = None
        self.replaced_by: tuple[TaskId, ...] = ()
        self.unsatisfied_sinks = 0
        self.attempts = 0
        self.attempts_in_round = 0
        self.failures = 0
        self.continuations = 0
        self.feedback = ""
        self.attempt: AttemptId | None = None
        self.started_at = 0.0
        self.duration = 0.0
        self.deadline: float | None = None
        self.not_before: float | None = None
        self.output: JsonValue = None
        self.recoverable = True
        self.failure: Failure | None = None
        self.reason = ""
        self.condition_revision: int | None = None
        self.claim = 0
        self.hold_count = 0
        self.pass_over_count = 0
        self.effects: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        self.removed = False
        self.withdrawn = False
        self.counts_as_unsatisfied = False
        self.reserved: Mapping[str, float] | None = None

    def __repr__(self) -> str:
        return f"<Entry {self.id!r} {self.state} attempts={self.attempts} missing={self.unsatisfied_dependencies}>"

    def set_task(self, task: Task) -> None:
        """Stand for a changed task of the same id."""
        self.task = task
        self.fields = _field_dict(task)
        self.priority = task.priority

    @property
    def satisfied(self) -> bool:
        """Whether what depends on this task may run."""
        return self.state in SATISFIED or (self.state is TaskState.REPLACED_BY_REPLAN and not self.unsatisfied_sinks)

    def dependent_ids(self) -> tuple[TaskId, ...]:
        """The tasks that wait for this one, also those that wait for what it replaced."""
        found: dict[TaskId, None] = {}
        entry: TaskEntry | None = self
        while entry is not None:
            found.update(dict.fromkeys(waiting.id for waiting in entry.dependents if not waiting.removed))
            entry = entry.sink_of
        return tuple(found)

    def started_dependents(self) -> list[TaskId]:
        """The tasks that run or are done and would not have started, were this one not satisfied."""
        found: list[TaskId] = []
        entry = self
        while True:
            found += [w.id for w in entry.dependents if w.state in (TaskState.RUNNING, TaskState.DONE)]
            if entry.sink_of is None or entry.sink_of.unsatisfied_sinks:
                return found
            entry = entry.sink_of

    @property
    def iteration(self) -> int:
        """How many replacements lie between this task and the root of its lineage."""
        count, entry = 0, self
        while entry.parent is not None:
            count, entry = count + 1, entry.parent
        return count


def _field_dict(task: Task) -> _TaskFields:
    return task.__dict__  # type: ignore[return-value]  # pydantic keeps them there, defaults as well


class ResourcePool:
    """Named capacities, taken all or none."""

    def __init__(self, capacities: Mapping[str, float]) -> None:
        self.capacity = dict(capacities)
        self.used = dict.fromkeys(capacities, 0.0)

    def can_ever_fit(self, demand: Mapping[str, float]) -> bool:
        """Whether the demand could ever be met."""
        return all(amount <= self.capacity.get(name, 0.0) for name, amount in demand.items())

    def fits_now(self, demand: Mapping[str, float]) -> bool:
        """Whether the demand can be met now."""
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
        """Mark the demand as free again; nothing in use is exactly 0, whatever floats add up to."""
        for name, amount in demand.items():
            left = self.used[name] - amount
            self.used[name] = left if left > _CAPACITY_EPSILON else 0.0


class ReadyQueue:
    """Ready entries by (priority, insertion). Items that are no longer right are dropped when they come up.

    Most come in the order in which they go out; a heap, which compares each with many others, has only the rest.
    """

    def __init__(self) -> None:
        self._fifo: deque[tuple[int, int, TaskId, TaskEntry]] = deque()
        self._heap: list[tuple[int, int, TaskId, TaskEntry]] = []

    def __iter__(self) -> Iterator[tuple[int, int, TaskId, TaskEntry]]:
        return chain(self._fifo, self._heap)

    def push(self, entry: TaskEntry) -> None:
        """Put an entry in."""
        # The id tells an entry from one that had its place before a change of the order.
        item = (entry.priority, entry.order, entry.id, entry)
        row = self._fifo
        if not row or row[-1] < item:
            row.append(item)
        else:
            heapq.heappush(self._heap, item)

    def pop(self) -> TaskEntry | None:
        """Take the first entry out; None when there is none."""
        row, heap = self._fifo, self._heap
        while row or heap:
            first = row.popleft() if row and not (heap and heap[0] < row[0]) else heapq.heappop(heap)
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
    """Points in time at which an attempt is overdue or a backoff is over."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, TaskEntry, AttemptId | None]] = []
        self._sequence = 0
        self._compact_at = _MIN_COMPACTION_SIZE

    def add(self, when: float, entry: TaskEntry, attempt: AttemptId | None) -> None:
        """Remember a deadline of an attempt, or without one the end of a backoff."""
        heap = self._heap
        if len(heap) >= self._compact_at:
            # Most attempts end long before their deadlines, which would pile up.
            heap[:] = [item for item in heap if self._is_current(item[0], item[2], item[3])]
            heapq.heapify(heap)
            self._compact_at = max(_MIN_COMPACTION_SIZE, 2 * len(heap))
        self._sequence += 1
        heapq.heappush(heap, (when, self._sequence, entry, attempt))

    def next_due(self) -> float | None:
        """The earliest point that still counts."""
        heap = self._heap
        while heap:
            when, _, entry, attempt = heap[0]
            if self._is_current(when, entry, attempt):
                return when
            heapq.heappop(heap)
        return None

    def pop_due(self, now: float) -> Iterator[tuple[TaskEntry, AttemptId | None]]:
        """Take out what is due, earliest first."""
        while (when := self.next_due()) is not None and when <= now:
            _, _, entry, attempt = heapq.heappop(self._heap)
            yield entry, attempt

    @staticmethod
    def _is_current(when: float, entry: TaskEntry, attempt: AttemptId | None) -> bool:
        if attempt is not None:
            return entry.attempt == attempt and entry.deadline == when
        return entry.not_before == when and entry.state in _BACKING_OFF
