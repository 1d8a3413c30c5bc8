# Ids are written as plain text here.
# mypy: disable-error-code="arg-type"
"""Breakers of tools: after failures of one cause in a row a tool is unavailable for a while, and then tried by one task."""

import re
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from replanning import Plan, ReplanningEngine, Task, TaskContext, TaskState, ToolSpec, tool
from replanning.engine.monitor import ToolBreakers
from replanning.environment import move_on_after
from replanning.history.reports import why_report
from replanning.journal import (
    AttemptStarted,
    Failure,
    ResourceChanged,
    ResourceUpdated,
    TriggerFired,
)
from replanning.testing import VirtualClock
from tests.support.invariants import invariant_violations, replay_differences
from tests.support.live import claimed, journaled, task
from tests.support.resume import cut
from tests.support.runs import bodies, environment, make_engine, perform, plan

FETCH, MIRROR = ToolSpec(name="fetch", capability="get"), ToolSpec(name="mirror", capability="get")


def pages(count: int, *tools: ToolSpec, **fields: object) -> Plan:
    """A plan of independent tasks that fetch pages."""
    return plan(
        *(Task(id=f"p{n}", tool="fetch", **fields) for n in range(1, count + 1)),
        tools=tools or (FETCH,),
    )


def site(
    clock: VirtualClock, up_at: float, seconds: float = 1.0
) -> Callable[[Task, TaskContext], Awaitable[str]]:
    """Work that takes its time, and fails with `fetch` before a second of the run."""

    async def work(task, context):
        began = clock.elapsed
        await clock.sleep(seconds)
        if task.tool == "fetch" and began < up_at:
            raise OSError(f"host {context.attempt_id[1]} is down")
        return task.id

    return work


def updates(engine: ReplanningEngine, run: str) -> list[tuple[bool | None, float | None, str]]:
    """The changes of availability on record."""
    return [(b.available, b.retry_at, b.reason) for b in bodies(engine.store, run, ResourceUpdated)]


async def test_tasks_that_never_ran(clock):
    """The reason of a failed run also says which tasks never ran, what they lack and until when."""
    result = await make_engine(clock=clock).execute(
        pages(9, FETCH, MIRROR), site(clock, 1e9), max_concurrency=1
    )
    assert result.reason.startswith("'p1' failed (host 1 is down); ")
    assert re.search(
        r"; 'p7' and 2 more cannot run, each because its tool 'fetch' kept failing, and is tried"
        r" again at \d\d:\d\d:\d\d UTC$",
        result.reason,
    )


async def test_one_failure_may_be_enough(clock):
    """Where one failure opens the breaker, the reason speaks of one task."""
    engine = make_engine("repair", clock=clock, breaker_threshold=1)
    result = await engine.execute(pages(2, FETCH, MIRROR), site(clock, 1e9), max_concurrency=1)
    (update,) = updates(engine, result.run)
    assert update[2].startswith("a task failed: OSError: host 1 is down; tried again after")


async def test_others_see_that_a_tool_is_down(clock):
    """After five failures of one cause the waiting tasks get another tool before they fail, in one revision."""
    engine = make_engine("repair", clock=clock, cooldown=30)
    result = await engine.execute(pages(9, FETCH, MIRROR), site(clock, 1e9), max_concurrency=1)
    started = [body.task for body in bodies(engine.store, result.run, AttemptStarted)]
    assert result.status == "succeeded"
    assert len([task for task in started if "~" not in task]) == 5
    (update,) = updates(engine, result.run)
    assert (
        update[0],
        update[2].startswith("5 tasks in a row failed for one cause, the last: OSError"),
    ) == (
        False,
        True,
    )
    fired = [body.trigger for body in bodies(engine.store, result.run, TriggerFired)]
    (changed,) = [trigger for trigger in fired if isinstance(trigger, ResourceChanged)]
    assert set(changed.tasks) == {"p6", "p7", "p8", "p9"}
    history = engine.history(result.run)
    (event,) = history.filter(trigger="resource-changed")
    assert "'fetch' is unavailable (5 tasks in a row failed for one cause" in why_report(
        history, event
    )
    assert invariant_violations(list(engine.store.read(result.run))) == []


