"""Plan while it runs: states, dependencies, dispatch, revisions and facts; synchronous, without I/O."""

from __future__ import annotations

from replanning.live.states import TaskState
from replanning.live.strips import (
    Feasibility,
    GroundAction,
    StripsProblem,
    StripsStep,
    artifact_fact,
    connected_components,
    regress,
    regress_at,
)
from replanning.live.view import DraftView, PlanView, ReplanningInfo, TaskView

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
