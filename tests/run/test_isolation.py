"""Isolation of users' code, and the turns that long work leaves to other tasks."""

import asyncio  # noqa: TID251 - only there does other code come upon cancellations of its own
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from replanning import (
    Alternative,
    Goal,
    Plan,
    ReplanningEngine,
    ReplanRequest,
    Retry,
    Task,
    TaskContext,
)
from replanning.journal import AttemptInterrupted, ErrorContained
from replanning.orchestrators import SwarmOrchestrator
from replanning.run import Work
from replanning.run.execution import Worker
from replanning.testing import ScriptedExecutor, VirtualClock
from tests.support.runs import again, bodies, make_engine, perform, plan

BESIDE = [
    # What was cut off within may have had its effect; only a reading task is replaced without asking.
    Task(id="a", tool="broken", effect="none", retry=Retry(max_attempts=1)),
    Task(id="b", depends_on=("a",)),
    Task(id="c"),
]


async def wait_for_what_is_cancelled() -> None:
    """Wait for something else, which is cancelled meanwhile."""
    other = asyncio.ensure_future(asyncio.Event().wait())
    other.cancel()
    await other


@pytest.fixture
def break_down(anyio_backend_name: str):
    """Code that waits for something that is cancelled, which must not cancel the run."""
    if anyio_backend_name != "asyncio":
        pytest.skip("only on asyncio can code encounter the cancellation of something else")
    return wait_for_what_is_cancelled


async def work(task: Task, context: TaskContext) -> str:
    """Fail with one tool, and take a moment with every other."""
    for _ in range(3):
        await anyio.lowlevel.checkpoint()
    if task.tool == "broken":
        raise ValueError("no")
    return "done"


def replaced(request: ReplanRequest) -> list[Alternative]:
    """Do without the tool that is broken."""
    (found,) = again(request)
    (change,) = found.changes
    tasks = tuple(task.model_copy(update={"tool": None}) for task in change.tasks)
    return [found.model_copy(update={"changes": (change.model_copy(update={"tasks": tasks}),)})]


async def carried_out(engine: ReplanningEngine, work: Work = work) -> tuple[str, list[str]]:
    """Return how a run ends in which one task fails and no other is interrupted, and where errors were contained."""
    result = await engine.execute(plan(*BESIDE), work)
    assert bodies(engine.store, result.run, AttemptInterrupted) == []
    return result.status, [body.where for body in bodies(engine.store, result.run, ErrorContained)]


async def test_provider(break_down) -> None:
    """A provider that breaks down is passed over: what another proposes is done."""

    class Broken:
        name = "broken"

        async def propose(self, request: ReplanRequest) -> Sequence[Alternative]:
            await break_down()
            return []

    assert await carried_out(make_engine(Broken(), replaced)) == (
        "succeeded",
        ["provider 'broken'"],
    )
    assert await carried_out(make_engine(Broken())) == ("failed", ["provider 'broken'"])


async def test_work(break_down) -> None:
    """Work that breaks down on one of several workers is a failure of that task, and no other is interrupted."""

    async def breaks_down(task: Task, context: TaskContext) -> str:
        if task.tool == "broken":
            await break_down()
        return await work(task, context)

    assert await carried_out(make_engine(replaced), breaks_down) == ("succeeded", [])


def flat(size: int) -> Plan:
    """Tasks that depend on nothing."""
    return Plan(goal=Goal(objective="test"), tasks=tuple(Task(id=f"t{n}") for n in range(size)))


class Heart:
    """Counts how often the event loop lets something else have a turn, and what happens at most between two turns."""

    def __init__(self, happened: Callable[[], int] = lambda: 0) -> None:
        self.beats = self.most = self._before = 0
        self._happened = happened

    async def _beat(self) -> None:
        while True:
            self.beats += 1
            now = self._happened()
            self.most, self._before = max(self.most, now - self._before), now
            await anyio.lowlevel.checkpoint()

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Beat at every turn of the loop while the body runs."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._beat)
            yield
            group.cancel_scope.cancel()


