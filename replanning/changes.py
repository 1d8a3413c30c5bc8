"""Typed edits of a live plan, and alternatives made of them."""

from __future__ import annotations

from replanning._changes import (
    AbortRun,
    AddTask,
    Alternative,
    CancelTask,
    ModifyTask,
    PlanChange,
    RemoveTask,
    ReorderTasks,
    ReplaceTask,
    RetryTask,
    SkipTask,
    parse_changes,
)

__all__ = [
    "AbortRun",
    "AddTask",
    "Alternative",
    "CancelTask",
    "ModifyTask",
    "PlanChange",
    "RemoveTask",
    "ReorderTasks",
    "ReplaceTask",
    "RetryTask",
    "SkipTask",
    "parse_changes",
]
