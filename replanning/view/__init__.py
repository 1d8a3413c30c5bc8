"""Live pages in the browser about runs, their plans and changes, with answers to questions."""

from __future__ import annotations

from replanning.view.app import create_app

__all__ = ["create_app"]
