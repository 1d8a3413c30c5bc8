"""Runs whose store fails, for a while or for good, loses the run to another process, or can never keep something."""

import asyncio  # noqa: TID251 # trio never leaves tasks behind
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue

import anyio
import anyio.abc
import pytest

from replanning import (
    ReplanningEngine,
    Settings,
    Task,
    TaskState,
    open_run,
)
from replanning.changes import AddTask
from replanning.errors import NotRunning, RecordNotSerializable, RunOwned, StoreError
from replanning.journal import (
    AttemptFailed,
    AttemptFenced,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    Lease,
    MemoryStore,
    NoteAdded,
    PlanRevised,
    Record,
    RunEnded,
    RunStore,
    SqliteStore,
    Usage,
)
from replanning.plan.types import AttemptId
from replanning.run.opening import RunFactory
from replanning.testing import FlakyStore, ScriptedExecutor, VirtualClock, hangs, returns
from tests.support.invariants import invariant_violations, replay_differences
from tests.support.resume import RUN, carry_on, engine_for, eventful, from_start, story
from tests.support.runs import (
    again,
    bodies,
    chain,
    failing,
    make_engine,
    perform,
    plan,
)


class Refusing(MemoryStore):
    """Refuses the records of which a function says why, the first so many; keeps the others."""

    def __init__(self, why: Callable[[Record], Exception | None], times: int = 10**9) -> None:
        super().__init__()
        self.refused: list[Record] = []
        self._why = why
        self._times = times

    def append(self, lease: Lease, record: Record) -> None:
        """Keep a record, or raise what the function says."""
        error = self._why(record)
        if error is not None and len(self.refused) < self._times:
            self.refused.append(record)
            raise error
        super().append(lease, record)


def outage(
    clock: VirtualClock, begin: float, end: float, store: RunStore | None = None
) -> FlakyStore:
    """A store that takes nothing from one second of the clock to another."""
    return FlakyStore(
        store,
        fails=lambda operation, number: operation == "append" and begin <= clock.elapsed < end,
    )


# For a while


@pytest.mark.parametrize("what", ["tool", "gpu"])
async def test_what_is_gone_after_an_outage(what, clock):
    """A task that was handed out before an outage is not started on a tool or resource that is gone after it."""
    store = outage(clock, 0.5, 5)
    document = plan(
        Task(id="a", tool="tool", resources={"gpu": 1}),
        resources={"gpu": 1},
        tools=[{"name": "tool"}],
    )
    began: list[float] = []

    async def work(task, context):
        began.append(clock.elapsed)

    engine = make_engine(store=store, clock=clock)
    async with engine.open(document) as run, anyio.create_task_group() as group:
        await clock.sleep(1)
        group.start_soon(perform, run, work)
        await clock.sleep(1)
        if what == "tool":
            run.change_resource(what, available=False)
        else:
            run.change_resource(what, capacity=0)
    assert (run.result.status, began) == ("failed", [])
    (fenced,) = bodies(store, run.id, AttemptFenced)
    assert isinstance(fenced, AttemptFenced)
    assert (
        fenced.report
        == {
            "tool": "not started: its tool 'tool' is unavailable",
            "gpu": "not started: its resources are no longer available",
        }[what]
    )
    assert invariant_violations(list(store.read(run.id))) == []


async def test_transient(clock):
    """While the store fails nothing new begins and what ends is kept; then the run goes on and its journal is whole."""
    began: list[tuple[str, float]] = []

    async def work(task, context):
        began.append((task.id, clock.elapsed))
        await clock.sleep(3)
        return clock.elapsed

    store = outage(clock, 5, 12)
    keeper = make_engine(store=store, clock=clock)
    tasks = [Task(id=f"t{number}") for number in range(12)]
    result = await keeper.execute(plan(*tasks), work, max_concurrency=3)
    records = list(store.read(result.run))
    assert (result.status, result.unjournaled, len(result.outputs)) == ("succeeded", False, 12)
    assert [round(when) for _, when in began] == [0, 0, 0, 3, 3, 3, 12, 12, 12, 15, 15, 15]
    started = [(r.body.task, r.at - 1.7e9) for r in records if isinstance(r.body, AttemptStarted)]
    assert started == began
    assert invariant_violations(records) == []
    assert (
        len(
            {record.body.attempt for record in records if isinstance(record.body, AttemptSucceeded)}
        )
        == 12
    )


