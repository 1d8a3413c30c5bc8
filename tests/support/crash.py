"""Processes that run plans and are killed at any moment, and what they leave on record."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from random import Random
from typing import Any, Final, Self

from replanning import Environment
from replanning.errors import RunOwned, StoreError, UnknownRun
from replanning.journal import (
    AttemptStarted,
    AttemptSucceeded,
    Lease,
    QuestionAnswered,
    Record,
    RunEnded,
    RunStore,
    SqliteStore,
    dump_body,
)
from tests.support.invariants import invariant_violations
from tests.support.resume import RUN

ROOT: Final = Path(__file__).parents[2]
PATIENCE: Final = 60.0
"""Seconds after which a process that neither writes nor ends is taken to hang."""

KILLS_PER_RUN: Final = 6
AIMS: Final = (
    *(
        "trigger-fired",
        "alternatives-considered",
        "revised",
        "decided",
        "attempt-succeeded",
        "process-started",
    ),
    *("attempt-started once", "attempt-started pipeline", "run-ended"),
)
"""Records before or after which chance would seldom kill: within an append, between records that belong together."""

AIMS_OF_RESUMED: Final = (
    "run-resumed",
    "attempt-interrupted",
    "trigger-fired",
    "question-answered",
    "revised",
)
"""The same in a process that resumes the run."""


class Process:
    """A program that works on a run until its block is left, and tells of its records on a pipe."""

    def __init__(self, program: str, folder: Path, *arguments: object, **environ: str) -> None:
        self.reading, writing = os.pipe()
        self.errors = folder / "errors"
        command = [
            sys.executable,
            "-m",
            f"tests.support.{program}",
            *map(str, arguments),
            str(writing),
        ]
        with self.errors.open("ab") as errors:
            pipes = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "stderr": errors,
                "pass_fds": [writing],
            }
            environ = {**os.environ, **environ}
            self.process: Any = subprocess.Popen(command, cwd=ROOT, env=environ, text=True, **pipes)
        os.close(writing)
        self._rest = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()

    def ticks(self) -> Iterator[str]:
        """What it tells, line by line as it comes, until it ends."""
        while chunk := os.read(self.reading, 4096):
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            yield from (line.decode() for line in lines)

    def finish(self) -> dict[str, Any] | None:
        """What it says at its end; None when it was killed."""
        said, _ = self.process.communicate(timeout=PATIENCE)
        os.close(self.reading)
        assert self.process.returncode in (0, -signal.SIGKILL), self.errors.read_text()
        return json.loads(said) if self.process.returncode == 0 else None


def history(kind: str, folder: Path) -> RunStore:
    """The store of a folder; for that in PostgreSQL the folder has a file with its address."""
    if kind == "postgres":
        from replanning.journal.postgres import PostgresStore

        return PostgresStore((folder / "history").read_text())
    return SqliteStore(folder / "history")


def journal(kind: str, folder: Path) -> list[Record]:
    """What is on record; nothing where the process was killed before it could create the run."""
    try:
        with closing(history(kind, folder)) as store:
            return list(store.read(RUN))
    except UnknownRun:
        return []


def text(record: Record) -> str:
    """A record in full."""
    return f"{record.seq} {record.at} {record.body.kind} {dump_body(record.body)}"


def check_kept(records: Sequence[Record], before: Sequence[Record]) -> None:
    """Check that a kill has changed nothing that was on record, and broken no promise of a run."""
    old, new = list(map(text, before)), list(map(text, records))
    assert new[: len(old)] == old, "what was on record is not any more"
    assert not records or invariant_violations(records) == []


def let_pass(seconds: float) -> None:
    """Let so much time pass, without use of the processor."""
    threading.Event().wait(seconds)


def wait_for_end(pid: int, seconds: float = PATIENCE) -> bool:
    """Wait until a process has ended, whoever started it; return whether it has."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ended, _, _ = select.select([process], [], [], seconds)
    finally:
        os.close(process)
    return bool(ended)


def suspend(process: Process) -> None:
    """Stop a process where it is."""
    process.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.process.pid, os.WSTOPPED)


def taken_over(store: RunStore, process: Process) -> Lease:
    """Take the run of a process that is suspended; one that holds the file locked is suspended a little later."""
    end = time.perf_counter() + PATIENCE
    while True:
        try:
            return store.acquire(RUN, "another", Environment().clock.now(), 30.0)
        except RunOwned:
            assert time.perf_counter() < end
            let_pass(0.01)
        except StoreError as error:
            if "kept the file locked" not in str(error):
                raise
            process.process.send_signal(signal.SIGCONT)
            let_pass(0.01)
            suspend(process)


def started(kind: str, folder: Path, *, lease: str = "inf", **environ: str) -> Process:
    """Return a process that waits until it is told to go."""
    return Process(
        "crash_child",
        folder,
        kind,
        folder / "history",
        RUN,
        folder / "effects",
        LEASE=lease,
        **environ,
    )


def go(process: Process) -> None:
    """Let a process begin."""
    process.process.stdin.write("go\n")
    process.process.stdin.flush()


def play(
    kind: str,
    folder: Path,
    rng: Random,
    kills: int,
    *,
    hosts: Sequence[Mapping[str, str]] = ({},),
    outage: Callable[[Random], AbstractContextManager[None]] | None = None,
) -> tuple[dict[str, Any], int]:
    """Run the plan until it ends, killing its process at most so many times; return its end and the kills.

    Args:
        hosts: variables of the processes, which take turns.
        outage: while its block runs the store's server is down; some processes are killed in one, and some live through it.
    """
    folder.mkdir(exist_ok=True)
    before, said = list[Record](), None
    for life in range(kills + 1):
        host = hosts[life % len(hosts)]
        with started(kind, folder, **host) as process:
            go(process)
            if life < kills and not worn_out(before):
                live_a_while(
                    process, kind, folder, rng, resumed=life > 0, owned="lease" not in host
                )
                if outage is not None and rng.random() < 0.5:
                    with outage(rng):
                        if rng.random() < 0.5:
                            process.process.kill()
                    live_a_while(process, kind, folder, rng, resumed=True, owned=False)
                process.process.kill()
            else:
                for _ in process.ticks():
                    pass
            said = process.finish()
        records = journal(kind, folder)
        check(records, before, folder)
        before = records
        if said is not None and "refused" not in said:
            return said, life
    raise AssertionError(f"it was killed although nobody killed it, or refused: {said}")


