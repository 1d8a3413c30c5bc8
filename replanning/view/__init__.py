"""Live page in the browser: runs, their plans and why these changed, and answers to questions."""

from __future__ import annotations

from replanning.view.app import create_app

__all__ = ["create_app"]
