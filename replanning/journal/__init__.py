"""The journal of a run: what happened, why replanning was considered, what was decided; and the stores that keep it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from replanning.exports import report_module
from replanning.journal.memory import MemoryStore
from replanning.journal.records import (
    AlternativesConsidered,
    AnswerRefused,
    AttemptFailed,
    AttemptFenced,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    BetterPathFound,
    CallMade,
    Candidate,
    ConditionEvaluated,
    ContextChanged,
    ContextUpdated,
    DecisionMade,
    ErrorContained,
    FactsObserved,
    Failure,
    GoalChanged,
    GoalUnreachable,
    HumanRequest,
    Observation,
    OutcomeRecorded,
    PlanningNoted,
    PlanRevised,
    ProcessStarted,
    QuestionAnswered,
    QuestionAsked,
    QuestionReminded,
    Record,
    RecordBody,
    ReplanRequested,
    ResourceChanged,
    ResourceUpdated,
    ResultsStale,
    RunEnded,
    RunOpened,
    RunPaused,
    RunProblem,
    RunQuiescent,
    RunResumed,
    RunStatus,
    Score,
    TaskFailed,
    TaskTimedOut,
    Trigger,
    TriggerAttached,
    TriggerDropped,
    TriggerEvent,
    TriggerFired,
    TriggerKind,
    Usage,
    UsageCharged,
    dump_body,
    load_body,
)
from replanning.journal.store import InboxMessage, Lease, RunInfo, RunStore, ToolOutcome, open_store

if TYPE_CHECKING:
    from replanning.journal.jsonl import JsonlStore
    from replanning.journal.sqlite import SqliteStore

__all__ = [
    "AlternativesConsidered",
    "AnswerRefused",
    "AttemptFailed",
    "AttemptFenced",
    "AttemptInterrupted",
    "AttemptStarted",
    "AttemptSucceeded",
    "AttemptTimedOut",
    "BetterPathFound",
    "CallMade",
    "Candidate",
    "ConditionEvaluated",
    "ContextChanged",
    "ContextUpdated",
    "DecisionMade",
    "ErrorContained",
    "FactsObserved",
    "Failure",
    "GoalChanged",
    "GoalUnreachable",
    "HumanRequest",
    "InboxMessage",
    "JsonlStore",
    "Lease",
    "MemoryStore",
    "Observation",
    "OutcomeRecorded",
    "PlanRevised",
    "PlanningNoted",
    "ProcessStarted",
    "QuestionAnswered",
    "QuestionAsked",
    "QuestionReminded",
    "Record",
    "RecordBody",
    "ReplanRequested",
    "ResourceChanged",
    "ResourceUpdated",
    "ResultsStale",
    "RunEnded",
    "RunInfo",
    "RunOpened",
    "RunPaused",
    "RunProblem",
    "RunQuiescent",
    "RunResumed",
    "RunStatus",
    "RunStore",
    "Score",
    "SqliteStore",
    "TaskFailed",
    "TaskTimedOut",
    "ToolOutcome",
    "Trigger",
    "TriggerAttached",
    "TriggerDropped",
    "TriggerEvent",
    "TriggerFired",
    "TriggerKind",
    "Usage",
    "UsageCharged",
    "dump_body",
    "load_body",
    "open_store",
]

report_module(__name__, __all__)


_LAZY_MODULES = {
    "JsonlStore": "replanning.journal.jsonl",
    "SqliteStore": "replanning.journal.sqlite",
}


def __getattr__(name: str) -> object:
    """Import a durable store when it is first used: its module needs parts that not every system has."""
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    store = globals()[name] = getattr(import_module(_LAZY_MODULES[name]), name)
    report_module(__name__, [name])
    return store
