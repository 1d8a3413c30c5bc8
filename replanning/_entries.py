"""The running state of one task, and the small parts a live plan is made of."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TypedDict

from replanning._ids import AttemptId, TaskId
from replanning._observations import Failure
from replanning._plan import JsonObject, JsonValue, Task
from replanning._states import SATISFIED, TaskState

_READY = TaskState.READY
_BACKING_OFF = (TaskState.BACKOFF, TaskState.NEEDS_CONTINUATION, TaskState.PENDING)

SKIP_AHEAD = 16
"""How many ready tasks may be passed over in one claim, and how often one task may be passed over."""

_DUST = 1e-9
"""What adding and subtracting fractions may leave over: three tenths fit into 0.3."""

_FEW = 256
"""How many points in time are kept at least before those that count no more are looked for."""

NOT_MET = -1
"""Stands for the revision at which a condition held, where it did not hold."""


class _Fields(TypedDict):
    """Those fields of a task that are looked at whenever it moves."""

    id: TaskId
    tool: str | None
    arguments: JsonObject
    depends_on: tuple[TaskId, ...]
    priority: int
    timeout: float | None
    optional: bool
    when: str | None


class Entry:
    """One task as it runs. Its links to other entries are kept in step by the live plan alone.

    Attributes:
        fields: those of the task, which are found there many times faster than as attributes of a model.
    """

    __slots__ = (
        "attempt",
        "attempts",
        "claimed",
        "condition",
        "continued",
        "counted",
        "deadline",
        "dependents",
        "due",
        "duration",
        "effects",
        "failure",
        "failures",
        "feedback",
        "fields",
        "held",
        "id",
        "missing",
        "open_sinks",
        "order",
        "output",
        "parent",
        "passed",
        "priority",
        "reason",
        "recoverable",
        "removed",
        "replaced_by",
        "root",
        "round",
        "stands_for",
        "started",
        "state",
        "taken",
        "task",
        "withdrawn",
    )

    def __init__(self, task: Task, order: int, parent: Entry | None) -> None:
        self.fields = fields = _fields(task)
        self.id: TaskId = fields["id"]
        self.task = task
        self.state = TaskState.PENDING
        self.order = order
        self.priority = fields["priority"]
        self.parent = parent
        self.root: TaskId = self.id if parent is None else parent.root
        self.missing = 0
        self.dependents: list[Entry] | tuple[()] = ()
        self.stands_for: Entry | None = None
        self.replaced_by: tuple[TaskId, ...] = ()
        self.open_sinks = 0
        self.attempts = 0
        self.round = 0
        self.failures = 0
        self.continued = 0
        self.feedback = ""
        self.attempt: AttemptId | None = None
        self.started = 0.0
        self.duration = 0.0
        self.deadline: float | None = None
        self.due: float | None = None
        self.output: JsonValue = None
        self.recoverable = True
        self.failure: Failure | None = None
        self.reason = ""
        self.condition: int | None = None
        self.claimed = 0
        self.held = 0
        self.passed = 0
        self.effects: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        self.removed = False
        self.withdrawn = False
        self.counted = False
        self.taken: Mapping[str, float] | None = None

    def __repr__(self) -> str:
        return f"<Entry {self.id!r} {self.state} attempts={self.attempts} missing={self.missing}>"

    def become(self, task: Task) -> None:
        """Stand for a changed task of the same id."""
        self.task = task
        self.fields = _fields(task)
        self.priority = task.priority

    @property
    def satisfied(self) -> bool:
        """Whether what depends on this task may run."""
        return self.state in SATISFIED or (self.state is TaskState.REPLACED_BY_REPLAN and not self.open_sinks)

    def waiting(self) -> tuple[TaskId, ...]:
        """The tasks that wait for this one, also those that wait for what it replaced."""
        found: dict[TaskId, None] = {}
        entry: Entry | None = self
        while entry is not None:
            found.update(dict.fromkeys(waiting.id for waiting in entry.dependents if not waiting.removed))
            entry = entry.stands_for
        return tuple(found)

    def started_after(self) -> list[TaskId]:
        """The tasks that run or are done and would not have started, were this one not satisfied."""
        found: list[TaskId] = []
        entry = self
        while True:
            found += [w.id for w in entry.dependents if w.state in (TaskState.RUNNING, TaskState.DONE)]
            if entry.stands_for is None or entry.stands_for.open_sinks:
                return found
            entry = entry.stands_for

    @property
    def iteration(self) -> int:
        """How many replacements lie between this task and the root of its lineage."""
        count, entry = 0, self
        while entry.parent is not None:
            count, entry = count + 1, entry.parent
        return count


def _fields(task: Task) -> _Fields:
    return task.__dict__  # type: ignore[return-value]  # pydantic keeps them there, defaults as well


class ResourcePool:
    """Named capacities, taken all or none."""

    def __init__(self, capacities: Mapping[str, float]) -> None:
        self.capacity = dict(capacities)
        self.used = dict.fromkeys(capacities, 0.0)

    def possible(self, demand: Mapping[str, float]) -> bool:
        """Whether the demand could ever be met."""
        return all(amount <= self.capacity.get(name, 0.0) for name, amount in demand.items())

    def fits(self, demand: Mapping[str, float]) -> bool:
        """Whether the demand can be met now."""
        used, capacity = self.used, self.capacity
        return all(used.get(name, 0.0) + amount <= capacity.get(name, 0.0) + _DUST for name, amount in demand.items())

    def take(self, demand: Mapping[str, float]) -> None:
        """Mark the demand as used."""
        for name, amount in demand.items():
            self.used[name] = self.used.get(name, 0.0) + amount

    def give_back(self, demand: Mapping[str, float]) -> None:
        """Mark the demand as free again; nothing in use is exactly 0, whatever floats add up to."""
        for name, amount in demand.items():
            left = self.used[name] - amount
            self.used[name] = left if left > _DUST else 0.0


class ReadyQueue:
    """Ready entries by (priority, insertion). Items that are no longer right are dropped when they come up.

    Most come in the order in which they go out; a heap, which compares each with many others, has only the rest.
    """

    def __init__(self) -> None:
        self._row: deque[tuple[int, int, TaskId, Entry]] = deque()
        self._heap: list[tuple[int, int, TaskId, Entry]] = []

    def __iter__(self) -> Iterator[tuple[int, int, TaskId, Entry]]:
        return chain(self._row, self._heap)

    def push(self, entry: Entry) -> None:
        """Put an entry in."""
        # The id tells an entry from one that had its place before a change of the order.
        item = (entry.priority, entry.order, entry.id, entry)
        row = self._row
        if not row or row[-1] < item:
            row.append(item)
        else:
            heapq.heappush(self._heap, item)

    def pop(self) -> Entry | None:
        """Take the first entry out; None when there is none."""
        row, heap = self._row, self._heap
        while row or heap:
            first = row.popleft() if row and not (heap and heap[0] < row[0]) else heapq.heappop(heap)
            priority, order, _, entry = first
            if (
                entry.state is _READY
                and not entry.claimed
                and not entry.held
                and priority == entry.priority
                and order == entry.order
            ):
                return entry
        return None


class Deadlines:
    """Points in time at which an attempt is overdue or a backoff is over."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Entry, AttemptId | None]] = []
        self._count = 0
        self._full = _FEW

    def add(self, when: float, entry: Entry, attempt: AttemptId | None) -> None:
        """Remember a deadline of an attempt, or without one the end of a backoff."""
        heap = self._heap
        if len(heap) >= self._full:
            # Most attempts end long before their deadlines, which would pile up.
            heap[:] = [item for item in heap if self._counts(item[0], item[2], item[3])]
            heapq.heapify(heap)
            self._full = max(_FEW, 2 * len(heap))
        self._count += 1
        heapq.heappush(heap, (when, self._count, entry, attempt))

    def next(self) -> float | None:
        """The earliest point that still counts."""
        heap = self._heap
        while heap:
            when, _, entry, attempt = heap[0]
            if self._counts(when, entry, attempt):
                return when
            heapq.heappop(heap)
        return None

    def take(self, now: float) -> Iterator[tuple[Entry, AttemptId | None]]:
        """Take out what is due, earliest first."""
        while (when := self.next()) is not None and when <= now:
            _, _, entry, attempt = heapq.heappop(self._heap)
            yield entry, attempt

    @staticmethod
    def _counts(when: float, entry: Entry, attempt: AttemptId | None) -> bool:
        if attempt is not None:
            return entry.attempt == attempt and entry.deadline == when
        return entry.due == when and entry.state in _BACKING_OFF
