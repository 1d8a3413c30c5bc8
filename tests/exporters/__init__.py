"""Tests of `replanning.exporters`."""
