"""Store in a PostgreSQL database, which several hosts share: `replanning.ReplanningEngine(store="postgresql://…")`."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import astuple
from queue import SimpleQueue
from typing import Any, ClassVar, Final, TypeVar

from replanning.errors import JournalCorrupt, LeaseLost, RunOwned, StoreError
from replanning.journal.owner import is_lease_free
from replanning.journal.records import Record, RunOpened
from replanning.journal.store import (
    STATUS_RECORDS,
    InboxMessage,
    Lease,
    RunInfo,
    RunStore,
    ToolOutcome,
    check_run_id,
    checksum,
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

try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict, make_conninfo
    from psycopg_pool import ConnectionPool
except ImportError as error:
    raise ImportError(
        f'the PostgreSQL store needs psycopg 3 with its pool: pip install "replanning[postgres]" ({error})'
    ) from error

ResultT = TypeVar("ResultT")

_MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
    (  # 0 to 1
        """CREATE TABLE replanning_runs (
            number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            name TEXT NOT NULL DEFAULT '',
            objective TEXT NOT NULL DEFAULT '',
            status TEXT NOT NULL DEFAULT 'running',
            created DOUBLE PRECISION NOT NULL,
            updated DOUBLE PRECISION NOT NULL,
            records BIGINT NOT NULL DEFAULT 0,
            owner TEXT,
            epoch BIGINT NOT NULL DEFAULT 1,
            until DOUBLE PRECISION NOT NULL
        )""",
        """CREATE TABLE replanning_records (
            run BIGINT NOT NULL REFERENCES replanning_runs (number),
            seq BIGINT NOT NULL,
            at DOUBLE PRECISION NOT NULL,
            kind TEXT NOT NULL,
            data TEXT NOT NULL,
            crc BIGINT NOT NULL,
            PRIMARY KEY (run, seq)
        )""",
        """CREATE TABLE replanning_inbox (
            number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            run BIGINT NOT NULL REFERENCES replanning_runs (number),
            message TEXT NOT NULL
        )""",
        "CREATE INDEX replanning_inbox_of_run ON replanning_inbox (run)",
        """CREATE TABLE replanning_outcomes (
            number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            tool TEXT NOT NULL,
            capability TEXT,
            succeeded BOOLEAN NOT NULL,
            at DOUBLE PRECISION NOT NULL,
            seconds DOUBLE PRECISION
        )""",
        "CREATE INDEX replanning_outcomes_of_tool ON replanning_outcomes (tool)",
        "CREATE INDEX replanning_outcomes_of_capability ON replanning_outcomes (capability)",
    ),
)
"""Statements that lead from each version of the schema to the next; only add to them."""

SCHEMA_VERSION: Final = len(_MIGRATIONS)
"""Version of the schema that this library writes, kept in the table `replanning_schema`."""

_LOCK_KEY: Final = 0x5265506C
"""First key of the advisory locks of this library."""

_CHANNEL: Final = "replanning_inbox"

_READ_BATCH_SIZE: Final = 1_000

_MAX_CONNECTIONS: Final = 4

_LISTEN_SECONDS: Final = 5.0
"""Seconds after which an inbox is read although no message was notified, in case a notification was lost."""

_LIMITS: Final = {
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "5000",
    "application_name": "replanning",
}

# Checks lease and number, and counts and inserts the record, in one statement, which is a transaction of its own.
_APPEND_SQL: Final = """
    WITH run AS (
        UPDATE replanning_runs SET records = %(seq)s, updated = %(at)s, status = coalesce(%(status)s, status),
            name = coalesce(%(name)s, name), objective = coalesce(%(objective)s, objective)
        WHERE id = %(run)s AND epoch = %(epoch)s AND records = %(seq)s - 1 RETURNING number
    )
    INSERT INTO replanning_records SELECT number, %(seq)s, %(at)s, %(kind)s, %(data)s, %(crc)s FROM run
"""

_UNDO_SQL: Final = """
    WITH run AS (
        UPDATE replanning_runs SET records = %(seq)s - 1, status = %(status)s
        WHERE id = %(run)s AND epoch = %(epoch)s AND records = %(seq)s RETURNING number
    )
    DELETE FROM replanning_records USING run WHERE run = run.number AND seq = %(seq)s
"""

_LAST_STATUS_SQL: Final = """
    SELECT records.kind, records.data FROM replanning_records AS records JOIN replanning_runs ON run = number
    WHERE id = %(run)s AND seq < %(seq)s AND kind = ANY(%(kinds)s) ORDER BY seq DESC LIMIT 1
