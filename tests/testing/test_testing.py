"""The public fakes: each does what its script says, and says what it was asked."""

import math
import sys

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning import (
    Answer,
    PlanMonitor,
    Question,
    ReplanningEngine,
    RunResult,
    Settings,
    Task,
    TransientError,
)
from replanning.changes import SkipTask
from replanning.journal import AttemptStarted, RunEnded, RunOpened, Usage
from replanning.orchestrators import SequentialOrchestrator
from replanning.plan import QuestionId, RunId
from replanning.testing import (
    FlakyStore,
    RecordingExporter,
    ScriptedExecutor,
    ScriptedGate,
    ScriptedProvider,
    VirtualClock,
    hangs,
    raises,
    returns,
    virtual_environment,
)
from tests.support.runs import again, alternative, chain, plan


@given(st.lists(st.floats(0, 1e8), min_size=1, max_size=20))
def test_sleepers_wake_in_order_of_time(naps):
    """Everybody wakes exactly when they should, whatever order they went to sleep in, and no real time passes."""
    woken: list[tuple[float, float]] = []

    async def main() -> None:
        async with VirtualClock(start=0.0) as clock, anyio.create_task_group() as group:

            async def nap(seconds: float) -> None:
                await clock.sleep(seconds)
                woken.append((seconds, clock.now()))

            for seconds in naps:
                group.start_soon(nap, seconds)

    anyio.run(main)
    assert [now for _, now in woken] == [seconds for seconds, _ in woken] == sorted(naps)


async def test_time_stands_still_while_anything_happens():
    """Time does not move while a task or a thread works, however much real time that takes."""
    async with VirtualClock() as clock, anyio.create_task_group() as group:
        group.start_soon(clock.sleep, 10)
        for _ in range(500):
            clock.now()
            await anyio.lowlevel.checkpoint()
        await anyio.to_thread.run_sync(sum, range(2_000_000))
        assert clock.elapsed == 0


async def test_cancelled_sleeper_is_forgotten(clock):
    """A nap that was cancelled holds nobody up, and time does not stop at its end."""
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(clock.sleep, 5)
            group.start_soon(clock.sleep, math.inf)
            await clock.sleep(2)
            scope.cancel()
    assert repr(clock) == "<VirtualClock at +2 s, running, sleepers=0>"
    await clock.sleep(10)
    assert clock.elapsed == 12


async def test_sleep_that_nobody_waits_for():
    """Time does not jump to the end of a sleep while that is not wanted, jumps past it, and to it once it is wanted again."""
    wanted, woken = dict.fromkeys("ab", False), {}
    async with VirtualClock() as clock, anyio.create_task_group() as group:

        async def sleeper(name: str, seconds: float) -> None:
            await clock.sleep_while(seconds, lambda: wanted[name])
            woken[name] = clock.elapsed

        group.start_soon(sleeper, "a", 10)
        group.start_soon(sleeper, "b", 50)
        await anyio.run_process([sys.executable, "-c", "pass"])
        assert clock.elapsed == 0
        await clock.sleep(20)
        assert clock.elapsed == 20
        await anyio.run_process([sys.executable, "-c", "pass"])
        wanted["b"] = True
        clock.now()
    assert woken == {"a": 20, "b": 50}


async def test_time_does_not_jump_to_what_was_called_off(clock):
    """While work waits for something real, time does not move for the deadline of a provider that has answered."""

    async def work(task, context):
        if task.id == "a":
            raise ValueError("no")
        await anyio.run_process([sys.executable, "-c", "pass"])

    engine = ReplanningEngine(
        [ScriptedProvider(again)], environment=virtual_environment(clock=clock)
    )
    result = await engine.execute(chain("a"), work)
    assert (result.status, list(result.outputs), clock.elapsed) == ("succeeded", ["a"], 0)


