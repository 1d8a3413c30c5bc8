"""The replanning engine: monitor, generator, replanner, questions, delivery to exporters."""

from __future__ import annotations

from replanning.engine.generator import (
    AlternativeVetter,
    AskingRun,
    ProviderReply,
    RankedCandidates,
    detached_run,
)
from replanning.engine.monitor import MonitorNotice
from replanning.engine.situation import Situation

__all__ = [
    "AlternativeVetter",
    "AskingRun",
    "MonitorNotice",
    "ProviderReply",
    "RankedCandidates",
    "Situation",
    "detached_run",
]
