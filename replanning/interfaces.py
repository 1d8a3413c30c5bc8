"""What plugins implement and are given."""

from __future__ import annotations

from replanning._attempt import (
    Work,
)
from replanning._ids import (
    AttemptId,
    QuestionId,
    ReplanId,
    RunId,
    TaskId,
    TriggerId,
)
from replanning._interfaces import (
    AlternativeProvider,
    Answer,
    Clock,
    Exporter,
    ExporterContext,
    HumanGate,
    InboxMessage,
    Lease,
    Question,
    ReplanRequest,
    RunInfo,
    RunStore,
    ToolOutcome,
    TriggerDetector,
)
from replanning._judge import (
    Judge,
    Judgement,
    JudgeRequest,
)
from replanning._lineage import (
    ReplanningInfo,
)
from replanning._plan import (
    Fallback,
    JsonObject,
    JsonValue,
)
from replanning._redaction import (
    Redactor,
)
from replanning._states import (
    TaskState,
)
from replanning._view import (
    DraftView,
    PlanView,
    TaskView,
)

__all__ = [
    "AlternativeProvider",
    "Answer",
    "AttemptId",
    "Clock",
    "DraftView",
    "Exporter",
    "ExporterContext",
    "Fallback",
    "HumanGate",
    "InboxMessage",
    "JsonObject",
    "JsonValue",
    "Judge",
    "JudgeRequest",
    "Judgement",
    "Lease",
    "PlanView",
    "Question",
    "QuestionId",
    "Redactor",
    "ReplanId",
    "ReplanRequest",
    "ReplanningInfo",
    "RunId",
    "RunInfo",
    "RunStore",
    "TaskId",
    "TaskState",
    "TaskView",
    "ToolOutcome",
    "TriggerDetector",
    "TriggerId",
    "Work",
]
