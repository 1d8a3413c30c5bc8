"""Expectations and past calls: which outputs they would have rejected, and which to suggest."""

from __future__ import annotations

from replanning.expectations.calls import CheckedCall, ObservedCall, checked_calls, recorded_calls
from replanning.expectations.suggestions import (
    Suggestion,
    ToolSuggestions,
    suggest_expectations,
)

__all__ = [
    "CheckedCall",
    "ObservedCall",
    "Suggestion",
    "ToolSuggestions",
    "checked_calls",
    "recorded_calls",
    "suggest_expectations",
]
