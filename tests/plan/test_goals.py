"""Another goal at run time: when the plan is repaired for it, what is left alone, and where it can be seen."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from replanning import Plan, PlanError, PlanRun, Task
from replanning.changes import AddTask
from replanning.decision import AlternativeProvider
from replanning.errors import NotRunning
from replanning.history import (
    ReplanHistory,
    export_history,
    import_history,
    markdown_report,
    run_status,
    text_report,
)
from replanning.journal import (
    GoalChanged,
    InboxMessage,
    MemoryStore,
    QuestionAsked,
    RunStore,
    SqliteStore,
    TriggerFired,
)
from replanning.plan import RunId
from replanning.testing import VirtualClock
from tests.support.cli import answer
from tests.support.runs import Proposer, alternative, bodies, make_engine, perform
from tests.support.world import Event, Outcome, play

HOUSE = """
goal: {objective: a house, facts: [walls, garden]}
tools:
  - {name: lay, adds: [base]}
  - {name: build, requires: [base], adds: [walls]}
  - {name: plant, adds: [garden]}
  - {name: cover, requires: [walls], adds: [roof]}
  - {name: pave, requires: [garden], adds: [terrace], removes: [garden]}
facts: []
tasks:
  - {id: lay, tool: lay}
  - {id: build, tool: build, depends_on: [lay]}
  - {id: plant, tool: plant}
"""


@asynccontextmanager
async def opened(
    text: str = HOUSE, provider: AlternativeProvider | str = "repair", store: RunStore | None = None
) -> AsyncIterator[PlanRun]:
    """A run of a plan that a provider repairs."""
    async with VirtualClock() as clock:
        engine = make_engine(provider, clock=clock, store=store)
        async with engine.open(Plan.parse(text), run_id="r") as run:
            yield run


async def outcome_of(text: str, *events: Event) -> Outcome:
    """How a run ends whose goal is changed."""
    async with VirtualClock() as clock:
        engine = make_engine("repair", clock=clock, cooldown=0)
        return await play(Plan.parse(text), engine, events)


@pytest.mark.parametrize("goal", [["walls"], ["garden", "walls"], ["base"], []])
async def test_no_intervention(goal):
    """A goal that what is left of the plan reaches as well causes no replanning."""
    outcome = await outcome_of(HOUSE, Event(1, goal=goal))
    assert (outcome.status, outcome.triggers, outcome.added) == ("succeeded", [], [])
    assert len(outcome.done) == 3


async def test_branches_stay_parallel():
    """A branch that has nothing to do with the new goal stays as it is, and is handed out beside the new tasks."""
    async with opened() as run:
        workers = run.ready(), run.ready()
        lay, plant = [await anext(worker) for worker in workers]
        async with run.attempt(plant):
            async with run.attempt(lay):
                run.change_goal(facts=["roof", "garden"])
                await anyio.wait_all_tasks_blocked()
            for tool in ("build", "cover"):
                task = await anext(workers[0])
                async with run.attempt(task):
                    assert task.tool == tool
    assert run.plan.task("plant") == Plan.parse(HOUSE).task("plant")
    assert run.plan.task("cover~2").depends_on == ("build",)
    assert run.result.status == "succeeded"


async def test_what_would_spoil_it_waits():
    """A task that takes away what the new goal needs is not handed out while a way is looked for, and then left out."""
    text = HOUSE.replace(
        "{id: plant, tool: plant}",
        "{id: plant, tool: plant}\n  - {id: pave, tool: pave, depends_on: [plant]}",
    )
    text = text.replace("facts: [walls, garden]", "facts: [walls, terrace]")
    text = text.replace("name: plant, adds", "name: plant, requires: [seed], removes: [seed], adds")
    outcome = await outcome_of(
        text.replace("facts: []", "facts: [seed]"), Event(2, goal=["walls", "garden"])
    )
    assert (outcome.status, outcome.reached, outcome.dropped) == ("succeeded", True, ["pave"])
    assert "pave" not in outcome.done


async def test_reached_already():
    """A run that may stop when its goal is reached stops as soon as the goal is changed to what holds."""
    store = MemoryStore()
    async with opened(store=store) as run:
        async with run.attempt(await anext(run.ready())):
            pass
        run.change_goal(facts=["base"], stop_when_reached=True)
        assert [task async for task in run.ready()] == []
    assert (run.result.status, run.result.reason) == ("succeeded", "the goal was reached early")
    assert bodies(store, run.id, TriggerFired) == []


async def test_in_words_alone():
    """A goal that no facts state makes providers think about the plan when its words change, and is kept otherwise."""
    provider = Proposer(
        lambda request: [alternative(AddTask(task=Task(id="paint", depends_on=("build",))))]
    )
    async with opened("{goal: {objective: a house}, tasks: [{id: build}]}", provider) as run:
        run.change_goal(success_criteria=["it is red"], reason="taste", by="ada")
        run.change_goal(stop_when_reached=True)
        await perform(run)
    assert run.result.status == "succeeded"
    assert [request.triggers[0].kind for request in provider.requests] == ["context-changed"]
    assert run.plan.goal.success_criteria == ("it is red",)
    assert run.live.entry(run.plan.tasks[-1].id).state == "DONE"


async def test_facts_not_stated():
    """Where a plan does not state its facts, a new goal that no task brings about is noticed and repaired as well."""
    text = """
