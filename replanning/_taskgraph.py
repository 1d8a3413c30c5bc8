"""Tasks as they run, and how they hang together: states, dependencies, lineage, the ready queue, resources.

The methods with a leading underscore are the primitives of which `LivePlan.fold` and `Draft.commit` are made;
nothing else calls them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

from replanning._entries import SKIP_AHEAD, Deadlines, Entry, ReadyQueue, ResourcePool
from replanning._errors import NoResult, UnknownTask
from replanning._expressions import Condition
from replanning._ids import AttemptId, TaskId
from replanning._plan import JsonObject, JsonValue, Plan, Task, ToolSpec
from replanning._references import find_references, resolve
from replanning._states import FINISHED, STUCK, TRANSITIONS, WAITING, TaskEvent, TaskState, transition

if TYPE_CHECKING:
    from replanning._draft import Draft
    from replanning._world import Use

_READY, _PENDING = TaskState.READY, TaskState.PENDING
_SATISFY = TaskEvent.SATISFY
_SLICE, _SLICE_OF_FACTS = 500, 100
"""How many tasks are taken in between two pauses; fewer where what each needs and brings about is worked out."""

_MOVES: Final = {event: {s: follows for (s, e), follows in TRANSITIONS.items() if e is event} for event in TaskEvent}
"""The table of transitions by event, to be looked into without making a pair first."""

_ORDINARY: Final = frozenset({TaskEvent.SATISFY, TaskEvent.START})
"""Events by which no task finishes, gets stuck or comes loose again."""

_OPEN = (TaskState.RUNNING, TaskState.BACKOFF, TaskState.NEEDS_CONTINUATION)


class TaskGraph(ABC):
    """The tasks of a running plan.

    Args:
        plan: the plan document to start from.
        empty: whether its tasks are left to `fill`.
    """

    # With slots, as an object with more than thirty attributes in a dict is slow to look at.
    __slots__ = (
        "_claim_number",
        "_claims",
        "_closed",
        "_deadlines",
        "_entries",
        "_parked",
        "_pooled",
        "_queue",
        "_staged",
        "_underway",
        "aborted",
        "context",
        "counts",
        "loose",
        "plan",
        "pool",
        "readers",
        "stuck",
        "tools",
        "unsatisfied",
        "users",
    )

    def __init__(self, plan: Plan, *, empty: bool = False) -> None:
        self.plan = plan
        self.context: JsonObject = dict(plan.context)
        self.tools: dict[str, ToolSpec] = {tool.name: tool for tool in plan.tools}
        self.pool = ResourcePool(plan.resources)
        self.counts: dict[TaskState, int] = dict.fromkeys(TaskState, 0)
        self.unsatisfied = 0
        self.aborted: str | None = None
        self.loose = False
        """Whether a task was ever skipped before what it depends on was settled."""
        self.stuck: dict[TaskId, None] = {}
        self.readers: dict[str, dict[TaskId, None]] = {}
        self.users: dict[str, dict[TaskId, None]] = {}
        self._entries: dict[TaskId, Entry] = {}
        self._queue = ReadyQueue()
        self._parked: dict[TaskId, Entry] = {}
        self._closed = plan.facts is not None
        self._underway: dict[TaskId, Use] = {}
        self._deadlines = Deadlines()
        self._claims = 0
        self._claim_number = 0
        self._staged: dict[int, Draft] = {}
        """Changes that were staged against the plan exactly as it stands."""
        self._pooled = bool(plan.resources) or any(t.resources for t in plan.tools)
        if not empty:
            for _ in self.fill():
                pass

    def fill(self) -> Iterator[None]:
        """Take in the tasks of the plan, and pause now and then so that something else may be done."""
        for tasks in _sliced(self.plan.tasks, _SLICE_OF_FACTS if self._closed else _SLICE):
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

    @property
    def size(self) -> int:
        """How many tasks there are, past ones included."""
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

    def result(self, task_id: TaskId, *, stored: bool = False) -> JsonValue:
        """The output found through the lineage of a task; a mapping when several sinks replaced it.

        Args:
            task_id: the task, or one that it replaced.
            stored: whether outputs that only this process has are left out.

        Raises:
            NoResult: it has no result yet.
            UnknownTask: there is no such task.
        """
        entry = self.entry(task_id)
        while entry.state is TaskState.REPLACED_BY_REPLAN:
            sinks = [self._entries[sink] for sink in self.sinks(entry)]
            if len(sinks) > 1:
                return {sink.id: self.result(sink.id, stored=stored) for sink in sinks}
            entry = sinks[0]
        if entry.state is TaskState.SKIPPED:
            return None
        if entry.state is not TaskState.DONE:
            raise NoResult(task_id, f"it is {entry.state}")
        if not entry.recoverable and (stored or entry.output is None):
            raise NoResult(task_id, "it could not be stored and was lost when the run was resumed")
        return entry.output

    def outputs(self) -> dict[str, JsonValue]:
        """The results that there are, by the ids of the tasks that were there at first."""
        found: dict[str, JsonValue] = {}
        for entry in self._entries.values():
            if entry.parent is not None:
                continue
            if entry.state is TaskState.DONE and entry.recoverable:
                found[entry.id] = entry.output
            elif entry.satisfied:
                with suppress(NoResult):
                    found[entry.id] = self.result(entry.id)
        return found

    def sinks(self, entry: Entry) -> tuple[TaskId, ...]:
        """The tasks that stand for a replaced one."""
        return tuple(i for i in entry.replaced_by if self._entries[i].stands_for is entry)

    def arguments(self, entry: Entry) -> JsonObject:
        """The arguments of a task with every `${...}` reference replaced by its value.

        Raises:
            ExpressionError: a reference finds nothing.
        """
        return resolve(entry.task.arguments, context=self.context, result=self.result)

    def evaluate(self, condition: str) -> bool:
        """Whether a condition holds now.

        Raises:
            ExpressionError: it cannot be evaluated.
        """
        return Condition.parse(condition).evaluate(self.context, Results(self))

    def waiting_for(self, task_id: TaskId) -> tuple[TaskId, ...]:
        """The tasks that wait for a task, also those that wait for what it replaced."""
        found: dict[TaskId, None] = {}
        entry: Entry | None = self.entry(task_id)
        while entry is not None:
            found.update(dict.fromkeys(waiting.id for waiting in entry.dependents if not waiting.removed))
            entry = entry.stands_for
        return tuple(found)

    def started_after(self, entry: Entry) -> list[TaskId]:
        """The tasks that run or are done and would not have started, were this one not satisfied."""
        found: list[TaskId] = []
        while True:
            found += [w.id for w in entry.dependents if w.state in (TaskState.RUNNING, TaskState.DONE)]
            if entry.stands_for is None or entry.stands_for.open_sinks:
                return found
            entry = entry.stands_for

    def demand(self, task: Task) -> Mapping[str, float]:
        """What a task takes of the resources: its own word, else its tool's."""
        tool = self.tools.get(task.tool) if task.tool else None
        return {**tool.resources, **task.resources} if tool and tool.resources else task.resources

    @property
    def quiescent(self) -> bool:
        """Whether nothing runs, backs off, is handed out, or could be."""
        if self._claims or any(self.counts[state] for state in _OPEN):
            return False
        if not self.counts[_READY]:
            return True
        found = self.claim()
        if found is not None:
            self.unclaim(found, found.claimed)
        return found is None

    # Handing out

    def claim(self) -> Entry | None:
        """Take the next ready task for which tool and resources are there; `unclaim` gives it back."""
        if self._pooled:
            found = self._fitting()
        else:
            found = self._queue.pop()
            while found is not None and found.fields["tool"] is not None and self._unavailable(found):
                self._parked[found.id] = found
                found = self._queue.pop()
        if found is not None:
            self._claim_number += 1
            found.claimed = self._claim_number
            self._claims += 1
        return found

    def _fitting(self) -> Entry | None:
        """Take the next ready task whose tool and resources are there out of the queue, and the resources."""
        passed: list[Entry] = []
        found = None
        while found is None and (entry := self._queue.pop()) is not None:
            if self._unavailable(entry):
                self._parked[entry.id] = entry
            elif self.pool.fits(demand := self.demand(entry.task)):
                self.pool.take(demand)
                entry.taken = demand
                found = entry
            else:
                passed.append(entry)
                if entry.passed >= SKIP_AHEAD or len(passed) >= SKIP_AHEAD:
                    break
        for entry in passed:
            entry.passed += found is not None
            self._queue.push(entry)
        return found

    def unclaim(self, entry: Entry, claim: int) -> None:
        """Return a task that was claimed and not started; nothing happens when that claim is over."""
        if claim and entry.claimed == claim:
            self._unclaim(entry)
            self._queue.push(entry)

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
        if fields["tool"] or fields["arguments"] or fields["when"] or self._pooled:
            self._index(task)
        if parent is None and not fields["optional"]:
            entry.counted = True
            self.unsatisfied += 1
        return entry

    def _index(self, task: Task) -> None:
        """Remember which keys of the context, tool and resources a task uses."""
        if task.tool:
            self.users.setdefault(task.tool, {})[task.id] = None
        if self._pooled:
            for name in self.demand(task):
                self.users.setdefault(name, {})[task.id] = None
        if task.arguments or task.when:
            for key in context_keys(task):
                self.readers.setdefault(key, {})[task.id] = None

    def _unindex(self, task: Task) -> None:
        """Forget what `_index` remembered of a task that is about to change."""
        self._forget_uses(task)
        for key in context_keys(task):
            self.readers[key].pop(task.id, None)

    def _forget_uses(self, task: Task) -> None:
        """Take a finished task out of the users of its tool and resources, so that only those left are gone through."""
        if task.tool:
            self.users[task.tool].pop(task.id, None)
        if self._pooled:
            for name in self.demand(task):
                self.users[name].pop(task.id, None)

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
            self._unclaim(entry)

    def _ready(self, entry: Entry) -> None:
        """Let a task run that waits for no other, at once or when its time has come."""
        if entry.due is None:
            self._move(entry, _SATISFY)
            self._queue.push(entry)
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
        elif state in STUCK:
            del self.stuck[entry.id]
        if follows in FINISHED and self.users:
            self._forget_uses(entry.task)

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

    def _unclaim(self, entry: Entry) -> None:
        if entry.claimed:
            entry.claimed = 0
            self._claims -= 1
            self._free(entry)

    def _end_attempt(self, entry: Entry) -> None:
        entry.attempt = None
        entry.deadline = None
        if entry.taken is not None:
            self._free(entry)
        if self._closed:
            self._underway.pop(entry.id, None)
            self._unpark()

    def _free(self, entry: Entry) -> None:
        if entry.taken is not None:
            self.pool.give_back(entry.taken)
            entry.taken = None
            entry.passed = 0

    def _unavailable(self, entry: Entry) -> bool:
        tool = self.tools.get(entry.task.tool) if entry.task.tool else None
        if tool is not None and not tool.available:
            return True
        if self._pooled and not self.pool.possible(self.demand(entry.task)):
            return True
        return self._closed and tool is not None and not self._applicable(entry, tool)

    @abstractmethod
    def _applicable(self, entry: Entry, tool: ToolSpec) -> bool:
        """Whether what a task needs holds, where the plan states facts."""

    def _unpark(self) -> None:
        """Have all that lacked a tool, a resource or a fact looked at again."""
        parked, self._parked = self._parked, {}
        for entry in parked.values():
            self._queue.push(entry)

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


class Results(Mapping[str, JsonValue]):
    """The results of finished tasks by the id of their lineage's root (or any id in it)."""

    __slots__ = ("_graph",)

    def __init__(self, graph: TaskGraph) -> None:
        self._graph = graph

    def __repr__(self) -> str:
        return f"<Results of {list(self)}>"

    def __getitem__(self, key: str) -> JsonValue:
        try:
            return self._graph.result(key)
        except UnknownTask as error:
            raise KeyError(str(error)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._graph.outputs())

    def __len__(self) -> int:
        return len(self._graph.outputs())


def context_keys(task: Task) -> Iterable[str]:
    """The keys of the context that a task's arguments and condition refer to."""
    keys: dict[str, None] = {}
    if task.arguments:
        for reference in find_references(task.arguments):
            if reference.task is None:
                keys[str(reference.path[0])] = None
    if task.when:
        keys.update(dict.fromkeys(sorted(Condition.parse(task.when).context_names())))
    return keys
