"""Decision on a replan: requests, confidence, vetting, policy, answers; without I/O."""

from __future__ import annotations

from replanning.decision.request import (
    AlternativeProvider,
    Answer,
    HumanGate,
    Question,
    ReplanRequest,
    TriggerDetector,
)

__all__ = [
    "AlternativeProvider",
    "Answer",
    "HumanGate",
    "Question",
    "ReplanRequest",
    "TriggerDetector",
]
