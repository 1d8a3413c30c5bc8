"""Branches that a condition leaves out, joins that go on, and tasks that run in any case."""

from collections.abc import Iterable
from random import Random

import anyio
import anyio.lowlevel
import pytest

from replanning import Plan, PlanRun, Task, TransientError, open_run
from replanning.changes import (
    AbortRun,
    AddTask,
    CancelTask,
    ModifyTask,
    ReplaceTask,
    RetryTask,
    SkipTask,
)
from replanning.errors import CallSkipped, ChangeRejected, ExpressionError, PlanError
from replanning.journal import ConditionEvaluated, MemoryStore, load_body
from replanning.plan import JsonObject
from replanning.testing import ScriptedExecutor, raises, returns
from tests.support.live import JournaledPlan
from tests.support.runs import failing, make_engine, perform, plan


def task(task_id: str, *depends_on: str, **fields: object) -> Task:
    """A task that depends on others."""
    return Task.model_validate({"id": task_id, "depends_on": depends_on, **fields})


def states(run: PlanRun) -> dict[str, str]:
    """The state of every task."""
    return {each.id: str(each.state) for each in run.view.tasks()}


NO = "context.go"
"""A condition that does not hold."""


async def test_branch_is_left_out_as_a_whole():
    """What depends on a skipped task alone is skipped with it, through any number of steps, with the reason."""
    tasks = (
        task("deploy", when=NO),
        task("smoke", "deploy"),
        task("announce", "smoke", "deploy"),
        task("other"),
    )
    async with open_run(plan(*tasks, context={"go": False})) as run:
        assert await perform(run) == ["other"]
        reasons = {each.id: each.reason for each in run.view.tasks()}
    assert run.result.status == "succeeded"
    assert states(run) == {
        "deploy": "SKIPPED",
        "smoke": "SKIPPED",
        "announce": "SKIPPED",
        "other": "DONE",
    }
    assert reasons["smoke"] == "all of its dependencies were left out: 'deploy'"
    assert reasons["announce"] == "all of its dependencies were left out: 'smoke', 'deploy'"


async def test_join_goes_on_with_what_ran():
    """A task of which a dependency has run runs, and what the others would have returned is null, with all its parts."""
    arguments = {
        "whole": "${left.output}",
        "part": "${left.output.path[0]}",
        "text": "of ${left.output.path}",
        "right": "${right.output}",
    }
    tasks = (
        task("left", when=NO),
        task("right"),
        task("join", "left", "right", arguments=arguments),
    )
    got: dict[str, object] = {}

    async def work(ready, context):
        got[ready.id] = dict(ready.arguments)
        return ready.id

    async with open_run(plan(*tasks, context={"go": False})) as run:
        assert await perform(run, work) == ["right", "join"]
    assert got["join"] == {"whole": None, "part": None, "text": "of null", "right": "right"}


async def test_sequential_plan_leaves_no_branch_out():
    """In a sequential plan, a step whose condition does not hold is skipped alone."""
    document = plan(
        task("a"), task("b", when=NO), task("c"), context={"go": False}, sequential=True
    )
    async with open_run(document) as run:
        assert await perform(run) == ["a", "c"]


async def test_optional_failure_leaves_no_branch_out():
    """What depends on an optional task that failed and was skipped by a decision runs, without its output."""
    tasks = (task("a", optional=True), task("b", "a", arguments={"of": "${a.output.part}"}))
    work = failing("a")
    async with make_engine("repair").open(plan(*tasks)) as run:
        await perform(run, work)
    assert states(run) == {"a": "SKIPPED", "b": "DONE"}


async def test_skip_by_a_person_leaves_no_branch_out():
    """What depends on a task that a person skips runs."""
    async with open_run(plan(task("a"), task("b", "a"))) as run:
        run.apply([SkipTask(task_id="a", reason="it was done by hand")], reason="by hand")
        assert await perform(run) == ["b"]


