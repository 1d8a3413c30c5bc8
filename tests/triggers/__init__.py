"""Tests of `replanning.triggers`."""
