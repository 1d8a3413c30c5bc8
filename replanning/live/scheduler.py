"""Scheduler: which ready task may run now, given priorities, resources, tools and deadlines."""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from types import MappingProxyType
from typing import Final

from replanning.errors import UnverifiedOutput
from replanning.journal.records import Failure, FailureKind, normalised_cause
from replanning.live.entries import TaskEntry
from replanning.live.states import (
    BACKOFF,
    NEEDS_CONTINUATION,
    PENDING,
    READY,
    RUNNING,
)
from replanning.plan.tasks import Task, ToolSpec
from replanning.plan.types import AttemptId, TaskId

_BACKING_OFF: Final = (BACKOFF, NEEDS_CONTINUATION, PENDING)

MAX_LOOKAHEAD: Final = 16
"""Limit of ready tasks passed over in one claim, and of how often one task is passed over."""

_CAPACITY_EPSILON: Final = 1e-9
"""Tolerance for sums of fractions: three tenths fit into 0.3."""

_MIN_COMPACTION_SIZE: Final = 256
"""Number of deadlines below which outdated ones are not removed."""

COUNTED_FAILURES: Final[tuple[FailureKind, ...]] = ("error", "timeout", "unexpected")
"""Kinds of failure that a breaker counts: failures of the work itself."""


class ResourcePool:
    """Named capacities; a task takes all that it needs or nothing.

    Args:
        capacities: the amount of each resource.
        tools: the tools by name; a task also takes the resources of its tool.

    Attributes:
        limited: whether anything takes resources at all; set once a capacity is reported.
    """

    def __init__(
        self,
        capacities: Mapping[str, float],
        tools: Mapping[str, ToolSpec] = MappingProxyType({}),
    ) -> None:
        self.capacity = dict(capacities)
        self.used = dict.fromkeys(capacities, 0.0)
        self.limited = bool(capacities) or any(tool.resources for tool in tools.values())
        self._tools = tools

    def demand(self, task: Task) -> Mapping[str, float]:
        """Return the resources that a task takes: those of its tool, overridden by its own."""
        tool = self._tools.get(task.tool or "")
        if tool is None or not tool.resources:
            return task.resources
        return {**tool.resources, **task.resources}

    def can_ever_fit(self, demand: Mapping[str, float]) -> bool:
        """Return whether the capacities would meet the demand if nothing were in use."""
        return all(amount <= self.capacity.get(name, 0.0) for name, amount in demand.items())

    def fits_now(self, demand: Mapping[str, float]) -> bool:
        """Return whether the free resources meet the demand."""
        for name, amount in demand.items():
            free = self.capacity.get(name, 0.0) - self.used.get(name, 0.0)
            if amount > free + _CAPACITY_EPSILON:
                return False
        return True

    def acquire(self, demand: Mapping[str, float]) -> None:
        """Mark the demand as used."""
        for name, amount in demand.items():
            self.used[name] = self.used.get(name, 0.0) + amount

    def release(self, demand: Mapping[str, float]) -> None:
        """Mark the demand as free again."""
        for name, amount in demand.items():
            left = self.used[name] - amount
            # A rounding error would leave a sliver in use forever.
            if left <= _CAPACITY_EPSILON:
                left = 0.0
            self.used[name] = left