@pytest.mark.parametrize(
    ("fails", "condition", "runs"),
    [
        ((), "status.a == 'DONE'", True),
        ((), "status.a == 'FAILED'", False),
        (("a",), "status.a == 'FAILED'", True),
        (("a",), "status.a in ['FAILED', 'BLOCKED']", True),
        (("a",), "status['b'] == 'BLOCKED'", True),
        (("b",), "status.a == 'DONE' and status.b == 'FAILED'", True),
        ((), "status.left_out == 'SKIPPED'", True),
        (("a",), "status.given_up == 'CANCELLED'", True),
        ((), "results.left_out.part == None", True),
        (("a",), "results.a.part == None", True),
    ],
)
async def test_status(fails, condition, runs):
    """Conditions ask how tasks have ended; one that cannot run because of what it needs is BLOCKED."""
    tasks = (
        task("a"),
        task("b", "a"),
        task("left_out", when=NO),
        task("given_up", optional=True),
        task("c", "b", "left_out", "given_up", run_if="always", when=condition),
    )
    async with open_run(plan(*tasks, context={"go": False})) as run:
        run.apply([CancelTask(task_id="given_up")], reason="nobody needs it")
        ran = await perform(run, failing(*fails))
    assert ("c" in ran) is runs
    assert states(run)["c"] == ("DONE" if runs else "SKIPPED")


async def test_status_of_a_task_that_is_not_there():
    """A condition that asks about a task of another plan is refused, and so is one about a task that is not awaited."""
    with pytest.raises(PlanError, match=r"refers to status\.b, and 'b' is not a task of the plan"):
        plan(task("a", when="status.b == 'DONE'"))
    with pytest.raises(PlanError, match="does not depend on 'b'"):
        plan(task("b"), task("a", when="status.b == 'DONE'"))
    async with open_run(plan(task("a"), task("b", "a"))) as run:
        with pytest.raises(ChangeRejected, match="does not depend on 'b'"):
            run.apply([ModifyTask(task_id="a", fields={"when": "status.b == 'DONE'"})])
        await perform(run)


async def test_status_of_a_replaced_task():
    """The status of a replaced task is that of what stands for it: of a part that failed, if one has."""
    ask = {"run_if": "always", "when": "status.a == 'FAILED' and status.b == 'DONE'"}
    tasks = (task("a"), task("b"), task("alarm", "a", "b", **ask))
    async with open_run(plan(*tasks)) as run:
        parts = (Task(id="a1"), Task(id="a2"))
        changes = [
            ReplaceTask(task_id="a", tasks=parts),
            ReplaceTask(task_id="b", tasks=(Task(id="b1"),)),
        ]
        run.apply(changes, reason="in parts")
        ran = await perform(run, failing("a2"))
    assert sorted(ran) == ["a1", "a2", "alarm", "b1"]


async def test_run_if_always_runs_after_a_failure():
    """`run_if: always` runs when what it depends on has failed, or can never run, without its output."""
    tasks = (
        task("up"),
        task("test", "up", arguments={}),
        task("down", "test", run_if="always", arguments={"log": "${test.output.log}"}),
        task("report", "down"),
    )
    work = failing("up")
    async with open_run(plan(*tasks)) as run:
        assert await perform(run, work) == ["up", "down", "report"]
    assert run.result.status == "failed"
    assert run.result.reason == "'up' failed (up is broken)"
    assert states(run) == {"up": "FAILED", "test": "PENDING", "down": "DONE", "report": "DONE"}


async def test_run_if_always_waits_for_all():
    """`run_if: always` waits for every dependency to end, and not for what it does not depend on."""
    tasks = (task("a"), task("b"), task("other"), task("down", "a", "b", run_if="always"))
    order: list[str] = []

    async with open_run(plan(*tasks)) as run:
        attempts = {}
        for task_id in ("a", "b", "other"):
            attempts[task_id] = run.started(task_id)
        run.failed(attempts["a"], ValueError("broken"))
        order.append(states(run)["down"])
        run.succeeded(attempts["b"])
        order.append(states(run)["down"])
        run.succeeded(attempts["other"])
        assert await perform(run) == ["down"]
    assert order == ["PENDING", "READY"]


