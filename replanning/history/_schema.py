"""The SQLite file: how it is opened, its schema and version, and what its errors mean in words."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from replanning._errors import JournalCorrupt, StoreError

Synchronous = Literal["normal", "full", "off"]

_APPLICATION_ID: Final = 0x5265506C  # "RePl": marks a file as ours
_BUSY_TIMEOUT: Final = 5.0
_MAX_WAL_ATTEMPTS: Final = 100
_CHECKPOINT_PAGES: Final = 250
"""Pages in the log before they are written back: at the usual thousand, an event loop may be held for over 10 ms."""

_MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
    (  # 0 to 1
        """CREATE TABLE runs (
            number INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            name TEXT NOT NULL DEFAULT '',
            objective TEXT NOT NULL DEFAULT '',
            status TEXT NOT NULL DEFAULT 'running',
            created REAL NOT NULL,
            owner TEXT,
            epoch INTEGER NOT NULL DEFAULT 1,
            until REAL NOT NULL
        )""",
        # Clustered by run and number: one tree to write to, and a run is read from front to back.
        """CREATE TABLE records (
            run INTEGER NOT NULL REFERENCES runs (number),
            seq INTEGER NOT NULL,
            at REAL NOT NULL,
            kind TEXT NOT NULL,
            data TEXT NOT NULL,
            PRIMARY KEY (run, seq)
        ) WITHOUT ROWID""",
        # AUTOINCREMENT: the id of a message that was dealt with must not come again.
        """CREATE TABLE inbox (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            run INTEGER NOT NULL REFERENCES runs (number),
            kind TEXT NOT NULL,
            at REAL NOT NULL,
            sender TEXT NOT NULL,
            payload TEXT NOT NULL
        )""",
        "CREATE INDEX inbox_of_run ON inbox (run)",
        """CREATE TABLE outcomes (
            number INTEGER PRIMARY KEY,
            tool TEXT NOT NULL,
            capability TEXT,
            succeeded INTEGER NOT NULL,
            at REAL NOT NULL
        )""",
        "CREATE INDEX outcomes_of_tool ON outcomes (tool)",
        "CREATE INDEX outcomes_of_capability ON outcomes (capability)",
    ),
)
"""The statements that lead from each version of the schema to the next. Only ever add to them."""

SCHEMA_VERSION: Final = len(_MIGRATIONS)
"""The version of the schema that this library writes, kept in `PRAGMA user_version`."""

_SQLITE_ADVICE: Final = {
    "SQLITE_FULL": "make room on the disk and resume the run",
    "SQLITE_READONLY": "the file may not be written; check the permissions of the file and of its folder",
    "SQLITE_PERM": "the file may not be opened; check its permissions",
    "SQLITE_CANTOPEN": "check that the path names a file, not a folder, and that it may be opened",
    "SQLITE_BUSY": f"another process kept the file locked for {_BUSY_TIMEOUT:g} seconds; try again",
    "SQLITE_NOTADB": "the file is something else than a SQLite database; name another file, or move this one away",
    "SQLITE_CORRUPT": "the file is damaged; restore it from a copy, or move it away and begin a new history",
    "SQLITE_IOERR": "the disk failed, or the file may not grow; check space, quotas and limits on the size of files",
}
_CORRUPT_FILE_CODES: Final = ("SQLITE_CORRUPT", "SQLITE_NOTADB")


def connect(path: Path, synchronous: Synchronous) -> sqlite3.Connection:
    """Open the file, made with its folder when it is missing, and bring its schema up to date.

    Raises:
        StoreError: it cannot be opened, is something else, or was written by a newer version of the library.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Every statement is its own transaction unless one is begun; calls are serialised by the store.
        connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT, isolation_level=None, check_same_thread=False)
    except OSError as error:
        raise StoreError(f"the folder of {path} cannot be made: {error.strerror}; name another path") from error
    except sqlite3.Error as error:
        raise store_error(error, path, "be opened") from error
    try:
        _migrate(connection, path)
        _enable_wal(connection)
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    except sqlite3.Error as error:
        connection.close()
        raise store_error(error, path, "be opened") from error
    except BaseException:
        connection.close()
        raise
    return connection


def store_error(error: Exception, path: Path, operation: str) -> StoreError:
    """What an error of SQLite means: `{path} cannot {doing}: ...`, and what to do next."""
    name = getattr(error, "sqlite_errorname", "")
    advice = next((advice for code, advice in _SQLITE_ADVICE.items() if name.startswith(code)), "")
    kind = JournalCorrupt if name.startswith(_CORRUPT_FILE_CODES) else StoreError
    return kind(f"{path} cannot {operation}: {error}" + (f"; {advice}" if advice else ""))


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Make several statements one step; nothing of it stays when it is left by an error."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring the schema up to date, step by step and all or nothing."""
    if _read_file_ids(connection) == (_APPLICATION_ID, SCHEMA_VERSION):
        return
    with transaction(connection):
        # Only now nobody else is at it: what was read before may have been half of another process's work.
        for statements in _MIGRATIONS[_schema_version(connection, path) :]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _schema_version(connection: sqlite3.Connection, path: Path) -> int:
    """The version of the schema in the file, 0 where the file is new.

    Raises:
        StoreError: it is newer than this library, or the file belongs to another program.
    """
    application, version = _read_file_ids(connection)
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application != _APPLICATION_ID and (application or version or tables):
        raise StoreError(f"{path} is a database of another program; name another file for the history")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} has version {version} of the schema, and this library knows versions up to {SCHEMA_VERSION}: "
            "it was written by a newer version of replanning; upgrade the library, or name another file"
        )
    return version


def _read_file_ids(connection: sqlite3.Connection) -> tuple[int, int]:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return application, version


def _enable_wal(connection: sqlite3.Connection) -> None:
    """Switch to a write-ahead log, with which reading and writing do not wait for each other."""
    for _ in range(_MAX_WAL_ATTEMPTS):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorname != "SQLITE_BUSY":
                raise
            # Alone among statements, this one does not wait while others open the same new file: wait like this.
            with transaction(connection):
                pass
        else:
            return
