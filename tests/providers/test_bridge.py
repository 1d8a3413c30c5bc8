"""Bridges over facts: what is changed and what is left alone, substitution chains, verdicts, and the event loop."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from replanning import Alternative, Plan, ReplanningEngine, ReplanRequest, Settings, ToolSpec, open_run
from replanning.changes import AddTask, ModifyTask, RemoveTask
from replanning.journal import ContextChanged
from replanning.live import PlanView
from replanning.providers._planner.domain import Domain, reachable_actions
from replanning.providers._planner.search import Target, find_cheapest_path
from replanning.providers.repair import RepairProvider
from replanning.testing import ScriptedExecutor, VirtualClock, raises, returns
from tests.support.runs import environment
from tests.support.world import Event, Outcome, play

RESEARCH = """
goal: {objective: a report}
tools:
  - {name: search, parameters: {topic: string}, produces: [links]}
  - {name: fetch, needs: [links], produces: [pages]}
  - {name: crawl, cost: 4, needs: [links], produces: [dump]}
  - {name: split, cost: 1, needs: [dump], produces: [pages]}
  - {name: archive, cost: 9, needs: [links], produces: [pages]}
  - {name: summarise, needs: [pages], produces: [summary]}
  - {name: read-all, needs: [dump], produces: [summary]}
  - {name: write, needs: [summary, style], produces: [report]}
  - {name: print}
tasks:
  - {id: search, tool: search, arguments: {topic: bees}}
  - {id: fetch, tool: fetch, depends_on: [search]}
  - {id: summarise, tool: summarise, depends_on: [fetch]}
  - {id: write, tool: write, depends_on: [summarise]}
  - {id: print, tool: print, depends_on: [write]}
"""


async def outcome_of(plan: str, *events: Event) -> Outcome:
    """Run a plan in a world in which these events happen."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine(["repair"], environment=environment(clock), settings=Settings(cooldown=0))
        return await play(Plan.parse(plan), engine, events)


@pytest.mark.parametrize(
    ("down", "used"),
    [
        (["fetch"], ["search", "archive", "summarise", "write", "print"]),
        (["fetch", "archive"], ["search", "crawl", "split", "summarise", "write", "print"]),
        (["summarise"], ["search", "fetch", "crawl", "read-all", "write", "print"]),
        (["fetch", "archive", "split"], ["search", "crawl", "read-all", "write", "print"]),
    ],
)
async def test_substitution_chains(down: list[str], used: list[str]) -> None:
    """If a tool goes down, other tools, or a chain of them, achieve its effects."""
    for after in (0, 1):
        outcome = await outcome_of(RESEARCH, Event(after, down=down))
        assert (outcome.status, outcome.inapplicable) == ("succeeded", []), after
        assert [outcome.tools[task] for task in outcome.done] == used


@pytest.mark.parametrize("down", [["search"], ["write"], ["summarise", "crawl"], ["fetch", "archive", "crawl"]])
async def test_outage_without_substitute(down: list[str]) -> None:
    """If no chain achieves the same, the verdict is proven, and the run fails."""
    outcome = await outcome_of(RESEARCH, Event(0, down=down))
    assert outcome.status in ("failed", "needs_human")
    assert any(verdict.startswith("proven-unreachable") for verdict in outcome.verdicts)
    assert outcome.added == []


async def test_failing_tool_is_not_used_again() -> None:
    """A use of a tool that has failed is not proposed again, and its substitute stands in its lineage."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine(["repair"], environment=environment(clock))
        gone = raises(ValueError("gone"))
        work = ScriptedExecutor({"fetch": gone, "archive": gone, "split": returns(7)}, clock=clock)
        result = await engine.execute(Plan.parse(RESEARCH), work)
    assert (result.status, result.outputs["fetch"]) == ("succeeded", 7)


TWO = """
goal: {objective: both, facts: [done(a), done(b)]}
facts: [raw(a), raw(b)]
objects: {a: thing, b: thing}
tools:
  - {name: cut, parameters: {x: thing}, requires: ["raw({x})"], adds: ["cut({x})"], removes: ["raw({x})"]}
  - {name: glue, parameters: {x: thing}, requires: ["cut({x})", "warm({x})"], adds: ["done({x})"]}
  - {name: heat, parameters: {x: thing}, adds: ["warm({x})"]}
  - {name: pack, requires: [done(a), done(b)], adds: [packed]}
tasks:
  - {id: heat-a, tool: heat, arguments: {x: a}}
  - {id: cut-a, tool: cut, arguments: {x: a}, depends_on: [heat-a]}
  - {id: glue-a, tool: glue, arguments: {x: a}, depends_on: [cut-a]}
  - {id: heat-b, tool: heat, arguments: {x: b}}
  - {id: cut-b, tool: cut, arguments: {x: b}, depends_on: [heat-b]}
  - {id: glue-b, tool: glue, arguments: {x: b}, depends_on: [cut-b]}
  - {id: pack, tool: pack, depends_on: [glue-a, glue-b]}
