"""Forges that tests speak to, on a virtual clock."""

from typing import Any

import pytest

from replanning.exporters.notices import Notifier
from replanning.journal import Record
from replanning.testing import VirtualClock
from tests.support.forges import FakeForge, FakeGitHub, FakeGitLab, on
from tests.support.notices import EVENTFUL, Issue, carried_out


@pytest.fixture(params=[FakeGitHub, FakeGitLab])
def fake(request: pytest.FixtureRequest, clock: VirtualClock) -> FakeForge:
    """The server of each forge in turn, or of the one that a test names."""
    server: FakeForge = request.param(clock.now)
    return server


@pytest.fixture
def forge(fake: FakeForge, clock: VirtualClock) -> Any:
    """The issue of that server."""
    return on(fake, clock)


@pytest.fixture
async def told() -> tuple[list[Record], Issue]:
    """The records of an eventful run, and the issue that was told of it without a break."""
    issue = Issue()
    return await carried_out(EVENTFUL, Notifier(issue, edit_interval=0), failing=2), issue


@pytest.fixture
def records(told: tuple[list[Record], Issue]) -> list[Record]:
    """The records of an eventful run."""
    return told[0]


@pytest.fixture
def expected(told: tuple[list[Record], Issue]) -> Issue:
    """What an issue must hold after that run."""
    return told[1]
