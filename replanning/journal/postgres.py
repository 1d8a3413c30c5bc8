"""Store in a PostgreSQL database, which several hosts share.

`replanning.ReplanningEngine(store="postgresql://…")` opens one.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar, Final

from replanning.errors import LeaseLost, StoreError
from replanning.journal.records import Record, RunOpened
from replanning.journal.sql import Database, ResultT, SqlStore
from replanning.journal.store import (
    STATUS_RECORDS,
    InboxMessage,
    Lease,
    checksum,
    decode_body,
    encode_body,
    lease_lost,
    run_is_gone,
    run_title,
    status_after,
    to_json_line,
)
from replanning.plan.types import RunId

try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict, make_conninfo
    from psycopg_pool import ConnectionPool, PoolTimeout
except ImportError as error:
    raise ImportError(
        "the PostgreSQL store needs psycopg 3 with its pool: "
        f'pip install "replanning[postgres]" ({error})'
    ) from error

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
"""Statements that migrate each version of the schema to the next; only add to them."""

SCHEMA_VERSION: Final = len(_MIGRATIONS)
"""Version of the schema that this library writes, kept in the table `replanning_schema`."""

_LOCK_KEY: Final = 0x5265506C
"""First key of the advisory locks of this library."""

_CHANNEL: Final = "replanning_inbox"

_MAX_CONNECTIONS: Final = 4

_LISTEN_SECONDS: Final = 5.0
"""Seconds after which an inbox is read without a notification, in case one was lost."""

_CONNECTING_PART: Final = 0.8
"""Share of the time limit of a request for getting a connection."""

_UNREACHABLE_SECONDS: Final = 0.1
"""Seconds that a request waits for a connection if the previous one got none.

The pool connects in the background, and the event loop of a run must not be blocked.
"""

_LIMITS: Final = {
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "5000",
    "application_name": "replanning",
}

# Checks lease and number, and counts and inserts the record, in one statement, which is a
# transaction of its own.
_APPEND_SQL: Final = """
    WITH run AS (
        UPDATE replanning_runs SET records = %(seq)s, updated = %(at)s,
            status = coalesce(%(status)s, status),
            name = coalesce(%(name)s, name), objective = coalesce(%(objective)s, objective)
        WHERE id = %(run)s AND epoch = %(epoch)s AND records = %(seq)s - 1 RETURNING number
    )
    INSERT INTO replanning_records
    SELECT number, %(seq)s, %(at)s, %(kind)s, %(data)s, %(crc)s FROM run
"""

_UNDO_SQL: Final = """
    WITH run AS (
        UPDATE replanning_runs SET records = %(seq)s - 1, status = %(status)s
        WHERE id = %(run)s AND epoch = %(epoch)s AND records = %(seq)s RETURNING number
    )
    DELETE FROM replanning_records USING run WHERE run = run.number AND seq = %(seq)s
"""

_LAST_STATUS_SQL: Final = """
    SELECT records.kind, records.data
    FROM replanning_records AS records JOIN replanning_runs ON run = number
    WHERE id = %(run)s AND seq < %(seq)s AND kind = ANY(%(kinds)s) ORDER BY seq DESC LIMIT 1
"""

_RENEW_SQL: Final = """
    UPDATE replanning_runs AS runs SET until = %s
    FROM unnest(%s::text[], %s::bigint[]) AS held (run, epoch)
    WHERE runs.id = held.run AND runs.epoch = held.epoch RETURNING runs.id, runs.epoch
