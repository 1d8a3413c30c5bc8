"""Bridges over facts in large plans: what they take."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest

from replanning import ReplanRequest, Task
from replanning.journal import ContextChanged, FactsObserved
from replanning.live import PlanView
from replanning.providers._planner import bridge
from replanning.providers._planner.bridge import find_repairs, repair_problems
from replanning.providers._planner.domain import Domain, reachable_actions
from replanning.providers._planner.search import solve
from tests.support.live import JournaledPlan, journaled, tool

LACKING = "part(600)"


def line(length: int) -> JournaledPlan:
    """Steps one after another, of which each needs something of its own that is there from the start."""
    go = tool("go", requires=["at({a})", "way({a},{b})", "part({b})"], adds=["at({b})"], removes=["at({a})"])
    steps = [
        Task(id=f"t{n}", tool="go", arguments={"a": str(n), "b": str(n + 1)}, depends_on=(f"t{n - 1}",) if n else ())
        for n in range(length)
    ]
    own = [fact for n in range(length) for fact in (f"way({n},{n + 1})", f"part({n + 1})")]
    make = tool("make", parameters={"b": "any"}, adds=["part({b})"])
    return journaled(*steps, tools=[go, make], facts=["at(0)", *own])


def trouble(length: int, lacking: str = LACKING) -> ReplanRequest:
    """Request after the loss of a fact that one step needs."""
    plan = line(length)
    plan.fold(FactsObserved((), (lacking,)))
    trigger = ContextChanged(tasks=tuple(f"t{n}" for n in range(length)), facts=(lacking,))
    return ReplanRequest((trigger,), PlanView(plan.live), 3, 1e12)


async def turns_during(call: Callable[[], Awaitable[object]]) -> int:
    """How often the event loop has its turn during a call."""
    turns = 0

    async def beat() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(beat)
        await anyio.lowlevel.checkpoint()
        before = turns
        await call()
        found = turns - before
        group.cancel_scope.cancel()
    return found


@pytest.mark.parametrize("length", [700, 1_100])
async def test_turns_of_the_event_loop(length: int) -> None:
    """Of a large plan, what is to be solved is worked out in several turns of the event loop; of a small one in one."""
    request = trouble(length)

    async def pose() -> None:
        assert [problem async for problem in repair_problems(request)]

    turns = await turns_during(pose)
    assert turns == 0 if length < 1_000 else turns >= 5


async def test_event_loop_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a search goes on beyond what is done at once, the event loop has its turns."""
    monkeypatch.setattr(bridge, "MAX_INLINE_NODES", 0)
    assert await turns_during(partial(find_repairs, trouble(700))) > 10


@pytest.mark.parametrize("first", ["at({a})", "part({b})"])
def test_uses_of_tools(first: str) -> None:
    """The work of finding the uses of a tool grows with the plan, not with its square, where its needs hang together."""

    def calls(length: int) -> int:
        counted: list[str] = []
        needs = dict.fromkeys([first, "at({a})", "part({b})", "way({a},{b})"])
        go = tool("go", requires=list(needs), adds=["at({b})"])
        facts = [f for n in range(length) for f in (f"at({n})", f"part({n + 1})", f"way({n},{n + 1})")]
        sys.setprofile(lambda frame, event, argument: counted.append(event) if event == "call" else None)
        found = reachable_actions(facts, Domain((go,), {}, {}))
        sys.setprofile(None)
        assert len(found.actions) == length
        return len(counted)

    assert calls(400) < 2.5 * calls(200)


@pytest.mark.parametrize(("length", "limit"), [(200, 2.5e6), pytest.param(800, 10e6, marks=pytest.mark.deep)])
async def test_memory(length: int, limit: float) -> None:
    """The memory that a search takes grows with the plan, not with its square, however much each step needs."""
    (problem,) = [problem async for problem in repair_problems(trouble(length, f"part({length // 2})"))]
    tracemalloc.start()
    solution = solve(problem)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    (action,) = solution.repairs[0].actions
    assert action.adds == (f"part({length // 2})",)
    assert peak < limit


async def test_search_that_is_not_wanted_any_more() -> None:
    """A long search in a thread ends when whoever asked has been cancelled, such as at the deadline of the provider."""
    looked = 0

    with anyio.CancelScope() as scope:

        def look() -> None:
            nonlocal looked
            looked += 1
            anyio.from_thread.run_sync(scope.cancel)
            anyio.from_thread.check_cancelled()

        (problem,) = [problem async for problem in repair_problems(trouble(700))]
        await anyio.to_thread.run_sync(partial(solve, problem, check_cancelled=look))
    assert scope.cancelled_caught
    assert looked == 1
