"""The journal of a run, the stores that keep it, and the history and reports drawn from it."""

from replanning._errors import Unstorable
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
    measure,
)
from replanning.history._owner import is_free, owner_id
from replanning.history._replans import Asked, DroppedTrigger, GoalEdit, PlanEdit, ReplanEvent
from replanning.history._reports import text_report, why_report
from replanning.history._sqlite import SqliteStore
from replanning.history._standing import HeldTask, RunningTask, RunStanding, open_questions, standing

__all__ = [
    "Asked",
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
    "ReplanEvent",
    "ReplanHistory",
    "ReplanMetrics",
    "RunStanding",
    "RunningTask",
    "SqliteStore",
    "TaskChange",
    "Unstorable",
    "calibrate",
    "calibrate_sources",
    "is_free",
    "markdown_report",
    "measure",
    "mermaid",
    "open_questions",
    "owner_id",
    "standing",
    "text_report",
    "why_report",
]
