"""Calls from other threads, such as web handlers and synchronous work: each is handed to the run's loop."""

from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest

from replanning import PlanRun, Task, TaskContext, open_run
from replanning.errors import ChangeRejected, NotRunning, UnknownQuestion
from replanning.journal import MemoryStore, RecordBody, Usage
from replanning.orchestrators import SwarmOrchestrator
from replanning.plan import AttemptId
from replanning.run.event_loop import LoopThread
from replanning.testing import ScriptedGate, VirtualClock
from tests.support.questions import asking
from tests.support.runs import again, bodies, chain, failing, make_engine, perform

InThread = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]


async def in_plain_thread(call: Callable[[], Any]) -> Any:
    """Call a function in a thread that knows of no event loop, while the loop goes on."""
    return await anyio.to_thread.run_sync(ThreadPoolExecutor(1).submit(call).result)


@pytest.fixture(params=[anyio.to_thread.run_sync, in_plain_thread], ids=["worker", "plain"])
def in_thread(request: pytest.FixtureRequest) -> Any:
    """The ways to call a function in another thread."""
    return request.param


async def test_reports_and_changes(in_thread):
    """A run takes from a thread all that it takes from its loop, errors included, and whoever waits for it wakes."""
    store = MemoryStore()

    def tell(run: PlanRun) -> None:
        run.succeeded(run.started("a"), 1)
        run.charge(Usage(calls=1), attempt_id=(attempt := run.started("b")))
        run.observe(["seen(x)"])
        run.change_context({"region": "eu"})
        run.change_resource("cpu", capacity=2)
        run.change_goal(objective="another")
        run.request_replan("a better way")
        run.note("seen", {})
        run.add_task(Task(id="c", depends_on=["b"]))
        with pytest.raises(ChangeRejected, match="'nothing'"):
            run.remove_task("nothing")
        run.pause("enough")
        run.failed(attempt, "exit status 1")

    document = chain("a", "b").model_copy(update={"resources": {"cpu": 4}})
    async with open_run(document, store=store) as run, anyio.create_task_group() as group:
        group.start_soon(in_thread, partial(tell, run))
        result = await run.wait()
    assert (result.status, result.reason, result.spent.calls) == ("paused", "enough", 1)
    told = "charged facts-observed context-updated resource-updated goal-changed person-asked planning-noted"
    kinds = [body.kind for body in bodies(store, run.id)]
    assert kinds[4:] == [*told.split(), "revised", "run-paused", "attempt-failed", "run-ended"]


async def test_reading(in_thread):
    """A thread reads the plan between two changes of it, never during one, and after the run as before."""
    asked, found = Event(), list[int]()

    def read(run: PlanRun) -> None:
        asked.set()
        found.append(len(run.plan.tasks))
        found.append(run.replanning_info("b").iteration)
        with pytest.raises(NotRunning, match="not ended"):
            _ = run.result

    async with open_run(chain("a")) as run:
        reading = ThreadPoolExecutor(1).submit(read, run)
        asked.wait()  # the loop is busy with what follows
        for new in ("b", "c"):
            run.add_task(Task(id=new))
        assert not found
        await anyio.to_thread.run_sync(reading.result)
        assert found == [3, 0]
        run.pause("enough")
    assert (await in_thread(lambda: (run.result.status, len(run.plan.tasks)))) == ("paused", 3)


async def test_synchronous_work(clock, in_thread):
    """Work in a thread reports through its context, and is replaced when it fails."""
    engine = make_engine(again, clock=clock)

    def compute(context: TaskContext) -> None:
        context.change_context({"region": "eu"})
        context.charge(calls=1)
        context.record_process(1 << 30)
        raise ValueError("broken")

    async def work(task, context):
        if task.id == "a":
            await in_thread(partial(compute, context))

    result = await engine.attach(SwarmOrchestrator(work)).run(chain("a", "b"))
    assert (result.status, list(result.outputs), len(result.revisions)) == (
        "succeeded",
        ["a", "b"],
        1,
    )


async def test_answer(clock, in_thread):
    """A web handler finds the open question and answers it, and the run goes on."""
    engine = asking(clock, gate=ScriptedGate())

    def answer() -> None:
        (question,) = engine.pending()
        engine.answer(question.id, "approve", by="ada")
        with pytest.raises(UnknownQuestion, match="answered already"):
            engine.answer(question.id, "approve")

    async with engine.open(chain("a", "b")) as run:
        run.failed(run.started("a"), "broken")
        await clock.sleep(1)
        await in_thread(answer)
        assert await perform(run) == ["a~2", "b"]
    assert [revised.by for revised in run.result.revisions] == ["person:ada"]


async def test_workers(in_thread):
    """An attempt that a thread cancels stops; a task whose puller is dropped in a thread goes to one that waits."""
    async with open_run(chain("a")) as run, anyio.create_task_group() as group:
        pulled = [run.ready()]
        task = await anext(pulled[0])
        group.start_soon(perform, run)
        await anyio.wait_all_tasks_blocked()
        await in_thread(pulled.clear)
        assert (await run.wait()).status == "succeeded"
        async with run.attempt(task) as attempt:
            await in_thread(attempt.cancel)
            await anyio.sleep_forever()


def test_no_loop_to_hand_over_to(anyio_backend_name):
    """A call after the loop or the run has gone is refused and leaves no record; an answer waits for the next process."""
    clock, store = VirtualClock(), MemoryStore()
    engine = asking(clock, store=store)

    async def leave() -> tuple[PlanRun, LoopThread, list[RecordBody]]:
        async with clock, engine.open(chain("a")) as run:
            await perform(run, failing("a"))
        return run, LoopThread(), bodies(store, run.id)

    async def call_from_outside() -> None:
        observe, report = partial(run.observe, ["x"]), partial(run.succeeded, AttemptId("a#1"))
        calls: list[Callable[[], Any]] = [observe, report, run.pause, ended, ended]
        for call in calls:
            with pytest.raises(NotRunning, match="was left"):
                await in_plain_thread(call)
        await in_plain_thread(partial(engine.answer, run.result.questions[0], "approve"))

    run, loop, before = anyio.run(leave, backend=anyio_backend_name)
    ended = partial(loop.call, clock.now)
    anyio.run(call_from_outside, backend=anyio_backend_name)
    assert bodies(store, run.id) == before
    assert ([message.kind for message in store.inbox(run.id)], repr(loop)[-8:]) == (
        ["answer"],
        " closed>",
    )
