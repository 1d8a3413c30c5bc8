"""Tests of `replanning.run`."""
