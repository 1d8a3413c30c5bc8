"""A run: attempts, lifecycle, lease, timers, opening and resuming."""

from __future__ import annotations

from replanning.run.run import Work

__all__ = ["Work"]
