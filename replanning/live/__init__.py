"""Plan while it runs: states, dependencies, dispatch, revisions, facts; without I/O."""

from __future__ import annotations

from replanning.live.stale import StaleResult
from replanning.live.states import TaskState
from replanning.live.strips import Feasibility, GroundAction, StripsProblem, StripsStep
from replanning.live.view import DraftView, PlanView, ReplanningInfo, TaskView

__all__ = [
    "DraftView",
    "Feasibility",
    "GroundAction",
    "PlanView",
    "ReplanningInfo",
    "StaleResult",
    "StripsProblem",
    "StripsStep",
    "TaskState",
    "TaskView",
]
