"""Keep a plan alive while it runs.

These are the names that most programs need. Packages export further names: `replanning.plan`,
`replanning.changes` (edits of a plan), `replanning.triggers` (reasons to change a plan),
`replanning.journal` (records and stores), `replanning.decision` (interfaces for plugins),
`replanning.settings`, `replanning.llm` (language models) and `replanning.errors`.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Final

# Failures of attempts and replans are in the result, so they are not printed where the program has
# not configured logging. Mistakes of plugins are.
logging.getLogger("replanning.run").addHandler(logging.NullHandler())
logging.getLogger("replanning.planning").addHandler(logging.NullHandler())

if TYPE_CHECKING:
    from replanning.changes import Alternative
    from replanning.decision.evaluation import PlanEvaluation, PlanEvaluator
    from replanning.decision.policy import ReplanPolicy
    from replanning.decision.proposal import ConfidenceScorer
    from replanning.decision.request import Answer, Question, ReplanRequest
    from replanning.engine.engine import ReplanningEngine, open_run
    from replanning.engine.functions import tool
    from replanning.engine.gates import CallbackGate, StoreGate
    from replanning.engine.generator import AlternativeGenerator, ContextAnalyzer, PathGenerator
    from replanning.engine.monitor import PlanMonitor
    from replanning.engine.session import Session
    from replanning.environment import Environment
    from replanning.errors import PlanError, ReplanningError, TransientError
    from replanning.live.states import TaskState
    from replanning.live.view import PlanView
    from replanning.plan.document import Plan
    from replanning.plan.tasks import Budget, Goal, Retry, Task, ToolSpec
    from replanning.run.attempt import Attempt, TaskContext, current_attempt
    from replanning.run.run import PlanRun, RunResult
    from replanning.settings import Settings
    from replanning.version import __version__

__all__ = [  # noqa: RUF022 - grouped by purpose
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
    "current_attempt",
    "open_run",
    "Session",
    "tool",
    "Environment",
    "Settings",
    # the parts of the engine
    "PlanMonitor",
    "PlanEvaluation",
    "PlanEvaluator",
    "AlternativeGenerator",
    "ContextAnalyzer",
    "PathGenerator",
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

# The modules that define the names. Each is imported at the first use of one of its names, so that
# a program does not wait for modules that it does not use.
_HOMES: Final = {
    "changes": ("Alternative",),
    "decision.evaluation": ("PlanEvaluation", "PlanEvaluator"),
    "decision.proposal": ("ConfidenceScorer",),
    "decision.policy": ("ReplanPolicy",),
    "decision.request": ("Answer", "Question", "ReplanRequest"),
    "engine.engine": ("ReplanningEngine", "open_run"),
    "engine.functions": ("tool",),
    "engine.generator": ("AlternativeGenerator", "ContextAnalyzer", "PathGenerator"),
    "engine.monitor": ("PlanMonitor",),
    "engine.session": ("Session",),
    "engine.gates": ("CallbackGate", "StoreGate"),
    "environment": ("Environment",),
    "errors": ("PlanError", "ReplanningError", "TransientError"),
    "live.states": ("TaskState",),
    "live.view": ("PlanView",),
    "plan.document": ("Plan",),
    "plan.tasks": ("Budget", "Goal", "Retry", "Task", "ToolSpec"),
    "run.attempt": ("Attempt", "TaskContext", "current_attempt"),
    "run.run": ("PlanRun", "RunResult"),
    "settings": ("Settings",),
    "version": ("__version__",),
}

if not TYPE_CHECKING:  # a type checker would take every name for `object`

    def __getattr__(name: str) -> object:
        for home, names in _HOMES.items():
            if name in names:
                value = getattr(import_module(f"{__name__}.{home}"), name)
                globals()[name] = value
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
