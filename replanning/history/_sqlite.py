"""A store in one SQLite file: several processes read while one writes, and a killed process loses nothing."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from threading import RLock
from typing import ClassVar, Final

from replanning._errors import JournalCorrupt, RunOwned, StoreError
from replanning._ids import RunId
from replanning._interfaces import InboxMessage, Lease, RunInfo, RunStore, ToolOutcome
from replanning._records import Record, RunOpened
from replanning.history._owner import is_lease_free
from replanning.history._rules import (
    CurrentRunStatus,
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
from replanning.history._schema import Synchronous, connect, store_error, transaction

_READ_BATCH_SIZE: Final = 100

# One statement checks lease and number and appends, so that nobody comes between.
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
_OUTCOMES_SQL: Final = """
    SELECT tool, capability, succeeded, at FROM outcomes
    WHERE {} ORDER BY number DESC LIMIT :limit
"""


class SqliteStore(RunStore):
    """Keeps runs in a SQLite file, made with its folder when it is missing.

    Any number of processes may use the file; each run is written by the one that owns it. What was appended
    outlives the process however it ends.

    Args:
        path: the file.
        synchronous: `normal` survives every end of the process, also by SIGKILL; `full` waits for the disk at
            each record and survives a power failure, too; `off` never waits, and a power failure may damage
            the file.

    Raises:
        StoreError: the file cannot be opened, is something else, or was written by a newer version.
    """

    durable: ClassVar[bool] = True

    def __init__(self, path: str | PathLike[str], *, synchronous: Synchronous = "normal") -> None:
        self._path = Path(path)
        self._lock = RLock()
        self._connection = connect(self._path, synchronous)

    def __repr__(self) -> str:
        return f"<SqliteStore {str(self._path)!r}>"

    def create(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Make a row for the run."""
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
        """Put another owner under the next epoch into the row of the run."""
        with self._operation("hand over a run") as database, transaction(database):
            number = self._run_number(run)
            epoch, holder, until = database.execute(
                "SELECT epoch, owner, until FROM runs WHERE number = ?", (number,)
            ).fetchone()
            if not is_lease_free(holder, until, at):
                raise RunOwned(run, holder)
            database.execute(
                "UPDATE runs SET epoch = ?, owner = ?, until = ? WHERE number = ?",
                (epoch + 1, owner, at + ttl, number),
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
        """Begin the next epoch without an owner, so that the lease is worth nothing from now on."""
        with self._operation("release a run") as database:
            database.execute(
                "UPDATE runs SET owner = NULL, epoch = epoch + 1 WHERE id = ? AND epoch = ?", (lease.run, lease.epoch)
            )

    def append(self, lease: Lease, record: Record) -> None:
        """Insert the record by one statement, which inserts nothing when the lease is not the current one."""
        seq, at, body = record
        row = (seq, at, body.kind, encode_body(record), lease.run, lease.epoch, seq)
        status = status_after(body)
        with self._lock:
            try:
                if status is None:
                    written = self._connection.execute(_APPEND_SQL, row).rowcount
                else:
                    written = self._append_status_record(lease, record, row, status)
            except sqlite3.Error as error:
                raise store_error(error, self._path, f"take record {seq} of run {lease.run!r}") from error
            if not written:
                raise self._append_error(lease, record)

    def read(self, run: RunId, after: int = 0) -> Iterator[Record]:
        """The records that there are now, fetched as the caller goes on."""
        with self._operation("be read") as database:
            number = self._run_number(run)
            (end,) = database.execute(_LAST_SEQ_SQL, (number,)).fetchone()
        return self._records(run, number, after, end)

    def runs(self) -> Sequence[RunInfo]:
        """All runs, as their rows say."""
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
        """The messages that wait, with their ids."""
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
        rows = [(outcome.tool, outcome.capability, outcome.succeeded, outcome.at) for outcome in outcomes]
        with self._operation("take outcomes") as database, transaction(database):
            database.executemany("INSERT INTO outcomes (tool, capability, succeeded, at) VALUES (?, ?, ?, ?)", rows)

    def outcomes(
        self, *, tool: str | None = None, capability: str | None = None, limit: int = 50
    ) -> Sequence[ToolOutcome]:
        """The last outcomes, by an index."""
        wanted = {"tool": tool, "capability": capability}
        # Only names of columns enter the statement; a column that is not asked for would keep the index from use.
        where = " AND ".join(f"{column} = :{column}" for column, value in wanted.items() if value is not None)
        with self._operation("be read") as database:
            rows = database.execute(_OUTCOMES_SQL.format(where or "TRUE"), {**wanted, "limit": limit})
            return [ToolOutcome(name, kind, bool(succeeded), at) for name, kind, succeeded, at in rows]

    def close(self) -> None:
        """Close the file; what was written ahead is put in its place."""
        with self._operation("be closed") as database:
            database.close()

    def _append_status_record(
        self, lease: Lease, record: Record, row: tuple[object, ...], status: CurrentRunStatus
    ) -> int:
        """Append a record that changes how the run is listed, and the listing, as one step."""
        with transaction(self._connection) as database:
            written = database.execute(_APPEND_SQL, row).rowcount
            if written:
                database.execute("UPDATE runs SET status = ? WHERE id = ?", (status, lease.run))
            if written and isinstance(record.body, RunOpened):
                database.execute(
                    "UPDATE runs SET name = ?, objective = ? WHERE id = ?", (*run_title(record.body), lease.run)
                )
        return written

    def _append_error(self, lease: Lease, record: Record) -> StoreError:
        with self._operation("be read") as database:
            if not self._is_current(lease):
                return lease_lost(lease)
            (last,) = database.execute(_LAST_SEQ_SQL, (self._run_number(lease.run),)).fetchone()
        return record_out_of_order(lease, record, last)

    def _records(self, run: RunId, number: int, after: int, end: int) -> Iterator[Record]:
        # In batches, so that an unfinished loop holds no snapshot open and a long journal is never in memory at once.
        last = after
        for start in range(after, end, _READ_BATCH_SIZE):
            with self._operation("be read") as database:
                rows = database.execute(_READ_SQL, (number, start, min(start + _READ_BATCH_SIZE, end))).fetchall()
            for seq, at, kind, data in rows:
                last += 1
                if seq != last:
                    raise self._corrupt_record(run, last, "it is missing")
                try:
                    body = decode_body(kind, data)
                except ValueError as error:
                    raise self._corrupt_record(run, seq, str(error)) from error
                yield Record(seq, at, body)

    def _corrupt_record(self, run: RunId, seq: int, reason: str) -> JournalCorrupt:
        return JournalCorrupt(
            f"{self._path}: record {seq} of run {run!r} cannot be read: {reason}; "
            "restore the file from a copy, or fork the run from a revision before this record"
        )

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
            except (sqlite3.Error, UnicodeEncodeError) as error:  # the latter for half a surrogate pair
                raise store_error(error, self._path, doing) from error
