"""Runs: pulling, reporting, observing, editing; with and without an engine."""

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import anyio
import pytest
from anyio.abc import TaskGroup
from pydantic import JsonValue

from replanning import (
    PlanRun,
    ReplanningEngine,
    Retry,
    Settings,
    Task,
    TaskState,
    ToolSpec,
    TransientError,
    open_run,
)
from replanning.changes import AddTask
from replanning.environment import Environment
from replanning.errors import (
    ChangeRejected,
    NotRunning,
    ReplanningError,
    RunFailed,
    UnknownAttempt,
    UnknownTask,
)
from replanning.history import text_report
from replanning.journal import (
    AttemptFenced,
    AttemptInterrupted,
    AttemptStarted,
    AttemptSucceeded,
    AttemptTimedOut,
    ConditionEvaluated,
    MemoryStore,
)
from replanning.plan import JsonObject
from replanning.run.retries import may_repeat
from replanning.testing import ScriptedExecutor, hangs, raises, returns
from replanning.testing.clock import EPOCH, VirtualClock
from tests.support.runs import (
    bodies,
    chain,
    failing,
    make_engine,
    perform,
    plan,
)


async def test_pull_and_report():
    """A loop of five lines runs a plan to its end and finds every output under its task."""
    async with open_run(chain("a", "b", "c")) as run:
        async for task in run.ready():
            async with run.attempt(task) as attempt:
                attempt.output = dict(attempt.context.results) | {task.id: 1}
    assert run.result.status == "succeeded"
    assert list(run.result.outputs["c"]) == ["a", "b", "c"]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
async def test_garbage_collector(enabled, frozen):
    """Opening a large run leaves the garbage collector as it was, and what the program has frozen stays frozen."""
    was_enabled = gc.isenabled()
    large = plan(*(Task(id=f"t{number}") for number in range(5_000)))
    try:
        if frozen:
            gc.freeze()
        gc.enable()
        if not enabled:
            gc.disable()
        async with open_run(large) as run:
            run.pause()
            assert gc.isenabled() is enabled
            assert bool(gc.get_freeze_count()) is frozen
    finally:
        gc.unfreeze()
        gc.disable()
        if was_enabled:
            gc.enable()


async def test_no_tasks_and_no_outputs():
    """A plan of no tasks succeeds at once, and a result of None is a success like any other."""
    for document, outputs in ((plan(), {}), (chain("a", "b"), {"a": None, "b": None})):
        async with open_run(document) as run:
            assert await perform(run) == list(outputs)
        assert (run.result.status, run.result.outputs) == ("succeeded", outputs)


async def test_reports_from_elsewhere():
    """Started, succeeded and failed can be called from anywhere, and the run ends when all is reported."""
    async with open_run(chain("a", "b")) as run:
        run.succeeded(run.started("a"), {"x": [1, 2]})
        attempt = run.started("b")
        run.failed(attempt, "exit status 1")
        result = await run.wait()
    assert (result.status, result.outputs) == ("failed", {"a": {"x": [1, 2]}})
    assert "exit status 1" in result.reason


async def test_timeout_of_a_reported_attempt(clock):
    """If attempts are only reported, the run ends after a timeout, even if a ready task lacks its tool."""
    gone = ToolSpec(name="gone", available=False)
    document = plan(Task(id="a", timeout=10), Task(id="b", tool="gone"), tools=(gone,))
    async with make_engine(clock=clock, enabled=False).open(document) as run:
        run.started("a")
        with anyio.fail_after(30):
            result = await run.wait()
    assert result.status == "failed"


@pytest.mark.parametrize("enabled", [True, False])
async def test_ready_task_without_its_tool_after_a_reported_failure(enabled):
    """A caller that waits gets the result if all that may still start after a failure lacks its tool."""
    gone = ToolSpec(name="gone", available=False)
    last = Task(id="b", tool="gone", depends_on=("a",), run_if="always")
    document = plan(Task(id="a"), last, tools=(gone,))
    async with make_engine(enabled=enabled).open(document) as run:
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                group.start_soon(run.wait)
                await anyio.wait_all_tasks_blocked()
                run.failed(run.started("a"), "exit status 1")
    assert run.result.status == "failed"
    assert "'b' cannot run: its tool 'gone' is unavailable" in run.result.reason


