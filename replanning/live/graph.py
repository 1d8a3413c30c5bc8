"""Tasks of a live plan: entries, ready queue, deadlines, resources, dependencies and claims."""

from __future__ import annotations

import hashlib
import heapq
import json
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Final, TypedDict

from replanning.errors import ExpressionError, NoResult, UnknownTask
from replanning.journal.records import Failure, FailureKind
from replanning.live.states import (
    FINISHED,
    SATISFIED,
    STUCK,
    TRANSITIONS,
    WAITING,
    TaskEvent,
    TaskState,
    transition,
)
from replanning.live.strips import GroundAction, StripsProblem, ground_action, uses_facts
from replanning.plan.checks import TaskScope
from replanning.plan.conditions import Condition
from replanning.plan.document import Plan
from replanning.plan.json_values import copy_json
from replanning.plan.references import find_references, resolve_references
from replanning.plan.tasks import Fallback, OnStale, Task, ToolSpec
from replanning.plan.types import AttemptId, JsonObject, JsonValue, TaskId

_READY, _PENDING = TaskState.READY, TaskState.PENDING

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
    on_stale: OnStale | None
    fallbacks: tuple[Fallback, ...]
    undo: Fallback | None
    resources: Mapping[str, float]
    metadata: JsonObject


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
        start_number: the number of attempts in the run that had ended when its last attempt began.
        end_number: the same when its last attempt ended.
        context_version: the number of changes to the context when its last attempt began.
        in_doubt: whether an attempt may have had its effect, without being known to have succeeded.
        call_changes: how often a change has given it another tool or other arguments.
        reads: the keys of the context that its attempt has read later, or earlier, with their versions.
        changed_context: whether its attempt has changed the context.
        redone: whether it was finished when it was replaced, because its result was stale.
        withdrawn: whether it was removed for good because the task it replaced runs again.
        reserved: the resources that it holds.
        shown_task: the document as readers of views have it.
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
    start_number: int = 0
    end_number: int = 0
    context_version: int = 0
    reads: dict[str, int] | None = None
    changed_context: bool = False
    redone: bool = False
    deadline: float | None = None
    not_before: float | None = None
    output: JsonValue = None
    recoverable: bool = True
    failure: Failure | None = None
    in_doubt: bool = False
    call_changes: int = 0
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
    shown_task: Task | None = None

    def __repr__(self) -> str:
        return f"<TaskEntry {self.id!r} {self.state} attempts={self.attempts} missing={self.unsatisfied_dependencies}>"

    def set_task(self, task: Task) -> None:
        """Replace the document of the task by a changed one of the same id."""
        self.task, self.shown_task = task, None
        self.fields = task.__dict__  # type: ignore[assignment]
        self.priority = task.priority

    @property
    def satisfied(self) -> bool:
        """True if the dependents of this task may run."""
        return self.state in SATISFIED or (
            self.state is TaskState.REPLACED_BY_REPLAN and not self.unsatisfied_sinks
        )

    def lineage(self) -> list[TaskEntry]:
        """Return the tasks that this one replaced, the root first, and this one."""
        entries = [self]
        while (parent := entries[-1].parent) is not None:
            entries.append(parent)
        return entries[::-1]

    def dependent_ids(self) -> tuple[TaskId, ...]:
        """Return the tasks that wait for this one, including those that wait for a task it replaced."""
        ids: dict[TaskId, None] = {}
        entry: TaskEntry | None = self
        while entry is not None:
            ids.update(
                dict.fromkeys(waiting.id for waiting in entry.dependents if not waiting.removed)
            )
            entry = entry.sink_of
        return tuple(ids)

    def started_dependents(self) -> list[TaskId]:
        """Return the tasks that run or are done and could not have started if this one were not satisfied."""
        started: list[TaskId] = []
        entry = self
        while True:
            started += [
                w.id for w in entry.dependents if w.state in (TaskState.RUNNING, TaskState.DONE)
            ]
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

    def __init__(
        self, capacities: Mapping[str, float], tools: Mapping[str, ToolSpec] = MappingProxyType({})
    ) -> None:
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


