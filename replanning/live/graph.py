"""Tasks as they run, and how they hang together: states, dependencies, lineage, points in time.

The methods with a leading underscore are the primitives of which `LivePlan.fold` and `Draft.commit` are made;
nothing else calls them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from replanning.errors import NoResult, UnknownTask
from replanning.live.claims import Dispatcher
from replanning.live.entries import Deadlines, ResourcePool, TaskEntry
from replanning.live.states import FINISHED, STUCK, TRANSITIONS, WAITING, TaskEvent, TaskState, transition
from replanning.live.uses import DependencyIndex
from replanning.plan.conditions import Condition
from replanning.plan.document import Plan
from replanning.plan.references import copy_json, resolve_references
from replanning.plan.tasks import Task, ToolSpec
from replanning.plan.types import AttemptId, JsonObject, JsonValue, TaskId


class TaskResults(Mapping[str, JsonValue]):
    """The results of finished tasks by the id of their lineage's root (or any id in it)."""

    __slots__ = ("_graph",)

    def __init__(self, graph: TaskGraph) -> None:
        self._graph = graph

    def __repr__(self) -> str:
        return f"<Results of {list(self)}>"

    def __getitem__(self, key: str) -> JsonValue:
        try:
            return self.output_of(TaskId(key))
        except UnknownTask as error:
            raise KeyError(str(error)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.outputs())

    def __len__(self) -> int:
        return len(self.outputs())

    def output_of(self, task_id: TaskId, *, stored_only: bool = False) -> JsonValue:
        """The output found through the lineage of a task; a mapping when several sinks replaced it.

        Args:
            task_id: the task, or one that it replaced.
            stored: whether outputs that only this process has are left out.

        Raises:
            NoResult: it has no result yet.
            UnknownTask: there is no such task.
        """
        graph = self._graph
        entry = graph.entry(task_id)
        while entry.state is TaskState.REPLACED_BY_REPLAN:
            sinks = graph.sinks(entry)
            if len(sinks) > 1:
                return {sink: self.output_of(sink, stored_only=stored_only) for sink in sinks}
            entry = graph.entry(sinks[0])
        if entry.state is TaskState.SKIPPED:
            return None
        if entry.state is not TaskState.DONE:
            raise NoResult(task_id, f"it is {entry.state}")
        if not entry.recoverable and (stored_only or entry.output is None):
            raise NoResult(task_id, "it could not be stored and was lost when the run was resumed")
        return entry.output

    def outputs(self) -> dict[str, JsonValue]:
        """The results that there are, by the ids of the tasks that were there at first."""
        found: dict[str, JsonValue] = {}
        for entry in self._graph:
            if entry.parent is not None:
                continue
            if entry.state is TaskState.DONE and entry.recoverable:
                found[entry.id] = entry.output
            elif entry.satisfied:
                with suppress(NoResult):
                    found[entry.id] = self.output_of(entry.id)
        return found


class CopyOnRead(Mapping[str, JsonValue]):
    """Values of a run as one attempt has them: what it does to arrays and objects, it does to its own."""

    __slots__ = ("_copies", "_shared")

    def __init__(self, shared: Mapping[str, JsonValue]) -> None:
        self._shared = shared
        self._copies: dict[str, tuple[JsonValue, JsonValue]] = {}

    def __repr__(self) -> str:
        return repr(self._shared)

    def __getitem__(self, key: str) -> JsonValue:
        value = self._shared[key]
        if not isinstance(value, list | dict):
            return value
        known = self._copies.get(key)
        if known is None or known[0] is not value:
            known = self._copies[key] = value, copy_json(value)
        return known[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shared)

    def __len__(self) -> int:
        return len(self._shared)


_READY, _PENDING = TaskState.READY, TaskState.PENDING

_SATISFY = TaskEvent.SATISFY

_TASK_BATCH_SIZE, _GROUNDING_BATCH_SIZE = 500, 100
"""How many tasks are taken in between two pauses; fewer where what each needs and brings about is worked out."""

_TRANSITIONS_BY_EVENT: Final = {
    event: {s: follows for (s, e), follows in TRANSITIONS.items() if e is event} for event in TaskEvent
}
"""The table of transitions by event, to be looked into without making a pair first."""

_PROGRESS_EVENTS: Final = frozenset({TaskEvent.SATISFY, TaskEvent.START})
"""Events by which no task finishes, gets stuck or comes loose again."""

_IN_PROGRESS_STATES = (TaskState.RUNNING, TaskState.BACKOFF, TaskState.NEEDS_CONTINUATION)