async def test_reason_of_elements_without_their_tool():
    """The reason of a failed run names the element of a list that has lost its tool, and the tool."""
    elements = Task(id="each", tool="fetch", for_each=[1, 2])
    async with make_engine(enabled=False).open(
        plan(elements, tools=(ToolSpec(name="fetch"),))
    ) as run:
        async for task in run.ready():
            async with run.attempt(task):
                run.change_resource("fetch", available=False)
    assert "'each[1]' cannot run: its tool 'fetch' is unavailable" in run.result.reason


async def test_result_before_the_end():
    """The result of a run that goes on is refused with a sentence, not with nonsense."""
    async with open_run(chain("a")) as run:
        with pytest.raises(NotRunning, match="not ended yet"):
            run.result  # noqa: B018
        run.pause()


async def test_result_as_an_exception():
    """A result says whether the run succeeded and why each task did not, and raises that where it is asked to."""
    engine = make_engine()
    good = await engine.execute(chain("a"), failing())
    assert (good.ok, good.failures, good.raise_for_status()) == (True, {}, good)
    bad = await engine.execute(
        plan(Task(id="a"), Task(id="b"), Task(id="c", depends_on=["b"])), failing("a", "b")
    )
    assert not bad.ok
    assert {task: failure.message for task, failure in bad.failures.items()} == {
        "a": "a is broken",
        "b": "b is broken",
    }
    with pytest.raises(RunFailed, match=r"is failed: 'a' failed \(a is broken\)") as caught:
        bad.raise_for_status()
    assert isinstance(caught.value, ReplanningError)
    assert (caught.value.status, caught.value.reason, caught.value.failures) == (
        "failed",
        bad.reason,
        bad.failures,
    )


@pytest.mark.parametrize(("broken", "status"), [((), "succeeded"), (("b",), "failed")])
async def test_paused_after_the_last_task(broken, status):
    """A run that is to pause while its last task runs is over with it, as there is nothing left to resume."""
    async with open_run(chain("a", "b")) as run:

        async def work(task, context):
            if task.id == "b":
                run.pause("lunch")
            return await failing(*broken)(task, context)

        assert await perform(run, work) == ["a", "b"]
    assert run.result.status == status


async def test_pause_with_a_limit():
    """A pause cuts off what still runs after its limit: the run is paused and names it, and the call is in doubt."""
    store = MemoryStore()

    async def work(task, context):
        run.pause("deploying", within=timedelta(seconds=3))
        await anyio.sleep_forever()

    async with VirtualClock() as clock:
        engine = make_engine(clock=clock, store=store)
        async with engine.open(chain("a", "b")) as run:
            assert await perform(run, work) == ["a"]
        assert clock.elapsed == 3
    assert (run.result.status, run.result.reason) == (
        "paused",
        "deploying, and 'a' was cut off after 3 s",
    )
    (cut_off,) = bodies(store, run.id, AttemptInterrupted)
    assert (cut_off.task, cut_off.failure.in_doubt) == ("a", True)


async def test_started_twice():
    """A task that runs already cannot be started again, one that does not exist neither."""
    async with open_run(chain("a", "b")) as run:
        run.started("a")
        with pytest.raises(NotRunning, match="'a' can start: the task is RUNNING"):
            run.started("a")
        with pytest.raises(NotRunning, match="'b' can start: the task is PENDING"):
            run.started("b")
        with pytest.raises(UnknownTask, match="'z'"):
            run.started("z")


