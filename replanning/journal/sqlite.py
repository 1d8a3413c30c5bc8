"""Store in one SQLite file: several processes read while one writes, and a killed process loses nothing."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from os import PathLike
from pathlib import Path
from threading import RLock
from typing import ClassVar, Final, Literal

from replanning.errors import JournalCorrupt, RunOwned, StoreError
from replanning.journal.owner import is_lease_free
from replanning.journal.records import Record, RunOpened
from replanning.journal.store import (
    LOCK_TIMEOUT,
    InboxMessage,
    Lease,
    RunInfo,
    RunStore,
    ToolOutcome,
    check_run_id,
    decode_body,
    encode_body,
    is_valid_run_id,
    lease_lost,
    record_out_of_order,
    run_already_exists,
    run_title,
    status_after,
    to_json_line,
    unknown_run,
)
from replanning.plan.types import RunId

Synchronous = Literal["normal", "full", "off"]

_APPLICATION_ID: Final = 0x5265506C  # "RePl": marks a file as ours

_MAX_WAL_ATTEMPTS: Final = 100

_CHECKPOINT_PAGES: Final = 250
"""Pages in the log before a checkpoint; with the default of 1000 a checkpoint may block the event loop over 10 ms."""

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
)
"""Statements that lead from each version of the schema to the next; only add to them."""

SCHEMA_VERSION: Final = len(_MIGRATIONS)
"""Version of the schema that this library writes, kept in `PRAGMA user_version`."""

_SQLITE_ADVICE: Final = {
    "SQLITE_FULL": "make room on the disk and resume the run",
    "SQLITE_READONLY": "the file may not be written; check the permissions of the file and of its folder",
    "SQLITE_PERM": "the file may not be opened; check its permissions",
    "SQLITE_CANTOPEN": "check that the path names a file, not a folder, and that it may be opened",
    "SQLITE_BUSY": f"another process kept the file locked for {LOCK_TIMEOUT:g} seconds; try again",
    "SQLITE_NOTADB": "it is not a SQLite database; name another file, or move this one away",
    "SQLITE_CORRUPT": "the file is damaged; restore it from a copy, or move it away and begin a new history",
    "SQLITE_IOERR": "the disk failed, or the file may not grow; check space, quotas and limits on the size of files",
}

_CORRUPT_FILE_CODES: Final = ("SQLITE_CORRUPT", "SQLITE_NOTADB")


def store_error(error: Exception, path: Path, operation: str) -> StoreError:
    """Convert an error of SQLite to `{path} cannot {operation}: ...` with advice."""
    name = getattr(error, "sqlite_errorname", "")
    advice = next((advice for code, advice in _SQLITE_ADVICE.items() if name.startswith(code)), "")
    kind = JournalCorrupt if name.startswith(_CORRUPT_FILE_CODES) else StoreError
    return kind(f"{path} cannot {operation}: {error}" + (f"; {advice}" if advice else ""))


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Run the statements of the block as one transaction, rolled back if it raises."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Migrate the schema to the current version, all or nothing."""
    if connection.execute(_VERSION_SQL).fetchone() == (_APPLICATION_ID, SCHEMA_VERSION):
        return
    with transaction(connection):
        # Read again under the lock: another process may have been migrating before.
        application, version = connection.execute(_VERSION_SQL).fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application != _APPLICATION_ID and (application or version or tables):
            raise StoreError(f"{path} is a database of another program; name another file for the history")
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{path} has version {version} of the schema, and this library knows versions up to {SCHEMA_VERSION}: "
                "it was written by a newer version of replanning; upgrade the library, or name another file"
            )
        for statements in _MIGRATIONS[version:]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


_READ_BATCH_SIZE: Final = 100

_VERSION_SQL: Final = "SELECT * FROM pragma_application_id, pragma_user_version"

# One statement checks lease and number and appends, so that no other writer can intervene.
_APPEND_SQL: Final = """
    INSERT INTO records (run, seq, at, kind, data)
    SELECT number, ?, ?, ?, ? FROM runs
    WHERE id = ? AND epoch = ?
      AND ? = 1 + coalesce((SELECT max(seq) FROM records WHERE run = number), 0)
"""

_READ_SQL: Final = "SELECT seq, at, kind, data FROM records WHERE run = ? AND seq > ? AND seq <= ? ORDER BY seq"

_LAST_SEQ_SQL: Final = "SELECT coalesce(max(seq), 0) FROM records WHERE run = ?"

_RUNS_SQL: Final = """
    SELECT id, name, objective, status, created, coalesce(last.at, created), coalesce(last.seq, 0), owner
    FROM runs LEFT JOIN records AS last
      ON last.run = number AND last.seq = (SELECT max(seq) FROM records WHERE run = number)
    ORDER BY created DESC, number DESC
"""

