"""Runs whose store vanishes while they are carried out: deleted, replaced, cut off or emptied of the run."""

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from replanning import Task, TaskState
from replanning.errors import StoreError, UnknownRun
from replanning.journal import MemoryStore, RunEnded, SqliteStore
from replanning.testing import FlakyStore
from tests.support.resume import RUN
from tests.support.runs import bodies, chain, failing, make_engine, perform, plan


def delete_folder(path: Path) -> str:
    """As `git clean -fdx` does."""
    shutil.rmtree(path.parent)
    return f"{path} was deleted"


def delete_file(path: Path) -> str:
    """Without the files beside it."""
    path.unlink()
    return f"{path} was deleted"


def delete_log(path: Path) -> str:
    """The write-ahead log, which has what the file has not yet."""
    log = path.with_name(path.name + "-wal")
    log.unlink()
    return f"{log} was deleted"


def delete_index(path: Path) -> str:
    """The index of the log, through which processes agree."""
    index = path.with_name(path.name + "-shm")
    index.unlink()
    return f"{index} was deleted"


def replace_file(path: Path) -> str:
    """By a history that somebody else has begun there."""
    with closing(SqliteStore(path.with_name("other.db"))) as other:
        other.create(RUN, "another process", 0.0, 5.0)
    path.with_name("other.db").rename(path)
    return f"{path} was replaced by another file"


def replace_folder(path: Path) -> str:
    """By a file of its name."""
    shutil.rmtree(path.parent)
    path.parent.write_text("")
    return f"{path} was deleted"


def cut_off(path: Path) -> str:
    """As `> history.db` does in a shell."""
    os.truncate(path, 0)
    return f"{path} was cut off or overwritten"


def overwrite(path: Path) -> str:
    """As `cp other history.db` does."""
    path.write_bytes(b"\0" * path.stat().st_size)
    return f"{path} was cut off or overwritten"


def delete_row(path: Path) -> str:
    """By another program, from the table of runs."""
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DELETE FROM runs")
    return f"<SqliteStore {str(path)!r}> has lost the run: there is no run {RUN!r}"


VANISHING = (
    delete_folder,
    delete_file,
    delete_log,
    delete_index,
    replace_file,
    replace_folder,
    cut_off,
    overwrite,
    delete_row,
)


@pytest.fixture
def path(tmp_path):
    """The place of a store."""
    return tmp_path / ".replanning" / "history.db"


@pytest.mark.parametrize("vanish", VANISHING, ids=lambda each: each.__name__)
async def test_while_a_task_runs(vanish, path, clock):
    """The run fails, says what happened and at which record, starts nothing more and has all outputs."""
    said = []

    async def work(task, context):
        if task.id == "b":
            await clock.sleep(5)
            said.append(vanish(path))
            await clock.sleep(5)
        return f"output of {task.id}"

    with closing(SqliteStore(path)) as store:
        engine = make_engine(store=store, clock=clock)
        result = await engine.execute(chain("a", "b", "c"), work)
    assert result.status == "failed"
    assert result.reason.startswith(said[0])
    assert repr(RUN) in result.reason
    assert "noticed after record 4, and record 4 is the last one that was certain" in result.reason
    assert dict(result.outputs) == {"a": "output of a", "b": "output of b"}
    assert result.unjournaled


async def test_by_the_last_task(path, clock):
    """A store that vanishes in the last moment is noticed as well, so that no run seems to be kept."""

    async def work(task, context):
        shutil.rmtree(path.parent)
        return task.id

    with closing(SqliteStore(path)) as store:
        result = await make_engine(store=store, clock=clock).execute(chain("a"), work)
    assert (result.status, dict(result.outputs)) == ("failed", {"a": "a"})
    assert "after record 3, and record 1 is the last one that was certainly" in result.reason


async def test_records_of_the_end(path, clock):
    """The end is known to those who follow the run in this process, after what finished before it."""
    with closing(SqliteStore(path)) as store:
        async with make_engine(store=store, clock=clock).open(chain("a", "b")) as run:
            attempt = run.started("a")
            shutil.rmtree(path.parent)
            await clock.sleep(1)
            assert run.result.status == "failed"
            run.succeeded(attempt, "late")
    assert run.live.entry("a").state is TaskState.DONE
    assert run.live.entry("b").state is TaskState.READY
    assert run.result.outputs == {"a": "late"}


async def test_put_back(path, clock):
    """A store that was moved away is whole once it is back: the run is resumed, and repeats nothing."""
    away = path.parent.with_name("away")

    async def work(task, context):
        if task.id == "b":
            path.parent.rename(away)
            await clock.sleep(5)
        return task.id

    with closing(SqliteStore(path)) as store:
        result = await make_engine(store=store, clock=clock).execute(
            plan(Task(id="a"), Task(id="b", depends_on=("a",), idempotent=True)), work
        )
    assert result.status == "failed"
    away.rename(path.parent)
    with closing(SqliteStore(path)) as store:
        assert bodies(store, RUN, RunEnded) == []
        async with make_engine(store=store, clock=clock).resume(RUN) as run:
            assert await perform(run) == ["b"]
    assert run.result.status == "succeeded"


async def test_continue_unjournaled(path, clock):
    """On request a run goes on without the store that vanished; the result is marked."""

    async def work(task, context):
        if task.id == "a":
            shutil.rmtree(path.parent)
        await clock.sleep(5 if task.id == "b" else 0)
        return task.id

    with closing(SqliteStore(path)) as store:
        engine = make_engine(store=store, clock=clock, on_store_failure="continue_unjournaled")
        result = await engine.execute(chain("a", "b", "c"), work)
        assert (result.status, result.unjournaled, len(result.outputs)) == ("succeeded", True, 3)


async def test_continue_unjournaled_to_the_end(path, clock):
    """A run that may go on without its store also ends where the store vanishes in the last moment."""

    async def work(task, context):
        shutil.rmtree(path.parent)

    with closing(SqliteStore(path)) as store:
        engine = make_engine(store=store, clock=clock, on_store_failure="continue_unjournaled")
        result = await engine.execute(chain("a"), work)
    assert (result.status, result.unjournaled) == ("succeeded", True)


async def test_after_the_end(path, clock):
    """What happens to the store after the end was stored does not change the result."""
    with closing(SqliteStore(path)) as store:
        async with make_engine(store=store, clock=clock).open(chain("a")) as run:
            assert await perform(run) == ["a"]
            shutil.rmtree(path.parent)
            await clock.sleep(5)
    assert (run.result.status, run.result.unjournaled) == ("succeeded", False)


async def test_between_two_runs(path, clock):
    """A program whose store has vanished opens no other run there, which nobody would find."""
    with closing(SqliteStore(path)) as store:
        engine = make_engine(store=store, clock=clock)
        assert (await engine.execute(chain("a"), failing())).status == "succeeded"
        shutil.rmtree(path.parent)
        with pytest.raises(StoreError, match="was deleted, so no further record of run 'run-2'"):
            await engine.execute(chain("a"), failing())


async def test_other_peoples_stores(clock):
    """A store of a third party that knows the run no more is one that has lost it."""

    class Forgetful(FlakyStore):
        def inbox(self, run):
            raise UnknownRun(run)

    store = Forgetful(MemoryStore(), durable=True)
    async with make_engine(store=store, clock=clock).open(chain("a")) as run:
        result = await run.wait()
    assert (result.status, result.outputs) == ("failed", {})
    assert f"has lost the run: there is no run {RUN!r}; this was noticed after" in result.reason