@pytest.mark.parametrize(
    ("taken", "lack"),
    [
        (
            lambda run: run.change_resource("cpu", capacity=1),
            "its resources are no longer available",
        ),
        (lambda run: run.change_resource("pip", available=False), "its tool 'pip' is unavailable"),
        (lambda run: run.observe(ceased=["online(pc)"]), "its facts do not hold"),
    ],
)
async def test_what_a_pulled_task_needs_has_gone(taken, lack):
    """A task whose resources, tool or facts have gone since it was pulled does not start, and waits until they are back."""
    tools = [{"name": "pip", "requires": ["online(pc)"], "resources": {"cpu": 2}}]
    document = plan(
        Task(id="a", tool="pip"), tools=tools, resources={"cpu": 2}, facts=["online(pc)"]
    )
    store = MemoryStore()
    async with open_run(document, store=store) as run:
        ready = run.ready()
        task = await anext(ready)
        taken(run)
        with pytest.raises(NotRunning, match=f"no attempt at task 'a' can start: {lack}"):
            run.started("a")
        async with run.attempt(task) as attempt:
            await anyio.sleep_forever()
        assert (attempt.cancelled, run.live.entry(task.id).state) == (True, "READY")
        run.change_resource("cpu", capacity=2)
        run.change_resource("pip", available=True)
        run.observe(holds=["online(pc)"])
        assert await anext(ready) == task
        async with run.attempt(task):
            pass
    assert run.result.ok
    assert [body.report for body in bodies(store, run.id, AttemptFenced)] == [
        f"not started: {lack}"
    ]


async def test_end_while_a_ready_task_lacks_its_tool():
    """A run of which others only report ends with the last task that can run."""
    tasks = [
        Task(id=name, tool=tool, optional=True)
        for name, tool in (("a", None), ("b", None), ("c", "pip"))
    ]
    async with open_run(plan(*tasks, tools=[{"name": "pip", "available": False}])) as run:
        run.succeeded(run.started("a"))
        assert not run.ended
        run.failed(run.started("b"), "broken")
        assert run.result.ok


async def test_resources_of_a_task_that_was_not_pulled():
    """A report that a task starts is refused while others use the resources that it needs."""
    tasks = [Task(id=name, resources={"cpu": 1}) for name in ("a", "b")]
    async with open_run(plan(*tasks, resources={"cpu": 1})) as run:
        attempt = run.started("a")
        with pytest.raises(NotRunning, match="its resources are no longer available"):
            run.started("b")
        run.succeeded(attempt)
        run.succeeded(run.started("b"))
    assert run.result.ok


async def test_late_report_is_fenced():
    """A second report for an attempt is recorded and changes nothing; one for an unknown attempt is refused."""
    store = MemoryStore()
    async with open_run(chain("a", "b"), store=store) as run:
        attempt = run.started("a")
        run.succeeded(attempt, 1)
        run.succeeded(attempt, 2)
        run.failed(attempt, "late")
        assert run.live.results.output_of("a") == 1
        with pytest.raises(UnknownAttempt):
            run.succeeded("nobody#1")  # type: ignore[arg-type]
    fenced = [AttemptFenced(attempt, "a", "succeeded"), AttemptFenced(attempt, "a", "failed")]
    assert bodies(store, run.id, AttemptFenced) == fenced


async def test_not_attempted_goes_back():
    """A task that a loop does not attempt is handed out again when that loop was left, but not before."""
    async with open_run(plan(Task(id="a"), Task(id="b"))) as run:
        seen = []
        async for task in run.ready():
            seen.append(task.id)
            if len(seen) == 2:
                break
        assert (seen, await perform(run), run.result.status) == (
            ["a", "b"],
            ["a", "b"],
            "succeeded",
        )


@pytest.mark.parametrize("loops", [1, 3])
@pytest.mark.parametrize("waits", [0, 5])
async def test_tasks_that_are_started_later(loops, waits):
    """The body of a loop may start a task for the work: it is handed out once, and again for each further attempt."""
    store, seen, document = (
        MemoryStore(),
        [],
        plan(
            Task(id="a", resources={"gpu": 1}),
            Task(id="b", resources={"gpu": 1}),
            Task(id="c", depends_on=("a",), retry=Retry(delay=0.0, jitter=False)),
            Task(id="d", depends_on=("c",)),
            resources={"gpu": 1},
        ),
    )

    async def work(run: PlanRun, task: Task) -> None:
        seen.append(task.id)
        for _ in range(waits):
            await anyio.lowlevel.checkpoint()
        async with run.attempt(task) as attempt:
            await anyio.lowlevel.checkpoint()
            if task.id == "c" and attempt.id == "c#1":
                raise TransientError("not yet")

    async with open_run(document, store=store) as run, anyio.create_task_group() as group:

        async def pull() -> None:
            async for task in run.ready():
                group.start_soon(work, run, task)

        for _ in range(loops):
            group.start_soon(pull)
    assert run.result.status == "succeeded"
    assert sorted(body.task for body in bodies(store, run.id, AttemptStarted)) == [
        "a",
        "b",
        "c",
        "c",
        "d",
    ]
    # Several loops may each hand out what has not started for a while; the first one to start it executes it.
    assert 5 <= len(seen) <= (5 * loops if waits else 5)
    assert len(bodies(store, run.id, AttemptFenced)) <= len(seen) - 5


