"""Keep a plan alive while it runs.

The names here are what most programs need. More stands in `replanning.changes` (typed edits of a plan),
`replanning.events` (triggers and journal records), `replanning.interfaces` (what plugins implement),
`replanning.settings`, `replanning.llm` (language models) and `replanning.errors`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
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

# Where the names stand. They are imported when they are asked for, so that a program that starts is not held up by what
# it does not use; what is there by then gets its public name.
_HOMES: Final = {
    "_attempt": ("Attempt", "TaskContext"),
    "_changes": ("Alternative",),
    "_clock": ("Environment",),
    "_confidence": ("ConfidenceScorer",),
    "_engine": ("ReplanningEngine", "open_run"),
    "_errors": ("PlanError", "ReplanningError", "TransientError"),
    "_evaluation": ("PlanEvaluator",),
    "_gate": ("CallbackGate", "StoreGate"),
    "_generator": ("AlternativeGenerator",),
    "_interfaces": ("Answer", "Question", "ReplanRequest"),
    "_monitor": ("PlanMonitor",),
    "_plan": ("Budget", "Goal", "Plan", "Retry", "Task", "ToolSpec"),
    "_policy": ("ReplanPolicy",),
    "_run": ("PlanRun", "RunResult"),
    "_settings": ("Settings",),
    "_states": ("TaskState",),
    "_version": ("__version__",),
    "_view": ("PlanView",),
}

if not TYPE_CHECKING:  # what it would say of types is "anything"

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        for home, names in _HOMES.items():
            if name in names:
                import_module(f"{__name__}.{home}")
        for home, names in _HOMES.items():
            module = sys.modules.get(f"{__name__}.{home}")
            for public in names:
                found = getattr(module, public, None)  # while a module is imported not all of it is there
                if found is not None:
                    globals()[public] = found
                if isinstance(found, type) and issubclass(found, Exception):
                    found.__module__ = __name__  # a traceback shows it; the fields of others are named as in their home
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
