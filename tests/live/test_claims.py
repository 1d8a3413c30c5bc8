"""A plan on facts: what can be carried out, what is handed out, and when a loss matters."""

from __future__ import annotations

import pytest

from replanning import Plan, PlanRun, ReplanningEngine, Settings, Task, open_run
from replanning.changes import SkipTask
from replanning.journal import DecisionMade, TriggerDropped, TriggerFired
from replanning.live import GroundAction, PlanView, StripsProblem, regress
from replanning.testing import VirtualClock
from tests.support.runs import Proposer, alternative, bodies, environment

DOORS = """
goal: {objective: be inside, facts: [inside]}
tools:
  - {name: unlock, requires: [key, shut], adds: [open], removes: [shut]}
  - {name: enter, requires: [open], adds: [inside]}
  - {name: knock, adds: [heard]}
  - {name: find, adds: [key]}
  - {name: wait-for, parameters: {what: string}, requires: ["{what}"], adds: [waited]}
facts: [key, shut]
tasks:
  - {id: unlock, tool: unlock}
  - {id: enter, tool: enter, depends_on: [unlock]}
  - {id: knock, tool: knock}
"""


def handed_out(run: PlanRun) -> list[str]:
    """The tasks that could be pulled now."""
    claimed = []
    while (entry := run.live.dispatcher.claim_next()) is not None:
        claimed.append(entry)
    for entry in claimed:
        run.live.dispatcher.return_claim(entry, entry.claim)
    return [entry.id for entry in claimed]


def world(run: PlanRun) -> StripsProblem:
    """The world of a run's plan."""
    return PlanView(run.live).strips_problem()


async def test_valid_plan() -> None:
    """A plan that can be carried out and reaches its goal is valid, and says in which order it would go."""
    async with open_run(Plan.parse(DOORS)) as run:
        standing = world(run).feasibility()
        assert [step.id for step in standing.executable] == ["unlock", "enter", "knock"]
        assert (standing.valid, standing.explain(), standing.unmet_facts()) == (True, "", ())
        run.pause()


async def test_what_is_wrong() -> None:
    """A plan that cannot be carried out says which task lacks what, and what the goal would lack."""
    async with open_run(Plan.parse(DOORS)) as run:
        run.observe(ceased=["key"])
        standing = world(run).feasibility()
        assert [step.id for step in standing.stuck] == ["unlock"]
        assert standing.explain() == "task 'unlock' needs key, which would not hold"
        after = PlanView(run.live).strips_problem([SkipTask(task_id="unlock"), SkipTask(task_id="enter")]).feasibility()
        assert after.explain() == "the goal would lack inside"
        run.pause()


async def test_inapplicable_is_not_handed_out() -> None:
    """Where facts are stated, a task whose needs do not hold waits until they do."""
    async with open_run(Plan.parse(DOORS)) as run:
        assert handed_out(run) == ["unlock", "knock"]
        run.observe(ceased=["key"])
        assert handed_out(run) == ["knock"]
        run.observe(holds=["key"])
        assert handed_out(run) == ["unlock", "knock"]
        run.succeeded(run.started("unlock"))
        run.observe(ceased=["open"])
        assert handed_out(run) == ["knock"]
        run.pause()


async def test_open_world_hands_out_everything() -> None:
    """Where no facts are stated, nothing is known not to hold, and needs keep no task waiting."""
    text = DOORS.replace("facts: [key, shut]\n", "")
    async with open_run(Plan.parse(text)) as run:
        assert handed_out(run) == ["unlock", "knock"]
        run.pause()


async def test_tasks_that_disturb_one_another() -> None:
    """Of two tasks of which one takes what the other needs, the second waits until the first is done."""
    text = """
goal: {objective: t}
tools:
  - {name: take, parameters: {what: string}, requires: [hand], adds: ["has({what})"], removes: [hand]}
  - {name: lay, parameters: {what: string}, requires: ["has({what})"], adds: [hand], removes: ["has({what})"]}
facts: [hand]
tasks:
  - {id: a, tool: take, arguments: {what: a}}
  - {id: b, tool: take, arguments: {what: b}}
  - {id: c, tool: lay, arguments: {what: a}, depends_on: [a]}
"""
    async with open_run(Plan.parse(text)) as run:
        first = run.started("a")
        assert handed_out(run) == []
        run.succeeded(first)
        assert handed_out(run) == ["c"]
        run.succeeded(run.started("c"))
        assert handed_out(run) == ["b"]
        run.pause()