class TaskGraph:
    """The tasks of a running plan.

    Args:
        plan: the plan document to start from.
        empty: whether its tasks are left to `load_tasks`.
    """

    # With slots, which are quicker to look at than a dict with as many attributes.
    __slots__ = (
        "_deadlines",
        "_entries",
        "aborted",
        "context",
        "counts",
        "dependency_index",
        "dispatcher",
        "facts",
        "has_early_skips",
        "plan",
        "pool",
        "results",
        "stuck",
        "tools",
        "unsatisfied_count",
        "version",
    )

    def __init__(self, plan: Plan, *, empty: bool = False) -> None:
        self.plan = plan
        self.context: JsonObject = dict(plan.context)
        self.tools: dict[str, ToolSpec] = {tool.name: tool for tool in plan.tools}
        self.facts: dict[str, None] = dict.fromkeys(plan.facts or ())
        self.pool = ResourcePool(plan.resources)
        self.counts: dict[TaskState, int] = dict.fromkeys(TaskState, 0)
        self.unsatisfied_count = 0
        self.aborted: str | None = None
        self.has_early_skips = False
        """Whether a task was ever skipped before what it depends on was settled."""
        self.stuck: dict[TaskId, None] = {}
        self.dispatcher = Dispatcher(self)
        self.dependency_index = DependencyIndex(self)
        self.results = TaskResults(self)
        self._entries: dict[TaskId, TaskEntry] = {}
        self._deadlines = Deadlines()
        self.version = 0
        """Counts what has happened to the plan; a draft holds as long as this stays the same."""
        if not empty:
            for _ in self.load_tasks():
                pass

    def load_tasks(self) -> Iterator[None]:
        """Take in the tasks of the plan, and pause now and then so that something else may be done."""
        for tasks in _batched(
            self.plan.tasks, _GROUNDING_BATCH_SIZE if self.plan.facts is not None else _TASK_BATCH_SIZE
        ):
            for task in tasks:
                self._insert(task, None)
            self.counts[_PENDING] += len(tasks)
            yield
        entries = list(self._entries.values())
        for slice_ in _batched(entries):
            for entry in slice_:
                if entry.fields["depends_on"]:
                    self._link(entry)
            yield
        for slice_ in _batched(entries):
            for entry in slice_:
                if not entry.unsatisfied_dependencies:
                    self._make_ready(entry)
            yield

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._entries

    def __iter__(self) -> Iterator[TaskEntry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, task_id: TaskId) -> TaskEntry:
        """The running state of a task.

        Raises:
            UnknownTask: no task, past ones included, has this id.
        """
        try:
            return self._entries[task_id]
        except KeyError:
            raise UnknownTask(task_id) from None

    def sinks(self, entry: TaskEntry) -> tuple[TaskId, ...]:
        """The tasks that stand for a replaced one."""
        return tuple(i for i in entry.replaced_by if self._entries[i].sink_of is entry)

    def arguments(self, entry: TaskEntry) -> JsonObject:
        """The arguments of a task with every `${...}` reference replaced by its value.

        Raises:
            ExpressionError: a reference finds nothing.
        """
        return resolve_references(entry.task.arguments, context=self.context, result_of=self.results.output_of)

    def evaluate(self, condition: str) -> bool:
        """Whether a condition holds now.

        Raises:
            ExpressionError: it cannot be evaluated.
        """
        return Condition.parse(condition).evaluate(self.context, self.results)

    @property
    def quiescent(self) -> bool:
        """Whether nothing runs, backs off, is handed out, or could be."""
        claims = self.dispatcher
        if claims.claimed_count or any(self.counts[state] for state in _IN_PROGRESS_STATES):
            return False
        if not self.counts[_READY]:
            return True
        found = claims.claim_next()
        if found is not None:
            claims.return_claim(found, found.claim)
        return found is None

    # Points in time

    def next_deadline(self) -> float | None:
        """When `advance` has something to do next, in seconds since the epoch."""
        return self._deadlines.next_due()

    def advance(self, now: float) -> list[tuple[TaskEntry, AttemptId]]:
        """Make ready what has backed off long enough; returns the attempts that are overdue."""
        overdue = []
        for entry, attempt in self._deadlines.pop_due(now):
            if attempt is None:
                self.version += 1
                entry.not_before = None
                if entry.state is not _PENDING:
                    self._make_ready(entry)
            else:
                overdue.append((entry, attempt))
        return overdue

    # Primitives

    def _insert(self, task: Task, parent: TaskEntry | None) -> TaskEntry:
        entries = self._entries
        entry = TaskEntry(task, len(entries), parent)
        entries[entry.id] = entry
        fields = entry.fields
        if fields["tool"] or fields["arguments"] or fields["when"] or self.dispatcher.has_resources:
            self.dependency_index.add(task)
        if parent is None and not fields["optional"]:
            entry.counts_as_unsatisfied = True
            self.unsatisfied_count += 1
        return entry

    def _link(self, entry: TaskEntry) -> None:
        for dep in entry.task.depends_on:
            needed = self._entries[dep]
            if isinstance(needed.dependents, tuple):
                needed.dependents = []
            needed.dependents.append(entry)
            entry.unsatisfied_dependencies += not needed.satisfied

    def _unlink(self, entry: TaskEntry) -> None:
        for dep in entry.task.depends_on:
            needed = self._entries[dep]
            assert isinstance(needed.dependents, list), "the entry was linked"
            needed.dependents.remove(entry)
        entry.unsatisfied_dependencies = 0

    def _update_readiness(self, entry: TaskEntry) -> None:
        """Make the state of a waiting task agree with its dependencies."""
        if entry.state is _PENDING and not entry.unsatisfied_dependencies:
            self._make_ready(entry)
        elif entry.unsatisfied_dependencies and entry.state in WAITING and entry.state is not _PENDING:
            self._transition(entry, TaskEvent.UNSATISFY)
            self.dispatcher.end_claim(entry)

    def _make_ready(self, entry: TaskEntry) -> None:
        """Let a task run that waits for no other, at once or when its time has come."""
        if entry.not_before is None:
            self._transition(entry, _SATISFY)
            self.dispatcher.queue.push(entry)
        else:
            self._transition(entry, TaskEvent.WAIT)

    def _transition(self, entry: TaskEntry, event: TaskEvent) -> None:
        state = entry.state
        follows = _TRANSITIONS_BY_EVENT[event].get(state) or transition(state, event, entry.id)
        counts = self.counts
        counts[state] -= 1
        counts[follows] += 1
        entry.state = follows
        if event in _PROGRESS_EVENTS:
            return
        if follows in STUCK:
            self.stuck[entry.id] = None
            entry.not_before = None
        elif state in STUCK:
            del self.stuck[entry.id]
        if follows in FINISHED:
            entry.not_before = None
            if self.dependency_index.resource_users:
                self.dependency_index.discard_user(entry.task)

    def _update_unsatisfied_count(self, entry: TaskEntry) -> None:
        wanted = entry.parent is None and not entry.removed and not entry.task.optional and not entry.satisfied
        if wanted is not entry.counts_as_unsatisfied:
            entry.counts_as_unsatisfied = wanted
            self.unsatisfied_count += 1 if wanted else -1

    def _satisfy_dependents(self, entry: TaskEntry) -> None:
        """Let what waits for a task that is now satisfied go on."""
        done: TaskEntry | None = entry
        while done is not None:
            if done.counts_as_unsatisfied:
                done.counts_as_unsatisfied = False
                self.unsatisfied_count -= 1
            for waiting in done.dependents:
                waiting.unsatisfied_dependencies -= 1
                if not waiting.unsatisfied_dependencies and waiting.state is _PENDING:
                    self._make_ready(waiting)
            done = done.sink_of
            if done is not None:
                done.unsatisfied_sinks -= 1
                if done.unsatisfied_sinks:
                    return

    def _end_attempt(self, entry: TaskEntry) -> None:
        entry.attempt, entry.deadline = None, None
        if entry.reserved is not None or self.dispatcher.closed_world:
            self.dispatcher.release_resources(entry)

    def _unsatisfy_dependents(self, entry: TaskEntry) -> None:
        """Take back what `_satisfy_dependents` did: the task is about to be unsatisfied again."""
        stack = [entry]
        while stack:
            undone = stack.pop()
            for waiting in undone.dependents:
                waiting.unsatisfied_dependencies += 1
                self._update_readiness(waiting)
                self.has_early_skips = self.has_early_skips or waiting.state is TaskState.SKIPPED
            original = undone.sink_of
            if original is not None:
                if not original.unsatisfied_sinks:
                    stack.append(original)
                original.unsatisfied_sinks += 1
                self._update_unsatisfied_count(original)

    def _wait_until(self, entry: TaskEntry, due: float | None) -> None:
        """Let a task run no earlier than at a point in time, whatever it waits for meanwhile."""
        entry.not_before = due
        if due is not None:
            self._deadlines.add(due, entry, None)


ItemT = TypeVar("ItemT")


def _batched(items: Sequence[ItemT], size: int = _TASK_BATCH_SIZE) -> Iterator[Sequence[ItemT]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