@dataclass(slots=True, eq=False, repr=False)
class ReadyQueue:
    """Ready entries by (priority, order). Outdated items are dropped when they reach the front.

    Most entries arrive in the order in which they leave; only the others go through a heap.

    Attributes:
        reserved: by root, the queue of each lineage that somebody executes alone; its entries go there.
        on_push: called after an entry was added.
    """

    on_push: Callable[[], None] | None = None
    reserved: dict[TaskId, ReadyQueue] = field(default_factory=dict)
    _fifo: deque[tuple[int, int, TaskId, TaskEntry]] = field(default_factory=deque)
    _heap: list[tuple[int, int, TaskId, TaskEntry]] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[int, int, TaskId, TaskEntry]]:
        return chain(self._fifo, self._heap)

    def push(self, entry: TaskEntry) -> None:
        """Add an entry."""
        if self.reserved and (queue := self.reserved.get(entry.root)) is not None:
            queue.push(entry)
            return
        # The id breaks the tie with an entry that had this place before a reordering.
        item = (entry.priority, entry.order, entry.id, entry)
        fifo = self._fifo
        if not fifo or fifo[-1] < item:
            fifo.append(item)
        else:
            heapq.heappush(self._heap, item)
        if self.on_push is not None:
            self.on_push()

    def withdraw(self, entry: TaskEntry) -> None:
        """Remove an entry if it is the last one, as the task of a call is; others are passed over when they are first."""
        if self._fifo and self._fifo[-1][3] is entry:
            self._fifo.pop()

    def pop(self) -> TaskEntry | None:
        """Remove and return the first entry; None if there is none."""
        fifo, heap = self._fifo, self._heap
        while fifo or heap:
            first = (
                fifo.popleft() if fifo and not (heap and heap[0] < fifo[0]) else heapq.heappop(heap)
            )
            priority, order, _, entry = first
            if (
                entry.state is _READY
                and not entry.claim
                and not entry.hold_count
                and priority == entry.priority
                and order == entry.order
            ):
                if not (self.reserved and entry.root in self.reserved):
                    return entry
                self.push(entry)
        return None


@dataclass(slots=True, eq=False, repr=False)
class Deadlines:
    """Times at which an attempt is overdue or a backoff ends, in seconds since the epoch."""

    _heap: list[tuple[float, int, TaskEntry, AttemptId | None]] = field(default_factory=list)
    _sequence: int = 0
    _compact_at: int = _MIN_COMPACTION_SIZE

    def add(self, when: float, entry: TaskEntry, attempt: AttemptId | None) -> None:
        """Add the deadline of an attempt, or the end of a backoff if `attempt` is None."""
        heap = self._heap
        if len(heap) >= self._compact_at:
            # Most attempts end long before their deadlines, which would pile up.
            heap[:] = [
                i for i in heap if i[2].attempt == i[3] and self._is_current(i[0], i[2], i[3])
            ]
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


class TaskResults(Mapping[str, JsonValue]):
    """Results of finished tasks by the id of their lineage's root; any other id of the lineage is found as well."""

    __slots__ = ("_entries",)

    def __init__(self, entries: Mapping[TaskId, TaskEntry]) -> None:
        self._entries = entries

    def __repr__(self) -> str:
        return f"<TaskResults of {list(self)}>"

    def __getitem__(self, key: str) -> JsonValue:
        try:
            return self.output_of(TaskId(key))
        except UnknownTask as error:
            raise KeyError(str(error)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.outputs())

    def __len__(self) -> int:
        return len(self.outputs())

    def output_of(self, task_id: TaskId) -> JsonValue:
        """Return the output found through the lineage of a task; a mapping if several sinks replaced it.

        The output of a finished task that is done again counts until that is done.

        Args:
            task_id: the task, or one that it replaced.

        Raises:
            NoResult: the task has no result yet.
            UnknownTask: there is no such task.
        """
        entry = self._entries.get(task_id)
        if entry is None:
            raise UnknownTask(task_id)
        while entry.state is TaskState.REPLACED_BY_REPLAN and not (
            entry.redone and entry.unsatisfied_sinks
        ):
            if len(entry.sinks) > 1:
                return {sink.id: self.output_of(sink.id) for sink in entry.sinks}
            entry = entry.sinks[0]
        if entry.state is TaskState.SKIPPED:
            return None
        if entry.state is not TaskState.DONE and not entry.redone:
            raise NoResult(task_id, f"it is {entry.state}")
        if not entry.recoverable:
            raise NoResult(
                task_id, "it could not be kept as JSON; return JSON, or give the engine a codec"
            )
        return entry.output

    def outputs(self) -> dict[str, JsonValue]:
        """Return the results that exist, by the ids of the roots."""
        outputs: dict[str, JsonValue] = {}
        for entry in self._entries.values():
            if entry.parent is not None:
                continue
            if entry.state is TaskState.DONE and entry.recoverable:
                outputs[entry.id] = entry.output
            elif entry.satisfied or entry.redone:
                with suppress(NoResult):
                    outputs[entry.id] = self.output_of(entry.id)
        return outputs


