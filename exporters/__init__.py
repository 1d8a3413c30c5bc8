"""Exporters of traces, metrics and notices, one per file."""
