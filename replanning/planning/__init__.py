"""Planning mode: from a goal in words to a finished plan, judged by a model after every phase."""

from __future__ import annotations

from replanning.planning._building import known_arguments, missing_arguments, revised
from replanning.planning._checking import problems_of, tasks_of
from replanning.planning._coordinator import PlanningCoordinator
from replanning.planning._deciding import DecisionPrompts, DecisionRequest, Reply
from replanning.planning._decision import Normalised, ReplanDecision, decision_model, normalise, parse_decision
from replanning.planning._history import PlanningHistoryExporter, PlanningHistoryStore, PrunedTask
from replanning.planning._journals import Journals
from replanning.planning._limits import (
    Cause,
    Counts,
    Limits,
    Override,
    Ruling,
    RulingKind,
    fingerprint,
    open_types,
    rule,
)
from replanning.planning._manager import Apply, ReplanManager
from replanning.planning._outputs import (
    Action,
    ActionPlan,
    CannotDecompose,
    CompletionReply,
    ExecutionReply,
    FunctionCall,
    GoalUnderstanding,
    InterventionSummary,
    PlanningReply,
    PlanRevision,
    Reflection,
    ReflectionReply,
    RequiresHumanIntervention,
    StepReply,
    Subtask,
    Summary,
    TaskDecomposition,
    UnclearGoal,
    parse_planning,
    parse_reply,
)
from replanning.planning._phases import ALLOWED, LEVELS, TARGETS, Phase, ReplanType, carried_over, keeps_finished
from replanning.planning._plan_parts import joined, parts_of
from replanning.planning._progress import PlanningProgress, PlanProgress, PlanStep
from replanning.planning._prompts import ReplanPromptBuilder
from replanning.planning._replan_records import (
    Consideration,
    DecisionRecord,
    ReplanNote,
    ReplanStage,
    ReplanStatistics,
)
from replanning.planning._request import IssueComment, TaskRequest, request_of
from replanning.planning._state import PlanningState, PlanVersion
from replanning.planning._steering import Steering
from replanning.planning._templates import prompt_templates

__all__ = [
    "ALLOWED",
    "LEVELS",
    "TARGETS",
    "Action",
    "ActionPlan",
    "Apply",
    "CannotDecompose",
    "Cause",
    "CompletionReply",
    "Consideration",
    "Counts",
    "DecisionPrompts",
    "DecisionRecord",
    "DecisionRequest",
    "ExecutionReply",
    "FunctionCall",
    "GoalUnderstanding",
    "InterventionSummary",
    "IssueComment",
    "Journals",
    "Limits",
    "Normalised",
    "Override",
    "Phase",
    "PlanProgress",
    "PlanRevision",
    "PlanStep",
    "PlanVersion",
    "PlanningCoordinator",
    "PlanningHistoryExporter",
    "PlanningHistoryStore",
    "PlanningProgress",
    "PlanningReply",
    "PlanningState",
    "PrunedTask",
    "Reflection",
    "ReflectionReply",
    "ReplanDecision",
    "ReplanManager",
    "ReplanNote",
    "ReplanPromptBuilder",
    "ReplanStage",
    "ReplanStatistics",
    "ReplanType",
    "Reply",
    "RequiresHumanIntervention",
    "Ruling",
    "RulingKind",
    "Steering",
    "StepReply",
    "Subtask",
    "Summary",
    "TaskDecomposition",
    "TaskRequest",
    "UnclearGoal",
    "carried_over",
    "decision_model",
    "fingerprint",
    "joined",
    "keeps_finished",
    "known_arguments",
    "missing_arguments",
    "normalise",
    "open_types",
    "parse_decision",
    "parse_planning",
    "parse_reply",
    "parts_of",
    "problems_of",
    "prompt_templates",
    "request_of",
    "revised",
    "rule",
    "tasks_of",
]