async def test_run_if_always_waits_for_a_repair():
    """While the engine may still repair what failed, `run_if: always` waits, and then gets the result of the repair."""
    got: list[tuple[str, JsonObject]] = []

    async def work(ready, context):
        if ready.id == "a":
            raise ValueError("broken")
        got.append((ready.id, ready.arguments))
        return ready.id

    tasks = (
        task("a", fallbacks=[{"arguments": {"other": 1}}]),
        task("down", "a", run_if="always", arguments={"of": "${a.output}"}),
    )
    async with make_engine("repair").open(plan(*tasks)) as run:
        await perform(run, work)
    assert run.result.status == "succeeded"
    assert [name for name, _ in got][-1] == "down"
    assert got[-1][1] == {"of": got[0][0]}


async def test_run_if_always_waits_again_after_a_change():
    """A change that brings a failed dependency back makes `run_if: always` wait for it again."""
    async with open_run(plan(task("a"), task("down", "a", run_if="always"))) as run:
        attempt = run.started("a")
        run.failed(attempt, ValueError("broken"))
        before = states(run)["down"]
        run.apply([RetryTask(task_id="a")], reason="once more")
        assert (before, states(run)["down"]) == ("READY", "PENDING")
        assert await perform(run) == ["a", "down"]
    assert run.result.status == "succeeded"


async def test_run_if_always_is_retried_like_any_other():
    """A task with `run_if: always` that fails is tried again, although what it depends on has failed."""
    tasks = (task("a"), task("down", "a", run_if="always", retry={"max_attempts": 2, "delay": 0}))
    work = ScriptedExecutor(
        {"a": [raises(ValueError("broken"))], "down": [raises(TransientError("busy")), returns(1)]}
    )
    async with make_engine("repair").open(plan(*tasks)) as run:
        assert await perform(run, work) == ["a", "down", "down"]
    assert states(run)["down"] == "DONE"


async def test_abort_excepted():
    """`run_if: always` does not run in a run that is aborted."""
    async with open_run(plan(task("a"), task("down", "a", run_if="always"))) as run:
        run.apply([AbortRun(reason="enough")], reason="enough")
        assert await perform(run) == []
    assert run.result.status == "aborted"


async def test_run_if_always_after_a_goal_that_was_reached_early(clock):
    """A goal that is reached early cancels the rest, and lets `run_if: always` run before the run ends."""
    document = plan(
        task("start"),
        task("soak", "start"),
        task("try", "start", tool="try"),
        task("report", "soak", "try"),
        task("stop", "soak", "report", run_if="always"),
        task("tidy", "stop", run_if="always"),
        task("told", "stop"),
        tools=[{"name": "try", "adds": ["tried"]}],
        goal={"objective": "test", "facts": ["tried"], "stop_when_reached": True},
    )
    ran = []

    async def work(task, context):
        ran.append(task.id)
        if task.id == "soak":
            await clock.sleep(3600)

    engine = make_engine(clock=clock)
    async with engine.open(document) as run, anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(perform, run, work)
    assert (run.result.status, run.result.reason) == ("succeeded", "the goal was reached early")
    assert clock.elapsed < 3600
    assert ran[-2:] == ["stop", "tidy"]
    assert states(run) == {
        "start": "DONE",
        "soak": "CANCELLED",
        "try": "DONE",
        "report": "CANCELLED",
        "stop": "DONE",
        "tidy": "DONE",
        "told": "CANCELLED",
    }


