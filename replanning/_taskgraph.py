"""Tasks as they run, and how they hang together: states, dependencies, lineage, points in time.

The methods with a leading underscore are the primitives of which `LivePlan.fold` and `Draft.commit` are made;
nothing else calls them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from replanning._claims import Claims
from replanning._entries import Deadlines, Entry, ResourcePool
from replanning._errors import UnknownTask
from replanning._expressions import Condition
from replanning._ids import AttemptId, TaskId
from replanning._plan import JsonObject, Plan, Task, ToolSpec
from replanning._references import resolve
from replanning._results import Results
from replanning._states import FINISHED, STUCK, TRANSITIONS, WAITING, TaskEvent, TaskState, transition
from replanning._usage import Usage

if TYPE_CHECKING:
    from replanning._draft import Draft

_READY, _PENDING = TaskState.READY, TaskState.PENDING
_SATISFY = TaskEvent.SATISFY
_SLICE, _SLICE_OF_FACTS = 500, 100
"""How many tasks are taken in between two pauses; fewer where what each needs and brings about is worked out."""

_MOVES: Final = {event: {s: follows for (s, e), follows in TRANSITIONS.items() if e is event} for event in TaskEvent}
"""The table of transitions by event, to be looked into without making a pair first."""

_ORDINARY: Final = frozenset({TaskEvent.SATISFY, TaskEvent.START})
"""Events by which no task finishes, gets stuck or comes loose again."""

_OPEN = (TaskState.RUNNING, TaskState.BACKOFF, TaskState.NEEDS_CONTINUATION)


class TaskGraph:
    """The tasks of a running plan.

    Args:
        plan: the plan document to start from.
        empty: whether its tasks are left to `fill`.
    """

    # With slots, which are quicker to look at than a dict with as many attributes.
    __slots__ = (
        "_deadlines",
        "_entries",
        "_staged",
        "aborted",
        "claims",
        "context",
        "counts",
        "facts",
        "loose",
        "plan",
        "pool",
        "results",
        "stuck",
        "tools",
        "unsatisfied",
        "usage",
    )

    def __init__(self, plan: Plan, *, empty: bool = False) -> None:
        self.plan = plan
        self.context: JsonObject = dict(plan.context)
        self.tools: dict[str, ToolSpec] = {tool.name: tool for tool in plan.tools}
        self.facts: dict[str, None] = dict.fromkeys(plan.facts or ())
        self.pool = ResourcePool(plan.resources)
        self.counts: dict[TaskState, int] = dict.fromkeys(TaskState, 0)
        self.unsatisfied = 0
        self.aborted: str | None = None
        self.loose = False
        """Whether a task was ever skipped before what it depends on was settled."""
        self.stuck: dict[TaskId, None] = {}
        self.claims = Claims(self)
        self.usage = Usage(self)
        self.results = Results(self)
        self._entries: dict[TaskId, Entry] = {}
        self._deadlines = Deadlines()
        self._staged: dict[int, Draft] = {}
        """Changes that were staged against the plan exactly as it stands."""
        if not empty:
            for _ in self.fill():
                pass

    def fill(self) -> Iterator[None]:
        """Take in the tasks of the plan, and pause now and then so that something else may be done."""
        for tasks in _sliced(self.plan.tasks, _SLICE_OF_FACTS if self.plan.facts is not None else _SLICE):
            for task in tasks:
                self._insert(task, None)
            self.counts[_PENDING] += len(tasks)
            yield
        entries = list(self._entries.values())
        for slice_ in _sliced(entries):
            for entry in slice_:
                if entry.fields["depends_on"]:
                    self._link(entry)
            yield
        for slice_ in _sliced(entries):
            for entry in slice_:
                if not entry.missing:
                    self._ready(entry)
            yield

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, task_id: TaskId) -> Entry:
        """The running state of a task.

        Raises:
            UnknownTask: no task, past ones included, has this id.
        """
        try:
            return self._entries[task_id]
        except KeyError:
            raise UnknownTask(task_id) from None

    def sinks(self, entry: Entry) -> tuple[TaskId, ...]:
        """The tasks that stand for a replaced one."""
        return tuple(i for i in entry.replaced_by if self._entries[i].stands_for is entry)

    def arguments(self, entry: Entry) -> JsonObject:
        """The arguments of a task with every `${...}` reference replaced by its value.

        Raises:
            ExpressionError: a reference finds nothing.
        """
        return resolve(entry.task.arguments, context=self.context, result=self.results.of)

    def evaluate(self, condition: str) -> bool:
        """Whether a condition holds now.

        Raises:
            ExpressionError: it cannot be evaluated.
        """
        return Condition.parse(condition).evaluate(self.context, self.results)

    @property
    def quiescent(self) -> bool:
        """Whether nothing runs, backs off, is handed out, or could be."""
        claims = self.claims
        if claims.count or any(self.counts[state] for state in _OPEN):
            return False
        if not self.counts[_READY]:
            return True
        found = claims.take()
        if found is not None:
            claims.give_back(found, found.claimed)
        return found is None

    # Points in time

    def next_deadline(self) -> float | None:
        """When `advance` has something to do next, in seconds since the epoch."""
        return self._deadlines.next()

    def advance(self, now: float) -> list[tuple[Entry, AttemptId]]:
        """Make ready what has backed off long enough; returns the attempts that are overdue."""
        overdue = []
        for entry, attempt in self._deadlines.take(now):
            if attempt is None:
                entry.due = None
                if entry.state is not _PENDING:
                    self._ready(entry)
            else:
                overdue.append((entry, attempt))
        return overdue

    # Primitives

    def _insert(self, task: Task, parent: Entry | None) -> Entry:
        entries = self._entries
        entry = Entry(task, len(entries), parent)
        entries[entry.id] = entry
        fields = entry.fields
        if fields["tool"] or fields["arguments"] or fields["when"] or self.claims.pooled:
            self.usage.add(task)
        if parent is None and not fields["optional"]:
            entry.counted = True
            self.unsatisfied += 1
        return entry

    def _link(self, entry: Entry) -> None:
        for dep in entry.task.depends_on:
            needed = self._entries[dep]
            if isinstance(needed.dependents, tuple):
                needed.dependents = []
            needed.dependents.append(entry)
            entry.missing += not needed.satisfied

    def _unlink(self, entry: Entry) -> None:
        for dep in entry.task.depends_on:
            needed = self._entries[dep]
            assert isinstance(needed.dependents, list), "the entry was linked"
            needed.dependents.remove(entry)
        entry.missing = 0

    def _settle(self, entry: Entry) -> None:
        """Make the state of a waiting task agree with its dependencies."""
        if entry.state is _PENDING and not entry.missing:
            self._ready(entry)
        elif entry.missing and entry.state in WAITING and entry.state is not _PENDING:
            self._move(entry, TaskEvent.UNSATISFY)
            self.claims.drop(entry)

    def _ready(self, entry: Entry) -> None:
        """Let a task run that waits for no other, at once or when its time has come."""
        if entry.due is None:
            self._move(entry, _SATISFY)
            self.claims.queue.push(entry)
        else:
            self._move(entry, TaskEvent.WAIT)

    def _move(self, entry: Entry, event: TaskEvent) -> None:
        if self._staged:
            self._staged.clear()
        state = entry.state
        follows = _MOVES[event].get(state) or transition(state, event, entry.id)
        counts = self.counts
        counts[state] -= 1
        counts[follows] += 1
        entry.state = follows
        if event in _ORDINARY:
            return
        if follows in STUCK:
            self.stuck[entry.id] = None
            entry.due = None
        elif state in STUCK:
            del self.stuck[entry.id]
        if follows in FINISHED:
            entry.due = None
            if self.usage.users:
                self.usage.finish(entry.task)

    def _recount(self, entry: Entry) -> None:
        wanted = entry.parent is None and not entry.removed and not entry.task.optional and not entry.satisfied
        if wanted is not entry.counted:
            entry.counted = wanted
            self.unsatisfied += 1 if wanted else -1

    def _release(self, entry: Entry) -> None:
        """Let what waits for a task that is now satisfied go on."""
        done: Entry | None = entry
        while done is not None:
            if done.counted:
                done.counted = False
                self.unsatisfied -= 1
            for waiting in done.dependents:
                waiting.missing -= 1
                if not waiting.missing and waiting.state is _PENDING:
                    self._ready(waiting)
            done = done.stands_for
            if done is not None:
                done.open_sinks -= 1
                if done.open_sinks:
                    return

    def _end_attempt(self, entry: Entry) -> None:
        entry.attempt, entry.deadline = None, None
        if entry.taken is not None or self.claims.closed:
            self.claims.end(entry)

    def _withhold(self, entry: Entry) -> None:
        """Take back what `_release` did: the task is about to be unsatisfied again."""
        stack = [entry]
        while stack:
            undone = stack.pop()
            for waiting in undone.dependents:
                waiting.missing += 1
                self._settle(waiting)
                self.loose = self.loose or waiting.state is TaskState.SKIPPED
            original = undone.stands_for
            if original is not None:
                if not original.open_sinks:
                    stack.append(original)
                original.open_sinks += 1
                self._recount(original)

    def _wait_until(self, entry: Entry, due: float | None) -> None:
        """Let a task run no earlier than at a point in time, whatever it waits for meanwhile."""
        entry.due = due
        if due is not None:
            self._deadlines.add(due, entry, None)


ItemT = TypeVar("ItemT")


def _sliced(items: Sequence[ItemT], size: int = _SLICE) -> Iterator[Sequence[ItemT]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
