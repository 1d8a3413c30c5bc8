"""The replanning engine: monitor, generator, replanner, questions to people, delivery to exporters."""

from __future__ import annotations

from replanning.engine.monitor import MonitorNotice
from replanning.exports import report_module

__all__ = ["MonitorNotice"]

report_module(__name__, __all__)
