"""Processes that are killed while they run a plan on PostgreSQL, hosts that take over, and servers that crash in between."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Final

import pytest

from tests.support.crash import (
    check_kills,
    go,
    journal,
    started,
    suspend,
    text,
)
from tests.support.postgres import Server

HOSTS: Final = (
    {"HOST": "here", "AHEAD": "5400", "lease": "-2"},
    {"HOST": "there", "AHEAD": "-5400", "lease": "-2"},
)
"""Two hosts whose clocks differ by three hours; their leases have ended by the clock of the server, as those of lost hosts do."""


pytestmark = pytest.mark.slow


def folder(path: Path, server: Server) -> Path:
    """Make a folder whose history is in a schema of its own."""
    path.mkdir()
    (path / "history").write_text(server.address(f"{path.parent.name}-{path.name}"))
    return path


def test_killed_at_any_moment(postgres_server, tmp_path):
    """Killed at moments of chance, continued by another host, the server killed in between, a run loses and repeats nothing.

    To look for faults: `REPLANNING_KILLS=500 REPLANNING_SEED=7 pytest tests/journal/test_postgres_crash.py`.
    """

    @contextmanager
    def outage(rng: Random) -> Iterator[None]:
        (postgres_server.kill if rng.random() < 0.5 else postgres_server.crash)()
        yield
        postgres_server.start()

    check_kills(
        "postgres",
        lambda name: folder(tmp_path / name, postgres_server),
        50,
        hosts=HOSTS,
        outage=outage,
    )


def test_suspended_and_taken_over(postgres_server, tmp_path):
    """A host that was suspended until another had finished its run writes nothing when it wakes, and ends paused."""
    place, (here, there) = folder(tmp_path / "run", postgres_server), HOSTS
    with started("postgres", place, **here) as process:
        go(process)
        next(tick for tick in process.ticks() if tick.startswith(">attempt-succeeded"))
        suspend(process)
        with started("postgres", place, **there) as heir:
            go(heir)
            inherited = heir.finish()
        whole = list(map(text, journal("postgres", place)))
        process.process.send_signal(signal.SIGCONT)
        said = process.finish()
    assert inherited is not None
    assert said is not None
    assert (inherited["status"], said["status"]) == ("succeeded", "paused")
    assert "another process has taken the run over" in said["reason"]
    assert list(map(text, journal("postgres", place))) == whole