async def test_failure_at_any_record():
    """A run ends with the same results and decisions if the store refuses any one record three times."""
    result, records = await from_start()
    for seq in range(2, len(records) + 1):
        store = Refusing(
            lambda record, seq=seq: StoreError("full") if record.seq == seq else None,  # type: ignore[misc]
            times=3,
        )
        async with (
            VirtualClock() as clock,
            engine_for(store, clock).open(eventful(), run_id=RUN) as run,
        ):
            await carry_on(run, clock)
        assert len(store.refused) == 3
        assert (run.result.status, run.result.outputs) == (result.status, result.outputs), (
            store.refused
        )
        assert story(list(store.read(RUN))) == story(records), store.refused
        assert replay_differences(run, store.read(RUN), clock.now()) == []


async def test_no_start_no_work(clock):
    """Work whose start cannot be put on record does not run, not even its first line."""
    work = ScriptedExecutor()
    store = Refusing(
        lambda record: StoreError("full") if isinstance(record.body, AttemptStarted) else None
    )
    engine = make_engine(store=store, clock=clock)
    result = await engine.execute(chain("a"), work)
    async with engine.open(chain("a")) as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                with pytest.raises(NotRunning, match="no attempt at 'a' was started"):
                    attempt.context  # noqa: B018
                await anyio.lowlevel.checkpoint()
                raise AssertionError
    assert (result.status, run.result.status, work.calls) == ("paused", "paused", [])
    assert [record.body.kind for record in store.read(result.run)] == ["run-opened", "run-ended"]


async def test_rare_failures_do_not_add_up(clock):
    """Patience begins anew whenever the store has taken a record, or was not needed for long."""
    store = FlakyStore(fails=lambda operation, number: operation == "append" and number % 3 == 0)
    work = ScriptedExecutor(default=returns(after=600), clock=clock)
    result = await make_engine(store=store, clock=clock, store_patience=0.15).execute(
        chain(*"abcdefgh"), work
    )
    assert (result.status, store.failures > 5) == ("succeeded", True)


async def test_deadline_meanwhile(clock):
    """A deadline that passes while the store fails stops work that goes on, and not what has ended before."""
    store = outage(clock, 2, 20)
    work = ScriptedExecutor({"a": hangs(), "b": returns("fine", after=3)}, clock=clock)
    tasks = (Task(id="a", timeout=10), Task(id="b", timeout=10))
    result = await make_engine(store=store, clock=clock).execute(plan(*tasks), work)
    assert (result.status, result.outputs) == ("needs_human", {"b": "fine"})
    assert [body.attempt for body in bodies(store, result.run, AttemptTimedOut)] == ["a#1"]
    assert invariant_violations(list(store.read(result.run))) == []


async def test_budget_meanwhile(clock):
    """What is spent while the store fails counts against the budget: once it is exceeded no task begins."""

    async def work(task, context):
        await clock.sleep(1)
        context.charge(tokens=120)

    engine = make_engine(store=outage(clock, 0.5, 5), clock=clock)
    result = await engine.execute(plan(*chain("a", "b").tasks, budget={"tokens": 100}), work)
    assert (result.status, result.spent, list(result.outputs)) == (
        "aborted",
        Usage(tokens=120),
        ["a"],
    )


