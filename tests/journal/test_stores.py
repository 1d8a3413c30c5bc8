"""The stores keep what every store must keep to, and the checks that say so find the ones that do not."""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning import Goal, Plan, ReplanningEngine, Task
from replanning.errors import JournalCorrupt, RecordNotSerializable, StoreError
from replanning.journal import (
    AttemptFailed,
    AttemptSucceeded,
    ContextUpdated,
    Failure,
    InboxMessage,
    JsonlStore,
    MemoryStore,
    Record,
    RunEnded,
    RunOpened,
    SqliteStore,
)
from replanning.journal.owner import is_lease_free, owner_id
from replanning.journal.records import JOURNAL_FORMAT
from replanning.plan import AttemptId, RunId, TaskId
from replanning.plan.types import JsonValue
from replanning.testing.stores import STORE_CHECKS

STORES = {
    "memory": lambda folder: MemoryStore(),
    "jsonl": lambda folder: JsonlStore(folder / "deep" / "runs"),
    "sqlite": lambda folder: SqliteStore(folder / "deep" / "history.db"),
    "sqlite-full": lambda folder: SqliteStore(folder / "history.db", synchronous="full"),
    "sqlite-off": lambda folder: SqliteStore(folder / "history.db", synchronous="off"),
}
DURABLE = ("jsonl", "sqlite")
RUN = RunId("r")


def done(output=None):
    """A body with an output."""
    return AttemptSucceeded(AttemptId("a"), TaskId("t"), output)


def failed(failure):
    """A body with an error."""
    return AttemptFailed(AttemptId("a"), TaskId("t"), failure)


@pytest.fixture(params=["memory", *DURABLE])
def store(request, tmp_path):
    """Each store in turn."""
    opened = STORES[request.param](tmp_path)
    yield opened
    opened.close()


@pytest.fixture(scope="module", params=DURABLE)
def filled(request, tmp_path_factory):
    """A durable store that many examples write to, with the lease of its run."""
    opened = STORES[request.param](tmp_path_factory.mktemp("filled"))
    yield opened, opened.create(RUN, "me", 0.0, 5.0)
    opened.close()


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", STORES)
def test_contract(name, check, tmp_path):
    """Each of our stores passes each check that a third party's store can run."""
    check(lambda: STORES[name](tmp_path))


class Unfenced(MemoryStore):
    def acquire(self, run, owner, at, ttl):
        self.newest = super().acquire(run, owner, at, ttl)
        return self.newest

    def append(self, lease, record):
        super().append(getattr(self, "newest", lease), record)


class Generous(MemoryStore):
    def acquire(self, run, owner, at, ttl):
        return super().acquire(run, owner, at + 1e9, ttl)


class Rounding(MemoryStore):
    def append(self, lease, record):
        super().append(lease, record._replace(at=round(record.at, 1)))


class Forgetful(MemoryStore):
    durable = True


class Oldest(MemoryStore):
    def outcomes(self, *, tool=None, capability=None, limit=50):
        return super().outcomes(tool=tool, capability=capability, limit=limit)[::-1]


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (Unfenced, "check_ended_lease_is_taken_over"),
        (Generous, "check_owned_run_is_not_given_away"),
        (Rounding, "check_records_come_back_as_they_were"),
        (Forgetful, "check_everything_outlives_the_store"),
        (Oldest, "check_outcomes_come_newest_first"),
    ],
)
def test_contract_finds(broken, found):
    """A store that breaks a promise fails the check that states it."""
    (check,) = [check for check in STORE_CHECKS if check.__name__ == found]
    with pytest.raises((AssertionError, LookupError)):
        check(broken)
    check(MemoryStore)