CASES = [
    "alone",
    "few",
    "causes",
    "success",
    "one task",
    "none waits",
    "off",
    "undescribed",
    "observe",
    "no engine",
]


@pytest.mark.parametrize("case", CASES)
async def test_breaker_stays_closed(case, clock):
    """Failures without a stand-in, too few, of other causes or one task, or that harm no waiting task, change nothing."""

    async def work(task, context):
        number = int(task.id[1:])
        await clock.sleep(1)
        if number <= {"few": 4, "success": 8}.get(case, 7) and not (
            case == "success" and number == 4
        ):
            raise RuntimeError("ab"[number % 2] if case == "causes" else "down")

    retry = {"delay": 0, "on": ["RuntimeError"], "max_attempts": 7 if case == "one task" else 1}
    threshold = 0 if case == "off" else 5
    engine = make_engine(clock=clock, retry=retry, breaker_threshold=threshold)
    if case == "observe":
        engine = ReplanningEngine(
            [], mode="observe", settings={"retry": retry}, environment=environment(clock)
        )
    stand_ins = () if case == "alone" else (MIRROR,)
    document = pages(1 if case == "one task" else 9, FETCH, *stand_ins)
    if case == "undescribed":
        document = document.model_copy(update={"tools": ()})
    workers = 9 if case == "none waits" else 1
    result = await engine.execute(
        document, work, max_concurrency=workers, replanning=case != "no engine"
    )
    assert (result.status, updates(engine, result.run)) == ("failed", [])


@pytest.mark.parametrize("has_mirror", [False, True])
async def test_calls_of_an_agent(has_mirror, clock):
    """A tool whose calls fail in a row is refused only where another one takes over; otherwise each call is made."""
    executed: list[str] = []

    @tool(capability="get")
    async def fetch(url: str) -> str:
        """Fetch."""
        executed.append(url)
        if url != "good":
            raise ConnectionRefusedError("refused")
        return "page"

    @tool(capability="get" if has_mirror else "other")
    async def mirror(url: str) -> str:
        """Fetch elsewhere."""
        return "copy"

    engine = make_engine("repair", clock=clock)
    async with engine.session("serve users", tools=[fetch, mirror]) as session:
        for _ in range(6):
            with suppress(OSError):
                await session.call(fetch, "bad")
        answer = await session.call(fetch, "good")
    assert answer == ("copy" if has_mirror else "page")
    assert executed.count("good") == (not has_mirror)


CAUSES: dict[str, tuple[str, type[Exception], bool]] = {
    "record": ("record {n}", ValueError, False),
    "same record": ("record", ValueError, True),
    "host": ("https://site-{n}.example/page", ConnectionRefusedError, False),
    "same host": ("https://user@site.example:80/page-{n}", ConnectionRefusedError, True),
    "page of a host": ("https://site.example/page-{n}", LookupError, False),
    "service": ("query {n}", ConnectionRefusedError, True),
}


@pytest.mark.parametrize("cause", CAUSES)
async def test_what_failures_are_about(cause, clock):
    """Failures of one kind count together if they are about one host, or about the same arguments."""
    text, error, opens = CAUSES[cause]

    async def work(task, context):
        if task.tool == "fetch":
            raise error("failed")

    tasks = (
        Task(id=f"t{n}", tool="fetch", arguments={"n": text.format(n=n)}, retry={"delay": 0})
        for n in range(9)
    )
    thresholds = {"human_approval_threshold": 0.5}
    engine = make_engine("repair", clock=clock, alternatives=thresholds)
    document = plan(*tasks, tools=[FETCH, MIRROR])
    result = await engine.execute(document, work, max_concurrency=1)
    assert result.status == "succeeded"
    assert bool(updates(engine, result.run)) == opens


