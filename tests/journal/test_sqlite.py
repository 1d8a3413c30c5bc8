"""The SQLite store: its file, its schema, and what can be wrong with them."""

import os
import resource
import shutil
import sqlite3
import threading
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from replanning.errors import JournalCorrupt, LeaseLost, StoreError
from replanning.journal import Record, RunEnded, SqliteStore
from replanning.journal.store import Lease, checksum
from replanning.plan.types import RunId
from replanning.testing.stores import RUN, sample_message, sample_record


@pytest.fixture
def path(tmp_path):
    """The path of a history that is not there yet."""
    return tmp_path / "history.db"


@pytest.fixture
def filled(path):
    """The path of a history with three records."""
    with closing(SqliteStore(path)) as store:
        lease = store.create(RUN, "me", 0.0, 5.0)
        for seq in (1, 2, 3):
            store.append(lease, sample_record(seq))
    return path


def execute(path, *statements):
    """Change a file behind the store's back."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def asked(path, statement):
    """What a file says when somebody else asks."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(statement).fetchall()


@pytest.mark.parametrize("older", [False, True], ids=["current", "older"])
def test_version(filled, older):
    """A file names its version of the schema and keeps a write-ahead log; opening it migrates it if it is older."""
    before = asked(filled, "SELECT name, sql FROM sqlite_master ORDER BY name")
    if older:
        tables = ("records", "inbox", "outcomes", "runs")
        execute(filled, *(f"DROP TABLE {name}" for name in tables), "PRAGMA user_version = 0")
    SqliteStore(filled).close()
    assert asked(filled, "SELECT name, sql FROM sqlite_master ORDER BY name") == before
    assert asked(filled, "PRAGMA user_version") == [(4,)]
    assert asked(filled, "PRAGMA journal_mode") == [("wal",)]


VERSION_3 = (
    "ALTER TABLE runs ADD COLUMN records INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE runs ADD COLUMN crc INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE inbox ADD COLUMN crc INTEGER NOT NULL DEFAULT 0",
    "UPDATE runs SET records = 3, crc = 123",
    "UPDATE inbox SET crc = 456",
    "PRAGMA user_version = 3",
)

VERSION_2 = ("ALTER TABLE records DROP COLUMN crc", "PRAGMA user_version = 2")


@pytest.mark.parametrize("statements", [VERSION_3, VERSION_2], ids=["3", "2"])
def test_older_history(filled, statements):
    """The records, runs and messages of a file of an earlier version are kept, and its run goes on."""
    with closing(SqliteStore(filled)) as store:
        store.post(RUN, sample_message("a"))
        whole = list(store.read(RUN)), store.runs(), store.inbox(RUN)
    execute(filled, *statements)
    with closing(SqliteStore(filled)) as store:
        assert (list(store.read(RUN)), store.runs(), store.inbox(RUN)) == whole
        lease = store.acquire(RUN, "me", 6.0, 5.0)
        store.append(lease, sample_record(4))
        store.discard(lease, [message.id for message in store.inbox(RUN)])
        other = store.create(RunId("other"), "me", 0.0, 5.0)
        store.append(other, sample_record(1))
        store.post(other.run, sample_message("b"))
        assert [info.records for info in store.runs()] == [1, 4]
    assert asked(filled, "PRAGMA user_version") == [(4,)]


def test_failed_migration(filled):
    """A file that cannot be brought up to date is left as it was."""
    execute(filled, "PRAGMA user_version = 0", "DROP TABLE inbox")
    before = asked(filled, "SELECT name FROM sqlite_master")
    with pytest.raises(StoreError, match="cannot be opened: table runs already exists"):
        SqliteStore(filled)
    assert asked(filled, "SELECT name FROM sqlite_master") == before
    assert asked(filled, "PRAGMA user_version") == [(0,)]