@pytest.mark.parametrize("paused", [False, True])
async def test_goal_reached_early_by_the_last_task(paused):
    """A goal that is reached early ends the run also where `run_if: always` cannot run: without its tool, or paused."""
    document = plan(
        task("try", tool="try"),
        task("stop", "try", tool="gone", run_if="always"),
        tools=[
            {"name": "try", "adds": ["tried"]},
            {"name": "gone", "available": paused},
        ],
        goal={"objective": "test", "facts": ["tried"], "stop_when_reached": True},
    )

    async def work(task, context):
        if paused:
            run.pause("enough")

    async with open_run(document) as run:
        assert await perform(run, work) == ["try"]
    assert (run.result.status, run.result.reason) == ("succeeded", "the goal was reached early")
    assert states(run) == {"try": "DONE", "stop": "CANCELLED"}


async def test_goal_reached_early_waits_for_all_that_run_in_any_case():
    """A goal that is reached early ends the run once every task with `run_if: always` has ended."""
    document = plan(
        task("try", tool="try"),
        task("stop", "try", run_if="always"),
        task("wipe", "stop", run_if="always"),
        tools=[{"name": "try", "adds": ["tried"]}],
        goal={"objective": "test", "facts": ["tried"], "stop_when_reached": True},
    )
    async with open_run(document) as run:
        assert await perform(run) == ["try", "stop", "wipe"]
    assert (run.result.status, run.result.reason) == ("succeeded", "the goal was reached early")


async def test_missing_output_is_compared():
    """A comparison by order with the output of a task that was left out, or a part of it, does not hold."""
    tasks = (
        task("a", when=NO),
        task("b"),
        task("above", "a", "b", when="results.a.n > 3"),
        task("below", "a", "b", when="results.a <= 3"),
        task("neither", "a", "b", when="not results.a.n > 3 and results.a.n == null"),
        task("listed", "a", "b", when="'x' in results.a.names"),
    )
    async with open_run(plan(*tasks, context={"go": False})) as run:
        assert await perform(run) == ["b", "neither"]
    assert run.result.status == "succeeded"


async def test_run_if_always_in_a_branch_that_is_left_out():
    """`run_if: always` runs although its branch is left out, and so does what follows it."""
    tasks = (
        task("a", when=NO),
        task("b", "a"),
        task("c", "b", run_if="always"),
        task("d", "c", "b"),
    )
    async with open_run(plan(*tasks, context={"go": False})) as run:
        assert await perform(run) == ["c", "d"]


async def test_replacement_keeps_run_if():
    """What replaces a task runs in the same cases, whoever proposed it."""
    tasks = (
        task("a", when=NO),
        task("down", "a", run_if="always", fallbacks=[{"arguments": {"other": 1}}]),
    )
    work = failing("down")
    async with make_engine("repair").open(plan(*tasks, context={"go": False})) as run:
        ran = await perform(run, work)
    assert len(ran) == 2
    assert run.result.status == "succeeded"


async def test_branch_without_its_tool_is_left_out():
    """A branch is left out also where its tasks could not be handed out at the moment."""
    document = plan(
        task("a", when=NO),
        task("b", "a", tool="away"),
        context={"go": False},
        tools=[{"name": "away", "available": False}],
    )
    async with open_run(document) as run:
        assert await perform(run) == []
    assert run.result.status == "succeeded"


async def test_performed_task_is_left_out():
    """Who performs a task of a branch that is left out is told so."""
    document = plan(task("a", when=NO), task("b", "a"), task("c", "b"), context={"go": False})
    async with open_run(document) as run, anyio.create_task_group() as group:

        async def perform_last() -> None:
            with pytest.raises(CallSkipped, match="all of its dependencies were left out"):
                await run.perform("c", failing())

        group.start_soon(perform_last)
        await anyio.lowlevel.checkpoint()
        assert await perform(run) == []
    assert run.result.status == "succeeded"