def check_kills(
    kind: str,
    make_folder: Callable[[str], Path],
    kills: int,
    *,
    hosts: Sequence[Mapping[str, str]] = ({},),
    outage: Callable[[Random], AbstractContextManager[None]] | None = None,
) -> None:
    """Check that runs whose processes are killed lose and repeat nothing, and end as one that was left alone.

    Args:
        make_folder: makes the folder of a run with this name.
        kills: the number of kills, unless REPLANNING_KILLS says another; REPLANNING_SEED has the seed.
        hosts: variables of the processes of every second run, which take turns.
        outage: as for `play`.
    """
    left = int(os.environ.get("REPLANNING_KILLS", str(kills)))
    rng = Random(os.environ.get("REPLANNING_SEED", "20240229"))
    undisturbed, _ = play(kind, make_folder("undisturbed"), rng, 0)
    assert (undisturbed["status"], undisturbed["differences"]) == ("succeeded", []), undisturbed
    number = 0
    while left > 0:
        number += 1
        folder = make_folder(f"run-{number}")
        said, killed = play(
            kind,
            folder,
            rng,
            min(KILLS_PER_RUN, left),
            hosts=hosts if number % 2 else ({},),
            outage=outage,
        )
        left -= killed
        # Which attempts were in doubt when the process was killed is a matter of chance.
        said["reason"] = said["reason"].partition(": it is unknown whether ")[0]
        assert said == undisturbed, f"{said} instead of {undisturbed}; seen in {folder}"
        done = Counter(
            r.body.task for r in journal(kind, folder) if isinstance(r.body, AttemptSucceeded)
        )
        assert set(done.values()) == {1}, f"done more than once: {done}"
        assert not left_running(folder), f"still running: {left_running(folder)}"


def worn_out(records: Sequence[Record]) -> bool:
    """Whether a task was cut off so often that it is not proposed once more to run it again."""
    begun = Counter(
        record.body.task for record in records if isinstance(record.body, AttemptStarted)
    )
    return any(task.startswith("once") and times >= 3 for task, times in begun.items())


def live_a_while(
    process: Process, kind: str, folder: Path, rng: Random, *, resumed: bool, owned: bool = True
) -> None:
    """Return at a moment of chance: after so many records, at a kind of record, or before the first one."""
    aims = AIMS_OF_RESUMED if resumed and rng.random() < 0.5 else AIMS
    aim = rng.choice("<>") + rng.choice(aims) if rng.random() < 0.6 else ""
    count = 1 if aim else rng.randint(1, 60)
    if rng.random() < 0.05:
        let_pass(rng.random())  # while it starts
        return
    for number, tick in enumerate(process.ticks()):
        if owned and tick.startswith(">") and number % 16 == 1:
            nobody_else_gets_it(process, kind, folder)
        count -= tick.startswith(aim)
        if count <= 0:
            break
    let_pass(rng.choice([0.0, 0.0001, 0.001, 0.01]) * rng.random())


def nobody_else_gets_it(process: Process, kind: str, folder: Path) -> None:
    """While the process lives, the run is owned by it and by nobody else."""
    with closing(history(kind, folder)) as store:
        try:
            lease = store.acquire(RUN, "an intruder", Environment().clock.now(), 1.0)
        except RunOwned as error:
            owner = error.owner
        else:
            store.release(lease)
            ended = isinstance(list(store.read(RUN))[-1].body, RunEnded)
            assert ended or process.process.poll() is not None, (
                "two processes owned the run at once"
            )
            return
    assert f"process {process.process.pid} on " in owner, f"the run is owned by {owner}"


def check(records: Sequence[Record], before: Sequence[Record], folder: Path) -> None:
    """What must hold after every kill."""
    check_kept(records, before)
    effects = (
        Counter((folder / "effects").read_text().split())
        if (folder / "effects").exists()
        else Counter()
    )
    bodies = [record.body for record in records]
    begun = {body.attempt: body.task for body in bodies if isinstance(body, AttemptStarted)}
    approved = sum(
        isinstance(body, QuestionAnswered) and body.verdict == "approve" for body in bodies
    )
    for effect, times in effects.items():
        assert "#" not in effect or effect in begun, (
            f"{effect} took effect before its start was on record"
        )
        assert "#" not in effect or times == 1, f"{effect} took effect {times} times"
    for body in bodies:
        if isinstance(body, AttemptSucceeded):
            assert effects[body.attempt] or effects[f"{RUN}/{body.task}"], (
                f"{body.attempt} is done without effect"
            )
    for task, runs in Counter(begun.values()).items():
        assert not task.startswith("once") or runs <= 1 + approved, (
            f"{task} was run again and nobody was asked"
        )


def left_running(folder: Path) -> list[str]:
    """The processes that work on a run, where the system tells; those that are ending are given time for it."""
    mark = f"EFFECTS={folder / 'effects'}".encode()
    left = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (place / "environ").read_bytes().split(b"\0"):
                command = (place / "cmdline").read_text().replace("\0", " ")
                if not wait_for_end(int(place.name)):
                    left.append(command)
    return left