async def test_edits_are_refused(clock):
    """While the store fails an edit raises, and the plan is as it was; afterwards the same edit is taken."""
    store = outage(clock, 1, 3)
    async with make_engine(store=store, clock=clock).open(chain("a")) as run:
        await clock.sleep(2)
        for _ in range(2):
            with pytest.raises(StoreError, match="fail"):
                run.apply([AddTask(task=Task(id="b"))])
        assert (run.live.revision, "b" in run.live) == (0, False)
        await clock.sleep(2)
        assert run.apply([AddTask(task=Task(id="b"))]) == 1
    assert len(bodies(store, RUN, PlanRevised)) == 1


async def test_processes_that_cannot_be_noted(clock):
    """A process that cannot be put on record is an error to the work that started it, which is run again."""

    async def work(task, context):
        context.record_process(999_999_999)
        return "noted"

    store = Refusing(
        lambda record: StoreError("full") if record.body.kind == "process-started" else None,
        times=1,
    )
    result = await make_engine(store=store, clock=clock).execute(chain("a"), work)
    assert (result.status, result.outputs) == ("succeeded", {"a": "noted"})
    assert [body.failure.type for body in bodies(store, result.run, AttemptFailed)] == [
        "StoreError"
    ]


# For good


async def test_lasting():
    """After its patience the run ends paused and says why; what runs may finish, and nothing else begins."""
    async with VirtualClock() as clock:
        finished: list[tuple[str, float]] = []

        async def work(task, context):
            await clock.sleep(100 if task.id == "long" else 2)
            finished.append((task.id, clock.elapsed))

        kept = MemoryStore()
        engine = make_engine(store=outage(clock, 3, 1e9, kept), clock=clock)
        tasks = [Task(id="long", idempotent=True), *(Task(id=f"t{number}") for number in range(9))]
        result = await engine.execute(plan(*tasks), work, max_concurrency=2)
    assert result.status == "paused"
    assert result.reason.startswith("the store has failed for 30 s: call ")
    assert finished == [("t0", 2), ("t1", 4), ("long", 100)]
    assert [body.task for body in bodies(kept, result.run, AttemptSucceeded)] == ["t0"]
    async with (
        VirtualClock() as clock,
        make_engine(store=kept, clock=clock).resume(result.run) as run,
    ):
        assert set(await perform(run)) == {"long", *(f"t{number}" for number in range(2, 9))}


async def test_calls_that_take_long_to_fail():
    """The time that calls of a failing store take counts as well: the run ends when patience is over, not minutes later."""

    class LateClock(VirtualClock):
        late = 0.0

        def now(self) -> float:
            return super().now() + self.late

    class SlowToFail(Refusing):
        def append(self, lease: Lease, record: Record) -> None:
            try:
                super().append(lease, record)
            except StoreError:
                clock.late += 4.0
                raise

    async with LateClock() as clock:
        began = clock.now()
        store = SlowToFail(lambda record: StoreError("gone") if record.seq > 3 else None)
        engine = make_engine(store=store, clock=clock)
        result = await engine.execute(chain("a", "b"), ScriptedExecutor())
        took = clock.now() - began
    assert result.status == "paused"
    assert result.reason.startswith("the store has failed for 30 s: ")
    assert 30 <= took <= 40


async def test_who_waits_to_begin_leaves(clock):
    """A loop that waits for the store to begin a task goes on to its end when patience is over."""
    store = Refusing(lambda record: StoreError("full") if record.seq == 3 else None)
    work = ScriptedExecutor(default=returns(after=1), clock=clock)
    async with (
        make_engine(store=store, clock=clock).open(plan(Task(id="a"), Task(id="b"))) as run,
        anyio.create_task_group() as group,
    ):
        group.start_soon(perform, run, work)
        group.start_soon(perform, run, work)
    assert [call.task.id for call in work.calls] == ["a"]
    assert run.result.status == "paused"
    assert run.result.reason == "the store has failed for 30 s: full"


