"""What every test shares: both event loops, and a Hypothesis that says the same thing twice."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

# The same examples in every run: a test that fails here fails everywhere, and nothing is stored on disk.
settings.register_profile("steady", derandomize=True, deadline=None, database=None)
# New examples in every run, for whoever is looking for bugs: pytest --hypothesis-profile=explore
settings.register_profile("explore", max_examples=2_000, deadline=None)
settings.load_profile("steady")

# The tests may have been started with nohup; the programs that they start are to hear a hangup all the same.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run every async test on asyncio and on trio."""
    return str(request.param)
