"""How detectors name a task and what went wrong with it."""

from __future__ import annotations

import hashlib
import json

from replanning.events import normalised_cause
from replanning.interfaces import TaskView


def task_cause(task: TaskView, *error: str) -> str:
    """What went wrong, such that the same call going wrong in the same way is the same cause.

    What varies by occasion is masked in the error alone: `tool-1` and `tool-2` are different tools, and one tool
    with other arguments is another call.
    """
    call = task.task.tool or task.id
    if task.task.arguments:
        text = json.dumps(task.task.arguments, sort_keys=True)
        call += f"({hashlib.sha256(text.encode()).hexdigest()[:8]})"
    return f"{call}:{normalised_cause(*error)}"


def task_label(task: TaskView) -> str:
    """A task as sentences name it: with its tool, and with what it stands in for."""
    tool = f" with {task.task.tool!r}" if task.task.tool else ""
    stands_for = f" in place of {task.root!r}" if task.root != task.id else ""
    return f"task {task.id!r}{tool}{stands_for}"


def shorten(text: str, limit: int = 300) -> str:
    """A text on one line that is no longer than a sentence may be."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
