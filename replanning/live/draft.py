"""Changes staged beside a live plan: checked as a whole, then committed, or dropped without a trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from replanning.changes import (
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
from replanning.errors import PlanError, Problem, UnknownTask
from replanning.live.graph import TaskGraph
from replanning.live.stale import StaleResult, stale_results
from replanning.live.states import (
    FINISHED,
    SATISFIED,
    STUCK,
    TRANSITIONS,
    WAITING,
    TaskEvent,
    TaskState,
)
from replanning.plan.checks import check_task, may_read_results, result_references
from replanning.plan.messages import join_names
from replanning.plan.tasks import PLANNING_KEY, Task
from replanning.plan.types import JsonObject, TaskId

_ANNOTATION_FIELDS = frozenset({"name", "goal", "metadata"})

_REPLACED: Final = TaskState.REPLACED_BY_REPLAN

_MAX_DEPENDENCY_SEARCH: Final = 1_000
"""Number of tasks searched for a dependency; beyond it a task is assumed to depend on the other."""

_MAX_WAITING_IN_DIFF: Final = 8

_MAX_TASKS_IN_PROBLEM: Final = 10


class StagedTask(NamedTuple):
    """New task, the task that it replaces, and the path of the change that adds it."""

    task: Task
    parent: TaskId | None
    change_path: str


class AddedDependency(NamedTuple):
    """Dependency that a change adds and that could close a cycle."""

    waiting: TaskId
    needed: TaskId
    change_path: str


class Draft:
    """A plan as a set of changes would leave it; what they do not touch is read from the live plan, which stays as it is.

    Staging looks at the tasks that the changes touch, not at the whole plan.

    Args:
        graph: the live plan.
        changes: the changes, in order; none for the plan as it is.

    Attributes:
        changes: the changes.
        problems: the reasons why the changes cannot be committed.
        version: the version of the plan that they were staged against; the draft is valid while the plan has it.
        plan_hash: the hash of the plan with the changes, once `LivePlan.prepare` has accepted them.
        new_tasks: the tasks that the changes add.
        tasks: the new tasks and the changed documents of others.
        states: the states that the changes lead to.
        sinks: for each task that the changes replace, the new tasks that its dependents would wait for.
        removed: the removed tasks, with the path of the change.
    """

    def __init__(self, graph: TaskGraph, changes: Sequence[PlanChange] = ()) -> None:
        self.changes = tuple(changes)
        self.problems: list[Problem] = []
        self.version = graph.version
        self.plan_hash = ""
        self.new_tasks: dict[TaskId, StagedTask] = {}
        self.tasks: dict[TaskId, Task] = {}
        self.states: dict[TaskId, TaskState] = {}
        self.sinks: dict[TaskId, tuple[TaskId, ...]] = {}
        self.removed: dict[TaskId, str] = {}
        self._graph = graph
        self._withdrawn: set[TaskId] = set()
        self._revived: dict[TaskId, str] = {}
        self._changed_references: dict[TaskId, str] = {}
        self._added_dependencies: list[AddedDependency] = []
        self._positions: dict[TaskId, tuple[int, int]] = {}
        self._change_path = ""
        self._committed_at = 0.0
        self._abort_reason: str | None = None
        self._stale: dict[TaskId, StaleResult] | None = None
        self._commit_steps: list[Callable[[Draft], None]] = []
        self._diff_notes: list[str] = []
        for index, change in enumerate(changes):
            self._change_path = f"changes[{index}]"
            _STAGE_HANDLERS[type(change)](self, change)
        self._check_plan()

    def __contains__(self, task_id: object) -> bool:
        return task_id in self.new_tasks or task_id in self._graph.entries

    # Reading

    def task(self, task_id: TaskId) -> Task:
        """Return a task as the changes leave it."""
        return self.tasks[task_id] if task_id in self.tasks else self._graph.entry(task_id).task

    def state(self, task_id: TaskId) -> TaskState:
        """Return the state in which the changes leave a task."""
        if task_id in self.states:
            return self.states[task_id]
        return TaskState.PENDING if task_id in self.new_tasks else self._graph.entry(task_id).state

    def exists(self, task_id: TaskId) -> bool:
        """Return whether a task exists and is not removed."""
        if task_id in self.removed:
            return False
        if task_id in self.new_tasks or task_id in self._revived:
            return True
        entry = self._graph.entries.get(task_id)
        return entry is not None and not entry.removed

    def position(self, task_id: TaskId) -> tuple[int, int]:
        """Return the position of a task among the ready ones: priority, then order."""
        if task_id in self._positions:
            return self._positions[task_id]
        entry = self._graph.entry(task_id)
        return entry.priority, entry.order

    def follow_replacements(self, task_ids: Iterable[TaskId]) -> Iterator[TaskId]:
        """Yield the tasks that these stand for: replaced ones are followed to their sinks."""
        stack = list(task_ids)[::-1]
        while stack:
            task_id = stack.pop()
            if self.state(task_id) is not _REPLACED:
                yield task_id
            elif task_id in self.sinks:
                stack.extend(reversed(self.sinks[task_id]))
            else:
                stack.extend(
                    sink.id for sink in reversed(self._graph.entry(task_id).replacement.sinks)
                )

    def ancestors(self, task_id: TaskId) -> Iterator[TaskId]:
        """Yield the tasks that a task replaces, the nearest first."""
        while task_id in self.new_tasks:
            parent = self.new_tasks[task_id].parent
            if parent is None:
                return
            yield (task_id := parent)
        yield from (entry.id for entry in self._graph.entry(task_id).lineage()[-2::-1])

    def diff(self) -> str:
        """Return the effect of the changes: per task `-` before and `+` after, then the dependents that wait for others."""
        graph = self._graph
        touched = dict.fromkeys([*self.states, *self.tasks, *self.removed])
        before = {
            i: _format_task(graph.entry(i).task, graph.entry(i).state)
            for i in touched
            if i in graph
        }
        after = {
            i: _format_task(self.task(i), self.state(i))
            for i in touched
            if i not in self.removed and self.state(i) is not _REPLACED
        }
        lines = [f"- {line}" for i, line in before.items() if after.get(i) != line]
        lines += [f"+ {line}" for i, line in after.items() if before.get(i) != line]
        for i, sinks in self.sinks.items():
            waiting = graph.entry(i).dependent_ids() if i in graph else ()
            if waiting:
                more = len(waiting) - _MAX_WAITING_IN_DIFF
                names = ", ".join(waiting[:_MAX_WAITING_IN_DIFF]) + (
                    f" and {more} more" if more > 0 else ""
                )
                lines.append(f"  {names}: waiting for {', '.join(sinks)} instead of {i}")
        return "\n".join([*lines, *self._diff_notes])

    # Staging one change of each kind

    def _stage_add(self, change: AddTask) -> None:
        task = change.task
        if not self._stage_new(task, None):
            return
        for waiting in change.before:
            if (old := self._find_task(waiting)) is not None and task.id not in old.depends_on:
                self._stage_edit(
                    old, old.model_copy(update={"depends_on": (*old.depends_on, task.id)})
                )

    def _stage_remove(self, change: RemoveTask) -> None:
        if self._stage_event(change.task_id, TaskEvent.CANCEL, "be removed", (*WAITING, *STUCK)):
            self._revived.pop(change.task_id, None)
            self.removed[change.task_id] = self._change_path
            self._commit_steps.append(partial(Draft._remove, task_id=change.task_id))

    def _stage_replace(self, change: ReplaceTask) -> None:
        event = TaskEvent.REPLACE
        if change.task_id in self._graph and self.state(change.task_id) in SATISFIED:
            self._stale = stale_results(self._graph) if self._stale is None else self._stale
            stale = self._stale.get(change.task_id)
            event = TaskEvent.REDO if stale is not None and stale.redo else event
        if not self._stage_event(change.task_id, event, "be replaced"):
            return
        parts = {task.id: task for task in change.tasks}
        inherited = [dep for dep in self.task(change.task_id).depends_on if dep not in parts]
        for task in change.tasks:
            root = parts.keys().isdisjoint(task.depends_on)
            if self._stage_new(task, change.task_id, inherited if root else ()):
                self._added_dependencies += [
                    AddedDependency(task.id, dep, self._change_path)
                    for dep in task.depends_on
                    if dep not in parts and dep not in inherited
                ]
        needed = {dep for task in change.tasks for dep in task.depends_on}
        sinks = tuple(i for i in parts if i not in needed)
        self.sinks[change.task_id] = sinks
        self._commit_steps.append(
            partial(Draft._replace, task_id=change.task_id, parts=tuple(parts), sinks=sinks)
        )

    def _stage_modify(self, change: ModifyTask) -> None:
        old = self._find_task(change.task_id)
        if old is None:
            return
        state = self.state(change.task_id)
        annotation = _ANNOTATION_FIELDS.issuperset(change.fields)
        if not self.exists(change.task_id):
            self._add_problem(
                f"task {change.task_id!r} was removed: it cannot be modified, only be retried"
            )
        elif state not in WAITING and state not in STUCK and not (annotation and state in FINISHED):
            only = (
                f", only annotated ({', '.join(sorted(_ANNOTATION_FIELDS))})"
                if state in FINISHED
                else ""
            )
            self._add_problem(f"task {change.task_id!r} is {state}: it cannot be modified{only}")
        elif "id" in change.fields:
            self._add_problem(
                f"task {change.task_id!r}: an id cannot be changed; replace the task instead"
            )
        else:
            try:
                new = Task.model_validate({**old.model_dump(exclude_unset=True), **change.fields})
            except PlanError as error:
                for problem in error.problems:
                    self._add_problem(
                        f"task {change.task_id!r}, {str(problem).removeprefix('Task.')}"
                    )
            else:
                self._stage_edit(old, new)

    def _stage_edit(self, old: Task, new: Task) -> None:
        state, path = self.state(new.id), self._change_path
        if state in FINISHED and new.depends_on != old.depends_on:
            self._add_problem(f"task {new.id!r} is {state}: what it depends on cannot change")
            return
        if state is TaskState.RUNNING:
            self._add_problem(
                f"task {new.id!r} is {state}: it cannot be made to wait for another task"
            )
            return
        self._validate_task(new)
        self.tasks[new.id] = new
        if new.priority != old.priority:
            self._positions[new.id] = (new.priority, self.position(new.id)[1])
        added = [dep for dep in new.depends_on if dep not in old.depends_on]
        self._added_dependencies += [AddedDependency(new.id, dep, path) for dep in added]
        references = ("arguments", "when", "fallbacks", "undo")
        if not set(old.depends_on).issubset(new.depends_on) or any(
            getattr(new, name) != getattr(old, name) for name in references
        ):
            self._changed_references[new.id] = path
        self._commit_steps.append(partial(Draft._edit, task=new))

    def _stage_reorder(self, change: ReorderTasks) -> None:
        order = tuple(dict.fromkeys(change.order))
        if len(order) != len(change.order):
            self._add_problem(f"order names tasks twice: {list(change.order)}")
        task_ids = [task_id for task_id in order if self._find_task(task_id) is not None]
        for task_id in task_ids:
            if (state := self.state(task_id)) not in WAITING:
                self._add_problem(f"task {task_id!r} is {state}: only waiting tasks have an order")
        for task_id, position in zip(task_ids, sorted(map(self.position, task_ids)), strict=True):
            self._positions[task_id] = position
            priority, number = position
            task = self.task(task_id)
            if task.priority != priority:
                task = self.tasks[task_id] = task.model_copy(update={"priority": priority})
            self._commit_steps.append(partial(Draft._reorder, task=task, order=number))
        self._diff_notes.append(f"  handed out in this order: {', '.join(change.order)}")

    def _stage_retry(self, change: RetryTask) -> None:
        task_id = change.task_id
        if self._find_task(task_id) is None:
            return
        state, graph = self.state(task_id), self._graph
        if task_id in graph and graph.entry(task_id).replacement.redone:
            self._add_problem(
                f"task {task_id!r} was done and is done again by others: it cannot be retried"
            )
            return
        if task_id in self._withdrawn or (
            task_id in graph and graph.entry(task_id).replacement.withdrawn
        ):
            self._add_problem(
                f"task {task_id!r} was withdrawn for what it had replaced: it cannot be retried"
            )
            return
        if state is _REPLACED and not self._withdraw_replacement(task_id):
            return
        if (
            state is TaskState.SKIPPED
            and task_id in graph
            and (started := graph.entry(task_id).started_dependents())
        ):
            self._add_problem(f"task {task_id!r} was skipped and {started} have started since")
            return
        if state is TaskState.DONE and not (
            task_id in graph and not graph.entry(task_id).recoverable
        ):
            self._add_problem(f"task {task_id!r} is {state}: it cannot be retried")
            return
        if not self._stage_event(task_id, TaskEvent.REVIVE, "be retried"):
            return
        self.removed.pop(task_id, None)
        self._revived[task_id] = self._change_path
        if state is _REPLACED:  # its own dependencies count again, not those of its sinks
            own = self.task(task_id).depends_on
            self._added_dependencies += [
                AddedDependency(task_id, dep, self._change_path) for dep in own
            ]
        self._commit_steps.append(partial(Draft._retry, task_id=task_id, delay=change.delay))

    def _stage_end(self, change: SkipTask | CancelTask) -> None:
        skips = isinstance(change, SkipTask)
        event, verb = (
            (TaskEvent.SKIP, "be skipped") if skips else (TaskEvent.CANCEL, "be cancelled")
        )
        if self._stage_event(change.task_id, event, verb):
            self._commit_steps.append(
                partial(Draft._end, task_id=change.task_id, event=event, reason=change.reason)
            )

    def _stage_abort(self, change: AbortRun) -> None:
        self._abort_reason = change.reason or "a change asked for it"
        self._diff_notes.append(f"  the run is aborted: {self._abort_reason}")

    # Rules of staging

    def _add_problem(self, message: str) -> None:
        self.problems.append(Problem(self._change_path, message))

    def _find_task(self, task_id: TaskId) -> Task | None:
        """Return a task as the changes so far leave it; None, with a problem, if there is none."""
        try:
            return self.task(task_id)
        except UnknownTask as error:
            self._add_problem(str(error))
            return None

    def _stage_event(
        self,
        task_id: TaskId,
        event: TaskEvent,
        verb: str,
        allowed: Collection[TaskState] | None = None,
    ) -> bool:
        """Stage an event of a task; False, with a problem, if its state does not allow it."""
        if self._find_task(task_id) is None:
            return False
        state = self.state(task_id)
        follows = TRANSITIONS.get((state, event))
        if (
            state is TaskState.CANCELLED
            and event is not TaskEvent.REVIVE
            and not self.exists(task_id)
        ):
            self._add_problem(f"task {task_id!r} was removed: it cannot {verb}, only be retried")
        elif follows is None or (allowed is not None and state not in allowed):
            self._add_problem(f"task {task_id!r} is {state}: it cannot {verb}")
        else:
            self.states[task_id] = follows
            return True
        return False

    def _stage_new(
        self, task: Task, parent: TaskId | None, inherited: Sequence[TaskId] = ()
    ) -> bool:
        """Stage a new task, with inherited dependencies before its own; False, with a problem, if its id is taken."""
        if task.id in self.new_tasks or task.id in self._graph.entries:
            self._add_problem(f"the id {task.id!r} is already used; ids are never used again")
            return False
        self._validate_task(task)
        new = task
        if (
            inherited
            and (deps := tuple(dict.fromkeys([*inherited, *task.depends_on]))) != task.depends_on
        ):
            new = task.model_copy(update={"depends_on": deps})
        self._positions[task.id] = (task.priority, len(self._graph.entries) + len(self.new_tasks))
        self.new_tasks[task.id] = StagedTask(new, parent, self._change_path)
        self.tasks[task.id] = new
        if may_read_results(task):
            self._changed_references[task.id] = self._change_path
        return True

    def _validate_task(self, task: Task) -> None:
        graph = self._graph
        for message in check_task(task, graph.scope):
            self._add_problem(f"task {task.id!r}: {message}")
        for dep in dict.fromkeys(task.depends_on):
            if task.depends_on.count(dep) > 1:
                self._add_problem(f"task {task.id!r} depends on {dep!r} twice")

    def _withdraw_replacement(self, task_id: TaskId) -> bool:
        """Stage the removal of what replaced a task, unless something has followed from it."""
        entries = [] if task_id in self.new_tasks else [self._graph.entry(task_id)]
        for entry in entries:
            entries.extend(self._graph.entry(new) for new in entry.replacement.tasks)
        parts = entries[1:]
        if task_id in self.sinks or any(part.id in self.sinks for part in parts):
            self._add_problem(
                f"task {task_id!r} is replaced by these changes: it cannot be retried by them as well"
            )
            return False
        ended = [part.id for part in parts if part.log.count or self.state(part.id) in SATISFIED]
        if ended:
            self._add_problem(
                f"task {task_id!r} was replaced and {ended} have started since: it cannot be retried"
            )
            return False
        for part in parts:
            self._revived.pop(part.id, None)
            self.states[part.id] = TaskState.CANCELLED
            self.removed[part.id] = self._change_path
            self._withdrawn.add(part.id)
            self._commit_steps.append(partial(Draft._withdraw, task_id=part.id))
        return True

    # Checks of the plan as the changes would leave it

    def _check_plan(self) -> None:
        """Check that tasks depend on existing ones without cycles, that removed ones leave nobody waiting, and references.

        A cycle among new tasks is found by following these alone. One that leads through the rest of the plan
        contains a dependency that a change adds there, so the search starts at those.
        """
        for task_id in [*self.tasks, *(i for i in self._revived if i not in self.tasks)]:
            exists = self.__contains__ if task_id in self.removed else self.exists
            for dep in self.task(task_id).depends_on:
                if not exists(dep):
                    why = "was removed" if dep in self else "does not exist"
                    added = [
                        edge.change_path
                        for edge in self._added_dependencies
                        if edge[:2] == (task_id, dep)
                    ]
                    if added:
                        path = added[-1]
                    elif task_id in self.new_tasks:
                        path = self.new_tasks[task_id].change_path
                    else:
                        path = self._revived.get(task_id) or self.removed.get(dep, "")
                    self.problems.append(
                        Problem(path, f"task {task_id!r} depends on {dep!r}, which {why}")
                    )
        for task_id, path in self.removed.items():
            if stranded := sorted(set(self._stranded_by_removal(task_id))):
                names = join_names([repr(name) for name in stranded], _MAX_TASKS_IN_PROBLEM)
                message = (
                    f"task {task_id!r} cannot be removed: {names} would be left waiting for it"
                )
                self.problems.append(Problem(path, message))
        if self.problems:
            return
        if not (self._added_dependencies or self._changed_references) and all(
            not new.task.depends_on for new in self.new_tasks.values()
        ):
            return  # as of a call: nothing can close a cycle, or refer to a result
        among_new = [
            AddedDependency(task_id, dep, new.change_path)
            for task_id, new in self.new_tasks.items()
            if new.task.depends_on
            for dep in self._unsatisfied_dependencies(task_id)
            if dep in self.new_tasks
        ]
        for edges, within in ((among_new, True), (self._added_dependencies, False)):
            done: set[TaskId] = set()
            for edge in edges:
                if loop := self._find_cycle(edge, done, within=within):
                    if len(loop) > _MAX_TASKS_IN_PROBLEM + 1:
                        loop = [*loop[:_MAX_TASKS_IN_PROBLEM], TaskId("…"), loop[-1]]
                    message = f"tasks would wait for one another: {' -> '.join(loop)}"
                    self.problems.append(Problem(edge.change_path, message))
                    return
        for task_id, path in self._changed_references.items():
            if task_id not in self.removed:
                for _, name, text in result_references(self.task(task_id), self):
                    if why := self._reference_error(task_id, name):
                        self.problems.append(
                            Problem(path, f"task {task_id!r} refers to {text}, {why}")
                        )

    def _stranded_by_removal(self, task_id: TaskId) -> Iterator[TaskId]:
        """Yield the tasks that would wait for ever if a task were removed."""

        def is_active(other: TaskId) -> bool:
            return self.exists(other) and self.state(other) is not _REPLACED

        for other, task in self.tasks.items():
            if task_id in task.depends_on and is_active(other):
                yield other
        for original, sinks in self.sinks.items():
            if task_id in sinks and self.state(original) is _REPLACED:
                yield original
        if task_id in self._graph:
            entry = self._graph.entry(task_id)
            yield from (
                w.id for w in entry.dependents if w.id not in self.tasks and is_active(w.id)
            )
            if entry.sink_of is not None and self.state(entry.sink_of.id) is _REPLACED:
                yield entry.sink_of.id

    def _is_satisfied(self, task_id: TaskId) -> bool:
        """Return whether a task was satisfied before the changes and they leave it so."""
        if task_id in self.new_tasks:
            return False
        entry = self._graph.entry(task_id)
        return entry.satisfied and self.state(task_id) is entry.state

    def _unsatisfied_dependencies(self, task_id: TaskId) -> Iterator[TaskId]:
        """Yield the dependencies that a task still waits for, and all if a task was ever skipped before its own."""
        include_satisfied = self._graph.has_early_skips
        for dep in self.follow_replacements(self.task(task_id).depends_on):
            if include_satisfied or not self._is_satisfied(dep):
                yield dep

    def _find_cycle(
        self, edge: AddedDependency, done: set[TaskId], *, within: bool
    ) -> list[TaskId]:
        """Return a cycle that an edge leads to; `done` collects the tasks that lead to none.

        Args:
            edge: the dependency to begin with.
            done: tasks that lead to no cycle.
            within: whether to follow new tasks alone.
        """
        path: dict[TaskId, Iterator[TaskId]] = {
            edge.waiting: self.follow_replacements([edge.needed])
        }
        while path:
            task_id = next(reversed(path))
            following = next(path[task_id], None)
            if following is None:
                path.pop(task_id)
                if path:
                    done.add(task_id)
            elif following in path:
                names = list(path)
                return [*names[names.index(following) :], following]
            elif following not in done and (not within or following in self.new_tasks):
                path[following] = self._unsatisfied_dependencies(following)
        return []

    def _reference_error(self, task_id: TaskId, name: TaskId) -> str:
        """Return why a task cannot see the result of another; empty if it can."""
        if not self.exists(name):
            return f"and {name!r} is no task of the plan"
        if name == task_id:
            return "its own output"
        if name in self.ancestors(task_id):
            return f"the output of what it replaces: there is none until {task_id!r} is done"
        sources = {
            other for other in self.follow_replacements([name]) if not self._is_satisfied(other)
        }
        seen = {task_id}
        stack = [task_id]
        while stack and sources and len(seen) < _MAX_DEPENDENCY_SEARCH:
            for needed in self._unsatisfied_dependencies(stack.pop()):
                sources.discard(needed)
                if needed not in seen:
                    seen.add(needed)
                    stack.append(needed)
        return (
            f"and does not depend on {name!r}: add {name!r} to its depends_on"
            if sources and not stack
            else ""
        )

    # Committing; none of these can fail

    def commit(self, at: float) -> None:
        """Carry the changes out as a new revision; only for a draft that `LivePlan.prepare` has accepted.

        Args:
            at: now, in seconds since the epoch; the delay of a retry counts from it.
        """
        graph = self._graph
        graph.version += 1
        graph.revision += 1
        graph.revision_hash = self.plan_hash
        graph.world.problems.clear()
        graph.aborted = self._abort_reason or graph.aborted
        self._committed_at = at
        for new in self.new_tasks.values():
            graph.insert(new.task, None if new.parent is None else graph.entries[new.parent])
        graph.counts[TaskState.PENDING] += len(self.new_tasks)
        for task_id in self.new_tasks:
            graph.link(graph.entries[task_id])
        for step in self._commit_steps:
            step(self)

    def _replace(
        self, task_id: TaskId, parts: tuple[TaskId, ...], sinks: tuple[TaskId, ...]
    ) -> None:
        graph = self._graph
        original = graph.entries[task_id]
        if original.satisfied:
            graph.staleness.redone[task_id], original.replacement.redone = None, True
            graph.unsatisfy_dependents(original)
        graph.transition(
            original, TaskEvent.REDO if original.replacement.redone else TaskEvent.REPLACE
        )
        original.replacement.tasks, original.replacement.unsatisfied = parts, len(sinks)
        original.replacement.sinks = tuple(graph.entries[sink] for sink in sinks)
        for sink in original.replacement.sinks:
            sink.sink_of = original
        graph.update_unsatisfied_count(original)

    def _edit(self, task: Task) -> None:
        graph = self._graph
        entry = graph.entries[task.id]
        if (task.tool, task.arguments) != (entry.task.tool, entry.task.arguments):
            entry.log.call_changes += 1
        if entry.state not in FINISHED:
            graph.dependency_index.discard(entry.task)
            graph.dependency_index.add(task)
        if entry.task.depends_on != task.depends_on:
            for dep in entry.task.depends_on:
                waiting = graph.entries[dep].dependents
                assert isinstance(waiting, list), "the entry was linked"
                waiting.remove(entry)
            entry.unsatisfied_dependencies = 0
            entry.set_task(task)
            graph.link(entry)
            graph.update_readiness(entry)
        entry.set_task(task)
        graph.staleness.redoes = graph.staleness.redoes or task.on_stale == "redo"
        graph.update_unsatisfied_count(entry)
        graph.scheduler.requeue(entry)

    def _reorder(self, task: Task, order: int) -> None:
        entry = self._graph.entries[task.id]
        entry.set_task(task)
        entry.order = order
        self._graph.scheduler.requeue(entry)

    def _remove(self, task_id: TaskId) -> None:
        entry = self._graph.entries[task_id]
        self._graph.transition(entry, TaskEvent.CANCEL)
        entry.removed = True
        self._graph.update_unsatisfied_count(entry)

    def _withdraw(self, task_id: TaskId) -> None:
        """Remove a replacement for good because the task it replaced is retried."""
        entry = self._graph.entries[task_id]
        if entry.state is TaskState.REPLACED_BY_REPLAN:
            self._graph.transition(entry, TaskEvent.REVIVE)
        if entry.state is not TaskState.CANCELLED:
            self._remove(task_id)
        entry.removed, entry.replacement.withdrawn, entry.sink_of = True, True, None

    def _retry(self, task_id: TaskId, delay: float) -> None:
        graph = self._graph
        entry = graph.entries[task_id]
        if entry.state in SATISFIED:
            graph.unsatisfy_dependents(entry)
        graph.transition(entry, TaskEvent.REVIVE)
        graph.dependency_index.add(entry.task)
        entry.removed, entry.log.in_round, entry.reason, entry.condition_revision = (
            False,
            0,
            "",
            None,
        )
        entry.replacement.tasks, entry.replacement.sinks, entry.replacement.unsatisfied = (), (), 0
        entry.log.continuations, entry.log.feedback = 0, ""
        graph.update_unsatisfied_count(entry)
        graph.scheduler.wait_until(entry, self._committed_at + delay if delay else None)
        graph.update_readiness(entry)

    def _end(self, task_id: TaskId, event: TaskEvent, reason: str) -> None:
        graph = self._graph
        entry = graph.entries[task_id]
        graph.transition(entry, event)
        graph.end_attempt(entry)
        entry.reason = reason
        if event is TaskEvent.SKIP:
            graph.has_early_skips = graph.has_early_skips or entry.unsatisfied_dependencies > 0
            graph.satisfy_dependents(entry)


_STAGE_HANDLERS: dict[type, Callable[..., None]] = {
    AddTask: Draft._stage_add,
    RemoveTask: Draft._stage_remove,
    ReplaceTask: Draft._stage_replace,
    ModifyTask: Draft._stage_modify,
    ReorderTasks: Draft._stage_reorder,
    RetryTask: Draft._stage_retry,
    SkipTask: Draft._stage_end,
    CancelTask: Draft._stage_end,
    AbortRun: Draft._stage_abort,
}


def _format_task(task: Task, state: TaskState) -> str:
    """Return a task in one line: its id, the fields that are set, as in a plan file, and its state."""
    fields = ", ".join(
        f"{name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in display_fields(task).items()
    )
    return f"{task.id}: {fields} [{state}]" if fields else f"{task.id} [{state}]"


def display_fields(task: Task) -> JsonObject:
    """Return the fields of a task that are set, without its id.

    Of the notes of planning mode only the intended tool and arguments are kept, if the task names no tool yet.
    """
    fields: JsonObject = task.model_dump(mode="json", exclude_defaults=True, exclude={"id"})
    metadata = fields.get("metadata")
    if isinstance(metadata, dict) and isinstance(planned := metadata.pop(PLANNING_KEY, None), dict):
        fields |= {
            name: planned[name]
            for name in ("tool", "arguments")
            if name in planned and task.tool is None
        }
        if not metadata:
            del fields["metadata"]
    return fields
