"""The replanning engine: monitor, generator, replanner, questions, delivery to exporters."""

from __future__ import annotations

from replanning.engine.monitor import MonitorNotice

__all__ = ["MonitorNotice"]
