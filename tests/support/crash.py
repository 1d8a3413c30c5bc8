"""Kills real processes that run real plans, and checks what is left after each kill and at the end.

`python -m tests.support.crash --kills 500 --seed 7 --store sqlite` does so as often as one likes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from replanning import Environment
from replanning.errors import RunOwned, UnknownRun
from replanning.journal import (
    AttemptStarted,
    AttemptSucceeded,
    JsonlStore,
    QuestionAnswered,
    Record,
    RunEnded,
    SqliteStore,
    dump_body,
)
from replanning.plan import RunId
from tests.support.invariants import invariant_violations

ROOT: Final = Path(__file__).parents[2]
RUN: Final = RunId("run-1")
STORES: Final = {"sqlite": SqliteStore, "jsonl": JsonlStore}
KILLS_PER_RUN: Final = 6
PATIENCE: Final = 60.0
"""Seconds after which a process that neither writes nor ends is taken to hang."""

AIMS: Final = (
    *("trigger-fired", "alternatives-considered", "revised", "decided", "attempt-succeeded", "process-started"),
    *("attempt-started once", "attempt-started pipeline", "run-ended"),
)
"""Records before or after which chance would seldom kill: within an append, between records that belong together."""

AIMS_OF_RESUMED: Final = ("run-resumed", "attempt-interrupted", "trigger-fired", "question-answered", "revised")
"""The same in a process that resumes the run."""

Said = dict[str, Any]
"""What a process says at its end: how the run ended, or `refused` alone when it did not get the run."""


@dataclass
class Tally:
    """What has happened so far."""

    kills: int = 0
    runs: int = 0


class Process:
    """A process that works on the run, and what it tells of its records."""

    def __init__(self, kind: str, folder: Path, *, lease: str = "inf") -> None:
        self.reading, writing = os.pipe()
        self.errors = folder / "errors"
        arguments = [kind, str(folder / "history"), RUN, str(folder / "effects"), str(writing)]
        command = [sys.executable, "-m", "tests.support.crash_child", *arguments]
        with self.errors.open("ab") as errors:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "pass_fds": [writing]}
            environ = {**os.environ, "LEASE": lease}
            self.process = subprocess.Popen(command, cwd=ROOT, env=environ, text=True, **pipes)
        os.close(writing)
        self._rest = b""

    def ready(self) -> None:
        """Wait until it waits for the word to begin."""
        assert next(self.ticks()) == "ready"

    def go(self) -> None:
        """Let it begin."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def ticks(self) -> Iterator[str]:
        """What it tells, line by line as it comes, until it ends."""
        while chunk := os.read(self.reading, 4096):
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            yield from (line.decode() for line in lines)

    def finish(self) -> Said | None:
        """What it says at its end; None when it was killed."""
        said, _ = self.process.communicate(timeout=PATIENCE)
        os.close(self.reading)
        assert self.process.returncode in (0, -signal.SIGKILL), self.errors.read_text()
        return json.loads(said) if self.process.returncode == 0 else None


@contextmanager
def started(kind: str, folder: Path, *, lease: str = "inf") -> Iterator[Process]:
    """A process that is gone afterwards; it waits until it is told to go."""
    process = Process(kind, folder, lease=lease)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()


def play(kind: str, folder: Path, rng: random.Random, kills: int, tally: Tally) -> Said:
    """Run the plan, killing its process so many times, until it ends; says how it ended."""
    tally.runs += 1
    before: list[Record] = []
    for life in range(kills + 1):
        with started(kind, folder) as process:
            process.go()
            if life < kills and not worn_out(before):
                live_a_while(process, kind, folder, rng, resumed=life > 0)
                process.process.kill()
            else:
                for _ in process.ticks():
                    pass
            said = process.finish()
        records = journal(kind, folder)
        check(records, before, folder)
        before = records
        if said is not None:
            return said
        tally.kills += 1
    raise AssertionError("it was killed although nobody killed it")


def worn_out(records: Sequence[Record]) -> bool:
    """Whether a task was cut off so often that it is not proposed once more to run it again."""
    begun = Counter(record.body.task for record in records if isinstance(record.body, AttemptStarted))
    return any(task.startswith("once") and times >= 3 for task, times in begun.items())


def live_a_while(process: Process, kind: str, folder: Path, rng: random.Random, *, resumed: bool) -> None:
    """Return at a moment of chance: after so many records, at a kind of record, or before the first one."""
    aims = AIMS_OF_RESUMED if resumed and rng.random() < 0.5 else AIMS
    aim = rng.choice("<>") + rng.choice(aims) if rng.random() < 0.6 else ""
    count = 1 if aim else rng.randint(1, 60)
    if rng.random() < 0.05:
        spin(rng.random())  # while it starts
        return
    for number, tick in enumerate(process.ticks()):
        if tick.startswith(">") and number % 16 == 1:
            nobody_else_gets_it(process, kind, folder)
        count -= tick.startswith(aim)
        if count <= 0:
            break
    spin(rng.choice([0.0, 0.0001, 0.001, 0.01]) * rng.random())


