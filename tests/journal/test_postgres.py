# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""The store in PostgreSQL, on a real server: its contract, lost connections, a server that hangs or dies, several hosts."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import count
from typing import Any

import anyio
import pytest

from replanning import Goal, Plan, ReplanningEngine, Settings, Task, ToolSpec
from replanning.errors import JournalCorrupt, LeaseLost, StoreError
from replanning.journal import AttemptStarted, Record, RunEnded, RunStore, open_store
from replanning.journal.store import InboxMessage
from replanning.plan.types import RunId
from replanning.testing.stores import (
    OTHER_OWNER,
    RUN,
    STORE_CHECKS,
    attempt_succeeded,
    sample_message,
    sample_record,
)
from tests.support.cli import cli, write_plan
from tests.support.crash import let_pass
from tests.support.postgres import Server

pytestmark = pytest.mark.deep
_schemas = count()


@pytest.fixture
def address(postgres_server: Server) -> str:
    """The address of an empty schema."""
    return postgres_server.address(f"test{next(_schemas)}")


@pytest.fixture
def store(address: str) -> Iterator[RunStore]:
    """A store in an empty schema, which waits two seconds for an answer."""
    from replanning.journal.postgres import PostgresStore

    with closing(PostgresStore(address, timeout=2)) as opened:
        yield opened


def sql(address: str, statement: str) -> list[Any]:
    """Execute a statement behind the store's back."""
    import psycopg

    with psycopg.connect(address, autocommit=True) as database:
        cursor = database.execute(statement)
        return cursor.fetchall() if cursor.description else []


@pytest.mark.parametrize(
    "check", STORE_CHECKS, ids=lambda check: check.__name__.removeprefix("check_")
)
def test_contract(check, address):
    """It passes each check that a third party's store can run."""
    check(lambda: open_store(address))


def test_lost_connections(store, address):
    """A connection that the server ends makes one operation fail; the next ones work, and no record is lost or doubled."""
    lease = store.create(RUN, "me", 0.0, 5.0)
    written = 0
    for seq in range(1, 21):
        if seq % 5 == 0:
            sql(
                address,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()",
            )
        for _ in range(5):
            with suppress(StoreError):
                store.append(lease, sample_record(seq))
                written += 1
                break
    assert (written, list(store.read(RUN))) == (20, [sample_record(seq) for seq in range(1, 21)])


def test_an_answer_that_came_too_late(store, postgres_server):
    """A record that the server took after it was given up is withdrawn, so that what follows is what the run knows."""
    lease = store.create(RUN, "me", 0.0, 5.0)
    store.append(lease, sample_record(1))
    with postgres_server.hanging():
        for _ in range(2):
            with pytest.raises(StoreError, match="not answered"):
                store.append(lease, Record(2, 0.0, RunEnded("failed", "given up")))
    other = Record(2, 5.0, attempt_succeeded("kept"))
    for _ in range(1_000_000):
        with suppress(StoreError):
            store.append(lease, other)
            break
    assert list(store.read(RUN)) == [sample_record(1), other]
    assert [(run.status, run.records) for run in store.runs()] == [("running", 2)]


def test_damage(store, address):
    """A record that was changed or removed behind the store's back is refused with its number."""
    lease = store.create(RUN, "me", 0.0, 5.0)
    for seq in (1, 2, 3):
        store.append(lease, sample_record(seq))
    sql(
        address,
        "UPDATE replanning_records SET data = replace(data, 'build', 'blame') WHERE seq = 2",
    )
    with pytest.raises(
        JournalCorrupt, match="record 2 of run 'run-1' cannot be read: it was damaged or changed"
    ):
        list(store.read(RUN))
    sql(address, "DELETE FROM replanning_records WHERE seq = 2")
    with pytest.raises(
        JournalCorrupt, match="record 2 of run 'run-1' cannot be read: it is missing"
    ):
        list(store.read(RUN))


def test_vanished(store, address):
    """A run whose row or table somebody deletes is gone, which is not said to be another process's doing."""
    gone, kept = (store.create(RunId(run), "me", 0.0, 5.0) for run in ("gone", "kept"))
    for vanish, said, leases in (
        ("DELETE FROM replanning_runs WHERE id = 'gone'", "no longer has this run", [gone]),
        ("DROP TABLE replanning_runs CASCADE", "a table of .* was dropped", [gone, kept]),
    ):
        sql(address, vanish)
        with pytest.raises(LeaseLost, match=said) as raised:
            store.append(gone, sample_record(1))
        assert raised.value.run_is_gone
        lost = store.renew_all([gone, kept], 1.0, 5.0)
        assert list(lost) == leases
        assert all(error.run_is_gone for error in lost.values())