goal: {objective: pages}
tools: [{name: fetch, produces: [pages]}, {name: sum-up, needs: [pages], produces: [summary]}]
tasks: [{id: fetch, tool: fetch}]
"""
    outcome = await outcome_of(text, Event(0, goal=["artifact(summary)"]))
    assert (outcome.status, [outcome.tools[task] for task in outcome.done]) == (
        "succeeded",
        ["fetch", "sum-up"],
    )
    assert (await outcome_of(text, Event(0, goal=["artifact(pages)"]))).triggers == []


async def test_changed_back():
    """A goal that is changed back before a way was looked for leaves the plan as it was."""
    store = MemoryStore()
    async with opened(store=store) as run:
        run.change_goal(facts=["roof"])
        run.change_goal(facts=["walls", "garden"])
        await perform(run)
    assert (run.result.status, run.result.revisions) == ("succeeded", ())
    told = [body.kind for body in bodies(store, run.id) if body.kind.startswith("trigger")]
    assert told == ["trigger-fired", "trigger-dropped"]


async def test_beside_a_question():
    """A new goal is repaired while something else waits for a person."""
    plant = "{id: plant, tool: plant}"
    text = HOUSE.replace(plant, f"{plant}\n  - {{id: ask, tool: ask, fallbacks: [{{tool: tell}}]}}")
    text = text.replace("tools:\n", "tools:\n  - {name: ask}\n  - {name: tell, dangerous: true}\n")
    store = MemoryStore()
    async with opened(text, store=store) as run:
        async for task in run.ready():
            async with run.attempt(task):
                if task.tool == "ask":
                    raise ValueError("nobody answers")
                if task.tool == "build":
                    run.change_goal(facts=["roof", "garden"])
    assert len(bodies(store, run.id, QuestionAsked)) == 1
    assert run.result.status == "needs_human"
    assert "roof" in run.live.world.facts


# What it looks like


async def test_on_record_and_reported():
    """A change of the goal is on record with why and by whom; view, trigger, history, export and status tell of it."""
    store = MemoryStore()
    async with opened(store=store) as run:
        run.change_goal(
            objective="a house\nwith a roof", facts=["roof", "garden"], reason="it rains", by="ada"
        )
        assert run.view.goal.facts == run.plan.goal.facts == ("roof", "garden")
        await perform(run)
    (body,) = bodies(store, run.id, GoalChanged)
    assert (body.changed, body.reason, body.by) == (("objective", "facts"), "it rains", "ada")
    (fired,) = bodies(store, run.id, TriggerFired)
    assert (fired.trigger.goal, fired.trigger.facts) == (True, ("roof",))
    history = ReplanHistory.of(store, run.id)
    assert history.plan_at(1).goal == body.goal
    for text in (text_report(history), markdown_report(history).replace("\\", "")):
        assert "objective: a house with a roof; facts: roof, garden" in text
        assert "it rains" in text
    assert 'goal.facts: ["walls", "garden"] → ["roof", "garden"]' in str(history.diff(0, 1))
    imported = import_history(export_history(history))
    assert list(imported.goal_edits) == list(history.goal_edits)
    (told,) = json.loads(export_history(history))["goals"]
    assert (told["by"], told["changed"]) == ("ada", ["objective", "facts"])
    assert run_status(store, next(iter(store.runs())), 0.0).objective == "a house\nwith a roof"


async def test_resumed():
    """A run that is taken up again, and a fork of it, know the new goal, and make good what was not considered any more."""
    store = MemoryStore()
    async with VirtualClock() as clock:
        engine = make_engine("repair", clock=clock, store=store)
        async with engine.open(Plan.parse(HOUSE)) as run:
            run.change_goal(facts=["roof", "garden"])
            run.pause()
        for again in (run.id, None):
            name = again or engine.fork(run.id, 1)
            async with engine.resume(name) as later:
                assert later.view.goal.facts == ("roof", "garden")
                await perform(later)
            assert later.result.status == "succeeded"
            assert "roof" in later.live.world.facts


@pytest.mark.parametrize(
    ("fields", "places"),
    [
        ({"facts": [""]}, ["Goal.facts[0]"]),
        ({"facts": "roof"}, ["Goal.facts"]),
        (
            {"objective": "\x00", "success_criteria": [5]},
            ["Goal.objective", "Goal.success_criteria[0]"],
        ),
    ],
)
async def test_no_goal(fields, places):
    """What cannot be a goal is refused with every place, and nothing has changed."""
    store = MemoryStore()
    async with opened(store=store) as run:
        with pytest.raises(PlanError) as caught:
            run.change_goal(**fields)
        assert [problem.place for problem in caught.value.problems] == places
        assert run.view.goal == Plan.parse(HOUSE).goal
        run.change_goal(facts=["walls", " garden"])
        run.pause()
    assert bodies(store, run.id, GoalChanged) == []
    with pytest.raises(NotRunning, match="paused"):
        run.change_goal(facts=["roof"])


# From elsewhere


async def test_asked_for_from_elsewhere(tmp_path):
    """Another process asks a run for another goal through the store; a request that is no goal is recorded and passed over."""
    path = tmp_path / "history.db"
    store = SqliteStore(path)
    async with VirtualClock() as clock:
        engine = make_engine("repair", clock=clock, store=store)
        async with engine.open(Plan.parse(HOUSE), run_id="r") as run:
            run.pause()
        store.post(
            RunId("r"), InboxMessage("request", 0.0, "eve", {"reason": "no", "goal": {"facts": 3}})
        )
        asked = answer(
            tmp_path,
            "request",
            "r",
            "it rains",
            "--goal-fact",
            "roof",
            "--by",
            "ada",
            "--store",
            path,
        )
        assert (asked["run"], asked["taken"]) == ("r", False)
        async with engine.resume("r") as run:
            await perform(run)
    assert (run.result.status, run.plan.goal.facts) == ("succeeded", ("roof",))
    recorded = bodies(store, "r")
    assert [body.by for body in recorded if isinstance(body, GoalChanged)] == ["ada"]
    assert [body.where for body in recorded if body.kind == "contained"] == ["a request of eve"]
    assert "it rains" in answer(tmp_path, "history", "r", "--store", path)["goals"][0]["reason"]
    store.close()
