"""Tests of `replanning.telemetry`."""
