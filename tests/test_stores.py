"""The stores keep what every store must keep to."""

from __future__ import annotations

import pytest

from replanning.history import JsonlStore, MemoryStore, SqliteStore
from replanning.testing.stores import STORE_CHECKS

STORES = {
    "memory": lambda folder: MemoryStore(),
    "jsonl": lambda folder: JsonlStore(folder / "deep" / "runs"),
    "sqlite": lambda folder: SqliteStore(folder / "deep" / "history.db"),
    "sqlite-full": lambda folder: SqliteStore(folder / "history.db", synchronous="full"),
    "sqlite-off": lambda folder: SqliteStore(folder / "history.db", synchronous="off"),
}


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", STORES)
def test_contract(name, check, tmp_path):
    """Each of our stores passes each check that a third party's store can run."""
    check(lambda: STORES[name](tmp_path))
