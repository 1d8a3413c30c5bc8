"""Tests of `replanning.testing`."""
