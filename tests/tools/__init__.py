"""Tests of `replanning.tools`."""
