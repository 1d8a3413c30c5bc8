"""Finds JSON in what a language model wrote around it."""

from __future__ import annotations

import json
from collections.abc import Iterator

from replanning._plan import JsonValue


def json_in(text: str) -> Iterator[JsonValue]:
    """Every JSON value that a text may mean, the likeliest first."""
    try:
        yield json.loads(text)
    except ValueError:
        return
