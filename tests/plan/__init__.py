"""Tests of `replanning.plan`."""
