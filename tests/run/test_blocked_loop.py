"""Work that blocks the event loop is told of while it does, and so is a timeout that cannot fire because of it."""

import logging
import re
from threading import Event

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from anyio.abc import TaskStatus

from replanning import Environment, ReplanningEngine, Task, tool
from replanning.environment import SystemClock
from replanning.journal import MemoryStore
from replanning.orchestrators import SequentialOrchestrator, SwarmOrchestrator
from replanning.run.watchdog import WATCHDOG
from replanning.testing import VirtualClock
from tests.support.runs import chain, make_engine, plan


class PassingClock(SystemClock):
    """A clock of this machine on which time can be made to pass at once."""

    passed = 0.0

    def now(self) -> float:
        return super().now() + self.passed


class Warned(logging.Handler):
    """Collects what is told about a blocked loop, and lets others wait for it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        self.told = Event()
        self.goes_on = Event()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "continues: " in message:
            self.messages.append(message)
            self.goes_on.set()
        elif "has blocked" in message:
            self.messages.append(message)
            self.told.set()


@pytest.fixture
def clock(monkeypatch):
    """A clock on which time passes as a test wants, beside the real one."""
    passing = PassingClock()
    monkeypatch.setattr(WATCHDOG, "now", passing.now)
    return passing


@pytest.fixture
def warned():
    """The warnings of the library."""
    handler = Warned()
    logger = logging.getLogger("replanning")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def block(clock: PassingClock, warned: Warned, seconds: float = 2) -> None:
    """Block the thread until somebody is told of it."""
    # The loop owes its answer for this long as soon as it is asked again.
    for _ in range(1000):
        clock.passed += seconds
        if warned.told.wait(0.02):
            return
    raise AssertionError("nobody was told")


async def test_worker(clock, warned):
    """The task whose work blocks the loop is named while it does, with the place in the code and how to avoid it."""

    async def work(task, context):
        if task.id == "b":
            block(clock, warned)
            assert len(warned.messages) == 1
        await anyio.lowlevel.checkpoint()

    engine = ReplanningEngine([], environment=Environment(clock=clock))
    document = plan(*(Task(id=name) for name in "abc"))
    result = await engine.attach(SwarmOrchestrator(work, max_concurrency=3)).run(document)
    assert result.ok
    assert not result.problems
    first = warned.messages[0]
    assert re.match(
        r"task 'b', at .*test_blocked_loop\.py:\d+ in block, has blocked the event loop for [\d.]+ s: ",
        first,
    )
    assert "await anyio.to_thread.run_sync" in first
    assert "timeout" not in first


async def test_own_loop(clock, warned):
    """A loop of one's own is told which attempt blocks it, also where the work is called by way of others."""

    async def inner():
        block(clock, warned)

    async def work():
        await inner()

    engine = ReplanningEngine([], environment=Environment(clock=clock))
    async with engine.open(chain("a")) as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = await work()
    assert warned.messages[0].startswith("task 'a', at ")


async def test_session(clock, warned):
    """A call of an agent that blocks the loop is named, and the loop tells when it goes on."""

    @tool
    async def crunch() -> str:
        block(clock, warned)
        return "done"

    engine = ReplanningEngine([], environment=Environment(clock=clock))
    async with engine.session("Crunch", tools=[crunch]) as session:
        assert await session.call(crunch) == "done"
        await anyio.to_thread.run_sync(warned.goes_on.wait, 10)
    first, last = warned.messages
    assert first.startswith("task 'crunch-1', at ")
    assert last.startswith("the event loop continues: task 'crunch-1', at ")


async def test_timeout_that_cannot_fire(clock, warned):
    """Work that blocks the loop beyond its timeout is done all the same, and the run has it on record."""

    async def work(task, context):
        block(clock, warned, seconds=20)

    engine = ReplanningEngine([], environment=Environment(clock=clock))
    result = await engine.execute(plan(Task(id="a", timeout=5)), work)
    assert result.ok
    assert "and its timeout of 5 s cannot fire" in warned.messages[0]
    (problem,) = result.problems
    assert problem.where == "task 'a'"
    assert re.match(r"it ran .+ over its timeout of 5 s, which could not fire", problem.error)


@pytest.mark.parametrize("ends", ["returns", "raises", "waits"])
async def test_overrun_on_any_clock(ends):
    """Whichever way work ends that went over its timeout, the run tells by how much; within its time, nothing."""
    clock = VirtualClock()

    async def work(task, context):
        clock.advance(3 if task.id == "a" else 1.9)
        if task.id != "a":
            return
        if ends == "raises":
            raise ValueError("broken")
        if ends == "waits":
            await anyio.sleep_forever()

    engine = make_engine(clock=clock)
    first = Task(id="b", timeout=2)
    document = plan(first, Task(id="a", timeout=2, depends_on=["b"]))
    result = await engine.execute(document, work)
    assert [(problem.where, problem.error[:41]) for problem in result.problems] == [
        ("task 'a'", "it ran 1 s over its timeout of 2 s, which")
    ]
    status = {"returns": "succeeded", "raises": "failed", "waits": "needs_human"}[ends]
    assert result.status == status


async def test_code_outside_of_attempts(clock, warned):
    """Where no task is known to block the loop, the place is told, with the tasks that run."""
    engine = ReplanningEngine([], environment=Environment(clock=clock))
    async with engine.open(chain("a", "b")) as run:
        attempt = run.started("a")
        block(clock, warned)
        await anyio.to_thread.run_sync(warned.goes_on.wait, 10)
        run.succeeded(attempt)
        warned.told.clear()
        block(clock, warned)
        run.pause("enough")
    first, _, third, *_ = warned.messages
    assert re.match(
        r"code at .* in block, maybe that of task 'a', has blocked the event loop", first
    )
    assert re.match(r"code at .* in block has blocked the event loop", third)


async def test_store_that_does_not_answer(clock, warned):
    """Where the store blocks the loop, the store is named, and no task is blamed."""

    class SlowStore(MemoryStore):
        is_slow = False

        def append(self, *arguments, **options):
            if self.is_slow:
                self.is_slow = False
                block(clock, warned)
            return super().append(*arguments, **options)

    store = SlowStore()
    engine = ReplanningEngine([], store=store, environment=Environment(clock=clock))
    async with engine.open(chain("a")) as run:
        attempt = run.started("a")
        store.is_slow = True
        run.succeeded(attempt)
    assert re.fullmatch(
        r"the SlowStore, which does not answer, has blocked the event loop for [\d.]+ s",
        warned.messages[0],
    )


async def test_short_tasks_that_never_wait():
    """However many short tasks that never wait follow one another, the rest of the program gets turns."""
    turns: list[int] = []
    done = 0

    async def work(task, context):
        nonlocal done
        Event().wait(0.02)  # as a computation would
        done += 1

    async def rest(*, task_status: TaskStatus[None]) -> None:
        task_status.started()
        while True:
            await anyio.lowlevel.checkpoint()
            turns.append(done)

    document = plan(*(Task(id=f"t{number}") for number in range(60)))
    async with anyio.create_task_group() as group:
        await group.start(rest)
        await ReplanningEngine([]).attach(SequentialOrchestrator(work)).run(document)
        group.cancel_scope.cancel()
    assert set(turns) - {0, 60}