"""


async def proposals(plan: str, *done: str, ceased: list[str]) -> tuple[Sequence[Alternative], PlanView]:
    """Alternatives of the provider once these tasks are done and these facts have ceased."""
    async with open_run(Plan.parse(plan)) as run:
        for task in done:
            run.succeeded(run.started(task))
        run.observe(ceased=ceased)
        view = PlanView(run.live)
        standing = view.strips_problem().feasibility()
        tasks = view.strips_problem().tasks_related_to_stuck(standing)
        trigger = ContextChanged(tasks=tasks, facts=standing.unmet_facts())
        found = await RepairProvider().propose(ReplanRequest((trigger,), view, 3, 1e12))
        run.pause()
        return found, view


async def test_other_branches_stay_as_they_are() -> None:
    """A repair of one branch names no task of another, which goes on beside it."""
    found, _ = await proposals(TWO, "heat-a", "cut-a", ceased=["warm(a)"])
    (first, *_) = found
    (change,) = first.changes
    assert isinstance(change, AddTask)
    assert (change.task.tool, change.task.arguments, change.before) == ("heat", {"x": "a"}, ("glue-a",))
    for alternative in found:
        assert not any(getattr(change, "task_id", "").endswith("-b") for change in alternative.changes)


async def test_both_branches_at_once() -> None:
    """Trouble in two branches is repaired together, each by changes of its own."""
    (first, *_), _ = await proposals(TWO, "heat-a", "heat-b", ceased=["warm(a)", "warm(b)"])
    added = [change.task.arguments for change in first.changes if isinstance(change, AddTask)]
    assert added == [{"x": "a"}, {"x": "b"}]


async def test_superfluous_tasks_go() -> None:
    """Effects that came about by themselves are not repeated: their tasks go, and their dependents continue."""
    plan = TWO.replace("requires: [done(a), done(b)]", "requires: [done(a), done(b), quiet]")
    async with open_run(Plan.parse(plan.replace("facts: [raw(a), raw(b)]", "facts: [raw(a), raw(b), quiet]"))) as run:
        run.succeeded(run.started("heat-a"))
        run.observe(holds=["done(a)"], ceased=["raw(a)", "warm(a)"])
        view = PlanView(run.live)
        trigger = ContextChanged(tasks=("cut-a", "glue-a"), facts=("raw(a)",))
        first = (await RepairProvider().propose(ReplanRequest((trigger,), view, 3, 1e12)))[0]
        assert [change.task_id for change in first.changes if isinstance(change, RemoveTask)] == ["cut-a", "glue-a"]
        (rest,) = [change for change in first.changes if isinstance(change, ModifyTask)]
        assert (rest.task_id, rest.fields) == ("pack", {"depends_on": ["glue-b", "heat-a"]})
        run.live.apply(first.changes)
        assert PlanView(run.live).strips_problem().feasibility().valid
        run.pause()


CHOICES = """
goal: {objective: go, facts: [there]}
facts: [here, path]
tools:
  - {name: walk, cost: 1, requires: [here, path], adds: [half]}
  - {name: walk-on, cost: 1, requires: [half], adds: [there]}
  - {name: clear, cost: 50, adds: [path]}
  - {name: detour, cost: 2, requires: [here], adds: [around]}
  - {name: detour-on, cost: 2, requires: [around], adds: [there]}
tasks:
  - {id: one, tool: walk}
  - {id: two, tool: walk-on, depends_on: [one]}
"""


async def test_distinct_ways() -> None:
    """The repair with the fewest changes, the cheapest, and the plan anew stand beside one another with their costs."""
    found, _ = await proposals(CHOICES, ceased=["path"])
    assert [alternative.reason.split(":")[0] for alternative in found] == [
        "repair with the fewest changes",
        "repair at the least cost",
    ]
    assert [alternative.expected_cost for alternative in found] == [50, 4]
    assert [type(change) for change in found[0].changes] == [AddTask]


@pytest.mark.parametrize("bound", [1, 5, 40])
def test_bounds_hold(bound: int) -> None:
    """A search looks at no more states than it may, and then says that it does not know."""
    step = ToolSpec(name="step", requires=("at({a})", "next({a},{b})"), adds=("at({b})",), removes=("at({a})",))
    facts = ["at(0)", *(f"next({n},{n + 1})" for n in range(59))]
    actions = reachable_actions(facts, Domain((step,), {}, {})).actions
    found = find_cheapest_path(facts, [Target(frozenset({"at(59)"}), 0)], actions, nodes=bound, greedy_nodes=bound)
    assert found.nodes <= bound + 1
    assert (found.actions, found.conclusive) == (None, False)


# The goal, and facts that do not matter


async def test_goal_that_is_lost_at_the_end() -> None:
    """A goal that is lost when nothing is left to do is reached again by new tasks at the end."""
    plan = CHOICES.replace("[there]", "[there, half]").replace("walk-on, depends_on", "clear, depends_on")
    outcome = await outcome_of(plan, Event(1, ceased=["half"], holds=["around"]))
    assert (outcome.status, outcome.reached) == ("succeeded", True)


async def test_harmless_facts() -> None:
    """Facts that come, or go where nothing needs them any more, cause nothing."""
    outcome = await outcome_of(CHOICES, Event(0, holds=["snow"]), Event(1, ceased=["path", "snow"]))
    assert (outcome.status, outcome.triggers) == ("succeeded", [])
