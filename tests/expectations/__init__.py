"""Tests of `replanning.expectations`."""
