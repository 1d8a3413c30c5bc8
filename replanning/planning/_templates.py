"""Reads the templates of the prompts, which are files of the package."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType


@cache
def prompt_templates() -> Mapping[str, str]:
    """The templates by their names, such as `goal_understanding` and `decide_execution`; they are read once."""
    folder = resources.files("replanning.planning") / "prompts"
    found = {
        entry.name.removesuffix(".md"): entry.read_text(encoding="utf-8").strip()
        for entry in folder.iterdir()
        if entry.name.endswith(".md")
    }
    return MappingProxyType(found)