OURS = f"PRAGMA application_id = {0x5265506C}"


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        (
            [OURS, "PRAGMA user_version = 99"],
            "has version 99 of the schema.* versions up to 4: .*; upgrade the library",
        ),
        (["CREATE TABLE notes (text)"], "is a database of another program; name another file"),
        (["PRAGMA user_version = 1"], "is a database of another program; name another file"),
        (["PRAGMA application_id = 7"], "is a database of another program; name another file"),
    ],
)
def test_newer_or_foreign(path, statements, message):
    """A file of a newer version or of another program is refused with what to do, and left as it was."""
    execute(path, *statements)
    path.chmod(0o644)
    before = path.read_bytes(), path.stat().st_mode
    with pytest.raises(StoreError, match=message):
        SqliteStore(path)
    assert (path.read_bytes(), path.stat().st_mode) == before


def test_unusable_paths(tmp_path, path):
    """A path that cannot be a history is refused with its name and what to check, and a file there is left as it was."""
    path.write_text("dear diary\n" * 1000)
    for refused, message in (
        (path, r"history\.db cannot be opened: file is not a database; it is not a SQLite"),
        (path / "deep.db", r"the folder of .*deep\.db cannot be created: .*; name another path"),
        (tmp_path, "cannot be opened: unable to open database file; check that the path names"),
        (
            "/dev/full",
            "/dev/full cannot be opened: database or disk is full; make room on the disk",
        ),
    ):
        with pytest.raises(StoreError, match=message):
            SqliteStore(refused)
    assert path.read_text() == "dear diary\n" * 1000


def test_closed(path):
    """A store that was closed says so, and may be closed twice."""
    store = SqliteStore(path)
    lease = store.create(RUN, "me", 0.0, 5.0)
    store.close()
    store.close()
    for call in (
        store.runs,
        lambda: store.append(lease, sample_record(1)),
        lambda: store.release(lease),
    ):
        with pytest.raises(StoreError, match="Cannot operate on a closed database"):
            call()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("DELETE FROM records WHERE seq = 2", "it is missing"),
        ("UPDATE records SET data = '{\"attempt\"' WHERE seq = 2", ".*its checksum is wrong"),
        ("UPDATE records SET data = CAST(x'ff' AS TEXT) WHERE seq = 2", ".*its checksum is wrong"),
        ("UPDATE records SET kind = 'attempt-failed' WHERE seq = 2", ".*its checksum is wrong"),
        (
            "UPDATE records SET kind = 'dream', crc = {dream} WHERE seq = 2",
            "unknown kind of record 'dream'",
        ),
    ],
)
def test_damaged_record(filled, damage, reason):
    """A record that is missing or cannot be read is named with its file and run, and those before it are read."""
    ((data,),) = asked(filled, "SELECT CAST(data AS BLOB) FROM records WHERE seq = 2")
    execute(filled, damage.replace("{dream}", str(checksum(data, 2, sample_record(2).at, "dream"))))
    with closing(SqliteStore(filled)) as store:
        reading = store.read(RUN)
        assert next(reading) == sample_record(1)
        with pytest.raises(
            JournalCorrupt, match=rf"history\.db: record 2 of run 'run-1' cannot be read: {reason}"
        ):
            next(reading)
        assert list(store.read(RUN, after=2)) == [sample_record(3)]


def test_damaged_message(filled):
    """A message that cannot be read is refused with its run."""
    with closing(SqliteStore(filled)) as store:
        store.post(RUN, sample_message("yes"))
    execute(filled, "UPDATE inbox SET payload = 'half a mess'")
    with (
        closing(SqliteStore(filled)) as store,
        pytest.raises(JournalCorrupt, match="a message for run 'run-1' cannot be read"),
    ):
        store.inbox(RUN)


def test_damaged_file(filled):
    """A damaged file is reported as damaged, with its name."""
    pages = bytearray(filled.read_bytes())
    pages[4096:] = b"\xa5" * (len(pages) - 4096)
    filled.write_bytes(pages)
    message = r"history\.db cannot .*malformed.*; the file is damaged; restore it"
    with pytest.raises(JournalCorrupt, match=message), closing(SqliteStore(filled)) as store:
        store.runs()


