"""A run: attempts, lifecycle, lease, timers, opening and resuming."""

from __future__ import annotations

from replanning.run.attempt import Work

__all__ = ["Work"]
