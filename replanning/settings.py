"""The sections of `Settings`, for those who set them in Python rather than in a file."""

from __future__ import annotations

from replanning._settings import (
    AlternativeSettings,
    ApprovalSettings,
    BetterPathSettings,
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
    "LLMSettings",
    "LimitSettings",
    "PriceSettings",
    "RedactionSettings",
    "Settings",
    "TimeoutSettings",
    "Weights",
]