async def test_references_that_exist_later() -> None:
    """Needs that depend on a result that does not exist yet keep nothing from being valid."""
    text = DOORS.replace(
        "tasks:", "tasks:\n  - {id: later, tool: wait-for, arguments: {what: '${knock.output}'}, depends_on: [knock]}"
    )
    async with open_run(Plan.parse(text)) as run:
        (step,) = [step for step in world(run).steps if step.id == "later"]
        assert (step.action.unresolved, step.arguments, step.action.requires) == (True, {}, frozenset())
        assert world(run).feasibility().valid
        run.succeeded(run.started("knock"), "rain")
        (step,) = [step for step in world(run).steps if step.id == "later"]
        assert (step.action.unresolved, step.arguments, step.action.requires) == (
            False,
            {"what": "rain"},
            frozenset({"rain"}),
        )
        run.pause()


def test_regression() -> None:
    """Before each suffix must hold what its steps need and do not bring about themselves; some suffixes are impossible."""
    one = GroundAction(frozenset({"a"}), frozenset({"b"}), frozenset({"a"}))
    two = GroundAction(frozenset({"b"}), frozenset({"c"}))
    assert list(regress(["c"], [one, two])) == [frozenset("c"), frozenset("b"), frozenset("a")]
    assert list(regress(["a", "c"], [one, two])) == [frozenset("ac"), frozenset("ab"), None]
    assert one.interferes_with(two) is False
    assert one.interferes_with(GroundAction(frozenset({"a"}))) is True


async def test_held_while_it_is_decided() -> None:
    """From the moment a loss is seen, what it concerns is not handed out until a way on is decided; the rest is."""
    async with VirtualClock() as clock:
        plan = Plan.parse(
            DOORS.replace("requires: [key, shut]", "requires: [shut]").replace(
                "requires: [open]", "requires: [open, key]"
            )
        )
        engine = ReplanningEngine(
            [Proposer(lambda request: [])], environment=environment(clock), settings=Settings(cooldown=0)
        )
        async with engine.open(plan) as run:
            run.observe(ceased=["key"])
            assert handed_out(run) == ["knock"]  # unlocking comes before what has become impossible
            seen = []
            async for task in run.ready():
                async with run.attempt(task):
                    seen.append(task.id)
            assert set(seen) == {"knock", "unlock"}
    kinds = [type(body) for body in bodies(engine.store, run.id, TriggerFired, DecisionMade)]
    assert kinds[:2] == [TriggerFired, DecisionMade]


async def test_loss_that_is_made_good() -> None:
    """A trigger for a loss that has been made good before it is considered is dropped."""
    async with VirtualClock() as clock:
        provider = Proposer(lambda request: [alternative(SkipTask(task_id="knock"))])
        engine = ReplanningEngine([provider], environment=environment(clock))
        async with engine.open(Plan.parse(DOORS)) as run:
            run.observe(ceased=["key"])
            run.observe(holds=["key"])
            async for task in run.ready():
                async with run.attempt(task):
                    pass
        assert run.result.status == "succeeded"
    (dropped,) = bodies(engine.store, run.id, TriggerDropped)
    assert isinstance(dropped, TriggerDropped)
    assert dropped.reason == "the remaining tasks can be executed and reach the goal again"
    assert provider.requests == []


@pytest.mark.parametrize("stop", [True, False])
async def test_goal_reached_by_itself(stop: bool) -> None:
    """A goal that comes about by itself ends the run early where the plan wants that, and says so."""
    goal = f"{{objective: be inside, facts: [inside], stop_when_reached: {str(stop).lower()}}}"
    plan = Plan.parse(DOORS.replace("{objective: be inside, facts: [inside]}", goal))
    async with VirtualClock() as clock:
        engine = ReplanningEngine(["repair"], environment=environment(clock), settings=Settings(cooldown=0))
        done: list[str] = []
        async with engine.open(plan) as run:
            run.observe(holds=["inside"], ceased=["shut", "key"])
            async for task in run.ready():
                async with run.attempt(task):
                    done.append(task.id)
    assert run.result.status == "succeeded"
    assert done == ([] if stop else ["knock"])
    assert bool(bodies(engine.store, run.id, TriggerFired)) is not stop
    assert (run.result.reason == "the goal was reached early") is stop


def test_tasks_without_tools_are_steps() -> None:
    """A plan whose tasks name no tools is carried out as it is."""
    plan = Plan(goal={"objective": "t"}, facts=(), tasks=(Task(id="a"), Task(id="b", depends_on=("a",))))  # type: ignore[arg-type] # read as a document
    assert plan.facts == ()
