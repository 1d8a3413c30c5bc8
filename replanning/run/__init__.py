"""A run: attempts, lifecycle, lease, timers, opening and resuming."""

from __future__ import annotations

from replanning.run.attempt import Work
from replanning.run.run import PendingDecision
from replanning.run.triggers import TriggerOutcome

__all__ = ["PendingDecision", "TriggerOutcome", "Work"]
