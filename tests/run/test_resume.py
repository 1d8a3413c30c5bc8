"""Runs that are taken up again: cut off anywhere, paused, ended; forks; and journals that cannot be replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from replanning import Alternative, ReplanningEngine, ReplanRequest, Retry, Settings, Task, TaskState
from replanning.changes import AbortRun, AddTask, RetryTask, SkipTask
from replanning.errors import JournalCorrupt, RunOwned, StoreError
from replanning.journal import (
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    InboxMessage,
    JsonlStore,
    MemoryStore,
    QuestionAsked,
    Record,
    ReplanRequested,
    RunEnded,
    RunOpened,
    RunResumed,
    RunStore,
    TriggerFired,
)
from replanning.plan import AttemptId
from replanning.testing import FlakyStore, VirtualClock
from tests.support.invariants import invariant_violations, replay_differences
from tests.support.resume import RUN, carry_on, cut, engine_for, from_start, resumed, story, through
from tests.support.runs import Proposer, again, alternative, bodies, chain, environment, failing, plan


def engine(store: RunStore, propose: Callable[[ReplanRequest], Sequence[Alternative]] = again) -> ReplanningEngine:
    """An engine on a store, with one provider."""
    return ReplanningEngine([Proposer(propose)], store=store)


# Cut off


QUICK_AND_DEEP = pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.deep)])
"""Cut after a few of the records, or after each of them."""


@QUICK_AND_DEEP
async def test_cut_off_after_any_record(step: int) -> None:
    """Cut off after any record of an eventful run, a resumed run ends with the same results by the same decisions."""
    result, records = await from_start()
    assert (result.status, story(records)["broken"]) == ("succeeded", [])
    for seen in range(1, len(records), step):
        again, all_records = await resumed(records[:seen])
        assert (again.status, again.outputs) == (result.status, result.outputs), seen
        assert all_records[:seen] == records[:seen]
        assert story(all_records) == story(records), (seen, records[seen - 1])


@QUICK_AND_DEEP
async def test_cut_off_twice(step: int) -> None:
    """Cut off again soon after it was resumed, or later, a run still ends with the same results by the same decisions."""
    result, records = await from_start()
    for seen in range(1, len(records), step):
        _, second = await resumed(records[:seen])
        for more in (1, 8):
            if seen + more < len(second):
                again, third = await resumed(second[: seen + more])
                assert (again.status, again.outputs) == (result.status, result.outputs), (seen, more)
                assert story(third) == story(records), (seen, more)


async def test_replay_equals_live() -> None:
    """At the end of a resumed run the live plan equals a replay of its journal."""
    _, records = await from_start()
    for seen in range(1, len(records), 7):
        store = cut(records[:seen])
        async with VirtualClock(records[seen - 1].at) as clock, engine_for(store, clock).resume(RUN) as run:
            await carry_on(run, clock)
        assert replay_differences(run, store.read(RUN), clock.now()) == []


async def test_not_idempotent_asks() -> None:
    """A task that was running and is not idempotent is not run again by itself: a person is asked."""
    store = MemoryStore()
    async with engine(store).open(plan(Task(id="pay")), run_id=RUN) as run:
        run.started("pay")
    journal = [record for record in store.read(RUN) if not isinstance(record.body, AttemptInterrupted | RunEnded)]
    store = cut(journal[:2])
    async with engine(store, lambda request: [alternative(RetryTask(task_id="pay"))]).resume(RUN) as run:
        assert await through(run) == []
    assert run.result.status == "needs_human"
    (interrupted,) = bodies(store, RUN, AttemptInterrupted)
    assert interrupted == AttemptInterrupted(AttemptId("pay#1"), "pay", "its process ended")
    (question,) = bodies(store, RUN, QuestionAsked)
    assert "was cut off" in question.text


async def test_idempotent_runs_again() -> None:
    """An idempotent task that was running runs again at once, under the next number."""
    store = MemoryStore()
    async with engine(store).open(plan(Task(id="a", idempotent=True)), run_id=RUN) as run:
        run.started("a")
    store = cut(list(store.read(RUN))[:2])
    async with engine(store).resume(RUN) as run:
        assert await through(run) == ["a"]
    assert [body.attempt for body in bodies(store, RUN, AttemptStarted)] == ["a#1", "a#2"]
    assert run.result.status == "succeeded"


# Resumed after an end


async def test_succeeded() -> None:
    """Resuming a run that has succeeded gives its result at once, runs nothing and writes nothing."""
    store = MemoryStore()
    result = await engine(store).execute(chain("a", "b", "c"), failing("b"))
    before = list(store.read(result.run))
    async with engine(store).resume(result.run) as run:
        assert run.result == result
        assert await through(run) == []
    assert run.result == result
    assert list(store.read(result.run)) == before


async def test_aborted() -> None:
    """A run that was aborted on purpose stays aborted."""
    store = MemoryStore()
    async with engine(store).open(chain("a", "b"), run_id=RUN) as run:
        run.apply([AbortRun(reason="wrong plan")])
    before = list(store.read(RUN))
    async with engine(store).resume(RUN) as run:
        assert await through(run) == []
    assert (run.result.status, run.result.reason) == ("aborted", "wrong plan")
    assert list(store.read(RUN)) == before


async def test_failed() -> None:
    """A run that failed fails again for the same reason without replanning once more, until somebody changes it."""
    store = MemoryStore()
    none = Proposer(lambda request: [])
    first = await ReplanningEngine([none], store=store).execute(chain("a", "b"), failing("a"))
    asked = len(none.requests)
    async with ReplanningEngine([none], store=store).resume(first.run) as run:
        assert await through(run) == []
    assert (run.result.status, run.result.reason, len(none.requests)) == ("failed", first.reason, asked)
    async with ReplanningEngine([none], store=store).resume(first.run) as run:
        run.apply([RetryTask(task_id="a")])
        assert await through(run) == ["a", "b"]
    assert run.result.status == "succeeded"
    assert invariant_violations(list(store.read(first.run))) == []


async def test_paused() -> None:
    """A paused run goes on where it was, as often as one likes."""
    store = MemoryStore()
    async with engine(store).open(chain("a", "b", "c"), run_id=RUN) as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = 1
                run.pause("lunch", by="ada")
    assert (run.result.status, run.result.reason) == ("paused", "lunch")
    async with engine(store).resume(RUN) as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = 2
                run.pause("supper")
    async with engine(store).resume(RUN) as run:
        assert await through(run) == ["c"]
    assert (run.result.status, run.result.outputs) == ("succeeded", {"a": 1, "b": 2, "c": None})
    assert len(bodies(store, RUN, RunResumed)) == 2


async def test_left_by_its_program() -> None:
    """A run whose program raised is paused with what ran interrupted, and goes on when it is resumed."""
    store = MemoryStore()
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the body of the run is what raises
        async with engine(store).open(plan(Task(id="a", idempotent=True)), run_id=RUN) as run:
            run.started("a")
            raise ZeroDivisionError
    assert (run.result.status, run.result.reason) == ("paused", "the orchestrator raised ZeroDivisionError")
    async with engine(store).resume(RUN) as run:
        assert await through(run) == ["a"]
    assert run.result.status == "succeeded"


# What goes on across a resume


async def test_backoff_goes_on() -> None:
    """A task that is backing off waits for the rest of its delay after a resume, and no longer."""
    store = MemoryStore()
    task = Task(id="a", retry=Retry(delay=100, jitter=False, max_attempts=2))
    async with VirtualClock() as clock:
        keeper = ReplanningEngine([], store=store, environment=environment(clock))
        async with keeper.open(plan(task), run_id=RUN) as run:
            run.failed(run.started("a"), ConnectionError("down"))
            await clock.sleep(40)
    async with VirtualClock(clock.now() + 20) as clock:
        keeper = ReplanningEngine([], store=store, environment=environment(clock))
        async with keeper.resume(RUN) as run:
            assert await through(run) == ["a"]
            assert clock.elapsed == 40
    async with VirtualClock(clock.now() + 900) as clock:
        again = cut(list(store.read(RUN))[:3])
        async with ReplanningEngine([], store=again, environment=environment(clock)).resume(RUN) as run:
            assert await through(run) == ["a"]
            assert clock.elapsed == 0


async def test_counts_go_on() -> None:
    """The limit of replans per lineage holds over all the processes that work on a run."""
    store = MemoryStore()
    settings = Settings.model_validate({"cooldown": 0})
    ends = []
    for _ in range(4):
        keeper = ReplanningEngine([Proposer(again)], store=store, settings=settings)
        source = keeper.resume(RUN) if store.runs() else keeper.open(chain("a"), run_id=RUN)
        async with source as run:
            async for task in run.ready():
                async with run.attempt(task):
                    raise ValueError(f"{task.id} is broken")
                await anyio.wait_all_tasks_blocked()
                run.pause()
        ends.append((run.result.status, len(run.result.revisions)))
    assert ends == [("paused", 1), ("paused", 2), ("paused", 3), ("failed", 3)]


async def test_wall_clock_stands_still_meanwhile() -> None:
    """The time for which nobody was at a run does not use up its wall clock; the time before counts."""
    store = MemoryStore()
    settings = Settings.model_validate({"budget": {"wall_clock": 100}})
    ends, now = [], VirtualClock().now()
    for work in (60.0, 30.0, 30.0):
        async with VirtualClock(now) as clock:
            keeper = ReplanningEngine([], store=store, settings=settings, environment=environment(clock))
            source = keeper.resume(RUN) if store.runs() else keeper.open(chain("a"), run_id=RUN)
            async with source as run:
                await clock.sleep(work)
        end = list(store.read(RUN))[-1]
        ends.append((run.result.status, end.at - now))
        now = clock.now() + 1_000_000
    assert ends == [("paused", 60), ("paused", 30), ("aborted", 10)]


async def test_clock_behind() -> None:
    """On a machine whose clock is behind, no record is stamped before the one that it follows."""
    store = MemoryStore()
    for start in (1_000_000.0, 999_000.0, 999_500.0):
        async with VirtualClock(start) as clock:
            keeper = ReplanningEngine([], store=store, environment=environment(clock))
            source = keeper.resume(RUN) if store.runs() else keeper.open(chain("a", "b", "c"), run_id=RUN)
            async with source as run:
                async for task in run.ready():
                    async with run.attempt(task):
                        await clock.sleep(5)
                        run.pause()
    assert invariant_violations(list(store.read(RUN))) == []
    assert [record.at for record in store.read(RUN)][-1] == 1_000_005


async def test_absent_tools_are_announced_once() -> None:
    """That a tool is unavailable from the start is said once, also where the run was cut off before it could be."""
    _, records = await from_start()
    for seen in (1, 2, 3):
        _, all_records = await resumed(records[:seen])
        assert [record.body.kind for record in all_records].count("resource-updated") == 1


async def test_request_from_elsewhere_counts_once() -> None:
    """A request that is on record already, because only its message could not be taken away, is not made again."""
    kept = MemoryStore()
    stuck = FlakyStore(kept, fails=lambda operation, number: operation == "discard")
    async with engine(kept).open(chain("a"), run_id=RUN):
        kept.post(RUN, InboxMessage("request", 1.0, "eve", {"reason": "look again"}))
    for _ in range(2):
        async with engine(stuck).resume(RUN):
            pass
    assert len(kept.inbox(RUN)) == 1
    assert [body.message for body in bodies(kept, RUN, ReplanRequested)] == [kept.inbox(RUN)[0].id]
    assert len(bodies(kept, RUN, TriggerFired)) == 1


async def test_resuming_lifts_a_pause() -> None:
    """A pause that was asked for before somebody resumed the run was meant for what ran then."""
    store = MemoryStore()
    async with engine(store).open(chain("a"), run_id=RUN):
        store.post(RUN, InboxMessage("pause", 1.0, "eve", {"reason": "stop"}))
    async with engine(store).resume(RUN) as run:
        assert await through(run) == ["a"]
    assert run.result.status == "succeeded"
    assert store.inbox(RUN) == []


# Forks


async def test_fork_at_every_revision() -> None:
    """From each revision of an eventful run, the first document included, a fork ends as the run itself did."""
    result, records = await from_start()
    store = cut(records)
    for revision in range(len(result.revisions) + 1):
        async with VirtualClock(records[-1].at + 1e6) as clock:
            keeper = engine_for(store, clock)
            fork = keeper.fork(RUN, revision, new_id=f"fork-{revision}")
            async with keeper.resume(fork) as run:
                assert run.live.revision == revision
                await carry_on(run, clock)
        forked = list(store.read(fork))
        assert (run.result.status, run.result.outputs) == (result.status, result.outputs), revision
        assert story(forked) == story(records), revision
        assert forked[0].body.forked_from == (RUN, revision)
        assert replay_differences(run, forked, clock.now()) == []
    assert list(store.read(RUN)) == records


async def test_fork_is_a_run_of_its_own() -> None:
    """Questions, triggers and interruptions of a fork name the fork, and nothing of the old run is taken along."""
    _, records = await from_start()
    store = cut(records)
    async with VirtualClock(records[-1].at) as clock:
        keeper = engine_for(store, clock)
        fork = keeper.fork(RUN, 5, new_id="fork")
        async with keeper.resume(fork):
            pass
    assert {body.trigger.run for body in bodies(store, fork, TriggerFired)} == {fork}
    assert {body.question for body in bodies(store, fork, QuestionAsked)} == {f"{fork}.q1"}


async def test_fork_of_work_under_way() -> None:
    """Attempts that were running at the checkpoint are interrupted in the fork, which did not start them."""
    store = MemoryStore()
    async with engine(store).open(plan(Task(id="a", idempotent=True)), run_id=RUN) as run:
        attempt = run.started("a")
        run.apply([AddTask(task=Task(id="b"))])
        run.succeeded(attempt)
    fork = engine(store).fork(RUN, 1)
    async with engine(store).resume(fork) as other:
        assert sorted(await through(other)) == ["a", "b"]
    (cut_off,) = bodies(store, fork, AttemptInterrupted)
    assert (cut_off.task, cut_off.reason) == ("a", "it was running when the run was forked")


async def test_fork_while_the_run_goes_on() -> None:
    """Forking a run that is under way takes nothing from it."""
    store = MemoryStore()
    keeper = engine(store)
    async with keeper.open(chain("a", "b"), run_id=RUN) as run:
        run.apply([AddTask(task=Task(id="c"))])
        async with keeper.resume(keeper.fork(RUN, 1, new_id="other")) as other:
            assert await through(other) == ["a", "b", "c"]
        assert await through(run) == ["a", "b", "c"]
    assert [run.result.status, other.result.status] == ["succeeded", "succeeded"]


async def test_no_such_revision() -> None:
    """A fork from a revision that the run does not have says which it has."""
    store = MemoryStore()
    async with engine(store).open(chain("a"), run_id=RUN) as run:
        run.apply([SkipTask(task_id="a")])
    with pytest.raises(StoreError, match="run 'run-1' has no revision 7; it has revisions 0 to 1"):
        engine(store).fork(RUN, 7)
    with pytest.raises(StoreError, match="no revision -1"):
        engine(store).fork(RUN, -1)


async def test_fork_cut_off() -> None:
    """A fork whose copying was cut off is not taken for a run, and the message says what to do."""
    _, records = await from_start()
    flaky = FlakyStore(cut(records), fails=lambda operation, number: operation == "append" and number == 20)
    async with VirtualClock() as clock:
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
        async with engine(store).resume(RUN):
            pass
    store.release(store.acquire(RUN, "somebody else", 0.0, 1.0))
    return str(caught.value)


async def test_newer_version() -> None:
    """A journal of a newer version is refused with the way out, whether it was opened or resumed by it."""
    _, records = await from_start()
    opened = records[0].body
    assert isinstance(opened, RunOpened)
    newer = [records[0]._replace(body=replace(opened, version="9.1.2"))]
    assert await refused(cut(newer)) == (
        "run 'run-1' was written by replanning 9.1.2, and this is 0.1.0, which may not understand it; "
        "upgrade: pip install 'replanning>=9.1.2'"
    )
    assert "9.3.0" in await refused(cut([records[0], Record(2, 1.0, RunResumed("me", version="9.3.0"))]))


async def test_newer_kind_of_record(tmp_path: Path) -> None:
    """A record of a kind that only a newer version knows is reported as that, and not as damage."""
    store = await on_disk(tmp_path)
    path = tmp_path / f"{RUN}.jsonl"
    lines = path.read_text().splitlines()
    lines[1] = '{"seq":2,"at":1.0,"kind":"task-teleported","data":{}}'
    path.write_text("\n".join([*lines, ""]).replace('"version":"0.1.0"', '"version":"7.0"'))
    assert "written by replanning 7.0" in await refused(store)
    path.write_text(path.read_text().replace('"version":"7.0"', '"version":"0.1.0"'))
    assert f"{path}, line 2: unknown kind of record 'task-teleported'" in await refused(store, JournalCorrupt)


async def test_first_record_missing() -> None:
    """A journal that does not begin with the opening of its run is refused."""
    _, records = await from_start()
    moved = [record._replace(seq=seq) for seq, record in enumerate(records[1:4], 1)]
    assert "begins with 'resource-updated'" in await refused(cut(moved), JournalCorrupt)


async def test_records_of_another_run(tmp_path: Path) -> None:
    """A journal under the name of another run is refused, and the message names both."""
    store = await on_disk(tmp_path)
    (tmp_path / f"{RUN}.jsonl").rename(tmp_path / "copy.jsonl")
    with pytest.raises(JournalCorrupt, match="'copy' holds the records of run 'run-1'"):
        async with engine(store).resume("copy"):
            pass


async def test_records_that_do_not_fit() -> None:
    """A journal whose records contradict each other is refused at the first one that cannot have happened."""
    _, records = await from_start()
    done = next(record for record in records if isinstance(record.body, AttemptSucceeded))
    twice = done._replace(seq=done.seq + 1)
    message = await refused(cut([*records[: done.seq], twice]), JournalCorrupt)
    assert message.startswith(
        f"record {twice.seq} (attempt-succeeded) of run 'run-1' does not fit the records before it: "
    )
    assert "'start'" in message


async def test_damaged_line(tmp_path: Path) -> None:
    """A journal edited by hand is refused with file and line, and the same run as before can be resumed when it is mended."""
    store = await on_disk(tmp_path)
    path = tmp_path / f"{RUN}.jsonl"
    whole = path.read_text()
    lines = whole.splitlines()
    path.write_text("\n".join([*lines[:2], lines[2][:-9], *lines[3:], ""]))
    assert f"{path}, line 3: " in await refused(store, JournalCorrupt)
    path.write_text(whole)
    async with engine(store).resume(RUN) as run:
        assert await through(run) == ["b"]


async def test_opened_and_killed_at_once() -> None:
    """A process that was killed between taking a run and its first record leaves nothing that is in the way."""
    store = MemoryStore()
    store.release(store.create(RUN, "killed", 0.0, 1.0))
    assert "has no records" in await refused(store)
    async with engine(store).open(chain("a"), run_id=RUN) as run:
        assert await through(run) == ["a"]
    with pytest.raises(StoreError, match="run 'run-1' already exists"):
        async with engine(store).open(chain("a"), run_id=RUN):
            pass


async def test_owned_by_this_process() -> None:
    """A run that is open cannot be resumed a second time, not even here; the message names its owner."""
    store = MemoryStore()
    async with engine(store).open(chain("a"), run_id=RUN) as run:
        with pytest.raises(RunOwned, match=r"run 'run-1' is owned by process \d+ on "):
            async with engine(store).resume(RUN):
                pass
        assert await through(run) == ["a"]
    assert run.result.status == "succeeded"


async def test_copied_elsewhere(tmp_path: Path) -> None:
    """The text file of a run, copied to another folder, is all that it takes to go on with it there."""
    await on_disk(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / f"{RUN}.jsonl").write_bytes((tmp_path / f"{RUN}.jsonl").read_bytes())
    async with engine(JsonlStore(other)).resume(RUN) as run:
        assert run.live.entry("a").state is TaskState.DONE
        assert await through(run) == ["b"]
    assert run.result.outputs == {"a": None, "b": None}


async def on_disk(folder: Path) -> JsonlStore:
    """A store of text with a run that was paused after the first of two tasks."""
    store = JsonlStore(folder)
    async with engine(store).open(chain("a", "b"), run_id=RUN) as run:
        run.succeeded(run.started("a"))
    return store
