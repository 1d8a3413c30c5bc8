"""Triggers that programs raise: every outcome, and what is refused."""

from collections.abc import Sequence
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from replanning import Plan, ReplanningEngine, Settings, StoreGate, open_run
from replanning.errors import NotRunning, RecordNotSerializable, UnknownRun, UnknownTask
from replanning.journal import (
    ContextUpdated,
    DecisionMade,
    MemoryStore,
    QuestionAsked,
    TriggerDropped,
    TriggerFired,
    Usage,
)
from replanning.run import PendingDecision
from replanning.testing import FlakyStore, VirtualClock, virtual_environment
from replanning.triggers import (
    BetterPathFound,
    ContextChanged,
    HumanRequest,
    TaskFailed,
    TaskTimedOut,
    TriggerEvent,
)
from tests.support.runs import Proposer, again, bodies

PLAN = Plan.parse("""
goal: {objective: test}
tools:
  - {name: scanner, capability: read, effect: none}
  - {name: camera, capability: read, effect: none}
tasks:
  - {id: read, tool: scanner}
  - {id: count, depends_on: [read]}
  - {id: other}
""")

PAYMENT = Plan.parse("""
goal: {objective: test}
tools: [{name: bank, capability: pay}, {name: card, capability: pay}]
tasks: [{id: pay, tool: bank}]
""")

FAILED = TaskFailed(task_id="read", error="the scanner is on fire")


def engine_with(
    *providers: Any, clock: VirtualClock | None = None, **options: Any
) -> ReplanningEngine:
    """An engine with these providers, in virtual time."""
    environment = virtual_environment(clock=clock or VirtualClock())
    return ReplanningEngine(providers or ["repair"], environment=environment, **options)


async def outcome(decision: PendingDecision) -> Any:
    """The outcome, which must come."""
    return await decision


async def test_trigger_is_recorded_at_once_and_decided():
    """A trigger is on record when `trigger` returns, and awaiting it gives the decision, as often as one likes."""
    engine = engine_with(Proposer(again))
    async with engine.open(PLAN) as run:
        decision = run.trigger(FAILED)
        (fired,) = bodies(engine.store, run.id, TriggerFired)
        assert fired.trigger == decision.trigger
        assert (decision.trigger.id, decision.trigger.by, decision.trigger.root) == (
            "t1",
            "program",
            "read",
        )
        assert decision.trigger.cause == "read:the scanner is on fire"
        assert decision.outcome is None
        assert repr(decision) == "<PendingDecision about 't1' not decided>"
        made = await outcome(decision)
        assert isinstance(made, DecisionMade)
        assert (made.decision, made.triggers) == ("execute", ("t1",))
        assert await outcome(decision) is made is decision.outcome
        assert repr(decision) == "<PendingDecision about 't1' DecisionMade>"
        assert run.live.entry("read~2").root == "read"
        run.pause()


async def test_nobody_needs_to_await_it():
    """A trigger is decided whether or not somebody awaits it, and leaves no warning behind."""
    engine = engine_with(Proposer(again))
    async with engine.open(PLAN) as run:
        run.trigger(FAILED)
        while not bodies(engine.store, run.id, DecisionMade):
            await anyio.lowlevel.checkpoint()
        run.pause()


async def test_running_task_is_cancelled():
    """A task that runs is said to have failed: its attempt is cancelled, and another tool takes over."""
    engine = engine_with()
    seen: list[str] = []
    async with engine.open(PLAN) as run:

        async def work() -> None:
            async for task in run.ready():
                async with run.attempt(task) as attempt:
                    seen.append(f"{task.id} {task.tool}")
                    if task.id == "read":
                        await anyio.sleep_forever()
                    attempt.output = "done"

        async with anyio.create_task_group() as group:
            group.start_soon(work)
            group.start_soon(work)
            while "read scanner" not in seen:
                await anyio.lowlevel.checkpoint()
            made = await outcome(run.trigger(FAILED))
            assert (made.decision, made.chosen) == ("execute", 0)
    assert run.result.ok
    assert run.result.outputs["read"] == "done"
    assert "read~2 camera" in seen


async def test_running_task_with_an_effect_is_asked_about():
    """Another tool does the work of a running task with an effect only if a person agrees: it may have had it."""
    engine = engine_with(gate=StoreGate())
    async with engine.open(PAYMENT) as run:
        attempt = run.started("pay")
        asked = await outcome(run.trigger(TaskTimedOut(task_id="pay", timeout=5)))
        assert isinstance(asked, QuestionAsked)
        assert "unknown whether 'pay' took effect" in asked.text
        run.succeeded(attempt, "paid")
        run.pause()


