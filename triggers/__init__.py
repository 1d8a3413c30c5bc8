"""Triggers: the events that ask for replanning, and a detector of each kind, one per file.

Programs raise them by hand: `run.trigger(TaskFailed(task_id="build", error="disk full"))`. A
subclass of `TriggerEvent` is a new kind. `docs/project/architecture.md` lists what a new kind
within the library needs.
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