async def test_branch_comes_back_as_a_whole():
    """A skipped task that is retried, because its condition holds now, brings its branch back."""
    tasks = (task("a", when=NO), task("b", "a"), task("c", "b"), task("hold", "z"), task("z"))
    async with open_run(plan(*tasks, context={"go": False})) as run:
        attempt = run.started("z")
        ready = run.ready()
        with anyio.move_on_after(0):
            await anext(ready)
        before = states(run)
        run.change_context({"go": True})
        run.apply([RetryTask(task_id="a")], reason="it may go now")
        between = states(run)
        run.succeeded(attempt)
        assert sorted(await perform(run)) == ["a", "b", "c", "hold"]
    assert (before["b"], before["c"]) == ("SKIPPED", "SKIPPED")
    assert (between["b"], between["c"]) == ("PENDING", "PENDING")


async def test_branch_comes_back_when_it_is_done_again():
    """With `on_stale: redo`, a branch whose condition holds now is done, and the join after it once more."""
    seen: list[tuple[str, object]] = []

    async def work(ready, context):
        seen.append((ready.id.partition("~")[0], ready.arguments.get("of")))
        if ready.id == "change":
            context.change_context({"go": True})
        return ready.id

    tasks = (
        task("a", when=NO, idempotent=True),
        task("b", "a", idempotent=True),
        task("d"),
        task("join", "b", "d", idempotent=True, arguments={"of": "${b.output}"}),
        task("change", "join"),
    )
    document = plan(*tasks, context={"go": False}, on_stale="redo")
    async with make_engine("repair").open(document) as run:
        await perform(run, work)
    assert run.result.status == "succeeded"
    assert [name for name, _ in seen] == ["d", "join", "change", "a", "b", "join"]
    assert [of for name, of in seen if name == "join"] == [None, "b"]


async def test_retry_of_a_branch_without_its_condition_is_refused():
    """A task that would only be left out again is not retried alone; the reason says what helps."""
    tasks = (task("a", when=NO), task("b", "a"), task("other"))
    async with open_run(plan(*tasks, context={"go": False})) as run:
        attempt = run.started("other")
        ready = run.ready()
        with anyio.move_on_after(0):
            await anext(ready)
        with pytest.raises(ChangeRejected, match=r"'b' would be left out again.*retry 'a' as well"):
            run.apply([RetryTask(task_id="b")])
        run.apply([RetryTask(task_id="b"), RetryTask(task_id="a")])
        assert states(run)["b"] == "PENDING"
        run.apply([ModifyTask(task_id="b", fields={"run_if": "always"})])
        run.succeeded(attempt)
        assert await perform(run) == ["b"]


async def test_change_behind_a_branch_that_is_left_out():
    """A task that is added to a branch that was left out is left out as well, and comes back with it."""
    tasks = (task("a", when=NO), task("b", "a"), task("other"))
    async with open_run(plan(*tasks, context={"go": False})) as run:
        attempt = run.started("other")
        ready = run.ready()
        with anyio.move_on_after(0):
            await anext(ready)
        run.apply([AddTask(task=task("c", "b")), AddTask(task=task("d", "c"))])
        assert (states(run)["c"], states(run)["d"]) == ("SKIPPED", "SKIPPED")
        run.apply([RetryTask(task_id="a"), RetryTask(task_id="b")])
        run.change_context({"go": True})
        run.succeeded(attempt)
        assert await perform(run) == ["a", "b", "c", "d"]


async def test_what_has_followed_the_branch_keeps_it_out():
    """A branch does not come back once a join has gone on without it."""
    tasks = (
        task("a", when=NO),
        task("b", "a"),
        task("d"),
        task("join", "b", "d"),
        task("z", "join"),
    )
    async with open_run(plan(*tasks, context={"go": False})) as run:
        async for ready in run.ready():
            async with run.attempt(ready):
                if ready.id == "z":
                    with pytest.raises(
                        ChangeRejected, match=r"skipped and .*'join'.* have started"
                    ):
                        run.apply([RetryTask(task_id="a")])


