"""Defects that the simulation found, each as the smallest run that showed it."""

from typing import Any

import anyio
import pytest

from replanning import (
    Answer,
    PlanMonitor,
    ReplanningEngine,
    ReplanRequest,
    Settings,
    Task,
)
from replanning.changes import ModifyTask, RetryTask, SkipTask
from replanning.errors import NotRunning
from replanning.journal import (
    MemoryStore,
    QuestionAnswered,
    QuestionReminded,
    TriggerDropped,
    TriggerFired,
)
from replanning.testing import (
    FlakyStore,
    ScriptedExecutor,
    ScriptedGate,
    ScriptedProvider,
    ScriptStep,
    hangs,
    raises,
    returns,
    virtual_environment,
)
from tests.support.invariants import invariant_violations
from tests.support.resume import RUN, cut
from tests.support.runs import (
    again,
    alternative,
    bodies,
    chain,
    failing,
    kinds,
    make_engine,
    perform,
    plan,
)

ASKING: dict[str, Any] = {"alternatives": {"require_approval": True}}


async def test_triggers_that_wait_at_an_early_end_are_dropped(clock):
    """Triggers that wait when the goal is reached early are dropped on record, before the end and not after."""
    engine = make_engine(ScriptedProvider([hangs()]), clock=clock)
    goal = {"objective": "test", "facts": ["made(it)"], "stop_when_reached": True}
    tools = [{"name": "maker", "adds": ["made(it)"]}, {"name": "other"}]
    made = plan(
        Task(id="a", tool="other"), Task(id="b", tool="maker"), goal=goal, tools=tools, facts=[]
    )
    work = ScriptedExecutor({"a": raises(ValueError("no")), "b": returns(after=5)}, clock=clock)
    result = await engine.execute(made, work)
    assert (result.status, result.reason) == ("succeeded", "the goal was reached early")
    assert kinds(engine, result.run)[-2:] == ["trigger-dropped", "run-ended"]
    assert len(bodies(engine.store, result.run, TriggerFired, TriggerDropped)) == 2
    assert invariant_violations(list(engine.store.read(result.run))) == []


async def test_nothing_is_concluded_after_a_pause(clock):
    """A failure with which a paused run ends is left to whoever resumes it: it is not attached to a question after the end."""
    engine = make_engine(again, clock=clock, **ASKING)

    async def work(task, context):
        run.request_replan("do b in another way", tasks=["b"])
        await clock.sleep(1)
        run.pause()
        await clock.sleep(9)
        raise ValueError("no")

    async with engine.open(chain("a", "b")) as run:
        await perform(run, work)
        await clock.sleep(60)
    assert (run.result.status, len(run.result.questions)) == ("paused", 1)
    assert kinds(engine, run.id)[-2:] == ["trigger-fired", "run-ended"]


async def test_nobody_is_reminded_after_the_end(clock):
    """Nobody is reminded of a question once its run has ended, while the program around it goes on."""
    gate = ScriptedGate()
    engine = make_engine(again, gate=gate, clock=clock, store=FlakyStore(durable=True), **ASKING)
    async with engine.open(plan(Task(id="a"), Task(id="b"))) as run:
        run.failed(run.started("a"), "no")
        await clock.sleep(5)
        run.pause()
        await clock.sleep(1_000)
    assert (run.result.status, len(gate.questions), gate.reminders) == ("paused", 1, [])
    assert bodies(engine.store, run.id, QuestionReminded) == []
    assert kinds(engine, run.id)[-1] == "run-ended"


async def test_answer_that_aborts_is_decided_before_the_end(clock):
    """A process that is killed right after an answer leaves it to the next, which puts the decision before the end."""

    def engine(store: MemoryStore) -> ReplanningEngine:
        gate = ScriptedGate()
        return make_engine(
            again, gate=gate, clock=clock, store=store, approval={"on_timeout": "abort"}, **ASKING
        )

    whole, work = MemoryStore(), failing("a")
    result = await engine(whole).execute(chain("a"), work)
    assert (result.status, result.run) == ("aborted", RUN)
    answered = next(r.seq for r in whole.read(RUN) if isinstance(r.body, QuestionAnswered))
    left = cut(list(whole.read(RUN))[:answered])
    async with engine(left).resume(RUN) as run:
        await perform(run, work)
    assert run.result.status == "aborted"
    later = [record.body.kind for record in left.read(RUN)][answered:]
    assert later == ["run-resumed", "revised", "decided", "run-ended"]


