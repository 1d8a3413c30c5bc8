"""Tests of `replanning.providers`."""
