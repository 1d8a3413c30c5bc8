"""Plan while it runs: states, dependencies, dispatch, revisions, facts; without I/O."""

from __future__ import annotations

from replanning.live.correction import Correction, Rerun
from replanning.live.stale import StaleResult
from replanning.live.states import TaskState
from replanning.live.strips import Feasibility, GroundAction, StripsProblem, StripsStep
from replanning.live.view import DraftView, PlanView, ReplanningInfo, TaskView

__all__ = [
    "Correction",
    "DraftView",
    "Feasibility",
    "GroundAction",
    "PlanView",
    "ReplanningInfo",
    "Rerun",
    "StaleResult",
    "StripsProblem",
    "StripsStep",
    "TaskState",
    "TaskView",
]
