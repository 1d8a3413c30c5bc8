"""Calls that wait: for resources, for other tasks, for people, for the store; each of them ends."""

from collections.abc import Mapping
from itertools import pairwise

import anyio
import pytest

from replanning import Task, ToolSpec
from replanning.changes import ReplaceTask, RetryTask
from replanning.errors import CallFailed, CallSkipped, NeedsHuman, NotRunning
from replanning.journal import AttemptStarted, Usage
from replanning.testing import ScriptedGate, raises
from tests.support.questions import asking
from tests.support.runs import alternative, make_engine, plan


async def work(task, context):
    """Fail where the task says so."""
    if task.metadata.get("fails"):
        raise OSError(f"{task.id} is broken")
    return task.id


async def test_limited_resource(clock):
    """Calls of a tool that only one may use at a time follow one another."""
    done: list[object] = []

    async def execute(name: str, arguments: Mapping[str, object]) -> object:
        await clock.sleep(5)
        return arguments["n"]

    tools = [ToolSpec(name="browse", resources={"browser": 1})]
    stated = plan(resources={"browser": 1}, tools=tools)
    async with make_engine(clock=clock).session(stated) as session:

        async def caller(n: int) -> None:
            done.append(await session.invoke("browse", {"n": n}, execute=execute))

        async with anyio.create_task_group() as group:
            for n in range(4):
                group.start_soon(caller, n)
    assert sorted(map(str, done)) == ["0", "1", "2", "3"]
    assert clock.elapsed == 20
    assert session.run.result.ok


async def test_task_that_waits_for_a_failed_one(clock):
    """A task of a session that waits for one which is given up, now or later, ends with the failure of that one."""
    tasks = (
        Task(id="a", metadata={"fails": True}),
        Task(id="b", depends_on=("a",)),
        Task(id="c", depends_on=("b",)),
    )
    async with make_engine(clock=clock).session(plan(*tasks)) as session:

        async def waiting() -> None:
            with pytest.raises(CallFailed, match=r"'a' failed .*a is broken"):
                await session.run.perform("c", work)

        async with anyio.create_task_group() as group:
            group.start_soon(waiting)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(OSError, match="a is broken"):
                await session.run.perform("a", work)
        await waiting()


async def test_optional_part_of_a_replacement(clock):
    """A call in whose place several tasks stand fails with the one of them that fails, even an optional one."""
    parts = Task(id="one"), Task(id="two", optional=True, metadata={"fails": True})
    engine = make_engine(
        lambda request: (
            [alternative(ReplaceTask(task_id="a", tasks=parts))]
            if request.triggers[0].tasks == ("a",)
            else []
        ),
        clock=clock,
    )
    async with engine.session(plan(Task(id="a", metadata={"fails": True}))) as session:
        with pytest.raises(OSError, match="two is broken"):
            await session.run.perform("a", work)


@pytest.mark.parametrize("cause", ["the gate fails", "the run was asked"])
async def test_question_that_nobody_is_asked(clock, cause):
    """A call ends with the question that keeps it, whatever that is about, if it was put to nobody or the gate has failed."""
    gate = (
        ScriptedGate([raises(ConnectionError("nobody is there"), after=5)])
        if cause == "the gate fails"
        else None
    )
    engine = asking(clock, gate=gate)
    async with engine.session(
        plan(Task(id="a", metadata={"fails": True}), Task(id="b"))
    ) as session:
        if cause == "the run was asked":
            session.run.request_replan("do it otherwise", tasks=["b"])
            await anyio.wait_all_tasks_blocked()
        with pytest.raises(NeedsHuman) as raised:
            await session.run.perform("b" if cause == "the run was asked" else "a", work)
        assert [question.id for question in engine.pending()] == list(raised.value.questions)


async def test_session_without_the_gate(clock):
    """A session may do without the gate of its engine: then it asks as one of an engine that has none."""
    gate = ScriptedGate()
    engine = asking(clock, gate=gate)
    stated = plan(Task(id="a", metadata={"fails": True}))
    async with engine.session(stated, gate=False) as session:
        with pytest.raises(NeedsHuman):
            await session.run.perform("a", work)
        assert gate.questions == []


async def test_unavailable_and_put_off(clock):
    """A call whose tool is not there is not tried again before the time that was decided; its condition comes first."""
    engine = make_engine(
        lambda request: [alternative(RetryTask(task_id=request.triggers[0].tasks[0], delay=10))],
        clock=clock,
    )
    tool = ToolSpec(name="load", available=False)
    tasks = Task(id="a", tool="load"), Task(id="b", tool="load", when="context.wanted")
    stated = plan(*tasks, tools=[tool], context={"wanted": False})
    async with engine.session(stated) as session:
        with pytest.raises(CallFailed, match="'load' is unavailable"):
            await session.run.perform("a", work)
        with pytest.raises(CallSkipped, match=r"its condition 'context.wanted' does not hold"):
            await session.run.perform("b", work)
        tries = [r.at for r in session.run.records() if isinstance(r.body, AttemptStarted)]
    assert all(later - earlier >= 10 for earlier, later in pairwise(tries))


@pytest.mark.parametrize("stop", ["pause", "budget"])
async def test_call_within_a_call(clock, stop):
    """A call within the work of another is refused once the run is to stop, which waits for that work."""

    async def outer() -> str:
        if stop == "pause":
            session.run.pause("enough")
        else:
            session.run.charge(Usage(calls=2))
        with pytest.raises(NotRunning, match=r"to pause|budget"):
            await session.invoke("inner", {})
        return "done"

    stated = plan(budget={"calls": 1})
    async with make_engine(clock=clock).session(stated, tools=[outer]) as session:
        assert await session.call(outer) == "done"
    assert session.run.result.status == ("paused" if stop == "pause" else "aborted")


@pytest.mark.parametrize("facts", [None, []], ids=["facts unknown", "facts stated"])
async def test_call_whose_effects_are_there(clock, facts):
    """A call is not left out because the facts that it adds hold already: its caller waits for a result."""

    async def execute(name: str, arguments: Mapping[str, object]) -> object:
        if name == "search":
            raise LookupError(name)
        return name

    tools = [
        ToolSpec(name=name, capability="search", adds=["found(it)"])
        for name in ("search", "archive")
    ]
    async with make_engine("repair", clock=clock).session(
        plan(facts=facts), tools=tools
    ) as session:
        assert await session.invoke("archive", {}, execute=execute) == "archive"
        assert await session.invoke("search", {}, execute=execute) == "archive"
