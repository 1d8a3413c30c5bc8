"""Public fakes for testing plans: providers, executors, clocks and faults."""

from __future__ import annotations

from replanning.testing._clock import VirtualClock

__all__ = ["VirtualClock"]
