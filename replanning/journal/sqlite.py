"""Store in one SQLite file: several processes read while one writes, and a killed process loses nothing."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from threading import Event, RLock
from typing import Any, ClassVar, Final, Literal, NamedTuple, get_args
from weakref import WeakSet

from replanning.errors import JournalCorrupt, LeaseLost, RunOwned, StoreError, UnknownRun
from replanning.journal.owner import is_lease_free
from replanning.journal.records import Record, RunOpened
from replanning.journal.store import (
    LOCK_TRY,
    LOOP_LOCK_TIMEOUT,
    CurrentRunStatus,
    InboxMessage,
    Lease,
    RunInfo,
    RunStore,
    ToolOutcome,
    check_run_id,
    checksum,
    decode_body,
    encode_body,
    is_locked,
    is_valid_run_id,
    lease_lost,
    lock_timeout,
    record_out_of_order,
    run_already_exists,
    run_title,
    status_after,
    to_json_line,
    unknown_run,
)
from replanning.plan.messages import brief_repr
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
    (  # 2 to 3: checksums, and the number of records, by which missing ones are noticed
        "ALTER TABLE records ADD COLUMN crc INTEGER NOT NULL DEFAULT 0",
        "UPDATE records SET crc = checksum(CAST(data AS BLOB), seq, at, kind)",
        "ALTER TABLE runs ADD COLUMN records INTEGER NOT NULL DEFAULT 0",
        "UPDATE runs SET records = (SELECT coalesce(max(seq), 0) FROM records WHERE run = number)",
        "ALTER TABLE runs ADD COLUMN crc INTEGER NOT NULL DEFAULT 0",
        "UPDATE runs SET crc = checksum(CAST(id AS BLOB), name, objective, status, created, owner, epoch, until)",
        "ALTER TABLE inbox ADD COLUMN crc INTEGER NOT NULL DEFAULT 0",
        "UPDATE inbox SET crc = checksum(CAST(payload AS BLOB), run, kind, at, sender)",
    ),
)
"""Statements that lead from each version of the schema to the next; only add to them."""

SCHEMA_VERSION: Final = len(_MIGRATIONS)
"""Version of the schema that this library writes, kept in `PRAGMA user_version`."""

_DAMAGE_ADVICE: Final = "restore it from a copy, or move it away and begin a new history"

_SQLITE_ADVICE: Final = {
    "SQLITE_FULL": "make room on the disk and resume the run",
    "SQLITE_READONLY": "the file may not be written; check the permissions of the file and of its folder",
    "SQLITE_PERM": "the file may not be opened; check its permissions",
    "SQLITE_CANTOPEN": "check that the path names a file, not a folder, and that it may be opened",
    "SQLITE_BUSY": "another process kept the file locked; try again",
    "SQLITE_NOTADB": "it is not a SQLite database; name another file, or move this one away",
    "SQLITE_CORRUPT": f"the file is damaged; {_DAMAGE_ADVICE}",
    "SQLITE_IOERR": "the disk failed, or the file may not grow; check space, quotas and limits on the size of files",
}

_CORRUPT_FILE_CODES: Final = ("SQLITE_CORRUPT", "SQLITE_NOTADB")


def store_error(error: Exception, path: Path, operation: str) -> StoreError:
    """Convert an error of SQLite to `{path} cannot {operation}: ...` with advice."""
    name = getattr(error, "sqlite_errorname", "")
    advice = next((advice for code, advice in _SQLITE_ADVICE.items() if name.startswith(code)), "")
    # A damaged schema is told in a text that need not be UTF-8.
    damaged = name.startswith(_CORRUPT_FILE_CODES) or isinstance(error, UnicodeDecodeError)
    kind = JournalCorrupt if damaged else StoreError
    return kind(f"{path} cannot {operation}: {error}" + (f"; {advice}" if advice else ""))


def _not_ours(error: PermissionError) -> StoreError:
    problem = "may not be used, or belongs to another user, who could change it"
    return StoreError(f"{error.filename} {problem}; name another path")


def _make_private(path: Path) -> None:
    """Make the database private to its user, with the `-wal` and `-shm` files that SQLite keeps beside it."""
    for each in (path, *(path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))):
        with suppress(FileNotFoundError, NotADirectoryError):
            mode = each.stat().st_mode
            if stat.S_ISREG(mode) and mode & 0o077:
                each.chmod(0o600)


def _read_only_options(path: Path, wal: Path, shm: Path) -> str:
    """Return the options with which SQLite opens a file that may be read and not written; none for any other.

    Raises:
        StoreError: SQLite has to write to read its log.
    """
    may_write = partial(
        os.access, mode=os.W_OK, effective_ids=os.access in os.supports_effective_ids
    )
    folder = may_write(path.parent)
    if not path.exists() or (may_write(path) and (folder or wal.exists())):
        return ""
    if not (wal.exists() and wal.stat().st_size):
        return (
            "mode=ro&immutable=1"  # SQLite would otherwise make a log and an index, and leave them
        )
    if not (folder or shm.exists()):
        advice = "copy both files to a folder where you may write, and look there"
        raise StoreError(
            f"{wal}, which holds the last records, cannot be read without writing beside it; {advice}"
        )
    return "mode=ro"


def _check_log(log: Path, index: Path) -> None:
    """Check that a log holds the frames that its index counts; SQLite silently drops a damaged frame and all later ones.

    Raises:
        JournalCorrupt: it does not.
    """
    header = _index_header(index)
    frames = log.read_bytes() if log.is_file() else b""
    # If the index has changed, another process is using the log, and began it anew while it was read.
    if header and not _is_whole(frames, header) and _index_header(index) == header:
        advice = f"put it back, or remove {index} to continue with the records that are intact"
        raise JournalCorrupt(
            f"{log}, which holds the last records, is missing or damaged; {advice}"
        )


def _index_header(index: Path) -> bytes:
    """Return the header of an index, of which it holds two copies; empty if it is missing or not valid."""
    text = index.read_bytes()[: 2 * _INDEX_HEADER.size] if index.is_file() else b""
    header = text[: _INDEX_HEADER.size]
    return header if header + header == text else b""


def _is_whole(log: bytes, header: bytes) -> bool:
    """Return whether checksums and salts of all frames of a log are right; each checksum covers the frames before it."""
    big_endian, page, count, salts = _INDEX_HEADER.unpack(header)
    size = (page & 0xFE00) + ((page & 1) << 16) + 24
    if not count or len(log) < 32 + count * size:
        return not count
    pairs, first, second = struct.Struct(">2I" if big_endian else "<2I"), 0, 0
    for start in [0, *range(32, 32 + count * size, size)]:
        text = log[start : start + 8] + log[start + 24 : start + size] if start else log[:24]
        for even, odd in pairs.iter_unpack(text):
            first = (first + even + second) & 0xFFFFFFFF
            second = (second + odd + first) & 0xFFFFFFFF
        end = start + 24 if start else 32
        if log[end - 16 : end] != salts + struct.pack(">2I", first, second):
            return False
    return True


@contextmanager
def _commit_or_rollback(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit the transaction that has begun, or roll it back if the block raises."""
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Migrate the schema to the current version, all or nothing."""
    if connection.execute(_VERSION_SQL).fetchone() == (_APPLICATION_ID, SCHEMA_VERSION):
        return
    connection.execute("BEGIN IMMEDIATE")
    with _commit_or_rollback(connection):
        # Read again under the lock: another process may have been migrating before.
        application, version = connection.execute(_VERSION_SQL).fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application != _APPLICATION_ID and (application or version or tables):
            raise StoreError(
                f"{path} is a database of another program; name another file for the history"
            )
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


_INDEX_HEADER: Final = struct.Struct("=13x?HI12x8s8x")
"""Byte order of checksums, size of pages, number of frames and salts, in the index of a log (walformat.html of SQLite)."""

_READ_BATCH_SIZE: Final = 100

_BUSY_TIMEOUT_SQL: Final = f"PRAGMA busy_timeout = {LOOP_LOCK_TIMEOUT * 1000:.0f}"

_VERSION_SQL: Final = "SELECT * FROM pragma_application_id, pragma_user_version"

# Checks lease and number, and begins the write, so that no other writer can intervene.
_COUNT_SQL: Final = "UPDATE runs SET records = ? WHERE id = ? AND epoch = ? AND records = ?"

_APPEND_SQL: Final = """
    INSERT INTO records (run, seq, at, kind, data, crc) SELECT number, ?, ?, ?, ?, ? FROM runs WHERE id = ?