async def test_what_is_handed_out_again():
    """A task that was passed over is handed out again after an edit, and one that may not start once it may."""
    async with open_run(plan(Task(id="a", tool="t"), tools=[{"name": "t"}])) as run:
        ready = run.ready()
        await anext(ready)
        run.modify_task("a", priority=1)
        task = await anext(ready)
        run.change_resource("t", available=False)
        with pytest.raises(NotRunning):
            run.started(task.id)
        run.change_resource("t", available=True)
        task = await anext(ready)
        run.change_resource("t", available=False)
        async with run.attempt(task):
            await anyio.lowlevel.checkpoint()
        run.change_resource("t", available=True)
        async with run.attempt(await anext(ready)):
            pass
        assert await anext(ready, None) is None
    assert run.result.status == "succeeded"


@pytest.mark.parametrize("loops", [1, 2])
async def test_loop_that_starts_nothing(loops, clock):
    """A loop that executes tasks without an attempt is told once, after a while, what it has pulled and what to write."""
    engine = make_engine(clock=clock)
    async with engine.open(plan(Task(id="a"), Task(id="b"))) as run:

        async def pull() -> None:
            async for _ in run.ready():
                await clock.sleep(1)

        async with anyio.create_task_group() as group:
            for _ in range(loops):
                group.start_soon(pull)
            await clock.sleep(40)
            run.pause("enough")
    (problem,) = run.result.problems
    assert problem.where == "a loop over run.ready()"
    assert problem.error.startswith("it has pulled 'a', 'b' and started none of them for 10 s")
    assert "async with run.attempt(task) as attempt:" in problem.error


async def test_loop_that_starts_later(clock):
    """Nothing is told of a loop that leaves tasks to others, as long as some of them are executed."""
    engine = make_engine(clock=clock)

    async def work(run, task):
        await clock.sleep(5)
        async with run.attempt(task):
            await clock.sleep(30)

    async with (
        engine.open(plan(Task(id="a"), Task(id="b"))) as run,
        anyio.create_task_group() as group,
    ):
        async for task in run.ready():
            group.start_soon(work, run, task)
    assert run.result.status == "succeeded"
    assert not run.result.problems


async def test_worker_that_leaves():
    """A task pulled by a worker that went away is taken by another one that waits."""
    async with open_run(chain("a")) as run, anyio.create_task_group() as group:

        async def leaves() -> None:
            async for _ in run.ready():
                return

        group.start_soon(leaves)
        group.start_soon(perform, run)
    assert run.result.status == "succeeded"


@asynccontextmanager
async def two_waiters(run: PlanRun, turns: int) -> AsyncIterator[TaskGroup]:
    """Have two wait for a task; the first is cancelled some turns after the body, so the second must get it."""
    first = anyio.CancelScope()
    pulled: list[Task] = []

    async def cancelled() -> None:
        with first:
            await anext(run.ready())

    async def waiting() -> None:
        pulled.append(await anext(run.ready()))

    async with anyio.create_task_group() as group:
        for waiter in (cancelled, waiting):
            group.start_soon(waiter)
            await anyio.wait_all_tasks_blocked()
        yield group
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        first.cancel()
        await anyio.wait_all_tasks_blocked()
        assert len(pulled) == 1
        group.cancel_scope.cancel()