async def test_opening_a_large_plan() -> None:
    """While a plan of 5,000 tasks is opened, others have a turn at least every 500 tasks."""
    heart = Heart()
    async with heart.beating(), ReplanningEngine().open(flat(5_000)):
        assert heart.beats >= 10


async def test_taking_up_a_long_journal() -> None:
    """While a journal of 2,000 records is read and replayed, others have a turn at least every 100 records."""
    engine, heart = ReplanningEngine(), Heart()
    async with engine.open(flat(1_001)) as run:
        ready = run.ready()
        for _ in range(1_000):
            run.succeeded(run.started((await anext(ready)).id))
    async with heart.beating(), engine.resume(run.id):
        assert heart.beats >= 40


@pytest.mark.parametrize(("workers", "tasks", "most"), [(1, 1_000, 257), (100, 3_000, 356)])
async def test_work_that_never_waits(workers: int, tasks: int, most: int) -> None:
    """Other tasks have a turn after a few hundred tasks of work that never waits, by one worker or a hundred."""
    work = ScriptedExecutor()
    heart = Heart(lambda: len(work.calls))
    async with heart.beating():
        result = (
            await ReplanningEngine()
            .attach(SwarmOrchestrator(work, max_concurrency=workers))
            .run(flat(tasks))
        )
    assert (result.status, len(work.calls)) == ("succeeded", tasks)
    assert (
        1 <= heart.most <= 2 * most
    )  # trio gives turns in any order, so that two may pass between two beats


@pytest.mark.parametrize("pulled", [False, True], ids=["worker", "attempts"])
@pytest.mark.parametrize("ends_by", ["timeout", "revision"])
async def test_resources_of_work_that_is_stopping(
    ends_by: str, pulled: bool, clock: VirtualClock
) -> None:
    """What stopped work has taken is given to nobody else before that work has ended."""
    events: list[tuple[str, str, float]] = []

    async def slow_to_stop(task: Task, context: TaskContext) -> None:
        events.append(("began", task.id, clock.elapsed))
        try:
            await clock.sleep(5 if task.id == "a" else 1)
        finally:
            with anyio.CancelScope(shield=True):
                await clock.sleep(3)
            events.append(("ended", task.id, clock.elapsed))

    first = Task(
        id="a", resources={"gpu": 1}, timeout=2 if ends_by == "timeout" else None, optional=True
    )
    document = plan(first, Task(id="b", resources={"gpu": 1}), resources={"gpu": 1})
    engine = make_engine(clock=clock)
    async with engine.open(document) as run, anyio.create_task_group() as group:
        if pulled:
            group.start_soon(perform, run, slow_to_stop)
            group.start_soon(perform, run, slow_to_stop)
        else:
            group.start_soon(Worker(run, slow_to_stop).run)
            group.start_soon(Worker(run, slow_to_stop).run)
        if ends_by == "revision":
            await clock.sleep(2)
            run.cancel_task("a", reason="no longer wanted")
    assert events == [("began", "a", 0), ("ended", "a", 5), ("began", "b", 5), ("ended", "b", 9)]
    assert run.result.status == "succeeded"


async def test_errors_while_an_attempt_is_cancelled(clock: VirtualClock) -> None:
    """What work raises beside its cancellation neither ends its worker nor reaches the next task."""

    async def cleans_up(task: Task, context: TaskContext) -> str:
        async def fail_at_the_end() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                raise ValueError("while cleaning up")

        if task.id == "a":
            async with anyio.create_task_group() as group:
                group.start_soon(fail_at_the_end)
                group.start_soon(anyio.sleep_forever)
        return task.id

    document = plan(Task(id="a", timeout=1, optional=True), Task(id="b"), Task(id="c"))
    result = await make_engine(clock=clock).execute(document, cleans_up)
    assert (result.status, dict(result.outputs)) == ("succeeded", {"b": "b", "c": "c"})
