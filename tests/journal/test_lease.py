"""The SQLite store among several processes: races, kills, takeovers and a disk that is full."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack, closing, contextmanager

import pytest

from replanning.errors import RunOwned
from replanning.journal import SqliteStore
from replanning.testing.stores import RUN

# What the programs below have in common; each answers a line on its input with a line on its output.
COMMON = """
import sys
from replanning.errors import RunOwned, StoreError
from replanning.journal import Record, SqliteStore
from replanning.environment import owner_id
from replanning.testing.stores import attempt_succeeded

def opened(path=sys.argv[1]):
    return SqliteStore(path)

def record(seq):
    return Record(seq, 0.0, attempt_succeeded("x" * 20_000))

def say(*words):
    print(*words, flush=True)
"""

APPEND = """
store = opened()
lease = store.acquire("run-1", owner_id(), 0.0, 1e9)
seq = len(list(store.read("run-1")))
say("ready")
while True:
    seq += 1
    store.append(lease, record(seq))
    say(seq)
"""


OPEN = """
say("ready")
for line in sys.stdin:
    opened(line.strip()).close()
    say("opened")
"""

FILL = """
import resource
store = opened()
lease = store.create("run-1", "me", 0.0, 5.0)
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, most))
seq, messages = 1, []
while len(messages) < 2:
    try:
        store.append(lease, record(seq))
        seq += 1
    except StoreError as error:
        messages.append(str(error))
        say(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
store.append(lease, record(seq))
say([kept.seq for kept in store.read("run-1")] == list(range(1, seq + 1)))
"""


@pytest.fixture
def place(tmp_path):
    """The path of a store, as a program is told."""
    return str(tmp_path / "history")


def opened(place):
    """The store at a place, to be closed."""
    return closing(SqliteStore(place))


@contextmanager
def program(text, place):
    """A process that runs a program on a store."""
    command = [sys.executable, "-c", COMMON + text, place]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
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


def test_kill(place):
    """An owner that is killed while others read loses no record, shows whole ones only, and is followed at once."""
    with opened(place) as store:
        store.release(store.create(RUN, "me", 0.0, 5.0))
        for moment in (1, 2, 13, 55, 89):
            with program(APPEND, place) as process:
                answer(process)
                taken = [int(answer(process)) for _ in range(moment)][-1]
                kept = [record.seq for record in store.read(RUN)]
                assert kept == list(range(1, len(kept) + 1))
                assert store.runs()[0].records >= len(kept) >= taken
                with pytest.raises(
                    RunOwned, match=rf"run 'run-1' is owned by process {process.pid} on "
                ):
                    store.acquire(RUN, "me", 1.0, 5.0)
                process.send_signal(signal.SIGKILL)
                # Dead but not yet collected by its parent, as a process is whose parent is busy.
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
                lease = store.acquire(RUN, "me", 1.0, 5.0)
                taken = max([taken, *map(int, process.stdout.read().split("\n")[:-1])])
            kept = [record.seq for record in store.read(RUN)]
            assert kept == list(range(1, len(kept) + 1))
            # One record more may have been written than the process could tell of.
            assert len(kept) - taken in {0, 1}
            store.release(lease)


def test_full_disk(place):
    """A file that can grow no more is reported, nothing that was taken is lost, and later the run goes on."""
    with program(FILL, place) as process:
        messages = [answer(process), answer(process)]
        assert all(
            "cannot take record" in message and "limit" in message for message in messages
        ), messages
        assert answer(process) == "True"


def test_open_at_once(tmp_path):
    """Processes that open the same new SQLite file at the same time all get it."""
    with ExitStack() as stack:
        openers = [stack.enter_context(program(OPEN, "")) for _ in range(4)]
        assert [answer(opener) for opener in openers] == ["ready"] * 4
        for number in range(10):
            for opener in openers:
                tell(opener, str(tmp_path / str(number) / "history.db"))
            assert [answer(opener) for opener in openers] == ["opened"] * 4
