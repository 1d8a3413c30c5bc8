"""Bridges over facts in large plans: what they take."""

from __future__ import annotations

import tracemalloc

from replanning import ReplanRequest, Task
from replanning.events import ContextChanged, FactsObserved
from replanning.interfaces import PlanView
from replanning.providers._bridge import problems
from replanning.providers._solve import solve
from tests.live_parts import Kept, kept, tool

LENGTH = 800
LACKING = "part(600)"


def line() -> Kept:
    """Steps one after another, of which each needs something of its own that is there from the start."""
    go = tool("go", requires=["at({a})", "way({a},{b})", "part({b})"], adds=["at({b})"], removes=["at({a})"])
    steps = [
        Task(id=f"t{n}", tool="go", arguments={"a": str(n), "b": str(n + 1)}, depends_on=(f"t{n - 1}",) if n else ())
        for n in range(LENGTH)
    ]
    own = [fact for n in range(LENGTH) for fact in (f"way({n},{n + 1})", f"part({n + 1})")]
    make = tool("make", parameters={"b": "any"}, adds=["part({b})"])
    return kept(*steps, tools=[go, make], facts=["at(0)", *own])


def test_memory() -> None:
    """The memory that a search takes grows with the plan, not with its square, however much each step needs."""
    plan = line()
    plan.fold(FactsObserved((), (LACKING,)))
    trigger = ContextChanged(tasks=tuple(f"t{n}" for n in range(LENGTH)), facts=(LACKING,))
    (problem,) = problems(ReplanRequest((trigger,), PlanView(plan.live), 3, 1e12))
    tracemalloc.start()
    solution = solve(problem)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    (action,) = solution.ways[0].actions
    assert action.adds == (LACKING,)
    assert peak < 10e6