class CopyOnRead(Mapping[str, JsonValue]):
    """View of shared values that copies arrays and objects on first access, so that an attempt may change its own.

    Args:
        shared: the values.
        on_read: called with each key that is read, also where it has no value.
    """

    __slots__ = ("_copies", "_on_read", "_shared")

    def __init__(
        self, shared: Mapping[str, JsonValue], on_read: Callable[[str], object] = lambda key: None
    ) -> None:
        self._shared = shared
        self._on_read = on_read
        self._copies: dict[str, tuple[JsonValue, JsonValue]] = {}

    def __repr__(self) -> str:
        return repr(self._shared)

    def __getitem__(self, key: str) -> JsonValue:
        self._on_read(key)
        value = self._shared[key]
        if not isinstance(value, list | dict):
            return value
        cached = self._copies.get(key)
        if cached is None or cached[0] is not value:
            cached = self._copies[key] = value, copy_json(value)
        return cached[1]

    def __iter__(self) -> Iterator[str]:
        for key in tuple(self._shared):
            self._on_read(key)
            yield key

    def __len__(self) -> int:
        return len(self._shared)


class ContextHistory:
    """Changes of the context, as hashes of its values, and the tasks whose work read its keys.

    Attributes:
        version: number of changes so far.
        hashes: by key, the versions in which its value changed, and hashes of the new values.
        readers: by key, the finished tasks whose work read it.
    """

    __slots__ = ("_claims", "hashes", "readers", "version")

    def __init__(self) -> None:
        self.version = 0
        self.hashes: dict[str, tuple[list[int], list[bytes]]] = {}
        self.readers: dict[str, dict[TaskId, None]] = {}
        self._claims: list[int] = []

    def change(
        self, context: JsonObject, changes: JsonObject, removed: Iterable[str], last_claim: int
    ) -> None:
        """Change the context; a missing key counts as null."""
        self.version += 1
        self._claims.append(last_claim)
        for key in (*changes, *removed):
            versions, hashes = self.hashes.setdefault(key, ([0], [_value_hash(context.get(key))]))
            versions.append(self.version)
            hashes.append(_value_hash(changes.get(key)))
        context.update(changes)
        for key in removed:
            context.pop(key, None)

    def changed_since(self, key: str, version: int) -> bool:
        """Return whether the value of a key differs from that at an earlier version."""
        versions, hashes = self.hashes.get(key, ((0,), (b"",)))
        return hashes[bisect_right(versions, version) - 1] != hashes[-1]

    def version_at_claim(self, claim: int) -> int:
        """Return the version of the context at a claim of this process."""
        return bisect_left(self._claims, claim)


def _value_hash(value: JsonValue) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()


_NO_ACTION: Final = GroundAction()


@dataclass(slots=True, eq=False, repr=False)
class FactIndex:
    """Unfinished tasks by the facts that they read and write."""

    writers: dict[str, dict[TaskId, None]] = field(default_factory=dict)
    readers: dict[str, dict[TaskId, None]] = field(default_factory=dict)
    unresolved: dict[TaskId, None] = field(default_factory=dict)
    _actions: dict[TaskId, GroundAction] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<FactIndex of {len(self._actions)} tasks>"

    def __len__(self) -> int:
        return len(self._actions)

    def add(self, task_id: TaskId, action: GroundAction, *, resolved: bool) -> None:
        """Index a task; the action of one that is not resolved may change later."""
        self.discard(task_id)
        self._actions[task_id] = action
        if not resolved:
            self.unresolved[task_id] = None
        for index, facts in (
            (self.readers, action.requires),
            (self.writers, action.adds | action.removes),
        ):
            for fact in facts:
                index.setdefault(fact, {})[task_id] = None

    def discard(self, task_id: TaskId) -> None:
        """Remove a task."""
        action = self._actions.pop(task_id, None)
        if action is None:
            return
        self.unresolved.pop(task_id, None)
        for index, facts in (
            (self.readers, action.requires),
            (self.writers, action.adds | action.removes),
        ):
            for fact in facts:
                del index[fact][task_id]
                if not index[fact]:
                    del index[fact]


