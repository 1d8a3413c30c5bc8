"""History of a run, read from its journal: replans, status, metrics, diffs and reports."""

from __future__ import annotations

from replanning.history.diff import PlanDiff
from replanning.history.effects import CanUndo, RunEffect
from replanning.history.events import (
    Calibration,
    GoalEdit,
    PlanEdit,
    Prediction,
    ProgramNote,
    QuestionEntry,
    ReplanEvent,
    ReplanMetrics,
    calibrate,
    compute_metrics,
)
from replanning.history.export import export_history, import_history
from replanning.history.history import ReplanHistory
from replanning.history.reports import markdown_report, text_report, why_report
from replanning.history.status import RunStatusReport, open_questions, run_status

__all__ = [
    "Calibration",
    "CanUndo",
    "GoalEdit",
    "PlanDiff",
    "PlanEdit",
    "Prediction",
    "ProgramNote",
    "QuestionEntry",
    "ReplanEvent",
    "ReplanHistory",
    "ReplanMetrics",
    "RunEffect",
    "RunStatusReport",
    "calibrate",
    "compute_metrics",
    "export_history",
    "import_history",
    "markdown_report",
    "open_questions",
    "run_status",
    "text_report",
    "why_report",
]
