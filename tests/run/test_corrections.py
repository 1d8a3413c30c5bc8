"""Corrected plans: a run goes on with them where it stands, and tasks are run again in a new run."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from replanning import Plan, PlanRun, ReplanningEngine, Task, TaskContext
from replanning.changes import ReplaceTask
from replanning.errors import ChangeRejected, NotRunning, StoreError, UnknownTask
from replanning.journal import InboxMessage, PlanRevised, SqliteStore
from replanning.plan import JsonObject, RunId, TaskId
from replanning.testing import VirtualClock
from tests.support.runs import bodies, failing, make_engine, perform, plan, skipping

RUN = RunId("run-1")

TOOLS = [
    {"name": "read", "effect": "none"},
    {"name": "pay", "effect": "irreversible"},
    {"name": "mail"},
]


def steps(**changed: dict[str, object]) -> Plan:
    """A plan of three steps, with other fields where they are given; None leaves a step out."""
    fields = {
        "fetch": {"tool": "read"},
        "charge": {"tool": "pay", "depends_on": ["fetch"]},
        "report": {"tool": "mail", "depends_on": ["charge"]},
    }
    tasks = []
    for task_id in dict.fromkeys([*fields, *changed]):
        task = {"id": task_id, **fields.get(task_id, {}), **changed.get(task_id, {})}
        tasks.append(Task.model_validate(task))
    return plan(*tasks, tools=TOOLS)


def without(whole: Plan, *names: str) -> Plan:
    """The plan without some tasks."""
    tasks = tuple(task for task in whole.tasks if task.id not in names)
    return whole.model_copy(update={"tasks": tasks})


async def failed_at(whole: Plan, *names: str, engine: ReplanningEngine) -> None:
    """A run of a plan in which some tasks have failed."""
    result = await engine.execute(whole, failing(*names), run_id=RUN)
    assert result.status == "failed"


def states(run: PlanRun) -> dict[str, str]:
    """The states of all tasks."""
    return {entry.id: str(entry.state) for entry in run.live}


# What differs


async def test_goes_on_where_it_stands():
    """A run that failed takes a corrected plan: what is done and unchanged is kept, the rest runs."""
    engine = make_engine()
    await failed_at(steps(), "charge", engine=engine)
    corrected = steps(charge={"arguments": {"card": 2}}, archive={"depends_on": ["report"]})

    async with engine.resume(RUN) as run:
        assert run.adopt(corrected, by="eve", reason="another card") == 1
        done = await perform(run)

    assert done == ["charge", "report", "archive"]
    assert run.result.status == "succeeded"
    (revised,) = bodies(engine.store, RUN, PlanRevised)
    assert (revised.by, revised.reason) == ("eve", "another card")
    assert run.plan.task("charge").arguments == {"card": 2}


async def test_no_difference():
    """A plan without a difference makes no revision, also if its tasks stand in another order."""
    engine = make_engine()
    async with engine.open(steps(), run_id=RUN) as run:
        assert not run.compare(steps())
        assert run.adopt(steps()) == 0
        other_order = steps().model_copy(update={"tasks": steps().tasks[::-1]})
        assert run.adopt(other_order) == 0
    assert bodies(engine.store, RUN, PlanRevised) == []


async def test_shown_before():
    """The difference is shown as that of an alternative, with every other part that changes."""
    before = plan(
        Task(id="a", tool="t"), tools=[{"name": "t", "cost": 1}], context={"region": "eu"}
    )
    after = plan(
        Task(id="a", tool="t", timeout=5),
        tools=[{"name": "t", "cost": 2}],
        context={"city": "x"},
        resources={"cpu": 2},
        budget={"calls": 3},
        goal={"objective": "more"},
        on_stale="redo",
    )
    async with make_engine().open(before, run_id=RUN) as run:
        assert run.compare(after).diff.splitlines() == [
            "- a: tool: t [READY]",
            "+ a: tool: t, timeout: 5 [READY]",
            "- tool t: cost: 1.0",
            "+ tool t: cost: 2.0",
            '+ context.city: "x"',
            '- context.region: "eu"',
            "+ resource cpu: 2",
            "- goal: objective: test",
            "+ goal: objective: more",
            "+ budget: calls: 3",
            "- on_stale: warn",
            "+ on_stale: redo",
        ]
        run.adopt(after)
        current = run.plan
        assert not run.compare(after)
    assert (current.context, current.resources) == ({"city": "x"}, {"cpu": 2.0})
    assert current.tools == after.tools
    assert (current.goal, current.budget, current.on_stale) == (after.goal, after.budget, "redo")


async def test_tasks_that_are_left_out():
    """Unfinished tasks that a corrected plan leaves out are taken out; finished ones are history."""
    engine = make_engine()
    await failed_at(steps(), "charge", engine=engine)
    corrected = without(steps(report={"depends_on": []}), "fetch", "charge")
    async with engine.resume(RUN) as run:
        run.adopt(corrected)
        assert await perform(run) == ["report"]
    assert run.result.status == "succeeded"
    assert [task.id for task in run.plan.tasks] == ["fetch", "report"]


async def test_comes_back():
    """A task that one correction takes out comes back with the next one."""
    async with make_engine().open(steps(), run_id=RUN) as run:
        run.adopt(without(steps(), "report"))
        assert "report" not in {task.id for task in run.plan.tasks}
        run.adopt(steps())
        assert await perform(run) == ["fetch", "charge", "report"]
    assert run.result.status == "succeeded"


# What is finished


async def finished(engine: ReplanningEngine) -> None:
    """A run that has done all but the last step."""
    await failed_at(steps(), "report", engine=engine)


async def test_finished_and_changed_is_asked_about():
    """Finished tasks that are changed, and what follows from them, need a word; nothing has changed before."""
    engine = make_engine()
    await finished(engine)
    async with engine.resume(RUN) as run:
        corrected = steps(fetch={"arguments": {"page": 2}})
        preview = run.compare(corrected)
        assert preview.again == {"fetch": "it was changed", "charge": "it depends on 'fetch'"}
        assert preview.effects == {"charge": "irreversible"}
        with pytest.raises(ChangeRejected) as refused:
            run.adopt(corrected)
        assert [("rerun" in problem.message) for problem in refused.value.problems] == [True, True]
        assert run.live.revision == 0
    assert bodies(engine.store, RUN, PlanRevised) == []


async def test_run_again():
    """Agreed, a finished task is run again in its new form, and so is what used its result."""
    engine = make_engine()
    await finished(engine)
    async with engine.resume(RUN) as run:
        run.adopt(steps(fetch={"arguments": {"page": 2}}), rerun="changed")
        done = await perform(run)
    assert done == ["fetch~2", "charge~2", "report"]
    assert run.result.status == "succeeded"
    assert list(run.result.outputs) == ["fetch", "charge", "report"]
    assert run.plan.task("fetch~2").arguments == {"page": 2}


async def test_kept():
    """Otherwise finished tasks stay as they are, and the rest of the correction applies."""
    engine = make_engine()
    await finished(engine)
    async with engine.resume(RUN) as run:
        run.adopt(
            steps(fetch={"arguments": {"page": 2}}, report={"arguments": {"to": "me"}}),
            rerun="none",
        )
        assert await perform(run) == ["report"]
    assert run.plan.task("fetch").arguments == {}


async def test_what_no_result_depends_on():
    """A finished task of which only the goal or a time limit changed is neither asked about nor run again."""
    engine = make_engine()
    await finished(engine)
    async with engine.resume(RUN) as run:
        run.adopt(steps(fetch={"goal": "get it", "timeout": 3}, report={"timeout": 3}))
        assert run.plan.task("fetch").goal == "get it"
        assert await perform(run) == ["report"]


async def test_prose_task():
    """The goal of a task without a tool is what its work is told, so a finished one is asked about."""
    engine = make_engine()
    before = plan(Task(id="a", goal="write"), Task(id="b", depends_on=("a",)))
    await failed_at(before, "b", engine=engine)
    after = plan(Task(id="a", goal="write more"), Task(id="b", depends_on=("a",)))
    async with engine.resume(RUN) as run:
        assert run.compare(after).again == {"a": "it was changed"}


async def test_changed_tool():
    """A tool that does something else counts for the tasks that use it; another price does not."""
    engine = make_engine()
    tool = {"name": "t", "kind": "shell", "command": "make", "effect": "none"}
    tasks = (Task(id="a", tool="t"), Task(id="b", tool="t", depends_on=("a",)))
    await failed_at(plan(*tasks, tools=[tool]), "b", engine=engine)
    async with engine.resume(RUN) as run:
        dearer = run.compare(plan(*tasks, tools=[{**tool, "cost": 3}]))
        assert (dearer.again, [change.kind for change in dearer.changes]) == ({}, ["retry"])
        other = plan(*tasks, tools=[{**tool, "command": "make all"}])
        assert run.compare(other).again == {"a": "its tool 't' was changed"}
        run.adopt(other, rerun="none")
        used = []

        async def work(task: Task, context: TaskContext) -> None:
            used.append(context.tool.command)

        assert await perform(run, work) == ["b"]
    assert used == ["make all"]
    assert run.result.status == "succeeded"


async def test_running_task():
    """A running task that is changed is asked about; agreed, it is stopped and done in its new form."""
    async with make_engine().open(steps(), run_id=RUN) as run:
        run.started("fetch")
        corrected = steps(fetch={"arguments": {"page": 2}})
        seen = run.compare(corrected)
        assert seen.again == {"fetch": "it was changed, and its running work is cut off"}
        assert seen.effects == {}, "it has no effect to repeat"
        run.adopt(corrected, rerun="changed")
        assert states(run)["fetch"] == "REPLACED_BY_REPLAN"
        assert await perform(run) == ["fetch~2", "charge", "report"]
    assert run.result.status == "succeeded"


async def test_running_task_with_an_effect():
    """A running task may have taken effect, so what repeats it is listed, whether it changed or follows."""
    async with make_engine().open(steps(), run_id=RUN) as run:
        run.succeeded(run.started("fetch"), 1)
        run.started("charge")
        seen = run.compare(steps(charge={"arguments": {"card": 2}}))
        assert seen.effects == {"charge": "irreversible"}
        seen = run.compare(steps(fetch={"arguments": {"page": 2}}))
        assert seen.again == {
            "fetch": "it was changed",
            "charge": "it depends on 'fetch', and its running work is cut off",
        }
        assert seen.effects == {"charge": "irreversible"}
        assert not run.compare(steps(charge={"arguments": {"card": 2}}), rerun="none").effects


async def test_running_task_that_is_left_out():
    """A running task that a corrected plan leaves out is left to end."""
    async with make_engine().open(steps(), run_id=RUN) as run:
        attempt = run.started("fetch")
        run.adopt(without(steps(charge={"depends_on": []}), "fetch"))
        run.succeeded(attempt, 1)
        assert await perform(run) == ["charge", "report"]


async def test_failed_tasks_are_tried_again():
    """With a correction, other failed tasks are tried again, but for those whose effect is in doubt."""
    engine = make_engine()
    before = plan(Task(id="a"), Task(id="b"), Task(id="c", optional=True), Task(id="d"))
    async with engine.open(before, run_id=RUN) as run:
        for name in ("a", "b"):
            run.failed(run.started(name), "broken")
        run.failed(run.started("d"), TimeoutError("gone"))
        await perform(run)
    after = before.model_copy(update={"tasks": (*before.tasks[:2], *before.tasks[3:])})
    async with engine.resume(RUN) as run:
        assert states(run)["d"] == "FAILED"
        run.adopt(plan(*after.tasks, context={"x": 1}))
        assert states(run) == {"a": "READY", "b": "READY", "c": "DONE", "d": "FAILED"}


async def test_changed_and_in_doubt():
    """A failed task that is changed and may have had its effect is asked about."""
    engine = make_engine()
    before = plan(Task(id="a", tool="pay"), tools=TOOLS)
    async with engine.open(before, run_id=RUN) as run:
        run.failed(run.started("a"), TimeoutError("gone"))
        after = plan(Task(id="a", tool="pay", arguments={"n": 1}), tools=TOOLS)
        seen = run.compare(after)
        assert list(seen.again) == ["a"]
        assert seen.effects == {"a": "irreversible"}
        run.adopt(after, rerun="none")
        assert states(run) == {"a": "FAILED"}
        run.adopt(plan(Task(id="a", tool="pay", arguments={"n": 2}), tools=TOOLS), rerun="changed")
        assert await perform(run) == ["a"]


# With replans


async def replaced(run: PlanRun, task_id: str, *tasks: Task) -> None:
    """Put tasks in the place of one, as a replan does."""
    run.apply([ReplaceTask(task_id=TaskId(task_id), tasks=tasks)])


async def test_replans_stay():
    """What a replan has changed stays, unless the person has changed the same task."""
    async with make_engine().open(steps(), run_id=RUN) as run:
        await replaced(run, "charge", Task(id="other", tool="mail", effect="reversible"))
        assert not run.compare(steps())
        run.adopt(steps(report={"timeout": 9}))
        assert run.plan.task("other").tool == "mail"
        run.adopt(steps(charge={"tool": "read"}, report={"timeout": 9}))
        assert run.plan.task("other").tool == "read"
        assert run.plan.task("other").effect is None
        assert await perform(run) == ["fetch", "other", "report"]


async def test_replaced_and_left_out():
    """A replacement of a task that is left out is skipped."""
    async with make_engine().open(steps(), run_id=RUN) as run:
        await replaced(run, "charge", Task(id="other", tool="mail"))
        run.adopt(without(steps(report={"depends_on": ["fetch"]}), "charge"))
        assert states(run)["other"] == "SKIPPED"
        assert await perform(run) == ["fetch", "report"]


async def test_replaced_by_several():
    """A task that several tasks replaced is not changed itself; steps before its last part are given up."""
    async with make_engine().open(steps(), run_id=RUN) as run:
        await replaced(run, "charge", Task(id="x", tool="mail"), Task(id="y", tool="mail"))
        with pytest.raises(ChangeRejected, match="change these instead: 'x', 'y'"):
            run.adopt(steps(charge={"tool": "read"}))
    async with make_engine().open(steps(), run_id=RUN) as run:
        parts = Task(id="x", tool="mail"), Task(id="y", tool="mail", depends_on=("x",))
        await replaced(run, "charge", *parts)
        run.adopt(steps(charge={"tool": "read"}))
        assert (states(run)["x"], run.plan.task("y").tool) == ("SKIPPED", "read")


async def test_a_file_written_from_the_run():
    """The current plan of a run, written out and corrected, names replacements by their own ids."""
    async with make_engine().open(steps(), run_id=RUN) as run:
        await replaced(run, "charge", Task(id="other", tool="mail"))
        written = run.plan
        assert not run.compare(written)
        tasks = [*written.tasks]
        tasks[1] = tasks[1].model_copy(update={"timeout": 4.0})
        run.adopt(written.model_copy(update={"tasks": tuple(tasks)}))
        assert run.plan.task("other").timeout == 4.0
        assert "charge" in run.live


async def test_twice():
    """A second correction is compared with the first one, so that a change can be taken back."""
    async with make_engine().open(steps(), run_id=RUN) as run:
        run.adopt(steps(charge={"timeout": 9}))
        run.adopt(steps())
        assert run.plan.task("charge").timeout is None


# What is refused


async def test_another_plan():
    """A plan of another name, or without a task of the run, is another plan; parts that cannot change are named."""
    async with make_engine().open(steps(), run_id=RUN) as run:
        with pytest.raises(ChangeRejected, match="it has no task of the run"):
            run.adopt(plan(Task(id="z")))
        changes = {"name": "other", "facts": ("on(a,b)",), "objects": {"a": "block"}}
        with pytest.raises(ChangeRejected) as refused:
            run.adopt(steps().model_copy(update=changes))
        assert [p.place for p in refused.value.problems] == ["name", "facts", "objects"]
        assert run.live.revision == 0


async def test_budget_cannot_go():
    """A budget may become another one, which counts what was spent, but it cannot be taken away."""
    before = plan(Task(id="a"), budget={"calls": 1})
    async with make_engine().open(before, run_id=RUN) as run:
        with pytest.raises(ChangeRejected, match="budget"):
            run.adopt(plan(Task(id="a")))


async def test_tasks_that_do_not_fit():
    """Every problem of the plan as it would be is named, and nothing has changed."""
    before = plan(Task(id="a", tool="t"), Task(id="b", tool="t"), tools=[{"name": "t"}])
    after = plan(
        Task(id="a", tool="t", arguments={"p": 1}),
        Task(id="b", tool="t", arguments={"p": 1}),
        tools=[{"name": "t", "parameters": {"p": "integer"}}],
    )
    async with make_engine().open(before, run_id=RUN) as run:
        run.apply([{"kind": "add", "task": {"id": "c", "tool": "t"}}])
        with pytest.raises(ChangeRejected) as refused:
            run.adopt(after)
        assert "task 'c'" in str(refused.value)
        assert run.plan.tool("t").parameters == {}


async def test_ended():
    """A run that has succeeded takes no corrected plan."""
    engine = make_engine()
    await engine.execute(steps(), failing(), run_id=RUN)
    async with engine.resume(RUN) as run:
        with pytest.raises(NotRunning):
            run.adopt(steps(more={}))
    with pytest.raises(NotRunning, match="run tasks of it again"):
        engine.adopt(RUN, steps(more={}))


# Resources and facts


async def test_more_resources():
    """A task may need what the corrected plan has more of."""
    before = plan(Task(id="a", resources={"cpu": 1}), resources={"cpu": 1})
    after = plan(
        Task(id="a", resources={"cpu": 1}),
        Task(id="b", resources={"cpu": 3, "gpu": 1}),
        resources={"cpu": 4, "gpu": 1},
    )
    async with make_engine().open(before, run_id=RUN) as run:
        run.adopt(after)
        assert await perform(run) == ["a", "b"]


async def test_tool_with_facts():
    """A tool may get facts and resources while tasks wait for it."""
    tasks = Task(id="a", tool="t"), Task(id="b", tool="t")
    before = plan(*tasks, tools=[{"name": "t"}], facts=["raw"])
    tool = {"name": "t", "requires": ["raw"], "adds": ["done"], "resources": {"m": 1}}
    after = plan(*tasks, tools=[tool], facts=["raw"], resources={"m": 1})
    async with make_engine().open(before, run_id=RUN) as run:
        run.adopt(after)
        assert await perform(run) == ["a", "b"]
        assert "done" in run.live.world.facts


# Elsewhere, and after a resume


async def test_replayed(tmp_path: Path):
    """A resumed run has the corrected plan, and `run_or_resume` knows it as its own."""
    with closing(SqliteStore(tmp_path / "runs.db")) as store:
        engine = make_engine(store=store)
        corrected = steps(charge={"timeout": 9}, more={"tool": "read"})
        async with engine.open(steps(), run_id=RUN) as run:
            run.adopt(corrected)
            before = run.live.hash
        async with engine.run_or_resume(corrected, run_id=RUN) as run:
            assert run.live.hash == before
            assert not run.compare(corrected)
            assert run.compare(steps())
        async with engine.run_or_resume(steps(), run_id=RUN) as run:
            assert run.plan.task("charge").timeout == 9
        with pytest.raises(StoreError, match="another plan"):
            async with engine.run_or_resume(steps(charge={"timeout": 8}), run_id=RUN):
                pass


async def test_correction_that_waits_for_the_run():
    """`run_or_resume` with a corrected plan that waits for its run goes on with it."""
    engine = make_engine()
    await failed_at(steps(), "charge", engine=engine)
    corrected = steps(charge={"timeout": 9})
    engine.adopt(RUN, corrected, by="eve")
    with pytest.raises(StoreError, match="another plan"):
        async with engine.run_or_resume(steps(charge={"timeout": 8}), run_id=RUN):
            pass
    async with engine.run_or_resume(corrected, run_id=RUN) as run:
        await perform(run)
    assert (run.result.status, run.plan.task("charge").timeout) == ("succeeded", 9)


async def test_open_question():
    """A correction of a task that a question is about withdraws the question, and the task is tried again."""
    engine = make_engine(skipping, alternatives={"require_approval": True})
    before = plan(Task(id="a"), Task(id="b"))
    result = await engine.execute(before, failing("a"), run_id=RUN)
    assert result.status == "needs_human"
    async with engine.resume(RUN) as run:
        run.adopt(plan(Task(id="a"), Task(id="b"), context={"x": 1}))
        assert states(run)["a"] == "FAILED", "it is left to the question"
    async with engine.resume(RUN) as run:
        run.adopt(plan(Task(id="a", arguments={"x": 1}), Task(id="b"), context={"x": 1}))
        assert engine.pending(RUN) == []
        assert await perform(run) == ["a"]
    assert run.result.status == "succeeded"


def elsewhere(path: Path) -> ReplanningEngine:
    """An engine of another process."""
    return make_engine(store=SqliteStore(path))


async def test_from_another_process(tmp_path: Path):
    """Another process leaves the plan for the one that carries the run out, which adopts it meanwhile."""
    async with VirtualClock() as clock:
        engine = make_engine(store=SqliteStore(tmp_path / "runs.db"), clock=clock)
        other = elsewhere(tmp_path / "runs.db")
        async with engine.open(steps(), run_id=RUN) as run:
            assert (await anext(run.ready())).id == "fetch"
            corrected = steps(charge={"timeout": 9})
            assert "timeout: 9" in other.compare(RUN, corrected).diff
            other.adopt(RUN, corrected, by="eve", reason="slow")
            assert run.live.revision == 0
            await clock.sleep(1)
            assert run.plan.task("charge").timeout == 9
        (revised,) = bodies(engine.store, RUN, PlanRevised)
        assert (revised.by, revised.reason) == ("eve", "slow")


async def test_left_for_the_resume(tmp_path: Path):
    """Where no process carries the run out, the one that resumes it adopts the plan first."""
    engine = make_engine(store=SqliteStore(tmp_path / "runs.db"))
    await failed_at(steps(), "charge", engine=engine)
    elsewhere(tmp_path / "runs.db").adopt(RUN, steps(charge={"timeout": 9}))
    async with engine.resume(RUN) as run:
        assert await perform(run) == ["charge", "report"]


async def test_refused_elsewhere(tmp_path: Path):
    """What can be seen to be wrong is refused at once; what turns out to be wrong later is recorded."""
    async with VirtualClock() as clock:
        engine = make_engine(store=SqliteStore(tmp_path / "runs.db"), clock=clock)
        other = elsewhere(tmp_path / "runs.db")
        async with engine.open(steps(), run_id=RUN) as run:
            with pytest.raises(ChangeRejected, match="another plan"):
                other.adopt(RUN, plan(Task(id="z")))
            other.adopt(RUN, steps(fetch={"arguments": {"page": 2}}))
            run.started("fetch")
            with pytest.raises(ChangeRejected, match="state `rerun`"):
                other.adopt(RUN, steps(fetch={"arguments": {"page": 2}}))
            await clock.sleep(1)
            assert run.live.revision == 0
        (problem,) = run.result.problems
        assert "corrected plan" in problem.where


async def test_in_this_process():
    """The engine of a run has it adopt a plan at once."""
    engine = make_engine()
    async with engine.open(steps(), run_id=RUN) as run:
        engine.adopt(RUN, steps(charge={"timeout": 9}))
        assert run.plan.task("charge").timeout == 9
        assert not engine.compare(RUN, steps(charge={"timeout": 9}))


# Secrets

SECRET = "ghp_abcdefghijklmnopqrstuvwxyz0123456789"
OTHER_SECRET = "ghp_zyxwvutsrqponmlkjihgfedcba9876543210"


def secret_plan(secret: str, **changed: dict[str, object]) -> Plan:
    """A plan with a literal secret in a task, in a tool, and in the context."""
    fields = {
        "a": {"tool": "t"},
        "b": {"tool": "t", "arguments": {"token": secret}, "depends_on": ["a"]},
    }
    tasks = []
    for task_id in dict.fromkeys([*fields, *changed]):
        task = {"id": task_id, **fields.get(task_id, {}), **changed.get(task_id, {})}
        tasks.append(Task.model_validate(task))
    tool = {"name": "t", "kind": "http", "url": "http://x", "headers": {"authorization": secret}}
    return plan(*tasks, tools=[{**tool, "effect": "none"}], context={"password": secret})


async def test_secrets_of_a_corrected_plan(tmp_path: Path):
    """Secrets that came with a correction are at hand when it is given again, and in no journal."""
    store = SqliteStore(tmp_path / "runs.db")
    engine = make_engine(store=store)
    other: dict[str, object] = {"tool": "t", "arguments": {"token": OTHER_SECRET}}
    corrected = secret_plan(SECRET, a=other, c=other)
    async with engine.open(secret_plan(SECRET), run_id=RUN) as run:
        run.adopt(corrected)
    async with engine.resume(RUN) as run:
        assert run.live.masked.tasks == {"a", "b", "c"}
    async with engine.run_or_resume(corrected, run_id=RUN) as run:
        assert not run.live.masked
        assert not run.compare(corrected)
        for task_id in ("a", "c"):
            assert run.plan.task(task_id).arguments == {"token": OTHER_SECRET}
        run.adopt(secret_plan(SECRET, b={"timeout": 3}))
        assert run.plan.task("b").arguments == {"token": SECRET}
    written = str(list(store.read(RUN)))
    assert SECRET not in written
    assert OTHER_SECRET not in written


async def test_secrets_given_to_a_resumed_run(tmp_path: Path):
    """A run that was resumed without its plan takes the secrets from the plan that it adopts, changed or not."""
    store = SqliteStore(tmp_path / "runs.db")
    engine = make_engine(store=store)
    async with engine.open(secret_plan(SECRET), run_id=RUN) as run:
        run.succeeded(run.started("a"), 1)
    async with engine.resume(RUN) as run:
        assert run.live.masked.tasks == {"b"}
        assert not run.compare(secret_plan(SECRET))
        assert not run.live.masked
        assert run.live.context == {"password": SECRET}
        assert run.plan.task("b").arguments == {"token": SECRET}
        assert run.plan.tool("t").headers == {"authorization": SECRET}
        run.adopt(secret_plan(SECRET))
        assert await perform(run) == ["b"]
    assert run.result.status == "succeeded"


async def test_a_secret_that_is_corrected(tmp_path: Path):
    """A run that failed for want of a secret goes on once it is given, also in another form."""
    store = SqliteStore(tmp_path / "runs.db")
    engine = make_engine(store=store)
    async with engine.open(secret_plan(SECRET), run_id=RUN):
        pass
    async with engine.resume(RUN) as run:
        assert await perform(run) == []
    assert {failure.kind for failure in run.result.failures.values()} == {"secret"}
    async with engine.resume(RUN) as run:
        run.adopt(secret_plan(SECRET))
        assert await perform(run) == ["a", "b"]
    assert run.result.status == "succeeded"


async def test_another_secret_for_a_resumed_run(tmp_path: Path):
    """A tool and a task whose secrets stand in other words now are changed, and have true values."""
    store = SqliteStore(tmp_path / "runs.db")
    engine = make_engine(store=store)
    async with engine.open(secret_plan(SECRET), run_id=RUN):
        pass
    other = secret_plan(SECRET, b={"arguments": {"token": f"Bearer {OTHER_SECRET}"}})
    headers = {"x-token": OTHER_SECRET}
    tool = other.tools[0].model_copy(update={"headers": headers})
    other = other.model_copy(update={"tools": (tool,)})
    async with engine.resume(RUN) as run:
        run.adopt(other)
        assert not run.live.masked.tools
        assert run.plan.tool("t").headers == headers
        assert await perform(run) == ["a", "b"]


async def test_masked_is_no_difference(tmp_path: Path):
    """What differs only in what the journal has masked is no difference, and a message keeps secrets in place."""
    async with VirtualClock() as clock:
        store = SqliteStore(tmp_path / "runs.db")
        engine = make_engine(store=store, clock=clock)
        other = elsewhere(tmp_path / "runs.db")
        async with engine.open(secret_plan(SECRET), run_id=RUN) as run:
            assert not other.compare(RUN, secret_plan(SECRET))
            other.adopt(RUN, secret_plan(SECRET, b={"timeout": 3}))
            assert SECRET not in str(store.inbox(RUN))
            await clock.sleep(1)
            assert run.plan.task("b").timeout == 3
            assert run.plan.task("b").arguments == {"token": SECRET}
            assert run.plan.tool("t").headers == {"authorization": SECRET}
            assert run.live.context == {"password": SECRET}


async def test_new_secret_in_a_message(tmp_path: Path):
    """A new secret cannot reach a run elsewhere, and the reason is on record."""
    async with VirtualClock() as clock:
        engine = make_engine(store=SqliteStore(tmp_path / "runs.db"), clock=clock)
        other = elsewhere(tmp_path / "runs.db")
        async with engine.open(steps(), run_id=RUN) as run:
            other.adopt(RUN, steps(charge={"arguments": {"token": SECRET}}))
            await clock.sleep(1)
            assert run.live.revision == 0
        (problem,) = run.result.problems
        assert "{env:NAME}" in problem.error


async def test_list_whose_element_runs():
    """A corrected list is made again, which cuts off the element that runs."""

    def listed(more: bool) -> Plan:
        each = {"id": "each", "for_each": [1, 2], "arguments": {"n": "${item}", "more": more}}
        return plan(Task.model_validate(each))

    async with make_engine().open(listed(False), run_id=RUN) as run:
        first = await anext(run.ready())
        run.started(first.id)
        correction = run.compare(listed(True))
        assert correction.again["each"].endswith(", and its running work is cut off")
        run.adopt(listed(True), rerun="changed")
        assert await perform(run) == ["each[0]~2", "each[1]~2"]
    assert run.result.status == "succeeded"


# Tasks that are run again


async def test_rerun():
    """Tasks are run again in a new run, with what depends on them; the old run stays as it is."""
    engine = make_engine()
    await engine.execute(steps(), failing(), run_id=RUN)
    before = list(engine.store.read(RUN))

    seen = engine.compare_rerun(RUN, "charge")
    new = engine.rerun(RUN, "charge", new_id="run-2", by="eve")

    assert dict(seen.again) == {"charge": "it was requested", "report": "it depends on 'charge'"}
    assert dict(seen.effects) == {"charge": "irreversible", "report": ""}
    async with engine.resume(new) as run:
        assert await perform(run) == ["charge~2", "report~2"]
    assert run.result.status == "succeeded"
    assert list(engine.store.read(RUN)) == before
    (revised,) = bodies(engine.store, new, PlanRevised)
    assert (revised.by, revised.reason) == ("eve", "run 'charge' again")


async def test_rerun_only():
    """Alone, a task is run again without what depends on it, whose result is then told to be stale."""
    engine = make_engine()
    await engine.execute(steps(), failing(), run_id=RUN)
    assert list(engine.compare_rerun(RUN, "charge", only=True).again) == ["charge"]
    async with engine.resume(engine.rerun(RUN, "charge", only=True)) as run:
        assert await perform(run) == ["charge~2"]
    assert run.result.status == "succeeded"
    assert list(run.result.stale) == ["report"]


@pytest.mark.parametrize(
    ("on_stale", "ran", "stale"),
    [
        ("warn", ["a~2"], ["b", "c"]),
        ("ignore", ["a~2"], []),
        ("redo", ["a~2", "b~2", "c~2"], []),
    ],
)
async def test_rerun_only_of_what_others_have_used(on_stale: str, ran: list[str], stale: list[str]):
    """What a task that is run again alone makes stale is told, left, or done again as the plan says."""
    engine = make_engine("repair")
    tasks = [
        Task(id="a"),
        Task(id="b", depends_on=("a",), effect="none"),
        Task(id="c", depends_on=("b",), effect="none"),
    ]
    await engine.execute(plan(*tasks, on_stale=on_stale), failing(), run_id=RUN)
    async with engine.resume(engine.rerun(RUN, "a", only=True)) as run:
        assert await perform(run) == ran
    assert (run.result.status, list(run.result.stale)) == ("succeeded", stale)


async def test_rerun_of_a_failed_task():
    """A task that has failed is tried again; one that has not run is refused, and so is an unknown one."""
    engine = make_engine()
    await failed_at(steps(), "charge", engine=engine)
    async with engine.resume(engine.rerun(RUN, "charge")) as run:
        assert await perform(run) == ["charge", "report"]
    with pytest.raises(ChangeRejected, match="'report' has not run yet"):
        engine.rerun(RUN, "report")
    with pytest.raises(UnknownTask, match="charge"):
        engine.rerun(RUN, "chrage")


async def test_rerun_of_a_replaced_task():
    """A task that was replaced is run again as what stands in its place."""
    engine = make_engine()
    async with engine.open(steps(), run_id=RUN) as run:
        await replaced(run, "charge", Task(id="other", tool="mail"))
        await perform(run)
    async with engine.resume(engine.rerun(RUN, "charge")) as run:
        assert await perform(run) == ["charge~2", "report~2"]
        assert run.plan.task("charge~2").tool == "mail"


async def test_rerun_of_a_skipped_task():
    """What follows is skipped or run anew by its condition; what a person skipped stays so."""
    engine = make_engine()
    before = plan(
        Task(id="a"),
        Task(id="b", depends_on=("a",), when="results.a == 'b'"),
        Task(id="c", depends_on=("a",)),
        Task(id="d", depends_on=("c",)),
    )
    async with engine.open(before, run_id=RUN) as run:
        run.apply([{"kind": "skip", "task_id": "c"}])
        await perform(run, failing())
    assert list(engine.compare_rerun(RUN, "a").again) == ["a", "b"]


async def test_rerun_of_an_aborted_run():
    """A run that was aborted is run again from an earlier revision."""
    engine = make_engine()
    async with engine.open(steps(), run_id=RUN) as run:
        run.apply([{"kind": "abort"}])
    with pytest.raises(NotRunning, match="earlier revision"):
        engine.rerun(RUN, "fetch")
    with pytest.raises(NotRunning):
        engine.compare_rerun(RUN, "fetch")


async def test_rerun_of_an_open_run():
    """A run that is being carried out is not copied, because both would do what it has left."""
    engine = make_engine()
    async with engine.open(steps(), run_id=RUN) as run:
        run.succeeded(run.started("fetch"), 1)
        with pytest.raises(NotRunning, match="pause it"):
            engine.rerun(RUN, "fetch")
    assert list(engine.compare_rerun(RUN, "fetch").again) == ["fetch"]


async def test_larger_budget():
    """A run that has used up its budget goes on with a larger one, which was left for it before it is resumed."""
    async with VirtualClock() as clock:
        engine = make_engine(clock=clock)

        def limited(seconds: float) -> Plan:
            tasks = Task(id="a"), Task(id="b", depends_on=("a",), effect="none")
            return plan(*tasks, budget={"wall_clock": seconds})

        async def slow(task: Task, context: TaskContext) -> None:
            await clock.sleep(3)

        result = await engine.execute(limited(4), slow, run_id=RUN)
        assert result.status == "aborted"
        engine.adopt(RUN, limited(20))
        async with engine.resume(RUN) as run:
            await perform(run, slow)
        assert run.result.status == "succeeded"
        async with engine.open(limited(20), run_id="run-2") as run:
            run.adopt(limited(1))
            await perform(run, slow)
        assert run.result.status == "aborted"


async def test_a_message_that_is_no_plan():
    """A message whose plan is not one is recorded, and the run goes on."""
    engine = make_engine()
    await failed_at(steps(), "charge", engine=engine)
    payloads: list[JsonObject] = [{}, {"plan": "x", "rerun": 3}]
    for payload in payloads:
        engine.store.post(RUN, InboxMessage("adopt", 0.0, "", payload))
    async with engine.resume(RUN) as run:
        await perform(run)
    places = [problem.where for problem in run.result.problems]
    assert places == ["the corrected plan of somebody"] * 2


# Further situations


async def test_cancelled_and_left_out():
    """A task that was cancelled no longer fails the run once a corrected plan leaves it out."""
    async with make_engine().open(plan(Task(id="a"), Task(id="b")), run_id=RUN) as run:
        run.cancel_task("b")
        run.adopt(plan(Task(id="a")))
        assert await perform(run) == ["a"]
    assert run.result.status == "succeeded"


async def test_cancelled_and_changed():
    """A task that was cancelled is run once the person has changed it."""
    async with make_engine().open(plan(Task(id="a"), Task(id="b")), run_id=RUN) as run:
        run.cancel_task("b")
        run.adopt(plan(Task(id="a"), Task(id="b", timeout=3)))
        assert await perform(run) == ["a", "b"]


async def test_a_step_between():
    """A new step goes between two others, one of which is running with another time limit from now on."""
    async with make_engine().open(steps(), run_id=RUN) as run:
        attempt = run.started("fetch")
        run.adopt(
            steps(
                fetch={"timeout": 60},
                check={"depends_on": ["fetch"], "tool": "read"},
                charge={"depends_on": ["check"]},
            )
        )
        run.succeeded(attempt, 1)
        assert await perform(run) == ["check", "charge", "report"]


async def test_tools_come_and_go():
    """A tool that is new can be used, one that is left out stays, and one may become unavailable."""
    new = {"name": "new", "kind": "shell", "command": "true"}
    without_mail = [*TOOLS[:2], new]
    async with make_engine().open(steps(), run_id=RUN) as run:
        tasks = (*steps().tasks[:2], Task(id="report", tool="new", depends_on=("charge",)))
        corrected = plan(*tasks, tools=without_mail)
        assert "+ tool new: kind: shell, command: true" in run.compare(corrected).diff
        run.adopt(corrected)
        assert [tool.name for tool in run.plan.tools] == ["read", "pay", "mail", "new"]
        run.change_resource("pay", available=False)
        dearer = [TOOLS[0], {**TOOLS[1], "cost": 3}, new]
        run.adopt(plan(*tasks, tools=dearer))
        assert not run.plan.tool("pay").available, "that was observed, and is not in the file"
        run.adopt(plan(*tasks, tools=[{**TOOLS[0], "available": False}, *dearer[1:]]))
        assert not run.plan.tool("read").available


async def test_what_a_function_says_of_its_tool():
    """What only a function or a server says of its tool is no difference to a file that leaves it open."""
    before = plan(Task(id="a", tool="t"), tools=[{"name": "t", "description": "reads", "cost": 2}])
    async with make_engine().open(before, run_id=RUN) as run:
        assert not run.compare(plan(Task(id="a", tool="t"), tools=[{"name": "t", "cost": 2}]))
        assert run.compare(plan(Task(id="a", tool="t"), tools=[{"name": "t", "cost": 3}]))


async def test_what_follows_a_replaced_task():
    """What follows a finished task that is run again does so in its present form, also where a replan added it."""
    engine = make_engine()
    async with engine.open(steps(), run_id=RUN) as run:
        await replaced(run, "charge", Task(id="other", tool="mail"))
        run.add_task(Task(id="added", tool="read", depends_on=("fetch",)))
        await perform(run)
        assert run.result.status == "succeeded"
    corrected = steps(fetch={"arguments": {"page": 2}})
    engine = make_engine()
    async with engine.open(steps(extra={}), run_id=RUN) as run:
        await replaced(run, "charge", Task(id="other", tool="mail"))
        run.add_task(Task(id="added", tool="read", depends_on=("fetch",)))
        for name in ("fetch", "other", "added"):
            run.succeeded(run.started(name), 1)
        run.adopt(steps(fetch={"arguments": {"page": 2}}, extra={}), rerun="changed")
        assert set(run.live.entries) >= {"fetch~2", "charge~2", "added~2"}
    async with engine.resume(RUN) as run:
        assert sorted(await perform(run)) == ["added~2", "charge~2", "extra", "fetch~2", "report"]
        assert not run.compare(corrected.model_copy(update={"tasks": run.live.plan.tasks}))


async def test_a_mask_that_stands_for_nothing():
    """A mask in a tool or in the context that stands for no value of the run is refused, each with its place."""
    async with make_engine().open(steps(), run_id=RUN) as run:
        tool = {"name": "new", "kind": "shell", "command": "curl -H [redacted]"}
        tools = [*TOOLS, tool]
        with pytest.raises(ChangeRejected) as refused:
            run.adopt(plan(*steps().tasks, tools=tools, context={"key": "[redacted]"}))
        assert [p.place for p in refused.value.problems] == ["tools.new", "context.key"]


async def test_a_name_that_is_a_secret():
    """A name that looks like a secret is refused."""
    async with make_engine().open(steps(), run_id=RUN) as run:
        with pytest.raises(ChangeRejected, match="cannot be a name"):
            run.adopt(steps(**{SECRET: {}}))
    engine = make_engine()
    await failed_at(steps(), "charge", engine=engine)
    with pytest.raises(ChangeRejected, match="cannot be a name"):
        engine.compare(RUN, steps(**{SECRET: {}}))


async def test_parts_without_their_secrets(tmp_path: Path):
    """What a corrected plan has no longer stays masked, and the rest goes on."""
    engine = make_engine(store=SqliteStore(tmp_path / "runs.db"))
    async with engine.open(secret_plan(SECRET), run_id=RUN):
        pass
    other = plan(Task(id="a", tool="u"), tools=[{"name": "u"}])
    async with engine.resume(RUN) as run:
        run.adopt(other)
        assert await perform(run) == ["a"]
        assert run.live.masked.tools == {"t"}
    async with engine.resume(RUN, secret_plan(SECRET, b={"arguments": {"token": "x"}})) as run:
        assert run.result.status == "succeeded"


async def test_servers_cannot_change():
    """Servers of tools cannot change, also where a plan has secrets."""
    before = secret_plan(SECRET)
    after = before.model_copy(update={"mcp": plan(mcp={"s": {"command": "x"}}).mcp})
    async with make_engine().open(before, run_id=RUN) as run:
        with pytest.raises(ChangeRejected, match="cannot change while the plan runs"):
            run.adopt(after)


async def test_compare_with_a_fork():
    """A corrected plan is compared with a run as it was at a revision, if there is one."""
    engine = make_engine()
    async with engine.open(steps(), run_id=RUN) as run:
        run.adopt(steps(charge={"timeout": 9}))
        await perform(run)
    assert engine.compare(RUN, steps(charge={"timeout": 9}), revision=0).changes
    assert not engine.compare(RUN, steps(charge={"timeout": 9}), revision=1)
    with pytest.raises(StoreError, match="revisions 0 to 1"):
        engine.compare(RUN, steps(), revision=2)


async def test_values_that_are_the_same_already():
    """A value of the context that the run has already, and one that only the run has changed, are no difference."""
    before = plan(Task(id="a"), context={"x": 1, "y": 1})
    async with make_engine().open(before, run_id=RUN) as run:
        run.change_context({"x": 2, "y": 5})
        assert not run.compare(before)
        assert not run.compare(plan(Task(id="a"), context={"x": 2, "y": 1}))
        run.adopt(plan(Task(id="a"), context={"x": 3, "y": 1}))
        assert run.live.context == {"x": 3, "y": 5}


async def test_results_that_have_become_stale():
    """Where the plan wants stale results done again, what was kept is followed up as soon as it is corrected."""
    reader = Task(id="a", arguments={"x": "${context.x}"}, effect="none")
    before = plan(reader, Task(id="b"), context={"x": 1})
    after = before.model_copy(update={"context": {"x": 2}, "on_stale": "redo"})
    engine = make_engine("repair")
    async with engine.open(before, run_id=RUN) as run:
        run.succeeded(run.started("a"), 1)
        run.adopt(after, rerun="none")
        assert sorted(await perform(run)) == ["a~2", "b"]


# Values that finished tasks have read


def reading(on_stale: str = "warn", **context: object) -> Plan:
    """A plan of tasks that use the context in different ways, with other values where they are given."""
    return plan(
        Task(id="refers", tool="pay", arguments={"x": "${context.x}"}),
        Task(id="reads"),
        Task(id="follows", tool="read", depends_on=("refers",)),
        Task(id="asks", when="context.x < 5"),
        Task(id="waits"),
        tools=TOOLS,
        on_stale=on_stale,
        context={"x": 1, "other": 1, **context},
    )


async def read_x(task: Task, context: TaskContext) -> object:
    """Work of which one task reads the context by itself, and one fails."""
    if task.id == "waits":
        raise ValueError("not yet")
    if task.id == "reads":
        return context.context["x"]
    return None


async def test_values_that_finished_tasks_have_read():
    """Finished tasks that have read a corrected value are asked about, with what follows from them."""
    engine = make_engine()
    result = await engine.execute(reading(), read_x, run_id=RUN)
    assert result.status == "failed"
    async with engine.resume(RUN) as run:
        assert not run.compare(reading(other=2)).again
        seen = run.compare(reading(x=2))
        assert seen.again == {
            "refers": "it has read values that changed: context.x",
            "reads": "it has read values that changed: context.x",
            "follows": "it depends on 'refers'",
        }
        assert seen.effects == {"refers": "irreversible", "reads": ""}
        with pytest.raises(ChangeRejected, match="state `rerun`"):
            run.adopt(reading(x=2))
        run.adopt(reading(x=2), rerun="changed")
        done = await perform(run)
    assert done == ["waits", "refers~2", "reads~2", "follows~2"]
    assert run.result.status == "succeeded"
    assert not run.result.stale


async def test_condition_with_another_outcome():
    """A finished task whose condition no longer holds is asked about; agreed, its successor is left out."""
    engine = make_engine()
    await engine.execute(reading(), read_x, run_id=RUN)
    async with engine.resume(RUN) as run:
        assert "asks" in run.compare(reading(x=7)).again
        run.adopt(reading(x=7), rerun="changed")
        await perform(run)
        assert states(run)["asks~2"] == "SKIPPED"


async def test_values_that_do_not_matter():
    """With `on_stale: ignore`, and where a value is what it was when it was read, nothing is asked."""
    engine = make_engine()
    await engine.execute(reading(), read_x, run_id=RUN)
    async with engine.resume(RUN) as run:
        assert not run.compare(reading("ignore", x=2)).again
        run.change_context({"x": 3})
        back = reading(x=1, other=2)
        assert not run.compare(back).again, "that x has changed is no difference to the file"
        run.adopt(reading(x=4), rerun="none")
        assert list(run.compare(reading()).again) == []
        run.adopt(reading())
        await perform(run)
    assert not run.result.stale


async def test_value_that_is_taken_out():
    """A value that the corrected plan no longer has is changed for those that have read it."""
    before = plan(Task(id="a", arguments={"x": "${context.x}"}), Task(id="b"), context={"x": 1})
    async with make_engine().open(before, run_id=RUN) as run:
        run.succeeded(run.started("a"), 1)
        after = plan(Task(id="a", arguments={"x": "${context.x}"}), Task(id="b"))
        assert run.compare(after).again == {"a": "it has read values that changed: context.x"}


async def test_finished_task_that_is_left_out_of_the_file():
    """A finished task that the corrected plan no longer has is history, whatever it has read."""
    engine = make_engine()
    await engine.execute(reading(), read_x, run_id=RUN)
    async with engine.resume(RUN) as run:
        assert list(run.compare(without(reading(x=2), "refers", "follows")).again) == ["reads"]


async def test_running_task_that_has_read_a_value():
    """A running task whose arguments have a value that is corrected is asked about, and done with the new one."""
    async with make_engine().open(reading(), run_id=RUN) as run:
        run.started("refers")
        assert list(run.compare(reading(x=2)).again) == ["refers"]
        run.adopt(reading(x=2), rerun="changed")
        assert "refers~2" in await perform(run)


async def test_value_of_a_call_in_doubt():
    """A failed task that may have had its effect with a corrected value is asked about."""
    async with make_engine().open(reading(), run_id=RUN) as run:
        run.failed(run.started("refers"), TimeoutError("gone"))
        why = "it has read values that changed: context.x, and it is unknown whether it took effect"
        assert run.compare(reading(x=2)).again == {"refers": why}


async def test_tasks_that_are_in_no_file():
    """What a replan or an edit has added counts as well, if it has used a changed tool or value."""
    tool = {"name": "t", "kind": "shell", "command": "make", "effect": "none"}
    before = plan(Task(id="a"), tools=[tool], context={"x": 1})
    async with make_engine().open(before, run_id=RUN) as run:
        run.add_task(Task(id="added", arguments={"x": "${context.x}"}))
        run.add_task(Task(id="tooled", tool="t"))
        for name in ("added", "tooled"):
            run.succeeded(run.started(name), 1)
        corrected = {**tool, "command": "make all"}
        seen = run.compare(plan(Task(id="a"), tools=[corrected], context={"x": 2}))
        assert list(seen.again) == ["added", "tooled"]


async def test_all_that_is_corrected_in_one_task():
    """A task whose tool is changed, or that follows, is run again with whatever else is corrected in it."""
    tool = {"name": "t", "kind": "shell", "command": "make", "effect": "none"}
    corrected = {**tool, "command": "make all"}

    def document(tool: dict[str, str], timeout: float | None) -> Plan:
        first = Task(id="a", tool="t", timeout=timeout)
        second = Task(id="b", depends_on=("a",), timeout=timeout)
        return plan(first, second, Task(id="c"), tools=[tool])

    async with make_engine().open(document(tool, None), run_id=RUN) as run:
        for name in ("a", "b"):
            run.succeeded(run.started(name), 1)
        assert not run.compare(document(tool, 9)).again
        run.adopt(document(corrected, 9), rerun="changed")
        assert {run.plan.task(name).timeout for name in ("a~2", "b~2")} == {9}


# What conditions have left out


def branching(*, when: str = "context.go", go: bool = False, **changed: Any) -> Plan:
    """A task with a condition, a branch behind it, a join, and one that asks how it ended."""
    fields: dict[str, dict[str, object]] = {
        "a": {"when": when},
        "branch": {"depends_on": ["a"]},
        "base": {},
        "asks": {"depends_on": ["a", "base"], "when": "status.a == 'DONE'"},
        "other": {},
        "join": {"depends_on": ["branch", "other"]},
    }
    tasks = []
    for task_id in dict.fromkeys([*fields, *changed]):
        task = {"id": task_id, **fields.get(task_id, {}), **changed.get(task_id, {})}
        tasks.append(Task.model_validate(task))
    return plan(*tasks, context={"go": go})


async def failed_join(engine: ReplanningEngine, *names: str) -> None:
    """A run of the plan in which the branch was left out, and some tasks have failed."""
    result = await engine.execute(branching(), failing(*names), run_id=RUN)
    assert result.status == "failed"


@pytest.mark.parametrize(
    "corrected",
    [branching(go=True), branching(when="not context.go"), branching(a={"when": None})],
)
async def test_condition_that_holds_now(corrected: Plan):
    """A task that its condition left out comes back, with its branch, if the condition holds as corrected."""
    engine = make_engine()
    await failed_join(engine, "other")
    async with engine.resume(RUN) as run:
        seen = run.compare(corrected)
        assert not seen.again
        assert "[SKIPPED]\n" in seen.diff
        run.adopt(corrected)
        assert sorted(await perform(run)) == ["a", "asks", "branch", "join", "other"]
    assert run.result.status == "succeeded"


async def test_condition_that_does_not_hold_yet():
    """What is corrected in a task that stays left out counts once it comes back."""
    engine = make_engine()
    await failed_join(engine, "other")
    changed: dict[str, Any] = {
        "a": {"timeout": 3},
        "branch": {"timeout": 4},
        "asks": {"depends_on": ["a", "other"]},
    }
    async with engine.resume(RUN) as run:
        run.adopt(branching(when="context.go == 5", **changed))
        assert states(run)["a"] == "SKIPPED"
        assert not run.compare(branching(when="context.go == 5", **changed))
    async with engine.resume(RUN) as run:
        run.adopt(branching(when="context.go == 5", go=True, **changed))
        assert states(run)["a"] == "SKIPPED", "true is not 5"
        run.adopt(branching(when="context.go.part", **changed))
        assert states(run)["a"] == "SKIPPED", "it cannot be evaluated"
        run.adopt(branching(when="not context.go", **changed))
        assert [run.plan.task(name).timeout for name in ("a", "branch")] == [3, 4]
        assert sorted(await perform(run)) == ["a", "asks", "branch", "join", "other"]


async def test_what_went_on_without_it():
    """If tasks have gone on without what was left out, they would be run again, so this is asked about."""
    engine = make_engine()
    before = branching()
    before = before.model_copy(update={"tasks": (*before.tasks, Task(id="last"))})
    result = await engine.execute(before, failing("last"), run_id=RUN)
    assert result.status == "failed"
    after = before.model_copy(update={"context": {"go": True}})
    async with engine.resume(RUN) as run:
        assert run.compare(after).again == {
            "a": "it was left out, and would run now",
            "asks": "it depends on 'a'",
            "join": "it depends on 'branch'",
        }
        run.adopt(after, rerun="changed")
        assert sorted(await perform(run)) == ["asks~2", "a~2", "branch", "join~2", "last"]
    assert run.result.status == "succeeded"


async def test_left_out_task_that_waits_for_others_now():
    """A left-out task that is to depend on something else waits for it; its condition is evaluated after that."""
    engine = make_engine()
    await failed_join(engine, "other")
    on_other: dict[str, object] = {"depends_on": ["other"], "when": "results.other == 'x'"}
    async with engine.resume(RUN) as run:
        run.adopt(branching(a=on_other, branch={"depends_on": ["other"]}))
        assert states(run) == {
            "a": "PENDING",
            "branch": "PENDING",
            "base": "DONE",
            "asks": "PENDING",
            "other": "READY",
            "join": "PENDING",
        }


async def test_left_out_task_that_waits_for_a_new_one():
    """A task that was left out with its branch comes back if it is to wait for a task that is new."""
    engine = make_engine()
    await failed_join(engine, "other")
    corrected = branching(fresh={}, branch={"depends_on": ["a", "fresh"]})
    async with engine.resume(RUN) as run:
        run.adopt(corrected)
        assert states(run)["branch"] == "PENDING"
        assert sorted(await perform(run)) == ["branch", "fresh", "join", "other"]
    assert run.result.status == "succeeded"


async def test_left_out_task_that_waits_for_others_that_are_left_out():
    """A left-out task that is to depend on another one that is left out as well comes back with that one."""
    engine = make_engine()
    twin: dict[str, object] = {"when": "context.go == 5"}
    before = branching(twin=twin)
    await engine.execute(before, failing("other"), run_id=RUN)
    on_both: dict[str, object] = {"depends_on": ["a", "twin"]}
    async with engine.resume(RUN) as run:
        run.adopt(branching(twin=twin, branch=on_both))
        assert states(run)["branch"] == "SKIPPED"
        run.adopt(branching(twin={"when": None}, branch=on_both))
        assert sorted(await perform(run)) == ["branch", "join", "other", "twin"]


async def test_branch_that_runs_in_any_case_now():
    """A task that was left out with its branch runs if it is corrected not to depend on that."""
    cases: list[dict[str, object]] = [{"run_if": "always"}, {"depends_on": []}]
    for changed in cases:
        engine = make_engine()
        await failed_join(engine, "other")
        async with engine.resume(RUN) as run:
            run.adopt(branching(branch=changed))
            assert await perform(run) == ["branch", "other", "join"]
        assert run.result.status == "succeeded"


async def test_left_out_by_a_person():
    """What a person has skipped stays so, whatever its condition says."""
    async with make_engine().open(branching(), run_id=RUN) as run:
        run.apply([{"kind": "skip", "task_id": "a"}])
        assert not run.compare(branching(go=True)).again
        run.adopt(branching(go=True))
        assert states(run)["a"] == "SKIPPED"


async def test_left_out_and_ignored():
    """With `on_stale: ignore`, a changed value does not bring back what its old value left out."""
    engine = make_engine()
    ignoring: dict[str, Any] = {"a": {"on_stale": "ignore"}}
    await engine.execute(branching(**ignoring), failing("other"), run_id=RUN)
    async with engine.resume(RUN) as run:
        run.adopt(branching(go=True, **ignoring))
        assert states(run)["a"] == "SKIPPED"


@pytest.mark.parametrize("corrected_later", [False, True])
async def test_tool_that_had_become_unavailable(clock: VirtualClock, corrected_later: bool):
    """A tool that is unavailable because it kept failing is available again once it is corrected."""

    def with_tool(command: str) -> Plan:
        fields = {"kind": "shell", "capability": "mark"}
        tools = [
            {"name": "tool", "command": command, **fields},
            {"name": "other", "command": "other", **fields},
        ]
        return plan(*(Task(id=f"t{number}", tool="tool") for number in range(12)), tools=tools)

    async def broken(task: Task, context: TaskContext) -> str:
        raise ValueError("the marker is missing")

    engine = make_engine(clock=clock, cooldown=30)
    result = await engine.execute(with_tool("false"), broken, run_id=RUN)
    assert "its tool 'tool' kept failing" in result.reason
    if corrected_later:
        await clock.sleep(3600)
    async with engine.resume(RUN) as run:
        assert "capability: mark, command: true" in run.compare(with_tool("true")).diff
        run.adopt(with_tool("true"))
        assert len(await perform(run)) == 12
    assert run.result.status == "succeeded"
