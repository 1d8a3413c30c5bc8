"""The plan on facts: what its steps need and bring about, for providers that plan and for whoever checks plans."""

from __future__ import annotations

from replanning._patterns import as_text, compile_fact_pattern, placeholders
from replanning._world import (
    Feasibility,
    GroundAction,
    StripsProblem,
    StripsStep,
    artifact_fact,
    connected_components,
    regress,
    regress_at,
)

__all__ = [
    "Feasibility",
    "GroundAction",
    "StripsProblem",
    "StripsStep",
    "artifact_fact",
    "as_text",
    "compile_fact_pattern",
    "connected_components",
    "placeholders",
    "regress",
    "regress_at",
]
