"""Runs: pulling, reporting, observing, editing; with and without an engine."""

from __future__ import annotations

import math
import sys

import anyio
import pytest
from pydantic import JsonValue

from replanning import ReplanningEngine, Retry, Settings, Task, TaskContext, TaskState, TransientError, open_run
from replanning.errors import ChangeRejected, NotRunning, UnknownAttempt, UnknownTask
from replanning.journal import (
    AttemptFenced,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    ConditionEvaluated,
    MemoryStore,
)
from replanning.orchestrators import SequentialOrchestrator
from replanning.plan import JsonObject
from replanning.testing import VirtualClock
from tests.support.runs import Proposer, bodies, chain, environment, failing, plan


async def test_pull_and_report() -> None:
    """A loop of five lines runs a plan to its end and finds every output under its task."""
    async with open_run(chain("a", "b", "c")) as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = dict(attempt.context.results) | {task.id: 1}
    assert run.result.status == "succeeded"
    assert run.result.outputs == {"a": {"a": 1}, "b": {"a": {"a": 1}, "b": 1}, "c": {**run.result.outputs["c"]}}
    assert list(run.result.outputs["c"]) == ["a", "b", "c"]  # type: ignore[arg-type]


async def test_empty_plan() -> None:
    """A plan of no tasks succeeds at once."""
    async with open_run(plan()) as run:
        assert [task async for task in run.ready()] == []
    assert run.result.status == "succeeded"


async def test_reports_from_elsewhere() -> None:
    """Started, succeeded and failed can be called from anywhere, and the run ends when all is reported."""
    async with open_run(chain("a", "b")) as run:
        run.succeeded(run.started("a"), {"x": [1, 2]})
        attempt = run.started("b")
        run.failed(attempt, "exit status 1")
        result = await run.wait()
    assert (result.status, result.outputs) == ("failed", {"a": {"x": [1, 2]}})
    assert "exit status 1" in result.reason


async def test_none_is_an_output() -> None:
    """A result of None is a success like any other."""
    async with open_run(chain("a", "b")) as run:
        async for task in run.ready():
            async with run.attempt(task):
                pass
    assert run.result.status == "succeeded"
    assert run.result.outputs == {"a": None, "b": None}


async def test_result_before_the_end() -> None:
    """The result of a run that goes on is refused with a sentence, not with nonsense."""
    async with open_run(chain("a")) as run:
        with pytest.raises(NotRunning, match="not ended yet"):
            run.result  # noqa: B018
        run.pause()


async def test_started_twice() -> None:
    """A task that runs already cannot be started again, one that does not exist neither."""
    async with open_run(chain("a", "b")) as run:
        run.started("a")
        with pytest.raises(NotRunning, match="'a' is RUNNING"):
            run.started("a")
        with pytest.raises(NotRunning, match="'b' is PENDING"):
            run.started("b")
        with pytest.raises(UnknownTask, match="'z'"):
            run.started("z")


async def test_late_report_is_fenced() -> None:
    """A second report for an attempt is recorded and changes nothing."""
    store = MemoryStore()
    async with open_run(chain("a"), store=store) as run:
        attempt = run.started("a")
        run.failed(attempt, "first")
        run.succeeded(attempt, "second")
        result = await run.wait()
    assert result.status == "failed"
    async with open_run(chain("a", "b"), store=store) as run:
        attempt = run.started("a")
        run.succeeded(attempt, 1)
        run.succeeded(attempt, 2)
        assert run.live.results.output_of("a") == 1
        with pytest.raises(UnknownAttempt):
            run.succeeded("nobody#1")  # type: ignore[arg-type]
    assert bodies(store, run.id, AttemptFenced) == [AttemptFenced(attempt, "a", "succeeded")]


async def test_not_attempted_goes_back() -> None:
    """A task that was handed out and not attempted is handed out again on the next pull."""
    async with open_run(chain("a")) as run:
        seen = []
        async for task in run.ready():
            seen.append(task.id)
            if len(seen) == 3:
                async with run.attempt(task):
                    pass
    assert seen == ["a", "a", "a"]