async def test_back_when_the_run_is_left(clock):
    """A task that finished after patience was over is on record if the store works when the run is left."""
    store = outage(clock, 3, 90)
    async with make_engine(store=store, store_patience=1, clock=clock).open(chain("a", "b")) as run:
        attempt = run.started("a")
        await clock.sleep(5)
        run.observe(holds=["on(a)"])
        await run.wait()
        assert (run.result.status, clock.elapsed) == ("paused", 6)
        await clock.sleep(90)
        run.succeeded(attempt, "late")
    assert [body.output for body in bodies(store, RUN, AttemptSucceeded)] == ["late"]
    assert bodies(store, RUN, RunEnded) == [RunEnded("paused", run.result.reason)]
    assert invariant_violations(list(store.read(RUN))) == []


async def test_left_while_the_store_fails(clock):
    """A run that is left while its store fails is paused, and its result says that the journal does not know."""
    store = outage(clock, 0.5, 1e9)
    async with make_engine(store=store, clock=clock).open(chain("a", "b")) as run:
        attempt = run.started("a")
        await clock.sleep(1)
        run.succeeded(attempt, 1)
    assert run.result.status == "paused"
    assert (
        "left before the end; the store fails, so this and what happened last is not in the journal"
        in (run.result.reason)
    )
    assert bodies(store, RUN, AttemptSucceeded) == []


async def test_other_peoples_errors():
    """A store that raises errors of its own is a failing store, whichever operation it fails in."""

    def odd(operation: str, number: int) -> bool:
        if operation not in ("create", "append", "read"):
            raise OSError(f"no {operation} today")
        return False

    async with VirtualClock() as clock:
        work = ScriptedExecutor(default=returns(after=100), clock=clock)
        result = await make_engine(
            again, store=FlakyStore(fails=odd, durable=True), clock=clock
        ).execute(chain("a"), work)
    assert result.status == "succeeded"
    refusing = Refusing(lambda record: OSError("cable") if record.seq == 2 else None)
    async with VirtualClock() as clock:
        result = await make_engine(store=refusing, clock=clock).execute(chain("a"), failing())
    reason = "the store has failed for 30 s: OSError('cable')"
    assert (result.status, result.reason) == ("paused", reason)


async def test_continue_unjournaled(clock):
    """On request a run goes on without its store; the result is marked, and nothing more is written."""
    store = Refusing(lambda record: StoreError("full") if record.seq == 4 else None)
    engine = make_engine(again, store=store, clock=clock, on_store_failure="continue_unjournaled")
    result = await engine.execute(chain("a", "b", "c"), failing("b"))
    assert (result.status, result.unjournaled) == ("succeeded", True)
    assert result.outputs == {"a": "a", "b": "b~2", "c": "c"}
    assert [record.seq for record in store.read(result.run)] == [1, 2, 3]
    assert len(store.refused) == 1


async def test_first_record_refused():
    """A run whose opening cannot be recorded is not opened, and its id can be used again."""
    engine = make_engine(store=Refusing(lambda record: StoreError("full"), times=1))
    with pytest.raises(StoreError, match="full"):
        async with engine.open(chain("a"), run_id=RUN):
            pass
    async with engine.open(chain("a"), run_id=RUN) as run:
        assert run.live.counts[TaskState.READY] == 1


# Another process has the run


async def test_lease_lost(clock):
    """A process that loses the lease stops its attempts, writes nothing more and says why."""
    store = MemoryStore()
    stopped = []

    async def work(task, context):
        try:
            await clock.sleep(50 if task.id == "a" else 1000)
        finally:
            stopped.append((task.id, clock.elapsed))

    engine = make_engine(store=store, clock=clock)
    async with (
        engine.open(plan(Task(id="a"), Task(id="b"))) as run,
        anyio.create_task_group() as group,
    ):
        group.start_soon(perform, run, work)
        group.start_soon(perform, run, work)
        await clock.sleep(40)
        store.acquire(RUN, "another process", clock.now(), 30)
    assert stopped == [("a", 50), ("b", 50)]
    assert run.result.status == "paused"
    assert run.result.reason.startswith(
        "another process has taken the run over: run 'run-1' is no longer owned under"
    )
    assert [record.body.kind for record in store.read(RUN)] == [
        "run-opened",
        "attempt-started",
        "attempt-started",
    ]