async def test_question_counts_as_an_outcome():
    """A question to a person is the outcome, also for a later trigger that waits for the same answer."""
    engine = engine_with(
        Proposer(again), gate=StoreGate(), settings={"alternatives": {"require_approval": True}}
    )
    async with engine.open(PLAN) as run:
        asked = await outcome(run.trigger(FAILED))
        assert isinstance(asked, QuestionAsked)
        later = await outcome(run.trigger(TaskFailed(task_id="read", error="another")))
        assert later == asked
        engine.answer(asked.question, "reject", by="ann")
        run.pause()


async def test_repetition_is_dropped_with_its_reason():
    """The same trigger, raised while it waits, is dropped with the reason, and so is one that does not hold."""
    engine = engine_with(Proposer(again))
    async with engine.open(PLAN) as run:
        first = run.trigger(FAILED)
        dropped = await outcome(run.trigger(FAILED))
        assert dropped == TriggerDropped(dropped.trigger, "the same trigger is already waiting")
        assert isinstance(await outcome(first), DecisionMade)
        nothing = await outcome(run.trigger(BetterPathFound(task_ids=["read"])))
        assert isinstance(nothing, TriggerDropped)
        assert nothing.reason == "none of its tasks waits any more"
        run.pause()


async def test_cooldown_delays_a_repetition():
    """A trigger like one that was just decided waits for its cooldown, and is then decided."""
    async with (
        VirtualClock() as clock,
        engine_with(Proposer(lambda request: []), clock=clock).open(PLAN) as run,
    ):
        trigger = HumanRequest(task_id="read", reason="look again")
        assert (await outcome(run.trigger(trigger))).rule == "no-alternative"
        second, third = run.trigger(trigger), run.trigger(trigger)
        assert (await outcome(third)).reason == "the same trigger is already waiting"
        began = clock.now()
        assert (await outcome(second)).rule == "no-alternative"
        assert clock.now() - began >= 29
        run.pause()


async def test_task_that_ends_before_the_decision():
    """A task that is done before its trigger is decided needs none, and the drop says so."""
    engine = engine_with(Proposer(again))
    async with engine.open(PLAN) as run:
        attempt = run.started("read")
        decision = run.trigger(FAILED)
        run.succeeded(attempt, "text")
        dropped = await outcome(decision)
        assert dropped == TriggerDropped(decision.trigger.id, "the task has ended since")
        run.pause()


async def test_observer_decides_and_changes_nothing():
    """In the mode `observe` the decision is the outcome, and nothing has changed."""
    engine = engine_with(Proposer(again), mode="observe")
    async with engine.open(PLAN) as run:
        made = await outcome(run.trigger(FAILED))
        assert (made.decision, made.by, run.live.revision) == ("execute", "observe", 0)
        run.pause()


async def test_replan_by_the_id_of_a_run():
    """`engine.replan` records the change of the context first, then the trigger, and gives its decision."""
    engine = engine_with(Proposer(lambda request: []))
    async with engine.open(PLAN) as run:
        decision = engine.replan(
            run.id, ContextChanged(keys=["region"], by="ann"), context={"region": "eu"}
        )
        kinds = [type(body) for body in bodies(engine.store, run.id)]
        assert kinds[-2:] == [ContextUpdated, TriggerFired]
        assert (decision.trigger.by, decision.trigger.root) == ("ann", None)
        assert (await outcome(decision)).decision == "keep"
        other = ReplanningEngine([], store=engine.store)
        with pytest.raises(NotRunning, match="not open in this engine"):
            other.replan(run.id, FAILED)
        run.pause()
    with pytest.raises(NotRunning, match="not open in this engine"):
        engine.replan(run.id, FAILED)
    with pytest.raises(UnknownRun):
        engine.replan("nowhere", FAILED)


# What is refused


async def test_refused_triggers():
    """An unknown or finished task, a missing one, and a run that has ended are errors, and nothing is recorded."""
    engine = engine_with()
    async with engine.open(PLAN) as run:
        run.succeeded(run.started("read"), 1)
        with pytest.raises(NotRunning, match="task 'read' is DONE"):
            run.trigger(FAILED, context={"region": "eu"})
        with pytest.raises(UnknownTask):
            run.trigger(HumanRequest(task_id="raed"))
        with pytest.raises(ValueError, match="TaskTimedOut: state the `task_id`"):
            run.trigger(TaskTimedOut())
        assert not bodies(engine.store, run.id, TriggerFired)
        assert not run.live.context
        run.pause()
    with pytest.raises(NotRunning, match="nothing to replan"):
        run.trigger(FAILED)


async def test_trigger_that_cannot_be_kept(tmp_path):
    """A trigger with a field that is no JSON is refused where the journal is kept, and nothing waits for it."""
    odd: Any = TriggerEvent
    engine = engine_with(store=tmp_path / "history.db")
    async with engine.open(PLAN) as run:
        with pytest.raises(RecordNotSerializable):
            run.trigger(odd(kind="odd", value=object()))
        assert not bodies(engine.store, run.id, TriggerFired)
        run.pause()
    await engine.aclose()


