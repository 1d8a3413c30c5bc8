"""Tests of `replanning.cli`."""
