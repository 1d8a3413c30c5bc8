"""Expectations tested against past calls, and suggestions of expectations learned from them."""

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