"""

_RENEW_SQL: Final = """
    UPDATE replanning_runs AS runs SET until = %s FROM unnest(%s::text[], %s::bigint[]) AS held (run, epoch)
    WHERE runs.id = held.run AND runs.epoch = held.epoch RETURNING runs.id, runs.epoch
"""

_RUN_SQL: Final = "SELECT number, records, owner, epoch, until FROM replanning_runs WHERE id = %s"

_RUNS_SQL: Final = """
    SELECT id, name, objective, status, created, updated, records, owner FROM replanning_runs
    WHERE records > 0 ORDER BY created DESC, number DESC
"""

_OUTCOMES_SQL: Final = """
    SELECT tool, capability, succeeded, at, seconds FROM replanning_outcomes
    WHERE {} ORDER BY number DESC LIMIT %(limit)s
"""


class PostgresStore(RunStore):
    """Store in a PostgreSQL database. Any number of processes on any number of hosts may use it.

    The tables are created, or migrated, when the store is opened; they are in the first schema of the search path. Leases
    are compared by the clock of the server. Once a record is appended, it is as durable as the server's commits. Where a
    connection is lost during an append, the store withdraws the record, if the server has it, before it takes the next.

    Args:
        place: the address, as in `postgresql://user@host/database`, or `key=value` pairs as libpq takes them; what it
            leaves out comes from libpq's variables, such as `PGHOST`. Give a password in `PGPASSWORD`, in a password file
            or in a service file.
        timeout: seconds after which a request that the server does not answer has failed.

    Raises:
        StoreError: the server does not answer, or the tables were written by a newer version.
    """

    durable: ClassVar[bool] = True

    def __init__(self, place: str = "", *, timeout: float = 5.0) -> None:
        address = f"postgresql:{place}" if place.startswith("//") else place
        try:
            self._address = make_conninfo(
                address, **_LIMITS, connect_timeout=str(max(2, round(timeout)))
            )
        except psycopg.Error as error:
            raise StoreError(
                f"this is no address of a PostgreSQL database: {_first_line(error)}"
            ) from None
        known = conninfo_to_dict(address)
        self._name = (
            "/".join(str(known[key]) for key in ("host", "service", "dbname") if known.get(key))
            or "the database"
        )
        self._timeout = timeout
        self._threads = _Workers(_MAX_CONNECTIONS)
        self._doubtful: dict[RunId, tuple[dict[str, object], Future[None]]] = {}
        self._closed = threading.Event()
        self._pool = ConnectionPool(
            self._address,
            min_size=1,
            max_size=_MAX_CONNECTIONS,
            kwargs={"autocommit": True},
            open=False,
            timeout=timeout * 0.8,
        )
        self._listener = _Listener(self._address, self._closed)
        try:
            self._result("be opened", self._threads.submit(self._open))
        except BaseException:
            self.close()
            raise
        self._listener.start()

    def __repr__(self) -> str:
        return f"<PostgresStore {self._name!r}>"

    def create(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Insert a row for the run."""
        check_run_id(run)

        def insert(database: psycopg.Connection) -> None:
            at_server = at + _clock_difference(database)
            try:
                database.execute(
                    "INSERT INTO replanning_runs (id, created, updated, owner, until) VALUES (%s, %s, %s, %s, %s)",
                    (run, at, at, owner, at_server + ttl),
                )
            except psycopg.errors.UniqueViolation as error:
                raise run_already_exists(run) from error

        self._ask("take a new run", insert)
        return Lease(run, 1, owner)

    def acquire(self, run: RunId, owner: str, at: float, ttl: float) -> Lease:
        """Write the new owner with the next epoch into the row of the run."""

        def hand_over(database: psycopg.Connection) -> int:
            with database.transaction():
                _, _, former, epoch, until = self._run(database, run, lock=True)
                at_server = at + _clock_difference(database)
                if not is_lease_free(former, until, at_server):
                    raise RunOwned(run, former)
                database.execute(
                    "UPDATE replanning_runs SET owner = %s, epoch = epoch + 1, until = %s WHERE id = %s",
                    (owner, at_server + ttl, run),
                )
                return int(epoch) + 1

        return Lease(run, self._ask("hand over a run", hand_over), owner)

    def renew(self, lease: Lease, at: float, ttl: float) -> None:
        """Move the end of the lease in the row of the run."""
        for error in self.renew_all([lease], at, ttl).values():
            raise error

    def renew_all(
        self, leases: Sequence[Lease], at: float, ttl: float
    ) -> Mapping[Lease, LeaseLost]:
        """Move the ends of the leases in the rows of their runs, in one statement."""

        def renew(database: psycopg.Connection) -> set[tuple[object, ...]]:
            values = (
                at + _clock_difference(database) + ttl,
                [lease.run for lease in leases],
                [lease.epoch for lease in leases],
            )
            return set(database.execute(_RENEW_SQL, values).fetchall())

        renewed = self._ask("renew leases", renew)
        return {lease: lease_lost(lease) for lease in leases if lease[:2] not in renewed}

    def release(self, lease: Lease) -> None:
        """Begin the next epoch without an owner, which invalidates the lease."""

        def release(database: psycopg.Connection) -> None:
            database.execute(
                "UPDATE replanning_runs SET owner = NULL, epoch = epoch + 1 WHERE id = %s AND epoch = %s",
                (lease.run, lease.epoch),
            )

        self._ask("release a run", release)

    def append(self, lease: Lease, record: Record) -> None:
        """Count and insert the record, which does nothing if the lease is not current."""
        seq, at, body = record
        kind, data, status = body.kind, encode_body(record), status_after(body)
        row: dict[str, object] = {
            "run": lease.run,
            "epoch": lease.epoch,
            "seq": seq,
            "at": at,
            "kind": kind,
            "data": data,
            "status": status,
            "crc": checksum(data.encode(), seq, float(at), kind),
            **dict.fromkeys(("name", "objective")),
        }
        if isinstance(body, RunOpened):
            row["name"], row["objective"] = (text.replace("\0", "�") for text in run_title(body))

        doubtful, doubted = self._doubtful.get(lease.run, (None, None))
        doing = f"take record {seq} of run {lease.run!r}"
        if doubted is not None and not doubted.done():
            raise _Unanswered(
                f"{self._name} cannot {doing}: the server has not answered an earlier request"
            )

        def insert(database: psycopg.Connection) -> None:
            if doubtful is not None:
                self._withdraw(database, doubtful)
            if not database.execute(_APPEND_SQL, row).rowcount:
                found = database.execute(_RUN_SQL, (lease.run,)).fetchone()
                if found is None or found[3] != lease.epoch:
                    raise lease_lost(lease)
                raise record_out_of_order(lease, record, found[1])

        future = self._submit(doing, insert)
        try:
            self._result(doing, future)
        except _Unanswered:
            self._doubtful[lease.run] = row, future
            raise
        self._doubtful.pop(lease.run, None)

    def read(self, run: RunId, after: int = 0) -> Iterator[Record]:
        """Return the records that exist now, fetched in batches."""
        number, end, *_ = self._ask("be read", lambda database: self._run(database, run))
        return self._records(run, number, after, end)

    def runs(self) -> Sequence[RunInfo]:
        """Return all runs from their rows."""
        rows = self._ask("be read", lambda database: database.execute(_RUNS_SQL).fetchall())
        return [RunInfo(*row) for row in rows]

    def post(self, run: RunId, message: InboxMessage) -> None:
        """Insert a message and notify the owner of the run."""
        text = to_json_line([message.kind, message.at, message.by, message.payload])

        def insert(database: psycopg.Connection) -> None:
            with database.transaction():
                number, *_ = self._run(database, run)
                # One after the other, so that messages become visible in the order of their numbers.
                database.execute("SELECT pg_advisory_xact_lock(%s, hashtext(%s))", (_LOCK_KEY, run))
                database.execute(
                    "INSERT INTO replanning_inbox (run, message) VALUES (%s, %s)", (number, text)
                )
                database.execute("SELECT pg_notify(%s, %s)", (_CHANNEL, run))

        self._ask("take a message", insert)

    def inbox(self, run: RunId) -> Sequence[InboxMessage]:
        """Return the waiting messages with their ids; the server is asked only if it has notified of one."""
        if self._listener.is_known_empty(run):
            return ()

        def select(database: psycopg.Connection) -> list[tuple[int, str]]:
            number, *_ = self._run(database, run)
            query = "SELECT number, message FROM replanning_inbox WHERE run = %s ORDER BY number"
            return database.execute(query, (number,)).fetchall()

        notified = self._listener.notified
        messages = [
            InboxMessage(kind, at, by, payload, number)
            for number, text in self._ask("be read", select)
            for kind, at, by, payload in [json.loads(text)]
        ]
        if not messages:
            self._listener.mark_empty(run, notified)
        return messages

    def discard(self, lease: Lease, messages: Sequence[int]) -> None:
        """Delete messages, as the owner."""

        def delete(database: psycopg.Connection) -> None:
            with database.transaction():
                found = database.execute(f"{_RUN_SQL} FOR SHARE", (lease.run,)).fetchone()
                if found is None or found[3] != lease.epoch:
                    raise lease_lost(lease)
                query = "DELETE FROM replanning_inbox WHERE run = %s AND number = ANY(%s)"
                database.execute(query, (found[0], list(messages)))

        self._ask("discard messages", delete)

    def add_outcomes(self, outcomes: Sequence[ToolOutcome]) -> None:
        """Insert outcomes, all or none."""
        query = "INSERT INTO replanning_outcomes (tool, capability, succeeded, at, seconds) VALUES (%s, %s, %s, %s, %s)"
        rows = list(map(astuple, outcomes))

        def insert(database: psycopg.Connection) -> None:
            with database.transaction(), database.cursor() as cursor:
                cursor.executemany(query, rows)

        if rows:
            self._ask("take outcomes", insert)

    def outcomes(
        self, *, tool: str | None = None, capability: str | None = None, limit: int = 50
    ) -> Sequence[ToolOutcome]:
        """Return the last outcomes, found by an index."""
        wanted = {"tool": tool, "capability": capability}
        where = " AND ".join(
            f"{column} = %({column})s" for column, value in wanted.items() if value is not None
        )
        query = _OUTCOMES_SQL.format(where or "TRUE")
        values = {**wanted, "limit": limit}
        rows = self._ask("be read", lambda database: database.execute(query, values).fetchall())
        return [ToolOutcome(*row) for row in rows]

    def close(self) -> None:
        """Close the connections."""
        if not self._closed.is_set():
            self._closed.set()
            self._threads.submit(self._pool.close)
            self._threads.stop()

    def _run(
        self, database: psycopg.Connection, run: RunId, *, lock: bool = False
    ) -> tuple[Any, ...]:
        row = None
        if is_valid_run_id(run):
            row = database.execute(
                f"{_RUN_SQL} FOR UPDATE" if lock else _RUN_SQL, (run,)
            ).fetchone()
        if row is None:
            raise unknown_run(
                run, [known for (known,) in database.execute("SELECT id FROM replanning_runs")]
            )
        return row

    def _withdraw(self, database: psycopg.Connection, row: Mapping[str, object]) -> None:
        """Remove a record that was given up, if the server has taken it all the same."""
        with database.transaction():
            kinds = [kind.kind for kind in STATUS_RECORDS]
            found = database.execute(_LAST_STATUS_SQL, {**row, "kinds": kinds}).fetchone()
            status = status_after(decode_body(*found)) if found else "running"
            database.execute(_UNDO_SQL, {**row, "status": status})

    def _records(self, run: RunId, number: int, after: int, end: int) -> Iterator[Record]:
        query = "SELECT seq, at, kind, data, crc FROM replanning_records WHERE run = %s AND seq > %s AND seq <= %s ORDER BY seq"
        for start in range(after, end, _READ_BATCH_SIZE):
            numbers = range(start + 1, min(start + _READ_BATCH_SIZE, end) + 1)
            values = number, start, numbers[-1]
            found = self._ask(
                "be read",
                lambda database: database.execute(query, values).fetchall(),  # noqa: B023
            )
            rows = {seq: rest for seq, *rest in found}
            for seq in numbers:
                try:
                    if seq not in rows:
                        raise ValueError("it is missing")
                    at, kind, data, crc = rows[seq]
                    if crc != checksum(data.encode(), seq, at, kind):
                        raise ValueError("it was damaged or changed: its checksum is wrong")
                    body = decode_body(kind, data)
                except ValueError as error:
                    raise JournalCorrupt(
                        f"{self._name}: record {seq} of run {run!r} cannot be read: {error}; restore the database from "
                        "a copy, or fork the run from a revision before this record"
                    ) from error
                yield Record(seq, at, body)

    def _ask(self, doing: str, request: Callable[[psycopg.Connection], ResultT]) -> ResultT:
        """Return the result of a request.

        Raises:
            StoreError: the server did not answer, or refused the request.
        """
        return self._result(doing, self._submit(doing, request))

    def _submit(
        self, doing: str, request: Callable[[psycopg.Connection], ResultT]
    ) -> Future[ResultT]:
        """Make a request in a thread, because the server may never answer it."""
        if self._closed.is_set():
            raise StoreError(f"{self._name} cannot {doing}: the store was closed")

        def ask() -> ResultT:
            with self._pool.connection() as database:
                return request(database)

        return self._threads.submit(ask)

    def _result(self, doing: str, future: Future[ResultT]) -> ResultT:
        """Wait for the answer to a request.

        Raises:
            StoreError: there is none, or it is an error.
        """
        try:
            return future.result(self._timeout)
        except FutureTimeout:
            future.cancel()
            text = f"{self._name} cannot {doing}: the server has not answered within {self._timeout:g} s"
            raise _Unanswered(text) from None
        except psycopg.Error as error:
            lost = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
            raise (_Unanswered if lost else StoreError)(
                f"{self._name} cannot {doing}: {_first_line(error)}"
            ) from None

    def _open(self) -> None:
        """Migrate the tables to the current version, all or nothing, and open the pool."""
        with psycopg.connect(self._address) as database:
            database.execute("SELECT pg_advisory_xact_lock(%s, 0)", (_LOCK_KEY,))
            encoding = database.info.parameter_status("server_encoding")
            if encoding != "UTF8":
                raise StoreError(
                    f"{self._name} cannot be used: its encoding is {encoding}; create it with ENCODING 'UTF8'"
                )
            database.execute(
                "CREATE TABLE IF NOT EXISTS replanning_schema (version INTEGER NOT NULL)"
            )
            found = database.execute("SELECT version FROM replanning_schema").fetchone()
            version = found[0] if found else 0
            if version > SCHEMA_VERSION:
                raise StoreError(
                    f"{self._name} has version {version} of the schema, and this library knows versions up to "
                    f"{SCHEMA_VERSION}: it was written by a newer version of replanning; upgrade the library"
                )
            for statement in (each for statements in _MIGRATIONS[version:] for each in statements):
                database.execute(statement)
            if not found:
                database.execute("INSERT INTO replanning_schema VALUES (%s)", (SCHEMA_VERSION,))
            elif version != SCHEMA_VERSION:
                database.execute("UPDATE replanning_schema SET version = %s", (SCHEMA_VERSION,))
        self._pool.open()