@dataclass(slots=True, eq=False, repr=False)
class ReadyQueue:
    """Ready entries by (priority, order).

    Most entries arrive in the order in which they leave: these go through `_fifo`, only the others
    through `_heap`. An outdated item stays until it reaches the front, where it is dropped.

    Tasks that await a confirmation are not ready, but come before all ready ones: resources and
    decisions wait for the answer.

    Attributes:
        reserved: for each lineage that one caller executes alone, its queue by root; all queues
            share it. Such a queue also has the elements of a list and the tasks of an included plan.
        on_push: called after an entry was added.
        in_doubt: the tasks that await a confirmation.
    """

    on_push: Callable[[], None] | None = None
    reserved: dict[TaskId, ReadyQueue] = field(default_factory=dict)
    in_doubt: deque[TaskEntry] = field(default_factory=deque)
    _fifo: deque[tuple[int, int, TaskId, TaskEntry]] = field(default_factory=deque)
    _heap: list[tuple[int, int, TaskId, TaskEntry]] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[int, int, TaskId, TaskEntry]]:
        return chain(self._fifo, self._heap)

    def fill(self, entries: Iterable[TaskEntry]) -> None:
        """Add the entries of a plan that is being loaded to the empty queue."""
        items = [(entry.task.priority, entry.order, entry.id, entry) for entry in entries]
        items.sort()
        self._fifo.extend(items)

    def _other_queue(self, entry: TaskEntry) -> ReadyQueue | None:
        """Return the queue of the innermost reserved lineage of an entry; None if it is this one.

        Another caller may have reserved an element of a list that is reserved.
        """
        if self.reserved:
            for root in entry.roots():
                if root in self.reserved:
                    queue = self.reserved[root]
                    return None if queue is self else queue
        return None

    def push(self, entry: TaskEntry) -> None:
        """Add an entry; one of a reserved lineage goes to the queue of that lineage."""
        queue = self._other_queue(entry)
        if queue is not None:
            queue.push(entry)
            return
        # The id breaks the tie with an entry that had this position before a reordering.
        item = (entry.task.priority, entry.order, entry.id, entry)
        if not self._fifo or self._fifo[-1] < item:
            self._fifo.append(item)
        else:
            heapq.heappush(self._heap, item)
        if self.on_push is not None:
            self.on_push()

    def push_in_doubt(self, entry: TaskEntry) -> None:
        """Add a task that awaits a confirmation, to the queue that `push` would use."""
        queue = self._other_queue(entry)
        if queue is not None:
            queue.push_in_doubt(entry)
            return
        self.in_doubt.append(entry)
        if self.on_push is not None:
            self.on_push()

    def pop_in_doubt(self) -> TaskEntry | None:
        """Remove and return the first task that awaits a confirmation; None if there is none."""
        while self.in_doubt:
            entry = self.in_doubt.popleft()
            # Once a caller has reserved its lineage, it is in that queue as well.
            if entry.claim or self._other_queue(entry) is not None:
                continue
            if entry.awaits_confirmation and entry.not_before is None:
                return entry
        return None

    def withdraw(self, entry: TaskEntry) -> None:
        """Remove an entry if it is the last one, as the task of a new call is."""
        # Any other is skipped when it reaches the front, because its lineage is reserved by then.
        if self._fifo and self._fifo[-1][3] is entry:
            self._fifo.pop()

    def pop(self) -> TaskEntry | None:
        """Remove and return the first entry that is up to date; None if there is none."""
        while self._fifo or self._heap:
            # The heap holds the few that arrived out of order; usually it is empty.
            if not self._heap or (self._fifo and self._fifo[0] < self._heap[0]):
                priority, order, _, entry = self._fifo.popleft()
            else:
                priority, order, _, entry = heapq.heappop(self._heap)
            moved = priority != entry.task.priority or order != entry.order
            if moved or entry.state is not READY or entry.claim or entry.holds:
                continue
            queue = self._other_queue(entry)
            if queue is None:
                return entry
            queue.push(entry)
        return None

    def put_back(self, entry: TaskEntry) -> None:
        """Put the entry back that `pop` has just returned; it comes first again."""
        self._fifo.appendleft((entry.task.priority, entry.order, entry.id, entry))


@dataclass(slots=True, eq=False, repr=False)
class Deadlines:
    """Times at which an attempt is overdue or a backoff ends, in seconds since the epoch."""

    _heap: list[tuple[float, int, TaskEntry, AttemptId | None]] = field(default_factory=list)
    _sequence: int = 0
    _compact_at: int = _MIN_COMPACTION_SIZE

    def add(self, when: float, entry: TaskEntry, attempt: AttemptId | None) -> None:
        """Add the deadline of an attempt, or the end of a backoff if `attempt` is None."""
        if len(self._heap) >= self._compact_at:
            # Most attempts end long before their deadlines, which would pile up.
            current = [item for item in self._heap if self._is_current(item[0], item[2], item[3])]
            heapq.heapify(current)
            self._heap = current
            self._compact_at = max(_MIN_COMPACTION_SIZE, 2 * len(current))
        self._sequence += 1
        heapq.heappush(self._heap, (when, self._sequence, entry, attempt))

    def next_due(self) -> float | None:
        """Return the earliest time that is still current; None if there is none."""
        while self._heap:
            when, _, entry, attempt = self._heap[0]
            if self._is_current(when, entry, attempt):
                return when
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now: float) -> Iterator[tuple[TaskEntry, AttemptId | None]]:
        """Remove and yield the entries that are due, earliest first."""
        while (when := self.next_due()) is not None and when <= now:
            _, _, entry, attempt = heapq.heappop(self._heap)
            yield entry, attempt

    @staticmethod
    def _is_current(when: float, entry: TaskEntry, attempt: AttemptId | None) -> bool:
        if attempt is not None:
            return entry.log.current == attempt and entry.log.deadline == when
        if entry.not_before != when:
            return False
        return entry.state in _BACKING_OFF or entry.awaits_confirmation


