"""The sections of `Settings`, for those who set them in Python rather than in a file."""

from __future__ import annotations

from replanning._settings import (
    AlternativeSettings,
    ApprovalSettings,
    BetterPathSettings,
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
    "JudgeSettings",
    "LLMSettings",
    "LimitSettings",
    "PriceSettings",
    "RedactionSettings",
    "Settings",
    "TimeoutSettings",
    "Weights",
]