class _Unanswered(StoreError):
    """The server did not answer, so it is not known whether it has carried out the request."""


class _Listener(threading.Thread):
    """Thread that listens to notifications of new messages, so that inboxes need not be read again and again.

    Attributes:
        notified: the number of notifications, lost connections included.
    """

    def __init__(self, address: str, closed: threading.Event) -> None:
        super().__init__(name="replanning-postgres-listener", daemon=True)
        self.notified = 0
        self._address, self._closed = address, closed
        self._lock = threading.Lock()
        self._listening = False
        self._empty_since: dict[str, float] = {}

    def run(self) -> None:
        """Listen until the store is closed, on a new connection after each failure."""
        while not self._closed.is_set():
            with (
                suppress(psycopg.Error),
                psycopg.connect(self._address, autocommit=True) as database,
            ):
                database.execute(f"LISTEN {_CHANNEL}")
                self._listening = True
                while not self._closed.is_set():
                    for notification in database.notifies(timeout=0.5):
                        self._count(notification.payload)
            self._listening = False
            self._count()
            self._closed.wait(1)

    def is_known_empty(self, run: str) -> bool:
        """Return whether an inbox was empty a short time ago, and no message was notified since."""
        since = self._empty_since.get(run)
        return since is not None and time.monotonic() - since < _LISTEN_SECONDS

    def mark_empty(self, run: str, notified: int) -> None:
        """Remember that an inbox was empty when this number of notifications had come."""
        with self._lock:
            if self._listening and self.notified == notified:
                self._empty_since[run] = time.monotonic()

    def _count(self, run: str | None = None) -> None:
        with self._lock:
            self.notified += 1
            if run is None:
                self._empty_since.clear()
            else:
                self._empty_since.pop(run, None)


class _Workers:
    """Daemon threads that make requests: a program can end although a server has not answered."""

    def __init__(self, number: int) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], object]] | None] = SimpleQueue()
        self._number = number
        for _ in range(number):
            threading.Thread(target=self._work, name="replanning-postgres", daemon=True).start()

    def submit(self, request: Callable[[], ResultT]) -> Future[ResultT]:
        """Make a request in one of the threads."""
        future: Future[ResultT] = Future()
        self._queue.put((future, request))
        return future

    def stop(self) -> None:
        """End the threads after the requests that are waiting."""
        for _ in range(self._number):
            self._queue.put(None)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            future, request = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(request())
                except BaseException as error:  # noqa: BLE001 - raised where the result is wanted
                    future.set_exception(error)


def _clock_difference(database: psycopg.Connection) -> int:
    """Return by how many seconds the clock of the server is ahead of this machine's.

    In whole seconds, because the way to the server takes time, and times of one machine must stay comparable.
    """
    row = database.execute("SELECT extract(epoch FROM clock_timestamp())").fetchone()
    assert row is not None
    return round(float(row[0]) - time.time())  # noqa: TID251 - leases are counted by the time of day


def _first_line(error: psycopg.Error) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
