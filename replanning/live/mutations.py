"""Carries checked changes out on a plan, one function for each kind of step. None of them can fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replanning.live.states import FINISHED, TaskEvent, TaskState
from replanning.plan.tasks import Task
from replanning.plan.types import TaskId

if TYPE_CHECKING:
    from replanning.live.graph import TaskGraph


def create(graph: TaskGraph, task: Task, parent: TaskId | None) -> None:
    """Make the entry of a new task, which `link` puts in its place."""
    graph._insert(task, None if parent is None else graph.entry(parent))
    graph.counts[TaskState.PENDING] += 1


def link(graph: TaskGraph, task_id: TaskId) -> None:
    """Let a new task wait for what it depends on."""
    entry = graph.entry(task_id)
    graph._link(entry)
    graph._update_readiness(entry)


def replace(graph: TaskGraph, task_id: TaskId, parts: tuple[TaskId, ...], sinks: tuple[TaskId, ...]) -> None:
    """Let new tasks stand for another."""
    original = graph.entry(task_id)
    graph.dispatcher.end_claim(original)
    graph._transition(original, TaskEvent.REPLACE)
    original.replaced_by, original.unsatisfied_sinks = parts, len(sinks)
    for part in parts:
        graph.entry(part).sink_of = original if part in sinks else None
        link(graph, part)


def edit(graph: TaskGraph, task: Task) -> None:
    """Put a changed task in the place of the one it was."""
    entry = graph.entry(task.id)
    if entry.state not in FINISHED:
        graph.dependency_index.discard(entry.task)
        graph.dependency_index.add(task)
    if entry.task.depends_on != task.depends_on:
        graph._unlink(entry)
        entry.set_task(task)
        graph._link(entry)
        graph._update_readiness(entry)
    entry.set_task(task)
    graph._update_unsatisfied_count(entry)
    graph.dispatcher.requeue(entry)


def reorder(graph: TaskGraph, task: Task, order: int) -> None:
    """Give a task another place among those that are ready."""
    entry = graph.entry(task.id)
    entry.set_task(task)
    entry.order = order
    graph.dispatcher.requeue(entry)


def remove(graph: TaskGraph, task_id: TaskId) -> None:
    """Take a task out; it can be revived."""
    entry = graph.entry(task_id)
    graph.dispatcher.end_claim(entry)
    graph._transition(entry, TaskEvent.CANCEL)
    entry.removed = True
    graph._update_unsatisfied_count(entry)


def withdraw(graph: TaskGraph, task_id: TaskId) -> None:
    """Take a task out for good that stood for another, which is to run again."""
    entry = graph.entry(task_id)
    if entry.state is TaskState.REPLACED_BY_REPLAN:
        graph._transition(entry, TaskEvent.REVIVE)
    if entry.state is not TaskState.CANCELLED:
        remove(graph, task_id)
    entry.removed, entry.withdrawn, entry.sink_of = True, True, None


def retry(graph: TaskGraph, task_id: TaskId, due: float | None) -> None:
    """Let a task run again, at once or when its delay is over."""
    entry = graph.entry(task_id)
    if entry.state is TaskState.SKIPPED:
        graph._unsatisfy_dependents(entry)
    graph._transition(entry, TaskEvent.REVIVE)
    graph.dependency_index.add(entry.task)
    entry.removed, entry.attempts_in_round, entry.reason, entry.condition_revision = False, 0, "", None
    entry.replaced_by, entry.unsatisfied_sinks = (), 0
    entry.continuations, entry.feedback = 0, ""
    graph._update_unsatisfied_count(entry)
    graph._wait_until(entry, due)
    graph._update_readiness(entry)


def finish(graph: TaskGraph, task_id: TaskId, event: TaskEvent, reason: str) -> None:
    """Skip or cancel a task."""
    entry = graph.entry(task_id)
    graph.dispatcher.end_claim(entry)
    graph._transition(entry, event)
    graph._end_attempt(entry)
    entry.reason = reason
    if event is TaskEvent.SKIP:
        graph.has_early_skips = graph.has_early_skips or entry.unsatisfied_dependencies > 0
        graph._satisfy_dependents(entry)


def abort(graph: TaskGraph, reason: str) -> None:
    """Have the run stopped."""
    graph.aborted = reason
