"""Many triggers at once: what belongs together is decided once, what does not waits for nothing, and ends come at once."""

import anyio

from replanning import Answer, CallbackGate, Plan, ReplanRequest, Task
from replanning.changes import ReplaceTask, SkipTask
from replanning.decision import Question
from replanning.journal import AlternativesConsidered, TriggerDropped
from replanning.testing import ScriptedProvider, ScriptStep, returns
from tests.support.cost import calls
from tests.support.runs import (
    alternative,
    bodies,
    failing,
    make_engine,
    perform,
    plan,
)

TOOLS = [{"name": "usual", "capability": "work"}, {"name": "other", "capability": "work"}]


def burst(failures: int, tail: int) -> Plan:
    """Tasks that fail, all of them before a chain."""
    first = [Task(id=f"f{n}", tool="usual") for n in range(failures)]
    head = Task(id="t0", depends_on=tuple(task.id for task in first))
    return plan(
        *first,
        head,
        *(Task(id=f"t{n}", depends_on=(f"t{n - 1}",)) for n in range(1, tail)),
        tools=TOOLS,
    )


async def usual_fails(task, context):
    """The usual tool has filled the disk."""
    if task.tool == "usual":
        raise OSError(28, "No space left on device")


def cost(failures: int, tail: int) -> int:
    """The calls of a run in which so many tasks fail before a chain of this length."""

    async def run() -> None:
        result = await make_engine("repair").execute(burst(failures, tail), usual_fails)
        assert result.status == "succeeded"

    return calls(lambda: anyio.run(run))


def test_cost_of_a_burst():
    """Twice the failures cost about twice as much, and a longer rest of the plan costs no more for each of them."""
    cost(1, 2)  # what is imported first
    assert cost(160, 20) < 2.3 * cost(80, 20)
    for_one = cost(1, 800) - cost(1, 200)
    assert cost(80, 800) - cost(80, 200) < 1.5 * for_one


async def test_a_burst_is_repaired_together():
    """Tasks that fail of one cause are repaired by few revisions, each of several tasks."""
    engine = make_engine("repair")
    result = await engine.execute(burst(50, 3), usual_fails)
    assert (result.status, len(result.revisions)) == ("succeeded", 3)


async def test_one_cause_is_one_question(clock):
    """Tasks that fail of one cause become one question, which names all of them, and whose approval repairs all."""
    asked: list[Question] = []

    def approve(question: Question) -> Answer:
        asked.append(question)
        return Answer("approve", by="ada")

    engine = make_engine(
        "repair", clock=clock, gate=CallbackGate(approve), alternatives={"require_approval": True}
    )
    tasks = [Task(id=f"page{n}", tool="usual") for n in range(6)]
    result = await engine.execute(plan(*tasks, tools=TOOLS), usual_fails)
    assert (result.status, len(result.revisions)) == ("succeeded", 1)
    (question,) = asked
    assert set(question.holds) >= {task.id for task in tasks}


def skips(request: ReplanRequest, **step: float) -> ScriptStep:
    """Skip the tasks concerned."""
    return returns(
        [alternative(*(SkipTask(task_id=i) for t in request.triggers for i in t.tasks))], **step
    )


async def fails_in_its_own_way(task, context):
    """Every task fails of another cause."""
    raise type(f"{task.id.title()}Error", (Exception,), {})


async def test_disjoint_failures_do_not_wait_for_one_another(clock):
    """Providers are asked about disjoint failures at the same time."""
    names = [f"task{chr(97 + n)}" for n in range(20)]
    provider = ScriptedProvider(lambda request: skips(request, after=0.2), clock=clock)
    began = clock.now()
    result = await make_engine(provider, clock=clock).execute(
        plan(*(Task(id=name) for name in names)), fails_in_its_own_way, max_concurrency=20
    )
    assert (result.status, len(provider.requests), len(result.revisions)) == ("succeeded", 20, 20)
    assert clock.now() - began <= 0.6


async def test_decisions_follow_the_order_of_triggers(clock):
    """What is decided about disjoint failures does not depend on which provider answers first."""
    waits = {"a": 5.0, "b": 1.0, "c": 3.0}
    provider = ScriptedProvider(
        lambda request: skips(request, after=waits[request.triggers[0].tasks[0]]), clock=clock
    )
    engine = make_engine(provider, clock=clock)
    async with engine.open(plan(*(Task(id=name) for name in waits))) as run:
        for name in waits:
            run.failed(run.started(name), name * 3)
        await run.wait()
    assert [revised.changes[0].task_id for revised in run.result.revisions] == list(waits)
    assert [body.replan for body in bodies(engine.store, run.id, AlternativesConsidered)] == [
        "r1",
        "r2",
        "r3",
    ]


async def test_a_group_in_the_way_of_another(clock):
    """A proposal that an earlier decision of the same round makes impossible is asked for again."""

    def propose(request):
        (task_id,) = request.triggers[0].tasks
        name = "new" if "new" not in {task.id for task in request.view.tasks()} else "newer"
        return returns([alternative(ReplaceTask(task_id=task_id, tasks=(Task(id=name),)))], after=1)

    result = await make_engine(ScriptedProvider(propose, clock=clock), clock=clock).execute(
        plan(Task(id="a"), Task(id="b")), failing("a", "b")
    )
    assert (result.status, len(result.revisions)) == ("succeeded", 2)


async def test_a_cooldown_is_not_for_others(clock):
    """Another task that loses the same tool is considered at once."""
    engine = make_engine("repair", clock=clock)
    began = clock.now()
    tools = [*TOOLS, {"name": "gate"}]
    tasks = (
        Task(id="a", tool="usual"),
        Task(id="gate", tool="gate"),
        Task(id="b", tool="usual", depends_on=("gate",)),
    )
    async with engine.open(plan(tasks[0], tasks[1], tools=tools)) as run:
        held = run.started("gate")
        run.change_resource("usual", available=False)
        await clock.sleep(1)
        run.change_resource("usual", available=True)
        run.add_task(tasks[2])
        run.change_resource("usual", available=False)
        await clock.sleep(1)
        run.succeeded(held)
        await perform(run)
    assert (run.result.status, clock.now() - began) == ("succeeded", 2)
    assert not [
        body for body in bodies(engine.store, run.id, TriggerDropped) if "cooldown" in body.reason
    ]
