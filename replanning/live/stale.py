"""Stale results: finished tasks that read values of the context which have changed since."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from copy import deepcopy
from typing import Final, NamedTuple

from replanning.errors import ExpressionError
from replanning.live.entries import TaskEntry
from replanning.live.facts import ContextHistory
from replanning.live.graph import TaskGraph
from replanning.live.states import SATISFIED, STUCK, WAITING, TaskState
from replanning.plan.conditions import Condition
from replanning.plan.references import find_references
from replanning.plan.types import JsonObject, TaskId

_BEGUN: Final = STUCK | {TaskState.RUNNING, TaskState.DONE}
"""States of tasks whose last attempt has read its arguments, or tried to."""


class StaleResult(NamedTuple):
    """Causes of a stale result, and whether `on_stale` requires that the task is done again.

    A cause is a context key that the task read (`context.KEY`), or the root of the lineage of a
    stale task whose result it used.
    """

    causes: tuple[str, ...]
    redo: bool


def stale_results(live: TaskGraph) -> dict[TaskId, StaleResult]:
    """Return the finished tasks whose results are stale, in the order of the plan.

    A result is stale for one of three reasons. The task read a context key whose value has changed
    since; or it depends on a task with a stale result; or it depends on a task that is done again,
    and began before the second time ended. A task that changed the context itself does not become
    stale through its dependencies: their results may be the reason for its change. Earlier values
    of the context are compared by their hashes; they are not kept.
    """
    found = _find_outdated(live)
    # Each item: a task whose dependents are examined, the task whose result reaches them, and
    # whether they must be done again.
    stack: list[tuple[TaskEntry, TaskEntry, bool]] = []
    for task_id, result in found.items():
        entry = live.entries[task_id]
        stack.append((entry, entry, result.redo))
    for task_id, redo in live.staleness.redone.items():
        entry = live.entries[task_id]
        stack.append((entry, entry, redo))
    passed: set[tuple[TaskId, TaskId, bool]] = set()
    while stack:
        entry, source, redo = stack.pop()
        for other_id in entry.dependent_ids():
            other = live.entries[other_id]
            policy = other.task.on_stale or live.plan.on_stale
            if redo and not other.task.on_stale:
                policy = "redo"
            if policy == "ignore" or not _used_result(other, source):
                continue
            if other.reads.changed_context or not _has_result(other):
                # It is not stale itself, but the result reaches its dependents.
                step = (other.id, source.id, redo)
                if step not in passed:
                    passed.add(step)
                    stack.append((other, source, redo))
                continue
            known = found.get(other.id, StaleResult((), redo=False))
            again = policy == "redo"
            if source.root not in known.causes or again > known.redo:
                causes = dict.fromkeys((*known.causes, source.root))
                found[other.id] = StaleResult(tuple(causes), known.redo or again)
                stack.append((other, other, again))
    in_order = sorted(found, key=lambda task_id: live.entries[task_id].order)
    return {task_id: found[task_id] for task_id in in_order}


def _find_outdated(live: TaskGraph) -> dict[TaskId, StaleResult]:
    """Return the tasks that read a value of the context that has changed since."""
    found: dict[TaskId, StaleResult] = {}
    history = live.staleness.history
    for changed in history.hashes:
        for entry in _possible_readers(live, changed):
            policy = entry.task.on_stale or live.plan.on_stale
            if policy == "ignore" or entry.id in found:
                continue
            if entry.state not in SATISFIED:
                continue
            keys = _outdated_keys(live, entry, live.context, history)
            if keys:
                causes = tuple(f"context.{key}" for key in keys)
                found[entry.id] = StaleResult(causes, policy == "redo")
    return found


def _used_result(entry: TaskEntry, source: TaskEntry) -> bool:
    """Return whether a finished task may have used the earlier result of another."""
    if entry.state not in SATISFIED:
        return False
    return not source.replacement.redone or _precedes_redo(entry, source)


def outdated_by(
    live: TaskGraph, changes: JsonObject, removed: Collection[str]
) -> dict[TaskId, list[str]]:
    """Return the tasks that have read values which a change of the context would replace.

    The keys come with each task. Running and failed tasks count by the keys that their arguments
    refer to. The plan itself does not change.

    Args:
        live: the plan.
        changes: the new values.
        removed: the keys that would be removed.
    """
    found: dict[TaskId, list[str]] = {}
    keys = dict.fromkeys((*changes, *removed))
    if not keys:
        return found
    context = dict(live.context)
    history = deepcopy(live.staleness.history)
    history.change(context, changes, removed, live.scheduler.last_claim)
    for key in keys:
        for entry in _possible_readers(live, key):
            outdated = _outdated_keys(live, entry, context, history)
            # Earlier changes are not an effect of this one.
            concerned = [each for each in outdated if each in keys]
            if concerned:
                found[entry.id] = concerned
    return found


def _possible_readers(live: TaskGraph, key: str) -> Iterator[TaskEntry]:
    """Yield the tasks that refer to a context key, or whose work has read it."""
    referring = live.dependency_index.context_references.get(key, ())
    reading = live.staleness.history.readers.get(key, ())
    for task_id in dict.fromkeys((*referring, *reading)):
        yield live.entries[task_id]


def _outdated_keys(
    live: TaskGraph, entry: TaskEntry, context: JsonObject, history: ContextHistory
) -> list[str]:
    """Return the context keys that a task has read and whose values have changed since.

    A key that only the condition of a finished task refers to counts if the condition would now
    have the opposite outcome.
    """
    task = entry.task
    changed = history.changed_since
    done = entry.state is TaskState.DONE
    keys: list[str] = []
    if entry.state in _BEGUN:
        read: dict[str, int] = {}
        if task.arguments:
            for reference in find_references(task.arguments):
                if reference.root == "context":
                    read[str(reference.path[0])] = entry.reads.context_version
        read |= entry.reads.keys or {}
        keys = [key for key, version in read.items() if changed(key, version)]
    if task.when is None or keys or not _has_result(entry):
        return keys
    for key in sorted(Condition.parse(task.when).names("context")):
        if changed(key, entry.reads.context_version):
            keys.append(key)
    if not keys:
        return []
    try:
        holds = live.evaluate(task.when, task, context)
    except ExpressionError:
        holds = False
    # A task is done because its condition held, and was skipped because it did not.
    if holds is done:
        return []
    return keys


def may_be_stale(live: TaskGraph, entry: TaskEntry) -> bool:
    """Return whether the new result of a task may already be stale."""
    staleness = live.staleness
    if not staleness.redoes or not (staleness.history.version or staleness.redone):
        return False
    if _outdated_keys(live, entry, live.context, staleness.history):
        return True
    for dep in entry.task.depends_on:
        if live.entries[dep].replacement.redone or dep in staleness.recorded:
            return True
    return False


def followers(live: TaskGraph, again: Collection[TaskId]) -> dict[TaskId, list[TaskId]]:
    """Return the tasks that must wait for tasks that run again, with their additional dependencies.

    They are the waiting dependents of the tasks that run again, and tasks that run again themselves
    and depend on another one. A task may depend on one only through finished or running tasks that
    are kept. It would not wait, so it needs an additional dependency.
    """
    found: dict[TaskId, list[TaskId]] = {}
    for task_id in again:
        kept = {task_id: None}
        stack = [task_id]
        # The list grows while its tasks are examined.
        for behind in stack:
            for other_id in live.entries[behind].dependent_ids():
                other = live.entries[other_id]
                if other.state in WAITING or (other.id in again and other.id != task_id):
                    further = found.setdefault(other.id, [])
                    if behind != task_id and task_id not in (*further, *other.task.depends_on):
                        further.append(task_id)
                elif other.id not in kept and other.state in (TaskState.RUNNING, *SATISFIED):
                    kept[other.id] = None
                    stack.append(other.id)
    return found


def _precedes_redo(entry: TaskEntry, redone: TaskEntry) -> bool:
    """Return whether a task began before the replacement of a finished task was done."""
    if not redone.satisfied:
        return True
    stack = [redone]
    # Replacements may have been replaced themselves.
    for replaced in stack:
        if replaced.state is TaskState.REPLACED_BY_REPLAN:
            stack += replaced.replacement.sinks
    return any(leaf.reads.ended > entry.reads.started for leaf in stack[1:])


def _has_result(entry: TaskEntry) -> bool:
    """Return whether a task is done, or was skipped because of its condition."""
    return entry.state is TaskState.DONE or entry.condition_not_met
