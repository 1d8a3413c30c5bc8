"""Planning mode: from a goal in words to a completed plan, with a model's decision after every phase."""

from __future__ import annotations

from replanning.planning.coordinator import PlanningCoordinator
from replanning.planning.decisions import Phase, ReplanDecision, ReplanLimits, ReplanType
from replanning.planning.history import PlanningHistoryExporter, PlanningHistoryStore
from replanning.planning.manager import ReplanManager
from replanning.planning.outputs import (
    Action,
    ActionPlan,
    GoalUnderstanding,
    Subtask,
    TaskDecomposition,
)
from replanning.planning.prompts import ReplanPromptBuilder
from replanning.planning.state import IssueComment, PlanningState, TaskRequest, request_of
from replanning.planning.steering import Steering

__all__ = [
    "Action",
    "ActionPlan",
    "GoalUnderstanding",
    "IssueComment",
    "Phase",
    "PlanningCoordinator",
    "PlanningHistoryExporter",
    "PlanningHistoryStore",
    "PlanningState",
    "ReplanDecision",
    "ReplanLimits",
    "ReplanManager",
    "ReplanPromptBuilder",
    "ReplanType",
    "Steering",
    "Subtask",
    "TaskDecomposition",
    "TaskRequest",
    "request_of",
]
