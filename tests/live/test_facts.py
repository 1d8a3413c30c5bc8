# Ids are written as plain text here.
# mypy: disable-error-code="arg-type, comparison-overlap"
"""Plans that state facts: feasibility, dispatch, losses that matter, and the tasks related to a fact."""

import pytest

from replanning import Goal, Plan, Task
from replanning.journal import DecisionMade, FactsObserved, TriggerDropped, TriggerFired
from replanning.live import PlanView, StripsProblem
from replanning.testing import VirtualClock
from tests.support.live import (
    JournaledPlan,
    add,
    after,
    claimed,
    journaled,
    modify,
    remove,
    retry,
    skip,
    task,
    tool,
)
from tests.support.runs import Proposer, alternative, bodies, make_engine, perform

DOORS = """
goal: {objective: be inside, facts: [inside]}
tools:
  - {name: unlock, requires: [key, shut], adds: [open], removes: [shut]}
  - {name: enter, requires: [open], adds: [inside]}
  - {name: knock, adds: [heard]}
  - {name: wait-for, parameters: {what: string}, requires: ["{what}"], adds: [waited]}
facts: [key, shut]
tasks:
  - {id: unlock, tool: unlock}
  - {id: enter, tool: enter, depends_on: [unlock]}
  - {id: knock, tool: knock}
"""


def doors(old: str = "", new: str = "") -> JournaledPlan:
    """Return the plan to enter through a door, with one part of its text replaced."""
    return JournaledPlan(Plan.parse(DOORS.replace(old, new)))


def problem(run: JournaledPlan) -> StripsProblem:
    """Return the planning problem of a plan."""
    return PlanView(run.live).strips_problem()


def test_feasibility():
    """A valid plan has an order of its steps; an invalid one names the stuck task with its facts, or those of the goal."""
    run = doors()
    feasible = problem(run).feasibility()
    assert [step.id for step in feasible.executable] == ["unlock", "enter", "knock"]
    assert (feasible.valid, feasible.explain(), feasible.unmet_facts()) == (True, "", ())
    run.fold(FactsObserved(ceased=("key",)))
    stuck = problem(run).feasibility()
    assert [step.id for step in stuck.stuck] == ["unlock"]
    assert stuck.explain() == "task 'unlock' needs key, which would not hold"
    skipped = PlanView(run.live).strips_problem([skip("unlock"), skip("enter")]).feasibility()
    assert skipped.explain() == "the goal would lack inside"


def test_preconditions_delay_dispatch():
    """A task waits until its preconditions hold, if the plan states facts."""
    run = doors()
    assert claimed(run.live) == ["unlock", "knock"]
    run.fold(FactsObserved(ceased=("key",)))
    assert claimed(run.live) == ["knock"]
    run.fold(FactsObserved(holds=("key",)))
    assert claimed(run.live) == ["unlock", "knock"]
    run.run("unlock")
    run.fold(FactsObserved(ceased=("open",)))
    assert claimed(run.live) == ["knock"]
    assert claimed(doors("facts: [key, shut]\n").live) == ["unlock", "knock"]


def test_interfering_tasks_run_one_after_another():
    """A task that removes what a running one needs waits until that is done."""
    takes = tool(
        "take",
        parameters={"what": "string"},
        requires=["hand"],
        adds=["has({what})"],
        removes=["hand"],
    )
    lays = tool(
        "lay",
        parameters={"what": "string"},
        requires=["has({what})"],
        adds=["hand"],
        removes=["has({what})"],
    )
    run = journaled(
        *(task(i, tool="take", arguments={"what": i}) for i in "ab"),
        task("c", "a", tool="lay", arguments={"what": "a"}),
        tools=[takes, lays],
        facts=["hand"],
    )
    first = run.start("a")
    assert claimed(run.live) == []
    run.end(first)
    assert claimed(run.live) == ["c"]
    assert claimed(after(run, "run c").live) == ["b"]


