"""Plans that state facts: feasibility, dispatch, losses that matter, and the tasks related to a fact."""

from __future__ import annotations

import pytest

from replanning import Goal, Plan, PlanRun, ReplanningEngine, Settings, Task, ToolSpec, open_run
from replanning.changes import AddTask, RemoveTask, RetryTask, SkipTask
from replanning.journal import DecisionMade, TriggerDropped, TriggerFired
from replanning.live import PlanView, StripsProblem
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
    """Return the tasks that would be handed out now."""
    claimed = []
    while (entry := run.live.claim_next()) is not None:
        claimed.append(entry)
    for entry in claimed:
        run.live.return_claim(entry, entry.claim)
    return [entry.id for entry in claimed]


def problem(run: PlanRun) -> StripsProblem:
    """Return the planning problem of a run's plan."""
    return PlanView(run.live).strips_problem()


async def test_valid_plan() -> None:
    """A plan that can be executed and reaches its goal is valid, with the order of its steps."""
    async with open_run(Plan.parse(DOORS)) as run:
        standing = problem(run).feasibility()
        assert [step.id for step in standing.executable] == ["unlock", "enter", "knock"]
        assert (standing.valid, standing.explain(), standing.unmet_facts()) == (True, "", ())
        run.pause()


async def test_infeasible_plan_names_what_is_missing() -> None:
    """A plan that cannot be executed names the stuck task with its missing facts, or the missing facts of the goal."""
    async with open_run(Plan.parse(DOORS)) as run:
        run.observe(ceased=["key"])
        standing = problem(run).feasibility()
        assert [step.id for step in standing.stuck] == ["unlock"]
        assert standing.explain() == "task 'unlock' needs key, which would not hold"
        after = PlanView(run.live).strips_problem([SkipTask(task_id="unlock"), SkipTask(task_id="enter")]).feasibility()
        assert after.explain() == "the goal would lack inside"
        run.pause()


async def test_preconditions_delay_dispatch() -> None:
    """In a plan that states facts, a task waits until its preconditions hold."""
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


async def test_open_world_ignores_preconditions() -> None:
    """In a plan that states no facts, preconditions keep no task waiting."""
    text = DOORS.replace("facts: [key, shut]\n", "")
    async with open_run(Plan.parse(text)) as run:
        assert handed_out(run) == ["unlock", "knock"]
        run.pause()


async def test_interfering_tasks_run_one_after_another() -> None:
    """A task that removes what a running one needs waits until that is done."""
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


async def test_unresolved_preconditions_are_ignored() -> None:
    """Preconditions that depend on a result that does not exist yet do not make a plan invalid."""
    text = DOORS.replace(
        "tasks:", "tasks:\n  - {id: later, tool: wait-for, arguments: {what: '${knock.output}'}, depends_on: [knock]}"
    )
    async with open_run(Plan.parse(text)) as run:
        (step,) = [step for step in problem(run).steps if step.id == "later"]
        assert (step.action.unresolved, step.arguments, step.action.requires) == (True, {}, frozenset())
        assert problem(run).feasibility().valid
        run.succeeded(run.started("knock"), "rain")
        (step,) = [step for step in problem(run).steps if step.id == "later"]
        assert (step.action.unresolved, step.arguments, step.action.requires) == (
            False,
            {"what": "rain"},
            frozenset({"rain"}),
        )
        run.pause()


async def test_tasks_are_held_while_a_loss_is_decided() -> None:
    """Tasks affected by a lost fact are not handed out until a decision; the others are."""
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


async def test_trigger_of_a_restored_fact_is_dropped() -> None:
    """A trigger for a lost fact is dropped if the fact holds again before it is considered."""
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
async def test_goal_reached_early(stop: bool) -> None:
    """A goal that is reached early ends the run with that reason only if the plan says so."""
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


def test_tasks_without_tools_may_state_facts() -> None:
    """A plan whose tasks name no tools may state facts."""
    plan = Plan(goal={"objective": "t"}, facts=(), tasks=(Task(id="a"), Task(id="b", depends_on=("a",))))  # type: ignore[arg-type] # read as a document
    assert plan.facts == ()


LINES = 4