"""

# As bytes, because damaged text need not be UTF-8.
_READ_SQL: Final = """
    SELECT seq, CAST(at AS REAL), CAST(kind AS BLOB), CAST(data AS BLOB), crc FROM records
    WHERE run = ? AND seq > ? AND seq <= ? ORDER BY seq
"""

_LAST_SEQ_SQL: Final = """
    SELECT records, (SELECT coalesce(max(seq), 0) FROM records WHERE run = number) FROM runs WHERE number = ?
"""

_RUN_SQL: Final = """
    SELECT number, records, (SELECT CAST(at AS REAL) FROM records AS last WHERE run = number AND seq = runs.records),
        id, name, objective, status, created, owner, epoch, until, crc
    FROM runs
"""

_SAVE_RUN_SQL: Final = """
    UPDATE runs SET name = ?, objective = ?, status = ?, owner = ?, epoch = ?, until = ?, crc = ? WHERE number = ?
"""

_ADD_OUTCOME_SQL: Final = (
    "INSERT INTO outcomes (tool, capability, succeeded, at, seconds) VALUES (?, ?, ?, ?, ?)"
)

_OUTCOMES_SQL: Final = """
    SELECT tool, capability, succeeded, at, seconds FROM outcomes
    WHERE {} ORDER BY number DESC LIMIT :limit
