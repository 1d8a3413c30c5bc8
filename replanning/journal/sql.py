"""Store in four tables of a SQL database: the rules that SQLite and PostgreSQL share."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias, TypeVar

from replanning.environment import is_lease_free
from replanning.errors import JournalCorrupt, LeaseLost, RunOwned, StoreError
from replanning.journal.records import Record
from replanning.journal.store import (
    InboxMessage,
    Lease,
    RunInfo,
    RunStore,
    ToolOutcome,
    check_run_id,
    checksum,
    decode_body,
    is_valid_run_id,
    lease_lost,
    record_out_of_order,
    run_already_exists,
    run_is_gone,
    unknown_run,
)
from replanning.plan.types import RunId

Database: TypeAlias = Any
"""Connection of a dialect: `execute(statement, values)` returns a cursor."""

ResultT = TypeVar("ResultT")

# Statements of all dialects: `{name}` is a table, `:name` a value.

_RUN_IDS: Final = "SELECT id FROM {runs}"

_TAKE_OVER: Final = (
    "UPDATE {runs} SET owner = :owner, epoch = :epoch, until = :until WHERE number = :number"
)

_RENEW: Final = "UPDATE {runs} SET until = :until WHERE id = :run AND epoch = :epoch"

_RELEASE: Final = (
    "UPDATE {runs} SET owner = NULL, epoch = epoch + 1 WHERE id = :run AND epoch = :epoch"
)

_DISCARD: Final = "DELETE FROM {inbox} WHERE run = :number AND number = :message"

_ADD_OUTCOME: Final = """
    INSERT INTO {outcomes} (tool, capability, succeeded, at, seconds)
    VALUES (:tool, :capability, :succeeded, :at, :seconds)
