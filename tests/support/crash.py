"""Processes that run plans and are killed at any moment, and what they leave on record."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Self

from replanning import Environment
from replanning.errors import RunOwned, StoreError, UnknownRun
from replanning.journal import JsonlStore, Lease, Record, RunStore, SqliteStore, dump_body
from tests.support.invariants import invariant_violations
from tests.support.resume import RUN

ROOT: Final = Path(__file__).parents[2]
STORES: Final = {"sqlite": SqliteStore, "jsonl": JsonlStore}
PATIENCE: Final = 60.0
"""Seconds after which a process that neither writes nor ends is taken to hang."""


class Process:
    """A program that works on a run until its block is left, and tells of its records on a pipe."""

    def __init__(self, program: str, folder: Path, *arguments: object, **environ: str) -> None:
        self.reading, writing = os.pipe()
        self.errors = folder / "errors"
        command = [sys.executable, "-m", f"tests.support.{program}", *map(str, arguments), str(writing)]
        with self.errors.open("ab") as errors:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "pass_fds": [writing]}
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


def check_kept(records: Sequence[Record], before: Sequence[Record]) -> None:
    """Check that a kill has changed nothing that was on record, and broken no promise of a run."""
    old, new = list(map(text, before)), list(map(text, records))
    assert new[: len(old)] == old, "what was on record is not any more"
    assert not records or invariant_violations(records) == []


def spin(seconds: float) -> None:
    """Let so much time pass, to the microsecond."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


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
        except StoreError as error:
            if "kept the file locked" not in str(error):
                raise
            process.process.send_signal(signal.SIGCONT)
            spin(0.01)
            suspend(process)
