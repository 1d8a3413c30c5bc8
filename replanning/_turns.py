"""Long work on the event loop, in turns with everything else there."""

from __future__ import annotations

from collections.abc import Iterator

import anyio.lowlevel


async def in_turns(work: Iterator[None]) -> None:
    """Do work that pauses now and then; at each pause the event loop has a turn."""
    for _ in work:
        await anyio.lowlevel.checkpoint()
