"""Tests of `replanning.history`."""
