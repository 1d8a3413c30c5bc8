# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""The stores keep what every store must keep to, and the checks that say so find the ones that do not."""

import os
import socket
import sqlite3
import subprocess
import sys
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning import ReplanningEngine, journal
from replanning.environment import is_lease_free, owner_id
from replanning.errors import JournalCorrupt, RecordNotSerializable, StoreError, UnknownRun
from replanning.journal import MemoryStore, Record, SqliteStore
from replanning.journal.records import BODY_TYPES, JOURNAL_FORMAT
from replanning.journal.store import checksum
from replanning.testing import stores
from replanning.testing.stores import (
    RUN,
    STORE_CHECKS,
    attempt_succeeded,
    sample_bodies,
    sample_message,
    sample_plan,
    sample_record,
)
from tests.support.runs import perform

STORES = {
    "memory": lambda folder: MemoryStore(),
    "sqlite": lambda folder: SqliteStore(folder / "deep" / "history.db"),
    "sqlite-full": lambda folder: SqliteStore(folder / "history.db", synchronous="full"),
    "sqlite-off": lambda folder: SqliteStore(folder / "history.db", synchronous="off"),
}
DURABLE = ("sqlite",)


def failed(message):
    """A body with an error message."""
    return journal.AttemptFailed("a", "t", journal.Failure("OSError", message))


@pytest.fixture(params=["memory", *DURABLE])
def store(request, tmp_path):
    """Each store in turn."""
    opened = STORES[request.param](tmp_path)
    yield opened
    opened.close()


@pytest.fixture(scope="module", params=DURABLE)
def filled(request, tmp_path_factory):
    """A durable store that many examples write to, with the lease of its run, which has a record."""
    opened = STORES[request.param](tmp_path_factory.mktemp("filled"))
    lease = opened.create(RUN, "me", 0.0, 5.0)
    opened.append(lease, sample_record(1))
    yield opened, lease
    opened.close()


@pytest.mark.parametrize(
    "check", STORE_CHECKS, ids=lambda check: check.__name__.removeprefix("check_")
)
@pytest.mark.parametrize("name", STORES)
def test_contract(name, check, tmp_path):
    """Each of our stores passes each check that a third party's store can run."""
    check(lambda: STORES[name](tmp_path))


def test_every_kind_is_tried():
    """Each kind of record has its own name, and the checks of the stores forget none."""
    assert sorted(body.kind for body in sample_bodies()) == sorted(BODY_TYPES)


def test_short():
    """The most frequent records are written without what goes without saying."""
    assert (
        journal.dump_body(journal.AttemptStarted("a#1", "a", 1))
        == '{"attempt":"a#1","task":"a","number":1}'
    )
    assert journal.dump_body(journal.AttemptSucceeded("a#1", "a")) == '{"attempt":"a#1","task":"a"}'


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


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (Unfenced, stores.check_ended_lease_is_taken_over),
        (Generous, stores.check_owned_run_is_not_given_away),
        (Rounding, stores.check_records_come_back_as_they_were),
        (Forgetful, stores.check_everything_outlives_the_store),
    ],
)
def test_contract_finds(broken, check):
    """A store that breaks a promise fails the check that states it."""
    with pytest.raises((AssertionError, LookupError)):
        check(broken)
    check(MemoryStore)


def replace_format(folder, field):
    """Replace the format in the first record of the only run, behind the store's back."""
    old = f'"format":{JOURNAL_FORMAT},'
    for path in folder.rglob("history.db"):
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(
                "UPDATE records SET data = replace(data, ?, ?) WHERE seq = 1", (old, field)
            )
            connection.create_function("checksum", -1, checksum)
            connection.execute(
                "UPDATE records SET crc = checksum(CAST(data AS BLOB), seq, at, kind) WHERE seq = 1"
            )


@pytest.mark.parametrize(
    ("field", "version"), [("", 1), ('"format":99,', 99), ('"format" : 1 ,', 1)]
)
@pytest.mark.parametrize("store", DURABLE, indirect=True)
async def test_other_format(store, field, version, tmp_path):
    """A journal of an older or newer format is refused when it is read, with its format and advice."""
    lease = store.create(RUN, "me", 0.0, 5.0)
    store.append(lease, Record(1, 0.0, journal.RunOpened(RUN, sample_plan())))
    store.append(lease, Record(2, 0.0, journal.RunEnded("paused", "")))
    store.release(lease)
    replace_format(tmp_path, field)
    message = rf"run 'run-1' has format {version}, .* reads format {JOURNAL_FORMAT}; use the version of replanning"
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
from replanning import ReplanningEngine, journal
from replanning.testing.stores import sample_plan