async def test_malformed_records(clock):
    """Records that a tool cannot read do not keep it from the other ones."""

    async def work(task, context):
        if int(task.arguments["n"]) < 13:
            raise ValueError(f"record {task.arguments['n']} is malformed")
        return "read"

    tasks = (Task(id=f"t{n}", tool="fetch", arguments={"n": n}) for n in range(100))
    result = await make_engine("repair", clock=clock).execute(plan(*tasks, tools=[FETCH]), work)
    assert len(result.outputs) == 87
    assert clock.elapsed < 1


async def test_trial_that_succeeds(clock):
    """A run waits for the cooldown of a tool that only it needs; one task tries it, and when it works the others follow."""
    engine, starts = make_engine(clock=clock, cooldown=30), []
    fetch = site(clock, 20)

    async def work(task, context):
        starts.append((clock.elapsed, task.id))
        return await fetch(task, context)

    result = await engine.execute(pages(10, FETCH, MIRROR), work, max_concurrency=3)
    assert [at for at, _ in starts] == [0.0] * 3 + [1.0] * 3 + [2.0, 32.0] + [33.0] * 2
    opened, tried, closed = updates(engine, result.run)
    again_at = engine.store.runs()[0].created + 32
    assert (opened[:2], opened[2].endswith("; tried again after 30 s")) == ((False, again_at), True)
    assert (tried, closed) == (
        (True, again_at, "one task tries it again"),
        (True, None, "it works again"),
    )


@pytest.mark.parametrize(
    ("other", "ends"), [(0, 36.0), (200, 200.0)], ids=["alone", "beside other work"]
)
async def test_trial_that_fails(other, ends, clock):
    """After a failed trial the tool is tried later, twice as late, while other work goes on; the run waits no more for it."""
    engine = make_engine(clock=clock, cooldown=30)
    fetch = site(clock, 1e9)

    async def work(task, context):
        if task.id == "other":
            await clock.sleep(other)
            return ""
        return await fetch(task, context)

    tasks = (Task(id="other"), *pages(9).tasks)
    result = await engine.execute(
        plan(*tasks, tools=(FETCH, MIRROR)), work, max_concurrency=2 if other else 1
    )
    began = engine.store.runs()[0].created
    opened = [
        (at or 0) - began for available, at, _ in updates(engine, result.run) if not available
    ]
    assert opened == [35.0, 96.0, 217.0][: 3 if other else 2]
    assert (result.status, clock.elapsed) == ("failed", ends)


async def test_late_success_and_person(clock):
    """A success of an attempt that was running closes the breaker at once; so does a person who says that the tool is back."""
    async with make_engine(clock=clock).open(pages(20, FETCH, MIRROR)) as run:
        ids = [f"p{n}#1" for n in range(1, 8)]
        for number in range(1, 8):
            run.started(f"p{number}")
        for attempt in ids[:6]:
            run.failed(attempt, OSError("down"))
        assert not run.live.tools["fetch"].available
        assert repr(ToolBreakers(run._lifecycle, 0)) == f"<ToolBreakers of {run.id!r} ['fetch']>"
        run.succeeded(ids[6])
        assert (run.live.tools["fetch"].available, run.live.scheduler.breakers) == (True, {})
        await clock.sleep(1)
        for number in range(8, 13):
            run.failed(run.started(f"p{number}"), OSError("down"))
        assert not run.live.tools["fetch"].available
        run.change_resource("fetch", available=True)
        assert (run.live.tools["fetch"].available, run.live.scheduler.breakers) == (True, {})


async def test_one_task_tries(clock):
    """While one task tries the tool no other gets it; a trial that says nothing about the tool lets the next one try."""
    async with make_engine(clock=clock, cooldown=0).open(pages(20, FETCH, MIRROR)) as run:
        for number in range(1, 6):
            run.failed(run.started(f"p{number}"), OSError("down"))
        await clock.sleep(1)
        first, second = aiter(run.ready()), aiter(run.ready())
        tried = await anext(first)
        async with move_on_after(5, clock) as waited:
            await anext(second)
        assert waited.cancelled_caught
        run.failed(run.started(tried.id), Failure("OutputError", "too large", kind="output"))
        tried = await anext(second)
        run.succeeded(run.started(tried.id))
        assert run.live.scheduler.breakers == {}
        assert (await anext(first)).id != (await anext(second)).id


