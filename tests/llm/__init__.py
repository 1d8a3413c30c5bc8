"""Tests of `replanning.llm`."""
