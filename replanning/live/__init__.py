"""The plan while it runs: states, dependencies, scheduling, edits and facts. Synchronous, without I/O."""

from __future__ import annotations

from replanning.live.states import TaskState
from replanning.live.view import DraftView, PlanView, ReplanningInfo, TaskView
from replanning.live.world import (
    Feasibility,
    GroundAction,
    StripsProblem,
    StripsStep,
    artifact_fact,
    connected_components,
    regress,
    regress_at,
)

__all__ = [
    "DraftView",
    "Feasibility",
    "GroundAction",
    "PlanView",
    "ReplanningInfo",
    "StripsProblem",
    "StripsStep",
    "TaskState",
    "TaskView",
    "artifact_fact",
    "connected_components",
    "regress",
    "regress_at",
]
