"""What must be true of a plan after changes as a whole: what tasks need exists, and no task waits for itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from replanning._checks import results_read
from replanning._errors import Problem
from replanning._ids import TaskId
from replanning._staging import Edge, Staging

BOUND: Final = 1_000
"""How many tasks before one are looked at to see whether it depends on another; beyond that it is taken to."""

_SHOWN: Final = 10


def unsound(staging: Staging, *, sound_so_far: bool) -> list[Problem]:
    """What is wrong with a plan once the changes are carried out.

    Args:
        staging: the plan with the changes.
        sound_so_far: whether each change fits for itself, so that it makes sense to follow dependencies.
    """
    problems = [*_lacking(staging), *_left_waiting(staging)]
    if problems or not sound_so_far:
        return problems
    return _circle(staging) or list(_unreadable(staging))


def _lacking(staging: Staging) -> Iterator[Problem]:
    touched = [*staging.tasks, *(i for i in staging.revived if i not in staging.tasks)]
    for task_id in touched:
        there = staging.__contains__ if task_id in staging.removed else staging.exists
        for dep in staging.task(task_id).depends_on:
            if not there(dep):
                why = "was removed" if dep in staging else "does not exist"
                yield Problem(_place(staging, task_id, dep), f"task {task_id!r} depends on {dep!r}, which {why}")


def _place(staging: Staging, task_id: TaskId, dep: TaskId) -> str:
    """The change that makes a task depend on another."""
    named = [edge.place for edge in staging.edges if edge[:2] == (task_id, dep)]
    if named:
        return named[-1]
    born = staging.births.get(task_id)
    return born.place if born is not None else staging.revived.get(task_id) or staging.removed.get(dep, "")


def _left_waiting(staging: Staging) -> Iterator[Problem]:
    for task_id, place in staging.removed.items():
        waiting = sorted(set(staging.waiting_for(task_id)))
        if waiting:
            names = ", ".join(map(repr, waiting[:_SHOWN])) + (", …" if len(waiting) > _SHOWN else "")
            yield Problem(place, f"task {task_id!r} cannot be removed: {names} would be left waiting for it")


def _circle(staging: Staging) -> list[Problem]:
    """The first circle that the changes would close.

    New tasks can close one among themselves, which is seen without leaving them. One that leads through the rest
    of the plan needs an edge that a change adds there, so the search begins at these edges. What is settled is
    left out, except in a plan in which a task was skipped before what it depends on was settled.
    """
    inside: set[TaskId] = set()
    outside: set[TaskId] = set()
    starts = [(Edge(new, dep, born.place), True) for new, born in staging.births.items() for dep in staging.needs(new)]
    for edge, within in [
        *((e, w) for e, w in starts if e.needed in staging.births),
        *((e, False) for e in staging.edges),
    ]:
        loop = _loop(staging, edge, inside if within else outside, within)
        if loop:
            names = [*loop[:_SHOWN], "…", loop[-1]] if len(loop) > _SHOWN + 1 else loop
            return [Problem(edge.place, f"tasks would wait for one another: {' -> '.join(names)}")]
    return []


def _loop(staging: Staging, edge: Edge, done: set[TaskId], within: bool) -> list[TaskId]:
    """A circle that is reached over an edge; `done` has what was seen to lead to none."""
    path: dict[TaskId, Iterator[TaskId]] = {edge.waiting: staging.standing([edge.needed])}
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
        elif following not in done and (not within or following in staging.births):
            path[following] = staging.needs(following)
    return []


def _unreadable(staging: Staging) -> Iterator[Problem]:
    """References of new and changed tasks to results that they cannot see."""
    for task_id, place in staging.readers.items():
        if task_id in staging.removed:
            continue
        for _, name, text in results_read(staging.task(task_id), staging):
            if why := _why_unseen(staging, task_id, name):
                yield Problem(place, f"task {task_id!r} refers to {text}, {why}")


def _why_unseen(staging: Staging, task_id: TaskId, name: TaskId) -> str:
    if not staging.exists(name):
        return f"and {name!r} is no task of the plan"
    if name == task_id:
        return "its own output"
    if name in staging.parents(task_id):
        return f"the output of what it replaces: there is none until {task_id!r} is done"
    wanted = {other for other in staging.standing([name]) if not staging.settled(other)}
    if _is_behind(staging, task_id, wanted):
        return ""
    return f"and does not depend on {name!r}: add {name!r} to its depends_on"


def _is_behind(staging: Staging, task_id: TaskId, wanted: set[TaskId]) -> bool:
    """Whether a task waits for all of these, as far as can be seen within the bound."""
    seen = {task_id}
    stack = [task_id]
    while stack and wanted and len(seen) < BOUND:
        for needed in staging.needs(stack.pop()):
            wanted.discard(needed)
            if needed not in seen:
                seen.add(needed)
                stack.append(needed)
    return not wanted or bool(stack)