"""


class _RunRow(NamedTuple):
    """Row of a run, after the number and time of its last record; its checksum covers the columns from the id on."""

    number: int
    records: int
    updated: float | None
    id: RunId
    name: str
    objective: str
    status: CurrentRunStatus
    created: float
    owner: str | None
    epoch: int
    until: float

    @property
    def crc(self) -> int:
        return checksum(_encoded(self.id), *self[4:])


def _encoded(text: object) -> bytes:
    """Return the bytes of a text; a damaged column holds anything, and no checksum fits what it says then."""
    return text.encode(errors="surrogateescape") if isinstance(text, str) else ascii(text).encode()


_open_stores: Final[WeakSet[SqliteStore]] = WeakSet()


class SqliteStore(RunStore):
    """Store in a SQLite file, created with its folder if it is missing, and private to its user.

    Any number of processes may use the file; each run is written by the process that owns it. Appended records
    outlive the process however it ends. Rows have checksums: damage to a run is refused when it is read, and damage to the
    log of a killed process when the file is opened.

    Args:
        path: the file.
        synchronous: `normal` survives every end of the process, also by SIGKILL; `full` waits for the disk at
            each record and also survives a power failure; `off` never waits, and a power failure may damage the file.

    Raises:
        StoreError: the file cannot be opened, is no history, or was written by a newer version.
    """

    durable: ClassVar[bool] = True

    def __init__(self, path: str | PathLike[str], *, synchronous: Synchronous = "normal") -> None:
        if synchronous not in get_args(Synchronous):  # SQLite would ignore it
            raise ValueError(f"synchronous: expected normal, full or off, got {synchronous!r}")
        self._path, self._synchronous = Path(path), synchronous
        self._lock = RLock()
        self._inodes: dict[Path, int] = {}
        try:
            self._connection  # noqa: B018 - opens the file
        except StoreError as error:
            if not is_locked(error) or lock_timeout() != LOCK_TRY:
                raise  # otherwise the first use of the store tries again

    def __repr__(self) -> str:
        return f"<SqliteStore {str(self._path)!r}>"

    def __del__(
        self,
    ) -> (
        None
    ):  # engines that made their store are not closed; Python 3.13 warns of open connections
        if (connection := self.__dict__.get("_connection")) is not None:
            connection.close()

    @cached_property
    def _connection(self) -> sqlite3.Connection:
        new, wal, shm = (
            self._path.with_name(self._path.name + suffix) for suffix in ("-new", "-wal", "-shm")
        )
        try:
            self._path.parent.mkdir(0o700, parents=True, exist_ok=True)
            with suppress(OSError):
                if not self._path.exists():
                    new.touch(0o600)  # until the file has its tables, and may be empty
                # Only a new file is opened: closing a file takes the locks of this process from it.
                os.close(
                    os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                )
            # SQLite takes such files as new ones. Looked at twice, because another process may be opening or closing them.
            if all(
                self._path.is_file() and self._path.stat().st_size < 2 and not new.exists()
                for _ in range(2)
            ):
                raise JournalCorrupt(f"{self._path} is damaged: it was cut off; {_DAMAGE_ADVICE}")
            # Not if this process has the file open already: reading the index would take the locks from it.
            used = {inode for store in list(_open_stores) for inode in store._inodes.values()}
            if self._path.is_file() and self._path.stat().st_ino not in used:
                _check_log(wal, shm)
            options = _read_only_options(self._path, wal, shm)
            # Every statement is its own transaction unless one is begun; calls are serialised by the lock.
            connection = sqlite3.connect(
                f"{self._path.absolute().as_uri()}?{options}" if options else self._path,
                timeout=lock_timeout(),
                isolation_level=None,
                check_same_thread=False,
                uri=bool(options),
            )
        except PermissionError as error:
            raise _not_ours(error) from error
        except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
            folder = f"the folder of {self._path} cannot be made"
            raise StoreError(
                f"{folder}: {getattr(error, 'strerror', error)}; name another path"
            ) from error
        except sqlite3.Error as error:
            raise store_error(error, self._path, "be opened") from error
        # Damaged text need not be UTF-8; its checksum is wrong all the same.
        connection.text_factory = lambda text: text.decode(errors="surrogateescape")
        connection.create_function("checksum", -1, checksum, deterministic=True)
        try:
            _migrate(connection, self._path)
            with suppress(OSError):
                new.unlink()
            if not options:
                _make_private(
                    self._path
                )  # a file of another program has been refused, and stays as it is
            # With a write-ahead log, readers and writers do not block each other.
            for _ in range(0 if options else _MAX_WAL_ATTEMPTS):
                try:
                    connection.execute("PRAGMA journal_mode = WAL")
                    break
                except sqlite3.OperationalError as error:
                    if error.sqlite_errorname != "SQLITE_BUSY":
                        raise
                    # This statement ignores the busy timeout while others open the same new file; BEGIN IMMEDIATE waits.
                    connection.execute("BEGIN IMMEDIATE")
                    connection.execute("ROLLBACK")
            # Indexes as well: a run that is not found by its id would be begun anew.
            for table in ("runs", "inbox"):
                (found,) = connection.execute(f"PRAGMA integrity_check({table})").fetchone()
                if found != "ok":
                    raise JournalCorrupt(f"{self._path} is damaged: {found}; {_DAMAGE_ADVICE}")
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
            connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
            connection.execute(_BUSY_TIMEOUT_SQL)
            files = (
                path for path in (self._path, wal) if path.exists()
            )  # one that is only read has no log
            self._inodes = {path.absolute(): path.stat().st_ino for path in files}
        except BaseException as error:
            connection.close()
            if isinstance(error, PermissionError):
                raise _not_ours(error) from error
            if isinstance(error, sqlite3.Error | UnicodeError):
                raise store_error(error, self._path, "be opened") from error
            raise
        _open_stores.add(self)
        return connection

    def create(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Insert a row for the run."""
        check_run_id(run)
        row = _RunRow(0, 0, None, run, "", "", "running", float(at), owner, 1, float(at + ttl))
        with self._transaction("take a new run", lock_timeout()) as database:
            try:
                database.execute(
                    "INSERT INTO runs (id, created, owner, until, crc) VALUES (?, ?, ?, ?, ?)",
                    (run, row.created, owner, row.until, row.crc),
                )
            except sqlite3.IntegrityError as error:
                raise run_already_exists(run) from error
        return Lease(run, 1, owner)

    def acquire(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Write the new owner with the next epoch into the row of the run."""
        with self._transaction("hand over a run", lock_timeout()):
            row = self._run_row(run)
            if not is_lease_free(row.owner, row.until, at):
                raise RunOwned(run, str(row.owner))
            self._save(row._replace(epoch=row.epoch + 1, owner=owner, until=float(at + ttl)))
        return Lease(run, row.epoch + 1, owner)

    def renew(self, lease: Lease, at: float, ttl: float) -> None:
        """Move the end of the lease in the row of the run."""
        with self._transaction("renew a lease"):
            for path, inode in self._inodes.items():
                if not path.exists() or path.stat().st_ino != inode:
                    raise LeaseLost(
                        f"{path} was removed or replaced, and another process may take run {lease.run!r}"
                    )
            self._save(self._owned_row(lease)._replace(until=float(at + ttl)))

    def release(self, lease: Lease) -> None:
        """Begin the next epoch without an owner, which invalidates the lease."""
        with suppress(LeaseLost), self._transaction("release a run", lock_timeout()):
            self._save(self._owned_row(lease)._replace(epoch=lease.epoch + 1, owner=None))

    def append(self, lease: Lease, record: Record) -> None:
        """Count and insert the record, which does nothing if the lease is not current."""
        seq, at, body = record
        kind, data = body.kind, encode_body(record)
        crc = checksum(data.encode(), seq, float(at), kind)
        with self._lock:
            database = self._connection
            try:  # not `_transaction`, because this is done for every record
                database.execute("BEGIN IMMEDIATE")
                if not database.execute(
                    _COUNT_SQL, (seq, lease.run, lease.epoch, seq - 1)
                ).rowcount:
                    raise record_out_of_order(lease, record, self._owned_row(lease).records)
                database.execute(_APPEND_SQL, (seq, at, kind, data, crc, lease.run))
                status = status_after(body)
                if status is not None:
                    row = self._run_row(lease.run)._replace(status=status)
                    if isinstance(body, RunOpened):
                        name, objective = run_title(body)
                        row = row._replace(name=name, objective=objective)
                    self._save(row)
                database.execute("COMMIT")
            except BaseException as error:
                with suppress(sqlite3.Error):
                    database.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error | UnicodeError):
                    raise store_error(
                        error, self._path, f"take record {seq} of run {lease.run!r}"
                    ) from error
                raise

    def read(self, run: RunId, after: int = 0) -> Iterator[Record]:
        """Return the records that exist now, fetched in batches."""
        with self._operation("be read") as database:
            number = self._run_row(run).number
            written, end = database.execute(_LAST_SEQ_SQL, (number,)).fetchone()
        if end != written:
            raise JournalCorrupt(
                f"{self._path}: run {run!r} has {end} records, and {written} were written; {_DAMAGE_ADVICE}"
            )
        return self._records(run, number, after, end)

    def runs(self) -> Sequence[RunInfo]:
        """Return all runs from their rows."""
        with self._operation("be read") as database:
            rows = map(
                self._verified,
                database.execute(
                    f"{_RUN_SQL} WHERE records > 0 ORDER BY created DESC, number DESC"
                ),
            )
            return [
                RunInfo(
                    r.id,
                    r.name,
                    r.objective,
                    r.status,
                    r.created,
                    r.updated or r.created,
                    r.records,
                    r.owner,
                )
                for r in rows
            ]

    def post(self, run: RunId, message: InboxMessage) -> None:
        """Insert a message."""
        payload, at = to_json_line(message.payload), float(message.at)
        with self._transaction(
            "take a message", max(lock_timeout(), LOOP_LOCK_TIMEOUT)
        ) as database:
            number = self._run_row(run).number
            crc = checksum(payload.encode(), number, message.kind, at, message.by)
            database.execute(
                "INSERT INTO inbox (run, kind, at, sender, payload, crc) VALUES (?, ?, ?, ?, ?, ?)",
                (number, message.kind, at, message.by, payload, crc),
            )

    def inbox(self, run: RunId) -> Sequence[InboxMessage]:
        """Return the waiting messages with their ids."""
        messages = []
        with self._operation("be read") as database:
            run_number = self._run_row(run).number
            rows = database.execute(
                "SELECT number, kind, at, sender, payload, crc FROM inbox WHERE run = ? ORDER BY number",
                (run_number,),
            )
            for number, kind, at, by, payload, crc in rows:
                if crc != checksum(_encoded(payload), run_number, kind, at, by):
                    raise JournalCorrupt(
                        f"{self._path}: message {number} of run {run!r} was damaged: its checksum is wrong; "
                        f"{_DAMAGE_ADVICE}"
                    )
                messages.append(InboxMessage(kind, at, by, json.loads(payload), number))
        return messages

    def discard(self, lease: Lease, messages: Sequence[int]) -> None:
        """Delete messages, as the owner."""
        with self._transaction("discard messages") as database:
            number = self._owned_row(lease).number
            database.executemany(
                "DELETE FROM inbox WHERE run = ? AND number = ?",
                [(number, message) for message in messages],
            )

    def add_outcomes(self, outcomes: Sequence[ToolOutcome]) -> None:
        """Insert outcomes, all or none."""
        rows = list(map(astuple, outcomes))
        with self._transaction("take outcomes", lock_timeout()) as database:
            database.executemany(_ADD_OUTCOME_SQL, rows)

    def outcomes(
        self, *, tool: str | None = None, capability: str | None = None, limit: int = 50
    ) -> Sequence[ToolOutcome]:
        """Return the last outcomes, found by an index."""
        wanted = {"tool": tool, "capability": capability}
        # Only column names enter the statement; a condition on an unused column would prevent the use of the index.
        where = " AND ".join(
            f"{column} = :{column}" for column, value in wanted.items() if value is not None
        )
        with self._operation("be read") as database:
            rows = database.execute(
                _OUTCOMES_SQL.format(where or "TRUE"), {**wanted, "limit": limit}
            )
            return [
                ToolOutcome(name, kind, bool(succeeded), *rest)
                for name, kind, succeeded, *rest in rows
            ]

    def close(self) -> None:
        """Close the file, after a checkpoint of its log."""
        with self._operation("be closed") as database:
            database.close()
            _open_stores.discard(self)

    def _records(self, run: RunId, number: int, after: int, end: int) -> Iterator[Record]:
        # In batches, so that an unfinished loop holds no snapshot open and memory stays bounded.
        last = after
        for start in range(after, end, _READ_BATCH_SIZE):
            with self._operation("be read") as database:
                rows = database.execute(
                    _READ_SQL, (number, start, min(start + _READ_BATCH_SIZE, end))
                ).fetchall()
            for seq, at, kind, data, crc in rows:
                last += 1
                try:
                    if seq != last:
                        raise ValueError("it is missing")
                    name = (kind or b"").decode(errors="replace")
                    if crc != checksum(data or b"", seq, at, name):
                        raise ValueError("it was damaged or changed: its checksum is wrong")
                    body = decode_body(name, data)
                except ValueError as error:
                    raise self._record_damaged(run, last, error) from error
                yield Record(seq, at, body)
            if last != min(start + _READ_BATCH_SIZE, end):
                raise self._record_damaged(run, last + 1, "it is missing")

    def _record_damaged(self, run: RunId, seq: int, reason: object) -> JournalCorrupt:
        return JournalCorrupt(
            f"{self._path}: record {seq} of run {run!r} cannot be read: {reason}; "
            "restore the file from a copy, or fork the run from a revision before this record"
        )

    def _run_row(self, run: RunId) -> _RunRow:
        row = None
        if is_valid_run_id(run):
            row = self._connection.execute(f"{_RUN_SQL} WHERE id = ?", (run,)).fetchone()
        if row is None:
            raise unknown_run(
                run, [known for (known,) in self._connection.execute("SELECT id FROM runs")]
            )
        return self._verified(row)

    def _owned_row(self, lease: Lease) -> _RunRow:
        """Return the row of a run whose lease is current."""
        try:
            row = self._run_row(lease.run)
        except UnknownRun:
            raise lease_lost(lease) from None
        if row.epoch != lease.epoch:
            raise lease_lost(lease)
        return row

    def _verified(self, columns: tuple[Any, ...]) -> _RunRow:
        row = _RunRow(*columns[:-1])
        if columns[-1] != row.crc:
            raise JournalCorrupt(
                f"{self._path}: the row of run {brief_repr(row.id)} was damaged: its checksum is wrong; {_DAMAGE_ADVICE}"
            )
        return row

    def _save(self, row: _RunRow) -> None:
        columns = (
            row.name,
            row.objective,
            row.status,
            row.owner,
            row.epoch,
            row.until,
            row.crc,
            row.number,
        )
        self._connection.execute(_SAVE_RUN_SQL, columns)

    @contextmanager
    def _operation(self, doing: str) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._connection
            except (sqlite3.Error, UnicodeError) as error:  # the latter for a lone surrogate
                raise store_error(error, self._path, doing) from error

    @contextmanager
    def _transaction(
        self, doing: str, timeout: float = LOOP_LOCK_TIMEOUT
    ) -> Iterator[sqlite3.Connection]:
        """Run the statements of the block as one transaction, once no other process writes to the file."""
        end = time.monotonic() + timeout
        while True:
            with self._operation(doing) as database:
                try:
                    database.execute(f"PRAGMA busy_timeout = {LOCK_TRY * 1000:.0f}")
                    database.execute("BEGIN IMMEDIATE")
                except sqlite3.OperationalError as error:
                    if (
                        not error.sqlite_errorname.startswith("SQLITE_BUSY")
                        or time.monotonic() > end
                    ):
                        raise
                else:
                    with _commit_or_rollback(database):
                        yield database
                    return
                finally:
                    with suppress(sqlite3.Error):
                        database.execute(_BUSY_TIMEOUT_SQL)
            Event().wait(
                0.001
            )  # without the lock, for which the event loop of another run may wait