async def test_time_moved_by_hand():
    """Outside of its context the clock moves by `advance` alone, which wakes who is due by then."""
    clock, woken = VirtualClock(start=100.0), []

    async def sleeper(seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(seconds)

    async with anyio.create_task_group() as group:
        for seconds in (3.0, 1.0, 7.0):
            group.start_soon(sleeper, seconds)
        await anyio.wait_all_tasks_blocked()
        assert (clock.now(), woken, repr(clock)) == (
            100.0,
            [],
            "<VirtualClock at +0 s, by hand, sleepers=3>",
        )
        clock.advance(3)
        await anyio.wait_all_tasks_blocked()
        assert (clock.now(), sorted(woken)) == (103.0, [1.0, 3.0])
        clock.advance(4)
    assert (clock.now(), sorted(woken)) == (107.0, [1.0, 3.0, 7.0])


async def test_clock_passes_errors_on():
    """An error of the body comes out as it is, and so does its cancellation; the clock can run again."""
    clock = VirtualClock()
    with pytest.raises(LookupError, match="mine"):
        async with clock:
            raise LookupError("mine")
    with anyio.CancelScope() as scope:
        async with clock:
            scope.cancel()
            await clock.sleep(5)
    assert scope.cancelled_caught
    async with clock:
        await clock.sleep(5)
    assert clock.elapsed == 5


async def run(work: ScriptedExecutor, *tasks: Task) -> RunResult:
    """Run a plan of these tasks one after another, without replanning."""
    settings = Settings.model_validate({"retry": {"delay": 0.0}})
    engine = ReplanningEngine([], monitor=PlanMonitor([]), settings=settings)
    return await engine.execute(plan(*tasks), work, max_concurrency=1)


async def test_work_by_attempt():
    """Each attempt takes its own step of the script, and the last one repeats."""
    busy = raises(TransientError("busy"))
    work = ScriptedExecutor({"a": [busy, raises(TransientError), returns(3)], "b": returns(4)})
    assert (await run(work, Task(id="a"), Task(id="b", depends_on=("a",)))).status == "succeeded"
    assert [(call.task.id, call.number) for call in work.calls] == [
        ("a", 1),
        ("a", 2),
        ("a", 3),
        ("b", 1),
    ]
    assert [repr(call) for call in work.calls_of("b")] == ["<Call b#1>"]
    always = ScriptedExecutor({"a": [busy]})
    assert (await run(always, Task(id="a"))).status == "failed"
    assert repr(always) == "<ScriptedExecutor calls=3>"


async def test_work_by_tool_or_function():
    """A script names a task, else its tool, else the default holds; or it is a function of the call."""
    work = ScriptedExecutor(
        {"a": returns(), "pip": raises(ValueError("no"))}, default=raises(KeyError("default"))
    )
    tasks = (Task(id="a", tool="pip"), Task(id="b", tool="pip"), Task(id="b"))
    assert [(await run(work, task)).status for task in tasks] == ["succeeded", "failed", "failed"]
    assert (
        await run(ScriptedExecutor(lambda call: returns(call.task.id)), Task(id="a"))
    ).outputs == {"a": "a"}


async def test_steps_take_time():
    """A step that waits needs a clock, and says so."""
    result = await run(ScriptedExecutor({"a": returns(after=1)}), Task(id="a"))
    assert result.status == "failed"
    assert "give the fake a clock" in result.reason


async def test_provider_answers_in_order(clock):
    """A provider gives its answers one after another and then none; errors and silence are contained."""
    replacing = alternative(SkipTask(task_id="d"))
    script = [raises(ConnectionError("gone")), hangs(), returns([replacing], after=5)]
    provider = ScriptedProvider(script, clock=clock, estimate=Usage(calls=2), usage=Usage(calls=1))
    engine = ReplanningEngine([provider], environment=virtual_environment(clock=clock))
    work = ScriptedExecutor(lambda call: raises(ValueError(call.task.id)), clock=clock)
    tasks = [Task(id=name, optional=True) for name in "bcde"]
    result = await engine.execute(plan(*tasks), work, max_concurrency=1)
    assert result.status == "succeeded"
    assert [body.changes for body in result.revisions] == [replacing.changes]
    assert [request.triggers[0].tasks for request in provider.requests] == [
        ("b",),
        ("c",),
        ("d",),
        ("e",),
    ]
    assert result.spent == Usage(calls=4)
    assert repr(provider) == "<ScriptedProvider 'scripted' requests=4>"


async def test_provider_as_a_function():
    """A provider may be a function of the request, which proposes one alternative or several."""
    single = ScriptedProvider(lambda request: again(request)[0])
    engine = ReplanningEngine([single])
    result = await engine.execute(chain("a"), ScriptedExecutor({"a": raises(ValueError("no"))}))
    assert (result.status, len(result.revisions)) == ("succeeded", 1)
    assert single.estimate(single.requests[0]) == Usage()


async def test_gate_asked_twice_at_once():
    """Questions that are put at the same time are answered in the order in which they come."""
    said: dict[str, str] = {}
    gate = ScriptedGate([returns(Answer("approve", by=name)) for name in ("ada", "bob")])

    async def put(name: str) -> None:
        said[name] = (
            await gate.ask(Question(QuestionId(name), RunId("run-1"), "Which?", (), ()))
        ).by

    async with anyio.create_task_group() as group:
        group.start_soon(put, "q1")
        group.start_soon(put, "q2")
    assert [said[question.id] for question in gate.questions] == ["ada", "bob"]


async def test_gate_that_says_nothing():
    """After the end of its script nobody answers."""
    question = Question(QuestionId("run-1.q1"), RunId("run-1"), "Which?", (), ())
    by_function = ScriptedGate(lambda question: Answer("reject", by=question.id))
    assert await by_function.ask(question) == Answer("reject", by="run-1.q1")
    gate = ScriptedGate([Answer("reject")])
    assert await gate.ask(question) == Answer("reject")
    async with VirtualClock() as clock, anyio.create_task_group() as group:
        group.start_soon(gate.ask, question)
        await clock.sleep(1e6)
        group.cancel_scope.cancel()
    assert repr(gate) == "<ScriptedGate questions=2 reminders=0>"


async def test_exporter_keeps_everything():
    """A recording exporter has every record of every run, and its own failure harms nobody."""
    exporter = RecordingExporter(error=ConnectionError("down"))
    engine = ReplanningEngine(
        [], exporters=[exporter], monitor=PlanMonitor([]), environment=virtual_environment()
    )
    first = await engine.execute(chain("a"), ScriptedExecutor())
    second = await engine.execute(chain("b"), ScriptedExecutor())
    await engine.aclose()
    assert (first.status, second.status, exporter.closed) == ("succeeded", "succeeded", True)
    assert [body.task for body in exporter.bodies(AttemptStarted)] == ["a", "b"]
    assert [body.kind for body in exporter.bodies(RunOpened, RunEnded, run="run-2")] == [
        "run-opened",
        "run-ended",
    ]
    assert exporter.tracer_provider() is None


async def test_store_fails_on_schedule(clock):
    """A flaky store refuses exactly the calls that it was told to, writes nothing then, and a run outlives it."""
    store = FlakyStore(
        fails=lambda operation, number: operation == "append" and 3 <= number <= 5, durable=True
    )
    engine = ReplanningEngine([], store=store, environment=virtual_environment(clock=clock))
    result = await engine.execute(chain("a", "b"), ScriptedExecutor(clock=clock))
    assert (result.status, store.failures, store.durable) == ("succeeded", 3, True)
    assert [record.seq for record in store.read(result.run)] == [1, 2, 3, 4, 5, 6]
    assert repr(store) == "<FlakyStore before <MemoryStore runs=1> failures=3>"


async def test_store_fails_after_it_has_written(clock):
    """Where the answer of the store is lost, the run pauses, and the record counts when it is resumed."""
    store = FlakyStore(
        fails=lambda operation, number: "after" if (operation, number) == ("append", 3) else False
    )
    engine = ReplanningEngine([], store=store, environment=virtual_environment(clock=clock))
    work = ScriptedExecutor(clock=clock)
    result = await engine.execute(chain("a", "b"), work)
    assert (result.status, [call.task.id for call in work.calls]) == ("paused", ["a"])
    result = await engine.attach(SequentialOrchestrator(work)).resume(result.run)
    assert (result.status, [call.task.id for call in work.calls]) == ("succeeded", ["a", "b"])


def test_environments_repeat():
    """Equal seeds give equal chances, other seeds others, and runs are numbered."""
    one, same, other = virtual_environment(7), virtual_environment(7), virtual_environment(8)
    chances = [[environment.chance() for _ in range(3)] for environment in (one, same, other)]
    assert chances[0] == chances[1] != chances[2]
    assert [one.new_id(), one.new_id(), other.new_id()] == ["run-1", "run-2", "run-1"]