async def test_worker_that_leaves() -> None:
    """A task pulled by a worker that went away is taken by another one that waits."""
    done = []
    async with open_run(chain("a")) as run:

        async def leaves() -> None:
            async for _ in run.ready():
                return

        async def works() -> None:
            async for task in run.ready():
                async with run.attempt(task):
                    done.append(task.id)

        async with anyio.create_task_group() as group:
            group.start_soon(leaves)
            group.start_soon(works)
    assert done == ["a"]
    assert run.result.status == "succeeded"


async def test_cancelled_waiter_passes_on() -> None:
    """A waiter that is cancelled as it is woken lets another one take the task."""
    async with open_run(chain("a", "b")) as run:
        attempt = run.started("a")
        done = []

        async def wait_in(scope: anyio.CancelScope) -> None:
            with scope:
                async for task in run.ready():
                    async with run.attempt(task):
                        done.append(task.id)

        first, second = anyio.CancelScope(), anyio.CancelScope()
        async with anyio.create_task_group() as group:
            group.start_soon(wait_in, first)
            group.start_soon(wait_in, second)
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
            run.succeeded(attempt)
            first.cancel()
    assert done == ["b"]
    assert run.result.status == "succeeded"


async def test_transient_error_is_retried() -> None:
    """An error that may pass is tried again with growing delays, without an engine too."""
    async with VirtualClock() as clock:
        settings = Settings(retry=Retry(max_attempts=3, delay=1, jitter=False))
        engine = ReplanningEngine([], settings=settings, environment=environment(clock))
        times = []

        async def work(task: Task, context: TaskContext) -> str:
            times.append(clock.elapsed)
            if len(times) < 3:
                raise TransientError("busy")
            return "done"

        result = await engine.execute(chain("a"), work, replanning=False)
    assert (result.status, times) == ("succeeded", [0, 1, 3])


async def test_lasting_error_is_not_retried() -> None:
    """An error that will not pass is not tried again."""
    store = MemoryStore()
    async with open_run(chain("a"), store=store) as run:
        async for task in run.ready():
            async with run.attempt(task):
                raise ValueError("wrong input")
    assert run.result.status == "failed"
    assert len(bodies(store, run.id, AttemptStarted)) == 1


async def test_group_is_one_failure() -> None:
    """An exception group is one failure, transient only if all of its parts are."""
    async with open_run(plan(Task(id="a", retry=Retry(max_attempts=1)))) as run:
        async for task in run.ready():
            async with run.attempt(task):
                raise ExceptionGroup("both", [ValueError("one"), TransientError("two")])
    failure = run.live.entry("a").failure
    assert failure is not None
    assert (failure.type, failure.transient) == ("ExceptionGroup", False)
    assert "ValueError: one" in failure.message


