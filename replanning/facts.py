"""The plan on facts: what its steps need and bring about, for providers that plan and for whoever checks plans."""

from __future__ import annotations

from replanning._patterns import as_text, finder, holes
from replanning._world import Standing, Step, Use, World, artifact, needed_before, regress, related

__all__ = [
    "Standing",
    "Step",
    "Use",
    "World",
    "artifact",
    "as_text",
    "finder",
    "holes",
    "needed_before",
    "regress",
    "related",
]
