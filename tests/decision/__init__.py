"""Tests of `replanning.decision`."""