async def test_timeout_cancels_the_work() -> None:
    """An attempt that runs into its deadline is cancelled, recorded, and not repeated unless idempotent."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine([], environment=environment(clock))

        async def work(task: Task, context: TaskContext) -> None:
            await clock.sleep(100)

        once, thrice = Task(id="once", timeout=10), Task(id="thrice", timeout=10, idempotent=True)
        result = await engine.execute(plan(once, thrice), work, replanning=False)
    assert result.status == "failed"
    timeouts = [body.task for body in bodies(engine.store, result.run, AttemptTimedOut)]
    assert sorted(timeouts) == ["once", "thrice", "thrice", "thrice"]
    assert 30 < clock.elapsed < 40


async def test_timeout_error_of_the_work() -> None:
    """A TimeoutError that the work itself raises is an ordinary failure."""
    store = MemoryStore()
    async with open_run(chain("a"), store=store) as run:
        async for task in run.ready():
            async with run.attempt(task):
                raise TimeoutError("the service did not answer")
    assert run.live.entry("a").failure.kind == "error"


async def test_cancellation_is_an_interruption() -> None:
    """A cancelled worker leaves its attempt interrupted, and the cancellation goes on."""
    store = MemoryStore()
    async with open_run(chain("a"), store=store) as run:
        with anyio.CancelScope() as scope:
            async for task in run.ready():
                async with run.attempt(task):
                    scope.cancel()
                    await anyio.sleep_forever()
        assert scope.cancelled_caught
    assert [type(body) for body in bodies(store, run.id, AttemptInterrupted)] == [AttemptInterrupted]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
async def test_exits_go_through(kind: type[BaseException]) -> None:
    """KeyboardInterrupt and SystemExit are recorded as interruptions and never swallowed."""
    store = MemoryStore()
    with pytest.raises(kind):  # noqa: PT012 - what goes through is what the loop as a whole raises
        async with open_run(chain("a"), store=store, run_id="r") as run:
            async for task in run.ready():
                async with run.attempt(task):
                    raise kind()
    assert run.result.status == "paused"
    assert len(bodies(store, "r", AttemptInterrupted)) == 1


async def test_body_error_is_unwrapped() -> None:
    """An exception of the orchestrator's own code comes out as it is, and the run is left paused."""
    with pytest.raises(RuntimeError, match="mine"):
        async with open_run(chain("a")) as run:
            raise RuntimeError("mine")
    assert (run.result.status, run.result.reason) == ("paused", "the orchestrator raised RuntimeError")


async def test_condition_skips() -> None:
    """A task whose condition does not hold is skipped, recorded, and satisfies its dependents."""
    store = MemoryStore()
    tasks = (
        Task(id="a", when="context.go"),
        Task(id="b", depends_on=("a",), when="results.a == None"),
        Task(id="c", depends_on=("b",)),
    )
    async with open_run(plan(*tasks, context={"go": False}), store=store) as run:
        ran = []
        async for task in run.ready():
            async with run.attempt(task):
                ran.append(task.id)
    assert run.result.status == "succeeded"
    assert ran == ["b", "c"]
    evaluated = [(body.task, body.value) for body in bodies(store, run.id, ConditionEvaluated)]
    assert evaluated == [("a", False), ("b", True)]


async def test_condition_that_fails() -> None:
    """A condition that cannot be evaluated fails its task with a reason that names it."""
    async with open_run(plan(Task(id="a", when="context.missing"))) as run:
        assert [task async for task in run.ready()] == []
    assert run.result.status == "failed"
    assert "missing" in run.result.reason


async def test_arguments_are_resolved() -> None:
    """References in arguments become the values of results and context when a task is handed out."""
    tasks = (
        Task(id="a"),
        Task(id="b", depends_on=("a",), arguments={"path": "${a.output.path}", "where": "in ${context.region}"}),
    )
    async with open_run(plan(*tasks, context={"region": "eu"})) as run:
        seen = {}
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = {"path": ["x"]}
                seen[task.id] = (task.arguments, attempt.context.arguments)
    assert seen["b"] == ({"path": ["x"], "where": "in eu"},) * 2


async def test_argument_that_finds_nothing() -> None:
    """A reference that finds nothing fails the task with a message that names it; the work never starts."""
    tasks = (Task(id="a"), Task(id="b", depends_on=("a",), arguments={"path": "${a.output.path}"}))
    async with open_run(plan(*tasks)) as run:
        ran = []
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                ran.append(task.id)
                attempt.output = {"file": 1}
    assert (run.result.status, ran) == ("failed", ["a"])
    assert "path" in run.result.reason


async def test_large_output_is_refused() -> None:
    """An output beyond the limit is an error that says so; it is never cut."""
    async with open_run(chain("a"), settings=Settings(max_output=100)) as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = "x" * 200
    failure = run.live.entry("a").failure
    assert failure is not None
    assert (failure.kind, failure.type) == ("output", "OutputError")
    assert "limit is 100" in failure.message


