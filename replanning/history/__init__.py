"""History of a run, read from its journal: replans, status, metrics, differences of revisions, and reports."""

from __future__ import annotations

from replanning.history.diff import FieldChange, PlanDiff, TaskChange
from replanning.history.events import DroppedTrigger, GoalEdit, PlanEdit, QuestionEntry, ReplanEvent
from replanning.history.export import export_history, import_history
from replanning.history.history import ReplanHistory
from replanning.history.markdown import markdown_report, mermaid
from replanning.history.metrics import (
    Bin,
    Calibration,
    Prediction,
    ReplanMetrics,
    calibrate,
    calibrate_sources,
    compute_metrics,
)
from replanning.history.reports import text_report, why_report
from replanning.history.status import HeldTask, RunningTask, RunStatusReport, open_questions, run_status

__all__ = [
    "Bin",
    "Calibration",
    "DroppedTrigger",
    "FieldChange",
    "GoalEdit",
    "HeldTask",
    "PlanDiff",
    "PlanEdit",
    "Prediction",
    "QuestionEntry",
    "ReplanEvent",
    "ReplanHistory",
    "ReplanMetrics",
    "RunStatusReport",
    "RunningTask",
    "TaskChange",
    "calibrate",
    "calibrate_sources",
    "compute_metrics",
    "export_history",
    "import_history",
    "markdown_report",
    "mermaid",
    "open_questions",
    "run_status",
    "text_report",
    "why_report",
]