def test_unresolved_preconditions_are_ignored():
    """Preconditions that depend on a result that does not exist yet do not make a plan invalid."""
    run = doors(
        "tasks:",
        "tasks:\n  - {id: later, tool: wait-for, arguments: {what: '${knock.output}'}, depends_on: [knock]}",
    )
    (step,) = [step for step in problem(run).steps if step.id == "later"]
    assert (step.action.unresolved, step.arguments, step.action.requires) == (True, {}, frozenset())
    assert problem(run).feasibility().valid
    run.run("knock", output="rain")
    (step,) = [step for step in problem(run).steps if step.id == "later"]
    assert (step.action.unresolved, step.arguments, step.action.requires) == (
        False,
        {"what": "rain"},
        {"rain"},
    )


async def test_tasks_are_held_while_a_loss_is_decided():
    """Tasks affected by a lost fact are not handed out until a decision; the others are."""
    async with VirtualClock() as clock:
        plan = Plan.parse(
            DOORS.replace("requires: [key, shut]", "requires: [shut]").replace(
                "requires: [open]", "requires: [open, key]"
            )
        )
        engine = make_engine(lambda request: [], clock=clock, cooldown=0)
        async with engine.open(plan) as run:
            run.observe(ceased=["key"])
            assert claimed(run.live) == [
                "knock"
            ]  # unlocking comes before what has become impossible
            assert set(await perform(run)) == {"knock", "unlock"}
    kinds = [type(body) for body in bodies(engine.store, run.id, TriggerFired, DecisionMade)]
    assert kinds[:2] == [TriggerFired, DecisionMade]


async def test_trigger_of_a_restored_fact_is_dropped():
    """A trigger for a lost fact is dropped if the fact holds again before it is considered."""
    async with VirtualClock() as clock:
        provider = Proposer(lambda request: [alternative(skip("knock"))])
        engine = make_engine(provider, clock=clock)
        async with engine.open(Plan.parse(DOORS)) as run:
            run.observe(ceased=["key"])
            run.observe(holds=["key"])
            await perform(run)
        assert run.result.status == "succeeded"
    (dropped,) = bodies(engine.store, run.id, TriggerDropped)
    assert isinstance(dropped, TriggerDropped)
    assert dropped.reason == "the remaining tasks can be executed and reach the goal again"
    assert provider.requests == []


@pytest.mark.parametrize("stop", [True, False])
async def test_goal_reached_early(stop):
    """A goal that is reached early ends the run with that reason only if the plan says so."""
    goal = f"{{objective: be inside, facts: [inside], stop_when_reached: {str(stop).lower()}}}"
    plan = Plan.parse(DOORS.replace("{objective: be inside, facts: [inside]}", goal))
    async with VirtualClock() as clock:
        engine = make_engine("repair", clock=clock, cooldown=0)
        async with engine.open(plan) as run:
            run.observe(holds=["inside"], ceased=["shut", "key"])
            done = await perform(run)
    assert run.result.status == "succeeded"
    assert done == ([] if stop else ["knock"])
    assert bool(bodies(engine.store, run.id, TriggerFired)) is not stop
    assert (run.result.reason == "the goal was reached early") is stop


LINES = 4


def lines(length: int = 3, *more: Task) -> JournaledPlan:
    """Return a plan of independent lines of tasks that share one fact that none of them changes."""
    parameters = {"a": "string", "b": "string"}
    passes = tool(
        "pass",
        parameters=parameters,
        requires=["at({a})", "light"],
        adds=["at({b})"],
        removes=["at({a})"],
    )
    tasks = [
        task(
            f"t{line}-{n}",
            *([f"t{line}-{n - 1}"] if n else []),
            **moving(f"p{line}-{n}", f"p{line}-{n + 1}"),
        )
        for line in range(LINES)
        for n in range(length)
    ]
    goal = Goal(objective="test", facts=tuple(f"at(p{line}-{length})" for line in range(LINES)))
    facts = ("light", *(f"at(p{line}-0)" for line in range(LINES)))
    return journaled(*tasks, *more, goal=goal, facts=facts, tools=[passes])