async def work(task, context):
    return task.id

for store in (None, journal.SqliteStore(sys.argv[1])):
    print(anyio.run(ReplanningEngine(store=store).execute, sample_plan(), work).status)
"""


def test_system_without_file_locks(tmp_path):
    """Where the module fcntl is missing, runs in memory and in SQLite work."""
    command = [sys.executable, "-c", WITHOUT_FCNTL, str(tmp_path / "h.db")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["succeeded", "succeeded"], done.stderr


@pytest.fixture(scope="module", params=DURABLE)
def closed(request, tmp_path_factory):
    """A function, as its result is long: kind of a store with 40 records, its files, and what it tells."""
    folder = tmp_path_factory.mktemp("closed")
    with closing(STORES[request.param](folder)) as opened:
        lease = opened.create(RUN, "process 1 on another machine", 0.0, 5.0)
        for record in [
            Record(seq, seq / 4, attempt_succeeded("ä" * 7 * seq)) for seq in range(1, 41)
        ]:
            opened.append(lease, record)
        told = list(opened.read(RUN))
    files = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")}
    return lambda: (request.param, files, told)


@given(
    which=st.integers(0, 9),
    where=st.integers(0, 10**6),
    length=st.integers(0, 5000) | st.none(),
    byte=st.sampled_from([b"\0", b"\xff", b"7", b"\n"]),
)
def test_random_damage(closed, which, where, length, byte):
    """Bytes that are changed, overwritten or cut off never change a record: the first records are read, or none with an error."""
    kind, files, told = closed()
    names = sorted(name for name, content in files.items() if content)
    name = names[which % len(names)]
    damaged = bytearray(files[name])
    start = 1 + where % (len(damaged) - 1)
    if length is None:
        del damaged[start:]
    elif length:
        damaged[start : start + length] = byte * len(damaged[start : start + length])
    else:
        damaged[start] ^= 1 + where % 255
    with TemporaryDirectory() as folder:
        for path, content in {**files, name: damaged}.items():
            (Path(folder) / path).parent.mkdir(exist_ok=True, parents=True)
            (Path(folder) / path).write_bytes(content)
        with (
            suppress(StoreError, UnknownRun),
            closing(STORES[kind](Path(folder))) as opened,
        ):
            for record, whole in zip(opened.read(RUN), told, strict=False):
                assert record == whole


@pytest.mark.parametrize("name", DURABLE)
def test_private(name, tmp_path, monkeypatch):
    """Files and folders of a store belong to their user alone; those of an earlier version become private."""
    for _ in range(2):
        with closing(STORES[name](tmp_path)) as store:
            left = [info.records for info in store.runs()]
            lease = (
                store.acquire(RUN, "me", 6.0, 5.0) if left else store.create(RUN, "me", 0.0, 5.0)
            )
            store.append(lease, Record(sum(left) + 1, 0.0, attempt_succeeded()))
            store.post(RUN, sample_message("a"))
            store.discard(lease, [1])
            store.add_outcomes([journal.ToolOutcome("pip", None, True, 0.0)])
            paths = [path for path in tmp_path.rglob("*") if path != tmp_path / "deep"]
            assert {path.name: path.stat().st_mode & 0o077 for path in paths} == dict.fromkeys(
                (path.name for path in paths), 0
            )
        for path in paths:
            if path.is_file():
                path.chmod(0o666)

    def refuse(*_):
        raise PermissionError("not yours")

    monkeypatch.setattr(os, "fchmod", refuse)
    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(StoreError, match="belongs to another user, who could change it"):
        STORES[name](tmp_path).acquire(RUN, "me", 12.0, 5.0)


@pytest.mark.parametrize("store", DURABLE, indirect=True)
def test_locked(store, tmp_path):
    """Somebody who holds a lock of a store keeps the owner of a run waiting for a moment only, and gets an error."""
    lease = store.create(RUN, "me", 0.0, 5.0)
    record = Record(1, 0.0, attempt_succeeded())
    with ExitStack() as held:
        for path in tmp_path.rglob("history.db"):
            held.enter_context(closing(sqlite3.connect(path))).execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match=r"another process kept the file locked.*; try again"):
            store.append(lease, record)
    store.append(lease, record)
    assert list(store.read(RUN)) == [record]


@pytest.mark.parametrize("store", DURABLE, indirect=True)
async def test_finished_work_is_not_done_again(store, tmp_path):
    """A run whose journal has a damaged letter in a result is refused with the place, and none of its work is repeated."""
    engine, done = ReplanningEngine([], store=store), []

    async def work(task, context):
        done.append(task.id)
        return "precious"

    async with engine.open(sample_plan(), run_id=RUN) as run:
        await perform(run, work)
    store.close()
    for path in tmp_path.rglob("*.*"):
        if path.is_file():
            path.write_bytes(
                path.read_bytes().replace(b'"output":"precious"', b'"outpux":"precious"')
            )
    with pytest.raises(JournalCorrupt, match=r"record \d+.*its checksum is wrong"):
        async with ReplanningEngine([], store=reopened(store)).run_or_resume(
            sample_plan(), run_id=RUN
        ):
            pass
    assert done == ["build", "smoke"]


def reopened(store):
    """The store in the same place, which was closed."""
    return type(store)(repr(store).split("'")[1])


@pytest.mark.parametrize(
    "run", ["", ".", "..", ".hidden", "a/b", "../a", "a\\b", "a\0b", "a\nb", "x" * 201, "\ud800"]
)
def test_bad_id(store, tmp_path, run):
    """An id that cannot be a file name everywhere is refused, with what is wrong, and nothing is made."""
    with pytest.raises(StoreError, match="cannot be the id of a run: it "):
        store.create(run, "me", 0.0, 5.0)
    assert store.runs() == []


@pytest.mark.parametrize(
    "run", ["a", "2024-05-06T07:08", "größe", "a b", "x" * 200, "a.jsonl", "a.lease", "-"]
)
def test_good_id(store, run):
    """Any other id is taken, also one that looks like a file of the store."""
    lease = store.create(run, "me", 0.0, 5.0)
    store.append(lease, Record(1, 0.0, attempt_succeeded()))
    assert [info.run for info in store.runs()] == [run]
    assert len(list(store.read(run))) == 1


def test_home(tmp_path, monkeypatch):
    """A leading `~` that no shell has replaced names the home folder; the home of nobody is refused."""
    monkeypatch.setenv("HOME", str(tmp_path))
    stores = [journal.open_store(f"{place}") for place in ("~/runs.db", "sqlite:~/more.db")]
    assert [repr(store) for store in stores] == [
        f"<SqliteStore {str(tmp_path / name)!r}>" for name in ("runs.db", "more.db")
    ]
    with pytest.raises(
        StoreError, match=r"'~nobody-here/runs\.db' cannot be a store: Could not determine home"
    ):
        journal.open_store("~nobody-here/runs.db")


@pytest.mark.parametrize("place", ["/", ".", "./", "~", "new/", "sqlite:."])
def test_folders(place, tmp_path, monkeypatch):
    """A folder is refused as a store, with the name of a file to use instead."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StoreError, match=rf"'{place}' cannot be a store: it is a folder; name a"):
        ReplanningEngine(store=place)
    assert not list(tmp_path.iterdir())


