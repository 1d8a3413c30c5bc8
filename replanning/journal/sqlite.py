"""Store in one SQLite file: many processes read while one writes; a killed one loses nothing."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import cached_property
from os import PathLike
from pathlib import Path
from threading import Event, RLock
from typing import ClassVar, Final, Literal

from replanning.errors import JournalCorrupt, StoreError
from replanning.journal.records import Record, RunOpened
from replanning.journal.sql import ResultT, SqlStore
from replanning.journal.store import (
    LOCK_TIMEOUT,
    LOCK_TRY,
    LOOP_LOCK_TIMEOUT,
    STATUS_RECORDS,
    InboxMessage,
    Lease,
    checksum,
    encode_body,
    is_locked,
    lock_timeout,
    run_is_gone,
    run_title,
    status_after,
    to_json_line,
)
from replanning.plan.types import RunId

Synchronous = Literal["normal", "full", "off"]

_APPLICATION_ID: Final = 0x5265506C  # "RePl": marks a file as ours

_LOG_SUFFIXES: Final = ("-wal", "-shm")
"""Suffixes of the files beside the database: the log and its index."""

_MAX_WAL_ATTEMPTS: Final = 100

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
        # AUTOINCREMENT: ids of discarded messages must not be used again.
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
    ("ALTER TABLE outcomes ADD COLUMN seconds REAL",),
    (  # 2 to 3
        "ALTER TABLE records ADD COLUMN crc INTEGER NOT NULL DEFAULT 0",
        "UPDATE records SET crc = checksum(CAST(data AS BLOB), seq, at, kind)",
    ),
    # 3 to 4: the columns `records` and `crc` of runs and `crc` of messages are no longer updated.
    # Existing ones stay, but a program that checks them must not open the file.
    (),
)
"""Statements that migrate each version of the schema to the next; only add to them."""

SCHEMA_VERSION: Final = len(_MIGRATIONS)
"""Version of the schema that this library writes, kept in `PRAGMA user_version`."""

_OLDEST_READABLE_VERSION: Final = 3
"""First version whose files can be read without migration, where they cannot be written."""

_SQLITE_ADVICE: Final = {
    "SQLITE_FULL": "make room on the disk and resume the run",
    "SQLITE_READONLY": (
        "the file may not be written; check the permissions of the file and of its folder"
    ),
    "SQLITE_PERM": "the file may not be opened; check its permissions",
    "SQLITE_CANTOPEN": "check that the path names a file, not a folder, and that it may be opened",
    "SQLITE_BUSY": "another process kept the file locked; try again",
    "SQLITE_NOTADB": "it is not a SQLite database; name another file, or move this one away",
    "SQLITE_CORRUPT": (
        "the file is damaged; restore it from a copy, or move it away and begin a new history"
    ),
    "SQLITE_IOERR": (
        "the disk failed, or the file may not grow; check space, quotas and limits on the size of "
        "files"
    ),
}

_DAMAGE: Final = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR", "SQLITE_IOERR_SHORT_READ")
"""Error codes of SQLite for truncated or overwritten files; other errors are transient."""

_VERSION_SQL: Final = "SELECT * FROM pragma_application_id, pragma_user_version"

# For a lease that is not current or a record out of order, the first value is NULL, which the NOT
# NULL constraint refuses.
_APPEND_SQL: Final = """
    INSERT INTO records (run, seq, at, kind, data, crc) VALUES (
        (SELECT number FROM runs WHERE id = ?1 AND epoch = ?2
            AND ?3 = 1 + coalesce((SELECT max(seq) FROM records WHERE run = number), 0)),
        ?3, ?4, ?5, ?6, ?7
    )