async def test_output_that_is_no_json() -> None:
    """An output that cannot be stored is handed on in this process and marked unrecoverable."""
    thing = object()
    async with open_run(chain("a", "b")) as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                if task.id == "a":
                    attempt.output = thing
                else:
                    assert attempt.context.results["a"] is thing
    assert run.result.status == "succeeded"
    assert not run.live.entry("a").recoverable


async def test_codec() -> None:
    """A codec turns outputs into JSON; its failure is the attempt's."""
    engine = ReplanningEngine([], codec=sorted)  # type: ignore[arg-type]

    async def work(task: Task, context: TaskContext) -> object:
        return {"b", "a"} if task.id == "ok" else 7j

    result = await engine.execute(plan(Task(id="ok"), Task(id="bad", optional=True)), work, replanning=False)
    assert result.outputs == {"ok": ["a", "b"]}
    assert result.status == "succeeded"


@pytest.mark.parametrize(
    "output", [math.nan, {"loss": math.inf}, b"bytes", {1}, object()], ids=["nan", "inf", "bytes", "set", "object"]
)
async def test_what_is_no_json_has_no_place_in_a_text(output: object) -> None:
    """A task whose text refers to an output that is no JSON fails and says so; what takes the output as it is gets it."""
    got: JsonObject = {}

    async def work(task: Task, context: TaskContext) -> object:
        got.update(task.arguments)
        return output if task.id == "a" else None

    whole = Task(id="b", depends_on=("a",), arguments={"x": "${a.output}"})
    text = Task(id="c", depends_on=("a",), arguments={"x": "it is ${a.output}"}, optional=True)
    result = await SequentialOrchestrator(work).run(plan(Task(id="a"), whole, text))
    assert got == {"x": output}
    assert result.status == "succeeded"

    failed = await SequentialOrchestrator(work).run(plan(Task(id="a"), text.model_copy(update={"optional": False})))
    assert "${a.output}: a value of type " in failed.reason
    assert "that is no JSON has no place in a text" in failed.reason


async def test_work_changes_nothing_that_others_get() -> None:
    """Work that sorts or extends what it was given changes no result, no context, no record and no plan."""
    given: JsonValue = [{"id": 3}, {"id": 1}]
    document = plan(
        Task(id="load"),
        Task(id="sort", depends_on=("load",), arguments={"rows": "${load.output}", "more": "${context.more}"}),
        Task(id="show", depends_on=("sort",), arguments={"rows": "${load.output}", "more": "${context.more}"}),
        context={"more": ["x"]},
    )
    seen: list[str] = []

    async def work(task: Task, context: TaskContext) -> JsonValue:
        if task.id == "load":
            return given
        rows, more = context.results["load"], context.context["more"]
        assert rows is context.results["load"]
        assert len(context.results) == len(dict(context.results))
        seen.append(repr((task.arguments, rows, more)))
        assert repr(context.context) == repr({"more": ["x"]})
        for each in (rows, more, task.arguments["rows"], task.arguments["more"]):
            assert isinstance(each, list)
            each.pop()
        return None

    store = MemoryStore()
    engine = ReplanningEngine(store=store)
    result = await engine.attach(SequentialOrchestrator(work)).run(document)
    (first, second), (loaded, *_) = seen, bodies(store, result.run, AttemptSucceeded)
    assert first == second == repr(({"rows": given, "more": ["x"]}, given, ["x"]))
    assert result.outputs["load"] == loaded.output == given
    assert document.context == {"more": ["x"]}


async def test_results_at_the_end_of_the_stack() -> None:
    """Work that is nested too deeply itself for a deep result to be copied is given it as it is."""
    deep: JsonValue = []
    for _ in range(300):
        deep = [deep]

    def nested(times: int, context: TaskContext) -> JsonValue:
        return nested(times - 1, context) if times else context.results["a"]

    async def work(task: Task, context: TaskContext) -> JsonValue:
        if task.id == "a":
            return deep
        return nested(sys.getrecursionlimit() - 500, context) == context.results["a"]

    result = await ReplanningEngine().execute(chain("a", "b"), work)
    assert (result.status, result.outputs["b"]) == ("succeeded", True)


