"""The sections of `Settings`, for those who set them in Python rather than in a file."""

from __future__ import annotations

from replanning._planning_settings import (
    DecisionSettings,
    DecompositionSettings,
    ExecutionSettings,
    GlobalSettings,
    GoalSettings,
    HistorySettings,
    PlanningReplanSettings,
    PlanningSettings,
    PlanRevisionSettings,
    ReflectionSettings,
    RevisionSettings,
    SequenceSettings,
)
from replanning._settings import (
    AlternativeSettings,
    ApprovalSettings,
    BetterPathSettings,
    EscalationSettings,
    JudgeSettings,
    LimitSettings,
    LLMSettings,
    PriceSettings,
    RedactionSettings,
    Settings,
    TimeoutSettings,
    Weights,
)

__all__ = [
    "AlternativeSettings",
    "ApprovalSettings",
    "BetterPathSettings",
    "DecisionSettings",
    "DecompositionSettings",
    "EscalationSettings",
    "ExecutionSettings",
    "GlobalSettings",
    "GoalSettings",
    "HistorySettings",
    "JudgeSettings",
    "LLMSettings",
    "LimitSettings",
    "PlanRevisionSettings",
    "PlanningReplanSettings",
    "PlanningSettings",
    "PriceSettings",
    "RedactionSettings",
    "ReflectionSettings",
    "RevisionSettings",
    "SequenceSettings",
    "Settings",
    "TimeoutSettings",
    "Weights",
]