@pytest.mark.parametrize("turns", [0, 1])
@pytest.mark.parametrize("earlier", [0, 253, 254, 255])
async def test_woken_waiter_is_cancelled(earlier, turns):
    """A waiter that is cancelled when it was woken leaves the task to the next one, however many ran before."""
    others = [Task(id=f"t{number}") for number in range(earlier)]
    async with open_run(plan(Task(id="a"), Task(id="b", depends_on=["a"]), *others)) as run:
        attempt = run.started("a")
        ready = run.ready()
        for _ in others:
            async with run.attempt(await anext(ready)):
                pass
        async with two_waiters(run, turns):
            run.succeeded(attempt)


async def test_waiter_is_cancelled_as_it_takes_over():
    """A waiter that is cancelled as it takes over a task that a worker has left lets the next one take it."""
    async with open_run(chain("a")) as run:
        leaving = run.ready()
        await anext(leaving)
        async with two_waiters(run, 2) as group:
            group.start_soon(anext, leaving, None)


async def test_transient_error_is_retried(clock):
    """An error that may pass is tried again with growing delays, without an engine too; any other one is not."""
    work = ScriptedExecutor(
        {"a": [raises(TransientError("busy"))] * 2 + [returns("done")], "b": raises(ValueError())}
    )
    engine = make_engine(clock=clock, retry={"max_attempts": 3, "delay": 1, "jitter": False})
    result = await engine.execute(chain("a", "b"), work, replanning=False)
    started = [
        record
        for record in engine.store.read(result.run)
        if isinstance(record.body, AttemptStarted)
    ]
    assert [round(record.at - EPOCH) for record in started] == [0, 1, 3, 3]
    assert (result.status, result.outputs) == ("failed", {"a": "done"})


@pytest.mark.parametrize(
    ("error", "kind", "transient", "message"),
    [
        (
            ExceptionGroup("both", [ValueError("one"), TransientError("two")]),
            "error",
            False,
            "ValueError: one",
        ),
        (TimeoutError("the service did not answer"), "error", False, "the service did not answer"),
        (ConnectionError("refused" * 10_000), "error", True, "characters left out ..."),
    ],
    ids=["group", "timeout", "long"],
)
async def test_errors_of_work(error, kind, transient, message):
    """A group is one failure, transient only if all parts are; a TimeoutError is an ordinary one; long messages are cut."""
    async with open_run(plan(Task(id="a", retry=Retry(max_attempts=1)))) as run:
        await perform(run, ScriptedExecutor({"a": raises(error)}))
    failure = run.live.entry("a").log.failure
    assert failure is not None
    assert (failure.type, failure.kind, failure.transient) == (
        type(error).__name__,
        kind,
        transient,
    )
    assert message in failure.message


async def test_timeout_cancels_the_work(clock):
    """An attempt that runs into its deadline is cancelled, recorded, and not repeated unless idempotent."""
    engine = make_engine(clock=clock)
    once, thrice = Task(id="once", timeout=10), Task(id="thrice", timeout=10, idempotent=True)
    result = await engine.execute(
        plan(once, thrice), ScriptedExecutor(default=hangs()), replanning=False
    )
    timeouts = [body.task for body in bodies(engine.store, result.run, AttemptTimedOut)]
    assert (result.status, sorted(timeouts)) == ("failed", ["once", "thrice", "thrice", "thrice"])
    assert 30 < clock.elapsed < 40


async def test_timeouts_reach_the_failure_threshold(clock):
    """A task that always times out is tried as often as the retries of so many failures allow, and then fails."""
    engine = make_engine(clock=clock, failure_threshold=2, retry={"max_attempts": 2})
    late = Task(id="late", timeout=10, idempotent=True)
    result = await engine.execute(plan(late), ScriptedExecutor(default=hangs()))
    timeouts = bodies(engine.store, result.run, AttemptTimedOut)
    assert (result.status, len(timeouts)) == ("failed", 4)
    assert [body.exhausted for body in timeouts] == [False, True, False, False]