async def test_lease_lost_while_nothing_happens(clock):
    """The loss of a lease is noticed also when there is nothing to write, by whoever renews it."""
    inner = MemoryStore()
    store = FlakyStore(
        inner, durable=True, fails=lambda operation, number: operation == "renew" and number < 4
    )
    async with make_engine(store=store, clock=clock).open(chain("a")) as run:
        run.started("a")
        await clock.sleep(31)
        inner.acquire(RUN, "another process", clock.now(), 30)
        result = await run.wait()
    assert (result.status, clock.elapsed) == ("paused", 40)
    assert "another process has taken the run over" in result.reason


async def test_lease_is_renewed(clock):
    """As long as its process lives, nobody else gets a run, however long nothing happens in it."""
    store = FlakyStore(MemoryStore(), durable=True)
    async with make_engine(store=store, clock=clock).open(chain("a")):
        for _ in range(50):
            await clock.sleep(7)
            with pytest.raises(StoreError, match="is owned by process"):
                store.acquire(RUN, "another", clock.now(), 1)


async def test_lease_is_renewed_while_the_loop_is_blocked(tmp_path):
    """Nobody else gets a run whose work blocks the event loop for longer than the lease; a loss is noticed all the same."""
    renewals = SimpleQueue[float]()

    class ObservedStore(SqliteStore):
        def renew(self, lease: Lease, at: float, ttl: float) -> None:
            super().renew(lease, at, ttl)
            renewals.put(at)

    factory = RunFactory(ObservedStore(tmp_path / "history"), Settings(), lease_ttl=0.06)
    other = SqliteStore(tmp_path / "history")
    async with open_run(chain("a"), factory=factory) as run:
        run.started("a")
        last = [renewals.get(timeout=10) for _ in range(5)][-1]
        with pytest.raises(RunOwned):
            other.acquire(run.id, "another process", last, 100)
        other.acquire(run.id, "another process", last + 100, 100)
        assert "another process has taken the run over" in (await run.wait()).reason
    factory.store.close()
    other.close()


class AbandonedLoop(asyncio.SelectorEventLoop):
    """An event loop that seems to be closed from some time on, as one that was closed before its tasks had ended."""

    is_abandoned = False

    def is_closed(self) -> bool:
        """Whether it is closed, or seems to be."""
        return self.is_abandoned or super().is_closed()


@pytest.mark.parametrize("ttl", [0.06, 30.0])
def test_run_of_a_closed_loop_is_free(tmp_path, ttl):
    """A run that nobody can leave, because its event loop is gone, can be resumed: here at once, elsewhere soon."""
    releases = SimpleQueue[Lease]()

    class ObservedStore(SqliteStore):
        def release(self, lease: Lease) -> None:
            super().release(lease)
            releases.put(lease)

    factory = RunFactory(ObservedStore(tmp_path / "history"), Settings(), lease_ttl=ttl)
    loop = AbandonedLoop()

    async def work() -> None:
        async with open_run(chain("a"), factory=factory) as run:
            run.started("a")
            loop.is_abandoned = True
            if ttl < 1:
                releases.get(timeout=10)
                factory.store.acquire(run.id, "another process", 0, 100)
            else:
                assert (await factory.resume(run.id)).id == run.id

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(work())
        loop.is_abandoned = False
    factory.store.close()


# What can never be kept


SECRET = "password=correcthorsebattery"


@pytest.mark.parametrize(
    ("odd", "plain"),
    [
        ("half \ud800", "half \ufffd"),
        ({"\udfff": (1, (SECRET,))}, {"\ufffd": [1, ["password=[redacted]"]]}),
        ({1: TaskState.DONE}, {"1": "DONE"}),
    ],
    ids=["surrogate", "tuple", "subclass"],
)
async def test_context_and_notes_are_made_json(odd, plain, tmp_path):
    """The context and notes are made JSON when they enter, and a resumed run reads them without secrets."""
    with closing(SqliteStore(tmp_path / "history.db")) as store:
        async with open_run(chain("a", "b"), store=store, run_id=RUN) as run:
            run.change_context({"x": odd})
            run.note("thought", {"x": odd})
        assert bodies(store, RUN, NoteAdded) == [NoteAdded("thought", {"x": plain})]
        async with make_engine(store=store).resume(RUN) as run:
            assert repr(run.live.context["x"]) == repr(plain)