def replace_format(folder, name, field):
    """Replace the format in the first record of the only run, behind the store's back."""
    if name == "jsonl":
        (journal,) = folder.rglob("r.jsonl")
        journal.write_text(journal.read_text().replace(f'"format":{JOURNAL_FORMAT},', field, 1))
    else:
        (file,) = folder.rglob("history.db")
        with closing(sqlite3.connect(file)) as connection, connection:
            connection.execute(
                "UPDATE records SET data = replace(data, ?, ?) WHERE seq = 1", (f'"format":{JOURNAL_FORMAT},', field)
            )


@pytest.mark.parametrize(("field", "version"), [("", 1), ('"format":99,', 99), ('"format" : 1 ,', 1)])
@pytest.mark.parametrize("name", DURABLE)
async def test_other_format(name, field, version, tmp_path):
    """A journal of an older or newer format is refused when it is read, with its format and advice."""
    plan = Plan(goal=Goal(objective="x"), tasks=(Task(id="a"),))
    with closing(STORES[name](tmp_path)) as store:
        lease = store.create(RUN, "me", 0.0, 5.0)
        store.append(lease, Record(1, 0.0, RunOpened(RUN, plan)))
        store.append(lease, Record(2, 0.0, RunEnded("paused", "")))
        store.release(lease)
        assert len(list(store.read(RUN))) == 2
    replace_format(tmp_path, name, field)
    message = (
        rf"the journal of run 'r' has format {version}, .* reads format {JOURNAL_FORMAT}; use the version of replan"
    )
    with closing(STORES[name](tmp_path)) as store:
        assert [(run.run, run.status) for run in store.runs()] == [(RUN, "paused")]
        with pytest.raises(JournalCorrupt, match=message):
            list(store.read(RUN))
        with pytest.raises(JournalCorrupt, match=message):
            async with ReplanningEngine([], store=store).resume(RUN):
                pass


WITHOUT_FCNTL = """
import sys

sys.modules["fcntl"] = None
import anyio
from replanning import Goal, Plan, ReplanningEngine, Task
import replanning.journal

async def work(task, context):
    return task.id

async def main():
    plan = Plan(goal=Goal(objective="x"), tasks=(Task(id="a"),))
    for store in (None, replanning.journal.SqliteStore(sys.argv[1])):
        print((await ReplanningEngine(store=store).execute(plan, work)).status)

anyio.run(main)
try:
    replanning.journal.JsonlStore
except ImportError as error:
    print(error)
"""


