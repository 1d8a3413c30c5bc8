"""Overlay of staged changes on a live plan, and the checks of the plan as they would leave it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from replanning.errors import Problem
from replanning.live.states import TaskState
from replanning.plan.checks import result_references
from replanning.plan.tasks import Task
from replanning.plan.types import TaskId

if TYPE_CHECKING:
    from replanning.live.graph import TaskGraph


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


class PlanOverlay:
    """Plan as staged changes would leave it; what they do not touch is read from the plan itself.

    Args:
        graph: the plan, which stays as it is.

    Attributes:
        new_tasks: the tasks that the changes add.
        tasks: the new tasks and the changed documents of others.
        states: the states that the changes lead to.
        sinks: for each task that the changes replace, the new tasks that its dependents would wait for.
        removed: the removed tasks, with the path of the change.
        withdrawn: the removed replacements of tasks that are retried.
        revived: the retried tasks, with the path of the change.
        changed_references: the tasks whose references have to be checked, with the path of the change.
        added_dependencies: the dependencies that could close a cycle.
    """

    def __init__(self, graph: TaskGraph) -> None:
        self.graph = graph
        self.new_tasks: dict[TaskId, StagedTask] = {}
        self.tasks: dict[TaskId, Task] = {}
        self.states: dict[TaskId, TaskState] = {}
        self.sinks: dict[TaskId, tuple[TaskId, ...]] = {}
        self.removed: dict[TaskId, str] = {}
        self.withdrawn: set[TaskId] = set()
        self.revived: dict[TaskId, str] = {}
        self.changed_references: dict[TaskId, str] = {}
        self.added_dependencies: list[AddedDependency] = []
        self._positions: dict[TaskId, tuple[int, int]] = {}

    def __contains__(self, task_id: object) -> bool:
        return task_id in self.new_tasks or task_id in self.graph.entries

    # Reading

    def task(self, task_id: TaskId) -> Task:
        """Return a task as the changes leave it."""
        return self.tasks[task_id] if task_id in self.tasks else self.graph.entry(task_id).task

    def state(self, task_id: TaskId) -> TaskState:
        """Return the state in which the changes leave a task."""
        if task_id in self.states:
            return self.states[task_id]
        return TaskState.PENDING if task_id in self.new_tasks else self.graph.entry(task_id).state

    def exists(self, task_id: TaskId) -> bool:
        """Return whether a task exists and is not removed."""
        if task_id in self.removed or task_id not in self:
            return False
        return task_id in self.new_tasks or task_id in self.revived or not self.graph.entry(task_id).removed

    def is_satisfied(self, task_id: TaskId) -> bool:
        """Return whether a task was satisfied before the changes and they leave it so."""
        if task_id in self.new_tasks:
            return False
        entry = self.graph.entry(task_id)
        return entry.satisfied and self.state(task_id) is entry.state

    def position(self, task_id: TaskId) -> tuple[int, int]:
        """Return the position of a task among the ready ones: priority, then order."""
        if task_id in self._positions:
            return self._positions[task_id]
        entry = self.graph.entry(task_id)
        return entry.priority, entry.order

    def follow_replacements(self, task_ids: Iterable[TaskId]) -> Iterator[TaskId]:
        """Yield the tasks that these stand for: replaced ones are followed to their sinks."""
        stack = list(task_ids)[::-1]
        while stack:
            task_id = stack.pop()
            if self.state(task_id) is not TaskState.REPLACED_BY_REPLAN:
                yield task_id
            elif task_id in self.sinks:
                stack.extend(reversed(self.sinks[task_id]))
            else:
                stack.extend(sink.id for sink in reversed(self.graph.entry(task_id).sinks))

    def unsatisfied_dependencies(self, task_id: TaskId) -> Iterator[TaskId]:
        """Return the dependencies that a task still waits for."""
        include_satisfied = self.graph.has_early_skips
        return (
            dep
            for dep in self.follow_replacements(self.task(task_id).depends_on)
            if include_satisfied or not self.is_satisfied(dep)
        )

    def stranded_by_removal(self, task_id: TaskId) -> Iterator[TaskId]:
        """Yield the tasks that would wait for ever if a task were removed."""
        for other, task in self.tasks.items():
            if task_id in task.depends_on and self._is_active(other):
                yield other
        for original, sinks in self.sinks.items():
            if task_id in sinks and self.state(original) is TaskState.REPLACED_BY_REPLAN:
                yield original
        if task_id in self.graph:
            entry = self.graph.entry(task_id)
            yield from (w.id for w in entry.dependents if w.id not in self.tasks and self._is_active(w.id))
            if entry.sink_of is not None and self._is_replaced(entry.sink_of.id):
                yield entry.sink_of.id

    def ancestors(self, task_id: TaskId) -> Iterator[TaskId]:
        """Yield the tasks that a task replaces, the nearest first."""
        while task_id in self.new_tasks:
            parent = self.new_tasks[task_id].parent
            if parent is None:
                return
            yield (task_id := parent)
        entry = self.graph.entry(task_id).parent
        while entry is not None:
            yield entry.id
            entry = entry.parent

    def _is_active(self, task_id: TaskId) -> bool:
        return self.exists(task_id) and not self._is_replaced(task_id)

    def _is_replaced(self, task_id: TaskId) -> bool:
        return self.state(task_id) is TaskState.REPLACED_BY_REPLAN

    # Staging

    def add_task(self, task: Task, parent: TaskId | None, path: str) -> None:
        """Add a task."""
        self._positions[task.id] = (task.priority, len(self.graph.entries) + len(self.new_tasks))
        self.new_tasks[task.id] = StagedTask(task, parent, path)
        self.tasks[task.id] = task
        self.changed_references[task.id] = path

    def reorder(self, task_id: TaskId, priority: int, order: int) -> Task:
        """Move a task to another position, and return it with its new priority."""
        self._positions[task_id] = (priority, order)
        task = self.task(task_id)
        if task.priority != priority:
            task = self.tasks[task_id] = task.model_copy(update={"priority": priority})
        return task

    def edit(self, old: Task, new: Task, path: str) -> None:
        """Change the document of a task."""
        self.tasks[new.id] = new
        if new.priority != old.priority:
            self._positions[new.id] = (new.priority, self.position(new.id)[1])
        self.added_dependencies += [
            AddedDependency(new.id, dep, path) for dep in new.depends_on if dep not in old.depends_on
        ]
        references_changed = any(
            getattr(new, name) != getattr(old, name) for name in ("arguments", "when", "fallbacks", "undo")
        )
        if references_changed or not set(old.depends_on).issubset(new.depends_on):
            self.changed_references[new.id] = path

    def remove(self, task_id: TaskId, path: str) -> None:
        """Remove a task."""
        self.revived.pop(task_id, None)
        self.removed[task_id] = path

    def revive(self, task_id: TaskId, was: TaskState, path: str) -> None:
        """Retry a task that was removed, ended or replaced."""
        self.removed.pop(task_id, None)
        self.revived[task_id] = path
        if was is TaskState.REPLACED_BY_REPLAN:  # its own dependencies count again, not those of its sinks
            self.added_dependencies += [AddedDependency(task_id, dep, path) for dep in self.task(task_id).depends_on]


MAX_DEPENDENCY_SEARCH: Final = 1_000
"""Number of tasks searched for a dependency; beyond it a task is assumed to depend on the other."""

_MAX_LISTED_TASKS: Final = 10


def check_changed_graph(overlay: PlanOverlay, *, changes_valid: bool) -> list[Problem]:
    """Return the problems of the plan as the changes would leave it.

    Args:
        overlay: the plan with the changes.
        changes_valid: whether each change is valid by itself, so that it makes sense to follow dependencies.
    """
    problems = []
    for task_id in [*overlay.tasks, *(i for i in overlay.revived if i not in overlay.tasks)]:
        exists = overlay.__contains__ if task_id in overlay.removed else overlay.exists
        for dep in overlay.task(task_id).depends_on:
            if not exists(dep):
                why = "was removed" if dep in overlay else "does not exist"
                path = _offending_change(overlay, task_id, dep)
                problems.append(Problem(path, f"task {task_id!r} depends on {dep!r}, which {why}"))
    for task_id, path in overlay.removed.items():
        stranded = sorted(set(overlay.stranded_by_removal(task_id)))
        if stranded:
            more = ", …" if len(stranded) > _MAX_LISTED_TASKS else ""
            names = ", ".join(map(repr, stranded[:_MAX_LISTED_TASKS])) + more
            problems.append(Problem(path, f"task {task_id!r} cannot be removed: {names} would be left waiting for it"))
    if problems or not changes_valid:
        return problems
    if cycle := _find_cycle(overlay):
        return [cycle]
    return list(_invalid_references(overlay))


def _offending_change(overlay: PlanOverlay, task_id: TaskId, dep: TaskId) -> str:
    """Return the path of the change that makes a task depend on another."""
    added = [edge.change_path for edge in overlay.added_dependencies if edge[:2] == (task_id, dep)]
    if added:
        return added[-1]
    new = overlay.new_tasks.get(task_id)
    return new.change_path if new is not None else overlay.revived.get(task_id) or overlay.removed.get(dep, "")


def _find_cycle(overlay: PlanOverlay) -> Problem | None:
    """Return the first cycle that the changes would close.

    A cycle among new tasks is found by following these alone. One that leads through the rest of the plan contains
    a dependency that a change adds there, so the search starts at those. Satisfied dependencies are left out, unless
    a task was ever skipped before its dependencies were settled.
    """
    inside: set[TaskId] = set()
    outside: set[TaskId] = set()
    starts = [
        (AddedDependency(task_id, dep, new.change_path), True)
        for task_id, new in overlay.new_tasks.items()
        for dep in overlay.unsatisfied_dependencies(task_id)
    ]
    for edge, within in [
        *((e, w) for e, w in starts if e.needed in overlay.new_tasks),
        *((e, False) for e in overlay.added_dependencies),
    ]:
        loop = _cycle_through(overlay, edge, inside if within else outside, within)
        if loop:
            names = [*loop[:_MAX_LISTED_TASKS], "…", loop[-1]] if len(loop) > _MAX_LISTED_TASKS + 1 else loop
            return Problem(edge.change_path, f"tasks would wait for one another: {' -> '.join(names)}")
    return None


def _cycle_through(overlay: PlanOverlay, edge: AddedDependency, done: set[TaskId], within: bool) -> list[TaskId]:
    """Return a cycle that an edge leads to; `done` collects the tasks that lead to none."""
    path: dict[TaskId, Iterator[TaskId]] = {edge.waiting: overlay.follow_replacements([edge.needed])}
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
        elif following not in done and (not within or following in overlay.new_tasks):
            path[following] = overlay.unsatisfied_dependencies(following)
    return []


def _invalid_references(overlay: PlanOverlay) -> Iterator[Problem]:
    """Yield the references of new and changed tasks to results that they cannot see."""
    for task_id, path in overlay.changed_references.items():
        if task_id not in overlay.removed:
            for _, name, text in result_references(overlay.task(task_id), overlay):
                if why := _reference_error(overlay, task_id, name):
                    yield Problem(path, f"task {task_id!r} refers to {text}, {why}")


def _reference_error(overlay: PlanOverlay, task_id: TaskId, name: TaskId) -> str:
    if not overlay.exists(name):
        return f"and {name!r} is no task of the plan"
    if name == task_id:
        return "its own output"
    if name in overlay.ancestors(task_id):
        return f"the output of what it replaces: there is none until {task_id!r} is done"
    sources = {other for other in overlay.follow_replacements([name]) if not overlay.is_satisfied(other)}
    seen = {task_id}
    stack = [task_id]
    while stack and sources and len(seen) < MAX_DEPENDENCY_SEARCH:
        for needed in overlay.unsatisfied_dependencies(stack.pop()):
            sources.discard(needed)
            if needed not in seen:
                seen.add(needed)
                stack.append(needed)
    return f"and does not depend on {name!r}: add {name!r} to its depends_on" if sources and not stack else ""
