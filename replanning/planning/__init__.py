"""Planning mode: from a goal in words to a finished plan, judged by a model after every phase."""

from __future__ import annotations

from replanning.planning._building import missing_arguments, planned_arguments, revise_decomposition
from replanning.planning._checking import compile_action_plan, plan_problems
from replanning.planning._coordinator import PlanningCoordinator
from replanning.planning._deciding import DecisionPrompts, DecisionRequest, DecisionResponse
from replanning.planning._decision import NormalisedDecision, ReplanDecision, decision_model, normalise, parse_decision
from replanning.planning._history import PlanningHistoryExporter, PlanningHistoryStore, PrunedTask
from replanning.planning._journals import RunJournals
from replanning.planning._limits import (
    OverrideReason,
    ReplanCause,
    ReplanCounts,
    ReplanLimits,
    Ruling,
    RulingKind,
    available_replan_types,
    fingerprint,
    make_ruling,
)
from replanning.planning._manager import ApplyReplan, ReplanManager
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
from replanning.planning._phases import (
    ALLOWED_REPLANS,
    LEVEL_DESCRIPTIONS,
    REPLAN_TARGETS,
    Phase,
    ReplanType,
    carried_over_tasks,
    keeps_finished,
)
from replanning.planning._plan_parts import batch_subtasks, merge_action_plans
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
    "ALLOWED_REPLANS",
    "LEVEL_DESCRIPTIONS",
    "REPLAN_TARGETS",
    "Action",
    "ActionPlan",
    "ApplyReplan",
    "CannotDecompose",
    "CompletionReply",
    "Consideration",
    "DecisionPrompts",
    "DecisionRecord",
    "DecisionRequest",
    "DecisionResponse",
    "ExecutionReply",
    "FunctionCall",
    "GoalUnderstanding",
    "InterventionSummary",
    "IssueComment",
    "NormalisedDecision",
    "OverrideReason",
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
    "ReplanCause",
    "ReplanCounts",
    "ReplanDecision",
    "ReplanLimits",
    "ReplanManager",
    "ReplanNote",
    "ReplanPromptBuilder",
    "ReplanStage",
    "ReplanStatistics",
    "ReplanType",
    "RequiresHumanIntervention",
    "Ruling",
    "RulingKind",
    "RunJournals",
    "Steering",
    "StepReply",
    "Subtask",
    "Summary",
    "TaskDecomposition",
    "TaskRequest",
    "UnclearGoal",
    "available_replan_types",
    "batch_subtasks",
    "carried_over_tasks",
    "compile_action_plan",
    "decision_model",
    "fingerprint",
    "keeps_finished",
    "make_ruling",
    "merge_action_plans",
    "missing_arguments",
    "normalise",
    "parse_decision",
    "parse_planning",
    "parse_reply",
    "plan_problems",
    "planned_arguments",
    "prompt_templates",
    "request_of",
    "revise_decomposition",
]