def test_system_without_file_locks(tmp_path):
    """Where the module fcntl is missing, runs in memory and in SQLite work; the JSONL store names what it lacks."""
    command = [sys.executable, "-c", WITHOUT_FCNTL, str(tmp_path / "h.db")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    message = "the JSONL store locks files with fcntl, which this system lacks; use SqliteStore"
    assert done.stdout.splitlines() == ["succeeded", "succeeded", message], done.stderr


@pytest.mark.parametrize("run", ["", ".", "..", ".hidden", "a/b", "../a", "a\\b", "a\0b", "a\nb", "x" * 201, "\ud800"])
def test_bad_id(store, tmp_path, run):
    """An id that cannot be a file name everywhere is refused, with what is wrong, and nothing is made."""
    with pytest.raises(StoreError, match="cannot be the id of a run: it "):
        store.create(run, "me", 0.0, 5.0)
    assert store.runs() == []
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.parametrize("run", ["a", "2024-05-06T07:08", "größe", "a b", "x" * 200, "a.jsonl", "a.lease", "-"])
def test_good_id(store, run):
    """Any other id is taken, also one that looks like a file of the store."""
    lease = store.create(run, "me", 0.0, 5.0)
    store.append(lease, Record(1, 0.0, done()))
    assert [info.run for info in store.runs()] == [run]
    assert len(list(store.read(run))) == 1


def test_near_id(store):
    """Who mistypes an id is told the nearest one."""
    store.create(RunId("build-2024"), "me", 0.0, 5.0)
    with pytest.raises(LookupError, match=r"there is no run 'build-2042'; did you mean 'build-2024'\?"):
        store.read(RunId("build-2042"))


def test_repr(tmp_path):
    """A store says in one line what it is and where it keeps things."""
    memory = MemoryStore()
    memory.create(RUN, "me", 0.0, 5.0)
    assert repr(memory) == "<MemoryStore runs=1>"
    assert repr(JsonlStore("a/runs")) == "<JsonlStore 'a/runs'>"
    sqlite = SqliteStore(tmp_path / "h.db")
    assert repr(sqlite) == f"<SqliteStore '{tmp_path}/h.db'>"
    sqlite.close()


@pytest.mark.parametrize(
    "body",
    [
        done({"loss": [float("nan")]}),
        done("\ud800"),
        done(10**5000),
        done(object()),
        failed(Failure("OSError", "no file 'caf\udce9'")),
        ContextUpdated({"x": float("inf")}),
    ],
    ids=["nan", "surrogate", "digits", "object", "error", "infinity"],
)
def test_unstorable(filled, body):
    """What JSON cannot express is refused as such, with the number of the record, before anything is written."""
    store, lease = filled
    seq = store.runs()[0].records + 1
    with pytest.raises(
        RecordNotSerializable, match=rf"record {seq} \({body.kind}\) cannot be kept as JSON: .*nothing was written"
    ):
        store.append(lease, Record(seq, 0.0, body))
    with pytest.raises(RecordNotSerializable, match="its time is nan"):
        store.append(lease, Record(seq, float("nan"), done()))
    assert store.runs()[0].records == seq - 1


def nested(depth: int) -> JsonValue:
    """A list in a list in a list."""
    value: JsonValue = []
    for _ in range(depth):
        value = [value]
    return value


def test_unstorable_message(filled):
    """A message that JSON cannot express is refused, and the inbox stays as it was."""
    store, _ = filled
    with pytest.raises(RecordNotSerializable, match="nothing was written"):
        store.post(RUN, InboxMessage("answer", 0.0, "eve", {"x": float("nan")}))
    with pytest.raises(RecordNotSerializable, match="nothing was written"):
        store.post(RUN, InboxMessage("answer", 0.0, "eve", {"x": nested(100_000)}))
    assert list(store.inbox(RUN)) == []


TEXT = st.text(st.characters(exclude_categories=[]), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(output=VALUES, at=st.floats(0, 1e12), message=TEXT)
def test_round_trip(filled, output, at, message):
    """Any record comes back exactly as it was, or is refused with nothing written."""
    store, lease = filled
    before = store.runs()[0].records
    for body in (done(output), failed(Failure("E", message))):
        record = Record(store.runs()[0].records + 1, at, body)
        try:
            store.append(lease, record)
        except RecordNotSerializable:
            assert store.runs()[0].records == record.seq - 1
        else:
            before += 1
            (read,) = store.read(RUN, after=record.seq - 1)
            assert repr(read) == repr(record)
    assert store.runs()[0].records == before


def test_owner_is_this_process():
    """The owner's name says number and host, is the same each time, and is that of a living process."""
    assert owner_id() == owner_id()
    assert owner_id().startswith(f"process {os.getpid()} on {socket.gethostname()} (")
    assert not is_lease_free(owner_id(), until=10.0, at=10.0)
    assert is_lease_free(owner_id(), until=10.0, at=10.1)
    assert is_lease_free(None, until=10.0, at=0.0)


def test_owner_is_not_its_number():
    """A process that has the number of an earlier one is not taken for it; of other machines nothing is assumed."""
    born = owner_id().rpartition("(")[2].partition(".")[0]
    assert is_lease_free(owner_id().replace(f"({born}.", "(1."), until=10.0, at=0.0)
    assert is_lease_free(owner_id().replace("process ", "process 99999"), until=10.0, at=0.0)
    assert not is_lease_free(
        owner_id().replace("process ", "process 99999").replace(" on ", " on x"), until=10.0, at=0.0
    )
    assert not is_lease_free("process 99999999 on its own", until=10.0, at=0.0)