async def test_cancellation_is_an_interruption():
    """A cancelled worker leaves its attempt interrupted, and the cancellation goes on."""
    store = MemoryStore()
    async with open_run(chain("a"), store=store) as run:
        with anyio.CancelScope() as scope:
            async for task in run.ready():
                async with run.attempt(task):
                    scope.cancel()
                    await anyio.sleep_forever()
        assert scope.cancelled_caught
    assert len(bodies(store, run.id, AttemptInterrupted)) == 1


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
async def test_exits_go_through(kind):
    """KeyboardInterrupt and SystemExit are recorded as interruptions and never swallowed."""
    store = MemoryStore()
    with pytest.raises(kind):
        async with open_run(chain("a"), store=store) as run:
            await perform(run, ScriptedExecutor(default=raises(kind)))
    assert run.result.status == "paused"
    assert len(bodies(store, run.id, AttemptInterrupted)) == 1


async def test_condition_skips():
    """A task whose condition does not hold is skipped, recorded, and satisfies what runs always."""
    store = MemoryStore()
    tasks = (
        Task(id="a", when="context.go"),
        Task(id="b", depends_on=("a",), run_if="always", when="results.a == None"),
        Task(id="c", depends_on=("b",)),
    )
    async with open_run(plan(*tasks, context={"go": False}), store=store) as run:
        assert await perform(run) == ["b", "c"]
    assert run.result.status == "succeeded"
    evaluated = [(body.task, body.value) for body in bodies(store, run.id, ConditionEvaluated)]
    assert evaluated == [("a", False), ("b", True)]


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({"when": "context.nothing"}, "nothing"),
        ({"arguments": {"path": "${a.output.path}"}}, "path"),
    ],
    ids=["condition", "argument"],
)
async def test_what_finds_nothing(fields, missing):
    """A condition or reference that finds nothing fails its task with a reason that names it; work never starts."""
    task = Task.model_validate({"id": "b", "depends_on": ["a"], **fields})
    work = ScriptedExecutor(default=returns({"file": 1}))
    async with open_run(plan(Task(id="a"), task)) as run:
        assert await perform(run, work) == ["a"]
    assert run.result.status == "failed"
    assert missing in run.result.reason


async def test_arguments_are_resolved():
    """References in arguments become the values of results and context when a task is handed out."""
    arguments: JsonObject = {"path": "${a.output.path}", "where": "in ${context.region}"}
    document = plan(
        Task(id="a"), Task(id="b", depends_on=("a",), arguments=arguments), context={"region": "eu"}
    )
    work = ScriptedExecutor(default=returns({"path": ["x"]}))
    async with open_run(document) as run:
        await perform(run, work)
    (call,) = work.calls_of("b")
    assert call.task.arguments == call.context.arguments == {"path": ["x"], "where": "in eu"}


def test_ids_of_runs_of_one_second():
    """Runs that are begun in the same second get different ids, also when there are thousands of them."""
    new_id = Environment().new_id
    assert len({new_id() for _ in range(20_000)}) == 20_000


async def test_large_output_is_refused():
    """An output beyond the limit is an error that says so; it is never cut, and its work may have taken effect."""
    async with open_run(chain("a"), settings=Settings(max_output=100)) as run:
        run.succeeded(run.started("a"), "x" * 200)
    failure = run.live.entry("a").log.failure
    assert failure is not None
    assert (failure.kind, failure.type, failure.in_doubt) == ("output", "OutputError", True)
    assert not may_repeat(Task(id="a", idempotent=True), None, failure)
    assert "max_output allows 100" in failure.message


async def test_codec():
    """A codec turns outputs into JSON; its failure is the attempt's."""
    work = ScriptedExecutor({"ok": returns({"b", "a"}), "bad": returns(7j)})
    tasks = (Task(id="ok"), Task(id="bad", optional=True))
    result = await ReplanningEngine([], codec=sorted).execute(plan(*tasks), work, replanning=False)  # type: ignore[arg-type]
    assert (result.status, result.outputs) == ("succeeded", {"ok": ["a", "b"]})


