"""The durable stores among several processes: races, kills, takeovers and a disk that is full."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack, closing, contextmanager

import pytest

from replanning.errors import RunOwned
from replanning.journal import JsonlStore, SqliteStore
from replanning.plan import RunId

RUN = RunId("r")
STORES = {"jsonl": JsonlStore, "sqlite": SqliteStore}

# What the programs below have in common; each answers a line on its input with a line on its output.
COMMON = """
import sys
from replanning.errors import LeaseLost, RunOwned, StoreError
from replanning.journal import (AttemptSucceeded, JsonlStore, Record, SqliteStore)
from replanning.journal.owner import owner_id

def opened():
    return {"jsonl": JsonlStore, "sqlite": SqliteStore}[sys.argv[1]](sys.argv[2])

def record(seq):
    return Record(seq, 0.0, AttemptSucceeded("a", "t", "x" * 20_000))

def say(*words):
    print(*words, flush=True)
"""

APPEND = """
store = opened()
lease = store.acquire("r", owner_id(), 0.0, 1e9)
seq = len(list(store.read("r")))
say("at", seq)
while True:
    seq += 1
    store.append(lease, record(seq))
    say(seq)
"""

RACE = """
store = opened()
say("ready")
for line in sys.stdin:
    try:
        store.acquire(line.strip(), owner_id(), 0.0, 1e9)
        say("won")
    except RunOwned:
        say("lost")
"""

OPEN = """
say("ready")
for line in sys.stdin:
    sys.argv[2] = line.strip()
    opened().close()
    say("opened")
"""

LOSE = """
store = opened()
lease = store.create("r", owner_id(), 0.0, 5.0)
store.append(lease, record(1))
say("mine")
sys.stdin.readline()
for call in (lambda: store.append(lease, record(2)), lambda: store.append(lease, record(3)), lambda: store.renew(lease, 99.0, 9.0)):
    try:
        call()
        say("written")
    except LeaseLost:
        say("fenced")
"""

FILL = """
import resource
store = opened()
lease = store.create("r", "me", 0.0, 5.0)
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, most))
for seq in range(1, 100):
    try:
        store.append(lease, record(seq))
    except StoreError as error:
        say(error)
        break
try:
    store.append(lease, record(seq))
    say("written")
except StoreError as error:
    say(error)
say(seq - len(list(store.read("r"))))
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
store.append(lease, record(seq))
store.append(lease, record(seq + 1))
say([kept.seq for kept in store.read("r")] == list(range(1, seq + 2)))
"""


@pytest.fixture(params=STORES)
def place(request, tmp_path):
    """Kind and path of a durable store, as a program is told."""
    return request.param, str(tmp_path / "history")


def opened(place):
    """The store at a place, to be closed."""
    kind, path = place
    return closing(STORES[kind](path))


@contextmanager
def program(text, place):
    """A process that runs a program on a store."""
    command = [sys.executable, "-c", COMMON + text, *place]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def answer(process):
    """The next line that a process says."""
    return process.stdout.readline().strip()


def tell(process, line):
    """Say a line to a process."""
    process.stdin.write(line + "\n")
    process.stdin.flush()


def test_race(place):
    """Of processes that want the same run at the same time, exactly one gets it."""
    runs = [RunId(f"run-{number}") for number in range(20)]
    with opened(place) as store, ExitStack() as stack:
        for run in runs:
            store.release(store.create(run, "me", 0.0, 5.0))
        racers = [stack.enter_context(program(RACE, place)) for _ in range(2)]
        assert [answer(racer) for racer in racers] == ["ready", "ready"]
        for run in runs:
            for racer in racers:
                tell(racer, run)
            assert sorted(answer(racer) for racer in racers) == ["lost", "won"]


def test_kill(place):
    """Killed at any moment, an owner loses no record that was taken, and the next one goes on at once."""
    with opened(place) as store:
        store.release(store.create(RUN, "me", 0.0, 5.0))
        for moment in (1, 2, 13, 55, 89):
            with program(APPEND, place) as process:
                begun = int(answer(process).removeprefix("at "))
                for _ in range(moment):
                    taken = int(answer(process))
                with pytest.raises(RunOwned):
                    store.acquire(RUN, "me", 1.0, 5.0)
                process.send_signal(signal.SIGKILL)
                # Dead but not yet collected by its parent, as a process is whose parent is busy.
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
                lease = store.acquire(RUN, "me", 1.0, 5.0)
                taken = max([taken, *map(int, process.stdout.read().split("\n")[:-1])])
            kept = [record.seq for record in store.read(RUN)]
            assert kept == list(range(1, len(kept) + 1))
            # One record more may have been written than the process could tell of.
            assert taken - begun >= moment
            assert len(kept) - taken in {0, 1}
            store.release(lease)


def test_fenced(place):
    """A process whose run was taken over, while it was not looking, writes nothing any more."""
    with program(LOSE, place) as process:
        assert answer(process) == "mine"
        with opened(place) as store:
            with pytest.raises(RunOwned, match=rf"run 'r' is owned by process {process.pid} on "):
                store.acquire(RUN, "me", 5.0, 5.0)
            store.acquire(RUN, "me", 5.1, 5.0)
            tell(process, "go on")
            assert [answer(process) for _ in range(3)] == ["fenced"] * 3
            assert [record.seq for record in store.read(RUN)] == [1]


def test_read_meanwhile(place):
    """While one process writes, another reads: whole records, without gaps, and never fewer than before."""
    with opened(place) as store:
        store.release(store.create(RUN, "me", 0.0, 5.0))
        with program(APPEND, place) as process:
            assert answer(process) == "at 0"
            before = 0
            for _ in range(10):
                taken = int(answer(process))
                kept = [record.seq for record in store.read(RUN)]
                assert kept == list(range(1, len(kept) + 1))
                assert len(kept) >= max(taken, before)
                before = len(kept)
                assert store.runs()[0].records >= before


def test_full_disk(place):
    """A file that can grow no more is reported, nothing that was taken is lost, and later the run goes on."""
    with program(FILL, place) as process:
        messages = [answer(process), answer(process)]
        assert all("cannot take record" in message and "limit" in message for message in messages), messages
        assert answer(process) == "1"
        assert answer(process) == "True"


def test_open_at_once(tmp_path):
    """Processes that open the same new SQLite file at the same time all get it."""
    place = ("sqlite", "")
    with ExitStack() as stack:
        openers = [stack.enter_context(program(OPEN, place)) for _ in range(4)]
        assert [answer(opener) for opener in openers] == ["ready"] * 4
        for number in range(10):
            for opener in openers:
                tell(opener, str(tmp_path / str(number) / "history.db"))
            assert [answer(opener) for opener in openers] == ["opened"] * 4