async def test_secrets_never_enter() -> None:
    """Secrets in outputs, errors and context are masked before they reach plan, journal or dependents."""
    secret = "sk-proj1Abcdef2Ghijkl3Mnopqr4Stuvwx"
    store = MemoryStore()
    async with open_run(chain("a", "b"), store=store) as run:
        run.change_context({"note": f"use {secret}"})
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = {"log": f"key {secret}", "password": "hunter2222"}
                if task.id == "b":
                    raise ValueError(f"401 for Bearer {secret}")
    assert secret not in repr(list(store.read(run.id)))
    assert run.result.outputs == {"a": {"log": "key [redacted]", "password": "[redacted]"}}


async def test_priorities_and_resources() -> None:
    """Tasks are handed out by priority, and never beyond the capacity of a resource."""
    tasks = [Task(id=f"t{i}", priority=-i, resources={"gpu": 1}) for i in range(4)]
    order: list[str] = []
    most = now = 0
    async with VirtualClock() as clock:
        engine = ReplanningEngine([], environment=environment(clock))

        async def work(task: Task, context: TaskContext) -> None:
            nonlocal most, now
            order.append(task.id)
            now += 1
            most = max(most, now)
            await clock.sleep(1)
            now -= 1

        result = await engine.execute(plan(*tasks, resources={"gpu": 2}), work, max_concurrency=4, replanning=False)
    assert (result.status, most, order) == ("succeeded", 2, ["t3", "t2", "t1", "t0"])


async def test_edits() -> None:
    """A running plan can be edited by hand; every edit is a revision, and a wrong one changes nothing."""
    async with open_run(chain("a", "b", "c")) as run:
        run.add_task(Task(id="x"), before=["b"])
        run.remove_task("c")
        run.replace_task("b", Task(id="b1"), Task(id="b2", depends_on=("b1",)))
        run.modify_task("b2", goal="finish")
        run.cancel_task("a")
        with pytest.raises(ChangeRejected, match="already used"):
            run.add_task(Task(id="c"))
        assert run.live.revision == 5
    assert [task.id for task in run.plan.tasks if run.live.entry(task.id).state is not TaskState.CANCELLED] == [
        "b1",
        "b2",
        "x",
    ]
    assert run.plan.task("b2").goal == "finish"


