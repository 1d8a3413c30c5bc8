"""The form in which a record leaves its run: without secrets, for the journal, listeners and spans."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

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
    changed = redactor.changed_fields(body, _FIELDS_WITH_TEXT.get(type(body), ()))
    return replace(body, **changed) if changed else body
