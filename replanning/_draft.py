"""Changes staged beside a live plan: checked as a whole, then committed, or dropped without a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic import ValidationError

from replanning._changes import (
    AbortRun,
    AddTask,
    CancelTask,
    ModifyTask,
    PlanChange,
    RemoveTask,
    ReorderTasks,
    ReplaceTask,
    RetryTask,
    SkipTask,
)
from replanning._checks import check_task
from replanning._errors import PlanError, Problem
from replanning._ids import TaskId
from replanning._plan import Task
from replanning._states import FINISHED, STUCK, TRANSITIONS, WAITING, TaskEvent, TaskState, transition

if TYPE_CHECKING:
    from replanning._entries import Entry
    from replanning._taskgraph import TaskGraph

_ANNOTATIONS = frozenset({"name", "goal", "metadata"})


class Draft:
    """A set of changes against a live plan.

    `problems` says what speaks against it. `commit` carries it out and must only be called when nothing does.
    Staging looks at the tasks that the changes touch, not at the whole plan.
    """

    def __init__(self, graph: TaskGraph, changes: Sequence[PlanChange], at: float = 0.0) -> None:
        self.problems: list[Problem] = []
        self._graph = graph
        self._at = at
        self._tasks: dict[TaskId, Task] = {}
        self._states: dict[TaskId, TaskState] = {}
        self._added: dict[TaskId, str] = {}
        self._sinks: dict[TaskId, tuple[TaskId, ...]] = {}
        self._removed: dict[TaskId, str] = {}
        self._rewired: dict[TaskId, str] = {}
        self._steps: list[Callable[[], None]] = []
        self._place = ""
        for index, change in enumerate(changes):
            self._place = f"changes[{index}]"
            _STAGE[type(change)](self, change)
        self._check_references()
        self._check_cycles()

    def commit(self) -> None:
        """Carry the changes out."""
        for step in self._steps:
            step()

    def diff(self) -> str:
        """What becomes of the tasks concerned, one line each: `-` before, `+` after, then who waits for what."""
        graph = self._graph
        known = [i for i in dict.fromkeys([*self._states, *self._tasks, *self._removed]) if i in graph]
        before = {i: f"{task_line(graph.entry(i).task)} [{graph.entry(i).state}]" for i in known}
        after: dict[TaskId, str] = {}
        for i in dict.fromkeys([*known, *self._added]):
            if i not in self._removed and self._state(i) is not TaskState.REPLACED_BY_REPLAN:
                task = self._tasks[i] if i in self._tasks else graph.entry(i).task
                after[i] = f"{task_line(task)} [{self._state(i)}]"
        lines = [f"- {line}" for i, line in before.items() if after.get(i) != line]
        lines += [f"+ {line}" for i, line in after.items() if before.get(i) != line]
        for i, sinks in self._sinks.items():
            waiting = list(graph.waiting_for(i)) if i in graph else []
            if waiting:
                more = f" and {len(waiting) - 8} more" if len(waiting) > 8 else ""
                lines.append(f"  {', '.join(waiting[:8])}{more}: waiting for {', '.join(sinks)} instead of {i}")
        return "\n".join(lines)

    # Staging one change of each kind

    def _add(self, change: AddTask) -> None:
        if not self._new(change.task):
            return
        task = change.task
        self._steps.append(lambda: self._insert(task, None))
        for waiting in change.before:
            if (old := self._current(waiting)) is not None and task.id not in old.depends_on:
                self._edit(waiting, old.model_copy(update={"depends_on": (*old.depends_on, task.id)}))

    def _remove(self, change: RemoveTask) -> None:
        if self._event(change.task_id, TaskEvent.CANCEL, "be removed", (*WAITING, *STUCK)):
            self._drop(change.task_id)

    def _replace(self, change: ReplaceTask) -> None:
        original = self._current(change.task_id)
        if original is None or not self._event(change.task_id, TaskEvent.REPLACE, "be replaced"):
            return
        new = [task for task in change.tasks if self._new(task)]
        ids = {task.id for task in new}
        needed = {dep for task in new for dep in task.depends_on}
        inherited = [dep for dep in original.depends_on if dep not in ids]
        sinks = tuple(task.id for task in new if task.id not in needed)
        for task in new:
            if ids.isdisjoint(task.depends_on):
                deps = tuple(dict.fromkeys([*inherited, *task.depends_on]))
                self._tasks[task.id] = task.model_copy(update={"depends_on": deps})
            if any(dep not in ids and dep not in inherited for dep in task.depends_on):
                self._rewired[task.id] = self._place
        self._sinks[change.task_id] = sinks
        tasks = tuple(self._tasks[task.id] for task in new)
        self._steps.append(lambda: self._commit_replace(change.task_id, tasks, sinks))

    def _modify(self, change: ModifyTask) -> None:
        old = self._current(change.task_id)
        if old is None:
            return
        state = self._state(change.task_id)
        annotation = _ANNOTATIONS.issuperset(change.fields)
        if state not in WAITING and state not in STUCK and not (annotation and state in FINISHED):
            self._problem(f"task {change.task_id!r} is {state}: it cannot be modified")
            return
        if "id" in change.fields:
            self._problem(f"task {change.task_id!r}: an id cannot be changed; replace the task instead")
            return
        try:
            task = Task.model_validate({**old.model_dump(exclude_unset=True), **change.fields})
        except (ValidationError, PlanError) as error:
            self._invalid(change.task_id, error)
            return
        self._edit(change.task_id, task)

    def _reorder(self, change: ReorderTasks) -> None:
        known = [task_id for task_id in change.order if self._current(task_id) is not None]
        for task_id in known:
            if self._state(task_id) not in WAITING:
                self._problem(f"task {task_id!r} is {self._state(task_id)}: only waiting tasks have an order")
        if len(set(change.order)) != len(change.order):
            self._problem(f"order names tasks twice: {list(change.order)}")
        self._steps.append(lambda: self._commit_order(change.order))

    def _retry(self, change: RetryTask) -> None:
        if self._current(change.task_id) is None:
            return
        state = self._state(change.task_id)
        if state is TaskState.REPLACED_BY_REPLAN and not self._withdraw_replacement(change.task_id):
            return
        if state is TaskState.SKIPPED and (started := self._started_dependents(change.task_id)):
            self._problem(f"task {change.task_id!r} was skipped and {started} have started since")
            return
        if self._event(change.task_id, TaskEvent.REVIVE, "be retried"):
            self._removed.pop(change.task_id, None)
            self._steps.append(lambda: self._commit_retry(change.task_id, state, change.delay))

    def _skip(self, change: SkipTask) -> None:
        if self._event(change.task_id, TaskEvent.SKIP, "be skipped"):
            self._steps.append(lambda: self._commit_end(change.task_id, TaskEvent.SKIP, change.reason))

    def _cancel(self, change: CancelTask) -> None:
        if self._event(change.task_id, TaskEvent.CANCEL, "be cancelled"):
            self._steps.append(lambda: self._commit_end(change.task_id, TaskEvent.CANCEL, change.reason))

    def _abort(self, change: AbortRun) -> None:
        def commit() -> None:
            self._graph.aborted = change.reason or "a change asked for it"

        self._steps.append(commit)

    # What staging is made of

    def _problem(self, message: str, place: str = "") -> None:
        self.problems.append(Problem(place or self._place, message))

    def _invalid(self, task_id: TaskId, error: ValidationError | PlanError) -> None:
        if isinstance(error, PlanError):
            for problem in error.problems:
                self._problem(f"task {task_id!r}: {problem}")
            return
        for detail in error.errors(include_url=False, include_context=False):
            where = ".".join(str(part) for part in detail["loc"])
            self._problem(f"task {task_id!r}, {where}: {detail['msg']}")

    def _current(self, task_id: TaskId) -> Task | None:
        """The task as the changes so far leave it; says so when there is none."""
        if task_id in self._tasks:
            return self._tasks[task_id]
        if task_id in self._graph:
            return self._graph.entry(task_id).task
        self._problem(f"there is no task {task_id!r}")
        return None

    def _state(self, task_id: TaskId) -> TaskState:
        if task_id in self._states:
            return self._states[task_id]
        return TaskState.PENDING if task_id in self._added else self._graph.entry(task_id).state

    def _event(
        self, task_id: TaskId, event: TaskEvent, verb: str, allowed: tuple[TaskState, ...] | None = None
    ) -> bool:
        """Stage an event of a task; says so when its state does not take it."""
        if self._current(task_id) is None:
            return False
        if event is not TaskEvent.REVIVE and self._is_removed(task_id):
            self._problem(f"task {task_id!r} was removed: it cannot {verb}, only be retried")
            return False
        state = self._state(task_id)
        if (allowed is not None and state not in allowed) or (state, event) not in TRANSITIONS:
            self._problem(f"task {task_id!r} is {state}: it cannot {verb}")
            return False
        self._states[task_id] = transition(state, event, task_id)
        return True

    def _is_removed(self, task_id: TaskId) -> bool:
        return task_id in self._removed or (task_id in self._graph and self._graph.entry(task_id).removed)

    def _new(self, task: Task) -> bool:
        if task.id in self._added or task.id in self._graph:
            self._problem(f"the id {task.id!r} is already used; ids are never used again")
            return False
        for message in check_task(task, self._graph.tools, self._graph.pool.capacity, self._graph.plan.objects):
            self._problem(f"task {task.id!r}: {message}")
        self._added[task.id] = self._place
        self._tasks[task.id] = task
        return True

    def _edit(self, task_id: TaskId, task: Task) -> None:
        state = self._state(task_id)
        if state not in FINISHED and state not in WAITING and state not in STUCK:
            self._problem(f"task {task_id!r} is {state}: it cannot be made to wait for another task")
            return
        if state in FINISHED and task.depends_on != self._tasks.get(task_id, self._graph_task(task_id)).depends_on:
            self._problem(f"task {task_id!r} is {state}: what it depends on cannot change")
            return
        for message in check_task(task, self._graph.tools, self._graph.pool.capacity, self._graph.plan.objects):
            self._problem(f"task {task_id!r}: {message}")
        self._tasks[task_id] = task
        self._rewired[task_id] = self._place
        self._steps.append(lambda: self._commit_edit(task))

    def _graph_task(self, task_id: TaskId) -> Task:
        return self._graph.entry(task_id).task

    def _drop(self, task_id: TaskId) -> None:
        self._removed[task_id] = self._place
        self._steps.append(lambda: self._commit_removal(task_id))

    def _withdraw_replacement(self, task_id: TaskId) -> bool:
        """Stage the removal of everything that replaced a task, if none of it has started."""
        parts = [self._graph.entry(task_id)]
        for part in parts:
            parts.extend(self._graph.entry(new) for new in part.replaced_by)
        gone = [part for part in parts[1:] if not part.removed]
        if started := [part.id for part in gone if part.attempts or part.satisfied]:
            self._problem(f"task {task_id!r} was replaced and {started} have started since: it cannot be retried")
            return False
        for part in gone:
            self._states[part.id] = TaskState.CANCELLED
            self._drop(part.id)
        return True

    def _started_dependents(self, task_id: TaskId) -> list[TaskId]:
        entry = self._graph.entry(task_id)
        if entry.stands_for is not None and not entry.stands_for.open_sinks:
            return [entry.stands_for.id]
        idle = (*WAITING, *STUCK, TaskState.CANCELLED)
        return [waiting.id for waiting in entry.dependents if waiting.state not in idle or waiting.claimed]

    # What must be true of all changes together

    def _check_references(self) -> None:
        for task_id, task in self._tasks.items():
            place = self._added.get(task_id) or self._rewired.get(task_id, "")
            for dep in task.depends_on:
                if not self._exists(dep):
                    self._problem(f"task {task_id!r} depends on {dep!r}, which does not exist", place)
        for task_id, place in self._removed.items():
            if waiting := sorted(set(self._waiting_for(task_id))):
                self._problem(f"task {task_id!r} cannot be removed: {waiting} would be left waiting for it", place)

    def _exists(self, task_id: TaskId) -> bool:
        if task_id in self._removed:
            return False
        return task_id in self._added or (task_id in self._graph and not self._graph.entry(task_id).removed)

    def _waiting_for(self, task_id: TaskId) -> Iterator[TaskId]:
        for new, task in self._tasks.items():
            if new not in self._removed and task_id in task.depends_on:
                yield new
        if task_id not in self._graph:
            return
        entry = self._graph.entry(task_id)
        for waiting in entry.dependents:
            if waiting.id not in self._tasks and waiting.id not in self._removed and not waiting.removed:
                yield waiting.id
        original = entry.stands_for
        if original is not None and self._state(original.id) is TaskState.REPLACED_BY_REPLAN:
            yield original.id

    def _check_cycles(self) -> None:
        if self.problems or not self._added.keys() | self._rewired.keys():
            return
        # A sub-plan that only inherits dependencies can close no cycle outside itself, so the search may stay
        # inside it; any other new edge may, so the search follows every unfinished dependency.
        inside = None if self._rewired else self._added.keys()
        done: set[TaskId] = set()
        for start in [*self._added, *self._rewired]:
            path: dict[TaskId, Iterator[TaskId]] = {start: self._needs(start)} if start not in done else {}
            while path:
                task_id = next(reversed(path))
                following = next(path[task_id], None)
                if following is None:
                    done.add(task_id)
                    path.pop(task_id)
                elif following in path:
                    names = list(path)
                    loop = [*names[names.index(following) :], following]
                    place = self._added.get(start) or self._rewired[start]
                    self._problem(f"tasks would wait for one another: {' -> '.join(loop)}", place)
                    return
                elif following not in done and (inside is None or following in inside):
                    path[following] = self._needs(following)

    def _needs(self, task_id: TaskId) -> Iterator[TaskId]:
        """What a task waits for, replaced tasks followed to their sinks, satisfied ones left out."""
        stack = list(reversed(self._tasks[task_id].depends_on if task_id in self._tasks else self._graph_task(task_id).depends_on))
        while stack:
            dep = stack.pop()
            if dep in self._sinks:
                stack.extend(self._sinks[dep])
            elif dep in self._added:
                yield dep
            else:
                entry = self._graph.entry(dep)
                if entry.state is TaskState.REPLACED_BY_REPLAN and self._state(dep) is entry.state:
                    stack.extend(self._graph.sinks(entry))
                elif not entry.satisfied:
                    yield dep

    # Carrying out

    def _insert(self, task: Task, parent: Entry | None) -> None:
        entry = self._graph._insert(task, parent)
        self._graph._link(entry)
        self._graph._settle(entry)

    def _commit_replace(self, task_id: TaskId, tasks: tuple[Task, ...], sinks: tuple[TaskId, ...]) -> None:
        graph = self._graph
        original = graph.entry(task_id)
        graph._unclaim(original)
        graph._move(original, TaskEvent.REPLACE)
        entries = [graph._insert(task, original) for task in tasks]
        for entry in entries:
            graph._link(entry)
            entry.stands_for = original if entry.id in sinks else None
        original.replaced_by = (*original.replaced_by, *(entry.id for entry in entries))
        original.open_sinks = len(sinks)
        for entry in entries:
            graph._settle(entry)

    def _commit_edit(self, task: Task) -> None:
        graph = self._graph
        entry = graph.entry(task.id)
        if entry.task.depends_on != task.depends_on:
            graph._unlink(entry)
            entry.task = task
            graph._link(entry)
            graph._settle(entry)
        if entry.priority != task.priority and entry.state in WAITING:
            entry.priority = task.priority
            graph._queue.push(entry)
        entry.task = task
        graph._index(task)
        graph._recount(entry)

    def _commit_removal(self, task_id: TaskId) -> None:
        entry = self._graph.entry(task_id)
        self._graph._unclaim(entry)
        if entry.state is not TaskState.CANCELLED:
            if entry.state is TaskState.REPLACED_BY_REPLAN:
                self._graph._move(entry, TaskEvent.REVIVE)
            self._graph._move(entry, TaskEvent.CANCEL)
        entry.removed = True
        entry.stands_for = None
        self._graph._recount(entry)

    def _commit_order(self, order: tuple[TaskId, ...]) -> None:
        entries = [self._graph.entry(task_id) for task_id in order]
        places = sorted((entry.priority, entry.order) for entry in entries)
        for entry, (priority, place) in zip(entries, places, strict=True):
            entry.priority, entry.order = priority, place
            self._graph._queue.push(entry)

    def _commit_retry(self, task_id: TaskId, state: TaskState, delay: float) -> None:
        graph = self._graph
        entry = graph.entry(task_id)
        if state is TaskState.SKIPPED:
            graph._withhold(entry)
        graph._move(entry, TaskEvent.REVIVE)
        graph._index(entry.task)
        entry.removed, entry.round, entry.reason, entry.condition = False, 0, "", None
        entry.replaced_by, entry.open_sinks = (), 0
        graph._recount(entry)
        if delay and not entry.missing:
            graph._back_off(entry, self._at + delay)
        else:
            graph._settle(entry)

    def _commit_end(self, task_id: TaskId, event: TaskEvent, reason: str) -> None:
        graph = self._graph
        entry = graph.entry(task_id)
        graph._unclaim(entry)
        graph._move(entry, event)
        graph._end_attempt(entry)
        entry.reason = reason
        if event is TaskEvent.SKIP:
            graph._release(entry)


_STAGE: dict[type, Callable[..., None]] = {
    AddTask: Draft._add,
    RemoveTask: Draft._remove,
    ReplaceTask: Draft._replace,
    ModifyTask: Draft._modify,
    ReorderTasks: Draft._reorder,
    RetryTask: Draft._retry,
    SkipTask: Draft._skip,
    CancelTask: Draft._cancel,
    AbortRun: Draft._abort,
}


def task_line(task: Task) -> str:
    """A task in one line: its id and the fields that say something."""
    fields = task.model_dump(mode="json", exclude_defaults=True)
    lead = fields.pop("id")
    rest = ", ".join(f"{name}: {value}" for name, value in fields.items())
    return f"{lead}: {rest}" if rest else str(lead)
