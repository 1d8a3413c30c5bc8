"""The replanning engine: monitor, generator, replanner, questions, delivery to exporters."""

from __future__ import annotations

from replanning.engine.again import ComparedDecision, ComparedRun, LeftOut, MadeDecision
from replanning.engine.generator import (
    AlternativeVetter,
    AskingRun,
    ProviderReply,
    RankedCandidates,
    detached_run,
)
from replanning.engine.monitor import MonitorNotice, RunWatch, TriggerCheck
from replanning.engine.situation import Situation

__all__ = [
    "AlternativeVetter",
    "AskingRun",
    "ComparedDecision",
    "ComparedRun",
    "LeftOut",
    "MadeDecision",
    "MonitorNotice",
    "ProviderReply",
    "RankedCandidates",
    "RunWatch",
    "Situation",
    "TriggerCheck",
    "detached_run",
]
