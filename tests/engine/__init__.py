"""Tests of `replanning.engine`."""
