"""Processes that are killed or suspended while they make keyed calls in a session; the next process goes on."""

import os
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest

from replanning.journal import (
    AttemptStarted,
    AttemptSucceeded,
    QuestionAnswered,
    Record,
    SqliteStore,
)
from tests.support.crash import Process, check_kept, journal, let_pass, suspend, taken_over
from tests.support.resume import RUN
from tests.support.session_crash_child import CALLS

AIMS = (
    "revised",
    "attempt-started",
    "attempt-succeeded",
    "attempt-failed",
    "decided",
    "question-answered",
    "run-ended",
)
"""Records before or after which chance would seldom kill."""


def started(folder: Path, *, lease: str = "inf") -> Process:
    """Return a process that has begun to make calls."""
    process = Process(
        "session_crash_child", folder, folder / "history", RUN, folder / "effects", LEASE=lease
    )
    process.process.stdin.write("go\n")
    process.process.stdin.flush()
    return process


def effects_in(folder: Path) -> Counter[tuple[str, str]]:
    """How often each key took effect in each attempt."""
    path = folder / "effects"
    lines = path.read_text().splitlines() if path.exists() else []
    return Counter((key, attempt) for key, _, attempt in (line.partition(" ") for line in lines))


def check(records: Sequence[Record], before: Sequence[Record], folder: Path) -> None:
    """Check what must hold after every kill."""
    check_kept(records, before)
    bodies = [record.body for record in records]
    begun = {body.attempt: body.task for body in bodies if isinstance(body, AttemptStarted)}
    done = {str(body.output): body.attempt for body in bodies if isinstance(body, AttemptSucceeded)}
    approved = sum(
        isinstance(body, QuestionAnswered) and body.verdict == "approve" for body in bodies
    )
    effects = effects_in(folder)
    for (key, attempt), times in effects.items():
        assert times == 1, f"{key} took effect {times} times in {attempt}"
        assert attempt in begun, f"{key} took effect before the start of {attempt} was on record"
    for output, attempt in done.items():
        assert effects[output.partition(" ")[0], attempt], f"{output} is done without effect"
    runs = Counter(task for task in begun.values() if task.startswith("once"))
    assert all(times <= 1 + approved for times in runs.values()), (
        f"executed again and nobody was asked: {runs}"
    )
    assert len(done) == len({output.partition(" ")[0] for output in done}), (
        f"a key was done twice: {done}"
    )


@pytest.mark.deep
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Killed again and again, a session loses no finished call, executes none again, and in the end has made every call.

    To look for faults: `REPLANNING_KILLS=500 REPLANNING_SEED=7 pytest tests/engine/test_session_crash.py -k any_moment`.
    """
    left, rng = (
        int(os.environ.get("REPLANNING_KILLS", "12")),
        Random(os.environ.get("REPLANNING_SEED", "20240229")),
    )
    while left > 0:
        folder = tmp_path / str(left)
        folder.mkdir()
        said, before, kills = None, list[Record](), min(left, 4)
        for life in range(kills + 1):
            with started(folder) as process:
                if life < kills:
                    live_a_while(process, rng)
                    process.process.kill()
                else:
                    list(process.ticks())
                said = process.finish()
            records = journal("sqlite", folder)
            check(records, before, folder)
            before = records
            if said is not None:
                break
        left -= max(life, 1)
        assert said is not None
        assert (said["status"], said["refused"]) == ("succeeded", {})
        recorded = {str(r.body.output) for r in before if isinstance(r.body, AttemptSucceeded)}
        assert set(said["outputs"].values()) == recorded
        assert {output.partition(" ")[0] for output in recorded} == said["outputs"].keys()
        assert len(recorded) == CALLS


def live_a_while(process: Process, rng: Random) -> None:
    """Return at a moment of chance: after so many records, or at a kind of record."""
    aim = rng.choice("<>") + rng.choice(AIMS) if rng.random() < 0.5 else ""
    count = rng.randint(1, 4) if aim else rng.randint(1, 80)
    for tick in process.ticks():
        count -= tick.startswith(aim)
        if count <= 0:
            break
    let_pass(rng.choice([0.0, 0.0001, 0.001]) * rng.random())


@pytest.mark.deep
def test_suspended_and_taken_over(tmp_path: Path) -> None:
    """A session whose run another process has taken over executes nothing more, and its calls say so with one error."""
    with started(tmp_path, lease="0.2") as process:
        next(tick for tick in process.ticks() if tick.startswith(">attempt-succeeded"))
        suspend(process)
        with closing(SqliteStore(tmp_path / "history")) as store:
            store.release(taken_over(store, process))
        with started(tmp_path) as heir:
            list(heir.ticks())
            inherited: Any = heir.finish()
        before, records = effects_in(tmp_path), journal("sqlite", tmp_path)
        process.process.send_signal(signal.SIGCONT)
        list(process.ticks())
        said: Any = process.finish()
    assert (inherited["status"], said["status"], len(inherited["outputs"])) == (
        "succeeded",
        "paused",
        CALLS,
    )
    assert said["refused"]
    assert {
        "another process has taken the run over" in each for each in said["refused"].values()
    } == {True}
    assert said["outputs"].items() <= inherited["outputs"].items()
    check(journal("sqlite", tmp_path), records, tmp_path)
    assert effects_in(tmp_path) == before