_HOST: Final = re.compile(r"\w://(?:[^/?#\s@]*@)?([^/?#\s:'\"{}]+)(?=[/?#\s:'\"]|$)")
"""The host of a URL in a text; none where a placeholder stands in its place."""


def failure_target(task: Task, tool: ToolSpec, failure: Failure) -> object:
    """Return the subject of a failure, so that a breaker counts failures with one cause.

    A transient failure, or a call without an answer or with a wrong one, suggests that the tool or
    the host in its call is down. Any other failure, such as a missing page or a malformed record,
    may be due to the arguments, and says nothing about calls with other arguments.

    Args:
        task: the task that failed.
        tool: its tool.
        failure: its failure.

    Returns:
        The hosts, empty if the call names none; or the arguments.
    """
    if not (failure.transient or failure.in_doubt or failure.kind == "unexpected"):
        return task.arguments
    hosts: list[str] = []
    for text in (tool.url, tool.command, *task.arguments.values()):
        if isinstance(text, str):
            hosts += _HOST.findall(text)
    return hosts


@dataclass(slots=True, eq=False)
class ToolBreaker:
    """Circuit breaker of a tool: consecutive failures with one cause, and trials after it opened.

    Attributes:
        cause: the kind of the failures, and their `failure_target`.
        roots: the lineages that failed; several failures of one lineage count once.
        openings: number of consecutive openings; 0 while the breaker is closed.
        retry_at: when one task may try the tool again, in seconds since the epoch.
        trial: the task that tries it.
    """

    cause: tuple[str, object] = ("", None)
    roots: dict[TaskId, None] = field(default_factory=dict)
    openings: int = 0
    retry_at: float = 0.0
    trial: TaskEntry | None = None

    def admits(self, entry: TaskEntry) -> bool:
        """Return whether a task may use the tool; after an opening, one task at a time may."""
        if not self.openings or self.trial is None or self.trial is entry:
            return True
        return not (self.trial.claim or self.trial.state is RUNNING)