def test_near_id(store):
    """Who mistypes an id is told the nearest one."""
    store.create("build-2024", "me", 0.0, 5.0)
    with pytest.raises(
        LookupError, match=r"there is no run 'build-2042'; did you mean 'build-2024'\?"
    ):
        store.read("build-2042")


def test_repr(tmp_path):
    """A store says in one line what it is and where it keeps things."""
    memory = MemoryStore()
    memory.create(RUN, "me", 0.0, 5.0)
    with closing(SqliteStore(tmp_path / "h.db")) as sqlite:
        shown = [repr(store) for store in (memory, sqlite)]
    assert shown == [
        "<MemoryStore runs=1>",
        f"<SqliteStore '{tmp_path}/h.db'>",
    ]


def test_process_that_runs_for_months():
    """The store in memory forgets the oldest runs that have ended, but none that is open or can be resumed."""
    store = MemoryStore()
    for run, status in {"paused": "paused", "open": "failed", "ended": "succeeded"}.items():
        lease = store.create(run, "me", 0.0, 5.0)
        store.append(lease, Record(1, 0.0, journal.RunOpened(run, sample_plan())))
        store.append(lease, Record(2, 0.0, journal.RunEnded(status, "")))
        store.release(lease)
    store.acquire("open", "me", 0.0, 5.0)
    for number in range(2):
        lease = store.create(f"large-{number}", "me", 0.0, 5.0)
        for seq in range(1, 50_001):
            store.append(lease, Record(seq, 0.0, journal.RunEnded("succeeded", "")))
        store.release(lease)
    assert {info.run for info in store.runs()} == {"open", "paused", "large-0", "large-1"}
    with pytest.raises(LookupError, match="there is no run 'ended'"):
        store.read("ended")
    store.release(store.create("last", "me", 0.0, 5.0))
    assert {info.run for info in store.runs()} == {"open", "paused", "large-0", "large-1"}
    store.acquire("large-0", "me", 0.0, 5.0)
    lease = store.acquire("large-1", "me", 0.0, 5.0)
    for seq in range(50_001, 150_001):
        store.append(lease, Record(seq, 0.0, journal.RunEnded("succeeded", "")))
    store.release(lease)
    assert {info.run for info in store.runs()} == {"open", "paused", "large-0", "large-1"}


