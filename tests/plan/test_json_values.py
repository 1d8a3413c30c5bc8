"""Copies of JSON values, and values in messages."""

import sys

from pydantic import JsonValue

from replanning.plan.json_values import copy_json
from replanning.plan.messages import brief_repr


def test_copies_of_values_without_end():
    """A value that is nested too deeply to be recorded is not copied; whoever records it refuses it."""
    deep: list[JsonValue] = []
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]
    assert copy_json(deep) is deep


def test_numbers_in_messages():
    """A number with more digits than Python writes is told by its type."""
    assert brief_repr(10**5) == "100000"
    assert brief_repr(10**5_000).startswith("<int")