@dataclass(slots=True, eq=False, repr=False)
class DependencyIndex:
    """Tasks of a plan by the things they use.

    Attributes:
        stored_result: finds the stored result of a task; other results are not JSON and never in a fact.
        fact_index: the unfinished tasks by facts, for a plan that states its facts and has tools that use any.
        context_readers: the tasks whose arguments or condition refer to a key of the context, finished ones included.
        resource_users: the unfinished tasks that use a tool or take a resource.
    """

    tools: Mapping[str, ToolSpec]
    pool: ResourcePool
    context: JsonObject
    stored_result: Callable[..., JsonValue]
    fact_index: FactIndex | None
    context_readers: dict[str, dict[TaskId, None]] = field(default_factory=dict)
    resource_users: dict[str, dict[TaskId, None]] = field(default_factory=dict)
    _actions: dict[TaskId, tuple[Task, ToolSpec, GroundAction]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<DependencyIndex of {list(self.resource_users)}>"

    def ground(self, task: Task) -> tuple[GroundAction, JsonObject]:
        """Return the preconditions and effects of a task, and its arguments as far as they are known."""
        tool = self.tools.get(task.tool) if task.tool else None
        if tool is None:
            return _NO_ACTION, task.arguments
        cached = self._actions.get(task.id)
        if cached is not None and cached[0] is task and cached[1].name == tool.name:
            return cached[2], task.arguments
        if not uses_facts(tool):
            return _NO_ACTION, task.arguments
        arguments: JsonObject = {}
        for name, value in task.arguments.items():
            try:
                resolved = resolve_references(
                    {name: value}, context=self.context, result_of=self.stored_result
                )
            except ExpressionError:
                continue  # it refers to a value that does not exist yet
            arguments[name] = resolved[name]
        action = ground_action(tool, arguments)
        if arguments == task.arguments:
            self._actions[task.id] = task, tool, action
        return action, arguments

    def add(self, task: Task) -> None:
        """Index a task."""
        if task.tool:
            self.resource_users.setdefault(task.tool, {})[task.id] = None
        if self.pool.limited:
            for name in self.pool.demand(task):
                self.resource_users.setdefault(name, {})[task.id] = None
        if task.arguments or task.when:
            for key in context_keys(task):
                self.context_readers.setdefault(key, {})[task.id] = None
        if self.fact_index is not None:
            action, _ = self.ground(task)
            if action.facts or action.unresolved:
                self.fact_index.add(task.id, action, resolved=task.id in self._actions)

    def discard(self, task: Task) -> None:
        """Remove a task that is about to change."""
        self.discard_user(task)
        for key in context_keys(task):
            self.context_readers[key].pop(task.id, None)

    def discard_user(self, task: Task) -> None:
        """Remove a finished task from the users of tools, resources and facts."""
        if task.tool:
            self.resource_users[task.tool].pop(task.id, None)
        if self.pool.limited:
            for name in self.pool.demand(task):
                self.resource_users[name].pop(task.id, None)
        if self.fact_index is not None:
            self.fact_index.discard(task.id)


def context_keys(task: Task) -> Iterable[str]:
    """Return the keys of the context that a task's arguments and condition refer to."""
    keys: dict[str, None] = {}
    if task.arguments:
        for reference in find_references(task.arguments):
            if reference.task is None:
                keys[str(reference.path[0])] = None
    if task.when:
        keys.update(dict.fromkeys(sorted(Condition.parse(task.when).names("context"))))
    return keys


_SATISFY = TaskEvent.SATISFY

MAX_OUTCOMES_PER_TOOL: Final = 50
"""Number of outcomes per tool that are kept as evidence of past success."""

_TASK_BATCH_SIZE, _GROUNDING_BATCH_SIZE = 500, 100
"""Tasks loaded between two pauses; fewer if their actions have to be grounded."""

_TRANSITIONS_BY_EVENT: Final = {
    event: {s: follows for (s, e), follows in TRANSITIONS.items() if e is event}
    for event in TaskEvent
}
"""The table of transitions by event, for lookups that do not build a pair first."""

_PROGRESS_EVENTS: Final = frozenset({TaskEvent.SATISFY, TaskEvent.START})
"""Events that neither lead into nor out of a finished or stuck state."""

_IN_PROGRESS_STATES = (TaskState.RUNNING, TaskState.BACKOFF, TaskState.NEEDS_CONTINUATION)


COUNTED_FAILURES: Final[tuple[FailureKind, ...]] = ("error", "timeout")
"""Kinds of failure that a breaker counts: those of the work itself."""


@dataclass(slots=True, eq=False)
class ToolBreaker:
    """Circuit breaker of a tool: counts consecutive failures of one cause, and its trials after it was opened.

    Attributes:
        cause: the cause of the failures.
        roots: the lineages that failed; several failures of one lineage count once.
        openings: how often in a row the tool was made unavailable; 0 while the breaker is closed.
        retry_at: when one task may try the tool again.
        trial: that task.
    """

    cause: str = ""
    roots: dict[TaskId, None] = field(default_factory=dict)
    openings: int = 0
    retry_at: float = 0.0
    trial: TaskEntry | None = None

    def admits(self, entry: TaskEntry) -> bool:
        """Return whether a task may use the tool; after the breaker was opened, one task at a time may."""
        trial = self.trial
        return (
            not self.openings
            or trial in (None, entry)
            or not (trial.claim or trial.state is TaskState.RUNNING)
        )


class TaskGraph:
    """The tasks of a running plan.

    Args:
        plan: the plan document to start from.
        empty: leave its tasks to `load_tasks`.

    Attributes:
        entries: all tasks, past ones included, in the order in which they were added.
        unsatisfied_count: number of required lineages that are not satisfied.
        aborted: the reason for which the run is to be aborted.
        has_early_skips: whether a task was ever skipped before its dependencies were settled.
        version: number of changes to the plan so far; a draft is valid while it stays the same.
        revision: number of revisions so far.
        revision_hash: hash of the document and of every revision since; empty until it is first needed.
        strips_problems: planning problems of the plan as it is now, by the tasks and facts that they are about.
        closed_world: whether the plan states its facts.
        context_history: the changes to the context so far.
        redone: the finished tasks that were replaced because their results were stale.
        redoes_stale: whether the plan, or a task of it, says that tasks with stale results are to be done again.
        recorded_stale: the stale results that were recorded last.
        claimed_count: number of tasks that are handed out and not started.
        last_claim: number of the last claim.
        parked: the ready tasks that lack a tool, a resource or a fact.
        running_actions: the actions of the running tasks, if the plan states facts.
        kept_resources: the resources that bodies of ended attempts still hold.
        ended_attempts: number of attempts that have ended.
        outcomes: for each tool whether its last attempts succeeded, the newest last.
    """

    # Slots are faster to read than a dict with this many attributes.
    __slots__ = (
        "aborted",
        "breakers",
        "claimed_count",
        "closed_world",
        "context",
        "context_history",
        "counts",
        "deadlines",
        "dependency_index",
        "ended_attempts",
        "entries",
        "facts",
        "has_early_skips",
        "kept_resources",
        "last_claim",
        "outcomes",
        "parked",
        "plan",
        "pool",
        "ready_queue",
        "recorded_stale",
        "redoes_stale",
        "redone",
        "results",
        "revision",
        "revision_hash",
        "running_actions",
        "scope",
        "strips_problems",
        "stuck",
        "tools",
        "unsatisfied_count",
        "version",
    )

    def __init__(self, plan: Plan, *, empty: bool = False) -> None:
        self.plan = plan
        self.context: JsonObject = dict(plan.context)
        self.context_history = ContextHistory()
        self.redone: dict[TaskId, None] = {}
        self.redoes_stale = plan.on_stale == "redo"
        self.recorded_stale: Mapping[TaskId, tuple[str, ...]] = {}
        self.tools: dict[str, ToolSpec] = {tool.name: tool for tool in plan.tools}
        self.facts: dict[str, int] = dict.fromkeys(plan.facts or (), 0)
        self.closed_world = plan.facts is not None
        self.counts: dict[TaskState, int] = dict.fromkeys(TaskState, 0)
        self.unsatisfied_count = 0
        self.aborted: str | None = None
        self.has_early_skips = False
        self.version = 0
        self.revision = 0
        self.revision_hash = ""
        self.strips_problems: dict[tuple[frozenset[TaskId], frozenset[str]], StripsProblem] = {}
        self.stuck: dict[TaskId, None] = {}
        self.entries: dict[TaskId, TaskEntry] = {}
        self.results = TaskResults(self.entries)
        self.pool = ResourcePool(plan.resources, self.tools)
        self.scope = TaskScope(self.tools, self.pool.capacity, plan.objects)
        self.deadlines = Deadlines()
        self.ready_queue = ReadyQueue()
        self.claimed_count = 0
        self.last_claim = 0
        self.parked: dict[TaskId, TaskEntry] = {}
        self.running_actions: dict[TaskId, GroundAction] = {}
        self.kept_resources: dict[AttemptId, Mapping[str, float]] = {}
        self.ended_attempts = 0
        self.outcomes: dict[str, deque[bool]] = {}
        self.breakers: dict[str, ToolBreaker] = {}
        self.dependency_index = DependencyIndex(
            self.tools,
            self.pool,
            self.context,
            self.results.output_of,
            FactIndex() if self.closed_world and any(map(uses_facts, plan.tools)) else None,
        )
        if not empty:
            for _ in self.load_tasks():
                pass

    def load_tasks(self) -> Iterator[None]:
        """Load the tasks of the plan, with pauses for other work."""
        tasks, size = (
            self.plan.tasks,
            _GROUNDING_BATCH_SIZE if self.closed_world else _TASK_BATCH_SIZE,
        )
        for start in range(0, len(tasks), size):
            for task in tasks[start : start + size]:
                self.insert(task, None)
            yield
        self.counts[_PENDING] += len(tasks)
        entries = list(self.entries.values())
        for start in range(0, len(entries), _TASK_BATCH_SIZE):
            for entry in entries[start : start + _TASK_BATCH_SIZE]:
                if entry.fields["depends_on"]:
                    self.link(entry)
                else:
                    self.make_ready(entry)
            yield

    def __contains__(self, task_id: object) -> bool:
        return task_id in self.entries

    def __iter__(self) -> Iterator[TaskEntry]:
        return iter(self.entries.values())

    def __len__(self) -> int:
        return len(self.entries)

    def entry(self, task_id: TaskId) -> TaskEntry:
        """Return the runtime state of a task.

        Raises:
            UnknownTask: no task, past ones included, has this id.
        """
        try:
            return self.entries[task_id]
        except (KeyError, TypeError):  # TypeError: what was given has no hash
            raise UnknownTask(task_id) from None

    def leaves(self, entry: TaskEntry) -> list[TaskEntry]:
        """Return the tasks that stand in the place of one now: itself, or what replaced it."""
        leaves, stack = list[TaskEntry](), [entry]
        while stack:
            entry = stack.pop()
            stack += map(self.entries.__getitem__, reversed(entry.replaced_by))
            if not entry.replaced_by:
                leaves.append(entry)
        return leaves

    def arguments(self, entry: TaskEntry) -> JsonObject:
        """Return the arguments of a task with every `${...}` reference replaced by its value.

        Raises:
            ExpressionError: a reference has no value yet.
        """
        return resolve_references(
            entry.task.arguments, context=self.context, result_of=self.results.output_of
        )

    def evaluate(self, condition: str) -> bool:
        """Return whether a condition holds now.

        Raises:
            ExpressionError: it cannot be evaluated.
        """
        return Condition.parse(condition).evaluate(self.context, self.results)

    # Deadlines

    def advance(self, now: float) -> list[tuple[TaskEntry, AttemptId]]:
        """Make tasks ready whose backoff is over, and return the overdue attempts."""
        overdue = []
        for entry, attempt in self.deadlines.pop_due(now):
            if attempt is None:
                self.version += 1
                entry.not_before = None
                if entry.state is not _PENDING:
                    self.make_ready(entry)
            else:
                overdue.append((entry, attempt))
        return overdue

    def wait_until(self, entry: TaskEntry, due: float | None) -> None:
        """Keep a task from starting before a point in time, in seconds since the epoch."""
        entry.not_before = due
        if due is not None:
            self.deadlines.add(due, entry, None)

    # Tasks and dependencies

    def insert(self, task: Task, parent: TaskEntry | None) -> TaskEntry:
        """Add a task without its dependencies, which `link` adds; the caller counts it as PENDING."""
        fields: TaskFields = task.__dict__  # type: ignore[assignment]  # pydantic keeps them there, defaults as well
        task_id = fields["id"]
        root, iteration = (task_id, 0) if parent is None else (parent.root, parent.iteration + 1)
        entry = TaskEntry(
            task, len(self.entries), parent, fields, task_id, fields["priority"], root, iteration
        )
        self.entries[task_id] = entry
        if fields["on_stale"] == "redo":
            self.redoes_stale = True
        if fields["tool"] or fields["arguments"] or fields["when"] or self.pool.limited:
            self.dependency_index.add(task)
        if parent is None and not fields["optional"]:
            entry.counts_as_unsatisfied = True
            self.unsatisfied_count += 1
        return entry

    def link(self, entry: TaskEntry) -> None:
        """Make a task wait for its dependencies; a new one is ready if there are none."""
        for dep in entry.fields["depends_on"]:
            needed = self.entries[dep]
            if isinstance(needed.dependents, tuple):
                needed.dependents = []
            needed.dependents.append(entry)
            entry.unsatisfied_dependencies += not needed.satisfied
        if not entry.unsatisfied_dependencies and entry.state is _PENDING:
            self.make_ready(entry)

    def satisfy_dependents(self, entry: TaskEntry) -> None:
        """Count a task that is now satisfied for its dependents, and for the task that it replaced."""
        satisfied: TaskEntry | None = entry
        while satisfied is not None:
            if satisfied.counts_as_unsatisfied:
                satisfied.counts_as_unsatisfied = False
                self.unsatisfied_count -= 1
            for waiting in satisfied.dependents:
                waiting.unsatisfied_dependencies -= 1
                if not waiting.unsatisfied_dependencies and waiting.state is _PENDING:
                    self.make_ready(waiting)
            satisfied = satisfied.sink_of
            if satisfied is not None:
                satisfied.unsatisfied_sinks -= 1
                if satisfied.unsatisfied_sinks:
                    return

    def unsatisfy_dependents(self, entry: TaskEntry) -> None:
        """Undo `satisfy_dependents` for a task that is about to wait again."""
        stack = [entry]
        while stack:
            unsatisfied = stack.pop()
            for waiting in unsatisfied.dependents:
                waiting.unsatisfied_dependencies += 1
                self.update_readiness(waiting)
                self.has_early_skips = self.has_early_skips or waiting.state is TaskState.SKIPPED
            original = unsatisfied.sink_of
            if original is not None:
                if not original.unsatisfied_sinks:
                    stack.append(original)
                original.unsatisfied_sinks += 1
                self.update_unsatisfied_count(original)

    def update_unsatisfied_count(self, entry: TaskEntry) -> None:
        """Recompute whether a task counts among the required lineages that are not satisfied."""
        counts = (
            entry.parent is None
            and not entry.removed
            and not entry.task.optional
            and not entry.satisfied
        )
        if counts is not entry.counts_as_unsatisfied:
            entry.counts_as_unsatisfied = counts
            self.unsatisfied_count += 1 if counts else -1

    # States

    def transition(self, entry: TaskEntry, event: TaskEvent) -> None:
        """Move a task to its next state.

        Raises:
            IllegalTransition: the event does not fit its state; nothing has changed.
        """
        state = entry.state
        follows = _TRANSITIONS_BY_EVENT[event].get(state) or transition(state, event, entry.id)
        counts = self.counts
        counts[state] -= 1
        counts[follows] += 1
        entry.state = follows
        if event in _PROGRESS_EVENTS:
            return
        if entry.claim:
            self.return_claim(entry)
        if follows in STUCK:
            self.stuck[entry.id] = None
            entry.not_before = None
        elif state in STUCK:
            del self.stuck[entry.id]
        if follows in FINISHED:
            entry.not_before = None
            if self.dependency_index.resource_users:
                self.dependency_index.discard_user(entry.task)

    def make_ready(self, entry: TaskEntry) -> None:
        """Queue a task whose dependencies are satisfied, at once or when its backoff is over."""
        if entry.not_before is None:
            self.transition(entry, _SATISFY)
            self.ready_queue.push(entry)
        else:
            self.transition(entry, TaskEvent.WAIT)

    def update_readiness(self, entry: TaskEntry) -> None:
        """Make the state of a waiting task agree with its dependencies."""
        if entry.state is _PENDING and not entry.unsatisfied_dependencies:
            self.make_ready(entry)
        elif (
            entry.unsatisfied_dependencies
            and entry.state in WAITING
            and entry.state is not _PENDING
        ):
            self.transition(entry, TaskEvent.UNSATISFY)

    def end_attempt(self, entry: TaskEntry, *, succeeded: bool | None = None) -> None:
        """End the running attempt of a task, if it has one: count its outcome, if it has any, and release its resources."""
        entry.attempt = entry.deadline = entry.effects = None
        if not succeeded:
            entry.reads, entry.changed_context = None, False
        if entry.reserved is not None:
            self.pool.release(entry.reserved)
            entry.reserved, entry.pass_over_count = None, 0
        if self.closed_world:
            self.running_actions.pop(entry.id, None)
            self.unpark()
        elif self.breakers:
            self.unpark()
        if succeeded is not None:
            self.ended_attempts += 1
            entry.end_number = self.ended_attempts
            tool = entry.fields["tool"]
            if tool is not None:
                outcomes = self.outcomes.get(tool)
                if outcomes is None:
                    outcomes = self.outcomes[tool] = deque(maxlen=MAX_OUTCOMES_PER_TOOL)
                outcomes.append(succeeded)

    # Dispatch: each ready task is handed to one worker, with the resources that it takes

    @property
    def quiescent(self) -> bool:
        """True if no task runs, backs off, is handed out, or could be handed out.

        A tool that was made unavailable by its breaker once is waited for, like a task that backs off.
        """
        if (
            self.claimed_count
            or self.kept_resources
            or any(self.counts[state] for state in _IN_PROGRESS_STATES)
        ):
            return False
        for name, breaker in self.breakers.items() if self.unsatisfied_count else ():
            if breaker.openings == 1 and not self.tools[name].available:
                users = self.dependency_index.resource_users.get(name, ())
                if any(self.entries[task_id].state in WAITING for task_id in users):
                    return False
        if not self.counts[_READY]:
            return True
        for queue in (self.ready_queue, *self.ready_queue.reserved.values()):
            if (entry := self.claim_next(queue)) is not None:
                self.return_claim(entry)
                return False
        return True

    def claim_next(self, queue: ReadyQueue | None = None) -> TaskEntry | None:
        """Claim the next ready task whose tool, resources and facts are there; `return_claim` returns it.

        A task that lacks one of them is parked and not considered again before that may have changed.

        Args:
            queue: the queue of a lineage that is reserved; by default that of all others.
        """
        pool, queue = self.pool, queue or self.ready_queue
        passed_over: list[TaskEntry] = []
        while (entry := queue.pop()) is not None:
            name = entry.fields["tool"]
            if name is None and not pool.limited:
                break
            tool = self.tools.get(name) if name else None
            demand = pool.demand(entry.task) if pool.limited else None
            lacking = (tool is not None and not tool.available) or not (
                demand is None or pool.can_ever_fit(demand)
            )
            breaker = self.breakers.get(name or "") if self.breakers else None
            lacking = lacking or (breaker is not None and not breaker.admits(entry))
            if not lacking and tool is not None and self.closed_world:
                lacking = self._interferes(entry)
            if lacking:
                self.parked[entry.id] = entry
                continue
            if demand is None:
                break
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
            if (
                self.breakers
                and (breaker := self.breakers.get(entry.fields["tool"] or "")) is not None
            ):
                breaker.trial = entry
            self.last_claim += 1
            entry.claim = self.last_claim
            self.claimed_count += 1
        return entry

    def _interferes(self, entry: TaskEntry) -> bool:
        """Return whether a fact that a task requires does not hold, or its effects would interfere with running tasks."""
        action, _ = self.dependency_index.ground(entry.task)
        running = self.running_actions.values()
        return not action.requires <= self.facts.keys() or any(map(action.interferes_with, running))

    def return_claim(self, entry: TaskEntry, claim: int | None = None) -> None:
        """End the claim of a task that is not going to be started; if it is still ready, it is queued again.

        Args:
            entry: the task.
            claim: the number of the claim; does nothing if that one is over.
        """
        if not entry.claim or claim not in (None, entry.claim):
            return
        entry.claim = 0
        self.claimed_count -= 1
        if entry.reserved is not None:
            self.pool.release(entry.reserved)
            entry.reserved, entry.pass_over_count = None, 0
        if entry.state is _READY:
            self.ready_queue.push(entry)
        if self.breakers:
            self.unpark()

    def reserve(self, root: TaskEntry, on_push: Callable[[], None]) -> None:
        """Queue the tasks of a lineage apart, for somebody who executes it alone and is called when one was added."""
        queue = self.ready_queue.reserved[root.id] = ReadyQueue(on_push)
        for entry in self.leaves(root) if root.replaced_by else (root,):
            if entry.state is _READY:
                self.ready_queue.withdraw(entry)
                queue.push(entry)

    def unreserve(self, root: TaskEntry) -> None:
        """Queue the tasks of a lineage with all others again."""
        for *_, entry in self.ready_queue.reserved.pop(root.id):
            self.ready_queue.push(entry)

    def lacks(self, entry: TaskEntry) -> str:
        """Return what a claimed task lacks now, in words; its tool or resources may have gone since it was claimed."""
        pool, name = self.pool, entry.fields["tool"]
        if name is None and not pool.limited:
            return ""
        tool = self.tools.get(name) if name else None
        if tool is not None and not tool.available:
            return f"its tool {name!r} is unavailable"
        demand = pool.demand(entry.task)
        if not pool.can_ever_fit(demand) or not pool.fits_now(
            dict.fromkeys(demand, 0.0) if entry.reserved else demand
        ):
            return "its resources are no longer there"
        return (
            "its facts do not hold"
            if tool is not None and self.closed_world and self._interferes(entry)
            else ""
        )

    def keep_resources(self, entry: TaskEntry, attempt: AttemptId) -> None:
        """Keep the resources of an attempt in use beyond its end, until its body has stopped (`free_resources`)."""
        if self.pool.limited and (demand := self.pool.demand(entry.task)):
            self.pool.acquire(demand)
            self.kept_resources[attempt] = demand

    def free_resources(self, attempt: AttemptId) -> None:
        """Free the resources that were kept for the body of an attempt."""
        self.pool.release(self.kept_resources.pop(attempt, {}))

    def unpark(self) -> None:
        """Return all parked tasks to the queue."""
        parked, self.parked = self.parked, {}
        for entry in parked.values():
            self.ready_queue.push(entry)

    def requeue(self, entry: TaskEntry) -> None:
        """Queue a task anew after its position, tool or resources have changed."""
        self.parked.pop(entry.id, None)
        self.return_claim(entry)
        if entry.state is _READY:
            self.ready_queue.push(entry)

    def hold(self, entries: Sequence[TaskEntry]) -> None:
        """Keep tasks from being handed out until they are released."""
        for entry in entries:
            entry.hold_count += 1

    def release(self, entries: Sequence[TaskEntry]) -> None:
        """Release tasks that were held."""
        for entry in entries:
            entry.hold_count -= 1
            if not entry.hold_count and entry.state is _READY:
                self.ready_queue.push(entry)
