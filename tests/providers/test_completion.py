"""Proposals of other providers: kept if valid, completed if they are a good beginning, else replaced."""

from __future__ import annotations

from collections.abc import Sequence

from replanning import Alternative, Plan, ReplanningEngine, ReplanRequest, Settings, Task
from replanning.changes import AddTask, PlanChange, RemoveTask, ReplaceTask
from replanning.journal import AlternativesConsidered
from replanning.live import TaskState
from replanning.testing import VirtualClock
from tests.support.runs import Proposer, alternative, environment
from tests.support.world import Event, Outcome, play

TEA = """
goal: {objective: tea, facts: [tea, clean]}
tools:
  - {name: fill, adds: [water]}
  - {name: boil, requires: [water], adds: [hot]}
  - {name: fetch, adds: [leaves]}
  - {name: brew, requires: [hot, leaves], adds: [tea], removes: [clean]}
  - {name: wash, adds: [clean]}
  - {name: stir}
facts: [clean]
tasks:
  - {id: fill, tool: fill}
  - {id: boil, tool: boil, depends_on: [fill]}
  - {id: fetch, tool: fetch}
  - {id: brew, tool: brew, depends_on: [boil, fetch]}
  - {id: wash, tool: wash, depends_on: [brew]}
"""

COLD = Event(2, ceased=["water", "hot"])


def instead(*tools: str) -> Proposer:
    """A model that puts these steps in the place of all that is left."""

    def propose(request: ReplanRequest) -> Sequence[Alternative]:
        left = [task.id for task in request.view.unfinished() if task.state is not TaskState.RUNNING]
        changes: list[PlanChange] = [RemoveTask(task_id=task_id) for task_id in reversed(left)]
        for number, tool in enumerate(tools):
            before = (f"m{number - 1}",) if number else ()
            changes.append(AddTask(task=Task(id=f"m{number}", tool=tool, depends_on=before)))
        return [alternative(*changes, reason="as the model says")]

    return Proposer(propose, "model")


async def outcome_of(*providers: object, events: Sequence[Event] = (COLD,), text: str = TEA) -> Outcome:
    """Run a plan whose water runs dry, with providers beside `repair`."""
    async with VirtualClock() as clock:
        settings = Settings.model_validate({"cooldown": 0, "approval": {"always_for": []}})
        engine = ReplanningEngine([*providers, "repair"], environment=environment(clock), settings=settings)  # type: ignore[list-item]  # providers of every kind
        return await play(Plan.parse(text), engine, events)


def considered(outcome: Outcome) -> AlternativesConsidered:
    """What was considered in the first replan."""
    return next(body for body in outcome.records if isinstance(body, AlternativesConsidered))


async def test_valid_is_kept() -> None:
    """A proposal that can be carried out is taken as it is."""
    outcome = await outcome_of(instead("fill", "boil", "fetch", "brew", "stir", "wash"))
    assert outcome.status == "succeeded"
    assert outcome.done[2:] == ["m0", "m1", "m2", "m3", "m4", "m5"]
    assert not any("+" in candidate.alternative.source for candidate in considered(outcome).candidates)


async def test_gap_is_bridged() -> None:
    """A step that cannot be taken is led up to, and the model's other steps are kept."""
    outcome = await outcome_of(instead("boil", "stir", "fetch", "brew", "wash"))
    assert (outcome.status, outcome.reached, outcome.inapplicable) == ("succeeded", True, [])
    assert [outcome.tools[task] for task in outcome.done[2:]] == ["fill", "boil", "stir", "fetch", "brew", "wash"]
    best, *others = considered(outcome).candidates
    assert best.alternative.source == "model+repair"
    assert best.alternative.reason.startswith("as the model says; completed by a repair")
    (rejected,) = [c for c in others if c.alternative.source == "model"]
    assert rejected.rejected.startswith("the plan could not be carried out: task 'm0' needs water")


async def test_beginning_is_gone_on_with() -> None:
    """A proposal that stops short of the goal is gone on with."""
    outcome = await outcome_of(instead("fill", "boil", "fetch"))
    assert [outcome.tools[task] for task in outcome.done[2:]] == ["fill", "boil", "fetch", "brew", "wash"]
    assert considered(outcome).candidates[0].alternative.source == "model+repair"


async def test_wrong_tail_is_left_out() -> None:
    """A completion that leaves out what spoils the goal is one to choose from, ranked like other repairs."""
    text = TEA.replace("{name: wash, adds", "{name: wash, requires: [tea], adds")
    text = text.replace("{name: stir}", "{name: spill, adds: [floor], removes: [tea]}")
    text = text.replace("{name: fetch, adds", "{name: fetch, requires: [once], removes: [once], adds")
    text = text.replace("facts: [clean]", "facts: [clean, once]")
    outcome = await outcome_of(instead("fill", "boil", "fetch", "brew", "wash", "spill"), text=text)
    assert (outcome.status, outcome.reached) == ("succeeded", True)
    (completed,) = [c for c in considered(outcome).candidates if c.alternative.source == "repair+model"]
    assert not completed.rejected
    new = [change.task.tool for change in completed.alternative.changes if isinstance(change, AddTask)]
    assert new == ["fill", "boil", "fetch", "brew", "wash"]


async def test_hopeless_is_replaced() -> None:
    """A proposal of which less would be left than had to be added is not completed; the plan is repaired instead."""
    outcome = await outcome_of(instead("stir"))
    assert outcome.status == "succeeded"
    assert {c.alternative.source for c in considered(outcome).candidates if not c.rejected} == {"repair"}


async def test_sub_plan_is_completed() -> None:
    """A sub-plan that takes the place of a task is completed as well, and stands for that task then."""

    def propose(request: ReplanRequest) -> Sequence[Alternative]:
        parts = (Task(id="again", tool="boil"), Task(id="look", tool="stir", depends_on=("again",)))
        return [alternative(ReplaceTask(task_id="boil", tasks=parts))]

    outcome = await outcome_of(Proposer(propose, "model"), events=[Event(1, ceased=["water"])])
    assert (outcome.status, outcome.reached, outcome.inapplicable) == ("succeeded", True, [])
    assert considered(outcome).candidates[0].alternative.source == "model+repair"
    assert {"again", "look"} <= set(outcome.done)


async def test_failing_completer_is_contained() -> None:
    """A provider that fails at completing is noted, and the others' proposals are used."""

    class Broken(Proposer):
        async def complete(self, request: ReplanRequest, proposed: Alternative, reason: str) -> Alternative | None:
            raise ValueError("no idea")

    outcome = await outcome_of(instead("boil", "fetch"), Broken(lambda request: [], "broken"))
    assert outcome.status == "succeeded"
    assert considered(outcome).notes == ("broken failed: ValueError('no idea')",)
