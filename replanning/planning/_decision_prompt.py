"""What the prompt of a decision adds to what its phase came to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from replanning._plan import JsonObject
from replanning.planning._limits import ReplanCause, ReplanCounts, ReplanLimits, is_within_limits
from replanning.planning._phases import LEVEL_DESCRIPTIONS, REPLAN_TARGETS, ReplanType

if TYPE_CHECKING:
    from replanning.planning._deciding import DecisionRequest
    from replanning.planning._replan_records import DecisionRecord


def decision_data(request: DecisionRequest, *, max_records: int) -> JsonObject:
    """What a decision adds to what its phase came to: the phase, what is left, what was decided before, and what failed."""
    cause = request.cause
    about = {"action": cause.action, "lineage": cause.lineage, "error": cause.error}
    found: JsonObject = {
        "phase": request.phase.value,
        "limits": _limit_usage(request.limits, request.counts, cause),
        "replans": [_decision_summary(record) for record in request.earlier_decisions[-max_records:]],
    }
    if cause != ReplanCause():
        found["cause"] = {key: value for key, value in about.items() if value}
    if request.refusal:
        found["refused"] = request.refusal
    if request.problem:
        found["rejected"] = [{"reply": request.rejected_reply, "problem": request.problem}]
    return found


def _limit_usage(limits: ReplanLimits, counts: ReplanCounts, cause: ReplanCause) -> JsonObject:
    """How often was replanned, of how often may be."""
    pairs = {name: (getattr(counts, name), getattr(limits, name)) for name in _LIMITED_COUNTS}
    if cause.action is not None:
        pairs["retries_of_this_action"] = (counts.retries.get(cause.action, 0), limits.action_retries)
    if cause.lineage is not None:
        pairs["replans_for_this_action"] = (counts.lineages.get(cause.lineage, 0), limits.replans_per_lineage)
    told: JsonObject = {name: {"used": used, "of": most} for name, (used, most) in pairs.items()}
    return told


_LIMITED_COUNTS: Final = (
    "total",
    "clarifications",
    "redecompositions",
    "regenerations",
    "partial_replans",
    "plan_revisions",
)


_REPLAN_DESCRIPTIONS: Final[Mapping[ReplanType, str]] = MappingProxyType(
    {
        ReplanType.CLARIFICATION_REQUEST: "ask the user, and understand the goal again with the answer",
        ReplanType.PLAN_REVISION: "revise the plan; what is done stays done, and what is missing is added",
    }
)
"""What replans come to whose level says too little."""


def _decision_summary(record: DecisionRecord) -> JsonObject:
    said = record.llm_decision or {}
    went_on = record.replan_type is ReplanType.NONE and record.result == "skipped"
    told: JsonObject = {
        "replan": record.replan_id,
        "phase": record.phase.value,
        "type": record.replan_type.value,
        "confidence": record.confidence,
        "reasoning": said.get("reasoning"),
        "issues": said.get("issues_found"),
        "executed": None if went_on else record.executed,
        "result": None if went_on else record.result,
        "overridden": record.override_reason,
        "because": record.reason,
        "error": record.error,
    }
    return {key: value for key, value in told.items() if value not in (None, "", [])}


def describe_replan_options(request: DecisionRequest) -> str:
    """The replans that limits leave, with their levels and where each returns to."""
    lines = ['- "none": go on (`replan_needed` false)']
    for kind in request.replan_types:
        for level, target in REPLAN_TARGETS[kind].items():
            if is_within_limits(kind, target, request.limits, request.counts, request.cause):
                lines.append(
                    f'- "{kind}", level {level}, target "{target}": {_REPLAN_DESCRIPTIONS.get(kind, LEVEL_DESCRIPTIONS[level])}'
                )
    return "\n".join(lines)
