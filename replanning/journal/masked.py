"""The form in which a record leaves its run: without secrets, for the journal, listeners and spans."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, Final, TypeVar, cast

from replanning.journal.records import (
    AlternativesConsidered,
    AnswerRefused,
    AttemptFailed,
    AttemptFenced,
    AttemptInterrupted,
    AttemptStarted,
    CallMade,
    ConditionEvaluated,
    ContextUpdated,
    DecisionMade,
    ErrorContained,
    FactsObserved,
    GoalChanged,
    NoteAdded,
    PlanRevised,
    QuestionAnswered,
    QuestionAsked,
    RecordBody,
    ReplanRequested,
    ResourceUpdated,
    RunEnded,
    RunOpened,
    RunPaused,
    RunQuiescent,
    TriggerDropped,
    TriggerFired,
    UsageCharged,
)
from replanning.secrets import Redactor

BodyT = TypeVar("BodyT")

_FIELDS_WITH_TEXT: Final[dict[type[RecordBody], tuple[str, ...]]] = {
    AlternativesConsidered: ("candidates", "notes"),
    AnswerRefused: ("by", "reason"),
    AttemptFailed: ("failure",),
    AttemptFenced: ("report",),
    AttemptInterrupted: ("reason",),
    AttemptStarted: ("call",),
    CallMade: ("call",),
    ConditionEvaluated: ("error",),
    ContextUpdated: ("changes",),
    DecisionMade: ("reason", "by"),
    ErrorContained: ("where", "error"),
    FactsObserved: ("holds", "ceased"),
    GoalChanged: ("goal", "reason", "by"),
    PlanRevised: ("changes", "reason", "by"),
    NoteAdded: ("type", "data"),
    QuestionAnswered: ("by", "changes", "comment"),
    QuestionAsked: ("text", "candidates"),
    ReplanRequested: ("reason", "by"),
    ResourceUpdated: ("reason",),
    RunEnded: ("reason",),
    RunOpened: ("plan",),
    RunPaused: ("reason", "by"),
    RunQuiescent: ("missing_facts",),
    TriggerDropped: ("reason",),
    TriggerFired: ("trigger",),
    UsageCharged: ("provider",),
}
"""Fields that may hold secrets. Other records have none; the output of an attempt is encoded by whoever ends it."""


def masked_body(body: RecordBody, redactor: Redactor) -> RecordBody:
    """Return a record without secrets; the same object if it has none."""
    names = _FIELDS_WITH_TEXT.get(type(body))
    if names is None:
        return body
    changed: dict[str, Any] = {}
    for name in names:
        value = getattr(body, name)
        if value:
            clean = masked(value, redactor)
            if clean is not value:
                changed[name] = clean
    if not changed:
        return body
    return replace(body, **changed)


def masked(part: BodyT, redactor: Redactor) -> BodyT:
    """Return a text, JSON, part of a plan, dataclass or tuple of them without secrets; the same object if it has none."""
    value: Any = part
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        items = tuple([masked(item, redactor) for item in value])
        same = all(new is old for new, old in zip(items, value, strict=True))
        return part if same else cast("BodyT", items)
    if is_dataclass(value) and not isinstance(value, type):
        changed: dict[str, Any] = {}
        for field in fields(value):
            old = getattr(value, field.name)
            if field.init and old and not isinstance(old, (int, float)):
                new = masked(old, redactor)
                if new is not old:
                    changed[field.name] = new
        return cast("BodyT", replace(value, **changed)) if changed else part
    return redactor.document(part)
