"""The sections of `Settings` for those who set them in Python, and `load_settings` for those who have a file."""

from __future__ import annotations

from replanning._config import LoadedSettings, load_settings
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
    OverrideSettings,
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
    "LoadedSettings",
    "OverrideSettings",
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
    "load_settings",
]
