"""Stale results: results of finished tasks that come from a value of the context that has changed since."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from replanning.errors import ExpressionError
from replanning.live.entries import CONDITION_NOT_MET, TaskEntry
from replanning.live.graph import TaskGraph
from replanning.live.states import SATISFIED, WAITING, TaskState
from replanning.plan.conditions import Condition
from replanning.plan.references import find_references
from replanning.plan.types import TaskId


class StaleResult(NamedTuple):
    """Why a result is stale, and whether `on_stale` demands that the task is done again.

    A cause is a key of the context that the task read (`context.KEY`), or the root of the lineage of a stale task whose
    result it used.
    """

    causes: tuple[str, ...]
    redo: bool


def stale_results(live: TaskGraph) -> dict[TaskId, StaleResult]:
    """Return the finished tasks whose results are stale, in the order of the plan.

    A task's result is stale if the task read a key of the context whose value has changed since, or depends on a task
    with a stale result, or on one that is done again, unless it began after that was done. A task that changed the
    context itself does not become stale through its dependencies: their results may be the reason for its change.
    Earlier values of the context are compared by their hashes; they are not kept.
    """
    found: dict[TaskId, StaleResult] = {}
    # A task whose dependents are examined, the task whose result reaches them, and whether they are to be done again.
    stack: list[tuple[TaskEntry, TaskEntry, bool]] = []
    history, referring = live.staleness.history, live.dependency_index.context_readers
    for key in history.hashes:
        for entry in map(
            live.entries.__getitem__, (*referring.get(key, ()), *history.readers.get(key, ()))
        ):
            policy = entry.task.on_stale or live.plan.on_stale
            keys = () if policy == "ignore" or entry.id in found else outdated_keys(live, entry)
            if keys:
                found[entry.id] = StaleResult(
                    tuple(f"context.{key}" for key in keys), policy == "redo"
                )
                stack.append((entry, entry, policy == "redo"))
    stack += [
        (entry, entry, True) for entry in map(live.entries.__getitem__, live.staleness.redone)
    ]
    passed: set[tuple[TaskId, TaskId, bool]] = set()
    while stack:
        entry, source, redo = stack.pop()
        for other in map(live.entries.__getitem__, entry.dependent_ids()):
            policy = other.task.on_stale or ("redo" if redo else live.plan.on_stale)
            finished = other.state in SATISFIED and not (
                source.replacement.redone and not _precedes_redo(other, source)
            )
            if policy == "ignore" or not finished:
                continue
            known, again = found.get(other.id, StaleResult((), redo=False)), policy == "redo"
            if other.reads.changed_context or not _has_result(other):
                if (other.id, source.id, redo) not in passed:
                    passed.add((other.id, source.id, redo))
                    stack.append((other, source, redo))
            elif source.root not in known.causes or again > known.redo:
                causes = dict.fromkeys((*known.causes, source.root))
                found[other.id] = StaleResult(tuple(causes), known.redo or again)
                stack.append((other, other, again))
    return {
        task_id: found[task_id]
        for task_id in sorted(found, key=lambda task_id: live.entries[task_id].order)
    }


def outdated_keys(live: TaskGraph, entry: TaskEntry) -> list[str]:
    """Return the keys of the context that a finished task read and that have another value now.

    Keys that only its condition refers to count if the condition would have another outcome now.
    """
    task, changed, done = (
        entry.task,
        live.staleness.history.changed_since,
        entry.state is TaskState.DONE,
    )
    keys: list[str] = []
    if done:
        references = find_references(task.arguments) if task.arguments else ()
        read = {
            str(reference.path[0]): entry.reads.context_version
            for reference in references
            if reference.task is None
        }
        keys = [
            key
            for key, version in (read | (entry.reads.keys or {})).items()
            if changed(key, version)
        ]
    if task.when is not None and not keys and _has_result(entry):
        names = sorted(
            key
            for key in Condition.parse(task.when).names("context")
            if changed(key, entry.reads.context_version)
        )
        if names:
            try:
                holds = live.evaluate(task.when)
            except ExpressionError:
                holds = False
            keys = names if holds is not done else []
    return keys


def followers(live: TaskGraph, redone: Collection[TaskId]) -> dict[TaskId, list[TaskId]]:
    """Return the tasks that have to wait for tasks that are done again, with the dependencies that they need in addition.

    They are the waiting dependents of the tasks done again, and the tasks done again that depend on others of them. A
    task that depends on one of them only through finished or running tasks that are kept would not wait for it, so it
    gets that one as an additional dependency.
    """
    found: dict[TaskId, list[TaskId]] = {}
    for task_id in redone:
        kept = {task_id: None}
        for behind in (stack := [task_id]):
            for other in map(live.entries.__getitem__, live.entries[behind].dependent_ids()):
                if other.state in WAITING or (other.id in redone and other.id != task_id):
                    further = found.setdefault(other.id, [])
                    if behind != task_id and task_id not in (*further, *other.task.depends_on):
                        further.append(task_id)
                elif other.id not in kept and other.state in (TaskState.RUNNING, *SATISFIED):
                    kept[other.id] = None
                    stack.append(other.id)
    return found


def _precedes_redo(entry: TaskEntry, redone: TaskEntry) -> bool:
    """Return whether a task began before the replacement of a finished task was done."""
    stack = [redone]
    for replaced in stack:
        if replaced.state is TaskState.REPLACED_BY_REPLAN:
            stack += replaced.replacement.sinks
    return not redone.satisfied or any(leaf.reads.ended > entry.reads.started for leaf in stack[1:])


def _has_result(entry: TaskEntry) -> bool:
    """Return whether a task is done, or was skipped because of its condition."""
    skipped = entry.state is TaskState.SKIPPED and entry.condition_revision == CONDITION_NOT_MET
    return entry.state is TaskState.DONE or skipped
