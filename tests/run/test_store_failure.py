"""Runs whose store fails, for a while or for good, loses the run to another process, or can never keep something."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from replanning import PlanRun, ReplanningEngine, Settings, Task, TaskContext, TaskState, open_run
from replanning.changes import AddTask, ReplaceTask
from replanning.errors import NotRunning, RecordNotSerializable, StoreError, UnknownTask
from replanning.journal import (
    AttemptFailed,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    ContextUpdated,
    ErrorContained,
    Lease,
    MemoryStore,
    PlanRevised,
    Record,
    RunEnded,
    RunStore,
    SqliteStore,
)
from replanning.testing import FlakyStore, VirtualClock
from tests.support.invariants import invariant_violations, replay_differences
from tests.support.resume import RUN, carry_on, engine_for, eventful, from_start, story, through
from tests.support.runs import Proposer, again, alternative, bodies, chain, environment, failing, plan


class Refusing(MemoryStore):
    """Refuses the records of which a function says why; keeps the others."""

    def __init__(self, why: Callable[[Record], Exception | None]) -> None:
        super().__init__()
        self.refused: list[Record] = []
        self._why = why

    def append(self, lease: Lease, record: Record) -> None:
        """Keep a record, or raise what the function says."""
        if (error := self._why(record)) is not None:
            self.refused.append(record)
            raise error
        super().append(lease, record)


def outage(clock: VirtualClock, begin: float, end: float, store: RunStore | None = None) -> FlakyStore:
    """A store that takes nothing from one second of the clock to another."""
    return FlakyStore(store, fails=lambda operation, number: operation == "append" and begin <= clock.elapsed < end)


# For a while


async def test_transient() -> None:
    """While the store fails nothing new begins and what ends is kept; then the run goes on and its journal is whole."""
    async with VirtualClock() as clock:
        began: list[tuple[str, float]] = []

        async def work(task: Task, context: TaskContext) -> float:
            began.append((task.id, clock.elapsed))
            await clock.sleep(3)
            return clock.elapsed

        store = outage(clock, 5, 12)
        keeper = ReplanningEngine([], store=store, environment=environment(clock))
        tasks = [Task(id=f"t{number}") for number in range(12)]
        result = await keeper.execute(plan(*tasks), work, max_concurrency=3)
    records = list(store.read(result.run))
    assert (result.status, result.unjournaled, len(result.outputs)) == ("succeeded", False, 12)
    assert [round(when) for _, when in began] == [0, 0, 0, 3, 3, 3, 12, 12, 12, 15, 15, 15]
    started = [(r.body.task, r.at - 1.7e9) for r in records if isinstance(r.body, AttemptStarted)]
    assert started == began
    assert invariant_violations(records) == []
    assert len({record.body.attempt for record in records if isinstance(record.body, AttemptSucceeded)}) == 12


async def test_failure_at_any_record() -> None:
    """A run ends with the same results and decisions if the store refuses any one record three times."""
    result, records = await from_start()
    for seq in range(2, len(records) + 1):
        left = iter(range(3))
        store = Refusing(
            lambda record, seq=seq, left=left: StoreError("full") if record.seq == seq and next(left, 9) < 3 else None  # type: ignore[misc]
        )
        async with VirtualClock() as clock, engine_for(store, clock).open(eventful(), run_id=RUN) as run:
            await carry_on(run, clock)
        assert len(store.refused) == 3
        assert (run.result.status, run.result.outputs) == (result.status, result.outputs), store.refused
        assert story(list(store.read(RUN))) == story(records), store.refused
        assert replay_differences(run, store.read(RUN), clock.now()) == []


async def test_no_start_no_work() -> None:
    """Work whose start cannot be put on record does not run, not even its first line."""
    ran = []

    async def work(task: Task, context: TaskContext) -> None:
        ran.append(task.id)

    store = Refusing(lambda record: StoreError("full") if isinstance(record.body, AttemptStarted) else None)
    async with VirtualClock() as clock:
        keeper = ReplanningEngine([], store=store, environment=environment(clock))
        result = await keeper.execute(chain("a"), work)
        assert ran == []
        async with keeper.open(chain("a"), run_id="own") as run:
            async for task in run.ready():
                async with run.attempt(task) as attempt:
                    with pytest.raises(NotRunning, match="no attempt at 'a' was started"):
                        attempt.context  # noqa: B018
                    await anyio.lowlevel.checkpoint()
                    ran.append("more")
    assert ran == []
    assert [result.status, run.result.status] == ["paused", "paused"]
    assert [record.body.kind for record in store.read(result.run)] == ["run-opened", "run-ended"]


async def test_rare_failures_do_not_add_up() -> None:
    """Patience begins anew whenever the store has taken a record, or was not needed for long."""
    async with VirtualClock() as clock:

        async def work(task: Task, context: TaskContext) -> None:
            await clock.sleep(600)

        store = FlakyStore(fails=lambda operation, number: operation == "append" and number % 3 == 0)
        settings = Settings(store_patience=0.15)
        keeper = ReplanningEngine([], store=store, settings=settings, environment=environment(clock))
        result = await keeper.execute(chain(*"abcdefgh"), work)
    assert (result.status, store.failures > 5) == ("succeeded", True)


async def test_deadline_of_what_has_ended() -> None:
    """A deadline that passes while the end of its attempt cannot be recorded does not time the attempt out."""
    async with VirtualClock() as clock:
        store = outage(clock, 2, 20)
        keeper = ReplanningEngine([], store=store, environment=environment(clock))

        async def work(task: Task, context: TaskContext) -> str:
            await clock.sleep(3)
            return "done"

        result = await keeper.execute(plan(Task(id="a", timeout=10)), work)
    assert (result.status, result.outputs) == ("succeeded", {"a": "done"})
    assert bodies(store, result.run, AttemptTimedOut) == []


async def test_deadline_meanwhile() -> None:
    """A deadline that passes while the store fails stops the work in time, and is on record later."""
    async with VirtualClock() as clock:
        store = outage(clock, 2, 20)
        keeper = ReplanningEngine([], store=store, environment=environment(clock))
        stopped: list[float] = []

        async def work(task: Task, context: TaskContext) -> None:
            try:
                await clock.sleep(1000)
            finally:
                stopped.append(clock.elapsed)

        result = await keeper.execute(plan(Task(id="a", timeout=10)), work)
    assert (result.status, stopped) == ("failed", [10])
    assert len(bodies(store, result.run, AttemptTimedOut)) == 1


async def test_wall_clock_meanwhile() -> None:
    """A wall clock that is used up while the store fails ends the run as soon as the store works."""
    async with VirtualClock() as clock:
        store = outage(clock, 5, 20)
        settings = Settings.model_validate({"budget": {"wall_clock": 10}})
        keeper = ReplanningEngine([], store=store, settings=settings, environment=environment(clock))
        async with keeper.open(chain("a"), run_id=RUN) as run:
            run.started("a")
            await clock.sleep(6)
            with pytest.raises(StoreError):
                run.apply([AddTask(task=Task(id="b"))])
            result = await run.wait()
    assert (result.status, bodies(store, RUN, RunEnded)) == ("aborted", [RunEnded("aborted", result.reason)])


async def test_edits_are_refused() -> None:
    """While the store fails an edit raises, and the plan is as it was; afterwards the same edit is taken."""
    async with VirtualClock() as clock:
        store = outage(clock, 1, 3)
        keeper = ReplanningEngine([], store=store, environment=environment(clock))
        async with keeper.open(chain("a"), run_id=RUN) as run:
            await clock.sleep(2)
            for _ in range(2):
                with pytest.raises(StoreError, match="fail"):
                    run.apply([AddTask(task=Task(id="b"))])
            assert (run.live.revision, "b" in run.live) == (0, False)
            await clock.sleep(2)
            assert run.apply([AddTask(task=Task(id="b"))]) == 1
    assert len(bodies(store, RUN, PlanRevised)) == 1


async def test_processes_that_cannot_be_noted() -> None:
    """A process that cannot be put on record is an error to the work that started it, which is run again."""

    async def work(task: Task, context: TaskContext) -> str:
        context.record_process(999_999_999)
        return "noted"

    left = iter(range(1))
    store = Refusing(
        lambda record: StoreError("full") if record.body.kind == "process-started" and next(left, 9) < 1 else None
    )
    async with VirtualClock() as clock:
        keeper = ReplanningEngine([], store=store, environment=environment(clock))
        result = await keeper.execute(chain("a"), work)
    assert (result.status, result.outputs) == ("succeeded", {"a": "noted"})
    assert [body.failure.type for body in bodies(store, result.run, AttemptFailed)] == ["StoreError"]


# For good


async def test_lasting() -> None:
    """After its patience the run ends paused and says why; what runs may finish, and nothing else begins."""
    async with VirtualClock() as clock:
        finished: list[tuple[str, float]] = []

        async def work(task: Task, context: TaskContext) -> None:
            await clock.sleep(100 if task.id == "long" else 2)
            finished.append((task.id, clock.elapsed))

        kept = MemoryStore()
        store = outage(clock, 3, 1e9, kept)
        keeper = ReplanningEngine([], store=store, environment=environment(clock))
        tasks = [Task(id="long", idempotent=True), *(Task(id=f"t{number}") for number in range(9))]
        result = await keeper.execute(plan(*tasks), work, max_concurrency=2)
    assert result.status == "paused"
    assert result.reason.startswith("the store has failed for 30 s: call ")
    assert finished == [("t0", 2), ("t1", 4), ("long", 100)]
    journaled = [body.task for body in bodies(store, result.run, AttemptSucceeded)]
    assert journaled == ["t0"]
    async with VirtualClock() as clock:
        keeper = ReplanningEngine([], store=kept, environment=environment(clock))
        async with keeper.resume(result.run) as run:
            ran = await through(run)
    assert set(ran) == {"long", *(f"t{number}" for number in range(2, 9))}


async def test_back_when_the_run_is_left() -> None:
    """A task that finished after patience was over is on record if the store works when the run is left."""
    async with VirtualClock() as clock:

        async def work(task: Task, context: TaskContext) -> str:
            await clock.sleep(100)
            return "done"

        store = outage(clock, 3, 90)
        keeper = ReplanningEngine([], store=store, settings=Settings(store_patience=1), environment=environment(clock))
        async with keeper.open(chain("a", "b"), run_id=RUN) as run:
            run.started("a")
            await clock.sleep(5)
            run.observe(holds=["on(a)"])
            await run.wait()
            assert (run.result.status, clock.elapsed) == ("paused", 6)
            await clock.sleep(90)
            run.succeeded("a#1", "late")  # type: ignore[arg-type]
    assert [body.output for body in bodies(store, RUN, AttemptSucceeded)] == ["late"]
    assert bodies(store, RUN, RunEnded) == [RunEnded("paused", run.result.reason)]
    assert invariant_violations(list(store.read(RUN))) == []


async def test_left_while_the_store_fails() -> None:
    """A run that is left while its store fails is paused, and its result says that the journal does not know."""
    async with VirtualClock() as clock:
        store = outage(clock, 0.5, 1e9)
        keeper = ReplanningEngine([], store=store, environment=environment(clock))
        async with keeper.open(chain("a", "b"), run_id=RUN) as run:
            attempt = run.started("a")
            await clock.sleep(1)
            run.succeeded(attempt, 1)
    assert run.result.status == "paused"
    assert (
        "left before the end; the store fails, so this and what happened last is not in the journal"
        in run.result.reason
    )
    assert bodies(store, RUN, AttemptSucceeded) == []


async def test_no_patience() -> None:
    """Without patience the first failure ends the run."""
    async with VirtualClock() as clock:
        store = outage(clock, 0.5, 1e9)
        keeper = ReplanningEngine([], store=store, settings=Settings(store_patience=0), environment=environment(clock))
        async with keeper.open(chain("a", "b"), run_id=RUN) as run:
            await clock.sleep(1)
            with pytest.raises(StoreError):
                run.started("a")
            assert (run.result.status, clock.elapsed) == ("paused", 1)


async def test_other_peoples_errors() -> None:
    """A store that raises errors of its own is a failing store, whichever operation it fails in."""

    class Odd(FlakyStore):
        durable = True

        def _through(self, operation: str) -> RunStore:
            if operation not in ("create", "append", "read"):
                raise OSError(f"no {operation} today")
            return super()._forward(operation)

    async with VirtualClock() as clock:
        store = Odd(durable=True)
        keeper = ReplanningEngine([Proposer(again)], store=store, environment=environment(clock))

        async def work(task: Task, context: TaskContext) -> None:
            await clock.sleep(100)

        result = await keeper.execute(chain("a"), work)
    assert result.status == "succeeded"
    refusing = Refusing(lambda record: OSError("cable") if record.seq == 2 else None)
    async with VirtualClock() as clock:
        result = await ReplanningEngine([], store=refusing, environment=environment(clock)).execute(
            chain("a"), failing()
        )
    assert (result.status, result.reason) == (
        "paused",
        "the store has failed for 30 s: the store failed: OSError('cable')",
    )


async def test_continue_unjournaled() -> None:
    """On request a run goes on without its store; the result is marked, and nothing more is written."""
    async with VirtualClock() as clock:
        store = Refusing(lambda record: StoreError("full") if record.seq == 4 else None)
        settings = Settings(on_store_failure="continue_unjournaled")
        keeper = ReplanningEngine([Proposer(again)], store=store, settings=settings, environment=environment(clock))
        result = await keeper.execute(chain("a", "b", "c"), failing("b"))
    assert (result.status, result.unjournaled) == ("succeeded", True)
    assert result.outputs == {"a": "a", "b": "b~2", "c": "c"}
    assert [record.seq for record in store.read(result.run)] == [1, 2, 3]
    assert len(store.refused) == 1


async def test_first_record_refused() -> None:
    """A run whose opening cannot be recorded is not opened, and its id can be used again."""
    left = iter(range(1))
    store = Refusing(lambda record: StoreError("full") if next(left, 9) < 1 else None)
    keeper = ReplanningEngine([], store=store)
    with pytest.raises(StoreError, match="full"):
        async with keeper.open(chain("a"), run_id=RUN):
            pass
    async with keeper.open(chain("a"), run_id=RUN) as run:
        assert run.live.counts[TaskState.READY] == 1


# Another process has the run


async def test_lease_lost() -> None:
    """A process that loses the lease stops its attempts, writes nothing more and says why."""
    store = MemoryStore()
    async with VirtualClock() as clock:
        stopped = []
        keeper = ReplanningEngine([], store=store, environment=environment(clock))

        async def work(task: Task, context: TaskContext) -> None:
            try:
                await clock.sleep(50 if task.id == "a" else 1000)
            finally:
                stopped.append((task.id, clock.elapsed))

        async def worker(run: PlanRun) -> None:
            async for task in run.ready():
                async with run.attempt(task) as attempt:
                    await work(task, attempt.context)

        tasks = plan(Task(id="a"), Task(id="b"))
        async with keeper.open(tasks, run_id=RUN) as run, anyio.create_task_group() as group:
            group.start_soon(worker, run)
            group.start_soon(worker, run)
            await clock.sleep(40)
            store.acquire(RUN, "another process", clock.now(), 30)
        assert stopped == [("a", 50), ("b", 50)]
    assert run.result.status == "paused"
    assert run.result.reason.startswith("another process has taken the run over: run 'run-1' is no longer owned under")
    assert [record.body.kind for record in store.read(RUN)] == ["run-opened", "attempt-started", "attempt-started"]


async def test_lease_lost_while_nothing_happens() -> None:
    """The loss of a lease is noticed also when there is nothing to write, by whoever renews it."""
    inner = MemoryStore()
    store = FlakyStore(inner, durable=True, fails=lambda operation, number: operation == "renew" and number < 4)
    async with VirtualClock() as clock:
        keeper = ReplanningEngine([], store=store, environment=environment(clock))
        async with keeper.open(chain("a"), run_id=RUN) as run:
            run.started("a")
            await clock.sleep(31)
            inner.acquire(RUN, "another process", clock.now(), 30)
            result = await run.wait()
        assert (result.status, clock.elapsed) == ("paused", 40)
    assert "another process has taken the run over" in result.reason


async def test_lease_is_renewed() -> None:
    """As long as its process lives, nobody else gets a run, however long nothing happens in it."""
    store = FlakyStore(MemoryStore(), durable=True)
    async with VirtualClock() as clock:
        keeper = ReplanningEngine([], store=store, environment=environment(clock))
        async with keeper.open(chain("a"), run_id=RUN):
            for _ in range(50):
                await clock.sleep(7)
                with pytest.raises(StoreError, match="is owned by process"):
                    store.acquire(RUN, "another", clock.now(), 1)


# What can never be kept


def nested(depth: int) -> object:
    """A list in a list in a list."""
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


ODD = {
    "half a surrogate pair": "\ud800",
    "in a key": {"\udfff": 1},
    "not a number": float("nan"),
    "infinite": [float("inf"), None],
    "long number": 10**5000,
    "long number inside": {"n": -(10**5000)},
    "nested": nested(200),
    "deeply nested": nested(5_000),
    "object": object(),
    "bytes": b"\xff",
    "set": {1},
}


@pytest.mark.parametrize("name", ODD)
async def test_outputs_that_cannot_be_kept(name: str, tmp_path: Path) -> None:
    """An output that no journal can have is done all the same, found while the process lives, and said to be lost later."""
    odd = ODD[name]
    with closing(SqliteStore(tmp_path / "history.db")) as store:
        async with VirtualClock() as clock:
            keeper = ReplanningEngine([], store=store, environment=environment(clock))
            async with keeper.open(chain("a", "b"), run_id=RUN) as run:
                run.succeeded(run.started("a"), odd)
                assert run.live.results.output_of("a") is odd
            assert clock.elapsed == 0
            assert bodies(store, RUN, AttemptSucceeded)[0].recoverable is False
            async with keeper.resume(RUN) as run:
                with pytest.raises(UnknownTask, match="could not be stored and was lost"):
                    run.live.results.output_of("a")
                assert await through(run) == ["b"]
        assert run.result.status == "succeeded"


async def test_outputs_at_the_limit(tmp_path: Path) -> None:
    """The deepest nesting and the longest number that a journal can have are kept, also by SQLite."""
    values = [nested(199), 10**4299, -(2**63), 2**64, "\x00\x1b\x7f\u2028\ufffe", [True, None, 1.5e308], {"": {}}]
    with closing(SqliteStore(tmp_path / "history.db")) as store:
        async with open_run(chain(*(f"t{number}" for number in range(len(values)))), store=store, run_id=RUN) as run:
            for number, value in enumerate(values):
                run.succeeded(run.started(f"t{number}"), value)
        kept = [body.output for body in bodies(store, RUN, AttemptSucceeded) if body.recoverable]
    assert json.dumps(kept) == json.dumps(values)


async def test_texts_that_cannot_be_kept() -> None:
    """In errors, facts, wishes and comments, what is no character becomes a mark, and everything else stays."""
    store = MemoryStore()
    async with open_run(plan(Task(id="a"), Task(id="b")), store=store, run_id=RUN) as run:
        run.failed(run.started("a"), OSError("no file \udcff\ud83d\ude00 here"))
        run.observe(holds=["seen(\ud800)"])
        run.request_replan("why \udfff not", by="e\ud800ve")
        run.change_context({"name\ud800": ["\udc00"]})
        run.pause("lunch\ud800")
    written = [json.dumps(record, default=str, ensure_ascii=False).encode() for record in store.read(RUN)]
    assert len(written) == 8
    (failed,) = bodies(store, RUN, AttemptFailed)
    assert failed.failure.message == "no file \ufffd\U0001f600 here"


async def test_values_that_cannot_be_kept(tmp_path: Path) -> None:
    """A context that no journal can have is refused where it is reported, and nothing has changed."""
    with closing(SqliteStore(tmp_path / "history.db")) as store:
        async with open_run(chain("a"), store=store, run_id=RUN) as run:
            for odd in (float("nan"), nested(500), 10**5000):
                with pytest.raises(RecordNotSerializable, match="be kept as JSON"):
                    run.change_context({"x": odd})
            run.change_context({"x": 1})
            assert run.live.context == {"x": 1}
        assert bodies(store, RUN, ContextUpdated) == [ContextUpdated({"x": 1})]


async def test_proposals_that_cannot_be_kept(tmp_path: Path) -> None:
    """Replanning that cannot be put on record is given up for its triggers, and the run goes on."""

    def propose(request: object) -> list[object]:
        odd = Task(id="odd", metadata={"x": float("nan")})
        return [alternative(ReplaceTask(task_id="a", tasks=(odd,)))]

    with closing(SqliteStore(tmp_path / "history.db")) as store:
        async with VirtualClock() as clock:
            keeper = ReplanningEngine([Proposer(propose)], store=store, environment=environment(clock))  # type: ignore[arg-type]
            result = await keeper.execute(plan(Task(id="a"), Task(id="b")), failing("a"))
            assert clock.elapsed < 1
        assert (result.status, result.outputs) == ("failed", {"b": "b"})
        assert result.revisions == ()


async def test_store_that_takes_less() -> None:
    """A value that the store cannot keep is left out of its record, and the run goes on."""

    def why(record: Record) -> Exception | None:
        return RecordNotSerializable("no NUL") if "\x00" in repr(record.body) or "\\x00" in repr(record.body) else None

    store = Refusing(why)
    async with VirtualClock() as clock:
        keeper = ReplanningEngine([], store=store, environment=environment(clock))
        async with keeper.open(plan(Task(id="a"), Task(id="b"), Task(id="c")), run_id=RUN) as run:
            run.succeeded(run.started("a"), "\x00")
            run.failed(run.started("b"), ValueError("bad \x00 byte"))
            with pytest.raises(RecordNotSerializable):
                run.observe(holds=["seen(\x00)"])
            run.pause("\x00")
        assert clock.elapsed == 0
    assert bodies(store, RUN, AttemptSucceeded) == [AttemptSucceeded("a#1", "a", None, recoverable=False)]  # type: ignore[arg-type]
    assert "left out" in bodies(store, RUN, AttemptFailed)[0].failure.message
    assert run.result.status == "paused"


async def test_unstorable_after_an_outage() -> None:
    """A deferred record that proves to be unstorable is replaced by a record that says so."""
    async with VirtualClock() as clock:

        def why(record: Record) -> Exception | None:
            if 1 <= clock.elapsed < 3:
                return StoreError("full")
            return RecordNotSerializable("no NUL") if "\\x00" in repr(record.body) else None

        store = Refusing(why)
        keeper = ReplanningEngine([], store=store, environment=environment(clock))
        async with keeper.open(plan(Task(id="a"), Task(id="b")), run_id=RUN) as run:
            attempt = run.started("a")
            await clock.sleep(2)
            run.observe(holds=["seen(it)"])
            run.observe(holds=["seen(\x00)"])
            run.succeeded(attempt, "\x00")
            await clock.sleep(5)
            assert run.live.entry("a").state is TaskState.DONE
    assert bodies(store, RUN, ErrorContained) == [ErrorContained("record 'facts-observed'", "no NUL")]
    assert invariant_violations(list(store.read(RUN))) == []