async def test_cancelled_task_stops() -> None:
    """Cancelling a running task cancels its work, and the late report is not taken."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine([], environment=environment(clock))
        stopped = []
        async with engine.open(chain("a")) as run:

            async def worker() -> None:
                async for task in run.ready():
                    async with run.attempt(task):
                        try:
                            await clock.sleep(1000)
                        finally:
                            stopped.append(clock.elapsed)

            async with anyio.create_task_group() as group:
                group.start_soon(worker)
                await clock.sleep(5)
                run.cancel_task("a")
    assert stopped == [5]
    assert run.result.status == "failed"


async def test_replaced_before_it_is_attempted() -> None:
    """A task that was replaced between pull and attempt is not executed; its attempt is fenced."""
    ran = []
    async with open_run(chain("a")) as run:
        async for task in run.ready():
            if task.id == "a":
                run.replace_task("a", Task(id="b"))
            async with run.attempt(task):
                await anyio.lowlevel.checkpoint()
                ran.append(task.id)
    assert (run.result.status, ran) == ("succeeded", ["b"])


async def test_pause_and_resume() -> None:
    """A paused run finishes what runs, hands out nothing more, and goes on where it stood."""
    store = MemoryStore()
    engine = ReplanningEngine([], store=store)
    async with engine.open(chain("a", "b")) as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = 1
                run.pause("lunch", by="ada")
    assert (run.result.status, run.result.reason) == ("paused", "lunch")
    async with engine.resume(run.id) as again:
        ran = []
        async for task in again.ready():
            async with again.attempt(task) as attempt:
                attempt.output = 2
                ran.append(task.id)
    assert ran == ["b"]
    assert again.result.outputs == {"a": 1, "b": 2}


async def test_work_that_learns_something() -> None:
    """Work reports what it learns of context and facts, also where an orchestrator of ours has the run."""
    goal = {"objective": "x", "facts": ["shipped"]}
    first, second = Task(id="a"), Task(id="b", depends_on=("a",), arguments={"to": "${context.region}"})

    async def work(task: Task, context: TaskContext) -> JsonValue:
        if task.id == "a":
            context.change_context({"region": "south"}, removed=["north"])
            context.observe(holds=["shipped"])
        return [task.arguments, dict(context.context)]

    async with VirtualClock() as clock:
        engine = ReplanningEngine([], environment=environment(clock))
        result = await engine.execute(plan(first, second, goal=goal, context={"region": "north", "north": 1}), work)
    assert result.status == "succeeded"
    assert result.outputs["b"] == [{"to": "south"}, {"region": "south"}]


async def test_goal_reached_early() -> None:
    """With stop_when_reached a reached goal ends the run, and the rest counts as satisfied."""
    goal = {"objective": "x", "facts": ["done(it)"], "stop_when_reached": True}
    async with open_run(plan(Task(id="a"), Task(id="b"), goal=goal)) as run:
        ran = []
        async for task in run.ready():
            async with run.attempt(task):
                ran.append(task.id)
                run.observe(holds=["done(it)"])
    assert (run.result.status, run.result.reason, ran) == ("succeeded", "the goal was reached early", ["a"])


async def test_goal_reached_although_a_task_failed() -> None:
    """With stop_when_reached the goal alone counts: what failed on the way stays FAILED, and the run has succeeded."""
    goal = {"objective": "x", "facts": ["done(it)"], "stop_when_reached": True}
    async with open_run(plan(Task(id="a"), Task(id="b"), Task(id="c"), goal=goal)) as run:
        run.failed(run.started("a"), "broken")
        run.observe(holds=["done(it)"])
    assert (run.result.status, run.result.reason) == ("succeeded", "the goal was reached early")
    assert [str(run.view.task(name).state) for name in "abc"] == ["FAILED", "CANCELLED", "CANCELLED"]


async def test_goal_facts_missing() -> None:
    """A plan whose tasks are all done has not succeeded while a fact of its goal does not hold."""
    async with open_run(plan(Task(id="a"), goal={"objective": "x", "facts": ["done(it)"]})) as run:
        async for task in run.ready():
            async with run.attempt(task):
                pass
    assert run.result.status == "failed"
    assert "done(it)" in run.result.reason


async def test_reports_need_a_run() -> None:
    """Asking for a replan when nothing runs is a clear error."""
    async with open_run(chain("a")) as run:
        run.pause()
    with pytest.raises(NotRunning, match="nothing to replan"):
        run.request_replan("please")
    with pytest.raises(NotRunning, match="cannot be changed"):
        run.add_task(Task(id="z"))


async def test_disabled_is_identical() -> None:
    """With replanning off an engine leaves the same journal as a run without any engine."""
    engine = ReplanningEngine([Proposer(lambda request: [])])
    off = await engine.execute(chain("a", "b"), failing("b"), replanning=False)
    store = MemoryStore()
    async with open_run(chain("a", "b"), store=store) as run:
        work = failing("b")
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = await work(task, attempt.context)
    assert [r.body for r in engine.store.read(off.run)][1:] == [r.body for r in store.read(run.id)][1:]


async def test_truthful_repr() -> None:
    """A run says in one line who it is and how it stands."""
    async with open_run(chain("a"), run_id="mine") as run:
        assert repr(run) == "<PlanRun 'mine' running <LivePlan None revision=0 ready 1>>"
        run.pause()
    assert repr(run).startswith("<PlanRun 'mine' paused")