async def test_work_changes_nothing_that_others_get():
    """Work that sorts or extends what it was given changes no result, no context, no record and no plan."""
    given: JsonValue = [{"id": 3}, {"id": 1}]
    arguments: JsonObject = {"rows": "${load.output}", "more": "${context.more}"}
    document = plan(
        Task(id="load"),
        Task(id="sort", depends_on=("load",), arguments=arguments),
        Task(id="show", depends_on=("sort",), arguments=arguments),
        context={"more": ["x"]},
    )
    seen: list[str] = []

    async def work(task, context):
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

    engine = ReplanningEngine()
    result = await engine.execute(document, work)
    loaded = bodies(engine.store, result.run, AttemptSucceeded)[0]
    assert seen == [repr(({"rows": given, "more": ["x"]}, given, ["x"]))] * 2
    assert result.outputs["load"] == loaded.output == given
    assert document.context == {"more": ["x"]}


async def test_work_fills_empty_arguments():
    """Arguments that work adds to a task without any reach no other attempt, element or run."""
    document = plan(
        Task(id="a", retry=Retry(max_attempts=2, delay=0.0)),
        Task(id="each", for_each=[1, 2]),
    )
    seen: list[JsonObject] = []

    async def work(task, context):
        seen.append(dict(task.arguments))
        task.arguments["user"] = len(seen)
        if len(seen) == 1:
            raise ValueError("again")

    engine = ReplanningEngine()
    for _ in range(2):
        assert (await engine.execute(document, work)).status == "succeeded"
    assert seen == [{}] * 7
    assert not any(task.arguments for task in document.tasks)


async def test_edits():
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
    left = [
        task.id
        for task in run.plan.tasks
        if run.live.entry(task.id).state is not TaskState.CANCELLED
    ]
    assert (left, run.plan.task("b2").goal) == (["b1", "b2", "x"], "finish")


async def test_cancelled_task_stops(clock):
    """Cancelling a running task cancels its work, and the late report is not taken."""
    stopped = []

    async def work(task, context):
        try:
            await anyio.sleep_forever()
        finally:
            stopped.append(clock.elapsed)

    async with make_engine(clock=clock).open(chain("a")) as run, anyio.create_task_group() as group:
        group.start_soon(perform, run, work)
        await clock.sleep(5)
        run.cancel_task("a")
    assert (run.result.status, stopped) == ("failed", [5])


async def test_replaced_before_it_is_attempted():
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


async def test_work_that_learns_something(clock):
    """Work reports what it learns of context and facts, also where an orchestrator of ours has the run."""
    goal = {"objective": "x", "facts": ["shipped"]}
    first, second = (
        Task(id="a"),
        Task(id="b", depends_on=("a",), arguments={"to": "${context.region}"}),
    )

    async def work(task, context):
        if task.id == "a":
            context.change_context({"region": "south"}, removed=["north"])
            context.observe(holds=["shipped"])
        return [task.arguments, dict(context.context)]

    document = plan(first, second, goal=goal, context={"region": "north", "north": 1})
    result = await make_engine(clock=clock).execute(document, work)
    assert (result.status, result.outputs["b"]) == (
        "succeeded",
        [{"to": "south"}, {"region": "south"}],
    )


async def test_goal_reached_early():
    """With stop_when_reached a reached goal ends the run; the rest is cancelled, and what failed stays FAILED."""
    goal = {"objective": "x", "facts": ["done(it)"], "stop_when_reached": True}
    async with open_run(plan(Task(id="a"), Task(id="b"), Task(id="c"), goal=goal)) as run:
        run.failed(run.started("a"), "broken")
        run.observe(holds=["done(it)"])
        assert await perform(run) == []
    assert (run.result.status, run.result.reason) == ("succeeded", "the goal was reached early")
    assert [str(run.view.task(name).state) for name in "abc"] == [
        "FAILED",
        "CANCELLED",
        "CANCELLED",
    ]


async def test_goal_facts_missing():
    """A plan whose tasks are all done has not succeeded while a fact of its goal does not hold."""
    async with open_run(plan(Task(id="a"), goal={"objective": "x", "facts": ["done(it)"]})) as run:
        await perform(run)
    assert run.result.status == "failed"
    assert "done(it)" in run.result.reason


async def test_reports_need_a_run():
    """Asking for a replan when nothing runs is a clear error."""
    async with open_run(chain("a")) as run:
        run.pause()
    with pytest.raises(NotRunning, match="nothing to replan"):
        run.request_replan("please")
    with pytest.raises(NotRunning, match="cannot be changed"):
        run.add_task(Task(id="z"))