"""

_STATUS_SQL: Final = "UPDATE runs SET status = ? WHERE id = ?"

_TITLE_SQL: Final = "UPDATE runs SET name = ?, objective = ? WHERE id = ?"


def _error_name(error: sqlite3.Error) -> str:
    """Return the name of the error code; empty for an error of the Python module."""
    return getattr(error, "sqlite_errorname", "")


def store_error(error: Exception, path: Path, operation: str) -> StoreError:
    """Convert an error of SQLite to `{path} cannot {operation}: ...` with advice."""
    text = f"{path} cannot {operation}: {error}"
    name = getattr(error, "sqlite_errorname", "")
    for code, advice in _SQLITE_ADVICE.items():
        if name.startswith(code):
            text += f"; {advice}"
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return JournalCorrupt(text)
    return StoreError(text)


class SqliteStore(SqlStore):
    """Store in a SQLite file, created with its folder if it is missing, and private to its user.

    Any number of processes may use the file; each run is written by the process that owns it.
    Appended records outlive the process however it ends. Each record has a checksum, and a damaged
    one is refused when it is read.

    Args:
        path: the file.
        synchronous: `normal` survives every end of the process, even by SIGKILL; `full` waits for
            the disk at each record and also survives a power failure; `off` never waits, and a
            power failure may damage the file.

    Raises:
        StoreError: the file cannot be opened, is not a history, or was written by a newer version.
    """

    table_prefix: ClassVar = ""
    value_form: ClassVar = r":\1"
    row_lock: ClassVar = ""  # a transaction locks the file
    create_statement: ClassVar = """
        INSERT INTO {runs} (id, created, owner, until) VALUES (:run, :at, :owner, :until)
        ON CONFLICT (id) DO NOTHING
    """
    run_statement: ClassVar = """
        SELECT number, owner, epoch, until,
            (SELECT coalesce(max(seq), 0) FROM {records} WHERE run = number)
        FROM {runs} WHERE id = :run
    """
    runs_statement: ClassVar = """
        SELECT id, name, objective, status, created, last.at, last.seq, owner
        FROM {runs} JOIN {records} AS last ON last.run = number
            AND last.seq = (SELECT max(seq) FROM {records} WHERE run = number)
        ORDER BY created DESC, number DESC
    """
    # As bytes, because damaged text need not be UTF-8.
    records_statement: ClassVar = """
        SELECT seq, CAST(at AS REAL), CAST(coalesce(kind, '') AS BLOB),
            CAST(coalesce(data, '') AS BLOB), crc
        FROM {records} WHERE run = :number AND seq > :start AND seq <= :end
    """
    read_batch: ClassVar = 100

    def __init__(self, path: str | PathLike[str], *, synchronous: Synchronous = "normal") -> None:
        self._path = Path(path)
        self._synchronous = synchronous
        self._lock = RLock()  # of the connection, which several threads use
        self._files: dict[Path, os.stat_result] = {}  # the file and its log, as last seen
        try:
            self._connection  # noqa: B018 - opens the file
        except StoreError as error:
            # On an event loop the first use of the store tries again.
            if not is_locked(error) or lock_timeout() != LOCK_TRY:
                raise

    def __repr__(self) -> str:
        return f"<SqliteStore {str(self._path)!r}>"

    def __del__(self) -> None:
        # An engine that made its own store may never be closed; Python 3.13 warns about that.
        connection = self.__dict__.get("_connection")
        if connection is not None:
            connection.close()

    def append(self, lease: Lease, record: Record) -> None:
        """Insert the record by one statement, which fails if the lease is not current."""
        seq, at, body = record
        kind = body.kind
        data = encode_body(record)
        crc = checksum(data.encode(), seq, float(at), kind)
        values = (lease.run, lease.epoch, seq, at, kind, data, crc)
        status = None
        if isinstance(body, STATUS_RECORDS):
            status = status_after(body)
            # Not for every record: renewals and reads of the inbox check regularly.
            self._check_files(lease.run)

        def insert(database: sqlite3.Connection) -> None:
            database.execute(_APPEND_SQL, values)
            if status is not None:
                database.execute(_STATUS_SQL, (status, lease.run))
            if isinstance(body, RunOpened):
                database.execute(_TITLE_SQL, (*run_title(body), lease.run))

        try:
            # Most records have no status, and one statement is a transaction of its own.
            self._repeat(insert, LOOP_LOCK_TIMEOUT, transaction=status is not None)
        except sqlite3.IntegrityError:
            raise self._read(lambda database: self._refuse(database, lease, record)) from None
        except (sqlite3.Error, UnicodeError) as error:
            raise store_error(
                error, self._path, f"take record {seq} of run {lease.run!r}"
            ) from error

    def renew(self, lease: Lease, at: float, ttl: float) -> None:
        """Move the end of the lease, if the file is still there."""
        self._check_files(lease.run)
        super().renew(lease, at, ttl)

    def inbox(self, run: RunId) -> Sequence[InboxMessage]:
        """Return the waiting messages with their ids, if the file is still there."""
        self._check_files(run)
        return super().inbox(run)

    def close(self) -> None:
        """Close the file, after a checkpoint of its log."""
        with self._lock:
            try:
                self._connection.close()
            except sqlite3.Error as error:
                raise store_error(error, self._path, "be closed") from error

    @property
    def _place(self) -> str:
        return str(self._path)

    def _read(self, request: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        try:
            return self._repeat(request, LOOP_LOCK_TIMEOUT)
        except (sqlite3.Error, UnicodeError) as error:
            raise store_error(error, self._path, "be read") from error

    def _write(
        self,
        doing: str,
        request: Callable[[sqlite3.Connection], ResultT],
        *,
        retried: bool = False,
    ) -> ResultT:
        timeout = lock_timeout()
        if timeout < LOCK_TIMEOUT and not retried:
            timeout = LOOP_LOCK_TIMEOUT
        try:
            return self._repeat(request, timeout, transaction=True)
        except (sqlite3.Error, UnicodeError) as error:  # the latter for a lone surrogate
            raise store_error(error, self._path, doing) from error

    def _repeat(
        self,
        action: Callable[[sqlite3.Connection], ResultT],
        timeout: float,
        *,
        transaction: bool = False,
    ) -> ResultT:
        """Return the result of an action, repeated while another process holds the file's lock."""
        end: float | None = None
        while True:
            with self._lock:
                try:
                    if not transaction:
                        return action(self._connection)
                    with self._connection:
                        # IMMEDIATE, because others may write between a read and a write that waits.
                        self._connection.execute("BEGIN IMMEDIATE")
                        return action(self._connection)
                except sqlite3.OperationalError as error:
                    if not _error_name(error).startswith("SQLITE_BUSY"):
                        raise
                    now = time.monotonic()
                    if end is None:
                        end = now + (timeout - LOCK_TRY)  # SQLite has waited once
                    if now >= end:
                        raise
            # Without the lock of the connection, because the event loop of another run may wait for
            # it.
            Event().wait(0.001)

    def _check_files(self, run: RunId) -> None:
        """Check that the file and its log are still the opened ones, and contain the run.

        SQLite would not notice, and would write into a deleted file. Like SQLite's own
        checks, this compares inode numbers.

        Raises:
            LeaseLost: the run is gone.
        """
        is_changed = False
        files: dict[Path, os.stat_result] = {}
        for file, seen in self._files.items():
            try:
                files[file] = file.stat()
            except (FileNotFoundError, NotADirectoryError):
                raise run_is_gone(run, f"{file} was deleted") from None
            except OSError:
                return  # the next record will show whether the file can be used
            if not os.path.samestat(files[file], seen):
                raise run_is_gone(run, f"{file} was replaced by another file")
            is_changed |= files[file].st_size < seen.st_size
            if not file.name.endswith(_LOG_SUFFIXES):
                # Records are written to the log, and moved from there to the file now and then.
                is_changed |= files[file].st_mtime_ns != seen.st_mtime_ns
        if not is_changed or self._has_content(run, next(iter(files))):
            self._files = files

    def _has_content(self, run: RunId, place: Path) -> bool:
        """Return whether another process would find the run in the file; false if that is unknown.

        The open connection does not show this, because it caches parts of the file.

        Raises:
            LeaseLost: it would not, or not all of its records.
        """
        kept = self._read(lambda database: self._find_row(database, run, lock=False))
        try:
            with closing(sqlite3.connect(f"{place.as_uri()}?mode=ro", uri=True)) as database:
                found = self._find_row(database, run, lock=False)
        except sqlite3.Error as error:
            if not _error_name(error).startswith(_DAMAGE):
                return False
            raise run_is_gone(run, f"{place} was cut off or overwritten ({error})") from error
        if kept is None or found is None or found.last < kept.last:
            raise run_is_gone(run, f"{place} was overwritten")
        return True

    def _server_time(self, database: sqlite3.Connection, at: float) -> float:
        return float(at)

    def _insert_message(
        self, database: sqlite3.Connection, run: RunId, number: int, message: InboxMessage
    ) -> None:
        payload = to_json_line(message.payload)
        database.execute(
            "INSERT INTO inbox (run, kind, at, sender, payload) VALUES (?, ?, ?, ?, ?)",
            (number, message.kind, float(message.at), message.by, payload),
        )

    def _select_messages(self, database: sqlite3.Connection, number: int) -> Sequence[InboxMessage]:
        rows = database.execute(
            "SELECT kind, at, sender, payload, number FROM inbox WHERE run = ? ORDER BY number",
            (number,),
        )
        return [
            InboxMessage(kind, at, by, json.loads(payload), message)
            for kind, at, by, payload, message in rows
        ]

    @cached_property
    def _connection(self) -> sqlite3.Connection:
        # Created here, because it is private to its user; SQLite gives its log the same mode.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._path.parent.mkdir(0o700, parents=True, exist_ok=True)
            with suppress(OSError):  # SQLite reports problems with the file itself
                os.close(os.open(self._path, flags, 0o600))
        except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
            reason = getattr(error, "strerror", error)
            raise StoreError(
                f"the folder of {self._path} cannot be created: {reason}; name another path"
            ) from error
        options = _read_only_options(self._path)
        try:
            # Every statement is its own transaction unless one is begun; calls are serialised by
            # the lock.
            connection = sqlite3.connect(
                f"{self._path.absolute().as_uri()}?{options}",
                timeout=lock_timeout(),
                isolation_level=None,
                check_same_thread=False,
                uri=True,
            )
        except sqlite3.Error as error:
            raise store_error(error, self._path, "be opened") from error
        try:
            connection.create_function("checksum", -1, checksum, deterministic=True)
            _migrate(connection, self._path, read_only=bool(options))
            if not options:
                _make_private(self._path)  # not before: the file of another program stays as it is
                _use_log(connection)
                connection.execute(_VERSION_SQL).fetchone()  # the log is made by the first use
                self._files = _file_status(self._path.absolute())
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
            connection.execute(f"PRAGMA busy_timeout = {LOCK_TRY * 1000:.0f}")
        except BaseException as error:
            connection.close()
            if isinstance(error, sqlite3.Error | UnicodeError):
                raise store_error(error, self._path, "be opened") from error
            raise
        return connection


