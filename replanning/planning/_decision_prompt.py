"""What the prompt of a decision adds to what its phase came to. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from replanning._plan import JsonObject
from replanning.planning._limits import Cause, Counts, Limits
from replanning.planning._phases import LEVELS, TARGETS, ReplanType

if TYPE_CHECKING:
    from replanning.planning._manager import DecisionRequest
    from replanning.planning._replan_records import DecisionRecord


def decision_data(request: DecisionRequest, *, most: int) -> JsonObject:
    """What a decision adds to what its phase came to: the phase, what is left, what was decided before, and what failed."""
    cause = request.cause
    about = {"action": cause.action, "lineage": cause.lineage, "error": cause.error}
    found: JsonObject = {
        "phase": request.phase.value,
        "limits": _left(request.limits, request.counts),
        "replans": [_decided(record) for record in request.earlier[-most:]],
    }
    if cause != Cause():
        found["cause"] = {key: value for key, value in about.items() if value}
    if request.refused:
        found["refused"] = request.refused
    if request.problem:
        found["rejected"] = [{"reply": request.reply, "problem": request.problem}]
    return found


def _left(limits: Limits, counts: Counts) -> JsonObject:
    """How often was replanned, of how often may be."""
    pairs = {name: (getattr(counts, name), getattr(limits, name)) for name in _COUNTED}
    told: JsonObject = {name: {"used": used, "of": most} for name, (used, most) in pairs.items()}
    return told


_COUNTED: Final = ("total", "clarifications", "redecompositions", "regenerations", "partial_replans", "plan_revisions")


def _decided(record: DecisionRecord) -> JsonObject:
    said = record.llm_decision or {}
    told: JsonObject = {
        "replan": record.replan_id,
        "phase": record.phase.value,
        "type": record.replan_type.value,
        "confidence": record.confidence,
        "reasoning": said.get("reasoning"),
        "issues": said.get("issues_found"),
        "executed": record.executed,
        "result": record.result,
        "overridden": record.override_reason,
        "because": record.reason,
        "error": record.error,
    }
    return {key: value for key, value in told.items() if value not in (None, "", [])}


def open_types_in_words(kinds: Sequence[ReplanType]) -> str:
    """The kinds of replans that are open, with their levels and where each returns to."""
    lines = ['- "none": go on (`replan_needed` false)']
    for kind in kinds:
        for level, target in TARGETS[kind].items():
            lines.append(f'- "{kind}", level {level}, target "{target}": {LEVELS[level]}')
    return "\n".join(lines)
