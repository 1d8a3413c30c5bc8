"""What of a plan has to do with a fact: found without looking at the rest, also after the plan has changed."""

from __future__ import annotations

from replanning import Goal, Plan, PlanRun, Task, ToolSpec, open_run
from replanning.changes import AddTask, RemoveTask, RetryTask, SkipTask
from replanning.live import PlanView

LINES = 4


def lines(length: int = 3, **fields: object) -> Plan:
    """Lines of tasks that have nothing to do with one another, but for a fact that all need and none changes."""
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


def about(run: PlanRun, *facts: str, tasks: tuple[str, ...] = ()) -> list[str]:
    """The tasks that have to do with facts and tasks, in order."""
    return [step.id for step in PlanView(run.live).strips_problem(facts=facts, tasks=tasks).steps]


async def test_one_line() -> None:
    """Only the tasks that a fact bears on are looked at, and only the facts of the goal that they bear on."""
    async with open_run(lines()) as run:
        assert about(run, "at(p1-1)") == ["t1-0", "t1-1", "t1-2"]
        assert about(run, tasks=("t2-1",)) == ["t2-0", "t2-1", "t2-2"]
        assert PlanView(run.live).strips_problem(facts=["at(p1-1)"]).goal == ("at(p1-3)",)
        assert about(run, "noise") == []
        run.pause()


async def test_fact_that_all_need() -> None:
    """A fact that nothing changes joins nothing, until it is the one that is asked about."""
    async with open_run(lines()) as run:
        assert len(about(run, "light")) == 3 * LINES
        assert len(PlanView(run.live).strips_problem().steps) == 3 * LINES
        run.pause()


async def test_follows_the_plan() -> None:
    """What is done is forgotten, and what is added, removed and run again is known."""
    async with open_run(lines()) as run:
        run.succeeded(run.started("t0-0"))
        assert about(run, "at(p0-1)") == ["t0-1", "t0-2"]
        run.apply([RemoveTask(task_id="t0-2")])
        assert about(run, "at(p0-2)") == ["t0-1"]
        bridge = Task(id="new", tool="pass-on", arguments={"a": "p0-2", "b": "p3-0"})
        assert [s.id for s in PlanView(run.live).strips_problem([AddTask(task=bridge)], facts=["at(p0-2)"]).steps] == [
            *("t0-1", "t3-0", "t3-1", "t3-2", "new")
        ]
        run.apply([AddTask(task=bridge), SkipTask(task_id="t0-1")])
        assert about(run, "at(p0-2)") == ["t3-0", "t3-1", "t3-2", "new"]
        run.apply([RetryTask(task_id="t0-1")])
        assert "t0-1" in about(run, "at(p0-2)")
        run.pause()


async def test_what_is_not_known_yet() -> None:
    """A task whose facts depend on results is looked at in any case, as they may turn out to be these."""
    late = Task(id="late", tool="pass-on", arguments={"a": "${t0-0.output}", "b": "x"}, depends_on=("t0-0",))
    plan = lines()
    async with open_run(plan.model_copy(update={"tasks": (*plan.tasks, late)})) as run:
        assert "late" in about(run, "at(p2-1)")
        run.succeeded(run.started("t0-0"), "p2-1")
        assert about(run, "at(p2-1)") == ["t2-0", "t2-1", "t2-2", "late"]
        run.pause()


async def test_most_of_a_plan() -> None:
    """Where nearly everything has to do with a fact, all of the plan is looked at, with the same result."""
    async with open_run(lines(600)) as run:
        assert len(about(run, "light")) == 600 * LINES
        assert PlanView(run.live).strips_problem(facts=["light"]).goal == run.plan.goal.facts
        run.observe(ceased=["at(p3-0)"])
        near = PlanView(run.live).strips_problem(facts=["at(p3-0)"])
        assert len(near.steps) == 600
        assert near.feasibility().unmet_facts() == PlanView(run.live).strips_problem().feasibility().unmet_facts()
        run.pause()
