"""Planning mode: from a goal in words to a completed plan, with a decision after every phase."""

from __future__ import annotations

from replanning.planning.coordinator import PlanningCoordinator
from replanning.planning.decisions import (
    ActionsDecision,
    DecisionRecord,
    DecisionRequest,
    DecompositionDecision,
    ExecutionDecision,
    GoalDecision,
    Phase,
    ReflectionDecision,
    ReplanCause,
    ReplanCounts,
    ReplanDecision,
    ReplanLimits,
    ReplanType,
    Ruling,
)
from replanning.planning.history import PlanningHistoryExporter, PlanningHistoryStore
from replanning.planning.manager import (
    Consideration,
    DecisionResponse,
    ReplanManager,
    ReplanNote,
    ReplanStatistics,
)
from replanning.planning.outputs import (
    Action,
    ActionPlan,
    GoalUnderstanding,
    Subtask,
    Summary,
    TaskDecomposition,
)
from replanning.planning.prompts import ReplanPromptBuilder
from replanning.planning.state import IssueComment, PlanningState, TaskRequest, request_of
from replanning.planning.steering import CommentSource, Steering, SteeringComment

__all__ = [
    "Action",
    "ActionPlan",
    "ActionsDecision",
    "CommentSource",
    "Consideration",
    "DecisionRecord",
    "DecisionRequest",
    "DecisionResponse",
    "DecompositionDecision",
    "ExecutionDecision",
    "GoalDecision",
    "GoalUnderstanding",
    "IssueComment",
    "Phase",
    "PlanningCoordinator",
    "PlanningHistoryExporter",
    "PlanningHistoryStore",
    "PlanningState",
    "ReflectionDecision",
    "ReplanCause",
    "ReplanCounts",
    "ReplanDecision",
    "ReplanLimits",
    "ReplanManager",
    "ReplanNote",
    "ReplanPromptBuilder",
    "ReplanStatistics",
    "ReplanType",
    "Ruling",
    "Steering",
    "SteeringComment",
    "Subtask",
    "Summary",
    "TaskDecomposition",
    "TaskRequest",
    "request_of",
]
