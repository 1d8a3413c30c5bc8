"""OpenTelemetry: names, spans and metrics of a run."""

from __future__ import annotations

from replanning.exports import report_module
from replanning.telemetry.exporter import Exporter, ExporterContext

__all__ = ["Exporter", "ExporterContext"]

report_module(__name__, __all__)
