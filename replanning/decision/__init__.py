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
from replanning.exports import report_module

__all__ = [
    "AlternativeProvider",
    "Answer",
    "HumanGate",
    "Question",
    "ReplanRequest",
    "TriggerDetector",
]

report_module(__name__, __all__)