"""


class PostgresStore(SqlStore):
    """Store in a PostgreSQL database. Any number of processes on any number of hosts may use it.

    The tables are created, or migrated, when the store is opened; they are in the first schema of
    the search path. Leases are compared by the clock of the server. Once a record is appended, it
    is as durable as the server's commits. If a connection is lost during an append, the store
    removes the record, in case the server has it, before the next append.

    Args:
        place: the address, as in `postgresql://user@host/database`, or `key=value` pairs as libpq
            takes them; missing parts come from libpq's variables, such as `PGHOST`. Give a
            password in `PGPASSWORD`, in a password file or in a service file.
        timeout: seconds after which an unanswered request fails.

    Raises:
        StoreError: the server does not answer, or the tables were written by a newer version.
    """

    table_prefix: ClassVar = "replanning_"
    value_form: ClassVar = r"%(\1)s"
    row_lock: ClassVar = " FOR UPDATE"
    create_statement: ClassVar = """
        INSERT INTO {runs} (id, created, updated, owner, until)
        VALUES (:run, :at, :at, :owner, :until) ON CONFLICT (id) DO NOTHING
    """
    run_statement: ClassVar = (
        "SELECT number, owner, epoch, until, records FROM {runs} WHERE id = :run"
    )
    runs_statement: ClassVar = """
        SELECT id, name, objective, status, created, updated, records, owner FROM {runs}
        WHERE records > 0 ORDER BY created DESC, number DESC
    """
    records_statement: ClassVar = """
        SELECT seq, at, kind, data, crc FROM {records}
        WHERE run = :number AND seq > :start AND seq <= :end
    """
    read_batch: ClassVar = 1_000

    def __init__(self, place: str = "", *, timeout: float = 5.0) -> None:
        address = f"postgresql:{place}" if place.startswith("//") else place
        limit = str(max(2, round(timeout)))
        try:
            server = make_conninfo(address, **_LIMITS, connect_timeout=limit)
        except psycopg.Error as error:
            problem = "this is not the address of a PostgreSQL database"
            raise StoreError(f"{problem}: {_first_line(error)}") from None
        self._name = _database_name(address)
        self._timeout = timeout
        self._threads = _Workers(_MAX_CONNECTIONS)
        self._doubtful: dict[RunId, tuple[dict[str, object], Future[None]]] = {}
        self._closed = threading.Event()
        self._pool = ConnectionPool(
            server,
            min_size=1,
            max_size=_MAX_CONNECTIONS,
            kwargs={"autocommit": True},
            open=False,
            timeout=timeout * _CONNECTING_PART,
            # Otherwise the pauses of the pool grow, and it notices a returning server too late.
            reconnect_timeout=timeout,
        )
        self._listener = _Listener(server, self._closed)
        try:
            self._result("be opened", self._threads.submit(partial(self._open, server)))
        except BaseException:
            self.close()
            raise
        self._listener.start()

    def __repr__(self) -> str:
        return f"<PostgresStore {self._name!r}>"

    def renew_all(
        self, leases: Sequence[Lease], at: float, ttl: float
    ) -> Mapping[Lease, LeaseLost]:
        """Move the ends of the leases in the rows of their runs, in one statement."""

        def renew(database: psycopg.Connection) -> dict[Lease, LeaseLost]:
            until = self._server_time(database, at) + ttl
            runs = [lease.run for lease in leases]
            epochs = [lease.epoch for lease in leases]
            try:
                rows = database.execute(_RENEW_SQL, (until, runs, epochs)).fetchall()
            except psycopg.errors.UndefinedTable as error:
                return {lease: self._no_table(lease, error) for lease in leases}
            renewed = set(rows)
            lost: dict[Lease, LeaseLost] = {}
            for lease in leases:
                if (lease.run, lease.epoch) in renewed:
                    continue
                lost[lease] = lease_lost(lease)
                if self._find_row(database, lease.run, lock=False) is None:
                    lost[lease] = self._no_such_run(lease)
            return lost

        return self._ask("renew leases", renew)

    def append(self, lease: Lease, record: Record) -> None:
        """Count and insert the record in one statement, which fails if the lease is not current."""
        seq, at, body = record
        data = encode_body(record)
        row: dict[str, object] = {
            "run": lease.run,
            "epoch": lease.epoch,
            "seq": seq,
            "at": at,
            "kind": body.kind,
            "data": data,
            "status": None,
            "crc": checksum(data.encode(), seq, float(at), body.kind),
            "name": None,
            "objective": None,
        }
        if isinstance(body, STATUS_RECORDS):
            row["status"] = status_after(body)
        if isinstance(body, RunOpened):
            name, objective = run_title(body)
            row["name"] = name.replace("\0", "�")
            row["objective"] = objective.replace("\0", "�")

        doubtful, doubted = self._doubtful.get(lease.run, (None, None))
        doing = f"take record {seq} of run {lease.run!r}"
        if doubted is not None and not doubted.done():
            raise _Unanswered(
                f"{self._name} cannot {doing}: the server has not answered an earlier request"
            )

        def insert(database: psycopg.Connection) -> None:
            if doubtful is not None:
                self._withdraw(database, doubtful)
            try:
                inserted = database.execute(_APPEND_SQL, row).rowcount
            except psycopg.errors.UndefinedTable as error:
                raise self._no_table(lease, error) from error
            if not inserted:
                raise self._refuse(database, lease, record)

        future = self._submit(doing, partial(self._use_connection, insert))
        try:
            self._result(doing, future)
        except _Unanswered:
            self._doubtful[lease.run] = row, future
            raise
        self._doubtful.pop(lease.run, None)

    def inbox(self, run: RunId) -> Sequence[InboxMessage]:
        """Return the waiting messages with their ids.

        The server is queried only after a notification, or if the last query was some time ago.
        """
        if self._listener.is_known_empty(run):
            return ()
        notified = self._listener.notified
        messages = super().inbox(run)
        if not messages:
            self._listener.mark_empty(run, notified)
        return messages

    def close(self) -> None:
        """Close the connections."""
        if not self._closed.is_set():
            self._closed.set()
            self._threads.submit(self._pool.close)
            self._threads.stop()

    @property
    def _place(self) -> str:
        return self._name

    def _read(self, request: Callable[[Database], ResultT]) -> ResultT:
        return self._result("be read", self._submit("be read", partial(self._ask_twice, request)))

    def _write(
        self, doing: str, request: Callable[[Database], ResultT], *, retried: bool = False
    ) -> ResultT:
        def transaction(database: psycopg.Connection) -> ResultT:
            with database.transaction():
                return request(database)

        return self._ask(doing, transaction)

    def _server_time(self, database: psycopg.Connection, at: float) -> float:
        # In whole seconds, because the way to the server takes time, and times of one machine must
        # stay comparable.
        row = database.execute("SELECT extract(epoch FROM clock_timestamp())").fetchone()
        assert row is not None
        ahead = float(row[0]) - time.time()  # noqa: TID251 - leases are counted by the time of day
        return at + round(ahead)

    def _insert_message(
        self, database: psycopg.Connection, run: RunId, number: int, message: InboxMessage
    ) -> None:
        text = to_json_line([message.kind, message.at, message.by, message.payload])
        # One after the other, so that messages become visible in the order of their numbers.
        database.execute("SELECT pg_advisory_xact_lock(%s, hashtext(%s))", (_LOCK_KEY, run))
        database.execute(
            "INSERT INTO replanning_inbox (run, message) VALUES (%s, %s)", (number, text)
        )
        database.execute("SELECT pg_notify(%s, %s)", (_CHANNEL, run))

    def _select_messages(self, database: psycopg.Connection, number: int) -> Sequence[InboxMessage]:
        rows = database.execute(
            "SELECT number, message FROM replanning_inbox WHERE run = %s ORDER BY number", (number,)
        )
        messages = []
        for message, text in rows:
            kind, at, by, payload = json.loads(text)
            messages.append(InboxMessage(kind, at, by, payload, message))
        return messages

    def _no_table(self, lease: Lease, error: psycopg.Error) -> LeaseLost:
        """Return the error for a run whose table was dropped."""
        return run_is_gone(lease.run, f"a table of {self._name} was dropped: {_first_line(error)}")

    def _withdraw(self, database: psycopg.Connection, row: Mapping[str, object]) -> None:
        """Remove a record whose append went unanswered, in case the server has stored it."""
        with database.transaction():
            kinds = [kind.kind for kind in STATUS_RECORDS]
            found = database.execute(_LAST_STATUS_SQL, {**row, "kinds": kinds}).fetchone()
            status = "running"
            if found is not None:
                body = decode_body(*found)
                assert isinstance(body, STATUS_RECORDS), "only these kinds were asked for"
                status = status_after(body)
            database.execute(_UNDO_SQL, {**row, "status": status})

    def _ask(self, doing: str, request: Callable[[psycopg.Connection], ResultT]) -> ResultT:
        """Make a request once, and wait for the answer."""
        return self._result(doing, self._submit(doing, partial(self._use_connection, request)))

    def _submit(self, doing: str, request: Callable[[], ResultT]) -> Future[ResultT]:
        """Make a request in a thread, because the server may never answer it."""
        if self._closed.is_set():
            raise StoreError(f"{self._name} cannot {doing}: the store was closed")
        return self._threads.submit(request)

    def _use_connection(self, request: Callable[[psycopg.Connection], ResultT]) -> ResultT:
        """Make a request on a connection of the pool; after a failure to get one, wait less."""
        try:
            with self._pool.connection() as database:
                self._pool.timeout = self._timeout * _CONNECTING_PART
                return request(database)
        except PoolTimeout:
            self._pool.timeout = _UNREACHABLE_SECONDS
            raise PoolTimeout("the server cannot be reached") from None

    def _ask_twice(self, request: Callable[[psycopg.Connection], ResultT]) -> ResultT:
        """Make a request that only reads, and again if its connection was lost.

        A server that was restarted has ended every connection of the pool.
        """
        try:
            return self._use_connection(request)
        except PoolTimeout:
            raise
        except (psycopg.OperationalError, psycopg.InterfaceError):
            self._pool.check()
            return self._use_connection(request)

    def _result(self, doing: str, future: Future[ResultT]) -> ResultT:
        """Wait for the answer to a request.

        Raises:
            StoreError: the server does not answer in time, or reports an error.
        """
        try:
            return future.result(self._timeout)
        except FutureTimeout:
            future.cancel()
            problem = f"the server has not answered within {self._timeout:g} s"
            raise _Unanswered(f"{self._name} cannot {doing}: {problem}") from None
        except psycopg.Error as error:
            lost = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
            kind = _Unanswered if lost else StoreError
            raise kind(f"{self._name} cannot {doing}: {_first_line(error)}") from None

    def _open(self, server: str) -> None:
        """Migrate the tables to the current version, all or nothing, and open the pool."""
        with psycopg.connect(server) as database:
            database.execute("SELECT pg_advisory_xact_lock(%s, 0)", (_LOCK_KEY,))
            encoding = database.info.parameter_status("server_encoding")
            if encoding != "UTF8":
                problem = f"its encoding is {encoding}; create it with ENCODING 'UTF8'"
                raise StoreError(f"{self._name} cannot be used: {problem}")
            database.execute(
                "CREATE TABLE IF NOT EXISTS replanning_schema (version INTEGER NOT NULL)"
            )
            found = database.execute("SELECT version FROM replanning_schema").fetchone()
            version = found[0] if found else 0
            if version > SCHEMA_VERSION:
                raise StoreError(
                    f"{self._name} has version {version} of the schema, and this library knows"
                    f" versions up to {SCHEMA_VERSION}: it was written by a newer version of"
                    " replanning; upgrade the library"
                )
            for statements in _MIGRATIONS[version:]:
                for statement in statements:
                    database.execute(statement)
            if not found:
                database.execute("INSERT INTO replanning_schema VALUES (%s)", (SCHEMA_VERSION,))
            elif version != SCHEMA_VERSION:
                database.execute("UPDATE replanning_schema SET version = %s", (SCHEMA_VERSION,))
        self._pool.open()


class _Unanswered(StoreError):
    """The server did not answer, so the request may or may not have been executed."""


class _Listener(threading.Thread):
    """Thread that listens for notifications of new messages, so that empty inboxes are not read.

    Attributes:
        notified: the number of notifications and lost connections.
    """

    def __init__(self, address: str, closed: threading.Event) -> None:
        super().__init__(name="replanning-postgres-listener", daemon=True)
        self.notified = 0
        self._address = address
        self._closed = closed
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
        """Remember that an inbox was empty after this number of notifications."""
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
    """Daemon threads that make requests, so that a program can end while a server is silent."""

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
        """End the threads after the waiting requests."""
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


def _database_name(address: str) -> str:
    """Return the host, service and database of an address, as far as it names them."""
    known = conninfo_to_dict(address)
    parts = [str(known[key]) for key in ("host", "service", "dbname") if known.get(key)]
    return "/".join(parts) or "the database"


def _first_line(error: psycopg.Error) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