async def test_journal_of_an_earlier_version():
    """In a run that an earlier version has written, what followed a skipped task has run, and stays so."""
    run = JournaledPlan(
        plan(task("a", when=NO), task("b", "a"), task("c", "b"), context={"go": False})
    )
    run.fold(ConditionEvaluated("a", value=False))
    run.run("b", "c")
    assert run.states() == {"a": "SKIPPED", "b": "DONE", "c": "DONE"}
    assert load_body("condition-evaluated", '{"task": "a", "value": false}') == ConditionEvaluated(
        "a", value=False
    )
    assert {e.id: str(e.state) for e in run.replayed()} == run.states()


async def test_run_if_always_behind_several_failures():
    """A task that waits for several failed ones in vain has ended once, and its replacement only with all its parts."""
    tasks = (
        task("a"),
        task("b"),
        task("c", "a", "b"),
        task("whole"),
        task("down", "c", "whole", run_if="always", when="status.c == 'BLOCKED'"),
    )
    async with open_run(plan(*tasks)) as run:
        run.apply([ReplaceTask(task_id="whole", tasks=(Task(id="p"), Task(id="q")))])
        for task_id in ("a", "b", "p"):
            run.failed(run.started(task_id), ValueError("broken"))
        assert not run.view.evaluate("status.down == 'BLOCKED'")
        with pytest.raises(ExpressionError, match=r"status\.nobody does not exist"):
            run.view.evaluate("status.nobody == 'DONE'")
        before = states(run)["down"]
        run.failed(run.started("q"), ValueError("broken"))
        assert (before, states(run)["down"]) == ("PENDING", "READY")
        run.apply([SkipTask(task_id="a"), SkipTask(task_id="b"), CancelTask(task_id="c")])
        assert states(run)["down"] == "READY"
        assert await perform(run) == []
    assert states(run)["down"] == "SKIPPED"


async def test_run_if_always_stays_ready_when_what_failed_is_skipped():
    """A task that was to run without what failed may still run once a person has skipped that."""
    async with open_run(plan(task("a"), task("down", "a", run_if="always"))) as run:
        run.failed(run.started("a"), ValueError("broken"))
        run.apply([SkipTask(task_id="a")])
        assert states(run)["down"] == "READY"
        assert await perform(run) == ["down"]
    assert run.result.status == "succeeded"


async def test_retry_of_a_task_that_runs_in_any_case():
    """A task with `run_if: always` whose branch was left out may be retried alone."""
    tasks = (task("a", when=NO), task("down", "a", run_if="always"), task("other"))
    async with open_run(plan(*tasks, context={"go": False})) as run:
        other = run.started("other")
        ready = await anext(run.ready())
        async with run.attempt(ready):
            raise ValueError("broken")
        run.apply([RetryTask(task_id="down")])
        run.succeeded(other)
        assert await perform(run) == ["down"]


async def test_branch_behind_a_replacement_is_left_out():
    """A branch is left out if all that stands for what it depends on was, and comes back with any of it."""
    parts = (Task(id="p", when=NO), Task(id="q", when="context.also"))
    document = plan(task("a"), task("b", "a"), task("other"), context={"go": False, "also": False})
    async with open_run(document) as run:
        other = run.started("other")
        run.apply([ReplaceTask(task_id="a", tasks=parts)])
        with anyio.move_on_after(0):
            await anext(run.ready())
        assert states(run)["b"] == "SKIPPED"
        assert run.view.left_out_with("p") == ("b",)
        run.change_context({"also": True})
        run.apply([RetryTask(task_id="q")])
        run.succeeded(other)
        assert await perform(run) == ["q", "b"]


