"""Tests of `replanning.judging`."""