_ADD_OUTCOME_SQL: Final = "INSERT INTO outcomes (tool, capability, succeeded, at, seconds) VALUES (?, ?, ?, ?, ?)"

_OUTCOMES_SQL: Final = """
    SELECT tool, capability, succeeded, at, seconds FROM outcomes
    WHERE {} ORDER BY number DESC LIMIT :limit
"""


class SqliteStore(RunStore):
    """Store in a SQLite file, created with its folder if it is missing.

    Any number of processes may use the file; each run is written by the process that owns it. Appended records
    outlive the process however it ends.

    Args:
        path: the file.
        synchronous: `normal` survives every end of the process, also by SIGKILL; `full` waits for the disk at
            each record and also survives a power failure; `off` never waits, and a power failure may damage the file.

    Raises:
        StoreError: the file cannot be opened, is no history, or was written by a newer version.
    """

    durable: ClassVar[bool] = True

    def __init__(self, path: str | PathLike[str], *, synchronous: Synchronous = "normal") -> None:
        self._path = Path(path)
        self._lock = RLock()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Every statement is its own transaction unless one is begun; calls are serialised by the lock.
            connection = sqlite3.connect(
                self._path, timeout=LOCK_TIMEOUT, isolation_level=None, check_same_thread=False
            )
        except OSError as error:
            folder = f"the folder of {self._path} cannot be made"
            raise StoreError(f"{folder}: {error.strerror}; name another path") from error
        except sqlite3.Error as error:
            raise store_error(error, self._path, "be opened") from error
        try:
            _migrate(connection, self._path)
            # With a write-ahead log, readers and writers do not block each other.
            for _ in range(_MAX_WAL_ATTEMPTS):
                try:
                    connection.execute("PRAGMA journal_mode = WAL")
                    break
                except sqlite3.OperationalError as error:
                    if error.sqlite_errorname != "SQLITE_BUSY":
                        raise
                    # This statement ignores the busy timeout while others open the same new file; BEGIN IMMEDIATE waits.
                    with transaction(connection):
                        pass
            connection.execute(f"PRAGMA synchronous = {synchronous}")
            connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        except BaseException as error:
            connection.close()
            if isinstance(error, sqlite3.Error):
                raise store_error(error, self._path, "be opened") from error
            raise
        self._connection = connection

    def __repr__(self) -> str:
        return f"<SqliteStore {str(self._path)!r}>"

    def create(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Insert a row for the run."""
        check_run_id(run)
        with self._operation("take a new run") as database:
            try:
                database.execute(
                    "INSERT INTO runs (id, created, owner, until) VALUES (?, ?, ?, ?)", (run, at, owner, at + ttl)
                )
            except sqlite3.IntegrityError as error:
                raise run_already_exists(run) from error
        return Lease(run, 1, owner)

    def acquire(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Write the new owner with the next epoch into the row of the run."""
        with self._operation("hand over a run") as database, transaction(database):
            number = self._run_number(run)
            epoch, holder, until = database.execute(
                "SELECT epoch, owner, until FROM runs WHERE number = ?", (number,)
            ).fetchone()
            if not is_lease_free(holder, until, at):
                raise RunOwned(run, holder)
            database.execute(
                "UPDATE runs SET epoch = ?, owner = ?, until = ? WHERE number = ?", (epoch + 1, owner, at + ttl, number)
            )
        return Lease(run, epoch + 1, owner)

    def renew(self, lease: Lease, at: float, ttl: float) -> None:
        """Move the end of the lease in the row of the run."""
        with self._operation("renew a lease") as database:
            renewed = database.execute(
                "UPDATE runs SET until = ? WHERE id = ? AND epoch = ?", (at + ttl, lease.run, lease.epoch)
            )
            if not renewed.rowcount:
                raise lease_lost(lease)

    def release(self, lease: Lease) -> None:
        """Begin the next epoch without an owner, which invalidates the lease."""
        with self._operation("release a run") as database:
            database.execute(
                "UPDATE runs SET owner = NULL, epoch = epoch + 1 WHERE id = ? AND epoch = ?", (lease.run, lease.epoch)
            )

    def append(self, lease: Lease, record: Record) -> None:
        """Insert the record by one statement, which inserts nothing if the lease is not current."""
        seq, at, body = record
        row = (seq, at, body.kind, encode_body(record), lease.run, lease.epoch, seq)
        status = status_after(body)
        with self._lock:
            try:
                if status is None:
                    written = self._connection.execute(_APPEND_SQL, row).rowcount
                else:  # the row of the run is updated as well
                    with transaction(self._connection) as database:
                        written = database.execute(_APPEND_SQL, row).rowcount
                        if written:
                            database.execute("UPDATE runs SET status = ? WHERE id = ?", (status, lease.run))
                        if written and isinstance(body, RunOpened):
                            title = (*run_title(body), lease.run)
                            database.execute("UPDATE runs SET name = ?, objective = ? WHERE id = ?", title)
            except sqlite3.Error as error:
                raise store_error(error, self._path, f"take record {seq} of run {lease.run!r}") from error
            if written:
                return
        with self._operation("be read") as database:
            if not self._is_current(lease):
                raise lease_lost(lease)
            (last,) = database.execute(_LAST_SEQ_SQL, (self._run_number(lease.run),)).fetchone()
        raise record_out_of_order(lease, record, last)

    def read(self, run: RunId, after: int = 0) -> Iterator[Record]:
        """Return the records that exist now, fetched in batches."""
        with self._operation("be read") as database:
            number = self._run_number(run)
            (end,) = database.execute(_LAST_SEQ_SQL, (number,)).fetchone()
        return self._records(run, number, after, end)

    def runs(self) -> Sequence[RunInfo]:
        """Return all runs from their rows."""
        with self._operation("be read") as database:
            return [RunInfo(*row) for row in database.execute(_RUNS_SQL)]

    def post(self, run: RunId, message: InboxMessage) -> None:
        """Insert a message."""
        payload = to_json_line(message.payload)
        with self._operation("take a message") as database:
            database.execute(
                "INSERT INTO inbox (run, kind, at, sender, payload) VALUES (?, ?, ?, ?, ?)",
                (self._run_number(run), message.kind, message.at, message.by, payload),
            )

    def inbox(self, run: RunId) -> Sequence[InboxMessage]:
        """Return the waiting messages with their ids."""
        with self._operation("be read") as database:
            rows = database.execute(
                "SELECT kind, at, sender, payload, number FROM inbox WHERE run = ? ORDER BY number",
                (self._run_number(run),),
            )
            return [InboxMessage(kind, at, by, json.loads(payload), number) for kind, at, by, payload, number in rows]

    def discard(self, lease: Lease, messages: Sequence[int]) -> None:
        """Delete messages, as the owner."""
        with self._operation("discard messages") as database, transaction(database):
            if not self._is_current(lease):
                raise lease_lost(lease)
            number = self._run_number(lease.run)
            database.executemany(
                "DELETE FROM inbox WHERE run = ? AND number = ?", [(number, message) for message in messages]
            )

    def add_outcomes(self, outcomes: Sequence[ToolOutcome]) -> None:
        """Insert outcomes, all or none."""
        rows = list(map(astuple, outcomes))
        with self._operation("take outcomes") as database, transaction(database):
            database.executemany(_ADD_OUTCOME_SQL, rows)

    def outcomes(
        self, *, tool: str | None = None, capability: str | None = None, limit: int = 50
    ) -> Sequence[ToolOutcome]:
        """Return the last outcomes, found by an index."""
        wanted = {"tool": tool, "capability": capability}
        # Only column names enter the statement; a condition on an unused column would prevent the use of the index.
        where = " AND ".join(f"{column} = :{column}" for column, value in wanted.items() if value is not None)
        with self._operation("be read") as database:
            rows = database.execute(_OUTCOMES_SQL.format(where or "TRUE"), {**wanted, "limit": limit})
            return [ToolOutcome(name, kind, bool(succeeded), *rest) for name, kind, succeeded, *rest in rows]

    def close(self) -> None:
        """Close the file, after a checkpoint of its log."""
        with self._operation("be closed") as database:
            database.close()

    def _records(self, run: RunId, number: int, after: int, end: int) -> Iterator[Record]:
        # In batches, so that an unfinished loop holds no snapshot open and memory stays bounded.
        last = after
        for start in range(after, end, _READ_BATCH_SIZE):
            with self._operation("be read") as database:
                rows = database.execute(_READ_SQL, (number, start, min(start + _READ_BATCH_SIZE, end))).fetchall()
            for seq, at, kind, data in rows:
                last += 1
                try:
                    if seq != last:
                        raise ValueError("it is missing")
                    body = decode_body(kind, data)
                except ValueError as error:
                    raise JournalCorrupt(
                        f"{self._path}: record {last} of run {run!r} cannot be read: {error}; "
                        "restore the file from a copy, or fork the run from a revision before this record"
                    ) from error
                yield Record(seq, at, body)

    def _run_number(self, run: RunId) -> int:
        row = None
        if is_valid_run_id(run):
            row = self._connection.execute("SELECT number FROM runs WHERE id = ?", (run,)).fetchone()
        if row is None:
            raise unknown_run(run, [known for (known,) in self._connection.execute("SELECT id FROM runs")])
        return int(row[0])

    def _is_current(self, lease: Lease) -> bool:
        row = self._connection.execute("SELECT epoch FROM runs WHERE id = ?", (lease.run,)).fetchone()
        return row is not None and row[0] == lease.epoch

    @contextmanager
    def _operation(self, doing: str) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._connection
            except (sqlite3.Error, UnicodeEncodeError) as error:  # the latter for a lone surrogate
                raise store_error(error, self._path, doing) from error
