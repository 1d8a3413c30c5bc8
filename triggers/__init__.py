"""Triggers: events that request replanning, with one detector of each kind per file.

Programs raise them with `run.trigger(TaskFailed(task_id="build", error="disk full"))`. A subclass
of `TriggerEvent` is a new kind. `docs/project/architecture.md` lists the places to change for a new
kind within the library.
"""

from __future__ import annotations

from replanning.journal import (
    BetterPathFound,
    ContextChanged,
    GoalUnreachable,
    HumanRequest,
    ResourceChanged,
    TaskFailed,
    TaskTimedOut,
    TriggerEvent,
)

__all__ = [
    "BetterPathFound",
    "ContextChanged",
    "GoalUnreachable",
    "HumanRequest",
    "ResourceChanged",
    "TaskFailed",
    "TaskTimedOut",
    "TriggerEvent",
]