async def test_disabled_is_identical():
    """With replanning off an engine leaves the same journal as a run without any engine."""
    engine = make_engine(lambda request: [])
    off = await engine.execute(chain("a", "b"), failing("b"), replanning=False)
    store = MemoryStore()
    async with open_run(chain("a", "b"), store=store) as run:
        await perform(run, failing("b"))
    assert [r.body for r in engine.store.read(off.run)][1:] == [r.body for r in store.read(run.id)][
        1:
    ]


async def test_truthful_repr():
    """A run says in one line who it is and how it stands."""
    async with open_run(chain("a"), run_id="mine") as run:
        assert repr(run) == "<PlanRun 'mine' running <LivePlan None revision=0 ready 1>>"
        run.pause()
    assert repr(run).startswith("<PlanRun 'mine' paused")


@pytest.mark.parametrize(
    ("stated", "failures"),
    [({}, ["with the arguments filled in, it uses 'rm'"]), ({"dangerous": True}, [])],
)
async def test_outputs_that_make_a_command_dangerous(stated, failures):
    """A command that an output of another task makes dangerous is not run, unless the tool states whether it is."""
    start = {"name": "start", "kind": "shell", "command": "timeout 5 {x}", **stated}
    tasks = (
        Task(id="a"),
        Task(id="b", tool="start", arguments={"x": "${a.output}"}, depends_on=("a",)),
    )
    async with open_run(plan(*tasks, tools=[start])) as run:
        await perform(run, ScriptedExecutor(default=returns("rm")))
    assert [
        failure.message.partition(";")[0] for failure in run.result.failures.values()
    ] == failures


async def test_work_may_ask_about_risks_itself():
    """A program whose work asks people about risks gets such a command; metadata of a task do not ask for it."""
    start = {"name": "start", "kind": "shell", "command": "timeout 5 {x}"}
    noted = Task(
        id="a",
        tool="start",
        arguments={"x": "${context.x}"},
        metadata={"planning": {"by": "action_sequence", "tool": "start"}},
    )
    statuses = []
    for asks in (False, True):
        risky = plan(noted, tools=[start], context={"x": "rm"})
        async with open_run(risky) as run:
            if asks:
                run.leave_risks_to_work()
            await perform(run, ScriptedExecutor(default=returns(1)))
        statuses.append(run.result.status)
    assert statuses == ["failed", "succeeded"]


async def test_edits_in_the_name_of_a_program():
    """A program that changes its own plan is named as the author; a change without a name is made by hand."""
    async with open_run(chain("a")) as run:
        run.apply([AddTask(task=Task(id="b"))], by="planner")
        run.add_task(Task(id="c"))
        await perform(run, ScriptedExecutor())
        report = text_report(run.history)
    assert "revision 0 → 1 · by planner" in report
    assert "revision 1 → 2 · by hand" in report


async def test_a_taken_over_task_stays_with_the_taker():
    """An iterator that is dropped gives back none of the tasks that another one has taken over from it."""
    async with open_run(plan(Task(id="a"), Task(id="b"))) as run:
        first, second = run.ready(), run.ready()
        assert [(await anext(first)).id, (await anext(first)).id] == ["a", "b"]
        taken = await anext(second)
        del first
        again = await anext(run.ready())
        assert (taken.id, again.id) == ("a", "b")
        run.pause()


async def test_author_of_an_edit():
    """Every edit takes its reason and its author, which the history of the run tells."""
    tasks = [Task(id=name) for name in ("a", "b", "c", "d")]
    async with open_run(plan(*tasks)) as run:
        said = {"reason": "tidy up", "by": "eve"}
        run.add_task(Task(id="e"), **said)
        run.remove_task("a", **said)
        run.replace_task("b", Task(id="f"), **said)
        run.modify_task("c", goal="to see", **said)
        run.reorder_tasks("d", "c", **said)
        run.cancel_task("d", **said)
        assert [(edit.reason, edit.by) for edit in run.history.edits] == 6 * [("tidy up", "eve")]
        run.pause()
