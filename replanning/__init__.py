"""Keep a plan alive while it runs.

The names here are what most programs need. More stands in `replanning.changes` (typed edits of a plan),
`replanning.events` (triggers and journal records), `replanning.interfaces` (what plugins implement),
`replanning.settings`, `replanning.llm` (language models) and `replanning.errors`.
"""

from __future__ import annotations

from replanning._attempt import Attempt, TaskContext
from replanning._changes import Alternative
from replanning._clock import Environment
from replanning._confidence import ConfidenceScorer
from replanning._engine import ReplanningEngine, open_run
from replanning._errors import PlanError, ReplanningError, TransientError
from replanning._evaluation import PlanEvaluator
from replanning._gate import CallbackGate, StoreGate
from replanning._generator import AlternativeGenerator
from replanning._interfaces import Answer, Question, ReplanRequest
from replanning._monitor import PlanMonitor
from replanning._plan import Budget, Goal, Plan, Retry, Task, ToolSpec
from replanning._policy import ReplanPolicy
from replanning._run import PlanRun, RunResult
from replanning._settings import Settings
from replanning._states import TaskState
from replanning._version import __version__
from replanning._view import PlanView

__all__ = [  # noqa: RUF022 - grouped by what they are for
    # the plan
    "Plan",
    "Task",
    "Goal",
    "ToolSpec",
    "Retry",
    "Budget",
    "TaskState",
    # running it
    "ReplanningEngine",
    "PlanRun",
    "RunResult",
    "Attempt",
    "TaskContext",
    "open_run",
    "Environment",
    "Settings",
    # the parts of the engine
    "PlanMonitor",
    "PlanEvaluator",
    "AlternativeGenerator",
    "ConfidenceScorer",
    "ReplanPolicy",
    # providers
    "ReplanRequest",
    "PlanView",
    "Alternative",
    # people
    "CallbackGate",
    "StoreGate",
    "Question",
    "Answer",
    # errors
    "ReplanningError",
    "PlanError",
    "TransientError",
    "__version__",
]

for _name in __all__:
    if getattr(globals()[_name], "__module__", "").startswith("replanning._"):
        globals()[_name].__module__ = __name__
del _name
