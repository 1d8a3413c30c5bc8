"""Tests of `replanning.live`."""
