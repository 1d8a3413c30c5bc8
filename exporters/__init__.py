"""Exporters of traces and metrics, one per file."""
