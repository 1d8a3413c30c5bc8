"""Tests of `replanning.planning`."""