async def test_limit_per_run_also_counts_what_is_approved_meanwhile(clock):
    """A replan for which providers are asked while a person approves the last one that the limit allows is not applied."""
    settings = Settings.model_validate(
        {"limits": {"replans_per_run": 1}, "approval": {"always_for": ["human-request"]}}
    )
    gate = ScriptedGate([returns(Answer("approve", by="ada"), after=5)], clock=clock)
    slowly = ScriptedProvider(
        lambda request: returns(again(request), after=len(request.triggers[0].tasks)), clock=clock
    )
    engine = ReplanningEngine(
        [slowly], gate=gate, settings=settings, environment=virtual_environment(clock=clock)
    )
    work = ScriptedExecutor(
        {"a": raises(ValueError("no"), after=5.5), "b": returns(after=9)}, clock=clock
    )
    tasks = plan(Task(id="a"), Task(id="b"), Task(id="c", depends_on=("b",)))
    async with engine.open(tasks) as run, anyio.create_task_group() as group:
        group.start_soon(perform, run, work)
        group.start_soon(perform, run, work)
        run.request_replan("do c in another way", tasks=["c"])
    assert [(revised.by, revised.number) for revised in run.result.revisions] == [("person:ada", 1)]
    assert run.result.status == "failed"
    assert invariant_violations(list(engine.store.read(run.id))) == []


async def test_what_was_concluded_late_is_not_dropped(clock):
    """A decision that is recorded late, because the store failed, is the last that is heard of its trigger."""
    store = FlakyStore(fails=lambda operation, number: operation == "append" and number == 25)

    def skip_the_last(request: ReplanRequest) -> ScriptStep:
        task = request.triggers[-1].tasks[0]
        return returns([alternative(SkipTask(task_id=task))], after=9 if task == "first" else 0)

    provider = ScriptedProvider(skip_the_last, clock=clock)
    engine = make_engine(provider, store=store, clock=clock)
    # While the first failure is considered, three more follow. Those of a and b, on which c waits, are then
    # considered together, and as only b is skipped, that of a waits behind that of d.
    names = ["first", "a", "b", "d"]
    script = {name: raises(ValueError("no"), after=after) for after, name in enumerate(names)}
    tasks = [*(Task(id=name) for name in names), Task(id="c", depends_on=("a", "b"), when="false")]
    result = await engine.execute(plan(*tasks), ScriptedExecutor(script, clock=clock))
    records = list(store.read(result.run))
    assert (result.status, store.failures, records[24].body.kind) == ("succeeded", 1, "decided")
    assert records[24].at > records[23].at
    assert invariant_violations(records) == []
    assert bodies(store, result.run, TriggerDropped) == []


async def test_nothing_is_reported_as_started_after_a_pause():
    """The start of a task that was handed out before a pause is refused, because no attempt can start."""
    engine = ReplanningEngine([], monitor=PlanMonitor([]))
    async with engine.open(plan(Task(id="a"), Task(id="b"))) as run:
        attempt = run.started("a")
        run.pause()
        with pytest.raises(NotRunning, match="'b' can start: the run is to pause"):
            run.started("b")
        run.succeeded(attempt)
    assert run.result.status == "paused"


async def test_trigger_that_becomes_stale_in_its_cooldown(clock):
    """A run that ends because it needs a person leaves no trigger undecided that the plan has moved past."""

    def propose(request):
        (task_id,) = request.triggers[0].tasks
        if task_id == "b":
            return [alternative(SkipTask(task_id="b"), confidence=0.3)]
        changes = (
            ModifyTask(task_id="a", fields={"name": f"a {request.view.revision}"}),
            RetryTask(task_id="a"),
        )
        return [alternative(*changes)]

    store = MemoryStore()
    async with make_engine(propose, clock=clock, store=store).open(
        plan(Task(id="a"), Task(id="b"))
    ) as run:
        for task_id in ("a", "a", "b"):
            run.failed(run.started(task_id), "broken")
            await clock.sleep(1)
        run.cancel_task("a")
        result = await run.wait()
    assert (result.status, clock.elapsed) == ("needs_human", 3)
    kinds = [body.kind for body in bodies(store, run.id)]
    assert kinds[-3:] == ["revised", "trigger-dropped", "run-ended"]