def test_only_waiting_tasks_wait_for_a_tool():
    """A tool that its breaker has made unavailable is waited for while a waiting task needs it, and no longer."""
    run = journaled(task("a", tool="fetch"), task("b", tool="fetch"), tools=[FETCH])
    run.fail("a")
    run.fold(ResourceUpdated("fetch", available=False, retry_at=30.0))
    assert (claimed(run.live), run.live.quiescent) == ([], False)
    run.fold(ResourceUpdated("fetch", available=True, retry_at=30.0))
    assert (claimed(run.live), run.live.quiescent) == (["b"], False)
    run.fold(ResourceUpdated("fetch", available=False, retry_at=90.0))
    assert (claimed(run.live), run.live.quiescent) == ([], True)
    again = journaled(task("a", tool="fetch"), task("b", tool="fetch"), tools=[FETCH])
    again.fail("a", "b")
    again.fold(ResourceUpdated("fetch", available=False, retry_at=30.0))
    assert again.live.quiescent


@pytest.mark.parametrize("mode", ["act", "observe"])
async def test_breaker_survives_the_process(mode):
    """A run that is killed anywhere around an opening or a trial goes on with it; an engine that observes closes the breaker."""
    async with VirtualClock() as clock:
        engine = make_engine(clock=clock, cooldown=30)
        document = pages(8, FETCH, MIRROR, idempotent=True)
        result = await engine.execute(document, site(clock, 10), max_concurrency=1)
    records = list(engine.store.read(result.run))
    first = next(n for n, record in enumerate(records) if isinstance(record.body, ResourceUpdated))
    for seen in range(first, len(records) - 1):
        store = cut(records[:seen])
        async with VirtualClock(records[seen - 1].at + 5) as clock:
            engine = ReplanningEngine([], mode=mode, store=store, environment=environment(clock))
            async with engine.resume(result.run) as run:
                await perform(run, site(clock, -1))
            assert replay_differences(run, list(store.read(run.id)), clock.now()) == []
        assert [run.live.entry(f"p{n}").state for n in (1, 5, 6, 8)] == [TaskState.FAILED] * 2 + [
            TaskState.DONE
        ] * 2
        assert (run.live.tools["fetch"].available, run.live.scheduler.breakers) == (True, {})


async def test_calls_of_a_session_in_doubt(clock):
    """An agent that repeats what may have been done gets no other tool to do it again."""
    called = []

    @tool(capability="pay", idempotent=True)
    async def pay() -> None:
        called.append("pay")
        raise ConnectionResetError

    @tool(capability="pay")
    async def other() -> None:
        called.append("other")

    engine = make_engine("repair", clock=clock, retry={"max_attempts": 1})
    async with engine.session("pay", tools=[pay, other]) as session:
        for _ in range(8):
            with pytest.raises(ConnectionResetError):
                await session.call(pay)
    assert called == ["pay"] * 8


async def test_calls_of_a_session(clock):
    """An agent may make another call at any time: a tool that lies again and again is left out for a while."""
    called = []

    @tool(capability="get", effect="none", expect={"where": ["output == arguments.page"]})
    async def fetch(page: str) -> str:
        called.append("fetch")
        return "another page"

    @tool(capability="get", effect="none")
    async def mirror(page: str) -> str:
        called.append("mirror")
        return page

    async with make_engine("repair", clock=clock).session("read", tools=[fetch, mirror]) as session:
        for number in range(8):
            assert await session.call(fetch, f"p{number}") == f"p{number}"
    assert called == ["fetch", "mirror"] * 5 + ["mirror"] * 3
