"""OpenTelemetry: names, spans and metrics of a run."""

from __future__ import annotations

from replanning.telemetry.exporter import Exporter, ExporterContext

__all__ = ["Exporter", "ExporterContext"]
