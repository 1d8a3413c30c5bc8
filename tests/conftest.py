"""Configuration of all tests: event loops, Hypothesis profiles, and which tests are deep."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import settings

from replanning.testing import VirtualClock

# Derandomized: a test that fails here fails everywhere, and nothing is stored on disk.
settings.register_profile("quick", derandomize=True, deadline=None, database=None, max_examples=25)
settings.register_profile("many", derandomize=True, deadline=None, database=None, max_examples=100)
# New examples in every run, to look for bugs: pytest --hypothesis-profile=explore
settings.register_profile("explore", max_examples=2_000, deadline=None)
settings.load_profile("quick")

# The tests may have been started with nohup, or in the background of a script, where both signals are ignored: the tests that
# send one would wait for ever.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

BOTH_LOOPS = {"engine", "run"}
"""Folders whose quick tests run on trio as well: their code depends on how the event loop schedules."""


@pytest.fixture(scope="session", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run every async test on asyncio and on trio."""
    return str(request.param)


@pytest.fixture
async def clock() -> AsyncIterator[VirtualClock]:
    """A virtual clock that runs while the test does."""
    async with VirtualClock() as running:
        yield running


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which the test works."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as deep: slow tests, and tests on trio where the loop makes no difference."""
    root = Path(__file__).parent
    for item in items:
        call = getattr(item, "callspec", None)
        folder = item.path.relative_to(root).parts[0]
        trio = call is not None and call.params.get("anyio_backend") == "trio"
        if item.get_closest_marker("slow") or (trio and folder not in BOTH_LOOPS):
            item.add_marker("deep")
