"""Detectors of triggers, one per file."""
