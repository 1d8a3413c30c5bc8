"""What must be true of a plan after changes as a whole: what tasks need exists, and no task waits for itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from replanning._checks import result_references
from replanning._errors import Problem
from replanning._ids import TaskId
from replanning._staging import AddedDependency, PlanOverlay

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
