"""Tests of `replanning.integrations`, against the real frameworks."""