def test_killed_while_it_was_made(path):
    """A history whose process was killed before it had made the tables is made by the next one."""
    path.touch()
    with closing(SqliteStore(path)) as store:
        assert store.runs() == []


def killed(path, folder):
    """Copies of the files of a history in use, as a killed process leaves them."""
    folder.mkdir()
    for file in path.parent.glob("history.db*"):
        shutil.copy(file, folder)
    return folder / "history.db"


@pytest.mark.parametrize("damage", ["missing", "cut off", "changed"])
def test_damaged_log(filled, tmp_path, damage):
    """Without the log of a killed process, or with a damaged one, the records before it are read, and the run goes on."""
    with closing(SqliteStore(filled)) as store:
        store.append(store.acquire(RUN, "me", 6.0, 5.0), sample_record(4))
        left = killed(filled, tmp_path / "left")
    log = left.with_name("history.db-wal")
    whole = log.read_bytes()
    if damage == "missing":
        log.unlink()
    elif damage == "cut off":
        log.write_bytes(whole[:1000])
    else:
        log.write_bytes(whole[:1000] + b"\xff" + whole[1001:])
    with closing(SqliteStore(left)) as store:
        assert [record.seq for record in store.read(RUN)] == [1, 2, 3]
        store.append(store.acquire(RUN, "me", 12.0, 5.0), sample_record(4))
        assert [record.seq for record in store.read(RUN)] == [1, 2, 3, 4]


@contextmanager
def as_a_reader(path):
    """The files of a history in a folder where the body may read them and write nothing, also if the tests are root."""
    user = os.geteuid()
    with TemporaryDirectory(dir="/tmp") as folder:
        for file in path.parent.glob("history.db*"):
            shutil.copy(file, folder)
            Path(folder, file.name).chmod(0o444)
        Path(folder).chmod(0o555)
        os.seteuid(user or 65534)
        try:
            yield Path(folder, path.name)
        finally:
            os.seteuid(user)
            Path(folder).chmod(0o755)


@pytest.mark.parametrize("statements", [(), VERSION_3], ids=["4", "3"])
def test_read_only(filled, statements):
    """A history that may not be written can be read, and stays as it is; what would be written is refused in words."""
    execute(filled, *statements)
    with as_a_reader(filled) as path:
        with closing(SqliteStore(path)) as store:
            assert [info.records for info in store.runs()] == [3]
            assert [record.seq for record in store.read(RUN)] == [1, 2, 3]
            assert not store.inbox(RUN)
            assert not store.outcomes()
            for write in (
                lambda: store.post(RUN, sample_message("x")),
                lambda: store.acquire(RUN, "you", 10.0, 5.0),
                lambda: store.append(Lease(RUN, 1, "me"), sample_record(4)),
                lambda: store.create(RunId("other"), "me", 0.0, 5.0),
            ):
                with pytest.raises(
                    StoreError,
                    match="readonly database; the file may not be written; check the perm",
                ):
                    write()
        assert [(each.name, each.stat().st_mode & 0o777) for each in path.parent.iterdir()] == [
            (path.name, 0o444)
        ]


def test_read_only_with_a_log(filled):
    """Records in the log of a history that may not be written are read by its index."""
    with closing(SqliteStore(filled)) as store:
        store.append(store.acquire(RUN, "me", 6.0, 5.0), sample_record(4))
        with as_a_reader(filled) as path, closing(SqliteStore(path)) as copied:
            assert [record.seq for record in copied.read(RUN)] == [1, 2, 3, 4]