def no_nul(record: Record) -> Exception | None:
    """Refuse what a store cannot keep: a character of the code 0."""
    return (
        RecordNotSerializable("no NUL")
        if "\x00" in repr(record.body) or "\\x00" in repr(record.body)
        else None
    )


async def test_store_that_takes_less(clock):
    """A value that the store cannot keep is left out of its record, and the run goes on."""
    store = Refusing(no_nul)
    async with make_engine(store=store, clock=clock).open(
        plan(Task(id="a"), Task(id="b"), Task(id="c"))
    ) as run:
        run.succeeded(run.started("a"), "\x00")
        run.failed(run.started("b"), ValueError("bad \x00 byte"))
        with pytest.raises(RecordNotSerializable):
            run.observe(holds=["seen(\x00)"])
        run.pause("\x00")
    assert (run.result.status, clock.elapsed) == ("paused", 0)
    assert bodies(store, RUN, AttemptSucceeded) == [
        AttemptSucceeded(
            AttemptId("a#1"),
            "a",
            None,
            recoverable=False,
            unstored="[its text cannot be kept as JSON and was left out]",
        )
    ]
    assert "left out" in bodies(store, RUN, AttemptFailed)[0].failure.message


def lock(folder: Path, group: anyio.abc.TaskGroup, statement: str = "BEGIN IMMEDIATE") -> None:
    """Hold the lock of the store in a folder, as another process would, until a task of the loop has had 200 turns."""
    held = sqlite3.connect(folder / "history.db", isolation_level=None)
    held.executescript(statement)

    async def release() -> None:
        with closing(held):
            for _ in range(200):
                await anyio.lowlevel.checkpoint()

    group.start_soon(release)


async def test_lock_of_another_process(tmp_path):
    """Opening, leaving and resuming a run wait for the lock of another process, while other tasks of the loop go on."""
    with closing(SqliteStore(tmp_path / "history.db")) as store:
        engine = ReplanningEngine([], store=store)
        async with anyio.create_task_group() as group:
            lock(tmp_path, group)
            async with engine.open(plan(Task(id="a", tool="pip")), run_id="run-1") as run:
                assert await perform(run) == ["a"]
                lock(tmp_path, group)
            assert (store.runs()[0].owner, len(store.outcomes())) == (None, 1)
            lock(tmp_path, group)
            async with engine.resume("run-1") as run:
                assert run.result.status == "succeeded"


async def test_lock_that_is_kept(tmp_path, monkeypatch):
    """A run is not opened while another process keeps its lock, and an error says so in the end."""
    monkeypatch.setattr("replanning.run.opening.LOCK_TIMEOUT", 0.0)
    path = tmp_path / "history.db"
    with closing(SqliteStore(path)) as store, closing(sqlite3.connect(path)) as held:
        held.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="another process kept the file locked"):
            async with ReplanningEngine([], store=store).open(chain("a"), run_id="run-1"):
                pass


async def test_locked_file(tmp_path):
    """A SQLite file that another process has for itself is opened by the event loop once it is free, and no thread waits."""
    SqliteStore(tmp_path / "history.db").close()
    async with anyio.create_task_group() as group:
        lock(tmp_path, group, "PRAGMA locking_mode = EXCLUSIVE; BEGIN IMMEDIATE")
        with closing(SqliteStore(tmp_path / "history.db")) as store:
            with pytest.raises(StoreError, match="another process kept the file locked"):
                store.runs()
            async with ReplanningEngine([], store=store).open(chain("a")) as run:
                assert await perform(run) == ["a"]
