"""Graph of the tasks of a running plan: states, dependencies, lineages, results and deadlines.

`LivePlan` folds records into the graph and `Draft` commits changes to it; nothing else calls the methods that
move tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from replanning.errors import NoResult, UnknownTask
from replanning.live.dispatch import Dispatcher
from replanning.live.entries import Deadlines, ResourcePool, TaskEntry
from replanning.live.index import DependencyIndex
from replanning.live.states import FINISHED, STUCK, TRANSITIONS, WAITING, TaskEvent, TaskState, transition
from replanning.plan.conditions import Condition
from replanning.plan.document import Plan
from replanning.plan.json_values import copy_json
from replanning.plan.references import resolve_references
from replanning.plan.tasks import Task, ToolSpec
from replanning.plan.types import AttemptId, JsonObject, JsonValue, TaskId


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

    def output_of(self, task_id: TaskId, *, stored_only: bool = False) -> JsonValue:
        """Return the output found through the lineage of a task; a mapping if several sinks replaced it.

        Args:
            task_id: the task, or one that it replaced.
            stored_only: leave out outputs that exist only in this process.

        Raises:
            NoResult: the task has no result yet.
            UnknownTask: there is no such task.
        """
        entry = self._entries.get(task_id)
        if entry is None:
            raise UnknownTask(task_id)
        while entry.state is TaskState.REPLACED_BY_REPLAN:
            if len(entry.sinks) > 1:
                return {sink.id: self.output_of(sink.id, stored_only=stored_only) for sink in entry.sinks}
            entry = entry.sinks[0]
        if entry.state is TaskState.SKIPPED:
            return None
        if entry.state is not TaskState.DONE:
            raise NoResult(task_id, f"it is {entry.state}")
        if not entry.recoverable and (stored_only or entry.output is None):
            raise NoResult(task_id, "it could not be stored and was lost when the run was resumed")
        return entry.output

    def outputs(self) -> dict[str, JsonValue]:
        """Return the results that exist, by the ids of the roots."""
        outputs: dict[str, JsonValue] = {}
        for entry in self._entries.values():
            if entry.parent is not None:
                continue
            if entry.state is TaskState.DONE and entry.recoverable:
                outputs[entry.id] = entry.output
            elif entry.satisfied:
                with suppress(NoResult):
                    outputs[entry.id] = self.output_of(entry.id)
        return outputs


class CopyOnRead(Mapping[str, JsonValue]):
    """View of shared values that copies arrays and objects on first access, so that an attempt may change its own."""

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
        cached = self._copies.get(key)
        if cached is None or cached[0] is not value:
            cached = self._copies[key] = value, copy_json(value)
        return cached[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shared)

    def __len__(self) -> int:
        return len(self._shared)


_READY, _PENDING = TaskState.READY, TaskState.PENDING

_SATISFY = TaskEvent.SATISFY

_TASK_BATCH_SIZE, _GROUNDING_BATCH_SIZE = 500, 100
"""Tasks loaded between two pauses; fewer if their actions have to be grounded."""

_TRANSITIONS_BY_EVENT: Final = {
    event: {s: follows for (s, e), follows in TRANSITIONS.items() if e is event} for event in TaskEvent
}
"""The table of transitions by event, for lookups that do not build a pair first."""

_PROGRESS_EVENTS: Final = frozenset({TaskEvent.SATISFY, TaskEvent.START})
"""Events that neither lead into nor out of a finished or stuck state."""

_IN_PROGRESS_STATES = (TaskState.RUNNING, TaskState.BACKOFF, TaskState.NEEDS_CONTINUATION)


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
    """

    # Slots are faster to read than a dict with this many attributes.
    __slots__ = (
        "aborted",
        "context",
        "counts",
        "deadlines",
        "dependency_index",
        "dispatcher",
        "entries",
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
        closed_world = plan.facts is not None
        self.plan = plan
        self.context: JsonObject = dict(plan.context)
        self.tools: dict[str, ToolSpec] = {tool.name: tool for tool in plan.tools}
        self.facts: dict[str, None] = dict.fromkeys(plan.facts or ())
        self.counts: dict[TaskState, int] = dict.fromkeys(TaskState, 0)
        self.unsatisfied_count = 0
        self.aborted: str | None = None
        self.has_early_skips = False
        self.version = 0
        self.stuck: dict[TaskId, None] = {}
        self.entries: dict[TaskId, TaskEntry] = {}
        self.results = TaskResults(self.entries)
        self.pool = ResourcePool(plan.resources, self.tools)
        self.dependency_index = DependencyIndex(
            self.tools, self.pool, self.context, self.results.output_of, closed_world=closed_world
        )
        self.dispatcher = Dispatcher(
            self.tools, self.pool, self.facts, self.dependency_index, closed_world=closed_world
        )
        self.deadlines = Deadlines()
        if not empty:
            for _ in self.load_tasks():
                pass

    def load_tasks(self) -> Iterator[None]:
        """Load the tasks of the plan, with pauses for other work."""
        for tasks in _batched(
            self.plan.tasks, _GROUNDING_BATCH_SIZE if self.plan.facts is not None else _TASK_BATCH_SIZE
        ):
            for task in tasks:
                self.insert(task, None)
            self.counts[_PENDING] += len(tasks)
            yield
        entries = list(self.entries.values())
        for batch in _batched(entries):
            for entry in batch:
                if entry.fields["depends_on"]:
                    self.link(entry)
            yield
        for batch in _batched(entries):
            for entry in batch:
                if not entry.unsatisfied_dependencies:
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
        except KeyError:
            raise UnknownTask(task_id) from None

    def arguments(self, entry: TaskEntry) -> JsonObject:
        """Return the arguments of a task with every `${...}` reference replaced by its value.

        Raises:
            ExpressionError: a reference has no value yet.
        """
        return resolve_references(entry.task.arguments, context=self.context, result_of=self.results.output_of)

    def evaluate(self, condition: str) -> bool:
        """Return whether a condition holds now.

        Raises:
            ExpressionError: it cannot be evaluated.
        """
        return Condition.parse(condition).evaluate(self.context, self.results)

    @property
    def quiescent(self) -> bool:
        """True if no task runs, backs off, is handed out, or could be handed out."""
        dispatcher = self.dispatcher
        if dispatcher.claimed_count or any(self.counts[state] for state in _IN_PROGRESS_STATES):
            return False
        if not self.counts[_READY]:
            return True
        entry = dispatcher.claim_next()
        if entry is not None:
            dispatcher.return_claim(entry, entry.claim)
        return entry is None

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
        entries = self.entries
        entry = TaskEntry(task, len(entries), parent)
        entries[entry.id] = entry
        fields = entry.fields
        if fields["tool"] or fields["arguments"] or fields["when"] or self.pool.limited:
            self.dependency_index.add(task)
        if parent is None and not fields["optional"]:
            entry.counts_as_unsatisfied = True
            self.unsatisfied_count += 1
        return entry

    def link(self, entry: TaskEntry) -> None:
        """Make a task wait for its dependencies."""
        for dep in entry.task.depends_on:
            needed = self.entries[dep]
            if isinstance(needed.dependents, tuple):
                needed.dependents = []
            needed.dependents.append(entry)
            entry.unsatisfied_dependencies += not needed.satisfied

    def unlink(self, entry: TaskEntry) -> None:
        """Undo `link`."""
        for dep in entry.task.depends_on:
            needed = self.entries[dep]
            assert isinstance(needed.dependents, list), "the entry was linked"
            needed.dependents.remove(entry)
        entry.unsatisfied_dependencies = 0

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
        counts = entry.parent is None and not entry.removed and not entry.task.optional and not entry.satisfied
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
            self.dispatcher.queue.push(entry)
        else:
            self.transition(entry, TaskEvent.WAIT)

    def update_readiness(self, entry: TaskEntry) -> None:
        """Make the state of a waiting task agree with its dependencies."""
        if entry.state is _PENDING and not entry.unsatisfied_dependencies:
            self.make_ready(entry)
        elif entry.unsatisfied_dependencies and entry.state in WAITING and entry.state is not _PENDING:
            self.transition(entry, TaskEvent.UNSATISFY)
            self.dispatcher.end_claim(entry)

    def end_attempt(self, entry: TaskEntry) -> None:
        """End the running attempt of a task, if it has one, and release its resources."""
        entry.attempt, entry.deadline = None, None
        if entry.reserved is not None or self.dispatcher.closed_world:
            self.dispatcher.release_resources(entry)


ItemT = TypeVar("ItemT")


def _batched(items: Sequence[ItemT], size: int = _TASK_BATCH_SIZE) -> Iterator[Sequence[ItemT]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