def test_waiting_thread(path, monkeypatch):
    """A thread that waits for the lock of another process leaves the store to other threads between its tries."""

    class Pause:
        def wait(self, seconds):
            elsewhere = threading.Thread(target=lambda: seen.append(store.runs()))
            elsewhere.start()
            elsewhere.join(10)
            other.execute("ROLLBACK")

    seen: list[object] = []
    monkeypatch.setattr("replanning.journal.sqlite.Event", Pause)
    with closing(SqliteStore(path)) as store, closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        lease = store.create(RUN, "me", 0.0, 5.0)
        assert seen == [[]]
        store.append(lease, sample_record(1))
        assert [info.run for info in store.runs()] == [RUN]


# A file that vanishes


@pytest.mark.parametrize(
    "ask",
    [
        lambda store, lease: store.renew(lease, 1.0, 5.0),
        lambda store, lease: store.inbox(RUN),
        lambda store, lease: store.append(lease, Record(2, 0.0, RunEnded("succeeded", "done"))),
    ],
    ids=["renew", "inbox", "end"],
)
def test_vanished(path, ask):
    """Whoever renews a lease, reads the inbox or ends a run learns that the file is gone, and that nobody has the run."""
    with closing(SqliteStore(path)) as store:
        lease = store.create(RUN, "me", 0.0, 5.0)
        store.append(lease, sample_record(1))
        path.unlink()
        with pytest.raises(
            LeaseLost, match=rf"{path} was deleted, so no further record of"
        ) as raised:
            ask(store, lease)
        assert raised.value.run_is_gone


def test_deleted_row(path):
    """A run that somebody deleted from the table is gone, which is not said to be another process's doing."""
    with closing(SqliteStore(path)) as store:
        lease = store.create(RUN, "me", 0.0, 5.0)
        execute(path, "DELETE FROM runs")
        for action in (
            lambda: store.renew(lease, 1.0, 5.0),
            lambda: store.append(lease, sample_record(1)),
        ):
            with pytest.raises(LeaseLost, match="no longer has this run") as raised:
                action()
            assert raised.value.run_is_gone


def test_older_copy(path):
    """A copy that lacks the last records, put into the file while it is open, is noticed."""
    with closing(SqliteStore(path)) as store:
        lease = store.create(RUN, "me", 0.0, 5.0)
        execute(path, "PRAGMA wal_checkpoint(TRUNCATE)")
        copy = path.read_bytes()
        store.append(lease, sample_record(1))
        execute(path, "PRAGMA wal_checkpoint(TRUNCATE)")
        store.renew(lease, 1.0, 5.0)
        path.write_bytes(copy)
        with pytest.raises(LeaseLost, match="overwritten"):
            store.renew(lease, 1.0, 5.0)


def test_maintenance(path):
    """Checkpoints, VACUUM and other programs' records are no reason to think that the file is another."""
    with closing(SqliteStore(path)) as store:
        lease = store.create(RUN, "me", 0.0, 5.0)
        for seq in range(1, 200):
            store.append(lease, sample_record(seq))
        for statement in ("PRAGMA wal_checkpoint(TRUNCATE)", "DELETE FROM outcomes", "VACUUM"):
            execute(path, statement)
            execute(path, "PRAGMA wal_checkpoint(TRUNCATE)")
            store.renew(lease, 1.0, 5.0)
        store.append(lease, Record(200, 0.0, RunEnded("succeeded", "done")))


def test_unknown_whether_vanished(path):
    """A file that cannot be looked at for the moment is not one that has vanished."""
    away = path.parent.with_name("away")
    folder = path.parent / "folder"
    folder.mkdir()
    place = folder / "history.db"
    with closing(SqliteStore(place)) as store:
        lease = store.create(RUN, "me", 0.0, 5.0)
        folder.rename(away)
        folder.symlink_to(folder)  # a loop
        store.renew(lease, 1.0, 5.0)
        folder.unlink()
        away.rename(folder)
        execute(place, "PRAGMA wal_checkpoint(TRUNCATE)")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            store.renew(lease, 2.0, 5.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        store.renew(lease, 3.0, 5.0)