class Scheduler:
    """Hands out each ready task to one claimer at a time, and keeps those that cannot run yet.

    A ready task is in one of four places. It is *queued*, in order of priority; *claimed*, once
    `claim_next` has returned it; *parked*, while it lacks a tool, a fact, or more of a resource
    than its whole capacity; or *held*, while a question or a trigger holds it back. Claims end when
    the attempt starts or the task is returned. Only this class moves tasks between these places.

    Args:
        tools: the tools by name, as they are now.
        pool: the resources.
        facts_allow: returns whether the facts that hold and the running tasks let a task start;
            None if the plan states no facts.

    Attributes:
        queue: the ready tasks.
        deadlines: when attempts are overdue and backoffs end.
        parked: the ready tasks that lack a tool, a resource or a fact.
        claimed_count: number of tasks that are claimed and not started.
        last_claim: number of the last claim.
        allotted: the resources of claimed and running tasks, if any resources are limited.
        overtaken: for each task that lacked resources, how often later tasks were claimed first.
        unconfirmed: the running tasks whose last attempt awaits or undergoes a confirmation.
        kept_resources: the resources that bodies of ended attempts still hold.
        breakers: the circuit breakers of tools that have failed.
    """

    def __init__(
        self,
        tools: Mapping[str, ToolSpec],
        pool: ResourcePool,
        facts_allow: Callable[[TaskEntry], bool] | None,
    ) -> None:
        self._tools = tools
        self._facts_allow = facts_allow
        self.queue = ReadyQueue()
        self.deadlines = Deadlines()
        self.pool = pool
        self.parked: dict[TaskId, TaskEntry] = {}
        self.claimed_count = 0
        self.last_claim = 0
        self.allotted: dict[TaskId, Mapping[str, float]] = {}
        self.overtaken: dict[TaskId, int] = {}
        self.unconfirmed: dict[TaskId, TaskEntry] = {}
        self.kept_resources: dict[AttemptId, Mapping[str, float]] = {}
        self.breakers: dict[str, ToolBreaker] = {}

    def __repr__(self) -> str:
        return f"<Scheduler claimed={self.claimed_count} parked={list(self.parked)}>"

    # Claims

    def claim_next(self, queue: ReadyQueue | None = None) -> TaskEntry | None:
        """Claim the next ready task whose tool, resources and facts are available.

        Tasks leave the queue in three cases: a task that cannot start even if resources are
        released is parked; one whose resources are in use is passed over; one that can start is
        claimed. A task that was passed over too often ends the search, so that large demands do not
        starve. A task that awaits a confirmation comes first: it holds its resources already, and
        the confirmation uses another tool.

        Args:
            queue: the queue of a reserved lineage; by default that of all others.
        """
        if queue is None:
            queue = self.queue
        if queue.in_doubt:
            doubtful = queue.pop_in_doubt()
            if doubtful is not None:
                self.claimed_count += 1
                self.renew_claim(doubtful)
                return doubtful
        claimed: TaskEntry | None = None
        passed_over: list[TaskEntry] = []
        while (entry := queue.pop()) is not None:
            if self.lacks(entry):
                self.parked[entry.id] = entry
                continue
            # Most plans declare no resources, and need no lookup for each task.
            if not self.pool.limited:
                claimed = entry
                break
            demand = self.pool.demand(entry.task)
            if self.pool.fits_now(demand):
                self.pool.acquire(demand)
                self.allotted[entry.id] = demand
                claimed = entry
                break
            passed_over.append(entry)
            if (
                self.overtaken.get(entry.id, 0) >= MAX_LOOKAHEAD
                or len(passed_over) >= MAX_LOOKAHEAD
            ):
                break
        for other in passed_over:
            # Only a task that was overtaken has waited longer than its position says.
            if claimed is not None:
                self.overtaken[other.id] = self.overtaken.get(other.id, 0) + 1
            queue.push(other)
        if claimed is None:
            return None
        # It is the trial of a tool that has failed; other tasks wait for its outcome.
        name = claimed.task.tool
        if name in self.breakers:
            self.breakers[name].trial = claimed
        self.last_claim += 1
        self.claimed_count += 1
        claimed.claim = self.last_claim
        return claimed

    def lacks(self, entry: TaskEntry) -> str:
        """Return why a task cannot start even with all resources free; empty if it can."""
        name = entry.task.tool
        tool = None
        if name is not None:
            tool = self._tools.get(name)
        if tool is not None and not tool.available:
            breaker = self.breakers.get(tool.name)
            if breaker is None or not breaker.openings:
                return f"its tool {name!r} is unavailable"
            until = datetime.fromtimestamp(breaker.retry_at, UTC)
            return f"its tool {name!r} kept failing, and is tried again at {until:%H:%M:%S} UTC"
        if self.pool.limited and not self.pool.can_ever_fit(self.pool.demand(entry.task)):
            return "its resources are no longer available"
        if name in self.breakers and not self.breakers[name].admits(entry):
            return f"its tool {name!r} is being tried by another task"
        if tool is None or self._facts_allow is None or self._facts_allow(entry):
            return ""
        return "its facts do not hold"

    def count_failure(self, entry: TaskEntry, failure: Failure) -> None:
        """Count a failure of a task for the breaker of its tool.

        A breaker counts failures with one cause; another cause restarts the count. An open breaker
        keeps its count, because only its trials decide.
        """
        tool = self._tools.get(entry.task.tool or "")
        if tool is None or failure.kind not in COUNTED_FAILURES:
            return
        # Its own tool answered; the tool that was to verify the output failed.
        if failure.type == UnverifiedOutput.__name__:
            return
        kind = failure.type
        if failure.kind != "unexpected":
            # The actual value differs from output to output.
            kind = normalised_cause(failure.type, failure.message)
        cause = kind, failure_target(entry.task, tool, failure)
        breaker = self.breakers.get(tool.name)
        if breaker is None or (breaker.cause != cause and not breaker.openings):
            breaker = ToolBreaker(cause)
            self.breakers[tool.name] = breaker
        breaker.roots[entry.root] = None

    def forget_failure(self, entry: TaskEntry) -> None:
        """Stop counting the failure of a task, because it says nothing about its tool."""
        breaker = self.breakers.get(entry.task.tool or "")
        if breaker is not None:
            breaker.roots.pop(entry.root, None)

    def begin(self, entry: TaskEntry) -> None:
        """End the claim of a task because its attempt starts; the attempt keeps the resources."""
        if entry.claim:
            entry.claim = 0
            self.claimed_count -= 1
        elif self.pool.limited and entry.id not in self.allotted:
            # An attempt that is read from a journal, or was reported, was never claimed here.
            self.allotted[entry.id] = self.pool.demand(entry.task)
            self.pool.acquire(self.allotted[entry.id])
        entry.not_before = None

    def renew_claim(self, entry: TaskEntry) -> int:
        """Replace the claim of a task by a new one, and return its number."""
        self.last_claim += 1
        entry.claim = self.last_claim
        return self.last_claim

    def return_claim(self, entry: TaskEntry, claim: int | None = None) -> None:
        """End the claim of a task that will not be started, and queue it again if it is ready.

        Args:
            entry: the task.
            claim: the number of the claim; nothing happens if that claim is over.
        """
        if not entry.claim or claim not in (None, entry.claim):
            return
        entry.claim = 0
        self.claimed_count -= 1
        if entry.awaits_confirmation:
            self.queue.push_in_doubt(entry)
            return
        self.release_resources(entry)
        if entry.state is READY:
            self.queue.push(entry)
        if self.breakers:
            self.unpark()

    def release_resources(self, entry: TaskEntry) -> None:
        """Release the resources of a task."""
        if entry.id in self.allotted:
            self.pool.release(self.allotted.pop(entry.id))
            self.overtaken.pop(entry.id, None)

    def has_startable(self) -> bool:
        """Return whether a queued task could start with all resources free; park those before it.

        Nothing is claimed. Once no task runs or is claimed, the resources are free.
        """
        for queue in (self.queue, *self.queue.reserved.values()):
            while (entry := queue.pop()) is not None:
                if not self.lacks(entry):
                    queue.put_back(entry)
                    return True
                self.parked[entry.id] = entry
        return False

    # Reserved lineages

    def reserve(
        self, root: TaskId, entries: Sequence[TaskEntry], on_push: Callable[[], None]
    ) -> None:
        """Queue the tasks of a lineage separately, for one caller.

        Args:
            root: the root of the lineage.
            entries: its current tasks.
            on_push: called after one of its tasks was queued.
        """
        reserved = self.queue.reserved
        reserved[root] = ReadyQueue(on_push, reserved)
        for entry in entries:
            # Another caller may have reserved an element of this list, and keeps it.
            if entry.state is READY:
                self.queue.withdraw(entry)
                self.queue.push(entry)
            elif entry.awaits_confirmation:
                self.queue.push_in_doubt(entry)

    def unreserve(self, root: TaskId) -> None:
        """Return the tasks of a lineage to the common queue."""
        queue = self.queue.reserved.pop(root)
        for *_, entry in queue:
            self.queue.push(entry)
        for entry in queue.in_doubt:
            self.queue.push_in_doubt(entry)

    # Waiting

    def unpark(self) -> None:
        """Queue all parked tasks again, because what they lacked may be available now."""
        parked = self.parked
        self.parked = {}
        for entry in parked.values():
            self.queue.push(entry)

    def requeue(self, entry: TaskEntry) -> None:
        """Queue a task again after a change of its position, tool or resources."""
        self.parked.pop(entry.id, None)
        self.return_claim(entry)
        if entry.state is READY:
            self.queue.push(entry)

    def hold(self, entries: Sequence[TaskEntry]) -> None:
        """Keep tasks from being handed out until they are released."""
        for entry in entries:
            entry.holds += 1

    def release(self, entries: Sequence[TaskEntry]) -> None:
        """Release tasks that were held."""
        for entry in entries:
            entry.holds -= 1
            if not entry.holds and entry.state is READY:
                self.queue.push(entry)

    def wait_until(self, entry: TaskEntry, due: float | None) -> None:
        """Keep a task from starting before a point in time, in seconds since the epoch."""
        entry.not_before = due
        if due is not None:
            self.deadlines.add(due, entry, None)

    # Resources of attempts that were cancelled and have not stopped yet

    def keep_resources(self, entry: TaskEntry, attempt: AttemptId) -> None:
        """Keep the resources of an attempt in use until `free_resources`: its body still runs."""
        demand = self.pool.demand(entry.task)
        if self.pool.limited and demand:
            self.pool.acquire(demand)
            self.kept_resources[attempt] = demand

    def free_resources(self, attempt: AttemptId) -> None:
        """Free the resources that were kept for the body of an attempt."""
        self.pool.release(self.kept_resources.pop(attempt, {}))