def test_session_that_is_open_for_months():
    """The store in memory packs the earlier records of a session; all are read as they were, from any of them on."""
    store = MemoryStore()
    lease = store.create(RUN, "me", 0.0, 5.0)
    written = [Record(1, 0.0, journal.RunOpened(RUN, sample_plan(), open_ended=True))]
    written += [
        Record(seq, seq / 4, attempt_succeeded({"number": seq})) for seq in range(2, 22_001)
    ]
    for record in written:
        store.append(lease, record)
    for after in (0, 1, 499, 500, 501, 1_999, 2_000, 2_001, 21_999, 22_000, 22_001):
        assert list(store.read(RUN, after)) == written[after:]
    (info,) = store.runs()
    assert (info.records, info.status, info.objective) == (
        22_000,
        "running",
        sample_plan().goal.objective,
    )


@pytest.mark.parametrize(
    "body",
    [
        attempt_succeeded({"loss": [float("nan")]}),
        attempt_succeeded("\ud800"),
        attempt_succeeded(10**5000),
        attempt_succeeded(object()),
        failed("no file 'caf\udce9'"),
        journal.ContextUpdated({"x": float("inf")}),
    ],
    ids=["nan", "surrogate", "digits", "object", "error", "infinity"],
)
def test_unstorable(filled, body):
    """What JSON cannot express is refused as such, with the number of the record, before anything is written."""
    store, lease = filled
    seq = store.runs()[0].records + 1
    message = rf"record {seq} \({body.kind}\) cannot be kept as JSON: .*nothing was written"
    with pytest.raises(RecordNotSerializable, match=message):
        store.append(lease, Record(seq, 0.0, body))
    with pytest.raises(RecordNotSerializable, match="its time is nan"):
        store.append(lease, Record(seq, float("nan"), attempt_succeeded()))
    assert store.runs()[0].records == seq - 1


def test_unstorable_message(filled):
    """A message that JSON cannot express is refused, and the inbox stays as it was."""
    store, _ = filled
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    for text in (float("nan"), nested):
        with pytest.raises(RecordNotSerializable, match="nothing was written"):
            store.post(RUN, sample_message(text))
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
    for body in (attempt_succeeded(output), failed(message)):
        before = store.runs()[0].records
        record = Record(before + 1, at, body)
        try:
            store.append(lease, record)
        except RecordNotSerializable:
            assert store.runs()[0].records == before
        else:
            assert [repr(read) for read in store.read(RUN, after=before)] == [repr(record)]


def test_owner():
    """An owner's name has number, host and birth; it owns while it lives, and of other machines nothing is assumed."""
    me = owner_id()
    assert me == owner_id()
    assert me.startswith(f"process {os.getpid()} on {socket.gethostname()} (")
    born = me.rpartition("(")[2].partition(".")[0]
    gone = me.replace("process ", "process 99999")
    owners = (
        None,
        me,
        me.replace(f"({born}.", "(1."),
        gone,
        gone.replace(" on ", " on x"),
        "process 99999 on its own",
    )
    assert [is_lease_free(owner, until=10.0, at=0.0) for owner in owners] == [
        True,
        False,
        True,
        True,
        False,
        False,
    ]
    assert [is_lease_free(me, until=10.0, at=at) for at in (10.0, 10.1)] == [False, True]
