"""Tests of `replanning.secrets`."""