def _read_only_options(path: Path) -> str:
    """Return the options for opening a read-only file with SQLite; none for others."""
    log = path.with_name(path.name + "-wal")
    effective = os.access in os.supports_effective_ids
    may_write_file = os.access(path, os.W_OK, effective_ids=effective)
    may_write_folder = os.access(path.parent, os.W_OK, effective_ids=effective)
    has_log = os.access(log, os.F_OK)
    if not os.access(path, os.F_OK) or (may_write_file and (may_write_folder or has_log)):
        return ""
    if has_log and log.stat().st_size:
        return "mode=ro"
    return "mode=ro&immutable=1"  # otherwise SQLite would make a log and an index, and leave them


def _make_private(path: Path) -> None:
    """Remove other users' rights to a file, and to the log and index beside it.

    Raises:
        StoreError: it belongs to somebody else.
    """
    for suffix in ("", *_LOG_SUFFIXES):
        file = path.with_name(path.name + suffix)
        if not file.is_file() or not file.stat().st_mode & 0o077:
            continue
        try:
            file.chmod(0o600)
        except PermissionError as error:
            raise StoreError(
                f"{file} belongs to another user, who could change it; name another path"
            ) from error
        except FileNotFoundError:
            pass  # another process has closed the file just now


def _file_status(path: Path) -> dict[Path, os.stat_result]:
    """Return the status of a file, and of the log and index beside it."""
    found: dict[Path, os.stat_result] = {}
    for suffix in ("", *_LOG_SUFFIXES):
        file = path.with_name(path.name + suffix)
        with suppress(OSError):
            found[file] = file.stat()
    return found


