"""Planning mode: from a goal in words to a finished plan, judged by a model after every phase."""

from __future__ import annotations

__all__: list[str] = []
