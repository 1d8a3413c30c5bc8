"""Shared by detectors: states of waiting tasks, causes of failures, and names of tasks in sentences."""

from __future__ import annotations

import hashlib
import json

from replanning.journal.records import normalised_cause
from replanning.live import TaskState, TaskView

WAITING_STATES = (TaskState.PENDING, TaskState.READY, TaskState.BACKOFF, TaskState.NEEDS_CONTINUATION)


def task_cause(task: TaskView, *error: str) -> str:
    """Return the cause of a failure: equal for equal calls that fail in the same way.

    Only the error is normalised: `tool-1` and `tool-2` are different tools, and other arguments make another call.
    """
    call = task.task.tool or task.id
    if task.task.arguments:
        text = json.dumps(task.task.arguments, sort_keys=True)
        call += f"({hashlib.sha256(text.encode()).hexdigest()[:8]})"
    return f"{call}:{normalised_cause(*error)}"


def task_label(task: TaskView) -> str:
    """Return a task as sentences name it: with its tool, and with the task that it replaces."""
    tool = f" with {task.task.tool!r}" if task.task.tool else ""
    replaces = f" in place of {task.root!r}" if task.root != task.id else ""
    return f"task {task.id!r}{tool}{replaces}"
