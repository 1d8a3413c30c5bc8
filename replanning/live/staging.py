"""A live plan with changes laid over it that have not been carried out."""

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
    """A task that the changes bring in, what it replaces, and which change brings it in."""

    task: Task
    parent: TaskId | None
    change_path: str


class AddedDependency(NamedTuple):
    """A dependency that a change adds and by which a circle could close."""

    waiting: TaskId
    needed: TaskId
    change_path: str


class PlanOverlay:
    """What changes make of a plan, as far as they touch it; everything else is read from the plan itself.

    Args:
        graph: the plan, which stays as it is.
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
        return task_id in self.new_tasks or task_id in self.graph

    # Reading

    def task(self, task_id: TaskId) -> Task:
        """A task as the changes leave it."""
        return self.tasks[task_id] if task_id in self.tasks else self.graph.entry(task_id).task

    def state(self, task_id: TaskId) -> TaskState:
        """The state in which the changes leave a task."""
        if task_id in self.states:
            return self.states[task_id]
        return TaskState.PENDING if task_id in self.new_tasks else self.graph.entry(task_id).state

    def exists(self, task_id: TaskId) -> bool:
        """Whether there is such a task and it is not removed."""
        if task_id in self.removed or task_id not in self:
            return False
        return task_id in self.new_tasks or task_id in self.revived or not self.graph.entry(task_id).removed

    def is_satisfied(self, task_id: TaskId) -> bool:
        """Whether a task was done or skipped before the changes, and they leave it so."""
        if task_id in self.new_tasks:
            return False
        entry = self.graph.entry(task_id)
        return entry.satisfied and self.state(task_id) is entry.state

    def position(self, task_id: TaskId) -> tuple[int, int]:
        """The place of a task among those that are ready: priority, then order."""
        if task_id in self._positions:
            return self._positions[task_id]
        entry = self.graph.entry(task_id)
        return entry.priority, entry.order

    def follow_replacements(self, task_ids: Iterable[TaskId]) -> Iterator[TaskId]:
        """The tasks that stand for these: what was replaced is followed to its sinks."""
        stack = list(task_ids)[::-1]
        while stack:
            task_id = stack.pop()
            if self.state(task_id) is not TaskState.REPLACED_BY_REPLAN:
                yield task_id
            elif task_id in self.sinks:
                stack.extend(reversed(self.sinks[task_id]))
            else:
                stack.extend(reversed(self.graph.sinks(self.graph.entry(task_id))))

    def unsatisfied_dependencies(self, task_id: TaskId) -> Iterator[TaskId]:
        """What a task still waits for."""
        every = self.graph.has_early_skips
        return (
            dep
            for dep in self.follow_replacements(self.task(task_id).depends_on)
            if every or not self.is_satisfied(dep)
        )

    def stranded_by_removal(self, task_id: TaskId) -> Iterator[TaskId]:
        """The tasks that would wait for ever if a task went."""
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
        """What a task replaces, directly and before that."""
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

    # Laying changes over it

    def add_task(self, task: Task, parent: TaskId | None, place: str) -> None:
        """Add a task."""
        self._positions[task.id] = (task.priority, len(self.graph) + len(self.new_tasks))
        self.new_tasks[task.id] = StagedTask(task, parent, place)
        self.tasks[task.id] = task
        self.changed_references[task.id] = place

    def reorder(self, task_id: TaskId, priority: int, order: int) -> Task:
        """Give a task another place, and return it as it is then."""
        self._positions[task_id] = (priority, order)
        task = self.task(task_id)
        if task.priority != priority:
            task = self.tasks[task_id] = task.model_copy(update={"priority": priority})
        return task

    def edit(self, old: Task, new: Task, place: str) -> None:
        """Put a changed task in the place of the one it was."""
        self.tasks[new.id] = new
        if new.priority != old.priority:
            self._positions[new.id] = (new.priority, self.position(new.id)[1])
        self.added_dependencies += [
            AddedDependency(new.id, dep, place) for dep in new.depends_on if dep not in old.depends_on
        ]
        reads_anew = any(
            getattr(new, name) != getattr(old, name) for name in ("arguments", "when", "fallbacks", "undo")
        )
        if reads_anew or not set(old.depends_on).issubset(new.depends_on):
            self.changed_references[new.id] = place

    def remove(self, task_id: TaskId, place: str) -> None:
        """Take a task out."""
        self.revived.pop(task_id, None)
        self.removed[task_id] = place

    def revive(self, task_id: TaskId, was: TaskState, place: str) -> None:
        """Let a task wait again that was removed, had ended, or was replaced."""
        self.removed.pop(task_id, None)
        self.revived[task_id] = place
        if was is TaskState.REPLACED_BY_REPLAN:  # its own dependencies are followed again, not those of its sinks
            self.added_dependencies += [AddedDependency(task_id, dep, place) for dep in self.task(task_id).depends_on]


MAX_DEPENDENCY_SEARCH: Final = 1_000
"""How many tasks before one are looked at to see whether it depends on another; beyond that it is taken to."""

_MAX_LISTED_TASKS: Final = 10


def check_changed_graph(staging: PlanOverlay, *, changes_valid: bool) -> list[Problem]:
    """What is wrong with a plan once the changes are carried out.

    Args:
        staging: the plan with the changes.
        sound_so_far: whether each change fits for itself, so that it makes sense to follow dependencies.
    """
    problems = [*_missing_dependencies(staging), *_stranded_dependents(staging)]
    if problems or not changes_valid:
        return problems
    return _find_cycle(staging) or list(_invalid_references(staging))


def _missing_dependencies(staging: PlanOverlay) -> Iterator[Problem]:
    touched = [*staging.tasks, *(i for i in staging.revived if i not in staging.tasks)]
    for task_id in touched:
        there = staging.__contains__ if task_id in staging.removed else staging.exists
        for dep in staging.task(task_id).depends_on:
            if not there(dep):
                why = "was removed" if dep in staging else "does not exist"
                yield Problem(
                    _offending_change(staging, task_id, dep), f"task {task_id!r} depends on {dep!r}, which {why}"
                )


def _offending_change(staging: PlanOverlay, task_id: TaskId, dep: TaskId) -> str:
    """The change that makes a task depend on another."""
    named = [edge.change_path for edge in staging.added_dependencies if edge[:2] == (task_id, dep)]
    if named:
        return named[-1]
    born = staging.new_tasks.get(task_id)
    return born.change_path if born is not None else staging.revived.get(task_id) or staging.removed.get(dep, "")


def _stranded_dependents(staging: PlanOverlay) -> Iterator[Problem]:
    for task_id, place in staging.removed.items():
        waiting = sorted(set(staging.stranded_by_removal(task_id)))
        if waiting:
            names = ", ".join(map(repr, waiting[:_MAX_LISTED_TASKS])) + (
                ", …" if len(waiting) > _MAX_LISTED_TASKS else ""
            )
            yield Problem(place, f"task {task_id!r} cannot be removed: {names} would be left waiting for it")


def _find_cycle(staging: PlanOverlay) -> list[Problem]:
    """The first circle that the changes would close.

    New tasks can close one among themselves, which is seen without leaving them. One that leads through the rest
    of the plan needs an edge that a change adds there, so the search begins at these edges. What is settled is
    left out, except in a plan in which a task was skipped before what it depends on was settled.
    """
    inside: set[TaskId] = set()
    outside: set[TaskId] = set()
    starts = [
        (AddedDependency(new, dep, born.change_path), True)
        for new, born in staging.new_tasks.items()
        for dep in staging.unsatisfied_dependencies(new)
    ]
    for edge, within in [
        *((e, w) for e, w in starts if e.needed in staging.new_tasks),
        *((e, False) for e in staging.added_dependencies),
    ]:
        loop = _cycle_through(staging, edge, inside if within else outside, within)
        if loop:
            names = [*loop[:_MAX_LISTED_TASKS], "…", loop[-1]] if len(loop) > _MAX_LISTED_TASKS + 1 else loop
            return [Problem(edge.change_path, f"tasks would wait for one another: {' -> '.join(names)}")]
    return []


def _cycle_through(staging: PlanOverlay, edge: AddedDependency, done: set[TaskId], within: bool) -> list[TaskId]:
    """A circle that is reached over an edge; `done` has what was seen to lead to none."""
    path: dict[TaskId, Iterator[TaskId]] = {edge.waiting: staging.follow_replacements([edge.needed])}
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
        elif following not in done and (not within or following in staging.new_tasks):
            path[following] = staging.unsatisfied_dependencies(following)
    return []


def _invalid_references(staging: PlanOverlay) -> Iterator[Problem]:
    """References of new and changed tasks to results that they cannot see."""
    for task_id, place in staging.changed_references.items():
        if task_id in staging.removed:
            continue
        for _, name, text in result_references(staging.task(task_id), staging):
            if why := _reference_error(staging, task_id, name):
                yield Problem(place, f"task {task_id!r} refers to {text}, {why}")


def _reference_error(staging: PlanOverlay, task_id: TaskId, name: TaskId) -> str:
    if not staging.exists(name):
        return f"and {name!r} is no task of the plan"
    if name == task_id:
        return "its own output"
    if name in staging.ancestors(task_id):
        return f"the output of what it replaces: there is none until {task_id!r} is done"
    wanted = {other for other in staging.follow_replacements([name]) if not staging.is_satisfied(other)}
    if _depends_on_all(staging, task_id, wanted):
        return ""
    return f"and does not depend on {name!r}: add {name!r} to its depends_on"


def _depends_on_all(staging: PlanOverlay, task_id: TaskId, wanted: set[TaskId]) -> bool:
    """Whether a task waits for all of these, as far as can be seen within the bound."""
    seen = {task_id}
    stack = [task_id]
    while stack and wanted and len(seen) < MAX_DEPENDENCY_SEARCH:
        for needed in staging.unsatisfied_dependencies(stack.pop()):
            wanted.discard(needed)
            if needed not in seen:
                seen.add(needed)
                stack.append(needed)
    return not wanted or bool(stack)