def _use_log(connection: sqlite3.Connection) -> None:
    """Switch to a write-ahead log, so that readers and writers do not block each other."""
    for _ in range(_MAX_WAL_ATTEMPTS):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if _error_name(error) != "SQLITE_BUSY":
                raise
        # That statement ignores the busy timeout while others open the same new file; this one
        # waits.
        with connection:
            connection.execute("BEGIN IMMEDIATE")


def _migrate(connection: sqlite3.Connection, path: Path, *, read_only: bool) -> None:
    """Migrate the schema to the current version, all or nothing."""
    application, version = connection.execute(_VERSION_SQL).fetchone()
    if application == _APPLICATION_ID:
        readable = read_only and _OLDEST_READABLE_VERSION <= version <= SCHEMA_VERSION
        if version == SCHEMA_VERSION or readable:
            return
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        # Read again under the lock: another process may have been migrating before.
        application, version = connection.execute(_VERSION_SQL).fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application != _APPLICATION_ID and (application or version or tables):
            raise StoreError(
                f"{path} is a database of another program; name another file for the history"
            )
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{path} has version {version} of the schema, and this library knows versions up to"
                f" {SCHEMA_VERSION}: it was written by a newer version of replanning; upgrade the"
                " library, or name another file"
            )
        for statements in _MIGRATIONS[version:]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
