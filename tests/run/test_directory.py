"""The folder of a run: on record, used again when it is resumed, and stated by those who know better."""

import os
from contextlib import closing
from dataclasses import replace

import pytest

from replanning import Plan, ReplanningEngine
from replanning.journal import MemoryStore, RunOpened, RunResumed, SqliteStore
from replanning.tools import ToolExecutor
from tests.support.resume import RUN
from tests.support.runs import bodies, chain, environment, make_engine


async def directory_of(engine, *, opens=False):
    """The folder in which the work of a run finds itself, whose process ends after one task."""
    source = engine.open(chain(*"abcd"), run_id=RUN) if opens else engine.resume(RUN)
    async with source as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                return attempt.context.directory
    raise AssertionError


def engine_in(directory, store, clock):
    """An engine whose tools work in a folder."""
    stated = replace(environment(clock), directory=directory)
    return ReplanningEngine([], store=store, environment=stated)


async def test_resumed_elsewhere(tmp_path, monkeypatch, clock):
    """A run that is resumed by a process in another folder works in the one that it was opened in."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here, elsewhere):
        folder.mkdir()
    monkeypatch.chdir(here)
    store = MemoryStore()
    assert await directory_of(make_engine(store=store, clock=clock), opens=True) == str(here)
    monkeypatch.chdir(elsewhere)
    assert await directory_of(make_engine(store=store, clock=clock)) == str(here)
    (opened,) = bodies(store, RUN, RunOpened)
    (resumed,) = bodies(store, RUN, RunResumed)
    assert (opened.directory, resumed.directory) == (str(here), "")


async def test_stated(clock):
    """A folder that is stated holds for this resume and the following ones, and for copies of the run."""
    store = MemoryStore()
    assert await directory_of(engine_in("/first", store, clock), opens=True) == "/first"
    assert await directory_of(engine_in("/second", store, clock)) == "/second"
    assert await directory_of(engine_in(None, store, clock)) == "/second"
    assert [body.directory for body in bodies(store, RUN, RunResumed)] == ["/second", ""]
    engine = engine_in(None, store, clock)
    copy = engine.fork(RUN, 0, new_id="copy")
    assert bodies(store, copy, RunOpened)[0].directory == "/first"


async def test_for_others_to_decide(clock):
    """Where the tools work elsewhere, as on Temporal, no folder is on record."""
    store = MemoryStore()
    assert await directory_of(engine_in("", store, clock), opens=True) == ""
    assert await directory_of(engine_in(None, store, clock)) == ""


@pytest.mark.parametrize("deleted", [True, False], ids=["deleted", "no text"])
async def test_unknown(deleted, tmp_path, monkeypatch, clock):
    """A folder that was deleted, or whose name is no text, is not on record, and nothing else fails."""
    folder = tmp_path / os.fsdecode(b"odd \xff")
    folder.mkdir()
    monkeypatch.chdir(folder)
    if deleted:
        folder.rmdir()
    store = MemoryStore()
    assert await directory_of(make_engine(store=store, clock=clock), opens=True) == ""


async def test_secrets(tmp_path, clock):
    """A secret in the name of the folder is masked in the journal, and not for the tools."""
    secret = "/srv/password=correcthorsebattery"
    with closing(SqliteStore(tmp_path / "history.db")) as store:
        assert await directory_of(engine_in("/srv/jobs", store, clock), opens=True) == "/srv/jobs"
        assert await directory_of(engine_in(secret, store, clock)) == secret
        (resumed,) = bodies(store, RUN, RunResumed)
        assert resumed.directory == "/srv/password=[redacted]"
    kept = MemoryStore()
    assert await directory_of(engine_in(secret, kept, clock), opens=True) == secret
    assert bodies(kept, RUN, RunOpened)[0].directory == "/srv/password=[redacted]"


async def test_commands_of_a_program(tmp_path, monkeypatch, clock):
    """An executor of a program that resumes a run elsewhere has its commands work in the folder of the run."""
    document = Plan.model_validate(
        {
            "goal": {"objective": "test"},
            "tools": [
                {"name": "place", "kind": "shell", "command": "pwd"},
                {"name": "below", "kind": "shell", "command": "pwd", "cwd": "sub"},
            ],
            "tasks": [{"id": "a"}, *({"id": name, "tool": name} for name in ("place", "below"))],
        }
    )
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here / "sub" / "sub", elsewhere):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    store = MemoryStore()
    async with make_engine(store=store, clock=clock).open(document, run_id=RUN) as run:
        run.succeeded(run.started("a"))
    monkeypatch.chdir(elsewhere)
    copy = make_engine(store=store, clock=clock).fork(RUN, 0, new_id="copy")
    for resumed, cwd, place in ((RUN, None, here), (copy, "sub", here / "sub")):
        async with (
            ToolExecutor(document, cwd=cwd) as work,
            make_engine(store=store, clock=clock).resume(resumed) as run,
        ):
            async for task in run.ready():
                async with run.attempt(task) as attempt:
                    if task.tool is not None:
                        attempt.output = (await work(task, attempt.context))["stdout"]
        outputs = run.result.outputs
        assert (outputs["place"], outputs["below"]) == (str(place), str(place / "sub"))