async def test_corrected_condition_brings_its_branch_back():
    """Where a corrected plan, or a rerun, lets a branch run after all, the join that went on without it runs again."""

    def corrected(condition: str) -> Plan:
        after = (task("b", "a"), task("c", "b", "a"), task("d"), task("join", "b", "c", "d"))
        return plan(task("a", when=condition), *after, task("x"), context={"go": False})

    engine = make_engine()
    result = await engine.execute(corrected(NO), failing("x"))
    async with engine.resume(engine.rerun(result.run, "a")) as run:
        run.change_context({"go": True})
        assert await perform(run) == ["a~2", "b", "c", "join~2"]
    async with engine.resume(result.run) as run:
        run.adopt(corrected("not context.go"), rerun="changed")
        assert await perform(run) == ["x", "a~2", "b", "c", "join~2"]
    assert run.result.status == "succeeded"


# Random plans against a small model


def random_tasks(rng: Random) -> list[Task]:
    """Tasks without a cycle, some with conditions, optional, or with `run_if`."""
    tasks: list[Task] = []
    for number in range(rng.randint(1, 9)):
        needed = sorted(rng.sample(range(number), min(number, rng.choice([0, 1, 1, 2, 3]))))
        fields: dict[str, object] = {"optional": rng.random() < 0.4}
        if rng.random() < 0.35:
            fields["when"] = rng.choice(["context.yes", "context.no", "context.no"])
            if needed and rng.random() < 0.4:
                asked = rng.choice(needed)
                fields["when"] = f"status.t{asked} {rng.choice(['==', '!='])} 'DONE'"
        if needed and rng.random() < 0.25:
            fields["run_if"] = "always"
        tasks.append(task(f"t{number}", *(f"t{one}" for one in needed), **fields))
    return tasks


def expected_states(tasks: Iterable[Task], fails: set[str], *, engine: bool) -> dict[str, str]:
    """The model: how each task ends, from how those before it have ended.

    A task that never ends, because it waits for one that failed, counts as BLOCKED for conditions.
    """
    ends: dict[str, str] = {}
    left_out: set[str] = set()
    for one in tasks:
        always = one.run_if == "always"
        needed = [ends[dep] for dep in one.depends_on]
        if not always and not {"FAILED", "BLOCKED"}.isdisjoint(needed):
            ends[one.id] = "BLOCKED"
            continue
        is_behind = bool(needed) and left_out.issuperset(one.depends_on)
        if (is_behind and not always) or not holds(one.when, ends):
            ends[one.id] = "SKIPPED"
            left_out.add(one.id)
        elif one.id not in fails:
            ends[one.id] = "DONE"
        else:
            # The engine skips an optional task that failed, which leaves no branch out.
            ends[one.id] = "SKIPPED" if engine and one.optional else "FAILED"
    return ends


def holds(condition: str | None, ends: dict[str, str]) -> bool:
    """Whether a condition of `random_tasks` holds."""
    match (condition or "context.yes").split():
        case [name]:
            return name == "context.yes"
        case [name, operator, _]:
            return (ends[name.removeprefix("status.")] == "DONE") == (operator == "==")
    raise AssertionError(condition)


@pytest.mark.parametrize("with_engine", [False, True])
async def test_random_plans(with_engine):
    """Which tasks run is what the model says, in a run and after every prefix of its journal is replayed."""
    for seed in range(150):
        rng = Random(seed)
        tasks = random_tasks(rng)
        fails = {one.id for one in tasks if rng.random() < 0.3}
        document = plan(*tasks, context={"yes": True, "no": False})
        store = MemoryStore()
        engine = make_engine("repair", store=store, enabled=with_engine)
        async with engine.open(document) as run:
            ran = await perform(run, failing(*fails))
        found = {
            name: "BLOCKED" if state == "PENDING" else state for name, state in states(run).items()
        }
        expected = expected_states(tasks, fails, engine=with_engine)
        assert found == expected, seed
        assert sorted(ran) == sorted(name for name in found if run.view.task(name).attempts), seed
        history = run.history
        assert {e.id: e.state for e in history.replay()} == {e.id: e.state for e in run.live}, seed
