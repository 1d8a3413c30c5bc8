"""Tests of a module run on asyncio alone: import the fixture where a framework or an SDK needs that."""

import pytest


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The one event loop that the framework knows."""
    return "asyncio"
