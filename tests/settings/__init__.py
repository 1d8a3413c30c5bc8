"""Tests of `replanning.settings`."""
