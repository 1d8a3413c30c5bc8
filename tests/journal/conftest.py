"""A PostgreSQL server for the tests of stores."""

from collections.abc import Iterator

import pytest

from tests.support.postgres import Server, missing_part


@pytest.fixture(scope="module")
def postgres_server() -> Iterator[Server]:
    """A server for all tests of a module."""
    if problem := missing_part():
        pytest.skip(problem)
    with Server.running() as server:
        yield server