def moving(start: str, end: str) -> dict[str, object]:
    """Return the fields of a task that moves from one place to another."""
    return {"tool": "pass", "arguments": {"a": start, "b": end}}


def related(run: JournaledPlan, *facts: str, tasks: tuple[str, ...] = ()) -> list[str]:
    """Return the tasks related to facts and tasks, in order."""
    return [step.id for step in PlanView(run.live).strips_problem(facts=facts, tasks=tasks).steps]


def test_related_tasks():
    """Only the tasks related to the subject are returned, with only the facts of the goal that they use."""
    run = lines()
    assert related(run, "at(p1-1)") == ["t1-0", "t1-1", "t1-2"]
    assert related(run, tasks=("t2-1",)) == ["t2-0", "t2-1", "t2-2"]
    assert PlanView(run.live).strips_problem(facts=["at(p1-1)"]).goal == ("at(p1-3)",)
    assert related(run, "noise") == []
    moved = PlanView(run.live).strips_problem(
        [modify("t2-0", arguments={"a": "p3-0", "b": "x"})], facts=["at(p3-0)"]
    )
    assert {step.id for step in moved.steps} == {
        f"t{line}-{n}" for line in (2, 3) for n in range(3)
    }
    assert len(related(run, "light")) == len(problem(run).steps) == 3 * LINES


def test_fact_index_follows_the_plan():
    """Done tasks leave the fact index; added, removed and retried ones are updated."""
    run = after(lines(), "run t0-0")
    assert related(run, "at(p0-1)") == ["t0-1", "t0-2"]
    assert related(after(run, remove("t0-2")), "at(p0-2)") == ["t0-1"]
    bridge = add("new", **moving("p0-2", "p3-0"))
    joined = PlanView(run.live).strips_problem([bridge], facts=["at(p0-2)"])
    assert [step.id for step in joined.steps] == ["t0-1", "t3-0", "t3-1", "t3-2", "new"]
    assert related(after(run, [bridge, skip("t0-1")]), "at(p0-2)") == [
        "t3-0",
        "t3-1",
        "t3-2",
        "new",
    ]
    assert "t0-1" in related(after(run, retry("t0-1")), "at(p0-2)")


def test_unresolved_tasks_are_always_related():
    """A task whose facts depend on open results is always included, because it may use the subject."""
    run = lines(3, task("late", "t0-0", **moving("${t0-0.output}", "x")))
    assert "late" in related(run, "at(p2-1)")
    run.run("t0-0", output="p2-1")
    assert related(run, "at(p2-1)") == ["t2-0", "t2-1", "t2-2", "late"]


def test_mostly_related_plan_is_not_reduced():
    """If nearly all tasks are related to a fact, the whole plan is returned, with the same result."""
    run = lines(600)
    assert len(related(run, "light")) == 600 * LINES
    assert PlanView(run.live).strips_problem(facts=["light"]).goal == run.plan.goal.facts
    run.fold(FactsObserved(ceased=("at(p3-0)",)))
    near = PlanView(run.live).strips_problem(facts=["at(p3-0)"])
    assert len(near.steps) == 600
    assert near.feasibility().unmet_facts() == problem(run).feasibility().unmet_facts()


def test_long_chains_are_not_reduced():
    """A chain of more than a thousand related tasks is returned as a whole."""
    line = [task(f"t{n}", *([f"t{n - 1}"] if n else []), tool="go") for n in range(1_100)]
    run = journaled(*line, tools=[tool("go", needs=["x"])], facts=["artifact(x)"])
    assert len(related(run, tasks=("t5",))) == 1_100
    assert repr(run.live.dependency_index.fact_index) == "<FactIndex of 1100 tasks>"