async def test_run_that_nobody_replans():
    """Without an engine, or where it is switched off, a trigger is refused, because nobody would decide."""
    async with open_run(PLAN) as run:
        with pytest.raises(NotRunning, match="nothing decides about triggers"):
            run.trigger(FAILED)
        run.pause()
    engine = engine_with(settings=Settings(enabled=False))
    async with engine.open(PLAN) as run:
        with pytest.raises(NotRunning, match="nothing decides about triggers"):
            run.trigger(FAILED)
        run.pause()


async def test_work_cannot_await_the_decision_about_itself():
    """Work that awaits the decision about its own task gets an error that says so; other decisions it may await."""
    engine = engine_with(Proposer(lambda request: []))
    found: list[Any] = []

    async def work(task: Any, context: Any) -> None:
        if task.id != "read":
            return
        (run,) = (run for run, _ in engine._open_runs.values())
        decision = run.trigger(FAILED)
        with pytest.raises(
            RuntimeError, match="work of task 'read' awaits the decision about its own task"
        ):
            await decision
        found.append(decision)
        found.append(await outcome(run.trigger(HumanRequest(task_id="count"))))

    result = await engine.execute(PLAN, work)
    assert result.ok
    assert isinstance(found[0], PendingDecision)
    assert found[1].decision == "keep"


# Ends, threads and faults


async def test_pause_before_the_decision():
    """A run that is left before the decision says so, and the trigger is decided when it is resumed."""
    go = anyio.Event()

    class Slow:
        name = "slow"

        async def propose(self, request: Any) -> Sequence[Any]:
            await go.wait()
            return again(request)

    engine = engine_with(Slow())
    async with engine.open(PLAN) as run:
        decision = run.trigger(FAILED)
        await anyio.lowlevel.checkpoint()
    for _ in range(2):
        with pytest.raises(
            NotRunning, match=r"'t1' was not decided before the run was paused .* resumed"
        ):
            await outcome(decision)
    assert decision.outcome is None
    go.set()
    async with engine.resume(run.id) as resumed:
        while not bodies(engine.store, run.id, DecisionMade):
            await anyio.lowlevel.checkpoint()
        resumed.pause()


async def test_end_of_the_run_before_the_decision():
    """A run that ends for good drops what was not decided, and the drop is the outcome."""

    class Never:
        name = "never"

        async def propose(self, request: Any) -> Sequence[Any]:
            await anyio.sleep_forever()
            return []

    engine = engine_with(Never(), settings={"budget": {"calls": 1}})
    async with engine.open(PLAN) as run:
        decision = run.trigger(FAILED)
        await anyio.lowlevel.checkpoint()
        run.charge(Usage(calls=2))
        assert await outcome(decision) == TriggerDropped(decision.trigger.id, "the run is over")
    assert run.result.status == "aborted"


async def test_trigger_from_another_thread():
    """Another thread raises a trigger and waits for its outcome through anyio; in another loop it is an error."""
    engine = engine_with(Proposer(again))
    async with engine.open(PLAN) as run:

        def elsewhere() -> Any:
            decision = run.trigger(FAILED)

            async def wait() -> None:
                await decision

            with pytest.raises(RuntimeError, match="another event loop"):
                anyio.run(wait)
            made = anyio.from_thread.run(decision.wait)
            assert decision.outcome is made
            return made

        made = await anyio.to_thread.run_sync(elsewhere)
        assert isinstance(made, DecisionMade)
        run.pause()


@pytest.mark.parametrize("failing", range(1, 7))
async def test_store_that_fails_now_and_then(failing):
    """Whichever append fails first, the trigger is decided once the store works again."""

    def schedule(method: str, number: int) -> bool:
        return method == "append" and failing < number <= failing + 2

    async with VirtualClock() as clock:
        engine = engine_with(
            Proposer(again), clock=clock, store=FlakyStore(MemoryStore(), schedule)
        )
        async with engine.open(PLAN) as run:
            made = await outcome(run.trigger(FAILED))
            assert isinstance(made, DecisionMade)
            run.pause()
    assert [body.decision for body in bodies(engine.store, run.id, DecisionMade)] == ["execute"]


async def test_store_that_fails_for_good():
    """Where the store is given up before the trigger was recorded, awaiting says so."""
    broken = False
    store = FlakyStore(MemoryStore(), lambda method, number: broken and method == "append")
    async with (
        VirtualClock() as clock,
        engine_with(Proposer(again), clock=clock, store=store).open(PLAN) as run,
    ):
        broken = True
        match = "not decided before the run was paused .* not recorded"
        with pytest.raises(NotRunning, match=match):
            await outcome(run.trigger(FAILED))