def test_addresses(address, postgres_server):
    """What is no address, leads nowhere, or has a newer schema is one clear error, without the password."""
    with pytest.raises(StoreError, match="this is not the address of a PostgreSQL database"):
        open_store("postgresql://[")
    secret = address.replace("replanning@127.0.0.1", "replanning:wonderland7@127.0.0.1")
    with closing(open_store(secret)) as opened:
        assert "wonderland7" not in repr(opened)
    with pytest.raises(StoreError, match="connection") as refused:
        open_store(secret.replace(f":{postgres_server.port}/", ":1/"))
    assert "wonderland7" not in str(refused.value)
    sql(address, "UPDATE replanning_schema SET version = 99")
    with pytest.raises(StoreError, match=r"version 99 of the schema, .* upgrade the library"):
        open_store(address)


def test_requests_that_wait_too_long(address, postgres_server):
    """Of many requests at once to a server that hangs, each fails in time, and the store works again afterwards."""
    from replanning.journal.postgres import PostgresStore

    with closing(PostgresStore(address, timeout=0.2)) as store:
        with postgres_server.hanging(), ThreadPoolExecutor(16) as threads:
            failures = [
                request.exception() for request in [threads.submit(store.runs) for _ in range(16)]
            ]
        assert all(isinstance(failure, StoreError) for failure in failures), failures
        for _ in range(1_000_000):
            with suppress(StoreError):
                assert list(store.runs()) == []
                break


def test_a_closed_store(store):
    """A store that was closed refuses requests, and can be closed again."""
    store.close()
    store.close()
    with pytest.raises(StoreError, match="the store was closed"):
        store.runs()


def test_tables_of_an_older_version(address):
    """Tables of an older version are migrated when the store is opened."""
    sql(address, "CREATE TABLE replanning_schema AS SELECT 0 AS version")
    with closing(open_store(address)) as opened:
        opened.create(RUN, "me", 0.0, 5.0)
    assert sql(address, "SELECT version FROM replanning_schema") == [(1,)]


def test_another_encoding(postgres_server):
    """A database that cannot hold every text is refused with what to do."""
    sql(
        postgres_server.base,
        "CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0",
    )
    with pytest.raises(StoreError, match="its encoding is LATIN1; create it with ENCODING 'UTF8'"):
        open_store(postgres_server.base.replace("/postgres", "/latin"))


def test_without_its_client(monkeypatch):
    """Without psycopg the store says how to install it."""
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, "replanning.journal.postgres", raising=False)
    with pytest.raises(ImportError, match=r'pip install "replanning\[postgres\]"'):
        importlib.import_module("replanning.journal.postgres")


def test_the_command_line_keeps_the_password(address, tmp_path):
    """Commands to copy name the database without the password of its address."""
    tools = {"missing": "no-such-program", "stop": "echo stopped ## dangerous: true"}
    plan = write_plan(tmp_path, tools, "id: broken, tool: missing, fallbacks: [{tool: stop}]")
    place = address.replace("replanning@127.0.0.1", "replanning:wonderland7@127.0.0.1")
    ran = cli(tmp_path, "run", plan, "--run-id", "r1", "--store", place, code=4)
    said = ran.stdout + ran.stderr + cli(tmp_path, "pending", "--store", place).stdout
    assert said.count("replanning approve r1 1 --store") == 2
    assert "wonderland7" not in said


def test_messages_are_notified(store, address):
    """A message that another process posts is seen although the inbox was known to be empty, and in order of posting."""
    lease = store.create(RUN, "me", 0.0, 5.0)
    while not store._listener._listening:
        let_pass(0.01)
    with closing(open_store(address)) as other:
        seen: list[InboxMessage] = []
        for text in ("a", "b"):
            assert list(store.inbox(RUN)) == []
            other.post(RUN, sample_message(text))
            while not (waiting := store.inbox(RUN)):
                let_pass(0.01)
            seen += waiting
            store.discard(lease, [message.id for message in waiting])
    assert [message.payload["reason"] for message in seen] == ["a", "b"]


