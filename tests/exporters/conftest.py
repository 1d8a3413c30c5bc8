"""Forges that tests speak to, on a virtual clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from replanning.testing import VirtualClock
from tests.support.forges import FakeForge, FakeGitHub, FakeGitLab, on


@pytest.fixture
async def clock() -> AsyncIterator[VirtualClock]:
    """A clock that jumps to what is waited for."""
    async with VirtualClock() as running:
        yield running


@pytest.fixture(params=[FakeGitHub, FakeGitLab])
def fake(request: pytest.FixtureRequest, clock: VirtualClock) -> FakeForge:
    """The server of each forge in turn, or of the one that a test names."""
    server: FakeForge = request.param(clock.now)
    return server


@pytest.fixture
def forge(fake: FakeForge, clock: VirtualClock) -> Any:
    """The issue of that server."""
    return on(fake, clock)
