"""Tests of `replanning.journal`."""