def lines(length: int = 3, **fields: object) -> Plan:
    """Return a plan of independent lines of tasks that share one fact that none of them changes."""
    pass_on = ToolSpec(
        name="pass-on",
        parameters={"a": "string", "b": "string"},
        requires=("at({a})", "light"),
        adds=("at({b})",),
        removes=("at({a})",),
    )
    tasks = [
        Task(
            id=f"t{line}-{step}",
            tool="pass-on",
            arguments={"a": f"p{line}-{step}", "b": f"p{line}-{step + 1}"},
            depends_on=(f"t{line}-{step - 1}",) if step else (),
        )
        for line in range(LINES)
        for step in range(length)
    ]
    goal = Goal(objective="test", facts=tuple(f"at(p{line}-{length})" for line in range(LINES)))
    facts = ("light", *(f"at(p{line}-0)" for line in range(LINES)))
    return Plan.model_validate({"goal": goal, "facts": facts, "tools": (pass_on,), "tasks": tuple(tasks), **fields})


def related(run: PlanRun, *facts: str, tasks: tuple[str, ...] = ()) -> list[str]:
    """Return the tasks related to facts and tasks, in order."""
    return [step.id for step in PlanView(run.live).strips_problem(facts=facts, tasks=tasks).steps]


async def test_related_tasks_of_a_fact() -> None:
    """Only the tasks related to a fact are returned, with only the facts of the goal that they use."""
    async with open_run(lines()) as run:
        assert related(run, "at(p1-1)") == ["t1-0", "t1-1", "t1-2"]
        assert related(run, tasks=("t2-1",)) == ["t2-0", "t2-1", "t2-2"]
        assert PlanView(run.live).strips_problem(facts=["at(p1-1)"]).goal == ("at(p1-3)",)
        assert related(run, "noise") == []
        run.pause()


async def test_unchanged_facts_relate_no_tasks() -> None:
    """A fact that no task changes relates no tasks, unless it is the subject itself."""
    async with open_run(lines()) as run:
        assert len(related(run, "light")) == 3 * LINES
        assert len(PlanView(run.live).strips_problem().steps) == 3 * LINES
        run.pause()


async def test_fact_index_follows_the_plan() -> None:
    """Done tasks leave the fact index; added, removed and retried ones are updated."""
    async with open_run(lines()) as run:
        run.succeeded(run.started("t0-0"))
        assert related(run, "at(p0-1)") == ["t0-1", "t0-2"]
        run.apply([RemoveTask(task_id="t0-2")])
        assert related(run, "at(p0-2)") == ["t0-1"]
        bridge = Task(id="new", tool="pass-on", arguments={"a": "p0-2", "b": "p3-0"})
        assert [s.id for s in PlanView(run.live).strips_problem([AddTask(task=bridge)], facts=["at(p0-2)"]).steps] == [
            *("t0-1", "t3-0", "t3-1", "t3-2", "new")
        ]
        run.apply([AddTask(task=bridge), SkipTask(task_id="t0-1")])
        assert related(run, "at(p0-2)") == ["t3-0", "t3-1", "t3-2", "new"]
        run.apply([RetryTask(task_id="t0-1")])
        assert "t0-1" in related(run, "at(p0-2)")
        run.pause()


async def test_unresolved_tasks_are_always_related() -> None:
    """A task whose facts depend on open results is always included, because it may use the subject."""
    late = Task(id="late", tool="pass-on", arguments={"a": "${t0-0.output}", "b": "x"}, depends_on=("t0-0",))
    plan = lines()
    async with open_run(plan.model_copy(update={"tasks": (*plan.tasks, late)})) as run:
        assert "late" in related(run, "at(p2-1)")
        run.succeeded(run.started("t0-0"), "p2-1")
        assert related(run, "at(p2-1)") == ["t2-0", "t2-1", "t2-2", "late"]
        run.pause()


async def test_mostly_related_plan_is_not_reduced() -> None:
    """If nearly all tasks are related to a fact, the whole plan is returned, with the same result."""
    async with open_run(lines(600)) as run:
        assert len(related(run, "light")) == 600 * LINES
        assert PlanView(run.live).strips_problem(facts=["light"]).goal == run.plan.goal.facts
        run.observe(ceased=["at(p3-0)"])
        near = PlanView(run.live).strips_problem(facts=["at(p3-0)"])
        assert len(near.steps) == 600
        assert near.feasibility().unmet_facts() == PlanView(run.live).strips_problem().feasibility().unmet_facts()
        run.pause()