def spin(seconds: float) -> None:
    """Let so much time pass, to the microsecond."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def nobody_else_gets_it(process: Process, kind: str, folder: Path) -> None:
    """While the process lives, the run is owned by it and by nobody else."""
    with closing(STORES[kind](folder / "history")) as store:
        try:
            lease = store.acquire(RUN, "an intruder", Environment().clock.now(), 1.0)
        except RunOwned as error:
            owner = error.owner
        else:
            store.release(lease)
            ended = isinstance(list(store.read(RUN))[-1].body, RunEnded)
            assert ended or process.process.poll() is not None, "two processes owned the run at once"
            return
    assert f"process {process.process.pid} on " in owner, f"the run is owned by {owner}"


def journal(kind: str, folder: Path) -> list[Record]:
    """What is on record; nothing where the process was killed before it could create the run."""
    try:
        with closing(STORES[kind](folder / "history")) as store:
            return list(store.read(RUN))
    except UnknownRun:
        return []


def text(record: Record) -> str:
    """A record in full."""
    return f"{record.seq} {record.at} {record.body.kind} {dump_body(record.body)}"


def check(records: Sequence[Record], before: Sequence[Record], folder: Path) -> None:
    """What must hold after every kill."""
    old, new = list(map(text, before)), list(map(text, records))
    assert new[: len(old)] == old, "what was on record is not any more"
    assert [record.seq for record in records] == list(range(1, len(records) + 1))
    broken = invariant_violations(records) if records else []
    assert not broken, broken
    effects = Counter((folder / "effects").read_text().split()) if (folder / "effects").exists() else Counter()
    bodies = [record.body for record in records]
    begun = {body.attempt: body.task for body in bodies if isinstance(body, AttemptStarted)}
    approved = sum(isinstance(body, QuestionAnswered) and body.verdict == "approve" for body in bodies)
    for effect, times in effects.items():
        assert "#" not in effect or effect in begun, f"{effect} took effect before its start was on record"
        assert "#" not in effect or times == 1, f"{effect} took effect {times} times"
    for body in bodies:
        if isinstance(body, AttemptSucceeded):
            assert effects[body.attempt] or effects[f"{RUN}/{body.task}"], f"{body.attempt} is done without effect"
    for task, runs in Counter(begun.values()).items():
        assert not task.startswith("once") or runs <= 1 + approved, f"{task} was run again and nobody was asked"


def left_running(folder: Path) -> list[str]:
    """The processes that work on a run, where the system tells; those that are ending are given time for it."""
    mark = f"EFFECTS={folder / 'effects'}".encode()
    end = time.perf_counter() + PATIENCE
    while True:
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (place / "environ").read_bytes().split(b"\0"):
                    found.append((place / "cmdline").read_text().replace("\0", " "))
        if not found or time.perf_counter() > end:
            return found


def campaign(kind: str, kills: int, seed: int, place: Path) -> Tally:
    """Kill processes so many times, in as many runs as it takes; all must end as if nobody had been killed."""
    rng, tally = random.Random(seed), Tally()
    (place / "undisturbed").mkdir()
    undisturbed = play(kind, place / "undisturbed", rng, 0, Tally())
    assert (undisturbed["status"], undisturbed["differences"]) == ("succeeded", []), undisturbed
    while tally.kills < kills:
        folder = place / f"run-{tally.runs}"
        folder.mkdir()
        said = play(kind, folder, rng, min(KILLS_PER_RUN, kills - tally.kills), tally)
        assert said == undisturbed, f"{said} instead of {undisturbed}; seen in {folder}"
        bodies = [record.body for record in journal(kind, folder)]
        done = Counter(body.task for body in bodies if isinstance(body, AttemptSucceeded))
        assert set(done.values()) == {1}, f"done more than once: {done}"
        assert not left_running(folder), f"still running: {left_running(folder)}"
    return tally


def main() -> None:
    """Run a campaign from the command line."""
    parser = argparse.ArgumentParser(description="Kill processes that run plans; nothing may be lost or repeated.")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--store", choices=[*STORES], default="sqlite")
    options = parser.parse_args()
    sys.stdout.write(f"{options.kills} kills, store {options.store}, seed {options.seed}\n")
    place = Path(tempfile.mkdtemp(prefix="crash-"))
    tally = campaign(options.store, options.kills, options.seed, place)
    shutil.rmtree(place)  # where something was wrong it is still there, to be looked at
    sys.stdout.write(f"{tally.kills} kills in {tally.runs} runs; nothing was lost or repeated\n")


if __name__ == "__main__":
    main()
