"""OpenTelemetry: names, spans and metrics of a run."""

from __future__ import annotations

__all__ = []