HOST = """
import json, socket, sys, time
ahead, name, address = float(sys.argv[1]), sys.argv[2], sys.argv[3]
real, socket.gethostname = time.time, lambda: name
time.time = lambda: real() + ahead
from replanning.errors import LeaseLost, RunOwned, StoreError
from replanning.journal import Lease, open_store
from replanning.environment import owner_id
from replanning.testing.stores import sample_record
store, lease = open_store(address), None
for line in sys.stdin:
    command, *rest = json.loads(line)
    try:
        if command == "create":
            lease = store.create("run-1", owner_id(), time.time(), *rest)
        elif command == "acquire":
            lease = store.acquire("run-1", owner_id(), time.time(), *rest)
        elif command == "renew":
            store.renew(lease, time.time(), *rest)
        else:
            store.append(lease, sample_record(*rest))
        print("done", flush=True)
    except StoreError as error:
        print(type(error).__name__, flush=True)
"""


@pytest.mark.parametrize("ahead", [-7200.0, 7200.0])
def test_hosts_whose_clocks_differ(ahead, address):
    """A lease lasts by the clock of the server: a host whose clock is hours ahead or behind neither takes nor loses a run."""

    def host(name: str, ahead: float) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", HOST, str(ahead), name, address]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def ask(process: "subprocess.Popen[str]", *command: object) -> str:
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps(command) + "\n")
        return process.stdout.readline().strip()

    with host("here", 0.0) as here, host("there", ahead) as there:
        try:
            assert ask(here, "create", 3600) == "done"
            assert ask(there, "acquire", 3600) == "RunOwned"
            assert ask(here, "append", 1) == "done"
            assert ask(here, "renew", -10) == "done", "a lease that has ended"
            assert ask(there, "acquire", 3600) == "done"
            assert (ask(here, "append", 2), ask(here, "renew", 3600)) == ("LeaseLost", "LeaseLost")
            assert ask(here, "acquire", 3600) == "RunOwned"
            assert ask(there, "append", 2) == "done"
        finally:
            here.kill()
            there.kill()


TOOLS = (ToolSpec(name="main", capability="load"), ToolSpec(name="spare", capability="load"))


def test_reads_after_a_restart(store, postgres_server):
    """A read succeeds at once after the server was restarted; while it is down, each fails, and the store finds it again."""
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: store.runs(), range(16)))
    postgres_server.kill()
    for _ in range(3):
        with pytest.raises(StoreError, match="cannot be read: the server cannot be reached"):
            store.runs()
    postgres_server.start()
    for _ in range(1_000_000):
        with suppress(StoreError):
            assert list(store.runs()) == []
            break
    postgres_server.kill()
    postgres_server.start()
    assert list(store.runs()) == []


async def test_a_server_that_dies(postgres_server):
    """A run whose server is killed and started again in the middle ends as it would have, with a whole journal."""
    address = postgres_server.address(f"test{next(_schemas)}")
    tasks = tuple(
        Task(id=f"t{n}", tool="main", depends_on=(f"t{n - 1}",) if n else ()) for n in range(6)
    )

    async def work(task, context):
        if task.id == "t2":
            await anyio.to_thread.run_sync(postgres_server.kill)
            await anyio.to_thread.run_sync(postgres_server.start)
        if task.id == "t4":
            raise ConnectionError("down")
        return task.id

    with closing(open_store(address)) as store:
        engine = ReplanningEngine(store=store, settings=Settings(store_patience=120))
        result = await engine.execute(
            Plan(goal=Goal(objective="load"), tasks=tasks, tools=TOOLS), work
        )
        assert (result.status, len(result.revisions)) == ("succeeded", 1)
        records = list(store.read(result.run))
    started = [record.body.task for record in records if isinstance(record.body, AttemptStarted)]
    assert list(dict.fromkeys(started)) == ["t0", "t1", "t2", "t3", "t4", "t4~2", "t5"]
    assert [record.seq for record in records] == list(range(1, len(records) + 1))


def test_owner_of_another_host(store, address):
    """The end of a run is seen by other hosts, with the owner that it has."""
    lease = store.create(RUN, OTHER_OWNER, 0.0, 5.0)
    store.append(lease, Record(1, 0.0, RunEnded("paused", "")))
    with closing(open_store(address)) as other:
        assert [(run.status, run.owner) for run in other.runs()] == [("paused", OTHER_OWNER)]
