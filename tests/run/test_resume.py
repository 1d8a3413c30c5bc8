"""Runs that are taken up again: cut off anywhere, paused, ended; forks; and journals that cannot be replayed."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from replanning import PlanRun, Retry, Task, __version__
from replanning.changes import AbortRun, AddTask, RetryTask, SkipTask
from replanning.environment import SystemClock
from replanning.errors import JournalCorrupt, RunOwned, StoreError, UnknownRun
from replanning.journal import (
    AttemptInterrupted,
    AttemptSucceeded,
    InboxMessage,
    MemoryStore,
    QuestionAsked,
    Record,
    RunOpened,
    RunResumed,
    RunStore,
    SqliteStore,
    TriggerFired,
)
from replanning.plan import AttemptId
from replanning.testing import FlakyStore, ScriptedExecutor, VirtualClock, raises
from tests.support.invariants import invariant_violations, replay_differences
from tests.support.journals import edit_records
from tests.support.resume import RUN, carry_on, cut, engine_for, from_start, resumed, story
from tests.support.runs import (
    Proposer,
    again,
    alternative,
    bodies,
    chain,
    failing,
    make_engine,
    perform,
    plan,
)

# Cut off


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.deep)])
async def test_cut_off_after_any_record(step):
    """Cut off after any record, once or twice, a resumed run ends with the same results by the same decisions."""
    result, records = await from_start()
    assert (result.status, story(records)["broken"]) == ("succeeded", [])
    for seen in range(1, len(records), step):
        first, second = await resumed(records[:seen])
        for cut_at in (seen, seen + 1, seen + 8):
            again, journal = (first, second) if cut_at == seen else await resumed(second[:cut_at])
            assert (again.status, again.outputs) == (result.status, result.outputs), (seen, cut_at)
            assert journal[:cut_at] == (records if cut_at == seen else second)[:cut_at]
            assert story(journal) == story(records), (seen, cut_at)


async def test_not_idempotent_asks():
    """A task that was running and is not idempotent is not run again by itself: a person is asked."""
    store = MemoryStore()
    async with make_engine(store=store).open(plan(Task(id="pay")), run_id=RUN) as run:
        run.started("pay")
    store = cut(list(store.read(RUN))[:2])
    async with make_engine(
        lambda request: [alternative(RetryTask(task_id="pay"))], store=store
    ).resume(RUN) as run:
        assert await perform(run) == []
    assert run.result.status == "needs_human"
    interrupted = AttemptInterrupted(AttemptId("pay#1"), "pay", "its process ended")
    assert bodies(store, RUN, AttemptInterrupted) == [interrupted]
    assert "was cut off" in bodies(store, RUN, QuestionAsked)[0].text


# Resumed after an end


async def test_succeeded():
    """Resuming a run that has succeeded gives its result at once, runs nothing and writes nothing."""
    engine = make_engine(again)
    result = await engine.execute(chain("a", "b", "c"), failing("b"))
    before = list(engine.store.read(result.run))
    async with engine.resume(result.run) as run:
        assert run.result == result
        assert await perform(run) == []
    assert run.result == result
    assert list(engine.store.read(result.run)) == before


async def test_aborted():
    """A run that was aborted on purpose stays aborted."""
    engine = make_engine()
    async with engine.open(chain("a", "b"), run_id=RUN) as run:
        run.apply([AbortRun(reason="wrong plan")])
    before = list(engine.store.read(RUN))
    async with engine.resume(RUN) as run:
        assert await perform(run) == []
    assert (run.result.status, run.result.reason) == ("aborted", "wrong plan")
    assert list(engine.store.read(RUN)) == before


async def test_failed():
    """A run that failed fails again for the same reason without replanning once more, until somebody changes it."""
    none = Proposer(lambda request: [])
    engine = make_engine(none)
    first = await engine.execute(chain("a", "b"), failing("a"))
    asked = len(none.requests)
    async with engine.resume(first.run) as run:
        assert await perform(run) == []
    assert (run.result.status, run.result.reason, len(none.requests)) == (
        "failed",
        first.reason,
        asked,
    )
    async with engine.resume(first.run) as run:
        run.apply([RetryTask(task_id="a")])
        assert await perform(run) == ["a", "b"]
    assert run.result.status == "succeeded"
    assert invariant_violations(list(engine.store.read(first.run))) == []


async def test_paused():
    """A paused run finishes what runs, hands out nothing more, and goes on where it was, as often as one likes."""
    engine = make_engine()

    async def work(task, context):
        run.pause("lunch", by="ada")
        return 1

    for source in (engine.open(chain("a", "b", "c"), run_id=RUN), engine.resume(RUN)):
        async with source as run:
            assert len(await perform(run, work)) == 1
        assert (run.result.status, run.result.reason) == ("paused", "lunch")
    async with engine.resume(RUN) as run:
        assert await perform(run) == ["c"]
    assert (run.result.status, run.result.outputs) == ("succeeded", {"a": 1, "b": 1, "c": None})
    assert len(bodies(engine.store, RUN, RunResumed)) == 2


async def test_opened_or_resumed():
    """A plan is opened as a run or the run resumed where it exists; a run of another plan, or of none, is refused."""
    engine = make_engine()
    for ran in (["a"], ["b"], []):
        async with engine.run_or_resume(chain("a", "b"), run_id=RUN) as run:
            assert await perform(run, lambda task, context: leave(run)) == ran
    assert engine.history(RUN).status == "succeeded"
    with pytest.raises(StoreError, match=r"run 'run-1' is a run of another plan; resume that one"):
        await engine.run_or_resume(chain("a", "c"), run_id=RUN).__aenter__()
    assert len(bodies(engine.store, RUN, RunResumed)) == 1


async def leave(run: PlanRun) -> None:
    """Let a run pause after this task."""
    run.pause()


async def test_left_by_its_program():
    """An exception of the program comes out as it is; its run is paused with what ran interrupted, and goes on later."""
    engine = make_engine()
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the body of the run is what raises
        async with engine.open(plan(Task(id="a", idempotent=True)), run_id=RUN) as run:
            run.started("a")
            raise ZeroDivisionError
    assert (run.result.status, run.result.reason) == (
        "paused",
        "the orchestrator raised ZeroDivisionError",
    )
    async with engine.resume(RUN) as run:
        assert await perform(run) == ["a"]
    assert run.result.status == "succeeded"


# What goes on across a resume


async def test_backoff_goes_on():
    """A task that is backing off waits for the rest of its delay after a resume, and no longer."""
    store = MemoryStore()
    async with VirtualClock() as clock:
        task = Task(id="a", retry=Retry(delay=100, jitter=False, max_attempts=2))
        async with make_engine(store=store, clock=clock).open(plan(task)) as run:
            run.failed(run.started("a"), ConnectionError("down"))
            await clock.sleep(40)
    failed = list(store.read(RUN))[:3]
    for away, waited in ((20, 40), (900, 0)):
        async with VirtualClock(clock.now() + away) as later:
            async with make_engine(store=cut(failed), clock=later).resume(RUN) as run:
                assert await perform(run) == ["a"]
            assert later.elapsed == waited


async def test_limits_go_on(clock):
    """The limit of replans per lineage holds over all the processes that work on a run, and over its forks."""
    engine = make_engine(again, clock=clock)
    async with engine.open(chain("a")) as run:
        for task_id in ("a", "a~2"):
            run.failed(run.started(task_id), "broken")
            await clock.sleep(1)
    work = ScriptedExecutor(default=raises(ValueError("broken")))
    for run_id in (run.id, engine.fork(run.id, 2)):
        async with engine.resume(run_id) as run:
            await perform(run, work)
        assert (run.result.status, len(run.result.revisions)) == ("failed", 3)


async def test_wall_clock_stands_still_meanwhile():
    """The time for which nobody was at a run does not use up its wall clock; the time before counts."""
    store = MemoryStore()
    ends, now = [], VirtualClock().now()
    for work in (60.0, 30.0, 30.0):
        async with VirtualClock(now) as clock:
            engine = make_engine(store=store, clock=clock, budget={"wall_clock": 100})
            async with engine.resume(RUN) if store.runs() else engine.open(chain("a")) as run:
                await clock.sleep(work)
        ends.append((run.result.status, list(store.read(RUN))[-1].at - now))
        now = clock.now() + 1_000_000
    assert ends == [("paused", 60), ("paused", 30), ("aborted", 10)]


async def test_clock_behind():
    """On a machine whose clock is behind, no record is stamped before the one that it follows."""
    store = MemoryStore()
    for start in (1_000_000.0, 999_000.0, 999_500.0):
        async with VirtualClock(start) as clock:
            engine = make_engine(store=store, clock=clock)
            async with (
                engine.resume(RUN) if store.runs() else engine.open(chain("a", "b", "c")) as run
            ):
                attempt = run.started((await anext(run.ready())).id)
                await clock.sleep(5)
                run.succeeded(attempt)
    assert invariant_violations(list(store.read(RUN))) == []
    assert [record.at for record in store.read(RUN)][-1] == 1_000_005


async def test_clock_hours_behind():
    """On a machine whose clock is hours behind, a task waits for the rest of its delay, not for hours."""
    store = MemoryStore()
    async with VirtualClock(SystemClock().now() + 7200) as clock:
        task = Task(id="a", retry=Retry(delay=0.001, jitter=False, max_attempts=2))
        async with make_engine(store=store, clock=clock).open(plan(task), run_id=RUN) as run:
            run.failed(run.started("a"), ConnectionError("down"))
    with anyio.fail_after(60):
        async with make_engine(store=cut(list(store.read(RUN)))).resume(RUN) as run:
            assert await perform(run) == ["a"]


async def test_absent_tools_are_announced_once():
    """That a tool is unavailable from the start is said once, also where the run was cut off before it could be."""
    _, records = await from_start()
    for seen in (1, 2, 3):
        _, all_records = await resumed(records[:seen])
        assert [record.body.kind for record in all_records].count("resource-updated") == 1


async def test_resuming_lifts_a_pause():
    """A pause that was asked for before somebody resumed the run was meant for what ran then."""
    engine = make_engine()
    async with engine.open(chain("a"), run_id=RUN):
        engine.store.post(RUN, InboxMessage("pause", 1.0, "eve", {"reason": "stop"}))
    async with engine.resume(RUN) as run:
        assert await perform(run) == ["a"]
    assert (run.result.status, engine.store.inbox(RUN)) == ("succeeded", [])


# Forks


async def test_fork_at_every_revision():
    """From each revision of an eventful run, a fork ends as the run itself did, and its records name the fork alone."""
    result, records = await from_start()
    store = cut(records)
    for revision in range(len(result.revisions) + 1):
        async with VirtualClock(records[-1].at + 1e6) as clock:
            engine = engine_for(store, clock)
            fork = engine.fork(RUN, revision, new_id=f"fork-{revision}")
            async with engine.resume(fork) as run:
                assert run.live.revision == revision
                await carry_on(run, clock)
        forked = list(store.read(fork))
        assert (run.result.status, run.result.outputs) == (result.status, result.outputs), revision
        assert story(forked) == story(records), revision
        assert forked[0].body.forked_from == (RUN, revision)
        assert {body.trigger.run for body in bodies(store, fork, TriggerFired)} == {fork}
        assert {body.question for body in bodies(store, fork, QuestionAsked)} == {f"{fork}.q1"}
        assert replay_differences(run, forked, clock.now()) == []
    assert list(store.read(RUN)) == records


async def test_fork_of_work_under_way():
    """Attempts that were running at the checkpoint are interrupted in the fork; the run itself goes on undisturbed."""
    engine = make_engine()
    async with engine.open(plan(Task(id="a", idempotent=True)), run_id=RUN) as run:
        attempt = run.started("a")
        run.apply([AddTask(task=Task(id="b"))])
        fork = engine.fork(RUN, 1)
        async with engine.resume(fork) as other:
            assert sorted(await perform(other)) == ["a", "b"]
        run.succeeded(attempt)
        assert await perform(run) == ["b"]
    assert [run.result.status, other.result.status] == ["succeeded", "succeeded"]
    (cut_off,) = bodies(engine.store, fork, AttemptInterrupted)
    assert (cut_off.task, cut_off.reason) == ("a", "it was running when the run was forked")


async def test_no_such_revision():
    """A fork from a revision that the run does not have says which it has; one of an unknown run is refused."""
    engine = make_engine()
    async with engine.open(chain("a"), run_id=RUN) as run:
        run.apply([SkipTask(task_id="a")])
    for revision in (7, -1):
        with pytest.raises(
            StoreError, match=f"'run-1' has no revision {revision}; it has revisions 0 to 1"
        ):
            engine.fork(RUN, revision)
    with pytest.raises(UnknownRun):
        engine.fork("nobody", 0)


async def test_fork_cut_off(clock):
    """A fork whose copying was cut off is not taken for a run, and the message says what to do."""
    _, records = await from_start()
    flaky = FlakyStore(
        cut(records), fails=lambda operation, number: operation == "append" and number == 20
    )
    with pytest.raises(StoreError, match="scheduled to fail"):
        engine_for(flaky, clock).fork(RUN, 4, new_id="half")
    with pytest.raises(
        StoreError, match=r"'half' was being forked from run 'run-1' at revision 4 .* fork it again"
    ):
        async with engine_for(flaky, clock).resume("half"):
            pass


# Journals that cannot be gone on with


async def refused(store: RunStore, kind: type[StoreError] = StoreError) -> str:
    """Why a run is not resumed; it is free afterwards."""
    with pytest.raises(kind) as caught:
        async with make_engine(store=store).resume(RUN):
            pass
    store.release(store.acquire(RUN, "somebody else", 0.0, 1.0))
    return str(caught.value)


async def test_journals_that_cannot_be_replayed():
    """A journal of a newer version, without its beginning, or that contradicts itself is refused, saying where."""
    _, records = await from_start()
    opened = records[0].body
    assert isinstance(opened, RunOpened)
    newer = records[0]._replace(body=replace(opened, version="9.1.2"))
    assert await refused(cut([newer])) == (
        f"run 'run-1' was written by replanning 9.1.2, and this is {__version__}, which may not understand it; "
        "upgrade: pip install 'replanning>=9.1.2'"
    )
    assert "9.3.0" in await refused(
        cut([records[0], Record(2, 1.0, RunResumed("me", version="9.3.0"))])
    )
    moved = [record._replace(seq=seq) for seq, record in enumerate(records[1:4], 1)]
    assert "begins with 'resource-updated'" in await refused(cut(moved), JournalCorrupt)
    done = next(record for record in records if isinstance(record.body, AttemptSucceeded))
    message = await refused(
        cut([*records[: done.seq], done._replace(seq=done.seq + 1)]), JournalCorrupt
    )
    where = f"record {done.seq + 1} (attempt-succeeded) of run 'run-1' does not fit the records before it: "
    assert message.startswith(where)
    assert "'start'" in message


async def test_newer_kind_of_record(tmp_path):
    """A record of a kind that only a newer version knows is reported as that, and not as damage."""
    store, path = await on_disk(tmp_path)

    def teleport(seq: int, kind: str, data: str) -> tuple[str, str]:
        if seq == 2:
            return "task-teleported", "{}"
        return kind, data.replace(f'"version":"{__version__}"', '"version":"7.0"')

    edit_records(path, teleport)
    assert "written by replanning 7.0" in await refused(store)
    edit_records(path, lambda seq, kind, data: (kind, data.replace('"7.0"', f'"{__version__}"')))
    message = await refused(store, JournalCorrupt)
    assert f"{path}: record 2 of run 'run-1' cannot be read: unknown kind of record" in message


async def test_moved_file(tmp_path):
    """The file of a store is all that it takes to go on elsewhere, but not under the name of another run."""
    store, path = await on_disk(tmp_path)
    store.close()
    moved = path.rename(tmp_path / "moved.db")
    with closing(SqliteStore(moved)) as opened:
        async with make_engine(store=opened).resume(RUN) as run:
            assert await perform(run) == ["b"]
    assert run.result.outputs == {"a": None, "b": None}


async def test_opened_and_killed_at_once():
    """A process that was killed between taking a run and its first record leaves nothing that is in the way."""
    store = MemoryStore()
    store.release(store.create(RUN, "killed", 0.0, 1.0))
    assert "has no records" in await refused(store)
    async with make_engine(store=store).open(chain("a"), run_id=RUN) as run:
        assert await perform(run) == ["a"]
    with pytest.raises(StoreError, match="run 'run-1' already exists"):
        async with make_engine(store=store).open(chain("a"), run_id=RUN):
            pass


async def test_owned_by_this_process():
    """A run that is open cannot be resumed a second time, not even here; the message names its owner."""
    engine = make_engine()
    async with engine.open(chain("a"), run_id=RUN) as run:
        with pytest.raises(
            RunOwned,
            match=r"run 'run-1' is owned by process \d+ on [^ (]+; it is open in this process",
        ):
            async with engine.resume(RUN):
                pass
        assert await perform(run) == ["a"]
    assert run.result.status == "succeeded"


async def on_disk(folder: Path) -> tuple[SqliteStore, Path]:
    """A durable store, and its file with a run that was paused after the first of two tasks."""
    path = folder / "history.db"
    store = SqliteStore(path)
    async with make_engine(store=store).open(chain("a", "b"), run_id=RUN) as run:
        run.succeeded(run.started("a"))
    return store, path
