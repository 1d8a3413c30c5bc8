"""The SQLite store: its file, its schema, and what can be wrong with them."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from replanning.errors import JournalCorrupt, StoreError
from replanning.journal import AttemptSucceeded, Record, SqliteStore
from replanning.plan import AttemptId, RunId, TaskId

RUN = RunId("r")


def done(output=None):
    """A body for a record."""
    return AttemptSucceeded(AttemptId("a"), TaskId("t"), output)


@pytest.fixture
def path(tmp_path):
    """Where a history is to be."""
    return tmp_path / "history.db"


def filled(path):
    """Three records in a file that is closed again."""
    with closing(SqliteStore(path)) as store:
        lease = store.create(RUN, "me", 0.0, 5.0)
        for seq in (1, 2, 3):
            store.append(lease, Record(seq, 0.0, done(f"output {seq}")))
    return lease


def execute(path, *statements):
    """Change a file behind the store's back."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def asked(path, statement):
    """What a file says when somebody else asks."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(statement).fetchall()


def test_version_is_kept(path):
    """The file says which version of the schema it has, keeps a write-ahead log, and is opened again as it is."""
    filled(path)
    assert asked(path, "PRAGMA user_version") == [(1,)]
    assert asked(path, "PRAGMA journal_mode") == [("wal",)]
    before = asked(path, "SELECT * FROM sqlite_master")
    SqliteStore(path).close()
    assert asked(path, "SELECT * FROM sqlite_master") == before


def test_newer_version(path):
    """A file of a newer version is refused with what to do, and is left as it was."""
    filled(path)
    execute(path, "PRAGMA user_version = 99")
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"has version 99 of the schema.* versions up to 1: .*; upgrade the library"):
        SqliteStore(path)
    assert path.read_bytes() == before


def test_older_version(path):
    """A file of an older version is brought up to date when it is opened."""
    filled(path)
    tables = [name for (name,) in asked(path, "SELECT name FROM sqlite_master WHERE type = 'table'")]
    execute(path, *(f"DROP TABLE {name}" for name in tables if name != "sqlite_sequence"), "PRAGMA user_version = 0")
    filled(path)
    assert asked(path, "PRAGMA user_version") == [(1,)]
    assert asked(path, "SELECT count(*) FROM records") == [(3,)]


def test_failed_migration(path):
    """A file that cannot be brought up to date is left as it was."""
    filled(path)
    execute(path, "PRAGMA user_version = 0", "DROP TABLE inbox")
    before = asked(path, "SELECT name FROM sqlite_master")
    with pytest.raises(StoreError, match="cannot be opened: table runs already exists"):
        SqliteStore(path)
    assert asked(path, "SELECT name FROM sqlite_master") == before
    assert asked(path, "PRAGMA user_version") == [(0,)]


@pytest.mark.parametrize(
    "statement", ["CREATE TABLE notes (text)", "PRAGMA user_version = 1", "PRAGMA application_id = 7"]
)
def test_other_program(path, statement):
    """The database of another program is refused and left as it was."""
    execute(path, statement)
    before = path.read_bytes()
    with pytest.raises(StoreError, match="is a database of another program; name another file"):
        SqliteStore(path)
    assert path.read_bytes() == before


def test_no_database(path):
    """A file that is no database is refused with its name, and left as it was."""
    path.write_text("dear diary\n" * 1000)
    with pytest.raises(StoreError, match=r"history\.db cannot be opened: file is not a database; it is not a SQLite"):
        SqliteStore(path)
    assert path.read_text() == "dear diary\n" * 1000


def test_folder_in_the_way(tmp_path):
    """A path that is a folder is refused with what to check."""
    with pytest.raises(StoreError, match="cannot be opened: unable to open database file; check that the path names"):
        SqliteStore(tmp_path)


def test_file_in_the_way(path):
    """A folder that cannot be made, because a file has its name, is refused."""
    path.write_text("")
    with pytest.raises(StoreError, match=r"the folder of .*deep\.db cannot be made: .*; name another path"):
        SqliteStore(path / "deep.db")


def test_full_disk_at_once():
    """A disk without any room is reported as such."""
    with pytest.raises(StoreError, match="/dev/full cannot be opened: database or disk is full; make room on the disk"):
        SqliteStore("/dev/full")


def test_closed(path):
    """A store that was closed says so, and may be closed twice."""
    store = SqliteStore(path)
    lease = store.create(RUN, "me", 0.0, 5.0)
    store.close()
    store.close()
    for call in (
        store.runs,
        lambda: store.append(lease, Record(1, 0.0, done())),
        lambda: store.release(lease),
    ):
        with pytest.raises(StoreError, match="Cannot operate on a closed database"):
            call()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("DELETE FROM records WHERE seq = 2", "it is missing"),
        ("UPDATE records SET data = '{\"attempt\"' WHERE seq = 2", "not a valid attempt-succeeded: Invalid JSON"),
        ('UPDATE records SET data = \'{"attempt":"a"}\' WHERE seq = 2', "not a valid attempt-succeeded: task: "),
        ("UPDATE records SET kind = 'dream' WHERE seq = 2", "unknown kind of record 'dream'"),
    ],
)
def test_damaged_record(path, damage, reason):
    """A record that is missing or cannot be read is named with its file and run, and those before it are read."""
    filled(path)
    execute(path, damage)
    with closing(SqliteStore(path)) as store:
        reading = store.read(RUN)
        assert next(reading).seq == 1
        with pytest.raises(JournalCorrupt, match=rf"history\.db: record 2 of run 'r' cannot be read: {reason}"):
            next(reading)
        assert [record.seq for record in store.read(RUN, after=2)] == [3]


def test_damaged_file(path):
    """A damaged file is reported as damaged, with its name."""
    filled(path)
    pages = bytearray(path.read_bytes())
    pages[4096:] = b"\xa5" * (len(pages) - 4096)
    path.write_bytes(pages)
    message = r"history\.db cannot .*malformed.*; the file is damaged; restore it"
    with pytest.raises(JournalCorrupt, match=message), closing(SqliteStore(path)) as store:
        store.runs()


def test_half_a_character(path):
    """Text with half a surrogate pair is refused as an error of the store."""
    with closing(SqliteStore(path)) as store:
        with pytest.raises(StoreError, match=r"cannot take a new run: .*surrogates not allowed"):
            store.create(RUN, "\ud800", 0.0, 5.0)
        assert store.runs() == []


def test_unfinished_reading_is_harmless(path):
    """A loop over records that was left does not keep the log from being written back."""
    with closing(SqliteStore(path)) as store:
        lease = store.create(RUN, "me", 0.0, 5.0)
        for seq in range(1, 301):
            store.append(lease, Record(seq, 0.0, done()))
        reading = store.read(RUN)
        assert next(reading).seq == 1
        assert asked(path, "PRAGMA wal_checkpoint(TRUNCATE)") == [(0, 0, 0)]
        assert len(list(reading)) == 299