"""

_OUTCOMES: Final = "SELECT tool, capability, succeeded, at, seconds FROM {outcomes}"


class RunRow(NamedTuple):
    """Row of a run, with the number of its last record."""

    number: int
    owner: str | None
    epoch: int
    until: float
    last: int


class SqlStore(RunStore):
    """Base of the stores in a SQL database.

    A run is a row with its owner, the end of its lease and an epoch. Records, messages and outcomes
    are rows of their own. The state that processes compete for is the row of the run, and it
    changes only in a transaction that locks it (in SQLite, the file). Therefore:

    - *Taking over is safe.* `acquire` reads the row under the lock and writes the new owner before
      it releases the lock. Of two processes that want a free run, the second sees the owner that
      the first has written. Each takeover and each release raises the epoch, so the lease of an
      earlier owner never becomes valid again, even if that owner was only slow.
    - *Appending is safe.* The statement that inserts a record also compares the epoch, so nobody
      can take the run over in between. An append that is committed before a takeover is read by
      the new owner, which reads the journal after it has acquired the run; a later one inserts
      nothing and raises LeaseLost. Numbers are the primary key, and a record must follow the last.
    - *The inbox is safe.* Anybody may add a message, and only the owner deletes one, by its id,
      after it has handled it. A message is therefore never lost. If an owner dies between handling
      and deleting one, the next owner recognises it by its id, which is in the records and is
      never reused.

    The database is trusted to keep committed data. Damage is detected when a record is read: each
    has a checksum and a number.

    Attributes:
        table_prefix: beginning of the names of the tables.
        value_form: form of a named value in a statement, as a replacement for `re.sub`.
        row_lock: end of a query that locks the rows it finds, until the transaction ends.
        create_statement: inserts the row of a run, unless its id is taken.
        run_statement: selects the columns of a `RunRow` by the id of the run.
        runs_statement: selects the columns of a `RunInfo` for runs with records, newest first.
        records_statement: selects records by the number of their run and a range.
        read_batch: records that are fetched at a time.
    """

    durable: ClassVar[bool] = True

    table_prefix: ClassVar[str]
    value_form: ClassVar[str]
    row_lock: ClassVar[str]
    create_statement: ClassVar[str]
    run_statement: ClassVar[str]
    runs_statement: ClassVar[str]
    records_statement: ClassVar[str]
    read_batch: ClassVar[int]

    @property
    @abstractmethod
    def _place(self) -> str:
        """Name of the database in errors."""

    @abstractmethod
    def _read(self, request: Callable[[Database], ResultT]) -> ResultT:
        """Return the result of statements that only read.

        Raises:
            StoreError: the database does not respond, or rejects them.
        """

    @abstractmethod
    def _write(
        self, doing: str, request: Callable[[Database], ResultT], *, retried: bool = False
    ) -> ResultT:
        """Return the result of statements that are one transaction, which their errors roll back.

        Args:
            doing: the operation, for error messages.
            request: executes the statements.
            retried: the caller retries while another process holds a lock, so the event loop need
                not wait here.

        Raises:
            StoreError: the database does not respond, or rejects them.
        """

    @abstractmethod
    def _server_time(self, database: Database, at: float) -> float:
        """Convert a time of this process to the clock of leases."""

    @abstractmethod
    def _insert_message(
        self, database: Database, run: RunId, number: int, message: InboxMessage
    ) -> None:
        """Insert a message to the run with this number."""

    @abstractmethod
    def _select_messages(self, database: Database, number: int) -> Sequence[InboxMessage]:
        """Return the messages to the run with this number, oldest first.

        Raises:
            ValueError: a message cannot be read.
        """

    def create(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Insert a row for the run."""
        check_run_id(run)

        def insert(database: Database) -> None:
            until = self._server_time(database, at) + ttl
            values = {"run": run, "owner": owner, "at": at, "until": until}
            if not self._execute(database, self.create_statement, values).rowcount:
                raise run_already_exists(run)

        self._write("take a new run", insert, retried=True)
        return Lease(run, 1, owner)

    def acquire(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Write the new owner with the next epoch into the row of the run, if the run is free."""

        def take_over(database: Database) -> int:
            row = self._run_row(database, run, lock=True)
            now = self._server_time(database, at)
            if not is_lease_free(row.owner, row.until, now):
                raise RunOwned(run, str(row.owner))
            values = {
                "number": row.number,
                "owner": owner,
                "epoch": row.epoch + 1,
                "until": now + ttl,
            }
            self._execute(database, _TAKE_OVER, values)
            return row.epoch + 1

        epoch = self._write("hand over a run", take_over, retried=True)
        return Lease(run, epoch, owner)

    def renew(self, lease: Lease, at: float, ttl: float) -> None:
        """Move the end of the lease in the row of the run."""

        def renew(database: Database) -> None:
            until = self._server_time(database, at) + ttl
            values = {"run": lease.run, "epoch": lease.epoch, "until": until}
            if not self._execute(database, _RENEW, values).rowcount:
                self._owned_row(database, lease)  # raises the reason

        self._write("renew a lease", renew)

    def release(self, lease: Lease) -> None:
        """Begin the next epoch without an owner, which invalidates the lease."""
        values = {"run": lease.run, "epoch": lease.epoch}
        self._write(
            "release a run",
            lambda database: self._execute(database, _RELEASE, values),
            retried=True,
        )

    def read(self, run: RunId, after: int = 0) -> Iterator[Record]:
        """Return the records that exist now, fetched in batches."""
        row = self._read(lambda database: self._run_row(database, run))
        return self._records(run, row, after)

    def runs(self) -> Sequence[RunInfo]:
        """Return all runs from their rows."""
        rows = self._read(lambda database: self._execute(database, self.runs_statement).fetchall())
        return [RunInfo(*row) for row in rows]

    def post(self, run: RunId, message: InboxMessage) -> None:
        """Insert a message."""

        def insert(database: Database) -> None:
            number = self._run_row(database, run).number
            self._insert_message(database, run, number, message)

        self._write("take a message", insert)

    def inbox(self, run: RunId) -> Sequence[InboxMessage]:
        """Return the waiting messages with their ids."""

        def select(database: Database) -> Sequence[InboxMessage]:
            number = self._run_row(database, run).number
            try:
                return self._select_messages(database, number)
            except ValueError as error:
                raise JournalCorrupt(
                    f"{self._place}: a message for run {run!r} cannot be read: {error}; restore "
                    "the database from a copy"
                ) from error

        return self._read(select)

    def discard(self, lease: Lease, messages: Sequence[int]) -> None:
        """Delete messages, as the owner."""

        def delete(database: Database) -> None:
            number = self._owned_row(database, lease, lock=True).number
            for message in messages:
                self._execute(database, _DISCARD, {"number": number, "message": message})

        self._write("discard messages", delete)

    def add_outcomes(self, outcomes: Sequence[ToolOutcome]) -> None:
        """Insert outcomes, all or none."""

        def insert(database: Database) -> None:
            for outcome in outcomes:
                self._execute(database, _ADD_OUTCOME, asdict(outcome))

        if outcomes:
            self._write("take outcomes", insert, retried=True)

    def outcomes(
        self, *, tool: str | None = None, capability: str | None = None, limit: int = 50
    ) -> Sequence[ToolOutcome]:
        """Return the last outcomes, found by an index."""
        # A condition on a column that is not filtered would prevent the use of the index.
        conditions = ["TRUE"]
        if tool is not None:
            conditions.append("tool = :tool")
        if capability is not None:
            conditions.append("capability = :capability")
        where = " AND ".join(conditions)
        statement = f"{_OUTCOMES} WHERE {where} ORDER BY number DESC LIMIT :limit"
        values = {"tool": tool, "capability": capability, "limit": limit}
        rows = self._read(lambda database: self._execute(database, statement, values).fetchall())
        return [
            ToolOutcome(name, kind, bool(succeeded), at, seconds)
            for name, kind, succeeded, at, seconds in rows
        ]

    def _execute(
        self, database: Database, statement: str, values: dict[str, Any] | None = None
    ) -> Any:
        """Execute a statement of all dialects, and return its cursor."""
        return database.execute(
            _in_dialect(statement, self.table_prefix, self.value_form), values or {}
        )

    def _run_row(self, database: Database, run: RunId, *, lock: bool = False) -> RunRow:
        """Return the row of a run; with `lock` it cannot change until the transaction ends.

        Raises:
            UnknownRun: the run does not exist.
        """
        row = self._find_row(database, run, lock=lock)
        if row is None:
            known = self._execute(database, _RUN_IDS).fetchall()
            raise unknown_run(run, [name for (name,) in known])
        return row

    def _owned_row(self, database: Database, lease: Lease, *, lock: bool = False) -> RunRow:
        """Return the row of a run whose lease is current.

        Raises:
            LeaseLost: it is not, or the run is gone.
        """
        row = self._find_row(database, lease.run, lock=lock)
        if row is None:
            raise self._no_such_run(lease)
        if row.epoch != lease.epoch:
            raise lease_lost(lease)
        return row

    def _no_such_run(self, lease: Lease) -> LeaseLost:
        return run_is_gone(lease.run, f"{self._place} no longer has this run")

    def _find_row(self, database: Database, run: RunId, *, lock: bool) -> RunRow | None:
        if not is_valid_run_id(run):  # some ids cannot be sent to a database
            return None
        statement = self.run_statement
        if lock:
            statement += self.row_lock
        row = self._execute(database, statement, {"run": run}).fetchone()
        if row is None:
            return None
        return RunRow(*row)

    def _refuse(self, database: Database, lease: Lease, record: Record) -> StoreError:
        """Return the error for a record that was not inserted: a lost lease, or its number."""
        row = self._owned_row(database, lease)
        return record_out_of_order(lease, record, row.last)

    def _records(self, run: RunId, row: RunRow, after: int) -> Iterator[Record]:
        # In batches, so that an unfinished loop holds no snapshot open and memory stays bounded.
        for start in range(after, row.last, self.read_batch):
            end = min(start + self.read_batch, row.last)
            values = {"number": row.number, "start": start, "end": end}
            rows = self._read(
                lambda database: self._execute(
                    database,
                    self.records_statement,
                    values,  # noqa: B023 - called at once
                ).fetchall()
            )
            found = {columns[0]: columns for columns in rows}
            for seq in range(start + 1, end + 1):
                try:
                    record = _decode(found.get(seq))
                except ValueError as error:
                    problem = f"record {seq} of run {run!r} cannot be read: {error}"
                    advice = "restore it from a copy, or fork the run from a revision before it"
                    raise JournalCorrupt(f"{self._place}: {problem}; {advice}") from error
                yield record


@cache
def _in_dialect(statement: str, table_prefix: str, value_form: str) -> str:
    """Return a statement with the tables and values of a dialect."""
    named = re.sub(r"\{(\w+)\}", rf"{table_prefix}\1", statement)
    return re.sub(r":(\w+)", value_form, named)


def _decode(columns: tuple[Any, ...] | None) -> Record:
    """Return the record in a row; texts may be bytes, because damaged text need not be UTF-8.

    Raises:
        ValueError: it is missing, its checksum is wrong, or its text is not such a record.
    """
    if columns is None:
        raise ValueError("it is missing")
    seq, at, kind, data, crc = columns
    if isinstance(kind, bytes):
        kind = kind.decode(errors="replace")
    if isinstance(data, str):
        data = data.encode()
    if crc != checksum(data, seq, at, kind):
        raise ValueError("it was damaged or changed: its checksum is wrong")
    return Record(seq, at, decode_body(kind, data))
