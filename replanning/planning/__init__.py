"""Planning mode: from a goal in words to a finished plan, judged by a model after every phase."""

from __future__ import annotations

from replanning.planning._decision import Normalised, ReplanDecision, decision_model, normalise, parse_decision
from replanning.planning._limits import (
    Cause,
    Counts,
    Limits,
    Override,
    Ruling,
    RulingKind,
    fingerprint,
    open_types,
    rule,
)
from replanning.planning._manager import Apply, DecisionPrompts, DecisionRequest, ReplanManager, Reply
from replanning.planning._phases import ALLOWED, LEVELS, TARGETS, Phase, ReplanType, carried_over, keeps_finished
from replanning.planning._replan_records import (
    Consideration,
    DecisionRecord,
    ReplanNote,
    ReplanStage,
    ReplanStatistics,
)

__all__ = [
    "ALLOWED",
    "LEVELS",
    "TARGETS",
    "Apply",
    "Cause",
    "Consideration",
    "Counts",
    "DecisionPrompts",
    "DecisionRecord",
    "DecisionRequest",
    "Limits",
    "Normalised",
    "Override",
    "Phase",
    "ReplanDecision",
    "ReplanManager",
    "ReplanNote",
    "ReplanStage",
    "ReplanStatistics",
    "ReplanType",
    "Reply",
    "Ruling",
    "RulingKind",
    "carried_over",
    "decision_model",
    "fingerprint",
    "keeps_finished",
    "normalise",
    "open_types",
    "parse_decision",
    "rule",
]
