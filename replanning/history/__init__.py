"""The journal of a run, the stores that keep it, and the history and reports drawn from it."""

from replanning._errors import RecordNotSerializable
from replanning.history._diff import FieldChange, PlanDiff, TaskChange
from replanning.history._history import ReplanHistory
from replanning.history._jsonl import JsonlStore
from replanning.history._markdown import markdown_report
from replanning.history._memory import MemoryStore
from replanning.history._mermaid import mermaid
from replanning.history._metrics import (
    Bin,
    Calibration,
    Prediction,
    ReplanMetrics,
    calibrate,
    calibrate_sources,
    compute_metrics,
)
from replanning.history._owner import is_lease_free, owner_id
from replanning.history._replans import DroppedTrigger, GoalEdit, PlanEdit, QuestionEntry, ReplanEvent
from replanning.history._reports import text_report, why_report
from replanning.history._sqlite import SqliteStore
from replanning.history._standing import HeldTask, RunningTask, RunStatusReport, open_questions, run_status

__all__ = [
    "Bin",
    "Calibration",
    "DroppedTrigger",
    "FieldChange",
    "GoalEdit",
    "HeldTask",
    "JsonlStore",
    "MemoryStore",
    "PlanDiff",
    "PlanEdit",
    "Prediction",
    "QuestionEntry",
    "RecordNotSerializable",
    "ReplanEvent",
    "ReplanHistory",
    "ReplanMetrics",
    "RunStatusReport",
    "RunningTask",
    "SqliteStore",
    "TaskChange",
    "calibrate",
    "calibrate_sources",
    "compute_metrics",
    "is_lease_free",
    "markdown_report",
    "mermaid",
    "open_questions",
    "owner_id",
    "run_status",
    "text_report",
    "why_report",
]
