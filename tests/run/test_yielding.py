"""Long work of the engine leaves turns to whatever else runs in the event loop."""

import gc
from collections.abc import Callable

import anyio
import anyio.lowlevel

from replanning import Goal, Plan, ReplanningEngine, Task, TaskContext
from replanning.changes import SkipTask
from replanning.journal import MemoryStore
from replanning.orchestrators import SequentialOrchestrator, SwarmOrchestrator


def flat(size: int) -> Plan:
    """Tasks that depend on nothing."""
    return Plan(goal=Goal(objective="test"), tasks=tuple(Task(id=f"t{n}") for n in range(size)))


class Heart:
    """Counts how often the event loop lets something else have a turn, and what happens at most between two turns."""

    def __init__(self, happened: Callable[[], int] = lambda: 0) -> None:
        self.beats = self.most = self._before = 0
        self._happened = happened

    async def beat(self) -> None:
        """Beat at every turn."""
        while True:
            self.beats += 1
            now = self._happened()
            self.most, self._before = max(self.most, now - self._before), now
            await anyio.lowlevel.checkpoint()


async def test_opening_a_large_plan() -> None:
    """While a plan of 5,000 tasks is opened, others have a turn at least every 500 tasks."""
    heart = Heart()
    async with anyio.create_task_group() as group:
        group.start_soon(heart.beat)
        async with ReplanningEngine().open(flat(5_000)) as run:
            beats = heart.beats
            run.pause()
        group.cancel_scope.cancel()
    assert beats >= 10


async def test_taking_up_a_long_journal() -> None:
    """While a journal of 2,000 records is read and replayed, others have a turn at least every 100 records."""
    store, heart = MemoryStore(), Heart()
    async with ReplanningEngine(store=store).open(flat(1_001)) as run:
        ready = run.ready()
        for _ in range(1_000):
            run.succeeded(run.started((await anext(ready)).id))
        run.pause()
    async with anyio.create_task_group() as group:
        group.start_soon(heart.beat)
        async with ReplanningEngine(store=store).resume(run.id) as again:
            beats = heart.beats
            again.pause()
        group.cancel_scope.cancel()
    assert beats >= 40


async def test_a_swarm_whose_work_never_waits() -> None:
    """However many workers have work that never waits, others have a turn after a few hundred tasks."""
    done = 0

    async def work(task: Task, context: TaskContext) -> None:
        nonlocal done
        done += 1

    heart = Heart(lambda: done)
    async with anyio.create_task_group() as group:
        group.start_soon(heart.beat)
        result = await ReplanningEngine().attach(SwarmOrchestrator(work, max_concurrency=100)).run(flat(3_000))
        group.cancel_scope.cancel()
    assert (result.status, done) == ("succeeded", 3_000)
    assert 1 <= heart.most <= 2 * 356  # trio gives turns in any order, so that two may pass between two beats


async def test_one_worker_whose_work_never_waits() -> None:
    """Also a single worker leaves a turn to others after a few hundred tasks."""
    done = 0

    async def work(task: Task, context: TaskContext) -> None:
        nonlocal done
        done += 1

    heart = Heart(lambda: done)
    async with anyio.create_task_group() as group:
        group.start_soon(heart.beat)
        await ReplanningEngine().attach(SequentialOrchestrator(work)).run(flat(1_000))
        group.cancel_scope.cancel()
    assert 1 <= heart.most <= 2 * 257


async def test_hash_worked_out_with_pauses() -> None:
    """The hash that is worked out with pauses is the content hash of the plan, also when a change comes in between."""
    async with ReplanningEngine().open(flat(2_000)) as run, ReplanningEngine().open(flat(2_000)) as other:
        pauses = sum(1 for _ in run.live.compute_hash())
        assert (pauses, run.live.hash) == (4, run.live.plan.content_hash())
        hashing = other.live.compute_hash()
        next(hashing)
        for each in (run, other):
            each.apply([SkipTask(task_id="t1")])
        assert (sum(1 for _ in hashing), other.live.hash) == (3, run.live.hash)
        run.pause()
        other.pause()


async def test_opening_leaves_little_for_the_collector() -> None:
    """What a plan of 20,000 tasks was made into does not wait for the garbage collector to go through it all at once."""
    new = sum(len(gc.get_objects(generation)) for generation in (0, 1))
    async with ReplanningEngine().open(flat(20_000)) as run:
        assert sum(len(gc.get_objects(generation)) for generation in (0, 1)) - new < 10_000
        run.pause()
